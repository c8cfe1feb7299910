"""C6: results and saved tensors that are views of each other."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.shared.pairs import batch, grads, perceptron
from tests.helpers import may_run_live


class GivesWhatItSaved(torch.autograd.Function):
    """As a compiled backward does that works in the memory of what its forward has saved."""

    @staticmethod
    def forward(ctx, x, view, saved):
        ctx.view = view
        if saved == "for backward":
            ctx.save_for_backward(x.cos())
        else:
            ctx.kept = x if saved == "the argument" else x.cos()
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return ctx.view(*ctx.saved_tensors or (ctx.kept,)), None, None


VIEWED = {"itself": lambda t: t, "a view": lambda t: t.t(), "a part": lambda t: t[:1].expand(150, 150)}


@pytest.mark.parametrize("saved", ["for backward", "as an attribute", "the argument"])
@pytest.mark.parametrize("view", VIEWED)
@pytest.mark.parametrize("look", ["grad", "hook", "accumulated"])
def test_c06_a_gradient_that_is_what_the_forward_has_saved(device, view, look, saved):
    recorded = pg.record(lambda q: GivesWhatItSaved.apply(q, VIEWED[view], saved), warmup=1)
    weight = nn.Parameter(torch.zeros(150, 150, device=device))
    kept, total = [], torch.zeros(150, 150, device=device)
    for _ in range(7):
        x = torch.randn(150, 150, device=device)
        expected = VIEWED[view](x.clone() if saved == "the argument" else x.cos()).clone()
        y = recorded((x + weight) if look == "accumulated" else x.requires_grad_())
        if look == "grad":
            kept.append((torch.autograd.grad(y.sum(), x)[0], expected))
        elif look == "hook":
            x.register_post_accumulate_grad_hook(lambda t: kept.append((t.grad, None)))
            y.sum().backward()
            kept[-1] = kept[-1][0], expected
        else:
            y.sum().backward()
            total += expected
            torch.testing.assert_close(weight.grad, total)
        for found, right in kept:
            assert torch.equal(found, right)
    assert pg.stats(recorded).recorded <= 4  # what is held takes turns, and then hands out copies
    assert pg.stats(recorded).replayed >= 5  # one call may find a gradient in its way, which is somewhere else from then on


class Striding(torch.autograd.Function):
    """Its backward asks for the strides of what it has saved, as compiled code does."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, grad * x * (x.stride(0) + 10 * x.stride(1))


PARTS = [lambda x: x[:, 0], lambda x: x[:, 0].t(), lambda x: x[:, :1, 0].expand(4, 3), lambda x: x[1:, 0]]


@pytest.mark.parametrize("part", PARTS)
def test_c06_views_of_an_argument_are_saved_with_their_strides(device, part):
    weights = [nn.Parameter(torch.full((), 2.0, device=device)) for _ in range(2)]

    def make(weight):
        return lambda x: Striding.apply(part(x), weight.expand(part(x).shape))

    recorded = pg.record(make(weights[0]), warmup=1)
    for n in range(4):
        x = torch.arange(24.0, device=device).reshape(4, 2, 3) + n
        for f, weight in ((recorded, weights[0]), (make(weights[1]), weights[1])):
            weight.grad = None
            f(x).sum().backward()
        assert_same(weights[0].grad, weights[1].grad)
    assert pg.stats(recorded).replayed == 3


VIEWS = {
    "its transpose": lambda h: (h, h.t()),
    "its transpose before it": lambda h: (h.t(), h),
    "a part of it": lambda h: (h, h[1]),
    "a part of its transpose": lambda h: (h, h.t()[:2]),
    "detached": lambda h: (h, h.detach()),
    "detached before it": lambda h: (h.detach(), h),
    "a part, detached": lambda h: (h, h.detach()[0]),
    "its data": lambda h: (h, h.data),
    "all of them": lambda h: (h[0], h.detach(), h, h.t()),
}


USES = {
    "read": lambda results: results,
    "the first is written": lambda results: (results[0].mul_(2), *results[1:]),
    "the last is written": lambda results: (*results[:-1], results[-1].mul_(2)),
    "the first is written when another is saved": lambda results: (results[-1].square(), results[0].mul_(2)),
    "the last is written when another is saved": lambda results: (results[0].square(), results[-1].mul_(2)),
    "the first is dropped": lambda results: results[1:],
    "the last is dropped": lambda results: results[:-1],
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("view", VIEWS)
def test_c06_results_that_are_views_of_another(device, view, use):
    torch.manual_seed(0)
    start = torch.randn(4, 4, device=device)
    weights = [nn.Parameter(start.clone()) for _ in range(2)]

    def make(weight):
        return lambda x: VIEWS[view](x @ weight)

    recorded = pg.record(make(weights[0]), warmup=1)
    for _ in range(5):
        found = []
        x = torch.randn(4, 4, device=device)
        for f, weight in ((recorded, weights[0]), (make(weights[1]), weights[1])):
            weight.grad = None
            results = f(x)
            kept = [(t.requires_grad, t.shape, t.stride(), t.storage_offset()) for t in results]
            kept += [[i for i, base in enumerate(results) if t._base is base] for t in results]
            raised = None
            try:
                used = USES[use](results)
                sum((t * (i + 2)).sum() for i, t in enumerate(used)).backward()
            except RuntimeError as e:
                raised = next(said for said in ("in-place", "inplace", "does not require grad") if said in str(e))
            found.append((kept, raised, weight.grad, [t.detach() for t in results]))
        assert_same(*found)
    assert pg.stats(recorded).replayed == 4, pg.explain(recorded)


class Trebled(torch.autograd.Function):
    """Gives a view of what it gets, and another gradient than that of a view."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad


class Halves(nn.Module):
    def forward(self, x):
        return x.view(2, 8)


def with_hooks(kind):
    module = Halves()
    if kind == "full":
        module.register_full_backward_hook(lambda module, grads, given: (7 * grads[0],))
    else:
        module.register_full_backward_pre_hook(lambda module, given: (7 * given[0],))
    return module


HOOKED = {kind: with_hooks(kind) for kind in ("full", "pre")}


def set_on(t, kind):
    if kind == "tensor":
        t.register_hook(lambda g: g.clamp(-0.1, 0.1))
    elif kind == "node":
        t.grad_fn.register_hook(lambda grads, given: (5 * grads[0],))
    elif kind == "before the node":
        t.grad_fn.register_prehook(lambda given: (5 * given[0],))
    else:
        t.retain_grad()
    return t


NOT_MERELY_VIEWS = {
    "a view of a view": lambda h: (lambda v: (h, v, v[1]))(h.view(2, 8)),
    "a view of a view before it": lambda h: (lambda v: (v[1], v, h))(h.view(2, 8)),
    "a view on which another depends": lambda h: (lambda v: (h, v, v[1].tanh()))(h.view(2, 8)),
    "by a function": lambda h: (h, Trebled.apply(h)),
    "of one by a function": lambda h: (h, Trebled.apply(h).t()),
    "by a module with a hook": lambda h: (h, HOOKED["full"](h)),
    "by a module with a hook before": lambda h: (h, HOOKED["pre"](h)),
    "by a part with a backward of its own": lambda h: checkpoint(lambda t: (y := t.tanh(), y.t()), h, use_reentrant=True),
    "a hook on a view": lambda h: (h, set_on(h.t(), "tensor")),
    "a hook on a hidden view": lambda h: (h, set_on(h.view(2, 8), "tensor")[1]),
    "a hook on a hidden view's node": lambda h: (h, set_on(h.view(2, 8), "node")[1]),
    "a hook before a hidden view's node": lambda h: (h, set_on(h.view(2, 8), "before the node")[1]),
    "a hook on the base": lambda h: (set_on(h, "tensor"), h.t()),
    "a hook, and no view": lambda h: (set_on(h, "tensor"),),
    "a gradient that is retained": lambda h: (set_on(h, "retain"), h.t()),
}


@may_run_live
@pytest.mark.parametrize("look", ["nobody", "hook", "retain", "grad"])
@pytest.mark.parametrize("results", NOT_MERELY_VIEWS)
def test_c06_results_that_are_more_than_views_of_another(device, results, look):
    """What autograd has between a view and its base: another result, code, hooks. And hooks on results, which come first."""
    torch.manual_seed(0)
    start = torch.randn(4, 4, device=device)
    weights = [nn.Parameter(start.clone()) for _ in range(2)]

    function = NOT_MERELY_VIEWS[results]  # one alone: what names hooks is taken to set some

    def make(weight):
        return lambda x: function(x @ weight)

    recorded = pg.record(make(weights[0]), warmup=1)
    for _ in range(4):
        x = torch.randn(4, 4, device=device)
        for i in range(len(make(weights[1])(x))):
            found = []
            for f, weight in ((recorded, weights[0]), (make(weights[1]), weights[1])):
                weight.grad, seen, given = None, [], f(x)
                loss = sum((t * t.detach() * (k + 2)).sum() for k, t in enumerate(given))
                if look == "grad":
                    seen += torch.autograd.grad(loss, [given[i]], retain_graph=True)
                elif look == "hook":
                    given[i].register_hook(lambda g, seen=seen: (seen.append(g), 2 * g)[1])
                elif look == "retain":
                    given[i].retain_grad()
                if results != "by a part with a backward of its own" or look != "grad":
                    loss.backward()
                found.append((weight.grad, seen, [t.grad if t.retains_grad else None for t in given]))
            assert_same(*found)


def test_c06_a_detached_result_is_detached_once_more(device):
    """In place, which a view cannot be."""
    weight = nn.Parameter(torch.ones(4, device=device))
    recorded = pg.record(lambda x: (h := weight * x, h.detach()), warmup=1)
    for n in range(4):
        y, detached = recorded(torch.full((4,), float(n), device=device))
        assert detached.detach_() is detached
        assert not detached._is_view()
        y.sum().backward()
    assert pg.stats(recorded).replayed == 3


@may_run_live
def test_c06_parts_of_a_detached_result_get_a_history_together(device):
    both = [nn.Parameter(torch.ones(4, device=device)) for _ in range(2)]

    def make(weight):
        return lambda x: (h := weight * x, d := h.detach(), d[:2])

    recorded, live = pg.record(make(both[0]), warmup=1), make(both[1])
    for n in range(4):
        found = []
        for f, weight in ((recorded, both[0]), (live, both[1])):
            weight.grad = None
            _, whole, part = f(torch.full((4,), float(n), device=device))
            whole.mul_(weight)
            assert part.requires_grad
            part.sum().backward()
            found.append((weight.grad, whole, part))
        assert_same(*found)


@may_run_live
def test_c06_a_function_that_runs_a_backward_inside_as_well(device):
    both = [perceptron(device) for _ in range(2)]

    def make(net):
        def f(x):
            (g,) = torch.autograd.grad(net(x).sum(), [net[0].weight], create_graph=True)
            return g.square().sum() + net(x).mean()

        return f

    recorded, live = pg.record(make(both[0]), warmup=1), make(both[1])
    for n in range(6):
        x, _ = batch(device, n)
        for net, f in zip(both, (recorded, live), strict=True):
            net.zero_grad()
            f(x).backward()
        assert_same(grads(both[0]), grads(both[1]))


@may_run_live
def test_c06_results_that_share_memory_with_other_things(device):
    weight = nn.Parameter(torch.ones(4, device=device))
    functions = {
        "a view of the argument": lambda x: x[:2],
        "the argument": lambda x: x,
        "a view of the parameter": lambda x: weight[:2] + 0 * x[:2],
        "the parameter's view": lambda x: weight[:2],
        "two views": lambda x: (weight * x).split(2),
        "conjugate": lambda x: (weight * x).to(torch.complex64).conj(),
        "twice": lambda x: (y := weight * x, y),
    }
    for f in functions.values():
        recorded = pg.record(f, warmup=1)
        for n in range(4):
            found = []
            for function in (recorded, f):
                weight.grad = None
                x = torch.full((4,), float(n + 1), device=device, requires_grad=True)
                result = function(x * 1)
                first = result[0] if isinstance(result, tuple) else result
                first.abs().sum().backward()
                found.append((x.grad, weight.grad, result))
            assert_same(*found)


BESIDE = {
    "the argument": lambda x, w: (x * w, x),
    "a part of the argument": lambda x, w: (x * w, x[1:]),
    "two parts of the argument": lambda x, w: ((x * w).exp(), x[1:], x[:2].t()),
    "the argument alone": lambda x, w: (x,),
    "a view of the argument alone": lambda x, w: (x.t(),),
    "a view of a weight": lambda x, w: (x.exp() * w, w.view(2, 8)),
    "of no elements": lambda x, w: (x[:0] * w[:0], x * w, x[:, :0].exp()),
    "of no elements alone": lambda x, w: (x[:0].exp() + w[:0],),
    "a view of no elements": lambda x, w: (x[:0], w[:, :0], (x * w)[:0]),
    "conjugated": lambda x, w: ((x * w * 1j).conj(), x * w),
    "conjugated and saved": lambda x, w: ((x * w * 1j).exp().conj(),),
    "negated": lambda x, w: ((x * w * 1j).conj().imag, x),
    "by a transform": lambda x, w: (torch.fft.ihfft(x * w), torch.fft.ifft(x)),
}
LATER = {
    "read": lambda results: results,
    "the first is written": lambda results: (results[0].mul_(2), *results[1:]),
    "the last is written": lambda results: (*results[:-1], results[-1].mul_(2)),
    "the last is saved, and the first written": lambda results: (results[-1] * results[-1], results[0].mul_(2)),
    "the last is read alone": lambda results: results[-1:],
}


@pytest.mark.parametrize("use", LATER.values(), ids=LATER)
@pytest.mark.parametrize("results", BESIDE.values(), ids=BESIDE)
def test_c06_results_beside_what_shares_memory_with_the_callers(device, results, use):
    """Each is made of the caller's own tensor, and keeps none of the others from being recorded."""
    weights = [nn.Parameter(torch.linspace(-1, 1, 16, device=device).view(4, 4)) for _ in range(2)]
    recorded = pg.record(lambda x: results(x, weights[0]), warmup=1)
    for n in range(5):
        found = []
        for f, weight in ((recorded, weights[0]), (lambda x: results(x, weights[1]), weights[1])):
            leaf = torch.linspace(0.5, 1 + n, 16, device=device).view(4, 4).requires_grad_()
            x, raised, weight.grad = leaf * 1, None, None
            given = f(x)
            seen = [(t.requires_grad, t.stride(), t.is_conj(), t.is_neg(), t is x, t._base is x) for t in given]
            try:
                sum((t * (i + 2)).abs().sum() for i, t in enumerate(use(given))).backward()
            except RuntimeError as e:
                raised = next(said for said in ("in-place", "inplace", "modified by") if said in str(e))
            found.append((seen, raised, leaf.grad, weight.grad, x, given))
        assert_same(*found)
        del given, x, leaf, found
    assert pg.stats(recorded).replayed == 4, pg.explain(recorded)


@may_run_live  # by what counts from the beginning of the storage
@pytest.mark.parametrize(
    "view", [lambda x: x[1:].t(), lambda x: x.unflatten(0, (2, 1)), lambda x: x.as_strided((2,), (1,), x.storage_offset())]
)
def test_c06_a_view_of_an_argument_that_lies_elsewhere_each_time(device, view):
    """In storages of other sizes, and not at their beginning."""
    recorded = pg.record(lambda x: (x.exp(), view(x)), warmup=1)
    for n in range(6):
        found = []
        for f in (recorded, lambda x: (x.exp(), view(x))):
            leaf = torch.linspace(0, 1, 8 * (4 + n), device=device).view(-1, 4).requires_grad_()
            x = (leaf * 1)[n : n + 2] if n % 2 else (leaf[:2] * 1)
            y, viewed = f(x)
            (y.sum() + 3 * viewed.square().sum()).backward()
            found.append((leaf.grad, viewed._base is (x if x._base is None else x._base), viewed, y))
        assert_same(*found)


@pytest.mark.parametrize("look", ["hook", "retain", "grad"])
@pytest.mark.parametrize("results", [BESIDE[name] for name in ("a part of the argument", "of no elements", "conjugated")])
def test_c06_who_looks_at_gradients_of_those(device, results, look):
    weights = [nn.Parameter(torch.linspace(-1, 1, 16, device=device).view(4, 4)) for _ in range(2)]
    recorded = pg.record(lambda x: results(x, weights[0]), warmup=1)
    for n in range(4):
        for i in range(2):
            found = []
            for f, weight in ((recorded, weights[0]), (lambda x: results(x, weights[1]), weights[1])):
                x, seen, weight.grad = torch.full((4, 4), n + 0.5, device=device, requires_grad=True), [], None
                given = f(x * 1)
                loss = sum((t * (k + 2)).abs().sum() for k, t in enumerate(given))
                if look == "grad":
                    seen += torch.autograd.grad(loss, [given[i]], retain_graph=True)
                elif look == "hook":
                    given[i].register_hook(lambda g, seen=seen: (seen.append(g), 2 * g)[1])
                else:
                    given[i].retain_grad()
                loss.backward()
                found.append((x.grad, weight.grad, seen, given[i].grad if look == "retain" else None))
            assert_same(*found)
    assert pg.stats(recorded).replayed == 7, pg.explain(recorded)


KNOWN_ZERO = {
    "of a norm of one": lambda x: torch.autograd.grad(_slope(x).square().sum(), x)[0],
    "and its transpose": lambda x: (lambda z, g: (z.t(), g * x, z))(torch.autograd.grad(_slope(x).sum(), x)[0], _slope(x)),
    "beside what it is added to": lambda x: (lambda z: (z, x.detach() + z))(torch.autograd.grad(_slope(x).sum(), x)[0]),
}


def _slope(x):
    return torch.autograd.grad(nn.functional.l1_loss(x, torch.zeros_like(x)), x, create_graph=True)[0]


@pytest.mark.parametrize("function", KNOWN_ZERO.values(), ids=KNOWN_ZERO)
def test_c06_gradients_that_autograd_knows_to_be_zero(device, function):
    """Nothing lies where they do: what a replay gives cannot be written, as eager's cannot."""
    recorded = pg.record(function, warmup=1)
    for n in range(4):
        found = []
        for f in (recorded, function):
            result = f(torch.full((2, 3), n + 0.5, device=device, requires_grad=True))
            leaves = result if isinstance(result, tuple) else (result,)
            found.append(([t._is_zerotensor() for t in leaves], [t + 1 for t in leaves], leaves))
        assert_same(*found)
    assert pg.stats(recorded).replayed == 3, pg.explain(recorded)
