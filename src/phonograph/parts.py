"""What a tensor consists of.

A plain tensor is its own only part. One of a class that says so (`__tensor_flatten__`), a DTensor say, or a quantized weight,
is what it is made of, and a description of how; its own memory there is none. So whatever a recording wants of a tensor's
memory it asks of the parts, and of the tensor itself what stands in its object: history, gradient, hooks, version.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .torch_private import has_memory, inner_names, is_ordinary, is_shape, storage_id, waits_by_itself

__all__ = ["consists_of_parts", "parts", "parts_of_all", "place", "storages"]


def parts(t: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors on whose memory this one lies, each as often as it is there."""
    if is_ordinary(t):
        return (t,)
    names = () if has_memory(t) else inner_names(t)
    found = [x for name in names if isinstance(x := getattr(t, name, None), torch.Tensor)]
    return tuple([part for x in found for part in parts(x)]) if found else (t,)


def parts_of_all(tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    """The parts of all of these that are there."""
    return [part for t in tensors if t is not None for part in parts(t)]


def consists_of_parts(t: torch.Tensor) -> bool:
    """Whether a tensor that has no memory says of what it is made, and all of that has memory. (What a collective gives that
    goes on is none yet.)"""
    if is_ordinary(t) or t.is_nested or waits_by_itself([type(t)]):
        return False
    return all(x is not t and (has_memory(x) or is_shape(x)) for x in parts(t))


def storages(t: torch.Tensor) -> list[int]:
    """The identities of the memory on which a tensor lies."""
    return [storage_id(part) for part in parts(t) if has_memory(part)]


def place(t: torch.Tensor) -> int | tuple[int, ...]:
    """Where a tensor lies: its address, or those of its parts."""
    return t.data_ptr() if is_ordinary(t) or has_memory(t) else tuple([part.data_ptr() for part in parts(t)])
