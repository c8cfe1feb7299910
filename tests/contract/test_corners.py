"""Corners that ordinary programs turn: each of these was once wrong, lost or slow. By clause, as the other files."""

import abc
import array
import collections
import contextlib
import contextvars
import copy
import ctypes
import dataclasses
import enum
import functools
import gc
import operator
import os
import pickle
import random
import signal
import sys
import threading
import time
import types
import weakref

import pytest
import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

import phonograph as pg
from phonograph.devices import device_for, lock
from phonograph.testing import assert_same
from tests.helpers import assert_replays, changeable, counts, may_run_live, plain, ramp, reasons, side_by_side

SCALE = 2.0


@pytest.fixture(autouse=True)
def globals_as_before(request):
    before = dict(vars(request.module))
    yield
    vars(request.module).clear()
    vars(request.module).update(before)


class Table(list):
    """Situations for `parametrize`: functions that make (a function, what changes something for it)."""

    def __call__(self, make):
        self.append(pytest.param(make, id=make.__name__))
        return make


def set_scale(value=3.0):
    globals().update(SCALE=value)


# ---------------------------------------------------------------------------------------------------
# C8, C9: a change from outside

changes = Table()


@changes
def a_private_dictionary_of_a_module(device):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)])
            self._scales = {"a": 2.0}

        def forward(self, x):
            return self.layers(x) * self._scales["a"]

    torch.manual_seed(0)
    net = Net().to(device).requires_grad_(False)
    return net.forward, lambda: net._scales.update(a=3.0)


@changes
def a_global_behind_a_method_that_only_torch_calls(device):
    class Own(nn.Conv1d):
        def _conv_forward(self, x, weight, bias):
            return nn.functional.conv1d(x, weight * SCALE, bias)

    torch.manual_seed(0)
    own = Own(1, 1, 1).to(device).requires_grad_(False)
    return lambda x: own(x.view(1, 1, 4)), set_scale


@changes
def names_in_a_tuple(device):
    class Config:
        a = property(lambda self: SCALE)

    config = Config()

    def f(x):
        for name in ("a", "a"):
            x = x * getattr(config, name)
        return x

    return f, set_scale


@changes
def a_property_in_a_pattern(device):
    space = {}
    exec(
        "class C:\n    scale = property(lambda self: G[0])\nG = [2.0]\nc = C()\n"
        "def f(x):\n    match c:\n        case C(scale=s):\n            return x * s\n",
        space,
    )
    return space["f"], lambda: space["G"].__setitem__(0, 3.0)


@changes
def a_global_that_comes_later(device):
    space = {}
    exec("def f(x):\n    try:\n        return x * LATER\n    except NameError:\n        return x\n", space)
    return space["f"], lambda: space.update(LATER=3.0)


@changes
def an_attribute_that_a_tensor_gets_later(device):
    weight = torch.ones(4, device=device)
    return lambda x: x * weight * getattr(weight, "factor", 1.0), lambda: setattr(weight, "factor", 3.0)


@changes
def an_attribute_that_a_python_module_gets_later(device):
    config = types.ModuleType("config_of_mine")
    return lambda x: x * getattr(config, "factor", 1.0), lambda: setattr(config, "factor", 3.0)


@changes
def a_python_modules_own_getattr(device):
    config = types.ModuleType("config_of_mine")
    exec("def __getattr__(name):\n    return FACTORS[name]\nFACTORS = {'factor': 2.0}", vars(config))
    return lambda x: x * config.factor, lambda: config.FACTORS.update(factor=3.0)


@changes
def an_attribute_of_a_set(device):
    class Own(set):
        pass

    own = Own()
    own.scale = 2.0
    return lambda x: x * own.scale, lambda: setattr(own, "scale", 3.0)


@changes
def an_attribute_of_a_partial(device):
    scaled = functools.partial(lambda x: x)
    scaled.by = 2.0
    return lambda x: scaled(x) * scaled.by, lambda: setattr(scaled, "by", 3.0)


@changes
def a_partial_in_a_class(device):
    class Layer:
        act = staticmethod(functools.partial(lambda k, x: x * k * SCALE, 1.0))

        def run(self, x):
            return self.act(x)

    return Layer().run, set_scale


@changes
def a_callable_object_as_call(device):
    class Act:
        def __call__(self, x):
            return x * SCALE

    class Layer:
        __call__ = Act()

    layer = Layer()
    return lambda x: layer.__call__(x), set_scale


@changes
def a_cached_property_getter(device):
    class Layer:
        @property
        @functools.cache  # noqa: B019
        def by(self):
            return held[0]

    held = [2.0]
    layer = Layer()

    def change():
        held[0] = 3.0
        Layer.by.fget.cache_clear()

    return lambda x: x * layer.by, change


@changes
def a_cache_that_is_cleared(device):
    held = [2.0]

    @functools.lru_cache(maxsize=4)
    def table():
        return held[0]

    def change():
        held[0] = 3.0
        table.cache_clear()

    return lambda x: x * table(), change


@changes
def a_context_variable(device):
    variable = contextvars.ContextVar("variable", default=2.0)
    return lambda x: x * variable.get(), lambda: variable.set(3.0)


@changes
def a_threads_own_value(device):
    local = threading.local()
    local.by = 2.0
    return lambda x: x * local.by, lambda: setattr(local, "by", 3.0)


@changes
def an_array_of_pythons(device):
    held = array.array("d", [2.0])
    return lambda x: x * held[0], lambda: held.__setitem__(0, 3.0)


@changes
def a_ctypes_number(device):
    held = ctypes.c_double(2.0)
    return lambda x: x * held.value, lambda: setattr(held, "value", 3.0)


@changes
def a_view_of_a_dictionary(device):
    held = {"a": 2.0}
    values = held.values()
    return lambda x: x * sum(values), lambda: held.update(a=3.0)


@changes
def a_default_factory(device):
    held = collections.defaultdict(lambda: SCALE)
    return lambda x: x * held.default_factory(), set_scale


@changes
def a_replaced_default_factory(device):
    held = collections.defaultdict(lambda: 2.0)
    return lambda x: x * held.default_factory(), lambda: setattr(held, "default_factory", lambda: 3.0)


@changes
def a_dictionary_of_attributes_that_is_replaced(device):
    config = type("Config", (), {})()
    config.by = 2.0
    return lambda x: x * config.by, lambda: setattr(config, "__dict__", {"by": 3.0})


@changes
def the_bases_of_a_class(device):
    class One:
        by = 2.0

    class Two:
        by = 3.0

    class Own(One):
        pass

    own = Own()
    return lambda x: x * own.by, lambda: setattr(Own, "__bases__", (Two,))


@changes
def a_class_that_is_registered(device):
    class Kind(abc.ABC):  # noqa: B024
        pass

    class Own:
        pass

    own = Own()
    return lambda x: x * (3.0 if isinstance(own, Kind) else 2.0), lambda: Kind.register(Own)


@changes
def a_name_that_an_attrgetter_has(device):
    class Config:
        scale = property(lambda self: SCALE)

    config, get = Config(), operator.attrgetter("scale")
    return lambda x: x * get(config), set_scale


@changes
def a_module_with_slots(device):
    class Own(nn.Module):
        __slots__ = ("by",)

        def forward(self, x):
            return x * self.by

    own = Own()
    own.by = 2.0
    return own.forward, lambda: setattr(own, "by", 3.0)


@changes
def a_transform_of_a_distribution(device):
    transform = torch.distributions.AffineTransform(0.0, 2.0)
    return lambda x: transform(x), lambda: setattr(transform, "scale", 3.0)


@changes
def an_object_behind_a_proxy(device):
    class Config:
        by = 2.0

    config = Config()
    proxy = weakref.proxy(config)
    return lambda x, keep=config: x * proxy.by, lambda: setattr(config, "by", 3.0)


@changes
def a_value_on_builtins(device):
    import builtins

    builtins.factor_of_mine = 2.0
    space = {"__builtins__": builtins}
    exec("def f(x): return x * factor_of_mine", space)
    return space["f"], lambda: setattr(builtins, "factor_of_mine", 3.0)


@changes
def one_of_many_parameters_detached(device):
    many = nn.ParameterList([nn.Parameter(torch.ones(1, device=device)) for _ in range(80)])

    def f(x):
        return x * sum(1.0 for p in many if p.requires_grad)

    with torch.no_grad():
        return f, lambda: many[70].detach_()


@pytest.mark.parametrize("make", changes)
def test_c09_a_change_is_noticed(device, make):
    both, change = changeable(lambda: make(device))
    for _ in range(4):
        before = both(ramp(device, 4))
    assert counts(both) == (1, 1, 3), reasons(both)
    change()
    assert not torch.equal(both(ramp(device, 4)).live, before.live)
    for _ in range(4):
        both(ramp(device, 4))
    assert counts(both)[1:] == (2, 7), reasons(both)


@may_run_live
def test_c09_numpy_arrays_of_other_kinds(device, tmp_path):
    numpy = pytest.importorskip("numpy")
    mapped = numpy.memmap(tmp_path / "file", dtype="f8", mode="w+", shape=(2,))
    mapped[:] = 2.0
    objects = numpy.array([{"by": 2.0}], dtype=object)
    masked = numpy.ma.array([2.0, 2.0])

    def change(value):
        mapped[0] = masked[0] = objects[0]["by"] = value

    for read in (lambda x: x * float(mapped[0]), lambda x: x * objects[0]["by"], lambda x: x * float(masked[0])):
        change(2.0)
        f = pg.record(read, warmup=1)
        for n in range(6):
            change(2.0 + n // 3)
            assert_same(f(ramp(device, 4)), ramp(device, 4) * (2.0 + n // 3))


# ---------------------------------------------------------------------------------------------------
# C9: what the function does to Python objects


@may_run_live
@pytest.mark.parametrize("warmup", [0, 1])
def test_c09_what_is_done_once_after_a_change_is_done_once(device, warmup, capsys):
    weight, config = torch.ones(4, device=device), types.SimpleNamespace(on=False)

    @pg.record(warmup=warmup)
    def f(x):
        if config.on and not hasattr(weight, "ready"):
            weight.ready = True
            print("ready")
        return x * weight

    for n in range(9):
        config.on = n >= 4
        assert_same(f(ramp(device, 4)), ramp(device, 4))
    assert capsys.readouterr().out == "ready\n"


def test_c09_a_mode_that_is_switched_on_later_is_warmed_up(device):
    @functools.lru_cache
    def noise():
        return torch.rand(4, device=device)

    class Noisy(nn.Module):
        def forward(self, x):
            return x + noise() if self.training else x * 2

    net = Noisy().eval()
    f = pg.record(lambda x: net(x), warmup=1)
    for _ in range(3):
        f(ramp(device, 4))
    net.train()
    first = f(ramp(device, 4))
    for _ in range(4):
        assert_same(f(ramp(device, 4)), first)


@may_run_live
@pytest.mark.parametrize("maxsize", [None, 2])
def test_c09_a_cache_that_is_filled_while_a_call_is_recorded(device, maxsize):
    def make():
        @functools.lru_cache(maxsize=maxsize)
        def noise(n):
            return torch.rand(4, device=device)

        if maxsize is None:
            noise(0)
        return lambda x: x + noise(0) + noise(1)

    both = side_by_side(make, warmup=0)
    for _ in range(5):
        both(ramp(device, 4))


class WithSlot:
    __slots__ = ("n",)


@may_run_live
@pytest.mark.parametrize("warmup", [0, 1])
def test_c09_a_counter_in_a_slot_that_was_empty(device, warmup):
    held = WithSlot()

    def f(x):
        held.n = held.n + 1 if hasattr(held, "n") else 1
        return x * held.n

    f = pg.record(f, warmup=warmup)
    for n in range(1, 6):
        assert_same(f(ramp(device, 4)), ramp(device, 4) * n)
    del held.n
    assert_same(f(ramp(device, 4)), ramp(device, 4))


@may_run_live
@pytest.mark.parametrize("where", ["global", "cell"])
def test_c09_a_counter_that_the_function_itself_brings_into_being(device, where):
    space = {}
    source = {
        "global": "def f(x):\n    global N\n    try:\n        N += 1\n    except NameError:\n        N = 1\n    return x * N\n",
        "cell": "def make():\n    def f(x):\n        nonlocal n\n        try:\n            n += 1\n        except NameError:\n"
        "            n = 1\n        return x * n\n    if False:\n        n = 0\n    return f\nf = make()\n",
    }
    exec(source[where], space)
    f = pg.record(space["f"], warmup=0)
    for n in range(1, 6):
        assert_same(f(ramp(device, 4)), ramp(device, 4) * n)


@may_run_live
def test_c09_a_counter_in_an_object_of_a_builtin_kind(device):
    local, numbers, number = threading.local(), array.array("l", [0]), ctypes.c_long(0)
    local.n = 0

    def f(x):
        local.n += 1
        numbers[0] += 1
        number.value += 1
        return x * 2

    f = pg.record(f, warmup=1)
    for n in range(1, 6):
        f(ramp(device, 4))
        assert (local.n, numbers[0], number.value) == (n, n, n)


@may_run_live
def test_c09_a_new_equal_list_is_watched_like_the_old_one(device):
    held = types.SimpleNamespace(events=[])

    def f(x):
        held.events = []
        return x * 2

    f = pg.record(f, warmup=1)
    for _ in range(4):
        f(ramp(device, 4))
    assert pg.stats(f).replayed in (0, 3), reasons(f)
    held.events.append("a")
    for _ in range(3):
        f(ramp(device, 4))
        assert held.events == []


class Counting(dict):
    def __iter__(self):
        counted.append(1)
        return iter(["a"])

    def __getattribute__(self, name):
        counted.append(name)
        return super().__getattribute__(name)


counted = []


def test_c09_looking_at_an_object_runs_none_of_its_code(device):
    class Row:
        __slots__ = ("kept",)

        def __init__(self, kept):
            self.kept = kept

        def __getattr__(self, name):
            return self.kept[name]

    row, odd = Row({"s": 2.0}), Counting(a=1.0, b=2.0)
    f = pg.record(lambda x, keep=odd: x * row.s, warmup=1)
    counted.clear()
    for _ in range(4):
        assert_same(f(ramp(device, 4)), ramp(device, 4) * 2)
    assert not counted


# ---------------------------------------------------------------------------------------------------
# C9: what no code of the function reads does not count


class Trainer:
    def __init__(self, device):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 2).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.steps, self.history, self.data = 0, [], iter(range(1000))

    def step(self, x):
        self.optimizer.zero_grad()
        loss = self.model(x).square().sum()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def test_c09_a_trainer_that_counts_its_steps_outside_of_them(device):
    def make():
        trainer = Trainer(device)
        return trainer.step, trainer

    both = side_by_side(make)
    for _ in range(12):
        loss = both(torch.randn(2, 4, device=device))
        for trainer, value in ((both.state, loss.recorded), (both.live_state, loss.live)):
            trainer.steps += 1
            trainer.history.append(value)
            trainer.last = value
    live, recorded, _ = counts(both)
    assert live + recorded <= 5, reasons(both)


def test_c09_a_module_that_counts_its_calls_outside(device):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.seen = nn.Linear(4, 4), 0

        def forward(self, x):
            return self.layer(x)

    net = Net().to(device).requires_grad_(False)
    f = pg.record(net.forward, warmup=1)
    for _ in range(12):
        f(ramp(device, 4))
        net.seen += 1
    assert pg.stats(f).replayed == 11


@pytest.mark.parametrize("reads", ["getattr(self, name)", "vars(self)[name]", "self.__dict__[name]"])
def test_c09_an_attribute_that_is_read_by_a_computed_name(device, reads):
    space = {}
    exec(f"class C:\n    def f(self, x):\n        name = ''.join(['b', 'y'])\n        return x * {reads}\n", space)
    held = space["C"]()
    held.by = 2.0
    f = pg.record(held.f, warmup=1)
    for n in range(8):
        held.by = 2.0 + n // 4
        assert_same(f(ramp(device, 4)), ramp(device, 4) * (2.0 + n // 4))


def test_c09_an_attribute_that_a_constructor_reads(device):
    class Config:
        by = None

        def __init__(self):
            self.by = 2.0

    class Part:
        def __init__(self, config):
            self.factor = config.by

    config = Config()
    f = pg.record(lambda x: x * Part(config).factor, warmup=1)
    for n in range(8):
        config.by = 2.0 + n // 4
        assert_same(f(ramp(device, 4)), ramp(device, 4) * (2.0 + n // 4))


@may_run_live
def test_c09_an_ordered_dictionary_that_loses_its_first(device):
    held = collections.OrderedDict((n, 0) for n in "abcdef")

    def f(x):
        del held[next(iter(held))]
        return x * len(held)

    f = pg.record(f, warmup=1)
    for n in range(5, 0, -1):
        assert_same(f(ramp(device, 4)), ramp(device, 4) * n)
        assert list(held.items()) == [(k, 0) for k in "abcdef"[6 - n :]]


class Counts:
    def __init__(self):
        self.n = 0

    def close(self):
        self.n += 1

    def write(self, text):
        self.n += 1

    def keys(self):
        self.n += 1
        return ["a"]

    def __getitem__(self, key):
        return 2.0


EFFECTS = {
    "closing": lambda x, held: [contextlib.closing(held).__exit__(), x][1],
    "with closing": lambda x, held: with_closing(x, held),
    "dict": lambda x, held: x * dict(held)["a"],
    "stars": lambda x, held: (lambda **kw: x * kw["a"])(**held),
}


def with_closing(x, held):
    with contextlib.closing(held):
        return x * 2


@may_run_live
@pytest.mark.parametrize("effect", EFFECTS.values(), ids=EFFECTS)
def test_c09_an_effect_in_a_method_that_others_call(device, effect):
    held = Counts()
    f = pg.record(lambda x: effect(x, held), warmup=1)
    for n in range(1, 6):
        f(ramp(device, 4))
        assert held.n == n


class Shown:
    def keys(self):
        return self.shown

    def __getitem__(self, key):
        return 2.0


class Meter:
    def __init__(self, config):
        self.config, self.total = config, config.start

    def reset(self):
        self.__init__(self.config)


class Around:
    def __init__(self, config):
        self.config = config
        self.total = vars(config)["START".lower()]

    def again(self):
        self.__init__(self.config)


class Named:
    pass


def wrapped_constructor(method):
    @functools.wraps(method)
    def wrapper(*args):
        return method(*args)

    return wrapper


class Wrapped:
    @wrapped_constructor
    def __init__(self, config):
        self.total = config.start


class Derived(Meter):
    def __init__(self, config):
        super().__init__(config)


def named(**values):
    made = Named()
    made.__dict__.update(values)
    return made


def through(look_up):
    """A function that reads by one that it was handed."""
    return lambda x, held: x * look_up(held["a"], "START".lower())


READERS = {
    "keys": lambda x, held: x * len(dict(held["b"])),
    "constructor called again": lambda x, held: (held["c"].reset(), x * held["c"].total)[1],
    "wrapped constructor": lambda x, held: x * Wrapped(held["a"]).total,
    "constructor that looks around": lambda x, held: (held["d"].again(), x * held["d"].total)[1],
    "subclass": lambda x, held: x * Meter.__subclasses__()[0](held["a"]).total,
    "format": lambda x, held: x * float("{c.start}".format(c=held["a"])),
    "attrgetter": lambda x, held: x * operator.attrgetter("START".lower())(held["a"]),
    "getattr in a closure": through(getattr),
    "vars in a closure": through(functools.partial(lambda look, c, name: look(c)[name], vars)),
    "__getattribute__": lambda x, held: x * held["a"].__getattribute__("START".lower()),
    "upper": lambda x, held: x * getattr(held["a"], "START".lower()),
}


@may_run_live
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_c09_an_attribute_that_is_read_in_a_roundabout_way(device, read):
    config, shown = named(start=1.0), Shown()
    shown.shown = ["a"]
    held = {"a": config, "b": shown, "c": Meter(config), "d": Around(config)}
    f = pg.record(lambda x: read(x, held), warmup=1)
    for n in range(9):
        config.start = 1.0 + n // 3
        shown.shown = ["a", "b", "c"][: 1 + n // 3]
        assert_same(f(ramp(device, 4)), ramp(device, 4) * (1.0 + n // 3))


@may_run_live
def test_c09_an_attribute_that_is_written_in_a_roundabout_way(device):
    class Own:
        def __setattr__(self, name, value):
            super().__setattr__("_" + name, value)

    held = Own()

    def f(x):
        held.kind = 1
        return x * 2

    f = pg.record(f, warmup=1)
    for _ in range(3):
        f(ramp(device, 4))
    held.__dict__["_kind"] = 2
    f(ramp(device, 4))
    assert held._kind == 1


def test_c09_a_global_in_a_method_that_only_a_library_calls(device):
    class Held(collections.UserDict):
        def __missing__(self, key):
            return SCALE

        def close(self):
            kept.append(SCALE)

    kept, held = [], Held()
    f = pg.record(lambda x: x * held["a"], warmup=1)
    g = pg.record(lambda x: (contextlib.closing(held).__exit__(), x * 2)[1], warmup=1)
    for n in range(6):
        set_scale(2.0 + n // 3)
        assert_same(f(ramp(device, 4)), ramp(device, 4) * SCALE)
    pairs = [(g(ramp(device, 4)), len(kept)) for n in range(4)]
    assert [n for _, n in pairs] == [1, 2, 3, 4]
    set_scale(7.0)
    g(ramp(device, 4))
    assert kept == [3.0] * 4 + [7.0]


def test_c09_a_library_that_names_a_method_which_does_not_run(device):
    """That the standard library's code has the word `train` in it makes no difference."""

    class Task:
        def __init__(self):
            self.scale, self.seen = 2.0, 0

        def close(self):
            self.seen += 1

        def step(self, x):
            with contextlib.ExitStack():
                return x * self.scale

    task = Task()
    f = pg.record(task.step, warmup=1)
    for _ in range(12):
        f(ramp(device, 4))
        task.close()
    assert pg.stats(f).replayed == 11, reasons(f)


def test_c09_a_scheduler_beside_an_optimizer_made_with_keywords(device):
    class Task:
        def __init__(self):
            torch.manual_seed(0)
            self.model = nn.Linear(4, 3).to(device)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
            self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
            self.cache = {"a": 1.0}

        def scale(self):
            try:
                return self.cache["a"]
            except KeyError:
                return 2.0

        def step(self, x, y):
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(x), y) * self.scale()
            loss.backward()
            self.optimizer.step()
            return loss.detach()

    def make():
        task = Task()
        return task.step, task

    both = side_by_side(make)
    for _ in range(14):
        both(torch.randn(5, 4, device=device), torch.randint(0, 3, (5,), device=device))
        for task in (both.state, both.live_state):
            task.scheduler.step()
    live, recorded, _ = counts(both)
    assert live + recorded <= 4, reasons(both)


def test_c18_a_setting_that_changes_while_results_are_held(device):
    held = types.SimpleNamespace(by=1.0)
    f = pg.record(lambda x: x * held.by, warmup=1)
    for epoch in range(14):
        held.by = 1.0 + epoch
        for _ in range(60):
            result = f(torch.ones(40_000, device=device))
        assert result[0].item() == held.by
    assert not pg.stats(f).refusals, reasons(f)


def test_c19_new_shapes_between_many_replays_are_nothing_to_tell(device):
    f = pg.record(lambda a: a + 1, warmup=1, fallback="error")
    for n in range(80):
        for _ in range(3):
            f(torch.ones(4, device=device))
        f(torch.ones(5 + n, device=device))


def test_c07_a_state_dict_as_an_argument(device):
    layer = nn.Linear(3, 3).to(device)
    f = pg.record(lambda x, state: x * len(state._metadata) + state["weight"][0].detach(), warmup=1)
    for n in range(5):
        x = ramp(device, 3, start=n)
        assert_same(f(x, layer.state_dict()), x + layer.weight[0].detach())
    assert pg.stats(f).replayed == 4, reasons(f)


def test_c09_an_attribute_that_the_function_had_before(device):
    def h(x):
        return x * h.scale

    h.scale = 1.0
    h = pg.record(h, warmup=1)
    for n in range(6):
        if n == 3:
            h.scale = 4.0
        assert_same(h(ramp(device, 3)), ramp(device, 3) * (4.0 if n >= 3 else 1.0))


@may_run_live
def test_c12_a_replaced_dictionary_of_attributes_is_put_back(device):
    held, state = named(n=1), {"n": 5}

    def f(x):
        held.__dict__ = state
        held.n += 1
        return x * held.n

    f = pg.record(f, warmup=0)
    for n in range(3):
        assert_same(f(ramp(device, 3)), ramp(device, 3) * (6 + n))
    assert state["n"] == 8


@may_run_live
def test_c12_a_view_of_every_second_byte(device):
    memory = bytearray(8)
    view = memoryview(memory)[::2]

    def f(x):
        view[0] += 1
        return x * 2

    f = pg.record(f, warmup=1)
    for n in range(1, 5):
        f(ramp(device, 3))
        assert memory[0] == n


def test_c17_a_reset_of_a_method_while_another_thread_is_busy(device):
    class Own:
        @pg.record(warmup=1)
        def f(self, x):
            return x * 2

    own, x = Own(), ramp(device, 3)
    for _ in range(3):
        own.f(x)
    go, done = threading.Event(), threading.Event()

    def slow(a):
        go.set()
        done.wait(10)
        return a

    thread = threading.Thread(target=lambda: pg.record(slow, warmup=1)(x))
    thread.start()
    go.wait()
    pg.reset(Own.f)
    done.set()
    thread.join()
    own.f(x)
    own.f(x)
    assert pg.stats(Own.f).recorded == 2


@pytest.mark.parametrize(("kind", "recordings"), [(int, 12), (float, 2)])  # floats that have changed are followed
def test_c18_a_setting_that_changes_once_an_epoch_for_ever(device, kind, recordings):
    held = types.SimpleNamespace(by=kind(1))
    f = pg.record(lambda x: x * held.by, warmup=1)
    for epoch in range(12):
        held.by = kind(1 + epoch)
        for _ in range(60):
            assert_same(f(ramp(device, 4)), ramp(device, 4) * held.by)
    stats = pg.stats(f)
    assert stats.recorded == recordings, reasons(f)
    assert stats.live == recordings


def test_c19_a_number_that_is_another_in_each_call(device):
    f = pg.record(lambda x, by: x * by, warmup=1)
    for n in range(64):
        assert_same(f(ramp(device, 4), n), ramp(device, 4) * n)
    with pytest.warns(pg.RunsLive, match="another value of `by`"):
        f(ramp(device, 4), 64)
    assert pg.stats(f).refusals


# ---------------------------------------------------------------------------------------------------
# C6: optimizers and gradients


@may_run_live
@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
@pytest.mark.parametrize("foreach", [False, True])
def test_c06_a_learning_rate_of_zero(device, kind, foreach):
    """Where nothing has been learned yet, torch's capturable step would divide 0 by 0."""

    def make():
        torch.manual_seed(0)
        table = nn.Embedding(6, 3).to(device)
        optimizer = getattr(torch.optim, kind)(table.parameters(), lr=0.01, foreach=foreach)

        def step(rows):
            optimizer.zero_grad()
            table(rows).square().sum().backward()
            optimizer.step()

        return step, [table, optimizer]

    both = side_by_side(make)
    for rate in [0.0, 0.01, 0.01, 0.01, 0.0, 0.0, 0.01, 0.01, 0.01]:
        for state in (both.state, both.live_state):
            state[1].param_groups[0]["lr"] = rate
        both(torch.tensor([1, 2], device=device))
    assert torch.isfinite(both.state[0].weight).all()
    assert counts(both)[2] >= 7, reasons(both)


def test_c06_a_learning_rate_of_zero_where_no_step_is_taken(device):
    weight = nn.Parameter(torch.ones(3, device=device))
    optimizer = torch.optim.Adam([weight], lr=0.0)

    def gradients(x):
        optimizer.zero_grad()
        (weight * x).sum().backward()

    f = pg.record(gradients, warmup=1)
    for n in range(4):
        f(ramp(device, 3, start=n))
        assert_same(weight.grad, ramp(device, 3, start=n))
    assert pg.stats(f).replayed == 3, reasons(f)


class Rate:
    def __init__(self, optimizer):
        self.value = 2 * optimizer.param_groups[0]["lr"]

    def again(self, optimizer):
        self.__init__(optimizer)
        return self


RATES = {
    "by its name": lambda rate, optimizer: Rate(optimizer),
    "by its type": lambda rate, optimizer: type(rate)(optimizer),
    "again": lambda rate, optimizer: rate.again(optimizer),
}


@pytest.mark.parametrize("read", RATES.values(), ids=RATES)
def test_c09_a_rate_that_a_constructor_reads(device, read):
    def make():
        weight = nn.Parameter(torch.ones(3, device=device))
        optimizer = torch.optim.SGD([weight], lr=0.5)
        rate = Rate(optimizer)

        def step(x):
            optimizer.zero_grad()
            (weight * x).sum().backward()
            now = read(rate, optimizer)
            optimizer.step()
            return x * now.value

        return step, (weight, optimizer)

    both = side_by_side(make)
    for n in range(9):
        for _, optimizer in (both.state, both.live_state):
            optimizer.param_groups[0]["lr"] = 0.5 / (1 + n // 3)
        both(ramp(device, 3))


@may_run_live
def test_c06_adam_on_float16_parameters(device):
    def make():
        weight = nn.Parameter(torch.ones(3, dtype=torch.half, device=device))
        optimizer = torch.optim.Adam([weight], lr=1e-3, eps=1e-4)

        def step(x):
            optimizer.zero_grad()
            (weight * x).sum().backward()
            optimizer.step()

        return step, weight

    both = side_by_side(make, tolerance=5e-3)
    for _ in range(50):
        both(torch.tensor([100.0, 1000.0, 1.0], dtype=torch.half, device=device))


@may_run_live
def test_c05_a_gradient_that_is_handed_out_keeps_its_value(device):
    weight = nn.Parameter(torch.zeros(2, device=device))

    def f(x):
        weight.grad = None
        (weight * x).sum().backward()
        return weight.grad

    f = pg.record(f, warmup=1)
    held = [f(torch.full((2,), float(n), device=device)) for n in range(6)]
    for n, gradient in enumerate(held):
        assert_same(gradient, torch.full((2,), float(n), device=device))


@may_run_live
def test_c06_a_view_of_a_weight_is_written_without_gradients(device):
    torch.manual_seed(0)

    def make():
        layer = nn.Linear(4, 4).to(device)

        @torch.no_grad()
        def f(x):
            for row in layer.weight.unbind(0):
                row.mul_(0.5)
            return layer(x)

        return f, layer

    both = side_by_side(make)
    for n in range(6):
        both(ramp(device, 2, 4, start=n))


# ---------------------------------------------------------------------------------------------------
# C7: arguments


class SaysEqual(nn.Module):
    def __init__(self, value, device):
        super().__init__()
        self.register_buffer("by", torch.full((3,), value, device=device))

    def __eq__(self, other):
        return isinstance(other, SaysEqual)

    __hash__ = nn.Module.__hash__


class SaysEqualToo(SaysEqual):
    def __hash__(self):
        return 7


class Odd(enum.Enum):
    ONE = 1
    TWO = 2

    def __eq__(self, other):
        return isinstance(other, Odd)

    def __hash__(self):
        return 7


class Tagged(float):
    tag = 0.0


class Box:
    def __init__(self, t, meta):
        self.t, self.meta = t, meta


torch.utils._pytree.register_pytree_node(Box, lambda b: ([b.t], b.meta), lambda ts, meta: Box(next(iter(ts)), meta))


@dataclasses.dataclass(slots=True)
class Slotted(WithSlot):
    x: torch.Tensor


def tagged(value):
    number = Tagged(1.0)
    number.tag = value
    return number


def slotted(x, value):
    made = Slotted(x)
    made.n = value
    return made


PAIRS = {
    "modules that say they are equal": lambda x: (
        lambda m: x * m.by, SaysEqualToo(1.0, x.device), SaysEqualToo(2.0, x.device)),
    "enums that say they are equal": lambda x: (lambda e: x * e.value, Odd.ONE, Odd.TWO),
    "dictionary keys 1 and 1.0": lambda x: (lambda d: next(iter(d.values())) // next(iter(d))[0], {(1,): x}, {(1.0,): x}),
    "dictionary keys 0.0 and -0.0": lambda x: (lambda d: x / next(iter(d)), {0.0: x}, {-0.0: x}),
    "floats with a tag": lambda x: (lambda v: x * v.tag, tagged(1.0), tagged(2.0)),
    "factories": lambda x: (lambda d: x * d.default_factory(), collections.defaultdict(lambda: 2.0),
                            collections.defaultdict(lambda: 3.0)),
    "slots that are no fields": lambda x: (lambda s: s.x * s.n, slotted(x, 1.0), slotted(x, 2.0)),
    "contexts of pytree": lambda x: (lambda b: b.t * b.meta["a"], Box(x, {"a": 1}), Box(x, {"a": 2.0})),
}  # fmt: skip


@may_run_live
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_c07_arguments_that_only_look_the_same(device, pair):
    f, one, two = pair(ramp(device, 3))
    recorded = pg.record(f, warmup=1)
    for argument in (one, one, one, two, two, two, one, two):
        assert_same(recorded(argument), f(argument))


@may_run_live
@pytest.mark.parametrize("kind", ["key", "context"])
def test_c09_an_object_within_an_argument_that_is_no_leaf(device, kind):
    held = types.SimpleNamespace() if kind == "context" else WithSlot()
    held.n = 2.0
    f = pg.record(lambda d: next(iter(d.values())) * next(iter(d)).n if kind == "key" else d.t * d.meta.n, warmup=1)
    for n in range(6):
        held.n = 2.0 + n // 3
        x = ramp(device, 3)
        assert_same(f({held: x} if kind == "key" else Box(x, held)), x * held.n)


@may_run_live
def test_c07_questions_about_where_an_argument_comes_from(device):
    weight = torch.ones(3, device=device, requires_grad=True)

    def f(a):
        with torch.no_grad():
            return a * 2 if a.is_leaf else a * 3

    recorded = pg.record(f, warmup=1)
    for _ in range(4):
        assert_same(recorded(weight * 1), f(weight * 1))
    with torch.inference_mode():
        inferred = torch.ones(3, device=device)
    with torch.no_grad():
        recorded = pg.record(lambda v: v * 2 if v.is_inference() else v * 3, warmup=1)
        for _ in range(4):
            assert_same(recorded(inferred), torch.full((3,), 2.0, device=device))


@may_run_live
def test_c07_the_default_device_is_part_of_the_signature(device):
    f = pg.record(lambda x: x + torch.ones(3).to(x.device).mean() + torch.ones(3).sum().to(x.device), warmup=1)
    with torch.device("cpu"):
        for _ in range(2):
            assert_same(f(ramp(device, 3)), ramp(device, 3) + 4)
    g = pg.record(lambda x: x + torch.ones(3, device=x.device), warmup=1)
    with torch.device(device):
        for _ in range(4):
            assert_same(g(ramp(device, 3)), ramp(device, 3) + 1)
    assert pg.stats(g).replayed == 3, reasons(g)


@may_run_live
def test_c07_a_list_that_contains_itself(device):
    loop = []
    loop.append(loop)
    f = pg.record(lambda x, loop: x * len(loop), warmup=1)
    for _ in range(3):
        assert_same(f(ramp(device, 3), loop), ramp(device, 3))


def test_c07_an_argument_called_self(device):
    def f(self, x):
        return x * self

    recorded = pg.record(f, warmup=1)
    for _ in range(3):
        assert_same(recorded(self=2, x=ramp(device, 3)), ramp(device, 3) * 2)


class Checked(collections.namedtuple("Checked", "t")):
    def __new__(cls, t):
        if not isinstance(t, torch.Tensor):
            raise TypeError("no tensor")
        return super().__new__(cls, t + 1)


def test_c09_objects_of_a_class_in_reach_are_copied(device):
    corner = collections.namedtuple("corner", "x")

    @dataclasses.dataclass
    class Edge:
        x: object

    both = plain(lambda x: (corner(x + 1), Edge(x + 2)))
    both(ramp(device, 3))
    both(ramp(device, 3))
    for _ in range(3):
        copy.deepcopy((corner(1), Edge(2)))
        assert_replays(both, ramp(device, 3))
    assert counts(both) == (1, 1, 4)


def test_c04_a_named_tuple_with_a_constructor_of_its_own(device):
    both = plain(lambda x: Checked(x))
    for n in range(4):
        both(ramp(device, 3, start=n))
    assert_replays(both, ramp(device, 3))


@may_run_live
@pytest.mark.parametrize("size", [3, 30_000])
def test_c04_results_of_two_dtypes_in_one_memory(device, size):
    """A write to one moves the version of the other on, for autograd."""
    f = pg.record(lambda x: (lambda y: (y, y.view(torch.int32)))(x * 2), warmup=1)
    for _ in range(4):
        weight = torch.ones(size, device=device, requires_grad=True)
        y, v = f(torch.ones(size, device=device))
        z = (weight * y).sum()
        v.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.backward()


@may_run_live
def test_c04_a_state_dict(device):
    layer = nn.Linear(2, 2).to(device)
    f = pg.record(lambda x: layer.state_dict(), warmup=1)
    for _ in range(4):
        assert f(ramp(device, 3))._metadata == layer.state_dict()._metadata


# ---------------------------------------------------------------------------------------------------
# C11: values read on the host without an operator


def written_at(rows, x):
    x[rows,] = 7.0
    return x


READS = {
    "torch.tensor": lambda x: x + torch.tensor([x[0], x[1], 2.0], device=x.device),
    "torch.as_tensor": lambda x: x + torch.as_tensor([x[0], 2.0, 3.0], device=x.device),
    "new_tensor": lambda x: x + x.new_tensor([x[0], x[1], 2.0]),
    "FloatTensor": lambda x: x + torch.FloatTensor([x[0], x[1], 2.0]).to(x.device),
    "a list as index": lambda x: x.repeat(9, 1)[[x[0].long(), x[1].long()],],
    "a list as index of a write": lambda x: written_at([x[0].long(), x[1].long()], x.repeat(9, 1)),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
}


@may_run_live
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_c11_values_that_python_reads(device, read):
    f = pg.record(read, warmup=1)
    for n in range(5):
        x = ramp(device, 3, start=n)
        assert_same(f(x), read(x))


@may_run_live
def test_c11_what_a_distribution_reads_otherwise(device):
    """Turning its checks off would not help."""
    x = torch.tensor([0.2, 0.8], device=device)
    kind = torch.distributions.Categorical(x, validate_args=False)
    f = pg.record(lambda x: x * kind.sample().item(), warmup=0)
    f(x)
    assert "reads a tensor's value on the host" in reasons(f)
    assert "validate_args" not in reasons(f)


@may_run_live
def test_c11_a_mask_of_which_torch_asks_whether_it_is_causal(device):
    encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).to(device)
    x = torch.ones(2, 4, 8, device=device)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(4, device=device)
    f, g = (pg.record(lambda x, kw=kw: encoder(x, mask=mask, **kw), warmup=0) for kw in ({}, {"is_causal": True}))
    f(x)
    assert "pass is_causal as well as the mask" in reasons(f)
    g(x)
    assert pg.stats(g).recorded == 1, reasons(g)


@may_run_live
def test_c11_an_array_as_an_argument(device):
    np = pytest.importorskip("numpy")
    f = pg.record(lambda x, rows: x[: len(rows)] * 2)
    for _ in range(2):
        assert_same(f(ramp(device, 3), np.arange(2)), ramp(device, 3)[:2] * 2)
    assert pg.stats(f).replayed == 1
    assert_same(f(ramp(device, 3), np.arange(1000)), ramp(device, 3) * 2)
    assert "takes an object of class numpy.ndarray as " in reasons(f)
    assert "pass a tensor: torch.from_numpy(array)" in reasons(f)


@may_run_live
def test_c11_a_constant_that_is_copied_from_the_host(device):
    f = pg.record(lambda x: x + torch.tensor([1.0, 2.0, 3.0], device=x.device), warmup=0)
    for n in range(4):
        assert_same(f(ramp(device, 3, start=n)), ramp(device, 3, start=n) + torch.tensor([1.0, 2.0, 3.0], device=device))
    assert pg.stats(f).replayed == 4, reasons(f)


@may_run_live
@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_c11_a_mask_that_decides_which_way_an_encoder_takes(device):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 1).to(device).eval()

    @torch.no_grad()
    def f(x, mask):
        return encoder(x, src_key_padding_mask=mask)

    recorded = pg.record(f, warmup=1)
    x = torch.randn(2, 4, 8, device=device)
    holes = torch.tensor([[0, 1, 0, 0], [0, 0, 1, 0]], device=device).bool()
    right = torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1]], device=device).bool()
    for mask in (holes, holes, holes, right, right, holes):
        assert_same(recorded(x, mask), f(x, mask))


@may_run_live
@pytest.mark.parametrize("draw", ["randn", "rand", "normal"])
def test_c02_numpys_generators(device, draw):
    numpy = pytest.importorskip("numpy")

    def make():
        state = numpy.random.RandomState(0)
        return lambda x: x * float(getattr(state, draw)()) + float(getattr(numpy.random, draw)())

    numpy.random.seed(0)
    both = side_by_side(make)
    for n in range(6):
        both(ramp(device, 3, start=n))


@may_run_live
def test_c01_an_array_that_shows_a_tensor_which_the_call_writes():
    stage = torch.zeros(2)
    view = stage.numpy()

    def f(x):
        stage.copy_(x)
        return x * float(view[0])

    recorded = pg.record(f, warmup=1)
    for n in (1, 1, 1, 1, 2, 2, 3, 3):
        assert_same(recorded(torch.full((2,), float(n))), torch.full((2,), float(n * n)))


@may_run_live
@pytest.mark.parametrize("change", [lambda y: y.apply_(lambda v: max(v, 3.0) * 2), lambda y: y.map_(y + 1, lambda a, b: a * b)],
                         ids=["apply_", "map_"])  # fmt: skip
def test_c01_python_code_for_each_element(change):
    both = plain(lambda x: change(x.clone()))
    for n in range(5):
        both(torch.full((2,), float(n)))


@may_run_live
@pytest.mark.parametrize("table", [lambda a: {a: 5.0}, lambda a: WeakTensorKeyDictionary({a: 5.0})], ids=["dict", "weak"])
def test_c07_an_argument_is_looked_up(device, table):
    a, b = torch.ones(2, device=device), torch.full((2,), 3.0, device=device)
    scale = table(a)
    recorded = pg.record(lambda x: x * scale.get(x, 1.0), warmup=1)
    for n in range(8):
        x = a if n % 3 == 2 else b
        assert_same(recorded(x), x * (5.0 if n % 3 == 2 else 1.0))


@may_run_live
def test_c07_whether_an_argument_is_in_a_set(device):
    a, b = torch.ones(2, device=device), torch.full((2,), 3.0, device=device)
    known = {a}
    recorded = pg.record(lambda x: x * (5.0 if x in known else 1.0), warmup=1)
    for n in range(8):
        x = a if n % 3 == 2 else b
        assert_same(recorded(x), x * (5.0 if n % 3 == 2 else 1.0))


@may_run_live
def test_c08_how_often_a_weight_was_written(device):
    class Folded(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.seen = nn.Parameter(torch.ones(2, device=device)), -1

        def forward(self, x):
            if self.seen != self.weight._version:
                self.folded, self.seen = (self.weight * 2).detach(), self.weight._version
            return x * self.folded

    found = []
    for wrap in (lambda m: m, pg.record):
        module = wrap(Folded())
        results = []
        for n in range(9):
            if n in (4, 7):
                with torch.no_grad():
                    module.weight.add_(1)
            results.append(module(ramp(device, 2)))
        found.append(results)
    assert_same(*found)


@may_run_live
@pytest.mark.parametrize("error", [SystemExit, GeneratorExit, type("Own", (BaseException,), {})])
def test_c13_what_was_done_before_an_exception_that_is_no_error(device, error):
    total = torch.zeros(1, device=device)

    def f(x, stop):
        total.add_(x)
        if stop:
            raise error
        return total.clone()

    f = pg.record(f, warmup=1)
    for _ in range(3):
        f(torch.ones(1, device=device), False)
    for _ in range(4):
        with pytest.raises(error):
            f(torch.ones(1, device=device), True)
    assert total.item() == 7


@may_run_live
def test_c13_an_exception_that_the_function_handles(device):
    def f(x):
        try:
            return torch.linalg.cholesky(x)
        except RuntimeError:
            return torch.linalg.cholesky(x + 10 * torch.eye(2, device=device))

    recorded = pg.record(f, warmup=1)
    for sign in (1, 1, 1, -1, -1, 1):
        x = sign * torch.eye(2, device=device)
        assert_same(recorded(x), f(x))


class Ignoring:
    def __enter__(self):
        pass

    def __exit__(self, kind, *_):
        return kind in (RuntimeError, IndexError, torch.linalg.LinAlgError)


def counts_at_the_end(factor, st):
    done = False
    try:
        y = torch.linalg.cholesky(factor)
        done = True
        return y
    finally:
        if not done:
            st.failed += 1


def goes_on_after_a_context(factor, st):
    y = factor * 0
    with Ignoring():
        y = torch.linalg.cholesky(factor)
    return y


def is_busy_for_a_time(factor, st):
    st.busy = True
    y = torch.linalg.cholesky(factor)
    st.busy = False
    return y


def calls_back(factor, st):
    with contextlib.ExitStack() as stack:
        stack.callback(st.calls.append, 1)
        return torch.linalg.cholesky(factor)


@may_run_live
@pytest.mark.parametrize("function", [counts_at_the_end, goes_on_after_a_context, is_busy_for_a_time, calls_back])
def test_c13_what_runs_after_an_operators_exception(device, function):
    """A replay does not know that code: it raises, and that is all."""
    found = []
    for wrap in (lambda f: f, lambda f: pg.record(f, warmup=1)):
        st = types.SimpleNamespace(failed=0, busy=False, calls=[])
        f = wrap(lambda x, st=st: function(x, st))
        results = []
        for sign in (1, 1, 1, -1, 1, -1):
            try:
                results.append(f(sign * torch.eye(2, device=device)))
            except RuntimeError as e:
                results.append(type(e).__name__)
            results.append((st.failed, st.busy, len(st.calls)))
        found.append(results)
    assert_same(*found)


RAISING = {
    "division": lambda x: torch.div(torch.ones_like(x), x, rounding_mode="floor"),
    "masked_scatter": lambda x: torch.zeros(2, device=x.device).masked_scatter(x > 0, torch.ones(2, device=x.device)),
    "bernoulli": lambda x: torch.bernoulli(x / 2.0),
}


@may_run_live
@pytest.mark.parametrize("operator", RAISING.values(), ids=RAISING)
def test_c13_an_exception_of_an_operator_that_rarely_raises(operator):
    """(On CUDA such operators end the process's use of the device.)"""

    def f(x):
        try:
            return operator(x) + 0.0
        except RuntimeError:
            return x * 0.0 - 1

    recorded = pg.record(f, warmup=1)
    for n in (1, 1, 1, 0, 5, 1, 0):
        x = torch.full((2,), n)
        torch.manual_seed(n)
        expected = f(x)
        torch.manual_seed(n)
        assert_same(recorded(x), expected)


@may_run_live
@pytest.mark.parametrize("recorded", [True, False])
def test_c13_a_clause_for_what_no_operator_raises(recorded):
    def others(x, i):
        try:
            return x[i]
        except (KeyError, OSError):
            return x * 0

    def its_own(x, i):
        try:
            return x[i]
        except (KeyError, IndexError):
            return x * 0

    function = others if recorded else its_own
    f = pg.record(function, warmup=1)
    for n in (0, 1, 2, 9, 1):
        x, i = torch.ones(3) + n, torch.tensor([n])
        try:
            expected = function(x, i)
        except IndexError:
            with pytest.raises(IndexError):
                f(x, i)
        else:
            assert_same(f(x, i), expected)
    if sys.version_info >= (3, 11):
        assert (pg.stats(f).replayed > 0) == recorded, pg.explain(f)


# ---------------------------------------------------------------------------------------------------
# C11, C12: what merely lies in reach


@may_run_live
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_c11_a_nested_tensor_as_an_argument(device, caplog):
    f = pg.record(lambda t: t * 2, warmup=1)
    for _ in range(3):
        parts = f(torch.nested.nested_tensor([torch.ones(2, 3, device=device), torch.ones(1, 3, device=device)])).unbind()
        assert [p.tolist() for p in parts] == [[[2.0] * 3] * 2, [[2.0] * 3]]
    assert "takes a nested tensor" in reasons(f)
    assert not [r for r in caplog.records if r.levelname == "ERROR"]


@pytest.mark.parametrize("kind", ["sparse", "lazy", "mkldnn"])
def test_c11_tensors_without_memory_in_reach(device, kind):
    if kind == "mkldnn" and device.type != "cpu":
        pytest.skip("mkldnn tensors are on the CPU")
    odd = {
        "sparse": lambda: torch.eye(3, device=device).to_sparse(),
        "lazy": lambda: nn.LazyLinear(4),
        "mkldnn": lambda: torch.ones(3).to_mkldnn(),
    }[kind]()
    f = pg.record(lambda x, odd=odd: x * 2, warmup=1)
    for n in range(4):
        assert_same(f(ramp(device, 3, start=n)), ramp(device, 3, start=n) * 2)
    assert pg.stats(f).replayed == 3, reasons(f)


@may_run_live
def test_c11_a_sparse_tensor_that_is_used(device):
    neighbours = torch.eye(3, device=device).to_sparse()
    f = pg.record(lambda x: neighbours @ x, warmup=1)
    for n in range(4):
        assert_same(f(ramp(device, 3, 3, start=n)), ramp(device, 3, 3, start=n))


# ---------------------------------------------------------------------------------------------------
# C14, C17: others at work at the same time


def test_c17_a_reset_in_the_middle_of_a_capture(device):
    big = torch.ones(50_000, device=device)
    other = pg.record(lambda a: a + 1, warmup=0)

    def f(a):
        y = a.sin()
        pg.reset(other)
        gc.collect()
        z = y.cos() + a
        return (z.exp() + y).sum(), z

    recorded = pg.record(f, warmup=0)
    for _ in range(4):
        other(big)
        other(big)
        assert_same(recorded(big), f(big))


def test_c17_a_reset_while_another_thread_warms_up(device):
    started, done = threading.Event(), threading.Event()
    other = pg.record(lambda a: a + 1, warmup=0)
    other(ramp(device, 3))

    def f(a):
        started.set()
        return a + (1.0 if done.wait(20) else 100.0)

    def resets():
        started.wait()
        pg.reset(other)
        done.set()

    thread = threading.Thread(target=resets)
    thread.start()
    assert_same(pg.record(f, warmup=1)(ramp(device, 3)), ramp(device, 3) + 1)
    thread.join()
    other(ramp(device, 3))
    assert pg.stats(other).recorded == 2


def test_c14_threads_that_draw_random_numbers_during_a_capture(device):
    drawn, stop = [], threading.Event()

    def draws():
        while not stop.is_set():
            drawn.append(random.random())
            time.sleep(0)

    thread = threading.Thread(target=draws, daemon=True)
    thread.start()
    try:
        f = pg.record(lambda a: functools.reduce(lambda a, _: a.sin(), range(100), a), warmup=0)
        for n in (2, 5, 3, 7, 4, 6):
            f(torch.ones(n, device=device))
    finally:
        stop.set()
        thread.join()
    assert len(set(drawn)) == len(drawn)
    assert pg.stats(f).recorded == 6, reasons(f)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers")
def test_c14_a_signal_handler_that_calls_a_recorded_function(device):
    def chain(a):
        for _ in range(200):
            a = a * 1.001 + 1
        return a

    one, two = torch.ones(500, device=device), torch.full((500,), 5.0, device=device)
    expected = chain(one)
    f = pg.record(chain, warmup=1)
    for _ in range(3):
        f(one)
    going = [True]

    def handler(*_):
        f(two)
        if going:  # set again only now: on a machine that is slow, or busy, handlers would begin within each other without end
            signal.setitimer(signal.ITIMER_REAL, 0.007)

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    try:
        for _ in range(150):
            assert_same(f(one), expected)
    finally:
        going.clear()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_c14_a_fork_while_another_thread_is_busy(device):
    if device.type != "cpu":
        pytest.skip("CUDA does not survive a fork")
    f = pg.record(lambda a: a + 1, warmup=0)
    f(ramp(device, 3))
    busy, done = threading.Event(), threading.Event()

    def holds():
        with lock:
            busy.set()
            done.wait()

    thread = threading.Thread(target=holds)
    thread.start()
    busy.wait()
    child = os.fork()
    if not child:
        begin = time.monotonic()
        f(torch.ones(3))
        os._exit(0 if time.monotonic() - begin < 5 else 1)
    done.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


@pg.record
def decorated(a):
    return a + 1


def test_c16_a_decorated_function_is_pickled_by_its_name():
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    assert copy.deepcopy(decorated) is not None


def test_c15_held_results_keep_no_more_memory_than_they_need(device):
    if device.type != "cpu":
        pytest.skip("the arena is the CPU device's")
    arena = device_for(device)._arena
    big, small, kept, segments = torch.ones(4_000_000), torch.ones(50_000), [], []
    for _ in range(3):
        f, g = pg.record(lambda a: (a + 1) * 2, warmup=0), pg.record(lambda a: a + 1, warmup=0)
        f(big)
        kept.append(g(small))
        segments += [weakref.ref(s) for s in arena.segments]
        pg.reset(f)
        pg.reset(g)
        del f, g
        gc.collect()
    alive = {id(s): s.nbytes for ref in segments if (s := ref()) is not None}
    assert sum(alive.values()) < 2 * big.nbytes
    assert [t.sum().item() for t in kept] == [100_000.0] * 3


def test_c12_a_failure_of_our_own_is_said_and_the_call_runs_live(device, monkeypatch, caplog):
    def broken(*_, **__):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("phonograph.engine.making.record", broken)
    f = pg.record(lambda x: x * 2, warmup=0)
    with pytest.warns(pg.RunsLive, match="phonograph itself failed"):
        assert_same(f(ramp(device, 3)), ramp(device, 3) * 2)
    assert "a bug" in caplog.text
    caplog.clear()
