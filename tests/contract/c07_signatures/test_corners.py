"""C7: arguments, around corners."""

import collections
import copy
import dataclasses
import enum
import types

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.shared.corners import WithSlot, globals_as_before  # noqa: F401
from tests.helpers import assert_replays, counts, may_run_live, plain, ramp, reasons


class SaysEqual(nn.Module):
    def __init__(self, value, device):
        super().__init__()
        self.register_buffer("by", torch.full((3,), value, device=device))

    def __eq__(self, other):
        return isinstance(other, SaysEqual)

    __hash__ = nn.Module.__hash__


class SaysEqualToo(SaysEqual):
    def __hash__(self):
        return 7


class Odd(enum.Enum):
    ONE = 1
    TWO = 2

    def __eq__(self, other):
        return isinstance(other, Odd)

    def __hash__(self):
        return 7


class Tagged(float):
    tag = 0.0


class Box:
    def __init__(self, t, meta):
        self.t, self.meta = t, meta


torch.utils._pytree.register_pytree_node(Box, lambda b: ([b.t], b.meta), lambda ts, meta: Box(next(iter(ts)), meta))


@dataclasses.dataclass(slots=True)
class Slotted(WithSlot):
    x: torch.Tensor


def tagged(value):
    number = Tagged(1.0)
    number.tag = value
    return number


def slotted(x, value):
    made = Slotted(x)
    made.n = value
    return made


PAIRS = {
    "modules that say they are equal": lambda x: (
        lambda m: x * m.by, SaysEqualToo(1.0, x.device), SaysEqualToo(2.0, x.device)),
    "enums that say they are equal": lambda x: (lambda e: x * e.value, Odd.ONE, Odd.TWO),
    "dictionary keys 1 and 1.0": lambda x: (lambda d: next(iter(d.values())) // next(iter(d))[0], {(1,): x}, {(1.0,): x}),
    "dictionary keys 0.0 and -0.0": lambda x: (lambda d: x / next(iter(d)), {0.0: x}, {-0.0: x}),
    "floats with a tag": lambda x: (lambda v: x * v.tag, tagged(1.0), tagged(2.0)),
    "factories": lambda x: (lambda d: x * d.default_factory(), collections.defaultdict(lambda: 2.0),
                            collections.defaultdict(lambda: 3.0)),
    "slots that are no fields": lambda x: (lambda s: s.x * s.n, slotted(x, 1.0), slotted(x, 2.0)),
    "contexts of pytree": lambda x: (lambda b: b.t * b.meta["a"], Box(x, {"a": 1}), Box(x, {"a": 2.0})),
}  # fmt: skip


@may_run_live
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_c07_arguments_that_only_look_the_same(device, pair):
    f, one, two = pair(ramp(device, 3))
    recorded = pg.record(f, warmup=1)
    for argument in (one, one, one, two, two, two, one, two):
        assert_same(recorded(argument), f(argument))


@pytest.mark.parametrize("place", ["an argument", "in a list", "an attribute"])
def test_c07_enums_of_cpp(device, place):
    """pybind11's, as torch has some: numbers with a class. Another object of the same number is the same."""
    kind, held = torch._C._autograd.DeviceType, types.SimpleNamespace(k=None)

    def f(x, k):
        k = held.k if k is None else k[0] if isinstance(k, list) else k
        return x * (2 if k == kind.CUDA else 3)

    recorded = pg.record(f, warmup=1)
    for member in (*[kind.CUDA] * 3, *[kind.CPU] * 3, kind(int(kind.CUDA)), kind(int(kind.CPU))):
        held.k = member
        given = {"an argument": member, "in a list": [member], "an attribute": None}[place]
        assert_same(recorded(ramp(device, 3), given), f(ramp(device, 3), given))
    assert counts(recorded)[1:] == (2, 6)


@may_run_live
@pytest.mark.parametrize("kind", ["key", "context"])
def test_c09_an_object_within_an_argument_that_is_no_leaf(device, kind):
    held = types.SimpleNamespace() if kind == "context" else WithSlot()
    held.n = 2.0
    f = pg.record(lambda d: next(iter(d.values())) * next(iter(d)).n if kind == "key" else d.t * d.meta.n, warmup=1)
    for n in range(6):
        held.n = 2.0 + n // 3
        x = ramp(device, 3)
        assert_same(f({held: x} if kind == "key" else Box(x, held)), x * held.n)


@may_run_live
def test_c07_questions_about_where_an_argument_comes_from(device):
    weight = torch.ones(3, device=device, requires_grad=True)

    def f(a):
        with torch.no_grad():
            return a * 2 if a.is_leaf else a * 3

    recorded = pg.record(f, warmup=1)
    for _ in range(4):
        assert_same(recorded(weight * 1), f(weight * 1))
    with torch.inference_mode():
        inferred = torch.ones(3, device=device)
    with torch.no_grad():
        recorded = pg.record(lambda v: v * 2 if v.is_inference() else v * 3, warmup=1)
        for _ in range(4):
            assert_same(recorded(inferred), torch.full((3,), 2.0, device=device))


@may_run_live
def test_c07_the_default_device_is_part_of_the_signature(device):
    f = pg.record(lambda x: x + torch.ones(3).to(x.device).mean() + torch.ones(3).sum().to(x.device), warmup=1)
    with torch.device("cpu"):
        for _ in range(2):
            assert_same(f(ramp(device, 3)), ramp(device, 3) + 4)
    g = pg.record(lambda x: x + torch.ones(3, device=x.device), warmup=1)
    with torch.device(device):
        for _ in range(4):
            assert_same(g(ramp(device, 3)), ramp(device, 3) + 1)
    assert pg.stats(g).replayed == 3, reasons(g)


@may_run_live
def test_c07_a_list_that_contains_itself(device):
    loop = []
    loop.append(loop)
    f = pg.record(lambda x, loop: x * len(loop), warmup=1)
    for _ in range(3):
        assert_same(f(ramp(device, 3), loop), ramp(device, 3))


def test_c07_an_argument_called_self(device):
    def f(self, x):
        return x * self

    recorded = pg.record(f, warmup=1)
    for _ in range(3):
        assert_same(recorded(self=2, x=ramp(device, 3)), ramp(device, 3) * 2)


class Checked(collections.namedtuple("Checked", "t")):
    def __new__(cls, t):
        if not isinstance(t, torch.Tensor):
            raise TypeError("no tensor")
        return super().__new__(cls, t + 1)


def test_c09_objects_of_a_class_in_reach_are_copied(device):
    corner = collections.namedtuple("corner", "x")

    @dataclasses.dataclass
    class Edge:
        x: object

    both = plain(lambda x: (corner(x + 1), Edge(x + 2)))
    both(ramp(device, 3))
    both(ramp(device, 3))
    for _ in range(3):
        copy.deepcopy((corner(1), Edge(2)))
        assert_replays(both, ramp(device, 3))
    assert counts(both) == (1, 1, 4)


def test_c04_a_named_tuple_with_a_constructor_of_its_own(device):
    both = plain(lambda x: Checked(x))
    for n in range(4):
        both(ramp(device, 3, start=n))
    assert_replays(both, ramp(device, 3))


@may_run_live
@pytest.mark.parametrize("size", [3, 30_000])
def test_c04_results_of_two_dtypes_in_one_memory(device, size):
    """A write to one moves the version of the other on, for autograd."""
    f = pg.record(lambda x: (lambda y: (y, y.view(torch.int32)))(x * 2), warmup=1)
    for _ in range(4):
        weight = torch.ones(size, device=device, requires_grad=True)
        y, v = f(torch.ones(size, device=device))
        z = (weight * y).sum()
        v.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.backward()


@may_run_live
def test_c04_a_state_dict(device):
    layer = nn.Linear(2, 2).to(device)
    f = pg.record(lambda x: layer.state_dict(), warmup=1)
    for _ in range(4):
        assert f(ramp(device, 3))._metadata == layer.state_dict()._metadata


@may_run_live
@pytest.mark.parametrize("first", ["a leaf", "such a view"])
def test_c07_a_view_that_says_it_requires_a_gradient_and_gets_none(device, first):
    """So is one of a leaf, made in no_grad."""
    leaf = torch.ones(4, device=device, requires_grad=True)

    def gradients(x, w):
        y = x * w
        return torch.autograd.grad(y, [x, w], torch.ones_like(y), allow_unused=True)

    f, x = pg.record(gradients, warmup=1, keep="always"), ramp(device, 3).requires_grad_()
    for _ in range(12):
        with torch.no_grad():
            view = leaf[:3]
        other = leaf.detach()[:3].requires_grad_()
        for w in (other, view) if first == "a leaf" else (view, other):
            assert_same(f(x, w), gradients(x, w))
    assert pg.stats(f).replayed >= 8
    assert "to which autograd gives no gradient" in reasons(f)
