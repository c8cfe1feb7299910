"""C7-C10: recognising a call. Whatever makes it another program (its arguments, the modes, the state that the function
reads) is noticed before a recording is played."""

import contextlib
import dataclasses
import enum
import functools
import itertools
import os
import random
import time
import types
import warnings
from collections import deque, namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phonograph as pg
from phonograph.testing import Pair, assert_same, call
from tests.helpers import assert_replays, assert_settles, counts, may_run_live, plain, ramp, side_by_side

# ---------------------------------------------------------------------------------------------------
# C7: the signature


def in_turn(both, one, other):
    """Each kind of call until it would be replayed, then the two alternating."""
    for arguments in [one] * 3 + [other] * 3 + [one, other] * 2:
        both.outcome(*arguments.args, **arguments.kwargs)


TENSORS = {
    "shape": lambda d: (ramp(d, 2, 3), ramp(d, 3, 3)),
    "broadcastable shape": lambda d: (ramp(d, 3, 3), ramp(d, 1, 3)),
    "broadcastable to one element": lambda d: (ramp(d, 3, 3), ramp(d, 1, 1)),
    "same size, other shape": lambda d: (ramp(d, 2, 6), ramp(d, 3, 4)),
    "number of dimensions": lambda d: (ramp(d, 3), ramp(d, 1, 3)),
    "no dimensions": lambda d: (ramp(d, 1), ramp(d)),
    "empty": lambda d: (ramp(d, 2, 3), ramp(d, 0, 3)),
    "dtype": lambda d: (ramp(d, 3), ramp(d, 3).double()),
    "dtype of the same width": lambda d: (ramp(d, 3), ramp(d, 3).int()),
    "half and bfloat16": lambda d: (ramp(d, 3).half(), ramp(d, 3).bfloat16()),
    "strides": lambda d: (ramp(d, 3, 3), ramp(d, 3, 3).t()),
    "step": lambda d: (ramp(d, 3), ramp(d, 6)[::2]),
    "expanded": lambda d: (ramp(d, 2, 3), ramp(d, 3).expand(2, 3)),
    "channels last": lambda d: (
        ramp(d, 1, 2, 3, 3),
        ramp(d, 1, 2, 3, 3).to(memory_format=torch.channels_last),
    ),
    "offset": lambda d: (ramp(d, 4), ramp(d, 5)[1:]),
    "conjugate": lambda d: (torch.complex(ramp(d, 3), ramp(d, 3)), torch.complex(ramp(d, 3), ramp(d, 3)).conj()),
    "layout": lambda d: (ramp(d, 3, 3), ramp(d, 3, 3).to_sparse()),
    "class": lambda d: (ramp(d, 3), torch.nn.Parameter(ramp(d, 3), requires_grad=False)),
}


@may_run_live
@pytest.mark.parametrize("tensors", TENSORS.values(), ids=TENSORS)
def test_c07_other_tensor_metadata_is_another_signature(device, tensors):
    both = plain(lambda x: (x * 2, tuple(x.shape), x.dtype, x.is_contiguous(), type(x).__name__))
    one, other = tensors(device)
    in_turn(both, call(one), call(other))


class Mode(enum.Enum):
    ADD = 1
    MULTIPLY = 2


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Settings:
    scale: float
    names: tuple[str, ...] = ()


Pairing = namedtuple("Pairing", "a b")

VALUES = {
    "int": (1, 2),
    "int and bool": (1, True),
    "int and float": (1, 1.0),
    "bool and float": (True, 1.0),
    "zero and false": (0, False),
    "zero and minus zero": (0.0, -0.0),
    "float": (0.5, 0.25),
    "neighbouring floats": (0.1, 0.1 + 2**-56),
    "not a number": (float("nan"), float("nan")),
    "infinity": (float("inf"), float("-inf")),
    "int and complex": (1, 1 + 0j),
    "large int": (2**70, 2**70 + 1),
    "int and enum": (1, Level.LOW),
    "enum": (Mode.ADD, Mode.MULTIPLY),
    "string": ("add", "mul"),
    "string and bytes": ("a", b"a"),
    "none and zero": (None, 0),
    "tuple and list": ((1, 2), [1, 2]),
    "tuple and namedtuple": ((1, 2), Pairing(1, 2)),
    "nested": ({"a": [1, (2, 3)]}, {"a": [1, (2, 3.0)]}),
    "order of keys": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "missing key": ({"a": 1, "b": None}, {"a": 1}),
    "length": ([1, 2], [1, 2, 3]),
    "dataclass": (Settings(1.0), Settings(2.0)),
    "dataclass, deeper": (Settings(1.0, ("a",)), Settings(1.0, ("b",))),
    "slice": (slice(0, 2), slice(1, 3)),
    "range and list": (range(3), [0, 1, 2]),
    "dtype": (torch.float32, torch.float64),
    "shape": (torch.Size([1]), (1,)),
    "device and string": (torch.device("cpu"), "cpu"),
    "set": ({1, 2}, {1, 3}),
    "function": (torch.sin, torch.cos),
    "class": (int, float),
}


@may_run_live
def test_c07_no_arguments_but_a_transform_of_functorch(device):
    f = pg.record(lambda: torch.rand(3, device=device), warmup=1)
    for _ in range(5):
        f()
    torch.manual_seed(1)
    found = torch.vmap(lambda x: x + f(), randomness="different")(torch.zeros(4, 3, device=device))
    torch.manual_seed(1)
    expected = torch.vmap(lambda x: x + torch.rand(3, device=device), randomness="different")(torch.zeros(4, 3, device=device))
    assert_same(found, expected)


@may_run_live
def test_c07_a_trace_of_torch_jit(device):
    """It would see nothing of a replay on a GPU, and keep the result."""
    f = pg.record(lambda x: F.dropout(x) + torch.rand(3, device=device), warmup=1)
    draw = pg.record(lambda: torch.rand(3, device=device), warmup=1)
    x = torch.ones(3, device=device)
    for _ in range(5):
        f(x), draw()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(lambda x: f(x) + draw(), x, check_trace=False)
    assert not torch.equal(traced(x), traced(x))


TOGGLES = {
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "deterministic": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "anomalies": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "cudnn": (lambda: torch.backends.cudnn.benchmark, lambda on: setattr(torch.backends.cudnn, "benchmark", on)),
    "autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda on: torch.set_autocast_enabled("cpu", on)),
}


@may_run_live
@pytest.mark.parametrize(("is_on", "turn"), TOGGLES.values(), ids=TOGGLES)
@pytest.mark.parametrize("warmup", [0, 1])
def test_c12_a_setting_that_each_call_turns(device, is_on, turn, warmup):
    """The call that could not be captured runs once, as far as anybody can tell."""
    before, weight = is_on(), torch.ones(3, device=device, requires_grad=True)
    f = pg.record(lambda x: (turn(not is_on()), x * weight)[1], warmup=warmup)
    try:
        for n in range(6):
            y = f(torch.ones(3, device=device))
            assert is_on() is (before if n % 2 else not before)
            assert y.requires_grad is (torch.is_grad_enabled())
    finally:
        turn(before)


def test_c07_none_in_place_of_a_tensor(device):
    def twice(t):
        return None if t is None else [*map(twice, t)] if isinstance(t, list) else t * 2

    def uses(*given):
        return [*map(twice, given)], len(given)

    both, x, y = plain(uses), ramp(device, 3), ramp(device, 3) + 1
    kinds = [(x, None), (None, x), (x, y), (x,), (), (None,), (None, None), ([x], None), (None, [None], x), ([None], x)]
    for n in range(4):
        for given in kinds:
            for _ in range(n):  # that recognised last, and others after it
                both(*given)
    for a, b in itertools.permutations(kinds, 2):
        both(*a)
        both(*b)
    assert counts(both)[1] == len(kinds)


@may_run_live
@pytest.mark.parametrize(("one", "other"), VALUES.values(), ids=VALUES)
def test_c07_another_python_value_is_another_signature(device, one, other):
    def uses(x, value):
        return x + 1, type(value).__name__, repr(value), x + len(repr(value))

    both = plain(uses)
    x = ramp(device, 3)
    in_turn(both, call(x, one), call(x, other))
    in_turn(both, call(x, value=one), call(x, value=other))


def test_c07_one_true_and_one_point_zero_are_three_programs(device):
    both = plain(lambda x, s: x * s)
    for s in [1, True, 1.0] * 4:
        both(torch.tensor([2, 3], device=device), s)
    assert counts(both) == (3, 3, 9)


def test_c07_tensors_in_other_places_of_the_arguments(device):
    def weighted(batch):
        return batch["a"] * 2 + batch["b"]

    both = plain(weighted)
    x, y = ramp(device, 3), ramp(device, 3, start=7)
    in_turn(both, call({"a": x, "b": y}), call({"b": x, "a": y}))
    in_turn(both, call(batch={"a": x, "b": y}), call(batch={"b": x, "a": 1.0}))


def test_c07_keywords_positions_and_defaults(device):
    def scaled(x, /, scale=2.0, *more, shift=0.0, **rest):
        return x * scale + shift + sum(more) + sum(rest.values()), sorted(rest)

    both = plain(scaled)
    x = ramp(device, 3)
    ways = [
        call(x),
        call(x, 2.0),
        call(x, scale=2.0),
        call(x, scale=3.0),
        call(x, 3.0, 1, 2),
        call(x, 3.0, 2, 1),
        call(x, shift=2.0),
        call(x, extra=1.0),
        call(x, other=1.0),
        call(x, b=1.0, a=2.0),
        call(x, a=2.0, b=1.0),
    ]
    for _ in range(4):
        for way in ways:
            both(*way.args, **way.kwargs)


@may_run_live
@pytest.mark.parametrize(
    "views",
    [
        lambda x: (x[:4], x[4:]),
        lambda x: (x[:4], x[:4]),
        lambda x: (x[:4], x[2:6]),
        lambda x: (x[2:6], x[:4]),
        lambda x: (x[:4], x[:4].view(2, 2).view(4)),
        lambda x: (x[::2], x[1::2]),
        lambda x: (x[:4], x[:4].flip(0)),
    ],
    ids=["apart", "the same view", "ahead", "behind", "another object", "interleaved", "a copy"],
)
def test_c07_aliasing_between_arguments(device, views):
    """Recorded with separate tensors, then called with overlapping ones (and the other way round)."""
    both = plain(lambda a, b: (a.add_(b.sum()), b.mul_(2), a * b)[2])
    for n in range(3):
        both(ramp(device, 4, start=n), ramp(device, 4, start=n + 5))
    for n in range(4):
        base = Pair.of(ramp(device, 8, start=n))
        pairs = [Pair(one, other) for one, other in zip(views(base.recorded), views(base.live), strict=True)]
        both(*pairs)
        base.check("base of the arguments")
        both(ramp(device, 4, start=n), ramp(device, 4, start=n + 5))


@may_run_live
def test_c07_the_same_tensor_as_both_arguments(device):
    both = plain(lambda a, b: (a.add_(1), b.mul_(3), a is b))
    for n in range(4):
        x = Pair.of(ramp(device, 3, start=n))
        both(x, x)
        both(x, Pair.of(ramp(device, 3)))


@may_run_live
def test_c07_an_argument_that_is_also_state(device):
    """The closed-over tensor passed as the argument too: writing one writes the other."""

    def make():
        w = ramp(device, 3)
        return lambda x: (x.add_(1), x * w)[1], w

    both = side_by_side(make)
    for _ in range(3):
        both(ramp(device, 3))
    for _ in range(4):
        both(Pair(both.state, both.live_state))
        both(Pair(both.state[:], both.live_state[:]))
        both(ramp(device, 3))


@may_run_live
def test_c07_an_argument_that_overlaps_state(device):
    def make():
        w = ramp(device, 6)
        return lambda x: (w.mul_(2), x + 1)[1], w

    both = side_by_side(make)
    for window in [slice(0, 3)] * 3 + [slice(2, 5)] * 3:
        both(ramp(device, 3))
        both(Pair(both.state[window], both.live_state[window]))


def test_c07_training_flag(device):
    def make():
        net = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.5)).to(device).requires_grad_(False)
        return lambda x: net(x), net

    both = side_by_side(make)
    for training in [True, True, True, False, False, False, True, False, True]:
        both.change(lambda net, training=training: net.train(training))
        both(torch.randn(4, 3, device=device))
    both.change(lambda net: net[1].eval())
    both(torch.randn(4, 3, device=device))


@may_run_live
def test_c07_grad_mode(device):
    def make():
        w = torch.nn.Parameter(ramp(device, 3))
        return lambda x: (x * w, torch.is_grad_enabled(), torch.is_inference_mode_enabled()), w

    both = side_by_side(make)
    modes = [torch.no_grad, torch.enable_grad, torch.inference_mode]
    for mode in [modes[0]] * 3 + [modes[1]] * 2 + [modes[2]] * 3 + modes * 2:
        with mode():
            both(ramp(device, 3))


def test_c07_results_of_inference_mode_are_inference_tensors(device):
    f = pg.record(lambda x: x * 2, warmup=1)
    for inference in [False] * 3 + [True] * 3 + [False, True]:
        with torch.inference_mode(inference):
            assert f(ramp(device, 3)).is_inference() is inference


@pytest.mark.parametrize("rows", [3, 9000])
def test_c04_results_of_a_function_that_enters_inference_mode(device, rows):
    def make():
        @torch.inference_mode()
        def f(x):
            y = x * 2
            return y, y[1:], x, x[1:], y.sum(0), x[:0] + 1

        return f

    both, held = side_by_side(make), []
    for n in range(6):
        held.append(both(ramp(device, rows, 2, start=n)))
        for one in held:
            one.check()
            facts = one.each(lambda results: [t.is_inference() for t in results])
            assert facts.recorded == facts.live == [True, True, False, False, True, True]
    assert counts(both)[2] >= 4


def test_c07_an_inference_tensor_as_an_argument_where_gradients_are_on(device):
    def make():
        layer = torch.nn.Linear(4, 4, device=device)

        @torch.inference_mode()
        def f(x):
            return layer(x).softmax(-1)

        return f, layer

    both = side_by_side(make)
    x = Pair.of(torch.ones(2, 4, device=device))
    for n in range(8):
        x = assert_replays(both, x) if n > 2 else both(x)
        assert x.recorded.is_inference() is x.live.is_inference() is True


def test_c03_an_inference_tensor_that_is_written_in_inference_mode(device):
    def make():
        @torch.inference_mode()
        def f(cache, x):
            return cache.add_(x).sum()

        return f

    both = side_by_side(make)
    with torch.inference_mode():
        caches = [Pair.of(torch.zeros(3, device=device)) for _ in range(2)]
    for n in range(6):
        both(caches[n % 2], ramp(device, 3))
    assert counts(both)[2] >= 4


@may_run_live
def test_c13_an_inference_tensor_that_must_not_be_written_or_saved(device):
    weight = torch.ones(3, device=device, requires_grad=True)
    for f in (lambda x: x.add_(1), lambda x: x * weight):
        both = plain(f)
        with torch.inference_mode():
            x = Pair.of(ramp(device, 3))
        for _ in range(4):
            with pytest.raises(RuntimeError, match="nference tensor"):
                both(x)


def test_c07_autocast(device):
    both = plain(lambda x: x @ x)
    for dtype in [None] * 3 + [torch.bfloat16] * 3 + [None, torch.bfloat16, None]:
        with torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            assert both(torch.randn(3, 3, device=device)).recorded.dtype is (dtype or torch.float32)


def test_c07_autocast_dtype(device):
    both = plain(lambda x: x @ x)
    for dtype in [torch.bfloat16, torch.float16] * 4:
        with torch.autocast(device.type, dtype=dtype):
            assert both(torch.randn(3, 3, device=device)).recorded.dtype is dtype


def test_c07_default_dtype(device):
    both = plain(lambda x: (x * 2, torch.ones(2, device=device)))
    try:
        for dtype in [torch.float32] * 3 + [torch.float64] * 3 + [torch.float32, torch.float64]:
            torch.set_default_dtype(dtype)
            assert both(ramp(device, 3)).recorded[1].dtype is dtype
    finally:
        torch.set_default_dtype(torch.float32)


def test_c07_determinism_setting(device):
    both = plain(lambda x: (x * 2, torch.are_deterministic_algorithms_enabled()))
    try:
        for on in [False] * 3 + [True] * 3 + [False, True]:
            torch.use_deterministic_algorithms(on, warn_only=True)
            both(ramp(device, 3))
    finally:
        torch.use_deterministic_algorithms(False)


@may_run_live
def test_c07_default_device(device):
    both = plain(lambda x: (x * 2, torch.ones(2).device.type))
    for where in ["cpu", "cpu", "cpu", "meta", "meta", "cpu"]:
        with torch.device(where):
            both(ramp(device, 3))


@may_run_live
def test_c07_a_mode_of_the_callers_sees_every_operator(device):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            self.seen.append(str(operator))
            return operator(*args, **(kwargs or {}))

    both = plain(lambda x: x.sin() * 2)
    for counting in [False, False, False, True, True, False, True]:
        with Counting() if counting else contextlib.nullcontext() as mode:
            both(ramp(device, 3))
        assert not counting or mode.seen.count("aten.sin.default") == 2, "one for each side"


def test_c07_settings_that_come_back_find_their_recording(device):
    both = plain(lambda x, s: x * s)
    for s in [2.0, 3.0]:
        assert_settles(both, ramp(device, 3), s)
    assert_replays(both, ramp(device, 3), 2.0)
    assert_replays(both, ramp(device, 3), 3.0)


# ---------------------------------------------------------------------------------------------------
# C8: state outside the arguments


class Net(torch.nn.Module):
    """A bit of everything that a module can hold."""

    def __init__(self, device):
        super().__init__()
        self.first = torch.nn.Linear(4, 4, device=device)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4, device=device) for _ in range(2))
        self.register_buffer("shift", ramp(device, 4))
        self.register_parameter("gain", torch.nn.Parameter(torch.ones(4, device=device)))
        self.extra = [torch.ones(4, device=device)]
        self.scale = 2.0
        self.activation = torch.tanh
        self.requires_grad_(False)

    def forward(self, x):
        x = self.first(x) * self.scale
        for layer in self.layers:
            x = self.activation(layer(x))
        return x * self.gain + self.shift + self.extra[0]


def net_pair(device, **options):
    def make():
        net = Net(device)
        return lambda x: net(x), net

    return side_by_side(make, **options)


def test_c08_in_place_changes_are_seen_without_a_new_recording(device):
    both = net_pair(device)
    for _ in range(3):
        both(torch.randn(2, 4, device=device))
    for change in [
        lambda net: net.first.weight.mul_(2),
        lambda net: net.shift.add_(1),
        lambda net: net.load_state_dict({k: v + 1 for k, v in net.state_dict().items()}),
        lambda net: net.layers[0].weight[1].zero_(),
        lambda net: net.gain.data.normal_(),
        lambda net: net.extra[0].fill_(3),
    ]:
        both.change(change)
        assert_replays(both, torch.randn(2, 4, device=device))
    assert counts(both)[:2] == (1, 1)


def new_like(t):
    return torch.randn(t.shape, device=t.device, dtype=t.dtype)


REPLACEMENTS = {
    "p.data": lambda net: setattr(net.first.weight, "data", new_like(net.first.weight)),
    "p.data of the last layer": lambda net: setattr(net.layers[1].bias, "data", new_like(net.layers[1].bias)),
    "p.data, transposed at one address": lambda net: setattr(net.first.weight, "data", net.first.weight.data.t()),
    "p.set_": lambda net: net.first.weight.set_(new_like(net.first.weight)),
    "swap_tensors": lambda net: torch.utils.swap_tensors(
        net.first.weight, torch.nn.Parameter(new_like(net.first.weight), requires_grad=False)
    ),
    "a new parameter": lambda net: setattr(
        net.first, "weight", torch.nn.Parameter(new_like(net.first.weight), requires_grad=False)
    ),
    "load_state_dict(assign=True)": lambda net: net.load_state_dict(
        {k: new_like(v) for k, v in net.state_dict().items()}, assign=True
    ),
    "to(float64)": lambda net: net.to(torch.float64),
    "to(float64) and back": lambda net: net.to(torch.float64).to(torch.float32),
    "_apply": lambda net: net._apply(lambda t: t * 3),
    "a new buffer": lambda net: setattr(net, "shift", new_like(net.shift)),
    "a buffer's data": lambda net: setattr(net.shift, "data", new_like(net.shift)),
    "a buffer's set_": lambda net: net.shift.set_(new_like(net.shift)),
    "no bias any more": lambda net: setattr(net.first, "bias", None),
    "a tensor in a list": lambda net: net.extra.__setitem__(0, new_like(net.extra[0])),
    "the list of tensors": lambda net: setattr(net, "extra", [new_like(net.extra[0])]),
    "a tensor of another size": lambda net: net.extra.__setitem__(0, net.extra[0][:1] * 5),
    "data of a tensor in a list": lambda net: setattr(net.extra[0], "data", new_like(net.extra[0])),
    "a submodule": lambda net: setattr(net, "first", torch.nn.Linear(4, 4, device=net.shift.device)),
    "a layer in a list": lambda net: net.layers.__setitem__(1, torch.nn.Linear(4, 4, device=net.shift.device)),
    "a layer appended": lambda net: net.layers.append(torch.nn.Linear(4, 4, device=net.shift.device)),
    "a layer removed": lambda net: net.layers.__delitem__(0),
    "layers in another order": lambda net: setattr(net, "layers", torch.nn.ModuleList(list(net.layers)[::-1])),
    "two weights swapped": lambda net: _swap_data(net.first.weight, net.layers[0].weight),
    "vector_to_parameters": lambda net: torch.nn.utils.vector_to_parameters(
        torch.randn(sum(p.numel() for p in net.parameters()), device=net.shift.device), net.parameters()
    ),
    "a parametrization": lambda net: torch.nn.utils.parametrize.register_parametrization(net.first, "weight", Doubling()),
    "pruning": lambda net: prune_half(net.first),
}


def _swap_data(one, other):
    one.data, other.data = other.data, one.data


def prune_half(linear):
    from torch.nn.utils import prune

    prune.custom_from_mask(linear, "weight", (linear.weight > 0).float())


class Doubling(torch.nn.Module):
    def forward(self, weight):
        return weight * 2


@may_run_live
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("replace", REPLACEMENTS.values(), ids=REPLACEMENTS)
def test_c08_replaced_state_is_noticed_before_the_next_replay(device, replace):
    both = net_pair(device)
    with torch.no_grad():
        for _ in range(4):
            both(torch.randn(2, 4, device=device))
        both.change(replace)
        dtype = both.state.first.weight.dtype
        for _ in range(4):
            # An inputs' dtype that no longer fits raises on both sides: that is a result as well.
            both.outcome(torch.randn(2, 4, device=device, dtype=dtype))
            both.outcome(torch.randn(2, 4, device=device))


@pytest.mark.parametrize("name", ["p.data", "a new buffer", "a tensor in a list", "load_state_dict(assign=True)"])
def test_c08_after_a_replacement_it_settles_again(device, name):
    both = net_pair(device)
    assert_settles(both, torch.randn(2, 4, device=device))
    both.change(REPLACEMENTS[name])
    assert_settles(both, torch.randn(2, 4, device=device))


@may_run_live
def test_c08_one_of_very_many_weights_is_replaced(device):
    """Too many to look at each before every replay."""

    def make():
        net = torch.nn.Sequential(*(torch.nn.Linear(2, 2, device=device) for _ in range(100))).requires_grad_(False)
        return lambda x: net(x), net

    both = side_by_side(make)
    for _ in range(3):
        both(torch.randn(2, 2, device=device))
    for i in [99, 0, 57]:
        for change in [
            lambda net, i=i: setattr(net[i].weight, "data", new_like(net[i].weight)),
            lambda net, i=i: setattr(net[i], "bias", torch.nn.Parameter(new_like(net[i].bias), False)),
            lambda net, i=i: net[i].bias.set_(new_like(net[i].bias)),
        ]:
            both.change(change)
            both(torch.randn(2, 2, device=device))


def test_c08_weights_that_alternate_between_two_storages(device):
    both = net_pair(device)
    weights = [Pair.of(torch.randn(4, 4, device=device)) for _ in range(2)]
    for n in range(10):
        both.state.first.weight.data = weights[n % 2].recorded
        both.live_state.first.weight.data = weights[n % 2].live
        both(torch.randn(2, 4, device=device))


def test_c08_a_freed_weight_whose_memory_is_taken_by_another_tensor(device):
    both = net_pair(device)
    taken = []
    for _ in range(8):
        both(torch.randn(2, 4, device=device))
        both.change(lambda net: setattr(net.first.weight, "data", new_like(net.first.weight)))
        taken.append(torch.full((4, 4), float("nan"), device=device))


class Cell:
    """Plain attributes."""

    def __init__(self, **values):
        self.__dict__.update(values)


HOLDERS = {
    "closure": lambda d: _rebinding_closure(d),
    "attribute": lambda d: _with_state(Cell(w=ramp(d, 3)), lambda s, x: x * s.w, lambda s, w: setattr(s, "w", w)),
    "deep attribute": lambda d: _with_state(
        Cell(a=Cell(b=Cell(w=ramp(d, 3)))), lambda s, x: x * s.a.b.w, lambda s, w: setattr(s.a.b, "w", w)
    ),
    "dictionary": lambda d: _with_state({"w": ramp(d, 3)}, lambda s, x: x * s["w"], lambda s, w: s.update(w=w)),
    "list": lambda d: _with_state([ramp(d, 3)], lambda s, x: x * s[0], lambda s, w: s.__setitem__(0, w)),
    "nested containers": lambda d: _with_state(
        {"l": [(ramp(d, 3),)]}, lambda s, x: x * s["l"][0][0], lambda s, w: s["l"].__setitem__(0, (w,))
    ),
    "deque": lambda d: _with_state(deque([ramp(d, 3)]), lambda s, x: x * s[0], lambda s, w: s.__setitem__(0, w)),
    "dataclass": lambda d: _with_state(Prompt(ramp(d, 3)), lambda s, x: x * s.value, lambda s, w: setattr(s, "value", w)),
    "slots": lambda d: _with_state(Slotted(ramp(d, 3)), lambda s, x: x * s.w, lambda s, w: setattr(s, "w", w)),
}


@dataclasses.dataclass
class Prompt:
    value: torch.Tensor


class Slotted:
    __slots__ = ("w",)

    def __init__(self, w):
        self.w = w

    def __eq__(self, other):
        return True

    __hash__ = None


def _with_state(state, compute, replace):
    return (lambda x: compute(state, x)), Cell(replace=functools.partial(replace, state))


def _rebinding_closure(device):
    w = ramp(device, 3)

    def replace(new):
        nonlocal w
        w = new

    return (lambda x: x * w), Cell(replace=replace)


@may_run_live
@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_c08_a_tensor_that_is_replaced_where_the_function_finds_it(device, holder):
    both = SideBySideOfCells(lambda: holder(device))
    for n in range(8):
        both(ramp(device, 3))
        if n > 2:
            both.replace(lambda n=n: ramp(device, 3, start=n))
            both(ramp(device, 3))


class SideBySideOfCells:
    """`side_by_side` where the state is reached through its `replace` only."""

    def __init__(self, make):
        self.cells = []

        def remembering():
            function, cell = make()
            self.cells.append(cell)
            return function

        self.both = side_by_side(remembering)

    def __call__(self, *args):
        return self.both(*args)

    def replace(self, new):
        for cell in self.cells:
            cell.replace(new())


GLOBAL_TENSOR = torch.zeros(3)


def test_c08_a_global_tensor_is_replaced(device, monkeypatch):
    f = pg.record(lambda x: x + GLOBAL_TENSOR, warmup=1)
    for n in range(8):
        monkeypatch.setitem(globals(), "GLOBAL_TENSOR", torch.full((3,), float(n // 2), device=device))
        assert f(torch.ones(3, device=device)).tolist() == [1.0 + n // 2] * 3


@may_run_live
def test_c08_state_that_is_created_by_the_first_call(device):
    def make():
        cache = {}

        def f(x):
            if "w" not in cache:
                cache["w"] = x * 2
            return x + cache["w"]

        return f, cache

    both = side_by_side(make)
    for n in range(6):
        both(ramp(device, 3, start=n))
    both.change(lambda cache: cache.clear())
    for n in range(4):
        both(ramp(device, 3, start=n))


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_c08_hooks_that_come_and_go(device, register):
    def hook(module, *inputs_and_outputs):
        last = inputs_and_outputs[-1]
        return tuple(t * 3 for t in last) if isinstance(last, tuple) else last * 3

    both = net_pair(device)
    handles = []
    for n in range(12):
        if n == 4:
            both.change(lambda net: handles.append(getattr(net.first, register)(hook)))
        if n == 8:
            for handle in handles:
                handle.remove()
        both(torch.randn(2, 4, device=device))


@may_run_live
def test_c08_a_global_module_hook(device):
    both = net_pair(device)
    for n in range(9):
        if n == 3:
            handle = torch.nn.modules.module.register_module_forward_hook(lambda m, i, out: out * 2)
        if n == 6:
            handle.remove()
        both(torch.randn(2, 4, device=device))


def test_c08_a_lora_swap(device):
    class Lora(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.base = torch.nn.Linear(4, 4, device=device)
            self.adapters = {name: torch.randn(2, 4, 4, device=device) for name in ("a", "b")}
            self.active = "a"
            self.requires_grad_(False)

        def forward(self, x):
            down, up = self.adapters[self.active]
            return self.base(x) + x @ down @ up

    def make():
        net = Lora()
        return net.forward, net

    both = side_by_side(make)
    for active in "aaabbbabab":
        both.change(lambda net, active=active: setattr(net, "active", active))
        both(torch.randn(2, 4, device=device))
    both.change(lambda net: net.adapters.update(b=torch.randn(2, 4, 4, device=device)))
    both(torch.randn(2, 4, device=device))


# ---------------------------------------------------------------------------------------------------
# C9: Python values that the function reads

GLOBAL_SCALE = 2.0
GLOBAL_SETTINGS = {"scale": 2.0, "deep": {"shift": 1.0}}


def global_helper(x):
    return x * 2


class Config:
    scale = 2.0

    def __init__(self):
        self.shift = 1.0
        self.flags = {"on": True}
        self.powers = [1, 2]

    @property
    def doubled(self):
        return self.shift * 2


class Layer(torch.nn.Module):
    bias = 1.0

    def __init__(self):
        super().__init__()
        self.scale = 2.0
        self.config = Config()
        self.dropout = torch.nn.Dropout(0.5)
        self.steps = 2

    def helper(self, x):
        return x + self.config.shift

    def forward(self, x):
        for _ in range(self.steps):
            x = self.dropout(x) * self.scale + self.bias
        for power in self.config.powers:
            x = x**power
        if self.config.flags["on"]:
            x = x + self.config.doubled + self.config.scale
        return self.helper(x)


class OtherLayer(Layer):
    def helper(self, x):
        return x - self.config.shift


VALUE_CHANGES = {
    "attribute": lambda layer: setattr(layer, "scale", 3.0),
    "attribute, int for float": lambda layer: setattr(layer, "scale", 2),
    "a tensor for a number": lambda layer: setattr(layer, "scale", torch.tensor(3.0)),
    "loop count": lambda layer: setattr(layer, "steps", 3),
    "dropout's p": lambda layer: setattr(layer.dropout, "p", 0.1),
    "attribute of a plain object": lambda layer: setattr(layer.config, "shift", 5.0),
    "a plain object": lambda layer: setattr(layer, "config", _config_with(shift=9.0)),
    "dictionary": lambda layer: layer.config.flags.update(on=False),
    "list": lambda layer: layer.config.powers.append(2),
    "item of a list": lambda layer: layer.config.powers.__setitem__(1, 3),
    "instance attribute over a class attribute": lambda layer: setattr(layer.config, "scale", 7.0),
    "method of the instance": lambda layer: setattr(layer, "helper", lambda x: x * 100),
    "class of the instance": lambda layer: setattr(layer, "__class__", OtherLayer),
    "attribute deleted": lambda layer: _shadow_then_delete(layer),
    "forward of the instance": lambda layer: setattr(layer, "forward", lambda x: x * 100),
    "train and eval": lambda layer: layer.eval(),
    "training of one part": lambda layer: setattr(layer.dropout, "training", False),
}


def _config_with(**values):
    config = Config()
    config.__dict__.update(values)
    return config


def _shadow_then_delete(layer):
    layer.bias = 5.0
    del layer.bias


@may_run_live
@pytest.mark.parametrize("through", ["closure", "bound method", "module"])
@pytest.mark.parametrize("change", VALUE_CHANGES.values(), ids=VALUE_CHANGES)
def test_c09_a_value_that_the_function_reads_has_changed(device, change, through):
    def make():
        layer = Layer()
        return {"closure": lambda x: layer(x), "bound method": layer.forward, "module": layer.__call__}[through], layer

    both = side_by_side(make)
    for _ in range(4):
        both(ramp(device, 3))
    both.change(change)
    for _ in range(4):
        both(ramp(device, 3))


@pytest.mark.parametrize("name", ["attribute", "attribute of a plain object", "dictionary", "train and eval"])
def test_c09_after_a_changed_value_it_settles_again(device, name):
    def make():
        layer = Layer()
        return lambda x: layer(x), layer

    both = side_by_side(make)
    assert_settles(both, ramp(device, 3))
    both.change(VALUE_CHANGES[name])
    assert_settles(both, ramp(device, 3))


@pytest.mark.parametrize("attribute", ["scale", "bias"])
def test_c09_class_attributes(device, monkeypatch, attribute):
    class Own(Layer):
        scale_of_class = 2.0

        def forward(self, x):
            return x * Config.scale + self.bias

    layer = Own()
    f = pg.record(lambda x: layer(x), warmup=1)
    owner = {"scale": Config, "bias": Own}[attribute]
    for n in range(8):
        monkeypatch.setattr(owner, attribute, float(n // 2), raising=False)
        assert_same(f(ramp(device, 3)), ramp(device, 3) * Config.scale + layer.bias)


def test_c09_globals(device, monkeypatch):
    def reads(x):
        return global_helper(x) * GLOBAL_SCALE + GLOBAL_SETTINGS["deep"]["shift"]

    f = pg.record(reads, warmup=1)

    def check(times=3):
        for _ in range(times):
            assert_same(f(ramp(device, 3)), reads(ramp(device, 3)))

    check(4)
    monkeypatch.setitem(globals(), "GLOBAL_SCALE", 3.0)
    check()
    monkeypatch.setitem(GLOBAL_SETTINGS["deep"], "shift", 4.0)
    check()
    monkeypatch.setitem(globals(), "GLOBAL_SETTINGS", {"deep": {"shift": 6.0}})
    check()
    monkeypatch.setitem(globals(), "global_helper", lambda x: x * 50)
    check()
    monkeypatch.setitem(globals(), "global_helper", torch.neg)
    check()


def test_c09_closure_variables(device):
    def make():
        scale, mode = 2.0, "add"

        def f(x):
            return x + scale if mode == "add" else x * scale

        def change(new_scale, new_mode):
            nonlocal scale, mode
            scale, mode = new_scale, new_mode

        return f, change

    f, change = make()
    recorded = pg.record(f, warmup=1)
    for n in range(12):
        change(float(n // 3), "mul" if n > 5 else "add")
        assert_same(recorded(ramp(device, 3)), f(ramp(device, 3)))


def test_c09_default_arguments(device):
    def f(x, scale=2.0, *, shift=0.0, table={"power": 2}):  # noqa: B006 - mutable on purpose
        return x ** table["power"] * scale + shift

    recorded = pg.record(f, warmup=1)
    for change in [
        lambda: None,
        lambda: setattr(f, "__defaults__", (5.0,)),
        lambda: f.__kwdefaults__.update(shift=3.0),
        lambda: f.__kwdefaults__["table"].update(power=3),
    ]:
        change()
        for _ in range(3):
            assert_same(recorded(ramp(device, 3)), f(ramp(device, 3)))


def test_c09_code_of_a_helper_is_replaced(device):
    def helper(x):
        return x * 2

    def f(x):
        return helper(x) + 1

    recorded = pg.record(f, warmup=1)
    for n in range(8):
        if n == 4:
            helper.__code__ = (lambda x: x * 30).__code__
        assert_same(recorded(ramp(device, 3)), f(ramp(device, 3)))


@pytest.mark.parametrize("kind", ["partial", "callable object", "method", "class method", "static method", "builtin"])
def test_c09_every_kind_of_callable(device, kind):
    class Scaler:
        factor = 3.0

        def __init__(self):
            self.scale = 2.0

        def __call__(self, x):
            return x * self.scale

        def method(self, x):
            return x * self.scale + 1

        @classmethod
        def of_class(cls, x):
            return x * cls.factor

        @staticmethod
        def static(x):
            return x - 1

    def make():
        scaler = Scaler()
        found = {
            "partial": functools.partial(lambda scale, x, shift: x * scale.scale + shift, scaler, shift=1.0),
            "callable object": scaler,
            "method": scaler.method,
            "class method": scaler.of_class,
            "static method": Scaler.static,
            "builtin": torch.sin,
        }
        return found[kind], scaler

    both = side_by_side(make)
    for _ in range(4):
        both(ramp(device, 3))
    both.change(lambda scaler: setattr(scaler, "scale", 5.0))
    for _ in range(3):
        both(ramp(device, 3))
    Scaler.factor = 7.0
    for _ in range(3):
        both(ramp(device, 3))


def test_c09_keywords_of_a_partial(device):
    partial = functools.partial(lambda x, scale: x * scale, scale=2.0)
    f = pg.record(partial, warmup=1)
    for n in range(8):
        partial.keywords["scale"] = float(n // 2)
        assert f(torch.ones(2, device=device)).tolist() == [float(n // 2)] * 2


def test_c09_a_value_equal_but_of_another_type(device):
    def make():
        cell = Cell(s=1)
        return lambda x: x * cell.s, cell

    both = side_by_side(make)
    for s in [1, 1, 1, True, True, True, 1.0, 1.0, 1.0, 1, True, 1.0, 0.0, 0.0, -0.0, -0.0, 0.0]:
        both.change(lambda cell, s=s: setattr(cell, "s", s))
        both(torch.tensor([2, 3], device=device))


def test_c09_an_equal_value_in_a_new_object_is_no_change(device):
    def make():
        cell = Cell(scale=2.0, size=(1, 2), name="a" * 3)
        return lambda x: x * cell.scale * cell.size[1] * len(cell.name), cell

    both = side_by_side(make)
    assert_settles(both, ramp(device, 3))
    both.change(lambda cell: cell.__dict__.update(scale=float("2.0"), size=tuple(range(1, 3)), name="".join("aaa")))
    assert_replays(both, ramp(device, 3))


def test_c09_values_reached_through_a_property_a_getattr_and_a_getitem(device):
    class Magic:
        def __init__(self):
            self.table = {"scale": 2.0}

        def __getattr__(self, name):
            try:
                return self.__dict__["table"][name]
            except KeyError:
                raise AttributeError(name) from None

        def __getitem__(self, name):
            return self.table[name] + 1

        @property
        def tripled(self):
            return self.table["scale"] * 3

    def make():
        magic = Magic()
        return lambda x: x * magic.scale + magic["scale"] - magic.tripled, magic

    both = side_by_side(make)
    for n in range(9):
        both.change(lambda magic, n=n: magic.table.update(scale=float(n // 3)))
        both(ramp(device, 3))


def test_c09_the_length_of_a_list_and_the_keys_of_a_dictionary(device):
    def make():
        cell = Cell(items=[1.0], table={"a": 1.0})
        return lambda x: x * len(cell.items) + ("b" in cell.table), cell

    both = side_by_side(make)
    for n in range(9):
        if n == 3:
            both.change(lambda cell: cell.items.append(2.0))
        if n == 6:
            both.change(lambda cell: cell.table.update(b=2.0))
        both(ramp(device, 3))


@may_run_live
def test_c09_an_attribute_of_an_argument_tensor(device):
    def f(x):
        return x * getattr(x, "weight_of_it", 1.0)

    recorded = pg.record(f, warmup=1)
    for n in range(9):
        x = ramp(device, 3)
        if n > 3:
            x.weight_of_it = float(n // 2)
        assert_same(recorded(x), f(x))


def test_c09_the_requires_grad_of_a_weight(device):
    def make():
        layer = torch.nn.Linear(3, 3, device=device)

        def f(x):
            with torch.no_grad():
                return layer(x) * (2 if layer.weight.requires_grad else 3)

        return f, layer

    both = side_by_side(make)
    for on in [True, True, True, False, False, False, True, False]:
        both.change(lambda layer, on=on: layer.requires_grad_(on))
        both(ramp(device, 3))


# Effects and hidden inputs: the function is right, whether it is replayed or not.


def draws_from_random(x):
    return x + random.random() + random.randint(0, 5)


def draws_from_numpy(x):
    import numpy

    return x + float(numpy.random.rand()) + int(numpy.random.randint(5))


def shuffles(x):
    order = [0, 1, 2]
    random.shuffle(order)
    return x[order]


@may_run_live
@pytest.mark.parametrize("draws", [draws_from_random, draws_from_numpy, shuffles])
def test_c09_host_random_numbers(device, draws):
    if draws is draws_from_numpy:
        pytest.importorskip("numpy").random.seed(0)
    both = plain(draws)
    results = [tuple(both(ramp(device, 3)).recorded.tolist()) for _ in range(8)]
    assert len(set(results)) > 2


@may_run_live
def test_c09_a_host_generator_object(device):
    def make():
        source = random.Random(3)
        return lambda x: x * source.random()

    both = side_by_side(make)
    results = {both(ramp(device, 3)).recorded[0].item() for _ in range(6)}
    assert len(results) == 6


@may_run_live
@pytest.mark.parametrize("clock", [time.time, time.perf_counter, time.monotonic, time.time_ns, time.perf_counter_ns])
def test_c09_a_clock(device, clock):
    f = pg.record(lambda x: (x + 1, clock()), warmup=1)
    readings = []
    for _ in range(6):
        time.sleep(0.002)
        readings.append(f(ramp(device, 3))[1])
    assert len(set(readings)) == 6
    assert readings == sorted(readings)


@may_run_live
def test_c09_a_clock_that_is_only_used_in_arithmetic(device):
    f = pg.record(lambda x: x.double() * 0 + time.perf_counter(), warmup=1)
    readings = []
    for _ in range(6):
        time.sleep(0.002)
        readings.append(f(ramp(device, 1)).item())
    assert len(set(readings)) == 6


@may_run_live
@pytest.mark.parametrize("write", ["print", "sys.stdout.write", "logging"])
def test_c09_output_is_written_in_each_call(device, capsys, caplog, write):
    import logging
    import sys

    def f(x):
        if write == "print":
            print("called with", tuple(x.shape))
        elif write == "logging":
            logging.getLogger("user").warning("called")
        else:
            sys.stdout.write("called\n")
        return x + 1

    recorded = pg.record(f, warmup=1)
    for n in range(6):
        assert_same(recorded(ramp(device, 3, start=n)), ramp(device, 3, start=n) + 1)
    said = capsys.readouterr().out.count("called") + sum(r.name == "user" for r in caplog.records)
    assert said == 6


class Counter:
    def __init__(self):
        self.n = 0
        self.log = []
        self.seen = set()
        self.cache = {}
        self.hidden = None
        self.queue = deque(maxlen=3)
        self.stream = itertools.count()


def counts_on_self(c, x):
    c.n += 1
    return x + 1


def computes_with_its_count(c, x):
    c.n += 1
    return x / (1 - 0.9**c.n)


def appends_a_number(c, x):
    c.log.append(len(c.log))
    return x * 2


def appends_a_result(c, x):
    y = x * 2
    c.log.append(y)
    return y


def appends_a_detached_result(c, x):
    y = x * 2
    c.log.append(y.detach())
    return y.sum()


def adds_to_a_set(c, x):
    c.seen.add(tuple(x.shape))
    return x * len(c.seen)


def counts_keys(c, x):
    c.cache[len(c.cache)] = 1
    return x + len(c.cache)


def memoizes(c, x):
    if tuple(x.shape) not in c.cache:
        c.cache[tuple(x.shape)] = torch.arange(len(x), device=x.device)
    return x + c.cache[tuple(x.shape)]


def keeps_a_hidden_state(c, x):
    c.hidden = x if c.hidden is None else torch.tanh(c.hidden + x)
    return c.hidden * 2


def keeps_its_last_result(c, x):
    c.hidden = x * 2
    return c.hidden + 1


def keeps_its_last_argument(c, x):
    previous, c.hidden = c.hidden, x
    return x if previous is None else x + previous


def fills_a_queue(c, x):
    c.queue.append(x + 1)
    return sum(c.queue)


def takes_from_an_iterator(c, x):
    return x + next(c.stream)


def creates_an_attribute(c, x):
    setattr(c, f"made_{len(vars(c))}", 1)
    return x + len(vars(c))


def swaps_attributes(c, x):
    c.n, c.other = getattr(c, "other", 5), c.n
    return x * c.n


def toggles(c, x):
    c.n = 1 - c.n
    return x + 1 if c.n else x * 2


def counts_at_the_end(c, x):
    y = x * (c.n + 1)
    c.n = c.n + 1
    return y


def mutates_a_tensor_and_counts(c, x):
    c.hidden = torch.zeros_like(x) if c.hidden is None else c.hidden
    c.hidden.add_(x)
    c.n += 1
    return c.hidden.clone()


EFFECTS = [
    counts_on_self, computes_with_its_count, appends_a_number, appends_a_result, appends_a_detached_result,
    adds_to_a_set, counts_keys, memoizes, keeps_a_hidden_state, keeps_its_last_result, keeps_its_last_argument,
    fills_a_queue, takes_from_an_iterator, creates_an_attribute, swaps_attributes, toggles, counts_at_the_end,
    mutates_a_tensor_and_counts,
]  # fmt: skip


@may_run_live
@pytest.mark.parametrize("as_module", [False, True], ids=["plain object", "module"])
@pytest.mark.parametrize("effect", EFFECTS)
def test_c09_effects_on_what_outlives_the_call(device, effect, as_module):
    def make():
        state = Counter()
        if as_module:
            module = torch.nn.Module()
            module.__dict__.update(vars(state))
            state = module
        stream, state.stream = state.stream, None  # compared by what it gives, not by itself
        if effect is takes_from_an_iterator:
            holder = Cell(stream=stream)
            return (lambda x: effect(holder, x)), state
        return (lambda x: effect(state, x)), state

    both = side_by_side(make, hold=True)
    for n in range(8):
        both(ramp(device, 3, start=n))


@may_run_live
def test_c09_a_counter_in_a_closure_or_a_global(device, monkeypatch):
    monkeypatch.setitem(globals(), "GLOBAL_COUNT", 0)

    def make():
        count = 0

        def f(x):
            global GLOBAL_COUNT
            nonlocal count
            count += 1
            GLOBAL_COUNT += 1
            return x * count + GLOBAL_COUNT

        return f

    f = pg.record(make(), warmup=1)
    for n in range(1, 8):
        assert f(torch.ones(2, device=device)).tolist() == [2.0 * n] * 2
    assert GLOBAL_COUNT == 7


GLOBAL_COUNT = 0


@may_run_live
def test_c09_a_counter_of_the_class(device):
    class Counted:
        count = 0

        def __call__(self, x):
            type(self).count += 1
            return x * type(self).count

    f = pg.record(Counted(), warmup=1)
    for n in range(1, 8):
        assert f(torch.ones(2, device=device)).tolist() == [float(n)] * 2
    assert Counted.count == 7


@may_run_live
def test_c09_an_attribute_of_the_function_itself(device):
    def f(x):
        f.calls += 1
        return x + 1

    f.calls = 0
    recorded = pg.record(f, warmup=1)
    for n in range(1, 7):
        recorded(ramp(device, 3))
        assert f.calls == n


@may_run_live
def test_c09_a_list_of_the_callers_that_only_a_helper_appends_to(device):
    seen = []

    def helper(x):
        seen.append(1)
        return x * 2

    f = pg.record(lambda x: helper(x) + 1, warmup=1)
    for n in range(1, 7):
        f(ramp(device, 3))
        assert len(seen) == n


@may_run_live
def test_c09_a_hook_with_an_effect(device):
    activations = []
    layer = torch.nn.Linear(3, 3, device=device).requires_grad_(False)
    layer.register_forward_hook(lambda module, inputs, output: activations.append(output))
    f = pg.record(lambda x: layer(x) * 2, warmup=1)
    inputs = [torch.randn(3, device=device) for _ in range(6)]
    for x in inputs:
        f(x)
    for x, seen in zip(inputs, activations, strict=True):
        assert_same(seen, F.linear(x, layer.weight, layer.bias))


# ---------------------------------------------------------------------------------------------------
# C10: what cannot be noticed cheaply


AROUND_THE_METHODS = {
    "p.data": lambda net: torch._C.TensorBase.data.__set__(net.first.weight, new_like(net.first.weight)),
    "parameters": lambda net: net.first._parameters.update(
        weight=torch.nn.Parameter(new_like(net.first.weight), requires_grad=False)
    ),
    "buffers": lambda net: net._buffers.update(shift=new_like(net.shift)),
    "modules": lambda net: net.layers._modules.update({"0": torch.nn.Linear(4, 4, device=net.shift.device)}),
    "attributes": lambda net: net.__dict__.update(scale=9.0),
    "object's setattr": lambda net: object.__setattr__(net, "scale", 9.0),
}


@may_run_live
@pytest.mark.parametrize("change", AROUND_THE_METHODS.values(), ids=AROUND_THE_METHODS)
def test_c10_changes_around_every_method_are_found_late_and_by_verify_at_once(device, caplog, change):
    net = Net(device)
    x = torch.randn(2, 4, device=device)
    f, verified = pg.record(lambda x: net(x), warmup=1), pg.record(lambda x: net(x), warmup=1, verify=1)
    with torch.no_grad():
        for _ in range(4):
            f(x)
            verified(x)
        change(net)
        caplog.clear()
        assert _right_or_said(verified, x, net(x), caplog)
        for _ in range(50):
            f(x)
        assert_same(f(x), net(x))


def _right_or_said(f, x, right, capture):
    """Calls f; whether it was right or said that something is wrong. Anything else is silently wrong."""
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            result = f(x)
    except pg.Mismatch:
        return True
    return torch.equal(result, right) or bool(said) or bool(capture.records)


def knobs():
    """Values out of reach of any look at Python objects, each with a way to set it."""
    import array
    import ctypes

    c_double, numbers = ctypes.c_double(2.0), array.array("d", [2.0])
    module = types.ModuleType("settings_of_somebody")
    module.value = 2.0
    numpy = pytest.importorskip("numpy").full(1, 2.0)
    return {
        "numpy": (lambda: float(numpy[0]), lambda v: numpy.fill(v)),
        "numpy as a tensor": (lambda: torch.from_numpy(numpy).item() + 0, lambda v: numpy.fill(v)),
        "ctypes": (lambda: c_double.value, lambda v: setattr(c_double, "value", v)),
        "array": (lambda: numbers[0], lambda v: numbers.__setitem__(0, v)),
        "module": (lambda: module.value, lambda v: setattr(module, "value", v)),
    }


@may_run_live
@pytest.mark.parametrize("knob", ["ctypes", "array", "module", "numpy", "numpy as a tensor"])
def test_c10_verify_finds_what_cannot_be_noticed(device, caplog, knob):
    read, write = knobs()[knob]
    f = pg.record(lambda x: x * read(), warmup=1, verify=1)
    x = ramp(device, 3)
    for _ in range(4):
        assert_same(f(x), x * 2)
    write(3.0)
    caplog.clear()
    assert _right_or_said(f, x, x * 3, caplog)


def test_c10_verify_changes_neither_results_nor_state_nor_random_numbers(device):
    def make():
        net = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.5)).to(device).requires_grad_(False)
        total = torch.zeros((), device=device)

        def f(x):
            total.add_(x.sum())
            return net(x.mul_(2))

        return f, [net, total]

    both = side_by_side(make, verify=1, hold=True)
    for _ in range(7):
        both(torch.randn(4, 3, device=device))


def test_c10_verify_every_third_call(device, caplog):
    cell = __import__("ctypes").c_double(2.0)
    f = pg.record(lambda x: x * cell.value, warmup=1, verify=3)
    x = ramp(device, 3)
    for _ in range(4):
        f(x)
    cell.value = 3.0
    caplog.clear()
    found = [_right_or_said(f, x, x * 3, caplog) for _ in range(3)]
    assert any(found)


def test_c10_verify_of_each_of_two_signatures_that_take_turns(device, tmp_path):
    """What is not noticed is a file."""
    file = str(tmp_path / "thrice")
    f = pg.record(lambda x: x * (3 if len(x) == 3 and os.path.exists(file) else 2), warmup=1, verify=2)
    for _ in range(4):
        f(ramp(device, 3))
        f(ramp(device, 4))
    (tmp_path / "thrice").touch()
    found = 0
    for _ in range(8):
        with contextlib.suppress(pg.Mismatch):
            f(ramp(device, 3))
            found -= 1
        found += 1
        f(ramp(device, 4))
    assert found == 4


def results(device):
    """Pairs of functions whose results have the same values."""
    one = torch.ones((), device=device, requires_grad=True)
    return {
        "keys": (lambda x: {"a": x * 2}, lambda x: {"b": x * 2}),
        "nesting": (lambda x: [x * 2], lambda x: (x * 2,)),
        "identity": (lambda x: x, lambda x: x.clone()),
        "one twice": (lambda x: (y := x * 2, y), lambda x: (x * 2, x * 2)),
        "strides": (lambda x: x.T * 2, lambda x: (x.T * 2).contiguous()),
        "memory": (lambda x: (y := x * 2, y[:1]), lambda x: (y := x * 2, y[:1].clone())),
        "history": (lambda x: x * one, lambda x: (x * one).detach()),
    }


@may_run_live
@pytest.mark.parametrize("kind", results("cpu"))
@pytest.mark.parametrize("first", [0, 1])
def test_c10_verify_looks_at_what_results_are(device, tmp_path, kind, first):
    one, other = results(device)[kind] if first == 0 else results(device)[kind][::-1]
    file = str(tmp_path / "other")
    f = pg.record(lambda x: other(x) if os.path.exists(file) else one(x), warmup=1, verify=1)
    for _ in range(4):
        f(ramp(device, 2, 3))
    assert pg.stats(f).replayed
    (tmp_path / "other").touch()
    with pytest.raises(pg.Mismatch):
        f(ramp(device, 2, 3))


# ---------------------------------------------------------------------------------------------------
# C8: what torch keeps of a leaf beside its memory


def reshaped_by_data(net):
    net.weight.data, net.bias.data = net.weight.data[:2].clone(), net.bias.data[:2].clone()


def reshaped_by_resize(net):
    for p, size in ((net.weight, (2, 4)), (net.bias, (2,))):
        p.requires_grad_(False).resize_(size).requires_grad_()


@pytest.mark.parametrize("change", [reshaped_by_data, reshaped_by_resize])
@pytest.mark.parametrize("how", ["pair", "function", "outside", "another batch"])
def test_c08_a_parameter_of_another_size(device, change, how):
    """Autograd's node for its gradient must go, though a recording has the graph that it is of."""
    torch.manual_seed(0)
    both = []
    for recorded in (False, True):
        net = nn.Linear(4, 3).to(device)
        both.append((net, (pg.record(net) if how == "pair" else pg.record(lambda x, net=net: net(x))) if recorded else net))
    both[1][0].load_state_dict(both[0][0].state_dict())
    for n in range(7):
        x = ramp(device, 6 if how == "another batch" and n > 3 else 5, 4)
        for net, called in both:
            net.zero_grad()
            if n == 4:
                change(net)
            (net if how == "outside" and n > 3 else called)(x).square().sum().backward()
        assert_same(both[1][0].weight.grad, both[0][0].weight.grad)
        assert_same(both[1][0].bias.grad, both[0][0].bias.grad)


def test_c06_hooks_of_a_parameter_of_another_size_stay(device):
    def run(record):
        net, seen = nn.Linear(4, 3).to(device), []
        net.weight.register_hook(lambda g: seen.append(("gradient", g.shape)))
        net.weight.register_post_accumulate_grad_hook(lambda p: seen.append(("parameter", p.grad.shape)))
        called = record(net)
        for n in range(7):
            if n == 4:
                net.zero_grad()
                reshaped_by_data(net)
            called(ramp(device, 5, 4)).sum().backward()
        return seen, net.weight._version

    assert run(pg.record) == run(lambda net: net)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this release of torch has no grad_dtype")
@pytest.mark.parametrize(("first", "then"), [(torch.float32, None), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("how", ["step", "forward"])
def test_c08_the_type_of_a_parameters_gradient(device, how, first, then):
    def run(record):
        torch.manual_seed(0)
        net = nn.Linear(4, 3).to(device, torch.bfloat16)

        def forward(x):
            return net(x) + net(x * 0.3) + net(x * 0.7)

        def step(x):
            net.zero_grad()
            forward(x).square().sum().backward()

        called = record(step if how == "step" else forward)
        found = []
        for n in range(7):
            if n in (0, 4):
                net.zero_grad()
                for p in net.parameters():
                    p.grad_dtype = then if n else first
            y = called(torch.randn(5, 4, device=device).bfloat16())
            if how == "forward":
                net.zero_grad()
                y.square().sum().backward()
            found.append([p.grad.clone() for p in net.parameters()])
        return found

    assert_same(run(lambda f: pg.record(f, warmup=1)), run(lambda f: f))


@pytest.mark.parametrize("setting", ["dtype", "cache"])
def test_c07_what_autocast_will_go_by_where_it_is_off(device, setting):
    """A function that turns it on goes by what was set outside."""
    usual = torch.get_autocast_dtype(device.type)
    other = torch.float16 if usual is torch.bfloat16 else torch.bfloat16
    weight = torch.ones(4, 4, device=device)

    def f(x):
        with torch.autocast(device.type):
            return x @ weight, torch.is_autocast_cache_enabled()

    g, x = pg.record(f, warmup=1), torch.ones(4, 4, device=device)
    try:
        for n in range(9):
            if setting == "dtype":
                torch.set_autocast_dtype(device.type, other if n // 3 == 1 else usual)
            else:
                torch.set_autocast_cache_enabled(n // 3 != 1)
            assert_same(g(x), f(x))
    finally:
        torch.set_autocast_dtype(device.type, usual)
        torch.set_autocast_cache_enabled(True)
    assert pg.stats(g).replayed >= 5, pg.explain(g)
