"""GPT-2 124M compiled, with dropout 0.1 and every block recomputed in its backward: the step recorded in three ways.

    python benchmarks/compiled_recompute.py

bf16, 2 x 256 tokens, AdamW(fused=True). The whole step is recorded with the compiled model inside, the compiled model as a
pair, or compiled with the backend. All compile the same code: without donated buffers, which a pair needs. First each way runs
eight steps from the same seeds, with deterministic algorithms; losses and weights are compared with the same compiled code
live, by their bits. Then times are measured, without. How many calls were replayed is told: one that runs live is equal, too.
By hand, the generators that compiled code keeps for itself are looked for and registered with the graph.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn

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


def made(device: str, way: str) -> tuple[Training, Callable[..., Tensor], Callable[[], int]]:
    """The job, its step, and what says how many calls were replayed."""
    if way == "pair":
        found: list[Any] = []

        def pair(model: nn.Module) -> Any:
            found.append(pg.record(torch.compile(model)))
            return found[0]

        training = job(device, pair)
        return training, training.step, lambda: pg.stats(found[0]).replayed
    if way == "backend":
        training = job(device, lambda model: torch.compile(model, backend=backend))
        return training, training.step, lambda: sum(pg.stats(graph).replayed for graph in graphs())
    training = job(device, torch.compile)
    if way == "whole step":
        step = pg.record(training.step)
        return training, step, lambda: pg.stats(step).replayed
    return training, training.step, int


def bits(device: str, way: str) -> tuple[list[Tensor], int]:
    """Losses of some steps, and the weights after them; and how many calls were replayed."""
    torch._dynamo.reset()
    training, step, replayed = made(device, way)
    torch.manual_seed(1)
    losses = [step(*batch).clone() for batch in itertools.islice(training.forever(), STEPS)]
    return [*losses, *(p.detach().clone() for p in training.model.parameters())], replayed()


def compare(report: harness.Report, device: str) -> bool:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        expected, _ = bits(device, "live")
        again, _ = bits(device, "live")
        report.figures["live is the same twice"] = all(map(torch.equal, expected, again))
        for way in WAYS:
            with harness.trying(report, f"bits of {way}"):
                found, replayed = bits(device, way)
                report.figures[f"{way}: equal"] = all(map(torch.equal, expected, found))
                report.figures[f"{way}: replayed"] = replayed
    finally:
        torch.use_deterministic_algorithms(False)
    return all(report.figures.get(f"{way}: equal") for way in WAYS)


def stepping(device: str, way: str) -> harness.Step:
    training, step, _ = made(device, way)
    feed = training.forever()
    return lambda: step(*next(feed))


def own_generators() -> list[torch.Generator]:
    """Those that compiled code keeps for what is recomputed: a graph has to know them, and nothing public names them."""
    lists = [x for x in gc.get_objects() if type(x) is list and x and isinstance(x[0], torch.Generator)]
    return [*dict.fromkeys(g for x in lists for g in x if g.device.type == "cuda")]


def by_hand(device: str) -> harness.Step:
    training = job(device, torch.compile, capturable=True)
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
    report = harness.Report(CLAIM, TARGET, arguments)
    equal = compare(report, device)
    torch._dynamo.reset()
    methods: dict[str, Callable[[], harness.Step]] = {
        "live": lambda: stepping(device, "live"),
        "by hand": lambda: by_hand(device),
        **{f"phonograph: {way}": lambda way=way: stepping(device, way) for way in WAYS},
    }
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
