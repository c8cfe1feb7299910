"""C3: an argument that the function writes is written for the caller, and no other."""

import pytest
import torch

import phonograph as pg
from phonograph.testing import Pair, assert_same
from tests.helpers import counts, may_run_live, plain, ramp


def test_c03_an_argument_mutated_in_place_is_mutated_for_the_caller(device):
    both = plain(lambda x: x.add_(1).mul_(2).sum())
    for _ in range(7):
        both(torch.randn(4, device=device))
    assert counts(both) == (1, 1, 6)


def test_c03_an_argument_mutated_through_a_view(device):
    def through_views(x):
        x.view(-1)[::2].zero_()
        x[0].copy_(x[1])
        return x.t().sum(0)

    both = plain(through_views)
    for _ in range(6):
        both(torch.randn(3, 4, device=device))


@pytest.mark.parametrize(
    "view",
    [lambda b: b[::2], lambda b: b.t(), lambda b: b[1:3, 1:3], lambda b: b.diagonal(), lambda b: b[:, 2]],
    ids=["rows", "transposed", "window", "diagonal", "column"],
)
def test_c03_a_view_is_mutated_and_the_rest_of_its_base_is_not(device, view):
    both = plain(lambda x: x.add_(100).sum())
    for n in range(6):
        base = Pair.of(ramp(device, 4, 4, start=n))
        both(base.each(view))
        base.check("base of the argument")


def test_c03_an_expanded_argument_that_is_only_read(device):
    both = plain(lambda x: x * 2)
    for n in range(6):
        both(ramp(device, 3, start=n).expand(4, 3))


@may_run_live
def test_c03_writing_an_expanded_argument_raises_eagers_error(device):
    both = plain(lambda x: x.add_(1))
    for _ in range(5):
        with pytest.raises(RuntimeError, match="single memory location"):
            both(torch.ones(1, device=device).expand(3))


def test_c03_an_argument_that_is_not_mutated_is_never_touched(device):
    def busy(x):
        y = x.clone()
        for _ in range(10):
            y = y * 2 + x
        return y

    both = plain(busy)
    kept = [Pair.of(ramp(device, 16, start=n)) for n in range(8)]
    for pair in kept:
        both(pair)
    for n, pair in enumerate(kept):
        assert_same(pair.recorded, ramp(device, 16, start=n))


def test_c03_a_first_callers_tensor_does_not_become_a_slot(device):
    """Neither later calls write it, nor does what its owner does with it later reach the function."""
    both = plain(lambda x: x + 1)
    first = Pair.of(torch.zeros(3, device=device))
    both(first)
    both(first)
    both(torch.full((3,), 5.0, device=device))
    assert first.recorded.tolist() == [0.0] * 3
    first.each(lambda t: t.fill_(9))
    assert both(torch.full((3,), 6.0, device=device)).recorded.tolist() == [7.0] * 3


def test_c03_a_mutated_argument_is_returned_as_itself(device):
    both = plain(lambda x: x.mul_(2))
    for _ in range(6):
        x = Pair.of(torch.ones(3, device=device))
        assert both(x).recorded is x.recorded


def test_c03_several_mutated_arguments_in_containers(device):
    def mutates(state, batch):
        for name in state:
            state[name].add_(batch[0])
        batch[1].zero_()

    both = plain(mutates)
    for n in range(6):
        both({"a": ramp(device, 3), "b": ramp(device, 3, start=n)}, [ramp(device, 3, start=n), ramp(device, 2)])


def test_c03_mutation_accumulates_over_calls_in_the_callers_tensor(device):
    both = plain(lambda total, x: total.add_(x))
    total = Pair.of(torch.zeros(3, device=device))
    for n in range(1, 8):
        both(total, torch.ones(3, device=device))
        assert total.recorded.tolist() == [n] * 3


def test_c03_an_out_argument(device):
    both = plain(lambda x, out: torch.mul(x, 2, out=out))
    for n in range(6):
        both(ramp(device, 3, start=n), torch.empty(3, device=device))


def test_c03_mutation_is_seen_by_autograd(device):
    """A tensor saved for backward and then mutated by a replay must fail its backward, as in eager."""
    f = pg.record(lambda x: x.add_(1), warmup=1)
    for _ in range(5):
        x = torch.ones(3, device=device)
        version = x._version
        loss = (torch.ones(3, device=device, requires_grad=True) * x).sum()
        with torch.no_grad():
            f(x)
        assert x._version > version
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@may_run_live
def test_c03_containers_that_the_function_changes(device):
    def changes(results, x):
        results["sum"] = x.sum()
        results["inputs"].append(x * 2)

    both = plain(changes)
    for n in range(6):
        results = Pair.of({"sum": None, "inputs": []})
        both(results, ramp(device, 3, start=n))
        assert len(results.recorded["inputs"]) == 1


@may_run_live
@pytest.mark.parametrize(
    "change",
    [lambda x: x.t_(), lambda x: x.unsqueeze_(0), lambda x: x.resize_(2, 2), lambda x: x.set_(x[:1].clone())],
    ids=["t_", "unsqueeze_", "resize_", "set_"],
)
def test_c03_changes_of_an_arguments_metadata(device, change):
    def changes(x):
        change(x)
        return x * 2

    both = plain(changes)
    for n in range(6):
        both(ramp(device, 2, 3, start=n))


@may_run_live
def test_c03_the_data_of_an_argument_is_replaced(device):
    def replaces(x):
        x.data = x * 2

    both = plain(replaces)
    for n in range(6):
        both(ramp(device, 3, start=n))
