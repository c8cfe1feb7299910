"""What an audit costs: the Python code of a call runs dry once more, and its operators are compared with the recording's.

    python benchmarks/audits.py

An audit is timed as a replayed call with one less a replayed call without. Beside it stand a live step and the call that
records. The share is that of the audits among 4,096 replayed calls: four in the first 4,096, then one.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import harness
import phonograph as pg
import ppo_update
import workloads

CLAIM = "audits"
EVERY = 4096  # replays
FIRST = 4  # audits among the first of them: after 8, 64, 512 and 4,096
TARGET = f"one audit in {EVERY:,} replays at most 0.1% of as many live steps"
SHARE = 0.001

Make = Callable[[], tuple[Callable[..., Any], list[Any]]]


def ppo(device: str, **options: Any) -> tuple[Callable[..., Any], list[Any]]:
    return ppo_update.updater(device, **options), ppo_update.minibatches(device)


def trained(of: Callable[..., workloads.Training], device: str) -> tuple[Callable[..., Any], list[Any]]:
    made = of(device)
    return made.step, made.batches


CASES: dict[str, Callable[[str], tuple[Callable[..., Any], list[Any]]]] = {
    "PPO": ppo,
    "PPO, plain Adam": partial(ppo, fused=False),
    "GPT-2": partial(trained, workloads.gpt2),
    "ResNet-50": partial(trained, workloads.resnet50),
    "MobileNetV3": partial(trained, workloads.mobilenet),
}


def calls_ms(step: Callable[..., Any], feed: itertools.cycle[Any], calls: int) -> list[float]:
    """Milliseconds of each of so many calls, the device idle before and after."""
    times = []
    for _ in range(calls):
        harness.synchronize()
        begin = time.perf_counter()
        step(*next(feed))
        harness.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return times


def measure(make: Make, calls: int) -> dict[str, float]:
    """One case: a live step, a replay, the call that records, an audit."""
    step, batches = make()
    feed = itertools.cycle(batches)
    calls_ms(step, feed, 3)
    live = statistics.median(calls_ms(step, feed, calls))
    found = {"live ms": live}
    for which, audit in (("first recording, live steps", 0), ("second recording, live steps", 1)):
        recorded = pg.record(make()[0], audit=audit, keep="always")
        begun = calls_ms(recorded, feed, 3)
        found[which] = (max(begun) - live) / live
        steady = statistics.median(calls_ms(recorded, feed, calls))
        assert pg.stats(recorded).recorded == 1, pg.explain(recorded)
        found["replay ms" if not audit else "audited ms"] = steady
        pg.reset(recorded)
    found["audit, live steps"] = (found["audited ms"] - found["replay ms"]) / live
    return {name: round(x, 3) for name, x in found.items()}


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--only", nargs="*", choices=list(CASES), help="only these cases")
    arguments = parser.parse_args()
    report, within = harness.Report(CLAIM, TARGET, arguments), []
    for name in arguments.only or CASES:
        with harness.trying(report, name):
            found = measure(partial(CASES[name], arguments.device), 6 if arguments.quick else 30)
            share, first = (n * found["audit, live steps"] / EVERY for n in (1, FIRST))
            notes = found | {"share": round(share, 5), "share of the first": round(first, 5)}
            report.rows.append(harness.Row(name, wall_us=found["replay ms"] * 1e3, notes=notes))
            within.append(share <= SHARE)
    if arguments.device != "cpu" and len(within) == len(CASES):
        report.decide(all(within))
    return harness.finish(report)


if __name__ == "__main__":
    raise SystemExit(main())
