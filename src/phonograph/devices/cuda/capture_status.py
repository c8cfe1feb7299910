"""What code is told that asks whether a capture is going on (`torch.cuda.is_current_stream_capturing()`).

Packages ask in order to take another way in a capture, which may round differently: `transformers` makes a mask, where live it
calls an attention that needs none. So they are told what they are told live. torch itself asks in order to leave out what
no capture allows, and we in order to know: both are told the truth.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType

from ..._torch import cuda as torch_cuda
from ..._torch.autograd import on_thread_of_autograds
from ..._torch.dynamo import not_compiled_by_itself
from ...python.origin import is_torchs

__all__ = ["told_as_live"]


@contextmanager
def told_as_live() -> Iterator[None]:
    """During the block, on this thread and in the backwards that it runs. What is exchanged is what torch's function calls: it
    may be known by other names, and compiled code relies on it."""
    mine, (place, name, asks) = threading.get_ident(), torch_cuda.ASKS_FOR_CAPTURE
    truth = vars(place).get(name)
    if truth is None:
        yield
        return

    def tell() -> bool:
        if not truth():
            return False
        others = threading.get_ident() != mine and not on_thread_of_autograds()
        return others or _may_know(sys._getframe(1), asks)

    not_compiled_by_itself(tell.__code__, nor_what_it_calls=True)
    setattr(place, name, tell)
    try:
        yield
    finally:
        setattr(place, name, truth)


def _may_know(frame: FrameType | None, asks: CodeType) -> bool:
    while frame is not None and frame.f_code is asks:
        frame = frame.f_back
    return frame is None or is_torchs(frame.f_code.co_filename)
