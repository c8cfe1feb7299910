"""Numbers of a tape that are others in each replay: its calls read them where they stand, together, when they are run.

Each followed number is one object, a float that is made here and that nobody else gets: operators in C++ take its value. So to
set a number is to write the value in that object, for however many calls have it. (To make a call anew costs more than its
operator, and a function around it would be one more place for an interrupt.)
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any

from ..._torch.dynamic import Thing

__all__ = ["FollowedNumbers", "numbers_of"]

_VALUE = float.__basicsize__ - ctypes.sizeof(ctypes.c_double)  # where in a float its value lies: last


class FollowedNumbers:
    """Those of one program, by the probes in its calls."""

    def __init__(self, calls: Sequence[list[Any]], probes: Set[float]) -> None:
        """Of these lists of calls, the ones in which there are probes are made anew, with such objects in their place."""
        self._probes = probes if _can_be_written() else frozenset[float]()
        self._objects: dict[float, float] = {}
        for some in calls:
            for i, call in enumerate(some):
                if not self._probes.isdisjoint(numbers_of(call)):
                    some[i] = partial(call.func, *self._followed(call.args), **self._followed(call.keywords))
        self._values = {probe: _value_of(number) for probe, number in self._objects.items()}

    @property
    def found(self) -> Set[float]:
        """Which of the probes there are."""
        return self._objects.keys()

    def set(self, numbers: Mapping[float, float]) -> None:
        """Of the probes, these are the numbers from now on."""
        for probe, value in self._values.items():
            value.value = numbers[probe]

    def _followed(self, value: Thing) -> Thing:
        if type(value) is float and value in self._probes:
            return self._objects.setdefault(value, _new(value))
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._followed, value))
        if isinstance(value, dict):
            return {k: self._followed(v) for k, v in value.items()}
        return value


def _new(value: float) -> float:
    """An object of its own."""
    made: float = struct.unpack("d", struct.pack("d", value))[0]
    return made


def _value_of(number: float) -> ctypes.c_double:
    return ctypes.c_double.from_address(id(number) + _VALUE)


def _can_be_written() -> bool:
    """Whether the value of a float lies where this takes it to lie."""
    if sys.implementation.name != "cpython":
        return False
    number = _new(0.40625)
    if _value_of(number).value != number:
        return False
    _value_of(number).value = 0.71875
    return number == 0.71875


def numbers_of(call: partial[object]) -> Iterator[float]:
    return _numbers((call.args, call.keywords))


def _numbers(value: object) -> Iterator[float]:
    if type(value) is float:
        yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _numbers(v)
    elif isinstance(value, dict):
        yield from _numbers(list(value.values()))
