"""A step that runs its own backward may return the loss with its history."""

from __future__ import annotations

import torch

import phonograph as pg


def test_c6_a_step_that_returns_its_spent_loss_is_recorded(device: torch.device) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to(device)
    optimizer = torch.optim.Adam(model.parameters())

    @pg.record
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(5):
        step(torch.ones(3, 4, device=device))
    assert pg.stats(step).replayed == 4, pg.explain(step)
