"""What a type checker knows of recorded functions: mypy goes through this file with `make lint`, and it runs as well."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from typing_extensions import assert_type

import phonograph as pg


@pg.record
def scaled(x: Tensor, by: float = 2.0) -> Tensor:
    return x * by


@pg.record(warmup=0, name="summed")
def summed(x: Tensor, *, deep: bool) -> tuple[Tensor, int]:
    return x.sum(), x.ndim


class Agent:
    scale = 3

    @pg.record
    def act(self, x: Tensor, times: int = 1) -> Tensor:
        return x * self.scale * times

    @pg.record(name="both")
    def value(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": x + self.scale}


def test_functions_keep_their_types() -> None:
    x = torch.ones(2)
    assert_type(scaled(x, by=3.0), Tensor)
    assert_type(summed(x, deep=True), tuple[Tensor, int])
    with pytest.raises(TypeError):
        scaled(by=3.0)  # type: ignore[call-arg]


def test_methods_keep_their_types() -> None:
    agent, x = Agent(), torch.ones(2)
    assert_type(agent.act(x), Tensor)
    assert_type(agent.act(x, times=2), Tensor)
    assert_type(agent.value(x), dict[str, Tensor])
    assert_type(Agent.act(agent, x), Tensor)
    with pytest.raises(TypeError):
        agent.act(x, often=2)  # type: ignore[call-arg]


def test_modules_keep_their_types() -> None:
    assert_type(pg.record(torch.nn.Linear(2, 2)), torch.nn.Linear)
