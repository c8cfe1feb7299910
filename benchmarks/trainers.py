"""Whole steps of training on two ranks as people write them: as a plain function, and inside a trainer with a log file, a
loader that is being iterated, loggers, threads, queues, timers, a process group, a mesh, checkpoints, metrics that grow, a bar
and random numbers in its attributes.

    python benchmarks/trainers.py                   # needs two GPUs
    python benchmarks/trainers.py --device cpu      # with gloo, about three minutes

The steps are `WRAPPED` of `tests/trainers.py`: DistributedDataParallel (plain, clipping, `no_sync`, static_graph, bucket views,
hooks, recompute) and `fully_shard` (each reshard_after_forward, mixed precision, clipping, accumulating, recompute), each in
four forms: a function; a method that is recorded from outside; one that the trainer records in its `__init__`; and one that
counts epochs as well. Each is called twenty times as it is, and twenty times recorded. Losses, parameters, gradients and the
optimizer's state are compared by their bits on each rank. On the CPU `fully_shard` is given functions in place of its
collectives, which no recording of the CPU has.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests import ranks, trainers  # noqa: E402

import harness  # noqa: E402
from collectives import FIRST, is_recorded, row_of  # noqa: E402

CLAIM = "trainers"
TARGET = (
    f"{len(trainers.CASES)} steps, {ranks.CALLS} calls, both ranks: all as in eager, by the bits; replayed in "
    f"{ranks.CALLS - FIRST} calls or more but for {', '.join(trainers.LIVE)}, which run live"
)
LASTS = 900.0  # seconds


def main() -> int:
    arguments = harness.parser(__doc__).parse_args()
    report = harness.Report(CLAIM, TARGET, arguments)
    with tempfile.TemporaryDirectory() as folder:
        backend = "gloo" if arguments.device == "cpu" else "nccl"
        told = ranks.start(backend, Path(folder), trainers.CASES, "tests.trainers", LASTS)
    report.rows += [row_of(name, told) for name in trainers.CASES]
    found = {row.method: row.notes for row in report.rows if row.error is None}
    live = [name for name, notes in found.items() if not is_recorded(notes)]
    report.figures |= {
        "as in eager": sum(not notes["differs"] for notes in found.values()),
        "recorded": len(found) - len(live),
        "live": live,
        "statuses": [one["status"] for one in told],
    }
    if any(one["status"] != 0 for one in told):
        print(*(one["log"] for one in told), sep="\n")
    all_equal = report.figures["as in eager"] == len(trainers.CASES) and report.figures["statuses"] == [0, 0]
    report.decide(all_equal and {name.partition("-")[0] for name in live} <= {*trainers.LIVE})
    return harness.finish(report)


if __name__ == "__main__":
    raise SystemExit(main())
