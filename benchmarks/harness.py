"""What all the benchmarks share: the clock, the graph captured by hand, and the report.

A benchmark compares methods in one process. Their repeats take turns, so that a clock that drifts or a neighbour on the
machine strikes all of them. A number is the median of the repeats:

    wall_us   microseconds a call with the device's work done, `calls` calls in a row
    cpu_us    microseconds a call until Python goes on, the device still working
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phonograph.cli import machine
from phonograph.statistics import totals

# Inductor compiles in this process, and starts none that would be busy with themselves while something is measured.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

RESULTS = Path(__file__).parent / "results"
_TURNS = 12  # at most, before what is measured has to have settled
_SETTLED = 48  # calls at least, after which it is known which recordings pay
COMPILED = ", compiled inside"
REFERENCE = "by hand"  # rows are compared with the row of this name, or of this name and the same ", suffix"

Step = Callable[[], object]


# ---- the clock -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    wall_us: float
    cpu_us: float


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def time_once(step: Step, calls: int) -> Timing:
    synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        step()
    launched = time.perf_counter()
    synchronize()
    done = time.perf_counter()
    return Timing((done - begin) / calls * 1e6, (launched - begin) / calls * 1e6)


def _median(timings: Sequence[Timing]) -> Timing:
    return Timing(
        statistics.median(timing.wall_us for timing in timings), statistics.median(timing.cpu_us for timing in timings)
    )


# ---- the reference -------------------------------------------------------------------------------


def by_hand(
    function: Callable[..., Any], example: Sequence[Tensor], warmup: int = 5,
    generators: Callable[[], Sequence[torch.Generator]] = tuple,
) -> Callable[..., Any]:  # fmt: skip
    """`function` captured as the CUDA documentation shows it: the practical limit.

    A call copies its inputs into the captured ones, all in one kernel, replays, and returns the captured outputs, which
    the next call overwrites. It checks nothing. `generators` are those from which it draws besides the default one, asked for
    after the warm-up.
    """
    static = [tensor.clone() for tensor in example]
    graph, outputs = capture(lambda: function(*static), warmup, generators=generators)

    def call_one(new: Tensor) -> Any:
        static[0].copy_(new)
        graph.replay()
        return outputs

    def call(*new: Tensor) -> Any:
        torch._foreach_copy_(static, new)
        graph.replay()
        return outputs

    return keeping(call_one if len(static) == 1 else call, function)


def keeping(call: Callable[..., Any], *things: object) -> Callable[..., Any]:
    """`call`, holding on to things whose memory a graph uses: it knows their addresses and nothing else."""
    call.__dict__["keeps"] = things
    return call


def capture(
    function: Callable[[], Any], warmup: int = 5, pool: Any = None, before: Callable[[], Any] | None = None,
    generators: Callable[[], Sequence[torch.Generator]] = tuple,
) -> tuple[torch.cuda.CUDAGraph, Any]:  # fmt: skip
    """The graph of one call of `function`, and what that call returned. `before` runs instead of it to warm up."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warmup):
            (before or function)()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    for generator in generators():
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph, pool=pool):
        outputs = function()
    return graph, outputs


# ---- the report ----------------------------------------------------------------------------------


@dataclass
class Row:
    method: str
    wall_us: float | None = None
    cpu_us: float | None = None
    ratio: float | None = None  # wall_us over that of the reference (the graph captured by hand, mostly), in this run
    notes: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass
class Report:
    """One claim: what was aimed at, what was measured, where and with what."""

    claim: str
    target: str
    arguments: argparse.Namespace
    rows: list[Row] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    met: bool | None = None  # None: not decided by this run

    def row(self, method: str) -> Row | None:
        return next((row for row in self.rows if row.method == method), None)

    def ratio(self, method: str) -> float:
        """`wall_us` over the reference's; not a number where either is missing."""
        row = self.row(method)
        return row.ratio if row is not None and row.ratio is not None else math.nan

    def decide(self, met: bool, *needed: float) -> None:
        """Say whether the target was met; a quick run decides nothing, nor does one that lacks a number it needs."""
        if not self.arguments.quick and not any(map(math.isnan, needed)):
            self.met = met

    def as_json(self) -> dict[str, Any]:
        return {
            "claim": self.claim,
            "target": self.target,
            "met": self.met,
            "rows": [asdict(row) for row in self.rows],
            "figures": self.figures,
            "quick": self.arguments.quick,
            "device": self.arguments.device,
            "hardware": machine.hardware(torch.device(self.arguments.device)),
            "versions": machine.versions() | _versions_of("triton", "transformers", "timm", "diffusers", "tensordict"),
            "command": " ".join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        }

    def write(self) -> None:
        self.arguments.out.mkdir(parents=True, exist_ok=True)
        (self.arguments.out / f"{self.claim}.json").write_text(json.dumps(self.as_json(), indent=1) + "\n")


def _versions_of(*packages: str) -> dict[str, str]:
    found = {package: machine.installed(package) for package in packages}
    return {package: version for package, version in found.items() if version}


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    made.add_argument("--quick", action="store_true", help="fewer repeats and no peers: a check, not a result")
    made.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON file (default: %(default)s)")
    made.add_argument("--device", default="cuda", help="cuda (default); cpu runs what can run there")
    return made


@contextmanager
def trying(report: Report, method: str) -> Iterator[None]:
    """What goes wrong with one method is written into its row, and where on stderr; the others still run."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        report.rows.append(Row(method, error=f"{type(error).__name__}: {str(error)[:300]}"))


def possible(methods: dict[str, Any], device: str) -> dict[str, Any]:
    """Those that the device can run: on the CPU nothing is captured by hand, and compiled code runs live."""
    if device != "cpu":
        return methods
    return {name: x for name, x in methods.items() if not (name.startswith(REFERENCE) or name.endswith(COMPILED))}


def prepare(report: Report, methods: dict[str, Callable[[], Step]]) -> dict[str, Step]:
    """Make every method's step and run it once; those that fail get their row here.

    What an earlier workload has left goes before: a peer's capture would not survive that a graph of it is found to be garbage.
    """
    gc.collect()
    steps = {}
    for method, make in possible(methods, report.arguments.device).items():
        with trying(report, method):
            step = make()
            step()
            synchronize()
            steps[method] = step
    return steps


def measure(
    report: Report, steps: dict[str, Step], calls: int = 40, repeats: int = 5, warmup: int = 8, reference: str = REFERENCE,
    settled: int = _SETTLED,
) -> None:  # fmt: skip
    """Time the steps, taking turns, and add their rows with the ratio to the reference.

    Before that they take turns until nothing is recorded any more, and each was called `settled` times: recordings of several
    methods share memory, and what one leaves behind may be in the way of another.
    """
    if report.arguments.quick:
        calls, repeats = max(calls // 4, 5), 3
        settled = 0
    turns, before = 0, -1
    while turns < _TURNS and (totals().recorded != before or turns * warmup < settled):
        turns, before = turns + 1, totals().recorded
        for step in steps.values():
            for _ in range(warmup):
                step()
    report.figures.setdefault("turns until nothing was recorded", []).append(turns)
    timings: dict[str, list[Timing]] = {method: [] for method in steps}
    gc.collect()
    for _ in range(repeats):
        for method, step in steps.items():
            timings[method].append(time_once(step, calls))
    medians = {method: _median(each) for method, each in timings.items()}
    for method, median in medians.items():
        base = medians.get(_reference_of(method, reference))
        ratio = median.wall_us / base.wall_us if base else None
        report.rows.append(Row(method, median.wall_us, median.cpu_us, ratio))


def _reference_of(method: str, reference: str) -> str:
    """`phonograph, compiled inside` is compared with `by hand, compiled inside`."""
    _, comma, suffix = method.partition(", ")
    return reference + comma + suffix


def finish(report: Report) -> int:
    """Print the table and the JSON line, write the file, and return the exit status.

    0: target met (or a quick run); 1: missed; 3: something that the decision needs could not be measured.
    """
    print(f"\n{report.claim}: {report.target}")
    print(f"  {'method':42s} {'wall µs':>11s} {'CPU µs':>11s} {'ratio':>10s}")
    for row in report.rows:
        print(f"  {row.method:42s} " + (row.error or _numbers(row)))
    for name, value in report.figures.items():
        print(f"  {name}: {value}")
    print("  target " + {True: "met", False: "MISSED", None: "not decided by this run"}[report.met])
    report.write()
    print(json.dumps(report.as_json()), flush=True)
    if report.met is None:
        return 0 if report.arguments.quick else 3
    return 0 if report.met else 1


def _numbers(row: Row) -> str:
    cells = [f"{number:11,.1f}" if number is not None else " " * 11 for number in (row.wall_us, row.cpu_us)]
    cells.append(f"{row.ratio:10.3f}" if row.ratio is not None else " " * 10)
    return " ".join(cells) + "".join(f"  {name}={value}" for name, value in row.notes.items())
