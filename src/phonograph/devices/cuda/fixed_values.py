"""Values on a GPU that are the same in each replay (`capture/fixed_values.py`).

During a capture nothing runs on the GPU, and nobody may wait for it. So a recipe of such a tensor is noted: the operators that
made it. Where code reads the tensor, the recipe runs beside the capture, on a stream that is not captured, in memory that is
not the recording's. A recipe holds none of the call's tensors.

A recipe may read tensors from outside of the call. Their versions are compared before each replay. A version misses a write
through `.data` or another alias: where such an alias exists, the values are compared, and the host waits. It also misses a
write that goes around torch: each replay looks for those on the device, and a later call raises (`value_checks.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from ..._torch.dynamic import Args, Kwargs, Reading, Thing
from ..._torch.modes import below_autograd, without_autocast, without_modes
from ..._torch.operators import OpOverload
from ..._torch.tensors import storage_id, use_count
from ...aten import operators
from ...capture.value_checks import Check
from ...guards.data_door import data, handed_out
from ...python.holders import Holder, kept
from ...python.memory_contents import AT_ONCE

__all__ = ["Known", "Recipes", "Versions", "Watched", "bytes_of"]

_UNFILLED = -1
_UNTOLD = (
    "phonograph: {} was written in a way that its version does not tell of (.data, or memory that is shared with others), and "
    "replays have gone on by what it held before. Write it as it is (copy_, fill_), or call pg.reset on the recorded function "
    "when it has changed"
)


Known = Callable[[int], int | torch.Tensor | None]
"""Lookup of a storage: its number among those that the call made, or a tensor from outside that lies on it. (It is passed in
each time: its owner has the recipes, and a reference back would be a cycle.)"""


class _Piece(NamedTuple):
    """Layout of a tensor on a storage, which is a number among those that the call made, or a tensor from outside."""

    of: int | torch.Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    def on(self, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
        if isinstance(self.of, int) and self.of == _UNFILLED:
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)
        storage = self.of.untyped_storage() if isinstance(self.of, torch.Tensor) else storages[self.of]
        return torch.empty(0, dtype=self.dtype, device=self.device).set_(storage, self.offset, self.size, self.stride)


class _Step(NamedTuple):
    """One operator of a recipe: arguments and results, with pieces for tensors, and the storages that it reads and makes."""

    func: OpOverload
    args: Thing
    kwargs: Thing
    gives: list[_Piece]
    reads: frozenset[int]
    makes: frozenset[int]


class Odd(Exception):
    """A tensor lies on a storage that is not known."""


class Recipes:
    """How the tensors of one call are made that hold the same in each replay."""

    def __init__(self, device: torch.device, beside: Callable[[], AbstractContextManager[object]]) -> None:
        """Work on the device runs at once that is done `beside` the capture."""
        self._device, self._beside = device, beside
        self._steps: list[_Step] = []

    def note(self, func: OpOverload, args: Args, kwargs: Kwargs, out: object, known: Known) -> bool:
        """An operator has given this. False if it could not be called again."""
        m = operators.meaning(func)
        results = operators.tensors_in((out,), [])
        written = operators.written_by(m, args, kwargs)
        if all(t.device != self._device for t in (*results, *written)):
            return True  # it has its values here and now
        unread = m.name in operators.OF_SHAPES
        try:
            noted = self._noted(args, known, unread), self._noted(kwargs, known, unread)
            gives, wrote = [self._piece(t, known) for t in results], [self._piece(t, known) for t in written]
        except Odd:
            return False
        if any(isinstance(piece.of, torch.Tensor) for piece in wrote):
            return False  # it is not to be written again
        reads = frozenset(p.of for p in _pieces(noted, []) if isinstance(p.of, int))
        makes = frozenset(p.of for p in (*gives, *wrote) if isinstance(p.of, int))
        self._steps.append(_Step(func, *noted, gives, reads, makes))
        return True

    def value(self, t: torch.Tensor, known: Known) -> torch.Tensor:
        """A tensor on the host with the values that this one holds."""
        found: torch.Tensor = self.result(torch.ops.aten.alias.default, (t.detach(),), {}, known)
        return found

    def result(self, func: OpOverload, args: Args, kwargs: Kwargs, known: Known) -> Any:
        """What this operator gives, with tensors on the host."""
        noted = self._noted(args, known), self._noted(kwargs, known)
        needed = self._needed({p.of for p in _pieces(noted, []) if isinstance(p.of, int)})
        with torch.inference_mode(False), without_modes(), without_autocast(), below_autograd(), self._beside():
            storages: dict[int, torch.UntypedStorage] = {}
            for step in needed:
                out = step.func(*_rebuilt(step.args, storages), **_rebuilt(step.kwargs, storages))
                for piece, t in zip(step.gives, operators.tensors_in((out,), []), strict=True):
                    if isinstance(piece.of, int):
                        storages.setdefault(piece.of, t.untyped_storage())
            return _on_host(func(*_rebuilt(noted[0], storages), **_rebuilt(noted[1], storages)))

    def _needed(self, wanted: set[int]) -> list[_Step]:
        """The steps by which these storages are what they are now."""
        found = []
        for step in reversed(self._steps):
            if not wanted.isdisjoint(step.makes):
                found.append(step)
                wanted |= step.reads
        return found[::-1]

    def _noted(self, value: Thing, known: Known, unread: bool = False) -> Thing:
        if isinstance(value, torch.Tensor):
            return self._piece(value, known, unread)
        if isinstance(value, (list, tuple)):
            return type(value)([self._noted(v, known, unread) for v in value])
        if isinstance(value, dict):
            return {k: self._noted(v, known, unread) for k, v in value.items()}
        return value

    def _piece(self, t: torch.Tensor, known: Known, unread: bool = False) -> Thing:
        if t.is_conj() or t.is_neg():
            raise Odd
        if unread:
            return _Piece(_UNFILLED, tuple(t.size()), t.stride(), 0, t.dtype, t.device)
        if t.device != self._device:
            if t.nbytes > AT_ONCE:
                raise Odd
            with without_modes():
                return t.detach().clone()
        of = known(storage_id(t))
        if of is None:
            raise Odd
        return _Piece(of, tuple(t.size()), t.stride(), int(t.storage_offset()), t.dtype, t.device)


def _pieces(noted: Thing, into: list[_Piece]) -> list[_Piece]:
    if isinstance(noted, _Piece):
        into.append(noted)
    elif isinstance(noted, (list, tuple, dict)):
        for v in noted.values() if isinstance(noted, dict) else noted:
            _pieces(v, into)
    return into


def _rebuilt(noted: Thing, storages: dict[int, torch.UntypedStorage]) -> Thing:
    if isinstance(noted, _Piece):
        return noted.on(storages)
    if isinstance(noted, (list, tuple)):
        return type(noted)([_rebuilt(v, storages) for v in noted])
    if isinstance(noted, dict):
        return {k: _rebuilt(v, storages) for k, v in noted.items()}
    return noted


def _on_host(out: Thing) -> Thing:
    if isinstance(out, torch.Tensor):
        return out.detach().cpu()
    return type(out)(map(_on_host, out)) if isinstance(out, (list, tuple)) else out


class Watched(Check):
    """Whether memory outside holds still what it did, which each replay looks at. (Who keeps answers keeps this, for as long
    as there is room for others.)"""

    def __init__(self, name: str, where: str) -> None:
        super().__init__(True, RuntimeError, _UNTOLD.format(name), where)
        self.failed = False

    def error(self, given: list[object] | None = None) -> Exception:
        self.failed = True
        return super().error(given)


class Versions:
    """Those of tensors outside on one storage, which held these bytes `before`. What has relied on them is not played again
    where that was found to be `watched` in vain."""

    def __init__(self, watched: Watched, tensors: Sequence[torch.Tensor], before: torch.Tensor) -> None:
        self._watched, self._tensors, self._before = watched, tensors, before
        self._untold = any(isinstance(t, torch.nn.Parameter) for t in tensors)  # whose `data` is a property of another's
        self._key = storage_id(tensors[0])
        data.stay_for(self)
        self._seen = handed_out(self._key)

    def place(self, name: str) -> Holder:
        """What a recording relies on, before each replay."""
        return kept(name, self._read)._replace(named=lambda path, i, values: path)

    def _read(self) -> Reading:
        return (self._watched.failed or not self._is_as_before(), *[t._version for t in self._tensors])

    def _is_as_before(self) -> bool:
        """Whether it holds the same, as far as versions would not tell."""
        handed = handed_out(self._key)
        if handed == self._seen and not self._untold and use_count(self._key) <= len(self._tensors):
            return True
        if torch.cuda.is_current_stream_capturing():  # nothing is played there
            return True
        if not torch.equal(bytes_of(self._tensors[0]).cpu(), self._before):
            return False
        self._seen = handed
        return True


def bytes_of(t: torch.Tensor) -> torch.Tensor:
    """All that lies on the storage of this tensor."""
    with torch.inference_mode(False), torch.no_grad(), without_modes():
        return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
