"""Record the update of a PPO agent: a small network, called thousands of times, where launching is all the cost.

    python examples/ppo_update.py

One recording serves every minibatch of every epoch; the learning rate is annealed by hand, as PPO scripts do. The
rollouts are drawn at random (there is no environment here); losses and weights must equal the live run's, bit for bit.
"""

import os
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for bitwise equal matmuls on a GPU

import torch
from torch import Tensor, nn
from torch.distributions import Normal

import phonograph as pg

OBSERVED, ACTIONS, MINIBATCH, MINIBATCHES, EPOCHS, UPDATES = 17, 6, 64, 8, 4, 6
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def mlp(outputs: int) -> nn.Sequential:
    layers = [nn.Linear(OBSERVED, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)]
    return nn.Sequential(*layers)


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = mlp(ACTIONS), mlp(1)
        self.log_std = nn.Parameter(torch.zeros(1, ACTIONS))

    def loss(self, seen: Tensor, done: Tensor, old_log_prob: Tensor, advantage: Tensor, gain: Tensor) -> Tensor:
        """PPO's clipped objective, the value loss and the entropy bonus."""
        policy = Normal(self.actor(seen), self.log_std.exp().expand(len(seen), -1), validate_args=False)
        ratio = (policy.log_prob(done).sum(1) - old_log_prob).exp()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        objective = torch.min(advantage * ratio, advantage * ratio.clamp(0.8, 1.2)).mean()
        value_loss = 0.5 * (self.critic(seen).view(-1) - gain).square().mean()
        return -objective + 0.5 * value_loss - 0.01 * policy.entropy().sum(1).mean()


def rollout(generator: torch.Generator) -> list[Tensor]:
    """What an environment would have given: one row for each of MINIBATCH * MINIBATCHES steps."""
    rows = MINIBATCH * MINIBATCHES
    widths = [(OBSERVED,), (ACTIONS,), (), (), ()]
    return [torch.randn(rows, *width, generator=generator).to(DEVICE) for width in widths]


def train(record: bool) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(0)
    agent = Agent().to(DEVICE)
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-4)

    def update(*minibatch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = agent.loss(*minibatch)
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
        return loss.detach()

    if record:
        update = pg.record(update)

    generator = torch.Generator().manual_seed(1)
    losses = []
    begin = time.perf_counter()
    for number in range(UPDATES):
        optimizer.param_groups[0]["lr"] = 3e-4 * (1 - number / UPDATES)
        data = rollout(generator)
        for _ in range(EPOCHS):
            for rows in torch.randperm(MINIBATCH * MINIBATCHES, generator=generator).to(DEVICE).split(MINIBATCH):
                losses.append(update(*(column[rows] for column in data)))
    everything = torch.stack(losses).cpu()  # waits for the GPU, so the clock below is honest
    seconds = time.perf_counter() - begin
    print(f"{'recorded' if record else 'live':9s} {len(losses) / seconds:8,.0f} updates/s")
    if record:
        print(pg.stats(update))
    return everything, [weight.detach() for weight in agent.parameters()]


if __name__ == "__main__":
    torch.use_deterministic_algorithms(DEVICE == "cuda")  # the CPU's kernels are deterministic as they are
    live_losses, live_weights = train(record=False)
    losses, weights = train(record=True)
    assert torch.equal(live_losses, losses), "the losses differ"
    assert all(map(torch.equal, live_weights, weights)), "the weights differ"
    print("bitwise equal")
