"""The trials of one function's recordings: which of them have yet to show that they pay (see `profitability.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import TypeVar

from ..call.signature import Call
from ..devices import device_for, lock
from ..errors import Refusal
from ..statistics import Counters
from .backoff import Backoff
from .contained import Contained
from .describer import Describer
from .history import History
from .player import Player
from .profitability import Took, Trial, Turn
from .shelf import Key, Shelf
from .standing_refusals import grounds_of
from .timeline import Timeline, watched

__all__ = ["Trials"]

R = TypeVar("R")
Ways = tuple[int, int]
"""How many calls of a signature were played, and ran live."""


class Trials:
    """Those of one function. `timing`: there are some, and calls are to be timed."""

    def __init__(self, shelf: Shelf, backoff: Backoff, counters: Counters, describer: Describer) -> None:
        self._shelf, self._backoff, self._counters, self._describer = shelf, backoff, counters, describer
        self._by_key = backoff.on_trial
        self.timeline = Timeline(self, counters)
        self.timing = watched()
        self.under_way: Took | None = None
        """The call that is being timed."""

    def __iter__(self) -> Iterator[Trial]:
        return iter(list(self._by_key.values()))

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def aside(self) -> list[Player]:
        """The recordings that are not on the shelf while calls run live."""
        return [player for trial in self for player in trial.aside]

    def begin(self, player: Player, history: History, *, averaged: bool) -> None:
        """Put a recording on trial, if none of its signature is. Calls run live for it where there is memory for both."""
        cut = history.capture.why if player.recording.live_parts or player.recording.numbers else None
        if (known := self._by_key.get(player.recording.key)) is not None:
            known.cut = known.cut or cut
            return
        spare: int = device_for(player.recording.device).spare
        tries = averaged or watched()  # in any case; who asks for a page wants to see both
        trial = Trial(player, history, may_run_live=player.recording.footprint.nbytes <= spare, averaged=tries, cut=cut)
        self._by_key[trial.key] = trial
        self.timing = True

    def history(self, key: Key) -> History | None:
        """What is known of a signature, with what its trial has found so far."""
        history = self._backoff.known(key)
        if history is not None and (trial := self._by_key.get(key)) is not None:
            history.timed = trial.timed()
        return history

    def clear(self) -> None:
        self._by_key.clear()
        self.look_on()

    def look_on(self) -> None:
        """Time calls if that is wanted."""
        self.timing = bool(self._by_key) or watched()

    def timed(self, call: Callable[[], R]) -> R:
        """The result of a call of the function, which is timed."""
        self.timing = False
        begun = self.timeline.begin()
        try:
            trials, counters = list(self), self._counters
            before, calls, recorded = [*map(self._ways, trials)], counters.calls, counters.recorded
            self.under_way = took = Took.here(trials[0].device) if trials else None
            if took is not None:
                for trial in trials:
                    trial.next(took)
            result = call()
            if took is not None:
                took.end()
                if (counters.calls, counters.recorded) == (calls + 1, recorded) and lock.acquire(blocking=False):
                    try:
                        for trial, ways in zip(trials, before, strict=True):
                            self._see(trial, ways, took)
                    finally:
                        lock.release()
            return result
        finally:
            self.under_way = None
            self.timeline.end(begun)
            self.look_on()

    def _ways(self, trial: Trial) -> Ways:
        return sum(player.played for player in self._shelf.of(trial.key)), trial.history.refused.calls

    def _see(self, trial: Trial, before: Ways, took: Took) -> None:
        """A call took so long; it may have been one of this trial's."""
        if self._by_key.get(trial.key) is not trial:
            return
        played, live = self._ways(trial)
        if (played - before[0], live - before[1]) in ((1, 0), (0, 1)):
            trial.see(took, live > before[1])
        turn = trial.turn()
        if turn is Turn.GO_ON:
            return
        if turn is Turn.RUN_LIVE:
            trial.set_aside(self._shelf.take(trial.key))
            return
        aside = trial.take_back()
        if turn is not Turn.PLAY:
            trial.history.timed = timed = trial.timed()
            for player in aside or self._shelf.of(trial.key):
                player.saves = timed.saves if timed is not None else None
        if turn is Turn.DROP:
            self._shelf.close(aside or self._shelf.take(trial.key))
            self._backoff.refuse(trial.history, trial.verdict(), trial.grounds)
        else:
            self._shelf.put_back(trial.key, aside)
        if turn is not Turn.PLAY:
            trial.history.pays = turn is Turn.KEEP
            del self._by_key[trial.key]

    def runs_live(self, call: Call) -> None:
        """Such a call is refused. If that is for a trial: note whether it would have been played, and on what it relies."""
        trial = self._by_key.get(call.key)
        if trial is None:
            return
        trial.fits = any(map(partial(_fits, call), trial.aside))
        if trial.noted:
            return
        trial.noted = True
        with suppress(Refusal), Contained("looked at what the function can reach"):
            trial.refusal.reach = self._describer.reach(call)
            trial.grounds = trial.history.refused.unsettled = grounds_of(trial.refusal)
        trial.refusal.drop_references()


def _fits(call: Call, player: Player) -> bool:
    player.take(call)
    return player.broken() is None
