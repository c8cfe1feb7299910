"""A normalising flow (RealNVP) on two moons: coupling layers with masks, a base distribution, Adam with a decaying rate."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

from real import rivals

STEPS, ROUND = 24, 12
RIVAL = ("CudaGraphModule", rivals.cuda_graph_module, {"capturable": True})


class Coupling(nn.Module):
    def __init__(self, mask: Tensor, width: int = 64) -> None:
        super().__init__()
        self.register_buffer("mask", mask)
        self.scale, self.shift = (
            nn.Sequential(nn.Linear(2, width), nn.LeakyReLU(), nn.Linear(width, width), nn.LeakyReLU(), nn.Linear(width, 2))
            for _ in range(2)
        )

    def backward_flow(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept = self.mask * x
        s, t = torch.tanh(self.scale(kept)) * (1 - self.mask), self.shift(kept) * (1 - self.mask)
        return kept + (1 - self.mask) * (x - t) * torch.exp(-s), -s.sum(1)


class RealNVP(nn.Module):
    def __init__(self, device: str, layers: int = 6) -> None:
        super().__init__()
        masks = [torch.tensor([i % 2, 1 - i % 2], dtype=torch.float32) for i in range(layers)]
        self.layers = nn.ModuleList([Coupling(mask) for mask in masks])
        self.prior = MultivariateNormal(torch.zeros(2, device=device), torch.eye(2, device=device))

    def log_prob(self, x: Tensor) -> Tensor:
        total = x.new_zeros(len(x))
        for layer in reversed(self.layers):
            x, log_det = layer.backward_flow(x)
            total = total + log_det
        return self.prior.log_prob(x) + total


def moons(count: int) -> Tensor:
    angle, upper = torch.rand(count) * 3.1416, torch.rand(count) < 0.5
    x = torch.where(upper, angle.cos(), 1 - angle.cos())
    y = torch.where(upper, angle.sin(), 0.5 - angle.sin())
    return torch.stack([x, y], 1) + 0.05 * torch.randn(count, 2)


def run(device: str, record, capturable: bool = False) -> Iterator[object]:
    flow = RealNVP(device).to(device)
    optimizer = torch.optim.Adam(flow.parameters(), lr=1e-3, capturable=capturable)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)

    @record
    def train_step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = -flow.log_prob(x).mean()
        loss.backward()
        optimizer.step()
        return loss

    yield flow, optimizer
    losses = []
    for t in range(1_000_000):
        loss = train_step(moons(256).to(device))
        scheduler.step()
        losses.append(loss.detach())
        if t % 20 == 0:
            print(f"iter {t}: loss = {torch.stack(losses[-20:]).mean().item():.3f}, lr {scheduler.get_last_lr()[0]:.2e}")
        yield loss
