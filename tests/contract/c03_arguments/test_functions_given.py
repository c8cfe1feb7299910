"""C3, C7, C9: functions, methods and classes as arguments; what remains refused."""

import enum
import functools
import threading
import types

import pytest
import torch
import torch.nn.functional as F

import phonograph as pg
from phonograph.testing import Pair, assert_same
from tests.contract.shared.objects import Batch
from tests.helpers import assert_settles, counts, may_run_live, plain, ramp, reasons


class Losses:
    def __init__(self, weight):
        self.weight = weight

    def mse(self, a, b):
        return F.mse_loss(a, b) * self.weight

    @staticmethod
    def l1(a, b):
        return F.l1_loss(a, b)

    @classmethod
    def huber(cls, a, b):
        return F.huber_loss(a, b)

    def __call__(self, a, b):
        return F.smooth_l1_loss(a, b) + self.weight


def _factor(k):
    return lambda a, b: (a - b).sum() * k


FUNCTIONS = {
    "function of torch's": lambda d: F.mse_loss,
    "builtin": lambda d: torch.dist,
    "method of a tensor's class": lambda d: torch.Tensor.dist,
    "bound method": lambda d: Losses(2.0).mse,
    "static method": lambda d: Losses.l1,
    "class method": lambda d: Losses.huber,
    "object that is called": lambda d: Losses(torch.ones((), device=d)),
    "partial": lambda d: functools.partial(F.smooth_l1_loss, beta=2.0),
    "partial of a tensor": lambda d: functools.partial(torch.addcmul, ramp(d, 3)),
    "module": lambda d: torch.nn.MSELoss(),
    "method of a module": lambda d: torch.nn.MSELoss(reduction="sum").forward,
    "closure": lambda d: _factor(3.0),
    "class": lambda d: torch.nn.L1Loss,
}


@pytest.mark.parametrize("make", FUNCTIONS.values(), ids=list(FUNCTIONS))
def test_c07_a_function_as_an_argument(device, make):
    def f(x, y, loss):
        return loss()(x, y) if isinstance(loss, type) else loss(x * 2, y)

    function = make(device)
    recorded = pg.record(f)
    for n in range(6):
        x, y = ramp(device, 3) + n, ramp(device, 3).flip(0)
        assert_same(recorded(x, y, function), f(x, y, function))
    assert counts(recorded)[2] >= 4, pg.explain(recorded)
    for _ in range(4):
        assert_same(recorded(x, y, loss=F.l1_loss), f(x, y, F.l1_loss))
        assert_same(recorded(x, y, function), f(x, y, function))


def test_c09_what_a_functions_argument_reads_is_noticed(device):
    losses = Losses(2.0)
    recorded = pg.record(lambda x, y, loss: loss(x, y))
    for n in range(9):
        losses.weight = float(n // 3)
        x, y = ramp(device, 3) + n, ramp(device, 3)
        assert_same(recorded(x, y, losses.mse), losses.mse(x, y))
    assert counts(recorded)[2] >= 2


class Kind(enum.Enum):
    A = 1
    B = 2


KEYS = {
    "module": lambda d: torch.nn.Linear(2, 2),
    "parameter": lambda d: torch.nn.Parameter(ramp(d, 3)),
    "enum": lambda d: Kind.A,
    "tuple": lambda d: ("layer", 3, Kind.B),
    "device": lambda d: torch.device(d),
    "dtype": lambda d: torch.float16,
    "function": lambda d: F.relu,
    "class": lambda d: Batch,
}


@pytest.mark.parametrize("make", KEYS.values(), ids=list(KEYS))
def test_c07_dictionaries_with_keys_of_any_kind(device, make):
    key, other = make(device), ("other", make(device))
    f = lambda table: {k: v * 2 for k, v in table.items()}  # noqa: E731
    recorded = pg.record(f)
    for n in range(5):
        table = {key: ramp(device, 3) + n}
        assert_same(next(iter(recorded(table).values())), f(table)[key])
        assert [*recorded(table)] == [key]
    assert counts(recorded)[2] >= 8, pg.explain(recorded)
    assert [*recorded({other: ramp(device, 3)})] == [other]


# ---------------------------------------------------------------------------------------------------
# What remains refused


class Locked:
    def __init__(self, x):
        self.x = x
        self.lock = threading.Lock()


@may_run_live
def test_c11_an_object_that_cannot_be_described_is_named(device):
    recorded = pg.record(lambda batch: batch.x * 2)
    kept = Locked(ramp(device, 3))
    for _ in range(4):
        assert_same(recorded(kept), kept.x * 2)
    assert counts(recorded)[2] == 3  # it came again
    for n in range(6):
        b = Locked(ramp(device, 3) + n)
        assert_same(recorded(b), b.x * 2)
    assert "takes an object of class _thread.lock as `batch.lock`" in reasons(recorded)


@may_run_live
def test_c09_an_object_that_is_kept_is_an_effect(device):
    kept = []

    def f(b):
        kept.append(b)
        return b.x * 2

    recorded = pg.record(f)
    batches = [Batch(ramp(device, 3) + n, 2) for n in range(5)]
    for b in batches:
        assert_same(recorded(b), b.x * 2)
    assert [*map(id, kept)] == [*map(id, batches)]


def test_c16_settling_is_not_disturbed_by_objects_without_tensors(device):
    both = plain(lambda config, x: x * config.scale)
    config = Pair.of(types.SimpleNamespace(scale=2.0, name="run"))
    assert_settles(both, config, ramp(device, 3))


def test_c10_results_that_are_objects_are_verified(device):
    recorded = pg.record(lambda b: types.SimpleNamespace(y=b.x * 2, n=b.n), verify=1)
    for n in range(5):
        x = ramp(device, 3) + n
        assert_same(recorded(Batch(x, 2)), types.SimpleNamespace(y=x * 2, n=2))
    assert counts(recorded)[2] == 4, pg.explain(recorded)
