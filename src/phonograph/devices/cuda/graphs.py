"""How CUDA graphs are captured.

While a stream is captured, what is launched on it does not run: it becomes a node of a graph, a kernel or a copy with all its
parameters, that waits for other nodes. `Graphs` captures those of one call.

Other streams that the call has let wait for its own belong to the capture, from there on; at the end of each graph its own
waits for them.

`thread_local` capture mode leaves other threads alone: a data loader may pin memory meanwhile. There is no synchronize
and no empty_cache. torch's own context manager does both each time, hides the real exception behind "operation failed
due to a previous error during capture", and leaves the thread on the capture stream then.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable

import torch

from ..._torch import modes as torch_modes
from ..._torch.cuda import OnStream
from ...guards.hyperparameters import Dials
from ...state.rng import Known
from . import driver
from .bodies import Bodies, Place
from .edges import Edges
from .value_checks import Answers

__all__ = ["Graph", "Graphs", "Segment", "quietly"]


class Graph(torch.cuda.CUDAGraph):
    """One that can go at any time. To destroy a graph invalidates a capture of this thread, and where that is `global` (as by
    default in torch) of any: and what is garbage goes whenever the collector likes, also while others capture."""

    def reset(self) -> None:
        with driver.unsafe_calls():
            super().reset()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.reset()


class Segment:
    """One graph, as it is captured: with its copies at the edges, the nodes of optimizers' steps, and the generators whose
    states it has `drawn` from."""

    def __init__(self, graph: Graph, stream: int, bodies: Bodies) -> None:
        self.graph = graph
        self.bodies = bodies
        self.edges = Edges(stream, [], [])
        self.nodes = driver.counting(stream)
        self.steps: set[int] = set()
        self.drawn: list[torch.Generator] = []
        self.lent: list[torch.Generator] = []  # those of compiled code's own


class Graphs:
    """The graphs of one call, captured one after the other in one pool: there is one, and another after each live operator."""

    def __init__(
        self, stream: torch.cuda.Stream, handle: tuple[int, int], generators: list[torch.Generator], states: Known,
        dials: Dials | None = None,
    ) -> None:  # fmt: skip
        self.segments: list[Segment] = []
        self.others: dict[int, torch.cuda.Stream] = {}  # streams on which work was captured besides
        self._on = stream
        self._stream = stream.cuda_stream
        self._handle = handle
        self._generators = generators
        self._states = states
        self._place = Place(states.generators[0])
        self._dials = dials
        self._open: Graph | None = None  # which is captured
        self.answers: Answers | None = None  # of the checks that the call makes

    def begin(self) -> None:
        graph = Graph(keep_graph=True)
        for g in self._generators:
            graph.register_generator_state(g)
        graph.capture_begin(pool=self._handle, capture_error_mode="thread_local")  # type: ignore[arg-type]
        self._open = graph
        bodies = Bodies(self._on, self._handle, self._place, self.join, self.fork)
        self.segments.append(Segment(graph, self._stream, bodies))
        if self._dials is not None:
            self._dials.stepping = _collecting(self._stream, self.segments[-1].steps)

    def copy_in(self, slots: list[torch.Tensor], arguments: list[torch.Tensor]) -> None:
        """To be called when the first has begun."""
        self.segments[0].edges = Edges(self._stream, slots, arguments)

    def nodes(self) -> int:
        """How many nodes the one has so far that is captured."""
        return self.segments[-1].nodes()

    def bodies(self) -> Bodies:
        """Those of the one that is captured."""
        return self.segments[-1].bodies

    def launches(self, places: Iterable[range]) -> list[driver.Launch]:
        """The kernels at these places of the one that is captured, but for the copies of arguments."""
        return [driver.launch_of(node) for node in self._at(places) if driver.kind(node) == driver.KERNEL]

    def words(self, places: Iterable[range]) -> set[int]:
        """What the kernels and copies at these places are given, addresses among it."""
        return {word for node in self._at(places) for word in driver.words_of(node)}

    def _at(self, places: Iterable[range]) -> list[int]:
        nodes, copies = driver.nodes(driver.captured_graph(self._stream)), self.segments[-1].edges.nodes
        wanted = [i for place in places for i in place]
        if wanted and max(wanted) >= len(nodes):  # (a capture that has failed has no nodes any more)
            raise RuntimeError("operation failed due to a previous error during capture")
        return [nodes[i] for i in wanted if nodes[i] not in copies]

    def join(self) -> None:
        """Wait for what was captured on other streams. To be called before the end."""
        for other in self.others.values():
            self._on.wait_stream(other)

    def fork(self) -> None:
        """Let the others wait for what comes next."""
        for other in self.others.values():
            other.wait_stream(self._on)

    def look_at_answers(self) -> None:
        """To be called before the end of each, and before what is copied out."""
        if self.answers is not None and self.answers.new:
            with torch_modes.without_modes(), OnStream(self._on):
                self.answers.keep()

    def end(self) -> None:
        if (failed := self.bodies().failed) is not None:
            raise failed
        self.segments[-1].drawn, self.segments[-1].lent = self._states.drawn(), self._states.lone
        self._end()
        self.bodies().over()

    def _end(self) -> None:
        assert self._open is not None
        quietly(self._open.capture_end)
        self._open = None

    def next(self) -> None:
        with torch_modes.without_modes(), OnStream(self._on):  # a generator's numbers are put into the graph by operators
            self.join()
            self.look_at_answers()
            self.end()
            self.begin()
            self.fork()

    def give_up(self) -> None:
        """Nothing is captured any more, and what was is forgotten. May be done again, and where nothing has begun."""
        if self._open is not None:
            known = self.segments and self.segments[-1].graph is self._open
            driver.capture_nothing(self._stream, self.bodies().outer if known else 0)
            with OnStream(self._on):  # the call may have left another one current
                self._end()
        for segment in self.segments:
            segment.graph.reset()
        self.segments.clear()


def quietly(end: Callable[[], None]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*CUDA Graph is empty.*")
        end()


def _collecting(stream: int, nodes: set[int]) -> Callable[[bool], None]:
    """Collects the nodes that are captured between a call with True and one with False."""
    before: list[set[int]] = []

    def tell(begins: bool) -> None:
        now = driver.captured_nodes(stream)
        if begins:
            before.append(now)
        elif before:
            nodes.update(now - before.pop())

    return tell
