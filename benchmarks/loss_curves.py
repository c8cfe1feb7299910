"""Loss curves on real data: live, with the whole step recorded, and with model and optimizer recorded, equal at every step.

    python benchmarks/loss_curves.py                 # on a GPU: digits, the standard library's text, photographs
    python benchmarks/loss_curves.py --device cpu    # the digits

Deterministic algorithms on, the same seed; a scheduler in the loop changes the learning rate after each step. The digits and
the photographs come with scikit-learn, which needs Pillow to read the latter; ResNet-50 comes from timm (which brings Pillow):

    pip install 'phonograph[demo]' timm
"""

from __future__ import annotations

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import harness
import phonograph as pg
from phonograph.cli.console import CannotRun

sys.path.append(str(Path(__file__).parents[1] / "examples" / "demo"))
import digits
import gpt

CLAIM, STEPS = "loss_curves", 200
LIVE, AGAIN, WHOLE, PAIR = "live", "live again", "whole step", "model and optimizer"
SIDE, CROPS, CLASSES = 224, 8, 12  # pixels; crops of photographs in a batch of 16; ten digits and two photographs


@dataclass(frozen=True)
class Work:
    """What is trained: `batch(n)` is that of step n, the same in each run."""

    what: str
    model: Callable[[], nn.Module]
    optimizer: Callable[..., torch.optim.Optimizer]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    autocast: torch.dtype | None = None


@dataclass(frozen=True)
class Curve:
    """One run: the loss of each step and the final weights and buffers, on the CPU, and what was recorded."""

    losses: Tensor
    weights: list[Tensor]
    recorded: dict[str, pg.Stats]

    def equals(self, other: Curve) -> bool:
        same_weights = all(map(torch.equal, self.weights, other.weights))
        return torch.equal(self.losses, other.losses) and same_weights


# ---- the three jobs ------------------------------------------------------------------------------


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(32 * 16, 10),
    )  # fmt: skip


def handwriting(device: torch.device, steps: int) -> Work:
    images, labels = digits.load(device)
    order = digits.batch_order(len(images) - digits.TEST_IMAGES, steps, seed=0).to(device)
    return Work(
        f"1,797 handwritten digits, two convolutions with batch norm and dropout, batch {digits.BATCH}, SGD with momentum",
        lambda: convolutions().to(device),
        partial(torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True),
        lambda n: (images[order[n]], labels[order[n]]),
    )


def source_text(device: torch.device, steps: int) -> Work:
    text = gpt.load(device)
    starts = torch.randint(len(text) - gpt.CONTEXT - 1, (steps, gpt.BATCH, 1), generator=torch.Generator().manual_seed(0))
    starts, window = starts.to(device), torch.arange(gpt.CONTEXT + 1, device=device)

    def batch(n: int) -> tuple[Tensor, Tensor]:
        pieces = text[starts[n] + window]
        return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()

    return Work(gpt.DESCRIPTION, lambda: gpt.GPT().to(device), partial(torch.optim.AdamW, lr=1e-3, fused=True), batch)


def photographs(device: torch.device, steps: int) -> Work:
    import timm

    photos, (images, labels) = sample_photographs(device), digits.load(device)
    generator = torch.Generator().manual_seed(0)
    which = torch.randint(len(images), (steps, CROPS), generator=generator).to(device)
    corners = torch.rand(steps, CROPS, 2, generator=generator)
    halves = torch.arange(CROPS) % len(photos)

    def crop(photo: int, corner: Tensor) -> Tensor:
        top, left = (int(at * (size - SIDE)) for at, size in zip(corner, photos[photo].shape[1:], strict=True))
        return photos[photo][:, top : top + SIDE, left : left + SIDE]

    def batch(n: int) -> tuple[Tensor, Tensor]:
        crops = torch.stack([crop(int(photo), corner) for photo, corner in zip(halves, corners[n], strict=True)])
        written = F.interpolate(images[which[n]].view(-1, 1, 8, 8), size=SIDE).expand(-1, 3, -1, -1)
        pictures = torch.cat([crops, written]).contiguous(memory_format=torch.channels_last)
        return pictures, torch.cat([halves.to(device) + 10, labels[which[n]]])

    return Work(
        f"crops of scikit-learn's photographs and its digits, {SIDE} x {SIDE}, ResNet-50 of timm, batch 16, bf16 autocast, SGD",
        lambda: timm.create_model("resnet50", num_classes=CLASSES).to(device, memory_format=torch.channels_last),
        partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=5e-5),
        batch,
        torch.bfloat16,
    )


def sample_photographs(device: torch.device) -> list[Tensor]:
    """The two photographs as (3, rows, columns) float32 in 0..1."""
    from sklearn.datasets import load_sample_images

    try:
        images = load_sample_images().images
    except ImportError:
        raise CannotRun("scikit-learn reads its photographs with Pillow: pip install pillow") from None
    return [torch.tensor(image, device=device).permute(2, 0, 1).float() / 255 for image in images]


# ---- the three ways ------------------------------------------------------------------------------


def train(work: Work, way: str, device: torch.device, steps: int) -> Curve:
    torch.manual_seed(0)
    model = work.model()
    optimizer = work.optimizer(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    recorded: dict[str, Any] = {}

    def record(name: str, function: Any) -> Any:
        recorded[name] = pg.record(function, name=name)
        return recorded[name]

    called = record("model", model) if way == PAIR else model
    update = record("optimizer", optimizer.step) if way == PAIR else optimizer.step

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device.type, work.autocast, cache_enabled=False) if work.autocast else nullcontext():
            loss = F.cross_entropy(called(x).float().flatten(0, -2), y.flatten())
        loss.backward()
        update()
        return loss.detach()

    run = record("step", step) if way == WHOLE else step
    losses = []
    for n in range(steps):
        losses.append(run(*work.batch(n)))
        scheduler.step()
    weights = [tensor.cpu() for tensor in model.state_dict().values()]
    return Curve(torch.stack(losses).cpu(), weights, {name: pg.stats(one) for name, one in recorded.items()})


def compare(work: Work, device: torch.device, steps: int) -> dict[str, Any]:
    """Live twice, so that a job which is not repeatable by itself is not mistaken for a difference; then recorded."""
    live = train(work, LIVE, device, steps)
    found: dict[str, Any] = {
        "what": work.what,
        "steps": steps,
        "first loss": live.losses[0].item(),
        "last loss": live.losses[-1].item(),
        "live repeats itself": train(work, AGAIN, device, steps).equals(live),
    }
    for way in (WHOLE, PAIR):
        curve = train(work, way, device, steps)
        found[way] = {
            "equal": curve.equals(live),
            "steps of equal loss": int((curve.losses == live.losses).sum()),
            "replays": {name: stats.replayed for name, stats in curve.recorded.items()},
            "live calls": {name: stats.live for name, stats in curve.recorded.items()},
            "refusals": {name: dict(stats.refusals) for name, stats in curve.recorded.items() if stats.refusals},
        }
    return found


def passed(figure: dict[str, Any], steps: int) -> bool:
    """Equal in both ways, and replayed but for a few calls at the beginning."""
    ways = [figure[WHOLE], figure[PAIR]]
    return all(way["equal"] and min(way["replays"].values()) >= steps * 0.9 for way in ways)


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--threads", type=int, default=1, help="that torch works with on the CPU (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # its extra kernels are not what is compared
    device, steps = torch.device(arguments.device), 30 if arguments.quick else STEPS
    works = {"digits": handwriting, "GPT": source_text, "ResNet-50": photographs}
    names = ["digits"] if device.type == "cpu" else list(works)
    claim = f"{CLAIM}_cpu" if device.type == "cpu" else CLAIM
    target = f"{steps} steps on real data, {', '.join(names)}: every loss and all weights equal, live and recorded both ways"
    report = harness.Report(claim, target, arguments)
    for name in names:
        with harness.trying(report, name):
            report.figures[name] = compare(works[name](device, steps), device, steps)
    if not report.rows:  # no job failed
        report.decide(all(passed(figure, steps) for figure in report.figures.values()))
    return harness.finish(report)


if __name__ == "__main__":
    raise SystemExit(main())
