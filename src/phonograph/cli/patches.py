"""What `phonograph check --fix` prints: lines that record what was found, as a patch for ``git apply``.

A decorator above the ``def``; for a module or an optimizer's step a line after the statement that makes it, if there is exactly
one in that file. And the import, where a file has none.
"""

from __future__ import annotations

import ast
import difflib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Place", "diff"]


@dataclass(frozen=True)
class Place:
    """Where the line belongs that records something: above a function that begins at `line`, or after what makes `name`."""

    file: str
    line: int = 0
    name: str = ""
    attribute: str = ""
    """Of `name`, what is recorded; "": that itself."""


def diff(wanted: Iterable[tuple[Place, str]]) -> tuple[str, list[Place]]:
    """A patch that records what lies at these places, each with its options (`'fallback="split"'`, or ""), and the places for
    which no line is certain. Paths are from the top of the repository, or from the current folder where there is none."""
    files: dict[str, list[tuple[Place, str]]] = {}
    for place, options in wanted:
        files.setdefault(os.path.abspath(place.file), []).append((place, options))
    parts, left = list[str](), list[Place]()
    for file, places in files.items():
        before = Path(file).read_text(encoding="utf-8")
        after, missed = _edited(before, places)
        left += missed
        name = os.path.relpath(file, _top(file)).replace(os.sep, "/")
        parts += _hunks(before, after, name)
    return "".join(parts), left


def _hunks(before: str, after: str, name: str) -> Iterable[str]:
    for line in difflib.unified_diff(_lines(before), _lines(after), f"a/{name}", f"b/{name}"):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _lines(text: str) -> list[str]:
    """The lines, by line feeds alone: other ends of lines belong to what they hold."""
    return [f"{line}\n" for line in text.split("\n")[:-1]] + ([last] if (last := text.split("\n")[-1]) else [])


def _top(file: str) -> Path:
    """The folder from which paths of a patch are counted."""
    folders = Path(file).resolve().parents
    return next((folder for folder in folders if (folder / ".git").exists()), Path.cwd())


def _edited(source: str, places: Iterable[tuple[Place, str]]) -> tuple[str, list[Place]]:
    tree, lines = ast.parse(source), _lines(source)
    record, imported = _record(tree)
    added, left = list[tuple[int, str]](), list[Place]()
    for place, options in places:
        at = place.line - 1 if place.line else _after(tree, place.name)
        if at is None:
            left.append(place)
            continue
        call = f"({options})" if options else ""
        of = f"{place.name}.{place.attribute}" if place.attribute else place.name
        text = f"@{record}{call}" if place.line else f"{of} = {record}({', '.join(filter(None, [of, options]))})"
        like = lines[at] if place.line else lines[_statement(tree, place.name).lineno - 1]
        added.append((at, like[: len(like) - len(like.lstrip())] + text + "\n"))
    if added and not imported:
        added.append((_imports_end(tree), f"import phonograph{' as pg' if record.startswith('pg') else ''}\n"))
    for at, text in sorted(added, reverse=True):
        if at and not lines[at - 1].endswith("\n"):
            lines[at - 1] += "\n"
        lines.insert(at, text)
    return "".join(lines), left


def _record(tree: ast.Module) -> tuple[str, bool]:
    """How a file can write `pg.record`, and whether it imports it so."""
    for name in (alias for x in tree.body if isinstance(x, ast.Import) for alias in x.names if alias.name == "phonograph"):
        return f"{name.asname or name.name}.record", True
    taken = any(isinstance(x, ast.Name) and x.id == "pg" for x in ast.walk(tree)) or "pg" in _imported(tree)
    return ("phonograph.record" if taken else "pg.record"), False


def _imported(tree: ast.Module) -> set[str]:
    imports = [x for x in ast.walk(tree) if isinstance(x, (ast.Import, ast.ImportFrom))]
    return {alias.asname or alias.name for x in imports for alias in x.names}


def _imports_end(tree: ast.Module) -> int:
    """After how many lines the imports at the head of a file end: behind its docstring at least."""
    end = 0
    for i, statement in enumerate(tree.body):
        docstring = i == 0 and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not docstring and not isinstance(statement, (ast.Import, ast.ImportFrom)):
            break
        end = statement.end_lineno or end
    return end


def _made(tree: ast.Module, name: str) -> list[ast.stmt]:
    """The statements that assign to this name."""
    return [x for x in ast.walk(tree) if isinstance(x, (ast.Assign, ast.AnnAssign)) and x.value and name in _targets(x)]


def _targets(statement: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    parts = [y for x in targets for y in (x.elts if isinstance(x, ast.Tuple) else [x])]
    return [ast.unparse(x) for x in parts]


def _statement(tree: ast.Module, name: str) -> ast.stmt:
    return _made(tree, name)[0]


def _after(tree: ast.Module, name: str) -> int | None:
    """After which line the only statement ends that makes it."""
    made = _made(tree, name)
    return made[0].end_lineno if len(made) == 1 else None
