"""A recording in segments: programs with operators between them that run live, because they need the host.

Such an operator reads and writes the recording's own memory. New tensors of its result are copied to where the next segment
reads them. The next segment was captured for a result of that form. If the operator gives another shape, the call has
`Diverged`: everything that it wrote outside is restored, random states too, and it runs live from its beginning. Collectives
that it has already made give that run their results, and are not made again (`arrivals.py`). Arguments with slots were not
touched. Those that are read in place (parameters, results of other recordings) are restored with the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import NamedTuple

import torch

from .._torch.tensors import storage_at
from ..capture.breaks import Break, Decision, Done, MarkedBreak, Torn
from ..capture.recording import Program, Tensors, Work
from ..errors import Refusal
from ..memory.spans import Spans
from ..python.putting_back import put_back
from ..slots.gradients import Grads
from ..slots.table import Table
from ..state.rng import put

__all__ = ["FAILS", "Diverged", "Segments", "TakenBack"]

_RARE = "where that is rare, nothing"
_TIMED = 16  # runs of which it is noted how long their cuts take
_TORN = (
    "phonograph: {} runs live between the segments of a recording, and {}, for the first time in a replay (at {}). What the "
    "replay has written is put back; the next call runs live, and looks at it anew. Or do that outside the recorded function."
)


FAILS = "a check of values fails"  # in reasons


class TakenBack(Refusal):
    """A replay could not go on. Everything is as before the call, which begins again, live."""

    @staticmethod
    def by_check(where: str) -> TakenBack:
        """One at a check that has failed, which is made at this line."""
        return TakenBack(FAILS, _RARE, where, this_call=True, failed=True)

    @staticmethod
    def by_operator(error: Exception) -> TakenBack:
        """One at an operator that has raised this."""
        return TakenBack(f"an operator raises {type(error).__name__} in a replay", _RARE, this_call=True, failed=True)


class Diverged(TakenBack):
    """It could not go on after a live operator or marked function. What marked functions have `done` is not taken back; where
    that is such that the call cannot be made from its beginning, `torn` says so."""

    def __init__(self, live: Break, did: str, done: list[Done], torn: str) -> None:
        remedy = "do the same in each call" if done else live.remedy
        super().__init__(f"{live.said} {did}", remedy, live.where, this_call=True)
        self.said = live.said
        self.around = live.around() if live.around is not None else None
        self.done = done
        self.arrived = [(name, [t.detach().to("cpu", copy=True) for t in tensors]) for name, tensors in live.arrived]
        self.torn = torn and _TORN.format(live.said, torn, live.where)
        self.decided = isinstance(live, Decision)  # nothing is wrong with the recording: a number was another this time


class _Before(NamedTuple):
    """What a replay notes at its beginning, to put it back where the call has to begin again."""

    grads: Grads | None
    kept: list[tuple[torch.Tensor, torch.Tensor | None]]
    """The gradients of parameters."""
    written: list[tuple[torch.Tensor, torch.Tensor]]
    """What it writes outside, and copies of that."""
    states: list[torch.Tensor]
    """Those of random generators."""
    versions: Mapping[int, int]
    """Those of tensors outside."""


class Segments:
    """A `Program` of several, with live operators between."""

    def __init__(
        self, programs: Sequence[Program], breaks: list[Break], written: list[torch.UntypedStorage],
        generators: Sequence[torch.Generator], operators: int, starts: Sequence[int], shows: int,
        checked: torch.device | None = None,
    ) -> None:  # fmt: skip
        """The programs start where so much of the call has run, and all together show outside as a `Program` does. The last one
        may be taken back when it has run whole, where it is `checked` on this device."""
        self.programs = programs
        self.breaks = breaks
        self.footprint: Spans = programs[0].footprint
        self.owned = Spans()
        self.operators: int = operators
        self._starts = starts
        self.ran, self.shows = 0, shows
        amiss = [p.amiss for p in programs if p.amiss is not None]
        first: Callable[[], str | None] = lambda: next(filter(None, (one() for one in amiss)), None)  # noqa: E731
        self.amiss = first if amiss else None
        self.waits: str = next(filter(None, (p.waits for p in programs)), "")
        self.edges = ""
        self.own_generators: Sequence[torch.Generator] = list(dict.fromkeys(g for p in programs for g in p.own_generators))
        self.outs: tuple[torch.Tensor, ...] = ()
        self._dials_fit = True
        self._turned = False  # hyper-parameters have been set in this run
        self.stopped = False  # the last run, by an exception of what is live between segments
        self.took: list[list[float]] = []
        """Seconds for which each cut has kept the host, in the first runs: to wait for the device, and to run what is live."""
        with torch.inference_mode(False), torch.no_grad():
            # By address, as the programs have it: to hold a gradient would look like somebody who keeps it.
            places = [storage_at(w.data_ptr(), w.nbytes(), w.device) for w in written if w.nbytes()]
            self._written = [torch.empty(0, dtype=torch.uint8, device=w.device).set_(w) for w in places]
        self._generators = generators
        self._checked = checked

    def exchanges(self, table: Table) -> None:
        """With what, outside, the recording has to do whose program this is. (The table knows the program, which must not be
        garbage of a circle.)"""
        self._constants, self._gradients, self._dials = table.constants, table.gradients, table.numbers.dials

    def copies(self, outs: tuple[torch.Tensor, ...]) -> None:
        self.outs = outs
        self.programs[-1].copies(outs)

    def run(self, sources: Tensors) -> list[torch.Tensor]:
        self.stopped, self._dials_fit, self._turned, self.ran = False, True, False, 0
        before, dials = self._before(), self._dials
        disturbed = self._constants.disturbing(self._gradients)
        done: list[Done] = []
        cuts: list[float] = []
        if dials.counts:
            dials.counts.begin()
        targets = self._run_program(0, sources, before)
        for number, live in enumerate(self.breaks):
            if dials.counts:
                dials.advance(number)
                dials.counts.leave()
            if live.grads:
                _give(live.grads)
                disturbed = self._constants.disturbing(self._gradients)
            begun = time.perf_counter()
            other, torn = self._run_live(live, done, disturbed, before.versions)
            cuts.append(time.perf_counter() - begun)
            if other or torn or disturbed():
                diverged = Diverged(live, other or "changes what the function relies on", done, torn)
                put_back(partial(self._undo, before))
                if torn and before.grads is not None:
                    before.grads.lose()
                raise diverged
            targets = self._run_program(number + 1, (), before)
        _give(before.kept)  # those that the call leaves are given at its end (`Grads.leave`)
        if len(self.took) < _TIMED:
            self.took.append(cuts)
        self.ran = 0
        return targets

    def _run_program(self, number: int, sources: Tensors, before: _Before) -> list[torch.Tensor]:
        program = self.programs[number]
        try:
            targets = program.run(sources)
        except TakenBack:
            put_back(partial(self._undo, before))
            raise
        except BaseException:
            self.ran, program.ran = self._starts[number] + program.ran, 0
            raise
        self.ran = self._starts[number + 1]
        return targets

    def _before(self) -> _Before:
        marked = any(isinstance(live, MarkedBreak) for live in self.breaks)
        grads = self._gradients if marked else None
        if grads is not None:
            grads.show()
        kept = [*zip(grads.parameters, grads.read(), strict=True)] if grads is not None else []
        with torch.no_grad():
            written = [(t, t.clone()) for t in (*self._written, *self._left())]
        states = [g.get_state() for g in self._generators]
        return _Before(grads, kept, written, states, self._constants.versions() if marked else {})

    def _left(self) -> list[torch.Tensor]:
        """What earlier runs have left in the memory of the recording (gradients), where a whole run may be taken back."""
        if self._checked is None:
            return []
        with torch.inference_mode(False):
            places = [storage_at(start, nbytes, self._checked) for start, nbytes in self.owned]
            return [torch.empty(0, dtype=torch.uint8, device=self._checked).set_(place) for place in places]

    def _run_live(
        self, live: Break, done: list[Done], disturbed: Callable[[], bool], versions: Mapping[int, int]
    ) -> tuple[str, str]:  # fmt: skip
        """Run what is live between two segments. Returns what is another than before, if anything is, so that the replay cannot
        go on; and what must not be done a second time, if a live call from the beginning would."""
        counts = self._dials.counts
        try:
            other, torn = live.run(done, self._generators), ""
            self._turned = self._follow_dials() or self._turned
            if counts and counts.changed():
                torn = "steps an optimizer that the recorded function steps"
            elif not self._dials_fit:
                torn = "sets hyper-parameters of an optimizer that it cannot follow"
            elif self._turned and other:
                torn = f"{other}, after hyper-parameters were set"
            elif isinstance(live, MarkedBreak) and disturbed():
                torn = "changes something on which the recorded function relies (keep it in a tensor)"
            elif done and other and self._written_by_the_way(versions, done):
                torn = f"{other}, after others have written tensors outside"
        except Torn as e:
            return "", str(e)
        except BaseException:
            self.stopped = True
            with torch.no_grad():  # copies, as the call may drop these gradients later
                _give([(p, None if grad is None else grad.clone()) for p, grad in live.changed_grads])
            raise
        return other, torn

    def _follow_dials(self) -> bool:
        """Whether hyper-parameters have been set: later segments work with the new ones."""
        dials = self._dials
        if not dials or not dials.turned(running=True):
            return False
        self._dials_fit = dials.fit()
        if self._dials_fit:
            self.set_numbers(dials.numbers())
        return True

    def _written_by_the_way(self, versions: Mapping[int, int], done: Sequence[Done]) -> bool:
        """Whether marked functions have written tensors outside that they were not given."""
        own = frozenset[int]().union(*(one.own for one in done))
        now = self._constants.versions()
        return any(now.get(i, version) != version for i, version in versions.items() if i not in own)

    def _undo(self, before: _Before) -> None:
        with torch.no_grad():
            for t, value in before.written:
                t.copy_(value)
        for g, state in zip(self._generators, before.states, strict=True):
            put(g, state)
        if counts := self._dials.counts:
            counts.take_back()
        _give(before.kept)

    def set_numbers(self, numbers: Mapping[float, float]) -> Set[float]:
        return frozenset[float]().union(*(p.set_numbers(numbers) for p in self.programs))

    def holds(self, numbers: Set[float]) -> bool:
        return any(p.holds(numbers) for p in self.programs)

    def work(self) -> list[Work]:
        return [work for p in self.programs for work in p.work()]

    def close(self) -> None:
        for p in self.programs:
            p.close()
        self.breaks = []
        self._written = []


def _give(grads: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    for p, grad in grads:
        if p.grad is not grad:
            p.grad = grad
