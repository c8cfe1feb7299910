"""The graph of autograd that the capture of a forward leaves behind.

Gradients of the results come in at its ends, and those of what the results depend on go out at its starts. Parameters and other
leaf tensors outside are leaves of it. Arguments enter it through `Source`, a node that holds nothing: a leaf would keep the
argument's memory, and have hooks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.checkpoint import CheckpointFunction

from .._torch.dynamic import Context
from .._torch.dynamo import donates, number_of_call
from ..errors import Refusal
from ..state.compiled_generators import OwnGenerators, own_of
from .kept_by_code import NODE

__all__ = ["REENTRANT", "SOURCE", "Found", "Graph", "Source", "Start", "calls_that_draw", "names_of_saved", "walk"]


class Start(NamedTuple):
    """An argument that requires a gradient, as the graph begins there."""

    number: int
    edge: GradientEdge
    arrived: list[torch.Tensor | None]
    """Gets its gradient."""


class Source(torch.autograd.Function):
    """An argument as the captured function sees it: it has a history that ends here."""

    @staticmethod
    def forward(ctx: Context, root: torch.Tensor, t: torch.Tensor, arrived: list[torch.Tensor | None]) -> torch.Tensor:
        ctx.arrived = arrived
        ctx.set_materialize_grads(False)
        return t.detach()  # which shares its version

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor | None) -> object:
        ctx.arrived.append(grad)
        return None, None, None


SOURCE: type[object] = Source._backward_cls
"""The class of the nodes of that function..."""
REENTRANT: type[object] = CheckpointFunction._backward_cls
"""...and of those of parts that are recomputed by a backward of their own."""


@dataclass(eq=False)
class Graph:
    """One such graph: its ends, its starts, and the ways between them."""

    ends: list[GradientEdge]
    attached: list[int]
    """Numbers of the results at its ends."""
    sources: list[Start]
    """Arguments that get a gradient."""
    partial: frozenset[int]
    """Numbers of arguments on which some results do not depend."""
    parameters: list[torch.Tensor]
    """Leaf tensors outside that get a gradient."""
    stands: list[Start]
    """Starts of the first of the `parameters`. The others are leaves of the graph."""
    reaches: list[frozenset[int]]
    """One set for each end: its starts, by their places among `sources` and `parameters` taken together."""
    numbered: list[frozenset[int]]
    """One set for each end: stand-ins for Python numbers that are saved on its way. Nobody asks for these; like all that is
    saved, they are gone after the last backward."""
    lasting: bool
    """Autograd adds up gradients of some leaves on the device's own stream, where they were captured."""
    nested: bool
    """Some parts are recomputed by a backward of their own."""
    reentrant: list[torch.Tensor]
    """Leaf tensors to which such parts may add gradients."""

    def __post_init__(self) -> None:
        self.arguments = [s.number for s in self.sources]
        self.upstream = _upstream(self.ends)
        """For each end, the others on which it depends."""
        leaves = self.parameters[len(self.stands) :]
        self.starts = [*(s.edge for s in (*self.sources, *self.stands)), *map(get_gradient_edge, leaves)]


def _upstream(ends: list[GradientEdge]) -> list[list[int]]:
    if len(ends) < 2:
        return [[] for _ in ends]
    places = {(end.node, end.output_nr): i for i, end in enumerate(ends)}
    found = []
    for i, end in enumerate(ends):
        met, seen, work = set[int](), {end.node}, [end.node]
        while work:
            for node, number in work.pop().next_functions:
                if node is None:
                    continue
                met.add(places.get((node, number), i))
                if node not in seen:
                    seen.add(node)
                    work.append(node)
        found.append(sorted(met - {i}))
    return found


class Found(NamedTuple):
    """Nodes between results and where gradients flow to, leaf tensors and `Source`s: Python code among them, attention, dropout
    in it, parts that are recomputed by a backward of their own."""

    nodes: set[Node]
    leaves: list[torch.Tensor]
    sources: set[Node]
    python: list[Node]
    attention: bool
    dropout: bool
    reentrant: bool


def walk(ends: Sequence[GradientEdge]) -> Found:
    """Go through the graph from these ends."""
    found: list[torch.Tensor] = []
    python: list[Node] = []
    sources: set[Node] = set()
    attention = dropout = reentrant = False
    work = list(dict.fromkeys(end.node for end in ends))
    seen = set(work)
    while work:
        node = work.pop()
        if donates(node):
            raise Refusal("calls a torch.compile'd function whose backward writes what its forward has saved",
                          "set torch._functorch.config.donated_buffer = False before it is compiled")  # fmt: skip
        attention = attention or hasattr(node, "_saved_dropout_p")
        dropout = dropout or getattr(node, "_saved_dropout_p", 0.0) > 0
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.append(leaf)
        if isinstance(node, SOURCE):
            sources.add(node)
            continue
        if isinstance(node, NODE):
            python.append(node)
        reentrant = reentrant or isinstance(node, REENTRANT)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                work.append(following)
    return Found(seen, found, sources, python, attention, dropout, reentrant)


@cache
def names_of_saved(kind: Hashable) -> list[str]:
    """The names by which nodes of this kind show what they have saved."""
    return [name.removeprefix("_raw") for name in dir(kind) if name.startswith("_raw_saved_")]


def calls_that_draw(nodes: Iterable[Node]) -> list[tuple[OwnGenerators, int]]:
    """Calls of compiled functions whose backwards draw again what they have drawn.

    Raises:
        Refusal: of one of them it is not known where it has begun.
    """
    calls = [
        (own, number) for node in nodes if (number := number_of_call(node)) is not None and (own := own_of(node)) is not None
    ]
    if any(not own.places(number) for own, number in calls):
        raise Refusal("calls compiled code that has random generators of its own, and does not say where they stood",
                      "record the whole step")  # fmt: skip
    return calls
