"""Functions of torch's that work out other numbers with one that is followed, or make a constant of it.

They are written out here, so that operators take the number as it is: the same operators in the same order, for the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from .._torch.dynamic import Thing

__all__ = ["WRITTEN_OUT"]


def _cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: object = None,
    size_average: object = None,
    ignore_index: int = -100,
    reduce: object = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Thing:
    """Of classes without weights."""
    if any(x is not None for x in (weight, size_average, reduce)) or target.is_floating_point() or target.shape == input.shape:
        return NotImplemented
    if torch.is_autocast_enabled(input.device.type) or not 0.0 < label_smoothing <= 1.0:
        return NotImplemented
    classes = 0 if input.dim() == 1 else 1
    likely = torch.log_softmax(input, classes, input.dtype)
    loss = F.nll_loss(likely, target, ignore_index=ignore_index, reduction=reduction)
    smooth = -likely.sum(classes)
    ignored = target == ignore_index
    smooth.masked_fill_(ignored, 0.0)
    if reduction == "mean":
        count = ignored.bitwise_not().sum()
        smooth = smooth.sum() / count
    elif reduction == "sum":
        smooth = smooth.sum()
    smooth = smooth * (label_smoothing / likely.shape[classes])
    return loss * (1 - label_smoothing) + smooth


def _tensor(
    data: Thing,
    *,
    dtype: torch.dtype | None = None,
    device: Thing = None,
    requires_grad: bool = False,
    pin_memory: bool = False,
) -> Thing:
    """Of one number."""
    dtype = dtype or torch.get_default_dtype()
    if not isinstance(data, float) or requires_grad or pin_memory or not dtype.is_floating_point:
        return NotImplemented
    return torch.full((), data, dtype=dtype, device=device)


WRITTEN_OUT: dict[object, Callable[..., Thing]] = {F.cross_entropy: _cross_entropy, torch.tensor: _tensor}
"""What is called in the place of a function. It answers `NotImplemented` to what it does not know."""
