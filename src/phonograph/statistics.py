"""Counts of what a recorded function did: `Stats` for programs, `explain` for people."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

__all__ = ["Counters", "Observed", "Stats", "logger", "totals"]

logger = logging.getLogger("phonograph")


@dataclass(frozen=True)
class Stats:
    """Counts of what a recorded function did so far. ``calls == live + replayed``, but for calls that raised.

    Attributes:
        calls: all calls.
        live: calls that ran for real: to warm up, to be timed, or for one of the `refusals`.
        recorded: recordings made, dropped ones included.
        replayed: calls answered by a recording, the one that made it included.
        refusals: number of live calls by reason. (A reason not to pad counts once.)
        bytes_copied: bytes of arguments copied into recordings.
        pool_bytes: bytes of the pools on the function's devices, which all recordings there share.
        recording_seconds: seconds spent in captures, failed ones included. Not compared by ``==``.
        steps: steps of the function in one call (`steps=`).
        untried: live calls without an attempt, because an earlier call like them was refused. Not compared by ``==``.
        timed: live calls made only to find out whether a recording pays.
    """

    calls: int = 0
    live: int = 0
    recorded: int = 0
    replayed: int = 0
    refusals: Mapping[str, int] = field(default_factory=dict)
    bytes_copied: int = 0
    pool_bytes: int = 0
    recording_seconds: float = field(default=0.0, compare=False)
    steps: int = 1
    untried: int = field(default=0, compare=False)
    timed: int = 0


@dataclass
class Counters:
    """The counts behind `Stats`, while they are counted."""

    calls: int = 0
    live: int = 0
    recorded: int = 0
    replayed: int = 0
    bytes_copied: int = 0
    refusals: dict[str, int] = field(default_factory=dict)
    recording_seconds: float = 0.0
    untried: int = 0
    timed: int = 0

    def ran_live(self, reason: str, *, measures: bool = False) -> bool:
        """Count a call that ran live for this reason, or to be timed; True if it is the first for a reason."""
        if measures:
            self.timed += 1
            return False
        self.refusals[reason] = self.refusals.get(reason, 0) + 1
        return self.refusals[reason] == 1

    def __add__(self, other: Counters) -> Counters:
        reasons = self.refusals.keys() | other.refusals.keys()
        return Counters(
            self.calls + other.calls, self.live + other.live, self.recorded + other.recorded,
            self.replayed + other.replayed, self.bytes_copied + other.bytes_copied,
            {r: self.refusals.get(r, 0) + other.refusals.get(r, 0) for r in reasons},
            self.recording_seconds + other.recording_seconds, self.untried + other.untried, self.timed + other.timed,
        )  # fmt: skip

    def stats(self, pool_bytes: int) -> Stats:
        return Stats(self.calls, self.live, self.recorded, self.replayed, MappingProxyType(dict(self.refusals)),
                     self.bytes_copied, pool_bytes, self.recording_seconds, untried=self.untried, timed=self.timed)  # fmt: skip


class Observed:
    """Something recorded, which `phonograph.stats`, `explain` and `reset` can be asked about."""

    def stats(self) -> Stats:
        raise NotImplementedError

    def explain(self) -> str:
        raise NotImplementedError

    def reset(self) -> None:
        raise NotImplementedError


_all = Counters()


def totals() -> Counters:
    """Counts over all recorded functions of the process (`recorded` only)."""
    return _all
