"""Bytes that outlive a call, as places: of arrays, of objects that lay their memory open, of tensors on the CPU."""

from __future__ import annotations

import ctypes
import hashlib
from array import array
from collections.abc import Sequence
from itertools import cycle, product

import torch

from .._torch.dynamic import Foreign, Private, Reading
from .holders import Holder, Part, kept

__all__ = ["AT_ONCE", "array_of_numpys", "array_of_objects", "buffer", "frozen_array", "memory"]

AT_ONCE = 64 << 10
"""Bytes of an array, or of memory, that are all compared before each replay; of larger ones a part each time."""


def buffer(path: str, thing: Private) -> Holder:
    """The bytes of an object that lays its memory open in one piece: bytearray, array, ctypes, mmap. (No view of it is kept: it
    would keep a bytearray from growing.)"""

    def restore(saved: Reading) -> None:
        if isinstance(thing, bytearray):
            thing[:] = saved[0]
        elif isinstance(thing, array):
            del thing[:]
            thing.frombytes(saved[0])
        else:
            memoryview(thing).cast("B")[:] = saved[0]

    def read() -> Reading:
        try:
            return (memoryview(thing).tobytes(),)
        except ValueError:  # a view that was released
            return ()

    return Holder(path, read, restore)


def frozen_array(path: str, array: Foreign) -> Holder:
    """What an array is, but for its values: all that can change of one that nobody can write."""
    return kept(path, lambda: (array.shape, array.dtype.str, array.strides, array.flags.writeable))


def array_of_objects(path: str, array: Foreign) -> Holder:
    """What lies in an array of Python's objects."""

    def places() -> list[tuple[int, ...]]:
        return [*product(*map(range, array.shape))]

    def restore(saved: Reading) -> None:
        now = places()
        for place, value in zip(now, saved, strict=False):
            if array[place] is not value:
                array[place] = value

    return Holder(path, lambda: (*array.flat,), restore)


def array_of_numpys(path: str, array: Foreign) -> Holder:
    """An array: what it is, and its bytes; of more than `AT_ONCE` a digest. A recording that relies on it looks at so many
    bytes of such a one each time, and so at all of it in some replays. It is read itself, and no view of it: that would keep
    its shape."""

    def read() -> Reading:
        return (array.shape, array.dtype.str, array.strides, array.tobytes() if array.nbytes <= AT_ONCE else _digest(array))

    before, was = array.copy(), read()
    step = max(1, AT_ONCE // max(1, array.itemsize))
    starts = cycle(range(0, array.size, step))
    intact = True

    def read_some() -> Reading:
        nonlocal intact
        what = array.shape, array.dtype.str, array.strides
        if what != was[:3]:
            return (*what, False)
        start = next(starts)
        some = slice(start, start + step)
        flat = array.reshape(-1) if array.flags.c_contiguous else array.flat
        intact = intact and flat[some].tobytes() == before.reshape(-1)[some].tobytes()
        return (*what, intact)

    def restore(_: Reading) -> None:
        if read() == was:
            return
        if (array.dtype, array.shape) != (before.dtype, before.shape):
            array.dtype = before.dtype
            array.shape = before.shape
        array[...] = before

    part = Part(read_some, lambda values: (*values[:3], values == was), lambda path, i, _: path)
    return Holder(path, read, restore, part=part if array.nbytes > AT_ONCE else None)


def memory(path: str, storage: torch.UntypedStorage, tensors: Sequence[torch.Tensor]) -> Holder:
    """The bytes of tensors on the CPU that share this storage; of more than `AT_ONCE` a part each time, and how often the
    tensors were written, which tells of all but what goes around torch."""
    n = storage.nbytes()
    before = ctypes.string_at(storage.data_ptr(), n) if n else b""
    counting = [t for t in tensors if not t.is_inference()]
    parts = cycle(range(0, n, AT_ONCE))
    intact = True

    def read() -> Reading:
        if storage.nbytes() != n:
            return (b"",)
        now = ctypes.string_at(storage.data_ptr(), n) if n else b""
        return (before if now == before else now,)

    def read_some() -> Reading:
        nonlocal intact
        start = next(parts)
        if storage.nbytes() == n:
            some = ctypes.string_at(storage.data_ptr() + start, min(AT_ONCE, n - start))
            intact = intact and before.startswith(some, start)
        return (intact, *[t._version for t in counting])

    def restore(_: Reading) -> None:
        if storage.nbytes() == n:
            ctypes.memmove(storage.data_ptr(), before, n)

    large = Part(read_some, lambda _: (True, *[t._version for t in counting]), _unnumbered)
    return Holder(path, read, restore, named=_unnumbered, part=large if n > AT_ONCE else None)


def _unnumbered(path: str, i: int, values: Reading) -> str:
    return path


def _digest(array: Foreign) -> bytes:
    whole = array if array.flags.c_contiguous else array.copy()
    return hashlib.blake2b(memoryview(whole).cast("B"), digest_size=16).digest()
