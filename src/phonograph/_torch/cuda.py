"""Private parts of torch: the CUDA allocator, streams, workspaces."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import NamedTuple

import torch
import torch.backends.mha
import torch.overrides
import torch.utils._device
import torch.utils._python_dispatch

from .dynamic import Private
from .functions import Handle, _c

__all__ = [
    "ASKS_FOR_CAPTURE",
    "Forgotten",
    "OnStream",
    "allocations_since",
    "clear_cublas_workspaces",
    "counts_by_capture",
    "current_device",
    "measure_outside_of_pools",
    "occupy",
    "raw_alloc",
    "raw_free",
    "raw_stream",
    "route_by_stream",
    "route_to_pool",
    "segments",
    "segments_expand",
    "silence_stream_mismatch",
    "take_cublas_workspace",
    "wait_for",
]


def segments(pool: Handle) -> list[dict[str, Private]]:
    """The allocator's segments in a pool (torch.cuda.memory_snapshot's records).

    torch picks them out itself, where it is given the handle; but 2.11 then gives back a reference to each of its two numbers
    that it never took (`sys.getrefcount` falls by one a call), and the interpreter crashes some captures later. So it gets
    numbers that nobody else has, with a reference more, which is taken back where it is still there.
    """
    numbers = tuple(map(_Number, pool))
    before = [*map(sys.getrefcount, numbers)]
    _counted(ctypes.pythonapi.Py_IncRef, numbers)
    found: list[dict[str, Private]] = torch.cuda.memory_snapshot(numbers)
    now = [*map(sys.getrefcount, numbers)]
    _counted(ctypes.pythonapi.Py_DecRef, [n for n, had, has in zip(numbers, before, now, strict=True) if has > had])
    return [s for s in found if tuple(s["segment_pool_id"]) == pool]


ASKS_FOR_CAPTURE = torch.cuda.graphs, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing.__code__
"""Where `torch.cuda.is_current_stream_capturing` finds what it calls, by which name, and its own code."""


def segments_expand() -> bool:
    """Whether the allocator has segments that grow, each of several allocations of the driver's."""
    return any(s.get("is_expandable") for s in torch.cuda.memory_snapshot())


def _counted(change: Private, things: Iterable[object]) -> None:
    """Change the reference count of these. (A function of its own: a variable of a loop would be one reference more.)"""
    for thing in things:
        change(ctypes.py_object(thing))


class _Number(int):
    """An integer that is an object of its own, whatever its value."""


class OnStream:
    """What ``with torch.cuda.stream(stream):`` is, for a stream of the current device, in three calls of torch's."""

    def __init__(self, stream: Private) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._before: tuple[int, int, int] = _c("_cuda_getCurrentStream")(self._stream.device_index)
        _c("_cuda_setStream")(self._stream.stream_id, self._stream.device_index, self._stream.device_type)

    def __exit__(self, *_: object) -> None:
        _c("_cuda_setStream")(*self._before)


class _Route(NamedTuple):
    """Where allocations on a stream come from, or those of a thread on all of them, or all."""

    device: int
    pool: Handle
    stream: int
    all_streams: bool
    all_threads: bool

    def begin(self) -> None:
        """The stream is the current one."""
        everything = self.all_threads and hasattr(torch._C, "_cuda_beginAllocateToPool")
        of = "" if everything else "CurrentThread" if self.all_streams else "CurrentStream"
        _c(f"_cuda_beginAllocate{of}ToPool")(self.device, self.pool)

    def ends(self) -> tuple[Callable[[], object], Callable[[], object]]:
        """What is to be called at its end, in turn. Neither is a function of Python's, whose start could be interrupted."""
        place = self.device, self.pool
        return partial(_c("_cuda_endAllocateToPool"), *place), partial(_c("_cuda_releasePool"), *place)

    def retake(self) -> None:
        """Begin in the place of the way that torch has made, for a pool that it holds."""
        _c("_cuda_endAllocateToPool")(self.device, self.pool)
        self.begin()
        _c("_cuda_releasePool")(self.device, self.pool)


_routes: list[_Route] = []


@contextmanager
def route_to_pool(device: int, pool: Handle, *, all_streams: bool = False, all_threads: bool = False) -> Iterator[None]:
    """Allocations on the current stream come from `pool`, also those that autograd's threads make on it; or those of this
    thread on `all_streams`; or of `all_threads` on all streams. (There is one such way to a pool at a time.)"""
    route = _Route(device, pool, raw_stream(device), all_streams, all_threads)
    stop, release = route.ends()
    route.begin()
    _routes.append(route)
    try:
        yield
    finally:
        _routes.remove(route)
        stop()
        release()


def route_by_stream(device: int, pool: Handle) -> None:
    """What a capture allocates comes from `pool` because it is on the current stream, and not because it is captured. torch
    ends that at the end of the capture."""
    _Route(device, pool, raw_stream(device), False, False).retake()


def counts_by_capture() -> bool:
    """Whether torch counts random numbers for each of the driver's captures by itself, of which a body has its own. (It came
    after torch's own bodies.)"""
    return hasattr(torch._C._CUDAGraph, "get_currently_capturing_graph")


def measure_outside_of_pools() -> None:
    """Where Inductor measures kernels to choose among them, it takes memory just for that (to empty the GPU's cache, 60 MiB on
    an H200): not from a pool, which would keep it."""
    heuristics = sys.modules.get("torch._inductor.runtime.triton_heuristics")
    kind: object = getattr(heuristics, "CachingAutotuner", None)
    if not hasattr(kind, "bench") or hasattr(kind.bench, "__wrapped__"):  # else it is not loaded, or this was done before
        return
    bench = kind.bench

    @wraps(bench)
    def outside(*args: object, **kwargs: object) -> object:
        mine = [route for route in _routes if route.stream == raw_stream(route.device)]
        for end in [end for route in mine for end in route.ends()]:
            end()
        try:
            return bench(*args, **kwargs)
        finally:
            for route in mine:
                route.begin()

    kind.bench = outside


def raw_alloc(nbytes: int, stream: int) -> int:
    """Memory from the caching allocator that no tensor owns; never filled, whatever the determinism settings."""
    return int(_c("_cuda_cudaCachingAllocator_raw_alloc")(nbytes, stream))


raw_free: Callable[[int], None] = _c("_cuda_cudaCachingAllocator_raw_delete")
"""Give it back. (No function of Python's, whose start could be interrupted.)"""


def occupy(cycles: int) -> None:
    """Keep the current stream busy for so many cycles of its device; not at all where torch has no function for it."""
    if (sleep := getattr(torch.cuda, "_sleep", None)) is not None:
        sleep(cycles)


def wait_for(stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
    """Let one stream wait for what another has been given so far, past torch's Python functions, which a capture listens to."""
    plain: Private = torch.cuda.Event.__base__
    event = torch.cuda.Event()
    plain.record(event, other)
    plain.wait(event, stream)


def clear_cublas_workspaces() -> None:
    """torch keeps a workspace for cuBLAS for each stream, until somebody clears them. Cleared before and after a capture, so
    that a recording's workspace is not memory that somebody else frees one day."""
    _c("_cuda_clearCublasWorkspaces")()


def take_cublas_workspace() -> None:
    """Have torch take a workspace for cuBLAS on the current stream, now."""
    torch.cuda.current_blas_handle()


def silence_stream_mismatch() -> None:
    """Warm-up calls run on the capture stream, a function that turns out to be unrecordable on the user's: autograd then
    warns of an accumulation node of another stream. It synchronizes them rightly, and the user can do nothing about it."""
    setter = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)
    if setter is not None:
        setter(False)


def let_copies_be_seen(on: bool) -> bool:
    """Whether what torch makes of Python numbers for a GPU is first a tensor on the CPU for all who see operators, and its copy
    an operator of its own; what that was before. (Fake tensors are made so. It holds for all threads, and changes nothing.)"""
    get, put = _c("_only_lift_cpu_tensors"), _c("_set_only_lift_cpu_tensors")
    if get is None or put is None:
        return False
    before = bool(get())
    put(on)
    return before


raw_stream: Callable[[int], int] = _c("_cuda_getCurrentRawStream")
"""The current stream's cudaStream_t on a device. 0.1 us; `torch.cuda.current_stream()` costs 3.6 us."""

current_device: Callable[[], int] = _c("_cuda_getDevice")
"""The index of the thread's current device. 0.1 us."""


class Forgotten(Exception):
    """What was asked for is not in the allocator's history any more."""


@contextmanager
def allocations_since(device: int) -> Iterator[list[tuple[int, int]]]:
    """Collects (address, bytes) of everything allocated on the device inside the block; the list is filled at its end. Where
    the user records the allocator's history, that is read and left as it is.

    Raises:
        Forgotten: at the block's end, if that history does not reach back to its beginning.
    """
    found: list[tuple[int, int]] = []
    if _c("_cuda_isHistoryEnabled")():
        if not (last := _history(device)[-1:]):  # it has just begun
            raw_free(raw_alloc(1, 0))
            last = _history(device)[-1:]
        yield found
        now = _history(device)
        before = next((i for i in range(len(now), 0, -1) if last and now[i - 1] == last[0]), 0)
        if not before:
            raise Forgotten
        found += _allocations(now[before:])
        return
    history = torch.cuda.memory._record_memory_history
    history(enabled="all", context=None, stacks="python", max_entries=1_000_000, clear_history=True)
    try:
        yield found
    finally:
        try:
            found += _allocations(_history(device))
        finally:
            history(enabled=None, clear_history=True)


def _history(device: int) -> list[dict[str, object]]:
    """What the allocator has noted, the latest last, each with the time."""
    traces: list[list[dict[str, object]]] = torch.cuda.memory._snapshot()["device_traces"]
    return traces[device] if device < len(traces) else []


def _allocations(entries: list[dict[str, Private]]) -> list[tuple[int, int]]:
    return [(e["addr"], e["size"]) for e in entries if e["action"] == "alloc"]
