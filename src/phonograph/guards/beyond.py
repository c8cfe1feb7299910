"""What a call relies on beyond that which the walk finds: of installed packages, of torch and of the standard library.

By default it is what the code that ran names of them (`packages`). With ``PHONOGRAPH_CONSTANTS=read`` it is what the call was
heard to read (`reads`): also by names that code has worked out, and of modules that it imports.

A package may change what is its own business. A count that has moved on while a call was captured is left out (it moves in no
replay, as no code runs), and so is an object in place of which another has come. Any other value that has changed would have to
change in each replay: such a call is refused, and what it has changed is put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Protocol, TypeAlias

import torch

from .._torch.dynamic import Reading, Table, Thing
from ..errors import Overlooked, Refusal
from ..python.dict_versions import of_class
from ..python.holders import Holder, kept
from ..python.identity import identity, reading_parts
from ..python.introspection import MISSING
from ..python.origin import is_users
from ..reads import CONSTANTS_ARE_READ
from ..reads.place import Place, Read, is_constant, item_of, of_class_alone
from ..reads.readset import ReadSet
from ..reads.whose import OURS, USER, whose_module
from .carried_state import Carried
from .packages import is_anothers
from .reachable import Reach

__all__ = ["Beyond", "beyond"]

_BEFORE_MEMBERS = 3  # bases, its name, what derives from it: see `klass`
LeftOut: TypeAlias = Callable[[FrameType], Overlooked | Refusal | None]
_OF_OTHERS = frozenset({"<optimizer>"})
"""Kinds of places that are looked after elsewhere, wherever they lie."""


class Beyond(Protocol):
    """What one call relies on beyond what is in reach."""

    def hears(self, left_out: LeftOut, carried: Carried) -> LeftOut:
        """What is to be told of each function that starts, before it is asked what was `left_out`."""

    def noting(self, called: object) -> AbstractContextManager[object]:
        """Note what is read while the block runs."""

    def profiled_by(self, profile: object) -> None:
        """This function tells of starts."""

    def holders(self, ran: Iterable[tuple[CodeType, Table]], relied: Reach, marks: Set[int]) -> list[Holder]:
        """The places that count, but for the numbers that are followed, of which `marks` are the identities. The call `ran`
        these functions, each given as its code and its globals, and relies on what is in reach of `relied`.

        Raises:
            Refusal: the call has changed one that is no count.
        """

    def restore(self) -> None:
        """Put back what the call has changed."""


class _Named:
    """By the names in code."""

    def __init__(self, reach: Reach) -> None:
        self._packages = reach.packages

    def hears(self, left_out: LeftOut, carried: Carried) -> LeftOut:
        return left_out

    def noting(self, called: object) -> AbstractContextManager[object]:
        return nullcontext()

    def profiled_by(self, profile: object) -> None:
        pass

    def holders(self, ran: Iterable[tuple[CodeType, Table]], relied: Reach, marks: Set[int]) -> list[Holder]:
        return self._packages.after(ran, relied.of_others, relied.foreign)

    def restore(self) -> None:
        self._packages.restore()


class _Noted:
    """By what was read."""

    def __init__(self, reach: Reach) -> None:
        found = [thing for thing in reach.met if not _is_of_others(thing)]
        self.reads = ReadSet(found, hears_starts=False)
        self.noting, self.profiled_by = self.reads.noting, self.reads.profiled_by
        self._known = {*map(identity, (*found, *reach.spaces)), *reach.cells}
        self._layers = {type(module) for module in reach.modules}

    def hears(self, left_out: LeftOut, carried: Carried) -> LeftOut:
        self.reads.stand_ins = carried.holders()
        return partial(_heard, self.reads, left_out)  # (which leads not back here)

    def holders(self, ran: Iterable[tuple[CodeType, Table]], relied: Reach, marks: Set[int]) -> list[Holder]:
        for read in self._of(self.reads.before):
            if self._has_changed(read):
                raise Refusal(f"changes {read.place.path}, which outlives the call", "change it outside", final=False)
        noted = self._of([read for read in self.reads.reads.values() if read is not None and read.relied])
        forwards = [_place(of_class_alone(kind, "forward", f"{kind.__qualname__}.forward")) for kind in self._layers]
        return [*forwards, *_places([read for read in noted if marks.isdisjoint(map(identity, read.value))])]

    def _has_changed(self, read: Read) -> bool:
        """Whether the call has changed a place in a way that each replay had to: all that the user's code changes is such."""
        place, now = read.place, read.place.get()
        if place.name in ("<class>", "<constants>"):
            before, after = (dict(zip(v[::2], v[1::2], strict=True)) for v in _members(read, now))
            differ = {n for n in before.keys() | after.keys() if before.get(n, MISSING) is not after.get(n, MISSING)}
            return not differ.isdisjoint(self.reads.users_names)
        if place.name == "<items>":
            by_user = place.path.rpartition(".")[2] in self.reads.users_names
        else:
            by_user = (identity(place.of), place.name) in self.reads.set_by_users
        if by_user:
            return True
        alike = len(now) == len(read.value) and (place.name == "<items>" or not str(place.name).startswith("<"))
        return alike and not all(a is b or _is_count(a, b) for a, b in zip(read.value, now, strict=True))

    def restore(self) -> None:
        noted = [read for read in self.reads.reads.values() if read is not None and read.value]
        for read in self._of([*self.reads.before, *reversed(noted)]):
            whole = read.place.name in ("<items>", "<constants>") or all(map(_is_plain, read.value))
            if read.place.put is not None and whole and read.changed:
                read.place.put(read.value)

    def _is_beyond(self, place: Place) -> bool:
        if place.name in _OF_OTHERS or identity(place.of) in self._known or identity(place.of) in self.reads.stand_ins:
            return False
        return place.path.partition(" ")[0] != "globals()"  # (of functions that the walk has not met)

    def _of(self, reads: Iterable[Read]) -> list[Read]:
        return [read for read in reads if self._is_beyond(read.place)]


def _heard(reads: ReadSet, left_out: LeftOut, frame: FrameType) -> Overlooked | Refusal | None:
    """A function starts for the first time. What was overlooked of it."""
    reads.started(frame)
    return left_out(frame)


beyond: Callable[[Reach], Beyond] = _Noted if CONSTANTS_ARE_READ else _Named


def _is_of_others(thing: Thing) -> bool:
    """Whether the walk does not look into something that it has met: a module, a class or a function of a package's."""
    if issubclass(type(thing), ModuleType):
        return whose_module(thing) not in (USER, OURS)
    if issubclass(type(thing), type):
        return is_anothers(thing)
    return type(thing) is FunctionType and not is_users(thing.__code__.co_filename)


def _is_plain(value: object) -> bool:
    """Whether a value cannot change, and may so be put back where another has come in its place."""
    return is_constant(value) or value is MISSING or issubclass(type(value), type)


def _members(read: Read, now: Reading) -> tuple[Reading, Reading]:
    """Names and values of what a class had, and has, one after the other."""
    begin = 0 if read.place.name == "<constants>" else _BEFORE_MEMBERS
    return read.value[begin:], now[begin:]


def _is_count(before: object, now: object) -> bool:
    return type(before) is type(now) is int or not (is_constant(before) and is_constant(now))


def _places(reads: list[Read]) -> Iterator[Holder]:
    functions: list[Thing] = [read.place.of for read in reads if read.place.name == "<code>"]
    if functions:
        yield kept("code of packages", reading_parts(functions))
    kinds: list[Thing] = [read.place.of for read in reads if read.place.name in ("<class>", "methods")]
    if kinds:
        yield kept("bases", lambda: tuple([k.__bases__ for k in kinds]))
    for read in reads:
        of: Thing = read.place.of
        if read.place.name == "<items>" and _is_cache(of):
            yield from (_place(item_of(of, key, read.place.path)) for key in _plain_items(of))
        elif read.place.name != "<code>":
            yield _place(read.place)


def _is_cache(thing: Thing) -> bool:
    """Whether a dictionary holds tensors: then there may be more in it in each call, and only plain items count."""
    return issubclass(type(thing), dict) and any(issubclass(type(v), torch.Tensor) for v in dict.values(thing))


def _plain_items(table: Table) -> list[object]:
    return [k for k, v in dict.items(table) if is_constant(k) and is_constant(v)]


def _place(place: Place) -> Holder:
    inside = None if place.own is not None else place.inside
    if place.name == "methods":
        kind: Thing = place.of
        inside = lambda: (of_class(kind),)  # noqa: E731 - (its bases are asked for beside it)
    return Holder(place.path, place.get, lambda _: None, named=lambda path, *_: path,
                  inside=None if inside is None else lambda: [*inside()])  # fmt: skip
