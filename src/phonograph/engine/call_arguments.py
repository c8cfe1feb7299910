"""The arguments of a call that is captured: what stands for them in it, and what the call does to them.

A function may write into the tensors that it is given, and change lists, dictionaries and objects: a replay repeats both for
the caller. What else it does to an argument (its shape, its history, a hook) cannot be repeated, and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import NamedTuple

import torch

from .._torch.dynamic import Leaves, Table
from ..call.signature import Call, attributes
from ..errors import Refusal
from ..python.identity import identity
from ..values.container_edits import Edit, entries
from ..values.pytree import Flattener, Opens, flatten, goes_by_pytree, opened_in, unflatten

__all__ = ["Arguments"]


class Arguments:
    """Of one captured call. Its tensors stand for the slots, its sets are copies, and its containers the `built` ones."""

    def __init__(self, call: Call, leaves: Leaves, tensors: list[torch.Tensor]) -> None:
        """`tensors` stand for those of the call, and are among the `leaves`."""
        self._call, self._tensors = call, tensors
        self._sets = {identity(x): set(x) for x in leaves if type(x) is set}
        self._leaves = [self._sets.get(identity(x), x) for x in leaves]
        self.built: Leaves = []
        self.args, self.kwargs = unflatten(call.shape, iter(self._leaves), self.built)
        self._opened = opened_in(call.shape)
        self._held = [entries(c, self._opened) for c in self.built]
        self._sealed = _sealed(self.built, self._held)
        self._metadata = [_metadata(t) for t in tensors]
        self.turned = tuple[int, ...]()
        """The tensors that require a gradient now, and did not: so do the caller's after each call."""

    def copied(self) -> frozenset[int]:
        """The identities of the sets that the call has got."""
        return frozenset(map(identity, self._sets.values()))

    def edits(self) -> list[tuple[Edit, list[object]]]:
        """What the call has done to containers, with the new values.

        Raises:
            Opens: it is to be looked for in attributes of objects of these classes.
        """
        now: Leaves = []
        shut = {identity(x) for x in self._call.leaves if not isinstance(x, torch.Tensor)}
        shape = flatten((self.args, self.kwargs), now, Flattener(shut, by_attributes=self._opened))
        if shape == self._call.shape and len(now) == len(self._leaves) and all(map(is_, now, self._leaves)):
            return []
        found = []
        for i, (container, then) in enumerate(zip(self.built, self._held, strict=True)):
            after = entries(container, self._opened)
            edit = Edit.between(i, then, after, self._opened) if then is not None and after is not None else None
            if edit is not None and after is not None:
                found.append((edit, [after[at] for at in edit.new]))
        sealed = zip(self.built, self._sealed, _sealed(self.built, self._held), strict=True)
        unlike = [c for c, a, b in sealed if a != b]
        if kinds := {type(c) for c in unlike if goes_by_pytree(c)} - self._opened:
            raise Opens(kinds)
        if unlike or not found:
            raise Refusal("changes a container that is an argument", "return the new value")
        return found

    def turn(self) -> None:
        """Note which tensors are `turned`. (One that stands for itself is the caller's already.)"""
        given = enumerate(zip(self._tensors, self._call.tensors, self._metadata, strict=True))
        self.turned = tuple([i for i, (t, theirs, was) in given if t is not theirs and _is_turned(t, was)])

    def gained(self) -> list[int]:
        """The tensors that have a gradient now: they had none, or would stand for themselves. (What stands for one with a
        history is a leaf as well, but the gradient is not for that: a backward goes on from there.)"""
        given = zip(self._tensors, self._call.tensors, strict=True)
        leaves = [(i, t) for i, (t, theirs) in enumerate(given) if theirs.is_leaf]
        return [i for i, t in leaves if type(t) is torch.Tensor and t.is_leaf and t.requires_grad and t.grad is not None]

    def take_gradients(self, numbers: Sequence[int]) -> list[torch.Tensor | None]:
        """Take the gradients of these tensors away."""
        tensors = [self._tensors[i] for i in numbers]
        gradients = [t.grad for t in tensors]
        for t in tensors:
            t.grad = None
        return gradients

    def check(self) -> None:
        """Refuse what the call has done to them that cannot be repeated for the caller."""
        if any(self._sets[identity(x)] != x for x in self._call.leaves if type(x) is set):
            raise Refusal("changes a container that is an argument", "return the new value")
        for i, (t, was) in enumerate(zip(self._tensors, self._metadata, strict=True)):
            if _metadata(t) != (was._replace(requires_grad=True) if i in self.turned else was):
                raise Refusal(
                    "changes what an argument is (its shape, its history, hooks, attributes)", "use a new tensor instead"
                )
            if type(t) is torch.Tensor and t.requires_grad and t.grad is not None:
                raise Refusal("accumulates a gradient in an argument", "use torch.autograd.grad and return the gradient")


class _Metadata(NamedTuple):
    address: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    history: object
    hooks: tuple[int, int]
    attributes: object


def _metadata(t: torch.Tensor) -> _Metadata:
    hooks = len(t._backward_hooks or ()), len(getattr(t, "_post_accumulate_grad_hooks", None) or ())
    return _Metadata(t.data_ptr(), t.shape, t.stride(), t.dtype, t.requires_grad, t.grad_fn, hooks, attributes(t))


def _is_turned(t: torch.Tensor, was: _Metadata) -> bool:
    """Whether this requires a gradient by `requires_grad_()`: it has no history."""
    return type(t) is torch.Tensor and t.requires_grad and t.is_leaf and not (was.requires_grad or t.is_inference())


def _sealed(built: Sequence[object], held: Sequence[Table | None]) -> Leaves:
    """What containers have in them that can change, and not by what they hold."""
    others = {identity(c) for c in built}
    found = []
    for c, holds in zip(built, held, strict=True):
        leaves: Leaves = []
        shape = flatten(c, leaves, Flattener(others - {identity(c)})) if holds is None and not isinstance(c, tuple) else None
        found.append((shape, [*map(identity, leaves)]))
    return found
