"""C6, C15: pipelines of callables: as many recordings as there are forwards in flight."""

import itertools
import random

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.autograd import function as joint
from phonograph.devices import device_for
from phonograph.engine import recorder
from phonograph.memory.spans import Spans
from phonograph.testing import assert_same
from tests.contract.shared.callables import X, beside, counts, generator_states, grads, perceptron, state


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
