"""What the command says where torch is missing, too old, or broken: nothing else of phonograph can be imported then."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from phonograph.cli import tested
from phonograph.cli.console import table
from phonograph.version import __version__

__all__ = ["run"]


def run(arguments: Sequence[str], error: Exception) -> int:
    """The exit status of a command whose import has failed: ``doctor`` finds that (1), all others cannot run (2).

    Raises:
        Exception: `error`, where this torch should do.
    """
    found = _torch()
    usable, _ = tested.compared(found) if found else (False, "")
    doctor = [*arguments][:1] == ["doctor"]
    if usable and not doctor:
        raise error
    meaning = _meaning(found, usable, error)
    if not doctor:
        print(f"phonograph: {meaning}", file=sys.stderr)
        return 2
    rows = [("phonograph", "ok", __version__, ""), ("Python", "ok", platform.python_version(), ""),
            ("torch", "problem", found or "missing", meaning)]  # fmt: skip
    if "--json" in arguments:
        findings = [dict(zip(("what", "status", "value", "meaning"), row, strict=True)) for row in rows]
        print(json.dumps({"works": False, "torch_tested": tested.RELEASES, "findings": findings}))
    else:
        said = [(what, status, f"{value}: {meaning}" if meaning else value) for what, status, value, meaning in rows]
        table("phonograph doctor", ("what", "", "here, and what it means for recording"), said)
        print("recording does NOT work here")
    return 1


def _torch() -> str | None:
    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def _meaning(found: str | None, usable: bool, error: Exception) -> str:
    if found is None:
        return f"torch is not installed: pip install 'torch>={tested.RELEASES[0]}' (pytorch.org has the line for your GPU)"
    if usable:
        return f"torch {found} is here, and cannot be imported ({type(error).__name__}: {error})"
    return tested.compared(found)[1]
