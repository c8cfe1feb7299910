"""Draw the figures of docs/how-it-works.md: the folders of the source and their imports, read from the code, and a call's way.
And put the figures of the tests, from the committed results, into docs/trust.md.

python -m tests.docs.figures          # writes docs/house.svg and docs/call.svg, and between the marks of docs/trust.md
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from tests.unit.test_layers import IMPORTS, LAYERS, SOURCE

DOCS = Path(__file__).parents[2] / "docs"
RESULTS = DOCS.parent / "benchmarks" / "results"
STYLE = (
    "text{font-family:system-ui,sans-serif;fill:#333}.name{font-size:13px;font-weight:600}.note{font-size:11px;fill:#777}"
    ".box{fill:#eef2f7;stroke:#9db4d0}.hot{fill:#fbe9eb;stroke:#d1495b}.dot{fill:#6f93c1}.line{stroke:#9db4d0;fill:none}"
    ".way{stroke:#777;fill:none;marker-end:url(#end)}.hotway{stroke:#d1495b;stroke-width:2;fill:none;marker-end:url(#end)}"
)
HEAD = (
    '<defs><marker id="end" markerUnits="userSpaceOnUse" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto">'
    '<path d="M0,0L9,4L0,8z" fill="#777"/></marker></defs>'
)


def svg(width: int, height: int, parts: list[str]) -> str:
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    inner = "\n".join([f"<style>{STYLE}</style>{HEAD}", '<rect width="100%" height="100%" fill="#fff"/>', *parts])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{inner}\n</svg>\n'


def text(x: float, y: float, said: str, kind: str = "note", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(said)}</text>'


# -- the house

FLOOR, FIRST, LEFT, STEP, TOP = 28, 14, 470, 22, 100


def imports() -> set[tuple[str, str]]:
    """Which folder imports from which other."""
    pairs = {(name.partition(".")[0], other.partition(".")[0]) for name, others in IMPORTS.items() for other in others}
    return {(one, other) for one, other in pairs if one != other and {one, other} <= set(LAYERS)}


def house() -> str:
    """A floor for each folder, the highest first; right of it a dot for each folder that it imports from. Dots below the stairs
    would be imports from above."""
    floors, found = [*reversed(LAYERS)], imports()
    up = sum(floors.index(other) < floors.index(one) for one, other in found)
    parts = [text(FIRST, 24, f"{len(floors)} floors, {up} imports from above", "name"),
             text(FIRST, 42, "a dot: the folder of this row imports from that of the column")]  # fmt: skip
    for i, folder in enumerate(floors):
        y, at = TOP + i * FLOOR, LEFT + i * STEP
        parts += [f'<rect x="{FIRST}" y="{y}" width="{LEFT - 34}" height="{FLOOR - 4}" rx="3" class="box"/>',
                  text(FIRST + 8, y + 16, f"{folder}/", "name"), text(FIRST + 104, y + 16, purpose(folder)),
                  f'<text transform="translate({at + 4},{TOP - 8}) rotate(-50)" class="note">{folder}</text>',
                  f'<path d="M{at - STEP / 2:g},{y - 2}h{STEP}v{FLOOR}" class="line"/>']  # fmt: skip
    for one, other in sorted(found):
        x, y = LEFT + floors.index(other) * STEP, TOP + floors.index(one) * FLOOR + 12
        parts.append(f'<circle cx="{x}" cy="{y}" r="5" class="dot"/>')
    return svg(LEFT + len(floors) * STEP + 60, TOP + len(floors) * FLOOR + 8, parts)


def purpose(folder: str) -> str:
    """The beginning of what a folder says of itself."""
    said = ast.get_docstring(ast.parse((SOURCE / folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    first = said.split("\n\n")[0].replace("\n", " ").replace("`", "").partition(". ")[0].partition(":")[0].rstrip(".")
    return first if len(first) <= 56 else first[:55].rsplit(" ", 1)[0] + " …"


# -- a call's way

WIDE, HIGH, DOWN = 260, 52, 84
HOT = (
    ("f(x)", "the recorded function", "engine/recorded.py"),
    ("signature", "which call is this?", "call/signature.py"),
    ("shelf", "is there a recording of it?", "engine/shelf.py"),
    ("guards", "is what it relies on unchanged?", "slots/constants.py"),
    ("pool", "does anybody hold what it overwrites?", "memory/pool.py"),
    ("player", "fill the slots, launch, hand out results", "engine/player.py"),
)
BESIDE = {
    2: ("recorder", "warmed up: capture it, and play it once", "engine/recorder.py"),
    4: ("live", "plain eager, with the reason counted", "engine/history.py"),
}
LEAVES = ((2, 2, "none"), (3, 4, "no, and no other recording fits"), (4, 4, "yes, and no other recording misses it"))
"""Where a call leaves the hot path: from which box, to which beside it, and why."""


def call() -> str:
    x, beside = 14, 14 + WIDE + 240
    parts = []
    for i, box in enumerate(HOT):
        parts += _box(x, 14 + i * DOWN, box, "hot")
        if i + 1 < len(HOT):
            middle, y = x + WIDE / 2, 14 + i * DOWN + HIGH
            parts.append(f'<path d="M{middle:g},{y}v{DOWN - HIGH}" class="hotway"/>')
    for i, box in BESIDE.items():
        parts += _box(beside, 14 + i * DOWN, box, "box")
    for start, end, why in LEAVES:
        y, to = 14 + start * DOWN + HIGH / 2, 14 + end * DOWN + HIGH / 2
        to -= 12 if start != end else 0
        parts += [f'<path d="M{x + WIDE},{y:g}L{beside},{to:g}" class="way"/>', text(x + WIDE + 10, y - 6, why)]
    middle = beside + WIDE / 2
    parts += [f'<path d="M{middle:g},{14 + 2 * DOWN + HIGH}V{14 + 4 * DOWN}" class="way"/>',
              text(middle + 8, 14 + 3 * DOWN + 22, "not warmed up, or refused:"),
              text(middle + 8, 14 + 3 * DOWN + 36, "as if nothing had been tried")]  # fmt: skip
    return svg(beside + WIDE + 60, 14 + len(HOT) * DOWN - 10, parts)


def _box(x: float, y: float, box: tuple[str, str, str], kind: str) -> Iterator[str]:
    name, does, where = box
    yield f'<rect x="{x:g}" y="{y:g}" width="{WIDE}" height="{HIGH}" rx="4" class="{kind}"/>'
    yield text(x + 10, y + 21, name, "name")
    yield text(x + WIDE - 10, y + 21, where, anchor="end")
    yield text(x + 10, y + 40, does)


FIGURES = {"house.svg": house, "call.svg": call}


# -- what the tests have shown


def results(*names: str) -> list[dict[str, Any]]:
    """The results of these names that there are."""
    paths = [RESULTS / f"{name}.json" for name in names]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]


def table(head: list[str], rows: list[list[object]]) -> str:
    lines = [head, ["---"] * len(head), *[[f"{x:,}" if isinstance(x, int) else str(x) for x in row] for row in rows]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def device(result: dict[str, Any]) -> str:
    name = result.get("hardware") or result["device"]
    return f"CPU, torch {release(result)}" if result["device"] == "cpu" else f"{name}, torch {release(result)}"


def release(result: dict[str, Any]) -> str:
    return str(result["versions"]["torch"]).partition("+")[0]


ENDS = {
    "recorded and equal": ("recorded",), "not repeatable in eager": ("itself",), "other last digits": ("digits",),
    "wrong": ("differs", "raises", "crashes"),
}  # fmt: skip


def operators() -> str:
    """(A way that a member cannot be called in is no case.)"""
    rows = list[list[object]]()
    for result in results("operators_cpu", "operators_cuda"):
        ended = Counter[str]()
        for ways in result["members"].values():
            for row in ways.values():
                ended.update({how: many for how, many in row.items() if how != "said"})
        counts = [sum(ended[how] for how in each) for each in ENDS.values()]
        tried = sum(ended.values()) - ended["none"]
        rows.append([device(result), len(result["members"]), tried, *counts, tried - sum(counts)])
    return table(["operators, modules and optimizers of torch", "members", "cases", *ENDS, "live"], rows)


def random_programs() -> str:
    kinds = {"fuzz": "operators", "fuzz_training": "training loops"}
    found = [(what, result) for name, what in kinds.items() for result in results(f"{name}_cpu", f"{name}_cuda")]
    rows = [[device(x), what, x["programs"], x["recordings"], x["replays"], x["failed"]] for what, x in found]
    return table(["random programs", "of", "programs", "recordings", "replays", "failed"], rows)


def reading_programs() -> str:
    rows = list[list[object]]()
    for result in results("reading_programs"):
        kinds = [x for x in result["figures"].values() if isinstance(x, dict)]
        ended = Counter[str]()
        for kind in kinds:
            ended.update(kind["what is changed"])
        alarms = sum(len(kind["false alarms"]) for kind in kinds)
        programs = sum(kind["programs"] for kind in kinds)
        known = ("noticed", "runs live", "found by the audit")
        rows.append(
            [device(result), programs, *(ended[how] for how in known), programs - sum(ended[how] for how in known), alarms]
        )
    return table(
        ["reading programs", "programs", "noticed at once", "run live", "found by the audit", "missed", "false alarms"], rows
    )


def faults() -> str:
    return table(["injected faults", "faults", "failed"],
                 [[device(x), x["trials"], len(x["found"])] for x in results("faults_cpu", "faults_cuda")])  # fmt: skip


TRUST = {"operators": operators, "random": random_programs, "reading": reading_programs, "faults": faults}


def filled(page: str) -> str:
    """A page with these tables between their marks."""
    for name, made in TRUST.items():
        mark, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        before, _, rest = page.partition(mark)
        page = f"{before}{mark}{made()}\n{end}{rest.partition(end)[2]}"
    return page


if __name__ == "__main__":
    for name, draw in FIGURES.items():
        (DOCS / name).write_text(draw(), encoding="utf-8")
    (DOCS / "trust.md").write_text(filled((DOCS / "trust.md").read_text(encoding="utf-8")), encoding="utf-8")
