"""Known calls: which kinds are recognised at a glance, and what is noticed there."""

import enum
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch

import phonograph as pg
from phonograph.engine import describer
from phonograph.testing import Pair, assert_same
from tests.helpers import assert_replays, counts, may_run_live, side_by_side


def ramp():
    return torch.arange(1.0, 4.0)


@pytest.fixture
def described(monkeypatch):
    """As many as calls were taken apart."""
    calls, describe = [], describer.describe
    monkeypatch.setattr(describer, "describe", lambda *call: calls.append(None) or describe(*call))
    return calls


def test_a_training_step_is_recognised_without_taking_its_arguments_apart(described):
    def make():
        weight = torch.nn.Parameter(ramp())
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)

        def step(x):
            optimizer.zero_grad()
            loss = (weight * x).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    both = side_by_side(make)
    for _ in range(4):
        both(ramp())
    before = len(described)
    for _ in range(4):
        assert_replays(both, ramp())
    assert len(described) == before


@may_run_live
@pytest.mark.parametrize("like", ["itself", "a view"])
def test_state_among_the_arguments_is_noticed_after_many_replays(like):
    def make():
        state = torch.zeros(3)

        def step(x):
            state.add_(x)
            return x + state

        return step, state

    both = side_by_side(make)
    for _ in range(5):
        both(ramp())
    live, states = counts(both)[0], Pair(both.state, both.live_state)
    for _ in range(2):
        both(states if like == "itself" else states.each(lambda state: state[:]))
    assert counts(both)[0] == live + 2


LARGE = 200, 100  # its results are not copied, but lie in the memory of the recording


def test_a_result_that_is_used_where_it_lies_and_an_argument_that_is_returned(described):
    f, g = pg.record(lambda x: x * 2, warmup=1), pg.record(lambda y, z: (y + z, z), warmup=1)

    def chain(moved=False):
        x, z = torch.rand(LARGE), torch.rand(LARGE)
        y = f(x)
        y = y.clone() if moved else y
        result, same = g(y, z)
        assert same is z
        assert_same(result, x * 2 + z)
        return z.nbytes

    for _ in range(4):
        chain()
    copied, seen = pg.stats(g).bytes_copied, len(described)
    nbytes = chain()
    assert pg.stats(g).bytes_copied == copied + nbytes
    assert len(described) == seen
    chain(moved=True)
    assert pg.stats(g).bytes_copied == copied + 3 * nbytes
    assert len(described) == seen + 1
    chain()
    chain()
    assert len(described) <= seen + 2
    assert counts(g) == (1, 1, 7)


def test_an_argument_with_a_history(described):
    layer = torch.nn.Linear(4, 4)
    f, arrived = pg.record(layer, warmup=1), []

    def step(change=lambda t: None, leaf=False):
        x, was = torch.rand(3, 4, requires_grad=True), pg.stats(f).replayed
        t = x if leaf else x * 3
        change(t)
        f(t).sum().backward()
        assert_same(x.grad, (1 if leaf else 3) * layer.weight.detach().sum(0).expand(3, 4), tolerance=1e-6)
        return pg.stats(f).replayed - was, len(described)

    for leaf in (False, True):
        for _ in range(3):
            step(leaf=leaf)
        _, seen = step(leaf=leaf)
        assert step(leaf=leaf) == (1, seen)
    step()
    step()
    with pytest.warns(pg.RunsLive, match="a gradient or hooks"):
        assert step(lambda t: t.register_hook(arrived.append))[0] == 0
    assert len(arrived) == 1
    assert step(lambda t: t.retain_grad())[0] == 1
    step(leaf=True)
    assert step(lambda t: setattr(t, "grad", torch.zeros(3, 4)), leaf=True)[0] == 0
    assert step(lambda t: t.register_post_accumulate_grad_hook(arrived.append), leaf=True)[0] == 0
    assert len(arrived) == 2
    assert step(leaf=True)[0] == 1


@may_run_live
def test_results_of_which_some_do_not_depend_on_an_argument_with_a_history():
    """Whether that is refused depends on the recording."""
    w = torch.nn.Parameter(torch.rand(4))

    def make():
        return lambda x: (w * 2, w * x)

    both, found = side_by_side(make), []
    for leaf in (True, False) * 4:
        x, was = torch.rand(4, requires_grad=True), counts(both)[2]
        both(Pair(*(x if leaf else x * 1 for _ in range(2))))
        found.append((leaf, counts(both)[2] - was))
    assert found[2:] == [(True, 1), (False, 0)] * 3, pg.explain(both.recorded)


def _by_name(x, y=None, *, scale=1, sign=True, name="a"):
    out = x * scale if y is None else x * scale - y
    return out if sign is True else out + (sign if name == "a" else -2)


CALLS = [
    lambda f, x, y: f(x, y, scale=2),
    lambda f, x, y: f(x, y=y, scale=2),
    lambda f, x, y: f(y=y, x=x, scale=2),
    lambda f, x, y: f(x=y, y=x, scale=2),
    lambda f, x, y: f(x, None, scale=2),
    lambda f, x, y: f(x, scale=2, y=None),
    lambda f, x, y: f(x, scale=y),
    lambda f, x, y: f(x, y, scale=2.0),
    lambda f, x, y: f(x, y, scale=True),
    lambda f, x, y: f(x, y, scale=2, sign=1),
    lambda f, x, y: f(x, y, scale=2, sign=1, name="b"),
    lambda f, x, y: f(x, y, name="b", sign=1, scale=2),
    lambda f, x, y: f(x),
    lambda f, x, y: f(x=x),
]


class Name(str, enum.Enum):
    X = "x"


def _total(tree, depth=1.0):
    """Of all that is in it, so that it matters where each stands, under which name and in what."""
    if isinstance(tree, torch.Tensor):
        return tree * depth
    if isinstance(tree, dict):
        return sum(_total(v, depth * (1.5 + i + len(repr(k)))) for i, (k, v) in enumerate(tree.items()))
    if isinstance(tree, (tuple, list)):
        return sum(_total(v, depth * (2.5 + i + (type(tree) is list))) for i, v in enumerate(tree))
    return len(repr(tree)) * depth


def _in_containers(*args, **kwargs):
    return _total((args, kwargs)) + torch.zeros(3)


CONTAINERS = [
    lambda f, x, y: f({"x": x, "y": y}),
    lambda f, x, y: f({"y": y, "x": x}),
    lambda f, x, y: f({"x": y, "y": x, "z": 1}),
    lambda f, x, y: f({"x": x, "y": y, "z": True}),
    lambda f, x, y: f((x, y)),
    lambda f, x, y: f([x, y]),
    lambda f, x, y: f(x, [y]),
    lambda f, x, y: f([[x], (y, {"a": [None]})], more={"b": (1.0,)}),
    lambda f, x, y: f([[x], (y, {"a": [None]})], more={"b": [1.0]}),
    lambda f, x, y: f([[x, (y, {"a": [None]})]], more={"b": [1.0]}),
    lambda f, x, y: f([x, y, [], {}, ()]),
    lambda f, x, y: f([x, y, {}, [], ()]),
]
OTHERS = [
    lambda f, x, y: f({Name.X: x, "y": y}),
    lambda f, x, y: f({1: x, 2: y}),
    lambda f, x, y: f({True: x, 2: y}),
    lambda f, x, y: f([x, x]),
    lambda f, x, y: f(OrderedDict(x=x, y=y)),
    lambda f, x, y: f(Counted(x, y)),
]


class Counted(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def test_containers_that_change_from_call_to_call():
    f = pg.record(_in_containers, warmup=1, max_recordings=64)
    calls = CONTAINERS + OTHERS
    for n in range(6):
        for call in calls if n % 2 else reversed(calls):
            for _ in range(2):
                x, y = torch.rand(3), torch.rand(3)
                assert_same(call(f, x, y), call(_in_containers, x, y))
    assert pg.stats(f).recorded <= len(calls)
    for call in CONTAINERS:  # each after each other, of which only the first was played
        for other in calls:
            for one in (call, call, other):
                x, y = torch.rand(3), torch.rand(3)
                assert_same(one(f, x, y), one(_in_containers, x, y))


@pytest.mark.parametrize(("function", "calls"), [(_by_name, CALLS), (_in_containers, CONTAINERS)])
def test_names_plain_values_and_containers_are_recognised(described, function, calls):
    f = pg.record(function, warmup=1, max_recordings=32)
    for call in calls:
        for _ in range(3):
            call(f, torch.rand(3), torch.rand(3))
        seen, replayed = len(described), pg.stats(f).replayed
        for _ in range(2):
            x, y = torch.rand(3), torch.rand(3)
            assert_same(call(f, x, y), call(function, x, y))
        assert (len(described), pg.stats(f).replayed) == (seen, replayed + 2)


def test_names_and_plain_values_that_change_from_call_to_call():
    f = pg.record(_by_name, warmup=1)
    for n in range(6):
        for call in CALLS if n % 2 else reversed(CALLS):
            for _ in range(2):
                x, y = torch.rand(3), torch.rand(3)
                assert_same(call(f, x, y), call(_by_name, x, y))
    assert pg.stats(f).recorded <= len(CALLS)
    with pytest.raises(TypeError, match="other"):
        f(torch.rand(3), other=1)
    with pytest.raises(TypeError, match="unexpected keyword"):
        pg.record(lambda: torch.ones(2), warmup=0)(name=1)


def test_no_arguments_and_a_name_that_is_none():
    f = pg.record(lambda **named: torch.full((2,), float(len(named))), warmup=1)
    for _ in range(3):
        assert f().tolist() == [0, 0]
    assert f(x=None).tolist() == [1, 1]
    for _ in range(3):
        assert f(x=None, y=None).tolist() == [2, 2]
    assert f().tolist() == [0, 0]
