"""The parts of a recorded function, and what is asked of it as a whole: what it did so far, and to forget it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from .._torch.dynamo import run_where_traced
from .._torch.modules import own_call
from ..aten.operators import meaning
from ..autograd.backward import Backward
from ..capture.recording import Entangled
from ..capture.value_checks import lookouts
from ..devices import lock, owned
from ..errors import Refusal
from ..guards.module_epochs import give_back
from ..options import Options, overloads
from ..state.reentrancy import inside
from ..statistics import Counters, Observed, Stats
from . import audit, figures
from .backoff import Backoff
from .binding import Binding
from .current_capture import recording_here
from .describer import Describer
from .figures import Costs
from .gate import Gate
from .known_calls import Undescribed
from .ledger import Ledger
from .locking import acquired
from .making import Maker, Stops
from .player import Player
from .policy import Policy
from .reports import Report, stats_of
from .shelf import Shelf
from .trials import Trials

__all__ = ["Parts", "counted", "together"]


class Parts(Binding, Observed):
    """Makes the parts, each of which knows those that were made before it."""

    _watches_sizes = True
    """Whether sizes that grow are noticed, and recordings that are played keep their places."""
    _measures = True
    """Whether recordings are timed, and dropped where they are slower than the function."""

    def __init__(self, function: Callable[..., object], options: Options) -> None:
        if not isinstance(options, Options):
            raise TypeError(f"options must be an Options (pg.record makes them), not {type(options).__name__}")
        self.options = options
        self.name = options.name or str(getattr(function, "__qualname__", type(function).__qualname__))
        super().__init__()
        self._counters = counters = Counters()
        cuts = options.cuts(measured=self._measures)
        self._report = Report(self.name, counters, error=options.fallback == "error",
                              done=[*_done(function, cuts)])  # fmt: skip
        self._gate = Gate(function, final=options.fallback != "error")
        marked, calls = options.fallback == "split", functools.partial(getattr, counters, "calls")
        self._describer = describer = Describer(self.name, function, calls, marked)
        self._shelf = shelf = Shelf(options.max_recordings, options.max_bytes)
        self._known_calls, self._undescribed = shelf.known, Undescribed()
        split = frozenset(x for name in options.split_at for x in overloads(name) if not meaning(x).communicates)
        self._backoff = backoff = Backoff(options, counters, shelf, describer, split)
        self._policy = Policy(backoff, options, counters, shelf, describer, watches_sizes=self._watches_sizes,
                              is_backward=isinstance(function, Backward))  # fmt: skip
        self._trials = Trials(shelf, backoff, counters, describer)
        self._stops = Stops(self._stop, self._doubt)
        self._maker = Maker(self.name, function, options, counters, describer, shelf, backoff, self._stops, cuts=cuts)
        self._ledger = Ledger(self.name, counters, self._report, self._trials.timeline)

    def __repr__(self) -> str:
        return f"<recorded {self.name}: {len(self._shelf)} recordings>"

    # -- what a backward shows

    def _stop(self, refusal: Refusal) -> None:
        """A backward has shown that calls have to run live where gradients are wanted."""
        self._forget_known()
        self._gate.stop(refusal)

    def _doubt(self, broken: Callable[[], bool], refusal: Refusal) -> None:
        """Likewise, should this say so at the next call."""
        self._forget_known()
        self._gate.doubt(broken, refusal)

    def _forget_known(self) -> None:
        """The next call is taken apart."""
        self._known_calls.clear()
        self._backoff.rest.over()

    # -- for the observers

    def say(self, refusal: Refusal) -> None:
        """Count what is said of this function, and say it the first time."""
        self._report.say(refusal)

    @run_where_traced
    def taken_as_plain(self) -> None:
        """This is called in code that `torch.compile` compiles, which runs as it would without us."""
        self._report.compiled()

    @property
    def remarks(self) -> tuple[str, ...]:
        """Lines for `explain`, of who has made it."""
        return self._report.remarks

    @remarks.setter
    def remarks(self, remarks: tuple[str, ...]) -> None:
        self._report.remarks = remarks

    @property
    def refusals(self) -> list[Refusal]:
        """What was told of it, each reason once."""
        return [*self._report.reasons.values()]

    @property
    def changing(self) -> list[Refusal]:
        """What recordings rely on and has changed."""
        return self._backoff.changing()

    @property
    def _backwards(self) -> list[Parts]:
        """The recorded backwards of its results."""
        return list(self._maker.backwards)

    @property
    def _instances(self) -> list[Parts]:
        """Instances' own, if this is a method."""
        return [one for one in list(self._bound.values()) if isinstance(one, Parts)]

    def stats(self) -> Stats:
        self._tidy()
        return replace(together([self, *self._instances], Counters()), steps=self.options.steps or 1)

    def explain(self) -> str:
        stats, costs = self.stats(), self._costs()
        learned = [figures.summed(stats, costs), *self._backoff.explain()] if stats.recorded else self._backoff.explain()
        recordings = [f"{p.recording}{figures.of_recording(p, known)}{audit.said(p)}" for p, known in costs]
        recordings += figures.relied_on([player for player, _ in costs], self._maker.mentions)
        backwards = [backward.explain() for backward in self._backwards]
        others = [one._report for one in self._instances]
        steps = () if self.options.steps is None else (f"a call is {self.options.steps} steps",)
        return "\n".join(self._report.explain(stats, [*steps, *learned], recordings, backwards, others))

    def _costs(self) -> list[tuple[Player, Costs]]:
        """The recordings, and what is known of their costs. (While something is captured, nobody may ask how far a device has
        come.)"""
        players = [*self._shelf, *self._trials.aside]
        asks = not inside() and lock.acquire(blocking=False)
        try:
            return [(p, figures.costs(p, self._trials.history(p.recording.key), asks=asks)) for p in players]
        finally:
            if asks:
                lock.release()

    def reset(self) -> None:
        """Drop all recordings and what was learned; free their memory. When recorded functions are called next, if another
        thread is busy, or if this comes out of the middle of a call: of a capture, which counts on all memory that it has seen,
        or of a replay (from a signal handler, a finalizer), which works in what would go."""
        if owned() or inside() or recording_here() or (not lock.acquire(False) and not acquired()):
            _wanted.add(self)
            if _catch_up not in lookouts:
                lookouts.append(_catch_up)
            return
        try:
            self._reset()
        finally:
            lock.release()

    def _reset(self) -> None:
        with lock:
            self._shelf.clear()
            self._shelf.close(self._trials.aside)
            self._trials.clear()
            self._undescribed = Undescribed()
            self._backoff.reset()
            self._policy.reset()
            self._describer.reset()
            self._report.reasons.clear()
            self._gate.reset()
            for mine in (*self._instances, *self._backwards):
                mine._reset()
            self._maker.entangled = Entangled()
            self._maker.tidy()

    def _tidy(self) -> None:
        if owned() or inside():
            return  # a capture counts on all memory that it has seen, and a replay on its own
        if lock.acquire(blocking=False):  # not now, if another thread is busy: it may be waiting for this one
            try:
                self._maker.tidy()
            finally:
                lock.release()


_wanted: weakref.WeakSet[Parts] = weakref.WeakSet()
"""Those that are to be reset."""


def _catch_up() -> None:
    """Reset those. Where that cannot be even now, it is asked for once more."""
    lookouts.remove(_catch_up)
    those = [*_wanted]
    _wanted.clear()
    for one in those:
        one.reset()
    give_back()


def counted(recorded: Parts) -> Counters:
    """What a recorded function has counted."""
    return recorded._counters


def together(recorded: Sequence[Parts], before: Counters) -> Stats:
    """The statistics of several recorded functions as one; `before`: what others counted that are gone."""
    devices = [device for one in recorded for device in one._maker.devices]
    return stats_of(map(counted, recorded), devices, before)


def _done(function: Callable[..., object], cuts: bool) -> Iterator[str]:
    """The words of advice that whoever records this so has followed."""
    if cuts:
        yield 'fallback="split"'
    module, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if isinstance(module, torch.nn.Module) and name in (own_call(module).__name__, "forward"):
        yield "record the model alone"
