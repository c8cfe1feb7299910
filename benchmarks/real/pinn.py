"""A physics-informed network for Burgers' equation: derivatives by `autograd.grad(create_graph=True)`, Adam."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn

from real import rivals

STEPS, ROUND = 24, 10
RIVAL = ("CudaGraphModule", rivals.cuda_graph_module, {"capturable": True})


class PINN(nn.Module):
    def __init__(self, layers: tuple[int, ...] = (2, 20, 20, 20, 20, 1)) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(a, b) for a, b in pairwise(layers)])
        for linear in self.linears:
            nn.init.xavier_normal_(linear.weight)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = torch.cat([x, t], dim=1)
        for linear in self.linears[:-1]:
            h = torch.tanh(linear(h))
        return self.linears[-1](h)


def derivative(u: Tensor, of: Tensor) -> Tensor:
    return torch.autograd.grad(u, of, grad_outputs=torch.ones_like(u), create_graph=True)[0]


def run(device: str, record, capturable: bool = False) -> Iterator[object]:
    net, viscosity = PINN().to(device), 0.01 / math.pi
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, capturable=capturable)
    x_start = (torch.rand(100, 1) * 2 - 1).to(device)
    t_start, u_start = torch.zeros_like(x_start), -torch.sin(math.pi * x_start)
    x_inner = (torch.rand(500, 1) * 2 - 1).to(device).requires_grad_(True)
    t_inner = torch.rand(500, 1).to(device).requires_grad_(True)

    def residual() -> Tensor:
        u = net(x_inner, t_inner)
        u_t, u_x = derivative(u, t_inner), derivative(u, x_inner)
        return u_t + u * u_x - viscosity * derivative(u_x, x_inner)

    @record
    def train_step() -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        data_loss = (net(x_start, t_start) - u_start).pow(2).mean()
        physics_loss = residual().pow(2).mean()
        (data_loss + physics_loss).backward()
        optimizer.step()
        return data_loss, physics_loss

    yield net, optimizer
    history = []
    for epoch in range(1_000_000):
        data_loss, physics_loss = train_step()
        if epoch % 20 == 0:
            history.append(data_loss.item())
            print(f"epoch {epoch}: data {data_loss.item():.5f}, physics {physics_loss.item():.5f}")
        yield data_loss, physics_loss
