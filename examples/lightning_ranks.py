"""Record what Lightning trains on several GPUs with its strategy "ddp".

    torchrun --nproc-per-node 2 examples/lightning_ranks.py         # lightning.Trainer
    torchrun --nproc-per-node 2 examples/lightning_ranks.py fabric  # lightning.Fabric

A `Trainer` has the loop, so that its step is no function of yours: the network of the LightningModule is recorded, with its
backward. With `Fabric` you write the step, and all of it is recorded, averaging, clipping and optimizer included. Trained
live and recorded: every loss and every weight must be the same, bit for bit, on each rank. Without GPUs it runs with gloo on
the CPU.
"""

import os
import sys

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for bitwise equal matmuls on a GPU

import lightning
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import phonograph as pg

EPOCHS, BATCH, TRAINED = 3, 32, 1536
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RANKS = int(os.environ["WORLD_SIZE"])


def network() -> nn.Module:
    """Reads a handwritten digit of 8×8 pixels."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def batches() -> DataLoader:
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images[:TRAINED], dtype=torch.float32) / 16, torch.tensor(labels[:TRAINED]))
    ranks = DistributedSampler(data, RANKS, int(os.environ["RANK"]), seed=1)
    return DataLoader(data, BATCH, sampler=ranks)


class Digits(lightning.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.losses: list[Tensor] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def with_trainer(recorded: bool) -> tuple[list[Tensor], str]:
    """The losses, the weights at the end, and what was recorded."""
    net = pg.record(network()) if recorded else network()
    trainer = lightning.Trainer(
        max_epochs=EPOCHS, gradient_clip_val=1.0, strategy="ddp", accelerator=DEVICE, devices=RANKS, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = Digits(net)
    trainer.fit(model, batches())
    return [*model.losses, *net.parameters()], pg.explain(net) if recorded else ""


def with_fabric(recorded: bool) -> tuple[list[Tensor], str]:
    """As `with_trainer`."""
    fabric = lightning.Fabric(strategy="ddp", accelerator=DEVICE, devices=RANKS)
    fabric.launch()
    net = network()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=3e-3))

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)  # for True the host looks
        optimizer.step()
        return loss.detach()

    step = pg.record(step) if recorded else step
    losses = []
    loader = batches()
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        losses += [step(*fabric.to_device(batch)).clone() for batch in loader]
    return [*losses, *net.parameters()], pg.explain(step) if recorded else ""


def main(way: str) -> None:
    train = with_fabric if way == "fabric" else with_trainer
    live, _ = train(recorded=False)
    recorded, said = train(recorded=True)
    assert all(map(torch.equal, live, recorded)), f"rank {dist.get_rank()}: losses or weights differ"
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"last loss {live[-5]:.4f}")
        print(said.splitlines()[0])
        print("bitwise equal")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.use_deterministic_algorithms(DEVICE == "cuda")  # the CPU's kernels are deterministic as they are
    main(sys.argv[1] if len(sys.argv) > 1 else "trainer")
