"""C6, C16: functions and modules whose backward runs outside. Loss and optimizer are the user's; gradients are eager's."""

import copy
import gc
import io
import pickle
import threading
import time
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import phonograph as pg
from phonograph.autograd.function import MANY
from phonograph.compile import backend, graphs
from phonograph.engine import recorder
from phonograph.testing import assert_same
from tests.helpers import may_run_live


def grads(module):
    return [p.grad for p in module.parameters()]


class Both:
    """A module recorded, and a copy of it live, which are told the same."""

    def __init__(self, module, **options):
        self.live = copy.deepcopy(module)
        self.recorded = pg.record(module, **{"warmup": 1, **options})

    def __iter__(self):
        return iter((self.recorded, self.live))

    def optimizers(self, kind=torch.optim.SGD, **options):
        return [kind(m.parameters(), **{"lr": 0.1, **options}) for m in self]

    def learn(self, x, y):
        """Gradients from these, in both."""
        for module in self:
            module.zero_grad()
            F.mse_loss(module(x), y).backward()
        self.check()

    def check(self):
        assert_same(list(self.recorded.state_dict().values()), list(self.live.state_dict().values()))
        assert_same(grads(self.recorded), grads(self.live))

    @property
    def stats(self):
        return pg.stats(self.recorded)


def assert_recorded(both, replayed):
    """The forwards were replayed, and so were the backwards, after their own warm-up."""
    assert both.stats.replayed >= replayed, pg.explain(both.recorded)
    assert not both.stats.refusals, pg.explain(both.recorded)
    backwards = [pg.stats(b) for b in pg.api._recorded(both.recorded)._backwards]
    assert sum(b.replayed for b in backwards) > 0, pg.explain(both.recorded)
    assert not any(b.refusals for b in backwards), pg.explain(both.recorded)


def perceptron(device):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).to(device)


def batch(device, n, rows=5):
    torch.manual_seed(100 + n)
    return torch.randn(rows, 4, device=device), torch.randn(rows, 3, device=device)


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


# ---------------------------------------------------------------------------------------------------
# C6, C7: modes and state


def test_c06_train_and_eval_and_no_grad_in_turn(device):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)).to(device)
    both = Both(net)
    optimizers = both.optimizers()
    for n in range(12):
        x, y = batch(device, n)
        results = []
        for module, optimizer in zip(both, optimizers, strict=True):
            torch.manual_seed(n)
            if n % 3 == 2:
                module.eval()
                with torch.no_grad():
                    results.append(module(x))
            else:
                module.train()
                optimizer.zero_grad()
                loss = F.mse_loss(module(x), y)
                loss.backward()
                optimizer.step()
                results.append((loss, torch.rand(1, device=device)))
        assert_same(*results)
        both.check()
    assert both.stats.replayed >= 8, pg.explain(both.recorded)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_c06_autocast(device, dtype):
    both = Both(perceptron(device))
    for n in range(5):
        x, y = batch(device, n)
        for module in both:
            module.zero_grad()
            with torch.autocast(device.type, dtype):
                out = module(x)
                assert out.dtype is dtype
            F.mse_loss(out.float(), y).backward()
        both.check()
    assert_recorded(both, 4)


@pytest.mark.parametrize("scale", [8.0, 2.0**20], ids=["never skips", "skips at first"])
def test_c06_a_gradient_scaler_around_a_recorded_module(device, scale):
    both = Both(perceptron(device))
    optimizers = both.optimizers(torch.optim.AdamW, fused=True)
    scalers = [torch.amp.GradScaler(device.type, init_scale=scale, growth_interval=3) for _ in both]
    for n in range(12):
        x, y = batch(device, n)
        for module, optimizer, scaler in zip(both, optimizers, scalers, strict=True):
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.float16):
                out = module(x)
            scaler.scale(F.mse_loss(out.float(), y) * 100).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        both.check()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert_recorded(both, 11)


CHANGES = {
    "a new storage": lambda m: setattr(m[0].weight, "data", m[0].weight.data * 2),
    "loaded": lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}),
    "assigned": lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}, assign=True),
    "frozen": lambda m: m[2].requires_grad_(False),
    "another layer": lambda m: m.__setitem__(1, nn.Sigmoid()),
    "double": lambda m: m.double(),
    "a parameter": lambda m: setattr(m[0], "weight", nn.Parameter(m[0].weight.detach() * 3)),
    "a hook": lambda m: m[0].weight.register_hook(lambda g: g * 2),
}


@may_run_live
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_c08_the_module_changes(device, change):
    both = Both(perceptron(device))
    for n in range(9):
        x, y = batch(device, n)
        if n == 4:
            torch.manual_seed(0)
            for module in both:
                change(module)
        for module in both:
            module.zero_grad()
            kind = next(module.parameters()).dtype
            F.mse_loss(module(x.to(kind)), y.to(kind)).backward()
        both.check()
    assert both.stats.replayed >= 6, pg.explain(both.recorded)


@pytest.mark.parametrize("rows", [1, 7])
def test_c07_another_batch_size(device, rows):
    both = Both(perceptron(device))
    for n in range(8):
        x, y = batch(device, n, rows if n % 2 else 5)
        for module in both:
            module.zero_grad()
            F.mse_loss(module(x), y).backward()
        both.check()
    assert_recorded(both, 6)


@pytest.mark.parametrize("train", [True, False])
def test_c06_two_forwards_of_a_module_with_running_statistics(device, train):
    torch.manual_seed(0)
    both = Both(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).to(device).train(train))
    for n in range(5):
        for module in both:
            module.zero_grad()
            sum(F.mse_loss(module(x), y) for x, y in (batch(device, 2 * n + i) for i in range(2))).backward()
        both.check()
    assert_recorded(both, 8)


@may_run_live
def test_c06_a_saved_tensor_is_written_inside(device):
    weight = nn.Parameter(torch.ones(3, device=device))

    def f(x):
        y = (weight * x).exp()
        return y.add_(1) * 2

    recorded = pg.record(f, warmup=0)
    for n in range(3):
        for function in (recorded, f):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                function(torch.full((3,), float(n), device=device)).sum().backward()


def test_c08_a_weight_that_was_saved_itself_changes_places(device):
    """Then eager reads the new one in the backward."""
    weights = [nn.Parameter(torch.full((3,), 2.0, device=device)) for _ in range(2)]
    recorded = pg.record(lambda x: weights[0] * x, warmup=1)
    for n in range(6):
        found = []
        for f, weight in ((recorded, weights[0]), (lambda x: weights[1] * x, weights[1])):
            x = torch.full((3,), float(n), device=device, requires_grad=True)
            out = f(x)
            weight.data = torch.full((3,), 3.0 + n, device=device)
            out.sum().backward()
            found.append(x.grad)
        assert_same(*found)


def test_c08_weights_change_places_between_forward_and_backward(device):
    """As eager does, the backward reads the weights that its forward has read, though nobody else holds them."""
    both = Both(perceptron(device))
    for n in range(8):
        x, y = batch(device, n)
        for module in both:
            module.zero_grad()
            loss = F.mse_loss(module(x), y)
            for p in module.parameters():
                p.data = p.data * 0.5
            torch.full((64,), 7.0, device=device)
            loss.backward()
        both.check()


# ---------------------------------------------------------------------------------------------------
# C6: hooks


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


# ---------------------------------------------------------------------------------------------------
# C6: writes between forward and backward


class Tanh(nn.Module):
    """Its result is what autograd has saved."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x).tanh()


def test_c06_a_result_is_written_before_its_backward(device):
    torch.manual_seed(0)
    both = Both(Tanh().to(device))
    for n in range(5):
        x, _ = batch(device, n)
        for module in both:
            out = module(x)
            out.detach().mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()


def test_c06_a_result_that_is_not_saved_is_written(device):
    torch.manual_seed(0)
    both = Both(nn.Linear(4, 3).to(device))
    for n in range(5):
        x, y = batch(device, n)
        results = []
        for module in both:
            module.zero_grad()
            out = module(x)
            out.mul_(2)
            F.mse_loss(out, y).backward()
            results.append(out)
        assert_same(*results)
        both.check()
    assert_recorded(both, 4)


def test_c06_a_parameter_is_written_between_forward_and_backward(device):
    both = Both(perceptron(device))
    for n in range(5):
        x, y = batch(device, n)
        for module in both:
            loss = F.mse_loss(module(x), y)
            with torch.no_grad():
                module[2].weight.mul_(1.5)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


@pytest.mark.parametrize("part", [lambda x: x, lambda x: x[1:], lambda x: x.t()[2:].t()], ids=["all", "rows", "columns"])
def test_c06_the_callers_input_is_written_after_the_forward(device, part):
    """What of it was saved is the input itself, as in eager: that raises where it was written, and reads what is there where it
    was written unseen."""
    both = Both(Parted(part).to(device))
    for n in range(8):
        x, found = batch(device, n)[0], []
        for module in both:
            module.zero_grad()
            mine = x.clone()
            loss = module(mine).square().sum()
            if n % 3 == 1:
                mine.zero_()
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    loss.backward()
            else:
                if n % 3 == 2:
                    mine.data.mul_(2)
                loss.backward()
            found.append(grads(module))
        assert_same(*found)
    assert_recorded(both, 6)


class Parted(nn.Module):
    """Saves a part of its argument."""

    def __init__(self, part):
        super().__init__()
        self.part, self.weight = part, nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.part(x) * self.weight


class KeepsItsArgument(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.x = x
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        return None, (grad * ctx.x).sum()


@pytest.mark.parametrize("write", [lambda x: x.mul_(2), lambda x: x.data.mul_(2)], ids=["seen", "unseen"])
def test_c06_an_argument_that_code_keeps_is_written_after_the_forward(device, write):
    """Nothing raises: the backward reads what is there then."""
    both = Both(Kept().to(device))
    for n in range(6):
        found = []
        for module in both:
            module.zero_grad()
            x = batch(device, n)[0]
            loss = module(x).sum()
            if n % 2:
                write(x)
            loss.backward()
            found.append(grads(module))
        assert_same(*found)
    assert_recorded(both, 5)


class Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return KeepsItsArgument.apply(x, self.weight)


def test_c05_an_argument_that_was_saved_is_the_result_of_another_recording(device, monkeypatch):
    """Its memory is not written again before the backward has read it, though nobody else holds it."""
    monkeypatch.setattr(recorder, "SMALL", 0)  # the result lies in the memory of the recording
    f, g = pg.record(nn.Tanh().to(device), warmup=1), Both(Parted(lambda y: y[1:]).to(device))
    for n in range(8):
        found = []
        for module in g:
            module.zero_grad()
            z = module(f(batch(device, n)[0]))
            f(batch(device, n + 50)[0])
            z.sum().backward()
            found.append(grads(module))
        assert_same(*found)
        assert_same(found[0][0], batch(device, n)[0].tanh()[1:].sum())
    assert_recorded(g, 7)


def test_c05_an_argument_that_was_saved_is_there_until_the_backward_ends(device):
    """Where a backward is played on a stream of its own, as that of many parameters is: what reads the argument may still be at
    work when autograd goes on."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(MANY))).to(device)
    pg.record(model, warmup=1)
    seen = []
    for n in range(5):
        x = batch(device, n)[0].clone()
        there = weakref.ref(x.untyped_storage())
        loss = model(x).sum()
        del x
        look = model[0].weight.register_post_accumulate_grad_hook(lambda _, there=there: seen.append(there() is not None))
        loss.backward()
        look.remove()
        assert there() is None
    assert pg.stats(model).replayed == 4
    assert seen[1:] == [True] * 4  # (autograd lets a live call's go as soon as it was read)


@pytest.mark.parametrize("retain", [False, True])
def test_c06_an_argument_that_was_saved_goes_with_its_graph(device, retain):
    """It is held as long as eager holds it, and no copy of it is kept."""
    both = Both(Parted(lambda x: x[1:]).to(device))
    for n in range(6):
        x, there = batch(device, n)[0], []
        for module in both:
            module.zero_grad()
            mine = x.clone()
            ref = weakref.ref(mine.untyped_storage())
            y = module(mine)
            del mine
            there.append([ref() is not None])
            y.sum().backward(retain_graph=retain)
            there[-1].append(ref() is not None)
            y.sum().backward() if retain else None
            there[-1].append(ref() is not None)
            del y
            there[-1].append(ref() is not None)
        assert there[0] == there[1] == [True, retain, False, False]
        both.check()
    (recording,) = [p.recording for p in pg.api._recorded(both.recorded)._shelf]
    assert recording.backward.saved.memory == []


@may_run_live
def test_c06_an_argument_that_requires_a_gradient_is_written(device):
    def f(x):
        x.mul_(2)
        return (x * x).sum()

    g = pg.record(f, warmup=1)
    for n in range(5):
        found = []
        for function in (f, g):
            start = torch.full((3,), float(n), device=device, requires_grad=True)
            x = start * 1
            function(x).backward()
            found.append((start.grad, x.detach()))
        assert_same(*found)


# ---------------------------------------------------------------------------------------------------
# C6: what cannot be recorded as a pair is right all the same


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


class ActorAndCritic(nn.Module):
    def __init__(self, bounded):
        super().__init__()
        self.actor, self.critic = nn.Linear(4, 3), nn.Linear(4, 1)

        self.bounded = bounded

    def forward(self, x):
        return self.actor(x).tanh() if self.bounded else self.actor(x), self.critic(x)


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


# ---------------------------------------------------------------------------------------------------
# C14, C15: several of them


def test_c15_modules_in_a_row(device):
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(device) for _ in range(3)]
    chain = [Both(net) for net in nets]
    for n in range(6):
        x, y = batch(device, n)
        for i in range(2):
            h = x
            for both in chain:
                module = list(both)[i]
                module.zero_grad()
                h = module(h)
            F.mse_loss(h[:, :3], y).backward()
        for both in chain:
            both.check()
    for both in chain:
        assert_recorded(both, 5)


def test_c15_one_module_applied_again_and_again(device):
    torch.manual_seed(0)
    both = Both(nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(device))
    for n in range(6):
        x, y = batch(device, n)
        for module in both:
            module.zero_grad()
            F.mse_loss(module(module(module(x)))[:, :3], y).backward()
        both.check()
    assert_recorded(both, 15)


def test_c14_a_recorded_module_in_a_recorded_step(device):
    both = Both(perceptron(device))
    optimizers = both.optimizers()

    def make(module, optimizer):
        def step(x, y):
            optimizer.zero_grad()
            loss = F.mse_loss(module(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    steps = [make(*each) for each in zip(both, optimizers, strict=True)]
    steps[0] = pg.record(steps[0], warmup=1)
    for n in range(6):
        x, y = batch(device, n)
        assert_same(*[step(x, y) for step in steps])
        both.check()
    assert pg.stats(steps[0]).replayed == 5, pg.explain(steps[0])


def test_c14_the_optimizer_recorded_beside(device):
    both = Both(perceptron(device))
    optimizers = both.optimizers(torch.optim.AdamW, fused=True)
    step = pg.record(optimizers[0].step, warmup=1)
    for n in range(12):
        x, y = batch(device, n)
        for module, optimizer in zip(both, optimizers, strict=True):
            optimizer.zero_grad()
            F.mse_loss(module(x), y).backward()
            step() if module is both.recorded else optimizer.step()
        both.check()
    assert pg.stats(step).replayed >= 6, pg.explain(step)
    assert pg.stats(step).recorded <= 3, pg.explain(step)


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@may_run_live
@pytest.mark.parametrize("inside", [True, False])
def test_c11_distributed_data_parallel(device, one_process, inside):
    """It prepares each backward outside of what can be captured; the module that it wraps can be recorded."""
    nets = [perceptron(device) for _ in range(2)]
    if inside:
        pg.record(nets[0], warmup=1)
    both = [nn.parallel.DistributedDataParallel(net) for net in nets]
    if not inside:
        pg.record(both[0], warmup=1)
    for n in range(6):
        x, y = batch(device, n)
        for module in both:
            module.zero_grad()
            F.mse_loss(module(x), y).backward()
        assert_same(grads(nets[0]), grads(nets[1]))
    story = pg.explain(nets[0] if inside else both[0])
    assert ("contains DistributedDataParallel" in story) != inside, story
    assert (pg.stats(nets[0] if inside else both[0]).replayed > 3) == inside, story


@may_run_live
@pytest.mark.parametrize("way", ["recorded", "off", "recorded inside"])
def test_c14_a_replica_that_data_parallel_makes_runs_itself(device, monkeypatch, way):
    """It has all attributes of its module, but other parameters: those that were copied to its device."""
    monkeypatch.setenv("PHONOGRAPH", "off" if way == "off" else "on")
    module, other = pg.record(nn.Linear(3, 2, device=device), warmup=1), nn.Linear(3, 2, device=device)
    call = pg.record(lambda replica, x: replica(x), warmup=1) if way == "recorded inside" else (lambda replica, x: replica(x))
    x, shorter = torch.ones(4, 3, device=device), torch.ones(2, 3, device=device)  # another signature, as on another device
    for _ in range(5):
        assert_same(module(x).detach(), F.linear(x, module.weight, module.bias).detach())
        replica = module._replicate_for_data_parallel()
        replica.weight, replica.bias = other.weight.detach(), other.bias.detach()
        assert_same(call(replica, shorter), F.linear(shorter, other.weight, other.bias).detach())
    if way == "recorded":
        assert pg.stats(module).replayed == 4, pg.explain(module)
        assert any("DataParallel" in reason for reason in pg.stats(module).refusals)


@may_run_live
def test_c14_data_parallel_over_two_gpus(cuda):
    if torch.cuda.device_count() < 2:
        pytest.skip("torch sees one GPU")
    nets = [perceptron(cuda) for _ in range(2)]
    both = [nn.DataParallel(pg.record(nets[0], warmup=1)), nn.DataParallel(nets[1])]
    for n in range(4):
        x, y = batch(cuda, n)
        for module in both:
            module.zero_grad()
            F.mse_loss(module(x), y).backward()
        assert_same(grads(nets[0]), grads(nets[1]))


# ---------------------------------------------------------------------------------------------------
# C16: the module is what it was


def test_c16_a_recorded_module_is_the_same_module(device):
    net = perceptron(device)
    names, kind = list(net.state_dict()), type(net)
    assert pg.record(net, warmup=1) is net
    for n in range(4):
        net(batch(device, n)[0]).sum().backward()
    assert list(net.state_dict()) == names
    assert type(net) is kind
    assert isinstance(net, nn.Sequential)
    assert list(dict(net.named_modules())) == list(dict(perceptron(device).named_modules()))


COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda net: pickle.loads(pickle.dumps(net)),
    "torch.save": lambda net: _saved_and_loaded(net),
}


def _saved_and_loaded(net):
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_c16_copies_of_a_recorded_module(device, duplicate):
    net = pg.record(perceptron(device), warmup=1)
    for n in range(4):
        net(batch(device, n)[0]).sum().backward()
    net.zero_grad()
    other = duplicate(net)
    with pytest.raises(TypeError, match="was called on"):
        pg.stats(other)
    x, _ = batch(device, 7)
    before = pg.stats(net).calls
    assert_same(other(x), net(x))
    assert pg.stats(net).calls == before + 1


def test_c16_reset_undoes_it(device):
    net = pg.record(perceptron(device), warmup=1)
    outs = [net(batch(device, n)[0]) for n in range(4)]
    pg.reset(net)
    for n, out in enumerate(outs):  # what is in flight is right
        net.zero_grad()
        out.sum().backward()
        found = grads(net)
        net.zero_grad()
        net(batch(device, n)[0]).sum().backward()
        assert_same(found, grads(net))
    with pytest.raises(TypeError):
        pg.stats(net)


def test_c17_a_recorded_module_goes_when_it_is_dropped(device):
    net = pg.record(perceptron(device), warmup=1)
    for n in range(4):
        net(batch(device, n)[0]).sum().backward()
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("recompute", [False, True])
def test_c06_attention_whose_backward_runs_live(device, monkeypatch, recompute):
    """On a GPU it can only run in a capture, so that it runs in one that is made for it alone."""
    torch.manual_seed(0)
    both = [nn.Linear(6, 6).to(device) for _ in range(2)]
    both[1].load_state_dict(both[0].state_dict())

    def make(net):
        def attend(x):
            return F.scaled_dot_product_attention(*(3 * [net(x).view(4, 1, 3, 2)]), dropout_p=0.4)

        return lambda x: checkpoint(attend, x, use_reentrant=False) if recompute else attend(x)

    recorded = pg.record(make(both[0]), warmup=1)
    for n in range(6):
        results = []
        for f, net in ((recorded, both[0]), (make(both[1]), both[1])):
            net.zero_grad()
            torch.manual_seed(n)
            out = f(torch.full((4, 6), 0.1 * n, device=device))
            torch.rand(n, device=device)
            with monkeypatch.context() as m:
                m.setenv("PHONOGRAPH", "off" if n != 3 else "")
                out.square().sum().backward()
            results.append(([p.grad for p in net.parameters()], torch.rand(1, device=device)))
        assert_same(*results)
    assert pg.stats(recorded).replayed == 5


class OwnBackward(torch.autograd.Function):
    """Runs a part without a history, and recomputes it with a backward of its own."""

    @staticmethod
    def forward(ctx, part, x):
        ctx.part = part
        ctx.save_for_backward(x)
        with torch.no_grad():
            return part(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.part(x), grad)
        return None, x.grad


def around(part, x):
    return checkpoint(part, x, use_reentrant=True)


REACHING_OUT = {
    "an argument": lambda w, x: around(lambda a: a * w * x, (x * w).sin()),
    "an argument alone": lambda w, x: around(lambda a: a * x, x.sin()) * w,
    "something between": lambda w, x: (lambda h: around(lambda a: (a * h).cos(), x * w) + h)((x * w).sin()),
    "in a list": lambda w, x: checkpoint(lambda a, more: a * more[0], x * w, [x * 1.0], use_reentrant=True),
    "a function of one's own": lambda w, x: OwnBackward.apply(lambda a: a * x * w, (x * w).sin()),
}


@may_run_live
@pytest.mark.parametrize("function", REACHING_OUT.values(), ids=REACHING_OUT)
def test_c06_a_part_with_a_backward_of_its_own_that_reaches_out(device, function):
    """Its backward goes on into the graph around it."""
    weights = [nn.Parameter(torch.full((4,), 0.5, device=device)) for _ in range(2)]
    recorded = pg.record(lambda x: function(weights[0], x), warmup=1)
    for n in range(7):
        found = []
        for f, w in ((recorded, weights[0]), (lambda x: function(weights[1], x), weights[1])):
            w.grad = None
            x = torch.full((4,), 0.1 * (n + 1), device=device, requires_grad=True)
            try:
                f(x).sum().backward()
                found.append((x.grad, w.grad))
            except RuntimeError as e:
                found.append(str(e)[:40])
        assert_same(*found)


class Changing(torch.autograd.Function):
    """Changes in its backward what its forward has made."""

    @staticmethod
    def forward(ctx, x, how):
        ctx.t, ctx.n, ctx.stack, ctx.how = x.clone(), 1, [x.exp()], how
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        if ctx.how == "pops":
            return grad * ctx.stack.pop(), None
        if ctx.how == "counts":
            ctx.n += 1
            return grad * ctx.n, None
        t = ctx.t
        ctx.t = None
        return grad * t.cos(), None


@may_run_live
@pytest.mark.parametrize("how", ["frees", "pops", "counts"])
def test_c06_a_backward_that_changes_what_its_forward_has_made(device, how):
    """In eager each forward makes it anew."""
    weights = [nn.Parameter(torch.full((4,), 0.5, device=device)) for _ in range(2)]
    recorded = pg.record(lambda x: Changing.apply(x * weights[0], how) * 2, warmup=1)
    for n in range(7):
        for f, w in ((recorded, weights[0]), (lambda x: Changing.apply(x * weights[1], how) * 2, weights[1])):
            w.grad = None
            f(torch.full((4,), 0.1 * (n + 1), device=device)).sum().backward()
        assert_same(weights[0].grad, weights[1].grad)
    assert "changes in its backward" in pg.explain(recorded)


def test_c06_steps_in_hooks_with_two_calls_in_one_backward(device):
    """Where a parameter gets a gradient in some backwards only."""

    def step(p):
        p.data.add_(p.grad, alpha=-0.1)
        p.grad = None

    pairs = [[nn.Parameter(torch.full((4,), 0.5, device=device)) for _ in range(2)] for _ in range(2)]
    functions = [lambda x, w=w, v=v: ((x * w).sin(), (x * v).cos()) for w, v in pairs]
    for p in (p for pair in pairs for p in pair):
        p.register_post_accumulate_grad_hook(step)
    functions[0] = pg.record(functions[0], warmup=1)
    for n in range(12):
        for f in functions:
            a, b = (f(torch.full((4,), 0.1 * (n + i), device=device)) for i in range(2))
            ((a[0] if n % 3 < 2 else a[1]).sum() + b[0].sum()).backward()
        assert_same(*pairs)
    assert pg.stats(functions[0]).replayed > 12


@may_run_live
def test_c06_steps_in_hooks_with_reentrant_parts(device):
    """Eager takes the step before an earlier part is recomputed."""

    def step(p):
        p.data.add_(p.grad, alpha=-0.1)
        p.grad = None

    torch.manual_seed(0)
    both = Both(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device))
    pg.reset(both.recorded)

    def make(net):
        def f(x):
            h = checkpoint(lambda h: net[0](h).tanh(), x, use_reentrant=True)
            return checkpoint(lambda h: net[0](net[1](h)).tanh(), h, use_reentrant=True) * 1.0

        return f

    for net in both:
        for p in net.parameters():
            p.register_post_accumulate_grad_hook(step)
    recorded, live = pg.record(make(both.recorded), warmup=1), make(both.live)
    for n in range(6):
        xs = [torch.full((2, 4), 0.1 * (n + 1), device=device, requires_grad=True) for _ in range(2)]
        for f, x in zip((recorded, live), xs, strict=True):
            f(x).sum().backward()
        assert_same(xs[0].grad, xs[1].grad)
        assert_same(list(both.recorded.parameters()), list(both.live.parameters()))


@may_run_live
@pytest.mark.parametrize("pre", [True, False])
def test_c17_a_module_with_backward_hooks_goes_when_it_is_dropped(device, pre):
    class Net(nn.Linear):
        def hook(self, module, *grads):
            assert module is self
            self.heard += 1

    net = Net(4, 4).to(device)
    net.heard = 0
    (net.register_full_backward_pre_hook if pre else net.register_full_backward_hook)(net.hook)
    pg.record(net, warmup=1)
    for _ in range(5):
        net(torch.ones(2, 4, device=device, requires_grad=True)).sum().backward()
    out = net(torch.ones(2, 4, device=device, requires_grad=True))
    assert net.heard == 5
    ref = weakref.ref(net)
    del net
    gc.collect()
    assert ref() is not None  # its backward is still to come
    out.sum().backward()
    assert ref().heard == 6
    del out
    gc.collect()
    assert ref() is None


@pytest.mark.parametrize("reentrant", [True, False])
def test_c06_a_weight_frozen_between_forward_and_backward(device, reentrant):
    torch.manual_seed(0)
    both = Both(nn.Linear(4, 4).to(device))
    pg.reset(both.recorded)

    def make(net):
        return lambda x: checkpoint(lambda h: net(h).tanh(), x, use_reentrant=reentrant) * 1.0

    recorded, live = pg.record(make(both.recorded), warmup=1), make(both.live)
    for n in range(6):
        xs = [torch.full((2, 4), 0.1 * (n + 1), device=device, requires_grad=True) for _ in range(2)]
        for f, net, x in zip((recorded, live), both, xs, strict=True):
            net.requires_grad_(True)
            net.zero_grad()
            out = f(x)
            if reentrant:
                net.weight.requires_grad_(n % 2 == 0)
            out.sum().backward()
        assert_same(xs[0].grad, xs[1].grad)
        both.check()


def test_c06_a_result_whose_backward_comes_after_the_next_call(device):
    """It needs nothing of what autograd has saved, all of which another result's backward has read; but what code keeps."""

    def make(w):
        return lambda x: ((w * x).relu().sum(), checkpoint(lambda: F.dropout(w, 0.5), use_reentrant=False).sum())

    weights = [nn.Parameter(torch.full((64,), 0.5, device=device)) for _ in range(2)]
    recorded = pg.record(make(weights[0]), warmup=1)
    for n in range(7):
        for f, w in ((recorded, weights[0]), (make(weights[1]), weights[1])):
            w.grad = None
            torch.manual_seed(n)
            first = f(torch.full((64,), 0.1 * n, device=device))
            first[0].backward()
            second = f(torch.full((64,), 0.2 * n, device=device))
            first[1].backward()
            w.grad.mul_(2)  # so that the order shows
            second[0].backward()
            second[1].backward()
        assert_same(*(w.grad for w in weights))
    assert pg.stats(recorded).replayed == 13, pg.explain(recorded)


def test_c17_what_a_backward_has_recomputed_goes_with_it(device):
    """Also what it did not read, of a part of which only one result has a gradient."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 37), nn.Linear(37, 4)

        def part(self, x):
            h = self.first(x)
            return self.second(h.relu()), h.exp().sin().sum()

        def forward(self, x):
            return checkpoint(self.part, x, use_reentrant=False)

    def hidden():
        gc.collect()
        return sum(type(t) is torch.Tensor and t.shape == (2, 37) for t in gc.get_objects())

    net = pg.record(Net().to(device), warmup=1)
    for n in range(4):
        out, _ = net(torch.ones(2, 4, device=device, requires_grad=True))
        before = hidden()
        if n:
            out.sum().backward()
        del out, _
        if n == 1:  # this backward ran live; the next is recorded
            assert hidden() <= before
    assert pg.stats(net).replayed == 3


@may_run_live
def test_c06_a_parameter_that_is_used_outside_before(device):
    """On a GPU its gradient is added up on the default stream then, which no capture may wait for."""
    torch.manual_seed(0)
    words, ids = nn.Embedding(16, 8).to(device), torch.arange(4, device=device)
    heads = [nn.Linear(8, 16, bias=False).to(device) for _ in range(2)]
    both = [words, copy.deepcopy(words)]
    for word, head in zip(both, heads, strict=True):
        head.weight = word.weight
    calls = pg.record(heads[0]), heads[1]
    for n in range(6):
        for word, head in zip(both, calls, strict=True):
            word.zero_grad()
            head(word((ids + n) % 16)).square().sum().backward()
        assert_same(both[0].weight.grad, both[1].weight.grad)
    assert pg.stats(heads[0]).replayed == 5
    if device.type == "cuda":
        assert "record that code as well" in pg.explain(heads[0]), pg.explain(heads[0])


@pytest.mark.parametrize("count", [1, 80])
def test_c06_a_saved_weight_gets_other_memory_before_the_backward(device, count):
    """Autograd saves the weight itself, and reads what it has then; and the old memory is nobody's."""
    torch.manual_seed(0)
    weights = [[nn.Parameter(torch.randn(4, 4, device=device)) for _ in range(count)] for _ in range(2)]
    for ours, theirs in zip(*weights, strict=True):
        theirs.data = ours.data.clone()

    def chain(mine):
        def run(x):
            for w in mine:
                x = x @ w / 4
            return x

        return run

    calls = pg.record(chain(weights[0]), warmup=1), chain(weights[1])
    for n in range(8):
        found = []
        for call, mine in zip(calls, weights, strict=True):
            x = torch.full((2, 4), 1.0 + n, device=device, requires_grad=True)
            y = call(x)
            before = mine[0].data
            if n >= 5:
                mine[0].data = before * 2
                before.fill_(float("nan"))
            y.sum().backward()
            if n >= 5:
                mine[0].data = before.copy_(mine[0].data / 2)  # so that only the backward could tell
            found.append((y.detach(), x.grad, [w.grad for w in mine]))
            for w in mine:
                w.grad = None
        assert_same(*found)
    assert pg.stats(calls[0]).recorded == 1


# ---------------------------------------------------------------------------------------------------
# C6: which tensor outside was saved


class OneOfTwo(nn.Module):
    """Multiplies by a weight, or by something that lies on its memory; another weight lies there as well."""

    def __init__(self, device, kind, used):
        super().__init__()
        made = nn.Parameter if kind == "parameters" else lambda t: t
        for name in ("a", "b"):
            setattr(self, name, made(torch.arange(1.0, 5.0, device=device)))
            if kind == "buffers":
                self.register_buffer(name, self.__dict__.pop(name))
        self.b.data = self.a.data
        self.linear = nn.Linear(4, 4, device=device)
        self.used = used

    def forward(self, x):
        return self.linear(x) * SAVED[self.used](self)


SAVED = {
    "a": lambda m: m.a, "b": lambda m: m.b, "a.detach()": lambda m: m.a.detach(), "a.data": lambda m: m.a.data,
    "b[:]": lambda m: m.b[:], "b.view": lambda m: m.b.detach().view(2, 2).view(4), "a.expand": lambda m: m.a.expand(2, 4),
}  # fmt: skip
BETWEEN = {
    "none": lambda m, n: None,
    "a.data": lambda m, n: setattr(m.a, "data", torch.full_like(m.a, n + 2.0)),
    "b.data": lambda m, n: setattr(m.b, "data", torch.full_like(m.b, n + 2.0)),
    "a.add_": lambda m, n: m.a.add_(1),
    "b.add_": lambda m, n: m.b.add_(1),
    "a.data.add_": lambda m, n: m.a.data.add_(1),
}


@pytest.mark.parametrize("change", BETWEEN)
@pytest.mark.parametrize("used", SAVED)
@pytest.mark.parametrize("kind", ["parameters", "buffers"])
def test_c06_a_weight_is_changed_between_forward_and_backward(device, kind, used, change):
    """What autograd has saved of it is the weight itself, or a view of it, or lies where another weight lies."""

    def run(record):
        torch.manual_seed(0)
        module = record(OneOfTwo(device, kind, used))
        found = []
        for n in range(5):
            module.zero_grad()
            x = torch.ones(2, 4, device=device, requires_grad=True)
            out = module(x)
            with torch.no_grad():
                BETWEEN[change](module, n)
            try:
                out.sum().backward()
                found.append((x.grad.tolist(), module.linear.weight.grad.tolist()))
            except RuntimeError as e:
                found.append(str(e)[:60])
            if n in (2, 3):  # the two are tied again
                module.b.data = module.a.data
        return found

    assert run(lambda m: pg.record(m, warmup=1)) == run(lambda m: m)


NUMBERED = {
    "x * 2": lambda x: x * 2.0, "x / 3": lambda x: x / 3, "x + 1": lambda x: x + 1,
    "both": lambda x: (x * 1.0).clone() + x * 1.0,
    "2 / x": lambda x: 2.0 / x, "sum": lambda x: x.sum(), "two results": lambda x: (x * 2.0, x + 1),
}  # fmt: skip


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("operator", NUMBERED)
def test_c06_a_second_backward_of_what_has_saved_numbers_only(device, operator, retain):
    """Autograd gives a Python number back with all else, and saves it without telling."""
    function = NUMBERED[operator]

    class Module(nn.Module):
        def forward(self, x):
            return function(x)

    def run(module):
        found = []
        for _ in range(4):
            x = torch.ones(4, device=device, requires_grad=True)
            results = module(x)
            for out in results if isinstance(results, tuple) else [results]:
                for _ in range(3):
                    try:
                        out.sum().backward(retain_graph=retain)
                        found.append(x.grad.tolist())
                    except RuntimeError as e:
                        found.append(str(e)[:50])
        return found

    assert run(pg.record(Module(), warmup=1)) == run(Module())


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.one(x) + self.other(x.tanh())


def test_c06_chosen_gradients_beside_what_was_written(device):
    """What is written is saved on a way that leads to none of them."""

    def run(record):
        torch.manual_seed(0)
        module, found = record(Branches().to(device)), []
        for n in range(6):
            x = torch.ones(3, 4, device=device, requires_grad=True)
            out = module(x)
            with torch.no_grad():
                module.other.weight.mul_(2)
            wanted = [module.one.weight] if n % 3 else [x]
            try:
                found.append(torch.autograd.grad(out.sum(), wanted)[0].tolist())
            except RuntimeError as e:
                found.append(str(e)[:60])
        return found

    assert run(lambda m: pg.record(m, warmup=1)) == run(lambda m: m)


@pytest.mark.parametrize("wanted", ["behind", "before", "both"])
def test_c06_chosen_gradients_beside_a_part_with_a_backward_of_its_own(device, wanted):
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 4)

        def forward(self, x):
            return self.b(checkpoint(self.a, x, use_reentrant=True))

    def run(record):
        torch.manual_seed(0)
        module, found = record(Module().to(device)), []
        for _ in range(4):
            x = torch.ones(3, 6, device=device, requires_grad=True)
            chosen = {"behind": [module.b.weight], "before": [x], "both": [x, module.b.weight]}[wanted]
            try:
                found.append([g.tolist() for g in torch.autograd.grad(module(x).sum(), chosen)])
            except RuntimeError as e:
                found.append(str(e)[:60])
        return found

    assert run(lambda m: pg.record(m, warmup=1)) == run(lambda m: m)


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critic = nn.Linear(4, 2), nn.Linear(4, 1)

    def forward(self, x):
        return self.actor(x), self.critic(x)


@may_run_live
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("asks", ["retain_grad", "hook"])
def test_c06_a_hook_of_a_result_of_which_chosen_gradients_know_nothing(device, asks, drop):
    """A recorded call is one node to autograd, which comes by that hook on its way; that is an error, and the next calls run
    live. Where nobody looks, it does not matter."""
    torch.manual_seed(0)
    module = pg.record(Heads().to(device), warmup=1)
    live = Heads().to(device)
    live.load_state_dict(module.state_dict())

    def run(module, looks):
        a, b = module(torch.ones(3, 4, device=device))
        calls = []
        if looks and asks == "hook":
            b.register_hook(calls.append)
        elif looks:
            b.retain_grad()
        loss = a.sum() + b.sum()
        if drop and asks == "hook":
            del b
        (grad,) = torch.autograd.grad(loss, [module.actor.weight], retain_graph=True)
        loss.backward()
        return grad.tolist(), len(calls), (b.grad.tolist() if looks and asks == "retain_grad" else None)

    for _ in range(4):
        assert run(module, False) == run(live, False)
    assert pg.stats(module).recorded == 1
    with pytest.raises(RuntimeError, match="gradients of chosen inputs"):
        run(module, True)
    for _ in range(3):
        assert run(module, True) == run(live, True)


def test_c16_lazy_modules_beside_recorded_ones(device):
    for _ in range(2):
        torch.manual_seed(0)
        module = pg.record(nn.Linear(4, 4).to(device), warmup=1)
        for _ in range(3):
            module(torch.randn(2, 4, device=device))
        lazy = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d()).to(device)
        assert lazy(torch.randn(3, 6, device=device)).shape == (3, 4)
    with pytest.raises(RuntimeError, match="not allowed"):
        del module.weight.data


@pytest.mark.parametrize("grad", ["argument", "base", "none"])
@pytest.mark.parametrize("module", [nn.Linear(6, 3), nn.Tanh(), nn.Softmax(dim=0)], ids=["linear", "tanh", "softmax"])
def test_c06_an_expanded_argument(device, module, grad):
    module = copy.deepcopy(module).to(device)

    def run(module):
        found = []
        for n in range(4):
            base = torch.linspace(n, n + 1, 6, device=device)[None].requires_grad_(grad == "base")
            x = base.expand(3, 6)
            if grad == "argument":
                x.requires_grad_()
            out = module(x)
            if out.requires_grad:
                out.square().sum().backward()
            of = {"argument": x, "base": base, "none": None}[grad]
            found.append((out.tolist(), None if of is None else of.grad.tolist()))
        return found

    recorded = pg.record(copy.deepcopy(module), warmup=1)
    assert run(recorded) == run(module)
    assert pg.stats(recorded).replayed == 3


@pytest.mark.parametrize("written", ["nothing", "saved", "saved data", "other"])
@pytest.mark.parametrize("order", ["one then other", "other then one", "one twice", "both then one"])
@pytest.mark.parametrize("kept", [False, True])
def test_c06_results_one_after_the_other(device, kept, order, written):
    """One has saved weights only, which are no memory of the recording, and are checked until its backward has run."""

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Parameter(torch.arange(1.0, 5.0, device=device) + n) for n in range(3))

        def forward(self, x):
            return ((self.c * x.sin()) if kept else (self.c + x)).sum(), (self.a * self.b).sum()

    def run(module):
        found = []
        for n in range(5):
            module.zero_grad()
            one, other = module(torch.full((4,), n / 4, device=device))
            first, then = {"one then other": (one, other), "other then one": (other, one), "one twice": (one, one),
                           "both then one": (one + other, one)}[order]  # fmt: skip
            first.backward()
            with torch.no_grad():
                if written == "saved data":
                    module.b.data = module.b.data + 1
                elif written != "nothing":
                    (module.b if written == "saved" else module.c).add_(1)
            try:
                then.backward()
                found.append([None if p.grad is None else p.grad.tolist() for p in module.parameters()])
            except RuntimeError as e:
                found.append(str(e)[:50])
        return found

    assert run(pg.record(Module(), warmup=1)) == run(Module())


class Sides(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x, w):
        return self.a(x).tanh(), self.b(w).tanh()


@pytest.mark.parametrize("kind", ["post", "tensor"])
@pytest.mark.parametrize("order", ["ab", "ba", "a", "b", "aab"])
def test_c06_hooks_of_an_argument_hear_of_its_own_gradient_only(device, kind, order):
    """They were set after the forward, and one result does not depend on it."""

    def run(module):
        found = []
        for n in range(5):
            torch.manual_seed(n)
            x, w = (torch.randn(5, 4, device=device, requires_grad=True) for _ in range(2))
            results = dict(zip("ab", module(x, w), strict=True))
            heard = []
            if kind == "post":
                x.register_post_accumulate_grad_hook(lambda t, heard=heard: heard.append(t.grad.sum().item()))
            else:
                x.register_hook(lambda g, heard=heard: heard.append(g.sum().item()))
            for which in order:
                results[which].sum().backward(retain_graph=True)
            found.append((heard, [None if t.grad is None else t.grad.tolist() for t in (x, w)]))
        return found

    torch.manual_seed(0)
    theirs = Sides().to(device)
    ours = pg.record(copy.deepcopy(theirs), warmup=1)
    assert run(ours) == run(theirs)
    assert pg.stats(ours).replayed == 4


@pytest.mark.parametrize("mode", ["all", "any"])
@pytest.mark.parametrize("waits", ["ab", "b", "bo", "abo"])
@pytest.mark.parametrize("used", ["a", "b", "ab", "ao"])
def test_c06_a_hook_that_waits_for_all_gradients(device, used, waits, mode):
    """Set after the forward, on weights (and on one of another module's), of which one gets no gradient."""
    from torch.autograd.graph import register_multi_grad_hook

    def run(module):
        found = []
        for n in range(5):
            torch.manual_seed(n)
            results = dict(zip("ab", module(*torch.randn(2, 5, 4, device=device)), strict=True))
            heard = []
            results["o"] = other(torch.ones(4, device=device))
            weights = {"a": module.a.weight, "b": module.b.weight, "o": other.weight}
            handle = register_multi_grad_hook([weights[w] for w in waits], lambda gs, heard=heard: heard.append(gs), mode=mode)
            sum(results[which].sum() for which in used).backward()
            handle.remove()
            found.append([[None if g is None else g.tolist() for g in (gs if mode == "all" else [gs])] for gs in heard])
        return found

    torch.manual_seed(0)
    other = nn.Linear(4, 3).to(device)
    theirs = Sides().to(device)
    ours = pg.record(copy.deepcopy(theirs), warmup=1)
    assert run(ours) == run(theirs)
    assert pg.stats(ours).replayed == 4


# ---------------------------------------------------------------------------------------------------
# Modules that are compiled


@pytest.fixture
def compiling(cuda):
    """Compiled code leaves what its backward reads for the next one, and is forgotten after the test."""
    import torch._functorch.config

    with torch._functorch.config.patch(donated_buffer=False):
        yield torch.compile
    torch.compiler.reset()


class Tied(nn.Module):
    """Has one object by several names, which torch.compile's guards have to compare."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.outer.weight = self.inner.weight
        self.both = [self.inner, self.outer]

    def forward(self, x):
        for layer in self.both:
            x = layer(x).tanh() + self.inner(x)
        return self.last(x)


def tied(device):
    torch.manual_seed(3)
    return Tied().to(device)


@pytest.mark.filterwarnings("ignore")  # of Inductor's
@pytest.mark.parametrize("make", [perceptron, tied])
@pytest.mark.parametrize("how", ["pair", "whole step"])
def test_c06_a_module_that_is_compiled(cuda, compiling, how, make):
    """Where its backward is to run outside, torch.compile finds hooks on what is saved, and compiles anew, in the capture."""

    def steps(recorded):
        module = make(cuda)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        called, apply = compiling(module), optimizer.step
        if recorded and how == "pair":
            called, apply = pg.record(called), pg.record(apply)

        def step(x, y):
            optimizer.zero_grad()
            loss = F.mse_loss(called(x), y)
            loss.backward()
            apply()
            return loss.detach()

        step = pg.record(step) if recorded and how == "whole step" else step
        found = []
        for n in range(16):
            loss = step(*batch(cuda, n))
            found.append((loss, [p.detach().clone() for p in module.parameters()]))
        for function in {"pair": [called, apply], "whole step": [step]}[how] if recorded else []:
            assert pg.stats(function).replayed >= 5, pg.explain(function)
        return found

    assert_same(steps(True), steps(False))
