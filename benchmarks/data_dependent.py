"""Programs that depend on data: right, and how much of each is recorded.

    python benchmarks/data_dependent.py

A mixture of experts that asks the host which rows an expert gets, Mixtral of transformers (tiny), indices by a mask,
`torch.unique`, and an early exit, in inference and in training. Each runs through `torch.compile(f, backend="phonograph")` with
the graph's operators as they are inside, which splits it where it depends on data; and recorded by itself with
`fallback="split"`, which runs live what it cannot split. The results of all calls, and the weights after them, are compared
with eager's, every bit (of Mixtral closely: its grouped matrix products add in another order where Dynamo has decomposed them).

The recorded share is that of eager's operators which the host does not launch any more, counted by torch's profiler after the
calls in which things are recorded. (Not on the CPU: there a replay calls operators as well.)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

import harness
import phonograph as pg
from phonograph.compile import backend

CLAIM, TARGET = "data_dependent", "all results right"
WARM, SHOWN = 12, 6  # calls, and those of them whose operators are counted
CLOSE = 1e-4


# ---- the programs --------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int, inside: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inside), nn.Linear(inside, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


class Experts(nn.Module):
    """Which rows an expert gets is known on the host only."""

    def __init__(self, experts: int = 4, width: int = 64) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(Block(width, 2 * width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        best, out = scores.argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (best == number).nonzero().squeeze(1)
            if rows.numel():
                out = out.index_add(0, rows, expert(x[rows]) * scores[rows, number, None])
        return x + out


class Masked(nn.Module):
    """The rows that a mask says are worked on, between layers that work on all."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.before, self.inside, self.after = (nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        chosen = y[y.sum(-1) > 0]
        return self.after(x + self.inside(chosen).mean(0))


class Unique(nn.Module):
    """How often each of the rounded values is there."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.before, self.after = (nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        values, counts = torch.unique((y.detach() * 4).round(), return_counts=True)
        return self.after(y + (values * counts).sum() / x.numel())


class EarlyExit(nn.Module):
    """Layers until one is sure of it."""

    def __init__(self, layers: int = 4, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
            if x.abs().mean() > 0.9:
                break
        return x


def rows(device: str, number: int) -> Tensor:
    torch.manual_seed(number)
    return torch.randn(64, 64, device=device)


def tokens(device: str, number: int) -> Tensor:
    torch.manual_seed(number)
    return torch.randint(1000, (2, 64), device=device)


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(
        vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=128, use_cache=False, attention_dropout=0.0,
    ))  # fmt: skip


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[[str, int], Tensor]]] = {
    "a mixture of experts": (Experts, rows),
    "Mixtral": (mixtral, tokens),
    "indices by a mask": (Masked, rows),
    "torch.unique": (Unique, rows),
    "an early exit": (EarlyExit, rows),
}


# ---- how they run --------------------------------------------------------------------------------


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend=backend, options={"inner": "eager", "fallback": "split"})


METHODS: dict[str, Callable[[nn.Module], Any]] = {
    "eager": lambda model: model,
    "compiled": compiled,
    "recorded": partial(pg.record, fallback="split"),
}


def inference(model: nn.Module, called: Any, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return [t.clone() for t in tensors(called(x))]


def training(model: nn.Module, called: Any, x: Tensor) -> list[Tensor]:
    """A step of gradient descent, outside of what is recorded."""
    model.zero_grad()
    results = tensors(called(x))
    results[0].float().square().mean().backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= 0.05 * p.grad
    return [t.detach().clone() for t in results]  # or it would hold the outputs of all calls


def tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def operators(step: Callable[[], list[Tensor]]) -> tuple[list[Tensor], int]:
    """What a step gives, and how many operators it calls that are not called by another."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        results = step()
    events = [e for e in seen.events() if e.name.startswith("aten::")]
    return results, sum(e.cpu_parent is None or not e.cpu_parent.name.startswith("aten::") for e in events)


def run(model: nn.Module, way: Any, method: str, inputs: list[Tensor]) -> Iterator[tuple[list[Tensor], int]]:
    """The results of each call, and its operators (0 where they were not counted)."""
    torch.manual_seed(0)
    called = METHODS[method](model)
    for number, x in enumerate(inputs):
        if number < len(inputs) - SHOWN:
            yield way(model, called, x), 0
        else:
            yield operators(partial(way, model, called, x))
    yield [p.detach().clone() for p in model.parameters()], 0


def difference(ours: list[list[Tensor]], theirs: list[list[Tensor]]) -> float:
    gaps = [(a.double() - b.double()).abs().max().item() / max(b.double().abs().max().item(), 1e-9)
            for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True) if not torch.equal(a, b)]  # fmt: skip
    return max(gaps, default=0.0)


def measure(name: str, way: Any, device: str, calls: int) -> dict[str, Any]:
    make, new = PROGRAMS[name]
    torch.manual_seed(0)
    first = make().to(device).train(way is training)
    inputs = [new(device, n % 4) for n in range(calls)]
    found: dict[str, Any] = {}
    seen = {}
    for method in METHODS:
        torch._dynamo.reset()
        ran = [*run(copy.deepcopy(first), way, method, inputs)]
        seen[method] = [results for results, _ in ran], sum(count for _, count in ran)
        if method != "eager":
            found[method] = {"difference": difference(seen[method][0], seen["eager"][0])}
            if device != "cpu":
                found[method]["recorded share"] = round(1 - seen[method][1] / seen["eager"][1], 3)
    return found


def main() -> int:
    arguments = harness.parser(__doc__).parse_args()
    torch.use_deterministic_algorithms(True, warn_only=True)
    report = harness.Report(CLAIM, TARGET, arguments)
    right = []
    for name in PROGRAMS:
        for way in (inference, training):
            case = f"{name}, {way.__name__}"
            with harness.trying(report, case):
                found = measure(name, way, arguments.device, WARM if arguments.quick else 2 * WARM)
                report.figures[case] = found
                right += [one["difference"] <= (CLOSE if name == "Mixtral" else 0.0) for one in found.values()]
    report.decide(len(right) == 2 * (len(METHODS) - 1) * len(PROGRAMS) and all(right))
    return harness.finish(report)


if __name__ == "__main__":
    raise SystemExit(main())
