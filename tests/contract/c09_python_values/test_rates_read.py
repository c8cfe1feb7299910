"""C9: a learning rate that is read in any way."""

import collections
import functools
import gc
import math
import operator

import pytest
import torch
from torch import nn

import phonograph as pg
from tests.contract.shared.noticing import data, globals_as_before, steps, usual_step  # noqa: F401
from tests.helpers import counts, may_run_live, side_by_side


def returns_it(net, optimizer, usual):
    return lambda x: (usual(x), optimizer.param_groups[0]["lr"])


def makes_a_tensor_of_it(net, optimizer, usual):
    return lambda x: (usual(x), torch.tensor(optimizer.param_groups[0]["lr"]))


def decays_by_hand(net, optimizer, usual):
    def step(x):
        loss = usual(x)
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(1 - optimizer.param_groups[0]["lr"] * 0.5)
        return loss

    return step


def decays_in_a_hook(net, optimizer, usual):
    @torch.no_grad()
    def decay(chosen, args, kwargs):
        for group in chosen.param_groups:
            for p in group["params"]:
                p.mul_(math.exp(-group["lr"]))

    optimizer.register_step_post_hook(decay)
    return usual


def notes_it_in_a_hook(net, optimizer, usual):
    seen = torch.zeros(())
    optimizer.register_step_post_hook(lambda chosen, a, k: seen.copy_(torch.tensor(chosen.param_groups[0]["lr"])))
    return lambda x: (usual(x), seen.clone())


def scales_the_loss_of_a_closure_with_it(net, optimizer, usual):
    def step(x):
        def closure():
            optimizer.zero_grad()
            loss = net(x).sum() * math.exp(-optimizer.param_groups[0]["lr"])
            loss.backward()
            return loss

        return optimizer.step(closure).detach()

    return step


READS_OF_THE_RATE = [
    returns_it, makes_a_tensor_of_it, decays_by_hand, decays_in_a_hook, notes_it_in_a_hook,
    scales_the_loss_of_a_closure_with_it,
]  # fmt: skip


@may_run_live
@pytest.mark.parametrize("step_of", READS_OF_THE_RATE)
def test_c09_a_learning_rate_that_the_function_reads_itself(device, step_of):
    both = steps(device, step_of)
    for n in range(8):
        if n in (4, 6):
            both.change(lambda state: state[1].param_groups[0].update(lr=0.05 / n))
        both(data(device, n))


_library = {"clip_grad_norm_": nn.utils.clip_grad_norm_, "Optimizer": torch.optim.Optimizer, "__name__": "rates"}
exec(compile("""
def current(o):
    return o.param_groups[0]['lr']

def last(s):
    return s.get_last_lr()[0]

def joined(o):
    return sum([one.param_groups for one in [o]], [])[0]["lr"]

def counted(o):
    return float(type(o.param_groups) is list) + 0 * len([p for g in o.param_groups for p in g["params"]])

class Wrapper:
    def __init__(self, optimizer):
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    def step(self):
        clip_grad_norm_([p for g in self.optimizer.param_groups for p in g["params"]], 1.0)
        self.optimizer.step()

class Before(Optimizer):
    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)

    def step(self, closure=None):
        self.optimizer.step(closure)

class Asking(Optimizer):
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def __getattr__(self, name):
        return getattr(self.optimizer, name)

    def step(self, closure=None):
        self.optimizer.step(**({} if closure is None else {"closure": closure}))

class Noting(Before):
    @property
    def param_groups(self):
        seen = self.optimizer.param_groups
        self.rate = seen[0]["lr"]
        return seen

class Scaling(Before):
    def step(self, closure=None):
        self.optimizer.step()
        self.scale = 1.0 - self.param_groups[0]["lr"]
""", "/usr/lib/site-packages/rates.py", "exec"), _library)  # fmt: skip


def _first_of(lr, **rest):
    return lr


# Ways to the learning rate by which the code of a step does not name it. Each is made from an optimizer and gives a function.
HIDDEN_READS = {
    "a library's function": lambda o: functools.partial(_library["current"], o),
    "a sum of lists": lambda o: functools.partial(_library["joined"], o),
    "a scheduler's, through a library": lambda o: functools.partial(
        _library["last"], torch.optim.lr_scheduler.ConstantLR(o, 1.0)
    ),
    "keywords": lambda o: lambda g=o.param_groups[0]: _first_of(**g),
    "items": lambda o: lambda g=o.param_groups[0]: sum(v for _, v in sorted(g.items()) if type(v) is float),
    "a key": lambda o: lambda g=o.param_groups[0], key="lr": g[key],
    "a key, of the groups": lambda o: lambda groups=o.param_groups, key="lr": groups[0][key],
    "itemgetter": lambda o: lambda g=o.param_groups[0], get=operator.itemgetter("lr"): get(g),
    "a bound method": lambda o: functools.partial(o.param_groups[0].get, "lr"),
    "a chain": lambda o: lambda g=collections.ChainMap({}, o.param_groups[0]), key="lr": g[key],
    "text": lambda o: lambda: float(f"{o}".split("lr: ")[1].split()[0]),
}


@may_run_live
@pytest.mark.parametrize("way", HIDDEN_READS)
def test_c09_a_learning_rate_that_is_read_without_its_name(device, way):
    def step_of(net, optimizer, usual):
        rate = HIDDEN_READS[way](optimizer)
        return lambda x: usual(x) * rate()

    both = steps(device, step_of)
    for n in range(8):
        if n in (4, 6):
            both.change(lambda state: state[1].param_groups[0].update(lr=0.05 / n))
            both.change(lambda state: [s._last_lr.__setitem__(0, 0.05 / n) for s in _schedulers_of(state[1])])
        both(data(device, n))


@may_run_live
def test_c09_a_closure_in_which_a_library_reads_the_rate(device):
    """The scheduler's code that runs at each step tells nothing of it."""

    def step_of(net, optimizer, usual):
        torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)

        def step(x):
            def closure():
                optimizer.zero_grad()
                loss = net(x).sum() * math.exp(-_library["current"](optimizer))
                loss.backward()
                return loss

            return optimizer.step(closure).detach()

        return step

    both = steps(device, step_of)
    for n in range(8):
        both.change(lambda state: state[1].param_groups[0].update(lr=0.1 / (n + 1)))
        both(data(device, n))


@may_run_live
@pytest.mark.parametrize("kind", ["Wrapper", "Before", "Asking"])
def test_c09_a_library_stands_before_the_optimizer(device, kind):
    """It has the groups of the other, and takes the parameters in them; the rate is followed."""

    def make():
        net = nn.Linear(4, 2, device=device)
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer = _library[kind](inner)

        def step(x):
            inner.zero_grad()
            loss = net(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss.detach() * _library["counted"](inner)

        return step, [net, inner]

    both = side_by_side(make)
    for n in range(8):
        both.change(lambda state: state[1].param_groups[0].update(lr=0.1 / (n + 1)))
        both(data(device, n))
    assert counts(both) == (1, 1, 7), pg.explain(both.recorded)


@may_run_live
@pytest.mark.parametrize("kind", ["Noting", "Scaling"])
def test_c09_what_stands_before_the_optimizer_reads_the_rate(device, kind):
    def make():
        net = nn.Linear(4, 2, device=device)
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer = _library[kind](inner)

        def step(x):
            inner.zero_grad()
            loss = net(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss.detach() * len(optimizer.param_groups) * (optimizer.rate if kind == "Noting" else optimizer.scale)

        return step, [net, inner]

    both = side_by_side(make)
    for n in range(8):
        both.change(lambda state: state[1].param_groups[0].update(lr=0.1 / (n + 1)))
        both(data(device, n))


def _schedulers_of(optimizer):
    return [x for x in gc.get_objects() if isinstance(x, torch.optim.lr_scheduler.LRScheduler) and x.optimizer is optimizer]


def test_c09_who_takes_parameters_only_does_not_read_the_rate(device):
    """`zero_grad` takes all groups; and somebody else may have one who is not in reach."""
    both, groups = steps(device, usual_step), []
    for n in range(6):
        both.change(lambda state: groups.append(state[1].param_groups[0]))
        both.change(lambda state: state[1].param_groups[0].update(lr=0.1 / (n + 1)))
        both(data(device, n))
    assert counts(both) == (1, 1, 5)


# Settings with which eager may raise, in a step that was recorded with ordinary ones.
ODD_SETTINGS = [
    (torch.optim.RAdam, "betas", (0.9, 1.0)), (torch.optim.RAdam, "betas", (1.0, 0.9)), (torch.optim.SGD, "lr", 10**400),
    (torch.optim.SGD, "lr", (0.5,)), (torch.optim.SGD, "lr", math.nan), (torch.optim.AdamW, "lr", math.nan),
    (torch.optim.AdamW, "weight_decay", math.inf), (torch.optim.Adam, "betas", (0.9, 0.99, 0.5)),
    (torch.optim.NAdam, "betas", (1.0, 1.0)), (torch.optim.SGD, "lr", None), (torch.optim.SGD, "lr", True),
    (torch.optim.SGD, "lr", 2**70),
]  # fmt: skip


@may_run_live
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(("optimizer", "key", "value"), ODD_SETTINGS)
def test_c09_settings_with_which_eager_may_raise(device, optimizer, key, value, again):
    """What was raised once is raised again, and no replay goes on with the numbers of before."""

    def run(record):
        p = nn.Parameter(torch.full((3,), 2.0, device=device))
        chosen = optimizer([p], lr=0.1)
        usual = chosen.param_groups[0][key]

        @record
        def step(x):
            chosen.zero_grad()
            (p * x).square().sum().backward()
            chosen.step()
            return p.detach().clone()

        found = []
        for n in range(9):
            if n == 4 or (again and n == 6):
                chosen.param_groups[0][key] = value if n == 4 else usual
            try:
                found.append(repr(step(data(device, n)[0, :3]).tolist()))  # `nan` is not equal to itself
            except Exception as e:
                found.append(type(e))
        return found

    assert run(pg.record) == run(lambda f: f)


def test_c09_a_rate_of_minus_zero(device):
    def run(record):
        p = nn.Parameter(torch.full((4,), -0.0, device=device))
        optimizer = torch.optim.SGD([p], lr=0.0)

        @record
        def step(x):
            optimizer.zero_grad()
            (p * x).sum().backward()
            optimizer.step()
            return p.detach().clone()

        found = []
        for n in range(8):
            optimizer.param_groups[0]["lr"] = -0.0 if n % 3 == 2 else 0.0
            with torch.no_grad():
                p.fill_(-0.0)
            found.append(step(torch.tensor([1.0, -1.0, 2.0, -2.0], device=device)).tolist())
        return repr(found)

    assert run(pg.record) == run(lambda f: f)


@may_run_live
def test_c09_a_rate_that_was_no_number_when_it_was_recorded(device):
    both = steps(device, usual_step, optimizer=torch.optim.AdamW)
    for n in range(8):
        both.change(lambda state: state[1].param_groups[0].update(lr=math.nan if n < 4 else 0.0))
        both.change(lambda state: [p.data.fill_(1.0) for p in state[0].parameters()])
        both.change(lambda state: [s["exp_avg"].zero_() for s in state[1].state.values()])
        both.change(lambda state: [s["exp_avg_sq"].zero_() for s in state[1].state.values()])
        both(data(device, n) * 0)
