"""The CUDA device: CUDA graphs in one private memory pool, captured on one stream.

Nothing executes during a capture; the kernels of the call are written down with their addresses. So what a capture may
disturb is host state only, and each piece of it is set and put back here, on every path:

* the current stream (a capture needs one of its own; always the same one, because the allocator never reuses a block of
  one stream on another);
* where the allocator takes memory from;
* Python's garbage collector, which must not run a destructor with CUDA calls in the middle;
* the allocator's history, which is how a recording learns its footprint.

The graphs themselves are next door, in `cuda_graphs`; what a call must not do while they are captured, in `cuda_watch`; how
captures keep off memory that is still held, in `cuda_memory`.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any, ClassVar

import torch

from ..._torch import cuda as torch_cuda
from ..._torch import functions as torch_functions
from ..._torch.autograd import backward_id
from ..._torch.cuda import OnStream, current_device, raw_stream
from ..._torch.tensors import storage_id
from ...call.signature import ALIGNMENT
from ...capture.breaks import MarkedBreak
from ...capture.dispatch import OperatorWatch
from ...capture.recording import MEMORY, Program, Recording, memory_of
from ...distributed.watchdog import OWN_THREADS
from ...errors import Again, Refusal
from ...guards.reachable import Reach
from ...memory.pool import Pool, Spot, extent, unowned
from ...memory.spans import Spans
from ...python.gc_control import uncollected
from ...state.compiled_generators import among, settled
from ...state.rng import CudaState, Known, Rewind, held, put, reset, share_state
from ...values.device_names import is_of, named
from ...values.pytree import flatten, unflatten
from ...values.wording import MARKED, Failure
from ..base import Captured, CapturePlan, Made
from ..host_reads import AS_MEMORY, ITEM, LISTED, NUMBERS, host_reads_refused, of_the_host
from ..segments import Segments
from . import allocator as cuda_memory
from . import driver
from .capture_status import told_as_live
from .dispatch import CudaWatch
from .graphs import CommunicatingProgram, Graph, GraphProgram, Graphs, quietly
from .host_constants import Room, seen_from_the_host
from .rnn_dropout import BUFFER, forgotten
from .value_checks import CudaChecks

__all__ = ["CudaDevice"]

_MUCH = 32  # the part of all reserved memory that may be cached and used by nobody
_STEP = 4  # numbers that a thread draws at once

_FAILURES = (
    Failure("Cannot copy between CPU and CUDA tensors", "copies between the CPU and the GPU",
            "make constants by torch.full(..., device=), or once outside: torch.tensor([...], device=) copies from the CPU"),
    Failure("operation not permitted when stream is capturing", "waits for the GPU",
            f"do that outside the recorded function, {MARKED}"),
    Failure("due to a previous error during capture", "comes after something that failed while it was captured, and was caught",
            "that may be what waits for the GPU: do it outside the recorded function"),
    Failure("unjoined work", "does not wait for what it begins",
            "wait for it in the function: work.wait() for a collective with async_op=True"),
    Failure("dependency created on uncaptured work", "waits for an event or a stream from outside", "do that before the call"),
    Failure("legacy stream depend on a capturing", "comes to the default stream while it is captured",
            "code outside that uses a parameter before has its gradients added up there: record that code as well, or run it "
            "on another stream"),
)  # fmt: skip

_FIRST_USES = ("cublasCreate(", "cusolverDnCreate(", "cusparseCreate(")  # of a library by a thread, which takes memory for it
_ALONE = 2  # references to what only one attribute has, seen by who counts them


class _Anchor:
    """Keeps a graph pool's memory: an empty graph captured in it.

    The allocator frees a pool when its last graph is gone, and refuses a handle that was once freed.

    `workspace` is where cuBLAS works in all graphs of the pool, once that is known: 32 MiB (H100, H200), which no graph
    expects to be left as they were. It is no part of any footprint, and never free. `needed` are the most bytes that recordings
    have needed at one time since some of them went.
    """

    def __init__(self, device: int, stream: torch.cuda.Stream) -> None:
        self.handle: tuple[int, int] = torch.cuda.graph_pool_handle()
        self.workspace: tuple[int, int] | None = None
        self.needed = 0
        self._graph = Graph()
        # The first graph of a process takes memory for the generator's state: here, from what the caller's stream has, and
        # not a segment for our own.
        self._graph.register_generator_state(torch.cuda.default_generators[device])
        with torch.cuda.device(device), torch.cuda.stream(stream):
            self._graph.capture_begin(pool=self.handle, capture_error_mode="thread_local")
            quietly(self._graph.capture_end)


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


def _is_only_thread() -> bool:
    """Whether there is no other thread of Python's, but for our own."""
    return all(t is threading.current_thread() or t.name.startswith(OWN_THREADS) for t in threading.enumerate())


class _Ghost:
    """A gradient in the pool from before the call, not kept alive: brought back from its address if it has to be."""

    def __init__(self, t: torch.Tensor) -> None:
        self.ref = weakref.ref(t)
        self.storages = frozenset((storage_id(t),))
        self._spot = Spot.of(t)
        self._lazy = [f for f, is_so in ((torch.conj, t.is_conj()), (torch._neg_view, t.is_neg())) if is_so]

    def __call__(self) -> torch.Tensor | None:
        return self.ref()

    def again(self) -> torch.Tensor:
        alive = self.ref()
        if alive is not None:
            return alive
        with torch.no_grad():
            found = self._spot.tensor().clone()
            for made in self._lazy:
                found = made(found)
            return found


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # makes the context current where the thread has not used CUDA yet
        return torch.cuda.ExternalStream(driver.new_stream(), device)


class CudaDevice:
    """One GPU: its pool, its capture stream, its recordings' memory."""

    roomy = 256 << 20
    failures: Sequence[Failure] = _FAILURES
    first_uses = _FIRST_USES
    _made: ClassVar[list[CudaDevice]] = []

    def __init__(self, torch_device: torch.device) -> None:
        gone = torch_functions.missing(cuda=True)
        if gone:
            raise Refusal(f"this torch release lacks {', '.join(gone)}", "use one that `phonograph doctor` names")
        self.torch_device = torch_device
        self.index: int = torch_device.index
        self.pool = Pool(torch_device)
        self._stream = _new_stream(torch_device)
        self._anchor = _Anchor(self.index, self._stream)
        torch_cuda.silence_stream_mismatch()
        self._generators: list[torch.Generator] = []
        self._lent: list[torch.Generator] = []  # those of compiled code's own among them
        self._made.append(self)
        self._pool_spans = Spans()  # the pool's memory after the last warm-up
        self._unsettled = Spans()  # what captures have allocated in it that have come to nothing
        self._backwards: ExitStack | None = None  # where the backward of a warm-up call works, while it runs
        self._held_up = False  # recordings have gone, and somebody holds an output of theirs
        self._strayed = False  # something has worked on the capture stream outside of the pool
        self._last = -1  # the stream of the last replay
        self._last_stream = self._stream
        self._served: list[torch.cuda.Stream] = []  # those that results were given to, the user's mostly
        self._joined: list[torch.cuda.Stream] = []  # the user's, where nodes of autograd were made
        self._reads: list[torch.Tensor] = []  # what the backward of a warm-up call reads of others' memory
        self._streams = {self._stream.cuda_stream: self._stream}
        self._event = torch.cuda.Event()
        self._checks = CudaChecks(torch_device)
        self._room = 0  # bytes that the constants of the next recording may need

    # -- live calls

    def is_current(self, streams: Sequence[torch.Stream]) -> bool:
        """Whether the current stream is one of these."""
        current = torch.cuda.current_stream(self.torch_device).stream_id
        return any(named(s.device) == self.torch_device and s.stream_id == current for s in streams)

    @contextmanager
    def beside(self, arguments: Sequence[torch.Tensor], lasting: int, spread: bool) -> Iterator[None]:
        """Warm-up calls run on the capture stream and in the pool: libraries then make their handles and autograd its
        accumulation nodes for that stream, and the capture finds its memory already there, in the same order: what will be
        slots comes first. What they make may live long (an optimizer's state), so it must not lie where a recording writes.
        Nor, where much of it is known to be `lasting`, in a segment with more room than it needs, which others would have to
        do without. What they make on streams of their own comes from the pool as well, where they are `spread`: a capture
        takes the same there, gradients for example, which would be there twice. But another thread may have a capture of its
        own, whose memory must not be ours."""
        self._leave_backwards()
        torch_cuda.measure_outside_of_pools()
        clear_of = self.pool.footprints() | self.pool.protected()
        if self._left_behind(clear_of):
            self._strayed = True
            with self._on_stream():
                yield
            return
        with self._on_stream(), self._undisturbed(clear_of):
            apart = self._keeping_whole(lasting) if lasting else nullcontext()
            route = torch_cuda.route_to_pool(self.index, self._anchor.handle, all_threads=spread and _is_only_thread())
            with apart, route:
                places = _places(arguments)
                yield
                del places
            self._end_workspace(lone=True)
            self._pool_is()

    @contextmanager
    def _keeping_whole(self, most: int) -> Iterator[None]:
        """Nothing is taken from segments of the pool with more than so many bytes inside the block, if the device has as
        much as that is: a live call must not run out of memory that is there."""
        free, total = torch.cuda.mem_get_info(self.index)
        allowed = total * torch.cuda.get_per_process_memory_fraction(self.index) - torch.cuda.memory_reserved(self.index)
        held = cuda_memory.Hold()
        with suppress(torch.OutOfMemoryError), torch_cuda.route_to_pool(self.index, self._anchor.handle, all_streams=True):
            held = cuda_memory.hold_large(self._anchor.handle, most, int(min(free, allowed)))
        try:
            yield
        finally:
            held.release()

    def backward_begins(self, reads: Sequence[torch.Tensor]) -> None:
        """It works on the capture stream and in the pool as well, where the memory of its forward becomes free as it goes.

        Memory of another stream's would be free for that as soon as what reads it here is launched, while other parts of the
        same backward go on there: so it is kept until the end, when autograd lets the streams wait for each other."""
        if raw_stream(self.index) != self._stream.cuda_stream:
            return
        if torch.cuda.is_current_stream_capturing():  # it is part of another call
            return
        self._reads += reads
        self._strayed = True  # at its end at the latest, where gradients are added up
        if self._backwards is not None:
            return
        anchor, clear_of = self._anchor, self.pool.footprints() | self.pool.protected()
        torch_cuda.clear_cublas_workspaces()
        torch_cuda.measure_outside_of_pools()
        if self._left_behind(clear_of):
            return
        with torch_cuda.route_to_pool(self.index, anchor.handle, all_streams=True):
            held = cuda_memory.hold(anchor.handle, clear_of, anchor.workspace)
        if held is not None:
            with ExitStack() as place:
                place.callback(held.release)
                place.enter_context(torch_cuda.route_to_pool(self.index, anchor.handle))
                self._backwards = place.pop_all()

    def backward_passes(self, grads: Sequence[torch.Tensor]) -> None:
        if self._backwards is not None:
            self._reads += grads

    def backward_ends(self) -> None:
        self._reads.clear()
        if torch.cuda.is_current_stream_capturing():
            return
        self._leave_backwards()
        torch_cuda.clear_cublas_workspaces()
        self._release_cached()

    def _leave_backwards(self) -> None:
        """The backward that has begun works elsewhere from now on: it has ended, or has failed, or something else needs the
        pool."""
        place, self._backwards = self._backwards, None
        if backward_id() < 0:
            self._reads.clear()
        if place is not None:
            place.close()
            self._pool_is()

    def _pool_is(self) -> None:
        segments = torch_cuda.segments(self._anchor.handle)
        self._pool_spans = Spans((s["address"], s["total_size"]) for s in segments)

    def _release_cached(self) -> None:
        """Give back what is cached for the capture stream outside of the pool: what backwards of warm-up calls have worked in
        that had to leave it, and the gradients that they gave. Nobody else would use it. (torch can only give back what is
        cached for other streams as well.)"""
        if self._strayed:
            used = cuda_memory.outside(self.index, self._stream.cuda_stream)
            if not all(used):
                torch.cuda.empty_cache()
            self._strayed = any(used)  # what is in use there may be cached later

    def release_unused(self) -> None:
        """Give back what is cached outside of pools and used by nobody, where that is much: a call in the pool will not use it,
        and may need as much there."""
        least = max(cuda_memory.SEGMENT, torch.cuda.memory_reserved(self.index) // _MUCH)
        if cuda_memory.cached(self.index) > least:
            torch.cuda.empty_cache()

    @contextmanager
    def apart(self) -> Iterator[Any]:
        with self._on_stream():
            yield self._stream
        self._strayed = True  # what was made has taken memory of its own, and left some

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        with torch.cuda.device(self.index):
            outer = self._serve()
            for stream in (*self._served, *self._joined):
                self._stream.wait_stream(stream)
            try:
                with torch.cuda.stream(self._stream):
                    yield
            finally:
                outer.wait_stream(self._stream)

    @contextmanager
    def _undisturbed(self, protected: Spans, apart: Sequence[tuple[int, int]] = ()) -> Iterator[cuda_memory.Hold | None]:
        """These addresses, live leases at least, are out of the allocator's reach inside the block, and cuBLAS has its
        workspace where it always is. What holds them can give back those `apart`."""
        torch_cuda.clear_cublas_workspaces()
        anchor = self._anchor
        if not len(protected) and anchor.workspace is None:
            yield None
            return
        held = None
        if not self._left_behind(protected):
            with torch_cuda.route_to_pool(self.index, anchor.handle, all_streams=True):
                held = cuda_memory.hold(anchor.handle, protected, anchor.workspace, apart)
        if held is None:  # cannot share: begin a pool of its own; the old one goes with its last recording
            torch_cuda.clear_cublas_workspaces()
            self._anchor, self._unsettled = _Anchor(self.index, self._stream), Spans()
            yield None
            return
        try:
            yield held
        finally:
            held.release()

    def _left_behind(self, protected: Spans) -> bool:
        """Whether a capture that has come to nothing has left something where others have memory now: it counts as taken, and
        cannot be held, but would be free in the middle of whatever comes next. (Where a backward fails, autograd's thread keeps
        what it had in hand until its next one.)"""
        if len(self._unsettled):
            taken = cuda_memory.taken(self._anchor.handle).items()
            self._unsettled = Spans((a, n) for a, n in taken if self._unsettled.meets(a, n))
        return any(protected.meets(a, n) for a, n in self._unsettled)

    # -- captures

    def capture(self, plan: CapturePlan) -> Captured:
        states = self._states(plan.reach)
        self._leave_backwards()
        self._release_cached()
        self.release_unused()
        if self._checks.full:
            self._checks = CudaChecks(self.torch_device)
        self._checks.make_room()
        room = self._room_for_constants()
        with self._on_stream(), self._undisturbed(plan.protected, plan.releasable) as held:
            handle = self._anchor.handle
            made_room = self._make_room(plan.expected)
            before = cuda_memory.blocks(handle) if held is None or made_room else held.there
            owned = Spans((b.address, b.nbytes) for b in before if not b.free)
            with self._allocations() as allocated:
                with torch_cuda.route_to_pool(self.index, handle), torch.inference_mode(False):
                    # The pool may be another by now.
                    common = [s is not None and owned.covers(*memory_of(s)) for s in plan.shared]
                    entries = zip(plan.arguments, plan.borrowed, plan.shared, common, strict=True)
                    slots = [t if b else unowned(s) if c and s is not None else _slot(t) for t, b, s, c in entries]
                free = Spans((b.address, b.nbytes) for b in before if b.free)
                stream = self._stream.cuda_stream
                watch = CudaWatch(self.torch_device, plan.reach, slots, plan.borrowed, self._generators, self._lent, free,
                                  plan.rewind, stream)  # fmt: skip
                watch.follow(plan.dials)
                filled = [(slot, t) for slot, t, b in zip(slots, plan.arguments, plan.borrowed, strict=True) if not b]
                graphs = Graphs(self._stream, handle, self._generators, states, plan.dials)
                watch.answers = graphs.answers = self._checks.answers()
                watch.next_segment, watch.streams, watch.known_states = graphs.next, graphs.others, states
                watch.room = room
                if held is not None:
                    watch.give_back = held.give_back
                with self._not_begun(watch), self._capturing(graphs, states), settled(watch.own):
                    graphs.copy_in([s for s, _ in filled], [t for _, t in filled])
                    reads = host_reads_refused(watch, (*LISTED, *AS_MEMORY, ITEM, *NUMBERS), of_the_host)
                    with watch, reads, seen_from_the_host():
                        try:
                            result = plan.call(slots, watch)
                        except Again:
                            self._room = room.wanted
                            raise
                    if raw_stream(self.index) != self._stream.cuda_stream:
                        raise Refusal("leaves another stream current than it has found", "use `with torch.cuda.stream(...)`")
                    graphs.join()
                    graphs.look_at_answers()
                    out = self._small(watch, plan.results(result), {storage_id(t) for t in plan.saved()}, plan.copied)
                    graphs.segments[-1].edges.copy_out(list(out.values()))
                    surplus = self._surplus() if watch.sets_states else 0
                self._end_workspace()
                room.fill()
            if watch.refusal is not None:
                raise watch.refusal
            footprint = self._footprint(handle, allocated, before)
            footprint |= Spans(memory_of(s) for s, c in zip(slots, common, strict=True) if c)
        self._no_strangers(watch, footprint)
        made = {}
        leaving = [*plan.results(result), *plan.saved()]
        for t in leaving:
            storage = t.untyped_storage()
            if footprint.covers(storage.data_ptr(), storage.nbytes()) and storage._cdata not in watch.outside | watch.slot_ids:
                made[storage._cdata] = Made(storage.data_ptr(), storage.nbytes())
        final = [unowned(s) for s in slots]
        graphs.segments[0].edges.slots = [s for s, b in zip(final, plan.borrowed, strict=True) if not b]
        kind = CommunicatingProgram if watch.communicated else GraphProgram
        kept = (self._anchor, room if room else None, watch.workplaces)
        programs = [
            kind(segment, footprint, watch, kept, self.index, plan.rewind,
                 surplus if segment is graphs.segments[-1] else 0, graphs.others.values())
            for segment in graphs.segments
        ]  # fmt: skip
        program: Program = programs[0]
        if watch.cuts:
            if watch.drops_out and any(isinstance(part, MarkedBreak) for part, *_ in watch.cuts):
                raise Refusal(f"calls a function that is marked @pg.live, which may seed {BUFFER}",
                              "put nn.Dropout between layers of their own, instead of dropout=")  # fmt: skip
            for part, inputs, results in watch.cuts:
                part.lies([spot.tensor() for spot in inputs], [spot.tensor() for spot in results])
            parts = [part for part, *_ in watch.cuts]
            drawn = [*watch.generators, *(g for own in watch.own for g in own.forward)]
            named_here = [g for g in states.generators[1:] if among(g, drawn)]
            program = Segments(programs, parts, watch.undone, [states.generators[0], *named_here], watch.operators)
        others = watch.others({storage_id(t) for t in leaving})
        return Captured(result, program, made, watch, slots, final, tuple(out), others=others)

    def _states(self, reach: Reach) -> Known:
        """Of all generators that a call can draw from: the default one first, those in its reach, and those that were met in
        captures before and are still there. A graph of any call is told of all of them: but not of one that is of no GPU in
        particular, and of which graphs of another were told, because torch has one place for where it stands, on that."""
        default = torch.cuda.default_generators[self.index]
        here = [g for g in reach.generators if is_of(g, self.torch_device)]
        self._generators[:] = held(self._generators)
        for g in here:
            if not any(share_state(g, known) for known in (default, *self._generators)):
                self._generators.append(g)
        others = [g for device in self._made if device is not self for g in device._generators]
        self._generators[:] = [g for g in self._generators if not any(share_state(g, other) for other in others)]
        self._lent[:] = [g for g in self._lent if any(g is known for known in self._generators)]
        return Known([*dict.fromkeys((default, *here, *self._generators))], self._lent)

    def _make_room(self, expected: int) -> bool:
        """Let there be so many bytes, and take what is missing in one piece: segments of the allocator's own size have ends in
        which nothing fits. Returns whether that was necessary."""
        missing = expected - cuda_memory.free_bytes(self._anchor.handle) if expected > cuda_memory.SEGMENT else 0
        if missing > cuda_memory.SEGMENT:
            with suppress(torch.OutOfMemoryError), torch_cuda.route_to_pool(self.index, self._anchor.handle):
                torch_cuda.raw_free(torch_cuda.raw_alloc(missing, self._stream.cuda_stream))
        return missing > cuda_memory.SEGMENT

    def _room_for_constants(self) -> Room:
        """Memory for the constants of the next recording. It is no part of the pool, and is given back where there are none."""
        nbytes, self._room = self._room, 0
        with torch.cuda.device(self.index):
            try:
                return Room(self.torch_device, nbytes, self._served)
            except torch.OutOfMemoryError:
                raise Refusal("has no memory for what it copies from the CPU", "keep it on the GPU", final=False) from None

    def once(self, call: Callable[[], Any], rewind: Rewind | None) -> Any:
        """Capture a call, play it, and forget it: for what can only run captured, and could not be recorded. Its result is in
        memory of its own."""
        generator = torch.cuda.default_generators[self.index]
        now = generator.get_state()
        self._leave_backwards()
        with self._on_stream():
            states = Known([generator, *self._generators], self._lent)
            graphs = Graphs(self._stream, torch.cuda.graph_pool_handle(), self._generators, states)
            with self._capturing(graphs, states):
                result = call()
                if rewind is not None:
                    self._surplus()
            graph = graphs.segments[0].graph
            graph.instantiate()
            if rewind is not None:
                rewind.begin()
                for own in rewind.own:
                    rewind.begin_own(own)
            graph.replay()
            if rewind is not None:
                put(generator, now)
                reset(generator)
            leaves: list[Any] = []
            shape = flatten(result, leaves)
            copies = iter([leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])
            return unflatten(shape, copies)

    def _end_workspace(self, lone: bool = False) -> None:
        """Take cuBLAS's workspace from it, as long as it is known whose it was: it would keep it for ever, and others of torch
        free it. From now on it has it where this pool has room for it; `lone`: not in the middle of what something large may
        need, but by itself."""
        anchor = self._anchor
        taken = cuda_memory.taken(anchor.handle) if anchor.workspace is None else {}
        torch_cuda.clear_cublas_workspaces()
        if taken:
            still = cuda_memory.taken(anchor.handle)
            gone = {address: nbytes for address, nbytes in taken.items() if address not in still}
            if any(nbytes > cuda_memory.SMALL for nbytes in gone.values()):
                anchor.workspace = self._taken_by_cublas()
                if lone and anchor.workspace is not None and cuda_memory.is_part(anchor.handle, *anchor.workspace):
                    with torch_cuda.route_to_pool(self.index, anchor.handle, all_streams=True):
                        others, _ = cuda_memory.hold_all(anchor.handle)
                    try:
                        anchor.workspace = self._taken_by_cublas()
                    finally:
                        others.release()

    def _taken_by_cublas(self) -> tuple[int, int] | None:
        """Where in the pool cuBLAS takes its workspace (address, bytes), which has been taken from it; it is free again."""
        handle = self._anchor.handle
        before = cuda_memory.taken(handle)
        with torch_cuda.route_to_pool(self.index, handle):
            torch_cuda.take_cublas_workspace()
        found = next(((at, n) for at, n in cuda_memory.taken(handle).items() if at not in before), None)
        torch_cuda.clear_cublas_workspaces()
        return found

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
    def _allocations(self) -> Iterator[list[tuple[int, int]]]:
        """Collects what is allocated inside the block (address, bytes); it is not settled yet."""
        found: list[tuple[int, int]] = []
        try:
            with torch_cuda.allocations_since(self.index) as found:
                yield found
        except torch_cuda.Forgotten:
            raise Refusal("runs while the allocator's history is recorded, with too few entries to see what a capture takes",
                          "let _record_memory_history have more (max_entries)", final=False) from None  # fmt: skip
        finally:
            self._unsettled |= Spans(found or cuda_memory.taken(self._anchor.handle).items())

    @contextmanager
    def _capturing(self, graphs: Graphs, states: Known) -> Iterator[None]:
        with uncollected(), told_as_live():
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

    @contextmanager
    def _not_begun(self, watch: CudaWatch) -> Iterator[None]:
        """After a capture, dropout of cuDNN's begins anew if it would before. (After a call that sets the generator's state it
        does so in any case; each run of such a recording says so.)"""
        try:
            yield
        finally:
            if watch.begins_dropout and not watch.sets_states:
                reset(torch.cuda.default_generators[self.index])
            elif watch.sets_states and watch.drops_out and not watch.begins_dropout:
                forgotten(self.index)

    def _footprint(
        self, handle: tuple[int, int], allocated: list[tuple[int, int]], before: list[cuda_memory.Block]
    ) -> Spans:  # fmt: skip
        """The bytes of the pool that a launch may write, but for the workspace that all share: whatever was allocated in it
        since the capture began. It has more than it had `before` only if something was allocated elsewhere."""
        inside = Spans((b.address, b.nbytes) for b in before)
        if not all(inside.covers(a, n) for a, n in allocated):
            inside |= Spans((b.address, b.nbytes) for b in cuda_memory.blocks(handle))
        found = Spans((a, n) for a, n in allocated if inside.meets(a, n))
        return found if self._anchor.workspace is None else found - Spans([self._anchor.workspace])

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
        there = [b for b in cuda_memory.blocks(self._anchor.handle) if not b.free]
        mine = [b for b in there if recording.footprint.meets(b.address, b.nbytes)]
        kept = recording.backward.held if recording.backward is not None else ()
        given = Spans((x.address, x.nbytes) for x in recording.leases) - Spans(map(memory_of, kept))
        # What waits for another stream, or is garbage that lies where a result does, is nobody's: it will be free any time.
        # (Not so what code keeps for the backward, as `checkpoint` does: that stays for as long as the recording.)
        left = [b for b in mine if b.pending or given.meets(b.address, b.nbytes)]
        self._unsettled = (self._unsettled - recording.footprint) | Spans((b.address, b.nbytes) for b in left)
        active = [(b.address, b.nbytes) for b in there]
        self._anchor.needed = max(self._anchor.needed, (self.pool.footprints() | recording.footprint).nbytes)
        recording.program.owned = Spans((b.address, b.nbytes) for b in mine if not b.pending)
        for other in self.pool.recordings:
            reached = other.footprint | other.lent
            if any(reached.meets(a, n) and not other.program.owned.meets(a, n) for a, n in active):
                other.spoiled.append(MEMORY)
        self.release_unused()

    # -- around replays

    def outlives(self, t: torch.Tensor) -> _Ghost | None:
        """A tensor of the pool: nothing executes during a capture, so that its contents stay, whoever gets its memory."""
        address, nbytes = t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()
        return _Ghost(t) if self._pool_spans.covers(address, nbytes) else None

    def _serve(self) -> torch.cuda.Stream:
        """The current stream, on which something is going to be given out."""
        stream = raw_stream(self.index)
        if stream != self._last:
            self._last, self._last_stream = stream, self._current(stream)
            if self._last_stream not in self._served:
                self._served.append(self._last_stream)
        return self._last_stream

    def enter(self) -> None:
        joined = bool(self._joined or self._reads) and backward_id() >= 0
        if raw_stream(self.index) != self._last or len(self._served) > 1 or joined:
            self._wait_for_readers(joined)

    def _wait_for_readers(self, joined: bool) -> None:
        current = self._serve()
        others = list[torch.cuda.Stream]()
        if len(self._served) > 1:
            # A result is dropped as soon as what reads it is launched, and its memory may be what is written now.
            others += self._served
        if joined:
            # Likewise a gradient, on another stream of the backward; autograd waits for all of them only where it ends.
            others += (*self._joined, self._stream) if self._reads else self._joined
        for other in others:
            if other is not current:
                self._wait(current, other)

    def joining(self, lasting: bool, many: bool) -> AbstractContextManager[None]:
        """Where a capture's own nodes add up gradients, they do so on its stream. Where those are many, the backward is played
        there as well, or autograd would wait for the other stream at each."""
        users = self._current(raw_stream(self.index))
        for stream in (users, self._stream) if lasting else (users,):
            if stream not in self._joined:
                self._joined.append(stream)
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
        """When nobody needs the pool any more, it goes. As long as somebody does (a recording, or who holds an output), all of
        it stays, so that the next recording had better find room in it than begin another: but for a pool that is much larger
        than what was last needed. That goes when the last of these does."""
        if not (self.pool.untidy or self._held_up):
            return
        some_went, self.pool.untidy = self.pool.untidy, False
        self._leave_backwards()
        self.pool.sweep()
        retires = not self._is_needed() or (some_went and self._is_too_large())
        if retires:
            self._anchor, self._unsettled, self._pool_spans = _Anchor(self.index, self._stream), Spans(), Spans()
        self._held_up = not self.pool.recordings and self._is_needed()
        if retires or some_went:
            torch.cuda.empty_cache()

    def _is_needed(self) -> bool:
        """Whether anybody else has the anchor: recordings have it, and who holds what they gave."""
        return sys.getrefcount(self._anchor) > _ALONE

    def _is_too_large(self) -> bool:
        """Whether the pool has more than twice what recordings have needed at one time since this was last asked."""
        needed, self._anchor.needed = self._anchor.needed, self.pool.footprints().nbytes
        _, workspace = self._anchor.workspace or (0, 0)
        return 2 * (needed + workspace) < self.pool_bytes

    @property
    def pool_bytes(self) -> int:
        return cuda_memory.pool_bytes(self._anchor.handle)

    @property
    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.index)

    @property
    def spare(self) -> int:
        return torch.cuda.mem_get_info(self.index)[0] // 8
