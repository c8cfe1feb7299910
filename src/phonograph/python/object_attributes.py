"""What objects, closures and namespaces hold, as places: attributes in a dictionary or in slots, cells, names.

A slot is read by its descriptor, whatever methods the class has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence, Set
from operator import attrgetter
from types import CellType

from .._torch.dynamic import Reading, Thing
from .containers import by_key, item, keyed, pairs
from .holders import Holder, Part, Spot, kept
from .identity import identity
from .introspection import MISSING, contents, dictionary_of

__all__ = ["attributes", "cells", "named", "of_tensors", "slots", "some", "space"]


def _attribute(thing: object, find: Callable[[], dict[str, object]], name: str) -> Spot:
    """An attribute of an object that has it in its dictionary."""
    at = identity(thing), name
    return Spot(at, lambda: find().get(name, MISSING), lambda value: find().__setitem__(name, value), type(thing))


def attributes(path: str, thing: object, names: Sequence[str] | None = None, *, watched: bool = False) -> Holder:
    """The attributes that an object has in its dictionary, which may be replaced as a whole. With `names` a recording relies on
    the values of these only, and on which others there are."""
    find = dictionary_of(thing)
    before = find()

    def read() -> Reading:
        d = find()
        return (len(d), *d, *d.values())

    def restore(values: Reading) -> None:
        if find() is not before and not issubclass(type(thing), threading.local):
            object.__setattr__(thing, "__dict__", before)
        before.clear()
        before.update(pairs(values, 0))

    spot = by_key(lambda name: _attribute(thing, find, name))
    inside = None if issubclass(type(thing), threading.local) else lambda: (find(),)
    if names is None:
        return Holder(path, read, restore, watched, keyed, owner=thing, spot=spot, inside=inside)
    some = tuple(names)

    def read_some() -> Reading:
        d = find()
        return (*map(d.get, some), *d)

    def some_of(values: Reading) -> Reading:
        d = dict(pairs(values, 0))
        return (*map(d.get, some), *d)

    def named(path: str, i: int, values: Reading) -> str:
        return f"{path}.{some[i]}" if i < len(some) else path

    def spot_of_some(i: int, _: Reading) -> Spot:
        return _attribute(thing, find, some[i])

    part = Part(read_some, some_of, named, spot_of_some)
    return Holder(path, read, restore, watched, keyed, part=part, owner=thing, spot=spot, inside=inside)


def some(path: str, thing: object, names: Set[str]) -> Holder:
    """Those attributes of an object that have one of these names, whether or not they are there."""
    find = dictionary_of(thing)

    def read() -> Reading:
        d = find()
        held = [n for n in d if n in names]
        return (len(held), *held, *map(d.__getitem__, held))

    def restore(values: Reading) -> None:
        d, before = find(), dict(pairs(values, 0))
        for n in [n for n in d if n in names and n not in before]:
            del d[n]
        d.update(before)

    return Holder(path, read, restore, named=keyed, spot=by_key(lambda name: _attribute(thing, find, name)))


def named(path: str, thing: object, names: Iterable[str], *, watched: bool = False) -> Holder:
    """Those attributes in an object's dictionary that have one of these names, whether or not they are there."""
    find = dictionary_of(thing)
    held = tuple(names)

    def read() -> Reading:
        get = find().get
        return tuple([get(n, MISSING) for n in held])

    place = kept(path, read)._replace(named=lambda path, i, _: f"{path}.{held[i]}", watched=watched, owner=thing)
    return place._replace(spot=lambda i, _: _attribute(thing, find, held[i]), inside=lambda: (find(),))


def slots(path: str, thing: object, descriptors: Sequence[tuple[str, Thing]]) -> Holder:
    """The attributes that an object has in slots, given as (name, descriptor) pairs."""

    def get(descriptor: Thing) -> object:
        try:
            return descriptor.__get__(thing)
        except AttributeError:
            return MISSING

    def read() -> Reading:
        return tuple([get(d) for _, d in descriptors])

    def restore(values: Reading) -> None:
        for (_, descriptor), value in zip(descriptors, values, strict=True):
            if value is not MISSING:
                descriptor.__set__(thing, value)
            elif get(descriptor) is not MISSING:
                descriptor.__delete__(thing)

    def spot(i: int, _: Reading) -> Spot:
        name, descriptor = descriptors[i]
        return Spot((identity(thing), name), lambda: get(descriptor), lambda value: descriptor.__set__(thing, value))

    return Holder(path, read, restore, named=lambda path, i, _: f"{path}.{descriptors[i][0]}", spot=spot)


def of_tensors(
    path: str, tensors: Sequence[tuple[str, object]], descriptors: Sequence[tuple[str, Thing]], names: Sequence[str]
) -> Holder:  # fmt: skip
    """What tensors of one class, which say of what they consist, have in slots, and what other attributes of theirs give. Read
    one attribute of all of them after the other."""
    paths, things = [path for path, _ in tensors], [t for _, t in tensors]
    getters: list[Callable[[object], object]] = [d.__get__ for _, d in descriptors] + [attrgetter(name) for name in names]
    called = [*(name for name, _ in descriptors), *names]

    def read() -> Reading:
        try:
            return tuple([x for get in getters for x in map(get, things)])
        except AttributeError:  # one of them is empty
            return ()

    def restore(values: Reading) -> None:
        for i, (_, descriptor) in enumerate(descriptors):
            for t, value in zip(things, values[i * len(things) :], strict=False):
                descriptor.__set__(t, value)

    def named(path: str, i: int, values: Reading) -> str:
        return f"{paths[i % len(things)]}.{called[i // len(things)]}"

    return Holder(path, read, restore, named=named)


_contents = attrgetter("cell_contents")


def cells(path: str, of: Sequence[CellType], names: Sequence[str]) -> Holder:
    def restore(values: Reading) -> None:
        for cell, value in zip(of, values, strict=True):
            if value is not MISSING:
                cell.cell_contents = value
            elif contents(cell) is not MISSING:
                del cell.cell_contents

    def spot(i: int, _: Reading) -> Spot:
        cell = of[i]
        return Spot((identity(cell), None), lambda: contents(cell), lambda value: setattr(cell, "cell_contents", value))

    def read() -> Reading:
        try:
            return (*map(_contents, of),)
        except ValueError:  # one is empty
            return (*map(contents, of),)

    place = Holder(path, read, restore, named=lambda path, i, _: f"{path}.{names[i]}", spot=spot)
    variables = [(cell, "cell_contents") for cell in of]
    return place._replace(facts=lambda: [("cell", cell) for cell in of], variables=variables)


def space(path: str, of: dict[str, object], names: Iterable[str]) -> Holder:
    """Some names of a namespace, whether or not they are there."""
    held = tuple(names)

    def read() -> Reading:
        return tuple([of.get(n, MISSING) for n in held])

    def restore(values: Reading) -> None:
        for n, v in zip(held, values, strict=True):
            if v is not MISSING:
                of[n] = v
            else:
                of.pop(n, None)

    return Holder(
        path, read, restore, named=lambda path, i, _: held[i], spot=lambda i, _: item(of, held[i]), inside=lambda: (of,),
        variables=[(of, n) for n in held],
    )  # fmt: skip
