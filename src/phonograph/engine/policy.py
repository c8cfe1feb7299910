"""When to warm up, record or refuse: the policy of one recorded function.

`Policy.next` decides about each call that no recording can answer, by a table: `RULES`. A rule that fits runs its counters,
each of which may refuse the call; then the rule's step is taken. A refused call runs live, and its reason is reported.

The life of a signature:

- Its first `warmup` calls run live. The next one is recorded.
- After a guard of a recording fails, one call runs live before the next capture: code may run there for the first time.
- It *waits*, that is it runs live for some calls, twice as many each time, where guards fail too often, or where the shelf is
  full; and for some time where attempts have cost too much for what came of them (`budget.py`).
- It is refused after repeated failures of its capture, until the grounds of that refusal change.

Thresholds and waiting times are in `backoff.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ..call.growing_sizes import Growth
from ..call.signature import Call
from ..capture.recording import BEGINS_ANEW, MEMORY
from ..errors import Refusal
from ..options import Options
from ..slots.gradients import GRAD
from ..statistics import Counters
from .backoff import EVER_NEW, FEW_SHAPES, Backoff, Described
from .history import History
from .player import uses
from .profitability import gradients_moved
from .shelf import Shelf

__all__ = ["RULES", "Case", "Policy", "Step"]

ROOM = 8  # live calls of a signature before it may evict a recording that was not played meanwhile
BLOCKED = 6  # recordings of a signature whose outputs may all be held before its calls run live
VAIN = 4  # recordings in turn that nothing but the call which made them has played, before each counts as a change
VARIES = 2  # changes in quick succession, after which numbers in a tensor are read anew in each replay
TURNED = 64  # decisions that are remembered, of one signature


class Step(enum.Enum):
    """Step that is taken for a call that no recording can answer, and that is not refused."""

    WARM_UP = "runs live, on the side stream, observed"
    RECORD = "is captured, and its recording is played"


@dataclass
class Case:
    """A call for which no recording can be played."""

    call: Call
    history: History
    broken: str | None = None
    """Guard that has failed since the last recording or refusal of the signature."""
    blocked: int = 0
    """Recordings that fit, but whose memory holds live outputs."""
    obstructed: bool = False
    """Live outputs remain in the way, though some were moved out of the pool."""
    gone: bool = False
    """The change has run no code of the user's: all gradients are gone, or memory of a recording's own."""


class Policy:
    """Decisions for one function. If `watches_sizes`, growing sizes are detected, and recordings in use are not evicted."""

    def __init__(
        self, backoff: Backoff, options: Options, counters: Counters, shelf: Shelf, described: Described, *,
        watches_sizes: bool = True, is_backward: bool = False,
    ) -> None:  # fmt: skip
        self._backoff, self._options, self._counters = backoff, options, counters
        self._shelf, self._described = shelf, described
        self._watches_sizes, self._is_backward = watches_sizes, is_backward
        self._growth = Growth()

    def reset(self) -> None:
        """Forget sizes of earlier calls."""
        self._growth = Growth()

    # -- the next step

    def case(self, call: Call, history: History, broken: str | None, blocked: int, obstructed: bool = False) -> Case:
        """Describe a call for which no recording can be played."""
        broken = self.broken(history, broken, blocked)
        gone = broken == GRAD and not self._described.marked
        gone = gone and all(player.grads_gone() for player in self._shelf.of(call.key))
        return Case(call, history, broken, blocked, obstructed, gone or broken == MEMORY)

    def broken(self, history: History, broken: str | None, blocked: int) -> str | None:
        """Name the guard that has failed since the signature was recorded or refused."""
        return broken or (history.refused.over if not blocked else None)

    def next(self, case: Case) -> Step:
        """Choose the step of a call that no earlier refusal concerns.

        Raises:
            Refusal: the call runs live.
        """
        for rule in RULES:
            if rule.when(self, case):
                for count in rule.counts:
                    refusal = count(self, case)
                    if refusal is not None:
                        raise refusal
                if rule.step is not None:
                    return rule.step
        raise AssertionError("the last rule fits every call")

    # conditions

    def _always(self, _: Case) -> bool:
        return True

    def _obstructed(self, case: Case) -> bool:
        return case.obstructed

    def _begins_anew(self, case: Case) -> bool:
        return case.broken == BEGINS_ANEW

    def _gradients_move(self, case: Case) -> bool:
        """Whether a trial has moved gradients since they were last found elsewhere: they will be where they were."""
        if case.broken != GRAD:
            return False
        before, case.history.arrivals.moved = case.history.arrivals.moved, gradients_moved()
        return before != case.history.arrivals.moved

    def _is_cold(self, case: Case) -> bool:
        return case.history.arrivals.warm_ups < self._options.warmup

    def _has_raised(self, case: Case) -> bool:
        """Whether the last live call has. What it has read may lead a capture to raise as well, where a call would not."""
        return case.history.live.raised

    def _has_changed(self, case: Case) -> bool:
        """Whether no call has run live since the change. (A failed capture was followed by a live call.)"""
        return self._is_new(case) and not self._went_so(case)

    def _is_new(self, case: Case) -> bool:
        """Whether a guard has failed, in code that may be the user's, since the last live call."""
        if case.broken is None or case.gone or not self._options.warmup:
            return False
        return not (case.history.attempts.failed or (case.broken == GRAD) in case.history.arrivals.live_since)

    def _is_vain(self, case: Case) -> bool:
        """Whether recordings are made in turn without a replay in between. (Two that take turns may each be made anew.)"""
        last = max(self._shelf.of(case.call.key), key=lambda player: player.used, default=None)
        arrivals = case.history.arrivals
        arrivals.vain = arrivals.vain + 1 if last is None or last.played <= 1 else 0
        return arrivals.vain > VAIN

    def _went_so(self, case: Case) -> bool:
        """Whether a decision has changed, and such a call has run live before, however long ago: each tenth step, say, after
        which something else is recorded anew."""
        others = self._other_decisions(case)
        return bool(others) and others <= case.history.arrivals.turned

    def _other_decisions(self, case: Case) -> set[object]:
        """The decisions by which a call goes another way than the recordings."""
        assert case.broken is not None
        return {player.other_decision(case.broken) for player in self._shelf.of(case.call.key)} - {None}

    # what is counted

    def _arrival(self, case: Case) -> Refusal | None:
        """First or second call of a signature. Refuse it if sizes seem to grow from call to call. (That is a guess: with
        ``fallback="error"`` no call fails for it.)"""
        arrivals = case.history.arrivals
        if arrivals.warm_ups and not arrivals.again:
            arrivals.again = True
            self._backoff.novelty.repeats()
        if arrivals.first is not None:
            return None
        arrivals.first, arrivals.moved = next(uses), gradients_moved()
        if not self._watches_sizes or self._options.fallback == "error":
            return None
        refusal = self._growth.of(case.call, self._counters.calls, self._described.named())
        if refusal is not None:
            arrivals.warm_ups += 1
        return self._backoff.expected(refusal)

    def _warm_up(self, case: Case) -> Refusal | None:
        """Warm-up call. Refuse it if nearly every call has a signature of its own."""
        case.history.arrivals.warm_ups += 1
        if case.history.arrivals.warm_ups > 1:
            return None
        named, following = self._described.named(), self._described.following
        return self._backoff.expected(self._backoff.novelty.note(case.call, self._counters.calls, named, following))

    def _attention(self, _: Case) -> None:
        """Stop skipping calls: the next ones are described."""
        self._backoff.rest.doubt()

    def _change(self, case: Case) -> Refusal | None:
        """Failed guard. Refuse the call if guards fail too often."""
        assert case.broken is not None
        return self._backoff.changed(case.broken, case.history, case.call)

    def _live_again(self, case: Case) -> None:
        """Live call after a change: code that runs for the first time must not do so in a dry run.

        Where gradients are gone, no such code runs, and a live call would leave gradients at other addresses. But functions
        marked `live` run while gradients are there. So the two kinds of changes are counted apart."""
        for player in self._shelf.of(case.call.key):
            self._described.following.want(player.recording.table.constants.numbers_changed())
        if case.history.changes.count > VARIES and case.broken is not None:
            self._described.following.varying.add(case.broken)
        arrivals = case.history.arrivals
        arrivals.live_since.add(case.broken == GRAD)
        arrivals.turned = {*(arrivals.turned if len(arrivals.turned) < TURNED else ()), *self._other_decisions(case)}

    def _payment(self, case: Case) -> Refusal | None:
        """Attempt. Refuse it if those before it have cost too much."""
        return self._backoff.pays_for(case.call, case.history, case.broken)

    def _recording(self, case: Case) -> Refusal | None:
        """Capture. Refuse it if the shelf or the pool has no room, or if none is ever replayed: a change that needs no live
        call is counted here."""
        if self._is_new(case) and self._is_vain(case) and (refusal := self._change(case)) is not None:
            return refusal
        case.history.arrivals.live_since.clear()
        case.history.attempts.failed = False
        case.history.capture.gradients_lay_elsewhere += case.broken == GRAD
        return self.no_room(case)

    # -- whether a recording can be kept

    def no_room(self, case: Case) -> Refusal | None:
        """Reason for not recording a call that was warmed up."""
        history, key = case.history, case.call.key
        if case.broken is not None and (case.gone or not self._options.warmup):
            refusal = self._change(case)
            if refusal is not None:
                return refusal
        if self._watches_sizes and not self._shelf.of(key) and not self._shelf.has_room(history.since):
            return self._crowded(history)
        attached = history.capture.attached
        if attached and case.blocked >= self._options.max_recordings:
            return Refusal("more calls than max_recordings wait for their backward, or for a result that it reads and you keep",
                           "raise it, keep a clone of such results, or record the whole sequence")  # fmt: skip
        if not (attached or self._is_backward) and case.blocked > BLOCKED:
            return Refusal("outputs of earlier calls are held in the memory of all its recordings", "drop or clone them")
        return None

    def _crowded(self, history: History) -> Refusal:
        """Let a signature wait: all recordings on the shelf were played since it was last refused."""
        if not history.arrivals.again:
            refusal = Refusal(EVER_NEW, FEW_SHAPES)
        else:
            most, met = self._options.max_recordings, self._backoff.signatures
            refusal = Refusal(f"has more signatures in rotation than max_recordings={most}",
                              f"max_recordings={max(most + 1, met)}, or pad to a few shapes (shapes=)")  # fmt: skip
        history.wait_for(ROOM << history.room.turns, refusal)
        history.room.full_since, history.room.turns = next(uses), history.room.turns + 1
        return refusal


class Rule(NamedTuple):
    """Row of the table."""

    when: Callable[[Policy, Case], bool]
    counts: tuple[Callable[[Policy, Case], Refusal | None], ...]
    """Counters, in order. The first refusal ends the decision."""
    step: Step | None
    """None: go on with the next rule."""


_P = Policy
RULES = (
    Rule(_P._obstructed,     (),                                           Step.WARM_UP),
    Rule(_P._begins_anew,    (_P._change,),                                Step.WARM_UP),  # which mends the recordings
    Rule(_P._always,         (_P._arrival,),                               None),
    Rule(_P._gradients_move, (),                                           Step.WARM_UP),  # in a trial: for a few calls
    Rule(_P._is_cold,        (_P._warm_up, _P._attention),                 Step.WARM_UP),
    Rule(_P._has_raised,     (),                                           Step.WARM_UP),
    Rule(_P._has_changed,    (_P._attention, _P._change, _P._live_again),  Step.WARM_UP),
    Rule(_P._always,         (_P._attention, _P._payment, _P._recording),  Step.RECORD),
)  # fmt: skip
