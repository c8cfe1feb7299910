"""Train with updates that are skipped on the device: where a gradient is infinite, or where it is too large.

    python examples/skipped_updates.py

`GradScaler.step` skips a step where a gradient is infinite: eager reads that on the host, a recording branches on the device.
With `pg.cond` a step is skipped where the norm is too large. Losses and weights must equal the live run's, bit for bit.
"""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for bitwise equal matmuls on a GPU

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phonograph as pg

ROWS, STEPS, TOO_LARGE = 64, 60, 1.2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.float16 if DEVICE == "cuda" else torch.bfloat16


def train(scaled: bool, record: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)).to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(DEVICE, enabled=scaled, init_scale=2.0**10, growth_interval=10)
    skipped = torch.zeros((), dtype=torch.int64, device=DEVICE)

    def take() -> None:
        optimizer.step()

    def skip() -> None:
        skipped.add_(1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(DEVICE, dtype=HALF, enabled=scaled):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        if scaled:
            scaler.step(optimizer)
            scaler.update()
        else:
            pg.cond(norm > TOO_LARGE, skip, take)
        return loss.detach()

    call = pg.record(step) if record else step
    generator = torch.Generator().manual_seed(1)
    losses = []
    for n in range(STEPS):
        x, y = torch.randn(ROWS, 32, generator=generator), torch.randint(0, 10, (ROWS,), generator=generator)
        if n % 7 == 5:
            x *= torch.inf if scaled else 4
        losses.append(call(x.to(DEVICE), y.to(DEVICE)))
    if record:
        print(pg.stats(call))
    found = f"scale {scaler.get_scale():g}" if scaled else f"{int(skipped)} updates skipped"
    print(f"{'recorded' if record else 'live':9s} {found}")
    return torch.stack(losses).nan_to_num(), skipped, [weight.detach() for weight in net.parameters()]


if __name__ == "__main__":
    torch.use_deterministic_algorithms(DEVICE == "cuda")  # the CPU's kernels are deterministic as they are
    for scaled in (True, False):
        live, ours = train(scaled, record=False), train(scaled, record=True)
        assert torch.equal(live[0], ours[0]), "the losses differ"
        assert torch.equal(live[1], ours[1]), "other updates were skipped"
        assert all(map(torch.equal, live[2], ours[2])), "the weights differ"
    print("bitwise equal")
