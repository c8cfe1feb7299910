"""C9, C11: what the garbage collector calls is no part of the function that runs just then."""

import gc
import types

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.shared.noticing import globals_as_before  # noqa: F401
from tests.helpers import counts, may_run_live, ramp

_TIMING = """
import time
began = took = 0.0

def timing(phase, info):
    global began, took
    if phase == "start": began = time.perf_counter()
    else: took += time.perf_counter() - began
"""


def _collecting(x):
    gc.collect()
    return x * 2


def test_c09_a_package_that_counts_collections(device, package):
    """It has the collector call it: its values change from call to call, and have no part in the result."""
    exec(compile(_TIMING, package.__file__, "exec"), vars(package))
    f = pg.record(lambda x: _collecting(package.by_flag(x)), warmup=1)
    gc.callbacks.append(package.timing)
    try:
        for n in range(8):
            assert_same(f(ramp(device, 3) + n), (ramp(device, 3) + n) * 2)
            gc.collect()
    finally:
        gc.callbacks.remove(package.timing)
    assert counts(f) == (1, 1, 7)


def test_c11_effects_of_what_the_collector_calls(device, tmp_path):
    """They happen, all of them, and refuse nothing: callbacks of the user's own, and destructors of garbage from before."""
    log = open(tmp_path / "log", "w", buffering=1)  # noqa: SIM115 - closed below

    def told(phase, info):
        log.write(f"{phase}\n")

    class Noisy:
        def __init__(self, n):
            self.n, self.me = n, self

        def __del__(self):
            log.write("gone ")
            log.write(f"{self.n}\n")

    def f(x):
        return _collecting(x)

    gc.collect()
    recorded = pg.record(f, warmup=1)
    gc.callbacks.append(told)
    gc.disable()  # so that it is our call that finds it
    try:
        for n in range(4):
            Noisy(n)
            assert_same(recorded(ramp(device, 3) + n), (ramp(device, 3) + n) * 2)
    finally:
        gc.enable()
        gc.callbacks.remove(told)
        gc.collect()
        log.close()
    assert counts(recorded) == (1, 1, 3)
    lines = (tmp_path / "log").read_text().split("\n")
    assert lines[:6] == ["start", "gone 0", "stop", "start", "gone 1", "stop"]
    assert told not in gc.callbacks


@pytest.mark.parametrize("make", [lambda: iter([1.0, 2.0]), lambda: iter((1.0, 2.0)), lambda: iter(range(2))])
def test_c09_an_iterator_that_has_nothing_left(device, make):
    """As `torchrl.modules.MLP` has from when it was made."""
    it = make()
    assert len(list(zip(range(2), it, strict=True))) == 2
    f = pg.record(lambda x: x * next(it, 3.0), warmup=1)
    for n in range(5):
        assert_same(f(ramp(device, 3) + n), (ramp(device, 3) + n) * 3)
    assert counts(f) == (1, 1, 4)


def grows_first(values, it):
    def f(x):
        values[len(values) :] = [3.0]
        return x * next(it, -100.0)

    return f


def grows_for_a_time(values, it):
    def f(x):
        values[:] = [2.0]
        y = x * next(it, -100.0)
        values[:] = []
        return y

    return f


@may_run_live
@pytest.mark.parametrize("make", [grows_first, grows_for_a_time, lambda _, it: lambda x: x * next(it, -100.0)])
@pytest.mark.parametrize("warmup", [0, 1])
def test_c12_an_iterator_of_a_list_that_grows(device, make, warmup):
    """It has nothing left, and may get more."""
    lists = [], []
    recorded, live = (make(values, iter(values)) for values in lists)
    f = pg.record(recorded, warmup=warmup)
    for n in range(7):
        if n in (0, 3, 5):
            for values in lists:
                values.append(float(n))
        x = ramp(device, 3) + n
        assert_same(f(x), live(x))
    assert "uses an iterator" in pg.explain(f)


@pytest.mark.parametrize("every", [30, 45, 50])
def test_c08_what_changes_every_so_many_steps_is_recorded_anew(device, every):
    """As weights do for an evaluation. It never comes to be too often."""
    state = types.SimpleNamespace(scale="2")  # no number: that would be followed
    f = pg.record(lambda x: x * float(state.scale), warmup=1)
    x = ramp(device, 2)
    for n in range(14 * every):
        if n % every == 0:
            state.scale = str(int(state.scale) + 1)
        result = f(x)
    assert_same(result, x * float(state.scale))
    assert pg.stats(f).recorded == 14, pg.explain(f)
    assert pg.stats(f).replayed >= 14 * (every - 2)


class _Counting:
    def __init__(self, device):
        self.n, self.seen, self.table, self.weight = 0, None, {"n": 0}, nn.Parameter(torch.ones(3, device=device))

    def counts(self, x):
        self.n = object()
        return x * 2

    def keeps(self, x):
        y = x * 2
        self.seen = y.detach(), object()
        return y

    def replaces(self, x):
        self.weight.data = self.weight * 0.5
        return x * self.weight

    def enters(self, x):
        self.table["n"] = object()
        self.weight.data = self.weight.data
        return x * 2

    def twice(self, x):
        self.n = object()
        self.n = object()
        return x * 2


@may_run_live
@pytest.mark.parametrize(("method", "line"), [("counts", 1), ("keeps", 2), ("replaces", 1), ("enters", 1), ("twice", None)])
def test_c11_a_change_names_its_line(device, method, line):
    """If there is one only that sets what has changed."""
    function = getattr(_Counting(device), method)
    f = pg.record(function, warmup=1)
    for n in range(3):
        f(ramp(device, 3) + n)
    said = pg.explain(f)
    assert "which outlives the call" in said
    assert "write into a tensor that is there (copy_)" in said
    begin = function.__func__.__code__.co_firstlineno
    assert [n for n in range(1, 5) if f"{__file__}:{begin + n} " in said] == ([] if line is None else [line])
