"""C17: `pg.reset` of the last recording leaves torch's classes as they were."""

import pytest
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

import phonograph as pg
from phonograph.guards import module_epochs as witness
from phonograph.testing import assert_same
from phonograph.wrappers import wrapping
from tests.helpers import ramp

PLACES = (nn.Module, nn.Parameter, torch.Tensor, nn.Sequential, nn.ModuleList, nn.ParameterDict, RemovableHandle, torch.utils)


@pytest.fixture(autouse=True)
def nobody_else(monkeypatch):
    """No recording of another test hears of changes."""
    for one in witness._wrapped:
        one.back()
    monkeypatch.setattr(witness, "_listeners", {})
    yield
    for one in witness._wrapped:
        one.put()


def there():
    return [{name: x for name, x in vars(place).items() if name != "next_id"} for place in PLACES]


def changed(before):
    return {
        name
        for was, now in zip(before, there(), strict=True)
        for name in was.keys() | now
        if was.get(name) is not now.get(name)
    }


def test_c17_the_last_reset_gives_methods_back(device):
    before, x = there(), ramp(device, 2, 4)
    models = [nn.Linear(4, 4).to(device) for _ in range(2)]
    steps = [pg.record(lambda x, m=m: m(x), keep="always") for m in models]
    for step in steps:
        for _ in range(3):
            step(x)
    assert {"__setattr__", "load_state_dict", "data", "register_hook", "remove"} <= changed(before)
    pg.reset(steps[0])
    assert changed(before), "the other function has a recording"
    pg.reset(steps[1])
    assert changed(before) == set()


def test_c17_the_last_recorded_module_gives_compile_back(monkeypatch):
    monkeypatch.setattr(wrapping, "_modules", {})
    wrapping._compile.back()
    compile_, models = nn.Module.compile, [pg.record(nn.Linear(2, 2)) for _ in range(2)]
    for model in models:
        assert nn.Module.compile is not compile_
        pg.reset(model)
    assert nn.Module.compile is compile_


def test_c17_changes_are_noticed_after_a_reset(device):
    """What was given back is put there again with the next recording."""
    model, x = nn.Linear(4, 4).to(device), ramp(device, 2, 4)
    step = pg.record(lambda x: model(x), keep="always")
    for _ in range(2):
        for _ in range(3):
            assert_same(step(x), model(x))
        assert pg.stats(step).replayed
        model.weight = nn.Parameter(model.weight.detach() + 1)
        assert_same(step(x), model(x))
        pg.reset(step)


def test_c17_what_others_put_there_stays(device, monkeypatch):
    """Somebody wraps a method after us: that calls ours, which stays, and is not wrapped a second time."""
    model, x = nn.Linear(4, 4).to(device), ramp(device, 2, 4)
    step = pg.record(lambda x: model(x), keep="always")
    for _ in range(3):
        step(x)
    ours, heard = nn.Module.requires_grad_, []
    monkeypatch.setattr(nn.Module, "requires_grad_", lambda self, on=True: (heard.append(on), ours(self, on))[1])
    theirs = nn.Module.requires_grad_
    pg.reset(step)
    assert nn.Module.requires_grad_ is theirs
    for _ in range(3):
        step(x)
    assert nn.Module.requires_grad_ is theirs
    model.requires_grad_(False)
    assert heard == [False]
    assert step(x).requires_grad is False
    monkeypatch.undo()
