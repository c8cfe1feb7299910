"""A recorded call whose backward is itself differentiated (`create_graph=True`).

The graph of autograd that the capture has left behind has numbers in place of what was saved, and is otherwise eager's: it
gives derivatives of any order. So such a backward runs live through it, over what the forward has saved. What is differentiated
later is that very graph, and not another that a second forward would make: neither random numbers, nor what was written since,
nor code that runs twice comes into it.

It stays private, because what its numbers stand for is known only while a backward of the call runs. In the user's graph the
gradients that it gives come out of a node of their own (`differentiated.py`). So several nodes lead into one private graph:
that of the results, and those of such gradients, which have grown it. In a backward they leave what arrives to the last of
them, so that gradients are added up where they are in eager, in the same order. But what has grown is run before the node of
the results comes, as in eager: what others give for a weight is added between. (Not where code of the user's runs in the
backward, which would see parts of gradients.)
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node

from .._torch.autograd import backward_id, when_backward_ends, will_run
from ..python.identity import identity

__all__ = ["Arrived", "Ends", "Leaf", "Twice", "between", "border", "leaf_of", "nothing_through"]

Ends = list[tuple[GradientEdge, torch.Tensor]]
"""Places in the private graph, and the gradients that arrive there."""


class Leaf(NamedTuple):
    """A gradient with a history: what stands for it in the private graph, and the tensor in the user's."""

    private: torch.Tensor
    users: torch.Tensor


def leaf_of(t: torch.Tensor, leaves: list[Leaf]) -> torch.Tensor:
    """What stands for a tensor in the private graph; noted among the leaves if it has a history."""
    if not t.requires_grad:
        return t
    leaves.append(Leaf(t.detach().requires_grad_(), t))
    return leaves[-1].private


def between(ends: Iterable[GradientEdge], but: Container[Node]) -> set[Node]:
    """The nodes to which these lead, `but` some and what is behind them, and leaves."""
    found, work = set[Node](), [end.node for end in ends]
    while work:
        node = work.pop()
        if not (node in but or node in found or getattr(node, "variable", None) is not None):
            found.add(node)
            work.extend(following for following, _ in node.next_functions if following is not None)
    return found


def border(ends: Ends, stops: Set[Node]) -> list[GradientEdge]:
    """Where the ways from these places enter the nodes at which they stop."""
    nodes = between((end for end, _ in ends), stops)
    return [
        GradientEdge(node, i)
        for node, i in {edge for n in nodes for edge in n.next_functions}
        if node is not None and node in stops
    ]


@contextmanager
def nothing_through(nodes: Iterable[Node]) -> Iterator[None]:
    """Gradients arrive at these nodes, and go no further."""
    handles = [node.register_prehook(lambda arrived: (None,) * len(arrived)) for node in nodes]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Arrived(NamedTuple):
    """What has come to the nodes of one call in one backward."""

    grads: list[torch.Tensor | None]
    """Of the results."""
    ends: Ends
    """What is left to nodes that come later."""
    leaves: dict[int, Leaf]
    """On which all that depends, each once."""
    nodes: set[int]


class Twice:
    """The nodes that lead into the private graph of one call, and what has come to them in the backwards that run."""

    def __init__(self, results: Node, count: int, inner: Set[Node], starts: Set[Node]) -> None:
        """`results` is the node of its results, of which there are so many; `inner` the nodes of the graph of the capture,
        `starts` those where it begins."""
        self._results = weakref.ref(results)
        self._given: list[weakref.ref[Node]] = []
        self._count = count
        self._running: dict[int, Arrived] = {}
        ways = Counter(node for n in inner for node, _ in n.next_functions if node is not None and node in starts)
        self.stops = inner | {node for node, count in ways.items() if count > 1}
        """Where gradients arrive from what has grown, and others are added to them in the graph of the capture."""
        self.read: set[int] = set()
        """The numbers of what a backward that is to be differentiated has read, and autograd would not see written."""

    def add(self, node: Node) -> None:
        """Gradients come out of this one."""
        self._given = [*(ref for ref in self._given if ref() is not None), weakref.ref(node)]

    def arrive(self, node: Node, grads: Sequence[torch.Tensor | None], leaves: Iterable[Leaf]) -> tuple[Arrived, list[Node]]:
        """The running backward comes to a node. Returns what has come to all so far, and the nodes to which it still comes."""
        number, running = backward_id(), self._running
        if number not in running:
            running[number] = Arrived([None] * self._count, [], {}, set())
            when_backward_ends(lambda: running.pop(number, None) and None)
        here = running[number]
        here.nodes.add(identity(node))
        if grads:
            here.grads[:] = grads
        here.leaves.update((identity(leaf.private), leaf) for leaf in leaves)
        known = [other for ref in (*self._given, self._results) if (other := ref()) is not None]
        return here, [other for other in known if identity(other) not in here.nodes and will_run(other)]

    @contextmanager
    def given_up(self) -> Iterator[None]:
        """If something is raised within, nobody comes to the other nodes of this backward: what has come to it is let go, which
        refers to the graph that holds this."""
        try:
            yield
        except BaseException:
            self._running.pop(backward_id(), None)
            raise

    def is_results(self, node: Node) -> bool:
        """Whether this node is that of the results."""
        return node is self._results()
