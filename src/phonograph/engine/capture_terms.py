"""The terms of a capture: what is asked for, and what earlier attempts have shown to be impossible.

An attempt that could not keep its terms raises one of the exceptions below. The transaction is taken back, the terms are
lowered, and the call is captured once more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ..autograd.backward import Backward
from ..autograd.saved_hooks import Tracing
from ..call.signature import Call
from ..capture.digest import Digest
from ..capture.live_results import Notes
from ..capture.recording import Recording
from ..devices.base import Device
from ..errors import Refusal
from ..guards.carried_state import Carried
from ..guards.followed_numbers import Following
from ..guards.reachable import Reach
from ..python.names_in_code import CYCLED, LIVE

__all__ = ["Advances", "Concessions", "Placement", "ReadAgain", "Request", "Terms", "Untraced", "calls_graph"]


@dataclass(frozen=True)
class Placement:
    """The place of a recording among others in the pool (`Clearance` says which addresses follow from it)."""

    blocked: int = 0
    """Recordings of the same signature that could not be played, because outputs are held in their memory. A second one takes
    turns with the first; a third hands out copies of its outputs, and is in nobody's way."""
    apart: bool = False
    """Shares memory with no other recording."""
    turns: bool = False
    """Several forwards wait for their backwards at the same time."""
    borrow: bool = False
    """Hands out its own memory (`outputs="borrow"`), small results too."""
    expected: int = 0
    """Bytes that are expected to be needed."""
    sibling: Recording | None = None
    """Another recording of this signature."""
    within: Recording | None = None
    """The capture comes to nothing, and works in the memory of this recording, which could be played now."""


@dataclass(frozen=True)
class Concessions:
    """Demands that are given up, because an attempt with them has failed."""

    follow: tuple[str, ...] = (*LIVE, *CYCLED)
    """Hyper-parameters that are followed where possible; others are baked in."""
    baked: frozenset[tuple[int, object]] = frozenset()
    """Places of numbers that are baked in, though they have changed."""
    retain: bool = False
    """Saved tensors are kept, though this is the last backward that reads them."""
    averages: bool = False
    """Modules that average gradients over ranks take part."""
    feeds: bool = False
    """Gradients that it finds may lie elsewhere in each call."""


@dataclass(frozen=True)
class Terms:
    """How a call is to be captured."""

    placement: Placement = Placement()
    tracing: Tracing | None = None
    """Follows what autograd saves: results may be attached to its graph, and the recording has a `backward` for them."""
    notes: Notes | None = None
    """Operators that ran live in a call of this signature."""
    ran: bool = False
    """One such call ran live to its end."""
    insists: bool = False
    """The last capture of such a call was refused."""
    numbers: list[Refusal] | None = None
    """Numbers that are read of tensors may be handed on: each replay reads them. How the first would be refused is noted in
    it."""
    steps_whole: bool = False
    """A step that a scaler may skip is no reason for a cut if it can be captured."""
    carried: Carried = field(default_factory=Carried)
    """State that the function carries from call to call, which is among the arguments."""
    following: Following | None = None
    """Numbers that change from call to call. It is told which of them cannot be followed."""
    varying: frozenset[str] = frozenset()
    """Names of tensors outside whose numbers are not the same in each call."""
    true_edges: bool = False
    """What shares no memory may run at the same time."""
    concessions: Concessions = Concessions()
    digest: Callable[[], Digest] | None = None
    """Makes that in which the operators of the call are noted."""

    def conceding(self, **given_up: Any) -> Terms:
        """These terms, with that given up as well."""
        return replace(self, concessions=replace(self.concessions, **given_up))


@dataclass(frozen=True)
class Request:
    """One call that is to be captured."""

    name: str
    function: Callable[..., object]
    call: Call
    reach: Reach
    device: Device
    terms: Terms

    @property
    def tracing(self) -> Tracing | None:
        return self.terms.tracing

    @property
    def backward(self) -> Backward | None:
        """The function, if it is the backward of another recording."""
        return self.function if isinstance(self.function, Backward) else None

    @property
    def whole(self) -> bool:
        """Whether the call is recorded with its backward, if it has one: neither is a recording of its own."""
        return self.tracing is None and self.backward is None

    @property
    def calls_graph(self) -> bool:
        """Whether the function is one of our own that calls a graph."""
        return calls_graph(self.function)


def calls_graph(function: object) -> bool:
    """Whether a function is one of our own that calls a graph."""
    return type(function).__module__.startswith("phonograph.") and hasattr(function, "with_state")


class Untraced(Exception):
    """A hyper-parameter could not be found in the program: only those in `fewer` can be followed."""

    def __init__(self, fewer: tuple[str, ...]) -> None:
        super().__init__()
        self.fewer = fewer


class Advances(Exception):
    """The capture has advanced numbers that were not followed. Now they are."""


class ReadAgain(Exception):
    """The capture has read saved tensors after it had given them back, or a replay of it may have to begin again."""
