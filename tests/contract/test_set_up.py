"""What it costs to make a recording, in counts: what was worked out once is not worked out again."""

import dis

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph import marked, reach, where


def program(device):
    """A training step of its own objects, whose code is the same each time."""
    model = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(4, 4), nn.Tanh()))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return pg.record(step)


class Net(nn.Module):
    """One of the user's classes."""

    def __init__(self):
        super().__init__()
        self.layers, self.scale = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), 0.5

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return x


def of_a_class(device):
    model = Net().to(device)
    return pg.record(lambda x: model(x).sum())


@pytest.mark.parametrize("make", [program, of_a_class], ids=["a step", "a class"])
def test_c09_code_is_read_once(device, make, monkeypatch):
    first = make(device)
    for _ in range(2):
        first(torch.ones(2, 4, device=device))
    read = []
    monkeypatch.setattr(dis, "get_instructions", lambda code, **k: read.append(code))
    second = make(device)
    for _ in range(3):
        second(torch.ones(2, 4, device=device))
    assert pg.stats(second).recorded == 1
    assert not read


@pytest.mark.parametrize("make", [program, of_a_class], ids=["a step", "a class"])
def test_c09_what_checks_is_compiled_once_a_shape(device, make):
    for _ in range(2):
        compiled = where._code_of.cache_info().misses
        recorded = make(device)
        for _ in range(3):
            recorded(torch.ones(2, 4, device=device))
        assert pg.stats(recorded).recorded == 1
    assert where._code_of.cache_info().misses == compiled


def test_c09_what_is_in_reach_is_walked_through_once(device, monkeypatch):
    """On a GPU, a second time: where the first call runs depends on it."""
    monkeypatch.setattr(marked.Marked, "any_made", False)
    walks = []
    made = reach.Reach.__init__
    monkeypatch.setattr(reach.Reach, "__init__", lambda self, *args: (walks.append(args), made(self, *args))[1])
    recorded = program(device)
    for _ in range(4):
        recorded(torch.ones(2, 4, device=device))
    assert (pg.stats(recorded).recorded, pg.stats(recorded).replayed) == (1, 3)
    assert len(walks) == (1 if device.type == "cpu" and not torch.cuda.is_initialized() else 2)
