"""Draw the measured plot of the README from the committed results.

    python benchmarks/plot.py          # writes docs/measured.svg

Each bar says how many times faster a step is than in eager, and how long it takes; each group is of one run on one machine. The
numbers stand above the bars, so that a narrow screen shows them without scrolling.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
TARGET = HERE.parent / "docs" / "measured.svg"

# (title, result, the row that is eager, the row that is torch.compile)
GROUPS = (
    ("PPO update, MLP 2 × 64, batch 64", "ppo_update", "eager", "torch.compile"),
    ("GPT-2 124M training step, 2 × 256", "gpt2_step", "live", "live, compiled inside"),
    ("Llama 1.2B, decoding a token", "llama_decode", "live", "torch.compile"),
)
BARS = (
    ("eager", "#c9ced6"),
    ("torch.compile", "#b3c1d4"),
    ("make_graphed_callables", "#93aacb"),
    ("reduce-overhead", "#6f93c1"),
    ("pg.record", "#e28a96"),
    ("pg.record, compiled inside", "#d1495b"),
)
NAMES = {"pg.record": "phonograph", "pg.record, compiled inside": "phonograph, compiled inside"}

WIDTH, EDGE, TEXT, BAR, GAP = 440, 8, 14, 9, 20
STEP = 5  # between lines of the axis


def times(result: dict[str, Any], eager: str, compiled: str) -> dict[str, float]:
    """Each bar's time in ms."""
    found = {row["method"]: row["wall_us"] / 1000 for row in result["rows"] if row["wall_us"]}
    names = {"eager": eager, "torch.compile": compiled, **NAMES}
    return {bar: found[name] for bar, _ in BARS if (name := names.get(bar, bar)) in found}


def draw(results: dict[str, dict[str, Any]]) -> str:
    groups = [(title, times(results[name], eager, compiled)) for title, name, eager, compiled in GROUPS]
    longest = max(measured["eager"] / value for _, measured in groups for value in measured.values())
    scale = (WIDTH - 2 * EDGE) / longest
    parts, y = [], 36
    for title, measured in groups:
        parts.append(f'<text x="{EDGE}" y="{y + 4}" class="title">{escape(title)}</text>')
        y += 10
        for bar, colour in BARS:
            if bar in measured:
                parts += _bar(bar, colour, measured["eager"] / measured[bar], measured[bar], y, scale)
                y += TEXT + BAR + 4
        y += GAP
    lines = []
    for n in range(0, int(longest) + 1, STEP):
        x = EDGE + n * scale
        lines += [f'<line x1="{x:.1f}" y1="22" x2="{x:.1f}" y2="{y - GAP}" class="axis"/>',
                  f'<text x="{x:.1f}" y="16" class="note" text-anchor="{"middle" if n else "start"}">{n} ×</text>']  # fmt: skip
    first = next(iter(results.values()))
    where = f"times faster than eager; {first['hardware']}, torch {first['versions']['torch']}; each group in one run"
    return _page([*lines, *parts, f'<text x="{EDGE}" y="{y}" class="note">{escape(where)}</text>'], y + 12)


def _bar(name: str, colour: str, faster: float, took: float, y: int, scale: float) -> list[str]:
    said = f"{escape(name)}: {faster:.1f} × · {took:#.3g} ms"
    return [
        f'<text x="{EDGE}" y="{y + TEXT - 2}" class="name">{said}</text>',
        f'<rect x="{EDGE}" y="{y + TEXT}" width="{faster * scale:.1f}" height="{BAR}" fill="{colour}"/>',
    ]


def _page(parts: list[str], height: int) -> str:
    style = (
        "text{font-family:system-ui,sans-serif;fill:#333}.title{font-size:13px;font-weight:600}"
        ".name{font-size:12px}.note{font-size:11px;fill:#777}.axis{stroke:#e3e6ea}"
    )
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">\n'
        f'<style>{style}</style>\n<rect width="100%" height="100%" rx="6" fill="#fff"/>\n{body}\n</svg>\n'
    )


def plot() -> str:
    return draw({name: json.loads((HERE / "results" / f"{name}.json").read_text()) for _, name, _, _ in GROUPS})


if __name__ == "__main__":
    TARGET.write_text(plot(), encoding="utf-8")
