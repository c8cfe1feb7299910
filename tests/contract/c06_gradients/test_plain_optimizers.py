"""Optimizers as people make them, neither fused nor capturable: recorded or live, a step is eager's to the bit (C6, C21).

Their step counts lie on the host. Everything here is compared bit by bit, the counts too, with the same program in plain
PyTorch.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.contract.shared.plain_optimizers import adams, assert_counted, batch, common, trained
from tests.helpers import counts, may_run_live, reasons, side_by_side

# ---------------------------------------------------------------------------------------------------
# Recorded


@adams
def test_c06_many_recorded_steps_are_plain_eagers(device, optimizer):
    both = side_by_side(trained(device, optimizer))
    for n in range(40):
        both(*batch(device, n))
    live, recorded, replayed = counts(both)
    assert recorded <= (2 if optimizer == "radam" else 1), reasons(both)  # RAdam's sixth step takes another branch
    assert replayed == 40 - live, reasons(both)
    assert live <= 2
    assert_counted(both, 40)


@common
@pytest.mark.parametrize("schedule", ["cosine", "one cycle", "warmup"])
def test_c09_schedules_of_plain_optimizers_are_followed(device, optimizer, schedule):
    schedulers = []

    def make():
        step, state = trained(device, optimizer)()
        kind = {
            "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 8),
            "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
            "warmup": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: n / 4),  # from 0
        }[schedule]
        schedulers.append(kind(state[1]))
        return step, state

    both = side_by_side(make)
    for n in range(16):
        both(*batch(device, n))
        for one in schedulers:
            one.step()
    assert counts(both) == (1, 1, 15), reasons(both)


@common
def test_c06_several_steps_in_a_call(device, optimizer):
    def step_of(model, chosen):
        def update(x, y):
            losses = []
            for rows in (slice(0, 2), slice(2, 4), slice(1, 5)):
                chosen.zero_grad()
                loss = F.cross_entropy(model(x[rows]), y[rows])
                loss.backward()
                chosen.step()
                losses.append(loss.detach())
            return torch.stack(losses)

        return update

    both = side_by_side(trained(device, optimizer, step_of))
    for n in range(8):
        both(*batch(device, n))
    assert counts(both)[1:] == (1, 7), reasons(both)
    assert {float(s["step"]) for s in both.state[1].state.values()} == {24.0}


def test_c06_two_optimizers_of_which_one_steps_twice_as_often(device):
    """As in a GAN. Their counts are equal to begin with, and part."""

    def make():
        torch.manual_seed(3)
        makes, judges = nn.Linear(2, 4).to(device), nn.Linear(4, 1).to(device)
        first, second = torch.optim.Adam(makes.parameters()), torch.optim.Adam(judges.parameters(), betas=(0.5, 0.9))

        def step(noise, real):
            for _ in range(2):
                second.zero_grad()
                (judges(makes(noise).detach()).mean() - judges(real).mean()).backward()
                second.step()
            first.zero_grad()
            loss = -judges(makes(noise)).mean()
            loss.backward()
            first.step()
            return loss.detach()

        return step, [makes, judges, first, second]

    both = side_by_side(make)
    for _ in range(9):
        both(torch.randn(3, 2, device=device), torch.randn(3, 4, device=device))
    assert counts(both) == (1, 1, 8), reasons(both)


@may_run_live
@common
def test_c08_parameters_that_not_each_step_uses_have_counts_of_their_own(device, optimizer):
    both = side_by_side(trained(device, optimizer))
    for n in range(24):
        both(*batch(device, n), n % 4 == 3)
    assert counts(both)[2] >= 12, reasons(both)


@common
def test_c07_two_shapes_in_turn(device, optimizer):
    both = side_by_side(trained(device, optimizer))
    for n in range(16):
        both(*batch(device, n, 5 if n % 2 else 3))
    assert counts(both) == (2, 2, 14), reasons(both)
    assert_counted(both, 16)


def set_counts(state):
    for i, one in enumerate(state[1].state.values()):
        one["step"].fill_(100 + i % 2)


def add_to_counts(state):
    for one in state[1].state.values():
        one["step"] += 7


def new_counts(state):
    for one in state[1].state.values():
        one["step"] = torch.tensor(3.0)


def load(state):
    state[1].load_state_dict(copy.deepcopy(state[1].state_dict()))


def other_memory(state):
    for one in state[1].state.values():
        one["step"].data = one["step"].data.clone() + 5


@may_run_live
@common
@pytest.mark.parametrize("change", [set_counts, add_to_counts, new_counts, load, other_memory])
def test_c08_counts_that_somebody_sets(device, optimizer, change):
    both = side_by_side(trained(device, optimizer))
    for n in range(14):
        if n in (4, 9):
            both.change(change)
        both(*batch(device, n))
    assert counts(both)[2] >= 8, reasons(both)
    if change is add_to_counts:
        assert counts(both) == (1, 1, 13), "a count is read at each replay"


@adams
def test_c06_counts_that_lie_on_the_device(device, optimizer):
    """As those that are loaded from there, or made under `torch.device(...)` in some releases. Eager waits for each."""

    def moved(state):
        for one in state[1].state.values():
            one.update({name: one[name].to(device) for name in ("step", "mu_product") if name in one})

    def behind_versions(state):
        for one in state[1].state.values():
            one["step"].data.add_(2)

    both = side_by_side(trained(device, optimizer))
    for n in range(24):
        if n in (1, 12, 16):
            both.change({1: moved, 12: add_to_counts, 16: behind_versions}[n])
        both(*batch(device, n))
    assert counts(both)[1] <= (3 if optimizer == "radam" else 2), reasons(both)
    assert counts(both)[2] >= 20, reasons(both)
    for _, chosen in (both.state, both.live_state):
        assert max(float(state["step"]) for state in chosen.state.values()) == 24 + 7 + 2
        assert {state["step"].device.type for state in chosen.state.values()} == {device.type}


def test_c06_a_step_under_a_device(device):
    def make():
        step, state = trained(device)()

        def under(x, y):
            with torch.device(device):
                return step(x, y)

        return under, state

    both = side_by_side(make)
    for n in range(8):
        both(*batch(device, n))
    assert counts(both) == (1, 1, 7), reasons(both)


@common
def test_c06_live_steps_between_recorded_ones(device, optimizer):
    both = side_by_side(trained(device, optimizer))
    for n in range(12):
        if n in (5, 6, 9):
            both.change(lambda state, n=n: plain_step(state, *batch(device, 50 + n)))
        both(*batch(device, n))
    assert counts(both)[1] <= 2, reasons(both)
    assert_counted(both, 15)


def plain_step(state, x, y):
    F.cross_entropy(state[0].eval()(x), y).backward()
    state[0].train()
    state[1].step()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@common
def test_c06_parameters_of_other_types(device, optimizer, dtype):
    both = side_by_side(trained(device, optimizer, dtype=dtype))
    for n in range(6):
        both(*batch(device, n, dtype=dtype))
    assert counts(both) == (1, 1, 5), reasons(both)


def test_c06_counts_of_double_precision(device):
    torch.set_default_dtype(torch.float64)  # in which optimizers then count
    try:
        both = side_by_side(trained(device, "adam", dtype=torch.float64))
        for n in range(6):
            both(*batch(device, n, dtype=torch.float64))
        assert counts(both) == (1, 1, 5), reasons(both)
    finally:
        torch.set_default_dtype(torch.float32)


@common
def test_c10_verified_steps(device, optimizer):
    both = side_by_side(trained(device, optimizer), verify=2)
    for n in range(9):
        both(*batch(device, n))
    assert counts(both)[1] == 1, reasons(both)
    assert_counted(both, 9)


class Halving(torch.optim.Adam):
    """Somebody's own, on top of torch's."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)
        return super().step(closure)


class ByHand(torch.optim.Adam):
    """Somebody's own arithmetic, with the count as a tensor."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"], state["average"] = torch.zeros(()), torch.zeros_like(p)
                state["step"] += 1
                state["average"].lerp_(p.grad, 0.1)
                p.add_(state["average"] / (1 - 0.9 ** state["step"]).to(p.device), alpha=-group["lr"])


@may_run_live
@pytest.mark.parametrize("kind", [Halving, ByHand])
def test_c06_optimizers_made_of_torchs(device, kind):
    both = side_by_side(trained(device, kind))
    for n in range(8):
        both(*batch(device, n))
    assert kind is ByHand or counts(both)[2] >= 6, reasons(both)


def test_c06_each_parameter_steps_in_the_backward(device):
    """As in training with little memory: an optimizer for each parameter, stepped by a hook."""

    def make():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
        own = {p: torch.optim.AdamW([p], lr=0.01) for p in model.parameters()}

        def stepped(p):
            own[p].step()
            own[p].zero_grad()

        for p in own:
            p.register_post_accumulate_grad_hook(stepped)

        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss.detach()

        return step, [model, *own.values()]

    both = side_by_side(make)
    for n in range(8):
        both(*batch(device, n))
    assert counts(both)[2] >= 6, reasons(both)


def test_c13_a_call_that_raises_before_the_step_counts_nothing(device):
    def step_of(model, chosen):
        def step(x, y, fails=False):
            chosen.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if fails:
                raise KeyError("before the step")
            chosen.step()
            return loss.detach()

        return step

    both = side_by_side(trained(device, "adam", step_of))
    for n in range(8):
        both(*batch(device, n))
        if n in (2, 5):
            both.outcome(*batch(device, n), fails=True)
    assert counts(both)[2] >= 7, reasons(both)
    assert_counted(both, 8)
