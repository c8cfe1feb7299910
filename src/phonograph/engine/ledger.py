"""What one recorded function did, without the function: when a page about a program is written, its functions may be gone.

A ledger keeps nothing of the function's, no tensor and no recording. It is there for as long as the function; while somebody
asks, for as long as that.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import count

from ..devices.base import Device
from ..errors import Refusal
from ..statistics import Counters, Stats
from .player import Player
from .reports import Report
from .timeline import Moment, Timeline, watched, watching

__all__ = ["Ledger", "Made", "asking", "ledgers"]

_RECORDINGS, _FUNCTIONS = 64, 1024  # that are remembered of one function, and of a program

_all: weakref.WeakSet[Ledger] = weakref.WeakSet()
_kept = deque["Ledger"](maxlen=_FUNCTIONS)
_numbers = count()


class Made:
    """One recording, as it was made."""

    def __init__(self, player: Player) -> None:
        recording = player.recording
        self.label, self.said, self.device = player.label, str(recording), recording.device
        self.operators, self.origins, self.footprint = recording.program.operators, recording.origins, recording.footprint
        self._player = weakref.ref(player)

    @property
    def player(self) -> Player | None:
        """What plays it; None once it has gone."""
        return self._player()


class Ledger:
    """Of one function."""

    def __init__(self, name: str, counters: Counters, report: Report, timeline: Timeline) -> None:
        self.name = name
        self._report, self._timeline = report, timeline
        self.recordings = deque[Made](maxlen=_RECORDINGS)
        self.devices: set[Device] = set()
        self.number = next(_numbers)
        self._counters = counters
        _all.add(self)
        if watched():
            _kept.append(self)

    def add(self, player: Player) -> None:
        """Note a recording that was made."""
        self.recordings.append(Made(player))
        self.devices.add(player.device)

    @property
    def moments(self) -> list[Moment]:
        """Its calls, as far as they were timed."""
        return [*self._timeline]

    @property
    def reasons(self) -> Mapping[str, Refusal]:
        """Why it ran live, as it was told."""
        return self._report.reasons

    @property
    def remarks(self) -> Sequence[str]:
        return self._report.remarks

    @property
    def stats(self) -> Stats:
        """Of this one, and not of instances' own, or of backwards, which have ledgers of theirs."""
        return self._counters.stats(sum(device.pool_bytes for device in self.devices))


def asking(who: object, asks: bool) -> None:
    """This one asks what all functions do, or not any more."""
    watching(who, asks)
    if not asks and not watched():
        _kept.clear()
    elif asks:
        _kept.extend(one for one in ledgers() if one not in _kept)


def ledgers() -> list[Ledger]:
    """Of all recorded functions, the oldest first."""
    return sorted({*_all, *_kept}, key=lambda one: one.number)
