"""HTML that is made of parts, numbers as a reader wants them, and lines of source. Text is escaped unless it is markup already,
so that nothing that comes from data can be any.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable
from html import escape

__all__ = ["Markup", "counted", "excerpt", "mebibytes", "seconds", "tag", "times", "together"]

_SVG = {"view_box": "viewBox", "aspect": "preserveAspectRatio"}


class Markup(str):
    """Text that is HTML."""

    __slots__ = ()


def tag(name: str, *children: str, **attributes: str | float) -> Markup:
    """An element. `class_` is the attribute that Python has no name for."""
    given = "".join([f' {_SVG.get(key) or key.rstrip("_")}="{escape(str(value))}"' for key, value in attributes.items()])
    return Markup(f"<{name}{given}>{together(children)}</{name}>")


def together(children: Iterable[str]) -> Markup:
    """One after the other."""
    return Markup("".join([child if isinstance(child, Markup) else escape(child) for child in children]))


# -- numbers


def counted(n: int, what: str) -> str:
    """1 call, 2,000 calls"""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def seconds(x: float) -> str:
    """Three digits, in the unit that fits."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if x * factor >= 1:
            return f"{_digits(x * factor)} {unit}"
    return f"{x * 1e6:.2f} µs" if x else "0"


def mebibytes(n: int) -> str:
    return f"{_digits(n / 2**20)} MiB" if n >= 1 << 20 else f"{_digits(n / 2**10)} KiB" if n >= 1 << 10 else f"{n} bytes"


def times(x: float) -> str:
    return f"{_digits(x)} ×"


def _digits(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"


# -- source


_PLACE = re.compile(r"(.+?):(\d+)(?:, in .*)?")
_AROUND = 2


def excerpt(where: str) -> Markup:
    """The line, marked, with two before and behind it; nothing where the file cannot be read."""
    place = _PLACE.fullmatch(where)
    if place is None:
        return Markup()
    lines, number = linecache.getlines(place[1]), int(place[2])
    first = max(1, number - _AROUND)
    shown = [(n, line.rstrip("\n")) for n, line in enumerate(lines[first - 1 : number + _AROUND], first)]
    rows = [tag("mark" if n == number else "span", f"{n:>5}  {line}") for n, line in shown]
    return tag("pre", together(rows)) if 0 < number <= len(lines) else Markup()
