"""Conditional nodes of CUDA graphs, through the driver.

A conditional node has *bodies*: graphs of its own. A launch runs the body whose number a *handle* holds (`SWITCH`), or the only
body if the handle holds something else than 0 (`IF`), or for as long as it does (`WHILE`). Kernels set handles. Ours is written
in PTX, which the driver compiles for the device: it reads a number from memory, and calls a function of the driver's.

A body is captured like any other graph. The stream that is captured already can do that as well: its capture ends, captures of
bodies follow, and then it goes on behind the node. So all bodies have the memory of one stream, which the next one gets when
the one before is done with it.

Facts and signatures: CUDA driver API reference, "Graph Management" and "Stream Management"; PTX ISA, 6.0.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch

from ..._torch.dynamic import Private
from . import driver
from .driver import DriverError, checked, function, library

__all__ = ["IF", "SWITCH", "WHILE", "Node", "add", "capture_into", "kinds", "new_handle", "set_handle"]

IF, WHILE, SWITCH = 0, 1, 2  # CUgraphConditionalNodeType
_CONDITIONAL = 13  # CU_GRAPH_NODE_TYPE_CONDITIONAL
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
_ANY = -1  # of the numbers that a handle may get

_HEAD = """
.version 6.0
.target sm_70
.address_size 64
.extern .func cudaGraphSetConditional (.param .b64 handle, .param .b32 value);
"""

_SET = """
.visible .entry set_{kind} (.param .u64 handle, .param .u64 at, .param .s32 wanted)
{{
  .reg .pred %p<3>;
  .reg .b32 %r<5>;
  .reg .b64 %rd<4>;
  ld.param.u64 %rd1, [handle];
  ld.param.u64 %rd2, [at];
  ld.param.s32 %r1, [wanted];
  cvta.to.global.u64 %rd3, %rd2;
  ld.global.{kind} %r2, [%rd3];
  setp.eq.s32 %p1, %r2, %r1;
  selp.b32 %r3, 1, 0, %p1;
  setp.lt.s32 %p2, %r1, 0;
  selp.b32 %r4, %r2, %r3, %p2;
  {{
  .param .b64 first;
  st.param.b64 [first], %rd1;
  .param .b32 second;
  st.param.b32 [second], %r4;
  call.uni cudaGraphSetConditional, (first, second);
  }}
  ret;
}}
"""

_ADD = """
.visible .entry add (.param .u64 at, .param .s64 number)
{
  .reg .b64 %rd<6>;
  ld.param.u64 %rd1, [at];
  ld.param.s64 %rd2, [number];
  cvta.to.global.u64 %rd3, %rd1;
  ld.global.s64 %rd4, [%rd3];
  add.s64 %rd5, %rd4, %rd2;
  st.global.s64 [%rd3], %rd5;
  ret;
}
"""

_SETTERS = {torch.bool: "u8", torch.int32: "s32"}
_PTX = (_HEAD + "".join(_SET.format(kind=kind) for kind in _SETTERS.values()) + _ADD).encode()


@cache
def _kernel(name: str, context: int | None) -> Private:
    """A kernel of ours, loaded into a context: it stays there."""
    module, found = ctypes.c_void_p(), ctypes.c_void_p()
    with driver.unsafe_calls():
        checked(function("cuModuleLoadData", ctypes.c_void_p, ctypes.c_char_p)(ctypes.byref(module), _PTX), "cuModuleLoadData")
        get = function("cuModuleGetFunction", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
        checked(get(ctypes.byref(found), module, name.encode()), "cuModuleGetFunction")
    return found


def _launch(name: str, stream: int, *arguments: Private) -> None:
    """Launch one thread of it."""
    given = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    launch = function("cuLaunchKernel", ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3)
    checked(launch(_kernel(name, driver.context()), *[1] * 6, 0, stream, given, None), "cuLaunchKernel")


def set_handle(stream: int, handle: int, number: torch.Tensor, wanted: int = _ANY) -> None:
    """Let a handle have the number that lies in memory: of a bool tensor, or one of int32 that is not negative. With `wanted`,
    whether it is that number."""
    given = ctypes.c_uint64(handle), ctypes.c_uint64(number.data_ptr()), ctypes.c_int32(wanted)
    _launch(f"set_{_SETTERS[number.dtype]}", stream, *given)


def add(stream: int, address: int, number: int) -> None:
    """Add a number to the int64 at an address of the device."""
    _launch("add", stream, ctypes.c_uint64(address), ctypes.c_int64(number))


class _Conditional(ctypes.Structure):
    """CUDA_CONDITIONAL_NODE_PARAMS."""

    _fields_ = (("handle", ctypes.c_uint64), ("kind", ctypes.c_int), ("size", ctypes.c_uint), ("bodies", ctypes.c_void_p),
                ("context", ctypes.c_void_p))  # fmt: skip


class _NodeParams(ctypes.Structure):
    """CUgraphNodeParams, of 256 bytes."""

    _fields_ = (("type", ctypes.c_int), ("reserved", ctypes.c_int * 3), ("conditional", _Conditional),
                ("rest", ctypes.c_byte * (240 - ctypes.sizeof(_Conditional))))  # fmt: skip


class _Place(NamedTuple):
    """Where a capture has come to: its graph, and behind which nodes, over which edges, what comes next would lie."""

    graph: int | None
    nodes: Private = None
    edges: Private = None
    number: int = 0
    capture: int = 0
    """The number of the capture."""

    @classmethod
    def of(cls, stream: int) -> _Place:
        status, capture, count = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_size_t()
        graph, nodes, edges = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        ask = function("cuStreamGetCaptureInfo_v3", *[ctypes.c_void_p] * 7)
        checked(ask(stream, *map(ctypes.byref, (status, capture, graph, nodes, edges, count))), "cuStreamGetCaptureInfo")
        return cls(graph.value, nodes, edges, count.value, capture.value)


def _new_handle(graph: int | None) -> int:
    handle = ctypes.c_uint64()
    create = function("cuGraphConditionalHandleCreate", *[ctypes.c_void_p] * 3, ctypes.c_uint, ctypes.c_uint)
    checked(create(ctypes.byref(handle), graph, driver.context(), 0, 0), "cuGraphConditionalHandleCreate")
    return handle.value


def new_handle(stream: int) -> int:
    """A handle, for a node of the graph that the stream captures."""
    return _new_handle(_Place.of(stream).graph)


def _new_node(place: _Place, handle: int, kind: int, count: int) -> tuple[int, list[int]]:
    """A node with so many bodies, and these."""
    params, node = _NodeParams(), ctypes.c_void_p()
    params.type, params.conditional.context = _CONDITIONAL, driver.context()
    params.conditional.handle, params.conditional.kind, params.conditional.size = handle, kind, count
    new = function("cuGraphAddNode_v2", *[ctypes.c_void_p] * 4, ctypes.c_size_t, ctypes.c_void_p)
    code = new(ctypes.byref(node), place.graph, place.nodes, place.edges, place.number, ctypes.byref(params))
    checked(code, "cuGraphAddNode")
    assert node.value is not None
    return node.value, list((ctypes.c_size_t * count).from_address(params.conditional.bodies))


class Node:
    """A conditional node, behind all that a stream has captured so far. From then on the stream captures nothing, but for
    bodies, until it is to `resume`."""

    def __init__(self, stream: int, handle: int, kind: int, count: int) -> None:
        place = _Place.of(stream)
        assert place.graph is not None
        self.graph = place.graph
        self._capture = place.capture
        self._node, self.bodies = _new_node(place, handle, kind, count)
        self._stream = stream
        _end(stream)

    def resume(self) -> bool:
        """Returns whether the driver takes it for the same capture as before."""
        _begin(self._stream, self.graph, [self._node])
        return _Place.of(self._stream).capture == self._capture


@contextmanager
def capture_into(stream: int, graph: int) -> Iterator[None]:
    """The stream captures the nodes of this graph inside the block, and from there on after an exception."""
    _begin(stream, graph)
    yield
    _end(stream)


def _begin(stream: int, graph: int, behind: Sequence[int] = ()) -> None:
    begin = function("cuStreamBeginCaptureToGraph", *[ctypes.c_void_p] * 4, ctypes.c_size_t, ctypes.c_int)
    nodes = (ctypes.c_void_p * len(behind))(*behind)
    checked(begin(stream, graph, nodes, None, len(behind), _THREAD_LOCAL), "cuStreamBeginCaptureToGraph")


def _end(stream: int) -> None:
    graph, said = ctypes.c_void_p(), ctypes.c_char_p()
    if code := function("cuStreamEndCapture", ctypes.c_void_p, ctypes.c_void_p)(stream, ctypes.byref(graph)):
        driver.capture_nothing(stream)
        function("cuGetErrorString", ctypes.c_int, ctypes.c_void_p)(code, ctypes.byref(said))
        raise DriverError(f"cuStreamEndCapture failed: {(said.value or b'').decode()}")


@cache
def kinds(device: int) -> frozenset[int]:
    """The kinds of nodes that there are on a device: none before CUDA 12.4, `SWITCH` since 12.8."""
    with torch.cuda.device(device), driver.unsafe_calls():
        torch.cuda.mem_get_info()  # from where on this thread has a context
        return frozenset(kind for kind in (IF, WHILE, SWITCH) if _works(kind))


_SINCE = ("cuGraphConditionalHandleCreate", "cuGraphAddNode_v2", "cuStreamBeginCaptureToGraph", "cuStreamGetCaptureInfo_v3")


def _works(kind: int) -> bool:
    """Whether a graph with an empty node of this kind can be instantiated."""
    graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
    if not all(hasattr(library(), name) for name in _SINCE):
        return False
    checked(function("cuGraphCreate", ctypes.c_void_p, ctypes.c_uint)(ctypes.byref(graph), 0), "cuGraphCreate")
    try:
        _new_node(_Place(graph.value), _new_handle(graph.value), kind, 1)
        make = function("cuGraphInstantiateWithFlags", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ulonglong)
        checked(make(ctypes.byref(executable), graph, 0), "cuGraphInstantiate")
        _kernel("add", driver.context())
    except DriverError:
        return False
    finally:
        if executable.value:
            function("cuGraphExecDestroy", ctypes.c_void_p)(executable)
        function("cuGraphDestroy", ctypes.c_void_p)(graph)
    return True
