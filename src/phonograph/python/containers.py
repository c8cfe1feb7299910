"""Dictionaries, lists, sets and caches as places.

A subclass of `dict` is read as the dictionary that it is, whatever methods it has.
"""

from __future__ import annotations

import gc
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from itertools import chain, islice, repeat
from operator import methodcaller

from .._torch.dynamic import Leaves, Reading, Table, Thing
from .holders import Contents, Find, Holder, Part, Spot, kept, key_label
from .identity import identity
from .introspection import MISSING, own_dict

__all__ = ["by_key", "cache", "dictionaries", "dictionary", "dictionary_without", "item", "items", "keyed", "nested", "ordered",
           "pairs", "unordered", "with_inner", "without"]  # fmt: skip


# -- dictionaries. Read as (how many items, the keys, the values).


def pairs(values: Reading, at: int) -> Iterator[tuple[Thing, Thing]]:
    """The items of the dictionary that was read into `values`, from `at` on."""
    n = values[at] if values else 0
    return zip(values[at + 1 : at + 1 + n], values[at + 1 + n : at + 1 + 2 * n], strict=True)


def item(d: Table, key: object) -> Spot:
    """An item of a dictionary."""
    return Spot((identity(d), key), lambda: dict.get(d, key, MISSING), lambda value: dict.__setitem__(d, key, value))


def by_key(spot: Callable[[Thing], Spot]) -> Find:
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
    kind: Thing = OrderedDict if issubclass(type(d), OrderedDict) else dict
    if type(d) is kind:

        def read() -> Reading:
            return (len(d), *d, *d.values())
    else:  # a subclass: as it is in memory, whatever its methods say

        def read() -> Reading:
            return (dict.__len__(d), *kind.keys(d), *kind.values(d))

    def restore(values: Reading) -> None:
        kind.clear(d)
        for key, value in pairs(values, 0):
            kind.__setitem__(d, key, value)

    def move(to: dict[object, object]) -> None:
        nonlocal d
        d = to

    return Holder(path, read, restore, watched, keyed, contents=Contents(lambda: d, move), tables=lambda: [d],
                  spot=by_key(lambda k: item(d, k)), inside=lambda: (d,))  # fmt: skip


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


def items(path: str, d: Table, keys: Iterable[object]) -> Holder:
    """What a dictionary has under these keys, if anything."""
    held = tuple(keys)

    def move(to: dict[object, object]) -> None:
        nonlocal d
        d = to

    def named(path: str, i: int, _: Reading) -> str:
        return f"{path}.{held[i]}" if isinstance(held[i], str) else f"{path}[{key_label(held[i])}]"

    return kept(path, lambda: tuple([dict.get(d, key, MISSING) for key in held]))._replace(
        named=named, contents=Contents(lambda: d, move), tables=lambda: [d], spot=lambda i, _: item(d, held[i]),
        inside=lambda: (d,),
    )  # fmt: skip


_values: Callable[[Table], Iterable[object]] = methodcaller("values")


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
        d.update(pairs(values, 0))
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
                dict.update(one, pairs(flat, 0))
            flat = flat[1 + 2 * flat[0] if isinstance(one, dict) else 1 :]
        dict.clear(outer)
        dict.update(outer, zip(keys, inner, strict=True))
        d[name] = outer

    def named(path: str, i: int, values: Reading) -> str:
        return path

    def tables() -> list[dict[object, object]]:
        return [one for one in dict.values(d[name]) if isinstance(one, dict)]

    def spot(i: int, flat: Reading) -> Spot:
        """Of what the inner ones hold, and of what there is instead of one."""
        for key, one in dict.items(d[name]):
            n = len(one) if isinstance(one, dict) else 0
            if isinstance(one, dict) and n < i <= 2 * n:
                return _told_of(item(one, flat[i - n]), behind)
            if i == 0 and not isinstance(one, dict):
                return _told_of(item(d[name], key), behind)
            i, flat = (i - 1 - 2 * n, flat[1 + 2 * n :]) if isinstance(one, dict) else (i - 1, flat[1:])
        raise IndexError(i)

    def spot_of_all(i: int, values: Reading) -> Spot:
        n = values[1]
        if 2 <= i < 2 + n:
            return _told_of(item(d[name], values[i + n]), behind)
        return spot(i - 2 - 2 * n, values[2 + 2 * n :])

    def spot_of_some(i: int, values: Reading) -> Spot:
        n = len(d[name])
        return spot(i - n, values[n:])

    part = Part(held, held_of, named, spot_of_some)
    return Holder(path, read, restore, named=named, part=part, tables=tables, behind=behind, spot=spot_of_all)


def _told_of(spot: Spot, behind: Thing) -> Spot:
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


def ordered(path: str, values: Leaves | deque[object]) -> Holder:
    kind: Thing = list if issubclass(type(values), list) else deque

    def restore(saved: Reading) -> None:
        kind.clear(values)
        kind.extend(values, saved)

    def move(to: list[object] | deque[object]) -> None:
        nonlocal values
        values = to

    def spot(i: int, _: Reading) -> Spot:
        def get() -> object:
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
