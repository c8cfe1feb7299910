"""The demo's job for a GPU: a byte-level GPT that learns from Python's own standard library, and writes some more.

The model is complete here, training and decoding. Decoding keeps keys and values in a cache of fixed size, and the
position in a tensor: so every step of it is the same work on the same memory, and one recording serves them all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phonograph.cli.console import CannotRun
from race import Batch, Job

WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 256, 4, 4, 128, 16

DESCRIPTION = (
    f"the standard library's source text, byte-level GPT of {LAYERS} layers, width {WIDTH}, "
    f"batch {BATCH} of {CONTEXT} bytes, AdamW(fused=True)"
)


Cache = tuple[Tensor, Tensor]  # keys and values of one layer for one text, (1, HEADS, CONTEXT, WIDTH / HEADS) each


def empty_caches(device: torch.device) -> list[Cache]:
    """One for each layer."""
    shape = (1, HEADS, CONTEXT, WIDTH // HEADS)
    return [(torch.zeros(shape, device=device), torch.zeros(shape, device=device)) for _ in range(LAYERS)]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, position: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        rows, length, _ = x.shape
        query, key, value = self.qkv(x).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mask = None
        if cache is not None and position is not None:
            key, value = (kept.index_copy_(2, position, new) for kept, new in zip(cache, (key, value), strict=True))
            mask = (torch.arange(CONTEXT, device=x.device) <= position).view(1, 1, 1, CONTEXT)
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        joined: Tensor = self.out(y.transpose(1, 2).reshape(rows, length, WIDTH))
        return joined


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norms = Attention(), nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, position: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        x = x + self.attention(self.norms[0](x), position, cache)
        x = x + self.mlp(self.norms[1](x))
        return x


class GPT(nn.Module):
    """Bytes (rows, length) in, logits (rows, length, 256) out."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor, position: Tensor | None = None, caches: list[Cache] | None = None) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device) if position is None else position
        x = self.bytes(text) + self.places(places)
        for index, block in enumerate(self.blocks):
            x = block(x, position, caches[index] if caches else None)
        logits: Tensor = self.head(self.norm(x))
        return logits


def load(device: torch.device) -> Tensor:
    """The standard library's modules, one after the other, as int64 bytes on the device."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    text = b"".join(path.read_bytes() for path in sources)
    if len(text) < 100 * CONTEXT:
        raise CannotRun("the GPT reads the standard library's .py files, and this Python carries none")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device).long()


def make_job(text: Tensor, steps: int, seed: int) -> Job:
    """The job from its seed: same seed, same weights, same batches."""
    torch.manual_seed(seed)
    model = GPT().to(text.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - CONTEXT - 1, (steps, BATCH, 1), generator=generator).to(text.device)
    window = torch.arange(CONTEXT + 1, device=text.device)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    def batches(start: int, stop: int) -> list[Batch]:
        windows = (text[begin + window] for begin in starts[start:stop])
        return [(piece[:, :-1].contiguous(), piece[:, 1:].contiguous()) for piece in windows]

    return Job("gpt", step, batches, scheduler.step, lambda: list(model.state_dict().values()))


class Writer:
    """Greedy decoding, one byte a step. The position is a tensor and the step moves it on."""

    def __init__(
        self, weights: list[Tensor], wrap: Callable[[Callable[..., Tensor]], Callable[..., Tensor]] = lambda step: step
    ) -> None:
        device = weights[0].device
        model = GPT().to(device).eval()
        model.load_state_dict(dict(zip(model.state_dict(), weights, strict=True)))
        caches = empty_caches(device)
        self._position = torch.zeros(1, dtype=torch.int64, device=device)

        def step(byte: Tensor, position: Tensor) -> Tensor:
            with torch.no_grad():
                following: Tensor = model(byte, position, caches)[:, -1].argmax(-1, keepdim=True)
                position.add_(1)
            return following

        self.step = wrap(step)

    def write(self, prompt: bytes) -> Tensor:
        """The prompt and what follows it, CONTEXT bytes in all, as (CONTEXT,) int64 on the device."""
        self._position.zero_()
        text = torch.zeros(CONTEXT, dtype=torch.int64, device=self._position.device)
        text[: len(prompt)] = torch.tensor(list(prompt))
        byte = text[:1].view(1, 1)
        for index in range(1, CONTEXT):
            following = self.step(byte, self._position)
            byte = text[index].view(1, 1) if index < len(prompt) else following
            text[index].copy_(byte[0, 0])
        return text
