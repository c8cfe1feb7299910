"""Watchdog for replays that wait for other ranks.

torch watches its live collectives: one that exceeds its process group's timeout ends the process with a message. torch does not
know of collectives in a graph, and a replay whose peer has died would wait for ever. So an event follows each launch that
communicates, and a thread asks once a second whether the oldest event is reached. A replay that exceeds the timeout ends as
torch's collectives do, by the same setting (TORCH_NCCL_ASYNC_ERROR_HANDLING). The message names the function, the call, the
collectives and the missing ranks.

A replay is timed from the end of the one before, not from its launch: hundreds of launches may be queued.

Ranks find out who is missing through the process group's store. A rank that has waited for half of the timeout writes so there,
and removes it when it goes on. While all goes well, the store is not used. A rank that wrote nothing is not in a replay: it has
died, or is somewhere else.

The thread lives as long as there is something to watch. It needs the interpreter: C++ code that waits for the GPU and holds the
GIL keeps it from noticing. (torch's own waits release it.)
"""

from __future__ import annotations

import atexit
import faulthandler
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import cycle
from time import monotonic, sleep
from typing import Protocol, TextIO

import torch

from .._torch import process_groups as torch_process_groups
from ..statistics import Counters
from .store import Store, ask

__all__ = ["OWN_THREADS", "Launches", "Mark", "Watched", "call_it", "launches", "unwatch", "watch"]

OWN_THREADS = "phonograph: "
"""How the names of this library's threads begin."""

_TICK = 1.0  # seconds
_KEPT = 64  # launches; of more that are under way, the first are forgotten
_NAMED = 6  # places where collectives are begun
_GRACE = 1.5  # seconds for ranks that began to wait a little later
_ABORTS = 20.0  # seconds that an exit waits for an abort
_KEY = "phonograph/waits/{}"


class Mark(Protocol):
    """A place in the order of what a device does."""

    def put(self) -> None:
        """Put it behind all that was launched on the current stream."""

    def reached(self) -> bool:
        """Whether the device is there."""


@dataclass(eq=False)
class Watched:
    """What communicates, for words: how many of which `collectives`, by the user's lines, and the process groups by name."""

    device: torch.device
    collectives: Mapping[str, int]
    groups: Collection[str]
    name: str = "a function"
    made: int = 0  # in which call of it
    counters: object = None  # of it
    replays: int = 0

    @property
    def timeout(self) -> float:
        """Seconds that the process groups allow."""
        found = [torch_process_groups.timeout_of(name, self.device) for name in self.groups]
        return min(filter(None, found), default=math.inf)

    def __str__(self) -> str:
        named = [f"{said} ({times} times)" if times > 1 else said for said, times in self.collectives.items()]
        return ", ".join(named[:_NAMED]) + f" and {len(named) - _NAMED} other places" * (len(named) > _NAMED)


@dataclass(eq=False)
class _Launch:
    mark: Mark
    at: float = 0.0
    what: Watched | None = None
    replay: int = 0

    def __str__(self) -> str:
        assert self.what is not None
        what, calls = self.what, getattr(self.what.counters, "calls", 0)
        return f"replay {self.replay} of {what.name} (recorded in call {what.made}, called {calls} times so far): {what}"


class Launches:
    """The last ones on one device."""

    def __init__(self, mark: Callable[[], Mark]) -> None:
        self._ring = [_Launch(mark()) for _ in range(_KEPT)]
        self._next = cycle(self._ring).__next__

    def note(self, what: Watched) -> None:
        """To be called after a launch, on its stream. About 2 us."""
        one = self._next()
        what.replays += 1
        one.at, one.what, one.replay = monotonic(), what, what.replays
        one.mark.put()

    def under_way(self) -> _Launch | None:
        """The oldest that has not ended."""
        waiting = [one for one in self._ring if one.what is not None and not one.mark.reached()]
        return min(waiting, key=lambda one: one.at, default=None)


_launches: dict[object, Launches] = {}  # by device
_programs: weakref.WeakKeyDictionary[object, Watched] = weakref.WeakKeyDictionary()
_starting = threading.Lock()
_thread: threading.Thread | None = None


def launches(device: object, mark: Callable[[], Mark]) -> Launches:
    """Those of a device, of which `mark` makes marks."""
    found = _launches.get(device)
    if found is None:
        found = _launches[device] = Launches(mark)
    return found


def watch(program: object, what: Watched) -> None:
    """From now on there is this program, which communicates; until it is closed, or garbage."""
    global _thread
    _programs[program] = what
    with _starting:  # after a fork as well, which has no thread
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_Watch().run, name=f"{OWN_THREADS}replays", daemon=True)
            _thread.start()


def call_it(program: object, name: str, counters: Counters) -> None:
    """It is a recording's of the function with this name, which counts its calls there."""
    if (what := _programs.get(program)) is not None:
        what.name, what.counters, what.made = name, counters, counters.calls


def unwatch(program: object) -> None:
    """It is closed. What was launched of it may be under way, and is watched."""
    _programs.pop(program, None)


def _forget() -> None:
    """In a process that was forked: it has neither the thread nor the device."""
    global _thread, _starting
    _thread, _starting = None, threading.Lock()
    _launches.clear()
    _programs.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


@dataclass
class _Wait:
    """One replay that is under way."""

    what: _Launch
    launched: float
    since: float
    told: bool = False


class _Watch:
    """What the thread does."""

    def __init__(self) -> None:
        self._wait: _Wait | None = None
        self._last = monotonic()

    def run(self) -> None:
        global _thread
        while True:
            sleep(_TICK)
            self.tick(monotonic())
            with _starting:
                if not _programs and self._wait is None:
                    _thread = None
                    return

    def tick(self, now: float) -> None:
        """Look at what is under way."""
        slept, self._last = now - self._last > 3 * _TICK, now
        oldest = min(filter(None, (of.under_way() for of in list(_launches.values()))), key=lambda x: x.at, default=None)
        before = self._wait
        if oldest is None or before is None or slept or (before.what, before.launched) != (oldest, oldest.at):
            if before is not None and before.told:
                ask(lambda store, rank: store.set(_KEY.format(rank), ""))
            self._wait = None if oldest is None else _Wait(oldest, oldest.at, now)
            return
        assert oldest.what is not None
        waited, timeout = now - before.since, oldest.what.timeout
        if waited > timeout / 2 and not before.told:
            before.told = True
            said = str(oldest)
            ask(lambda store, rank: store.set(_KEY.format(rank), said))
        if waited > timeout:
            _time_out(oldest, waited, timeout)
            self._wait = _Wait(oldest, oldest.at, now, told=True)


def _time_out(one: _Launch, waited: float, timeout: float) -> None:
    assert one.what is not None
    handling = _handling()
    sleep(_GRACE)
    if one.mark.reached():
        return
    members = sorted({rank for name in one.what.groups for rank in torch_process_groups.ranks_of(name)})
    waits = ask(lambda store, rank: _waits(store, [m for m in members if m != rank]))
    said = _said(one, waited, timeout, members, waits)
    print(said + _ENDS[handling], file=_stderr(), flush=True)
    if handling in _TEARS_DOWN:
        faulthandler.dump_traceback(_stderr())
        os.abort()
    if handling == _CLEANS_UP:
        for name in one.what.groups:  # who has waited goes on at once, perhaps to its end: an exit waits for this a while
            aborting = threading.Thread(target=torch_process_groups.abort, args=(name, one.what.device), daemon=True)
            atexit.register(aborting.join, _ABORTS)
            aborting.start()
            aborting.join()


def _stderr() -> TextIO:
    """The process's own, whoever collects what is printed."""
    return sys.__stderr__ or sys.stderr


_CLEANS_UP, _TEARS_DOWN = 2, (1, 3)
_ENDS = {
    0: " It goes on waiting, as TORCH_NCCL_ASYNC_ERROR_HANDLING=0 says.",
    1: " The process is ended now (TORCH_NCCL_ASYNC_ERROR_HANDLING=1).",
    2: " The process group is aborted now, what it was to communicate is not there (TORCH_NCCL_ASYNC_ERROR_HANDLING=2).",
    3: " The process is ended now.",
}


def _handling() -> int:
    """What torch does where a live collective takes too long: 0 nothing, 1 and 3 end the process, 2 abort the communicators."""
    names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
    value = next((v for v in map(os.environ.get, names) if v), "3")
    return int(value) if value in ("0", "1", "2", "3") else 3


def _waits(store: Store, ranks: Iterable[int]) -> dict[int, str]:
    """In what these ranks wait, as they say; "" for those that say nothing."""
    keys = {rank: _KEY.format(rank) for rank in ranks}
    return {rank: store.get(key).decode() if store.check([key]) else "" for rank, key in keys.items()}


def _said(one: _Launch, waited: float, timeout: float, members: list[int], waits: Mapping[int, str] | None) -> str:
    me = torch_process_groups.own_rank()
    text = (f"phonograph: rank {me} has waited for {waited:.0f} s (timeout: {timeout:.0f} s) for ranks "
            f"{', '.join(str(m) for m in members if m != me)} in {one}.")  # fmt: skip
    if waits is None:
        return f"{text} Who is missing is not known: the store cannot be reached, which rank 0 has, or what started the ranks."
    missing = [str(rank) for rank, said in waits.items() if not said]
    text += f" Missing, as they are in no replay: {', '.join(missing)}." if missing else " None is missing."
    return text + "".join(f" Rank {rank} waits in {said}." for rank, said in waits.items() if said)
