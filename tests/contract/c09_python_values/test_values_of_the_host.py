"""C9: random numbers of the host, clocks, and effects on what outlives the call."""

import itertools
import random
import time
from collections import deque

import pytest
import torch
import torch.nn.functional as F

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.shared.recognising import Cell
from tests.helpers import may_run_live, plain, ramp, side_by_side

# Effects and hidden inputs: the function is right, whether it is replayed or not.


def draws_from_random(x):
    return x + random.random() + random.randint(0, 5)


def draws_from_numpy(x):
    import numpy

    return x + float(numpy.random.rand()) + int(numpy.random.randint(5))


def shuffles(x):
    order = [0, 1, 2]
    random.shuffle(order)
    return x[order]


@may_run_live
@pytest.mark.parametrize("draws", [draws_from_random, draws_from_numpy, shuffles])
def test_c09_host_random_numbers(device, draws):
    if draws is draws_from_numpy:
        pytest.importorskip("numpy").random.seed(0)
    both = plain(draws)
    results = [tuple(both(ramp(device, 3)).recorded.tolist()) for _ in range(8)]
    assert len(set(results)) > 2


@may_run_live
def test_c09_a_host_generator_object(device):
    def make():
        source = random.Random(3)
        return lambda x: x * source.random()

    both = side_by_side(make)
    results = {both(ramp(device, 3)).recorded[0].item() for _ in range(6)}
    assert len(results) == 6


@may_run_live
@pytest.mark.parametrize("clock", [time.time, time.perf_counter, time.monotonic, time.time_ns, time.perf_counter_ns])
def test_c09_a_clock(device, clock):
    f = pg.record(lambda x: (x + 1, clock()), warmup=1)
    readings = []
    for _ in range(6):
        time.sleep(0.002)
        readings.append(f(ramp(device, 3))[1])
    assert len(set(readings)) == 6
    assert readings == sorted(readings)


@may_run_live
def test_c09_a_clock_that_is_only_used_in_arithmetic(device):
    f = pg.record(lambda x: x.double() * 0 + time.perf_counter(), warmup=1)
    readings = []
    for _ in range(6):
        time.sleep(0.002)
        readings.append(f(ramp(device, 1)).item())
    assert len(set(readings)) == 6


@may_run_live
@pytest.mark.parametrize("write", ["print", "sys.stdout.write", "logging"])
def test_c09_output_is_written_in_each_call(device, capsys, caplog, write):
    import logging
    import sys

    def f(x):
        if write == "print":
            print("called with", tuple(x.shape))
        elif write == "logging":
            logging.getLogger("user").warning("called")
        else:
            sys.stdout.write("called\n")
        return x + 1

    recorded = pg.record(f, warmup=1)
    for n in range(6):
        assert_same(recorded(ramp(device, 3, start=n)), ramp(device, 3, start=n) + 1)
    said = capsys.readouterr().out.count("called") + sum(r.name == "user" for r in caplog.records)
    assert said == 6


class Counter:
    def __init__(self):
        self.n = 0
        self.log = []
        self.seen = set()
        self.cache = {}
        self.hidden = None
        self.queue = deque(maxlen=3)
        self.stream = itertools.count()


def counts_on_self(c, x):
    c.n += 1
    return x + 1


def computes_with_its_count(c, x):
    c.n += 1
    return x / (1 - 0.9**c.n)


def appends_a_number(c, x):
    c.log.append(len(c.log))
    return x * 2


def appends_a_result(c, x):
    y = x * 2
    c.log.append(y)
    return y


def appends_a_detached_result(c, x):
    y = x * 2
    c.log.append(y.detach())
    return y.sum()


def adds_to_a_set(c, x):
    c.seen.add(tuple(x.shape))
    return x * len(c.seen)


def counts_keys(c, x):
    c.cache[len(c.cache)] = 1
    return x + len(c.cache)


def memoizes(c, x):
    if tuple(x.shape) not in c.cache:
        c.cache[tuple(x.shape)] = torch.arange(len(x), device=x.device)
    return x + c.cache[tuple(x.shape)]


def keeps_a_hidden_state(c, x):
    c.hidden = x if c.hidden is None else torch.tanh(c.hidden + x)
    return c.hidden * 2


def keeps_its_last_result(c, x):
    c.hidden = x * 2
    return c.hidden + 1


def keeps_its_last_argument(c, x):
    previous, c.hidden = c.hidden, x
    return x if previous is None else x + previous


def fills_a_queue(c, x):
    c.queue.append(x + 1)
    return sum(c.queue)


def takes_from_an_iterator(c, x):
    return x + next(c.stream)


def creates_an_attribute(c, x):
    setattr(c, f"made_{len(vars(c))}", 1)
    return x + len(vars(c))


def swaps_attributes(c, x):
    c.n, c.other = getattr(c, "other", 5), c.n
    return x * c.n


def toggles(c, x):
    c.n = 1 - c.n
    return x + 1 if c.n else x * 2


def counts_at_the_end(c, x):
    y = x * (c.n + 1)
    c.n = c.n + 1
    return y


def mutates_a_tensor_and_counts(c, x):
    c.hidden = torch.zeros_like(x) if c.hidden is None else c.hidden
    c.hidden.add_(x)
    c.n += 1
    return c.hidden.clone()


EFFECTS = [
    counts_on_self, computes_with_its_count, appends_a_number, appends_a_result, appends_a_detached_result,
    adds_to_a_set, counts_keys, memoizes, keeps_a_hidden_state, keeps_its_last_result, keeps_its_last_argument,
    fills_a_queue, takes_from_an_iterator, creates_an_attribute, swaps_attributes, toggles, counts_at_the_end,
    mutates_a_tensor_and_counts,
]  # fmt: skip


@may_run_live
@pytest.mark.parametrize("as_module", [False, True], ids=["plain object", "module"])
@pytest.mark.parametrize("effect", EFFECTS)
def test_c09_effects_on_what_outlives_the_call(device, effect, as_module):
    def make():
        state = Counter()
        if as_module:
            module = torch.nn.Module()
            module.__dict__.update(vars(state))
            state = module
        stream, state.stream = state.stream, None  # compared by what it gives, not by itself
        if effect is takes_from_an_iterator:
            holder = Cell(stream=stream)
            return (lambda x: effect(holder, x)), state
        return (lambda x: effect(state, x)), state

    both = side_by_side(make, hold=True)
    for n in range(8):
        both(ramp(device, 3, start=n))


@may_run_live
def test_c09_a_counter_in_a_closure_or_a_global(device, monkeypatch):
    monkeypatch.setitem(globals(), "GLOBAL_COUNT", 0)

    def make():
        count = 0

        def f(x):
            global GLOBAL_COUNT
            nonlocal count
            count += 1
            GLOBAL_COUNT += 1
            return x * count + GLOBAL_COUNT

        return f

    f = pg.record(make(), warmup=1)
    for n in range(1, 8):
        assert f(torch.ones(2, device=device)).tolist() == [2.0 * n] * 2
    assert GLOBAL_COUNT == 7


GLOBAL_COUNT = 0


@may_run_live
def test_c09_a_counter_of_the_class(device):
    class Counted:
        count = 0

        def __call__(self, x):
            type(self).count += 1
            return x * type(self).count

    f = pg.record(Counted(), warmup=1)
    for n in range(1, 8):
        assert f(torch.ones(2, device=device)).tolist() == [float(n)] * 2
    assert Counted.count == 7


@may_run_live
def test_c09_an_attribute_of_the_function_itself(device):
    def f(x):
        f.calls += 1
        return x + 1

    f.calls = 0
    recorded = pg.record(f, warmup=1)
    for n in range(1, 7):
        recorded(ramp(device, 3))
        assert f.calls == n


@may_run_live
def test_c09_a_list_of_the_callers_that_only_a_helper_appends_to(device):
    seen = []

    def helper(x):
        seen.append(1)
        return x * 2

    f = pg.record(lambda x: helper(x) + 1, warmup=1)
    for n in range(1, 7):
        f(ramp(device, 3))
        assert len(seen) == n


@may_run_live
def test_c09_a_hook_with_an_effect(device):
    activations = []
    layer = torch.nn.Linear(3, 3, device=device).requires_grad_(False)
    layer.register_forward_hook(lambda module, inputs, output: activations.append(output))
    f = pg.record(lambda x: layer(x) * 2, warmup=1)
    inputs = [torch.randn(3, device=device) for _ in range(6)]
    for x in inputs:
        f(x)
    for x, seen in zip(inputs, activations, strict=True):
        assert_same(seen, F.linear(x, layer.weight, layer.bias))
