"""C6: autograd functions of the user's, recompute, and parts with a backward of their own."""

import gc
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.shared.pairs import ActorAndCritic, Both, batch, grads
from tests.helpers import may_run_live


class Keeping(torch.autograd.Function):
    """Keeps a tensor as an attribute of `ctx`, where autograd does not know of it."""

    @staticmethod
    def forward(ctx, x):
        ctx.x = x * 1
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.x * grad


class Saving(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.factor = 2
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return ctx.factor * x * grad


@may_run_live
@pytest.mark.parametrize("kind", [Keeping, Saving])
def test_c06_autograd_functions_of_the_users(device, kind):
    weight = nn.Parameter(torch.ones(3, device=device))
    f = pg.record(lambda x: kind.apply(weight * x), warmup=1)
    for n in range(6):
        xs = [torch.full((3,), float(n + i), device=device) for i in range(2)]
        weight.grad = None
        outs = [f(x) for x in xs]
        for out in outs:
            out.sum().backward()
        assert_same(weight.grad, sum(2 * x * x for x in xs))
    assert pg.stats(f).replayed > 6, pg.explain(f)


class Recomputed(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)
        self.options = options

    def part(self, x):
        return F.dropout(self.second(self.first(x).tanh()), self.options.get("p", 0.0))

    def forward(self, x):
        given = {k: v for k, v in self.options.items() if k != "p"}
        return checkpoint(self.part, x, **given).tanh()


RECOMPUTE = {
    "not reentrant": {"use_reentrant": False, "preserve_rng_state": False},
    "with the random state": {"use_reentrant": False},
    "with dropout": {"use_reentrant": False, "p": 0.5},
    "reentrant": {"use_reentrant": True, "preserve_rng_state": False},
    "reentrant, with dropout": {"use_reentrant": True, "p": 0.5},
}


@pytest.mark.parametrize("order", ["one by one", "both forwards first"])
@pytest.mark.parametrize("options", RECOMPUTE.values(), ids=RECOMPUTE)
def test_c06_recompute(device, options, order):
    """The recomputed part draws what its own forward has drawn, whatever was drawn since."""
    torch.manual_seed(0)
    both = Both(Recomputed(**options).to(device))
    for n in range(8):
        batches = [batch(device, 2 * n + i) for i in range(2)]
        results = []
        for module in both:
            module.zero_grad()
            torch.manual_seed(n)
            losses = []
            for x, y in batches:
                losses.append(F.mse_loss(module(x.clone().requires_grad_()), y))
                torch.rand(n, device=device)
                if order == "one by one":
                    losses[-1].backward()
            if order == "both forwards first":
                for loss in losses:
                    loss.backward()
            results.append((losses, torch.rand(1, device=device)))
        assert_same(*results)
        both.check()
    assert pg.stats(both.recorded).replayed > 8, pg.explain(both.recorded)
    assert not pg.stats(both.recorded).refusals
    assert pg.stats(both.recorded).recorded == (2 if order == "both forwards first" else 1)


NESTED = {
    "nested": lambda net, x: checkpoint(
        lambda h: checkpoint(lambda k: F.dropout(net[0](k), 0.3), h, use_reentrant=False).tanh(), x, use_reentrant=False
    ),
    "twice": lambda net, x: checkpoint(
        lambda h: F.dropout(h.tanh(), 0.4),
        checkpoint(lambda h: F.dropout(net[0](h), 0.3), x, use_reentrant=False),
        use_reentrant=False,
    ),
    "without arguments": lambda net, x: x.sum() + checkpoint(lambda: F.dropout(net[0].weight, 0.5), use_reentrant=False),
    "with attention": lambda net, x: checkpoint(
        lambda h: F.scaled_dot_product_attention(*(3 * [net[0](h).view(4, 1, 3, 2)]), dropout_p=0.4), x, use_reentrant=False
    ),
    "of several results": lambda net, x: sum(
        checkpoint(lambda h: F.dropout(net[0](h), 0.5).chunk(2, -1), x, use_reentrant=False)
    ),
    "not to its end": lambda net, x: checkpoint(
        lambda h: F.dropout(net[0](h), 0.5).exp(), x, use_reentrant=False, early_stop=False
    ),
}


@pytest.mark.parametrize("function", NESTED.values(), ids=NESTED)
def test_c06_parts_that_are_recomputed(device, function):
    both = Both(nn.Sequential(nn.Linear(6, 6)).to(device))
    recorded = pg.record(lambda x: function(both.recorded, x), warmup=1)
    pg.reset(both.recorded)
    for n in range(8):
        results = []
        for f, net in ((recorded, both.recorded), (lambda x: function(both.live, x), both.live)):
            net.zero_grad()
            torch.manual_seed(n)
            outs = [f(torch.full((4, 6), 0.1 * (n + i), device=device)) for i in range(2)]
            for out in reversed(outs):
                out.square().sum().backward()
            results.append((outs, [p.grad for p in net.parameters()], torch.rand(1, device=device)))
        assert_same(*results)
    assert pg.stats(recorded).replayed > 8, pg.explain(recorded)


REENTRANT = {
    "one after the other": lambda net, x: checkpoint(net[1], checkpoint(net[0], x, use_reentrant=True), use_reentrant=True),
    "nested": lambda net, x: checkpoint(
        lambda h: net[1](checkpoint(net[0], h, use_reentrant=True)).tanh(), x, use_reentrant=True
    ),
    "shared weights": lambda net, x: checkpoint(net[0], checkpoint(net[0], x, use_reentrant=True).tanh(), use_reentrant=True),
    "weights outside as well": lambda net, x: checkpoint(net[0], net[0](x).tanh(), use_reentrant=True),
    "one of each": lambda net, x: checkpoint(net[1], checkpoint(net[0], x, use_reentrant=True), use_reentrant=False),
    "with dropout": lambda net, x: checkpoint(lambda h: F.dropout(net[0](h), 0.5), net[1](x), use_reentrant=True),
    "several results": lambda net, x: sum(checkpoint(lambda h: net[0](h).chunk(2, -1), net[1](x), use_reentrant=True)),
    "only weights": lambda net, x: checkpoint(lambda w: w.tanh(), net[0].weight, use_reentrant=True).sum() * x.sum(),
}


def noted(total, g):
    total.mul_(0.9).add_(g.sum())


def noted_grad(total, p):
    total.mul_(0.9).add_(p.grad.sum())


@pytest.mark.parametrize("function", REENTRANT.values(), ids=REENTRANT)
def test_c06_parts_with_a_backward_of_their_own(device, function):
    """Gradients are added to those there are, in eager's order, and hooks run once."""
    torch.manual_seed(0)
    both = Both(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).to(device))
    recorded = pg.record(lambda x: function(both.recorded, x), warmup=1)
    pg.reset(both.recorded)
    heard = [[torch.zeros((), device=device) for _ in net.parameters()] for net in both]
    for net, totals in zip(both, heard, strict=True):
        for p, total in zip(net.parameters(), totals, strict=True):
            p.register_hook(partial(noted, total))
    for n in range(9):
        results = []
        for f, net in ((recorded, both.recorded), (lambda x: function(both.live, x), both.live)):
            if n % 3 == 0:
                net.zero_grad()
            torch.manual_seed(n)
            xs = [torch.full((4, 6), 0.1 * (n + i), device=device, requires_grad=True) for i in range(2)]
            outs = [f(x) for x in xs]
            for out in outs:
                out.square().sum().backward()
            results.append((outs, [x.grad for x in xs], [p.grad for p in net.parameters()], torch.rand(1, device=device)))
        assert_same(*results)
    assert_same(*heard)
    assert pg.stats(recorded).replayed > 8, pg.explain(recorded)
    assert sum(pg.stats(b).replayed for b in recorded._backwards) > 4, pg.explain(recorded)


@pytest.mark.parametrize("accumulated", [False, True])
def test_c06_a_hook_of_a_parameter_that_gets_no_gradient(device, accumulated):
    """A backward from one result only: eager does not call the hooks of the other's weights."""
    torch.manual_seed(0)
    both = Both(ActorAndCritic(True).to(device))
    heard = [[torch.zeros((), device=device) for _ in net.parameters()] for net in both]
    for net, totals in zip(both, heard, strict=True):
        for p, total in zip(net.parameters(), totals, strict=True):
            p.register_hook(partial(noted, total))
            p.register_post_accumulate_grad_hook(partial(noted_grad, total))
    for n in range(8):
        for net in both:
            if not accumulated:
                net.zero_grad()
            x, _ = batch(device, n)
            actor, critic = net(x)
            (actor if n % 2 else critic).sum().backward(retain_graph=n % 3 == 0)
            if n % 3 == 0:
                (net.actor.weight.sum() + actor.sum()).backward()
        both.check()
    assert_same(*heard)
    assert [len(p._backward_hooks) for p in both.recorded.parameters()] == [1, 1, 1, 1]


def test_c06_parts_with_a_backward_of_their_own_and_chosen_inputs(device):
    """An error, as in eager, from the first call on."""
    net = nn.Linear(6, 6).to(device)
    f = pg.record(lambda x: checkpoint(net, x, use_reentrant=True), warmup=1)
    for n in range(6):
        x = torch.full((4, 6), 0.1 * n, device=device, requires_grad=True)
        out = f(x).sum()
        if n == 3:
            out.backward()
        else:
            with pytest.raises(RuntimeError, match="incompatible with"):
                torch.autograd.grad(out, [x])


class Parts(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.linear, self.options = nn.Linear(4, 4), options

    def part(self, x, scale=None):
        return self.linear(x).tanh() if scale is None else self.linear(x) * scale

    def forward(self, x):
        if self.options["use_reentrant"]:
            return checkpoint(self.part, x, **self.options)
        return checkpoint(self.part, x, scale=x.detach().sigmoid(), **self.options)


@pytest.mark.parametrize("backwards", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_c17_a_module_that_recomputes_goes_when_it_is_dropped(device, reentrant, backwards):
    net = Parts(use_reentrant=reentrant).to(device)
    pg.record(net, warmup=1)
    for _ in range(5):
        out = net(torch.ones(2, 4, device=device, requires_grad=True))
        if backwards:
            out.sum().backward()
    assert pg.stats(net).replayed > 1
    ref = weakref.ref(net)
    del net, out
    gc.collect()
    assert ref() is None


def test_c06_recompute_after_another_seed(device):
    """The seed at the forward counts, not that at the backward, nor that at the capture."""
    both = Both(Recomputed(use_reentrant=False, p=0.5).to(device))
    for n in range(8):
        x, y = batch(device, n)
        for module in both:
            module.zero_grad()
            torch.manual_seed(n)
            loss = F.mse_loss(module(x), y)
            torch.manual_seed(100 - n)
            torch.rand(3, device=device)
            loss.backward()
        both.check()
    assert pg.stats(both.recorded).replayed > 3


def test_c06_a_part_with_a_backward_of_its_own_through_which_nothing_flows(device):
    """The argument and the weights before it get no gradient, rather than zeros."""
    torch.manual_seed(0)
    both = Both(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device))
    recorded = pg.record(
        lambda x: checkpoint(lambda h: both.recorded[1](h.detach()), both.recorded[0](x), use_reentrant=True), warmup=1
    )
    pg.reset(both.recorded)
    for n in range(6):
        both.recorded.zero_grad()
        x = torch.full((3, 4), 0.1 * n, device=device, requires_grad=True)
        recorded(x).sum().backward()
        assert [g is None for g in (x.grad, *grads(both.recorded))] == [True, True, True, False, False]
    assert pg.stats(recorded).replayed == 5, pg.explain(recorded)


class Noisy(torch.autograd.Function):
    """Draws in its backward."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.rand_like(grad)


@may_run_live
@pytest.mark.parametrize("recompute", [False, True])
def test_c06_a_backward_that_draws_numbers_of_its_own(device, recompute):
    def make(weight):
        def f(x):
            h = Noisy.apply(weight * x)
            return checkpoint(lambda h: F.dropout(h, 0.5).tanh(), h, use_reentrant=False) if recompute else h.tanh()

        return f

    weights = [nn.Parameter(torch.ones(64, device=device)) for _ in range(2)]
    recorded = pg.record(make(weights[0]), warmup=1)
    for n in range(6):
        results = []
        for f, weight in ((recorded, weights[0]), (make(weights[1]), weights[1])):
            weight.grad = None
            torch.manual_seed(n)
            f(torch.full((64,), 0.1 * n, device=device)).sum().backward()
            results.append((weight.grad, torch.rand(2, device=device)))
        assert_same(*results)
    assert pg.stats(recorded).replayed > 3
