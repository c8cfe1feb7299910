"""What the numbers stand for that the graph of a captured call has in place of tensors.

A backward that runs, or is captured, asks for what is saved by number, and gets a place of the recording's, a weight, or a part
of an argument of the call. What was asked for is noted: that alone must be as it was at the forward, and of a backward that is
the last to read it, it is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .._torch.dynamic import Private
from .._torch.modes import without_modes
from .._torch.tensors import alias
from ..memory.pool import Lease
from ..python.identity import identity
from .release import Release

__all__ = ["Asked", "PartOf", "Places", "Reads", "Saved", "spent"]


class Asked:
    """The numbers that a backward asks for. Of those that are `spent`, what they stand for is gone: the last that could read it
    has."""

    def __init__(self, spent: Set[int] = frozenset()) -> None:
        self.numbers: Set[int] = frozenset()
        self._spent = spent

    def add(self, number: int) -> None:
        """A run asks for this one.

        Raises:
            RuntimeError: what torch raises where a graph is gone through a second time.
        """
        if number in self._spent:
            raise spent()
        if not isinstance(self.numbers, set):
            self.numbers = set(self.numbers)
        self.numbers.add(number)

    def update(self, numbers: frozenset[int]) -> None:
        """A replay asks for these, or the same."""
        if self._spent and not self._spent.isdisjoint(numbers):
            raise spent()
        self.numbers = self.numbers | numbers if self.numbers else numbers


class PartOf(NamedTuple):
    """What was saved of an argument: `itself`, which the backward reads as it is by then, or a view of the memory that it had:
    how that lies there, and how many elements after its beginning."""

    argument: int
    size: torch.Size
    stride: tuple[int, ...]
    after: int
    itself: bool

    def of(self, argument: torch.Tensor) -> torch.Tensor:
        t = alias(argument)
        if self.itself or (t.size() == self.size and t.stride() == self.stride and not self.after):
            return t
        with without_modes():  # a capture that looks on knows the memory
            return t.as_strided(self.size, self.stride, int(t.storage_offset()) + self.after)


class Places:
    """What the numbers of saved tensors stand for, once the capture is over: places of the recording's, or parts of the call's
    arguments, which the backward is given."""

    def __init__(self, places: dict[int, torch.Tensor], leaves: dict[int, torch.Tensor], parts: dict[int, PartOf]) -> None:
        self._places = places
        self.own = [*{identity(t): t for t in places.values()}.values()]
        self.leaves = leaves
        """Weights that were saved themselves: if one is given other memory before the backward, eager reads that."""
        self._parts = parts
        self.arguments = sorted({(part.argument, part.itself) for part in parts.values()})
        """Of which of the call's arguments there are parts, or which were saved themselves..."""
        self.whose = {number: self.arguments.index((part.argument, part.itself)) for number, part in parts.items()}
        """...by number: which of those..."""
        self.given: Sequence[torch.Tensor] = ()
        """...and those themselves, while a backward runs."""
        self.asked = Asked()
        self._versioned: Callable[[int, torch.Tensor], torch.Tensor] | None = None
        self._release: Release | None = None

    def get(self, number: int) -> torch.Tensor:
        t = self._get(number)
        return t if self._versioned is None else self._versioned(number, t)

    def _get(self, number: int) -> torch.Tensor:
        self.asked.add(number)
        leaf = self.leaves.get(number)
        if leaf is not None:
            return alias(leaf)
        part = self._parts.get(number)
        if part is not None:
            return part.of(self.given[self.whose[number]])
        place = alias(self._places[number])  # it counts as held for as long as somebody has it
        return place if self._release is None else self._release.take(number, place)

    def lends(self, t: torch.Tensor) -> bool:
        """Whether a tensor lies on what was handed out to be given back."""
        return self._release is not None and self._release.lends(t)

    def is_given(self, storage: int) -> bool:
        """Whether this is the memory of an argument that the backward is given."""
        return any(t.untyped_storage()._cdata == storage for t in self.given)

    @contextmanager
    def reading(self, arguments: Sequence[Private]) -> Iterator[None]:
        """A backward that is given these runs inside the block."""
        outer, self.given = self.given, arguments
        try:
            yield
        finally:
            self.given = outer

    @contextmanager
    def versioned(self, versioned: Callable[[int, torch.Tensor], torch.Tensor] | None) -> Iterator[None]:
        """What is read inside the block, autograd may save again: it gets the version of what its owner may write."""
        outer, self._versioned = self._versioned, versioned
        try:
            yield
        finally:
            self._versioned = outer

    @contextmanager
    def noting(self, spent: Set[int]) -> Iterator[Asked]:
        """The numbers that are asked for inside the block, by a run or by a replay."""
        outer, self.asked = self.asked, Asked(spent)
        try:
            yield self.asked
        finally:
            self.asked = outer

    @contextmanager
    def releasing(self, release: Release | None) -> Iterator[None]:
        """What is asked for inside the block can be given back once it was read."""
        self._release = release
        try:
            yield
        finally:
            self._release = None


@dataclass(frozen=True, eq=False)
class Saved:
    """Tensors that autograd has saved of a call. They go by numbers."""

    places: Places
    memory: list[Lease]
    """Memory of the recording, which a call holds until its backward."""
    kept: frozenset[int]
    """Numbers of what lies on `memory`."""
    constant: dict[int, torch.Tensor]
    """Tensors outside that were saved."""
    unversioned: frozenset[int]
    """Numbers of saved tensors that only share memory with one outside: a write of the one does not count for the other."""
    exposed: dict[int, int]
    """Numbers of results that were saved, and that their owner may write."""
    releasable: dict[int, Lease]
    """Memory that nothing but a backward reads."""


class Reads(NamedTuple):
    """What a recorded backward asks for, each time."""

    places: Places
    numbers: frozenset[int]

    def note(self) -> None:
        self.places.asked.update(self.numbers)


def spent() -> RuntimeError:
    """What torch raises where a graph is gone through a second time."""
    return RuntimeError(
        "Trying to backward through the graph a second time: what the forward of a recorded function has saved is "
        "released after its backward. Specify retain_graph=True if you need to backward a second time."
    )
