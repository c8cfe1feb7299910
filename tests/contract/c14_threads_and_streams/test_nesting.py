"""C14: nesting, threads, streams, modes."""

import _thread
import contextlib
import gc
import random
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.autograd import forward_ad

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import counts, may_run_live, plain, ramp, side_by_side

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
