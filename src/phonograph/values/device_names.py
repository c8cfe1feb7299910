"""Devices, each by one name, whichever the user has for it: ``"cuda"`` is the current GPU, ``"cpu:0"`` is the CPU.

Tensors have that name. A generator has the one that it was made with, and without an index it is of no GPU in particular.
"""

from __future__ import annotations

import torch

__all__ = ["is_of", "named"]


def named(device: torch.device) -> torch.device:
    """The same device by the name that tensors have for it: a GPU with its index, the CPU without one."""
    if device.type == "cpu":
        return torch.device("cpu")
    if device == torch.device("cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return device


def is_of(generator: torch.Generator, device: torch.device) -> bool:
    """Whether a generator can draw on this device, which has its own name."""
    return generator.device.type == device.type and generator.device.index in (None, device.index)
