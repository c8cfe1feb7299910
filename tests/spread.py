"""Programs with tensors that are spread over two ranks, or consist of others otherwise, each run as it is and recorded: see
`ranks`, which starts both processes. Run as one of them: `python -m tests.spread RANK BACKEND FOLDER CASE...`."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests import ranks
from tests.ranks import Case

CALLS = int(os.environ.get("SPREAD_CALLS", "5"))


def mesh() -> Any:
    return ranks._mesh()


def tensors() -> Any:
    import torch.distributed.tensor as tensors

    return tensors


def parallel() -> Any:
    import torch.distributed.tensor.parallel as parallel

    return parallel


class MLP(nn.Module):
    def __init__(self, norm: bool, width: int = 8) -> None:
        super().__init__()
        self.norm: nn.Module = nn.LayerNorm(width) if norm else nn.Identity()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


def whole(n: int, *shape: int) -> torch.Tensor:
    """The same on each rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(n)).to(ranks._device())


def network(plan: Callable[[], dict[str, Any]], blocks: int = 2) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(*(MLP("norm" in plan()) for _ in range(blocks))).to(ranks._device())
    for block in net:
        parallel().parallelize_module(block, mesh(), plan())
    return net


def columns_and_rows() -> dict[str, Any]:
    p = parallel()
    return {"up": p.ColwiseParallel(), "down": p.RowwiseParallel()}


def along_the_sequence() -> dict[str, Any]:
    p, along = parallel(), tensors().Shard(1)
    return {
        "norm": p.SequenceParallel(),
        "up": p.ColwiseParallel(input_layouts=along),
        "down": p.RowwiseParallel(output_layouts=along),
    }


def states(net: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], list[Any]]:
    """Parameters, their gradients, and what the optimizer has."""

    def found() -> list[Any]:
        parameters = [*net.parameters()]
        kept = [float(value) if name == "step" else value for p in parameters
                for name, value in sorted(optimizer.state.get(p, {}).items())]  # fmt: skip
        return [*parameters, *(p.grad for p in parameters), *kept]

    return found


def training(
    make: Callable[[], nn.Module], optimizer: Callable[[Any], torch.optim.Optimizer], shape: tuple[int, ...] = (4, 8),
    step: Callable[..., Any] | None = None,
) -> Case:  # fmt: skip
    def made() -> Any:
        net = make()
        stepping = optimizer(net.parameters())

        def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            stepping.zero_grad()
            loss = (net(x) - y).square().mean()
            loss.backward()
            stepping.step()
            return loss.detach()

        def other(x: torch.Tensor, y: torch.Tensor) -> Any:
            return step(net, stepping, x, y)  # type: ignore[misc]

        return train if step is None else other, lambda n: [whole(n, *shape), whole(100 + n, *shape)], states(net, stepping)

    return Case(made)


def adam(**options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, **options)


def clips(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> Any:
    optimizer.zero_grad()
    loss = (net(x) - y).square().mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    optimizer.step()
    return loss.detach(), norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def accumulates(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> Any:
    optimizer.zero_grad()
    losses = []
    for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
        loss = (net(a) - b).square().mean() / 2
        loss.backward()
        losses.append(loss.detach())
    optimizer.step()
    return losses


def keeps_gradients(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> Any:
    loss = (net(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return loss.detach()


def module(
    plan: Callable[[], dict[str, Any]], step: Callable[[nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor], Any],
    shape: tuple[int, ...] = (4, 8),
) -> Case:  # fmt: skip
    """A recorded module, whose backward runs outside."""

    def made() -> Any:
        net = network(plan).append(nn.Tanh())  # its result is no tensor that waits by itself
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=True)
        ranks._recorded(net)
        arguments = [shape, shape]
        return (
            lambda x, y: step(net, optimizer, x, y),
            lambda n: [whole(n + 100 * i, *s) for i, s in enumerate(arguments)],
            states(net, optimizer),
        )

    return Case(made, inner=True)


def trains(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> Any:
    optimizer.zero_grad()
    loss = (net(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def adds_up(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> Any:
    for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
        (net(a) - b).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def waits_for_two(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> Any:
    optimizer.zero_grad()
    losses = [(net(a) - b).square().mean() for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]
    for loss in losses:
        loss.backward()
    optimizer.step()
    return [loss.detach() for loss in losses]


def looks_between(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> Any:
    """At gradients, and writes weights."""
    optimizer.zero_grad(set_to_none=False)
    x.requires_grad_()
    loss = (net(x) - y).square().mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    optimizer.step()
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(0.99)
    return loss.detach(), norm.full_tensor(), x.grad


def _of(function: Callable[..., Any], *arguments: Callable[[int], Any]) -> Case:
    return Case(lambda: (function, lambda n: [a(n) for a in arguments], list))


def spread(dim: int | None, *shape: int) -> Callable[[int], Any]:
    """The same tensor on all ranks, each with its part of it."""
    return lambda n: tensors().distribute_tensor(
        whole(n, *shape), mesh(), [tensors().Replicate() if dim is None else tensors().Shard(dim)]
    )


def redistributes(x: torch.Tensor) -> torch.Tensor:
    t = tensors().DTensor.from_local(x * 2, mesh(), [tensors().Shard(0)])
    return t.redistribute(placements=[tensors().Replicate()]).to_local() + 1


def is_whole(x: torch.Tensor) -> torch.Tensor:
    return tensors().DTensor.from_local(x * 2, mesh(), [tensors().Shard(0)]).full_tensor() + 1


def changes_its_shards(x: torch.Tensor) -> torch.Tensor:
    t = tensors().DTensor.from_local(x * 2, mesh(), [tensors().Shard(0)])
    return t.redistribute(placements=[tensors().Shard(1)]).to_local() + 1


class Language(nn.Module):
    """Words, a block of attention, and words again."""

    def __init__(self, words: int = 12, width: int = 8) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        q, k, v = (part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + self.o(attended.transpose(1, 2).flatten(2)))


def language(loss_is_spread: bool) -> Case:
    def make() -> Any:
        p, (t, spread) = parallel(), (tensors(), tensors().Shard(-1))
        torch.manual_seed(0)
        net = Language().to(ranks._device())
        columns = {name: p.ColwiseParallel() for name in "qkv"}
        head = p.ColwiseParallel(output_layouts=spread, use_local_output=False) if loss_is_spread else p.ColwiseParallel(
            output_layouts=t.Replicate())  # fmt: skip
        plan = {"embed": p.RowwiseParallel(input_layouts=t.Replicate()), "o": p.RowwiseParallel(), "head": head}
        parallel().parallelize_module(net, mesh(), {**plan, **columns})
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)

        def step(words: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            with p.loss_parallel() if loss_is_spread else nullcontext():
                loss = nn.functional.cross_entropy(net(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
                loss.backward()
            optimizer.step()
            return loss.detach().full_tensor() if loss_is_spread else loss.detach()

        return step, lambda n: [whole(n, 2, 7).mul(100).long() % 12], states(net, optimizer)

    return Case(make)


def takes_spread(x: Any) -> Any:
    return (x * 2 + 1).to_local()


def takes_two(x: Any, y: Any) -> Any:
    return (x @ y).full_tensor()


def gives_spread(x: Any) -> Any:
    return x * 2, (x + 1).sum()


def writes_spread(x: Any) -> Any:
    x.mul_(2)
    return x.to_local() + 1


CASES: dict[str, Case] = {
    "tp": training(lambda: network(columns_and_rows), adam()),
    "tp_foreach": training(lambda: network(columns_and_rows), adam(foreach=True)),
    "tp_fused": training(lambda: network(columns_and_rows), adam(fused=True)),
    "tp_momentum": training(
        lambda: network(columns_and_rows), lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    ),
    "tp_clips": training(lambda: network(columns_and_rows), adam(), step=clips),
    "tp_accumulates": training(lambda: network(columns_and_rows), adam(), step=accumulates),
    "tp_keeps_gradients": training(lambda: network(columns_and_rows), adam(), step=keeps_gradients),
    "sequence_parallel": training(lambda: network(along_the_sequence), adam(), (2, 6, 8)),
    "tp_module": module(columns_and_rows, trains),
    "tp_module_adds_up": module(columns_and_rows, adds_up),
    "tp_module_waits_for_two": module(columns_and_rows, waits_for_two),
    "tp_module_looks_between": module(columns_and_rows, looks_between),
    "sequence_parallel_module": module(along_the_sequence, trains, (2, 6, 8)),
    "language": language(loss_is_spread=False),
    "language_loss_parallel": language(loss_is_spread=True),
    "changes_its_shards": _of(changes_its_shards, lambda n: ranks._numbers(n, 4, 2)),
    "redistributes": _of(redistributes, lambda n: ranks._numbers(n, 4, 2)),
    "is_whole": _of(is_whole, lambda n: ranks._numbers(n, 4, 2)),
    "takes_spread": _of(takes_spread, lambda n: spread(0, 4, 2)(n)),
    "takes_two": _of(takes_two, lambda n: spread(1, 4, 6)(n), lambda n: spread(0, 6, 4)(50 + n)),
    "gives_spread": _of(gives_spread, lambda n: spread(0, 4, 2)(n)),
    "writes_spread": _of(writes_spread, lambda n: spread(0, 4, 2)(n)),
}


if __name__ == "__main__":
    if "SPREAD_DUMP" in os.environ:
        faulthandler.dump_traceback_later(float(os.environ["SPREAD_DUMP"]))
    ranks.CALLS = CALLS
    ranks.main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4:] or [*CASES], CASES)
