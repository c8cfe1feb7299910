"""`torch.cond` and `torch.while_loop` in a captured call: the higher-order operators that they come down to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .._torch.dynamic import Args, Kwargs, Thing
from .._torch.operators import HigherOrderOperator
from ..errors import Refusal
from .control_flow import ControlFlow, apart

__all__ = ["branch_or_loop"]

Function = Callable[..., Thing]


def branch_or_loop(
    watch: ControlFlow, func: HigherOrderOperator, args: Args, kwargs: Kwargs, seen: Callable[[Function], Function]
) -> Thing:  # fmt: skip
    """The results of such an operator, None if it is another or goes on by no tensor. Functions are called as `seen`."""
    name = func.name()
    if name == "cond" and isinstance(args[0], torch.Tensor):
        pred, true_fn, false_fn, operands = args
        return tuple(_branch(watch, pred, [seen(true_fn), seen(false_fn)], operands))
    if name == "while_loop" and not kwargs:
        cond_fn, body_fn, state, others = args
        return tuple(_loop(watch, seen(cond_fn), seen(body_fn), state, others))
    return None


def _branch(
    watch: ControlFlow, pred: torch.Tensor, functions: Sequence[Function], operands: Sequence[Thing]
) -> list[torch.Tensor]:  # fmt: skip
    number = watch.applied(torch.ops.aten.logical_not.default, pred)
    given = [t for t in operands if isinstance(t, torch.Tensor)]
    return watch.branch(number, [lambda f=f: apart(_tensors(watch, f(*operands)), given) for f in functions], ())


def _loop(
    watch: ControlFlow, cond_fn: Function, body_fn: Function, state: Sequence[Thing], others: Sequence[Thing]
) -> list[torch.Tensor]:  # fmt: skip
    def turn(inner: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return apart(_tensors(watch, body_fn(*inner, *others)), ())

    return watch.loop(lambda inner: cond_fn(*inner, *others), turn, _tensors(watch, state), ())


def _tensors(watch: ControlFlow, values: Sequence[Thing]) -> Sequence[torch.Tensor]:
    if not all(isinstance(t, torch.Tensor) for t in values):
        raise watch.located(Refusal("returns something else from each branch than tensors", "return tensors"))
    return values
