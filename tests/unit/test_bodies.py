"""How branches and loops are captured on a GPU: which body is captured when, and how random numbers are counted. (No GPU is
asked: what the driver would do is written down.)"""

from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from phonograph.devices.cuda import bodies, conditional, driver
from phonograph.devices.cuda.bodies import Bodies
from phonograph.devices.cuda.conditional import IF, SWITCH, WHILE
from phonograph.errors import Refusal

SEED, STANDS = 0x1000, 0x1200
STREAM = 7


class Count:
    """Where a generator stands."""

    seed = 5
    at = 0

    def get(self):
        return self.at

    def put(self, number):
        self.at = number


class Graphs:
    """What is asked of the driver, in order."""

    def __init__(self):
        self.done = []
        self.depth = 0
        self.kinds = {IF, WHILE, SWITCH}

    def new_handle(self, stream):
        return len(self.done)

    def set_handle(self, stream, handle, number, wanted=-1):
        self.done.append(("set", wanted))

    def add(self, stream, address, by):
        self.done.append(("add", address, by))

    def Node(self, stream, handle, kind, count):  # noqa: N802
        self.done.append(("node", kind, count))
        node = type("Node", (), {"graph": 100 + self.depth, "bodies": [*range(count)], "resume": lambda _: True})()
        self.depth += 1
        return node

    @contextmanager
    def capture_into(self, stream, graph):
        self.done.append(("body", graph))
        yield


@pytest.fixture
def graphs(monkeypatch):
    found = Graphs()
    monkeypatch.setattr(conditional, "kinds", lambda device: frozenset(found.kinds))
    for name in ("new_handle", "set_handle", "add", "Node", "capture_into"):
        monkeypatch.setattr(conditional, name, getattr(found, name))
    monkeypatch.setattr(bodies, "counts_by_capture", lambda: False)
    monkeypatch.setattr(bodies, "raw_stream", lambda device: STREAM)
    monkeypatch.setattr(bodies, "route_by_stream", lambda device, pool: found.done.append(("route", pool)))
    monkeypatch.setattr(driver, "parameters", lambda graphs: iter([[3, SEED, STANDS, 4, 0xAB01, 9], [SEED, STANDS, 12, 1]]))
    return found


@pytest.fixture
def count():
    made = Count()
    made.at = 4
    return made


@pytest.fixture
def made(graphs, count):
    stream = type("Stream", (), {"device_index": 0, "cuda_stream": STREAM})()
    return Bodies(stream, (0, 1), count, *(partial(graphs.done.append, word) for word in ("join", "fork")))


def drawing(count, number, places=None):
    def body():
        if places is not None:
            places.append(count.at)
        count.at += number

    return body


INDEX = torch.tensor(True)


def test_a_branch_is_one_node(graphs, made):
    made.choose(INDEX, [lambda: graphs.done.append("first"), lambda: graphs.done.append("second")])
    captured = [("node", SWITCH, 2), ("body", 0), "first", ("body", 1), "second"]
    assert graphs.done == [("set", -1), "join", ("route", (0, 1)), *captured, "fork"]
    assert (made.graphs, made.outer, made.failed, made.offset) == ([0, 1], 0, None, 0)


def test_without_switches_all_handles_are_set_before_a_body_runs(graphs, made):
    graphs.kinds = {IF, WHILE}
    made.choose(INDEX, [lambda: None] * 3)
    sets = [i for i, x in enumerate(graphs.done) if x[0] == "set"]
    assert [graphs.done[i] for i in sets] == [("set", 0), ("set", 1), ("set", 2)]
    assert max(sets) < graphs.done.index(("node", IF, 1))
    assert graphs.done.count(("node", IF, 1)) == 3
    assert graphs.done.count(("route", (0, 1))) == 1


def test_bodies_begin_at_the_same_place_and_end_at_that_of_the_first(graphs, made, count):
    places = []
    made.choose(INDEX, [drawing(count, n, places) for n in (8, 4, 0, 12)])
    assert places == [4, 4, 4, 4]
    assert [x for x in graphs.done if x[0] == "add"] == [("add", STANDS, -4), ("add", STANDS, -8), ("add", STANDS, 4)]
    assert (count.at, made.seed, made.offset) == (12, SEED, STANDS)


def test_nothing_is_added_where_all_bodies_draw_alike(graphs, made, count):
    made.choose(INDEX, [drawing(count, 8)] * 3)
    assert not [x for x in graphs.done if x[0] == "add"]
    assert (count.at, made.offset) == (12, 0)


def test_each_turn_of_a_loop_adds_what_it_draws(graphs, made, count):
    def condition():
        count.at += 4
        return INDEX

    made.repeat(condition, drawing(count, 8))
    assert graphs.done[0] == ("set", -1)
    assert graphs.done[-4:] == [("body", 0), ("add", STANDS, 12), ("set", -1), "fork"]
    assert count.at == 8  # behind the condition before the loop


def test_a_graph_of_which_only_bodies_draw_is_told_where_the_generator_stands(graphs, made, count):
    count.at = 0
    made.choose(INDEX, [drawing(count, 0), drawing(count, 8)])
    assert [x for x in graphs.done if x[0] == "add"] == [("add", STANDS, 8), ("add", STANDS, -4)]
    assert count.at == 4


@pytest.mark.parametrize("words", [[], [[SEED, STANDS, 4, 0]], [[SEED + 8, STANDS, 4, 1]], [[SEED, STANDS, 5, 1]],
                                   [[SEED, STANDS, 4, 1], [SEED, SEED, 4, 1]]])  # fmt: skip
def test_kernels_that_do_not_say_where_the_generator_stands_are_refused(graphs, made, count, monkeypatch, words):
    monkeypatch.setattr(driver, "parameters", lambda graphs: iter(words))
    with pytest.raises(Refusal, match="by a kernel that does not say how"):
        made.choose(INDEX, [drawing(count, 0), drawing(count, 8)])


def test_what_fails_in_a_body_is_kept(graphs, made):
    def fails():
        raise Refusal("cannot be")

    with pytest.raises(Refusal, match="cannot be"):
        made.choose(INDEX, [lambda: None, lambda: made.choose(INDEX, [fails])])
    assert str(made.failed) == "cannot be"
    assert made.outer == 100  # of which the capture is to be destroyed


def test_a_capture_that_the_driver_has_ended_has_no_graph(graphs, made):
    def fails():
        raise driver.DriverError("it has")

    with pytest.raises(driver.DriverError):
        made.choose(INDEX, [lambda: None, fails])
    assert isinstance(made.failed, driver.DriverError)
    assert made.outer == 0


def test_another_capture_than_before_is_refused_where_torch_counts_by_captures(graphs, made, monkeypatch):
    node = graphs.Node
    monkeypatch.setattr(conditional, "Node", lambda *given: _resumed_elsewhere(node(*given)))
    made.choose(INDEX, [lambda: None])
    monkeypatch.setattr(bodies, "counts_by_capture", lambda: True)
    with pytest.raises(Refusal, match="begins another capture"):
        made.choose(INDEX, [lambda: None])


def _resumed_elsewhere(node):
    node.resume = lambda: False
    return node


def test_other_streams_end_before_the_outermost_body_and_begin_again_after_it(graphs, made):
    made.choose(INDEX, [lambda: made.choose(INDEX, [lambda: None]), lambda: None])
    assert (graphs.done.count("join"), graphs.done.count("fork")) == (1, 1)
    assert graphs.done.index("join") < graphs.done.index(("node", SWITCH, 2))
    assert graphs.done[-1] == "fork"


@pytest.mark.parametrize(("lies_there", "said"), [(5, ""), (6, "does not say how"), (5 - (1 << 64), "")])
def test_what_is_no_seed_of_the_generator_is_no_address_of_one(graphs, made, count, monkeypatch, lies_there, said):
    """It was found among the parameters of kernels, where other words may look the same. (A seed is a number without sign.)"""
    monkeypatch.setattr(bodies, "OnStream", lambda stream: nullcontext())
    read = []
    monkeypatch.setattr(bodies, "number_at", lambda *at: read.append(at) or SimpleNamespace(item=lambda: lies_there))
    made.confirm()
    assert not read  # nothing has drawn
    made.choose(INDEX, [lambda: None, lambda: count.put(count.at + 4)])
    with pytest.raises(Refusal, match=said) if said else nullcontext():
        made.confirm()
    assert read == [(SEED, 0)]
