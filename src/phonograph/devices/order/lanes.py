"""Lanes: who runs beside whom.

A GPU has few queues for what may run at the same time, and to let one wait for another costs time. So nodes are put into a few
lanes, each of which is a chain. This is list scheduling (Graham 1969): as soon as a lane is free, it takes the node that can
begin, and from which the longest path leads to the end. With times `t`, that takes no longer than

    sum(t) / lanes + (1 - 1 / lanes) * (the longest path)

and so no longer than twice what is possible. Edges are only added: what had to wait for something still does.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from .nodes import Edge
from .paths import reduced, waits

__all__ = ["Schedule", "longest_path", "scheduled"]


class Schedule(NamedTuple):
    """Nodes in lanes."""

    lanes: list[list[int]]
    begun: list[int]
    """All nodes, in the order in which they begin."""
    edges: list[Edge]
    """All that has to be waited for: what was asked for, and what lies before a node in its lane."""
    time: float
    """When all is done."""


def longest_path(times: Sequence[float], edges: Sequence[Edge]) -> list[float]:
    """For each node, the time from its begin to the end, if nothing waits for a lane. Edges lead to higher numbers."""
    left, after = [*times], waits(len(times), [(then, first) for first, then in edges])
    for node in reversed(range(len(times))):
        left[node] += max((left[other] for other in after[node]), default=0.0)
    return left


def scheduled(times: Sequence[float], edges: Sequence[Edge], lanes: int) -> Schedule:
    """Put nodes that take so long into lanes. Edges lead to higher numbers."""
    plan = _Plan(times, edges, lanes)
    while plan.running or plan.ready:
        plan.begin()
        plan.end()
    chained = [pair for lane in plan.lanes for pair in pairwise(lane)]
    numbered = {node: at for at, node in enumerate(plan.begun)}
    both = reduced(len(times), [(numbered[a], numbered[b]) for a, b in (*edges, *chained)])
    return Schedule(plan.lanes, plan.begun, [(plan.begun[a], plan.begun[b]) for a, b in both], plan.now)


class _Plan:
    """What has begun by `now`, in which lane, and what could."""

    def __init__(self, times: Sequence[float], edges: Sequence[Edge], lanes: int) -> None:
        self._times, self._left = times, longest_path(times, edges)
        self._before = waits(len(times), edges)
        self._after = waits(len(times), [(then, first) for first, then in edges])
        self._missing = [len(before) for before in self._before]
        self.now = 0.0
        self.begun: list[int] = []
        self.lanes: list[list[int]] = [[] for _ in range(lanes)]
        self._free = {*range(lanes)}
        self.running: list[tuple[float, int, int]] = []  # when it ends, which node, in which lane
        self.ready = [(-self._left[node], node) for node, missing in enumerate(self._missing) if not missing]
        self.ready.sort()

    def begin(self) -> None:
        """Begin what can be, now."""
        while self.ready and self._free:
            _, node = heappop(self.ready)
            lane = self._lane_for(node)
            self._free.remove(lane)
            self.lanes[lane].append(node)
            self.begun.append(node)
            heappush(self.running, (self.now + self._times[node], node, lane))

    def _lane_for(self, node: int) -> int:
        """A free lane: one where the last is what the node waits for, else the one that was used last, which leaves others
        alone."""
        best: int = max(self._free, key=lambda lane: (self._last(lane) in self._before[node], self._last(lane)))
        return best

    def _last(self, lane: int) -> int:
        return self.lanes[lane][-1] if self.lanes[lane] else -1

    def end(self) -> None:
        """Go on to when the next ends."""
        self.now, node, lane = heappop(self.running)
        self._free.add(lane)
        for other in self._after[node]:
            self._missing[other] -= 1
            if not self._missing[other]:
                heappush(self.ready, (-self._left[other], other))
