"""The folders of the source stand on each other: what is lower imports nothing higher, and there are no circles."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import phonograph

SOURCE = Path(phonograph.__file__).parent
FACE = ("errors", "options", "reasons", "statistics", "version")  # of the public face, what all but `_torch` may import
LAYERS = (
    "_torch", "python", "values", "memory", "state", "distributed", "aten", "call", "reads", "guards", "slots", "capture",
    "autograd",
    "devices", "engine", "control", "shapes", "wrappers", "compile",
)  # fmt: skip

FLAT = {*FACE, "__init__", "__main__", "api", "comparison", "fx", "public", "pytest_plugin", "testing",
        "thunder"}  # fmt: skip


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


def layer(name: str) -> float:
    first = name.partition(".")[0]
    return 0.5 if name in FACE else LAYERS.index(first) if first in LAYERS else len(LAYERS)


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


def dotted(x: ast.expr) -> list[str]:
    """`torch.a.b` as its names; of other expressions, none."""
    names: list[str] = []
    while isinstance(x, ast.Attribute):
        names.insert(0, x.attr)
        x = x.value
    return [x.id, *names] if isinstance(x, ast.Name) else []


def private(tree: ast.AST) -> Iterator[str]:
    """What of torch's own a module names: `torch._C`, `from torch.utils import _pytree`. Operators have names of their own."""
    for x in ast.walk(tree):
        found: list[list[str]] = []
        if isinstance(x, ast.Attribute):
            found = [dotted(x)]
        elif isinstance(x, ast.Import):
            found = [alias.name.split(".") for alias in x.names]
        elif isinstance(x, ast.ImportFrom) and not x.level:
            found = [[*(x.module or "").split("."), alias.name] for alias in x.names]
        for names in found:
            if names[:1] == ["torch"] and names[1:2] != ["ops"] and any(n[0] == "_" != n[1:2] for n in names):
                yield ".".join(names)


@pytest.mark.parametrize("name", [name for name in modules() if not name.startswith("_torch")])
def test_only_one_folder_touches_what_is_private_in_torch(name: str) -> None:
    assert [*private(ast.parse(modules()[name].read_text(encoding="utf-8")))] == []


def test_what_is_private_is_told_apart() -> None:
    named = "import torch._C\nfrom torch.utils import _pytree, data\ntorch._C._jit()\ntorch.ops.aten._x()\ntorch.__name__"
    assert sorted(set(private(ast.parse(named)))) == ["torch._C", "torch._C._jit", "torch.utils._pytree"]
