"""A warm-up call: the function runs for real, and shows what a recording of it needs.

It runs beside the recordings, so that what it leaves behind does not disturb the capture to come. What its live parts give,
what memory it leaves, and whether a backward of its results follows, goes into the `History` of its signature.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace

import torch
from torch.autograd.graph import Node

from .._torch import autograd as torch_autograd
from .._torch import modes as torch_modes
from .._torch.dynamo import ended_by
from ..autograd.function import TWICE
from ..call.live_function import Marked
from ..call.signature import Call
from ..capture.ddp_reducer import begun_by
from ..capture.live_results import Notes, noting
from ..devices import device_for
from ..devices.base import Device
from ..errors import Refusal
from ..guards.reachable import Reach
from ..python.identity import identity
from ..python.origin import users_line
from ..state import capturable as optimizers
from ..state.reentrancy import Nested
from ..values.pytree import flatten
from .clearance import fed
from .contained import Contained
from .describer import Describer
from .history import History
from .profitability import Took

__all__ = ["LiveRun"]

_EARLY = 3  # live calls before which memory that nobody uses is given back: not again and again, where shapes are ever new


class LiveRun:
    """One warm-up call, the function's `number`th live one."""

    def __init__(
        self, function: Callable[..., object], call: Call, history: History, describer: Describer, number: int
    ) -> None:
        self._function, self._call, self._history, self._describer = function, call, history, describer
        self._number = number
        self.device: Device | None = None
        """The device it has worked on; None where that could not be told, and nothing is learned."""

    def run(self, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """The result of the call."""
        try:
            with Contained("looked at what the function can reach"):
                reach = None if self._runs_alike_anyway() else self._describer.reach(self._call)
                device = self._device_of(reach)
                device.tidy()  # rather than between this call and the capture, which is to find this call's memory
        except Refusal:
            with Nested(waits=True):
                return self._function(*args, **kwargs)
        place: AbstractContextManager[None] = nullcontext() if reach is None else self._beside(reach, device)
        live = self._history.live
        live.notes = notes = self._notes(reach)
        before, modules = device.allocated, () if reach is None else reach.modules
        steps = begun_by(modules)
        with Nested(waits=True), place, noting(notes):
            took = Took.here(device.torch_device)
            result = self._function(*args, **kwargs)
            if took is not None:
                took.end()
        live.ended, live.took = True, took
        live.averages = live.averages or begun_by(modules) > steps
        live.nbytes = max(0, device.allocated - before)
        self.device = device
        return result

    def _runs_alike_anyway(self) -> bool:
        """Whether a live call does the same whatever the function can reach: the CPU is all there is, and nothing is marked."""
        marked = Marked.any_made or self._describer.marked or self._history.capture.split
        return not (marked or torch.cuda.is_initialized()) and all(t.device.type == "cpu" for t in self._call.tensors)

    def _device_of(self, reach: Reach | None) -> Device:
        known = self._history.capture.device
        where = torch.device("cpu") if reach is None else self._describer.device_of(self._call, reach, known)
        return device_for(where)

    def _beside(self, reach: Reach, device: Device) -> AbstractContextManager[None]:
        """The stream and the memory of the call."""
        self._describer.marked = self._describer.marked or reach.marked
        # Other threads know nothing of a stream of ours, nor does code that names the caller's: that stays on the caller's.
        elsewhere = reach.mentions.orders_streams or device.is_current(reach.streams)
        lasting = optimizers.states_to_come(self._function, reach.optimizers) if self._number == 1 else 0
        if not elsewhere and self._number <= _EARLY:
            device.release_unused()
        return nullcontext() if elsewhere else device.beside(fed(self._call, device), lasting, reach.sharded)

    def _notes(self, reach: Reach | None) -> Notes:
        """Hears what live parts give."""
        capture, marked = self._history.capture, self._describer.marked
        return Notes(capture.split, reach if capture.split or marked else None, marked,
                     strict=self._history.divergence.torn, decisive=capture.decisive, wholes=capture.wholes)  # fmt: skip

    def follow(self, result: object, *, attaches: bool, stop: Callable[[Refusal], None]) -> None:
        """Hear of the backward of the `result`. `attaches`: one will run outside, if the arguments have no gradients. `stop` is
        told of one that is itself to be differentiated: such calls have to run live, which cannot be foreseen."""
        tensors, nodes = self._call.tensors, _nodes_of(result)
        if self.device is None or not nodes:
            return
        if attaches and not any(t.requires_grad for t in tensors):
            self._history.capture.attached = True  # so that the capture need not find it out
        reads = [t.detach() for t in tensors if self.device.pool.lease_of(t) is None]
        _hear_of_backward(nodes, tensors, reads, self.device, self._history, stop)


def _nodes_of(result: object) -> set[Node]:
    """The nodes of autograd's graph that results come from."""
    leaves: list[object] = []
    flatten(result, leaves)
    nodes: set[Node | None] = set()
    for leaf in leaves:
        with suppress(RuntimeError):  # torch does not say it of a view made without gradients, whose base was written since
            nodes.add(leaf.grad_fn if isinstance(leaf, torch.Tensor) else None)
    return {node for node in nodes if node is not None}


def _hear_of_backward(
    nodes: set[Node], tensors: Sequence[torch.Tensor], reads: list[torch.Tensor], device: Device, history: History,
    stop: Callable[[Refusal], None],
) -> None:  # fmt: skip
    """Let the device hear of a live backward, from these nodes to those of the arguments: it runs where the call did."""
    left = set(map(identity, nodes))

    @ended_by
    def begins(node: int, grads: Sequence[torch.Tensor | None]) -> None:
        if torch_autograd.may_run_backward():  # else only some gradients are asked for
            left.discard(node)
            history.live.ran_backward = history.live.ran_backward or not left
        if torch.is_grad_enabled():
            stop(replace(TWICE, where=users_line()))
        torch_autograd.when_backward_ends(device.backward_ends)
        device.backward_begins([*reads, *_there(grads)])
        if not torch_autograd.keeps_graph():
            reads.clear()

    @ended_by
    def passes(grads: Sequence[torch.Tensor | None]) -> None:
        device.backward_passes(_there(grads))

    for node in nodes:
        node.register_prehook(functools.partial(begins, identity(node)))
    for passed in {t.grad_fn for t in tensors}:
        if passed is not None:
            passed.register_prehook(passes)


def _there(grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Those of these gradients that are there, as tensors of their own."""
    return [grad if torch_modes.is_batched(grad) else grad.detach() for grad in grads if grad is not None]
