"""C6, C8, C9: training loops as people write them, and everything of torch's that goes with an optimizer.

Each loop is recorded in both ways, beside a twin without phonograph: the whole step, or the model with what the optimizer
does recorded beside it while loss and loop stay live. After each step, losses, weights, gradients and the optimizer's state
are the twin's, bit for bit."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phonograph as pg
from phonograph.testing import Raised, assert_same
from tests.helpers import reasons

WHOLE, PAIR, ALONE = "whole step", "model and optimizer", "optimizer"


both_ways = pytest.mark.parametrize("way", [WHOLE, PAIR])


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


FUSED = partial(torch.optim.AdamW, lr=0.01, fused=True)


ADAM = partial(torch.optim.Adam, lr=0.01)  # which keeps its step counts on the host


COMMON = {"sgd": SGD, "adamw, fused": FUSED, "adam": ADAM}


common = pytest.mark.parametrize("optimizer", COMMON.values(), ids=COMMON)


class Net(nn.Module):
    """Two heads, of which a call takes one; only matrices, as Muon wants them."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 6, bias=False)
        self.heads = nn.ModuleList([nn.Linear(6, 3, bias=False) for _ in range(2)])

    def forward(self, x, head=0):
        return self.heads[head](torch.tanh(self.body(x)))


def same(function):
    return function


class Run:
    """One of the two: a model and its optimizer, and `step(*batch)` as `loop` makes it.

    `loop(run, model, beside)` calls `model`, which may be recorded, and what it gives to `beside` may be recorded as well.
    """

    def __init__(self, device, optimizer, loop, way, make=Net, schedule=None, **options):
        torch.manual_seed(3)
        self.device, self.model, self.recorded, self.options = device, make().to(device), [], options
        self.optimizer = optimizer(self.model.parameters())
        self.scheduler = schedule and schedule(self.optimizer)  # before anybody takes `optimizer.step`, which it wraps
        model, beside, whole = [self._record if it in way else same for it in ("model", "optimizer", "whole")]
        self.step = whole(loop(self, model(self.model), beside))

    def _record(self, function):
        self.recorded.append(pg.record(function, warmup=1, **self.options))
        return self.recorded[-1]

    def outcome(self, batch):
        try:
            return self.step(*batch)
        except Exception as error:
            return Raised(error)


class Twins:
    """A `Run` that is recorded, and its twin in plain PyTorch."""

    def __init__(self, device, way, optimizer, loop=None, **options):
        self.ours, self.live = (Run(device, optimizer, loop or usual, w, **options) for w in (way, "live"))

    def __call__(self, *batch):
        """A step of each, compared; returns what ours gave."""
        torch.manual_seed(5)
        wanted = self.live.outcome(batch)
        torch.manual_seed(5)
        found = self.ours.outcome(batch)
        assert_same(found, wanted, "result")
        self.check()
        return found

    def check(self):
        for name in ("model", "optimizer", "extra"):
            assert_same(getattr(self.ours, name, None), getattr(self.live, name, None), name)

    def train(self, *numbers):
        for n in numbers:
            self(*batch(self.ours.device, n))

    def each(self, change):
        for run in (self.ours, self.live):
            torch.manual_seed(7)
            change(run)

    @property
    def step_stats(self):
        """Of what contains the optimizer's step."""
        return pg.stats(self.ours.recorded[-1])

    def assert_recorded(self, replays=3, *, refusals=False):
        for one in self.ours.recorded:
            stats = pg.stats(one)
            assert stats.replayed >= replays, reasons(one)
            assert refusals or not stats.refusals, reasons(one)

    def assert_live(self, reason):
        """What contains the optimizer's step ran live each time, and says why; the model beside it, if any, did not."""
        assert self.step_stats.replayed == 0
        assert reason in reasons(self.ours.recorded[-1])
        for model in self.ours.recorded[:-1]:
            assert pg.stats(model).replayed >= 3, reasons(model)


def usual(run, model, beside):
    update = beside(run.optimizer.step)

    def step(x, y):
        run.optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        update()
        return loss.detach()

    return step


def updating(update_of):
    """A loop whose update, `update_of(run)`, is more than the optimizer's step; a step returns what it returned, too."""

    def loop(run, model, beside):
        update = beside(update_of(run))

        def step(x, y):
            run.optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss.detach(), update()

        return step

    return loop


def batch(device, n, rows=5):
    generator = torch.Generator().manual_seed(100 + n)
    x, y = torch.randn(rows, 4, generator=generator), torch.randint(0, 3, (rows,), generator=generator)
    return x.to(device), y.to(device)


def taking_a_head(run, model, beside):
    update = beside(run.optimizer.step)

    def step(x, y, head, to_none=True):
        run.optimizer.zero_grad(set_to_none=to_none)
        loss = F.cross_entropy(model(x, head), y)
        loss.backward()
        update()
        return loss.detach()

    return step
