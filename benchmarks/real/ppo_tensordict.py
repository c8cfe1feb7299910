"""PPO whose rollouts are containers of tensors, as with tensordict: functions take one and give one, as LeanRL's do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from real import rivals, worlds
from real.ppo import Agent, Config, advantages

STEPS, ROUND = 4, 1
RIVAL = ("CudaGraphModule", rivals.cuda_graph_module, {"capturable": True})


class TensorDict:
    """Named tensors that share their first dimensions; an index or a method works on all of them."""

    def __init__(self, source: dict[str, Tensor], batch_size: tuple[int, ...]) -> None:
        self._source, self.batch_size = dict(source), torch.Size(batch_size)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            return self._source[index]
        return self._apply(lambda t: t[index])

    def __setitem__(self, name: str, value: Tensor) -> None:
        self._source[name] = value

    def __len__(self) -> int:
        return self.batch_size[0]

    def _apply(self, function: Callable[[Tensor], Tensor]) -> TensorDict:
        made = {name: function(t) for name, t in self._source.items()}
        lead = next(iter(made.values())).shape[: len(self.batch_size)]
        return TensorDict(made, lead)

    def view(self, *shape: int) -> TensorDict:
        made = {name: t.reshape(*shape, *t.shape[len(self.batch_size) :]) for name, t in self._source.items()}
        return TensorDict(made, next(iter(made.values())).shape[: len(shape)])

    def select(self, *names: str) -> TensorDict:
        return TensorDict({name: self._source[name] for name in names}, self.batch_size)

    @staticmethod
    def stack(rows: list[TensorDict]) -> TensorDict:
        made = {name: torch.stack([row[name] for row in rows]) for name in rows[0]._source}
        return TensorDict(made, (len(rows), *rows[0].batch_size))


def _constructor(source: dict[str, Tensor], batch_size: tuple[int, ...]) -> TensorDict:
    return TensorDict(source, batch_size)


def _flatten(td: TensorDict) -> tuple[list[Tensor], dict[str, Any]]:
    return list(td._source.values()), {"keys": list(td._source), "batch_size": td.batch_size, "constructor": _constructor}


def _unflatten(values: Any, context: dict[str, Any]) -> TensorDict:
    return context["constructor"](dict(zip(context["keys"], values, strict=True)), context["batch_size"])


pytree.register_pytree_node(TensorDict, _flatten, _unflatten)


def run(device: str, record, capturable: bool = False) -> Iterator[object]:
    args = Config()
    world = worlds.Springs(args.envs, observed=17, actions=6)
    agent = Agent(world.observed, world.actions).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.lr, eps=1e-5, capturable=capturable)

    @torch.no_grad()
    def policy(td: TensorDict) -> TensorDict:
        td["actions"], td["logprobs"], _, td["vals"] = agent.get_action_and_value(td["obs"])
        return td

    def update(td: TensorDict) -> TensorDict:
        _, newlogprob, entropy, newvalue = agent.get_action_and_value(td["obs"], td["actions"])
        ratio = (newlogprob - td["logprobs"]).exp()
        advantage = (td["advantages"] - td["advantages"].mean()) / (td["advantages"].std() + 1e-8)
        pg_loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(1 - args.clip, 1 + args.clip)).mean()
        v_loss = 0.5 * (newvalue - td["returns"]).square().mean()
        loss = pg_loss - args.entropy_coef * entropy.mean() + args.value_coef * v_loss
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
        optimizer.step()
        return TensorDict({"loss": loss.detach(), "entropy": entropy.mean().detach(), "norm": norm.detach()}, ())

    policy, update = record(policy), record(update)

    yield agent, optimizer
    obs = torch.as_tensor(world.reset(), device=device)
    for iteration in range(1_000_000):
        rows = []
        for _ in range(args.rollout):
            td = policy(TensorDict({"obs": obs}, (args.envs,)))
            seen, reward, done = world.step(td["actions"].cpu().numpy())
            td["rewards"], td["dones"] = torch.as_tensor(reward).to(device), torch.as_tensor(done).to(device)
            rows.append(td)
            obs = torch.as_tensor(seen).to(device)
        container = TensorDict.stack(rows)
        with torch.no_grad():
            following = agent.critic(obs).flatten()
            advantage = advantages(args, container["rewards"], container["dones"], container["vals"], following)
        container["advantages"], container["returns"] = advantage, advantage + container["vals"]
        flat = container.view(-1).select("obs", "actions", "logprobs", "advantages", "returns")
        for _ in range(args.epochs):
            for rows_of in torch.randperm(len(flat), device=device).chunk(args.minibatches):
                out = update(flat[rows_of])
        if iteration % 10 == 0:
            print(f"iteration {iteration}: loss {out['loss'].item():.4f}, norm {out['norm'].item():.3f}")
        yield out["loss"], out["entropy"]
