"""Seconds that attempts at one function may cost: a small share of what its calls have taken since it was recorded.

A capture does none of the user's work. It pays where its recording is played often enough. So what counts as *lost* is what
came to nothing: a capture that was refused, and a recording that went, or fits no more, before its replays had saved what it
had cost. As long as no more is lost than the share, attempts are free. After that a call runs live where it would have to be
captured, until the calls have taken long enough. The first attempt costs nothing. The second loss counts twice, the third
three times: what cannot be recorded soon costs no more than plain.

A capture that only shows where the call is to be cut (`fallback="auto"`) is lost until there is a recording, of whose cost it
is a part then. Replays that have to begin again are a cost, too: where it is more than others have saved, calls run live for a
while (`Backoff.diverged`).

Only live calls are timed, and attempts: a replay costs no look at a clock. It counts as what a live call takes, of which it
saves a half where no trial has measured it. Audits are not counted: that a stale recording is found comes first.

Ranks of one program have to decide alike, and their clocks do not tell the same: there all attempts are free. So they are where
a live call is an error (``fallback="error"``), and a recording that is to be kept (``keep="always"``) is no loss.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from .._torch.process_groups import several
from ..errors import Refusal
from ..options import Options
from ..statistics import Counters
from .player import Player

__all__ = ["SHARE", "Budget", "Unpaid", "now"]

SHARE = 0.05  # of the seconds of all calls
_START = 0.25  # seconds that nobody misses when a program starts
_SAVED = 0.5  # of a live call, by a replay that nobody has timed
_AT_FIRST = 3  # captures of the first attempt, each after the one before heard code run that reads more
_ROW = 8  # calls in a row for which no recording fitted, before not each looks at all of them


now: Callable[[], float] = time.perf_counter
"""Seconds. (Tests have another clock.)"""


class Budget:
    """Of one function."""

    def __init__(self, options: Options, counters: Counters) -> None:
        self._always = options.keep == "always"
        self._bound = options.fallback != "error"
        self._counters = counters
        self.reset()

    def reset(self) -> None:
        self.live = 0.0
        """Seconds of live calls."""
        self.least = math.inf
        """Seconds of the fastest. (In the first one, libraries are loaded.)"""
        self._first: float | None = None
        self._lost = 0.0
        self._losses = 0
        self.learning = 0.0
        """Seconds of captures that have only shown where to cut, for recordings that have not come yet."""
        self.why: Refusal | None = None
        """Why the last capture was refused that came to nothing."""

    def ran(self, seconds: float) -> None:
        """A live call has taken so long."""
        self.live += seconds
        self.least = min(self.least, seconds)

    # -- what is spent

    def attempted(self, seconds: float) -> None:
        """There was an attempt."""
        if self._first is None:
            self._first = seconds

    def lose(self, seconds: float, why: Refusal | None = None) -> None:
        """An attempt has come to nothing."""
        self.why = None if why is None else Refusal(why.reason, why.remedy, why.where)
        self._losses += 1
        self._lost += seconds * self._losses

    def gone(self, player: Player) -> None:
        """A recording is closed."""
        left = self.left(player)
        if left > 0.0:
            self.lose(left)
        elif player.played > 1:
            self._losses = 0

    def left(self, player: Player) -> float:
        """Seconds of a recording's cost that its replays have not saved so far."""
        if self._always:
            return 0.0
        return player.cost - player.played * (self.usual * _SAVED if player.saves is None else player.saves)

    # -- what may be

    def allows(self, behind: float = 0.0) -> bool:
        """Whether there may be another attempt, if so many seconds would be lost besides. A few captures of the first one may
        only show where the call is to be cut."""
        if not self._bound or self._first is None or several():
            return True
        free = self._first * (_AT_FIRST if self.learning else 1)
        return self._lost + behind + self.learning <= free + self._share

    def goes_on(self, seconds: float, once: float) -> bool:
        """Whether an attempt that has taken so long, and begins with `once`, may begin again."""
        if not self._bound or several():
            return True
        free = _AT_FIRST * once if self._first is None else self._first
        return self._lost + seconds <= free + self._share

    @property
    def _share(self) -> float:
        return _START + SHARE * (self.live + self._counters.replayed * self.usual)

    @property
    def usual(self) -> float:
        """Seconds of a live call; 0 before the first."""
        return self.least if self.least < math.inf else 0.0

    def beyond_usual(self, seconds: float) -> float:
        """What a live call that has taken so long has taken more than others."""
        return max(0.0, seconds - self.usual)

    def saved(self, players: Sequence[Player]) -> float:
        """Seconds that the replays of these have saved."""
        return sum([p.played * (self.usual * _SAVED if p.saves is None else p.saves) for p in players])

    def unfit(self, players: Sequence[Player]) -> float:
        """Seconds that would be lost if these fit no more."""
        return sum([max(0.0, self.left(player)) for player in players])


class Unpaid:
    """A signature for which there is no attempt until that is paid for, and meanwhile few looks at its recordings."""

    __slots__ = ("_behind", "_budget", "_due", "_played", "_row", "refusal")

    def __init__(self, budget: Budget, refusal: Refusal, behind: float) -> None:
        self._budget, self.refusal, self._behind = budget, refusal, behind
        self._row, self._played, self._due = 0, -1, 0.0

    def over(self) -> bool:
        """Whether there may be an attempt."""
        return self._budget.allows(self._behind)

    def looked(self, players: Sequence[Player], seconds: float) -> None:
        """None of these fits a call; to see that has taken so long."""
        played = sum([player.played for player in players])
        self._row, self._played = self._row + 1 if played == self._played else 0, played
        rarely = not players or self._row >= _ROW
        self._due = self._budget.live + seconds / SHARE if rarely else 0.0

    def unseen(self) -> bool:
        """Whether there is no look at them for this call."""
        return self._budget.live < self._due
