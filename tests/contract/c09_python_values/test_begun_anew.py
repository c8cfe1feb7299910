"""C1, C3, C9: tensors outside that somebody replaces time and again: a sum of losses that begins anew, a mask, a hidden state.
They are given to calls as arguments are, and written in their place as eager writes them, whoever else has them."""

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import may_run_live, ramp

CALLS, EVERY = 120, 7


class Sums:
    def __init__(self, device):
        self.device, self.n, self.mean = device, 0, None
        self.v = self.zero()
        self.held = [self.v]

    def zero(self):
        return torch.zeros(3, device=self.device)

    def begin(self, n):
        """What somebody does outside, now and then."""
        self.v = self.zero()

    def state(self):
        return self.v, self.mean, self.n

    def step(self, x):
        raise NotImplementedError


class InPlace(Sums):
    def step(self, x):
        self.v += x
        return x * 2


class Read(Sums):
    def begin(self, n):
        self.v = ramp(self.device, 3, start=n)

    def step(self, x):
        return x * self.v


class FromANumber(Sums):
    def zero(self):
        return 0.0

    def step(self, x):
        self.v += x
        return x * 2


class WithinTheStep(FromANumber):
    def begin(self, n):
        pass

    def step(self, x):
        self.v += x
        self.n += 1
        if self.n % EVERY == 0:
            self.mean = self.v / EVERY
            self.v = 0.0
        return x * 2


class FromOtherNumbers(FromANumber):
    def begin(self, n):
        self.v = [0.0, 1, 2.5, True][n // EVERY % 4]


class ByTwoNames(Sums):
    def begin(self, n):
        self.v = self.other = self.zero()

    def step(self, x):
        self.v += x
        return x * getattr(self, "other", self.v)


class AView(Sums):
    def begin(self, n):
        self.v = self.zero()
        self.row = self.v[:2]

    def step(self, x):
        self.v += x
        return x[:2] + getattr(self, "row", x[:2])


class OtherShapes(Sums):
    def begin(self, n):
        self.v = torch.zeros(3 if n // EVERY % 3 else 1, 3, device=self.device)[0 if n // EVERY % 3 else slice(None)]

    def step(self, x):
        self.v += x
        return self.v * 2


class OtherKinds(Sums):
    def begin(self, n):
        kinds = self.zero(), self.zero().double(), None, nn.Parameter(self.zero(), requires_grad=False)
        self.v = kinds[n // EVERY % 4]

    def step(self, x):
        if self.v is None:
            return x
        self.v += x
        return self.v * 2


class OfADictionary(Sums):
    def __init__(self, device):
        super().__init__(device)
        self.sums = {"a": self.zero(), "b": self.zero()}

    def begin(self, n):
        self.sums["a"] = self.zero()

    def state(self):
        return self.sums

    def step(self, x):
        self.sums["a"] += x
        self.sums["b"] += self.sums["a"]
        return x * 2


class OfAModule(Sums, nn.Module):
    def __init__(self, device):
        nn.Module.__init__(self)
        Sums.__init__(self, device)
        self.register_buffer("total", self.zero())

    def state(self):
        return self.v, self.total

    def step(self, x):
        self.v += x
        self.total += self.v
        return self.total * 2


class Held(Sums):
    def begin(self, n):
        self.held.append(self.v)
        self.v = self.zero()

    def state(self):
        return [*self.held, self.v]

    def step(self, x):
        self.v += x
        return self.v


SUMS = [InPlace, Read, FromANumber, WithinTheStep, FromOtherNumbers, OfADictionary, OfAModule, Held]
OTHERS = [ByTwoNames, AView, OtherShapes, OtherKinds]


def played(kind, device, wrap):
    made = kind(device)
    step, found = wrap(made.step), []
    for n in range(CALLS):
        before = made.v
        found.append([step(ramp(device, 3, start=n % 11)), made.state(), made.v is before])
        found[-1][:2] = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in (found[-1][0], found[-1][1])]
        if isinstance(found[-1][1], (tuple, list, dict)):
            values = found[-1][1].values() if isinstance(found[-1][1], dict) else found[-1][1]
            found[-1][1] = [x.clone() if isinstance(x, torch.Tensor) else x for x in values]
        if n % EVERY == EVERY - 1:
            made.begin(n)
    return found, step


@may_run_live
@pytest.mark.parametrize("kind", SUMS + OTHERS)
def test_c09_what_is_replaced_time_and_again(device, kind):
    found, step = played(kind, device, lambda f: pg.record(f, keep="always"))
    expected, _ = played(kind, device, lambda f: f)
    assert_same(found, expected)
    if kind in SUMS:
        assert pg.stats(step).replayed >= CALLS - 30, pg.explain(step)


class Metrics:
    def __init__(self):
        self.n, self.loss = 0, 0.0

    def begin(self):
        self.n, self.loss = 0, 0.0


@may_run_live
@pytest.mark.parametrize("anew", [True, False], ids=["another", "the same"])
def test_c19_an_object_that_is_replaced_time_and_again_is_told_with_what_helps(device, anew):
    class Trainer:
        def __init__(self):
            self.metrics = Metrics()

        def step(self, x):
            self.metrics.n += 1
            self.metrics.loss = self.metrics.loss + x.sum()
            return x * 2

    ours, live = Trainer(), Trainer()
    step = pg.record(ours.step, keep="always")
    for n in range(80):
        for made in (ours, live):
            if n % 4 == 0 and anew:
                made.metrics = Metrics()
            elif n % 4 == 0:
                made.metrics.begin()
        assert_same(step(ramp(device, 3, start=n)), live.step(ramp(device, 3, start=n)))
        assert_same(vars(ours.metrics), vars(live.metrics))
    said = pg.explain(step)
    assert ("set the attributes of the one that is there" in said) is anew, said
    assert (pg.stats(step).replayed >= 70) is not anew, said
