"""What a call relies on beyond that which the walk finds: of installed packages, of torch and of the standard library.

It is what the call was heard to read (`reads`): also by names that code has worked out, and of modules that it imports.

A package may change what is its own business, as no replay does: what it counts, which object is in a place, what a cache has
gained. Where code of the call goes by that, or a plain value has changed, each replay had to change it: such a call is refused,
and what it has changed is put back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import AbstractContextManager
from functools import partial
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import TypeAlias

from .._torch.dynamic import Thing
from ..errors import Overlooked, Refusal
from ..python.bytecode import names_in, used_by_name, used_in_full
from ..python.holders import Holder
from ..python.identity import identity
from ..python.introspection import MISSING, is_anothers
from ..python.origin import is_ours, is_users
from ..reads.place import UNREAD, Place, Read, changes, is_constant, vars_of
from ..reads.readset import Members, ReadSet
from ..reads.whose import OURS, USER, whose_module
from .carried_state import Carried
from .noted_places import of_classes, together
from .reachable import Reach
from .replaced import as_was

__all__ = ["Beyond", "LeftOut"]

LeftOut: TypeAlias = Callable[[FrameType], Overlooked | Refusal | None]
_MANY = frozenset({"<items>", "<all>"})
"""Places that hold many values, by their names."""
_OF_OTHERS = frozenset({"<optimizer>"})
"""Kinds of places that are looked after elsewhere, wherever they lie."""


class Beyond:
    """What one call relies on beyond what is in reach."""

    def __init__(self, reach: Reach) -> None:
        found = [thing for thing in reach.met if not _is_of_others(thing)]
        self.reads = ReadSet(found, hears_starts=False)
        self._known = {*map(identity, (*found, *reach.spaces)), *reach.cells}

    def noting(self, called: object) -> AbstractContextManager[object]:
        """Note what is read while the block runs."""
        return self.reads.noting(called)

    def goes_with(self, profile: object, aside: Callable[[], bool]) -> None:
        """This function tells of starts. What runs is not the call's while it is `aside`."""
        self.reads.goes_with(profile, aside)

    def hears(self, left_out: LeftOut, carried: Carried, built: Iterable[object]) -> LeftOut:
        """What is to be told of each function that starts, before it is asked what was `left_out`. What was `built` stands for
        containers and objects among the arguments."""
        self.reads.stand_ins = carried.holders() | {*map(identity, built)}
        return partial(_heard, self.reads, left_out)  # (which leads not back here)

    def holders(self, ran: Sequence[CodeType], marks: Set[int]) -> list[Holder]:
        """The places that count, but for the numbers that are followed, of which `marks` are the identities. `ran`: the code
        of functions that started, but for torch's.

        Raises:
            Refusal: the call has changed one that is no count, or may have read others.
        """
        if self.reads.unheard:
            raise Refusal(f"may read what nobody hears of, as {self.reads.unheard}", "call it again", final=False)
        changed = [_called(read.place) for read in self._of(self.reads.before) if self._has_changed(read, ran)]
        changed += [f"{c.kind.__qualname__}.{n}" for c in self._classes() for n in _changed(c) if self._counts_of(c, n, ran)]
        if changed:
            raise Refusal(
                f"changes {changed[0]}, which outlives the call",
                "call what changes it outside, or mark that @pg.live",
                final=False,
            )
        noted = self._of([read for read in self.reads.reads.values() if read is not None and read.relied])
        noted = [read for read in noted if marks.isdisjoint(map(identity, read.value))]
        return [*together(noted), *of_classes(self._classes(), self.reads.names)]

    def _classes(self) -> list[Members]:
        return [members for key, members in self.reads.classes.items() if key not in self._known]

    def _has_changed(self, read: Read, ran: Sequence[CodeType]) -> bool:
        """Whether the call has changed a place in a way that each replay had to: all that the user's code changes is such."""
        place, now = read.place, read.place.get()
        if place.name == "<items>":
            by_user = place.path.rpartition(".")[2] in self.reads.users_names
        else:
            by_user = (identity(place.of), place.name) in self.reads.set_by_users
        if by_user:
            return True
        if str(place.name).startswith("<") and place.name not in _MANY:
            return False
        container = place.path.rpartition(".")[2].partition("[")[0] if place.name == "<items>" else ""
        return any(_differs(a, b, ran, n, container) for n, a, b in changes(read, now))

    def _counts_of(self, members: Members, name: str, ran: Sequence[CodeType]) -> bool:
        """Whether what a class has by this name, and has changed, had to change in each replay."""
        before, now = members.before.get(name, MISSING), vars_of(members.kind).get(name, MISSING)
        return name in self.reads.users_names or _differs(before, now, ran, name)

    def restore(self) -> None:
        """Put back what the call has changed, the latest place first: several may lead to one value. (What stood for another
        function while it was captured is no more.) Modules that it has loaded stay, with what they have put anywhere: only
        plain values are put back then."""
        loads = any(read.place.of is sys.modules for read in self.reads.before)
        for read in self._of(reversed(self.reads.before)):
            if read.place.put is None or not read.changed or any(map(_is_ours, read.value)):
                continue
            if not loads or (read.place.name not in _MANY and is_constant(read.value[0])):
                read.place.put(read.value)
        for members in self._classes():
            for name in _changed(members):
                if is_constant(before := members.before.get(name, MISSING)):
                    type.__setattr__(members.kind, name, before)
                elif before is MISSING and name in self.reads.users_names:
                    type.__delattr__(members.kind, name)

    def _is_beyond(self, place: Place) -> bool:
        if place.name in _OF_OTHERS or identity(place.of) in self._known or identity(place.of) in self.reads.stand_ins:
            return False
        return place.path.partition(" ")[0] != "globals()"  # (of functions that the walk has not met)

    def _of(self, reads: Iterable[Read]) -> list[Read]:
        return [read for read in reads if self._is_beyond(read.place)]


def _changed(members: Members) -> list[str]:
    """The names of what a class has another of by now."""
    if members.names is not None:
        return []
    before, now = members.before, vars_of(members.kind)
    of = [n for n in {*before, *now} - UNREAD if now.get(n, MISSING) is not before.get(n, MISSING)]
    return [n for n in of if as_was(now.get(n, MISSING)) is not as_was(before.get(n, MISSING))]


def _heard(reads: ReadSet, left_out: LeftOut, frame: FrameType) -> Overlooked | Refusal | None:
    """A function starts for the first time. What was overlooked of it."""
    reads.started(frame)
    return left_out(frame)


def _is_of_others(thing: Thing) -> bool:
    """Whether the walk does not look into something that it has met: a module, a class or a function of a package's."""
    if issubclass(type(thing), ModuleType):
        return whose_module(thing) not in (USER, OURS)
    if issubclass(type(thing), type):
        return is_anothers(thing)
    return type(thing) is FunctionType and not is_users(thing.__code__.co_filename)


def _is_ours(value: object) -> bool:
    """Whether it is a function that stands for another while a call is captured."""
    return type(value) is FunctionType and is_ours(value.__code__.co_filename)


def _called(place: Place) -> str:
    """What it is called where it is spoken of alone: a variable with its module."""
    of: Thing = place.of
    module = dict.get(of, "__name__") if type(of) is dict and place.path == place.name else None
    return f"{module}.{place.path}" if type(module) is str else place.path


def _differs(before: object, now: object, ran: Sequence[CodeType], name: object, container: str = "") -> bool:
    """Whether there is another value, and not only another object or a count that no code goes by. (What has come is kept for
    the next time, as caches do.)"""
    if before is now or before is MISSING or _is_ours(before) or _is_ours(now):
        return False
    counts = type(before) is type(now) is int or not (is_constant(before) and is_constant(now))
    return not counts or _goes_by(ran, name, container)


def _goes_by(ran: Sequence[CodeType], name: object, container: str) -> bool:
    """Whether code does more with what has this name than to count or to set it; where it has none, with what is in this
    container than to append to it and to set items."""
    if type(name) is str and (name or not container):
        return any(name in used_by_name(code) for code in ran)
    named = [code for code in ran if container in names_in(code)]
    return not named or any(container in used_in_full(code) for code in named)
