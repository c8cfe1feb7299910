"""Helpers for testing code that records, and phonograph itself: values against live, speed by counts.

Two questions are worth asking of a recorded function, and a clock answers neither:

- *Is it right?* Run it beside the same function without phonograph, from equal state and equal
  random generators, and compare everything that one can see. `SideBySide` and
  `assert_matches_live` do that; `assert_same` is the comparison.
- *Has it settled?* Count recordings. `assert_no_new_recordings` and `assert_recordings` do that.

**What "the same" means here.** Tensors are compared by dtype, shape, stride, device, layout, class,
`requires_grad`, whether there is a `grad_fn`, and *bits*: NaN payloads and the sign of zero count.
Python values are compared by type and by `==` (floats by their bits). Containers, dataclasses, modules
(parameters, gradients, buffers, attributes), optimizers and generators are compared through. Two
results that look alike may still be different things, so the *aliasing* is compared as well: which
tensors of the call (arguments, results, state) are one object, and which overlap in memory.

Nothing here imports pytest; `phonograph.pytest_plugin` builds its fixture on `devices`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import os
import random
import struct
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import torch

import phonograph

__all__ = [
    "Call",
    "Pair",
    "Raised",
    "SideBySide",
    "aliasing",
    "assert_matches_live",
    "assert_no_new_recordings",
    "assert_recordings",
    "assert_same",
    "assert_same_aliasing",
    "call",
    "cuda_required",
    "devices",
    "tensors_in",
]


# ---------------------------------------------------------------------------------------------------
# Devices


def devices() -> tuple[torch.device, ...]:
    """The devices that this machine can run the suite on: always the CPU, and CUDA where there is one."""
    cuda = (torch.device("cuda", torch.cuda.current_device()),) if torch.cuda.is_available() else ()
    return (torch.device("cpu"), *cuda)


def cuda_required() -> bool:
    """Whether `PHONOGRAPH_REQUIRE_CUDA=1` asks that a missing GPU be a failure and not a skip."""
    return os.environ.get("PHONOGRAPH_REQUIRE_CUDA", "") not in ("", "0")


# ---------------------------------------------------------------------------------------------------
# The same value


def assert_same(actual: Any, expected: Any, where: str = "value", *, tolerance: float = 0.0) -> None:
    """Assert that two values are the same in everything that can be seen but their identity.

    Tensors: class, dtype, shape, stride, device, layout, `requires_grad`, presence of a `grad_fn`, and
    every bit. Python values: type and `==`, floats by their bits. Containers, dataclasses, modules,
    optimizers, generators and exceptions are compared part by part. Functions and iterators are not
    compared: two copies of one program hold different ones. An optimizer's step counts are compared as
    numbers, wherever they are kept.

    Args:
        actual: what phonograph gave.
        expected: what plain PyTorch gave.
        where: the path that a failure names, such as `result[0]['loss']`.
        tolerance: 0 compares bits; otherwise floating-point tensors may differ by this much, relative
            and absolute. For arithmetic that is known to be rounded differently.

    Raises:
        AssertionError: naming the first part that differs, and how.
    """
    _assert_same(actual, expected, _Place(where, tolerance))


class _Place(NamedTuple):
    """Where in a structure the comparison is, and how exact it is."""

    path: str
    tolerance: float

    def __str__(self) -> str:
        return self.path

    def at(self, part: str) -> _Place:
        return self._replace(path=self.path + part)


def _assert_same(actual: Any, expected: Any, where: _Place) -> None:
    assert type(actual) is type(expected), (
        f"{where}: a {type(actual).__qualname__}, live gives a {type(expected).__qualname__}"
        f"\n  phonograph: {actual!r}\n  live:       {expected!r}"
    )
    for kind, compare in _COMPARISONS:
        if isinstance(actual, kind):
            compare(actual, expected, where)
            return
    _assert_same_object(actual, expected, where)


def _equal(actual: object, expected: object, where: _Place | str) -> None:
    assert actual == expected, f"{where}: {actual!r}, live gives {expected!r}"


def _assert_same_tensor(actual: torch.Tensor, expected: torch.Tensor, where: _Place) -> None:
    for name in ("dtype", "shape", "device", "layout", "requires_grad"):
        _equal(getattr(actual, name), getattr(expected, name), where.at(f".{name}"))
    _equal(actual.grad_fn is None, expected.grad_fn is None, where.at(".grad_fn is None"))
    if actual.layout is not torch.strided:
        actual, expected = actual.to_dense(), expected.to_dense()
    _equal(actual.stride(), expected.stride(), where.at(".stride()"))
    assert _same_values(actual, expected, where.tolerance), (
        f"{where}: values differ\n  phonograph: {_excerpt(actual)}\n  live:       {_excerpt(expected)}"
    )


def _same_values(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    if actual.device.type == "meta":
        return True
    if tolerance and (actual.is_floating_point() or actual.is_complex()):
        return torch.allclose(actual.detach(), expected.detach(), rtol=tolerance, atol=tolerance, equal_nan=True)
    return torch.equal(_bits(actual), _bits(expected))


_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers: there NaN equals itself and 0.0 differs from -0.0."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    return plain.contiguous().view(_INTEGER_OF_SIZE[plain.element_size()])


def _excerpt(tensor: torch.Tensor) -> str:
    values = tensor.detach().flatten()[:8].tolist()
    return f"{values}{' …' if tensor.numel() > 8 else ''}"


def _assert_same_mapping(actual: Mapping[Any, Any], expected: Mapping[Any, Any], where: _Place) -> None:
    _equal(list(actual), list(expected), where.at(": keys in order"))
    for key in expected:
        _assert_same(actual[key], expected[key], where.at(f"[{key!r}]"))


def _assert_same_sequence(actual: Sequence[Any], expected: Sequence[Any], where: _Place) -> None:
    _equal(len(actual), len(expected), f"len({where})")
    for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
        _assert_same(one, other, where.at(f"[{i}]"))


def _assert_same_float(actual: float, expected: float, where: _Place) -> None:
    same = struct.pack("d", actual) == struct.pack("d", expected)
    assert same, f"{where}: {actual!r}, live gives {expected!r}"


def _assert_same_module(actual: torch.nn.Module, expected: torch.nn.Module, where: _Place) -> None:
    for name in ("named_parameters", "named_buffers"):
        tensors, wanted = dict(getattr(actual, name)()), dict(getattr(expected, name)())
        _assert_same_mapping(tensors, wanted, where.at(f".{name}()"))
    for (name, one), (_, other) in zip(actual.named_parameters(), expected.named_parameters(), strict=True):
        _assert_same(one.grad, other.grad, where.at(f".{name}.grad"))
    for (name, part), (_, other_part) in zip(actual.named_modules(), expected.named_modules(), strict=True):
        _assert_same_mapping(_plain_values(part), _plain_values(other_part), where.at(f".{name or 'self'}.__dict__"))


def _plain_values(module: torch.nn.Module) -> dict[str, Any]:
    """The module's own attributes: not torch's bookkeeping, and not what only a process can compare."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and not callable(value) and not isinstance(value, torch.nn.Module)
    }


def _assert_same_optimizer(actual: torch.optim.Optimizer, expected: torch.optim.Optimizer, where: _Place) -> None:
    _assert_same(_optimizer_values(actual), _optimizer_values(expected), where.at(".state_dict()"))


def _optimizer_values(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    values = optimizer.state_dict()
    states = {i: {name: _count_or_value(name, v) for name, v in state.items()} for i, state in values["state"].items()}
    return {**values, "state": states}


def _count_or_value(name: str, value: Any) -> Any:
    return float(value) if name == "step" else value


def _assert_same_generator(actual: torch.Generator, expected: torch.Generator, where: _Place) -> None:
    _assert_same(actual.get_state(), expected.get_state(), where.at(".get_state()"))


def _assert_same_exception(actual: BaseException, expected: BaseException, where: _Place) -> None:
    _equal(str(actual), str(expected), f"str({where})")
    _assert_same(actual.args, expected.args, where.at(".args"))


def _assert_same_object(actual: Any, expected: Any, where: _Place) -> None:
    """By the class's own `==` where it has one, through `__dict__` otherwise; iterators and the like not at all."""
    if dataclasses.is_dataclass(expected) and not isinstance(expected, type):
        for field in dataclasses.fields(expected):
            _assert_same(getattr(actual, field.name), getattr(expected, field.name), where.at(f".{field.name}"))
    elif hasattr(expected, "__dict__") and not _defines_equality(type(expected)):
        _assert_same(vars(actual), vars(expected), where.at(".__dict__"))
    elif hasattr(expected, "__array__"):  # NumPy's == answers for each element
        _equal((actual.dtype, actual.tolist()), (expected.dtype, expected.tolist()), where)
    elif _defines_equality(type(expected)):
        _equal(actual, expected, where)


def _defines_equality(kind: type) -> bool:
    return any("__eq__" in vars(base) for base in kind.__mro__[:-1])


def _nothing_to_compare(actual: object, expected: object, where: _Place) -> None:
    """For functions and modules of code."""


# In order: the first class that fits decides. Enums before numbers and strings, which they may also be.
_COMPARISONS: tuple[tuple[type | tuple[type, ...], Callable[[Any, Any, _Place], None]], ...] = (
    (torch.Tensor, _assert_same_tensor),
    (torch.nn.Module, _assert_same_module),
    (torch.optim.Optimizer, _assert_same_optimizer),
    (torch.Generator, _assert_same_generator),
    (BaseException, _assert_same_exception),
    ((enum.Enum, str, bytes, type(None), bool, int, type), _equal),
    ((torch.dtype, torch.layout, torch.memory_format), _equal),
    (float, _assert_same_float),
    (Mapping, _assert_same_mapping),
    ((list, tuple, deque), _assert_same_sequence),
    (AbstractSet, _equal),
    ((types.FunctionType, types.MethodType, types.ModuleType), _nothing_to_compare),
)


# ---------------------------------------------------------------------------------------------------
# The same aliasing


def assert_same_aliasing(actual: Any, expected: Any) -> None:
    """Assert that the tensors in two equal structures are shared alike.

    Args:
        actual: a nested structure of tensors, for instance `(arguments, result, state)` of a recorded call.
        expected: the same structure of the live call.

    Raises:
        AssertionError: where two places hold one object, or overlap in memory, on one side only.
    """
    here, live = aliasing(actual), aliasing(expected)
    assert not here - live, f"with phonograph and not live: {min(here - live)}"
    assert not live - here, f"live and not with phonograph: {min(live - here)}"


def aliasing(value: Any) -> set[str]:
    """What the tensors in a nested structure share, as sentences: `['x'] and ['y'][0] overlap in memory`."""
    places = list(tensors_in(value))
    tensors = [tensor for _, tensor in places]
    found: set[str] = set()
    for what, pairs in (
        ("are one object", _identical_pairs(tensors)),
        ("overlap in memory", _overlapping_pairs(tensors)),
    ):
        found |= {f"{places[i][0]} and {places[j][0]} {what}" for i, j in pairs if i != j}
    return found


def _identical_pairs(tensors: Sequence[torch.Tensor]) -> set[tuple[int, int]]:
    first: dict[int, int] = {}
    return {(first.setdefault(id(t), i), i) for i, t in enumerate(tensors)}


def _overlapping_pairs(tensors: Sequence[torch.Tensor]) -> set[tuple[int, int]]:
    """Pairs whose address ranges meet (interleaved views count as meeting), found in order of address."""
    ranges = sorted((str(t.device), *_address_range(t), i) for i, t in enumerate(tensors))
    found: set[tuple[int, int]] = set()
    for at, (device, _, end, i) in enumerate(ranges):
        for other_device, start, _, j in ranges[at + 1 :]:
            if (other_device, start) >= (device, end):
                break
            found.add((min(i, j), max(i, j)))
    return found


def tensors_in(value: Any, where: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in a nested structure, each occurrence with its path, in a fixed order."""
    if isinstance(value, torch.Tensor):
        yield where, value
    elif isinstance(value, torch.nn.Module):
        yield from tensors_in(dict(value.named_parameters()) | dict(value.named_buffers()), where)
    elif isinstance(value, torch.optim.Optimizer):
        yield from tensors_in(list(value.state.values()), where)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple, deque)):
        for i, item in enumerate(value):
            yield from tensors_in(item, f"{where}[{i}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name), f"{where}.{field.name}")


def _address_range(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.layout is not torch.strided or not tensor.numel() or tensor.device.type == "meta":
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


# ---------------------------------------------------------------------------------------------------
# Random generators


def _rng_state() -> dict[str, Any]:
    """The state of every generator that a program draws from without naming it."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "random": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [kind, keys.tolist(), *rest]
    return state


def _set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["random"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(tuple(state["numpy"]))


# ---------------------------------------------------------------------------------------------------
# Side by side


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of one call; see `call`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call(*args: Any, **kwargs: Any) -> Call:
    """The arguments of one call, written as the call is: `call(x, scale=2.0)`."""
    return Call(args, kwargs)


@dataclasses.dataclass(frozen=True)
class Pair:
    """One value as the recorded and as the live function gave it (or each side's own copy of it)."""

    recorded: Any
    live: Any

    @classmethod
    def of(cls, value: Any) -> Pair:
        """Two deep copies of `value`, which keep its inner aliasing."""
        return cls(copy.deepcopy(value), copy.deepcopy(value))

    def each(self, function: Callable[[Any], Any]) -> Pair:
        """`function` of both sides, for instance `pair.each(torch.Tensor.detach)`."""
        return Pair(function(self.recorded), function(self.live))

    def check(self, where: str = "value", *, tolerance: float = 0.0) -> None:
        """Raise `AssertionError` unless the two sides are the same (`assert_same`)."""
        assert_same(self.recorded, self.live, where, tolerance=tolerance)


class SideBySide:
    """A function recorded and the same function live, called together and compared after each call.

    Args:
        make: makes the function, or `(function, state)`, afresh; called twice, from equal random
            generators. Whatever the function changes must be made in here, or the two would share it.
            `state` is anything nested that `assert_same` can compare: a module, an optimizer, a list.
        hold: keep every result, and compare all of them again after each later call. Results that are
            not held are dropped before the next call, which is the other case worth testing.
        tolerance: how much floating-point values may differ, see `assert_same`.
        record: what records, `phonograph.record` by default.
        **options: passed to `record`.

    Calling it runs both sides from equal random generators (torch, CUDA, `random`, and NumPy where
    imported) and compares the results, the arguments afterwards, the state, the generators, and how
    arguments, results and state alias. An exception must be the same on both sides and is then raised.
    Arguments are deep-copied for each side; a `Pair` is passed on as it is, one half to each side, so
    results can be fed back: `y = both(x); y = both(y)`.

    Example:
        >>> import torch
        >>> from phonograph.testing import SideBySide
        >>> def make():
        ...     layer = torch.nn.Linear(4, 4).requires_grad_(False)
        ...     return layer.forward, layer
        >>> both = SideBySide(make)
        >>> x = torch.ones(2, 4)
        >>> for _ in range(4):
        ...     result = both(x)
        >>> both.change(lambda layer: layer.weight.zero_())
        >>> result = both(x)
    """

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        hold: bool = False,
        tolerance: float = 0.0,
        record: Callable[..., Callable[..., Any]] | None = None,
        **options: Any,
    ) -> None:
        start = _rng_state()
        live, self.live_state = _function_and_state(make())
        _set_rng_state(start)
        plain, self.state = _function_and_state(make())
        self.live: Callable[..., Any] = live
        self.recorded: Any = (record or phonograph.record)(plain, **options)
        self.held: list[Pair] = []
        self.calls = 0
        self._hold = hold
        self._tolerance = tolerance

    def __call__(self, *args: Any, **kwargs: Any) -> Pair:
        """Call both sides; returns the pair of results.

        Raises:
            AssertionError: where the sides differ.
            Exception: what both sides raised, if it was the same.
        """
        result = self.outcome(*args, **kwargs)
        if isinstance(result.recorded, Raised):
            raise result.recorded.error
        return result

    def outcome(self, *args: Any, **kwargs: Any) -> Pair:
        """As a call, but what the function raises is its result, a pair of `Raised`.

        Raises:
            AssertionError: where the sides differ.
        """
        self.calls += 1
        given = Pair(*(_half((args, kwargs), side, {}) for side in ("recorded", "live")))
        result = self._run_both(given)
        self.check(given, result)
        if self._hold:
            self.held.append(result)
        return result

    def _run_both(self, given: Pair) -> Pair:
        start = _rng_state()
        live = _outcome(self.live, *given.live)
        live_end = _rng_state()
        _set_rng_state(start)
        recorded = _outcome(self.recorded, *given.recorded)
        assert_same(_rng_state(), live_end, f"call {self.calls}: generators")
        return Pair(recorded, live)

    def check(self, given: Pair | None = None, result: Pair | None = None) -> None:
        """Compare what the last call gave, the state, and everything held so far.

        Raises:
            AssertionError: where the sides differ.
        """
        given, result = given or Pair(None, None), result or Pair(None, None)
        at, tolerance = f"call {self.calls}", self._tolerance
        result.check(f"{at}: result", tolerance=tolerance)
        given.check(f"{at}: arguments", tolerance=tolerance)
        Pair(self.state, self.live_state).check(f"{at}: state", tolerance=tolerance)
        assert_same_aliasing(
            {"arguments": given.recorded, "result": result.recorded, "state": self.state},
            {"arguments": given.live, "result": result.live, "state": self.live_state},
        )
        for i, held in enumerate(self.held):
            held.check(f"{at}: result {i}, held", tolerance=tolerance)

    def change(self, function: Callable[[Any], object]) -> None:
        """Apply `function` to the state of each side, from equal random generators."""
        start = _rng_state()
        function(self.live_state)
        _set_rng_state(start)
        function(self.state)


def _function_and_state(made: Any) -> tuple[Callable[..., Any], Any]:
    return made if isinstance(made, tuple) else (made, None)


@dataclasses.dataclass(frozen=True)
class Raised:
    """An exception as a result, so that it is compared like one."""

    error: Exception


def _outcome(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return Raised(error)


def _half(value: Any, side: str, memo: dict[int, Any]) -> Any:
    """One side's copy of an argument structure: halves of pairs as they are, the rest deep-copied.

    The memo is one for the whole call, so that tensors which share memory go on sharing it.
    """
    if isinstance(value, Pair):
        return getattr(value, side)
    if type(value) in (list, tuple):
        return type(value)(_half(item, side, memo) for item in value)
    if type(value) is dict:
        return {key: _half(item, side, memo) for key, item in value.items()}
    return copy.deepcopy(value, memo)


def assert_matches_live(
    make: Callable[[], Any],
    calls: Iterable[Call | tuple[Any, ...]],
    *,
    warmup: int = 1,
    hold: bool = True,
    record: Callable[..., Callable[..., Any]] | None = None,
) -> SideBySide:
    """Assert that a recorded function does what it does live, call by call, and for what is held.

    Args:
        make: makes the function afresh, or `(function, state)`: see `SideBySide`. For a function without
            state of its own `lambda: function` will do.
        calls: the calls, each a tuple of arguments or a `call(…)`. Each side gets its own deep copies.
        warmup: live calls of a signature before it is recorded.
        hold: keep all results and compare them again after every later call.
        record: what records, `phonograph.record` by default.

    Returns:
        The pair, for more calls or for `phonograph.stats(….recorded)`.

    Raises:
        AssertionError: at the first call where results, mutated arguments, state, random generators,
            aliasing or an earlier result differ.

    Example:
        >>> import torch
        >>> from phonograph.testing import assert_matches_live
        >>> x = torch.arange(4.0)
        >>> both = assert_matches_live(lambda: torch.sin, [(x,)] * 4)
    """
    both = SideBySide(make, hold=hold, record=record, warmup=warmup)
    for each in calls:
        arguments = each if isinstance(each, Call) else Call(tuple(each), {})
        both.outcome(*arguments.args, **arguments.kwargs)
    return both


# ---------------------------------------------------------------------------------------------------
# Counts


@contextlib.contextmanager
def assert_no_new_recordings(*recorded: phonograph.Recorded[..., Any]) -> Iterator[None]:
    """Assert that nothing is recorded inside the `with` block: the loop has settled.

    Args:
        *recorded: the recorded functions to watch, at least one.

    Raises:
        AssertionError: naming the functions that recorded again, with `phonograph.explain` of each.

    Example:
        >>> import phonograph as pg, torch
        >>> from phonograph.testing import assert_no_new_recordings
        >>> f = pg.record(torch.sin)
        >>> x = torch.ones(3)
        >>> for _ in range(2):
        ...     y = f(x)
        >>> with assert_no_new_recordings(f):
        ...     for _ in range(10):
        ...         y = f(x)
    """
    if not recorded:
        raise TypeError("assert_no_new_recordings() takes the recorded functions to watch; it was given none")
    before = [phonograph.stats(f).recorded for f in recorded]
    yield
    new = [(f, phonograph.stats(f).recorded - n) for f, n in zip(recorded, before, strict=True)]
    problems = [f"{n} new recordings of {_name(f)}:\n{phonograph.explain(f)}" for f, n in new if n]
    assert not problems, "\n".join(problems)


def assert_recordings(recorded: phonograph.Recorded[..., Any], expected: int) -> None:
    """Assert that `recorded` has been recorded exactly `expected` times so far.

    Raises:
        AssertionError: with `phonograph.explain` of the function.
    """
    actual = phonograph.stats(recorded).recorded
    explanation = phonograph.explain(recorded)
    assert actual == expected, f"{_name(recorded)}: {actual} recordings, not {expected}\n{explanation}"


def _name(recorded: phonograph.Recorded[..., Any]) -> str:
    return getattr(recorded, "__qualname__", None) or type(recorded).__qualname__
