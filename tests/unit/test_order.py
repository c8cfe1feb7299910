"""What may run at the same time in a graph: drawn graphs, and oracles that look at each byte and at each path."""

import random
from graphlib import CycleError
from itertools import combinations

import pytest

from phonograph.devices.order.check import meetings, said, unordered
from phonograph.devices.order.dependencies import dependencies
from phonograph.devices.order.nodes import Node, hidden
from phonograph.devices.order.paths import ancestors
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
