"""Nodes of a graph by the memory that they touch, and where two of them meet.

A graph gives what its nodes give one after the other, whatever runs at the same time, if each two of them that *meet* are in
order: they touch the same byte, and one of them writes it. Nothing else about a node counts. So hidden state is memory, too:
whatever two nodes share that is no tensor has an address here that no tensor has, below zero.

Ranges are cut into *pieces*, at each address where one begins or ends. Then two ranges share a byte if they share a piece.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ...memory.spans import Spans

__all__ = ["Edge", "Node", "Pieces", "hidden"]

Edge = tuple[int, int]
"""Two nodes by their numbers, of which the second waits for the first."""


class Node(NamedTuple):
    """One node of a graph."""

    name: str
    reads: Spans = Spans()
    writes: Spans = Spans()
    everything: bool = False
    """Whether it may read and write any memory, because nobody knows what it does."""
    nbytes: int = 0
    """How much its operator is given and gives: its time goes by that. (A workspace is mostly not used as a whole.)"""

    @property
    def idle(self) -> bool:
        """Whether it touches nothing: two branches that join, for instance."""
        return not (self.everything or len(self.reads) or len(self.writes))


def hidden(number: int) -> Spans:
    """The memory that stands for hidden state of this number, from 1 on."""
    return Spans([(-number, 1)])


class Pieces:
    """Ranges of addresses that no node touches in part."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        touched = [span for node in nodes for spans in (node.reads, node.writes) for span in spans]
        self._cuts = sorted({at for start, nbytes in touched for at in (start, start + nbytes)})

    def __len__(self) -> int:
        return max(0, len(self._cuts) - 1)

    def of(self, spans: Iterable[tuple[int, int]]) -> Iterator[int]:
        """The numbers of the pieces that ranges of a node's consist of."""
        for start, nbytes in spans:
            yield from range(bisect_left(self._cuts, start), bisect_left(self._cuts, start + nbytes))
