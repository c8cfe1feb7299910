"""Digits with a small convolutional network, after pytorch/examples: Adadelta, dropout, a logged loss, a test each epoch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from real import rivals

STEPS, ROUND = 24, 16
RIVAL = ("reduce-overhead", rivals.reduce_overhead, {})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3, 1), nn.Conv2d(16, 32, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(800, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = F.relu(self.fc1(torch.flatten(self.dropout1(x), 1)))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)


def run(device: str, record) -> Iterator[object]:
    images, labels = torch.rand(256, 1, 14, 14), torch.randint(0, 10, (256,))
    train_loader = DataLoader(TensorDataset(images, labels), batch_size=16, shuffle=True)
    test_loader = DataLoader(TensorDataset(images, labels), batch_size=64)
    model = Net().to(device)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)

    model = record(model)

    yield model, optimizer
    for epoch in range(1_000_000):
        model.train()
        for batch_idx, (data, target) in enumerate(train_loader):
            data, target = data.to(device), target.to(device)
            optimizer.zero_grad()
            output = model(data)
            loss = F.nll_loss(output, target)
            loss.backward()
            optimizer.step()
            if batch_idx % 10 == 0:
                print(f"Train Epoch: {epoch} [{batch_idx * len(data)}/{len(images)}]\tLoss: {loss.item():.6f}")
            yield loss, output
        model.eval()
        test_loss, correct = 0.0, 0
        with torch.no_grad():
            for data, target in test_loader:
                output = model(data.to(device))
                test_loss += F.nll_loss(output, target.to(device), reduction="sum").item()
                correct += output.argmax(dim=1).cpu().eq(target).sum().item()
        print(f"Test set: average loss {test_loss / len(images):.4f}, accuracy {correct}/{len(images)}")
        scheduler.step()
