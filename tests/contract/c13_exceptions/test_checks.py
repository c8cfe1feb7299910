"""C13, C11: checks of values, which wait for the device only in order to raise: torch's own (`torch.distributions` looks at
what it is given), and on the CPU anybody's. A recording makes them too. On the CPU the exception is eager's, at that very call;
on a GPU it comes with the next call. Never is it left out; and afterwards the function goes on as before."""

import math
import os
import sysconfig

import pytest
import torch
from torch import distributions as D
from torch import nn
from torch.nn import functional as F

import phonograph as pg
from phonograph.capture import value_checks as checks
from phonograph.devices.cpu import tape
from phonograph.testing import assert_same
from tests.helpers import counts, may_run_live, ramp, reasons


@pytest.fixture(autouse=True)
def validating(monkeypatch):
    """As it is by default; `torch.compile` switches it off."""
    monkeypatch.setattr(D.Distribution, "_validate_args", True)


def raised(call, *args):
    """What this raises."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - compared with eager's
        call(*args)
    return caught.value


def squashed(x, v):
    policy = D.TransformedDistribution(D.Normal(x, x.exp()), [D.transforms.TanhTransform(cache_size=1)])
    return D.Independent(policy, 1).log_prob(v.tanh() / 2)


def gaussian(x, v):
    return D.MultivariateNormal(x, covariance_matrix=torch.diag(v.exp())).log_prob(x + 1)


PROGRAMS = {
    "a parameter": lambda x, v: D.Normal(x, 1.0).log_prob(v),
    "a positive parameter": lambda x, v: D.Normal(0.0, x + 1).log_prob(v),
    "probabilities": lambda x, v: D.Categorical(probs=x / x.sum()).entropy() + v.sum(),
    "logits": lambda x, v: D.Categorical(logits=x).log_prob(torch.zeros((), dtype=torch.long, device=x.device)),
    "several": lambda x, v: D.Beta(x.exp(), v.exp()).log_prob(torch.full_like(x, 0.25)),
    "independent, transformed": squashed,
    "a matrix": gaussian,
    "two tensors": lambda x, v: D.Uniform(x, x + v.exp()).log_prob(x + 0.1),
    "a divergence": lambda x, v: D.kl_divergence(D.Normal(x, v.exp()), D.Normal(0.0, 1.0)),
    "a loss": lambda x, v: F.gaussian_nll_loss(x, v, x.square() + 1) + D.Bernoulli(logits=x).entropy().sum(),
}


def of_nans(t):
    return torch.full_like(t, math.nan)


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_c13_distributions_are_recorded_with_their_checks(device, program):
    good = (ramp(device, 3) / 4, ramp(device, 3) / 5)
    f = pg.record(program)
    for _ in range(4):
        assert_same(f(*good), program(*good))
    assert counts(f) == (1, 1, 3), reasons(f)
    bad = (of_nans(good[0]), good[1])
    theirs = raised(program, *bad)
    if device.type == "cuda":
        f(*bad)
        torch.cuda.synchronize(device)
    ours = raised(f, *(bad if device.type == "cpu" else good))
    assert type(ours) is type(theirs)
    if device.type == "cpu":
        assert str(ours) == str(theirs)
    for _ in range(3):
        assert_same(f(*good), program(*good))
    assert counts(f)[:2] == (1, 1), reasons(f)


def test_c13_a_matrix_that_has_no_root(device):
    """A distribution takes it apart, by an operator that raises."""

    def f(x):
        return D.MultivariateNormal(torch.zeros_like(x[0]), x @ x.T - 2, validate_args=False).log_prob(x[1])

    good, bad = torch.eye(3, device=device) * 3, torch.eye(3, device=device)
    g = pg.record(f)
    for _ in range(3):
        assert_same(g(good), f(good))
    theirs = raised(f, bad)
    if device.type == "cuda":
        g(bad)
        torch.cuda.synchronize(device)
    assert type(raised(g, bad if device.type == "cpu" else good)) is type(theirs)
    for _ in range(3):
        assert_same(g(good), f(good))
    assert counts(g)[:2] == (1, 1), reasons(g)


@may_run_live
def test_c13_a_matrix_that_your_own_code_takes_apart(device):
    """Whether it has a root may decide how to go on."""

    def f(x):
        try:
            return torch.linalg.cholesky(x)
        except torch.linalg.LinAlgError:
            return torch.linalg.cholesky(x + 2 * torch.eye(len(x), device=x.device))

    g = pg.record(f)
    for x in (torch.eye(3, device=device),) * 3 + (-torch.eye(3, device=device), torch.eye(3, device=device)):
        assert_same(g(x), f(x))


def test_c13_a_check_of_a_sample(device):
    def f(x):
        return D.Exponential(torch.ones(3, device=x.device)).log_prob(x)

    g = pg.record(f)
    for _ in range(3):
        g(ramp(device, 3))
    theirs = raised(f, -ramp(device, 3))
    if device.type == "cuda":
        g(-ramp(device, 3))
        torch.cuda.synchronize(device)
        assert "within the support" in str(raised(pg.stats, g))  # which may be asked for it as well
    else:
        assert str(raised(g, -ramp(device, 3))) == str(theirs)
    assert_same(g(ramp(device, 3)), f(ramp(device, 3)))
    assert pg.stats(g).recorded == 1


def test_c13_what_is_wrong_when_it_is_recorded(device):
    """The first call after the warm-up."""

    def f(x):
        return D.Normal(x, 1.0).log_prob(x)

    g = pg.record(f)
    g(ramp(device, 3))
    bad = of_nans(ramp(device, 3))
    theirs = raised(f, bad)
    if device.type == "cuda":
        g(bad)
        torch.cuda.synchronize(device)
    ours = raised(g, bad if device.type == "cpu" else ramp(device, 3))
    assert type(ours) is type(theirs)
    assert "of distribution Normal" in str(ours)
    for _ in range(3):
        assert_same(g(ramp(device, 3)), f(ramp(device, 3)))
    assert pg.stats(g).recorded == 1, reasons(g)


def test_c13_a_whole_step_of_a_policy(device):
    """An update as of PPO's: sampling, log-probabilities, entropy, backward and optimizer in one function."""

    def made():
        torch.manual_seed(0)
        actor, critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), nn.Linear(4, 1)
        both = nn.ModuleList([actor, critic]).to(device)
        log_std = nn.Parameter(torch.zeros(2, device=device))
        opt = torch.optim.Adam([*both.parameters(), log_std], lr=1e-2)

        def step(seen, actions, old, gains):
            policy = D.Normal(actor(seen), log_std.exp().expand(len(seen), -1))
            now = policy.log_prob(actions).sum(1)
            ratio = (now - old).exp()
            loss = -torch.min(ratio * gains, ratio.clamp(0.8, 1.2) * gains).mean() - 0.01 * policy.entropy().sum(1).mean()
            loss = loss + (critic(seen).squeeze(1) - gains).square().mean()
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(both.parameters(), 0.5)
            opt.step()
            return loss.detach()

        return step, both

    (plain, ours), (function, theirs) = made(), made()
    f = pg.record(function)
    for n in range(6):
        data = ramp(device, 6, 4, start=n) / 30, ramp(device, 6, 2) / 9, -ramp(device, 6) / 9, ramp(device, 6) / 6
        assert_same(f(*data), plain(*data))
    assert_same([*theirs.parameters()], [*ours.parameters()])
    assert counts(f) == (1, 1, 5), reasons(f)
    with torch.no_grad():
        theirs[0][0].weight.fill_(math.nan)
    if device.type == "cuda":
        f(*data)
        torch.cuda.synchronize(device)
    assert type(raised(f, *data)) is ValueError


def test_c13_soft_actor_critic(device):
    """A squashed Gaussian that is sampled, with its log-probability, as in SAC."""

    def made():
        torch.manual_seed(1)
        actor, q = nn.Linear(3, 4).to(device), nn.Linear(5, 1).to(device)
        opt = torch.optim.Adam(actor.parameters(), lr=1e-3)

        def step(seen):
            mean, log_std = actor(seen).chunk(2, -1)
            normal = D.Normal(mean, log_std.tanh().exp())
            raw = normal.rsample()
            action = raw.tanh()
            log_prob = (normal.log_prob(raw) - torch.log(1 - action.square() + 1e-6)).sum(1, keepdim=True)
            loss = (0.2 * log_prob - q(torch.cat([seen, action], 1))).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            return loss.detach()

        return step, actor

    (plain, ours), (function, theirs) = made(), made()
    f = pg.record(function)
    for n in range(5):
        torch.manual_seed(n)
        a = f(ramp(device, 4, 3) / 9)
        torch.manual_seed(n)
        assert_same(a, plain(ramp(device, 4, 3) / 9))
    assert_same([*theirs.parameters()], [*ours.parameters()])
    assert counts(f) == (1, 1, 4), reasons(f)


def test_c13_a_flow_and_a_variational_autoencoder(device):
    torch.manual_seed(0)
    net, decoder = nn.Linear(2, 4).to(device), nn.Linear(2, 2).to(device)

    params = [*net.parameters(), *decoder.parameters()]

    def flow(x):
        shift, scale = net(x).chunk(2, -1)
        steps = [D.transforms.AffineTransform(shift, scale.exp(), event_dim=1), D.transforms.SigmoidTransform()]
        base = D.Independent(D.Normal(torch.zeros_like(x), torch.ones_like(x)), 1)
        loss = D.TransformedDistribution(base, steps).log_prob((x / 99 + 0.5).clamp(0.01, 0.99)).mean()
        return loss.detach(), torch.autograd.grad(loss, params[:2])

    def vae(x):
        mean, scale = net(x).chunk(2, -1)
        seen = D.Normal(mean, scale.exp())
        z = seen.rsample()
        prior = D.Normal(torch.zeros_like(z), torch.ones_like(z))
        rebuilt = D.Bernoulli(logits=decoder(z)).log_prob((x > 5).float()).sum(-1)
        loss = (D.kl_divergence(seen, prior).sum(-1) - rebuilt).mean()
        return loss.detach(), torch.autograd.grad(loss, params)

    for program in (flow, vae):
        f = pg.record(program)
        for n in range(4):
            torch.manual_seed(n)
            a = f(ramp(device, 5, 2))
            torch.manual_seed(n)
            assert_same(a, program(ramp(device, 5, 2)))
        assert counts(f) == (1, 1, 3), reasons(f)


def test_c13_what_was_written_before_a_check_is_written(device):
    """As eager leaves it: what comes before, and on the CPU nothing of what comes after."""
    counter, after = torch.zeros((), device=device), torch.zeros((), device=device)

    def f(x):
        counter.add_(1)
        out = D.Normal(x, 1.0).log_prob(x)
        after.add_(1)
        return out

    g = pg.record(f)
    for _ in range(3):
        g(ramp(device, 3))
    if device.type == "cuda":
        g(of_nans(ramp(device, 3)))
        torch.cuda.synchronize(device)
        raised(g, ramp(device, 3))
        assert (counter.item(), after.item()) == (4, 4)  # the call that found nothing yet was a whole one
    else:
        raised(g, of_nans(ramp(device, 3)))
        assert (counter.item(), after.item()) == (4, 3)
    g(ramp(device, 3))
    assert counter.item() == 5


class TooMuch(Exception):
    pass


def out_of_range(x):
    if x.min() < 0 or x.max() >= 99:
        raise IndexError(f"target {x.max().item()} is out of range")
    return x * 2


def noted_first(x):
    y = x * 2
    if (x < 0).any():
        noted.append("negative")
        raise TooMuch
    return y


def of_two_kinds(x):
    if (x < 0).any():
        if (x < -5).any():
            raise ValueError("much")
        raise TypeError("little")
    return x * 2


def of_each_row(x):
    for n, row in enumerate(x):
        if row < 0:
            raise ValueError(f"row {n}")
    return x * 2


def drawn_before(x):
    y = x + torch.rand_like(x)
    if not (x >= 0).all():
        raise SystemExit(3)
    return y


LIBRARY = """
def check_positive(x):
    if x.lt(0).any():
        raise ValueError('not positive')
    return x

def asserted(x):
    assert not x.isnan().any(), "there are NaNs"
    assert (x >= 0).all()
    return x * 2
"""
library = {}
exec(compile(LIBRARY, os.path.join(sysconfig.get_path("purelib"), "targets", "checks.py"), "exec"), library)


def in_a_library(x):
    return library["check_positive"](x) * 2


def asserted_there(x):  # where pytest makes nothing else of it
    return library["asserted"](x)


noted = []
OWN = [out_of_range, noted_first, of_two_kinds, of_each_row, drawn_before, in_a_library, asserted_there]


def came_to(call, x):
    """What a call gives or raises, and leaves behind."""
    noted.clear()
    torch.manual_seed(1)
    try:
        found = call(x)
    except (Exception, SystemExit) as e:
        found = type(e), str(e)
    return found, [*noted], torch.rand(2)


@may_run_live
@pytest.mark.parametrize("program", OWN, ids=lambda f: f.__name__)
def test_c13_a_check_of_your_own_is_made_by_each_replay(device, program):
    """Or of a library: where it fails, the call begins again, and the code itself raises. On a GPU it would be known too late
    for that: such a call runs live."""
    good, bad = ramp(device, 3), -ramp(device, 3) - 1
    f = pg.record(program, fallback="live")
    for x in (good, good + 1, good, bad, good + 2, bad * 9, bad, good, good + 1):
        assert_same(came_to(f, x), came_to(program, x))
    if device.type == "cpu":
        assert pg.stats(f).replayed >= 5, reasons(f)
        assert not pg.stats(f).refusals, reasons(f)
    else:
        assert "value on the host" in reasons(f)


@may_run_live
def test_c11_a_check_after_much_was_written(device, monkeypatch):
    """More than a replay could note before it begins, to put it back where the call has to begin again."""
    monkeypatch.setattr(tape, "UNDONE", 3)
    count = torch.zeros((), device=device)

    def f(x):
        count.add_(1)
        if (x < 0).any():
            raise ValueError(f"{x.min().item()} is negative")
        return x * 2

    g = pg.record(f, fallback="live")
    for x in (ramp(device, 3),) * 3 + (-ramp(device, 3) - 1, ramp(device, 3)):
        assert_same(came_to(g, x), came_to(f, x))
    assert count.item() == 10
    assert pg.stats(g).recorded == 0
    assert "value on the host" in reasons(g)


def test_c13_a_step_that_checks_its_loss(device):
    """What it has written by then, and what it has not, is eager's; and it goes on."""

    def made():
        net = nn.Linear(3, 1, device=device)
        with torch.no_grad():
            net.weight.fill_(0.5)
            net.bias.fill_(0)
        opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        steps = torch.zeros((), device=device)

        def step(x):
            steps.add_(1)
            loss = net(x).square().mean()
            opt.zero_grad()
            loss.backward()
            if not torch.isfinite(loss):
                raise FloatingPointError(f"the loss is {loss.item()}")
            opt.step()
            return loss.detach()

        def state():
            return steps, [(p, p.grad, opt.state[p]["momentum_buffer"]) for p in net.parameters()]

        return step, state

    (plain, theirs), (function, ours) = made(), made()
    f = pg.record(function)
    for n, bad in enumerate([0, 0, 0, 1, 0, 1, 1, 0, 0]):
        x = ramp(device, 4, 3, start=n) / 30 * (math.inf if bad else 1)
        assert_same(came_to(f, x), came_to(plain, x))
        assert_same(ours(), theirs())
    if device.type == "cpu":
        assert pg.stats(f).recorded == 1, reasons(f)
        assert counts(f)[2] == 5, reasons(f)


@may_run_live
def test_c11_an_answer_of_your_own_that_decides_is_no_check(device):
    """It does something else than to raise, after the one answer or the other."""

    def warned(x):
        if not (x > 0).all():
            noted.append("not positive")
        return x * 2

    def caught(x):
        try:
            if (x < 0).any():
                raise ValueError
        except ValueError:
            return x * 0
        return x * 2

    for program in (warned, caught):
        g = pg.record(program, fallback="live")
        for x in (ramp(device, 3),) * 3 + (-ramp(device, 3) - 1,):
            assert_same(came_to(g, x), came_to(program, x))
        assert pg.stats(g).recorded == 0
        assert "value on the host" in reasons(g)


class Contrary(torch.Tensor):
    """Its truth is another than that of what it holds."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        found = super().__torch_function__(func, types, args, kwargs or {})
        return not found if func is torch.Tensor.__bool__ else found


@may_run_live
def test_c13_a_tensor_of_another_class_answers_for_itself(device):
    def f(x):
        if (x.as_subclass(Contrary) < 0).any():
            raise ValueError
        return x * 2

    g = pg.record(f)
    for x in (-ramp(device, 3) - 1,) * 3 + (ramp(device, 3), -ramp(device, 3) - 1):
        assert_same(came_to(g, x), came_to(f, x))


@may_run_live
def test_c11_one_that_is_caught(device):
    """A replay could not do what comes after: on the CPU the call begins again, live; a GPU would tell too late."""

    def f(x):
        try:
            return D.Normal(x, 1.0).log_prob(x)
        except ValueError:
            return x * 0 - 1

    g = pg.record(f)
    for x in (ramp(device, 3), ramp(device, 3), of_nans(ramp(device, 3)), ramp(device, 3)):
        assert_same(g(x), f(x))
    if device.type == "cuda":
        assert "a check of torch's may raise" in reasons(g)
        assert "validate_args=False" in reasons(g)
    else:
        assert counts(g) == (2, 1, 2), pg.explain(g)


@may_run_live
def test_c11_what_torch_decides_by_a_value_is_no_check(device):
    """It draws until all numbers are accepted."""

    def f(x):
        return D.VonMises(x, x.exp()).sample()

    g = pg.record(f, fallback="live")
    for x in (ramp(device, 3),) * 3:
        torch.manual_seed(0)
        a = g(x)
        torch.manual_seed(0)
        assert_same(a, f(x))
    assert "value on the host" in reasons(g)


@pytest.mark.parametrize("number", [True, 3, 2.5, 1j], ids=str)
def test_c01_constants_that_are_made_of_a_number(device, number):
    """As distributions make them of their arguments."""

    def f(x):
        made = torch.tensor(number, device=x.device), torch.as_tensor(number, device=x.device)
        return made, torch.tensor(number, dtype=torch.complex64, device=x.device), (x + 0j).new_tensor(number), x * made[0]

    g = pg.record(f)
    for n in range(4):
        assert_same(g(ramp(device, 3, start=n)), f(ramp(device, 3, start=n)))
    assert counts(g) == (1, 1, 3), reasons(g)


def test_c13_the_cost_does_not_grow_with_the_checks(device):
    """Of a GPU's graph: its flags are looked at as one."""
    before = len(checks.lookouts)
    f = pg.record(lambda x: sum(D.Normal(x * n, 1.0).log_prob(x) for n in range(1, 9)))
    for _ in range(3):
        f(ramp(device, 3))
    assert len(checks.lookouts) - before <= (1 if device.type == "cuda" else 0)


@torch.library.custom_op("phonograph_tests::checked_density", mutates_args=())
def checked_density(x: torch.Tensor) -> torch.Tensor:
    return D.Normal(x * 0, x.abs() + 0.5).log_prob(x) * (x.abs().max().item() > 0)


@pytest.mark.parametrize("fallback", ["live", "split"])
def test_c13_what_an_operator_of_others_checks_each_replay_checks(fallback):
    """On the CPU, where a replay runs the operator's own code: what it reads is read again, at that time."""
    recorded = pg.record(lambda x: (checked_density(x) * 2).sin(), fallback=fallback)
    for n in range(4):
        x = ramp("cpu", 6, start=n)
        assert_same(recorded(x), (checked_density(x) * 2).sin())
    assert counts(recorded)[2] == 3, pg.explain(recorded)
    assert "parameter loc" in str(raised(recorded, of_nans(x)))
    assert_same(recorded(x), (checked_density(x) * 2).sin())
