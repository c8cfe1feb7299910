"""Kinds of leaves that a recorded result has, and how a replay makes each.

Which kind a leaf is, was decided once, from where its memory lies (`outputs.py`). A replay makes them in two rounds. First come
those that need no other: Python values, the caller's own objects, tensors on memory that the call made. Then autograd gives a
history to those that have one. Last come those that are made of another result, which share its history: views of it, and the
same object once more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .._torch.dynamo import ended_by
from .._torch.tensors import alias
from ..capture.recording import Output, Replay
from ..memory.loans import Borrowed, Loan, plain
from ..memory.pool import Lease, unowned
from ..memory.views import View
from ..slots.inputs import AS_IT_IS
from ..values.formulas import Formula

__all__ = ["Aliased", "Argument", "Computed", "Container", "Copied", "Empty", "Fresh", "Leased", "Outside", "Passed", "Same",
           "Value", "Viewed", "Zero"]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Value(Output):
    """A Python object, the same each time; a set is copied."""

    value: object

    def make(self, replay: Replay) -> object:
        return copy.copy(self.value) if type(self.value) is set else self.value


@dataclass(frozen=True, eq=False)
class Computed(Output):
    """A number that a formula gives, of numbers that each replay reads anew."""

    formula: Formula

    def make(self, replay: Replay) -> object:
        return self.formula(replay.recording.table.numbers.dials.values)


@dataclass(frozen=True, eq=False)
class Argument(Output):
    """The caller's own tensor, by its number among the call's tensors."""

    index: int

    def make(self, replay: Replay) -> object:
        return replay.borrowed.get(self.index, replay.tensors[self.index])


@dataclass(frozen=True, eq=False)
class Container(Output):
    """The caller's own container, by its number among those of the arguments."""

    index: int

    def make(self, replay: Replay) -> object:
        assert replay.call is not None
        return replay.call.containers[self.index]


@dataclass(frozen=True, eq=False)
class Passed(Output):
    """The caller's own string, by its place among the leaves of the arguments."""

    place: int

    def make(self, replay: Replay) -> object:
        assert replay.call is not None
        return replay.call.leaves[self.place]


@dataclass(frozen=True, eq=False)
class Outside(Output):
    """A tensor that was there before the call: a parameter, say."""

    memory: torch.Tensor = field()

    def make(self, replay: Replay) -> object:
        return self.memory


@dataclass(frozen=True, eq=False, kw_only=True)
class Fresh(Output):
    """A tensor on memory that the call made."""

    consumed: bool = False
    """Whether its backward has run already, within the call: it gets a history that cannot be used again."""
    lazy: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Conjugation or negation, applied last."""
    attached: bool = False

    def make(self, replay: Replay) -> object:
        t = self.tensor(replay)
        if self.consumed:
            t = _alike(t, _with_history)
        if self.lazy is None:
            return t
        return alias(self.lazy(t)) if self.attached else self.lazy(t)  # autograd gives no history to a view

    def tensor(self, replay: Replay) -> torch.Tensor:
        """It, without a history, and as it lies in memory."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Empty(Fresh):
    """A tensor without elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    inference: bool

    def tensor(self, replay: Replay) -> torch.Tensor:
        with torch.inference_mode(self.inference):
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=replay.recording.device)


@dataclass(frozen=True, eq=False)
class Zero(Output):
    """A tensor that autograd knows to be zero: it has no memory, and nobody can write it."""

    like: torch.Tensor

    def make(self, replay: Replay) -> object:
        return alias(self.like)


@dataclass(frozen=True, eq=False)
class Leased(Fresh):
    """A tensor with elements, like a template of the capture."""

    memory: torch.Tensor = field()
    """The template."""
    lease: Lease
    """The memory on which that lies."""


@dataclass(frozen=True, eq=False)
class Aliased(Leased):
    """An alias of the template, in the recording's own memory: given to the caller, or lent (`outputs="borrow"`)."""

    def tensor(self, replay: Replay) -> torch.Tensor:
        t = alias(self.memory)
        if not replay.recording.borrow:
            return t
        loan = Loan(self.lease.address, self.lease.nbytes, replay.recording.name, t)
        replay.pool.loans.add(loan)
        return Borrowed.lend(t, loan)


@dataclass(frozen=True, eq=False)
class Copied(Leased):
    """A tensor on a copy of that memory, which each run makes. Results that share memory go on sharing it."""

    index: int = -1
    """The number of that copy."""

    def place(self) -> torch.Tensor:
        """Where it is copied from, of which nobody counts as holding it."""
        t = unowned(self.memory)
        return t if self.lazy is None else self.lazy(t)

    def tensor(self, replay: Replay) -> torch.Tensor:
        # It was made in the mode of the caller, and may be the result of another: only there can it be copied to.
        target, inference = replay.copies[self.index], self.memory.is_inference()
        as_it_is = target.is_inference() is inference
        if as_it_is and replay.recording.program.outs[self.index] is self.memory:
            return target
        with AS_IT_IS if as_it_is else torch.inference_mode(inference):
            t = torch.empty(0, dtype=self.memory.dtype, device=self.memory.device)
            return t.set_(target.untyped_storage(), self.memory.storage_offset(), self.memory.size(), self.memory.stride())


@dataclass(frozen=True, eq=False)
class Same(Output):
    """The very object that another result is."""

    of: int = field()

    def make(self, replay: Replay) -> object:
        return replay.made[self.of]


@dataclass(frozen=True, eq=False)
class Viewed(Output):
    """A tensor on the memory of another result."""

    of: int = field()
    view: View

    def make(self, replay: Replay) -> object:
        return _alike(replay.made[self.of], self.view.of)


class _Consumed(torch.autograd.Function):
    """Gives an output the autograd history that eager's has after its backward ran: one that cannot be used again."""

    @staticmethod
    def forward(ctx: object, anchor: torch.Tensor, template: torch.Tensor) -> torch.Tensor:
        return torch.empty(0, dtype=template.dtype, device=template.device).set_(
            template.untyped_storage(), template.storage_offset(), template.size(), template.stride()
        )

    @staticmethod
    @ended_by
    def backward(ctx: object, *grads: object) -> object:
        raise RuntimeError(
            "Trying to backward through the graph a second time: this tensor's backward already ran inside the recorded "
            "function that returned it."
        )


def _with_history(t: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        out: torch.Tensor = _Consumed.apply(torch.empty(0, requires_grad=True, device=t.device), t)
    return out


def _alike(t: torch.Tensor, made: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """What is `made` of a tensor, on its memory: borrowed if that is."""
    return Borrowed.lend(made(plain(t)), t.loan) if type(t) is Borrowed else made(t)
