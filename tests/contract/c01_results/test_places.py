"""C1: operators whose results are easily written to the wrong place."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers import may_run_live, plain, ramp


def not_yet(reason, **options):
    return pytest.mark.xfail(strict=True, reason=reason, **options)


# ---------------------------------------------------------------------------------------------------
# C1: operators whose results are easily written to the wrong place

LAZY = {
    "product with the adjoint": lambda a: a.mH @ a,
    "copy of the conjugate": lambda a: torch.empty_like(a).copy_(a.conj()),
    "clone of the conjugate": lambda a: a.conj().clone(),
    "imaginary part of the conjugate": lambda a: torch.empty(3, 3, device=a.device).copy_(a.conj().imag),
    "concatenation": lambda a: torch.cat([a.conj(), a]),
    "dot product": lambda a: torch.dot(a[0].conj(), a[1]),
    "conversion": lambda a: a.conj().to(torch.complex128),
    "contiguous": lambda a: a.mT.conj().contiguous(),
    "reshape": lambda a: a.conj().reshape(9, 1) @ a.reshape(1, 9),
    "times two": lambda a: a.conj() * 2,
}


@may_run_live
@pytest.mark.parametrize("function", LAZY.values(), ids=LAZY)
def test_c01_lazily_conjugated_and_negated_tensors_inside(device, function):
    both = plain(function)
    for _ in range(5):
        both(torch.randn(3, 3, dtype=torch.complex64, device=device))


@may_run_live
def test_c01_a_lazily_conjugated_tensor_of_the_closure(device):
    adjoint = torch.randn(3, 3, dtype=torch.complex64, device=device).mH
    both = plain(lambda x: adjoint @ x)
    for _ in range(5):
        both(torch.randn(3, 3, dtype=torch.complex64, device=device))


LOSSES = {
    "binary cross-entropy, mean": lambda a, b: F.binary_cross_entropy(a, b),
    "binary cross-entropy, sum": lambda a, b: F.binary_cross_entropy(a, b, reduction="sum"),
    "binary cross-entropy, none": lambda a, b: F.binary_cross_entropy(a, b, reduction="none"),
    "huber": F.huber_loss,
    "mean squared": F.mse_loss,
    "smooth l1": F.smooth_l1_loss,
    "soft margin": F.soft_margin_loss,
}


@may_run_live
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_c01_losses_that_reduce_after_they_compute(device, loss):
    both = plain(loss)
    for _ in range(5):
        both(torch.rand(6, 3, device=device), torch.rand(6, 3, device=device))


@may_run_live
@pytest.mark.parametrize("size", [5, 500])
def test_c01_an_out_tensor_that_begins_empty(device, size):
    both = plain(lambda x: torch.add(x, x, out=torch.empty(0, device=x.device)))
    for _ in range(5):
        both(torch.randn(size, device=device))


@may_run_live
def test_c01_lengths_that_are_read_on_the_host(device):
    def packed(x, lengths):
        return nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True).data * 2

    both = plain(packed)
    for lengths in [[4, 3], [4, 3], [4, 3], [3, 2], [4, 4]]:
        both(ramp(device, 2, 4), torch.tensor(lengths))


def test_c13_an_index_out_of_range_in_a_replay():
    device = torch.device("cpu")  # a GPU does not raise, it asserts, and is of no use afterwards
    table = ramp(device, 4)
    both = plain(lambda x, i: (x.add_(1), table[i])[1])
    for i in [0, 1, 2, 3]:
        both(ramp(device, 2), torch.tensor([i]))
    both.outcome(ramp(device, 2), torch.tensor([9]))
    both(ramp(device, 2), torch.tensor([1]))
