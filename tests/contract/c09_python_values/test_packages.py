"""C9: modules that are not the user's."""

import os
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.shared.noticing import globals_as_before  # noqa: F401
from tests.helpers import counts, may_run_live, ramp

NAMED = {
    "a number": (lambda p: lambda x: x * p.RATE, lambda p: setattr(p, "RATE", 3.0)),
    "a tuple": (lambda p: lambda x: x * p.SCALE[0], lambda p: setattr(p, "SCALE", (3.0, 1.0))),
    "None": (lambda p: lambda x: x if p.CHOSEN is None else x * p.CHOSEN, lambda p: setattr(p, "CHOSEN", 3.0)),
    "in a dictionary": (lambda p: lambda x: x * p.TABLE["rate"], lambda p: p.TABLE.update(rate=3.0)),
    "in a list": (lambda p: lambda x: x * p.FACTORS[0], lambda p: p.FACTORS.__setitem__(0, 3.0)),
    "in a set": (lambda p: lambda x: x * 2 if "scaled" in p.ON else x, lambda p: p.ON.clear()),
    "another dictionary": (lambda p: lambda x: x * p.TABLE["rate"], lambda p: setattr(p, "TABLE", {"rate": 3.0})),
    "of a module in it": (lambda p: lambda x: x * p.inner.RATE, lambda p: setattr(p.inner, "RATE", 3.0)),
    "of an object": (lambda p: lambda x: x * p.settings.factor, lambda p: setattr(p.settings, "factor", 3.0)),
    "of its class": (lambda p: lambda x: x * p.settings.rate, lambda p: setattr(p.Settings, "rate", 3.0)),
    "over its class": (lambda p: lambda x: x * p.settings.rate, lambda p: setattr(p.settings, "rate", 3.0)),
    "of a class": (lambda p: lambda x: x * p.Finer.rate, lambda p: setattr(p.Settings, "rate", 3.0)),
    "by a property": (lambda p: lambda x: x * p.settings.doubled, lambda p: setattr(p.settings, "factor", 3.0)),
    "by a method": (lambda p: lambda x: x * p.settings.value(), lambda p: setattr(p.settings, "factor", 3.0)),
    "a tensor": (lambda p: lambda x: x * p.WEIGHT, lambda p: setattr(p, "WEIGHT", p.WEIGHT + 1)),
    "which of its functions": (lambda p: lambda x: p.by_flag(x), lambda p: setattr(p, "CHOSEN", 3.0)),
    "a table that it reads": (lambda p: lambda x: p.by_table(x), lambda p: p.TABLE.update(rate=3.0)),
    "a list that it reads": (lambda p: lambda x: p.by_list(x), lambda p: p.FACTORS.reverse()),
    "an object that it reads": (lambda p: lambda x: p.by_settings(x), lambda p: setattr(p.settings, "factor", 3.0)),
    "a class that it reads": (lambda p: lambda x: p.by_class(x), lambda p: setattr(p.Settings, "rate", 3.0)),
    "a module's class": (lambda p: p.Scaled(), lambda p: setattr(p.Scaled, "rate", 3.0)),
    "a function": (lambda p: lambda x: p.by_flag(x), lambda p: setattr(p, "by_flag", lambda x: x * 3)),
    "a function of a module in it": (lambda p: lambda x: p.inner.by_flag(x), lambda p: setattr(p.inner, "by_flag", torch.sin)),
    "its forward": (lambda p: p.Scaled(), lambda p: setattr(p.Scaled, "forward", lambda self, x: x * 3)),
    "in the middle of it": (lambda p: lambda x: p.inner.by_flag(x), lambda p: setattr(p.inner, "CHOSEN", 3.0)),
}  # fmt: skip


@pytest.mark.parametrize("case", NAMED)
def test_c09_values_in_modules_of_others(device, package, case):
    make, change = NAMED[case]
    theirs, ours = make(package), pg.record(make(package), warmup=1)
    for n in range(8):
        if n == 4:
            change(package)
        x = ramp(device, 4) + n
        assert_same(ours(x), theirs(x))
    assert pg.stats(ours).replayed >= 5, pg.explain(ours)


@pytest.mark.parametrize(("where", "called"), [
    ("torch.nn.functional.relu", lambda x: F.relu(x)), ("torch.relu", lambda x: torch.relu(x)),
    ("torch.nn.ReLU.forward", nn.ReLU()), ("torch.nn.ReLU.forward", nn.Sequential(nn.ReLU())),
], ids=["functional", "torch", "a module", "modules"])  # fmt: skip
def test_c09_functions_of_torchs_that_are_replaced(device, where, called, monkeypatch):
    f = pg.record(lambda x: called(x), warmup=1)
    for n in range(8):
        if n == 4:
            monkeypatch.setattr(where, lambda *args, **_: args[-1] * 3)
        x = ramp(device, 4) + n - 2
        assert_same(f(x), called(x))
    assert pg.stats(f).replayed >= 5, pg.explain(f)


@pytest.mark.parametrize("where", ["sys.argv", "environment", "torch", "numpy", "a class of torch's"])
def test_c09_values_in_modules_of_torch_and_of_the_standard_library(device, where, monkeypatch):
    np = pytest.importorskip("numpy")
    monkeypatch.setattr(sys, "argv", ["program", "2"])
    monkeypatch.setenv("PHONOGRAPHS_RATE", "2")
    for thing in (torch, np, nn.Linear):
        monkeypatch.setattr(thing, "mine", 2.0, raising=False)
    f, change = {
        "sys.argv": (lambda x: x * float(sys.argv[1]), lambda: sys.argv.__setitem__(1, "3")),
        "environment": (lambda x: x * float(os.environ["PHONOGRAPHS_RATE"]), lambda: os.environ.update(PHONOGRAPHS_RATE="3")),
        "torch": (lambda x: x * torch.mine, lambda: setattr(torch, "mine", 3.0)),
        "numpy": (lambda x: x * np.mine, lambda: setattr(np, "mine", 3.0)),
        "a class of torch's": (lambda x: x * nn.Linear.mine, lambda: setattr(nn.Linear, "mine", 3.0)),
    }[where]
    g = pg.record(f, warmup=1)
    for n in range(8):
        if n == 4:
            change()
        x = ramp(device, 4) + n
        assert_same(g(x), f(x))
    assert pg.stats(g).replayed >= 5, pg.explain(g)


def test_c09_what_a_package_changes_itself_is_its_own_business(device, package):
    """It counts its calls. That others of these run in between does not make this one run anew each time."""
    f = pg.record(lambda x: package.counting(x), warmup=1)
    for n in range(20):
        x = ramp(device, 4) + n
        assert_same(f(x), x * 2)
        package.counting(x)
    assert pg.stats(f).recorded <= 2, pg.explain(f)
    assert pg.stats(f).replayed >= 16, pg.explain(f)
    package.RATE = 3.0
    assert_same(f(x), x * 3)


@may_run_live
def test_c09_what_the_users_code_sets_in_a_package(device, package):
    def f(x):
        package.calls += 1
        return x * package.calls

    g = pg.record(f, warmup=1)
    for n in range(5):
        x = ramp(device, 4) + n
        assert_same(g(x), x * (n + 1))
    assert package.calls == 5


@pytest.mark.parametrize("f", ["by_positions", "by_noises"])
def test_c09_tensors_that_a_packages_function_keeps_are_read(device, package, f):
    """Nothing leads to the cache but code that is not looked through."""
    theirs = getattr(package, f)
    ours = pg.record(lambda x: theirs(x))
    for n in range(8):
        x = ramp(device, 4) + n
        assert_same(ours(x), theirs(x))
    assert counts(ours) == (1, 1, 7), pg.explain(ours)


def test_c09_tensors_that_a_packages_function_keeps_no_more_are_noticed(device, package):
    ours = pg.record(lambda x: package.by_noises(x))
    for n in range(12):
        if n == 6:
            package.noises.cache.cache_clear()
        x = ramp(device, 4) + n
        assert_same(ours(x), package.by_noises(x))
    assert pg.stats(ours).replayed >= 9, pg.explain(ours)


@may_run_live
@pytest.mark.parametrize("f", ["by_positions", "by_noises", "by_last"])
def test_c09_a_call_that_fills_a_packages_cache_is_not_recorded(device, package, f):
    """What it kept would lie in memory of the recording."""
    theirs, results = getattr(package, f), []
    for call in (theirs, pg.record(lambda x: theirs(x), warmup=0)):
        for of in (package.positions, package.noises, package.last):
            of.cache.cache_clear()
        torch.manual_seed(1)
        results.append([call(ramp(device, 4) + n) for n in range(6)] + [call(ramp(device, 5)), theirs(ramp(device, 4))])
    assert_same(*results)


def test_c09_a_cache_that_is_made_later_is_known(device, package):
    f = pg.record(lambda x: package.by_positions(x))
    assert_same(f(ramp(device, 4)), package.by_positions(ramp(device, 4)))
    package.noises = package.kept(8)(lambda n, device: torch.full((n,), 2.0, device=device))
    g = pg.record(lambda x: x * package.noises(4, x.device))
    for n in range(5):
        assert_same(g(ramp(device, 4) + n), (ramp(device, 4) + n) * 2)
    assert counts(g) == (1, 1, 4), pg.explain(g)
