"""A recorded forward and its backward, joined to the user's own graph of autograd.

The forward's replay hands out its results as results of one autograd function, whose inputs are the arguments and
parameters that they depend on. So everything outside is as usual: other modules before and after, `.grad` and hooks of
parameters, `torch.autograd.grad`. What the function does in backward is a recorded function of its own (`Backward`), with
a recording for each pattern of gradients.

What the forward has saved is lent to the autograd function, as a result is lent to the user. As long as it has not run
backward, or been dropped, that memory is held: another forward meanwhile finds its recording in the way and gets a second
one. There are as many as there are forwards in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .torch_private import alias
from .tracing import Backward

__all__ = ["Joint"]


class Joint:
    """What joins one recording's results to the graph. `backward` is its `Backward`, recorded or not."""

    def __init__(self, traced: Backward, backward: Callable[..., list[torch.Tensor | None]]) -> None:
        self.traced = traced
        self.backward = backward
        self._memory = [lease.bytes() for lease in traced.memory]

    def attach(self, results: list[torch.Tensor], arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results that require a gradient, with their history. They are changed in place."""
        saved = [*map(alias, self._memory), *[results[i] for i in self.traced.exposed]]
        sources = [*[arguments[i] for i in self.traced.arguments], *self.traced.parameters]
        attached: tuple[torch.Tensor, ...] = _Joined.apply(self, results, saved, *sources)  # type: ignore[no-untyped-call]
        return list(attached)


def _versions(tensors: list[torch.Tensor]) -> list[int]:
    return [0 if t.is_inference() else t._version for t in tensors]


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joint: Joint, results: list[torch.Tensor], saved: list[torch.Tensor], *sources: Any) -> Any:
        ctx.joint = joint
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)  # holds the memory until backward has run, and notices who writes a result meanwhile
        ctx.versions = _versions(joint.traced.constant)
        ctx.storages = [t.untyped_storage() for t in joint.traced.constant]  # other weights may take their place meanwhile
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "phonograph: a backward with create_graph=True cannot go through a recording. Call pg.reset on the recorded "
                "function or module to run it live."
            )
        _ = ctx.saved_tensors  # raises what eager raises where they are gone, or were written
        joint: Joint = ctx.joint
        if ctx.versions != _versions(joint.traced.constant):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a parameter "
                "or buffer of the recorded function was written between its forward and its backward."
            )
        return (None, None, None, *joint.backward(*grads))
