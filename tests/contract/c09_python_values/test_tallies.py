"""C9: numbers that a call advances, and by which it goes on: each kind of call is one recording, and replays leave what the
call would have left. What else is done with such a number makes it run live; nothing is ever stale."""

import dataclasses
import inspect
import json
import math
import operator
import sys
import types

import numpy as np
import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import counts, may_run_live, ramp, reasons


def numbers_of(thing):
    return {k: v for k, v in vars(thing).items() if isinstance(v, (int, float, str, list))}


def alongside(device, make, calls=14, change=lambda thing, n: None, **options):
    """The `update` of a made object, recorded beside that of another that is live."""
    torch.manual_seed(0)
    ours = make(device)
    torch.manual_seed(0)
    theirs = make(device)
    recorded = pg.record(ours.update, **options)
    for n in range(calls):
        for thing in (ours, theirs):
            change(thing, n)
        x = (ramp(device, 4, 3, start=n) * 0.1).sin()
        assert_same(recorded(x.clone()), theirs.update(x), f"call {n}")
        assert numbers_of(ours) == numbers_of(theirs)
        assert [*map(type, numbers_of(ours).values())] == [*map(type, numbers_of(theirs).values())]
    return recorded


class Delayed:
    """As TD3 does it."""

    def __init__(self, device, optimizer=torch.optim.SGD):
        self.critic, self.actor = nn.Linear(3, 1).to(device), nn.Linear(3, 3).to(device)
        self.critic_optimizer = optimizer(self.critic.parameters(), lr=0.01)
        self.actor_optimizer = optimizer(self.actor.parameters(), lr=0.01)
        self.total_it, self.freq = 0, 2

    def update(self, x):
        self.total_it += 1
        loss = self.critic(x).square().mean()
        self.critic_optimizer.zero_grad()
        loss.backward()
        self.critic_optimizer.step()
        if self.total_it % self.freq == 0:
            self.actor_optimizer.zero_grad()
            (-self.critic(self.actor(x)).mean()).backward()
            self.actor_optimizer.step()
        return loss.detach(), [p.detach().clone() for p in self.actor.parameters()]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_c09_each_kind_of_call_is_a_recording(device, optimizer):
    recorded = alongside(device, lambda device: Delayed(device, optimizer))
    stats = pg.stats(recorded)
    assert 2 <= stats.recorded <= 3, reasons(recorded)  # with gradients there, and with none
    assert stats.live <= 4, reasons(recorded)


def test_c09_a_counter_that_is_set_between_calls(device):
    def change(thing, n):
        if n == 7:
            thing.total_it = 100
        if n == 10:
            thing.freq = 3

    alongside(device, Delayed, 20, change)


class Summed:
    def __init__(self, device):
        self.n, self.total, self.last = 0, 0.0, 0.0
        self.shadow, self.p = torch.zeros(3, device=device), torch.ones(3, device=device)
        self.group, self.state = {"lr": 0.1, "lr_max": -1.0, "k": 0}, {self.p: {"step": 0, "m": torch.zeros(3, device=device)}}


class Ema(Summed):
    def update(self, x):
        self.n += 1
        decay = min(0.99, (1 + self.n) / (10 + self.n))
        self.total = self.total + decay
        self.shadow.lerp_(x.mean(0), 1 - decay)
        return self.shadow.clone()


class BiasCorrected(Summed):
    def update(self, x):
        state = self.state[self.p]
        state["step"] += 1
        state["m"].lerp_(x.mean(0), 0.1)
        self.p.add_(state["m"] / (1 - 0.9 ** state["step"]), alpha=-0.01)
        return self.p.clone()


class Cosine(Summed):
    def update(self, x):
        rate = self.group["lr"] * 0.5 * (1 + math.cos(math.pi * self.n / 100))
        self.n, self.last = self.n + 1, rate
        self.p.add_(x.mean(0), alpha=-rate)
        return self.p.clone()


class ScheduleFree(Summed):
    """With what is 0 at first, and stands below a fraction line."""

    def update(self, x):
        group = self.group
        k = group["k"]
        rate = group["lr"] * ((k + 1) / 4 if k < 4 else 1.0) * (k >= 3)
        group["lr_max"] = most = max(rate, group["lr_max"])
        weight = (k + 1) ** 0.5 * most**2
        self.total = self.total + weight
        try:
            fraction = weight / self.total
        except ZeroDivisionError:
            fraction = 0
        self.shadow.lerp_(self.p, fraction)
        self.p.add_(x.mean(0), alpha=-rate)
        group["k"] = k + 1
        return self.shadow.clone()


class Wrapped(Summed):
    def update(self, x):
        self.n = 0 if self.n >= 3 else self.n + 1
        return x * 2 if self.n else x * 3


@pytest.mark.parametrize("kind", [Ema, BiasCorrected, Cosine])
def test_c09_numbers_that_are_worked_out_of_a_counter_are_followed(device, kind):
    assert counts(alongside(device, kind)) == (1, 1, 13)


@pytest.mark.parametrize("kind", [ScheduleFree, Wrapped])
def test_c09_decisions_by_a_counter(device, kind):
    recorded = alongside(device, kind, 24)
    stats = pg.stats(recorded)
    assert stats.recorded <= 5, reasons(recorded)
    assert stats.replayed >= 14, reasons(recorded)


class Handing(Summed):
    """Hands on what it counts and works out."""

    def __init__(self, device):
        super().__init__(device)
        self.seen = []

    def update(self, x):
        self.n += 1
        self.total = self.total * 0.9 + 0.1
        self.seen.append(self.n)
        return {"x": x * self.total, "n": self.n, "half": self.n / 2, "total": [self.total, (self.n * 2, "twice")]}


def test_c04_numbers_that_are_returned_are_those_of_the_call(device):
    recorded = alongside(device, Handing)
    assert counts(recorded) == (1, 1, 13), reasons(recorded)


class Adam(torch.optim.Optimizer):
    """Of the user's: it counts in its state, and in its groups."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01, "k": 0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"], state["v"] = 0, torch.zeros_like(p)
                state["step"] += 1
                state["v"].lerp_(p.grad.square(), 0.1)
                p.addcdiv_(p.grad, (state["v"] / (1 - 0.9 ** state["step"])).sqrt().add_(1e-8), value=-group["lr"])
            group["k"] += 1
            if group["k"] % 5 == 0:
                group["lr"] = group["lr"] * 0.5


def test_c09_an_optimizer_that_counts_in_its_state(device):
    class Trained:
        def __init__(self, device):
            self.model = nn.Linear(3, 2).to(device)
            self.optimizer = Adam(self.model.parameters())

        def update(self, x):
            loss = self.model(x).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            return loss.detach(), [p.detach().clone() for p in self.model.parameters()]

        @property
        def said(self):
            return [[s["step"] for s in self.optimizer.state.values()], [g["k"] for g in self.optimizer.param_groups]]

    recorded = alongside(device, Trained, 22)
    assert pg.stats(recorded).recorded <= 4, reasons(recorded)  # with gradients there or not, of two kinds
    assert pg.stats(recorded).replayed >= 16, reasons(recorded)
    assert recorded.__wrapped__.__self__.said == [[22, 22], [22]]


def _matched(x, s):
    match s.n % 3:
        case 0:
            return x * 2
        case _:
            return x


def _appended(x, s):
    s.seen.append(s.n)
    return x


def _copied(x, s):
    s.other = s.n * 2
    return x


def _raising(x, s):
    try:
        return x * (1 / (s.n % 3))
    except ZeroDivisionError:
        return x


OTHERWISE = {
    "index": lambda x, s: x[s.n % 3] * 2,
    "slice": lambda x, s: x[: s.n % 3 + 1].sum(0),
    "range": lambda x, s: sum((x * i for i in range(s.n % 3)), x),
    "size": lambda x, s: torch.full((3,), s.n, device=x.device) + x,
    "of an operator": lambda x, s: x * s.n + s.n * x,
    "written": lambda x, s: x.clone().fill_(s.n),
    "list": lambda x, s: x * [1.0, 2.0, 3.0][s.n % 3],
    "item": lambda x, s: x * {0: 1.0, 1: 2.0, 2: 3.0}[s.n % 3],
    "repeated": lambda x, s: x * len("a" * (s.n % 3)),
    "float": lambda x, s: x * float(s.n),
    "int": lambda x, s: x * int(s.n / 2),
    "round": lambda x, s: x * round(s.n / 3),
    "floor": lambda x, s: x * math.floor(s.n / 3),
    "gcd": lambda x, s: x * math.gcd(s.n, 4),
    "sqrt": lambda x, s: x * math.sqrt(s.n),
    "format": lambda x, s: x * len(f"{s.n:b}"),
    "percent": lambda x, s: x * len("%d" % s.n),  # noqa: UP031
    "json": lambda x, s: x * len(json.dumps([s.n])),
    "numpy": lambda x, s: x * float(np.sqrt(np.float64(2.0) * s.n)),
    "array": lambda x, s: x * float(np.array([s.n, 1]).sum()),
    "bits": lambda x, s: x * s.n.bit_length(),
    "divmod": lambda x, s: x * (divmod(s.n, 3)[1] == 1),
    "power": lambda x, s: x * 0.5**s.n,
    "negative power": lambda x, s: x * (s.n + 1) ** -1,
    "shifted": lambda x, s: x * 2 if s.n & 1 else x * (s.n >> 1 == 2),
    "compared": lambda x, s: x if 3 < s.n <= 5 or s.n == 8 else x * 2,
    "in": lambda x, s: x * 2 if s.n in (3, 4, 9) else x,
    "in a set": lambda x, s: x * 2 if s.n in {3, 4, 9} else x,
    "none": lambda x, s: x if s.n is None or s.n == None else x * 2,  # noqa: E711
    "text": lambda x, s: x if s.n == "a" else x * 2,
    "class": lambda x, s: x * 2 if isinstance(s.n, int) and not isinstance(s.n, bool) else x,
    "exact class": lambda x, s: x * 2 if type(s.n) is int else x,
    "largest": lambda x, s: x * max(s.n, 4) / min(s.n, 7),
    "sorted": lambda x, s: x * sorted([s.n, 3, 7])[1],
    "returned": lambda x, s: (x, s.n),
    "returned twice": lambda x, s: (x, {"step": s.n, "half": s.n / 2}),
    "mapped": lambda x, s: x * sum(map(lambda i: i + 1, [s.n])),  # noqa: C417
    "matched": _matched,
    "appended": _appended,
    "copied": _copied,
    "raising": _raising,
}


@may_run_live
@pytest.mark.parametrize("how", OTHERWISE.values(), ids=list(OTHERWISE))
def test_c09_whatever_is_done_with_a_counter_is_right(device, how):
    class Counting:
        def __init__(self, device):
            self.n, self.other, self.seen = 1, 0, []

        def update(self, x):
            self.n += 1
            return how(x, self)

    alongside(device, Counting, 12)


_library = {"inspect": inspect, "sys": sys, "__name__": "counting"}
exec(compile("""
class Own:
    def __init__(self):
        self.spec_of_this = 2.0

    def found(self, name):
        return getattr(self, "spec_of_{}".format(name))

def as_given(data):
    return type(data)(x * 1.0 for x in data) if isinstance(data, (tuple, list)) else data * 1.0

def accepts(f, name):
    return name in inspect.signature(f).parameters

def exactly(n):
    return 2.0 if type(n) is int else 3.0

def exactly_elsewhere(n):
    return sys.modules["counting_" + "within"].exactly(n)

def read(thing, name):
    return exactly(getattr(thing, name))

def filled(text, thing):
    return len(text.format(thing)) * exactly(1)

def looked_up(thing, *names):
    return [getattr(thing, name + "") for name in names]

def handed_on(n):
    return exactly(n.n)
""", "/usr/lib/site-packages/counting.py", "exec"), _library)  # fmt: skip


class Accumulating(Summed):
    """As accelerate does it, whose code asks of which class what it is given is, and what a function takes."""

    def update(self, x):
        self.n += 1
        (y,) = _library["as_given"]((x * 2,))
        scale = _library["Own"]().found("this") if _library["accepts"](self.update, "x") else 1.0
        if self.n % self.group["every"] == 0:
            self.shadow.add_(y.mean(0))
        return self.shadow * scale

    def __init__(self, device):
        super().__init__(device)
        self.group["every"] = 2


def test_c09_code_asks_for_classes_that_does_not_get_the_counter(device):
    recorded = alongside(device, Accumulating)
    assert counts(recorded) == (2, 2, 12), pg.explain(recorded)


class LookedAround(Accumulating):
    """As accelerate does it where something is imported meanwhile, and a finder reads attributes by names that it works out."""

    def update(self, x):
        _library["looked_up"](_library["Own"](), "spec_of_this")
        _library["handed_on"](types.SimpleNamespace(n=3))
        return super().update(x)


def test_c09_code_reads_by_names_worked_out_and_of_others_what_is_called_so(device):
    recorded = alongside(device, LookedAround)
    assert counts(recorded) == (2, 2, 12), pg.explain(recorded)


def _passed_on(x, s):
    n = s.n
    return x * _library["exactly"](n)


def _kept_elsewhere(x, s):
    s.last_n = s.n + 1
    return x * _library["exactly"](s.last_n)


_the_n = operator.attrgetter("n")
# Ways by which such code does get it.
GIVEN = {
    "the counter": lambda x, s: x * _library["exactly"](s.n),
    "worked out": lambda x, s: x * _library["exactly"](s.n % 2 + 1),
    "a variable": _passed_on,
    "kept elsewhere": _kept_elsewhere,
    "one of two": lambda x, s: x * _library["exactly"](s.n if x.ndim else 0),
    "this or that": lambda x, s: x * _library["exactly"](s.n or 0),
    "by name": lambda x, s: x * _library["read"](s, "n"),
    "by a name worked out": lambda x, s: x * _library["read"](s, "nn"[:1]),
    "by both": lambda x, s: x * (s.n > 0) * _library["exactly"](getattr(s, "nn"[:1])),
    "by C": lambda x, s: x * _library["exactly"](_the_n(s)),
    "all attributes": lambda x, s: x * _library["exactly"](vars(s)["nn"[:1]]),
    "in a list": lambda x, s: x * sum(map(_library["exactly"], [s.n])),
    "a text": lambda x, s: x * _library["filled"]("{0.n}", s),
    "another name": lambda x, s: x * _library["exactly"](s.alias),
}


class Given(Summed):
    how = None

    @property
    def alias(self):
        return self.n

    def update(self, x):
        self.n += 1
        return self.how(x, self) * (2 if self.n % 2 else 1)


class Noticing:
    @property
    def n(self):
        return self.seen

    @n.setter
    def n(self, value):
        self.seen = value if type(value) is int else -value


def _set_elsewhere(x, s):
    other = Noticing()
    other.n = s.n
    return x * (2.0 if other.seen > 0 else 3.0)


GIVEN["set of another object"] = _set_elsewhere


class Setting(Summed):
    """Looks at what it is given to keep."""

    def __setattr__(self, name, value):
        super().__setattr__(name, value if name != "n" or type(value) is int else -value)

    def update(self, x):
        self.n += 1
        return x * (2 if self.n > 0 else 1)


@may_run_live
@pytest.mark.parametrize("asks", ["exactly", "exactly_elsewhere"])
@pytest.mark.parametrize("how", GIVEN.values(), ids=list(GIVEN))
def test_c09_code_asks_for_the_class_of_a_counter(device, how, asks, monkeypatch):
    within = types.ModuleType("counting_within")
    exec(
        compile("def exactly(n): return 2.0 if type(n) is int else 3.0", "/usr/lib/site-packages/within.py", "exec"),
        vars(within),
    )
    monkeypatch.setitem(sys.modules, within.__name__, within)
    monkeypatch.setitem(_library, "exactly", _library[asks])
    alongside(device, type("Given", (Given,), {"how": staticmethod(how)}))


@may_run_live
def test_c09_code_asks_for_the_class_of_a_counter_where_it_is_set(device):
    alongside(device, Setting)


@may_run_live
def test_c09_a_counter_beyond_what_a_float_can_hold(device):
    class Large(Wrapped):
        def update(self, x):
            self.n += 1
            return x * 2 if self.n % 2 else x

    alongside(device, Large, 12, lambda thing, n: setattr(thing, "n", 2**53 - 4) if n == 3 else None)


@may_run_live
def test_c09_others_that_rely_on_the_counter_notice(device):
    thing = Delayed(device)
    update, ask = pg.record(thing.update), pg.record(lambda x: x * thing.total_it)
    x = ramp(device, 4, 3)
    for _ in range(12):
        update(x)
        assert_same(ask(x), x * thing.total_it)


@may_run_live
def test_c10_verified(device):
    recorded = alongside(device, Delayed, 12, verify=2)
    assert "verify" in reasons(recorded)


def test_c13_an_exception_by_the_count(device):
    class Ends(Summed):
        def update(self, x):
            self.n += 1
            if self.n > 5:
                raise StopIteration(self.n)
            return x * 2 if self.n % 2 else x

    thing = Ends(device)
    recorded = pg.record(thing.update)
    for n in range(1, 6):
        assert_same(recorded(ramp(device, 3)), ramp(device, 3) * (2 if n % 2 else 1))
    for n in (6, 7):
        with pytest.raises(StopIteration, match=str(n)):
            recorded(ramp(device, 3))
    assert thing.n == 7


def test_c13_an_exception_of_what_is_left(device):
    """Which comes before anything is played: what stands before it in the call has happened then, and nothing else."""

    class Divides(Summed):
        def update(self, x):
            self.n += 1
            self.total = 1 / (self.last - 3) + 8 // (self.n - 7)
            return x * 2

    both = Divides(device), Divides(device)
    functions = pg.record(both[0].update), both[1].update
    for n in range(10):
        for thing, f in zip(both, functions, strict=True):
            thing.last = 3.0 if n == 4 else 0.5 * n
            if n in (4, 6):
                with pytest.raises(ZeroDivisionError):
                    f(ramp(device, 3))
            else:
                assert_same(f(ramp(device, 3)), ramp(device, 3) * 2)
        assert numbers_of(both[0]) == numbers_of(both[1])


@may_run_live
def test_c12_a_capture_that_comes_to_nothing_leaves_the_numbers(device):
    class Reads(Summed):
        def update(self, x):
            self.n += 1
            self.total = self.total + 0.5 * self.n
            return x * 2 if x.sum().item() > 0 and self.n % 2 else x

    recorded = alongside(device, Reads, fallback="live")
    assert ".item()" in reasons(recorded)


class Switched(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
        self.said = None

    def forward(self, x):
        return self.layers(x)


def trained_and_tested(device, record):
    """Functions that call `train()` and `eval()` themselves, in turn, several times, and one of both."""
    torch.manual_seed(0)
    model = Switched().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x):
        model.train()
        model.said = "trained"
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def test(x):
        model.eval()
        seen, model.said = model.said, None
        return model(x) * (2 if seen == "trained" else 3)

    functions = [train, test, lambda x: (train(x), test(x))]
    functions = [pg.record(f) for f in functions] if record else functions
    found = []
    for n in range(30):
        x = (ramp(device, 4, 3, start=n) * 0.1).sin()
        for f in [functions[:2], [functions[0], *functions], functions[2:], functions[1:]][n // 8]:
            found.append([f(x), model.training, model.layers[2].training, model.said])
    return functions, found


def test_c09_modes_that_the_call_sets_itself(device):
    functions, found = trained_and_tested(device, True)
    _, expected = trained_and_tested(device, False)
    assert_same(found, expected)
    for f in functions:
        stats = pg.stats(f)
        assert stats.recorded <= 4, pg.explain(f)
        assert stats.live <= 4, pg.explain(f)


def test_c09_a_mode_that_others_set_between_calls(device):
    both = []
    for record in (False, True):
        torch.manual_seed(0)
        model = Switched().to(device)

        def f(x, model=model):
            was = model.training
            model.eval()
            with torch.no_grad():
                return model(x) * (2 if was else 3)

        f = pg.record(f) if record else f
        found = []
        for n in range(16):
            if n % 3:
                model.train(n % 3 == 1)
            found.append([f(ramp(device, 4, 3, start=n)), model.training])
        both.append(found)
    assert_same(*both)
    assert pg.stats(f).replayed >= 10, reasons(f)


@may_run_live
def test_c10_settings_verified(device):
    recorded = alongside(device, Named, 10, lambda thing, n: setattr(thing, "last", "b"), verify=2)
    assert "verify" in reasons(recorded)


class Named(Summed):
    def update(self, x):
        self.last = "a"
        return x * 2


class OfIntegers(Summed):
    """A float that is worked with integers makes floats of them, a whole number or a truth does not."""

    def update(self, x):
        return (x * 10).long() * self.last


@pytest.mark.parametrize("other", [2, True])
def test_c09_a_float_that_becomes_a_number_of_another_kind(device, other):
    def change(thing, n):
        thing.last = other if n in (8, 11) else 0.5 + n / 10

    alongside(device, OfIntegers, 16, change)


class Alternating(Summed):
    def update(self, x):
        self.n += 1
        return x * 2 if self.n % 2 else x * (0.5 ** min(self.n, 3))


@pytest.mark.parametrize("large", [2**53, 10**400], ids=["2**53", "10**400"])
def test_c09_a_counter_that_no_float_can_be(device, large):
    """Also where each call finds the same one."""

    def change(thing, n):
        thing.n = {7: large, 8: large + 1, 9: large * 2}.get(n, large * 3 if n > 10 else thing.n)

    alongside(device, Alternating, 18, change)


class Leaving(Summed):
    """Other things are at its place in between."""

    def update(self, x):
        self.n += 1
        return x * 2 if self.n % 2 else x * 3


@may_run_live
@pytest.mark.parametrize("other", [3.0, True, 2.5])
def test_c09_a_counter_that_is_set_to_a_number_of_another_kind(device, other):
    alongside(device, Leaving, 16, lambda thing, n: setattr(thing, "n", other if n in (7, 12) else thing.n))


class Now:
    """State that gives way to new tensors in each `every`-th call only, as preconditioners do."""

    def __init__(self, device, every, keeps):
        self.net, self.n, self.every = nn.Linear(3, 2).to(device), 0, every
        self.scale = torch.ones(2, 3, device=device)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.state = self.optimizer.state if keeps == "optimizer" else {}
        self.state[self.net.weight] = {"scale": self.scale}

    def update(self, x):
        self.n += 1
        state = self.state[self.net.weight]
        loss = (x @ (self.net.weight * state["scale"]).mT).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if self.n % self.every == 0:
            state["scale"] = state["scale"] * 0.9 + self.net.weight.detach() * 0.1
        return loss.detach()


@pytest.mark.parametrize("keeps", ["optimizer", "dictionary"])
@pytest.mark.parametrize("every", [2, 3, 10])
def test_c09_c15_state_that_is_replaced_every_so_many_calls_settles(device, every, keeps):
    recorded = alongside(device, lambda device: Now(device, every, keeps), 4 * every + 4, keep="always")
    stats = pg.stats(recorded)
    assert (stats.recorded, stats.live) <= (5, 4), reasons(recorded)


def test_c09_each_way_of_a_decision_runs_live_before_it_is_captured(device):
    """Also where others have run so before: its code may begin something that no capture may."""
    ran = []

    class Seldom:
        def __init__(self):
            self.n, self.weight = 0, torch.ones(3, device=device)

        def update(self, x):
            self.n += 1
            if self.n % 3 == 0:
                x = x * 2
                if self.n % 9 == 0:
                    x = x * 3
            return x * self.weight

    thing = Seldom()
    recorded = pg.record(thing.update, keep="always")
    for n in range(1, 40):
        x, live = ramp(device, 3, start=n), pg.stats(recorded).live
        expected = x * (6 if n % 9 == 0 else 2 if n % 3 == 0 else 1)
        assert torch.equal(recorded(x), expected)
        ran += [n] if pg.stats(recorded).live > live else []
        if n % 5 == 0:
            thing.weight = torch.ones(3, device=device)
    assert {3, 9} <= {*ran}, reasons(recorded)
    assert not {18, 27, 36} & {*ran}, reasons(recorded)


@may_run_live
@pytest.mark.parametrize("settled", [0, 20])
def test_c09_c15_a_tensor_that_is_ever_new_beside_a_decision_is_not_recorded_for_ever(device, settled):
    class Replaced(Summed):
        def update(self, x):
            self.n += 1
            return (x + self.kept) * (2 if self.n % 2 == 0 else 1)

    thing = Replaced(device)
    thing.kept = torch.zeros(3, device=device)
    recorded = pg.record(thing.update, keep="always")
    for n in range(1, 100):
        if n > settled:
            thing.kept = torch.full((3,), float(n), device=device)
        x = ramp(device, 3)
        assert torch.equal(recorded(x), (x + thing.kept) * (2 - n % 2))
    assert pg.stats(recorded).recorded <= 30, reasons(recorded)


@dataclasses.dataclass
class Scale:
    by: float


class AsksForDataclasses:
    """As what goes through its arguments does, `fully_shard` for one."""

    def __init__(self, device, of_the_count):
        self.n, self.scale, self.of_the_count = 0, Scale(2.0), of_the_count

    def update(self, x):
        self.n += 1
        if dataclasses.is_dataclass(self.n if self.of_the_count else x) or self.scale == Scale(3.0):
            return x
        return x * self.scale.by


@pytest.mark.skipif(not hasattr(inspect.currentframe().f_code, "co_qualname"), reason="code does not tell who has written it")
@pytest.mark.parametrize("of_the_count", [False, True])
def test_c09_a_count_is_followed_where_something_asks_for_dataclasses(device, of_the_count):
    recorded = alongside(device, lambda device: AsksForDataclasses(device, of_the_count), keep="always")
    assert counts(recorded) == (1, 1, 13), reasons(recorded)


class CountsInState(torch.optim.SGD):
    """Keeps a number in its state beside what it keeps of each parameter."""

    def step(self, closure=None):
        self.state["steps"] = self.state.get("steps", 0) + 1
        if self.state["steps"] % 4:
            super().step(closure)


def test_c09_a_number_among_the_states_of_parameters(device):
    def made():
        torch.manual_seed(0)
        net = nn.Linear(3, 2).to(device)
        return net, CountsInState(net.parameters(), lr=0.1, momentum=0.9)

    def step(net, optimizer, x):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    ours, theirs = made(), made()
    recorded = pg.record(lambda x: step(*ours, x))
    for n in range(16):
        x = ramp(device, 4, 3, start=n).sin()
        assert_same(recorded(x), step(*theirs, x))
        assert ours[1].state["steps"] == theirs[1].state["steps"]
    assert pg.stats(recorded).replayed >= 12, reasons(recorded)


class Looks:
    """Asks whether its count is in a set, a dictionary, or a constant."""

    def __init__(self, device):
        self.n, self.at, self.rates = 0, {9, 12}, {5: 0.5, 11: 0.25}

    def update(self, x):
        self.n += 1
        if self.n in self.at:
            x = x * 2
        if self.n not in self.rates:
            return x + (self.n in {3, 7})
        return x * self.rates[self.n]


def test_c09_a_count_that_is_looked_for_in_a_set(device):
    """The decision is whether it is there: the calls for which it is not are of one kind."""
    recorded = alongside(device, Looks, calls=30, keep="always")
    assert pg.stats(recorded).replayed >= 24, reasons(recorded)
    assert pg.stats(recorded).recorded <= 7, reasons(recorded)


def test_c09_a_set_that_changes_in_which_a_count_is_looked_for(device):
    recorded = alongside(device, Looks, calls=30, change=lambda thing, n: n == 20 and thing.at.add(24), keep="always")
    assert pg.stats(recorded).replayed >= 20, reasons(recorded)


def _of_integers(way, kind):
    def divided(x, s):
        whole = (x * 7).to(kind)
        return way(whole, s.n), way(whole.sum(dtype=kind), s.n), way(whole > 0, s.n)

    return divided


DIVISIONS = {
    "divided": lambda t, n: t / n,
    "by name": lambda t, n: t.div(n) + torch.div(t, n),
    "by ours": lambda t, n: n / (t + 3),
}


@pytest.mark.parametrize("start", [1, 2**24 + 1, -(2**31) - 3], ids=["small", "more than a float has", "negative"])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.uint8], ids=str)
@pytest.mark.parametrize("way", DIVISIONS.values(), ids=DIVISIONS)
def test_c01_c07_integers_divided_by_a_number_that_is_counted(device, way, kind, start):
    """A count of what was right, by how many were seen: there are floating-point numbers before anything is divided."""

    class Seen:
        n = start

    def run(record):
        s = Seen()
        s.n = start

        def step(x):
            s.n += 5
            return _of_integers(way, kind)(x, s)

        step = record(step)
        return [step(torch.arange(4.0, device=device) + i) for i in range(20)], step

    found, step = run(lambda f: pg.record(f, keep="always"))
    expected, _ = run(lambda f: f)
    assert_same(found, expected)
    assert pg.stats(step).recorded == 1, pg.explain(step)


@may_run_live
def test_c01_c07_integers_multiplied_by_a_number_that_is_counted(device):
    class Seen:
        n = 0

    def run(record):
        s = Seen()

        def step(x):
            s.n += 5
            return x.long() * s.n, torch.div(x.long(), s.n, rounding_mode="floor")

        step = record(step)
        return [step(torch.arange(4.0, device=device) + i) for i in range(20)]

    assert_same(run(lambda f: pg.record(f, keep="always")), run(lambda f: f))


COUNTING_ALL = """
class CountingAll:
    total = 0
    def __init__(self): self.n = 0
    def update(self, x):
        CountingAll.total += 1
        self.n += 1
        return x * float(self.n)
"""


def test_c09_a_counter_of_a_class_is_followed(device, monkeypatch):
    """Beside one that is given to `float`: who looks for what asks for that class meets what stands for the counter."""
    module = types.ModuleType("counting_all")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(COUNTING_ALL, vars(module))
    kind = module.CountingAll
    step = pg.record(kind().update, keep="always")
    for n in range(10):
        assert_same(step(ramp(device, 3, start=n)), ramp(device, 3, start=n) * float(n + 1))
        assert kind.total == n + 1
        assert type(kind.total) is int
    assert counts(step) == (1, 1, 9), pg.explain(step)
