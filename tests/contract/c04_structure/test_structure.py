"""C4: results keep eager's structure: types, identity and overlap."""

import copy
import dataclasses
import typing
from collections import OrderedDict, defaultdict, namedtuple

import pytest
import torch
from torch.utils import _pytree

import phonograph as pg
from phonograph.testing import Pair, assert_same
from tests.contract.shared.results import Prediction
from tests.helpers import counts, may_run_live, plain, ramp, reasons, side_by_side

Point = namedtuple("Point", "x y")


class Typed(typing.NamedTuple):
    value: torch.Tensor
    note: str = "none"


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: torch.Tensor
    flag: bool


STRUCTURES = {
    "one": lambda x: x + 1,
    "none": lambda x: None,
    "tuple": lambda x: (x + 1, x + 2),
    "single": lambda x: (x + 1,),
    "list": lambda x: [x + 1, [x + 2, []], ()],
    "dict": lambda x: {"b": x + 1, "a": {"c": x + 2, 3: None}, "": {}},
    "ordered": lambda x: OrderedDict(z=x + 1, a=x + 2),
    "defaultdict": lambda x: defaultdict(list, a=[x + 1]),
    "namedtuple": lambda x: Point(x + 1, Typed(x + 2)),
    "dataclass": lambda x: Prediction(x + 1, [x + 2, x + 3], name="q"),
    "frozen dataclass": lambda x: Frozen(x + 1, True),
    "python values": lambda x: (x + 1, 1, True, 1.0, -0.0, "text", None, b"b", 2 + 3j, x.shape, x.dtype, x.device, ...),
    "set": lambda x: (x + 1, {1, 2}, frozenset({"a"}), range(3), slice(1, 2)),
    "torch's own tuples": lambda x: (x.max(0), x.sort()),
    "empty": lambda x: ((), [], {}),
    "itself": lambda x: x,
    "itself twice": lambda x: [x, x],
    "a view of itself": lambda x: (x[1:], x.view(2, 3), x.detach()),
    "the same tensor twice": lambda x: [x + 1] * 2,
    "views of one result": lambda x: _views_of_one_result(x * 2),
    "only a view of a temporary": lambda x: (x * 2)[1:3],
    "a tensor and its window": lambda x: [y := x * 2, y[2:4], y],
    "not contiguous": lambda x: (x * 2).view(2, 3).t(),
    "expanded": lambda x: (x[:1] * 2).expand(4),
    "no copy needed": lambda x: (x.to(x.dtype), x.contiguous(), x.float()),
    "channels last": lambda x: x.view(1, 2, 3, 1).expand(1, 2, 3, 2).to(memory_format=torch.channels_last) * 2,
}


def _views_of_one_result(y):
    return y, y.view(2, 3), y[::2], y.view(3, 2).t()


@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
def test_c04_results_keep_their_structure(device, structure):
    both = plain(structure, hold=True)
    for n in range(5):
        both(ramp(device, 6, start=n))


@may_run_live
def test_c04_a_result_with_attributes(device):
    def f(x):
        y = x * 2
        y.scale = 2
        return y

    recorded = pg.record(f)
    for n in range(4):
        assert recorded(torch.full((3,), float(n), device=device)).scale == 2


@may_run_live
@pytest.mark.parametrize("lazily", [lambda x: torch.complex(x, x).conj(), lambda x: torch.complex(x, x).conj().imag])
def test_c04_lazily_conjugated_and_negated_results(device, lazily):
    both = plain(lazily, hold=True)
    for n in range(5):
        result = both(ramp(device, 6, start=n))
        result.each(lambda r: (r.is_conj(), r.is_neg())).check()


def test_c04_mutating_a_result_that_is_a_view_of_an_argument_mutates_the_argument(device):
    both = plain(lambda x: (x * 2, x[1:]))
    for _ in range(5):
        x = Pair.of(torch.zeros(3, device=device))
        both(x).each(lambda result: result[1].fill_(4))
        assert x.recorded.tolist() == [0.0, 4.0, 4.0]


ALIASES = {
    "detached": lambda x, state: (y := x * 2, y.detach()),
    "detached before it": lambda x, state: (y := x * 2, y.detach())[::-1],
    "its data": lambda x, state: (y := x * 2, y.data),
    "a part": lambda x, state: (y := x * 2, y[1:]),
    "a part before it": lambda x, state: (y := x * 2, y[1:3])[::-1],
    "parts of what is no result": lambda x, state: (lambda y: (y[1:3], y.view(2, 3).t()))(x * 2),
    "a part, detached, and a part of that": lambda x, state: (y := x * 2, d := y[2:].detach(), d[1:]),
    "part of an argument": lambda x, state: (x[1:], x.view(2, 3).t()),
    "an argument, detached": lambda x, state: (x.detach(), x[1:].detach()),
    "parts of an argument, detached": lambda x, state: ((d := x.detach())[:3], d[2:]),
    "an argument's data": lambda x, state: (x.data, x.data[1:]),
    "part of what is outside": lambda x, state: (x + 1, state[1:], state),
    "detached from what is outside": lambda x, state: (state.detach(), state.detach()[2:], x),
    "data of what is outside": lambda x, state: (x + 1, state.data),
    "all of them": lambda x, state: (x[1:], x.detach(), state[2:], y := x * 2, y[1:], y.detach(), y.data),
}


def write_with_history(tensors, written, w):
    tensors[written].mul_(w)
    sum((t * (i + 2) * w).sum() for i, t in enumerate(tensors)).backward()


def write_what_is_saved(tensors, written, w):
    loss = sum((t * w).sum() for t in tensors)
    with torch.no_grad():
        tensors[written].add_(1)
    loss.backward()


def detach_in_place(tensors, written, w):
    tensors[written].detach_()


@pytest.mark.parametrize("write", [write_with_history, write_what_is_saved, detach_in_place])
@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
def test_c04_results_on_one_memory_are_to_autograd_what_they_are_live(device, alias, write):
    def make():
        state = torch.zeros(6, device=device)
        return (lambda x: alias(x, state)), state

    def what_happens(f, state, written):
        state.detach_().zero_()
        x, w = ramp(device, 6), torch.full((), 3.0, device=device, requires_grad=True)
        tensors = [*f(x), x, state]
        seen: list[typing.Any] = [[[t._base is other for other in tensors] for t in tensors]]
        try:
            write(tensors, min(written, len(tensors) - 1), w)
        except RuntimeError as e:
            seen.append(str(e)[:40])
        return [*seen, w.grad, [t.requires_grad for t in tensors], tensors]

    (live, own), (function, other) = make(), make()
    recorded = pg.record(function, warmup=1)
    recorded(ramp(device, 6))
    for written in range(9):
        assert_same(what_happens(recorded, other, written), what_happens(live, own, written))
    assert pg.stats(recorded).replayed == 9, pg.explain(recorded)


@pytest.mark.parametrize("outside", [False, True], ids=["an argument", "a parameter"])
def test_c04_a_view_that_was_made_without_grad_must_not_be_written(device, outside):
    p = torch.nn.Parameter(torch.ones(3, device=device))
    f = pg.record(torch.no_grad()(lambda x: (x + 1, (p if outside else x)[1:])), warmup=1)
    for _ in range(5):
        view = f(torch.ones(3, device=device, requires_grad=True))[1]
        with pytest.raises(RuntimeError, match="A view was created in no_grad mode"):
            view.add_(1)
    assert pg.stats(f).replayed == 4


@may_run_live
@pytest.mark.parametrize("outside", [False, True], ids=["an argument", "a closure's tensor"])
@pytest.mark.parametrize("view", [torch.view_as_real, lambda x: x.view(torch.int32), lambda x: x.imag, lambda x: x[1:].conj()])
def test_c04_autograd_notices_what_is_written_through_a_view_of_another_dtype(device, view, outside):
    state = torch.ones(2, dtype=torch.cfloat, device=device)
    f = pg.record(lambda x: (view(state if outside else x), x * 2), warmup=1)
    for _ in range(5):
        x = torch.ones(2, dtype=torch.cfloat, device=device)
        w = torch.ones(2, dtype=torch.cfloat, device=device, requires_grad=True)
        loss = ((state if outside else x) * w).real.sum()
        seen = f(x)[0]
        assert_same(seen, view(state if outside else x))
        seen.mul_(3)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_c04_state_returned_is_the_state_itself(device):
    def make():
        state = torch.zeros(2, 3, device=device)
        return lambda x: (state, state.t(), state[0], state.add_(x)), state

    both = side_by_side(make)
    for _ in range(5):
        result = both(torch.ones((), device=device)).recorded
        assert result[0] is both.state
        assert result[3] is both.state


def test_c04_a_parameter_returned_is_the_parameter(device):
    def make():
        layer = torch.nn.Linear(2, 2, device=device).requires_grad_(False)
        return lambda x: (layer.weight, layer(x)), layer

    both = side_by_side(make)
    for _ in range(5):
        assert both(torch.ones(1, 2, device=device)).recorded[0] is both.state.weight


@may_run_live
def test_c04_an_argument_container_returned_is_that_container(device):
    def same_dict(d):
        d["x"].add_(1)
        return d

    f = pg.record(same_dict, warmup=1)
    for _ in range(5):
        given = {"x": torch.zeros(2, device=device)}
        assert f(given) is given


class Held:
    """A registered class; what it holds besides its tensor, pytree does not look into."""

    def __init__(self, value, more):
        self.value, self.more = value, more


_pytree.register_pytree_node(Held, lambda held: ([held.value], held.more), lambda parts, more: Held(*parts, more))


def test_c04_a_default_factory_is_part_of_an_argument(device):
    both = plain(lambda x, d: (x * (2 if d.default_factory is list else 3), d.default_factory, defaultdict(d.default_factory)))
    for kind in (list, list, list, int, int, None, list):
        both(ramp(device, 2), defaultdict(kind, a=1))
    assert counts(both)[2] == 4


@may_run_live
def test_c04_a_key_that_the_call_has_made(device):
    f, g = pg.record(lambda x: {x * 2: 1, "plain": x}, warmup=1), pg.record(lambda x: {(x, 1): x + 1}, warmup=1)
    kept = [f(torch.full((1,), float(n), device=device)) for n in range(5)]
    assert [next(iter(result)).item() for result in kept] == [2.0 * n for n in range(5)]
    for _ in range(4):
        x = torch.ones(1, device=device)
        assert next(iter(g(x)))[0] is x
    assert "names or numbers as keys" in reasons(f)


def test_c04_keys_that_are_values(device):
    both = plain(lambda x: {1: x + 1, (2, "a"): x + 2, torch.float32: x, None: {True: x * 2}})
    for n in range(5):
        both(ramp(device, 3, start=n))
    assert counts(both) == (1, 1, 4)


@may_run_live
def test_c04_what_a_registered_class_holds_besides_its_tensors(device):
    tensors = pg.record(lambda x: Held(x, x * 2), warmup=1)
    kept = [tensors(torch.full((1,), float(n), device=device)) for n in range(5)]
    assert [held.more.item() for held in kept] == [2.0 * n for n in range(5)]
    lists = pg.record(lambda x: Held(x * 2, []), warmup=1)
    for n in range(5):
        held = lists(torch.ones(1, device=device))
        held.more.append(n)
        assert held.more == [n]
    names = pg.record(lambda x: Held(x * 2, ("a", 1)), warmup=1)
    for _ in range(5):
        assert names(torch.ones(1, device=device)).more == ("a", 1)
    assert pg.stats(names).replayed == 4


@may_run_live
def test_c03_what_a_registered_class_or_a_set_holds_is_changed_once(device):
    def changes(x, held, numbers):
        held.more.append(len(held.more))
        numbers.add(len(numbers))
        return x + 1

    f = pg.record(changes, warmup=1)
    for _ in range(4):
        held, numbers = Held(torch.ones(1, device=device), []), {"a"}
        f(torch.ones(1, device=device), held, numbers)
        assert held.more == [0]
        assert numbers == {"a", 1}


@may_run_live
def test_c04_a_set_returned_is_that_set(device):
    mine: set[int] = {1}

    def twice(x):
        made = {1}
        return x + 1, made, made

    outside, argument = pg.record(lambda x: (x + 1, mine), warmup=1), pg.record(lambda x, s: (x + 1, s), warmup=1)
    twice = pg.record(twice, warmup=1)
    for n in range(4):
        x, given = torch.ones(1, device=device), {1}
        assert outside(x)[1] is mine
        mine.add(10 + n)
        assert argument(x, given)[1] is given
        _, first, second = twice(x)
        assert first is second


def test_c04_each_call_makes_new_containers(device):
    both = plain(lambda x: {"values": [x + 1], "extra": {}})
    for _ in range(5):
        result = both(torch.ones(2, device=device)).recorded
        assert len(result["values"]) == 1
        assert result["extra"] == {}
        result["values"].append("mine")
        result["extra"]["mine"] = 1


def test_c04_python_values_computed_from_shapes(device):
    both = plain(lambda x: (x.shape[0] * 2, x.numel() / 2, f"{tuple(x.shape)}", x.sum() / len(x)))
    for size in [2, 2, 2, 5, 5, 5, 2, 5]:
        both(torch.ones(size, 3, device=device))


def test_c04_results_computed_without_grad_need_none(device):
    def make():
        layer = torch.nn.Linear(2, 2, device=device)
        return torch.no_grad()(lambda x: layer(x)), layer

    both = side_by_side(make)
    for _ in range(5):
        result = both(torch.ones(1, 2, device=device)).recorded
        assert not result.requires_grad
        assert result.is_leaf


@may_run_live
def test_c04_results_computed_with_grad_carry_it(device):
    def make():
        layer = torch.nn.Linear(2, 2, device=device)
        return lambda x: layer(x), layer

    both = side_by_side(make)
    for _ in range(5):
        both(torch.ones(1, 2, device=device)).each(lambda result: result.sum().backward())
        both.check()


@may_run_live
def test_c04_detaching_and_requiring_grad_in_the_function(device):
    both = plain(lambda x: (x.detach() * 2).requires_grad_())
    for n in range(5):
        both(ramp(device, 3, start=n)).each(lambda result: (result**2).sum().backward())


def test_c04_results_can_be_copied_and_saved_like_any_tensor(device, tmp_path):
    both = plain(lambda x: (x * 2, x.view(2, 3)[1]))
    for n in range(5):
        result = both(ramp(device, 6, start=n)).recorded
        assert_same(copy.deepcopy(result), result)
        torch.save(result, tmp_path / "result.pt")
        assert_same(torch.load(tmp_path / "result.pt"), result)


def inside_itself(x):
    found = {"x": x * 2}
    found["all"] = [found]
    return found


@may_run_live
@pytest.mark.parametrize("options", [{}, {"verify": 2}, {"outputs": "borrow"}, {"fallback": "split"}])
def test_c04_a_result_that_contains_itself(device, options):
    f = pg.record(inside_itself, **options)
    for n in range(4):
        found = f(ramp(device, 3) + n)
        assert found["all"][0] is found
        assert_same(found["x"], (ramp(device, 3) + n) * 2)
    assert "contains itself" in reasons(f)
