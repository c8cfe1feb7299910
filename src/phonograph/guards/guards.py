"""What a recording assumes about the world outside its arguments, and how that is checked before each replay.

A recording has the addresses of weights and the values of attributes baked in. Each is a *reliance*: if it no longer
holds, the recording must not be played. Checking all of them in full costs milliseconds for a large model, so they are
kept in three groups:

* *hot*: closure cells, globals, attributes of plain objects and classes, hyper-parameters of optimizers, the addresses and
  metadata of tensors; of parameters too where there are few. Compared before every replay, by identity and at C speed.
* *behind a door*: gradients, and what optimizers remember. Compared in full when somebody may have come to them (`doors`), and
  otherwise one at a time in rotation.
* *watched*: the insides of modules, and many parameters. Compared in full when the witness's epoch has moved, and otherwise a
  few at a time in rotation, which finds the changes that go around the witness.

Identity is the fast test; where it fails, plain values are compared by type and value, because an equal number in a
new object is no change. Nor is an equal list, dictionary or set in place of another: it is its contents that are compared from
then on. But where the other was found in several places, it is a change: the function may look at both now.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import partial
from itertools import compress, cycle
from operator import attrgetter, is_
from types import FunctionType
from typing import Any, NamedTuple

import torch

from .._torch.autograd import bump
from .._torch.tensors import TensorBase, address, alias, has_memory, is_ordinary, tensor_check, use_count
from ..call.signature import modes
from ..python.containers import Holder, Spot
from ..python.dict_versions import Versions, at_one_glance, tell
from ..python.identity import identity, reading_list
from ..python.origin import written_out
from ..state.rng import share_state
from ..values.counters import Followed
from ..values.keys import NoSignature, plain_key
from ..values.tensor_subclasses import Description, consists_of_parts, parts, parts_of_all, storages
from . import module_epochs as witness
from .attribute_epochs import gradient, gradients, has_gradient_door, may_have_door, nobody_has, states
from .hyperparameters import Dials
from .objects import FEW
from .reachable import Reach

__all__ = ["Entries", "Grads", "Reliances", "Setting", "Snapshot", "changed", "is_heard_of", "not_heard", "relied", "same",
           "state_of", "which"]  # fmt: skip

_HOLDERS, _TENSORS, _REMEMBERED = 2, 64, 8  # so many that are watched are looked at in rotation...
_PLACES, _OTHERS, _KEPT, _STATE = "places", "tensors", "tensors of optimizers", "optimizers' state"
_DICTIONARIES = 16  # (so many of those places that lie in dictionaries which tell when they have changed)
_LONG = 32  # items of a list that is not read item by item
_LAP = 4  # ...once in so many replays: one kind each time


def same(a: Any, b: Any) -> bool:
    """Whether two held values are the same to a program: one object, equal plain values of one type, or functions that the same
    line has made and that hold nothing."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) is FunctionType:
        return a.__code__ is b.__code__ and a.__globals__ is b.__globals__ and not (_holds(a) or _holds(b))
    if type(a) is torch.Generator:
        return share_state(a, b)
    if type(a) in (list, tuple):
        return _all_same(a, b)
    if type(a) is dict:
        return list(a) == list(b) and all(map(same, a.values(), b.values()))
    try:
        return bool(plain_key(a) == plain_key(b))
    except NoSignature:
        return False


def _holds(f: FunctionType) -> bool:
    """Whether there is more to a function than its code."""
    return any((f.__closure__, f.__defaults__, f.__kwdefaults__, f.__dict__))


class Setting(NamedTuple):
    """A call has set a plain value where another was: perhaps a number, or what stands for one."""

    path: str
    spot: Spot
    old: Any
    new: Any
    number: bool


_NUMBERS = (int, float)
_PLAIN = frozenset({bool, str, type(None)})


class Snapshot:
    """What is in reach at one moment: the values of all holders, and what the tensors *are* (memory, shape, kind; their
    values are the device's business). It finds what a call changed, puts it back, and is what a recording relies on."""

    def __init__(self, reach: Reach) -> None:
        self.holders = reach.holders
        self.values = [h.read() for h in reach.holders]
        tensors = [t for _, t in reach.all_tensors]
        self.tensors = [(name, t, s) for (name, t), s in zip(reach.all_tensors, _states(tensors), strict=True)]
        self._hooks = {i: [dict(d or {}) for d in _hooks_of(t)] for i, (_, t, state) in enumerate(self.tensors) if state[-1]}
        self._aliases = [None if consists_of_parts(t) else alias(t) for t in tensors]  # the parts are among them

    def also(self, holders: Sequence[Holder]) -> None:
        """Places that were found only after a call, as they are now."""
        values = [h.read() for h in holders]
        self.holders = [*self.holders, *holders]
        self.values += values

    def changes(self) -> list[str]:
        """The names of places and tensors that are something else now. Objects that are equal to those that were there, not the
        same, and nothing that can change, are put back: nobody would hear of them."""
        found = []
        for holder, old in zip(self.holders, self.values, strict=True):
            now = holder.read()
            if len(now) != len(old) or not all(map(is_, now, old)):
                if len(now) == len(old) and all(map(_equal, old, now)):
                    holder.restore(old)
                else:
                    found.append(_name(holder, old, now))
        states = _states([t for _, t, _ in self.tensors])
        return found + [name for (name, _, state), now in zip(self.tensors, states, strict=True) if now != state]

    def settings(self) -> list[Setting]:
        """Where there are other plain values now; none if anything else has changed."""
        found = []
        for holder, old in zip(self.holders, self.values, strict=True):
            now = holder.read()
            if len(now) != len(old):
                return []
            for i, (a, b) in enumerate(zip(old, now, strict=True)):
                if a is not b and not _equal(a, b):
                    number = type(a) in _NUMBERS and (type(b) in _NUMBERS or isinstance(b, Followed))
                    if holder.spot is None or not (number or {type(a), type(b)} <= _PLAIN):
                        return []
                    found.append(Setting(holder.label(i, now), holder.spot(i, now), a, b, number))
        states = _states([t for _, t, _ in self.tensors])
        return found if all(now == state for (_, _, state), now in zip(self.tensors, states, strict=True)) else []

    def restore(self) -> None:
        """Put every changed place back as it was, and make every changed tensor again what it was."""
        failed: list[Exception] = []
        for holder, old in zip(self.holders, self.values, strict=True):
            try:
                now = holder.read()
                if len(now) != len(old) or not all(map(is_, now, old)):
                    holder.restore(old)
            except Exception as e:  # the other places have to be put back all the same
                failed.append(e)
        for i, (_, t, before) in enumerate(self.tensors):
            now = state_of(t)
            if before[-1] or now[-1]:
                for hooks, saved in zip(_hooks_of(t), self._hooks.get(i, ({}, {})), strict=True):
                    if hooks is not None and hooks != saved:
                        hooks.clear()
                        hooks.update(saved)
            if now[:-1] != before[:-1]:
                if (memory := self._aliases[i]) is not None:
                    t.data = memory
                t.requires_grad_(before[-2])
        if failed:
            raise failed[0]


def changed(read: Iterable[tuple[Holder, tuple[Any, ...]]]) -> list[str]:
    """The names of those places that hold something else than what was read of them."""
    return [_name(h, old, now) for h, old in read if not _all_same(old, now := h.read())]


def _name(holder: Holder, old: tuple[Any, ...], now: tuple[Any, ...]) -> str:
    """The name of the first value of a holder that differs."""
    if len(old) != len(now):
        return holder.path
    for alike in (same, _equal):
        for i, (a, b) in enumerate(zip(old, now, strict=True)):
            if not alike(a, b):
                return holder.label(i, now)
    return holder.path


def _all_same(old: Sequence[Any], now: Sequence[Any]) -> bool:
    return len(old) == len(now) and (all(map(is_, old, now)) or all(map(same, old, now)))


def _may_have_gradient(t: torch.Tensor) -> bool:
    """One that is frozen may have one from before; an optimizer goes by the gradient alone."""
    return t.requires_grad or isinstance(t, torch.nn.Parameter) or t.grad is not None


def like(tensors: Sequence[torch.Tensor]) -> Callable[[list[Any]], bool]:
    """A function that says whether values are tensors just like these, each in the same place: in C++ where torch has guards.
    It holds none of them. (Of those that consist of parts the parts have to be asked as well.)"""
    check = tensor_check(tensors)
    if check is None:
        states = _states(tensors)
        return lambda found: all(map(_is_dense, found)) and _states(found) == states
    lie = [*map(has_memory, tensors)]
    if all(lie):
        places = [*map(address, tensors)]
        return lambda found: check(*found) and [*map(address, found)] == places
    places = [*map(address, compress(tensors, lie))]
    return lambda found: check(*found) and [*map(address, compress(found, lie))] == places


def _with_parts_like(tensors: Sequence[torch.Tensor]) -> Callable[[list[Any]], bool]:
    """The same for tensors some of which consist of parts, and for these parts."""
    whole, of_parts, many = like(tensors), like(parts_of_all(tensors)), len(parts_of_all(tensors))
    return lambda found: whole(found) and len(inner := parts_of_all(found)) == many and of_parts(inner)


def _place(t: torch.Tensor) -> int:
    """Where a tensor lies; 0 if it consists of others, which lie somewhere."""
    return t.data_ptr() if has_memory(t) else 0


def _is_dense(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.layout is torch.strided or consists_of_parts(value))


class _Kept:
    """A gradient from before the call, kept alive in case it has to be put back."""

    def __init__(self, grad: torch.Tensor) -> None:
        self._grad = grad
        self.storages = frozenset(storages(grad))

    def __call__(self) -> torch.Tensor:
        return self._grad

    def again(self) -> torch.Tensor:
        return self._grad


class _Ghosts:
    """A gradient from before the call that consists of parts, not kept alive: brought back as these are."""

    def __init__(self, grad: torch.Tensor, of: Description, ghosts: Sequence[Any]) -> None:
        self._ref, self._of, self._parts = weakref.ref(grad), of, ghosts
        self.storages = frozenset[int]().union(*[ghost.storages for ghost in ghosts])

    def __call__(self) -> torch.Tensor | None:
        return self._ref()

    def again(self) -> torch.Tensor:
        alive = self._ref()
        if alive is not None:
            return alive
        again: torch.Tensor = self._of.around([ghost.again() for ghost in self._parts])
        return again


def _from_before(grad: torch.Tensor, outlives: Callable[[torch.Tensor], Any]) -> Any:
    """What can bring this gradient back, kept alive if it has to be."""
    if has_memory(grad):
        return outlives(grad) or _Kept(grad)
    if consists_of_parts(grad):
        of = Description.of(grad)
        inner = [getattr(grad, name) for name in of.names]
        ghosts = [outlives(part) if has_memory(part) else None for part in inner]
        if all(ghosts):
            return _Ghosts(grad, of, ghosts)
    return _Kept(grad)


_NOTHING = {None}


class _Some:
    """The gradients of some of the parameters: what the call found there, what it left, and what a replay has to find."""

    def __init__(self) -> None:
        self.behind = False  # a door
        self.left: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # parameters whose gradient the call changed
        self.absent: list[torch.Tensor] = []  # those that must have no gradient
        self.some: list[torch.Tensor] = []  # those that must have one
        self.readers: list[torch.Tensor] = []  # those that must have one just like the one that was there, in its place
        self.are_such: Callable[[list[Any]], bool] = bool
        self.added_to: list[torch.Tensor] = []
        self.created: list[torch.Tensor] = []
        self.owners: list[torch.Tensor] = []
        self._plain = False
        self.storages: list[int] = []
        self._parts: list[torch.Tensor] = []  # of which those that it created are made
        self._objects: list[torch.Tensor] = []
        self._lying: list[int] = []
        # When the door was where it is, nobody could come to any but through it, and these were as they have to be.
        self._fitted: Any = None
        self._unheld: Any = None
        self._stood: Any = None
        self._turn: Iterator[tuple[torch.Tensor, int]] = iter(())  # in which all are looked at besides, one at a time

    @property
    def involved(self) -> list[torch.Tensor]:
        return [*(p for p, _ in self.left), *self.absent, *self.some, *self.readers]

    def seal(self) -> None:
        """From now on nobody but the parameters and this recording holds the gradients that the call created.

        How many references that makes depends on whether the gradient stands in `p.grad` at the moment (it does after a
        replay, and not after the user has dropped it), so both are counted.
        """
        self.owners = [p for p, g in self.left if g is not None]
        self.created = [g for _, g in self.left if g is not None]
        self._plain = all(map(is_ordinary, self.involved))
        self._parts = parts_of_all(self.created)
        self._objects = [*{identity(t): t for t in (*self.created, *self._parts)}.values()]
        self.storages = [t.untyped_storage()._cdata for t in self._parts]
        self._pythons = [weakref.ref(t.untyped_storage()) for t in self._parts]
        self._lying = list(map(address, self._parts))
        self._standing = self._count()
        for p in self.owners:
            p.grad = None
        self._alone = self._count()
        for p, g in zip(self.owners, self.created, strict=True):
            p.grad = g

    def close(self) -> None:
        self.behind, self._fitted, self._unheld, self._stood = False, None, None, None

    def _count(self) -> list[list[int]]:
        """References to the created gradients: Python's to the objects, and to those of which they are made, tensors on their
        memory, Python's to the storages."""
        pythons = [sys.getrefcount(python()) for python in self._pythons]
        return [[*map(sys.getrefcount, self._objects)], [*map(use_count, self.storages)], pythons]

    def held(self) -> bool:
        """Whether anybody else holds a gradient that the recording rewrites."""
        if not self.created or (self._unheld == gradients.now() and not gradients.busy):
            return False
        epoch = gradients.now()
        if self._are_held():
            return True
        if self.behind and not any(map(weakref.getweakrefcount, self._objects)):
            self._unheld = epoch
        return False

    def _are_held(self) -> bool:
        """About 0.2 us each."""
        now = self._count()
        if now == self._alone or (now == self._standing and all(map(is_, map(gradient, self.owners), self.created))):
            return False
        stand = [gradient(p) is g for p, g in zip(self.owners, self.created, strict=True)]
        of_parts = [(g is part, there) for g, there in zip(self.created, stand, strict=True) for part in parts(g)]
        objects = [*stand, *(there for itself, there in of_parts if not itself)]
        stands = [objects, *[[there for _, there in of_parts]] * 2]
        return any(
            count > (standing if there else alone)
            for counts, standings, alones, of in zip(now, self._standing, self._alone, stands, strict=True)
            for count, standing, alone, there in zip(counts, standings, alones, of, strict=True)
        )

    def ready(self) -> bool:
        """Whether they fit, and nobody holds one."""
        if self._fitted is not None and self._fitted == self._unheld == gradients.now() and self._next_stands():
            return True
        return self._all_fit() and not self.held()

    def fit(self) -> bool:
        """Whether the gradients now are such as the recording needs to find, and those that it writes lie where they did."""
        if self._fitted is not None and self._fitted == gradients.now() and self._next_stands():
            return True
        return self._all_fit()

    def _next_stands(self) -> bool:
        """While the door is shut: whether the next of them is what it was."""
        if gradients.busy:
            return False
        p, was = next(self._turn)
        return identity(gradient(p)) == was

    def _all_fit(self) -> bool:
        """(``p.grad.data = ...`` gives the very same gradient other memory. Who does that has it, if it is one that this
        recording has created: then `held` says so, or did.)"""
        epoch = gradients.now()
        if not ({*map(gradient, self.absent)} <= _NOTHING and all(gradient(p) is not None for p in self.some)):
            return False
        if [*map(address, self._parts)] != self._lying:
            return False
        found = [*map(gradient, self.readers)]
        if found and not self.are_such(found):
            return False
        if self.behind and (not found or nobody_has(found)) and not self.held():
            self._fitted = epoch
            if not self.created:
                self._unheld = epoch
            involved = self.involved
            self._turn = cycle([*zip(involved, map(identity, map(gradient, involved)), strict=True)])
        return True

    def leave(self) -> None:
        """Make the attributes what the call would have left."""
        if self.left and not (self._stood == gradients.now() and not gradients.busy):
            epoch = gradients.now()
            if not all(gradient(p) is g for p, g in self.left):
                for p, g in self.left:
                    p.grad = g
            elif self.behind:
                self._stood = epoch
        if self.added_to:
            grads = [g for g in map(gradient, self.added_to) if g is not None]
            bump(grads if self._plain else [*grads, *parts_of_all(g for g in grads if not is_ordinary(g))])


class Grads:
    """The `.grad` attributes of the parameters in reach: what the call found there, and what it left.

    A gradient that backward created inside the recording lives at a fixed address and is rewritten by each replay; what
    stands in `p.grad` afterwards must be that tensor. What a recording needs to find there *before* depends on what it
    did with it: nothing, if it never looked (`zero_grad()` came first); one in the same memory, if it read it or
    accumulated into it; and `None`, if it created the gradient and nothing says that an old one would have been dropped.

    Gradients that the recording did not create are referred to weakly: a strong reference would look like somebody who
    holds on to one.

    Those of parameters are looked at only if somebody may have come to one since the last look (`doors`), those of other leaves
    each time. What is `gathered` must have none before each replay.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], outlives: Callable[[torch.Tensor], Any], gathered: Sequence[torch.Tensor] = ()
    ) -> None:
        self.shared = threading.active_count() > 1  # with threads that may change them meanwhile
        self.parameters = [p for p in parameters if p.is_leaf and _may_have_gradient(p)]
        # Where the device can bring a gradient back that the call drops, its memory is free for the capture: otherwise
        # the peak would be one set of gradients higher than live.
        self._before: list[Any] = [None if g is None else _from_before(g, outlives) for g in self.read()]
        self._gathered = [t for t in gathered if _may_have_gradient(t)]
        self._given: frozenset[int] = frozenset()  # the storages on which replays hand out results
        self._all: list[_Some] = []
        self._sealed = False

    @property
    def written(self) -> bool:
        """Whether the call changes gradients."""
        return any(some.left or some.added_to for some in self._all)

    def read(self) -> list[torch.Tensor | None]:
        """Those that stand there. (Who has them may do something with them.)"""
        gradients.opened()
        return list(map(gradient, self.parameters))

    def restore(self) -> None:
        """Put the attributes back as they were before."""
        for p, kept in zip(self.parameters, self._before, strict=True):
            if kept is None:
                p.grad = None
            elif kept() is None or p.grad is not kept():
                p.grad = kept.again()

    def keep(self) -> None:
        """Before a replay that may have to be given up half-way: what the call found stays there until then."""
        self._before = [None if kept is None else _Kept(kept.again()) for kept in self._before]

    def leave_alone(self) -> None:
        """What becomes of gradients during the capture, other threads do."""
        self.parameters, self._before = [], []

    def settle(self, touched: Set[int], written: Set[int], looks: bool, reads: bool) -> None:
        """The call has been captured: note what it left, and what it needs. `touched` are the storages outside that an
        operator of the call read, `written` those that it wrote. Its code may decide by whether a gradient is there (`looks`),
        and look at one that is (`reads`)."""
        told, others = _Some(), _Some()
        found: dict[_Some, list[torch.Tensor]] = {told: [], others: []}
        for p, kept, after in zip(self.parameters, self._before, self.read(), strict=True):
            some = told if may_have_door(p) else others
            before = None if kept is None else kept()
            if before is not after or (kept is not None and before is None):
                some.left.append((p, after))
            if kept is None:
                if after is not None or looks:
                    some.absent.append(p)
            elif not touched.isdisjoint(kept.storages):
                some.readers.append(p)
                found[some].append(kept.again())
                if not written.isdisjoint(kept.storages) and after is before:
                    some.added_to.append(p)
            elif reads:
                some.some.append(p)
        for p in self._gathered:
            (told if may_have_door(p) else others).absent.append(p)
        for some, those in found.items():
            some.are_such = like(those) if all(map(is_ordinary, those)) else _with_parts_like(those)
        self._all = [some for some in (told, others) if some.involved]

    def seal(self) -> None:
        """From now on nobody but the parameters and this recording holds the gradients that the call created."""
        self._before = []
        if self._sealed:
            return
        self._sealed = True
        for some in self._all:
            some.seal()
        if self._given.isdisjoint([storage for some in self._all for storage in some.storages]):
            for some in self._all:
                if all(map(may_have_door, some.involved)):
                    gradients.lead_to(some.involved)
                    gradients.stay_for(self)
                    some.behind = all(map(has_gradient_door, some.involved))

    def show(self) -> None:
        """Before the first replay in whose middle somebody may see gradients: until then those stand there that the call will
        leave."""
        if not self._sealed:
            before = self._before
            self.seal()
            self._before = before
            self.restore()

    def gives(self, storages: Set[int]) -> None:
        """Replays hand out results on these storages."""
        self._given = frozenset(storages)

    def held(self) -> bool:
        """Whether anybody else holds a gradient that the recording rewrites."""
        return any(some.held() for some in self._all)

    def fit(self) -> bool:
        """Whether the gradients now are such as the recording needs to find, and those that it writes lie where they did."""
        return all(some.fit() for some in self._all)

    def ready(self) -> bool:
        """Both: whether they are such, and nobody else holds one."""
        for some in self._all:  # noqa: SIM110 - a replay asks, and `all(... for ...)` costs half as much again
            if not some.ready():
                return False
        return True

    def close(self) -> None:
        """Nobody plays this recording any more."""
        for some in self._all:
            some.close()
        gradients.leave(self)

    def gone(self) -> bool:
        """Whether there are no gradients."""
        return bool(self.parameters) and all(gradient(p) is None for p in self.parameters)

    def lose(self) -> None:
        """A replay was given up after which no other call follows: it may have written over gradients of an earlier one."""
        for some in self._all:
            for p, g in zip(some.owners, some.created, strict=True):
                if p.grad is g:
                    p.grad = None

    def leave(self) -> None:
        """Make the attributes what the call would have left."""
        for some in self._all:
            some.leave()


def _hooks_of(t: torch.Tensor) -> tuple[dict[Any, Any] | None, dict[Any, Any] | None]:
    return t._backward_hooks, getattr(t, "_post_accumulate_grad_hooks", None)


def _hooks(t: torch.Tensor) -> tuple[Any, ...]:
    before, after = _hooks_of(t)
    return (*(before or {}).values(), *(after or {}).values()) if before or after else ()


def _grad_dtype(t: torch.Tensor) -> torch.dtype | None:
    return getattr(t, "grad_dtype", None) if t.is_leaf else None


_Base: Any = TensorBase
_SAID: tuple[Callable[[Any], Any], ...] = (
    _place, attrgetter("shape"), _Base.stride, attrgetter("dtype"), attrgetter("device"), _Base.is_conj, _Base.is_neg,
    _grad_dtype, attrgetter("requires_grad"), _hooks,
)  # fmt: skip


def _states(tensors: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
    """What tensors are, but for their values; in half of the time that it takes for each by itself."""
    return [*zip(*(map(say, tensors) for say in _SAID), strict=True)]


def state_of(t: torch.Tensor) -> tuple[Any, ...]:
    """What a tensor is, but for its values."""
    return _states([t])[0]


class Entries:
    """Places, each with how to read it and what was found there: ``[holder, read, saved]``."""

    def __init__(self, held: list[list[Any]], shared: Set[int]) -> None:
        """`shared` are the identities of what was found in several places."""
        self._held = held
        # The containers whose contents are compared, by identity; None where another must not be put in the place of one.
        found = [(entry[0].contents.now(), entry) for entry in held if entry[0].contents is not None]
        self._moved_places = False
        self._contents = {identity(x): None if identity(x) in shared else entry for x, entry in found}

    def unchanged(self, entry: list[Any]) -> bool:
        """Whether what was found there is there still, or what may stand for it: with that it is compared from now on."""
        _, read, saved = entry
        now = read()
        if len(now) == len(saved) and (
            all(map(is_, now, saved)) or all(map(_equal, saved, now)) or self._moved_to(saved, now)
        ):  # fmt: skip
            entry[2] = now
            return True
        return False

    def _moved_to(self, saved: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
        """Whether all that differs are containers in the place of equal ones. If so, it is the contents of these that are
        compared from now on."""
        new: list[tuple[Any, Any]] = []
        try:
            if not all(_may_stand_for(a, b, new) for a, b in zip(saved, now, strict=True)):
                return False
        except RecursionError:
            return False
        entries = [self._contents.get(identity(old)) for old, _ in new]
        places = {identity(x) for _, x in new}
        if len(places) < len(new) or not places.isdisjoint(self._contents):
            return False  # one that stands in several places
        if not all(entry is not None and self.unchanged(entry) for entry in entries):
            return False
        self._moved_places = bool(new) or self._moved_places
        for (old, container), entry in zip(new, entries, strict=True):
            assert entry is not None
            entry[0].contents.move(container)
            entry[2] = entry[1]()
            self._contents[identity(container)] = self._contents.pop(identity(old))
        return True


class Reliances(Entries):
    """Everything that must still hold when a recording is played: what `snapshot` found before the capture, and the
    capture left alone."""

    def __init__(self, reach: Reach, snapshot: Snapshot, grads: Grads, dials: Dials, fixed: Set[int]) -> None:
        """`fixed` are the ids of tensors in reach of which nothing has to hold."""
        live = dials.followed
        self.dials = dials
        read = zip(snapshot.holders, snapshot.values, strict=True)
        super().__init__([_relied(h, values, dials) for h, values in read if h.dial not in live], reach.shared)
        self._grads = grads
        relied = [entry for entry in snapshot.tensors if identity(entry[1]) not in fixed]
        tensors = [t for _, t, _ in relied]
        self.remembered = {i: room for i, room in reach.remembered.items() if i not in reach.shared}
        hot = [t for t in tensors if identity(t) not in self.remembered]
        hot = hot if len(hot) <= FEW else [t for t in hot if not isinstance(t, torch.nn.Parameter)]
        self._pointed, self._alike = hot, like(hot)
        kept_there = [t for t in tensors if identity(t) in self.remembered]
        self._remembered = like(kept_there), kept_there
        self._tensors = [(t, state) for _, t, state in relied]
        looked_at = set(map(identity, hot))
        others = [t for t in tensors if identity(t) not in looked_at and identity(t) not in self.remembered]
        self._laps = {}
        if others:
            self._laps[_OTHERS] = _taking_turns(others, _TENSORS)
        if kept_there:
            self._laps[_KEPT] = _taking_turns(kept_there, _REMEMBERED)
        self._listens = False  # at the doors
        self._sort()
        _all.add(self)
        self._names = {identity(t): name for name, t, _ in relied}
        self._hooked = [(t, state[-1]) for t, state in self._tensors if state[-1]]
        witness.watch([*reach.modules, *tensors])
        self._epoch = witness.epoch

    def _sort(self) -> None:
        """What is looked at before each replay, and what the witness hears of."""
        self._behind = [entry for entry in self._held if entry[0].behind is not None]
        self._shut: tuple[int, list[int]] | None = None  # the epoch, and what was where, when nobody had any of it
        self._turn: Iterator[tuple[Any, Any, tuple[int, ...]]] = iter(())
        held = [(entry, is_heard_of(entry[0])) for entry in self._held if entry[0].behind is None]
        self._hot = [entry for entry, is_watched in held if not is_watched]
        self._watched = [entry for entry, is_watched in held if is_watched]
        # Which places need not be read where dictionaries say that they have not changed.
        self._told, self._told_by = _by_dictionary(self._hot)
        told = {identity(entry) for entries in self._told for entry in entries}
        self._read = [entry for entry in self._hot if identity(entry) not in told]
        self._read_hot = _together([*map(_reading, self._read)])
        self._last_hot: list[Any] = []  # what was read when all of it was found unchanged
        self._moved_places = False
        kinds = [*[_PLACES][: len(self._watched)], *self._laps, *[_STATE][: len(self._behind)]]
        self._kinds: Iterator[str | None] = cycle([*kinds, *[None] * (_LAP - len(kinds))])
        self._rotates = bool(kinds)
        self._heard = _in_parts(self._watched)
        heard = {identity(entry) for told, _ in self._heard for entries in told for entry in entries}
        others = [entry for entry in self._watched if identity(entry) not in heard]
        self._rounds = cycle([*self._heard, *(((part,), None) for part in _parts(others, _HOLDERS))])

    def __len__(self) -> int:
        return len(self._hot) + len(self._watched) + len(self._behind) + len(self._tensors)

    @property
    def grads(self) -> Grads:
        return self._grads

    def close(self) -> None:
        """Nobody plays this recording any more."""
        self._shut = None
        states.leave(self)
        self._grads.close()

    def broken(self) -> str | None:
        """What no longer holds, by name; None when the recording may be played. Costs about 0.3 us for each hot
        place that has to be read, and 0.06 us for each tensor."""
        if self._moved_places:
            self._sort()
        if self._told and (moved := self._told_by.moved()):
            for entry in (entry for i in moved for entry in self._told[i]):
                if not self.unchanged(entry):
                    return which(entry)
            self._told_by.keep()
        if self._read:
            now, last = self._read_hot(), self._last_hot
            if len(now) != len(last) or not all(map(is_, now, last)):
                for entry in self._read:
                    if not self.unchanged(entry):
                        return which(entry)
                self._last_hot = now
        if self._behind and not self._is_shut() and (broken := self._look_behind()) is not None:
            return broken
        if self._pointed and not self._alike(self._pointed):
            return self._moved(self._tensors) or self._names[identity(self._pointed[0])]
        if self._hooked and any(_hooks(t) != hooks for t, hooks in self._hooked):
            return self._moved(self._tensors)
        if witness.epoch != self._epoch:
            return self._all_watched()
        return self._rotate() if self._rotates else None

    def _is_shut(self) -> bool:
        """Whether nobody can have come to what lies behind a door since it was last looked at."""
        return self._shut == (states.epoch, [entry[0].behind.now() for entry in self._behind])

    def _look_behind(self) -> str | None:
        rooms = [entry[0].behind for entry in self._behind]
        if not self._listens:
            self._listens = True
            states.stay_for(self)
            for room in rooms:
                room.watch()
        now = (states.epoch, [room.now() for room in rooms])
        for entry in self._behind:
            if not self.unchanged(entry):
                return which(entry)
        are_such, tensors = self._remembered
        if tensors and not are_such(tensors):
            return self._moved(self._tensors) or self._names[identity(tensors[0])]
        shut = all(room.alone() for room in rooms)
        self._shut = now if shut else None
        self._turn = cycle([(room, *found) for room in rooms for found in room.read()] if shut else ())
        return None

    def numbers_changed(self) -> list[tuple[tuple[int, Any], str]]:
        """Where numbers are now other numbers: the places, and their names."""
        found = []
        for holder, read, saved in self._held:
            now = read()
            if holder.spot is None or len(now) != len(saved):
                continue
            for i, (a, b) in enumerate(zip(saved, now, strict=True)):
                if a is not b and type(a) is type(b) is float and not same(a, b):
                    found.append((holder.spot(i, now).at, holder.label(i, now)))
        return found

    def disturbing(self) -> Callable[[], bool]:
        """A function that says whether something has changed since this call. (For the time of one replay: what is looked at in
        rotation is found before a later one.)"""
        read = _together([entry[1] for entry in self._hot])
        before, grads, epoch, settings = read(), self._grads.read(), witness.epoch, modes()

        def disturbed() -> bool:
            if modes() != settings or not all(map(is_, self._grads.read(), grads)):
                return True
            now = read()
            same_objects = len(now) == len(before) and all(map(is_, now, before))
            if not (same_objects or all(map(self.unchanged, self._hot))) or not self._alike(self._pointed):
                return True
            if self._behind and not self._is_shut() and self._look_behind() is not None:
                return True
            return witness.epoch != epoch and self._all_watched() is not None

        return disturbed

    def versions(self) -> dict[int, int]:
        """How often tensors outside, and their gradients, have been written, by identity."""
        tensors = [t for t, _ in self._tensors]
        tensors += parts_of_all(t.grad for t in tensors if t.is_leaf)
        return {identity(t): t._version for t in tensors if not t.is_inference()}

    def _all_watched(self) -> str | None:
        epoch = witness.epoch
        for entry in self._watched:
            if not self.unchanged(entry):
                return which(entry)
        moved = self._moved(self._tensors)
        if moved is None:
            self._epoch = epoch
        return moved

    def _rotate(self) -> str | None:
        """A few at a time, of one kind. What is found once is found again: the next look is a full one."""
        kind, changed = next(self._kinds), None
        if kind is _PLACES:
            told, by = next(self._rounds)
            moved = range(len(told)) if by is None else by.moved()
            changed = next((which(e) for i in moved for e in told[i] if not self.unchanged(e)), None)
            if by is not None and moved and changed is None:
                by.keep()
        elif kind is _STATE:
            room, p, found = next(self._turn, (None, None, ()))
            return None if room is None or room.of(p) == found else self._look_behind()
        elif kind is not None:
            are_such, some = next(self._laps[kind])
            if not are_such(some):
                changed = self._moved(self._tensors) or self._names[identity(some[0])]
        if changed is not None:
            self._epoch = -1
        return changed

    def _moved(self, tensors: Sequence[tuple[torch.Tensor, tuple[Any, ...]]]) -> str | None:
        states = _states([t for t, _ in tensors])
        return next((self._names[identity(t)] for (t, state), now in zip(tensors, states, strict=True) if now != state), None)


_all: weakref.WeakSet[Reliances] = weakref.WeakSet()
_unheard: set[int] = set()  # identities of objects, in whose dictionaries replays set attributes


def not_heard(things: Iterable[int]) -> None:
    """Replays will set attributes of the objects with these identities, or their items, and the witness does not hear of it:
    whoever relies on those has to look by himself."""
    new = {*things} - _unheard
    if new:
        _unheard.update(new)
        for reliances in _all:
            reliances._sort()


def is_heard_of(holder: Holder) -> bool:
    """Whether the witness hears of changes in a place."""
    if not holder.watched or identity(holder.owner) in _unheard:
        return False
    return not _unheard or _unheard.isdisjoint(map(identity, holder.tables()))


def _taking_turns(tensors: list[torch.Tensor], size: int) -> Iterator[tuple[Callable[[list[Any]], bool], list[torch.Tensor]]]:
    """So many of these tensors at a time, and what says whether they are what they were."""
    return cycle([(like(part), part) for part in _parts(tensors, size)] or [(bool, [])])


def _parts(things: list[Any], size: int) -> list[list[Any]]:
    return [things[i : i + size] for i in range(0, len(things), size)]


def relied(holder: Holder) -> Holder:
    """That part of a place on which a recording relies."""
    part = holder.part
    return holder if part is None else holder._replace(read=part.read, named=part.named, spot=part.spot)


def _relied(holder: Holder, values: tuple[Any, ...], dials: Dials) -> list[Any]:
    """What is relied on of a place, but for those of its values that are followed."""
    part = relied(holder)
    saved = values if holder.part is None else holder.part.of(values)
    left_out = [i for i, value in enumerate(saved) if type(value) is float and identity(value) in dials.marks]
    if dials.whole and (spot := part.spot) is not None:
        left_out += [i for i, value in enumerate(saved) if type(value) is int and _lies_at(spot, i, saved, dials.whole)]
    if not left_out:
        return [part, part.read, saved]
    whole = part.read

    def read() -> tuple[Any, ...]:
        now = [*whole()]
        if len(now) == len(saved):
            for i in left_out:
                now[i] = None
        return tuple(now)

    return [part, read, tuple([None if i in left_out else value for i, value in enumerate(saved)])]


def _lies_at(spot: Any, i: int, values: tuple[Any, ...], places: Set[Any]) -> bool:
    """Whether the i-th of these values is one of those that lie there. (How many there are of something lies nowhere.)"""
    try:
        return spot(i, values).at in places
    except (IndexError, TypeError):
        return False


def _together(reads: Sequence[Callable[[], tuple[Any, ...]] | list[Any] | set[Any]]) -> Callable[[], list[Any]]:
    """A function that reads several places into one list, each after a mark of its own: ``lambda: [m0, *r0(), m1, ...]``. One
    comparison then does for all. What is itself a list, or a set, is read without a call: ``*r0``."""
    names = {f"r{i}": read for i, read in enumerate(reads)} | {f"m{i}": object() for i in range(len(reads))}
    parts = ", ".join(f"m{i}, *r{i}" + "()" * (type(read) not in _PLAINLY) for i, read in enumerate(reads))
    together: Callable[[], list[Any]] = written_out(f"lambda: [{parts}]", names)
    return together


_PLAINLY = (list, set)  # a subclass may have an `__iter__` of its own


def _reading(entry: list[Any]) -> Any:
    """What reads a place before each replay: a function, or a list or a set that is read itself."""
    values = None if entry[0].contents is None else entry[0].contents.now()
    if type(values) is list and len(values) >= _LONG:
        return reading_list(values)
    return values if type(values) in _PLAINLY and entry[1] is entry[0].read else entry[1]


def _in_parts(entries: list[list[Any]]) -> list[tuple[list[list[list[Any]]], Versions]]:
    """Such places in parts, of which one at a time is asked: all together, where that takes one glance."""
    parts = [entries] if at_one_glance else _parts(entries, _DICTIONARIES)
    return [(told, by) for told, by in map(_by_dictionary, parts) if told]


def _by_dictionary(entries: list[list[Any]]) -> tuple[list[list[list[Any]]], Versions]:
    """The places that lie in dictionaries which tell when they have been changed: those of each dictionary, in the order of the
    versions."""
    fixed: dict[int, tuple[dict[Any, Any], list[list[Any]]]] = {}
    own: dict[int, tuple[Callable[[], dict[Any, Any]], list[list[Any]]]] = {}
    for entry in entries:
        inside, thing = entry[0].inside, entry[0].owner
        found = None if inside is None else inside()
        if found is None or not tell(found):
            continue
        if thing is not None:
            own.setdefault(identity(thing), (partial(object.__getattribute__, thing, "__dict__"), []))[1].append(entry)
            continue
        for d in found:
            fixed.setdefault(identity(d), (d, []))[1].append(entry)
    told = [entries for _, entries in (*fixed.values(), *own.values())]
    return told, Versions([d for d, _ in fixed.values()], [find for find, _ in own.values()])


def _equal(a: Any, b: Any) -> bool:
    """Whether one value may stand for the other from now on: equal, and nothing that can change by itself."""
    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, (list, dict, set)):
        return False
    return (type(a) is not tuple or (len(a) == len(b) and all(map(_equal, a, b)))) and same(a, b)


def _may_stand_for(old: Any, now: Any, containers: list[tuple[Any, Any]]) -> bool:
    """Whether one value is equal to another, down to what its containers hold; adds the containers that are not the same to
    `containers`, with those that stand there now, inner ones first."""
    if old is now:
        return True
    kind = type(old)
    if kind is not type(now):
        return False
    if kind in (list, tuple):
        alike = len(old) == len(now) and all(_may_stand_for(a, b, containers) for a, b in zip(old, now, strict=True))
    elif kind is dict:
        alike = len(old) == len(now) and all(map(same, old, now))
        alike = alike and all(_may_stand_for(a, b, containers) for a, b in zip(old.values(), now.values(), strict=True))
    else:
        alike = same(old, now)
    if alike and kind in (list, dict, set):
        containers.append((old, now))
    return alike


def which(entry: list[Any]) -> str:
    """The name of what differs in a place."""
    holder, read, saved = entry
    return _name(holder, saved, read())
