"""The graph of autograd that the capture of a forward leaves behind.

Gradients of the results come in at its ends, and those of what the results depend on go out at its starts. Parameters and other
leaf tensors outside are leaves of it. Arguments enter it through `Source`, a node that holds nothing: a leaf would keep the
argument's memory, and have hooks.

Gradients are added up in the order in which eager adds them, because that rounds. Where others use a tensor as well, after the
call, their gradients come first: (c + b) + a is not c + (b + a). So the gradients of a tensor that the call uses several times
go out one by one, and the user's own graph has an edge for each.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.checkpoint import CheckpointFunction

from .._torch.autograd import made_when
from .._torch.dynamic import Context, Private
from .._torch.dynamo import donates, number_of_call
from ..errors import Refusal
from ..state.compiled_generators import OwnGenerators, own_of
from .kept_by_code import NODE

__all__ = ["REENTRANT", "SOURCE", "Found", "Graph", "Source", "Start", "Way", "calls_that_draw", "names_of_saved", "walk"]


MANY, LARGE = 256, 64 << 20
"""Where a tensor is used more often, or three times and more so that its gradients would take more bytes, they are added up
within."""


class Way(NamedTuple):
    """What leads from a node to another: the gradient of this number that the node gives."""

    node: Node
    number: int


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
        ctx.arrived, ctx.nbytes = arrived, t.numel() * t.element_size()
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
        self.toward = [
            _toward(end, {k: self.ends[k] for k in others}) for end, others in zip(self.ends, self.upstream, strict=True)
        ]
        """For each end, these with the ways on which it gives them gradients, in order; None for all that are added up."""
        leaves = self.parameters[len(self.stands) :]
        self.starts = [*(s.edge for s in (*self.sources, *self.stands)), *map(get_gradient_edge, leaves)]
        ways = {start.node: list[Way]() for start in self.starts} if not self.nested else {}
        for way, node in _ways(self.ends) if ways else ():
            if node in ways:
                ways[node].append(way)
        self.ways = [_in_order(ways.get(start.node, []), start.node) for start in self.starts]
        """For each start the ways to it in the order in which gradients come on them, if they are to be given one by one."""
        self.entries = [i for i, some in enumerate(self.ways) for _ in range(len(some) or 1)]
        """The start of each gradient that is given."""
        self.firsts = [self.entries.index(i) for i in range(len(self.starts))]
        """For each start the first of them."""

    def each(self, sums: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Gradients of the starts, as those of the entries: one for all of a start's."""
        return [sums[i] if k == self.firsts[i] else None for k, i in enumerate(self.entries)]

    def sums(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Gradients of the entries, as those of the starts."""
        found: list[torch.Tensor | None] = [None] * len(self.starts)
        for i, grad in zip(self.entries, grads, strict=True):
            before = found[i]
            found[i] = grad if before is None else before if grad is None else before + grad
        return found

    def without_gradient(
        self, edges: Sequence[tuple[Node | None, int]], grads: Sequence[torch.Tensor | None]
    ) -> list[Node | None]:  # fmt: skip
        """The nodes, of those at the entries, to which none of these gradients goes."""
        given = {i for i, grad in zip(self.entries, grads, strict=True) if grad is not None}
        return [edges[k][0] for i, k in enumerate(self.firsts) if i not in given]


def _toward(end: GradientEdge, others: dict[int, GradientEdge]) -> list[tuple[int, Way | None]]:
    """The ways from this end to others, where there are several to one and not many."""
    ways = {(other.node, other.output_nr): list[Way]() for other in others.values()}
    nodes = {other.node for other in others.values()}
    for way, node in _ways([end]) if nodes else ():
        if node in nodes:
            ways.get((node, way.node.next_functions[way.number][1]), []).append(way)
    found = list[tuple[int, Way | None]]()
    for k, other in others.items():
        found += [(k, way) for way in _few_in_order(ways[other.node, other.output_nr], 0)] or [(k, None)]
    return found


def _in_order(ways: Sequence[Way], start: Private) -> list[Way]:
    """These, if there are several and not many."""
    leaf: torch.Tensor | None = getattr(start, "variable", None)
    return _few_in_order(ways, start.nbytes if leaf is None else leaf.numel() * leaf.element_size())


def _few_in_order(ways: Sequence[Way], nbytes: int) -> list[Way]:
    few = len(ways) <= 2 or (len(ways) <= MANY and (len(ways) - 1) * nbytes <= LARGE)
    return sorted(ways, key=lambda way: (-made_when(way.node), way.number)) if len(ways) > 1 and few else []


def _ways(ends: Sequence[GradientEdge]) -> Iterator[tuple[Way, Node]]:
    """All ways between two nodes, and where they lead."""
    work = [*dict.fromkeys(end.node for end in ends)]
    seen = {*work}
    while work:
        node = work.pop()
        for i, (following, _) in enumerate(node.next_functions):
            if following is not None:
                yield Way(node, i), following
                if following not in seen:
                    seen.add(following)
                    work.append(following)


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
