"""The true dependencies of nodes that were captured one after the other.

Of an order in which everything waits for what came before it, this is the least that gives the same: a node waits for who has
last written what it reads; who writes, waits for them as well and for all who have read since.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .nodes import Edge, Node, Pieces
from .paths import reduced

__all__ = ["dependencies"]


def dependencies(nodes: Sequence[Node]) -> list[Edge]:
    """The fewest edges that keep nodes in order which meet in memory."""
    return reduced(len(nodes), _found(nodes))


def _found(nodes: Sequence[Node]) -> Iterator[Edge]:
    pieces = Pieces(nodes)
    wrote: list[int | None] = [None] * len(pieces)
    have_read = [list[int]() for _ in range(len(pieces))]
    barrier = -1  # the last node that may touch anything
    for number, node in enumerate(nodes):
        if node.everything:
            yield from ((other, number) for other in range(max(barrier, 0), number) if not nodes[other].idle)
            barrier = number
        elif barrier >= 0 and not node.idle:
            yield barrier, number
        for piece in pieces.of(node.reads):
            if (writer := wrote[piece]) is not None:
                yield writer, number
            have_read[piece].append(number)
        for piece in pieces.of(node.writes):
            if (writer := wrote[piece]) is not None:
                yield writer, number
            yield from ((reader, number) for reader in have_read[piece] if reader != number)
            wrote[piece], have_read[piece] = number, []
