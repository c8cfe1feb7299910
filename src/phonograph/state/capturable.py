"""Optimizers inside a recorded function: which steps can be recorded, and what a step leaves besides.

Most of torch's optimizers keep their step count on the host and read it in each step. It is followed (`step_counts`), so that a
recorded step does eager's very arithmetic. Adafactor reads norms of weights as well, and ASGD writes to the device what it has
worked out on the host: their steps run live.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import TypeGuard

import torch

from .._torch.modules import steps_itself
from .._torch.tensors import has_memory
from ..errors import Refusal

__all__ = ["fit_to_step", "is_step", "never", "states_to_come", "stepped"]

_CORRECTING = tuple([getattr(torch.optim, name) for name in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax")])


def _groups(optimizers: Sequence[torch.optim.Optimizer]) -> list[tuple[torch.optim.Optimizer, dict[str, object]]]:
    return [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]


def stepped(function: Callable[..., object]) -> None:
    """If the function that now runs is an optimizer's own step, say so as schedulers expect: they have `optimizer.step` note
    that it was called, and one that was recorded before they were made goes around that."""
    if is_step(function):
        function.__self__.__dict__["_opt_called"] = True


def is_step(function: object) -> TypeGuard[MethodType]:
    """Whether the function is an optimizer's own step."""
    owner = getattr(function, "__self__", None)
    return isinstance(owner, torch.optim.Optimizer) and getattr(function, "__name__", "") == "step"


def states_to_come(function: Callable[..., object], reached: Sequence[torch.optim.Optimizer]) -> int:
    """About how many bytes of states it makes, if the function is the first step of an optimizer, the only one that it reaches:
    Adam's two tensors like each parameter that has a gradient. (A scheduler puts a function before the step.)"""
    if len(reached) != 1 or reached[0].state or getattr(function, "__name__", "") != "step":
        return 0
    if inspect.unwrap(getattr(function, "__func__", function)) is not inspect.unwrap(type(reached[0]).step):
        return 0
    parameters = [p for group in reached[0].param_groups for p in group["params"]]
    return sum(2 * p.nbytes for p in parameters if p.grad is not None and has_memory(p))


def never(function: Callable[..., object]) -> Refusal | None:
    """Why a function that is an optimizer's own step can never be recorded."""
    if is_step(function) and isinstance(function.__self__, torch.optim.LBFGS):
        return Refusal("decides on the host how often it calls its closure", "record the model that the closure calls")
    return None


@contextmanager
def fit_to_step(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """During the block, the step of an optimizer that cannot take a recorded one as it is now raises a `Refusal`."""

    def refusing(refusal: Refusal) -> Callable[..., None]:
        def hook(*_: object) -> None:
            raise refusal

        return hook

    found = [(o, refusal) for o, g in _groups(optimizers) if (refusal := _unfit(o, g)) is not None]
    handles = [o.register_step_pre_hook(refusing(refusal)) for o, refusal in found if steps_itself(o)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _unfit(optimizer: torch.optim.Optimizer, group: dict[str, object]) -> Refusal | None:
    """Why the optimizer cannot take a recorded step with this group."""
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.Adafactor):
        return Refusal(f"{name} reads norms of weights on the host", "record the model alone; or use another optimizer")
    if isinstance(optimizer, torch.optim.ASGD) and not group.get("capturable"):
        return Refusal(f"{name} reads its step count on the host", "capturable=True (on a GPU); or record the model alone")
    plain = not (group.get("capturable") or group.get("fused"))
    if plain and isinstance(optimizer, _CORRECTING) and isinstance(group.get("lr"), torch.Tensor):
        return Refusal(f"{name} has a learning rate that is a tensor, and reads it on the host",
                       "a number (it may change from step to step), or fused=True, or capturable=True on a GPU")  # fmt: skip
    return None
