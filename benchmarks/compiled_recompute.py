"""GPT-2 124M compiled, with dropout 0.1 and every block recomputed in its backward: the step recorded in three ways.

    python benchmarks/compiled_recompute.py

bf16, 2 x 256 tokens, AdamW(fused=True), deterministic algorithms throughout. The whole step is recorded with the compiled model
inside, the compiled model as a pair, or compiled with the backend. All compile the same code: without donated buffers, which a
pair needs. Each way first runs eight steps from the same seeds; losses and weights are compared with those of the same compiled
code live, by their bits. Then the same models are timed, taking turns. How many of the first calls were replayed is told: one
that runs live is equal, too. By hand, the generators that compiled code keeps for itself are looked for and registered with the
graph.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx

import harness
import phonograph as pg
from phonograph.compile import backend, graphs
from workloads import Training, gpt2

CLAIM = "compiled_recompute"
LIMIT, STEPS = 1.02, 8
TARGET = f"bits of the same compiled code live; at most {LIMIT} x by hand, where that captures; below reduce-overhead"
WAYS = ("whole step", "pair", "backend")


def job(device: str, compiled: Callable[[nn.Module], Any], **options: Any) -> Training:
    def wrap(model: nn.Module) -> Any:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
        return compiled(model)

    return gpt2(device, wrap, **options)


def alone(model: nn.Module) -> Any:
    """Compiled by itself: Inductor's code is shared by models of a class, and with it the generators that it keeps."""
    return torch.compile(
        model, backend=lambda graph, example: compile_fx(graph, example)
    )  # Dynamo tells backends apart by identity


def made(device: str, way: str) -> tuple[Training, Callable[..., Tensor], Callable[[], int]]:
    """The job, its step, and what says how many calls were replayed."""
    if way == "pair":
        found: list[Any] = []

        def pair(model: nn.Module) -> Any:
            found.append(pg.record(alone(model)))
            return found[0]

        training = job(device, pair)
        return training, training.step, lambda: pg.stats(found[0]).replayed
    if way == "backend":
        training = job(device, lambda model: torch.compile(model, backend=backend))
        return training, training.step, lambda: sum(pg.stats(graph).replayed for graph in graphs())
    training = job(device, alone)
    if way == "whole step":
        step = pg.record(training.step)
        return training, step, lambda: pg.stats(step).replayed
    return training, training.step, int


@dataclass
class Way:
    """A job that has run its first steps."""

    found: list[Tensor]  # losses of the first steps, and the weights after them
    replayed: int
    step: harness.Step


def begun(device: str, way: str) -> Way:
    """The job made, its first steps run."""
    training, step, replayed = made(device, way)
    feed = training.forever()
    torch.manual_seed(1)
    losses = [step(*batch).clone() for batch in itertools.islice(feed, STEPS)]
    weights = [p.detach().clone() for p in training.model.parameters()]
    return Way([*losses, *weights], replayed(), lambda: step(*next(feed)))


def own_generators() -> list[torch.Generator]:
    """Those that compiled code keeps for what is recomputed: a graph has to know them, and nothing public names them."""
    lists = [x for x in gc.get_objects() if type(x) is list and x and isinstance(x[0], torch.Generator)]
    return [*dict.fromkeys(g for x in lists for g in x if g.device.type == "cuda")]


def by_hand(device: str) -> harness.Step:
    training = job(device, alone, capturable=True)
    call = harness.by_hand(training.step, training.batches[0], generators=own_generators)
    feed = training.forever()
    return lambda: call(*next(feed))


def reduce_overhead(device: str) -> harness.Step:
    training = job(device, lambda model: torch.compile(model, mode="reduce-overhead"))
    feed = training.forever()
    return lambda: training.step(*next(feed))


def main() -> int:
    arguments = harness.parser(__doc__).parse_args()
    device = arguments.device
    torch._functorch.config.donated_buffer = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    report = harness.Report(CLAIM, TARGET, arguments)
    begin = time.perf_counter()
    ways: dict[str, Way] = {}
    for way in ("live", *WAYS):
        with harness.trying(report, way):
            ways[way] = begun(device, way)
            print(f"{way}: {STEPS} steps, after {time.perf_counter() - begin:.0f} s", flush=True)
        if way in WAYS and way in ways and "live" in ways:
            report.figures[f"{way}: equal"] = all(map(torch.equal, ways["live"].found, ways[way].found))
            report.figures[f"{way}: replayed"] = ways[way].replayed
            print(f"  equal: {report.figures[f'{way}: equal']}, replayed: {ways[way].replayed}", flush=True)
    equal = all(report.figures.get(f"{way}: equal") for way in WAYS)
    methods: dict[str, Callable[[], harness.Step]] = {
        ("live" if way == "live" else f"phonograph: {way}"): lambda begun=begun: begun.step for way, begun in ways.items()
    }
    methods["by hand"] = lambda: by_hand(device)
    if not arguments.quick:
        methods["reduce-overhead"] = lambda: reduce_overhead(device)
    harness.measure(report, harness.prepare(report, methods))
    whole = report.row("phonograph: whole step")
    rival = report.row("reduce-overhead")
    if whole is not None and whole.wall_us and rival is not None and rival.wall_us:
        report.figures["whole step / reduce-overhead"] = round(whole.wall_us / rival.wall_us, 3)
        ratio = whole.ratio if whole.ratio is not None else 0.0  # where nobody captures by hand
        report.decide(equal and ratio <= LIMIT and whole.wall_us < rival.wall_us, whole.wall_us)
    return harness.finish(report)


if __name__ == "__main__":
    raise SystemExit(main())
