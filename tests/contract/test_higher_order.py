"""C1, C2, C11: higher-order operators (`torch.ops.higher_order`), which are given functions or other operators: what they call
is recorded. Compiled code calls them, and people do, by `torch.cond` and its like."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import phonograph as pg
from phonograph.compile import backend, graphs
from phonograph.testing import assert_same
from tests.helpers import counts, may_run_live, ramp, reasons

hops = torch.ops.higher_order
aten = torch.ops.aten


def named(name):
    return getattr(hops, name, None) or pytest.skip(f"this release of torch has no {name}")


def wrapped(x):
    return named("wrap")(lambda t: (t * 2).sin(), x)


def chosen(x):
    return named("cond")(True, lambda t: (t * 2,), lambda t: (t - 1,), (x,))[0]


def drawn(x):
    """As what compiled code calls draws; the state is not looked at again."""
    return x + hops.run_and_save_rng_state(aten.rand.default, [3], device=x.device)[1]


def drawn_again(x):
    state, first = hops.run_and_save_rng_state(aten.rand_like.default, x)
    return first, hops.run_with_rng_state(state, aten.rand_like.default, x), torch.rand_like(x)


def widened(x):
    return named("out_dtype")(aten.mul.Tensor, torch.float64, x, x)


CALLED = {f.__name__: f for f in (wrapped, chosen, drawn, widened)}


@pytest.mark.parametrize("function", CALLED.values(), ids=CALLED)
def test_c01_what_they_call_is_recorded(device, function):
    f = pg.record(function)
    for n in range(5):
        x = ramp(device, 3, start=n)
        torch.manual_seed(n)
        ours = f(x)
        after = torch.rand(2, device=device)
        torch.manual_seed(n)
        assert_same(ours, function(x))
        assert_same(after, torch.rand(2, device=device))
    assert counts(f) == (1, 1, 4), reasons(f)


def test_c02_a_state_that_is_kept_and_set_again(device):
    f = pg.record(drawn_again)
    for n in range(5):
        x = ramp(device, 3, start=n)
        torch.manual_seed(n)
        ours = f(x)
        torch.manual_seed(n)
        assert_same(ours, drawn_again(x))
        assert_same(ours[0], ours[1])


@may_run_live
def test_c11_one_that_decides_by_a_value(device):
    def f(x):
        return named("cond")(x.sum() > 9, lambda t: (t * 2,), lambda t: (t - 1,), (x,))[0]

    g = pg.record(f)
    for n in (1, 1, 5, 5, 1):
        assert_same(g(ramp(device, 3, start=n)), f(ramp(device, 3, start=n)))
    assert pg.stats(g).recorded == 0
    assert ("value on the host" if device.type == "cpu" else "waits for the GPU") in reasons(g)


@may_run_live
@pytest.mark.parametrize("fallback", ["live", "split"])
def test_c11_what_they_call_may_be_refused(device, fallback):
    def f(x):
        return named("wrap")(lambda t: t * t.sum().item(), x)

    g = pg.record(f, fallback=fallback)
    for n in range(4):
        assert_same(g(ramp(device, 3, start=n)), f(ramp(device, 3, start=n)))
    assert "value on the host" in reasons(g)


class Recomputing(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def block(self, x):
        return F.dropout(self.a(x).relu(), 0.5, self.training)

    def forward(self, x):
        x = checkpoint(self.block, x, use_reentrant=False)
        return self.b(F.dropout(x, 0.3, self.training))


def trained(device, compiler, options, *, whole=False):
    """The same code, compiled by AOTAutograd: losses, weights and where the generator stands; and what was recorded."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Recomputing().to(device)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    compiled = torch.compile(net, backend=compiler, options=options)

    def step(x):
        loss = compiled(x).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.detach()

    run = pg.record(step) if whole else step
    torch.manual_seed(5)
    losses = [run(ramp(device, 4, 8, start=n) / 16).clone() for n in range(6)]
    found = [*losses, *(p.detach().clone() for p in net.parameters()), torch.rand(3, device=device)]
    return found, [run] if whole else graphs()


@may_run_live
def test_c02_compiled_dropout_that_is_recomputed(device):
    """A forward and its backward that are recorded apart cannot share generators of compiled code's own, which it has on a
    GPU."""
    theirs, _ = trained(device, "aot_eager_decomp_partition", None)
    ours, recorded = trained(device, backend, {"inner": "aot_eager_decomp_partition"})
    assert_same(ours, theirs)
    if device.type == "cpu":
        assert sum(pg.stats(graph).replayed for graph in recorded) >= 4
    else:
        assert "generators of compiled code's own" in "".join(map(reasons, recorded))
        assert "record the whole step" in "".join(map(reasons, recorded))


def test_c02_a_whole_step_of_compiled_dropout_that_is_recomputed(cuda):
    """(The CPU device cannot see what compiled code calls.)"""
    theirs, _ = trained(cuda, "aot_eager_decomp_partition", None)
    ours, (step,) = trained(cuda, "aot_eager_decomp_partition", None, whole=True)
    assert_same(ours, theirs)
    assert pg.stats(step).replayed >= 3, reasons(step)
    assert pg.stats(step).recorded == 1
