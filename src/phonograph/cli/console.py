"""What a command shows a person: rich where it is installed, plain text where it is not."""

from __future__ import annotations

from collections.abc import Sequence

try:
    import rich.console
    import rich.markup
    import rich.table

    HAVE_RICH = True
except ImportError:
    HAVE_RICH = False

_COLOURS = {"ok": "green", "note": "yellow", "problem": "bold red"}


class CannotRun(Exception):
    """The command could not start; the message says what is missing and how to get it."""


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a titled table to stdout. A cell that is exactly ok, note or problem is coloured."""
    if HAVE_RICH:
        _rich_table(title, columns, rows)
    else:
        _plain_table(title, columns, rows)


def _rich_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    drawn = rich.table.Table(title=title, title_justify="left", show_header=any(columns))
    for index, column in enumerate(columns):
        # The last column holds the sentences: the others are short and must not be squeezed for it.
        drawn.add_column(column, overflow="fold", no_wrap=index < len(columns) - 1)
    for row in rows:
        drawn.add_row(*map(_coloured, row))
    rich.console.Console().print(drawn)


def _coloured(cell: str) -> str:
    text = rich.markup.escape(cell)
    return f"[{_COLOURS[cell]}]{text}[/]" if cell in _COLOURS else text


def _plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print(title)
    lines = [columns, *rows] if any(columns) else list(rows)
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    for line in lines:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    print()
