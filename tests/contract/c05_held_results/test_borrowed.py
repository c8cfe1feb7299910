"""C5: borrowed results; and what autograd notices of results and arguments that are written."""

import contextlib
import gc
import warnings

import pytest
import torch

import phonograph as pg
from phonograph.testing import assert_matches_live, assert_same, call
from tests.helpers import counts, may_run_live, ramp


def read_by_arithmetic(y):
    return y + 1


def read_by_listing(y):
    return y.tolist()


def read_by_printing(y):
    return repr(y)


def read_by_item(y):
    return y[0].item()


def read_by_clone(y):
    return y.clone()


def read_by_torch_function(y):
    return torch.stack([y, y])


BORROWED_READS = [
    read_by_arithmetic, read_by_listing, read_by_printing, read_by_item, read_by_clone, read_by_torch_function,
]  # fmt: skip


@pytest.mark.parametrize("read", BORROWED_READS)
def test_c05_a_borrowed_output_raises_once_it_was_overwritten(device, read):
    f = pg.record(lambda x: x * 2, warmup=1, outputs="borrow")
    for n in range(3):
        f(torch.full((3,), float(n), device=device))
    borrowed = f(torch.full((3,), 7.0, device=device))
    f(torch.full((3,), 8.0, device=device))
    with pytest.raises(pg.StaleOutput):
        read(borrowed)


def test_c05_a_borrowed_output_is_right_until_the_next_call(device):
    f = pg.record(lambda x: (x * 2, x + 1), warmup=1, outputs="borrow")
    for n in range(7):
        x = ramp(device, 3, start=n)
        for result, right in zip(f(x), (x * 2, x + 1), strict=True):
            assert result.tolist() == right.tolist()
            assert_same((result + 0).as_subclass(torch.Tensor), right)
    assert counts(f) == (1, 1, 6)


@pytest.mark.parametrize(
    "alias", [lambda y: y[1:], lambda y: y.detach(), lambda y: y.view(3, 1)], ids=["slice", "detach", "view"]
)
def test_c05_a_view_of_a_borrowed_output_raises_too(device, alias):
    f = pg.record(lambda x: x * 2, warmup=1, outputs="borrow")
    for n in range(3):
        f(torch.full((3,), float(n), device=device))
    borrowed = alias(f(torch.full((3,), 7.0, device=device)))
    f(torch.full((3,), 8.0, device=device))
    with pytest.raises(pg.StaleOutput):
        borrowed.tolist()


def test_c05_a_borrowed_output_that_was_cloned_in_time(device):
    f = pg.record(lambda x: x * 2, warmup=1, outputs="borrow")
    clones = [f(torch.full((3,), float(n), device=device)).clone() for n in range(6)]
    assert [c[0].item() for c in clones] == [2.0 * n for n in range(6)]


def test_c05_a_borrowed_output_fed_back(device):
    f = pg.record(lambda x: x * 2, warmup=1, outputs="borrow")
    x = torch.ones(3, device=device)
    for _ in range(6):
        x = f(x)
    assert x.tolist() == [64.0] * 3


def test_c05_a_call_that_follows_many_dropped_ones_by_the_helper_for_users(device):
    calls = [call(ramp(device, 4, start=n), scale=2.0) for n in range(5)]
    both = assert_matches_live(lambda: lambda x, scale: x * scale, calls, hold=False)
    gc.collect()
    assert counts(both) == (1, 1, 4)


def test_c03_a_refused_call_writes_two_arguments_that_share_memory_exactly_once(device):
    """Both arguments are an earlier result, and each is written: what the failed capture did must be taken back."""
    make = pg.record(lambda x: x * 2, warmup=1)
    write = pg.record(lambda a, b: (a.add_(1), b[:1].zero_())[0], warmup=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pg.RunsLive)
        for _ in range(4):
            y = make(ramp(device, 4))
            assert_same(write(y, y.view(4)), torch.tensor([0.0, 5.0, 7.0, 9.0], device=device))


@pytest.mark.parametrize("parameter", [False, True], ids=["an earlier result", "a parameter"])
def test_c03_autograd_notices_an_argument_that_a_replay_writes_in_place(device, parameter):
    make = pg.record(lambda x: x * 2, warmup=1)
    write = pg.record(torch.no_grad()(lambda a: a.add_(1).sum()), warmup=1)
    kept = torch.nn.Parameter(ramp(device, 4))
    for _ in range(5):
        a = kept if parameter else make(ramp(device, 4))
        w = torch.ones(4, device=device, requires_grad=True)
        product = (w * a).sum()
        write(a)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


def test_c10_verify_from_the_first_replay_on_with_a_gradient_that_is_made_anew(device):
    weight = torch.ones(4, device=device, requires_grad=True)

    def step(x):
        (weight * x).sum().backward()
        return x + 1

    f = pg.record(step, warmup=1, verify=1)
    for n in range(5):
        weight.grad = None
        f(ramp(device, 4, start=n))
        assert_same(weight.grad, ramp(device, 4, start=n))


@may_run_live
def test_c04_a_view_made_without_gradients_whose_base_is_written(device):
    """torch does not tell where such a view comes from."""
    ours, theirs = (torch.ones(4, device=device, requires_grad=True) for _ in range(2))

    def f(p, x):
        with torch.no_grad():
            view = p[1:]
            p.add_(x)
        return view

    recorded = pg.record(lambda x: f(ours, x), warmup=1)
    for n in range(4):
        x = ramp(device, 1, start=n)
        assert_same(recorded(x).detach(), f(theirs, x).detach())


@pytest.mark.parametrize("shares", [False, True], ids=["data", "detach"])
@pytest.mark.parametrize("whole", [False, True], ids=["a part", "whole"])
@pytest.mark.parametrize("of", ["argument", "closure", "result"])
def test_c04_who_has_saved_a_tensor_hears_of_writes_through_detach_and_not_through_data(device, of, whole, shares):
    outside = ramp(device, 4)

    def f(x):
        base = {"argument": x, "closure": outside, "result": x * 2}[of]
        alias = base.detach() if shares else base.data
        return base, alias if whole else alias[1:]

    recorded = pg.record(f, warmup=1)
    weight = torch.full((4,), 2.0, device=device, requires_grad=True)
    for n in range(5):
        base, alias = recorded(ramp(device, 4, start=n))
        loss = (base * weight).sum()
        alias.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace") if shares else contextlib.nullcontext():
            loss.backward()
    assert pg.stats(recorded).replayed == 4


@pytest.mark.parametrize("way", [lambda x: x.detach(), lambda x: x.detach()[1:], lambda x: x[1:].detach()],
                         ids=["whole", "a view of it", "of a view"])  # fmt: skip
def test_c04_an_argument_detached_beside_a_result_with_a_history(device, way):
    """Writing it is heard by whoever has saved the argument."""
    recorded = pg.record(lambda x: (way(x), x * 2), warmup=1)
    for n in range(5):
        x = ramp(device, 4, start=n).requires_grad_()
        detached, _ = recorded(x)
        before = (x**2).sum()
        detached.mul_(3)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            before.backward()
    assert pg.stats(recorded).replayed == 4


def test_c07_attributes_of_ones_own_with_the_names_of_what_tensors_tell(device):
    class Wrapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self._base, self._version, self.is_shared = torch.nn.Linear(4, 4).to(device), 2.0, True

        def forward(self, x):
            return self._base(x) * self._version * self.is_shared

    module = pg.record(Wrapped(), warmup=1)
    for n in range(4):
        module(ramp(device, 4, start=n))
    assert pg.stats(module).replayed == 3


@pytest.mark.parametrize("count", [1, 2])
def test_c07_results_made_in_inference_mode_inside(device, count):
    """They are inference tensors also where replays copy them to memory that is made outside of that mode."""

    def function(x):
        with torch.inference_mode():
            y = x * 2, x + 1
        return y[0] if count == 1 else y

    recorded = pg.record(function)
    for n in range(5):
        x = torch.full((3,), n + 1.0, device=device)
        ours, theirs = recorded(x), function(x)
        assert_same(ours, theirs)
        for a, b in [(ours, theirs)] if count == 1 else zip(ours, theirs, strict=True):
            assert a.is_inference() is b.is_inference()
    assert pg.stats(recorded).replayed >= 3


@may_run_live
def test_c04_a_result_that_knows_no_other_names(device):
    class Bunch(dict):
        __getattr__ = dict.__getitem__

    f = pg.record(lambda x: Bunch(y=x * 2), warmup=1)
    for n in range(4):
        found = f(torch.full((3,), float(n), device=device))
        assert type(found) is Bunch
        assert found.y.tolist() == [n * 2.0] * 3
    assert "itself failed" not in pg.explain(f)


PRODUCTS = {"prod": lambda x: x.prod(), "dim": lambda x: x.prod(1), "cumprod": lambda x: x.cumprod(1)}


@may_run_live
@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_c01_a_gradient_for_which_torch_takes_another_formula_while_it_is_watched(device, product):
    w = torch.ones(4, 9, dtype=torch.float64, device=device, requires_grad=True)

    def step(x):
        (grad,) = torch.autograd.grad(product(w + x).sin().sum(), w)
        return grad

    f = pg.record(step)
    for n in range(6):
        x = torch.rand(4, 9, dtype=torch.float64, device=device) - (n % 2) * torch.eye(4, 9, device=device)
        assert_same(f(x), step(x))
    assert pg.stats(f).replayed == 0
    g = pg.record(product)
    with torch.no_grad():
        for _ in range(3):
            assert_same(g(w), product(w))
    assert pg.stats(g).replayed == 2
