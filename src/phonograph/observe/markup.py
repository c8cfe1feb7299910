"""HTML that is made of parts: text is escaped unless it is markup already, so that nothing that comes from data can be any."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

__all__ = ["Markup", "tag", "together"]

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
