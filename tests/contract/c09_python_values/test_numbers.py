"""C9: numbers of each kind that change from call to call, wherever they lie: Python's, NumPy's scalars, and what is worked out
of them. Each program is like eager to the bit, and mostly replayed; where a number cannot be followed, it runs live and says
so."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import may_run_live, reasons

CALLS = 40
SPARED = 8  # calls that may run live: the first ones of each kind


def alongside(device, make, calls=CALLS):
    """A made (function, arguments of the n-th call, tensors), recorded beside the same live."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(make(device))
    (f, numbers, tensors), (plain, theirs, others) = made
    recorded = pg.record(f)
    for n in range(calls):
        torch.manual_seed(n)
        x = torch.randn(4, 8, device=device)
        results = []
        for call, given in ((recorded, numbers), (plain, theirs)):
            args = given(n)
            torch.manual_seed(n)
            results.append(call(x, *args))
        assert_same([results[0], *tensors], [results[1], *others], f"call {n}")
    return recorded


def assert_followed(recorded, spared=SPARED):
    assert pg.stats(recorded).replayed >= CALLS - spared, pg.explain(recorded)


def argument(function, number):
    return lambda device: (lambda x, c: function(x, c), lambda n: (number(n),), [])


def attribute(function, number):
    def make(device):
        state = SimpleNamespace(c=number(0))

        def put(n):
            state.c = number(n)
            return ()

        return lambda x: function(x, state.c), put, []

    return make


def variable(function, number):
    def make(device):
        c = number(0)

        def put(n):
            nonlocal c
            c = number(n)
            return ()

        return lambda x: function(x, c), put, []

    return make


def of_settings(function, number):
    return lambda device: (lambda x, settings: function(x, settings["c"]), lambda n: ({"c": number(n), "name": "a"},), [])


PLACES = {"argument": argument, "attribute": attribute, "variable": variable, "settings": of_settings}
LINE = np.linspace(0.1, 1.0, CALLS)
KINDS = {
    "float": lambda n: float(LINE[n]),
    "float64": lambda n: LINE[n],
    "float32": lambda n: np.float32(LINE[n]),
    "float16": lambda n: np.float16(LINE[n]),
    "int": lambda n: n + 1,
    "int64": lambda n: np.int64(n + 1),
    "int32": lambda n: np.int32(n + 1),
    "cosine": lambda n: np.cos(n / 10),
    "clip": lambda n: np.clip(n / 10, 0.0, 2.0),
    "interp": lambda n: np.interp(n, [0, 40], [1.0, 0.0]),
    "drawn": lambda n: np.random.default_rng(n).uniform(),
    "drawn whole": lambda n: np.random.default_rng(n).integers(0, 1000),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_c09_each_kind_of_number_in_each_place(device, kind, place):
    assert_followed(alongside(device, PLACES[place](lambda x, c: x * c + x.double() * (c * 3 + 1), KINDS[kind])))


def test_c09_truth_values_of_numpys_are_two_signatures(device):
    recorded = alongside(device, argument(lambda x, c: x * 2 if c else x, lambda n: np.bool_(n % 3 == 0)))
    assert_followed(recorded)
    assert pg.stats(recorded).recorded == 2


WORKED = {
    "from the left": lambda x, c: c * x + (c - x) + c / (x.abs() + 1),
    "a double": lambda x, c: x.double() * (1 - c) + x.double() / (2 * c + 1) + c**2 * x.double(),
    "NumPy's own": lambda x, c: x.double() * np.cos(c) * np.sqrt(c) + np.exp(-c) * np.maximum(c, 0.3),
    "clipped": lambda x, c: x * np.clip(c, 0.0, 0.5),
    "between points": lambda x, c: x * np.interp(c, [0.0, 1.0], [1.0, 0.5]) + np.interp(c, LINE, LINE[::-1]),
    "with NumPy's": lambda x, c: x.double() * (np.float32(2.3) * c) + c / np.float32(2.3) + np.float64(1) / c,
    "math": lambda x, c: x * (math.cos(c) + math.log(c) + math.sqrt(c)) if math.isfinite(c) else x,
    "its item": lambda x, c: x.double() * (c.item() * 3 if isinstance(c, np.generic) else c),
    "bounds": lambda x, c: x * max(0.3, min(c, 0.8)),
    "a comparison": lambda x, c: x * 2 if c > 0.5 else x * c,
    "of which kind": lambda x, c: x.double() * (c if isinstance(c, float) else c * 3 if isinstance(c, np.floating) else 1),
    "an integer": lambda x, c: x * int(c * 4),
    "a size": lambda x, c: x[:, : int(c * 4) + 1] * c,
    "a range": lambda x, c: sum((x * i for i in range(int(c * 4) + 1)), x),
    "rounded": lambda x, c: x * round(c, 1) + round(c * 3),
    "its floor": lambda x, c: x * math.floor(c * 4) + math.ceil(c * 3),
    "whole parts": lambda x, c: x * (c // 0.25) + c % 0.25 + divmod(c, 0.2)[1],
    "looked up": lambda x, c: x * {0: 1.5, 1: 2.5, 2: 3.5}.get(int(c * 3), 4.5),
    "integers": lambda x, c: (x * 10).int() * c + (x > 0) * c,
    "half": lambda x, c: x.bfloat16() * c + x.bfloat16().add(x.bfloat16(), alpha=c),
    "in place": lambda x, c: x.clone().mul_(c).add_(x, alpha=c).clamp_(-c, c),
    "many": lambda x, c: torch._foreach_mul(torch._foreach_add([x, x + 1], [x, x], alpha=c), c),
    "smoothing": lambda x, c: F.cross_entropy(x, x.argmax(1), label_smoothing=c / 2),
    "returned": lambda x, c: (x * c, c, c * 2),
}


@pytest.mark.parametrize("kind", ["float", "float64", "float32"])
@pytest.mark.parametrize("how", WORKED)
def test_c09_what_is_worked_out_of_a_number(device, how, kind):
    assert_followed(alongside(device, attribute(WORKED[how], KINDS[kind])), 14)  # some go several ways
    assert_followed(alongside(device, argument(WORKED[how], KINDS[kind])), 14)


WHOLE = {
    "each tenth": lambda x, n: x * min(1.0, n / 20) + (1 if n % 10 == 0 else 0),
    "every fifth": lambda x, n: x * (n // 5),
    "a power": lambda x, n: x / (1 - 0.9**n),
    "of a tensor": lambda x, n: x * n,
    "a decay": lambda x, n: x * min(0.999, (1 + n) / (10 + n)),
    "a cosine": lambda x, n: x * math.cos(math.pi * n / CALLS),
    "NumPy's cosine": lambda x, n: x * np.cos(n / CALLS),
    "NumPy's line": lambda x, n: x * np.interp(n, [0, 30], [1.0, 0.05]),
    "clipped": lambda x, n: x * np.clip(n / 20, 0, 1),
    "a range": lambda x, n: sum((x * i for i in range(n % 3)), x),
    "an item": lambda x, n: x[n % 4] * (1.0, 2.0, 3.0, 4.0)[n % 4],
    "a slice": lambda x, n: x[: n % 4 + 1] * n,
    "a root": lambda x, n: x * n**0.5,
    "rounded": lambda x, n: x * round(n / 7, 2),
    "not read": lambda x, n: x * 2,
}


def advanced(function):
    """It counts its own calls."""

    def make(device):
        state = SimpleNamespace(n=0)

        def f(x):
            state.n += 1
            return function(x, state.n)

        return f, lambda n: (), []

    return make


@pytest.mark.parametrize("place", ["argument", "attribute", "advanced"])
@pytest.mark.parametrize("how", WHOLE)
def test_c09_what_is_worked_out_of_a_count(device, how, place):
    made = advanced(WHOLE[how]) if place == "advanced" else PLACES[place](WHOLE[how], KINDS["int"])
    assert_followed(alongside(device, made), 14)


ROUNDED = {
    "wraps": (lambda x, c: x.double() * (c + np.int8(100)), lambda n: np.int8(n * 3)),
    "unsigned": (lambda x, c: x.double() * (c - np.uint8(20)), lambda n: np.uint8(n)),
    "large": (lambda x, c: x.double() * (c * c), lambda n: np.float16(n * 20)),
    "divides by zero": (lambda x, c: x.double() * (1 / (c - 3)), lambda n: np.float32(n % 5)),
    "a power of NumPy's": (lambda x, c: x.double() * np.float32(1.1) ** c, lambda n: np.int8(n % 20)),
    "its class": (lambda x, c: x * 2 if type(c) is float else x * c, KINDS["float64"]),
    "its bytes": (lambda x, c: x * c.itemsize, KINDS["float32"]),
    "a tensor": (lambda x, c: torch.tensor(c, device=x.device) * 2, lambda n: (np.float64, np.float32)[n % 2](LINE[n])),
    "an array": (lambda x, c: x * float((np.array([c, 1.0]) * 2).sum()), KINDS["float32"]),
    "of an array": (lambda x, c: x * float((c * LINE).sum() + (LINE * c).sum()), KINDS["float64"]),
    "steps": (lambda x, c: x * float(np.arange(0, c, 0.1).sum()), KINDS["float"]),
    "points that change": (lambda x, c: x * moved(c), KINDS["float64"]),
    "set in an array": (lambda x, c: x * filled(c), KINDS["float"]),
    "a text": (lambda x, c: x * float(f"{c:.1f}"), KINDS["float64"]),
    "turned over": (lambda x, c: x * c + int(~(c > np.float32(0.5))), KINDS["float32"]),
    "kinds in turn": (lambda x, c: x.double() * (c / 3), lambda n: (float, np.float64, np.float32)[n % 3](LINE[n])),
    "an item assigned": (lambda x, c: assigned(x.clone(), c), KINDS["float64"]),
}


def moved(number):
    points = [1.0, 0.5]
    found = np.interp(number, [0.0, 1.0], points)
    points[1] = 7.0
    return found


def filled(number):
    array = np.zeros(3)
    array[0] = number
    return float(array.sum())


def assigned(x, number):
    x[0] = number
    return x


@may_run_live
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, as in eager
@pytest.mark.parametrize("place", ["argument", "attribute"])
@pytest.mark.parametrize("how", ROUNDED)
def test_c09_a_number_of_numpys_is_never_taken_for_another(device, how, place):
    alongside(device, PLACES[place](*ROUNDED[how]))


@may_run_live
def test_c19_a_number_that_cannot_be_followed_is_named(device):
    recorded = alongside(device, attribute(lambda x, c: x * float(str(c)), KINDS["float64"]))
    assert "c changes from call to call" in reasons(recorded)


# -- in training


class Plain(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(p.grad, alpha=-group["lr"])


OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "one by one": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=False),
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "one's own": Plain,
}
SCHEDULES = {
    "warm-up": lambda n: 0.1 * min(1, (n + 1) / 20),
    "cosine": lambda n: 0.05 * (1 + math.cos(math.pi * n / CALLS)),
    "NumPy's cosine": lambda n: 0.05 * (1 + np.cos(np.pi * n / CALLS)),
    "NumPy's line": lambda n: LINE[n] / 10,
    "float32": lambda n: np.float32(0.1 * (n + 1) / CALLS),
}


def training(body, outside=lambda s, n: (), optimizer="foreach", **state):
    def make(device):
        net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).to(device)
        shadow = [p.detach().clone() for p in net.parameters()]
        s = SimpleNamespace(net=net, shadow=shadow, optimizer=OPTIMIZERS[optimizer](net.parameters()), n=0, **state)

        def step(x, *numbers):
            s.optimizer.zero_grad()
            return body(s, x, *numbers)

        return step, lambda n: outside(s, n) or (), [*net.parameters(), *shadow]

    return make


def stepped(s, x, loss=lambda s, y: y.square().mean()):
    found = loss(s, s.net(x))
    found.backward()
    s.optimizer.step()
    return found.detach()


def set_rate(s, rate):
    for group in s.optimizer.param_groups:
        group["lr"] = rate


@pytest.mark.parametrize("where", ["outside", "inside", "passed"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_c09_a_schedule_that_is_written_by_hand(device, optimizer, schedule, where):
    rate = SCHEDULES[schedule]

    def inside(s, x):
        set_rate(s, rate(s.n))
        s.n += 1
        return stepped(s, x)

    def passed(s, x, lr):
        set_rate(s, lr)
        return stepped(s, x)

    made = {
        "outside": training(stepped, lambda s, n: set_rate(s, rate(n)), optimizer),
        "inside": training(inside, optimizer=optimizer),
        "passed": training(passed, lambda s, n: (rate(n),), optimizer),
    }
    if where == "inside" and schedule in ("NumPy's line", "float32"):
        pytest.skip("an entry of an array is looked up by a number that is another in each call")
    assert_followed(alongside(device, made[where]), 10)


@may_run_live
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_c09_a_rate_of_two_kinds_in_turn(device, optimizer):
    """One of them rounds otherwise where the optimizer works with it."""
    alongside(device, training(stepped, lambda s, n: set_rate(s, (float, np.float32)[n % 2](0.1 * (n + 1) / CALLS)), optimizer))


def clipped(s, x, **options):
    loss = s.net(x).square().mean()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(s.net.parameters(), s.c, **options)
    s.optimizer.step()
    return loss.detach(), norm


def clipped_by_value(s, x):
    loss = s.net(x).square().mean()
    loss.backward()
    nn.utils.clip_grad_value_(s.net.parameters(), s.c)
    s.optimizer.step()
    return loss.detach()


def averaged(s, x):
    s.n += 1
    decay = min(0.999, (1 + s.n) / (10 + s.n))
    loss = stepped(s, x)
    with torch.no_grad():
        for e, p in zip(s.shadow, s.net.parameters(), strict=True):
            e.mul_(decay).add_(p, alpha=1 - decay)
    return loss


def explored(s, x):
    epsilon = max(0.05, 1 - s.n / 30)
    s.n += 1
    draw = torch.rand(4, device=x.device) < epsilon
    return torch.where(draw, torch.randint(0, 4, (4,), device=x.device), s.net(x).argmax(-1))


def explored_by_numpy(s, x):
    epsilon = np.interp(s.n, [0, 30], [1.0, 0.05])
    s.n += 1
    return torch.rand(4, device=x.device) < epsilon


def annealed(s, x):
    s.n += 1
    beta = np.clip(s.n / 20, 0.0, 1.0)
    return stepped(s, x, lambda s, y: y.square().mean() - beta * (1 + y - y.exp()).mean())


def cooled(s, x):
    temperature = max(0.5, math.exp(-0.03 * s.n))
    s.n += 1
    return stepped(s, x, lambda s, y: F.gumbel_softmax(y, tau=temperature).square().sum())


def smoothed(s, x):
    return stepped(s, x, lambda s, y: F.cross_entropy(y, y.argmax(1), label_smoothing=s.c))


def put(kind, make=lambda n: 0.1 + n / 100):
    return lambda s, n: setattr(s, "c", kind(make(n)))


def group_set(name, value):
    def outside(s, n):
        for group in s.optimizer.param_groups:
            group[name] = value(n)

    return outside


TRAINED = {
    "clipped": training(clipped, put(float), c=0.1),
    "clipped, float64": training(clipped, put(np.float64), c=0.1),
    "clipped, float32": training(clipped, put(np.float32), c=0.1),
    "clipped one by one": training(lambda s, x: clipped(s, x, foreach=False), put(float), c=0.1),
    "clipped by value": training(clipped_by_value, put(float, lambda n: 0.001 + n / 1000), c=0.1),
    "clipped by one of two": training(clipped, lambda s, n: setattr(s, "c", (0.1, 1.0)[n % 2]), c=0.1),
    "clipped by what stays": training(clipped, c=np.float32(0.5)),
    "an average": training(averaged),
    "an epsilon": training(explored),
    "an epsilon of NumPy's": training(explored_by_numpy),
    "a coefficient": training(annealed),
    "a temperature": training(cooled),
    "smoothing": training(smoothed, put(float, lambda n: 0.11 - n / 400), c=0.1),
    "smoothing, float32": training(smoothed, put(np.float32, lambda n: 0.11 - n / 400), c=0.1),
    **{f"betas, {o}": training(stepped, group_set("betas", lambda n: (0.9 - n / 100, 0.99)), o) for o in ("foreach", "fused")},
    **{f"decay, {o}": training(stepped, group_set("weight_decay", lambda n: 0.1 + n / 100), o) for o in ("foreach", "fused")},
    "decay, float32": training(stepped, group_set("weight_decay", lambda n: np.float32(0.1 + n / 100))),
}


@pytest.mark.parametrize("how", TRAINED)
def test_c09_numbers_of_a_training_step(device, how):
    assert_followed(alongside(device, TRAINED[how]), 10)


# -- kinds of calls in turn


@may_run_live
def test_c11_a_warm_up_beside_a_read_each_tenth_time(device):
    """Those calls run live, and no others for their sake."""

    def make(device):
        s = SimpleNamespace(n=0, last=0.0)

        def step(x):
            y = x * min(1.0, s.n / 20)
            s.n += 1
            if s.n % 10 == 0:
                s.last = y.sum().item()
            return y

        return step, lambda n: (), []

    recorded = alongside(device, make)
    assert_followed(recorded, 12)


@pytest.mark.parametrize("kind", [float, np.float64, np.float32])
@pytest.mark.parametrize("period", [2, 3])
def test_c07_a_number_beside_kinds_that_take_turns(device, kind, period):
    def make(device):
        return lambda x, c, flag: x * c if flag else x, lambda n: (kind(n / 1000 + 0.1), n % period == 0), []

    assert_followed(alongside(device, make), 9)


@may_run_live  # the optimizer's first step makes its state
@pytest.mark.parametrize("where", ["outside", "inside", "counted"])
@pytest.mark.parametrize("every", [2, 4])
def test_c09_accumulation_beside_a_rate_that_changes(device, every, where):
    """A call that does not read the rate does not rely on it."""

    def make(device):
        net = nn.Linear(8, 4).to(device)
        s = SimpleNamespace(n=0, optimizer=torch.optim.Adam(net.parameters(), lr=0.01))

        def step(x, rate=None, last=False):
            s.n += 1
            loss = net(x).square().mean() / every
            loss.backward()
            if where == "counted" and s.n % every == 0:
                rate, last = 0.01 * min(1, s.n / 30), True
            if last:
                if rate is not None:
                    set_rate(s, rate)
                s.optimizer.step()
                s.optimizer.zero_grad()
            return loss.detach()

        def numbers(n):
            rate = 0.01 * (1 + n / CALLS)
            if where == "outside":
                set_rate(s, rate)
            return () if where == "counted" else (rate if where == "inside" else None, n % every == every - 1)

        return step, numbers, [*net.parameters()]

    assert_followed(alongside(device, make), 16)


@may_run_live
def test_c15_kinds_of_calls_that_are_new_all_at_once_settle(device):
    """A warm-up ends while the others are hardly recorded: that is more than is recorded in quick succession."""

    def make(device):
        net = nn.Linear(8, 4).to(device)
        s = SimpleNamespace(n=0, optimizer=torch.optim.Adam(net.parameters(), lr=0.01))

        def step(x):
            s.n += 1
            loss = net(x).square().mean() / 4
            loss.backward()
            rate = 0.01 * min(1, s.n / 10)
            if s.n % 4 == 0:
                set_rate(s, rate)
                s.optimizer.step()
                s.optimizer.zero_grad()
            return loss.detach()

        return step, lambda n: (), [*net.parameters()]

    recorded = alongside(device, make, 600)
    assert pg.stats(recorded).replayed >= 100, pg.explain(recorded)


ADDED_UP = {
    "floats": lambda x, c: x * sum([c] * 9 + [0.3]),
    "a float among others": lambda x, c: x * sum([0.1] * 3 + [c] + [0.1] * 6),
    "with a whole number": lambda x, c: x * sum([0.1, 0.2, int(c * 10), 0.3]),
}


@may_run_live
@pytest.mark.parametrize("function", ADDED_UP.values(), ids=ADDED_UP)
def test_c09_numbers_that_sum_adds_up(device, function):
    """Since Python 3.12 it makes up for what floats lose."""
    make = attribute(lambda x, c: function(x.double(), c), lambda n: 0.1 + n * 0.3)
    alongside(device, make, calls=14)
