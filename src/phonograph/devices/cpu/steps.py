"""Operators on a tape, as they are noted: tensors are operands, whose memory is final when the capture ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..._torch.dynamic import Args, Kwargs, Leaves, Thing
from ..._torch.tensors import neg_view, storage_at
from ...aten.operators import NO_TENSORS
from .out_variants import Variant

__all__ = ["Operand", "Place", "Step", "described", "kind_of"]


class Place:
    """The memory of one storage of the tape: at a fixed address that outlives the tape (an argument's slot, a weight,
    a gradient that lives on), or planned in the arena."""

    def __init__(self, address: int, nbytes: int, *, planned: bool) -> None:
        self.address = address
        self.nbytes = nbytes
        self.planned = planned
        self.anchor: torch.UntypedStorage | None = None

    def storage(self) -> torch.UntypedStorage:
        if self.anchor is not None:
            return self.anchor
        return storage_at(self.address, self.nbytes, torch.device("cpu"))


class Operand:
    """A tensor of the tape before its memory is final."""

    __slots__ = ("kind", "offset", "place")

    def __init__(self, place: Place, t: torch.Tensor) -> None:
        self.place, self.offset, self.kind = place, t.storage_offset(), kind_of(t)

    def tensor(self) -> torch.Tensor:
        dtype, size, stride, conjugate, negative, trained = self.kind
        t = torch.empty(0, dtype=dtype, device="cpu").set_(self.place.storage(), self.offset, size, stride)
        t = torch.conj(t) if conjugate else t
        t = neg_view(t) if negative else t
        return t.requires_grad_() if trained else t


def kind_of(t: torch.Tensor) -> tuple[torch.dtype, torch.Size, tuple[int, ...], bool, bool, bool]:
    """In inference mode, operators are noted whole that ask whether a gradient will be wanted, as `matmul` does."""
    dtype = t.dtype
    trained = t.requires_grad and torch.is_inference_mode_enabled()
    return dtype, t.size(), t.stride(), dtype.is_complex and t.is_conj(), t.is_neg(), trained


class Step:
    """One operator of the tape: what to call, with what, and which new tensors its results go to."""

    __slots__ = ("args", "autocast", "func", "grad_mode", "infers", "kwargs", "results", "variant")

    def __init__(
        self, func: Thing, args: Args, kwargs: Kwargs, results: list[Operand | None], variant: Variant | None = None,
        casts: tuple[object, ...] = (), *, infers: bool = False,
    ) -> None:  # fmt: skip
        self.func, self.args, self.kwargs, self.results, self.variant = func, args, kwargs, results, variant
        self.grad_mode, self.autocast = torch.is_grad_enabled(), casts
        self.infers = infers
        """Whether it may ask, in inference mode, for which of its arguments gradients are wanted."""


def described(args: Args, kwargs: Kwargs, results: Sequence[object]) -> Leaves:
    """What an operator's behaviour may depend on besides the values: kinds and shapes of these tensors, as noted, and what else
    is among them."""
    found, plain = list[object](), list[object]()
    _describe((*args, *kwargs.items(), *results) if kwargs else (*args, *results), found, plain)
    return [len(results), *found, repr(plain)] if plain else [len(results), *found]


def _describe(values: Iterable[object], found: list[object], plain: list[object]) -> None:
    for value in values:
        if type(value) is Operand:
            found.append(value.kind)
        elif type(value) in NO_TENSORS:
            plain.append(value)
        elif isinstance(value, torch.Tensor):
            found.append(kind_of(value))
        elif isinstance(value, dict):
            _describe(value.items(), found, plain)
        elif isinstance(value, (list, tuple)) and any(isinstance(v, (Operand, torch.Tensor)) for v in value):
            _describe(value, found, plain)
        else:
            plain.append(value)
