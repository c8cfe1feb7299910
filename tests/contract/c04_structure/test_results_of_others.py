"""C4: results that are, or belong to, something else."""

import dataclasses

import pytest
import torch

import phonograph as pg
from phonograph.testing import Pair, assert_same
from tests.contract.shared.memory import filled
from tests.helpers import may_run_live, plain, ramp


@pytest.mark.parametrize(
    ("view", "window"),
    [
        (lambda x: torch.view_as_real(torch.view_as_complex(x.view(-1, 2))), slice(8, 16)),
        (lambda x: x.view(torch.uint8), slice(8, 12)),
        (lambda x: x.view(torch.float64), slice(8, 12)),
        (lambda x: x.detach(), slice(8, 12)),
        (lambda x: x[1:].unfold(0, 2, 1), slice(8, 12)),
    ],
    ids=["complex", "bytes", "double", "detached", "unfolded"],
)
def test_c04_a_view_of_a_part_of_a_larger_tensor(device, view, window):
    both = plain(view)
    for n in range(5):
        base = Pair.of(ramp(device, 32, start=n))
        result = both(base.each(lambda b: b[window]))
        base.each(lambda b: b.mul_(2))
        result.check()


def test_c04_a_complex_argument_as_real(device):
    both = plain(lambda x: torch.view_as_real(x))
    for _ in range(5):
        base = Pair.of(torch.randn(32, dtype=torch.complex64, device=device))
        both(base.each(lambda b: b[8:16]))


@may_run_live
def test_c04_detached_results_need_no_grad(device):
    f = pg.record(lambda x: (x.detach(), (x * 2).detach()), warmup=1)
    for n in range(5):
        x = ramp(device, 3, start=n).requires_grad_()
        assert_same(f(x), (x.detach(), (x * 2).detach()))


def two_views(x):
    y = x * 2
    return y, y[0]


def test_c04_two_results_that_share_memory_are_views_to_autograd(device):
    f = pg.record(two_views, warmup=1)
    for _ in range(5):
        w = torch.tensor(3.0, device=device, requires_grad=True)
        y, first = f(torch.ones(2, 2, device=device))
        first.mul_(w)
        y.sum().backward()
        assert w.grad.item() == 4


def test_c04_two_results_that_share_memory_have_one_version(device):
    f = pg.record(two_views, warmup=1)
    for _ in range(5):
        w = torch.ones(2, 2, device=device, requires_grad=True)
        y, first = f(torch.ones(2, 2, device=device))
        loss = (y * w).sum()
        first.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_c04_one_result_in_three_places(device):
    def f(x):
        y = x * 2
        return y, y, [y.view(-1), y]

    f = pg.record(f, warmup=1)
    for n in range(5):
        a, b, (c, d) = f(torch.ones(2, device=device))
        a.add_(n)
        assert a is b is d
        assert c.tolist() == [2.0 + n] * 2


@dataclasses.dataclass
class Outcome:
    y: torch.Tensor

    def __post_init__(self):
        self.norm = self.y.abs().sum()


@may_run_live
@pytest.mark.parametrize("kept", [False, True])
def test_c04_a_dataclass_result_with_an_attribute_that_is_no_field(device, kept):
    f = pg.record(lambda x: Outcome(x * 2), warmup=1)
    results = []
    for n in range(6):
        results = [*results, f(filled(device, n))] if kept else [f(filled(device, n))]
        for result in results:
            assert result.norm.item() == 4 * result.y[0].item()
        assert results[-1].norm.item() == 8 * n


@may_run_live
def test_c04_each_call_makes_a_new_set(device):
    f = pg.record(lambda x: (x * 2, {1, 2}), warmup=1)
    for n in range(5):
        found = f(ramp(device, 2))[1]
        assert found == {1, 2}
        found.add(10 + n)


def a_closure(x):
    y = x * 2
    return lambda: y + 1


def a_pullback(x):
    pull = torch.func.vjp(lambda t: t * t, x)[1]
    return lambda: pull(torch.ones_like(x))[0] + 1


@may_run_live
@pytest.mark.parametrize("function", [a_closure, a_pullback])
def test_c04_a_function_as_the_result(device, function):
    f = pg.record(function, warmup=1)
    results = [f(filled(device, n)) for n in range(6)]
    assert [result()[0].item() for result in results] == [2.0 * n + 1 for n in range(6)]
