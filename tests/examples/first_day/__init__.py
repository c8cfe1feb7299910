"""Programs as people write them on the first day, each twice where it cannot be recorded as it is: unchanged, and after
doing what the check says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

PROGRAMS: dict[str, Program] = {}


class Made(NamedTuple):
    """A program, set up. `target` is what is recorded, with these options, `step` takes that, and the number of the step, and
    gives what is compared."""

    target: Callable[..., Any]
    step: Callable[[Callable[..., Any], int], Any]
    options: Mapping[str, Any] = MappingProxyType({})


class Program(NamedTuple):
    """`make` sets it up, unchanged or mended by what the check says. `needs` are packages; `unchanged`, whether it is recorded
    as it is, and `cut`, whether that takes cuts; `told` are the codes that the check says unless it is recorded without."""

    make: Callable[[bool], Made]
    unchanged: bool
    cut: bool
    told: frozenset[str]
    needs: tuple[str, ...]


def first_day(told: str = "", needs: str = "", *, cut: bool = False) -> Callable[[Any], Any]:
    """A program: a function that is told whether it is to be mended. Where nothing is told, or the
    call is `cut`, it is recorded as it is."""

    def add(make: Callable[[bool], Made]) -> Callable[[bool], Made]:
        PROGRAMS[make.__name__] = Program(make, cut or not told, cut, frozenset(told.split()), tuple(needs.split()))
        return make

    return add


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def labelled(i: int, n: int = 8, features: int = 6, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of step `i`."""
    generator = torch.Generator().manual_seed(i)
    return torch.randn(n, features, generator=generator), torch.randint(0, classes, (n,), generator=generator)


def update(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def classifier() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    net = mlp(6, 16, 3)
    return net, torch.optim.Adam(net.parameters(), lr=1e-3)


def loss_of(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(net(x), y)


from tests.examples.first_day import habits, loops, models  # noqa: E402, F401
