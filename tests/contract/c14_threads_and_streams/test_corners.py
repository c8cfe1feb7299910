"""C11, C12, C14, C17: what merely lies in reach; others at work at the same time."""

import copy
import functools
import gc
import os
import pickle
import random
import signal
import sys
import threading
import time
import weakref

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.devices import device_for, lock
from phonograph.engine import figures
from phonograph.engine.making import Maker
from phonograph.engine.policy import Policy
from phonograph.engine.shelf import Shelf
from phonograph.testing import assert_same
from tests.contract.shared.corners import globals_as_before  # noqa: F401
from tests.forked import run
from tests.helpers import may_run_live, ramp, reasons


@may_run_live
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_c11_a_nested_tensor_as_an_argument(device, caplog):
    f = pg.record(lambda t: t * 2, warmup=1)
    for _ in range(3):
        parts = f(torch.nested.nested_tensor([torch.ones(2, 3, device=device), torch.ones(1, 3, device=device)])).unbind()
        assert [p.tolist() for p in parts] == [[[2.0] * 3] * 2, [[2.0] * 3]]
    assert "takes a nested tensor" in reasons(f)
    assert not [r for r in caplog.records if r.levelname == "ERROR"]


@pytest.mark.parametrize("kind", ["sparse", "lazy", "mkldnn"])
def test_c11_tensors_without_memory_in_reach(device, kind):
    if kind == "mkldnn" and device.type != "cpu":
        pytest.skip("mkldnn tensors are on the CPU")
    odd = {
        "sparse": lambda: torch.eye(3, device=device).to_sparse(),
        "lazy": lambda: nn.LazyLinear(4),
        "mkldnn": lambda: torch.ones(3).to_mkldnn(),
    }[kind]()
    f = pg.record(lambda x, odd=odd: x * 2, warmup=1)
    for n in range(4):
        assert_same(f(ramp(device, 3, start=n)), ramp(device, 3, start=n) * 2)
    assert pg.stats(f).replayed == 3, reasons(f)


@may_run_live
def test_c11_a_sparse_tensor_that_is_used(device):
    neighbours = torch.eye(3, device=device).to_sparse()
    f = pg.record(lambda x: neighbours @ x, warmup=1)
    for n in range(4):
        assert_same(f(ramp(device, 3, 3, start=n)), ramp(device, 3, 3, start=n))


# ---------------------------------------------------------------------------------------------------
# C14, C17: others at work at the same time


def test_c17_a_reset_in_the_middle_of_a_capture(device):
    big = torch.ones(50_000, device=device)
    other = pg.record(lambda a: a + 1, warmup=0)

    def f(a):
        y = a.sin()
        pg.reset(other)
        gc.collect()
        z = y.cos() + a
        return (z.exp() + y).sum(), z

    recorded = pg.record(f, warmup=0)
    for _ in range(4):
        other(big)
        other(big)
        assert_same(recorded(big), f(big))


def test_c17_a_reset_while_another_thread_warms_up(device):
    started, done = threading.Event(), threading.Event()
    other = pg.record(lambda a: a + 1, warmup=0)
    other(ramp(device, 3))

    def f(a):
        started.set()
        return a + (1.0 if done.wait(20) else 100.0)

    def resets():
        started.wait()
        pg.reset(other)
        done.set()

    thread = threading.Thread(target=resets)
    thread.start()
    assert_same(pg.record(f, warmup=1)(ramp(device, 3)), ramp(device, 3) + 1)
    thread.join()
    other(ramp(device, 3))
    assert pg.stats(other).recorded == 2


def test_c14_threads_that_draw_random_numbers_during_a_capture(device):
    drawn, stop = [], threading.Event()

    def draws():
        while not stop.is_set():
            drawn.append(random.random())
            time.sleep(0)

    thread = threading.Thread(target=draws, daemon=True)
    thread.start()
    try:
        f = pg.record(lambda a: functools.reduce(lambda a, _: a.sin(), range(100), a), warmup=0)
        for n in (2, 5, 3, 7, 4, 6):
            f(torch.ones(n, device=device))
    finally:
        stop.set()
        thread.join()
    assert len(set(drawn)) == len(drawn)
    assert pg.stats(f).recorded == 6, reasons(f)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers")
def test_c14_a_signal_handler_that_calls_a_recorded_function(device):
    def chain(a):
        for _ in range(200):
            a = a * 1.001 + 1
        return a

    one, two = torch.ones(500, device=device), torch.full((500,), 5.0, device=device)
    expected = chain(one)
    f = pg.record(chain, warmup=1, audit=2)
    for _ in range(3):
        f(one)
    going = [True]

    def handler(*_):
        f(two)
        if going:  # set again only now: on a machine that is slow, or busy, handlers would begin within each other without end
            signal.setitimer(signal.ITIMER_REAL, 0.007)

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    try:
        for _ in range(150):
            assert_same(f(one), expected)
    finally:
        going.clear()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers")
def test_c14_a_signal_in_a_dry_run_is_not_lost(device):
    """What its handler does is no part of the call, and is not undone; and the recording is not taken to be stale."""
    doubled = pg.record(lambda x: x * 2, keep="always")
    came, x = [], ramp(device, 4)

    def handler(*_):
        came.append(doubled(x).clone())

    def step(x):
        for _ in range(100):
            x = x * 1.001 + 1
        return x

    recorded, expected = pg.record(step, audit=1, keep="always"), step(x)
    before = signal.signal(signal.SIGALRM, handler)
    try:
        for n in range(60):
            signal.setitimer(signal.ITIMER_REAL, 0.0005 + 0.0001 * (n % 30))
            assert_same(recorded(x), expected)
            late = time.monotonic() + 5
            while len(came) <= n and time.monotonic() < late:
                time.sleep(0.001)
            assert len(came) == n + 1
    finally:
        signal.signal(signal.SIGALRM, before)
    assert_same(came, [x * 2] * 60)
    assert (pg.stats(recorded).recorded, pg.stats(recorded).live) == (1, 1), reasons(recorded)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_c14_a_fork_while_another_thread_is_busy(device):
    if device.type != "cpu":
        pytest.skip("CUDA does not survive a fork")
    f = pg.record(lambda a: a + 1, warmup=0)
    f(ramp(device, 3))
    busy, done = threading.Event(), threading.Event()

    def holds():
        with lock:
            busy.set()
            done.wait()

    thread = threading.Thread(target=holds)
    thread.start()
    busy.wait()
    child = os.fork()
    if not child:
        begin = time.monotonic()
        f(torch.ones(3))
        os._exit(0 if time.monotonic() - begin < 5 else 1)
    done.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


FORKED = """
import os, signal, sys, threading, torch
import phonograph as pg

begun = threading.Event()

class Told:
    def find_spec(self, name, path, target=None):
        if name == "phonograph.engine":
            begun.set()

sys.meta_path.insert(0, Told())
thread = threading.Thread(target=lambda: pg.record)
thread.start()
begun.wait()
child = os.fork()
if not child:
    signal.alarm(20)
    f = pg.record(lambda x: x * 2, keep="always")
    os._exit(any(f(torch.ones(3)).tolist() != [2.0] * 3 for _ in range(4)) or pg.stats(f).replayed != 3)
thread.join()
print(os.waitpid(child, 0)[1], pg.record(lambda x: x + 1)(torch.ones(2)).tolist())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_c14_a_fork_while_another_thread_looks_at_the_first_name():
    """That imports most of the package: the child has it, too."""
    found = run(FORKED, timeout=60)
    assert found.stdout == "0 [2.0, 2.0]\n", found.stderr


@pg.record
def decorated(a):
    return a + 1


def test_c16_a_decorated_function_is_pickled_by_its_name():
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    assert copy.deepcopy(decorated) is not None


def test_c15_held_results_keep_no_more_memory_than_they_need(device):
    if device.type != "cpu":
        pytest.skip("the arena is the CPU device's")
    arena = device_for(device)._arena
    big, small, kept, segments = torch.ones(4_000_000), torch.ones(50_000), [], []
    for _ in range(3):
        f, g = pg.record(lambda a: (a + 1) * 2, warmup=0), pg.record(lambda a: a + 1, warmup=0)
        f(big)
        kept.append(g(small))
        segments += [weakref.ref(s) for s in arena.segments]
        pg.reset(f)
        pg.reset(g)
        del f, g
        gc.collect()
    alive = {id(s): s.nbytes for ref in segments if (s := ref()) is not None}
    assert sum(alive.values()) < 2 * big.nbytes
    assert [t.sum().item() for t in kept] == [100_000.0] * 3


def test_c12_a_failure_of_our_own_is_said_and_the_call_runs_live(device, monkeypatch, caplog):
    def broken(*_, **__):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("phonograph.engine.making.record", broken)
    f = pg.record(lambda x: x * 2, warmup=0)
    with pytest.warns(pg.RunsLive, match="phonograph itself failed"):
        assert_same(f(ramp(device, 3)), ramp(device, 3) * 2)
    assert "a bug" in caplog.text
    caplog.clear()


@pytest.mark.parametrize(
    ("place", "name"), [(Shelf, "find"), (Policy, "next"), (Maker, "make_way"), (figures, "recorded"), (Maker, "learns")]
)
@pytest.mark.filterwarnings("ignore::phonograph.RunsLive")
def test_c12_a_failure_of_our_own_anywhere_before_a_replay(device, monkeypatch, caplog, place, name):
    real, left = getattr(place, name), []

    def broken(*given, **named):
        if left:
            raise left.pop()
        return real(*given, **named)

    monkeypatch.setattr(place, name, broken)
    x, refuses = ramp(device, 3), name == "learns"
    f = pg.record(lambda x: x * float(x.sum()) if refuses else x * 2, fallback="split" if refuses else "live", keep="always")
    for n in range(6):
        left += [ZeroDivisionError("a bug")] * (n == 1)
        assert_same(f(x), x * 6 if refuses else x * 2)
    assert "a bug" in caplog.text
    caplog.clear()


def test_c11_errors_name_what_was_given_wrongly(device, tmp_path):
    two = torch.ones(2, device=device) > 0
    with pytest.raises(RuntimeError, match=r"pg.cond: pred must be a tensor of one element, not of shape \(2,\)"):
        pg.cond(two, torch.sin, torch.cos, two)
    with pytest.raises(RuntimeError, match=r"pg.while_loop: the condition must be a tensor of one element"):
        pg.while_loop(lambda _: two, lambda x: (x,), (two,))
    with pytest.raises(TypeError, match="options must be an Options"):
        pg.Recorded(torch.sin, None)
    with pytest.raises(TypeError, match="carry takes attribute 'a' of the result, which is a Tensor"):
        pg.record(lambda x: x * 2, steps=2, carry={"x": "a"})(torch.ones(2, device=device))
    (tmp_path / "trace.json").write_text("no trace")
    with pytest.raises(ValueError, match=r"trace.json is no trace"):
        pg.report(tmp_path / "page.html", trace=tmp_path / "trace.json")


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # eager says so, too, in a thread that has just begun
def test_c14_a_step_that_two_threads_make_each_with_a_model_of_its_own(device):
    """While one thread runs live, another's capture or comparison takes what that changes for its own."""

    def trained(record):
        torch.manual_seed(0)
        nets = [nn.Linear(6, 3).to(device) for _ in range(2)]
        optimizers = [torch.optim.SGD(net.parameters(), 0.1, momentum=0.9) for net in nets]

        def step(i, x):
            optimizers[i].zero_grad()
            nets[i](x).square().mean().backward()
            optimizers[i].step()

        step = record(step)
        for n in range(14):
            x = ramp(device, 4, 6) * (n + 1)
            threads = [threading.Thread(target=step, args=(i, x)) for i in range(2)]
            [thread.start() for thread in threads]
            [thread.join() for thread in threads]
        return [p.detach().clone() for net in nets for p in net.parameters()], step

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        expected, _ = trained(lambda f: f)
        for _ in range(30):
            found, step = trained(pg.record)
            assert_same(found, expected)
        assert pg.stats(step).replayed, pg.explain(step)
    finally:
        sys.setswitchinterval(before)


def test_c14_a_call_waits_for_a_live_one_of_another_thread_only_so_long(device):
    """That may wait for this one."""
    entered, goes, went = threading.Event(), threading.Event(), []

    def step(x):
        if threading.current_thread() is not threading.main_thread():
            entered.set()
            went.append(goes.wait(60))
        return x * 2

    recorded, x = pg.record(step), ramp(device, 3)
    other = threading.Thread(target=recorded, args=(ramp(device, 4),))
    other.start()
    try:
        assert entered.wait(60)
        for _ in range(5):
            assert_same(recorded(x), x * 2)
    finally:
        goes.set()
        other.join()
    assert went == [True]
