"""Who tells us that somebody may have come to what only one attribute leads to, so that a replay need not look at all of it.

Gradients stand in `.grad` of parameters: many objects, and in a steady loop nobody else has any of them. Whoever wants to
change one has to take it out of its attribute first, or put another there. So the attribute is a property that leaves a note,
and so does the engine of autograd, which installs gradients in C++: the door's `epoch` is another number from then on. A
recording looks at all that is behind a door when the epoch has moved: at what is there, and at whether somebody has kept some
of it, who could change it later without coming again. As long as somebody has, it looks each time.

What has no such attribute (a plain tensor given to an optimizer, a class that has a `grad` of its own) is looked at each time
as well.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

import torch

from .identity import identity
from .torch_private import hear_engine, use_count

__all__ = ["Door", "gradient", "gradients", "has_gradient_door", "nobody_has", "open_gradients"]

_numbers = count(1)  # none comes twice: two threads that count at one time still leave another one than was there


class Door:
    """One of these attributes, for all objects that have it."""

    __slots__ = ("busy", "epoch", "owners")

    def __init__(self) -> None:
        self.epoch = 0
        """Another number whenever somebody may have gone through since."""
        self.busy: list[None] = []
        """Not empty while somebody is at work behind it."""
        self.owners: set[int] = set()  # whose attribute leads to what a recording relies on, by identity

    def watch(self, owners: Iterable[object]) -> None:
        """Let whoever goes through the attribute of one of these be heard. (An id that is used again later only costs a
        comparison too many.)"""
        self.owners.update(map(identity, owners))

    def opened(self) -> None:
        """Somebody goes through, or has."""
        self.epoch = next(_numbers)


gradients = Door()

_inherited: Any = torch._C.TensorBase.grad
gradient: Callable[[Any], Any] = _inherited.__get__
"""`Tensor.grad`, unheard."""
_attribute: property | None = None


def open_gradients() -> None:
    """From now on it is heard who reads or sets the gradient of a parameter, and when autograd has been at work."""
    global _attribute
    if _attribute is not None or not hear_engine(gradients.busy, gradients.opened):
        return
    owners, put, drop = gradients.owners, _inherited.__set__, _inherited.__delete__

    def get(p: Any) -> Any:
        found = gradient(p)
        if found is not None and identity(p) in owners:
            gradients.epoch = next(_numbers)
        return found

    def given(p: Any, grad: Any) -> None:
        try:
            put(p, grad)
        finally:
            if identity(p) in owners:
                gradients.epoch = next(_numbers)

    def dropped(p: Any) -> None:
        drop(p)
        gradients.opened()

    _attribute = property(get, given, dropped, _inherited.__doc__)
    torch.nn.Parameter.grad = _attribute  # type: ignore[assignment]
    swap = torch.utils.swap_tensors

    @functools.wraps(swap)
    def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
        swap(t1, t2)  # type: ignore[no-untyped-call]
        gradients.opened()

    torch.utils.swap_tensors = swap_tensors


def has_gradient_door(t: torch.Tensor) -> bool:
    """Whether it is heard who reads or sets its gradient."""
    return _attribute is not None and _found(type(t), "grad") is _attribute


def _found(kind: type, name: str) -> Any:
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


def nobody_has(found: Sequence[torch.Tensor]) -> bool:
    """Whether nobody has one of these gradients, just read, but for the parameter and this sequence: neither the tensor nor
    another on its memory, nor that memory, nor a way to get it again."""
    return all(map(_no_more, _references(found), _unheld())) and not any(map(weakref.getweakrefcount, found))


def _no_more(counts: list[int], of_one: list[int]) -> bool:
    return not counts or max(counts) <= of_one[0]


def _references(found: Sequence[torch.Tensor]) -> list[list[int]]:
    """To tensors; to their memory, by tensors, and by Python."""
    owners = [use_count(t.untyped_storage()._cdata) for t in found]
    return [[*map(sys.getrefcount, found)], owners, [sys.getrefcount(t.untyped_storage()) for t in found]]


@functools.cache
def _unheld() -> list[list[int]]:
    """The same of a gradient that nobody else has."""
    with torch.inference_mode(False), torch.no_grad():
        leaf = torch.nn.Parameter(torch.zeros(1))
        leaf.grad = torch.zeros(1)
    return _references([*map(gradient, [leaf])])
