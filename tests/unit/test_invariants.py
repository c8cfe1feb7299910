"""Pages of invariants at the top of files: each one names the tests that look, and these are there. No text names a module that
is gone."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import phonograph

SOURCE, TESTS = Path(phonograph.__file__).parent, Path(__file__).parents[1]
FORMER = {"doors", "listening", "reliances", "witness"}
"""Names that modules had."""
WINGS = sorted(path.parent.name for path in SOURCE.glob("*/__init__.py"))


def docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


@pytest.mark.parametrize("file", ["memory/pool.py", "engine/recorder.py"])
def test_each_invariant_names_tests_that_there_are(file: str) -> None:
    """Numbered from 1, each with a sentence in italics."""
    _, _, page = docstring(SOURCE / file).partition("What always holds, and the tests that look:\n")
    parts = re.findall(r"^(\d+)\. \*(.+?)(?=^\d+\. |\n\n|\Z)", page.strip(), re.MULTILINE | re.DOTALL)
    tests = "".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    assert [int(n) for n, _ in parts] == list(range(1, len(parts) + 1))
    assert len(parts) >= 8
    for n, text in parts:
        named = re.findall(r"`(test_\w+)`", text)
        assert named, f"{file}: invariant {n} names no test"
        assert [name for name in named if f"def {name}(" not in tests] == []


def texts(path: Path) -> list[str]:
    """Comments and docstrings of a module."""
    source = path.read_text(encoding="utf-8")
    nodes = (n for n in ast.walk(ast.parse(source)) if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef)))
    return [*re.findall(r"#.*", source), *(ast.get_docstring(n) or "" for n in nodes)]


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_text_names_a_file_that_is_gone(path: Path) -> None:
    """`table.py`, `guards/reachable.py`, `guards/`: files beside this one, or of the package, and folders of it."""
    known = {one.name for one in SOURCE.rglob("*.py")} | {"setup.py", "train.py", "script.py"}
    for text in texts(path):
        for folder, name in re.findall(r"(?<![\w./<])((?:[a-z_]\w*/)*)([a-z_]\w*\.py)(?![\w:])", text):
            inside = [SOURCE / folder / name, path.parent / folder / name]
            assert any(one.exists() for one in inside) if folder and folder.split("/")[0] in WINGS else name in known, name
        named = re.findall(r"`(\w+)`", text)
        assert FORMER.isdisjoint(named), named
