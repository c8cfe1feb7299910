"""Put the table of the real programs into the README, from the committed result.

    python benchmarks/real_table.py            # rewrites what stands between <!-- real --> and <!-- /real -->
    python benchmarks/real_table.py --print    # only prints it

A cell is a speed over the plain program's: with one line of phonograph, and with the usual rival. In brackets: mostly live.
Late: not compiled within the time that a rival has.
"""

from __future__ import annotations

import argparse
import json
from itertools import zip_longest
from pathlib import Path
from typing import Any

from real import PROGRAMS
from real_programs import MOSTLY, OURS, right

HERE = Path(__file__).parent
RESULT, README = HERE / "results" / "real.json", HERE.parent / "README.md"
BEGIN, END = "<!-- real -->", "<!-- /real -->"
COLUMNS = 3  # programs in a line
RIVALS = {"CudaGraphModule": "cgm", "reduce-overhead": "r-o", "generate's own": "own"}  # as a cell has room for them


def cells(row: dict[str, Any]) -> list[str]:
    """The program, ours, the rival's."""
    speeds, rival = row.get("speed", {}), row.get("rival")
    ours = f"{speeds[OURS]:.2f}" if OURS in speeds else "-"
    if not right(row):
        ours = "differs"
    elif row.get("played", 0.0) <= MOSTLY:
        ours = f"({ours})"
    late = "not ready" in row.get("errors", {}).get(rival, "")
    theirs = f"{speeds[rival]:.2f}" if rival in speeds else "late" if late else "fails"
    return [PROGRAMS[row["program"]], ours, f"{theirs} {RIVALS.get(rival, rival)}"]


def table(result: dict[str, Any]) -> str:
    made = [cells(row) for row in result["rows"]]
    height = -(-len(made) // COLUMNS)
    lines = [["program", "one line", "rival"] * COLUMNS, ["---"] * 3 * COLUMNS]
    for beside in zip_longest(*[made[i * height : (i + 1) * height] for i in range(COLUMNS)], fillvalue=["", "", ""]):
        lines.append([cell for group in beside for cell in group])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def put(readme: str, rendered: str) -> str:
    """The README with this table between its marks."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"README.md has no {BEGIN} and {END} to put the table between")
    return f"{before}{BEGIN}\n{rendered}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", action="store_true", help="write nothing")
    parser.add_argument("--result", type=Path, default=RESULT)
    arguments = parser.parse_args()
    rendered = table(json.loads(arguments.result.read_text()))
    if arguments.print:
        print(rendered)
    else:
        README.write_text(put(README.read_text(), rendered))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
