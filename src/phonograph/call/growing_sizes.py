"""Sizes that grow from call to call: a sequence that is handed in whole, one token longer each time.

Such calls have a signature each, and none comes again soon. Three in a row show it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..errors import Refusal
from ..python.origin import users_line
from ..values.pytree_paths import path_to
from ..values.wording import Naming
from .signature import Call, Key

__all__ = ["Growth"]

_ROW, _ROW_BY_MORE = 3, 5  # calls: of which each has one more, or some other number more (as a few sizes may, met in order)
_SIZES = 4  # that are recommended

Steps = dict[tuple[int, int], int]
"""By how much the dimensions of leaves have grown."""


class _Before(NamedTuple):
    """A call: its key, and the shapes of its tensors by their places among the leaves."""

    key: Key
    number: int
    shapes: dict[int, torch.Size]


class Growth:
    """Of the new signatures of one function."""

    def __init__(self) -> None:
        self._last: _Before | None = None
        self._steps: Steps = {}
        self._row = 1
        self._refusal: Refusal | None = None

    def of(self, call: Call, number: int, naming: Naming) -> Refusal | None:
        """Why a call with a new signature had better run live: it is the third in a row, or a later one, of which each has
        grown by the same as the one before. `number`: of the function's calls."""
        shapes = {i: t.shape for i, t in zip(call.places, call.tensors, strict=True)}
        last, self._last = self._last, _Before(call.key, number, shapes)
        steps = _steps(last, self._last) if last is not None else {}
        if last is not None and number != last.number + 1:  # calls between them were not looked at, or were not new
            let_pass = number - last.number
            steps = self._steps if self._refusal and steps == {at: let_pass * n for at, n in self._steps.items()} else {}
        if not steps:
            self._row, self._steps, self._refusal = 1, {}, None
            return None
        self._row = self._row + 1 if steps == self._steps else 2
        self._steps = steps
        if self._row < (_ROW if set(steps.values()) == {1} else _ROW_BY_MORE):
            self._refusal = None
        elif self._refusal is None:
            self._refusal = _refusal(call, steps, self._last.shapes, naming)
        return self._refusal


def _steps(last: _Before, now: _Before) -> Steps:
    """By how much the tensors of a call have grown since another; nothing where something else differs as well."""
    (shape, leaves, aliases, modes), (shape_now, leaves_now, aliases_now, modes_now) = last.key, now.key
    if (shape, aliases, modes) != (shape_now, aliases_now, modes_now) or last.shapes.keys() != now.shapes.keys():
        return {}
    steps: Steps = {}
    for i, (was, is_now) in enumerate(zip(leaves, leaves_now, strict=True)):
        if i not in now.shapes:
            if was != is_now:
                return {}
            continue
        if len(last.shapes[i]) != len(now.shapes[i]):
            return {}
        grown = {(i, d): b - a for d, (a, b) in enumerate(zip(last.shapes[i], now.shapes[i], strict=True)) if a != b}
        if any(step <= 0 for step in grown.values()):
            return {}
        steps |= grown
    return steps


def _refusal(call: Call, steps: Steps, shapes: dict[int, torch.Size], naming: Naming) -> Refusal:
    names = {i: naming(path_to(call.shape, i)) for i, _ in steps}
    found = [f"dimension {d} of `{names[i]}` by {step}" for (i, d), step in steps.items()]
    reason = f"is called with a size that grows each time: {', '.join(found)}"
    if not all(name.isidentifier() for name in names.values()):
        return Refusal(reason, "pad to a few sizes before the call", users_line())
    dims: dict[str, dict[int, list[int]]] = {}
    for i, d in steps:
        first = 1 << max(3, shapes[i][d].bit_length())
        dims.setdefault(names[i], {})[d] = [first << n for n in range(_SIZES)]
    remedy = f"pad to a few sizes before the call, or by shapes={_line(dims)} where no gradients are taken and what is padded "
    return Refusal(reason, f"{remedy}changes no other result", users_line())


def _line(dims: dict[str, dict[int, list[int]]]) -> str:
    """As Python code, which one may paste."""
    inner = [f'"{name}": {{{", ".join(f"{d}: {sizes}" for d, sizes in of.items())}}}' for name, of in dims.items()]
    return f"{{{', '.join(inner)}}}"
