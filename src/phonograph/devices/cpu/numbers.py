"""Numbers of a tape that are others in each replay: its calls read them where they stand, together, when they are run.

A number among the arguments of a call is a constant. So a call with followed ones becomes another, ``f(a, v[3], out=o)``, which
has the list of all numbers: to set them is one line, however many calls there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import lru_cache, partial
from itertools import groupby
from typing import Any

from ..._torch.dynamic import Thing
from ...python.origin import written_out

__all__ = ["FollowedNumbers", "numbers_of"]


class FollowedNumbers:
    """Those of one program: the places of probes in its calls."""

    def __init__(self, calls: Sequence[list[Any]], probes: Set[float]) -> None:
        """Of these lists of calls, the ones in which there are probes become such as read the numbers."""
        self._places: dict[float, int] = {}
        self._now: list[float] = []
        self._probes = probes
        for some in calls:
            for i, call in enumerate(some):
                if not probes.isdisjoint(numbers_of(call)):
                    some[i] = self._reading(call)

    @property
    def found(self) -> Set[float]:
        """Which of the probes there are."""
        return self._places.keys()

    def set(self, numbers: Mapping[float, float]) -> None:
        """Of the probes, these are the numbers from now on."""
        self._now[:] = [numbers[probe] for probe in self._places]

    def _reading(self, call: partial[Any]) -> partial[object]:
        constants: list[Thing] = []
        given = [self._said(x, constants) for x in call.args]
        given += [f"{name}={self._said(x, constants)}" for name, x in call.keywords.items()]
        return partial(_reader(", ".join(given), len(constants)), self._now, call.func, *constants)

    def _said(self, value: Thing, constants: list[Thing]) -> str:
        """An argument as an expression: a number that is followed as its place, all else as one of the constants."""
        if self._is_probe(value):
            return f"v[{self._places.setdefault(value, len(self._places))}]"
        if isinstance(value, (list, tuple, dict)) and not self._probes.isdisjoint(_numbers(value)):
            if isinstance(value, dict):
                return f"{{{', '.join(f'{key!r}: {self._said(x, constants)}' for key, x in value.items())}}}"
            # (Of many parameters at once there is the same number for each.)
            alike = [[*some] for _, some in groupby(value, lambda x: x if self._is_probe(x) else object())]
            items = [f"*({self._said(some[0], constants)},) * {len(some)}" for some in alike]
            return f"[{', '.join(items)}]" if isinstance(value, list) else f"({', '.join(items)},)"
        constants.append(value)
        return f"c{len(constants) - 1}"

    def _is_probe(self, value: object) -> bool:
        return type(value) is float and value in self._probes


@lru_cache(maxsize=1024)
def _reader(given: str, constants: int) -> Callable[..., object]:
    """A function of the numbers, of the function to be called, and of the constants among its arguments."""
    named = "".join(f", c{i}" for i in range(constants))
    reader: Callable[..., object] = written_out(f"lambda v, f{named}: f({given})", {})
    return reader


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
