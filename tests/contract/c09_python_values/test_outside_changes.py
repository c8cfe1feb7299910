"""C8, C9: a change from outside is noticed."""

import abc
import array
import collections
import contextvars
import ctypes
import functools
import operator
import threading
import types
import weakref

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.shared.corners import globals_as_before  # noqa: F401
from tests.helpers import changeable, counts, may_run_live, ramp, reasons

SCALE = 2.0


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
