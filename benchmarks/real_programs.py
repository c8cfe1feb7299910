"""Twenty and more programs as people write them (`real/`), plain, with one line of phonograph, and with their usual rival.

    python benchmarks/real_programs.py                                  # all of them
    python benchmarks/real_programs.py --only ppo nanogpt --device cpu --quick

Each program runs in a process of its own, with a time limit; what goes wrong there is its row. It has two passes:

1.  Deterministic algorithms; plain, and with phonograph, each from the same seeds. What every step gave, and what lives on at
    the end (weights, buffers, optimizer state), is compared by its bits. Calls, replays, recordings and reasons are of it.

2.  As people run it: fresh programs, the rival's too (if it is ready in time), all at once, taking turns. A speed is the
    median over the turns of plain's time over the variant's in the same turn. Calls and replays within the measured turns are
    the share that was played. While a program measures no other one runs: they wait for a lock, which is no time of theirs.

A rival that is not ready in time takes its process with it: what has been interrupted while it compiles may leave anything
behind. The second pass is then done without it.
"""

from __future__ import annotations

import argparse
import faulthandler
import fcntl
import gc
import importlib
import itertools
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import harness
import phonograph as pg
from real import PROGRAMS

CLAIM = "real"
MOSTLY, LEAST, ENOUGH, ABOVE = 0.5, 0.98, 17, 15
TARGET = (
    f"all equal to plain; at least {ENOUGH} mostly recorded; none below {LEAST} x plain; above the rival in at least {ABOVE}"
)
PLAIN, OURS = "plain", "phonograph"
Running = dict[str, Iterator[Any]]
TURNS, SECONDS = 7, 4  # at most, and about; three turns in any case
PATIENCE = 45  # seconds in which a rival must be ready


# ---- one program -----------------------------------------------------------------------------------


class Recording:
    """`pg.record`, keeping what it made."""

    def __init__(self, keep: str) -> None:
        self.made: list[Any] = []
        self._keep = keep

    def __call__(self, function: Any, **options: Any) -> Any:
        self.made.append(pg.record(function, **{"keep": self._keep, **options}))
        return self.made[-1]

    def stats(self) -> list[pg.Stats]:
        return [pg.stats(each) for each in self.made]

    def calls(self) -> int:
        return sum(stats.calls for stats in self.stats())

    def replayed(self) -> int:
        return sum(stats.replayed for stats in self.stats())


@dataclass
class Variant:
    """One way to run a program: what stands at its one line, and further arguments."""

    record: Callable[[Any], Any]
    options: dict[str, Any]

    def start(self, program: ModuleType, device: str) -> Iterator[Any]:
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        running: Iterator[Any] = program.run(device, self.record, **self.options)
        return running


def unchanged(function: Any, **_: Any) -> Any:
    return function


def first_steps(variant: Variant, program: ModuleType, device: str, count: int) -> tuple[list[Tensor], float]:
    """Everything that the first steps gave, and what lives on then; and how many seconds they took."""
    running = variant.start(program, device)
    lives_on = next(running)
    begin, given = time.perf_counter(), []
    for step in itertools.islice(running, count):
        given.extend(copies(step))
    harness.synchronize()
    seconds = time.perf_counter() - begin
    given.extend(copies(lives_on))
    return given, seconds


def copies(things: object) -> list[Tensor]:
    """The tensors and numbers in these things, as tensors of their own on the host."""
    found = []
    for leaf in tree_leaves(things):
        if isinstance(leaf, (nn.Module, torch.optim.Optimizer)):
            found.extend(copies(leaf.state_dict()))
        elif isinstance(leaf, Tensor):
            found.append(leaf.detach().to("cpu", copy=True))
        elif isinstance(leaf, (bool, int, float, np.ndarray, np.generic)):
            found.append(torch.as_tensor(leaf))
        elif leaf is not None and not isinstance(leaf, str):
            raise TypeError(f"a program yields {type(leaf).__name__}, which nothing here compares")
    return found


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    """By the bits."""
    return len(some) == len(others) and all(
        a.shape == b.shape and a.dtype == b.dtype and bits(a).equal(bits(b)) for a, b in zip(some, others, strict=True)
    )


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8) if tensor.numel() else tensor


def compare(program: ModuleType, variants: dict[str, Variant], device: str, row: dict[str, Any], count: int) -> None:
    """The first pass: right or not, and what was recorded."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    plain, row["seconds"][PLAIN] = first_steps(variants[PLAIN], program, device, count)
    results: dict[str, list[Tensor]] = {}
    for name in [name for name in variants if name != PLAIN]:
        with noting(row, name):
            results[name], row["seconds"][name] = first_steps(variants[name], program, device, count)
            row["equal"][name] = equal(plain, results[name])
            if name == OURS:
                made = variants[OURS].record
                stats = made.stats()
                row |= {"calls": made.calls(), "replayed": made.replayed(), "recorded": sum(each.recorded for each in stats)}
                reasons: Counter[str] = Counter()
                for each in stats:
                    reasons.update(each.refusals)
                row["reasons"] = dict(reasons)
    if not all(row["equal"].values()):
        # The order in which autograd adds up gradients may depend on what ran before: its nodes go by counters of the threads
        # that make them, two with `create_graph` on an accelerator. In a second run these are far apart, as they are in ours.
        again, _ = first_steps(variants[PLAIN], program, device, count)
        row["plain repeats itself"] = equal(plain, again)
        row["equal"] |= {name: equal(again, found) for name, found in results.items() if not row["equal"][name]}
    torch.use_deterministic_algorithms(False)


def start_all(program: ModuleType, variants: dict[str, Variant], row: dict[str, Any], arguments: argparse.Namespace) -> Running:
    """Fresh programs, past the steps in which things are recorded and compiled."""
    running: Running = {}
    for name, variant in variants.items():
        is_rival = name not in (PLAIN, OURS)
        with noting(row, name), begun(row, name, arguments) if is_rival else nullcontext():
            steps = variant.start(program, arguments.device)
            for _ in itertools.islice(steps, 1 + max(program.STEPS, program.ROUND)):
                pass
            running[name] = steps
    harness.synchronize()
    gc.collect()
    return running


@contextmanager
def begun(row: dict[str, Any], rival: str, arguments: argparse.Namespace) -> Iterator[None]:
    """It is said in the row that this rival has begun, as long as it is not ready: if it never is, this process ends."""
    arguments.row.write_text(json.dumps(row | {"begun": rival}))
    try:
        with arguments.clock.working(PATIENCE):
            yield
    finally:
        arguments.row.write_text(json.dumps(row))


def measure(program: ModuleType, running: Running, made: Recording, row: dict[str, Any], turns: int) -> None:
    """The second pass: how fast. A first turn, in which the variants get used to each other, is not counted."""
    times: dict[str, list[float]] = {name: [] for name in running}
    before = made.calls(), made.replayed()
    begin_of_all = time.perf_counter()
    for turn in itertools.count():
        if turn == 1:
            before = made.calls(), made.replayed()
            turns = min(turns, max(3, int(SECONDS / (time.perf_counter() - begin_of_all))))
        if turn > turns:
            break
        for name, steps in running.items():
            if name in row["errors"]:
                continue
            with noting(row, name):
                begin = time.perf_counter()
                for _ in itertools.islice(steps, program.ROUND):
                    pass
                harness.synchronize()
                times[name].append((time.perf_counter() - begin) / program.ROUND)
    for name in [name for name in running if name not in row["errors"]]:
        row["ms"][name] = statistics.median(times[name][1:]) * 1e3
        if name != PLAIN:
            row["speed"][name] = statistics.median(p / o for p, o in zip(times[PLAIN][1:], times[name][1:], strict=True))
    if OURS in row["ms"] and made.calls() > before[0]:
        row["played"] = (made.replayed() - before[1]) / (made.calls() - before[0])


@contextmanager
def noting(row: dict[str, Any], name: str) -> Iterator[None]:
    """What goes wrong with one variant is noted, and it rests; without plain there is nothing to compare with."""
    try:
        yield
    except Exception as error:
        if name == PLAIN:
            raise
        traceback.print_exc()
        row["errors"][name] = f"{type(error).__name__}: {str(error)[:300]}".replace(f"{Path(__file__).parents[1]}/", "")


class Clock:
    """The seconds that this process may work. When they are over it says where it is and ends, whatever it is in the middle of:
    an exception would be swallowed somewhere in a compiler."""

    def __init__(self, seconds: float) -> None:
        self.left, self._over = seconds, math.inf

    @contextmanager
    def working(self, most: float = math.inf) -> Iterator[None]:
        """Inside the block the seconds count; it takes no more than `most` of them."""
        begin, outer = time.monotonic(), self._over
        self._ends_at(min(begin + most, begin + self.left if outer == math.inf else outer))
        try:
            yield
        finally:
            if outer == math.inf:
                self.left -= time.monotonic() - begin
            self._ends_at(outer)

    def _ends_at(self, over: float) -> None:
        self._over = over
        if over == math.inf:
            faulthandler.cancel_dump_traceback_later()
        else:
            faulthandler.dump_traceback_later(max(over - time.monotonic(), 0.1), exit=True)


@contextmanager
def beside_others(folder: Path) -> Iterator[None]:
    """While others do as much, and nobody measures. Whoever waits to do so goes first."""
    with ExitStack() as works:
        with held(folder / "measures", fcntl.LOCK_EX):
            works.enter_context(held(folder / "works", fcntl.LOCK_SH))
        yield


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    with held(folder / "measures", fcntl.LOCK_SH), held(folder / "works", fcntl.LOCK_EX):
        yield


@contextmanager
def held(lock: Path, how: int) -> Iterator[None]:
    with lock.open("a") as file:
        fcntl.flock(file, how)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a child that was forked may have the file for longer


def variants_of(program: ModuleType, arguments: argparse.Namespace) -> dict[str, Variant]:
    variants = {PLAIN: Variant(unchanged, {}), OURS: Variant(Recording(arguments.keep), {})}
    if arguments.device != "cpu" and not arguments.quick:
        rival, wrap, options = program.RIVAL
        variants[rival] = Variant(wrap, options)
    return variants


def work(name: str, arguments: argparse.Namespace) -> None:
    """One program, in this process; its row is written after each pass. Where there is one, the first pass has been done."""
    program = importlib.import_module(f"real.{name}")
    row: dict[str, Any] = {"program": name, "title": PROGRAMS[name], "rival": program.RIVAL[0]}
    row |= {kind: {} for kind in ("seconds", "equal", "ms", "speed", "errors", "reasons")}
    done = arguments.row.exists()
    row = json.loads(arguments.row.read_text()) if done else row
    clock = arguments.clock = Clock(arguments.limit)
    with beside_others(arguments.folder), clock.working():
        if not done:
            count = math.ceil(program.STEPS / 2) if arguments.quick else program.STEPS
            both = {name: variant for name, variant in variants_of(program, arguments).items() if name in (PLAIN, OURS)}
            compare(program, both, arguments.device, row, count)
            arguments.row.write_text(json.dumps(row))
            gc.collect()
        variants = {name: variant for name, variant in variants_of(program, arguments).items() if name not in row["errors"]}
        running = start_all(program, variants, row, arguments) if not arguments.no_times else {}
    if running:
        with alone(arguments.folder), clock.working():
            measure(program, running, variants[OURS].record, row, 3 if arguments.quick else TURNS)
    arguments.row.write_text(json.dumps(row))
    # What is still running is not ended one by one: the process is.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


# ---- all programs ----------------------------------------------------------------------------------


def run_one(name: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One program in a process of its own; a row in any case."""
    row_file, log = folder / f"{name}.json", folder / f"{name}.log"
    row: dict[str, Any] = {"program": name, "title": PROGRAMS[name]}
    for _ in range(2):
        status = run_process(name, arguments, folder, row_file, log)
        row = json.loads(row_file.read_text()) if row_file.exists() else row
        rival = row.pop("begun", None)
        if status == 0 or rival is None:
            break
        row["errors"][rival] = f"not ready after {PATIENCE} s, or ended its process (exit status {status})"
        row_file.write_text(json.dumps(row))
    if status != 0:
        row["error"] = f"exit status {status}: {log.read_text(errors='replace')[-400:]}"
    if arguments.logs:
        arguments.logs.mkdir(parents=True, exist_ok=True)
        (arguments.logs / log.name).write_text(log.read_text(errors="replace"))
    print(line_of(row), flush=True)
    return row


def run_process(name: str, arguments: argparse.Namespace, folder: Path, row_file: Path, log: Path) -> int:
    """Its exit status. It ends itself when its time is over: waiting for others is none of that, so that nobody here knows."""
    command = [sys.executable, __file__, "--program", name, "--row", str(row_file), "--folder", str(folder)]
    command += ["--device", arguments.device, "--keep", arguments.keep, "--limit", str(arguments.limit)]
    command += [option for option in ("--quick", "--no-times") if getattr(arguments, option.strip("-").replace("-", "_"))]
    with log.open("a") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and whoever else it has started
            process.wait()


def line_of(row: dict[str, Any]) -> str:
    if "equal" not in row:
        return f"{row['program']:14s} {row['error'][-200:]}"
    same = row["equal"].get(OURS)
    right = {True: "equal", False: "DIFFERS" if row.get("plain repeats itself", True) else "as plain", None: "-"}[same]
    cells = [f"{row['program']:14s} {right:8s}"]
    cells.append("{:5d}/{:<5d} rec {:<3d}".format(*[row.get(name, 0) for name in ("replayed", "calls", "recorded")]))
    cells.append(f"played {row['played']:4.0%}" if "played" in row else " " * 11)
    cells.append(f"plain {row['ms'][PLAIN]:8.2f} ms" if PLAIN in row["ms"] else "")
    cells += [f"{name} x {speed:.2f}" for name, speed in row["speed"].items()]
    cells += [f"{name}: {error[:120]}" for name, error in row["errors"].items()]
    cells += [f"\n      {count} live: {reason}" for reason, count in row["reasons"].items()]
    return "  ".join(cells) + (f"\n      {row['error'][-300:]}" if row.get("error") else "")


def judge(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many reach each target, and the names of those that do not."""
    ours = {row["program"]: row.get("speed", {}).get(OURS, 0.0) for row in rows}
    rivals = {row["program"]: row.get("speed", {}).get(row.get("rival"), 0.0) for row in rows}
    unequal = [row["program"] for row in rows if not right(row)]
    recorded = [row["program"] for row in rows if row.get("played", 0.0) > MOSTLY]
    return {
        "unequal": unequal,
        "mostly recorded": len(recorded),
        "not mostly recorded": [row["program"] for row in rows if row["program"] not in recorded],
        f"below {LEAST}": {name: round(speed, 3) for name, speed in ours.items() if speed < LEAST},
        "above the rival": sum(speed > rivals[name] for name, speed in ours.items()),
        "not above the rival": [name for name, speed in ours.items() if speed <= rivals[name]],
    }


def right(row: dict[str, Any]) -> bool:
    """Equal to plain; where plain differs from itself, nobody can say."""
    return row.get("equal", {}).get(OURS, False) or not row.get("plain repeats itself", True)


def finish(rows: list[dict[str, Any]], arguments: argparse.Namespace, seconds: float) -> int:
    rows.sort(key=lambda row: [*PROGRAMS].index(row["program"]))
    figures = judge(rows)
    report = harness.Report(CLAIM, TARGET, arguments)
    whole = len(rows) == len(PROGRAMS) and arguments.device != "cpu" and not arguments.quick and not arguments.no_times
    if whole:
        report.met = (
            not figures["unequal"] and figures["mostly recorded"] >= ENOUGH and not figures[f"below {LEAST}"]
            and figures["above the rival"] >= ABOVE
        )  # fmt: skip
    print("\n" + "\n".join(map(line_of, rows)))
    print(json.dumps(figures, indent=1))
    written = report.as_json() | {"rows": rows, "figures": figures, "seconds": round(seconds)}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"{CLAIM}.json").write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n")
    return {None: 3 if whole else 0, True: 0, False: 1}[report.met]


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--only", choices=PROGRAMS, nargs="+", default=[*PROGRAMS], metavar="NAME", help="these programs")
    parser.add_argument("--limit", type=float, default=120, help="seconds a program may take (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=None, help="programs at a time, of which one measures (default: 6; cpu: 1)")
    parser.add_argument("--no-times", action="store_true", help="only the first pass")
    parser.add_argument("--keep", choices=("pays", "always"), default="pays", help="of what is recorded (default: %(default)s)")
    parser.add_argument("--logs", type=Path, help="folder for what the programs print")
    parser.add_argument("--program", choices=PROGRAMS, help=argparse.SUPPRESS)
    parser.add_argument("--row", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.program:
        work(arguments.program, arguments)
    begin = time.monotonic()
    at_once = arguments.jobs or (1 if arguments.device == "cpu" else 6)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(at_once) as jobs:
        rows = list(jobs.map(lambda name: run_one(name, arguments, Path(folder)), arguments.only))
    return finish(rows, arguments, time.monotonic() - begin)


if __name__ == "__main__":
    raise SystemExit(main())
