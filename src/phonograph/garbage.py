"""Python's garbage collector, held off where it would do harm, or find nothing.

It must not run a destructor with CUDA calls in the middle of a capture. And it starts whenever some hundred objects more are
there than before: looking at all that a function can reach makes ten thousand, none of them garbage, most of them gone soon.

Where it runs, it may run anywhere, and with it what others have it call (`gc.callbacks`) and the destructors of anybody's
garbage: nothing of that is part of the function that runs just then.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["collected", "telling_collections", "uncollected"]

_here = threading.local()  # `starts`: whether it would start in this thread, were it not held off


class uncollected:  # noqa: N801 - it is used as a function
    """Inside the block it does not start by itself. (An arena asks for this at each birth and death of a tensor.)"""

    __slots__ = ("_before", "_collecting")

    def __enter__(self) -> None:
        self._collecting, self._before = gc.isenabled(), _starts()
        gc.disable()
        _here.starts = self._before or self._collecting

    def __exit__(self, *_: object) -> None:
        _here.starts = self._before
        if self._collecting:
            gc.enable()


@contextmanager
def collected() -> Iterator[None]:
    """Within such a block code of the user's runs: it starts as it would outside."""
    held_off = _starts() and not gc.isenabled()
    if held_off:
        gc.enable()
    try:
        yield
    finally:
        if held_off:
            gc.disable()


def _starts() -> bool:
    return getattr(_here, "starts", False)


@contextmanager
def telling_collections() -> Iterator[Callable[[], bool]]:
    """A function that says, inside the block, whether the collector is at work in this thread."""
    at_work: list[int] = []

    def begins(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            at_work.append(threading.get_ident())

    def ends(phase: str, info: dict[str, Any]) -> None:
        if phase == "stop":
            at_work.clear()

    gc.callbacks += [ends, ends]  # first: it may start between these two lines. Of two one is called also where a callback
    gc.callbacks.insert(0, begins)  # takes itself from the list, which goes on after the next then
    try:
        yield lambda: threading.get_ident() in at_work
    finally:
        for ours in (begins, ends, ends):
            if ours in gc.callbacks:
                gc.callbacks.remove(ours)
