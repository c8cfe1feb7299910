"""PPO for continuous actions, after LeanRL: acting and updating are functions, each captured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributions import Normal

from real import rivals, worlds

STEPS, ROUND = 4, 1
RIVAL = ("CudaGraphModule", rivals.cuda_graph_module, {"capturable": True})


@dataclass
class Config:
    envs: int = 8
    rollout: int = 32
    epochs: int = 4
    minibatches: int = 4
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    entropy_coef: float = 0.01
    value_coef: float = 0.5
    max_grad_norm: float = 0.5
    lr: float = 3e-4


def layer(inputs: int, outputs: int, std: float = 2**0.5) -> nn.Linear:
    made = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(made.weight, std)
    nn.init.zeros_(made.bias)
    return made


class Agent(nn.Module):
    def __init__(self, observed: int, actions: int) -> None:
        super().__init__()
        self.critic = nn.Sequential(layer(observed, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, 1, 1.0))
        self.actor_mean = nn.Sequential(layer(observed, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, actions, 0.01))
        self.actor_logstd = nn.Parameter(torch.zeros(1, actions))

    def get_action_and_value(self, obs: Tensor, action: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean = self.actor_mean(obs)
        policy = Normal(mean, self.actor_logstd.expand_as(mean).exp())
        if action is None:
            action = mean + policy.stddev * torch.randn_like(mean)
        return action, policy.log_prob(action).sum(1), policy.entropy().sum(1), self.critic(obs).flatten()


def advantages(config: Config, rewards: Tensor, dones: Tensor, values: Tensor, following: Tensor) -> Tensor:
    """Generalised advantage estimation, from the last step to the first."""
    result, last = torch.zeros_like(rewards), torch.zeros_like(following)
    for t in reversed(range(len(rewards))):
        alive = 1.0 - dones[t]
        delta = rewards[t] + config.gamma * following * alive - values[t]
        result[t] = last = delta + config.gamma * config.gae_lambda * alive * last
        following = values[t]
    return result


def run(device: str, record, capturable: bool = False) -> Iterator[object]:
    config = Config()
    world = worlds.Springs(config.envs, observed=17, actions=6)
    agent = Agent(world.observed, world.actions).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=config.lr, eps=1e-5, capturable=capturable)

    @torch.no_grad()
    def act(obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        action, log_prob, _, value = agent.get_action_and_value(obs)
        return action, log_prob, value

    def update(obs: Tensor, actions: Tensor, log_probs: Tensor, advantage: Tensor, returns: Tensor) -> tuple[Tensor, Tensor]:
        _, new_log_prob, entropy, value = agent.get_action_and_value(obs, actions)
        ratio = (new_log_prob - log_probs).exp()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        clipped = ratio.clamp(1 - config.clip, 1 + config.clip)
        policy_loss = torch.max(-advantage * ratio, -advantage * clipped).mean()
        value_loss = 0.5 * (value - returns).square().mean()
        loss = policy_loss - config.entropy_coef * entropy.mean() + config.value_coef * value_loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), config.max_grad_norm)
        optimizer.step()
        return loss.detach(), entropy.mean().detach()

    act, update = record(act), record(update)

    yield agent, optimizer
    obs = torch.as_tensor(world.reset(), device=device)
    for iteration in range(1_000_000):
        kept = []
        for _ in range(config.rollout):
            action, log_prob, value = act(obs)
            seen, reward, done = world.step(action.cpu().numpy())
            kept.append((obs, action, log_prob, torch.as_tensor(reward).to(device), torch.as_tensor(done).to(device), value))
            obs = torch.as_tensor(seen).to(device)
        seen_obs, actions, log_probs, rewards, dones, values = (torch.stack(column) for column in zip(*kept, strict=True))
        with torch.no_grad():
            advantage = advantages(config, rewards, dones, values, agent.critic(obs).flatten())
        batch = [t.flatten(0, 1) for t in (seen_obs, actions, log_probs, advantage, advantage + values)]
        for _ in range(config.epochs):
            for rows in torch.randperm(len(batch[0]), device=device).chunk(config.minibatches):
                loss, entropy = update(*[column[rows] for column in batch])
        if iteration % 10 == 0:
            print(f"iteration {iteration}: return {rewards.sum(0).mean().item():.3f}, loss {loss.item():.4f}")
        yield loss, entropy
