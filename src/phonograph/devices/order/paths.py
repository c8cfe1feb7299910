"""Paths in a graph. A set of nodes is an integer, with a bit for each: what comes before a node is an `or` for each edge."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter

from .nodes import Edge

__all__ = ["ancestors", "members", "reduced", "waits"]


def waits(count: int, edges: Iterable[Edge]) -> list[list[int]]:
    """For each node, those that it waits for by an edge."""
    before: list[list[int]] = [[] for _ in range(count)]
    for first, then in edges:
        before[then].append(first)
    return before


def ancestors(count: int, edges: Iterable[Edge]) -> list[int]:
    """For each node, the set of those from which a path leads to it.

    Raises:
        graphlib.CycleError: there is a circle.
    """
    before, found = waits(count, edges), [0] * count
    for node in TopologicalSorter(dict(enumerate(before))).static_order():
        for other in before[node]:
            found[node] |= found[other] | 1 << other
    return found


def reduced(count: int, edges: Iterable[Edge]) -> list[Edge]:
    """The edges without those that a path of others stands for. They lead from lower numbers to higher ones."""
    kept, reached = list[Edge](), [0] * count
    for then, before in enumerate(waits(count, edges)):
        for first in sorted({*before}, reverse=True):  # what comes last has what comes before it among its ancestors
            if not reached[then] >> first & 1:
                kept.append((first, then))
                reached[then] |= reached[first] | 1 << first
    return kept


def members(nodes: int) -> Iterator[int]:
    """The numbers in a set, from the lowest on."""
    while nodes:
        lowest = nodes & -nodes
        yield lowest.bit_length() - 1
        nodes ^= lowest
