"""C6 inside whole steps: forward, backward and optimizer in one recorded function. Weights, gradients and optimizer
state are compared with eager's after each step; learning rates change without a new recording."""

import functools

import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers import side_by_side


class Net(nn.Module):
    """Two layers, a part that no loss depends on, and one weight that is used twice."""

    def __init__(self, device, *, dropout=0.0, norm=False):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 3)
        self.unused = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.to(device)

    def forward(self, x):
        x = torch.tanh(self.norm(self.first(x)))
        return self.second(self.dropout(self.first(x)))


OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "sgd, weight decay": functools.partial(torch.optim.SGD, lr=0.1, weight_decay=0.01),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "nesterov": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd, foreach": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "adam": functools.partial(torch.optim.Adam, lr=0.01),
    "adam, foreach": functools.partial(torch.optim.Adam, lr=0.01, foreach=True),
    "adam, amsgrad": functools.partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01),
    "adamw, fused": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.01),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.01),
}


def train(device, optimizer="sgd", *, step_of=None, **net_options):
    """A `make` for `side_by_side`: (a training step, [model, optimizer])."""

    def make():
        model = Net(device, **net_options)
        chosen = OPTIMIZERS[optimizer](model.parameters())

        def step(x, y):
            chosen.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            chosen.step()
            return loss.detach()

        return (step if step_of is None else step_of(model, chosen)), [model, chosen]

    return make


def steps(device, optimizer="sgd", *, hold=False, **options):
    """A recorded training step beside a live one."""
    return side_by_side(train(device, optimizer, **options), hold=hold)


def batch(device, size=5):
    return torch.randn(size, 4, device=device), torch.randint(0, 3, (size,), device=device)
