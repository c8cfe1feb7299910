"""C1, C6, C7: `make_graphed_callables`. Code written for torch's or for Transformer Engine's gets eager's results, bit for bit;
pipelines hold as many recordings as they have forwards in flight."""

import copy

import torch
from torch import nn

import phonograph as pg


def perceptron(device, width=8):
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.2), nn.Linear(width, width)).to(device)


def grads(modules):
    return [p.grad for m in modules for p in m.parameters()]


def state(modules):
    return [t for m in modules for t in m.state_dict().values()]


def generator_states(device):
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def beside(modules):
    """The modules, and equal ones that stay live."""
    return tuple(modules), tuple(copy.deepcopy(m) for m in modules)


def counts(f):
    s = pg.stats(f)
    return s.live, s.recorded, s.replayed


X = torch.arange(32.0).reshape(4, 8)  # a sample, which nobody writes
