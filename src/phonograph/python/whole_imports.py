"""An import that no fork of another thread comes into: the child would have a part of it, and nobody who goes on with it, and
would wait for ever at its first use of what is missing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["whole"]

_PATIENCE = 30  # seconds: an import may itself wait for what the thread that forks is importing
_lock = threading.RLock()


@contextmanager
def whole() -> Iterator[None]:
    """Who forks meanwhile, waits."""
    with _lock:
        yield


def _waited() -> None:
    with suppress(RuntimeError):  # not for long enough
        _lock.release()


def _begun() -> None:
    try:
        _lock.release()
    except RuntimeError:
        _lock._at_fork_reinit()  # type: ignore[attr-defined]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=lambda: _lock.acquire(timeout=_PATIENCE), after_in_parent=_waited, after_in_child=_begun
    )  # fmt: skip
