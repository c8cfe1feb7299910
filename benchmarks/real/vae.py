"""A variational autoencoder, after pytorch/examples, whose KL term is annealed: a coefficient that changes each step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from real import rivals

STEPS, ROUND = 40, 20
RIVAL = ("CudaGraphModule", rivals.cuda_graph_module, {"capturable": True})


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(784, 200), nn.Linear(200, 20), nn.Linear(200, 20)
        self.fc3, self.fc4 = nn.Linear(20, 200), nn.Linear(200, 784)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = F.relu(self.fc1(x.view(-1, 784)))
        mu, logvar = self.fc21(h), self.fc22(h)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


class KLAnnealer:
    def __init__(self, steps: int, top: float = 1.0) -> None:
        self.steps, self.top, self.at, self.beta = steps, top, 0, 0.0

    def step(self) -> None:
        self.at += 1
        self.beta = self.top * min(self.at / self.steps, 1.0)


def run(device: str, record, capturable: bool = False) -> Iterator[object]:
    model = VAE().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, capturable=capturable)
    annealer = KLAnnealer(steps=500)

    @record
    def train_step(data: Tensor) -> Tensor:
        optimizer.zero_grad()
        recon, mu, logvar = model(data)
        bce = F.binary_cross_entropy(recon, data.view(-1, 784), reduction="sum")
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        loss = bce + annealer.beta * kld
        loss.backward()
        optimizer.step()
        return loss.detach()

    yield model, optimizer
    model.train()
    train_loss = 0.0
    for step in range(1_000_000):
        loss = train_step(torch.rand(64, 1, 28, 28).to(device))
        annealer.step()
        train_loss += loss.item()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item() / 64:.3f}, beta {annealer.beta:.3f}, sum {train_loss:.1f}")
        yield loss
