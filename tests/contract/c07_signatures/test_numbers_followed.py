"""C7, C9: numbers among the arguments that are followed."""

import math
import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.shared.following import CALLS, NOT_FOLLOWED, assert_followed
from tests.helpers import may_run_live


def called(device, function, numbers, calls=CALLS):
    """A function that is called with a tensor and numbers, recorded beside the same live."""
    f, plain = function(device), function(device)
    recorded = pg.record(f)
    for n in range(calls):
        torch.manual_seed(n)
        x = torch.randn(4, 8, device=device)
        args, kwargs = numbers(n)
        torch.manual_seed(n)
        a = recorded(x, *args, **kwargs)
        torch.manual_seed(n)
        b = plain(x, *args, **kwargs)
        assert_same(a, b, f"call {n}")
    return recorded


def training_by_arguments(device):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(device)

    def f(x, lr, *, temperature=1.0):
        loss = (net(x) / temperature).log_softmax(-1)[:, 0].mean()
        grads = torch.autograd.grad(loss, [*net.parameters()])
        with torch.no_grad():
            for p, g in zip(net.parameters(), grads, strict=True):
                p.add_(g, alpha=-lr)
            return loss.detach(), [p.clone() for p in net.parameters()]

    return f


def test_c07_numbers_that_are_arguments(device):
    recorded = called(device, training_by_arguments, lambda n: ((0.1 / (n + 1),), {"temperature": 1 + n / 7}))
    assert_followed(recorded)


def test_c07_two_numbers_that_take_turns_are_two_signatures(device):
    recorded = called(device, lambda device: lambda x, t: x * t, lambda n: ((0.5 + n % 2,), {}))
    assert pg.stats(recorded).recorded == 2
    assert pg.stats(recorded).replayed == CALLS - 2


def test_c09_a_number_that_is_an_argument_and_lies_elsewhere_too(device):
    state = SimpleNamespace(t=0.5)

    def numbers(n):
        state.t = 0.5 if n < 12 else 0.75 + n
        return ((state.t if n < 12 and n % 2 else 0.25 + n / 64),), {}

    called(device, lambda device: lambda x, t: x * t + state.t, numbers)


@may_run_live
@pytest.mark.parametrize("how", NOT_FOLLOWED)
def test_c07_what_becomes_of_an_argument_is_never_stale(device, how):
    function = NOT_FOLLOWED[how]

    def made(device):
        weight = torch.linspace(-1, 1, 8, device=device).requires_grad_()
        return lambda x, t: function(x, weight, SimpleNamespace(t=t, cos=math.cos))

    called(device, made, lambda n: (((0.25, 0.3125, 0.75, 0.5)[n % 4],), {}), 24)


WHOLE = {
    "an annealed weight": lambda x, n: x * min(1.0, (n + 1) / 10),
    "every third": lambda x, n: x * 2 if (n + 1) % 3 == 0 else x + 1,
    "a warm-up": lambda x, n: x * (n / 20) if n < 20 else x.sin(),
    "only printed where it is large": lambda x, n: x * 2 if n < 1_000_000 else x * len(str(n)),
    "not read": lambda x, n: x * 2,
}
WHOLE_NOT_FOLLOWED = {
    "a size": lambda x, n: x[:, : n % 8].sum(),
    "a range": lambda x, n: sum(x * i for i in range(n % 4)) + x,
    "of a tensor": lambda x, n: x * n,
    "a new tensor": lambda x, n: x * torch.tensor(n, device=x.device) if x.device.type == "cpu" else x * float(n),
    "an item": lambda x, n: x[n % 4] + (1.0, 2.0, 3.0)[n % 3],
    "a text": lambda x, n: x * len(f"{n:b}"),
    "returned": lambda x, n: (x + 1, n, n + 1),
    "a power": lambda x, n: x ** (n % 3),
    "its class": lambda x, n: x * 2 if type(n) is int else x,
    "large": lambda x, n: x * (1 if (n + 2**53) % 2 else 2),
    "a seed": lambda x, n: x * torch.Generator().manual_seed(n).initial_seed(),
}


@pytest.mark.parametrize("how", WHOLE)
def test_c07_a_whole_number_that_is_an_argument(device, how):
    """The number of the step: what is worked out of it, and what is decided by it."""
    recorded = called(device, lambda device: WHOLE[how], lambda n: ((n,), {}))
    assert_followed(recorded, CALLS - 2)


@may_run_live
@pytest.mark.parametrize("how", WHOLE_NOT_FOLLOWED)
def test_c07_what_becomes_of_a_whole_number_is_never_stale(device, how):
    called(device, lambda device: WHOLE_NOT_FOLLOWED[how], lambda n: (((1, 2, 7, 4, 2**60)[n % 5],), {}), 24)


def test_c07_a_number_beside_one_that_cannot_be_followed(device):
    """The one that can still is."""
    recorded = called(device, lambda device: lambda x, n, t: x[:, : n % 2 + 1] * t, lambda n: ((n // 16, 1 / (n + 1)), {}), 32)
    assert pg.stats(recorded).recorded <= 3, pg.explain(recorded)


@pytest.mark.parametrize("given", ["the number", "what was made of it"])
@pytest.mark.parametrize("place", ["attribute", "argument"])
def test_c09_a_number_in_a_function_that_is_recorded_in_segments(device, given, place):
    """It is baked in, as before it has changed: what runs between segments finds no mode, and a number like any other."""

    def make():
        log = []

        @pg.live
        def note(y, by):
            log.append((float(y.sum()), by, torch._C._len_torch_function_stack()))
            assert type(by) is float

        def f(x, by):
            y = x * by
            note(y, by if given == "the number" else 2.0)
            return y + 1

        held = SimpleNamespace(by=1.0)
        return (lambda x: f(x, held.by)) if place == "attribute" else f, held, log

    (f, held, log), (plain, theirs, other) = make(), make()
    recorded = pg.record(f)
    for n in range(24):
        held.by = theirs.by = 1.0 + n // 4 / 8
        args = (torch.ones(3, device=device) + n, *([held.by] if place == "argument" else []))
        assert_same(recorded(*args), plain(*args))
    assert log == other
    assert pg.stats(recorded).replayed >= 12, pg.explain(recorded)
    assert not pg.stats(recorded).refusals or place == "argument", pg.explain(recorded)


@pytest.mark.parametrize("how", ["kept", "looked at"])
def test_c09_what_is_refused_because_of_a_number_that_is_followed_is_recorded_without(device, how):
    """Code that keeps the number, as the value it has been so far, or that asks of which class it is."""
    held = SimpleNamespace(by=1.0, last=1.0)

    def kept(x):
        held.last = held.by * 1.0
        return x * held.last

    def looked_at(x):
        if str(held.by.__class__) != "<class 'float'>":
            raise TypeError("a number is expected")
        return x * held.by

    f = pg.record(kept if how == "kept" else looked_at)
    for n in range(24):
        held.by = 1.0 + n // 4 / 8
        x = torch.ones(3, device=device) + n
        assert_same(f(x), x * held.by)
        assert type(held.last) is float
    assert pg.stats(f).replayed >= 16, pg.explain(f)
    assert not pg.stats(f).refusals, pg.explain(f)


@pytest.mark.parametrize("kind", ["layer", "attention"])
def test_c01_torchs_own_way_through_attention_is_the_same_where_a_number_is_followed(device, kind):
    """In evaluation these modules have a faster way, which they do not take where something looks at torch's functions."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).to(device).eval()
    attention = nn.MultiheadAttention(64, 4, batch_first=True).to(device).eval()
    held = SimpleNamespace(by=1.0)

    @torch.no_grad()
    def f(x):
        x = x * held.by
        return layer(x) if kind == "layer" else attention(x, x, x, need_weights=False)[0]

    recorded = pg.record(f)
    for n in range(24):
        held.by = 1.0 + n // 4 / 8
        x = torch.randn(8, 33, 64, device=device)
        assert_same(recorded(x), f(x), f"call {n}")
    assert pg.stats(recorded).replayed >= 16, pg.explain(recorded)


def test_c09_a_number_is_followed_under_autocast(device):
    torch.manual_seed(0)
    net, held = nn.Linear(8, 8).to(device), SimpleNamespace(by=1.0)

    def f(x):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return (net(x) * held.by).detach()

    recorded = pg.record(f)
    for n in range(12):
        held.by = 1.0 + n / 8
        x = torch.randn(4, 8, device=device)
        assert_same(recorded(x), f(x), f"call {n}")
    assert_followed(recorded, 12)


def test_c09_a_number_is_followed_beside_the_environment(device):
    """Code of Python's that looks up a variable of the environment asks of which type its name is."""
    held = SimpleNamespace(by=1.0)

    def f(x):
        return x * held.by if os.environ.get("PHONOGRAPH_HAS_NO_SUCH_VARIABLE") is None else x

    recorded = pg.record(f)
    for n in range(12):
        held.by = 1.0 + n / 8
        x = torch.randn(4, 8, device=device)
        assert_same(recorded(x), f(x), f"call {n}")
    assert_followed(recorded, 12)


def test_c09_a_number_is_followed_where_attention_is_trained(device):
    torch.manual_seed(0)
    net, held = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0).to(device), SimpleNamespace(by=1.0)

    def f(x):
        net.zero_grad()
        loss = net(x).sin().mean() * held.by
        loss.backward()
        return loss.detach()

    recorded = pg.record(f)
    for n in range(12):
        held.by = 1.0 + n / 8
        x = torch.randn(4, 5, 16, device=device)
        assert_same(recorded(x), f(x), f"call {n}")
    assert_followed(recorded, 12)
