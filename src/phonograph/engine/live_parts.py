"""`pg.live`: functions that run for real in each call, between the segments of a recording."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

from .._torch import dynamo as torch_dynamo
from ..call.live_function import MARK, Marked
from ..capture.live_results import noted_here
from ..devices.cuts import Cuts
from ..errors import Refusal
from ..python.origin import users_line
from .current_capture import recording_here, refuse

__all__ = ["live"]

P = ParamSpec("P")
R = TypeVar("R")


def live(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function that runs in every call, for its effects or because it needs the host.

    A recorded function that calls it is recorded in segments, and the marked one runs between them, once in each call. Outside
    of recorded functions it is an ordinary function. A hook of a backward may be one. `torch.compile` has a graph break there.

    Args:
        function: function to run. Tensors that the call made are passed as detached copies, and in-place writes are copied
            back. Weights and other tensors from outside of the call are passed themselves.

    Returns:
        A function with the same signature. It may return new tensors of the same shapes in each call, its own arguments, or
        None. Otherwise, and if it changes what the rest of the call relies on, the recorded function runs live with the reason.

    Raises:
        TypeError: `function` is not callable.

    Example:
        >>> import torch, phonograph as pg
        >>> log = pg.live(lambda loss: print(loss.item()))
        >>> log(torch.tensor(2.0))
        2.0
    """
    if not callable(function):
        raise TypeError(f"pg.live takes a function, not {type(function).__name__}")
    marked = Marked(function)

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> object:
        if recording_here():
            try:
                return Cuts.marked(marked, args, kwargs)
            except Refusal as refusal:
                refusal.where = refusal.where or users_line()
                refuse(refusal)
        notes = noted_here()
        if notes is not None:
            return notes.call_marked(marked, args, kwargs)
        return marked(*args, **kwargs)

    marked.run = torch_dynamo.never_compiled(called, "marked @pg.live")
    setattr(marked.run, MARK, marked)
    return cast("Callable[P, R]", marked.run)
