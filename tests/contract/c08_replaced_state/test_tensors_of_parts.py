"""Tensors that consist of others, as a DTensor does of its part here and a description of the whole: parameters, their
gradients, what an optimizer keeps, arguments and results. They are recorded by their parts."""

import functools

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.shared.tensors_of_parts import fixed, two
from tests.helpers import assert_replays, assert_settles, counts, may_run_live, ramp, reasons, side_by_side

OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "momentum, foreach": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "adam": functools.partial(torch.optim.Adam, lr=0.01),
    "adamw, foreach": functools.partial(torch.optim.AdamW, lr=0.01, foreach=True),
}


class Net(nn.Module):
    """One weight of two tensors, another that is a tensor."""

    def __init__(self, device):
        super().__init__()
        self.weight = nn.Parameter(two(device, 6, 6))
        self.other = nn.Parameter(two(device, 6, seed=5))
        self.plain = nn.Linear(6, 6, device=device)
        with torch.no_grad():
            for i, p in enumerate(self.plain.parameters()):
                p.copy_(fixed(device, *p.shape, seed=10 + i))

    def forward(self, x):
        return torch.tanh(TwoTensor(x, x) @ self.weight) * self.other


def training(device, optimizer="sgd"):
    """A `make` for `side_by_side`: a step, and what it leaves."""

    def make():
        net = Net(device)
        chosen = OPTIMIZERS[optimizer](net.parameters())

        def step(x):
            chosen.zero_grad()
            y = net(x)
            y.square().mean().backward()
            net.plain(x).square().mean().backward()
            chosen.step()
            with torch.no_grad():
                return y.detach().a.clone()

        return step, [net, chosen]

    return make


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_c06_a_step_with_parameters_of_two_tensors(device, optimizer):
    both = side_by_side(training(device, optimizer))
    for n in range(6):
        both(ramp(device, 4, 6, start=n) / 10)
    assert counts(both) == (1, 1, 5), reasons(both)


@may_run_live
@pytest.mark.parametrize("held", ["the gradient", "its part"])
def test_c05_a_gradient_of_two_tensors_that_is_held_keeps_its_values(device, held):
    step, (net, _) = training(device)()
    recorded, kept = pg.record(step, warmup=1), []
    for n in range(5):
        recorded(ramp(device, 4, 6, start=n) / 10)
        found = net.weight.grad if held == "the gradient" else net.weight.grad.a
        kept.append((found, (found if held == "its part" else found.a).clone()))
        if n < 2:
            kept.clear()
        del found
    assert "a gradient of an earlier call is held" in reasons(recorded)
    for found, was in kept:
        assert_same(found if held == "its part" else found.a, was)


def test_c08_a_part_of_a_parameter_is_replaced_and_noticed(device):
    changed = []

    def make():
        step, state = training(device, "momentum")()
        changed.append(state[0].weight)
        return step, state

    both = side_by_side(make)
    for n in range(4):
        both(ramp(device, 4, 6, start=n) / 10)
    with torch.no_grad():
        for weight in changed:
            weight.a.mul_(0.5)
    assert_replays(both, ramp(device, 4, 6) / 10)
    for weight in changed:
        weight.a = fixed(device, 6, 6, seed=9)
    assert_settles(both, ramp(device, 4, 6) / 10)


def test_c08_a_parameter_of_two_tensors_is_frozen_and_noticed(device):
    nets = []

    def make():
        step, state = training(device)()
        nets.append(state[0])
        return step, state

    both = side_by_side(make)
    for n in range(4):
        both(ramp(device, 4, 6, start=n) / 10)
    for net in nets:
        net.other.requires_grad_(False)
    for n in range(4):
        both(ramp(device, 4, 6, start=n) / 10)
    assert counts(both)[2] >= 5


def test_c10_a_step_with_parameters_of_two_tensors_is_verified(device):
    both = side_by_side(training(device, "adamw, foreach"), verify=2)
    for n in range(6):
        both(ramp(device, 4, 6, start=n) / 10)
    assert counts(both) == (1, 1, 5), reasons(both)


def test_c06_gradients_of_two_tensors_are_accumulated(device):
    def make():
        net = Net(device)
        chosen = OPTIMIZERS["momentum, foreach"](net.parameters())

        def step(x):
            for part in x.chunk(2):
                net(part).square().mean().backward()
            chosen.step()
            chosen.zero_grad(set_to_none=False)
            return x + 1

        return step, [net, chosen]

    both = side_by_side(make)
    for n in range(7):
        both(ramp(device, 4, 6, start=n) / 10)
    assert counts(both)[2] >= 4, reasons(both)


def test_c08_autograd_hears_that_a_parameter_of_two_tensors_was_written(device):
    step, (net, _) = training(device)()
    recorded = pg.record(step, warmup=1)
    for n in range(3):
        recorded(ramp(device, 4, 6, start=n) / 10)
    kept = (net.weight * net.weight).sum()
    recorded(ramp(device, 4, 6) / 10)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()


@pytest.mark.parametrize("kind", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_c06_a_step_in_tensor_parallel(device, mesh, kind):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def make():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)).to(device)
        parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, **kind)

        def step(x, y):
            optimizer.zero_grad()
            loss = (net(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, [net, optimizer]

    both = side_by_side(make)
    for n in range(6):
        both(fixed(device, 4, 6, seed=n), fixed(device, 4, 6, seed=20 + n))
    assert counts(both) == (1, 1, 5), reasons(both)
