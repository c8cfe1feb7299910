"""Making a recording: a transaction.

    enter   note what the capture may disturb, and choose where it works       prepared.py, transaction.py, clearance.py
    run     run the call inside of a capture of the device                      dry_run.py, devices/
    judge   is all that the call has done what each replay can do again?        judge.py
    settle  plan the outputs, lease their memory, note what is relied on        settle.py

A capture is dry: the device notes what operators would do, and executes nothing. If anything fails, the transaction puts back
what it noted: Python attributes and containers, `.grad`, random states, settings of optimizers. The caller then runs the
function live, which is the only run with effects; the exception of a failed capture never reaches the user, because if the
function itself is at fault the live run raises the same.
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
from ..guards.hyperparameters import probing
from ..guards.reachable import Reach
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

SMALL = 64 << 10  # bytes of results in all that each replay copies to new memory, rather than that they are in the way


def record(name: str, function: Callable[..., object], call: Call, reach: Reach, device: Device, terms: Terms) -> Recording:
    """Capture this call and return its recording, not yet played. An attempt that could not keep its terms is followed by one
    on lower terms.

    Raises:
        Attached: a result is attached, and there is no `tracing`.
        Refusal: it cannot be recorded; everything is as before.
        Overlooked: it has to be looked at again, with these names, and at these functions.
        Carries: it carries state in these attributes as well.
        Opens: it changes objects that have to be taken apart by their attributes.
    """
    doubted: dict[object, str] = {}
    while True:  # what one attempt has made is gone before the next
        try:
            with locating(lambda reason: _mentioned_at(reach, reason) or defined_at(function)):
                recording = Capture(Request(name, function, call, reach, device, terms)).recording()
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
            followed = terms.following.doubtful() - baked if terms.following is not None else frozenset()
            if not followed or isinstance(e, (Attached, Decides, Elsewhere, Fixed)):
                raise
            e.let_go()  # perhaps it is only because of what stood in the place of numbers
            doubted = dict.fromkeys(followed, e.reason)
            terms = terms.conceding(baked=baked | followed)


class Capture:
    """One attempt to record a call. Each phase leaves what the next ones need."""

    prepared: Prepared
    evidence: Evidence
    verdict: Verdict
    settlement: Settlement

    def __init__(self, request: Request) -> None:
        self.request = request

    def recording(self) -> Recording:
        """Go through all phases."""
        with ExitStack() as undo:
            self.enter(undo)
            self.run()
            self.judge()
            self.settle()
        return self.settlement.recording()

    def enter(self, undo: ExitStack) -> None:
        """Note what the capture may disturb: an exception in this or a later phase lets `undo` put it back."""
        self.prepared = Prepared.of(self.request, undo)

    def run(self) -> None:
        """Run the call inside of a capture, with probes in the place of the numbers that are followed."""
        request, prepared = self.request, self.prepared
        follow = request.terms.concessions.follow
        with probing(request.reach, follow, prepared.spots) as dials, fit_to_step(request.reach.optimizers):
            dials.given = prepared.numbers
            self.evidence = DryRun(request, prepared, dials).capture(self._copied())

    def judge(self) -> None:
        """Refuse effects that no replay could have."""
        self.verdict = judge(self.request, self.prepared, self.evidence)

    def settle(self) -> None:
        """Plan what each replay hands out, and note on what it relies."""
        self.settlement = Settlement(self.request, self.prepared, self.evidence, self.verdict)

    def _copied(self) -> float:
        """Bytes of results, in all, up to which each replay copies them to new memory."""
        if self.request.terms.placement.borrow:
            return 0
        if self.prepared.clearance.copies:
            return math.inf
        # Gradients stay in their place, small ones too, where an optimizer that is recorded beside will find them again.
        return 0 if isinstance(self.request.function, Backward) else SMALL


def _mentioned_at(reach: Reach, reason: str) -> str:
    """Where the user's code names what a reason has in brackets: (retain_grad)."""
    return next(filter(None, map(reach.mentions.read_at, re.findall(r"\((\w+)\)", reason))), "")
