"""A world model after Dreamer: a recurrent state-space model with straight-through categorical states, unrolled over time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Independent, Normal, OneHotCategoricalStraightThrough, kl_divergence

from real import rivals

STEPS, ROUND = 12, 4
RIVAL = ("CudaGraphModule", rivals.cuda_graph_module, {"capturable": True})
TIME, BATCH, SEEN, ACTIONS, DETER, GROUPS, CLASSES = 8, 8, 12, 3, 64, 8, 8


class RSSM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Sequential(nn.Linear(GROUPS * CLASSES + ACTIONS, 64), nn.ELU())
        self.cell = nn.GRUCell(64, DETER)
        self.prior = nn.Sequential(nn.Linear(DETER, 64), nn.ELU(), nn.Linear(64, GROUPS * CLASSES))
        self.posterior = nn.Sequential(nn.Linear(DETER + 64, 64), nn.ELU(), nn.Linear(64, GROUPS * CLASSES))

    def initial(self, batch: int, device: str) -> dict[str, Tensor]:
        return {"deter": torch.zeros(batch, DETER, device=device), "stoch": torch.zeros(batch, GROUPS * CLASSES, device=device)}

    def dist(self, logits: Tensor) -> Independent:
        return Independent(OneHotCategoricalStraightThrough(logits=logits.unflatten(-1, (GROUPS, CLASSES))), 1)

    def step(self, state: dict[str, Tensor], action: Tensor, embed: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        deter = self.cell(self.inputs(torch.cat([state["stoch"], action], -1)), state["deter"])
        prior, post = self.prior(deter), self.posterior(torch.cat([deter, embed], -1))
        return {"deter": deter, "stoch": self.dist(post).rsample().flatten(-2)}, prior, post

    def observe(self, embeds: Tensor, actions: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        features, priors, posts = [], [], []
        for action, embed in zip(actions, embeds, strict=True):
            state, prior, post = self.step(state, action, embed)
            features.append(torch.cat([state["deter"], state["stoch"]], -1))
            priors.append(prior)
            posts.append(post)
        return torch.stack(features), torch.stack(priors), torch.stack(posts)


class WorldModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.rssm = nn.Sequential(nn.Linear(SEEN, 64), nn.ELU(), nn.Linear(64, 64)), RSSM()
        self.decoder = nn.Sequential(nn.Linear(DETER + GROUPS * CLASSES, 64), nn.ELU(), nn.Linear(64, SEEN))
        self.reward = nn.Linear(DETER + GROUPS * CLASSES, 1)


def run(device: str, record, capturable: bool = False) -> Iterator[object]:
    model = WorldModel().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=6e-4, eps=1e-8, capturable=capturable)
    metrics: dict[str, list[float]] = {"loss": [], "kl": []}

    @record
    def train_batch(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        state = model.rssm.initial(BATCH, device)
        features, prior, post = model.rssm.observe(model.encoder(batch["obs"]), batch["action"], state)
        seen = Independent(Normal(model.decoder(features), 1.0), 1)
        reward = Normal(model.reward(features).squeeze(-1), 1.0)
        dist = model.rssm.dist
        dyn, rep = kl_divergence(dist(post.detach()), dist(prior)), kl_divergence(dist(post), dist(prior.detach()))
        kl = 0.8 * dyn.clamp(min=1.0) + 0.2 * rep.clamp(min=1.0)
        loss = (kl - seen.log_prob(batch["obs"]) - reward.log_prob(batch["reward"])).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
        return {"loss": loss.detach(), "kl": dyn.mean().detach()}

    yield model, optimizer
    for step in range(1_000_000):
        batch = {
            "obs": torch.randn(TIME, BATCH, SEEN).to(device),
            "action": F.one_hot(torch.randint(0, ACTIONS, (TIME, BATCH)), ACTIONS).float().to(device),
            "reward": torch.randn(TIME, BATCH).to(device),
        }
        out = train_batch(batch)
        if step % 10 == 0:
            for name, value in out.items():
                metrics[name].append(value.item())
            print(step, {name: round(values[-1], 4) for name, values in metrics.items()})
        yield out["loss"], out["kl"]
