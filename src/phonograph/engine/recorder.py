"""Capture of a call: a transaction in four phases.

    enter   save the state that the capture may change, choose its memory       prepared.py, transaction.py, clearance.py
    run     run the call inside of a capture of the device                      dry_run.py, devices/
    judge   refuse effects that a replay cannot repeat                          judge.py
    settle  plan the outputs, lease their memory, collect the guards            settle.py

What always holds, and the tests that look:

1. *A capture is a dry run.* The device notes kernels and executes none, so only host state has to be restored. The recording is
   then played for this call: effects happen once. `test_c01_effects_happen_once`
2. *A failed capture leaves nothing behind.* If a phase raises, `undo` restores attributes and containers, `.grad`, random
   states, settings and optimizers as `enter` saved them. `test_c12_the_process_is_as_before`,
   `test_c12_failing_half_way_updates_everything_exactly_as_eager_does`, `test_c12_memory_of_failed_recordings_is_given_back`
3. *All is put back, though one thing cannot be.* Then `NotPutBack` is raised: the call has changed state, and must not run once
   more. `test_c12_all_is_put_back_though_one_thing_cannot_be`, `test_c12_what_a_capture_has_written_cannot_be_put_back`
4. *The exception of a failed capture never reaches the user.* The function runs live then, and what it raises there is the
   user's. `test_c12_what_raises_in_any_function_of_ours`, `test_c12_an_exception_leaves_the_function_recordable`
5. *A refusal after the capture counts as one within it*: `judge` and `settle` are inside of the transaction.
   `test_c12_a_refusal_after_the_capture_leaves_the_gradients_as_they_were`
6. *The transaction reaches to the first play for gradients.* The capture leaves gradient tensors without values; `unplayed`
   puts back the old ones if that play fails. `test_c12_what_fails_before_the_first_play`,
   `test_c12_a_first_play_leaves_its_gradients_all_the_same`
7. *The memory of a failed attempt is free for the next one.* Each attempt follows less than the one before, or knows more.
   `test_c12_memory_of_failed_recordings_is_given_back`
8. *Results that others hold, and other functions, are left alone* by a capture, failed or not.
   `test_c12_held_outputs_survive_a_failed_recording`, `test_c12_the_next_functions_record`

Not handled: Ctrl-C or a lack of memory in the midst of undoing, which ends in `NotPutBack` as well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import ExitStack

from ..autograd.backward import Backward
from ..call.signature import Call
from ..capture.ddp_reducer import Averages
from ..capture.recording import Recording
from ..devices.base import Device
from ..errors import Again, Attached, Decides, Elsewhere, Refusal
from ..guards.followed_numbers import Fixed, Unfollowed
from ..guards.hyperparameters import Dials, probing
from ..guards.reachable import Reach
from ..python.standing import unwound
from ..state.capturable import fit_to_step
from ..values.wording import defined_at, locating
from .capture_terms import Advances, ReadAgain, Request, Terms, Untraced
from .dry_run import DryRun
from .evidence import Evidence
from .followed import give_up
from .judge import Verdict, judge
from .prepared import Prepared
from .settle import Settlement

__all__ = ["SMALL", "Capture", "record"]

SMALL = 64 << 10  # bytes: results up to this size, in all, are copied out of the pool, so that holding them blocks no replay


def record(
    name: str, function: Callable[..., object], call: Call, reach: Reach, device: Device, terms: Terms, unplayed: ExitStack
) -> Recording:
    """Capture a call and return its recording, not yet played. If an attempt fails on its terms, the next one has weaker terms.
    An exception in `unplayed` puts back what the capture has left for the first play.

    Raises:
        Attached: a result has a history, and the terms have no `tracing`.
        Refusal: the call cannot be recorded. All state is as before.
        Overlooked: the reach of the function lacks these names and functions. Find it anew.
        Carries: the call keeps state in further attributes.
        Opens: the call changes objects that have to be flattened by their attributes.
    """
    doubted: dict[object, str] = {}
    while True:  # each attempt is freed before the next
        try:
            with locating(lambda reason: _mentioned_at(reach, reason) or defined_at(function)):
                recording = Capture(Request(name, function, call, reach, device, terms)).recording(unplayed)
            give_up(terms, doubted)
            return recording
        except Untraced as e:
            terms = terms.conceding(follow=e.fewer)
        except Unfollowed as e:
            give_up(terms, e.spots)
            terms = terms.conceding(baked=terms.concessions.baked | e.spots.keys())
        except ReadAgain:
            terms = terms.conceding(retain=True)
        except Averages:
            terms = terms.conceding(averages=True)
        except (Again, Advances):
            continue
        except Refusal as e:
            baked = terms.concessions.baked
            if any(terms.following.may_want(at, baked) for at, _ in e.counts):  # type: ignore[union-attr]
                terms.following.want(e.counts)  # type: ignore[union-attr]
                e.drop_references()
                continue
            followed = terms.following.doubtful() - baked if terms.following is not None else frozenset()
            if not followed or isinstance(e, (Attached, Decides, Elsewhere, Fixed)):
                raise
            e.drop_references()  # perhaps the probes for followed numbers are the cause
            doubted = dict.fromkeys(followed, e.reason)
            terms = terms.conceding(baked=baked | followed)


class Capture:
    """One attempt to record a call. Each phase sets an attribute for the next ones."""

    prepared: Prepared
    evidence: Evidence
    verdict: Verdict
    settlement: Settlement
    dials: Dials | None = None

    def __init__(self, request: Request) -> None:
        self.request = request

    def recording(self, unplayed: ExitStack) -> Recording:
        """Run all phases. Until the recording is played, `unplayed` takes the place of the transaction."""
        try:
            with unwound(), ExitStack() as undo:
                self.enter(undo)
                self.run()
                self.judge()
                self.settle()
                self.prepared.draws()
                unplayed.push(self.prepared.grads.unless_played)
        except Refusal as refusal:
            refusal.decided = self.dials.decided() if self.dials is not None else None
            raise
        return self.settlement.recording()

    def enter(self, undo: ExitStack) -> None:
        """Save the state that the capture may change. `undo` restores it after an exception in any phase."""
        self.prepared = Prepared.of(self.request, undo)

    def run(self) -> None:
        """Run the call inside of a capture, with probes in place of followed numbers."""
        request, prepared = self.request, self.prepared
        follow = request.terms.concessions.follow
        with probing(request.reach, follow, prepared.spots) as dials, fit_to_step(request.reach.optimizers):
            self.dials, dials.given = dials, prepared.numbers
            self.evidence = DryRun(request, prepared, dials).capture(self._copied())

    def judge(self) -> None:
        """Refuse effects that a replay cannot repeat."""
        self.verdict = judge(self.request, self.prepared, self.evidence)

    def settle(self) -> None:
        """Plan the outputs of a replay, and collect its guards."""
        self.settlement = Settlement(self.request, self.prepared, self.evidence, self.verdict)

    def _copied(self) -> float:
        """Bytes of results, in all, that a replay may copy to new memory."""
        if self.request.terms.placement.borrow:
            return 0
        if self.prepared.clearance.copies:
            return math.inf
        # Gradients stay in their place, small ones too, where an optimizer that is recorded beside will find them again.
        return 0 if isinstance(self.request.function, Backward) else SMALL


def _mentioned_at(reach: Reach, reason: str) -> str:
    """Line of the user's code with the name that a reason has in brackets: (retain_grad)."""
    return next(filter(None, map(reach.mentions.read_at, re.findall(r"\((\w+)\)", reason))), "")
