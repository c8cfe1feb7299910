"""The rows of docs/several-gpus.md for four GPUs or more, from what `ranks.py` has written.

    python benchmarks/ranks_table.py results/ranks_4.json two/ranks.json

The second file has the same cases on two GPUs of the same machine. *From two* is how much of the speed is left: 1 where a GPU
does as much as before in the same time.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HEAD = ("", "eager", "by hand", "recorded", "over by hand", "speed-up", "memory", "p99/p50", "from two", "eager from two")


def cases_of(file: str) -> dict[str, Any]:
    cases: dict[str, Any] = json.loads(Path(file).read_text())["figures"]["cases"]
    return cases


def number(x: float | None, digits: int = 2) -> str:
    return "" if x is None else f"{x:.{digits}f}"


def ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def row(name: str, case: dict[str, Any], two: dict[str, Any]) -> str:
    if "error" in case:
        return f"| {name} | {next(filter(None, case['error']))} |" + " |" * 8
    times = [case[f"{kind} us"] for kind in ("eager", "by hand", "phonograph")]
    cells = [number(us and us / 1000) for us in times]
    cells += [number(case["over by hand"]), number(ratio(case["eager us"], case["phonograph us"]), 1)]
    cells += [number(case["memory over eager"] or case["memory over eager, first pass"]), number(case["p99/p50"])]
    cells += [number(ratio(two.get(f"{kind} us"), case[f"{kind} us"])) for kind in ("phonograph", "eager")]
    return " | ".join([f"| {name}", *cells]) + " |" + ("" if case["equal"] else " DIFFERS")


def main(files: list[str]) -> None:
    two = cases_of(files[1]) if len(files) > 1 else {}
    print("| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD), sep="\n")
    for name, case in cases_of(files[0]).items():
        print(row(name, case, two.get(name, {})))


if __name__ == "__main__":
    main(sys.argv[1:])
