"""Exports: tensors whose address a call passes to code outside torch, by `data_ptr()`, as a DLPack capsule, by
`__cuda_array_interface__`, or to a Warp kernel.

Such code works on the memory without an operator, so nobody sees it. On the CPU it would run once, in the capture, and in no
replay: it is refused. On a GPU the capture holds its kernels if they were launched on the captured stream, and the device's
watch looks whether there are new ones.

Not an export: an address that is only compared with others, and one that torch's own code asks for. Not heard: built-in code
that asks by itself, like Triton's launchers.
"""

from __future__ import annotations

import os
import sys
from types import FrameType

import torch

from .._torch.tensors import has_memory
from ..errors import Refusal
from ..python.comparing import only_compares
from ..python.origin import is_ours, is_torchs, is_users
from ..values.wording import MARKED
from .effects import ANYONE, Effect, Starts
from .refusals import Refusals

__all__ = ["REMEDY", "Exports", "warps_stream"]

REMEDY = f"call that code outside the recorded function, {MARKED}"
_HEARD = Effect("", by=ANYONE)  # of starts that are only heard of
_KERNELS = [
    (name, [os.path.join("warp", folder, file) for folder in ("_src", "")],
     Effect(f"calls Warp's {name}, which works on memory without an operator", REMEDY, ANYONE))
    for file, names in (("context.py", "launch copy capture_launch"), ("types.py", "fill_ zero_ assign numpy"))
    for name in names.split()
]  # fmt: skip
_TENSOR, _STORAGE = os.path.join("torch", "_tensor.py"), os.path.join("torch", "storage.py")
_LAUNCHES = os.path.join("torch", "cuda", "_utils.py")  # kernels that were compiled of a text
_TRITON = os.sep + "triton" + os.sep


class Exports(Refusals):
    """Exports of one call."""

    def exported(self, owner: object, frame: FrameType) -> None:
        """Note that the code in `frame` asks for the address of `owner`, a tensor or storage."""
        if not isinstance(owner, (torch.Tensor, torch.UntypedStorage)) or _is_known(frame) or only_compares(frame):
            return
        if isinstance(owner, torch.UntypedStorage) or has_memory(owner):
            self.hands_out(owner)

    def hands_out(self, owner: torch.Tensor | torch.UntypedStorage) -> None:
        """Its address goes to code outside torch."""
        if owner.device.type == "cpu":
            self.refuse_read(Refusal("hands the address of a tensor to code outside torch, whose work is no operator", REMEDY))

    def runs_elsewhere(self, frame: FrameType) -> bool:
        """Whether what this function of Warp's does is no part of what is captured."""
        return True

    def frames(self) -> Starts:
        """Python functions whose calls are observed or refused."""
        return {
            **{name: [(path, self.runs_elsewhere, effect) for path in paths] for name, paths, effect in _KERNELS},
            "__cuda_array_interface__": [(_TENSOR, self._interface, _HEARD)],
            "__dlpack__": [(_TENSOR, self._interface, _HEARD)],
            "data_ptr": [(_STORAGE, self._of_typed, _HEARD)],
        }

    def _interface(self, frame: FrameType) -> bool:
        """Never an effect by itself: a tensor describes its memory. (One on the CPU has no such interface.)"""
        owner = frame.f_locals.get("self")
        caller = frame.f_back
        while caller is not None and is_ours(caller.f_code.co_filename):  # which looks whether it may be read
            caller = caller.f_back
        if isinstance(owner, torch.Tensor) and owner.is_cuda and caller is not None and not _is_known(caller):
            self.hands_out(owner)
        return False

    def _of_typed(self, frame: FrameType) -> bool:
        """Never an effect by itself: a storage of the older kind is asked."""
        owner, caller = getattr(frame.f_locals.get("self"), "_untyped_storage", None), frame.f_back
        if owner is not None and caller is not None:
            self.exported(owner, caller)
        return False


def _is_known(frame: FrameType) -> bool:
    """Whether code of torch's or of this library asks, or Triton's, whose kernels are known."""
    name = frame.f_code.co_filename
    return (is_torchs(name) and not name.endswith(_LAUNCHES)) or (_TRITON in name and not is_users(name))


def warps_stream(frame: FrameType) -> int | None:
    """The stream of the GPU on which a function of Warp's that starts will work; None if it works on the CPU."""
    given, warp = frame.f_locals, sys.modules["warp"]
    stream = given.get("stream")
    if stream is None:
        array = given.get("self", given.get("dest"))
        device = warp.get_device(given.get("device") or getattr(array, "device", None))
        stream = device.stream if device.is_cuda else None
    return None if stream is None else int(stream.cuda_stream)
