"""Functions of torch's that work out other numbers with one that is followed, or make a constant of it.

They are written out here, so that operators take the number as it is: the same operators in the same order, for the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from .._torch.dynamic import Thing

__all__ = ["CONSTANTS", "WRITTEN_OUT"]


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
    """Of one number, or of a list of some."""
    dtype = dtype or torch.get_default_dtype()
    if requires_grad or pin_memory or not dtype.is_floating_point:
        return NotImplemented
    if type(data) in (list, tuple) and all(isinstance(x, float) or type(x) is int for x in data):
        return torch.stack([torch.full((), x, dtype=dtype, device=device) for x in data])
    return torch.full((), data, dtype=dtype, device=device) if isinstance(data, float) else NotImplemented


def _as_tensor(data: Thing, dtype: torch.dtype | None = None, device: Thing = None) -> Thing:
    """The same."""
    return _tensor(data, dtype=dtype, device=device)


def _where(condition: Thing, input: Thing = None, other: Thing = None, *, out: Thing = None) -> Thing:
    """With a number for one of two tensors."""
    tensors = [x for x in (input, other) if type(x) in (torch.Tensor, torch.nn.Parameter)]
    if out is not None or len(tensors) != 1 or not tensors[0].is_floating_point():
        return NotImplemented
    of = tensors[0]
    return torch.where(condition, *[x if x is of else _scalar(x, of) for x in (input, other)])


def _method_where(self: Thing, condition: Thing, other: Thing) -> Thing:
    return _where(condition, self, other)


def _set_item(self: torch.Tensor, index: Thing, value: Thing) -> Thing:
    """To one number."""
    if not isinstance(value, float) or not self.is_floating_point():
        return NotImplemented
    parts = index if type(index) is tuple else (index,)
    if all(x is None or x is Ellipsis or type(x) in (int, slice) for x in parts):
        self[index] = _scalar(value, self)
    elif isinstance(index, torch.Tensor) and index.dtype is torch.bool and index.shape == self.shape:
        self.masked_fill_(index, value)
    else:
        return NotImplemented
    return None


def _scalar(number: Thing, of: torch.Tensor) -> torch.Tensor:
    """A number as an operator sees it that takes it beside this tensor."""
    return torch.full((), number, dtype=of.dtype, device=of.device)


WRITTEN_OUT: dict[object, Callable[..., Thing]] = {
    F.cross_entropy: _cross_entropy, torch.tensor: _tensor, torch.as_tensor: _as_tensor, torch.where: _where,
    torch.Tensor.where: _method_where, torch.Tensor.__setitem__: _set_item,
}  # fmt: skip
"""What is called in the place of a function. It answers `NotImplemented` to what it does not know."""
CONSTANTS = (torch.tensor, torch.as_tensor)
"""Those of them in which a number's own type decides: of one of NumPy's they make a tensor of that type."""
