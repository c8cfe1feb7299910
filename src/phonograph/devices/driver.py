"""The CUDA driver functions that torch does not expose, called directly.

Facts and signatures: CUDA driver API reference, "Graph Management" and "Stream Management". Through ctypes, because the
driver library is there wherever CUDA is, and because a launch costs less this way (1.5 us of CPU on an H200 host,
against 1.65 us through cuda-bindings and 2.3 us through `CUDAGraph.replay()`; benchmarks/results).
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

__all__ = ["DriverError", "KernelNumbers", "end_broken_capture", "launcher"]

_INVALIDATED = 2  # CU_STREAM_CAPTURE_STATUS_INVALIDATED
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class DriverError(RuntimeError):
    """A driver function failed; the message has its name and CUresult."""


@cache
def _library() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _function(name: str, *types: Any) -> Any:
    f = getattr(_library(), name)
    f.argtypes = types
    f.restype = ctypes.c_int
    return f


def launcher(graph_exec: int) -> Callable[[int], int]:
    """A function of a stream that launches an instantiated graph on it; returns the CUresult (0: success)."""
    launch = _function("cuGraphLaunch", ctypes.c_void_p, ctypes.c_void_p)
    handle = ctypes.c_void_p(graph_exec)
    return lambda stream: launch(handle, stream)


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


class _KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("func", ctypes.c_void_p), ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("params", ctypes.POINTER(ctypes.c_void_p)), ("extra", ctypes.c_void_p), ("kern", ctypes.c_void_p),
        ("ctx", ctypes.c_void_p),
    )  # fmt: skip


def _kernel_nodes(graph: int) -> Iterator[int]:
    """The kernel nodes of a graph (node type 0)."""
    get = _function("cuGraphGetNodes", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    count = ctypes.c_size_t(0)
    get(graph, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    get(graph, nodes, ctypes.byref(count))
    kind_of = _function("cuGraphNodeGetType", ctypes.c_void_p, ctypes.c_void_p)
    for node in nodes:
        kind = ctypes.c_int(-1)
        kind_of(node, ctypes.byref(kind))
        if kind.value == 0 and node is not None:
            yield node


def _sizes(params: _KernelParams) -> list[int]:
    """The size in bytes of each parameter of a kernel."""
    owner, name = (params.func, "cuFuncGetParamInfo") if params.func else (params.kern, "cuKernelGetParamInfo")
    info = _function(name, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p)
    sizes: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while info(owner, len(sizes), ctypes.byref(offset), ctypes.byref(size)) == 0:
        sizes.append(size.value)
    return sizes


class _Kernel:
    """One kernel node whose parameters hold numbers to be set: (parameter, byte, format, number, form)."""

    def __init__(self, node: int, params: _KernelParams, values: list[bytes], places: list[Any]) -> None:
        self.node, self.places = node, places
        self.buffers = [ctypes.create_string_buffer(v, len(v)) for v in values]
        self.pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(b) for b in self.buffers))
        self.params = params
        self.params.params = ctypes.cast(self.pointers, ctypes.POINTER(ctypes.c_void_p))


def reciprocal(x: float) -> float:
    """1 / x, infinite for 0."""
    return 1.0 / x if x else math.inf


def reciprocal_of_single(x: float) -> float:
    """1 / x as a launcher computes it that has made x a float32 before."""
    return reciprocal(struct.unpack("f", struct.pack("f", x))[0])


# What a launcher does to a scalar before it hands it to a kernel: nothing, `sub` negates, `div` takes the reciprocal.
_FORMS: tuple[Callable[[float], float], ...] = (lambda x: x, lambda x: -x, reciprocal_of_single, reciprocal)


class KernelNumbers:
    """Where the parameters of a graph's kernels hold given numbers, as float32 or float64, in one of `_FORMS`.

    Found by their bytes: the numbers are random, so that nothing else looks like them.
    """

    def __init__(self, graph: int, numbers: Mapping[float, float]) -> None:
        patterns: dict[bytes, Any] = {}
        for n, f, form in ((n, f, form) for n in numbers for f in "fd" for form in _FORMS):
            pattern = struct.pack(f, form(n))
            # Two forms that agree on the probe need not agree on the real number: then it is not known which was meant.
            patterns[pattern] = None if pattern in patterns else (f, n, form)
        patterns = {pattern: meant for pattern, meant in patterns.items() if meant is not None}
        self._kernels: list[_Kernel] = []
        self.found: set[float] = set()
        get = _function("cuGraphKernelNodeGetParams_v2", ctypes.c_void_p, ctypes.c_void_p)
        for node in _kernel_nodes(graph):
            params = _KernelParams()
            if get(node, ctypes.byref(params)) or not params.params:
                continue
            values = [ctypes.string_at(params.params[i], size) for i, size in enumerate(_sizes(params))]
            places = [(i, at, f, n, form) for i, v in enumerate(values) for p, (f, n, form) in patterns.items()
                      for at in _occurrences(v, p)]  # fmt: skip
            if places:
                self._kernels.append(_Kernel(node, params, values, places))
                self.found |= {n for _, _, _, n, _ in places}

    def set(self, graph_exec: int, numbers: Mapping[float, float]) -> bool:
        """Write other numbers in their place, in the instantiated graph. About 0.6 us a kernel. False if one is nowhere."""
        put = _function("cuGraphExecKernelNodeSetParams_v2", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        for k in self._kernels:
            for i, at, f, n, form in k.places:
                struct.pack_into(f, k.buffers[i], at, form(numbers[n]))
            code = put(graph_exec, k.node, ctypes.byref(k.params))
            if code:
                raise DriverError(f"cuGraphExecKernelNodeSetParams failed with CUresult {code}")
        return self.found == numbers.keys()


def _occurrences(value: bytes, pattern: bytes) -> Iterator[int]:
    """Aligned places of a pattern in a parameter."""
    at = value.find(pattern)
    while at >= 0:
        if at % len(pattern) == 0 or at % 4 == 0:
            yield at
        at = value.find(pattern, at + 1)
