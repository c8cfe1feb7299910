"""C7: whatever makes it another program makes it another signature."""

import contextlib
import dataclasses
import enum
import itertools
import warnings
from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F

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


def test_c07_slices_of_one_text(device):
    """What counts is how they lie to each other, not where in their memory: `text[i:]` and its targets, one further on."""
    both, text = plain(lambda x, y: x * 2 + y), Pair.of(ramp(device, 64))
    for n in (0, 16, 32, 48, 8, 24):
        both(
            Pair(text.recorded[n : n + 8], text.live[n : n + 8]), Pair(text.recorded[n + 4 : n + 12], text.live[n + 4 : n + 12])
        )
    assert counts(both) == (1, 1, 5)


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
