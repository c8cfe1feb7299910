"""A recorded call whose backward is itself differentiated (`create_graph=True`).

The graph of autograd that the capture has left behind has numbers in place of what was saved, but is otherwise eager's: it gives
derivatives of any order. So such a backward runs live through it, over what the forward has saved. What is differentiated later
is that very graph, and not another that a second forward would make: neither random numbers, nor what was written since, nor
code that runs twice comes into it.

It stays private, because what its numbers stand for is known only while a backward of the call runs. In the user's graph the
gradients that it gives come out of a node (`_Given`) that leads to where the gradients of the call's results came from, and to
what the call depends on. So several nodes lead into one private graph: those of such gradients, and that of the results. In a
backward the last of them goes through it, with what has arrived at all; where ways meet, gradients are added up as in eager.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .identity import identity
from .saved import spent
from .torch_private import backward_id, keeps_graph, when_backward_ends, will_run

__all__ = ["Ends", "Leaf", "Twice", "handed_out", "leaf_of"]

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


class Arrived(NamedTuple):
    """What has come to the nodes of one call in one backward."""

    grads: list[torch.Tensor | None]
    """Of the results."""
    ends: Ends
    leaves: dict[int, Leaf]
    """On which the ends depend, each once."""
    nodes: set[int]


class Twice:
    """The nodes that lead into the private graph of one call, and what has come to them in the backwards that run."""

    def __init__(self, results: Any, count: int) -> None:
        """`results` is the node of its results, of which there are so many."""
        self._nodes = [weakref.ref(results)]
        self._count = count
        self._running: dict[int, Arrived] = {}
        self.read: set[int] = set()
        """The numbers of what was saved and read by a backward that is to be differentiated."""

    def add(self, node: Any) -> None:
        """Gradients come out of this one."""
        self._nodes = [ref for ref in self._nodes if ref() is not None]
        self._nodes.append(weakref.ref(node))

    def arrive(self, node: Any, grads: Sequence[torch.Tensor | None], ends: Ends, leaves: Iterable[Leaf]) -> Arrived | None:
        """This comes to a node. Returns what has come to all, if the running backward comes to no more of them."""
        number, running = backward_id(), self._running
        if number not in running:
            running[number] = Arrived([None] * self._count, [], {}, set())
            when_backward_ends(lambda: running.pop(number, None) and None)
        here = running[number]
        if grads:
            here.grads[:] = grads
        here.ends.extend(ends)
        here.leaves.update((identity(leaf.private), leaf) for leaf in leaves)
        here.nodes.add(identity(node))
        others = (other for ref in self._nodes if (other := ref()) is not None and identity(other) not in here.nodes)
        return None if any(map(will_run, others)) else running.pop(number)


def handed_out(flight: Any, found: list[torch.Tensor | None], leaves: Iterable[Leaf]) -> list[torch.Tensor | None]:
    """Gradients of the private graph, which depends on these leaves, as gradients of the user's."""
    attached = [i for i, t in enumerate(found) if t is not None and t.requires_grad]
    if not attached:
        return found
    known = list(leaves)
    private = [leaf.private for leaf in known]
    inputs = [*(leaf.users for leaf in known), *flight.sources]
    with torch.enable_grad():
        made = _Given.apply(flight, [found[i] for i in attached], private, *inputs)  # type: ignore[no-untyped-call]
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
        flight.joint.still_there(flight)
        arrived = [(end, grad) for end, grad in zip(ctx.ends, grads, strict=True) if grad is not None]
        leaves = [Leaf(*pair) for pair in zip(private, ctx.saved_tensors, strict=True)]
        toward = _toward(ctx, flight, arrived, leaves)
        if not keeps_graph():
            ctx.ends = None
        sources = flight.joint.again(flight, ctx, (), arrived, leaves)
        return (None, None, None, *toward, *sources)


def _toward(ctx: Any, flight: Any, arrived: Ends, leaves: list[Leaf]) -> list[torch.Tensor | None]:
    """What flows on to the gradients of the call's results, which the user's graph has made. (It meets nothing of the call: what
    flows into that is left to the last node.)"""
    nodes = [node for node, _ in ctx.next_functions[: len(leaves)]]
    asked = [leaf for leaf, node in zip(leaves, nodes, strict=True) if node is not None and will_run(node)]
    if not (asked and arrived):
        return [None] * len(leaves)
    create, below = torch.is_grad_enabled(), list(leaves)
    grads = [leaf_of(grad, below) if create else grad for _, grad in arrived]
    found: list[torch.Tensor | None] = list(
        torch.autograd.grad(
            [end for end, _ in arrived], [leaf.private for leaf in asked], grads,
            retain_graph=True, create_graph=create, allow_unused=True,
        )
    )  # fmt: skip
    given = dict(zip(map(identity, asked), handed_out(flight, found, below) if create else found, strict=True))
    return [given.get(identity(leaf)) for leaf in leaves]
