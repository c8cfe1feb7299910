"""Draw the measured plot of the README from the committed results.

    python benchmarks/plot.py          # writes docs/measured.svg

Each bar is the time of a step over that of the same function captured by hand, in one run on one machine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
TARGET = HERE.parent / "docs" / "measured.svg"

COMPILED = ", compiled inside"
# (title, result, what the rows' names end with, the row that "live" is)
GROUPS = (
    ("PPO update, 2 x 64", "ppo_update", COMPILED, "torch.compile"),
    ("GPT-2 124M training step", "gpt2_step", COMPILED, "live" + COMPILED),
    ("Llama 1.2B decode, a token", "llama_decode", COMPILED, "torch.compile"),
)
BARS = (
    ("live, compiled", "#c9ced6"),
    ("make_graphed_callables", "#9db4d0"),
    ("reduce-overhead", "#6f93c1"),
    ("phonograph", "#d1495b"),
)

WIDTH, LABELS, BAR, GAP = 760, 190, 18, 26
LONGEST = 8.0  # bars are cut here, and say what they are


def ratios(result: dict[str, Any], suffix: str, live: str) -> dict[str, float]:
    """Each method's time over that by hand."""
    times = {row["method"]: row["wall_us"] for row in result["rows"] if row["wall_us"]}
    names = {"live, compiled": live, "phonograph": "phonograph" + suffix}
    return {bar: times[name] / times["by hand" + suffix] for bar, _ in BARS if (name := names.get(bar, bar)) in times}


def main() -> int:
    results = {name: json.loads((HERE / "results" / f"{name}.json").read_text()) for _, name, _, _ in GROUPS}
    first = next(iter(results.values()))
    scale = (WIDTH - LABELS - 70) / LONGEST
    parts, y = [], 34
    for title, name, suffix, live in GROUPS:
        parts.append(f'<text x="8" y="{y + 4}" class="title">{escape(title)}</text>')
        y += 14
        measured = ratios(results[name], suffix, live)
        for bar, colour in BARS:
            if bar in measured:
                parts.append(_bar(bar, colour, measured[bar], y, scale))
                y += BAR + 3
        y += GAP
    line = LABELS + scale
    parts.insert(0, f'<line x1="{line:.1f}" y1="22" x2="{line:.1f}" y2="{y - GAP}" class="hand"/>')
    parts.insert(0, f'<text x="{line:.1f}" y="16" class="note" text-anchor="middle">captured by hand</text>')
    where = f"{first['hardware']}, torch {first['versions']['torch']}; each group in one run; shorter is faster"
    parts.append(f'<text x="8" y="{y}" class="note">{escape(where)}</text>')
    TARGET.write_text(_page(parts, y + 12))
    return 0


def _bar(name: str, colour: str, ratio: float, y: int, scale: float) -> str:
    length = min(ratio, LONGEST) * scale
    end = LABELS + length + 6
    middle = y + BAR - 5
    return (
        f'<text x="{LABELS - 8}" y="{middle}" class="name" text-anchor="end">{escape(name)}</text>'
        f'<rect x="{LABELS}" y="{y}" width="{length:.1f}" height="{BAR}" fill="{colour}"/>'
        f'<text x="{end:.1f}" y="{middle}" class="name">{ratio:.2f} ×</text>'
    )


def _page(parts: list[str], height: int) -> str:
    style = (
        "text{font-family:system-ui,sans-serif;fill:#333}.title{font-size:13px;font-weight:600}"
        ".name{font-size:12px}.note{font-size:11px;fill:#777}.hand{stroke:#333;stroke-dasharray:3 3}"
    )
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">\n'
        f'<style>{style}</style>\n<rect width="100%" height="100%" fill="#fff"/>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    raise SystemExit(main())
