"""A CIFAR speedrun after airbench: half precision, channels last, whitening, label smoothing, Nesterov, one rate a group."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from real import rivals

STEPS, ROUND = 24, 12
RIVAL = ("reduce-overhead", rivals.reduce_overhead, {})
hyp = {"batch_size": 64, "lr": 5.0, "bias_scaler": 16.0, "momentum": 0.85, "weight_decay": 0.015, "label_smoothing": 0.2}


class BatchNorm(nn.BatchNorm2d):
    def __init__(self, features: int, momentum: float = 0.6) -> None:
        super().__init__(features, eps=1e-12, momentum=1 - momentum)
        self.weight.requires_grad = False


class ConvGroup(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding="same", bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding="same", bias=False)
        self.pool, self.norm1, self.norm2 = nn.MaxPool2d(2), BatchNorm(outputs), BatchNorm(outputs)
        self.activ = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.activ(self.norm1(self.pool(self.conv1(x))))
        return self.activ(self.norm2(self.conv2(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.whiten = nn.Conv2d(3, 24, 2, padding=0, bias=True)
        self.whiten.weight.requires_grad = False
        self.layers = nn.Sequential(nn.GELU(), ConvGroup(24, 32), ConvGroup(32, 64), nn.AdaptiveMaxPool2d(1), nn.Flatten())
        self.head = nn.Linear(64, 10, bias=False)

    def init_whiten(self, images: Tensor, eps: float = 5e-4) -> None:
        c, (h, w) = images.shape[1], self.whiten.weight.shape[2:]
        patches = images.unfold(2, h, 1).unfold(3, w, 1).transpose(1, 3).reshape(-1, c, h, w).float().flatten(1)
        values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches), UPLO="U")
        scaled = vectors.T.reshape(-1, c, h, w) / torch.sqrt(values.view(-1, 1, 1, 1) + eps)
        self.whiten.weight.data[:] = torch.cat([scaled, -scaled])

    def forward(self, x: Tensor, whiten_bias_grad: bool = True) -> Tensor:
        bias = self.whiten.bias if whiten_bias_grad else self.whiten.bias.detach()
        return self.head(self.layers(F.conv2d(x, self.whiten.weight, bias))) / 9


def run(device: str, record) -> Iterator[object]:
    half = torch.float16 if device == "cuda" else torch.float32
    images, labels = torch.randn(512, 3, 32, 32).to(device, half), torch.randint(0, 10, (512,)).to(device)
    model = Net().to(device).to(memory_format=torch.channels_last)
    if device == "cuda":
        model.half()
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module.float()
    model.init_whiten(images[:128])
    kilostep = 1024 * (1 + 1 / (1 - hyp["momentum"]))
    lr, wd = hyp["lr"] / kilostep, hyp["weight_decay"] * hyp["batch_size"] / kilostep
    biases = [p for name, p in model.named_parameters() if "norm" in name and p.requires_grad]
    others = [p for name, p in model.named_parameters() if "norm" not in name and p.requires_grad]
    groups = [
        {"params": biases, "lr": lr * hyp["bias_scaler"], "weight_decay": wd / (lr * hyp["bias_scaler"])},
        {"params": others, "lr": lr, "weight_decay": wd / lr},
    ]
    optimizer = torch.optim.SGD(groups, lr=lr, momentum=hyp["momentum"], nesterov=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(0.2 + step / 50, max(1.2 - step / 2000, 0.01)))
    loss_fn = nn.CrossEntropyLoss(label_smoothing=hyp["label_smoothing"], reduction="none")

    model = record(model)

    yield model, optimizer
    for epoch in range(1_000_000):
        model.train()
        order = torch.randperm(len(images), device=device)
        for i in range(len(images) // hyp["batch_size"]):
            which = order[i * hyp["batch_size"] : (i + 1) * hyp["batch_size"]]
            inputs = images[which].to(memory_format=torch.channels_last)
            outputs = model(inputs, whiten_bias_grad=epoch < 3)
            loss = loss_fn(outputs, labels[which]).sum()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            scheduler.step()
            yield loss, outputs
        accuracy = (outputs.detach().argmax(1) == labels[which]).float().mean().item()
        print(f"| {epoch:4d} | {loss.item() / hyp['batch_size']:.4f} | {accuracy:.3f} |")
