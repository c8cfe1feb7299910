"""One update of a PPO agent: two MLPs of 2 x 64, minibatch 64, Adam, clipped gradients; a new minibatch each call.

    python benchmarks/ppo_update.py

The recorded step and the one captured by hand are the same function; the optimizer of the latter is made capturable by
hand, as a capture needs it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Normal

import harness
import phonograph as pg
from harness import COMPILED

CLAIM, LIMIT = "ppo_update", 1.10
TARGET = f"phonograph at most {LIMIT:.2f} x the graph captured by hand, eager and compiled inside"
OBSERVED, ACTIONS, ROWS = 17, 6, 64

Loss = Callable[..., Tensor]


def mlp(outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(OBSERVED, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = mlp(ACTIONS), mlp(1)
        self.log_std = nn.Parameter(torch.zeros(1, ACTIONS))

    def forward(self, seen: Tensor, done: Tensor, old_log_prob: Tensor, advantage: Tensor, gain: Tensor) -> Tensor:
        policy = Normal(self.actor(seen), self.log_std.expand(ROWS, ACTIONS).exp(), validate_args=False)
        ratio = (policy.log_prob(done).sum(1) - old_log_prob).exp()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        objective = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
        value_loss = 0.5 * (self.critic(seen).view(-1) - gain).square().mean()
        return objective + 0.5 * value_loss - 0.01 * policy.entropy().sum(1).mean()


def minibatches(device: str, count: int = 32) -> list[list[Tensor]]:
    shapes = [(ROWS, OBSERVED), (ROWS, ACTIONS), (ROWS,), (ROWS,), (ROWS,)]
    return [[torch.randn(shape, device=device) for shape in shapes] for _ in range(count)]


def updater(
    device: str, wrap: Callable[[Agent], Loss] = lambda agent: agent, beside: Callable[..., Any] = lambda f: f, **options: Any
) -> Callable[..., Tensor]:
    """A fresh agent's update step; `wrap` makes its loss function faster, `beside` what comes after the backward; `options`
    are the optimizer's."""
    torch.manual_seed(0)
    agent = Agent().to(device)
    loss_of = wrap(agent)
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-4, **{"fused": True, **options})

    def clip_and_step() -> None:
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()

    apply = beside(clip_and_step)

    def update(*minibatch: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(*minibatch)
        loss.backward()
        apply()
        return loss.detach()

    return update


def graphed(data: list[list[Tensor]]) -> Callable[[Agent], Loss]:
    example = tuple(tensor.clone() for tensor in data[0])
    return lambda agent: torch.cuda.make_graphed_callables(agent, example)


def methods(device: str, data: list[list[Tensor]], peers: bool) -> dict[str, Callable[[], Callable[..., Tensor]]]:
    ours: dict[str, Callable[[], Callable[..., Tensor]]] = {
        "eager": lambda: updater(device),
        "by hand": lambda: harness.by_hand(updater(device, capturable=True), data[0]),
        "phonograph": lambda: pg.record(updater(device)),
        "by hand" + COMPILED: lambda: harness.by_hand(updater(device, torch.compile, capturable=True), data[0]),
        "phonograph" + COMPILED: lambda: pg.record(updater(device, torch.compile)),
    }
    others: dict[str, Callable[[], Callable[..., Tensor]]] = {
        "torch.compile": lambda: updater(device, torch.compile),
        "reduce-overhead": lambda: updater(device, lambda agent: torch.compile(agent, mode="reduce-overhead")),
        "make_graphed_callables": lambda: updater(device, graphed(data)),
    }
    return ours | others if peers else ours


def looping(update: Callable[..., Tensor], data: list[list[Tensor]]) -> harness.Step:
    feed = itertools.cycle(data)
    return lambda: update(*next(feed))


def main() -> int:
    arguments = harness.parser(__doc__).parse_args()
    report = harness.Report(CLAIM, TARGET, arguments)
    data = minibatches(arguments.device)
    makers = {
        method: lambda make=make: looping(make(), data)
        for method, make in methods(arguments.device, data, not arguments.quick).items()
    }
    harness.measure(report, harness.prepare(report, makers), calls=100)
    ratios = [report.ratio("phonograph"), report.ratio("phonograph" + COMPILED)]
    report.decide(max(ratios) <= LIMIT, *ratios)
    return harness.finish(report)


if __name__ == "__main__":
    raise SystemExit(main())
