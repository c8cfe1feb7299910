"""Collectives on a tape.

A capture on the CPU runs each operator, but it is a dry run: it may be taken back, and the other ranks may capture in another
call. So it communicates with nobody: a step is noted, and what others would give is made up of what this rank gives. Each
replay does it for real, the first in the very call that was captured: each call communicates once, on each rank, whatever comes
of a capture.

A collective that is waited for where it begins works in the tape's memory. Where other work lies between, it has copies, and
what has arrived is copied to its place at the wait. Nobody else has those: whatever ends a replay meanwhile, nothing of the
tape's is written late.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..._torch.autograd import bump
from ..._torch.dynamic import Args, Kwargs, Private
from ..._torch.modes import below_autograd, without_modes
from ..._torch.operators import OpOverload
from ..._torch.process_groups import rank_in, unboxed_work
from ...aten import operators
from ...aten.collectives import LEAVE_VERSIONS
from ...memory.pool import copy_of, unexpanded
from ...python.identity import identity
from ...state.reentrancy import Nested

__all__ = ["Exchange", "UnderWay", "made_by", "stand_in"]

_GIVES_NEW = "_c10d_functional"


class Exchange:
    """One collective of a tape: what begins it, and what waits for it. `at_once` if nothing comes between."""

    def __init__(self, func: OpOverload) -> None:
        self.at_once = False
        self._func, self._meaning = func, operators.meaning(func)
        self._work: Private = None
        self._arriving: list[torch.Tensor] = []

    def begin(self, args: Args, kwargs: Kwargs, places: Sequence[torch.Tensor]) -> None:
        """Begin it, with these arguments. What arrives is for these `places`."""
        if not self.at_once:
            copies: dict[int, torch.Tensor] = {}
            args, kwargs = _copied(args, copies), _copied(kwargs, copies)
        with Nested(waits=True):
            result = self._func(*args, **kwargs)
        work = result[-1] if isinstance(result, (list, tuple)) and result else result
        self._work = unboxed_work(work)
        written = operators.written_by(self._meaning, args, kwargs)
        self._arriving = written or (operators.tensors_in(result, []) if places else [])
        if self.at_once:
            self.finish(places)

    def finish(self, places: Sequence[torch.Tensor], timeout: object = None) -> None:
        """Wait for it, and put what has arrived into these places."""
        work, arriving = self._work, self._arriving
        self._work, self._arriving = None, []
        with Nested(waits=True):
            if work is not None:
                work.wait(*([] if timeout is None else [timeout]))
            elif self._func.namespace == _GIVES_NEW:
                for t in arriving:
                    torch.ops._c10d_functional.wait_tensor.default(t)
        for place, t in zip(places, arriving, strict=True):
            if place.shape != t.shape or place.dtype is not t.dtype:
                raise RuntimeError(f"{self._func} gave a tensor of shape {tuple(t.shape)}, not {tuple(place.shape)}")
            if place is not t:
                unexpanded(place).copy_(unexpanded(t))


class UnderWay:
    """A collective that a call has begun while it is captured. It has its tensors, as it has in eager; something arrives in
    those that are `results`."""

    def __init__(
        self, exchange: Exchange, name: str, step: object, places: list[object], results: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor], where: str,
    ) -> None:  # fmt: skip
        self.exchange, self.name, self.where = exchange, name, where
        self.step, self.places, self.results, self.tensors = step, places, results, tensors
        self.work: Private = None  # what has been handed out for it

    def has(self, t: torch.Tensor) -> bool:
        """Whether something arrives to where this tensor lies."""
        return t.untyped_storage()._cdata in {own.untyped_storage()._cdata for own in self.results}


def made_by(func: OpOverload, args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
    """New tensors like those that an operator of `_c10d_functional` gives: dense ones, whatever it is given."""
    with without_modes(), below_autograd(), torch.inference_mode(False):
        result = func(*_copied(args, None), **_copied(kwargs, None))
        return [torch.empty(t.shape, dtype=t.dtype, device="cpu") for t in operators.tensors_in(result, [])]


def stand_in(m: operators.Meaning, args: Args, written: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
    """Fill what a collective would write with what this rank gives it; with zeros where it gives nothing."""
    own = {*map(identity, written)}
    nothing = m.name.startswith("c10d::recv") or (m.name == "c10d::broadcast_" and rank_in(args[1]) != args[2])
    with without_modes(), below_autograd(), torch.inference_mode(False):
        rows = [t.data.reshape(-1) for t in given if identity(t) not in own]
        row = torch.cat(rows) if rows else torch.empty(0)
        for t in written:
            if row.numel() and t.numel():
                unexpanded(t.data).copy_(row.repeat(-(-t.numel() // row.numel()))[: t.numel()].reshape(t.shape))
            elif nothing:
                unexpanded(t.data).zero_()
        if m.name not in LEAVE_VERSIONS:
            bump([t for t in written if not t.is_inference()])


def _copied(value: object, copies: dict[int, torch.Tensor] | None) -> Private:
    """The same with copies of the tensors; or, without `copies`, with tensors that have no memory."""
    if isinstance(value, torch.Tensor):
        if copies is None:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if identity(value) not in copies:
            copies[identity(value)] = copy_of(value)
        return copies[identity(value)]
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(v, copies) for v in value)
    if isinstance(value, dict):
        return {k: _copied(v, copies) for k, v in value.items()}
    return value
