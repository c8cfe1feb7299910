"""Soft actor-critic with a learned temperature, after LeanRL: critic and actor updates are functions, each captured."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal

from real import rivals, worlds

STEPS, ROUND = 30, 20
RIVAL = ("CudaGraphModule", rivals.cuda_graph_module, {"capturable": True})

LOG_STD_MIN, LOG_STD_MAX = -5, 2
GAMMA, TAU, POLICY_FREQUENCY, BATCH, STARTS = 0.99, 0.005, 2, 256, 32


class SoftQ(nn.Module):
    def __init__(self, observed: int, actions: int) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(observed + actions, 256), nn.Linear(256, 256), nn.Linear(256, 1)

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:
        h = F.relu(self.fc1(torch.cat([obs, action], 1)))
        return self.fc3(F.relu(self.fc2(h))).flatten()


class Actor(nn.Module):
    def __init__(self, observed: int, actions: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(observed, 256), nn.Linear(256, 256)
        self.mean, self.log_std = nn.Linear(256, actions), nn.Linear(256, actions)
        self.register_buffer("scale", torch.ones(actions))
        self.register_buffer("bias", torch.zeros(actions))

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        h = F.relu(self.fc2(F.relu(self.fc1(obs))))
        log_std = torch.tanh(self.log_std(h))
        return self.mean(h), LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (log_std + 1)

    def get_action(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self(obs)
        normal = Normal(mean, log_std.exp())
        raw = normal.rsample()
        squashed = torch.tanh(raw)
        log_prob = normal.log_prob(raw) - torch.log(self.scale * (1 - squashed.pow(2)) + 1e-6)
        return squashed * self.scale + self.bias, log_prob.sum(1)


def run(device: str, record, capturable: bool = False) -> Iterator[object]:
    world = worlds.Springs(1, observed=17, actions=6)
    memory = worlds.ReplayBuffer(10_000, world.observed, world.actions, device)
    actor = Actor(world.observed, world.actions).to(device)
    qs = nn.ModuleList([SoftQ(world.observed, world.actions) for _ in range(2)]).to(device)
    targets = deepcopy(qs).requires_grad_(False)
    log_alpha = torch.zeros(1, requires_grad=True, device=device)
    target_entropy = -float(world.actions)
    q_optimizer = torch.optim.Adam(qs.parameters(), lr=1e-3, capturable=capturable)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-4, capturable=capturable)
    a_optimizer = torch.optim.Adam([log_alpha], lr=1e-3, capturable=capturable)

    def update_critics(data: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            next_action, next_log_prob = actor.get_action(data["next_obs"])
            best = torch.min(*[target(data["next_obs"], next_action) for target in targets])
            soft = best - log_alpha.exp() * next_log_prob
            wanted = data["rewards"] + (1 - data["dones"]) * GAMMA * soft
        loss = sum(F.mse_loss(q(data["obs"], data["actions"]), wanted) for q in qs)
        q_optimizer.zero_grad()
        loss.backward()
        q_optimizer.step()
        return loss.detach()

    def update_actor(data: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        action, log_prob = actor.get_action(data["obs"])
        worth = torch.min(*[q(data["obs"], action) for q in qs])
        actor_loss = (log_alpha.exp().detach() * log_prob - worth).mean()
        actor_optimizer.zero_grad()
        actor_loss.backward()
        actor_optimizer.step()
        alpha_loss = (-log_alpha.exp() * (log_prob.detach() + target_entropy)).mean()
        a_optimizer.zero_grad()
        alpha_loss.backward()
        a_optimizer.step()
        return actor_loss.detach(), alpha_loss.detach()

    update_critics, update_actor = record(update_critics), record(update_actor)

    yield actor, qs, targets, log_alpha, q_optimizer, actor_optimizer
    obs, actor_loss = world.reset(), torch.zeros(())
    for step in range(1_000_000):
        if step < STARTS // 4:
            actions = np.random.uniform(-1, 1, size=(1, world.actions)).astype(np.float32)
        else:
            with torch.no_grad():
                actions = actor.get_action(torch.as_tensor(obs).to(device))[0].cpu().numpy()
        next_obs, rewards, dones = world.step(actions)
        memory.add(obs, actions, rewards, next_obs, dones)
        obs = next_obs
        loss = update_critics(memory.sample(BATCH))
        if step % POLICY_FREQUENCY == 0:
            for _ in range(POLICY_FREQUENCY):
                actor_loss, _ = update_actor(memory.sample(BATCH))
        with torch.no_grad():
            for target, p in zip(targets.parameters(), qs.parameters(), strict=True):
                target.lerp_(p, TAU)
        if step % 100 == 0:
            print(f"step {step}: critic {loss.item():.4f}, actor {actor_loss.item():.4f}, alpha {log_alpha.exp().item():.3f}")
        yield loss, actor_loss
