"""What code keeps for its backward where autograd cannot see it: variables of a function that is recomputed, attributes of
`ctx`, what `checkpoint` keeps by itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

NODE: Any = BackwardCFunction
"""The class of the nodes of functions that are written in Python: it is their `ctx` as well."""

__all__ = ["NODE", "kept"]

_MANY = 100_000
_ENDS = (torch.nn.Module, torch.optim.Optimizer, torch.Generator, ModuleType, type, str, bytes, int, float)


def kept(roots: Iterable[object]) -> list[Any]:
    """The objects that these refer to, directly or not. Modules, optimizers and globals are not looked into: what they have
    outlives the call."""
    found: dict[int, Any] = {}
    work = deque(roots)
    while work and len(found) < _MANY:
        x = work.popleft()
        if id(x) not in found:
            found[id(x)] = x
            work.extend(_within(x))
    return list(found.values())


def _within(x: Any) -> Iterable[Any]:
    if isinstance(x, _ENDS) or x is None:
        return ()
    if isinstance(x, torch.Tensor):
        return (x.grad_fn,) if isinstance(x.grad_fn, NODE) else ()
    if isinstance(x, FunctionType):
        return (*(x.__closure__ or ()), *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values())
    if isinstance(x, CellType):
        return _contents(x)
    if isinstance(x, MethodType):
        return x.__func__, x.__self__
    if isinstance(x, partial):
        return x.func, *x.args, *x.keywords.values()
    inside = list(x.values()) if isinstance(x, dict) else list(x) if isinstance(x, (list, tuple, set, deque)) else []
    return inside + list(getattr(x, "__dict__", {}).values())


def _contents(cell: CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # it is empty
        return ()
