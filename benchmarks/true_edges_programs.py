"""Whole training steps in which much could run at the same time, or little; `true_edges.py` records them.

What is random in them is drawn outside, as a graph that draws stays a chain. On the CPU the larger ones shrink.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal

import ppo_update
from real.sac import Actor, SoftQ
from set_up import GPT
from workloads import Training, training

CALLS = 20  # each with inputs of its own


def batches(device: str, *shapes: tuple[int, ...]) -> list[tuple[Tensor, ...]]:
    return [tuple(torch.randn(shape, device=device) for shape in shapes) for _ in range(CALLS)]


def mlp(given: int, wide: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(given, wide), nn.Tanh(), nn.Linear(wide, wide), nn.Tanh(), nn.Linear(wide, outputs))


def clipped(model: nn.Module, most: float) -> Callable[..., Any]:
    """What comes between a backward and the optimizer's step, and that step."""
    return lambda apply: lambda: (nn.utils.clip_grad_norm_(model.parameters(), most), apply())


def ppo(device: str) -> Training:
    caught = nn.ModuleList()
    step = ppo_update.updater(device, lambda agent: caught.append(agent)[0], capturable=True)
    return Training(step, ppo_update.minibatches(device, CALLS), caught)


def acted(actor: Actor, seen: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    mean, log_std = actor(seen)
    raw = mean + noise * log_std.exp()
    action = raw.tanh()
    log_prob = Normal(mean, log_std.exp(), validate_args=False).log_prob(raw) - torch.log(1 - action.square() + 1e-6)
    return action, log_prob.sum(1)


def sac(device: str) -> Training:
    """Both critics, the actor and both targets, in one step. The temperature is fixed."""
    actor, critics = Actor(17, 6).to(device), nn.ModuleList([SoftQ(17, 6) for _ in range(2)]).to(device)
    targets = deepcopy(critics).requires_grad_(False)
    learn, act = (torch.optim.Adam(m.parameters(), lr=1e-3, fused=True, capturable=True) for m in (critics, actor))

    def update(seen: Tensor, actions: Tensor, rewards: Tensor, following: Tensor, *noise: Tensor) -> Tensor:
        with torch.no_grad():
            action, log_prob = acted(actor, following, noise[0])
            wanted = rewards + 0.99 * (torch.min(*[target(following, action) for target in targets]) - 0.2 * log_prob)
        loss = sum(F.mse_loss(critic(seen, actions), wanted) for critic in critics)
        learn.zero_grad()
        loss.backward()
        learn.step()
        action, log_prob = acted(actor, seen, noise[1])
        actor_loss = (0.2 * log_prob - torch.min(*[critic(seen, action) for critic in critics])).mean()
        act.zero_grad()
        actor_loss.backward(inputs=[*actor.parameters()])
        act.step()
        with torch.no_grad():
            torch._foreach_lerp_([*targets.parameters()], [*critics.parameters()], 0.005)
        return loss.detach() + actor_loss.detach()

    data = batches(device, (256, 17), (256, 6), (256,), (256, 17), (256, 6), (256, 6))
    return Training(update, data, nn.ModuleList([actor, critics, targets]))


def ensemble(device: str) -> Training:
    """Ten nets of three layers, and their losses' sum."""
    nets = nn.ModuleList([mlp(20, 128, 4) for _ in range(10)]).to(device)
    data = batches(device, (128, 20), (128, 4))
    return training(nets, lambda x, y: sum(F.mse_loss(net(x), y) for net in nets), data, capturable=True)


def world(device: str) -> Training:
    """A recurrent state, what it expects and what it finds, and heads for what is seen, the reward, and whether it goes on."""
    steps, wide = 2 if device == "cpu" else 8, 128
    parts = [mlp(24, wide, 64), nn.GRUCell(32 + 6, wide), mlp(wide, wide, 32), mlp(wide + 64, wide, 32)]
    model = nn.ModuleList([*parts, *(mlp(wide + 32, wide, outputs) for outputs in (24, 1, 1))]).to(device)
    codes, cell, expects, finds, *heads = model

    def loss_of(seen: Tensor, actions: Tensor, rewards: Tensor) -> Tensor:
        state, found, losses = seen.new_zeros(16, wide), seen.new_zeros(16, 32), []
        for now, code, action, reward in zip(seen, codes(seen), actions, rewards, strict=True):
            state = cell(torch.cat([found, action], 1), state)
            before, after = expects(state), finds(torch.cat([state, code], 1))
            found = after.tanh()
            picture, worth, ends = (head(torch.cat([state, found], 1)) for head in heads)
            losses += [F.mse_loss(picture, now), F.mse_loss(worth.squeeze(1), reward), F.softplus(ends).mean()]
            losses += [F.mse_loss(before, after.detach()), 0.1 * F.mse_loss(before.detach(), after)]
        return sum(losses)

    data = batches(device, (steps, 16, 24), (steps, 16, 6), (steps, 16))
    return training(model, loss_of, data, clipped(model, 100.0), capturable=True)


def of_texts(device: str, model: nn.Module, words: int, length: int, autocast: bool, *beside: Any) -> Training:
    """Two random texts a step, each word of which tells itself."""

    def loss_of(tokens: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=autocast, cache_enabled=False):
            return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())

    data = [(torch.randint(words, (2, length), device=device),) for _ in range(CALLS)]
    return training(model, loss_of, data, *beside, capturable=True)


def encoder(device: str) -> Training:
    """A transformer's encoder of width 256, in bfloat16 by autocast."""
    layers, length = (2, 16) if device == "cpu" else (12, 128)
    layer = nn.TransformerEncoderLayer(256, 8, 1024, 0.0, batch_first=True, norm_first=True)
    body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(1000, 256), body, nn.Linear(256, 1000)).to(device)
    return of_texts(device, model, 1000, length, True)


def gpt(device: str) -> Training:
    """Four layers of GPT-2's width."""
    layers, wide, words, length = (2, 48, 256, 16) if device == "cpu" else (4, 768, 4096, 256)
    model = GPT(layers, wide, words, length, heads=12).to(device)
    return of_texts(device, model, words, length, False, clipped(model, 1.0))


PROGRAMS: dict[str, Callable[[str], Training]] = {
    "PPO": ppo, "SAC": sac, "ensemble": ensemble, "world model": world, "encoder": encoder, "GPT": gpt,
}  # fmt: skip
