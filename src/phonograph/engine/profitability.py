"""Trial of a recording: does it pay? Measured on the first calls of its signature; no extra call is made.

A replay is not free: the call is recognised, its arguments are copied, results are handed out, a graph is launched. Where a
function has few operators, or moves much memory for little work, its plain code may be faster. So the first replays are
timed; unless they are faster than so many operators can be called one by one, some calls run live and are timed as well.

What is compared is for how long a call keeps the program: the longer of two times. One is the host's; the other lies between
two events on the device's stream, for which nobody waits. A host that runs ahead of the device costs nothing, nor does a device
that waits for the host anyway. Where results have a backward outside of the call, what counts is the time until the next call:
to time that backward itself it would take hooks, which cost a live one more.

One slow call proves nothing. The first calls of a kind take longer, as they are looked at more closely and take memory: those
do not count. There are two rounds, in which calls are played and then four run live. The first tells whether one way takes
twice as long as the other; that is a verdict. A recording goes if its replays are slower both at their best and by their
median, by more than noise. Where both are as fast, it stays. A device may be behind: calls are played until it has come to
those that ran live.

While calls run live, the recordings of their signature are off the shelf: such a call costs what it would cost later. (That it
is looked at until then is not counted: later, most are let pass.) It takes memory besides that of the recordings, so where that
is much (`Device.spare`) there is none.

A module in a `DistributedDataParallel` is always tried live as well. Its recorded backward gives all gradients at once, so that
averaging them overlaps with nothing: whether that costs more than calling the operators does, only both times can tell.

Not on trial: recordings that give more than speed (`fallback="error"`, `verify`), recordings that communicate, on which all
ranks must decide alike, and those with `keep="always"`.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from .._torch.process_groups import several
from ..capture.recording import Recording
from ..errors import Refusal
from ..options import Options
from .history import History, Timed
from .player import Player
from .standing_refusals import Grounds

__all__ = ["OPERATOR", "SAMPLES", "Beside", "Clock", "Samples", "Took", "Trial", "Turn", "Unrewarding", "clock",
           "gradients_moved", "on_trial"]  # fmt: skip

SAMPLES = 6  # calls of each kind in a round: a multiple of the calls that there are in each step of a loop, mostly
ROUNDS = 2
LIVE = 4  # calls that run live in a round
_UNLIKE = {True: 2, False: 1}  # first calls of each kind: live ones are looked at more closely, and what they rely on is noted
NOISE = 1.02
_FAR = 2.0  # so many times as slow: there is nothing more to find out
OPERATOR = 1e-6  # seconds: no operator is called in less
_COPY = 1e-11  # seconds a byte, where memory is slow
_SLIGHT = 0.01  # of what a replay takes: where so much at most can be lost, nothing has to be tried
_PATIENCE = 256  # calls of which none could be counted, after which a recording stays


class Unrewarding(Refusal):
    """A recording does not pay. Nothing is wrong, and nobody is warned."""

    told = False


class Beside(Unrewarding):
    """A call runs live to find out whether its recording pays: it is counted (`Stats.timed`), and no words are said of it."""

    measures = True


class Clock:
    """What calls are timed by. (Tests have another.)"""

    def now(self) -> int:
        """Nanoseconds of the host."""
        return time.perf_counter_ns()

    def mark(self, device: torch.device) -> object:
        """What will know when the device has come here; None for the host itself."""
        if device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def times(self, took: Took) -> tuple[float, float] | None:
        """Seconds of the host and of the device; None if that has not come so far."""
        if took.host is None or not all(mark.query() for mark in took.marks):
            return None
        return took.host * 1e-9, took.marks[0].elapsed_time(took.marks[1]) * 1e-3 if took.marks else 0.0


clock = Clock()


class Took:
    """How long one call took, or how long it was to the next one."""

    __slots__ = ("begun", "device", "host", "live", "marks", "since")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.live = False
        self.host: int | None = None  # nanoseconds
        self.marks: tuple[Any, ...] = ()
        self.begin()

    def begin(self) -> None:
        """It begins now, whatever there was before."""
        self.begun, self.since = clock.mark(self.device), clock.now()

    @staticmethod
    def here(device: torch.device) -> Took | None:
        """A call that begins now; None if it is part of a capture of somebody else's, in which no time passes."""
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        return None if capturing else Took(device)

    def end(self) -> None:
        self._ends(clock.now(), clock.mark(self.device))

    def until(self, other: Took) -> None:
        """It counts until another call begins."""
        self._ends(other.since, other.begun)

    def _ends(self, now: int, mark: object) -> None:
        self.host = now - self.since
        self.marks = () if mark is None or self.begun is None else (self.begun, mark)


def _none() -> None:
    return None


class Samples:
    """Calls of two kinds: those that were played, and those that ran live."""

    def __init__(self) -> None:
        self._times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}  # live, played
        self._pending: list[Took] = []

    def add(self, took: Took) -> None:
        self._pending.append(took)

    def collect(self) -> int:
        """Find out how long those took that are over by now. How many have been found out."""
        before = len(self._pending)
        self._pending = [took for took in self._pending if not self._counted(took)]
        return before - len(self._pending)

    def _counted(self, took: Took) -> bool:
        times = clock.times(took)
        if times is not None:
            self._times[took.live].append(times)
        return times is not None

    def forget(self, took: Took) -> None:
        """This one is not to be counted."""
        self._pending = [other for other in self._pending if other is not took]

    @property
    def pending(self) -> bool:
        """Whether it is yet to be found out how long some took that ran live and are over."""
        return any(took.live and took.host is not None for took in self._pending)

    def count(self, live: bool) -> int:
        return len(self._times[live])

    def played(self) -> tuple[float, float]:
        """How long a replay takes: the medians of the host's times, and of the device's."""
        host, device = zip(*self._times[False], strict=True)
        return median(host), median(device)

    def _seconds(self, live: bool) -> list[float]:
        return [*map(max, self._times[live])]

    def slower(self, live: bool, by: float = NOISE) -> bool:
        """Whether calls of this kind are slower than the others, both at their best and by their median."""
        mine, others = self._seconds(live), self._seconds(not live)
        return min(mine) > by * min(others) and median(mine) > by * median(others)

    def timed(self, *, until_next: bool) -> Timed | None:
        """Medians, of both kinds where there are both."""
        if not self._times[False]:
            return None
        replay, live = (median(self._seconds(kind)) if self._times[kind] else None for kind in (False, True))
        return Timed(replay or 0.0, live, self.count(False), until_next)

    def __str__(self) -> str:
        played, live = (f"{median(self._seconds(kind)) * 1e6:.3g}" for kind in (False, True))
        return f"{played} us and the function itself {live} us (medians of {self.count(True)})"


def on_trial(recording: Recording, options: Options, *, averaged: bool = False, cut: bool = False) -> bool:
    """Whether a recording has to show that it pays. Its gradients may be `averaged` over ranks as they come. What is `cut` is
    nobody's wish, and no other rank's."""
    if options.keep != "pays" or options.fallback == "error" or options.verify or (recording.communicates and not cut):
        return False
    if recording.backward is None:
        return not options.is_part
    return averaged or not several()  # it may communicate; that is not known before it runs


class Turn(enum.Enum):
    """What comes next in a trial."""

    GO_ON = enum.auto()
    RUN_LIVE = enum.auto()
    PLAY = enum.auto()
    KEEP = enum.auto()
    DROP = enum.auto()


_moved = 0


def gradients_moved() -> int:
    """How many calls, of the whole process, have run live for a trial and left gradients elsewhere than their recordings do."""
    return _moved


class Trial:
    """Of the recordings of one signature."""

    def __init__(
        self, player: Player, history: History, *, may_run_live: bool, averaged: bool = False, cut: Refusal | None = None
    ) -> None:  # fmt: skip
        """`cut`: why such calls would run live if they were not cut into segments. Then there is no doubt in their favour."""
        self.cut = cut
        recording = player.recording
        self.key = recording.key
        self.history = history
        self.device = recording.device
        self._has_backward = recording.backward is not None
        self._moves_gradients = self._has_backward or bool(recording.table.gradients.parameters)
        self.aside: list[Player] = []  # the recordings, while calls run live
        self.noted = False
        self.fits = True
        """Whether one of these would have been played for the call that runs live: others are of another kind, and no
        comparison."""
        self.grounds: Grounds | None = None  # on which such a call relies, once that was noted
        self._over: Callable[[], None] = _none
        self.refusal = Beside("", history=history)
        self._operators = recording.program.operators
        self._copies = player.copies * _COPY
        self._may_run_live = may_run_live
        self._averaged = averaged
        self._live = False
        self._unlike = _UNLIKE[False]  # calls that do not count
        self._ran = self._played = 0  # live calls of this round, and replays since calls are played again
        self._unfit = 0  # live calls in turn that are no comparison
        self._rounds = 1
        self._idle = 0
        self._last: Took | None = None  # of which the end is yet to come
        self._samples = Samples()

    def next(self, took: Took) -> None:
        """The next call of the function begins."""
        if self._last is not None and self._last.device == took.device:
            self._last.until(took)
        self._last = None

    def see(self, took: Took, live: bool) -> None:
        """Such a call took so long."""
        global _moved
        _moved += live and self._moves_gradients
        self._played += not live
        self._unfit = self._unfit + 1 if live and not self.fits else 0
        if live is not self._live or took.device != self.device or (live and not self.fits):
            return
        self._ran += live
        if self._unlike:
            self._unlike -= 1
            return
        took.live = live
        if self._has_backward:
            took.host, self._last = None, took
        self._samples.add(took)

    def set_aside(self, players: list[Player]) -> None:
        """Calls run live from now on, and these are not there."""
        self.aside = players
        self._over = self.history.refused.stand_by(self.refusal)

    def take_back(self) -> list[Player]:
        """Calls are played again, if these are put back."""
        players, self.aside = self.aside, []
        self._over()
        self._over = _none
        return players

    def turn(self) -> Turn:
        """What comes next, after each call of the function. It is taken for done."""
        self._idle = 0 if self._samples.collect() else self._idle + 1
        turn = self._next()
        if turn in (Turn.RUN_LIVE, Turn.PLAY):
            self._changes(turn is Turn.RUN_LIVE)
        return turn

    def _changes(self, live: bool) -> None:
        """Calls are of the other kind from now on. Those that last until the next call have the change in them."""
        first = self._rounds == 1 and live
        self._unlike = _UNLIKE[True] - self._has_backward if first else 0
        self._rounds += not live
        self._live, self._ran, self._played, self._unfit = live, 0, 0, 0
        if self._last is not None:
            self._samples.forget(self._last)
            self._last = None

    def _next(self) -> Turn:
        if self._idle > _PATIENCE and self.cut is None:
            return Turn.KEEP
        if self._unfit > LIVE:  # what was recorded has changed, and is to be recorded anew
            return Turn.PLAY
        if self._live:
            return Turn.GO_ON if self._ran < LIVE else self._compared() or Turn.PLAY
        if self._rounds > 1 and (verdict := self._compared()) is not None:
            return verdict
        if self._rounds > ROUNDS or self._samples.count(False) < SAMPLES * self._rounds or not self._played:
            return Turn.GO_ON
        doubt = self._rounds > 1 or (self._may_run_live and (self.cut is not None or self._in_doubt()))
        return Turn.RUN_LIVE if doubt else self._undecided

    def _compared(self) -> Turn | None:
        """The verdict, as soon as there is one: when all that ran live is timed."""
        if self._samples.pending:
            return None
        over = self._rounds > ROUNDS or (self._live and self._rounds == ROUNDS)
        by = NOISE if over else _FAR
        if self._samples.count(True) and self._samples.slower(False, by):
            return Turn.DROP
        if self._samples.count(True) and self._samples.slower(True, by):
            return Turn.KEEP
        return self._undecided if over else None

    @property
    def _undecided(self) -> Turn:
        """What comes of it where neither way is known to be faster."""
        return Turn.KEEP if self.cut is None else Turn.DROP

    def _in_doubt(self) -> bool:
        """Whether the operators might be faster when they are called one by one. They keep the host for some time then; on the
        device they take as long either way, but for the copies, and what would go on beside them."""
        if self._averaged:
            return True
        host, device = self._samples.played()
        slight, least = _SLIGHT * device, self._operators * OPERATOR
        return host + self._copies > slight and (host > least or (device > least and self._copies > slight))

    def timed(self) -> Timed | None:
        """What was found so far; None before a replay was timed."""
        return self._samples.timed(until_next=self._has_backward)

    def verdict(self) -> Refusal:
        """Why such calls run live from now on."""
        if self.cut is None:
            return Unrewarding(f"a replay takes {self._samples}", 'keep="always" keeps the recording', history=self.history)
        both = self._samples.count(True) and self._samples.count(False)
        found = f"cut out there, a replay takes {self._samples}" if both else "cut out there, it could not be timed"
        return Refusal(self.cut.reason, f"{found}; {self.cut.remedy}", self.cut.where, history=self.history)
