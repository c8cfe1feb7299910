"""Tensors outside with a history of their own: a backward of the call would go on through it, to what nobody knows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import FrameType

import torch

from ..aten import operators
from ..errors import Refusal
from ..guards.reachable import Reach
from ..python.identity import identity
from ..python.origin import BACKWARD
from .effects import ANYONE, Effect, Starts

__all__ = ["Histories"]

_HISTORIC = Effect("reads a tensor outside that has a history of its own", "pass it as an argument, or detach it", ANYONE)


class Histories:
    """Those of the tensors in reach of one call."""

    def __init__(self, reach: Reach) -> None:
        tensors = [t for _, t in (*reach.tensors.values(), *reach.made.values())]
        self._nodes = {identity(t): t.grad_fn for t in tensors if t.requires_grad and t.grad_fn is not None}

    def __bool__(self) -> bool:
        return bool(self._nodes)

    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Refuse an operator that autograd follows, and that is given one of them."""
        if not self._nodes.keys().isdisjoint(map(identity, tensors)):
            raise Refusal(_HISTORIC.reason, _HISTORIC.remedy)

    def check_result(self, m: operators.Meaning, tensors: Sequence[torch.Tensor], out: object) -> None:
        """The same for an operator that has given `out`: of a shape alone, nothing comes that a gradient belongs to."""
        if self._nodes.keys().isdisjoint(map(identity, tensors)) or m.name == "aten::detach":
            return
        if m.name.startswith("aten::new_") or (m.name.endswith("_like") and m.name != "aten::ones_like"):
            return  # (Of ones is the gradient with which a backward begins.)
        if any(t.is_floating_point() or t.is_complex() for t in operators.tensors_in(out, [])):
            raise Refusal(_HISTORIC.reason, _HISTORIC.remedy)

    def backwards(self) -> Starts:
        """The function that begins each backward: it may begin with one of those, which no operator need have read."""
        rule = os.path.join("torch", "autograd", "graph.py"), self._begins_there, _HISTORIC
        return {BACKWARD: [rule]} if self._nodes else {}

    def _begins_there(self, frame: FrameType) -> bool:
        roots = frame.f_locals.get("t_outputs", ())
        nodes = [getattr(root, "node", None) for root in roots]
        return any(identity(root) in self._nodes for root in roots) or any(n in self._nodes.values() for n in nodes if n)
