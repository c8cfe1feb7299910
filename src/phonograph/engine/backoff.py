"""How long a signature runs live: refusals and waits, and when it is tried again.

A refusal stands for as long as its grounds hold (`standing_refusals.py`), for good where there are none. A wait is over after
some calls, twice as many each time. What is counted here is counted for each signature in its `History`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Protocol

from .._torch.operators import OpOverload
from ..call.signature import Call
from ..devices.segments import Diverged
from ..errors import Refusal, Unseen
from ..guards.followed_numbers import Following
from ..guards.hyperparameters import GOES_ON
from ..guards.reachable import Reach
from ..options import Options
from ..python.identity import identity
from ..slots.gradients import GRAD
from ..statistics import Counters
from ..values.wording import Naming
from .budget import Budget, Unpaid
from .history import CaptureTerms, History
from .novel_signatures import Novelty
from .profitability import Trial
from .resting import Rest
from .shelf import Key, Shelf
from .standing_refusals import Grounds, grounds_of

__all__ = ["ATTEMPTS", "CHANGES", "FIRST_WAIT", "FORGIVEN", "UNLUCKY", "Backoff", "Described"]

ATTEMPTS = 3  # captures that may fail for a passing reason before a signature runs live
CHANGES = 8  # recordings that one signature may outgrow because something outside keeps changing...
FORGIVEN = 40  # ...where each is forgotten after so many replays: many do something every 50 or 100 steps
FIRST_WAIT = 64  # live calls after which such a signature is tried again, the first time
UNLUCKY = 4  # replays in turn that another number ends, before that is taken for the rule
UNSTEADY = 2  # replays in turn that another shape ends, likewise
STANDING = 4  # refusals of one signature that each stand while their grounds hold: in training, with another flag...
GROUNDS = 64  # refusals of one function that have grounds: to look at them takes time
UNSETTLED = 4  # forwards that gave way to others, in a loop that settles: a few in the first steps
SIGNATURES = 4096  # that are remembered
NAMED = 16  # changes that are remembered by name, for `explain`

EVER_NEW = "nearly every call has a new signature"
FEW_SHAPES = "pad to a few shapes, or raise max_recordings"
_STEADY = "zero_grad(set_to_none=False) where they are made, or pg.record the model that makes them: then they stay in place"
_VARIES = (
    "keep a number in a tensor, t.fill_(n), and a tensor in its place, t.copy_(new); or pass it as an argument; or keep it out "
    "of the recorded function"
)
_REPLACED = (
    "set the attributes of the one that is there, and put no other in its place; or pass it as an argument; or keep it out of "
    "the recorded function"
)
_BRANCHES = (
    "keep it in a tensor that add_() or fill_() writes, and use that: x.index_copy_(0, n, new), a mask; or pass what depends "
    "on it as an argument; or keep it out of the recorded function"
)


class Described(Protocol):
    """How calls are described (see `Describer`)."""

    marked: bool
    following: Following

    def named(self) -> Naming: ...

    def read_at(self, name: str, call: Call) -> str: ...


class Change:
    """Something that recordings rely on: how often it has changed, and where it is read (``file:line``)."""

    def __init__(self, where: str, of_object: bool = False) -> None:
        self.times = 0
        self.where, self.of_object = where, of_object

    def __str__(self) -> str:
        return f" (read at {self.where})" if self.where else ""


class Backoff:
    """With the signatures of one function; `split`: operators of it that run live between segments."""

    def __init__(
        self, options: Options, counters: Counters, shelf: Shelf, described: Described, split: frozenset[OpOverload]
    ) -> None:
        self._options, self._counters, self._shelf, self._described = options, counters, shelf, described
        self._split = split
        self.novelty, self.budget = Novelty(), Budget(options, counters)
        shelf.gone = self.budget.gone
        self.on_trial: dict[Key, Trial] = {}
        """Signatures of which the recordings have yet to show that they pay."""
        self.reset()

    def reset(self) -> None:
        """Forget everything that was learned."""
        self._histories: OrderedDict[Key, History] = OrderedDict()
        self._changes: dict[str, Change] = {}
        self._grounded: list[History] = []  # whose refusals have grounds, the oldest first
        self.rest = Rest()
        self.budget.reset()
        self.cuts: CaptureTerms | None = None
        """Where calls of the last signature are cut of which that was learned: others may have to be cut there, too."""
        self.displaced = 0
        """Recordings of forwards that gave way to others, because of tensors that were held."""
        self.novelty.reset(self._counters.calls)

    def history(self, key: Key, known: History | None = None) -> History:
        """What is known of a signature; `known`: of the same one, before it was called this."""
        history = self._histories.get(key)
        if history is None:
            history = self._histories[key] = known or History(self._split, self._described.marked)
            if known is None and self.cuts is not None:
                history.capture.cut_as(self.cuts)
        self._histories.move_to_end(key)
        if len(self._histories) > SIGNATURES:
            self._histories.popitem(last=False)
        return history

    def known(self, key: Key) -> History | None:
        """Likewise, if anything is."""
        return self._histories.get(key)

    @property
    def signatures(self) -> int:
        """How many are known."""
        return len(self._histories)

    # -- captures and changes

    def capture_failed(self, call: Call, refusal: Refusal, history: History, *, changed: bool) -> None:
        """Count a capture that was refused: after a few, or where another would be refused as well, the signature runs live for
        as long as the grounds hold."""
        refusal.history, history.attempts.refused = history, True
        last = refusal.final or history.attempts.failures + 1 >= ATTEMPTS
        found = grounds_of(refusal) if last and not refusal.this_call else None
        if refusal.this_call or refusal.failed:  # the live run will show whose fault it is
            history.attempts.grounds, history.attempts.failed = found, True
            history.changes.count -= changed and history.refused.over is None
            return
        history.attempts.failures += 1
        if last and isinstance(refusal, Unseen):  # that may run in any call
            history.wait_for(max(2, 1 << history.attempts.failures >> 2), refusal, spared=True)
        elif last:
            self.refuse(history, refusal, found)

    def live_run_succeeded(self, refusal: Refusal) -> None:
        """Count a capture that has failed where the live run has not: after a few the signature runs live."""
        history: History | None = refusal.history
        if history is None:
            return
        history.attempts.failures += 1
        if history.attempts.failures >= ATTEMPTS:
            self.refuse(history, refusal.but(failed=False, history=None), history.attempts.grounds)
            history.refused.settle()

    def changed(self, name: str, history: History, call: Call) -> Refusal | None:
        """Count a change of what has this name; the refusal where that was one too many in quick succession."""
        if name not in self._changes and len(self._changes) < NAMED:
            relied = [player.recording.table.constants for player in self._shelf.of(call.key)]
            of_object = any(constants.object_stands_at(name) for constants in relied)
            self._changes[name] = Change(self._described.read_at(name, call), of_object)
        change = self._changes.get(name, Change(""))
        change.times += 1
        changes = self.count_change(history)
        if changes <= CHANGES:
            return None
        if (before := _that_is_over(history)) is not None:
            return self.wait(history, before)
        # Those that only the call which made them has played would be looked at in each live call, and keep their memory.
        self._shelf.drop(call.key, lambda player: player.played <= 1)
        refusal = _fickle(name, change)
        if 2 * change.times < CHANGES:  # that alone would be no reason
            what = f"values that it relies on have changed {changes} times in quick succession, {name} the last"
            refusal = Refusal(what, _STEADY if name == GRAD else _VARIES, change.where)
        return self.wait(history, refusal)

    def pays_for(self, call: Call, history: History, broken: str | None) -> Refusal | None:
        """Why there is to be no attempt now: those before it have cost too much for what came of them."""
        behind = self.budget.unfit(self._shelf.of(call.key)) if broken is not None else 0.0
        if self.budget.allows(behind):
            return None
        if (before := _that_is_over(history)) is not None:
            refusal = before.but()
        elif broken is not None:
            change = self._changes.get(broken, Change(""))
            refusal = _once(broken, change.where) if change.times <= 1 else _fickle(broken, change)
        elif history.capture.why is not None:
            refusal = history.capture.why.plain()
        elif self.budget.why is not None:
            refusal = self.budget.why.but()
        else:
            refusal = Refusal(EVER_NEW, FEW_SHAPES)
        refusal.history = history
        history.refused.unpaid = Unpaid(self.budget, refusal, behind)
        return self.expected(refusal)

    def count_change(self, history: History) -> int:
        """Count a change; how many have come in quick succession."""
        return history.changes.note(self._counters.replayed + history.refused.calls, FORGIVEN)

    def diverged(self, history: History, key: Key, diverged: Diverged, seconds: float = 0.0) -> None:
        """Count a replay that could not go on, after so long. Recordings go for which that is the rule, or which are not wanted
        for more than their speed and have lost more of it than they have brought."""
        divergence, replays = history.divergence, self._counters.replayed
        divergence.lost, divergence.count = divergence.lost + seconds, divergence.count + 1
        divergence.in_turn = divergence.in_turn + 1 if divergence.replays == replays else 1
        divergence.replays = replays
        divergence.torn = divergence.torn or bool(diverged.torn)
        divergence.loses = self._loses(history, key)
        if not diverged.decided or divergence.in_turn >= UNLUCKY or divergence.loses:
            self._shelf.drop(key, lambda player: player.recording.live_parts)

    def unsteady(self, history: History, diverged: Diverged) -> bool:
        """Whether what ends replays is another in nearly each call. (A shape that is so only once ends the next one, too.)"""
        if diverged.decided:
            return history.divergence.in_turn >= UNLUCKY
        return history.divergence.in_turn > UNSTEADY or not self._counters.replayed

    def _loses(self, history: History, key: Key) -> bool:
        """Whether replays that could not go on have cost more than the others have saved."""
        divergence = history.divergence
        if history.capture.why is None or divergence.count <= UNLUCKY:
            return False
        return divergence.lost > self.budget.saved(self._shelf.of(key))

    def diverges(self, history: History, diverged: Diverged, reach: Reach | None) -> None:
        """Let a signature wait, or give it up, of which too many replays could not go on."""
        if history.divergence.loses or (diverged.decided and history.divergence.in_turn > UNLUCKY):
            reason = f"{diverged.said} reads another number nearly each time"
            history.divergence.begin()
            self.wait(history, history.capture.why or Refusal(reason, diverged.remedy, diverged.where))
        elif not diverged.decided and self.count_change(history) > CHANGES:
            history.wait.left = 0
            told = history.capture.why or diverged
            refusal = Refusal(told.reason, told.remedy, told.where, reach=reach)
            self.refuse(history, refusal, grounds_of(refusal))
            refusal.drop_references()

    # -- refusals

    def refuse(self, history: History, refusal: Refusal, grounds: Grounds | None) -> None:
        """Let a signature run live for as long as these grounds hold, for good where there are none. The grounds of the oldest
        refusals are given up; such a signature is tried again some time."""
        history.refuse(refusal, grounds, STANDING)
        self._grounded += [history] if grounds is not None else []
        if len(self._grounded) > GROUNDS and (oldest := self._grounded.pop(0)) is not history and oldest.refused.standing:
            self.wait(oldest, oldest.refused.standing[0].refusal)

    def wait(self, history: History, refusal: Refusal) -> Refusal:
        """Let a signature run live for a while, twice as long each time."""
        history.wait_for(FIRST_WAIT << history.wait.turns, refusal)
        history.wait.turns += 1
        return refusal

    def refused(self, history: History, given: Sequence[object] = ()) -> Refusal | None:
        """Why a call of this signature, and with these followed numbers, runs live, if it does. Perhaps the next few are not
        looked at."""
        rest, me = self.rest, identity(history)
        calls = rest.looked()
        self.novelty.passed(calls - 1)
        refusal = self.still(history, calls, given, alone=rest.of == me)
        rest.of = me
        return self.expected(refusal)

    def still(self, history: History, calls: int = 1, given: Sequence[object] = (), *, alone: bool = True) -> Refusal | None:
        """Likewise. Each call that asks counts as one that does, or as so many; `alone`: of this signature, as far as is
        known."""
        wait, refused = history.wait, history.refused
        if wait.left:
            spared = wait.spared is not None and refused.refusal is wait.spared
            wait.left = max(0, wait.left - (calls if alone or not spared else 1))
            if not wait.left:  # many things change for some time only: a weight that grows to 1, models that are made in turn
                refused.refusal = None
                if history.room.full_since is None and not spared:
                    history.changes.count = max(0, CHANGES - (1 << wait.turns >> 1))  # as there are several kinds of calls
        if refused.standing:
            refusal, change = refused.found(calls, given)
            if refusal is not None:
                refused.calls += calls
                refused.over, history.attempts.tried = None, False
                return refusal
            refused.refusal, refused.over = None, None if history.attempts.tried else change
        if refused.refusal is not None:
            return refused.refusal
        if refused.unpaid is not None and refused.unpaid.over():
            refused.unpaid = None
        return refused.unpaid.refusal if refused.unpaid is not None else None

    def at_a_glance(self, history: History) -> Refusal | None:
        """Likewise of a call that is known; None as well where there is to be a look at its recordings."""
        unpaid = history.refused.unpaid
        if unpaid is None or history.refused.standing or history.refused.refusal is not None:
            return self.refused(history)
        return unpaid.refusal if unpaid.unseen() and not unpaid.over() else None

    def expected(self, refusal: Refusal | None) -> Refusal | None:
        """Another call runs live of which that was to be expected: perhaps the next few are not looked at."""
        if refusal is not None and self._options.fallback != "error" and not (len(self._shelf) or self.on_trial):
            self.rest.note(refusal)
        return refusal

    # -- for the observers

    def changing(self) -> list[Refusal]:
        """What has changed, as it is refused where that goes on. Gradients that lie elsewhere come back to where they were."""
        return [_fickle(name, change) for name, change in self._changes.items() if name != GRAD]

    def place_of(self, change: str) -> str:
        """Where that is read which has changed; "" if it is not known."""
        return str(self._changes.get(change, ""))

    def explain(self) -> Iterator[str]:
        """Lines for `explain`."""
        novel = self.novelty.explain(self._counters.calls)
        if novel is not None:
            yield novel
        if self.displaced > UNSETTLED:
            yield (f"recorded anew {self.displaced}x: what is held of other results, or of gradients, lay where its recordings "
                   "work; drop it, or keep a clone, before the next call")  # fmt: skip
        yield from [f"changed {change.times}x: {name}{change}" for name, change in list(self._changes.items())]


def _fickle(name: str, change: Change) -> Refusal:
    """The refusal of calls that rely on something of this name, which changes."""
    varies = _REPLACED if change.of_object else _BRANCHES if name.endswith(GOES_ON) else _VARIES
    return Refusal(f"{name} changes from call to call", _STEADY if name == GRAD else varies, change.where)


def _once(name: str, where: str) -> Refusal:
    """The refusal of calls that rely on something of this name, which has changed once, as far as is known."""
    reason = f"{name} has changed, and what recordings have cost before is not made up for yet"
    return Refusal(reason, 'nothing, if that is rare: after more calls it is recorded again; or keep="always"', where)


def _that_is_over(history: History) -> Refusal | None:
    """The last refusal, if what has changed since is only what that went by: no recording relies on it."""
    return history.refused.standing[0].refusal if history.refused.over is not None and history.refused.standing else None
