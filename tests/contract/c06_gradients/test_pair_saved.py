"""C6: which tensor outside was saved; modules that are compiled."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.shared.pairs import batch, perceptron
from tests.helpers import may_run_live


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
