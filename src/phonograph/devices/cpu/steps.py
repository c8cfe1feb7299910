"""Operators on a tape, as they are noted: tensors are operands, whose memory is final when the capture ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import is_grad_enabled

from ..._torch.dynamic import Thing
from ..._torch.tensors import neg_view, storage_at
from ...capture.notes import Kind, kind_of
from .out_variants import Variant

__all__ = ["Operand", "Place", "Step", "tensor_in"]


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
        self.place, self.offset, self.kind = place, int(t.storage_offset()), kind_of(t)

    def tensor(self) -> torch.Tensor:
        return tensor_in(self.place, self.offset, self.kind)


def tensor_in(place: Place, offset: int, kind: Kind) -> torch.Tensor:
    dtype, size, stride, conjugate, negative, trained = kind
    t = torch.empty(0, dtype=dtype, device="cpu").set_(place.storage(), offset, size, stride)
    t = torch.conj(t) if conjugate else t
    t = neg_view(t) if negative else t
    return t.requires_grad_() if trained else t


class Step:
    """One operator of the tape: what to call, with what, and which new tensors its results go to. Its arguments have operands
    in the places of tensors; or looks, and beside them the places of these, in order."""

    __slots__ = ("args", "autocast", "func", "grad_mode", "infers", "kwargs", "places", "results", "variant")

    def __init__(
        self, func: Thing, args: Sequence[Thing], kwargs: Mapping[str, Thing], results: list[Operand | None],
        variant: Variant | None = None, casts: tuple[object, ...] = (), *, infers: bool = False, places: Sequence[Place] = (),
    ) -> None:  # fmt: skip
        self.places = places
        self.func, self.args, self.kwargs, self.results, self.variant = func, args, kwargs, results, variant
        self.grad_mode, self.autocast = is_grad_enabled(), casts
        self.infers = infers
        """Whether it may ask, in inference mode, for which of its arguments gradients are wanted."""
