"""Record a whole step of training with `accelerate` on several GPUs: forward, backward with its averaging, clipping, optimizer.

    torchrun --nproc-per-node 2 examples/accelerate_ranks.py  # or: accelerate launch --num-processes 2 ...

`step = pg.record(step)` is the only line about recording. A schedule of the learning rate is stepped outside of it. Trained
live and recorded: every loss and every weight must be the same, bit for bit, on each rank. Without GPUs it runs with gloo on
the CPU.

In a loop that counts by `with accelerator.accumulate(model)`, call `pg.record` on the model before it is prepared, as
`accelerate_loop.py` does: what counts is no part of a recording.
"""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for bitwise equal matmuls on a GPU

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import phonograph as pg

EPOCHS, BATCH, TRAINED = 3, 32, 1536
ON_GPUS = torch.cuda.is_available()


def network() -> nn.Module:
    """Reads a handwritten digit of 8×8 pixels."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))


def digits() -> TensorDataset:
    images, labels = load_digits(return_X_y=True)
    chances = torch.eye(10)[torch.tensor(labels)]  # of each digit: no kernel has to look whether a label is one
    return TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, chances)


def train(accelerator: Accelerator, recorded: bool) -> tuple[list[Tensor], str]:
    """The losses and the weights at the end, and what was recorded."""
    data, model = digits(), network()
    seen, kept = TensorDataset(*data[:TRAINED]), TensorDataset(*data[TRAINED : TRAINED + 256])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    model, optimizer, seen, kept, schedule = accelerator.prepare(
        model, optimizer, DataLoader(seen, BATCH, shuffle=True), DataLoader(kept, BATCH), schedule
    )

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = pg.record(step) if recorded else step
    found = []
    for epoch in range(EPOCHS):
        seen.set_epoch(epoch)
        found += [step(x, y).clone() for x, y in seen]
        schedule.step()
        model.eval()
        with torch.no_grad():
            right = [accelerator.gather_for_metrics(model(x).argmax(-1) == y.argmax(-1)) for x, y in kept]
        model.train()
        found.append(torch.cat(right).float().mean())
    return [*found, *(p.detach() for p in model.parameters())], pg.explain(step) if recorded else ""


def main() -> None:
    accelerator = Accelerator(cpu=not ON_GPUS)
    live, _ = train(accelerator, recorded=False)
    recorded, said = train(accelerator, recorded=True)
    accelerator.print(f"last loss {live[-6]:.4f}, of digits never seen {live[-5]:.1%} right")
    accelerator.print(said.splitlines()[0])
    assert all(map(torch.equal, live, recorded)), f"rank {dist.get_rank()}: losses or weights differ"
    accelerator.wait_for_everyone()
    accelerator.print("bitwise equal")
    accelerator.end_training()


if __name__ == "__main__":
    torch.use_deterministic_algorithms(ON_GPUS)  # the CPU's kernels are deterministic as they are
    main()
