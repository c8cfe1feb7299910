"""C8: what torch keeps of a leaf beside its memory."""

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import ramp


def reshaped_by_data(net):
    net.weight.data, net.bias.data = net.weight.data[:2].clone(), net.bias.data[:2].clone()


def reshaped_by_resize(net):
    for p, size in ((net.weight, (2, 4)), (net.bias, (2,))):
        p.requires_grad_(False).resize_(size).requires_grad_()


@pytest.mark.parametrize("change", [reshaped_by_data, reshaped_by_resize])
@pytest.mark.parametrize("how", ["pair", "function", "outside", "another batch"])
def test_c08_a_parameter_of_another_size(device, change, how):
    """Autograd's node for its gradient must go, though a recording has the graph that it is of."""
    torch.manual_seed(0)
    both = []
    for recorded in (False, True):
        net = nn.Linear(4, 3).to(device)
        both.append((net, (pg.record(net) if how == "pair" else pg.record(lambda x, net=net: net(x))) if recorded else net))
    both[1][0].load_state_dict(both[0][0].state_dict())
    for n in range(7):
        x = ramp(device, 6 if how == "another batch" and n > 3 else 5, 4)
        for net, called in both:
            net.zero_grad()
            if n == 4:
                change(net)
            (net if how == "outside" and n > 3 else called)(x).square().sum().backward()
        assert_same(both[1][0].weight.grad, both[0][0].weight.grad)
        assert_same(both[1][0].bias.grad, both[0][0].bias.grad)


def test_c06_hooks_of_a_parameter_of_another_size_stay(device):
    def run(record):
        net, seen = nn.Linear(4, 3).to(device), []
        net.weight.register_hook(lambda g: seen.append(("gradient", g.shape)))
        net.weight.register_post_accumulate_grad_hook(lambda p: seen.append(("parameter", p.grad.shape)))
        called = record(net)
        for n in range(7):
            if n == 4:
                net.zero_grad()
                reshaped_by_data(net)
            called(ramp(device, 5, 4)).sum().backward()
        return seen, net.weight._version

    assert run(pg.record) == run(lambda net: net)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this release of torch has no grad_dtype")
@pytest.mark.parametrize(("first", "then"), [(torch.float32, None), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("how", ["step", "forward"])
def test_c08_the_type_of_a_parameters_gradient(device, how, first, then):
    def run(record):
        torch.manual_seed(0)
        net = nn.Linear(4, 3).to(device, torch.bfloat16)

        def forward(x):
            return net(x) + net(x * 0.3) + net(x * 0.7)

        def step(x):
            net.zero_grad()
            forward(x).square().sum().backward()

        called = record(step if how == "step" else forward)
        found = []
        for n in range(7):
            if n in (0, 4):
                net.zero_grad()
                for p in net.parameters():
                    p.grad_dtype = then if n else first
            y = called(torch.randn(5, 4, device=device).bfloat16())
            if how == "forward":
                net.zero_grad()
                y.square().sum().backward()
            found.append([p.grad.clone() for p in net.parameters()])
        return found

    assert_same(run(lambda f: pg.record(f, warmup=1)), run(lambda f: f))


@pytest.mark.parametrize("setting", ["dtype", "cache"])
def test_c07_what_autocast_will_go_by_where_it_is_off(device, setting):
    """A function that turns it on goes by what was set outside."""
    usual = torch.get_autocast_dtype(device.type)
    other = torch.float16 if usual is torch.bfloat16 else torch.bfloat16
    weight = torch.ones(4, 4, device=device)

    def f(x):
        with torch.autocast(device.type):
            return x @ weight, torch.is_autocast_cache_enabled()

    g, x = pg.record(f, warmup=1), torch.ones(4, 4, device=device)
    try:
        for n in range(9):
            if setting == "dtype":
                torch.set_autocast_dtype(device.type, other if n // 3 == 1 else usual)
            else:
                torch.set_autocast_cache_enabled(n // 3 != 1)
            assert_same(g(x), f(x))
    finally:
        torch.set_autocast_dtype(device.type, usual)
        torch.set_autocast_cache_enabled(True)
    assert pg.stats(g).replayed >= 5, pg.explain(g)
