"""Tuples and lists of numbers that stand in one place, and in whose place others are put (`betas`, the rates that a scheduler
tells): each number has a place of its own. To replace a number is to put another tuple there, or another list."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from .holders import Spot
from .identity import identity
from .introspection import MISSING

__all__ = ["Anew", "Element", "Handed", "Row", "elements", "leave", "put_anew"]

_KINDS = (tuple, list)


class Element(NamedTuple):
    """As the key of a number: that of the row, and which number of it."""

    key: object
    i: int


def elements(spot: Spot, row: Sequence[object], name: str) -> list[Spot]:
    """The places of the numbers in a row that stands at this one."""
    one = Row(spot, row)
    return [
        Spot((spot.at[0], Element(spot.at[1], i)), partial(one.get, i), partial(one.put, i), name=f"{name}[{i}]", row=one)
        for i in range(len(row))
    ]


class Handed(NamedTuple):
    """A row that is left the list of another: that which stood there `before` the call, or what the call leaves there."""

    row: Row
    of: Row
    before: bool


class Anew(NamedTuple):
    """Rows in whose place a call has put another list; those of them that are the list of another row; and all whose numbers
    are in one of these lists, which somebody else has, too."""

    rows: set[Row]
    handed: list[Handed]
    elsewhere: Callable[[Iterable[object]], set[Row]]


def put_anew(rows: Iterable[Row]) -> Anew:
    """What a call has done that is over, and has numbers that stand for others."""
    every = [*dict.fromkeys(rows)]
    before = [(one, row) for row in every for one in row.before()]
    stood = {identity(one): row for one, row in before}
    same: dict[int, list[Row]] = {}
    for row in filter(Row.is_another_list, every):
        same.setdefault(identity(row.stands()), []).append(row)
    handed = [Handed(row, stood.get(key, one[0]), key in stood) for key, one in same.items() for row in one]
    kept = {row for key, one in same.items() if key not in stood and _references(one[0].stands) > len(one) for row in one}

    def elsewhere(found: Iterable[object]) -> set[Row]:
        keys = {identity(one) for one in found}
        return kept | {row for one, row in before if identity(one) in keys}

    return Anew({one.row for one in handed}, [one for one in handed if one.row is not one.of], elsewhere)


def _references(get: Callable[[], object]) -> int:
    """How many there are to what this gives, but for those that this makes."""
    return sys.getrefcount(get()) - _OURS


_OURS = sys.getrefcount(list())  # noqa: C408 (of what a call gives)


def leave(handed: Iterable[Handed], numbers: Callable[[], None]) -> None:
    """Leave all `numbers`, and each of these the list that it is handed."""
    lists = [(row, of, of.stands() if before else None) for row, of, before in handed]
    numbers()
    for row, of, one in lists:
        row.stand(of.stands() if one is None else one)


class Row:
    """One such place. What stood there when it was found, stands there again once its numbers do, and nobody has changed
    anything. In between, rows stand there which nobody may write: who does, is not followed."""

    def __init__(self, spot: Spot, row: Any) -> None:
        self._spot, self._kind, self._length = spot, type(row), len(row)
        self._first, self._numbers = row, (*row,)
        self._made: list[tuple[Any, tuple[object, ...]]] = []  # in the place of it, and what was in them

    def get(self, i: int) -> Any:
        row = self._now()
        return MISSING if row is None else row[i]

    def put(self, i: int, number: object) -> None:
        row = self._now()
        if row is not None:
            self._spot.put(self._of((*row[:i], number, *row[i + 1 :])))

    def is_another_list(self) -> bool:
        """Whether somebody has put a list there."""
        now = self._spot.get()
        return type(now) is list and not any(one is now for one in self.before())

    def before(self) -> list[Any]:
        """What stood there before the call, and has numbers that stand for others."""
        return [one for one, _ in self._made]

    def stands(self) -> Any:
        return self._spot.get()

    def stand(self, row: Any) -> None:
        self._spot.put(row)

    def _now(self) -> tuple[Any, ...] | None:
        now = self._spot.get()
        if type(now) is not self._kind or len(now) != self._length:
            return None
        found = next((numbers for one, numbers in self._made if one is now), None)
        return (*now,) if found is None or _are(found, now) else None

    def _of(self, numbers: tuple[object, ...]) -> object:
        """A row of these. Where they stood there in this capture, it is that one."""
        if self._made and _are(numbers, self._numbers):
            self._made = []
            return self._first
        row = next((one for one, before in self._made if _are(numbers, before)), None)
        if row is None:
            row = self._kind(numbers)
            if any(hasattr(number, "formula") for number in numbers):
                self._made.append((row, numbers))
        return row


def _are(a: Sequence[object], b: Sequence[object]) -> bool:
    return all(x is y for x, y in zip(a, b, strict=True))
