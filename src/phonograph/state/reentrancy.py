"""Whether code runs as part of a recorded function: then recorded functions that it calls simply run."""

from __future__ import annotations

import threading

from .._torch.autograd import on_thread_of_autograds
from ..python.standing import Standing

__all__ = ["Nested", "inside"]

_thread = threading.local()


def inside() -> bool:
    """Whether this thread is warming up or capturing some recorded function, or runs an operator of one live; or is autograd's
    while some thread does: then it runs the backward of that function."""
    return Nested.running > 0 and (getattr(_thread, "depth", 0) > 0 or on_thread_of_autograds())


class Nested:
    """While entered, recorded functions that are called run as part of the one that called them. `waits`: what runs is the
    user's code, which may wait for another thread, so that none should wait for this one."""

    running = 0  # in any thread
    waiting = 0

    def __init__(self, *, waits: bool = False) -> None:
        self._waits, self._entered = waits, False

    def __enter__(self) -> None:
        depth, self._standing = getattr(_thread, "depth", 0), Standing(self._leave)
        _thread.depth, self._entered = depth + 1, True
        Nested.running += 1
        Nested.waiting += self._waits

    def _leave(self) -> None:
        if not self._entered:
            return
        self._entered = False
        if self._standing.thread == threading.get_ident():  # and not in a forked child, which has that thread no more
            _thread.depth -= 1
        Nested.running -= 1
        Nested.waiting -= self._waits

    def __exit__(self, *_: object) -> None:
        self._standing.end()
