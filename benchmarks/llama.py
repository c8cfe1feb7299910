"""A Llama in plain torch: RMSNorm, rotary positions, grouped queries, SwiGLU. `ranks.py` trains it on several GPUs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """Those of TinyLlama, 1.1 billion parameters, unless said otherwise."""

    words: int = 32000
    width: int = 2048
    layers: int = 22
    heads: int = 32
    key_heads: int = 4  # each for several heads of queries
    hidden: int = 5632
    sequence: int = 128


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head = shape.width // shape.heads
        self.query = nn.Linear(shape.width, shape.heads * self.head, bias=False)
        self.key = nn.Linear(shape.width, shape.key_heads * self.head, bias=False)
        self.value = nn.Linear(shape.width, shape.key_heads * self.head, bias=False)
        self.out = nn.Linear(shape.heads * self.head, shape.width, bias=False)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        split = (-1, self.head)  # as many heads as there are: fewer in tensor parallel
        query, key, value = (linear(x).unflatten(-1, split) for linear in (self.query, self.key, self.value))
        query, key, value = (t.transpose(1, 2) for t in (rotated(query, rotary), rotated(key, rotary), value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        given: Tensor = self.out(attended.transpose(1, 2).flatten(-2))
        return given


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        given: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return given


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.before_attention, self.attention = nn.RMSNorm(shape.width, eps=1e-5), Attention(shape)
        self.before_feed, self.feed = nn.RMSNorm(shape.width, eps=1e-5), FeedForward(shape)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x), rotary)
        given: Tensor = x + self.feed(self.before_feed(x))
        return given


class Llama(nn.Module):
    """Its parameters are in bfloat16, what turns queries and keys in float32."""

    rotary: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.words, shape.width)
        self.layers = nn.ModuleList([Layer(shape) for _ in range(shape.layers)])
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.head = nn.Linear(shape.width, shape.words, bias=False)
        self.to(torch.bfloat16)
        half = shape.width // shape.heads // 2
        angles = torch.outer(torch.arange(shape.sequence), 1e4 ** (-torch.arange(half) / half))
        self.register_buffer("rotary", torch.stack((angles.cos(), angles.sin())), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.rotary)
        given: Tensor = self.head(self.norm(x))
        return given


def rotated(x: Tensor, rotary: Tensor) -> Tensor:
    """Each head (batch, sequence, heads, features) turned by its place in the sequence."""
    cos, sin = rotary[:, :, None]
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).type_as(x)
