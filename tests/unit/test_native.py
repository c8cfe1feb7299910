"""The helper in C hears each change of a tensor that Python's own questions would find, and is not used where it might not."""

import importlib
import sys

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


class Mine(torch.Tensor):
    pass


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
