"""Small words that the contract tests share."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import phonograph as pg
from phonograph.testing import Pair, SideBySide

# For tests of functions that may, or must, run live: there the warning that says so is no failure.
may_run_live = pytest.mark.filterwarnings("ignore::phonograph.RunsLive")


def side_by_side(make: Callable[[], Any], **options: Any) -> SideBySide:
    """The made function recorded after one live call, beside the same function live."""
    return SideBySide(make, **{"warmup": 1, **options})


def changeable(
    make: Callable[[], tuple[Callable[..., Any], Callable[..., Any]]], **options: Any
) -> tuple[SideBySide, Callable[..., None]]:
    """`side_by_side` for a function that is made together with what changes something for it; and the change of both."""
    changes: list[Callable[..., Any]] = []

    def function() -> Callable[..., Any]:
        made, change = make()
        changes.append(change)
        return made

    def change(*args: Any) -> None:
        for one in changes:
            one(*args)

    return side_by_side(function, **options), change


def plain(function: Callable[..., Any], **options: Any) -> SideBySide:
    """`side_by_side` for a function that has no state of its own."""
    return side_by_side(lambda: copy_of(function), **options)


def copy_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of its own with the same code, so that the two sides do not share its attributes."""
    if not isinstance(function, types.FunctionType):
        return function
    copied = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def as_ours(function: Any, of: Any) -> Any:
    """A function that stands in for one `of` phonograph's: in a capture, whoever listens there takes it for that."""
    function.__code__ = function.__code__.replace(co_filename=of.__code__.co_filename)
    return function


def counts(recorded: Any) -> tuple[int, int, int]:
    """How often a function ran live, was recorded, and was replayed."""
    stats = pg.stats(recorded.recorded if isinstance(recorded, SideBySide) else recorded)
    return stats.live, stats.recorded, stats.replayed


def assert_replays(both: SideBySide, *args: Any, **kwargs: Any) -> Pair:
    """Assert that this call is a replay of an existing recording."""
    live, recorded, replayed = counts(both)
    result = both(*args, **kwargs)
    assert counts(both) == (live, recorded, replayed + 1), pg.explain(both.recorded)
    return result


def assert_settles(both: SideBySide, *args: Any, within: int = 4, **kwargs: Any) -> None:
    """Assert that after at most `within` calls of this kind, the next three are replays."""
    for _ in range(within):
        both(*args, **kwargs)
    for _ in range(3):
        assert_replays(both, *args, **kwargs)


def reasons(recorded: Any) -> str:
    """Everything that phonograph says about why a function runs live."""
    function = recorded.recorded if isinstance(recorded, SideBySide) else recorded
    return f"{pg.stats(function).refusals}\n{pg.explain(function)}"


def ramp(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32, start: int = 1) -> torch.Tensor:
    """start, start + 1, …: small integers, on which float arithmetic is exact in any order."""
    count = torch.Size(shape).numel()
    return torch.arange(start, start + count, device=device).to(dtype).reshape(shape)


def here(offset: int = 0) -> str:
    """`file:line` of the caller's own line, plus `offset` lines."""
    frame = sys._getframe(1)
    return f"{frame.f_code.co_filename}:{frame.f_lineno + offset}"


class KeepsItself(torch.autograd.Function):
    """Its backward reads a tensor that was kept as an attribute of the context, of which autograd knows nothing."""

    @staticmethod
    def forward(ctx, x, kept):
        ctx.kept = kept
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.kept, None


def by_a_hook(x, kept):
    """Likewise, by a hook."""
    y = x * 2
    y.register_hook(lambda grad: grad * kept)
    return y * 1.0
