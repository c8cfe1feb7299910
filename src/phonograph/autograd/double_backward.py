"""A recorded call whose backward is itself differentiated (`create_graph=True`).

The graph of autograd that the capture has left behind has numbers in place of what was saved, and is otherwise eager's: it
gives derivatives of any order. So such a backward runs live through it, over what the forward has saved. What is differentiated
later is that very graph, and not another that a second forward would make: neither random numbers, nor what was written since,
nor code that runs twice comes into it.

It stays private, because what its numbers stand for is known only while a backward of the call runs. In the user's graph the
gradients that it gives come out of a node (`_Given`) that leads to where the gradients of the call's results came from, and to
what the call depends on. So several nodes lead into one private graph: that of the results, and those of such gradients, which
have grown it. In a backward they leave what arrives to the last of them, so that gradients are added up where they are in
eager, in the same order. But what has grown is run before the node of the results comes, as in eager: what others give for a
weight is added between. (Not where code of the user's runs in the backward, which would see parts of gradients.)
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .._torch.autograd import backward_id, keeps_graph, when_backward_ends, will_run
from ..python.identity import identity
from .saved import spent

__all__ = ["Arrived", "Ends", "Leaf", "Twice", "between", "border", "handed_out", "leaf_of", "nothing_through"]

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


def between(ends: Iterable[GradientEdge], but: Container[Any]) -> set[Any]:
    """The nodes to which these lead, `but` some and what is behind them, and leaves."""
    found, work = set[Any](), [end.node for end in ends]
    while work:
        node = work.pop()
        if not (node in but or node in found or getattr(node, "variable", None) is not None):
            found.add(node)
            work.extend(following for following, _ in node.next_functions if following is not None)
    return found


def border(ends: Ends, stops: Set[Any]) -> list[GradientEdge]:
    """Where the ways from these places enter the nodes at which they stop."""
    nodes = between((end for end, _ in ends), stops)
    return [GradientEdge(node, i) for node, i in {edge for n in nodes for edge in n.next_functions if edge[0] in stops}]


@contextmanager
def nothing_through(nodes: Iterable[Any]) -> Iterator[None]:
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

    def __init__(self, results: Any, count: int, inner: Set[Any], starts: Set[Any]) -> None:
        """`results` is the node of its results, of which there are so many; `inner` the nodes of the graph of the capture,
        `starts` those where it begins."""
        self._results = weakref.ref(results)
        self._given: list[weakref.ref[Any]] = []
        self._count = count
        self._running: dict[int, Arrived] = {}
        ways = Counter(node for n in inner for node, _ in n.next_functions if node in starts)
        self.stops = inner | {node for node, count in ways.items() if count > 1}
        """Where gradients arrive from what has grown, and others are added to them in the graph of the capture."""
        self.read: set[int] = set()
        """The numbers of what a backward that is to be differentiated has read, and autograd would not see written."""

    def add(self, node: Any) -> None:
        """Gradients come out of this one."""
        self._given = [*(ref for ref in self._given if ref() is not None), weakref.ref(node)]

    def arrive(self, node: Any, grads: Sequence[torch.Tensor | None], leaves: Iterable[Leaf]) -> tuple[Arrived, list[Any]]:
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

    def is_results(self, node: Any) -> bool:
        """Whether this node is that of the results."""
        return node is self._results()


def handed_out(flight: Any, found: list[torch.Tensor | None], leaves: Iterable[Leaf]) -> list[torch.Tensor | None]:
    """Gradients of the private graph, which depends on these leaves, as gradients of the user's."""
    attached = [i for i, t in enumerate(found) if t is not None and t.requires_grad]
    if not attached:
        return found
    known = list(leaves)
    private = [leaf.private for leaf in known]
    inputs = [*(leaf.users for leaf in known), *flight.sources]
    with torch.enable_grad():
        made = _Given.apply(flight, [found[i] for i in attached], private, *inputs)
    flight.twice.add(made[0].grad_fn)
    handed = list(found)
    for i, t in zip(attached, made, strict=True):
        handed[i] = t
    return handed


class _Given(torch.autograd.Function):
    """The gradients that a backward has given: of tensors in the private graph that depend on `private` leaves. The inputs are
    what these stand for, and what the call depends on."""

    @staticmethod
    def forward(
        ctx: Any, flight: Any, found: list[torch.Tensor], private: list[torch.Tensor], *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.flight, ctx.private = flight, private
        ctx.ends = [*map(get_gradient_edge, found)]
        ctx.save_for_backward(*inputs[: len(private)])
        ctx.set_materialize_grads(False)
        return tuple([t.detach() for t in found])  # which shares its version

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        flight, private = ctx.flight, ctx.private
        if ctx.ends is None:
            raise spent()
        leaves = [Leaf(*pair) for pair in zip(private, ctx.saved_tensors, strict=True)]
        ends = [(end, grad) for end, grad in zip(ctx.ends, grads, strict=True) if grad is not None]
        if torch.is_grad_enabled():
            ends = [(end, leaf_of(grad, leaves)) for end, grad in ends]
        nodes = [node for node, _ in ctx.next_functions[: len(private)]]
        asked = [i for i, node in enumerate(nodes) if node is not None and will_run(node)]
        found = flight.joint.again(flight, ctx, (), ends, leaves, [private[i] for i in asked])
        if not keeps_graph():
            ctx.ends = None
        count = len(found) - len(asked)
        toward = dict(zip(asked, found[count:], strict=True))
        return (None, None, None, *map(toward.get, range(len(private))), *found[:count])
