"""Gradients that were there before a capture, where what they lie in outlives them."""

import gc
import weakref

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from phonograph._torch.tensors import storage_id
from phonograph.slots.gradients import Grads


class Ghost:
    """As a device's, which has the memory."""

    def __init__(self, t):
        self._memory, self.storages = t.detach().clone(), frozenset((storage_id(t),))

    def again(self):
        return self._memory


def parameter(grad):
    p = torch.nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3)))
    p.grad = grad
    return p


def of_parts():
    return TwoTensor(torch.arange(3.0), torch.arange(3.0) + 10)


def test_one_of_parts_is_not_kept_and_is_brought_back():
    p = parameter(of_parts())
    grads = Grads([p], Ghost)
    parts = [weakref.ref(p.grad.a), weakref.ref(p.grad.b)]
    p.grad = None
    gc.collect()
    assert [part() for part in parts] == [None, None]
    grads.restore()
    assert type(p.grad) is TwoTensor
    assert torch.equal(p.grad.a, torch.arange(3.0))
    assert torch.equal(p.grad.b, torch.arange(3.0) + 10)


def test_one_that_is_there_stays_the_very_same():
    grad = of_parts()
    p = parameter(grad)
    grads = Grads([p], Ghost)
    p.grad = None
    grads.restore()
    assert p.grad is grad


@pytest.mark.parametrize("outlives", [lambda t: None, lambda t: Ghost(t) if t[0] == 0 else None], ids=["none", "one"])
def test_one_whose_parts_do_not_all_outlive_it_is_kept(outlives):
    p = parameter(of_parts())
    grad = weakref.ref(p.grad)
    grads = Grads([p], outlives)
    p.grad = None
    gc.collect()
    assert grad() is not None
    grads.restore()
    assert p.grad is grad()
