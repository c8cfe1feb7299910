"""What is looked at in each replay, without telling Python's audit hooks."""

import sys
import weakref

import pytest
import torch

from phonograph.capture.recording import Entangled
from phonograph.python import identity as identity_module
from phonograph.python.identity import identity, reading_list, reading_parts
from phonograph.reads.readset import ReadSet
from phonograph.values.keys import Identity
from tests import forked

_AUDITED = """
import sys, torch, phonograph as pg

def scaled(x, by=2.0):
    return x * by

def f(x, y):
    return scaled(x) + scaled(y, len("abc"))

layer = torch.nn.Linear(4, 4)
step = pg.record(lambda x: layer(x).sum(), warmup=1)
f = pg.record(f, warmup=1)
x, y = torch.ones(4, 4), torch.ones(4, 4)
for _ in range(4):
    f(x, y), step(x).backward()
told = []
sys.addaudithook(lambda event, _: told.append(event))
for _ in range(5):
    f(x, y), step(x).backward()
assert pg.stats(f).replayed == pg.stats(step).replayed == 8
print(*told)
"""


def test_replays_are_nothing_to_be_told():
    """filelock sets an audit hook, and each event then costs 0.4 us. (A replay whose arguments are taken apart may ask.)"""
    run = forked.run(_AUDITED)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == []


def _function():
    def f(a=1, *, b=2):
        return a + b

    return f


@pytest.mark.parametrize("cells", ["in memory", "by attributes"])
@pytest.mark.parametrize(
    "change",
    [
        lambda f: setattr(f, "__code__", _function().__code__.replace(co_name="g")),
        lambda f: setattr(f, "__defaults__", (3,)),
        lambda f: setattr(f, "__defaults__", None),
        lambda f: setattr(f, "__kwdefaults__", {"b": 2}),
        lambda f: setattr(f, "attribute", 1),
    ],
    ids=["code", "defaults", "no defaults", "keyword defaults", "attribute"],
)
def test_what_makes_a_function_another_one(monkeypatch, cells, change):
    if cells == "by attributes":
        monkeypatch.setattr("phonograph.python.identity._LYING", None)
    functions = [_function() for _ in range(3)]
    read = reading_parts(functions)
    before = read()
    assert before == (*(part for f in functions for part in (f.__code__, f.__defaults__, f.__kwdefaults__)), 0, 0, 0)
    assert all(a is b for a, b in zip(before, read(), strict=True))
    change(functions[1])
    assert any(a is not b for a, b in zip(before, read(), strict=True))
    assert read() == (*(part for f in functions for part in (f.__code__, f.__defaults__, f.__kwdefaults__)),
                      *(len(vars(f)) for f in functions))  # fmt: skip


def test_functions_lie_as_it_is_thought():
    """Else all is read by attributes: right, and slower."""
    from phonograph.python.identity import _LYING

    assert (_LYING is not None) == (sys.implementation.name == "cpython")


def test_no_two_objects_have_one_identity():
    things = [object() for _ in range(1000)] + [[], {}, int, type, test_no_two_objects_have_one_identity]
    assert len({*map(identity, things)}) == len(things)


CHANGES = {
    "item": lambda values: values.__setitem__(20, object()),
    "the same again": lambda values: values.__setitem__(20, values[20]),
    "appended": lambda values: values.append(object()),
    "one less": lambda values: values.pop(),
    "cleared": lambda values: values.clear(),
    "reversed": lambda values: values.reverse(),
    "all others": lambda values: values.__setitem__(slice(None), [object() for _ in values]),
    "grown and shrunk": lambda values: (values.extend(range(1000)), values.__delitem__(slice(40, None))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_long_list_is_read_at_one_glance_as_long_as_it_holds_the_same(change):
    values = [object() for _ in range(40)]
    before, read = list(values), reading_list(values)
    assert read() == ((tuple(values),) if identity_module._LISTS else tuple(values))
    CHANGES[change](values)
    same = len(values) == len(before) and all(a is b for a, b in zip(values, before, strict=True))
    assert read() in ([(tuple(values),), tuple(values)] if same else [tuple(values)])


class StreamOfTheCpu(torch.Stream):
    """As `torch.cuda.Stream` is."""


def test_nobody_refers_weakly_to_streams_and_events():
    """Those of a GPU do not tell when they go: a weak reference to one would lead to memory that is somebody else's."""
    known, counts = StreamOfTheCpu(device="cpu"), []

    def reads():
        made = StreamOfTheCpu(device="cpu")
        assert known.device == made.device
        counts.append(weakref.getweakrefcount(made))

    with ReadSet().noting(reads):
        reads()
    things = [known, torch.Event("cpu")]
    kept = [Entangled(objects=things), *map(Identity, things)]
    assert [*counts, *map(weakref.getweakrefcount, things)] == [0, 0, 0]
    assert kept[1:] == [*map(Identity, things)]
