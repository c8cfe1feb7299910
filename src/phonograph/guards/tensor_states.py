"""What a tensor is, but for its values: its memory, shape, kind, hooks. A recording has all of that baked in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from operator import attrgetter

import torch

from .._torch.dynamic import Leaves, Reading, Table
from .._torch.tensors import TensorBase, address, has_memory, is_leaf, tensor_check
from ..values.tensor_subclasses import consists_of_parts, parts_of_all

__all__ = ["alike", "hook_values", "hooks_of", "like", "state_of", "states_of", "with_parts_like"]


def like(tensors: Sequence[torch.Tensor]) -> Callable[[Leaves], bool]:
    """A function that says whether values are tensors just like these, each in the same place: in C++ where torch has guards.
    It holds none of them. (Of those that consist of parts the parts have to be asked as well.)"""
    check = tensor_check(tensors)
    if check is None:
        states = states_of(tensors)
        return lambda found: all(map(_is_dense, found)) and states_of(found) == states
    lie = [*map(has_memory, tensors)]
    if all(lie):
        places = [*map(address, tensors)]
        return lambda found: check(*found) and [*map(address, found)] == places
    places = [*map(address, compress(tensors, lie))]
    return lambda found: check(*found) and [*map(address, compress(found, lie))] == places


def alike(tensors: Sequence[torch.Tensor]) -> Callable[[Leaves], bool]:
    """A function that says whether values are plain tensors just like these, wherever they lie."""
    check = tensor_check(tensors)
    if check is not None:
        return lambda found: check(*found) and all(map(has_memory, found))
    states = [state[1:] for state in states_of(tensors)]
    return lambda found: all(map(_is_dense, found)) and [state[1:] for state in states_of(found)] == states


def with_parts_like(tensors: Sequence[torch.Tensor]) -> Callable[[list[torch.Tensor]], bool]:
    """The same for tensors some of which consist of parts, and for these parts."""
    whole, of_parts, many = like(tensors), like(parts_of_all(tensors)), len(parts_of_all(tensors))
    return lambda found: whole(found) and len(inner := parts_of_all(found)) == many and of_parts(inner)


def _place(t: torch.Tensor) -> int:
    """Where a tensor lies; 0 if it consists of others, which lie somewhere."""
    return t.data_ptr() if has_memory(t) else 0


def _is_dense(value: object) -> bool:
    return isinstance(value, torch.Tensor) and (value.layout is torch.strided or consists_of_parts(value))


def hooks_of(t: torch.Tensor) -> tuple[Table | None, Table | None]:
    return t._backward_hooks, getattr(t, "_post_accumulate_grad_hooks", None)


def hook_values(t: torch.Tensor) -> tuple[object, ...]:
    before, after = hooks_of(t)
    return (*(before or {}).values(), *(after or {}).values()) if before or after else ()


def _grad_dtype(t: torch.Tensor) -> torch.dtype | None:
    return getattr(t, "grad_dtype", None) if is_leaf(t) else None


_Base = TensorBase
_SAID: tuple[Callable[[torch.Tensor], object], ...] = (
    _place, attrgetter("shape"), _Base.stride, attrgetter("dtype"), attrgetter("device"), _Base.is_conj, _Base.is_neg,
    _grad_dtype, attrgetter("requires_grad"), hook_values,
)  # fmt: skip


def states_of(tensors: Sequence[torch.Tensor]) -> list[Reading]:
    """What tensors are, but for their values; in half of the time that it takes for each by itself."""
    return [*zip(*(map(say, tensors) for say in _SAID), strict=True)]


def state_of(t: torch.Tensor) -> tuple[object, ...]:
    """What a tensor is, but for its values."""
    return states_of([t])[0]
