"""C16, C17: a recorded module is the module that it was; and goes when it is dropped."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.shared.pairs import Both, batch, grads, perceptron
from tests.helpers import may_run_live


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


@may_run_live
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", ["trace", "script"])
def test_c16_a_module_of_torchscript(device, kind):
    """Its calls come to us as others do, and run live."""
    net, x = nn.Linear(3, 2).to(device), torch.ones(4, 3, device=device)
    module = torch.jit.trace(net, x) if kind == "trace" else torch.jit.script(net)
    assert pg.record(module) is module
    for _ in range(4):
        assert_same(module(x), net(x))
    assert pg.stats(module).calls == 4
    pg.reset(module)
    assert_same(module(x), net(x))
