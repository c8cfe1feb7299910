"""Run many random programs, and write down what was found.

    python -m tests.simulation.run --seconds 600 --seed 1 --jobs 2 --out benchmarks/results/simulation.json

Program number i of a seed is always the same one (`--first` shares the work out, `--one` runs a single one). Programs run in
processes of their own: one that dies or hangs is named, and the others go on. What is written to a file is added to what it
says. Exits with 1 if a program failed.
"""

from __future__ import annotations

import argparse
import gc
import json
import pathlib
import platform
import random
import select
import subprocess
import sys
import time
from typing import Any

import torch

import phonograph as pg
from tests.simulation.check import check, shrunk
from tests.simulation.grammar import Program, draw

HANGS = 120.0  # seconds without a word
SHRINKING = 90.0
COUNTS = ("programs", "recorded", "replayed", "with replays", "failed")


def main() -> int:
    options = _options()
    if options.one is not None:
        return _one(options)
    if options.child:
        return _child(options)
    found = _parent(options)
    if options.out:
        _add(pathlib.Path(options.out), found)
    print(f"seed {options.seed}: " + ", ".join(f"{found[name]} {name}" for name in COUNTS))
    return bool(found["failed"])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.run", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="after which no program begins (default: %(default)s)")
    parser.add_argument("--seed", default="0", help="any text (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first program")
    parser.add_argument("--one", type=int, help="only this program")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--out", help="where to write the report, as JSON")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def drawn(seed: str, i: int) -> Program:
    return draw(random.Random(f"{seed}-{i}").choice)


# ---------------------------------------------------------------------------------------------------
# In a process of its own


def _child(options: argparse.Namespace) -> int:
    """A line of JSON when a program begins, and one when it has ended."""
    torch.set_num_threads(1)
    until, i, device = time.monotonic() + options.seconds, options.first, torch.device(options.device)
    while time.monotonic() < until:
        _say({"begins": i})
        _say({"ended": i, **_outcome(drawn(options.seed, i), device)})
        if i - options.first == 3 * options.jobs:
            gc.collect()
            gc.freeze()  # what is imported need not be walked through again
        if i % 20 < options.jobs:
            gc.collect()
        i += options.jobs
    return 0


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def _outcome(program: Program, device: torch.device) -> dict[str, Any]:
    try:
        ran = check(program, device)
    except Exception as error:
        smallest = _smallest(program, device, type(error))
        return {"error": f"{type(error).__name__}: {error}", "smallest": str(smallest)}
    return {"recorded": ran.recorded, "replayed": ran.replayed}


def _smallest(program: Program, device: torch.device, kind: type[Exception]) -> Program:
    until = time.monotonic() + SHRINKING

    def fails(candidate: Program) -> bool:
        if time.monotonic() > until:
            return False
        _say({"begins": -1})
        try:
            check(candidate, device)
        except kind:
            return True
        except Exception:
            return False
        return False

    return shrunk(program, fails)


def _one(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    program = drawn(options.seed, options.one)
    print(program)
    outcome = _outcome(program, torch.device(options.device))
    for name, value in outcome.items():
        print(f"{name}: {value}")
    return "error" in outcome


# ---------------------------------------------------------------------------------------------------
# All of them


def _parent(options: argparse.Namespace) -> dict[str, Any]:
    until, found = time.monotonic() + options.seconds, dict[str, Any](dict.fromkeys(COUNTS, 0), failures=[])
    jobs = [_Job(options, options.first + i, until) for i in range(options.jobs)]
    while live := [job for job in jobs if job.process is not None]:
        select.select([job.process.stdout for job in live if job.process is not None], [], [], 1.0)
        for job in live:
            for outcome in job.heard():
                _count(found, outcome)
    versions = {"phonograph": pg.__version__, "torch": torch.__version__, "python": platform.python_version()}
    command = f"python -m tests.simulation.run --seed {options.seed} --first {options.first} --seconds {options.seconds:g}"
    known = {"seed": options.seed, "first": options.first, "device": options.device, "command": command, "versions": versions}
    return known | found


def _count(found: dict[str, Any], outcome: dict[str, Any]) -> None:
    found["programs"] += 1
    found["recorded"] += outcome.get("recorded", 0)
    found["replayed"] += outcome.get("replayed", 0)
    found["with replays"] += outcome.get("replayed", 0) > 0
    if "error" in outcome:
        found["failed"] += 1
        found["failures"].append({name: outcome[name] for name in ("ended", "error", "smallest") if name in outcome})
        said = f"program {outcome['ended']} failed: {outcome['error']}\n{outcome.get('smallest', '')}"
        print(said, file=sys.stderr, flush=True)


class _Job:
    """A process that runs programs, and is started again after one that it does not survive."""

    def __init__(self, options: argparse.Namespace, first: int, until: float) -> None:
        self._options, self._until, self._at = options, until, first
        self.process: subprocess.Popen[str] | None = None
        self._start(first)

    def _start(self, first: int) -> None:
        left = self._until - time.monotonic()
        if left <= 0:
            self.process = None
            return
        given = self._options
        command = [sys.executable, "-m", "tests.simulation.run", "--child", "--seconds", str(left),
        "--seed", given.seed, "--first",
                   str(first), "--jobs", str(given.jobs), "--device", given.device]  # fmt: skip
        self.process, self._word = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1), time.monotonic()

    def heard(self) -> list[dict[str, Any]]:
        """What has ended since."""
        assert self.process is not None
        assert self.process.stdout is not None
        if select.select([self.process.stdout], [], [], 0)[0]:
            line = self.process.stdout.readline()
            if not line:
                return self._gone(self.process.wait())
            self._word = time.monotonic()
            return self._of(line)
        if time.monotonic() - self._word > HANGS:
            self.process.kill()
            self.process.wait()
            return self._gone(None)
        return []

    def _of(self, line: str) -> list[dict[str, Any]]:
        said = json.loads(line) if line.startswith("{") else {}
        if said.get("begins", -1) >= 0:
            self._at = said["begins"]
        return [said] if "ended" in said else []

    def _gone(self, status: int | None) -> list[dict[str, Any]]:
        if status == 0:
            self.process = None
            return []
        at = self._at
        self._start(at + self._options.jobs)
        return [{"ended": at, "error": "hangs" if status is None else f"the process ends with {status}",
                 "smallest": str(drawn(self._options.seed, at))}]  # fmt: skip


def _add(path: pathlib.Path, found: dict[str, Any]) -> None:
    runs = [*(json.loads(path.read_text())["runs"] if path.exists() else []), found]
    totals = {name: sum(run[name] for run in runs) for name in COUNTS}
    path.write_text(json.dumps({**totals, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
