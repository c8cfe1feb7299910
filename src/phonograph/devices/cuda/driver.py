"""The CUDA driver functions that torch does not expose, called directly.

Facts and signatures: CUDA driver API reference, "Graph Management" and "Stream Management". Through ctypes, because the
driver library is there wherever CUDA is, and because a launch costs less this way (1.5 us of CPU on an H200 host,
against 1.65 us through cuda-bindings and 2.3 us through `CUDAGraph.replay()`; benchmarks/results).
"""

from __future__ import annotations

import ctypes
import math
import re
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import cache, partial
from typing import NamedTuple

from ..._torch.dynamic import Private

__all__ = ["KERNEL", "DriverError", "Event", "KernelNumbers", "Launch", "Pointers", "capture_nothing", "captured_graph",
           "captured_nodes", "checked", "context", "counting", "disable", "function", "is_capturing", "kernel_name", "kind",
           "launch_of", "launcher", "library", "new_stream", "nodes", "parameters", "range_of", "set_context",
           "unsafe_calls", "waits_for", "words_anywhere", "words_of"]  # fmt: skip

_ACTIVE = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE
_WORD = 8  # bytes of an address
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_THREAD_LOCAL, _RELAXED = 1, 2  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, ..._RELAXED


class DriverError(RuntimeError):
    """A driver function failed; the message has its name and CUresult."""


@cache
def library() -> Private:
    return ctypes.CDLL("libcuda.so.1")


@cache
def function(name: str, *types: Private) -> Private:
    f = getattr(library(), name)
    f.argtypes = types
    f.restype = ctypes.c_int
    return f


def _bound(name: str, *arguments: object) -> Callable[[], int]:
    """A call of a driver function with these arguments, which are ctypes objects and need no conversion: half the cost."""
    f = library()[name]
    f.restype = ctypes.c_int
    return partial(f, *arguments)


def launcher(graph_exec: int, stream: int) -> Callable[[], int]:
    """A function that launches an instantiated graph on a stream; returns the CUresult (0: success)."""
    return _bound("cuGraphLaunch", ctypes.c_void_p(graph_exec), ctypes.c_void_p(stream))


def new_stream() -> int:
    """A stream of the current context that nobody else has (torch gives out 32 of its own, in turn), and that does not wait for
    the legacy default stream. It is there for as long as the process."""
    stream = ctypes.c_void_p()
    checked(function("cuStreamCreate", ctypes.c_void_p, ctypes.c_uint)(ctypes.byref(stream), _NON_BLOCKING), "cuStreamCreate")
    assert stream.value is not None
    return stream.value


def is_capturing(stream: int) -> bool:
    """Whether what is launched on the stream is captured."""
    status = ctypes.c_int(0)
    code = function("cuStreamIsCapturing", ctypes.c_void_p, ctypes.c_void_p)(stream, ctypes.byref(status))
    checked(code, "cuStreamIsCapturing")
    return status.value == _ACTIVE


def capture_nothing(stream: int, outer: int = 0) -> None:
    """Replace the capture on a stream by an empty one. It may be that of a body of a graph, the `outer` one.

    A capture that an unsafe call has invalidated, or that leaves work on another stream which nothing waits for, cannot be
    ended: `cudaStreamEndCapture` fails, torch's `capture_end` throws before it has ended its own bookkeeping, and the allocator
    and the random generators stay in capture mode (torch 2.11: the next `dropout` raises "Offset increment outside graph
    capture", and nothing can be allocated in the pool again). So the driver's capture is ended here, whatever it says to that,
    and a new one begun in its place, which torch can then end in good order.

    A graph goes with its bodies. Where the capture of one was invalidated, the driver has destroyed that, and destroying the
    whole would crash (driver 580): its memory on the host is lost.
    """
    graph = ctypes.c_void_p()
    function("cuStreamEndCapture", ctypes.c_void_p, ctypes.c_void_p)(stream, ctypes.byref(graph))
    if graph.value:
        function("cuGraphDestroy", ctypes.c_void_p)(outer or graph)
    code = function("cuStreamBeginCapture_v2", ctypes.c_void_p, ctypes.c_int)(stream, _THREAD_LOCAL)
    checked(code, "cuStreamBeginCapture")


@contextmanager
def unsafe_calls() -> Iterator[None]:
    """What this thread calls inside the block does not invalidate a capture that is under way, its own or another's."""
    exchange, mode = function("cuThreadExchangeStreamCaptureMode", ctypes.c_void_p), ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


class Event:
    """A place in a stream of the current context. It may go while the device is on the way there."""

    def __init__(self) -> None:
        self._event = ctypes.c_void_p()
        self._context = context()
        create = function("cuEventCreate", ctypes.c_void_p, ctypes.c_uint)
        checked(create(ctypes.byref(self._event), _NO_TIMING), "cuEventCreate")
        self._stream = -1
        self._record: Callable[[], int] = int

    def record(self, stream: int) -> None:
        """Put it behind what was launched on the stream. About 0.6 us."""
        if stream != self._stream:
            self._record, self._stream = _bound("cuEventRecord", self._event, ctypes.c_void_p(stream)), stream
        self._record()

    def reached(self) -> bool:
        """Whether the device is past it, or it was never recorded."""
        if context() is None:
            set_context(self._context)
        with unsafe_calls():
            return bool(function("cuEventQuery", ctypes.c_void_p)(self._event) != _NOT_READY)


class _KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("func", ctypes.c_void_p), ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("params", ctypes.POINTER(ctypes.c_void_p)), ("extra", ctypes.c_void_p), ("kern", ctypes.c_void_p),
        ("ctx", ctypes.c_void_p),
    )  # fmt: skip


def nodes(graph: int | None) -> list[int]:
    """The nodes of a graph."""
    get = function("cuGraphGetNodes", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    count = ctypes.c_size_t(0)
    get(graph, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    get(graph, nodes, ctypes.byref(count))
    return [n for n in nodes if n is not None]


KERNEL, _MEMCPY, _MEMSET = 0, 1, 2  # CUgraphNodeType
_EXTRA = (1, 2)  # CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE
_EMPTY = 5
_BY_ADDRESS = (2, 4)  # CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_UNIFIED
_RANGE_START, _RANGE_SIZE = 11, 12  # CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, ..._RANGE_SIZE


def kind(node: int) -> int:
    kind = ctypes.c_int(-1)
    function("cuGraphNodeGetType", ctypes.c_void_p, ctypes.c_void_p)(node, ctypes.byref(kind))
    return kind.value


def context() -> int | None:
    """The thread's current context; a thread that has not used CUDA yet has none."""
    found = ctypes.c_void_p()
    function("cuCtxGetCurrent", ctypes.c_void_p)(ctypes.byref(found))
    return found.value


def set_context(to: int | None) -> None:
    """Give the thread a context: torch does so at its first use of CUDA, and a direct launch may come before that."""
    code = function("cuCtxSetCurrent", ctypes.c_void_p)(to)
    checked(code, "cuCtxSetCurrent")


def captured_graph(stream: int) -> int | None:
    """The graph that the capture on a stream makes."""
    status, graph = ctypes.c_int(0), ctypes.c_void_p()
    info = function("cuStreamGetCaptureInfo_v2", *[ctypes.c_void_p] * 6)
    code = info(stream, ctypes.byref(status), None, ctypes.byref(graph), None, None)
    checked(code, "cuStreamGetCaptureInfo")
    return graph.value


def captured_nodes(stream: int) -> set[int]:
    """The nodes that the capture on a stream has made so far."""
    return set(nodes(captured_graph(stream)))


def counting(stream: int) -> Callable[[], int]:
    """A function that says how many nodes the capture on a stream has made so far, for as long as it goes on."""
    count = ctypes.c_size_t(0)
    ask = _bound("cuGraphGetNodes", ctypes.c_void_p(captured_graph(stream)), None, ctypes.byref(count))

    def nodes() -> int:
        ask()
        return count.value

    return nodes


def _sizes(params: _KernelParams) -> tuple[int, ...]:
    """The size in bytes of each parameter of a kernel."""
    if params.func:
        return _sizes_of("cuFuncGetParamInfo", params.func)
    return _sizes_of("cuKernelGetParamInfo", params.kern)


@cache  # a function's handle stays for as long as its module is loaded, and torch unloads none
def _sizes_of(name: str, of: int) -> tuple[int, ...]:
    info = function(name, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p)
    sizes: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while info(of, len(sizes), ctypes.byref(offset), ctypes.byref(size)) == 0:
        sizes.append(size.value)
    return tuple(sizes)


class _Memcpy3D(ctypes.Structure):
    """CUDA_MEMCPY3D."""

    _fields_ = (
        *((f"{end}{name}", kind) for end in ("src", "dst") for name, kind in (
            ("X", ctypes.c_size_t), ("Y", ctypes.c_size_t), ("Z", ctypes.c_size_t), ("LOD", ctypes.c_size_t),
            ("Kind", ctypes.c_int), ("Host", ctypes.c_void_p), ("Device", ctypes.c_uint64), ("Array", ctypes.c_void_p),
            ("Reserved", ctypes.c_void_p), ("Pitch", ctypes.c_size_t), ("Height", ctypes.c_size_t),
        )),
        ("width", ctypes.c_size_t), ("height", ctypes.c_size_t), ("depth", ctypes.c_size_t),
    )  # fmt: skip


class _Memset(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS."""

    _fields_ = (
        ("dst", ctypes.c_uint64), ("pitch", ctypes.c_size_t), ("value", ctypes.c_uint), ("element", ctypes.c_uint),
        ("width", ctypes.c_size_t), ("height", ctypes.c_size_t),
    )  # fmt: skip


class _Memcpy:
    """One memcpy node of a graph."""

    def __init__(self, node: int) -> None:
        self._params = _Memcpy3D()
        self._node = node
        get = function("cuGraphMemcpyNodeGetParams", ctypes.c_void_p, ctypes.c_void_p)
        checked(get(node, ctypes.byref(self._params)), "cuGraphMemcpyNodeGetParams")

    @property
    def by_address(self) -> bool:
        """Whether both ends are addresses."""
        return self._params.srcKind in _BY_ADDRESS and self._params.dstKind in _BY_ADDRESS

    def words(self) -> list[Private]:
        """Both addresses."""
        return [ctypes.c_uint64.from_buffer(self._params, place.offset) for place in (_Memcpy3D.srcDevice, _Memcpy3D.dstDevice)]

    def putter(self, graph_exec: int) -> Callable[[], int]:
        """As a kernel's. About 1.2 us."""
        return _bound("cuGraphExecMemcpyNodeSetParams", ctypes.c_void_p(graph_exec), ctypes.c_void_p(self._node),
                      ctypes.byref(self._params), ctypes.c_void_p(context()))  # fmt: skip


class _Kernel:
    """One kernel node of a graph, and buffers of its parameters' values that can be changed and `put` into effect."""

    def __init__(self, node: int) -> None:
        params = _KernelParams()
        get = function("cuGraphKernelNodeGetParams_v2", ctypes.c_void_p, ctypes.c_void_p)
        readable = get(node, ctypes.byref(params)) == 0 and bool(params.params)
        sizes = _sizes(params) if readable else ()
        self.buffers = [ctypes.create_string_buffer(ctypes.string_at(params.params[i], n), n) for i, n in enumerate(sizes)]
        self._pointers = (ctypes.c_void_p * len(sizes))(*map(ctypes.addressof, self.buffers))
        params.params = ctypes.cast(self._pointers, ctypes.POINTER(ctypes.c_void_p))
        params.ctx = params.ctx or context()  # null means the thread's own, and a new thread has none: the driver crashes
        self._params = params
        self._node = node

    def sizes(self) -> tuple[int, ...]:
        """Blocks, threads of a block, bytes of shared memory."""
        return *self._params.grid, *self._params.block, self._params.shared

    def words(self) -> list[Private]:
        """The parameters as words of 8 bytes, which can be read and set."""
        rows = [(ctypes.c_uint64 * (len(b) // _WORD)).from_buffer(b) for b in self.buffers if len(b) >= _WORD]
        return [ctypes.c_uint64.from_buffer(row, at * _WORD) for row in rows for at in range(len(row))]

    def putter(self, graph_exec: int) -> Callable[[], int]:
        """A function that lets later launches of an instantiated graph have the buffers' values, and returns the CUresult
        (0: success). About 0.6 us."""
        return _bound("cuGraphExecKernelNodeSetParams_v2", ctypes.c_void_p(graph_exec), ctypes.c_void_p(self._node),
                      ctypes.byref(self._params))  # fmt: skip


class Launch(NamedTuple):
    """One launch of a kernel."""

    name: str
    sizes: tuple[int, ...]
    """Blocks, threads of a block, bytes of shared memory."""
    given: list[int]
    """The parameters of up to eight bytes, as integers. (A larger one may have bytes that nobody has set.)"""


def launch_of(node: int) -> Launch:
    kernel = _Kernel(node)
    given = [int.from_bytes(b.raw, sys.byteorder) for b in kernel.buffers if len(b) <= _WORD]
    return Launch(kernel_name(node).decode(errors="replace"), kernel.sizes(), given)


def words_of(node: int) -> list[int]:
    """What a kernel or a copy is given, in words of 8 bytes: all addresses are among them, but those that lie in memory."""
    found = _Kernel(node).words() if kind(node) == KERNEL else _Memcpy(node).words() if kind(node) == _MEMCPY else []
    return [word.value for word in found]


def words_anywhere(node: int) -> list[int] | None:
    """All that may be an address in what a node is given, in structures without gaps too; None where the driver does not tell
    what it is given, or that need not be all: of a function of the host's, or of another graph."""
    sort = kind(node)
    if sort == KERNEL:
        buffers = [b.raw for b in _Kernel(node).buffers] or _in_one_piece(node)
        starts = ((raw, start) for raw in buffers for start in range(0, len(raw) - _WORD + 1, _WORD // 2))
        return [int.from_bytes(raw[i : i + _WORD], sys.byteorder) for raw, i in starts] if buffers else None
    if sort == _MEMCPY:
        copy = _Memcpy(node)
        return [word.value for word in copy.words()] if copy.by_address else None
    if sort == _MEMSET:
        params = _Memset()
        get = function("cuGraphMemsetNodeGetParams", ctypes.c_void_p, ctypes.c_void_p)
        return [params.dst] if get(node, ctypes.byref(params)) == 0 else None
    return [] if sort == _EMPTY else None


def _in_one_piece(node: int) -> list[bytes]:
    """The parameters of a kernel that was given them so (`extra` of `cuLaunchKernel`): nobody knows the single ones."""
    params = _KernelParams()
    get = function("cuGraphKernelNodeGetParams_v2", ctypes.c_void_p, ctypes.c_void_p)
    if get(node, ctypes.byref(params)) or params.params or not params.extra:
        return []
    row, found = ctypes.cast(params.extra, ctypes.POINTER(ctypes.c_void_p)), dict[int, int]()
    for at in range(0, 2 * len(_EXTRA), 2):
        if not row[at] or row[at] not in _EXTRA:
            break
        found[row[at]] = row[at + 1] or 0
    start, size = (found.get(what, 0) for what in _EXTRA)
    return [ctypes.string_at(start, ctypes.c_size_t.from_address(size).value)] if start and size else []


def range_of(address: int) -> tuple[int, int] | None:
    """What the driver has given in one piece, where an address lies in it (address, bytes); None if it lies in nothing."""
    ask = function("cuPointerGetAttribute", ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)
    start, size = ctypes.c_uint64(0), ctypes.c_size_t(0)
    if ask(ctypes.byref(start), _RANGE_START, address) or ask(ctypes.byref(size), _RANGE_SIZE, address) or not size.value:
        return None
    return start.value, size.value


def kernel_name(node: int) -> bytes:
    """The name of a kernel node's function, as its compiler has made it; b"" where the driver does not say."""
    params, name = _KernelParams(), ctypes.c_char_p()
    if function("cuGraphKernelNodeGetParams_v2", ctypes.c_void_p, ctypes.c_void_p)(node, ctypes.byref(params)):
        return b""
    asks, what = ("cuFuncGetName", params.func) if params.func else ("cuKernelGetName", params.kern)
    known = hasattr(library(), asks) and function(asks, ctypes.c_void_p, ctypes.c_void_p)(ctypes.byref(name), what) == 0
    return (name.value or b"") if known else b""


def waits_for(node: int) -> list[int]:
    """The nodes that come before one; [0] where the driver does not say."""
    asks = "cuGraphNodeGetDependencies_v2"
    if not hasattr(library(), asks):
        return [0]
    ask, count = function(asks, *[ctypes.c_void_p] * 4), ctypes.c_size_t(0)
    if ask(node, None, None, ctypes.byref(count)):
        return [0]
    found, edges = (ctypes.c_void_p * count.value)(), (ctypes.c_uint64 * count.value)()  # CUgraphEdgeData has 8 bytes
    return [n or 0 for n in found] if not count.value or ask(node, found, edges, ctypes.byref(count)) == 0 else [0]


def checked(code: int, function: str) -> None:
    if code:
        raise DriverError(f"{function} failed with CUresult {code}")


def reciprocal(x: float) -> float:
    """1 / x, infinite for 0, with its sign."""
    return 1.0 / x if x else math.copysign(math.inf, x)


def reciprocal_of_single(x: float) -> float:
    """1 / x as a launcher computes it that has made x a float32 before."""
    return reciprocal(struct.unpack("f", _packed("f", x))[0])


# What a launcher does to a scalar before it hands it to a kernel: nothing, `sub` negates, `div` takes the reciprocal.
_FORMS: tuple[Callable[[float], float], ...] = (lambda x: x, lambda x: -x, reciprocal_of_single, reciprocal)


def _runs(buffer: Private, found: Sequence[tuple[int, Private]]) -> list[tuple[Private, ...]]:
    """Places in a buffer, in order, with what each holds: where the same stands several times on end (a kernel for many tensors
    has a number for each of them) as one place, and how many times."""
    runs: list[tuple[Private, ...]] = []
    for at, what in found:
        size = struct.calcsize(what[0])
        if runs and runs[-1][3:] == what and runs[-1][1] + runs[-1][2] * size == at:
            buffer, start, times, *_ = runs.pop()
            runs.append((buffer, start, times + 1, *what))
        else:
            runs.append((buffer, at, 1, *what))
    return runs


def _packed(kind: str, x: float) -> bytes:
    """A number's bytes as a float32 or float64; infinite where it is too large, as it is for a cast."""
    try:
        return struct.pack(kind, x)
    except OverflowError:
        return struct.pack(kind, math.copysign(math.inf, x))


def _kernels(graphs: Iterable[int]) -> Iterator[_Kernel]:
    return (_Kernel(node) for graph in graphs for node in nodes(graph) if kind(node) == KERNEL)


def parameters(graphs: Iterable[int]) -> Iterator[list[int]]:
    """The parameters of each kernel of these graphs, as words of 8 bytes."""
    return ([word.value for word in kernel.words()] for kernel in _kernels(graphs))


def holds(graphs: Iterable[int], numbers: Iterable[float]) -> bool:
    """Whether the parameters of some kernel of these graphs have one of these numbers, as it is."""
    patterns = {struct.pack(kind, n) for n in numbers for kind in "fd"}
    if not patterns:
        return False
    anywhere = re.compile(b"|".join(map(re.escape, patterns)), re.DOTALL)
    return any(m.start() % 4 == 0 for kernel in _kernels(graphs) for b in kernel.buffers for m in anywhere.finditer(b.raw))


class KernelNumbers:
    """Where the parameters of a graph's kernels hold given numbers, as float32 or float64, in one of `_FORMS`.

    Found by their bytes, among the given nodes: the numbers are random, so that nothing else looks like them.
    """

    def __init__(self, graph_exec: int, nodes: Set[int], numbers: Mapping[float, float]) -> None:
        patterns: dict[bytes, Private] = {}
        for n, f, form in ((n, f, form) for n in numbers for f in "fd" for form in _FORMS):
            pattern = struct.pack(f, form(n))
            # Two forms that agree on the probe need not agree on the real number: then it is not known which was meant.
            patterns[pattern] = None if pattern in patterns else (f, n, form)
        patterns = {pattern: meant for pattern, meant in patterns.items() if meant is not None}
        anywhere = re.compile(b"|".join(map(re.escape, patterns)), re.DOTALL)
        self._kernels: list[_Kernel] = []  # with the memory from which the parameters are put into the graph
        self._puts: list[Callable[[], int]] = []  # what puts those of each into the graph
        # Which number, in which form; and where it stands, how many times on end, in which kernel.
        self._places: dict[Private, list[tuple[memoryview, int, int]]] = {}
        for node in (n for n in nodes if kind(n) == KERNEL):
            kernel = _Kernel(node)
            # (To set a slice of a ctypes array takes it a call for each byte.)
            raw = [(memoryview(b).cast("B"), b.raw) for b in kernel.buffers]
            places = [run for memory, data in raw for run in _runs(memory, [(m.start(), patterns[m[0]]) for m in
                      anywhere.finditer(data) if m.start() % 4 == 0])]  # fmt: skip
            for memory, at, times, *what in places:
                part = memory[at : at + times * struct.calcsize(what[0])]
                self._places.setdefault((*what,), []).append((part, times, len(self._kernels)))
            if places:
                self._kernels.append(kernel)
                self._puts.append(kernel.putter(graph_exec))
        self.found: set[float] = {n for _, n, _ in self._places}
        self._unknown: list[tuple[Private, bytes]] = [(None, b"")] * len(self._places)
        self._last = self._unknown  # the number itself, and how it stands there

    def set(self, numbers: Mapping[float, float]) -> None:
        """Write other numbers in their place, in the instantiated graph. About 0.6 us a kernel, where one of its numbers has
        other bits than last time: a bias correction of a count that is large has not."""
        last, self._last = self._last, self._unknown  # until all is set
        now, others = [*last], dict[int, None]()
        for i, ((f, n, form), places) in enumerate(self._places.items()):
            number, (was, stands) = numbers[n], last[i]
            if number is was:
                continue
            data = _packed(f, form(number))
            now[i] = number, data
            if data != stands:
                for memory, times, kernel in places:
                    memory[:] = data * times
                    others[kernel] = None
        for kernel in others:
            if code := self._puts[kernel]():
                checked(code, "cuGraphExecKernelNodeSetParams")
        self._last = now


_COPIES: Mapping[int, type[_Kernel] | type[_Memcpy]] = {KERNEL: _Kernel, _MEMCPY: _Memcpy}


class Pointers:
    """Places in the parameters of some copies in an instantiated graph that hold given addresses, to be set anew before
    each launch. That is how a graph copies from, and to, other memory each time without a copy outside of it."""

    def __init__(self, graph_exec: int, nodes: Set[int], addresses: Sequence[int], *, fresh: bool = True) -> None:
        """Raises `DriverError` where the addresses cannot all be found, each for itself. A graph that was launched before is
        not `fresh`: it may have others by now."""
        self._copies = [_COPIES[sort](node) for node in nodes if (sort := kind(node)) in _COPIES]
        index = {address: i for i, address in enumerate(addresses)}
        # Of each copy: where its parameters hold which of the addresses, and what puts them into the graph.
        self._places = [
            ([(word, index[word.value]) for word in copy.words() if word.value in index], copy.putter(graph_exec))
            for copy in self._copies
        ]
        found = {i for cells, _ in self._places for _, i in cells}
        if not len(found) == len(addresses) == len(index) or len(self._copies) != len(nodes):
            raise DriverError("the copies at the edges of the graph are not what they were expected to be")
        self._unknown = [0] * len(addresses)
        self._last = [*addresses] if fresh else self._unknown

    def set(self, addresses: list[int]) -> None:
        """In the order of those given when this was made. About 0.8 us for a copy, 1.8 us for several small ones, where one of
        its addresses is another than last time."""
        last = self._last
        self._last = self._unknown  # until all is set
        for cells, put in self._places:
            moved = False
            for cell, i in cells:
                at = addresses[i]
                if at != last[i]:
                    cell.value, moved = at, True
            code = put() if moved else 0
            if code:
                checked(code, "setting the addresses of a graph's copies")
        self._last = addresses


def disable(graph_exec: int, nodes: Set[int]) -> None:
    """Let nodes of an instantiated graph do nothing."""
    for node in nodes:
        code = function("cuGraphNodeSetEnabled", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)(graph_exec, node, 0)
        checked(code, "cuGraphNodeSetEnabled")
