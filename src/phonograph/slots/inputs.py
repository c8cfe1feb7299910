"""Arguments, and the state that is carried from call to call, which is an argument as well: each has a slot, a fixed place from
which the recording reads it, and where it may write it.

The program copies arguments to their slots when it runs. A slot that is the output of another recording (`g(f(x))`) is mostly
filled already. What was written in a slot is copied back to the caller's tensor after the run, on the same stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from .._torch.native import bump
from .._torch.tensors import address
from ..call.signature import Call
from ..memory.pool import Fill, Pool, memory_of, unexpanded
from ..memory.spans import Spans
from .column import Tensors

__all__ = ["AS_IT_IS", "Inputs", "Slot"]

AS_IT_IS: AbstractContextManager[None] = nullcontext()
"""For the inference mode: to set it would cost 1.5 us."""


@dataclass(frozen=True)
class Slot:
    """An argument's fixed place."""

    tensor: torch.Tensor
    borrowed: bool = False
    """It lies where another recording leaves its output: a chain `g(f(x))` needs no copy."""
    written: bool = False
    """It is copied back to the caller's tensor after a replay..."""
    moved: bool = True
    """...whose version moves on, unless all that writes it leaves versions alone, as collectives do."""


class Inputs:
    """The arguments of one recording, by their numbers among a call's tensors: a column whose verbs take those of a call."""

    def __init__(self, slots: tuple[Slot, ...], containers: tuple[int, ...], pool: Pool) -> None:
        """`containers` are tensors among the arguments' containers, by number, whose parts are written."""
        self.slots = slots
        self._containers, self._pool = containers, pool
        numbered = [*enumerate(slots)]
        outer = [(i, slot) for i, slot in numbered if not isinstance(slot.tensor, torch.nn.Parameter)]
        self.copied = [i for i, slot in outer if not slot.borrowed]
        """Those that each run copies to their slots..."""
        self.nbytes = self.filled = sum([unexpanded(slots[i].tensor).nbytes for i in self.copied])
        """...their bytes, and those that were copied the last time, to whatever slots."""
        self.borrowed = [(i, slot.tensor) for i, slot in outer if slot.borrowed]
        self.memory = Spans(memory_of(slot) for _, slot in self.borrowed)
        """Where borrowed slots lie."""
        self._written = [(i, s.tensor, unexpanded(s.tensor) is s.tensor, s.moved) for i, s in numbered if s.written]
        self.writes = bool(self._written or containers)
        """Whether the recording writes some of them."""

    def are_there(self, tensors: Tensors) -> bool:
        """Whether these arguments lie in the slots that are outputs of other recordings."""
        for i, slot in self.borrowed:  # noqa: SIM110 - `all(... for ...)` costs half as much again
            if address(tensors[i]) != address(slot):
                return False
        return True

    def fill(self, tensors: Tensors, call: Call | None) -> None:
        """Copy arguments to those slots, unless they lie there already, as those of a known call do."""
        moved = [(slot, tensors[i]) for i, slot in self.borrowed if address(tensors[i]) != address(slot)] if call else []
        self.filled = self.nbytes + sum([unexpanded(slot).nbytes for slot, _ in moved])
        if not moved:
            return
        if self._pool.loans:
            self._pool.take_back(Spans(memory_of(slot) for slot, _ in moved))
        with torch.no_grad():
            Fill([slot for slot, _ in moved])([t for _, t in moved])

    def leave(self, tensors: Tensors, call: Call | None) -> None:
        """Copy what was written to the caller's tensors."""
        for i, slot, dense, moved in self._written:
            theirs = tensors[i]
            if address(theirs) == address(slot):
                if moved and not theirs.is_inference():
                    bump([theirs])
            elif not (moved or theirs.is_inference()):
                unexpanded(theirs.data).copy_(unexpanded(slot.data))
            elif dense and not (theirs.requires_grad or slot.requires_grad or theirs.is_inference()):
                theirs.copy_(slot)
            else:
                with torch.no_grad(), torch.inference_mode() if theirs.is_inference() else AS_IT_IS:
                    unexpanded(theirs).copy_(unexpanded(slot))
        if self._containers and call is not None:
            bump([call.containers[i] for i in self._containers])

    def explain(self) -> Iterator[str]:
        yield f"slots: {', '.join(map(_brief, self.slots)) or 'none'}"


def _brief(slot: Slot) -> str:
    t = slot.tensor
    marks = "".join([" borrowed" if slot.borrowed else "", " written" if slot.written else ""])
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}{marks}"
