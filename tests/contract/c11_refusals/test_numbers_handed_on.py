"""C1, C9, C11: numbers that a call reads of tensors and only hands on, with `fallback="split"`: `return loss.item()`, a dict of
metrics, an attribute, an argument of a function that is marked `@pg.live`. Each replay reads them anew, and works out what
arithmetic has made of them: ``self.total += loss.item() * len(x)``. Whatever depends on such a number otherwise runs live."""

import math
from collections import Counter, defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.c09_python_values import converting
from tests.helpers import counts, may_run_live, ramp, reasons


def recorded(function, **options):
    return pg.record(function, fallback="split", **options)


HANDED_ON = {
    "item": lambda x: x.sum().item(),
    "with the tensor": lambda x: (x * 2, x.sum().item()),
    "metrics": lambda x: {"sum": x.sum().item(), "most": x.max().item(), "of": [len(x), x.min().item()]},
    "an integer": lambda x: (x.long().sum().item(), x.sum().item()),
    "a truth": lambda x: (x > 2).all().item(),
    "a complex number": lambda x: (x[0] + 2j).item(),
    "a list": lambda x: (x * 2).tolist(),
    "lists of lists": lambda x: {"table": x.view(-1, 1).expand(3, 2).tolist()},
    "one that is written afterwards": lambda x: ((y := x.sum()).item(), y.add_(1)),
    "an argument's": lambda x: x[1:2].item(),
    "arithmetic": lambda x: x.sum().item() + 1,
    "a share": lambda x: {"right": (x > 2).sum().item() / len(x), "percent": 100 * x.mean().item(), "of": x * 2},
    "all operations": lambda x: ((a := x.sum().item()) - 2, 2 - a, a * 3, 3.5 * a, a / 7, a // 2, a % 3, -a, +a, abs(-a)),
    "of whole numbers": lambda x: ((a := x.long().sum().item()) - 2, 2 - a, a * 3, a * 0.5, a / 7, a // 2, a % 3, -a),
    "of truths": lambda x: (-(a := (x > 2).all().item()), a + 1, a * 0.5, 3 - a),
    "of one with another": lambda x: x.sum().item() * x.max().item() - x.min().item(),
    "one of NumPy's": lambda x: (np.float64(0.1) * x.sum().item(), x.sum().item() / np.float32(3)),
    "a rounded one": lambda x: round(x.sum().item() / 7, 2),
    "the same twice": lambda x: [a := x.sum().item() / 3, a, (a, a + 1)],
    "a list that is added up": lambda x: sum([*(x / 7).tolist(), 0.1]) / len(x),
    "of a generator": lambda x: (sum(t.item() / 3 for t in x), sum((t > 2).item() for t in x), min(t.item() for t in x)),
    "the largest": lambda x: (max(x.tolist()), max(x[0].item(), x[1].item() * 2, 1.5), min(x.sum().item(), -x[0].item())),
    "NumPy's mean": lambda x: (np.mean([a := x.sum().item(), a / 3, 0.1]) + 1, np.std((a, 2)), np.sum(x.tolist()) * 2),
    "a mean's mean": lambda x: np.mean([np.mean(x.tolist()), sum(x.tolist(), 0.5)]),
}


@pytest.mark.parametrize("function", HANDED_ON.values(), ids=HANDED_ON)
def test_c01_numbers_in_a_result(device, function):
    f = recorded(function)
    for n in range(5):
        x = ramp(device, 3, start=n)
        ours, theirs = f(x), function(x)
        assert_same(ours, theirs)
        assert repr(ours) == repr(theirs)
    assert counts(f) == (1, 1, 4), reasons(f)


def test_c01_a_training_step_that_returns_its_loss(device):
    def made():
        torch.manual_seed(0)
        model = nn.Linear(4, 1).to(device)
        opt = torch.optim.Adam(model.parameters(), lr=0.1)

        def step(x, y):
            opt.zero_grad()
            out = model(x)
            loss = (out - y).square().mean()
            loss.backward()
            opt.step()
            return {"loss": loss.item(), "bias": model.bias.item(), "error": (out - y).abs().max().item()}

        return step

    plain, f = made(), recorded(made())
    for n in range(6):
        x, y = ramp(device, 5, 4, start=n) / 9, ramp(device, 5, 1, start=n)
        assert f(x, y) == plain(x, y)
    assert counts(f) == (1, 1, 5), reasons(f)


def test_c09_a_number_in_an_attribute(device):
    class Meter:
        def __init__(self):
            self.last = 0.0

        def step(self, x):
            self.last = x.sum().item()
            return x * 2

    ours, theirs = Meter(), Meter()
    f = recorded(ours.step)
    for n in range(5):
        x = ramp(device, 3, start=n)
        assert_same(f(x), theirs.step(x))
        assert ours.last == theirs.last
        assert type(ours.last) is float
    assert counts(f) == (1, 1, 4), reasons(f)


class Average:
    """As people write it around each training loop."""

    def __init__(self):
        self.val, self.sum, self.count, self.avg, self.smooth = 0.0, 0.0, 0, 0.0, None

    def update(self, x):
        self.val = x.mean().item()
        self.sum += self.val * len(x)
        self.count += len(x)
        self.avg = self.sum / self.count
        self.smooth = self.val if self.smooth is None else 0.9 * self.smooth + 0.1 * self.val


def test_c09_averages_of_numbers(device):
    ours, theirs, f = Average(), Average(), None

    def step(average, x):
        average.update(x)
        return x * 2

    f = recorded(lambda x: step(ours, x))
    for n in range(8):
        x = ramp(device, 3, start=n).sin()
        assert_same(f(x), step(theirs, x))
        assert vars(ours) == vars(theirs)
        assert [*map(type, vars(ours).values())] == [*map(type, vars(theirs).values())]
        if n == 5:
            ours.sum, ours.count = theirs.sum, theirs.count = 0.0, 0  # as at the end of an epoch
    assert pg.stats(f).replayed == 7, reasons(f)


def in_dictionary(x, d):
    d["right"] += (x > 2).sum().item()
    d["all"] += len(x)


def in_list(x, d):
    d["cells"][0] += x.sum().item()
    d["cells"][1] += 1


def read_again(x, d):
    d["sum"] += x.sum().item()
    d["twice"] = d["sum"] * 2
    return {"sum": d["sum"], "mean": d["sum"] / len(x)}


ADDED_UP = {
    "a dictionary": (in_dictionary, lambda: {"right": 0, "all": 0}),
    "a Counter": (in_dictionary, Counter),
    "a defaultdict": (in_dictionary, lambda: defaultdict(float)),
    "a list": (in_list, lambda: {"cells": [0.0, 0]}),
    "what is read again": (read_again, lambda: {"sum": 0.0, "twice": 0.0}),
}


@pytest.mark.parametrize(("function", "make"), ADDED_UP.values(), ids=ADDED_UP)
def test_c09_numbers_that_are_added_up(device, function, make):
    ours, theirs = make(), make()
    f = recorded(lambda x: function(x, ours))
    for n in range(8):
        x = ramp(device, 3, start=n).sin() * 4
        assert f(x) == function(x, theirs)
        assert repr(ours) == repr(theirs)
    assert pg.stats(f).replayed >= 6, reasons(f)


def test_c09_a_number_that_is_added_up_beside_others_that_change(device):
    """A coefficient that the caller changes, a count by which the call goes on, and a scheduler."""
    ours, theirs = [SimpleNamespace(beta=0.5, n=0, total=0.0) for _ in range(2)]

    def step(state, x):
        state.n += 1
        state.total = state.beta * state.total + x.sum().item() / state.n
        return x * state.beta

    f = recorded(lambda x: step(ours, x))
    for n in range(10):
        ours.beta = theirs.beta = 1 / (n + 1)
        x = ramp(device, 3, start=n).cos()
        assert_same(f(x), step(theirs, x))
        assert (ours.n, ours.total) == (theirs.n, theirs.total)
    assert pg.stats(f).replayed >= 6, reasons(f)


@may_run_live
def test_c13_a_divisor_that_becomes_zero(device):
    ours, theirs = [SimpleNamespace(n=3, last=0.0) for _ in range(2)]

    def step(state, x):
        state.n -= 1
        state.last = x.sum().item() / state.n
        return x * 2

    f = recorded(lambda x: step(ours, x))
    for n in range(6):
        x = ramp(device, 3, start=n)
        for function, state in ((f, ours), (lambda x: step(theirs, x), theirs)):
            if n == 2:
                with pytest.raises(ZeroDivisionError):
                    function(x)
            else:
                function(x)
            assert state.n == 2 - n
        assert ours == theirs


def test_c11_a_number_for_a_marked_function(device):
    seen = []

    @pg.live
    def log(name, value):
        seen.append(f"{name}: {value:.2f}")

    def step(x, every):
        y = (x * 2).sum()
        if every:
            log("loss", y.item())
        y.mul_(3)
        return y

    f = recorded(step)
    for n in range(6):
        assert_same(f(ramp(device, 3, start=n), n % 2 == 0), (ramp(device, 3, start=n) * 2).sum() * 3)
    assert seen == [f"loss: {2 * (3 * n + 3):.2f}" for n in (0, 2, 4)]
    assert counts(f) == (2, 2, 4), reasons(f)


class Steps:
    rate = 1.0


DEPEND = {
    "an operator": lambda x: x * x.sum().item(),
    "text": lambda x: f"{x.sum().item():.3f}",
    "an index": lambda x: x[int(x[0].item()) + 1 - int(x[0].item())] * x[0].item(),
    "a shape": lambda x: torch.ones(int(x[0].item()) + 1, device=x.device),
    "a constant": lambda x: torch.full((2,), x.sum().item(), device=x.device),
    "an array": lambda x: np.array([x.sum().item()])[0],
    "a set": lambda x: len({x.sum().item(), 6.0}),
    "a list in a list": lambda x: x * x.view(1, 3).tolist()[0][1],
}


@may_run_live
@pytest.mark.parametrize("function", DEPEND.values(), ids=DEPEND)
def test_c11_what_depends_on_a_number_gets_it(device, function):
    f = recorded(function)
    for n in (1, 1, 2, 5, 7):
        x = ramp(device, 3, start=n)
        assert_same(f(x), function(x))
    assert pg.stats(f).replayed == 0  # it is another each time (test_decisive_numbers.py)


GOES_BY = {
    "a branch": lambda x: x * 2 if x.sum().item() > 1 else x,
    "a comparison of what is worked out": lambda x: x.sum().item() / 3 > 0.5,
    "two of them": lambda x: x * 2 if x.max().item() >= x.min().item() else x,
    "the standard library": lambda x: x.sum().item() if math.isfinite(x.sum().item()) else -1.0,
    "NumPy": lambda x: 0.0 if np.isnan(v := x.sum().item()) or np.isinf(v) else v,
    "one that is no number": lambda x: v if (v := x.sum().item()) == v else None,
    "a divisor": lambda x: 1 / x.sum().item(),
    "a power": lambda x: x.sum().item() ** -2,
    "a root": lambda x: (x.sum().item() - 3) ** 0.5,
    "a function": lambda x: math.log(x.sum().item()),
    "one that is whole": lambda x: (round(x.sum().item() / 7), 2.0 // x.sum().item()),
}


@may_run_live
@pytest.mark.parametrize("function", GOES_BY.values(), ids=GOES_BY)
def test_c11_a_call_that_goes_on_by_a_float(device, function):
    """A replay looks at what the call has decided by it, or that it does not raise. Where that is another it runs live."""
    f = recorded(function)
    for n in range(8):
        x = ramp(device, 3, start=n + 1)
        assert_same(f(x), function(x))
    assert pg.stats(f).replayed >= 5, reasons(f)
    for value in (0.0, -2.0, math.nan, math.inf, 0.1, 3.0):
        x = torch.full((3,), value, device=device)
        try:
            expected = function(x)
        except ArithmeticError as e:
            with pytest.raises(type(e)):
                f(x)
        except ValueError:
            with pytest.raises(ValueError):  # noqa: PT011 (that of `math`, whose words change)
                f(x)
        else:
            assert repr(f(x)) == repr(expected)


CONVERTED = {f.__name__: f for f in (converting.metrics, converting.hits, converting.converted_again)}


@pytest.mark.parametrize("function", CONVERTED.values(), ids=CONVERTED)
def test_c01_numbers_that_are_converted(device, function):
    f = recorded(function)
    for n in range(6):
        x = ramp(device, 3, start=n)
        assert repr(f(x)) == repr(function(x))
    assert pg.stats(f).replayed >= 4, reasons(f)


OF_CLASSES = {
    "is": lambda x: x * 2 if type(x.sum().item()) is float else x * 3,
    "in": lambda x: {"a": v} if type(v := x.sum().item()) in (int, float) else {},
    "isinstance": lambda x: x * 2 if isinstance(x.sum().item(), float) else x * 3,
    "of what is worked out": lambda x: x * 2 if type(x.long().sum().item() / 2) is float else x * 3,
    "itself": lambda x: x * 2 if x.sum().item().__class__ is float else x * 3,
}


@may_run_live
@pytest.mark.parametrize("function", OF_CLASSES.values(), ids=OF_CLASSES)
def test_c01_code_that_asks_for_the_class_of_a_number(device, function):
    f = recorded(function)
    for n in range(5):
        x = ramp(device, 3, start=n)
        assert_same(f(x), function(x))


class Best:
    """Stops early, as training loops do."""

    def __init__(self):
        self.best, self.bad, self.at, self.n = math.inf, 0, -1, 0

    def update(self, x):
        self.n += 1
        loss = x.square().mean().item()
        if loss < self.best - 1e-3:
            self.best, self.bad, self.at = loss, 0, self.n
        else:
            self.bad += 1
        return self.bad > 3


@may_run_live
def test_c09_a_step_that_stops_early(device):
    ours, theirs = Best(), Best()
    f = recorded(ours.update)
    for n in range(24):
        x = ramp(device, 3, start=n).sin() / (1 + n % 7)
        assert f(x) is theirs.update(x)
        assert vars(ours) == vars(theirs)
    assert pg.stats(f).replayed >= 12, reasons(f)


@may_run_live
def test_c11_a_number_that_is_kept_elsewhere(device):
    seen, table = [], {}

    def f(x):
        seen.append(x.sum().item())
        table["last"] = x.sum().item()
        return x * 2

    g = recorded(f)
    for n in range(5):
        g(ramp(device, 3, start=n))
    assert seen == [float(3 * n + 3) for n in range(5)]
    assert table == {"last": 15.0}


@may_run_live
def test_c11_a_container_that_is_returned_twice(device):
    def f(x):
        found = {"sum": x.sum().item()}
        return found, found

    g = recorded(f)
    for n in range(4):
        a, b = g(ramp(device, 3, start=n))
        assert a is b
        assert a == {"sum": 3.0 * n + 3}


def test_c06_beside_a_backward_that_runs_outside(device):
    def made():
        torch.manual_seed(0)
        return nn.Linear(3, 3).to(device)

    def forward(model, x):
        y = model(x)
        return y, y.max().item()

    ours, theirs = made(), made()
    f = recorded(lambda x: forward(ours, x))
    for n in range(5):
        x = ramp(device, 2, 3, start=n)
        (y, most), (z, other) = f(x), forward(theirs, x)
        assert most == other
        y.sum().backward()
        z.sum().backward()
        assert_same(ours.weight.grad, theirs.weight.grad)
    assert pg.stats(f).replayed >= 3, reasons(f)
