"""Places that hold values: a dictionary, an object's attributes, the cells of a closure. Each can be read again at C speed, and
be put back as it was.

Reading a place never runs the user's code: a subclass of `dict` is read as the dictionary that it is, a slot by its
descriptor, whatever methods the class has.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import threading
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import partial
from itertools import chain, cycle, islice, repeat
from operator import attrgetter, methodcaller
from types import CellType
from typing import Any, NamedTuple

from .._torch.dynamic import Leaves, Reading, Table
from .identity import identity
from .introspection import MISSING, contents

__all__ = [
    "AT_ONCE",
    "Contents",
    "Holder",
    "Spot",
    "array_of_numpys",
    "attributes",
    "buffer",
    "cache",
    "cells",
    "dictionaries",
    "dictionary",
    "dictionary_without",
    "frozen_array",
    "is_table",
    "item",
    "kept",
    "key_label",
    "keyed",
    "memory",
    "nested",
    "ordered",
    "own_dict",
    "slots",
    "some",
    "space",
    "table_of",
    "unordered",
    "with_inner",
    "without",
]  # fmt: skip

AT_ONCE = 64 << 10
"""Bytes of an array, or of memory, that are all compared before each replay; of larger ones a part each time."""


class Spot(NamedTuple):
    """Where one value of a place lies: in which object (by identity), and under which key; how to read and replace it."""

    at: tuple[int, Any]
    get: Callable[[], Any]
    put: Callable[[Any], None]


Find = Callable[[int, Reading], Spot]


class Part(NamedTuple):
    """A part of a place: how to read it now, how to take it out of what was read of the whole, how to name its values, and
    where each of them lies."""

    read: Callable[[], Reading]
    of: Callable[[Reading], Reading]
    named: Callable[[str, int, Reading], str]
    spot: Find | None = None


class Contents(NamedTuple):
    """Of a place that is all that a list, a dictionary or a set holds: which one it is `now`, and how to let it be another."""

    now: Callable[[], Any]
    move: Callable[[Any], None]


class Holder(NamedTuple):
    """One place outside the arguments that holds values.

    `read` gives the values it holds now; `restore` puts such values back. `watched` says that the witness hears of
    changes, so that it need not be read before each replay; `dial`, that it is this (group identity, key) of an optimizer.
    `named` names the i-th of the values read. A recording may rely on a `part` of the place only. It is all that the dictionary
    of `owner` holds, or the `contents` of a container; it has these `tables`, dictionaries that are no object's attributes. It
    lies `behind` a door (`doors.Room`), and need not be read while that is shut. `spot` finds where the i-th of the values read
    lies. All of it is `inside` these dictionaries, if it is known of any: while they have not changed, it has not.
    """

    path: str
    read: Callable[[], Reading]
    restore: Callable[[Reading], None]
    watched: bool = False
    named: Callable[[str, int, Reading], str] | None = None
    dial: tuple[int, str] | None = None
    part: Part | None = None
    owner: Any = None
    contents: Contents | None = None
    tables: Callable[[], Iterable[Table]] = tuple
    behind: Any = None
    spot: Find | None = None
    inside: Callable[[], Sequence[Any]] | None = None

    def label(self, i: int, values: Reading) -> str:
        """A name for the i-th of the values read."""
        return f"{self.path}[{i}]" if self.named is None else self.named(self.path, i, values)


def kept(path: str, read: Callable[[], Reading], inside: Sequence[object] | None = None) -> Holder:
    """What a capture does not undo: code, classes, hooks of all modules."""
    return Holder(path, read, lambda _: None, inside=None if inside is None else lambda: inside)


def key_label(key: object) -> str:
    """A dictionary key in a name for people. (Never the repr of a tensor: it would read its values.)"""
    return repr(key)[:40] if isinstance(key, (int, float, tuple, bytes)) else type(key).__name__


# -- dictionaries. Read as (how many items, the keys, the values).


def _pairs(values: Reading, at: int) -> Iterator[tuple[Any, Any]]:
    """The items of the dictionary that was read into `values`, from `at` on."""
    n = values[at] if values else 0
    return zip(values[at + 1 : at + 1 + n], values[at + 1 + n : at + 1 + 2 * n], strict=True)


def item(d: Table, key: object) -> Spot:
    """An item of a dictionary."""
    return Spot((identity(d), key), lambda: dict.get(d, key, MISSING), lambda value: dict.__setitem__(d, key, value))


def _attribute(thing: object, find: Callable[[], dict[str, object]], name: str) -> Spot:
    """An attribute of an object that has it in its dictionary."""
    return Spot((identity(thing), name), lambda: find().get(name, MISSING), lambda value: find().__setitem__(name, value))


def _keyed(spot: Callable[[Any], Spot]) -> Find:
    """How to find what lies in a dictionary that was read as (how many items, the keys, the values)."""
    return lambda i, values: spot(values[i - values[0]])


def keyed(path: str, i: int, values: Reading) -> str:
    at = 0
    while at < len(values):
        n = values[at]
        if at < i <= at + 2 * n:
            key = values[at + 1 + (i - at - 1) % n]
            return f"{path}.{key}" if isinstance(key, str) else f"{path}[{key_label(key)}]"
        at += 1 + 2 * n
    return f"{path}[{i}]"


def dictionary(path: str, d: Table, *, watched: bool = False) -> Holder:
    kind: Any = OrderedDict if issubclass(type(d), OrderedDict) else dict
    if type(d) is kind:

        def read() -> Reading:
            return (len(d), *d, *d.values())
    else:  # a subclass: as it is in memory, whatever its methods say

        def read() -> Reading:
            return (dict.__len__(d), *kind.keys(d), *kind.values(d))

    def restore(values: Reading) -> None:
        kind.clear(d)
        for key, value in _pairs(values, 0):
            kind.__setitem__(d, key, value)

    def move(to: dict[object, object]) -> None:
        nonlocal d
        d = to

    return Holder(path, read, restore, watched, keyed, contents=Contents(lambda: d, move), tables=lambda: [d],
                  spot=_keyed(lambda k: item(d, k)), inside=lambda: (d,))  # fmt: skip


def dictionary_without(path: str, d: dict[object, object], names: Set[object]) -> Holder:
    """The same, but for what is under these names: of them only counts where they stand."""

    def read() -> Reading:
        return (len(d), *d, *[value for key, value in d.items() if key not in names])

    def spot(i: int, values: Reading) -> Spot:
        n = values[0]
        held = [None] * (1 + n) + [key for key in values[1 : 1 + n] if key not in names]
        if i <= n:
            raise IndexError(i)
        return item(d, held[i])

    return kept(path, read)._replace(spot=spot)


_values: Callable[[Any], Any] = methodcaller("values")


def dictionaries(path: str, dicts: Sequence[Table], *, watched: bool) -> Holder:
    """Several, most of them empty or small, as one place: reading it is cheaper than reading each. Read as (how many items in
    each, all keys, all values): first those that hold something now, then, unless all are empty still, the others."""
    groups = [[d for d in dicts if d], [d for d in dicts if not d]]
    filled, empty = groups

    def read() -> Reading:
        found = (*map(len, filled), *chain.from_iterable(filled), *chain.from_iterable(map(_values, filled)))
        if any(empty):
            found += (*map(len, empty), *chain.from_iterable(empty), *chain.from_iterable(map(_values, empty)))
        return found

    def restore(values: Reading) -> None:
        for group in groups:
            n = len(group)
            lengths = values[:n] or (0,) * n
            total = sum(lengths)
            items = zip(values[n : n + total], values[n + total : n + 2 * total], strict=True)
            for d, length in zip(group, lengths, strict=True):
                d.clear()
                d.update(islice(items, length))
            values = values[n + 2 * total :]

    def named(path: str, i: int, values: Reading) -> str:
        for group in groups:
            n, total = len(group), sum(values[: len(group)])
            if n <= i < n + 2 * total:
                return f"{path}.{values[n + (i - n) % total]}"
            i, values = i - n - 2 * total, values[n + 2 * total :]
        return path

    return Holder(path, read, restore, watched, named, tables=lambda: dicts, inside=lambda: dicts)


def with_inner(path: str, d: Table, name: str) -> Holder:
    """A dictionary in which the one under `name` counts by what it holds: an equal one in its place is no change."""

    def read() -> Reading:
        now = {**d, name: _taken_apart(d[name])}
        return (len(now), *now, *now.values())

    def restore(values: Reading) -> None:
        inner = d[name]
        d.clear()
        d.update(_pairs(values, 0))
        inner.clear()
        inner.update(_put_together(d[name]))
        d[name] = inner

    return Holder(path, read, restore, named=keyed)


def without(path: str, d: dict[str, object], name: str) -> Holder:
    """A dictionary but for what is under `name`, which has a place of its own. Read as (how many keys, the keys, the values of
    those that are there now)."""
    others, before = [key for key in d if key != name], [*d]
    get = d.get

    def read() -> Reading:
        return (len(d), *d, *map(get, others, repeat(MISSING)))

    def restore(values: Reading) -> None:
        now = dict(zip(others, values[1 + values[0] :], strict=True)) | {name: d.get(name)}
        d.clear()
        d.update({key: now[key] for key in before})

    def named(path: str, i: int, values: Reading) -> str:
        i -= 1 + values[0]
        return f"{path}.{others[i]}" if i >= 0 else path

    return Holder(path, read, restore, named=named, inside=lambda: (d,))


def nested(path: str, d: Table, name: str, behind: object) -> Holder:
    """A dictionary of dictionaries (or of other values), which lies under `name` in another. A recording relies on what they
    hold, and has none of them. Read as (it, how many items, the inner ones, the keys, what each inner one holds)."""

    def read() -> Reading:
        inner = (*dict.values(d[name]),)
        return (d[name], len(inner), *inner, *held())

    def held() -> Reading:
        return (*dict.keys(d[name]), *chain.from_iterable(map(_flat, dict.values(d[name]))))

    def held_of(values: Reading) -> Reading:
        return values[2 + values[1] :]

    def restore(values: Reading) -> None:
        outer, n = values[:2]
        inner, keys, flat = values[2 : 2 + n], values[2 + n : 2 + 2 * n], values[2 + 2 * n :]
        for one in inner:
            if isinstance(one, dict):
                dict.clear(one)
                dict.update(one, _pairs(flat, 0))
            flat = flat[1 + 2 * flat[0] if isinstance(one, dict) else 1 :]
        dict.clear(outer)
        dict.update(outer, zip(keys, inner, strict=True))
        d[name] = outer

    def named(path: str, i: int, values: Reading) -> str:
        return path

    def tables() -> list[dict[object, object]]:
        return [one for one in dict.values(d[name]) if isinstance(one, dict)]

    def spot(i: int, flat: Reading) -> Spot:
        """Of what the inner ones hold."""
        for one in dict.values(d[name]):
            n = len(one) if isinstance(one, dict) else 0
            if isinstance(one, dict) and n < i <= 2 * n:
                return _told_of(item(one, flat[i - n]), behind)
            i, flat = (i - 1 - 2 * n, flat[1 + 2 * n :]) if isinstance(one, dict) else (i - 1, flat[1:])
        raise IndexError(i)

    def spot_of_all(i: int, values: Reading) -> Spot:
        return spot(i - 2 - 2 * values[1], values[2 + 2 * values[1] :])

    def spot_of_some(i: int, values: Reading) -> Spot:
        n = len(d[name])
        return spot(i - n, values[n:])

    part = Part(held, held_of, named, spot_of_some)
    return Holder(path, read, restore, named=named, part=part, tables=tables, behind=behind, spot=spot_of_all)


def _told_of(spot: Spot, behind: Any) -> Spot:
    """It lies behind a door: that is told where it is replaced."""

    def put(value: object) -> None:
        spot.put(value)
        behind.opened()

    return spot._replace(put=put)


def _flat(value: object) -> Reading:
    """How many items a dictionary has, its keys, its values; or what there is instead of one."""
    return (len(value), *dict.keys(value), *dict.values(value)) if isinstance(value, dict) else (value,)


def _taken_apart(d: dict[object, object]) -> Reading:
    """A dictionary of dictionaries (and of no tuples) as tuples."""
    return tuple([(k, _taken_apart(v) if isinstance(v, dict) else v) for k, v in d.items()])


def _put_together(items: Reading) -> Table:
    return {k: _put_together(v) if type(v) is tuple else v for k, v in items}


# -- objects


def own_dict(thing: object) -> dict[str, Any] | None:
    """An object's own attributes; None if it has no dictionary for them."""
    try:
        found = vars(thing) if issubclass(type(thing), threading.local) else object.__getattribute__(thing, "__dict__")
    except (AttributeError, TypeError):
        return None
    return found if isinstance(found, dict) else None


_TABLES = (dict, OrderedDict, defaultdict)


def is_table(thing: object) -> bool:
    """Whether this is a dictionary, and nothing but what it holds."""
    return type(thing) in _TABLES


def table_of(thing: Any) -> Table | None:
    """The dictionary in which an object has its attributes, or which it is."""
    return thing if is_table(thing) else own_dict(thing)


def attributes(path: str, thing: Any, names: Sequence[str] | None = None, *, watched: bool = False) -> Holder:
    """The attributes that an object has in its dictionary, which may be replaced as a whole. With `names` a recording relies on
    the values of these only, and on which others there are."""
    find: Callable[[], Any] = partial(object.__getattribute__, thing, "__dict__")
    if issubclass(type(thing), threading.local):
        find = partial(vars, thing)
    before = find()

    def read() -> Reading:
        d = find()
        return (len(d), *d, *d.values())

    def restore(values: Reading) -> None:
        if find() is not before and not issubclass(type(thing), threading.local):
            object.__setattr__(thing, "__dict__", before)
        before.clear()
        before.update(_pairs(values, 0))

    spot = _keyed(lambda name: _attribute(thing, find, name))
    inside = None if issubclass(type(thing), threading.local) else lambda: (find(),)
    if names is None:
        return Holder(path, read, restore, watched, keyed, owner=thing, spot=spot, inside=inside)
    some = tuple(names)

    def read_some() -> Reading:
        d = find()
        return (*map(d.get, some), *d)

    def some_of(values: Reading) -> Reading:
        d = dict(_pairs(values, 0))
        return (*map(d.get, some), *d)

    def named(path: str, i: int, values: Reading) -> str:
        return f"{path}.{some[i]}" if i < len(some) else path

    def spot_of_some(i: int, _: Reading) -> Spot:
        return _attribute(thing, find, some[i])

    part = Part(read_some, some_of, named, spot_of_some)
    return Holder(path, read, restore, watched, keyed, part=part, owner=thing, spot=spot, inside=inside)


def some(path: str, thing: Any, names: Set[str]) -> Holder:
    """Those attributes of an object that have one of these names, whether or not they are there."""
    find: Callable[[], Any] = partial(object.__getattribute__, thing, "__dict__")

    def read() -> Reading:
        d = find()
        held = [n for n in d if n in names]
        return (len(held), *held, *map(d.__getitem__, held))

    def restore(values: Reading) -> None:
        d, before = find(), dict(_pairs(values, 0))
        for n in [n for n in d if n in names and n not in before]:
            del d[n]
        d.update(before)

    return Holder(path, read, restore, named=keyed, spot=_keyed(lambda name: _attribute(thing, find, name)))


def slots(path: str, thing: object, descriptors: Sequence[tuple[str, Any]]) -> Holder:
    """The attributes that an object has in slots, given as (name, descriptor) pairs."""

    def get(descriptor: Any) -> Any:
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
    path: str, tensors: Sequence[tuple[str, object]], descriptors: Sequence[tuple[str, Any]], names: Sequence[str]
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


# -- other containers


def ordered(path: str, values: Leaves | deque[object]) -> Holder:
    kind: Any = list if issubclass(type(values), list) else deque

    def restore(saved: Reading) -> None:
        kind.clear(values)
        kind.extend(values, saved)

    def move(to: list[object] | deque[object]) -> None:
        nonlocal values
        values = to

    def spot(i: int, _: Reading) -> Spot:
        def get() -> Any:
            return kind.__getitem__(values, i) if i < kind.__len__(values) else MISSING

        return Spot((identity(values), i), get, lambda value: kind.__setitem__(values, i, value))

    return Holder(path, lambda: (*kind.__iter__(values),), restore, contents=Contents(lambda: values, move), spot=spot)


def unordered(path: str, values: set[object]) -> Holder:
    def restore(saved: Reading) -> None:
        set.clear(values)
        set.update(values, saved)

    def move(to: set[object]) -> None:
        nonlocal values
        values = to

    return Holder(path, lambda: (*set.__iter__(values),), restore, contents=Contents(lambda: values, move))


def buffer(path: str, thing: Any) -> Holder:
    """The bytes of an object that lays its memory open in one piece: bytearray, array, ctypes, mmap. (No view of it is kept: it
    would keep a bytearray from growing.)"""

    def restore(saved: Reading) -> None:
        if isinstance(thing, bytearray):
            thing[:] = saved[0]
        elif isinstance(thing, array):
            del thing[:]
            thing.frombytes(saved[0])
        else:
            memoryview(thing).cast("B")[:] = saved[0]

    def read() -> Reading:
        try:
            return (memoryview(thing).tobytes(),)
        except ValueError:  # a view that was released
            return ()

    return Holder(path, read, restore)


def cache(path: str, wrapper: object) -> Holder:
    """What a function wrapped in `functools.lru_cache` keeps: arguments and results, in no order."""
    own = own_dict(wrapper)

    def tables() -> list[dict[object, object]]:
        return [d for d in gc.get_referents(wrapper) if type(d) is dict and d is not own]

    def read() -> Reading:
        found = [x for x in gc.get_referents(wrapper) if type(x) is not dict]
        for table in tables():
            found += table.keys()
            found += table.values()
        return tuple(sorted(found, key=identity))

    return kept(path, read)  # what would fill it is refused before it happens


def frozen_array(path: str, array: Any) -> Holder:
    """One that nobody can write: what it is."""
    return kept(path, lambda: (array.shape, array.dtype.str, array.strides, array.flags.writeable))


def array_of_numpys(path: str, array: Any) -> Holder:
    """An array: what it is, and its bytes; of more than `AT_ONCE` a digest. A recording that relies on it looks at so many
    bytes of such a one each time, and so at all of it in some replays. It is read itself, and no view of it: that would keep
    its shape."""

    def read() -> Reading:
        return (array.shape, array.dtype.str, array.strides, array.tobytes() if array.nbytes <= AT_ONCE else _digest(array))

    before, was = array.copy(), read()
    step = max(1, AT_ONCE // max(1, array.itemsize))
    starts = cycle(range(0, array.size, step))
    intact = True

    def read_some() -> Reading:
        nonlocal intact
        what = array.shape, array.dtype.str, array.strides
        if what != was[:3]:
            return (*what, False)
        start = next(starts)
        some = slice(start, start + step)
        flat = array.reshape(-1) if array.flags.c_contiguous else array.flat
        intact = intact and flat[some].tobytes() == before.reshape(-1)[some].tobytes()
        return (*what, intact)

    def restore(_: Reading) -> None:
        if read() == was:
            return
        if (array.dtype, array.shape) != (before.dtype, before.shape):
            array.dtype = before.dtype
            array.shape = before.shape
        array[...] = before

    part = Part(read_some, lambda values: (*values[:3], values == was), lambda path, i, _: path)
    return Holder(path, read, restore, part=part if array.nbytes > AT_ONCE else None)


def memory(path: str, storage: Any, tensors: Sequence[Any]) -> Holder:
    """The bytes of tensors on the CPU that share this storage; of more than `AT_ONCE` a part each time, and how often the
    tensors were written, which tells of all but what goes around torch."""
    n = storage.nbytes()
    before = ctypes.string_at(storage.data_ptr(), n) if n else b""
    counting = [t for t in tensors if not t.is_inference()]
    parts = cycle(range(0, n, AT_ONCE))
    intact = True

    def read() -> Reading:
        if storage.nbytes() != n:
            return (b"",)
        now = ctypes.string_at(storage.data_ptr(), n) if n else b""
        return (before if now == before else now,)

    def read_some() -> Reading:
        nonlocal intact
        start = next(parts)
        if storage.nbytes() == n:
            some = ctypes.string_at(storage.data_ptr() + start, min(AT_ONCE, n - start))
            intact = intact and before.startswith(some, start)
        return (intact, *[t._version for t in counting])

    def restore(_: Reading) -> None:
        if storage.nbytes() == n:
            ctypes.memmove(storage.data_ptr(), before, n)

    large = Part(read_some, lambda _: (True, *[t._version for t in counting]), _unnumbered)
    return Holder(path, read, restore, named=_unnumbered, part=large if n > AT_ONCE else None)


def _unnumbered(path: str, i: int, values: Reading) -> str:
    return path


def _digest(array: Any) -> bytes:
    whole = array if array.flags.c_contiguous else array.copy()
    return hashlib.blake2b(memoryview(whole).cast("B"), digest_size=16).digest()


# -- variables


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

    return Holder(path, read, restore, named=lambda path, i, _: f"{path}.{names[i]}", spot=spot)


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
        path, read, restore, named=lambda path, i, _: held[i], spot=lambda i, _: item(of, held[i]), inside=lambda: (of,)
    )
