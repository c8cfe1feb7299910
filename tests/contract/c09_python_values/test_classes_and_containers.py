"""C9: classes, containers, and objects that hold others."""

import abc
import copy
import enum
import functools
import itertools
import types
import weakref
from collections import deque

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.shared.noticing import Table, assert_noticed, globals_as_before, loader_of, set_in_a_copy  # noqa: F401
from tests.helpers import counts, may_run_live, ramp

FACTOR = 2.0


SETTINGS = {"scale": 2.0}


def set_factor(value=3.0):
    globals().update(FACTOR=value)


# ---------------------------------------------------------------------------------------------------
# C9: classes

classes = Table()


@classes
def attribute_of_an_abstract_class(device):
    class Scale(abc.ABC):  # noqa: B024
        by = 2.0

    return lambda x: x * Scale.by, lambda: setattr(Scale, "by", 3.0)


@classes
def attribute_that_a_subclass_shadows_later(device):
    class Base:
        by = 2.0

    class Own(Base):
        pass

    own = Own()
    return lambda x: x * own.by, lambda: setattr(Own, "by", 3.0)


@classes
def method_replaced(device):
    class Scale:
        def of(self, x):
            return x * 2

    scale = Scale()
    return lambda x: scale.of(x), lambda: setattr(Scale, "of", lambda self, x: x * 3)


@classes
def forward_of_a_module_class_replaced(device):
    class Net(nn.Module):
        def forward(self, x):
            return x * 2

    net = Net()
    return lambda x: net(x), lambda: setattr(Net, "forward", lambda self, x: x * 3)


@classes
def forward_of_a_layer_replaced(device):
    net = nn.Sequential(nn.Tanh(), nn.Sigmoid())
    return lambda x: net(x), lambda: setattr(net[0], "forward", lambda x: x * 3)


@classes
def property_replaced(device):
    class Scale:
        @property
        def by(self):
            return 2.0

    scale = Scale()
    return lambda x: x * scale.by, lambda: setattr(Scale, "by", property(lambda self: 3.0))


@classes
def static_method_replaced(device):
    class Scale:
        @staticmethod
        def of(x):
            return x * 2

    return lambda x: Scale.of(x), lambda: setattr(Scale, "of", staticmethod(lambda x: x * 3))


@classes
def class_method_replaced(device):
    class Scale:
        @classmethod
        def of(cls, x):
            return x * 2

    return lambda x: Scale.of(x), lambda: setattr(Scale, "of", classmethod(lambda cls, x: x * 3))


@classes
def slot_with_a_mangled_name(device):
    class Scale:
        __slots__ = ("__by",)

        def __init__(self):
            self.put(2.0)

        def put(self, by):
            self.__by = by

        def of(self, x):
            return x * self.__by

    scale = Scale()
    return lambda x: scale.of(x), lambda: scale.put(3.0)


@classes
def enum_member_replaced(device):
    class Mode(enum.Enum):
        DOUBLE = 1
        TRIPLE = 2

    at = types.SimpleNamespace(mode=Mode.DOUBLE)
    return lambda x: x * (2 if at.mode is Mode.DOUBLE else 3), lambda: setattr(at, "mode", Mode.TRIPLE)


@classes
def setting_read_by_the_backward_of_an_autograd_function(device):
    class Scaled(torch.autograd.Function):
        by = 2.0

        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return grad * Scaled.by

    w = ramp(device, 4).requires_grad_()
    return lambda x: torch.autograd.grad(Scaled.apply(w * x).sum(), w)[0], lambda: setattr(Scaled, "by", 3.0)


@classes
def global_read_by_the_backward_of_an_autograd_function(device):
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return grad * FACTOR

    w = ramp(device, 4).requires_grad_()
    return lambda x: torch.autograd.grad(Scaled.apply(w * x).sum(), w)[0], set_factor


class Scaler:
    """Reads a global in its constructor, a method, and whatever Python calls by itself."""

    def __init__(self):
        self.by = FACTOR

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return FACTOR

    def __getitem__(self, key):
        return FACTOR

    def __mul__(self, x):
        return x * FACTOR

    def __len__(self):
        return int(FACTOR)

    def __iter__(self):
        return iter([FACTOR])

    def __enter__(self):
        return FACTOR

    def __exit__(self, *error):
        pass


class GivenTuple(tuple):
    def of(self, x):
        return x * FACTOR


class GivenSet(set):
    of = GivenTuple.of


class GivenDeque(deque):
    of = GivenTuple.of


def entered(scaler, x):
    with scaler as by:
        return x * by


USES_OF_A_GLOBAL = {
    "in __init__": (object, lambda _, x: x * Scaler().by),
    "in __getattr__": (Scaler, lambda scaler, x: x * scaler.anything),
    "in __getitem__": (Scaler, lambda scaler, x: x * scaler["anything"]),
    "in __mul__": (Scaler, lambda scaler, x: scaler * x),
    "in __len__": (Scaler, lambda scaler, x: x * len(scaler)),
    "in __iter__": (Scaler, lambda scaler, x: x * sum(scaler)),
    "in __enter__": (Scaler, entered),
    "in a method of a tuple's subclass": (lambda: GivenTuple((1,)), lambda it, x: it.of(x)),
    "in a method of a set's subclass": (GivenSet, lambda it, x: it.of(x)),
    "in a method of a deque's subclass": (GivenDeque, lambda it, x: it.of(x)),
}


@pytest.mark.parametrize(("make_object", "use"), USES_OF_A_GLOBAL.values(), ids=USES_OF_A_GLOBAL)
def test_c09_a_global_that_is_only_read(device, make_object, use):
    made = make_object()
    f = pg.record(lambda x: use(made, x), warmup=1)
    for factor in [2.0, 2.0, 2.0, 3.0, 3.0, 3.0]:
        set_factor(factor)
        assert_same(f(ramp(device, 4)), ramp(device, 4) * factor)
    assert counts(f)[2] >= 3


# ---------------------------------------------------------------------------------------------------
# C9: containers, and objects that hold others

containers = Table()


@containers
def equal_dictionary_in_the_attribute_of_an_object(device):
    at = types.SimpleNamespace(settings={"scale": 2.0})
    return lambda x: x * at.settings["scale"], lambda: set_in_a_copy(at, "settings", "scale")


@containers
def equal_list_in_the_attribute_of_an_object(device):
    at = types.SimpleNamespace(scales=[2.0])
    return lambda x: x * at.scales[0], lambda: set_in_a_copy(at, "scales", 0)


@containers
def equal_dictionary_in_the_attribute_of_a_module(device):
    net = nn.Tanh()
    net.settings = {"scale": 2.0}
    return lambda x: net(x) * net.settings["scale"], lambda: set_in_a_copy(net, "settings", "scale")


@containers
def deep_copy_of_a_nested_setting(device):
    at = {"a": {"b": [1.0, {"c": 2.0}]}}

    def change():
        at["a"]["b"] = copy.deepcopy(at["a"]["b"])
        at["a"]["b"][1]["c"] = 3.0

    return lambda x: x * at["a"]["b"][1]["c"], change


@containers
def function_in_a_list(device):
    functions = [lambda x: x * 2]
    return lambda x: functions[0](x), lambda: functions.__setitem__(0, lambda x: x * 3)


@containers
def dictionary_behind_its_bound_method(device):
    settings = {"scale": 2.0}
    get = settings.get
    return lambda x: x * get("scale"), lambda: settings.update(scale=3.0)


@containers
def dictionary_behind_a_read_only_proxy(device):
    settings = {"scale": 2.0}
    proxy = types.MappingProxyType(settings)
    return lambda x: x * proxy["scale"], lambda: settings.update(scale=3.0)


@containers
def bytes_that_are_written(device):
    data = bytearray(b"\x02")
    return lambda x: x * data[0], lambda: data.__setitem__(0, 3)


@containers
def attribute_of_a_tuples_subclass(device):
    given = GivenTuple((1.0,))
    given.scale = 2.0
    return lambda x: x * given.scale, lambda: setattr(given, "scale", 3.0)


@containers
def object_behind_a_weak_reference(device):
    target = type("Target", (), {})()
    target.scale = 2.0
    reference = weakref.ref(target)
    return lambda x: x * reference().scale, lambda: setattr(target, "scale", 3.0)


@containers.but(may_run_live)
def object_beside_very_many_others(device):
    others = [types.SimpleNamespace(a=n) for n in range(60_000)]
    others[-1].scale = 2.0
    return lambda x: x * others[-1].scale, lambda: setattr(others[-1], "scale", 3.0)


@containers.but(may_run_live)
def object_deep_below_a_very_large_table(device):
    at = types.SimpleNamespace(table={n: [n] for n in range(60_000)}, deep=types.SimpleNamespace(scale=2.0))
    return lambda x: x * at.deep.scale * at.table[1][0], lambda: setattr(at.deep, "scale", 3.0)


@containers
def attribute_of_a_decorated_function(device):
    @functools.wraps(torch.sin)
    def scaled(x):
        return x * scaled.scale

    scaled.scale = 2.0
    return lambda x: scaled(x), lambda: setattr(scaled, "scale", 3.0)


@containers
def function_registered_for_a_type(device):
    @functools.singledispatch
    def scaled(x):
        return x * 2

    return lambda x: scaled(x), lambda: scaled.register(torch.Tensor, lambda x: x * 3)


@containers
def attribute_of_a_parameter(device):
    weight = nn.Parameter(ramp(device, 4), requires_grad=False)
    weight.scale = 2.0
    return lambda x: x * weight * weight.scale, lambda: setattr(weight, "scale", 3.0)


@containers
def attribute_of_a_tensor(device):
    weight = ramp(device, 4)
    weight.scale = 2.0
    return lambda x: x * weight * weight.scale, lambda: setattr(weight, "scale", 3.0)


# What is found only behind an object of torch's, of NumPy's or of the standard library's.
numbers, libraries = itertools.count(), []


@containers
def attribute_behind_a_loader(device):
    loader = loader_of(type("Rows", (), {"scale": 2.0})())
    return lambda x: x * loader.dataset.scale, lambda: setattr(loader.dataset, "scale", 3.0)


@containers
def attribute_that_a_loader_gets_later(device):
    loader = loader_of([])
    return lambda x: x * getattr(loader, "scale", 2.0), lambda: setattr(loader, "scale", 3.0)


@containers
def variable_of_a_vectorized_function(device):
    at = types.SimpleNamespace(scale=2.0)
    scaled = pytest.importorskip("numpy").vectorize(lambda number: number * at.scale)
    return lambda x: x * float(scaled(1.0)), lambda: setattr(at, "scale", 3.0)


@containers
def variable_of_a_static_method_outside_of_a_class(device):
    at = types.SimpleNamespace(scale=2.0)
    scaled = staticmethod(lambda x: x * at.scale)
    return lambda x: scaled(x), lambda: setattr(at, "scale", 3.0)


@containers
def variable_of_a_comparison(device):
    at = types.SimpleNamespace(sign=1)
    key = functools.cmp_to_key(lambda a, b: (a - b) * at.sign)
    return lambda x: x * min(2.0, 3.0, key=key), lambda: setattr(at, "sign", -1)


@containers
def variable_of_a_custom_operator(device):
    at = types.SimpleNamespace(scale=2.0)

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * at.scale

    operator = torch.library.custom_op(f"phonograph_tests::scaled_{next(numbers)}", scaled, mutates_args=())
    return lambda x: operator(x), lambda: setattr(at, "scale", 3.0)


@containers
def variable_of_a_kernel(device):
    at = types.SimpleNamespace(scale=2.0)
    name, library = f"kernel_{next(numbers)}", torch.library.Library("phonograph_tests", "FRAGMENT")
    libraries.append(library)  # for ever: torch stumbles over operators that are gone
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, lambda x: x * at.scale, device.type.upper())
    operator = getattr(torch.ops.phonograph_tests, name)
    return lambda x: operator(x), lambda: setattr(at, "scale", 3.0)


@pytest.mark.parametrize("make", classes + containers)
def test_c09_what_the_function_finds_has_changed(device, make):
    assert_noticed(device, make)


def test_c09_an_equal_dictionary_under_the_global_name(device):
    f = pg.record(lambda x: x * SETTINGS["scale"], warmup=1)
    for n in range(9):
        if n == 3:
            globals().update(SETTINGS=dict(SETTINGS))
        if n == 6:
            SETTINGS["scale"] = 3.0
        assert_same(f(ramp(device, 4)), ramp(device, 4) * (3.0 if n >= 6 else 2.0))
