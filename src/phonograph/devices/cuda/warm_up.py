"""Live calls before a capture, and their backwards.

They run on the capture stream and in the private pool, so that what they leave behind is there in the same order when the
capture comes: the handles of libraries, autograd's accumulation nodes, memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

import torch

from ..._torch import cuda as torch_cuda
from ..._torch.autograd import backward_id
from ...distributed.watchdog import OWN_THREADS
from ...memory.pool import Pool
from . import allocator as cuda_memory
from .capture import slot
from .capture_stream import CaptureStream
from .private_pool import PrivatePool

__all__ = ["WarmUps"]


def _places(arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Slots for these, where there is memory for them: a live call does not need any."""
    try:
        with torch.inference_mode(False):
            return [*map(slot, arguments)]
    except torch.OutOfMemoryError:
        return []


def _is_only_thread() -> bool:
    """Whether there is no other thread of Python's, but for our own."""
    return all(t is threading.current_thread() or t.name.startswith(OWN_THREADS) for t in threading.enumerate())


class WarmUps:
    """Live calls on one GPU that run where captures are made."""

    def __init__(self, stream: CaptureStream, memory: PrivatePool, pool: Pool) -> None:
        self._stream, self._memory, self._pool = stream, memory, pool
        self._backwards: ExitStack | None = None  # where the backward of a warm-up call works, while it runs
        self._strayed = False  # something has worked on the capture stream outside of the pool

    @contextmanager
    def beside(self, arguments: Sequence[torch.Tensor], lasting: int, spread: bool) -> Iterator[None]:
        """Warm-up calls run on the capture stream and in the pool: libraries then make their handles and autograd its
        accumulation nodes for that stream, and the capture finds its memory already there, in the same order: what will be
        slots comes first. What they make may live long (an optimizer's state), so it must not lie where a recording writes.
        Nor, where much of it is known to be `lasting`, in a segment with more room than it needs, which others would have to
        do without. What they make on streams of their own comes from the pool as well, where they are `spread`: a capture
        takes the same there, gradients for example, which would be there twice. But another thread may have a capture of its
        own, whose memory must not be ours."""
        self.leave_backwards()
        torch_cuda.measure_outside_of_pools()
        clear_of = self._pool.footprints() | self._pool.protected()
        if self._memory.left_behind(clear_of):
            self._strayed = True
            with self._stream.on():
                yield
            return
        with self._stream.on(), self._memory.undisturbed(clear_of):
            apart = self._memory.keeping_whole(lasting) if lasting else nullcontext()
            route = torch_cuda.route_to_pool(self._stream.index, self._memory.handle, all_threads=spread and _is_only_thread())
            with apart, route:
                places = _places(arguments)
                yield
                del places
            self._memory.end_workspace(lone=True)
            self._memory.look()

    def backward_begins(self, reads: Sequence[torch.Tensor]) -> None:
        """It works on the capture stream and in the pool as well, where the memory of its forward becomes free as it goes.

        Memory of another stream's would be free for that as soon as what reads it here is launched, while other parts of the
        same backward go on there: so it is kept until the end, when autograd lets the streams wait for each other."""
        if not self._stream.is_here:
            return
        if torch.cuda.is_current_stream_capturing():  # it is part of another call
            return
        self._stream.reads += reads
        self._strayed = True  # at its end at the latest, where gradients are added up
        if self._backwards is not None:
            return
        anchor, clear_of = self._memory.anchor, self._pool.footprints() | self._pool.protected()
        torch_cuda.clear_cublas_workspaces()
        torch_cuda.measure_outside_of_pools()
        if self._memory.left_behind(clear_of):
            return
        with torch_cuda.route_to_pool(self._stream.index, anchor.handle, all_streams=True):
            held = cuda_memory.hold(anchor.handle, clear_of, anchor.workspace)
        if held is not None:
            with ExitStack() as place:
                place.callback(held.release)
                place.enter_context(torch_cuda.route_to_pool(self._stream.index, anchor.handle))
                self._backwards = place.pop_all()

    def backward_passes(self, grads: Sequence[torch.Tensor]) -> None:
        if self._backwards is not None:
            self._stream.reads += grads

    def backward_ends(self) -> None:
        self._stream.reads.clear()
        if torch.cuda.is_current_stream_capturing():
            return
        self.leave_backwards()
        torch_cuda.clear_cublas_workspaces()
        self.release_cached()

    def leave_backwards(self) -> None:
        """The backward that has begun works elsewhere from now on: it has ended, or has failed, or something else needs the
        pool."""
        place, self._backwards = self._backwards, None
        if backward_id() < 0:
            self._stream.reads.clear()
        if place is not None:
            place.close()
            self._memory.look()

    def release_cached(self) -> None:
        """Give back what is cached for the capture stream outside of the pool: what backwards of warm-up calls have worked in
        that had to leave it, and the gradients that they gave. Nobody else would use it. (torch can only give back what is
        cached for other streams as well.)"""
        if self._strayed:
            used = cuda_memory.outside(self._stream.index, self._stream.stream.cuda_stream)
            if not all(used):
                torch.cuda.empty_cache()
            self._strayed = any(used)  # what is in use there may be cached later

    @contextmanager
    def apart(self) -> Iterator[torch.cuda.Stream]:
        with self._stream.on():
            yield self._stream.stream
        self._strayed = True  # what was made has taken memory of its own, and left some
