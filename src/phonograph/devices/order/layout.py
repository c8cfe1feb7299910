"""Where blocks of memory lie, if nodes run in a partial order.

In a chain, a block that is not used any more can be given to whoever comes next. In a partial order that is one dependency
more than there was: the two must be in order already. So two blocks may lie in the same place only if each node that uses the
one comes before each that uses the other, on a path.

That takes more memory than a chain does. Where it is more than there may be, some blocks are put in order again, first those
that lie beyond. If all were, it would be a chain. Which one, there is a choice of: in the order in which nodes begin in lanes
(`lanes.py`) it costs the least time, where that has room; in the one in which they were captured it takes the least memory.

Places are given to the largest blocks first, each the smallest gap that holds it among those that it may not share with
("greedy by size", Pisarchyk and Lee 2020).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import and_
from typing import NamedTuple

from .nodes import Edge
from .paths import ancestors, members, reduced, waits

__all__ = ["Block", "Layout", "laid_out", "peak"]

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
