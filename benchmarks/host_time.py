"""Host time of a steady replay: how long Python is busy with one call, the device idle before it.

    python benchmarks/host_time.py

The reference is the graph captured by hand which gives the caller what eager gives: inputs copied to static ones, one replay,
the result cloned. It checks nothing. Both take turns, with a synchronization before each call. On the CPU there is no such
graph, and the plain function stands in its place: that tries out the script.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import harness
import phonograph as pg
import ppo_update
import workloads

CLAIM = "host_time"
TARGET = (
    "whole steps over the graph by hand: PPO at most 1.3, models 1.5; the same ± 10 µs beyond it for 13, 160, 1,000 parameters"
    "; 8 tiny kernels 10 µs; signatures in turn 1.2; a written argument 1.3; PPO pair 1.6; pair of an MLP 0.8 x eager"
)
PARAMETERS, SPREAD_US, TINY_US = (13, 160, 1000), 10.0, 10.0

Function = Callable[..., Any]


@dataclass
class Case:
    """Two ways to do something, each a step without arguments, and how much the first may take of the second."""

    ours: harness.Step
    reference: harness.Step
    limit: float | None = None


def cloned(function: Function) -> Function:
    def call(*arguments: Tensor) -> Any:
        return function(*arguments).clone()

    return harness.keeping(call, function)


def by_hand(make: Callable[..., Function], example: Sequence[Tensor], **options: Any) -> Function:
    if example[0].device.type == "cpu":
        return make()
    return cloned(harness.by_hand(make(**options), example))


def looping(function: Function, batches: Sequence[Any]) -> harness.Step:
    """A loop's body: it takes the next batch, and keeps the result until the next one is there."""
    feed, kept = itertools.cycle(batches), [None]

    def step() -> None:
        kept[0] = function(*next(feed))

    return step


def whole(make: Callable[..., Function], batches: Sequence[Any], limit: float | None) -> Case:
    """A training step; by hand the optimizer has to be capturable."""
    ours = looping(pg.record(make()), batches)
    return Case(ours, looping(by_hand(make, batches[0], capturable=True), batches), limit)


def ppo(device: str, **options: Any) -> Case:
    return whole(partial(ppo_update.updater, device, **options), ppo_update.minibatches(device), 1.3)


def plain_ppo(device: str) -> Case:
    """With Adam as people type it, whose step counts lie on the host; by hand it is made capturable."""
    made = ppo(device, fused=False)
    made.limit = None
    return made


def trained(of: Callable[..., workloads.Training], device: str) -> Case:
    return whole(lambda **options: of(device, **options).step, of(device).batches, 1.5)


def parameters(count: int, device: str) -> Case:
    """A step of so many small parameters."""
    batches = [(torch.randn(4, device=device),) for _ in range(8)]

    def make(**options: Any) -> Function:
        torch.manual_seed(0)
        weights = nn.ParameterList([nn.Parameter(torch.randn(4, device=device)) for _ in range(count)])
        optimizer = torch.optim.AdamW(weights.parameters(), lr=1e-3, fused=True, **options)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = (torch.stack([*weights]) * x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    return whole(make, batches, None)


def chain(x: Tensor) -> Tensor:
    for _ in range(8):
        x = x + 1
    return x


def inputs(device: str, side: int = 64, count: int = 256) -> list[tuple[Tensor]]:
    """So many that no address comes back soon."""
    return [(torch.full((side, side), float(n), device=device),) for n in range(count)]


def tiny(device: str) -> Case:
    data = inputs(device)
    return Case(looping(pg.record(chain), data), looping(by_hand(lambda: chain, data[0]), data))


def in_turn(device: str) -> Case:
    """Calls of two shapes, over calls of one."""
    one, other = inputs(device), inputs(device, 32)
    both = [x for pair in zip(one, other, strict=True) for x in pair]
    return Case(looping(pg.record(chain), both), looping(pg.record(chain), one), 1.2)


def written(device: str) -> Case:
    """A function that writes one of its arguments, over one that does not."""
    data = [(x, torch.zeros(64, 64, device=device)) for (x,) in inputs(device, count=64)]

    def writes(x: Tensor, into: Tensor) -> Tensor:
        result = chain(x)
        into.add_(result)
        return result

    def reads(x: Tensor, into: Tensor) -> Tensor:
        return chain(x).add_(into)

    return Case(looping(pg.record(writes), data), looping(pg.record(reads), data), 1.3)


def pair(device: str) -> Case:
    """The model recorded in place, and what follows its backward, over the whole step recorded."""
    data = ppo_update.minibatches(device)
    ours = ppo_update.updater(device, pg.record, pg.record)
    return Case(looping(ours, data), looping(pg.record(ppo_update.updater(device)), data), 1.6)


def small_pair(device: str) -> Case:
    """A two-layer MLP recorded in place, forward and backward, over eager."""
    data = [(torch.randn(32, 16, device=device),) for _ in range(16)]

    def make(wrap: workloads.Wrap) -> Function:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)).to(device)
        called = wrap(model)

        def both(x: Tensor) -> Tensor:
            model.zero_grad()
            loss: Tensor = called(x).square().mean()
            loss.backward()
            return loss.detach()

        return both

    return Case(looping(make(pg.record), data), looping(make(workloads.plain), data), 0.8)


CASES: dict[str, Callable[[str], Case]] = {
    "PPO": ppo,
    "PPO, plain Adam": plain_ppo,
    "GPT-2": partial(trained, workloads.gpt2),
    "ResNet-50": partial(trained, workloads.resnet50),
    "MobileNetV3": partial(trained, workloads.mobilenet),
    **{f"{count} parameters": partial(parameters, count) for count in PARAMETERS},
    "8 tiny kernels": tiny,
    "two signatures in turn": in_turn,
    "a written argument": written,
    "PPO pair": pair,
    "pair of an MLP": small_pair,
}


def host_us(steps: Sequence[harness.Step], calls: int) -> list[float]:
    """Microseconds a call of each, the median over calls that take turns in tens."""
    for step in steps:
        for _ in range(24):
            step()
    found: list[list[float]] = [[] for _ in steps]
    for _ in range(max(1, calls // 10)):
        for step, times in zip(steps, found, strict=True):
            for _ in range(10):
                harness.synchronize()
                begin = time.perf_counter()
                step()
                times.append(time.perf_counter() - begin)
    return [statistics.median(times) * 1e6 for times in found]


def judge(report: harness.Report, cases: dict[str, float | None]) -> None:
    """All limits, and how far the cases of other sizes are apart."""
    missed = []
    for row in report.rows:
        limit = cases.get(row.method)
        if limit is not None and row.ratio is not None and row.ratio > limit:
            missed.append(f"{row.method}: {row.ratio:.2f} > {limit}")
    beyond = [row.notes["beyond"] for row in report.rows if row.method.endswith(" parameters") and row.error is None]
    if len(beyond) == len(PARAMETERS):
        report.figures["between numbers of parameters, µs"] = round(max(beyond) - min(beyond), 1)
        if max(beyond) - min(beyond) > SPREAD_US:
            missed.append(f"numbers of parameters: {max(beyond) - min(beyond):.1f} µs apart")
    tiny_row = report.row("8 tiny kernels")
    if tiny_row is not None and tiny_row.cpu_us is not None and tiny_row.cpu_us > TINY_US:
        missed.append(f"8 tiny kernels: {tiny_row.cpu_us:.1f} µs")
    report.figures["missed"] = missed
    if report.arguments.device != "cpu" and len(cases) == len(CASES) and not any(row.error for row in report.rows):
        report.decide(not missed)


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--only", nargs="*", choices=list(CASES), help="only these cases")
    arguments = parser.parse_args()
    report, limits = harness.Report(CLAIM, TARGET, arguments), dict[str, float | None]()
    for name in arguments.only or CASES:
        with harness.trying(report, name):
            case = CASES[name](arguments.device)
            ours, reference = host_us([case.ours, case.reference], 20 if arguments.quick else 200)
            notes = {"reference": round(reference, 1), "beyond": round(ours - reference, 1)}
            report.rows.append(harness.Row(name, cpu_us=ours, ratio=ours / reference, notes=notes))
            limits[name] = case.limit
            del case
    judge(report, limits)
    return harness.finish(report)


if __name__ == "__main__":
    raise SystemExit(main())
