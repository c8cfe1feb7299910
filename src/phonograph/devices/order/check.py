"""Proof that a graph gives what its nodes give one after the other.

The checker knows nothing of how edges were found. It goes by their paths alone, so that it can be asked about any graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .nodes import Edge, Node, Pieces
from .paths import ancestors, members

__all__ = ["said", "unordered"]


def unordered(nodes: Sequence[Node], edges: Sequence[Edge]) -> Iterator[Edge]:
    """The pairs of nodes that meet in memory, one of them writing, and have no path between them: none, if all is well.

    Raises:
        graphlib.CycleError: there is a circle.
    """
    before = ancestors(len(nodes), edges)
    after = ancestors(len(nodes), [(then, first) for first, then in edges])
    ordered = [b | a | 1 << node for node, (b, a) in enumerate(zip(before, after, strict=True))]
    told: set[Edge] = set()
    for writer, users in meetings(nodes):
        for other in members(users & ~ordered[writer]):
            pair = min(writer, other), max(writer, other)
            if pair not in told:
                told.add(pair)
                yield pair


def said(nodes: Sequence[Node], pair: Edge) -> str:
    """What is wrong with two nodes, for the user."""
    one, other = (nodes[i] for i in pair)
    return f"{one.name} and {other.name} touch the same memory, which one of them writes, and neither waits for the other"


def meetings(nodes: Sequence[Node]) -> Iterator[tuple[int, int]]:
    """For each piece of memory, each node that writes it, with the set of all that touch it."""
    pieces = Pieces(nodes)
    users, writers = [0] * len(pieces), [list[int]() for _ in range(len(pieces))]
    for number, node in enumerate(nodes):
        for piece in pieces.of([*node.reads, *node.writes]):
            users[piece] |= 1 << number
        for piece in pieces.of(node.writes):
            writers[piece].append(number)
    yield from ((writer, users[piece]) for piece, them in enumerate(writers) for writer in them)
    yield from _with_everything(nodes)


def _with_everything(nodes: Sequence[Node]) -> Iterable[tuple[int, int]]:
    busy = sum(1 << number for number, node in enumerate(nodes) if not node.idle)
    return [(number, busy) for number, node in enumerate(nodes) if node.everything]
