"""C12: a failed recording leaves nothing behind (`conftest.py` looks at the process after every test of the suite)."""

import contextlib
import gc
import random
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import assert_settles, counts, may_run_live, plain, ramp, side_by_side


class Switch:
    """A module-level like flag: off while warming up, on when the call is recorded."""

    def __init__(self, device):
        self.fail = False
        self.net = torch.nn.Linear(3, 3, device=device)
        self.count = torch.zeros((), device=device)


def fails_in_recording(action):
    """Makes a function whose second call, the one that would be recorded, does `action` half-way."""

    def make_on(device):
        def make():
            switch = Switch(device)

            def f(x):
                switch.count.add_(1)
                x.mul_(2)
                y = F.dropout(switch.net(x), 0.5)
                y.sum().backward()
                if switch.fail:
                    action(x)
                switch.count.add_(1)
                return y.detach() + x

            return f, [switch.net, switch.count, switch]

        return make

    return make_on


def raise_an_error(x):
    raise ValueError("half-way")


def raise_an_operators_error(x):
    return x @ torch.ones(7, 7, device=x.device)


FAILURES = {
    "sync": lambda x: x.sum().item(),
    "shape": lambda x: x.nonzero(),
    "exception": raise_an_error,
    "operator's exception": raise_an_operators_error,
}


@may_run_live
@pytest.mark.parametrize("fail_at", [1, 2, 4], ids=["in warm-up", "in recording", "in replay"])
@pytest.mark.parametrize("action", FAILURES.values(), ids=FAILURES)
def test_c12_failing_half_way_updates_everything_exactly_as_eager_does(device, action, fail_at):
    both = side_by_side(fails_in_recording(action)(device))
    for n in range(1, 9):
        both.change(lambda state, n=n: setattr(state[2], "fail", n == fail_at))
        both.outcome(torch.randn(2, 3, device=device))


@may_run_live
@pytest.mark.parametrize("action", FAILURES.values(), ids=FAILURES)
def test_c12_the_process_is_as_before(device, action):
    both = side_by_side(fails_in_recording(action)(device))
    both(torch.randn(2, 3, device=device))
    both.change(lambda state: setattr(state[2], "fail", True))
    gc.disable()
    profile = lambda *event: None  # noqa: E731
    sys.setprofile(profile)
    try:
        both.outcome(torch.randn(2, 3, device=device))
        assert not gc.isenabled()
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)
        gc.enable()
    assert torch.is_grad_enabled()
    if device.type == "cuda":
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        assert not torch.cuda.is_current_stream_capturing()


@may_run_live
@pytest.mark.parametrize("action", FAILURES.values(), ids=FAILURES)
def test_c12_the_next_functions_record(device, action):
    failing = side_by_side(fails_in_recording(action)(device))
    failing(torch.randn(2, 3, device=device))
    failing.change(lambda state: setattr(state[2], "fail", True))
    failing.outcome(torch.randn(2, 3, device=device))
    both = plain(lambda x: F.dropout(x, 0.5) * 2)
    for _ in range(7):
        both(torch.randn(2, 3, device=device))
    assert counts(both) == (1, 1, 6)


@may_run_live
def test_c12_an_exception_leaves_the_function_recordable(device):
    def make():
        switch = Switch(device)

        def f(x):
            if switch.fail:
                raise ValueError("not today")
            return x * 2

        return f, switch.__dict__

    both = side_by_side(make)
    for fail in [False, True, False]:
        both.change(lambda state, fail=fail: state.update(fail=fail))
        both.outcome(ramp(device, 3))
    assert_settles(both, ramp(device, 3))


@may_run_live
def test_c12_hooks_of_the_user_are_still_there(device):
    net = torch.nn.Linear(3, 3, device=device)
    calls = []
    net.weight.register_hook(lambda grad: calls.append("grad"))
    net.register_forward_hook(lambda *args: calls.append("forward"))
    flag = {"sync": False}

    def step(x):
        loss = net(x).sum()
        loss.backward()
        if flag["sync"]:
            loss.item()
        return loss.detach()

    f = pg.record(step, warmup=1)
    for n in range(1, 6):
        flag["sync"] = n == 2
        f(ramp(device, 2, 3))
        assert calls == ["forward", "grad"] * n
    net(ramp(device, 2, 3)).sum().backward()
    assert calls == ["forward", "grad"] * 6


@may_run_live
def test_c12_memory_of_failed_recordings_is_given_back(device):
    good = plain(lambda x: x * 2)
    for _ in range(3):
        good(torch.ones(10_000, device=device))
    before = pg.stats(good.recorded).pool_bytes
    for k in range(20):
        bad = pg.record(lambda x, k=k: torch.cat([x * i for i in range(50)]) * x.sum().item() * k, warmup=1)
        for _ in range(3):
            bad(torch.ones(10_000, device=device))
    # Each attempt needs 4 MB; CUDA's allocator hands out 20 MB at a time.
    assert pg.stats(good.recorded).pool_bytes <= before + 24_000_000


@may_run_live
def test_c12_what_a_refused_call_has_made_goes_without_the_collector(device):
    """Here an operator catches the refusal, and asks for the number in another way."""

    def call():
        bad = pg.record(lambda x: torch.cat([x * i for i in range(5)]) * x.sum().item() * 2, warmup=1)
        for _ in range(3):
            bad(torch.ones(10, device=device))

    call()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        call()
        gc.collect()
        assert [x.shape for x in gc.garbage if isinstance(x, torch.Tensor)] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@may_run_live
def test_c12_held_outputs_survive_a_failed_recording(device):
    good = plain(lambda x: x * 2, hold=True)
    for n in range(4):
        good(ramp(device, 50, start=n))
    bad = plain(lambda x: (x * 3 + torch.cat([x, x])[:50]) * x.sum().item())
    for n in range(4):
        bad(ramp(device, 50, start=n))
        good(ramp(device, 50, start=n))


def grad_mode():
    torch.set_grad_enabled(not torch.is_grad_enabled())


def deterministic():
    torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled())


def matmul_precision():
    torch.set_float32_matmul_precision("high" if torch.get_float32_matmul_precision() == "highest" else "highest")


EIGENVALUES = {
    "eigh": torch.linalg.eigh,
    "eigvalsh": torch.linalg.eigvalsh,
    "eig": lambda x: tuple(map(torch.abs, torch.linalg.eig(x))),
    "eigvals": lambda x: torch.linalg.eigvals(x).abs().sort().values,
    "pinv": lambda x: torch.linalg.pinv(x, hermitian=True),
    "matrix_rank": lambda x: torch.linalg.matrix_rank(x, hermitian=True),
    "svd": torch.linalg.svdvals,
    "lstsq": lambda x: torch.linalg.lstsq(x, x[..., :1]).solution,
    "qr": torch.linalg.qr,
    "inv": torch.linalg.inv,
}


@may_run_live
@pytest.mark.parametrize("size", [(5, 5), (3, 40, 40)], ids=str)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("function", EIGENVALUES.values(), ids=EIGENVALUES)
def test_c11_libraries_are_as_before(device, mode, function, size):
    """What waits for the GPU in a library's own code leaves a capture to that; the live calls after it go well."""
    recorded = pg.record(lambda x: function(x), warmup=1)
    with mode():
        for _ in range(4):
            x = torch.randn(size, device=device, dtype=torch.float64)
            x = x + x.mT + 20 * torch.eye(size[-1], device=device, dtype=torch.float64)
            assert_same(recorded(x), function(x), tolerance=1e-9)  # singular values: see docs/limits.md
            for other in EIGENVALUES.values():
                other(x)


DRAWS = {
    "the default generator": lambda x, own, host: torch.rand_like(x),
    "one of its own": lambda x, own, host: torch.rand(3, device=x.device, generator=own),
    "the CPU's": lambda x, own, host: torch.rand_like(x, device="cpu"),
    "one of its own on the CPU": lambda x, own, host: torch.rand(3, generator=host),
    "code of others": lambda x, own, host: torch.ops.of_a_test.jitter(x),
    "Python's": lambda x, own, host: x * random.random(),
    "NumPy's": lambda x, own, host: x * float(np.random.rand()),
}
REFUSALS = {
    **FAILURES,
    "prints": lambda x: sys.stderr.write(""),
    "reads a number": lambda x: x * float(x.sum()),
    "returns a new object": lambda x: object(),
    "seeds": lambda x: torch.manual_seed(3),
    "another device": lambda x: x.to("meta"),
}


@pytest.fixture
def jitter():
    """A custom operator that draws on the CPU, and has no tag that says so."""
    with torch.library._scoped_library("of_a_test", "DEF") as library:
        library.define("jitter(Tensor x) -> Tensor")
        library.impl("jitter", lambda x: x + torch.rand(x.shape).to(x.device), "CompositeExplicitAutograd")
        yield


@may_run_live
@pytest.mark.parametrize("refused", REFUSALS.values(), ids=REFUSALS)
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_c12_generators_stand_where_live_leaves_them(device, jitter, draw, refused):
    """However the attempt ends, and whoever has drawn before that (`SideBySide` compares those of the process)."""

    def make():
        own, host = torch.Generator(device).manual_seed(1), torch.Generator().manual_seed(2)

        def f(x, refused):
            y = draw(x, own, host)
            return y, refused(x) if refused is not None else y

        return f, [own, host]

    both = side_by_side(make)
    for action in (None, refused, refused, refused, None, refused):
        with contextlib.suppress(ValueError, RuntimeError):
            both(torch.ones(3, device=device), action)


def default_dtype():
    torch.set_default_dtype(torch.float64 if torch.get_default_dtype() is torch.float32 else torch.float32)


SETTINGS = (torch.is_grad_enabled, torch.are_deterministic_algorithms_enabled, torch.get_float32_matmul_precision,
            torch.get_default_dtype)  # fmt: skip


@may_run_live
@pytest.mark.parametrize("turn", [grad_mode, deterministic, matmul_precision, default_dtype])
def test_c12_a_setting_that_a_failed_capture_turns_is_turned_once(device, turn):
    """Each call turns it over; the capture that fails, and the live call after it, do so once in all."""

    def f(x):
        turn()
        return x * 2

    before = [get() for get in SETTINGS]
    recorded, seen = pg.record(f), []
    try:
        for n in range(8):
            recorded(ramp(device, 3))
            seen.append([get() for get in SETTINGS] == before)
            assert seen[-1] == bool(n % 2), seen
    finally:
        if not seen[-1]:
            turn()
