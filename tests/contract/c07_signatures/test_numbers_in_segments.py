"""C7, C11: numbers among the arguments are followed where a recording is in segments as well, with live operators between."""

import math
import warnings
from math import cos
from types import BuiltinFunctionType

import pytest
import torch

import phonograph as pg
from phonograph.guards import followed_numbers
from phonograph.testing import assert_same
from tests.helpers import may_run_live, ramp


@pg.live
def marked(x, k):
    return x * k


def handed_on(x, k):
    return x * k + x.sum().item()


def decided(x, k):
    return x * k + 1 if x.sum() > 0 else x - k


def masked(x, k):
    return (x[x > 0] * k).sum() + k


def unique(x, k):
    return torch.unique(x * 2).sum() * k


def both_sides(x, k):
    y = x * k
    return torch.unique(x) * k - y.sum() / k


def imported(x, k):
    return torch.unique(x).sum() * cos(k)


def trained(x, k):
    w = torch.ones(3, device=x.device, requires_grad=True)
    ((x * w)[x > -1] * k).square().sum().backward()
    return w.grad * k


FOLLOWED = [(f, kind) for f in (handed_on, decided, masked, unique, both_sides) for kind in (int, float)] + [(imported, float)]


@pytest.mark.parametrize(("function", "kind"), FOLLOWED, ids=lambda x: x.__name__)
def test_c07_c11_numbers_beside_a_live_operator(device, function, kind):
    recorded, x = pg.record(function, fallback="split", keep="always"), ramp(device, 2, 3)
    for n in range(20):
        assert_same(recorded(x, kind(n + 2)), function(x, kind(n + 2)))
    assert pg.stats(recorded).recorded <= 2, pg.explain(recorded)
    assert pg.stats(recorded).replayed >= 12


@pytest.mark.parametrize("at", ["_converters", "_own_code", "_converting", "_Guard"])
def test_c12_functions_of_math_are_as_before_where_an_exception_comes(device, monkeypatch, at):
    """In whatever prepares a capture in which they stand for others; what is recorded later follows its numbers."""

    def fails(*_):
        raise MemoryError("injected")

    x = ramp(device, 2, 3)
    with monkeypatch.context() as patched:
        patched.setattr(followed_numbers, at, fails)
        broken = pg.record(imported, fallback="split", keep="always")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for n in range(6):
                assert_same(broken(x, float(n + 2)), imported(x, float(n + 2)))
    assert type(math.cos) is type(math.sin) is BuiltinFunctionType
    test_c07_c11_numbers_beside_a_live_operator(device, imported, float)


def taken(x, k):
    return torch.histc(x, 4, -k, k) + torch.unique(x).sum()


def given(x, k):
    return marked(x + 1, k) + k


@may_run_live
@pytest.mark.parametrize("function", [taken, given, trained], ids=lambda f: f.__name__)
def test_c07_c11_numbers_that_a_live_part_gets_are_right(device, function):
    recorded = pg.record(function, fallback="split", keep="always")
    for n in range(20):
        x, k = ramp(device, 2, 3, start=n % 2), 0.5 + min(n, 9)
        assert_same(recorded(x, k), function(x, k))


def test_c07_c11_a_live_operator_given_a_number_that_settles(device):
    """It was refused for good, for a mode of phonograph's own."""
    recorded, x = pg.record(masked, fallback="split", keep="always"), ramp(device, 2, 3)
    for n in range(24):
        assert_same(recorded(x, float(min(n, 6))), masked(x, float(min(n, 6))))
    assert pg.stats(recorded).replayed >= 12, pg.explain(recorded)
