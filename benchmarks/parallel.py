"""Training steps on several GPUs, as people write them: the cases of `ranks.py`.

Each `make` builds fresh models and optimizers from the same seeds on every rank, and gives a `Training`. All are for any number
of ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

import llama

WIDTH, LAYERS, BATCH = 1024, 12, 64
LR = 1e-3
TWO, FOUR = (2,), (4, 8)  # GPUs


@dataclass
class Size:
    """What the cases are made with: features, layers, rows of a batch."""

    width: int = WIDTH
    layers: int = LAYERS
    batch: int = BATCH


@dataclass(frozen=True)
class Rounds:
    """How often a step is timed: so many turns of so many calls, and so many single calls."""

    turns: int = 7
    calls: int = 10
    single: int = 500


def features(size: Size, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x, target = (torch.randn((size.batch, size.width), generator=generator) for _ in range(2))
    return x, target


@dataclass
class Training:
    """`step(x, target)` is what is recorded; it returns the loss (none on ranks that have none). `lives_on` are modules and
    optimizers."""

    step: Callable[[Tensor, Tensor], Any]
    lives_on: list[Any]
    inner: nn.Module | None = None  # what is recorded instead
    between: Callable[[], None] | None = None  # what belongs to a step and is not recorded

    def tensors(self) -> list[Tensor]:
        """All that lives on from step to step on this rank."""
        found: list[Tensor] = []
        for each in self.lives_on:
            if isinstance(each, nn.Module):
                found += [*each.parameters(), *each.buffers()]
                found += [p.grad for p in each.parameters() if p.grad is not None]
            else:
                found += [x for state in each.state.values() for x in state.values() if isinstance(x, Tensor)]
        return [getattr(t, "_local_tensor", t).detach() for t in found]


def as_it_is(module: nn.Module) -> nn.Module:
    return module


@dataclass
class Case:
    """With `inside`, `make` also gets what is to be called on the module before it is wrapped; the step itself runs live."""

    make: Callable[..., Training]
    steps_by_hand: bool = True  # it can be captured by hand
    inside: bool = False
    gpus: tuple[int, ...] = TWO  # on as many it is run, if nothing else is said
    tensor_parallel: int = 1  # so many neighbours have the same batch; 0: all
    batch: Callable[[Size, torch.Generator], tuple[Tensor, Tensor]] = features
    rounds: Rounds = Rounds()
    widens: bool = True  # it can be made in another width


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(x))


class Recomputed(Block):
    def forward(self, x: Tensor) -> Tensor:
        given: Tensor = torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)
        return given


def network(size: Size, device: torch.device, block: type[Block] = Block, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    blocks: list[nn.Module] = [block(size.width) for _ in range(size.layers)]
    if norm:
        blocks.insert(1, nn.BatchNorm1d(size.width))
    return nn.Sequential(*blocks).to(device)


def compile_inside(module: nn.Module, device: torch.device) -> None:
    module.compile(backend="inductor" if device.type == "cuda" else "aot_eager")


def mesh_of(device: torch.device) -> DeviceMesh:
    return init_device_mesh(device.type, (dist.get_world_size(),))


# ---- whole steps -----------------------------------------------------------------------------------


def stepping(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, clip: bool = False, accumulate: int = 1, autocast: bool = False,
    syncing: Callable[[bool], Any] | None = None, measure: Callable[[Tensor, Tensor], Tensor] = F.mse_loss,
) -> Training:  # fmt: skip
    """The usual step. `syncing(whether)` says, before a part of the batch, whether its gradients are reduced."""

    def one(x: Tensor, target: Tensor) -> Tensor:
        if autocast:
            with torch.autocast(x.device.type, torch.bfloat16):
                loss = measure(model(x).float(), target) / accumulate
        else:
            loss = measure(model(x).float(), target) / accumulate
        loss.backward()
        return loss.detach()

    def step(x: Tensor, target: Tensor) -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), device=x.device)
        for n, (part, wanted) in enumerate(zip(x.chunk(accumulate), target.chunk(accumulate), strict=True)):
            if syncing is None:
                total += one(part, wanted)
            else:
                with syncing(n == accumulate - 1):
                    total += one(part, wanted)
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return total

    return Training(step, [model, optimizer])


def adam(model: nn.Module, device: torch.device, kind: str = "fused") -> torch.optim.Optimizer:
    fused = {"fused": True, "capturable": device.type == "cuda"} if kind == "fused" else {}
    return torch.optim.AdamW(by_mesh(model), lr=LR, **fused)


def by_mesh(model: nn.Module) -> list[dict[str, Any]]:
    """Parameters in groups that one kernel can update: those of one mesh, and those of none."""
    groups: dict[Any, list[Tensor]] = {}
    for p in model.parameters():
        groups.setdefault(getattr(p, "device_mesh", None), []).append(p)
    return [{"params": each} for each in groups.values()]


def ddp(
    *, block: type[Block] = Block, norm: bool = False, accumulate: int = 1, zero: bool = False, hook: bool = False,
    compiled: bool = False, kind: str = "fused", step: dict[str, Any] | None = None, inside: bool = False, **options: Any,
) -> Case:  # fmt: skip
    def make(size: Size, device: torch.device, prepare: Callable[[nn.Module], nn.Module] = as_it_is) -> Training:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
        from torch.distributed.optim import ZeroRedundancyOptimizer

        inner = prepare(network(size, device, block, norm))
        ids = [device] if device.type == "cuda" else None
        model: Any = nn.parallel.DistributedDataParallel(inner, device_ids=ids, **options)
        if hook:
            model.register_comm_hook(None, bf16_compress_hook)
        called = torch.compile(model) if compiled else model
        optimizer = (
            ZeroRedundancyOptimizer(inner.parameters(), torch.optim.AdamW, lr=LR, fused=True, capturable=device.type == "cuda")
            if zero
            else adam(inner, device, kind)
        )

        @contextlib.contextmanager
        def syncing(last: bool) -> Iterator[None]:
            with contextlib.nullcontext() if last else model.no_sync():
                yield

        made = stepping(called, optimizer, accumulate=accumulate, syncing=syncing if accumulate > 1 else None, **(step or {}))
        made.lives_on = [inner, optimizer.optim if zero else optimizer]
        made.inner = inner if inside else None
        return made

    return Case(make, inside=inside)


class Pair(nn.Module):
    """Two linear layers, in tensor parallel the first split by columns, the second by rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        given: Tensor = x + self.down(F.gelu(self.up(x)))
        return given


def pairs(size: Size, device: torch.device, mesh: DeviceMesh, sequence: bool = False) -> nn.Sequential:
    """As many linear layers, in tensor parallel; with `sequence` rows are split between the pairs."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = nn.Sequential(*[Pair(size.width) for _ in range(size.layers // 2)]).to(device)
    rows = Shard(0) if sequence else None
    plan = {"up": ColwiseParallel(input_layouts=rows), "down": RowwiseParallel(output_layouts=rows)}
    for each in model:
        parallelize_module(each, mesh, plan)
    return model


def fsdp(
    *, reshard: bool | None = None, bf16: bool = False, block: type[Block] = Block, accumulate: int = 1, compiled: bool = False,
    replicate: bool = False, tensor_parallel: int = 1, kind: str = "fused", gpus: tuple[int, ...] = TWO, **step: Any,
) -> Case:  # fmt: skip
    """`replicate`: pairs of ranks share the parameters, and all pairs have the same."""

    def make(size: Size, device: torch.device) -> Training:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        options: dict[str, Any] = {"reshard_after_forward": reshard} if reshard is not None else {}
        if bf16:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if tensor_parallel > 1:
            both = two_dimensions(device, tensor_parallel)
            mesh, model = both["outer"], pairs(size, device, both["inner"])
        else:
            mesh = two_dimensions(device, 2) if replicate else mesh_of(device)
            model = network(size, device, block)
        for each in model:
            if compiled:
                compile_inside(each, device)
            fully_shard(each, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)

        @contextlib.contextmanager
        def syncing(last: bool) -> Iterator[None]:
            model.set_requires_gradient_sync(last)
            yield

        syncs = syncing if accumulate > 1 else None
        return stepping(model, adam(model, device, kind), accumulate=accumulate, syncing=syncs, **step)

    return Case(make, gpus=gpus, tensor_parallel=tensor_parallel)


def two_dimensions(device: torch.device, inner: int) -> DeviceMesh:
    """Neighbours, `inner` of them, are in a row of the mesh."""
    return init_device_mesh(device.type, (dist.get_world_size() // inner, inner), mesh_dim_names=("outer", "inner"))


def tp(*, sequence: bool = False, kind: str = "fused", gpus: tuple[int, ...] = TWO, **step: Any) -> Case:
    def make(size: Size, device: torch.device) -> Training:
        model = pairs(size, device, mesh_of(device), sequence)
        made = stepping(model, adam(model, device, kind), **step)
        if sequence:
            whole, rank, ranks = made.step, dist.get_rank(), dist.get_world_size()
            made.step = lambda x, target: whole(x.chunk(ranks)[rank], target.chunk(ranks)[rank])
        return made

    return Case(make, gpus=gpus, tensor_parallel=0)


class Gathered(nn.Module):
    """SimpleFSDP's parametrization: a parameter lies in shards, and is gathered where it is used."""

    def forward(self, sharded: Any) -> Tensor:
        from torch.distributed.tensor import Partial, Replicate

        whole = sharded.redistribute(placements=[Replicate()])
        given: Tensor = whole.to_local(grad_placements=[Partial("avg")])
        return given


def simple_fsdp(**step: Any) -> Case:
    def make(size: Size, device: torch.device) -> Training:
        from torch.distributed.tensor import Shard, distribute_tensor
        from torch.nn.utils import parametrize

        model = network(size, device)
        mesh = mesh_of(device)
        for module in [*model.modules()]:
            for name, parameter in [*module.named_parameters(recurse=False)]:
                module.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
                parametrize.register_parametrization(module, name, Gathered(), unsafe=True)
        return stepping(model, adam(model, device), **step)

    return Case(make)


def pipeline(schedule: str, microbatches: int = 4, gpus: tuple[int, ...] = TWO) -> Case:
    def make(size: Size, device: torch.device) -> Training:
        from torch.distributed import pipelining

        rank, ranks = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(rank)
        model = nn.Sequential(*[Block(size.width) for _ in range(size.layers // ranks)]).to(device)
        stage = pipelining.PipelineStage(model, rank, ranks, device)
        running = getattr(pipelining, schedule)(stage, n_microbatches=microbatches, loss_fn=F.mse_loss)
        optimizer = adam(model, device)

        def step(x: Tensor, target: Tensor) -> Any:
            optimizer.zero_grad()
            losses: list[Tensor] = []
            if rank == 0:
                running.step(x)
            elif rank == ranks - 1:
                running.step(target=target, losses=losses)
            else:
                running.step()
            optimizer.step()
            return torch.stack(losses).mean().detach() if losses else None

        return Training(step, [model, optimizer])

    return Case(make, gpus=gpus)


class Experts(nn.Module):
    """A mixture of experts of fixed capacity, one on each rank: the first tokens that come to an expert get it, others none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ranks = dist.get_world_size()
        self.router = nn.Linear(width, self.ranks)
        self.expert = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        from torch.distributed._functional_collectives import all_to_all_single_autograd as exchanged

        tokens, width = x.shape
        capacity = tokens // self.ranks
        weight, chosen = self.router(x).softmax(-1).max(-1)
        one_hot = chosen[:, None] == torch.arange(self.ranks, device=x.device)
        position = (one_hot.cumsum(0) - 1).gather(1, chosen[:, None])
        sent = one_hot[:, :, None] & (position == torch.arange(capacity, device=x.device))[:, None, :]
        sent = sent.to(x.dtype)
        packed = torch.einsum("tec,tw->ecw", sent, x).reshape(-1, width)
        there = exchanged(packed, None, None, dist.group.WORLD) + 0
        back = exchanged(self.expert(there), None, None, dist.group.WORLD) + 0
        spread = torch.einsum("tec,ecw->tw", sent, back.reshape(self.ranks, capacity, width))
        return x + weight[:, None] * spread


def moe(gpus: tuple[int, ...] = TWO) -> Case:
    def make(size: Size, device: torch.device) -> Training:
        torch.manual_seed(dist.get_rank())
        model = nn.Sequential(*[Experts(size.width) for _ in range(max(1, size.layers // 6))]).to(device)
        return stepping(model, adam(model, device))

    return Case(make, gpus=gpus)


# ---- a Llama of a billion parameters ---------------------------------------------------------------

SMALL = llama.Shape(words=64, width=32, layers=2, heads=8, key_heads=4, hidden=64, sequence=8)


def shape_of(size: Size) -> llama.Shape:
    return llama.Shape() if size.width >= WIDTH else SMALL


def sentence(size: Size, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """So few words that the GPU waits for Python."""
    shape = shape_of(size)
    words = torch.randint(shape.words, (1, shape.sequence + 1), generator=generator)
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def next_word(logits: Tensor, wanted: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def split(model: llama.Llama, mesh: DeviceMesh) -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns = ("attention.query", "attention.key", "attention.value", "feed.gate", "feed.up")
    rows = ("attention.out", "feed.down")
    for layer in model.layers:
        plan = {name: ColwiseParallel() for name in columns} | {name: RowwiseParallel() for name in rows}
        parallelize_module(layer, mesh, plan)
    whole = Replicate()
    ends = {"embedding": RowwiseParallel(input_layouts=whole), "head": ColwiseParallel(output_layouts=whole)}
    parallelize_module(model, mesh, ends)


def billion(*, sharded: bool = True, tensor_parallel: int = 1, compiled: bool = False) -> Case:
    def make(size: Size, device: torch.device) -> Training:
        from torch.distributed.fsdp import fully_shard

        torch.backends.cuda.enable_cudnn_sdp(False)  # its backward may sum in another order each time
        torch.manual_seed(0)
        with device:
            model = llama.Llama(shape_of(size))
        if not sharded:
            split(model, mesh_of(device))
        elif tensor_parallel > 1:
            both = two_dimensions(device, tensor_parallel)
            mesh = both["outer"]
            split(model, both["inner"])
        else:
            mesh = mesh_of(device)
        for layer in model.layers:
            if compiled:
                compile_inside(layer, device)
            if sharded:
                fully_shard(layer, mesh=mesh)
        if sharded:
            fully_shard(model, mesh=mesh)
        return stepping(model, adam(model, device), measure=next_word)

    together = tensor_parallel if sharded else 0
    return Case(make, gpus=FOUR, tensor_parallel=together, batch=sentence, rounds=Rounds(4, 4, 100), widens=False)


CASES: dict[str, Case] = {
    "ddp": ddp(),
    "ddp, plain Adam": ddp(kind="plain"),
    "ddp, bf16": ddp(step={"autocast": True}),
    "ddp, recompute": ddp(block=Recomputed),
    "ddp, no_sync": ddp(accumulate=4),
    "ddp, static_graph": ddp(static_graph=True),
    "ddp, BatchNorm": ddp(norm=True),
    "ddp, bf16 hook": ddp(hook=True),
    "ddp, bucket views": ddp(gradient_as_bucket_view=True),
    "ddp, clipping": ddp(step={"clip": True}),
    "ddp, ZeRO": ddp(zero=True),
    "ddp, compiled": ddp(compiled=True),
    "module inside ddp": ddp(inside=True),
    "module inside ddp, no_sync": ddp(inside=True, accumulate=4),
    "fsdp2 + tp": fsdp(tensor_parallel=2, gpus=FOUR),
    "fsdp2": fsdp(gpus=TWO + FOUR),
    "llama, fsdp2": billion(),
    "hsdp": fsdp(replicate=True, gpus=FOUR),
    "fsdp2, plain Adam": fsdp(kind="plain"),
    "fsdp2, always": fsdp(reshard=True),
    "fsdp2, keep": fsdp(reshard=False),
    "fsdp2, bf16": fsdp(bf16=True),
    "fsdp2, recompute": fsdp(block=Recomputed),
    "fsdp2, accumulate": fsdp(accumulate=4),
    "fsdp2, clipping": fsdp(clip=True),
    "fsdp2, compiled": fsdp(compiled=True, gpus=TWO + FOUR),
    "simple fsdp": simple_fsdp(),
    "tp": tp(gpus=TWO + FOUR),
    "tp, plain Adam": tp(kind="plain"),
    "tp, sequence": tp(sequence=True),
    "tp, clipping": tp(clip=True),
    "1f1b": pipeline("Schedule1F1B", gpus=TWO + FOUR),
    "gpipe": pipeline("ScheduleGPipe"),
    "moe": moe(gpus=TWO + FOUR),
    "llama, fsdp2 + tp": billion(tensor_parallel=2),
    "llama, tp": billion(sharded=False),
    "llama, fsdp2, compiled": billion(compiled=True),
    "fsdp2 + tp, compiled": fsdp(tensor_parallel=2, compiled=True, gpus=FOUR),
    "llama, fsdp2 + tp, compiled": billion(tensor_parallel=2, compiled=True),
}
