"""Facts about one signature besides its recordings, by subject. `policy.py` decides by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .._torch.operators import OpOverload
from ..capture.live_results import Notes
from ..capture.whole_modules import Whole
from ..errors import Refusal
from ..values.host_scalars import Site
from .budget import Unpaid
from .standing_refusals import Grounds, Lasting, Standing

__all__ = ["Arrivals", "Attempts", "CaptureTerms", "Changes", "Divergence", "History", "LiveCalls", "Refused", "Room", "Timed",
           "Wait"]  # fmt: skip


@dataclass(slots=True)
class Arrivals:
    """Arrivals of calls that no recording could answer."""

    first: int | None = None
    """When it came first, on the clock of `Player.used`."""
    again: bool = False
    """It has come a second time."""
    warm_ups: int = 0
    live_since: set[bool] = field(default_factory=set)
    """A live call was made since gradients (True), or anything else (False), were replaced."""
    turned: set[object] = field(default_factory=set)
    """Decisions of live calls that differed from those of the recordings of that time."""
    vain: int = 0
    """Recordings made in turn, without a live call, of which none was replayed."""
    moved: int = 0
    """`gradients_moved` when gradients were last found elsewhere, or it came first."""


@dataclass(slots=True)
class LiveCalls:
    """What live calls have shown."""

    notes: Notes
    raised: bool = False
    """The last one has, so that its notes say nothing of the next."""
    """Results of live operators and marked functions in the last one."""
    ended: bool = False
    """One has come to its end: what begins with the first one has begun."""
    ran_backward: bool = False
    """One has had a backward, from all of its results."""
    averages: bool = False
    """One has averaged gradients with other ranks."""
    nbytes: int = 0
    """Bytes that the last one has left on the device: its results, and what its backward will read."""
    took: object = None
    """How long the last one took (`profitability.Took`)."""


class Timed(NamedTuple):
    """Seconds of a replay and of a live call (None: none was timed), by the medians of so many calls; `until_next`: from one to
    the next."""

    replay: float
    live: float | None
    calls: int
    until_next: bool

    @property
    def saves(self) -> float | None:
        """Seconds that a replay saves; None if no live call was timed."""
        return None if self.live is None else max(0.0, self.live - self.replay)


@dataclass(slots=True)
class CaptureTerms:
    """Settings of the next capture, learned from live calls and earlier captures."""

    split: frozenset[OpOverload]
    """Operators that run live between segments."""
    decisive: frozenset[Site] = frozenset()
    """Sites where numbers are read by which the call goes on."""
    wholes: frozenset[Whole] = frozenset()
    """Modules that run live as a whole between segments."""
    why: Refusal | None = None
    """Refusal of the uncut call, if `fallback="auto"` cuts it."""
    attached: bool = False
    """Results are attached to the graph of autograd, and have a backward outside."""
    device: torch.device | None = None
    """Device of calls without a tensor."""
    gradients_lay_elsewhere: int = 0
    """Recordings made because gradients had other addresses than before."""
    tensors_replaced: int = 0
    """Recordings made where small tensors outside had been replaced by others."""

    def cut_as(self, other: CaptureTerms) -> None:
        """Begin with the cuts of another signature."""
        self.split, self.decisive, self.wholes, self.why = other.split, other.decisive, other.wholes, other.why


@dataclass(slots=True)
class Attempts:
    """Captures."""

    failures: int = 0
    learning: float = 0.0
    """Seconds of captures that only showed where to cut the call."""
    refused: bool = False
    """The last one was."""
    tried: bool = False
    """One was made since the last refusal."""
    failed: bool = False
    """The last one has failed, so that a live call was made."""
    grounds: Grounds | None = None
    """Grounds of a failed capture, until the live run shows whether the function itself fails."""


@dataclass(slots=True)
class Changes:
    """Changes of what a recording, or a refusal, relied on."""

    count: int = 0
    """Those in quick succession."""
    at: int = 0
    """When the last was counted: replays of the function, and live calls for which a refusal stood."""

    def note(self, now: int, forgiven: int) -> int:
        """Count one; how many have come in quick succession. Each is forgotten after so many replays."""
        forgotten, rest = divmod(now - self.at, forgiven)
        self.count, self.at = max(0, self.count - forgotten) + 1, now - rest
        return self.count


@dataclass(slots=True)
class Refused:
    """Why calls run live, and for how long."""

    refusal: Refusal | None = None
    standing: list[Standing] = field(default_factory=list)
    """The last refusals, the newest first, each for as long as its grounds hold."""
    unsettled: Grounds | None = None
    """Grounds that were taken down since the last live call."""
    over: str | None = None
    """What has changed since the last refusal, if there was no capture since."""
    calls: int = 0
    """Live calls for which a refusal stood."""
    unpaid: Unpaid | None = None
    """There is no attempt until there has been time for one (`budget.py`)."""

    def say(self, refusal: Refusal) -> None:
        """Replace the last refusal by another wording."""
        self.refusal = refusal
        self.standing[:1] = [standing._replace(refusal=refusal) for standing in self.standing[:1]]

    def stand_by(self, refusal: Refusal) -> Callable[[], None]:
        """Run live until the function returned is called; then all is as before."""
        before = self.refusal, self.standing
        self.refusal, self.standing = refusal, [Standing(refusal, Lasting())]

        def over() -> None:
            self.refusal, self.standing = before

        return over

    def found(self, calls: int, given: Sequence[object]) -> tuple[Refusal | None, str | None]:
        """A refusal that still stands for a call that is `given` these numbers, or what has changed of which the last one says
        that it does not."""
        change = None
        for refusal, grounds in self.standing:
            now = grounds.changed(calls, given)
            if now is None:
                return refusal, None
            change = change or now
        return None, change

    def settle(self) -> None:
        """Note that a live call was made of what was refused."""
        if self.unsettled is not None:
            self.unsettled.settle()
            self.unsettled = None


@dataclass(slots=True)
class Wait:
    """Live calls until a refusal is over that need not be for ever."""

    left: int = 0
    turns: int = 0
    """Waits so far because something changed: each is twice as long as the one before."""
    spared: Refusal | None = None
    """The refusal, where it is of what has not run yet."""


@dataclass(slots=True)
class Room:
    """Its place on a full shelf."""

    full_since: int | None = None
    """When there was none, on the clock of `Player.used`."""
    turns: int = 0
    """How often."""


@dataclass(slots=True)
class Divergence:
    """Replays that could not go on after a live operator."""

    in_turn: int = 0
    replays: int = -1
    """Replays of the function at the last one."""
    lost: float = 0.0
    """Seconds that they have cost, besides what such a call takes live..."""
    count: int = 0
    """...so many, since the last time that they were too many."""
    loses: bool = False
    """They have cost more than other replays have saved."""
    torn: bool = False
    """A marked function has done what a replay could not go on after."""

    def begin(self) -> None:
        """Count from now on."""
        self.lost, self.count, self.loses = 0.0, 0, False


class History:
    """Of one signature."""

    __slots__ = ("arrivals", "attempts", "capture", "changes", "divergence", "live", "pays", "refused", "room", "timed",
                 "untold", "wait")  # fmt: skip

    def __init__(self, split: frozenset[OpOverload], marked: bool) -> None:
        """`split`: operators that run live between segments; so do functions that are `marked`."""
        self.arrivals, self.changes, self.room = Arrivals(), Changes(), Room()
        self.attempts, self.refused, self.wait = Attempts(), Refused(), Wait()
        self.live, self.capture, self.divergence = LiveCalls(Notes(split, None, marked)), CaptureTerms(split), Divergence()
        self.pays = False  # its recordings have been found to pay, or not to be worth a trial
        self.timed: Timed | None = None  # what the trial of its recordings has found
        self.untold = 0  # calls that did not show whether they may be padded

    @property
    def since(self) -> int | None:
        """The time since when a recording that was not played may give its place to this signature: its last rejection for want
        of room, or its first call; None before the second call."""
        if self.room.full_since is not None:
            return self.room.full_since
        return self.arrivals.first if self.arrivals.again else None

    def on_approval(self, why: Refusal) -> None:
        """It is cut into segments where it would run live for this reason, and has to show that this pays."""
        if self.capture.why is None:
            self.capture.why, self.pays = why, False

    def refuse(self, refusal: Refusal, grounds: Grounds | None = None, most: int = 1) -> None:
        """Run live for as long as these grounds hold, for good where there are none. At most so many refusals with grounds
        stand."""
        refused, self.attempts.tried = self.refused, False
        refused.refusal, refused.unsettled = refusal, grounds
        refused.standing = [Standing(refusal, grounds), *refused.standing[: most - 1]] if grounds is not None else []

    def wait_for(self, calls: int, refusal: Refusal, *, spared: bool = False) -> None:
        """Run live for so many calls; `spared`: for what has not run yet."""
        self.refuse(refusal)
        self.wait.left = calls
        if spared:
            self.wait.spared = refusal

    def begin_again(self, refusal: Refusal) -> None:
        """Be captured in another way; this refusal does not count."""
        self.attempts.failures, self.refused.refusal, self.wait.left = 0, None, 0
        self.refused.standing = [standing for standing in self.refused.standing if standing.refusal is not refusal]
