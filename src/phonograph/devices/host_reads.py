"""What reads a tensor's memory from Python without an operator, refused while a call is captured.

A `TorchFunctionMode` would be simpler, but some of torch's modules take another way under one.
"""

from __future__ import annotations

import operator
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from .._torch.autograd import on_thread_of_autograds
from .._torch.dynamic import Args, Kwargs
from .._torch.modes import without_modes
from .._torch.tensors import has_memory
from ..aten import operators
from ..capture.dispatch import OperatorWatch
from ..errors import Refusal
from ..guards.followed_numbers import reader
from ..python.origin import is_ours
from ..python.standing import exchanged
from ..values.host_scalars import Site, readable, site_of
from ..values.wording import source_of

__all__ = ["AS_MEMORY", "ITEM", "LISTED", "NUMBERS", "READS", "TRUTH", "host_reads_refused", "of_the_host", "reads_value"]

# On CUDA these copy to the host, but for tensors that lie there; and of those `tolist` alone needs no operator. `tensor_split`
# reads if it is given the places to split at as a tensor; numbers are asked for by `torch.tensor([t, ...])` and by indexes like
# `[t, ...]`.
LISTED = ("tolist",)
ITEM = "item"  # gives a number, which may be handed on
AS_MEMORY = ("numpy", "__array__", "__dlpack__")
_NUMBERS_OF = (ITEM, *LISTED)
READS = ("numpy", *LISTED, "__array__", "__dlpack__", "tensor_split", "__reduce_ex__", "apply_", "map_", "map2_")
TRUTH = "__bool__"  # which torch asks for in order to raise, too
NUMBERS = ("__float__", "__int__", "__index__", TRUTH, "__complex__")
_READ = (*_NUMBERS_OF, *NUMBERS)

_KNOWN = (*_READ, "numpy", "__array__")  # what reads values, and gives no way to write them

_answering = threading.local()  # it reads what stands for a tensor

Judge = Callable[[OperatorWatch, str, Args, Kwargs], Refusal | None]


def reads_value(watch: OperatorWatch, name: str, args: Args, kwargs: Kwargs) -> Refusal | None:
    """Why a call of the CPU device cannot read any tensor."""
    if name == ITEM:
        return None  # an operator reads it
    if name == "tensor_split" and not any(isinstance(a, torch.Tensor) for a in (*args[1:], *kwargs.values())):
        return None
    if name in NUMBERS:
        return operators.reads_value()
    refusal = Refusal(f"{source_of(f'Tensor.{name}')} reads a tensor's value on the host",
                      "return the tensor and read it outside the recorded function")  # fmt: skip
    refusal.of_values = True
    return refusal


def of_the_host(watch: OperatorWatch, name: str, args: Args, kwargs: Kwargs) -> Refusal | None:
    """Why a call of a GPU's cannot read a tensor. What lies on the host is a constant."""
    if has_memory(args[0]):
        watch.reads_on_host(args[0], source_of(f"Tensor.{name}"))
    return None


def _number(watch: OperatorWatch, name: str, t: torch.Tensor, site: Site) -> object:
    """What a call that may go on by numbers, or hand them on, is told; None if it has to read this one.

    Raises:
        Decides: it goes on by it.
    """
    if name in LISTED:
        return watch.listed(t, site)
    if name == ITEM and (numeral := watch.compared(t, site)) is not None:
        return numeral
    number = watch.decided(t, site)
    if name == ITEM:
        return watch.numeral(t, site) if number is None else number
    if number is None and readable(t, watch.device):
        watch.reads_number(site)
    return None if number is None else getattr(number, name)() if name != "__index__" else operator.index(number)


def _read_of(value: torch.Tensor, read: Callable[..., Any], args: Args, kwargs: Kwargs) -> object:
    """What is read of a tensor that stands for another. An array of it is nobody's to write: that one would not change."""
    _answering.now = True
    try:
        with without_modes():
            found = read(value, *args, **kwargs)
    finally:
        _answering.now = False
    if hasattr(found, "setflags"):
        found = found.copy()
        found.setflags(write=False)
    return found


@contextmanager
def host_reads_refused(watch: OperatorWatch, names: Sequence[str], judge: Judge) -> Iterator[None]:
    """During the block, functions of these names ask before they read, on this thread."""
    mine = threading.get_ident()

    def asking(name: str, read: Callable[..., object]) -> Callable[..., object]:
        @wraps(read)
        def ask(*args: Any, **kwargs: object) -> object:
            if getattr(_answering, "now", False):
                return read(*args, **kwargs)
            repeated = watch.repeated and threading.get_ident() == mine
            if repeated and name in (ITEM, TRUTH):
                return read(*args, **kwargs)
            if name == TRUTH and (threading.get_ident() == mine or on_thread_of_autograds()):
                answer = watch.answered(args[0], reader(sys._getframe(1)))
                if answer is not None:
                    return answer
            concerned = threading.get_ident() == mine or on_thread_of_autograds()
            frame = reader(sys._getframe(1))
            asks = concerned and not watch.repeated and not is_ours(frame.f_code.co_filename)
            if name in _READ and asks and len(args) == 1 and threading.get_ident() == mine:
                number = watch.read_as_followed(args[0], name, frame)
                if number is not None:
                    return number
            if name in _KNOWN and asks:
                value = watch.read_as_fixed(args[0], frame, shown=name not in _READ)
                if value is not None:
                    return _read_of(value, read, args[1:], kwargs)
            alone = name in _READ and len(args) == 1 and not repeated and threading.get_ident() == mine
            if alone and watch.numerals is not None:
                found = _number(watch, name, args[0], site_of(frame))
                if found is not None:
                    return found
            refusal = judge(watch, name, args, kwargs) if concerned else None
            if refusal is None:
                return read(*args, **kwargs)
            watch.refuse_read(refusal)
            return read(*args, **kwargs)

        return ask

    places: list[tuple[object, str]] = [(torch.Tensor, name) for name in names]
    places += [(torch, name) for name in names if name == "tensor_split"]
    with exchanged(places, asking):
        yield
