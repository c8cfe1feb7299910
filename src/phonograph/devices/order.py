"""The order of a graph's nodes: which must wait for which, a proof that they do, lanes, and memory. Arithmetic alone.

A graph gives what its nodes give one after the other, whatever runs at the same time, if each two of them that *meet* are in
order: they touch the same byte, and one of them writes it. Nothing else about a node counts. So hidden state is memory, too:
whatever two nodes share that is no tensor has an address here that no tensor has, below zero.

* `dependencies`: of an order in which everything waits for what came before it, the least that gives the same. A node waits
  for who has last written what it reads; who writes, waits for them as well and for all who have read since.
* `unordered`: the checker. It knows nothing of how edges were found. It goes by their paths alone, so that it can be asked
  about any graph.
* `scheduled`: a GPU has few queues for what may run at the same time, and to let one wait for another costs time. So nodes
  are put into a few lanes, each of which is a chain. This is list scheduling (Graham 1969): as soon as a lane is free, it
  takes the node that can begin, and from which the longest path leads to the end. That takes no longer than `sum(t) / lanes +
  (1 - 1 / lanes) * longest path`, and so no longer than twice what is possible. Edges are only added.
* `laid_out`: in a chain, a block that is not used any more can be given to whoever comes next. In a partial order the two
  must be in order already: each node that uses the one before each that uses the other, on a path. That takes more memory.
  Where it is more than there may be, some blocks are put in order again, first those that lie beyond; if all were, it would
  be a chain. The order in which nodes begin in lanes costs the least time, where that has room, and the one in which they
  were captured takes the least memory. Places are given to the largest blocks first, each the smallest gap that holds it
  among those that it may not share with ("greedy by size", Pisarchyk and Lee 2020).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from graphlib import TopologicalSorter
from heapq import heappop, heappush
from itertools import pairwise
from operator import and_
from typing import NamedTuple

from ..memory.spans import Spans

__all__ = [
    "Block",
    "Edge",
    "Layout",
    "Node",
    "Pieces",
    "Schedule",
    "ancestors",
    "dependencies",
    "hidden",
    "laid_out",
    "longest_path",
    "members",
    "peak",
    "reduced",
    "said",
    "scheduled",
    "unordered",
    "waits",
]

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


# -- paths: a set of nodes is an integer with a bit for each, and what comes before a node an `or` for each edge


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


# -- true dependencies


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


# -- the checker


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


# -- lanes


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


# -- memory


_PART = 64  # of all blocks, so many are put in order at first
_APART = 512  # bytes: what kernels may count on of an address


class Block(NamedTuple):
    """Memory that some nodes use, and that holds nothing before and after."""

    nbytes: int
    users: tuple[int, ...]
    """In turn."""

    @property
    def taken(self) -> int:
        """Bytes up to where another can begin."""
        return -(-self.nbytes // _APART) * _APART


class Layout(NamedTuple):
    """Places of blocks, and the edges under which they hold."""

    offsets: list[int]
    nbytes: int
    edges: list[Edge]


def peak(blocks: Sequence[Block]) -> int:
    """The most bytes that are in use at one time where nodes run in the order of their numbers."""
    changes = sorted([(b.users[0], b.taken) for b in blocks] + [(b.users[-1] + 0.5, -b.taken) for b in blocks])
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def laid_out(blocks: Sequence[Block], order: Sequence[int], edges: Sequence[Edge], most: int) -> Layout | None:
    """Places for blocks in so many bytes at most; None if there are none. `order` are all nodes, in turn, as the edges allow:
    in that order blocks are put if need be. Then there are more edges afterwards."""
    rank = {node: i for i, node in enumerate(order)}
    ranked = [Block(block.nbytes, tuple(sorted(rank[node] for node in block.users))) for block in blocks]
    found = _laid_out(ranked, len(order), [(rank[a], rank[b]) for a, b in edges], most)
    return found and found._replace(edges=[(order[a], order[b]) for a, b in found.edges])


def _laid_out(blocks: Sequence[Block], count: int, edges: list[Edge], most: int) -> Layout | None:
    together = 1 + len(blocks) // _PART
    while True:
        beside = _beside(blocks, count, edges)
        offsets = _placed(blocks, beside)
        end = max((at + b.taken for at, b in zip(offsets, blocks, strict=True)), default=0)
        if end <= most:
            return Layout(offsets, end, reduced(count, edges))
        worst = _worst(blocks, beside, offsets, most)[:together]
        if not worst:
            return None
        edges += [(a, b) for first, then in worst for a in blocks[first].users for b in blocks[then].users]
        together *= 2  # so that there are few rounds


def _beside(blocks: Sequence[Block], count: int, edges: Sequence[Edge]) -> list[int]:
    """For each block, the set of those that may be in use at the same time."""
    everything = (1 << len(blocks)) - 1
    before = _before(blocks, count, edges)
    after = _before(blocks, count, [(then, first) for first, then in edges])
    return [everything & ~(b | a | 1 << i) for i, (b, a) in enumerate(zip(before, after, strict=True))]


def _before(blocks: Sequence[Block], count: int, edges: Sequence[Edge]) -> list[int]:
    """For each block, the set of those that are used no more when it is used first."""
    uses, users = [0] * count, [sum(1 << node for node in {*block.users}) for block in blocks]
    for i, block in enumerate(blocks):
        for node in block.users:
            uses[node] |= 1 << i
    reached, begun, over = ancestors(count, edges), [0] * count, [0] * count
    waited = waits(count, edges)
    for node in sorted(range(count), key=lambda node: reached[node].bit_count()):  # in their order
        for other in waited[node]:
            begun[node] |= begun[other] | uses[other]
            over[node] |= over[other]
        # Where there is one that it waits for, what that has not used has not ended there either.
        ending = uses[waited[node][0]] if len(waited[node]) == 1 else begun[node]
        over[node] |= sum(1 << i for i in members(ending & ~over[node]) if not users[i] & ~reached[node])
    return [reduce(and_, [over[node] for node in block.users]) for block in blocks]


def _placed(blocks: Sequence[Block], beside: list[int]) -> list[int]:
    offsets = [-1] * len(blocks)
    for block in sorted(range(len(blocks)), key=lambda i: (-blocks[i].taken, blocks[i].users[0])):
        there = ((offsets[i], offsets[i] + blocks[i].taken) for i in members(beside[block]) if offsets[i] >= 0)
        offsets[block] = _gap(sorted(there), blocks[block].taken)
    return offsets


def _gap(taken: list[tuple[int, int]], nbytes: int) -> int:
    """Where the smallest gap begins that has so many bytes; behind everything, if there is none."""
    best, end = (0, -1), 0
    for begin, stop in taken:
        if begin - end >= nbytes and (best[1] < 0 or begin - end < best[0]):
            best = begin - end, end
        end = max(end, stop)
    return best[1] if best[1] >= 0 else end


def _worst(blocks: Sequence[Block], beside: list[int], offsets: list[int], most: int) -> list[tuple[int, int]]:
    """Pairs of blocks that had better be in use one after the other, in that order; the worst first."""
    beyond = [i for i, at in enumerate(offsets) if at + blocks[i].taken > most]
    pairs = _apart(blocks, beside, beyond) or _apart(blocks, beside, range(len(blocks)))
    return sorted(pairs, key=lambda pair: (-min(blocks[i].taken for i in pair), pair))


def _apart(blocks: Sequence[Block], beside: list[int], some: Iterable[int]) -> set[tuple[int, int]]:
    """The pairs with some of these blocks that may be in use at the same time, and need not."""
    pairs = {(a, b) for one in some for other in members(beside[one]) for a, b in ((one, other), (other, one))}
    return {(a, b) for a, b in pairs if blocks[a].users[-1] < blocks[b].users[0]}
