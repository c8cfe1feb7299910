"""The folders of the source stand on each other: what is lower imports nothing higher, and there are no circles."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import phonograph

SOURCE = Path(phonograph.__file__).parent
FACE = ("errors", "options", "reasons", "statistics", "version")  # of the public face, what all may import
LAYERS = (
    "_torch", "python", "values", "memory", "state", "distributed", "aten", "call", "guards", "capture", "autograd", "devices",
    "engine", "shapes", "wrappers", "compile",
)  # fmt: skip

FLAT = {*FACE, "__init__", "__main__", "api", "comparison", "fx", "pytest_plugin", "testing", "thunder"}


def modules() -> dict[str, Path]:
    return {".".join(path.relative_to(SOURCE).with_suffix("").parts): path for path in SOURCE.rglob("*.py")}


def imported(name: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules that this one imports, for types too."""
    for x in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(x, ast.ImportFrom) and x.level:
            there = [*name.split(".")[: -x.level], *(x.module or "").split(".")]
            base = ".".join(filter(None, there))
            for alias in x.names:
                inner = f"{base}.{alias.name}".lstrip(".")
                yield inner if inner in known else base if base in known else f"{base}.__init__".lstrip(".")


IMPORTS = {name: sorted(set(imported(name, path, modules()))) for name, path in modules().items()}


def layer(name: str) -> int:
    first = name.partition(".")[0]
    return -1 if name in FACE else LAYERS.index(first) if first in LAYERS else len(LAYERS)


def test_lower_never_imports_higher() -> None:
    up = [(name, other) for name, others in IMPORTS.items() for other in others if layer(other) > layer(name)]
    assert up == []


def test_no_circles() -> None:
    order = list(TopologicalSorter(IMPORTS).static_order())  # raises where there is one
    assert set(IMPORTS) <= set(order)


def test_nothing_lies_flat_but_the_public_face() -> None:
    flat = {name for name in IMPORTS if "." not in name}
    assert flat == FLAT


@pytest.mark.parametrize("folder", LAYERS)
def test_a_folder_says_what_it_is_for(folder: str) -> None:
    assert ast.get_docstring(ast.parse((SOURCE / folder / "__init__.py").read_text(encoding="utf-8")))
