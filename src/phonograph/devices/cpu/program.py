"""A tape with its memory fixed, which a replay runs.

Each step has become one call without arguments: by an `out=` variant where the operator has one, or by the operator itself and
a copy of its results. What only allocates is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from operator import length_hint
from typing import Any

import torch

from ..._torch.dynamic import Args, Kwargs, Reading, Thing
from ..._torch.modes import below_autograd, without_autocast
from ..._torch.operators import OpOverload
from ..._torch.tensors import copy_all, maker
from ...aten import operators
from ...aten.autocast import Casts
from ...capture.notes import Kind, Look
from ...capture.recording import Tensors, Work
from ...capture.value_checks import Failed
from ...memory.pool import Fill, unexpanded
from ...memory.spans import Spans
from ...python.identity import identity
from ..segments import TakenBack
from .bindings import spelled
from .bodies import CHOICE, LOOP, Choice, Loop
from .numbers import FollowedNumbers, numbers_of
from .steps import Operand, Place, Step, tensor_in

__all__ = ["NOTHING", "TapeProgram", "read_state"]

aten = torch.ops.aten

_FILLS: dict[int, Callable[[object, object], object]] = {identity(func): value for func, value in {
    aten.zeros.default: lambda a, k: 0, aten.zeros_like.default: lambda a, k: 0, aten.new_zeros.default: lambda a, k: 0,
    aten.ones.default: lambda a, k: 1, aten.ones_like.default: lambda a, k: 1, aten.new_ones.default: lambda a, k: 1,
    aten.full.default: lambda a, k: a[1], aten.full_like.default: lambda a, k: a[1],
    aten.new_full.default: lambda a, k: a[2], aten.scalar_tensor.default: lambda a, k: a[0],
}.items()}  # fmt: skip
_COPIES = frozenset(map(identity, (aten.clone.default, aten._to_copy.default)))
NOTHING = frozenset(map(identity, (aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default,
                                    aten.new_empty.default, aten.new_empty_strided.default)))  # fmt: skip


class TapeProgram:
    """A tape with its memory fixed: a list of calls without arguments. Where one of its first `raising` steps raises, the run
    has to be taken back."""

    def __init__(
        self, steps: list[Step], footprint: Spans, slots: list[torch.Tensor], keep: Any, raising: int = 0
    ) -> None:  # fmt: skip
        self.footprint = footprint
        self.operators = len(steps)
        self.amiss: Callable[[], str | None] | None = None
        self.waits = self.edges = ""
        self.own_generators: Sequence[torch.Generator] = ()
        self.owned = Spans()
        self.ran = self.shows = 0
        self.outs: tuple[torch.Tensor, ...] = ()
        self._new: list[Callable[[], torch.Tensor]] = []
        self._fill = Fill(slots)
        self._keep = keep  # the memory itself
        self._tensors: dict[tuple[object, ...], torch.Tensor] = {}
        self._lists: list[list[Any]] = []  # all calls: of the tape, and of each body
        with torch.inference_mode(False), torch.no_grad():
            found = [*map(self._call, steps)]
            self._raising = sum(call is not None for call in found[:raising])
            self._steps = [i for i, call in enumerate(found) if call is not None]  # of which each call is
            self.calls = self._spelled(found)
        self._numbers: FollowedNumbers | None = None

    def copies(self, outs: tuple[torch.Tensor, ...]) -> None:
        self.outs = outs
        self._new = [maker(o) for o in outs]

    def run(self, sources: Tensors) -> list[torch.Tensor]:
        left = iter(self.calls)
        try:
            targets = [new() for new in self._new]
            with below_autograd(), without_autocast():
                self._fill(sources)
                for call in left:
                    call()
                if targets:
                    copy_all(targets, self.outs)
            return targets
        except BaseException as e:
            done = len(self.calls) - length_hint(left)  # with the one that raises
            self.ran = self._steps[done - 1] + 1 if done else 0
            if isinstance(e, Exception) and 0 < done <= self._raising:
                raise (TakenBack.by_check(e.where) if isinstance(e, Failed) else TakenBack.by_operator(e)) from e
            raise

    def close(self) -> None:
        self.calls = []
        self._lists = []
        self._numbers = None
        self._tensors = {}
        self._keep = None

    def set_numbers(self, numbers: Mapping[float, float]) -> Set[float]:
        if self._numbers is None:
            self._numbers = FollowedNumbers(self._lists if numbers else (), numbers.keys())
        self._numbers.set(numbers)
        return self._numbers.found

    def holds(self, numbers: Set[float]) -> bool:
        return any(not numbers.isdisjoint(numbers_of(call)) for calls in self._lists for call in calls)

    def work(self) -> list[Work]:
        return []  # it has no graph: each operator is shown as itself

    def _spelled(self, calls: Iterable[partial[Any] | None]) -> list[Any]:
        with below_autograd(), without_autocast():
            found = spelled([call for call in calls if call is not None])
        self._lists.append(found)
        return found

    def _body(self, steps: Iterable[Step]) -> list[Any]:
        return self._spelled(map(self._call, steps))

    def _call(self, step: Step) -> partial[Any] | None:
        """What a replay does for a step; None where the operator only allocates."""
        if step.func is CHOICE:
            index, *bodies = step.args
            return partial(Choice(self._operand(index), [*map(self._body, bodies)]))
        if step.func is LOOP:
            goes_on, *bodies = step.args
            return partial(Loop(self._operand(goes_on), *map(self._body, bodies)))
        which = identity(step.func)  # an overload's own hash is Python code
        if which in NOTHING:
            return None
        places = iter(step.places)
        args = tuple([self._real(x, places) for x in step.args])
        kwargs = {name: self._real(x, places) for name, x in step.kwargs.items()} if step.kwargs else {}
        outs = [None if o is None else self._operand(o) for o in step.results]
        if step.infers or step.autocast or _asks_for_modes(step.func):
            op = partial(_in_modes, step.grad_mode, step.infers, step.autocast, step.func._op)
            return partial(_run_and_copy, op, args, kwargs, outs)
        if not any(o is not None for o in outs):
            return partial(step.func, *args, **kwargs)
        if step.func is read_state:
            return partial(read_state, outs[0])
        if which in _FILLS:
            return partial(aten.fill_.Scalar, outs[0], _FILLS[which](step.args, step.kwargs))
        if which in _COPIES:
            return partial(aten.copy_.default, outs[0], args[0])
        if step.variant is not None:
            return partial(step.variant.func, *args, **kwargs, **step.variant.outs([o for o in outs if o is not None]))
        return partial(_run_and_copy, step.func._op, args, kwargs, outs)

    def _real(self, value: Thing, places: Iterator[Place]) -> Thing:
        kind = type(value)
        if kind in operators.NO_TENSORS:
            return value
        if kind is Look:
            return self._tensor(next(places), value.offset, value.kind)
        if kind is Operand:
            return self._operand(value)
        if isinstance(value, (list, tuple)):
            return kind(self._real(x, places) for x in value)
        if isinstance(value, dict):
            return {k: self._real(v, places) for k, v in value.items()}
        return value

    def _operand(self, o: Operand) -> torch.Tensor:
        return self._tensor(o.place, o.offset, o.kind)

    def _tensor(self, place: Place, offset: int, kind: Kind) -> torch.Tensor:
        key = place, offset, kind
        known = self._tensors.get(key)
        if known is None:
            known = self._tensors[key] = tensor_in(place, offset, kind)
        return known


def read_state(out: torch.Tensor) -> None:
    out.copy_(torch.default_generator.get_state())


def _asks_for_modes(func: object) -> bool:
    """Whether an operator may do something else where gradients are wanted, or under autocast: this one returns what its
    backward needs; what others than torch have made may do what it likes."""
    return func is aten.mkldnn_rnn_layer.default or (isinstance(func, OpOverload) and operators.meaning(func).others)


def _in_modes(enabled: bool, infers: bool, casts: Reading, op: Thing, *args: object, **kwargs: object) -> object:
    infers = infers and not torch.is_inference_mode_enabled()
    with torch.inference_mode() if infers else torch.set_grad_enabled(enabled), Casts.restored(casts):
        return op(*args, **kwargs)


def _run_and_copy(op: Thing, args: Args, kwargs: Kwargs, outs: list[torch.Tensor | None]) -> None:
    for out, result in zip(outs, operators.tensors_in(op(*args, **kwargs), []), strict=True):
        if out is not None:
            if out.shape != result.shape or out.dtype is not result.dtype:  # copy_ would broadcast, and convert
                raise RuntimeError(f"{op} gave a result of shape {tuple(result.shape)} and type {result.dtype}, and "
                                   f"{tuple(out.shape)} and {out.dtype} at capture")  # fmt: skip
            unexpanded(out).copy_(unexpanded(result))
