"""Tensors of one call that hold the same, as they were made in the same way of the same: what is read of one is known of the
others.

Libraries look at a mask again and again (`mask.all()`, for each kind of attention). A replay need wait for the first look only:
where that gives what it has given in the capture, so do all others.

Only whole numbers and truth values count, whose operators are exact. What is written holds something else from then on.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence

import torch

from .._torch.dynamic import Thing
from .._torch.operators import OpOverload
from .._torch.tensors import has_memory, is_ordinary, storage_id
from ..aten import operators

__all__ = ["Alike"]

_PLAIN = (type(None), bool, int, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


class Alike:
    """Knows which tensors do, on storages that are `known` (it is told when one of them goes), and what was read of them."""

    def __init__(self, known: Container[int]) -> None:
        self._known = known
        self._contents: dict[int, object] = {}  # by storage: what stands for that which it holds
        self._made: dict[Hashable, object] = {}  # the same by the operator that has made it, and what that was given
        self._read: dict[Hashable, object] = {}

    def reads(self, t: torch.Tensor, number: object) -> bool:
        """Such a number is read of this tensor. Whether it was read before, of this or of one that holds the same."""
        key = self._held(t)
        if key is None:
            return False
        before = self._read.setdefault((key, type(number), number), seen := object())
        return before is not seen

    def makes(
        self, m: operators.Meaning, func: OpOverload, args: Sequence[Thing], kwargs: Mapping[str, Thing], out: Thing
    ) -> None:
        """An operator has made this of that."""
        unclear = m.random or m.others or m.communicates or m.name in operators.UNFILLED
        if unclear or not m.plain or not isinstance(out, torch.Tensor) or not self._counts(out):
            return
        given = self._described((*args, *sorted(kwargs.items())))
        if given is not None and storage_id(out) not in self._contents:  # or it is a view
            self._contents[storage_id(out)] = self._made.setdefault((func, given), object())

    def changes(self, key: int) -> None:
        """This storage holds something else, or is gone."""
        self._contents.pop(key, None)

    def _counts(self, t: torch.Tensor) -> bool:
        exact = not (t.dtype.is_floating_point or t.dtype.is_complex) and is_ordinary(t) and has_memory(t)
        return exact and storage_id(t) in self._known and not (t.is_conj() or t.is_neg())

    def _held(self, t: torch.Tensor) -> Hashable:
        if not self._counts(t):
            return None
        contents = self._contents.setdefault(storage_id(t), object())
        return contents, t.dtype, t.shape, t.stride(), t.storage_offset()

    def _described(self, x: Thing) -> Hashable:
        """Arguments, so that equal ones have the same effect; None if that cannot be said of them."""
        if type(x) in (tuple, list):
            parts = [self._described(part) for part in x]
            return None if None in parts else (type(x), *parts)
        if isinstance(x, torch.Tensor):
            return self._held(x)
        return (type(x), x) if type(x) in _PLAIN else None
