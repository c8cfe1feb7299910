"""C6: gradients of a tensor that a recorded call uses several times, and others use as well, are added up as in eager, because
that rounds: those of what comes later first, one by one."""

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.autograd import graph
from phonograph.testing import assert_same
from tests.helpers import may_run_live


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return x * 0.37 + self.b(torch.tanh(self.a(x))) * x.sigmoid()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.inner = nn.Embedding(20, 16), nn.Linear(16, 16)

    def forward(self, x):
        return torch.tanh(self.inner(self.embedding((x.abs() * 7).long().clamp(0, 19)))) @ self.embedding.weight.T


class Unrolled(nn.Module):
    def __init__(self, times=20):
        super().__init__()
        self.cell, self.times = nn.Linear(16, 16), times

    def forward(self, x):
        for _ in range(self.times):
            x = torch.tanh(self.cell(x)) + x * 0.5
        return x


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = Residual(), nn.Linear(16, 16)

    def forward(self, x):
        h = self.inner(x) * x
        return h, self.head(h) * x + self.head(x)


def used_after(stem, net, x):
    h = stem(x)
    (net(h) + h.exp()).sum().backward()


def used_before_and_after(stem, net, x):
    h = stem(x)
    e = h.exp()
    (net(h) * e + h.sin()).sum().backward()


def called_twice(stem, net, x):
    net(net(stem(x))).square().sum().backward()


def called_for_two(stem, net, x):
    (net(x).softmax(-1) * net(x.flip(0))).sum().backward()


def decayed(stem, net, x):
    (net(stem(x)).square().sum() + sum(p.square().sum() for p in net.parameters())).backward()


def one_after_the_other(stem, net, x):
    h = stem(x)
    y = net(h)
    (y * h.exp()).sum().backward(retain_graph=True)
    (y * h).sum().backward()


def of_what_is_chosen(stem, net, x):
    h = stem(x)
    y = net(h)
    (g,) = torch.autograd.grad((y * h.exp()).sum(), h, retain_graph=True)
    (y * g).sum().backward()


def of_parameters(stem, net, x):
    h, parameters = stem(x), [*net.parameters()][:1]
    loss = (net(h) * h.exp()).sum() + sum(p.pow(3).sum() for p in parameters)
    for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        p.grad = g


def of_two_results(stem, net, x):
    h = stem(x)
    a, b = net(h)
    (a * b + h.exp()).sum().backward()


def of_one_result(stem, net, x):
    h = stem(x)
    (net(h)[0] + h.exp()).sum().backward()


PROGRAMS = [
    *((Residual, use) for use in (used_after, used_before_and_after, called_twice, decayed, one_after_the_other)),
    *((Residual, use) for use in (of_what_is_chosen, of_parameters)),
    *((Tied, use) for use in (called_for_two,)),
    *((Unrolled, use) for use in (called_twice, decayed, of_parameters)),
    *((Several, use) for use in (of_two_results, of_one_result)),
]


def played(device, kind, use, calls=5):
    """The gradients after each step of a recorded module, and of one that is live; and the recorded one."""
    found = []
    for recorded in (False, True):
        torch.manual_seed(0)
        stem, net = nn.Linear(16, 16).to(device), kind().to(device)
        net = pg.record(net, keep="always", fallback="live") if recorded else net
        parameters, seen = [*stem.parameters(), *net.parameters()], []
        for n in range(calls):
            use(stem, net, torch.randn(6, 16, generator=torch.Generator().manual_seed(n)).to(device))
            seen.append([p.grad if p.grad is None else p.grad.clone() for p in parameters])
            if n == calls // 2:  # the others are added to what is there
                for p in parameters:
                    p.grad = None
        found.append(seen)
    return *found, net


@may_run_live
@pytest.mark.parametrize(("kind", "use"), PROGRAMS, ids=[f"{kind.__name__}-{use.__name__}" for kind, use in PROGRAMS])
def test_c06_gradients_are_added_up_in_eagers_order(device, kind, use):
    live, recorded, net = played(device, kind, use)
    assert_same(recorded, live)
    assert pg.stats(net).replayed >= 4, pg.explain(net)


@may_run_live
def test_c06_gradients_of_a_tensor_that_is_used_very_often_are_added_up_within(device, monkeypatch):
    monkeypatch.setattr(graph, "MANY", 10)
    live, recorded, net = played(device, Unrolled, decayed)
    assert_same(recorded, live, tolerance=1e-5)
    assert pg.stats(net).replayed >= 4, pg.explain(net)


def test_c06_what_a_call_uses_once_gets_one_gradient(device):
    net = pg.record(nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(device), keep="always")
    x = torch.ones(2, 4, device=device, requires_grad=True)
    y = net(x)
    for _ in range(3):
        y = net(x)
        y.sum().backward()
    assert len(y.grad_fn.next_functions) == 3  # the input, a weight and a bias, each used once
