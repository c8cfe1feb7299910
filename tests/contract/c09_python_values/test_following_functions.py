"""C9: numbers that change from call to call are followed through functions of torch's that work out others with them."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import phonograph as pg
from phonograph.guards.composite_functions import WRITTEN_OUT
from phonograph.testing import assert_same
from tests.contract.shared.following import assert_followed

CALLS = 24

FUNCTIONS = {
    "gumbel": lambda y, t, n: F.gumbel_softmax(y, tau=n).square().mean(),
    "hard gumbel": lambda y, t, n: (F.gumbel_softmax(y, tau=n, hard=True) * y).mean(),
    "label smoothing": lambda y, t, n: F.cross_entropy(y, t, label_smoothing=n),
    "summed": lambda y, t, n: F.cross_entropy(y, t, reduction="sum", label_smoothing=n),
    "of each": lambda y, t, n: F.cross_entropy(y, t.clamp(0), ignore_index=1, reduction="none", label_smoothing=n).mean(),
    "of pixels": lambda y, t, n: F.cross_entropy(y.view(2, 4, 3), t.view(2, 3), label_smoothing=n),
    "of one": lambda y, t, n: F.cross_entropy(y[0], t[0], label_smoothing=n),
    "huber": lambda y, t, n: F.huber_loss(y, torch.zeros_like(y), delta=n),
    "huber's sum": lambda y, t, n: F.huber_loss(y, torch.ones_like(y), reduction="sum", delta=n),
    "smooth l1": lambda y, t, n: F.smooth_l1_loss(y, torch.zeros_like(y), beta=n),
    "a tensor of it": lambda y, t, n: (y * torch.tensor(n, device=y.device)).mean(),
    "a double": lambda y, t, n: (y * torch.tensor(n, dtype=torch.float64, device=y.device)).mean(),
}


def losses(device, function, numbers, record):
    """What a step gives that reads `state.number`, and the gradient that it leaves."""
    torch.manual_seed(0)
    net, state = nn.Linear(3, 4).to(device), SimpleNamespace(number=0.1)
    target = torch.tensor([0, 1, 2, 3, 0, -100], device=device)

    def step(x):
        net.zero_grad()
        loss = function(net(x), target, state.number)
        loss.backward()
        return loss.detach()

    step, found = record(step), []
    for i, number in enumerate(numbers):
        state.number = number
        torch.manual_seed(i)
        found += [step(torch.randn(6, 3, device=device)).clone(), net.weight.grad.clone()]
    return found, step


def compared(device, function, numbers):
    """The recorded function, whose every result was that of the live one."""
    found, step = losses(device, function, numbers, pg.record)
    for ours, live in zip(found, losses(device, function, numbers, lambda step: step)[0], strict=True):
        assert_same(ours, live)
    return step


@pytest.mark.parametrize("how", FUNCTIONS)
def test_c09_functions_of_a_number_are_followed(device, how):
    assert_followed(compared(device, FUNCTIONS[how], [0.1 + n / 64 for n in range(CALLS)]), CALLS)


def test_c09_label_smoothing_of_a_module_is_followed(device):
    criterion = nn.CrossEntropyLoss(label_smoothing=0.2)

    def smoothed(y, target, number):
        criterion.label_smoothing = number
        return criterion(y, target)

    assert_followed(compared(device, smoothed, [0.2 - n / 256 for n in range(CALLS)]), CALLS)


@pytest.mark.parametrize("how", ["label smoothing", "smooth l1"])
def test_c09_a_number_comes_to_nought(device, how):
    """Then another operator is called."""
    step = compared(device, FUNCTIONS[how], [max(0.0, 0.2 - n / 64) for n in range(CALLS)])
    assert pg.stats(step).recorded <= 4, pg.explain(step)


def test_c09_a_number_out_of_range_raises(device):
    numbers = [0.1, 0.2, 0.3, 0.4, 0.5]
    with pytest.raises(RuntimeError, match="delta"):
        losses(device, FUNCTIONS["huber"], [*numbers, -0.5], pg.record)
    with pytest.raises(RuntimeError, match="label_smoothing"):
        losses(device, FUNCTIONS["label smoothing"], [*numbers, 1.5], pg.record)


class Names(TorchDispatchMode):
    """Notes what is called, but for `mul.Scalar`, which is `mul.Tensor` where Python multiplies."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        shapes = [tuple(x.shape) for x in args if isinstance(x, torch.Tensor)]
        self.names.append((str(func).replace("mul.Scalar", "mul.Tensor"), shapes))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(6, 4), (2, 4, 3), (4,)], ids=str)
def test_c09_what_is_written_out_calls_the_same_operators(device, shape, reduction):
    logits = torch.randn(shape, device=device, requires_grad=True)
    target = torch.zeros((*shape[:-2], shape[-1]) if len(shape) > 2 else shape[:-1], dtype=torch.long, device=device)
    found = []
    for function in (F.cross_entropy, WRITTEN_OUT[F.cross_entropy]):
        with Names() as mode:
            function(logits, target, reduction=reduction, label_smoothing=0.3).sum().backward()
        found.append(mode.names)
        logits.grad = None
    assert found[0] == found[1]
