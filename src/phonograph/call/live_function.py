"""Functions that are marked `@pg.live`: they really run every time, also within recorded functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType

import torch
from torch.autograd import graph

from .._torch.autograd import saved_tensors_hooks, unseen_by_checkpoint

__all__ = ["MARK", "Marked", "is_marked"]

MARK = "_phonograph_live"
_CHECKPOINT = "torch.utils.checkpoint"


class Marked:
    """Such a function. Between the segments of a recording it is what an operator is there that needs the host."""

    any_made = False  # whether there is one, or was

    def __init__(self, function: Callable[..., object]) -> None:
        Marked.any_made = True
        self.function = function
        self.run: object = None  # what `pg.live` has made of it

    def keeps(self) -> object:
        """What a recording has to keep alive for it."""
        return self.function

    def name(self) -> str:
        f: object = self.function
        while isinstance(f, partial):
            f = f.func
        return str(getattr(f, "__qualname__", type(f).__qualname__))

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Its own run. `checkpoint` knows what a part saves by counting; what this saves does not count, for it may be that the
        part is recorded, or that this has run already, and then it saves nothing there."""
        pack, _ = saved_tensors_hooks() or (None, None)
        if getattr(pack, "__module__", "") != _CHECKPOINT:
            return self.function(*args, **kwargs)
        with graph.saved_tensors_hooks(unseen_by_checkpoint(torch.Tensor.detach, pack), _as_it_is):
            return self.function(*args, **kwargs)


def _as_it_is(t: torch.Tensor) -> torch.Tensor:
    """(Not so what is saved: a result would hold the node that it comes from, and that the result.)"""
    return t


def is_marked(f: FunctionType) -> bool:
    """Whether this is what `pg.live` has made: and no function around it, to which `functools.wraps` has copied the mark."""
    mark = f.__dict__.get(MARK)
    return isinstance(mark, Marked) and mark.run is f
