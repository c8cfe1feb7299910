"""`phonograph.fx.record_graph`: the graphs of compiler pipelines, recorded."""

import copy
import gc
import importlib
import itertools
import sys
import threading
import weakref

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import aot_function, aot_module_simplified, make_boxed_func
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import phonograph as pg
from phonograph.compile import bound
from phonograph.fx import record_graph
from phonograph.testing import assert_same
from tests import forked
from tests.helpers import may_run_live

pytestmark = pytest.mark.filterwarnings("ignore:TensorFloat32", "ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning")


@pytest.fixture(autouse=True)
def forgotten():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Pipeline:
    """Compilers for AOT autograd that record both graphs, or leave both as they are; what they made is in `made`."""

    def __init__(self, recorded=True, **aot):
        self.recorded, self.aot, self.made = recorded, aot, []

    def forward(self, gm, inputs):
        return self._compiled(gm, inputs, True)

    def backward(self, gm, inputs):
        return self._compiled(gm, inputs, False)

    def _compiled(self, gm, inputs, is_forward):
        if not self.recorded:
            return make_boxed_func(gm)
        self.made.append(record_graph(gm, inputs, is_forward=is_forward))
        return make_boxed_func(self.made[-1])

    def __call__(self, function):
        compilers = {"fw_compiler": self.forward, "bw_compiler": self.backward}
        return torch.compile(function, backend=aot_autograd(**compilers, **self.aot))

    def counts(self):
        return [(s.live, s.recorded, s.replayed) for s in map(pg.stats, self.made)]

    def copied(self):
        return [pg.stats(f).bytes_copied for f in self.made]


def both(model, **aot):
    """The model in a pipeline that records, and a copy of it in one that does not: ((f, model, pipeline), ...)."""
    sides = []
    for m, recorded in ((model, True), (copy.deepcopy(model), False)):
        pipeline = Pipeline(recorded, **aot)
        sides.append((pipeline(m), m, pipeline))
    return sides


def network(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8)).to(device)


def ramp(device, n, rows=4):
    torch.manual_seed(n)
    return torch.randn(rows, 8, device=device)


def state(model):
    return [p.grad for p in model.parameters()], [*model.state_dict().values()]


# -- AOT autograd


def test_c01_inference(device):
    sides = both(network(device).eval())
    with torch.no_grad():
        kept = [[f(ramp(device, n)) for n in range(5)] for f, _, _ in sides]
    assert_same(*kept)
    assert sides[0][2].counts() == [(2, 1, 3)]  # AOT autograd looks at the operators of the first call
    assert sides[0][2].copied() == [3 * 4 * 8 * 4]  # the argument, and no parameter or buffer


def test_c06_training(device):
    sides = both(network(device))
    optimizers = [torch.optim.SGD(m.parameters(), 0.01) for _, m, _ in sides]
    for n in range(6):
        found = []
        for (f, m, _), optimizer in zip(sides, optimizers, strict=True):
            optimizer.zero_grad()
            loss = f(ramp(device, n)).square().sum()
            loss.backward()
            optimizer.step()
            found.append((loss.detach(), *state(m)))
        assert_same(*found)
    assert sides[0][2].counts() == [(2, 1, 4), (2, 1, 4)]


def test_c06_what_a_forward_has_saved_is_read_where_it_lies(device):
    """The backward copies the gradient that comes in, and the input of the forward, which was never the recording's."""
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)).to(device)
    sides = both(net, partition_fn=min_cut_rematerialization_partition)
    copied = []
    for n in range(6):
        for f, m, _ in sides:
            m.zero_grad()
            f(ramp(device, n, rows=1024)).square().sum().backward()
        assert_same(*[state(m) for _, m, _ in sides])
        copied.append(sides[0][2].copied())
    given = 1024 * 8 * 4
    for earlier, later in itertools.pairwise(copied[2:]):
        assert [b - a for a, b in zip(earlier, later, strict=True)] == [given, 2 * given]


def test_c06_gradients_over_micro_batches(device):
    sides = both(network(device))
    for n in range(5):
        for f, m, _ in sides:
            m.zero_grad()
            for i in range(3):
                f(ramp(device, 3 * n + i)).square().sum().backward()
        assert_same(*[state(m) for _, m, _ in sides])
    assert sides[0][2].counts() == [(2, 1, 13), (2, 1, 13)]


def test_c06_two_forwards_before_their_backwards(device):
    sides = both(network(device))
    for n in range(8):
        found = []
        for f, m, _ in sides:
            m.zero_grad()
            outs = [f(ramp(device, 2 * n + i)) for i in range(2)]
            for out in reversed(outs):
                out.square().sum().backward()
            found.append((*state(m), [out.detach() for out in outs]))
        assert_same(*found)
    before = sides[0][2].counts()
    for f, _, _ in sides[:1]:
        outs = [f(ramp(device, i)) for i in range(2)]
        for out in reversed(outs):
            out.square().sum().backward()
    assert sides[0][2].counts() == [(live, recorded, replayed + 2) for live, recorded, replayed in before]


@may_run_live  # the forwards: `checkpoint` has hooks on what they save
def test_c06_recompute(device):
    sides = both(network(device))
    for n in range(5):
        for f, m, _ in sides:
            m.zero_grad()
            checkpoint(f, ramp(device, n).requires_grad_(), use_reentrant=False).square().sum().backward()
        assert_same(*[state(m) for _, m, _ in sides])
    assert sides[0][2].counts()[1] == (2, 1, 3)


def test_c06_a_backward_twice(device):
    sides = both(nn.Linear(8, 8).to(device))
    for n in range(5):
        found = []
        for f, m, _ in sides:
            m.zero_grad()
            loss = f(ramp(device, n)).tanh().square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
            found.append(state(m))
        assert_same(*found)


def test_c02_dropout(device):
    sides = both(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)).to(device))
    for n in range(6):
        found = []
        for f, m, _ in sides:
            m.zero_grad()
            x = ramp(device, n)
            out = f(x)
            out.sum().backward()
            found.append((out.detach(), torch.rand(2, device=device), *state(m)))
        assert_same(*found)


def test_c07_shapes(device):
    """Dynamo makes one graph with a symbolic size, which comes as a number."""
    sides = both(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).to(device))
    for n in range(16):
        for f, m, _ in sides:
            m.zero_grad()
            f(ramp(device, n, rows=3 + n % 3)).square().sum().backward()
        assert_same(*[state(m) for _, m, _ in sides])
    assert sum(replayed for *_, replayed in sides[0][2].counts()) > 12


def test_aot_function_and_aot_module_simplified(device):
    for n in range(2):
        pipeline, plain = Pipeline(), Pipeline(recorded=False)
        net = network(device)
        if n:
            f, g = (aot_function(lambda x, w: (x @ w).tanh(), p.forward, p.backward) for p in (pipeline, plain))
        else:
            gm = make_fx(lambda x: (net(x),))(ramp(device, 0))
            f, g = (aot_module_simplified(gm, (ramp(device, 0),), p.forward, p.backward) for p in (pipeline, plain))
        for i in range(5):
            w, found = torch.ones(8, 8, device=device, requires_grad=True), []
            for h in (f, g):
                net.load_state_dict(network(device).state_dict())
                net.zero_grad()
                w.grad = None
                out = h(ramp(device, i), *[w] * n)
                (out if n else out[0]).square().sum().backward()
                found.append((w.grad, *copy.deepcopy(state(net))))
            assert_same(*found)
        assert [c[2] for c in pipeline.counts()] == [3, 3]


# -- graphs of other tracers


def test_make_fx_and_what_it_finds_outside(device):
    """A constant of the graph that is replaced, and code that is replaced, are noticed."""
    weight = torch.ones(8, device=device)
    gm = make_fx(lambda x: (x * weight).sum(0))(ramp(device, 0))
    f = record_graph(gm, [ramp(device, 0)])
    for n in range(4):
        assert_same(f(ramp(device, n)), gm(ramp(device, n)))
    assert (pg.stats(f).recorded, pg.stats(f).replayed) == (1, 3)
    weight.mul_(3)
    assert_same(f(ramp(device, 9)), gm(ramp(device, 9)))
    (name,) = (node.target for node in gm.graph.nodes if node.op == "get_attr")
    setattr(gm, name, torch.full((8,), 5.0, device=device))
    for n in range(3):
        assert_same(f(ramp(device, n)), (ramp(device, n) * 5).sum(0))
    next(n for n in gm.graph.nodes if n.target is torch.ops.aten.mul.Tensor).target = torch.ops.aten.add.Tensor
    gm.recompile()
    for n in range(3):
        assert_same(f(ramp(device, n)), (ramp(device, n) + 5).sum(0))
    assert pg.stats(f).recorded == 3


def test_torch_export(device):
    net = network(device).eval()
    gm = torch.export.export(net, (ramp(device, 0),)).module()
    f = record_graph(gm, [ramp(device, 0)])
    with torch.no_grad():
        for n in range(4):
            assert_same(f(ramp(device, n)), gm(ramp(device, n)))
        assert pg.stats(f).replayed == 3
        gm.load_state_dict({k: v * 2 for k, v in net.state_dict().items()}, assign=True)
        for n in range(3):
            assert_same(f(ramp(device, n)), gm(ramp(device, n)))


def test_a_graph_of_torchs_own_operators_has_its_backward(device):
    net = network(device)
    gm = torch.fx.symbolic_trace(copy.deepcopy(net))
    f = record_graph(gm, [ramp(device, 0)])
    for n in range(5):
        for g, m in ((f, gm), (net, net)):
            m.zero_grad()
            g(ramp(device, n)).square().sum().backward()
        assert_same([p.grad for p in gm.parameters()], [p.grad for p in net.parameters()])
    assert pg.stats(f).replayed == 4


@pytest.mark.parametrize("what", ["module", "method"])
def test_it_may_be_the_forward_of_the_graph_itself(device, what):
    """As the pass of torchtitan assigns it."""
    gm = make_fx(lambda x: x.sin() * 2)(ramp(device, 0))
    f = gm.forward = record_graph(gm if what == "module" else gm.forward, [ramp(device, 0)], is_forward=True)
    for n in range(4):
        assert_same(gm(ramp(device, n)), ramp(device, n).sin() * 2)
    assert pg.stats(f).replayed == 3
    assert f"{f!r}".startswith("<recorded graph ")


def test_a_function_that_takes_a_list(device):
    """It empties the list: an argument of it may go before the call is over."""

    @make_boxed_func
    def inner(x, y):
        return x * y, x + 1

    f = record_graph(inner, [None, None])
    for n in range(4):
        args = [ramp(device, n), ramp(device, n + 1)]
        expected = [args[0] * args[1], args[0] + 1]
        assert_same([*f(args)], expected)
        assert args == []
    assert f._boxed_call
    assert pg.stats(f).replayed == 3


@may_run_live
def test_what_inductor_has_compiled_for_the_cpu_runs_live():
    from torch._inductor.compile_fx import compile_fx_inner

    def forward(gm, inputs):
        made.append(record_graph(compile_fx_inner(gm, inputs), inputs, is_forward=True))
        return made[-1]

    made = []
    f = torch.compile(lambda x: x.sin() + 1, backend=aot_autograd(fw_compiler=forward))
    for n in range(4):
        torch.testing.assert_close(f(ramp("cpu", n)), ramp("cpu", n).sin() + 1)
    assert [(pg.stats(g).live, pg.stats(g).replayed) for g in made] == [(4, 0)]


# -- static inputs


def test_static_inputs_are_read_in_place(device):
    w = torch.ones(8, device=device)
    f = record_graph(lambda w, x, v: x * w + v, [None] * 3, static_input_indices=[0, 2])
    v = torch.zeros(8, device=device)
    for n in range(5):
        w.add_(1)
        x = ramp(device, n)
        assert_same(f(w, x, v), x * w + v)
    assert pg.stats(f).bytes_copied == 4 * 4 * 8 * 4
    assert pg.stats(f).replayed == 4


@pytest.mark.parametrize("static", [[0], [0, 1]])
def test_static_inputs_that_are_others_after_all(device, static):
    w, x = torch.ones(8, device=device), torch.ones(8, device=device)
    f = record_graph(lambda w, x: x * w, [None] * 2, static_input_indices=static)
    refs = []
    for n in range(24):
        if n in (3, 6):
            w.data = torch.full((8,), float(n), device=device)  # another memory
        if n > 9:
            w = torch.full((8,), float(n), device=device)  # another tensor, in each call
            refs.append(weakref.ref(w))
        if n > 12 and len(static) == 2:
            x = torch.full((8,), 0.5 * n, device=device)
        assert_same(f(w, x), x * w)
    assert pg.stats(f).replayed > 12
    gc.collect()
    assert sum(ref() is not None for ref in refs) <= 2


def test_one_graph_with_the_weights_of_several_layers(device):
    layers = [nn.Parameter(torch.full((8,), 1.0 + i, device=device)) for i in range(3)]
    f = record_graph(lambda w, x: (x * w,), [None] * 2)
    with torch.no_grad():
        for n in range(5):
            for w in layers:
                assert_same(f(w, ramp(device, n)), (ramp(device, n) * w,))
    assert (pg.stats(f).live, pg.stats(f).recorded, pg.stats(f).replayed) == (3, 3, 12)
    assert pg.explain(f).count("recording of") == 3


def test_calls_with_other_numbers_of_arguments(device):
    f = record_graph(lambda w, *xs: sum(xs) * w, [None] * 2, static_input_indices=[0])
    w, x = torch.ones(8, device=device), torch.ones(8, device=device)
    for n in range(9):
        assert_same(f(w, *[x] * (1 + n % 3)), (1 + n % 3) * x)


def test_calls_with_a_number_where_another_call_has_a_static_tensor(device):
    def function(x, y, *more):
        return x * 10 + y + sum(more)

    f, w = record_graph(function, [None] * 3, static_input_indices=[0, 1]), torch.ones(8, device=device)
    for args in [(w, 3), (w, 3, w), (3, w)] * 3:
        assert_same(f(*args), function(*args))


# -- what a backward writes


@pytest.mark.parametrize("rows", [4, 4096])
def test_a_backward_that_writes_into_what_its_forward_has_saved(device, rows):
    """As one with donated buffers does: they belong to it alone. Large ones are in the memory of the forward's recording."""

    def forward(x, w):
        y = (x * w).sin()
        return y, x * w

    def backward(saved, w, dy):
        saved.cos_().mul_(dy)
        return saved * w, saved + 1, saved

    w = torch.full((8,), 0.5, device=device)
    fw, bw = record_graph(forward, [None] * 2, is_forward=True), record_graph(backward, [None] * 3, is_forward=False)
    for n in range(8):
        found = []
        for f, b in ((fw, bw), (forward, backward)):
            flying = [f(ramp(device, n + i, rows), w) for i in range(1 + n % 2)]
            found.append([(y, *b(saved, w, torch.ones_like(y)), saved) for y, saved in flying])
        assert_same(*found)
    assert pg.stats(bw).replayed >= 8


def test_a_static_input_that_is_written(device):
    """A cache, or running statistics."""

    def function(seen, x, w):
        seen.mul_(0.5).add_(x.sum(0))
        return seen * w, seen

    seen = [torch.zeros(8, device=device) for _ in range(2)]
    w = torch.ones(8, device=device)
    f = record_graph(function, [None] * 3, static_input_indices=[0, 2])
    for n in range(6):
        assert_same(f(seen[0], ramp(device, n), w), function(seen[1], ramp(device, n), w))
        assert_same(*seen)
    assert pg.stats(f).replayed == 5


# -- lifetimes


def test_c17_dropping_the_callable_drops_its_recordings(device):
    weight = nn.Linear(8, 8).to(device)
    f = record_graph(lambda w, x: x @ w, [None] * 2)
    with torch.no_grad():
        for n in range(3):
            f(weight.weight, ramp(device, n))
    (bound,) = f.bound.values()
    recorded = weakref.ref(bound.recorded)
    del f, bound
    gc.collect()
    assert recorded() is None


def test_c17_reset_and_statistics(device):
    weight = nn.Linear(8, 8).to(device)
    f = record_graph(lambda w, x: x @ w, [None] * 2, name="mine")
    assert pg.explain(f) == "mine: no calls"
    with torch.no_grad():
        for n in range(6):
            if n == 3:
                pg.reset(f)
            assert_same(f(weight.weight, ramp(device, n)), ramp(device, n) @ weight.weight)
    assert (pg.stats(f).calls, pg.stats(f).live, pg.stats(f).recorded, pg.stats(f).replayed) == (6, 2, 2, 4)


def test_a_recorded_step_with_recorded_graphs_inside(device):
    w = nn.Parameter(torch.full((8,), 0.5, device=device))
    f = record_graph(lambda w, x: (x * w).sin(), [None] * 2)
    step = pg.record(lambda x: f(w, x) + 1)
    with torch.no_grad():
        for n in range(4):
            assert_same(step(ramp(device, n)), (ramp(device, n) * w).sin() + 1)
    assert pg.stats(step).replayed == 3


def test_dynamo_traces_through_to_the_graph(device):
    f = record_graph(lambda x: x.sin(), [None])
    g = torch.compile(lambda x: f(x) + 1, backend="eager", fullgraph=True)
    for n in range(3):
        assert_same(g(ramp(device, n)), ramp(device, n).sin() + 1)


def test_thunder_is_asked_for_only_where_it_is_used(monkeypatch):
    run = "import sys, phonograph, phonograph.fx; assert 'thunder' not in sys.modules"
    ended = forked.run(run)
    assert ended.returncode == 0, ended.stderr
    monkeypatch.setitem(sys.modules, "thunder", None)
    monkeypatch.delitem(sys.modules, "phonograph.thunder", raising=False)
    with pytest.raises(ImportError, match=r"needs lightning-thunder: pip install \"lightning-thunder==0\.2\.6\""):
        importlib.import_module("phonograph.thunder")


@pytest.mark.parametrize(("given", "message"), [
    ({"gm": 3}, "takes a graph or a function, not int"),
    ({"static_input_indices": [2]}, "has 2, but there are 2 inputs"),
    ({"static_input_indices": ["w"]}, "must be ints, not str"),
    ({"is_forward": "no"}, "must be True, False or None"),
    ({"warmup": -1}, "warmup must be at least 0"),
])  # fmt: skip
def test_bad_arguments(given, message):
    with pytest.raises((TypeError, ValueError), match=message):
        record_graph(**{"gm": lambda w, x: x, "example_inputs": [None, None], **given})


def test_c14_threads_that_bind_a_graph_at_once(device, monkeypatch):
    """One looks for the module that its parameters belong to while another finds that some are replaced in each call."""
    gate, inside = threading.Event(), threading.Event()
    find = bound._owner

    def slowly(t):
        if threading.current_thread().name == "slow":
            inside.set()
            gate.wait(10)
        return find(t)

    def weight(number):
        return nn.Parameter(torch.full((3,), float(number), device=device), requires_grad=False)

    monkeypatch.setattr(bound, "_owner", slowly)
    mine, theirs = nn.Module(), nn.Module()
    mine.weight, theirs.weight, theirs.bias = weight(1), weight(5), weight(100)
    x = torch.full((3,), 7.0, device=device)
    graph = record_graph(lambda w, b, x: (w * x + b,), [x] * 3)
    found = {"slow": [], "fast": []}

    def slow():
        found["slow"] += [graph(theirs.weight, theirs.bias, x)[0].clone() for _ in range(5)]

    def fast():
        found["fast"] += [graph(mine.weight, weight(n), x)[0].clone() for n in range(6)]

    for n in range(2):
        graph(mine.weight, weight(n), x)
    threads = [threading.Thread(target=slow, name="slow"), threading.Thread(target=fast)]
    threads[0].start()
    inside.wait(10)
    threads[1].start()
    threads[1].join(0.5)
    gate.set()
    for thread in threads:
        thread.join(60)
    assert_same(found["slow"], [torch.full_like(x, 135.0)] * 5)
    assert_same(found["fast"], [torch.full_like(x, 7.0 + n) for n in range(6)])


def test_c16_a_deep_copy_of_a_graph_has_parameters_of_its_own(device):
    ones = torch.ones(3, device=device)

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.graph = make_fx(lambda x: x * ones)(torch.zeros_like(ones))
            self.run = record_graph(self.graph, [0])

    original, x = Scaled(), torch.ones(3, device=device)
    for _ in range(4):
        assert_same(original.run(x), x)
    copied = copy.deepcopy(original)
    (scale,) = copied.graph.buffers()
    scale.fill_(4)
    for _ in range(4):
        assert_same(copied.run(x), 4 * x)
    assert_same(original.run(x), x)
