"""C14-C20: living with others. Threads, streams, nesting, memory, pickling, the end of things, bounds, being told."""

import _thread
import contextlib
import copy
import gc
import inspect
import logging
import os
import pathlib
import pickle
import random
import subprocess
import sys
import threading
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import phonograph as pg
from phonograph._torch.cuda import clear_cublas_workspaces
from phonograph.devices import device_for
from phonograph.memory.spans import Spans
from phonograph.testing import Pair, assert_no_new_recordings, assert_same
from tests import forked
from tests.helpers import assert_replays, assert_settles, counts, may_run_live, plain, ramp, reasons, side_by_side

# ---------------------------------------------------------------------------------------------------
# C14: nesting, threads, streams, modes


def test_c14_recorded_inside_recorded(device):
    def make():
        inner = pg.record(lambda x: x.sin() * 2, warmup=1)
        return lambda x: inner(inner(x) + 1)

    both = side_by_side(make, hold=True)
    for n in range(8):
        both(ramp(device, 4, start=n))


def test_c14_an_inner_function_is_also_used_by_itself(device):
    inner = pg.record(lambda x: x * 2, warmup=1)
    outer = pg.record(lambda x: inner(x) + inner(x + 1), warmup=1)
    held = []
    for n in range(10):
        x = ramp(device, 4, start=n)
        held.append((inner(x), x * 2))
        held.append((outer(x), x * 2 + (x + 1) * 2))
        for value, right in held:
            assert_same(value, right)


def test_c14_an_inner_recording_is_used_inside_a_later_outer_one(device):
    inner = pg.record(lambda x: x * 2, warmup=1)
    for n in range(4):
        inner(ramp(device, 4, start=n))
    both = plain(lambda x: inner(x) - 1)
    for n in range(7):
        both(ramp(device, 4, start=n))
    assert counts(both)[2] == 6


def test_c14_three_levels_with_state(device):
    def make():
        total = torch.zeros(3, device=device)
        lowest = pg.record(lambda x: total.add_(x), warmup=1)
        middle = pg.record(lambda x: lowest(x) * 2, warmup=2)
        return lambda x: middle(x) + lowest(x), total

    both = side_by_side(make)
    for n in range(8):
        both(ramp(device, 3, start=n))


def test_c14_recursion(device):
    @pg.record
    def power(x, n):
        return torch.ones_like(x) if n == 0 else x * power(x, n - 1)

    for _ in range(4):
        for n in range(5):
            x = ramp(device, 3)
            assert_same(power(x, n), x**n if n else torch.ones_like(x))


@may_run_live
def test_c14_mutual_recursion(device):
    def even(x, n):
        return x if n == 0 else recorded["odd"](x + 1, n - 1)

    def odd(x, n):
        return x * 100 if n == 0 else recorded["even"](x * 2, n - 1)

    def right(x, n):
        for i in range(n):
            x = x * 2 if i % 2 else x + 1
        return x * 100 if n % 2 else x

    recorded = {"even": pg.record(even, warmup=1), "odd": pg.record(odd, warmup=1)}
    for _ in range(4):
        for n in range(5):
            assert_same(recorded["even"](ramp(device, 3), n), right(ramp(device, 3), n))


def in_threads(count, work):
    """Runs work(i) in `count` threads that start together; raises what they raise."""
    barrier = threading.Barrier(count)

    def started_together(i):
        barrier.wait()
        return work(i)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(started_together, range(count)))


def test_c14_threads_call_one_function(device):
    f = pg.record(lambda x, s: (x * s).sin() + x, warmup=1)

    def work(i):
        held = []
        for n in range(25):
            x = ramp(device, 3 + i % 2, start=100 * i + n)
            held.append((f(x, float(i)), (x * float(i)).sin() + x))
        for value, right in held:
            assert_same(value, right)

    in_threads(4, work)


def test_c14_threads_call_different_functions_with_state(device):
    def work(i):
        def make():
            total = torch.zeros(3, device=device)
            return lambda x: total.add_(x) * (i + 1), total

        function, total = make()
        f = pg.record(function, warmup=1)
        for n in range(1, 20):
            result = f(torch.ones(3, device=device))
            assert result.tolist() == [float(n * (i + 1))] * 3
            assert total.tolist() == [float(n)] * 3

    in_threads(4, work)


def test_c14_a_thread_that_works_eagerly_meanwhile(device):
    """Its work belongs to no recording."""
    stop, wrong = threading.Event(), []

    def eager():
        total, n = torch.zeros(16, device=device), 0
        while not stop.is_set():
            n += 1
            total.add_(1)
            if total[0].item() != n:
                wrong.append(n)
                return

    thread = threading.Thread(target=eager)
    thread.start()
    try:
        for k in range(6):
            both = plain(lambda x, k=k: (x + k).cos() * x)
            for n in range(5):
                both(ramp(device, 8, start=n))
    finally:
        stop.set()
        thread.join()
    assert not wrong


def test_c14_a_function_recorded_in_a_thread_is_played_in_another(device):
    both = plain(lambda x: x.exp() - 1)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: [both(torch.randn(3, device=device)) for _ in range(3)]).result()
    for _ in range(4):
        both(torch.randn(3, device=device))


def test_c14_modes_are_those_of_the_thread(device):
    f = pg.record(lambda x: x @ x, warmup=1)
    x = torch.randn(3, 3, device=device)

    def work(i):
        x.clone()  # a thread whose first use of CUDA is a matrix product is warned by torch
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=i % 2 == 0):
            return {f(x).dtype for _ in range(10)}

    assert in_threads(4, work) == [{torch.bfloat16}, {torch.float32}] * 2


@may_run_live
def test_c14_a_live_part_runs_in_each_call(device):
    def make():
        ran = []

        @pg.live
        def scale_of(x):
            ran.append(1)
            return float(x.max())

        return lambda x: (x + 1) * scale_of(x) - 1, ran

    both = side_by_side(make, hold=True)
    for n in range(1, 8):
        both(ramp(device, 3, start=n))
        assert len(both.state) == n


@may_run_live
def test_c14_a_live_part_that_mutates_and_draws(device):
    def make():
        total = torch.zeros(3, device=device)

        @pg.live
        def notes(y):
            total.add_(y)
            return torch.rand_like(y) * random.random()

        return lambda x: notes(x * 2) + torch.rand_like(x), total

    both = side_by_side(make)
    for n in range(7):
        both(ramp(device, 3, start=n))


def test_c17_a_call_that_raises_keeps_nothing_alive(device):
    box = {"net": torch.nn.Linear(3, 3, device=device)}
    gone = weakref.ref(box["net"])

    @pg.record
    def f(x):
        box["net"](x).detach()
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011 - that one
        f(ramp(device, 2, 3))
    del box["net"]
    gc.collect()
    assert gone() is None


@may_run_live
def test_c14_forward_mode_derivatives_in_another_thread(device):
    """They belong to the process; a capture that fails leaves them to who has begun them."""

    def f(x):
        for _ in range(100):
            x = x * 1.0
        return x * float(x.sum())

    stop, found = [], []

    def other():
        while not stop:
            time.sleep(0.005)
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(torch.ones(3), torch.ones(3))
                time.sleep(0.005)
                found.append(forward_ad.unpack_dual(dual * dual).tangent.tolist())

    raised = []
    before, threading.excepthook = threading.excepthook, lambda args: raised.append(args.exc_value)
    thread = threading.Thread(target=other)
    thread.start()
    try:
        for _ in range(40):
            pg.record(f, warmup=0)(ramp(device, 3))
    finally:
        stop.append(1)
        thread.join()
        threading.excepthook = before
    assert not raised
    assert all(t == [2.0, 2.0, 2.0] for t in found)


def caught(calls, x):
    try:
        return calls(x)
    except Exception:
        return x * 0


def suppressed(calls, x):
    with contextlib.suppress(Exception):
        x = calls(x)
    return x * 2


def left_behind(calls, x):
    try:
        y = x * 3
        calls(x)
    finally:
        return y  # noqa: B012 - that is what is tested


@may_run_live
@pytest.mark.parametrize("catching", [caught, suppressed, left_behind])
def test_c14_a_live_part_in_code_that_catches_exceptions(device, catching):
    """What keeps it from being recorded is an exception, which is not that code's business."""

    def make():
        ran = []

        @pg.live
        def part(x):
            ran.append(1)
            return x * len(ran)

        return lambda x: catching(part, x), ran

    both = side_by_side(make)
    for n in range(6):
        both(ramp(device, 3, start=n))
    assert len(both.state) == 6


def test_c14_a_live_part_in_a_thread_of_another_make(device):
    """Python knows as little of it as of autograd's: what it runs is no part of a capture here."""

    @pg.live
    def part(n):
        return n + 1

    raised, ran, stop = [], [], []

    def foreign():
        while not stop:
            try:
                ran.append(part(1))
            except Exception as e:
                raised.append(e)
            time.sleep(0.0002)

    def function(x):
        for _ in range(100):
            x = x * 1.01
        return x

    recorded = pg.record(function)
    _thread.start_new_thread(foreign, ())
    for n in range(1, 6):
        for _ in range(3):
            recorded(ramp(device, n))
    stop.append(1)
    time.sleep(0.01)
    assert not raised
    assert ran
    assert pg.stats(recorded).recorded == 5


def test_c14_a_live_function_is_a_plain_function_elsewhere(device):
    @pg.live
    def doubled(x, *, times=2):
        "Doubles."
        return x * times

    assert doubled(ramp(device, 3)).tolist() == [2.0, 4.0, 6.0]
    assert doubled(ramp(device, 3), times=3).tolist() == [3.0, 6.0, 9.0]
    assert doubled.__doc__ == "Doubles."


@may_run_live
@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "functional_call"])
def test_c14_inside_a_functorch_transform(device, transform):
    weight = torch.nn.Linear(3, 3, device=device).requires_grad_(False)
    f = pg.record(lambda x: (weight(x) ** 2).sum(), warmup=1)
    plain_f = f.__wrapped__

    def apply(function, x):
        if transform == "vmap":
            return torch.vmap(function)(x)
        if transform == "grad":
            return torch.func.grad(function)(x)
        if transform == "jvp":
            return torch.func.jvp(function, (x,), (torch.ones_like(x),))
        return torch.func.functional_call(weight, {"weight": weight.weight * 2}, (x,))

    for n in range(5):
        f(ramp(device, 3, start=n))
        assert_same(apply(f, ramp(device, 2, 3, start=n)), apply(plain_f, ramp(device, 2, 3, start=n)))


@may_run_live
def test_c14_under_functional_call_the_given_weights_count(device):
    net = torch.nn.Linear(3, 3, device=device).requires_grad_(False)
    f = pg.record(lambda x: net(x), warmup=1)

    class Through(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return f(x)

    through = Through()
    for n in range(6):
        x, weight = ramp(device, 2, 3), ramp(device, 3, 3, start=n)
        f(x)
        given = torch.func.functional_call(through, {"net.weight": weight}, (x,))
        assert_same(given, torch.nn.functional.linear(x, weight, net.bias))


@may_run_live
def test_c14_meta_and_fake_tensors(device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    f = pg.record(lambda x: x @ x.mT, warmup=1)
    for _ in range(4):
        f(torch.ones(2, 3, device=device))
        assert f(torch.ones(2, 3, device="meta")).shape == (2, 2)
        with FakeTensorMode() as mode:
            assert f(mode.from_tensor(torch.ones(2, 3))).shape == (2, 2)


def test_c14_grad_mode_and_autocast_outside(device):
    layer = torch.nn.Linear(3, 3, device=device)
    both = plain(lambda x: layer(x))
    for _ in range(7):
        with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16):
            both(torch.randn(2, 3, device=device))
    assert counts(both) == (1, 1, 6)


def test_c14_on_a_side_stream(cuda):
    both = plain(lambda x: (x @ x).relu())
    stream = torch.cuda.Stream()
    for n in range(8):
        x = torch.randn(64, 64, device=cuda)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream if n % 3 else torch.cuda.current_stream()):
            result = both(x)
        torch.cuda.current_stream().wait_stream(stream)
        result.check()


def test_c14_played_on_two_streams_at_once(cuda):
    """A replay overwrites memory that the replay before it, on another stream, may still be reading."""
    f = pg.record(lambda x: torch.stack([x @ x for _ in range(20)]).sum(0), warmup=1)
    x = torch.randn(256, 256, device=cuda, dtype=torch.float64)
    for _ in range(3):
        f(x)
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = []
    for n in range(10):
        stream = streams[n % 2]
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            results.append(f(x * n).sum())
    torch.cuda.synchronize()
    for n, result in enumerate(results):
        torch.testing.assert_close(result, (x @ x).sum() * 20 * n * n)


def test_c14_a_loader_thread_that_pins_memory(cuda):
    stop = threading.Event()

    def load():
        while not stop.is_set():
            torch.ones(1000).pin_memory().to(cuda, non_blocking=True)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        for k in range(6):
            both = plain(lambda x, k=k: (x + k).cos() * x)
            for n in range(5):
                both(ramp(cuda, 8, start=n))
    finally:
        stop.set()
        thread.join()


# ---------------------------------------------------------------------------------------------------
# C15: one pool, and loops that settle


def test_c15_a_chain_is_right_and_settles(device):
    f, g, h = (plain(lambda x, k=k: x.sin() * k + x) for k in range(3))
    for n in range(6):
        h(g(f(ramp(device, 32, start=n))))
    with assert_no_new_recordings(f.recorded, g.recorded, h.recorded):
        for n in range(6):
            h(g(f(ramp(device, 32, start=n))))
    assert min(counts(b)[2] for b in (f, g, h)) >= 6


def test_c15_branches_of_the_trees_example(device):
    """1 → 2 → 4 and 1 → 3 → 4 of the CUDA graph trees documentation, in any order, with and without holding."""
    one, two, three, four = (plain(lambda x, k=k: (x * k).cos() + x) for k in (1, 2, 3, 4))
    functions = [b.recorded for b in (one, two, three, four)]

    def path(second, n):
        x = one(ramp(device, 64, start=n))
        y = second(x)
        del x
        return four(y)

    for n in range(8):
        path(two if n % 2 else three, n)
    with assert_no_new_recordings(*functions):
        for n in range(12):
            path(random.choice([two, three]), n)
    assert sum(pg.stats(f).recorded for f in functions) <= 8


def test_c15_branches_with_all_outputs_held(device):
    one, two, three, four = (plain(lambda x, k=k: (x * k).cos() + x, hold=True) for k in (1, 2, 3, 4))
    for n in range(8):
        x = one(ramp(device, 64, start=n))
        four((two if n % 3 else three)(x))
        for both in (one, two, three, four):
            both.check()


def test_c15_memory_is_that_of_the_worst_path_not_the_sum(device, monkeypatch):
    monkeypatch.setattr(device_for(device), "roomy", 0)  # as if memory were scarce: small recordings do not share it

    def heavy(k):
        return pg.record(lambda x: torch.cat([(x + i + k).sin() for i in range(16)]).sum(), warmup=1)

    x = torch.ones(4096, device=device)
    first = heavy(0)
    for _ in range(3):
        first(x)
    alone = pg.stats(first).pool_bytes
    functions = [heavy(k) for k in range(1, 9)]
    for f in functions:
        for _ in range(3):
            f(x)
    assert alone > 0
    assert pg.stats(first).pool_bytes <= 2 * alone


def test_c15_recordings_of_all_sizes_lie_in_one_pool(device, monkeypatch):
    """Whatever is held of their results: large ones and small ones, with gaps between."""
    monkeypatch.setattr(device_for(device), "roomy", 0)
    sizes = [40, 300, 700, 1000, 3000, 9000, 40_000, 150_000, 200_000, 260_000, 300_000, 700_000, 1_500_000, 6_000_000]
    draw = random.Random(1)

    def make(k, sizes):
        return pg.record(lambda x: [x[:n] + k for n in sizes], warmup=1)

    x = torch.ones(max(sizes), device=device)
    held = []
    for k in range(6):
        f = make(k, draw.sample(sizes, 9))
        for _ in range(3):
            results = f(x)
        held.append((k, results[::2]))
        held += [(k, results[3:4])]
        assert device_for(device).pool.footprints().nbytes <= device_for(device).pool_bytes
    for k, results in held:
        assert all(bool((t == 1 + k).all()) for t in results)


def test_c15_matrix_products_share_the_workspace_of_cublas(cuda, monkeypatch):
    """It is as large as many small recordings; and stays theirs, whoever clears torch's workspaces."""
    monkeypatch.setattr(device_for(cuda), "roomy", 0)
    functions = [plain(lambda x, k=k: (x * k) @ (x + k).T, hold=True) for k in range(1, 5)]
    for n in range(6):
        for both in functions:
            both(ramp(cuda, 16, 16384, start=n))
            clear_cublas_workspaces()
            junk = torch.full((1 << 26,), float("nan"), device=cuda)
            live = junk[: 1 << 20].view(16, -1) @ junk[: 1 << 20].view(16, -1).T
            del junk, live
        for both in functions:
            both.check()
    mine = [r for r in device_for(cuda).pool.recordings if "test_c15_matrix_products" in r.name]
    assert len(mine) >= 4
    assert all(r.footprint.nbytes < 8 << 20 for r in mine)


@pytest.mark.parametrize("keep", [lambda loss: loss, lambda loss: loss.detach(), lambda loss: loss[None]],
                         ids=["loss", "loss.detach()", "a view"])  # fmt: skip
def test_c15_appending_losses_keeps_their_values_and_settles(device, keep):
    w = torch.ones(4, device=device)
    f = pg.record(lambda x: (w.mul_(2) * x).sum(), warmup=1)
    right, losses = [], []
    for n in range(16):
        if n == 6:
            recordings = pg.stats(f).recorded
        losses.append(keep(f(torch.ones(4, device=device))))
        right.append(4 * 2.0 ** (n + 1))
        assert [loss.item() for loss in losses] == right
    assert pg.stats(f).recorded == recordings, pg.explain(f)
    assert pg.stats(f).replayed >= 8, pg.explain(f)


def test_c15_feeding_back_settles(device):
    both = plain(lambda x: x * 1.5)
    x = Pair.of(torch.ones(8, device=device))
    for _ in range(6):
        x = both(x)
    with assert_no_new_recordings(both.recorded):
        for _ in range(10):
            x = both(x)
    assert counts(both)[2] >= 10


def test_c15_two_functions_that_feed_each_other_settle(device):
    f, g = plain(lambda x: x + 1), plain(lambda x: x * 1.25)
    x = Pair.of(torch.ones(8, device=device))
    for _ in range(5):
        x = g(f(x))
    with assert_no_new_recordings(f.recorded, g.recorded):
        for _ in range(8):
            x = g(f(x))
    assert min(counts(f)[2], counts(g)[2]) >= 8


def test_c15_a_recurrent_loop_with_a_held_history_of_bounded_length(device):
    both = plain(lambda state, x: (state * 0.5 + x, state.sum()))
    state, history = Pair.of(torch.zeros(6, device=device)), []
    for n in range(30):
        if n == 12:
            recordings = pg.stats(both.recorded).recorded
        result = both(state, ramp(device, 6, start=n))
        state = result.each(lambda r: r[0])
        history.append(result.each(lambda r: r[1]))
        del result, history[:-3]
        for pair in history:
            pair.check()
    assert pg.stats(both.recorded).recorded == recordings, pg.explain(both.recorded)


def test_c15_state_that_lies_in_the_memory_of_another_function(device):
    """f's result becomes the closed-over tensor of g, then is dropped by everybody else."""
    f = pg.record(lambda x: x * 2, warmup=1)
    cell = {"w": None}
    g = pg.record(lambda x: x + cell["w"], warmup=1)
    for n in range(12):
        if n % 3 == 0:
            cell["w"] = f(torch.full((4,), float(n), device=device))
            right = 2.0 * n
        f(torch.full((4,), -1.0, device=device))
        assert g(torch.ones(4, device=device)).tolist() == [1.0 + right] * 4


def test_c15_functions_called_in_random_order_with_random_lifetimes(device):
    pool = [plain(lambda x, k=k: (x.flip(0) * (k + 1), x + k)) for k in range(4)]
    alive = [Pair.of(ramp(device, 6, start=n)) for n in range(3)]
    for n in range(80):
        result = pool[random.Random(n).randrange(4)](alive[random.Random(n + 1).randrange(len(alive))])
        alive.append(result.each(lambda r, n=n: r[n % 2]))
        del result
        if len(alive) > 5:
            alive.pop(random.Random(n + 2).randrange(len(alive)))
        for pair in alive:
            pair.check()


# ---------------------------------------------------------------------------------------------------
# C16: what wraps and what is wrapped stay what they were


def used_net(device):
    """A module with everything in it, used by a recorded function until it is replayed."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.0)).to(device)
    net.requires_grad_(False)
    before = list(net.state_dict())
    f = pg.record(lambda x: net(x), warmup=1)
    for _ in range(4):
        f(torch.randn(4, 3, device=device))
    assert pg.stats(f).replayed == 3
    return f, net, before


def test_c16_a_module_keeps_its_keys_class_and_attributes(device):
    _, net, before = used_net(device)
    fresh = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.0)).to(device)
    assert list(net.state_dict()) == before
    assert type(net) is torch.nn.Sequential
    assert vars(net).keys() == vars(fresh).keys()
    assert vars(net[0]).keys() == vars(fresh[0]).keys()
    assert [type(p) for p in net.parameters()] == [torch.nn.Parameter] * 4
    assert repr(net) == repr(fresh)


def pickled(net):
    return pickle.loads(pickle.dumps(net))


@pytest.mark.parametrize("copies", [copy.deepcopy, pickled])
def test_c16_a_copy_of_a_module_is_independent_of_it(device, copies):
    f, net, _ = used_net(device)
    copied = copies(net)
    x = torch.randn(4, 3, device=device)
    copied[0].weight.zero_()
    right = copy.deepcopy(net)(x)
    assert_same(f(x), right)
    g = pg.record(lambda x: copied(x), warmup=1)
    for _ in range(4):
        twin = copy.deepcopy(copied)
        assert_same(g(x), twin(x))


def test_c16_saving_and_loading(device, tmp_path):
    f, net, _ = used_net(device)
    torch.save(net.state_dict(), tmp_path / "net.pt")
    saved = {k: v.clone() for k, v in net.state_dict().items()}
    for _ in range(3):
        f(torch.randn(4, 3, device=device))
    loaded = torch.load(tmp_path / "net.pt")
    assert_same(dict(loaded), saved)
    net.load_state_dict(loaded)
    x = torch.randn(4, 3, device=device)
    right = copy.deepcopy(net)(x)
    assert_same(f(x), right)


def test_c16_a_recorded_function_looks_like_the_function(device):
    def documented(x: torch.Tensor, scale: float = 2.0, *, shift: int = 0) -> torch.Tensor:
        """What it does."""
        return x * scale + shift

    f = pg.record(documented)
    assert f.__name__ == "documented"
    assert f.__qualname__ == documented.__qualname__
    assert f.__doc__ == "What it does."
    assert f.__module__ == __name__
    assert f.__wrapped__ is documented
    assert inspect.signature(f) == inspect.signature(documented)
    assert callable(f)


def test_c16_a_method_decorated_in_the_class_body(device):
    class Model:
        def __init__(self, scale):
            self.scale = scale
            self.total = torch.zeros(3, device=device)

        @pg.record
        def step(self, x):
            self.total.add_(x)
            return x * self.scale

    one, other = Model(2.0), Model(3.0)
    for n in range(1, 7):
        assert one.step(torch.ones(3, device=device)).tolist() == [2.0] * 3
        assert other.step(torch.ones(3, device=device)).tolist() == [3.0] * 3
        assert one.total.tolist() == other.total.tolist() == [float(n)] * 3
    one.scale = 5.0
    assert one.step(torch.ones(3, device=device)).tolist() == [5.0] * 3
    assert other.step(torch.ones(3, device=device)).tolist() == [3.0] * 3


class Keeping:
    """Keeps its own recorded method under another name."""

    def __init__(self):
        self.scale = 2.0
        self.kept = self.step

    @pg.record
    def step(self, x):
        return x * self.scale


@pytest.mark.parametrize("copies", [copy.deepcopy, pickled])
def test_c16_a_copy_of_what_keeps_a_recorded_method(device, copies):
    x = ramp(device, 3)
    one = Keeping()
    for _ in range(3):
        one.kept(x)
    other = copies(one)
    one.scale, other.scale = 3.0, 5.0
    for _ in range(3):
        assert_same((one.kept(x), other.kept(x)), (x * 3, x * 5))
    assert other.kept is other.step
    assert pg.stats(other.kept).replayed


def test_c16_a_recorded_forward_of_a_module_class(device):
    class Net(torch.nn.Module):
        def __init__(self, k):
            super().__init__()
            self.linear = torch.nn.Linear(3, 3, device=device).requires_grad_(False)
            self.k = k

        @pg.record
        def forward(self, x):
            return self.linear(x) * self.k

    nets = [Net(1), Net(2)]
    for _ in range(5):
        for net in nets:
            x = torch.randn(2, 3, device=device)
            assert_same(net(x), torch.nn.functional.linear(x, net.linear.weight, net.linear.bias) * net.k)
    copied = copy.deepcopy(nets[1])
    copied.linear.weight.zero_()
    for _ in range(4):
        x = torch.randn(2, 3, device=device)
        assert_same(copied(x), copied.linear.bias.expand(2, 3) * 2 + torch.zeros(2, 3, device=device))


# ---------------------------------------------------------------------------------------------------
# C17: the end


def test_c17_reset_frees_everything_and_the_function_goes_on(device):
    gc.unfreeze()  # what tests before have left is in the pool as well
    gc.collect()
    there, x = device_for(device).pool_bytes, torch.ones(1 << 18, device=device)
    both = plain(lambda x: torch.cat([x * i for i in range(20)]).sum(0))
    assert_settles(both, x)
    assert pg.stats(both.recorded).pool_bytes > there
    pg.reset(both.recorded)
    gc.collect()
    assert pg.stats(both.recorded).pool_bytes <= there
    assert_settles(both, x)


def test_c17_held_outputs_survive_a_reset(device):
    both = plain(lambda x: x * 2, hold=True)
    for n in range(5):
        both(ramp(device, 10, start=n))
    pg.reset(both.recorded)
    gc.collect()
    noise = [torch.full((10,), float("nan"), device=device) for _ in range(20)]
    both.check()
    for n in range(5):
        both(ramp(device, 10, start=n))
    del noise


def test_c17_held_outputs_survive_their_function(device):
    f = pg.record(lambda x: (x * 2, x + 1), warmup=1)
    held = [f(ramp(device, 10, start=n)) for n in range(5)]
    del f
    gc.collect()
    noise = [torch.full((10,), float("nan"), device=device) for _ in range(20)]
    others = [plain(lambda x, k=k: x - k) for k in range(3)]
    for both in others:
        for n in range(3):
            both(ramp(device, 10, start=n))
    for n, result in enumerate(held):
        assert_same(result, (ramp(device, 10, start=n) * 2, ramp(device, 10, start=n) + 1))
    del noise


def test_c17_dropping_the_function_frees_what_it_used(device):
    class Big:
        def __init__(self):
            self.weight = torch.ones(1000, device=device)
            self.module = torch.nn.Linear(3, 3, device=device)

    def use():
        big = Big()
        f = pg.record(lambda x: (x * big.weight).sum() + big.module.weight.sum(), warmup=1)
        with torch.no_grad():
            for _ in range(4):
                f(torch.ones(1000, device=device))
        assert pg.stats(f).replayed == 3
        return [weakref.ref(t) for t in (big, big.weight, big.module, f)]

    references = use()
    gc.collect()
    assert [r() for r in references] == [None] * 4


def _garbage(device, kind):
    """Something recorded, that only the collector can free."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)).to(device)
    step = pg.record(model) if kind == "pair" else pg.record(lambda x: model(x).sum().backward())
    for n in range(5):
        made = step(ramp(device, 8, start=n).view(1, 8))
        if kind == "pair":
            made.sum().backward()
    assert pg.stats(step).replayed
    cycle = [step]
    cycle.append(cycle)
    return weakref.ref(step)


@pytest.mark.parametrize("kind", ["pair", "step"])
def test_c17_a_recording_that_goes_in_a_capture(device, kind):
    def collecting(x):
        y = x * 2
        gc.collect()
        return y + 1

    gone = _garbage(device, kind)
    assert gone() is not None
    f = pg.record(collecting, warmup=0)
    for n in range(4):
        assert_same(f(ramp(device, 8, start=n)), ramp(device, 8, start=n) * 2 + 1)
    assert gone() is None
    assert pg.stats(f).replayed == 4


@pytest.mark.parametrize("kind", ["pair", "step"])
@pytest.mark.parametrize("mode", ["thread_local", "global", "relaxed"])
def test_c17_a_recording_that_goes_in_a_capture_of_somebody_else(cuda, kind, mode):
    x = ramp(cuda, 8)
    assert_same(x * 2 + 1, x + x + 1)  # their kernels are loaded
    gone = _garbage(cuda, kind)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        y = x * 2
        assert gone() is not None
        gc.collect()
        z = y + 1
    assert gone() is None
    graph.replay()
    assert_same(z, x * 2 + 1)


def test_c17_instances_of_a_class_with_a_recorded_method_can_be_freed(device):
    class Model:
        def __init__(self):
            self.weight = torch.ones(3, device=device)

        @pg.record
        def step(self, x):
            return x * self.weight

    def use():
        model = Model()
        for _ in range(4):
            model.step(torch.ones(3, device=device))
        return weakref.ref(model)

    references = [use() for _ in range(3)]
    pg.reset(Model.step)
    gc.collect()
    assert [r() for r in references] == [None] * 3


def test_c17_arguments_and_results_are_not_kept_alive(device):
    f = pg.record(lambda x: x * 2, warmup=1)
    references = []
    for _ in range(5):
        x = torch.ones(50, device=device)
        y = f(x)
        references += [weakref.ref(x), weakref.ref(y)]
        del x, y
    gc.collect()
    assert [r() for r in references] == [None] * 10


def test_c17_reset_inside_of_a_loop(device):
    both = plain(lambda x: x.cos() * 3, hold=True)
    for n in range(15):
        both(ramp(device, 5, start=n))
        if n % 4 == 3:
            pg.reset(both.recorded)


EXIT = """
import sys, torch, phonograph as pg
device = sys.argv[1]
net = torch.nn.Linear(4, 4, device=device).requires_grad_(False)
@pg.record
def f(x):
    return torch.nn.functional.dropout(net(x)), x * 2
held = [f(torch.ones(2, 4, device=device)) for _ in range(6)]
assert pg.stats(f).replayed == 5, pg.explain(f)
class AtExit:
    def __del__(self):
        try:
            f(torch.ones(2, 4, device=device))
        except Exception:
            pass
keeper = AtExit()
print("done")
"""


def run_python(code, *arguments):
    source = str(pathlib.Path(pg.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)


def test_c17_the_interpreter_exits_cleanly(device):
    ended = run_python(EXIT, str(device))
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")


# ---------------------------------------------------------------------------------------------------
# C18: bounds


def test_c18_recordings_fit_in_the_memory_that_they_may_have(device, monkeypatch):
    """The least recently played goes first; one that alone is too large stays."""
    monkeypatch.setattr(device_for(device), "roomy", 1 << 40)  # each has memory of its own
    both = plain(lambda x: (x * 2 + 1).cos(), max_bytes=100_000, warmup=0)

    def shapes():
        return [p.recording.slots[0].tensor.shape[0] for p in both.recorded._shelf]

    for size in (1000, 2000, 1000, 3000, 4000):
        both(torch.ones(size, device=device))
    held = Spans(piece for p in both.recorded._shelf for piece in p.recording.footprint)
    assert shapes()[-2:] == [3000, 4000]
    assert held.nbytes <= 100_000
    for _ in range(2):
        both(torch.ones(100_000, device=device))
    assert shapes() == [100_000]


@may_run_live
def test_c18_ever_new_shapes_end_in_eager(device):
    both = plain(lambda x: x * 2, max_recordings=4)
    for size in range(1, 100):
        both(torch.ones(size, device=device))
        both(torch.ones(size, device=device))
        if size == 60:
            recordings = pg.stats(both.recorded).recorded
    assert pg.stats(both.recorded).recorded == recordings


@may_run_live
def test_c18_shapes_seen_once_are_never_recorded(device):
    both = plain(lambda x: x * 2)
    for size in range(1, 40):
        both(torch.ones(size, device=device))
    assert counts(both) == (39, 0, 0)


@may_run_live
def test_c18_memory_is_bounded_however_many_signatures_there_are(device):
    both = plain(lambda x, n: torch.cat([x, x * n]), max_recordings=4)
    sizes = []
    for n in range(60):
        for _ in range(3):
            both(torch.ones(100, device=device), n)
        sizes.append(pg.stats(both.recorded).pool_bytes)
    assert max(sizes) <= 2 * max(sizes[:10])


@may_run_live
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_c18_fewer_recordings_than_signatures(device, limit):
    both = plain(lambda x, n: x * n + n, max_recordings=limit, hold=True)
    for _ in range(5):
        for n in range(4):
            both(ramp(device, 4, start=n), n)


@may_run_live
def test_c18_the_recordings_in_use_stay(device):
    both = plain(lambda x, n: x * n, max_recordings=2)
    x = ramp(device, 3)
    assert_settles(both, x, 0)
    for n in range(1, 20):
        both(x, n)
        both(x, n)
        assert_replays(both, x, 0)


@may_run_live
def test_c18_a_value_that_is_new_in_each_call_ends_in_eager(device):
    def make():
        cell = {"t": 0}
        return lambda x: x + cell["t"], cell

    both = side_by_side(make, max_recordings=4)
    for n in range(100):
        both.change(lambda cell, n=n: cell.update(t=n))
        both(ramp(device, 3))
        if n == 60:
            recordings = pg.stats(both.recorded).recorded
            assert repr(both.recorded).endswith(": 0 recordings>")  # none was played again
    assert pg.stats(both.recorded).recorded == recordings + 2  # it was tried again, after 64 live calls, with two values


@may_run_live
def test_c18_what_was_played_again_stays_where_other_values_come_and_go(device):
    def make():
        cell = {"t": 0}
        return lambda x: x + cell["t"], cell

    both = side_by_side(make)
    x = ramp(device, 3)
    assert_settles(both, x)
    for n in range(1, 30):
        both.change(lambda cell, n=n: cell.update(t=n))
        both(x)
    assert any("changes from call to call" in reason for reason in pg.stats(both.recorded).refusals)
    both.change(lambda cell: cell.update(t=0))
    assert_replays(both, x)


# ---------------------------------------------------------------------------------------------------
# C19: being told


def test_c19_each_call_is_counted_as_live_or_replayed(device):
    f = pg.record(lambda x: x * 2, warmup=2)
    for n in range(1, 9):
        f(torch.ones(3, device=device))
        stats = pg.stats(f)
        assert stats.calls == n == stats.live + stats.replayed
    assert (stats.live, stats.recorded, stats.replayed) == (2, 1, 6)
    assert not stats.refusals


def test_c19_copied_bytes_are_counted(device):
    f = pg.record(lambda x, y: x + y, warmup=1)
    for _ in range(4):
        f(torch.ones(100, device=device), torch.ones(100, device=device))
    assert 0 <= pg.stats(f).bytes_copied <= 3 * 2 * 400


@may_run_live
def test_c19_refusals_are_counted_by_reason(device):
    f = pg.record(lambda x: x * x.sum().item(), warmup=1)
    for _ in range(5):
        f(ramp(device, 3))
    refusals = pg.stats(f).refusals
    assert sum(refusals.values()) == 4
    assert all(isinstance(reason, str) and reason for reason in refusals)


@may_run_live
def test_c19_explain_says_what_and_why(device):
    def named_function(x):
        return x * x.sum().item()

    f = pg.record(named_function, warmup=1)
    g = pg.record(lambda x: x * 2, warmup=1, name="my step")
    for _ in range(3):
        f(ramp(device, 3))
        g(ramp(device, 3))
    assert "named_function" in pg.explain(f)
    assert "item()" in reasons(f)
    assert "my step" in pg.explain(g)
    assert __file__ not in pg.explain(g)


@may_run_live
def test_c19_the_phonograph_logger_is_told(device, caplog):
    with caplog.at_level(logging.DEBUG, "phonograph"):
        f = pg.record(lambda x: x * x.sum().item(), warmup=1)
        g = pg.record(lambda x: x * 2, warmup=1)
        for _ in range(4):
            f(ramp(device, 3))
            g(ramp(device, 3))
    ours = [r.getMessage() for r in caplog.records if r.name.split(".")[0] == "phonograph"]
    assert sum("runs live" in message for message in ours) == 1
    assert any("runs live" not in message for message in ours), "the recording of g"


def test_c19_a_second_reason_of_one_function_is_warned_too(device):
    f = pg.record(lambda x, how: x * x.sum().item() if how else x.nonzero(), warmup=1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(4):
            f(ramp(device, 3), True)
            f(ramp(device, 3), False)
    assert len([w for w in said if issubclass(w.category, pg.RunsLive)]) == 2


def test_c19_statistics_survive_a_reset_of_the_recordings(device):
    f = pg.record(lambda x: x * 2, warmup=1)
    for _ in range(3):
        f(ramp(device, 3))
    calls = pg.stats(f).calls
    pg.reset(f)
    assert pg.stats(f).calls in (0, calls)
    f(ramp(device, 3))


@pytest.mark.parametrize("function", [pg.stats, pg.explain, pg.reset])
def test_c19_asking_about_what_is_not_recorded_is_a_type_error(function):
    with pytest.raises(TypeError, match="record"):
        function(lambda x: x)


@pytest.mark.parametrize(
    "options",
    [
        {"warmup": -1},
        {"fallback": "maybe"},
        {"outputs": "mine"},
        {"verify": -2},
        {"max_recordings": 0},
        {"unknown": 1},
        {"max_bytes": -1},
        {"max_bytes": 1.5},
    ],
    ids=str,
)
def test_c19_wrong_options_are_refused_at_once(options):
    with pytest.raises((TypeError, ValueError)):
        pg.record(lambda x: x, **options)


@pytest.mark.parametrize(
    "options",
    [{"name": 3}, {"name": b"x"}, {"takes_turns": True}, {"shapes": (1, 2)}, {"split_at": None}, {"split_at": "aten::sort"}],
    ids=str,
)
def test_c19_options_of_a_wrong_type_are_named(options):
    (name,) = options
    with pytest.raises(TypeError, match=name):
        pg.record(lambda x: x, fallback="split" if name == "split_at" else "live", **options)


# ---------------------------------------------------------------------------------------------------
# C20: off, and without CUDA


def test_c20_off_is_a_pass_through(device, monkeypatch):
    monkeypatch.setenv("PHONOGRAPH", "off")

    class Counted:
        runs = 0

        def __call__(self, x):
            Counted.runs += 1
            return x * 2

    f = pg.record(Counted(), warmup=1)
    for n in range(1, 7):
        assert f(torch.ones(3, device=device)).tolist() == [2.0] * 3
        assert Counted.runs == n


def test_c20_off_for_a_while(device, monkeypatch):
    both = plain(lambda x: x * 2, hold=True)
    for n in range(4):
        both(ramp(device, 3, start=n))
    monkeypatch.setenv("PHONOGRAPH", "off")
    before = counts(both)
    for n in range(4):
        both(ramp(device, 3, start=n))
    assert counts(both)[1:] == before[1:]
    monkeypatch.delenv("PHONOGRAPH")
    for n in range(4):
        both(ramp(device, 3, start=n))


def test_c20_off_refuses_nothing_and_warns_of_nothing(device, monkeypatch):
    monkeypatch.setenv("PHONOGRAPH", "off")
    f = pg.record(lambda x: x * x.sum().item(), warmup=1, fallback="error")
    for n in range(1, 5):
        x = ramp(device, 3, start=n)
        assert_same(f(x), x * x.sum().item())


def test_c20_without_cuda_the_cpu_device_records():
    ended = forked.run(
        "import torch, phonograph as pg\n"
        "f = pg.record(lambda x: x * 2)\n"
        "print([f(torch.full((2,), float(n))).tolist() for n in range(3)], pg.stats(f).replayed, "
        "torch.cuda.is_initialized())"
    )
    assert (ended.stdout, ended.stderr) == ("[[0.0, 0.0], [2.0, 2.0], [4.0, 4.0]] 2 False\n", "")


def test_c20_importing_is_quiet_and_touches_no_gpu():
    started = time.perf_counter()
    ended = run_python("import phonograph, torch; print(torch.cuda.is_initialized())")
    assert (ended.stdout, ended.stderr) == ("False\n", "")
    assert time.perf_counter() - started < 100


@may_run_live
def test_c14_a_dispatch_mode_that_comes_later_sees_every_operator(device):
    f = pg.record(lambda x: x * 2 + 1, warmup=1)
    for _ in range(5):
        f(torch.ones(3, device=device))

    class Counts(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Counts.seen += 1
            return func(*args, **(kwargs or {}))

    x = torch.ones(3, device=device)
    with Counts():
        f(x)
    assert Counts.seen == 2


def test_c14_another_thread_calls_a_live_function_during_a_recording(device):
    always = pg.live(lambda: threading.get_ident())
    seen = []

    def f(x):
        other = threading.Thread(target=lambda: seen.append(always()))
        other.start()
        other.join()
        return x * 2

    recorded = pg.record(f, warmup=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pg.RunsLive)
        for _ in range(4):
            assert recorded(torch.ones(3, device=device)).tolist() == [2.0] * 3
    assert len(seen) >= 2
