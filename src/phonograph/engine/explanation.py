"""What `pg.explain` gives: text, which a notebook shows as a page."""

from __future__ import annotations

from html import escape
from typing import Protocol

__all__ = ["Explanation"]


class Printer(Protocol):
    """IPython's, for text."""

    def text(self, text: str) -> None: ...


class Explanation(str):
    """The text. As the last line of a notebook's cell, each recording can be opened there; in IPython, lines are lines."""

    __slots__ = ()

    def _repr_pretty_(self, printer: Printer, cycle: bool) -> None:
        printer.text(str(self))

    def _repr_html_(self) -> str:
        """No script, and nothing of the user's but as text."""
        parts: list[list[str]] = []
        for line in self.splitlines():
            if line.startswith(" ") and parts:
                parts[-1].append(line.strip())
            else:
                parts.append([line])
        return f"<div>{''.join(map(_part, parts))}</div>"


def _part(lines: list[str]) -> str:
    """A line, under which more can be opened."""
    first, *more = map(escape, lines)
    if not more:
        return f"<div>{first}</div>"
    inside = "".join(f"<div>{line}</div>" for line in more)
    return f'<details open><summary>{first}</summary><div style="margin-left: 1.5em">{inside}</div></details>'
