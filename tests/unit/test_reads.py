"""A call's reads are noted, told of and put back, and nothing that the program does is another while they are noted."""

import _thread
import abc
import copy
import ctypes
import dataclasses
import enum
import functools
import gc
import random
import sys
import threading
import time
import types
import warnings
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping

import pytest
import torch
from torch import nn

from phonograph._torch import autograd
from phonograph.python import origin
from phonograph.reads.gate import gate
from phonograph.reads.place import mro_of, registered
from phonograph.reads.readset import ReadSet


class Plain:
    shared = 1.0

    def __init__(self):
        self.a, self.b, self.table, self.steps = 1.0, 2.0, {"x": 1, "y": 2}, iter([1, 2])

    @property
    def twice(self):
        return self.a * 2

    def method(self):
        return self.b


class Answering:
    def __getattr__(self, name):
        if name.startswith("no"):
            raise AttributeError(name)
        return name


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self):
        self.a = 1


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale, self.unread = nn.Linear(2, 2), 2.0, 3.0

    def forward(self, x):
        return self.layer(x) * self.scale


class Lying:
    __class__ = property(lambda self: 1 / 0)

    def __init__(self):
        self.a = 1


SETTINGS = types.ModuleType("settings_of_the_tests")
COUNT, ROWS, PLAIN, FACTORS = 0, [1], Plain(), {"rate": 2.0, "done": 0}


def noted(function, *args):
    reads = ReadSet()
    with reads.noting(function, *args):
        function(*args)
    return reads


def changed(reads):
    return [read.place.path for read in reads.changed()]


CHANGES = {
    "an attribute": (Plain, lambda x: x.a, lambda x: setattr(x, "a", 3.0)),
    "what a property reads": (Plain, lambda x: x.twice, lambda x: setattr(x, "a", 3.0)),
    "an attribute by a computed name": (Plain, lambda x: getattr(x, "A".lower()), lambda x: setattr(x, "a", 3.0)),
    "an attribute in a text": (Plain, "{0.b}".format, lambda x: setattr(x, "b", 3.0)),
    "what a container holds": (Plain, lambda x: x.table["x"], lambda x: x.table.update(x=3)),
    "an attribute of the class": (Plain, lambda x: x.shared, lambda x: setattr(x, "shared", 3.0)),
    "a slot": (Slotted, lambda x: x.a, lambda x: setattr(x, "a", 3)),
    "an empty slot": (Slotted, lambda x: getattr(x, "b", 0), lambda x: setattr(x, "b", 3)),
    "what is not there": (Plain, lambda x: getattr(x, "absent", 0), lambda x: setattr(x, "absent", 3)),
    "all attributes": (Plain, vars, lambda x: setattr(x, "new", 3)),
    "a copy": (Plain, lambda x: copy.copy(x.table), lambda x: x.table.update(y=3)),
    "a setting of a module": (Net, lambda m: m(torch.ones(2)), lambda m: setattr(m, "scale", 3.0)),
    "a weight of a layer": (Net, lambda m: m(torch.ones(2)), lambda m: setattr(m.layer, "weight", nn.Parameter(torch.ones(1)))),
    "a hook": (Net, lambda m: m(torch.ones(2)), lambda m: m.register_forward_hook(lambda *_: None)),
    "past the gate": (Plain, lambda x: object.__getattribute__(x, "a"), lambda x: setattr(x, "a", 3.0)),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_what_was_read_is_noticed(what):
    make, read, change = CHANGES[what]
    thing = make()
    reads = noted(read, thing)
    assert changed(reads) == []
    change(thing)
    assert changed(reads) != []


BESIDE = {
    "an attribute": (Plain, lambda x: x.a, lambda x: setattr(x, "b", 3.0)),
    "a container": (Plain, lambda x: x.a, lambda x: x.table.update(x=3)),
    "a setting of a module": (Net, lambda m: m(torch.ones(2)), lambda m: setattr(m, "unread", 4.0)),
    "a new attribute": (Plain, lambda x: x.a, lambda x: setattr(x, "new", 3.0)),
}


@pytest.mark.parametrize("what", BESIDE)
def test_a_change_beside_what_was_read_is_none(what):
    make, read, change = BESIDE[what]
    thing = make()
    reads = noted(read, thing)
    change(thing)
    assert changed(reads) == []


def test_an_iterator_refuses_only_where_it_is_read():
    assert noted(lambda x: x.a, Plain()).refused == []
    assert noted(lambda x: x.steps, Plain()).refused == ["an iterator (list_iterator) at Plain.steps"]


def test_what_we_ask_ourselves_is_no_read_of_the_call(monkeypatch):
    """As where an operator is looked at: of which kind it is, and which number stands for another."""
    space = {"__name__": "phonograph.looking", "random": random, "Mapping": Mapping}
    source = "def look(x):\n    return isinstance(x, Mapping), random.uniform(0.0, 1.0)"
    exec(compile(source, origin.__file__, "exec"), space)
    look = space["look"]
    reads = noted(lambda: look({}))
    abc.ABC.register(type("Other", (), {}))
    monkeypatch.setattr(random, "uniform", lambda a, b: a)
    assert changed(reads) == []


def test_which_classes_are_registered_counts_where_a_call_asks():
    reads = noted(lambda: isinstance(PLAIN, Mapping))
    abc.ABC.register(type("Other", (), {}))
    assert changed(reads) == ["the classes registered with abstract ones"]


class Described:
    def __init_subclass__(cls):
        cls.described = cls.__name__


def test_a_class_may_be_made_by_the_call():
    def make():
        @dataclasses.dataclass(frozen=True)
        class Point(Described):
            x: int = 1

        return Point().x, Point.described

    assert make() == (1, "Point")
    reads = ReadSet()
    with reads.noting(make):
        assert make() == (1, "Point")
    assert changed(reads) == []


def test_variables_of_functions_are_places(monkeypatch):
    factor = 2.0

    def scaled():
        return COUNT * factor

    reads = noted(scaled)
    assert changed(reads) == []
    monkeypatch.setitem(globals(), "COUNT", 3)
    assert changed(reads) == ["COUNT"]
    monkeypatch.undo()
    factor = 3.0
    assert changed(reads) == ["factor"]


def test_what_a_backend_has_compiled_is_one_thing():
    """torch's own objects in it are as many as a model has parameters, and stay what they are."""
    name, space = "__compiled_fn_1", {}
    space[name] = functools.partial(max, [1, 2])
    exec(f"def called(): return {name}()", space)
    found = [read.place for read in noted(space["called"]).reads.values() if read is not None]
    assert [place.name for place in found if place.path.startswith(name)] == [name]


def test_a_module_tells_what_is_read_of_it(monkeypatch):
    monkeypatch.setattr(SETTINGS, "rate", 1.0, raising=False)
    reads = noted(lambda: SETTINGS.rate)
    assert type(SETTINGS) is types.ModuleType
    monkeypatch.setattr(SETTINGS, "other", 1.0, raising=False)
    assert changed(reads) == []
    monkeypatch.setattr(SETTINGS, "rate", 2.0)
    assert changed(reads) == ["settings_of_the_tests.rate"]


def test_a_module_is_asked_where_no_code_of_pythons_runs(monkeypatch):
    """As autograd's threads ask it, which C++ begins: a GPU's backward runs in them."""
    monkeypatch.setattr(SETTINGS, "rate", 1.0, raising=False)
    raised, over = [], threading.Event()
    monkeypatch.setattr(sys, "unraisablehook", lambda raising: raised.append(raising.exc_value))

    def asks():
        _ = SETTINGS.rate  # so that its attributes are heard
        done = weakref.finalize(gone := Plain(), over.set)
        _thread.start_new_thread(functools.partial(getattr, SETTINGS), ("rate", gone))
        del gone
        while done.alive:
            time.sleep(0.001)

    noted(asks)
    assert over.wait(10)
    assert raised == []


def test_a_thread_that_none_of_pythons_code_has_made_is_heard_within_a_backward(monkeypatch):
    """As autograd's of a GPU. Who asks where it runs meets the doors of modules and of classes: it asks none of them."""
    monkeypatch.setattr(SETTINGS, "rate", 1.0, raising=False)
    monkeypatch.setattr(autograd, "backward_id", lambda: 1)
    raised, plain = [], Plain()
    monkeypatch.setattr(sys, "unraisablehook", lambda raising: raised.append(raising.exc_value))

    def asks():
        _ = threading.current_thread().name, plain.a, SETTINGS  # so that these are heard
        _from_c(lambda: SETTINGS.rate * plain.a)

    with ReadSet().noting(asks) as reads:
        reads.goes_with(None, lambda: threading.get_ident() == -1)
        asks()
    assert raised == []
    monkeypatch.setattr(SETTINGS, "rate", 2.0)
    assert changed(reads) == ["settings_of_the_tests.rate"]


def _from_c(work):
    """Called by a thread that C makes."""
    kind = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
    calls, thread, c = kind(lambda _: work() and None), ctypes.c_ulong(), ctypes.CDLL(None)
    assert c.pthread_create(ctypes.byref(thread), None, calls, None) == 0
    c.pthread_join(thread, None)


def test_a_module_that_was_not_there_may_come(monkeypatch):
    def optional():
        try:
            import phonographs_absent_module
        except ImportError:
            return None
        return phonographs_absent_module

    reads = noted(optional)
    assert changed(reads) == []
    monkeypatch.setitem(sys.modules, "phonographs_absent_module", types.ModuleType("phonographs_absent_module"))
    assert changed(reads) == ["sys.modules['phonographs_absent_module']"]


def test_nothing_of_torch_or_the_call_itself_is_kept():
    gone = []

    def made():
        x = Plain()
        weakref.finalize(x, gone.append, 1)
        x.a, x.table = 2, {}
        assert x.a == 2
        del x
        gc.collect()
        return [*gone]

    reads = ReadSet()
    with reads.noting(made):
        assert made() == [1]


KINDS = {
    "dict": lambda: {"a": 1, "b": 2}, "ordered": lambda: OrderedDict(a=1, b=2), "default": lambda: defaultdict(int, a=1),
    "list": lambda: [1, 2], "set": lambda: {1, 2}, "deque": lambda: deque([1, 2], maxlen=2), "bytes": lambda: bytearray(b"ab"),
}  # fmt: skip
EDITS = {
    "dict": lambda x: x.pop("a"), "ordered": lambda x: x.move_to_end("a"), "default": lambda x: x["new"],
    "list": lambda x: x.reverse(), "set": lambda x: x.add(3), "deque": lambda x: x.append(3),
}  # fmt: skip


@pytest.mark.parametrize("kind", EDITS)
def test_what_a_call_did_is_undone(kind):
    class Holder:
        pass

    holder, there = Holder(), KINDS[kind]()
    holder.of, before = there, copy.copy(there)

    def edited(holder):
        EDITS[kind](holder.of)
        holder.of, holder.new = None, 1

    reads = ReadSet()
    with reads.noting(edited, holder):
        edited(holder)
        reads.restore()
    assert holder.of is there
    assert there == before
    assert list(there) == list(before)
    assert vars(holder) == {"of": there}


def test_what_a_call_writes_is_no_constant():
    def counted():
        global COUNT
        COUNT += 1

    reads = noted(counted)
    assert [place.path for place in reads.written] == ["COUNT"]
    counted()
    assert changed(reads) == []


def test_items_that_a_call_does_not_write_stay_constants():
    def counted():
        FACTORS["done"] += 1
        return FACTORS["rate"]

    reads = noted(counted)
    assert [place.path for place in reads.written] == ["FACTORS"]
    counted()
    assert changed(reads) == []
    FACTORS["rate"] = 3.0
    assert changed(reads) == ["FACTORS['rate']"]


def test_state_that_a_call_carries_is_not_kept():
    class Cell:
        state = None

        def __call__(self):
            self.state = torch.zeros(2) if self.state is None else self.state + 1

    cell = Cell()
    cell()
    before, reads = weakref.ref(cell.state), noted(cell)
    assert before() is None
    after = weakref.ref(cell.state)
    cell()
    assert after() is None
    assert changed(reads) == []


def test_what_a_call_sets_to_what_it_was_is_relied_on():
    thing = Plain()
    reads = noted(lambda x: setattr(x, "a", 1.0), thing)
    assert reads.written == []
    thing.a = 2.0
    assert changed(reads) == ["Plain.a"]


def test_what_a_call_sets_is_an_effect():
    thing = Plain()
    reads = noted(lambda x: setattr(x, "a", 2.0), thing)
    assert [place.path for place in reads.written] == ["Plain.a"]
    thing.a = 3.0
    assert changed(reads) == []


def test_layers_and_optimizers_are_one_place_each():
    net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(8)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def step():
        net(torch.ones(2)).sum().backward()
        optimizer.step()

    step()
    reads = noted(step)
    of_layers = [r for r in reads.reads.values() if r is not None and r.place.name in ("<layer>", "<optimizer>")]
    assert len(of_layers) == 10
    assert changed(reads) == []
    optimizer.param_groups[0]["lr"] = 1.0
    assert changed(reads) == ["optimizer"]


# -- nothing is another


class Colour(enum.Enum):
    RED = 1


class Shape(abc.ABC):
    @abc.abstractmethod
    def area(self): ...


class Square(Shape):
    def area(self):
        return 1


def warns(x):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        x.warned
    return [(w.filename, w.lineno) for w in said]


class Warner:
    @property
    def warned(self):
        warnings.warn("of the caller", stacklevel=2)


def fails(function, *args):
    try:
        function(*args)
    except Exception as e:
        return type(e), e.args
    return None


SAME = {
    "no attribute": (Plain, lambda x: fails(getattr, x, "absent")),
    "no attribute, and a function for such": (Answering, lambda x: (x.some, fails(getattr, x, "nothing"))),
    "a class that raises": (Lying, lambda x: (x.a, fails(isinstance, x, int))),
    "the class": (Plain, lambda x: (type(x), x.__class__, isinstance(x, Plain))),
    "the class of a module": (lambda: SETTINGS, lambda m: (m.__class__, isinstance(m, types.ModuleType), repr(m))),
    "a copy": (Plain, lambda x: vars(copy.copy(x)).keys()),
    "an enumeration": (lambda: Colour.RED, lambda c: (c.value, c is Colour.RED, Colour(1), fails(setattr, c, "value", 2))),
    "an abstract class": (Square, lambda x: (x.area(), isinstance(x, Shape), fails(Shape))),
    "a warning's place": (Warner, warns),
    "a deleted attribute": (Plain, lambda x: (delattr(x, "a"), fails(getattr, x, "a"), setattr(x, "a", 1))),
    "names": (Plain, dir),
}


@pytest.mark.parametrize("what", SAME)
def test_nothing_is_another_while_it_is_noted(what):
    make, use = SAME[what]
    thing = make()
    before, reads = use(thing), ReadSet()
    with reads.noting(use, thing):
        meanwhile = use(thing)
    assert meanwhile == before == use(thing)


def test_classes_are_as_before():
    before = {kind: dict(vars(kind)) for kind in (Plain, Answering, Net, Slotted, Square)}
    for kind in before:
        noted(lambda x: getattr(x, "absent", None), kind())
    assert {kind: dict(vars(kind)) for kind in before} == before
    assert Plain.__getattribute__ is object.__getattribute__
    assert sys.getprofile() is None


def test_an_exception_leaves_nothing_behind():
    reads = ReadSet()
    with pytest.raises(KeyError), reads.noting(PLAIN):
        PLAIN.table["absent"]
    assert "__getattribute__" not in vars(Plain)
    assert type(SETTINGS) is types.ModuleType


def test_other_threads_are_not_heard():
    def read(thing):
        other = threading.Thread(target=lambda: thing.b)
        other.start()
        other.join()
        return thing.a

    thing = Plain()
    reads = noted(read, thing)
    thing.b = 3.0
    assert changed(reads) == []


def test_of_two_calls_at_once_one_is_told_that_it_hears_nothing():
    outer, inner = ReadSet(), ReadSet()
    with outer.noting(PLAIN), inner.noting(PLAIN):
        PLAIN.a
    assert outer.unheard == ""
    assert inner.unheard == "another thread's call is recorded at the same time"


class Listener:
    """Who listens at a gate, and writes down what is said."""

    def __init__(self):
        self.said, self.codes = [], []

    def has_read(self, thing, name, frame):
        self.said.append(name)

    def writes(self, thing, name, frame):
        self.said.append(f"{name} is written")

    def starts(self, code, frame):
        assert frame.f_code is code
        self.codes.append(code.co_name)
        return False

    def reads_past(self, thing):
        self.said.append(thing)

    def hears_no_more(self, why):
        self.said.append(why)


def called():
    return PLAIN.method()


def test_starts_are_heard_once_for_each_code_and_again_by_the_next():
    for _ in range(2):
        heard = Listener()
        with gate(heard, [PLAIN]):
            called()
            called()
        assert heard.codes.count("called") == heard.codes.count("method") == 1
        assert heard.said[:2] == ["method", "b"]


def test_writes_are_heard_before_they_are_made():
    heard = Listener()
    with gate(heard, [PLAIN]):
        PLAIN.a = 1.0
        del PLAIN.a
        PLAIN.a = 1.0
    assert heard.said[:3] == ["a is written"] * 3


@pytest.mark.skipif(not hasattr(sys, "monitoring"), reason="before Python 3.12 nobody tells of such calls")
@pytest.mark.parametrize("get", [object.__getattribute__, PLAIN.__getattribute__], ids=["of the class", "bound"])
def test_calls_that_go_past_the_doors_are_heard(get):
    def past():
        return get(PLAIN, "a") if get is object.__getattribute__ else get("a")

    heard = Listener()
    with gate(heard):
        past()
    assert heard.said == [PLAIN if get is object.__getattribute__ else get]


def test_what_somebody_else_looks_after_is_apart():
    """Only what its class has from packages counts of it, and what is reached through it."""
    own = Plain()
    own.inner = Plain()
    reads = ReadSet([own, own.inner])
    with reads.noting():
        _ = own.inner.a
    own.a, own.inner.a = 2, 3
    assert reads.reads
    assert not reads.changed()


def test_nobody_tells_of_what_leads_to_what_is_apart_until_it_is_written(monkeypatch):
    own, told = Plain(), []
    own.inner = Plain()
    monkeypatch.setattr(ReadSet, "has_read", lambda reads, thing, name, frame: told.append(name))
    with ReadSet([own, own.inner]).noting():
        _ = own.inner.a, own.method
        before = [*told]
        own.inner = Plain()
        _ = own.inner
        after = [*told]
    assert before == ["method"]
    assert after == ["method", "inner"]


def test_the_number_of_registered_classes_is_one_object_as_long_as_it_stays():
    abstract = abc.ABCMeta("Abstract", (), {})
    for _ in range(300):  # beyond the numbers of which Python has one object each
        abstract.register(type("Made", (), {}))
    place = registered()
    (before,) = place.get()
    assert place.get()[0] is before
    abstract.register(type("Made", (), {}))
    assert place.get() != (before,)


def test_a_class_that_is_being_made_has_no_bases_yet():
    found = []

    class Meta(type):
        def mro(cls):
            found.append(mro_of(cls))
            return super().mro()

    Meta("Made", (), {})
    assert found == [()]


def test_a_table_is_kept_by_no_circle():
    """What a call has made goes when the table does."""
    gc.disable()
    try:
        reads, module = ReadSet(), types.ModuleType("read_by_a_call")
        with reads.noting():
            Plain().a
            module.__dict__.get("a")
        left = weakref.ref(reads)
        del reads
        assert left() is None
    finally:
        gc.enable()


def test_what_a_class_of_torchs_has_been_given_is_noticed(monkeypatch):
    monkeypatch.setattr(nn.Linear, "mine", 2.0, raising=False)
    reads = ReadSet()
    with reads.noting(f := lambda: nn.Linear.mine):
        f()
    monkeypatch.setattr(nn.Linear, "mine", 3.0)
    assert [read.place.path for read in reads.changed()] == ["Linear.mine"]


def test_what_a_module_had_is_known_where_another_sets_it_first(monkeypatch):
    """And a function of the module's own reads it then, as a variable; it ends as it began."""
    settings = types.ModuleType("other_settings_of_the_tests")
    settings.busy = False
    exec("def asks():\n    return busy", vars(settings))

    def works():
        settings.busy = True
        settings.asks()
        settings.busy = False

    reads = noted(works)
    assert [place.path for place in reads.written] == []
    settings.busy = True
    assert "busy" in [path.rpartition(".")[2] for path in changed(reads)]
