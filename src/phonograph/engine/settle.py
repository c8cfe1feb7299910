"""Last phase of a capture: results are planned, memory is leased, guards are collected. The outcome is a recording."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._torch.dynamic import Leaves
from .._torch.tensors import has_memory, storage_id
from ..autograd.backward import Backward
from ..call.live_function import Marked
from ..call.signature import Call
from ..capture.dispatch import OperatorWatch
from ..capture.recording import Entangled, Output, Recording, memory_of
from ..errors import Refusal
from ..guards.attribute_effects import Left
from ..guards.carried_state import is_filled
from ..guards.reachable import Reach
from ..guards.snapshot import Snapshot
from ..guards.unwatchable import NETWORK, in_trainer
from ..memory.pool import Lease
from ..memory.spans import Spans
from ..python.identity import identity
from ..python.loggers import levels
from ..python.origin import is_torchs
from ..slots.constants import Constants, not_heard
from ..slots.draws import Draws
from ..slots.effects import Effects
from ..slots.gradients import Grads
from ..slots.inputs import Inputs, Slot
from ..slots.memories import Memories
from ..slots.numbers import Numbers
from ..slots.table import Table
from ..values.object_layout import layout_of
from ..values.pytree_paths import tensors_apart
from ..values.tensor_subclasses import parts_of_all
from ..values.wording import Naming, locating, returned_at
from . import outputs
from .attached_results import backward_of
from .capture_terms import Request
from .evidence import Evidence
from .followed import check_hyperparameters
from .judge import Verdict
from .output_kinds import Aliased
from .prepared import Prepared
from .retrace import Retrace

__all__ = ["Settlement"]


class Settlement:
    """Of one capture that has been judged. All that can be refused of it is refused while it is made."""

    def __init__(self, request: Request, prepared: Prepared, evidence: Evidence, verdict: Verdict) -> None:
        """
        Raises:
            Refusal: a replay could not hand out the results, or be told from a call for which it is wrong.
            Untraced: with fewer hyper-parameters it may be possible.
        """
        self._request, self._prepared, self._evidence, self._verdict = request, prepared, evidence, verdict
        self._leases: dict[int, Lease] = {}
        self._leaves: Leaves = [*evidence.captured.result]
        self._settle_operators()
        self._outputs = self._planned()
        self._backward = self._backward_planned()
        self._copied = self._copied_out()
        evidence.captured.program.copies(outputs.moulds(self._outputs, self._copied))
        self._entangled = self._disentangled()
        self._relied = verdict.relied or request.reach
        self._snapshot = self._relied_on()
        self._slots = self._settled_slots()
        check_hyperparameters(request, evidence)

    def recording(self) -> Recording:
        """The recording, when nothing can be refused any more."""
        request, captured, behaviour = self._request, self._evidence.captured, self._evidence.behaviour
        watch, backward, release = captured.watch, request.backward, self._prepared.clearance.release
        borrow, table = request.terms.placement.borrow, self._table()
        return Recording(
            name=request.name,
            key=request.call.key,
            device=request.device.torch_device,
            program=captured.program,
            table=table,
            shape=behaviour.returned.shape,
            outputs=self._outputs,
            leases=() if borrow else tuple(self._leases.values()),
            copied=self._copied,
            footprint=captured.program.footprint | Spans((x.address, x.nbytes) for x in self._leases.values()),
            effects=_effects(watch, table),
            communicates=watch.communicated,
            numbered_apart=watch.numbered_apart,
            entangled=self._entangled,
            borrow=borrow,
            backward=self._backward,
            reads=backward.reads if backward is not None else None,
            releases=frozenset() if release is None else frozenset(release.given),
            live_parts=watch.parts,
            numbers=behaviour.numbers,
            reckoned=behaviour.reckoned,
            retrace=Retrace.of(watch.digest, request.terms, self._evidence.dials),
            origins=watch.origins.named(request.reach),
        )

    def _table(self) -> Table:
        """What the recording exchanges with the world."""
        request, captured, returned = self._request, self._evidence.captured, self._evidence.behaviour.returned
        left, dials, settings = self._evidence.behaviour.left, self._evidence.dials, self._verdict.settings
        program, watch, gradients = captured.program, captured.watch, self._prepared.grads
        fixed = request.backward.fixed if request.backward is not None else frozenset[int]()
        results = [o.memory for o in self._outputs if o.memory is not None]
        gradients.gives(frozenset([storage_id(t) for t in results if has_memory(t)]))
        written = {*map(identity, left.owners), *(spot.at[0] for spot in (*dials.advanced, *(one.spot for one in settings)))}
        not_heard(written)
        # An equal one in the place of such is another: numbers are read and written in that which was there.
        pinned = request.reach.shared | written | {spot.at[0] for spot in dials.spots}
        return Table(
            Memories([o.memory for o in self._outputs if isinstance(o, Aliased)], _written_outside(watch)),
            Draws(program.amiss, watch.drew, watch.drops_out),
            Numbers(dials, program),
            Constants(self._relied, self._snapshot, dials, fixed, pinned),
            gradients,
            Inputs(self._slots, returned.written, request.device.pool),
            Effects(left.after(), settings, returned.edits, returned.gained, returned.turned),
        )

    def _settle_operators(self) -> None:
        """Parts that run live learn what a replay has to put back for them; gradients, who holds them."""
        captured, reach, grads = self._evidence.captured, self._request.reach, self._prepared.grads
        captured.watch.handed_out(captured.result)
        for part in captured.watch.parts:
            part.settle(captured.watch.undone)
        # But forwards and backwards apart leave gradients to autograd, also where `checkpoint`'s code names them.
        named = self._evidence.behaviour.code.names_gradients and self._request.whole
        if grads.fed is not None and captured.watch.parts:
            raise Refusal("has a part that runs live, and gradients that lie elsewhere in each call",
                          "zero_grad(set_to_none=False), which leaves them in place")  # fmt: skip
        looks, reads = reach.looks_at_gradients or named, reach.mentions.reads_gradients or named
        handed_on = {storage_id(t) for t in captured.result if isinstance(t, torch.Tensor) and has_memory(t)}
        watch = captured.watch
        grads.settle(watch.touched, handed_on, watch.written.keys(), watch.outside, looks, reads)

    def _planned(self) -> tuple[Output, ...]:
        """How each leaf of the result is handed out."""
        request, captured, behaviour = self._request, self._evidence.captured, self._evidence.behaviour
        with locating(lambda _: returned_at(request.function)):
            plan = outputs.plan(captured, behaviour, request.call, request.reach, self._prepared.grads, self._leases,
                                request.device, self._leaves, traced=request.tracing is not None)  # fmt: skip
        if request.terms.placement.borrow and tensors_apart(behaviour.returned.shape):
            raise Refusal("lends a tensor that consists of parts", 'use outputs="keep", or return its parts')
        return plan

    def _backward_planned(self) -> Backward | None:
        """The backward of the results that are attached, if any are."""
        left, carried = self._evidence.behaviour.left, self._request.terms.carried
        backward = backward_of(self._request, self._prepared.grads, self._evidence, self._leases, self._leaves, self._outputs)
        late = [p.path for p in left.items] + [p.path for p in carried.unread() if is_filled(p.of)]
        if backward is not None and backward.function is not None and late:
            raise Refusal(f"sets {late[0]}, and has code that runs in its backward, which may read what was there",
                          "record the whole step")  # fmt: skip
        return backward

    def _copied_out(self) -> tuple[Lease, ...]:
        """The memory of results that each run copies. What a backward reads there as well, a call holds until then."""
        found = tuple([self._leases[key] for key in self._evidence.captured.copied])
        saved = {*map(identity, self._backward.saved.memory)} if self._backward is not None else set()
        self._leases = {key: x for key, x in self._leases.items() if x not in found or identity(x) in saved}
        return found

    def _disentangled(self) -> Entangled:
        """What no argument of a later call may be, or share memory with. Those of this call must not either."""
        call = self._request.call
        watch, left, grads = self._evidence.captured.watch, self._evidence.behaviour.left, self._prepared.grads
        entangled = _entangling(watch, self._request.reach, call, left, grads, self._evidence.dials.counts.here)
        if any(map(entangled.filled.__contains__, map(identity, call.containers))):
            raise entangled.of_container()
        if (refusal := entangled.refusal(call, Naming(self._request.function))) is not None:
            remedy = NETWORK if in_trainer(self._request.reach.modules) else refusal.remedy
            raise refusal.but(remedy=remedy, this_call=True)
        return entangled

    def _relied_on(self) -> Snapshot:
        """The values on which a replay relies."""
        reach, watch, code = self._request.reach, self._evidence.captured.watch, self._evidence.behaviour.code
        relied, snapshot = self._relied, self._prepared.snapshot
        if relied is not reach:
            snapshot = Snapshot(relied)
            snapshot.also([*watch.relied_on.values()])
        ran = [one for one, _ in code.functions if not is_torchs(one.co_filename)]
        snapshot.also(self._prepared.beyond.holders(ran, self._evidence.dials.marks))
        if code.loggers:
            snapshot.also([levels(code.loggers)])
        return snapshot

    def _settled_slots(self) -> tuple[Slot, ...]:
        """The slots of the recording. Separate ones cannot stand for arguments that share memory, if one of them is written."""
        captured, fixed, tensors = self._evidence.captured, self._prepared.slots.fixed, self._request.call.tensors
        moved = {key for key, _ in captured.watch.moved_on()}
        slots = tuple(
            Slot(final, borrowed=b, written=storage_id(used) in captured.watch.written, moved=storage_id(used) in moved)
            for used, final, b in zip(captured.used, captured.slots, fixed, strict=True)
        )
        spans = [Spans([memory_of(t)]) for t in tensors]
        for i, slot in enumerate(slots):
            if slot.written and any(j != i and span.meets(*memory_of(tensors[i])) for j, span in enumerate(spans)):
                raise Refusal("writes an argument that shares memory with another argument", "pass separate tensors")
        return slots


def _entangling(
    watch: OperatorWatch, reach: Reach, call: Call, left: Left, grads: Grads, counts: Sequence[torch.Tensor]
) -> Entangled:  # fmt: skip
    """Storages outside that no argument may share: those written; all, if an argument is written. Replays write step `counts`
    as well, and no operator does."""
    storages = {key: t.untyped_storage() for key, t in watch.written.items() if key not in watch.slot_ids}
    writes_arguments = not watch.written.keys().isdisjoint(watch.slot_ids)
    if writes_arguments:
        tensors = [t for _, t in reach.tensors.values() if has_memory(t)]
        tensors += parts_of_all(t.grad for _, t in reach.all_tensors if t.is_leaf)
        known = watch.known.keys() - watch.slot_ids
        storages |= {key: t.untyped_storage() for t in tensors if (key := storage_id(t)) in known}
    marked = [("", f.function) for part in watch.parts if isinstance(f := part.form.operator, Marked)]
    live = Reach(marked) if marked else None
    theirs = [t for _, t in live.tensors.values()] if live is not None else []  # a marked function may read and write them
    storages |= {storage_id(t): t.untyped_storage() for t in theirs if has_memory(t)}
    tensors = [t for _, t in reach.tensors.values()] if reach.mentions.asks_identity else []
    given = {identity(x) for x in call.leaves}
    objects = [x for x in reach.met if layout_of(type(x)) is not None and identity(x) not in given]
    gradients = [(p, place) for p, key, place in grads.found if writes_arguments or key in watch.written]
    own = [(t, memory_of(t)) for _, t in reach.tensors.values() if has_memory(t) and storage_id(t) in storages]
    own += [(t, memory_of(t)) for t in counts]
    lived_in = live.holders if live is not None else ()
    arrays = reach.array_places if writes_arguments else ()  # of which the call may make tensors
    filled = [put.of for put in left.items]
    return Entangled(tensors, storages.values(), objects, filled, own, gradients, lived_in, arrays)


def _written_outside(watch: OperatorWatch) -> tuple[torch.Tensor, ...]:
    """Tensors outside whose version a replay moves on, as the operators that write them do (but gradients: `Grads` does)."""
    written = [t for key, t in watch.moved_on() if key in watch.outside and not watch.known[key].endswith(".grad")]
    return (*written, *watch.made_moved_on())


def _effects(watch: OperatorWatch, table: Table) -> str:
    """What a replay does besides giving results."""
    effects, gradients = table.effects, table.gradients
    set_there = [*table.numbers.dials.advanced, *(one.spot for one in effects.settings)]
    if set_there:
        return f"sets {set_there[0].at[1]}"
    if effects.turned:
        return "lets an argument require a gradient"
    if effects.edits or effects.gained:
        return "changes a container that is an argument" if effects.edits else "leaves a gradient in an argument"
    if effects.left.paths:
        return f"sets {effects.left.paths[0]}"
    if watch.written:
        name = watch.known.get(next(iter(watch.written)), "")
        return f"writes {name or 'a tensor that outlives the call'}"
    if gradients.written or any(slot.written for slot in table.inputs.slots):
        return "changes gradients" if gradients.written else "writes an argument"
    return watch.more
