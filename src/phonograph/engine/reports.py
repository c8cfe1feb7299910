"""What is told of one recorded function: each reason to run live once, and all that it did when it is asked (`explain`)."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence

import torch

from .._torch import dynamo as torch_dynamo
from .._torch.dynamo import run_where_traced
from ..devices.base import Device
from ..errors import Refusal, RunsLive, Unpadded, Unrecordable
from ..options import switched_off
from ..python.origin import is_users, users_level, users_line
from ..python.places import place
from ..state.reentrancy import inside
from ..statistics import Counters, Stats, logger

__all__ = ["Report", "stats_of"]

_OR = "; or "  # between what one may do
_COMPILED = "is part of what torch.compile compiles, which takes it for a plain function"
_COMPILE_FIRST = (
    'compile first, and record that: pg.record(torch.compile(model)); or torch.compile(..., backend="phonograph")'
    "; on the CPU, do not compile what you record"
)


class Report:
    """Counts the reasons of one function, and tells each the first time. `remarks` are more lines for `explain`. As an `error`,
    a reason is raised."""

    def __init__(self, name: str, counters: Counters, *, error: bool, done: Sequence[str] = ()) -> None:
        """What is advised in these words is `done` already, and not said again."""
        self._name, self._counters, self._error, self._done = name, counters, error, done
        self.reasons: dict[str, Refusal] = {}
        self.remarks: tuple[str, ...] = ()

    def refuse(self, refusal: Refusal) -> None:
        """Count a call that runs live.

        Raises:
            Unrecordable: with ``fallback="error"``.
        """
        self.say(refusal)
        if self._error:
            raise Unrecordable(f"{self._name} cannot be recorded: {self._undone(refusal.at(users_line()))}")

    def say(self, refusal: Refusal) -> None:
        """Count a reason, and tell it the first time."""
        if self._counters.ran_live(refusal.reason, measures=refusal.measures):
            told = self.reasons[refusal.reason] = self._undone(refusal.at(users_line()))
            self._tell("runs live", told, warns=not self._error and told.told)

    def _undone(self, refusal: Refusal) -> Refusal:
        """The same without advice that was followed."""
        parts = refusal.remedy.split(_OR)
        left = [part for part in parts if not any(words in part for words in self._done)]
        if len(left) < len(parts):
            refusal = refusal.but(remedy=_OR.join(left))
            refusal.drop_references()
        return refusal

    def _tell(self, what: str, refusal: Refusal, *, warns: bool = True) -> None:
        """One message. Who is warned finds it in the log only where that says all."""
        logger.log(logging.DEBUG if warns else logging.INFO, "%s %s: %s", self._name, what, refusal)
        if warns:
            warnings.warn(f"{self._name} {what}: {refusal.brief}", RunsLive, stacklevel=users_level())

    def not_padded(self, refusal: Unpadded) -> None:
        """Tell a reason not to pad, once."""
        if refusal.reason not in self.reasons:
            self.reasons[refusal.reason] = refusal
            self._counters.ran_live(refusal.reason)
            self._tell("is not padded, but recorded with its own sizes", refusal)

    @run_where_traced
    def compiled(self) -> None:
        """Tell that `torch.compile` compiles code that calls the function, which runs there as a plain one. That is told,
        whatever `fallback` is. (Its backend may be ours, or the code may be part of what is recorded: then nothing is lost.)"""
        if inside() or switched_off():
            return
        refusal = self.reasons.get(_COMPILED)
        if refusal is None:
            backend = torch_dynamo.compiling_backend()
            if str(getattr(backend, "__module__", "")).startswith("phonograph.") or torch.compiler.is_exporting():
                return
            traced = [place(file, line) for file, line in torch_dynamo.traced_stack() if is_users(file)]
            refusal = self.reasons[_COMPILED] = Refusal(_COMPILED, _COMPILE_FIRST, (traced or [users_line()])[-1])
            self._tell("runs live", refusal)
        self._counters.ran_live(refusal.reason)

    def remark(self, remark: str) -> None:
        """Add a line, and log it."""
        if remark not in self.remarks:
            self.remarks += (remark,)
            logger.info("%s: %s", self._name, remark)

    def explain(
        self, stats: Stats, learned: Iterable[str], recordings: Iterable[str], backwards: Iterable[str],
        others: Sequence[Report],
    ) -> Iterator[str]:  # fmt: skip
        """Lines for `explain`; `others`: what was told of instances' own."""
        yield (f"{self._name}: {stats.calls} calls, {stats.live} live, {stats.replayed} replayed, {stats.recorded} recordings "
               "made")  # fmt: skip
        yield from learned
        yield from recordings
        yield from backwards
        reasons = {reason: refusal for one in (*others, self) for reason, refusal in one.reasons.items()}
        for reason, n in stats.refusals.items():
            refusal = reasons.get(reason, reason)
            yield f"{'not padded' if isinstance(refusal, Unpadded) else 'live'} {n}x: {refusal}"
        if stats.untried:
            yield f"{stats.untried} live calls were not tried: the reason is that of an earlier call like them"
        if stats.timed:
            yield f"live {stats.timed}x: to time it beside its recording"
        yield from self.remarks


def stats_of(counters: Iterable[Counters], devices: Iterable[Device], before: Counters) -> Stats:
    """The statistics of several recorded functions as one; `before`: what others counted that are gone."""
    return sum(counters, before).stats(sum(device.pool_bytes for device in {*devices}))
