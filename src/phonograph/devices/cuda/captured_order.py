"""A look at graphs that anybody captures: is each two of their operators in order that work on one memory?

Work on several streams is in order where one waits for the other (events, `wait_stream`). Where a wait was forgotten, the host
mostly makes up for it: it is slow. A graph begins everything that may begin, so that it is the replay that is wrong.

While a graph is captured, its operators are noted, with the memory that they are given, and make. At its end the driver tells
of its edges. Two operators are accused of which one writes, by its schema, a byte that the other is given or makes, and no path
leads from one to the other. Nothing is said of memory that is not known so well, but how many nodes that concerns: those that
no operator has launched (compiled code, Triton), and those of operators whose schema nobody has looked at. Nor are tensors with
gaps looked at, of which two may lie in each other, nor what an operator is given for its shape alone (`zeros_like`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ..._torch.dynamic import Args, Kwargs
from ..._torch.modes import TorchDispatchMode
from ..._torch.operators import OpOverload
from ..._torch.tensors import has_memory
from ...aten.operators import meaning, operands, tensors_in, written_by
from ...memory.pool import dense, memory_of
from ...memory.spans import Spans
from ...python.origin import users_line
from ..order import Edge, Node, unordered
from . import driver
from .graphs import Graph
from .places import lies
from .rewired import all_edges

__all__ = ["CapturedOrder", "Race", "captures_checked"]


_SHAPES = re.compile(r"_like(_|$)|::new_")  # in names of operators that look at the shape of what they are given alone


class Race(NamedTuple):
    """Two operators that touch the same memory, of which neither waits for the other."""

    first: str
    """The operator that was launched first, with the user's line."""
    then: str
    nbytes: int
    """How much of what one of them writes the other touches."""

    def __str__(self) -> str:
        what = f"touch the same {self.nbytes} bytes, which one of them writes"
        return f"{self.first} and {self.then} {what}: neither waits for the other"


class CapturedOrder(NamedTuple):
    """What is known of the order of one graph."""

    nodes: int
    races: tuple[Race, ...]
    unknown: int
    """Nodes of which nobody knows what they touch: they were not looked at."""

    def __str__(self) -> str:
        looked = f"{self.nodes} nodes, of which {self.unknown} were not looked at"
        return "\n".join([f"{'out of order' if self.races else 'in order'}: {looked}", *(f"  {race}" for race in self.races)])


class _Called(NamedTuple):
    """An operator, and the nodes that it has launched, without the last."""

    name: str
    begins: int
    ends: int
    node: Node
    known: bool


class _Watch(TorchDispatchMode):
    """Notes the operators of one capture."""

    def __init__(self, stream: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stream, self._nodes = stream, driver.counting(stream)
        self._called: list[_Called] = []

    def __torch_dispatch__(self, func: Any, types: object, args: Args = (), kwargs: Kwargs | None = None) -> object:
        begins = self._nodes()
        out = func(*args, **(kwargs or {}))
        if (ends := self._nodes()) > begins:
            self._called.append(_called(func, args, kwargs or {}, out, begins, ends))
        return out

    def found(self) -> CapturedOrder:
        """To be called before the end of the capture."""
        graph = driver.captured_graph(self._stream)
        handles = driver.nodes(graph)
        numbers = {node: i for i, node in enumerate(handles)}
        edges = [(numbers[a], numbers[b]) for a, b, _ in all_edges(graph or 0)]
        return checked(len(handles), self._called, edges)


def _called(func: object, args: Args, kwargs: Kwargs, out: object, begins: int, ends: int) -> _Called:
    name = f"{func} at {users_line() or 'no line of yours'}"
    if not isinstance(func, OpOverload) or not (m := meaning(func)).compiled:
        return _Called(name, begins, ends, Node(name), known=False)
    given = [t for t in operands(args, kwargs) if has_memory(t) and not _SHAPES.search(m.name)]
    made = [t for t in tensors_in((out,), []) if has_memory(t)]
    old = {memory_of(t)[0] for t in operands(args, kwargs) if has_memory(t)}
    written = [*written_by(m, args, kwargs), *(t for t in made if memory_of(t)[0] not in old)]
    reads, writes = (Spans(lies(t) for t in ts if t.is_cuda and has_memory(t) and dense(t)) for ts in (given, written))
    return _Called(name, begins, ends, Node(name, reads, writes), known=True)


def checked(count: int, called: Sequence[Any], edges: Sequence[Edge]) -> CapturedOrder:
    """The order of a graph of so many nodes, that operators have launched."""
    of: list[int | None] = [None] * count
    for number, one in enumerate(called):  # those that others consist of come first
        for node in range(one.begins, one.ends):
            of[node] = number if of[node] is None else of[node]
    nodes = [called[number].node if number is not None else Node("") for number in of]
    found = {(of[a], of[b]) for a, b in unordered(nodes, edges)}
    pairs = sorted((a, b) for a, b in found if a is not None and b is not None and a != b)
    races = [_race(called[a].node, called[b].node) for a, b in pairs]
    return CapturedOrder(count, tuple(races), sum(number is None or not called[number].known for number in of))


def _race(first: Node, then: Node) -> Race:
    both = (first.reads | first.writes) - ((first.reads | first.writes) - (then.reads | then.writes))
    written = both - (both - (first.writes | then.writes))
    return Race(first.name, then.name, written.nbytes)


@contextmanager
def captures_checked(tell: Callable[[CapturedOrder], object]) -> Iterator[None]:
    """`tell` the order of each graph that is captured meanwhile, but for those of recordings."""
    kind: Any = torch.cuda.CUDAGraph
    begin, end, watches = kind.capture_begin, kind.capture_end, dict[int, Any]()

    def begins(graph: object, *args: Any, **kwargs: Any) -> None:
        begin(graph, *args, **kwargs)
        if not isinstance(graph, Graph):
            watches[id(graph)] = watch = _Watch(torch.cuda.current_stream().cuda_stream)
            watch.__enter__()  # type: ignore[no-untyped-call]

    def ends(graph: object, *args: Any, **kwargs: Any) -> None:
        found = None
        if (watch := watches.pop(id(graph), None)) is not None:
            watch.__exit__(None, None, None)
            found = _found(watch)
        end(graph, *args, **kwargs)  # which raises where the capture has failed
        if found is not None:
            tell(found)

    kind.capture_begin, kind.capture_end = begins, ends
    try:
        yield
    finally:
        kind.capture_begin, kind.capture_end = begin, end


def _found(watch: _Watch) -> CapturedOrder | None:
    try:
        return watch.found()
    except driver.DriverError:  # of a capture that has failed
        return None
