"""The CPU device: a tape of aten operators over fixed memory.

It is a device, not a mock. A call is captured by running it once under `Tape`, which notes every operator below
autograd, and then undoing what it wrote, so that from outside a capture is a dry run, as on CUDA. A replay runs the
noted operators over the same addresses: no Python of the user's, no autograd, no allocation; `out=` variants where the
operator has one, and views cost nothing, because they were worked out once.

The memory between operators comes from an `Arena`, which reuses an address as soon as the tensor on it has died. Held
outputs are therefore really overwritten by a later replay if liveness is ever misjudged, here as on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .. import operators
from ..arena import Arena
from ..dials import Dials
from ..effects import ANYONE, Effect, Starts
from ..errors import Refusal
from ..operators import Meaning
from ..pool import Fill, Pool, extent, once
from ..reach import Reach
from ..recording import Recording, Tensors
from ..signature import ALIGNMENT
from ..spans import Spans
from ..watch import OperatorWatch, storage_id
from ..where import users_line
from .base import Captured, Made
from .spelling import spelled

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
        return torch._C._construct_storage_from_data_pointer(self.address, torch.device("cpu"), self.nbytes)


class _Operand:
    """A tensor of the tape before its memory is final."""

    __slots__ = ("dtype", "offset", "place", "size", "stride")

    def __init__(self, place: _Place, t: torch.Tensor) -> None:
        self.place = place
        self.size, self.stride, self.offset, self.dtype = t.size(), t.stride(), t.storage_offset(), t.dtype

    def tensor(self) -> torch.Tensor:
        return torch.empty(0, dtype=self.dtype).set_(self.place.storage(), self.offset, self.size, self.stride)


class _Step:
    """One operator of the tape: what to call, with what, and which new tensors its results go to."""

    __slots__ = ("args", "func", "kwargs", "results")

    def __init__(self, func: Any, args: Any, kwargs: Any, results: list[_Operand | None]) -> None:
        self.func, self.args, self.kwargs, self.results = func, args, kwargs, results


class Tape(OperatorWatch):
    """Runs each operator for real, notes it, and remembers how to undo what it wrote outside."""

    def __init__(self, device: torch.device, reach: Reach, slots: list[torch.Tensor], borrowed: list[bool],
                 arena: Arena) -> None:  # fmt: skip
        super().__init__(device, reach, slots)
        self._arena = arena
        self._steps: list[_Step] = []
        self._places: dict[int, _Place] = {}
        self._undo: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        self._undone: set[int] = set()
        self._theirs = set(self.outside) | {storage_id(s) for s, b in zip(slots, borrowed, strict=True) if b}
        self._generator_states = [(g, g.get_state()) for g in (torch.default_generator, *self.generators)
                                  if g.device.type == "cpu"]  # fmt: skip

    def meet(self, generator: torch.Generator) -> None:
        super().meet(generator)
        self._generator_states.append((generator, generator.get_state()))

    def perform(self, func: Any, m: Meaning, args: Any, kwargs: Any) -> Any:
        if operators.is_constant(m):
            return self._constant(args[0])
        if m.metadata_only:
            return func(*args, **kwargs)
        self._save(operators.written_by(m, args, kwargs))
        noted = self._note(args), self._note(kwargs)
        out = func(*args, **kwargs)
        results = operators.tensors_in(out, [])
        fresh = [storage_id(t) not in self.known for t in results]
        operands = [self._new(t) if new else None for t, new in zip(results, fresh, strict=True)]
        works = bool(m.writes or m.writes_named or any(fresh) or not results)
        if works and not m.name.startswith("profiler::"):
            self._steps.append(_Step(func, *noted, operands))
        return out

    def _constant(self, t: torch.Tensor) -> torch.Tensor:
        """A tensor made of Python numbers: each replay starts from its value again."""
        operand = self._new(t)
        self._steps.append(_Step(aten.clone.default, (t.clone(),), {}, [operand]))
        return t

    def _save(self, written: list[torch.Tensor]) -> None:
        for t in written:
            key = storage_id(t)
            if key in self._theirs and key not in self._undone:
                self._undone.add(key)
                self._undo.append((t.untyped_storage(), t.untyped_storage().clone()))

    def _new(self, t: torch.Tensor) -> _Operand:
        storage = t.untyped_storage()
        if storage._cdata not in self._places or storage._cdata not in self.known:
            self._places[storage._cdata] = _Place(self._arena.take(storage.nbytes()), storage.nbytes(), planned=True)
            self._born(t)
        return _Operand(self._places[storage._cdata], t)

    def died(self, key: int) -> None:
        super().died(key)
        place = self._places.pop(key, None)
        if place is not None and place.planned:
            self._arena.give(place.address)

    def _note(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            key = storage_id(value)
            place = self._places.get(key)
            if place is None:
                # Not kept alive: a recording whose tensors outside are gone is never played (reliance.py).
                storage = value.untyped_storage()
                place = self._places[key] = _Place(storage.data_ptr(), storage.nbytes(), planned=False)
            return _Operand(place, value)
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._note, value))
        if isinstance(value, dict):
            return {k: self._note(v) for k, v in value.items()}
        return value

    def undo(self) -> None:
        """Put back everything that the call wrote outside, and the generators."""
        # Backwards: two storage objects may stand for one memory (borrowed arguments), and the first copy is the oldest.
        for storage, old in reversed(self._undo):
            storage.copy_(old)
        for generator, state in self._generator_states:
            generator.set_state(state)

    def close(self, leaving: set[int]) -> tuple[list[_Step], dict[int, Made]]:
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
        return self._steps, made


@cache
def _out_variant(func: Any) -> tuple[Any, tuple[str, ...], bool] | None:
    """The overload of the same operator that writes to given tensors: it, the names of those, whether it is one list."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return None  # seen whole in inference mode only; what its out variant does to a buffer is another matter
    schema = func._schema
    wanted = [(a.name, str(a.type)) for a in schema.arguments]
    for name in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, name)
        outs = [a for a in other._schema.arguments if a.kwarg_only and a.alias_info and a.alias_info.is_write]
        rest = [(a.name, str(a.type)) for a in other._schema.arguments if a not in outs]
        if outs and rest == wanted:
            return other, tuple(a.name for a in outs), str(outs[0].type).startswith("List")
    return None


_FILLS: dict[Any, Callable[[Any, Any], Any]] = {
    aten.zeros.default: lambda a, k: 0, aten.zeros_like.default: lambda a, k: 0, aten.new_zeros.default: lambda a, k: 0,
    aten.ones.default: lambda a, k: 1, aten.ones_like.default: lambda a, k: 1, aten.new_ones.default: lambda a, k: 1,
    aten.full.default: lambda a, k: a[1], aten.full_like.default: lambda a, k: a[1],
    aten.new_full.default: lambda a, k: a[2], aten.scalar_tensor.default: lambda a, k: a[0],
}  # fmt: skip
_COPIES = {aten.clone.default, aten._to_copy.default}
_NOTHING = {aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default,
            aten.new_empty_strided.default}  # fmt: skip


class TapeProgram:
    """A tape with its memory fixed: a list of calls without arguments."""

    def __init__(self, steps: list[_Step], footprint: Spans, slots: list[torch.Tensor], keep: Any) -> None:
        self.footprint = footprint
        self.operators = len(steps)
        self.owned = Spans()
        self.outs: tuple[torch.Tensor, ...] = ()
        self._fill = Fill(slots)
        self._keep = keep  # the memory itself
        self._tensors: dict[tuple[Any, ...], torch.Tensor] = {}
        with torch.inference_mode(False), torch.no_grad():
            calls = [call for step in steps if (call := self._call(step)) is not None]
        with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
            self.calls = spelled(calls)
        self._probes: list[tuple[int, partial[Any]]] | None = None  # the calls that hold a probe of `dials`, and where

    def run(self, sources: Tensors, targets: Tensors) -> None:
        with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
            self._fill(sources)
            for call in self.calls:
                call()
            if targets:
                torch._foreach_copy_(targets, self.outs)

    def close(self) -> None:
        self.calls = []
        self._probes = None
        self._tensors = {}
        self._keep = None

    def set_numbers(self, numbers: Mapping[float, float]) -> bool:
        if not numbers:
            return True
        if self._probes is None:
            self._probes = [(i, c) for i, c in enumerate(self.calls) if not numbers.keys().isdisjoint(_numbers_of(c))]
        for i, call in self._probes:
            self.calls[i] = partial(call.func, *_replaced(call.args, numbers), **_replaced(call.keywords, numbers))
        return numbers.keys() <= {number for _, call in self._probes for number in _numbers_of(call)}

    def _call(self, step: _Step) -> partial[Any] | None:
        """What a replay does for a step; None where the operator only allocates."""
        if step.func in _NOTHING:
            return None
        args, kwargs = self._real(step.args), self._real(step.kwargs)
        outs = [None if o is None else self._operand(o) for o in step.results]
        if not any(o is not None for o in outs):
            return partial(step.func, *args, **kwargs)
        if step.func in _FILLS:
            return partial(aten.fill_.Scalar, outs[0], _FILLS[step.func](step.args, step.kwargs))
        if step.func in _COPIES:
            return partial(aten.copy_.default, outs[0], args[0])
        variant = _out_variant(step.func)
        if variant is not None and None not in outs:
            func, names, one_list = variant
            if one_list:
                return partial(func, *args, **kwargs, **{names[0]: outs})
            if len(names) == len(outs):
                return partial(func, *args, **kwargs, **dict(zip(names, outs, strict=True)))
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
        key = (o.place, o.size, o.stride, o.offset, o.dtype)
        if key not in self._tensors:
            self._tensors[key] = o.tensor()
        return self._tensors[key]


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
            out.copy_(result)


class _HostReads(TorchFunctionMode):
    """Refuses what reads a tensor's memory without an operator; on CUDA the same calls copy to the host."""

    _READS = frozenset({torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__dlpack__})
    _SPLITS = frozenset({torch.tensor_split, torch.Tensor.tensor_split})  # by the values of a tensor, read without an operator

    def __init__(self, watch: OperatorWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._READS or (func in self._SPLITS and any(isinstance(a, torch.Tensor) for a in args[1:])):
            name = getattr(func, "__name__", str(func))
            refusal = Refusal(f"Tensor.{name} reads a tensor's value on the host", "return the tensor and read it outside",
                              where=users_line())  # fmt: skip
            self._watch.refusal = self._watch.refusal or refusal
            raise refusal
        return func(*args, **(kwargs or {}))


class CpuDevice:
    """The one CPU device of the process."""

    roomy = 256 << 10

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.pool = Pool(self.torch_device)
        self._arena = Arena()

    def beside(self) -> Any:
        return nullcontext()

    def slot(self, t: torch.Tensor) -> torch.Tensor:
        shift = t.data_ptr() % ALIGNMENT // t.element_size()
        nbytes = (shift + extent(t)) * t.element_size()
        place = _Place(self._arena.take(nbytes), nbytes, planned=True)
        with torch.inference_mode(False):
            slot = torch.empty(0, dtype=t.dtype).set_(place.storage(), shift, t.size(), t.stride())
            once(slot).copy_(once(t.detach()))
        return slot

    def capture(
        self,
        arguments: list[torch.Tensor],
        borrowed: list[bool],
        reach: Reach,
        call: Callable[[list[torch.Tensor]], Any],
        outputs_of: Callable[[Any], list[torch.Tensor]],
        protected: Spans,
        dials: Dials,
        copied: float,
    ) -> Captured:
        self._arena.open(protected)
        slots = [t if b else self.slot(t) for t, b in zip(arguments, borrowed, strict=True)]
        tape = Tape(self.torch_device, reach, slots, borrowed, self._arena)
        tape.dials = dials
        try:
            with tape, _HostReads(tape):
                result = call(slots)
            if tape.refusal is not None:
                raise tape.refusal
            steps, made = tape.close({storage_id(t) for t in outputs_of(result)})
            footprint = Spans(self._arena.used)
            filled = [s for s, b in zip(slots, borrowed, strict=True) if not b]
            program = TapeProgram(steps, footprint, filled, (list(self._arena.segments), slots))
        finally:
            tape.undo()
        out = tuple(key for key, m in made.items() if m.nbytes) if sum(m.nbytes for m in made.values()) <= copied else ()
        return Captured(result, program, made, tape, slots, slots, out)

    def settle(self, recording: Recording) -> None:
        """Nothing: what a tape leaves behind lies outside of the arena."""

    def outlives(self, t: torch.Tensor) -> None:
        """Nothing does: memory that is freed may be written at once."""

    def enter(self) -> None:
        """Nothing: work on the CPU is done when a call returns."""

    def anchor(self) -> Any:
        """What owns the pool's memory."""
        return list(self._arena.segments)

    def tidy(self) -> None:
        if self.pool.untidy:
            self.pool.untidy = False
            self._arena.trim(self.pool.footprints() | self.pool.protected())

    @property
    def pool_bytes(self) -> int:
        return self._arena.nbytes

    def frames_refused(self) -> Starts:
        return _COMPILED


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
