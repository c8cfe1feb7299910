"""A model recorded in place, its loss and optimizer outside, beside the whole step recorded: what the split costs.

    python benchmarks/pairs.py

Three training steps: PPO (two MLPs of 2 x 64), GPT-2 124M, ResNet-50. The peers wrap the model as well. `reduce-overhead`
compiles it before; so "compiled" is beside it, a pair of the model that is compiled in the same way.

Besides, what a pair of PPO costs at least ("by hand"): three graphs captured by hand (forward, backward, optimizer) and one
node of autograd that replays the first two and hands the gradients to the parameters. It checks nothing, and its gradients are
overwritten by the next call's. "by hand past autograd" has no edges to the parameters, and sets `.grad` itself: what hooks of
theirs, `torch.autograd.grad` and other uses of them in the same graph would not hear of.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import gpt2_step
import harness
import phonograph as pg
import ppo_update
import workloads

CLAIM, LIMIT = "pairs", 1.25
TARGET = f"model recorded, optimizer recorded beside, at most {LIMIT} x the whole step recorded, and below the peers"
WHOLE, PAIR = "whole step", "model and optimizer"

Make = Callable[..., Callable[..., Any]]


record: Callable[..., Any] = partial(pg.record, keep="always")  # what a pair costs, whether it pays or not


def ppo(device: str) -> tuple[Make, list[Any]]:
    data = ppo_update.minibatches(device)
    return partial(ppo_update.updater, device), data


def gpt2(device: str) -> tuple[Make, list[Any]]:
    return lambda *args, **options: workloads.gpt2(device, *args, **options).step, workloads.gpt2(device).batches


def resnet50(device: str) -> tuple[Make, list[Any]]:
    return lambda *args, **options: workloads.resnet50(device, *args, **options).step, workloads.resnet50(device).batches


WORKLOADS = {"PPO": ppo, "GPT-2": gpt2, "ResNet-50": resnet50}


def looping(step: Callable[..., Any], batches: list[Any]) -> harness.Step:
    feed = itertools.cycle(batches)
    return lambda: step(*next(feed))


def reduce_overhead(model: Any) -> Callable[..., Any]:
    return torch.compile(model, mode="reduce-overhead")


def graphed(examples: tuple[Tensor, ...], model: Any) -> Callable[..., Any]:
    made: Callable[..., Any] = torch.cuda.make_graphed_callables(model, tuple(t.clone() for t in examples))
    return made


def graphed_images(examples: tuple[Tensor, ...], model: Any) -> Callable[..., Any]:
    with torch.autocast(examples[0].device.type, torch.bfloat16, cache_enabled=False):
        return graphed(examples[:1], model)


def compiled_pair(model: Any) -> Any:
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False  # a backward must leave what the next one of its forward fills
    return record(torch.compile(model))


class _ByHand(torch.autograd.Function):
    """The forward and the backward of a captured pair."""

    @staticmethod
    def forward(ctx: Any, pair: Captured, *inputs: Tensor) -> Tensor:
        ctx.pair = pair
        pair.forward.replay()
        return pair.loss.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        pair: Captured = ctx.pair
        pair.seed.copy_(grad)
        pair.backward.replay()
        if not pair.past_autograd:
            return None, *[g.detach() for g in pair.grads]
        for p, g in zip(pair.parameters, pair.grads, strict=True):
            p.grad = g
        return None, None


class Captured:
    """PPO's update as three graphs that share a pool."""

    def __init__(self, device: str, example: list[Tensor], past_autograd: bool) -> None:
        torch.manual_seed(0)
        agent = ppo_update.Agent().to(device)
        self.past_autograd, self.parameters = past_autograd, [*agent.parameters()]
        self.optimizer = torch.optim.Adam(self.parameters, lr=3e-4, fused=True, capturable=True)
        self.static = [tensor.clone() for tensor in example]
        self.seed = torch.ones((), device=device)
        self.inputs = [torch.zeros((), device=device, requires_grad=True)] if past_autograd else self.parameters

        def clip_and_step() -> None:
            nn.utils.clip_grad_norm_(self.parameters, 0.5)
            self.optimizer.step()

        def live() -> None:
            self.optimizer.zero_grad()
            agent(*self.static).backward()
            clip_and_step()

        self.forward, self.loss = harness.capture(lambda: agent(*self.static), before=live)
        self.backward, self.grads = harness.capture(
            lambda: torch.autograd.grad(self.loss, self.parameters, self.seed), 0, self.forward.pool()
        )
        for p, g in zip(self.parameters, self.grads, strict=True):
            p.grad = g
        self.apply, _ = harness.capture(clip_and_step, 0, self.forward.pool())

    def __call__(self, *minibatch: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        torch._foreach_copy_(self.static, minibatch)
        loss = _ByHand.apply(self, *self.inputs)
        loss.backward()
        self.apply.replay()
        return loss.detach()  # type: ignore[no-any-return]


def ignoring_its_batch(step: harness.Step) -> Callable[..., Any]:
    return lambda *_: step()


def methods(name: str, make: Make, batches: list[Any], peers: bool, device: str) -> dict[str, Callable[[], harness.Step]]:
    graph = graphed_images if name == "ResNet-50" else graphed
    ours: dict[str, Callable[[], Callable[..., Any]]] = {
        WHOLE: lambda: record(make()),
        "live": make,
        "model": lambda: make(record),
        PAIR: lambda: make(record, beside=record),
    }
    if device != "cpu":  # there, compiled code runs live
        ours["compiled"] = lambda: make(compiled_pair, beside=record)
    others: dict[str, Callable[[], Callable[..., Any]]] = {
        "reduce-overhead": lambda: make(reduce_overhead),
        "make_graphed_callables": lambda: make(partial(graph, batches[0])),
    }
    if name == "GPT-2":  # it takes keywords, which make_graphed_callables does not
        others["make_graphed_callables"] = lambda: ignoring_its_batch(gpt2_step.graphed_callable(device))
    chosen = ours | others if peers else ours
    return {f"{method}, {name}": lambda step=step: looping(step(), batches) for method, step in chosen.items()}


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--only", choices=WORKLOADS, nargs="+", default=[*WORKLOADS], help="these workloads, in this order")
    arguments = parser.parse_args()
    report = harness.Report(CLAIM, TARGET, arguments)
    met = []
    for name in arguments.only:
        with harness.trying(report, name):
            make, batches = WORKLOADS[name](arguments.device)
            makers = methods(name, make, batches, not arguments.quick, arguments.device)
            if name == "PPO":
                makers |= {
                    method: lambda past=past: looping(Captured(arguments.device, batches[0], past), batches)
                    for method, past in {"by hand, PPO": False, "by hand past autograd, PPO": True}.items()
                }
            steps = harness.prepare(report, makers)
            harness.measure(report, steps, calls=100 if name == "PPO" else 20, reference=WHOLE)
        ratios = {m: report.ratio(f"{m}, {name}") for m in (PAIR, "compiled", "reduce-overhead", "make_graphed_callables")}
        below = ratios[PAIR] < ratios["make_graphed_callables"] and ratios["compiled"] < ratios["reduce-overhead"]
        met.append(ratios[PAIR] <= LIMIT and below)
    if set(arguments.only) == set(WORKLOADS):
        report.decide(all(met))
    return harness.finish(report)


if __name__ == "__main__":
    raise SystemExit(main())
