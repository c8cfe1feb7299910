"""DQN over distributions of returns (C51), after cleanrl: a replay buffer, a target network, epsilon-greedy acting."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from real import rivals, worlds

STEPS, ROUND = 40, 20
RIVAL = ("CudaGraphModule", rivals.cuda_graph_module, {"capturable": True})


@dataclass
class Args:
    n_atoms: int = 51
    v_min: float = -20
    v_max: float = 20
    gamma: float = 0.99
    learning_rate: float = 2.5e-4
    batch_size: int = 128
    target_network_frequency: int = 25
    start_e: float = 1.0
    end_e: float = 0.05
    exploration_steps: int = 5_000


class QNetwork(nn.Module):
    def __init__(self, observed: int, actions: int, args: Args) -> None:
        super().__init__()
        self.n, self.n_atoms = actions, args.n_atoms
        self.register_buffer("atoms", torch.linspace(args.v_min, args.v_max, args.n_atoms))
        self.network = nn.Sequential(
            nn.Linear(observed, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, actions * args.n_atoms)
        )

    def get_action(self, x: Tensor, action: Tensor | None = None) -> tuple[Tensor, Tensor]:
        pmfs = self.network(x).view(len(x), self.n, self.n_atoms).softmax(2)
        if action is None:
            action = (pmfs * self.atoms).sum(2).argmax(1)
        return action, pmfs[torch.arange(len(x), device=x.device), action]


def run(device: str, record, capturable: bool = False) -> Iterator[object]:
    args = Args()
    world = worlds.Springs(1, observed=4, actions=2)
    memory = worlds.ReplayBuffer(10_000, world.observed, 1, device, whole_actions=True)
    q_network = QNetwork(world.observed, world.actions, args).to(device)
    target_network = QNetwork(world.observed, world.actions, args).to(device)
    target_network.load_state_dict(q_network.state_dict())
    optimizer = torch.optim.Adam(
        q_network.parameters(), lr=args.learning_rate, eps=0.01 / args.batch_size, capturable=capturable
    )

    def update(data: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            _, next_pmfs = target_network.get_action(data["next_obs"])
            atoms, spacing = target_network.atoms, target_network.atoms[1] - target_network.atoms[0]
            shifted = data["rewards"][:, None] + args.gamma * atoms * (1 - data["dones"][:, None])
            place = (shifted.clamp(args.v_min, args.v_max) - args.v_min) / spacing
            lower, upper = place.floor().clamp(0, args.n_atoms - 1), place.ceil().clamp(0, args.n_atoms - 1)
            to_lower = (upper + (lower == upper).float() - place) * next_pmfs
            to_upper = (place - lower) * next_pmfs
            wanted = torch.zeros_like(next_pmfs)
            wanted.scatter_add_(1, lower.long(), to_lower)
            wanted.scatter_add_(1, upper.long(), to_upper)
        _, old_pmfs = q_network.get_action(data["obs"], data["actions"].flatten())
        loss = (-(wanted * old_pmfs.clamp(1e-5, 1 - 1e-5).log()).sum(-1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach(), (old_pmfs * q_network.atoms).sum(1).mean().detach()

    update = record(update)

    yield q_network, target_network, optimizer
    obs = world.reset()
    for step in range(1_000_000):
        epsilon = max(args.start_e + (args.end_e - args.start_e) * step / args.exploration_steps, args.end_e)
        if random.random() < epsilon:
            actions = np.array([random.randrange(world.actions)])
        else:
            actions = q_network.get_action(torch.Tensor(obs).to(device))[0].cpu().numpy()
        next_obs, rewards, dones = world.step(np.eye(world.actions, dtype=np.float32)[actions])
        memory.add(obs, actions[:, None], rewards, next_obs, dones)
        obs = next_obs
        loss, old_value = update(memory.sample(args.batch_size))
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.4f}, value {old_value.item():.3f}, epsilon {epsilon:.2f}")
        if step % args.target_network_frequency == 0:
            target_network.load_state_dict(q_network.state_dict())
        yield loss, old_value
