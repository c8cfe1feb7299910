"""The capture of a call on the CPU: each operator runs for real, and is noted.

What the call writes outside is put back in the end, so that from outside a capture is a dry run, as on CUDA.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterable, Sequence, Set
from functools import partial

import torch
from torch import Tensor

from ..._torch.dynamic import Args, Kwargs, Thing
from ..._torch.modes import without_modes
from ..._torch.operators import OpOverload, calls_higher_order
from ..._torch.process_groups import groups_tell_their_end, stands_for_work
from ..._torch.tensors import has_memory, storage_id
from ...aten import operators
from ...aten.collectives import COLLECTIVES, called, refusal
from ...aten.operators import NO_TENSORS, Meaning
from ...capture.breaks import Break, MarkedBreak
from ...capture.dispatch import OperatorWatch
from ...capture.effects import ANYONE, Effect, Starts
from ...capture.exports import REMEDY
from ...capture.host_numbers import CHECKS
from ...capture.notes import Note
from ...capture.python_events import pause_profiling
from ...capture.recording import Made, Program, memory_of
from ...capture.value_checks import Check
from ...errors import Elsewhere, Refusal
from ...guards.reachable import Reach
from ...guards.snapshot import changed
from ...memory.spans import Spans
from ...python.identity import identity
from ...python.origin import users_line
from ...values.host_scalars import READS_NUMBER
from ...values.wording import source_of
from ..cuts import UNDONE
from ..segments import FAILS, Segments
from .arena import Arena
from .bodies import CHOICE, LOOP, Old, Trial
from .bystanders import Bystanders
from .collectives import Exchange, UnderWay, made_by, stand_in
from .out_variants import tried, variant_of
from .program import NOTHING, TapeProgram, read_state
from .raising import may_raise
from .steps import Operand, Place, Step

__all__ = ["Tape"]

aten = torch.ops.aten

# Compiled code calls its own kernels: a tape of operators would not see them.
COMPILED: Starts = {
    "compile_wrapper": [
        (
            os.path.join("_dynamo", "eval_frame.py"),
            lambda frame: not calls_higher_order(frame.f_back),
            Effect("calls a torch.compile'd function, whose kernels the CPU device cannot see",
                   "record the uncompiled function on the CPU", ANYONE),
        )
    ]
}  # fmt: skip


class Tape(OperatorWatch):
    """Runs each operator for real, notes it, and remembers how to undo what it wrote outside."""

    calls_operators = True
    reads_counts = values_here = True

    def __init__(self, device: torch.device, reach: Reach, slots: list[Tensor], borrowed: Sequence[bool],
                 arena: Arena) -> None:  # fmt: skip
        super().__init__(device, reach, slots, borrowed)
        self._arena = arena
        self._steps: list[Step] = []
        self._cuts: list[tuple[int, Break, list[Operand], list[Operand]]] = []  # after how many steps, and what lies where
        self._places: dict[int, Place] = {}
        self._undo: list[Old] = []
        self._undone: set[int] = set()
        self._top = self._steps  # those that are in no body
        self._trials: list[Trial] = []  # bodies that run now, the innermost last
        self._lent_by_others: dict[int, tuple[int, int, bytes]] = {}  # memory of arrays, and what was there
        self._under_way: list[UnderWay] = []
        self._raising = 0  # where one of the first so many steps raises in a replay, the call begins again
        self._put_back: dict[int, torch.UntypedStorage] = {}  # what is put back then
        self._shows: int | None = None  # the steps before the first that writes outside
        self._same = 0  # those up to which Python's places outside were as before
        self.drew = False
        self._bystanders = Bystanders((n, t) for n, t in reach.tensors.values() if storage_id(t) not in self.gathered)
        self._before = self._to_begin_with = [(h, h.read()) for h in reach.holders if h.dial is None]
        self._generator_states = [(g, g.get_state()) for g in (torch.default_generator, *self.generators)
                                  if g.device.type == "cpu"]  # fmt: skip

    def stood_in(self) -> None:
        # In a replay the caller's own tensors stand there until the call changes that.
        self._to_begin_with = [(holder, holder.read()) for holder, _ in self._before]

    def frames(self) -> Starts:
        return {**super().frames(), **COMPILED}

    def meet(self, generator: torch.Generator) -> None:
        super().meet(generator)
        self._generator_states.append((generator, generator.get_state()))

    def _see(self, m: Meaning, args: Args, kwargs: Kwargs, note: Note) -> None:
        """Where a call says on which device it works, is seen before an operator has drawn random numbers there."""
        super()._see(m, args, kwargs, note)
        if self._lent_by_others:
            self._see_arrays(m, args, kwargs, note.keys)
        if kwargs and (named := kwargs.get("device")) is not None:
            self._stays_here(m, torch.device(named))
        for t in note.tensors:
            if not t.is_cpu:
                self._stays_here(m, t.device)

    def _see_arrays(self, m: Meaning, args: Args, kwargs: Kwargs, keys: Iterable[int]) -> None:
        """A replay has what an array held when a tensor was made of it, and has no array."""
        for key in {*keys} & self._lent_by_others.keys():
            address, nbytes, before = self._lent_by_others[key]
            if ctypes.string_at(address, nbytes) != before:
                raise Refusal(f"{source_of(m.name)} reads a tensor on the memory of an array that was written since",
                              "make the tensor of the array when it is complete, or by torch.tensor")  # fmt: skip
        if any(storage_id(t) in self._lent_by_others for t in operators.written_by(m, args, kwargs)):
            raise Refusal(f"{source_of(m.name)} writes a tensor on the memory of an array", "write a clone of it")

    def look_at_bystanders(self) -> None:
        """Refuse a call that has written memory outside by no operator. (A backward works on what its forward has saved, and
        some operators write there without saying so: that of oneDNN's recurrent layers.)"""
        name = self._bystanders.put_back(t.untyped_storage() for t in self.written.values())
        if name and self.may_begin_again:
            raise Refusal(f"changes the memory of {name} without an operator", f"{REMEDY}, which gets {name} as an argument")

    def close_arrays(self, leaving: Set[int]) -> None:
        """A result on the memory of an array would be one of its own in a replay."""
        if leaving & self._lent_by_others.keys():
            raise Refusal("returns a tensor on the memory of an array", "return a clone of it")

    def _stays_here(self, m: Meaning, device: torch.device) -> None:
        if device.type not in ("cpu", "meta"):
            refusal = Elsewhere(f"{m.name} works on {device}, and the call's arguments are on the CPU",
                                "move the arguments to the device before the call")  # fmt: skip
            refusal.device = device
            raise refusal

    def perform(self, func: OpOverload, m: Meaning, args: Args, kwargs: Kwargs, note: Note | None = None) -> Thing:
        if m.communicates:
            return self._exchange(func, m, args, kwargs)
        if m.constant:
            return self._constant(operators.constant(m, args[0]))
        if m.metadata_only:
            return func(*args, **kwargs)
        note = note or Note(args, kwargs, self.known)
        if may_raise(m.name, args) or kwargs.get("rounding_mode") is not None:
            self._may_raise(source_of(m.name), operators.written_by(m, args, kwargs))
        reads_only = m.plain and m.compiled  # then its arguments are afterwards what they were
        places: list[Place] = []
        if not reads_only:
            self._save(operators.written_by(m, args, kwargs))
            places = self._lying(note)
        states = {g: g.get_state() for g, _ in self._generator_states} if m.random else {}
        self.drew = self.drew or m.random or not m.compiled  # Python code of others may draw without saying so
        if m.others:
            self._calls_others(m)
        casts = () if m.usual else self.casts.within(m)
        if m.usual:
            out = func(*args, **kwargs)
        else:
            self.repeated = not m.compiled
            try:
                out = self.casts.called(m, casts, func, args, kwargs)
            finally:
                self.repeated = False
        results = [out] if type(out) is Tensor else operators.tensors_in(out, [])
        if m.reads_host and not results:
            return out  # it has read what holds the same in each replay
        made = self.memory_in(m, results)
        if results and not made:
            return out  # nothing that a replay would compute
        for t in results:
            if not t.is_cpu:
                self._stays_here(m, t.device)
        if len(made) < len(results):
            is_made = set(map(identity, made))
            fresh = [identity(t) in is_made and storage_id(t) not in self.known for t in results]
        else:
            fresh = [t.untyped_storage()._cdata not in self.known for t in results]
        any_fresh = True in fresh
        if reads_only:
            if results and not any_fresh:
                return out  # views
            places = self._lying(note)
        if identity(func) in NOTHING and fills_memory():
            return self._constant(out)
        operands = [self._new(t) if new else None for t, new in zip(results, fresh, strict=True)]
        variant = None
        infers = m.calls and torch.is_inference_mode_enabled() and _any_trained(args, kwargs)
        if results and not infers and False not in fresh and (found := variant_of(func, len(results))) is not None:
            known = identity(func), *note.form(*[o.kind for o in operands if o is not None])
            variant = tried(found, known, args, kwargs, results, states)
        works = bool(m.writes or m.writes_named or any_fresh or not results)
        if works and not m.name.startswith("profiler::"):
            step = Step(func, note.args, note.kwargs, operands, variant, casts, infers=infers, places=places)
            self._steps.append(step)
        return out

    def _calls_others(self, m: Meaning) -> None:
        if self.dials is not None and changed(self._before):
            self.dials.convert_no_more()
        for place in changed(self._before):
            raise Refusal(f"{source_of(m.name)}, which may be code that asks for it, is called while {place} is another "
                          "than before the call", "change it before the call")  # fmt: skip
        self._same = self.position() + 1

    def _lying(self, note: Note) -> list[Place]:
        """Where the tensors lie that have a look in this note, in order."""
        places, looked_at = self._places, zip(note.tensors, note.keys, note.looks, strict=True)
        return [places.get(key) or self._place_of(t, key) for t, key, look in looked_at if look]

    def _place_of(self, t: Tensor, key: int) -> Place:
        # Not kept alive: a recording whose tensors outside are gone is never played (`slots/constants.py`).
        storage, own = t.untyped_storage(), key in self.gathered
        at = self._arena.take(storage.nbytes()) if own else storage.data_ptr()
        place = self._places[key] = Place(at, storage.nbytes(), planned=own)
        return place

    def position(self) -> int:
        return len(self._top) + len(self._cuts)  # each of which counts as a step

    def captured(self) -> int:
        return len(self._top) - (self._cuts[-1][0] if self._cuts else 0)

    # -- branches and loops

    def capture_branch(self, index: Tensor, bodies: Sequence[Callable[[], None]]) -> None:
        taken = int(_read(index))
        pieces, left = [], None
        for i, body in enumerate(bodies):
            steps, found = self._body(body, taken=i == taken)
            pieces.append(steps)
            left = found or left
        self._leave(left)
        self._steps.append(Step(CHOICE, (self._note(index), *pieces), {}, []))

    def capture_loop(self, condition: Callable[[], Tensor], body: Callable[[], None]) -> None:
        asked: list[Tensor] = []
        first, left = self._body(lambda: asked.append(condition()), taken=True)
        self._leave(left)
        goes_on = self._note(asked[0])
        steps, left = self._body(body, taken=bool(_read(asked.pop())))
        self._leave(left)
        # What raises in one turn does so after all that an earlier one has written.
        if self._raising > len(self._top) and not self._begins_again():
            raise self.located(Refusal("loops over what may raise depending on data, after much of its state was written",
                                       "let the exception out, and catch it around the call"))  # fmt: skip
        self._steps.append(Step(LOOP, (goes_on, first, steps), {}, []))

    def _body(self, body: Callable[[], None], *, taken: bool) -> tuple[list[Step], Trial | None]:
        """Run a body on a tape of its own, and put back what it has written. Returns its steps, and what is to be written if it
        is the one that is `taken`."""
        outer, self._steps = self._steps, []
        known = [g for g, _ in self._generator_states]
        trial = Trial(self._made, known)
        self._trials.append(trial)
        try:
            body()
        finally:
            self._trials.pop()
            steps, self._steps = self._steps, outer
            trial.end([g for g, _ in self._generator_states[len(known) :]], taken=taken)
        return steps, trial if taken else None

    def _leave(self, trial: Trial | None) -> None:
        """The call goes on as after this body."""
        if trial is not None:
            trial.again()

    def communicates(self, m: Meaning, args: Args, kwargs: Kwargs) -> None:
        known = COLLECTIVES.get(m.name)
        if known is None or not known.on_tapes:
            raise refusal(m.name)
        if known.name == "wait_tensor":
            return
        if not groups_tell_their_end():
            raise refusal(m.name, ", of which this release of torch tells too little")
        self._may_fail(m.name)
        self.communicated = True
        self.more = self.more or f"communicates with other ranks ({known.name})"

    def _may_fail(self, name: str) -> None:
        """Where another rank is gone, a replay raises what eager does."""
        if self.comes_to_users(any_kind=False):
            raise refusal(name, ", and an except or finally clause or a context manager of yours is around it",
                          "let the exception out, and catch it around the call")  # fmt: skip

    def _exchange(self, func: OpOverload, m: Meaning, args: Args, kwargs: Kwargs) -> Thing:
        """A collective, which does not run now. Returns what stands for its result."""
        if called(m.name) == "wait_tensor":
            if m.name.endswith("_autograd"):
                return func(*args, **kwargs)
            for one in [one for one in self._under_way if one.work is None and one.has(args[0])]:
                self._wait(one)
            return args[0]
        given, written = operators.operands(args, kwargs), operators.written_by(m, args, kwargs)
        self._save(written)
        made = [] if written or func.namespace == "c10d" else made_by(func, args, kwargs)
        noted = self._note(args), self._note(kwargs)
        places = [*map(self._new, made)] if made else [*map(self._note, written)]
        exchange = Exchange(func)
        step = Step(exchange.begin, (*noted, places), {}, [])
        self._steps.append(step)
        stand_in(m, args, made or written, given)
        found = made or written
        one = UnderWay(exchange, m.name, step, places, found, given, users_line())
        self._under_way.append(one)
        returns = [str(r.type) for r in func._schema.returns]
        if any("Work" in kind for kind in returns):
            future = found if self.workplaces else None  # that is how DistributedDataParallel waits for its buckets
            one.work = stands_for_work(partial(self._wait, one), partial(self._asks, one), future)
            result = [one.work.boxed() if "Work" in kind else args[0] for kind in returns]
            return result[0] if len(result) == 1 else tuple(result)
        if not returns:
            self._wait(one)
            return None
        return found if "List" in returns[0] else found[0]

    def _wait(self, one: UnderWay, timeout: object = None) -> None:
        """The call waits for a collective."""
        listening = pause_profiling()
        try:
            if one not in self._under_way:
                return
            self._under_way.remove(one)
            one.exchange.at_once = self._steps[-1] is one.step and timeout is None
            if not one.exchange.at_once:
                self._may_fail(one.name)
                self._steps.append(Step(one.exchange.finish, (one.places, timeout), {}, []))
            one.work, one.results, one.tensors = None, (), ()
        except Refusal as refused:
            raise self.located(refused) from None
        finally:
            if listening is not None:
                sys.setprofile(listening)

    def _asks(self, one: UnderWay) -> None:
        raise self.located(Refusal(f"waits for a collective otherwise than by wait() ({called(one.name)})", "call wait()"))

    def under_way(self) -> str:
        return called(self._under_way[0].name) if self._under_way else super().under_way()

    def release(self) -> None:
        """The capture is over. What stands for collectives refers to this."""
        while self._under_way:
            self._under_way.pop().work = None

    def all_arrived(self) -> None:
        """The call has ended."""
        for one in self._under_way:
            found = refusal(one.name, ", and does not wait for what it begins", "wait() for it in the same call")
            found.where = one.where
            raise found

    def _may_raise(self, said: str, written: Sequence[Tensor] = ()) -> None:
        """This may raise in a replay, which knows of no Python code that would run after it, and of no value that the call has
        changed by then: the call has to begin again there, and what it has `written` outside is put back."""
        place = next(iter(changed(self._to_begin_with)), None)
        if place is None:
            self._same = self.position() + 1
            if not self.caught(any_kind=False):
                return
        for t in written:
            self.writes(t)
        if not self._begins_again():
            if self.dials is not None:
                self.dials.convert_no_more()
                place = next(iter(changed(self._to_begin_with)), None)
            if place is None and not self.caught(any_kind=False):
                self._same = self.position() + 1
                return
            said = f"{said} may raise depending on data"
            raise self.located(Refusal(f"{said}, while {place} is another than before the call", "change it before the call")
                               if place is not None else
                               Refusal(f"{said}, and an except or finally clause or a context manager of yours is around it",
                                       "let the exception out, and catch it around the call"))  # fmt: skip

    def _begins_again(self) -> bool:
        """Have what is outside put back where something raises in a replay, up to here. False if that cannot be."""
        outside = {s._cdata: s for s in self.changed()}
        done = self.communicated or any(isinstance(part, MarkedBreak) for part in self.parts)
        if done or not self.may_begin_again or sum(s.nbytes() for s in outside.values()) > UNDONE:
            return False
        self._raising, self._put_back = len(self._top) + 1, outside
        return True

    def takes(self, check: Check) -> bool:
        """Where its exception cannot be made here, the call begins again, and code makes it. If that also catches it, it is a
        way to go on."""
        return not check.again or (not self.caught(any_kind=True) and self._begins_again())

    def checks(self, check: Check, answer: Tensor) -> bool:
        """It is looked at where it is: a replay raises there, as eager does."""
        with without_modes():
            found = bool(READS_NUMBER(answer))  # for `Tensor.item` is the call's, which may go on by numbers
        self._may_raise(CHECKS)
        if found is not check.good:  # here and now: the live call raises
            advice = "where that is rare, nothing" if check.again else "see the exception"
            raise self.located(Refusal(FAILS, advice, failed=True))
        given = [self._note(t) if storage_id(t) in self._places else None for t in check.given]
        check.given.clear()
        self._steps.append(Step(check, (self._note(answer), given), {}, []))
        return check.good

    def state_read(self, state: Tensor, of: torch.device) -> None:
        super().state_read(state, of)
        if of.type == "cpu":
            self._steps.append(Step(read_state, (), {}, [self._new(state)]))

    def state_set(self, state: Tensor, of: torch.device) -> None:
        name = self.known.get(storage_id(state))
        if of.type != "cpu" or name is None:
            super().state_set(state, of)
            return
        if name:
            self.touched.add(storage_id(state))
        self.drew = True
        self._steps.append(Step(torch.default_generator.set_state, (self._note(state),), {}, []))

    def cut(self, part: Break, inputs: list[Tensor], results: list[Tensor]) -> None:
        self._cuts.append((len(self._steps), part, [*map(self._note, inputs)], [*map(self._note, results)]))
        self._same = self.position()

    def _constant(self, t: Tensor) -> Tensor:
        """A tensor made of Python numbers: each replay starts from its value again."""
        super()._constant(t)
        if not t.untyped_storage().resizable():  # it is an array's
            place = memory_of(t)
            self._lent_by_others[storage_id(t)] = *place, ctypes.string_at(*place)
        operand = self._new(t)
        self._steps.append(Step(aten.clone.default, (t.clone(),), {}, [operand]))
        return t

    def _save(self, written: list[Tensor]) -> None:
        for t in written:
            key = storage_id(t)
            if self._shows is None and (key in self.theirs or key in self.slot_ids):
                self._shows = self.position()
            if key in self.theirs and key not in self._undone:
                self._undo.append((t.untyped_storage(), t.untyped_storage().clone()))
                self._undone.add(key)
            birth = self._births.get(key)
            for trial in self._trials:
                if (birth is None or birth.number < trial.made) and key not in trial.undone:
                    trial.undo.append((t.untyped_storage(), t.untyped_storage().clone()))
                    trial.undone.add(key)

    def _new(self, t: Tensor) -> Operand:
        storage = t.untyped_storage()
        key = storage._cdata
        place = self._places.get(key) if key in self.known else None
        if place is None:
            nbytes = storage.nbytes()
            place = self._places[key] = Place(self._arena.take(nbytes), nbytes, planned=True)
            self._begins(storage)
        return Operand(place, t)

    def died(self, key: int) -> None:
        super().died(key)
        self._lent_by_others.pop(key, None)
        place = self._places.pop(key, None)
        if place is not None and place.planned:
            self._arena.give(place.address)

    def _note(self, value: Thing) -> Thing:
        if type(value) in NO_TENSORS:
            return value
        if isinstance(value, Tensor):
            if not has_memory(value):
                return value  # it is the same at each replay
            key = storage_id(value)
            return Operand(self._places.get(key) or self._place_of(value, key), value)
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._note, value))
        if isinstance(value, dict):
            return {k: self._note(v) for k, v in value.items()} if value else {}
        return value

    def undo(self) -> None:
        """Put back everything that the call wrote outside, and the generators. Whatever dies from now on had its place in the
        arena before, which may be another capture's by then."""
        self._births.clear()
        # Backwards: two storage objects may stand for one memory (borrowed arguments), and the first copy is the oldest.
        for storage, old in reversed(self._undo):
            storage.copy_(old)
        for generator, state in self._generator_states if self.drew else ():
            generator.set_state(state)

    def program(self, footprint: Spans, slots: list[Tensor], keep: object) -> Program:
        """What a replay runs: the steps, in segments if operators run live between."""
        ends = [n for n, *_ in self._cuts]
        pieces = [*enumerate(zip([0, *ends], [*ends, len(self._steps)], strict=True))]
        programs = [TapeProgram(self._steps[a:b], footprint, [] if i else slots, keep, raising=max(0, self._raising - a))
                    for i, (a, b) in pieces]  # fmt: skip
        shows = max(self.position() if self._shows is None else self._shows, self._same)
        if not self._cuts and not self._raising:
            programs[0].shows = shows
            return programs[0]
        for _, part, inputs, results in self._cuts:
            with torch.inference_mode(False), torch.no_grad():
                part.lies([o.tensor() for o in inputs], [o.tensor() for o in results])
        generators = [g for g, _ in self._generator_states] if self.drew else []
        starts = [0, *(i + end for i, end in enumerate([*ends, len(self._steps)], 1))]
        written = [*(self._put_back | {s._cdata: s for s in self.undone}).values()]
        return Segments(programs, [part for _, part, *_ in self._cuts], written, generators, len(self._steps), starts, shows)

    def close(self, leaving: set[int]) -> dict[int, Made]:
        """End the tape. Storages that still live and are not among the results (`leaving`) live on outside: gradients,
        mostly. The tape then writes to that very memory."""
        made: dict[int, Made] = {}
        for key, birth in list(self._births.items()):
            storage, place = birth(), self._places.get(key)
            if storage is None or place is None or not place.planned:
                continue
            if key in leaving:
                made[key] = Made(place.address, place.nbytes)
            else:
                place.anchor = storage
        self._births.clear()
        return made


def _any_trained(args: Args, kwargs: Kwargs) -> bool:
    return any(t.requires_grad for t in operators.operands(args, kwargs))


def _read(t: Tensor) -> Thing:
    """The number in a tensor, which is read by nobody of the call."""
    with without_modes():
        return aten._local_scalar_dense.default(t)


def fills_memory() -> bool:
    """Whether `torch.empty` fills what it gives, so that the same is in it each time."""
    return torch.are_deterministic_algorithms_enabled() and getattr(
        torch.utils.deterministic, "fill_uninitialized_memory", True
    )
