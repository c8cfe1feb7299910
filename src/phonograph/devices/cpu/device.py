"""The CPU device: a tape of aten operators over fixed memory.

It is a device, not a mock. A call is captured by running it once under a `Tape`, which notes every operator below
autograd, and then undoing what it wrote, so that from outside a capture is a dry run, as on CUDA. A replay runs the
noted operators over the same addresses: no Python of the user's, no autograd, no allocation; `out=` variants where the
operator has one, and views cost nothing, because they were worked out once.

The memory between operators comes from an `Arena`, which reuses an address as soon as the tensor on it has died. Held
outputs are therefore really overwritten by a later replay if liveness is ever misjudged, here as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..._torch.tensors import storage_id
from ...capture.recording import Recording, memory_of
from ...memory.pool import Pool, unexpanded, unowned
from ...memory.spans import Spans
from ...python.putting_back import put_back
from ...state.rng import Rewind
from ...values.wording import Failure
from ..base import Captured, CapturePlan
from ..class_indices import one_hot_checked
from ..host_reads import ITEM, NUMBERS, READS, host_reads_refused, reads_value
from ..packed_sequences import sizes_relied_on
from ..slots import place_for
from .arena import Arena
from .steps import Place
from .tape import Tape

__all__ = ["CpuDevice"]


def _filled(slot: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(False):
        unexpanded(slot).copy_(unexpanded(t.detach()))
    return slot


class CpuDevice:
    """The one CPU device of the process."""

    roomy = 256 << 10
    failures: Sequence[Failure] = ()
    first_uses: Sequence[str] = ()

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.pool = Pool(self.torch_device)
        self._arena = Arena()

    # -- live calls before a capture

    def beside(self, arguments: Sequence[torch.Tensor], lasting: int, spread: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def backward_begins(self, reads: Sequence[torch.Tensor]) -> None:
        """Nothing: what a live call lies in is not the arena's."""

    def backward_passes(self, grads: Sequence[torch.Tensor]) -> None:
        """Nothing."""

    def backward_ends(self) -> None:
        """Nothing."""

    # -- captures

    def capture(self, plan: CapturePlan) -> Captured:
        self._arena.open(plan.protected)
        slots = [t if b else _filled(unowned(s), t) if s is not None else self._slot(t)
                 for t, b, s in zip(plan.arguments, plan.borrowed, plan.shared, strict=True)]  # fmt: skip
        tape = Tape(self.torch_device, plan.reach, slots, plan.borrowed, self._arena)
        tape.follow(plan.dials)
        tape.give_back = self._arena.give_back
        try:
            reads = host_reads_refused(tape, (*READS, *NUMBERS, ITEM), reads_value)
            with tape, reads, sizes_relied_on(tape), one_hot_checked(tape):
                result = plan.call(slots, tape)
            if tape.refusal is not None:
                raise tape.refusal
            tape.all_arrived()
            tape.look_at_bystanders()
            kept = {storage_id(t) for t in plan.saved()}
            returned = {storage_id(t) for t in plan.results(result)}
            leaving = returned | kept
            tape.close_arrays(leaving)
            others = tape.others(leaving)
            made = tape.close(leaving)
            footprint = Spans([*self._arena.used, *(memory_of(s) for s in plan.shared if s is not None)])
            program = tape.program(footprint, plan.fed(slots), (self._arena.under(footprint), slots))
        finally:
            put_back(tape.undo, tape.release)
        own = returned if plan.copies_all else made.keys() - kept
        free = {key: m.nbytes for key, m in made.items() if m.nbytes and key in own}
        out = tuple(free) if sum(free.values()) <= plan.copied else ()
        return Captured(result, program, made, tape, slots, slots, out, others=others)

    def _slot(self, t: torch.Tensor) -> torch.Tensor:
        shift, end = place_for(t)
        nbytes = end * t.element_size()
        place = Place(self._arena.take(nbytes), nbytes, planned=True)
        with torch.inference_mode(False):
            return _filled(torch.empty(0, dtype=t.dtype, device="cpu").set_(place.storage(), shift, t.size(), t.stride()), t)

    def once(self, call: Callable[[], Any], rewind: Rewind | None) -> Any:
        """Nothing can only run captured."""
        return call()

    def settle(self, recording: Recording) -> None:
        """Nothing: what a tape leaves behind lies outside of the arena."""

    def outlives(self, t: torch.Tensor) -> None:
        """Nothing does: memory that is freed may be written at once."""

    def apart(self) -> AbstractContextManager[None]:
        return nullcontext()

    # -- replays

    def enter(self) -> None:
        """Nothing: work on the CPU is done when a call returns."""

    def joining(self, lasting: bool, many: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def is_current(self, streams: Sequence[torch.Stream]) -> bool:
        return False

    # -- memory

    def anchor(self, place: Spans) -> object:
        return self._arena.under(place)

    def tidy(self) -> None:
        if self.pool.untidy:
            self.pool.untidy = False
            self._arena.trim(self.pool.footprints() | self.pool.protected())

    def release_unused(self) -> None:
        """Nothing: what is freed on the CPU is not kept."""

    @property
    def pool_bytes(self) -> int:
        return self._arena.nbytes

    @property
    def allocated(self) -> int:
        return 0

    @property
    def spare(self) -> int:
        return 1 << 30
