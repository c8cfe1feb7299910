"""Checking a function before it is recorded: all that stands in the way, and what a recording gives.

A few calls are made of it, each with all that a call does: one as it is, so that nothing happens for the first time later;
some that are timed; one that is looked at (`look.py`), which notes every obstacle and lets it happen; and then some through a
recorded function, which has the last word: what it records is no obstacle, and what it refuses is one, seen or not. What is
refused is tried once more with cuts (``fallback="split"``), so that nothing is advised that was not seen to work.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from .._torch import modules as torch_modules
from ..call.differences import differing
from ..call.signature import Call
from ..errors import Refusal, RunsLive
from ..guards.unwatchable import NETWORK, in_trainer
from ..options import Options
from ..values.keys import NoSignature
from ..values.pytree_paths import path_to
from .contained import Contained
from .describer import Describer
from .findings import Findings, Obstacle
from .look import Look, look_at
from .novel_signatures import difference, ever_new, values_that_differ
from .recorded import Recorded

__all__ = ["Checking", "check"]

_TIMED = 3  # live calls; and replays
_TRIES = 5  # calls within which a function is recorded, or never; the first is its warm-up


def check(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], name: str | None = None) -> Findings:
    """Call the function with these arguments until all is known."""
    checking = Checking(function, name)
    while not checking.done:
        checking(*args, **kwargs)
    return checking.findings()


class _Took(NamedTuple):
    """Milliseconds of a call, until it returned and until the device was done."""

    host: float | None = None
    whole: float | None = None


class _Trial:
    """Calls through a recorded function: whether they are recorded, and how long replays take."""

    def __init__(self, recorded: Recorded[..., Any]) -> None:
        self.recorded = recorded
        self.tried = 0
        self.replays: list[_Took] = []

    @property
    def done(self) -> bool:
        tries = 2 * _TRIES if self.recorded.changing else _TRIES  # what has changed once may be steady from then on
        return bool(self.recorded.refusals) or self.tried >= tries or len(self.replays) >= _TIMED

    def call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        before = self.recorded.stats()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RunsLive)  # they are what is reported
            result, took = _timed(self.recorded, args, kwargs)
        now = self.recorded.stats()
        if now.replayed > before.replayed and now.recorded == before.recorded:
            self.replays.append(took)
        else:
            self.tried += 1
        return result


@dataclass
class _Steps:
    """How far it is."""

    live: list[_Took] = field(default_factory=list)
    look: Look | None = None
    whole: _Trial | None = None
    cut: _Trial | None = None
    """With cuts, once the whole was refused."""


class Checking:
    """Stands in the place of a function, and does what that does; each call finds out something."""

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        self._module = function if isinstance(function, torch.nn.Module) else None
        self._options = Options(fallback="live")
        if isinstance(function, Recorded):
            self.like(function.options)
            function = function.__wrapped__
        self._owner = getattr(function, "__self__", function)
        self._function = torch_modules.own_call(function) if isinstance(function, torch.nn.Module) else function
        own = type(function).__qualname__
        self.name = name or str(getattr(function, "__qualname__", own))
        self._describer = Describer(self.name, self._function, lambda: self.calls, marked=False)
        self._differs = _Differs(self._describer)
        self.calls = 0
        self._busy = False
        self.ended: Callable[[], None] = _nothing
        """Called when a call has returned."""
        self.recording: Callable[[], AbstractContextManager[object]] = nullcontext
        """Entered around calls through a recorded function."""
        self._steps = _Steps()

    def like(self, options: Options) -> None:
        """Record as the user does. (What pads or takes several steps a call is another function.)"""
        if not options.shapes and options.steps is None:
            cuts = options.fallback == "split"
            self._options = replace(options, fallback="split" if cuts else "live", verify=0, audit=0)

    @property
    def looked(self) -> bool:
        """Whether there were calls enough for a look at one."""
        return self._steps.look is not None

    @property
    def done(self) -> bool:
        """Whether more calls would show nothing more."""
        whole, cut = self._steps.whole, self._steps.cut
        return whole is not None and whole.done and (not whole.recorded.refusals or (cut is not None and cut.done))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._busy:  # it calls itself
            return self._function(*args, **kwargs)
        self._busy, self.calls = True, self.calls + 1
        try:
            result = self._next(args, kwargs)
        finally:
            self._busy = False
        self.ended()
        return result

    def _next(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.calls == 1 or self.done:
            return self._function(*args, **kwargs)
        self._differs.note(args, kwargs)
        steps = self._steps
        if len(steps.live) < _TIMED:
            result, took = _timed(self._function, args, kwargs)
            steps.live.append(took)
            return result
        if steps.look is None:
            result, steps.look = look_at(self._function, args, kwargs, self._describer)
            return result
        return self._through_recorded(args, kwargs)

    def _through_recorded(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        steps = self._steps
        if steps.whole is None:
            steps.whole = self._trial(self._options)
        if not steps.whole.done:
            trial = steps.whole
        else:
            trial = steps.cut = steps.cut or self._trial(replace(self._options, fallback="split"))
        with self.recording():
            return trial.call(args, kwargs)

    def _trial(self, options: Options) -> _Trial:
        recorded = Recorded(self._function, replace(options, name=self.name, keep="always"))
        if self._module is not None:
            recorded.of(self._module)
        return _Trial(recorded)

    def findings(self) -> Findings:
        """All that was found so far. Frees what was recorded."""
        look, whole, cut = self._steps.look or Look(), self._steps.whole, self._steps.cut
        replays = [] if whole is None else whole.replays
        refusals = [] if whole is None else whole.recorded.refusals or ([] if replays else whole.recorded.changing)
        made = whole is not None and whole.recorded.stats().recorded > 0 and not refusals
        records = made and (bool(replays) or not look.seen)  # calls may take turns: of these only some were recorded
        obstacles = [] if records else [*_obstacles(look, refusals)]
        obstacles += self._differs.obstacles(played=bool(replays))
        if in_trainer([self._owner] if isinstance(self._owner, torch.nn.Module) else ()):
            obstacles = [replace(one, remedy=NETWORK) for one in obstacles]
        for trial in (whole, cut):
            if trial is not None:
                trial.recorded.reset()
        live = _best(self._steps.live)
        return Findings(
            name=self.name, device=str(look.device), records=records and not obstacles, obstacles=tuple(obstacles),
            calls=self.calls, operators=look.operators, pieces=tuple(look.pieces), live_ms=live.whole, host_ms=live.host,
            replay_ms=_best(replays).whole, cut_ms=None if cut is None else _best(cut.replays).whole,
        )  # fmt: skip


def _nothing() -> None:
    """Where nobody waits for it."""


def _best(took: Sequence[_Took]) -> _Took:
    return min(took, key=lambda one: one.whole or 0, default=_Took())


def _timed(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, _Took]:
    _wait()
    begin = time.perf_counter()
    result = function(*args, **kwargs)
    host = time.perf_counter() - begin
    _wait()
    return result, _Took(host * 1e3, (time.perf_counter() - begin) * 1e3)


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _obstacles(look: Look, refusals: Sequence[Refusal]) -> Iterator[Obstacle]:
    """Those that were seen, and those only of which the recorder knows."""
    seen = [Obstacle.of(one.refusal, one.place, one.times) for one in look.seen]
    yield from seen
    for refusal in refusals:
        found = Obstacle.of(refusal)
        if not any(found.reason == one.reason or (found.line and found.at == one.at) for one in seen):
            yield found


class _Differs:
    """How the arguments of each call differ from those of the one before. (Each is described by itself: what cannot be, hides
    no other.)"""

    def __init__(self, describer: Describer) -> None:
        self._describer = describer
        self._last: dict[tuple[int, object], Call] = {}
        self._last_whole: Call | None = None
        self._found = Counter[str]()
        self._values: dict[str, str] = {}
        self._numbers: set[str] = set()  # among these
        self._calls = 0

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._calls += 1
        for at, argument in [*(((0, i), x) for i, x in enumerate(args)), *(((1, name), x) for name, x in kwargs.items())]:
            try:
                with Contained("described the call"):
                    call = self._describer.describe((argument,), {})
            except (NoSignature, Refusal):  # which the recorded function says
                continue
            last, self._last[at] = self._last.get(at), call
            if last is not None and last.key != call.key:
                self._compare(at, last, call)
        self._whole(args, kwargs)

    def _whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """How arguments lie to each other."""
        try:
            with Contained("described the call"):
                call = self._describer.describe(args, kwargs)
        except (NoSignature, Refusal):
            return
        last, self._last_whole = self._last_whole, call
        if last is not None and last.key[:2] == call.key[:2] and last.key[2] != call.key[2]:
            named = self._describer.named()
            together = [f"`{named(path_to(call.shape, call.places[i]))}`" for i in call.key[2][:2]]
            self._found[f"{' and '.join(together)} at other places of the same memory"] += 1

    def _compare(self, at: tuple[int, object], last: Call, call: Call) -> None:
        named = self._describer.named()
        i = next(iter(differing(last.key, call) or ()), None)
        how = difference(last.key, call, lambda path: named((*at, *path[2:])))
        if values_that_differ(last.key, call):
            if i is not None and type(call.leaves[i]) is float:
                return  # it is followed, mostly
            self._numbers.add(how)
        self._found[how] += 1
        self._values[how] = "" if i is None else _values(last.leaves[i], call.leaves[i])

    def obstacles(self, *, played: bool) -> Iterator[Obstacle]:
        """What is another in each call. Where recordings are `played` all the same, numbers are followed."""
        for how, times in self._found.items():
            if times >= max(2, self._calls - 1) and not (played and how in self._numbers):
                yield Obstacle.of(ever_new(how), detail=self._values.get(how, ""))


def _values(was: Any, now: Any) -> str:
    if isinstance(now, torch.Tensor) and isinstance(was, torch.Tensor):
        return f"{[*was.shape]}, then {[*now.shape]}"
    return f"{was!r}, then {now!r}" if isinstance(now, (int, float, str, bool)) else ""
