"""C8, C9: values that nothing in the code names."""

import array
import ctypes
import functools
import random
import types
import weakref
from typing import ClassVar

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.shared.noticing import globals_as_before  # noqa: F401
from tests.helpers import may_run_live, ramp


class Passes(nn.Module):
    def forward(self, x):
        return x


class Matched:
    __match_args__ = ("scale",)


class Row:
    """A table of numbers, and one row of it."""

    def __init__(self):
        np = pytest.importorskip("numpy")
        self.table = np.array([(1.0, 2.0)], dtype=[("lr", "f8"), ("w", "f8")])
        self.row = self.table[0]


def _matching(it):
    def f(x):
        match it:
            case Matched(scale):
                return x * scale

    return f


def _getting(it):
    from inspect import getmembers

    return lambda x: x * dict(getmembers(it))["scale"]


def _by_another_name(it):
    from operator import attrgetter as by

    name = "scale"
    return lambda x: x * by(name)(it)


TEMPLATE = "{0.scale}"


def _scaled(kind):
    made = kind()
    made.scale = 2.0
    return made


def _array():
    return pytest.importorskip("numpy").arange(6.0).reshape(2, 3)


def _polynomial():
    return pytest.importorskip("numpy").polynomial.Polynomial([0.0, 1.0])


def _poly1d():
    return pytest.importorskip("numpy").poly1d([1.0, 0.0])


UNNAMED = {
    "a module's forward": (Passes, lambda m: lambda x: m(x), lambda m, n: setattr(m, "forward", lambda x: x * n)),
    "by a pattern": (lambda: _scaled(Matched), _matching, lambda it, n: setattr(it, "scale", float(n))),
    "by getmembers": (lambda: _scaled(Matched), _getting, lambda it, n: setattr(it, "scale", float(n))),
    "by a getter": (lambda: _scaled(Matched), _by_another_name, lambda it, n: setattr(it, "scale", float(n))),
    "in a row": (Row, lambda it: lambda x: x * float(it.row["w"]), lambda it, n: it.table.__setitem__("w", float(n))),
    "an array's shape": (_array, lambda a: lambda x: x * len(a), lambda a, n: setattr(a, "shape", [(2, 3), (3, 2)][n % 2])),
    "an array's dtype": (_array, lambda a: lambda x: x * a.itemsize, lambda a, n: setattr(a, "dtype", ["<f8", "<i4"][n % 2])),
    "a polynomial": (_polynomial, lambda p: lambda x: x * float(p(2.0)), lambda p, n: p.coef.__setitem__(0, float(n))),
    "an old polynomial": (_poly1d, lambda p: lambda x: x * float(p(2.0)), lambda p, n: p.__setitem__(0, float(n))),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Setting the .* on a NumPy array:DeprecationWarning")
@pytest.mark.parametrize("case", UNNAMED)
@pytest.mark.parametrize("changes", [(3,), (2, 5), (0, 3, 4)])
def test_c09_what_no_code_names(device, case, changes):
    make, function, change = UNNAMED[case]
    (ours, theirs), results = (make(), make()), []
    recorded, live = pg.record(function(ours), warmup=1), function(theirs)
    for n in range(8):
        if n in changes:
            change(ours, n + 1)
            change(theirs, n + 1)
        x = ramp(device, 3) + n
        results.append((recorded(x), live(x)))
        assert_same(*results[-1])
    assert pg.stats(recorded).replayed >= 2, pg.explain(recorded)


RESET = {
    "a dictionary": lambda it: setattr(it, "extras", {}),
    "a list": lambda it: setattr(it, "extras", []),
    "a set": lambda it: setattr(it, "extras", set()),
    "what is in it": lambda it: setattr(it, "extras", {"a": [1]}),
}


@pytest.mark.parametrize("case", RESET)
@may_run_live
def test_c11_a_container_that_each_call_makes_anew(device, case):
    """The caller may keep it: then each call has its own."""
    it, kept = Matched(), []

    def f(x):
        RESET[case](it)
        return x * 2

    g = pg.record(f, warmup=1)
    for n in range(5):
        assert_same(g(ramp(device, 3) + n), (ramp(device, 3) + n) * 2)
        kept.append(it.extras)
    assert len({id(container) for container in kept}) == 5


def _with_a_history(kind, device):
    """Tensors that a function reads, which others that it does not know lie behind: (what it does, what is looked at)."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.ones(3, device=device))
    inner = weight * 2
    outer = inner.exp()

    def step(x):
        loss = (outer * x).sum()
        loss.backward(retain_graph=True)
        return loss.item() if kind == "on the host" else loss.detach()

    def chosen(x):
        return torch.autograd.grad((outer * x).sum(), weight, retain_graph=True)[0]

    def once(x):
        (outer * x).sum().backward()
        return x * 2

    total = outer.sum()

    def itself(x):
        total.backward(retain_graph=True)
        return x * 2

    def with_a_gradient(x):
        outer.backward(x, retain_graph=True)
        return x * 2

    def edge(x):
        torch.autograd.backward(torch.autograd.graph.get_gradient_edge(outer), x, retain_graph=True)
        return x * 2

    def call(f, x, n):
        nonlocal inner, outer
        weight.grad = None
        if kind == "a hook" and n == 3:
            inner.register_hook(lambda g: g * 10)
        if kind == "used up":
            inner = weight * 2
            outer = inner.exp()
        return f(x), None if weight.grad is None else weight.grad.clone()

    others = {"a hook": chosen, "used up": once, "itself": itself, "with a gradient": with_a_gradient, "an edge": edge}
    return others.get(kind, step), call


@pytest.mark.parametrize("kind", ["gradients", "on the host", "a hook", "used up", "itself", "with a gradient", "an edge"])
@may_run_live
def test_c06_tensors_outside_that_have_a_history(device, kind):
    found = []
    for wrap in (lambda f: f, functools.partial(pg.record, warmup=1)):
        f, call = _with_a_history(kind, device)
        g = wrap(f)
        found.append([call(g, ramp(device, 3) + n, n) for n in range(6)])
    assert_same(found[1], found[0])


@may_run_live
def test_c09_generators_of_bits(device):
    np = pytest.importorskip("numpy")
    for draw in (lambda b: b.random_raw() % 7, lambda b: b.random_raw() % 5):
        ours, theirs = np.random.PCG64(0), np.random.PCG64(0)
        g = pg.record(lambda x, draw=draw, b=ours: x * draw(b), warmup=1)
        for n in range(5):
            x = ramp(device, 3) + n
            assert_same(g(x), x * draw(theirs))


@may_run_live
def test_c09_a_view_of_memory_that_is_released(device):
    it = Matched()
    it.view = memoryview(bytearray(b"2"))
    g = pg.record(lambda x: x * it.view[0], warmup=1)
    for n in range(8):
        if n == 4:
            it.view.release()
            it.view = memoryview(bytearray(b"3"))
        x = ramp(device, 3) + n
        assert_same(g(x), x * it.view[0])
    assert pg.stats(g).replayed >= 4, pg.explain(g)


class Sampler(torch.Generator):
    temperature = 2.0


class Dice(random.Random):
    temperature = 2.0


class Numbers(array.array):
    temperature = 2.0


class Fields(ctypes.Structure):
    _fields_: ClassVar = [("n", ctypes.c_int)]
    temperature = 2.0


class Reference(weakref.ref):
    temperature = 2.0


BUILT_IN = {
    "generator": lambda: Sampler(), "random": lambda: Dice(0), "array": lambda: Numbers("f", [1.0]),
    "structure": lambda: Fields(1), "reference": lambda: Reference(Sampler),
}  # fmt: skip


@pytest.mark.parametrize("case", BUILT_IN)
@pytest.mark.parametrize("where", ["object", "class"])
def test_c09_attributes_of_classes_made_of_built_in_ones(device, case, where, monkeypatch):
    it = BUILT_IN[case]()
    f = pg.record(lambda x: x * it.temperature, warmup=1)
    for n in range(8):
        if n == 4:
            monkeypatch.setattr(it if where == "object" else type(it), "temperature", 3.0)
        x = ramp(device, 3) + n
        assert_same(f(x), x * it.temperature)
    assert pg.stats(f).replayed >= 5, pg.explain(f)


@may_run_live
@pytest.mark.parametrize("case", BUILT_IN)
def test_c11_what_is_counted_on_objects_of_such_classes(device, case):
    it = BUILT_IN[case]()
    it.drawn = 0

    def f(x):
        it.drawn += 1
        return x * it.drawn

    g = pg.record(f, warmup=1)
    for n in range(5):
        x = ramp(device, 3) + n
        assert_same(g(x), x * (n + 1))
    assert it.drawn == 5


def test_c09_cells_and_exceptions(device):
    cell, error = types.CellType(2.0), ValueError(2.0)
    f = pg.record(lambda x: x * cell.cell_contents, warmup=1)
    g = pg.record(lambda x: x * error.args[0], warmup=1)
    for n in range(8):
        if n == 4:
            cell.cell_contents = 3.0
            error.args = (3.0,)
        x = ramp(device, 3) + n
        assert_same(f(x), x * (3.0 if n >= 4 else 2.0))
        assert_same(g(x), x * (3.0 if n >= 4 else 2.0))


def test_c09_counts_do_not_hide_what_lies_beside_them(device, package):
    """In the table where a package counts its calls."""
    f = pg.record(lambda x: package.counting(x) * package.by_table(x), warmup=1)
    for n in range(24):
        if n % 6 == 5:
            package.TABLE["rate"] += 1
        x = ramp(device, 4) + n
        result = f(x)
        assert_same(result, x * package.RATE * (x * package.TABLE["rate"]))
        package.counting(x)
    assert pg.stats(f).replayed >= 14, pg.explain(f)


_ARMED = """
armed = False

def once(x):
    global armed
    if armed:
        armed = False
        return x * 100
    return x + 0
"""


@may_run_live
def test_c12_what_a_package_uses_up_is_there_again(device, package):
    """A capture that is taken back has used it up."""
    exec(_ARMED, vars(package))
    package.once.__code__ = package.once.__code__.replace(co_filename=package.__file__)
    package.factor = 1.0
    f = pg.record(lambda x: package.once(x) * package.factor, warmup=1)
    for n in range(12):
        if n in (5, 6):
            package.factor, package.armed = 2.0, True
        x = ramp(device, 4) + n
        assert_same(f(x), x * (100.0 if n in (5, 6) else 1.0) * package.factor)


def test_c09_names_of_methods_are_no_values(device, package):
    """What has the name of a method that the user's code calls on something else may change."""
    package.step = package.settings.seen = 0

    def f(x):
        if x.numel() > 100:
            package.settings.update(x.step)
        return package.by_flag(x)

    g = pg.record(f, warmup=1)
    for n in range(12):
        package.step += 1
        package.settings.update()
        x = ramp(device, 4) + n
        assert_same(g(x), x)
    assert pg.stats(g).replayed >= 10, pg.explain(g)


def test_c08_a_count_that_has_the_name_of_a_method(device):
    model = Passes()
    model.step = 0
    f = pg.record(lambda x: model(x) * 2, warmup=1)
    for n in range(10):
        model.step += 1
        assert_same(f(ramp(device, 3) + n), (ramp(device, 3) + n) * 2)
    assert pg.stats(f).replayed == 9, pg.explain(f)


def test_c06_tensors_outside_with_a_history_that_are_only_asked_what_they_are(device):
    weight = nn.Parameter(torch.ones(3, device=device))
    outer = weight.exp()
    f = pg.record(lambda x: x * torch.zeros_like(outer) + outer.new_ones(3) + outer.argmax() + (outer > 2).float(), warmup=1)
    for n in range(6):
        x = ramp(device, 3) + n
        assert_same(f(x), x * 0 + 2)
    assert pg.stats(f).replayed == 5, pg.explain(f)


def test_c09_a_cache_of_a_package_is_no_table(device, package):
    """More comes into it with each size, which is no change to what was recorded with others."""
    package.CACHE = {}
    exec("def cached(x):\n    n = len(x)\n    if n not in CACHE:\n        CACHE[n] = torch.full_like(x, 2.0)\n    return x * 2",
         vars(package))  # fmt: skip
    package.cached.__code__ = package.cached.__code__.replace(co_filename=package.__file__)
    f = pg.record(lambda x: package.cached(x), warmup=1)
    for n in range(40):
        x = ramp(device, 3 + (n // 3 if n < 30 else n - 30)) + n  # there is more in it after each third call
        assert_same(f(x), x * 2)
    assert pg.stats(f).recorded == 10, pg.explain(f)
    assert pg.stats(f).replayed == 30, pg.explain(f)


@may_run_live
@pytest.mark.parametrize("kind", ["getstate", "spawn"])
def test_c09_states_of_generators_on_the_host(device, kind):
    """They are read, or moved on, in no replay."""
    np = pytest.importorskip("numpy")
    seeds = np.random.SeedSequence(3), np.random.SeedSequence(3)
    dice = random.Random(3)

    def of(seeds):
        if kind == "spawn":
            return lambda x: x * float(np.random.default_rng(seeds.spawn(1)[0]).random())
        return lambda x: x * (dice.getstate()[1][0] % 1000)

    ours, theirs = (of(s) for s in seeds)
    g = pg.record(ours, warmup=1)
    for n in range(5):
        dice.seed(n)
        x = ramp(device, 3) + n
        assert_same(g(x), theirs(x))


def test_c09_an_array_that_cannot_be_written(device):
    np = pytest.importorskip("numpy")
    array = np.arange(3.0)
    array.setflags(write=False)
    f = pg.record(lambda x: x * float(array[1]), warmup=1)
    for n in range(4):
        assert_same(f(ramp(device, 3) + n), ramp(device, 3) + n)
    assert pg.stats(f).replayed == 3, pg.explain(f)
