"""A recorded forward and its backward, joined to the user's own graph of autograd.

The forward's replay hands out its results as results of one autograd function, whose inputs are the arguments and
parameters that they depend on. So everything outside is as usual: other modules before and after, `.grad` and hooks of
parameters, `torch.autograd.grad`. What the function does in backward is a recorded function of its own (`Backward`), with
a recording for each pattern of gradients.

What the forward has saved is lent to the autograd function, as a result is lent to the user. Until all of it has been read by
a backward, or the graph is dropped, that memory is held: another forward meanwhile finds its recording in the way and gets a
second one. There are as many as there are forwards in flight.

Eager notices when a tensor that was saved is written before its backward. The same is done here, for those that the backward
of the given gradients reads: they are known once it has run live.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .torch_private import alias, keeps_graph
from .tracing import Backward

__all__ = ["Joint"]

_WRITTEN = ("one of the variables needed for gradient computation has been modified by an inplace operation: a {}, between the "
            "forward of a recorded function and its backward")  # fmt: skip


class Joint:
    """What joins one recording's results to the graph. `backward` is its `Backward`, recorded or not; `create_graph` is called
    when a backward is itself to be differentiated, which has to run live."""

    def __init__(
        self, traced: Backward, backward: Callable[..., list[torch.Tensor | None]], create_graph: Callable[[], None]
    ) -> None:
        self.traced = traced
        self.backward = backward
        self.create_graph = create_graph
        self._memory = [lease.bytes() for lease in traced.memory]
        self._read: dict[tuple[bool, ...], frozenset[int]] = {}  # by which gradients are given: what that backward reads

    def attach(self, results: list[Any], arguments: Sequence[torch.Tensor]) -> None:
        """Give those of a call's results their history that have one. `results` are all of them."""
        traced = self.traced
        given = [results[i] for i in traced.attached]
        # Detached, so that they do not hold themselves; they share their version with the result.
        exposed = {number: results[i].detach() for number, i in traced.exposed.items()}
        sources = [*[arguments[i] for i in traced.arguments], *traced.parameters]
        flight = _Flight(self, [*map(alias, self._memory)], {**traced.constant, **exposed})
        for i, t in zip(traced.attached, _Joined.apply(flight, given, *sources), strict=True):  # type: ignore[no-untyped-call]
            results[i] = t

    def run(self, flight: _Flight, grads: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor | None]:
        """The backward of one call."""
        pattern = tuple(g is not None for g in grads)
        known = self._read.get(pattern)
        flight.begin(known)
        with self.traced.noting() as read:
            found = self.backward(*grads)
        if known is None:
            known = self._read[pattern] = frozenset(read)
            flight.check(known)
        if not keeps_graph():
            flight.landed(pattern, known)
        return found


class _Flight:
    """One call between its forward and its backward: the memory that it holds, and the versions of what it has saved."""

    def __init__(self, joint: Joint, memory: list[torch.Tensor], saved: dict[int, torch.Tensor]) -> None:
        self.joint = joint
        self._memory: list[torch.Tensor] | None = memory
        self._saved = saved
        self._versions = {number: _version(t) for number, t in saved.items()}
        self._storages = [t.untyped_storage() for t in saved.values()]  # other weights may take their place meanwhile
        self._waiting = set(range(len(joint.traced.attached)))  # results whose backward has not run
        self._unread = set(joint.traced.kept)  # what no backward has read

    def check(self, read: frozenset[int]) -> None:
        for number in read & self._saved.keys():
            t = self._saved[number]
            if _version(t) != self._versions[number]:
                raise RuntimeError(_WRITTEN.format(f"tensor of shape {tuple(t.shape)}"))

    def begin(self, read: frozenset[int] | None) -> None:
        """A backward begins, which reads these if that is known."""
        if self._memory is None and read != frozenset():
            raise RuntimeError(
                "Trying to backward through the graph a second time: what the forward of a recorded function has saved is "
                "released after its backward. Specify retain_graph=True if you need to backward a second time."
            )
        self.check(read or frozenset())

    def landed(self, pattern: tuple[bool, ...], read: frozenset[int]) -> None:
        """A backward has run that does not retain the graph: of the results in the pattern, and it has read these."""
        self._waiting -= {i for i, given in enumerate(pattern) if given}
        self._unread -= read
        if not (self._waiting and self._unread) and self._memory:
            self._memory, self._saved, self._storages = None, {}, []


def _version(t: torch.Tensor) -> int:
    return 0 if t.is_inference() else t._version


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: _Flight, results: list[torch.Tensor], *sources: Any) -> Any:
        ctx.flight = flight
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        flight: _Flight = ctx.flight
        if torch.is_grad_enabled():
            flight.joint.create_graph()
            raise RuntimeError(
                "phonograph: a backward with create_graph=True cannot go through a recording. From its next call on, the "
                "function or module runs live."
            )
        return (None, None, *flight.joint.run(flight, grads))
