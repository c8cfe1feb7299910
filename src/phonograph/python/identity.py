"""Which object is this, and is it still the same? As `id` and attributes say it, but without telling anybody.

Python tells its audit hooks (`sys.addaudithook`) of each `id`, and of each look at the code or the defaults of a function.
filelock sets such a hook, and torch's compiler and transformers import that: then each of these costs 0.4 us instead of 0.04.
What is done thousands of times in a capture, or in each replay, has to go another way.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from types import FunctionType

from .._torch.dynamic import Reading
from .origin import written_out

__all__ = ["identity", "reading_list", "reading_parts"]

identity: Callable[[object], int] = object.__hash__
"""A number that no other object has while this one is alive. (It is made of the object's address, as that of `id` is.)"""

_PARTS = ("__code__", "__defaults__", "__kwdefaults__")


def _parts_of(function: object) -> list[object]:
    return [getattr(function, part) for part in _PARTS]


def _probed() -> tuple[int, int] | None:
    """Where in a function object, and in how many bytes, there are references to its parts (and, in older releases, to its
    globals among them); None where they are not found."""
    if sys.implementation.name != "cpython":
        return None

    def probe(a: object, *, b: object) -> None: ...

    size = ctypes.sizeof(ctypes.c_void_p)
    words = (ctypes.c_void_p * (FunctionType.__basicsize__ // size)).from_address(id(probe))
    for made in range(2):  # they change with the parts
        probe.__defaults__, probe.__kwdefaults__ = (made,), {"b": made}
        found = [[i for i, word in enumerate(words) if word == id(part)] for part in _parts_of(probe)]
        if any(len(places) != 1 for places in found):
            return None
    places = [place for (place,) in found]
    return min(places) * size, (max(places) + 1 - min(places)) * size


_LYING = _probed()


def reading_parts(functions: Sequence[FunctionType]) -> Callable[[], tuple[object, ...]]:
    """A function that reads of each of these what makes it another one if it is assigned, and how many attributes it has. It is
    called in each replay, and so it is written out."""
    names: dict[str, object] = {f"f{i}": f for i, f in enumerate(functions)}
    parts = "".join(f"{f}.{part}, " for f in names for part in _PARTS)
    attributes = "".join(f"len({f}.__dict__), " for f in names)
    if _LYING is not None:
        at, nbytes = _LYING
        # As long as these are referred to, nothing else can lie where they do.
        known: list[object] = [part for f in functions for part in _parts_of(f)]
        memory = [(ctypes.c_char * nbytes).from_address(id(f) + at) for f in functions]
        names |= {"known": known} | {f"m{i}": m for i, m in enumerate(memory)} | {f"b{i}": m.raw for i, m in enumerate(memory)}
        same = " and ".join(f"m{i}.raw == b{i}" for i in range(len(memory)))
        parts = f"*(known if {same} else ({parts})), "
    reading: Callable[[], Reading] = written_out(f"lambda: ({parts}{attributes})", names)
    return reading


class _List(ctypes.Structure):
    """A list, as it is in memory after what all objects have."""

    _fields_ = (("size", ctypes.c_ssize_t), ("items", ctypes.c_void_p))


def _is_laid_out_so() -> bool:
    items = [object() for _ in range(3)]
    found = _List.from_address(id(items) + object.__basicsize__)
    if (
        sys.implementation.name != "cpython"
        or list.__basicsize__ < object.__basicsize__ + ctypes.sizeof(_List)
        or found.size != 3
    ):
        return False
    return [*(ctypes.c_void_p * 3).from_address(found.items)] == [id(x) for x in items]


_LISTS = _is_laid_out_so()


def reading_list(values: list[object]) -> Callable[[], tuple[object, ...]]:
    """A function that reads a long list: one thing for all of it, as long as the same objects are in it, and touches none of
    them. (They are kept, so that nothing else can lie where they do.)"""
    if not (_LISTS and values):
        return lambda: (*values,)
    known = (*values,)
    lies, size = _List.from_address(id(values) + object.__basicsize__), len(known)
    at = lies.items
    memory = (ctypes.c_char * (size * ctypes.sizeof(ctypes.c_void_p))).from_address(at)
    raw = memory.raw

    def read() -> Reading:
        same = lies.size == size and lies.items == at and memory.raw == raw
        return (known,) if same else (*values,)

    return read
