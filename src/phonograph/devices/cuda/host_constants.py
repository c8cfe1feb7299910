"""Constants of the host in a graph: tensors on the CPU that a captured call copies to the GPU.

Nothing of the host's is in a graph but what its kernels are launched with, and a copy from pageable memory cannot be captured.
A tensor on the CPU whose values are the same in each replay is another matter (`dispatch.py` says which are): its values lie in
memory of the recording's own on the GPU, its `Room`, from before the first replay. Whatever would copy it from the host copies
it from there, or uses it in place where only the operator itself sees it. Nobody writes there: a call that writes into its copy
begins with the constant again in each replay.

torch makes a tensor of Python numbers on the CPU, and brings it to the GPU unseen: `torch.tensor([1, 2], device="cuda")`. It
can be told to let the copy be seen (`seen_from_the_host`).

No memory can be taken during a capture: the room is there before. Where it is too small, the capture begins again with more.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..._torch.cuda import let_copies_be_seen
from ..._torch.dynamic import Args, Kwargs
from ..._torch.operators import OpOverload
from ...aten.operators import Meaning, tensors_in
from ...errors import Again, Refusal
from ...memory.pool import extent
from ...values.device_names import named

__all__ = ["Room", "given", "moves", "seen_from_the_host"]

aten = torch.ops.aten

_FIRST = 32 << 10  # bytes
_MOST = 256 << 20  # bytes of one recording
_APART = 256  # bytes: what kernels may count on of an address
_INDEXING = frozenset({"aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
                       "aten::_unsafe_index_put"})  # fmt: skip
_MOVING = frozenset({"aten::to", "aten::type_as"})  # which consist of others, that are seen but in inference mode
_MASKS = (torch.bool, torch.uint8)


class Room:
    """Memory on a device for one recording's constants. It stays as long as this is referred to."""

    def __init__(self, device: torch.device, nbytes: int, served: list[torch.cuda.Stream]) -> None:
        """`served`: the streams on which recordings are played."""
        self.device = device
        self.wanted = nbytes = max(nbytes, _FIRST)
        self._served = served
        self._used = 0
        with torch.inference_mode(False):
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self._values = torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def __bool__(self) -> bool:
        return self._used > 0

    def place(self, t: torch.Tensor) -> torch.Tensor:
        """A tensor on the device that has the values of this one on the CPU once the room is `fill`ed; not to be written."""
        t = t.detach().resolve_conj().resolve_neg()
        t = t.contiguous() if extent(t) > t.numel() else t
        nbytes, start = extent(t) * t.element_size(), self._used
        self._used += -(-nbytes // _APART) * _APART
        if self._used > self._memory.nbytes:
            if self._used > _MOST:
                raise Refusal("copies more than 256 MiB of constants from the CPU to the GPU", "keep them on the GPU")
            self.wanted = min(4 * self._used, _MOST)
            raise Again("copies more from the CPU to the GPU than there is room for", "call it once more", final=False)
        ctypes.memmove(self._values.data_ptr() + start, t.data_ptr(), nbytes)
        with torch.inference_mode(False), torch.no_grad():
            there = torch.empty(0, dtype=t.dtype, device=self.device)
            return there.set_(self._memory.untyped_storage(), start // t.element_size(), t.size(), t.stride())

    def fill(self) -> None:
        """Bring the values there, on the current stream."""
        with torch.inference_mode(False), torch.no_grad():
            self._memory[: self._used].copy_(self._values[: self._used])
        self._values = torch.empty(0)

    def __del__(self) -> None:
        for stream in self._served if self._used and not sys.is_finalizing() else ():
            self._memory.record_stream(stream)  # where a replay may still read it


def moves(m: Meaning) -> bool:
    """Whether an operator consists of others, some of which may bring a tensor to another device."""
    return m.name in _MOVING


def given(room: Room, func: OpOverload, m: Meaning, args: Args, kwargs: Kwargs) -> tuple[OpOverload, Args, Kwargs]:
    """What is captured instead of an operator of which some arguments lie on the host: an operator, and its arguments. (A
    number that is not copied is a parameter of what it launches.)

    Raises:
        Refusal: it would go to another device.
    """
    if m.name == "aten::_to_copy":
        target = named(torch.device(kwargs.get("device") or "cpu"))
        if target.type == "cpu":
            return func, args, kwargs
        if target != room.device:
            raise Refusal(f"copies a tensor from the CPU to {target}", f"work on {room.device}")
        host = func(*args, **{**kwargs, "device": torch.device("cpu"), "non_blocking": False, "pin_memory": False})
        if not host.dim() and bool(host == host):
            return aten.full.default, (host.size(), host.item()), {"dtype": host.dtype, "device": room.device}
        return aten.clone.default, (room.place(host),), {}
    if m.name == "aten::copy_" and not args[0].is_cpu:
        return func, (args[0], room.place(args[1].to(args[0].dtype)), *args[2:]), kwargs
    if m.name == "aten::_foreach_copy_":
        pairs = [*zip(args[0], args[1], strict=True)]
        if any(t.is_cpu and not s.is_cpu for t, s in pairs):
            raise Refusal("copies a tensor from the GPU to the CPU", "return it, and copy it outside the recorded function")
        sources = [room.place(s.to(t.dtype)) if s.is_cpu and not t.is_cpu else s for t, s in pairs]
        return func, (args[0], sources, *args[2:]), kwargs
    if m.name in _INDEXING and not args[0].is_cpu:
        indices = [_brought(i, room) for index in args[1] for i in _counted(index)]
        if any(i is not None and i.dtype in _MASKS for i in indices):
            return func, (args[0], indices, *args[2:]), kwargs
        return func, (args[0], indices, *[_scalar(x, room) for x in args[2:]]), {k: _scalar(x, room) for k, x in kwargs.items()}
    if m.name == "aten::where" and any(not t.is_cpu for t in tensors_in(args, [])):
        return func, tuple([_scalar(x, room) for x in args]), kwargs
    return func, args, kwargs


def _counted(index: Any) -> Any:
    """A mask on the host as the indices that it stands for."""
    if index is not None and index.is_cpu and index.dtype in _MASKS and index.dim():
        return index.nonzero().unbind(1)
    return (index,)


def _brought(t: Any, room: Room) -> Any:
    return room.place(t) if t is not None and t.is_cpu else t


def _scalar(x: object, room: Room) -> object:
    """Operators that copy a tensor of the host themselves take numbers only. (With a mask on the device they fill with it: that
    is a parameter of the kernel, where a value on the device would be counted out by `nonzero`.)"""
    return room.place(x) if isinstance(x, torch.Tensor) and x.is_cpu and not x.dim() else x


@contextmanager
def seen_from_the_host() -> Iterator[None]:
    """During the block, copies of tensors that are made of Python numbers are seen as such."""
    before = let_copies_be_seen(True)
    try:
        yield
    finally:
        let_copies_be_seen(before)
