"""What is known of one signature besides its recordings: what it takes to record it, and for how long it runs live."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..capture.live_results import Notes
from ..errors import Refusal
from .standing_refusals import Grounds, Lasting, Standing

__all__ = ["CHANGES", "PATIENCE", "History"]

CHANGES = 8  # recordings that one signature may outgrow because something outside keeps changing...
_FORGIVEN = 40  # ...where each is forgotten after so many replays: many do something every 50 or 100 steps
_STANDING = 4  # refusals of one signature that each stand while their grounds hold: in training, with another flag...
_ROOM = 8  # live calls of one signature, after which it takes the place of a recording that was not played meanwhile
_SPARED = 16  # live calls, after which a signature is tried although others like it could not be recorded
PATIENCE = 64  # live calls after which it is tried again, the first time; each time it waits twice as long


class History:
    """Of one signature."""

    __slots__ = ("attached", "attempts", "averages", "changes", "crowded", "decisive", "device", "diverged", "failed",
                 "failing", "held", "left", "met", "notes", "over", "patience", "pays", "ran", "ran_backward", "refusal",
                 "repeats", "replays", "room", "since_diverged", "spared", "split", "standing", "torn", "tried",
                 "unsettled", "untold", "waits", "warm", "warm_again")  # fmt: skip

    def __init__(self, split: frozenset[Any], marked: bool) -> None:
        self.warm = 0
        self.met: int | None = None  # when it came first (see `Player.used`)
        self.repeats = False  # it has come again
        self.averages = False  # a live call has averaged gradients with other ranks
        self.ran = False  # a live call has come to its end: what begins with the first one has begun
        self.ran_backward = False  # a live call has had a backward, from all of its results
        self.warm_again: set[bool] = set()  # a live call was made since gradients (True), or anything else, changed
        self.failed = False  # a capture has, so that a live call was made
        self.attached = False  # results are attached to the graph of autograd, and have a backward outside
        self.split = split  # operators that run live between segments
        self.decisive: frozenset[Any] = frozenset()  # sites where numbers are read by which the call goes on
        self.notes = Notes(split, None, marked)  # what these, and marked functions, gave in the last live call
        self.spared: Refusal | None = None  # why it is not tried for some calls: of what others have, or has not run yet
        self.diverged = 0  # calls in turn in which a replay could not go on...
        self.since_diverged = -1  # ...and how many replays the function had then
        self.torn = False  # a marked function has done what a replay could not go on after
        self.device: torch.device | None = None  # where calls without any tensor work, as far as a capture has shown it
        self.left = 0  # bytes that the last live call has left on the device: its results, and what its backward will read
        self.attempts = 0
        self.untold = 0  # calls that did not show whether they may be padded
        self.changes = 0
        self.replays = 0  # of the function, and live calls for which a refusal stood, when the last change was counted
        self.refusal: Refusal | None = None
        self.standing: list[Standing] = []  # the last refusals, the newest first, each for as long as its grounds hold
        self.unsettled: Grounds | None = None  # no live call was made since they were taken down
        self.failing: Grounds | None = None  # those of a capture that failed; the live run has still to show whose fault it is
        self.over: str | None = None  # what has changed since the last refusal, if it was not tried again since
        self.tried = False  # whether it was
        self.pays = False  # its recordings have been found to pay, or not to be worth a trial
        self.held = 0  # live calls for which a refusal stood
        self.patience = PATIENCE
        self.crowded: int | None = None  # when there was no room for a recording of it (see `Player.used`)
        self.room = _ROOM  # live calls after which there may be room, the next time
        self.waits = 0  # live calls until the refusal is over, of one that need not be for ever

    def refuse(self, refusal: Refusal, grounds: Grounds | None = None) -> None:
        """It runs live, for as long as these grounds hold; for good where they are not known."""
        self.refusal, self.unsettled, self.tried = refusal, grounds, False
        self.standing = [Standing(refusal, grounds), *self.standing[: _STANDING - 1]] if grounds is not None else []

    def say(self, refusal: Refusal) -> None:
        """What is said instead of the last refusal."""
        self.refusal = refusal
        self.standing[:1] = [standing._replace(refusal=refusal) for standing in self.standing[:1]]

    def stand_by(self, refusal: Refusal) -> Callable[[], None]:
        """It runs live until what is returned is called; then all is as before."""
        before = self.refusal, self.standing
        self.refusal, self.standing = refusal, [Standing(refusal, Lasting())]

        def over() -> None:
            self.refusal, self.standing = before

        return over

    def wait(self, refusal: Refusal) -> Refusal:
        """Something has changed too often: it runs live, for a while."""
        self.refuse(refusal)
        self.waits = self.patience
        self.patience *= 2
        return refusal

    def spare(self, refusal: Refusal) -> None:
        """Others like it could not be recorded: it is tried if it comes again and again."""
        self.refuse(refusal)
        self.waits, self.spared = _SPARED, refusal

    def unseen(self, refusal: Refusal) -> None:
        """Something has not run yet, and may do so in any call: it is tried after twice as many calls each time."""
        self.refuse(refusal)
        self.waits, self.spared = max(2, 1 << self.attempts >> 2), refusal

    def begin_again(self, refusal: Refusal) -> None:
        """It is to be captured in another way, and this refusal does not count."""
        self.attempts, self.refusal, self.waits = 0, None, 0
        self.standing = [standing for standing in self.standing if standing.refusal is not refusal]

    @property
    def since(self) -> int | None:
        """When it has come, and a recording that was not played since may give place to one of it: when there was no room last
        time, or when it came first; None if that is now."""
        return self.crowded if self.crowded is not None else self.met if self.repeats else None

    def still(self, calls: int = 1, *, alone: bool = True) -> Refusal | None:
        """Why this call runs live, if it does. Each call that asks counts as one that does, or as so many; `alone`: of this
        signature, as far as is known."""
        if self.waits:
            spared = self.spared is not None and self.refusal is self.spared
            self.waits = max(0, self.waits - (calls if alone or not spared else 1))
            if not self.waits:  # many things change for some time only: a weight that grows to 1, models that are made in turn
                self.refusal = None
                if self.crowded is None and not spared:
                    self.changes = CHANGES - 1
        if not self.standing:
            return self.refusal
        change = None
        for refusal, grounds in self.standing:  # the last one first
            found = grounds.changed(calls)
            if found is None:
                self.held += calls
                self.over, self.tried = None, False
                return refusal
            change = change or found
        self.refusal, self.over = None, None if self.tried else change
        return None

    def settle(self) -> None:
        """A live call was made of what was refused."""
        if self.unsettled is not None:
            self.unsettled.settle()
            self.unsettled = None

    def changed(self, replays: int) -> int:
        """Count a change of what a recording, or a refusal, relied on; how many have come in too quick succession."""
        forgiven, rest = divmod(replays + self.held - self.replays, _FORGIVEN)
        self.changes = max(0, self.changes - forgiven) + 1
        self.replays = replays + self.held - rest
        return self.changes
