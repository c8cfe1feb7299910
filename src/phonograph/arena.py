"""A small allocator over real memory: the CPU device's counterpart of CUDA's caching allocator in a graph pool.

Addresses are given out and taken back in the order in which a captured call's tensors are born and die, best fit, so that
memory is reused as a CUDA capture would reuse it: a wrong belief about liveness shows as wrong numbers. And what is small and
held for long keeps no large piece of memory, where there is a smaller one.
"""

from __future__ import annotations

from bisect import insort

import torch

from .garbage import uncollected
from .spans import Spans

__all__ = ["Arena"]

_ALIGN = 64  # bytes: a cache line, and what vectorised kernels like
_SEGMENT = 1 << 20  # bytes: the least that is taken from the system at once


def _aligned(address: int) -> int:
    return -(-address // _ALIGN) * _ALIGN


class Arena:
    """Segments of memory, and which bytes of them are free at the moment."""

    def __init__(self) -> None:
        self.segments: list[torch.Tensor] = []
        self._free: list[tuple[int, int]] = []  # (address, bytes), sorted, never adjacent
        self._taken: dict[int, int] = {}
        self.used: list[tuple[int, int]] = []

    @property
    def nbytes(self) -> int:
        return sum(s.nbytes for s in self.segments)

    def open(self, protected: Spans) -> None:
        """Begin a capture: everything is free but what is protected."""
        self._taken.clear()
        self.used = []
        self._free = []
        for s in self.segments:
            at, end = s.data_ptr(), s.data_ptr() + s.nbytes
            for start, length in protected:
                if start < end and start + length > at:
                    self._give(at, start - at)
                    at = max(at, start + length)
            self._give(at, end - at)

    def take(self, nbytes: int) -> int:
        """The address of `nbytes` free bytes; a new segment where none are left. Zero bytes take a place too."""
        with uncollected():  # or garbage may be found in the middle, and its places be given back
            return self._take(nbytes)

    def _take(self, nbytes: int) -> int:
        want = max(_ALIGN, -(-nbytes // _ALIGN) * _ALIGN)
        fitting = [
            (length, i) for i, (address, length) in enumerate(self._free) if _aligned(address) + want <= address + length
        ]
        if fitting:
            length, i = min(fitting)
            address, start = self._free[i][0], _aligned(self._free[i][0])
            rest = (address, start - address), (start + want, address + length - start - want)
            self._free[i : i + 1] = [piece for piece in rest if piece[1] > 0]
            self._taken[start] = want
            self.used.append((start, want))
            return start
        with torch.inference_mode(False):
            self.segments.append(torch.empty(max(want + _ALIGN, _SEGMENT), dtype=torch.uint8, device="cpu"))
        self._give(self.segments[-1].data_ptr(), self.segments[-1].nbytes)
        return self._take(nbytes)

    def give(self, address: int) -> None:
        """Take back what `take` gave."""
        with uncollected():
            self._give(address, self._taken.pop(address))

    def _give(self, address: int, length: int) -> None:
        if length <= 0:
            return
        insort(self._free, (address, length))
        merged: list[tuple[int, int]] = []
        for start, size in self._free:
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((start, size))
        self._free = merged

    def give_back(self, address: int, nbytes: int) -> None:
        """From now on these bytes, which were protected, are free."""
        with uncollected():
            self._give(address, nbytes)

    def under(self, place: Spans) -> list[torch.Tensor]:
        """The segments in which a place lies."""
        return [s for s in self.segments if place.meets(s.data_ptr(), s.nbytes)]

    def trim(self, needed: Spans) -> None:
        """Return to the system every segment in which nothing is needed any more."""
        self.segments = self.under(needed)
