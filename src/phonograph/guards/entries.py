"""Places on which a recording relies, each with how to read it and what was found there."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from operator import is_
from typing import Any, TypeAlias

from .._torch.dynamic import Leaves, Reading, Table, Thing
from .._torch.native import Fact
from ..python.dict_versions import Versions, at_one_glance, tell
from ..python.holders import Holder
from ..python.identity import identity, reading_list
from ..python.introspection import dictionary_of
from ..python.origin import written_out
from ..values.numbers import base_of
from .hyperparameters import Dials
from .sameness import equal, may_stand_for
from .snapshot import name_of

__all__ = [
    "Entries",
    "Entry",
    "by_dictionary",
    "entry_of",
    "facts_of",
    "in_parts",
    "in_pieces",
    "read_together",
    "reader_of",
    "relied",
    "which",
]

_LONG = 32  # items of a list that is not read item by item
_DICTIONARIES = 16  # places in dictionaries that tell of changes, in one part


Entry: TypeAlias = list[Any]
"""A place, how to read it, and what was found there: ``[holder, read, saved]``."""


class Entries:
    """Places that are relied on."""

    def __init__(self, held: list[Entry], shared: Set[int]) -> None:
        """`shared` are the identities of what was found in several places."""
        self._held = held
        # The containers whose contents are compared, by identity; None where another must not be put in the place of one.
        found = [(entry[0].contents.now(), entry) for entry in held if entry[0].contents is not None]
        self._moved_places = False
        self._contents = {identity(x): None if identity(x) in shared else entry for x, entry in found}

    def unchanged(self, entry: Entry) -> bool:
        """Whether what was found there is there still, or what may stand for it: with that it is compared from now on."""
        _, read, saved = entry
        now = read()
        if len(now) == len(saved) and (
            all(map(is_, now, saved)) or all(map(equal, saved, now)) or self._moved_to(saved, now)
        ):  # fmt: skip
            entry[2] = now
            return True
        return False

    def _moved_to(self, saved: tuple[object, ...], now: tuple[object, ...]) -> bool:
        """Whether all that differs are containers in the place of equal ones. If so, it is the contents of these that are
        compared from now on."""
        new: list[tuple[object, object]] = []
        try:
            if not all(may_stand_for(a, b, new) for a, b in zip(saved, now, strict=True)):
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


def which(entry: Entry) -> str:
    """The name of what differs in a place."""
    holder, read, saved = entry
    return name_of(holder, saved, read())


def relied(holder: Holder) -> Holder:
    """That part of a place on which a recording relies."""
    part = holder.part
    return holder if part is None else holder._replace(read=part.read, named=part.named, spot=part.spot)


def entry_of(holder: Holder, values: tuple[object, ...], dials: Dials) -> Entry:
    """What is relied on of a place, but for those of its values that are followed."""
    part = relied(holder)
    saved = values if holder.part is None else holder.part.of(values)
    left_out = [i for i, value in enumerate(saved) if type(value) is float and identity(value) in dials.marks]
    if dials.whole and (spot := part.spot) is not None:
        left_out += [i for i, value in enumerate(saved) if _is_placed(value) and _lies_at(spot, i, saved, dials.whole)]
    if dials.rows and (spot := part.spot) is not None:
        left_out += [
            i for i, value in enumerate(saved) if type(value) in (tuple, list) and _lies_at(spot, i, saved, dials.rows)
        ]
    if not left_out:
        return [part, part.read, saved]
    whole = part.read

    def read() -> Reading:
        now = [*whole()]
        if len(now) == len(saved):
            for i in left_out:
                now[i] = None
        return tuple(now)

    return [part, read, tuple([None if i in left_out else value for i, value in enumerate(saved)])]


def _is_placed(value: object) -> bool:
    """Whether it is a number that is known by its place. (A float is known by itself.)"""
    return type(value) is not float and base_of(type(value)) is not None


def _lies_at(spot: Thing, i: int, values: tuple[object, ...], places: Set[object]) -> bool:
    """Whether the i-th of these values is one of those that lie there. (How many there are of something lies nowhere.)"""
    try:
        return spot(i, values).at in places
    except (IndexError, TypeError):
        return False


def read_together(reads: Sequence[Callable[[], Reading] | Entry | set[object]]) -> Callable[[], list[Reading]]:
    """A function that reads several places into one list, each after a mark of its own: ``lambda: [m0, *r0(), m1, ...]``. One
    comparison then does for all. What is itself a list, or a set, is read without a call: ``*r0``."""
    names = {f"r{i}": read for i, read in enumerate(reads)} | {f"m{i}": object() for i in range(len(reads))}
    parts = ", ".join(f"m{i}, *r{i}" + "()" * (type(read) not in _PLAINLY) for i, read in enumerate(reads))
    together: Callable[[], list[Reading]] = written_out(f"lambda: [{parts}]", names)
    return together


_PLAINLY = (list, set)  # a subclass may have an `__iter__` of its own


def reader_of(entry: Entry) -> Thing:
    """What reads a place before each replay: a function, or a list or a set that is read itself."""
    values = None if entry[0].contents is None else entry[0].contents.now()
    if type(values) is list and len(values) >= _LONG:
        return reading_list(values)
    return values if type(values) in _PLAINLY and entry[1] is entry[0].read else entry[1]


def facts_of(entry: Entry) -> list[Fact]:
    """Facts which say that a place is what it was."""
    holder, read, _ = entry
    values = None if holder.contents is None else holder.contents.now()
    if read is not holder.read or (type(values) is not list and holder.facts is None):
        return [("read", read)]
    return [("items", values)] if type(values) is list else [*holder.facts()]


def in_pieces(things: Leaves, size: int) -> list[Entry]:
    return [things[i : i + size] for i in range(0, len(things), size)]


def in_parts(entries: list[Entry]) -> list[tuple[list[list[Entry]], Versions]]:
    """Such places in parts, of which one at a time is asked: all together, where that takes one glance."""
    parts = [entries] if at_one_glance else in_pieces(entries, _DICTIONARIES)
    return [(told, by) for told, by in map(by_dictionary, parts) if told]


def by_dictionary(entries: list[Entry]) -> tuple[list[list[Entry]], Versions]:
    """The places that lie in dictionaries which tell when they have been changed: those of each dictionary, in the order of the
    versions."""
    fixed: dict[int, tuple[Table, list[Entry]]] = {}
    own: dict[int, tuple[Callable[[], Table], list[Entry]]] = {}
    for entry in entries:
        inside, thing = entry[0].inside, entry[0].owner
        found = None if inside is None else inside()
        if found is None or not tell(found):
            continue
        if thing is not None:
            own.setdefault(identity(thing), (dictionary_of(thing), []))[1].append(entry)
            continue
        for d in found:
            fixed.setdefault(identity(d), (d, []))[1].append(entry)
    told = [entries for _, entries in (*fixed.values(), *own.values())]
    return told, Versions([d for d, _ in fixed.values()], [find for find, _ in own.values()])
