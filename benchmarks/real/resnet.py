"""Training a small ResNet as timm's script does: mixup, soft targets, an average of the weights (EMA), a schedule by epochs."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from real import rivals

STEPS, ROUND = 20, 10
RIVAL = ("reduce-overhead", rivals.reduce_overhead, {})


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.act = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.act(self.bn1(self.conv1(x)))
        return self.act(self.bn2(self.conv2(x)) + shortcut)


class ResNet(nn.Module):
    def __init__(self, classes: int = 10, widths: tuple[int, ...] = (16, 32, 64)) -> None:
        super().__init__()
        blocks, inputs = [], widths[0]
        self.stem = nn.Sequential(nn.Conv2d(3, inputs, 3, 1, 1, bias=False), nn.BatchNorm2d(inputs), nn.ReLU(inplace=True))
        for stage, width in enumerate(widths):
            for block in range(2):
                blocks.append(BasicBlock(inputs, width, 2 if stage and not block else 1))
                inputs = width
        self.blocks = nn.Sequential(*blocks)
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.pool(self.blocks(self.stem(x))).flatten(1))


class ModelEma(nn.Module):
    def __init__(self, model: nn.Module, decay: float = 0.99) -> None:
        super().__init__()
        self.module, self.decay = deepcopy(model).eval(), decay

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for mine, theirs in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            mine.copy_(self.decay * mine + (1.0 - self.decay) * theirs)


class AverageMeter:
    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value: float, n: int = 1) -> None:
        self.sum, self.count = self.sum + value * n, self.count + n

    @property
    def avg(self) -> float:
        return self.sum / max(self.count, 1)


def mixup(x: Tensor, target: Tensor, classes: int, alpha: float = 0.2, smoothing: float = 0.1) -> tuple[Tensor, Tensor]:
    lam = np.random.beta(alpha, alpha)
    soft = torch.full((len(target), classes), smoothing / classes, device=x.device)
    soft.scatter_(1, target[:, None], 1 - smoothing + smoothing / classes)
    return x * lam + x.flip(0) * (1 - lam), soft * lam + soft.flip(0) * (1 - lam)


def run(device: str, record) -> Iterator[object]:
    model = ResNet().to(device)
    ema = ModelEma(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-5, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    images, labels = torch.randn(128, 3, 32, 32), torch.randint(0, 10, (128,))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), batch_size=16, shuffle=True)

    model = record(model)

    yield model, ema, optimizer
    for epoch in range(1_000_000):
        model.train()
        losses = AverageMeter()
        for index, (x, target) in enumerate(loader):
            x, target = mixup(x.to(device), target.to(device), classes=10)
            output = model(x)
            loss = torch.sum(-target * F.log_softmax(output, dim=-1), dim=-1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update(model)
            if index % 5 == 0:
                losses.update(loss.item(), x.size(0))
                print(f"train {epoch} [{index}/{len(loader)}] loss {losses.avg:.4f} lr {optimizer.param_groups[0]['lr']:.4f}")
            yield loss, output
        scheduler.step()
