"""Record a whole training step: forward, backward, clipping and optimizer as one call.

    python examples/train_step.py

A network learns two interleaved spirals, once live and once recorded, from the same seed; at the end every loss and
every weight must be the same, bit for bit. The learning rate follows a cosine schedule: no new recording for that.
"""

import os
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for bitwise equal matmuls on a GPU

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phonograph as pg

STEPS, BATCH = 600, 64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def spirals(points: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points in the plane as (points, 2) and which of the two arms each one is on."""
    arm = torch.randint(2, (points,), generator=generator)
    turn = torch.rand(points, generator=generator) * 9 + 1
    angle = turn + arm * torch.pi
    return torch.stack([turn * angle.cos(), turn * angle.sin()], 1).div(10).to(DEVICE), arm.to(DEVICE)


def train(record: bool) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    if record:
        step = pg.record(step)

    generator = torch.Generator().manual_seed(1)
    losses = torch.zeros(STEPS, device=DEVICE)
    begin = time.perf_counter()
    for index in range(STEPS):
        losses[index] = step(*spirals(BATCH, generator))
        schedule.step()
    last = losses[-1].item()  # waits for the GPU, so the clock below is honest
    seconds = time.perf_counter() - begin
    print(f"{'recorded' if record else 'live':9s} {STEPS / seconds:8,.0f} steps/s   last loss {last:.4f}")
    if record:
        print(pg.stats(step))
    return losses, [weight.detach() for weight in model.parameters()]


if __name__ == "__main__":
    torch.use_deterministic_algorithms(DEVICE == "cuda")  # the CPU's kernels are deterministic as they are
    live_losses, live_weights = train(record=False)
    losses, weights = train(record=True)
    assert torch.equal(live_losses, losses), "the losses differ"
    assert all(map(torch.equal, live_weights, weights)), "the weights differ"
    print("bitwise equal")
