"""C9: averages that a recorded step keeps of what it computes: a sum on the device, divided by a count of Python's."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import ramp


class AverageMeter:
    """As torch's examples have it; its sum becomes a tensor with the first update."""

    def __init__(self):
        self.val, self.sum, self.count, self.avg = 0.0, 0.0, 0, 0.0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


def metered(device, dtype, record):
    """Losses, and what the meter says after each step."""
    torch.manual_seed(0)
    net = nn.Linear(4, 4).to(device, dtype)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    trainer = SimpleNamespace(meter=AverageMeter(), step=0)

    def step(x):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        trainer.meter.update(loss.detach(), x.size(0))
        trainer.step += 1
        return loss.detach()

    step, found = record(step), []
    for n in range(16):
        loss = step(ramp(device, 3, 4, start=n).to(dtype))
        if n % 3 == 0:
            meter = trainer.meter
            found.append((loss.clone(), meter.val.clone(), meter.sum.clone(), meter.avg.clone(), meter.count, trainer.step))
    return found, step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_c09_a_meter_inside_of_a_step(device, dtype):
    (live, _), (found, step) = metered(device, dtype, lambda step: step), metered(device, dtype, pg.record)
    for ours, theirs in zip(found, live, strict=True):
        assert_same(ours, theirs)
    assert pg.stats(step).recorded <= 2, pg.explain(step)
    assert pg.stats(step).replayed >= 13


WORKED = {
    "mean": lambda x, s: x / s.n,
    "sums": lambda x, s: (s.n - x) * 2 - (s.n + x) + (x - s.n),
    "products": lambda x, s: x * s.n + s.n * x.double(),
    "quotient": lambda x, s: s.n / (x.abs() + 1),
    "running mean": lambda x, s: s.mean.add_((x.mean(0) - s.mean) / s.n).clone(),
    "in place": lambda x, s: x.clone().mul_(2).div_(s.n),
    "half": lambda x, s: x.bfloat16() / s.n + x.half() * s.n,
}


@pytest.mark.parametrize("how", WORKED)
def test_c09_a_count_and_a_tensor(device, how):
    def updating(record):
        state = SimpleNamespace(n=0, mean=torch.zeros(4, device=device))

        def update(x):
            state.n += 1
            return WORKED[how](x, state)

        return record(update)

    recorded, live = updating(lambda f: pg.record(f, keep="always")), updating(lambda f: f)
    for n in range(12):
        assert_same(recorded(ramp(device, 3, 4, start=n)), live(ramp(device, 3, 4, start=n)))
    assert pg.stats(recorded).replayed >= 9, pg.explain(recorded)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = 0

    def forward(self, x):
        self.steps += 1
        return x * self.steps + self.steps


def counted_in_a_dictionary(state, x):
    state["n"] = state.get("n", 0) + 1
    return x * state["n"]


def test_c09_counters_that_are_worked_with(device):
    """Of a module, in a dictionary, and among the arguments."""
    net, state, x = pg.record(Counting(), keep="always"), {}, ramp(device, 4)
    by_dictionary = pg.record(lambda x: counted_in_a_dictionary(state, x), keep="always")
    by_argument = pg.record(lambda x, n: x * n - n / (x + 1), keep="always")
    for n in range(1, 16):
        assert_same(net(x), x * n + n)
        assert_same(by_dictionary(x), x * n)
        assert_same(by_argument(x, n), x * n - n / (x + 1))
        assert (net.steps, state["n"]) == (n, n)
    for f in (net, by_dictionary, by_argument):
        assert pg.stats(f).replayed >= 9, pg.explain(f)
