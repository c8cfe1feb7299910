"""Mixed precision with a gradient scaler, after PyTorch's recipe: autocast, unscale, clip, step, update in one function."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from real import rivals

STEPS, ROUND = 24, 12
RIVAL = ("reduce-overhead", rivals.reduce_overhead, {})


def run(device: str, record) -> Iterator[object]:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
    net = nn.Sequential(nn.Linear(16, 64), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(64, 4)).to(
        device
    )
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**12, growth_interval=10)
    dtype = torch.float16 if device == "cuda" else torch.bfloat16

    @functools.partial(record, fallback="split")  # the scaler reads on the host whether a step is left out
    def train_step(x: Tensor, target: Tensor) -> Tensor:
        with torch.autocast(device_type=device, dtype=dtype):
            loss = F.mse_loss(net(x), target)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), max_norm=0.1)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        return loss.detach()

    yield net, opt
    for step in range(1_000_000):
        loss = train_step(torch.randn(8, 12, 16, device=device), torch.randn(8, 12, 4, device=device))
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}, scale {scaler.get_scale():.0f}")
        yield loss
