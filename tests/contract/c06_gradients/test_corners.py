"""C6: optimizers and gradients, around corners."""

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.shared.corners import globals_as_before  # noqa: F401
from tests.helpers import counts, may_run_live, ramp, reasons, side_by_side


@may_run_live
@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
@pytest.mark.parametrize("foreach", [False, True])
def test_c06_a_learning_rate_of_zero(device, kind, foreach):
    """Where nothing has been learned yet, torch's capturable step would divide 0 by 0."""

    def make():
        torch.manual_seed(0)
        table = nn.Embedding(6, 3).to(device)
        optimizer = getattr(torch.optim, kind)(table.parameters(), lr=0.01, foreach=foreach)

        def step(rows):
            optimizer.zero_grad()
            table(rows).square().sum().backward()
            optimizer.step()

        return step, [table, optimizer]

    both = side_by_side(make)
    for rate in [0.0, 0.01, 0.01, 0.01, 0.0, 0.0, 0.01, 0.01, 0.01]:
        for state in (both.state, both.live_state):
            state[1].param_groups[0]["lr"] = rate
        both(torch.tensor([1, 2], device=device))
    assert torch.isfinite(both.state[0].weight).all()
    assert counts(both)[2] >= 7, reasons(both)


def test_c06_a_learning_rate_of_zero_where_no_step_is_taken(device):
    weight = nn.Parameter(torch.ones(3, device=device))
    optimizer = torch.optim.Adam([weight], lr=0.0)

    def gradients(x):
        optimizer.zero_grad()
        (weight * x).sum().backward()

    f = pg.record(gradients, warmup=1)
    for n in range(4):
        f(ramp(device, 3, start=n))
        assert_same(weight.grad, ramp(device, 3, start=n))
    assert pg.stats(f).replayed == 3, reasons(f)


class Rate:
    def __init__(self, optimizer):
        self.value = 2 * optimizer.param_groups[0]["lr"]

    def again(self, optimizer):
        self.__init__(optimizer)
        return self


RATES = {
    "by its name": lambda rate, optimizer: Rate(optimizer),
    "by its type": lambda rate, optimizer: type(rate)(optimizer),
    "again": lambda rate, optimizer: rate.again(optimizer),
}


@pytest.mark.parametrize("read", RATES.values(), ids=RATES)
def test_c09_a_rate_that_a_constructor_reads(device, read):
    def make():
        weight = nn.Parameter(torch.ones(3, device=device))
        optimizer = torch.optim.SGD([weight], lr=0.5)
        rate = Rate(optimizer)

        def step(x):
            optimizer.zero_grad()
            (weight * x).sum().backward()
            now = read(rate, optimizer)
            optimizer.step()
            return x * now.value

        return step, (weight, optimizer)

    both = side_by_side(make)
    for n in range(9):
        for _, optimizer in (both.state, both.live_state):
            optimizer.param_groups[0]["lr"] = 0.5 / (1 + n // 3)
        both(ramp(device, 3))


@may_run_live
def test_c06_adam_on_float16_parameters(device):
    def make():
        weight = nn.Parameter(torch.ones(3, dtype=torch.half, device=device))
        optimizer = torch.optim.Adam([weight], lr=1e-3, eps=1e-4)

        def step(x):
            optimizer.zero_grad()
            (weight * x).sum().backward()
            optimizer.step()

        return step, weight

    both = side_by_side(make, tolerance=5e-3)
    for _ in range(50):
        both(torch.tensor([100.0, 1000.0, 1.0], dtype=torch.half, device=device))


@may_run_live
def test_c05_a_gradient_that_is_handed_out_keeps_its_value(device):
    weight = nn.Parameter(torch.zeros(2, device=device))

    def f(x):
        weight.grad = None
        (weight * x).sum().backward()
        return weight.grad

    f = pg.record(f, warmup=1)
    held = [f(torch.full((2,), float(n), device=device)) for n in range(6)]
    for n, gradient in enumerate(held):
        assert_same(gradient, torch.full((2,), float(n), device=device))


@may_run_live
def test_c06_a_view_of_a_weight_is_written_without_gradients(device):
    torch.manual_seed(0)

    def make():
        layer = nn.Linear(4, 4).to(device)

        @torch.no_grad()
        def f(x):
            for row in layer.weight.unbind(0):
                row.mul_(0.5)
            return layer(x)

        return f, layer

    both = side_by_side(make)
    for n in range(6):
        both(ramp(device, 2, 4, start=n))


def by_another_argument(weight, a, b):
    return torch.autograd.grad(((a * weight).sum() + b.sum()) ** 2, a)[0]


def by_a_weight(weight, a, b):
    return torch.autograd.grad(b.sum() ** 2, weight, allow_unused=True)[0]


def backward_to_a_weight(weight, a, b):
    ((b.sum() + weight.sum()) ** 2).backward(inputs=[weight])
    return weight.grad.clone()


def twice_by_another(weight, a, b):
    (first,) = torch.autograd.grad((a * b).sum() ** 2, a, create_graph=True)
    return (first * b).sum()


def by_itself(weight, a, b):
    return torch.autograd.grad((b * b).sum(), b)[0]


def by_what_it_makes(weight, a, b):
    between = (a + b).detach().requires_grad_()
    return torch.autograd.grad((between * b).sum(), between)[0].detach()


@may_run_live
@pytest.mark.parametrize("function", [by_another_argument, by_a_weight, backward_to_a_weight, twice_by_another, by_itself,
                                      by_what_it_makes])  # fmt: skip
@pytest.mark.parametrize("made", ["view", "product"])
def test_c06_a_gradient_by_what_lies_behind_an_argument(device, function, made):
    """What of it comes by the history of that argument, no capture sees."""
    weight = nn.Parameter(ramp(device, 3))
    recorded = pg.record(lambda a, b: function(weight, a, b), keep="always")
    for n in range(6):
        results = []
        for f in (lambda a, b: function(weight, a, b), recorded):
            weight.grad = None
            a = (ramp(device, 3) + n).requires_grad_()
            result = f(a, a[:] if made == "view" else a * weight)
            if result is not None and result.requires_grad:
                result.backward()
            results.append((result, a.grad, weight.grad))
        assert_same(*results)
    if function in (by_itself, by_what_it_makes):
        assert pg.stats(recorded).replayed >= 4, reasons(recorded)
