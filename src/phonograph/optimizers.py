"""Optimizers inside a recorded function.

Most of torch's optimizers keep their step count on the host and read it in each step, which nothing can record. Their
`capturable` mode keeps it on the device instead. It is switched on while a recorded function warms up or is captured
(so that all its steps do the same arithmetic), and put back afterwards; what stays is the step count, on the device,
which the other mode reads as well. Fused implementations need no switch, but torch asks for the flag all the same.

That mode divides by the learning rate where the other multiplies by it: a rate of 0 makes NaN of 0 / 0, and float16 has no
room for the quotient. Such groups are left alone (`unfit`), and their steps run live.

torch allows the mode on accelerators only, though its arithmetic works anywhere; for the CPU device the list of devices
is extended for the same span of time.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .errors import Refusal

__all__ = ["SMALLEST", "divides_by_rate", "fit_to_step", "never", "prepare", "recordable"]

SMALLEST = 1e-30  # a learning rate by which float32 numbers may be divided
_DIVIDING = (torch.optim.Adam, torch.optim.AdamW)
_LISTED_BY = "_get_capturable_supported_devices"


def prepare(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Move step counts that are on the host to their parameters' device; whether there were any. Values do not change."""
    moved = False
    for optimizer in optimizers:
        for p, state in optimizer.state.items():
            step = state.get("step") if isinstance(state, dict) else None
            if isinstance(step, torch.Tensor) and step.device != p.device:
                state["step"] = step.to(p.device)
                moved = True
    return moved


def never(function: Any) -> Refusal | None:
    """Why a function that is an optimizer's own step can never be recorded."""
    if getattr(function, "__name__", "") == "step" and isinstance(getattr(function, "__self__", None), torch.optim.LBFGS):
        return Refusal("decides on the host how often it calls its closure", "record the model that the closure calls")
    return None


def _to_switch(group: dict[str, Any]) -> bool:
    """Whether a group has the mode, and the user has not switched it on himself."""
    return group.get("capturable") is False or id(group) in _switched


def divides_by_rate(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether the group's steps, recorded, divide by its learning rate where eager does not."""
    return _to_switch(group) and isinstance(optimizer, _DIVIDING) and not group.get("fused")


@contextmanager
def fit_to_step(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """During the block, the step of an optimizer that cannot take a recorded one as it is now raises a `Refusal`."""

    def refusing(refusal: Refusal) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            raise refusal

        return hook

    found = [(o, refusal) for o in optimizers for g in o.param_groups if (refusal := _unfit(o, g)) is not None]
    handles = [o.register_step_pre_hook(refusing(refusal)) for o, refusal in found]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _unfit(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Refusal | None:
    """Why the optimizer cannot take a recorded step with this group."""
    if not _to_switch(group) or group.get("fused"):
        return None
    name, rate = type(optimizer).__name__, group.get("lr")
    if any(p.dtype is torch.float16 for p in group["params"]):
        return Refusal(f"{name} steps on float16 parameters, which only its fused kernel can do in a recording",
                       "fused=True, or float32 parameters under autocast")  # fmt: skip
    if divides_by_rate(optimizer, group):
        if isinstance(rate, torch.Tensor):
            return Refusal(f"{name} has a learning rate that is a tensor, and divides by it in a recording",
                           "fused=True, or capturable=True as in eager CUDA graphs, or a number")  # fmt: skip
        if rate is not None and abs(rate) < SMALLEST:
            return Refusal(f"{name} has a learning rate of {rate}", "nothing, or fused=True", this_call=True)
    return None


@contextmanager
def recordable(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """`capturable` on in every group that knows it and can do with it, for the length of the block."""
    groups = [g for o in optimizers for g in o.param_groups if _to_switch(g) and _unfit(o, g) is None]
    if not groups:
        yield
        return
    lists = [m for name, m in list(sys.modules.items()) if name.startswith("torch.optim") and hasattr(m, _LISTED_BY)]
    with _guard:  # several threads may be at it, each with groups of its own
        for group in groups:
            group["capturable"] = True
            _switched[id(group)] += 1
        if not _listed:
            _listed.extend((m, getattr(m, _LISTED_BY)) for m in lists)
            for m, listed in _listed:
                setattr(m, _LISTED_BY, _with_cpu(listed))
        _blocks.append(None)
    try:
        yield
    finally:
        with _guard:
            _blocks.pop()
            for group in groups:
                _switched[id(group)] -= 1
                if not _switched[id(group)]:
                    del _switched[id(group)]
                    group["capturable"] = False
            if not _blocks:
                for m, listed in _listed:
                    setattr(m, _LISTED_BY, listed)
                _listed.clear()


_guard = threading.Lock()
_blocks: list[None] = []  # one for each block that somebody is in
_switched: Counter[int] = Counter()  # how many of them have switched a group, by its identity
_listed: list[tuple[Any, Any]] = []  # the modules whose list is extended, and their own functions


def _with_cpu(listed: Any) -> Any:
    return lambda *args, **kwargs: [*listed(*args, **kwargs), "cpu"]
