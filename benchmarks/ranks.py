"""Whole training steps on several GPUs of one host (`parallel.py`), eager, captured by hand, and recorded by one line.

    python benchmarks/ranks.py --nproc 2                              # all that are for two GPUs: results/ranks.json
    python benchmarks/ranks.py --nproc 4                              # those for four: results/ranks_4.json
    python benchmarks/ranks.py --only fsdp2 'fsdp2, clipping' --quick
    python benchmarks/ranks.py --device cpu --quick                   # with gloo, small: right or not

Each case has two passes on all ranks, with fresh models from the same seeds:

1.  `STEPS` steps eager and recorded. Losses, parameters, gradients and optimizer state are compared by their bits on each rank.
    Calls, replays, recordings and reasons are of it.
2.  Eager, by hand, and recorded, all at once, taking turns. A time is the median over the turns of the slowest rank's mean.
    Then 500 single steps, by hand and recorded: p99 over p50; and the NCCL kernels that a step has, from torch.profiler.
    (`Case.rounds` is how often; less often for a large model.)

Then the most memory that the allocator reserves within some steps, eager and recorded, each in processes of its own, several
cases at once: in one process each would find what the others have left. Once at the size of the cases, where what the allocator
takes at a time (20 MiB) and cuBLAS's workspaces (64 MiB) are a large part of it; once wide, where they are not. With
`--no-memory` it is what the first pass has reserved, where eager comes first.

Every rank has a batch of the same size, however many there are, so that between four ranks and two the time ought not to change
(`ranks_table.py`). The file is written as each case ends. With `--add` other cases that are in it stay.

Where a module is recorded inside a wrapper, by hand is torch.cuda.make_graphed_callables, and the rest of the step runs live.

A case that takes longer than `--limit` seconds has its processes killed; those that are left start again without it.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import harness
import phonograph as pg
from parallel import CASES, WIDTH, Case, Size, Training, as_it_is

CLAIM = "ranks"
STEPS, REPLAYED, LIVE, CLOSE, MEMORY, STEADY, NOISE = 20, 17, 4, 1.05, 1.06, 1.1, 1.02
TARGET = (
    f"{STEPS} steps bitwise on each rank, at least {REPLAYED} replayed, at most {LIVE} live; at most {CLOSE} x by hand; "
    f"at most {MEMORY} x eager's memory; p99/p50 at most {STEADY}; a module inside a wrapper at most eager's time"
)
EAGER, HAND, OURS = "eager", "by hand", "phonograph"
UNMEASURED = "unmeasured"
QUICK = 3  # turns
TRIED = 120  # steps after which it is known whether what is recorded inside pays
WIDE = 4096  # features
TOGETHER = 4  # cases, of which memory is measured at once
STARTING = 90  # seconds in which all processes must be there


# ---- one rank --------------------------------------------------------------------------------------


class Rank:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.rank, self.quick = arguments.rank, arguments.quick
        self.size = Size(16, 4, 8) if arguments.device == "cpu" else Size(arguments.width)
        self.device = torch.device("cpu")
        backend = "gloo"
        if arguments.device != "cpu":
            self.device, backend = torch.device("cuda", self.rank), "nccl"
            torch.cuda.set_device(self.device)
        dist.init_process_group(backend, rank=self.rank, world_size=arguments.nproc, timeout=timedelta(seconds=60))

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def batch(self, case: Case, n: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * (self.rank // (case.tensor_parallel or dist.get_world_size())) + n)
        x, target = case.batch(self.size, generator)
        return x.to(self.device), target.to(self.device)

    def memory(self, case: Case, kind: str) -> dict[str, int]:
        """MiB that are reserved at most in some steps, and after them."""
        self.begin()
        _training, step, _recorded = self.made(case, ours=kind == OURS)
        for n in range(8):
            step(*self.batch(case, n))
        self.synchronize()
        return self.reserved()

    def reserved(self) -> dict[str, int]:
        return {"most": torch.cuda.max_memory_reserved() >> 20, "in the end": torch.cuda.memory_reserved() >> 20}

    def begin(self) -> None:
        """What was before has gone."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()

    def run(self, case: Case, first: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """What is found; `first` gets what the first pass has found, in case that the second does not end."""
        row: dict[str, Any] = {"inside": case.inside, "MiB": {}}
        given: dict[str, list[Tensor]] = {}
        for kind in (EAGER, OURS):
            self.begin()
            training, step, recorded = self.made(case, ours=kind == OURS)
            losses, began = [], time.perf_counter()
            for n in range(STEPS):
                loss = step(*self.batch(case, n))
                losses.append(loss.detach().cpu() if isinstance(loss, Tensor) else torch.zeros(()))
            self.synchronize()
            row[f"seconds, {kind}"] = time.perf_counter() - began
            if self.device.type == "cuda":
                row["MiB"][kind] = self.reserved()
            given[kind] = [*losses, *[t.cpu() for t in training.tensors()]]
            if kind == OURS:
                stats = pg.stats(recorded)
                row |= {"calls": stats.calls, "live": stats.live, "replayed": stats.replayed, "recorded": stats.recorded}
                row["reasons"] = dict(stats.refusals)
                pg.reset(recorded)
            del training, step, recorded
        row["equal"] = len(given[EAGER]) == len(given[OURS]) and all(map(equal, given[EAGER], given[OURS]))
        if not row["equal"]:
            row["differ"] = [n for n, (a, b) in enumerate(zip(given[EAGER], given[OURS], strict=False)) if not equal(a, b)][:8]
        if self.device.type == "cuda":
            first(row)
            try:
                self.measure(case, row)
            except Exception as error:
                traceback.print_exc()
                row[UNMEASURED] = said(error)
        return row

    def measure(self, case: Case, row: dict[str, Any]) -> None:
        self.begin()
        steps: dict[str, Callable[[], Any]] = {}
        batch, rounds = self.batch(case, 0), case.rounds
        _, live, _ = self.made(case, ours=False)
        steps[EAGER] = lambda: live(*batch)
        _, ours, recorded = self.made(case, ours=True)
        steps[OURS] = lambda: ours(*batch)
        for step in steps.values():
            for _ in range(TRIED if case.inside else 12):
                step()
        graphs: list[Any] = []
        if case.steps_by_hand:
            try:
                steps[HAND] = self.by_hand(case, batch, graphs)
            except Exception as error:
                traceback.print_exc()
                row["by hand"] = said(error)
        if not self.all_have(HAND in steps):
            steps.pop(HAND, None)
        times: dict[str, list[float]] = {kind: [] for kind in steps}
        for turn in range(1 + (QUICK if self.quick else rounds.turns)):
            for kind in [*steps][turn % len(steps) :] + [*steps][: turn % len(steps)]:  # each comes after each
                step = steps[kind]
                dist.barrier()
                self.synchronize()
                began = time.perf_counter()
                for _ in range(rounds.calls):
                    step()
                self.synchronize()
                if turn:
                    times[kind].append((time.perf_counter() - began) / rounds.calls)
        row["us"] = {kind: [1e6 * t for t in each] for kind, each in times.items()}
        if not self.quick:
            row["single us"] = {kind: self.single(steps[kind], rounds.single) for kind in (HAND, OURS) if kind in steps}
            row["kernels"] = {kind: self.kernels(steps[kind]) for kind in (EAGER, OURS)}
        pg.reset(recorded)
        for graph in graphs:
            graph.reset()
        self.synchronize()

    def made(self, case: Case, ours: bool) -> tuple[Training, Callable[..., Any], Any]:
        """A training, its step, and what of it is recorded."""
        if not case.inside:
            training = case.make(self.size, self.device)
            step = pg.record(training.step) if ours else training.step
            return training, step, step
        training = case.make(self.size, self.device, pg.record if ours else as_it_is)
        return training, training.step, training.inner

    def by_hand(self, case: Case, batch: tuple[Tensor, Tensor], graphs: list[Any]) -> Callable[[], Any]:
        """As the documentation of DDP says: made and warmed up on a side stream, eleven steps."""
        if case.inside:
            return self.graphed(case, batch)
        static = [t.clone() for t in batch]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            training = case.make(self.size, self.device)
            for _ in range(11):
                training.step(*static)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graphs.append(graph)
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            kept = training.step(*static)

        def step() -> Any:
            torch._foreach_copy_(static, list(batch))
            graph.replay()
            return kept

        return harness.keeping(step, training)

    def graphed(self, case: Case, batch: tuple[Tensor, Tensor]) -> Callable[[], Any]:
        """The module by `torch.cuda.make_graphed_callables`, before it is wrapped."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            training = case.make(
                self.size, self.device, lambda module: torch.cuda.make_graphed_callables(module, (batch[0].clone(),))
            )
        torch.cuda.current_stream().wait_stream(side)
        for _ in range(12):
            training.step(*batch)
        return lambda: training.step(*batch)

    def all_have(self, whether: bool) -> bool:
        flag = torch.tensor([int(whether)], device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag.item())

    def single(self, step: Callable[[], Any], times_over: int) -> dict[str, float]:
        """Steps of which each is waited for."""
        times = []
        dist.barrier()
        for _ in range(times_over):
            began = time.perf_counter()
            step()
            self.synchronize()
            times.append(1e6 * (time.perf_counter() - began))
        times.sort()
        return {"p50": times[times_over // 2], "p99": times[int(times_over * 0.99)]}

    def kernels(self, step: Callable[[], Any]) -> int:
        from torch.profiler import ProfilerActivity, profile

        dist.barrier()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(4):
                step()
            self.synchronize()
        return sum(event.count for event in found.key_averages() if event.key.startswith("ncclDevKernel")) // 4


def equal(a: Tensor, b: Tensor) -> bool:
    """By the bits."""
    return a.shape == b.shape and a.dtype == b.dtype and bits(a).equal(bits(b))


def bits(t: Tensor) -> Tensor:
    """As words, where it has so many, which are compared sooner."""
    flat = t.contiguous().flatten()
    return flat.view(torch.uint8 if t.nbytes % 8 else torch.int64) if t.numel() else flat


def work(arguments: argparse.Namespace) -> None:
    """The cases, one after the other, in this process. What is found is written as soon as it is there."""
    rank = Rank(arguments)
    for name in arguments.only:
        (arguments.folder / f"begun-{arguments.rank}").write_text(name)
        written = arguments.folder / f"{name}-{arguments.rank}.json"
        try:
            row = rank.run(CASES[name], functools.partial(write, written.with_suffix(".first")))
        except Exception as error:
            traceback.print_exc()
            row = {"error": said(error)}
        write(written, row)
        if failed(row):
            os._exit(1)  # the others may wait for what never comes
    dist.destroy_process_group()


def write(file: Path, row: dict[str, Any]) -> None:
    """Whole, or not at all."""
    file.with_suffix(".part").write_text(json.dumps(row))
    file.with_suffix(".part").rename(file)


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


def failed(row: dict[str, Any]) -> bool:
    return "error" in row or UNMEASURED in row


def look_at_memory(arguments: argparse.Namespace) -> None:
    """Of one case, of one kind, in this process."""
    found = Rank(arguments).memory(CASES[arguments.only[0]], arguments.memory)
    (arguments.folder / f"memory-{arguments.rank}.json").write_text(json.dumps(found))
    os._exit(0)  # how a process ends is not what is measured


# ---- all ranks -------------------------------------------------------------------------------------


def started(names: list[str], arguments: argparse.Namespace, folder: Path, *options: str) -> list[subprocess.Popen[bytes]]:
    """All ranks, with these cases."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if arguments.device == "cpu":
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    processes = []
    for rank in range(arguments.nproc):
        command = [sys.executable, __file__, "--rank", str(rank), "--nproc", str(arguments.nproc), "--folder", str(folder)]
        command += ["--device", arguments.device, *(["--quick"] if arguments.quick else []), *options, "--only", *names]
        with (folder / f"{rank}.log").open("a") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        processes.append(process)
    return processes


def memories(names: list[str], arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What some cases reserve, eager and recorded: by width and kind, MiB on each rank."""
    running = []
    for name in names:
        for width in (WIDTH, WIDE) if CASES[name].widens else (WIDTH,):
            for kind in (EAGER, OURS):
                own = Path(tempfile.mkdtemp(dir=folder))
                processes = started([name], arguments, own, "--memory", kind, "--width", str(width))
                running.append((name, width, kind, own, processes))
    until = min(time.monotonic() + STARTING, arguments.until)
    found: dict[str, Any] = {}
    for name, width, kind, own, processes in running:
        for process in processes:
            try:
                process.wait(timeout=max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        files = [own / f"memory-{rank}.json" for rank in range(arguments.nproc)]
        if all(file.exists() for file in files):
            found.setdefault(name, {}).setdefault(width, {})[kind] = [json.loads(file.read_text()) for file in files]
    return found


def over_eager(found: dict[str, Any], which: str) -> float | None:
    """On the rank where it is most."""
    if not found.keys() >= {EAGER, OURS}:
        return None
    return max(ours[which] / max(1, eager[which]) for eager, ours in zip(found[EAGER], found[OURS], strict=True))


def together(
    names: list[str], arguments: argparse.Namespace, folder: Path, found: Callable[[str, list[dict[str, Any]]], None]
) -> list[str]:
    """Run these cases in processes of their own, and give those that are left after one that took too long, or failed."""
    processes = started(names, arguments, folder)
    left, since = [*names], time.monotonic() + STARTING
    try:
        while left and time.monotonic() < arguments.until:
            states = [process.poll() for process in processes]
            ended = time.monotonic() - since > arguments.limit or any(states) or None not in states
            if ended or all((folder / f"{left[0]}-{rank}.json").exists() for rank in range(arguments.nproc)):
                rows = rows_of(name := left.pop(0), folder, arguments.nproc)
                found(name, rows)
                if any(map(failed, rows)):
                    print("".join((folder / f"{rank}.log").read_text()[-600:] for rank in range(arguments.nproc)), flush=True)
                    return left
                since = time.monotonic()
            time.sleep(0.02)
        if not left:
            for process in processes:
                process.wait(timeout=arguments.limit)
    except subprocess.TimeoutExpired:
        print("the processes did not end", flush=True)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return left


def rows_of(name: str, folder: Path, nproc: int) -> list[dict[str, Any]]:
    return [row_of(folder / f"{name}-{rank}.json") for rank in range(nproc)]


def row_of(file: Path) -> dict[str, Any]:
    first = file.with_suffix(".first")
    if file.exists():
        return json.loads(file.read_text())  # type: ignore[no-any-return]
    return json.loads(first.read_text()) | {UNMEASURED: "did not end"} if first.exists() else {"error": "did not end"}


def slowest(rows: list[dict[str, Any]], kind: str) -> float | None:
    """µs a step: the median over the turns of the slowest rank."""
    if not all(kind in row.get("us", {}) for row in rows):
        return None
    return statistics.median(max(turn) for turn in zip(*[row["us"][kind] for row in rows], strict=True))


def unsteady(rows: list[dict[str, Any]], kind: str) -> float | None:
    """p99 over p50, on the rank where it is most."""
    found = [row["single us"][kind] for row in rows if kind in row.get("single us", {})]
    return max((each["p99"] / each["p50"] for each in found), default=None)


def line_of(name: str, rows: list[dict[str, Any]]) -> str:
    errors = [row["error"] for row in rows if "error" in row]
    if errors:
        return f"{name:20s} {errors}"
    cells = [f"{name:20s}", "equal  " if all(row["equal"] for row in rows) else "DIFFERS"]
    cells.append(" ".join(f"{row['replayed']}/{row['calls']} rec {row['recorded']}" for row in rows))
    times = {kind: slowest(rows, kind) for kind in (EAGER, HAND, OURS)}
    cells += [f"{kind} {us:,.0f} µs" for kind, us in times.items() if us is not None]
    if times[HAND] and times[OURS]:
        cells.append(f"x {times[OURS] / times[HAND]:.3f}")
    cells += [f"p99/p50, {kind}: {ratio:.2f}" for kind in (HAND, OURS) if (ratio := unsteady(rows, kind)) is not None]
    if "kernels" in rows[0]:
        cells.append(f"nccl {rows[0]['kernels']}")
    cells += [f"by hand: {row['by hand']}" for row in rows[:1] if "by hand" in row]
    cells += [f"{UNMEASURED}: {row[UNMEASURED]}" for row in rows if UNMEASURED in row]
    reasons = Counter({reason: count for row in rows for reason, count in row["reasons"].items()})
    cells += [f"\n      {count} live: {reason[:300]}" for reason, count in reasons.items()]
    return "  ".join(cells)


def judged(rows: list[dict[str, Any]], memory: dict[int, Any]) -> dict[str, Any]:
    """A case against the targets."""
    if any("error" in row for row in rows):
        return {"error": [row.get("error") for row in rows]}
    hand, ours, eager = (slowest(rows, kind) for kind in (HAND, OURS, EAGER))
    passes = {kind: [row["MiB"][kind] for row in rows] for kind in rows[0]["MiB"]}
    return {
        "inside": rows[0]["inside"],
        "equal": all(row["equal"] for row in rows),
        "replayed": min(row["replayed"] for row in rows),
        "live": max(row["live"] for row in rows),
        "recorded": max(row["recorded"] for row in rows),
        "counts agree": len({(row["replayed"], row["recorded"]) for row in rows}) == 1,
        "eager us": eager,
        "by hand us": hand,
        "phonograph us": ours,
        "over by hand": ours / hand if ours and hand else None,
        "memory over eager": over_eager(memory.get(WIDTH, {}), "most"),
        "memory over eager in the end": over_eager(memory.get(WIDTH, {}), "in the end"),
        "memory over eager, wide": over_eager(memory.get(WIDE, {}), "most"),
        "memory over eager in the end, wide": over_eager(memory.get(WIDE, {}), "in the end"),
        "memory over eager, first pass": over_eager(passes, "most"),
        "memory, MiB": memory or passes,
        "single us": {kind: max(row["single us"][kind]["p50"] for row in rows) for kind in rows[0].get("single us", {})},
        "p99/p50": unsteady(rows, OURS),
        "p99/p50 by hand": unsteady(rows, HAND),
        "NCCL kernels": rows[0].get("kernels"),
        "reasons": [row["reasons"] for row in rows],
        UNMEASURED: [row.get(UNMEASURED) for row in rows if UNMEASURED in row],
    }


def met(case: dict[str, Any]) -> bool:
    if "error" in case or case[UNMEASURED]:
        return False
    if case["inside"]:  # that runs live at times to find out whether it pays
        return bool(case["equal"] and (case["phonograph us"] or 0) <= NOISE * (case["eager us"] or math.inf))
    return bool(
        case["equal"] and case["replayed"] >= REPLAYED and case["counts agree"] and case["live"] <= LIVE
        and (case["over by hand"] or 0) <= CLOSE and (case["p99/p50"] or 0) <= STEADY
        and all((case[f"memory over eager{size}"] or 0) <= MEMORY for size in ("", ", wide"))
    )  # fmt: skip


class Results:
    """The file, written anew with each case."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.path = arguments.out / (f"{CLAIM}.json" if arguments.nproc == 2 else f"{CLAIM}_{arguments.nproc}.json")
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.cases: dict[str, dict[str, Any]] = {}
        if arguments.add and self.path.exists():
            self.cases = json.loads(self.path.read_text())["figures"]["cases"]

    def add(self, name: str, rows: list[dict[str, Any]]) -> None:
        print(line_of(name, rows), flush=True)
        self.rows[name] = rows
        self.add_memory({name: {}})

    def add_memory(self, found: dict[str, Any]) -> None:
        """What each of these cases reserves, by width."""
        for name, memory in found.items():
            self.cases[name] = judged(self.rows[name], memory)
        self.report([name for name in self.arguments.only if name not in self.rows])

    def report(self, left: list[str]) -> harness.Report:
        report = harness.Report(CLAIM, TARGET, self.arguments)
        good = {name: met(case) for name, case in self.cases.items()}
        report.figures = {
            "ranks": self.arguments.nproc,
            "targets met": sum(good.values()),
            "left out": left,
            "missed": [name for name, each in good.items() if not each],
            "cases": self.cases,
        }
        wanted = {name for name, case in CASES.items() if self.arguments.nproc in case.gpus}
        if self.arguments.device != "cpu" and not self.arguments.quick and wanted <= self.cases.keys():
            report.met = all(good.values())
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(report.as_json(), indent=1, ensure_ascii=False) + "\n")
        return report


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--nproc", type=int, default=2, help="ranks, each with a GPU (default: %(default)s)")
    parser.add_argument("--only", choices=CASES, nargs="+", metavar="NAME", help="these cases, on however many GPUs")
    parser.add_argument("--limit", type=float, default=40, help="seconds a case may take (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds for all, after which no case is begun anew")
    parser.add_argument("--no-memory", action="store_true", help="measure no memory in processes of its own")
    parser.add_argument("--add", action="store_true", help="keep what other cases the file has")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--memory", choices=[EAGER, OURS], help=argparse.SUPPRESS)
    parser.add_argument("--width", type=int, default=WIDTH, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        (look_at_memory if arguments.memory else work)(arguments)
        return 0
    arguments.only = arguments.only or [name for name, case in CASES.items() if arguments.nproc in case.gpus]
    arguments.until = time.monotonic() + arguments.budget
    results = Results(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder, left = Path(name), [*arguments.only]
        while left and time.monotonic() < arguments.until:
            left = together(left, arguments, folder, results.add)
        begun = [name for name in arguments.only if name not in left]
        if arguments.device != "cpu" and not arguments.no_memory:
            for some in range(0, len(begun), TOGETHER):
                results.add_memory(memories(begun[some : some + TOGETHER], arguments, folder))
    report = results.report(left)
    print(json.dumps({name: report.figures[name] for name in ("ranks", "targets met", "missed", "left out")}))
    return {None: 0 if arguments.quick else 3, True: 0, False: 1}[report.met]


if __name__ == "__main__":
    raise SystemExit(main())
