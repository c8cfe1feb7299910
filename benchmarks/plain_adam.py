"""Adam and AdamW as people type them, neither fused nor capturable: recorded or live, training is plain eager's to the bit.

    python benchmarks/plain_adam.py

A PPO update, GPT-2 124M and ResNet-50 are trained for some steps in plain PyTorch, with the whole step recorded, with the model
recorded as a pair of forward and backward, and with a step that a check on the host keeps live. Losses and weights are compared
bit by bit.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import harness
import phonograph as pg
import ppo_update
import workloads

CLAIM = "plain_adam"
TARGET = "losses and weights of each way equal to plain eager's, to the bit"
STEPS = 50


@dataclass
class Job:
    step: Callable[..., Tensor]
    feed: Iterator[Any]
    model: nn.Module


def ppo(device: str, wrap: workloads.Wrap) -> Job:
    caught: list[nn.Module] = []

    def wrapped(agent: nn.Module) -> Any:
        caught.append(agent)
        return wrap(agent)

    step = ppo_update.updater(device, wrapped, fused=False)
    torch.manual_seed(1)
    return Job(step, itertools.cycle(ppo_update.minibatches(device)), caught[0])


def trained(make: Callable[..., workloads.Training]) -> Callable[[str, workloads.Wrap], Job]:
    def job(device: str, wrap: workloads.Wrap) -> Job:
        made = make(device, wrap, fused=False)
        return Job(made.step, made.forever(), made.model)

    return job


WORKS = {"PPO": ppo, "GPT-2": trained(workloads.gpt2), "ResNet-50": trained(workloads.resnet50)}


def checked(step: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The step with a check that waits for the device."""

    def and_look(*batch: Tensor) -> Tensor:
        loss = step(*batch)
        if not torch.isfinite(loss).item():
            raise ValueError("diverged")
        return loss

    return pg.record(and_look, fallback="live")


WAYS: dict[str, tuple[workloads.Wrap, Callable[[Any], Callable[..., Tensor]]]] = {
    "plain": (workloads.plain, lambda step: step),
    "whole step": (workloads.plain, pg.record),
    "pair": (pg.record, lambda step: step),
    "kept live": (workloads.plain, checked),
}


def outcome(work: str, way: str, device: str, steps: int) -> tuple[list[Tensor], harness.Step]:
    """All losses and the weights at the end; and a step to be timed."""
    wrap, around = WAYS[way]
    job = WORKS[work](device, wrap)
    step = around(job.step)
    torch.manual_seed(2)
    with warnings.catch_warnings():
        if way == "kept live":
            warnings.simplefilter("ignore", pg.RunsLive)  # on purpose
        losses = [step(*next(job.feed)) for _ in range(steps)]
    return [*losses, *(t.detach().clone() for t in job.model.state_dict().values())], lambda: step(*next(job.feed))


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--only", choices=list(WORKS), help="only this work")
    arguments = parser.parse_args()
    report = harness.Report(CLAIM, TARGET, arguments)
    torch.backends.cudnn.deterministic = True
    equal = []
    for work in [arguments.only] if arguments.only else WORKS:
        steps, expected = {}, None
        for way in WAYS:
            with harness.trying(report, f"{way}, {work}"):
                found, steps[f"{way}, {work}"] = outcome(work, way, arguments.device, 10 if arguments.quick else STEPS)
                expected = expected or found
                same = all(map(torch.equal, found, expected))
                equal.append(same)
                report.figures[f"equal: {way}, {work}"] = same
        harness.measure(report, steps, calls=20, reference="plain")
    report.decide(all(equal) and len(equal) == len(WAYS) * len(WORKS))
    return harness.finish(report)


if __name__ == "__main__":
    raise SystemExit(main())
