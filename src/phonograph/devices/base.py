"""What a device must be able to do for the engine. There are two, and they behave alike (tests run on both)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from ..capture.dispatch import OperatorWatch
from ..capture.recording import Made, Program, Recording
from ..guards.hyperparameters import Dials
from ..guards.reachable import Reach
from ..memory.pool import Pool
from ..memory.spans import Spans
from ..state.rng import Rewind
from ..values.wording import Failure

__all__ = ["CapturePlan", "Captured", "Device"]


@dataclass(frozen=True, eq=False, kw_only=True)
class CapturePlan:
    """Terms on which a device captures one call."""

    call: Callable[[list[torch.Tensor], OperatorWatch], list[Any]]
    """Runs the function on the slots, and returns the leaves of its result."""
    results: Callable[[list[Any]], list[torch.Tensor]]
    """Tensors among these leaves, but for gradients that stay where they are."""
    saved: Callable[[], list[torch.Tensor]]
    """Tensors that autograd has saved for a backward outside. No run copies what shares memory with these."""
    reach: Reach
    """Objects that the function can refer to."""
    dials: Dials
    """Numbers that a replay can set anew."""
    arguments: Sequence[torch.Tensor]
    """Tensors among the call's arguments. The next two go by their order."""
    borrowed: Sequence[bool]
    """Arguments that are slots themselves: parameters, and results of other recordings."""
    shared: Sequence[torch.Tensor | None]
    """Slots of another recording that serve this one as well."""
    protected: Spans
    """Addresses at which no memory is taken, shared slots among them."""
    releasable: Sequence[tuple[int, int]] = ()
    """Protected places (address, bytes) that `watch.give_back` frees one by one."""
    expected: int = 0
    """Bytes that the capture will need: taken in one piece where the pool has less."""
    copied: float = 0
    """Bytes of results, at most, that each run copies to memory of the caller's own."""
    rewind: Rewind | None = None
    """Random states that a forward has read, and its backward, which this is, may set again."""

    def fed(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those of the arguments, or of their slots, that each run copies to the slots, or into which it copies."""
        return [t for t, borrowed in zip(tensors, self.borrowed, strict=True) if not borrowed]


class Captured(NamedTuple):
    """A dry run of a call. Nothing has been executed as far as the outside can tell."""

    result: list[Any]
    """Leaves of the call's result."""
    program: Program
    made: dict[int, Made]
    """By the storage identities of result tensors: their places."""
    watch: OperatorWatch
    used: list[torch.Tensor]
    """Slots of the call."""
    slots: list[torch.Tensor]
    """The same places for the time after: these tensors do not own their memory."""
    copied: tuple[int, ...] = ()
    """Storage identities of results that each run copies to memory of the caller's own."""
    others: tuple[Any, ...] = ()
    """Weak references to storages that the call made, that are no results, and that were still there at its end."""


class Device(Protocol):
    """One torch.device, its pool, and how to capture on it."""

    torch_device: torch.device
    pool: Pool
    roomy: int
    """Bytes: as long as all recordings need no more than this, each gets memory of its own."""
    failures: Sequence[Failure]
    """Exceptions of this device that end a capture."""
    first_uses: Sequence[str]
    """Parts of their message where the only fault is that something is used for the first time, which a live call mends."""

    def is_current(self, streams: Sequence[torch.Stream]) -> bool:
        """Whether the current stream is one of these."""

    def beside(self, arguments: Sequence[torch.Tensor], lasting: int, spread: bool) -> AbstractContextManager[None]:
        """Where live warm-up calls run: so that what they leave behind does not disturb a later capture, which will need
        places for these `arguments`. So many bytes are expected to be `lasting`: the states that an optimizer's step makes.
        It works on several streams if it is `spread`."""

    def release_unused(self) -> None:
        """Give back what is cached outside of the pool and used by nobody, where that is much."""

    def apart(self) -> AbstractContextManager[Any]:
        """Where captures are made, for what has to be made beside one. Gives the stream, if there are any."""

    def backward_begins(self, reads: Sequence[torch.Tensor]) -> None:
        """The backward of such a call begins, or goes on in what another has made. It reads these, which others have made."""

    def backward_passes(self, grads: Sequence[torch.Tensor]) -> None:
        """It may have made these, which others are about to read."""

    def backward_ends(self) -> None:
        """It has ended: release what it needed besides."""

    def once(self, call: Callable[[], Any], rewind: Rewind | None) -> Any:
        """Capture a call, play it, and forget it; returns its result."""

    def settle(self, recording: Recording) -> None:
        """A recording has been made, and all of its capture but it is gone."""

    def outlives(self, t: torch.Tensor) -> Any:
        """For a tensor whose contents outlive it during a capture: what can bring it back. Otherwise None."""

    def enter(self) -> None:
        """A replay begins on the current stream: it waits for whatever still reads what was given out on others, or within a
        backward the gradients of replays before."""

    def joining(self, lasting: bool, many: bool) -> AbstractContextManager[None]:
        """Where a node of autograd is made whose backward replays a recording. It gives gradients to `many` parameters. If
        `lasting`, those of some are added up where they were captured, and else on the current stream."""

    def anchor(self, place: Spans) -> Any:
        """What owns the pool's memory at a place: it stays for as long as this is referred to."""

    def capture(self, plan: CapturePlan) -> Captured:
        """Dry-run the call of a plan, and keep what it did as a program.

        Raises whatever the call raised, or `Refusal`; everything is then as before.
        """

    def tidy(self) -> None:
        """Return memory that nothing needs any more, if recordings have gone."""

    @property
    def pool_bytes(self) -> int:
        """Bytes of device memory that the pool holds."""

    @property
    def allocated(self) -> int:
        """Bytes of device memory that tensors have, as far as that is counted."""

    @property
    def spare(self) -> int:
        """Bytes that a call may well take besides the memory of recordings."""
