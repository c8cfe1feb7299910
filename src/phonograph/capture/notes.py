"""One note of each operator: what it is given, looked at once, before it runs.

A capture asks many things of what an operator is given: whose memory is it, what may be written, is it the same each time,
what does a replay call. Each tensor is asked for its memory and its form here, once, and each number is met here; the watch,
the digest and the tape read the note. In the place of a tensor it has a `Look`, which holds neither that nor its memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, is_inference_mode_enabled

from .._torch.dynamic import Thing
from .._torch.tensors import has_memory

__all__ = ["PLAIN", "Kind", "Look", "Note", "kind_of"]

Kind = tuple[torch.dtype, torch.Size, tuple[int, ...], bool, bool, bool]
"""Of a tensor: type, sizes, strides; whether it stands for its conjugate or negative; whether a gradient is asked for."""

PLAIN = frozenset({int, float, bool, type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format, complex,
                   bytes})  # fmt: skip
"""Classes of what holds nothing else."""
_ORDINARY = frozenset({Tensor, torch.nn.Parameter})


class Look:
    """A tensor among what an operator is given: what it is, and where in its memory it begins."""

    __slots__ = ("kind", "offset")

    def __init__(self, offset: int, kind: Kind) -> None:
        self.offset, self.kind = offset, kind


class Note:
    """What one operator is given. Of each tensor that is among it, in order: itself, the identity of its memory (0 if it has
    none), and its look (None if it is not memory with a shape)."""

    __slots__ = ("args", "keys", "kinds", "kwargs", "looks", "numbers", "others", "plain", "tensors")

    def __init__(self, args: Iterable[Thing], kwargs: Mapping[str, Thing], known: Mapping[int, str]) -> None:
        """`known` are storages in which tensors lie that are memory with a shape."""
        self.tensors: list[Tensor] = []
        self.keys: list[int] = []
        self.looks: list[Look | None] = []
        self.kinds: list[Kind] = []
        """Of the looks."""
        self.numbers: list[float] = []
        """Those with a point."""
        self.plain: list[object] = []
        """What is among it besides tensors."""
        self.others = False
        """Whether some of that may hold something else."""
        trained = is_inference_mode_enabled()
        self.args: list[Thing] = self._of(args, known, trained)
        """The same, with looks in the places of tensors."""
        self.kwargs: dict[str, Thing] = {}
        if kwargs:
            self.plain.extend(kwargs)
            self.kwargs = dict(zip(kwargs, self._of(kwargs.values(), known, trained), strict=True))

    def form(self, *further: Kind | None) -> tuple[object, ...]:
        """What an operator's behaviour may depend on besides the values: the kinds of these tensors, and of `further` ones, and
        what else is among them."""
        plain, kinds = repr(self.plain) if self.plain else "", self.kinds
        if len(kinds) == len(self.tensors):
            return len(further), *kinds, *further, plain
        looks = enumerate(zip(self.looks, self.tensors, strict=True))
        shapes = [(i, kind_of(t)) for i, (look, t) in looks if look is None]  # and tensors that are known to be zero
        return len(further), *kinds, *shapes, *further, plain

    def _of(self, values: Iterable[Thing], known: Mapping[int, str], trained: bool) -> list[Thing]:
        tensors, found, plain = self.tensors, list[Thing](), self.plain
        for value in values:
            kind = type(value)
            if kind in PLAIN:
                plain.append(value)
                if kind is float:
                    self.numbers.append(value)
            elif kind in _ORDINARY or isinstance(value, Tensor):
                tensors.append(value)
                value = self._looked_at(value, known, trained) or value
            elif isinstance(value, (list, tuple)):
                value = self._of_list(value, known, trained)
            elif isinstance(value, dict):
                plain.extend(value)
                self.others = True
                value = dict(zip(value, self._of(value.values(), known, trained), strict=True))
            else:
                plain.append(value)
                self.others = True
            found.append(value)
        return found

    def _of_list(self, values: Sequence[Thing], known: Mapping[int, str], trained: bool) -> Sequence[Thing]:
        before, place = len(self.tensors), len(self.plain)
        found = self._of(values, known, trained)
        if len(self.tensors) == before:  # it is no list of tensors: its form shows
            self.plain[place:] = [values]
            return values if type(values) in (list, tuple) else found
        return found if type(values) is list else tuple(found)

    def _looked_at(self, t: Tensor, known: Mapping[int, str], trained: bool) -> Look | None:
        try:
            key = t.untyped_storage()._cdata
        except RuntimeError:  # it has none
            key = 0
        self.keys.append(key)
        if key not in known and not has_memory(t):
            self.looks.append(None)
            self.others = True
            return None
        dtype = t.dtype
        kind = dtype, t.size(), t.stride(), dtype.is_complex and t.is_conj(), t.is_neg(), trained and t.requires_grad
        look = Look(int(t.storage_offset()), kind)
        self.kinds.append(kind)
        self.looks.append(look)
        return look


def kind_of(t: Tensor) -> Kind:
    """In inference mode, operators are noted whole that ask whether a gradient will be wanted, as `matmul` does."""
    dtype = t.dtype
    trained = t.requires_grad and is_inference_mode_enabled()
    return dtype, t.size(), t.stride(), dtype.is_complex and t.is_conj(), t.is_neg(), trained
