"""Inject many faults, and write down what was found.

    python -m tests.faults.run --seconds 600 --seed 1 --out benchmarks/results/faults.json

Fault number i of a seed is always the same one (`--first` shares the work out). Exits with 1 if a trial failed.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import platform
import random
import sys
import time

import torch

import phonograph as pg
from tests.faults.injection import Trial, draw, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.run", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="after which no trial begins (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first trial")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--one", nargs=4, metavar=("PROGRAM", "PHASE", "ERROR", "AT"), help="only this trial")
    parser.add_argument("--out", help="where to write the report, as JSON")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.set_num_threads(1)
    if options.one:
        program, phase, error, at = options.one
        print(run(Trial(program, phase, error, int(at)), device))
        return 0
    until, i, found, places = time.monotonic() + options.seconds, options.first, list[str](), dict[tuple[str, str], int]()
    while time.monotonic() < until:
        trial = draw(random.Random(f"{options.seed}-{i}"), device, places)
        _, said = run(trial, device)
        if said:
            found.append(f"{trial}: {said}")
            print(found[-1], file=sys.stderr, flush=True)
        i += 1
    versions = {"phonograph": pg.__version__, "torch": torch.__version__, "python": platform.python_version()}
    report = {"trials": i - options.first, "seed": options.seed, "first": options.first, "device": options.device,
              "versions": versions, "found": found}  # fmt: skip
    if options.out:
        pathlib.Path(options.out).write_text(json.dumps(report, indent=1) + "\n")
    print(f"{report['trials']} trials, {len(found)} failed")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
