"""How a replay on the CPU device calls its operators: faster spellings, and only such as make the very same call."""

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from phonograph.devices.cpu import bindings as spelling
from phonograph.devices.cpu.bindings import spelled

aten = torch.ops.aten


def m(*shape):
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape) / 7


CALLS = {
    "a number for a tensor": lambda: partial(aten.mul_.Tensor, m(3, 3), 0.9),
    "an integer for a tensor": lambda: partial(aten.mul_.Tensor, m(3, 3), 2),
    "a factor": lambda: partial(aten.add_.Tensor, m(3, 3), m(3, 3), alpha=-0.1),
    "a scalar": lambda: partial(aten.fill_.Scalar, m(3), 0),
    "a copy": lambda: partial(aten.copy_.default, m(3), m(3)),
    "random numbers": lambda: partial(aten.bernoulli_.float, m(3, 3), 0.9),
    "random numbers like another tensor's": lambda: partial(aten.bernoulli_.Tensor, m(3), m(3) / 2),
    "an index": lambda: partial(aten.index_put_.default, m(3, 3), [torch.tensor([0, 2])], m(2, 3), True),
    "one result": lambda: partial(aten.addmm.out, m(3), m(2, 3), m(3, 3), out=m(2, 3)),
    "one result, and a mode": lambda: partial(aten.div.out_mode, m(3), m(3), rounding_mode="floor", out=m(3)),
    "one result of numbers": lambda: partial(aten.pow.Scalar_out, 0.9, m(3), out=m(3)),
    "one result of a list": lambda: partial(aten.cat.out, [m(1), m(2)], out=m(3)),
    "one result of dimensions": lambda: partial(aten.sum.IntList_out, m(3, 3), [0], True, out=m(1, 3)),
    "one result, in torch.nn": lambda: partial(aten.gelu.out, m(3), out=m(3)),
    "two results": lambda: partial(aten.max.dim_max, m(3, 3), 1, max=m(3), max_values=torch.zeros(3, dtype=torch.long)),
    "a list of tensors": lambda: partial(aten._foreach_add_.Scalar, [m(3), m(2)], 1.5),
    "lists of tensors": lambda: partial(aten._foreach_add_.List, [m(3), m(2)], [m(3), m(2)], alpha=2),
}
NO_BINDING = {
    "no binding": lambda: partial(aten.threshold_backward.grad_input, m(3), m(3), 0, grad_input=m(3)),
    "a binding without out=": lambda: partial(aten.relu.out, m(3), out=m(3)),
    "results that are new": lambda: partial(aten.mm.default, m(3, 3), m(3, 3)),
}


class Arrivals(TorchDispatchMode):
    """Every operator that reaches the dispatcher, with its arguments as text."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append((func, repr(args), repr(kwargs)))
        return func(*args, **(kwargs or {}))


def arriving(call):
    with torch.no_grad(), Arrivals() as arrivals:
        call()
    return arrivals.seen


@pytest.mark.parametrize("make", [*CALLS.values(), *NO_BINDING.values()], ids=[*CALLS, *NO_BINDING])
def test_a_spelling_makes_the_very_same_call(make):
    assert arriving(spelled([make()])[0]) == arriving(make())


@pytest.mark.parametrize("make", CALLS.values(), ids=CALLS)
def test_what_has_a_binding_is_called_by_it(make):
    call = make()
    assert spelled([call])[0].func in spelling._candidates(call.func)[1]


def test_asking_executes_nothing():
    t, state = m(3), torch.get_rng_state()
    spelled([partial(aten.mul_.Tensor, t, 0.9), partial(aten.bernoulli_.float, t, 0.9), partial(aten.exp.out, t, out=t)])
    assert torch.equal(t, m(3))
    assert torch.equal(torch.get_rng_state(), state)


IMPOSTORS = {
    "another overload": lambda t, x, alpha=1: t.add_(1.5),
    "another operator": lambda t, x, alpha=1: t.mul_(x),
    "another factor": lambda t, x, alpha=1: t.add_(x, alpha=alpha * 2),
    "a factor of another type": lambda t, x, alpha=1: t.add_(x, alpha=int(alpha)),
    "another tensor": lambda t, x, alpha=1: t.add_(x.clone(), alpha=alpha),
    "more": lambda t, x, alpha=1: t.add_(x, alpha=alpha).add_(x, alpha=alpha),
    "nothing": lambda t, x, alpha=1: t,
    "an error": lambda t, x: t.add_(x, alpha=2.0),
}


@pytest.mark.parametrize("impostor", IMPOSTORS.values(), ids=IMPOSTORS)
def test_a_spelling_that_makes_another_call_is_not_used(impostor, monkeypatch):
    t, x = m(3), m(3) + 1
    monkeypatch.setattr(spelling, "_candidates", lambda func: ([], [impostor]))
    (call,) = spelled([partial(aten.add_.Tensor, t, x, alpha=2.0)])
    assert torch.equal(t, m(3))
    call()
    assert torch.equal(t, m(3) + 2 * x)
