"""Peak memory of models recorded as pairs where activations are what counts: recompute, and a pipeline's micro-batches.

    python benchmarks/activation_memory.py

* GPT-2 124M, 8 x 512 tokens, every block recomputed in the backward (`gradient_checkpointing_enable`), dropout on.
* The same with `zero_grad` between the forward and the backward, as Lightning has it: the gradients of the step before are
  there while the forward runs. It has no target.
* A transformer of 12 layers in 4 chunks, 8 micro-batches of 4 x 256 in the order of 1F1B: 4, 3, 2 and 1 in flight.

Each peak is measured in a process of its own (`--memory WORK METHOD`), recording included: what one method leaves behind
would count for the next. What recordings keep for their replays counts as free with the allocator as soon as they are captured;
so what is compared is the larger of the peak allocated and of what stays reserved when all caches are emptied. ("Peak reserved"
is all that the device has given, caches included: live could do with less.) Losses are compared with deterministic kernels,
times without.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import harness
import phonograph as pg

CLAIM = "activation_memory"
RECOMPUTE_LIMIT, PIPELINE_LIMIT = 1.05, 1.1
TARGET = f"peak over live: at most {RECOMPUTE_LIMIT} with recompute, at most {PIPELINE_LIMIT} for 1F1B; losses equal"
STAGES, MICRO_BATCHES = 4, 8

Record = Callable[[Any], Any]


def gpt2_recomputing(device: str, record: Record, beside: Record, whole: Record, late: bool = False) -> harness.Step:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    small = {"n_layer": 2, "n_embd": 64, "n_head": 2} if device == "cpu" else {}
    rows, length = (2, 32) if device == "cpu" else (8, 512)
    config = GPT2Config(n_positions=512, use_cache=False, **small)
    model = GPT2LMHeadModel(config).to(device, torch.bfloat16).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    seen = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).tril()
    batches = itertools.cycle([torch.randint(config.vocab_size, (rows, length), device=device) for _ in range(4)])
    record(model)
    update = beside(optimizer.step)

    def step(tokens: Tensor) -> Tensor:
        if not late:
            optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens, attention_mask=seen).loss
        if late:
            optimizer.zero_grad()
        loss.backward()
        update()
        return loss.detach()

    called = whole(step)
    return lambda: called(next(batches))


class Chunk(nn.Module):
    """Some layers of a causal transformer; the last chunk gives the loss."""

    def __init__(self, width: int, layers: int, last: bool) -> None:
        super().__init__()
        make = nn.TransformerEncoderLayer
        self.layers = nn.ModuleList(
            make(width, width // 64, 4 * width, dropout=0.1, batch_first=True, norm_first=True) for _ in range(layers)
        )
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean() if self.last else x


def one_forward_one_backward(stages: int, batches: int) -> Iterator[tuple[int, int, bool]]:
    """(stage, micro-batch, whether it is a forward), in an order in which one process can run all stages of 1F1B."""
    waiting = []
    for stage in range(stages):
        ahead = min(stages - stage - 1, batches)
        forwards, backwards = [(stage, m, True) for m in range(batches)], [(stage, m, False) for m in range(batches)]
        steady = [action for pair in zip(forwards[ahead:], backwards, strict=False) for action in pair]
        waiting.append([*forwards[:ahead], *steady, *backwards[batches - ahead :]])
    done: set[tuple[int, int, bool]] = set()
    while any(waiting):
        for actions in waiting:
            stage, m, forward = actions[0] if actions else (0, 0, True)
            needed = (stage - 1, m, True) if forward else (stage + 1, m, False)
            if actions and (needed in done or needed[0] in (-1, stages)):
                done.add(actions.pop(0))
                yield stage, m, forward


def pipeline(device: str, record: Record, beside: Record, whole: Record) -> harness.Step:
    torch.manual_seed(0)
    width, shape = (64, (2, 16)) if device == "cpu" else (768, (4, 256))
    chunks = [Chunk(width, 3, stage == STAGES - 1).to(device, torch.bfloat16).train() for stage in range(STAGES)]
    optimizer = torch.optim.AdamW([p for c in chunks for p in c.parameters()], lr=1e-4, fused=True)
    batches = [torch.randn(*shape, width, device=device, dtype=torch.bfloat16) for _ in range(MICRO_BATCHES)]
    order = list(one_forward_one_backward(STAGES, MICRO_BATCHES))
    for chunk in chunks:
        record(chunk)
    update = beside(optimizer.step)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=False)  # they stay where the recorded optimizer finds them
        given: dict[tuple[int, int], Tensor] = {}
        made: dict[tuple[int, int], Tensor] = {(-1, m): x for m, x in enumerate(batches)}
        losses = []
        for stage, m, forward in order:
            if forward:
                given[stage, m] = made[stage - 1, m].detach().requires_grad_(stage > 0)
                made[stage, m] = chunks[stage](given[stage, m])
            elif stage == STAGES - 1:
                losses.append(made.pop((stage, m)))
                losses[-1].backward()
            else:
                made.pop((stage, m)).backward(given.pop((stage + 1, m)).grad)
        update()
        return torch.stack([loss.detach() for loss in losses])

    return whole(step)  # type: ignore[no-any-return]


LATE = "GPT-2 recomputing with a late zero_grad"
WORKS: dict[str, Callable[..., harness.Step]] = {
    "GPT-2 recomputing": gpt2_recomputing, LATE: partial(gpt2_recomputing, late=True), "1F1B": pipeline,
}  # fmt: skip
METHODS: dict[str, tuple[Record, Record, Record]] = {
    "live": (lambda m: m, lambda f: f, lambda f: f),
    "pair": (pg.record, pg.record, lambda f: f),
    "whole step": (lambda m: m, lambda f: f, pg.record),
}


def print_memory(work: str, method: str, device: str) -> int:
    """The peaks (MiB) of making one method's step and running it eight times, as one JSON line."""
    step = WORKS[work](device, *METHODS[method])
    for _ in range(8):
        step()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    peak, kept, reserved = torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()
    numbers = {"needed": max(peak, kept), "peak allocated": peak, "kept": kept, "peak reserved": reserved}
    print(json.dumps({name: round(number / 2**20, 1) for name, number in numbers.items()}))
    return 0


def memory_of(work: str, method: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--memory", work, method]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"{work}, {method}: {done.stderr[-400:]}")
    peaks: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return peaks


def losses_of(work: str, method: str, device: str) -> Tensor:
    torch.use_deterministic_algorithms(True)
    try:
        step = WORKS[work](device, *METHODS[method])
        torch.manual_seed(1)
        return torch.stack([torch.as_tensor(step()).clone() for _ in range(8)])
    finally:
        torch.use_deterministic_algorithms(False)


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--memory", nargs=2, metavar=("WORK", "METHOD"), help="only print this peak")
    arguments: argparse.Namespace = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic kernels
    device: str = arguments.device
    if arguments.memory:
        return print_memory(*arguments.memory, device)
    report = harness.Report(CLAIM, TARGET, arguments)
    met = []
    for work, limit in zip(WORKS, (RECOMPUTE_LIMIT, math.inf, PIPELINE_LIMIT), strict=True):
        with harness.trying(report, work):
            live = losses_of(work, "live", device)
            equal = {m: bool(torch.equal(losses_of(work, m, device), live)) for m in ("pair", "whole step")}
            report.figures[f"{work}: losses equal"] = equal
            steps = {f"{m}, {work}": (lambda m=m: WORKS[work](device, *METHODS[m])) for m in METHODS}
            harness.measure(report, harness.prepare(report, steps), calls=10, reference="live")
            if device != "cpu":
                with ThreadPoolExecutor() as beside:  # each process counts its own
                    peaks = dict(zip(METHODS, beside.map(partial(memory_of, work), METHODS), strict=True))
                report.figures[f"{work}: peak MiB"] = peaks
                ratios = {m: {k: round(n / peaks["live"][k], 3) for k, n in p.items()} for m, p in peaks.items()}
                report.figures[f"{work}: peak over live"] = ratios
                met.append(ratios["pair"]["needed"] <= limit and all(equal.values()))
    report.decide(bool(met) and all(met))
    return harness.finish(report)


if __name__ == "__main__":
    raise SystemExit(main())
