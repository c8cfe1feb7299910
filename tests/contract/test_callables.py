"""C1, C6, C7: `make_graphed_callables`. Code written for torch's or for Transformer Engine's gets eager's results, bit for bit;
pipelines hold as many recordings as they have forwards in flight."""

import copy
import gc
import inspect
import itertools
import random
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map_only

import phonograph as pg
from phonograph.autograd import function as joint
from phonograph.devices import device_for
from phonograph.engine import recorder
from phonograph.memory.spans import Spans
from phonograph.testing import assert_same
from phonograph.wrappers import callables as room
from tests.helpers import may_run_live, ramp


def perceptron(device, width=8):
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.2), nn.Linear(width, width)).to(device)


def grads(modules):
    return [p.grad for m in modules for p in m.parameters()]


def state(modules):
    return [t for m in modules for t in m.state_dict().values()]


def generator_states(device):
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def beside(modules):
    """The modules, and equal ones that stay live."""
    return tuple(modules), tuple(copy.deepcopy(m) for m in modules)


def counts(f):
    s = pg.stats(f)
    return s.live, s.recorded, s.replayed


# ---------------------------------------------------------------------------------------------------
# The documented usages


def test_c06_parts_of_a_network_as_torch_documents_it(device):
    """Modules and a function, a loss among them, with torch's own arguments; a part that is chosen by data stays live."""
    torch.manual_seed(0)
    ours, theirs = beside([perceptron(device) for _ in range(3)])
    x, y = torch.randn(4, 8, device=device), torch.randn(4, 8, device=device)
    h = torch.randn(4, 8, device=device, requires_grad=True)
    first, second, third = pg.make_graphed_callables(ours, ((x,), (h,), (h,)))
    loss = pg.make_graphed_callables(F.mse_loss, (h, y), 3, False, (0, 1))
    assert (first, second, third) == ours
    assert isinstance(loss, pg.Recorded)
    optimizers = [torch.optim.SGD([p for m in modules for p in m.parameters()], 0.1) for modules in (ours, theirs)]
    for n in range(12):
        torch.manual_seed(n)
        x, y = torch.randn(4, 8, device=device), torch.randn(4, 8, device=device)
        found = []
        for (a, b, c), f, optimizer in zip((ours, theirs), (loss, F.mse_loss), optimizers, strict=True):
            torch.manual_seed(n)
            optimizer.zero_grad(set_to_none=True)
            middle = a(x)
            middle = b(middle) if middle.sum().item() > 0 else c(middle)
            value = f(middle, y)
            value.backward()
            optimizer.step()
            found.append((value, generator_states(device)))
        assert_same(*found)
        assert_same([grads(ours), state(ours)], [grads(theirs), state(theirs)])
    assert counts(first) == counts(loss) == (3, 1, 9)


def test_c01_nothing_runs_before_the_first_call(device):
    """Samples are neither read nor written nor kept; statistics, random numbers and counters are those of the real calls."""
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)).to(device)
    before, generators = copy.deepcopy(net.state_dict()), generator_states(device)
    sample = torch.full((4, 8), torch.nan, device=device)
    uses = torch._C._storage_Use_Count(sample.untyped_storage()._cdata)
    pg.make_graphed_callables(net, (sample,))
    assert_same([net.state_dict(), generator_states(device)], [before, generators])
    assert torch._C._storage_Use_Count(sample.untyped_storage()._cdata) == uses
    assert pg.stats(net).calls == 0


def test_c06_what_torch_does_wrong(device):
    """Micro-batches, two forwards before their backwards, results that are kept: the static buffers of others break these."""
    torch.manual_seed(0)
    (ours,), (theirs,) = beside([perceptron(device)])
    pg.make_graphed_callables(ours, (torch.randn(4, 8, device=device),), 1)
    kept = []
    for n in range(6):
        found = []
        for m in (ours, theirs):
            torch.manual_seed(n)
            m.zero_grad()
            outs = [m(torch.randn(4, 8, device=device)) for _ in range(2)]
            for out in reversed(outs):
                out.square().mean().backward()
            m(outs[0].detach()).sum().backward()
            found.append((outs, grads([m])))
        kept.append(found)
        for both in kept:
            assert_same(*both)
    assert not pg.stats(ours).refusals


class ManyWays(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.linear = nn.Embedding(10, 8), nn.Linear(8, 8)
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("scale", torch.ones(8, requires_grad=True))

    def forward(self, tokens, more, mask=None, *, times=1, residual=None):
        h = self.linear(self.table(tokens)) * self.scale * times + more["x"][0]
        h = h if mask is None else h.masked_fill(mask, 0.0)
        return {"h": h, "rest": (None, times, h.sum() if residual is None else (h + residual).sum())}


def test_c04_arguments_of_all_kinds(device):
    """Nested arguments, keywords, None, numbers, integer tensors; a parameter that is not used, a buffer that is trained."""
    torch.manual_seed(0)
    with device:  # made elsewhere and moved, the buffer would have a history
        (ours,), (theirs,) = beside([ManyWays()])

    def arguments(n):
        torch.manual_seed(n)
        x = torch.randn(3, 8, device=device, requires_grad=True)
        mask = torch.rand(3, 8, device=device) > 0.5 if n % 2 else None
        return (torch.arange(n, n + 3, device=device), {"x": [x, None]}, mask), {"times": 2, "residual": torch.ones_like(x)}

    args, kwargs = arguments(0)
    assert pg.make_graphed_callables(ours, args, 1, sample_kwargs=kwargs) is ours
    for n in range(8):
        found = []
        for m in (ours, theirs):
            m.zero_grad()
            m.scale.grad = None
            args, kwargs = arguments(n)
            out = m(*args, **kwargs)
            (out["h"].square().sum() + out["rest"][2]).backward()
            found.append((out, args[1]["x"][0].grad, grads([m]), m.scale.grad))
        assert_same(*found)
    assert counts(ours) == (2, 2, 6)  # with and without a mask


def test_c06_hooks_and_modes_that_torch_refuses(device):
    """A module that has hooks, in a mode of its own; an autocast context with its cache."""
    torch.manual_seed(0)
    ours, theirs = beside([perceptron(device), perceptron(device).eval()])
    for first, _ in (ours, theirs):
        first.register_forward_hook(lambda module, args, out: out * 2)
        first.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    x = torch.randn(4, 8, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        pg.make_graphed_callables(ours, ((x,), (x,)), 1)
    for n in range(5):
        found = []
        for first, second in (ours, theirs):
            torch.manual_seed(n)
            first.zero_grad()
            second.zero_grad()
            with torch.autocast(device.type, torch.bfloat16):
                out = second(first(x + n))
            out.float().square().sum().backward()
            found.append((out, grads([first, second])))
        assert_same(*found)
    assert counts(ours[0]) == counts(ours[1]) == (1, 1, 4)


@pytest.mark.parametrize("retain", [True, False])
def test_c06_backward_again_where_the_graph_was_retained(device, retain):
    torch.manual_seed(0)
    (ours,), (theirs,) = beside([perceptron(device)])
    x = torch.randn(4, 8, device=device)
    pg.make_graphed_callables(ours, (x,), 1, retain_graph_in_backward=retain, clone_param_grads_on_return=not retain)
    for n in range(5):
        for m in (ours, theirs):
            torch.manual_seed(n)
            m.zero_grad()
            loss = m(x).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
            with pytest.raises(RuntimeError, match="second time"):
                loss.backward()
        assert_same(grads([ours]), grads([theirs]))


# ---------------------------------------------------------------------------------------------------
# C7: calls that are not like the sample


def outcome(f, *args, **kwargs):
    """The result and the gradients, or the exception."""
    try:
        out = f(*args, **kwargs)
        out.sum().backward()
    except Exception as e:
        return type(e), str(e)
    return out


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 8), 2.0))

    def forward(self, x, y=None, *, scale=1.0):
        out = self.weight * x * scale
        return (out if y is None else out + y) * (1 if self.training else 10)


X = torch.arange(32.0).reshape(4, 8)  # a sample, which nobody writes
OTHER_CALLS = {
    "broadcastable": lambda d: ((X[:1].to(d),), {}),
    "a number of dimensions less": lambda d: ((X[0].to(d),), {}),
    "not broadcastable": lambda d: ((X[:3].to(d),), {}),
    "a dtype": lambda d: ((ramp(d, 4, 8, dtype=torch.float64),), {}),
    "strides": lambda d: ((ramp(d, 4, 8).reshape(8, 4).t(),), {}),
    "a gradient": lambda d: ((ramp(d, 4, 8).requires_grad_(),), {}),
    "one argument more": lambda d: ((ramp(d, 4, 8), ramp(d, 4, 8)), {}),
    "two arguments more": lambda d: ((ramp(d, 4, 8), ramp(d, 4, 8), ramp(d, 4, 8)), {}),
    "no argument": lambda d: ((), {}),
    "a keyword": lambda d: ((ramp(d, 4, 8),), {"scale": 3.0}),
    "a tensor by keyword": lambda d: ((), {"x": ramp(d, 4, 8)}),
    "an unknown keyword": lambda d: ((ramp(d, 4, 8),), {"shift": 3.0}),
    "a number": lambda d: ((2.0,), {}),
    "nothing": lambda d: ((None,), {}),
}


@may_run_live
@pytest.mark.parametrize("other", OTHER_CALLS.values(), ids=OTHER_CALLS)
def test_c07_another_call_than_the_sample(device, other):
    """It is eager's, or raises what eager raises; calls like the sample go on being replayed."""
    (ours,), (theirs,) = beside([Sum().to(device)])
    pg.make_graphed_callables(ours, (ramp(device, 4, 8),), 1)
    for n in range(9):
        found = []
        for m in (ours, theirs):
            m.zero_grad()
            args, kwargs = other(device) if n % 3 == 2 else ((ramp(device, 4, 8) + n,), {})
            found.append((outcome(m, *args, **kwargs), grads([m]), [a.grad for a in args if isinstance(a, torch.Tensor)]))
        assert_same(*found)
    assert pg.stats(ours).replayed >= 5, pg.explain(ours)


def test_c07_evaluation_and_training_in_turn(device):
    torch.manual_seed(0)
    (ours,), (theirs,) = beside([nn.Sequential(perceptron(device), nn.BatchNorm1d(8)).to(device)])
    x = torch.randn(4, 8, device=device)
    pg.make_graphed_callables(ours, (x,), 1)
    for n in range(12):
        found = []
        for m in (ours, theirs):
            torch.manual_seed(n)
            m.train(n % 3 != 2)
            with torch.set_grad_enabled(m.training):
                found.append(m(x + n))
        assert_same(*found)
        assert_same(state([ours]), state([theirs]))
    assert counts(ours) == (2, 2, 10)


# ---------------------------------------------------------------------------------------------------
# Pipelines


def one_forward_one_backward(stages, stage, microbatches):
    """The order of one stage of a pipeline that has one chunk a stage."""
    first = min(stages - stage - 1, microbatches)
    return [1] * first + [1, -1] * (microbatches - first) + [-1] * first


def interleaved(stages, chunks, stage, microbatches):
    """The order of one stage that has several chunks; micro-batches go through a chunk in groups of as many as there are
    stages."""

    def chunk(k):
        return k % (stages * chunks) // stages + 1

    total = microbatches * chunks
    first = min(2 * (stages - stage - 1) + (chunks - 1) * stages, total)
    forwards, backwards = [chunk(k) for k in range(total)], [chunk(k) - chunks - 1 for k in range(total)]
    middle = [step for pair in zip(forwards[first:], backwards, strict=False) for step in pair]
    return forwards[:first] + middle + backwards[total - first :]


ORDERS = {
    "1F1B, first of 4": one_forward_one_backward(4, 0, 6),
    "1F1B, third of 4": one_forward_one_backward(4, 2, 6),
    "1F1B, last of 4": one_forward_one_backward(4, 3, 6),
    "Transformer Engine's": [1, 2, 1, 2, -2, -1, 1, 2, -2, -1, -2, -1],
    "interleaved, first of 2": interleaved(2, 2, 0, 4),
    "interleaved, last of 2": interleaved(2, 2, 1, 4),
    "all forwards first": [1, 2, 3] * 3 + [-3, -2, -1] * 3,
}
IN_FLIGHT = {
    "1F1B, first of 4": [4],
    "1F1B, third of 4": [2],
    "1F1B, last of 4": [1],
    "Transformer Engine's": [2, 2],
    "interleaved, first of 2": [4, 2],
    "interleaved, last of 2": [3, 1],
    "all forwards first": [3, 3, 3],
}
GIVEN, MEMORY = ("order", "order, with reuse", "learned"), {"roomy": 8, "scarce": 160}
# Every second of all combinations, in which any two choices meet.
PIPELINES = [
    pytest.param(ORDERS[name], IN_FLIGHT[name], given, MEMORY[memory], id=f"{name}-{given}-{memory}")
    for (i, name), (j, given), (k, memory) in itertools.product(*map(enumerate, (ORDERS, GIVEN, MEMORY)))
    if (i + j + k) % 2 == 0
]


class Stage:
    """One stage of a pipeline: chunks of layers, run by an order. Other stages are played by random numbers."""

    def __init__(self, modules, order, calls=None):
        self.modules, self.order = modules, order
        self.layers = len(modules) // max(order)
        self.calls = calls or {}  # by chunk and micro-batch: the layers to call
        self.optimizer = torch.optim.AdamW(nn.ModuleList(modules).parameters(), 0.01, fused=True)

    def step(self, device, width):
        waiting = {c: [] for c in range(1, max(self.order) + 1)}
        seen = dict.fromkeys(waiting, 0)
        results = []
        self.optimizer.zero_grad()
        for c in self.order:
            if c > 0:
                start = out = torch.randn(4, width, device=device, requires_grad=True)
                own = self.modules[(c - 1) * self.layers : c * self.layers]
                for layer in self.calls.get((c, seen[c]), own):
                    out = layer(out)
                seen[c] += 1
                waiting[c].append((start, out))
                results.append(out.detach().clone())
            else:
                start, out = waiting[-c].pop(0)
                out.backward(torch.randn(out.shape, device=device))
                results.append(start.grad.clone())
            start = out = None
        self.optimizer.step()
        return results, generator_states(device)


def check(ours, theirs, device, width, steps=3):
    for n in range(steps):
        found = []
        for stage in (ours, theirs):
            torch.manual_seed(n)
            found.append((stage.step(device, width), grads(stage.modules), state(stage.modules)))
        assert_same(*found)


def fan_out(made, order, layers):
    """What `_order` returns, by chunk and micro-batch: by chunk, in these by micro-batch, in these by layer."""
    microbatches, chunks = order.count(1), max(order)
    places = iter(made)
    return {(c + 1, m): [next(places) for _ in range(layers)] for c in range(chunks) for m in range(microbatches)}


def memory_is(device, monkeypatch, *, scarce):
    monkeypatch.setattr(device_for(device), "roomy", 0 if scarce else 1 << 40, raising=False)


@pytest.mark.parametrize(("order", "in_flight", "given", "width"), PIPELINES)
def test_c06_c15_a_pipeline(device, monkeypatch, order, in_flight, given, width):
    """As many recordings of each chunk as it has forwards in flight, however many micro-batches, and whether memory is
    scarce or not; none is made later."""
    memory_is(device, monkeypatch, scarce=width == 160)
    torch.manual_seed(0)
    layers, chunks, microbatches = 2, max(order), order.count(1)
    modules, live = beside([perceptron(device, width) for _ in range(layers * chunks)])
    sample = (torch.empty(4, width, device=device, requires_grad=True),)
    if given == "learned":
        pg.make_graphed_callables(modules, (sample,) * len(modules), 1)
        stage = Stage(modules, order)
    else:
        samples = [sample] * (layers * chunks * microbatches)
        reuse = given != "order"
        made = pg.make_graphed_callables(modules, samples, 1, _order=order, _reuse_graph_input_output_buffers=reuse)
        stage = Stage(modules, order, fan_out(made, order, layers))
    live = Stage(live, order)
    check(stage, live, device, width)
    expected = [n for n in in_flight for _ in range(layers)]
    made = [pg.stats(m).recorded for m in modules]
    assert [len(pg.api._recorded(m)._shelf) for m in modules] == expected
    more = 0 if given != "learned" else 2  # at first it is not known yet that it is a pipeline
    assert all(0 <= m - n <= more for m, n in zip(made, expected, strict=True)), (made, expected)
    check(stage, live, device, width, steps=2)
    assert [pg.stats(m).recorded for m in modules] == made
    assert [pg.stats(m).live for m in modules] == [1] * len(modules)
    assert not any(pg.stats(m).refusals for m in modules)
    backwards = [pg.stats(b) for m in modules for b in pg.api._recorded(m)._backwards]
    assert sum(b.replayed for b in backwards) > 0
    assert not any(b.refusals for b in backwards)


@pytest.mark.parametrize("many", [0, 1000], ids=["played there", "played elsewhere"])
def test_c06_gradients_are_added_up_before_their_memory_is_used_again(cuda, monkeypatch, many):
    """Autograd adds them up on the stream on which it first met a parameter, which may be far behind: here its hooks are."""
    monkeypatch.setattr(joint, "MANY", many)
    memory_is(cuda, monkeypatch, scarce=True)
    torch.manual_seed(0)
    modules, live = beside([perceptron(cuda, 160) for _ in range(2)])
    for p in nn.ModuleList(modules).parameters():
        p.register_hook(lambda _: torch.cuda._sleep(2_000_000))
    pg.make_graphed_callables(modules, ((torch.empty(4, 160, device=cuda, requires_grad=True),),) * 2, 1)
    order = ORDERS["1F1B, last of 4"]
    check(Stage(modules, order), Stage(live, order), cuda, 160, steps=5)
    assert sum(pg.stats(b).replayed for m in modules for b in pg.api._recorded(m)._backwards) > 10


@pytest.mark.parametrize("many", [0, 1000], ids=["played there", "played elsewhere"])
def test_c06_a_gradient_is_read_before_its_memory_is_used_again(cuda, monkeypatch, many):
    """What reads the gradient of an argument may run on another stream than the backward that comes next; here that is slow."""
    monkeypatch.setattr(joint, "MANY", many)
    memory_is(cuda, monkeypatch, scarce=True)
    torch.manual_seed(0)
    ours, theirs = beside([perceptron(cuda, 160) for _ in range(3)])
    for m in ours:
        pg.record(m, warmup=1)
    for n in range(8):
        found = []
        for modules in (ours, theirs):
            torch.manual_seed(n)
            total, weights = 0, []
            for m in modules:
                w = torch.randn(4, 160, device=cuda, requires_grad=True)
                x = w * 2
                x.grad_fn.register_prehook(lambda _: torch.cuda._sleep(2_000_000))
                total = total + m(x).square().sum()
                weights.append(w)
            total.backward()
            found.append([w.grad for w in weights])
        assert_same(*found)
    backwards = [b for m in ours for b in pg.api._recorded(m)._backwards]
    assert all(pg.stats(b).replayed >= 3 for b in backwards)
    (one, *_), *others = ([p.recording for p in b._shelf] for b in backwards)
    assert any(one.footprint.meets(lease.address, lease.nbytes) for rs in others for r in rs for lease in r.leases)


class Chunk(nn.Module):
    """A part of a model whose last part gives the loss."""

    def __init__(self, width, last):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4 * width, width))
        self.last = last

    def forward(self, x):
        x = x + self.layers(x)
        return x.square().mean() if self.last else x


def all_stages(stages, microbatches):
    """(stage, micro-batch, whether it is a forward): 1F1B of all stages, in an order in which one process can run them."""
    waiting = []
    for stage in range(stages):
        forwards, backwards = iter(range(microbatches)), iter(range(microbatches))
        steps = one_forward_one_backward(stages, stage, microbatches)
        waiting.append([(stage, next(forwards if step > 0 else backwards), step > 0) for step in steps])
    done = set()
    while any(waiting):
        for steps in waiting:
            stage, m, forward = steps[0] if steps else (0, 0, True)
            before = stage + (-1 if forward else 1)
            if steps and (before in (-1, stages) or (before, m, forward) in done):
                done.add(steps.pop(0))
                yield stage, m, forward


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("scarce", [True, False])
def test_c06_c15_all_stages_of_a_pipeline_in_one_process(device, monkeypatch, scarce, set_to_none):
    """Each takes what another gives, as it is; nothing is known of the order before. There is memory for the forwards that
    are in flight, and for one backward, and it is found in two steps."""
    memory_is(device, monkeypatch, scarce=scarce)
    torch.manual_seed(0)
    width, rows = 64, 1024 if device.type == "cuda" else 256
    ours, theirs = beside([Chunk(width, stage == 3).to(device) for stage in range(4)])
    optimizers = [torch.optim.AdamW(nn.ModuleList(chunks).parameters(), 0.01, fused=True) for chunks in (ours, theirs)]
    for chunk in ours:
        pg.record(chunk, warmup=1)

    def step(chunks, optimizer, n):
        torch.manual_seed(n)
        optimizer.zero_grad(set_to_none=set_to_none)
        made, given, losses = {(-1, m): torch.randn(rows, width, device=device) for m in range(8)}, {}, []
        for stage, m, forward in all_stages(4, 8):
            if forward:
                given[stage, m] = made[stage - 1, m].detach().requires_grad_(stage > 0)
                made[stage, m] = chunks[stage](given[stage, m])
            elif stage == 3:
                losses.append(made.pop((stage, m)))
                losses[-1].backward()
            else:
                made.pop((stage, m)).backward(given.pop((stage + 1, m)).grad)
        optimizer.step()
        return losses, grads(chunks), state(chunks), generator_states(device)

    def recordings():
        functions = [f for chunk in ours for f in (chunk, *pg.api._recorded(chunk)._backwards)]
        return [pg.stats(f).recorded for f in functions]

    for n in range(5):
        if n == 3:
            settled = recordings()
        assert_same(step(ours, optimizers[0], n), step(theirs, optimizers[1], n))
    assert recordings() == settled
    assert [pg.stats(chunk).live for chunk in ours] == [1] * 4
    forwards = [player.recording for chunk in ours for player in pg.api._recorded(chunk)._shelf]
    assert len(forwards) == 4 + 3 + 2 + 1
    backwards = [p.recording for chunk in ours for b in pg.api._recorded(chunk)._backwards for p in b._shelf]
    assert len(backwards) == len(forwards)
    if scarce:
        kept = Spans((lease.address, lease.nbytes) for r in forwards for lease in r.backward.saved.memory).nbytes
        of_cublas_lt = len(forwards) << 20 if device.type == "cuda" else 0
        taken = Spans(piece for r in (*forwards, *backwards) for piece in r.footprint).nbytes
        assert taken < 1.2 * kept + of_cublas_lt + 2 * max(r.footprint.nbytes for r in backwards)


@pytest.mark.parametrize("scarce", [False, True])
def test_c06_c15_a_loop_that_keeps_its_last_output_is_no_pipeline(device, monkeypatch, scarce):
    """Two forwards take turns, each with a backward, whose gradients lie in the same places each time: an optimizer that is
    recorded beside finds them there."""
    monkeypatch.setattr(recorder, "SMALL", 0)
    memory_is(device, monkeypatch, scarce=scarce)
    torch.manual_seed(0)
    (ours,), (theirs,) = beside([Chunk(64, False).to(device)])
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (ours, theirs)]
    pg.record(ours, warmup=1)
    steps = [pg.record(optimizers[0].step, warmup=1), optimizers[1].step]
    outs = [None, None]
    for n in range(14):
        if n == 9:
            settled = [pg.stats(f).recorded for f in (ours, steps[0])]
        x = torch.full((8, 64), 0.1 * n, device=device)
        for i, (m, optimizer, step) in enumerate(zip((ours, theirs), optimizers, steps, strict=True)):
            torch.manual_seed(n)
            optimizer.zero_grad()
            outs[i] = m(x)
            outs[i].square().mean().backward()
            step()
        assert_same(outs[0].detach(), outs[1].detach())
        assert_same(ours.state_dict(), theirs.state_dict())
    assert [pg.stats(f).recorded for f in (ours, steps[0])] == settled
    assert pg.stats(ours).recorded == 2
    assert pg.stats(steps[0]).live <= 3


@pytest.mark.parametrize("calls", [1, 6])
def test_c15_models_that_are_trained_in_turn_settle(device, monkeypatch, calls):
    """Recorded in all ways: whole steps, models, optimizers beside. They share memory, in which each leaves its gradients; soon
    none is in another's way."""
    memory_is(device, monkeypatch, scarce=True)
    torch.manual_seed(0)
    ways = [(True, False, False), (False, True, False), *[(False, True, True)] * 3]
    ours, theirs = beside([nn.Sequential(perceptron(device, 160), perceptron(device, 160)) for _ in ways])
    recorded = []

    def training(m, whole=False, model=False, optimizer=False):
        adam = torch.optim.Adam(m.parameters(), 1e-3, fused=True)
        call = pg.record(m) if model else m
        apply = pg.record(adam.step) if optimizer else adam.step

        def step(x):
            adam.zero_grad()
            loss = call(x).square().mean()
            loss.backward()
            apply()
            return loss.detach()

        made = pg.record(step) if whole else step
        recorded.extend(f for f, chosen in ((made, whole), (m, model), (apply, optimizer)) if chosen)
        return made

    pairs = [(training(m, *way), training(t)) for m, t, way in zip(ours, theirs, ways, strict=True)]
    turns = 20 if calls == 1 else 8
    for turn in range(turns):
        if turn == turns - 1:
            settled = [pg.stats(f).recorded for f in recorded]
        for step, live in pairs:
            for n in range(calls):
                found = []
                for s in (step, live):
                    torch.manual_seed(100 * turn + n)
                    found.append(s(torch.randn(32, 160, device=device)))
                assert_same(*found)
    assert_same([m.state_dict() for m in ours], [t.state_dict() for t in theirs])
    assert [pg.stats(f).recorded for f in recorded] == settled
    assert [pg.stats(f).refusals for f in recorded] == [{}] * len(recorded)


def test_c06_c15_memory_does_not_grow_with_the_number_of_micro_batches(device, monkeypatch):
    """It is that of the forwards in flight, and of one backward at a time."""
    memory_is(device, monkeypatch, scarce=True)
    taken = []
    for microbatches in (4, 12):
        torch.manual_seed(0)
        modules = [perceptron(device, 64) for _ in range(2)]
        order = one_forward_one_backward(4, 0, microbatches)
        pg.make_graphed_callables(tuple(modules), ((X,),) * (2 * microbatches), 1, _order=order, _num_layers_per_chunk=2)
        stage = Stage(modules, order)
        for _ in range(4):
            stage.step(device, 64)
        taken.append(device_for(device).pool.footprints().nbytes)
        for module in modules:
            pg.reset(module)
    assert taken[1] <= 1.05 * taken[0]


@pytest.mark.parametrize("seed", range(6))
def test_c06_c15_an_irregular_order(device, monkeypatch, seed):
    """It is known from the start what will be in flight, so that nothing is recorded where it would be in the way later."""
    memory_is(device, monkeypatch, scarce=True)
    torch.manual_seed(seed)
    order, waiting, in_flight = [], {1: 0, 2: 0}, {1: 0, 2: 0}
    while any(n < 5 for n in map(order.count, (-1, -2))):
        c = random.Random(f"{seed} {len(order)}").choice([c for c in (1, 2, -1, -2) if order.count(c) < 5])
        if c > 0 or waiting[-c]:
            order.append(c)
            waiting[abs(c)] += 1 if c > 0 else -1
            in_flight[abs(c)] = max(in_flight[abs(c)], waiting[abs(c)])
        else:
            seed += 100
    modules, live = beside([perceptron(device) for _ in range(2)])
    pg.make_graphed_callables(modules, ((X,),) * 10, 1, _order=order)
    stage, live = Stage(modules, order), Stage(live, order)
    for _ in range(2):
        check(stage, live, device, 8)
        assert [pg.stats(m).recorded for m in modules] == [*in_flight.values()]
    assert not any(pg.stats(m).refusals for m in modules)


@pytest.mark.parametrize("order", [[1, 1, 1, -1, -1, -1], [1, -1, 1, -1, 1, -1]], ids=["3 in flight", "1 in flight"])
def test_c18_an_order_makes_room_for_what_it_has_in_flight(device, order):
    net = perceptron(device)
    pg.make_graphed_callables((net,), ((torch.ones(4, 8, device=device),),) * 3, _order=order)
    assert pg.api._recorded(net).options.max_recordings == 16 + (3 if order[1] == 1 else 1)
    pg.make_graphed_callables((net,), ((torch.ones(4, 8, device=device),),) * 3, _order=order, max_recordings=2)
    assert pg.api._recorded(net).options.max_recordings == 2


def test_c06_a_layer_that_is_in_several_chunks(device):
    """It is one recorded module; its forwards in flight are those of all its places."""
    torch.manual_seed(0)
    (ours,), (theirs,) = beside([perceptron(device)])
    order, sample = ORDERS["Transformer Engine's"], (torch.empty(4, 8, device=device),)
    made = pg.make_graphed_callables((ours, ours), (sample,) * 6, 1, _order=order)
    assert set(made) == {ours}
    check(Stage((ours, ours), order), Stage((theirs, theirs), order), device, 8)
    assert pg.api._recorded(ours).options.max_recordings == 16 + 4
    assert counts(ours) == (1, 4, 17)


# ---------------------------------------------------------------------------------------------------
# Hooks around warm-ups and captures

LIVE = ["forward_pre", "forward", "backward_pre", "backward"]


def noting(seen, returned=None):
    """Hooks of all kinds that note what they are called with."""

    def note(kind):
        def hook(owner, *args):
            from phonograph.engine.current_capture import recording_here

            assert not recording_here()
            seen.append((kind, owner, tree_map_only(torch.Tensor, lambda t: t.detach().clone(), args)))
            return returned

        return hook

    kinds = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
    return {kind: {"any name": note(kind.removesuffix("_hooks"))} for kind in kinds}


def test_c09_hooks_run_around_warm_ups_and_captures_only(device):
    torch.manual_seed(0)
    (ours,), (theirs,) = beside([perceptron(device)])
    seen = []
    pg.make_graphed_callables(ours, (torch.ones(4, 8, device=device),), 2, capture_time_hooks=[noting(seen)])
    expected = [LIVE, LIVE, LIVE, LIVE[2:], [], []]  # the recorded backward is captured one call later
    for n, kinds in enumerate(expected):
        found = []
        for m in (ours, theirs):
            torch.manual_seed(n)
            m.zero_grad()
            x, g = torch.randn(4, 8, device=device, requires_grad=True), torch.randn(4, 8, device=device)
            out = m(x)
            out.backward(g)
            found.append((out, x.grad, grads([m])))
        assert_same(*found)
        assert [kind for kind, _, _ in seen] == kinds
        assert all(owner is ours for _, owner, _ in seen)
        got = {kind: args for kind, _, args in seen}
        seen.clear()
        if "forward" in got:
            (result, _, _), _ = found
            assert_same(got["forward_pre"][0][0].detach(), x.detach())
            assert_same([got["forward"][0][0].detach(), got["forward"][1]], [x.detach(), result.detach()])
        if "backward" in got:
            assert_same([tuple(got["backward_pre"][0]), tuple(map(tuple, got["backward"]))], [(g,), ((x.grad,), (g,))])


def test_c09_hooks_that_get_keyword_arguments(device):
    seen = []
    hooks = {
        "forward_pre_hooks": {0: lambda f, args, kwargs: seen.append((args, kwargs)), 1: lambda f, args: seen.append(args)},
        "forward_pre_hooks_with_kwargs": {0: True},
        "forward_hooks": {0: lambda f, args, kwargs, out: seen.append(kwargs), "b": lambda f, args, out: seen.append(out)},
        "forward_hooks_with_kwargs": {0: True},
    }
    double = pg.make_graphed_callables(lambda x, *, scale: x * scale, (X,), 1, sample_kwargs={"scale": 2.0},
                                       capture_time_hooks=hooks)  # fmt: skip
    x = ramp(device, 4, 8)
    out = double(x, scale=2.0)
    assert_same(seen, [((x,), {"scale": 2.0}), (x,), {"scale": 2.0}, out])


def test_c09_hooks_with_several_forwards_in_flight(device):
    """Each belongs to its own call: pre and post of one backward come together, in the order of the backwards."""
    seen = []
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).to(device)
    pg.make_graphed_callables(net, (ramp(device, 4, 8),), 3, capture_time_hooks=noting(seen))
    outs = [net(ramp(device, 4, 8) + n) for n in range(3)]
    seen.clear()
    given = [torch.full((4, 8), float(n), device=device) for n in range(3)]
    for out, g in zip(outs, given, strict=True):
        out.backward(g)
    assert [kind for kind, _, _ in seen] == ["backward_pre", "backward"] * 3
    assert_same([args[0][0] for kind, _, args in seen if kind == "backward_pre"], given)


def test_c09_hooks_run_around_the_first_backward_of_a_call(device):
    seen = []
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).to(device)
    pg.make_graphed_callables(net, (X,), 1, capture_time_hooks=noting(seen))
    for _ in range(2):
        loss = net(ramp(device, 4, 8)).sum()
        seen.clear()
        for _ in range(3):
            loss.backward(retain_graph=True)
        assert [kind for kind, _, _ in seen] == LIVE[
            2:
        ]  # of the second call, which was captured, around the backward's capture


class Parts(nn.Module):
    """Several results: one leads to the other, and one has parameters of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, y):
        h = self.first(x)
        return h, self.second(h.tanh()) + y, self.third(y) * x


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 1), (0, 2), (0, 1, 2)])
def test_c09_hooks_of_a_call_with_several_results(device, used):
    """In a live call as in a recorded one: each once, with the gradients of the results and of both arguments."""
    seen, net = [], Parts().to(device)
    pg.make_graphed_callables(net, (X, X), 1, capture_time_hooks=noting(seen))
    for _ in range(2):
        x, y = (ramp(device, 4, 8).requires_grad_() for _ in range(2))
        out = net(x, y)
        seen.clear()
        given = [torch.full((4, 8), 1.0 + i, device=device) for i in range(3)]
        torch.autograd.backward([out[i] for i in used], [given[i] for i in used])
        assert [kind for kind, _, _ in seen] == LIVE[2:]
        of_arguments, of_results = seen[1][2]
        assert_same(of_arguments, (x.grad, y.grad))
        plain = [i for i in used if i > 0 or 1 not in used]  # what leads to another result has more of a gradient in eager
        assert_same([of_results[i] for i in plain], [given[i] for i in plain])


def test_c17_a_warm_up_with_hooks_whose_backward_never_runs(device):
    for make in (lambda: nn.Linear(8, 8), lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), Parts):
        net = make().to(device)
        pg.make_graphed_callables(net, (X, X)[: 2 if make is Parts else 1], 3, capture_time_hooks=noting([]))
        args = [ramp(device, 4, 8).requires_grad_() for _ in range(2 if make is Parts else 1)]
        net(*args)
        gone = weakref.ref(net)
        del net
        gc.collect()
        assert gone() is None


def test_c09_hooks_that_prepare_the_weights(device):
    """What they are for: weights are in place for a run and a capture only, as with those that are gathered and freed."""
    net = nn.Linear(8, 8).to(device)
    full, log = net.weight.detach().clone(), []

    def gather(module, *_):
        module.weight.data.copy_(full)
        log.append("gather")

    def free(module, *_):
        module.weight.data.zero_()
        log.append("free")

    hooks = {"forward_pre_hooks": {0: gather}, "forward_hooks": {0: free},
             "backward_pre_hooks": {0: gather}, "backward_hooks": {0: free}}  # fmt: skip
    free(net)
    pg.make_graphed_callables(net, (ramp(device, 4, 8),), 1, capture_time_hooks=[hooks])
    for n in range(5):
        x = (ramp(device, 4, 8) + n).requires_grad_()
        around = len(log)
        if n >= 2:  # at a replay it is the caller's business
            gather(net)
        net(x).sum().backward()
        assert_same(x.grad, full.sum(0).expand(4, 8).contiguous(), "", tolerance=1e-6)
        assert log[around:].count("gather") == {0: 2, 1: 2}.get(n, 1)
        free(net)


@may_run_live
def test_c12_hooks_come_in_pairs_where_a_capture_fails(device):
    seen = []
    live = pg.make_graphed_callables(lambda x: x * x.sum().item(), (X,), 1, capture_time_hooks=noting(seen))
    for _ in range(6):
        live(ramp(device, 4, 8))
    kinds = [kind for kind, _, _ in seen]
    assert len(kinds) >= 4
    assert kinds == ["forward_pre", "forward"] * (len(kinds) // 2)
    assert pg.stats(live).live == 6


@pytest.mark.parametrize("kind", ["forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks"])
@pytest.mark.parametrize("warmup", [1, 0])
def test_c13_a_hook_that_returns_something_is_an_error(device, kind, warmup):
    net = nn.Linear(8, 8).to(device)
    hooks = {kind: {0: lambda *args: args}}
    pg.make_graphed_callables(net, (ramp(device, 4, 8),), warmup, capture_time_hooks=[hooks])
    with pytest.raises(RuntimeError, match="must return None"):
        net(ramp(device, 4, 8).requires_grad_()).sum().backward()


def test_c13_an_exception_of_a_hook_reaches_the_caller(device):
    def fail(*_):
        raise KeyError("mine")

    f = pg.make_graphed_callables(torch.sin, (X,), 1, capture_time_hooks={"forward_pre_hooks": {0: fail}})
    for _ in range(3):
        with pytest.raises(KeyError, match="mine"):
            f(ramp(device, 4, 8))


@pytest.mark.parametrize("iterations", [0, 1, 3])
def test_c01_hooks_before_and_after_all_warm_ups(device, iterations):
    """Once each: before the first warm-up of any, after the last of all."""
    events = []
    nets = [nn.Linear(8, 8).to(device) for _ in range(2)]
    for i, net in enumerate(nets):
        net.register_forward_hook(lambda *_, i=i: events.append(i) if not pg.stats(nets[i]).recorded else None)
    x = ramp(device, 4, 8)
    pg.make_graphed_callables(tuple(nets), ((x,), (x,)), iterations, pre_warmup_hook=lambda: events.append("before"),
                              post_warmup_hook=lambda: events.append("after"))  # fmt: skip
    if iterations == 0:
        assert events == ["before", "after"]
        return
    assert events == []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pg.RunsLive)  # the forward hook appends
        for _ in range(iterations):
            nets[1](nets[0](x))
    assert events == ["before", *[0, 1] * iterations, "after"]


# ---------------------------------------------------------------------------------------------------
# What is refused at once


def none(*_):
    """Takes anything."""


LINEAR = nn.Linear(8, 8)
ONE, TWO = (LINEAR, (X,)), ((LINEAR, F.mse_loss), ((X,), (X, X)))
WRONG = {
    "a list of callables": (([LINEAR], (X,)), {}, TypeError, "not list"),
    "no callables": (((), ()), {}, ValueError, "empty"),
    "not a function": ((("x",), ((X,),)), {}, TypeError, "not str"),
    "a tensor for a tuple": ((LINEAR, X), {}, TypeError, "sample_args"),
    "tensors for tuples": (((LINEAR,), (X,)), {}, TypeError, "sample_args"),
    "samples for some": ((TWO[0], ((X,),)), {}, ValueError, "sample_args has 1 entries and must have 2"),
    "too many arguments": ((LINEAR, (X, X)), {}, TypeError, "sample 0 does not fit"),
    "too few arguments": ((LINEAR, ()), {}, TypeError, "sample 0 does not fit"),
    "keywords for some": (TWO, {"sample_kwargs": ({},)}, ValueError, "sample_kwargs has 1"),
    "keywords that are none": (ONE, {"sample_kwargs": {1: X}}, TypeError, "sample_kwargs"),
    "an unknown keyword": (ONE, {"sample_kwargs": {"shift": X}}, TypeError, "sample 0 does not fit"),
    "fewer than no warm-ups": (ONE, {"num_warmup_iters": -1}, ValueError, "num_warmup_iters"),
    "half a warm-up": (ONE, {"num_warmup_iters": 0.5}, TypeError, "num_warmup_iters"),
    "a flag": (ONE, {"allow_unused_input": None}, TypeError, "allow_unused_input"),
    "a pool": (ONE, {"pool": "mine"}, TypeError, "pool"),
    "reuse without an order": (ONE, {"_reuse_graph_input_output_buffers": True}, ValueError, "_order"),
    "chunks without an order": (ONE, {"_num_layers_per_chunk": [1]}, ValueError, "_order"),
    "hooks for some": (TWO, {"capture_time_hooks": [{}]}, ValueError, "capture_time_hooks has 1"),
    "hooks of another kind": (ONE, {"capture_time_hooks": [{"forwards": {}}]}, ValueError, "forwards"),
    "hooks that are no dict": (ONE, {"capture_time_hooks": [[none]]}, TypeError, "dict"),
    "hooks without names": (ONE, {"capture_time_hooks": {"forward_hooks": none}}, TypeError, "forward_hooks"),
    "hooks that are no functions": (ONE, {"capture_time_hooks": {"backward_hooks": {0: 1}}}, TypeError, "backward_hooks"),
    "hooks for one callable twice": (
        ((LINEAR, LINEAR), ((X,), (X,))), {"capture_time_hooks": [None, {"forward_hooks": {0: none}}]}, ValueError, "twice",
    ),
    "a warm-up hook": (ONE, {"pre_warmup_hook": 1}, TypeError, "pre_warmup_hook"),
    "warm-ups twice": (ONE, {"warmup": 1}, TypeError, "warmup"),
    "an unknown option": (ONE, {"num_warmups": 1}, TypeError, "num_warmups"),
    "an option of pg.record": (ONE, {"fallback": "eager"}, ValueError, "fallback"),
}  # fmt: skip


@pytest.mark.parametrize(("args", "options", "kind", "says"), WRONG.values(), ids=WRONG)
def test_c11_wrong_arguments_are_refused_at_once(args, options, kind, says):
    with pytest.raises(kind, match=says):
        pg.make_graphed_callables(*args, **options)
    with pytest.raises(TypeError, match=r"pg\.record"):
        pg.stats(LINEAR)  # and nothing was recorded


WRONG_ORDERS = {
    "fractions": ([1, 1.5, -1, -1.5], 1, TypeError, "ints"),
    "bools": ([True, -1], 1, TypeError, "ints"),
    "zero": ([1, 0, -1], 1, ValueError, "same number"),
    "empty": ([], 1, ValueError, "same number"),
    "forwards only": ([1, 1], 1, ValueError, "same number"),
    "a backward too few": ([1, 1, -1], 1, ValueError, "same number"),
    "a chunk left out": ([1, 3, -3, -1], 2, ValueError, "same number"),
    "a chunk with more": ([1, 2, 2, -2, -2, -1], 2, ValueError, "same number"),
    "backward first": ([1, -1, -1, 1], 1, ValueError, "before its forward"),
    "callables that cannot be shared out": ([1, 2, -2, -1], 3, ValueError, "whole number"),
}


@pytest.mark.parametrize(("order", "callables", "kind", "says"), WRONG_ORDERS.values(), ids=WRONG_ORDERS)
def test_c11_an_order_that_is_none(order, callables, kind, says):
    with pytest.raises(kind, match=says):
        pg.make_graphed_callables((LINEAR,) * callables, ((X,),) * 12, _order=order)


@pytest.mark.parametrize(("layers", "kind"), [([1, 1], ValueError), ([3], ValueError), ([0, 3], ValueError), (2, ValueError),
                                              ([1.5, 1.5], TypeError), ("12", TypeError)])  # fmt: skip
def test_c11_layers_of_chunks_that_do_not_agree(layers, kind):
    with pytest.raises(kind, match="_num_layers_per_chunk"):
        pg.make_graphed_callables((LINEAR,) * 3, ((X,),) * 3, _order=[1, 2, -2, -1], _num_layers_per_chunk=layers)


def test_c11_samples_of_an_order():
    """One for each layer and micro-batch: by chunk, in these by micro-batch, in these by layer."""
    one, two = nn.Linear(8, 8), nn.Bilinear(8, 8, 8)
    samples, order = [(X,), (X, X), (X, X), (X,), (X, X), (X, X)], [1, 1, -1, -1]
    made = pg.make_graphed_callables((one, two, two), samples, _order=order)
    assert made == (one, two, two) * 2
    layers = nn.Linear(8, 8), nn.Linear(8, 8), nn.Bilinear(8, 8, 8)
    made = pg.make_graphed_callables(layers, [(X,)] * 4 + [(X, X)] * 2, _order=[1, 2, 1, 2, -2, -2, -1, -1],
                                     _num_layers_per_chunk=[2, 1])  # fmt: skip
    assert made == (*layers[:2], *layers[:2], layers[2], layers[2])
    with pytest.raises(ValueError, match="must have 6"):
        pg.make_graphed_callables((one, two, two), samples[:3], _order=order)
    with pytest.raises(TypeError, match="sample 1 does not fit"):
        pg.make_graphed_callables((one, two, two), sorted(samples, key=len), _order=order)


LOW_PRECISION = sorted(room._TRANSFORMER_ENGINE)


@pytest.mark.parametrize("option", LOW_PRECISION)
def test_c11_options_of_a_library_that_is_not_installed(option, monkeypatch):
    monkeypatch.setattr(room, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=rf"{option}.*Transformer Engine, which is not installed"):
        pg.make_graphed_callables(*ONE, **{option: True})
    monkeypatch.setattr(room, "find_spec", lambda name: object())
    with pytest.raises(NotImplementedError, match=option):
        pg.make_graphed_callables(*ONE, **{option: True})
    net = nn.Linear(8, 8)
    assert pg.make_graphed_callables(net, (X,), **{option: False}) is net


def test_the_signature_begins_as_torchs_does():
    """As that of a later release: what an earlier one does not have yet comes last."""
    ours = list(inspect.signature(pg.make_graphed_callables).parameters.values())
    theirs = list(inspect.signature(torch.cuda.make_graphed_callables).parameters.values())
    assert [(p.name, p.default) for p in ours[: len(theirs)]] == [(p.name, p.default) for p in theirs]
    others = [p.name for p in ours[len(theirs) :] if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]
    assert others in ([], ["capture_error_mode", "enable_annotations"])


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_mode_of_capturing(device, mode):
    x = torch.ones(3, device=device)
    f = pg.make_graphed_callables(lambda x: x * 2, (x,), 1, False, None, mode)
    for n in range(3):
        assert_same(f(x + n), (x + n) * 2)
    assert counts(f) == (1, 1, 2)


def test_what_is_no_mode_and_annotations():
    with pytest.raises(ValueError, match="capture_error_mode must be one of global, thread_local, relaxed, not 'local'"):
        pg.make_graphed_callables(lambda x: x, (torch.ones(1),), capture_error_mode="local")
    with pytest.raises(TypeError, match="enable_annotations must be a bool"):
        pg.make_graphed_callables(lambda x: x, (torch.ones(1),), enable_annotations=1)
    with pytest.raises(NotImplementedError, match="does not annotate kernels"):
        pg.make_graphed_callables(lambda x: x, (torch.ones(1),), enable_annotations=True)
