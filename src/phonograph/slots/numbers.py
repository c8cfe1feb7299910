"""Numbers that are others in each call: hyper-parameters, coefficients, counts. The program has what is worked out with them
among its parameters; what the call has decided by them has to be decided so again. (What they are: `guards/hyperparameters.py`,
`guards/followed_numbers.py`.)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Protocol

from .._torch.native import Fact, known
from ..call.signature import Call
from ..guards.hyperparameters import Dials
from .column import Broken, Check, Column, Step

__all__ = ["Numbers"]


class _Program(Protocol):
    def set_numbers(self, numbers: Mapping[float, float]) -> Set[float]: ...


class Numbers(Column):
    """The numbers that one recording follows."""

    def __init__(self, dials: Dials, program: _Program) -> None:
        self.dials = dials
        self._program = program
        self._turned = False  # they are others than the program has
        self._moves = bool(dials.counts or dials.advanced)

    def take(self, call: Call) -> None:
        """Follow those among the arguments of this call."""
        if call.numbers:
            self.dials.given[:] = [call.leaves[i] for i in call.numbers]

    def fits(self) -> Sequence[Check]:
        return [known(self._decide_the_same, self._facts, None)] if self.dials else []

    def _facts(self) -> list[Fact] | None:
        facts = self.dials.facts()
        return None if facts is None else [("item", vars(self), "_turned"), *facts]

    def _decide_the_same(self) -> str | None:
        dials = self.dials
        self._turned = dials.turned() or self._turned
        return dials.deciding if self._turned and not dials.fit() else None

    def fill(self) -> Sequence[Step]:
        return [self._set] if self.dials else []

    def _set(self) -> None:
        if self._turned:
            self._program.set_numbers(self.dials.numbers())
            self._turned = False

    def leave(self) -> Sequence[Step]:
        return [self.dials.advance] if self._moves else []

    def break_off(self, run: Broken) -> None:
        if self._moves and not run.within_live:
            self.dials.break_off(run.ran, shows=run.shows)
