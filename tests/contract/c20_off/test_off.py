"""C20: switched off, and without CUDA."""

import threading
import time
import warnings

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import phonograph as pg
from phonograph.testing import assert_same
from tests import forked
from tests.contract.shared.living import run_python
from tests.helpers import counts, may_run_live, plain, ramp


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
