"""Builds the helper in C, `src/phonograph/_torch/_native.c`, where there is a compiler; without it all works in Python alone.

    python build_native.py      in its place, for this Python: for whoever runs from ./src

Wheels are made by hatchling (`pyproject.toml`), and have it if it could be built. `PHONOGRAPH_BUILD_NATIVE=0` leaves it out,
and with `PHONOGRAPH_BUILD_NATIVE=1` a wheel without it is an error.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a script
    BuildHookInterface = object  # type: ignore[assignment,misc]

_SOURCE = Path(__file__).resolve().parent / "src/phonograph/_torch/_native.c"
_NAME = f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"


def wanted() -> bool:
    """Whether it is of use: where threads run without Python's lock, another could change a tensor while it is looked at."""
    free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    here = sys.implementation.name == "cpython" and sys.platform == "linux" and not free_threaded
    return here and os.environ.get("PHONOGRAPH_BUILD_NATIVE") != "0"


def compiled(into: Path) -> Path:
    """Compile it into a folder.

    Raises:
        OSError, subprocess.CalledProcessError: there is no compiler, or it cannot.
    """
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    headers = dict.fromkeys([sysconfig.get_path("include"), sysconfig.get_path("platinclude")])
    made = into / _NAME
    unfinished = made.with_suffix(f".{os.getpid()}")  # another process may be using what is there
    includes = [f"-I{folder}" for folder in headers]
    subprocess.run([*compiler, "-O2", "-fPIC", "-shared", "-std=gnu11", *includes, str(_SOURCE), "-o", str(unfinished)],
                   check=True, capture_output=True, text=True)  # fmt: skip
    return unfinished.replace(made)


class Hook(BuildHookInterface):  # type: ignore[misc,valid-type]
    """Puts it into a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or not wanted():
            return
        editable = version == "editable"
        try:
            made = compiled(_SOURCE.parent if editable else Path(tempfile.mkdtemp()))
        except (OSError, subprocess.CalledProcessError) as e:
            if os.environ.get("PHONOGRAPH_BUILD_NATIVE") == "1":
                raise
            print(f"phonograph is built without its helper in C: {getattr(e, 'stderr', '') or e}", file=sys.stderr)
            return
        if not editable:
            build_data["force_include"][str(made)] = f"phonograph/_torch/{_NAME}"
            build_data["pure_python"], build_data["infer_tag"] = False, True


if __name__ == "__main__":
    print(compiled(_SOURCE.parent) if wanted() else "not for this Python")
