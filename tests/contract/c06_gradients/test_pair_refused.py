"""C6: what cannot be recorded as a pair is right all the same."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.shared.pairs import ActorAndCritic, Both, Tanh, assert_recorded, batch, grads, perceptron
from tests.helpers import may_run_live


@may_run_live
def test_c06_a_backward_that_is_differentiated(device):
    both = Both(perceptron(device))
    for n in range(6):
        x, _ = batch(device, n)
        for module in both:
            module.zero_grad()
            leaf = x.clone().requires_grad_()
            (g,) = torch.autograd.grad(module(leaf).sum(), leaf, create_graph=True)
            g.square().sum().backward()
        both.check()
    assert "create_graph" in pg.explain(both.recorded)


@may_run_live
def test_c06_a_backward_that_is_differentiated_only_later_says_so(device):
    both = Both(perceptron(device))
    for n in range(4):
        both.learn(*batch(device, n))
    x, y = batch(device, 0)
    for _ in range(4):  # from the second on it is live
        penalties = [torch.autograd.grad(m(x).square().sum(), m[0].weight, create_graph=True)[0] for m in both]
        assert_same(*penalties)
        both.learn(x, y)
    assert "create_graph" in pg.explain(both.recorded)


def test_c06_one_function_with_its_backward_inside_and_outside(device):
    """Which of the two a call is says its signature."""

    def make():
        net = perceptron(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(x, y, train):
            optimizer.zero_grad()
            loss = F.mse_loss(net(x), y)
            if train:
                loss.backward()
                optimizer.step()
                return loss.detach()
            return loss

        return net, step

    (ours, step), (theirs, live) = make(), make()
    step = pg.record(step, warmup=1)
    for n in range(12):
        x, y = batch(device, n)
        losses = [f(x, y, n % 2 == 1) for f in (step, live)]
        assert_same(*losses)
        if n % 2 == 0:
            for loss in losses:
                loss.backward()
        assert_same([grads(ours), list(ours.parameters())], [grads(theirs), list(theirs.parameters())])
    assert pg.stats(step).replayed >= 8, pg.explain(step)


class KeepingTheArgument(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.x = x
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.x * grad


class KeepingTheResult(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.y = x.exp()
        return ctx.y

    @staticmethod
    def backward(ctx, grad):
        return ctx.y * grad


def hooked(weight, x):
    h = (weight * x).relu()
    t = h * 1
    t.register_hook(lambda g: g * h.detach())
    return t * weight


HELD = {
    "ctx, on saved memory": lambda weight, x: KeepingTheArgument.apply((weight * x).relu()),
    "ctx, an argument": lambda weight, x: KeepingTheArgument.apply(x) * weight,
    "ctx, a result": lambda weight, x: KeepingTheResult.apply(weight * x),
    "a hook": hooked,
    "a variable of a recomputed part": lambda weight, x: (
        lambda r: checkpoint(lambda h: h.tanh() * r, weight * x, use_reentrant=False, preserve_rng_state=False) * r
    )((weight * x).sigmoid()),
    "an argument of a recomputed part": lambda weight, x: checkpoint(
        lambda h, c: h * c, weight * x, c=(weight * x).relu(), use_reentrant=False, preserve_rng_state=False
    ),
    "the recomputed part's own argument": lambda weight, x: checkpoint(
        lambda w: w * x, weight, use_reentrant=False, preserve_rng_state=False
    ),
}


@may_run_live
@pytest.mark.parametrize("function", HELD.values(), ids=HELD)
def test_c06_what_python_code_keeps_for_the_backward(device, function):
    """A tensor that autograd does not know of would be that of the capture in each later backward."""
    weights = [nn.Parameter(torch.ones(3, device=device)) for _ in range(2)]
    recorded = pg.record(lambda x: function(weights[0], x), warmup=1)
    for n in range(6):
        for f, weight in ((recorded, weights[0]), (lambda x: function(weights[1], x), weights[1])):
            weight.grad = None
            for out in [f(torch.full((3,), 0.1 * (n + i), device=device)) for i in range(2)]:
                out.sum().backward()
        assert_same(weights[0].grad, weights[1].grad)
    if function not in (HELD["ctx, a result"], HELD["a hook"]):
        assert pg.stats(recorded).replayed == 11, pg.explain(recorded)


def test_c06_an_argument_that_is_written_while_code_keeps_it(device):
    """Autograd does not know of it: eager's recomputation finds it as it is at the backward."""
    weights = [nn.Parameter(torch.ones(3, device=device)) for _ in range(2)]

    def make(weight):
        return lambda x: checkpoint(lambda w: w * x, weight, use_reentrant=False).sum()

    recorded = pg.record(make(weights[0]), warmup=1)
    for n in range(6):
        for f, weight in ((recorded, weights[0]), (make(weights[1]), weights[1])):
            weight.grad = None
            x = torch.full((3,), 0.1 * n, device=device)
            out = f(x)
            if n % 2:
                x.add_(1)
            out.backward()
        assert_same(weights[0].grad, weights[1].grad)
    assert pg.stats(recorded).replayed == 5, pg.explain(recorded)


def saves_products(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("order", ["one by one", "both forwards first"])
def test_c06_selective_recompute(device, order):
    """What is not recomputed is kept by torch's own code, which uses it up in the backward."""
    contexts = partial(create_selective_checkpoint_contexts, saves_products)
    net = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False), nn.Dropout(0.4), nn.Tanh())
    both = Both(net.to(device))
    recorded = pg.record(lambda x: checkpoint(both.recorded, x, use_reentrant=False, context_fn=contexts) * 2, warmup=1)
    pg.reset(both.recorded)
    for n in range(7):
        results = []
        for f, net in (
            (recorded, both.recorded),
            (lambda x: checkpoint(both.live, x, use_reentrant=False, context_fn=contexts) * 2, both.live),
        ):
            net.zero_grad()
            torch.manual_seed(n)
            outs = []
            for i in range(2):
                outs.append(f(torch.full((4, 6), 0.1 * (n + i), device=device)))
                if order == "one by one":
                    outs[-1].sum().backward()
            if order == "both forwards first":
                for out in outs:
                    out.sum().backward()
            results.append(([out.detach().clone() for out in outs], [p.grad for p in net.parameters()]))
            results[-1] += (torch.rand(1, device=device),)
        assert_same(*results)
    assert pg.stats(recorded).replayed == 13, pg.explain(recorded)
    assert pg.stats(recorded).recorded == (2 if order == "both forwards first" else 1)


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("retain", [True, False])
def test_c06_results_with_separate_backwards(device, retain, bounded):
    torch.manual_seed(0)
    both = Both(ActorAndCritic(bounded).to(device))
    for n in range(6):
        x, y = batch(device, n)
        for module in both:
            module.zero_grad()
            policy, value = module(x)
            value.square().sum().backward(retain_graph=retain)
            with torch.no_grad():
                module.critic.weight.sub_(0.1)  # no business of the other's
            F.mse_loss(policy, y).backward()
        both.check()
    assert_recorded(both, 5)
    assert both.stats.recorded == 1, pg.explain(both.recorded)


def test_c06_a_result_that_is_never_used(device):
    """What a forward has saved is free once the loss has run backward, though the other results are still there."""

    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x, y):
            out = self.second(self.first(x).tanh())
            return {"loss": F.mse_loss(out, y), "out": out.clone()}

    torch.manual_seed(0)
    both = Both(WithLoss().to(device))
    kept = {}
    for n in range(8):
        x, y = batch(device, n)
        for module in both:
            module.zero_grad()
            kept[module] = module(x, y)
            kept[module]["loss"].backward()
        assert_same(kept[both.recorded], kept[both.live])
        both.check()
    assert_recorded(both, 7)
    assert both.stats.recorded == 1, pg.explain(both.recorded)


def test_c06_a_backward_twice_where_nothing_is_saved(device):
    weight = nn.Parameter(torch.ones(3, device=device))
    f = pg.record(lambda x: x + weight, warmup=1)
    for n in range(5):
        weight.grad = None
        total = f(torch.full((3,), float(n), device=device)).sum()
        total.backward()
        total.backward()
        assert_same(weight.grad, torch.full((3,), 2.0, device=device))


def test_c06_parameters_are_frozen_between_forward_and_backward(device):
    """As loops of adversarial networks do."""
    both = Both(perceptron(device))
    for n in range(6):
        x, y = batch(device, n)
        for module in both:
            module.zero_grad()
            leaf = x.clone().requires_grad_()
            loss = F.mse_loss(module(leaf), y)
            module.requires_grad_(False)
            loss.backward()
            module.requires_grad_(True)
            module.zero_grad()
    assert_recorded(both, 5)


def test_c06_weights_in_one_memory_are_written_each_for_itself(device):
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            flat = torch.ones(6, device=device)
            self.a, self.b = nn.Parameter(torch.ones(3, device=device)), nn.Parameter(torch.ones(3, device=device))
            self.a.data, self.b.data = flat[:3], flat[3:]

        def forward(self, x):
            return x * self.a + self.b

    module = pg.record(Flat(), warmup=1)
    for n in range(4):
        x = torch.full((3,), float(n), device=device, requires_grad=True)
        out = module(x)
        with torch.no_grad():
            module.b.mul_(1.5)
        out.sum().backward()
        out = module(x.detach().requires_grad_())
        with torch.no_grad():
            module.a.mul_(1.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_c06_a_detached_result_beside_the_one_with_a_history(device):
    torch.manual_seed(0)
    both = Both(nn.Linear(4, 3).to(device))
    seen = []

    def detaching(module, args, out):
        return out.tanh(), out

    for module in both:
        module.register_forward_hook(detaching)
    for n in range(5):
        x, _ = batch(device, n)
        for module in both:
            module.zero_grad()
            first, second = module(x)
            seen.append((first.requires_grad, second.requires_grad))
            (first * second).sum().backward()
        both.check()
    assert set(seen) == {(True, True)}


@may_run_live
@pytest.mark.parametrize("how", ["detached", "a part", "halves", "saved"])
def test_c06_results_that_share_memory_and_are_written(device, how):
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.ones(4, device=device)) for _ in range(2)]

    def make(weight):
        def f(x):
            h = (weight * x).exp() if how == "saved" else weight * x
            return {"detached": (h, h.detach()), "a part": (h, h[:2]), "halves": h.split(2), "saved": (h * 2, h.detach())}[how]

        return f

    recorded = pg.record(make(weights[0]), warmup=1)
    for n in range(5):
        found = []
        for f, weight in ((recorded, weights[0]), (make(weights[1]), weights[1])):
            weight.grad = None
            a, b = f(torch.full((4,), 0.1 * n, device=device))
            raised = []
            try:
                if how != "halves":  # eager forbids to write one, which a recording does not
                    (b if how == "saved" else a).mul_(2)
                (a.sum() + b.sum()).backward()
            except RuntimeError as e:
                raised.append("inplace" in str(e))
            found.append((b.requires_grad, b.detach(), weight.grad, raised))
        assert_same(*found)


@may_run_live
def test_c06_an_argument_that_is_asked_where_it_comes_from(device):
    weight = nn.Parameter(torch.ones(3, device=device))

    def f(x):
        return weight * x * (1.0 if x.is_leaf else 100.0)

    def g(x):
        x.retain_grad()
        return weight * x

    for function in (f, g):
        recorded = pg.record(function, warmup=1)
        for n in range(4):
            leaf = torch.full((3,), float(n), device=device, requires_grad=True)
            middle = leaf * 1
            if function is f:
                assert_same(recorded(leaf), function(leaf))
            else:
                recorded(middle).sum().backward()
                assert_same(middle.grad, torch.ones(3, device=device))


@may_run_live
def test_c06_a_tensor_outside_that_has_a_history(device):
    """Its gradient goes on to where it came from, through nodes that are no recording's, and run backward once."""
    weights = [nn.Parameter(torch.full((3,), 2.0, device=device)) for _ in range(2)]
    middles = [None, None]
    recorded = pg.record(lambda x: middles[0] * x + weights[0], warmup=0)
    for n in range(8):
        x = torch.full((3,), float(n), device=device)
        raised = []
        for i, f in enumerate((recorded, lambda x: middles[1] * x + weights[1])):
            weights[i].grad = None
            if n % 3 == 0:
                middles[i] = weights[i].exp()
            try:
                f(x).sum().backward()
            except RuntimeError as e:
                raised.append("second time" in str(e))
        assert raised == ([] if n % 3 == 0 else [True, True])
        assert n % 3 or torch.equal(weights[0].grad, weights[1].grad)


@may_run_live
def test_c06_batched_gradients(device):
    both = Both(perceptron(device))
    for n in range(5):
        x, _ = batch(device, n)
        found = []
        for module in both:
            leaf = x.clone().requires_grad_()
            out = module(leaf).sum(0)
            found.append(torch.autograd.grad(out, leaf, torch.eye(3, device=device), is_grads_batched=True))
        assert_same(*found)


@pytest.mark.parametrize("many", [12, 20])
@may_run_live
def test_c06_more_forwards_in_flight_than_recordings(device, many):
    both = Both(nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(device))
    for n in range(4):
        x, y = batch(device, n)
        for module in both:
            module.zero_grad()
            sum(F.mse_loss(module(x + i)[:, :3], y) for i in range(many)).backward()
        both.check()
    assert (not both.stats.refusals) == (many == 12), pg.explain(both.recorded)
    assert both.stats.recorded <= 17


class AttentionWithDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = (t.view(2, 8, 2, 8).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3 if self.training else 0.0)


@pytest.mark.parametrize("flying", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_c06_dropout_in_attention(device, dtype, flying):
    """Its seed is drawn in the forward, and read in the backward, where it lies."""
    torch.manual_seed(0)
    both = Both(AttentionWithDropout().to(device, dtype))
    for n in range(8):
        for module in both:
            module.zero_grad()
            torch.manual_seed(n)
            xs = [torch.randn(2, 8, 16, device=device).to(dtype) for _ in range(flying)]
            outs = [module(x) for x in xs]
            for out in outs:
                out.float().square().sum().backward()
        both.check()
    assert_recorded(both, 7 * flying)


def test_c06_a_saved_conjugate(device):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.ones(3, device=device))
    f = pg.record(lambda x: (weight * x).to(torch.complex64).mul(1 + 2j).conj().abs(), warmup=1)
    for n in range(10):
        f(torch.full((3,), float(n), device=device)).sum().backward()
    assert pg.stats(f).recorded == 1, pg.explain(f)


@may_run_live
def test_c16_a_compiled_module_stays_compiled(device):
    calls = []

    def backend(graph, examples):
        calls.append(graph)
        return graph.forward

    net = Tanh().to(device)
    net.compile(backend=backend)
    pg.record(net, warmup=1)
    for n in range(3):
        with torch.no_grad():
            net(batch(device, n)[0])
    assert calls
    pg.reset(net)
    assert net._compiled_call_impl is not None


NORMS = {
    "batch": lambda x: F.batch_norm(x, None, None, training=True),
    "group": lambda x: F.group_norm(x, 2),
    "layer": lambda x: F.layer_norm(x, (5,)),
    "root mean square": lambda x: F.rms_norm(x, (5,)),
    "instance": F.instance_norm,
}


@may_run_live
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_c06_tangents_of_norms_are_rounded_as_live(device, norm):
    """torch takes another formula for them where a mode is told of each operator."""

    def tangent(x, t):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(norm(forward_ad.make_dual(x, t))).tangent

    recorded = pg.record(tangent, warmup=1)
    for _ in range(4):
        x, t = torch.randn(3, 4, 5, device=device), torch.randn(3, 4, 5, device=device)
        assert_same(recorded(x, t), tangent(x, t))


@may_run_live
def test_c06_a_gradient_has_the_strides_of_live(device):
    """torch works out of place in the backward of `ormqr` where a mode is told of each operator."""

    def f(q, tau, x):
        return torch.autograd.grad(torch.ormqr(q, tau, x, transpose=True).square().sum(), (q, tau, x))

    recorded = pg.record(f, warmup=1)
    for _ in range(4):
        given = [torch.randn(5, 5, device=device).mT, torch.randn(5, device=device), torch.randn(5, 5, device=device)]
        given = [t.detach().requires_grad_() for t in given]
        assert_same(recorded(*given), f(*given))
