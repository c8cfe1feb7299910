"""Times of calls, one by one, while a `pg.report` block asks for them.

A bounded number is kept for each function: the last replays, and the last calls of other kinds. Outside of such a block nothing
is noted, and no call takes longer: calls are timed where trials time them anyway (`trials.py`).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch

from ..statistics import Counters
from .profitability import Took, clock

__all__ = ["CAPTURED", "LIVE", "REPLAYED", "Moment", "Timeline", "watched", "watching"]

LIVE, CAPTURED, REPLAYED = "live", "captured", "replayed"
_REPLAYS, _OTHERS = 2048, 1024


class Moment(NamedTuple):
    """One call: its start, in seconds since the first noted call, and the seconds for which host and device were busy."""

    kind: str
    begun: float
    host: float
    device: float
    """0.0 on the CPU, and while the device has not finished."""


class _Timed(Protocol):
    """Timer of the calls of one function."""

    def look_on(self) -> None:
        """Start or stop timing, as `watched` says."""


_timed: weakref.WeakSet[_Timed] = weakref.WeakSet()
_first: list[int] = []  # nanoseconds, when the first call began
_asking: list[object] = []


def watched() -> bool:
    """Whether a report asks for times."""
    return bool(_asking)


def watching(who: object, asks: bool) -> None:
    """Note that `who` asks for times, or no longer does."""
    if asks:
        _asking.append(who)
    else:
        _asking.remove(who)
    for one in list(_timed):
        one.look_on()


class Timeline:
    """Calls of one function."""

    def __init__(self, of: _Timed, counters: Counters) -> None:
        _timed.add(of)
        self._counters = counters
        self._replays = deque[Took](maxlen=_REPLAYS)
        self._others = deque[tuple[str, Took]](maxlen=_OTHERS)

    def begin(self) -> tuple[Took, int, int] | None:
        """A call begins, if somebody asks."""
        if not _asking:
            return None
        on_gpu = torch.cuda.is_initialized()
        took = Took.here(torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"))
        if took is None:
            return None
        _first[:] = _first or [took.since]
        return took, self._counters.recorded, self._counters.replayed

    def end(self, begun: tuple[Took, int, int] | None) -> None:
        """It has ended."""
        if begun is None:
            return
        took, recorded, replayed = begun
        took.end()
        if self._counters.recorded > recorded:
            self._others.append((CAPTURED, took))
        elif self._counters.replayed > replayed:
            self._replays.append(took)
        else:
            self._others.append((LIVE, took))

    def __iter__(self) -> Iterator[Moment]:
        """All that is known of, in order."""
        found = [*self._others, *((REPLAYED, took) for took in self._replays)]
        for kind, took in sorted(found, key=lambda entry: entry[1].since):
            host, device = clock.times(took) or ((took.host or 0) * 1e-9, 0.0)
            yield Moment(kind, (took.since - _first[0]) * 1e-9, host, device)
