"""Eight tiny kernels, a new input tensor each call, the last output kept by the caller: what a call itself costs.

    python benchmarks/tiny_kernels.py

The graph captured by hand stands here twice: as it is (its output is overwritten by the next call, so a caller who
keeps one reads another call's numbers) and with the output cloned, which gives what eager gives.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

import harness
import phonograph as pg

CLAIM, TARGET_US = "tiny_kernels", 15.0
TARGET = f"phonograph at most {TARGET_US:.0f} µs of CPU a call, and less than every peer"
INPUTS = 256  # different tensors, so that no address comes back soon

Function = Callable[[Tensor], Tensor]


def chain(x: Tensor) -> Tensor:
    for _ in range(8):
        x = x + 1
    return x


def cloned(function: Function) -> Function:
    return lambda x: function(x).clone()


def reduce_overhead() -> Function:
    return torch.compile(chain, mode="reduce-overhead")


def tensordict() -> Function:
    from tensordict.nn import CudaGraphModule

    return CudaGraphModule(chain, warmup=2)


def methods(example: Tensor, peers: bool) -> dict[str, Callable[[], Function]]:
    """Ways to make `chain` fast, each as a function that makes the fast one."""
    ours: dict[str, Callable[[], Function]] = {
        "eager": lambda: chain,
        "by hand": lambda: harness.by_hand(chain, [example]),
        "by hand and cloned": lambda: cloned(harness.by_hand(chain, [example])),
        "phonograph": lambda: pg.record(chain),
        "phonograph (borrow)": lambda: pg.record(chain, outputs="borrow"),
    }
    others: dict[str, Callable[[], Function]] = {
        "torch.compile": lambda: torch.compile(chain),
        "reduce-overhead": reduce_overhead,
        "make_graphed_callables": lambda: torch.cuda.make_graphed_callables(chain, (example.clone(),)),
        "tensordict CudaGraphModule": tensordict,
    }
    return ours | others if peers else ours


def looping(function: Function, inputs: list[Tensor]) -> harness.Step:
    """A loop's body: it takes the next input and keeps the output until the next one is there."""
    feed, kept = itertools.cycle(inputs), [torch.empty(0)]

    def step() -> None:
        kept[0] = function(next(feed))

    return step


def keeps_its_outputs(function: Function, inputs: list[Tensor]) -> bool:
    """Whether outputs are right, and still are after later calls."""
    kept = [function(x) for x in inputs[:6]]
    return all(torch.equal(output, x + 8) for output, x in zip(kept, inputs, strict=False))


def main() -> int:
    arguments = harness.parser(__doc__).parse_args()
    report = harness.Report(CLAIM, TARGET, arguments)
    inputs = [torch.full((64, 64), float(n), device=arguments.device) for n in range(INPUTS)]
    kept_right, steps = {}, {}
    with torch.no_grad():
        for method, make in harness.possible(methods(inputs[0], not arguments.quick), arguments.device).items():
            with harness.trying(report, method):
                function = make()
                kept_right[method] = _survives(function, inputs)
                steps[method] = looping(function, inputs)
        harness.measure(report, steps, calls=500, warmup=300)
    for row in report.rows:
        if row.method in kept_right:
            row.notes["kept outputs"] = kept_right[row.method]
    _judge(report)
    return harness.finish(report)


def _survives(function: Function, inputs: list[Tensor]) -> str:
    """A peer may also refuse to let a kept output be read; that is right, but no use."""
    try:
        return "right" if keeps_its_outputs(function, inputs) else "WRONG"
    except (RuntimeError, pg.StaleOutput):
        return "refused"


def _judge(report: harness.Report) -> None:
    # Below every way that gives the caller what eager gives, or claims to; the bare graph is the floor, not a peer.
    floor = ("phonograph", "by hand")
    ours = report.row("phonograph")
    peers = [row.cpu_us for row in report.rows if row.cpu_us is not None and not row.method.startswith(floor)]
    if ours is not None and ours.cpu_us is not None:
        report.decide(ours.cpu_us <= TARGET_US and ours.cpu_us < min(peers))


if __name__ == "__main__":
    raise SystemExit(main())
