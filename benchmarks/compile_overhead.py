"""Eight tiny kernels through `torch.compile(f, backend="phonograph")`: what a call itself costs, beside `reduce-overhead`.

    python benchmarks/compile_overhead.py

A new input tensor each call, the last output kept by the caller, gradients off. Inductor makes one kernel of the eight.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import harness
import tiny_kernels
from phonograph.compile import backend

CLAIM, LIMIT = "compile_overhead", 0.5
TARGET = f"the backend's CPU time a call less than {LIMIT} x that of reduce-overhead"


def through(inner: str) -> Callable[[], tiny_kernels.Function]:
    # `dynamo.reset` between methods would drop what is measured: each method compiles a function of its own.
    return lambda: torch.compile(_own(tiny_kernels.chain), backend=backend, options={"inner": inner})


def _own(function: tiny_kernels.Function) -> tiny_kernels.Function:
    space = dict(function.__globals__)
    made: tiny_kernels.Function = type(function)(function.__code__.replace(), space)  # type: ignore[call-arg]
    return made


def keeping_its_output(function: tiny_kernels.Function) -> tiny_kernels.Function:
    """What `reduce-overhead` asks of callers who keep an output."""

    def call(x: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return function(x).clone()

    return call


def main() -> int:
    arguments = harness.parser(__doc__).parse_args()
    report = harness.Report(CLAIM, TARGET, arguments)
    inputs = [torch.full((64, 64), float(n), device=arguments.device) for n in range(tiny_kernels.INPUTS)]
    makers: dict[str, Callable[[], tiny_kernels.Function]] = {
        "eager": lambda: tiny_kernels.chain,
        "backend, Inductor inside": through("inductor"),
        "backend, eager inside": through("eager"),
        "torch.compile": lambda: torch.compile(_own(tiny_kernels.chain)),
        "reduce-overhead": lambda: torch.compile(_own(tiny_kernels.chain), mode="reduce-overhead"),
        "reduce-overhead, output kept": lambda: keeping_its_output(
            torch.compile(_own(tiny_kernels.chain), mode="reduce-overhead")
        ),
    }
    steps = {}
    with torch.no_grad():
        for method, make in makers.items():
            with harness.trying(report, method):
                steps[method] = tiny_kernels.looping(make(), inputs)
        harness.measure(report, steps, calls=500, warmup=300, reference="reduce-overhead")
    rows = {row.method: row.cpu_us for row in report.rows if row.cpu_us is not None}
    if {"backend, Inductor inside", "reduce-overhead"} <= rows.keys():
        shares = {m: round(rows[m] / rows["reduce-overhead"], 3) for m in rows if m.startswith("backend")}
        report.figures["CPU time over that of reduce-overhead"] = shares
        report.decide(shares["backend, Inductor inside"] < LIMIT)
    return harness.finish(report)


if __name__ == "__main__":
    raise SystemExit(main())
