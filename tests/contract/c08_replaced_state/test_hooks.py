"""C8: hooks that come and go."""

import contextlib

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.shared.noticing import Hidden, backward_of, globals_as_before, many_layers  # noqa: F401
from tests.helpers import may_run_live, ramp, side_by_side


def linear(device):
    return nn.Linear(4, 1, device=device)


def scale_grad(parameter, by):
    parameter.grad.mul_(by)


HOOKS = {
    "of a parameter": lambda net, by: net.weight.register_hook(lambda grad: grad * by),
    "of a parameter, after accumulation": lambda net, by: net.weight.register_post_accumulate_grad_hook(
        lambda p: scale_grad(p, by)
    ),
    "of a module": lambda net, by: net.register_forward_hook(lambda module, inputs, result: result * by),
    "of a module's backward": lambda net, by: net.register_full_backward_hook(
        lambda module, given, grads: tuple(None if g is None else g * by for g in given)
    ),
}


@may_run_live
@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS)
def test_c08_a_hook_replaced_by_another_with_the_same_code(device, register):
    both = side_by_side(backward_of(lambda: nn.Sequential(nn.Linear(4, 4, device=device), linear(device))))
    both.change(lambda state: state.append(Hidden(register(state[0][1], 2))))
    for n in range(9):
        if n in (4, 7):
            both.change(lambda state: state[1].it.remove())
        if n == 4:
            both.change(lambda state: setattr(state[1], "it", register(state[0][1], 10)))
        both(ramp(device, 4, start=n))


def test_c08_a_hook_that_a_tensor_gets_later(device):
    w = ramp(device, 4).requires_grad_()

    def f(x):
        w.grad = None
        (w * x).sum().backward()

    f = pg.record(f, warmup=1)
    for n in range(7):
        if n == 4:
            w.register_hook(lambda grad: grad * 3)
        f(ramp(device, 4))
        assert_same(w.grad, ramp(device, 4) * (3 if n >= 4 else 1))


def test_c08_a_hook_that_the_function_itself_registers(device):
    w = torch.ones(2, device=device, requires_grad=True)
    f = pg.record(lambda x: (w.register_hook(lambda grad: grad * 2), x * 2)[1], warmup=1)
    for n in range(4):
        with pytest.warns(pg.RunsLive) if n == 1 else contextlib.nullcontext():
            f(torch.ones(2, device=device))
    w.sum().backward()
    assert w.grad.tolist() == [16.0, 16.0]


@may_run_live
def test_c09_hooks_that_count(device):
    net, seen = linear(device), []
    net.weight.register_hook(lambda grad: seen.append("weight"))
    torch.autograd.graph.register_multi_grad_hook(list(net.parameters()), lambda grads: seen.append("all"))
    f = pg.record(lambda x: net(x).sum().backward(), warmup=1)
    for n in range(1, 6):
        f(ramp(device, 4))
        assert (seen.count("weight"), seen.count("all")) == (n, n)


@may_run_live
def test_c08_a_backward_hook_of_one_of_many_modules(device):
    both = side_by_side(backward_of(lambda: nn.Sequential(*many_layers(device)).requires_grad_()))

    def tripled(module, given, grads):
        return tuple(None if g is None else g * 3 for g in given)

    for n in range(8):
        if n == 4:
            both.change(lambda state: state[0][20].register_full_backward_hook(tripled))
        both(ramp(device, 4, start=n) / 8)


@may_run_live
def test_c07_hooks_around_saved_tensors(device):
    both = side_by_side(backward_of(lambda: linear(device)))
    for n in range(8):
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda t: t * 0.5, lambda t: t)
            if n in (4, 5, 7)
            else contextlib.nullcontext()
        ):
            both(ramp(device, 4, start=n))
