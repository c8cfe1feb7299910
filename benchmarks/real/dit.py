"""Training a diffusion transformer after DiT: a noise schedule in NumPy tables, random timesteps, averaged weights."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from copy import deepcopy

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from real import rivals

STEPS, ROUND = 20, 10
RIVAL = ("reduce-overhead", rivals.reduce_overhead, {})


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class TimestepEmbedder(nn.Module):
    def __init__(self, width: int, frequencies: int = 64) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(frequencies, width), nn.SiLU(), nn.Linear(width, width))
        self.frequencies = frequencies

    def forward(self, t: Tensor) -> Tensor:
        half = self.frequencies // 2
        speeds = torch.exp(-math.log(10_000) * torch.arange(half, dtype=torch.float32) / half).to(t.device)
        angles = t[:, None].float() * speeds[None]
        return self.mlp(torch.cat([angles.cos(), angles.sin()], dim=-1))


class LabelEmbedder(nn.Module):
    def __init__(self, classes: int, width: int, dropout: float) -> None:
        super().__init__()
        self.table, self.classes, self.dropout = nn.Embedding(classes + 1, width), classes, dropout

    def forward(self, labels: Tensor, train: bool) -> Tensor:
        if train and self.dropout > 0:
            dropped = torch.rand(labels.shape[0], device=labels.device) < self.dropout
            labels = torch.where(dropped, self.classes, labels)
        return self.table(labels)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.heads, self.qkv, self.proj = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def attention(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c).chunk(6, dim=1)
        x = x + gate1.unsqueeze(1) * self.attention(modulate(self.norm1(x), shift1, scale1))
        return x + gate2.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift2, scale2))


class DiT(nn.Module):
    def __init__(self, size: int = 16, patch: int = 4, channels: int = 4, width: int = 96, depth: int = 4) -> None:
        super().__init__()
        self.patch, self.channels, self.side = patch, channels, size // patch
        self.embed = nn.Conv2d(channels, width, patch, patch)
        self.place = nn.Parameter(torch.randn(1, self.side**2, width) * 0.02, requires_grad=False)
        self.t_embedder, self.y_embedder = TimestepEmbedder(width), LabelEmbedder(10, width, 0.1)
        self.blocks = nn.ModuleList([Block(width, heads=4) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width, elementwise_affine=False), nn.Linear(width, patch**2 * channels)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2) + self.place
        c = self.t_embedder(t) + self.y_embedder(y, self.training)
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.modulation(c).chunk(2, dim=1)
        x = self.head(modulate(self.norm(x), shift, scale))
        x = x.reshape(-1, self.side, self.side, self.patch, self.patch, self.channels)
        return torch.einsum("nhwpqc->nchpwq", x).reshape(-1, self.channels, self.side * self.patch, self.side * self.patch)


class GaussianDiffusion:
    def __init__(self, steps: int = 1000) -> None:
        betas = np.linspace(1e-4, 0.02, steps, dtype=np.float64)
        self.steps, self.alphas_cumprod = steps, np.cumprod(1.0 - betas)
        self.sqrt_alphas_cumprod = np.sqrt(self.alphas_cumprod)
        self.sqrt_one_minus_alphas_cumprod = np.sqrt(1.0 - self.alphas_cumprod)

    @staticmethod
    def extract(table: np.ndarray, t: Tensor, like: Tensor) -> Tensor:
        return torch.from_numpy(table).to(device=t.device)[t].float().view(-1, *[1] * (like.dim() - 1)).expand(like.shape)

    def training_losses(self, model: nn.Module, x_start: Tensor, t: Tensor, kwargs: dict[str, Tensor]) -> dict[str, Tensor]:
        noise = torch.randn_like(x_start)
        x_t = self.extract(self.sqrt_alphas_cumprod, t, x_start) * x_start
        x_t = x_t + self.extract(self.sqrt_one_minus_alphas_cumprod, t, x_start) * noise
        return {"loss": (noise - model(x_t, t, **kwargs)).pow(2).mean(dim=(1, 2, 3))}


@torch.no_grad()
def update_ema(ema: nn.Module, model: nn.Module, decay: float = 0.999) -> None:
    averaged, current = OrderedDict(ema.named_parameters()), OrderedDict(model.named_parameters())
    for name, p in current.items():
        averaged[name].mul_(decay).add_(p.data, alpha=1 - decay)


def run(device: str, record) -> Iterator[object]:
    model = DiT().to(device)
    ema = deepcopy(model).to(device).requires_grad_(False).eval()
    diffusion = GaussianDiffusion()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0)

    @record
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        t = torch.randint(0, diffusion.steps, (x.shape[0],), device=device)
        loss = diffusion.training_losses(model, x, t, {"y": y})["loss"].mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        update_ema(ema, model)
        return loss

    yield model, ema, opt
    model.train()
    running_loss, log_steps = 0.0, 0
    for step in range(1_000_000):
        x, y = torch.randn(16, 4, 16, 16).to(device), torch.randint(0, 10, (16,)).to(device)
        loss = train_step(x, y)
        running_loss += loss.item()
        log_steps += 1
        if log_steps == 10:
            print(f"(step={step:07d}) train loss: {running_loss / log_steps:.4f}")
            running_loss, log_steps = 0.0, 0
        yield loss
