"""Train an agent in an environment that is written in torch: rollout, returns and update in one launch.

    python examples/rollout.py

64 pendulums are swung up by an actor and a critic. A call is `ROUNDS` rounds (`steps=`), each a rollout (`pg.repeat`: a loop of
the graph) and an update with autograd and Adam. The pendulums' state is carried from round to round, and from call to call.
Rewards and weights must equal the live run's, bit for bit.
"""

import os
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for bitwise equal matmuls on a GPU

import torch
from torch import Tensor, nn
from torch.distributions import Normal

import phonograph as pg

PENDULUMS, LENGTH, ROUNDS, CALLS, DISCOUNT = 64, 32, 4, 12, 0.95
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


def swung(state: Tensor, torque: Tensor) -> tuple[Tensor, Tensor]:
    """(angle and speed (n, 2), torque (n, 1)) -> the next state, and the reward (n,)."""
    angle, speed = state.unbind(1)
    force = 2 * torque[:, 0].tanh()
    upright = torch.remainder(angle + torch.pi, 2 * torch.pi) - torch.pi
    reward = -(upright.square() + 0.1 * speed.square() + 0.001 * force.square())
    speed = (speed + 0.05 * (15 * angle.sin() + 3 * force)).clamp(-8, 8)
    return torch.stack((angle + 0.05 * speed, speed), 1), reward


def observed(state: Tensor) -> Tensor:
    angle, speed = state.unbind(-1)
    return torch.stack((angle.cos(), angle.sin(), speed), -1)


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = mlp(), mlp()
        self.log_std = nn.Parameter(torch.zeros(1))

    def policy(self, seen: Tensor) -> Normal:
        return Normal(self.actor(seen), self.log_std.exp(), validate_args=False)

    @torch.no_grad()
    def rollout(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The state afterwards, and of each step the states, torques and rewards (LENGTH, n, ...)."""

        def turn(i: Tensor, state: Tensor, *seen: Tensor) -> tuple[Tensor, ...]:
            mean = self.actor(observed(state))
            torque = mean + self.log_std.exp() * torch.randn_like(mean)
            following, reward = swung(state, torque)
            for column, new in zip(seen, (state, torque, reward), strict=True):
                column.index_copy_(0, i, new[None])
            return i + 1, following, *seen

        columns = [state.new_zeros(LENGTH, PENDULUMS, *width) for width in ((2,), (1,), ())]
        _, state, *columns = pg.repeat(LENGTH, turn, (torch.zeros(1, dtype=torch.int64, device=state.device), state, *columns))
        return state, *columns


def returns(rewards: Tensor, last: Tensor) -> Tensor:
    """What is still to come after each step, discounted."""
    found = []
    for reward in rewards.flip(0):
        last = reward + DISCOUNT * last
        found.append(last)
    return torch.stack(found[::-1])


def train(record: bool) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(0)
    agent = Agent().to(DEVICE)
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3)

    def round_(state: Tensor) -> tuple[Tensor, Tensor]:
        state, states, torques, rewards = agent.rollout(state)
        seen = observed(states)
        with torch.no_grad():
            gains = returns(rewards, agent.critic(observed(state))[:, 0])
        values, policy = agent.critic(seen)[..., 0], agent.policy(seen)
        advantage = (gains - values).detach()
        objective = (policy.log_prob(torques)[..., 0] * advantage).mean()
        loss = (gains - values).square().mean() - objective - 0.01 * policy.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 1.0)
        optimizer.step()
        return state, rewards.mean()

    def rounds(state: Tensor) -> tuple[Tensor, Tensor]:
        found = []
        for _ in range(ROUNDS):
            state, reward = round_(state)
            found.append(reward)
        return state, torch.stack(found)

    call = pg.record(round_, steps=ROUNDS, carry=["state"], results=("last", "stack")) if record else rounds
    state = torch.randn(PENDULUMS, 2, device=DEVICE)
    rewards, begin = [], time.perf_counter()
    for n in range(CALLS):
        if n == 3:  # warm, and recorded
            begin = time.perf_counter()
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 - n / CALLS)
        state, reward = call(state)
        rewards.append(reward)
    everything = torch.cat(rewards).cpu()  # waits for the GPU, so the clock below is honest
    print(f"{'recorded' if record else 'live':9s} {(CALLS - 3) * ROUNDS / (time.perf_counter() - begin):8,.1f} rounds/s")
    if record:
        print(pg.stats(call))
    return everything, [weight.detach() for weight in agent.parameters()]


if __name__ == "__main__":
    torch.use_deterministic_algorithms(DEVICE == "cuda")  # the CPU's kernels are deterministic as they are
    live_rewards, live_weights = train(record=False)
    rewards, weights = train(record=True)
    assert torch.equal(live_rewards, rewards), "the rewards differ"
    assert all(map(torch.equal, live_weights, weights)), "the weights differ"
    print("bitwise equal")
