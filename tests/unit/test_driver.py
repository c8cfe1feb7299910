"""Addresses of a graph's copies, and numbers in its kernels, are put into the graph where they are others than last time; what
captures forbid is allowed for a moment only. (No GPU is asked.)
"""

import ctypes
import struct
from types import SimpleNamespace

import pytest

from phonograph.devices.cuda import driver
from phonograph.devices.cuda.driver import DriverError, KernelNumbers, Pointers
from phonograph.devices.cuda.graph_work import work_of


class Copy:
    """Two addresses of a copy in a graph."""

    def __init__(self, *places):
        self.cells = [(SimpleNamespace(value=None), i) for i in places]
        self.put, self.code = [], 0

    def putter(self):
        self.put.append([cell.value for cell, _ in self.cells])
        return self.code


def pointers(copies, addresses):
    made = object.__new__(Pointers)
    made._places = [(copy.cells, copy.putter) for copy in copies]
    made._last, made._unknown = addresses, [0] * len(addresses)
    return made


def test_only_what_has_moved_is_put_into_the_graph():
    one, other = copies = Copy(0, 1), Copy(2)
    for copy, known in zip(copies, ([16, 32], [48]), strict=True):
        for (cell, _), value in zip(copy.cells, known, strict=True):
            cell.value = value
    made = pointers(copies, [16, 32, 48])
    made.set([16, 32, 48])
    assert (one.put, other.put) == ([], [])
    made.set([16, 64, 48])
    assert (one.put, other.put) == ([[16, 64]], [])
    made.set([16, 64, 80])
    assert (one.put, other.put) == ([[16, 64]], [[80]])
    made.set([16, 32, 48])
    assert (one.put, other.put) == ([[16, 64], [16, 32]], [[80], [48]])


def test_after_a_failure_all_is_put_again():
    one, other = copies = Copy(0), Copy(1)
    made = pointers(copies, [16, 32])
    other.code = 1
    with pytest.raises(DriverError):
        made.set([48, 64])
    other.code = 0
    made.set([48, 64])
    assert one.put == [[48], [48]]
    assert other.put == [[64], [64]]


RATE, CORRECTION = 0.40625000123, 0.71875000321


def numbers_in(monkeypatch, **kernels):
    """Numbers in kernels, each with parameters of these bytes; and what was put into the graph, by kernel."""
    puts, codes = {name: [] for name in kernels}, dict.fromkeys(kernels, 0)

    class Kernel:
        def __init__(self, node):
            self.node, self.buffers = node, [ctypes.create_string_buffer(b, len(b)) for b in kernels[node]]

        def putter(self, graph_exec):
            def put():
                puts[self.node].append([b.raw for b in self.buffers])
                return codes[self.node]

            return put

    monkeypatch.setattr(driver, "_Kernel", Kernel)
    monkeypatch.setattr(driver, "kind", lambda node: driver.KERNEL)
    return KernelNumbers(7, [*kernels], {RATE: 0.0, CORRECTION: 0.0}), puts, codes


def test_numbers_that_stand_are_not_set_again(monkeypatch):
    many = struct.pack("3f", *[CORRECTION] * 3)  # a kernel for three parameters has one for each
    made, puts, _ = numbers_in(
        monkeypatch, a=[b"1234", struct.pack("f", -RATE) + many], b=[struct.pack("d", CORRECTION)], c=[b"12345678"]
    )
    assert made.found == {RATE, CORRECTION}
    rate = 0.25
    made.set({RATE: rate, CORRECTION: 0.5})
    assert puts == {"a": [[b"1234", struct.pack("4f", -0.25, 0.5, 0.5, 0.5)]], "b": [[struct.pack("d", 0.5)]], "c": []}
    made.set({RATE: rate, CORRECTION: 0.5 + 0.0})
    made.set({RATE: 0.125 * 2, CORRECTION: 1.0 / 2.0})  # equal numbers, in other objects
    assert (len(puts["a"]), len(puts["b"])) == (1, 1)
    made.set({RATE: rate, CORRECTION: 0.5 + 2**-40})  # which a float32 does not tell from 0.5
    assert puts["a"][1:] == []
    assert puts["b"][1:] == [[struct.pack("d", 0.5 + 2**-40)]]
    made.set({RATE: -0.0, CORRECTION: 0.5})
    made.set({RATE: 0.0, CORRECTION: 0.5})  # which is not the same
    assert [data[-1][:4] for data in puts["a"][1:]] == [struct.pack("f", 0.0), struct.pack("f", -0.0)]


def test_after_a_failure_all_numbers_are_set_again(monkeypatch):
    made, puts, codes = numbers_in(monkeypatch, a=[struct.pack("f", RATE)], b=[struct.pack("f", CORRECTION)])
    numbers = {RATE: 0.25, CORRECTION: 0.5}
    codes["b"] = 1
    with pytest.raises(DriverError):
        made.set(numbers)
    codes["b"] = 0
    made.set(numbers)
    assert puts["a"] == [[struct.pack("f", 0.25)]] * 2
    assert puts["b"] == [[struct.pack("f", 0.5)]] * 2
    made.set(numbers)
    assert (len(puts["a"]), len(puts["b"])) == (2, 2)


@pytest.mark.parametrize("before", [0, 1, 2], ids=["global", "thread_local", "relaxed"])
def test_what_captures_forbid_is_allowed_inside_the_block_only(monkeypatch, before):
    modes = [before]

    def exchange(mode):
        modes[0], mode._obj.value = mode._obj.value, modes[0]
        return 0

    monkeypatch.setattr(driver, "function", lambda name, *_: {"cuThreadExchangeStreamCaptureMode": exchange}[name])
    with driver.unsafe_calls():
        assert modes == [2]  # CU_STREAM_CAPTURE_MODE_RELAXED
    assert modes == [before]
    with pytest.raises(ValueError, match="inside"), driver.unsafe_calls():
        raise ValueError("inside")
    assert modes == [before]


def graph_of(monkeypatch, nodes):
    """A graph of such nodes: by number, the kind, the function's name, and what it waits for."""
    monkeypatch.setattr(driver, "nodes", lambda graph: [*nodes])
    monkeypatch.setattr(driver, "kind", lambda node: nodes[node][0])
    monkeypatch.setattr(driver, "kernel_name", lambda node: nodes[node][1])
    monkeypatch.setattr(driver, "waits_for", lambda node: nodes[node][2])
    return work_of(1)


def test_work_has_the_names_that_a_profiler_shows(monkeypatch):
    found = graph_of(monkeypatch, {
        11: (0, b"_ZN2at6native6kernelIfEEvPT_", []),
        12: (1, b"", [11]),
        13: (6, b"", [12]),
        14: (0, b"sm80_xmma_gemm", [13]),
        15: (2, b"", [14]),
    })  # fmt: skip
    assert found.names == ["void at::native::kernel<float>(float*)", "Memcpy", "", "sm80_xmma_gemm", "Memset"]
    assert found.in_a_row


@pytest.mark.parametrize("waits", [[11], [], [11, 12], [0]])
def test_work_on_branches_is_in_no_row(monkeypatch, waits):
    nodes = {11: (0, b"a", []), 12: (0, b"b", [11]), 13: (0, b"c", waits)}
    assert not graph_of(monkeypatch, nodes).in_a_row


def test_nothing_is_named_of_a_graph_with_branches(monkeypatch):
    monkeypatch.setattr(driver, "nodes", lambda graph: [11, 12])
    assert work_of(1, branches=True) == ([""] * 2, False)


@pytest.mark.parametrize(("outer", "captured", "goes"), [(0, 5, [5]), (3, 5, [3]), (3, 0, [])],
                         ids=["a graph", "a body", "a body that is no more"])  # fmt: skip
def test_a_capture_that_is_given_up_takes_its_graph_along(monkeypatch, outer, captured, goes):
    gone, began = [], []

    def end(stream, graph):
        graph._obj.value = captured

    functions = {
        "cuStreamEndCapture": end,
        "cuGraphDestroy": lambda graph: gone.append(getattr(graph, "value", graph)),
        "cuStreamBeginCapture_v2": lambda stream, mode: began.append(stream) or 0,
    }
    monkeypatch.setattr(driver, "function", lambda name, *_: functions[name])
    driver.capture_nothing(7, outer)
    assert (gone, began) == (goes, [7])
