"""A whole training step of GPT-2 124M: time, peak memory, and what the recording itself costs.

    python benchmarks/gpt2_step.py
    python benchmarks/gpt2_step.py --set-up       # only what recordings cost, the first of a process and the second

bf16, 2 x 256 tokens, AdamW(fused=True), a new batch each call. Peak memory is measured in processes of their own
(`--memory live|recorded|"by hand"`), because what one method leaves behind would count for the next.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import harness
import phonograph as pg
from harness import COMPILED
from workloads import Training, gpt2, plain

CLAIM = "gpt2_step"
TIME_LIMIT, MEMORY_LIMIT, SETUP_LIMIT = 1.02, 1.05, 3.0
TARGET = (
    f"compiled inside: at most {TIME_LIMIT} x by hand; peak memory at most {MEMORY_LIMIT} x live; "
    f"a second recording's set-up at most {SETUP_LIMIT:.0f} live steps beyond one live call"
)


def live(job: Training) -> harness.Step:
    feed = job.forever()
    return lambda: job.step(*next(feed))


def recorded(job: Training) -> harness.Step:
    step, feed = pg.record(job.step), job.forever()
    return lambda: step(*next(feed))


def by_hand(job: Training) -> harness.Step:
    call, feed = harness.by_hand(job.step, job.batches[0]), job.forever()
    return lambda: call(*next(feed))


class WithLoss(nn.Module):
    """A module whose forward returns the loss: what make_graphed_callables can take."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, labels=tokens, attention_mask=seen).loss


def graphed_callable(device: str) -> harness.Step:
    from types import SimpleNamespace

    tokens = torch.randint(1000, (2, 256), device=device)
    seen = torch.ones(1, 1, 256, 256, dtype=torch.bool, device=device).tril()

    def wrap(model: nn.Module) -> Callable[..., Any]:
        graphed = torch.cuda.make_graphed_callables(WithLoss(model), (tokens, seen))
        return lambda input_ids, labels, attention_mask: SimpleNamespace(loss=graphed(input_ids, attention_mask))

    return live(gpt2(device, wrap))


def methods(device: str, peers: bool) -> dict[str, Callable[[], harness.Step]]:
    ours: dict[str, Callable[[], harness.Step]] = {
        "live": lambda: live(gpt2(device)),
        "by hand": lambda: by_hand(gpt2(device, capturable=True)),
        "phonograph": lambda: recorded(gpt2(device)),
        "live, compiled inside": lambda: live(gpt2(device, torch.compile)),
        "by hand" + COMPILED: lambda: by_hand(gpt2(device, torch.compile, capturable=True)),
        "phonograph" + COMPILED: lambda: recorded(gpt2(device, torch.compile)),
    }
    others: dict[str, Callable[[], harness.Step]] = {
        "reduce-overhead": lambda: live(gpt2(device, lambda model: torch.compile(model, mode="reduce-overhead"))),
        "make_graphed_callables": lambda: graphed_callable(device),
    }
    return ours | others if peers else ours


# ---- what recording costs once -------------------------------------------------------------------


def setup_cost(device: str, compiled: bool) -> dict[str, Any]:
    """What the first recording that this process makes of such a step costs, and the second, of a model of its own."""
    return {number: one_setup(device, compiled) for number in ("first", "second")}


def one_setup(device: str, compiled: bool) -> dict[str, float]:
    """Milliseconds that the first calls take beyond live ones, warm-up, capture and instantiation together; and those of the
    capturing call alone, how often the allocator is asked there for all that it has, and those of a capture by hand.

    The function has run live before, so that compiling and cuBLAS's start are not counted.
    """
    job = gpt2(device, torch.compile if compiled else plain)
    feed = job.forever()
    for _ in range(5):
        job.step(*next(feed))
    live_ms = statistics.median(_milliseconds(lambda: job.step(*next(feed))) for _ in range(10))
    step = pg.record(job.step)
    first = [_milliseconds(lambda: step(*next(feed)))]
    with asked() as snapshots:
        first.append(_milliseconds(lambda: step(*next(feed))))
    first += [_milliseconds(lambda: step(*next(feed))) for _ in range(2)]
    beyond = sum(max(0.0, took - live_ms) for took in first)
    numbers = {"live ms": live_ms, "beyond ms": beyond, "live steps": beyond / live_ms}
    numbers["capturing call, live steps"] = (max(first) - live_ms) / live_ms
    numbers["snapshots"] = len(snapshots)
    if device != "cpu":
        theirs, warmup = gpt2(device, torch.compile if compiled else plain, capturable=True), 3
        batch = [t.clone() for t in theirs.batches[0]]
        theirs.step(*batch)
        took = _milliseconds(lambda: harness.capture(lambda: theirs.step(*batch), warmup))
        numbers["by hand, live steps"] = (took - (warmup + 1) * live_ms) / live_ms
    numbers |= {f"call {index} ms": took for index, took in enumerate(first, 1)}
    return {name: round(number, 3) for name, number in numbers.items()}


@contextmanager
def asked() -> Iterator[list[None]]:
    """One for each time that the allocator is asked for a snapshot inside the block."""
    found, snapshot = list[None](), torch._C._cuda_memorySnapshot if torch.cuda.is_available() else None

    def asking(*pool: Any) -> Any:
        found.append(None)
        return snapshot(*pool)

    if snapshot is not None:
        torch._C._cuda_memorySnapshot = asking
    try:
        yield found
    finally:
        if snapshot is not None:
            torch._C._cuda_memorySnapshot = snapshot


def _milliseconds(call: Callable[[], object]) -> float:
    harness.synchronize()
    begin = time.perf_counter()
    call()
    harness.synchronize()
    return (time.perf_counter() - begin) * 1e3


# ---- peak memory ---------------------------------------------------------------------------------

_MEMORY: dict[str, Callable[[Training], harness.Step]] = {"live": live, "recorded": recorded, "by hand": by_hand}


def print_memory(method: str, compiled: bool, device: str) -> int:
    """Peaks (MiB) of making one method's step and running it ten times in this process, as one JSON line."""
    options = {"capturable": True} if method == "by hand" else {}
    job = gpt2(device, torch.compile if compiled else plain, **options)
    job.step(*job.batches[0])  # compiling has a peak of its own, and the optimizer's state is there from now on
    print(json.dumps(_peaks(lambda: _MEMORY[method](job))))
    return 0


def _peaks(make: Callable[[], harness.Step]) -> dict[str, float]:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step = make()
    for _ in range(10):
        step()
    torch.cuda.synchronize()
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"allocated": round(allocated / 2**20, 1), "reserved": round(reserved / 2**20, 1)}


def memory_of(method: str, compiled: bool) -> dict[str, float]:
    command = [sys.executable, __file__, "--memory", method, *(["--compiled"] if compiled else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"{method}: {done.stderr[-400:]}")
    peaks: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return peaks


def compare_memory(report: harness.Report, compiled: bool) -> None:
    suffix = COMPILED if compiled else ""
    peaks = {}
    with ThreadPoolExecutor() as beside:  # each process counts its own
        waiting = {method: beside.submit(memory_of, method, compiled) for method in _MEMORY}
        for method, peak in waiting.items():
            with harness.trying(report, f"memory of {method}{suffix}"):
                peaks[method] = peak.result()
    report.figures["peak MiB" + suffix] = peaks
    if "live" in peaks and "recorded" in peaks:
        ratios = {kind: round(peaks["recorded"][kind] / peaks["live"][kind], 3) for kind in ("allocated", "reserved")}
        report.figures["peak, recorded / live" + suffix] = ratios


# ---- all of it -----------------------------------------------------------------------------------


def _arguments() -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--memory", choices=list(_MEMORY), help="only print the peak memory of this method")
    parser.add_argument("--set-up", action="store_true", help="only print what recordings cost")
    parser.add_argument("--compiled", action="store_true", help="with --memory or --set-up: compiled inside")
    return parser.parse_args()


def _judge(report: harness.Report) -> None:
    time_ratio = report.ratio("phonograph" + COMPILED)
    setup = report.figures.get("set-up" + COMPILED, {}).get("second", {}).get("live steps")
    memory = report.figures.get("peak, recorded / live", {}).get("allocated")
    if setup is not None and memory is not None:
        report.decide(time_ratio <= TIME_LIMIT and memory <= MEMORY_LIMIT and setup <= SETUP_LIMIT, time_ratio)


def main() -> int:
    arguments = _arguments()
    if arguments.memory:
        return print_memory(arguments.memory, arguments.compiled, arguments.device)
    if arguments.set_up:
        print(json.dumps(setup_cost(arguments.device, arguments.compiled), indent=1))
        return 0
    report = harness.Report(CLAIM, TARGET, arguments)
    harness.measure(report, harness.prepare(report, methods(arguments.device, not arguments.quick)))
    for compiled in (False, True):
        with harness.trying(report, "set-up"):
            report.figures["set-up" + COMPILED * compiled] = setup_cost(arguments.device, compiled)
    if arguments.device != "cpu":
        for compiled in (False, True)[: 1 if arguments.quick else 2]:
            compare_memory(report, compiled)
    _judge(report)
    return harness.finish(report)


if __name__ == "__main__":
    raise SystemExit(main())
