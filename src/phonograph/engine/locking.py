"""The wait for the lock under which recordings are made and played, and for those who run the same function beside it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from ..devices import lock
from ..state.reentrancy import Nested

__all__ = ["Alongside", "acquired"]

R = TypeVar("R")

_PATIENCE = 30.0  # seconds that a call waits for another thread's capture before it runs live
_SHORT, _CALLS = 0.05, 4  # seconds, or so many live calls, that one waits for another thread's live call
_FRUITLESS = 3  # waits in a row that came to nothing, after which there are no more: threads may wait for each other


def acquired() -> bool:
    """Whether the lock is this thread's now. The wait ends where its owner runs the user's code, which may wait for this
    thread."""
    until = time.monotonic() + _PATIENCE
    while not lock.acquire(timeout=0.01):
        if Nested.waiting or time.monotonic() > until:
            return False
    return True


class Alongside:
    """Live calls of one function that hold no lock. While another thread makes one, nothing is recorded, compared or played:
    it changes gradients and attributes that the function can reach, and they would be taken for this call's."""

    def __init__(self) -> None:
        self.calls = dict[tuple[int, float], None]()
        """By thread, and by when they have begun. (No function need be called to take one out.)"""
        self._fruitless = 0

    def run(self, function: Callable[..., R], args: Sequence[object], kwargs: Mapping[str, object]) -> R:
        """The result of a live call."""
        key = threading.get_ident(), time.perf_counter()
        self.calls[key] = None
        try:
            return function(*args, **kwargs)
        finally:
            del self.calls[key]

    def ended(self, usual: float) -> bool:
        """Whether no other thread makes one any more, perhaps after a wait: a live call takes `usual` seconds."""
        until = time.monotonic() + max(_SHORT, _CALLS * usual)
        here = threading.get_ident()
        while any(thread != here for thread, _ in [*self.calls]):
            if self._fruitless >= _FRUITLESS or time.monotonic() > until:
                self._fruitless += 1
                return False
            time.sleep(0.0005)
        self._fruitless = 0
        return True
