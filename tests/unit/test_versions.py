"""Dictionaries that say whether they have been changed."""

import collections
import contextlib
import gc
import weakref

import pytest

from phonograph._torch import native
from phonograph.python import dict_versions as versions
from phonograph.python.dict_versions import Versions, of_class, tell

pytestmark = pytest.mark.skipif(not versions._heard, reason="not every change of a dictionary is heard here")


class Thing:
    rate = 1


def of_plain(change):
    d = {"a": 1, "b": 2}
    return d, lambda: change(d)


def of_ordered(change):
    d = collections.OrderedDict(a=1)
    return d, lambda: change(d)


def of_object(change):
    thing = Thing()
    thing.a = 1
    return thing.__dict__, lambda: change(thing)


def of_class_of(change):
    kind = type("Kind", (), {"a": 1})
    return of_class(kind), lambda: change(kind)


def looped(thing):
    for i in range(100):
        thing.a = i + 0.5


def looped_over_items(d):
    for i in range(100):
        d["a"] = i + 0.5


def emptied_and_filled(d):
    d.clear()
    d.update({"c": 1})


WAYS = {
    "item": (of_plain, lambda d: d.__setitem__("a", 5)),
    "items in a loop": (of_plain, looped_over_items),
    "deleted": (of_plain, lambda d: d.__delitem__("a")),
    "update": (of_plain, lambda d: d.update(a=7)),
    "or": (of_plain, lambda d: d.__ior__({"c": 7})),
    "pop": (of_plain, lambda d: d.pop("a")),
    "popitem": (of_plain, lambda d: d.popitem()),
    "setdefault": (of_plain, lambda d: d.setdefault("new", 1)),
    "clear": (of_plain, lambda d: d.clear()),
    "emptied and filled": (of_plain, emptied_and_filled),
    "exec": (of_plain, lambda d: exec("a = 77", d)),
    "ordered item": (of_ordered, lambda d: d.__setitem__("b", 5)),
    "ordered, as a plain one": (of_ordered, lambda d: dict.__setitem__(d, "a", 5)),
    "ordered pop": (of_ordered, lambda d: d.pop("a")),
    "ordered popitem": (of_ordered, lambda d: d.popitem()),
    "ordered clear": (of_ordered, lambda d: d.clear()),
    "ordered deleted": (of_ordered, lambda d: d.__delitem__("a")),
    "attribute": (of_object, lambda x: setattr(x, "a", 7)),
    "attributes in a loop": (of_object, looped),
    "new attribute": (of_object, lambda x: setattr(x, "b", 7)),
    "attribute deleted": (of_object, lambda x: delattr(x, "a")),
    "its dictionary": (of_object, lambda x: vars(x).update(a=8)),
    "of a class": (of_class_of, lambda kind: setattr(kind, "a", 7)),
    "of a class in a loop": (of_class_of, looped),
    "of a class, new": (of_class_of, lambda kind: setattr(kind, "b", 7)),
    "of a class, deleted": (of_class_of, lambda kind: delattr(kind, "a")),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_change_is_heard(way):
    make, change = WAYS[way]
    d, do = make(change)
    if way == "attributes in a loop":
        looped(Thing())  # the interpreter has got used to it
    other = {"a": 1}
    assert tell([d, other])
    known = Versions([other, d], [])
    assert known.moved() == [0, 1]  # nobody has looked yet
    known.keep()
    assert known.moved() == []
    do()
    assert known.moved() == [1]
    assert known.moved() == [1]  # as long as nobody keeps it
    known.keep()
    assert known.moved() == []


FILLED = {
    "update": lambda d: d.update({"a": 1}),
    "|=": lambda d: d.__ior__({"a": 1}),
    "by keywords": lambda d: d.update(a=1),
}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("fill", FILLED.values(), ids=list(FILLED))
def test_an_empty_dictionary_that_gets_all_items_of_another_is_heard(fill, own):
    """torch's guards do not hear of that from CPython 3.12 on."""
    d = {"b": 1}
    asked = Versions([], [lambda: d]) if own else Versions([d], [])
    for _ in range(3):
        asked.moved()
        asked.keep()
        assert asked.moved() == []
        d.clear()
        assert asked.moved() == [0]
        asked.keep()
        assert asked.moved() == []
        fill(d)
        assert asked.moved() == [0]


def test_a_change_of_a_global_variable_is_heard():
    known = Versions([globals()], [])
    known.moved(), known.keep()
    exec("several = 0\nfor i in range(100): several = i * 0.5", globals())
    assert known.moved() == [0]


def test_an_objects_dictionary_may_be_replaced():
    thing = Thing()
    known = Versions([], [lambda: thing.__dict__])
    known.moved(), known.keep()
    assert known.moved() == []
    thing.__dict__ = {}
    assert known.moved() == [0]
    known.keep()
    thing.a = 2
    assert known.moved() == [0]


def test_several_sets_of_dictionaries_hear_each_of_its_own():
    one, two = {"a": 1}, {"a": 1}
    first, second = Versions([one], []), Versions([two], [])
    for known in (first, second):
        known.moved(), known.keep()
    one["a"] = 2
    assert (second.moved(), first.moved()) == ([], [0])
    first.keep()
    two["a"] = 3
    assert (first.moved(), second.moved()) == ([], [0])


def test_what_has_an_order_or_methods_of_its_own_does_not_tell():
    class Own(dict):
        pass

    assert tell([{}, collections.OrderedDict(a=1)])
    assert not tell([collections.OrderedDict(a=1, b=2)])
    assert not tell([Own()])
    assert not tell([collections.defaultdict(int)])
    assert not tell([vars(Thing)])
    with contextlib.suppress(AttributeError):
        del Thing.a


def test_a_dictionary_that_lies_where_another_was_is_heard_of():
    """Who watches dictionaries knows them by where they lie, and has to hear when one goes."""
    places = set()
    for n in range(2_000):
        d = {"a": n}
        places.add(id(d))
        before = versions.dict_version(d)
        d["a"] = n + 0.5
        assert versions.dict_version(d) != before
        del d
    assert len(places) < 2_000


def test_facts_keep_the_dictionary_whose_version_they_compare():
    if not native.tells_versions:
        pytest.skip("there is no helper that tells versions")
    d = {"a": 1}
    gone = weakref.finalize(of := Thing(), int)
    of.__dict__["held"] = d
    facts = native._native.Facts([("version", d), ("version", of.__dict__)])
    del d, of
    gc.collect()
    assert not gone.alive
    assert facts()
