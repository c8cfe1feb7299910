"""The places of packages that a call has read, put together: what lies in dictionaries that tell of changes, all objects'
attributes, all classes, all code. So a replay asks for versions, and reads a few lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from functools import partial
from operator import attrgetter, is_
from types import AsyncGeneratorType, CoroutineType, FunctionType, GeneratorType, MemberDescriptorType, MethodType, ModuleType

import torch

from .._torch.dynamic import Reading, Table, Thing
from ..python import containers
from ..python.dict_versions import of_class, tell
from ..python.holders import Holder, kept
from ..python.identity import identity, reading_parts
from ..python.introspection import MISSING, contents, dictionary_of
from ..python.read_gate import behind_gate
from ..reads.place import UNREAD, Place, Read, in_class, is_constant, vars_of
from ..reads.readset import Members
from .replaced import as_was

__all__ = ["of_classes", "together"]


_KINDS = (int, list, dict, set, type, property, FunctionType, MethodType, AsyncGeneratorType, GeneratorType, CoroutineType)
_SPECIAL = frozenset(name for kind in _KINDS for name in dir(kind) if name.startswith("__"))
_SPECIAL |= {"__enter__", "__exit__", "__getattr__", "__missing__", "__reversed__", "__torch_function__"}
"""What Python and torch ask a class for by themselves."""


class _Items:
    """Values in dictionaries, by their keys."""

    def __init__(self) -> None:
        self._tables: dict[int, tuple[Table, dict[object, str]]] = {}  # by identity: the paths of what is read of each

    def add(self, table: Table, key: object, path: str) -> None:
        self._tables.setdefault(identity(table), (table, {}))[1].setdefault(key, path)

    def holders(self, called: str) -> list[Holder]:
        every = [*self._tables.values()]
        telling, others = ([one for one in every if tell([one[0]]) is tells] for tells in (True, False))
        return [_in_tables(called, some) for some in (telling, others) if some]


def _in_tables(called: str, tables: list[tuple[Table, dict[object, str]]]) -> Holder:
    gets = [(partial(dict.get, table), [*paths]) for table, paths in tables]
    named = [path for _, paths in tables for path in paths.values()]
    inside = [table for table, _ in tables]

    def read() -> Reading:
        return tuple([get(key, MISSING) for get, keys in gets for key in keys])

    return Holder(called, read, _not, named=lambda _, i, now: named[i], inside=(lambda: inside) if tell(inside) else None)


def _not(_: Reading) -> None:
    """What lies beyond is put back by who has noted it."""


def together(reads: Iterable[Read]) -> list[Holder]:
    """These places, of which none was written."""
    in_spaces, of_objects = _Items(), _Items()
    functions, objects, single = list[Thing](), dict[int, Thing](), list[Place]()
    for read in reads:
        place = read.place
        of: Thing = place.of
        if place.name == "<code>":
            functions.append(of)
        elif place.name == "<items>" and _is_cache(of):
            for key in _plain_items(of):
                in_spaces.add(of, key, place.path)
        elif type(place.name) is not str or place.name.startswith("<") or issubclass(type(of), torch.nn.Module):
            single.append(place)
        elif place.own is not None:
            objects[identity(of)] = of
            of_objects.add(place.own(), place.name, place.path)
        elif place.inside is not None:
            first, *others = place.inside()
            in_spaces.add(first, place.name, place.path)
            for table in others if read.value[0] is MISSING else ():
                in_spaces.add(table, place.name, place.path)
            if behind_gate(type(of)) is ModuleType:
                in_spaces.add(first, "__getattr__", place.path)
        else:
            single.append(place)
    found = [*in_spaces.holders("variables"), *of_objects.holders("attributes"), *_alone(single, [*objects.values()])]
    return [*found, kept("code of packages", reading_parts(functions))] if functions else found


def _alone(places: list[Place], objects: list[Thing]) -> Iterator[Holder]:
    """Those that lie in no dictionary by a name; of which classes these objects are, and where they have their attributes."""
    told, inside = list[Place](), list[Table]()
    for place in places:
        if place.inside is not None and place.own is None and tell(found := [*place.inside()]):
            told.append(place)
            inside += found
    if told:
        yield Holder("containers", _each([place.get for place in told]), _not,
                     named=lambda _, i, now: told[i].path, inside=lambda: inside)  # fmt: skip
    others = [place for place in places if place not in told]
    cells: list[Thing] = [place.of for place in others if place.name == "<cell>"]
    ones = [place for place in others if _is_one(place)]
    slots, gets = ([place for place in ones if _is_slot(place) is lies] for lies in (True, False))
    names = [place.path for place in (*(place for place in others if place.name == "<cell>"), *slots, *gets)]
    if names or objects:
        find = [dictionary_of(x) for x in objects]
        descriptors, owners = [in_class(type(place.of), str(place.name)) for place in slots], [place.of for place in slots]
        read_slots, read_each = [place.get for place in slots], [place.get for place in gets]

        def in_slots() -> list[object]:
            try:
                return [*map(_in_slot, descriptors, owners)]
            except AttributeError:  # one is empty
                return [get()[0] for get in read_slots]

        def read() -> Reading:
            single = *_contents_of(cells), *in_slots(), *[get()[0] for get in read_each]
            return *single, *map(type, objects), *[d() for d in find]

        yield Holder("class", read, _not, named=lambda path, i, _: names[i] if i < len(names) else path)
    for place in others:
        of: Thing = place.of
        if place.name == "<items>" and type(of) in (list, set):
            whole = containers.ordered if type(of) is list else containers.unordered
            yield whole(place.path, of)._replace(restore=_not, named=lambda path, *_: path)
        elif place.name != "<cell>" and not _is_one(place):
            yield Holder(place.path, place.get, _not, named=lambda path, *_: path)


def _contents_of(cells: list[Thing]) -> list[object]:
    try:
        return [*map(_contents, cells)]
    except ValueError:  # one is empty
        return [*map(contents, cells)]


_in_slot: Callable[[Thing, object], object] = MemberDescriptorType.__get__
_contents: Callable[[Thing], object] = attrgetter("cell_contents")


def _is_slot(place: Place) -> bool:
    return type(place.name) is str and type(in_class(type(place.of), place.name)) is MemberDescriptorType


def _is_one(place: Place) -> bool:
    """Whether it is one value that is read there: a slot, a weak reference, a variable of a context."""
    return place.name in ("<ref>", "<variable>", "<wrapped>", "<registered>") or (
        type(place.name) is str and not place.name.startswith("<") and place.own is None
    )


def of_classes(classes: Iterable[Members], names: Set[str]) -> list[Holder]:
    """What classes have by these names, and by those that Python itself asks for; but for what a call has changed."""
    every = [(members.kind, _reading(members, names), of_class(members.kind)) for members in classes]
    telling = [one for one in every if tell([one[2]])]
    return [_classes(some) for some in (telling, [one for one in every if one not in telling]) if some]


def _classes(some: list[tuple[Thing, Callable[[], Reading], Thing]]) -> Holder:
    named, inside = [kind.__qualname__ for kind, _, _ in some], [d for *_, d in some]
    return Holder("classes", _each([read for _, read, _ in some]), _not, named=lambda _, i, now: named[i],
                  inside=(lambda: inside) if tell(inside) else None)  # fmt: skip


def _each(reads: list[Callable[[], Reading]]) -> Callable[[], Reading]:
    """A function that reads several places: what is as it was is the same object."""
    found = [read() for read in reads]

    def read_all() -> Reading:
        return tuple([was if _is_same(was, now := read()) else now for read, was in zip(reads, found, strict=True)])

    return read_all


def _is_same(a: Reading, b: Reading) -> bool:
    return len(a) == len(b) and all(map(is_, a, b))


def _reading(members: Members, names: Set[str]) -> Callable[[], Reading]:
    """(What we have put in the place of torch's own is read as what was there.)"""
    own, missing = vars_of(members.kind), MISSING
    if members.names is not None:
        few = [*members.names]
        return lambda: tuple([as_was(own.get(n, missing)) for n in few])
    counting = (names | _SPECIAL) - UNREAD
    now = {n: as_was(own.get(n, missing)) for n in counting}
    there = [n for n, v in now.items() if v is not missing and as_was(members.before.get(n, missing)) is v]
    absent = {n for n, v in now.items() if v is missing}
    return lambda: (
        *[as_was(own.get(n, missing)) for n in there],
        *[n for n in own.keys() & absent if as_was(own[n]) is not missing],
    )


def _is_cache(thing: Thing) -> bool:
    """Whether a dictionary holds tensors: then there may be more in it in each call, and only plain items count."""
    return issubclass(type(thing), dict) and any(issubclass(type(v), torch.Tensor) for v in dict.values(thing))


def _plain_items(table: Table) -> list[object]:
    return [k for k, v in dict.items(table) if is_constant(k) and is_constant(v)]
