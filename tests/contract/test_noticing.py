"""C7-C10: noticing. A function relies on much more than its arguments: on classes and modules, containers, metadata of
tensors, hooks, an optimizer's settings. Whatever of it changes between two calls, the next call is eager's."""

import abc
import array
import collections
import contextlib
import copy
import ctypes
import dataclasses
import enum
import functools
import gc
import importlib
import importlib.util
import itertools
import math
import operator
import os
import random
import sys
import threading
import types
import weakref
from collections import deque
from typing import ClassVar, NamedTuple

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.optim.optimizer import register_optimizer_step_post_hook

import phonograph as pg
from phonograph.guards import reachable as reach
from phonograph.testing import Pair, assert_same
from tests.helpers import assert_replays, changeable, counts, may_run_live, plain, ramp, side_by_side

FACTOR = 2.0
SETTINGS = {"scale": 2.0}


@pytest.fixture(autouse=True)
def globals_as_before(request):
    before = dict(vars(request.module))
    yield
    vars(request.module).update(before)


def set_factor(value=3.0):
    globals().update(FACTOR=value)


class Table(list):
    """Situations for `parametrize`: functions that make (a function, what changes something for it)."""

    def __call__(self, make, *marks):
        self.append(pytest.param(make, id=make.__name__, marks=marks))
        return make

    def but(self, *marks):
        return lambda make: self(make, *marks)


def assert_noticed(device, make):
    """The change comes while the function is being replayed (or runs live anyway), and a caller can see it."""
    both, change = changeable(lambda: make(device))
    for n in range(3):
        both(ramp(device, 4, start=n))
    before = both(ramp(device, 4)).live
    live, _, replayed = counts(both)
    assert replayed == 3 or live == 4, "neither replayed nor refused"
    change()
    with pytest.raises(AssertionError):
        assert_same(both(ramp(device, 4)).live, before)
    for n in range(3):
        both(ramp(device, 4, start=n))


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


def set_in_a_copy(holder, name, key):
    setattr(holder, name, copy.copy(getattr(holder, name)))
    getattr(holder, name)[key] = 3.0


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


def loader_of(dataset):
    return torch.utils.data.DataLoader(dataset, sampler=[])


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


# ---------------------------------------------------------------------------------------------------
# C9: modules of code

SOURCE = """
import torch

scale = 2.0

class Scaler:
    def of(self, x):
        return x * scale

class Net(torch.nn.Module):
    def forward(self, x):
        return x * scale
"""


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A module of the user's, importable as `written_for_a_test`."""
    (tmp_path / "written_for_a_test.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("written_for_a_test")
    sys.modules.pop("written_for_a_test")


def imports_the_module(module):
    def f(x):
        import written_for_a_test

        return x * written_for_a_test.scale

    return f


def imports_the_name(module):
    def f(x):
        from written_for_a_test import scale

        return x * scale

    return f


def reads_an_attribute_of_the_module(module):
    return lambda x: x * module.scale


def uses_an_object_of_the_module(module):
    scaler = module.Scaler()
    return lambda x: scaler.of(x)


def uses_a_net_of_the_module(module):
    net = module.Net()
    return lambda x: net(x)


WAYS = [
    imports_the_module, imports_the_name, reads_an_attribute_of_the_module, uses_an_object_of_the_module,
    uses_a_net_of_the_module,
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_c09_a_global_of_another_module(device, written, way):
    f = pg.record(way(written), warmup=1)
    for scale in [2.0, 2.0, 2.0, 3.0, 3.0, 3.0]:
        written.scale = scale
        assert_same(f(ramp(device, 4)), ramp(device, 4) * scale)
    assert counts(f)[2] >= 3


@pytest.mark.parametrize("kind", ["Scaler", "Net"])
def test_c09_a_global_of_a_module_that_no_table_of_modules_has(device, tmp_path, kind):
    (tmp_path / "unlisted.py").write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("unlisted", tmp_path / "unlisted.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = getattr(module, kind)()
    f = pg.record(lambda x: made.of(x) if kind == "Scaler" else made(x), warmup=1)
    for scale in [2.0, 2.0, 2.0, 3.0, 3.0, 3.0]:
        module.scale = scale
        assert_same(f(ramp(device, 4)), ramp(device, 4) * scale)


# ---------------------------------------------------------------------------------------------------
# C7, C9: arguments


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    of_class: ClassVar[float] = 2.0

    def __post_init__(self):
        self.extra = 2.0

    def scaled(self):
        return self.x * FACTOR


class Named(NamedTuple):
    x: torch.Tensor

    def scaled(self):
        return self.x * FACTOR


@may_run_live
@pytest.mark.parametrize("kind", [Batch, Named])
def test_c09_a_global_read_by_a_method_of_an_argument(device, kind):
    f = pg.record(lambda batch: batch.scaled(), warmup=1)
    for factor in [2.0, 2.0, 2.0, 3.0, 3.0, 3.0]:
        set_factor(factor)
        assert_same(f(kind(ramp(device, 4))), ramp(device, 4) * factor)


def test_c07_a_dataclass_argument_is_replayed(device):
    f = pg.record(lambda batch: batch.x * 2, warmup=1)
    for n in range(4):
        assert_same(f(Batch(ramp(device, 4, start=n))), ramp(device, 4, start=n) * 2)
    assert counts(f) == (1, 1, 3)


@may_run_live
def test_c07_an_attribute_of_a_dataclass_argument_that_is_no_field(device):
    f = pg.record(lambda batch: batch.x * batch.extra, warmup=1)
    for extra in [2.0, 2.0, 2.0, 3.0, 3.0, 2.0]:
        batch = Batch(ramp(device, 4))
        batch.extra = extra
        assert_same(f(batch), ramp(device, 4) * extra)


@may_run_live
def test_c09_an_attribute_of_an_arguments_class(device, monkeypatch):
    f = pg.record(lambda batch: batch.x * batch.of_class, warmup=1)
    for of_class in [2.0, 2.0, 2.0, 3.0, 3.0, 3.0]:
        monkeypatch.setattr(Batch, "of_class", of_class)
        assert_same(f(Batch(ramp(device, 4))), ramp(device, 4) * of_class)


@may_run_live
def test_c07_the_types_of_a_dictionarys_keys(device):
    both = plain(lambda table: [key * value for key, value in table.items()])
    for key in [2, 2, 2, 2.0, 2.0, 2]:
        both({key: torch.tensor([1, 2], device=device)})
    for key in [1, 1, 1, True, True, 1]:
        both({key: torch.tensor([1, 2], device=device)})


def test_c07_the_signs_of_the_zeros_of_a_complex_number(device):
    both = plain(lambda x, c: x + torch.full((1,), c, device=device).angle())
    for c in [complex(-1, 0.0)] * 3 + [complex(-1, -0.0)] * 2 + [complex(-1, 0.0)]:
        both(torch.zeros(1, device=device), c)


@may_run_live
@pytest.mark.parametrize("first", [True, False])
def test_c07_whether_the_argument_is_a_tensor_that_the_function_knows(device, first):
    w, other = ramp(device, 4), ramp(device, 4)
    f = pg.record(lambda x: x * (2 if x is w else 3), warmup=1)
    for x in [w if first else other] * 4 + [other if first else w] * 3 * (not first):
        assert_same(f(x), ramp(device, 4) * (2 if x is w else 3))


@may_run_live
@pytest.mark.parametrize("first", [True, False], ids=["one tensor first", "two tensors first"])
def test_c07_whether_two_arguments_are_one_tensor(device, first):
    f = pg.record(lambda a, b: a * (2 if a is b else 3), warmup=1)
    for same in [first] * 4 + [not first] * 4 + [first, not first]:
        x = ramp(device, 4)
        assert_same(f(x, x if same else ramp(device, 4)), ramp(device, 4) * (2 if same else 3))


@may_run_live
@pytest.mark.parametrize("training", [False, True])
def test_c07_attention_to_itself(device, training):
    """Whether query, key and value are one tensor decides which way the attention takes."""

    def make():
        attention = nn.MultiheadAttention(8, 2, batch_first=True, device=device).train(training)
        return lambda q, k, v: attention(q, k, v, need_weights=False)[0].detach(), attention

    both = side_by_side(make, tolerance=1e-5)
    for n in range(8):
        x = Pair.of(torch.randn(2, 3, 8, device=device))
        both(x, x, x if n < 5 else Pair.of(torch.randn(2, 3, 8, device=device)))


@may_run_live
def test_c07_whether_an_argument_has_a_gradient(device):
    f = pg.record(lambda x: x.detach() * (2 if x.grad is None else 3), warmup=1)
    for has in [False] * 4 + [True] * 4 + [False, True]:
        x = ramp(device, 4).requires_grad_()
        x.grad = torch.ones(4, device=device) if has else None
        assert_same(f(x), ramp(device, 4) * (3 if has else 2))


@may_run_live
def test_c07_a_hook_of_an_argument(device):
    f = pg.record(lambda x: torch.autograd.grad((x**2).sum(), x)[0], warmup=1)
    for factor in [1, 1, 1, 10, 10, 7]:
        x = ramp(device, 4).requires_grad_()
        x.register_hook(lambda grad: grad * factor)
        assert_same(f(x), 2 * ramp(device, 4) * factor)


@may_run_live
def test_c07_an_earlier_result_that_requires_grad_now(device):
    f = pg.record(lambda x: x + 1, warmup=1)
    g = pg.record(lambda y: y.detach() * (2 if y.requires_grad else 3), warmup=1)
    for requires in [True] * 4 + [False] * 4 + [True, False]:
        y = f(ramp(device, 4)).requires_grad_(requires)
        assert_same(g(y), (ramp(device, 4) + 1) * (2 if requires else 3))


@may_run_live
@pytest.mark.parametrize("warm", [0, 3], ids=["from the first call on", "after plain calls"])
def test_c07_a_dual_tensor_of_forward_mode(device, warm):
    f = pg.record(lambda x: x * x, warmup=1)
    for _ in range(warm):
        f(torch.ones(2, device=device))
    for n in range(4):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(torch.full((2,), float(n), device=device), torch.ones(2, device=device))
            assert forward_ad.unpack_dual(f(dual)).tangent.tolist() == [2.0 * n] * 2


def test_c07_the_bound_method_of_a_dictionary(device):
    f = pg.record(lambda x, get: x * get("scale"), warmup=1)
    one, other = {"scale": 2.0}, {"scale": 5.0}
    for table in [one, one, one, other, one, other]:
        assert_same(f(ramp(device, 4), table.get), ramp(device, 4) * table["scale"])
    one["scale"] = 7.0
    assert_same(f(ramp(device, 4), one.get), ramp(device, 4) * 7)


def scaling_function(factor):
    return torch.no_grad()(lambda x: x * factor)


def transformed_function(factor):
    return torch.vmap(lambda x: x * factor)


@may_run_live
@pytest.mark.parametrize("make", [scaling_function, transformed_function])
def test_c07_a_new_function_in_each_call_that_looks_like_the_last(device, make):
    """The last one is gone by then, and the new one may lie where it lay."""
    f = pg.record(lambda x, function: function(x), warmup=1)
    for factor in [2.0, 2.0, 2.0, 5.0, 6.0, 7.0, 8.0]:
        assert_same(f(ramp(device, 4), make(factor)), ramp(device, 4) * factor)


@may_run_live
def test_c07_a_new_class_in_each_call(device):
    f = pg.record(lambda x, kind: x * kind.scale, warmup=1)
    for factor in [2.0, 2.0, 2.0, 5.0, 6.0, 7.0, 8.0]:
        assert_same(f(ramp(device, 4), type("Scale", (), {"scale": factor})), ramp(device, 4) * factor)


FACTS = {
    "where in its storage it begins": (lambda x: x.storage_offset(), lambda x: x[4:8]),
    "the size of its storage": (lambda x: x.untyped_storage().nbytes(), lambda x: x[:4]),
    "whether it is a view": (lambda x: 2 if x._base is None else 3, lambda x: x[:4]),
    "whether other processes see it": (lambda x: 2 if x.is_shared() else 3, lambda x: x[:4].clone().share_memory_()),
    "how often it was written": (lambda x: x._version, lambda x: x[:4].clone().add_(0)),
}


@may_run_live
@pytest.mark.parametrize("fact", FACTS)
def test_c07_what_else_an_argument_can_be_asked(device, fact):
    ask, other = FACTS[fact]
    f = pg.record(lambda x: x * ask(x), warmup=1)
    for special in [False, False, False, True, True, False]:
        x = ramp(device, 4) if not special else other(ramp(device, 8))
        assert_same(f(x), x * ask(x))


@may_run_live
def test_c07_bytes_of_an_arguments_storage_that_the_argument_does_not_show(device):
    both = plain(lambda x: torch.as_strided(x, (2,), (1,), 0) * 1)
    for n in range(4):
        base = Pair.of(ramp(device, 16, start=n))
        both(base.each(lambda b: b[4:8]))


@may_run_live
def test_c07_numbers_read_from_an_arguments_storage():
    f = pg.record(lambda x: x * x.untyped_storage()[0], warmup=1)
    for n in range(5):
        assert f(torch.tensor([n, 1], dtype=torch.uint8)).tolist() == [n * n, n]


# ---------------------------------------------------------------------------------------------------
# C8: what tensors and modules are

metadata = Table()


@metadata
def tensor_transposed_in_place(device):
    w = ramp(device, 4, 4)
    return lambda x: x @ w, lambda: w.t_()


@metadata
def tensor_whose_data_is_its_own_transpose(device):
    w = ramp(device, 4, 4)
    return lambda x: x @ w, lambda: setattr(w, "data", w.data.t())


@metadata
def parameter_transposed_in_place(device):
    w = nn.Parameter(ramp(device, 4, 4))
    return lambda x: (x @ w).detach(), torch.no_grad()(lambda: w.t_())


@metadata
def tensor_that_requires_grad(device):
    w = ramp(device, 4)
    return lambda x: (x * w.detach(), w.requires_grad), lambda: w.requires_grad_()


@metadata
def tensor_frozen(device):
    w, v = ramp(device, 4).requires_grad_(), ramp(device, 4).requires_grad_()

    def f(x):
        w.grad = v.grad = None
        (w * v * x).sum().backward()
        return x + (0 if v.grad is None else v.grad)

    return f, lambda: v.requires_grad_(False)


@metadata
def gradient_that_is_there_now(device):
    w = ramp(device, 4).requires_grad_()
    return lambda x: x * (2 if w.grad is None else 3), lambda: setattr(w, "grad", torch.ones(4, device=device))


@metadata
def gradient_that_is_gone(device):
    w = ramp(device, 4).requires_grad_()
    w.grad = torch.ones(4, device=device)
    return lambda x: x * (2 if w.grad is None else 3), lambda: setattr(w, "grad", None)


class Double(nn.Module):
    def forward(self, x):
        return x * 2


def many_layers(device):
    """So many modules that not each is looked at before each replay."""
    layers = [nn.Linear(4, 4, bias=False, device=device).requires_grad_(False) for _ in range(70)]
    for layer in layers:
        nn.init.eye_(layer.weight)
    return layers


@metadata
def parameter_swapped_among_many(device):
    net = nn.Sequential(*many_layers(device))
    other = nn.Parameter(torch.eye(4, device=device) * 3, requires_grad=False)
    return lambda x: net(x), lambda: torch.utils.swap_tensors(net[69].weight, other)


@metadata
def buffer_whose_data_is_replaced_among_many(device):
    net = nn.Sequential(*(nn.BatchNorm1d(4, device=device) for _ in range(40))).eval().requires_grad_(False)
    return lambda x: net(x[None]), lambda: setattr(net[39].running_mean, "data", torch.ones(4, device=device))


@metadata
def layer_inserted_among_many(device):
    net = nn.Sequential(*many_layers(device))
    return lambda x: net(x), lambda: net.insert(2, Double())


@metadata
def layer_appended_to_many(device):
    net = nn.Sequential(*many_layers(device))
    return lambda x: net(x), lambda: net.insert(70, Double())


@metadata
def layer_inserted_in_a_list_of_many(device):
    layers = nn.ModuleList(many_layers(device))
    return lambda x: functools.reduce(lambda x, layer: layer(x), layers, x), lambda: layers.insert(1, Double())


@metadata
def layer_popped_beside_many(device):
    net, more = nn.Sequential(*many_layers(device)), nn.ModuleDict({"a": Double(), "b": Double()})
    return lambda x: functools.reduce(lambda x, layer: layer(x), more.values(), net(x)), lambda: more.pop("b")


@pytest.mark.parametrize("make", metadata)
def test_c08_what_tensors_and_modules_are_has_changed(device, make):
    assert_noticed(device, make)


def test_c08_one_of_many_weights_is_frozen_and_thawed(device):
    both = side_by_side(backward_of(lambda: nn.Sequential(*many_layers(device)).requires_grad_()))
    for n in range(10):
        if n in (4, 7):
            both.change(lambda state: state[0][40].weight.requires_grad_(n == 7))
        both(ramp(device, 4, start=n))


class Hidden:
    """Something in the state that is not to be compared."""

    __slots__ = ("it",)

    def __init__(self, it):
        self.it = it


@may_run_live
def test_c08_a_parametrization_that_is_cached_for_a_while(device):
    def make():
        net = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4, device=device)).requires_grad_(False)
        return lambda x: net(x), Hidden(net)

    both = side_by_side(make)
    for n in range(4):
        both(ramp(device, 4, start=n))
    with parametrize.cached():
        for n in range(3):
            both(ramp(device, 4, start=n))
            both.change(lambda hidden: hidden.it.parametrizations.weight.original0.mul_(2))
    both(ramp(device, 4))


COMPUTED = {
    "parametrized": (
        lambda net: parametrize.register_parametrization(net, "weight", Double()),
        lambda net: parametrize.remove_parametrizations(net, "weight"),
    ),
    "pruned": (lambda net: prune.l1_unstructured(net, "weight", 0.5), lambda net: prune.remove(net, "weight")),
}


@may_run_live
@pytest.mark.parametrize(("on", "off"), COMPUTED.values(), ids=COMPUTED)
def test_c08_a_weight_that_is_computed_for_a_while(device, on, off):
    def make():
        step, (net,) = backward_of(lambda: nn.Linear(4, 4, device=device))()
        return lambda x: (step(x), [p.grad for p in net.parameters()]), Hidden(net)

    both = side_by_side(make)
    for n in range(10):
        if n in (4, 7):
            both.change(lambda hidden: (on if n == 4 else off)(hidden.it))
        both(ramp(device, 4, start=n))


# ---------------------------------------------------------------------------------------------------
# C8: hooks


def backward_of(make_net):
    """A `make`: the loss with its backward, and (net, ) as the state."""

    def make():
        net = make_net()

        def step(x):
            net.zero_grad()
            loss = net(x).pow(2).sum()
            loss.backward()
            return loss.detach()

        return step, [net]

    return make


def linear(device):
    return nn.Linear(4, 1, device=device)


def scale_grad(parameter, by):
    parameter.grad.mul_(by)


HOOKS = {
    "of a parameter": lambda net, by: net.weight.register_hook(lambda grad: grad * by),
    "of a parameter, after accumulation": lambda net, by: net.weight.register_post_accumulate_grad_hook(
        lambda p: scale_grad(p, by)
    ),
    "of a module": lambda net, by: net.register_forward_hook(lambda module, inputs, result: result * by),
    "of a module's backward": lambda net, by: net.register_full_backward_hook(
        lambda module, given, grads: tuple(None if g is None else g * by for g in given)
    ),
}


@may_run_live
@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS)
def test_c08_a_hook_replaced_by_another_with_the_same_code(device, register):
    both = side_by_side(backward_of(lambda: nn.Sequential(nn.Linear(4, 4, device=device), linear(device))))
    both.change(lambda state: state.append(Hidden(register(state[0][1], 2))))
    for n in range(9):
        if n in (4, 7):
            both.change(lambda state: state[1].it.remove())
        if n == 4:
            both.change(lambda state: setattr(state[1], "it", register(state[0][1], 10)))
        both(ramp(device, 4, start=n))


def test_c08_a_hook_that_a_tensor_gets_later(device):
    w = ramp(device, 4).requires_grad_()

    def f(x):
        w.grad = None
        (w * x).sum().backward()

    f = pg.record(f, warmup=1)
    for n in range(7):
        if n == 4:
            w.register_hook(lambda grad: grad * 3)
        f(ramp(device, 4))
        assert_same(w.grad, ramp(device, 4) * (3 if n >= 4 else 1))


def test_c08_a_hook_that_the_function_itself_registers(device):
    w = torch.ones(2, device=device, requires_grad=True)
    f = pg.record(lambda x: (w.register_hook(lambda grad: grad * 2), x * 2)[1], warmup=1)
    for n in range(4):
        with pytest.warns(pg.RunsLive) if n == 1 else contextlib.nullcontext():
            f(torch.ones(2, device=device))
    w.sum().backward()
    assert w.grad.tolist() == [16.0, 16.0]


@may_run_live
def test_c09_hooks_that_count(device):
    net, seen = linear(device), []
    net.weight.register_hook(lambda grad: seen.append("weight"))
    torch.autograd.graph.register_multi_grad_hook(list(net.parameters()), lambda grads: seen.append("all"))
    f = pg.record(lambda x: net(x).sum().backward(), warmup=1)
    for n in range(1, 6):
        f(ramp(device, 4))
        assert (seen.count("weight"), seen.count("all")) == (n, n)


@may_run_live
def test_c08_a_backward_hook_of_one_of_many_modules(device):
    both = side_by_side(backward_of(lambda: nn.Sequential(*many_layers(device)).requires_grad_()))

    def tripled(module, given, grads):
        return tuple(None if g is None else g * 3 for g in given)

    for n in range(8):
        if n == 4:
            both.change(lambda state: state[0][20].register_full_backward_hook(tripled))
        both(ramp(device, 4, start=n) / 8)


@may_run_live
def test_c07_hooks_around_saved_tensors(device):
    both = side_by_side(backward_of(lambda: linear(device)))
    for n in range(8):
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda t: t * 0.5, lambda t: t)
            if n in (4, 5, 7)
            else contextlib.nullcontext()
        ):
            both(ramp(device, 4, start=n))


# ---------------------------------------------------------------------------------------------------
# C7: settings of the process


@may_run_live
def test_c07_the_precision_of_matrix_products(device):
    f = pg.record(lambda x: (x @ x, torch.backends.cuda.matmul.fp32_precision), warmup=1)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        for precision in ["ieee"] * 4 + ["tf32"] * 3 + ["ieee"]:
            torch.backends.cuda.matmul.fp32_precision = precision
            assert f(torch.ones(2, 2, device=device))[1] == precision
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


ATTENTIONS = torch._C._get_sdp_priority_order()


@pytest.mark.parametrize(
    ("read", "change"),
    [
        pytest.param(lambda: torch.backends.cuda.matmul.allow_fp16_accumulation,
                     lambda on: setattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", on), id="sums in float16"),
        pytest.param(torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed,
                     torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp, id="sums of attention"),
        pytest.param(lambda: torch.backends.mkldnn.deterministic,
                     lambda on: setattr(torch.backends.mkldnn, "deterministic", on), id="deterministic on the CPU"),
        pytest.param(lambda: torch._C._get_sdp_priority_order() == sorted(ATTENTIONS),
                     lambda on: torch._C._set_sdp_priority_order(sorted(ATTENTIONS) if on else ATTENTIONS),
                     id="the order of attention's kernels"),
    ],
)  # fmt: skip
def test_c07_settings_of_which_kernels_are_used(device, read, change):
    f = pg.record(lambda x: (x * 2, read())[1], warmup=1)
    try:
        for on in [False] * 3 + [True] * 3 + [False, True]:
            change(on)
            assert f(torch.ones(2, device=device)) is on
        assert counts(f) == (2, 2, 6)
    finally:
        change(False)


def test_c07_a_setting_that_the_first_call_decides(device):
    """As the first call of attention on a GPU decides on an order of its kernels: later calls are no strangers."""
    f = pg.record(lambda x: (torch._C._set_sdp_priority_order(sorted(ATTENTIONS)), x * 2)[1], warmup=1)
    try:
        for n in range(4):
            assert_same(f(torch.full((2,), float(n), device=device)), torch.full((2,), 2.0 * n, device=device))
        assert counts(f) == (1, 1, 3)
    finally:
        torch._C._set_sdp_priority_order(ATTENTIONS)


@may_run_live
def test_c07_the_way_of_attention_in_inference(device):
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True, device=device).eval()
    f = pg.record(lambda x: (layer(x), torch.backends.mha.get_fastpath_enabled())[1], warmup=1)
    try:
        with torch.no_grad():
            for enabled in [True] * 4 + [False] * 3 + [True]:
                torch.backends.mha.set_fastpath_enabled(enabled)
                assert f(torch.ones(2, 3, 8, device=device)) is enabled
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@may_run_live
def test_c07_the_number_of_threads(device):
    f = pg.record(lambda x: x * torch.get_num_threads(), warmup=1)
    before = torch.get_num_threads()
    try:
        for threads in [1, 1, 1, 2, 2, 1]:
            torch.set_num_threads(threads)
            assert_same(f(ramp(device, 4)), ramp(device, 4) * threads)
    finally:
        torch.set_num_threads(before)


@may_run_live
def test_c09_a_grad_mode_that_the_function_sets(device):
    f = pg.record(lambda x: (torch.set_grad_enabled(False), x * 2)[1], warmup=1)
    for _ in range(5):
        torch.set_grad_enabled(True)
        f(torch.ones(2, device=device))
        now = torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        assert not now


@may_run_live
def test_c09_a_default_dtype_that_the_function_sets(device):
    f = pg.record(lambda x: (torch.set_default_dtype(torch.float64), x * 2)[1], warmup=1)
    for _ in range(5):
        torch.set_default_dtype(torch.float32)
        f(torch.ones(2, device=device))
        now = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        assert now is torch.float64


def test_c07_memory_that_determinism_fills(device):
    both = plain(lambda x: (torch.empty(4, device=device), x + 1))
    torch.use_deterministic_algorithms(True)
    try:
        for n in range(5):
            both(ramp(device, 4, start=n))
    finally:
        torch.use_deterministic_algorithms(False)


@may_run_live
def test_c09_the_seed_that_the_generator_was_given(device):
    f = pg.record(lambda x: x * (torch.initial_seed() % 7), warmup=1)
    for seed in [3, 3, 3, 5, 5]:
        torch.manual_seed(seed)
        assert_same(f(ramp(device, 4)), ramp(device, 4) * (seed % 7))


# ---------------------------------------------------------------------------------------------------
# C8, C9: what an optimizer's settings are used for


def steps(device, step_of, *, momentum=0.0, optimizer=torch.optim.SGD, **options):
    """A step of a small model beside a live one; the state is (model, optimizer)."""

    def make():
        net = nn.Linear(4, 2, device=device)
        chosen = optimizer(net.parameters(), lr=0.1, **({"momentum": momentum} if momentum else {}), **options)

        def usual(x):
            chosen.zero_grad()
            loss = net(x).pow(2).mean()
            loss.backward()
            chosen.step()
            return loss.detach()

        return step_of(net, chosen, usual), [net, chosen]

    return side_by_side(make)


def usual_step(net, optimizer, usual):
    return usual


def data(device, n):
    return torch.randn(3, 4, device=device, generator=torch.Generator(device).manual_seed(n))


def returns_it(net, optimizer, usual):
    return lambda x: (usual(x), optimizer.param_groups[0]["lr"])


def makes_a_tensor_of_it(net, optimizer, usual):
    return lambda x: (usual(x), torch.tensor(optimizer.param_groups[0]["lr"]))


def decays_by_hand(net, optimizer, usual):
    def step(x):
        loss = usual(x)
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(1 - optimizer.param_groups[0]["lr"] * 0.5)
        return loss

    return step


def decays_in_a_hook(net, optimizer, usual):
    @torch.no_grad()
    def decay(chosen, args, kwargs):
        for group in chosen.param_groups:
            for p in group["params"]:
                p.mul_(math.exp(-group["lr"]))

    optimizer.register_step_post_hook(decay)
    return usual


def notes_it_in_a_hook(net, optimizer, usual):
    seen = torch.zeros(())
    optimizer.register_step_post_hook(lambda chosen, a, k: seen.copy_(torch.tensor(chosen.param_groups[0]["lr"])))
    return lambda x: (usual(x), seen.clone())


def scales_the_loss_of_a_closure_with_it(net, optimizer, usual):
    def step(x):
        def closure():
            optimizer.zero_grad()
            loss = net(x).sum() * math.exp(-optimizer.param_groups[0]["lr"])
            loss.backward()
            return loss

        return optimizer.step(closure).detach()

    return step


READS_OF_THE_RATE = [
    returns_it, makes_a_tensor_of_it, decays_by_hand, decays_in_a_hook, notes_it_in_a_hook,
    scales_the_loss_of_a_closure_with_it,
]  # fmt: skip


@may_run_live
@pytest.mark.parametrize("step_of", READS_OF_THE_RATE)
def test_c09_a_learning_rate_that_the_function_reads_itself(device, step_of):
    both = steps(device, step_of)
    for n in range(8):
        if n in (4, 6):
            both.change(lambda state: state[1].param_groups[0].update(lr=0.05 / n))
        both(data(device, n))


_library = {"clip_grad_norm_": nn.utils.clip_grad_norm_, "Optimizer": torch.optim.Optimizer, "__name__": "rates"}
exec(compile("""
def current(o):
    return o.param_groups[0]['lr']

def last(s):
    return s.get_last_lr()[0]

def joined(o):
    return sum([one.param_groups for one in [o]], [])[0]["lr"]

def counted(o):
    return float(type(o.param_groups) is list) + 0 * len([p for g in o.param_groups for p in g["params"]])

class Wrapper:
    def __init__(self, optimizer):
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    def step(self):
        clip_grad_norm_([p for g in self.optimizer.param_groups for p in g["params"]], 1.0)
        self.optimizer.step()

class Before(Optimizer):
    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)

    def step(self, closure=None):
        self.optimizer.step(closure)
""", "/usr/lib/site-packages/rates.py", "exec"), _library)  # fmt: skip


def _first_of(lr, **rest):
    return lr


# Ways to the learning rate by which the code of a step does not name it. Each is made from an optimizer and gives a function.
HIDDEN_READS = {
    "a library's function": lambda o: functools.partial(_library["current"], o),
    "a sum of lists": lambda o: functools.partial(_library["joined"], o),
    "a scheduler's, through a library": lambda o: functools.partial(
        _library["last"], torch.optim.lr_scheduler.ConstantLR(o, 1.0)
    ),
    "keywords": lambda o: lambda g=o.param_groups[0]: _first_of(**g),
    "items": lambda o: lambda g=o.param_groups[0]: sum(v for _, v in sorted(g.items()) if type(v) is float),
    "a key": lambda o: lambda g=o.param_groups[0], key="lr": g[key],
    "a key, of the groups": lambda o: lambda groups=o.param_groups, key="lr": groups[0][key],
    "itemgetter": lambda o: lambda g=o.param_groups[0], get=operator.itemgetter("lr"): get(g),
    "a bound method": lambda o: functools.partial(o.param_groups[0].get, "lr"),
    "a chain": lambda o: lambda g=collections.ChainMap({}, o.param_groups[0]), key="lr": g[key],
    "text": lambda o: lambda: float(f"{o}".split("lr: ")[1].split()[0]),
}


@may_run_live
@pytest.mark.parametrize("way", HIDDEN_READS)
def test_c09_a_learning_rate_that_is_read_without_its_name(device, way):
    def step_of(net, optimizer, usual):
        rate = HIDDEN_READS[way](optimizer)
        return lambda x: usual(x) * rate()

    both = steps(device, step_of)
    for n in range(8):
        if n in (4, 6):
            both.change(lambda state: state[1].param_groups[0].update(lr=0.05 / n))
            both.change(lambda state: [s._last_lr.__setitem__(0, 0.05 / n) for s in _schedulers_of(state[1])])
        both(data(device, n))


@may_run_live
def test_c09_a_closure_in_which_a_library_reads_the_rate(device):
    """The scheduler's code that runs at each step tells nothing of it."""

    def step_of(net, optimizer, usual):
        torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)

        def step(x):
            def closure():
                optimizer.zero_grad()
                loss = net(x).sum() * math.exp(-_library["current"](optimizer))
                loss.backward()
                return loss

            return optimizer.step(closure).detach()

        return step

    both = steps(device, step_of)
    for n in range(8):
        both.change(lambda state: state[1].param_groups[0].update(lr=0.1 / (n + 1)))
        both(data(device, n))


@may_run_live
@pytest.mark.parametrize("kind", ["Wrapper", "Before"])
def test_c09_a_library_stands_before_the_optimizer(device, kind):
    """It has the groups of the other, and takes the parameters in them; the rate is followed."""

    def make():
        net = nn.Linear(4, 2, device=device)
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer = _library[kind](inner)

        def step(x):
            inner.zero_grad()
            loss = net(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss.detach() * _library["counted"](inner)

        return step, [net, inner]

    both = side_by_side(make)
    for n in range(8):
        both.change(lambda state: state[1].param_groups[0].update(lr=0.1 / (n + 1)))
        both(data(device, n))
    assert kind == "Before" or counts(both) == (1, 1, 7), pg.explain(both.recorded)


def _schedulers_of(optimizer):
    return [x for x in gc.get_objects() if isinstance(x, torch.optim.lr_scheduler.LRScheduler) and x.optimizer is optimizer]


def test_c09_who_takes_parameters_only_does_not_read_the_rate(device):
    """`zero_grad` takes all groups; and somebody else may have one who is not in reach."""
    both, groups = steps(device, usual_step), []
    for n in range(6):
        both.change(lambda state: groups.append(state[1].param_groups[0]))
        both.change(lambda state: state[1].param_groups[0].update(lr=0.1 / (n + 1)))
        both(data(device, n))
    assert counts(both) == (1, 1, 5)


# Settings with which eager may raise, in a step that was recorded with ordinary ones.
ODD_SETTINGS = [
    (torch.optim.RAdam, "betas", (0.9, 1.0)), (torch.optim.RAdam, "betas", (1.0, 0.9)), (torch.optim.SGD, "lr", 10**400),
    (torch.optim.SGD, "lr", (0.5,)), (torch.optim.SGD, "lr", math.nan), (torch.optim.AdamW, "lr", math.nan),
    (torch.optim.AdamW, "weight_decay", math.inf), (torch.optim.Adam, "betas", (0.9, 0.99, 0.5)),
    (torch.optim.NAdam, "betas", (1.0, 1.0)), (torch.optim.SGD, "lr", None), (torch.optim.SGD, "lr", True),
    (torch.optim.SGD, "lr", 2**70),
]  # fmt: skip


@may_run_live
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(("optimizer", "key", "value"), ODD_SETTINGS)
def test_c09_settings_with_which_eager_may_raise(device, optimizer, key, value, again):
    """What was raised once is raised again, and no replay goes on with the numbers of before."""

    def run(record):
        p = nn.Parameter(torch.full((3,), 2.0, device=device))
        chosen = optimizer([p], lr=0.1)
        usual = chosen.param_groups[0][key]

        @record
        def step(x):
            chosen.zero_grad()
            (p * x).square().sum().backward()
            chosen.step()
            return p.detach().clone()

        found = []
        for n in range(9):
            if n == 4 or (again and n == 6):
                chosen.param_groups[0][key] = value if n == 4 else usual
            try:
                found.append(repr(step(data(device, n)[0, :3]).tolist()))  # `nan` is not equal to itself
            except Exception as e:
                found.append(type(e))
        return found

    assert run(pg.record) == run(lambda f: f)


def test_c09_a_rate_of_minus_zero(device):
    def run(record):
        p = nn.Parameter(torch.full((4,), -0.0, device=device))
        optimizer = torch.optim.SGD([p], lr=0.0)

        @record
        def step(x):
            optimizer.zero_grad()
            (p * x).sum().backward()
            optimizer.step()
            return p.detach().clone()

        found = []
        for n in range(8):
            optimizer.param_groups[0]["lr"] = -0.0 if n % 3 == 2 else 0.0
            with torch.no_grad():
                p.fill_(-0.0)
            found.append(step(torch.tensor([1.0, -1.0, 2.0, -2.0], device=device)).tolist())
        return repr(found)

    assert run(pg.record) == run(lambda f: f)


@may_run_live
def test_c09_a_rate_that_was_no_number_when_it_was_recorded(device):
    both = steps(device, usual_step, optimizer=torch.optim.AdamW)
    for n in range(8):
        both.change(lambda state: state[1].param_groups[0].update(lr=math.nan if n < 4 else 0.0))
        both.change(lambda state: [p.data.fill_(1.0) for p in state[0].parameters()])
        both.change(lambda state: [s["exp_avg"].zero_() for s in state[1].state.values()])
        both.change(lambda state: [s["exp_avg_sq"].zero_() for s in state[1].state.values()])
        both(data(device, n) * 0)


class _Off(torch.optim.SGD):
    def step(self, closure=None):
        return None


@may_run_live
def test_c08_an_optimizer_becomes_one_of_another_class(device):
    both = steps(device, usual_step)
    for n in range(10):
        both.change(lambda state: setattr(state[1], "__class__", _Off if n in (4, 5, 6) else torch.optim.SGD))
        both(data(device, n))


def multiplies_it_afterwards(net, optimizer, usual):
    def step(x):
        loss = usual(x)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        return loss

    return step


def multiplies_it_before(net, optimizer, usual):
    def step(x):
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        return usual(x)

    return step


def doubles_it_for_the_step(net, optimizer, usual):
    def step(x):
        group = optimizer.param_groups[0]
        group["lr"] *= 2
        loss = usual(x)
        group["lr"] /= 2
        return loss

    return step


def turns_weight_decay_off_for_the_step(net, optimizer, usual):
    def step(x):
        group = optimizer.param_groups[0]
        before, group["weight_decay"] = group["weight_decay"], 0.0
        loss = usual(x)
        group["weight_decay"] = before
        return loss

    return step


@may_run_live
@pytest.mark.parametrize(
    "step_of",
    [multiplies_it_afterwards, multiplies_it_before, doubles_it_for_the_step, turns_weight_decay_off_for_the_step],
)
def test_c09_a_learning_rate_that_the_function_writes_itself(device, step_of):
    both = steps(device, step_of, weight_decay=0.1)
    for n in range(8):
        both(data(device, n))


@may_run_live
def test_c09_a_learning_rate_that_is_an_argument(device):
    def step_of(net, optimizer, usual):
        return lambda x, lr: (optimizer.param_groups[0].update(lr=lr), usual(x))[1]

    both = steps(device, step_of)
    for n, lr in enumerate([0.1, 0.1, 0.1, 0.1, 0.01, 0.02, 0.01, 0.02, 0.1]):
        both(data(device, n), lr)


@may_run_live
def test_c09_a_learning_rate_taken_from_a_setting(device):
    setting = types.SimpleNamespace(lr=0.1)

    def step_of(net, optimizer, usual):
        return lambda x: (optimizer.param_groups[0].update(lr=setting.lr), usual(x))[1]

    both = steps(device, step_of)
    for n in range(8):
        setting.lr = 0.01 if n > 3 else 0.1
        both(data(device, n))


@may_run_live
def test_c09_learning_rates_of_every_type(device):
    numpy = pytest.importorskip("numpy")
    both = steps(device, usual_step)
    for n, lr in enumerate([0.1, 0.1, 0.1, numpy.float64(0.05), torch.tensor(0.02), 1, 0.0, 0.3]):
        both.change(lambda state: state[1].param_groups[0].update(lr=copy.copy(lr)))
        both(data(device, n))
        both(data(device, n))


class OwnOptimizer(torch.optim.SGD):
    factor = 1.0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad.sign(), alpha=-math.sqrt(group["lr"]) * FACTOR * self.factor)


def test_c09_what_an_optimizer_of_the_users_reads(device, monkeypatch):
    both = steps(device, usual_step, optimizer=OwnOptimizer)
    for n in range(12):
        if n == 3:
            both.change(lambda state: state[1].param_groups[0].update(lr=0.05))
        if n == 6:
            set_factor(0.5)
        if n == 9:
            monkeypatch.setattr(OwnOptimizer, "factor", 0.25)
        both(data(device, n))
    assert counts(both)[2] >= 6


REPLACED_PARTS = {
    "groups": lambda optimizer: setattr(optimizer, "param_groups", [dict(g) for g in optimizer.param_groups]),
    "list of parameters": lambda optimizer: optimizer.param_groups[0].update(params=[*optimizer.param_groups[0]["params"]]),
    "everything, by loading": lambda optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    "state of one parameter": lambda optimizer: next(reversed(optimizer.state.values())).update(
        momentum_buffer=torch.ones_like(next(reversed(optimizer.state.values()))["momentum_buffer"])
    ),
    "state, dropped": lambda optimizer: optimizer.state.clear(),
}


@may_run_live
@pytest.mark.parametrize("replace", REPLACED_PARTS.values(), ids=REPLACED_PARTS)
def test_c08_parts_of_an_optimizer_replaced_by_equal_ones_that_change_later(device, replace):
    both = steps(device, usual_step, momentum=0.9)
    for n in range(12):
        if n == 4:
            both.change(lambda state: replace(state[1]))
        if n == 7:
            both.change(lambda state: state[1].param_groups[0].update(lr=1.0))
        both(data(device, n))


@pytest.mark.parametrize("when", [4, 5, 6])
def test_c08_the_momentum_of_one_of_many_parameters_is_replaced(device, when):
    """At once, and not when a turn comes to it."""

    def make():
        torch.manual_seed(0)
        net = nn.Sequential(*[nn.Linear(1, 1) for _ in range(70)]).to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

        def step():
            optimizer.zero_grad()
            (net(torch.ones(1, 1, device=device)).sum() + sum(p.sum() for p in net.parameters())).backward()
            optimizer.step()

        return step, [net, optimizer]

    both = side_by_side(make)
    for n in range(8):
        if n == when:
            both.change(lambda s: s[1].state[s[0][69].weight].update(momentum_buffer=torch.zeros(1, 1, device=device)))
        both()


@may_run_live
@pytest.mark.parametrize("count", [2, 80])
@pytest.mark.parametrize("kind", ["transposed", "strided", "negated", "conjugated", "sparse", "another key"])
def test_c08_what_a_recorded_optimizer_finds_is_something_else(device, kind, count):
    dtype = torch.complex64 if kind == "conjugated" else torch.float32
    changes = {
        "transposed": lambda p: p.grad.t_(),
        "strided": lambda p: p.grad.as_strided_((3, 3), (1, 3)),
        "negated": lambda p: setattr(p, "grad", torch._neg_view(p.grad)),
        "conjugated": lambda p: setattr(p, "grad", p.grad.conj()),
        "sparse": lambda p: setattr(p, "grad", p.grad.to_sparse()),
    }

    def weights(recorded):
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(3, 3, device=device, dtype=dtype)) for _ in range(count)]
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.0 if kind == "sparse" else 0.9, foreach=False)
        step = pg.record(optimizer.step) if recorded else optimizer.step
        for p in parameters:
            p.grad = torch.randn(3, 3, device=device, dtype=dtype)
        for n in range(9):
            if n == 5 and kind in changes:
                changes[kind](parameters[1])
            elif n == 5:
                state = optimizer.state[parameters[1]]
                state["old"] = state.pop("momentum_buffer")
            step()
        return parameters

    assert_same(weights(recorded=True), weights(recorded=False))


@may_run_live
@pytest.mark.parametrize("count", [2, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_c08_one_parameter_is_lazily_negated_or_conjugated(device, count, dtype):
    def results(recorded):
        torch.manual_seed(0)
        parameters = nn.ParameterList([nn.Parameter(torch.randn(4, device=device, dtype=dtype)) for _ in range(count)])
        f = pg.record(lambda x: sum(parameters, x), warmup=1) if recorded else lambda x: sum(parameters, x)
        found = []
        with torch.no_grad():
            for n in range(9):
                if n == 5:
                    one = parameters[1].data
                    parameters[1].data = one.conj() if dtype.is_complex else torch._neg_view(one)
                found.append(f(torch.full((4,), 1.0 * n, device=device)).resolve_conj().resolve_neg())
        return found

    assert_same(results(recorded=True), results(recorded=False))


@may_run_live
def test_c08_one_of_many_parameters_is_given_to_other_processes(device):
    torch.manual_seed(0)
    parameters = nn.ParameterList([nn.Parameter(torch.randn(2, device=device)) for _ in range(200)])
    f = pg.record(lambda x: sum(parameters, x), warmup=1)
    with torch.no_grad():
        for n in range(9):
            if n == 5:
                parameters[150].share_memory_()
                parameters[150].add_(1)
            x = torch.full((2,), 1.0 * n, device=device)
            assert_same(f(x), sum(parameters, x))


def tripled(p):
    p.grad.mul_(3)


@pytest.mark.parametrize("count", [1, 80])
@pytest.mark.parametrize("way", ["cleared", "None", "after accumulation"])
def test_c08_hooks_of_a_parameter_are_taken_by_hand(device, count, way):
    def gradients(recorded):
        weights = [nn.Parameter(torch.ones(2, device=device)) for _ in range(count)]
        if way == "after accumulation":
            weights[0].register_post_accumulate_grad_hook(tripled)
        else:
            weights[0].register_hook(lambda grad: grad * 3)

        def step(x):
            for w in weights:
                w.grad = None
            sum((w * x).sum() for w in weights).backward()
            return weights[0].grad.clone()

        found, called = [], pg.record(step) if recorded else step
        for n in range(8):
            if n == 5 and way == "cleared":
                weights[0]._backward_hooks.clear()
            elif n == 5 and way == "None":
                weights[0]._backward_hooks = None
            elif n == 5:
                weights[0]._post_accumulate_grad_hooks.clear()
            found.append(called(torch.full((2,), 1.0 + n, device=device)))
        return found

    assert_same(gradients(recorded=True), gradients(recorded=False))


@may_run_live
def test_c08_a_gradient_that_a_function_of_torch_looks_for(device):
    """Nothing in the user's own code names one."""
    afterwards = functools.partial(nn.utils.clip_grad_norm_, max_norm=1.0)

    def norms(recorded):
        weights = [nn.Parameter(torch.ones(2, device=device)) for _ in range(2)]
        called = pg.record(lambda scale: afterwards(weights) * scale) if recorded else lambda scale: afterwards(weights) * scale
        found = []
        for n in range(9):
            if n >= 4:
                weights[0].grad = torch.full((2,), 1.0 * n, device=device)
            found += [called(torch.ones((), device=device) * n).clone(), None if n < 4 else weights[0].grad.clone()]
        return found

    assert_same(norms(recorded=True), norms(recorded=False))


def test_c08_a_hook_of_all_optimizers(device):
    both = steps(device, usual_step)
    for n in range(8):
        if n == 4:
            handle = register_optimizer_step_post_hook(lambda chosen, a, k: zeroed(chosen))
        if n == 6:
            handle.remove()
        both(data(device, n))


@torch.no_grad()
def zeroed(optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.zero_()


# ---------------------------------------------------------------------------------------------------
# C9: effects on what the function relies on


@may_run_live
@pytest.mark.parametrize("synchronizes", [False, True])
def test_c09_a_counter_on_a_decorated_function(device, synchronizes):
    @functools.wraps(torch.sin)
    def counting(x):
        counting.calls += 1
        return x.sum().item() if synchronizes else x * 2

    counting.calls = 0
    f = pg.record(lambda x: counting(x), warmup=1)
    for n in range(1, 6):
        f(ramp(device, 4))
        assert counting.calls == n


@may_run_live
def test_c09_a_counter_on_an_object_of_torchs(device):
    loader = loader_of([])
    loader.calls = 0
    f = pg.record(lambda x: (setattr(loader, "calls", loader.calls + 1), x * 2)[1], warmup=1)
    for n in range(1, 6):
        f(ramp(device, 4))
        assert loader.calls == n


@may_run_live
@pytest.mark.parametrize("kind", ["function", "closure"])
def test_c09_a_function_that_the_garbage_collector_does_not_show(device, monkeypatch, kind):
    """As after `gc.freeze`. What a function reads besides globals is then unknown."""
    monkeypatch.setattr(reach, "functions_with", lambda code: [])
    at = types.SimpleNamespace(scale=2.0)
    event, name = threading.Event(), "neddih"  # of which only those attributes are looked at that are named
    event.hidden = [(lambda x: x * FACTOR) if kind == "function" else (lambda x: x * at.scale)]
    f = pg.record(lambda x: getattr(event, name[::-1])[0](x), warmup=1)
    for n in range(9):
        if n == 4:
            set_factor()
            at.scale = 3.0
        assert_same(f(ramp(device, 4)), ramp(device, 4) * (3.0 if n >= 4 else 2.0))
    refused = "a closure that cannot be found" in pg.explain(f)
    assert refused == (kind == "closure")
    assert pg.stats(f).replayed == (0 if refused else 7)


@may_run_live
def test_c09_a_counter_on_a_class_with_a_metaclass(device):
    class Meta(type):
        def __call__(cls, *args):
            return super().__call__(*args)

    counted = Meta("Counted", (), {"calls": 0})
    f = pg.record(lambda x: (setattr(counted, "calls", counted.calls + 1), x * 2)[1], warmup=1)
    for n in range(1, 6):
        f(ramp(device, 4))
        assert counted.calls == n


@may_run_live
def test_c09_a_counter_on_a_parameter(device):
    weight = nn.Parameter(ramp(device, 4), requires_grad=False)
    weight.calls = 0
    f = pg.record(lambda x: (setattr(weight, "calls", weight.calls + 1), x * weight)[1], warmup=1)
    for n in range(1, 6):
        f(ramp(device, 4))
        assert weight.calls == n


@may_run_live
def test_c09_an_attribute_given_to_an_argument(device):
    f = pg.record(lambda x: (setattr(x, "tag", 5), x * 2)[1], warmup=1)
    for _ in range(5):
        x = ramp(device, 4)
        f(x)
        assert x.tag == 5


@may_run_live
def test_c09_an_argument_that_the_function_makes_require_grad(device):
    f = pg.record(lambda x: torch.autograd.grad((x.requires_grad_() ** 2).sum(), x)[0], warmup=1)
    for _ in range(5):
        x = ramp(device, 4)
        assert_same(f(x), 2 * ramp(device, 4))
        assert x.requires_grad


@may_run_live
def test_c09_an_object_of_a_class_without_a_module(device):
    """`exec` in a bare dictionary gives classes that say they are of `builtins`."""

    def make():
        space = {}
        exec("class Kept:\n    last = 0.5\n    def put(self, value): self.last = value", space)
        kept = space["Kept"]()
        return lambda x, value: (kept.put(value), x * value)[1], vars(kept)

    both = side_by_side(make)
    for value in [0.5, 0.5, 0.25, 0.25, 0.5, 0.25, 0.5]:
        both(ramp(device, 4), value)


@may_run_live
def test_c09_a_list_whose_append_the_function_holds(device):
    seen = []
    append = seen.append
    f = pg.record(lambda x: (append(1), x * 2)[1], warmup=1)
    for n in range(1, 6):
        f(ramp(device, 4))
        assert len(seen) == n


@may_run_live
def test_c09_an_array_that_counts(device):
    numpy = pytest.importorskip("numpy")
    counts_of = numpy.zeros(2)

    def f(x):
        counts_of[0] += 1
        return x * 2

    f = pg.record(f, warmup=1)
    for n in range(1, 6):
        f(ramp(device, 4))
        assert counts_of[0] == n


def test_c09_an_equal_list_in_a_new_object_is_no_change(device):
    def make():
        at = types.SimpleNamespace(scales=[2.0])
        return lambda x: x * at.scales[0], at

    both = side_by_side(make)
    for n in range(6):
        both.change(lambda at: set_in_a_copy(at, "scales", 0))
        both(ramp(device, 4, start=n))
    assert_replays(both, ramp(device, 4))


@may_run_live
@pytest.mark.parametrize("count", [2, 80])
def test_c08_tensors_are_compared_without_guards_too(device, count, monkeypatch):
    """A release of torch without them has only Python to do it."""
    monkeypatch.setattr("phonograph.guards.tensor_states.tensor_check", lambda tensors: None)
    torch.manual_seed(0)
    weights = nn.ParameterList([nn.Parameter(torch.randn(3, 3, device=device)) for _ in range(count)])
    f = pg.record(lambda x: sum(w @ x for w in weights), warmup=1)
    optimizer = torch.optim.SGD(weights, lr=0.1)
    step = pg.record(optimizer.step)
    for w in weights:
        w.grad = torch.randn(3, 3, device=device)
    with torch.no_grad():
        for n in range(12):
            if n == 5:
                weights[1].data = weights[1].data.t()
            if n == 8:
                weights[1].grad.t_()
            before = [w.detach() - 0.1 * w.grad for w in weights]
            x = torch.full((3, 3), 1.0 * n, device=device)
            assert_same(f(x), sum(w @ x for w in weights))
            step()
            torch.testing.assert_close([*weights], before)
    assert pg.stats(f).replayed > 6
    assert pg.stats(step).replayed > 6


@may_run_live
def test_c08_what_goes_around_the_methods_of_a_parameter_is_found_late(device):
    """Parameters take turns: after as many replays as it takes for all of them, a change has been found."""
    torch.manual_seed(0)
    weights = nn.ParameterList([nn.Parameter(torch.randn(2, device=device)) for _ in range(200)])
    f, x = pg.record(lambda x: sum(weights, x), warmup=1), torch.ones(2, device=device)
    with torch.no_grad():
        for _ in range(4):
            assert_same(f(x), sum(weights, x))
        assert counts(f) == (1, 1, 3)
        torch._C.TensorBase.data.__set__(weights[150], torch.randn(2, device=device))
        for _ in range(16):  # four parts of them, one in four replays
            f(x)
        for _ in range(4):
            assert_same(f(x), sum(weights, x))


class Setting:
    scale = 1


@torch.library.custom_op("phonograph_tests::by_setting", mutates_args=())
def by_setting(x: torch.Tensor) -> torch.Tensor:
    return x * Setting.scale * (2 if torch.is_grad_enabled() else 3)


def in_no_grad(x):
    with torch.no_grad():
        return by_setting(x * 2)


def with_another_scale(x):
    Setting.scale = 5
    y = by_setting(x * 2)
    Setting.scale = 1
    return y


@may_run_live
@pytest.mark.parametrize("function", [in_no_grad, with_another_scale])
def test_c09_what_an_operator_of_the_users_own_asks_for(device, function):
    """Its code runs in each replay on the CPU, where it is called from."""
    recorded = pg.record(function)
    for n in range(5):
        x = ramp(device, 3, start=n)
        assert_same(recorded(x), function(x))


@pytest.mark.parametrize("operator", ["index", "of the user's own"])
def test_c09_attributes_that_nobody_reads_beside_an_operator_that_looks_at_them_all(device, operator):
    """Before some operators the CPU device looks whether anything is changed for a time: that is no code of the user's."""

    class Runner:
        def __init__(self):
            self.table = torch.arange(12.0, device=device).reshape(4, 3)
            self.steps = 0

        def step(self, i):
            return self.table[i] * 2 if operator == "index" else by_setting(self.table[:2] + i[:, None])

    runner = Runner()
    recorded = pg.record(runner.step)
    for n in range(12):
        runner.steps += 1
        i = torch.tensor([n % 4, 1], device=device)
        assert_same(recorded(i), runner.step(i))
    assert pg.stats(recorded).replayed == 11


# ---------------------------------------------------------------------------------------------------
# C9: modules that are not the user's

_PACKAGE = """
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
"""


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


# ---------------------------------------------------------------------------------------------------
# C8, C9: values that nothing in the code names


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


# ---------------------------------------------------------------------------------------------------
# C9, C11: what the garbage collector calls is no part of the function that runs just then

_TIMING = """
import time
began = took = 0.0

def timing(phase, info):
    global began, took
    if phase == "start": began = time.perf_counter()
    else: took += time.perf_counter() - began
"""


def _collecting(x):
    gc.collect()
    return x * 2


def test_c09_a_package_that_counts_collections(device, package):
    """It has the collector call it: its values change from call to call, and have no part in the result."""
    exec(compile(_TIMING, package.__file__, "exec"), vars(package))
    f = pg.record(lambda x: _collecting(package.by_flag(x)), warmup=1)
    gc.callbacks.append(package.timing)
    try:
        for n in range(8):
            assert_same(f(ramp(device, 3) + n), (ramp(device, 3) + n) * 2)
            gc.collect()
    finally:
        gc.callbacks.remove(package.timing)
    assert counts(f) == (1, 1, 7)


def test_c11_effects_of_what_the_collector_calls(device, tmp_path):
    """They happen, all of them, and refuse nothing: callbacks of the user's own, and destructors of garbage from before."""
    log = open(tmp_path / "log", "w", buffering=1)  # noqa: SIM115 - closed below

    def told(phase, info):
        log.write(f"{phase}\n")

    class Noisy:
        def __init__(self, n):
            self.n, self.me = n, self

        def __del__(self):
            log.write("gone ")
            log.write(f"{self.n}\n")

    def f(x):
        return _collecting(x)

    gc.collect()
    recorded = pg.record(f, warmup=1)
    gc.callbacks.append(told)
    gc.disable()  # so that it is our call that finds it
    try:
        for n in range(4):
            Noisy(n)
            assert_same(recorded(ramp(device, 3) + n), (ramp(device, 3) + n) * 2)
    finally:
        gc.enable()
        gc.callbacks.remove(told)
        gc.collect()
        log.close()
    assert counts(recorded) == (1, 1, 3)
    lines = (tmp_path / "log").read_text().split("\n")
    assert lines[:6] == ["start", "gone 0", "stop", "start", "gone 1", "stop"]
    assert told not in gc.callbacks


@pytest.mark.parametrize("make", [lambda: iter([1.0, 2.0]), lambda: iter((1.0, 2.0)), lambda: iter(range(2))])
def test_c09_an_iterator_that_has_nothing_left(device, make):
    """As `torchrl.modules.MLP` has from when it was made."""
    it = make()
    assert len(list(zip(range(2), it, strict=True))) == 2
    f = pg.record(lambda x: x * next(it, 3.0), warmup=1)
    for n in range(5):
        assert_same(f(ramp(device, 3) + n), (ramp(device, 3) + n) * 3)
    assert counts(f) == (1, 1, 4)


def grows_first(values, it):
    def f(x):
        values[len(values) :] = [3.0]
        return x * next(it, -100.0)

    return f


def grows_for_a_time(values, it):
    def f(x):
        values[:] = [2.0]
        y = x * next(it, -100.0)
        values[:] = []
        return y

    return f


@may_run_live
@pytest.mark.parametrize("make", [grows_first, grows_for_a_time, lambda _, it: lambda x: x * next(it, -100.0)])
@pytest.mark.parametrize("warmup", [0, 1])
def test_c12_an_iterator_of_a_list_that_grows(device, make, warmup):
    """It has nothing left, and may get more."""
    lists = [], []
    recorded, live = (make(values, iter(values)) for values in lists)
    f = pg.record(recorded, warmup=warmup)
    for n in range(7):
        if n in (0, 3, 5):
            for values in lists:
                values.append(float(n))
        x = ramp(device, 3) + n
        assert_same(f(x), live(x))
    assert "uses an iterator" in pg.explain(f)


@pytest.mark.parametrize("every", [30, 45, 50])
def test_c08_what_changes_every_so_many_steps_is_recorded_anew(device, every):
    """As weights do for an evaluation. It never comes to be too often."""
    state = types.SimpleNamespace(scale=2)  # no float: that would be followed
    f = pg.record(lambda x: x * state.scale, warmup=1)
    x = ramp(device, 2)
    for n in range(14 * every):
        if n % every == 0:
            state.scale += 1
        result = f(x)
    assert_same(result, x * state.scale)
    assert pg.stats(f).recorded == 14, pg.explain(f)
    assert pg.stats(f).replayed >= 14 * (every - 2)


class _Counting:
    def __init__(self, device):
        self.n, self.seen, self.table, self.weight = 0, None, {"n": 0}, nn.Parameter(torch.ones(3, device=device))

    def counts(self, x):
        self.n = object()
        return x * 2

    def keeps(self, x):
        y = x * 2
        self.seen = types.SimpleNamespace(last=y.detach())
        return y

    def replaces(self, x):
        self.weight.data = self.weight * 0.5
        return x * self.weight

    def enters(self, x):
        self.table["n"] = object()
        self.weight.data = self.weight.data
        return x * 2

    def twice(self, x):
        self.n = object()
        self.n = object()
        return x * 2


@may_run_live
@pytest.mark.parametrize(("method", "line"), [("counts", 1), ("keeps", 2), ("replaces", 1), ("enters", 1), ("twice", None)])
def test_c11_a_change_names_its_line(device, method, line):
    """If there is one only that sets what has changed."""
    function = getattr(_Counting(device), method)
    f = pg.record(function, warmup=1)
    for n in range(3):
        f(ramp(device, 3) + n)
    said = pg.explain(f)
    assert "which outlives the call" in said
    assert "write into a tensor that is there (copy_)" in said
    begin = function.__func__.__code__.co_firstlineno
    assert [n for n in range(1, 5) if f"{__file__}:{begin + n} " in said] == ([] if line is None else [line])
