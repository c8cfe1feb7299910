"""TD3 as a class with one method, whose every second call also updates the actor, as its authors wrote theirs."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from real import rivals, worlds

STEPS, ROUND = 40, 20
RIVAL = ("reduce-overhead", rivals.reduce_overhead, {})  # a graph captured by hand would repeat one of the two kinds of call


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, outputs))


class TD3:
    def __init__(self, observed: int, actions: int, device: str, discount: float = 0.99, tau: float = 0.005,
                 policy_noise: float = 0.2, noise_clip: float = 0.5, policy_freq: int = 2) -> None:  # fmt: skip
        self.actor = nn.Sequential(mlp(observed, actions), nn.Tanh()).to(device)
        self.actor_target = deepcopy(self.actor)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=3e-4)
        self.critics = nn.ModuleList([mlp(observed + actions, 1) for _ in range(2)]).to(device)
        self.critics_target = deepcopy(self.critics)
        self.critic_optimizer = torch.optim.Adam(self.critics.parameters(), lr=3e-4)
        self.discount, self.tau, self.policy_freq = discount, tau, policy_freq
        self.policy_noise, self.noise_clip = policy_noise, noise_clip
        self.total_it = 0

    @torch.no_grad()
    def select_action(self, obs: Tensor) -> np.ndarray:
        return self.actor(obs).cpu().numpy()

    def update(self, data: dict[str, Tensor]) -> Tensor:
        self.total_it += 1
        both = torch.cat([data["obs"], data["actions"]], 1)
        with torch.no_grad():
            noise = (torch.randn_like(data["actions"]) * self.policy_noise).clamp(-self.noise_clip, self.noise_clip)
            next_action = (self.actor_target(data["next_obs"]) + noise).clamp(-1, 1)
            next_both = torch.cat([data["next_obs"], next_action], 1)
            best = torch.min(*[critic(next_both) for critic in self.critics_target]).flatten()
            wanted = data["rewards"] + (1 - data["dones"]) * self.discount * best
        critic_loss = sum(F.mse_loss(critic(both).flatten(), wanted) for critic in self.critics)
        self.critic_optimizer.zero_grad()
        critic_loss.backward()
        self.critic_optimizer.step()
        if self.total_it % self.policy_freq == 0:
            actor_loss = -self.critics[0](torch.cat([data["obs"], self.actor(data["obs"])], 1)).mean()
            self.actor_optimizer.zero_grad()
            actor_loss.backward()
            self.actor_optimizer.step()
            with torch.no_grad():
                for net, target in ((self.critics, self.critics_target), (self.actor, self.actor_target)):
                    for p, t in zip(net.parameters(), target.parameters(), strict=True):
                        t.copy_(self.tau * p + (1 - self.tau) * t)
        return critic_loss.detach()


def run(device: str, record) -> Iterator[object]:
    world = worlds.Springs(1, observed=17, actions=6)
    memory = worlds.ReplayBuffer(10_000, world.observed, world.actions, device)
    agent = TD3(world.observed, world.actions, device)

    agent.update = record(agent.update)

    yield agent.actor, agent.critics, agent.actor_target, agent.critics_target, agent.actor_optimizer
    obs = world.reset()
    for step in range(1_000_000):
        actions = agent.select_action(torch.Tensor(obs).to(device)) + np.random.normal(0, 0.1, size=(1, world.actions))
        next_obs, rewards, dones = world.step(actions.astype(np.float32).clip(-1, 1))
        memory.add(obs, actions, rewards, next_obs, dones)
        obs = next_obs
        loss = agent.update(memory.sample(256))
        if step % 100 == 0:
            print(f"step {step}: critic {loss.item():.4f}")
        yield loss
