"""Run many random programs and write down what was found.

    python -m tests.fuzz.run --programs 3000 --seed 1 --device cuda --out benchmarks/out/fuzz.json

With `--training` they are training loops around recorded models.

Program number i of seed s is always the same one, so that several processes can share the work (`--first`), and

    python -m tests.fuzz.run --join benchmarks/results/fuzz.json benchmarks/out/fuzz_*.json

makes one report of theirs. Exits with 1 if a program failed.
"""

from __future__ import annotations

import argparse
import gc
import json
import pathlib
import platform
import random
import sys
import time
from typing import Any

import torch

import phonograph as pg
from tests.fuzz import programs, training


def main() -> int:
    options = _options()
    if options.join:
        return _join(*map(pathlib.Path, options.join))
    device = torch.device(options.device)
    started, recorded, replayed = time.perf_counter(), 0, 0
    failures: list[dict[str, Any]] = []
    kind = training if options.training else programs
    torch.set_num_threads(1)
    gc.freeze()  # the collection after each program need not walk through torch
    for i in range(options.first, options.first + options.programs):
        program = kind.make_program(random.Random(f"{options.seed}-{i}").choice)
        try:
            ran = kind.check(program, device)
        except Exception as error:
            failures.append(_failure(kind, i, program, error, device))
            print(f"program {i} failed: {failures[-1]['error']}\n{failures[-1]['smallest']}", file=sys.stderr)
            if len(failures) >= options.max_failures:
                break
        else:
            recorded, replayed = recorded + ran.recorded, replayed + ran.replayed
    report = {
        "programs": i + 1 - options.first,
        "first": options.first,
        "seed": options.seed,
        "recordings": recorded,
        "replays": replayed,
        "failed": len(failures),
        "failures": failures,
        "seconds": round(time.perf_counter() - started, 1),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "versions": {
            "phonograph": pg.__version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        },
    }
    text = json.dumps(report, indent=2)
    if options.out:
        pathlib.Path(options.out).write_text(text + "\n")
    print(text)
    return bool(failures)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=3000, help="how many (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first one, to share them out")
    parser.add_argument("--training", action="store_true", help="training loops around recorded models")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--join", nargs="+", metavar="FILE", help="write to the first file what all others say together")
    parser.add_argument("--max-failures", type=int, default=5, help="stop after so many (default: %(default)s)")
    parser.add_argument("--out", help="where to write the report, as JSON")
    return parser.parse_args()


def _join(into: pathlib.Path, *parts: pathlib.Path) -> int:
    reports = sorted((json.loads(part.read_text()) for part in parts), key=lambda report: report["first"])
    whole = dict(reports[0])
    at = whole["first"]
    for report in reports:
        if (report["first"], report["seed"], report["device"]) != (at, whole["seed"], whole["device"]):
            raise ValueError(f"the programs from {at} on are missing, or of another seed or device")
        at += report["programs"]
    for key in ("programs", "recordings", "replays", "failed", "seconds"):
        whole[key] = round(sum(report[key] for report in reports), 1)
    whole["failures"] = [failure for report in reports for failure in report["failures"]]
    into.write_text(json.dumps(whole, indent=2) + "\n")
    return bool(whole["failures"])


def _failure(kind: Any, i: int, program: Any, error: Exception, device: torch.device) -> dict[str, Any]:
    return {
        "index": i,
        "error": f"{type(error).__name__}: {error}",
        "smallest": repr(kind.shrink(program, lambda p: _fails(kind, p, device))),
        "program": repr(program),
    }


def _fails(kind: Any, program: Any, device: torch.device) -> bool:
    try:
        kind.check(program, device)
    except Exception:
        return True
    return False


if __name__ == "__main__":
    sys.exit(main())
