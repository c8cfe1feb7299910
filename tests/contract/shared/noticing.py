"""C7-C10: noticing. A function relies on much more than its arguments: on classes and modules, containers, metadata of
tensors, hooks, an optimizer's settings. Whatever of it changes between two calls, the next call is eager's."""

import copy

import pytest
import torch
from torch import nn

from phonograph.testing import assert_same
from tests.helpers import changeable, counts, ramp, side_by_side


@pytest.fixture(autouse=True)
def globals_as_before(request):
    before = dict(vars(request.module))
    yield
    vars(request.module).update(before)


class Table(list):
    """Situations for `parametrize`: functions that make (a function, what changes something for it)."""

    def __call__(self, make, *marks):
        self.append(pytest.param(make, id=make.__name__, marks=marks))
        return make

    def but(self, *marks):
        return lambda make: self(make, *marks)


def assert_noticed(device, make):
    """The change comes while the function is being replayed (or runs live anyway), and a caller can see it."""
    both, change = changeable(lambda: make(device))
    for n in range(3):
        both(ramp(device, 4, start=n))
    before = both(ramp(device, 4)).live
    live, _, replayed = counts(both)
    assert replayed == 3 or live == 4, "neither replayed nor refused"
    change()
    with pytest.raises(AssertionError):
        assert_same(both(ramp(device, 4)).live, before)
    for n in range(3):
        both(ramp(device, 4, start=n))


def set_in_a_copy(holder, name, key):
    setattr(holder, name, copy.copy(getattr(holder, name)))
    getattr(holder, name)[key] = 3.0


def loader_of(dataset):
    return torch.utils.data.DataLoader(dataset, sampler=[])


def many_layers(device):
    """So many modules that not each is looked at before each replay."""
    layers = [nn.Linear(4, 4, bias=False, device=device).requires_grad_(False) for _ in range(70)]
    for layer in layers:
        nn.init.eye_(layer.weight)
    return layers


class Hidden:
    """Something in the state that is not to be compared."""

    __slots__ = ("it",)

    def __init__(self, it):
        self.it = it


def backward_of(make_net):
    """A `make`: the loss with its backward, and (net, ) as the state."""

    def make():
        net = make_net()

        def step(x):
            net.zero_grad()
            loss = net(x).pow(2).sum()
            loss.backward()
            return loss.detach()

        return step, [net]

    return make


def steps(device, step_of, *, momentum=0.0, optimizer=torch.optim.SGD, **options):
    """A step of a small model beside a live one; the state is (model, optimizer)."""

    def make():
        net = nn.Linear(4, 2, device=device)
        chosen = optimizer(net.parameters(), lr=0.1, **({"momentum": momentum} if momentum else {}), **options)

        def usual(x):
            chosen.zero_grad()
            loss = net(x).pow(2).mean()
            loss.backward()
            chosen.step()
            return loss.detach()

        return step_of(net, chosen, usual), [net, chosen]

    return side_by_side(make)


def usual_step(net, optimizer, usual):
    return usual


def data(device, n):
    return torch.randn(3, 4, device=device, generator=torch.Generator(device).manual_seed(n))
