"""What has come from other ranks in a call that is captured, for one that begins again.

A replay in segments that cannot go on after something live is undone, and its call begins again. The other ranks' do not: they
have had what this one has communicated with them. So as long as something follows by which that may happen, a capture keeps
copies of what each collective brings, and a call that begins again is given those, in order, in place of communicating.

A copy is made where those bytes are written next, or the segment ends, whatever is first: until then they are what has arrived,
in any program that waits for it. (On a GPU nobody hears when it waits for work of c10d.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .._torch.dynamic import Args, Kwargs
from .._torch.tensors import has_memory
from ..aten import operators
from ..aten.collectives import called
from ..memory.pool import dense, extent

__all__ = ["Arrivals", "Arrived"]

Arrived = tuple[str, Sequence[torch.Tensor]]
"""By which operator (its name), and what it has brought."""


@dataclass
class _Arrival:
    name: str
    brought: list[torch.Tensor]
    waited: bool
    at: list[tuple[int, int]]  # where that lay, and in how much memory
    kept: list[torch.Tensor] | None = None
    lost: bool = False  # it may have been written before it had arrived


class Arrivals:
    """Those of a call so far. `copied` makes a copy that is part of the capture."""

    def __init__(self, copied: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._copied = copied
        self._all: list[_Arrival] = []

    def note(self, m: operators.Meaning, args: Args, kwargs: Kwargs, result: object) -> None:
        """An operator has communicated, or waited."""
        if called(m.name) == "wait_tensor":
            for one in self._all:
                one.waited = one.waited or any(_same(args[0], t) for t in one.brought)
            return
        written = operators.written_by(m, args, kwargs)
        functional = not m.name.startswith("c10d::")
        brought = written or (operators.tensors_in([result], []) if functional else [])
        self._all.append(_Arrival(m.name, brought, not functional, [*map(_place, brought)]))

    def before_writing(self, tensors: Sequence[torch.Tensor]) -> None:
        """These are going to be written."""
        for one in self._all:
            written = [t for t in tensors if one.kept is None and any(_meet(t, own) for own in one.brought)]
            if written and one.waited and all(map(dense, written)):
                self._keep(one)
            one.lost = one.lost or (one.kept is None and bool(written))

    def lose(self, tensors: Sequence[torch.Tensor]) -> None:
        """These are written now, and what lies there cannot be copied any more."""
        for one in self._all:
            one.lost = one.lost or (one.kept is None and any(_meet(t, own) for t in tensors for own in one.brought))

    def kept(self) -> list[Arrived] | None:
        """All of them, as they have arrived; None where that is not known."""
        for one in self._all:
            self._keep(one)
        if any(one.lost for one in self._all):
            return None
        return [(one.name, one.kept or ()) for one in self._all]

    def under_way(self) -> str:
        """The name of one for which nobody has waited so far; "" if there is none."""
        return next((called(one.name) for one in self._all if not one.waited), "")

    def _keep(self, one: _Arrival) -> None:
        one.lost = one.lost or (one.kept is None and one.at != [*map(_place, one.brought)])  # given other memory
        if one.kept is None and not one.lost:
            one.kept = [self._copied(t) for t in one.brought]


def _place(t: torch.Tensor) -> tuple[int, int]:
    return (t.data_ptr(), t.untyped_storage().nbytes()) if has_memory(t) else (0, 0)


def _meet(t: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they have bytes in common, for all that is known."""
    if not _same(t, other):
        return False
    first, second = sorted((x.data_ptr(), x.data_ptr() + extent(x) * x.element_size()) for x in (t, other))
    return second[0] < first[1]


def _same(t: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they lie on the same memory."""
    return has_memory(t) and has_memory(other) and t.untyped_storage()._cdata == other.untyped_storage()._cdata
