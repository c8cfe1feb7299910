"""Constants that a captured call makes of a Python number, on the GPU: `torch.tensor(1.0, device=...)`.

torch makes them on the CPU and copies them, which a capture refuses. In a graph a kernel fills them in: the same bits, and no
copy. Distributions that are given numbers do this in their code: `Normal(loc, 1.0)`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

__all__ = ["filled_in"]

_NUMBERS = (bool, int, float, complex)


@contextmanager
def filled_in() -> Iterator[None]:
    """During the block such constants are filled in, on this thread."""
    mine, made, as_made, new = threading.get_ident(), torch.tensor, torch.as_tensor, torch.Tensor.new_tensor

    def by(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def make(data: Any, *args: Any, **kwargs: Any) -> Any:
            where = kwargs.get("device")
            if args or type(data) not in _NUMBERS or not _is_cuda(where) or threading.get_ident() != mine:
                return original(data, *args, **kwargs)
            if not kwargs.keys() <= {"dtype", "device", "requires_grad"}:
                return original(data, **kwargs)
            return torch.full((), data, **kwargs)

        return make

    @wraps(new)
    def make_new(t: torch.Tensor, data: Any, *args: Any, **kwargs: Any) -> Any:
        given = {"dtype": t.dtype, "device": t.device, **kwargs}
        if args or type(data) not in _NUMBERS or not _is_cuda(given["device"]) or threading.get_ident() != mine:
            return new(t, data, *args, **kwargs)
        return torch.full((), data, **given) if given.keys() <= {"dtype", "device", "requires_grad"} else new(t, data, **kwargs)

    own = "new_tensor" in vars(torch.Tensor)
    torch.tensor, torch.as_tensor = by(made), by(as_made)
    setattr(torch.Tensor, "new_tensor", make_new)  # noqa: B010 - to a type checker it is a method
    try:
        yield
    finally:
        torch.tensor, torch.as_tensor = made, as_made
        if own:
            setattr(torch.Tensor, "new_tensor", new)  # noqa: B010
        else:
            delattr(torch.Tensor, "new_tensor")


def _is_cuda(device: Any) -> bool:
    if device is None:
        return torch.get_default_device().type == "cuda"
    return not isinstance(device, (str, torch.device)) or torch.device(device).type == "cuda"  # a number is that of a GPU
