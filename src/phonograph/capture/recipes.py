"""How tensors of one call are made that hold the same values in each replay, or are made of counts (`numbers_in_tensors.py`).

What is noted are the operators, with places in memory for tensors; it holds none of the call's tensors. So such a tensor can be
made once more, beside the call: in memory that is not the recording's, and of counts with other numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from .._torch.dynamic import Args, Kwargs, Thing
from .._torch.modes import below_autograd, without_autocast, without_modes
from .._torch.operators import OpOverload
from .._torch.tensors import has_memory, storage_id
from ..aten import operators
from ..python.memory_contents import AT_ONCE

__all__ = ["Count", "Known", "Odd", "Recipe", "Recipes", "bytes_of"]

_UNFILLED = -1
_clone = torch.ops.aten.clone.default


class Count(NamedTuple):
    """Memory of one number, which is another in each replay."""

    place: int
    """By which its number is known."""
    dtype: torch.dtype


Known = Callable[[int], int | Count | torch.Tensor | None]
"""How many storages the call had made before this one, or a tensor outside that lies on it, or what count that is. (It is told
each time: who knows it has what is noted, and would else keep itself.)"""


class _Piece(NamedTuple):
    """A tensor, by the storage that it lies on: which one it was that the call has made, or a tensor outside on it."""

    of: int | Count | torch.Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    def on(self, storages: dict[object, torch.UntypedStorage]) -> torch.Tensor:
        if isinstance(self.of, int) and self.of == _UNFILLED:
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)
        storage = self.of.untyped_storage() if isinstance(self.of, torch.Tensor) else storages[self.of]
        return torch.empty(0, dtype=self.dtype, device=self.device).set_(storage, self.offset, self.size, self.stride)


class _Step(NamedTuple):
    """One operator, with pieces in the place of tensors; those it gives, and the storages that it reads and writes."""

    func: OpOverload
    args: Thing
    kwargs: Thing
    gives: list[_Piece]
    reads: frozenset[object]
    makes: frozenset[object]


class Odd(Exception):
    """A tensor is no piece of a storage that is known."""


class Recipe:
    """What one operator gives, with tensors on the host: made again each time, of these `counts` and such numbers in them."""

    def __init__(
        self, steps: list[_Step], last: _Step, device: torch.device, beside: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self._steps, self._last, self._device, self._beside = steps, last, device, beside
        found = {of for step in (*steps, last) for of in (*step.reads, *step.makes) if isinstance(of, Count)}
        self.counts = sorted(found, key=lambda count: count.place)
        self._kinds = struct.Struct(f"{len(self.counts)}d")
        self._made: tuple[bytes, Any] | None = None  # of counts, the last time

    def __call__(self, *numbers: Any) -> Any:
        if not numbers:
            return self._make(())
        bits = self._kinds.pack(*numbers)
        if self._made is None or self._made[0] != bits:
            self._made = bits, self._make(numbers)
        return self._made[1]

    def _make(self, numbers: Sequence[Any]) -> Any:
        with torch.inference_mode(False), without_modes(), without_autocast(), below_autograd(), self._beside():
            storages: dict[object, torch.UntypedStorage] = {
                count: torch.full((), number, dtype=count.dtype, device=self._device).untyped_storage()
                for count, number in zip(self.counts, numbers, strict=True)
            }
            for step in self._steps:
                out = step.func(*_rebuilt(step.args, storages), **_rebuilt(step.kwargs, storages))
                for piece, t in zip(step.gives, operators.tensors_in((out,), []), strict=True):
                    if isinstance(piece.of, int):
                        storages.setdefault(piece.of, t.untyped_storage())
            return _on_host(self._last.func(*_rebuilt(self._last.args, storages), **_rebuilt(self._last.kwargs, storages)))


class Recipes:
    """How the tensors of one call are made."""

    def __init__(self, device: torch.device, beside: Callable[[], AbstractContextManager[object]]) -> None:
        """Work on the device runs at once that is done `beside` the capture."""
        self._device, self._beside = device, beside
        self._steps: list[_Step] = []
        self._made: set[object] = set()  # by these
        self._unknown: set[object] = set()  # what holds something else than they make

    def note(self, func: OpOverload, args: Args, kwargs: Kwargs, out: object, known: Known) -> bool:
        """An operator has given this. False if it could not be called again."""
        m = operators.meaning(func)
        results = operators.tensors_in((out,), [])
        written = operators.written_by(m, args, kwargs)
        if all(t.device != self._device for t in (*results, *written)):
            return True  # it has its values here and now
        unread = m.name in operators.OF_SHAPES
        try:
            if m.constant and args[0].device == self._device:
                func, given, named = _clone, (_kept(args[0]),), {}
            else:
                given, named = self._noted(args, known, unread), self._noted(kwargs, known, unread)
            wrote = [self._piece(t, known) for t in written]
            gives = [self._piece(t, known, made=True) for t in results]
            if any(isinstance(piece.of, torch.Tensor) for piece in wrote):
                raise Odd  # it is not to be written again
        except Odd:
            self._unknown |= self._places((*results, *written), known)
            return False
        step = _step(func, given, named, gives, wrote)
        self._made |= step.makes
        self._steps.append(step)
        return True

    def _places(self, tensors: Sequence[torch.Tensor], known: Known) -> set[object]:
        found = [known(storage_id(t)) for t in tensors if has_memory(t)]
        return {of for of in found if not isinstance(of, torch.Tensor)}

    def value(self, t: torch.Tensor, known: Known) -> torch.Tensor:
        """A tensor on the host with the values that this one holds."""
        found: torch.Tensor = self.result(torch.ops.aten.alias.default, (t.detach(),), {}, known)
        return found

    def result(self, func: OpOverload, args: Args, kwargs: Kwargs, known: Known) -> Any:
        """What this operator gives, with tensors on the host."""
        return self.recipe(func, args, kwargs, known)()

    def recipe(self, func: OpOverload, args: Args, kwargs: Kwargs, known: Known) -> Recipe:
        """How that is made, as it is made now."""
        last = _step(func, self._noted(args, known), self._noted(kwargs, known), [], [])
        return Recipe(self._needed({*last.reads}), last, self._device, self._beside)

    def _needed(self, wanted: set[object]) -> list[_Step]:
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

    def _piece(self, t: torch.Tensor, known: Known, unread: bool = False, made: bool = False) -> Thing:
        if t.is_conj() or t.is_neg():
            raise Odd
        if unread:
            return _Piece(_UNFILLED, tuple(t.size()), t.stride(), 0, t.dtype, t.device)
        if t.device != self._device:
            if t.nbytes > AT_ONCE:
                raise Odd
            return _kept(t)
        of = known(storage_id(t))
        if of is None or (isinstance(of, int) and not made and of not in self._made):
            raise Odd
        if not isinstance(of, torch.Tensor) and of in self._unknown:
            raise Odd
        return _Piece(of, tuple(t.size()), t.stride(), int(t.storage_offset()), t.dtype, t.device)


def _step(func: OpOverload, args: Thing, kwargs: Thing, gives: list[_Piece], wrote: list[_Piece]) -> _Step:
    reads = frozenset(p.of for p in _pieces((args, kwargs), []) if not isinstance(p.of, torch.Tensor))
    makes = frozenset(p.of for p in (*gives, *wrote) if not isinstance(p.of, torch.Tensor))
    return _Step(func, args, kwargs, gives, reads, makes)


def _kept(t: torch.Tensor) -> torch.Tensor:
    with without_modes():
        return t.detach().clone()


def _pieces(noted: Thing, into: list[_Piece]) -> list[_Piece]:
    if isinstance(noted, _Piece):
        into.append(noted)
    elif isinstance(noted, (list, tuple, dict)):
        for v in noted.values() if isinstance(noted, dict) else noted:
            _pieces(v, into)
    return into


def _rebuilt(noted: Thing, storages: dict[object, torch.UntypedStorage]) -> Thing:
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


def bytes_of(t: torch.Tensor) -> torch.Tensor:
    """All that lies on the storage of this tensor."""
    with torch.inference_mode(False), torch.no_grad(), without_modes():
        return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
