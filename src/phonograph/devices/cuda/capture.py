"""A capture: the kernels of a call are written down with their addresses, and nothing executes.

So what it may disturb is host state only, and each piece of it is put back, on every path: the current stream, where the
allocator takes memory from, random generators, and Python's garbage collector, which must not run a destructor with CUDA calls
in the middle. The allocator's history is how a recording learns its footprint.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ..._torch import cuda as torch_cuda
from ..._torch.tensors import storage_id
from ...capture.breaks import MarkedBreak
from ...capture.dispatch import OperatorWatch
from ...capture.recording import Made, Program, memory_of
from ...errors import Refusal
from ...memory.pool import unowned
from ...memory.spans import Spans
from ...python.gc_control import uncollected
from ...python.memos import memos
from ...python.standing import ended, standing
from ...state.compiled_generators import among, settled
from ...state.rng import CudaState, Known, Rewind, put, reset
from ...values.pytree import flatten, unflatten
from ..base import Captured, CapturePlan
from ..host_reads import AS_MEMORY, ITEM, LISTED, NUMBERS, host_reads_refused, of_the_host
from ..segments import Segments
from ..slots import place_for
from . import allocator as cuda_memory
from . import driver
from .capture_status import told_as_live
from .capture_stream import CaptureStream
from .dispatch import CudaWatch
from .generators import GraphGenerators
from .graphs import Graphs
from .host_constants import Room, seen_from_the_host
from .laned import LanedProgram, in_use, order_of
from .places import Notebook
from .private_pool import PrivatePool
from .program import CheckedProgram, CommunicatingProgram, GraphProgram
from .rnn_dropout import BUFFER, forgotten
from .value_checks import Answers

__all__ = ["Capture", "once", "slot"]

_STEP = 4  # numbers that a thread draws at once


def slot(t: torch.Tensor) -> torch.Tensor:
    """New memory with the metadata of `t`, beginning as far from an aligned address as `t` does. It is no view, which
    AOTAutograd would detach when it is saved."""
    shift, end = place_for(t)
    memory = torch.empty(end, dtype=t.dtype, device=t.device).untyped_storage()
    return torch.empty(0, dtype=t.dtype, device=t.device).set_(memory, shift, t.size(), t.stride())


class Capture:
    """One call: its slots, what watches it, and its graphs. To be made where its allocations are collected."""

    def __init__(
        self, plan: CapturePlan, stream: CaptureStream, memory: PrivatePool, generators: GraphGenerators, states: Known,
        room: Room, before: list[cuda_memory.Block], once: float = math.inf,
    ) -> None:  # fmt: skip
        """`room` is for constants. The pool was like this `before`. Where edges are to be true, memory of results of up to so
        many bytes is used `once`: 0 takes no more than a chain."""
        self._plan, self._stream, self._memory = plan, stream, memory
        self._states, self._room = states, room
        owned = Spans((b.address, b.nbytes) for b in before if not b.free)
        with torch_cuda.route_to_pool(stream.index, memory.handle), torch.inference_mode(False):
            # The pool may be another by now.
            common = [s is not None and owned.covers(*memory_of(s)) for s in plan.shared]
            entries = zip(plan.arguments, plan.borrowed, plan.shared, common, strict=True)
            self._slots = [t if b else unowned(s) if c and s is not None else slot(t) for t, b, s, c in entries]
        self._common = common
        free = Spans((b.address, b.nbytes) for b in before if b.free)
        self.watch = CudaWatch(stream.torch_device, plan.reach, self._slots, plan.borrowed, generators.known, generators.lent,
                               free, plan.rewind, stream.stream.cuda_stream)  # fmt: skip
        self.watch.follow(plan.dials)
        self.watch.runs_beside(stream.beside)
        self._graphs = Graphs(stream.stream, memory.handle, generators.known, states, plan.dials)
        self.watch.next_segment, self.watch.streams = self._graphs.next, self._graphs.others
        self.watch.captured, self.watch.bodies_here = self._graphs.nodes, self._graphs.bodies
        self.watch.launches, self.watch.words = partial(_launches, self._graphs, memory), self._graphs.words
        self.watch.known_states, self.watch.room = states, room
        if plan.true_edges:
            self.watch.notebook = Notebook(stream.index, self._graphs.nodes, stream.apart, once)
        self._result: Any = None
        self._copied: list[int] = []  # storages of results that each run copies
        self._surplus = 0

    def looks_at(self, answers: Answers) -> None:
        """Checks that the call makes leave their answers there."""
        self.watch.answers = self._graphs.answers = answers

    def run(self) -> None:
        """Call the function."""
        plan, watch, graphs, index = self._plan, self.watch, self._graphs, self._stream.index
        with _not_begun(watch, index), _capturing(graphs, self._states), settled(watch.own):
            graphs.copy_in(plan.fed(self._slots), plan.fed(plan.arguments))
            reads = host_reads_refused(watch, (*LISTED, *AS_MEMORY, ITEM, *NUMBERS), of_the_host)
            with watch, reads, seen_from_the_host():
                self._result = plan.call(self._slots, watch)
            watch.all_launched_here()
            if not self._stream.is_here:
                raise Refusal("leaves another stream current than it has found", "use `with torch.cuda.stream(...)`")
            graphs.join()
            graphs.look_at_answers()
            out = self._small()
            self._copied += out
            graphs.segments[-1].edges.copy_out(list(out.values()))
            self._surplus = _surplus(index) if watch.sets_states else 0

    @property
    def in_common(self) -> Spans:
        """Where slots lie that are another recording's as well."""
        return Spans(memory_of(s) for s, c in zip(self._slots, self._common, strict=True) if c)

    def captured(self, footprint: Spans, allocated: Sequence[tuple[int, int]] = ()) -> Captured:
        """What it has come to, when it is over. It has `allocated` this, in turn."""
        plan, watch = self._plan, self.watch
        _no_untraced(watch, footprint)
        made = {}
        leaving = [*plan.results(self._result), *plan.saved()]
        if not watch.elsewhere.isdisjoint(map(storage_id, plan.results(self._result))):
            raise Refusal("returns the seed of an attention, which lies on the CPU where nothing is captured",
                          "return the others")  # fmt: skip
        for t in leaving:
            storage = t.untyped_storage()
            if footprint.covers(storage.data_ptr(), storage.nbytes()) and storage._cdata not in watch.outside | watch.slot_ids:
                made[storage._cdata] = Made(storage.data_ptr(), storage.nbytes())
        final = [unowned(s) for s in self._slots]
        self._graphs.segments[0].edges.slots = plan.fed(final)
        others = watch.others({storage_id(t) for t in leaving})
        program = self._program(footprint, others)
        if plan.true_edges:
            program.edges = f"as captured: {self._chain}"
        if isinstance(program, LanedProgram):
            there = [(s.data_ptr(), s.nbytes()) for ref in others if (s := ref()) is not None and s.device.type == "cuda"]
            theirs = [(m.address, m.nbytes) for m in made.values()]
            self._order(program, allocated, [*there, *theirs, *map(memory_of, plan.fed(self._slots))])
        return Captured(self._result, program, made, watch, self._slots, final, tuple(self._copied), others=others)

    def _program(self, footprint: Spans, others: Sequence[weakref.ref[torch.UntypedStorage]]) -> Program:
        watch, graphs, states = self.watch, self._graphs, self._states
        awaits = watch.answers is not None and watch.answers.awaited is not None
        if awaits:
            watch.can_be_taken_back(others)
        for segment in graphs.segments:
            segment.bodies.confirm()
        if (watch.has_backward or self._plan.rewind is not None) and any(s.bodies.offset for s in graphs.segments):
            raise Refusal("draws random numbers in a branch or loop by what a tensor holds, and has a backward outside",
                          "record the whole step")  # fmt: skip
        kind = CheckedProgram if awaits else CommunicatingProgram if watch.communicated else self._plain
        kept = (self._memory.anchor, self._room if self._room else None, watch.workplaces)
        programs = [
            kind(segment, footprint, watch, kept, self._stream.index, self._plan.rewind,
                 self._surplus if segment is graphs.segments[-1] else 0, graphs.others.values())
            for segment in graphs.segments
        ]  # fmt: skip
        if not watch.cuts and not awaits:
            return programs[0]
        if watch.drops_out and any(isinstance(part, MarkedBreak) for part, *_ in watch.cuts):
            raise Refusal(f"calls a function that is marked @pg.live, which may seed {BUFFER}",
                          "put nn.Dropout between layers of their own, instead of dropout=")  # fmt: skip
        for part, inputs, results in watch.cuts:
            part.lies([spot.tensor() for spot in inputs], [spot.tensor() for spot in results])
        parts = [part for part, *_ in watch.cuts]
        drawn = [*watch.generators, *(g for own in watch.own for g in own.forward)]
        named_here = [g for g in states.generators[1:] if among(g, drawn)]
        generators = [states.generators[0], *named_here]
        undone, checked = (watch.changed(), watch.device) if awaits else (watch.undone, None)
        return Segments(programs, parts, undone, generators, watch.operators, range(len(programs) + 1), len(parts), checked)

    @property
    def _plain(self) -> type[GraphProgram]:
        """What a program is that does not wait: one in lanes, where that is wanted and all is known that this takes."""
        return LanedProgram if self._plan.true_edges and not self._chain else GraphProgram

    @property
    def _chain(self) -> str:
        """Why its graph cannot have other edges than it was captured with; empty if it can."""
        watch, (first, *more) = self.watch, self._graphs.segments
        reasons = {
            "it waits for other ranks": watch.communicated,
            "it runs in several graphs": more,
            "it has branches or loops by what tensors hold": first.bodies.graphs,
            "it was captured on several streams": self._graphs.others,
            "it draws random numbers": first.drawn or first.lent or watch.sets_states or watch.own or watch.dropout is not None,
            "its backward runs by itself": watch.has_backward or self._plan.rewind is not None,
            "it checks values": watch.answers is not None and (watch.answers.kept or watch.answers.awaited is not None),
        }
        return next((reason for reason, is_so in reasons.items() if is_so), "")

    def _order(self, program: LanedProgram, allocated: Sequence[tuple[int, int]], left: list[tuple[int, int]]) -> None:
        """Let a program try the order that its graph may have, should that be worth it. What it leaves has to be the same."""
        assert self.watch.notebook is not None
        workspace = self._memory.anchor.workspace
        others = [*map(memory_of, self._slots), *([workspace] if workspace is not None else []), *in_use(self._stream.index)]
        if (noted := self.watch.notebook.noted(allocated)) is None:
            program.edges = "as captured: another thread has allocated memory meanwhile"
            return
        try:
            order = order_of(self._graphs.segments[0], noted, allocated, others)
        except driver.DriverError as e:
            program.edges = f"as captured: {e}"
            return
        program.tries(order, self.watch.changed(), left)

    def _small(self) -> dict[int, torch.UntypedStorage]:
        """The storages of the call's own results that nothing saves, if they have no more bytes in all than may be copied."""
        plan, watch = self._plan, self.watch
        results, kept = plan.results(self._result), set() if plan.copies_all else {storage_id(t) for t in plan.saved()}
        own = {storage_id(t): t.untyped_storage() for t in results if t.device == self._stream.torch_device}
        own = {key: s for key, s in own.items() if s.nbytes() and key not in watch.outside | watch.slot_ids | kept}
        return own if sum(s.nbytes() for s in own.values()) <= plan.copied else {}


def _launches(graphs: Graphs, memory: PrivatePool, places: list[range]) -> list[tuple[str, object]]:
    """The kernels at these places of the present graph: their names, and what they are given. Addresses in the pool, which are
    others in each capture, are left out."""
    launches = graphs.launches(places)
    pool = memory.spans() if launches else Spans()
    return [(name, (sizes, [None if pool.meets(n, 1) else n for n in given])) for name, sizes, given in launches]


def _no_untraced(watch: OperatorWatch, footprint: Spans) -> None:
    for (start, nbytes), (operator, line) in watch.untraced.items():
        if nbytes and not footprint.covers(start, nbytes):
            place = start, nbytes
            watch.keeper = memos.keeper(lambda kept: memory_of(kept) == place)  # noqa: B023  (asked here)
            raise Refusal(
                f"{operator} reads a tensor that phonograph cannot trace back to an argument or to the function's own "
                "variables",
                "pass it as an argument, or keep it as an attribute, closure variable or global",
                line,
            )


@contextmanager
def _capturing(graphs: Graphs, states: Known) -> Iterator[None]:
    whole = False

    def give_up() -> None:
        if not whole:
            graphs.give_up()
            states.put_back()

    with uncollected(), ended(told_as_live()), standing(give_up):
        graphs.begin()
        yield
        graphs.end()
        whole = True
        if not states.put_back():
            raise Refusal("leaves a random generator with the state of another (graphsafe_set_state)",
                          "give it its own again")  # fmt: skip


@contextmanager
def _not_begun(watch: CudaWatch, index: int) -> Iterator[None]:
    """After a capture, dropout of cuDNN's begins anew if it would before. (After a call that sets the generator's state it
    does so in any case; each run of such a recording says so.)"""
    try:
        yield
    finally:
        if watch.begins_dropout and not watch.sets_states:
            reset(torch.cuda.default_generators[index])
        elif watch.sets_states and watch.drops_out and not watch.begins_dropout:
            forgotten(index)


def _surplus(index: int) -> int:
    """torch tells a graph where the generator stands only if the graph moves it on, and a call that sets its state may
    end where it began. Then a step is added here, which each run takes back."""
    state = torch.cuda.default_generators[index].get_state()
    if CudaState.of(state).offset:
        return 0
    CudaState.of(state).offset = _STEP
    torch.cuda.default_generators[index].set_state(state)
    return _STEP


def once(call: Callable[[], Any], rewind: Rewind | None, stream: CaptureStream, generators: GraphGenerators) -> Any:
    """Capture a call, play it, and forget it: for what can only run captured, and could not be recorded. Its result is in
    memory of its own."""
    generator = generators.default
    now = generator.get_state()
    with stream.on():
        states = Known([generator, *generators.known], generators.lent)
        graphs = Graphs(stream.stream, torch.cuda.graph_pool_handle(), generators.known, states)
        with _capturing(graphs, states):
            result = call()
            if rewind is not None:
                _surplus(stream.index)
        graph = graphs.segments[0].graph
        graph.instantiate()
        if rewind is not None:
            rewind.begin()
            for own in rewind.own:
                rewind.begin_own(own)
        graph.replay()
        if rewind is not None:
            put(generator, now)
            reset(generator)
        leaves: list[object] = []
        shape = flatten(result, leaves)
        copies = iter([leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])
        return unflatten(shape, copies)
