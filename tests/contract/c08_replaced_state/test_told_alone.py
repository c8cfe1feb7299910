"""C5, C6, C8: gradients that are set, had, or replaced between two replays, where nothing else has come to any gradient.

Who listens to gradients hears of a live backward too, so one beside the recorded steps would hide that a way is not heard. Here
the plain program has ended before the recorded one begins, and nobody comes to a gradient but in the one way that is tried, and
to one of so many that looking at one in each call does not find it by chance."""

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import may_run_live, ramp

pytestmark = may_run_live
AT, CALLS = 7, 12  # between which calls something is done; how many there are


class Run:
    def __init__(self, device, record, accumulates):
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(20))).to(device)
        self.last = self.net[-1].bias
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9)
        self.accumulates, self.kept, self.device = accumulates, [], device
        self.step = record(self.plain)

    def plain(self, x):
        if not self.accumulates:
            self.optimizer.zero_grad()
        loss = self.net(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def results(self, between):
        losses = []
        for n in range(CALLS):
            losses.append(self.step(ramp(self.device, 3, 4, start=n) / 12))
            if n == AT:
                between(self)
        return losses, [p.detach().clone() for p in self.net.parameters()], self.kept


def another(run):
    run.last.grad = torch.ones_like(run.last)


def none(run):
    run.last.grad = None


def deleted(run):
    del run.last.grad


def had(run):
    run.kept.append(run.last.grad)


def had_in_part(run):
    run.kept.append(run.last.grad[1:])


def replaced_by_autograd(run):
    """Out of place, in C++: `create_graph` adds so."""
    run.last.sin().sum().backward(create_graph=True)


def added_to_by_autograd(run):
    run.last.sin().sum().backward()


def all_gone_and_there_again(run):
    run.optimizer.zero_grad()
    run.net(ramp(run.device, 3, 4)).sum().backward()


WAYS = [another, none, deleted, had, had_in_part, replaced_by_autograd, added_to_by_autograd, all_gone_and_there_again]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("accumulates", [False, True], ids=["fresh", "accumulates"])
@pytest.mark.parametrize("between", WAYS, ids=lambda f: f.__name__)
def test_c05_c06_c08_a_gradient_is_come_to_in_one_way_only(device, between, accumulates):
    expected = Run(device, lambda f: f, accumulates).results(between)
    run = Run(device, pg.record, accumulates)
    assert_same(run.results(between), expected)
    assert pg.stats(run.step).replayed >= AT, pg.explain(run.step)
