"""Capturing a call: a transaction in four phases.

    enter   save the state that the capture may change, choose its memory       prepared.py, transaction.py, clearance.py
    run     run the call inside of a capture of the device                      dry_run.py, devices/
    judge   refuse effects that a replay cannot repeat                          judge.py
    settle  plan the outputs, lease their memory, collect the guards            settle.py

A capture is a dry run: the device notes kernels and executes none. If a phase fails, the transaction restores the state that it
saved: Python attributes and containers, `.grad`, random states, settings of optimizers. The caller then runs the function live,
which is the only run with effects. The exception of a failed capture never reaches the user: where the function itself is at
fault, the live run raises it again.

Gradients that the call leaves stand there from the capture on, and the first play gives them their values. So to them the
transaction reaches up to that (`unplayed`).
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
