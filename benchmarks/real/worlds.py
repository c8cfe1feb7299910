"""Small worlds in NumPy for the agents, with the interface of a vectorised environment, and what they remember."""

from __future__ import annotations

import numpy as np
import torch


class Springs:
    """Masses on springs, to be pushed to the middle: `reset()`, `step(actions)`; an episode ends after `limit` steps."""

    def __init__(self, count: int, observed: int, actions: int, limit: int = 200, seed: int = 1) -> None:
        self.rng = np.random.default_rng(seed)
        self.count, self.observed, self.actions, self.limit = count, observed, actions, limit
        self.inward = self.rng.normal(size=(actions, observed)).astype(np.float32) * 0.1

    def reset(self) -> np.ndarray:
        self.age = np.zeros(self.count, dtype=np.int64)
        self.place = self.rng.normal(size=(self.count, self.observed)).astype(np.float32)
        return self.place.copy()

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        self.age += 1
        self.place = (0.97 * self.place + np.clip(actions, -1, 1) @ self.inward).astype(np.float32)
        rewards = -np.square(self.place).mean(1)
        dones = self.age >= self.limit
        if dones.any():
            self.place[dones] = self.rng.normal(size=(int(dones.sum()), self.observed))
            self.age[dones] = 0
        return self.place.copy(), rewards.astype(np.float32), dones.astype(np.float32)


class ReplayBuffer:
    """The last `size` transitions as tensors on the device; `sample(n)` picks rows with NumPy's generator."""

    def __init__(self, size: int, observed: int, actions: int, device: str, whole_actions: bool = False) -> None:
        kind = torch.int64 if whole_actions else torch.float32
        self.columns = {
            "obs": torch.zeros(size, observed, device=device),
            "actions": torch.zeros(size, actions, device=device, dtype=kind),
            "rewards": torch.zeros(size, device=device),
            "next_obs": torch.zeros(size, observed, device=device),
            "dones": torch.zeros(size, device=device),
        }
        self.size, self.device, self.place, self.full = size, device, 0, False

    def add(self, obs: np.ndarray, actions: np.ndarray, rewards: np.ndarray, next_obs: np.ndarray, dones: np.ndarray) -> None:
        rows = (np.arange(len(obs)) + self.place) % self.size
        where = torch.as_tensor(rows, device=self.device)
        for column, new in zip(self.columns.values(), (obs, actions, rewards, next_obs, dones), strict=True):
            column[where] = torch.as_tensor(new, device=self.device, dtype=column.dtype)
        self.full |= self.place + len(obs) >= self.size
        self.place = int(rows[-1] + 1) % self.size

    def sample(self, count: int) -> dict[str, torch.Tensor]:
        rows = torch.as_tensor(np.random.randint(0, self.size if self.full else self.place, size=count), device=self.device)
        return {name: column[rows] for name, column in self.columns.items()}
