"""Steps of optimizers that a gradient scaler skips where a gradient is infinite.

`GradScaler.step` reads that on the host, and calls the optimizer's step or not. In a captured call the step is the body of a
branch. Nothing changes for an optimizer with fused kernels, to which the scaler gives the tensor. Nor for one that keeps step
counts on the host: they would depend on what only the device knows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from .._torch import modules as torch_modules
from .._torch.dynamic import Private
from ..errors import Refusal, Unseen
from ..values.step_counts import begins, counts_on_the_host
from .dispatch import OperatorWatch

__all__ = ["skipping_on_the_device"]


@contextmanager
def skipping_on_the_device(watch: OperatorWatch) -> Iterator[None]:
    """During the block, steps that a scaler may skip are branches of the call that this thread captures."""
    thread = threading.get_ident()

    def maybe_step(plain: Callable[..., Private]) -> Callable[..., Private]:
        def step(scaler: object, optimizer: torch.optim.Optimizer, state: Private, *args: object, **kwargs: object) -> object:
            found = [*state["found_inf_per_device"].values()]
            if threading.get_ident() != thread or len(found) != 1 or not _fits(optimizer, splits=watch.numerals is not None):
                return plain(scaler, optimizer, state, *args, **kwargs)
            _branch(watch, found[0], lambda: optimizer.step(*args, **kwargs), optimizer)
            return None

        return step

    with torch_modules.scaled_step(maybe_step):
        yield


def _fits(optimizer: torch.optim.Optimizer, *, splits: bool) -> bool:
    """Whether a step of it can be a body. A call that `splits` can be recorded whatever code of the user's a step runs."""
    if counts_on_the_host(optimizer):
        return False
    code = [type(optimizer), *torch_modules.step_hooks(optimizer)]
    return not splits or all(x.__module__.startswith(("torch.", "phonograph.")) for x in code)


def _branch(
    watch: OperatorWatch, found_inf: torch.Tensor, step: Callable[[], object], optimizer: torch.optim.Optimizer
) -> None:
    """Step, unless a gradient is infinite."""
    if _first(optimizer):
        raise watch.located(Unseen("may skip the first step of an optimizer", "call it until one is taken", final=False))

    def take() -> list[torch.Tensor]:
        if step() is not None:
            raise watch.located(Refusal("may skip a step of an optimizer that returns a value", "let the step return None"))
        return []

    with torch.no_grad():
        skips = found_inf != 0
    watch.branch(skips, [take, list], [("optimizer", optimizer)])


def _first(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step would leave more than tensors that were there before: a state, or that a scheduler hears of it."""
    unheard = hasattr(optimizer.step, "_wrapped_by_lr_sched") and not optimizer.__dict__.get("_opt_called", False)
    stateful = [g for g in optimizer.param_groups if g.get("momentum")]
    return (
        unheard
        or begins(optimizer)
        or any(p.grad is not None and not optimizer.state.get(p) for g in stateful for p in g["params"])
    )
