"""CUDA graphs: how they are captured, and how they are played.

While a stream is captured, what is launched on it does not run: it becomes a node of a graph, a kernel or a copy with all its
parameters, that waits for other nodes. `Graphs` captures those of one call. A graph is then *instantiated*: from there on a
launch of the whole costs the CPU about as much as one kernel, and which nodes there are is settled. Their parameters are not.
`GraphProgram` sets two kinds of them anew before a launch: the addresses of the copies at the graph's ends (`_Edges`), and
numbers in the kernels of optimizers' steps, such as the learning rate. The driver wants to be told the node of the graph as it
was captured; so that one is kept as well.

A launch can go to the driver directly. But where a graph draws random numbers, its kernels read from memory where the generator
stands, and only torch can write that: so such a launch goes through torch.

Other streams that the call has let wait for its own belong to the capture, from there on; at the end of each graph its own
waits for them. A replay goes to the caller's stream alone. But code outside may count on the order of what it has given to one
of the others: so a launch waits for them, and they for the launch.

`thread_local` capture mode leaves other threads alone: a data loader may pin memory meanwhile. There is no synchronize
and no empty_cache. torch's own context manager does both each time, hides the real exception behind "operation failed
due to a previous error during capture", and leaves the thread on the capture stream then.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any

import torch

from ..._torch import modes as torch_modes
from ..._torch.cuda import OnStream, current_device, raw_stream
from ..._torch.tensors import address, maker
from ...capture.recording import Tensors
from ...distributed.watchdog import Watched, launches, unwatch, watch
from ...guards.hyperparameters import Dials
from ...memory.pool import Fill, dense
from ...memory.spans import Spans
from ...state.rng import Known, Rewind, put, put_offset, reset
from . import driver
from .dispatch import CudaWatch
from .value_checks import Answers

__all__ = ["CommunicatingProgram", "Graph", "GraphProgram", "Graphs", "quietly"]

_thread = threading.local()

_SMALL = 32 << 10  # bytes that the kernel for several copies without delay: it has one block for each 256 KiB or less
_LARGE = 1 << 20  # bytes; beyond, a memcpy node copies
# A copy of words to words of the same type is a memcpy node, to words of another type a kernel, of which the bits are the same.
_OTHER = {torch.int32: torch.uint32, torch.uint8: torch.int8}


class _Edges:
    """Copies at the beginning of a graph, from the arguments to their slots, and at its end, from results to memory of
    the caller's own. They are nodes of the graph itself, and get their outer addresses before each launch: that costs
    the CPU less than a copy beside the graph, and the GPU less than another launch.

    Kernels copy: one for several small tensors, one for each that is larger or alone. To give the latter their addresses costs
    the CPU 0.8 us each (1.8 for the former), and a memcpy node 1.2 us (H200). It is the kernel that converts types, which most
    programs have in use: to load another one takes the driver 10 to 20 ms.

    Only what lies dense in memory is copied so; where one argument does not, all are copied beside the graph.
    """

    def __init__(self, stream: int, slots: list[torch.Tensor], arguments: list[torch.Tensor]) -> None:
        """Must be made where the capture has begun, before anything else is captured."""
        self.slots = slots
        self.addresses: list[int] = []
        self.nodes: set[int] = set()
        self._stream = stream
        self.usable = all(map(dense, arguments)) and len(set(map(address, arguments))) == len(arguments)
        if self.usable:
            self._copy(slots, arguments)
            self.addresses += map(address, arguments)
            self.nodes |= driver.captured_nodes(stream)

    def copy_out(self, results: list[torch.UntypedStorage]) -> None:
        """To be called last in the capture."""
        if self.usable:
            before = driver.captured_nodes(self._stream)
            with torch.inference_mode(False), torch.no_grad():
                ours = [torch.empty(0, dtype=torch.uint8, device=r.device).set_(r) for r in results]
                theirs = [torch.empty_like(t) for t in ours]
            self._copy(theirs, ours)
            self.addresses += map(address, theirs)
            self.nodes |= driver.captured_nodes(self._stream) - before

    @staticmethod
    def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        together: dict[Any, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
        for i, (t, s) in enumerate(zip(targets, sources, strict=True)):
            dtype = torch.int32 if _wide(t) and _wide(s) else torch.uint8
            together[dtype if s.nbytes <= _SMALL else i].append((_row(t, dtype), _row(s, dtype)))
        for pairs in together.values():
            (t, s), *more = pairs
            if more:
                torch._foreach_copy_([t for t, _ in pairs], [s for _, s in pairs])
            elif s.nbytes <= _LARGE:
                t.copy_(s.view(_OTHER[s.dtype]))
            else:
                t.copy_(s)


class Graph(torch.cuda.CUDAGraph):
    """One that can go at any time. To destroy a graph invalidates a capture of this thread, and where that is `global` (as by
    default in torch) of any: and what is garbage goes whenever the collector likes, also while others capture."""

    def reset(self) -> None:
        with driver.unsafe_calls():
            super().reset()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.reset()


class _Segment:
    """One graph, as it is captured: with its copies at the edges, the nodes of optimizers' steps, and the generators whose
    states it has `drawn` from."""

    def __init__(self, graph: Graph, edges: _Edges) -> None:
        self.graph = graph
        self.edges = edges
        self.steps: set[int] = set()
        self.drawn: list[torch.Generator] = []
        self.lent: list[torch.Generator] = []  # those of compiled code's own


class Graphs:
    """The graphs of one call, captured one after the other in one pool: there is one, and another after each live operator."""

    def __init__(
        self, stream: torch.cuda.Stream, handle: tuple[int, int], generators: list[torch.Generator], states: Known,
        dials: Dials | None = None,
    ) -> None:  # fmt: skip
        self.segments: list[_Segment] = []
        self.others: dict[int, torch.cuda.Stream] = {}  # streams on which work was captured besides
        self._on = stream
        self._stream = stream.cuda_stream
        self._handle = handle
        self._generators = generators
        self._states = states
        self._dials = dials
        self._open = False
        self.answers: Answers | None = None  # of the checks that the call makes

    def begin(self) -> None:
        graph = Graph(keep_graph=True)
        for g in self._generators:
            graph.register_generator_state(g)
        graph.capture_begin(pool=self._handle, capture_error_mode="thread_local")  # type: ignore[arg-type]
        self._open = True
        self.segments.append(_Segment(graph, _Edges(self._stream, [], [])))
        if self._dials is not None:
            self._dials.stepping = _collecting(self._stream, self.segments[-1].steps)

    def copy_in(self, slots: list[torch.Tensor], arguments: list[torch.Tensor]) -> None:
        """To be called when the first has begun."""
        self.segments[0].edges = _Edges(self._stream, slots, arguments)

    def join(self) -> None:
        """Wait for what was captured on other streams. To be called before the end."""
        for other in self.others.values():
            self._on.wait_stream(other)

    def look_at_answers(self) -> None:
        """To be called before the end of each, and before what is copied out."""
        if self.answers is not None and self.answers.new:
            with torch_modes.without_modes(), OnStream(self._on):
                self.answers.keep()

    def end(self) -> None:
        self.segments[-1].drawn, self.segments[-1].lent = self._states.drawn(), self._states.lone
        self._end()

    def _end(self) -> None:
        quietly(self.segments[-1].graph.capture_end)
        self._open = False

    def next(self) -> None:
        with torch_modes.without_modes(), OnStream(self._on):  # a generator's numbers are put into the graph by operators
            self.join()
            self.look_at_answers()
            self.end()
            self.begin()
            for other in self.others.values():
                other.wait_stream(self._on)

    def give_up(self) -> None:
        if self._open:
            driver.capture_nothing(self._stream)
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


def _wide(t: torch.Tensor) -> bool:
    """Whether it can be copied as words of 4 bytes. (Not of 8: of these, a kernel takes 32 bytes at once where the addresses
    that it is captured with allow it. Those of later calls are alike in what is left after division by 16, and no further.)"""
    return not (t.nbytes % 4 or t.data_ptr() % 4 or t.storage_offset() * t.element_size() % 4)


def _row(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The memory of a dense tensor as a row of another type."""
    start = t.storage_offset() * t.element_size() // dtype.itemsize
    with torch.inference_mode(False), torch.no_grad():
        row = torch.empty(0, dtype=dtype, device=t.device)
        return row.set_(t.untyped_storage(), start, (t.nbytes // dtype.itemsize,), (1,))


class GraphProgram:
    """An instantiated CUDA graph."""

    def __init__(self, segment: _Segment, footprint: Spans, watch: CudaWatch, keep: Any, device: int, rewind: Rewind | None,
                 surplus: int, others: Collection[torch.cuda.Stream]) -> None:  # fmt: skip
        graph, edges = segment.graph, segment.edges
        self._others = tuple((other, torch.cuda.Event()) for other in others)
        self._launched = torch.cuda.Event()
        self.footprint = footprint
        self.operators = watch.operators
        self.owned = Spans()
        self._graph: Graph | None = graph
        self._keep = keep
        self._device = device
        graph.instantiate()
        self._stream = -1
        self._launch: Callable[[], int] = int  # on that stream
        self._states = Known(segment.drawn, segment.lent)
        self._dropout = watch.dropout
        self.amiss = self._look if self._states.may_mix or self._dropout is not None else None
        self._numbers: driver.KernelNumbers | None = None
        self._steps = segment.steps  # the nodes of optimizers' steps, in which alone there are numbers to be set
        self._random = bool(segment.drawn)
        self._sets: torch.Generator | None = torch.cuda.default_generators[device] if watch.sets_states else None
        self._rewind = rewind if watch.sets_states else None
        self._own = list(watch.own.items())
        self._own_rewind = rewind
        self.own_generators: Sequence[torch.Generator] = [g for own in watch.own for g in own.forward]
        self._surplus = surplus
        self.outs: tuple[torch.Tensor, ...] = ()
        self._new: list[Callable[[], torch.Tensor]] = []
        self._fill = Fill(edges.slots)
        self._context = driver.context()
        self._pointers: driver.Pointers | None = None
        if edges.nodes:
            try:
                self._pointers = driver.Pointers(graph.raw_cuda_graph_exec(), edges.nodes, edges.addresses)
            except driver.DriverError:
                driver.disable(graph.raw_cuda_graph_exec(), edges.nodes)

    def _look(self) -> str | None:
        if self._states.may_mix and self._states.mixed():
            return "which random generators have one state"
        return None if self._dropout is None else self._dropout.amiss()

    def copies(self, outs: tuple[torch.Tensor, ...]) -> None:
        self.outs = outs
        self._new = [maker(o) for o in outs]

    def run(self, sources: Tensors) -> list[torch.Tensor]:
        if current_device() != self._device or not hasattr(_thread, "has_context"):
            return self._run_elsewhere(sources)
        if self._others:
            self._wait_for_others()
        targets, inside = [new() for new in self._new], self._pointers is not None  # of the graph: the copies
        if self._pointers is not None:
            self._pointers.set([*map(address, sources), *map(address, targets)])
        elif sources:
            with torch.no_grad():
                self._fill(sources)
        if self._dropout is not None:
            self._dropout.fetch()
        if self._random:
            self._go_random()
        elif code := self._launch() if raw_stream(self._device) == self._stream else self._launch_elsewhere():
            raise driver.DriverError(f"cuGraphLaunch failed with CUresult {code}")
        if self._dropout is not None:
            self._dropout.give_back()
        if targets and not inside:
            with torch.no_grad():
                torch._foreach_copy_(targets, self.outs)
        if self._others:
            self._launched.record()
            for other, _ in self._others:
                self._launched.wait(other)
        return targets

    def _wait_for_others(self) -> None:
        current = torch.cuda.current_stream()
        for other, event in self._others:
            event.record(other)
            event.wait(current)

    def _run_elsewhere(self, sources: Tensors) -> list[torch.Tensor]:
        """On a thread that has not used CUDA yet, or with another device current: the null stream is that device's."""
        if driver.context() is None:
            driver.set_context(self._context)
        _thread.has_context = True
        with torch.cuda.device(self._device):
            return self.run(sources)

    def _launch_elsewhere(self) -> int:
        """On another stream than last time, and from now on."""
        if self._graph is None:
            raise RuntimeError("this recording was closed while it was played, because a process group has ended")
        self._stream = raw_stream(self._device)
        self._launch = driver.launcher(self._graph.raw_cuda_graph_exec(), self._stream)
        return self._launch()

    def _go_random(self) -> None:
        """Through torch, which tells the graph where the generators stand and moves them on."""
        assert self._graph is not None
        for own, rewinds in self._own:
            if rewinds:
                assert self._own_rewind is not None
                self._own_rewind.begin_own(own)
                continue
            own.begin()
            if rewinds is not None:
                own.put_backward(own.begins)
        generator, now = self._sets, None
        if generator is not None and self._rewind is not None:
            now = generator.get_state()
            self._rewind.begin()
        others = self._states.lend()
        try:
            self._graph.replay()
        finally:
            self._states.take_back(others)
        if generator is None:
            return
        if now is not None:
            put(generator, now)
        elif self._surplus:
            put_offset(generator, generator.get_offset() - self._surplus)
        reset(generator)

    def set_numbers(self, numbers: Mapping[float, float]) -> Set[float]:
        if not numbers:
            return frozenset()
        assert self._graph is not None
        if self._numbers is None:
            self._numbers = driver.KernelNumbers(self._graph.raw_cuda_graph_exec(), self._steps, numbers)
        self._numbers.set(numbers)
        return self._numbers.found

    def holds(self, numbers: Set[float]) -> bool:
        assert self._graph is not None
        return driver.holds(self._graph.raw_cuda_graph(), numbers)

    def close(self) -> None:
        if self._graph is not None:
            self._graph.reset()
        self._graph = None
        self._keep, self._own = None, []
        self._dropout = None
        self._pointers, self._random, self._stream = None, False, -1  # a live part may close what goes on after it


class CommunicatingProgram(GraphProgram):
    """One of which each launch waits for other ranks: somebody has to watch how long it does."""

    def __init__(self, segment: _Segment, footprint: Spans, watch_: CudaWatch, keep: Any, device: int, *others: Any) -> None:
        super().__init__(segment, footprint, watch_, keep, device, *others)
        self._watched = Watched(torch.device("cuda", device), watch_.collectives, watch_.groups)
        self._launches = launches(self._watched.device, lambda: _Mark(device))
        watch(self, self._watched)

    def run(self, sources: Tensors) -> list[torch.Tensor]:
        if current_device() != self._device or not hasattr(_thread, "has_context"):
            return self._run_elsewhere(sources)
        targets = super().run(sources)
        self._launches.note(self._watched)
        return targets

    def close(self) -> None:
        unwatch(self)
        super().close()


class _Mark:
    """In the current stream of a device."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._event = driver.Event()
        self.reached = self._event.reached

    def put(self) -> None:
        self._event.record(raw_stream(self._device))
