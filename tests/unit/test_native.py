"""The helper in C hears each change of a tensor that Python's own questions would find, and is not used where it might not."""

import ctypes
import gc
import importlib
import sys
import weakref

import pytest
import torch

from phonograph._torch import native
from phonograph._torch.autograd import bump
from phonograph.guards.tensor_states import like

needs_helper = pytest.mark.skipif(native.instead != "", reason=f"the helper in C: {native.instead}")


def question(*tensors):
    """Whether tensors are just like these, and how often Python was asked."""
    asked = []
    python = like(tensors) if native.instead else like(tensors).ask

    def ask(found):
        asked.append(found)
        return python(found)

    return native.standing(tensors, ask), asked


def leaf():
    return torch.zeros(3, 2).requires_grad_()


def with_gradient():
    t = leaf()
    t.grad = torch.ones(3, 2)
    return t


def other_gradient(t):
    t.grad = torch.zeros(3, 2)


MAKES = {"plain": lambda: torch.zeros(3, 2), "leaf": leaf, "parameter": lambda: torch.nn.Parameter(torch.zeros(3, 2)),
         "with gradient": with_gradient, "view": lambda: torch.zeros(4, 2)[1:], "scalar": lambda: torch.tensor(1.0),
         "empty": lambda: torch.zeros(0, 2), "complex": lambda: torch.zeros(3, 2, dtype=torch.complex64)}  # fmt: skip


def data(t, other):
    torch._C.TensorBase.data.__set__(t, other)


CHANGES = {
    "memory": lambda t: data(t, torch.zeros(3, 2)),
    "shape": lambda t: data(t, torch.zeros(2, 3)),
    "strides": lambda t: data(t, torch.zeros(2, 3).t()),
    "dimensions": lambda t: data(t, torch.zeros(1, 3, 2)),
    "many dimensions": lambda t: data(t, torch.zeros(1, 1, 1, 1, 3, 2)),
    "dtype": lambda t: data(t, torch.zeros(3, 2, dtype=torch.float64)),
    "offset": lambda t: data(t, torch.zeros(8)[2:].view(3, 2)),
    "storage": lambda t: t.untyped_storage().resize_(4096),
    "freed": lambda t: t.untyped_storage().resize_(0),
    "lazily copied": lambda t: torch._lazy_clone(t.detach()),
    "requires": lambda t: t.requires_grad_(not t.requires_grad),
    "swapped": lambda t: torch.utils.swap_tensors(t, torch.zeros(3, 2)),
}


@needs_helper
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_nothing_is_asked_while_nothing_changes_but_values_gradients_and_versions(make):
    t = make()
    same, asked = question(t)
    assert same([t])
    with torch.no_grad():
        t.add_(1)
    views = t[...], t.detach(), t.view_as(t)
    if t.requires_grad and t.is_leaf:
        other_gradient(t)
    assert same([t])
    assert len(asked) <= 2  # autograd may know of it only now
    assert same([t])
    assert len(asked) <= 2
    del views
    assert same([t])
    assert len(asked) <= 2


@needs_helper
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_python_is_asked_after_each_change_and_its_answer_stands(make, change):
    """Of one tensor among others, wherever it is among them."""
    for i in range(3):
        tensors = [torch.zeros(2), torch.zeros(2), torch.zeros(2)]
        tensors[i] = make()
        same, asked = question(*tensors)
        assert [same(tensors), same(tensors)] == [True, True]
        before = len(asked)
        try:
            change(tensors[i])
        except (RuntimeError, TypeError):  # torch does not do that to such a tensor
            continue
        answer = same(tensors)
        assert len(asked) == before + 1
        assert answer == same.ask(tensors)


@needs_helper
def test_one_that_takes_the_place_of_another_is_looked_at():
    a, b, asked = torch.zeros(3), torch.zeros(3), []

    def ask(found):
        asked.append(found)
        return len(found) == 1 and found[0] is a

    same = native.standing([a], ask)
    assert same([a])
    assert not same([b])
    assert not same([a, b])
    assert not same([])
    assert same([a])
    before = len(asked)
    assert same([a])
    assert len(asked) == before


class Mine(torch.Tensor):
    pass


STRANGE = {"sparse": lambda: torch.eye(3).to_sparse(), "other": object, "none": lambda: None,
           "lazy": lambda: torch.nn.UninitializedParameter(), "class": lambda: torch.zeros(3).as_subclass(Mine)}  # fmt: skip


@needs_helper
@pytest.mark.parametrize("strange", STRANGE.values(), ids=STRANGE)
def test_whatever_comes_in_the_place_of_a_tensor_is_pythons_to_judge(strange):
    t, asked = torch.zeros(3, 3), []

    def ask(found):
        asked.append(found)
        return True

    same, other = native.standing([t], ask), strange()
    assert [same([t]), same([t]), same([other]), same([other]), same([t])] == [True] * 5
    assert len(asked) == 4


@needs_helper
def test_a_tensor_that_stands_for_a_batch_is_pythons_to_judge():
    asked = []

    def ask(found):
        asked.append(found)
        return False

    same = native.standing([torch.zeros(3)], ask)
    torch.vmap(lambda row: row + same([row]))(torch.zeros(2, 3))
    assert len(asked) == 1


@needs_helper
def test_what_changes_while_python_is_asked_is_asked_again():
    t, answers = torch.zeros(3), []

    def ask(found):
        answers.append(True)
        if len(answers) == 1:
            data(t, torch.zeros(3))
        return True

    same = native.standing([t], ask)
    assert same([t])
    assert same([t])
    assert len(answers) == 2
    assert same([t])
    assert len(answers) == 2


@needs_helper
def test_the_state_of_the_thread_is_asked_each_time():
    t = torch.zeros(3)
    same, asked = question(t)
    assert same([t])
    with torch._C._AutoDispatchBelowAutograd():
        assert not same([t])
    assert same([t])
    assert len(asked) == 1


@needs_helper
def test_an_exception_of_pythons_is_the_answer():
    def ask(found):
        raise ValueError("no")

    same = native.standing([torch.zeros(1)], ask)
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            same([torch.zeros(1)])


@pytest.mark.parametrize(
    "t", [torch.zeros(1, 1, 1, 1, 1, 2), torch.zeros(2).as_subclass(Mine)], ids=["many dimensions", "class"]
)
def test_tensors_whose_bytes_do_not_say_all_are_pythons(t):
    def ask(found):
        return True

    assert native.standing([torch.zeros(1), t], ask) is ask


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_versions_are_moved_as_torch_moves_them(make):
    t = make()
    view = t.detach()
    other = view.data
    before = t._version, other._version
    native.bump([t, view])
    assert (t._version, view._version, other._version) == (before[0] + 2, before[0] + 2, before[1])
    native.bump((t,))
    native.bump([])
    assert t._version == before[0] + 3


def test_of_a_tensor_without_a_version_torch_says_what_it_always_says():
    with torch.inference_mode():
        t = torch.zeros(2)
    for things in ([t], [object()], [torch.zeros(1), None]):
        assert told(lambda things=things: native.bump(things)) == told(lambda things=things: bump(things))


def told(does):
    try:
        return does()
    except (RuntimeError, TypeError) as e:
        return type(e)


class Thing:
    def __init__(self):
        self.a = object()


def cell_of(value):
    def inner():
        return value

    return inner.__closure__[0]


def function(a=object(), *, b=None):  # noqa: B008
    pass


THING, LIST, CELL, COUNT, TABLE = Thing(), [object()] * 3, cell_of(object()), ctypes.c_uint64(5), {"a": object()}

FACTS = {
    "item": (lambda: ("item", vars(THING), "a"), lambda: setattr(THING, "a", object())),
    "item that appears": (lambda: ("item", TABLE, "b"), lambda: TABLE.__setitem__("b", 1)),
    "item that goes": (lambda: ("item", TABLE, "a"), TABLE.clear),
    "place": (lambda: ("place", vars(THING), "a"), lambda: setattr(THING, "a", object())),
    "item of a list": (lambda: ("items", LIST), lambda: LIST.__setitem__(1, object())),
    "longer list": (lambda: ("items", LIST), lambda: LIST.append(LIST[0])),
    "shorter list": (lambda: ("items", LIST), LIST.pop),
    "emptied list": (lambda: ("items", LIST), LIST.clear),
    "cell": (lambda: ("cell", CELL), lambda: setattr(CELL, "cell_contents", object())),
    "empty cell": (lambda: ("cell", CELL), lambda: delattr(CELL, "cell_contents")),
    "code": (lambda: ("function", function), lambda: setattr(function, "__code__", function.__code__.replace(co_name="f"))),
    "defaults": (lambda: ("function", function), lambda: setattr(function, "__defaults__", (object(),))),
    "no defaults": (lambda: ("function", function), lambda: setattr(function, "__defaults__", None)),
    "named defaults": (lambda: ("function", function), lambda: setattr(function, "__kwdefaults__", {"b": object()})),
    "attributes of a function": (lambda: ("function", function), lambda: setattr(function, "mark", 1)),
    "word": (lambda: ("word", COUNT, ctypes.addressof(COUNT)), lambda: setattr(COUNT, "value", COUNT.value + 1)),
    "called": (lambda: ("called", vars(THING).get, "a", THING.a), lambda: setattr(THING, "a", object())),
    "called without an argument": (lambda: ("called", lambda: THING.a, THING.a), lambda: setattr(THING, "a", object())),
    "read": (lambda: ("read", lambda: (1, THING.a)), lambda: setattr(THING, "a", object())),
    "read of another length": (lambda: ("read", lambda: (*LIST,)), lambda: LIST.append(object())),
}


@needs_helper
@pytest.mark.parametrize(("fact", "change"), FACTS.values(), ids=FACTS)
def test_a_fact_is_no_more_so_when_it_has_changed(fact, change):
    LIST[:], TABLE["a"], CELL.cell_contents = [object()] * 3, object(), object()
    TABLE.pop("b", None)
    facts = native._native.Facts([("item", {}, "other"), fact()])
    assert [facts(), facts()] == [True, True]
    change()
    assert not facts()
    assert native._native.Facts([fact()])()


@pytest.mark.skipif(not native.tells_versions, reason="dictionaries have no versions in memory")
def test_a_dictionary_of_another_version_is_no_fact():
    facts = native._native.Facts([("version", TABLE)])
    assert facts()
    TABLE["another"] = 1
    assert not facts()


WRONG = [("nothing", 1), ("item", {}), ("item", [], "a"), ("items", ()), ("cell", 1), ("function", len), ("called", len),
         ("called", 1, 2), ("read", 1), ("word", 1), ("version", []), (), 1, ("item", {}, 1), ("read", list)]  # fmt: skip


@needs_helper
@pytest.mark.parametrize("fact", WRONG, ids=str)
def test_what_is_no_fact_is_an_error(fact):
    with pytest.raises(TypeError):
        native._native.Facts([fact])


@needs_helper
def test_facts_keep_what_they_are_about_but_for_places_and_are_garbage_with_it():
    class Value:
        pass

    table = {"kept": Value(), "place": Value()}
    refs = [weakref.ref(value) for value in table.values()]
    table["facts"] = native._native.Facts([("item", table, "kept"), ("place", table, "place")])
    del table["kept"], table["place"]
    assert [ref() is None for ref in refs] == [False, True]
    del table
    gc.collect()
    assert refs[0]() is None


@needs_helper
def test_a_question_is_asked_until_its_usual_answer_rests_on_facts_and_again_when_one_has_changed():
    thing, answers = Thing(), []

    def ask():
        answers.append(thing.a)
        return None if thing.a is not None else "none"

    known = native.known(ask, lambda: [("item", vars(thing), "a")], None)
    for _ in range(20):
        assert known() is None
    assert len(answers) < 5
    thing.a = None
    assert [known(), known()] == ["none", "none"]
    thing.a = object()
    assert [known() for _ in range(20)] == [None] * 20
    assert len(answers) < 12


@needs_helper
def test_where_facts_change_each_time_they_are_tried_ever_more_seldom():
    thing, told = Thing(), []

    def tell():
        told.append(thing.a)
        return [("item", vars(thing), "a")]

    known = native.known(lambda: None, tell, None)
    for _ in range(1000):
        assert known() is None
        thing.a = object()
    assert len(told) < 12


@needs_helper
def test_what_changes_while_facts_are_taken_is_heard_at_the_next_call():
    thing, asked = Thing(), []

    def ask():
        asked.append(thing.a)
        thing.a = object() if len(asked) < 6 else thing.a

    known = native.known(ask, lambda: [("item", vars(thing), "a")], None)
    for _ in range(30):
        known()
    assert asked[-1] is thing.a


@needs_helper
def test_a_question_that_rests_on_more_is_asked_once_a_call():
    asked = []
    known = native.known(lambda: asked.append(1), lambda: None, None)
    for _ in range(20):
        known()
    assert len(asked) == 20


@needs_helper
def test_an_exception_of_a_fact_comes_through():
    fails = []

    def fact():
        if fails:
            raise KeyboardInterrupt
        return 1

    known = native.known(lambda: None, lambda: [("called", fact, 1)], None)
    for _ in range(8):
        assert known() is None
    fails.append(True)
    with pytest.raises(KeyboardInterrupt):
        known()
    fails.clear()
    assert known() is None


@needs_helper
def test_it_is_not_used_where_it_is_not_wanted_not_there_or_does_not_understand(monkeypatch):
    def unclear():
        raise native._Unclear

    assert native._loaded()[1] == ""
    with monkeypatch.context() as m:
        m.setenv("PHONOGRAPH_NATIVE", "0")
        assert native._loaded() == (None, "PHONOGRAPH_NATIVE=0")
    with monkeypatch.context() as m:
        m.setattr(native, "_layout", unclear)
        assert native._loaded()[0] is None
    with monkeypatch.context() as m:
        m.setattr(native, "_layout", lambda: (1, 2))
        assert native._loaded() == (None, "built of another source")
    with monkeypatch.context() as m:  # bytes among which what makes it another tensor is not
        found = native._layout()
        m.setattr(native, "_layout", lambda: (*found[:5], (found[5][0], 8), *found[6:]))
        assert native._loaded() == (None, "some changes of tensors would not be heard")
    with monkeypatch.context() as m:
        m.setitem(sys.modules, "phonograph._torch._native", None)
        assert native._loaded() == (None, "not built")
    assert native._loaded()[1] == ""


@needs_helper
def test_it_understands_tensors_whatever_modes_are_on_when_it_is_imported():
    with torch.device("meta"), torch.inference_mode():
        assert importlib.import_module("phonograph._torch.native")._loaded()[1] == ""
