"""The CUDA device: CUDA graphs in one private memory pool, captured on one stream.

What it consists of lies next door, each by itself: the stream on which everything is captured (`capture_stream.py`), the memory
that graphs have (`private_pool.py`), live calls before a capture (`warm_up.py`), a capture (`capture.py`) of graphs
(`graphs.py`), and what a replay does with them (`program.py`). What a call must not do while it is captured is in
`dispatch.py`; how captures keep off memory that is still held, in `allocator.py`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..._torch import cuda as torch_cuda
from ..._torch import functions as torch_functions
from ..._torch.tensors import neg_view, storage_id
from ...capture.recording import Recording
from ...errors import Again, Refusal
from ...memory.pool import Pool, TensorAddress
from ...memory.spans import Spans
from ...state.rng import Rewind
from ...values.wording import MARKED, Failure
from ..base import Captured, CapturePlan
from . import allocator as cuda_memory
from .capture import Capture, once
from .capture_stream import CaptureStream
from .generators import GraphGenerators
from .graphs import Graph
from .host_constants import Room
from .laned import largest_once, takes_too_much
from .private_pool import PrivatePool
from .value_checks import CudaChecks
from .warm_up import WarmUps

__all__ = ["CudaDevice"]

_MUCH = 32  # the part of all reserved memory that may be cached and used by nobody

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


def _uses_once() -> Again:
    return Again("would take too much memory if none of it was used again", "nothing", final=False)


class _Ghost:
    """A gradient in the pool from before the call, not kept alive: brought back from its address if it has to be."""

    def __init__(self, t: torch.Tensor) -> None:
        self.ref = weakref.ref(t)
        self.storages = frozenset((storage_id(t),))
        self._spot = TensorAddress.of(t)
        self._lazy = [f for f, is_so in ((torch.conj, t.is_conj()), (neg_view, t.is_neg())) if is_so]

    def __call__(self) -> torch.Tensor | None:
        return self.ref()

    def again(self) -> torch.Tensor:
        alive = self.ref()
        if alive is not None:
            return alive
        with torch.no_grad():
            found = self.data()
            for made in self._lazy:
                found = made(found)
            return found

    def data(self) -> torch.Tensor:
        """What was its memory, should it have been given other (`p.grad.data = …`)."""
        with torch.no_grad():
            return self._spot.tensor().clone()


class CudaDevice:
    """One GPU: its pool, its capture stream, its recordings' memory."""

    roomy = 256 << 20
    failures: Sequence[Failure] = _FAILURES
    first_uses: Sequence[str] = _FIRST_USES

    def __init__(self, torch_device: torch.device) -> None:
        gone = torch_functions.missing(cuda=True)
        if gone:
            raise Refusal(f"this torch release lacks {', '.join(gone)}", "use one that `phonograph doctor` names")
        self.torch_device = torch_device
        self.index: int = torch_device.index
        self.pool = Pool(torch_device)
        self._stream = CaptureStream(torch_device)
        # The first graph of a process takes memory for the generator's state: from what the caller's stream has, and not a
        # segment for our own.
        first = Graph()
        first.register_generator_state(torch.cuda.default_generators[self.index])
        self._memory = PrivatePool(self.index, self._stream)
        torch_cuda.silence_stream_mismatch()
        self._generators = GraphGenerators(torch_device)
        self._warm_ups = WarmUps(self._stream, self._memory, self.pool)
        self._held_up = False  # recordings have gone, and somebody holds an output of theirs
        self._checks = CudaChecks(torch_device)
        self._once = math.inf  # bytes of results whose memory the next capture uses once, for true edges
        self._room = 0  # bytes that the constants of the next recording may need
        # Bound here, so that a replay goes through no more calls than it has to.
        self.is_current, self.enter, self.joining = self._stream.is_current, self._stream.enter, self._stream.joining
        self.beside, self.apart = self._warm_ups.beside, self._warm_ups.apart
        self.backward_begins = self._warm_ups.backward_begins
        self.backward_passes = self._warm_ups.backward_passes
        self.backward_ends = self._warm_ups.backward_ends

    def release_unused(self) -> None:
        """Give back what is cached outside of pools and used by nobody, where that is much: a call in the pool will not use it,
        and may need as much there."""
        least = max(cuda_memory.SEGMENT, torch.cuda.memory_reserved(self.index) // _MUCH)
        if cuda_memory.cached(self.index) > least:
            torch.cuda.empty_cache()

    def capture(self, plan: CapturePlan) -> Captured:
        once, self._once = self._once, math.inf
        states = self._generators.told(plan.reach)
        self._warm_ups.leave_backwards()
        self._warm_ups.release_cached()
        self.release_unused()
        if self._checks.full:
            self._checks = CudaChecks(self.torch_device)
        self._checks.make_room()
        room = self._room_for_constants()
        memory = self._memory
        with self._stream.on(), memory.undisturbed(plan.protected, plan.releasable) as held:
            made_room = memory.make_room(plan.expected)
            before = cuda_memory.blocks(memory.handle) if held is None or made_room else held.there
            with memory.allocations() as allocated:
                capture = Capture(plan, self._stream, memory, self._generators, states, room, before, once)
                capture.looks_at(self._checks.answers())
                if held is not None:
                    capture.watch.give_back = held.give_back
                try:
                    capture.run()
                except Again:
                    self._room = room.wanted
                    raise
                except torch.OutOfMemoryError:
                    if not once or capture.watch.notebook is None:
                        raise
                    self._once = 0
                    raise _uses_once() from None
                finally:
                    if capture.watch.notebook is not None:
                        capture.watch.notebook.release()
                memory.end_workspace()
                room.fill()
            if (notebook := capture.watch.notebook) is not None:
                notebook.close()
                if once and takes_too_much(notebook, allocated):
                    self._once = largest_once(notebook, allocated) if once == math.inf else 0
                    raise _uses_once()
            if capture.watch.refusal is not None:
                raise capture.watch.refusal
            footprint = memory.footprint(allocated, before) | capture.in_common
        return capture.captured(footprint, allocated)

    def _room_for_constants(self) -> Room:
        """Memory for the constants of the next recording. It is no part of the pool, and is given back where there are none."""
        nbytes, self._room = self._room, 0
        with torch.cuda.device(self.index):
            try:
                return Room(self.torch_device, nbytes, self._stream.served)
            except torch.OutOfMemoryError:
                raise Refusal("has no memory for what it copies from the CPU", "keep it on the GPU", final=False) from None

    def once(self, call: Callable[[], Any], rewind: Rewind | None) -> Any:
        self._warm_ups.leave_backwards()
        return once(call, rewind, self._stream, self._generators)

    def settle(self, recording: Recording) -> None:
        self._memory.settle(recording, self.pool)
        self.release_unused()

    def outlives(self, t: torch.Tensor) -> _Ghost | None:
        """A tensor of the pool: nothing executes during a capture, so that its contents stay, whoever gets its memory."""
        address, nbytes = t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()
        return _Ghost(t) if self._memory.had(address, nbytes) else None

    def anchor(self, place: Spans) -> object:
        return self._memory.anchor

    def tidy(self) -> None:
        """When nobody needs the pool any more, it goes. As long as somebody does (a recording, or who holds an output), all of
        it stays, so that the next recording had better find room in it than begin another: but for a pool that is much larger
        than what was last needed. That goes when the last of these does."""
        if not (self.pool.untidy or self._held_up) or torch.cuda.is_current_stream_capturing():  # somebody else's: later
            return
        some_went, self.pool.untidy = self.pool.untidy, False
        self._warm_ups.leave_backwards()
        self.pool.sweep()
        retires = not self._memory.is_needed() or (some_went and self._memory.is_too_large(self.pool))
        if retires:
            self._memory.begin_anew()
        self._held_up = not self.pool.recordings and self._memory.is_needed()
        if retires or some_went:
            torch.cuda.empty_cache()

    @property
    def pool_bytes(self) -> int:
        return self._memory.nbytes

    @property
    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.index)

    @property
    def spare(self) -> int:
        return torch.cuda.mem_get_info(self.index)[0] // 8
