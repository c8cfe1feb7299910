"""`docs/operators.md`, from the results of `operators.py`: what was recorded of each member, what ran live and why."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

DEVICES = {"cpu": "CPU", "cuda": "GPU"}
DATABASES = {"op": ("Operators", "op_db"), "module": ("Modules", "module_db"), "optim": ("Optimizers", "optim_db")}
SAID = {
    "digits": "other last digits ([limits](limits.md))",
    "itself": "differs from itself",
    "differs": "**differs**",
    "raises": "**raises**",
    "crashes": "**ends the process**",
}
HEAD = """# Operator by operator

Written by `python benchmarks/operators.py --page` from committed results: do not edit.

torch ships databases of its operators, modules and optimizers, with samples, for its own tests. Each entry was called four
times with other values, recorded and live, with up to four samples, in these ways: *forward*; *pair* (backward outside);
*whole* (backward within); *autocast*; *inference* (`torch.inference_mode()`); *out* (`out=`); *vmap*; *second* (gradients of
gradients); *forward mode*; of optimizers *step* (alone) and *whole*. What is **recorded** was replayed, and equal to live in
every bit: results, arguments, gradients, and where all random generators stand. What ran live has the code of its
[reason](reasons.md), and is as right. What **differs from itself** does so live, run twice from one seed: memory that nobody
has written (`torch.empty`), or on a GPU sums in no fixed order (atomic additions).
"""

Row = dict[str, Any]
Results = dict[str, dict[str, Row]]


def page(folder: Path) -> str:
    found = {device: loaded(folder / f"operators_{device}.json") for device in DEVICES}
    results = {device: each["members"] for device, each in found.items() if each}
    parts = [HEAD, *(run_of(device, each) for device, each in found.items() if each)]
    return "\n".join([*parts, *(section(results, database) for database in DATABASES)])


def loaded(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def run_of(device: str, found: dict[str, Any]) -> str:
    count = Counter[str]()
    for figures in found["figures"].values():
        count.update({what: n for what, n in figures.items() if what not in ("none", "members")})
    said = ", ".join(f"{n:,} {SAID.get(what, what)}" for what, n in sorted(count.items(), key=lambda each: -each[1]))
    return f"{DEVICES[device]} ({found['hardware']}, torch {found['versions']['torch']}): {said}.\n"


def section(results: dict[str, Results], database: str) -> str:
    title, name = DATABASES[database]
    members = sorted(
        {m for each in results.values() for m in each if m.startswith(f"{database}:")}, key=lambda m: (m.lower(), m)
    )
    rows = {m: [cell(each.get(m)) for each in results.values()] for m in members}
    rows = {m: cells for m, cells in rows.items() if any(cells)}  # of the others, no sample runs live
    whole = [m for m, cells in rows.items() if {*cells} <= {"recorded", ""}]
    lines = [f"## {title} (`{name}`)\n", "Recorded in all ways: " + ", ".join(f"`{shown(m)}`" for m in whole) + ".\n"]
    table = [f"| {' | '.join(['', *(DEVICES[device] for device in results)])} |", "|---" * (1 + len(results)) + "|"]
    table += [f"| `{shown(m)}` | {' | '.join(cells)} |" for m, cells in rows.items() if m not in whole]
    return "\n".join([*lines, *table]) + "\n"


def shown(member: str) -> str:
    return member.partition(":")[2]


def cell(ways: dict[str, Row] | None) -> str:
    """What is not recorded: by what comes of it, in which ways. Of a way that is live in part, how many samples are."""
    by: dict[str, list[str]] = {}
    for way, row in (ways or {}).items():
        row = {what: n for what, n in row.items() if what not in ("said", "none")}
        for what, n in row.items():
            if what != "recorded":
                by.setdefault(named(what), []).append(way if n == sum(row.values()) else f"{way} ({n} of {sum(row.values())})")
    if by:
        return "; ".join(f"{what}: {', '.join(places)}" for what, places in by.items())
    return "recorded" if any("recorded" in row for row in (ways or {}).values()) else ""


def named(what: str) -> str:
    return f"[{what}](reasons.md#{what.lower()})" if what.startswith("PG") else SAID.get(what, what)
