"""What is noted before a capture, and how its place is chosen."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from .._torch.dynamic import Leaves
from ..capture.ddp_reducer import Reducers, around
from ..capture.effects import Starts
from ..capture.recording import memory_of
from ..guards.beyond import Beyond
from ..guards.snapshot import Snapshot
from ..memory.spans import Spans
from ..python.holders import Spot
from ..slots.fed_gradients import FedGradients
from ..slots.gradients import Grads
from .capture_terms import Request
from .clearance import Clearance, Slots
from .followed import spots_of
from .preconditions import check
from .transaction import transaction

__all__ = ["Prepared"]


@dataclass(frozen=True)
class Prepared:
    """What a capture begins with."""

    grads: Grads
    snapshot: Snapshot
    """What the function can reach, before the capture."""
    beyond: Beyond
    """What the call relies on beyond that."""
    slots: Slots
    clearance: Clearance
    protected: Spans
    """Where the capture takes no memory."""
    spots: list[Spot]
    """The places of the numbers that are followed."""
    numbers: Leaves
    """Those of them that are arguments."""
    buckets: list[torch.Tensor]
    """The memory in which gradients are averaged over ranks."""
    begins: Starts
    """Functions of torch's with which averaging would begin, where it was not expected."""
    draws: Callable[[], None]
    """Refuses random numbers that the call has drawn on the host: to be called at its end."""

    @classmethod
    def of(cls, request: Request, undo: ExitStack) -> Prepared:
        """Raised from here on, an exception lets `undo` put everything back.

        Raises:
            Refusal: the call cannot be recorded, whatever the function does.
        """
        call, reach, device, whole = request.call, request.reach, request.device, request.whole
        check(reach, call, request.tracing is not None)
        spots, numbers = spots_of(request)
        reducers = Reducers(reach.modules, whole=whole, part=request.terms.concessions.averages or not whole)
        if request.tracing is not None and not request.calls_graph:
            around(device)
        clearance = Clearance.of(request)
        protected = clearance.protected | Spans((lent.loan.address, lent.loan.nbytes) for lent in call.borrowed.values())
        buckets = undo.enter_context(reducers.taking_part(device))
        within, leaves = request.terms.placement.within, [t for _, t in reach.all_tensors]
        fed = None
        if request.terms.concessions.feeds:
            fed = FedGradients([t for t in leaves if t.is_leaf], None if within is None else within.table.gradients.fed)
        grads = Grads(leaves, device.outlives, [t for _, t in reach.gathered if t.is_leaf], fed)
        others = Beyond(reach)
        snapshot, draws = undo.enter_context(transaction(reach, others, grads, device.torch_device))
        if fed is not None:
            fed.stand()
        slots = Slots.of(request)
        protected |= Spans(memory_of(s) for s in slots.shared if s is not None)
        return cls(grads, snapshot, others, slots, clearance, protected, spots, numbers, buckets, reducers.begins(), draws)
