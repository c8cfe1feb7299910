"""C8: what tensors and modules are."""

import functools

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from tests.contract.shared.noticing import Hidden, Table, assert_noticed, backward_of, globals_as_before, many_layers  # noqa: F401
from tests.helpers import may_run_live, ramp, side_by_side

metadata = Table()


@metadata
def tensor_transposed_in_place(device):
    w = ramp(device, 4, 4)
    return lambda x: x @ w, lambda: w.t_()


@metadata
def tensor_whose_data_is_its_own_transpose(device):
    w = ramp(device, 4, 4)
    return lambda x: x @ w, lambda: setattr(w, "data", w.data.t())


@metadata
def parameter_transposed_in_place(device):
    w = nn.Parameter(ramp(device, 4, 4))
    return lambda x: (x @ w).detach(), torch.no_grad()(lambda: w.t_())


@metadata
def tensor_that_requires_grad(device):
    w = ramp(device, 4)
    return lambda x: (x * w.detach(), w.requires_grad), lambda: w.requires_grad_()


@metadata
def tensor_frozen(device):
    w, v = ramp(device, 4).requires_grad_(), ramp(device, 4).requires_grad_()

    def f(x):
        w.grad = v.grad = None
        (w * v * x).sum().backward()
        return x + (0 if v.grad is None else v.grad)

    return f, lambda: v.requires_grad_(False)


@metadata
def gradient_that_is_there_now(device):
    w = ramp(device, 4).requires_grad_()
    return lambda x: x * (2 if w.grad is None else 3), lambda: setattr(w, "grad", torch.ones(4, device=device))


@metadata
def gradient_that_is_gone(device):
    w = ramp(device, 4).requires_grad_()
    w.grad = torch.ones(4, device=device)
    return lambda x: x * (2 if w.grad is None else 3), lambda: setattr(w, "grad", None)


class Double(nn.Module):
    def forward(self, x):
        return x * 2


@metadata
def parameter_swapped_among_many(device):
    net = nn.Sequential(*many_layers(device))
    other = nn.Parameter(torch.eye(4, device=device) * 3, requires_grad=False)
    return lambda x: net(x), lambda: torch.utils.swap_tensors(net[69].weight, other)


@metadata
def buffer_whose_data_is_replaced_among_many(device):
    net = nn.Sequential(*(nn.BatchNorm1d(4, device=device) for _ in range(40))).eval().requires_grad_(False)
    return lambda x: net(x[None]), lambda: setattr(net[39].running_mean, "data", torch.ones(4, device=device))


@metadata
def layer_inserted_among_many(device):
    net = nn.Sequential(*many_layers(device))
    return lambda x: net(x), lambda: net.insert(2, Double())


@metadata
def layer_appended_to_many(device):
    net = nn.Sequential(*many_layers(device))
    return lambda x: net(x), lambda: net.insert(70, Double())


@metadata
def layer_inserted_in_a_list_of_many(device):
    layers = nn.ModuleList(many_layers(device))
    return lambda x: functools.reduce(lambda x, layer: layer(x), layers, x), lambda: layers.insert(1, Double())


@metadata
def layer_popped_beside_many(device):
    net, more = nn.Sequential(*many_layers(device)), nn.ModuleDict({"a": Double(), "b": Double()})
    return lambda x: functools.reduce(lambda x, layer: layer(x), more.values(), net(x)), lambda: more.pop("b")


@pytest.mark.parametrize("make", metadata)
def test_c08_what_tensors_and_modules_are_has_changed(device, make):
    assert_noticed(device, make)


def test_c08_one_of_many_weights_is_frozen_and_thawed(device):
    both = side_by_side(backward_of(lambda: nn.Sequential(*many_layers(device)).requires_grad_()))
    for n in range(10):
        if n in (4, 7):
            both.change(lambda state: state[0][40].weight.requires_grad_(n == 7))
        both(ramp(device, 4, start=n))


@may_run_live
def test_c08_a_parametrization_that_is_cached_for_a_while(device):
    def make():
        net = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4, device=device)).requires_grad_(False)
        return lambda x: net(x), Hidden(net)

    both = side_by_side(make)
    for n in range(4):
        both(ramp(device, 4, start=n))
    with parametrize.cached():
        for n in range(3):
            both(ramp(device, 4, start=n))
            both.change(lambda hidden: hidden.it.parametrizations.weight.original0.mul_(2))
    both(ramp(device, 4))


COMPUTED = {
    "parametrized": (
        lambda net: parametrize.register_parametrization(net, "weight", Double()),
        lambda net: parametrize.remove_parametrizations(net, "weight"),
    ),
    "pruned": (lambda net: prune.l1_unstructured(net, "weight", 0.5), lambda net: prune.remove(net, "weight")),
}


@may_run_live
@pytest.mark.parametrize(("on", "off"), COMPUTED.values(), ids=COMPUTED)
def test_c08_a_weight_that_is_computed_for_a_while(device, on, off):
    def make():
        step, (net,) = backward_of(lambda: nn.Linear(4, 4, device=device))()
        return lambda x: (step(x), [p.grad for p in net.parameters()]), Hidden(net)

    both = side_by_side(make)
    for n in range(10):
        if n in (4, 7):
            both.change(lambda hidden: (on if n == 4 else off)(hidden.it))
        both(ramp(device, 4, start=n))
