"""What may run at the same time in a graph: drawn graphs, and oracles that look at each byte and at each path."""

import random
from graphlib import CycleError
from itertools import combinations

import pytest

from phonograph.devices.order import (
    Block,
    Node,
    ancestors,
    dependencies,
    hidden,
    laid_out,
    longest_path,
    meetings,
    members,
    peak,
    reduced,
    said,
    scheduled,
    unordered,
)
from phonograph.memory.spans import Spans

DRAWN = 10_000
MEMORY = 12  # bytes: few, so that nodes meet


def spans(draw):
    return Spans([(draw.randrange(MEMORY), draw.randint(1, 4)) for _ in range(draw.choice((0, 0, 1, 1, 2)))])


def drawn_nodes(draw):
    count = draw.randint(2, 9)
    return [Node(str(i), spans(draw), spans(draw), everything=draw.random() < 0.05) for i in range(count)]


def drawn_edges(draw, count, much=0.3):
    return [pair for pair in combinations(range(count), 2) if draw.random() < much]


def bytes_of(node):
    """What it reads and writes, byte by byte; a byte beside all others is what is not known to be touched by anybody."""
    every = {*range(-3, MEMORY + 4)}
    read, written = ({b for start, n in part for b in range(start, start + n)} for part in (node.reads, node.writes))
    return (every, every) if node.everything else (read, written)


def meet(a, b):
    """Whether they touch the same byte, and one of them writes it."""
    (reads, writes), (others_reads, others_writes) = bytes_of(a), bytes_of(b)
    return bool(writes & (others_reads | others_writes) or others_writes & reads)


def leads(edges, first, then):
    return first == then or any(leads(edges, b, then) for a, b in edges if a == first)


def accused(nodes, edges):
    """By the oracle."""
    return {(a, b) for a, b in combinations(range(len(nodes)), 2)
            if meet(nodes[a], nodes[b]) and not leads(edges, a, b) and not leads(edges, b, a)}  # fmt: skip


def test_one_edge_that_matters_is_taken_away_from_ten_thousand_graphs_and_is_missed_in_each():
    draw = random.Random(54)
    whole = without = 0
    while without < DRAWN:
        nodes = drawn_nodes(draw)
        edges = dependencies(nodes)
        assert [*unordered(nodes, edges)] == []
        whole += 1
        if edges:
            gone = draw.choice(edges)
            assert gone in {*unordered(nodes, [edge for edge in edges if edge != gone])}
            without += 1
    assert whole >= without == DRAWN


def test_the_checker_names_the_pairs_that_the_oracle_does():
    draw = random.Random(1)
    named = 0
    for _ in range(3_000):
        nodes = drawn_nodes(draw)
        edges = drawn_edges(draw, len(nodes))
        new = [*range(len(nodes))]
        draw.shuffle(new)  # a graph's nodes come in any order
        shuffled = [nodes[new.index(i)] for i in range(len(nodes))]
        told = [*unordered(shuffled, [(new[a], new[b]) for a, b in edges])]
        assert {tuple(sorted((new.index(a), new.index(b)))) for a, b in told} == accused(nodes, edges)
        assert len({*told}) == len(told)
        named += len(told)
    assert named > 3_000


def test_dependencies_are_the_fewest_that_keep_in_order_what_meets():
    draw = random.Random(2)
    for _ in range(3_000):
        nodes = drawn_nodes(draw)
        every = [(a, b) for a, b in combinations(range(len(nodes)), 2) if meet(nodes[a], nodes[b])]
        least = [(a, b) for a, b in every if not any(leads(every, a, c) and leads(every, c, b) for c in range(a + 1, b))]
        assert sorted(dependencies(nodes)) == sorted(least)


def test_what_touches_nothing_waits_for_nobody_and_what_may_touch_anything_for_all():
    a, b, unknown = Node("a", writes=Spans([(0, 4)])), Node("b", writes=Spans([(8, 4)])), Node("?", everything=True)
    assert dependencies([a, Node("join"), unknown, Node("join"), b]) == [(0, 2), (2, 4)]
    assert dependencies([unknown, unknown]) == [(0, 1)]


def test_hidden_state_is_memory_of_its_own():
    one, other = (Node(name, writes=hidden(1)) for name in ("all_reduce", "all_gather"))
    nodes = [one, Node("mm", reads=Spans([(0, 64)]), writes=hidden(2)), other]
    assert dependencies(nodes) == [(0, 2)]
    (pair,) = unordered(nodes, [])
    assert pair == (0, 2)
    assert said(nodes, pair).startswith("all_reduce and all_gather touch the same memory")


def test_a_circle_is_no_order():
    with pytest.raises(CycleError):
        [*unordered([Node("a"), Node("b")], [(0, 1), (1, 0)])]


def like_a_step(count):
    """Nodes of a training step: each reads a weight and what the one before has left, in memory that is used again after a
    while; each third works in a workspace that all share, and some update all weights."""
    nodes = []
    for i in range(count):
        left, weight = Spans([(i % 50 * 4096, 4096)]), Spans([(1 << 20 | i % 400 << 10, 1 << 10)])
        reads = Spans([((i - 1) % 50 * 4096, 4096), *weight])
        if i % 500 == 499:
            nodes.append(Node("adam", reads, Spans([(1 << 20 | w << 10, 1 << 10) for w in range(400)])))
        else:
            nodes.append(Node("mm", reads, left | Spans([(1 << 30, 1 << 25)]) if i % 3 == 0 else left))
    return nodes


def test_ten_thousand_nodes_take_no_more_looks_than_they_touch_pieces():
    """Not a look for each pair, of which there are fifty millions."""
    nodes = like_a_step(10_000)
    edges = dependencies(nodes)
    assert [*unordered(nodes, edges)] == []
    assert sum(1 for _ in meetings(nodes)) < 3 * len(nodes)
    assert len(edges) < 3 * len(nodes)
    edges.remove(gone := edges[len(edges) // 2])
    first, then = next(unordered(nodes, edges))
    assert not ancestors(len(nodes), edges)[then] >> first & 1
    assert first <= gone[0] < gone[1] <= then


# -- lanes


def test_lanes_keep_what_must_wait_and_take_no_longer_than_list_scheduling_may():
    draw = random.Random(3)
    for _ in range(3_000):
        count, lanes = draw.randint(1, 12), draw.randint(1, 4)
        times, edges = [draw.randint(1, 9) for _ in range(count)], drawn_edges(draw, count)
        found = scheduled(times, edges, lanes)
        assert sorted(node for lane in found.lanes for node in lane) == [*range(count)]
        assert len(found.lanes) == lanes
        before = ancestors(count, found.edges)
        assert all(before[b] >> a & 1 for a, b in edges)
        assert all(before[b] >> a & 1 for lane in found.lanes for a, b in combinations(lane, 2))
        longest = max(longest_path(times, edges))
        assert longest <= found.time <= sum(times) / lanes + (1 - 1 / lanes) * longest + 1e-9
        assert found.time == ends(times, found.edges)


def ends(times, edges):
    """When the last node ends, if each begins as soon as those have ended that it waits for."""

    def end(node):
        return times[node] + max((end(a) for a, b in edges if b == node), default=0)

    return max(map(end, range(len(times))))


def test_the_longest_path_is_never_kept_waiting():
    """Two chains that share nothing, and a third that is as long as both."""
    times, edges = [1.0] * 8, [(0, 1), (2, 3), (4, 5), (5, 6), (6, 7)]
    found = scheduled(times, edges, 2)
    assert found.time == 4.0
    assert [4, 5, 6, 7] in found.lanes
    assert len(found.edges) == len(edges) + 1  # the two shorter ones, one after the other


def test_one_lane_is_the_chain():
    found = scheduled([1.0] * 5, [(0, 4)], 1)
    assert found.time == 5.0
    assert len(found.edges) == 4


# -- memory


def drawn_blocks(draw, count):
    blocks = []
    for _ in range(draw.randint(1, 8)):
        users = sorted(draw.sample(range(count), draw.randint(1, min(3, count))))
        blocks.append(Block(draw.randint(1, 8) * 512 - draw.randrange(2), tuple(users)))
    return blocks


def overlap(found, blocks):
    """The pairs of blocks that have a byte in common."""
    places = [range(at, at + block.nbytes) for at, block in zip(found.offsets, blocks, strict=True)]
    return [(a, b) for a, b in combinations(range(len(blocks)), 2)
            if places[a].start < places[b].stop and places[b].start < places[a].stop]  # fmt: skip


def assert_holds(found, blocks, edges):
    """Blocks that have a byte in common are used one after the other, whatever runs at the same time. How many do."""
    shared = overlap(found, blocks)
    assert all(leads(found.edges, a, b) for a, b in edges)
    assert all(at % 512 == 0 for at in found.offsets)
    for one, other in shared:
        pairs = [(a, b) for a in blocks[one].users for b in blocks[other].users]
        assert all(a != b and leads(found.edges, a, b) for a, b in pairs) or all(
            a != b and leads(found.edges, b, a) for a, b in pairs
        )
    return len(shared)


def test_blocks_lie_in_the_same_place_only_if_one_is_used_before_the_other():
    draw = random.Random(4)
    shared = added = 0
    for _ in range(3_000):
        count = draw.randint(1, 10)
        edges, blocks, captured = drawn_edges(draw, count), drawn_blocks(draw, count), range(count)
        free = laid_out(blocks, captured, edges, most=1 << 40)
        chain = laid_out(blocks, captured, [(i, i + 1) for i in range(count - 1)], most=1 << 40)
        assert sorted(free.edges) == sorted(reduced(count, edges))
        assert peak(blocks) <= chain.nbytes
        tight = laid_out(blocks, captured, edges, most=chain.nbytes)  # which a chain can do, and all pairs in order are
        assert tight.nbytes <= chain.nbytes
        added += len(tight.edges) > len(free.edges)
        shared += assert_holds(free, blocks, edges) + assert_holds(tight, blocks, edges)
    assert shared > 3_000
    assert added > 300


def test_blocks_of_nodes_in_lanes():
    """There, an edge may lead from what was captured later to what was captured before."""
    draw = random.Random(5)
    found = backwards = shared = 0
    for _ in range(3_000):
        count = draw.randint(2, 10)
        lanes = scheduled([draw.randint(1, 9) for _ in range(count)], drawn_edges(draw, count), draw.randint(1, 3))
        assert sorted(lanes.begun) == [*range(count)]
        assert all(lanes.begun.index(a) < lanes.begun.index(b) for a, b in lanes.edges)
        backwards += any(a > b for a, b in lanes.edges)
        blocks = drawn_blocks(draw, count)
        for most in (peak(blocks), 1 << 40):
            if (layout := laid_out(blocks, lanes.begun, lanes.edges, most)) is not None:
                found, shared = found + 1, shared + assert_holds(layout, blocks, lanes.edges)
                assert layout.nbytes <= most
    assert backwards > 300
    assert found > 4_000
    assert shared > 4_000


def test_less_than_what_is_in_use_at_one_time_cannot_be():
    blocks = [Block(1024, (0, 1)), Block(1024, (1, 2))]
    assert peak(blocks) == 2048
    assert laid_out(blocks, range(3), [], most=2047) is None


def test_only_as_much_is_put_in_order_as_there_is_memory_missing():
    """Four chains of two nodes, with a block each: beside each other they take four, and two of them have room."""
    blocks, edges = [Block(512, (2 * i, 2 * i + 1)) for i in range(4)], [(2 * i, 2 * i + 1) for i in range(4)]
    assert laid_out(blocks, range(8), edges, most=4 * 512).edges == edges
    two = laid_out(blocks, range(8), edges, most=2 * 512)
    assert two.nbytes == 2 * 512
    assert scheduled([1.0] * 8, two.edges, 4).time < 8.0


def test_members_of_a_set_come_from_the_lowest_on():
    assert [*members(0b1001010)] == [1, 3, 6]
