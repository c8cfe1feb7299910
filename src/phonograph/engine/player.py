"""Playing a recording: put the inputs in, launch, hand the outputs out.

`play` is the whole of it. Everything that does not change between replays was worked out when the recording was made,
so that a call with one input and one output is little more than a launch.

The order matters in three places. Arguments are copied *before* the launch and written ones back *after* it, on the
same stream, so that a function which writes its argument is seen to do so. The version counters of tensors that the
recording writes behind autograd's back are moved on, so that autograd still notices a saved tensor that changed.
And a replay waits for all other streams that results were given to: recordings share memory, and what reads a result there
may be at work when nobody holds it any more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

import torch

from .._torch.autograd import bump
from .._torch.dynamic import Leaves
from .._torch.tensors import address, alias, has_memory, storage_id, use_count
from ..autograd.function import Joint
from ..call.signature import Call
from ..capture.recording import MEMORY, Output, Recording, Replay, memory_of
from ..devices.base import Device
from ..devices.segments import Diverged, Segments
from ..guards.attribute_effects import advance, putting
from ..memory.pool import Fill, Pool, once
from ..memory.spans import Spans
from ..python.identity import identity
from ..values.host_scalars import reading
from ..values.pytree import rebuilding
from .output_kinds import AS_IT_IS, Aliased, Copied, Leased

__all__ = ["GRAD", "Player", "uses"]

GRAD = "a .grad attribute"  # as what has changed

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
        self._lent = [(i, s.tensor) for i, s in outer if s.borrowed]
        self._feeds_all = len(self._fed) == len(slots)
        self._nbytes = sum(once(recording.slots[i].tensor).nbytes for i in self._fed)
        self._written = [(i, s.tensor, once(s.tensor) is s.tensor, s.moved) for i, s in slots if s.written]
        self._reads = recording.reads
        self._counts = recording.left.counts
        self._settings = [(one.spot.put, one.new) for one in recording.settings]
        self._bump = [t for t in recording.written_outside if not t.is_inference()]
        self._run: Callable[..., list[torch.Tensor]] = recording.program.run
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
        recording.reliances.grads.gives(
            frozenset([storage_id(o.memory) for o in recording.outputs if o.memory is not None and has_memory(o.memory)])
        )
        self._dials = recording.reliances.dials or None
        self._turned = False
        dials = recording.reliances.dials
        self._steps = dials if dials.counts or dials.advanced else None
        self.joint: Joint | None = None  # for a recording with a backward: what joins its results to the graph of autograd
        self._first = [(i, o) for i, o in enumerate(recording.outputs) if o.of < 0]
        late = [(i, o) for i, o in enumerate(recording.outputs) if o.of >= 0]
        self._late = sorted(late, key=lambda entry: _behind(entry[1], recording.outputs))
        self._attached = [i for i, o in enumerate(recording.outputs) if o.attached]
        indices = None if self._plain is None or self._attached else [i for i, _ in self._plain]
        self._all_copied = indices is not None and not recording.gained and indices == [*range(len(recording.program.outs))]
        self.played = 0
        self.seconds = 0.0  # that it took to make the recording
        self.why = ""  # it was made
        self.due = sys.maxsize  # replays after which an audit is
        self.unaudited = ""  # why there are none
        self.doubts = 0  # audits in turn that an exception has ended
        self.right = 0  # replays at the last one, which found nothing
        self.used = 0
        self.touch()

    def _plain_outputs(self) -> list[tuple[int, torch.Tensor]] | None:
        """Which of the copies each result is, and its template; -1 where it stays in the recording's memory. None where some
        result takes more to be made."""
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
        """It is used now: the others are older."""
        self.used = next(uses)

    @property
    def pool(self) -> Pool:
        return self.device.pool

    @property
    def copies(self) -> int:
        """Bytes that a replay copies: arguments to their places, and small results out of theirs."""
        return self._nbytes + sum(lease.nbytes for lease in self.recording.copied)

    def take(self, call: Call) -> None:
        """Note the numbers among the arguments of the call that is to be played."""
        if call.numbers:
            self.recording.reliances.dials.given[:] = [call.leaves[i] for i in call.numbers]

    def broken(self) -> str | None:
        """What the recording relies on and no longer holds; None if it may be played (but for held outputs)."""
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

    def _moved(self) -> bool:
        """Whether a result was given other memory (`share_memory_`), and with it the recording's own tensors."""
        if [*map(address, self._templates)] == self._places:
            return False
        self.recording.spoiled.append(MEMORY)
        return True

    def ready(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether it may be played for a call of a known kind."""
        return (
            self.played < self.due
            and not (self.recording.rivals and self.held())
            and self._broken_beside_gradients() is None
            and (self._grads is None or self._grads.ready())
            and (not self._lent or all(address(tensors[i]) == address(slot) for i, slot in self._lent))
        )

    def grads_held(self) -> bool:
        """Whether somebody holds a gradient that a replay would overwrite, and eager would have replaced."""
        return self._grads is not None and self._grads.held()

    def grads_gone(self) -> bool:
        """Whether none of the parameters that it knows has a gradient."""
        return self._grads is not None and self._grads.gone()

    def held(self) -> bool:
        """Whether a replay would overwrite a tensor that somebody holds. About 0.2 us a rival."""
        return _any_held(self.recording.rivals)

    @property
    def overwrites(self) -> Spans:
        """The memory that a replay may write, arguments in their places included."""
        return self.recording.footprint | self.recording.lent

    def holding(self) -> bool:
        """Whether somebody holds a result of its own."""
        return any(lease.alive for lease in self.recording.leases)

    def awaited(self) -> bool:
        """Whether a backward waits for what the last replay has saved."""
        backward = self.recording.backward
        return backward is not None and any(lease.alive for lease in backward.saved.memory)

    def obstructed(self) -> bool:
        """Whether a replay would overwrite a tensor that somebody holds, and none that a backward waits for.

        Where forwards do not wait for each other, its own results do not count: for a loop that keeps the last one, two
        recordings that take turns are enough.
        """
        own = set() if self.pool.takes_turns else {lease.cdata for lease in self.recording.leases}
        held = _any_held(rival for rival in self.recording.rivals if rival[0] not in own)
        return self.recording.backward is not None and held and not self.awaited()

    def blocked(self, call: Call) -> bool:
        """Whether this call cannot be played because of tensors that are held."""
        if self.held():
            return True
        return any(self._in_use(slot, call.tensors[i]) for i, slot in self._lent)

    def half_attached(self, call: Call) -> bool:
        """Whether some results depend on an argument with a history, and others do not: one node of autograd cannot say so."""
        return self.joint is not None and any(not call.tensors[i].is_leaf for i in self.joint.traced.graph.partial)

    def _in_use(self, slot: torch.Tensor, argument: torch.Tensor) -> bool:
        """Whether an argument that is not in place cannot be copied to its place, which another recording's output has."""
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
        """The result of the call, and how many bytes of input were copied. Does not wait for the device."""
        if call.lent:
            call.own_borrowed(self.overwrites)
        self._enter()
        tensors = call.tensors
        copied = self._nbytes + (self._lend_in(tensors) if self._lent else 0)
        if self.played == 1 and self.recording.live_parts:
            self.recording.reliances.grads.keep()
        try:
            targets = self._run(tensors if self._feeds_all else [tensors[i] for i in self._fed])
        except Diverged:  # nothing has happened
            self.played -= 1
            if not self.played:
                self.recording.reliances.grads.restore()  # to what they were before the capture, which this call follows
            raise
        except BaseException:  # an operator that raises (an index out of range) leaves what was written before it
            program = self.recording.program
            self._leave(tensors, gradients=not (isinstance(program, Segments) and program.stopped))  # there they are right
            raise
        self._leave(tensors)
        if self.recording.written:
            bump([call.containers[i] for i in self.recording.written])
        self._count()
        self.touch()
        return self._hand_out(call, tensors, targets), copied

    def _count(self) -> None:
        """What the call counts on the host, in attributes and for its optimizers, is counted."""
        if self._counts:
            advance(self._counts)
        for put, value in self._settings:
            put(value)
        if self._steps is not None:
            self._steps.advance()

    def _leave(self, tensors: list[torch.Tensor], gradients: bool = True) -> None:
        """What a run has done outside becomes visible there."""
        if self._written:
            self._write_back(tensors)
        self._after(gradients)
        if self.played == 1:  # before a gradient is handed out: whoever has it then holds it
            self.recording.reliances.grads.seal()

    def play_flat(self, tensors: tuple[torch.Tensor, ...]) -> tuple[object, int]:
        """The same for a call of a known kind, for which this is `ready`: the tensors are all its arguments,
        and lie where they have to."""
        self._enter()
        try:
            targets = self._run(tensors if self._feeds_all else [tensors[i] for i in self._fed])
        finally:  # an operator that raises (an index out of range) leaves what was written before it
            if self._written:
                self._write_back(tensors)
            self._after()
        self._count()
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

    def _after(self, gradients: bool = True) -> None:
        if self._bump:
            bump(self._bump)
        if gradients and self._grads is not None:
            self._grads.leave()

    def _lend_in(self, tensors: list[torch.Tensor]) -> int:
        """Copy to their places those arguments that lie where another recording left them last time, and not now."""
        moved = [(slot, tensors[i]) for i, slot in self._lent if tensors[i].data_ptr() != slot.data_ptr()]
        if self.pool.loans:
            self.pool.take_back(Spans(memory_of(slot) for slot, _ in moved))
        with torch.no_grad():
            Fill([slot for slot, _ in moved])([t for _, t in moved])
        return sum(once(slot).nbytes for slot, _ in moved)

    def _write_back(self, tensors: Sequence[torch.Tensor]) -> None:
        for i, slot, dense, moved in self._written:
            theirs = tensors[i]
            if address(theirs) == address(slot):
                if moved and not theirs.is_inference():
                    bump([theirs])
            elif not (moved or theirs.is_inference()):
                once(theirs.data).copy_(once(slot.data))
            elif dense and not (theirs.requires_grad or slot.requires_grad or theirs.is_inference()):
                theirs.copy_(slot)
            else:
                with torch.no_grad(), torch.inference_mode() if theirs.is_inference() else AS_IT_IS:
                    once(theirs).copy_(once(slot))

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
        replay = Replay(self.recording, self.device.pool, call, tensors, call.lent if call is not None else {}, copies, made)
        for i, output in self._first:
            made[i] = output.make(replay)
        if self._attached:
            self._attach(made, tensors, call)
        for i, output in self._late:
            made[i] = output.make(replay)
        return made

    def _attach(self, made: list[object], tensors: Sequence[torch.Tensor], call: Call | None) -> None:
        assert self.joint is not None
        self.joint.attach(made, tensors, call.lent if call is not None else ())


def _behind(o: Output, outputs: Sequence[Output]) -> int:
    """How many others have to be made before this one."""
    return 1 + _behind(outputs[o.of], outputs) if o.of >= 0 else 0


def _any_held(rivals: Iterable[tuple[int, int, Any, int]]) -> bool:
    for key, own, python, owns in rivals:  # noqa: SIM110 - `any(... for ...)` costs half as much again
        if use_count(key) > own or _references(python()) > owns:
            return True
    return False


def _closed(*_: object) -> list[torch.Tensor]:
    raise RuntimeError("this recording was closed, and its memory may be another's now")
