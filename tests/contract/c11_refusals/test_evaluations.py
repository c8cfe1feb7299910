"""C9, C11: a function without arguments that evaluates weights which others train between its calls, and returns numbers. What
it reads is not what it was: replays read it anew, and no recording is made of each value."""

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import may_run_live, ramp

CALLS = 40


def accuracy(found, right):
    return int((found.argmax(-1) == right).sum()), (found.argmax(-1) != right).sum().item()


def loss(found, right):
    return nn.functional.cross_entropy(found, right).item()


def by_classes(found, right):
    return {"counts": [int((found.argmax(-1) == k).sum()) for k in range(3)], "mean": float(found.mean())}


def some(found, right):
    return found[right > 0].sum().item()


def goes_on(found, right):
    return found.sum() if found.mean() > 0 else -found.sum()


@may_run_live
@pytest.mark.parametrize("trains", ["each time", "now and then"])
@pytest.mark.parametrize("evaluated", [accuracy, loss, by_classes, some, goes_on])
def test_c09_numbers_of_weights_that_are_trained_meanwhile(device, evaluated, trains):
    def run(record):
        torch.manual_seed(0)
        net = nn.Linear(4, 3).to(device)
        x, right = ramp(device, 8, 4).sin(), torch.arange(8, device=device) % 3

        @record
        @torch.no_grad()
        def test():
            return evaluated(net(x), right)

        found = []
        for n in range(CALLS):
            if trains == "each time" or n % 10 == 9:
                with torch.no_grad():
                    net.weight.add_(ramp(device, 3, 4, start=n).cos() / 5)
                    net.bias.mul_(0.9)
            found.append(test())
        return found, test

    found, test = run(lambda f: pg.record(f, keep="always"))
    expected, _ = run(lambda f: f)
    assert_same(found, expected)
    if evaluated in (accuracy, loss, by_classes):
        assert pg.stats(test).recorded <= 5, pg.explain(test)
        assert pg.stats(test).replayed >= CALLS - 8, pg.explain(test)
