"""Python's garbage collector, held off where it would do harm, or find nothing.

It must not run a destructor with CUDA calls in the middle of a capture. And it starts whenever some hundred objects more are
there than before: looking at all that a function can reach makes ten thousand, none of them garbage, most of them gone soon.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collected", "uncollected"]

_here = threading.local()  # `starts`: whether it would start in this thread, were it not held off


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside the block it does not start by itself."""
    collecting, before = gc.isenabled(), _starts()
    gc.disable()
    _here.starts = before or collecting
    try:
        yield
    finally:
        _here.starts = before
        if collecting:
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
