"""C24: `torch.cond` and `torch.while_loop` in recorded code, and in what torch.compile makes of it, are branches and loops of
the recording as well."""

import pytest
import torch
from torch._higher_order_ops.while_loop import while_loop

import phonograph as pg
from phonograph.compile import graphs
from phonograph.testing import assert_same
from tests.helpers import counts, may_run_live, ramp, reasons

TURNS = (1.0, -1.0, 1.0, -1.0, 3.0)


def branching(x, p):
    return torch.cond(p > 0, lambda a: a + 1, lambda a: a * 3, (x,)) + 1


def looping(x, p):
    start = torch.zeros((), device=x.device)
    return while_loop(lambda i, a: i < p, lambda i, a: (i + 1, a * 1.5), (start, x))


def both(x, p):
    y = torch.cond(p > 0, lambda a, b: a + b, lambda a, b: a * b, (x, x * 2))
    return while_loop(lambda i, a: i < 5, lambda i, a: (i + 1, a * 1.5), (torch.zeros((), device=x.device), y))


@pytest.fixture(autouse=True)
def compiled_anew():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("function", [branching, looping, both], ids=lambda f: f.__name__)
def test_c24_torchs_own_in_recorded_code(device, function):
    f = pg.record(function, keep="always")
    for n, turn in enumerate(TURNS):
        x, p = ramp(device, 4, start=n), torch.tensor(turn, device=device)
        assert_same(f(x, p), function(x, p))
    assert counts(f) == (1, 1, 4), reasons(f)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("function", [branching, looping, both], ids=lambda f: f.__name__)
def test_c24_torchs_own_in_compiled_code(device, function, inner):
    f = torch.compile(function, backend="phonograph", options={"inner": inner})
    with torch.no_grad():
        for n, turn in enumerate(TURNS):
            x, p = ramp(device, 4, start=n), torch.tensor(turn, device=device)
            assert_same(f(x, p), function(x, p))
    assert [counts(graph) for graph in graphs()] == [(1, 1, 4)]


def test_c24_gradients_through_torchs_own_in_compiled_code(device):
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 4).to(device)

    def loss(x, p):
        return torch.cond(p > 0, lambda a: a.sin(), lambda a: a * 3, (net(x),)).sum()

    f = torch.compile(loss, backend="phonograph", options={"inner": "aot_eager"})
    for n, turn in enumerate(TURNS):
        x, p = ramp(device, 2, 4, start=n), torch.tensor(turn, device=device)
        found = torch.autograd.grad(f(x, p), [*net.parameters()])
        y = net(x)
        assert_same([*found], [*torch.autograd.grad((y.sin() if turn > 0 else y * 3).sum(), [*net.parameters()])])
    assert [counts(graph)[1:] for graph in graphs()] == [(1, 4)]


def test_c24_a_function_of_torchs_own_that_returns_its_operand(device):
    given, looped = torch.ops.higher_order.cond, torch.ops.higher_order.while_loop

    def f(x, p):
        (y,) = given(p > 0, lambda a: (a,), lambda a: (a * 2,), (x,))
        i, a, b = looped(lambda i, a, b: i < p, lambda i, a, b: (i + 1, b, b), (torch.zeros((), device=x.device), x, x + 1), ())
        return y + 1, i, a + 1, b + 1

    g = pg.record(f)
    for n, turn in enumerate(TURNS):
        x, p = ramp(device, 4, start=n), torch.tensor(turn, device=device)
        assert_same(g(x, p), f(x, p))
    assert counts(g) == (1, 1, 4), reasons(g)


@may_run_live
def test_c24_effects_in_a_function_of_torchs_own(device):
    """Called as the operator that it is, it runs Python code."""
    given = torch.ops.higher_order.cond

    def f(x, p):
        seen = []
        y = given(p > 0, lambda a: (seen.append(1), (a * 2,))[1], lambda a: (a - 1,), (x,))
        return y, len(seen)

    g = pg.record(f)
    for n, turn in enumerate(TURNS):
        x, p = ramp(device, 4, start=n), torch.tensor(turn, device=device)
        assert_same(g(x, p), f(x, p))
    assert "changes seen in a branch or loop" in reasons(g)
