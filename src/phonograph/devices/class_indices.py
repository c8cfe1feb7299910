"""`one_hot` with a number of classes, which looks at the values on the CPU, and there only, in order to raise.

So each replay makes these checks too (`value_checks`). Without a number of classes, the size of the result is read of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps

import torch
from torch.nn import functional

from .._torch.dynamic import Thing
from .._torch.tensors import has_memory
from ..capture.dispatch import OperatorWatch
from ..capture.value_checks import Check
from ..python.origin import users_line
from ..python.standing import exchanged

__all__ = ["one_hot_checked"]


@contextmanager
def one_hot_checked(watch: OperatorWatch) -> Iterator[None]:
    """During the block, `one_hot` leaves its checks to the watch, on this thread."""
    mine = threading.get_ident()

    def checked(_: str, own: Callable[..., Thing]) -> Callable[..., Thing]:
        @wraps(own)
        def one_hot(tensor: Thing, num_classes: Thing = -1) -> Thing:
            indices = type(tensor) is torch.Tensor and has_memory(tensor) and tensor.is_cpu and tensor.dtype is torch.int64
            checks = indices and tensor.numel() and type(num_classes) is int and num_classes > 0
            if not checks or threading.get_ident() != mine:
                return own(tensor, num_classes)
            least, most = tensor.aminmax()
            for good, text in (
                (least >= 0, "Class values must be non-negative."),
                (most < num_classes, "Class values must be smaller than num_classes."),
            ):
                watch.checks(Check(True, RuntimeError, text, users_line()), good)
            return tensor.new_zeros((*tensor.shape, num_classes)).scatter_(-1, tensor.unsqueeze(-1), 1)

        return one_hot

    with exchanged([(functional, "one_hot")], checked):
        yield
