"""Signals that come during a capture.

Python runs a handler in the middle of whatever the main thread does. In a capture, what it computes would be a part of the
call, and what it notes (that the job has to stop, say) an effect, which is undone. So it waits.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from .standing import standing

__all__ = ["deferred"]


@contextmanager
def deferred() -> Iterator[None]:
    """Handlers of signals run when the block has ended. Ctrl-C, if nobody handles it otherwise, interrupts it. About 30 us."""
    if threading.current_thread() is not threading.main_thread():  # handlers run there
        yield
        return
    came: list[int] = []

    def wait(number: int, frame: FrameType | None) -> None:
        came.append(number)

    found = {number: signal.getsignal(number) for number in signal.valid_signals()}
    handlers = {n: handler for n, handler in found.items() if callable(handler) and handler is not signal.default_int_handler}

    def undo() -> None:
        for number, handler in handlers.items():
            if signal.getsignal(number) is wait:
                signal.signal(number, handler)

    try:
        with standing(undo):
            for number in handlers:
                signal.signal(number, wait)
            yield
    finally:
        for late in came:
            handlers[signal.Signals(late)](late, sys._getframe())
