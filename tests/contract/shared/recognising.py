"""C7-C10: recognising a call. Whatever makes it another program (its arguments, the modes, the state that the function
reads) is noticed before a recording is played."""

import torch

from tests.helpers import ramp


class Net(torch.nn.Module):
    """A bit of everything that a module can hold."""

    def __init__(self, device):
        super().__init__()
        self.first = torch.nn.Linear(4, 4, device=device)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4, device=device) for _ in range(2))
        self.register_buffer("shift", ramp(device, 4))
        self.register_parameter("gain", torch.nn.Parameter(torch.ones(4, device=device)))
        self.extra = [torch.ones(4, device=device)]
        self.scale = 2.0
        self.activation = torch.tanh
        self.requires_grad_(False)

    def forward(self, x):
        x = self.first(x) * self.scale
        for layer in self.layers:
            x = self.activation(layer(x))
        return x * self.gain + self.shift + self.extra[0]


def new_like(t):
    return torch.randn(t.shape, device=t.device, dtype=t.dtype)


class Cell:
    """Plain attributes."""

    def __init__(self, **values):
        self.__dict__.update(values)
