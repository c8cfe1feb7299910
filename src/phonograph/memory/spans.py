"""Sets of addresses, as sorted disjoint intervals of bytes.

Footprints and liveness are both questions about addresses: *which bytes may playing this recording overwrite*, and
*does a tensor that somebody still holds lie among them*. A `Spans` answers in O(log n).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator

__all__ = ["Spans"]


class Spans:
    """An immutable set of byte addresses.

    Built from ``(start, length)`` pairs in bytes, in any order, overlapping or not.
    """

    __slots__ = ("_ends", "_starts")

    def __init__(self, pieces: Iterable[tuple[int, int]] = ()) -> None:
        starts: list[int] = []
        ends: list[int] = []
        for start, length in sorted([p for p in pieces if p[1] > 0]):
            if ends and start <= ends[-1]:
                ends[-1] = max(ends[-1], start + length)
            else:
                starts.append(start)
                ends.append(start + length)
        self._starts = starts
        self._ends = ends

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((s, e - s) for s, e in zip(self._starts, self._ends, strict=True))

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def nbytes(self) -> int:
        return sum(self._ends) - sum(self._starts)

    def meets(self, start: int, length: int) -> bool:
        """Whether any byte of ``[start, start + length)`` is in the set."""
        i = bisect_right(self._starts, start + length - 1) - 1
        return length > 0 and i >= 0 and self._ends[i] > start

    def covers(self, start: int, length: int) -> bool:
        """Whether every byte of ``[start, start + length)`` is in the set."""
        i = bisect_right(self._starts, start) - 1
        return length == 0 or (i >= 0 and self._ends[i] >= start + length)

    def __or__(self, other: Spans) -> Spans:
        return Spans([*self, *other])

    def __sub__(self, other: Spans) -> Spans:
        left: list[tuple[int, int]] = []
        for start, end in zip(self._starts, self._ends, strict=True):
            i = bisect_right(other._ends, start)
            while i < len(other) and other._starts[i] < end:
                left.append((start, other._starts[i] - start))
                start, i = other._ends[i], i + 1
            left.append((start, end - start))
        return Spans(left)

    def __repr__(self) -> str:
        return f"Spans({self.nbytes} bytes in {len(self)} pieces)"
