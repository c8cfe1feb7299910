"""The wait for the lock under which recordings are made and played."""

from __future__ import annotations

import time

from ..devices import lock
from ..state.reentrancy import Nested

__all__ = ["acquired"]

_PATIENCE = 30.0  # seconds that a call waits for another thread's capture before it runs live


def acquired() -> bool:
    """Whether the lock is this thread's now. The wait ends where its owner runs the user's code, which may wait for this
    thread."""
    until = time.monotonic() + _PATIENCE
    while not lock.acquire(timeout=0.01):
        if Nested.waiting or time.monotonic() > until:
            return False
    return True
