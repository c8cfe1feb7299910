"""Programs that read something outside of their arguments, each in a way of its own: `reading.txt` has their source, and
`reading_unrun.txt` those where a method that does not run in the call says what is read, or leads to it, `reading_packages.txt`
those of what others' code holds and reads. `reading_limits.txt` has those of which only an audit may find what has changed.

A program has a function `f` (or `get_f`, which gives it), and modules beside it. After some calls `change` changes what `f`
reads, and `undo` takes that back. Or `f` changes something itself, once in each call, as `count` tells.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

__all__ = ["GROUPS", "counts", "function_of", "load"]

_PACKAGE = {  # an installed one
    "pkgx/__init__.py": "RATE = 2.0\n"
    "class Settings:\n    def __init__(self): self.rate = 2.0\n"
    "settings = Settings()\n"
    "class Base:\n    rate = 2.0\n",
    "pkgx/conf.py": "RATE = 2.0\n",
    "pkgx/sub/__init__.py": "",
    "pkgx/sub/deep.py": "RATE = 2.0\n",
}
_UNRUN = """
import contextlib, functools, operator, os, types, weakref
from torch import nn
"""
_CALLED = """
if isinstance(f, nn.Module):
    model = f
    def f(x): return model(x)
"""


def _programs(name: str, begin: str = "", end: str = "") -> dict[str, str]:
    parts = re.split(r"^#case (.*)\n", Path(__file__).with_name(name).read_text(), flags=re.MULTILINE)[1:]
    return {case: begin + source + end for case, source in zip(parts[::2], parts[1::2], strict=True)}


GROUPS = {
    "reading": _programs("reading.txt"),
    "reading_unrun": _programs("reading_unrun.txt", _UNRUN, _CALLED),
    "reading_packages": _programs("reading_packages.txt", "from torch import nn\n"),
    "reading_limits": _programs("reading_limits.txt", "from torch import nn\n"),
}
"""The programs' source by their names, file by file."""


def load(text: str, folder: Path, device: torch.device) -> ModuleType:
    """Write a program's files into a folder, which is to be imported from, as is its ``site-packages``; and import it."""
    source, *others = re.split(r"^#file (.*)\n", text, flags=re.MULTILINE)
    files = {f"site-packages/{name}": content for name, content in _PACKAGE.items()}
    files.update(zip(others[::2], others[1::2], strict=True))
    files["case_of_the_test.py"] = f"import torch, sys\nDEVICE = torch.device({str(device)!r})\n{source}"
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    importlib.invalidate_caches()
    return importlib.import_module("case_of_the_test")


def function_of(program: ModuleType) -> Callable[[torch.Tensor], torch.Tensor]:
    return program.get_f() if hasattr(program, "get_f") else program.f


def counts(program: ModuleType) -> bool:
    """Whether it changes something itself."""
    return hasattr(program, "count")
