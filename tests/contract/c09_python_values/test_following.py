"""C9: numbers that change from call to call are followed wherever they are read: coefficients, temperatures, learning rates of
optimizers of the user's. What cannot be followed makes a new recording, or runs live; nothing is ever stale."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.shared.following import CALLS, NOT_FOLLOWED, assert_followed
from tests.helpers import may_run_live, ramp


def alongside(device, make, numbers, calls=CALLS):
    """A made (function, state, tensors), recorded beside the same live; `numbers(state, n)` sets what the n-th call reads."""
    torch.manual_seed(0)
    f, ours, mine = make(device)
    torch.manual_seed(0)
    plain, theirs, others = make(device)
    recorded = pg.record(f)
    for n in range(calls):
        for state in (ours, theirs):
            numbers(state, n)
        torch.manual_seed(n)
        x = torch.randn(4, 8, device=device)
        torch.manual_seed(n)
        a = recorded(x)
        torch.manual_seed(n)
        b = plain(x)
        assert_same([a, *mine], [b, *others], f"call {n}")
    return recorded


def momentum(optimizer, p, first=None):
    state = optimizer.state[p]
    if "m" not in state:
        state["m"] = torch.zeros_like(p) if first is None else first.clone()
    return state["m"]


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in filter(lambda p: p.grad is not None, group["params"]):
                m = momentum(self, p)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                b1, b2 = group["betas"]
                p.add_(m.mul(b1).add_(p.grad, alpha=1 - b1).sign_(), alpha=-group["lr"])
                m.mul_(b2).add_(p.grad, alpha=1 - b2)


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95, wd=0.01):
        super().__init__(params, {"lr": lr, "momentum": momentum, "wd": wd})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                m = momentum(self, p)
                m.lerp_(p.grad, 1 - group["momentum"])
                g = p.grad.lerp(m, group["momentum"])
                if g.ndim == 2:
                    g = g / (g.norm() + 1e-7)
                    for _ in range(3):
                        a = g @ g.T
                        g = 3.4445 * g + (-4.775 * a + 2.0315 * a @ a) @ g
                p.mul_(1 - group["lr"] * group["wd"])
                p.add_(g, alpha=-group["lr"] * max(1, p.size(0) / p.size(-1)) ** 0.5)


class Lars(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, momentum=0.9, weight_decay=1e-4, trust=0.001):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})

    @torch.no_grad()
    def step(self):
        for g in self.param_groups:
            for p in g["params"]:
                d = p.grad.add(p, alpha=g["weight_decay"])
                norm, update = p.norm(), d.norm()
                one = torch.ones_like(norm)
                q = torch.where(norm > 0, torch.where(update > 0, g["trust"] * norm / update, one), one)
                m = momentum(self, p)
                m.mul_(g["momentum"]).add_(d.mul(q))
                p.add_(m, alpha=-g["lr"])


class ScheduleFree(torch.optim.Optimizer):
    """The weight of an average is worked out outside, as the rate is."""

    def __init__(self, params, lr=0.1, beta=0.9, ckp1=1.0):
        super().__init__(params, {"lr": lr, "beta": beta, "ckp1": ckp1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params = group["params"]
            z = [momentum(self, p, p) for p in params]
            grads = [p.grad for p in params]
            torch._foreach_lerp_(params, z, weight=group["ckp1"])
            torch._foreach_add_(params, grads, alpha=group["lr"] * (group["beta"] * (1 - group["ckp1"]) - 1))
            torch._foreach_sub_(z, grads, alpha=group["lr"])


class ByHand:
    """No optimizer of torch's at all."""

    def __init__(self, params, lr=0.1):
        self.params, self.lr, self.param_groups = [*params], lr, [{"lr": lr}]

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def step(self):
        for p in self.params:
            p -= self.param_groups[0]["lr"] * p.grad


def training(kind):
    def make(device):
        net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(device)
        optimizer = kind(net.parameters())

        def step(x):
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, optimizer, [*net.parameters()]

    return make


@pytest.mark.parametrize("kind", [Lion, Muon, Lars, ScheduleFree, ByHand], ids=lambda kind: kind.__name__)
def test_c09_the_rate_of_an_optimizer_of_ones_own(device, kind):
    """A cosine, worked out in the loop and set in its groups."""

    def cosine(optimizer, n):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * 0.5 * (1 + math.cos(math.pi * n / CALLS))
            if "ckp1" in group:
                group["ckp1"] = 1 / (n + 1)

    assert_followed(alongside(device, training(kind), cosine))


def test_c09_a_scheduler_of_torchs_and_an_optimizer_of_ones_own(device):
    def make(device):
        step, optimizer, tensors = training(Lion)(device)
        return step, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, CALLS), tensors

    def after(scheduler, n):
        if n:
            scheduler.step()

    assert_followed(alongside(device, make, after))


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder, self.beta = nn.Linear(8, 6), nn.Linear(3, 8), 0.0

    def loss(self, x):
        mean, log = self.encoder(x).chunk(2, -1)
        h = mean + torch.randn_like(mean) * (0.5 * log).exp()
        kl = -0.5 * (1 + log - mean.square() - log.exp()).sum(-1).mean()
        return F.mse_loss(self.decoder(h), x) + self.beta * kl


def vae(device):
    net = Vae().to(device)
    optimizer = torch.optim.Adam(net.parameters())

    def step(x):
        optimizer.zero_grad()
        loss = net.loss(x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, net, [*net.parameters()]


def test_c09_a_coefficient_that_is_annealed(device):
    """It begins at 0 and stays at 1; both are numbers like others."""
    assert_followed(alongside(device, vae, lambda net, n: setattr(net, "beta", min(1.0, n / 20))))


def reading(function, **first):
    """A function of a tensor and of what it reads."""

    def make(device):
        state = SimpleNamespace(**first)
        weight = torch.linspace(-1, 1, 8, device=device).requires_grad_()

        def f(x):
            return function(x, weight, state)

        return f, state, [weight]

    return make


def distilled(x, w, s):
    student, teacher = x * w, x.flip(0)
    loss = F.kl_div(F.log_softmax(student / s.t, -1), F.softmax(teacher / s.t, -1), reduction="batchmean") * (s.t * s.t)
    (gradient,) = torch.autograd.grad(loss, w)
    return loss.detach(), gradient


def averaged(x, w, s):
    with torch.no_grad():
        w.lerp_(x.mean(0), 1 - s.t)
        return w.clone()


def explored(x, w, s):
    random = torch.rand(4, device=x.device) < s.t
    return torch.where(random, x.sum(-1), (x * w.detach()).sum(-1)) + s.t**2


READ = {
    "a temperature": distilled,
    "the decay of an average": averaged,
    "an epsilon": explored,
    "arithmetic": lambda x, w, s: (x * (1 - s.t) + s.t / 3 - abs(-s.t)) / (2 - s.t),
    "from the right": lambda x, w, s: 1 - s.t * x + s.t / (x * x + 1) - (s.t - x),
    "math": lambda x, w, s: x * math.cos(math.pi * s.t / 2) + math.sqrt(s.t) + math.exp(-s.t) * math.pow(s.t, 3),
    "clamp": lambda x, w, s: x.clamp(-s.t, s.t).clamp_(max=s.t * 0.5) + x.clamp_min(s.t),
    "full": lambda x, w, s: x + torch.full((), s.t, device=x.device) + torch.full_like(x, s.t).fill_(s.t),
    "bf16": lambda x, w, s: x.bfloat16() * s.t + x.bfloat16().add(x.bfloat16(), alpha=s.t),
    "fp64": lambda x, w, s: (x.double() * s.t / (s.t + 1)).addcmul(x.double(), x.double(), value=s.t),
    "fused": lambda x, w, s: torch.addcmul(x, x, x, value=s.t).addcdiv_(x, x.abs() + 1, value=-s.t),
    "lists": lambda x, w, s: torch._foreach_mul(torch._foreach_add([x, x + 1], [s.t, 1.0]), s.t),
    "masks": lambda x, w, s: x.masked_fill(x > s.t, s.t) + (x <= -s.t) + (x * s.t >= 0.1),
    "a power": lambda x, w, s: x.abs() ** s.t,
    "twice": lambda x, w, s: (x * s.t) * s.t + 0.25 * s.t + 0.25,
}


@pytest.mark.parametrize("how", READ)
def test_c09_a_number_is_read(device, how):
    """0.25 and others occur in the function as well, and are not taken for it."""
    recorded = alongside(device, reading(READ[how], t=0.25), lambda s, n: setattr(s, "t", 0.25 + n / 64 + 1e-3 * (n % 3)))
    assert_followed(recorded)


@pytest.mark.parametrize("values", [
    (0.0, 0.0, 0.0, 0.5, 0.0, 1.0, -0.0, 2.0), (1.0, 1.0, 1.0, 0.5, 1.0, 2.0), (-1.0, 0.5, -0.5, 1.0),
    (0.5, math.inf, -math.inf, 0.25),
    (1e-45, 1e-40, 1e38, -1e38, 3.4e38, 5e-324), (0.5, math.nan, 0.25, math.nan), (0.1, 0.2, 0.30000000000000004, 1 / 3),
], ids=str)  # fmt: skip
def test_c09_any_number_is_as_good(device, values):
    def f(x, w, s):
        return x * s.t, x / s.t, x - s.t, x.add(x, alpha=s.t), x.clamp(max=s.t), x.addcmul(x, x, value=s.t), x.double() * s.t

    alongside(device, reading(f, t=0.0), lambda s, n: setattr(s, "t", values[n % len(values)]), 24)


@may_run_live
@pytest.mark.parametrize("how", NOT_FOLLOWED)
def test_c09_what_a_number_becomes_is_never_stale(device, how):
    function = NOT_FOLLOWED[how]
    make = reading(function, t=0.25, cos=math.cos)
    alongside(device, make, lambda s, n: setattr(s, "t", (0.25, 0.25, 0.25, 0.3125, 0.75, 0.5, 0.3125)[n % 7]), 24)


def test_c09_a_branch_that_is_taken_otherwise_has_a_recording(device):
    """One for each way, and in each the number is followed."""
    function = NOT_FOLLOWED["a branch"]
    recorded = alongside(device, reading(function, t=0.01), lambda s, n: setattr(s, "t", (n + 1) / 60), 60)
    stats = pg.stats(recorded)
    assert stats.recorded <= 4
    assert stats.replayed >= 50


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alpha):
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -ctx.alpha * g, None


@may_run_live
@pytest.mark.parametrize("way", ["backward", "grad"])
def test_c09_a_number_that_a_backward_reads(device, way):
    def f(x, w, s):
        loss = (Reversal.apply(x * w, s.t) * s.t).sum()
        if way == "grad":
            return torch.autograd.grad(loss, w)
        w.grad = None
        loss.backward()
        return w.grad.clone()

    recorded = alongside(device, reading(f, t=0.25), lambda s, n: setattr(s, "t", 0.25 + n / 64))
    if way == "backward":
        assert_followed(recorded)


PLACES = {
    "an attribute": (lambda: SimpleNamespace(t=0.25), lambda s, v: setattr(s, "t", v), lambda s: s.t),
    "an item": (lambda: {"a": {"t": 0.25}}, lambda s, v: s["a"].update(t=v), lambda s: s["a"]["t"]),
    "of a list": (lambda: [1.0, 0.25], lambda s, v: s.__setitem__(1, v), lambda s: s[1]),
    "of a module": (lambda: Vae(), lambda s, v: setattr(s, "beta", v), lambda s: s.beta),
}


@pytest.mark.parametrize("place", PLACES)
def test_c09_wherever_it_lies(device, place):
    make, put, get = PLACES[place]

    def made(device):
        state = make()
        return lambda x: x * get(state) + 1, state, []

    assert_followed(alongside(device, made, lambda s, n: put(s, 0.25 + n / 64)))


def test_c09_a_variable_of_a_closure(device):
    def made(device):
        t = 0.25

        def f(x):
            return x * t + 1

        def put(value):
            nonlocal t
            t = value

        return f, put, []

    assert_followed(alongside(device, made, lambda put, n: put(0.25 + n / 64)))


def test_c09_the_function_finds_what_it_was_given(device):
    """After a capture there is a plain number in its place, also where the capture is taken back."""

    def f(x, w, s):
        return x * s.t * (s.t.hex() != "")

    make = reading(f, t=0.25)
    fn, state, _ = make(device)
    recorded = pg.record(fn)
    for n in range(6):
        state.t = 0.25 + n / 64
        recorded(torch.ones(4, 8, device=device))
        assert type(state.t) is float
        assert state.t == 0.25 + n / 64


def test_c09_what_the_function_sets_itself_is_followed_and_set_by_replays(device):
    def f(x, w, s):
        y = x * s.t
        s.t = 0.5
        return y * s.t

    assert_followed(alongside(device, reading(f, t=0.25), lambda s, n: setattr(s, "t", 0.25 + n / 64), 12), 12)


def test_c09_a_function_that_imports_from_math(device):
    def make(device):
        state = SimpleNamespace(t=0.25)
        return eval("lambda x: x * cos(s.t)", {"cos": math.cos, "s": state}), state, []

    alongside(device, make, lambda s, n: setattr(s, "t", 0.25 + n / 64), 12)
    assert math.cos.__module__ == "math"
    assert type(math.cos) is type(len)


# -- attributes of classes


def settings():
    class Settings:
        rate, steps, mode, on = 0.5, 0, "first", False

        def by_the_class(self, x):
            return x * Settings.rate

        def by_an_object(self, x):
            return x * self.rate

        def by_a_branch(self, x):
            return x * Settings.rate if Settings.rate < 0.56 else x * 2

        def decayed(self, x):
            Settings.rate = Settings.rate * 0.75
            return x * Settings.rate

        def on_the_object(self, x):
            self.rate += 0.25
            return x * self.rate

        def every_fifth(self, x):
            Settings.steps += 1
            return x * 2 if Settings.steps % 5 == 0 else x * 3

        def in_turn(self, x):
            Settings.on = not Settings.on
            return x * (2 if Settings.on else 3)

    return Settings


def values_of(program):
    names = ("rate", "steps", "mode", "on")
    return [{n: v for n, v in vars(x).items() if n in names} for x in (program, *type(program).__mro__[:-1])]


@pytest.mark.parametrize("derived", [False, True], ids=["", "derived"])
@pytest.mark.parametrize("read", ["by_the_class", "by_an_object", "by_a_branch"])
def test_c09_a_float_of_a_class_that_changes_from_call_to_call_is_followed(device, read, derived):
    kind = settings()
    program = (type("Derived", (kind,), {}) if derived else kind)()
    f = pg.record(getattr(program, read), warmup=1, keep="always")
    for n in range(24):
        kind.rate = 0.5 + n / 128
        assert_same(f(ramp(device, 3)), getattr(program, read)(ramp(device, 3)))
    assert pg.stats(f).recorded <= 3, pg.explain(f)
    assert pg.stats(f).replayed >= 20


@pytest.mark.parametrize("derived", [False, True], ids=["", "derived"])
@pytest.mark.parametrize("step", ["decayed", "on_the_object", "every_fifth", "in_turn"])
def test_c09_what_a_call_sets_on_its_class(device, step, derived):
    """A replay leaves there what the call would; what somebody sets between is what the next one begins with."""
    kinds = settings(), settings()
    ours, live = ((type("Derived", (kind,), {}) if derived else kind)() for kind in kinds)
    f = pg.record(getattr(ours, step), warmup=1, keep="always")
    for n in range(14):
        if n == 9:
            for kind in kinds:
                kind.rate, kind.steps = 4.0, 100
        assert_same(f(ramp(device, 3, start=n)), getattr(live, step)(ramp(device, 3, start=n)))
        assert values_of(ours) == values_of(live)
    assert pg.stats(f).replayed >= 9, pg.explain(f)


TURNS = {
    "a flag": lambda device, n: (torch.ones(2, device=device), n / 64, n % 2 == 0),
    "another size": lambda device, n: (torch.ones(2 + n % 3, device=device), n / 64, True),
    "many words": lambda device, n: (torch.ones(2, device=device), n / 64, "word" * (n % 8)),
}


@pytest.mark.parametrize("kinds", TURNS.values(), ids=TURNS)
def test_c09_a_number_that_is_another_in_each_call_beside_kinds_that_take_turns(device, kinds):
    def f(x, c, flag):
        return x * c if flag else x + c

    recorded = pg.record(f)
    for n in range(60):
        assert_same(recorded(*kinds(device, n)), f(*kinds(device, n)))
    stats = pg.stats(recorded)
    assert stats.live <= 20, pg.explain(recorded)
    assert stats.refusals == {}
