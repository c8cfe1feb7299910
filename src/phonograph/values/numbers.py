"""Kinds of numbers that are followed where they change from call to call: Python's, and NumPy's scalars.

NumPy's compute in ways of their own: a `float32` rounds after each operation, an `int64` overflows, a division by zero gives
infinity. So what is worked out of one is worked out by NumPy itself, of the same kind.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["FOLLOWED", "as_bytes", "base_of", "is_exact", "is_small_array", "is_truth"]

_REAL = frozenset({"float16", "float32", "float64"})
_WHOLE = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
_SMALL = 4096  # bytes of an array
_EXACT = frozenset({"add", "subtract", "multiply", "divide", "less", "less_equal", "greater", "greater_equal", "equal",
                    "not_equal", "bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift"})  # fmt: skip


class _Kinds(dict[object, type]):
    """Each kind with Python's that it is like, `float` or `int`. NumPy's are met one by one: it may be imported late."""

    def __missing__(self, kind: object) -> type:
        if not isinstance(kind, type) or kind.__module__ != "numpy":
            raise KeyError(kind)
        if kind.__name__ not in _REAL and kind.__name__ not in _WHOLE:
            raise KeyError(kind)
        self[kind] = float if kind.__name__ in _REAL else int
        return self[kind]


FOLLOWED: Mapping[object, type] = _Kinds({float: float, int: int})


def base_of(kind: object) -> type | None:
    """Python's kind of numbers that this is like; None if it is no kind that is followed."""
    try:
        return FOLLOWED[kind]
    except KeyError:
        return None


def is_truth(value: object) -> bool:
    """Whether this is a truth value, Python's or NumPy's."""
    kind = type(value)
    return kind is bool or (kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_"))


def is_exact(function: object, args: Sequence[object]) -> bool:
    """Whether a universal function of NumPy's does with these what their operator does (``a * b``), to the bit; or whether they
    cannot have come there by an operator, which belongs to the first one."""
    return getattr(function, "__name__", "") in _EXACT or not args or type(args[0]).__module__ != "numpy"


def is_small_array(x: Any) -> bool:
    """Whether this is an array of a few numbers."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(x) is numpy.ndarray and x.dtype.kind in "fiub" and bool(x.nbytes <= _SMALL)


def as_bytes(x: Any) -> object:
    """What identifies the values of an array."""
    return x.shape, x.dtype.str, x.tobytes()
