"""What has arrived is copied before it is written, and nothing else is taken for it."""

import pytest
import torch

from phonograph.aten import operators
from phonograph.capture.arrivals import Arrivals


@pytest.fixture
def arrivals():
    return Arrivals(torch.clone)


def reduced(arrivals, t):
    m = operators.meaning(torch.ops.c10d.allreduce_.default)
    arrivals.note(m, ([t],), {}, None)


def brought(arrivals):
    kept = arrivals.kept()
    return kept and [t.tolist() for _, tensors in kept for t in tensors]


def test_it_is_copied_before_it_is_written(arrivals):
    t = torch.ones(4)
    reduced(arrivals, t)
    arrivals.before_writing([t[:2]])
    t.zero_()
    assert brought(arrivals) == [[1.0] * 4]


def test_beside_it_others_may_be_written_while_it_is_under_way(arrivals):
    flat = torch.zeros(8)
    reduced(arrivals, flat[:4])
    arrivals.before_writing([flat[4:]])
    flat.fill_(1)  # now it has arrived
    assert brought(arrivals) == [[1.0] * 4]


def test_between_it_others_cannot(arrivals):
    pairs = torch.zeros(4, 2)
    reduced(arrivals, pairs[1])
    arrivals.before_writing([pairs[:, 0]])
    assert brought(arrivals) is None


def test_what_triton_writes_cannot_be_copied_any_more(arrivals):
    t, other = torch.ones(4), torch.ones(4)
    reduced(arrivals, t)
    arrivals.lose([other])
    assert brought(arrivals) == [[1.0] * 4]
    reduced(arrivals, other)
    arrivals.lose([other])
    assert brought(arrivals) is None


def test_what_has_been_given_other_memory_is_gone(arrivals):
    t = torch.ones(4)
    reduced(arrivals, t)
    t.untyped_storage().resize_(0)
    assert brought(arrivals) is None


def test_a_functional_one_is_under_way_until_it_is_waited_for(arrivals):
    m = operators.meaning(torch.ops._c10d_functional.all_reduce.default)
    wait = operators.meaning(torch.ops._c10d_functional.wait_tensor.default)
    t = torch.ones(4)
    arrivals.note(m, (torch.zeros(4), "sum", "0"), {}, t)
    assert arrivals.under_way() == "all_reduce"
    arrivals.note(wait, (t,), {}, t)
    assert arrivals.under_way() == ""
    assert brought(arrivals) == [[1.0] * 4]
