"""C6, C8, C9: training programs as people write them. In the middle something is changed, and changed back. Recorded as a whole
step, or the model as a pair, beside the same program live.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import may_run_live, ramp

CALLS = 14


class Program:
    """A model, an optimizer, and `step(x, y)`; `change(n)` is called before the n-th one."""

    def __init__(self, device):
        self.device = device
        self.model = self.made()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def made(self):
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)).to(self.device)

    def change(self, n):
        pass

    def loss(self, x, y):
        return F.mse_loss(self.model(x), y)

    def step(self, x, y):
        self.optimizer.zero_grad()
        loss = self.loss(x, y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def watched(self):
        return [self.model]


class Normed(Program):
    """Spectral norm, whose buffers each forward moves on, and weight norm; evaluated in the middle."""

    def made(self):
        first, last = nn.Linear(6, 8), nn.Linear(8, 3)
        return nn.Sequential(parametrizations.spectral_norm(first), nn.ReLU(), parametrizations.weight_norm(last)).to(
            self.device
        )

    def change(self, n):
        self.model.train(n not in (6, 9))


class Sharpness(Program):
    """SAM: a step up, another backward there, and back."""

    radius = 0.05

    def step(self, x, y):
        self.optimizer.zero_grad()
        loss = self.loss(x, y)
        loss.backward()
        weights = [p for p in self.model.parameters() if p.grad is not None]
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in weights]).norm()
            moves = [p.grad * (self.radius / (norm + 1e-12)) for p in weights]
            torch._foreach_add_(weights, moves)
        self.optimizer.zero_grad()
        self.loss(x, y).backward()
        with torch.no_grad():
            torch._foreach_sub_(weights, moves)
        self.optimizer.step()
        return loss.detach()

    def change(self, n):
        self.radius = 0.1 if 6 <= n < 11 else 0.05


class Averaged(Program):
    """A moving average of the weights that stands in for them at an evaluation, by their `.data`."""

    def __init__(self, device):
        super().__init__(device)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def change(self, n):
        self.average.update_parameters(self.model)
        if n in (6, 7, 9, 10):
            for ours, theirs in zip(self.model.parameters(), self.average.module.parameters(), strict=True):
                ours.data, theirs.data = theirs.data, ours.data

    def watched(self):
        return [self.model, self.average]


class Adapter(nn.Module):
    """A linear layer with a low-rank addition, which can be switched off, and merged."""

    def __init__(self, base):
        super().__init__()
        self.base, self.on, self.scale = base, True, 0.5
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.scale * self.up(self.down(x)) if self.on else self.base(x)

    def merge(self, sign):
        with torch.no_grad():
            self.base.weight += sign * self.scale * self.up.weight @ self.down.weight
        self.on = sign < 0


class Adapted(Program):
    def made(self):
        model = nn.Sequential(Adapter(nn.Linear(6, 8)), nn.Tanh(), Adapter(nn.Linear(8, 3))).to(self.device)
        for adapter in (model[0], model[2]):
            adapter.base.requires_grad_(False)
        return model

    def change(self, n):
        first = self.model[0]
        if n in (5, 7):
            first.on = n == 7
        if n in (9, 11):
            first.merge(1 if n == 9 else -1)
        if n == 12:
            first.scale = 0.25


class Taught(Program):
    """Distillation: the teacher is replaced, and so is the temperature."""

    def __init__(self, device):
        super().__init__(device)
        self.teacher, self.temperature = copy.deepcopy(self.model).eval(), 2.0

    def loss(self, x, y):
        with torch.no_grad():
            wanted = (self.teacher(x) / self.temperature).softmax(1)
        return F.kl_div((self.model(x) / self.temperature).log_softmax(1), wanted, reduction="batchmean") + super().loss(x, y)

    def change(self, n):
        if n == 6:
            self.teacher = copy.deepcopy(self.model).eval()
        self.temperature = 3.0 if 8 <= n < 11 else 2.0


class Frozen(Program):
    """Layers are frozen and thawed, dropout and the momentum of batch norm change."""

    def change(self, n):
        self.model[0].requires_grad_(not 5 <= n < 9)
        self.model[1].momentum = 0.01 if 7 <= n < 11 else 0.1
        self.model[3].p = 0.5 if n in (8, 9) else 0.2


class Rebuilt(Program):
    """A part of the model is replaced, weights are tied, and the old part comes back."""

    def change(self, n):
        if n == 5:
            self.before, self.model[2] = self.model[2], nn.Sigmoid()
        if n == 8:
            self.model[2] = self.before
        if n == 10:
            self.model[4].weight = nn.Parameter(self.model[0].weight[:3, :1].expand(3, 8).clone())
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)


class Restored(Program):
    """A checkpoint is loaded, in place and as other tensors."""

    def change(self, n):
        if n == 3:
            self.saved = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        if n in (6, 9):
            self.model.load_state_dict(copy.deepcopy(self.saved[0]), assign=n == 9)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
            self.optimizer.load_state_dict(copy.deepcopy(self.saved[1]))


class Pruned(Program):
    def change(self, n):
        if n == 5:
            prune.l1_unstructured(self.model[0], "weight", amount=0.3)
        if n == 9:
            prune.remove(self.model[0], "weight")
        if n in (5, 9):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)


class Adversarial(Program):
    """Two models that train each other, with a gradient penalty from the middle on."""

    penalty = 0.0

    def __init__(self, device):
        super().__init__(device)
        self.critic = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
        self.critics = torch.optim.Adam(self.critic.parameters(), lr=1e-3, fused=True)

    def step(self, x, y):
        fake = self.model(x)
        self.critics.zero_grad()
        cost = self.critic(fake.detach()).mean() - self.critic(y).mean()
        if self.penalty:
            between = ((fake + y) / 2).detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
            cost = cost + self.penalty * (slope.norm(dim=1) - 1).square().mean()
        cost.backward()
        self.critics.step()
        self.optimizer.zero_grad()
        loss = -self.critic(fake).mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach() + cost.detach()

    def change(self, n):
        self.penalty = 0.0 if n < 6 else 1.0 if n < 10 else 2.0

    def watched(self):
        return [self.model, self.critic]


class Learned(Program):
    """Learning to learn: the gradient goes through steps of the inner loop."""

    rate = 0.1

    def made(self):
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(self.device)

    def loss(self, x, y):
        weights = dict(self.model.named_parameters())
        inner = F.mse_loss(torch.func.functional_call(self.model, weights, (x[:2],)), y[:2])
        slopes = torch.autograd.grad(inner, [*weights.values()], create_graph=True)
        moved = {name: w - self.rate * g for (name, w), g in zip(weights.items(), slopes, strict=True)}
        return F.mse_loss(torch.func.functional_call(self.model, moved, (x[2:],)), y[2:])

    def change(self, n):
        self.rate = 0.2 if 6 <= n < 10 else 0.1


PROGRAMS = [Normed, Sharpness, Averaged, Adapted, Taught, Frozen, Rebuilt, Restored, Pruned, Adversarial, Learned]


def state(program):
    found = []
    for model in program.watched():
        found += [(name, t.detach().clone(), t.requires_grad) for name, t in model.state_dict(keep_vars=True).items()]
        found += [(name, None if p.grad is None else p.grad.clone()) for name, p in model.named_parameters()]
    return found


@may_run_live
@pytest.mark.parametrize("way", ["step", "pair"])
@pytest.mark.parametrize("kind", PROGRAMS)
def test_c06_a_program_that_changes_in_mid_training(device, kind, way):
    torch.manual_seed(0)
    live = kind(device)
    torch.manual_seed(0)
    ours = kind(device)
    recorded = [pg.record(ours.step) if way == "step" else pg.record(ours.model)]
    step = recorded[0] if way == "step" else ours.step
    for n in range(CALLS):
        x, y = ramp(device, 4, 6, start=n) / 10, ramp(device, 4, 3, start=-n) / 5
        results = []
        for program, run in ((live, live.step), (ours, step)):
            torch.manual_seed(n)
            program.change(n)
            results.append((run(x, y), torch.get_rng_state()))
        assert_same(results[1], results[0])
        assert_same(state(ours), state(live))
    if not (way == "pair" and kind is Learned):  # of which each backward is differentiated
        assert pg.stats(recorded[0]).replayed, pg.explain(recorded[0])
