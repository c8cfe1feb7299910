"""Branches and loops on a tape: steps that run other steps, or run them again, by what a tensor holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from ..._torch.modes import without_modes

__all__ = ["CHOICE", "LOOP", "Calls", "Choice", "Loop", "Old", "Trial"]

Calls = list[Callable[[], object]]
Old = tuple[torch.UntypedStorage, torch.UntypedStorage]
"""Memory, and what it held."""

State = tuple[torch.Generator, torch.Tensor]

CHOICE, LOOP = "choice", "loop"
"""In the place of an operator: a step whose arguments are a number and bodies; a predicate, a condition and a body."""


class Choice:
    """Runs the body whose number a tensor holds."""

    def __init__(self, index: torch.Tensor, bodies: Sequence[Calls]) -> None:
        self._index, self._bodies = index, bodies

    def __call__(self) -> None:
        for call in self._bodies[int(self._index.item())]:
            call()


class Loop:
    """Runs a condition, and a body for as long as a tensor that the condition writes is true."""

    def __init__(self, goes_on: torch.Tensor, condition: Calls, body: Calls) -> None:
        self._goes_on, self._condition, self._body = goes_on, condition, body

    def __call__(self) -> None:
        while True:
            for call in self._condition:
                call()
            if not self._goes_on.item():
                return
            for call in self._body:
                call()


class Trial:
    """The run of a body in a capture, where it runs whether it is taken or not."""

    def __init__(self, made: int, generators: Iterable[torch.Generator]) -> None:
        self.made = made
        """How many storages the call had made before."""
        self._states = _states(generators)
        self.undo: list[Old] = []
        """What it has written that was there before."""
        self.undone: set[int] = set()
        self._after: list[Old] = []
        self._drawn: list[State] = []

    def end(self, met: Iterable[torch.Generator], *, taken: bool) -> None:
        """Put back what was there before. (A generator that the body was the first to use, the capture puts back.)"""
        with without_modes():
            if taken:
                self._after = [(storage, storage.clone()) for storage, _ in self.undo]
                self._drawn = _states((*(g for g, _ in self._states), *met))
            _put(reversed(self.undo), self._states)  # two storage objects may stand for one memory
        self.undo = []

    def again(self) -> None:
        """Write what the body has written."""
        with without_modes():
            _put(self._after, self._drawn)


def _states(generators: Iterable[torch.Generator]) -> list[State]:
    with without_modes():
        return [(g, g.get_state()) for g in generators]


def _put(memory: Iterable[Old], states: Iterable[State]) -> None:
    for storage, old in memory:
        storage.copy_(old)
    for g, state in states:
        g.set_state(state)
