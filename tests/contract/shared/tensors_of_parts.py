"""Tensors that consist of others, as a DTensor does of its part here and a description of the whole: parameters, their
gradients, what an optimizer keeps, arguments and results. They are recorded by their parts."""

import torch
from torch.testing._internal.two_tensor import TwoTensor


def fixed(device, *shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def two(device, *shape, seed=1):
    return TwoTensor(fixed(device, *shape, seed=seed), fixed(device, *shape, seed=seed + 1))
