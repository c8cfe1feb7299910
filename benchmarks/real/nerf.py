"""A radiance field: random rays of one picture, a coarse network, volume rendering, a learning rate that decays each step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from real import rivals

STEPS, ROUND = 20, 10
RIVAL = ("reduce-overhead", rivals.reduce_overhead, {})
RAYS, SAMPLES, NEAR, FAR = 128, 32, 2.0, 6.0


class Embedder:
    def __init__(self, count: int) -> None:
        self.freq_bands = 2.0 ** torch.linspace(0.0, count - 1, count)
        self.functions = [lambda x: x]
        for freq in self.freq_bands:
            for f in (torch.sin, torch.cos):
                self.functions.append(lambda x, f=f, freq=freq: f(x * freq))

    def embed(self, x: Tensor) -> Tensor:
        return torch.cat([function(x) for function in self.functions], -1)


class NeRF(nn.Module):
    def __init__(self, depth: int = 4, width: int = 64, skips: tuple[int, ...] = (2,)) -> None:
        super().__init__()
        self.places, self.views, self.skips = Embedder(6), Embedder(2), skips
        inputs, views = 3 * (1 + 2 * 6), 3 * (1 + 2 * 2)
        self.layers = nn.ModuleList(
            [nn.Linear(inputs, width)] + [nn.Linear(width + (inputs if i in skips else 0), width) for i in range(depth - 1)]
        )
        self.alpha, self.feature = nn.Linear(width, 1), nn.Linear(width, width)
        self.view, self.rgb = nn.Linear(width + views, width // 2), nn.Linear(width // 2, 3)

    def forward(self, points: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
        x = self.places.embed(points)
        h = x
        for i, layer in enumerate(self.layers):
            h = F.relu(layer(h))
            if i in self.skips:
                h = torch.cat([x, h], -1)
        seen = F.relu(self.view(torch.cat([self.feature(h), self.views.embed(directions)], -1)))
        return torch.sigmoid(self.rgb(seen)), F.relu(self.alpha(h)).squeeze(-1)


def render(model: nn.Module, origins: Tensor, directions: Tensor, perturb: bool = True) -> Tensor:
    z = torch.linspace(NEAR, FAR, SAMPLES, device=origins.device).expand(len(origins), SAMPLES)
    if perturb:
        z = z + torch.rand_like(z) * (FAR - NEAR) / SAMPLES
    points = origins[:, None] + directions[:, None] * z[..., None]
    rgb, sigma = model(points, F.normalize(directions, dim=-1)[:, None].expand(points.shape))
    gaps = torch.cat([z[:, 1:] - z[:, :-1], torch.full_like(z[:, :1], 1e10)], -1) * directions.norm(dim=-1, keepdim=True)
    alpha = 1.0 - torch.exp(-sigma * gaps)
    through = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1.0 - alpha + 1e-10], -1), -1)[:, :-1]
    return ((alpha * through)[..., None] * rgb).sum(1)


def run(device: str, record) -> Iterator[object]:
    model = NeRF().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, betas=(0.9, 0.999))
    side = 32
    rows, columns = np.meshgrid(np.arange(side), np.arange(side), indexing="ij")
    rays = np.stack([(columns - side / 2) / side, -(rows - side / 2) / side, -np.ones_like(rows, dtype=float)], -1)
    rays = torch.tensor(rays.reshape(-1, 3), dtype=torch.float32, device=device)
    picture = torch.rand(side * side, 3).to(device)
    origin = torch.tensor([0.0, 0.0, 4.0], device=device)

    @record
    def train_step(which: Tensor) -> tuple[Tensor, Tensor]:
        rgb = render(model, origin.expand(RAYS, 3), rays[which])
        loss = ((rgb - picture[which]) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss, -10.0 * torch.log(loss.detach()) / np.log(10.0)

    yield model, optimizer
    for i in range(1_000_000):
        which = torch.from_numpy(np.random.choice(side * side, size=[RAYS], replace=False)).to(device)
        loss, psnr = train_step(which)
        for param_group in optimizer.param_groups:
            param_group["lr"] = 5e-4 * 0.1 ** (i / 1000)
        if i % 10 == 0:
            print(f"[TRAIN] Iter: {i} Loss: {loss.item():.4f}  PSNR: {psnr.item():.2f}")
        yield loss, psnr
