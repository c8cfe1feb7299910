"""When a call runs live, and when it is recorded: the policy of one recorded function.

`Policy.next` is asked about each call for which no recording can be played. It goes down `RULES`; the first rule that fits says
what the call does, after it has counted, which may refuse the call. A refused call runs live as well, and its reason is told.

A signature goes this way. Its first `warmup` calls run live; the next is recorded. When something has changed on which its
recordings rely, one more call runs live before the next recording, because code may run there for the first time. It waits
where that happens too often, where a full shelf has no room for it, and where others like it could not be recorded: it runs
live for some calls, twice as many each time. It is given up when captures of it fail again and again, and tried again when
the grounds of that refusal are gone. How long it waits, and what counts as too often: `patience.py`.
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
from ..statistics import Counters
from .history import History
from .patience import Described, Patience
from .player import GRAD, uses
from .profitability import gradients_move
from .shelf import Shelf

__all__ = ["RULES", "Case", "Policy", "Step"]

ROOM = 8  # live calls of one signature, after which it takes the place of a recording that was not played meanwhile
SPARED = 16  # live calls, after which a signature is tried although others like it could not be recorded
BLOCKED = 6  # recordings of one signature that may all be in the way before it runs live: each has memory of its own
UNPLAYED = 4  # times as many recordings as there may be, that nobody has played a second time

_EVER_NEW = "nearly every call has a new signature"
_FEW_SHAPES = "pad to a few shapes, or raise max_recordings"


class Step(enum.Enum):
    """What becomes of a call that no recording can answer, and that is not refused."""

    WARM_UP = "runs live, beside, and shows what a recording needs"
    RECORD = "is recorded, and played from that"


@dataclass
class Case:
    """A call for which no recording can be played."""

    call: Call
    history: History
    broken: str | None = None
    """What has changed since a recording was made of it, or since it was refused."""
    blocked: int = 0
    """Recordings that would fit but for tensors which are held in their memory."""
    obstructed: bool = False
    """Others still hold such tensors, though some were moved out of the way."""
    gone: bool = False
    """The change has run nothing of the user's: all gradients are gone, or memory of a recording's own."""


class Policy:
    """Decides for one function. `watches_sizes`: sizes that grow are noticed, and recordings that are played keep their
    places."""

    def __init__(
        self, patience: Patience, options: Options, counters: Counters, shelf: Shelf, described: Described, *,
        watches_sizes: bool = True, is_backward: bool = False,
    ) -> None:  # fmt: skip
        self._patience, self._options, self._counters = patience, options, counters
        self._shelf, self._described = shelf, described
        self._watches_sizes, self._is_backward = watches_sizes, is_backward
        self._growth = Growth()

    def reset(self) -> None:
        """Forget everything that was learned."""
        self._growth = Growth()

    # -- the next step

    def case(self, call: Call, history: History, broken: str | None, blocked: int, obstructed: bool = False) -> Case:
        """A call for which no recording can be played; `broken`: what has changed since one was made."""
        broken = self.broken(history, broken, blocked)
        gone = broken == GRAD and not self._described.marked
        gone = gone and all(player.grads_gone() for player in self._shelf.of(call.key))
        return Case(call, history, broken, blocked, obstructed, gone or broken == MEMORY)

    def broken(self, history: History, broken: str | None, blocked: int) -> str | None:
        """What has changed since a call was recorded, or refused."""
        return broken or (history.refused.over if not blocked else None)

    def next(self, case: Case) -> Step:
        """What a call does that does not run live for a refusal that stands.

        Raises:
            Refusal: it runs live.
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
        return case.broken == GRAD and gradients_move()

    def _is_cold(self, case: Case) -> bool:
        return case.history.arrivals.warm_ups < self._options.warmup

    def _has_changed(self, case: Case) -> bool:
        """Whether what has changed was not yet seen to run live. (A failed capture was followed by a live call.)"""
        seen = case.history.attempts.failed or (case.broken == GRAD) in case.history.arrivals.live_since
        return case.broken is not None and not (seen or case.gone) and self._options.warmup > 0

    # what is counted

    def _arrival(self, case: Case) -> Refusal | None:
        """The first or second call of a signature: perhaps its sizes grow from call to call. (That is a guess, for which no
        call is to fail: these sizes may come again.)"""
        arrivals = case.history.arrivals
        if arrivals.warm_ups and not arrivals.again:
            arrivals.again = True
            self._patience.novelty.repeats()
        if arrivals.first is not None:
            return None
        arrivals.first = next(uses)
        if not self._watches_sizes or self._options.fallback == "error":
            return None
        refusal = self._growth.of(case.call, self._counters.calls, self._described.named())
        if refusal is not None:
            arrivals.warm_ups += 1
        return self._patience.expected(refusal)

    def _likeness(self, case: Case) -> Refusal | None:
        """A signature of which nothing is known yet: perhaps others like it could not be recorded, one after the other."""
        history = case.history
        known = history.wait.spared or history.attempts.tried or history.attempts.failures or history.refused.over
        if known or self._shelf.of(case.call.key) or self._described.marked or self._options.fallback != "live":
            return None
        refusal = self._patience.alike.expected(case.call)
        if refusal is not None:
            history.wait_for(SPARED, refusal, spared=True)
        return self._patience.expected(refusal)

    def _warm_up(self, case: Case) -> Refusal | None:
        """A warm-up call: perhaps nearly every call has a signature of its own."""
        case.history.arrivals.warm_ups += 1
        if case.history.arrivals.warm_ups > 1:
            return None
        named, following = self._described.named(), self._described.following
        return self._patience.expected(self._patience.novelty.note(case.call, self._counters.calls, named, following))

    def _attention(self, _: Case) -> None:
        """Something becomes of this call: the next ones are looked at."""
        self._patience.rest.doubt()

    def _change(self, case: Case) -> Refusal | None:
        """A change of what a recording relies on: perhaps one of too many in quick succession."""
        assert case.broken is not None
        return self._patience.changed(case.broken, case.history, case.call)

    def _live_again(self, case: Case) -> None:
        """A live call after a change: what runs for the first time because of it must not do so in a dry run. (Nothing does
        where gradients are gone; a live call would leave others, at other addresses. But marked functions run while gradients
        are there. Where several calls take turns, a live one is only for its like.)"""
        for player in self._shelf.of(case.call.key):
            self._described.following.want(player.recording.reliances.numbers_changed())
        case.history.arrivals.live_since.add(case.broken == GRAD)

    def _recording(self, case: Case) -> Refusal | None:
        """A recording to be made: perhaps there is no room for it."""
        case.history.arrivals.live_since.clear()
        case.history.attempts.failed = False
        return self.no_room(case)

    # -- whether a recording can be kept

    def no_room(self, case: Case) -> Refusal | None:
        """Why no recording is made of a call that has been warmed up."""
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
        """Let a signature wait for which there is no room: all recordings that are there were played since it was last turned
        away."""
        if not history.arrivals.again:
            refusal = Refusal(_EVER_NEW, _FEW_SHAPES)
        else:
            most, met = self._options.max_recordings, self._patience.signatures
            refusal = Refusal(f"has more signatures in rotation than max_recordings={most}",
                              f"max_recordings={max(most + 1, met)}, or pad to a few shapes (shapes=)")  # fmt: skip
        history.wait_for(ROOM << history.room.turns, refusal)
        history.room.full_since, history.room.turns = next(uses), history.room.turns + 1
        return refusal

    def raise_unrewarded(self, history: History) -> None:
        """Let a signature wait where hardly a recording was played again. (But one that comes again after such a wait is worth
        a recording.)"""
        if self._shelf.unplayed >= UNPLAYED * self._options.max_recordings and not history.wait.turns:
            raise self._patience.wait(history, Refusal(_EVER_NEW, _FEW_SHAPES))


class Rule(NamedTuple):
    """A row of the table."""

    when: Callable[[Policy, Case], bool]
    counts: tuple[Callable[[Policy, Case], Refusal | None], ...]
    """What is counted, in order; the first refusal ends it."""
    step: Step | None
    """None: the next rules say it."""


_P = Policy
RULES = (
    Rule(_P._obstructed,     (),                                           Step.WARM_UP),
    Rule(_P._begins_anew,    (_P._change,),                                Step.WARM_UP),  # which mends the recordings
    Rule(_P._always,         (_P._arrival,),                               None),
    Rule(_P._gradients_move, (),                                           Step.WARM_UP),  # in a trial: for a few calls
    Rule(_P._always,         (_P._likeness,),                              None),
    Rule(_P._is_cold,        (_P._warm_up, _P._attention),                 Step.WARM_UP),
    Rule(_P._has_changed,    (_P._attention, _P._change, _P._live_again),  Step.WARM_UP),
    Rule(_P._always,         (_P._attention, _P._recording),               Step.RECORD),
)  # fmt: skip
