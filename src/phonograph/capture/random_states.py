"""Random generators that a captured call uses, and the states that it reads and sets."""

from __future__ import annotations

import operator
import sys
import weakref

import torch

from ..guards.reachable import Reach
from ..python.origin import called_by
from ..state.rng import FORKS, States

__all__ = ["RandomStates"]

_cdata = operator.attrgetter("_cdata")


class RandomStates:
    """Follows the generators of one call."""

    def __init__(self, reach: Reach) -> None:
        self.generators: list[torch.Generator] = list(reach.generators)
        self.states = States()
        self._forked: list[weakref.ref[torch.Tensor]] = []  # states that are set again where `torch.random.fork_rng` ends

    def is_new(self, generator: torch.Generator) -> bool:
        """Whether a generator was not in reach, and is used for the first time."""
        return all(generator is not g and _cdata(generator) != _cdata(g) for g in self.generators)

    def forked(self) -> bool:
        """Whether the call is inside of `torch.random.fork_rng`."""
        return any(state() is not None for state in self._forked)

    def lent(self, generator: torch.Generator) -> torch.Generator:
        """A higher-order operator draws from this one's state. Returns from whose it does so here and now."""
        if self.is_new(generator):
            self.meet(generator)
        return generator

    def meet(self, generator: torch.Generator) -> None:
        """A generator that was not in reach is used."""
        self.generators.append(generator)

    def state_read(self, state: torch.Tensor, of: torch.device) -> None:
        """The state of that device's default generator was read."""
        self.states.read(state)
        self.forks(state)

    def forks(self, state: torch.Tensor) -> None:
        """A state was read: perhaps by `torch.random.fork_rng`, which has it until it ends."""
        if called_by(sys._getframe(1), FORKS):
            self._forked.append(weakref.ref(state))

    def state_set(self, state: torch.Tensor, of: torch.device) -> None:
        """The state of that device's default generator is going to be set.

        Raises:
            Refusal: to one that a replay would not have.
        """
        self.states.meaning(state)
