"""Optimizers inside a recorded function.

Most of torch's optimizers keep their step count on the host and read it in each step, which nothing can record. Their
`capturable` mode keeps it on the device instead. It is switched on while a recorded function warms up or is captured
(so that all its steps do the same arithmetic), and put back afterwards; what stays is the step count, on the device,
which the other mode reads as well. Fused implementations need no switch, but torch asks for the flag all the same.

That mode divides by the learning rate where the other multiplies by it: a rate of 0 makes NaN of 0 / 0, and float16 has no
room for the quotient. Such groups are left alone (`unfit`), and their steps run live.

torch allows the mode on accelerators only, though its arithmetic works anywhere; for the CPU device the list of devices
is extended for the same span of time.

Adagrad has no such mode. But where its learning rate does not decay by itself, it multiplies the count that it has read
by 0: then it is given another number for it, unread. Where it does decay, and in Adafactor, which reads norms as well, the
step runs live.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .errors import Refusal
from .identity import identity
from .torch_private import has_memory, steps_itself

__all__ = ["SMALLEST", "divides_by_rate", "fit_to_step", "never", "prepare", "recordable", "states_to_come",
           "stepped"]  # fmt: skip

SMALLEST = 1e-30  # a learning rate by which float32 numbers may be divided
_COUNTS = ("step", "mu_product")  # what is kept on the host for a parameter; the latter by NAdam
_DIVIDING = (torch.optim.Adam, torch.optim.AdamW)
_LISTED_BY, _READ_BY = "_get_capturable_supported_devices", "_get_value"  # private functions of torch.optim's modules


def prepare(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Move what optimizers keep on the host to their parameters' device; whether there was anything. Values do not change."""
    moved = False
    for optimizer, group in _groups(optimizers):
        if _reads_counts(optimizer, group):
            continue  # there it would wait for the device in each step
        for p in group["params"]:
            state: Any = optimizer.state.get(p)
            for name in _COUNTS if isinstance(state, dict) else ():
                count = state.get(name)
                if isinstance(count, torch.Tensor) and count.device != p.device:
                    state[name] = count.to(p.device)
                    moved = True
    return moved


def _groups(optimizers: Sequence[torch.optim.Optimizer]) -> list[tuple[torch.optim.Optimizer, dict[str, Any]]]:
    return [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]


def _reads_counts(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether the group's steps read their counts on the host, whatever the mode."""
    if isinstance(optimizer, torch.optim.Adagrad):
        return not group.get("fused") and group.get("lr_decay") != 0
    return isinstance(optimizer, torch.optim.Adafactor)


_Counts = dict[int, tuple[torch.Tensor, dict[str, Any]]]  # step counts by identity, and the group of each


def _ignored_counts(optimizers: Sequence[torch.optim.Optimizer]) -> _Counts:
    """The counts that are read on the host only to be multiplied by 0."""
    return {
        identity(step): (step, group)
        for o, group in _groups(optimizers) if isinstance(o, torch.optim.Adagrad)
        if not _reads_counts(o, group) and not group.get("fused")
        for p in group["params"] if isinstance(step := o.state.get(p, {}).get("step"), torch.Tensor)
    }  # fmt: skip


def stepped(function: Any) -> None:
    """If the function that now runs is an optimizer's own step, say so as schedulers expect: they have `optimizer.step` note
    that it was called, and one that was recorded before they were made goes around that."""
    if _is_step(function):
        function.__self__.__dict__["_opt_called"] = True


def _is_step(function: Any) -> bool:
    """Whether the function is an optimizer's own step."""
    owner = getattr(function, "__self__", None)
    return isinstance(owner, torch.optim.Optimizer) and getattr(function, "__name__", "") == "step"


def states_to_come(function: Any, reached: Sequence[torch.optim.Optimizer]) -> int:
    """About how many bytes of states it makes, if the function is the first step of an optimizer, the only one that it reaches:
    Adam's two tensors like each parameter that has a gradient. (A scheduler puts a function before the step.)"""
    if len(reached) != 1 or reached[0].state or getattr(function, "__name__", "") != "step":
        return 0
    if inspect.unwrap(getattr(function, "__func__", function)) is not inspect.unwrap(type(reached[0]).step):
        return 0
    parameters = [p for group in reached[0].param_groups for p in group["params"]]
    return sum(2 * p.nbytes for p in parameters if p.grad is not None and has_memory(p))


def never(function: Any) -> Refusal | None:
    """Why a function that is an optimizer's own step can never be recorded."""
    if _is_step(function) and isinstance(function.__self__, torch.optim.LBFGS):
        return Refusal("decides on the host how often it calls its closure", "record the model that the closure calls")
    return None


def _to_switch(group: dict[str, Any]) -> bool:
    """Whether a group has the mode, and the user has not switched it on himself."""
    return group.get("capturable") is False or identity(group) in _switched


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

    found = [(o, refusal) for o, g in _groups(optimizers) if (refusal := _unfit(o, g)) is not None]
    handles = [o.register_step_pre_hook(refusing(refusal)) for o, refusal in found if steps_itself(o)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _unfit(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Refusal | None:
    """Why the optimizer cannot take a recorded step with this group."""
    name, rate = type(optimizer).__name__, group.get("lr")
    if _reads_counts(optimizer, group):
        remedy = "fused=True" if "fused" in group else "another optimizer"
        return Refusal(f"{name} reads its step count on the host", f"{remedy}, or record the model alone")
    if not _to_switch(group) or group.get("fused"):
        return None
    if any(p.dtype is torch.float16 for p in group["params"]):
        return Refusal(f"{name} steps on float16 parameters, which only its fused kernel can do in a recording",
                       "fused=True, or float32 parameters under autocast")  # fmt: skip
    if divides_by_rate(optimizer, group):
        if isinstance(rate, torch.Tensor):
            return Refusal(f"{name} has a learning rate that is a tensor, and divides by it in a recording",
                           "fused=True, or capturable=True as in eager CUDA graphs, or a number")  # fmt: skip
        if rate is not None and not abs(rate) >= SMALLEST:  # nor NaN
            return Refusal(f"{name} has a learning rate of {rate}", "nothing, or fused=True", this_call=True)
    return None


@contextmanager
def recordable(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """`capturable` on in every group that knows it and can do with it, for the length of the block."""
    groups = [g for o, g in _groups(optimizers) if _to_switch(g) and _unfit(o, g) is None]
    counts = _ignored_counts(optimizers)
    if not groups and not counts:
        yield
        return
    with _guard:  # several threads may be at it, each with groups of its own
        for group in groups:
            group["capturable"] = True
            _switched[identity(group)] += 1
        _blocks.append(counts)
        if len(_blocks) == 1:
            _replace_functions()
    try:
        yield
    finally:
        with _guard:
            _blocks[:] = [block for block in _blocks if block is not counts]
            for group in groups:
                _switched[identity(group)] -= 1
                if not _switched[identity(group)]:
                    del _switched[identity(group)]
                    group["capturable"] = False
            if not _blocks:
                for module, name, function in _replaced:
                    setattr(module, name, function)
                _replaced.clear()


_guard = threading.Lock()
_blocks: list[_Counts] = []  # one for each block that somebody is in: the counts that are not read there
_switched: Counter[int] = Counter()  # how many of them have switched a group, by its identity
_replaced: list[tuple[Any, str, Any]] = []  # functions of torch.optim's modules, to be put back


def _replace_functions() -> None:
    adagrad = sys.modules[torch.optim.Adagrad.__module__]
    modules = {sys.modules.get(kind.__module__) for kind in vars(torch.optim).values() if isinstance(kind, type)}
    for module, name, instead in (*((m, _LISTED_BY, _with_cpu) for m in modules), (adagrad, _READ_BY, _unread)):
        if hasattr(module, name):
            _replaced.append((module, name, getattr(module, name)))
            setattr(module, name, instead(getattr(module, name)))


def _with_cpu(listed: Any) -> Any:
    return lambda *args, **kwargs: [*listed(*args, **kwargs), "cpu"]


def _unread(read: Any) -> Any:
    def value(x: Any) -> Any:
        for counts in _blocks:
            if identity(x) in counts and counts[identity(x)][1]["lr_decay"] == 0:
                return 1.0
        return read(x)

    return value
