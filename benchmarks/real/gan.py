"""A GAN after pytorch/examples' DCGAN: two networks, two optimizers, fakes that are detached for one and not for the other."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from real import rivals

STEPS, ROUND = 20, 10
RIVAL = ("CudaGraphModule", rivals.cuda_graph_module, {"capturable": True})
NOISE, BATCH = 32, 16


def weights_init(module: nn.Module) -> None:
    name = module.__class__.__name__
    if "Conv" in name:
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif "BatchNorm" in name:
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


def generator(width: int = 16) -> nn.Sequential:
    return nn.Sequential(
        nn.ConvTranspose2d(NOISE, width * 2, 4, 1, 0, bias=False), nn.BatchNorm2d(width * 2), nn.ReLU(True),
        nn.ConvTranspose2d(width * 2, width, 4, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True),
        nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip


def discriminator(width: int = 16) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(width, width * 2, 4, 2, 1, bias=False), nn.BatchNorm2d(width * 2), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(width * 2, 1, 4, 1, 0, bias=False), nn.Sigmoid(), nn.Flatten(0),
    )  # fmt: skip


def run(device: str, record, capturable: bool = False) -> Iterator[object]:
    net_g, net_d = generator().to(device).apply(weights_init), discriminator().to(device).apply(weights_init)
    criterion = nn.BCELoss()
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=2e-4, betas=(0.5, 0.999), capturable=capturable)
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=2e-4, betas=(0.5, 0.999), capturable=capturable)
    real_label, fake_label = 1, 0

    @record
    def train_step(real: Tensor) -> tuple[Tensor, ...]:
        net_d.zero_grad()
        label = torch.full((real.size(0),), real_label, dtype=real.dtype, device=device)
        output = net_d(real)
        err_real = criterion(output, label)
        err_real.backward()
        d_x = output.mean()
        fake = net_g(torch.randn(real.size(0), NOISE, 1, 1, device=device))
        label.fill_(fake_label)
        err_fake = criterion(net_d(fake.detach()), label)
        err_fake.backward()
        optimizer_d.step()

        net_g.zero_grad()
        label.fill_(real_label)
        err_g = criterion(net_d(fake), label)
        err_g.backward()
        optimizer_g.step()
        return err_real + err_fake, err_g, d_x

    yield net_g, net_d, optimizer_g, optimizer_d
    for i in range(1_000_000):
        err_d, err_g, d_x = train_step((torch.rand(BATCH, 3, 16, 16) * 2 - 1).to(device))
        if i % 10 == 0:
            print(f"[{i}] Loss_D: {err_d.item():.4f} Loss_G: {err_g.item():.4f} D(x): {d_x.item():.4f}")
        yield err_d, err_g, d_x
