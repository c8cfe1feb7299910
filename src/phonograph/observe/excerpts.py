"""Lines of source around a place, as `file:line` names it."""

from __future__ import annotations

import linecache
import re

from .markup import Markup, tag, together

__all__ = ["excerpt"]

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
