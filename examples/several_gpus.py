"""Record a whole training step on several GPUs, one line for each way of spreading a model.

    torchrun --nproc-per-node 2 examples/several_gpus.py            # DistributedDataParallel
    torchrun --nproc-per-node 2 examples/several_gpus.py fsdp2      # or tensor_parallel

`step = pg.record(step)` is the only line about recording: forward, backward with its collectives, clipping and optimizer are
one graph on each GPU. Trained live and recorded: every loss and every weight must be the same, bit for bit, on each rank.
Without GPUs it runs with gloo on the CPU.
"""

import os
import sys
from collections.abc import Callable

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for bitwise equal matmuls on a GPU

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import phonograph as pg

STEPS, BATCH = 60, 64
KIND = "cuda" if torch.cuda.is_available() else "cpu"


def network(device: torch.device) -> nn.Sequential:
    """Reads a handwritten digit of 8×8 pixels."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10)).to(device)


def spread(model: nn.Sequential, way: str) -> nn.Module:
    if way == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh(KIND, (dist.get_world_size(),))
    if way == "tensor_parallel":
        last = ColwiseParallel(output_layouts=Replicate())
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": last})
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(way: str, device: torch.device, record: Callable[[Callable], Callable]) -> tuple[list[Tensor], Callable]:
    """The losses, and the weights at the end."""
    model = spread(network(device), way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    step = record(step)
    images, labels = (torch.as_tensor(each) for each in load_digits(return_X_y=True))
    rank = 0 if way == "tensor_parallel" else dist.get_rank()  # its ranks work on the same batch
    found = []
    for n in range(STEPS):
        chosen = (torch.arange(BATCH) + BATCH * (2 * n + rank)) % len(labels)
        found.append(step((images[chosen].float() / 16).to(device), labels[chosen].to(device)).clone())
    return found + [getattr(p, "_local_tensor", p).detach() for p in model.parameters()], step


def main(way: str) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device(KIND, rank) if KIND == "cuda" else torch.device("cpu")
    if KIND == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if KIND == "cuda" else "gloo")
    live, _ = train(way, device, lambda step: step)
    recorded, step = train(way, device, pg.record)
    if rank == 0:
        print(f"{way}: first loss {live[0]:.4f}, last loss {live[STEPS - 1]:.4f}")
        print(pg.explain(step).splitlines()[0])
    assert all(map(torch.equal, live, recorded)), f"rank {rank}: losses or weights differ"
    dist.barrier()
    if rank == 0:
        print("bitwise equal")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.use_deterministic_algorithms(KIND == "cuda")  # the CPU's kernels are deterministic as they are
    main(sys.argv[1] if len(sys.argv) > 1 else "ddp")
