"""MAML: an inner loop that is differentiated through, with `functional_call`; the outer step over a few tasks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from real import rivals

STEPS, ROUND = 16, 6
RIVAL = ("CudaGraphModule", rivals.cuda_graph_module, {"capturable": True})
TASKS, SHOTS, INNER_STEPS, INNER_LR = 4, 10, 2, 0.01


def sines(count: int, shots: int, device: str) -> tuple[Tensor, Tensor]:
    height, phase = torch.rand(count, 1, 1) * 4 + 0.1, torch.rand(count, 1, 1) * 3.14
    x = torch.rand(count, shots, 1) * 10 - 5
    return x.to(device), (height * torch.sin(x - phase)).to(device)


def run(device: str, record, capturable: bool = False) -> Iterator[object]:
    net = nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1)).to(device)
    meta_optim = torch.optim.Adam(net.parameters(), lr=1e-3, capturable=capturable)

    def adapt(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        fast = dict(net.named_parameters())
        for _ in range(INNER_STEPS):
            loss = F.mse_loss(functional_call(net, fast, (x,)), y)
            grads = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
            fast = {name: p - INNER_LR * g for (name, p), g in zip(fast.items(), grads, strict=True)}
        return fast

    @record
    def meta_step(x_support: Tensor, y_support: Tensor, x_query: Tensor, y_query: Tensor) -> Tensor:
        losses = []
        for task in range(TASKS):
            fast = adapt(x_support[task], y_support[task])
            losses.append(F.mse_loss(functional_call(net, fast, (x_query[task],)), y_query[task]))
        meta_loss = torch.stack(losses).mean()
        meta_optim.zero_grad()
        meta_loss.backward()
        meta_optim.step()
        return meta_loss.detach()

    yield net, meta_optim
    for step in range(1_000_000):
        x, y = sines(TASKS, 2 * SHOTS, device)
        loss = meta_step(x[:, :SHOTS], y[:, :SHOTS], x[:, SHOTS:], y[:, SHOTS:])
        if step % 50 == 0:
            print(f"step {step}: meta loss {loss.item():.4f}")
        yield loss
