"""One case of `coverage.py`: its two passes, in a process of its own. What they measure is described there."""

from __future__ import annotations

import argparse
import copy
import fcntl
import gc
import itertools
import json
import logging
import os
import random
import statistics
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import harness
import phonograph as pg
from coverage_models import MODELS, Model, loss_of
from phonograph._torch.dynamo import compiled_by
from phonograph.compile import backend, graphs

EAGER, COMPILE, REDUCE, OURS = "eager", "torch.compile", "reduce-overhead", "phonograph"
METHODS = (EAGER, COMPILE, REDUCE, OURS)
WARM, STEADY, KEPT = 7, 8, 6
_RUNS, _MARGIN = 4, 2.0  # of code that differs from itself; of any six runs, one is the furthest from the others
TURNS, TURN_SECONDS = 7, 0.08  # a case's time, measuring: 7 turns x 4 methods x 0.08 s
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 5e-2}  # how far from eager, over its largest value, is not worth a remark


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
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(1)

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
    breaks: dict[str, int]  # Dynamo's graph breaks, by their reasons


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
        then, now = record.pop("then"), _counts()
        record["replayed, outputs kept"] = _share(then, now)
        record["reasons, outputs kept"] = {why: n for why, n in _reasons(now).items() if n > _reasons(then).get(why, 0)}
        held = [t.cpu() for t in (*itertools.chain(*kept), *job.model.parameters(), *job.model.buffers())]
    peaks = {f"{kind}, whole": whole[kind] - before[kind] for kind in whole}
    peaks |= {f"{kind}, steady": steady[kind] - before[kind] for kind in steady}
    return Seen(held, peaks, record, dict(torch._dynamo.utils.counters["graph_break"]))


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
    share = _share(before, after)
    recorded = {None: "live", 1.0: "fully", 0.0: "live"}.get(share, "partly")
    return {
        "recorded": recorded, "share": share, "graphs": len(graphs()), "recordings": sum(s.recorded for s in after),
        "reasons": _reasons(after), "then": after,
    }  # fmt: skip


def _reasons(counted: list[pg.Stats]) -> dict[str, int]:
    reasons: Counter[str] = Counter()
    for stats in counted:
        reasons.update(stats.refusals)
    return dict(reasons)


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
        row["graph breaks"] = {" ".join(why.split())[:300]: count for why, count in seen[OURS].breaks.items()}
        row["graph breaks of torch.compile"] = sum(seen[COMPILE].breaks.values()) if COMPILE in seen else None
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
    row["bitwise as the same code unrecorded"] = row["right"] = difference(ours, again("unrecorded"))[0]
    runs, own = [theirs], 0.0
    for _ in range(_RUNS):
        if not row["right"]:
            runs.append(again(COMPILE))
            own = row["torch.compile's own difference"] = max(own, *(difference(runs[-1], run)[1] for run in runs[:-1]))
            row["right"] = most <= _MARGIN * own
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
    """One pass of a case, and then, in this process's place, the other: what the first has left behind (wrapped methods,
    compiled code, memory) is not there when time is measured. The row is written after each."""
    global WARM, STEADY, KEPT
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if arguments.device == "cpu":
        torch.set_num_threads(1)
        WARM, STEADY, KEPT = 4, 4, 4
    case, begun = CASES[arguments.case], time.monotonic()
    turnstile = Turnstile(arguments.row.parent / "turnstile")
    row: dict[str, Any] = {"case": case.name, "error": "did not end"}
    if arguments.timing:
        row = json.loads(arguments.row.read_text())
    else:
        _write(arguments.row, row)
    try:
        torch.manual_seed(0)
        model = case.model.build()
        if arguments.timing:
            row |= race(case, model, arguments.device, turnstile, 3 if arguments.quick else TURNS)
        else:
            row["parameters"] = sum(p.numel() for p in model.parameters())
            row |= check(case, model, arguments.device, turnstile)
        row["error"] = None if arguments.timing or arguments.no_times else "did not end: no times"
    except Exception as error:
        row["error"] = _said(error)
        arguments.no_times = True
    row[f"seconds, {'second' if arguments.timing else 'first'} pass"] = round(time.monotonic() - begun, 1)
    _write(arguments.row, row)
    if not arguments.timing and not arguments.no_times:
        os.execv(sys.executable, [sys.executable, *sys.argv, "--timing"])
    return 0


def _write(path: Path, row: dict[str, Any]) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(row))
    new.replace(path)
