"""Tuples and lists of numbers that stand in one place, and in whose place others are put (`betas`, the rates that a scheduler
tells): each number has a place of its own. To replace a number is to put another tuple there, or another list."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from .holders import Spot
from .identity import identity
from .introspection import MISSING

__all__ = ["Element", "Row", "elements", "put_anew"]

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


def put_anew(rows: Iterable[Row]) -> dict[Row, Row]:
    """Those in whose place a call has put another list, each with the first of them that has the very same."""
    lists = [(row, row.list_put()) for row in dict.fromkeys(rows)]
    first: dict[int, Row] = {}
    return {row: first.setdefault(identity(found), row) for row, found in lists if found is not None}


class Row:
    """One such place. What stood there when it was found, stands there again once its numbers do, and nobody has changed
    anything. In between, rows stand there which nobody may write: who does, is not followed."""

    def __init__(self, spot: Spot, row: Any) -> None:
        self._spot, self._kind, self._length = spot, type(row), len(row)
        self._first, self._numbers = row, (*row,)
        self._made: list[tuple[Any, tuple[object, ...]]] = []  # in the place of it, and what was in them
        self.same_as: Row | None = None
        """Another place, in which replays leave the same list."""

    def get(self, i: int) -> Any:
        row = self._now()
        return MISSING if row is None else row[i]

    def put(self, i: int, number: object) -> None:
        row = self._now()
        if self.same_as is not None:
            self._spot.put(self.same_as._spot.get())
        elif row is not None:
            self._spot.put(self._of((*row[:i], number, *row[i + 1 :])))

    def list_put(self) -> object | None:
        """The list that stands there, where somebody has put it there."""
        now = self._spot.get()
        ours = now is self._first or any(one is now for one, _ in self._made)
        return now if type(now) is list and not ours else None

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
