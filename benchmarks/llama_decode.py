"""Greedy decoding with a Llama of 1.2 billion weights, batch 1, transformers' StaticCache, bf16: time a token.

    python benchmarks/llama_decode.py

The token that a step returns is the next step's input; the position is moved on within the step. The graph captured by
hand writes its token back into its own input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import harness
import phonograph as pg
from harness import COMPILED
from workloads import Decoding, llama_decoding, llama_model

CLAIM, LIMIT = "llama_decode", 1.02
TARGET = f"compiled inside: at most {LIMIT} x the graph captured by hand"


def looping(decoding: Decoding, wrap: Callable[[Any], Any] = lambda step: step) -> harness.Step:
    call, token = wrap(decoding.step), decoding.token

    def step() -> None:
        nonlocal token
        token = call(token, decoding.position)

    return step


def cloning(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Reduce-overhead's own output must not be fed back: the next run overwrites it."""
    return lambda token, position: call(token.clone(), position)


def by_hand(decoding: Decoding) -> harness.Step:
    token, position = decoding.token, decoding.position
    graph, _ = harness.capture(lambda: token.copy_(decoding.step(token, position)))
    return harness.keeping(lambda: graph.replay(), decoding)


def reduce_overhead(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled = torch.compile(function, mode="reduce-overhead")

    def call(token: torch.Tensor, position: torch.Tensor) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(token, position)

    return call


def methods(model: nn.Module, device: str, peers: bool) -> dict[str, Callable[[], harness.Step]]:
    def decoding(wrap: Callable[[Any], Any] = lambda function: function) -> Decoding:
        return llama_decoding(model, device, wrap=wrap)

    ours: dict[str, Callable[[], harness.Step]] = {
        "live": lambda: looping(decoding()),
        "by hand": lambda: by_hand(decoding()),
        "phonograph": lambda: looping(decoding(), pg.record),
        "by hand" + COMPILED: lambda: by_hand(decoding(torch.compile)),
        "phonograph" + COMPILED: lambda: looping(decoding(torch.compile), pg.record),
    }
    others: dict[str, Callable[[], harness.Step]] = {
        "torch.compile": lambda: looping(decoding(torch.compile)),
        "reduce-overhead": lambda: looping(decoding(reduce_overhead), cloning),
    }
    return ours | others if peers else ours


def main() -> int:
    arguments = harness.parser(__doc__).parse_args()
    report = harness.Report(CLAIM, TARGET, arguments)
    model = llama_model(arguments.device)
    steps = harness.prepare(report, methods(model, arguments.device, not arguments.quick))
    harness.measure(report, steps)
    ratio = report.ratio("phonograph" + COMPILED)
    report.decide(ratio <= LIMIT, ratio)
    return harness.finish(report)


if __name__ == "__main__":
    raise SystemExit(main())
