"""A training script as people write them on the first day: it has ten habits for which a step cannot be recorded."""

import argparse
import random
import time
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 4
FEATURES = 16


@dataclass
class Config:
    """The settings of a run."""

    lr: float = 1e-3
    batch: int = 32
    steps: int = 40
    hidden: int = 64
    noise: float = 0.05
    spike: float = 5.0
    seed: int = 0


@dataclass
class History:
    """What is kept of a run."""

    losses: list = field(default_factory=list)
    accuracies: list = field(default_factory=list)

    def last(self):
        return self.losses[-1] if self.losses else float("nan")


class Net(nn.Module):
    """A small classifier."""

    def __init__(self, hidden):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(FEATURES, hidden),
            nn.LayerNorm(hidden),
            nn.GELU(),
            nn.Linear(hidden, hidden),
            nn.GELU(),
        )
        self.head = nn.Linear(hidden, CLASSES)

    def forward(self, x):
        return self.head(self.body(x))


def make_data(n=512, seed=0):
    """Four clouds of points."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, FEATURES, generator=generator) * 2
    labels = torch.randint(0, CLASSES, (n,), generator=generator)
    points = centres[labels] + torch.randn(n, FEATURES, generator=generator)
    return TensorDataset(points, labels)


def accuracy(logits, y):
    """The share of right answers."""
    guesses = logits.detach().numpy().argmax(axis=1)  # 1: through NumPy
    return float((guesses == y.numpy()).mean())


def hard_examples(logits, y):
    """The loss of those that are wrong."""
    wrong = logits.argmax(dim=1) != y
    logits, y = logits[wrong], y[wrong]  # 2: a shape that depends on data
    return F.cross_entropy(logits, y, reduction="sum") / max(len(y), 1)


def regularization(model, validation):
    """How far the outputs drift on a few batches of other data."""
    total = torch.zeros(())
    for x, _ in DataLoader(validation, batch_size=64):  # 3: a loader inside of the step
        total = total + model(x).pow(2).mean()
    return total


def train_step(model, optimizer, validation, x, y, step, config, history):
    """One step, with everything in it that one wants to know."""
    begin = time.perf_counter()  # 4: a clock
    if random.random() < 0.5:  # 5: Python's random numbers
        x = x.flip(0)
        y = y.flip(0)
    x = x + config.noise * torch.randn_like(x)

    logits = model(x)
    loss = F.cross_entropy(logits, y)
    warmup = torch.tensor(min(1.0, (step + 1) / 10))  # 6: a tensor made of a number that changes
    loss = loss * warmup
    loss = loss + 0.1 * hard_examples(logits, y)
    loss = loss + 1e-4 * regularization(model, validation)

    if loss > config.spike:  # 7: a branch on a value
        loss = loss * (config.spike / loss.detach())

    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

    history.losses.append(loss.item())  # 8: .item() for the log
    history.accuracies.append(accuracy(logits, y))
    if step % 10 == 0:
        print("logits", logits[0])  # (in every tenth step only)
    print(f"step {step}: {loss:.3f} after {time.perf_counter() - begin:.4f} s")  # 9: prints
    return logits.detach().tolist()  # 10: a list of numbers


def batches(data, size, steps):
    """Batches without end."""
    loader = DataLoader(data, batch_size=size, shuffle=True, drop_last=True)
    done = 0
    while True:
        for batch in loader:
            yield batch
            done += 1
            if done == steps:
                return


def evaluate(model, data):
    """The accuracy on all of the data."""
    model.eval()
    with torch.no_grad():
        right = [(model(x).argmax(1) == y).sum().item() for x, y in DataLoader(data, batch_size=128)]
    model.train()
    return sum(right) / len(data)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=1e-3)
    arguments = parser.parse_args()
    config = Config(steps=arguments.steps, lr=arguments.lr)
    torch.manual_seed(config.seed)
    random.seed(config.seed)
    np.random.seed(config.seed)

    data, validation = make_data(), make_data(128, seed=1)
    model = Net(config.hidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    history = History()
    for step, (x, y) in enumerate(batches(data, config.batch, config.steps)):
        train_step(model, optimizer, validation, x, y, step, config, history)
    print(f"last loss {history.last():.3f}, accuracy {evaluate(model, data):.3f}")


if __name__ == "__main__":
    main()
