"""A spiking network with surrogate gradients: neurons keep their membrane as an attribute, `reset` puts it back."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from real import rivals

STEPS, ROUND = 20, 8
RIVAL = ("CudaGraphModule", rivals.cuda_graph_module, {"capturable": True})


class Surrogate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v: Tensor) -> Tensor:
        ctx.save_for_backward(v)
        return (v >= 0).to(v)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (v,) = ctx.saved_tensors
        return grad / (1 + (2 * v).square())


class LIF(nn.Module):
    def __init__(self, tau: float = 2.0, threshold: float = 1.0) -> None:
        super().__init__()
        self.tau, self.threshold, self.v = tau, threshold, 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.v = self.v + (x - self.v) / self.tau
        spike = Surrogate.apply(self.v - self.threshold)
        self.v = (1.0 - spike.detach()) * self.v
        return spike

    def reset(self) -> None:
        self.v = 0.0


def reset_net(net: nn.Module) -> None:
    for module in net.modules():
        if hasattr(module, "reset"):
            module.reset()


def run(device: str, record, capturable: bool = False) -> Iterator[object]:
    net = nn.Sequential(nn.Flatten(), nn.Linear(196, 100), LIF(), nn.Linear(100, 10), LIF()).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, capturable=capturable)

    @record
    def train_step(img: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        rate = 0.0
        for _ in range(6):
            rate = rate + net((torch.rand_like(img) <= img).float())
        loss = F.mse_loss(rate / 6, F.one_hot(label, 10).float())
        loss.backward()
        optimizer.step()
        reset_net(net)
        return loss.detach(), (rate.argmax(1) == label).float().sum()

    yield net, optimizer
    samples, correct = 0, 0.0
    for step in range(1_000_000):
        loss, right = train_step(torch.rand(32, 1, 14, 14).to(device), torch.randint(0, 10, (32,)).to(device))
        samples, correct = samples + 32, correct + right.item()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}, acc {correct / samples:.3f}")
        yield loss, right
