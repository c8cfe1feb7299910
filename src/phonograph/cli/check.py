"""Run a script for its first steps, find what is worth recording in it or is recorded already, and say what stands in the way.

The script runs unchanged, as its own main program; it is stopped when enough calls were seen. What it does until then, it does.
Its own arguments come after --. Exit status 0: all that was found is recorded whole; 1: something stands in the way, and runs
live; 2: the script failed, or nothing was found. With --fix, a patch for `git apply` is all that goes to stdout.
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

from phonograph.cli.candidates import Candidate, Enough, Search, plainly
from phonograph.cli.console import CannotRun
from phonograph.cli.patches import diff
from phonograph.python.origin import belongs_to_user

_SHOWN = 12  # names of functions

HELP = "say what in a script would be recorded, and all that stands in the way"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", help="a Python file; its own arguments follow after --")
    parser.add_argument("--fn", metavar="NAME", help="check this function (train_step, Trainer.step) instead of searching")
    parser.add_argument("--fix", action="store_true", help="print a patch that records what was measured faster")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(arguments: argparse.Namespace) -> int:
    script = Path(arguments.script)
    if not script.is_file():
        raise CannotRun(f"there is no file {script}")
    search = Search(str(script.resolve().parent), arguments.fn)
    alone = arguments.json or arguments.fix
    told = contextlib.redirect_stdout(sys.stderr) if alone else contextlib.nullcontext()
    with told:
        failed = _run(script, arguments.rest, search)
    found = search.found()
    if not found and not failed:
        raise CannotRun(f"{script} was run, and {_nothing(arguments.fn, list(search.others))}")
    status = 2 if failed or not found else max(one.findings.status for one in found)
    if arguments.json:
        print(json.dumps(_as_json(script, found, status)))
    else:
        print(_text(script, found, search.seconds), file=sys.stderr if arguments.fix else None)
    if arguments.fix:
        print(_patch(found), end="")
    return status


def _nothing(wanted: str | None, others: Sequence[str]) -> str:
    if wanted is None:
        return "no function, module or optimizer that repeats was seen at work"
    there = f"; there were {', '.join(others[:_SHOWN])}" if others else ""
    return f"no function named {wanted} was seen at work{there}"


def _patch(found: Sequence[Candidate]) -> str:
    """Lines for all that was measured faster: with cuts, where it is so with cuts."""
    faster = [one for one in found if one.findings.pays and not one.recorded]
    patch, left = diff((one.place, "" if one.findings.records else 'fallback="split"') for one in faster)
    for place in left:
        print(f"no line is certain for {place.name}: it is made at none or several places of {place.file}", file=sys.stderr)
    if not faster:
        print("nothing to patch: nothing that is not recorded yet was measured faster", file=sys.stderr)
    return patch


def _run(script: Path, rest: Sequence[str], search: Search) -> bool:
    """Run the script; whether it failed."""
    belongs_to_user(str(script.resolve()))
    with _as_main(script, rest):
        try:
            with plainly(), search:
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
            "found": [{"patch": one.patch if _offered(one) else "", "recorded": one.recorded, "share": one.share,
                       **one.findings.as_dict()} for one in found]}  # fmt: skip


def _offered(one: Candidate) -> bool:
    return one.worth and not one.recorded


def _text(script: Path, found: Sequence[Candidate], seconds: float) -> str:
    already, new = [one for one in found if one.recorded], [one for one in found if _offered(one)]
    counted = [f"{len(new)} thing{'s' * (len(new) != 1)} worth recording"] if new or not already else []
    counted += [f"{len(already)} recorded already"] if already else []
    lines = [f"{os.path.relpath(script)}: {', '.join(counted)}, after {seconds:.1f} s"]
    for one in found:
        lines += ["", f"{one.share:.0%} of the time of its steps is spent in {one.findings}", "", f"    {_next(one)}"]
    return "\n".join(lines)


def _next(one: Candidate) -> str:
    """What to do."""
    if one.recorded:
        return f"recorded already{'' if one.findings.records else ': mend what is said above'}"
    return f"patch: {one.patch}" if one.worth else "no patch: it would be slower here"
