"""C1, C6, C7: `make_graphed_callables`, as torch documents it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.shared.callables import X, beside, counts, generator_states, grads, perceptron, state
from tests.helpers import may_run_live, ramp

# ---------------------------------------------------------------------------------------------------
# The documented usages


def test_c06_parts_of_a_network_as_torch_documents_it(device):
    """Modules and a function, a loss among them, with torch's own arguments; a part that is chosen by data stays live."""
    torch.manual_seed(0)
    ours, theirs = beside([perceptron(device) for _ in range(3)])
    x, y = torch.randn(4, 8, device=device), torch.randn(4, 8, device=device)
    h = torch.randn(4, 8, device=device, requires_grad=True)
    first, second, third = pg.make_graphed_callables(ours, ((x,), (h,), (h,)))
    loss = pg.make_graphed_callables(F.mse_loss, (h, y), 3, False, (0, 1))
    assert (first, second, third) == ours
    assert isinstance(loss, pg.Recorded)
    optimizers = [torch.optim.SGD([p for m in modules for p in m.parameters()], 0.1) for modules in (ours, theirs)]
    for n in range(12):
        torch.manual_seed(n)
        x, y = torch.randn(4, 8, device=device), torch.randn(4, 8, device=device)
        found = []
        for (a, b, c), f, optimizer in zip((ours, theirs), (loss, F.mse_loss), optimizers, strict=True):
            torch.manual_seed(n)
            optimizer.zero_grad(set_to_none=True)
            middle = a(x)
            middle = b(middle) if middle.sum().item() > 0 else c(middle)
            value = f(middle, y)
            value.backward()
            optimizer.step()
            found.append((value, generator_states(device)))
        assert_same(*found)
        assert_same([grads(ours), state(ours)], [grads(theirs), state(theirs)])
    assert counts(first) == counts(loss) == (3, 1, 9)


def test_c01_nothing_runs_before_the_first_call(device):
    """Samples are neither read nor written nor kept; statistics, random numbers and counters are those of the real calls."""
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)).to(device)
    before, generators = copy.deepcopy(net.state_dict()), generator_states(device)
    sample = torch.full((4, 8), torch.nan, device=device)
    uses = torch._C._storage_Use_Count(sample.untyped_storage()._cdata)
    pg.make_graphed_callables(net, (sample,))
    assert_same([net.state_dict(), generator_states(device)], [before, generators])
    assert torch._C._storage_Use_Count(sample.untyped_storage()._cdata) == uses
    assert pg.stats(net).calls == 0


def test_c06_what_torch_does_wrong(device):
    """Micro-batches, two forwards before their backwards, results that are kept: the static buffers of others break these."""
    torch.manual_seed(0)
    (ours,), (theirs,) = beside([perceptron(device)])
    pg.make_graphed_callables(ours, (torch.randn(4, 8, device=device),), 1)
    kept = []
    for n in range(6):
        found = []
        for m in (ours, theirs):
            torch.manual_seed(n)
            m.zero_grad()
            outs = [m(torch.randn(4, 8, device=device)) for _ in range(2)]
            for out in reversed(outs):
                out.square().mean().backward()
            m(outs[0].detach()).sum().backward()
            found.append((outs, grads([m])))
        kept.append(found)
        for both in kept:
            assert_same(*both)
    assert not pg.stats(ours).refusals


class ManyWays(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.linear = nn.Embedding(10, 8), nn.Linear(8, 8)
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("scale", torch.ones(8, requires_grad=True))

    def forward(self, tokens, more, mask=None, *, times=1, residual=None):
        h = self.linear(self.table(tokens)) * self.scale * times + more["x"][0]
        h = h if mask is None else h.masked_fill(mask, 0.0)
        return {"h": h, "rest": (None, times, h.sum() if residual is None else (h + residual).sum())}


def test_c04_arguments_of_all_kinds(device):
    """Nested arguments, keywords, None, numbers, integer tensors; a parameter that is not used, a buffer that is trained."""
    torch.manual_seed(0)
    with device:  # made elsewhere and moved, the buffer would have a history
        (ours,), (theirs,) = beside([ManyWays()])

    def arguments(n):
        torch.manual_seed(n)
        x = torch.randn(3, 8, device=device, requires_grad=True)
        mask = torch.rand(3, 8, device=device) > 0.5 if n % 2 else None
        return (torch.arange(n, n + 3, device=device), {"x": [x, None]}, mask), {"times": 2, "residual": torch.ones_like(x)}

    args, kwargs = arguments(0)
    assert pg.make_graphed_callables(ours, args, 1, sample_kwargs=kwargs) is ours
    for n in range(8):
        found = []
        for m in (ours, theirs):
            m.zero_grad()
            m.scale.grad = None
            args, kwargs = arguments(n)
            out = m(*args, **kwargs)
            (out["h"].square().sum() + out["rest"][2]).backward()
            found.append((out, args[1]["x"][0].grad, grads([m]), m.scale.grad))
        assert_same(*found)
    assert counts(ours) == (2, 2, 6)  # with and without a mask


def test_c06_hooks_and_modes_that_torch_refuses(device):
    """A module that has hooks, in a mode of its own; an autocast context with its cache."""
    torch.manual_seed(0)
    ours, theirs = beside([perceptron(device), perceptron(device).eval()])
    for first, _ in (ours, theirs):
        first.register_forward_hook(lambda module, args, out: out * 2)
        first.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    x = torch.randn(4, 8, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        pg.make_graphed_callables(ours, ((x,), (x,)), 1)
    for n in range(5):
        found = []
        for first, second in (ours, theirs):
            torch.manual_seed(n)
            first.zero_grad()
            second.zero_grad()
            with torch.autocast(device.type, torch.bfloat16):
                out = second(first(x + n))
            out.float().square().sum().backward()
            found.append((out, grads([first, second])))
        assert_same(*found)
    assert counts(ours[0]) == counts(ours[1]) == (1, 1, 4)


@pytest.mark.parametrize("retain", [True, False])
def test_c06_backward_again_where_the_graph_was_retained(device, retain):
    torch.manual_seed(0)
    (ours,), (theirs,) = beside([perceptron(device)])
    x = torch.randn(4, 8, device=device)
    pg.make_graphed_callables(ours, (x,), 1, retain_graph_in_backward=retain, clone_param_grads_on_return=not retain)
    for n in range(5):
        for m in (ours, theirs):
            torch.manual_seed(n)
            m.zero_grad()
            loss = m(x).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
            with pytest.raises(RuntimeError, match="second time"):
                loss.backward()
        assert_same(grads([ours]), grads([theirs]))


# ---------------------------------------------------------------------------------------------------
# C7: calls that are not like the sample


def outcome(f, *args, **kwargs):
    """The result and the gradients, or the exception."""
    try:
        out = f(*args, **kwargs)
        out.sum().backward()
    except Exception as e:
        return type(e), str(e)
    return out


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 8), 2.0))

    def forward(self, x, y=None, *, scale=1.0):
        out = self.weight * x * scale
        return (out if y is None else out + y) * (1 if self.training else 10)


OTHER_CALLS = {
    "broadcastable": lambda d: ((X[:1].to(d),), {}),
    "a number of dimensions less": lambda d: ((X[0].to(d),), {}),
    "not broadcastable": lambda d: ((X[:3].to(d),), {}),
    "a dtype": lambda d: ((ramp(d, 4, 8, dtype=torch.float64),), {}),
    "strides": lambda d: ((ramp(d, 4, 8).reshape(8, 4).t(),), {}),
    "a gradient": lambda d: ((ramp(d, 4, 8).requires_grad_(),), {}),
    "one argument more": lambda d: ((ramp(d, 4, 8), ramp(d, 4, 8)), {}),
    "two arguments more": lambda d: ((ramp(d, 4, 8), ramp(d, 4, 8), ramp(d, 4, 8)), {}),
    "no argument": lambda d: ((), {}),
    "a keyword": lambda d: ((ramp(d, 4, 8),), {"scale": 3.0}),
    "a tensor by keyword": lambda d: ((), {"x": ramp(d, 4, 8)}),
    "an unknown keyword": lambda d: ((ramp(d, 4, 8),), {"shift": 3.0}),
    "a number": lambda d: ((2.0,), {}),
    "nothing": lambda d: ((None,), {}),
}


@may_run_live
@pytest.mark.parametrize("other", OTHER_CALLS.values(), ids=OTHER_CALLS)
def test_c07_another_call_than_the_sample(device, other):
    """It is eager's, or raises what eager raises; calls like the sample go on being replayed."""
    (ours,), (theirs,) = beside([Sum().to(device)])
    pg.make_graphed_callables(ours, (ramp(device, 4, 8),), 1)
    for n in range(9):
        found = []
        for m in (ours, theirs):
            m.zero_grad()
            args, kwargs = other(device) if n % 3 == 2 else ((ramp(device, 4, 8) + n,), {})
            found.append((outcome(m, *args, **kwargs), grads([m]), [a.grad for a in args if isinstance(a, torch.Tensor)]))
        assert_same(*found)
    assert pg.stats(ours).replayed >= 5, pg.explain(ours)


def test_c07_evaluation_and_training_in_turn(device):
    torch.manual_seed(0)
    (ours,), (theirs,) = beside([nn.Sequential(perceptron(device), nn.BatchNorm1d(8)).to(device)])
    x = torch.randn(4, 8, device=device)
    pg.make_graphed_callables(ours, (x,), 1)
    for n in range(12):
        found = []
        for m in (ours, theirs):
            torch.manual_seed(n)
            m.train(n % 3 != 2)
            with torch.set_grad_enabled(m.training):
                found.append(m(x + n))
        assert_same(*found)
        assert_same(state([ours]), state([theirs]))
    assert counts(ours) == (2, 2, 10)
