"""How processes end that have recordings which communicate: start, train, end, twenty times in each way of `tests/ends.py`.

    python benchmarks/ends.py                               # needs two GPUs, about five minutes
    python benchmarks/ends.py --add                         # what is left of that
    python benchmarks/ends.py --device cpu --quick --at-once 2          # with gloo

Two ranks start, record a function with a collective, replay it, and end: they destroy their group or do not (with recordings
that somebody has, or that are garbage in a cycle), make another, leave in mid-step, are interrupted, one raises, one is killed.
Where the other waits for it in a replay, it has to end within the group's timeout and five seconds, and to say in what, and for
whom. Others have to end with eager's status, within ten seconds of their last step, and without a message of CUDA's or NCCL's.

`--at-once` pairs of processes share the GPUs. The file is written as each pair ends; with `--add` those that are in it count.
"""

from __future__ import annotations

import json
import sys
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

Pair = dict[str, Any]


def seen(way: str, told: tuple[ends.Told, ends.Told]) -> Pair:
    """How one pair of processes has ended."""
    log = told[0].get("log", "")
    waited = [float(part.split(" s ")[0]) for part in log.split("rank 0 has waited for ")[1:]]
    after = [one.get("after") or one.get("seconds", 0.0) for one in told]
    starting = [one.get("seconds", 0.0) - (one.get("after") or 0.0) for one in told]
    return {
        "status": [one.get("status") for one in told],
        "as in eager": ends.is_as_it_should_be(way, told),
        "after_s": round(max(after), 1),
        "starting_s": round(max(starting), 1),
        "named": "Missing, as they are in no replay: 1." in log,
        "waited_s": max(waited, default=None),
    }


def counted(pairs: list[Pair]) -> dict[str, Any]:
    """How the ranks have ended, with the number of times, and how long that took after their last steps."""
    both = [json.dumps(pair["status"]) for pair in pairs]
    return {
        "times": len(pairs),
        "ended": {status: both.count(status) for status in sorted(set(both))},
        "as in eager": sum(pair["as in eager"] for pair in pairs),
        "hangs": sum(isinstance(status, str) for pair in pairs for status in pair["status"]),
        "slowest_s": max(pair["after_s"] for pair in pairs),
        "starting_s": max(pair["starting_s"] for pair in pairs),
        "named": sum(pair["named"] for pair in pairs),
        "waited_s": max((pair["waited_s"] for pair in pairs if pair["waited_s"] is not None), default=None),
        "pairs": pairs,
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
    parser.add_argument("--add", action="store_true", help="count the pairs that the file has")
    arguments = parser.parse_args()
    times = 1 if arguments.quick else arguments.times
    report = harness.Report(CLAIM, TARGET.format(times, SOON, LATE), arguments)
    backend = "gloo" if arguments.device == "cpu" else "nccl"
    found: dict[str, list[Pair]] = {way: [] for way in ends.WAYS}
    if arguments.add and (file := arguments.out / f"{CLAIM}.json").exists():
        found |= {way: one["pairs"] for way, one in json.loads(file.read_text())["figures"].items()}
    # Each way once, then each again; those that take longest first, so that they are spread.
    longest = sorted(ends.WAYS, key=lambda way: way not in GONE)
    names = [f"{way}:{n}" for n in range(times) for way in longest if n >= len(found[way])]
    for name, pair in ends.start(backend, names, arguments.at_once):
        way = name.partition(":")[0]
        found[way].append(seen(way, pair))
        statuses = found[way][-1]["status"]
        print(f"{name} has ended with {statuses} after {found[way][-1]['after_s']} s", flush=True)
        if not found[way][-1]["as in eager"]:
            print(*(one["log"][-2500:] for one in pair), sep="\n", flush=True)
        report.figures = {way: counted(pairs) for way, pairs in found.items() if pairs}
        report.write()
    if all(len(pairs) == times for pairs in found.values()):
        report.decide(met(report.figures, times, backend))
    return harness.finish(report)


if __name__ == "__main__":
    raise SystemExit(main())
