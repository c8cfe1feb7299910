"""Tensors that hold the same values in each replay: their numbers are no question to one.

A call makes some of numbers alone (`arange`, `ones`, a mask, positions): whoever reads one reads the same in each call of this
signature. What is there outside, and the call does not write, is what it was as long as nobody else writes it: a recording may
rely on that. So where code reads a number of such a tensor, or of what operators make of them, it is told, and no replay asks.

An operator's results are such where all that it is given is: tensors, and numbers that stand for no others (`Dials`). Random
numbers, code of others and memory that nobody has filled are not, nor are arguments. Whatever is written by anything else, is
none any more. What is outside is relied on only where something that was made of it is read; and if the call writes it later,
that was no such read: it is refused as it would have been.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from types import FrameType

import torch

from .._torch.dynamic import Args, Kwargs
from .._torch.operators import OpOverload
from .._torch.tensors import has_memory, is_ordinary, storage_id
from ..aten import operators
from ..errors import Refusal
from ..python import memory_contents
from ..python.holders import Holder
from ..values.host_scalars import READS_NUMBER, Site, site_of
from .alike import Alike
from .followed_counts import FollowedCounts
from .notes import Note

__all__ = ["MADE_OF_NUMBERS", "FixedValues"]

_BELOW = "aten::lt"
MADE_OF_NUMBERS: frozenset[int] = frozenset()
"""The storages outside of which such a tensor was made."""


class FixedValues(FollowedCounts):
    """Knows which tensors of one call are such."""

    bodies: int
    decisive: Set[Site]
    may_begin_again: bool

    def __init__(self) -> None:
        self.of: frozenset[int] | None = None
        """What the operator is made of that is seen now: storages outside; None if its results are not such."""
        self._made_of: dict[int, frozenset[int]] = {}  # the same of storages that the call has made
        self._small: dict[int, list[torch.Tensor]] = {}
        self._drawn: set[int] = set()  # those of what was drawn evenly
        self.moving: frozenset[int] = frozenset()
        """Storages outside, of which the call follows the numbers in them (`numbers_in_tensors.py`)."""
        self.varying: Set[str] = frozenset()
        """What is outside, by name, and changes from call to call."""
        self.alike = Alike(self.known)
        """Which of them hold the same, whatever that is."""
        self._readers: dict[int, Refusal] = {}  # by what is relied on: what the first to read it would be told

    # -- what is such

    def fixed(self, t: torch.Tensor) -> frozenset[int] | None:
        """What this tensor was made of, if it holds the same in each replay: storages outside; else None."""
        if not (is_ordinary(t) and has_memory(t)):
            return None
        key = storage_id(t)
        return frozenset([key]) if self._stays(key) else self._made_of.get(key)

    def _stays(self, key: int) -> bool:
        """Whether it is outside, and nobody has written it so far whom anybody knows of."""
        named = bool(self.known.get(key)) and self.known[key] not in self.varying and key not in self.slot_ids
        return named and key not in self.written and key not in self._counts and bool(self._there(key))

    def _there(self, key: int) -> list[torch.Tensor]:
        """Tensors outside, on this storage: those which can be compared before each replay."""
        found = self._small.get(key)
        if found is None:
            tensors = self._outside_at.get(key, ()) if self.may_begin_again else ()  # a backward's are its forward's, too
            found = self._small[key] = [t for t in tensors if storage_id(t) == key and _can_be_compared(t)]
        return found

    def _all_fixed(self, tensors: Sequence[torch.Tensor]) -> frozenset[int] | None:
        """What these were made of, if all of them hold the same in each replay."""
        with_memory = all(is_ordinary(t) and has_memory(t) for t in tensors)
        return self._made_of_all(tensors, [*map(storage_id, tensors)]) if with_memory else None

    def _made_of_all(self, tensors: Sequence[torch.Tensor], keys: Sequence[int]) -> frozenset[int] | None:
        """The same of tensors on these storages. (Of those that have none that is known, none is such.)"""
        found = set[int]()
        for t, key in zip(tensors, keys, strict=True):
            if (of := self._made_of.get(key)) is not None:
                found |= of
            elif self._stays(key):
                found.add(key)
            else:
                return None
            if not is_ordinary(t):
                return None
        return frozenset(found) if found else MADE_OF_NUMBERS

    def made_of(self, m: operators.Meaning, note: Note, args: Args, kwargs: Kwargs) -> frozenset[int] | None:
        """What an operator makes its results of, if these hold the same in each replay."""
        if m.made_of_numbers or self._below_all(m, note.keys, note.tensors, args):
            of: frozenset[int] | None = MADE_OF_NUMBERS
        elif note.keys and not self.known.get(note.keys[0]) and note.keys[0] not in self._made_of:
            return None  # as it is of most
        else:
            of = self._made_of_all(note.tensors, note.keys)
        if of is not None and self.dials and self.stands_among((*args, *kwargs.values())):
            return None
        return of

    def _below_all(self, m: operators.Meaning, keys: Sequence[int], tensors: Sequence[torch.Tensor], args: Args) -> bool:
        """Whether an operator asks if what was drawn evenly is below a number that it cannot be below."""
        drawn = m.name == _BELOW and len(tensors) == 1 and keys[0] in self._drawn and tensors[0].is_cpu
        return drawn and type(args[1]) in (int, float) and args[1] <= 0

    def draws_evenly(self, out: torch.Tensor) -> None:
        """An operator has drawn these between 0 and 1. Whether they are below 0 (the rate at which layers are dropped, most
        often) takes no look."""
        self._drawn.add(storage_id(out))

    def makes(self, func: OpOverload, args: Args, kwargs: Kwargs, out: object, of: frozenset[int]) -> None:
        """An operator has given this, or written it, which holds the same in each replay."""
        written = operators.written_by(operators.meaning(func), args, kwargs)
        self._holds_the_same(operators.tensors_in((out, written), []), of)

    def makes_in_part(self, m: operators.Meaning, args: Args, out: Sequence[torch.Tensor]) -> None:
        """An operator has given this, of which one result may hold the same in each replay, though not all do."""
        result, argument = operators.HOLDS_AS.get(m.name, (0, 0))
        if argument and (of := self.fixed(args[argument])) is not None:
            self._holds_the_same([out[result]], of)

    def _holds_the_same(self, tensors: Sequence[torch.Tensor], of: frozenset[int]) -> None:
        for t in tensors:
            key = storage_id(t) if has_memory(t) else None
            if key is not None and (self.may_count(key) or (self.known.get(key) == "" and key not in self.gathered)):
                self._made_of[key] = of | self._made_of.get(key, MADE_OF_NUMBERS)

    def writes(self, t: torch.Tensor, version: int | None = None) -> None:
        key = storage_id(t)
        self._made_of.pop(key, None)
        self._drawn.discard(key)
        self.alike.changes(key)
        if key in self._readers:
            raise self._readers.pop(key)  # which its traceback would keep with all else
        super().writes(t, version)

    def died(self, key: int) -> None:
        super().died(key)
        self.alike.changes(key)
        self._drawn.discard(key)
        self._made_of.pop(key, None)
        self._readers.pop(key, None)

    def may_count(self, key: int) -> bool:
        """Whether this storage outside holds a number that may be followed as the call goes on."""
        return False

    # -- who reads it

    def reads_fixed(self, name: str, tensors: Sequence[torch.Tensor], frame: FrameType) -> bool:
        """Whether all that is read of these tensors, in this frame, by an operator of this name, is the same in each replay. If
        so, that is relied on."""
        of = self._all_fixed(tensors)
        if of is None or self.bodies or not all(map(self._stays, of)) or any(t.is_conj() or t.is_neg() for t in tensors):
            return False
        if (self.decisive and site_of(frame) in self.decisive) or not self.moving.isdisjoint(of):
            return False
        self.relies_on(of, name, frame)
        return True

    def relies_on(self, of: frozenset[int], name: str, frame: FrameType) -> None:
        """These storages outside hold the same in each replay."""
        for key in of - self._readers.keys():
            self._readers[key] = told = self.told(name, frame)
            if key not in self.relied_on:
                self._rely(key, told.where)

    def told(self, name: str, frame: FrameType) -> Refusal:
        """What this reader is told if the call writes later what it has read."""
        raise NotImplementedError

    def _rely(self, key: int, where: str) -> None:
        tensors = self._there(key)
        self.touched.add(key)
        self.relied_on[key] = place = self.held(self.known[key], tensors, where)
        self.relies([place])

    def held(self, name: str, tensors: Sequence[torch.Tensor], where: str) -> Holder:
        """The place that these tensors outside are, on one storage, on whose values a read at this line relies."""
        return memory_contents.memory(name, tensors[0].untyped_storage(), ())

    # -- numbers

    def value(self, t: torch.Tensor) -> torch.Tensor:
        """A tensor on the host with the values that this one holds in each replay."""
        return t.detach()

    def read_as_fixed(self, t: object, frame: FrameType, shown: bool) -> torch.Tensor | None:
        """The same for code that reads it in this frame; None if there may be other values. Where its memory is `shown`, the
        call must not write it later."""
        if not isinstance(t, torch.Tensor) or not self.reads_fixed(READS_NUMBER.name(), [t], frame):
            return None
        if shown:
            self._readers.setdefault(storage_id(t), self.told(READS_NUMBER.name(), frame))
        return self.value(t)


def _can_be_compared(t: torch.Tensor) -> bool:
    """Whether a tensor is small, and says when it was written."""
    small = is_ordinary(t) and t.untyped_storage().nbytes() <= memory_contents.AT_ONCE
    return small and (t.is_cpu or not t.is_inference())
