"""C2, C4, C5, C8, C9: ordinary loops, in which somebody does something between the calls that is done once in a while.

Each program runs twice from equal seeds, plain and with `pg.record` around one function of it. What it logs on its way, what it
keeps, its weights, its optimizer and the random generators are the same at the end, bit for bit."""

import copy
import types

import pytest
import torch
import torch.nn.functional as F
from torch import distributions, nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import may_run_live

pytestmark = may_run_live


@pytest.fixture(autouse=True)
def validating(monkeypatch):
    """As it is by default; `torch.compile` switches it off."""
    monkeypatch.setattr(distributions.Distribution, "_validate_args", True)


class Run:
    """One of the two runs: `record` does what it says, or nothing; `log` copies what is there now, `kept` is looked at last."""

    def __init__(self, program, device, on):
        torch.manual_seed(5)
        self.device, self.on, self.logged, self.kept, self.recorded = device, on, [], [], []
        with torch.device(device):
            program(self)
        self.drawn = torch.rand(3, device=device)

    def record(self, function, **options):
        if not self.on:
            return function
        self.recorded.append(pg.record(function, **options))
        return self.recorded[-1]

    def log(self, *values):
        self.logged.append([copy.deepcopy(x.state_dict() if hasattr(x, "state_dict") else x) for x in values])


def same_as_plain(program, device):
    """Runs it both ways; how often something was replayed."""
    plain, recorded = Run(program, device, False), Run(program, device, True)
    for name in ("logged", "kept", "drawn"):
        assert_same(getattr(recorded, name), getattr(plain, name), name)
    return sum(pg.stats(f).replayed for f in recorded.recorded)


def network():
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.1), nn.Linear(12, 3))


def batch(n=8):
    return torch.randn(n, 6), torch.randint(0, 3, (n,))


def training(run, between, whole, optimizer=None, calls=40):
    """A training loop, recorded whole or the model alone; `between(i, s)` does something after the i-th step."""
    net = network()
    opt = (optimizer or (lambda p: torch.optim.Adam(p, lr=0.01)))(net.parameters())
    model = net if whole else run.record(net)

    def step(x, y):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss.detach()

    recorded = run.record(step) if whole else step
    s = types.SimpleNamespace(net=net, opt=opt, first=net[0].weight, held=None, log=run.log)
    for i in range(calls):
        run.kept.append(recorded(*batch()))
        between(i, s)
    run.log(net, opt, [p.grad for p in net.parameters()])


def a_state_dict_is_held(i, s):
    if i == 8:
        s.held = s.opt.state_dict()  # which has the very tensors
    if i in (12, 25, 26):
        s.log(s.held)
    if i == 30:
        s.opt.load_state_dict(s.held)


def the_state_of_one_parameter_is_held(i, s):
    if i == 8:
        s.held = s.opt.state[s.first]
    if i in (12, 26):
        s.log(dict(s.held))
    if i == 28:
        s.held["exp_avg"].zero_()
    if i == 29:
        s.held["step"] += 5
    if i == 31:
        s.held["exp_avg"] = torch.ones_like(s.first)


def the_state_is_had_by_its_dictionary(i, s):
    if i == 8:
        s.held = vars(s.opt)["state"]
    if i in (12, 25):
        s.log([dict(x) for x in s.held.values()])
    if i == 28:
        s.held[s.first]["step"].zero_()


def the_optimizer_is_copied(i, s):
    if i == 8:
        s.log(copy.deepcopy(s.opt))
        s.held = copy.copy(s.opt)  # whose state is the same
    if i in (15, 20):
        s.log(s.held)
    if i == 22:
        s.held.state[s.first]["exp_avg"].zero_()


def the_gradient_is_held_in_part(i, s):
    if i == 8:
        s.held = s.first.grad.view(-1)
    if i == 13:
        s.held = s.first.grad.detach()
    if i == 18:
        s.held = s.first.grad.untyped_storage()
    if i in (11, 16):
        s.log(s.held)
    if i == 20:
        s.log(bytes(s.held.tolist()))
        s.held = None
    if i == 30:
        s.first.grad = None


def weights_and_groups_are_replaced(i, s):
    group = s.opt.param_groups[0]
    if i == 10:
        s.first.data = s.first.data + 1
    if i == 18:
        s.net[3].reset_parameters()
    if i == 22:  # the optimizer goes on with the old one
        s.net[0].weight = nn.Parameter(s.first.detach() * 2)
    if i == 26:
        group["params"][0] = s.net[0].weight
        s.opt.state[s.net[0].weight] = s.opt.state.pop(s.first)
    if i == 30:
        group["weight_decay"] = 0.1
    if i == 33:
        group["betas"] = (0.5, 0.9)
    if i == 36:
        group["lr"] *= 0.9


BETWEEN = [a_state_dict_is_held, the_state_of_one_parameter_is_held, the_state_is_had_by_its_dictionary,
           the_optimizer_is_copied, the_gradient_is_held_in_part, weights_and_groups_are_replaced]  # fmt: skip


@pytest.mark.parametrize("whole", [True, False], ids=["step", "model"])
@pytest.mark.parametrize("between", BETWEEN, ids=lambda f: f.__name__)
def test_c04_c09_what_is_done_between_two_steps(device, between, whole):
    assert same_as_plain(lambda run: training(run, between, whole), device) >= 25


def test_c09_two_recorded_functions_and_a_plain_one_share_an_optimizer(device):
    def program(run):
        net = network()
        opt = torch.optim.Adam(net.parameters(), lr=0.01)

        def step(loss):
            opt.zero_grad()
            loss.backward()
            opt.step()
            return loss.detach()

        def fit(x, y):
            return step(F.cross_entropy(net(x), y))

        def shrink(x):
            return step(net(x).pow(2).mean())

        first, second = run.record(fit), run.record(shrink)
        for i in range(40):
            x, y = batch()
            run.kept.append([lambda: first(x, y), lambda: second(x), lambda: second(x), lambda: fit(x, y)][i % 4]())
            if i == 22:
                run.log(opt)
            if i == 30:
                opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        run.log(net, opt)

    assert same_as_plain(program, device) >= 20


VALUES = [0.5, 1, 2.0, True, 0.25, 3, -0.0, 0.0, float("inf"), 0.7, 0.6]


def test_c02_a_coefficient_of_many_kinds_and_a_branch_on_it(device):
    def program(run):
        config, x = types.SimpleNamespace(beta=0.0, rate=1.0, weights=[1.0, 0.5]), torch.randn(4)

        @run.record
        def f(x):
            y = x * config.weights[0] + config.weights[1]
            y = y + config.beta * x if config.beta > 0.5 else y - x.abs() * config.beta
            return y * config.rate, x.abs().pow(config.weights[1])

        for i in range(44):
            run.kept.append(f(x))
            config.beta = VALUES[i % len(VALUES)] if i > 20 else config.beta + 0.04
            config.weights[0] *= 0.9
            if i > 30:
                config.weights[1] = config.weights[0] if i % 2 else 2.0  # equal, and no more the same
            if i == 40:
                config.weights.append(1.0)

    assert same_as_plain(program, device) >= 20


def test_c05_c09_objects_that_carry_state_are_exchanged_copied_and_reset(device):
    class Cell:
        def __init__(self):
            self.weight, self.v, self.k = torch.randn(6, 6), None, 0.5

        def __call__(self, x):
            self.v = x @ self.weight if self.v is None else self.k * self.v + x @ self.weight
            return self.v.tanh()

    def program(run):
        cells, held = [Cell(), Cell()], []
        f = run.record(lambda cell, x: cell(x) + cells[0].weight.sum())
        for i in range(50):
            cell = cells[i % 2]
            run.kept.append(f(cell, torch.randn(3, 6)))
            held.append(cell.v)
            if i == 20:
                cells[0].v = cells[1].v
            if i == 24:
                cells[1].v = None
            if i == 30:
                cells[0].k = 0.1
            if i == 34:
                cells[1] = copy.deepcopy(cells[0])
            if i == 40:
                cells[0].v.zero_()
        run.kept.append(held)

    assert same_as_plain(program, device) >= 20


def test_c04_results_that_are_written_between(device):
    def program(run):
        net = network()
        opt = torch.optim.SGD(net.parameters(), lr=0.1)

        @run.record
        def step(x, y):
            opt.zero_grad()
            z = net(x)
            F.cross_entropy(z, y).backward()
            opt.step()
            z = z.detach()
            return z, z[0], z.t(), x, {"x": x[1:]}, net[0].weight

        for i in range(24):
            z, row, turned, x, parts, weight = step(*batch())
            z.add_(1)
            x.zero_()
            run.log(row, turned, parts)
            run.kept.append(z)
            if i == 12:
                weight.data.mul_(0.5)
        run.log(net, opt)

    assert same_as_plain(program, device) >= 15


def test_c08_a_sample_that_is_nan_once_in_a_while(device):
    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(6, 4)

        def forward(self, x, action=None):
            mean, log_std = self.body(x).chunk(2, -1)
            d = distributions.Independent(distributions.Normal(mean, log_std.exp()), 1)
            action = d.sample() if action is None else action
            return action, d.log_prob(action), d.entropy()

    def program(run):
        policy = Policy()
        model, opt = run.record(policy), torch.optim.Adam(policy.parameters(), lr=0.01)
        for i in range(30):
            x = torch.randn(5, 6)
            if i in (3, 10, 11, 25) and x.device.type == "cpu":  # elsewhere it is said by a later call
                x[0, 0] = float("nan")
            try:
                with torch.no_grad():
                    action, before, _ = model(x)
                _, now, entropy = model(x, action)
            except ValueError as error:
                run.log(str(error))
                continue
            loss = ((now - before).exp() * torch.randn(5)).mean() - 0.01 * entropy.mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            run.kept.append(loss.detach())
        run.log(policy, opt)

    assert same_as_plain(program, device) >= 45


def test_c02_metrics_that_are_only_handed_on(device):
    class Told:
        loss = 0.0

    def program(run):
        net, told = network(), Told()
        opt = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(x, y):
            opt.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            opt.step()
            told.loss = loss.item()
            return loss.detach()

        recorded = run.record(step, fallback="split")
        for i in range(24):
            run.kept.append(recorded(*batch()))
            run.kept.append(told.loss)
            if i == 15:
                opt.param_groups[0]["lr"] *= 0.5
        run.log(net, opt)

    assert same_as_plain(program, device) >= 15
