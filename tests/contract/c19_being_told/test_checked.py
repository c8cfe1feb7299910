"""C19: `pg.check` tells all that stands in the way of recording, in one run, and leaves what it has checked as it was."""

import random
import weakref

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.engine.check import Checking
from tests.helpers import ramp

calls = []


def many(x):
    calls.append(float(x.sum()))
    x = x * random.random()
    y = x[x > 1]
    if x.max() > 100:
        y = y + 1
    return y.sum().tolist()


def codes(found):
    return [obstacle.code for obstacle in found.obstacles]


def test_c19_check_tells_all_obstacles(device):
    """Each with its place, in the order of the call; what runs has its values."""
    calls.clear()
    found = pg.check(many, ramp(device, 4))
    first = many.__code__.co_firstlineno
    as_list = "PG101" if device.type == "cpu" else "PG1103"
    assert codes(found) == ["PG101", "PG401", "PG103", "PG101", as_list]
    assert [obstacle.line - first for obstacle in found.obstacles] == [1, 2, 3, 4, 6]
    assert not found.records
    assert found.status == 1
    assert len(found.pieces) > 1
    assert calls == [float(ramp(device, 4).sum())] * found.calls


def test_c19_check_of_what_records(device):
    """No obstacle, and what a replay takes."""
    w = ramp(device, 4)
    found = pg.check(lambda x: (x * w).tanh(), ramp(device, 4))
    assert (found.records, found.status, found.obstacles) == (True, 0, ())
    assert found.replay_ms > 0
    assert found.live_ms > 0
    assert found.operators == 2


def test_c19_check_of_a_step_trains(device):
    """It is called as often as it says, and each call does what a call does: as many plain steps give the same weights."""

    def training():
        torch.manual_seed(0)
        net = nn.Linear(3, 2).to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(x):
            loss = net(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.item()

        return net, step

    (net, step), (other, plain) = training(), training()
    found = pg.check(step, ramp(device, 2, 3))
    for _ in range(found.calls):
        plain(ramp(device, 2, 3))
    assert codes(found) == ["PG101"]
    assert torch.equal(net.weight, other.weight)


def test_c19_check_holds_nothing_of_a_call(device):
    """On CUDA a graph that is still there would have the next capture add gradients up where this call did: a false finding."""
    net, losses = nn.Linear(3, 2).to(device), []

    def step(x):
        held = [i for i, loss in enumerate(losses) if loss() is not None]
        loss = net(x).square().mean()
        net.zero_grad()
        loss.backward()
        losses.append(weakref.ref(loss))
        return loss.item(), held

    checking = Checking(step)
    for _ in range(6):
        assert checking(ramp(device, 2, 3))[1] == []


def test_c19_check_leaves_a_module_as_it_was(device):
    """Also one that is recorded."""
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).to(device)
    assert pg.check(net, ramp(device, 2, 3)).records
    with pytest.raises(TypeError, match="not recorded"):
        pg.stats(net)
    pg.record(net)
    assert pg.check(net, ramp(device, 2, 3)).records
    assert pg.stats(net).calls == 0


def test_c19_check_knows_what_only_a_capture_shows(device):
    """Where nothing is seen in a live call."""

    class Counts:
        seen = ()

    def step(x):
        Counts.seen = (*Counts.seen, object())
        return x * 2

    found = pg.check(step, ramp(device, 2))
    assert codes(found) == ["PG502"]
    assert "outlives the call" in found.obstacles[0].reason


def test_c19_check_names_the_argument(device):
    found = pg.check(lambda x, batch: x * 2, ramp(device, 2), batch={"rows": iter([1])})
    assert [obstacle.argument for obstacle in found.obstacles] == ["batch['rows']"]


def test_c19_check_passes_exceptions_on(device):
    def fails(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        pg.check(fails, ramp(device, 2))


def test_c19_findings_as_text_and_json(device):
    found = pg.check(many, ramp(device, 4))
    assert found.as_dict()["obstacles"][2]["link"] == "docs/reasons.md#pg103"
    assert "x[x > 1]" in str(found)
    assert str(found).count("fix: ") == len(found.obstacles)
