"""Whole training steps whose graphs have their true edges only (`edges="true"`), against the same captured by hand.

    python benchmarks/true_edges.py
    python benchmarks/true_edges.py --device cpu --quick     # tries out the script: there the option does nothing

Each program (`true_edges_programs.py`) is recorded with both kinds of edges and compared with eager, call by call, with new
inputs each: what it returns, and all parameters. Then both and the graph captured by hand take turns; on the CPU the plain
function stands in its place. Products of matrices are in TF32. The memory is a recording's footprint, the workspace of cuBLAS
included.
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import harness
import phonograph as pg
import ppo_update
from true_edges_programs import PROGRAMS
from workloads import Training

CLAIM, MOST = "true_edges", 1.00
LIMITS = {"PPO": 0.60, "SAC": 0.60, "ensemble": 0.60, "world model": 0.60}
TARGET = (
    "over the graph captured by hand: " + ", ".join(f"{name} at most {limit:.2f}" for name, limit in LIMITS.items())
    + f", none above {MOST:.2f}; equal to eager, to the bit"
)  # fmt: skip


def fresh(name: str, device: str) -> Training:
    torch.manual_seed(0)
    return PROGRAMS[name](device)


def parts_from_eager(play: Callable[..., Tensor], ours: Training, eager: Training) -> int | None:
    """The first call that gives something else than eager, or leaves other parameters."""
    for number, batch in enumerate(eager.batches):
        same = torch.equal(play(*batch), eager.step(*batch))
        if not same or not all(map(torch.equal, ours.model.parameters(), eager.model.parameters())):
            return number
    return None


def told(text: str, stats: pg.Stats) -> dict[str, Any]:
    """What `explain` and the counts say of a recorded step."""
    mebibytes = [float(number) for number in re.findall(r"footprint: (\S+) MiB", text)]
    found = {"MiB": max(mebibytes, default=None), "live": stats.live, "recordings": stats.recorded}
    for numbers in re.findall(r"(\d+) nodes, (\d+) deep, (\d+) wide", text):
        found |= zip(("nodes", "deep", "wide"), map(int, numbers), strict=True)
    return found


def measure(report: harness.Report, name: str) -> None:
    device = report.arguments.device
    gc.collect()  # before a capture, which would not survive that an earlier graph is found to be garbage
    hand = fresh(name, device)
    called = hand.step if device == "cpu" else harness.by_hand(hand.step, hand.batches[0])
    steps, plays, notes = {f"{harness.REFERENCE}, {name}": ppo_update.looping(called, hand.batches)}, {}, {}
    for edges in ("captured", "true"):
        ours, method = fresh(name, device), f"{edges}, {name}"
        plays[method] = play = pg.record(ours.step, edges=edges, keep="always")
        parts = parts_from_eager(play, ours, fresh(name, device))
        notes[method] = {"equal": True} if parts is None else {"equal": False, "parts at call": parts}
        steps[method] = ppo_update.looping(play, ours.batches)
    harness.measure(report, steps, calls=60)
    for row in report.rows[-len(plays) :]:
        text = pg.explain(plays[row.method])
        row.notes = notes[row.method] | told(text, pg.stats(plays[row.method]))
        if edges_told := re.findall("edges of its graph: (.*)", text):
            report.figures[f"edges, {name}"] = edges_told


def judge(report: harness.Report) -> None:
    ratios = {name: report.ratio(f"true, {name}") for name in PROGRAMS}
    equal = all(row.notes.get("equal", True) for row in report.rows)
    report.decide(equal and all(ratio <= LIMITS.get(name, MOST) for name, ratio in ratios.items()), *ratios.values())


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--only", nargs="*", choices=list(PROGRAMS), help="only these programs")
    arguments = parser.parse_args()
    report, seconds = harness.Report(CLAIM, TARGET, arguments), dict[str, float]()
    torch.set_float32_matmul_precision("high")
    for name in arguments.only or PROGRAMS:
        begin = time.monotonic()
        with harness.trying(report, name):
            measure(report, name)
        seconds[name] = round(time.monotonic() - begin, 1)
    report.figures["seconds"] = seconds
    if arguments.device != "cpu":
        judge(report)
    return harness.finish(report)


if __name__ == "__main__":
    raise SystemExit(main())
