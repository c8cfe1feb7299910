"""Products of a batch of matrices with one matrix, which torch makes in another way below a mode.

`matmul` of (b, m, k) with (1, k, n) is one product of (b m, k) with (k, n) where the second tensor requires a gradient, or a
mode looks on. Otherwise it is a batch of products, whose last bits may differ. So while a call is captured, what is no batch
because of the mode alone comes as the batch that torch would make of it. (In torch's own database, `op_db`, no other results
tell that a mode was there.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps

import torch

from .._torch.dynamic import Args, Kwargs, Thing
from .._torch.dynamo import tells_of_compilation
from .._torch.tensors import has_memory
from ..python.standing import standing

__all__ = ["products_as_without_mode"]

_PLACES: tuple[tuple[Thing, str], ...] = (
    (torch, "matmul"), (torch.linalg, "matmul"), (torch.Tensor, "matmul"), (torch.Tensor, "__matmul__"),
)  # fmt: skip


@contextmanager
def products_as_without_mode() -> Iterator[None]:
    """During the block, matrices are multiplied on this thread as where no mode looks on."""
    mine, own = threading.get_ident(), [vars(place).get(name) for place, name in _PLACES]

    def undo() -> None:
        for (place, name), before in zip(_PLACES, own, strict=True):
            if before is not None:
                setattr(place, name, before)
            elif name in vars(place):
                delattr(place, name)  # it was inherited

    def batched(product: Callable[..., Thing]) -> Callable[..., Thing]:
        @wraps(product)
        def matmul(*args: Thing, **kwargs: Thing) -> Thing:
            if threading.get_ident() == mine and len(args) == 2 and _is_folded(*args, kwargs):
                args = _batch(*args)
            return product(*args, **kwargs)

        return matmul

    def exchange() -> None:
        for (place, name), product in zip(_PLACES, products, strict=True):
            setattr(place, name, product)

    products = [batched(getattr(place, name)) for place, name in _PLACES]
    with standing(undo), tells_of_compilation(undo, exchange):  # Dynamo knows torch's own
        exchange()
        yield


def _is_folded(a: Thing, b: Thing, kwargs: Kwargs) -> bool:
    """Whether it is one product only because a mode looks on. (What stands for other tensors is always one.)"""
    if type(a) not in (torch.Tensor, torch.nn.Parameter) or type(b) is not torch.Tensor:
        return False
    return (
        a.dim() == b.dim() == 3
        and b.shape[0] == 1 != a.shape[0]
        and not b.requires_grad
        and kwargs.keys() <= {"out"}
        and has_memory(a)
        and has_memory(b)
    )


def _batch(a: torch.Tensor, b: torch.Tensor) -> Args:
    kind = b.device.type
    if torch.is_autocast_enabled(kind) and b.is_floating_point() and b.dtype is not torch.float64:
        b = b.to(torch.get_autocast_dtype(kind))  # it would be, before there is a batch of it
    return a, b.expand(a.shape[0], -1, -1)
