"""How processes end that have recordings which communicate: start, train, end, twenty times in each way of `tests/ends.py`.

    python benchmarks/ends.py                               # needs two GPUs, about three minutes
    python benchmarks/ends.py --device cpu --quick          # with gloo

Two ranks start, record a function with a collective, replay it, and end: they destroy their group or do not, leave in mid-step,
are interrupted, one raises, one is killed. Where the other waits for it in a replay, it has to end within the group's timeout
and five seconds, and to say in what, and for whom.
"""

from __future__ import annotations

import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests import ends, ranks  # noqa: E402

import harness  # noqa: E402

CLAIM, TIMES, LATE = "ends", 20, 5
TARGET = f"{TIMES} times each: no process hangs; who waits for a dead rank ends within the timeout and {LATE} s, and names it"
GONE = ("raises_on_one_rank", "dies_on_one_rank")


def together(way: str, times: int, backend: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What both ranks have told, each time."""
    names = [f"{way}:{n}" for n in range(times)]
    with tempfile.TemporaryDirectory() as folder:
        mine, other = ranks.start(backend, Path(folder), names, module="tests.ends", lasts=60 * times)
    return [(mine.get(name, {}), other.get(name, {})) for name in names]


def counted(told: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """How the ranks have ended, with the number of times, and how long it took from the fork."""
    both = [json.dumps([one.get("status"), other.get("status")]) for one, other in told]
    seconds = [one.get("seconds", 0.0) for pair in told for one in pair]
    waited = [float(part.split(" s ")[0]) for one, _ in told for part in one.get("log", "").split("rank 0 has waited for ")[1:]]
    return {
        "ended": {status: both.count(status) for status in sorted(set(both))},
        "hangs": sum(status not in range(-64, 256) for pair in told for status in [one.get("status") for one in pair]),
        "slowest_s": round(max(seconds), 1),
        "named": sum("Missing, as they are in no replay: 1." in one.get("log", "") for one, _ in told),
        "waited_s": max(waited, default=None),
    }


def met(figures: dict[str, Any], times: int, backend: str) -> bool:
    killed = figures["dies_on_one_rank"]
    told = [killed] if backend == "gloo" else [figures[way] for way in GONE]
    named = all(one["named"] == times and one["waited_s"] <= ends.TIMEOUT + LATE for one in told)
    return named and not any(one["hangs"] for one in figures.values())


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--times", type=int, default=TIMES, help="how often each (default: %(default)s)")
    arguments = parser.parse_args()
    report = harness.Report(CLAIM, TARGET, arguments)
    times = 2 if arguments.quick else arguments.times
    backend = "gloo" if arguments.device == "cpu" else "nccl"
    with ThreadPoolExecutor(2 if arguments.device == "cpu" else len(ends.WAYS)) as pool:
        told = pool.map(lambda way: together(way, times, backend), ends.WAYS)
    report.figures.update({way: counted(pairs) for way, pairs in zip(ends.WAYS, told, strict=True)})
    report.decide(met(report.figures, times, backend))
    return harness.finish(report)


if __name__ == "__main__":
    raise SystemExit(main())
