"""What is said of the order of graphs that others capture. (No GPU is asked: a capture is that of a fake.)"""

import pytest
import torch

import phonograph as pg
from phonograph.devices.cuda import captured_order, driver
from phonograph.devices.cuda.captured_order import CapturedOrder, Race, captures_checked


class Stream:
    """A stream that is captured: each operator is one node, and waits for what it is told to."""

    def __init__(self):
        self.nodes, self.edges, self.waits = [], [], []

    def then(self, *waits):
        """The next node waits for these."""
        self.waits = [*waits]

    def launched(self):
        """So many nodes."""
        return len(self.nodes)


class Graph:
    """One that captures nothing."""

    def capture_begin(self, pool=None):
        """It begins."""

    def capture_end(self):
        """It ends."""


@pytest.fixture
def stream(monkeypatch):
    made = Stream()
    monkeypatch.setattr(driver, "counting", lambda on: made.launched)
    monkeypatch.setattr(driver, "captured_graph", lambda on: 1)
    monkeypatch.setattr(driver, "nodes", lambda graph: made.nodes)
    monkeypatch.setattr(captured_order, "all_edges", lambda graph: made.edges)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: type("On", (), {"cuda_stream": 7}))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    return made


class Launching(torch.utils._python_dispatch.TorchDispatchMode):
    """Lies below the watch: what runs becomes a node."""

    def __init__(self, stream):
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in str(func):
            stream, node = self.stream, 100 + len(self.stream.nodes)
            stream.nodes.append(node)
            stream.edges += [(100 + number, node, 0) for number in stream.waits]
        return out


def looked_at(stream, program):
    """What is said of a graph of this program."""
    graph = torch.cuda.CUDAGraph()
    with pg.check_graphs() as found, Launching(stream):
        graph.capture_begin()
        program()
        graph.capture_end()
    (order,) = found
    return order


def test_two_that_write_one_tensor_wait_for_each_other(stream):
    x = torch.ones(8)

    def program():
        x.add_(1)
        stream.then(0)
        x.mul_(2)

    assert looked_at(stream, program) == CapturedOrder(2, (), 0)


def test_two_that_do_not_are_named(stream):
    x = torch.ones(8)

    def program():
        x.add_(1)
        x.mul_(2)

    order = looked_at(stream, program)
    (race,) = order.races
    assert race.first.startswith("aten.add_.Tensor at ")
    assert "test_captured_order.py:" in race.first
    assert race.then.startswith("aten.mul_.Tensor at ")
    assert race.nbytes == 32
    assert str(order).startswith("out of order: 2 nodes, of which 0 were not looked at\n  aten.add_.Tensor")


def test_a_path_is_enough(stream):
    x, y = torch.ones(8), torch.ones(8)

    def program():
        x.add_(1)
        stream.then(0)
        y.add_(1)
        stream.then(1)
        x.mul_(2)

    assert looked_at(stream, program).races == ()


def test_a_result_is_read_before_it_is_there(stream):
    def program():
        one = torch.ones(8)
        two = one * 2
        three = two + 1
        return one, two, three, three * 2

    order = looked_at(stream, program)
    assert [(race.first.partition(" ")[0], race.then.partition(" ")[0]) for race in order.races] == [
        ("aten.ones.default", "aten.mul.Tensor"), ("aten.mul.Tensor", "aten.add.Tensor"), ("aten.add.Tensor", "aten.mul.Tensor")
    ]  # fmt: skip


def test_who_only_read_need_not_wait(stream):
    x = torch.ones(8)
    assert looked_at(stream, lambda: (x * 2, x + 1)).races == ()


def test_a_shape_is_not_read(stream):
    x = torch.ones(8)
    assert looked_at(stream, lambda: (x.add_(1), torch.zeros_like(x), x.new_ones(3))).races == ()


def test_columns_may_lie_in_each_other(stream):
    """Of tensors with gaps nothing certain is known."""
    x = torch.ones(8, 2)
    assert looked_at(stream, lambda: (x[:, 0].add_(1), x[:, 1].mul_(2))).races == ()


def test_halves_of_a_tensor_are_apart(stream):
    x = torch.ones(8)
    assert looked_at(stream, lambda: (x[:4].add_(1), x[4:].mul_(2))).races == ()
    assert [race.nbytes for race in looked_at(stream, lambda: (x[:4].add_(1), x[3:].mul_(2))).races] == [4]


def test_nodes_of_no_operator_are_not_looked_at(stream):
    x = torch.ones(8)

    def program():
        x.add_(1)
        stream.nodes.append(555)

    assert looked_at(stream, program) == CapturedOrder(2, (), 1)


def test_a_capture_that_fails_is_none(stream, monkeypatch):
    def gone(graph):
        raise driver.DriverError("cuGraphGetEdges failed with CUresult 1")

    monkeypatch.setattr(captured_order, "all_edges", gone)
    graph = torch.cuda.CUDAGraph()
    with pg.check_graphs() as found:
        graph.capture_begin()
        graph.capture_end()
    assert found == []


def test_afterwards_captures_are_as_before(stream):
    begin, end = Graph.capture_begin, Graph.capture_end
    with captures_checked(print):
        assert Graph.capture_begin is not begin
    assert (Graph.capture_begin, Graph.capture_end) == (begin, end)


def test_a_race_says_what_it_is():
    assert str(Race("add at a.py:1", "mul at a.py:2", 4)) == (
        "add at a.py:1 and mul at a.py:2 touch the same 4 bytes, which one of them writes: neither waits for the other"
    )
