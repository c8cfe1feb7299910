"""Python's garbage collector, held off where it would do harm, or find nothing.

It must not run a destructor with CUDA calls in the middle of a capture. And it starts whenever some hundred objects more are
there than before: a recording makes ten thousand, none of them garbage, most of them gone soon. Were it not held off, the first
one of a process would have it look through all that was imported before, which takes longer than all the rest.

Where it runs, it may run anywhere, and with it what others have it call (`gc.callbacks`) and the destructors of anybody's
garbage: nothing of that is part of the function that runs just then.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .standing import Standing, standing

__all__ = ["telling_collections", "uncollected"]


class uncollected:  # noqa: N801 - it is used as a function
    """Inside the block it does not start by itself, whoever's code runs. (An arena asks for this at each birth and death of a
    tensor.)"""

    __slots__ = ("_off",)

    def __enter__(self) -> None:
        self._off = Standing(gc.enable) if gc.isenabled() else None
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self._off is not None:
            self._off.end()


_here = threading.get_ident  # (the module is not asked for it each time: who hears of reads asks this)


@contextmanager
def telling_collections() -> Iterator[Callable[[], bool]]:
    """A function that says, inside the block, whether the collector is at work in this thread."""
    source_of: list[int] = []

    def begins(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            source_of.append(threading.get_ident())

    def ends(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            source_of.clear()

    def undo() -> None:
        for ours in (begins, ends, ends):
            if ours in gc.callbacks:
                gc.callbacks.remove(ours)

    with standing(undo):
        gc.callbacks += [ends, ends]  # first: it may start between these two lines. Of two one is called also where a callback
        gc.callbacks.insert(0, begins)  # takes itself from the list, which goes on after the next then
        yield lambda: _here() in source_of
