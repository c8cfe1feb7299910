"""What a device must be able to do for the engine. There are two, and they behave alike (tests run on both)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from .._torch.dynamic import Leaves
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
    results: Callable[[Leaves], list[torch.Tensor]]
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

    result: list[object]
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
    """Bytes. As long as all recordings need no more than this, each gets memory of its own."""
    failures: Sequence[Failure]
    """Exceptions of this device that end a capture."""
    first_uses: Sequence[str]
    """Parts of the messages of exceptions that are raised at a first use only. A live call mends it."""

    # -- live calls before a capture

    def beside(self, arguments: Sequence[torch.Tensor], lasting: int, spread: bool) -> AbstractContextManager[None]:
        """Surrounds a warm-up call, so that what it leaves behind does not disturb a later capture.

        That will need places for these `arguments`. About `lasting` bytes stay: states that an optimizer's first step makes.
        It works on several streams if it is `spread`."""

    def backward_begins(self, reads: Sequence[torch.Tensor]) -> None:
        """Tells of the backward of a warm-up call, which reads these tensors of others."""

    def backward_passes(self, grads: Sequence[torch.Tensor]) -> None:
        """Tells of gradients that such a backward has made, and that others are about to read."""

    def backward_ends(self) -> None:
        """Releases what such a backward needed besides."""

    # -- captures

    def capture(self, plan: CapturePlan) -> Captured:
        """Dry-run the call of a plan, and keep what it did as a program.

        Raises whatever the call raised, or `Refusal`; everything is then as before.
        """

    def once(self, call: Callable[[], Any], rewind: Rewind | None) -> Any:
        """Capture a call, play it, and forget it. Returns its result."""

    def settle(self, recording: Recording) -> None:
        """Look at what a capture has left in the pool, when the recording is made and all else of the capture is gone."""

    def outlives(self, t: torch.Tensor) -> object:
        """What can bring a tensor back whose contents outlive it during a capture; None if they do not."""

    def apart(self) -> AbstractContextManager[torch.Stream | None]:
        """Surrounds what is made beside a capture, and has to lie where captures do. Gives their stream, if there is one."""

    # -- replays

    def enter(self) -> None:
        """Begin a replay on the current stream. It waits for readers on other streams of what was given out: of results, and
        within a backward of gradients."""

    def joining(self, lasting: bool, many: bool) -> AbstractContextManager[None]:
        """Surrounds the making of a node of autograd whose backward replays a recording.

        It gives gradients to `many` parameters. If `lasting`, some are added up where they were captured, and else on the
        current stream."""

    def is_current(self, streams: Sequence[torch.Stream]) -> bool:
        """Whether the current stream is one of these."""

    # -- memory

    def anchor(self, place: Spans) -> object:
        """The owner of the pool's memory at a place, which stays for as long as this is referred to."""

    def tidy(self) -> None:
        """Return memory that nothing needs any more, if recordings have gone."""

    def release_unused(self) -> None:
        """Give back what is cached outside of the pool and used by nobody, where that is much."""

    @property
    def pool_bytes(self) -> int:
        """Bytes of device memory that the pool holds."""

    @property
    def allocated(self) -> int:
        """Bytes of device memory that tensors have, as far as that is counted."""

    @property
    def spare(self) -> int:
        """Bytes that a call may take besides the memory of recordings."""
