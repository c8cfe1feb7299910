"""Which state a graph draws from, on any machine: generators that exchange whole states, as those of a GPU can."""

from __future__ import annotations

import copy
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phonograph.devices.cuda.program import GraphProgram
from phonograph.state.rng import Known, Lent, held, share_state
from tests.faults.injection import Functions


class Generator:
    """As torch's on CUDA: several may have one state."""

    device = torch.device("cuda", 0)

    def __init__(self, state: Any) -> None:
        self.state = state

    def get_offset(self) -> int:
        return int(self.state.offset)

    def set_offset(self, offset: int) -> None:
        self.state.offset = offset

    def initial_seed(self) -> int:
        return int(self.state.seed)

    def get_state(self) -> Any:
        return copy.copy(self.state)

    def set_state(self, state: Any) -> None:
        self.state.seed, self.state.offset = state.seed, state.offset

    def graphsafe_get_state(self) -> Generator:
        return Generator(self.state)

    def graphsafe_set_state(self, other: Generator) -> None:
        self.state = other.state


def state(seed: int, offset: int) -> Any:
    return SimpleNamespace(seed=seed, offset=offset)


def numbers(s: Any) -> tuple[int, int]:
    return s.seed, s.offset


def launch(known: Known, registered: list[Any], draws: list[int]) -> list[tuple[int, int]]:
    """What a graph does that knows these states: where it begins to draw in each, which it moves on."""
    lent = list[Lent]()
    known.lend(lent)
    began = [numbers(s) for s in registered]
    for s, n in zip(registered, draws, strict=True):
        s.offset += n
    known.take_back(lent, True)
    return began


def test_two_generators_share_a_state_or_only_have_the_same_numbers() -> None:
    one, same = state(1, 8), state(1, 8)
    a, b, c = Generator(one), Generator(one), Generator(same)
    assert share_state(a, b)  # type: ignore[arg-type]
    assert not share_state(a, c)  # type: ignore[arg-type]
    assert (numbers(one), numbers(same)) == ((1, 8), (1, 8))


@pytest.mark.parametrize("other", [(2, 40), (1, 0)], ids=["other numbers", "the same numbers"])
def test_a_launch_draws_from_the_state_that_the_generator_has_now(other: tuple[int, int]) -> None:
    own, now = state(1, 0), state(*other)
    default = Generator(own)
    known = Known([default])  # type: ignore[list-item]
    assert launch(known, [own], [4]) == [(1, 0)]
    own.offset = 0
    default.graphsafe_set_state(Generator(now))
    assert launch(known, [own], [4]) == [other]
    assert numbers(now) == (other[0], other[1] + 4)
    assert numbers(own) == (1, 0)  # which nothing was drawn from


def test_a_launch_that_fails_leaves_the_states_as_they_were() -> None:
    own, now = state(1, 0), state(2, 40)
    default = Generator(own)
    known = Known([default])  # type: ignore[list-item]
    default.graphsafe_set_state(Generator(now))
    lent = list[Lent]()
    known.lend(lent)
    known.take_back(lent, False)
    assert (numbers(own), numbers(now)) == ((1, 0), (2, 40))


class Random(GraphProgram):
    """One whose launch draws three numbers from each state that it knows. It may have to begin elsewhere, and to move the
    generators less far than torch does."""

    def __init__(self, kind: str) -> None:
        self.states = [state(1, 0), state(1, 100)]
        self.default, other = map(Generator, self.states)
        self._states = Known([self.default, other])  # type: ignore[list-item]
        self.default.graphsafe_set_state(Generator(state(2, 40)))
        self.ran, self._own, self._stands, self._owed = 0, [], None, 0
        self._graph: Any = SimpleNamespace(replay=self._launched)
        self._sets: Any = None if kind == "plain" else self.default
        self._rewind: Any = SimpleNamespace(begin=self._begins) if kind == "rewinds" else None
        self._surplus = 1 if kind == "surplus" else 0

    def _launched(self) -> None:
        for one in self.states:
            one.offset += 3

    def _begins(self) -> None:
        self.default.set_offset(20)

    def numbers(self) -> list[tuple[int, int]]:
        return [*map(numbers, (*self.states, self.default.state))]


@pytest.mark.parametrize(("kind", "moved"), [("plain", 3), ("rewinds", 0), ("surplus", 2)])
def test_an_interrupt_anywhere_leaves_generators_before_or_after_a_launch(kind: str, moved: int) -> None:
    before, after = [(1, 0), (1, 100), (2, 40)], [(1, 0), (1, 103), (2, 40 + moved)]
    launched = []
    for n in range(1, 30):
        program = Random(kind)
        with suppress(KeyboardInterrupt), Functions(n, KeyboardInterrupt) as fault:
            program._go_random()
        if fault.where:
            launched.append(program.ran)
        assert program.numbers() == (after if program.ran else before), n
    assert 0 in launched
    assert 1 in launched
    assert len(launched) < 29


def test_a_graph_cannot_follow_generators_that_come_to_share_a_state() -> None:
    own, named = state(1, 0), state(1, 0)  # the same numbers
    default, other = Generator(own), Generator(named)
    known = Known([default, other])  # type: ignore[list-item]
    assert not known.mixed()
    default.graphsafe_set_state(other)
    assert known.mixed()
    default.graphsafe_set_state(Generator(own))
    assert not known.mixed()


def test_generators_get_their_states_back() -> None:
    own = state(1, 0)
    default = Generator(own)
    known = Known([default])  # type: ignore[list-item]
    assert known.put_back()
    default.graphsafe_set_state(Generator(state(1, 0)))
    assert not known.put_back()
    assert default.state is own


def test_two_generators_that_had_one_state_get_another_together() -> None:
    own, now = state(1, 0), state(2, 40)
    one, same = Generator(own), Generator(own)
    known = Known([one, same])  # type: ignore[list-item]
    for g in (one, same):
        g.graphsafe_set_state(Generator(now))
    assert not known.mixed()
    assert launch(known, [own], [4]) == [(2, 40)]
    assert (numbers(own), numbers(now)) == ((1, 0), (2, 44))


def test_generators_that_nobody_has_any_more_are_told_from_others() -> None:
    mine = torch.Generator()
    met = [torch.Generator(), mine, torch.Generator()]
    assert held(met) == [mine]
