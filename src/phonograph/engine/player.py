"""Playing a recording: put the inputs in, launch, hand the outputs out.

`play` is the whole of it. Everything that does not change between replays was worked out when the recording was made,
so that a call with one input and one output is little more than a launch.

The order matters in three places:

- Arguments are copied to their slots *before* the launch. Written ones are copied back *after* it, on the same stream.
- Version counters of tensors that the graph writes are advanced, so that autograd still detects a saved tensor that changed.
- A replay first waits for all other streams that have used results. A kernel there may still read a result that no tensor holds
  any more, and recordings share memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch

from .._torch.autograd import bump
from .._torch.dynamic import Leaves
from .._torch.profiler import profiling
from .._torch.tensors import address, alias, has_memory, storage_id, use_count
from ..autograd.function import Joint
from ..call.signature import Call
from ..capture.recording import MEMORY, Output, Recording, Replay, Tensors, memory_of
from ..devices.base import Device
from ..devices.segments import Segments, TakenBack
from ..guards.attribute_effects import advance, putting
from ..memory.pool import Fill, Pool, unexpanded
from ..memory.spans import Spans
from ..python.identity import identity
from ..python.putting_back import put_back
from ..values.host_scalars import reading
from ..values.pytree import rebuilding
from .output_kinds import AS_IT_IS, Aliased, Copied, Leased
from .traces import InSight, label

__all__ = ["GRAD", "Player", "uses"]

GRAD = "a .grad attribute"  # the name of this guard

_references: Callable[[object], int] = sys.getrefcount
uses = count()


class Player:
    """Plays one recording."""

    def __init__(self, recording: Recording, device: Device) -> None:
        self.recording = recording
        self.device = device
        slots = list(enumerate(recording.slots))
        outer = [(i, s) for i, s in slots if not isinstance(s.tensor, torch.nn.Parameter)]
        self._fed = [i for i, s in outer if not s.borrowed]
        self._borrowed = [(i, s.tensor) for i, s in outer if s.borrowed]
        self._feeds_all = len(self._fed) == len(slots)
        self._nbytes = sum(unexpanded(recording.slots[i].tensor).nbytes for i in self._fed)
        self._written = [(i, s.tensor, unexpanded(s.tensor) is s.tensor, s.moved) for i, s in slots if s.written]
        self._reads = recording.reads
        self._counts = recording.left.counts
        self._counted = 0  # the last play of which they were
        self._settings = [(one.spot.put, one.new) for one in recording.settings]
        self._bump = [t for t in recording.written_outside if not t.is_inference()]
        self._run: Callable[..., list[torch.Tensor]] = recording.program.run
        self.may_begin_again = isinstance(recording.program, Segments)
        """A replay may have to be taken back, and the call begun again."""
        if isinstance(recording.program, Segments):
            recording.program.disturbing = recording.reliances.disturbing
            recording.program.dials = recording.reliances.dials
            recording.program.versions = recording.reliances.versions
            recording.program.grads = recording.reliances.grads
        self._amiss = recording.program.amiss
        self._templates = [o.memory for o in recording.outputs if isinstance(o, Aliased)]
        self._places = [*map(address, self._templates)]
        self._plain = self._plain_outputs()
        self._rebuild = rebuilding(recording.shape, len(recording.outputs))
        if recording.numbers:
            self._rebuild = reading(recording.numbers, self._rebuild)
        if recording.left.puts:
            self._rebuild = putting(recording.left, self._rebuild, more=bool(recording.edits) + bool(recording.gained))
        self._edits = recording.edits
        self._gained = recording.gained
        self._grads = recording.reliances.grads if recording.reliances.grads.parameters else None
        self._feeds_gradients = recording.reliances.grads.fed is not None
        recording.reliances.grads.gives(
            frozenset([storage_id(o.memory) for o in recording.outputs if o.memory is not None and has_memory(o.memory)])
        )
        self._dials = recording.reliances.dials or None
        self._turned = False
        dials = recording.reliances.dials
        self._steps = dials if dials.counts or dials.advanced else None
        self.joint: Joint | None = None  # the autograd node of its results, if the recording has a backward
        self._first = [(i, o) for i, o in enumerate(recording.outputs) if o.of < 0]
        late = [(i, o) for i, o in enumerate(recording.outputs) if o.of >= 0]
        self._late = sorted(late, key=lambda entry: _behind(entry[1], recording.outputs))
        self._attached = [i for i, o in enumerate(recording.outputs) if o.attached]
        indices = None if self._plain is None or self._attached else [i for i, _ in self._plain]
        self._all_copied = indices is not None and not recording.gained and indices == [*range(len(recording.program.outs))]
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

    def _plain_outputs(self) -> list[tuple[int, torch.Tensor]] | None:
        """For each result, the index of its copy and its template; -1 for a result in the recording's memory. None if some
        result is neither."""
        copies, inference = self.recording.program.outs, torch.is_inference_mode_enabled()
        whole = {identity(mould): i for i, mould in enumerate(copies) if mould.is_inference() is inference}
        plain: list[tuple[int, torch.Tensor]] = []
        for o in self.recording.outputs:
            if not isinstance(o, Leased) or o.consumed or o.lazy is not None or self.recording.borrow:
                return None
            copied = isinstance(o, Copied)
            if copied and identity(o.memory) not in whole:
                return None
            plain.append((whole[identity(o.memory)] if copied else -1, o.memory))
        return plain

    def touch(self) -> None:
        """Mark as most recently used."""
        self.used = next(uses)

    @property
    def pool(self) -> Pool:
        return self.device.pool

    @property
    def copies(self) -> int:
        """Bytes that a replay copies: arguments to slots, and small results out of the pool."""
        return self._nbytes + sum(lease.nbytes for lease in self.recording.copied)

    def take(self, call: Call) -> None:
        """Set the followed numbers to those among the arguments of this call."""
        if call.numbers:
            self.recording.reliances.dials.given[:] = [call.leaves[i] for i in call.numbers]

    def broken(self) -> str | None:
        """Name of the first guard that fails; None if all hold. Held outputs are another question: `held`."""
        broken = self._broken_beside_gradients()
        if broken is None and self._grads is not None and not self._grads.fit():
            return GRAD
        return broken

    def _broken_beside_gradients(self) -> str | None:
        if self.recording.spoiled or (self._templates and self._moved()):
            return self.recording.spoiled[0]
        if self._amiss is not None and (amiss := self._amiss()) is not None:
            return amiss
        dials = self._dials
        if dials is not None:
            self._turned = dials.turned() or self._turned
            if self._turned and not dials.fit():
                return dials.deciding
        return self.recording.reliances.broken()

    def other_decision(self, broken: str) -> object | None:
        """Which decision comes out otherwise, where that is what is `broken`."""
        dials = self._dials
        return dials.other_decision() if dials is not None and dials.deciding == broken else None

    def _moved(self) -> bool:
        """Whether the storage of a result was replaced (`share_memory_`), which the recording's own tensors share."""
        if [*map(address, self._templates)] == self._places:
            return False
        self.recording.spoiled.append(MEMORY)
        return True

    def ready(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether it may be played by `play_flat`."""
        return (
            self.played < self.due
            and not (self.recording.rivals and self.held())
            and self._broken_beside_gradients() is None
            and (self._grads is None or self._grads.ready())
            and (not self._borrowed or all(address(tensors[i]) == address(slot) for i, slot in self._borrowed))
        )

    def grads_held(self) -> bool:
        """Whether the caller holds a gradient that a replay would overwrite. (Eager would have made a new one.)"""
        return self._grads is not None and self._grads.held()

    def grads_gone(self) -> bool:
        """Whether all of its parameters have no gradient."""
        return self._grads is not None and self._grads.gone()

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
        return any(self._in_use(slot, call.tensors[i]) for i, slot in self._borrowed)

    def half_attached(self, call: Call) -> bool:
        """Whether an argument has a history on which only some results depend. One autograd node cannot express that."""
        return self.joint is not None and any(not call.tensors[i].is_leaf for i in self.joint.traced.graph.partial)

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
        self.recording.reliances.close()
        self._run = _closed

    def play(self, call: Call) -> tuple[Any, int]:
        """Replay for this call. Returns its result, and the bytes of arguments that were copied. Does not wait for the
        device."""
        if call.borrowed:
            call.own_borrowed(self.overwrites)
        self._enter()
        tensors = call.tensors
        copied = self._nbytes + (self._fill_borrowed(tensors) if self._borrowed else 0)
        if self.played == 1 and self.may_begin_again:
            self.recording.reliances.grads.keep()
        run = self._run_in_sight if profiling() else self._run
        sources = tensors if self._feeds_all else [tensors[i] for i in self._fed]
        try:
            targets = run(sources)
        except TakenBack:  # nothing has happened
            self.played -= 1
            if not self.played:
                self.recording.reliances.grads.unless_played()
            raise
        except BaseException:
            self._break_off(tensors)
            raise
        try:
            self._leave(tensors)
            if self.recording.written:
                bump([call.containers[i] for i in self.recording.written])
            self._count()
        except BaseException:
            self._publish(tensors)
            raise
        self.touch()
        return self._hand_out(call, tensors, targets), copied

    def _run_in_sight(self, sources: Tensors) -> list[torch.Tensor]:
        """Run it where a profiler looks on."""
        self._in_sight = self._in_sight or InSight(self.label, self.recording)
        return self._in_sight.run(self.played, self._run, sources)

    def _count(self) -> None:
        """Advance counters on the host: numbers in attributes, and step counts of optimizers."""
        if self._counts:
            advance(self._counts)
            self._counted = self.played
        for put, value in self._settings:
            put(value)
        if self._steps is not None:
            self._steps.advance()

    def _break_off(self, tensors: Sequence[torch.Tensor]) -> None:
        """An exception has ended a run: that of an operator, say. What it has written by then stays, as in eager, and so do
        numbers on the host, as far as it has come."""
        program = self.recording.program
        stopped = isinstance(program, Segments) and program.stopped  # by what is live: there gradients and counts are right
        ran, program.ran = program.ran, 0
        if not ran:
            return
        try:
            self._leave(tensors, gradients=not stopped)
        finally:
            if self._steps is not None and not stopped:
                self._steps.break_off(ran, shows=ran > program.shows)
            if ran > program.shows:
                advance(self._counts)
                for put, value in self._settings:
                    put(value)

    def _publish(self, tensors: Sequence[torch.Tensor]) -> None:
        """An exception has come (Ctrl-C) when the effects of a run were half published: they are now."""
        if self._counted == self.played:
            self._counts = ()
        try:
            put_back(partial(self._write_back, tensors), self._after, self._count)
        finally:
            self._counts = self.recording.left.counts

    def _leave(self, tensors: Sequence[torch.Tensor], gradients: bool = True) -> None:
        """Publish the effects of a run: written arguments, version counters, gradients."""
        if self._written:
            self._write_back(tensors)
        self._after(gradients)
        if self.played == 1:  # before a gradient is handed out: whoever has it then holds it
            self.recording.reliances.grads.seal()

    def play_flat(self, tensors: tuple[torch.Tensor, ...]) -> tuple[object, int]:
        """Replay for a call whose arguments are just these tensors. The recording is `ready` for them."""
        self._enter()
        run = self._run_in_sight if profiling() else self._run
        sources = tensors if self._feeds_all else [tensors[i] for i in self._fed]
        try:
            targets = run(sources)
        except BaseException:
            self._break_off(tensors)
            raise
        try:
            if self._written:
                self._write_back(tensors)
            self._after()
            self._count()
        except BaseException:
            self._publish(tensors)
            raise
        self.touch()
        return self._rebuild(targets) if self._all_copied else self._hand_out(None, tensors, targets), self._nbytes

    def _enter(self) -> None:
        if self._reads is not None:
            self._reads.note()
        self.played += 1
        self.device.enter()
        if self._turned and self._dials is not None:
            self.recording.program.set_numbers(self._dials.numbers())
            self._turned = False
        pool = self.device.pool
        if pool.loans:
            pool.take_back(self.recording.footprint)
        if self._feeds_gradients:
            self.recording.reliances.grads.feed()

    def _after(self, gradients: bool = True) -> None:
        if self._bump:
            bump(self._bump)
        if gradients and self._grads is not None:
            self._grads.leave()

    def _fill_borrowed(self, tensors: list[torch.Tensor]) -> int:
        """Copy arguments to those slots that are outputs of other recordings, unless they lie there already."""
        moved = [(slot, tensors[i]) for i, slot in self._borrowed if tensors[i].data_ptr() != slot.data_ptr()]
        if self.pool.loans:
            self.pool.take_back(Spans(memory_of(slot) for slot, _ in moved))
        with torch.no_grad():
            Fill([slot for slot, _ in moved])([t for _, t in moved])
        return sum(unexpanded(slot).nbytes for slot, _ in moved)

    def _write_back(self, tensors: Sequence[torch.Tensor]) -> None:
        for i, slot, dense, moved in self._written:
            theirs = tensors[i]
            if address(theirs) == address(slot):
                if moved and not theirs.is_inference():
                    bump([theirs])
            elif not (moved or theirs.is_inference()):
                unexpanded(theirs.data).copy_(unexpanded(slot.data))
            elif dense and not (theirs.requires_grad or slot.requires_grad or theirs.is_inference()):
                theirs.copy_(slot)
            else:
                with torch.no_grad(), torch.inference_mode() if theirs.is_inference() else AS_IT_IS:
                    unexpanded(theirs).copy_(unexpanded(slot))

    def _hand_out(self, call: Call | None, tensors: Sequence[torch.Tensor], targets: list[torch.Tensor]) -> object:
        plain = self._plain
        if plain is not None:
            made: Leaves = [targets[i] if i >= 0 else alias(template) for i, template in plain]
            if self._attached:
                self._attach(made, tensors, call)
        else:
            made = self._made(call, tensors, targets)
        result = self._rebuild(made)
        if self._gained:
            result, gradients = result
            for i, gradient in zip(self._gained, gradients, strict=True):
                tensors[i].grad = gradient
        if self._edits:
            assert call is not None
            result, values = result
            for edit, new in zip(self._edits, values, strict=True):
                edit.repeat(call.containers[edit.number], new)
        return result

    def _made(self, call: Call | None, tensors: Sequence[torch.Tensor], copies: list[torch.Tensor]) -> Leaves:
        made: list[object] = [None] * len(self.recording.outputs)
        replay = Replay(
            self.recording, self.device.pool, call, tensors, call.borrowed if call is not None else {}, copies, made
        )
        for i, output in self._first:
            made[i] = output.make(replay)
        if self._attached:
            self._attach(made, tensors, call)
        for i, output in self._late:
            made[i] = output.make(replay)
        return made

    def _attach(self, made: list[object], tensors: Sequence[torch.Tensor], call: Call | None) -> None:
        assert self.joint is not None
        self.joint.attach(made, tensors, call.borrowed if call is not None else ())


def _behind(o: Output, outputs: Sequence[Output]) -> int:
    """Number of outputs that have to be made before this one."""
    return 1 + _behind(outputs[o.of], outputs) if o.of >= 0 else 0


def _any_held(rivals: Iterable[tuple[int, int, Callable[[], object], int]]) -> bool:
    for key, own, python, owns in rivals:  # noqa: SIM110 - `any(... for ...)` costs half as much again
        if use_count(key) > own or _references(python()) > owns:
            return True
    return False


def _closed(*_: object) -> list[torch.Tensor]:
    raise RuntimeError("this recording was closed, and its memory may be another's now")
