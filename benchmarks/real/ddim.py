"""Sampling from a diffusion model as pipelines do: a scheduler object with Python state, timesteps from NumPy, guidance."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from real import rivals
from real.dit import DiT

STEPS, ROUND = 40, 20
RIVAL = ("reduce-overhead", rivals.reduce_overhead, {})


class DDIMScheduler:
    def __init__(self, train_steps: int = 1000) -> None:
        self.alphas_cumprod = torch.cumprod(1.0 - torch.linspace(1e-4, 0.02, train_steps), dim=0)
        self.train_steps, self.step_index = train_steps, None

    def set_timesteps(self, count: int, device: str) -> None:
        self.stride = self.train_steps // count
        spaced = (np.arange(count) * self.stride).round()[::-1].copy().astype(np.int64)
        self.timesteps, self.step_index = torch.from_numpy(spaced).to(device), 0

    def step(self, noise: Tensor, timestep: int, sample: Tensor) -> Tensor:
        before = timestep - self.stride
        alpha = self.alphas_cumprod[timestep]
        alpha_before = self.alphas_cumprod[before] if before >= 0 else torch.tensor(1.0)
        clean = ((sample - (1 - alpha) ** 0.5 * noise) / alpha**0.5).clamp(-1, 1)
        self.step_index += 1
        return alpha_before**0.5 * clean + (1 - alpha_before) ** 0.5 * noise


@torch.no_grad()
def run(device: str, record) -> Iterator[object]:
    model = DiT().to(device).eval()
    scheduler, guidance = DDIMScheduler(), 4.0

    model = record(model)

    yield model
    for image in range(1_000_000):
        scheduler.set_timesteps(20, device)
        labels = torch.tensor([image % 10, 10], device=device)
        latents = torch.randn(1, 4, 16, 16, device=device)
        for t in scheduler.timesteps:
            both = torch.cat([latents] * 2)
            noise, unguided = model(both, t.expand(2), labels).chunk(2)
            noise = unguided + guidance * (noise - unguided)
            latents = scheduler.step(noise, int(t), latents)
            yield latents
        print(f"image {image}: {latents.mean().item():.4f} in {scheduler.step_index} steps")
