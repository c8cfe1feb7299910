"""The CUDA driver functions that torch does not expose, called directly.

Facts and signatures: CUDA driver API reference, "Graph Management" and "Stream Management". Through ctypes, because the
driver library is there wherever CUDA is, and because a launch costs less this way (1.5 us of CPU on an H200 host,
against 1.65 us through cuda-bindings and 2.3 us through `CUDAGraph.replay()`; benchmarks/results).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any

__all__ = ["DriverError", "end_broken_capture", "launcher"]

_INVALIDATED = 2  # CU_STREAM_CAPTURE_STATUS_INVALIDATED
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class DriverError(RuntimeError):
    """A driver function failed; the message has its name and CUresult."""


@lru_cache(maxsize=None)
def _library() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@lru_cache(maxsize=None)
def _function(name: str, *types: Any) -> Any:
    f = getattr(_library(), name)
    f.argtypes = types
    f.restype = ctypes.c_int
    return f


def launcher(graph_exec: int) -> Callable[[int], int]:
    """A function of a stream that launches an instantiated graph on it; returns the CUresult (0: success)."""
    launch = _function("cuGraphLaunch", ctypes.c_void_p, ctypes.c_void_p)
    handle = ctypes.c_void_p(graph_exec)
    return lambda stream: launch(handle, stream)  # type: ignore[no-any-return]


def end_broken_capture(stream: int) -> None:
    """Replace an invalidated capture by an empty one.

    An unsafe call during a capture invalidates it: from then on `cudaStreamEndCapture` fails, torch's `capture_end`
    throws before it has ended its own bookkeeping, and the allocator and the random generators stay in capture mode
    (torch 2.11: the next `dropout` raises "Offset increment outside graph capture"). So the driver's capture is ended
    here, and a new one begun in its place, which torch can then end in good order.
    """
    status = ctypes.c_int(0)
    handle = ctypes.c_void_p(stream)
    _function("cuStreamIsCapturing", ctypes.c_void_p, ctypes.c_void_p)(handle, ctypes.byref(status))
    if status.value != _INVALIDATED:
        return
    graph = ctypes.c_void_p()
    _function("cuStreamEndCapture", ctypes.c_void_p, ctypes.c_void_p)(handle, ctypes.byref(graph))
    code = _function("cuStreamBeginCapture_v2", ctypes.c_void_p, ctypes.c_int)(handle, _THREAD_LOCAL)
    if code:
        raise DriverError(f"cuStreamBeginCapture failed with CUresult {code}")
