"""A small allocator over real memory: the CPU device's counterpart of CUDA's caching allocator in a graph pool.

Addresses are given out and taken back in the order in which a captured call's tensors are born and die, best fit, so that
memory is reused as a CUDA capture would reuse it: a wrong belief about liveness shows as wrong numbers. And what is small and
held for long keeps no large piece of memory, where there is a smaller one.
"""

from __future__ import annotations

import gc
from bisect import bisect_left, insort

import torch

from ...memory.spans import Spans
from ...python.gc_control import uncollected

__all__ = ["Arena"]

_ALIGN = 64  # bytes: a cache line, and what vectorised kernels like
_SEGMENT = 1 << 20  # bytes: the least that is taken from the system at once


def _aligned(address: int) -> int:
    return -(-address // _ALIGN) * _ALIGN


class Arena:
    """Segments of memory, and which bytes of them are free at the moment."""

    def __init__(self) -> None:
        self.segments: list[torch.Tensor] = []
        # What is free, in pieces that are never adjacent: where they begin, how long each is, and (bytes, address) of each.
        self._begins: list[int] = []
        self._length: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []
        self._taken: dict[int, int] = {}
        self.used: list[tuple[int, int]] = []

    @property
    def nbytes(self) -> int:
        return sum(s.nbytes for s in self.segments)

    def open(self, protected: Spans) -> None:
        """Begin a capture: everything is free but what is protected."""
        self._taken.clear()
        self.used, self._begins, self._by_size = [], [], []
        self._length.clear()
        for s in self.segments:
            at, end = s.data_ptr(), s.data_ptr() + s.nbytes
            for start, length in protected:
                if start < end and start + length > at:
                    self._give(at, start - at)
                    at = max(at, start + length)
            self._give(at, end - at)

    def take(self, nbytes: int) -> int:
        """The address of `nbytes` free bytes; a new segment where none are left. Zero bytes take a place too."""
        if not gc.isenabled():  # as in a capture
            return self._take(nbytes)
        with uncollected():  # or garbage may be found in the middle, and its places be given back
            return self._take(nbytes)

    def _take(self, nbytes: int) -> int:
        want = max(_ALIGN, -(-nbytes // _ALIGN) * _ALIGN)
        for n in range(bisect_left(self._by_size, (want, 0)), len(self._by_size)):
            length, address = self._by_size[n]
            start, end = _aligned(address), address + length
            if start + want <= end:
                self._forget(address)
                self._note(address, start - address)
                self._note(start + want, end - start - want)
                self._taken[start] = want
                self.used.append((start, want))
                return start
        with torch.inference_mode(False):
            self.segments.append(torch.empty(max(want + _ALIGN, _SEGMENT), dtype=torch.uint8, device="cpu"))
        self._give(self.segments[-1].data_ptr(), self.segments[-1].nbytes)
        return self._take(nbytes)

    def give(self, address: int) -> None:
        """Take back what `take` gave."""
        if not gc.isenabled():
            self._give(address, self._taken.pop(address))
            return
        with uncollected():
            self._give(address, self._taken.pop(address))

    def _give(self, address: int, length: int) -> None:
        if length <= 0:
            return
        n = bisect_left(self._begins, address)
        if n < len(self._begins) and self._begins[n] == address + length:
            length += self._forget(self._begins[n])
        if n and self._begins[n - 1] + self._length[self._begins[n - 1]] == address:
            address = self._begins[n - 1]
            length += self._forget(address)
        self._note(address, length)

    def _note(self, address: int, length: int) -> None:
        """A piece is free, of which no neighbour is."""
        if length > 0:
            insort(self._begins, address)
            insort(self._by_size, (length, address))
            self._length[address] = length

    def _forget(self, address: int) -> int:
        """The piece that begins there is free no more. Returns its length."""
        length = self._length.pop(address)
        del self._begins[bisect_left(self._begins, address)]
        del self._by_size[bisect_left(self._by_size, (length, address))]
        return length

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
