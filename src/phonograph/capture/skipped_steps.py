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
from .._torch.dynamic import Args, Kwargs, Private
from ..errors import Refusal, Unseen
from ..python.standing import ended
from ..values.step_counts import counts_on_the_host
from .dispatch import OperatorWatch

__all__ = ["skipping_on_the_device"]


@contextmanager
def skipping_on_the_device(watch: OperatorWatch) -> Iterator[None]:
    """During the block, steps that a scaler may skip are branches of the call that this thread captures."""
    thread = threading.get_ident()

    def maybe_step(plain: Callable[..., Private]) -> Callable[..., Private]:
        def step(scaler: object, optimizer: torch.optim.Optimizer, state: Private, *args: object, **kwargs: object) -> object:
            found = [*state["found_inf_per_device"].values()]
            splits = watch.numerals is not None and not watch.steps_whole
            if threading.get_ident() != thread or len(found) != 1 or not _fits(optimizer, splits=splits):
                return plain(scaler, optimizer, state, *args, **kwargs)
            _branch(watch, found[0], optimizer, args, kwargs)
            return None

        return step

    with ended(torch_modules.scaled_step(maybe_step)):
        yield


def _fits(optimizer: torch.optim.Optimizer, *, splits: bool) -> bool:
    """Whether a step of it can be a body. A call that `splits` can be recorded whatever code of the user's a step runs."""
    if counts_on_the_host(optimizer):
        return False
    code = [type(optimizer), *torch_modules.step_hooks(optimizer)]
    return not splits or all(str(x.__module__).startswith(("torch.", "phonograph.")) for x in code)


def _branch(
    watch: OperatorWatch, found_inf: torch.Tensor, optimizer: torch.optim.Optimizer, args: Args, kwargs: Kwargs
) -> None:
    """Step, unless a gradient is infinite."""
    step: Callable[..., object] = optimizer.step
    heard = hasattr(step, "_wrapped_by_lr_sched")  # by a scheduler, which has the optimizer note that it has stepped
    if heard and not optimizer.__dict__.get("_opt_called", False):
        raise watch.located(Unseen("may skip the first step of an optimizer", "call it until one is taken", final=False))

    def take() -> list[torch.Tensor]:
        if step(*args, **kwargs) is not None:
            raise watch.located(Refusal("may skip a step of an optimizer that returns a value", "let the step return None"))
        return []

    with torch.no_grad():
        skips = found_inf != 0
    watch.branch(skips, [take, list], [("optimizer", optimizer)])
