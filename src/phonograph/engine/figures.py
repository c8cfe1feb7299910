"""What recordings have cost and what they give, in numbers: for `explain` and the log.

Nothing is measured for this in a replay. How long replays and live calls take, a trial has found out on the first ones
(`profitability.py`); where it has timed no live call, there is the last one before the recording, and what so many operators
take at least. What is told of a call is for how long it keeps the program: the longer of the host's time and of that between
two events on the device's stream. Later replays are not timed: the host would only see how long it takes to launch one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import NamedTuple

from ..call.differences import nearest, told
from ..devices.segments import Segments
from ..python.names_in_code import Mentions
from ..statistics import Counters, Stats, logger
from ..values.wording import Naming
from . import profitability as paying
from .history import History, Timed
from .player import Player
from .policy import Case
from .profitability import OPERATOR, Took
from .shelf import Shelf

__all__ = ["Costs", "costs", "of_recording", "recorded", "relied_on", "summed", "telling", "why"]

MiB = 1 << 20
_TOLD_AFTER = 2.0
"""Seconds of a capture until it is said that it goes on, and again after twice as many."""


class Costs(NamedTuple):
    """Of the calls of one signature. A live one takes at least so many seconds (`least`); the last one before the recording has
    taken `before`, and calls were `timed` then."""

    least: float
    before: float | None = None
    timed: Timed | None = None

    @property
    def saves(self) -> float | None:
        """Seconds that each replay saves, or, where no live call was timed beside it, at least saves."""
        if self.timed is None:
            return None
        live = self.least if self.timed.live is None else self.timed.live
        return max(0.0, live - self.timed.replay)


def costs(player: Player, history: History | None, *, asks: bool) -> Costs:
    """What is known by now of a recording's signature; `asks`: whether the device may be asked how far it has come."""
    least = player.recording.program.operators * OPERATOR
    if history is None:
        return Costs(least)
    took = history.live.took
    times = paying.clock.times(took) if asks and isinstance(took, Took) else None
    return Costs(least, None if times is None else max(times), history.timed)


def of_recording(player: Player, known: Costs) -> str:
    """More lines about a recording."""
    lines = [f"made in {player.seconds:.2g} s; why: {player.why}", _played(player, known), *_cuts(player)]
    return "".join([f"\n  {line}" for line in lines])


def _cuts(player: Player) -> Iterator[str]:
    """What each cut into segments costs: until the device has come there, and what is live there has run."""
    program = player.recording.program
    took = program.took if isinstance(program, Segments) else []
    for part, seconds in zip(player.recording.live_parts, zip(*took, strict=True), strict=False):
        yield f"cut at {part.where or part.said}: {_ms(median(seconds))} of each replay (median of {len(seconds)})"


def _played(player: Player, known: Costs) -> str:
    before = "" if known.before is None else f"{_ms(known.before)} the last one before it"
    if known.timed is None:
        return f"played {player.played}x, which was not timed" + (f"; live {before}" if before else "")
    replay, live, count, until_next = known.timed
    if live is not None:
        beside = f"live {_ms(live)}"
    else:
        beside = f"live at least {_ms(known.least)} (1 us an operator{f'; {before}' if before and not until_next else ''})"
    way = "from one call to the next" if until_next else "a call"
    return f"played {player.played}x: {_ms(replay)} {way} (median of {count}), {beside}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def summed(stats: Stats, known: Iterable[tuple[Player, Costs]]) -> str:
    """A line about all recordings of a function."""
    text = f"{stats.recording_seconds:.2g} s spent recording; {stats.pool_bytes / MiB:.3g} MiB in the pool"
    timed = [(player, costs) for player, costs in known if costs.saves is not None]
    if not timed:
        return text
    saved = sum(player.played * (costs.saves or 0.0) for player, costs in timed)
    both = all(costs.timed and costs.timed.live is not None for _, costs in timed)
    return f"{text}; {'about' if both else 'at least'} {saved:.2g} s saved so far" if both or saved else text


# -- what they rely on


def relied_on(players: Sequence[Player], mentions: Mentions | None) -> Iterator[str]:
    """Lines about values that the user's code reads, and the recording that was played last relies on."""
    if not players or mentions is None:
        return
    last = max(players, key=lambda player: player.used)
    seen = set[str]()
    for name, value in last.recording.table.constants.named():
        read = name.rpartition(".")[2]
        if type(value) not in _PLAIN or name in seen or read.startswith("_") or not read.isidentifier() or value == read:
            continue
        if read in mentions.names and (where := mentions.read_at(read)):
            seen.add(name)
            yield f"relies on {name} = {_brief(value)} (read at {where})"
        if len(seen) == _NAMED:
            return


_PLAIN = (bool, int, float, str, type(None))
_NAMED = 12


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONG else f"{text[: _LONG - 3]}..."


_LONG = 40  # characters


# -- why a recording is made


def why(case: Case, shelf: Shelf, naming: Callable[[], Naming], place_of: Callable[[str], str]) -> str:
    """Why there is to be another recording; `place_of`: where that is read which has changed."""
    if case.blocked:
        return "results of earlier calls are held in the memory of the others"
    if case.broken is not None:
        return f"{case.broken} has changed{place_of(case.broken)}"
    if shelf.of(case.call.key):
        return "another of the same signature, in other memory"
    other = nearest(shelf.keys(), case.call)
    return "the first" if other is None else told(other, case.call, naming())


# -- the log


def recorded(name: str, player: Player) -> None:
    """Log a recording."""
    recording = player.recording
    cuts = f", cut {len(recording.live_parts)}x" if recording.live_parts else ""
    logger.info("recorded %s in %.2g s: %d operators%s, %.3g MiB; why: %s", name, player.seconds, recording.program.operators,
                cuts, recording.footprint.nbytes / MiB, player.why)  # fmt: skip


@contextmanager
def telling(name: str, counters: Counters) -> Iterator[Callable[[], float]]:
    """Count the seconds of the block, which makes a recording, and give how many there are so far. Who listens to the log is
    told that a long one goes on."""
    begun, done = time.perf_counter(), threading.Event()
    if logger.isEnabledFor(logging.INFO):
        threading.Thread(target=_tell, args=(name, begun, done), name="phonograph-progress", daemon=True).start()
    try:
        yield lambda: time.perf_counter() - begun
    finally:
        done.set()
        counters.recording_seconds += time.perf_counter() - begun


def _tell(name: str, begun: float, done: threading.Event) -> None:
    due = _TOLD_AFTER
    while not done.wait(due - (time.perf_counter() - begun)):
        logger.info("recording %s: %.1f s so far", name, time.perf_counter() - begun)
        due *= 2
