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
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby, repeat
from operator import setitem
from typing import TypeAlias, TypeGuard

import torch

from .._torch.dynamic import Private
from ..python.identity import identity

__all__ = ["Cell", "StepCounts", "begins", "counts_on_the_host", "single"]

_KEPT = ("step", "mu_product")  # what is kept so; the latter by NAdam, the product of its momenta
_KEEPING = tuple([getattr(torch.optim, name) for name in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad",
                  "RMSprop", "Rprop") if hasattr(torch.optim, name)])  # fmt: skip
_CELLS: dict[torch.dtype, Private] = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}

_DEVICES = ("cpu", "cuda")

Cell: TypeAlias = "memoryview[float]"
_all_of = deque[None](maxlen=0).extend


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
    is in, by its place in `tensors`, where those of a class stand together."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        kept = sorted(((o, name, t) for o in optimizers for name, t in _kept_by(o)), key=lambda count: not count[2].is_cpu)
        found = {identity(t): (o, name, t) for o, name, t in kept}
        self._keep([t for _, _, t in found.values()])
        numbers = [*self._each.unpack(self._gathered()), *self._numbers_there()]
        classes: dict[object, int] = {}
        alike = [(identity(o), name, t.dtype, t.is_cpu, n) for (o, name, t), n in zip(found.values(), numbers, strict=True)]
        of = [classes.setdefault(key, len(classes)) for key in alike]
        together = sorted(range(len(of)), key=of.__getitem__)  # (all on the host come first, by class as well)
        self.of = [of[i] for i in together]
        self._keep([self.tensors[i] for i in together])
        self.index = {identity(t): i for i, t in enumerate(self.tensors)}
        self._count_classes()
        self._began = self._left = b"", list[float]()

    def _keep(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self.here = [t for t in tensors if t.is_cpu]
        self._there = [t.detach() for t in tensors[len(self.here) :]]
        self._storages = [t.untyped_storage() for t in self.here]  # which the cells do not keep
        self._cells = [_cell(t) for t in self.here]
        self._each = struct.Struct("=" + "".join(map(_form, self.here)))

    def _count_classes(self) -> None:
        times = [len([*members]) for _, members in groupby(self.of)]
        firsts = [*accumulate(times, initial=0)][:-1]
        here = [(t, n) for i, n in zip(firsts, times, strict=True) if (t := self.tensors[i]).is_cpu]
        self._firsts = struct.Struct("=" + "".join(f"{_form(t)}{(n - 1) * t.itemsize}x" for t, n in here))
        ends = [*accumulate([n * t.itemsize for t, n in here], initial=0)]
        self._runs = [(at, at + t.itemsize, at + n * t.itemsize, n) for at, (t, n) in zip(ends, here, strict=False)]
        self._firsts_there = [(i - len(self.here), n) for i, n in zip(firsts, times, strict=True) if i >= len(self.here)]

    def __bool__(self) -> bool:
        return bool(self.tensors)

    def _gathered(self) -> bytes:
        """Those on the host, bit by bit: one call, however many there are."""
        return b"".join(self._cells)

    def _numbers_there(self) -> list[float]:
        return torch.stack(self._there).tolist() if self._there else []

    def _read(self) -> tuple[bytes, list[float]]:
        return self._gathered(), self._numbers_there()

    def values(self) -> tuple[float, ...] | None:
        """The value of each class now; None if a class has several."""
        now = self._gathered()
        for at, first, end, times in self._runs:
            if now[at:end] != now[at:first] * times:
                return None
        here = self._firsts.unpack(now)
        if not self._there:
            return here
        there = self._values_there()
        return None if there is None else (*here, *there)

    def _values_there(self) -> list[float] | None:
        now = self._numbers_there()
        for i, times in self._firsts_there:
            if now[i : i + times] != now[i : i + 1] * times:
                return None
        return [now[i] for i, _ in self._firsts_there]

    def begin(self) -> None:
        """A run begins that may have to be taken back."""
        self._began = self._left = self._read()

    def cells(self, places: Iterable[int]) -> list[Cell]:
        """Those of these places that are on the host, to be `put`."""
        return [self._cells[i] for i in places if i < len(self._cells)]

    @staticmethod
    def put(values: Iterable[float], cells: Iterable[Sequence[Cell]]) -> None:
        """Set counts on the host: each value to those in some cells."""
        for value, some in zip(values, cells, strict=True):
            _all_of(map(setitem, some, repeat(0), repeat(value)))  # type: ignore[arg-type]

    def leave(self) -> None:
        """Code of the user's runs next."""
        self._left = self._read()

    def changed(self) -> bool:
        """Whether that code has changed a count."""
        return self._read() != self._left

    def take_back(self) -> None:
        """The run is taken back."""
        self.put(self._each.unpack(self._began[0]), [[cell] for cell in self._cells])


def _cell(t: torch.Tensor) -> Cell:
    """The memory of a count, as one number."""
    kind = _CELLS[t.dtype]
    return memoryview(kind.from_address(t.data_ptr())).cast("B").cast(_form(t))  # type: ignore[call-overload, no-any-return]


def _form(t: torch.Tensor) -> str:
    return "f" if t.dtype is torch.float32 else "d"


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
