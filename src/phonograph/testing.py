"""Helpers for testing code that records, and phonograph itself: values against live, speed by counts.

Two questions are worth asking of a recorded function, and a clock answers neither:

- *Is it right?* Run it beside the same function without phonograph, from equal state and equal
  random generators, and compare everything that one can see. `SideBySide` and
  `assert_matches_live` do that; `assert_same` is the comparison.
- *Has it settled?* Count recordings. `assert_no_new_recordings` and `assert_recordings` do that.

What "the same" means is in `phonograph.comparison`: everything that one can see, tensors bit by bit.

Nothing here imports pytest; `phonograph.pytest_plugin` builds its fixture on `devices`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

import phonograph
from phonograph import api
from phonograph.comparison import aliasing, assert_same, assert_same_aliasing, tensors_in

from ._torch.dynamic import Args, Kwargs

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
# Random generators


def _rng_state() -> dict[str, object]:
    """The state of every generator that a program draws from without naming it."""
    state: dict[str, object] = {"torch": torch.get_rng_state(), "random": random.getstate()}
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

    args: Args
    kwargs: Kwargs


def call(*args: object, **kwargs: object) -> Call:
    """The arguments of one call, written as the call is: `call(x, scale=2.0)`."""
    return Call(args, kwargs)


@dataclasses.dataclass(frozen=True)
class Pair:
    """One value as the recorded and as the live function gave it (or each side's own copy of it)."""

    recorded: Any
    live: Any

    @classmethod
    def of(cls, value: object) -> Pair:
        """Two deep copies of `value`, which keep its inner aliasing."""
        return cls(copy.deepcopy(value), copy.deepcopy(value))

    def each(self, function: Callable[[Any], object]) -> Pair:
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

    Examples:
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

    def __call__(self, *args: object, **kwargs: object) -> Pair:
        """Call both sides; returns the pair of results.

        Raises:
            AssertionError: where the sides differ.
            Exception: what both sides raised, if it was the same.
        """
        result = self.outcome(*args, **kwargs)
        if isinstance(result.recorded, Raised):
            raise result.recorded.error
        return result

    def outcome(self, *args: object, **kwargs: object) -> Pair:
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


def _function_and_state(made: object) -> tuple[Callable[..., Any], Any]:
    return made if isinstance(made, tuple) else (made, None)


@dataclasses.dataclass(frozen=True)
class Raised:
    """An exception as a result, so that it is compared like one."""

    error: Exception


def _outcome(function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
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
    make: Callable[[], object],
    calls: Iterable[Call | tuple[object, ...]],
    *,
    warmup: int = 1,
    hold: bool = True,
    record: Callable[..., Callable[..., object]] | None = None,
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

    Examples:
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
def assert_no_new_recordings(*recorded: phonograph.Recorded[..., object]) -> Iterator[None]:
    """Assert that nothing is recorded inside the `with` block: the loop has settled.

    Args:
        *recorded: the recorded functions to watch, at least one.

    Raises:
        AssertionError: naming the functions that recorded again, with `phonograph.explain` of each.

    Examples:
        >>> import phonograph as pg, torch
        >>> from phonograph.testing import assert_no_new_recordings
        >>> f = pg.record(torch.sin)
        >>> x = torch.ones(3)
        >>> for _ in range(4):
        ...     y = f(x)
        >>> with assert_no_new_recordings(f):
        ...     for _ in range(10):
        ...         y = f(x)
    """
    if not recorded:
        raise TypeError("assert_no_new_recordings() takes the recorded functions to watch; it was given none")
    before = [_recordings(f) for f in recorded]
    yield
    new = [(f, _recordings(f) - n) for f, n in zip(recorded, before, strict=True)]
    problems = [f"{n} new recordings of {_name(f)}:\n{phonograph.explain(f)}" for f, n in new if n]
    assert not problems, "\n".join(problems)


def _recordings(f: phonograph.Recorded[..., object]) -> int:
    """How many were made so far, with those of backwards."""
    backwards = list(getattr(api._recorded(f), "_backwards", ()))
    return sum(phonograph.stats(each).recorded for each in (f, *backwards))


def assert_recordings(recorded: phonograph.Recorded[..., object], expected: int) -> None:
    """Assert that `recorded` has been recorded exactly `expected` times so far.

    Raises:
        AssertionError: with `phonograph.explain` of the function.
    """
    actual = phonograph.stats(recorded).recorded
    explanation = phonograph.explain(recorded)
    assert actual == expected, f"{_name(recorded)}: {actual} recordings, not {expected}\n{explanation}"


def _name(recorded: phonograph.Recorded[..., object]) -> str:
    return getattr(recorded, "__qualname__", None) or type(recorded).__qualname__
