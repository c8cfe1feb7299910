"""A column: all places of one kind, with what is done there before and after each replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch

__all__ = ["Broken", "Check", "Column", "Step", "Tensors"]

Tensors: TypeAlias = list[torch.Tensor] | tuple[torch.Tensor, ...]
Check: TypeAlias = Callable[[], str | None]
Step: TypeAlias = Callable[[], object]


class Broken(NamedTuple):
    """A run that an exception has broken off."""

    ran: int
    """So much had run (see `Program.ran`)."""
    shows: bool
    """It has left something outside by which one could tell."""
    within_live: bool
    """The exception is that of what runs live between segments: there gradients and counts are right."""


class Column:
    """All places of one kind with which one recording has to do. Its verbs are lists of functions, which are called in each
    replay: none where there is nothing to do. By itself it has none."""

    def fits(self) -> Sequence[Check]:
        """Each gives the name of what forbids a replay; None if nothing does."""
        return ()

    def fill(self) -> Sequence[Step]:
        """Before a replay: what lies outside goes into the recording."""
        return ()

    def leave(self) -> Sequence[Step]:
        """After it: what the recording has made goes there. Each may be called twice after one run."""
        return ()

    def break_off(self, run: Broken) -> None:
        """In place of that, after a run that was broken off. What it has written by then stays, as in eager."""
        for step in self.leave():
            step()

    def explain(self) -> Iterator[str]:
        """Lines about its places."""
        yield from ()
