"""A state-space language model with a scan in Python, sampled without a cache: all of the text is read for each token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from real import rivals

STEPS, ROUND = 48, 24
RIVAL = ("reduce-overhead", rivals.reduce_overhead, {})


@dataclass
class ModelArgs:
    d_model: int = 64
    n_layer: int = 2
    vocab_size: int = 128
    d_state: int = 8
    d_conv: int = 4

    def __post_init__(self) -> None:
        self.d_inner, self.dt_rank = 2 * self.d_model, self.d_model // 16


class MambaBlock(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.in_proj = nn.Linear(args.d_model, args.d_inner * 2, bias=False)
        self.conv1d = nn.Conv1d(args.d_inner, args.d_inner, args.d_conv, groups=args.d_inner, padding=args.d_conv - 1)
        self.x_proj = nn.Linear(args.d_inner, args.dt_rank + args.d_state * 2, bias=False)
        self.dt_proj = nn.Linear(args.dt_rank, args.d_inner)
        self.A_log = nn.Parameter(torch.log(torch.arange(1, args.d_state + 1).float()).repeat(args.d_inner, 1))
        self.D = nn.Parameter(torch.ones(args.d_inner))
        self.out_proj = nn.Linear(args.d_inner, args.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        x, gate = self.in_proj(x).chunk(2, dim=-1)
        x = F.silu(self.conv1d(x.transpose(1, 2))[:, :, :length].transpose(1, 2))
        return self.out_proj(self.scan(x) * F.silu(gate))

    def scan(self, u: Tensor) -> Tensor:
        delta, b, c = self.x_proj(u).split([self.args.dt_rank, self.args.d_state, self.args.d_state], dim=-1)
        delta = F.softplus(self.dt_proj(delta))
        decay = torch.exp(delta[..., None] * -torch.exp(self.A_log.float()))
        pushed = delta[..., None] * b[:, :, None] * u[..., None]
        state, ys = torch.zeros_like(pushed[:, 0]), []
        for i in range(u.shape[1]):
            state = decay[:, i] * state + pushed[:, i]
            ys.append((state * c[:, i, None]).sum(-1))
        return torch.stack(ys, dim=1) + u * self.D


class Mamba(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.embedding = nn.Embedding(args.vocab_size, args.d_model)
        self.layers = nn.ModuleList([MambaBlock(args) for _ in range(args.n_layer)])
        self.norms = nn.ModuleList([nn.RMSNorm(args.d_model) for _ in range(args.n_layer)])
        self.norm_f = nn.RMSNorm(args.d_model)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return self.norm_f(x) @ self.embedding.weight.T


def run(device: str, record) -> Iterator[object]:
    model = Mamba(ModelArgs()).to(device).eval()

    model = record(model)

    yield model
    for sample in range(1_000_000):
        ids = torch.tensor([[1 + sample % 5, 2, 3, 4]], device=device)
        for _ in range(24):
            with torch.no_grad():
                logits = model(ids)[:, -1]
            probs = F.softmax(logits, dim=-1)
            values, _ = torch.topk(probs, k=40)
            probs[probs < values[:, -1, None]] = 0
            ids = torch.cat([ids, torch.multinomial(probs / probs.sum(dim=1, keepdim=True), num_samples=1)], dim=1)
            yield ids
        print(ids[0].tolist())
