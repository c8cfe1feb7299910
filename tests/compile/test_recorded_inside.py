"""Recorded functions and modules in code that `torch.compile` compiles: it takes them for plain ones, and that is said."""

import copy
import warnings

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters

import phonograph as pg
from phonograph.compile.backend import backend
from phonograph.testing import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:TensorFloat32", "ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning")

SAID = "is part of what torch.compile compiles"


@pytest.fixture(autouse=True)
def forgotten():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).tanh()


class Whole(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part, self.head = part, nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.part(x))


class Agent:
    scale = 2.0

    @pg.record
    def act(self, x):
        return x * self.scale

    def plain(self, x):
        return x * self.scale


def sequential(record, device):
    part = record(nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(device))
    return torch.compile(part, backend="eager"), part


def own(record, device):
    part = record(Own().to(device))
    return torch.compile(part, backend="eager"), part


def submodule(record, device):
    part = record(Own().to(device))
    return torch.compile(Whole(part).to(device), backend="eager"), part


def around_a_module(record, device):
    part = record(Own().to(device))
    return torch.compile(lambda x: part(x).sum(), backend="eager", fullgraph=True), part


def around_a_function(record, device):
    part = record(lambda x: x.sin() * 2)
    return torch.compile(lambda x: part(x) + 1, backend="eager", fullgraph=True), part


def a_function(record, device):
    part = record(lambda x: x.sin() * 2)
    return torch.compile(part, backend="eager"), part


def with_a_break(record, device):
    @record
    def part(x):
        y = x.sin()
        torch._dynamo.graph_break()
        return y * 2

    return torch.compile(lambda x: part(x) + 1, backend="eager"), part


WAYS = [sequential, own, submodule, around_a_module, around_a_function, a_function, with_a_break]


def called(make, record, device):
    """What five calls give, what was recorded, what Dynamo has counted, and what was said."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    f, part = make(record, device)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = [f(torch.full((3, 4), 0.1 * n, device=device)).detach() for n in range(5)]
    counted = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    return found, f, part, counted, [str(w.message) for w in said if w.category is pg.RunsLive]


@pytest.mark.parametrize("make", WAYS)
def test_c19_a_recorded_part_of_compiled_code(device, make):
    expected, _, _, plain, _ = called(make, lambda x: x, device)
    found, _, part, counted, said = called(make, pg.record, device)
    assert_same(found, expected)
    assert counted == plain, "what says so is compiled itself"
    assert len(said) == 1
    assert all(words in said[0] for words in (SAID, __file__, "pg.record(torch.compile(model))"))
    assert pg.stats(part).recorded == 0
    assert SAID in str(pg.stats(part).refusals)
    assert said[0].split(": ", 1)[1].rpartition(")")[0] in pg.explain(part), "which has other remedies besides"


@pytest.mark.parametrize("make", [sequential, own, a_function])
def test_c19_what_was_compiled_is_asked(device, make):
    _, compiled, part, _, _ = called(make, pg.record, device)
    assert pg.stats(compiled) == pg.stats(part)
    assert SAID in pg.explain(compiled)
    pg.reset(compiled)
    if isinstance(part, nn.Module):
        with pytest.raises(TypeError, match=r"torch.compile made of one that is not recorded: pg.record that"):
            pg.stats(compiled)


def test_c19_what_is_not_recorded_at_all(device):
    for made in (torch.compile(nn.Linear(2, 2), backend="eager"), torch.compile(lambda x: x, backend="eager")):
        for ask in (pg.stats, pg.explain, pg.reset):
            with pytest.raises(TypeError, match=r"pg.record that, or, if its backend is phonograph"):
                ask(made)


def test_c19_nothing_is_lost_with_our_backend(device):
    """Nor in a recorded function: there the code is recorded all the same."""
    net, live = Whole(pg.record(Own())).to(device), Whole(Own()).to(device)
    live.load_state_dict(net.state_dict())
    fast = torch.compile(net, backend=backend, options={"inner": "eager"})
    with torch.no_grad():
        for n in range(4):
            x = torch.full((3, 4), 0.1 * n, device=device)
            assert_same(fast(x), live(x))
    assert not pg.stats(net.part).refusals
    inner = torch.compile(pg.record(Own().to(device)), backend="eager")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        outer = pg.record(lambda x: inner(x) * 2)
        for _ in range(3 if device.type == "cuda" else 1):  # on the CPU it runs live, from its second call on
            outer(torch.ones(3, 4, device=device))
    assert not any(SAID in str(w.message) for w in said)


@pytest.mark.filterwarnings("ignore::phonograph.RunsLive")
def test_c07_many_recorded_modules_are_one_compiled_graph(device):
    """Nothing of a recording is a reason to compile again."""
    parts = [pg.record(Own().to(device)) for _ in range(10)]
    made = [torch.compile(part, backend="eager") for part in parts]
    x = torch.ones(3, 4, device=device)
    for _ in range(2):
        for part, f in zip(parts, made, strict=True):
            assert_same(f(x), part._call_impl(x))
    assert counters["stats"]["unique_graphs"] == 1
    assert {pg.stats(part).replayed for part in parts} == {0}


@pytest.mark.filterwarnings("ignore::phonograph.RunsLive")
def test_c14_methods_of_many_objects(device):
    agents = [Agent() for _ in range(10)]

    def chain(x):
        for agent in agents:
            x = agent.act(x)
        return x

    f = torch.compile(chain, backend="eager", fullgraph=True)
    for n in range(3):
        x = torch.full((3,), float(n), device=device)
        assert_same(f(x), x * 2**10)
    assert counters["stats"]["unique_graphs"] == 1
    assert [len(vars(agent)) for agent in agents] == [0] * 10


def test_c11_no_error_for_it(device):
    part = pg.record(lambda x: x * 2, fallback="error")
    f = torch.compile(lambda x: part(x) + 1, backend="eager")
    with pytest.warns(pg.RunsLive, match=SAID):
        assert_same(f(torch.ones(3, device=device)), torch.full((3,), 3.0, device=device))


@pytest.mark.filterwarnings("ignore::phonograph.RunsLive")  # what is compiled, the CPU device does not see
def test_c16_a_recorded_module_that_compiles_itself(device):
    net = Own().to(device)
    live = copy.deepcopy(net)
    pg.record(net, name="mine")
    for n in range(3):
        net(torch.full((3, 4), 0.1 * n, device=device))
    net.compile(backend="eager")
    for n in range(5):
        x = torch.full((3, 4), 0.1 * n, device=device)
        assert_same(net(x), live(x))
    stats = pg.stats(net)
    assert stats.calls == 5
    assert "mine: 5 calls" in pg.explain(net)
    assert stats.replayed == (4 if device.type == "cuda" else 0)
    assert counters["stats"]["unique_graphs"] == 1
    pg.reset(net)
    net(x)
    with pytest.raises(TypeError, match="not recorded"):
        pg.stats(net)


def test_c14_asking_in_compiled_code_ends_a_graph(device):
    part = pg.record(lambda x: x * 2)
    for _ in range(3):
        part(torch.ones(3, device=device))
    f = torch.compile(lambda x: x + pg.stats(part).replayed, backend="eager")
    assert_same(f(torch.ones(3, device=device)), torch.full((3,), 3.0, device=device))
