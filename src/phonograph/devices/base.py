"""Interface of a device to the engine. There are two, `cpu` and `cuda`; the contract's tests run on both."""

from __future__ import annotations

import math
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
    """Parameters of one capture."""

    call: Callable[[list[torch.Tensor], OperatorWatch], Leaves]
    """Runs the function on the slots, and returns the leaves of its result."""
    results: Callable[[Leaves], list[torch.Tensor]]
    """Tensors among these leaves, without gradients that are not moved."""
    saved: Callable[[], list[torch.Tensor]]
    """Tensors that autograd has saved for a backward outside. Results that share memory with them are copied if all are."""
    reach: Reach
    """Objects that the function can reach."""
    dials: Dials
    """Numbers that a replay may change."""
    arguments: Sequence[torch.Tensor]
    """Tensor arguments. `borrowed` and `shared` have their order."""
    borrowed: Sequence[bool]
    """Whether the argument itself is the slot: a parameter, or a result of another recording."""
    shared: Sequence[torch.Tensor | None]
    """Slot of another recording that is used for this argument too."""
    protected: Spans
    """Addresses that the capture must not allocate, shared slots included."""
    releasable: Sequence[tuple[int, int]] = ()
    """Protected blocks (address, bytes) that `watch.give_back` frees one by one."""
    expected: int = 0
    """Bytes that the capture will need. They are reserved in one piece if the pool has less."""
    copied: float = 0
    """Bytes of results, at most, that each run copies to memory of the caller's own."""
    true_edges: bool = False
    """Nodes of its graph may run at the same time, where they share no memory."""
    rewind: Rewind | None = None
    """Random states that the forward of this backward has read, for recomputation."""

    @property
    def copies_all(self) -> bool:
        """Whether each result is copied, whatever it takes."""
        return self.copied == math.inf

    def fed(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Select the arguments that each run copies, or their slots."""
        return [t for t, borrowed in zip(tensors, self.borrowed, strict=True) if not borrowed]


class Captured(NamedTuple):
    """Result of a capture."""

    result: list[object]
    """Leaves of the call's result."""
    program: Program
    made: dict[int, Made]
    """Address of each result, by the identity of its storage."""
    watch: OperatorWatch
    used: list[torch.Tensor]
    """Slots of the call."""
    slots: list[torch.Tensor]
    """Slots for replays, at the same addresses. They do not own their memory."""
    copied: tuple[int, ...] = ()
    """Storage identities of results that each run copies to memory of the caller's own."""
    others: tuple[Any, ...] = ()
    """Weak references to other storages that were made by the call and alive at its end."""


class Device(Protocol):
    """One torch.device, its pool, and how to capture on it."""

    torch_device: torch.device
    pool: Pool
    roomy: int
    """Bytes of recordings up to which they do not share memory."""
    failures: Sequence[Failure]
    """Exceptions of this device that end a capture."""
    first_uses: Sequence[str]
    """Parts of messages of exceptions that only a first use raises. After a live call a capture succeeds."""

    # -- live calls before a capture

    def beside(self, arguments: Sequence[torch.Tensor], lasting: int, spread: bool) -> AbstractContextManager[None]:
        """Context of a warm-up call: it keeps the call's allocations out of the memory of a later capture.

        `arguments` will need slots. About `lasting` bytes will stay: states that an optimizer's first step makes. The call uses
        several streams if it is `spread`."""

    def backward_begins(self, reads: Sequence[torch.Tensor]) -> None:
        """Begin the backward of a warm-up call, which reads these tensors from outside."""

    def backward_passes(self, grads: Sequence[torch.Tensor]) -> None:
        """Hand gradients of such a backward to readers outside."""

    def backward_ends(self) -> None:
        """End such a backward."""

    # -- captures

    def capture(self, plan: CapturePlan) -> Captured:
        """Run the call of a plan dry, and return its work as a program.

        Raises the call's own exception, or `Refusal`. All state is then as before.
        """

    def once(self, call: Callable[[], Any], rewind: Rewind | None) -> Any:
        """Capture a call, play it, and forget it. Returns its result."""

    def settle(self, recording: Recording) -> None:
        """Check the pool after a capture, when everything but the recording is freed."""

    def outlives(self, t: torch.Tensor) -> object:
        """Handle by which a tensor that dies in a capture can be made again with its contents; None if they are lost."""

    def apart(self) -> AbstractContextManager[torch.Stream | None]:
        """Context for allocations beside a capture in the capture's memory. Gives the capture's stream, if there is one."""

    # -- replays

    def enter(self) -> None:
        """Begin a replay on the current stream: wait for other streams that have used results or, in a backward, gradients."""

    def joining(self, lasting: bool, many: bool) -> AbstractContextManager[None]:
        """Context that creates an autograd node whose backward replays a recording.

        The node has gradients for `many` parameters. If `lasting`, some are accumulated on the stream of the capture, otherwise
        all on the current stream."""

    def is_current(self, streams: Sequence[torch.Stream]) -> bool:
        """Whether the current stream is one of these."""

    # -- memory

    def anchor(self, place: Spans) -> object:
        """Object that keeps the pool's memory at these addresses while it is referenced."""

    def tidy(self) -> None:
        """Return the memory of dead recordings."""

    def release_unused(self) -> None:
        """Empty the cache of the allocator outside of the pool, if it is large."""

    @property
    def pool_bytes(self) -> int:
        """Bytes of device memory that the pool holds."""

    @property
    def allocated(self) -> int:
        """Bytes of device memory in tensors, as far as the allocator counts them."""

    @property
    def spare(self) -> int:
        """Bytes that a call may allocate outside of the pool."""
