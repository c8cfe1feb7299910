"""Tuples of numbers that stand in one place (`betas`, an entry of a history): each number has a place of its own. A tuple
cannot be changed, so to replace a number is to put another tuple there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from .holders import Spot
from .introspection import MISSING

__all__ = ["Element", "elements"]

_KNOWN = 8  # tuples that have stood there


class Element(NamedTuple):
    """As the key of a number: that of the tuple, and which number of it."""

    key: object
    i: int


def elements(spot: Spot, row: tuple[object, ...], name: str) -> list[Spot]:
    """The places of the numbers in a tuple that stands at this one."""
    one = _Row(spot, row)
    return [
        Spot((spot.at[0], Element(spot.at[1], i)), partial(one.get, i), partial(one.put, i), name=f"{name}[{i}]")
        for i in range(len(row))
    ]


class _Row:
    """One such place. Where the numbers are those that have stood there, so is the tuple: nobody has changed anything."""

    def __init__(self, spot: Spot, row: tuple[object, ...]) -> None:
        self._spot, self._known = spot, [row]
        self._length = len(row)

    def get(self, i: int) -> Any:
        row = self._now()
        return MISSING if row is None else row[i]

    def put(self, i: int, number: object) -> None:
        row = self._now()
        if row is not None:
            self._spot.put(self._made((*row[:i], number, *row[i + 1 :])))

    def _now(self) -> tuple[Any, ...] | None:
        now = self._spot.get()
        return now if type(now) is tuple and len(now) == self._length else None

    def _made(self, row: tuple[object, ...]) -> tuple[object, ...]:
        found = next((one for one in self._known if _are(one, row)), row)
        self._known = [*(one for one in self._known if one is not found), found][-_KNOWN:]
        return found


def _are(a: Sequence[object], b: Sequence[object]) -> bool:
    return all(x is y for x, y in zip(a, b, strict=True))
