"""How processes end that have recordings which communicate: start, train, end, twenty times in each way of `tests/ends.py`.

    python benchmarks/ends.py                               # needs two GPUs, about three minutes
    python benchmarks/ends.py --device cpu --quick --at-once 2          # with gloo

Two ranks start, record a function with a collective, replay it, and end: they destroy their group or do not (with recordings
that somebody has, or that are garbage in a cycle), make another, leave in mid-step, are interrupted, one raises, one is killed.
Where the other waits for it in a replay, it has to end within the group's timeout and five seconds, and to say in what, and for
whom. Others have to end with eager's status, within ten seconds of their last step, and without a message of CUDA's or NCCL's.

`--at-once` pairs of processes share the GPUs.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests import ends  # noqa: E402

import harness  # noqa: E402

CLAIM, TIMES, SOON, LATE = "ends", 20, 10, 5
TARGET = (
    "{} times each: no process hangs, each ends with eager's status, within {} s of its last step; "
    "who waits for a dead rank ends within the timeout and {} s, and names it"
)
GONE = ("raises_on_one_rank", "dies_on_one_rank")

Pair = tuple[dict[str, Any], dict[str, Any]]


def counted(way: str, told: list[Pair]) -> dict[str, Any]:
    """How the ranks have ended, with the number of times, and how long that took after their last steps."""
    both = [json.dumps([one.get("status"), other.get("status")]) for one, other in told]
    after = [one.get("after") or one.get("seconds", 0.0) for pair in told for one in pair]
    waited = [float(part.split(" s ")[0]) for one, _ in told for part in one.get("log", "").split("rank 0 has waited for ")[1:]]
    return {
        "times": len(told),
        "ended": {status: both.count(status) for status in sorted(set(both))},
        "as in eager": sum(ends.is_as_it_should_be(way, pair) for pair in told),
        "hangs": sum(isinstance(one.get("status"), str) for pair in told for one in pair),
        "slowest_s": round(max(after), 1),
        "starting_s": round(max(one.get("seconds", 0.0) - (one.get("after") or 0.0) for pair in told for one in pair), 1),
        "named": sum("Missing, as they are in no replay: 1." in one.get("log", "") for one, _ in told),
        "waited_s": max(waited, default=None),
    }


def met(figures: dict[str, dict[str, Any]], times: int, backend: str) -> bool:
    waiting = ("dies_on_one_rank",) if backend == "gloo" else GONE
    named = all(figures[w]["named"] == times and figures[w]["waited_s"] <= ends.TIMEOUT + LATE for w in waiting)
    soon = all(one["slowest_s"] <= SOON for way, one in figures.items() if way not in GONE)
    return named and soon and all(one["as in eager"] == times and not one["hangs"] for one in figures.values())


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--times", type=int, default=TIMES, help="how often each (default: %(default)s)")
    parser.add_argument("--at-once", type=int, default=10, help="pairs of processes (default: %(default)s)")
    arguments = parser.parse_args()
    times = 1 if arguments.quick else arguments.times
    report = harness.Report(CLAIM, TARGET.format(times, SOON, LATE), arguments)
    backend = "gloo" if arguments.device == "cpu" else "nccl"
    found: dict[str, list[Pair]] = defaultdict(list)
    # Those that take longest first, so that they are spread.
    names = [f"{way}:{n}" for way in sorted(ends.WAYS, key=lambda way: way not in GONE) for n in range(times)]
    for name, pair in ends.start(backend, names, arguments.at_once):
        way = name.partition(":")[0]
        found[way].append(pair)
        if not ends.is_as_it_should_be(way, pair):
            statuses = [one.get("status") for one in pair]
            print(f"{name} has ended with {statuses}:", *(one["log"][-2500:] for one in pair), sep="\n", flush=True)
    report.figures.update({way: counted(way, pairs) for way, pairs in found.items()})
    report.decide(met(report.figures, times, backend))
    return harness.finish(report)


if __name__ == "__main__":
    raise SystemExit(main())
