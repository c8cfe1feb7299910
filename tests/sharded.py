"""Steps of training with sharded parameters, by `fully_shard` (FSDP2) or by parametrizations: each run as it is and
recorded. See `ranks`, which starts both processes. Run as one of them:
`python -m tests.sharded RANK BACKEND FOLDER CASE...`.

On the CPU no collective of FSDP2's is captured. There it is given, in place of those, functions that work with what this rank
has: all else of it is as it is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests import ranks
from tests.ranks import Case
from tests.spread import adam, whole

CALLS = int(os.environ.get("SHARDED_CALLS", "5"))
WIDTH = 8


class Alone:
    """What stands for communication: this rank's part in place of every part."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        if output_tensor.numel() > input_tensor.numel():
            mine = input_tensor.clone()
            output_tensor.view(2, -1).copy_(torch.stack([mine, mine + 0.01]))
        else:
            output_tensor.copy_(input_tensor.view(2, -1).mean(0))


class Block(nn.Module):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.relu(self.up(x))))


def sharded(inside: Callable[[nn.Module], nn.Module] = lambda block: block, drop: float = 0.0, **options: Any) -> nn.Module:
    """Blocks that are sharded each, and what is left with the root."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    torch.manual_seed(0)
    blocks = [inside(Block(drop)) for _ in range(2)]
    net = nn.Sequential(*blocks, nn.Linear(WIDTH, 3)).to(ranks._device())
    for block in blocks:
        fully_shard(block, mesh=ranks._mesh(), **options)
    fully_shard(net, mesh=ranks._mesh(), **options)
    for module in net.modules():
        if isinstance(module, FSDPModule) and dist.get_backend() == "gloo":
            module.set_custom_all_gather(Alone())
            module.set_custom_reduce_scatter(Alone())
    return net


class Whole(nn.Module):
    """Gathers a parameter where it is used, and reduces its gradient."""

    def forward(self, p: Any) -> torch.Tensor:
        from torch.distributed.tensor import Partial, Replicate

        return p.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])  # type: ignore[no-any-return]


def parametrized() -> nn.Module:
    """What is called SimpleFSDP."""
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.nn.utils.parametrize import register_parametrization

    torch.manual_seed(0)
    net = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 3)).to(ranks._device())
    for module in [*net.modules()]:
        for name, p in [*module.named_parameters(recurse=False)]:
            module.register_parameter(name, nn.Parameter(distribute_tensor(p, ranks._mesh(), [Shard(0)])))
            register_parametrization(module, name, Whole(), unsafe=True)
    return net


def recomputed(block: nn.Module) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return checkpoint_wrapper(block)


def halves() -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def states(net: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], list[Any]]:
    """Parameters, their gradients, and what the optimizer has: of its counts the numbers alone."""

    def found() -> list[Any]:
        parameters = [*net.parameters()]
        kept = [value for p in parameters for _, value in sorted(optimizer.state.get(p, {}).items())]
        return [*parameters, *(p.grad for p in parameters), *(x.item() if x.dim() == 0 else x for x in kept)]

    return found


Step = Callable[[Any, torch.optim.Optimizer, torch.Tensor], Any]


def train(net: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = net(x).float().square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def clips(net: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    optimizer.zero_grad()
    loss = net(x).square().mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    optimizer.step()
    return loss.detach(), norm.full_tensor()  # type: ignore[attr-defined]


def accumulates(net: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    losses = []
    for i, part in enumerate(x.chunk(2)):
        net.set_requires_gradient_sync(i == 1)
        loss = net(part).float().square().mean() / 2
        loss.backward()
        losses.append(loss.detach())
    optimizer.step()
    optimizer.zero_grad()
    return losses


def gives_up(net: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    """Nobody can record the middle of it."""
    optimizer.zero_grad()
    loss: torch.Tensor = net(x).square().mean()
    (loss * (2 if loss.item() > 0 else 3)).backward()
    optimizer.step()
    return loss.detach()


def training(
    make: Callable[[], nn.Module] = sharded, optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    step: Step = train, between: Callable[[Any, torch.optim.Optimizer, int], None] = lambda *_: None, **options: Any,
) -> Case:  # fmt: skip
    def made() -> Any:
        net = make()
        stepping = (optimizer or adam(fused=True))(net.parameters())

        def call(x: torch.Tensor) -> Any:
            return step(net, stepping, x)

        def arguments(n: int) -> list[Any]:
            between(net, stepping, n)
            torch.manual_seed(n)
            return [whole(10 * n + dist.get_rank(), 4, WIDTH)]

        return call, arguments, states(net, stepping)

    return Case(made, **options)


def evaluates(net: Any, optimizer: torch.optim.Optimizer, n: int) -> None:
    if n == 3:
        with torch.no_grad():
            net(whole(0, 2, WIDTH))


def trains_alone(net: Any, optimizer: torch.optim.Optimizer, n: int) -> None:
    """A step beside the recorded one."""
    if n == 3:
        train(net, optimizer, whole(0, 4, WIDTH))


def stops_to_reduce(net: Any, optimizer: torch.optim.Optimizer, n: int) -> None:
    net.set_requires_gradient_sync(n != 3)


def keeps_whole(net: Any, optimizer: torch.optim.Optimizer, n: int) -> None:
    net.set_reshard_after_backward(n != 3)


def loads(net: Any, optimizer: torch.optim.Optimizer, n: int) -> None:
    if n == 3:
        net.load_state_dict({name: p * 0.5 for name, p in net.state_dict().items()})


def slows_down(net: Any, optimizer: torch.optim.Optimizer, n: int) -> None:
    optimizer.param_groups[0]["lr"] = 0.01 / (1 + n)


def gathered_before(net: Any, optimizer: torch.optim.Optimizer, n: int) -> None:
    if n == 3:
        net[1].unshard()


def prefetches() -> nn.Module:
    net: Any = sharded()
    net[0].set_modules_to_forward_prefetch([net[1]])
    net[1].set_modules_to_backward_prefetch([net[0]])
    return net


def freezes() -> nn.Module:
    net = sharded()
    for p in net[0].parameters():
        p.requires_grad_(False)
    return net


CASES: dict[str, Case] = {
    "default": training(),
    "reshards": training(lambda: sharded(reshard_after_forward=True)),
    "keeps": training(lambda: sharded(reshard_after_forward=False)),
    "mixed": training(lambda: sharded(mp_policy=halves())),
    "recomputes": training(lambda: sharded(recomputed)),
    "recomputes_dropout": training(lambda: sharded(recomputed, drop=0.5)),
    "accumulates": training(step=accumulates),
    "accumulates_mixed": training(lambda: sharded(mp_policy=halves()), step=accumulates),
    "clips": training(step=clips),
    "foreach": training(optimizer=adam(foreach=True)),
    "plain": training(optimizer=adam()),
    "momentum": training(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)),
    "prefetches": training(prefetches),
    "freezes": training(freezes),
    "slows_down": training(between=slows_down),
    "evaluates": training(between=evaluates),
    "trains_alone": training(between=trains_alone),
    "stops_to_reduce": training(between=stops_to_reduce),
    "keeps_whole": training(between=keeps_whole),
    "loads": training(between=loads),
    "gathered_before": training(between=gathered_before),
    "gives_up": training(step=gives_up),
    "parametrized": training(parametrized),
    "parametrized_foreach": training(parametrized, adam(foreach=True)),
    "parametrized_clips": training(parametrized, step=clips),
}


if __name__ == "__main__":
    ranks.CALLS = CALLS
    ranks.main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4:] or [*CASES], CASES)
