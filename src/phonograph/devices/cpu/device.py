"""The CPU device: a tape of aten operators over fixed memory.

It is a device, not a mock. A call is captured by running it once under `Tape`, which notes every operator below
autograd, and then undoing what it wrote, so that from outside a capture is a dry run, as on CUDA. A replay runs the
noted operators over the same addresses: no Python of the user's, no autograd, no allocation; `out=` variants where the
operator has one, and views cost nothing, because they were worked out once.

The memory between operators comes from an `Arena`, which reuses an address as soon as the tensor on it has died. Held
outputs are therefore really overwritten by a later replay if liveness is ever misjudged, here as on a GPU.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from ..._torch.modes import below_autograd, without_modes
from ..._torch.process_groups import groups_tell_their_end, stands_for_work
from ..._torch.tensors import has_memory, maker, storage_at, storage_id
from ...aten import operators
from ...aten.autocast import Casts
from ...aten.collectives import COLLECTIVES, called, refusal
from ...aten.operators import Meaning
from ...call.signature import ALIGNMENT
from ...capture.breaks import Break
from ...capture.dispatch import OperatorWatch
from ...capture.effects import ANYONE, Effect, Starts
from ...capture.host_numbers import CHECKS
from ...capture.python_events import unheard
from ...capture.recording import Program, Recording, Tensors, memory_of
from ...capture.value_checks import Check
from ...errors import Elsewhere, Refusal
from ...guards.guards import changed
from ...guards.reachable import Reach
from ...memory.pool import Fill, Pool, extent, once, unowned
from ...memory.spans import Spans
from ...python.identity import identity
from ...python.origin import users_line
from ...state.rng import Rewind
from ...values.wording import Failure, at_work
from ..base import Captured, CapturePlan, Made
from ..host_reads import ITEM, NUMBERS, READS, host_reads_refused, reads_value
from ..segments import Segments
from .arena import Arena
from .bindings import spelled
from .collectives import Exchange, UnderWay, made_by, stand_in
from .out_variants import Variant, tried, variant_of

__all__ = ["CpuDevice"]

aten = torch.ops.aten


class _Place:
    """The memory of one storage of the tape: at a fixed address that outlives the tape (an argument's slot, a weight,
    a gradient that lives on), or planned in the arena."""

    def __init__(self, address: int, nbytes: int, *, planned: bool) -> None:
        self.address = address
        self.nbytes = nbytes
        self.planned = planned
        self.anchor: torch.UntypedStorage | None = None

    def storage(self) -> Any:
        if self.anchor is not None:
            return self.anchor
        return storage_at(self.address, self.nbytes, torch.device("cpu"))


class _Operand:
    """A tensor of the tape before its memory is final."""

    __slots__ = ("kind", "offset", "place")

    def __init__(self, place: _Place, t: torch.Tensor) -> None:
        self.place, self.offset = place, t.storage_offset()
        self.kind = _kind(t)

    def tensor(self) -> torch.Tensor:
        dtype, size, stride, conjugate, negative = self.kind
        t = torch.empty(0, dtype=dtype, device="cpu").set_(self.place.storage(), self.offset, size, stride)
        t = torch.conj(t) if conjugate else t
        return torch._neg_view(t) if negative else t


def _kind(t: torch.Tensor) -> tuple[torch.dtype, torch.Size, tuple[int, ...], bool, bool]:
    return t.dtype, t.size(), t.stride(), t.is_conj(), t.is_neg()


class _Step:
    """One operator of the tape: what to call, with what, and which new tensors its results go to."""

    __slots__ = ("args", "autocast", "func", "grad_mode", "kwargs", "results", "variant")

    def __init__(
        self, func: Any, args: Any, kwargs: Any, results: list[_Operand | None], variant: Variant | None = None,
        casts: tuple[Any, ...] = (),
    ) -> None:  # fmt: skip
        self.func, self.args, self.kwargs, self.results, self.variant = func, args, kwargs, results, variant
        self.grad_mode, self.autocast = torch.is_grad_enabled(), casts


class Tape(OperatorWatch):
    """Runs each operator for real, notes it, and remembers how to undo what it wrote outside."""

    def __init__(self, device: torch.device, reach: Reach, slots: list[torch.Tensor], borrowed: Sequence[bool],
                 arena: Arena) -> None:  # fmt: skip
        super().__init__(device, reach, slots, borrowed)
        self._arena = arena
        self._steps: list[_Step] = []
        self._cuts: list[tuple[int, Break, list[_Operand], list[_Operand]]] = []  # after how many steps, and what lies where
        self._places: dict[int, _Place] = {}
        self._undo: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        self._undone: set[int] = set()
        self._lent_by_others: dict[int, tuple[int, int, bytes]] = {}  # memory of arrays, and what was there
        self._under_way: list[UnderWay] = []
        self.drew = False
        self._before = [(h, h.read()) for h in reach.holders if h.dial is None]
        self._generator_states = [(g, g.get_state()) for g in (torch.default_generator, *self.generators)
                                  if g.device.type == "cpu"]  # fmt: skip

    def frames(self) -> Starts:
        return _COMPILED

    def meet(self, generator: torch.Generator) -> None:
        super().meet(generator)
        self._generator_states.append((generator, generator.get_state()))

    def _see(self, m: Meaning, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """Where a call says on which device it works, is seen before an operator has drawn random numbers there."""
        tensors = super()._see(m, args, kwargs)
        if self._lent_by_others:
            self._see_arrays(m, args, kwargs, tensors)
        if kwargs and (named := kwargs.get("device")) is not None:
            self._stays_here(m, torch.device(named))
        for t in tensors:
            if not t.is_cpu:
                self._stays_here(m, t.device)
        return tensors

    def _see_arrays(self, m: Meaning, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> None:
        """A replay has what an array held when a tensor was made of it, and has no array."""
        for key in {*map(storage_id, tensors)} & self._lent_by_others.keys():
            address, nbytes, before = self._lent_by_others[key]
            if ctypes.string_at(address, nbytes) != before:
                raise Refusal(f"{at_work(m.name)} reads a tensor on the memory of an array that was written since",
                              "make the tensor of the array when it is complete, or by torch.tensor")  # fmt: skip
        if any(storage_id(t) in self._lent_by_others for t in operators.written_by(m, args, kwargs)):
            raise Refusal(f"{at_work(m.name)} writes a tensor on the memory of an array", "write a clone of it")

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

    def perform(self, func: Any, m: Meaning, args: Any, kwargs: Any) -> Any:
        if m.communicates:
            return self._exchange(func, m, args, kwargs)
        if m.constant:
            return self._constant(operators.constant(m, args[0]))
        if m.metadata_only:
            return func(*args, **kwargs)
        if _may_raise(m.name, args) or kwargs.get("rounding_mode") is not None:
            self._nothing_to_clear_up(m.name)
        reads_only = m.plain and m.compiled  # then its arguments are afterwards what they were
        noted: tuple[Any, Any] = (), {}
        if not reads_only:
            self._save(operators.written_by(m, args, kwargs))
            noted = self._note(args), self._note(kwargs)
        states = {g: g.get_state() for g, _ in self._generator_states} if m.random else {}
        self.drew = self.drew or m.random or not m.compiled  # Python code of others may draw without saying so
        if m.others:
            for place in changed(self._before):
                raise Refusal(f"{at_work(m.name)}, which may be code that asks for it, is called while {place} is changed "
                              "for a time", "change it outside, around the call")  # fmt: skip
        casts = self.casts.within(m)
        self.repeated = not m.compiled
        try:
            if casts:
                with Casts.restored(casts):
                    out = func(*args, **kwargs)
            else:
                out = func(*args, **kwargs)
        finally:
            self.repeated = False
        results = [out] if type(out) is torch.Tensor else operators.tensors_in(out, [])
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
            fresh = [storage_id(t) not in self.known for t in results]
        if reads_only:
            if results and not any(fresh):
                return out  # views
            noted = self._note(args), self._note(kwargs)
        if identity(func) in _NOTHING and _fills_memory():
            return self._constant(out)
        operands = [self._new(t) if new else None for t, new in zip(results, fresh, strict=True)]
        variant = None
        if results and all(fresh) and (found := variant_of(func, len(results))) is not None:
            known = identity(func), *_described(noted[0]), *_described(noted[1].items()), *_described(operands)
            variant = tried(found, known, args, kwargs, results, states)
        works = bool(m.writes or m.writes_named or any(fresh) or not results)
        if works and not m.name.startswith("profiler::"):
            self._steps.append(_Step(func, *noted, operands, variant, casts))
        return out

    def communicates(self, m: Meaning, args: Any, kwargs: Any) -> None:
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

    def _exchange(self, func: Any, m: Meaning, args: Any, kwargs: Any) -> Any:
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
        step = _Step(exchange.begin, (*noted, places), {}, [])
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

    def _wait(self, one: UnderWay, timeout: Any = None) -> None:
        """The call waits for a collective."""
        listening = unheard()
        try:
            if one not in self._under_way:
                return
            self._under_way.remove(one)
            one.exchange.at_once = self._steps[-1] is one.step and timeout is None
            if not one.exchange.at_once:
                self._may_fail(one.name)
                self._steps.append(_Step(one.exchange.finish, (one.places, timeout), {}, []))
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

    def let_go(self) -> None:
        """The capture is over. What stands for collectives refers to this."""
        while self._under_way:
            self._under_way.pop().work = None

    def all_arrived(self) -> None:
        """The call has ended."""
        for one in self._under_way:
            found = refusal(one.name, ", and does not wait for what it begins", "wait() for it in the same call")
            found.where = one.where
            raise found

    def _nothing_to_clear_up(self, name: str) -> None:
        """A replay knows of no Python code that would run after an exception."""
        if self.caught(any_kind=False):
            raise Refusal(f"{at_work(name)} may raise depending on data, and an except or finally clause or a context manager "
                          "of yours is around it", "let the exception out, and catch it around the call")  # fmt: skip
        self._nothing_is_changed(at_work(name))

    def _nothing_is_changed(self, said: str) -> None:
        for place in changed(self._before):
            raise Refusal(f"{said} may raise depending on data, while {place} is changed for a time",
                          "change it outside, around the call")  # fmt: skip

    def checks(self, check: Check, answer: torch.Tensor) -> bool:
        """It is looked at where it is: a replay raises there, as eager does."""
        with without_modes():
            found = bool(answer.item())
        good = super().checks(check, answer)
        self._nothing_is_changed(CHECKS)
        if found is not good:  # here and now: the live call raises
            raise self.located(Refusal(f"{CHECKS} fails", "see the exception", failed=True))
        given = [self._note(t) if storage_id(t) in self._places else None for t in check.given]
        check.given.clear()
        self._steps.append(_Step(check, (self._note(answer), given), {}, []))
        return good

    def state_read(self, state: torch.Tensor, of: torch.device) -> None:
        super().state_read(state, of)
        if of.type == "cpu":
            self._steps.append(_Step(_read_state, (), {}, [self._new(state)]))

    def state_set(self, state: torch.Tensor, of: torch.device) -> None:
        name = self.known.get(storage_id(state))
        if of.type != "cpu" or name is None:
            super().state_set(state, of)
            return
        if name:
            self.touched.add(storage_id(state))
        self.drew = True
        self._steps.append(_Step(torch.default_generator.set_state, (self._note(state),), {}, []))

    def cut(self, part: Break, inputs: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        self._cuts.append((len(self._steps), part, [*map(self._note, inputs)], [*map(self._note, results)]))

    def _constant(self, t: torch.Tensor) -> torch.Tensor:
        """A tensor made of Python numbers: each replay starts from its value again."""
        super()._constant(t)
        if not t.untyped_storage().resizable():  # it is an array's
            place = memory_of(t)
            self._lent_by_others[storage_id(t)] = *place, ctypes.string_at(*place)
        operand = self._new(t)
        self._steps.append(_Step(aten.clone.default, (t.clone(),), {}, [operand]))
        return t

    def _save(self, written: list[torch.Tensor]) -> None:
        for t in written:
            key = storage_id(t)
            if key in self.theirs and key not in self._undone:
                self._undone.add(key)
                self._undo.append((t.untyped_storage(), t.untyped_storage().clone()))

    def _new(self, t: torch.Tensor) -> _Operand:
        storage = t.untyped_storage()
        if storage._cdata not in self._places or storage._cdata not in self.known:
            self._places[storage._cdata] = _Place(self._arena.take(storage.nbytes()), storage.nbytes(), planned=True)
            self._begins(storage)
        return _Operand(self._places[storage._cdata], t)

    def died(self, key: int) -> None:
        super().died(key)
        self._lent_by_others.pop(key, None)
        place = self._places.pop(key, None)
        if place is not None and place.planned:
            self._arena.give(place.address)

    def _note(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            place = self._places.get(storage_id(value)) if type(value) is torch.Tensor and value.is_cpu else None
            if place is None:
                if not has_memory(value):
                    return value  # it is the same at each replay
                key = storage_id(value)
                place = self._places.get(key)
            if place is None:
                # Not kept alive: a recording whose tensors outside are gone is never played (reliance.py).
                storage, own = value.untyped_storage(), key in self.gathered
                at = self._arena.take(storage.nbytes()) if own else storage.data_ptr()
                place = self._places[key] = _Place(at, storage.nbytes(), planned=own)
            return _Operand(place, value)
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._note, value))
        if isinstance(value, dict):
            return {k: self._note(v) for k, v in value.items()}
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

    def program(self, footprint: Spans, slots: list[torch.Tensor], keep: Any) -> Program:
        """What a replay runs: the steps, in segments if operators run live between."""
        ends = [n for n, *_ in self._cuts]
        pieces = [self._steps[a:b] for a, b in zip([0, *ends], [*ends, len(self._steps)], strict=True)]
        programs = [TapeProgram(steps, footprint, [] if i else slots, keep) for i, steps in enumerate(pieces)]
        if not self._cuts:
            return programs[0]
        for _, part, inputs, results in self._cuts:
            with torch.inference_mode(False), torch.no_grad():
                part.lies([o.tensor() for o in inputs], [o.tensor() for o in results])
        generators = [g for g, _ in self._generator_states] if self.drew else []
        return Segments(programs, [part for _, part, *_ in self._cuts], self.undone, generators, len(self._steps))

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


_FILLS: dict[int, Callable[[Any, Any], Any]] = {identity(func): value for func, value in {
    aten.zeros.default: lambda a, k: 0, aten.zeros_like.default: lambda a, k: 0, aten.new_zeros.default: lambda a, k: 0,
    aten.ones.default: lambda a, k: 1, aten.ones_like.default: lambda a, k: 1, aten.new_ones.default: lambda a, k: 1,
    aten.full.default: lambda a, k: a[1], aten.full_like.default: lambda a, k: a[1],
    aten.new_full.default: lambda a, k: a[2], aten.scalar_tensor.default: lambda a, k: a[0],
}.items()}  # fmt: skip
# Operators that look at values on the CPU and raise an exception: indices out of range, singular matrices, divisions by 0.
_RAISING = tuple(f"aten::{name}" for name in (
    "embedding", "index", "gather", "scatter", "take", "put", "nll_loss", "linalg_", "_linalg_", "cholesky", "inverse",
    "triangular_solve", "lu_", "ormqr", "geqrf", "multinomial", "poisson", "binomial", "binary_cross_entropy",
    "_assert", "floor_divide", "remainder", "fmod", "multi_margin_loss", "multilabel_margin_loss", "one_hot",
    "_ctc_loss", "segment_reduce", "bincount", "masked_scatter", "_embedding_bag", "bernoulli", "normal", "max_unpool", "histc",
    "repeat_interleave",
))  # fmt: skip
_BY_NUMBERS = frozenset({"aten::bernoulli_", "aten::normal_"})  # which are no data, but for tensors among them


def _may_raise(name: str, args: Any) -> bool:
    """Whether an operator may raise depending on data."""
    if name in _BY_NUMBERS:
        return any(isinstance(x, torch.Tensor) for x in args[1:])
    return name.startswith(_RAISING) and name != "aten::linalg_vector_norm"


_COPIES = frozenset(map(identity, (aten.clone.default, aten._to_copy.default)))
_NOTHING = frozenset(map(identity, (aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default,
                                    aten.new_empty.default, aten.new_empty_strided.default)))  # fmt: skip


def _asks_for_modes(func: Any) -> bool:
    """Whether an operator may do something else where gradients are wanted, or under autocast: this one returns what its
    backward needs; what others than torch have made may do what it likes."""
    return func is aten.mkldnn_rnn_layer.default or (isinstance(func, torch._ops.OpOverload) and operators.meaning(func).others)


def _in_modes(enabled: bool, casts: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    with torch.set_grad_enabled(enabled), Casts.restored(casts):
        return op(*args, **kwargs)


def _read_state(out: torch.Tensor) -> None:
    out.copy_(torch.default_generator.get_state())


def _fills_memory() -> bool:
    """Whether `torch.empty` fills what it gives, so that the same is in it each time."""
    return torch.are_deterministic_algorithms_enabled() and getattr(
        torch.utils.deterministic, "fill_uninitialized_memory", True
    )


class TapeProgram:
    """A tape with its memory fixed: a list of calls without arguments."""

    def __init__(self, steps: list[_Step], footprint: Spans, slots: list[torch.Tensor], keep: Any) -> None:
        self.footprint = footprint
        self.operators = len(steps)
        self.amiss: Callable[[], str | None] | None = None
        self.own_generators: Sequence[torch.Generator] = ()
        self.owned = Spans()
        self.outs: tuple[torch.Tensor, ...] = ()
        self._new: list[Callable[[], torch.Tensor]] = []
        self._fill = Fill(slots)
        self._keep = keep  # the memory itself
        self._tensors: dict[tuple[Any, ...], torch.Tensor] = {}
        with torch.inference_mode(False), torch.no_grad():
            calls = [call for step in steps if (call := self._call(step)) is not None]
        with below_autograd(), torch._C._DisableAutocast():
            self.calls = spelled(calls)
        self._probes: list[tuple[int, partial[Any], frozenset[float]]] | None = (
            None  # calls with probes of `dials`; where; which
        )
        self._numbers: dict[float, float] = {}  # what was last put in their place

    def copies(self, outs: tuple[torch.Tensor, ...]) -> None:
        self.outs = outs
        self._new = [maker(o) for o in outs]

    def run(self, sources: Tensors) -> list[torch.Tensor]:
        targets = [new() for new in self._new]
        with below_autograd(), torch._C._DisableAutocast():
            self._fill(sources)
            for call in self.calls:
                call()
            if targets:
                torch._foreach_copy_(targets, self.outs)
        return targets

    def close(self) -> None:
        self.calls = []
        self._probes = None
        self._tensors = {}
        self._keep = None

    def set_numbers(self, numbers: Mapping[float, float]) -> Set[float]:
        if self._probes is None:
            held = [(i, c, frozenset(numbers.keys() & {*_numbers_of(c)})) for i, c in enumerate(self.calls if numbers else ())]
            self._probes = [entry for entry in held if entry[2]]
        last, self._numbers = self._numbers, dict(numbers)
        for i, call, own in self._probes:
            if any(last.get(n) is not numbers[n] for n in own):
                self.calls[i] = partial(call.func, *_replaced(call.args, numbers), **_replaced(call.keywords, numbers))
        return frozenset[float]().union(*(own for _, _, own in self._probes))

    def holds(self, numbers: Set[float]) -> bool:
        return any(not numbers.isdisjoint(_numbers_of(call)) for call in self.calls)

    def _call(self, step: _Step) -> partial[Any] | None:
        """What a replay does for a step; None where the operator only allocates."""
        which = identity(step.func)  # an overload's own hash is Python code
        if which in _NOTHING:
            return None
        args, kwargs = self._real(step.args), self._real(step.kwargs)
        outs = [None if o is None else self._operand(o) for o in step.results]
        if _asks_for_modes(step.func):
            op = partial(_in_modes, step.grad_mode, step.autocast, step.func._op)
            return partial(_run_and_copy, op, args, kwargs, outs)
        if not any(o is not None for o in outs):
            return partial(step.func, *args, **kwargs)
        if step.func is _read_state:
            return partial(_read_state, outs[0])
        if which in _FILLS:
            return partial(aten.fill_.Scalar, outs[0], _FILLS[which](step.args, step.kwargs))
        if which in _COPIES:
            return partial(aten.copy_.default, outs[0], args[0])
        if step.variant is not None:
            return partial(step.variant.func, *args, **kwargs, **step.variant.outs([o for o in outs if o is not None]))
        return partial(_run_and_copy, step.func._op, args, kwargs, outs)

    def _real(self, value: Any) -> Any:
        if isinstance(value, _Operand):
            return self._operand(value)
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._real, value))
        if isinstance(value, dict):
            return {k: self._real(v) for k, v in value.items()}
        return value

    def _operand(self, o: _Operand) -> torch.Tensor:
        key = (o.place, o.offset, o.kind)
        known = self._tensors.get(key)
        if known is None:
            known = self._tensors[key] = o.tensor()
        return known


def _described(noted: Any) -> list[Any]:
    """What an operator's behaviour may depend on besides the values: kinds and shapes of these tensors, and what else is among
    them."""
    found, plain = list[Any](), list[Any]()
    _describe(noted, found, plain)
    return [*found, repr(plain)] if plain else found


def _describe(values: Any, found: list[Any], plain: list[Any]) -> None:
    for value in values:
        if type(value) is _Operand:
            found.append(value.kind)
        elif isinstance(value, torch.Tensor):
            found.append(_kind(value))
        elif isinstance(value, dict):
            _describe(value.items(), found, plain)
        elif isinstance(value, (list, tuple)) and any(isinstance(v, (_Operand, torch.Tensor)) for v in value):
            _describe(value, found, plain)
        else:
            plain.append(value)


def _numbers_of(call: partial[Any]) -> Iterator[float]:
    return _numbers((call.args, call.keywords))


def _numbers(value: Any) -> Iterator[float]:
    if type(value) is float:
        yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _numbers(v)
    elif isinstance(value, dict):
        yield from _numbers(list(value.values()))


def _replaced(value: Any, numbers: Mapping[float, float]) -> Any:
    if type(value) is float:
        return numbers.get(value, value)
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(v, numbers) for v in value)
    if isinstance(value, dict):
        return {k: _replaced(v, numbers) for k, v in value.items()}
    return value


def _run_and_copy(op: Any, args: Any, kwargs: Any, outs: list[torch.Tensor | None]) -> None:
    for out, result in zip(outs, operators.tensors_in(op(*args, **kwargs), []), strict=True):
        if out is not None:
            if out.shape != result.shape or out.dtype is not result.dtype:  # copy_ would broadcast, and convert
                raise RuntimeError(f"{op} gave a result of shape {tuple(result.shape)} and type {result.dtype}, and "
                                   f"{tuple(out.shape)} and {out.dtype} at capture")  # fmt: skip
            once(out).copy_(once(result))


def _filled(slot: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(False):
        once(slot).copy_(once(t.detach()))
    return slot


class CpuDevice:
    """The one CPU device of the process."""

    roomy = 256 << 10
    failures: Sequence[Failure] = ()
    first_uses: Sequence[str] = ()

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.pool = Pool(self.torch_device)
        self._arena = Arena()

    def beside(self, arguments: Sequence[torch.Tensor], lasting: int, spread: bool) -> Any:
        return nullcontext()

    def release_unused(self) -> None:
        """Nothing: what is freed on the CPU is not kept."""

    def apart(self) -> Any:
        return nullcontext()

    def is_current(self, streams: Sequence[torch.Stream]) -> bool:
        return False

    def slot(self, t: torch.Tensor) -> torch.Tensor:
        shift = t.data_ptr() % ALIGNMENT // t.element_size()
        nbytes = (shift + extent(t)) * t.element_size()
        place = _Place(self._arena.take(nbytes), nbytes, planned=True)
        with torch.inference_mode(False):
            return _filled(torch.empty(0, dtype=t.dtype, device="cpu").set_(place.storage(), shift, t.size(), t.stride()), t)

    def capture(self, plan: CapturePlan) -> Captured:
        self._arena.open(plan.protected)
        slots = [t if b else _filled(unowned(s), t) if s is not None else self.slot(t)
                 for t, b, s in zip(plan.arguments, plan.borrowed, plan.shared, strict=True)]  # fmt: skip
        tape = Tape(self.torch_device, plan.reach, slots, plan.borrowed, self._arena)
        tape.follow(plan.dials)
        tape.give_back = self._arena.give_back
        try:
            with tape, host_reads_refused(tape, (*READS, *NUMBERS, ITEM), reads_value):
                result = plan.call(slots, tape)
            if tape.refusal is not None:
                raise tape.refusal
            tape.all_arrived()
            kept = {storage_id(t) for t in plan.saved()}
            leaving = {storage_id(t) for t in plan.results(result)} | kept
            tape.close_arrays(leaving)
            others = tape.others(leaving)
            made = tape.close(leaving)
            footprint = Spans([*self._arena.used, *(memory_of(s) for s in plan.shared if s is not None)])
            filled = [s for s, b in zip(slots, plan.borrowed, strict=True) if not b]
            program = tape.program(footprint, filled, (self._arena.under(footprint), slots))
        finally:
            tape.undo()
            tape.let_go()
        free = {key: m.nbytes for key, m in made.items() if m.nbytes and key not in kept}
        out = tuple(free) if sum(free.values()) <= plan.copied else ()
        return Captured(result, program, made, tape, slots, slots, out, others=others)

    def once(self, call: Callable[[], Any], rewind: Rewind | None) -> Any:
        """Nothing can only run captured."""
        return call()

    def settle(self, recording: Recording) -> None:
        """Nothing: what a tape leaves behind lies outside of the arena."""

    def outlives(self, t: torch.Tensor) -> None:
        """Nothing does: memory that is freed may be written at once."""

    def enter(self) -> None:
        """Nothing: work on the CPU is done when a call returns."""

    def backward_begins(self, reads: Sequence[torch.Tensor]) -> None:
        """Nothing: what a live call lies in is not the arena's."""

    def backward_passes(self, grads: Sequence[torch.Tensor]) -> None:
        """Nothing."""

    def backward_ends(self) -> None:
        """Nothing."""

    def joining(self, lasting: bool, many: bool) -> Any:
        return nullcontext()

    def anchor(self, place: Spans) -> Any:
        return self._arena.under(place)

    def tidy(self) -> None:
        if self.pool.untidy:
            self.pool.untidy = False
            self._arena.trim(self.pool.footprints() | self.pool.protected())

    @property
    def pool_bytes(self) -> int:
        return self._arena.nbytes

    @property
    def allocated(self) -> int:
        return 0

    @property
    def spare(self) -> int:
        return 1 << 30


# Compiled code calls its own kernels: a tape of operators would not see them.
_COMPILED: Starts = {
    "compile_wrapper": [
        (
            os.path.join("_dynamo", "eval_frame.py"),
            lambda frame: True,
            Effect("calls a torch.compile'd function, whose kernels the CPU device cannot see",
                   "record the uncompiled function on the CPU", ANYONE),
        )
    ]
}  # fmt: skip
