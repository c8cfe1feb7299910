"""`cond` and `switch`: one of several functions, chosen by a tensor's value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index as as_index
from operator import is_
from typing import TypeVar

import torch

from ..autograd.branches import branch
from ..capture.dispatch import OperatorWatch
from ..devices.cuts import Cuts
from ..errors import Refusal
from .results import Tree, apart, number_of, watch_here

__all__ = ["callables", "cond", "switch"]

R = TypeVar("R")


def cond(pred: object, true_fn: Callable[..., R], false_fn: Callable[..., R], *operands: object) -> R:
    """Call one of two functions, chosen by a tensor's value.

    Live this is ``true_fn(*operands) if pred else false_fn(*operands)``. A recording holds both functions, and each replay runs
    one of them without the host: on CUDA as a conditional node of the graph.

    Args:
        pred: tensor of one element on the call's device; or a Python bool or number, which is decided when recording.
        true_fn, false_fn: functions of `operands`. They may write tensors in place and use tensors of their closures.
        *operands: tensors, and trees of tensors.

    Returns:
        The result of the function that ran, with the same structure, shapes and dtypes for both. Its tensors are new: an output
        that would alias an operand is copied.

    Raises:
        RuntimeError: `pred` is a tensor of several elements.
        TypeError: one of the functions is not callable, or `pred` is neither a tensor nor a bool nor a number.
    """
    callables("pg.cond", {"true_fn": true_fn, "false_fn": false_fn})
    if not isinstance(pred, torch.Tensor):
        if pred is None or not hasattr(type(pred), "__bool__"):
            raise TypeError(f"pg.cond: pred must be a tensor of one element, a bool or a number, not {type(pred).__name__}")
        return _called(true_fn if pred else false_fn, operands)
    watch = watch_here()
    if watch is None:
        return _called(true_fn if number_of(pred, "pg.cond: pred") else false_fn, operands)
    with torch.no_grad():
        number = pred.logical_not()
    return _recorded(watch, number, {"true_fn": true_fn, "false_fn": false_fn}, operands)


def switch(index: int | torch.Tensor, branches: Sequence[Callable[..., R]], *operands: object) -> R:
    """Call one of several functions, chosen by a tensor's value.

    Live this is ``branches[index](*operands)``, with `index` clamped to the range of `branches`. A recording holds all
    functions, and each replay runs one of them without the host.

    Args:
        index: integer tensor of one element on the call's device; or a Python int, which is decided when recording.
        branches: functions of `operands`, at least one.
        *operands: tensors, and trees of tensors.

    Returns:
        The result of the function that ran, with the same structure, shapes and dtypes for all. Its tensors are new: an output
        that would alias an operand is copied.

    Raises:
        RuntimeError: `index` is a tensor of several elements.
        TypeError: `index` is no integer, or one of the functions is not callable.
        ValueError: `branches` is empty.
    """
    if not branches:
        raise ValueError("pg.switch: branches is empty")
    named: dict[str, Callable[..., R]] = {f"branches[{i}]": f for i, f in enumerate(branches)}
    callables("pg.switch", named)
    if not isinstance(index, torch.Tensor):
        return _called(_clamped(branches, as_index(index)), operands)
    if index.is_floating_point() or index.is_complex():
        raise TypeError(f"pg.switch: index must be of an integer type, not {index.dtype}")
    watch = watch_here()
    if watch is None:
        return _called(_clamped(branches, int(number_of(index, "pg.switch: index"))), operands)
    return _recorded(watch, index, named, operands)


def _clamped(branches: Sequence[Callable[..., R]], index: int) -> Callable[..., R]:
    return branches[min(max(index, 0), len(branches) - 1)]


def callables(said: str, functions: dict[str, Callable[..., R]]) -> None:
    for name, function in functions.items():
        if not callable(function):
            raise TypeError(f"{said}: {name} must be callable, not {type(function).__name__}")


def _called(function: Callable[..., R], operands: Sequence[object]) -> R:
    found = apart(function(*operands), Tree.of(operands).tensors)
    result: R = found.whole(found.tensors)
    return result


def _recorded(
    watch: OperatorWatch, number: torch.Tensor, functions: dict[str, Callable[..., R]], operands: Sequence[object]
) -> R:  # fmt: skip
    given, first = Tree.of(operands), list[Tree]()
    Cuts.on_one_thread()  # for the branch that is the backward of this one

    def body(function: Callable[..., R], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        new = any(t is not operand for t, operand in zip(tensors, given.tensors, strict=True))
        args = given.whole(tensors) if new else operands
        found = apart(function(*args), tensors)
        if new and not (given.alike(left := Tree.of(args)) and all(map(is_, left.tensors, tensors))):
            raise watch.located(Refusal("changes operands in a branch or loop", "return what is new"))
        if first and not first[0].alike(found):
            raise watch.located(Refusal("returns something else than tensors from branches, which differs",
                                        "return the same structure, and the same but for the values of tensors"))  # fmt: skip
        first.append(found._replace(tensors=[]))
        return found.tensors

    roots = [*functions.items(), ("operands", operands)]
    tensors = branch(watch, number, body, functions.values(), given.tensors, roots)
    result: R = first[0].whole(tensors)
    return result
