"""Functions with collectives on two ranks: does each rank have what it has in eager, and is it recorded?

    python benchmarks/collectives.py                   # needs two GPUs, half a minute
    python benchmarks/collectives.py --device cpu      # with gloo

The functions are `FUNCTIONS` of `tests/ranks.py`: those of c10d and the functional ones, async works, subgroups, what writes
arguments and outside tensors, autograd functions and hooks, sends and receives, a mixture of experts. Each is called twenty
times as it is, and twenty times recorded. On each rank, results, arguments, outside tensors, parameters and gradients are
compared by their bits after each call, and which of them have moved their versions on. A function counts as recorded if it is
replayed to the end on both ranks; of what is not, the reasons are told. On the CPU a recording plays what lies between the
collectives.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests import ranks  # noqa: E402

import harness  # noqa: E402

CLAIM, RECORDED, FIRST = "collectives", 24, 2
TARGET = (
    f"{len(ranks.FUNCTIONS)} functions, {ranks.CALLS} calls, both ranks: all as in eager, by the bits; "
    f"at least {RECORDED} recorded, and replayed in {ranks.CALLS - FIRST} calls or more"
)


def row_of(name: str, told: list[dict[str, Any]]) -> harness.Row:
    """What both ranks have found in one function."""
    if missing := [rank for rank, one in enumerate(told) if name not in one]:
        return harness.Row(name, error=f"rank {missing[0]} has not told: {told[missing[0]]['status']}")
    both = [one[name] for one in told]
    notes: dict[str, Any] = {which: [one.get(which) for one in both] for which in ("recorded", "replayed", "live")}
    notes["differs"] = [one["wrong"][:3] for one in both] if any(one["wrong"] for one in both) else []
    notes["reasons"] = [one.get("refusals") for one in both] if not is_recorded(notes) else []
    return harness.Row(name, notes=notes)


def is_recorded(notes: dict[str, Any]) -> bool:
    return all(n is not None and n >= ranks.CALLS - FIRST for n in notes["replayed"])


def main() -> int:
    arguments = harness.parser(__doc__).parse_args()
    report = harness.Report(CLAIM, TARGET, arguments)
    backend = "gloo" if arguments.device == "cpu" else "nccl"
    with tempfile.TemporaryDirectory() as folder:
        told = ranks.start(backend, Path(folder), ranks.FUNCTIONS)
    report.rows += [row_of(name, told) for name in ranks.FUNCTIONS]
    found = [row.notes for row in report.rows if row.error is None]
    report.figures |= {
        "as in eager": sum(not notes["differs"] for notes in found),
        "recorded": sum(map(is_recorded, found)),
        "live": [row.method for row in report.rows if row.error is None and not is_recorded(row.notes)],
        "statuses": [one["status"] for one in told],
    }
    if any(one["status"] != 0 for one in told):
        print(*(one["log"] for one in told), sep="\n")
    all_equal = report.figures["as in eager"] == len(ranks.FUNCTIONS) and report.figures["statuses"] == [0, 0]
    report.decide(all_equal and report.figures["recorded"] >= RECORDED)
    return harness.finish(report)


if __name__ == "__main__":
    raise SystemExit(main())
