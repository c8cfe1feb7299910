"""C7, C9: arguments of all kinds."""

import dataclasses
from typing import ClassVar, NamedTuple

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn

import phonograph as pg
from phonograph.testing import Pair, assert_same
from tests.contract.shared.noticing import globals_as_before  # noqa: F401
from tests.helpers import counts, may_run_live, plain, ramp, side_by_side

FACTOR = 2.0


def set_factor(value=3.0):
    globals().update(FACTOR=value)


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    of_class: ClassVar[float] = 2.0

    def __post_init__(self):
        self.extra = 2.0

    def scaled(self):
        return self.x * FACTOR


class Named(NamedTuple):
    x: torch.Tensor

    def scaled(self):
        return self.x * FACTOR


@may_run_live
@pytest.mark.parametrize("kind", [Batch, Named])
def test_c09_a_global_read_by_a_method_of_an_argument(device, kind):
    f = pg.record(lambda batch: batch.scaled(), warmup=1)
    for factor in [2.0, 2.0, 2.0, 3.0, 3.0, 3.0]:
        set_factor(factor)
        assert_same(f(kind(ramp(device, 4))), ramp(device, 4) * factor)


def test_c07_a_dataclass_argument_is_replayed(device):
    f = pg.record(lambda batch: batch.x * 2, warmup=1)
    for n in range(4):
        assert_same(f(Batch(ramp(device, 4, start=n))), ramp(device, 4, start=n) * 2)
    assert counts(f) == (1, 1, 3)


@may_run_live
def test_c07_an_attribute_of_a_dataclass_argument_that_is_no_field(device):
    f = pg.record(lambda batch: batch.x * batch.extra, warmup=1)
    for extra in [2.0, 2.0, 2.0, 3.0, 3.0, 2.0]:
        batch = Batch(ramp(device, 4))
        batch.extra = extra
        assert_same(f(batch), ramp(device, 4) * extra)


@may_run_live
def test_c09_an_attribute_of_an_arguments_class(device, monkeypatch):
    f = pg.record(lambda batch: batch.x * batch.of_class, warmup=1)
    for of_class in [2.0, 2.0, 2.0, 3.0, 3.0, 3.0]:
        monkeypatch.setattr(Batch, "of_class", of_class)
        assert_same(f(Batch(ramp(device, 4))), ramp(device, 4) * of_class)


@may_run_live
def test_c07_the_types_of_a_dictionarys_keys(device):
    both = plain(lambda table: [key * value for key, value in table.items()])
    for key in [2, 2, 2, 2.0, 2.0, 2]:
        both({key: torch.tensor([1, 2], device=device)})
    for key in [1, 1, 1, True, True, 1]:
        both({key: torch.tensor([1, 2], device=device)})


def test_c07_the_signs_of_the_zeros_of_a_complex_number(device):
    both = plain(lambda x, c: x + torch.full((1,), c, device=device).angle())
    for c in [complex(-1, 0.0)] * 3 + [complex(-1, -0.0)] * 2 + [complex(-1, 0.0)]:
        both(torch.zeros(1, device=device), c)


@may_run_live
@pytest.mark.parametrize("first", [True, False])
def test_c07_whether_the_argument_is_a_tensor_that_the_function_knows(device, first):
    w, other = ramp(device, 4), ramp(device, 4)
    f = pg.record(lambda x: x * (2 if x is w else 3), warmup=1)
    for x in [w if first else other] * 4 + [other if first else w] * 3 * (not first):
        assert_same(f(x), ramp(device, 4) * (2 if x is w else 3))


@may_run_live
@pytest.mark.parametrize("first", [True, False], ids=["one tensor first", "two tensors first"])
def test_c07_whether_two_arguments_are_one_tensor(device, first):
    f = pg.record(lambda a, b: a * (2 if a is b else 3), warmup=1)
    for same in [first] * 4 + [not first] * 4 + [first, not first]:
        x = ramp(device, 4)
        assert_same(f(x, x if same else ramp(device, 4)), ramp(device, 4) * (2 if same else 3))


@may_run_live
@pytest.mark.parametrize("training", [False, True])
def test_c07_attention_to_itself(device, training):
    """Whether query, key and value are one tensor decides which way the attention takes."""

    def make():
        attention = nn.MultiheadAttention(8, 2, batch_first=True, device=device).train(training)
        return lambda q, k, v: attention(q, k, v, need_weights=False)[0].detach(), attention

    both = side_by_side(make, tolerance=1e-5)
    for n in range(8):
        x = Pair.of(torch.randn(2, 3, 8, device=device))
        both(x, x, x if n < 5 else Pair.of(torch.randn(2, 3, 8, device=device)))


@may_run_live
def test_c07_whether_an_argument_has_a_gradient(device):
    f = pg.record(lambda x: x.detach() * (2 if x.grad is None else 3), warmup=1)
    for has in [False] * 4 + [True] * 4 + [False, True]:
        x = ramp(device, 4).requires_grad_()
        x.grad = torch.ones(4, device=device) if has else None
        assert_same(f(x), ramp(device, 4) * (3 if has else 2))


@may_run_live
def test_c07_a_hook_of_an_argument(device):
    f = pg.record(lambda x: torch.autograd.grad((x**2).sum(), x)[0], warmup=1)
    for factor in [1, 1, 1, 10, 10, 7]:
        x = ramp(device, 4).requires_grad_()
        x.register_hook(lambda grad: grad * factor)
        assert_same(f(x), 2 * ramp(device, 4) * factor)


@may_run_live
def test_c07_an_earlier_result_that_requires_grad_now(device):
    f = pg.record(lambda x: x + 1, warmup=1)
    g = pg.record(lambda y: y.detach() * (2 if y.requires_grad else 3), warmup=1)
    for requires in [True] * 4 + [False] * 4 + [True, False]:
        y = f(ramp(device, 4)).requires_grad_(requires)
        assert_same(g(y), (ramp(device, 4) + 1) * (2 if requires else 3))


@may_run_live
@pytest.mark.parametrize("warm", [0, 3], ids=["from the first call on", "after plain calls"])
def test_c07_a_dual_tensor_of_forward_mode(device, warm):
    f = pg.record(lambda x: x * x, warmup=1)
    for _ in range(warm):
        f(torch.ones(2, device=device))
    for n in range(4):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(torch.full((2,), float(n), device=device), torch.ones(2, device=device))
            assert forward_ad.unpack_dual(f(dual)).tangent.tolist() == [2.0 * n] * 2


def test_c07_the_bound_method_of_a_dictionary(device):
    f = pg.record(lambda x, get: x * get("scale"), warmup=1)
    one, other = {"scale": 2.0}, {"scale": 5.0}
    for table in [one, one, one, other, one, other]:
        assert_same(f(ramp(device, 4), table.get), ramp(device, 4) * table["scale"])
    one["scale"] = 7.0
    assert_same(f(ramp(device, 4), one.get), ramp(device, 4) * 7)


def scaling_function(factor):
    return torch.no_grad()(lambda x: x * factor)


def transformed_function(factor):
    return torch.vmap(lambda x: x * factor)


@may_run_live
@pytest.mark.parametrize("make", [scaling_function, transformed_function])
def test_c07_a_new_function_in_each_call_that_looks_like_the_last(device, make):
    """The last one is gone by then, and the new one may lie where it lay."""
    f = pg.record(lambda x, function: function(x), warmup=1)
    for factor in [2.0, 2.0, 2.0, 5.0, 6.0, 7.0, 8.0]:
        assert_same(f(ramp(device, 4), make(factor)), ramp(device, 4) * factor)


@may_run_live
def test_c07_a_new_class_in_each_call(device):
    f = pg.record(lambda x, kind: x * kind.scale, warmup=1)
    for factor in [2.0, 2.0, 2.0, 5.0, 6.0, 7.0, 8.0]:
        assert_same(f(ramp(device, 4), type("Scale", (), {"scale": factor})), ramp(device, 4) * factor)


FACTS = {
    "where in its storage it begins": (lambda x: x.storage_offset(), lambda x: x[4:8]),
    "the size of its storage": (lambda x: x.untyped_storage().nbytes(), lambda x: x[:4]),
    "whether it is a view": (lambda x: 2 if x._base is None else 3, lambda x: x[:4]),
    "whether other processes see it": (lambda x: 2 if x.is_shared() else 3, lambda x: x[:4].clone().share_memory_()),
    "how often it was written": (lambda x: x._version, lambda x: x[:4].clone().add_(0)),
}


@may_run_live
@pytest.mark.parametrize("fact", FACTS)
def test_c07_what_else_an_argument_can_be_asked(device, fact):
    ask, other = FACTS[fact]
    f = pg.record(lambda x: x * ask(x), warmup=1)
    for special in [False, False, False, True, True, False]:
        x = ramp(device, 4) if not special else other(ramp(device, 8))
        assert_same(f(x), x * ask(x))


@may_run_live
def test_c07_bytes_of_an_arguments_storage_that_the_argument_does_not_show(device):
    both = plain(lambda x: torch.as_strided(x, (2,), (1,), 0) * 1)
    for n in range(4):
        base = Pair.of(ramp(device, 16, start=n))
        both(base.each(lambda b: b[4:8]))


@may_run_live
def test_c07_numbers_read_from_an_arguments_storage():
    f = pg.record(lambda x: x * x.untyped_storage()[0], warmup=1)
    for n in range(5):
        assert f(torch.tensor([n, 1], dtype=torch.uint8)).tolist() == [n * n, n]


@dataclasses.dataclass
class TrainState:
    """As functional programs carry it from step to step."""

    step: int
    average: torch.Tensor
    best: float = 9.0


def test_c09_a_count_is_followed_in_a_dataclass_of_which_each_step_makes_another(device):
    def step(state, x):
        average = 0.9 * state.average + 0.1 * x / (state.step + 1)
        return dataclasses.replace(state, step=state.step + 1, average=average)

    recorded = pg.record(step)
    ours = theirs = TrainState(0, torch.zeros(3, device=device))
    for n in range(12):
        x = ramp(device, 3) + n
        ours, theirs = recorded(ours, x), step(theirs, x)
        assert_same(ours, theirs)
    assert pg.stats(recorded).recorded == 1, pg.explain(recorded)
    assert pg.stats(recorded).replayed >= 8
