"""C9: a scheduler that the recorded step steps itself. What it counts, the rate that it sets and the list in which it tells
that are worked out in each replay."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.c09_python_values import converting
from tests.helpers import may_run_live, ramp, reasons

LR = torch.optim.lr_scheduler

FOLLOWED = {
    "cosine": lambda o: LR.CosineAnnealingLR(o, 20),
    "exponential": lambda o: LR.ExponentialLR(o, 0.9),
    "lambda": lambda o: LR.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "polynomial": lambda o: LR.PolynomialLR(o, 100),
    "made a float": lambda o: converting.linear(o, 5, 50),
    "milestones": lambda o: LR.MultiStepLR(o, [9, 20], 0.5),
    "one cycle": lambda o: LR.OneCycleLR(o, 0.1, total_steps=60),
    "sequential": lambda o: LR.SequentialLR(o, [LR.LinearLR(o, 0.1, total_iters=8), LR.CosineAnnealingLR(o, 30)], [8]),
}
OTHERS = {
    "step": lambda o: LR.StepLR(o, 7, 0.5),
    "linear": lambda o: LR.LinearLR(o, 0.1, total_iters=8),
    "constant": lambda o: LR.ConstantLR(o, 0.5, 6),
    "restarts": lambda o: LR.CosineAnnealingWarmRestarts(o, 9),
    "cyclic": lambda o: LR.CyclicLR(o, 0.01, 0.1, 6, cycle_momentum=False),
    "chained": lambda o: LR.ChainedScheduler([LR.ConstantLR(o, 0.5, 6), LR.ExponentialLR(o, 0.9)]),
    "two": lambda o: (LR.ExponentialLR(o, 0.99), LR.StepLR(o, 5, 0.5))[1],
    "by numpy": lambda o: LR.LambdaLR(o, lambda epoch: float(torch.tensor(0.9) ** epoch)),
}


class Loop:
    def __init__(self, device, schedule, optimizer=torch.optim.AdamW, every=1):
        torch.manual_seed(0)
        self.net, self.n, self.every = nn.Linear(4, 3).to(device), 0, every
        groups = [{"params": [self.net.weight]}, {"params": [self.net.bias], "lr": 0.03}]
        self.optimizer = optimizer(groups, lr=0.01)
        self.schedule, self.told = schedule(self.optimizer), []

    def step(self, x):
        loss = self.net(x).square().mean()
        loss.backward()
        self.n += 1
        if self.n % self.every == 0:
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        return loss.detach()

    def state(self):
        """What anybody may see of it after a step, and keep."""
        self.told.append(self.schedule.get_last_lr())
        return self.schedule.state_dict(), [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]


def beside(make, calls=40, change=lambda loop, n: None, **options):
    ours, theirs = make(), make()
    step = pg.record(ours.step, **options)
    for n in range(calls):
        x = ramp(next(ours.net.parameters()).device, 2, 4, start=n) * 0.01
        for loop in (ours, theirs):
            change(loop, n)
        assert_same(step(x), theirs.step(x), f"call {n}")
        assert_same(ours.state(), theirs.state(), f"call {n}")
        assert_same([*ours.net.parameters()], [*theirs.net.parameters()], f"call {n}")
    assert ours.told == theirs.told
    assert all(type(rate) is float for told in ours.told for rate in told)
    assert len({*map(id, ours.told)}) == len({*map(id, theirs.told)})
    return step


@may_run_live  # where one scheduler takes the turn of another, its list is new in a place that nobody has followed
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("schedule", FOLLOWED.values(), ids=FOLLOWED)
def test_c09_a_scheduler_within_the_step(device, schedule, optimizer):
    step = beside(lambda: Loop(device, schedule, optimizer), keep="always")
    assert pg.stats(step).live <= 6, reasons(step)


@may_run_live
@pytest.mark.parametrize("schedule", [LR.ConstantLR, LR.LinearLR])
def test_c09_a_capture_where_one_scheduler_takes_the_turn_of_another(device, schedule):
    """It sets several numbers to constants."""

    def made():
        torch.manual_seed(0)
        optimizer = torch.optim.SGD(nn.Linear(4, 4).to(device).parameters(), 0.01)
        turns = LR.SequentialLR(optimizer, [schedule(optimizer), LR.StepLR(optimizer, 2)], [4])

        def step(x, flag):
            optimizer.step()
            turns.step()

        return step, optimizer.param_groups[0], turns

    (step, group, turns), (plain, plain_group, plain_turns) = made(), made()
    recorded = pg.record(step, keep="always")
    for n in range(8):
        arguments = torch.ones(3 if n % 5 else 2, device=device), n % 2
        recorded(*arguments)
        plain(*arguments)
        assert (group["lr"], turns.get_last_lr()) == (plain_group["lr"], plain_turns.get_last_lr())
    assert pg.stats(recorded).replayed


@may_run_live
@pytest.mark.parametrize("schedule", FOLLOWED.values(), ids=FOLLOWED)
def test_c09_a_scheduler_within_each_second_step(device, schedule):
    step = beside(lambda: Loop(device, schedule, every=2), keep="always")
    assert pg.stats(step).live <= 8, reasons(step)


@may_run_live
@pytest.mark.parametrize("schedule", OTHERS.values(), ids=OTHERS)
def test_c09_a_scheduler_within_the_step_that_is_followed_or_not(device, schedule):
    beside(lambda: Loop(device, schedule))
    beside(lambda: Loop(device, schedule, every=2))


def _goes_back(loop, n):
    if n == 5:
        loop.kept = loop.schedule.state_dict()
    if n in (12, 25):
        loop.schedule.load_state_dict(loop.kept)


CHANGES = {
    "goes back": _goes_back,
    "another rate": lambda loop, n: loop.optimizer.param_groups[n % 2].update(lr=0.02 + n / 1000) if n % 9 == 8 else None,
    "another period": lambda loop, n: setattr(loop.schedule, "T_max", 25 if n > 10 else 20),
    "another list": lambda loop, n: setattr(loop.schedule, "_last_lr", [n, 1.0]) if n % 7 == 6 else None,
    "a list of another": lambda loop, n: loop.schedule._last_lr.append(1.0) if n % 7 == 6 else None,
    "stepped outside": lambda loop, n: loop.schedule.step() if n % 5 == 4 else None,
    "another scheduler": lambda loop, n: setattr(loop, "schedule", LR.ExponentialLR(loop.optimizer, 0.8)) if n == 12 else None,
    "none": lambda loop, n: setattr(loop, "schedule", LR.LambdaLR(loop.optimizer, lambda n: 1.0)) if n == 12 else None,
    "another count": lambda loop, n: setattr(loop.schedule, "last_epoch", 3.0) if n == 12 else None,
}


@may_run_live
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_c09_a_scheduler_within_the_step_that_changes_between(device, change):
    beside(lambda: Loop(device, FOLLOWED["cosine"]), change=change)


def _asks(loop):
    return loop.schedule.get_last_lr()[0]


READS = {
    "get_last_lr": _asks,
    "the list": lambda loop: loop.schedule._last_lr[1],
    "its state": lambda loop: [v for v in loop.schedule.state_dict().values() if type(v) is list][-1][0],
    "vars": lambda loop: [v for v in vars(loop.schedule).values() if type(v) is list][-1][0],
    "a name worked out": lambda loop: getattr(loop.schedule, "_last_" + "lr"[:2])[0],
    "the group": lambda loop: loop.optimizer.param_groups[0]["lr"],
    "the count": lambda loop: 1.0 + loop.schedule.last_epoch,
}


@may_run_live
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_c09_who_reads_what_a_scheduler_within_the_step_tells(device, read, before):
    class Reading(Loop):
        def step(self, x):
            rate = read(self) if before else 1.0
            loss = super().step(x)
            return loss * (rate if before else read(self))

    beside(lambda: Reading(device, FOLLOWED["cosine"]), calls=16)


@may_run_live
def test_c10_a_scheduler_within_a_step_that_is_verified(device):
    beside(lambda: Loop(device, FOLLOWED["cosine"]), calls=20, verify=3)


ASKING = {
    "another kind": "return 1.0 if type(x) is float else 2.0",
    "isinstance": "return 1.0 if isinstance(x, float) else 2.0",
    "a key": "return {float: 1.0, int: 2.0}[type(x)]",
    "handed on": "return next(map(float, [x]))",
    "an annotation": """
    def inner(y: float) -> float:
        return y
    return float(inner.__annotations__["y"] is type(float(x)))""",
}


@may_run_live
@pytest.mark.parametrize("code", ASKING.values(), ids=ASKING)
def test_c09_a_module_that_asks_for_the_class_float_as_well(device, code):
    space = {"__name__": "asking"}
    exec(f"def scaled(x, n):\n    return x * (float(n) / 7) * asked(n / 2)\ndef asked(x):\n    {code}", space)
    state = SimpleNamespace(n=0)

    def f(x):
        state.n += 1
        return space["scaled"](x, state.n)

    g, other = pg.record(f), space["scaled"]
    for n in range(1, 20):
        assert_same(g(ramp(device, 3)), other(ramp(device, 3), n))
        assert "float" not in space


def test_c09_a_flag_in_a_tensor_that_is_made_a_float_beside_a_count(device):
    f = converting.scaled_by(SimpleNamespace(n=0, flag=torch.tensor(2.0, device=device)))
    g = pg.record(f, keep="always")
    for n in range(1, 20):
        assert_same(g(ramp(device, 3)), ramp(device, 3) * (n / 8) * 2.0)
    assert pg.stats(g).replayed >= 16, reasons(g)
