"""C9: what the function does to Python objects."""

import array
import ctypes
import functools
import threading
import types

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.shared.corners import WithSlot, globals_as_before  # noqa: F401
from tests.helpers import may_run_live, ramp, reasons, side_by_side


@may_run_live
@pytest.mark.parametrize("warmup", [0, 1])
def test_c09_what_is_done_once_after_a_change_is_done_once(device, warmup, capsys):
    weight, config = torch.ones(4, device=device), types.SimpleNamespace(on=False)

    @pg.record(warmup=warmup)
    def f(x):
        if config.on and not hasattr(weight, "ready"):
            weight.ready = True
            print("ready")
        return x * weight

    for n in range(9):
        config.on = n >= 4
        assert_same(f(ramp(device, 4)), ramp(device, 4))
    assert capsys.readouterr().out == "ready\n"


def test_c09_a_mode_that_is_switched_on_later_is_warmed_up(device):
    @functools.lru_cache
    def noise():
        return torch.rand(4, device=device)

    class Noisy(nn.Module):
        def forward(self, x):
            return x + noise() if self.training else x * 2

    net = Noisy().eval()
    f = pg.record(lambda x: net(x), warmup=1)
    for _ in range(3):
        f(ramp(device, 4))
    net.train()
    first = f(ramp(device, 4))
    for _ in range(4):
        assert_same(f(ramp(device, 4)), first)


@may_run_live
@pytest.mark.parametrize("maxsize", [None, 2])
def test_c09_a_cache_that_is_filled_while_a_call_is_recorded(device, maxsize):
    def make():
        @functools.lru_cache(maxsize=maxsize)
        def noise(n):
            return torch.rand(4, device=device)

        if maxsize is None:
            noise(0)
        return lambda x: x + noise(0) + noise(1)

    both = side_by_side(make, warmup=0)
    for _ in range(5):
        both(ramp(device, 4))


@may_run_live
@pytest.mark.parametrize("warmup", [0, 1])
def test_c09_a_counter_in_a_slot_that_was_empty(device, warmup):
    held = WithSlot()

    def f(x):
        held.n = held.n + 1 if hasattr(held, "n") else 1
        return x * held.n

    f = pg.record(f, warmup=warmup)
    for n in range(1, 6):
        assert_same(f(ramp(device, 4)), ramp(device, 4) * n)
    del held.n
    assert_same(f(ramp(device, 4)), ramp(device, 4))


@may_run_live
@pytest.mark.parametrize("where", ["global", "cell"])
def test_c09_a_counter_that_the_function_itself_brings_into_being(device, where):
    space = {}
    source = {
        "global": "def f(x):\n    global N\n    try:\n        N += 1\n    except NameError:\n        N = 1\n    return x * N\n",
        "cell": "def make():\n    def f(x):\n        nonlocal n\n        try:\n            n += 1\n        except NameError:\n"
        "            n = 1\n        return x * n\n    if False:\n        n = 0\n    return f\nf = make()\n",
    }
    exec(source[where], space)
    f = pg.record(space["f"], warmup=0)
    for n in range(1, 6):
        assert_same(f(ramp(device, 4)), ramp(device, 4) * n)


@may_run_live
def test_c09_a_counter_in_an_object_of_a_builtin_kind(device):
    local, numbers, number = threading.local(), array.array("l", [0]), ctypes.c_long(0)
    local.n = 0

    def f(x):
        local.n += 1
        numbers[0] += 1
        number.value += 1
        return x * 2

    f = pg.record(f, warmup=1)
    for n in range(1, 6):
        f(ramp(device, 4))
        assert (local.n, numbers[0], number.value) == (n, n, n)


@may_run_live
def test_c09_a_new_equal_list_is_watched_like_the_old_one(device):
    held = types.SimpleNamespace(events=[])

    def f(x):
        held.events = []
        return x * 2

    f = pg.record(f, warmup=1)
    for _ in range(4):
        f(ramp(device, 4))
    assert pg.stats(f).replayed in (0, 3), reasons(f)
    held.events.append("a")
    for _ in range(3):
        f(ramp(device, 4))
        assert held.events == []


class Counting(dict):
    def __iter__(self):
        counted.append(1)
        return iter(["a"])

    def __getattribute__(self, name):
        counted.append(name)
        return super().__getattribute__(name)


counted = []


def test_c09_looking_at_an_object_runs_none_of_its_code(device):
    class Row:
        __slots__ = ("kept",)

        def __init__(self, kept):
            self.kept = kept

        def __getattr__(self, name):
            return self.kept[name]

    row, odd = Row({"s": 2.0}), Counting(a=1.0, b=2.0)
    f = pg.record(lambda x, keep=odd: x * row.s, warmup=1)
    counted.clear()
    for _ in range(4):
        assert_same(f(ramp(device, 4)), ramp(device, 4) * 2)
    assert not counted
