"""Optimizers as people make them, neither fused nor capturable: recorded or live, a step is eager's to the bit (C6, C21).

Their step counts lie on the host. Everything here is compared bit by bit, the counts too, with the same program in plain
PyTorch.
"""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

ADAMS = {
    "adam": functools.partial(torch.optim.Adam, lr=0.01),
    "adam, default": torch.optim.Adam,
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "adamw, foreach": functools.partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "adam, one by one": functools.partial(torch.optim.Adam, lr=0.01, foreach=False, amsgrad=True),
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.1),
    "rmsprop": torch.optim.RMSprop,
}


adams = pytest.mark.parametrize("optimizer", ADAMS)


common = pytest.mark.parametrize("optimizer", ["adam", "adamw, foreach"])


class Net(nn.Module):
    """A small classifier with what is usual: normalisation, dropout, a layer that not each step uses."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8, dtype=dtype), nn.LayerNorm(8, dtype=dtype), nn.ReLU(), nn.Dropout(0.2))
        self.head, self.other = (nn.Linear(8, 3, dtype=dtype) for _ in range(2))

    def forward(self, x, other=False):
        return (self.other if other else self.head)(self.body(x))


def trained(device, optimizer="adam", step_of=None, dtype=torch.float32):
    """A `make` for `side_by_side`: a step, and [model, optimizer]."""

    def make():
        torch.manual_seed(3)
        model = Net(dtype).to(device)
        chosen = (ADAMS[optimizer] if isinstance(optimizer, str) else optimizer)(model.parameters())

        def step(x, y, other=False):
            chosen.zero_grad()
            loss = F.cross_entropy(model(x, other).float(), y)
            loss.backward()
            chosen.step()
            return loss.detach()

        return (step if step_of is None else step_of(model, chosen)), [model, chosen]

    return make


def batch(device, n, size=5, dtype=torch.float32):
    generator = torch.Generator().manual_seed(n)
    x, y = torch.randn(size, 4, generator=generator), torch.randint(0, 3, (size,), generator=generator)
    return x.to(device, dtype), y.to(device)


def assert_counted(both, times):
    """Its counts, and those of the twin, stand at this, on the host; and nobody has switched its mode."""
    for _, optimizer in (both.state, both.live_state):
        assert {float(state["step"]) for state in optimizer.state.values()} - {0.0} == {times}  # Adagrad begins at once
        assert {state["step"].device.type for state in optimizer.state.values()} == {"cpu"}
        assert not any(group.get("capturable") for group in optimizer.param_groups)
