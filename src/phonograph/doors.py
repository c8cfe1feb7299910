"""Who tells us that somebody may have come to what only one attribute leads to, so that a replay need not look at all of it.

Gradients stand in `.grad` of parameters, what optimizers remember in their `state`: many objects, and in a steady loop nobody
else has any of them. Whoever wants to change one has to take it out of its attribute first, or put another there. So these
attributes are properties that leave a note, and so does the engine of autograd, which installs gradients in C++: the door's
`epoch` is another number from then on. A recording looks at all that is behind a door when the epoch has moved: at what is
there, and at whether somebody has kept some of it, who could change it later without coming again. As long as somebody has, it
looks each time.

What has no such attribute (a plain tensor given to an optimizer, a class that has a `grad` or a `state` of its own) is looked
at each time as well.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .identity import identity
from .torch_private import hear_engine, not_compiled_by_itself, use_count

__all__ = [
    "Door",
    "Room",
    "gradient",
    "gradients",
    "has_gradient_door",
    "nobody_has",
    "open_gradients",
    "room_of",
    "states",
]

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

    for function in (get, given, dropped):
        not_compiled_by_itself(function.__code__)
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


states = Door()
_state: _State | None = None


class Room:
    """The state of one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)

    @property
    def _inside(self) -> Any:
        optimizer = self._optimizer()
        return None if optimizer is None else optimizer.__dict__.get(_STATE)

    def now(self) -> int:
        """Which dictionary it is: `__setstate__` puts another there, past the door."""
        return identity(self._inside)

    def alone(self) -> bool:
        """Whether nobody else has it, or a dictionary in it."""
        inside, (outer, inner) = self._inside, _free_dictionaries()
        return sys.getrefcount(inside) <= outer and all(n <= inner for n in map(sys.getrefcount, dict.values(inside)))

    def read(self) -> list[tuple[Any, tuple[int, ...]]]:
        """Of each parameter, what is there, by identity."""
        return [(p, self.of(p)) for p in dict.keys(self._inside)]

    def of(self, p: Any) -> tuple[int, ...]:
        """What is there of one parameter, by identity."""
        found = dict.get(self._inside, p)
        return tuple(map(identity, dict.values(found))) if isinstance(found, dict) else (identity(found),)


_STATE = "state"


_rooms = WeakIdKeyDictionary()


@functools.cache
def _free_dictionaries() -> tuple[int, int]:
    """How many references there are, as `Room.alone` counts them, if nobody has any."""
    own: dict[str, Any] = {_STATE: {0: dict.fromkeys("a")}}
    inside = own[_STATE]
    return sys.getrefcount(inside), max(map(sys.getrefcount, dict.values(inside)))


def room_of(optimizer: torch.optim.Optimizer) -> Room | None:
    """The room of an optimizer whose door is heard; None where its state lies elsewhere."""
    _open_states()
    found = optimizer.__dict__.get(_STATE)
    if _found(type(optimizer), _STATE) is not _state or not isinstance(found, dict):
        return None
    del found
    room: Room | None = _rooms.get(optimizer)
    if room is None:
        room = _rooms[optimizer] = Room(optimizer)
        states.watch([optimizer])
    return room


def _open_states() -> None:
    """From now on it is heard who reads or sets the state of an optimizer."""
    global _state
    if _state is not None:
        return
    for function in _ways.values():
        not_compiled_by_itself(function.__code__)
    _state = _State()
    optimizers: Any = torch.optim.Optimizer
    optimizers.state = _state
    restored = optimizers.__setstate__

    @functools.wraps(restored)
    def restore(self: Any, state: dict[str, Any]) -> None:
        restored(self, state)
        states.opened()

    optimizers.__setstate__ = restore


class _Unseen(type):
    """Of descriptors that only the interpreter takes for such: whoever looks for their methods, as `torch.compile` does and
    `inspect.getattr_static`, does not find any, and so takes what stands in the object for the attribute. What is traced is
    what it would be if nobody listened, and its guards and writes come through the door."""

    @property  # type: ignore[misc]
    def __dict__(cls) -> dict[str, Any]:  # type: ignore[override]
        return {}

    def __getattribute__(cls, name: str) -> Any:
        if name in _ways:
            raise AttributeError(f"type object {type.__getattribute__(cls, '__name__')!r} has no attribute {name!r}")
        return super().__getattribute__(name)


def _read(_: object, optimizer: Any, kind: type) -> Any:
    try:
        found = optimizer.__dict__[_STATE]
    except (AttributeError, KeyError):
        of = f"type object {kind.__name__!r}" if optimizer is None else f"{kind.__name__!r} object"
        raise AttributeError(f"{of} has no attribute {_STATE!r}") from None
    if identity(optimizer) in states.owners:
        states.opened()
    return found


def _put(_: object, optimizer: Any, state: Any) -> None:
    optimizer.__dict__[_STATE] = state
    if identity(optimizer) in states.owners:
        states.opened()


def _drop(_: object, optimizer: Any) -> None:
    states.opened()
    try:
        del optimizer.__dict__[_STATE]
    except KeyError:
        raise AttributeError(f"{type(optimizer).__name__!r} object has no attribute {_STATE!r}") from None


_ways = {"__get__": _read, "__set__": _put, "__delete__": _drop}


class _State(metaclass=_Unseen):
    """`Optimizer.state`, which stands in the optimizer, as ever."""

    locals().update(_ways)
