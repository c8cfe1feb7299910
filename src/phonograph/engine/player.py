"""Player of a recording: fits, fill, run, leave, results.

The recording's table defines these steps (`slots/table.py`: begin there). The pool decides whether its memory may be
overwritten. Everything that is the same in each replay was worked out when the recording was made: a call with one input and
one output is little more than a launch.

A replay first waits for all other streams that used results. A kernel there may still read a result that no tensor holds any
more, and recordings share memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import torch

from .._torch.profiler import profiling
from .._torch.tensors import use_count
from ..call.signature import Call
from ..capture.recording import Recording
from ..devices.base import Device
from ..devices.segments import Segments, TakenBack
from ..memory.pool import Pool
from ..memory.spans import Spans
from ..slots.column import Broken, Tensors
from .results import Results
from .traces import InSight, label

__all__ = ["Player", "uses"]

_references: Callable[[object], int] = sys.getrefcount
uses = count()


class Player:
    """Plays one recording."""

    def __init__(self, recording: Recording, device: Device) -> None:
        self.recording = recording
        self.device = device
        self._table = table = recording.table
        self._inputs, self._ready, self._fill, self._leave = table.inputs, table.ready, table.fill, table.leave
        self.broken = table.fits
        """Name of the first guard that fails; None if all hold. Held outputs are another question: `held`."""
        self.take = table.numbers.take
        """Sets the followed numbers to those among the arguments of a call."""
        self.grads_held, self.grads_gone = table.gradients.held, table.gradients.gone
        """Whether the caller holds a gradient that a replay would overwrite, where eager would have made a new one; and whether
        none of its parameters has one."""
        self._copied = table.inputs.copied if len(table.inputs.copied) < len(table.inputs.slots) else None
        self._reads = recording.reads
        self._run: Callable[..., list[torch.Tensor]] = recording.program.run
        self.may_begin_again = isinstance(recording.program, Segments)
        """A replay may have to be taken back, and the call begun again."""
        if isinstance(recording.program, Segments):
            recording.program.exchanges(table)
        self.results = Results(recording, device.pool)
        self._of_copies = self.results.of_copies
        self.label = label(recording)
        self._in_sight: InSight | None = None  # once a profiler has seen it
        self.played = 0
        self.seconds = 0.0  # that it took to make the recording
        self.cost = 0.0  # likewise, by the clock of `budget.py`
        self.saves: float | None = None  # seconds, by each replay, where a trial has found that out
        self.why = ""  # it was made
        self.due = sys.maxsize  # replays before the next audit
        self.unaudited = ""  # the reason for having no audits
        self.doubts = 0  # consecutive audits that an exception has ended
        self.right = 0  # replays before the last audit, which found no difference
        self.used = 0
        self.touch()

    def touch(self) -> None:
        """Mark as most recently used."""
        self.used = next(uses)

    @property
    def pool(self) -> Pool:
        return self.device.pool

    @property
    def copies(self) -> int:
        """Bytes that a replay copies: arguments to slots, and small results out of the pool."""
        return self._inputs.nbytes + sum(lease.nbytes for lease in self.recording.copied)

    # -- may it be played?

    def ready(self, tensors: Tensors) -> bool:
        """Whether a known call with these arguments may be played."""
        return self.played < self.due and not (self.recording.rivals and self.held()) and self._ready(tensors)

    def other_decision(self, broken: str) -> object | None:
        """Which decision comes out otherwise, where that is what is `broken`."""
        dials = self.recording.table.numbers.dials
        return dials.other_decision() if dials and dials.deciding == broken else None

    def held(self) -> bool:
        """Whether a replay would overwrite a live lease. About 0.2 us for each lease in its footprint."""
        return _any_held(self.recording.rivals)

    @property
    def overwrites(self) -> Spans:
        """Memory that a replay may write: the footprint, and slots in other recordings' outputs."""
        return self.recording.footprint | self.recording.borrowed_memory

    def holding(self) -> bool:
        """Whether some lease of its own is alive."""
        return any(lease.alive for lease in self.recording.leases)

    def awaited(self) -> bool:
        """Whether tensors that the last replay has saved for its backward are alive."""
        backward = self.recording.backward
        return backward is not None and any(lease.alive for lease in backward.saved.memory)

    def obstructed(self) -> bool:
        """Whether a replay would overwrite live leases, but no tensor that is saved for a backward.

        Its own results count only where several forwards wait for their backwards at a time. A loop that keeps its last result
        needs no more than two recordings that take turns.
        """
        own = set() if self.pool.takes_turns else {lease.cdata for lease in self.recording.leases}
        held = _any_held(rival for rival in self.recording.rivals if rival[0] not in own)
        return self.recording.backward is not None and held and not self.awaited()

    def blocked(self, call: Call) -> bool:
        """Whether live leases prevent a replay of this call."""
        if self.held():
            return True
        return any(self._in_use(slot, call.tensors[i]) for i, slot in self._inputs.borrowed)

    def half_attached(self, call: Call) -> bool:
        """Whether an argument has a history on which only some results depend. One autograd node cannot express that."""
        joint = self.results.joint
        return joint is not None and any(not call.tensors[i].is_leaf for i in joint.traced.graph.partial)

    def _in_use(self, slot: torch.Tensor, argument: torch.Tensor) -> bool:
        """Whether an argument lies elsewhere than its slot, and the slot is the live output of another recording."""
        start = slot.untyped_storage().data_ptr()
        if argument.data_ptr() == slot.data_ptr():
            return False
        return bool(self.pool.protected().meets(start, slot.untyped_storage().nbytes()))

    def close(self) -> None:
        """Drop the recording. Outputs that are held stay valid."""
        self.device.pool.remove(self.recording)
        self.recording.program.close()
        self._table.close()
        self._run = _closed

    # -- it is played

    def play(self, call: Call) -> tuple[Any, int]:
        """Replay for this call. Returns its result, and the bytes of arguments that were copied. Does not wait for the
        device."""
        if call.borrowed:
            call.own_borrowed(self.overwrites)
        try:
            return self.play_flat(call.tensors, call)
        except TakenBack:  # nothing has happened
            self.played -= 1
            if not self.played:
                self._table.gradients.unless_played()
            raise

    def play_flat(self, tensors: Tensors, call: Call | None = None) -> tuple[object, int]:
        """Likewise, for the tensors of a call: of one that is known, these are all, and the recording is `ready` for them."""
        if self._reads is not None:
            self._reads.note()
        self.played += 1
        first = self.played == 1
        self.device.enter()
        pool = self.device.pool
        if pool.loans:
            pool.take_back(self.recording.footprint)
        if self._fill is not None:
            self._fill(tensors, call)
        if first and self.may_begin_again:
            self._table.gradients.keep()
        run = self._run_in_sight if profiling() else self._run
        try:
            copies = run(tensors if self._copied is None else [tensors[i] for i in self._copied])
        except TakenBack:
            raise
        except BaseException:
            self._break_off(tensors, call)
            raise
        try:
            if first:
                self._table.leave_first(tensors, call)
            elif self._leave is not None:
                self._leave(tensors, call)
        except BaseException:
            self._table.publish(tensors, call)
            raise
        self.used = next(uses)
        results = self._of_copies(copies) if self._of_copies is not None else self.results.made(copies, tensors, call)
        return results, self._inputs.filled

    def _run_in_sight(self, sources: Tensors) -> list[torch.Tensor]:
        """Run it where a profiler looks on."""
        self._in_sight = self._in_sight or InSight(self.label, self.recording)
        return self._in_sight.run(self.played, self._run, sources)

    def _break_off(self, tensors: Tensors, call: Call | None) -> None:
        """An exception has ended a run: that of an operator, say."""
        program = self.recording.program
        stopped = isinstance(program, Segments) and program.stopped
        ran, program.ran = program.ran, 0
        if ran:
            self._table.break_off(tensors, call, Broken(ran, ran > program.shows, stopped))


def _any_held(rivals: Iterable[tuple[int, int, Callable[[], object], int]]) -> bool:
    for key, own, python, owns in rivals:  # noqa: SIM110 - `any(... for ...)` costs half as much again
        if use_count(key) > own or _references(python()) > owns:
            return True
    return False


def _closed(*_: object) -> list[torch.Tensor]:
    raise RuntimeError("this recording was closed, and its memory may be another's now")
