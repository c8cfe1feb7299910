"""The demo's small job: the 1,797 handwritten digits that come with scikit-learn, and a network with dropout."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phonograph.cli.console import CannotRun
from race import Batch, Job

BATCH = 64
TEST_IMAGES = 297  # the last ones are kept out of training

DESCRIPTION = f"1,797 handwritten digits, MLP 64-128-10 with dropout, batch {BATCH}, SGD with momentum and a schedule"


def load(device: torch.device) -> tuple[Tensor, Tensor]:
    """Images as (1797, 64) float32 in 0..1 and labels as (1797,) int64."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise CannotRun("the demo's images come with scikit-learn: pip install 'phonograph[demo]'") from None
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    return images.to(device), torch.tensor(digits.target, dtype=torch.int64).to(device)


def network() -> nn.Sequential:
    """The network that is trained."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))


def batch_order(images: int, steps: int, seed: int) -> Tensor:
    """Which images each step sees, as (steps, BATCH): epoch after epoch in a new order, every batch full."""
    generator = torch.Generator().manual_seed(seed)
    epochs = steps * BATCH // images + 1
    order = torch.cat([torch.randperm(images, generator=generator) for _ in range(epochs)])
    return order[: steps * BATCH].view(steps, BATCH)


def make_job(images: Tensor, labels: Tensor, steps: int, seed: int) -> Job:
    """The job from its seed: same seed, same weights, same batches."""
    torch.manual_seed(seed)
    model = network().to(images.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # A new learning rate after every block of steps: it reaches the recorded step without a new recording.
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.97)
    order = batch_order(len(images) - TEST_IMAGES, steps, seed).to(images.device)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def batches(start: int, stop: int) -> list[Batch]:
        return [(images[chosen], labels[chosen]) for chosen in order[start:stop]]

    return Job("digits", step, batches, scheduler.step, lambda: list(model.state_dict().values()))


def accuracy(weights: list[Tensor], images: Tensor, labels: Tensor) -> float:
    """The share of the kept-out images that a network with these weights names right."""
    model = network().to(images.device).eval()
    model.load_state_dict(dict(zip(model.state_dict(), weights, strict=True)))
    with torch.no_grad():
        named = model(images[-TEST_IMAGES:]).argmax(1)
    return float((named == labels[-TEST_IMAGES:]).float().mean())
