"""C6: functions and modules whose backward runs outside, in everyday training loops."""

import copy
import dataclasses
import threading
import time
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import phonograph as pg
from phonograph.compile import backend, graphs
from phonograph.testing import assert_same
from tests.contract.shared.pairs import Both, assert_recorded, batch, grads, perceptron
from tests.helpers import may_run_live, ramp

# ---------------------------------------------------------------------------------------------------
# Where gradients are added up


def accumulating(p):
    return torch.autograd.graph.get_gradient_edge(p).node


def test_c06_gradients_of_compiled_code_are_added_up_on_the_stream_of_the_forward(device):
    """By a node that goes with the graph that it was made for, as in eager: one that a recording kept would make autograd wait
    for the stream of the capture, at each parameter, for ever."""
    net = perceptron(device)
    called = torch.compile(net, backend=backend, options={"inner": "aot_eager"})
    for n in range(5):
        x, y = batch(device, n)
        F.mse_loss(called(x), y).backward()
        assert not any("seen" in accumulating(p).metadata for p in net.parameters())
        for p in net.parameters():
            accumulating(p).metadata["seen"] = True
    assert pg.stats(graphs()[-1]).replayed >= 3


@may_run_live
def test_c06_a_node_that_somebody_has_goes_on_adding_up_gradients(device):
    """Whoever has it relies on it, as DistributedDataParallel does."""
    both, heard = Both(perceptron(device)), []
    nodes = [[accumulating(p) for p in module.parameters()] for module in both]
    for module, mine in zip(both, nodes, strict=True):
        for i, node in enumerate(mine):
            node.register_hook(lambda *_, which=(module is both.live, i): heard.append(which))
    for n in range(6):
        heard.clear()
        both.learn(*batch(device, n))
        assert sorted(heard) == [(live, i) for live in (False, True) for i in range(len(nodes[0]))]
        for module, mine in zip(both, nodes, strict=True):
            assert all(accumulating(p) is node for p, node in zip(module.parameters(), mine, strict=True))


def test_c06_parameters_that_are_views_of_one_buffer(device):
    both = Both(perceptron(device))
    for module in both:
        flat = nn.utils.parameters_to_vector(module.parameters()).detach()
        for p, at in zip(module.parameters(), flat.split([p.numel() for p in module.parameters()]), strict=True):
            p.data = at.view_as(p)
        module.flat = flat
    for n in range(6):
        both.learn(*batch(device, n))
        for module in both:
            with torch.no_grad():
                module.flat.add_(0.01)
            module(batch(device, n)[0])
            assert next(module.parameters()).data_ptr() == module.flat.data_ptr()
    assert_recorded(both, 4)


# ---------------------------------------------------------------------------------------------------
# C6: the everyday training loops


@pytest.mark.parametrize("to_none", [True, False], ids=["to None", "to zero"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_c06_a_training_loop_around_a_recorded_module(device, kind, to_none):
    both = Both(perceptron(device))
    optimizers = both.optimizers(kind)
    for n in range(8):
        x, y = batch(device, n)
        losses = []
        for module, optimizer in zip(both, optimizers, strict=True):
            optimizer.zero_grad(set_to_none=to_none)
            loss = F.mse_loss(module(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss)
        assert_same(*losses)
        both.check()
    assert_recorded(both, 7)
    assert both.stats.recorded == 1


def test_c06_a_function_whose_backward_runs_outside(device):
    both = [perceptron(device) for _ in range(2)]
    f = pg.record(lambda x: both[0](x), warmup=1)
    for n in range(6):
        x, y = batch(device, n)
        for m, module in zip(both, (f, both[1]), strict=True):
            m.zero_grad()
            F.mse_loss(module(x), y).backward()
        assert_same(grads(both[0]), grads(both[1]))
    assert pg.stats(f).replayed == 5, pg.explain(f)


@pytest.mark.parametrize("to_none", [True, False], ids=["to None", "to zero"])
def test_c06_gradients_accumulate_over_micro_batches(device, to_none):
    both = Both(perceptron(device))
    optimizers = both.optimizers()
    for n in range(6):
        for module, optimizer in zip(both, optimizers, strict=True):
            optimizer.zero_grad(set_to_none=to_none)
            for micro in range(4):
                x, y = batch(device, 10 * n + micro)
                F.mse_loss(module(x), y).backward()
        both.check()
        for optimizer in optimizers:
            optimizer.step()
    assert_recorded(both, 20)


@pytest.mark.parametrize("order", ["first first", "last first"])
@pytest.mark.parametrize("flying", [2, 4])
def test_c06_several_forwards_before_their_backwards(device, flying, order):
    both = Both(perceptron(device))
    for n in range(5):
        losses = {}
        for module in both:
            module.zero_grad()
            losses[module] = [F.mse_loss(module(x), y) for x, y in (batch(device, 10 * n + i) for i in range(flying))]
            for loss in losses[module] if order == "first first" else reversed(losses[module]):
                loss.backward()
        assert_same(losses[both.recorded], losses[both.live])
        both.check()
    assert_recorded(both, 4 * flying)
    assert both.stats.recorded <= flying + 1, pg.explain(both.recorded)


def test_c06_a_forward_that_never_runs_backward(device):
    both = Both(perceptron(device))
    for n in range(8):
        x, y = batch(device, n)
        results = []
        for module in both:
            module.zero_grad()
            out = module(x)
            if n % 2:
                F.mse_loss(out, y).backward()
            results.append(out)
        assert_same(*results)
        both.check()
    assert_recorded(both, 7)


def test_c06_results_and_gradients_that_are_kept(device):
    both = Both(perceptron(device))
    kept = []
    for n in range(8):
        x, y = batch(device, n)
        found = []
        for module in both:
            module.zero_grad()
            out = module(x)
            loss = F.mse_loss(out, y)
            loss.backward()
            found.append((out, loss, grads(module)))
        kept.append(found)
    for ours, theirs in kept:
        assert_same(ours, theirs)


def test_c06_backward_twice_with_retain_graph(device):
    both = Both(perceptron(device))
    for n in range(5):
        x, y = batch(device, n)
        for module in both:
            module.zero_grad()
            loss = F.mse_loss(module(x), y)
            loss.backward(retain_graph=True)
            (2 * loss).backward()
        both.check()
    assert_recorded(both, 4)


@may_run_live
def test_c06_a_callable_object_with_a_state_of_its_own(device):
    class Scaled:
        def __init__(self):
            self.weight, self.state = nn.Parameter(torch.ones(4, device=device)), torch.full((4,), 2.0, device=device)

        def __call__(self, x):
            return (x * self.weight * self.state).square()

    ours, theirs = Scaled(), Scaled()
    recorded = pg.record(ours, warmup=1)
    for n in range(6):
        for f, scaled in ((recorded, ours), (theirs, theirs)):
            f(torch.arange(4.0, device=device) + n).sum().backward()
            scaled.state.add_(1)
        assert_same(ours.weight.grad, theirs.weight.grad)
    assert pg.stats(recorded).replayed >= 4


class Towers(nn.Module):
    """Two results, each of one argument."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x, y):
        return torch.tanh(self.a(x)), torch.tanh(self.b(y))


def steps_of(optimizers):
    def step(p):
        optimizers[p].step()
        optimizers[p].zero_grad(set_to_none=False)

    return step


@may_run_live
@pytest.mark.parametrize("way", ["clamp", "step", "module", "checkpoint"])
def test_c06_modules_before_whose_result_has_no_gradient(device, way):
    """Autograd does not come by there: no hook runs, and nothing is recomputed."""

    def make():
        torch.manual_seed(0)
        return Towers().to(device), nn.Linear(4, 4).to(device), nn.Linear(4, 4).to(device)

    both = [make(), make()]
    pg.record(both[0][0], warmup=1)
    heard = [[], []]
    for (_, *encoders), seen in zip(both, heard, strict=True):
        parameters = [p for e in encoders for p in e.parameters()]
        if way == "module":
            for e in encoders:
                e.register_full_backward_hook(lambda _, given, out, seen=seen: seen.append(out[0].clone()))
        for p in parameters:
            if way == "clamp":
                p.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
            if way == "step":
                optimizers = {q: torch.optim.SGD([q], 0.1, momentum=0.9) for q in parameters}
                p.register_post_accumulate_grad_hook(steps_of(optimizers))
    for n in range(9):
        found = []
        for towers, first, second in both:
            torch.manual_seed(n)
            x, y = (torch.randn(2, 4, device=device, requires_grad=True) for _ in range(2))
            if way != "step":
                for module in (towers, first, second):
                    module.zero_grad()
            if way == "checkpoint":
                given = [checkpoint(e, t, use_reentrant=True) for e, t in ((first, x), (second, y))]
            else:
                given = first(x), second(y)
            a, b = towers(*given)
            (a if n % 3 else b).square().sum().backward()
            found.append([p.grad for m in (towers, first, second) for p in m.parameters()])
            found[-1] += [p.detach().clone() for m in (first, second) for p in m.parameters()]
        assert_same(*found)
        assert_same(*heard)


def test_c06_a_module_before_whose_result_is_not_used(device):
    """No result depends on that argument: autograd does not come by what made it."""

    class One(Towers):
        def forward(self, x, y):
            return torch.tanh(self.a(x))

    torch.manual_seed(0)
    module, first, second = pg.record(One().to(device), warmup=1), nn.Linear(4, 4).to(device), nn.Linear(4, 4).to(device)
    heard = []
    for p in second.parameters():
        p.register_hook(heard.append)
    for n in range(5):
        module(first(torch.ones(2, 4, device=device) + n), second(torch.ones(2, 4, device=device))).sum().backward()
    assert heard == []
    assert all(p.grad is not None for p in first.parameters())
    assert pg.stats(module).replayed == 4


@may_run_live
def test_c06_a_hook_that_waits_for_the_gradients_of_all(device):
    def make():
        torch.manual_seed(0)
        return Towers().to(device)

    both = [make(), make()]
    pg.record(both[0], warmup=1)
    calls = [[], []]
    for module, seen in zip(both, calls, strict=True):

        def step(_, module=module, seen=seen):
            with torch.no_grad():
                seen.append([None if p.grad is None else p.grad.clone() for p in module.parameters()])

        torch.autograd.graph.register_multi_grad_hook([*module.parameters()], step)
    for n in range(8):
        for module in both:
            torch.manual_seed(n)
            a, b = module(*torch.randn(2, 2, 4, device=device))
            (a if n % 3 else b).square().sum().backward()
        assert_same(*calls)
    assert len(calls[0]) == 8


@may_run_live
def test_c06_a_weight_of_two_recorded_modules(device):
    """On CUDA autograd adds up the gradient where the first of them says, and there the other cannot be captured; but once."""

    def make():
        torch.manual_seed(0)
        first, second = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
        second.weight = first.weight
        return first.to(device), second.to(device)

    ours, theirs = make(), make()
    for module in ours:
        pg.record(module, warmup=1)
    for n in range(10):
        found = []
        for first, second in (ours, theirs):
            torch.manual_seed(n)
            first.zero_grad()
            loss = second(first(torch.randperm(10, device=device)[:4]).tanh()).square().sum()
            loss.backward()
            with torch.no_grad():
                first.weight.sub_(first.weight.grad, alpha=0.01)
            found.append((loss.detach(), first.weight.grad))
        assert_same(*found)
    for module in ours:
        assert pg.stats(module).replayed >= 5, pg.explain(module)
        assert all(b.stats().replayed >= 4 for b in pg.api._recorded(module)._backwards)


class Looks(nn.Module):
    """Cannot be recorded."""

    def forward(self, x):
        return x * float(x.detach().sum() > -1)


@may_run_live
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("delay", [0, 0.01, 0.02, 0.04])
def test_c14_gradients_that_another_thread_adds_while_a_forward_is_captured(delay, fails):
    """A forward has no business with them; so neither its end nor its failure puts them back. (On a GPU that thread would
    work on the stream that is captured: docs/limits.md.)"""

    def gradients(record):
        net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(60)])
        if fails:
            net.append(Looks())
        for p in net.parameters():
            p.data.fill_(0.25)
        if record:
            pg.record(net, warmup=1)
        x = torch.ones(3, 4)
        first = net(x).sum()
        add = threading.Thread(target=lambda: (time.sleep(delay), first.backward()))
        add.start()
        second = net(x).sum()
        add.join()
        second.backward()
        return [p.grad.clone() for p in net.parameters()]

    assert_same(gradients(True), gradients(False))


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another thread"])
@pytest.mark.parametrize("how", ["a method under another name", "an attribute by a name in a variable"])
def test_c06_a_forward_that_drops_gradients(device, how, beside):
    def make():
        torch.manual_seed(0)
        net, name = nn.Linear(3, 3).to(device), "grad"
        prepare = net.zero_grad

        def forward(x):
            if how == "a method under another name":
                prepare()
            else:
                for p in net.parameters():
                    setattr(p, name, None)
            return net(x)

        return net, forward

    (ours, f), (theirs, g) = make(), make()
    recorded = pg.record(f)
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    if beside:
        thread.start()
    try:
        for n in range(6):
            x = torch.full((2, 3), n + 1.0, device=device)
            recorded(x).sum().backward()
            g(x).sum().backward()
            assert_same([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()])
    finally:
        done.set()
    assert pg.stats(recorded).replayed >= 4


@may_run_live
def test_c16_a_module_made_with_the_attributes_of_a_recorded_one(device):
    """What calls of the one go through, calls of the other do as well; but it is the other that has to run."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.by = 2.0

        def forward(self, x):
            return self.linear(x) * self.by

    module = pg.record(Scaled().to(device), warmup=1)
    x = torch.ones(1, 3, device=device)
    for _ in range(4):
        module(x)
    other = Scaled.__new__(Scaled)
    other.__dict__.update(module.__dict__)
    other._modules = {"linear": nn.Linear(3, 3).to(device)}
    other.by = 5.0
    for _ in range(3):
        assert_same(other(x), other.forward(x))
        assert_same(module(x), module.forward(x))
    other(x).sum().backward()
    assert other.linear.weight.grad is not None
    assert module.linear.weight.grad is None
    assert pg.stats(module).replayed >= 4


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_c06_a_hooked_weight_without_gradient_is_frozen_for_a_backward(device, kind):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.a(x), self.b(x)

    torch.manual_seed(0)
    theirs = Two().to(device)
    ours = pg.record(copy.deepcopy(theirs), warmup=1)
    heard = {ours: [], theirs: []}
    for m, calls in heard.items():  # hooks that refer to their model would keep it
        getattr(m.b.weight, kind)(lambda t, calls=calls: calls.append(1))
    for n in range(7):
        for m in (ours, theirs):
            u, v = m(torch.full((2, 3), n + 1.0, device=device))
            m.b.requires_grad_(n not in (3, 5))
            (u if n in (2, 3, 4) else u + v).sum().backward()
            m.b.requires_grad_(True)
        assert_same([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()])
    assert heard[ours] == heard[theirs]
    assert pg.stats(ours).replayed >= 4


def test_c10_a_weight_that_autocast_casts_once_or_each_time(device):
    class Thrice(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x):
            return self.linear(x) + self.linear(x * 2) * 0.3 + self.linear(x.sin())

    torch.manual_seed(0)
    theirs = Thrice().to(device)
    ours = pg.record(copy.deepcopy(theirs), warmup=1)
    x = torch.randn(4, 6, device=device)
    for cached in (True, True, True, False, False, False, True):
        for m in (ours, theirs):
            m.zero_grad()
            with torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=cached):
                y = m(x)
            y.float().square().sum().backward()
        assert_same([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()])
    assert pg.stats(ours).replayed >= 4


def test_c06_backward_a_second_time_raises_what_eager_raises(device):
    both = Both(perceptron(device))
    for n in range(5):
        x, y = batch(device, n)
        for module in both:
            loss = F.mse_loss(module(x), y)
            loss.backward()
            with pytest.raises(RuntimeError, match="second time"):
                loss.backward()


def test_c06_gradients_by_autograd_grad(device):
    both = Both(perceptron(device))
    for n in range(5):
        x, y = batch(device, n)
        found = []
        for module in both:
            leaf = x.clone().requires_grad_()
            loss = F.mse_loss(module(leaf), y)
            found.append((torch.autograd.grad(loss, [leaf, *list(module.parameters())[::2]]), grads(module)))
        assert_same(*found)
    assert_recorded(both, 4)


@pytest.mark.parametrize("leaf", [True, False])
def test_c06_inputs_that_require_a_gradient(device, leaf):
    both = Both(perceptron(device))
    for n in range(6):
        x, y = batch(device, n)
        found = []
        for module in both:
            module.zero_grad()
            start = x.clone().requires_grad_()
            F.mse_loss(module(start if leaf else start * 2), y).backward()
            found.append(start.grad)
        assert_same(*found)
        both.check()
    assert_recorded(both, 5)


class ManyWays(nn.Module):
    """Keyword arguments, None, integers, nested results; a parameter that is not used, one that is frozen, one used twice."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.unused = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.full((4,), 0.5), requires_grad=False)

    def forward(self, tokens, *, scale=1.0, mask=None, more=None):
        h = self.table(tokens) * scale + self.frozen
        if mask is not None:
            h = h.masked_fill(mask, 0.0)
        if more is not None:
            h = h + more["x"]
        a = self.first(h).relu()
        return {"a": a, "rest": [self.second(a), tokens + 1, None, 7], "h": h}


USED = {
    "a": lambda o: o["a"].sum(),
    "b": lambda o: o["rest"][0].square().sum(),
    "all": lambda o: (o["a"] * o["rest"][0] * o["h"]).sum(),
    "none of these": lambda o: o["h"].sum(),
}


@pytest.mark.parametrize("used", USED)
def test_c06_arguments_and_results_of_all_kinds(device, used):
    torch.manual_seed(0)
    both = Both(ManyWays().to(device))
    for n in range(6):
        tokens = torch.arange(n, n + 3, device=device)
        results = []
        for module in both:
            module.zero_grad()
            more = {"x": torch.full((3, 4), float(n), device=device, requires_grad=True)}
            out = module(tokens, scale=2.0, mask=torch.eye(3, 4, dtype=torch.bool, device=device), more=more)
            USED[used](out).backward()
            results.append((out, more["x"].grad))
        assert_same(*results)
        both.check()
    assert_recorded(both, 5)


def test_c06_another_set_of_results_is_used_in_each_step(device):
    torch.manual_seed(0)
    both = Both(ManyWays().to(device))
    for n in range(9):
        tokens = torch.arange(n % 4, n % 4 + 3, device=device)
        for module in both:
            module.zero_grad()
            out = module(tokens)
            sum([out["a"].sum(), out["rest"][0].square().sum(), out["h"].sum()][: 1 + n % 3]).backward()
        both.check()
    assert_recorded(both, 8)


@dataclasses.dataclass
class Batch:
    x: torch.Tensor


class ByAttribute(dict):
    def __getattr__(self, name):
        return self[name]


GIVEN = {"a dataclass": Batch, "a namespace": types.SimpleNamespace, "a dictionary with attributes": ByAttribute}


@pytest.mark.parametrize("made", GIVEN.values(), ids=list(GIVEN))
def test_c06_a_model_is_given_an_object_that_holds_its_batch(device, made):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2, device=device)

        def forward(self, batch):
            return self.layer(batch.x)

    net = Net()
    twin = copy.deepcopy(net)
    pg.record(net, keep="always")
    for turn in range(5):
        x = ramp(device, 4, 3) + turn
        for each in (net, twin):
            each(made(x=x.clone())).square().sum().backward()
        assert_same([p.grad for p in net.parameters()], [p.grad for p in twin.parameters()])
    assert pg.stats(net).recorded == 1
    assert pg.stats(net).replayed >= 3, pg.explain(net)
