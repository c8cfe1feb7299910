"""phonograph.testing finds what it says it finds: each helper is given something wrong, and must fail."""

import dataclasses
import enum
import functools
import math
import os
import random
import subprocess
import sys
from collections import OrderedDict, deque
from pathlib import Path

import pytest
import torch

import phonograph as pg
from phonograph.pytest_plugin import device_or_skip
from phonograph.testing import (
    Pair,
    SideBySide,
    assert_matches_live,
    assert_no_new_recordings,
    assert_recordings,
    assert_same,
    assert_same_aliasing,
    call,
    devices,
)


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Record:
    value: object


class Plain:
    def __init__(self, value):
        self.value = value


def linear(value):
    layer = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(layer.weight, value)
    torch.nn.init.zeros_(layer.bias)
    return layer


def with_grad(value):
    layer = linear(1.0)
    layer.weight.grad = None if value is None else torch.full((1, 1), value)
    return layer


def sgd(momentum_steps=0, **options):
    layer = linear(1.0)
    optimizer = torch.optim.SGD(layer.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})
    for _ in range(momentum_steps):
        layer(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    return optimizer


def nan(payload):
    return torch.tensor([0x7FC00000 + payload], dtype=torch.int32).view(torch.float32)


ONE = torch.tensor([1.0, 2.0])
DIFFERENT = {
    "values": (ONE, torch.tensor([1.0, 2.5])),
    "last bit": (ONE, torch.nextafter(ONE, ONE + 1)),
    "sign of zero": (torch.zeros(1), -torch.zeros(1)),
    "nan payload": (nan(1), nan(2)),
    "nan and number": (nan(0), torch.zeros(1)),
    "complex": (torch.tensor([1 + 1j]), torch.tensor([1 - 1j])),
    "bfloat16": (ONE.bfloat16(), (ONE * 1.01).bfloat16()),
    "dtype": (ONE, ONE.double()),
    "shape": (ONE, ONE[None]),
    "broadcastable shape": (torch.ones(2), torch.ones(1)),
    "stride": (torch.ones(2, 2), torch.ones(2, 2).t()),
    "requires_grad": (ONE, ONE.clone().requires_grad_()),
    "grad_fn": (ONE.clone().requires_grad_(), ONE.clone().requires_grad_() * 1),
    "class": (ONE, torch.nn.Parameter(ONE, requires_grad=False)),
    "layout": (torch.eye(2), torch.eye(2).to_sparse()),
    "sparse values": (torch.eye(2).to_sparse(), (torch.eye(2) * 2).to_sparse()),
    "device": (ONE, ONE.to("meta")),
    "int and bool": (1, True),
    "int and float": (1, 1.0),
    "float": (0.1, 0.2),
    "minus zero": (0.0, -0.0),
    "string": ("a", "b"),
    "none": (None, 0),
    "enum": (Colour.RED, Colour.BLUE),
    "dtype value": (torch.float32, torch.float64),
    "list and tuple": ([1], (1,)),
    "length": ([1], [1, 1]),
    "nested": ([{"a": (1, [ONE])}], [{"a": (1, [ONE + 1])}]),
    "keys": ({"a": 1}, {"b": 1}),
    "order of keys": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "dict and OrderedDict": ({"a": 1}, OrderedDict(a=1)),
    "set": ({1}, {2}),
    "deque": (deque([ONE]), deque([ONE + 1])),
    "dataclass": (Record(ONE), Record(ONE + 1)),
    "plain object": (Plain(ONE), Plain(ONE + 1)),
    "exception's text": (ValueError("a"), ValueError("b")),
    "exception's class": (ValueError("a"), TypeError("a")),
    "module's parameter": (linear(1.0), linear(2.0)),
    "module's gradient": (with_grad(1.0), with_grad(2.0)),
    "missing gradient": (with_grad(1.0), with_grad(None)),
    "module's buffer": (torch.nn.BatchNorm1d(1), torch.nn.BatchNorm1d(2)),
    "module's attribute": (torch.nn.Dropout(0.1), torch.nn.Dropout(0.2)),
    "training flag": (torch.nn.Dropout(0.1), torch.nn.Dropout(0.1).eval()),
    "optimizer's hyper-parameter": (sgd(lr=0.1), sgd(lr=0.2)),
    "optimizer's state": (sgd(1), sgd(2)),
    "generator": (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
}


@pytest.mark.parametrize(("actual", "expected"), DIFFERENT.values(), ids=DIFFERENT)
def test_assert_same_finds_the_difference(actual, expected):
    with pytest.raises(AssertionError, match="value"):
        assert_same(actual, expected)
    with pytest.raises(AssertionError):
        assert_same(expected, actual)


@pytest.mark.parametrize(("value", "_"), DIFFERENT.values(), ids=DIFFERENT)
def test_assert_same_accepts_a_value_and_itself(value, _):
    assert_same(value, value)


def test_assert_same_accepts_equal_nans():
    assert_same([nan(7), math.nan], [nan(7), math.nan])


def test_assert_same_names_the_place():
    with pytest.raises(AssertionError, match=r"result\['loss'\]\[1\]\.value: values differ"):
        assert_same({"loss": [1, Record(ONE)]}, {"loss": [1, Record(ONE + 1)]}, "result")


def test_assert_same_with_a_tolerance_looks_at_numbers_only():
    assert_same([ONE], [ONE + 1e-6], tolerance=1e-4)
    for other in (ONE + 1e-2, ONE.double(), ONE[None]):
        with pytest.raises(AssertionError):
            assert_same([ONE], [other], tolerance=1e-4)
    with pytest.raises(AssertionError):
        assert_same(torch.tensor([1000]), torch.tensor([1001]), tolerance=1.0)


def test_aliasing_tells_one_object_from_two_equal_ones():
    x = torch.ones(3)
    assert_same_aliasing([x, x], [ONE, ONE])
    with pytest.raises(AssertionError, match="are one object"):
        assert_same_aliasing([x, x], [x, x.clone()])


@pytest.mark.parametrize("other", [lambda x: x[1:], lambda x: x.detach(), lambda x: x[::2]])
def test_aliasing_tells_a_view_from_a_copy(other):
    x = torch.ones(4)
    assert_same_aliasing((x, other(x)), (x, other(x)))
    with pytest.raises(AssertionError, match="overlap in memory"):
        assert_same_aliasing((x, other(x)), (x, other(x).clone()))
    with pytest.raises(AssertionError, match="overlap in memory"):
        assert_same_aliasing((x[:2], x[2:]), (x[:3], x[2:]))


def test_aliasing_looks_into_modules_optimizers_and_dataclasses():
    layer = linear(1.0)
    with pytest.raises(AssertionError, match="one object"):
        assert_same_aliasing([layer, Record(layer.weight)], [layer, Record(layer.weight.clone())])


# Wrong engines: each is what a recorder with one fault would do.


def never(function, **options):
    return function


def with_phantom_run(function, **options):
    state = {"first": True}

    @functools.wraps(function)
    def run(*args):
        if state.pop("first", False):
            function(*args)
        return function(*args)

    return run


def with_one_output_buffer(function, **options):
    buffers = []

    def run(*args):
        result = function(*args)
        buffers.append(result)
        return buffers[0].copy_(result)

    return run


def with_stale_arguments(function, **options):
    first = []

    def run(*args):
        first.append(args)
        return function(*first[0])

    return run


def with_copies_of_arguments(function, **options):
    return lambda *args: function(*(a.clone() for a in args))


def without_advancing_the_generator(function, **options):
    def run(*args):
        state = torch.get_rng_state()
        result = function(*args)
        torch.set_rng_state(state)
        return result

    return run


def swallowing_exceptions(function, **options):
    def run(*args):
        try:
            return function(*args)
        except ValueError:
            return torch.zeros(2)

    return run


def counting():
    total = torch.zeros(2)
    return lambda x: total.add_(x).clone(), total


def raising():
    def f(x):
        raise ValueError("always")

    return f


def drawing_on_the_host():
    return lambda x: x + random.random()


WRONG = {
    "phantom run": (with_phantom_run, counting),
    "one output buffer": (with_one_output_buffer, lambda: lambda x: x * 2),
    "stale arguments": (with_stale_arguments, lambda: lambda x: x * 2),
    "mutation lost": (with_copies_of_arguments, lambda: lambda x: x.add_(1)),
    "result no longer the argument": (with_copies_of_arguments, lambda: lambda x: x),
    "generator": (without_advancing_the_generator, lambda: lambda x: x + torch.rand(2)),
    "swallowed exception": (swallowing_exceptions, raising),
}


@pytest.mark.parametrize(("record", "make"), WRONG.values(), ids=WRONG)
def test_assert_matches_live_fails_on_a_wrong_engine(record, make):
    calls = [(torch.full((2,), float(n)),) for n in range(1, 5)]
    with pytest.raises(AssertionError):
        assert_matches_live(make, calls, record=record)


@pytest.mark.parametrize("make", [*(m for _, m in WRONG.values()), drawing_on_the_host])
def test_assert_matches_live_accepts_the_function_itself(make):
    assert_matches_live(make, [(torch.full((2,), float(n)),) for n in range(4)], record=never)


def test_assert_matches_live_leaves_the_given_tensors_alone():
    x = torch.zeros(2)
    assert_matches_live(lambda: lambda x: x.add_(1), [(x,)] * 3, record=never)
    assert x.tolist() == [0.0, 0.0]


def test_assert_matches_live_takes_keywords_and_returns_the_pair():
    both = assert_matches_live(lambda: lambda x, by: x * by, [call(ONE, by=n) for n in range(3)], record=never)
    assert both.calls == 3
    assert [pair.live[1].item() for pair in both.held] == [0.0, 2.0, 4.0]


def test_side_by_side_finds_what_happens_to_a_held_result_only_if_it_is_held():
    for hold in (False, True):
        both = SideBySide(lambda: lambda x: x * 2, hold=hold, record=with_one_output_buffer)
        both(ONE)
        if hold:
            with pytest.raises(AssertionError, match="result 0, held"):
                both(ONE + 1)
        else:
            both(ONE + 1)


def test_side_by_side_passes_each_half_of_a_pair_to_its_side():
    both = SideBySide(lambda: lambda x: x * 2, record=never)
    x = Pair(ONE.clone(), ONE.clone())
    for _ in range(3):
        x = both(x)
    assert x.recorded.tolist() == x.live.tolist() == [8.0, 16.0]


def test_side_by_side_keeps_the_aliasing_of_arguments():
    seen = []
    both = SideBySide(lambda: lambda a, b: seen.append((a[0] is b, a[0].data_ptr() == b.data_ptr())), record=never)
    x = torch.ones(4)
    both([x], x)
    both([x], x[:2])
    assert seen == [(True, True)] * 2 + [(False, True)] * 2


def test_side_by_side_raises_what_both_sides_raised():
    both = SideBySide(raising, record=never)
    with pytest.raises(ValueError, match="always"):
        both(ONE)


def test_side_by_side_finds_a_change_of_state_on_one_side():
    both = SideBySide(counting, record=never)
    both(ONE)
    both.state.add_(1)
    with pytest.raises(AssertionError, match="state"):
        both.check()


def test_assert_no_new_recordings_fails_when_there_is_one():
    f = pg.record(lambda x: x * 2, warmup=1)
    f(ONE)
    with pytest.raises(AssertionError, match="1 new recordings of"), assert_no_new_recordings(f):
        f(ONE)
    with assert_no_new_recordings(f):
        f(ONE)


def test_assert_no_new_recordings_lets_the_blocks_own_exception_through():
    f = pg.record(lambda x: x * 2, warmup=1)
    with pytest.raises(KeyError), assert_no_new_recordings(f):
        raise KeyError("mine")


def test_assert_no_new_recordings_needs_a_function():
    with pytest.raises(TypeError, match="none"), assert_no_new_recordings():
        pass


def test_assert_recordings_counts():
    f = pg.record(lambda x: x * 2, warmup=1)
    assert_recordings(f, 0)
    for _ in range(3):
        f(ONE)
    assert_recordings(f, 1)
    with pytest.raises(AssertionError, match="1 recordings, not 2"):
        assert_recordings(f, 2)


def test_devices_begin_with_the_cpu():
    assert devices()[0] == torch.device("cpu")


FIXTURE_TEST = """
def test_it(both_devices):
    assert both_devices.type in ("cpu", "cuda")
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests what happens without CUDA")
@pytest.mark.parametrize(("required", "outcomes"), [("", {"passed": 1, "skipped": 1}), ("1", {"passed": 1, "errors": 1})])
def test_both_devices_skips_or_fails_without_cuda(pytester, monkeypatch, required, outcomes):
    monkeypatch.setenv("PHONOGRAPH_REQUIRE_CUDA", required)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(FIXTURE_TEST)
    pytester.runpytest_inprocess("-p", "phonograph.pytest_plugin").assert_outcomes(**outcomes)


@pytest.mark.parametrize(("name", "expected"), [("", "cpu"), ("cpu:0", "cpu:0"), ("cuda", "cpu")])
def test_both_devices_has_the_name_that_is_wanted(monkeypatch, name, expected):
    monkeypatch.setenv("PHONOGRAPH_TEST_DEVICE", name)
    assert device_or_skip("cpu") == torch.device(expected)


def test_recordings_of_a_backward_are_new_ones():
    net, x = pg.record(torch.nn.Linear(3, 3)), torch.ones(2, 3)
    for _ in range(4):
        net(x)

    def train():
        for _ in range(5):
            net(x).sum().backward()

    with pytest.raises(AssertionError, match="new recordings"), assert_no_new_recordings(net):
        train()


@pytest.mark.parametrize("wrong", [None, torch.zeros(3)], ids=["none", "another"])
def test_gradients_of_tensors_are_compared(wrong):
    one, other = ([torch.ones(3, requires_grad=True)] for _ in range(2))
    one[0].grad, other[0].grad = wrong, torch.ones(3)
    with pytest.raises(AssertionError, match=r"\.grad"):
        assert_same(one, other)


def test_the_plugin_imports_no_torch():
    """pytest loads it in every project of an environment that has phonograph in it."""
    look = "import sys, phonograph.pytest_plugin, phonograph; print('torch' in sys.modules, phonograph.__version__)"
    where = {**os.environ, "PYTHONPATH": str(Path(pg.__file__).parents[1])}
    said = subprocess.run([sys.executable, "-c", look], env=where, capture_output=True, text=True, check=True).stdout
    assert said == f"False {pg.__version__}\n"


def test_the_package_has_its_names_only():
    assert dir(pg) == pg.__all__
    assert {name for name in pg.__all__ if not hasattr(pg, name)} == set()
    with pytest.raises(AttributeError, match="module 'phonograph' has no attribute 'nothing'"):
        pg.nothing
