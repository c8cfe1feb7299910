"""Tensors from outside with a history of their own: a backward of the call would go on through it, to what nobody knows.

Those in reach are refused where they are read. Of an argument, the history ends where the call begins, so what the call
differentiates by must not lie behind it: `torch.autograd.grad(loss, weight)`, where the argument was made of that weight.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .._torch.dynamic import Thing
from .._torch.tensors import has_memory, is_ordinary, storage_id
from ..aten import operators
from ..errors import Refusal
from ..guards.reachable import Reach
from ..python.identity import identity
from ..python.origin import BACKWARD
from .effects import ANYONE, Effect, Starts

__all__ = ["Histories"]

_HISTORIC = Effect("reads a tensor outside that has a history of its own", "pass it as an argument, or detach it", ANYONE)
_BEHIND = Effect("differentiates by a tensor that was there before, perhaps behind the history of an argument",
                 "pass that argument detached, or compute it in the function", ANYONE)  # fmt: skip


class Histories:
    """Those of the tensors in reach of one call, and of its arguments."""

    def __init__(self, reach: Reach) -> None:
        tensors = [t for _, t in (*reach.tensors.values(), *reach.made.values())]
        self._nodes = {identity(t): t.grad_fn for t in tensors if t.requires_grad and t.grad_fn is not None}
        self._ends: dict[Thing, int] = {}  # where those of arguments end in the call, and on which storage

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

    def end_there(self, arguments: Iterable[torch.Tensor]) -> None:
        """These stand for arguments that have a history."""
        self._ends = {get_gradient_edge(t).node: storage_id(t) for t in arguments}

    def backwards(self, is_outside: Callable[[int], bool]) -> Starts:
        """The function that begins each backward: it may begin with a tensor in reach, which no operator need have read, or
        ask for the gradient of what lies behind an argument. Of a storage, `is_outside` says whether it was there before."""

        def behind(frame: FrameType) -> bool:
            keys = map(_storage, _differentiated(frame.f_locals.get("args", ())))
            asked = {key for key in keys if not key or is_outside(key)}
            return bool(asked) and any(asked - {self._ends[n]} for n in self._met(frame.f_locals.get("t_outputs", ())))

        file = os.path.join("torch", "autograd", "graph.py")
        rules: list[tuple[str, Callable[[FrameType], bool], Effect]] = []
        rules += [(file, self._begins_there, _HISTORIC)] if self._nodes else []
        rules += [(file, behind, _BEHIND)] if self._ends else []
        return {BACKWARD: rules} if rules else {}

    def _begins_there(self, frame: FrameType) -> bool:
        roots = frame.f_locals.get("t_outputs", ())
        nodes = [getattr(root, "node", None) for root in roots]
        return any(identity(root) in self._nodes for root in roots) or any(n in self._nodes.values() for n in nodes if n)

    def _met(self, roots: Sequence[Thing]) -> Iterator[Thing]:
        """The ends of arguments' histories that a backward from there comes to."""
        edges = [x if isinstance(x, GradientEdge) else get_gradient_edge(x) for x in roots if getattr(x, "requires_grad", True)]
        left: list[Thing] = [edge.node for edge in edges]
        seen = set[Thing]()
        while left:
            node = left.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node in self._ends:
                yield node
            left.extend(following for following, _ in node.next_functions)


def _differentiated(given: Sequence[Thing]) -> Sequence[Thing]:
    """By what a backward is asked to differentiate, in what its function is given after the outputs."""
    return given[3] if len(given) > 3 and given[3] else ()


def _storage(x: Thing) -> int:
    """The storage of a tensor; 0 for what tells of none."""
    return storage_id(x) if isinstance(x, torch.Tensor) and is_ordinary(x) and has_memory(x) else 0
