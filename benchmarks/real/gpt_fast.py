"""Decoding with a cache of keys and values in the model, after gpt-fast: prefill, then one token at a time, sampled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from real import rivals

STEPS, ROUND = 60, 40
RIVAL = ("reduce-overhead", rivals.reduce_overhead, {})


@dataclass
class ModelArgs:
    block_size: int = 128
    vocab_size: int = 512
    n_layer: int = 6
    n_head: int = 8
    n_local_heads: int = 4
    dim: int = 256
    hidden: int = 768
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_head


class KVCache(nn.Module):
    def __init__(self, batch: int, length: int, heads: int, head_dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("k", torch.zeros(batch, heads, length, head_dim, dtype=dtype), persistent=False)
        self.register_buffer("v", torch.zeros(batch, heads, length, head_dim, dtype=dtype), persistent=False)

    def update(self, places: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        assert places.shape[0] == k.shape[2]
        self.k[:, :, places] = k
        self.v[:, :, places] = v
        return self.k, self.v


class Attention(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args, self.local = args, args.n_local_heads * args.head_dim
        self.wqkv = nn.Linear(args.dim, args.dim + 2 * self.local, bias=False)
        self.wo = nn.Linear(args.dim, args.dim, bias=False)
        self.kv_cache: KVCache | None = None

    def forward(self, x: Tensor, freqs: Tensor, mask: Tensor, input_pos: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.wqkv(x).split([self.args.dim, self.local, self.local], dim=-1)
        q = rotate(q.view(b, t, self.args.n_head, self.args.head_dim), freqs).transpose(1, 2)
        k = rotate(k.view(b, t, self.args.n_local_heads, self.args.head_dim), freqs).transpose(1, 2)
        v = v.view(b, t, self.args.n_local_heads, self.args.head_dim).transpose(1, 2)
        if self.kv_cache is not None:
            k, v = self.kv_cache.update(input_pos, k, v)
        k, v = (part.repeat_interleave(self.args.n_head // self.args.n_local_heads, dim=1) for part in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.wo(y.transpose(1, 2).reshape(b, t, self.args.dim))


class FeedForward(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(args.dim, args.hidden, bias=False), nn.Linear(args.dim, args.hidden, bias=False)
        self.w2 = nn.Linear(args.hidden, args.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(args), FeedForward(args)
        self.attention_norm = nn.RMSNorm(args.dim, args.norm_eps)
        self.ffn_norm = nn.RMSNorm(args.dim, args.norm_eps)

    def forward(self, x: Tensor, freqs: Tensor, mask: Tensor, input_pos: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), freqs, mask, input_pos)
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleList(Block(args) for _ in range(args.n_layer))
        self.norm, self.output = nn.RMSNorm(args.dim, args.norm_eps), nn.Linear(args.dim, args.vocab_size, bias=False)
        self.freqs: Tensor | None = None
        self.mask: Tensor | None = None

    def setup_caches(self, batch: int, length: int) -> None:
        for layer in self.layers:
            layer.attention.kv_cache = KVCache(
                batch, length, self.args.n_local_heads, self.args.head_dim, self.output.weight.dtype
            ).to(self.output.weight.device)
        speeds = 10_000 ** -(torch.arange(0, self.args.head_dim, 2) / self.args.head_dim)
        angles = torch.outer(torch.arange(length).float(), speeds)
        self.freqs = torch.stack([angles.cos(), angles.sin()], -1).to(self.output.weight.device)
        self.mask = torch.tril(torch.ones(length, length, dtype=torch.bool, device=self.output.weight.device))

    def forward(self, idx: Tensor, input_pos: Tensor) -> Tensor:
        assert self.freqs is not None, "setup_caches() comes first"
        mask, freqs = self.mask[None, None, input_pos], self.freqs[input_pos]
        x = self.tok_embeddings(idx)
        for layer in self.layers:
            x = layer(x, freqs, mask, input_pos)
        return self.output(self.norm(x))


def rotate(x: Tensor, freqs: Tensor) -> Tensor:
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    cos, sin = freqs.view(1, x.size(1), 1, -1, 2).unbind(-1)
    turned = torch.stack([pairs[..., 0] * cos - pairs[..., 1] * sin, pairs[..., 1] * cos + pairs[..., 0] * sin], -1)
    return turned.flatten(3).type_as(x)


def sample(logits: Tensor, temperature: float = 1.0, top_k: int | None = None) -> tuple[Tensor, Tensor]:
    logits = logits[0, -1] / max(temperature, 1e-5)
    if top_k is not None:
        least = logits.topk(min(top_k, logits.size(-1))).values[-1]
        logits = torch.where(logits < least, -float("inf"), logits)
    probs = logits.softmax(-1)
    noise = torch.empty_like(probs).exponential_(1)  # a multinomial draw that does not wait for the device
    return (probs / noise).argmax(-1, keepdim=True).to(torch.int), probs


def decode_one_token(model: Transformer, x: Tensor, input_pos: Tensor, **sampling: object) -> tuple[Tensor, Tensor]:
    assert input_pos.shape[-1] == 1
    return sample(model(x, input_pos), **sampling)


@torch.no_grad()
def run(device: str, record) -> Iterator[object]:
    args = ModelArgs()
    with torch.device(device):
        model = Transformer(args).to(torch.bfloat16 if device == "cuda" else torch.float32).eval()
        model.setup_caches(batch=1, length=args.block_size)

    decode = record(decode_one_token)

    yield model
    for _ in range(1_000_000):
        prompt = torch.randint(0, args.vocab_size, (1, 9), device=device)
        place = torch.arange(9, device=device)
        token, _ = sample(model(prompt, place), temperature=0.8, top_k=50)
        input_pos, text = torch.tensor([9], device=device, dtype=torch.int), [token]
        for _ in range(args.block_size - 10):
            token, probs = decode(model, token.view(1, -1), input_pos, temperature=0.8, top_k=50)
            input_pos += 1
            text.append(token.clone())
            yield token, probs
        print(torch.cat(text)[:12].tolist())
