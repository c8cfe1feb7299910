"""What makes one number of several, in C: `sum(losses)`, `max(norms)`, `numpy.mean(losses)`.

Where some of them are numbers that a call reads of tensors and nobody knows in a capture, the function itself becomes an
operation of a formula, on all of them at once. No sum of additions would do: of floats `sum` may make another number (since
Python 3.12), and NumPy adds in an order of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import wraps
from itertools import chain
from types import GeneratorType
from typing import Any

from .._torch.dynamic import Thing
from ..values.host_scalars import Numeral, may_meet

__all__ = ["BUILT_IN", "of_numpy", "reducing"]

BUILT_IN = {f.__name__: f for f in (sum, max, min)}
_OF_NUMPY = ("mean", "sum", "std", "var", "median", "max", "min", "amax", "amin", "average", "nanmean")
_SELECTS = ("max", "min", "amax", "amin")  # whose result is one of the numbers, of the kind that this has


def of_numpy() -> Iterator[Callable[..., Any]]:
    """Those of NumPy's, if it is there."""
    numpy = sys.modules.get("numpy")
    yield from () if numpy is None else [getattr(numpy, name) for name in _OF_NUMPY]


def reducing(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which gives a numeral where there are numerals among what it is given."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if args and type(args[0]) is GeneratorType:
            args = (_gathered(args[0]), *args[1:])
        many = len(args) == 1 or function is sum
        numbers: Thing = args[0] if args and many else args if function in (max, min) else ()
        numerals = [x for x in numbers if type(x) is Numeral] if type(numbers) in (list, tuple) else []
        rest = args[1:] if many else ()
        if not numerals or kwargs or not all(map(may_meet, (*numbers, *rest))):
            return function(*args, **kwargs)
        if function.__name__ in _SELECTS and len({x.__class__ for x in numbers}) > 1:
            return function(*args)
        return numerals[0].worked(_of_first(function, len(numbers)), *numbers, *rest)

    return called


def _gathered(given: Iterator[object]) -> object:
    """What a generator gives, at once if that are numerals: else each as late as it is asked for."""
    first = [*zip(range(1), given, strict=False)]
    found = chain([x for _, x in first], given)
    return [*found] if first and type(first[0][1]) is Numeral else found


def _of_first(function: Callable[..., Any], n: int) -> Callable[..., Any]:
    """The function of a list of the first n of its arguments, and of the others. (It may hold none of them.)"""
    return lambda *found: function([*found[:n]], *found[n:])
