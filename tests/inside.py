"""Modules that are recorded with their backward, and graphs of the compile backend, inside and around what spreads a model over
two ranks: each run as it is and so. See `ranks`, which starts both processes. Run as one of them:
`python -m tests.inside RANK BACKEND FOLDER CASE...`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import phonograph as pg
from phonograph._torch.ddp import reducer_anew
from phonograph.compile import graphs
from phonograph.engine.parts import together
from phonograph.statistics import Counters, Observed, Stats
from tests import ranks
from tests.ranks import Case

WIDTH, BLOCKS = 16, 3
BUCKET = 1200 / 2**20  # MiB: about one for each block
_FIRST_BUCKET = torch.distributed._DEFAULT_FIRST_BUCKET_BYTES  # type: ignore[attr-defined]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


class Recomputed(Block):
    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        return checkpoint(super().forward, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


class RecomputedAtOnce(Recomputed):
    reentrant = True


class Shares(Block):
    """Averages over ranks in its forward, or its gradient in its backward."""

    function = ranks._Reduced

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.function.apply(x) / 2)  # type: ignore[no-untyped-call]


class SharesBackward(Shares):
    function = ranks._ReducedBackward


class All(Observed):
    """Several recorded modules, or all graphs that there are, as one."""

    def __init__(self, modules: Sequence[nn.Module] = (), kept: Any = None) -> None:
        self.modules = modules
        self.kept = kept  # recordings go with the module that has the parameters

    def _all(self) -> list[Any]:
        from phonograph.api import _recorded

        return [*map(_recorded, self.modules)] if self.modules else graphs()

    def stats(self) -> Stats:
        return together(self._all(), Counters())

    def explain(self) -> str:
        return "\n".join(one.explain() for one in self._all())


Wrap = Callable[[nn.Sequential], Any]
"""Makes of a network what a step calls, and records in it what is to be recorded."""

_RECORDED = {"keep": "always"}  # what counts is right, and not how long it takes


def recorded(*modules: nn.Module, **options: Any) -> None:
    if ranks._now[-1] is not None:
        for module in modules:
            pg.record(module, **{**_RECORDED, **options})
        ranks._inner[:] = [All(modules)]


def compiled(module: nn.Module) -> Any:
    """Its operators are called as they are: what is compiled rounds otherwise."""
    if ranks._now[-1] is None:
        return module
    torch._dynamo.reset()
    torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = _FIRST_BUCKET  # type: ignore[attr-defined]
    ranks._inner[:] = [All(kept=module)]
    return torch.compile(module, backend="phonograph", options={"inner": "aot_eager"})


class Together(nn.Module):
    """All blocks in one graph."""

    def __init__(self, net: nn.Sequential) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * 2  # type: ignore[no-any-return]


def compiled_in_buckets(net: nn.Sequential, **options: Any) -> Any:
    """Dynamo splits the graph where a bucket ends, and asks each part with fake tensors for the shapes that it gives."""
    made = compiled(averaged(Together(net), **options))
    torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = int(BUCKET * 2**20)  # type: ignore[attr-defined]
    return made


def averaged(module: nn.Module, bucket: float = BUCKET, hook: Any = None, **options: Any) -> Any:
    wrapped = DistributedDataParallel(module, bucket_cap_mb=bucket, **options)
    if hook is not None:
        wrapped.register_comm_hook(None, hook)
    return wrapped


def compresses() -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    return bf16_compress_hook


def inside(
    *, which: Callable[[nn.Sequential], Sequence[nn.Module]] = lambda net: [net], after: bool = False, **options: Any
) -> Wrap:
    """Modules that are recorded, in a wrapper that averages."""

    def wrap(net: nn.Sequential) -> Any:
        if not after:
            recorded(*which(net))
        wrapped = averaged(net, **options)
        if after:
            recorded(*which(net))
        return wrapped

    return wrap


def sharded(net: nn.Sequential, inside: Callable[[nn.Module], Any] = lambda block: block) -> Any:
    from torch.distributed.fsdp import fully_shard

    for block in net:
        inside(block)
        fully_shard(block, mesh=ranks._mesh())
    return fully_shard(net, mesh=ranks._mesh())


def blocks_compiled(block: nn.Module) -> None:
    if ranks._now[-1] is not None:
        torch._dynamo.reset()
        ranks._inner[:] = [All()]
        block.compile(backend="phonograph", options={"inner": "aot_eager"})


def renewed(net: nn.Sequential) -> Any:
    """A wrapper that gets another reducer in the middle of a forward, of which the graph is half there."""
    wrapped, calls = averaged(net), []

    def renew(*_: Any) -> None:
        calls.append(None)
        if len(calls) == 4:
            reducer_anew(wrapped)

    if ranks._now[-1] is not None:
        net[1].register_forward_pre_hook(renew)
        pg.record(net[0], keep="always")
        ranks._inner[:] = [net[0]]
    return wrapped


def columns_and_rows(net: nn.Sequential) -> nn.Sequential:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    for block in net:
        parallelize_module(block, ranks._mesh(), {"inner": ColwiseParallel(output_layouts=Replicate())})
    return net


def gathered(net: nn.Sequential) -> nn.Sequential:
    """Weights in shards, each gathered where it is used."""
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.nn.utils.parametrize import register_parametrization

    from tests.sharded import Whole

    for module in [*net.modules()]:
        for name, p in [*module.named_parameters(recurse=False)]:
            module.register_parameter(name, nn.Parameter(distribute_tensor(p.detach(), ranks._mesh(), [Shard(0)])))
            register_parametrization(module, name, Whole(), unsafe=True)
    return net


def recorded_of(wrap: Wrap) -> Wrap:
    def both(net: nn.Sequential) -> Any:
        made = wrap(net)
        recorded(made)
        return made

    return both


def sharded_around_recorded(net: nn.Sequential) -> Any:
    recorded(*net)
    return sharded(net)


def training(
    wrap: Wrap, block: type[nn.Module] = Block, *, norm: bool = False, micro: int = 1, twice: bool = False, none: bool = True
) -> Case:
    def make() -> Any:
        torch.manual_seed(0)
        parts: list[nn.Module] = [block() for _ in range(BLOCKS)]
        if norm:
            parts.insert(1, nn.BatchNorm1d(WIDTH))
        net = nn.Sequential(*parts).to(ranks._device())
        called = wrap(net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad(set_to_none=none)
            total = torch.zeros((), device=x.device)
            for i, part in enumerate(x.chunk(micro)):
                with called.no_sync() if i < micro - 1 else contextlib.nullcontext():
                    loss = called(part).square().mean()
                    if twice:
                        loss = loss + called(part + 1).square().mean()
                    loss.backward()
                total += loss.detach()
            optimizer.step()
            return total.detach()

        def left() -> list[Any]:
            states = [value for p in net.parameters() for value in optimizer.state.get(p, {}).values()]
            return [*net.parameters(), *(p.grad for p in net.parameters()), *net.buffers(), *states]

        return step, lambda n: [ranks._numbers(n, 6, WIDTH) / 100], left

    return Case(make, inner=True)


CASES = {
    "module": training(inside()),
    "module_after": training(inside(after=True)),
    "blocks": training(inside(which=list)),
    "last_block": training(inside(which=lambda net: [net[-1]])),
    "module_into_views": training(inside(gradient_as_bucket_view=True), none=False),
    "module_into_gradients_that_stay": training(inside(), none=False),
    "module_compressed": training(inside(hook=compresses())),
    "module_with_buffers": training(inside(), norm=True),
    "module_accumulating": training(inside(), micro=3),
    "module_called_twice": training(inside(), twice=True),
    "module_recomputed": training(inside(), Recomputed),
    "module_that_may_have_unused": training(inside(find_unused_parameters=True)),
    "module_of_a_static_graph": training(inside(static_graph=True)),
    "module_that_communicates": training(inside(), Shares),
    "module_that_communicates_in_its_backward": training(inside(), SharesBackward),
    "renewed": training(renewed),
    "wrapper": training(recorded_of(averaged)),
    "compiled_wrapper": training(lambda net: compiled(averaged(net, bucket=25))),
    "compiled_in_buckets": training(compiled_in_buckets),
    "compiled_in_buckets_accumulating": training(compiled_in_buckets, micro=3),
    "compiled_in_buckets_static": training(lambda net: compiled_in_buckets(net, static_graph=True)),
    "wrapper_of_compiled": training(lambda net: averaged(compiled(net), bucket=25)),
    "sharded_of_recorded": training(sharded_around_recorded),
    "recorded_of_sharded": training(recorded_of(sharded)),
    "sharded_of_compiled": training(lambda net: sharded(net, blocks_compiled)),
    "tensor_parallel": training(recorded_of(columns_and_rows)),
    "compiled_tensor_parallel": training(lambda net: compiled(columns_and_rows(net))),
    "gathered": training(recorded_of(gathered)),
    "compiled_gathered": training(lambda net: compiled(gathered(net))),
}

if __name__ == "__main__":
    ranks.main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4:] or [*CASES], CASES)
