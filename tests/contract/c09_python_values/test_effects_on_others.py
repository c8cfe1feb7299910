"""C9: effects on what the function relies on."""

import functools
import threading
import types

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.guards import reachable as reach
from phonograph.testing import assert_same
from tests.contract.shared.noticing import globals_as_before, loader_of, set_in_a_copy  # noqa: F401
from tests.helpers import assert_replays, counts, may_run_live, ramp, side_by_side

FACTOR = 2.0


def set_factor(value=3.0):
    globals().update(FACTOR=value)


@may_run_live
@pytest.mark.parametrize("synchronizes", [False, True])
def test_c09_a_counter_on_a_decorated_function(device, synchronizes):
    @functools.wraps(torch.sin)
    def counting(x):
        counting.calls += 1
        return x.sum().item() if synchronizes else x * 2

    counting.calls = 0
    f = pg.record(lambda x: counting(x), warmup=1)
    for n in range(1, 6):
        f(ramp(device, 4))
        assert counting.calls == n


@may_run_live
def test_c09_a_counter_on_an_object_of_torchs(device):
    loader = loader_of([])
    loader.calls = 0
    f = pg.record(lambda x: (setattr(loader, "calls", loader.calls + 1), x * 2)[1], warmup=1)
    for n in range(1, 6):
        f(ramp(device, 4))
        assert loader.calls == n


@may_run_live
@pytest.mark.parametrize("kind", ["function", "closure"])
def test_c09_a_function_that_the_garbage_collector_does_not_show(device, monkeypatch, kind):
    """As after `gc.freeze`. What a function reads besides globals is then unknown."""
    monkeypatch.setattr(reach, "functions_with", lambda code: [])
    at = types.SimpleNamespace(scale=2.0)
    event, name = threading.Event(), "neddih"  # of which only those attributes are looked at that are named
    event.hidden = [(lambda x: x * FACTOR) if kind == "function" else (lambda x: x * at.scale)]
    f = pg.record(lambda x: getattr(event, name[::-1])[0](x), warmup=1)
    for n in range(9):
        if n == 4:
            set_factor()
            at.scale = 3.0
        assert_same(f(ramp(device, 4)), ramp(device, 4) * (3.0 if n >= 4 else 2.0))
    refused = "a closure that cannot be found" in pg.explain(f)
    assert refused == (kind == "closure")
    assert pg.stats(f).replayed == (0 if refused else 7)


@may_run_live
def test_c09_a_counter_on_a_class_with_a_metaclass(device):
    class Meta(type):
        def __call__(cls, *args):
            return super().__call__(*args)

    counted = Meta("Counted", (), {"calls": 0})
    f = pg.record(lambda x: (setattr(counted, "calls", counted.calls + 1), x * 2)[1], warmup=1)
    for n in range(1, 6):
        f(ramp(device, 4))
        assert counted.calls == n


@may_run_live
def test_c09_a_counter_on_a_parameter(device):
    weight = nn.Parameter(ramp(device, 4), requires_grad=False)
    weight.calls = 0
    f = pg.record(lambda x: (setattr(weight, "calls", weight.calls + 1), x * weight)[1], warmup=1)
    for n in range(1, 6):
        f(ramp(device, 4))
        assert weight.calls == n


@may_run_live
def test_c09_an_attribute_given_to_an_argument(device):
    f = pg.record(lambda x: (setattr(x, "tag", 5), x * 2)[1], warmup=1)
    for _ in range(5):
        x = ramp(device, 4)
        f(x)
        assert x.tag == 5


@may_run_live
def test_c09_an_argument_that_the_function_makes_require_grad(device):
    f = pg.record(lambda x: torch.autograd.grad((x.requires_grad_() ** 2).sum(), x)[0], warmup=1)
    for _ in range(5):
        x = ramp(device, 4)
        assert_same(f(x), 2 * ramp(device, 4))
        assert x.requires_grad


@may_run_live
def test_c09_an_object_of_a_class_without_a_module(device):
    """`exec` in a bare dictionary gives classes that say they are of `builtins`."""

    def make():
        space = {}
        exec("class Kept:\n    last = 0.5\n    def put(self, value): self.last = value", space)
        kept = space["Kept"]()
        return lambda x, value: (kept.put(value), x * value)[1], vars(kept)

    both = side_by_side(make)
    for value in [0.5, 0.5, 0.25, 0.25, 0.5, 0.25, 0.5]:
        both(ramp(device, 4), value)


@may_run_live
def test_c09_a_list_whose_append_the_function_holds(device):
    seen = []
    append = seen.append
    f = pg.record(lambda x: (append(1), x * 2)[1], warmup=1)
    for n in range(1, 6):
        f(ramp(device, 4))
        assert len(seen) == n


@may_run_live
def test_c09_an_array_that_counts(device):
    numpy = pytest.importorskip("numpy")
    counts_of = numpy.zeros(2)

    def f(x):
        counts_of[0] += 1
        return x * 2

    f = pg.record(f, warmup=1)
    for n in range(1, 6):
        f(ramp(device, 4))
        assert counts_of[0] == n


def test_c09_an_equal_list_in_a_new_object_is_no_change(device):
    def make():
        at = types.SimpleNamespace(scales=[2.0])
        return lambda x: x * at.scales[0], at

    both = side_by_side(make)
    for n in range(6):
        both.change(lambda at: set_in_a_copy(at, "scales", 0))
        both(ramp(device, 4, start=n))
    assert_replays(both, ramp(device, 4))


@may_run_live
@pytest.mark.parametrize("count", [2, 80])
def test_c08_tensors_are_compared_without_guards_too(device, count, monkeypatch):
    """A release of torch without them has only Python to do it."""
    monkeypatch.setattr("phonograph.guards.tensor_states.tensor_check", lambda tensors: None)
    torch.manual_seed(0)
    weights = nn.ParameterList([nn.Parameter(torch.randn(3, 3, device=device)) for _ in range(count)])
    f = pg.record(lambda x: sum(w @ x for w in weights), warmup=1)
    optimizer = torch.optim.SGD(weights, lr=0.1)
    step = pg.record(optimizer.step)
    for w in weights:
        w.grad = torch.randn(3, 3, device=device)
    with torch.no_grad():
        for n in range(12):
            if n == 5:
                weights[1].data = weights[1].data.t()
            if n == 8:
                weights[1].grad.t_()
            before = [w.detach() - 0.1 * w.grad for w in weights]
            x = torch.full((3, 3), 1.0 * n, device=device)
            assert_same(f(x), sum(w @ x for w in weights))
            step()
            torch.testing.assert_close([*weights], before)
    assert pg.stats(f).replayed > 6
    assert pg.stats(step).replayed > 6


@may_run_live
def test_c08_what_goes_around_the_methods_of_a_parameter_is_found_late(device):
    """Parameters take turns: after as many replays as it takes for all of them, a change has been found."""
    torch.manual_seed(0)
    weights = nn.ParameterList([nn.Parameter(torch.randn(2, device=device)) for _ in range(200)])
    f, x = pg.record(lambda x: sum(weights, x), warmup=1, audit=0), torch.ones(2, device=device)
    with torch.no_grad():
        for _ in range(4):
            assert_same(f(x), sum(weights, x))
        assert counts(f) == (1, 1, 3)
        torch._C.TensorBase.data.__set__(weights[150], torch.randn(2, device=device))
        for _ in range(16):  # four parts of them, one in four replays
            f(x)
        for _ in range(4):
            assert_same(f(x), sum(weights, x))


class Setting:
    scale = 1


@torch.library.custom_op("phonograph_tests::by_setting", mutates_args=())
def by_setting(x: torch.Tensor) -> torch.Tensor:
    return x * Setting.scale * (2 if torch.is_grad_enabled() else 3)


def in_no_grad(x):
    with torch.no_grad():
        return by_setting(x * 2)


def with_another_scale(x):
    Setting.scale = 5
    y = by_setting(x * 2)
    Setting.scale = 1
    return y


@may_run_live
@pytest.mark.parametrize("function", [in_no_grad, with_another_scale])
def test_c09_what_an_operator_of_the_users_own_asks_for(device, function):
    """Its code runs in each replay on the CPU, where it is called from."""
    recorded = pg.record(function)
    for n in range(5):
        x = ramp(device, 3, start=n)
        assert_same(recorded(x), function(x))


@pytest.mark.parametrize("operator", ["index", "of the user's own"])
def test_c09_attributes_that_nobody_reads_beside_an_operator_that_looks_at_them_all(device, operator):
    """Before some operators the CPU device looks whether anything is changed for a time: that is no code of the user's."""

    class Runner:
        def __init__(self):
            self.table = torch.arange(12.0, device=device).reshape(4, 3)
            self.steps = 0

        def step(self, i):
            return self.table[i] * 2 if operator == "index" else by_setting(self.table[:2] + i[:, None])

    runner = Runner()
    recorded = pg.record(runner.step)
    for n in range(12):
        runner.steps += 1
        i = torch.tensor([n % 4, 1], device=device)
        assert_same(recorded(i), runner.step(i))
    assert pg.stats(recorded).replayed == 11
