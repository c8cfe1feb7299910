"""Operands and results of branches and loops: trees of tensors. Results share no memory with operands."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from .._torch.dynamic import Leaves, Thing
from .._torch.modes import without_modes
from .._torch.tensors import has_memory
from ..capture import control_flow
from ..capture.dispatch import OperatorWatch
from ..devices.cuts import Cuts
from ..engine.current_capture import recording_here
from ..guards.sameness import same
from ..values.pytree import flatten, unflatten
from ..values.pytree_nodes import Node

__all__ = ["Tree", "apart", "number_of", "watch_here"]


_TENSOR = object()  # in the place of one


class Tree(NamedTuple):
    """Tree taken apart: its shape, its leaves with a mark for each tensor, and the tensors."""

    shape: Node | None
    others: Leaves
    tensors: list[torch.Tensor]

    @classmethod
    def of(cls, value: object) -> Tree:
        leaves: Leaves = []
        shape = flatten(value, leaves)
        others = [_TENSOR if isinstance(x, torch.Tensor) else x for x in leaves]
        return cls(shape, others, [x for x in leaves if isinstance(x, torch.Tensor)])

    def whole(self, tensors: Iterable[torch.Tensor]) -> Thing:
        """The tree with these tensors."""
        left = iter(tensors)
        return unflatten(self.shape, iter([next(left) if x is _TENSOR else x for x in self.others]))

    def alike(self, other: Tree) -> bool:
        """Whether the other has tensors in the same places, and the same in all others."""
        return self.shape == other.shape and all(map(same, self.others, other.others))


def apart(result: object, operands: Iterable[torch.Tensor]) -> Tree:
    """A result with a copy of each tensor that shares memory with an operand, or with one before it in the result."""
    found = Tree.of(result)
    return found._replace(tensors=control_flow.apart(found.tensors, operands))


def watch_here() -> OperatorWatch | None:
    """That of the call that is captured on this thread, if one is."""
    return Cuts.watch() if recording_here() else None


def number_of(t: torch.Tensor, name: str) -> Thing:
    """What a live call reads of a tensor, which is called so, to go on. It is nothing that a recording would stumble over.

    Raises:
        RuntimeError: it has more elements than one, or none.
    """
    if t.numel() != 1:
        raise RuntimeError(f"{name} must be a tensor of one element, not of shape {tuple(t.shape)}")
    if type(t) not in (torch.Tensor, torch.nn.Parameter) or not has_memory(t):
        return t.item()  # which raises as it does in eager
    with without_modes():
        return torch.ops.aten._local_scalar_dense.default(t)
