"""C6, C16: the interfaces of peers, as they are: what Transformer Engine's callers do with its `make_graphed_callables`."""

import copy
import inspect
import io

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import counts, ramp

KINDS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")


class Gathered:
    """An object whose method is a hook."""

    def __init__(self, seen, kind):
        self.seen, self.kind = seen, kind

    def hook(self, module):
        self.seen.append((self.kind, module))


def only(seen, kind):
    return lambda module: seen.append((kind, module))


def by_default(seen, kind):
    def hook(module, recurse=True, *, wait=False):
        assert recurse is True
        assert wait is False
        seen.append((kind, module))

    return hook


@pytest.mark.parametrize("make", [only, by_default, lambda seen, kind: Gathered(seen, kind).hook])
def test_c09_hooks_that_take_the_module_alone(device, make):
    """Around each warm-up and capture, in the order of a call."""
    seen = []
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).to(device)
    hooks = {kind: {7: make(seen, kind)} for kind in KINDS}
    pg.make_graphed_callables(net, (ramp(device, 4, 8),), 1, capture_time_hooks=[hooks])
    for n in range(6):
        net((ramp(device, 4, 8) + n).requires_grad_()).sum().backward()
    kinds = [kind for kind, _ in seen]
    assert kinds[:8] == [*KINDS, *KINDS]
    assert all(module is net for _, module in seen)
    assert len(kinds) <= 12
    assert counts(net)[1:] == (1, 5)


def test_c09_a_hook_that_takes_the_module_alone_returns_nothing(device):
    net = nn.Linear(8, 8).to(device)
    pg.make_graphed_callables(net, (ramp(device, 4, 8),), 1, capture_time_hooks=[{"forward_hooks": {0: lambda module: 1}}])
    with pytest.raises(RuntimeError, match=r"must return None: .*<lambda>"):
        net(ramp(device, 4, 8))


def test_c07_modules_is_a_name_for_the_first_argument(device):
    x = ramp(device, 4, 8)
    net = nn.Linear(8, 8).to(device)
    assert pg.make_graphed_callables(modules=net, sample_args=(x,)) is net
    both = pg.make_graphed_callables(modules=(torch.sin, torch.cos), sample_args=((x,), (x,)), num_warmup_iters=1)
    for _ in range(3):
        assert_same([f(x) for f in both], [x.sin(), x.cos()])
    assert [counts(f) for f in both] == [(1, 1, 2)] * 2
    assert "modules" not in inspect.signature(pg.make_graphed_callables).parameters
    for wrong in ({"callables": net, "modules": net}, {}):
        with pytest.raises(TypeError):
            pg.make_graphed_callables(sample_args=(x,), **wrong)


@pytest.mark.parametrize("hooked", [False, True])
def test_c17_reset_drops_recordings_as_often_as_you_like(device, hooked):
    """On each of the callables that come back, of which several may be the same; then they are recorded anew."""
    x = ramp(device, 4, 8)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).to(device)
    beside = copy.deepcopy(net)
    hooks = {"capture_time_hooks": [{"forward_hooks": {0: lambda module: None}}]} if hooked else {}
    graphed = pg.make_graphed_callables((net,), ((x,),) * 2, 1, _order=[1, 1, -1, -1], **hooks)
    assert graphed == (net, net)
    for _ in range(2):
        before = pg.stats(net).recorded
        for _ in range(3):
            net.zero_grad()
            beside.zero_grad()
            out, expected = net(x), beside(x)
            out.sum().backward()
            expected.sum().backward()
            assert_same([out, *[p.grad for p in net.parameters()]], [expected, *[p.grad for p in beside.parameters()]])
        assert pg.stats(net).recorded > before
        for _ in range(2):
            for f in graphed:
                f.reset()
        assert "0 recordings" in repr(net._compiled_call_impl)
        assert_same(out, expected)


class Neuron(nn.Module):
    """Has a `reset` of its own, and a state that it forgets."""

    def __init__(self):
        super().__init__()
        self.v = 1.0

    def forward(self, x):
        return x * 2

    def reset(self):
        self.v = 0.0


def test_c16_a_reset_is_nobody_elses(device):
    """A module that has one keeps it; a copy and a pickle have nothing of ours."""
    x = ramp(device, 4, 8)
    net, neuron = nn.Linear(8, 8).to(device), Neuron()
    pg.make_graphed_callables((net, neuron), ((x,), (x,)), 1)
    neuron.reset()
    assert neuron.v == 0.0
    for _ in range(3):
        net(x)
    assert counts(net) == (1, 1, 2)
    buffer = io.BytesIO()
    torch.save(net, buffer)
    assert b"phonograph" not in buffer.getvalue()
    buffer.seek(0)
    for m in (copy.deepcopy(net), torch.load(buffer, weights_only=False)):
        m.reset()
        assert_same(m(x), net(x))
        assert m._compiled_call_impl is None
    assert counts(net) == (1, 1, 4)
    pg.reset(net)
    net.reset()
    assert net._compiled_call_impl is None
