"""Run a script for its first steps, find what is worth recording in it, and say all that stands in the way.

The script runs unchanged, as its own main program; it is stopped when enough calls were seen. What it does until then, it does.
Its own arguments come after --. Exit status 0: all that was found is recorded whole; 1: something stands in the way; 2: the
script failed, or nothing was found.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from phonograph.cli.candidates import Candidate, Enough, Search
from phonograph.cli.console import CannotRun
from phonograph.python.origin import belongs_to_user

HELP = "say what in a script would be recorded, and all that stands in the way"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", help="a Python file; its own arguments follow after --")
    parser.add_argument("--fn", metavar="NAME", help="check this function (train_step, Trainer.step) instead of searching")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(arguments: argparse.Namespace) -> int:
    script = Path(arguments.script)
    if not script.is_file():
        raise CannotRun(f"there is no file {script}")
    search = Search(str(script.resolve().parent), arguments.fn)
    told = contextlib.redirect_stdout(sys.stderr) if arguments.json else contextlib.nullcontext()
    with told:
        failed = _run(script, arguments.rest, search)
    found = search.found()
    if not found and not failed:
        what = f"function named {arguments.fn}" if arguments.fn else "function, module or optimizer that repeats"
        raise CannotRun(f"{script} was run, and no {what} was seen at work")
    status = 2 if failed or not found else max(one.findings.status for one in found)
    print(json.dumps(_as_json(script, found, status)) if arguments.json else _text(script, found, search.seconds))
    return status


def _run(script: Path, rest: Sequence[str], search: Search) -> bool:
    """Run the script; whether it failed."""
    belongs_to_user(str(script.resolve()))
    with _as_main(script, rest):
        try:
            with search:
                runpy.run_path(str(script.resolve()), run_name="__main__")
        except (Enough, KeyboardInterrupt):
            return False
        except SystemExit as e:
            return e.code not in (None, 0)
        except BaseException:
            traceback.print_exc()
            return True
    return False


@contextlib.contextmanager
def _as_main(script: Path, rest: Sequence[str]) -> Iterator[None]:
    """What a script finds in `sys` that is run by itself."""
    argv, path = sys.argv, sys.path
    sys.argv, sys.path = [str(script), *rest], [str(script.resolve().parent), *path]
    try:
        yield
    finally:
        sys.argv, sys.path = argv, path


def _as_json(script: Path, found: Sequence[Candidate], status: int) -> dict[str, object]:
    return {"script": str(script), "status": status,
            "found": [{"patch": one.patch, "share": one.share, **one.findings.as_dict()} for one in found]}  # fmt: skip


def _text(script: Path, found: Sequence[Candidate], seconds: float) -> str:
    lines = [f"{os.path.relpath(script)}: {len(found)} thing{'s' * (len(found) != 1)} worth recording, after {seconds:.1f} s"]
    for one in found:
        lines += ["", f"{one.share:.0%} of the time of its steps is spent in {one.findings}", "", f"    patch: {one.patch}"]
    return "\n".join(lines)
