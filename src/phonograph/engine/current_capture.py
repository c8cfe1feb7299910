"""The capture that goes on at the moment: code of ours that the user's function calls asks here whether it is part of one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .._torch.autograd import on_thread_of_autograds
from ..errors import Refusal
from ..python.standing import standing

__all__ = ["capturing", "recording_here", "refuse"]

_captures: list[tuple[int, list[Refusal]]] = []  # the threads that capture, the innermost last, and what was refused there


@contextmanager
def capturing(refused: list[Refusal]) -> Iterator[None]:
    """The block is a capture on this thread. It adds to `refused` what code that runs in it refuses."""
    mine = threading.get_ident(), refused

    def undo() -> None:
        _captures[:] = [one for one in _captures if one is not mine]

    with standing(undo):
        _captures.append(mine)
        yield


def recording_here() -> bool:
    """Whether the calling thread is part of a capture: it captures, or it is autograd's. Another thread of the user's is not
    concerned by the capture."""
    now = _captures[-1:]
    return bool(now) and (now[0][0] == threading.get_ident() or on_thread_of_autograds())


def refuse(refusal: Refusal) -> None:
    """Raise this in code of the user's that runs as part of a capture. It counts also where that code catches it."""
    _captures[-1][1].append(refusal)
    raise refusal
