"""Live and recorded from the same seed, deterministic algorithms on: every loss, every weight, every token the same.

python benchmarks/bitwise.py
"""

from __future__ import annotations

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts

from collections.abc import Callable

import torch
from torch import Tensor

import harness
import phonograph as pg
from workloads import Training, gpt2, llama_decoding, llama_model, resnet50

CLAIM, STEPS = "bitwise", 50
TARGET = f"live and recorded bitwise equal over {STEPS} steps: GPT-2, ResNet-50, Llama decoding"


def train(job: Training, record: bool, steps: int) -> tuple[list[Tensor], pg.Stats | None]:
    """The loss of every step and the final weights and buffers, on the CPU."""
    step = pg.record(job.step) if record else job.step
    feed = job.forever()
    losses = [step(*next(feed)) for _ in range(steps)]
    state = [torch.stack(losses), *job.model.state_dict().values()]
    return [tensor.cpu() for tensor in state], pg.stats(step) if record else None


def decode(device: str, record: bool, steps: int) -> tuple[list[Tensor], pg.Stats | None]:
    """Every token chosen, on the CPU."""
    decoding = llama_decoding(llama_model(device), device)
    step = pg.record(decoding.step) if record else decoding.step
    tokens = [decoding.token]
    for _ in range(steps):
        tokens.append(step(tokens[-1], decoding.position))
    return [torch.cat(tokens, 1).cpu()], pg.stats(step) if record else None


def jobs(device: str, steps: int) -> dict[str, Callable[[bool], tuple[list[Tensor], pg.Stats | None]]]:
    return {
        "GPT-2 training": lambda record: train(gpt2(device), record, steps),
        "ResNet-50 training": lambda record: train(resnet50(device), record, steps),
        "Llama decoding": lambda record: decode(device, record, steps),
    }


def compare(job: Callable[[bool], tuple[list[Tensor], pg.Stats | None]]) -> dict[str, object]:
    """Live twice, so that a job which is not repeatable by itself is not mistaken for a difference; then recorded."""
    first, again = job(False)[0], job(False)[0]
    recorded, stats = job(True)
    assert stats is not None
    return {
        "live repeats itself": all(map(torch.equal, first, again)),
        "recorded equals live": len(first) == len(recorded) and all(map(torch.equal, first, recorded)),
        "recordings": stats.recorded,
        "replays": stats.replayed,
        "refusals": dict(stats.refusals),
    }


def main() -> int:
    arguments = harness.parser(__doc__).parse_args()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # its extra kernels are not what is compared
    report = harness.Report(CLAIM, TARGET, arguments)
    for name, job in jobs(arguments.device, 10 if arguments.quick else STEPS).items():
        with harness.trying(report, name):
            report.figures[name] = compare(job)
    passed = [figure["recorded equals live"] and figure["replays"] > 0 for figure in report.figures.values()]
    if not report.rows:  # no job failed
        report.decide(all(passed))
    return harness.finish(report)


if __name__ == "__main__":
    raise SystemExit(main())
