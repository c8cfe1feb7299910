"""Recordings that communicate with other ranks go before the process group that they do so by.

NCCL waits for all graphs that have its kernels before it ends a communicator, for ever if need be: a process whose recordings
are still there would hang in `destroy_process_group`. And a graph of a group that is gone must not be played, also not where a
new group has come. So before any group ends, all such recordings do, also those that are garbage already, and at the end of
the process as well. The next call of a function runs live and finds the new group, if there is one.
"""

from __future__ import annotations

import atexit
import gc
import weakref
from collections.abc import Callable

from .._torch.process_groups import before_groups_end
from ..capture.recording import Program, Recording
from ..devices import lock
from ..distributed import agreement
from ..distributed.watchdog import call_it
from ..statistics import Counters

__all__ = ["close_all", "follow", "follow_program"]

_PATIENCE = 10.0  # seconds for another thread's capture or replay

_programs: weakref.WeakSet[Program] = weakref.WeakSet()
_recordings: weakref.WeakSet[Recording] = weakref.WeakSet()
_undo: list[Callable[[], None]] = []  # what hears of the end of groups


def follow_program(program: Program) -> None:
    """One that communicates has been captured. Whether it becomes a recording's is not known yet, but the graph is there."""
    _programs.add(program)
    if not _undo:
        _undo.append(before_groups_end(close_all))
        atexit.register(close_all)


def follow(recording: Recording, counters: Counters) -> None:
    """This one communicates; its function counts its calls there."""
    _recordings.add(recording)
    for program in getattr(recording.program, "programs", [recording.program]):
        call_it(program, recording.name, counters)


def close_all() -> None:
    """End all that communicate: a process group is about to end."""
    held = lock.acquire(timeout=_PATIENCE)
    try:
        _end_all()
    finally:
        if held:
            lock.release()
    gc.collect()  # there may be graphs that are nobody's any more, the user's own too


def _end_all() -> None:
    for recording in list(_recordings):
        recording.spoiled.append("its process group")
    for program in list(_programs):
        program.close()
    _recordings.clear()
    _programs.clear()
    agreement.forget()
    while _undo:
        _undo.pop()()
    atexit.unregister(close_all)
