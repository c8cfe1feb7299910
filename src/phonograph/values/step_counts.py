"""Step counts of optimizers: numbers on the host that each step moves on.

Adam and others keep for each parameter how often they have stepped, in a tensor of one number on the host. Their step adds 1
to it, reads it, and goes on in Python: ``1 - beta1 ** step``. The device only gets the numbers that come of it. So a capture
leaves the counts as they are and notes what a step does with them (`Dials`). A replay reads the counts before its launch, gives
the device the numbers that eager would have given it, and moves the counts on.

Counts are read and written at their addresses: a tensor operator for each of them would cost a replay more than its launch.

Some lie on the device all the same (of steps that were taken under ``torch.device("cuda")``, or loaded from there), and eager
waits for each. The program itself moves these on; a replay waits once, for all of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from operator import attrgetter
from typing import TypeGuard

import torch

from .._torch.dynamic import Private
from ..python.identity import identity

__all__ = ["StepCounts", "begins", "counts_on_the_host", "single"]

_KEPT = ("step", "mu_product")  # what is kept so; the latter by NAdam, the product of its momenta
_KEEPING = tuple([getattr(torch.optim, name) for name in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad",
                  "RMSprop", "Rprop") if hasattr(torch.optim, name)])  # fmt: skip
_CELLS: dict[torch.dtype, Private] = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}

_DEVICES = ("cpu", "cuda")

_value = attrgetter("value")


def single(x: float) -> float:
    """The float32 next to this number."""
    return ctypes.c_float(x).value


def begins(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step would make counts, because it is the first for some parameter."""
    if type(optimizer) not in _KEEPING:
        return False
    state = optimizer.state
    return any(not (state.get(p)) for group in optimizer.param_groups for p in group["params"] if p.grad is not None)


def counts_on_the_host(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step moves counts on that it keeps on the host."""
    return any(map(_counts_there, optimizer.param_groups)) and isinstance(optimizer, _KEEPING)


class StepCounts:
    """The counts of some optimizers. Those of one optimizer that have the same value are a class: `of` says which class a count
    is in, by its place in `tensors`."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        kept = sorted(((o, name, t) for o in optimizers for name, t in _kept_by(o)), key=lambda count: not count[2].is_cpu)
        found = {identity(t): (o, name, t) for o, name, t in kept}
        self.tensors = [t for _, _, t in found.values()]
        self.index = {key: i for i, key in enumerate(found)}
        self.here = [t for t in self.tensors if t.is_cpu]
        self._there = [t.detach() for t in self.tensors[len(self.here) :]]
        self._storages = [t.untyped_storage() for t in self.here]  # which the cells do not keep
        self._cells = [_CELLS[t.dtype].from_address(t.data_ptr()) for t in self.here]
        classes: dict[object, int] = {}
        alike = [(identity(o), name, t.dtype, v) for (o, name, t), v in zip(found.values(), self._read(), strict=True)]
        self.of = [classes.setdefault(key, len(classes)) for key in alike]
        self._firsts = [*map(self.of.index, range(len(classes)))]
        self._began: list[float] = []
        self._left: list[float] = []

    def __bool__(self) -> bool:
        return bool(self.tensors)

    def _read(self) -> list[float]:
        found = [*map(_value, self._cells)]
        return found + torch.stack(self._there).tolist() if self._there else found

    def values(self) -> tuple[float, ...] | None:
        """The value of each class now; None if a class has several."""
        now = self._read()
        values = tuple([now[i] for i in self._firsts])
        return values if now == [values[k] for k in self.of] else None

    def begin(self) -> None:
        """A run begins that may have to be taken back."""
        self._began = self._left = self._read()

    def put(self, values: Sequence[tuple[float, Sequence[int]]]) -> None:
        """Set counts on the host: each value to those at some places; all together have all places."""
        cells = self._cells
        for value, places in values:
            for i in places:
                if i < len(cells):
                    cells[i].value = value

    def leave(self) -> None:
        """Code of the user's runs next."""
        self._left = self._read()

    def changed(self) -> bool:
        """Whether that code has changed a count."""
        return self._read() != self._left

    def take_back(self) -> None:
        """The run is taken back."""
        self.put([(value, (i,)) for i, value in enumerate(self._began)])


def _kept_by(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    """The counts that an optimizer reads on the host. (With `fused` kernels and in the `capturable` mode it does not, and where
    it is `differentiable` it works with them as tensors.)"""
    if not isinstance(optimizer, _KEEPING):
        return []
    groups = filter(_counts_there, optimizer.param_groups)
    states = [s for g in groups for p in g["params"] if isinstance(s := optimizer.state.get(p), dict)]
    return [(name, t) for s in states for name in _KEPT if _is_count(t := s.get(name))]


def _counts_there(group: dict[str, object]) -> bool:
    return not (group.get("capturable") or group.get("fused") or group.get("differentiable"))


def _is_count(t: object) -> TypeGuard[torch.Tensor]:
    return type(t) is torch.Tensor and t.device.type in _DEVICES and t.dim() == 0 and t.dtype in _CELLS and not t.requires_grad
