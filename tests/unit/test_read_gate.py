"""What is read of objects is noted, of the right ones, and classes are as before; which keys code reads of dictionaries."""

import copy
import gc
import threading
import types
import weakref
from contextlib import suppress
from enum import Enum

import pytest
import torch
from torch import nn

from phonograph.python import read_gate
from phonograph.python.identity import identity
from phonograph.python.introspection import MISSING
from phonograph.python.read_gate import Reads, behind_gate, may_be_gated
from phonograph.python.subscripts import keys_after, keys_of_variables


class Plain:
    shared = 1.0

    def __init__(self):
        self.a, self.b, self.table = 1.0, 2.0, {"x": 1, "y": 2}

    @property
    def twice(self):
        return self.a * 2


class Derived(Plain):
    def __getattr__(self, name):
        return name


class Guarded:
    def __getattribute__(self, name):
        return object.__getattribute__(self, name)


class Mixin:
    pass


class Asking:
    def __getattribute__(self, name):
        if super().__getattribute__("__dict__").get("strict") is not None and super().__getattribute__("scale"):
            raise AttributeError
        return super().__getattribute__(name)


class Renaming(Mixin):
    names = types.MappingProxyType({"size": "a"})

    def __getattribute__(self, name):
        return super().__getattribute__(super().__getattribute__("names").get(name, name))


class Both(Renaming, Mixin, Asking):
    def __init__(self):
        self.a, self.b = 1.0, 2.0


class AsksForAll(Asking):
    def __getattribute__(self, name):
        return super().__getattribute__("__dict__")[name]


class MadeUp(Asking):
    def __getattribute__(self, name):
        return super().__getattribute__("_" + name)


class Another(Asking):
    def __getattribute__(self, name):
        name = name.lower()
        return super().__getattribute__(name)


class Setting:
    def __setattr__(self, name, value):
        super().__setattr__("_" + name, value)


class Colour(Enum):
    RED = 1


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale, self.unread = nn.Linear(2, 2), 2.0, 3.0

    def forward(self, x):
        self.mode = "used"
        return self.layer(x) * self.scale


def noted(thing, read):
    reads = Reads([thing])
    with reads.noting():
        read(thing)
    return reads


READS = {
    "by name": (lambda x: x.a, {"a"}),
    "by a name that is made up": (lambda x: getattr(x, "A".lower()), {"a"}),
    "in a text": ("{0.b}".format, {"b"}),
    "by a property": (lambda x: x.twice, {"twice", "a"}),
    "of the class": (lambda x: x.shared, {"shared"}),
    "what is not there": (lambda x: getattr(x, "absent", None), {"absent"}),
    "set": (lambda x: setattr(x, "a", 1.0), {"a"}),
    "all": (vars, None),
    "copied": (copy.copy, None),
    "of its dictionary": (lambda x: x.__dict__["a"], None),
    "by its names": (dir, None),
}


@pytest.mark.parametrize("kind", [Plain, Derived])
@pytest.mark.parametrize("how", READS)
def test_names_that_are_read(kind, how):
    read, names = READS[how]
    if how == "copied" and kind is Derived:
        pytest.skip("a copy asks such an object for methods that it makes up")
    thing, other = kind(), kind()
    reads = noted(thing, read)
    assert reads.names(thing) == names
    assert reads.names(other) is None


def test_another_object_of_the_class_is_not_noted():
    mine, other = Plain(), Plain()
    reads = noted(mine, lambda _: other.a)
    assert reads.names(mine) == set()


def test_a_class_that_sets_its_attributes_itself():
    thing, before = Setting(), dict(vars(Setting))
    thing.a = 1.0
    assert noted(thing, lambda x: x._a).names(thing) == {"_a"}
    assert noted(thing, lambda x: setattr(x, "a", 2.0)).names(thing) is None
    assert vars(thing) == {"_a": 2.0}
    assert vars(Setting) == before


def test_writes_of_classes_that_derive_from_each_other():
    things = Plain(), Derived()
    reads = Reads(things)
    with reads.noting():
        for thing in things:
            thing.b = 3.0
    assert [reads.names(thing) for thing in things] == [{"b"}, {"b"}]


def test_a_module():
    net = Net()
    names = noted(net, lambda net: net(torch.ones(1, 2))).names(net)
    assert {"layer", "scale", "mode", "forward"} <= names
    assert "unread" not in names


def test_a_class_that_asks_its_base_for_attributes():
    assert Both.__mro__[2] is Mixin
    names = noted(thing := Both(), lambda x: x.size).names(thing)
    assert {"names", "a", "strict", "scale"} <= names
    assert "b" not in names
    assert "__getattribute__" not in vars(Mixin)


@pytest.mark.parametrize("last", [AsksForAll, MadeUp, Another])
def test_a_base_that_may_ask_for_anything(last):
    assert may_be_gated(type("Of", (Renaming, Mixin, Asking), {}))
    assert not may_be_gated(type("Of", (Renaming, Mixin, last), {}))


@pytest.mark.parametrize("kind", [int, dict, list, type, Colour, Guarded, torch.Tensor, types.SimpleNamespace,
                                  torch.optim.SGD, types.ModuleType])  # fmt: skip
def test_what_cannot_be_gated(kind):
    assert not may_be_gated(kind)


def test_classes_are_as_before_also_after_an_exception():
    before = dict(vars(Plain)), dict(vars(nn.Module))
    reads = Reads([Plain(), Net()])
    with suppress(ZeroDivisionError), reads.noting():
        assert behind_gate(vars(Plain)["__getattribute__"]) is MISSING
        assert behind_gate(vars(nn.Module)["__getattribute__"]) is MISSING
        raise ZeroDivisionError
    assert (dict(vars(Plain)), dict(vars(nn.Module))) == before


def test_two_at_a_time():
    outer, inner = Reads([Plain()]), Reads([Plain()])
    with outer.noting():
        thread = threading.Thread(target=_enter, args=(inner,))
        thread.start()
        thread.join()
        assert behind_gate(vars(Plain)["__getattribute__"]) is MISSING
    assert outer.certain
    assert not inner.certain
    assert "__getattribute__" not in vars(Plain)


def _enter(reads):
    with reads.noting():
        pass


def test_dynamo_compiles_without_a_gate():
    torch._dynamo.reset()
    plain, reads = Plain(), Reads([Plain()])

    def f(x):
        return x * plain.a

    with reads.noting():
        compiled = torch.compile(f, backend="eager", fullgraph=True)
        compiled(torch.ones(2))
        assert "__getattribute__" not in vars(Plain)
    assert not reads.certain


TABLE = {"x": 1, "y": 2}
KEYS = {
    "one": (lambda x: x.table["x"], {"x"}),
    "two": (lambda x: x.table["x"] + x.table["y"], {"x", "y"}),
    "with a default": (lambda x: x.table.get("z", 3), {"z"}),
    "without": (lambda x: x.table.get("z"), {"z"}),
    "asked for": (lambda x: "z" in x.table, {"z"}),
    "asked for by one of two": (lambda x: [x.a, (("y" if x.a else "z") in x.table) + x.b, x.a + x.b], None),
    "asked for by what is worked out": (lambda x: "Z".lower() in x.table, None),
    "worked out": (lambda x: x.table["X".lower()], None),
    "a default that is worked out": (lambda x: x.table.get("z", len(x.table)), None),
    "handed on": (lambda x: len(x.table), None),
    "set": (lambda x: x.table.__setitem__("x", 1), None),
    "an item set": (lambda x: exec("x.table['x'] = 1", {"x": x}), None),
    "by another function": (lambda x: getattr(x, "table")["x"], None),  # noqa: B009
    "one and all": (lambda x: x.table["x"] + sum(x.table.values()), None),
}


@pytest.mark.parametrize("how", KEYS)
def test_keys_that_are_read(how):
    read, keys = KEYS[how]
    thing = Plain()
    assert noted(thing, read).tables == {identity(thing.table): keys}


def test_keys_of_variables():
    here, there = {"x": 1}, {"x": 1}

    def f():
        return TABLE["x"] + here["x"] + sum(there.values()) + (lambda: TABLE.get("y"))()

    assert keys_of_variables(f.__code__, dict) == {"TABLE": {"x", "y"}, "here": {"x"}, "there": None, "sum": None}
    assert set(keys_after(f.__code__, dict).values()) == {"x"}


def test_a_class_that_is_not_kept():
    class Local(Plain):
        pass

    noted(Local(), lambda x: x.a)
    gone = weakref.ref(Local)
    del Local
    gc.collect()
    assert gone() is None


def test_a_class_is_gated_so_many_times(monkeypatch):
    monkeypatch.setattr(read_gate, "_MOST", 2)
    thing, net = Plain(), Net()
    for known in (True, True, False):
        reads = Reads([thing, net])
        with reads.noting():
            assert thing.a == 1.0
            assert net.scale == 2.0
        assert (reads.knows(Plain), reads.knows(Net)) == (known, known)
        assert reads.names(thing) == ({"a"} if known else None)
