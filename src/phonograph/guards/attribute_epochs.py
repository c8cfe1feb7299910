"""Who tells us that somebody may have come to what only one attribute leads to, so that a replay need not look at all of it.

Gradients stand in `.grad` of parameters, what optimizers remember in their `state`: many objects, and in a steady loop nobody
else has any of them. Whoever wants to change one has to take it out of its attribute first, or put another there. So these
attributes are properties that leave a note, and so does the engine of autograd, which installs gradients in C++: it is another
epoch from then on. A recording looks at all that is behind a door when the epoch has moved: at what is there, and at whether
somebody has kept some of it, who could change it later without coming again. As long as somebody has, it looks each time.

All code of the process goes through these doors. So they are there only as long as a recording needs them: without one, the
attributes are torch's own.

What has no such attribute (a plain tensor given to an optimizer, a class that has a `grad` or a `state` of its own) is looked
at each time as well.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import count

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .._torch.autograd import hearing
from .._torch.dynamic import Private
from .._torch.dynamo import not_compiled_by_itself
from .._torch.modes import ASKS_NO_SUBCLASS
from .._torch.native import Fact
from .._torch.tensors import TensorBase, is_ordinary, owners, use_count
from ..python.identity import identity
from ..python.standing import fresh_in_children
from .replaced import back_again, stands_for

__all__ = ["Door", "Room", "gradient", "gradients", "has_gradient_door", "may_have_door", "nobody_has", "room_of", "states"]

_numbers = count(1)  # none comes twice: two threads that count at one time still leave another one than was there


class Door:
    """One of these attributes, for all objects that have it. It is there for those that need to hear of it: without any, the
    attribute is torch's own."""

    def __init__(self, hang: Callable[[], None], take_away: Callable[[], None]) -> None:
        self._hang, self._take_away = hang, take_away
        self._hung = False
        self._users: set[weakref.ref[object]] = set()
        self._lock = fresh_in_children(threading.RLock())  # a user may go, as garbage, within any of the lines that have it

    def stay_for(self, user: object) -> None:
        """It is there from now on, until this object is gone or says that it needs it no more."""
        with self._lock:
            self._users.add(weakref.ref(user, self._gone))
            self._settle()

    def leave(self, user: object) -> None:
        """This object needs it no more."""
        self._gone(weakref.ref(user))

    def _gone(self, user: weakref.ref[object], ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if ending():  # torch may have gone before
            return
        with self._lock:
            self._users.discard(user)
            self._settle()

    def _settle(self) -> None:
        while self._hung is not bool(self._users):  # again: some may have come or gone meanwhile
            self._hung = not self._hung
            (self._hang if self._hung else self._take_away)()


class _Replaced:
    """An attribute that is another for a while, made of what is there."""

    def __init__(self, owner: object, name: str, make: Callable[[object], object]) -> None:
        self._owner, self._name, self._make = owner, name, make
        self._there: tuple[object, object] | None = None

    def put(self) -> bool:
        """Whether it could be made."""
        if self._there is None:
            before = vars(self._owner)[self._name]
            made = self._make(before)
            if made is None:
                return False
            self._there = before, made
            stands_for(made, before)
            setattr(self._owner, self._name, made)
        return True

    def back(self) -> None:
        """It is again what it was; where somebody has put another there, which calls it, it stays."""
        if self._there is not None and vars(self._owner).get(self._name) is self._there[1]:
            setattr(self._owner, self._name, self._there[0])
            back_again(self._there[1])
            self._there = None


def _telling(opened: Callable[[], None]) -> Callable[[object], object]:
    """What makes of a function one after which a door has been `opened`."""

    def make(function: Private) -> Private:
        @functools.wraps(function)
        def run(*args: object, **kwargs: object) -> object:
            try:
                return function(*args, **kwargs)
            finally:
                opened()

        return run

    return make


class _Asked:
    """How often a cache that holds nothing has been asked, where that cannot be read more quickly."""

    def __init__(self, counts: Private) -> None:
        self._counts = counts

    @property
    def value(self) -> int:
        return int(self._counts.cache_info().misses)


def _counting(function: Callable[..., Private]) -> tuple[Callable[..., Private], object]:
    """The same function, without a line of Python around it, and the number of its calls: a cache that holds nothing counts how
    often it is asked."""
    counts = functools.lru_cache(maxsize=0)(function)
    return counts, _word_that_counts(counts) or _Asked(counts)


def _word_that_counts(counts: Private) -> object:
    """Where the number of calls lies in this object, which is read in a tenth of the time; None if that is not found."""
    if sys.implementation.name != "cpython":
        return None
    size = ctypes.sizeof(ctypes.c_ssize_t)
    words, seen = (ctypes.c_ssize_t * (type(counts).__basicsize__ // size)).from_address(id(counts)), list[list[int]]()
    for _ in range(3):
        seen.append([*words])
        with suppress(TypeError):  # a call without arguments comes to nothing
            counts()
    found = [i for i, (a, b, c) in enumerate(zip(*seen, strict=True)) if b - a == c - b == 1]
    word = ctypes.c_ssize_t.from_address(id(counts) + found[0] * size) if len(found) == 1 else None
    return word if word is not None and word.value == counts.cache_info().misses else None


_inherited: Private = TensorBase.grad
gradient: Callable[[torch.Tensor], Private] = _inherited.__get__
"""`Tensor.grad`, unheard."""
_get, _got = _counting(gradient)
_give, _given = _counting(_inherited.__set__)


def _remove(p: object) -> None:
    try:
        _inherited.__delete__(p)
    finally:
        gradients.opened()


_attribute = property(_get, _give, _remove, _inherited.__doc__)
stands_for(_attribute)
_swap = _Replaced(torch.utils, "swap_tensors", _telling(lambda: gradients.opened()))
_engine = _Replaced(
    torch.autograd.Variable, "_execution_engine", lambda engine: hearing(engine, gradients.busy, gradients.opened)
)


def _hang_gradients() -> None:
    """From now on it is heard who reads or sets the gradient of a parameter, and when autograd has been at work."""
    if "grad" not in vars(torch.nn.Parameter) and _engine.put():
        not_compiled_by_itself(_remove.__code__)
        for kind in _kinds:
            kind.grad = _attribute  # type: ignore[assignment]
        _swap.put()


def _take_gradients_away() -> None:
    for kind in _kinds:
        if vars(kind).get("grad") is _attribute:
            del kind.grad
    _engine.back()
    _swap.back()


_kinds: list[type[torch.Tensor]] = [torch.nn.Parameter]


class _Gradients(Door):
    """`Parameter.grad`, and that of torch's other classes of which parameters may be, DTensors. Whoever reads or sets one is
    counted, also where no recording relies on it: plain code does that far more often than a replay asks."""

    def __init__(self) -> None:
        super().__init__(_hang_gradients, _take_gradients_away)
        self.busy: list[None] = []
        """Not empty while somebody is at work behind it."""

    def lead_to(self, parameters: Iterable[torch.Tensor]) -> None:
        """There may be parameters of the classes of these."""
        with self._lock:
            for kind in {type(p) for p in parameters}.difference(_kinds):
                if kind.__module__.startswith("torch.distributed.") and _found(kind, "grad") is _inherited:
                    _kinds.append(kind)
                    if vars(torch.nn.Parameter).get("grad") is _attribute:
                        kind.grad = _attribute

    @staticmethod
    def opened() -> None:
        """Somebody goes through, or has."""
        _get(None, torch.Tensor)

    @staticmethod
    def now(got: Private = _got, given: Private = _given) -> tuple[int, int]:
        """The epoch: something else whenever somebody may have gone through since."""
        return got.value, given.value

    def facts(self) -> list[Fact] | None:
        """Which say that nobody has gone through, or is at work behind it."""
        counts = [("word", count, ctypes.addressof(count)) for count in (_got, _given) if isinstance(count, ctypes.c_ssize_t)]
        return [*counts, ("items", self.busy)] if len(counts) == 2 else None


gradients: _Gradients = _Gradients()


def may_have_door(t: torch.Tensor) -> bool:
    """Whether it is heard, while the door is there and leads to such, who reads or sets its gradient."""
    kind: Private = type(t)
    asked = _found(kind, "__torch_function__")
    plain = kind.__torch_function__ is ASKS_NO_SUBCLASS or asked is vars(torch.Tensor)["__torch_function__"]
    comes = torch.nn.Parameter in kind.__mro__ or kind.__module__.startswith("torch.distributed.")
    return comes and plain and _found(kind, "grad") in (_attribute, _inherited)


def has_gradient_door(t: torch.Tensor) -> bool:
    """Whether it is heard who reads or sets its gradient."""
    return may_have_door(t) and _found(type(t), "grad") is _attribute


def _found(kind: type, name: str) -> object:
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


def nobody_has(found: Sequence[torch.Tensor]) -> bool:
    """Whether nobody has one of these gradients, just read, but for the parameter and this sequence: neither the tensor nor
    another on its memory (but that of which it is a view, which nobody has, either), nor that memory, nor a way to get it
    again. (Of one that consists of parts it is not known.)"""
    if not all(map(is_ordinary, found)):
        return False
    bases = [t._base for t in found if t._base is not None]
    unheld, unheld_base = _unheld()
    free = all(map(_no_more, _references(found), unheld)) and all(map(_no_more, _objects(bases), unheld_base))
    return free and not any(map(weakref.getweakrefcount, [*found, *bases]))


def _no_more(counts: list[int], of_one: list[int]) -> bool:
    return not counts or max(counts) <= of_one[0]


def _references(found: Sequence[torch.Tensor]) -> list[list[int]]:
    """To tensors, Python's and others; to their memory, by tensors (but for bases), and by Python."""
    on_memory = [use_count(t.untyped_storage()._cdata) - (t._base is not None) for t in found]
    memory = [sys.getrefcount(t.untyped_storage()) for t in found]
    return [*_objects(found), on_memory, memory]


def _objects(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """References to these, Python's and others."""
    return [[*map(sys.getrefcount, tensors)], [*map(owners, tensors)]]


@functools.cache
def _unheld() -> tuple[list[list[int]], list[list[int]]]:
    """The same of a gradient that nobody else has, and of what is the base of one only."""
    with torch.inference_mode(False), torch.no_grad():
        leaf, view = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
        leaf.grad, view.grad = torch.zeros(1), torch.zeros(1).view(1)
    bases = [t._base for t in map(gradient, [view]) if t._base is not None]
    return _references([*map(gradient, [leaf])]), _objects(bases)


class Room:
    """The state of one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._seen: Private = None  # the dictionary that was there last, which is kept: no other lies where it does
        self._number = 0

    @property
    def _inside(self) -> Private:
        optimizer = self._optimizer()
        return None if optimizer is None else optimizer.__dict__.get(_STATE)

    def watch(self) -> None:
        """Let it be heard who comes to it."""
        optimizer = self._optimizer()
        if optimizer is not None:
            _owners.add(identity(optimizer))

    def now(self) -> int:
        """Which dictionary it is: `__setstate__` puts another there, past the door. That has another number."""
        inside = self._inside
        if inside is not self._seen:
            self._seen, self._number = inside, next(_numbers)
        return self._number

    def facts(self) -> list[Fact]:
        """Which say that it is the one that was there last."""
        return [("place", getattr(self._optimizer(), "__dict__", {}), _STATE), ("item", vars(self), "_number")]

    def alone(self) -> bool:
        """Whether nobody else has it, or a dictionary in it, nor could without being heard."""
        kind = type(self._optimizer())
        if _found(kind, _STATE) is not _state or kind.__hash__ is not object.__hash__:
            return False
        self.now()
        inside, (outer, inner) = self._inside, _free_dictionaries()
        return sys.getrefcount(inside) <= outer and all(n <= inner for n in map(sys.getrefcount, dict.values(inside)))

    def read(self) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
        """Of each parameter, what is there, by identity."""
        return [(p, self.of(p)) for p in dict.keys(self._inside)]

    def opened(self) -> None:
        """Something in it is replaced."""
        states.opened()

    def of(self, p: torch.Tensor) -> tuple[int, ...]:
        """What is there of one parameter, by identity."""
        found = dict.get(self._inside, p)
        return tuple(map(identity, dict.values(found))) if isinstance(found, dict) else (identity(found),)


_STATE = "state"
_rooms = WeakIdKeyDictionary()
_owners: set[int] = set()
"""The optimizers on whose state recordings rely, by identity. (One that is used again later only costs a comparison too
many.)"""


@functools.cache
def _free_dictionaries() -> tuple[int, int]:
    """How many references there are, as `Room.alone` counts them, if nobody has any."""
    own: dict[str, Private] = {_STATE: {0: dict.fromkeys("a")}}
    inside, _seen = own[_STATE], own[_STATE]  # as a `Room` has it
    return sys.getrefcount(inside), max(map(sys.getrefcount, dict.values(inside)))


def room_of(optimizer: torch.optim.Optimizer) -> Room | None:
    """The room of an optimizer whose door can be heard; None where its state lies elsewhere."""
    found = optimizer.__dict__.get(_STATE)
    if _found(type(optimizer), _STATE) not in (None, _state) or not isinstance(found, dict):
        return None
    del found
    room: Room | None = _rooms.get(optimizer)
    if room is None:
        room = _rooms[optimizer] = Room(optimizer)
    return room


class _Unseen(type):
    """Of descriptors that only the interpreter takes for such: whoever looks for their methods, as `torch.compile` does and
    `inspect.getattr_static`, does not find any, and so takes what stands in the object for the attribute. What is traced is
    what it would be if nobody listened, and its guards and writes come through the door."""

    @property  # type: ignore[misc]
    def __dict__(cls) -> dict[str, object]:  # type: ignore[override]
        return {}

    def __getattribute__(cls, name: str) -> object:
        if name in _ways:
            raise AttributeError(f"type object {type.__getattribute__(cls, '__name__')!r} has no attribute {name!r}")
        return super().__getattribute__(name)


def _read(_: object, optimizer: object, kind: type) -> Private:
    try:
        found = optimizer.__dict__[_STATE]
    except (AttributeError, KeyError):
        of = f"type object {kind.__name__!r}" if optimizer is None else f"{kind.__name__!r} object"
        raise AttributeError(f"{of} has no attribute {_STATE!r}") from None
    try:
        if hash(optimizer) in _owners:
            states.epoch = next(_numbers)
    except TypeError:  # of a class whose objects have none
        pass
    return found


def _put(_: object, optimizer: object, state: object) -> None:
    optimizer.__dict__[_STATE] = state
    states.opened()


def _drop(_: object, optimizer: object) -> None:
    states.opened()
    try:
        del optimizer.__dict__[_STATE]
    except KeyError:
        raise AttributeError(f"{type(optimizer).__name__!r} object has no attribute {_STATE!r}") from None


_ways = {"__get__": _read, "__set__": _put, "__delete__": _drop}


class _State(metaclass=_Unseen):
    """`Optimizer.state`, which stands in the optimizer, as ever."""

    locals().update(_ways)


_state = _State()
stands_for(_state)
_restore = _Replaced(torch.optim.Optimizer, "__setstate__", _telling(lambda: states.opened()))


def _hang_states() -> None:
    """From now on it is heard who reads or sets the state of an optimizer."""
    optimizers: Private = torch.optim.Optimizer
    if _STATE not in vars(optimizers):
        for function in _ways.values():
            not_compiled_by_itself(function.__code__)
        optimizers.state = _state
        _restore.put()


def _take_states_away() -> None:
    optimizers: Private = torch.optim.Optimizer
    if vars(optimizers).get(_STATE) is _state:
        del optimizers.state
    _restore.back()


class _States(Door):
    """`Optimizer.state`."""

    def __init__(self) -> None:
        super().__init__(_hang_states, _take_states_away)
        self.epoch = 0
        """Another number whenever somebody may have gone through since."""

    def opened(self) -> None:
        """Somebody goes through, or has."""
        self.epoch = next(_numbers)


states: _States = _States()
