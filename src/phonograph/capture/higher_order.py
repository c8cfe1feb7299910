"""`torch.cond` and `torch.while_loop` in a captured call: the higher-order operators that they come down to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from .._torch.dynamic import Args, Kwargs, Thing
from .._torch.operators import HigherOrderOperator
from ..errors import Refusal
from .control_flow import ControlFlow, Roots, apart

__all__ = ["branch_or_loop"]

Function = Callable[..., Thing]


def branch_or_loop(
    watch: ControlFlow, func: HigherOrderOperator, args: Args, kwargs: Kwargs, seen: Callable[[Function], Function]
) -> Thing:  # fmt: skip
    """The results of such an operator, None if it is another or goes on by no tensor. Functions are called as `seen`."""
    name = func.name()
    if name == "cond" and isinstance(args[0], torch.Tensor):
        return tuple(_branch(watch, seen, *args))
    if name == "while_loop" and len(args) == 4 and not kwargs:
        return tuple(_loop(watch, seen, *args))
    return None


def _branch(
    watch: ControlFlow, seen: Callable[[Function], Function], pred: torch.Tensor, true_fn: Function, false_fn: Function,
    operands: Sequence[Thing],
) -> list[torch.Tensor]:  # fmt: skip
    number = watch.applied(torch.ops.aten.logical_not.default, pred)
    given = [t for t in operands if isinstance(t, torch.Tensor)]

    def body(function: Function) -> list[torch.Tensor]:
        return apart(_tensors(watch, seen(function)(*operands)), given, watch.copied)

    bodies = [partial(body, true_fn), partial(body, false_fn)]
    return watch.branch(number, bodies, _of_users({"true_fn": true_fn, "false_fn": false_fn}))


def _loop(
    watch: ControlFlow, seen: Callable[[Function], Function], cond_fn: Function, body_fn: Function, state: Sequence[Thing],
    others: Sequence[Thing],
) -> list[torch.Tensor]:  # fmt: skip
    def goes_on(inner: Sequence[torch.Tensor]) -> torch.Tensor:
        found: torch.Tensor = seen(cond_fn)(*inner, *others)
        return found

    def turn(inner: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return apart(_tensors(watch, seen(body_fn)(*inner, *others)), (), watch.copied)

    return watch.loop(goes_on, turn, _tensors(watch, state), _of_users({"cond_fn": cond_fn, "body_fn": body_fn}))


def _of_users(functions: Mapping[str, Function]) -> Roots:
    """Those that are no graphs. (A graph has no effects, and makes its own code when it is first called.)"""
    return [(name, function) for name, function in functions.items() if not isinstance(function, torch.fx.GraphModule)]


def _tensors(watch: ControlFlow, values: Sequence[Thing]) -> Sequence[torch.Tensor]:
    if not all(isinstance(t, torch.Tensor) for t in values):
        raise watch.located(Refusal("returns something else than tensors from a branch or loop", "return tensors"))
    return values
