"""`torch.compile(f, backend="phonograph")`: Dynamo's graphs, recorded."""

import copy
import gc
import importlib.metadata
import pickle
import warnings
import weakref

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import phonograph as pg
from phonograph.compile import backend, graphs
from phonograph.testing import assert_same
from tests import forked
from tests.helpers import may_run_live

pytestmark = pytest.mark.filterwarnings(
    "ignore:TensorFloat32", "ignore:The .grad attribute", "ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning"
)


@pytest.fixture(autouse=True)
def forgotten():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=["eager", "aot_eager", "inductor"])
def inner(request, device):
    if request.param == "inductor" and device.type == "cpu":
        pytest.skip("what Inductor compiles for the CPU runs live")
    return request.param


def compiled(f, inner="eager", **options):
    return torch.compile(f, backend=backend, options={"inner": inner, **options})


def network(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8)).to(device)


def unrecorded(f, inner="eager"):
    """What the backend has to agree with, bit for bit: the same code, compiled by the same backend."""
    return f if inner == "eager" else torch.compile(f, backend=inner)


def totals():
    found = [pg.stats(g) for g in graphs()]
    return sum(s.live for s in found), sum(s.recorded for s in found), sum(s.replayed for s in found)


def test_c01_inference(device, inner):
    net = network(device).eval()
    f, live = compiled(net, inner), unrecorded(net, inner)
    with torch.no_grad():
        for n in range(5):
            x = torch.full((4, 8), 0.1 * n, device=device)
            assert_same(f(x), live(x))
    (graph,) = graphs()
    assert totals() == (1, 1, 4)
    assert pg.stats(graph).bytes_copied == 4 * 4 * 8 * 4  # the argument, and no parameter or buffer


def test_c06_training(device, inner):
    net = network(device)
    live = copy.deepcopy(net)
    pairs = [(compiled(net, inner), net), (unrecorded(live, inner), live)]
    optimizers = [torch.optim.SGD(m.parameters(), 0.01) for _, m in pairs]
    for n in range(6):
        torch.manual_seed(n)
        x = torch.randn(4, 8, device=device)
        found = []
        for (f, m), optimizer in zip(pairs, optimizers, strict=True):
            optimizer.zero_grad()
            loss = f(x).square().sum()
            loss.backward()
            optimizer.step()
            found.append((loss.detach(), [p.grad for p in m.parameters()], [*m.state_dict().values()]))
        assert_same(*found)
    assert totals() == (1, 1, 5)


def test_c06_two_micro_batches_and_inference_in_the_middle(device, inner):
    net = network(device)
    live = copy.deepcopy(net)
    f, expected = compiled(net, inner), unrecorded(live, inner)
    for n in range(6):
        torch.manual_seed(n)
        xs = torch.randn(2, 4, 8, device=device)
        for g, m in ((f, net), (expected, live)):
            m.train()
            m.zero_grad()
            outs = [g(x) for x in xs]
            m.eval()
            with torch.no_grad():
                seen = g(xs[0])
            m.train()
            for out in reversed(outs):
                out.square().sum().backward()
            m.seen = seen, outs[0].detach()
        assert_same(net.seen, live.seen)
        assert_same([p.grad for p in net.parameters()], [p.grad for p in live.parameters()])


def test_c08_one_block_compiled_for_each_layer(device, inner):
    """One graph, with the parameters of each layer."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = nn.Linear(8, 8)

        def forward(self, x):
            return x + self.inside(x).tanh()

    torch.manual_seed(0)
    blocks = nn.Sequential(*[Block() for _ in range(3)]).to(device)
    live = copy.deepcopy(blocks)
    for block in blocks:
        block.compile(backend=backend, options={"inner": inner})
    for n in range(6):
        torch.manual_seed(n)
        x = torch.randn(4, 8, device=device, requires_grad=True)
        for m in (blocks, live):
            m.zero_grad()
            m(x).square().sum().backward()
        assert_same([p.grad for p in blocks.parameters()], [p.grad for p in live.parameters()])
    assert len({id(g) for g in graphs()}) >= 3
    assert totals()[2] == 3 * 5


def test_c08_weights_that_are_replaced(device):
    net = network(device).eval()
    f = compiled(net)
    with torch.no_grad():
        for n in range(9):
            if n % 3 == 0:
                net[0].weight = nn.Parameter(torch.full((16, 8), float(n), device=device))
            x = torch.full((4, 8), 0.1 * n, device=device)
            assert_same(f(x), net(x))


def test_c08_a_tensor_that_the_compiled_code_has_itself(device, inner):
    def run(compiled_by):
        mine = torch.ones(3, device=device)

        @torch.compiler.assume_constant_result
        def given():
            return mine

        called, found = compiled_by(lambda x: x * given()), []
        for n in range(9):
            if n == 4:
                mine.data = torch.full((3,), 5.0, device=device)
            if n == 6:
                mine.add_(1)
            found.append(called(torch.ones(3, device=device)).clone())
        return found

    expected = run(lambda f: torch.compile(f, backend=inner))
    torch._dynamo.reset()
    assert_same(run(lambda f: compiled(f, inner)), expected)
    assert totals()[2] >= 6


def test_c08_parameters_that_are_no_modules(device):
    """They are read in place as well; others each time are no leak."""
    weight = nn.Parameter(torch.ones(4, device=device))
    f = compiled(lambda x, w: x * w, max_recordings=3)
    for n in range(5):
        x = torch.full((4,), 0.1 * n, device=device)
        weight.grad = None
        f(x, weight).sum().backward()
        assert_same(weight.grad, x)
    assert totals() == (1, 1, 4)
    refs = []
    for n in range(8):
        w = nn.Parameter(torch.full((4,), float(n), device=device))
        refs.append(weakref.ref(w))
        assert_same(f(x, w).detach(), (x * w).detach())
    del w
    gc.collect()
    assert sum(ref() is not None for ref in refs) <= 3


@may_run_live
def test_c01_graph_breaks(device, inner):
    def function(x):
        y = x.sin() * 2
        torch._dynamo.graph_break()
        z = y.cos() + x
        if z.sum() > 0:
            return z * y
        return z - y

    f, expected = compiled(function, inner), unrecorded(function, inner)
    for n in range(8):
        x = torch.full((5,), (-1.0) ** n * 0.3 * n, device=device)
        assert_same(f(x), expected(x))
    assert totals()[2] > 8


def unique(x):
    values, counts = torch.unique(x.round(), return_counts=True)
    return (values * counts).sum() + x.cos().sum()


def masked(x):
    y = x.sin() * 2
    return y[y > 0].sum() + y.mean()


def early_exit(x):
    y = x.cos() + x
    if y.max() > 2.5:
        return y * 2
    y = y.cos() + x
    return y.sin()


def expert(x, weight, score, rows, out):
    return out.index_add(0, rows, (x[rows] @ weight).relu() * score[rows, None])


def routed(x):
    """A mixture of experts, as transformers writes them: which rows an expert gets is known on the host."""
    weights = [torch.full((4, 4), 0.1 * (e + 1), device=x.device) for e in range(3)]
    scores = torch.stack([x.sum(1) * (e - 1) for e in range(3)]).softmax(0)
    best, out = scores.argmax(0), torch.zeros_like(x)
    for e, weight in enumerate(weights):  # older releases leave alone what has a break in a loop, and compile what it calls
        rows = (best == e).nonzero().squeeze(1)
        if rows.numel():
            out = expert(x, weight, scores[e], rows, out)
    return out


@may_run_live
@pytest.mark.parametrize("function", [unique, masked, early_exit, routed])
def test_c11_what_depends_on_data(device, function):
    """Dynamo breaks its graph there; what is between is recorded, where it has one shape."""
    f = compiled(function)
    for n in range(8):
        torch.manual_seed(n % 3)
        x = torch.randn(6, 4, device=device)
        assert_same(f(x), function(x))
    assert totals()[2] > 0


@pytest.mark.parametrize("training", [False, True])
def test_c12_a_graph_ends_at_a_marked_function(device, inner, training):
    """It really runs, once in each call, and is in no recording."""
    log, net = [], network(device).eval()

    @pg.live
    def note(h):
        log.append((h.sum().item(), torch.compiler.is_compiling()))
        return h.sin()

    def function(x):
        return net[3](note(net[0](x) * 2)) + 1

    f, g = compiled(function, inner), copy.deepcopy(net)
    live = unrecorded(lambda x: g[3]((g[0](x) * 2).sin()) + 1, "eager")
    with torch.set_grad_enabled(training):
        for n in range(5):
            x = torch.full((4, 8), 0.1 * n, device=device)
            found, expected = f(x), live(x)
            assert_same(found, expected, tolerance=1e-6)
            if training:
                found.sum().backward()
                expected.sum().backward()
    if training:
        assert_same(net[0].weight.grad, g[0].weight.grad, tolerance=1e-5)
    assert [compiling for _, compiling in log] == [False] * 5
    assert len(graphs()) == 2


def test_c15_the_example_of_torchs_documentation(device, monkeypatch):
    """1 -> 2 -> 4 or 1 -> 3 -> 4, with random numbers, and a graph break between: four graphs, each recorded once."""
    from phonograph.devices import device_for

    monkeypatch.setattr(device_for(device), "roomy", 0)

    def one(x):
        return x.sin() + torch.rand_like(x)

    def example(x):
        y = one(x)
        torch._dynamo.graph_break()
        y = y.cos() if x.shape[0] > 3 and y.sum() > 40 else y.exp()
        torch._dynamo.graph_break()
        return y * 2 + x

    f = compiled(example)
    for n in range(12):
        x = torch.full((64,), 0.1 * (n % 4), device=device)
        found = []
        for g in (f, example):
            torch.manual_seed(n)
            found.append((g(x), torch.rand(2, device=device)))
        assert_same(*found)
    assert all(pg.stats(g).recorded == 1 for g in graphs() if pg.stats(g).replayed)


@may_run_live
@pytest.mark.parametrize("fallback", ["live", "split"])
def test_c11_mixtral(device, fallback):
    """Its experts are an operator that counts on the host: with `split`, what is between is recorded."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    net = transformers.MixtralForCausalLM(config).to(device).eval()
    f = compiled(net, fallback=fallback)
    with torch.no_grad():
        for n in range(5):
            tokens = (torch.arange(12, device=device).reshape(2, 6) * (n + 1)) % 32
            torch.testing.assert_close(f(input_ids=tokens).logits, net(input_ids=tokens).logits)
    found = [pg.stats(g) for g in graphs()]
    assert all(s.replayed or s.refusals for s in found)
    if fallback == "split" and device.type == "cpu":
        assert totals()[2] > 0


def test_c15_a_chain_of_compiled_functions(device, inner):
    f, g = (lambda x: x.sin() * 2), (lambda x: x.cos() + x)
    cf, cg = compiled(f, inner), compiled(g, inner)
    live_f, live_g = unrecorded(f, inner), unrecorded(g, inner)
    kept = []
    for n in range(6):
        x = torch.full((5,), 0.3 * n, device=device)
        kept.append((cg(cf(x)), live_g(live_f(x))))
    for ours, theirs in kept:
        assert_same(ours, theirs)


def test_c07_dynamic_shapes(device, inner):
    function = lambda x: (x * x.shape[0]).cumsum(0)  # noqa: E731
    f = torch.compile(function, backend=backend, options={"inner": inner}, dynamic=True)
    expected = function if inner == "eager" else torch.compile(function, backend=inner, dynamic=True)
    for n in (3, 3, 4, 4, 5, 5, 3, 4, 5, 3, 4):
        x = torch.full((n, 2), 0.3, device=device)
        assert_same(f(x), expected(x))
    assert totals()[1:] == (3, 8)


def test_c03_an_input_that_is_written(device, inner):
    def function(x, y):
        x.add_(y)
        return x * 2

    f, expected = compiled(function, inner), unrecorded(function, inner)
    xs = [torch.zeros(4, device=device) for _ in range(2)]
    for n in range(6):
        y = torch.full((4,), 0.5 * n, device=device)
        assert_same(f(xs[0], y), expected(xs[1], y))
        assert_same(xs[0], xs[1])


def test_c02_dropout(device):
    function = lambda x: F.dropout(x, 0.5)  # noqa: E731
    f = compiled(function)
    for n in range(6):
        found = []
        for g in (f, function):
            torch.manual_seed(n)
            found.append((g(torch.ones(16, device=device)), torch.rand(2, device=device)))
        assert_same(*found)


@may_run_live
def test_c06_compiled_under_recompute(device, inner):
    net = network(device)
    live = copy.deepcopy(net)
    f, expected = compiled(net, inner), unrecorded(live, inner)
    for n in range(5):
        torch.manual_seed(n)
        x = torch.randn(4, 8, device=device, requires_grad=True)
        for g, m in ((f, net), (expected, live)):
            m.zero_grad()
            checkpoint(g, x, use_reentrant=False).square().sum().backward()
        assert_same([p.grad for p in net.parameters()], [p.grad for p in live.parameters()])


@may_run_live  # on the CPU no recording sees into compiled code
def test_a_recorded_step_with_the_backend_inside(device):
    def make():
        net = network(device)
        f = compiled(net)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)

        def step(x):
            optimizer.zero_grad()
            loss = f(x).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach(), [p.detach().clone() for p in net.parameters()]

        return step

    recorded, live = pg.record(make()), make()
    for n in range(5):
        torch.manual_seed(n)
        x = torch.randn(4, 8, device=device)
        assert_same(recorded(x), live(x))


def test_c17_a_buffer_that_each_call_makes_anew(device):
    class Average(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            y = self.inside(x)
            self.mean = self.mean * 0.9 + y.detach().mean(0)
            return y + self.mean

    torch.manual_seed(0)
    net = Average().to(device)
    live = copy.deepcopy(net)
    f, refs = compiled(net), []
    for n in range(20):
        x = torch.full((3, 4), 0.1 * n, device=device)
        for g, m in ((f, net), (live, live)):
            m.zero_grad()
            g(x).sum().backward()
        refs.append(weakref.ref(net.mean))
        assert_same((net.mean, [p.grad for p in net.parameters()]), (live.mean, [p.grad for p in live.parameters()]))
    gc.collect()
    assert sum(ref() is not None for ref in refs) <= 2
    assert totals()[2] > 8


@pytest.mark.parametrize("assign", [True, False])
def test_c17_weights_that_are_replaced_again_and_again(device, assign):
    net = network(device)
    f, refs = compiled(net), []
    for n in range(12):
        if assign:
            net.load_state_dict({k: torch.full_like(v, 0.01 * n) for k, v in net.state_dict().items()}, assign=True)
        else:
            net[3].weight = nn.Parameter(torch.full((8, 16), 0.01 * n, device=device))
        refs.append(weakref.ref(net[3].weight))
        for _ in range(3):
            x = torch.full((4, 8), 0.1 * n, device=device)
            state = copy.deepcopy(net.state_dict())
            y = f(x)
            net.load_state_dict(state)
            assert_same(y.detach(), net(x).detach())
    gc.collect()
    assert sum(ref() is not None for ref in refs) <= (1 if assign else 16)


def test_c06_training_with_shapes_that_change(device, inner):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to(device)
    live = copy.deepcopy(net)
    f, expected = compiled(net, inner), unrecorded(live, inner)
    for n in range(20):
        x = torch.full((2 + n % 4, 4), 0.1 * n, device=device)
        for g, m in ((f, net), (expected, live)):
            m.zero_grad()
            g(x).square().sum().backward()
        assert_same([p.grad for p in net.parameters()], [p.grad for p in live.parameters()])
    assert totals()[2] > 8


def test_c17_a_model_goes_when_it_is_dropped(device, inner):
    net = network(device)
    f = compiled(net, inner)
    for n in range(4):
        f(torch.full((4, 8), 0.1 * n, device=device)).sum().backward()
    assert totals()[2] == 3
    refs = weakref.ref(net), weakref.ref(net[0].weight)
    del net, f
    gc.collect()
    assert [ref() for ref in refs] == [None, None]
    assert graphs() == []


def test_c16_a_compiled_model_is_copied_and_pickled(device):
    net = network(device).eval()
    f = compiled(net)
    with torch.no_grad():
        x = torch.full((4, 8), 0.1, device=device)
        for _ in range(3):
            expected = f(x)
        for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            assert_same(other(x), expected)
            assert_same(compiled(other)(x), expected)


def test_dynamo_reset_drops_all_recordings(device):
    f = compiled(lambda x: x.sin())
    for _ in range(3):
        f(torch.ones(4, device=device))
    assert totals() == (1, 1, 2)
    torch._dynamo.reset()
    assert graphs() == []
    for _ in range(3):
        f(torch.ones(4, device=device))
    assert totals() == (1, 1, 2)


def test_graphs_say_where_they_begin(device):
    f = compiled(lambda x: x.sin())
    f(torch.ones(4, device=device))
    (graph,) = graphs()
    assert "test_backend.py:" in pg.explain(graph)


def test_what_inductor_compiles_for_the_cpu_runs_live():
    f = torch.compile(lambda x: x.sin() + 1, backend=backend)
    with pytest.warns(pg.RunsLive, match="Inductor's code for the CPU calls no operators"):
        y = f(torch.ones(4))
    torch.testing.assert_close(y, torch.ones(4).sin() + 1)


@pytest.mark.parametrize(("given", "message"), [
    ({"options": {"iner": "eager"}}, "unknown option 'iner'"),
    ({"options": {"inner": 3}}, "inner must be the name of a backend"),
    ({"options": {"inner": "eager", "warmup": -1}}, "warmup must be at least 0"),
    ({"mode": "max-autotune"}, "mode='max-autotune' is Inductor's"),
])  # fmt: skip
def test_bad_options(given, message):
    with pytest.raises(Exception, match=message):
        torch.compile(lambda x: x + 1, backend=backend, **given)(torch.ones(2))


def test_by_name_without_an_import(device):
    if not importlib.metadata.entry_points(group="torch_dynamo_backends", name="phonograph"):
        pytest.skip("phonograph is not installed, only imported")
    code = f"""
import sys, torch
assert "phonograph" not in sys.modules
f = torch.compile(lambda x: x.sin() + 1, backend="phonograph", options={{"inner": "eager"}})
x = torch.ones(4, device={str(device)!r})
for _ in range(4):
    assert torch.equal(f(x), x.sin() + 1)
import phonograph as pg
from phonograph.compile import graphs
assert pg.stats(graphs()[0]).replayed == 3
"""
    ended = forked.run(code)
    assert ended.returncode == 0, ended.stderr


def test_what_is_recorded_elsewhere_compiles_nothing_again():
    """Changes of modules are noted by functions that the compiler does not look into."""
    counter = torch._dynamo.testing.CompileCounter()
    net = nn.Linear(4, 4)
    f = torch.compile(lambda weight, x: torch.func.functional_call(net, {"weight": weight}, (x,)), backend=counter)
    for n in range(5):
        other = pg.record(nn.Linear(4, 4), warmup=1)
        for _ in range(3):
            other(torch.ones(2, 4))
        weight, x = torch.full((4, 4), float(n)), torch.ones(2, 4)
        assert_same(f(weight, x), F.linear(x, weight, net.bias))
    assert counter.frame_count <= 2


@may_run_live
def test_c06_a_number_in_the_graph(device, inner):
    """AOT keeps it as a tensor of the graph's, which outlives the call."""
    torch.manual_seed(0)
    net = nn.Linear(4, 4).to(device)
    live = copy.deepcopy(net)

    def loss(m):
        return lambda x: (m(x) * torch.tensor(-1.5, dtype=x.dtype)).square().sum()

    f, expected = compiled(loss(net), inner), unrecorded(loss(live), inner)
    for n in range(6):
        x = torch.full((3, 4), 0.1 * n, device=device)
        for g, m in ((f, net), (expected, live)):
            m.zero_grad()
            g(x).backward()
        assert_same([p.grad for p in net.parameters()], [p.grad for p in live.parameters()])
    if device.type == "cpu" or inner != "eager":  # autograd saves a number on the host there, which is not followed
        assert totals() == (1, 1, 5)


_TRACED = """
import torch
from torch import nn
import phonograph as pg

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.steps = 0

    def forward(self, x):
        for layer in self.layers[:2]:
            x = layer(x)
        self.steps = self.steps + 1
        return nn.Softmax(dim=-1)(x)

def trace():
    torch._dynamo.utils.counters.clear()
    net = Net()
    torch.compile(net, backend="eager")(torch.randn(4, 8))
    found = torch._dynamo.utils.counters
    return net.steps, sum(found["graph_break"].values()), found["stats"]["unique_graphs"], found["stats"]["calls_captured"]

first = trace() if {before} else None
f = pg.record(nn.Linear(8, 8))
for _ in range(4):
    f(torch.randn(4, 8))
assert pg.stats(f).replayed == 3
torch._dynamo.reset()
found = trace()
assert found[:3] == (1, 0, 1), found
assert first is None or found == first, (first, found)
"""


@pytest.mark.parametrize("before", [False, True], ids=["first recorded", "first traced"])
def test_c14_recording_does_not_change_what_dynamo_traces(before):
    """What tells us of changes to modules does not show, whichever comes first in a process."""
    code = _TRACED.replace("{before}", str(before))
    ended = forked.run(code)
    assert ended.returncode == 0, ended.stderr


def test_c06_a_parameter_whose_memory_is_replaced_before_the_backward(device, inner):
    """Backward reads what is there then, as live."""
    net, live = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device) for _ in range(2))
    live.load_state_dict(net.state_dict())
    pairs = [(compiled(net, inner), net), (unrecorded(live, inner), live)]
    for n in range(6):
        found = []
        for f, module in pairs:
            module.zero_grad()
            y = f(torch.ones(3, 4, device=device) + n)
            if n > 2:
                module[1].weight.data = torch.full((4, 4), float(n), device=device)
            y.sum().backward()
            found.append([p.grad for p in module.parameters()])
        assert_same(*found)


class Written(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        with torch.no_grad():
            self.linear.weight.mul_(0.9)
        return self.linear(x).relu(), self.linear.bias.detach()


@pytest.mark.parametrize("writes", ["weight", "bias"])
def test_c04_autograd_hears_of_parameters_that_are_written(device, inner, writes):
    """By the graph itself, and by who has a detached one from it."""
    torch.manual_seed(0)
    net = Written().to(device)
    f = compiled(net, inner)
    for n in range(6):
        before = (getattr(net.linear, writes) ** 2).sum()
        _, detached = f(torch.ones(2, 4, device=device) + n)
        if writes == "bias":
            detached.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            before.backward()


@pytest.mark.parametrize("transform", ["per-sample gradients", "forward mode"])
def test_c12_a_capture_that_fails_within_a_transform_of_functorchs(device, transform):
    """Dynamo writes these into a graph as a call where it begins and one where it ends; the second does not come then."""
    w = torch.nn.Parameter(torch.ones(3, device=device))

    def per_sample(x):
        return torch.func.vmap(torch.func.grad(lambda w, x: (w * x).sin().sum()), (None, 0))(w, x).norm()

    def forward_mode(x):
        return torch.func.jvp(lambda x: (w * x).sin(), (x,), (torch.ones_like(x),))[1].sum()

    function = per_sample if transform == "per-sample gradients" else forward_mode
    fast = torch.compile(function, backend=backend, options={"inner": "eager"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pg.RunsLive)
        for n in range(5):
            x = torch.full((2, 3), 0.5 + n, device=device)
            torch.testing.assert_close(fast(x), function(x))
    x = torch.ones(3, device=device, requires_grad=True)
    assert checkpoint(lambda x: (x * w).sum(), x, use_reentrant=False).item() == 3.0
    assert torch.func.jvp(torch.sin, (x.detach(),), (x.detach(),))[1].shape == (3,)


HOOK_IN_COMPILED = """
import sys, torch, phonograph as pg
sys.setrecursionlimit(400)
backend, when = sys.argv[1:]
seen = []

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.c = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)

    def forward(self, x):
        h = self.a(x)
        h.register_hook(lambda g: seen.append(g.shape))
        return self.c(h.tanh())

def other():
    f = pg.record(torch.nn.Linear(4, 4))
    for _ in range(3):
        f(torch.randn(2, 4)).sum().backward()

options = {"options": {"inner": "aot_eager"}} if backend == "phonograph" else {}
net = torch.compile(Net(), backend=backend, **options)
for n in range(4):
    if n == int(when):
        other()
    net(torch.randn(3, 4)).square().mean().backward()
assert len(seen) == 4, seen
"""


@pytest.mark.parametrize(("backend", "when"), [("phonograph", 0), ("phonograph", 2), ("phonograph", 9), ("eager", 2),
                                               ("aot_eager", 2)])  # fmt: skip
def test_hooks_that_compiled_code_sets_before_and_after_the_first_recording(backend, when):
    done = forked.run(HOOK_IN_COMPILED, backend, str(when), warned="ignore")
    assert not done.returncode, done.stderr[-2000:]


overriding = pytest.mark.skipif(not hasattr(torch._dynamo, "override_cudagraphs"), reason="a later release of torch has it")


@overriding
@pytest.mark.parametrize("forward", [False, None, True])
@pytest.mark.parametrize("backward", [False, None])
def test_override_cudagraphs_is_obeyed(device, inner, forward, backward):
    """`fwd=False`: nothing is recorded; `bwd=False`: the forward is, and the backward runs live."""
    ours, theirs = network(device), network(device)

    def wrapped(model):
        def f(x):
            with torch._dynamo.override_cudagraphs(fwd=forward, bwd=backward):
                return model(x)

        return f

    fast, plain = compiled(wrapped(ours), inner), unrecorded(wrapped(theirs), inner)
    for n in range(6):
        found = []
        for f, model in ((fast, ours), (plain, theirs)):
            torch.manual_seed(n)
            model.zero_grad()
            out = f(torch.randn(4, 8, device=device))
            out.square().mean().backward()
            found.append((out, [p.grad for p in model.parameters()]))
        assert_same(*found)
    recorded = sum(pg.stats(g).recorded for g in graphs())
    lines = "\n".join(pg.explain(g) for g in graphs())
    assert recorded == (0 if forward is False else 1)
    assert ("backward of" in lines) == (forward is not False and backward is not False)


@pytest.fixture
def alone(device):
    dist = torch.distributed
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class TwoBuckets(nn.Module):
    """Of a mebibyte, for each of which Dynamo has the graph compiled apart."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 8))

    def forward(self, x):
        return self.inner(x) * 2


@pytest.mark.filterwarnings("ignore:Profiler record function")
def test_c23_a_graph_that_is_compiled_a_bucket_at_a_time(alone, device, inner):
    model = TwoBuckets().to(device)
    models = [nn.parallel.DistributedDataParallel(m, bucket_cap_mb=1) for m in (model, copy.deepcopy(model))]
    f, live = compiled(models[0], inner), unrecorded(models[1], inner)
    for n in range(6):
        x = torch.full((4, 512), 0.01 * n, device=device)
        for g, m in zip((f, live), models, strict=True):
            m.zero_grad()
            g(x).square().sum().backward()
        assert_same(*[[p.grad for p in m.parameters()] for m in models])
    found = [pg.stats(g) for g in graphs()]
    assert len(found) == 2
    assert [(s.calls, s.recorded) for s in found] == [(6, 1)] * 2
    assert all(s.bytes_copied < model.inner[0].weight.nbytes for s in found)  # no parameter


def test_c01_a_graph_that_is_asked_for_shapes_before_it_is_called(device):
    """As by what compiles the parts of one."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    net = nn.Linear(8, 8).to(device)
    f = backend(torch.fx.symbolic_trace(net), [torch.ones(2, 8, device=device)], options={"inner": "eager"})
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert f(torch.ones(2, 8, device=device)).shape == (2, 8)
    for n in range(4):
        x = torch.full((2, 8), 0.1 * n, device=device)
        assert_same(f(x), net(x))
    assert totals() == (1, 1, 3)
