"""The digits training step on the CPU device, recorded against live, the two taking turns in one run.

python benchmarks/digits_cpu.py

On one thread: the step's matrices are too small to be shared (live, too, is slower on two), and threads that wait for each
other measure the neighbours on the machine.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import torch

import harness

sys.path.append(str(Path(__file__).parents[1] / "examples" / "demo"))
import digits
from race import Outcome, race

CLAIM = "digits_cpu"
TARGET = "the recorded step is faster than the live one, and bitwise equal"


def run_once(steps: int, seed: int) -> Outcome:
    device = torch.device("cpu")
    images, labels = digits.load(device)
    return race(lambda: digits.make_job(images, labels, steps, seed), steps, device, block=25, advance=lambda done: None)


def main() -> int:
    parser = harness.parser(__doc__)
    parser.set_defaults(device="cpu")
    parser.add_argument("--threads", type=int, default=1, help="that torch works with (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    report = harness.Report(CLAIM, TARGET, arguments)
    repeats, steps = (2, 300) if arguments.quick else (5, 1000)
    outcomes = [run_once(steps, seed) for seed in range(repeats)]
    for method in ("live", "recorded"):
        sides = [getattr(outcome, method) for outcome in outcomes]
        microseconds = statistics.median(1e6 / side.steps_per_second for side in sides)
        report.rows.append(harness.Row(method, microseconds, microseconds))
    ratios = [outcome.recorded.steps_per_second / outcome.live.steps_per_second for outcome in outcomes]
    equal = all(outcome.losses_equal and outcome.weights_equal for outcome in outcomes)
    report.figures = {
        "what": digits.DESCRIPTION,
        "steps/s, recorded / live": [round(ratio, 3) for ratio in ratios],
        "median": round(statistics.median(ratios), 3),
        "bitwise equal": equal,
        "threads": torch.get_num_threads(),
        "recordings": outcomes[0].stats.recorded,
    }
    report.decide(min(ratios) > 1 and equal)
    return harness.finish(report)


if __name__ == "__main__":
    raise SystemExit(main())
