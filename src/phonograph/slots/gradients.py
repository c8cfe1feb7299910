"""The gradients of the parameters in reach: what a call found there, what it left, and what a replay has to find."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from itertools import cycle
from operator import is_

import torch

from .._torch.dynamic import Thing
from .._torch.native import Fact, bump, known
from .._torch.tensors import address, has_memory, is_ordinary, owners, storage_id, use_count
from ..errors import Refusal
from ..guards.attribute_epochs import gradient, gradients, has_gradient_door, may_have_door, nobody_has
from ..guards.tensor_states import like, with_parts_like
from ..memory.pool import memory_of
from ..python.identity import identity
from ..python.putting_back import put_back
from ..values.tensor_subclasses import Description, consists_of_parts, parts, parts_of_all, storages
from .column import Broken, Check, Column, Step
from .fed_gradients import FedGradients, made_by

__all__ = ["GRAD", "Grads"]

GRAD = "a .grad attribute"  # what does not fit


def _may_have_gradient(t: torch.Tensor) -> bool:
    """One that is frozen may have one from before; an optimizer goes by the gradient alone."""
    return t.requires_grad or isinstance(t, torch.nn.Parameter) or t.grad is not None


class _Kept:
    """A gradient from before the call, kept alive in case it has to be put back."""

    def __init__(self, grad: torch.Tensor) -> None:
        self._grad = grad
        self._data = grad.detach() if has_memory(grad) else None
        self.storages = frozenset(storages(grad))

    def __call__(self) -> torch.Tensor:
        return self._grad

    def again(self) -> torch.Tensor:
        return self._grad

    def data(self) -> torch.Tensor | None:
        """What was its memory, should it have been given other (`p.grad.data = …`)."""
        return self._data


class _Ghosts:
    """A gradient from before the call that consists of parts, not kept alive: brought back as these are."""

    def __init__(self, grad: torch.Tensor, of: Description, ghosts: Sequence[Thing]) -> None:
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


def _from_before(grad: torch.Tensor, outlives: Callable[[torch.Tensor], object]) -> object:
    """What can bring this gradient back, kept alive if it has to be: the memory of a view is others' in any case."""
    if has_memory(grad):
        return (outlives(grad) if grad._base is None else None) or _Kept(grad)
    if consists_of_parts(grad):
        of = Description.of(grad)
        inner = [getattr(grad, name) for name in of.names]
        ghosts = [outlives(part) if has_memory(part) else None for part in inner]
        if all(ghosts):
            return _Ghosts(grad, of, ghosts)
    return _Kept(grad)


def _lies_elsewhere(kept: Thing) -> bool:
    """Whether a gradient from before the call is still there, on other memory."""
    g = None if kept is None else kept()
    return g is not None and has_memory(g) and kept.storages.isdisjoint(storages(g))


def _place(g: torch.Tensor | None) -> int:
    """Where a gradient lies; 0 where there is none, or it is no plain memory."""
    return address(g) if g is not None and is_ordinary(g) and has_memory(g) else 0


def _with_bases(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """These, and those of which they are views, each once."""
    bases = [t._base for t in tensors if t._base is not None]
    return [*{identity(t): t for t in (*tensors, *bases)}.values()]


_NOTHING = {None}
_LOOKS, _PAUSE = 4, 2e-4  # at whether somebody holds a gradient; seconds between them


class _Some:
    """The gradients of some of the parameters: what the call found there, what it left, and what a replay has to find."""

    def __init__(self) -> None:
        self.behind = False  # a door
        self.left: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # parameters whose gradient the call changed
        self.absent: list[torch.Tensor] = []  # those that must have no gradient
        self.some: list[torch.Tensor] = []  # those that must have one
        self.readers: list[torch.Tensor] = []  # those that must have one just like the one that was there, in its place
        self.are_such: Callable[[list[torch.Tensor]], bool] = bool
        self.added_to: list[torch.Tensor] = []
        self.created: list[torch.Tensor] = []
        self.owners: list[torch.Tensor] = []
        self._plain = False
        self.outside: Set[int] = frozenset()  # storages that were there before the call: it may have put some in place
        self.storages: list[int] = []
        self._parts: list[torch.Tensor] = []  # of which those that it created are made
        self._objects: list[torch.Tensor] = []
        self._lying: list[int] = []
        # When the door was where it is, nobody could come to any but through it, and these were as they have to be.
        self._fitted: object = None
        self._unheld: object = None
        self._stood: object = None
        self._turn: Iterator[tuple[torch.Tensor, int, int]] = iter(())  # in which all are looked at besides, one at a time

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
        self._objects = _with_bases([*self.created, *self._parts])
        self.storages = [t.untyped_storage()._cdata for t in self._parts]
        self._pythons = [weakref.ref(t.untyped_storage()) for t in self._parts]
        self._lying = list(map(address, self._parts))
        self._standing = self._count()
        try:
            for p in self.owners:
                p.grad = None
            self._alone = self._count()
        finally:
            for p, g in zip(self.owners, self.created, strict=True):
                p.grad = g
        made_by(self, [g for g in self.created if is_ordinary(g) and storage_id(g) not in self.outside])
        self.outside = frozenset()

    def close(self) -> None:
        self.behind, self._fitted, self._unheld, self._stood = False, None, None, None

    def _count(self) -> list[list[int]]:
        """References to the created gradients: Python's and others to the objects, to those of which they are made, and to what
        they are views of; tensors on their memory; Python's to the storages."""
        pythons = [sys.getrefcount(python()) for python in self._pythons]
        objects = [*map(sys.getrefcount, self._objects)], [*map(owners, self._objects)]
        return [*objects, [*map(use_count, self.storages)], pythons]

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
        missing = [g for p, g in zip(self.owners, self.created, strict=True) if gradient(p) is not g]
        gone = {identity(t) for g in missing for t in (g, *parts(g))}
        objects, memory = ([identity(t) not in gone for t in of] for of in (self._objects, self._parts))
        stands = [objects, objects, memory, memory]
        return any(
            count > (standing if there else alone)
            for counts, standings, alones, of in zip(now, self._standing, self._alone, stands, strict=True)
            for count, standing, alone, there in zip(counts, standings, alones, of, strict=True)
        )

    def alone(self) -> bool:
        """Whether nobody else has one of those that the call created, and they are where it has made them."""
        return [*map(address, self._parts)] == self._lying and not self.held()

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
        p, was, place = next(self._turn)
        g = gradient(p)
        return identity(g) == was and (not place or (g.layout is torch.strided and address(g) == place))

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
            # (Where they lie, too: another that comes through no door may be where one was that has gone.)
            involved = [(p, gradient(p)) for p in self.involved]
            self._turn = cycle([(p, identity(g), _place(g)) for p, g in involved])
        return True

    def ready_facts(self) -> list[Fact] | None:
        """What it rests on that they are ready, as long as the door is shut."""
        if self._fitted is None or not self._fitted == self._unheld == gradients.now():
            return None
        shut = self._while_shut("_fitted", "_unheld")
        return None if shut is None else [*shut, ("called", self._next_stands, True)]

    def left_facts(self) -> list[Fact] | None:
        """What it rests on that there is nothing to leave."""
        return None if self.added_to or (self.left and self._stood != gradients.now()) else self._while_shut("_stood")

    def _while_shut(self, *noted: str) -> list[Fact] | None:
        door = gradients.facts()
        return None if door is None or gradients.busy else [*(("item", vars(self), name) for name in noted), *door]

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


class Grads(Column):
    """The `.grad` attributes of the parameters in reach: what the call found there, and what it left.

    A gradient that backward created inside the recording lives at a fixed address and is rewritten by each replay; what
    stands in `p.grad` afterwards must be that tensor. What a recording needs to find there *before* depends on what it
    did with it: nothing, if it never looked (`zero_grad()` came first); one in the same memory, if it read it or
    accumulated into it; and `None`, if it created the gradient and nothing says that an old one would have been dropped.

    Gradients that the recording did not create are referred to weakly: a strong reference would look like somebody who
    holds on to one.

    Those of parameters are looked at only if somebody may have come to one since the last look (`attribute_epochs.py`), those
    of other leaves each time. What is `gathered` must have none before each replay.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        outlives: Callable[[torch.Tensor], object],
        gathered: Sequence[torch.Tensor] = (),
        fed: FedGradients | None = None,
    ) -> None:
        """Those that are `fed` may lie elsewhere in each call."""
        self.shared = threading.active_count() > 1  # with threads that may change them meanwhile
        self.parameters = [p for p in parameters if p.is_leaf and _may_have_gradient(p)]
        # Where the device can bring a gradient back that the call drops, its memory is free for the capture: otherwise
        # the peak would be one set of gradients higher than live.
        self.fed = fed
        slots = [fed is not None and fed.slot(p) is not None for p in self.parameters]
        self._before: list[Thing] = [
            None if g is None else _Kept(g) if kept else _from_before(g, outlives)
            for g, kept in zip(self.read(), slots, strict=True)
        ]
        self._gathered = [t for t in gathered if _may_have_gradient(t)]
        self.found: list[tuple[torch.Tensor, int, tuple[int, int]]] = []
        """Parameters whose gradients have to lie where the call has found them: storages of these, and their places."""
        self._given: frozenset[int] = frozenset()  # the storages on which replays hand out results
        self._all: list[_Some] = []
        self._as_captured = False  # what the call has left stands there, and not what it has found
        self.sealed = False
        """Whether the first play has left what the call leaves."""
        self._was_held = False

    @property
    def written(self) -> bool:
        """Whether the call changes gradients."""
        return any(some.left or some.added_to for some in self._all) or (self.fed is not None and self.fed.writes)

    def read(self) -> list[torch.Tensor | None]:
        """Those that stand there. (Who has them may do something with them.)"""
        gradients.opened()
        return list(map(gradient, self.parameters))

    def restore(self) -> None:
        """Put the attributes back as they were before."""
        self._as_captured = False
        for p, kept in zip(self.parameters, self._before, strict=True):
            if kept is None:
                p.grad = None
                continue
            if _lies_elsewhere(kept):
                kept().data = kept.data()
            if kept() is None or p.grad is not kept():
                p.grad = kept.again()

    def unless_played(self, kind: object = None, error: object = Refusal, trace: object = None) -> None:
        """An exception, if there is one, ends the call of which this is the capture: put them back, if no replay has run."""
        if error is not None and self._as_captured:
            put_back(self.restore)

    def keep(self) -> None:
        """Before a replay that may have to be given up half-way: what the call found stays there until then."""
        self._before = [None if kept is None else _Kept(kept.again()) for kept in self._before]

    def leave_alone(self) -> None:
        """What becomes of gradients during the capture, other threads do."""
        self.parameters, self._before = [], []

    def settle(
        self, touched: Set[int], handed_on: Set[int], written: Set[int], outside: Set[int], looks: bool, reads: bool
    ) -> None:
        """The call has been captured: note what it left, and what it needs. `touched` are the storages that an operator of the
        call read, of those `outside`; `written` those that it wrote; `handed_on` those of its results. Its code may decide by
        whether a gradient is there (`looks`), and look at one that is (`reads`).

        Raises:
            Refusal: it leaves gradients as no replay can.
        """
        fed = self.fed
        if fed is not None:
            fed.check(zip(self.parameters, self.read(), strict=True))
        if any(map(_lies_elsewhere, self._before)):
            raise Refusal("gives a gradient other memory (p.grad.data = …)", "write it in place: p.grad.copy_(…)")
        told, others = _Some(), _Some()
        found: dict[_Some, list[torch.Tensor]] = {told: [], others: []}
        for p, kept, after in zip(self.parameters, self._before, self.read(), strict=True):
            some = told if may_have_door(p) else others
            before = None if kept is None else kept()
            slot = None if fed is None else fed.slot(p)
            if slot is not None and after is slot:
                p.grad = after = before
            if before is not after or (kept is not None and before is None):
                some.left.append((p, after))
            if kept is None:
                if after is not None or looks:
                    some.absent.append(p)
            elif fed is not None and slot is not None:
                if (key := storage_id(slot)) in touched or key in written:
                    fed.settle(p, leaves=after is before and key in written)
                elif reads:
                    some.some.append(p)
            elif not touched.isdisjoint(kept.storages) or (before is not None and not handed_on.isdisjoint(kept.storages)):
                some.readers.append(p)
                found[some].append(kept.again())
                self.found += [(p, storage_id(part), memory_of(part)) for part in parts(found[some][-1])]
                if not written.isdisjoint(kept.storages) and after is before:
                    some.added_to.append(p)
            elif reads:
                some.some.append(p)
        for p in self._gathered:
            (told if may_have_door(p) else others).absent.append(p)
        for some, those in found.items():
            some.are_such = like(those) if all(map(is_ordinary, those)) else with_parts_like(those)
        told.outside = others.outside = outside
        self._all, self._as_captured = [some for some in (told, others) if some.involved], True
        if fed is not None and not fed.seal():
            self.fed = None

    def seal(self) -> None:
        """From now on nobody but the parameters and this recording holds the gradients that the call created."""
        self._before, self._as_captured = [], False
        if self.sealed:
            return
        for some in self._all:
            some.seal()
        if self._given.isdisjoint([storage for some in self._all for storage in some.storages]):
            for some in self._all:
                if all(map(may_have_door, some.involved)):
                    gradients.lead_to(some.involved)
                    gradients.stay_for(self)
                    some.behind = all(map(has_gradient_door, some.involved))
        self.sealed = True

    def show(self) -> None:
        """Before the first replay in whose middle somebody may see gradients: until then those stand there that the call will
        leave."""
        if not self.sealed:
            before = self._before
            self.seal()
            self._before = before
            self.restore()

    def gives(self, storages: Set[int]) -> None:
        """Replays hand out results on these storages."""
        self._given = frozenset(storages)

    def held(self) -> bool:
        """Whether anybody else holds a gradient that the recording rewrites. Another thread (autograd's) may be about to let go
        of what it has had in hand: it gets the time to, once."""
        looks = 0
        while any(some.held() for some in self._all):
            if self._was_held or looks == _LOOKS:
                self._was_held = True
                return True
            time.sleep(_PAUSE)
            looks += 1
        self._was_held = False
        return False

    def fits(self) -> Sequence[Check]:
        return [self._fit] if self._all or self.fed is not None else []

    def _fit(self) -> str | None:
        """(Held ones are another question.)"""
        fits = all(some.fit() for some in self._all) and (self.fed is None or self.fed.fit())
        return None if fits else GRAD

    def ready(self) -> list[Callable[[], bool]]:
        """Each says of some whether they are such as the recording needs to find, and nobody else holds one."""
        fed = [] if self.fed is None else [self.fed.fit]
        return [*(known(some.ready, some.ready_facts, True) for some in self._all), *fed]

    def fill(self) -> Sequence[Step]:
        return [] if self.fed is None else [self._feed]

    def _feed(self) -> None:
        assert self.fed is not None
        if not self._as_captured:
            self.fed.feed(gradient)
            return
        before = {identity(p): kept() for p, kept in zip(self.parameters, self._before, strict=True) if kept is not None}
        self.fed.feed(lambda p: before[identity(p)])

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

    def leave(self) -> Sequence[Step]:
        """Make the attributes what the call would have left."""
        return [
            *([] if self.fed is None else [self.fed.take]),
            *(known(some.leave, some.left_facts, None) for some in self._all),
        ]

    def break_off(self, run: Broken) -> None:
        if not run.within_live:
            super().break_off(run)
