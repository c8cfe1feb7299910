"""What tests of Python values share."""

import importlib
import importlib.util
import sys
import types

import pytest

_PACKAGE = """
import functools
import torch

RATE, SCALE, CHOSEN, calls = 2.0, (2.0, 1.0), None, 0
TABLE, FACTORS, ON = {"rate": 2.0}, [2.0, 1.0], {"scaled"}
WEIGHT = torch.full((1,), 2.0)

class Settings:
    rate = 2.0
    def __init__(self): self.factor = 2.0

    def value(self): return self.factor
    @property
    def doubled(self): return self.factor * 2
    def update(self): self.seen += 1

class Finer(Settings): pass

settings = Settings()

def by_flag(x): return x if CHOSEN is None else x * CHOSEN
def by_table(x): return x * TABLE["rate"]
def by_list(x): return x * FACTORS[0]
def by_settings(x): return x * settings.factor
def by_class(x): return x * Finer.rate

class Scaled(torch.nn.Module):
    rate = 2.0
    def forward(self, x): return x * self.rate

def counting(x):
    global calls
    calls += 1
    TABLE["calls"] = calls
    Settings.calls = calls
    return x * RATE

def kept(maxsize):
    def keeping(f):
        known = functools.lru_cache(maxsize)(f)
        known_by = lambda *args: known(*args)
        known_by.cache = known
        return known_by
    return keeping

@kept(2)
def positions(n, device): return torch.arange(n, device=device).flip(0)
@kept(None)
def noises(n, device): return [(torch.rand(n, device=device),), torch.rand(n, device=device)]
@kept(1)
def last(n, device): return torch.rand(n, device=device)

def by_positions(x): return x.index_select(-1, positions(x.shape[-1], x.device)) * 2
def by_noises(x):
    (a,), b = noises(x.shape[-1], x.device)
    return x * a + b
def by_last(x): return x * last(x.shape[-1], x.device) + last(1, x.device)
"""


@pytest.fixture
def no_other_tests(monkeypatch):
    """No modules of tests that were collected in the same process: a call may get at them by a name that it works out, and then
    it counts what they have, an iterator, say."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def package(device, monkeypatch):
    """A package that is installed."""
    made = {}
    for name in ("package", "package.inner"):
        made[name] = types.ModuleType(name)
        made[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
        made[name].__file__ = f"/usr/lib/site-packages/{name.replace('.', '/')}/__init__.py"
        exec(compile(_PACKAGE, made[name].__file__, "exec"), vars(made[name]))
        made[name].WEIGHT = made[name].WEIGHT.to(device)
        monkeypatch.setitem(sys.modules, name, made[name])
    made["package"].inner = made["package.inner"]
    return made["package"]
