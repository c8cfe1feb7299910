"""Programs that once were slower recorded than plain, over their first 200 calls: what one line costs where it gains least.

    python benchmarks/first_calls.py

A step of each is recorded by one line, with no options, beside the same step plain. They take turns, twenty calls each. The
ratio is plain over recorded, of calls 100 to 200, with all that was spent in these on attempts and trials; that of all 200
stands beside it. Programs whose packages are not installed (pytorch-optimizer, stable-baselines3, ema-pytorch) are left out.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import harness
import phonograph as pg

CLAIM = "first_calls"
TARGET = "calls 100 to 200 of each at least 0.98 x as fast as plain"
CALLS, BLOCK, LEAST = 200, 20, 0.98

Step = Callable[[], object]
Make = Callable[[str, Callable[[Any], Any]], Step]


def mlp(device: str, layers: int = 2, width: int = 64) -> nn.Sequential:
    hidden = [part for _ in range(layers - 1) for part in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(width, width)).to(device)


def trained(
    device: str, net: nn.Module, optimizer: torch.optim.Optimizer, record: Callable[[Any], Any],
    after: Callable[[], object] = int,
) -> Step:  # fmt: skip
    """A step of training, which ends with what is done `after` each."""
    batches = itertools.cycle([torch.randn(32, 64, device=device) for _ in range(8)])

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), x)
        loss.backward()
        optimizer.step()
        after()
        return loss.detach()

    step = record(step)
    return lambda: step(next(batches))


def refused(device: str, record: Callable[[Any], Any]) -> Step:
    """A step with plain Adam, in which the host asks for a number and goes on by it in another way each time."""
    net = mlp(device, 3)
    optimizer = torch.optim.Adam(net.parameters())
    batches, seen = itertools.cycle([torch.randn(32, 64, device=device) for _ in range(8)]), list[str]()

    def step(x: torch.Tensor) -> str:
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), x)
        loss.backward()
        optimizer.step()
        seen.append(f"{loss.item():.6f}")
        return seen[-1]

    step = record(step)
    return lambda: step(next(batches))


def pair(layers: int) -> Make:
    """A module recorded alone: its forward and its backward by themselves."""

    def make(device: str, record: Callable[[Any], Any]) -> Step:
        net = record(mlp(device, layers))
        return trained(device, net, torch.optim.SGD(net.parameters(), 1e-3), lambda step: step)

    return make


def soap(device: str, record: Callable[[Any], Any]) -> Step:
    from pytorch_optimizer import SOAP

    net = mlp(device, 3)
    return trained(device, net, SOAP(net.parameters(), lr=1e-3), record)


def averaged(device: str, record: Callable[[Any], Any]) -> Step:
    from ema_pytorch import EMA

    net = mlp(device, 3)
    return trained(device, net, torch.optim.Adam(net.parameters()), record, EMA(net, update_every=1).update)


def agent(name: str, environment: str, **options: Any) -> Make:
    """The library's own method `train`, which is called after each collection of experience."""

    def make(device: str, record: Callable[[Any], Any]) -> Step:
        import stable_baselines3

        made = getattr(stable_baselines3, name)("MlpPolicy", environment, device=device, seed=0, **options)
        made.learn(256)
        train = record(made.train)
        if name == "PPO":
            return train
        return lambda: train(gradient_steps=1, batch_size=64)

    return make


PROGRAMS: dict[str, Make] = {
    "a refused step, plain Adam": refused,
    "a pair of two layers": pair(2),
    "a pair of three layers": pair(3),
    "SOAP": soap,
    "ema-pytorch": averaged,
    "stable-baselines3 PPO": agent("PPO", "CartPole-v1", n_steps=128, batch_size=64, n_epochs=1),
    "stable-baselines3 SAC": agent("SAC", "Pendulum-v1", learning_starts=100),
}


def seconds(step: Step, device: str) -> float:
    begun = time.perf_counter()
    for _ in range(BLOCK):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def measured(make: Make, device: str, calls: int) -> dict[str, Any]:
    recorded: list[Any] = []

    def record(f: Any) -> Any:
        recorded.append(pg.record(f))
        return recorded[-1]

    plain, ours = make(device, lambda f: f), make(device, record)
    times = [(seconds(plain, device), seconds(ours, device)) for _ in range(calls // BLOCK)]
    late = times[len(times) // 2 :]
    ratios = [sum(p for p, _ in some) / sum(o for _, o in some) for some in (late, times)]
    stats = pg.stats(recorded[0])
    return {
        "ratio": round(ratios[0], 3), "of all calls": round(ratios[1], 3), "live": stats.live, "replayed": stats.replayed,
        "refusals": [*stats.refusals][:2], "plain_us": round(1e6 * min(p for p, _ in late) / BLOCK, 1),
    }  # fmt: skip


def main() -> int:
    arguments = harness.parser(__doc__).parse_args()
    report = harness.Report(CLAIM, TARGET, arguments)
    ratios = []
    warnings.simplefilter("ignore")
    for name, make in PROGRAMS.items():
        with harness.trying(report, name):
            try:
                found = measured(make, arguments.device, BLOCK * 2 if arguments.quick else CALLS)
            except ModuleNotFoundError as missing:
                print(f"{name}: {missing}")
                continue
            ratios.append(found["ratio"])
            report.rows.append(harness.Row(name, ratio=found.pop("ratio"), notes=found))
            print(f"{name:28s} {ratios[-1]:6.3f}  {found}", flush=True)
    report.decide(min(ratios, default=0.0) >= LEAST, *ratios)
    report.write()
    return 1 if report.met is False else 0


if __name__ == "__main__":
    raise SystemExit(main())
