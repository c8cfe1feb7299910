"""C12: what comes between the end of a capture and its first play takes back what the capture has left for that play."""

import contextlib

import pytest
import torch

import phonograph as pg
from phonograph.devices.cpu.device import CpuDevice
from phonograph.devices.cuda.device import CudaDevice
from phonograph.engine import making
from phonograph.engine.player import Player
from phonograph.engine.shelf import Shelf
from phonograph.memory.pool import Pool
from phonograph.slots import gradients as guarded
from phonograph.testing import assert_same
from tests.helpers import may_run_live, reasons


class Noted:
    def __init__(self):
        self.n, self.seen = 0, []


def counts(noted, x, given):
    noted.n += 1


def appends(noted, x, given):
    noted.seen.append(x * 2)


def edits(noted, x, given):
    given.append(x * 2)


def training(device, effect=None):
    """A step whose gradients are dropped outside of it, and its weight."""
    torch.manual_seed(0)
    net, noted = torch.nn.Linear(2, 1).to(device), Noted()

    def step(x, given):
        if effect is not None:
            effect(noted, x, given)
        net(x).sum().backward()
        return x + 1

    return step, net.weight


def gradients(step, weight, device, calls=5, caught=()):
    """What a loop finds in `.grad` after each of its calls."""
    seen = []
    for n in range(calls):
        weight.grad = None
        with contextlib.suppress(*caught):
            step(torch.full((1, 2), n + 1.0, device=device), [])
        seen.append(None if weight.grad is None else weight.grad.clone())
    return seen


@may_run_live
@pytest.mark.parametrize("effect", [counts, appends, edits])
def test_c12_a_refusal_after_the_capture_leaves_the_gradients_as_they_were(device, effect):
    step, weight = training(device, effect)
    found = gradients(pg.record(step, keep="always", verify=2), weight, device)
    assert_same(found, gradients(*training(device, effect), device))


PLACES = {
    "player": (making, "Player"),
    "settle": (None, "settle"),
    "pool": (Pool, "add"),
    "shelf": (Shelf, "add"),
    "play": (Player, "play_flat"),
    "terms": (making, "settled"),
}


def raises_once(monkeypatch, place, name, error):
    """Let what has this name raise once, the next time."""
    real = getattr(place, name)

    def once(*given, **named):
        monkeypatch.setattr(place, name, real)
        raise error

    monkeypatch.setattr(place, name, once)


@may_run_live
@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("place", PLACES)
def test_c12_what_fails_before_the_first_play(device, monkeypatch, caplog, place, error):
    """The gradients are those of a live call, or, if the exception is the caller's, those of before; what was made is gone."""
    step, weight = training(device)
    recorded, (at, name) = pg.record(step, keep="always"), PLACES[place]
    recorded(torch.ones(1, 2, device=device), [])
    at = at or (CpuDevice if device.type == "cpu" else CudaDevice)
    raises_once(monkeypatch, at, name, error("injected"))
    found = gradients(recorded, weight, device, caught=[error])
    plain = gradients(*training(device), device)
    assert_same(found[1:], plain[1:])
    assert found[0] is None or torch.equal(found[0], plain[0])
    stats = pg.stats(recorded)
    assert stats.replayed >= 2, reasons(recorded)
    assert len(recorded._shelf) == 1
    caplog.clear()


@may_run_live
def test_c12_a_first_play_leaves_its_gradients_all_the_same(device, monkeypatch):
    step, weight = training(device)
    recorded = pg.record(step, keep="always")
    recorded(torch.ones(1, 2, device=device), [])
    raises_once(monkeypatch, guarded, "made_by", MemoryError("injected"))
    assert_same(gradients(recorded, weight, device, caught=[MemoryError]), gradients(*training(device), device))
    assert pg.stats(recorded).recorded == 1, reasons(recorded)
