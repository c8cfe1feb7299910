"""The private pool of CUDA graphs: memory that the caching allocator keeps for them alone.

A graph has its addresses baked in, so its memory must stay, whatever tensors come and go. The allocator knows such pools, and
frees one when its last graph is gone; an empty graph (`_Anchor`) keeps it there. Captures and warm-up calls take their memory
from it, and leave alone what others still hold (`allocator.py`). What a capture has taken is its footprint.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from ..._torch import cuda as torch_cuda
from ..._torch.functions import Handle
from ...capture.recording import MEMORY, Recording, memory_of
from ...errors import Refusal
from ...memory.pool import Pool
from ...memory.spans import Spans
from . import allocator as cuda_memory
from .capture_stream import CaptureStream
from .graphs import Graph, quietly

__all__ = ["PrivatePool"]

_ALONE = 2  # references to what only one attribute has, seen by who counts them


class _Anchor:
    """Keeps a graph pool's memory: an empty graph captured in it. It is made `in_turn` (`CaptureStream`): where a capture
    begins, torch writes an offset of 0 to where all graphs read how far the generator is, so that no replay may be under way.

    The allocator frees a pool when its last graph is gone, and refuses a handle that was once freed.

    `workspace` is where cuBLAS works in all graphs of the pool, once that is known: 32 MiB (H100, H200), which no graph
    expects to be left as they were. It is no part of any footprint, and never free. `needed` are the most bytes that recordings
    have needed at one time since some of them went.
    """

    def __init__(self) -> None:
        self.handle: tuple[int, int] = torch.cuda.graph_pool_handle()
        self.workspace: tuple[int, int] | None = None
        self.needed = 0
        self._graph = Graph()
        self._graph.capture_begin(pool=self.handle, capture_error_mode="thread_local")
        quietly(self._graph.capture_end)


class PrivatePool:
    """The pool of one GPU, of which recordings are made at present. Memory is taken for the capture stream."""

    def __init__(self, index: int, stream: CaptureStream) -> None:
        self.index = index
        self._stream = stream
        with stream.in_turn():
            self.anchor = _Anchor()
        self._spans = Spans()  # its memory after the last warm-up
        self._unsettled = Spans()  # what captures have allocated in it that have come to nothing

    @property
    def handle(self) -> Handle:
        """What torch calls it by."""
        return self.anchor.handle

    @property
    def nbytes(self) -> int:
        return cuda_memory.pool_bytes(self.handle)

    def begin_anew(self) -> None:
        """Captures take another pool from now on. The old one goes with its last recording."""
        with self._stream.in_turn():
            self.anchor, self._unsettled, self._spans = _Anchor(), Spans(), Spans()

    def look(self) -> None:
        """Note which memory is the pool's."""
        self._spans = self.spans()

    def spans(self) -> Spans:
        """Its memory."""
        return Spans((s["address"], s["total_size"]) for s in torch_cuda.segments(self.handle))

    def had(self, address: int, nbytes: int) -> bool:
        """Whether this was memory of the pool when it was last looked at."""
        return self._spans.covers(address, nbytes)

    @contextmanager
    def keeping_whole(self, most: int) -> Iterator[None]:
        """Nothing is taken from segments of the pool with more than so many bytes inside the block, if the device has as
        much as that is: a live call must not run out of memory that is there."""
        free, total = torch.cuda.mem_get_info(self.index)
        allowed = total * torch.cuda.get_per_process_memory_fraction(self.index) - torch.cuda.memory_reserved(self.index)
        held = cuda_memory.Hold()
        with suppress(torch.OutOfMemoryError), torch_cuda.route_to_pool(self.index, self.handle, all_streams=True):
            held = cuda_memory.hold_large(self.handle, most, int(min(free, allowed)))
        try:
            yield
        finally:
            held.release()

    @contextmanager
    def undisturbed(self, protected: Spans, apart: Sequence[tuple[int, int]] = ()) -> Iterator[cuda_memory.Hold | None]:
        """These addresses, live leases at least, are out of the allocator's reach inside the block, and cuBLAS has its
        workspace where it always is. What holds them can give back those `apart`."""
        torch_cuda.clear_cublas_workspaces()
        held = self._held(protected, apart)
        try:
            yield held
        except BaseException:
            torch_cuda.clear_cublas_workspaces()  # a capture that comes to nothing would leave one in the pool
            raise
        finally:
            if held is not None:
                held.release()

    def _held(self, protected: Spans, apart: Sequence[tuple[int, int]]) -> cuda_memory.Hold | None:
        """What holds these addresses and has the workspace at its place; None if nothing has to be held, or can be."""
        anchor = self.anchor
        if not len(protected) and anchor.workspace is None:
            return None
        if not self.left_behind(protected):
            with torch_cuda.route_to_pool(self.index, anchor.handle, all_streams=True):
                held = cuda_memory.hold(anchor.handle, protected, anchor.workspace, apart)
            if held is not None:
                return held
        # It cannot be shared: a pool of its own begins; the old one goes with its last recording.
        torch_cuda.clear_cublas_workspaces()
        self.anchor, self._unsettled = _Anchor(), Spans()
        return None

    def left_behind(self, protected: Spans) -> bool:
        """Whether a capture that has come to nothing has left something where others have memory now: it counts as taken, and
        cannot be held, but would be free in the middle of whatever comes next. (Where a backward fails, autograd's thread keeps
        what it had in hand until its next one.)"""
        if len(self._unsettled):
            taken = cuda_memory.taken(self.handle).items()
            self._unsettled = Spans((a, n) for a, n in taken if self._unsettled.meets(a, n))
        return any(protected.meets(a, n) for a, n in self._unsettled)

    def make_room(self, expected: int) -> bool:
        """Let there be so many bytes, and take what is missing in one piece: segments of the allocator's own size have ends in
        which nothing fits. Returns whether that was necessary."""
        missing = expected - cuda_memory.free_bytes(self.handle) if expected > cuda_memory.SEGMENT else 0
        if missing > cuda_memory.SEGMENT:
            with suppress(torch.OutOfMemoryError), torch_cuda.route_to_pool(self.index, self.handle):
                torch_cuda.raw_free(torch_cuda.raw_alloc(missing, self._stream.stream.cuda_stream))
        return missing > cuda_memory.SEGMENT

    def end_workspace(self, lone: bool = False) -> None:
        """Take cuBLAS's workspace from it, as long as it is known whose it was: it would keep it for ever, and others of torch
        free it. From now on it has it where this pool has room for it; `lone`: not in the middle of what something large may
        need, but by itself."""
        anchor = self.anchor
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
        handle = self.handle
        before = cuda_memory.taken(handle)
        with torch_cuda.route_to_pool(self.index, handle):
            torch_cuda.take_cublas_workspace()
        found = next(((at, n) for at, n in cuda_memory.taken(handle).items() if at not in before), None)
        torch_cuda.clear_cublas_workspaces()
        return found

    @contextmanager
    def allocations(self) -> Iterator[list[tuple[int, int]]]:
        """Collects what is allocated inside the block (address, bytes); it is not settled yet."""
        found: list[tuple[int, int]] = []
        try:
            with torch_cuda.allocations_since(self.index) as found:
                yield found
        except torch_cuda.Forgotten:
            raise Refusal("runs while the allocator's history is recorded, with too few entries to see what a capture takes",
                          "let _record_memory_history have more (max_entries)", final=False) from None  # fmt: skip
        finally:
            self._unsettled |= Spans(found or cuda_memory.taken(self.handle).items())

    def footprint(self, allocated: list[tuple[int, int]], before: list[cuda_memory.Block]) -> Spans:
        """The bytes of the pool that a launch may write, but for the workspace that all share: whatever was allocated in it
        since the capture began. It has more than it had `before` only if something was allocated elsewhere."""
        inside = Spans((b.address, b.nbytes) for b in before)
        if not all(inside.covers(a, n) for a, n in allocated):
            inside |= Spans((b.address, b.nbytes) for b in cuda_memory.blocks(self.handle))
        found = Spans((a, n) for a, n in allocated if inside.meets(a, n))
        return found if self.anchor.workspace is None else found - Spans([self.anchor.workspace])

    def settle(self, recording: Recording, pool: Pool) -> None:
        """Recordings can leave tensors behind in the pool that live on outside (gradients). Where one lies in the
        footprint of another recording, that one must not be played again."""
        there = [b for b in cuda_memory.blocks(self.handle) if not b.free]
        mine = [b for b in there if recording.footprint.meets(b.address, b.nbytes)]
        kept = recording.backward.kept.held if recording.backward is not None else ()
        given = Spans((x.address, x.nbytes) for x in recording.leases) - Spans(map(memory_of, kept))
        # What waits for another stream, or is garbage that lies where a result does, is nobody's: it will be free any time.
        # (Not so what code keeps for the backward, as `checkpoint` does: that stays for as long as the recording.)
        left = [b for b in mine if b.pending or given.meets(b.address, b.nbytes)]
        self._unsettled = (self._unsettled - recording.footprint) | Spans((b.address, b.nbytes) for b in left)
        active = [(b.address, b.nbytes) for b in there]
        self.anchor.needed = max(self.anchor.needed, (pool.footprints() | recording.footprint).nbytes)
        recording.program.owned = Spans((b.address, b.nbytes) for b in mine if not b.pending)
        for other in pool.recordings:
            reached = other.footprint | other.borrowed_memory
            if any(reached.meets(a, n) and not other.program.owned.meets(a, n) for a, n in active):
                other.spoiled.append(MEMORY)

    def is_needed(self) -> bool:
        """Whether anybody else has the anchor: recordings have it, and who holds what they gave."""
        return sys.getrefcount(self.anchor) > _ALONE

    def is_too_large(self, pool: Pool) -> bool:
        """Whether it has more than twice what recordings have needed at one time since this was last asked."""
        needed, self.anchor.needed = self.anchor.needed, pool.footprints().nbytes
        _, workspace = self.anchor.workspace or (0, 0)
        return 2 * (needed + workspace) < self.nbytes
