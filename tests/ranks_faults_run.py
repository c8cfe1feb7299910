"""Draw trouble on one of two ranks, many times, and write down what was found (see `ranks_faults`).

    python -m tests.ranks_faults_run --seed 1 --trials 200 --out benchmarks/results/ranks_faults.json

Trial number i of a seed is always the same one (`--first`, `--one`). Two processes go through all trials; where one hangs or
dies, both are started again with the next. Exits with 1 if a trial failed.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import platform
import random
import sys
import tempfile
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import phonograph as pg
from tests import forked
from tests.ranks_faults import MORE, TIMEOUT, Ranks, Trial, draw, run, warm


def trial_of(seed: str, i: int) -> Trial:
    return draw(random.Random(f"{seed}-{i}"))


def main() -> int:
    options = _options()
    if options.rank is not None:
        return _rank(options)
    found = search(options.seed, options.first, options.trials, options.seconds)
    if options.out:
        pathlib.Path(options.out).write_text(json.dumps(found, indent=1) + "\n")
    print(f"seed {options.seed}: {found['trials']} trials, {found['failed']} failed, {found['hangs']} hung")
    return bool(found["failed"])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.ranks_faults_run", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", default="0", help="any text (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first trial")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=3600, help="after which no trial begins")
    parser.add_argument("--out", help="where to write the report, as JSON")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


# -- one rank


def _rank(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    folder, rank = pathlib.Path(options.folder), options.rank
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    ranks = Ranks(dist.FileStore(str(folder / "meetings"), 2))
    ranks.store.set_timeout(timedelta(seconds=120))
    until = time.monotonic() + options.seconds
    warm(ranks)
    with (folder / f"{rank}.told").open("a") as told:
        for i in range(options.first, options.first + options.trials):
            ranks.meet()
            if ranks.tell("late", str(time.monotonic() > until)) == "True" or time.monotonic() > until:
                break
            _say(told, {"begins": i})
            trial = trial_of(options.seed, i)
            try:
                said = run(trial, ranks)
            except Exception as e:
                _say(told, {"ended": i, "wrong": [f"the test itself: {type(e).__name__}: {e}"]})
                raise
            _say(told, {"ended": i, **said})
    os._exit(0)  # a group that was broken off may not end


def _say(file: Any, what: dict[str, Any]) -> None:
    file.write(json.dumps(what) + "\n")
    file.flush()


# -- both


def search(seed: str, first: int, trials: int, seconds: float) -> dict[str, Any]:
    """Run trials of a seed. Returns the report."""
    until, at, ended = time.monotonic() + seconds, first, dict[int, list[dict[str, Any]]]()
    broken: dict[int, str] = {}
    while at < first + trials and time.monotonic() < until:
        said, log = _pair(seed, at, first + trials - at, until - time.monotonic())
        for i, each in said.items():
            ended[i] = each
        reached = max([at - 1, *(i for i, each in said.items() if len(each) == 2)]) + 1
        if reached < first + trials and time.monotonic() < until:
            broken[reached] = log
            reached += 1
        at = reached
    return _report(seed, first, ended, broken)


def _pair(seed: str, first: int, trials: int, seconds: float) -> tuple[dict[int, list[dict[str, Any]]], str]:
    with tempfile.TemporaryDirectory(prefix="phonograph-ranks-") as name:
        folder = pathlib.Path(name)
        processes = [_start(rank, folder, seed, first, trials, seconds) for rank in range(2)]
        statuses = list[int]()
        for process in processes:
            try:
                statuses.append(process.wait(max(5.0, seconds + 120) if not statuses or statuses[0] == 0 else 30))
            except TimeoutError:
                process.kill()
                statuses.append(process.wait(60))
        said: dict[int, list[dict[str, Any]]] = {}
        for rank in range(2):
            for line in (folder / f"{rank}.told").read_text().splitlines() if (folder / f"{rank}.told").exists() else ():
                if "ended" in (what := json.loads(line)):
                    said.setdefault(what["ended"], []).append(what)
        logs = [(folder / f"{rank}.log").read_text()[-2500:] for rank in range(2)]
        log = "\n".join(f"rank {rank} ended with {statuses[rank]}: {logs[rank]}" for rank in range(2))
    return said, log


def _start(rank: int, folder: pathlib.Path, seed: str, first: int, trials: int, seconds: float) -> forked.Started:
    arguments = {"rank": rank, "folder": folder, "seed": seed, "first": first, "trials": trials, "seconds": max(seconds, 1.0)}
    given, log = [text for name, value in arguments.items() for text in (f"--{name}", str(value))], folder / f"{rank}.log"
    environment = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return forked.start(forked.Module("tests.ranks_faults_run"), *given, stdout=log, stderr=log, env=environment)


def _report(seed: str, first: int, ended: dict[int, list[dict[str, Any]]], broken: dict[int, str]) -> dict[str, Any]:
    failures = [{"trial": i, "what": str(trial_of(seed, i)), "wrong": [told["wrong"] for told in each]}
                for i, each in sorted(ended.items()) if any(told["wrong"] for told in each)]  # fmt: skip
    failures += [{"trial": i, "what": str(trial_of(seed, i)), "wrong": log} for i, log in sorted(broken.items())]
    events = collections.Counter(trial_of(seed, i).event for i in {*ended, *broken})
    versions = {"phonograph": pg.__version__, "torch": torch.__version__, "python": platform.python_version()}
    told = [each for both in ended.values() for each in both]
    return {
        "command": f"python -m tests.ranks_faults_run --seed {seed} --first {first} --trials {len({*ended, *broken})}",
        "versions": versions, "timeout": TIMEOUT, "hangs after": TIMEOUT + MORE, "trials": len({*ended, *broken}),
        "failed": len({f["trial"] for f in failures}), "hangs": len(broken), "events": dict(sorted(events.items())),
        "replayed": sum(each.get("replayed", 0) for each in told), "recorded": sum(each.get("recorded", 0) for each in told),
        "failures": failures,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
