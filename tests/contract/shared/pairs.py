"""C6, C16: functions and modules whose backward runs outside. Loss and optimizer are the user's; gradients are eager's."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same


def grads(module):
    return [p.grad for p in module.parameters()]


class Both:
    """A module recorded, and a copy of it live, which are told the same."""

    def __init__(self, module, **options):
        self.live = copy.deepcopy(module)
        self.recorded = pg.record(module, **{"warmup": 1, **options})

    def __iter__(self):
        return iter((self.recorded, self.live))

    def optimizers(self, kind=torch.optim.SGD, **options):
        return [kind(m.parameters(), **{"lr": 0.1, **options}) for m in self]

    def learn(self, x, y):
        """Gradients from these, in both."""
        for module in self:
            module.zero_grad()
            F.mse_loss(module(x), y).backward()
        self.check()

    def check(self):
        assert_same(list(self.recorded.state_dict().values()), list(self.live.state_dict().values()))
        assert_same(grads(self.recorded), grads(self.live))

    @property
    def stats(self):
        return pg.stats(self.recorded)


def assert_recorded(both, replayed):
    """The forwards were replayed, and so were the backwards, after their own warm-up."""
    assert both.stats.replayed >= replayed, pg.explain(both.recorded)
    assert not both.stats.refusals, pg.explain(both.recorded)
    backwards = [pg.stats(b) for b in pg.api._recorded(both.recorded)._backwards]
    assert sum(b.replayed for b in backwards) > 0, pg.explain(both.recorded)
    assert not any(b.refusals for b in backwards), pg.explain(both.recorded)


def perceptron(device):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).to(device)


def batch(device, n, rows=5):
    torch.manual_seed(100 + n)
    return torch.randn(rows, 4, device=device), torch.randn(rows, 3, device=device)


class Tanh(nn.Module):
    """Its result is what autograd has saved."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x).tanh()


class ActorAndCritic(nn.Module):
    def __init__(self, bounded):
        super().__init__()
        self.actor, self.critic = nn.Linear(4, 3), nn.Linear(4, 1)

        self.bounded = bounded

    def forward(self, x):
        return self.actor(x).tanh() if self.bounded else self.actor(x), self.critic(x)
