"""Parts of tensors: the plain tensors of which a tensor of a subclass is made.

A plain tensor is its own only part. A tensor of a subclass with `__tensor_flatten__` (a DTensor, a quantized weight) has no
memory of its own: it is made of inner tensors and a description. A recording asks the parts for memory, and the tensor itself
for what its object has: history, gradient, hooks, version.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from .._torch.dynamic import Thing
from .._torch.process_groups import groups_of, is_under_way
from .._torch.tensors import has_memory, inner_names, is_ordinary, is_shape, storage_id
from .keys import Identity, NoSignature, plain_key

__all__ = ["Description", "consists_of_parts", "is_taken_apart", "parts", "parts_of_all", "storages"]


def parts(t: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Plain tensors of which this one is made, repeated where one occurs twice."""
    if is_ordinary(t):
        return (t,)
    names = () if has_memory(t) else inner_names(t)
    found = [x for name in names if isinstance(x := getattr(t, name, None), torch.Tensor)]
    return tuple([part for x in found for part in parts(x)]) if found else (t,)


def parts_of_all(tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    """The parts of all of these that are there."""
    return [part for t in tensors if t is not None for part in parts(t)]


def consists_of_parts(t: torch.Tensor) -> bool:
    """Whether a tensor without memory is made of tensors that have memory. (The result of a pending collective is not yet.)"""
    if is_ordinary(t) or t.is_nested or is_under_way(t):
        return False
    return all(x is not t and (has_memory(x) or is_shape(x)) for x in parts(t))


def storages(t: torch.Tensor) -> list[int]:
    """The identities of the memory on which a tensor lies."""
    return [storage_id(part) for part in parts(t) if has_memory(part)]


class Description(NamedTuple):
    """Everything but the parts of a tensor: with other parts, it makes a tensor of the same kind."""

    kind: Thing
    names: tuple[str, ...]
    """Attributes that are inner tensors."""
    others: tuple[tuple[str, object], ...]
    """Other attributes of its making: a mesh of devices, say."""
    context: object
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    groups: tuple[Identity, ...]

    @classmethod
    def of(cls, t: Thing) -> Description:
        inner, context = t.__tensor_flatten__()
        found = [(name, getattr(t, name)) for name in inner]
        names = tuple([name for name, x in found if isinstance(x, torch.Tensor)])
        others = tuple([(name, x) for name, x in found if not isinstance(x, torch.Tensor)])
        return cls(type(t), names, others, context, t.size(), t.stride(), t.dtype, t.device,
                   (*map(Identity, groups_of(t)),))  # fmt: skip

    def around(self, inner: Sequence[torch.Tensor]) -> Thing:
        """Such a tensor, made of these."""
        made = dict(zip(self.names, inner, strict=True)) | dict(self.others)
        return self.kind.__tensor_unflatten__(made, self.context, self.size, self.stride)

    def key(self) -> object:
        """What identifies it.

        Raises:
            NoSignature: it has something that cannot be compared.
        """
        try:
            return (self.kind, self.names, _key(self.others), _key(self.context), *self[4:])
        except NoSignature as e:
            raise NoSignature(f"takes a tensor of class {self.kind.__qualname__}, of which it cannot be said whether it is as "
                              f"another ({e})", "pass the tensors of which it is made") from None  # fmt: skip


def _key(value: Thing) -> object:
    """As `plain_key`; and by what it says itself, if it says when it equals another: as torch.compile compares such things."""
    kind = type(value)
    if kind in (tuple, list):
        return (kind, *map(_key, value))
    if kind is dict:
        return (kind, *((_key(k), _key(v)) for k, v in value.items()))
    if isinstance(value, torch.Tensor):
        raise NoSignature("it has a tensor in its description", "pass the tensors of which it is made")
    try:
        return plain_key(value)
    except NoSignature:
        defined = {name for base in kind.__mro__[:-1] for name in ("__eq__", "__hash__") if name in vars(base)}
        if len(defined) < 2 or kind.__hash__ is None:
            raise
        return (kind, value)


def is_taken_apart(t: torch.Tensor) -> bool:
    """Whether as an argument, or a result, a tensor is its parts: if autograd knows nothing of it, and nobody has given it an
    attribute."""
    if not consists_of_parts(t) or t.requires_grad or t.is_inference() or t._backward_hooks or t.grad is not None:
        return False
    return all(not part.requires_grad for part in parts(t)) and _has_only_its_own(t)


_own: dict[type, set[frozenset[str]]] = defaultdict(set)  # the attributes that tensors of a class have when they are made


def _has_only_its_own(t: torch.Tensor) -> bool:
    has = frozenset(t.__dict__)
    if has and has not in _own[type(t)]:
        of = Description.of(t)
        made = of.around([getattr(t, name) for name in of.names])
        _own[type(t)].add(frozenset(made.__dict__))
    return not has or has in _own[type(t)]
