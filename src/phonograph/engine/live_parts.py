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
    """Mark a function as one that must really run every time, for its effects or because it needs the host.

    A recorded function that calls it is recorded in segments, and this runs between them, once in each call. It is given copies
    of tensors, without a history (but weights and other tensors from outside themselves); what it writes to them is written. It
    may return new tensors, of the same shapes each time, what it was given, or None. Where it gives anything else, or changes
    something on which the rest relies, the recorded function runs live, with the reason. It may be called in a backward, as a
    hook, say. In code that is compiled a graph ends where it is called.
    """
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
