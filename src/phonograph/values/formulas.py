"""What is worked out of numbers that are known later only: with the very operations that a capture has seen, and many at once.

A formula is a tree of `Worked` operations over `Given` numbers. It can be called with the numbers. What a replay needs of all
its formulas is written out as one function, in which each operation stands once however many formulas share it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .._torch.dynamic import Reading
from ..python.identity import identity
from ..python.origin import written_out
from .numbers import base_of

__all__ = ["Formula", "Given", "Values", "Worked", "said", "written"]

Values = tuple[float, ...]


class Given:
    """One of the numbers, by its place; whoever asks for it is noted."""

    __slots__ = ("place", "touched")

    def __init__(self, place: int, touched: set[int]) -> None:
        self.place, self.touched = place, touched

    def __call__(self, values: Values) -> Any:
        self.touched.add(self.place)
        return values[self.place]


class Worked:
    """A function of other formulas, and of plain numbers."""

    __slots__ = ("function", "of")

    def __init__(self, function: Callable[..., object], *of: object) -> None:
        self.function, self.of = function, of

    def __call__(self, values: Values) -> Any:
        return self.function(*[x(values) if isinstance(x, (Given, Worked)) else x for x in self.of])


Formula = Given | Worked

_SIGNS: dict[object, str] = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/", operator.pow: "**", operator.lt: "<",
    operator.le: "<=", operator.gt: ">", operator.ge: ">=", operator.eq: "==", operator.ne: "!=",
}  # fmt: skip


def written(formulas: Iterable[Formula]) -> Callable[[Values], Reading]:
    """One function that gives what all of these are. It raises what any of them does."""
    writing, formulas = _Writing(), [*formulas]  # which are known by their identities: all have to be there
    results = [writing.name(formula) for formula in formulas]
    steps = "".join(f"{step}, " for step in writing.steps)
    found: Callable[[Values], Reading] = written_out(
        f"lambda v: ({steps}({''.join(f'{name}, ' for name in results)}),)[-1]", writing.constants
    )
    return found


def said(formulas: Iterable[Formula]) -> str:
    """What all of these do, in words that are the same for others which do the same."""
    writing = _Writing()
    results = [writing.name(formula) for formula in formulas]
    plain = {name: x for name, x in writing.constants.items() if base_of(type(x)) is not None or type(x) is bool}
    return f"{writing.steps} {results} {plain}"


class _Writing:
    """The steps of such a function, one an operation."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.constants: dict[str, object] = {}
        self._names: dict[int, str] = {}

    def name(self, x: object) -> str:
        if not isinstance(x, (Given, Worked)):
            return self._constant(x)
        todo = [x]
        while todo:  # they may be nested as deeply as a call has steps
            now = todo[-1]
            inner = [y for y in now.of if isinstance(y, (Given, Worked))] if isinstance(now, Worked) else []
            if missing := [y for y in inner if identity(y) not in self._names]:
                todo += missing
                continue
            todo.pop()
            if identity(now) not in self._names:
                self.steps.append(f"(t{len(self.steps)} := {self._said(now)})")
                self._names[identity(now)] = f"t{len(self.steps) - 1}"
        return self._names[identity(x)]

    def _said(self, x: Formula) -> str:
        if isinstance(x, Given):
            return f"v[{x.place}]"
        of: Sequence[str] = [self._names[identity(y)] if isinstance(y, (Given, Worked)) else self._constant(y) for y in x.of]
        sign = _SIGNS.get(x.function) if len(of) == 2 else None
        return f"{of[0]} {sign} {of[1]}" if sign else f"{self._constant(x.function)}({', '.join(of)})"

    def _constant(self, x: object) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = x
        return name
