"""Python's garbage collector, held off where it would do harm, or find nothing.

It must not run a destructor with CUDA calls in the middle of a capture. And it starts whenever some hundred objects more are
there than before: looking at all that a function can reach makes ten thousand, none of them garbage, most of them gone soon.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["uncollected"]


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside the block it does not start by itself."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
