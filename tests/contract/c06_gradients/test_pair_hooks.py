"""C6: hooks of parameters, modules, tensors and results."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.shared.pairs import Both, assert_recorded, batch, grads, perceptron
from tests.helpers import may_run_live


def test_c06_hooks_of_parameters_run_in_each_backward(device):
    both = Both(perceptron(device))
    seen = {module: [] for module in both}
    for module in both:
        module[0].weight.register_hook(lambda g: g * 3)
        module[2].weight.register_hook(lambda g, s=seen[module]: s.append(g.sum().item()))
        module[4].weight.register_post_accumulate_grad_hook(lambda p, s=seen[module]: s.append(p.grad.sum().item()))
    for n in range(5):
        both.learn(*batch(device, n))
    assert seen[both.recorded] == seen[both.live]
    assert len(seen[both.live]) == 10


HOOKS = {
    "forward": lambda m, s: m.register_forward_hook(lambda mod, args, out: s.append(float(out.detach().sum()))),
    "forward that changes": lambda m, s: m.register_forward_hook(lambda mod, args, out: out * 2),
    "forward pre": lambda m, s: m.register_forward_pre_hook(lambda mod, args: (args[0] + 1,)),
    "backward": lambda m, s: m.register_full_backward_hook(lambda mod, gi, go: s.append(float(go[0].sum()))),
    "backward that changes": lambda m, s: m.register_full_backward_hook(lambda mod, gi, go: (gi[0] * 2,)),
    "backward pre": lambda m, s: m.register_full_backward_pre_hook(lambda mod, go: (go[0] * 3,)),
}


@may_run_live
@pytest.mark.parametrize("whose", ["its own", "a submodule's"])
@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_c06_hooks_of_modules(device, hook, whose):
    both = Both(perceptron(device))
    seen = {module: [] for module in both}
    for module in both:
        hook(module if whose == "its own" else module[2], seen[module])
    for n in range(5):
        x, y = batch(device, n)
        for module in both:
            module.zero_grad()
            F.mse_loss(module(x.clone().requires_grad_()), y).backward()
        both.check()
    assert seen[both.recorded] == seen[both.live]


def test_c06_hooks_of_tensors_outside(device):
    both = Both(perceptron(device))
    seen = {module: [] for module in both}
    for n in range(5):
        x, y = batch(device, n)
        for module in both:
            module.zero_grad()
            out = module(x)
            out.register_hook(lambda g, s=seen[module]: s.append(g.sum().item()) or g * 2)
            out.retain_grad()
            F.mse_loss(out, y).backward()
            seen[module].append(out.grad.sum().item())
        both.check()
    assert seen[both.recorded] == seen[both.live]
    assert_recorded(both, 4)


class Layered(nn.Module):
    """Each result depends on those before it, and two on the same."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        a = self.first(x)
        b = self.second(a.tanh())
        return {"a": a, "b": b, "c": self.third(a * b).tanh(), "d": self.third(b)}


def loss(out, *names):
    return sum(out[name].square().sum() for name in names)


def retained(out):
    for name in "abc":
        out[name].retain_grad()
    loss(out, "c", "d").backward()
    return [out[name].grad for name in "abc"]


def retained_and_used(out):
    out["a"].retain_grad()
    loss(out, "a", "b", "d").backward()
    return out["a"].grad


def hooks_that_scale(out):
    seen = []
    for name, by in (("a", 2), ("b", 3), ("d", 5)):
        out[name].register_hook(lambda g, by=by: seen.append(g.clone()) or g * by)
    loss(out, "a", "c", "d").backward()
    return seen


def a_hook_of_one_that_is_gone(out):
    seen = []
    out["b"].register_hook(lambda g: seen.append(g.clone()) or g * 2)
    total = loss(out, "c")
    out.clear()
    total.backward()
    return seen


def a_hook_that_is_removed(out):
    out["a"].register_hook(lambda g: g * 2).remove()
    loss(out, "c").backward()


def asked_for(out):
    return torch.autograd.grad(loss(out, "c", "d"), [out["a"], out["b"]], allow_unused=True)


def asked_for_what_it_does_not_depend_on(out):
    return torch.autograd.grad(loss(out, "a"), [out["b"], out["a"]], allow_unused=True)


def asked_for_with_parameters(module, out):
    return torch.autograd.grad(loss(out, "a", "c"), [out["b"], *module.parameters()], allow_unused=True)


def one_after_the_other(out):
    out["a"].retain_grad()
    loss(out, "c").backward(retain_graph=True)
    loss(out, "b").backward(retain_graph=True)
    loss(out, "a").backward()
    return out["a"].grad


def only_the_first(out):
    out["a"].retain_grad()
    loss(out, "a").backward()
    return out["a"].grad


def one_is_written(out):
    out["d"].mul_(2)
    out["b"].retain_grad()
    loss(out, "d").backward()
    return out["b"].grad


def first_one_of_them_and_then_all(out):
    found = torch.autograd.grad(loss(out, "c"), out["b"], retain_graph=True)
    loss(out, "c", "d").backward()
    return found


def as_a_weight(out):
    (grad,) = torch.autograd.grad(loss(out, "c"), out["a"], retain_graph=True)
    (loss(out, "c") * grad.norm()).backward()


def from_where_another_backward_ended(out):
    (grad,) = torch.autograd.grad(loss(out, "c"), out["a"], retain_graph=True)
    out["a"].backward(grad)


def a_hook_that_raises(module, out):
    handle = out["a"].register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss(out, "c").backward(retain_graph=True)
    handle.remove()
    module.zero_grad()
    loss(out, "c").backward()


def a_backward_in_a_hook(out):
    found = []

    def inner(_):
        found.extend(torch.autograd.grad(out["b"], out["a"], torch.ones_like(out["b"]), retain_graph=True))

    handle = out["c"].register_hook(inner)
    loss(out, "c", "d").backward()
    handle.remove()  # or it would keep what it refers to, itself among it
    return found


def a_hook_that_removes_another(out):
    handle = out["a"].register_hook(lambda g: None)
    out["b"].register_hook(lambda g: handle.remove())
    loss(out, "c", "d").backward()


LOOKS = [first_one_of_them_and_then_all, as_a_weight, from_where_another_backward_ended, a_hook_that_raises,
         a_backward_in_a_hook, a_hook_that_removes_another, retained, retained_and_used, hooks_that_scale,
         a_hook_of_one_that_is_gone, a_hook_that_is_removed, asked_for, asked_for_what_it_does_not_depend_on,
         asked_for_with_parameters, one_after_the_other, only_the_first, one_is_written]  # fmt: skip


@pytest.mark.parametrize("look", LOOKS)
def test_c06_the_gradient_of_one_result_with_respect_to_another(device, look):
    torch.manual_seed(0)
    both = Both(Layered().to(device))
    for n in range(5):
        x, _ = batch(device, n)
        found = []
        for module in both:
            module.zero_grad()
            args = (module,) if look in (asked_for_with_parameters, a_hook_that_raises) else ()
            found.append((look(*args, module(x)), grads(module)))
        assert_same(*found, tolerance=1e-6)  # a parameter gets one sum from each result that is looked at
    assert pg.stats(both.recorded).replayed == 4


class Losses(nn.Module):
    """Each result uses some of those before it, and several times."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        z = self.encoder(x)
        y = self.decoder(z)
        return {"loss": F.mse_loss(y, x) + z.exp().mean(), "penalty": z.square().mean() + z.abs().sum() / 7, "z": z, "y": y}


def retained_and_used_often(out):
    out["z"].retain_grad()
    (loss(out, "loss", "penalty") + out["z"].sin().sum() + out["z"].cos().sum()).backward()
    return out["z"].grad


def retained_alone(out):
    out["z"].retain_grad()
    (out["loss"] + 0.1 * out["z"].sum()).backward()
    return out["z"].grad


def asked_for_and_used(out):
    return torch.autograd.grad(out["loss"] + out["penalty"] + out["z"].sin().sum(), out["z"])


@pytest.mark.parametrize("look", [retained_and_used_often, retained_alone, asked_for_and_used])
def test_c06_a_gradient_that_is_looked_at_is_added_up_in_eagers_order(device, look):
    """From what was made last to what was made first, outside of the call and inside."""
    torch.manual_seed(0)
    both = Both(Losses().to(device))
    for _ in range(8):
        x = torch.randn(5, 4, device=device)
        found = []
        for module in both:
            module.zero_grad()
            found.append((look(module(x)), grads(module)))
        assert_same(*found)
    assert pg.stats(both.recorded).replayed == 7


class Sliced(nn.Module):
    """Makes a list of modules in each call, of which phonograph hears as of other changes to modules."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Tanh()])

    def forward(self, x):
        hidden = self.layers[0](x)
        for layer in self.layers[1:]:
            y = layer(hidden)
        return hidden, y


def test_c06_a_change_to_modules_inside_is_no_hook(device):
    torch.manual_seed(0)
    pg.record(nn.Linear(4, 4).to(device), warmup=0)(batch(device, 0)[0])  # from now on changes to modules are heard of
    both = Both(Sliced().to(device), warmup=0)
    for n in range(4):
        x, _ = batch(device, n)
        found = []
        for module in both:
            module.zero_grad()
            hidden, y = module(x)
            hidden.retain_grad()
            y.square().sum().backward()
            found.append((hidden.grad, grads(module)))
        assert_same(*found)
    assert pg.stats(both.recorded).replayed >= 3


class TwoHeads(nn.Module):
    """Results that do not depend on each other."""

    def __init__(self):
        super().__init__()
        self.policy, self.value = nn.Linear(4, 3), nn.Linear(4, 1)

    def forward(self, x):
        return self.policy(x), self.value(x)


@pytest.mark.parametrize("used", [0, 1])
def test_c06_a_hook_of_a_result_hears_of_no_backward_of_another(device, used):
    torch.manual_seed(0)
    both = Both(TwoHeads().to(device))
    for n in range(5):
        x, _ = batch(device, n)
        found = []
        for module in both:
            module.zero_grad()
            results = module(x)
            results[1 - used].register_hook(lambda grad: grad * 0.5)
            results[1 - used].retain_grad()
            results[used].square().sum().backward()
            found.append((results[1 - used].grad, grads(module)))
        assert_same(*found)
    assert pg.stats(both.recorded).replayed == 4


class AlsoHidden(nn.Module):
    """Recomputes one result from the other."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.linear(x)
        return hidden, checkpoint(F.dropout, hidden, use_reentrant=False)


@may_run_live
@pytest.mark.parametrize("warmup", [0, 1])
def test_c06_the_gradient_of_one_result_with_respect_to_another_through_what_is_recomputed(device, warmup):
    """It would be recomputed once more. So that is an error, after which the model runs live; who does not ask gets none."""
    torch.manual_seed(0)
    both = Both(AlsoHidden().to(device), warmup=warmup)
    for n in range(8):
        found = []
        for module in both:
            torch.manual_seed(n)
            hidden, y = module(batch(device, n)[0])
            asked = torch.autograd.grad(y.sum(), list(module.parameters()), retain_graph=True)
            if n >= 5:
                hidden.retain_grad()
            if n == 5 and module is both.recorded:
                with pytest.raises(RuntimeError, match="with respect to another"):
                    y.square().sum().backward()
                break
            y.square().sum().backward()
            found.append((asked, hidden.grad if n > 5 else None, grads(module), torch.rand(2, device=device)))
            module.zero_grad()
        else:
            assert_same(*found)
    assert pg.stats(both.recorded).replayed == 6 - warmup


def by_a_backward(out):
    loss(out, "c").backward()


def by_asking(out):
    torch.autograd.grad(loss(out, "c"), out["a"])


def by_retaining(out):
    out["a"].retain_grad()
    loss(out, "c").backward()


@pytest.mark.parametrize("look", [by_a_backward, by_asking, by_retaining])
@pytest.mark.parametrize("written", ["a", "b", "weight"])
def test_c06_what_was_saved_for_another_result_is_written(device, look, written):
    """Results that come out of nodes of their own are those whose versions count."""
    torch.manual_seed(0)
    both = Both(Layered().to(device))
    for n in range(5):
        x, _ = batch(device, n)
        for module in both:
            out = module(x)
            if n != 1:
                with torch.no_grad():
                    (module.third.weight if written == "weight" else out[written]).mul_(2)
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    look(out)
            else:
                look(out)
            module.zero_grad()
    assert pg.stats(both.recorded).replayed == 4


@may_run_live
def test_c06_a_hook_on_a_result_that_is_set_while_the_backward_runs(device):
    """It would see a part of the gradient."""
    torch.manual_seed(0)
    both = Both(Layered().to(device))
    for n in range(4):
        for module in both:
            out = module(batch(device, n)[0])
            handle = out["b"].register_hook(lambda _, out=out: out["a"].register_hook(lambda g: None) and None)
            if n == 2 and module is both.recorded:
                with pytest.raises(RuntimeError, match="with respect to another"):
                    loss(out, "c").backward()
            elif n != 1 or module is not both.recorded:
                loss(out, "c").backward()
            handle.remove()
            module.zero_grad()


@may_run_live
def test_c06_a_graph_of_the_gradient_of_one_result_with_respect_to_another(device):
    torch.manual_seed(0)
    both = Both(Layered().to(device))
    x = batch(device, 0)[0]
    for _ in range(3):
        out = both.recorded(x)
    for _ in range(2):
        found = []
        for module in both:
            out = module(x)
            (grad,) = torch.autograd.grad(loss(out, "a", "c"), out["a"], create_graph=True)
            grad.square().sum().backward()
            found.append((grad, grads(module)))
        assert_same(*found, tolerance=1e-6)
    assert "create_graph" in pg.explain(both.recorded)


calls_of_a_backward = []


class Counting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        calls_of_a_backward.append(1)
        return grad * 2


@may_run_live
def test_c06_code_in_a_backward_runs_once_where_a_result_is_looked_at(device):
    torch.manual_seed(0)
    a, b = nn.Linear(4, 4).to(device), nn.Linear(4, 4).to(device)

    def function(x):
        hidden = a(x).tanh()
        return hidden, Counting.apply(b(hidden))

    f = pg.record(function, warmup=1)
    for n in range(6):
        hidden, y = f(batch(device, n)[0])
        if n >= 3:
            hidden.retain_grad()
        calls_of_a_backward.clear()
        if n == 3:
            with pytest.raises(RuntimeError, match="with respect to another"):
                (y.sum() + hidden.sum()).backward()
        else:
            (y.sum() + hidden.sum()).backward()
            assert n in (1, 2) or len(calls_of_a_backward) == 1
            assert n < 3 or hidden.grad is not None


def test_c14_a_result_on_which_others_depend_is_an_argument_like_any_other(device, tmp_path):
    torch.manual_seed(0)
    model, head = Layered().to(device), nn.Linear(4, 2).to(device)
    both = [(model, head), copy.deepcopy((model, head))]
    for module in both[0]:
        pg.record(module, warmup=1)
    for n in range(6):
        found = []
        for first, second in both:
            out = first(batch(device, n)[0])
            (second(out["b"]).sum() + loss(out, "c")).backward()
            found.append((grads(first), grads(second)))
            torch.save(out["b"], tmp_path / "b.pt")
            first.zero_grad()
            second.zero_grad()
        assert_same(*found)
    assert pg.stats(head).replayed == 5
    assert not pg.stats(head).refusals


def test_c06_a_second_backward_through_nothing_but_weights(device):
    """Of its first layer it needs the bias alone, and of what it has saved the weight of the second."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    layer.weight.requires_grad_(False)
    both = Both(nn.Sequential(layer, layer).to(device))
    for n in range(5):
        for module in both:
            y = module(batch(device, n)[0])
            y.sum().backward()
            with pytest.raises(RuntimeError, match="a second time"):
                y.sum().backward()
        assert_same(*map(grads, both))
    assert pg.stats(both.recorded).replayed == 4


@pytest.mark.parametrize(("first", "live"), [("abcd", 0), ("ab", 1), ("a", 1), ("", 1)])
def test_c06_results_that_nobody_looks_at_cost_one_backward(device, first, live):
    """And one live backward before it is recorded: that of the first call, if it comes to all results."""
    torch.manual_seed(0)
    both = Both(Layered().to(device))
    for n in range(6):
        x, _ = batch(device, n)
        found = []
        for module in both:
            module.zero_grad()
            if first or n:
                loss(module(x), *("abcd" if n else first)).backward()
            else:
                torch.autograd.grad(loss(module(x), *"abcd"), [module.first.bias])
            found.append(grads(module))
        assert_same(*found)
    (backward,) = pg.api._recorded(both.recorded)._backwards
    assert (pg.stats(backward).live, pg.stats(backward).replayed) == (live, 5 - live)
