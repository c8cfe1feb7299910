"""The CUDA device: CUDA graphs in one private memory pool, captured on one stream.

Nothing executes during a capture; the kernels of the call are written down with their addresses. So what a capture may
disturb is host state only, and each piece of it is set and put back here, on every path:

* the current stream (a capture needs one of its own; always the same one, because the allocator never reuses a block of
  one stream on another);
* where the allocator takes memory from;
* Python's garbage collector, which must not run a destructor with CUDA calls in the middle;
* the allocator's history, which is how a recording learns its footprint.

`thread_local` capture mode leaves other threads alone: a data loader may pin memory meanwhile. There is no synchronize
and no empty_cache. torch's own context manager does both each time, hides the real exception behind "operation failed
due to a previous error during capture", and leaves the thread on the capture stream then.
"""

from __future__ import annotations

import gc
import os
import threading
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch

from .. import torch_private
from ..dials import Dials
from ..effects import ANYONE, Effect, Starts
from ..errors import Refusal
from ..operators import Meaning, tensors_in
from ..pool import Fill, Pool, Spot, dense, extent, place_of, unowned
from ..randomness import CudaState, Known, Rewind, share_state
from ..reach import Reach
from ..recording import Program, Recording, Tensors
from ..segments import Break, Segments
from ..signature import ALIGNMENT
from ..spans import Spans
from ..torch_private import OnStream, address, backward_id, current_device, maker, raw_stream
from ..trees import flatten, unflatten
from ..watch import OperatorWatch, storage_id
from ..where import users_line
from . import cuda_memory, driver
from .base import Captured, Made

__all__ = ["CudaDevice"]

_thread = threading.local()

_HEARD = Effect("", by=ANYONE)  # of starts that are only heard of
_UNSAID = Effect("calls code of Inductor's that does not say which of its inputs it writes", "record it uncompiled", ANYONE)

_STEP = 4  # numbers that a thread draws at once

_SMALL = 32 << 10  # bytes that the kernel for all copies in about the time of a memcpy node

_REMEDIES: Mapping[str, str] = {
    "Cannot copy between CPU and CUDA tensors":
        "make constants by torch.full(..., device=), or once outside: torch.tensor(..., device=) copies from the host",
    "operation not permitted when stream is capturing": "something here waits for the device: do that outside",
}  # fmt: skip


class _Anchor:
    """Keeps a graph pool's memory: an empty graph captured in it.

    The allocator frees a pool when its last graph is gone, and refuses a handle that was once freed.

    `workspace` is where cuBLAS works in all graphs of the pool, once that is known: 32 MiB (H100, H200), which no graph
    expects to be left as they were. It is no part of any footprint, and never free.
    """

    def __init__(self, device: int, stream: torch.cuda.Stream) -> None:
        self.handle: tuple[int, int] = torch.cuda.graph_pool_handle()
        self.workspace: tuple[int, int] | None = None
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device), torch.cuda.stream(stream):
            self._graph.capture_begin(pool=self.handle, capture_error_mode="thread_local")
            _quietly(self._graph.capture_end)


def _quietly(end: Callable[[], None]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*CUDA Graph is empty.*")
        end()


class CudaWatch(OperatorWatch):
    """Also refuses host tensors: what runs on the host during a capture would not run again at a replay."""

    def __init__(
        self, device: torch.device, reach: Reach, slots: list[torch.Tensor], borrowed: list[bool], generators: list[Any],
        free: Spans, rewind: Rewind | None,
    ) -> None:  # fmt: skip
        super().__init__(device, reach, slots, borrowed)
        self._rewind = rewind
        self._rewound = False  # numbers are drawn that the forward has drawn
        self._draws: set[bool] = set()  # the values that this had when something was drawn
        self.sets_states = False
        self._registered = generators
        self._performing = 0  # operators that run within each other
        self._free = free  # what was free in the pool before: a tensor that lies there is the call's own
        self.next_segment: Callable[[], None] = _nothing
        self.cuts: list[tuple[Break, list[Spot], list[Spot]]] = []

    def _see(self, m: Meaning, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> None:
        super()._see(m, args, kwargs, tensors)
        hosts = [t for t in tensors if t.is_cpu]
        copies = m.name in ("aten::_to_copy", "aten::copy_")
        if copies and len(hosts) < len(tensors):
            target = kwargs.get("device")
            to_host = (target is not None and torch.device(target).type == "cpu") or (
                m.name == "aten::copy_" and args[0].device.type == "cpu"
            )
            if to_host:
                raise Refusal(f"{m.name} copies a tensor to the host", "return the tensor and copy it outside")
        if not hosts:
            return
        if copies and (kwargs.get("device") is not None or len(hosts) < len(tensors)):
            raise Refusal(f"{m.name} copies a host tensor to the device",
                          "copy it before the call and pass it as an argument")  # fmt: skip
        for t in hosts:
            name = self.known.get(storage_id(t))
            if name:
                raise Refusal(f"{m.name} uses {name}, a tensor on the CPU",
                              "move it to the device; a replay could not see it change")  # fmt: skip

    def frames(self) -> Starts:
        path, called = torch_private.COMPILED_GRAPH
        return {
            called: [(path, self._compiled, _UNSAID)],
            "run": [(os.path.join("triton", "runtime", "jit.py"), self._launched, _HEARD)],
        }

    def _compiled(self, frame: FrameType) -> bool:
        """Whether Inductor's code for a graph is called, whose kernels are no operators, and it does not say what it writes."""
        written = torch_private.written_by_graph(frame)
        for t in written or ():
            self.writes(t, version=-1)  # it has been counted on already
        return written is None

    def _launched(self, frame: FrameType) -> bool:
        """Never: somebody launches a Triton kernel. What it writes it does not say, unless it belongs to an operator."""
        if not self._performing:
            given = [*frame.f_locals.get("args", ()), *frame.f_locals.get("kwargs", {}).values()]
            for t in given:
                if isinstance(t, torch.Tensor):
                    self.writes(t)
        return False

    def perform(self, func: Any, m: Meaning, args: Any, kwargs: Any) -> Any:
        if m.random and _on_host(args, kwargs):
            raise self.located(Refusal(f"{m.name} draws random numbers on the CPU", "pass device= or draw outside"))
        if m.random and self._rewind is not None:
            self._draws.add(self._rewound)
            if len(self._draws) > 1:
                raise self.located(Refusal("draws random numbers of its own in its backward, besides those that it recomputes",
                                           "draw them in the forward"))  # fmt: skip
        self._performing += 1
        try:
            return super().perform(func, m, args, kwargs)
        finally:
            self._performing -= 1

    def cut(self, part: Break, inputs: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        if self.sets_states or self.states.held():
            raise Refusal(f"runs {part.form.operator.name()} live, and keeps a state of a random generator", "call it outside")
        self.cuts.append((part, [*map(Spot.of, inputs)], [*map(Spot.of, results)]))
        self.next_segment()

    def state_read(self, state: torch.Tensor, of: torch.device) -> None:
        self.states.read(state, self._rewound)

    def state_set(self, state: torch.Tensor, of: torch.device) -> None:
        if of.type == "cuda" and of.index != self.device.index:
            raise Refusal(f"sets the state of the generator of {of}", "do that outside")
        rewound = (self._rewind is not None and self._rewind.knows(state)) or self.states.meaning(state)
        if of.type == "cuda":
            self.sets_states = True
            self._rewound = rewound

    def stranger(self, m: Meaning, t: torch.Tensor) -> None:
        # A compiled part makes tensors that no operator was seen to make; whether this is one shows at the end, by its
        # address. Host constants need no watching: they are baked in.
        if t.is_cuda:
            place = (t.untyped_storage().data_ptr(), t.untyped_storage().nbytes())
            if place not in self.strangers and not self._free.covers(*place):
                self.strangers[place] = (m.name, users_line())
        else:
            super().stranger(m, t)

    def meet(self, generator: torch.Generator) -> None:
        super().meet(generator)
        if generator.device.type == "cuda" and all(not _same(generator, g) for g in self._registered):
            self._registered.append(generator)
            raise Refusal("uses a random generator that was not known before the capture", final=False)


def _nothing() -> None:
    """What comes before anything is captured."""


def _on_host(args: Any, kwargs: Any) -> bool:
    tensors = tensors_in(list(kwargs.values()), tensors_in(args, []))
    if tensors:
        return all(t.device.type == "cpu" for t in tensors)
    return torch.device(kwargs.get("device") or torch.get_default_device()).type == "cpu"


def _slot(t: torch.Tensor) -> torch.Tensor:
    """New memory with the metadata of `t`, beginning as far from an aligned address as `t` does."""
    shift = t.data_ptr() % ALIGNMENT // t.element_size()
    memory = torch.empty(shift + extent(t), dtype=t.dtype, device=t.device)
    return memory.as_strided(t.size(), t.stride(), shift)


def _places(arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Slots for these, where there is memory for them: a live call does not need any."""
    try:
        with torch.inference_mode(False):
            return [*map(_slot, arguments)]
    except torch.OutOfMemoryError:
        return []


def _same(a: torch.Generator, b: torch.Generator) -> bool:
    """Two Python objects may stand for one generator."""
    return a is b or getattr(a, "_cdata", a) == getattr(b, "_cdata", b)


class _Ghost:
    """A gradient in the pool from before the call, not kept alive: brought back from its address if it has to be."""

    def __init__(self, t: torch.Tensor) -> None:
        self.ref = weakref.ref(t)
        self.storage = storage_id(t)
        self.place = place_of(t)
        self._spot = Spot.of(t)

    def __call__(self) -> torch.Tensor | None:
        return self.ref()

    def again(self) -> torch.Tensor:
        alive = self.ref()
        if alive is not None:
            return alive
        with torch.no_grad():
            return self._spot.tensor().clone()


class _Edges:
    """Copies at the beginning of a graph, from the arguments to their slots, and at its end, from results to memory of
    the caller's own. They are nodes of the graph itself, and get their outer addresses before each launch: that costs
    the CPU less than a copy beside the graph, and the GPU less than another launch.

    A memcpy node for each, but one kernel for several small ones: to give it their addresses costs 1.8 us in all, and a
    memcpy node 1.1 us. But the kernel has one block for each 512 KiB, so that 4 MiB take it 50 us, and a node 10 (H200).

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
            dtype = torch.int64 if _wide(t) and _wide(s) else torch.uint8
            together[dtype if s.nbytes <= _SMALL else i].append((_row(t, dtype), _row(s, dtype)))
        for pairs in together.values():
            if len(pairs) == 1:
                pairs[0][0].copy_(pairs[0][1])
            else:
                torch._foreach_copy_([t for t, _ in pairs], [s for _, s in pairs])


class _Segment:
    """One graph, as it is captured: with its copies at the edges, and the nodes of optimizers' steps."""

    def __init__(self, graph: torch.cuda.CUDAGraph, edges: _Edges) -> None:
        self.graph = graph
        self.edges = edges
        self.steps: set[int] = set()


class _Graphs:
    """The graphs of one call, captured one after the other in one pool: there is one, and another after each live operator."""

    def __init__(
        self, stream: int, handle: tuple[int, int], generators: list[torch.Generator], dials: Dials | None = None
    ) -> None:
        self.segments: list[_Segment] = []
        self._stream = stream
        self._handle = handle
        self._generators = generators
        self._dials = dials
        self._open = False

    def begin(self) -> None:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
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

    def end(self) -> None:
        driver.end_broken_capture(self._stream)
        self._open = False
        _quietly(self.segments[-1].graph.capture_end)

    def next(self) -> None:
        with torch_private.without_modes():  # a generator's numbers are put into the graph by operators
            self.end()
            self.begin()

    def give_up(self) -> None:
        if self._open:
            self.end()
        for segment in self.segments:
            segment.graph.reset()
        self.segments.clear()


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
    return not (t.nbytes % 8 or t.data_ptr() % 8 or t.storage_offset() * t.element_size() % 8)


def _row(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The memory of a dense tensor as a row of another type."""
    start = t.storage_offset() * t.element_size() // dtype.itemsize
    with torch.inference_mode(False), torch.no_grad():
        row = torch.empty(0, dtype=dtype, device=t.device)
        return row.set_(t.untyped_storage(), start, (t.nbytes // dtype.itemsize,), (1,))


class GraphProgram:
    """An instantiated CUDA graph."""

    def __init__(self, segment: _Segment, footprint: Spans, watch: CudaWatch, states: Known, keep: Any, device: int,
                 rewind: Rewind | None, surplus: int) -> None:  # fmt: skip
        graph, edges = segment.graph, segment.edges
        self.footprint = footprint
        self.operators = watch.operators
        self.owned = Spans()
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._keep = keep
        self._device = device
        graph.instantiate()
        self._stream = -1
        self._launch: Callable[[], int] = int  # on that stream
        self._states = states
        self.mixed: Callable[[], bool] | None = states.mixed if len(states.generators) > 1 else None
        self._numbers: driver.KernelNumbers | None = None
        self._steps = segment.steps  # the nodes of optimizers' steps, in which alone there are numbers to be set
        # Known after the first launch.
        self._random: bool | None = True if watch.sets_states else None
        self._rewind = rewind if watch.sets_states else None
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

    def copies(self, outs: tuple[torch.Tensor, ...]) -> None:
        self.outs = outs
        self._new = [maker(o) for o in outs]

    def run(self, sources: Tensors) -> list[torch.Tensor]:
        if current_device() != self._device or not hasattr(_thread, "has_context"):
            return self._run_elsewhere(sources)
        targets = [new() for new in self._new]
        if self._pointers is not None:
            self._pointers.set([*map(address, sources), *map(address, targets)])
            self._go() if self._random is False else self._go_random()
        else:
            with torch.no_grad():
                self._fill(sources)
                self._go_random()
                if targets:
                    torch._foreach_copy_(targets, self.outs)
        return targets

    def _run_elsewhere(self, sources: Tensors) -> list[torch.Tensor]:
        """On a thread that has not used CUDA yet, or with another device current: the null stream is that device's."""
        if driver.context() is None:
            driver.set_context(self._context)
        _thread.has_context = True
        with torch.cuda.device(self._device):
            return self.run(sources)

    def _go(self) -> None:
        stream = raw_stream(self._device)
        if stream != self._stream:
            assert self._graph is not None
            self._stream, self._launch = stream, driver.launcher(self._graph.raw_cuda_graph_exec(), stream)
        code = self._launch()
        if code:
            raise driver.DriverError(f"cuGraphLaunch failed with CUresult {code}")

    def _go_random(self) -> None:
        """Through torch, which tells the graph where the generators stand and moves them on. The first launch shows whether
        there is anything to move."""
        assert self._graph is not None
        generators = self._states.generators
        generator, before, now = generators[0], [], None
        if self._random is None:
            before = [g.get_offset() for g in generators]
        if self._rewind is not None:
            now = generator.get_state()
            self._rewind.begin()
        with self._states.lent():
            self._graph.replay()
        if now is not None:
            generator.set_state(now)
        elif self._surplus:
            generator.set_offset(generator.get_offset() - self._surplus)
        if self._random is None:
            self._random = before != [g.get_offset() for g in generators]

    def set_numbers(self, numbers: Mapping[float, float]) -> bool:
        if not numbers:
            return True
        assert self._graph is not None
        if self._numbers is None:
            self._numbers = driver.KernelNumbers(self._steps, numbers)
        return self._numbers.set(self._graph.raw_cuda_graph_exec(), numbers)

    def close(self) -> None:
        if self._graph is not None:
            self._graph.reset()
        self._graph = None
        self._keep = None


class CudaDevice:
    """One GPU: its pool, its capture stream, its recordings' memory."""

    roomy = 256 << 20
    remedies = _REMEDIES

    def __init__(self, torch_device: torch.device) -> None:
        gone = torch_private.missing(cuda=True)
        if gone:
            raise Refusal(f"this torch release lacks {', '.join(gone)}", "use a release that phonograph supports")
        self.torch_device = torch_device
        self.index: int = torch_device.index
        self.pool = Pool(torch_device)
        self._stream = torch.cuda.Stream(torch_device)
        self._anchor = _Anchor(self.index, self._stream)
        torch_private.silence_stream_mismatch()
        self._generators: list[torch.Generator] = []
        self._pool_spans = Spans()  # the pool's memory after the last warm-up
        self._last = -1  # the stream of the last replay
        self._last_stream: torch.cuda.Stream | None = None
        self._joined: list[torch.cuda.Stream] = []  # the user's, where nodes of autograd were made
        self._streams = {self._stream.cuda_stream: self._stream}
        self._event = torch.cuda.Event()

    # -- live calls

    @contextmanager
    def beside(self, arguments: Sequence[torch.Tensor]) -> Iterator[None]:
        """Warm-up calls run on the capture stream and in the pool: libraries then make their handles and autograd its
        accumulation nodes for that stream, and the capture finds its memory already there, in the same order: what will be
        slots comes first. What they make may live long (an optimizer's state), so it must not lie where a recording writes."""
        clear_of = self.pool.footprints() | self.pool.protected()
        with self._on_stream(), self._undisturbed(clear_of):
            with torch_private.route_to_pool(self.index, self._anchor.handle):
                places = _places(arguments)
                yield
                del places
            self._end_workspace()
            segments = torch_private.segments(self._anchor.handle)
            self._pool_spans = Spans((s["address"], s["total_size"]) for s in segments)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        with torch.cuda.device(self.index):
            outer = torch.cuda.current_stream()
            self._stream.wait_stream(outer)
            if self._last_stream is not None:
                self._stream.wait_stream(self._last_stream)
            for stream in self._joined:
                self._stream.wait_stream(stream)
            try:
                with torch.cuda.stream(self._stream):
                    yield
            finally:
                outer.wait_stream(self._stream)

    @contextmanager
    def _undisturbed(self, protected: Spans) -> Iterator[None]:
        """These addresses, live leases at least, are out of the allocator's reach inside the block, and cuBLAS has its
        workspace where it always is."""
        torch_private.clear_cublas_workspaces()
        anchor = self._anchor
        if not len(protected) and anchor.workspace is None:
            yield
            return
        with torch_private.route_to_pool(self.index, anchor.handle):
            held = cuda_memory.hold(anchor.handle, protected, self._stream.cuda_stream, anchor.workspace)
        if held is None:  # cannot share: begin a pool of its own; the old one goes with its last recording
            torch_private.clear_cublas_workspaces()
            self._anchor = _Anchor(self.index, self._stream)
            yield
            return
        try:
            yield
        finally:
            held.release()

    # -- captures

    def capture(
        self,
        arguments: list[torch.Tensor],
        borrowed: list[bool],
        reach: Reach,
        call: Callable[[list[torch.Tensor], OperatorWatch], Any],
        outputs_of: Callable[[Any], list[torch.Tensor]],
        kept_of: Callable[[], list[torch.Tensor]],
        protected: Spans,
        dials: Dials,
        copied: float,
        rewind: Rewind | None,
    ) -> Captured:
        for g in reach.generators:
            if (
                g.device.type == "cuda"
                and g.device.index in (None, self.index)
                and not any(share_state(g, known) for known in self._generators)
            ):
                self._generators.append(g)
        states = Known([torch.cuda.default_generators[self.index], *self._generators])
        with self._on_stream(), self._undisturbed(protected):
            handle = self._anchor.handle
            before = cuda_memory.blocks(handle)
            owned = Spans((b.address, b.nbytes) for b in before if not b.free)
            with torch_private.allocations_since(self.index) as allocated:
                with torch_private.route_to_pool(self.index, handle), torch.inference_mode(False):
                    slots = [t if b else _slot(t) for t, b in zip(arguments, borrowed, strict=True)]
                free = Spans((b.address, b.nbytes) for b in before if b.free)
                watch = CudaWatch(self.torch_device, reach, slots, borrowed, self._generators, free, rewind)
                watch.dials = dials
                filled = [(slot, t) for slot, t, b in zip(slots, arguments, borrowed, strict=True) if not b]
                graphs = _Graphs(self._stream.cuda_stream, handle, self._generators, dials)
                watch.next_segment = graphs.next
                with self._capturing(graphs, states):
                    graphs.copy_in([s for s, _ in filled], [t for _, t in filled])
                    with watch:
                        result = call(slots, watch)
                    out = self._small(watch, outputs_of(result), {storage_id(t) for t in kept_of()}, copied)
                    graphs.segments[-1].edges.copy_out(list(out.values()))
                    surplus = self._surplus() if watch.sets_states else 0
                self._end_workspace()
            if watch.refusal is not None:
                raise watch.refusal
            footprint = self._footprint(handle, allocated, owned)
        self._no_strangers(watch, footprint)
        made = {}
        leaving = [*outputs_of(result), *kept_of()]
        for t in leaving:
            storage = t.untyped_storage()
            if footprint.covers(storage.data_ptr(), storage.nbytes()) and storage._cdata not in watch.outside | watch.slot_ids:
                made[storage._cdata] = Made(storage.data_ptr(), storage.nbytes())
        final = [unowned(s) for s in slots]
        graphs.segments[0].edges.slots = [s for s, b in zip(final, borrowed, strict=True) if not b]
        drawn_from = [states.generators[0], *(g for g in watch.generators if g.device == states.generators[0].device)]
        programs = [
            GraphProgram(segment, footprint, watch, Known(drawn_from), self._anchor, self.index, rewind,
                         surplus if segment is graphs.segments[-1] else 0)
            for segment in graphs.segments
        ]  # fmt: skip
        program: Program = programs[0]
        if watch.cuts:
            for part, inputs, results in watch.cuts:
                part.lies([spot.tensor() for spot in inputs], [spot.tensor() for spot in results])
            parts = [part for part, *_ in watch.cuts]
            program = Segments(programs, parts, watch.undone, drawn_from, watch.operators)
        others = watch.others({storage_id(t) for t in leaving})
        return Captured(result, program, made, watch, slots, final, tuple(out), others=others)

    def once(self, call: Callable[[], Any], rewind: Rewind | None) -> Any:
        """Capture a call, play it, and forget it: for what can only run captured, and could not be recorded. Its result is in
        memory of its own."""
        generator = torch.cuda.default_generators[self.index]
        now = generator.get_state()
        with self._on_stream():
            graphs = _Graphs(self._stream.cuda_stream, torch.cuda.graph_pool_handle(), self._generators)
            with self._capturing(graphs, Known([generator, *self._generators])):
                result = call()
                if rewind is not None:
                    self._surplus()
            graph = graphs.segments[0].graph
            graph.instantiate()
            if rewind is not None:
                rewind.begin()
            graph.replay()
            if rewind is not None:
                generator.set_state(now)
            leaves: list[Any] = []
            shape = flatten(result, leaves)
            copies = iter([leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])
            return unflatten(shape, copies, result)

    def _end_workspace(self) -> None:
        """Take cuBLAS's workspace from it, as long as it is known whose it was: it would keep it for ever, and others of torch
        free it."""
        anchor = self._anchor
        taken = cuda_memory.taken(anchor.handle) if anchor.workspace is None else {}
        torch_private.clear_cublas_workspaces()
        if taken:
            still = cuda_memory.taken(anchor.handle)
            gone = {address: nbytes for address, nbytes in taken.items() if address not in still}
            if any(nbytes > cuda_memory.SMALL for nbytes in gone.values()):  # others' too: cuBLASLt has one
                with torch_private.route_to_pool(self.index, anchor.handle):
                    torch_private.take_cublas_workspace()
                sizes = {n for address, n in cuda_memory.taken(anchor.handle).items() if address not in still}
                torch_private.clear_cublas_workspaces()
                anchor.workspace = next(((address, n) for address, n in gone.items() if n in sizes), None)

    def _surplus(self) -> int:
        """torch tells a graph where the generator stands only if the graph moves it on, and a call that sets its state may
        end where it began. Then a step is added here, which each run takes back."""
        state = torch.cuda.default_generators[self.index].get_state()
        if CudaState.of(state).offset:
            return 0
        CudaState.of(state).offset = _STEP
        torch.cuda.default_generators[self.index].set_state(state)
        return _STEP

    def _small(
        self, watch: OperatorWatch, results: list[torch.Tensor], kept: set[int], most: float
    ) -> dict[int, torch.UntypedStorage]:
        """The storages of the call's own results that are not `kept`, if they have no more than `most` bytes in all."""
        own = {storage_id(t): t.untyped_storage() for t in results if t.device == self.torch_device}
        own = {key: s for key, s in own.items() if s.nbytes() and key not in watch.outside | watch.slot_ids | kept}
        return own if sum(s.nbytes() for s in own.values()) <= most else {}

    @contextmanager
    def _capturing(self, graphs: _Graphs, states: Known) -> Iterator[None]:
        collecting = gc.isenabled()
        gc.disable()
        try:
            graphs.begin()
            try:
                yield
                graphs.end()
            except BaseException:
                graphs.give_up()
                states.put_back()
                raise
            if not states.put_back():
                raise Refusal("leaves a random generator with the state of another (graphsafe_set_state)",
                              "give it its own again")  # fmt: skip
        finally:
            if collecting:
                gc.enable()

    def _footprint(self, handle: tuple[int, int], allocated: list[tuple[int, int]] | None, owned: Spans) -> Spans:
        """The bytes of the pool that a launch may write, but for the workspace that all share: whatever was allocated in it
        since the capture began."""
        inside = Spans((b.address, b.nbytes) for b in cuda_memory.blocks(handle))
        if allocated is not None:
            found = Spans((a, n) for a, n in allocated if inside.meets(a, n))
        else:
            found = Spans((b.address, b.nbytes) for b in cuda_memory.blocks(handle) if not owned.covers(b.address, b.nbytes))
        return found if self._anchor.workspace is None else found.without(*self._anchor.workspace)

    def _no_strangers(self, watch: OperatorWatch, footprint: Spans) -> None:
        for (start, nbytes), (operator, line) in watch.strangers.items():
            if nbytes and not footprint.covers(start, nbytes):
                raise Refusal(
                    f"{operator} reads a tensor that phonograph cannot trace back to an argument or to the function's own "
                    "variables",
                    "pass it as an argument, or keep it as an attribute, closure variable or global",
                    line,
                )

    def settle(self, recording: Recording) -> None:
        """Recordings can leave tensors behind in the pool that live on outside (gradients). Where one lies in the
        footprint of another recording, that one must not be played again."""
        active = [(b.address, b.nbytes) for b in cuda_memory.blocks(self._anchor.handle) if not b.free]
        recording.program.owned = Spans((a, n) for a, n in active if recording.footprint.meets(a, n))
        for other in self.pool.recordings:
            reached = other.footprint | other.lent
            if any(reached.meets(a, n) and not other.program.owned.meets(a, n) for a, n in active):
                other.spoiled.append(True)

    # -- around replays

    def outlives(self, t: torch.Tensor) -> _Ghost | None:
        """A tensor of the pool: nothing executes during a capture, so that its contents stay, whoever gets its memory."""
        address, nbytes = t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()
        return _Ghost(t) if self._pool_spans.covers(address, nbytes) else None

    def enter(self) -> None:
        stream = raw_stream(self.index)
        if stream != self._last:
            current = self._current(stream)
            if self._last_stream is not None:
                self._wait(current, self._last_stream)
            self._last, self._last_stream = stream, current
        if self._joined and backward_id() >= 0:
            # A gradient in a recording's memory is dropped as soon as what reads it is launched, maybe on another stream of the
            # backward; autograd waits for all of them only where it ends.
            current = self._current(stream)
            for other in (self._stream, *self._joined):
                if other is not current:
                    self._wait(current, other)

    def joining(self, many: bool) -> AbstractContextManager[None]:
        """Parameters that were first met in a warm-up call get their gradients added up on the stream of that. Where there are
        many, the backward is played there as well, or autograd would wait for the other stream at each."""
        users = self._current(raw_stream(self.index))
        if users not in self._joined and users != self._stream:
            self._joined.append(users)
        if not many:
            return nullcontext()
        return OnStream(self._stream) if current_device() == self.index else torch.cuda.stream(self._stream)

    def _current(self, stream: int) -> torch.cuda.Stream:
        """The current stream, which is `stream`."""
        found = self._streams.get(stream)
        if found is None:
            found = self._streams[stream] = torch.cuda.current_stream(self.torch_device)
        return found

    def _wait(self, stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        """As `stream.wait_stream(other)`, which makes a new event each time."""
        self._event.record(other)
        self._event.wait(stream)

    def anchor(self, place: Spans) -> Any:
        return self._anchor

    def tidy(self) -> None:
        """When most of the pool is not needed any more, later recordings begin a new one; the old one goes with its last
        recording and its last held output."""
        if self.pool.untidy:
            self.pool.untidy = False
            footprints, (_, workspace) = self.pool.footprints().nbytes, self._anchor.workspace or (0, 0)
            if not footprints or 2 * (footprints + workspace) < self.pool_bytes:
                self._anchor = _Anchor(self.index, self._stream)
            torch.cuda.empty_cache()

    @property
    def pool_bytes(self) -> int:
        return cuda_memory.pool_bytes(self._anchor.handle)
