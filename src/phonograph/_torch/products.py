"""Dispatch modes of this library, and matrix products under them as where none looks on.

Torch has two ways for a product of batches one of which holds a single matrix: all in one `mm`, or one matrix after the other
(`bmm`), whose last bits differ on a GPU. It takes the first where that matrix wants a gradient, and where any dispatch mode is
on. So under a mode of this library, a product whose single matrix wants none is given to `bmm` here.
"""

from __future__ import annotations

import torch

from .dynamic import Private
from .modes import TorchDispatchMode, current_mode, is_batched, transformed

__all__ = ["WatchMode"]

_KEY = torch._C.DispatchKey
_MODES = _KEY.PythonTLSSnapshot
"""What operators are dispatched by only while a mode is on: what is registered here costs others nothing."""

_BELOW = torch._C._dispatch_keyset_full_after(_MODES)
_AUTOGRADS = {_KEY.AutogradCPU, _KEY.AutogradCUDA}


class WatchMode(TorchDispatchMode):
    """A dispatch mode that looks on: what runs under it runs as without it."""


def _matmul(keys: Private, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if _is_folded_by_modes(keys, a, b):
        return torch.bmm(*_expanded(a, b))
    folded: torch.Tensor = torch.ops.aten.matmul.default.redispatch(keys & _BELOW, a, b)
    return folded


def _matmul_out(keys: Private, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    if _is_folded_by_modes(keys, a, b):
        return torch.bmm(*_expanded(a, b), out=out)
    folded: torch.Tensor = torch.ops.aten.matmul.out.redispatch(keys & _BELOW, a, b, out=out)
    return folded


def _is_folded_by_modes(keys: Private, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether torch would take another way for these because of a mode of this library, and of nothing else."""
    if not (a.dim() == b.dim() == 3 and a.size(0) != b.size(0) and 1 in (a.size(0), b.size(0))):
        return False
    single = a if a.size(0) == 1 else b
    return not single.requires_grad and isinstance(current_mode(), WatchMode) and _is_plain(keys, a, b)


def _is_plain(keys: Private, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether autograd is asked next, of tensors that are what they seem. (Autocast, if on, is asked first, and asks again.)"""
    return (
        (keys & _BELOW).highestPriorityTypeId() in _AUTOGRADS and not transformed() and not is_batched(a) and not is_batched(b)
    )


def _expanded(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batches = max(a.size(0), b.size(0)) if 0 not in (a.size(0), b.size(0)) else 0
    return a.expand(batches, -1, -1), b.expand(batches, -1, -1)


_REGISTERED = torch.library.Library("aten", "IMPL")
_REGISTERED.impl("matmul", _matmul, _MODES.name, with_keyset=True)
_REGISTERED.impl("matmul.out", _matmul_out, _MODES.name, with_keyset=True)
