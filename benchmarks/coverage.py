"""Fifty and more models through `torch.compile(model, backend="phonograph")`: right, recorded, how fast, how large.

    python benchmarks/coverage.py --out part1 --jobs 12 --budget 460 --part 1/2
    python benchmarks/coverage.py --out part2 --jobs 12 --budget 460 --part 2/2
    python benchmarks/coverage.py --report --merge part1/coverage.json part2/coverage.json

A case is a model (`coverage_models.py`) in inference or in training, and runs in a process of its own with a time limit. What
goes wrong there is its row. Rows are appended to `coverage.jsonl` as the cases end, for a run that is cut off; at the end,
`coverage.json` merges them by name, so that a later run of some cases (`--only`, `--part`, `--missing`) replaces these alone.

Inference is `eval()` under `no_grad`. A training step is forward, loss, backward, and an SGD step outside of what is compiled.
Each call gets another batch than the last, of four. A case has two passes:

1.  Deterministic algorithms, one method after the other, each from a clean start (no compiled code, no cached memory) with a
    copy of the same model. After the call that compiles:

        warm     7 calls, in which recordings are made        peak memory `whole` begins here
        steady   8 calls: what is replayed is counted here    peak memory `steady` is of these alone
        kept     6 calls, whose outputs are all kept and only then compared, with the parameters and buffers

    `allocated` is what tensors had at most, `reserved` what was taken from the device for them, above what there was before
    the method's model was made; both hold the model, its gradients and its four batches. A graph's own memory is counted in
    `allocated` while it is recorded, and in `reserved` always.

    Right: bit for bit as `torch.compile(model)`, or as the code that was recorded is when it runs unrecorded (Inductor is not
    asked to let a backward write into what its forward saved), or no further from it than it is from itself in another run.

2.  Without deterministic algorithms: time. All methods are there at once and take turns. A ratio is the median over the turns
    of one method's time over the other's in the same turn. While a case measures, no other one calls its models: those wait
    for a lock. They may compile.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import fcntl
import gc
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import harness
import phonograph as pg
from coverage_models import MODELS, Model, loss_of
from phonograph.compile import backend, graphs
from phonograph.torch_private import compiled_by

CLAIM = "coverage"
SLOWER_THAN_COMPILE, SLOWER_THAN_REDUCE, MOST = 1.03, 1.05, 0.9
TARGET = (
    f"all right; none slower than torch.compile by more than {SLOWER_THAN_COMPILE - 1:.0%}; as fast as reduce-overhead or "
    f"faster in {MOST:.0%}, never more than {SLOWER_THAN_REDUCE - 1:.0%} slower; peak memory (reserved, whole) at most that of "
    f"reduce-overhead in {MOST:.0%}"
)
EAGER, COMPILE, REDUCE, OURS = "eager", "torch.compile", "reduce-overhead", "phonograph"
METHODS = (EAGER, COMPILE, REDUCE, OURS)
WARM, STEADY, KEPT = 7, 8, 6
TURNS, TURN_SECONDS = 7, 0.08  # a case's time, measuring: 7 turns x 4 methods x 0.08 s
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 5e-2}  # how far from eager, over its largest value, is not worth a remark

# Why a case loses, by its name: for the table.
EXPLANATIONS: dict[str, str] = {}


# ---- a case --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    model: Model
    training: bool

    @property
    def name(self) -> str:
        return f"{self.model.name} {'training' if self.training else 'inference'}"


CASES = {case.name: case for model in MODELS.values() for case in (Case(model, False), Case(model, True))}


def unrecorded(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """The code that the backend records, as it is."""
    return compiled_by("inductor" if inputs_on_gpu(inputs) else "aot_eager", gm, inputs, None)


def inputs_on_gpu(inputs: Iterable[Any]) -> bool:
    return any(isinstance(x, Tensor) and x.is_cuda for x in inputs)


def compiled(model: nn.Module, method: str, on_gpu: bool) -> Callable[..., Any]:
    if method == EAGER:
        return model
    if method == OURS:
        return torch.compile(model, backend=backend, options={} if on_gpu else {"inner": "aot_eager"})
    if method == REDUCE:
        return torch.compile(model, mode="reduce-overhead")
    if method == COMPILE:
        return torch.compile(model) if on_gpu else torch.compile(model, backend="aot_eager")
    return torch.compile(model, backend=unrecorded)


class Job:
    """One method with a model of its own. A call is one step; it returns what came of it."""

    def __init__(self, case: Case, method: str, model: nn.Module, device: str) -> None:
        self.training = case.training
        self.marks = method == REDUCE
        dtype = case.model.dtype if device != "cpu" else torch.float32  # half is slow there
        self.model = copy.deepcopy(model).to(device, dtype).train(case.training)
        self.called = compiled(self.model, method, device != "cpu")
        rows = 2 if device == "cpu" else None
        self.batches = itertools.cycle([self._there(batch, device, rows) for batch in batches(case)])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02)
        torch.manual_seed(1)

    def _there(self, batch: dict[str, Tensor], device: str, rows: int | None) -> dict[str, Tensor]:
        dtype = next(self.model.parameters()).dtype
        some = {name: x[:rows] if x.dim() else x for name, x in batch.items()}
        return {name: x.to(device, dtype if x.is_floating_point() else None) for name, x in some.items()}

    def __call__(self) -> list[Tensor]:
        if self.marks:
            torch.compiler.cudagraph_mark_step_begin()
        batch = next(self.batches)
        if not self.training:
            with torch.no_grad():
                return _tensors(self.called(**batch))
        self.optimizer.zero_grad(set_to_none=True)
        output = self.called(**batch)
        loss = loss_of(output)
        loss.backward()
        self.optimizer.step()
        return [loss.detach(), *(t.detach() for t in _tensors(output))]


def batches(case: Case) -> list[dict[str, Tensor]]:
    torch.manual_seed(2)
    made = [case.model.batch() for _ in range(4)]
    return [batch | case.model.labels(batch) for batch in made] if case.training else made


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


# ---- the GPU: shared by those that check, one's alone who measures ---------------------------------


class Turnstile:
    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    @contextmanager
    def shared(self) -> Iterator[None]:
        with self._held(fcntl.LOCK_SH):
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._held(fcntl.LOCK_EX):
            yield

    @contextmanager
    def _held(self, how: int) -> Iterator[None]:
        fcntl.flock(self._file, how)
        try:
            yield
        finally:
            harness.synchronize()
            fcntl.flock(self._file, fcntl.LOCK_UN)


# ---- the first pass: right, recorded, how large ----------------------------------------------------


@dataclass
class Seen:
    """What one method's run has shown."""

    kept: list[Tensor]  # all outputs of the kept calls, then parameters and buffers: on the CPU
    peaks: dict[str, int]
    record: dict[str, Any]
    breaks: int


def clean() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def look(case: Case, method: str, model: nn.Module, device: str, turnstile: Turnstile) -> Seen:
    clean()
    before = _memory("memory")
    job = Job(case, method, model, device)
    with nullcontext() if method != EAGER else turnstile.shared():
        job()  # compiles; what Inductor allocates to choose its kernels is not the method's
    with turnstile.shared():
        gc.collect()
        _reset_peaks()
        _run(job, WARM)
        whole = _memory("max_memory")
        counted = _counts()
        _reset_peaks(empty=False)
        _run(job, STEADY)
        steady = _memory("max_memory")
        record = _between(counted, _counts())
        whole = {kind: max(whole[kind], steady[kind]) for kind in whole}
        keep = (lambda: [t.clone() for t in job()]) if method == REDUCE else job
        kept = [keep() for _ in range(KEPT)]
        record["replayed, outputs kept"] = _share(record.pop("then"), _counts())
        held = [t.cpu() for t in (*itertools.chain(*kept), *job.model.parameters(), *job.model.buffers())]
    peaks = {f"{kind}, whole": whole[kind] - before[kind] for kind in whole}
    peaks |= {f"{kind}, steady": steady[kind] - before[kind] for kind in steady}
    return Seen(held, peaks, record, sum(torch._dynamo.utils.counters["graph_break"].values()))


def _run(job: Job, calls: int) -> None:
    for _ in range(calls):
        job()
    harness.synchronize()


def _memory(prefix: str) -> dict[str, int]:
    if not torch.cuda.is_available():
        return {}
    return {kind: getattr(torch.cuda, f"{prefix}_{kind}")() for kind in ("allocated", "reserved")}


def _reset_peaks(empty: bool = True) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        if empty:
            torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _counts() -> list[pg.Stats]:
    """Of all graphs, and of their backwards."""
    found = graphs()
    return [pg.stats(each) for graph in found for each in (graph, *graph._backwards)]


def _between(before: list[pg.Stats], after: list[pg.Stats]) -> dict[str, Any]:
    reasons: dict[str, int] = {}
    for stats in after:
        for reason, count in stats.refusals.items():
            reasons[reason] = reasons.get(reason, 0) + count
    share = _share(before, after)
    recorded = {None: "live", 1.0: "fully", 0.0: "live"}.get(share, "partly")
    return {
        "recorded": recorded, "share": share, "graphs": len(graphs()), "recordings": sum(s.recorded for s in after),
        "reasons": reasons, "then": after,
    }  # fmt: skip


def _share(before: list[pg.Stats], after: list[pg.Stats]) -> float | None:
    """Of the calls between, those that were replayed; None: there were none."""
    calls = sum(s.calls for s in after) - sum(s.calls for s in before)
    replayed = sum(s.replayed for s in after) - sum(s.replayed for s in before)
    return round(replayed / calls, 3) if calls else None


def difference(ours: list[Tensor], theirs: list[Tensor]) -> tuple[bool, float, float]:
    """Whether all bits are the same; else the largest difference, and the largest over the size of what it is in."""
    if len(ours) != len(theirs):
        return False, float("inf"), float("inf")
    same, most, relative = True, 0.0, 0.0
    for a, b in zip(ours, theirs, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False, float("inf"), float("inf")
        if torch.equal(_bits(a), _bits(b)):
            continue
        x, y = a.double(), b.double()
        gap = (x - y).abs().nan_to_num(float("inf")).masked_fill(x.isnan() & y.isnan(), 0.0).max().item()
        same, most = False, max(most, gap)
        relative = max(relative, gap / max(y.abs().nan_to_num(0.0).max().item(), 1e-6))
    return same, most, relative


def _bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8) if t.dim() else t.reshape(1).view(torch.uint8)


def check(case: Case, model: nn.Module, device: str, turnstile: Turnstile) -> dict[str, Any]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    seen: dict[str, Seen] = {}
    row: dict[str, Any] = {"errors": {}}
    for method in METHODS if device != "cpu" else (EAGER, COMPILE, OURS):
        try:
            seen[method] = look(case, method, model, device, turnstile)
        except Exception as error:
            row["errors"][method] = _said(error)
    if EAGER in seen:
        for method in (COMPILE, OURS):
            if method in seen:
                row[f"{method} against eager"] = difference(seen[method].kept, seen[EAGER].kept)[2]
        row["far from eager"] = row.get(f"{OURS} against eager", 0.0) > max(
            LIMITS[case.model.dtype], 2 * row.get(f"{COMPILE} against eager", 0.0)
        )
    row["peaks"] = {method: each.peaks for method, each in seen.items() if each.peaks}
    if OURS in seen:
        row |= seen[OURS].record
        row["graph breaks"] = seen[OURS].breaks
        row["finite"] = all(bool(t.isfinite().all()) for t in seen[OURS].kept if t.is_floating_point())
    if OURS in seen and COMPILE in seen:
        row |= _rightness(seen[OURS].kept, seen[COMPILE].kept, lambda m: look(case, m, model, device, turnstile).kept)
    elif COMPILE in seen:
        row["right"] = False
    return row


def _rightness(ours: list[Tensor], theirs: list[Tensor], again: Callable[[str], list[Tensor]]) -> dict[str, Any]:
    bitwise, most, relative = difference(ours, theirs)
    row: dict[str, Any] = {"right": bitwise, "bitwise": bitwise, "difference": most, "relative difference": relative}
    if bitwise:
        return row
    row["torch.compile's own difference"] = difference(again(COMPILE), theirs)[1]
    row["bitwise as the same code unrecorded"] = difference(ours, again("unrecorded"))[0]
    row["right"] = row["bitwise as the same code unrecorded"] or most <= row["torch.compile's own difference"]
    return row


def _said(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error)[:400]}{where}"


# ---- the second pass: time -------------------------------------------------------------------------


def race(case: Case, model: nn.Module, device: str, turnstile: Turnstile, turns: int) -> dict[str, Any]:
    torch.use_deterministic_algorithms(False)
    torch._dynamo.config.recompile_limit *= len(METHODS)  # all methods' code hangs on the same functions
    clean()
    jobs: dict[str, Job] = {}
    errors = {}
    for method in METHODS if device != "cpu" else (EAGER, COMPILE, OURS):
        try:
            jobs[method] = Job(case, method, model, device)
            jobs[method]()
            with turnstile.shared():
                _run(jobs[method], WARM)
        except Exception as error:
            jobs.pop(method, None)
            errors[method] = _said(error)
    gc.collect()
    with turnstile.alone():
        timings = _turns(jobs, turns)
    row: dict[str, Any] = {"µs": {method: round(statistics.median(each), 1) for method, each in timings.items()}}
    row["CPU threads"] = torch.get_num_threads()
    for other in timings.keys() - {OURS} if OURS in timings else ():
        pairs = [a / b for a, b in zip(timings[OURS], timings[other], strict=True)]
        row[f"time over {other}"] = round(statistics.median(pairs), 3)
        row[f"spread over {other}"] = [round(min(pairs), 3), round(max(pairs), 3)]
    return row | ({"time errors": errors} if errors else {})


def _turns(jobs: dict[str, Job], turns: int) -> dict[str, list[float]]:
    calls = {}
    for method, job in jobs.items():
        _run(job, 3)
        calls[method] = min(500, max(3, round(TURN_SECONDS * 1e6 / harness.time_once(job, 3).wall_us)))
    timings: dict[str, list[float]] = {method: [] for method in jobs}
    order = list(jobs)
    for turn in range(turns):
        for method in order[turn % len(order) :] + order[: turn % len(order)]:
            job = jobs[method]
            job()
            timings[method].append(harness.time_once(job, calls[method]).wall_us)
    return timings


# ---- one case, in a process of its own -------------------------------------------------------------


def work(arguments: argparse.Namespace) -> int:
    """Both passes of a case; its row is written after each."""
    global WARM, STEADY, KEPT
    warnings.simplefilter("ignore")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if arguments.device == "cpu":
        torch.set_num_threads(1)
        WARM, STEADY, KEPT = 4, 4, 4
    _quiet()
    case = CASES[arguments.case]
    row: dict[str, Any] = {"case": case.name, "error": "did not end"}
    arguments.row.write_text(json.dumps(row))
    turnstile = Turnstile(arguments.row.parent / "turnstile")
    begun = time.monotonic()
    try:
        torch.manual_seed(0)
        model = case.model.build()
        row["parameters"] = sum(p.numel() for p in model.parameters())
        row |= check(case, model, arguments.device, turnstile)
        row["error"] = "did not end: no times"
        row["seconds, first pass"] = round(time.monotonic() - begun, 1)
        _write(arguments.row, row)
        if not arguments.no_times:
            row |= race(case, model, arguments.device, turnstile, 3 if arguments.quick else TURNS)
        row["error"] = None
    except Exception as error:
        row["error"] = _said(error)
    row["seconds"] = round(time.monotonic() - begun, 1)
    _write(arguments.row, row)
    return 0


def _write(path: Path, row: dict[str, Any]) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(row))
    new.replace(path)


def _quiet() -> None:
    import logging

    logging.disable(logging.WARNING)


# ---- all cases -------------------------------------------------------------------------------------


@dataclass
class Running:
    name: str
    process: subprocess.Popen[str]
    row: Path
    log: Path
    until: float

    def over(self) -> bool:
        if self.process.poll() is not None:
            return True
        if time.monotonic() < self.until:
            return False
        self.end()
        return True

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)  # with what compiles for it; it is the leader of its session
        self.process.wait()

    def read(self) -> dict[str, Any]:
        row: dict[str, Any] = json.loads(self.row.read_text()) if self.row.exists() else {"case": self.name}
        if self.process.returncode:
            why = "out of time" if self.process.returncode == -9 else f"exit status {self.process.returncode}"
            row["error"] = f"{row.get('error') or ''} ({why}) {self.log.read_text(errors='replace')[-300:]}".strip()
        return row


@contextmanager
def ending_with(running: list[Running]) -> Iterator[None]:
    """Whatever ends this process ends those that it started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        for one in running:
            one.end()


def start(name: str, number: int, folder: Path, arguments: argparse.Namespace) -> Running:
    row, log = folder / f"{number}.json", folder / f"{number}.log"
    passed = [flag for flag, wanted in (("--quick", arguments.quick), ("--no-times", arguments.no_times)) if wanted]
    command = [sys.executable, __file__, "--case", name, "--row", str(row), "--device", arguments.device, *passed]
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": "2", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "HF_HUB_OFFLINE": "1"}
    with log.open("w") as written:
        process = subprocess.Popen(
            command, stdout=written, stderr=subprocess.STDOUT, text=True, start_new_session=True, env=os.environ | environment
        )
    return Running(name, process, row, log, time.monotonic() + arguments.limit)


def run_all(names: list[str], arguments: argparse.Namespace) -> None:
    end = time.monotonic() + arguments.budget
    waiting, running = list(enumerate(names)), list[Running]()
    made = harness.Report(CLAIM, TARGET, arguments).as_json()
    made = {key: made[key] for key in ("device", "hardware", "versions", "command", "quick")}
    with (
        tempfile.TemporaryDirectory() as folder,
        (arguments.out / f"{CLAIM}.jsonl").open("a") as lines,
        ending_with(running),
    ):
        while running or (waiting and time.monotonic() < end):
            while waiting and len(running) < arguments.jobs and time.monotonic() < end:
                number, name = waiting.pop(0)
                running.append(start(name, number, Path(folder), arguments))
            time.sleep(0.1)
            for one in [each for each in running if each.over()]:
                running.remove(one)
                row = one.read() | {"made": made, "date": _now()}
                print(_line(row), flush=True)
                lines.write(json.dumps(row) + "\n")
                lines.flush()
    if waiting:
        print(f"left out, the budget being spent: {', '.join(name for _, name in waiting)}")


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def chosen(arguments: argparse.Namespace) -> list[str]:
    part, of = map(int, arguments.part.split("/"))
    models = list(MODELS)[part - 1 :: of]
    names = [name for name, case in CASES.items() if case.model.name in models and re.search(arguments.only, name)]
    if arguments.missing:
        done = {name for name, row in rows_of(_files(arguments)).items() if not row.get("error")}
        names = [name for name in names if name not in done]
    return names


# ---- the judge -------------------------------------------------------------------------------------


def _files(arguments: argparse.Namespace) -> list[Path]:
    return [arguments.out / f"{CLAIM}.json", *arguments.merge, arguments.out / f"{CLAIM}.jsonl"]


def rows_of(files: list[Path]) -> dict[str, dict[str, Any]]:
    """The last row of each case."""
    rows: dict[str, dict[str, Any]] = {}
    for row in itertools.chain(*(_read(file) for file in files if file.exists())):
        if rows.get(row["case"], {}).get("date", "") <= row["date"]:
            rows[row["case"]] = row
    return {name: rows[name] for name in CASES if name in rows}


def _read(file: Path) -> list[dict[str, Any]]:
    if file.suffix == ".jsonl":
        return [json.loads(line) for line in file.read_text().splitlines()]
    whole = json.loads(file.read_text())
    return [row | {"made": whole["made"][row["made"]]} for row in whole["cases"]]


def judge(rows: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """What the targets ask for, and who fails them."""
    losers: dict[str, dict[str, Any]] = {}

    def lose(name: str, what: str, number: Any) -> None:
        losers.setdefault(name, {"explanation": EXPLANATIONS.get(name, "")})[what] = number

    for name, row in rows.items():
        if row.get("error"):
            lose(name, "error", row["error"])
        for method, error in row.get("errors", {}).items():
            lose(name, f"error of {method}", error)
        if row.get("right") is False:
            lose(name, "not right", row.get("difference"))
        if row.get("recorded", "fully") != "fully":
            lose(name, f"recorded {row['recorded']}", row["reasons"])
        if row.get(f"time over {COMPILE}", 0) > SLOWER_THAN_COMPILE:
            lose(name, f"time over {COMPILE}", row[f"time over {COMPILE}"])
        if row.get(f"time over {REDUCE}", 0) > 1:
            lose(name, f"time over {REDUCE}", row[f"time over {REDUCE}"])
        if (ratio := _memory_ratio(row, "reserved, whole")) is not None and ratio > 1:
            lose(name, "memory over reduce-overhead's", round(ratio, 3))
    return _targets(rows), losers


def _targets(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    over_compile = _numbers(rows, lambda row: row.get(f"time over {COMPILE}"))
    over_reduce = _numbers(rows, lambda row: row.get(f"time over {REDUCE}"))
    memory = {
        kind: _numbers(rows, lambda row, kind=kind: _memory_ratio(row, kind))
        for kind in ("reserved, whole", "reserved, steady", "allocated, whole", "allocated, steady")
    }
    judged = [row["right"] for row in rows.values() if "right" in row]
    return {
        "cases": len(rows),
        "models of transformers": _models(rows, "transformers/"),
        "models of timm": _models(rows, "timm/"),
        "right": f"{sum(judged)} of {len(judged)}",
        "bitwise": sum(bool(row.get("bitwise")) for row in rows.values()),
        "recorded": {how: sum(r.get("recorded") == how for r in rows.values()) for how in ("fully", "partly", "live")},
        "time over torch.compile": _summary(over_compile, SLOWER_THAN_COMPILE),
        "time over reduce-overhead": _summary(over_reduce, 1.0),
        "memory over reduce-overhead": {kind: _summary(ratios, 1.0) for kind, ratios in memory.items()},
        "met": {
            "all right": bool(judged) and all(judged),
            "not slower than torch.compile": bool(over_compile) and max(over_compile) <= SLOWER_THAN_COMPILE,
            "as fast as reduce-overhead": bool(over_reduce)
            and _within(over_reduce, 1.0) >= MOST
            and max(over_reduce) <= SLOWER_THAN_REDUCE,
            "memory": bool(memory["reserved, whole"]) and _within(memory["reserved, whole"], 1.0) >= MOST,
        },
    }


def _numbers(rows: dict[str, dict[str, Any]], of: Callable[[dict[str, Any]], float | None]) -> list[float]:
    return [number for row in rows.values() if (number := of(row)) is not None]


def _models(rows: dict[str, dict[str, Any]], library: str) -> int:
    return len({name.split()[0] for name, row in rows.items() if name.startswith(library) and "right" in row})


def _within(ratios: list[float], limit: float) -> float:
    return sum(ratio <= limit for ratio in ratios) / len(ratios)


def _summary(ratios: list[float], limit: float) -> dict[str, Any]:
    if not ratios:
        return {}
    return {
        "cases": len(ratios), "median": round(statistics.median(ratios), 3), "largest": round(max(ratios), 3),
        f"at most {limit}": round(_within(ratios, limit), 3),
    }  # fmt: skip


def _memory_ratio(row: dict[str, Any], kind: str) -> float | None:
    ours, theirs = (row.get("peaks", {}).get(method, {}).get(kind) for method in (OURS, REDUCE))
    return ours / theirs if ours is not None and theirs else None


# ---- the table -------------------------------------------------------------------------------------


def _line(row: dict[str, Any]) -> str:
    right = {True: "right", False: "WRONG", None: "-"}[row.get("right")]
    if right == "right" and not row["bitwise"]:
        right = "right*"
    times = row.get("µs", {})
    cells = [f"{row['case']:44s} {right:6s} {row.get('recorded', '-'):6s}"]
    cells += [f"{times[method]:9,.0f}" if method in times else " " * 9 for method in METHODS]
    for ratio in (row.get(f"time over {COMPILE}"), row.get(f"time over {REDUCE}"), _memory_ratio(row, "reserved, whole")):
        cells.append(f"{ratio:7.3f}" if ratio is not None else " " * 7)
    reasons = "; ".join([*row.get("reasons", {}), *(f"{m}: {e}" for m, e in row.get("errors", {}).items())])
    remark = f"{row['error']}; {reasons}" if row.get("error") else reasons
    return " ".join(cells) + (f"  {remark[:160]}" if remark else "")


def finish(arguments: argparse.Namespace) -> int:
    """Print the table, write `coverage.json`; exit status as of the other benchmarks."""
    rows = rows_of(_files(arguments))
    targets, losers = judge(rows)
    missing = [name for name in CASES if name not in rows or rows[name].get("error")]
    met = _met(rows, targets, missing)
    heads = [*METHODS, "/compile", "/reduce", "memory"]
    print(f"\n{'case':44s} {'':6s} {'':6s} " + " ".join(f"{head[:9]:>{9 if head in METHODS else 7}s}" for head in heads))
    print("\n".join(map(_line, rows.values())))
    print("\nlosers\n" + "\n".join(f"  {name}: {json.dumps(why, ensure_ascii=False)[:300]}" for name, why in losers.items()))
    print(f"\n{json.dumps(targets, indent=1)}\nnot measured: {len(missing)}")
    made: list[dict[str, Any]] = []  # the runs that the rows are of
    for row in rows.values():
        if row["made"] not in made:
            made.append(row["made"])
    cases = [row | {"made": made.index(row["made"])} for row in rows.values()]
    written = {"claim": CLAIM, "target": TARGET, "met": met, "targets": targets, "losers": losers, "not measured": missing}
    written |= {"made": made, "cases": cases}
    (arguments.out / f"{CLAIM}.json").write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n")
    (arguments.out / f"{CLAIM}.jsonl").unlink(missing_ok=True)
    return {None: 0 if arguments.quick else 3, True: 0, False: 1}[met]


def _met(rows: dict[str, dict[str, Any]], targets: dict[str, Any], missing: list[str]) -> bool | None:
    """Decided once every case has been measured on a GPU; a miss that no other case can mend, before."""
    if any(row["made"]["quick"] or row["made"]["device"] == "cpu" for row in rows.values()):
        return None
    if not missing:
        return all(targets["met"].values())
    return None if targets["met"]["all right"] else False


def _arguments() -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--only", default="", help="cases whose names this regular expression is found in")
    parser.add_argument("--part", default="1/1", help="i/n: every nth model, from the ith")
    parser.add_argument("--missing", action="store_true", help="only cases without a row, or whose row is an error")
    parser.add_argument("--jobs", type=int, default=6, help="cases at a time (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=100, help="seconds a case may take (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no other case is started")
    parser.add_argument("--no-times", action="store_true", help="only the first pass")
    parser.add_argument("--merge", type=Path, nargs="+", default=[], help="coverage.json of other runs, to be merged")
    parser.add_argument("--report", action="store_true", help="run nothing; judge and print what there is")
    parser.add_argument("--list", action="store_true", help="only print the names of the cases")
    parser.add_argument("--case", choices=list(CASES), metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--row", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    arguments = _arguments()
    if arguments.case:
        return work(arguments)
    names = chosen(arguments)
    if arguments.list:
        print("\n".join(names))
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    if not arguments.report:
        run_all(names, arguments)
    return finish(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
