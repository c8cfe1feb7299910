"""Numbers in tensors outside that a call reads on the host and writes: ``step = self.step.item(); self.step += 1``.

Such a tensor holds one number, in memory of its own. Each replay reads that memory before it runs, whoever has written it, and
how (on a GPU the host waits for that, as eager does); what the call goes on with is worked out of the number
(`capture/numbers_in_tensors.py`). What the call writes there, the replay writes, as it writes any tensor.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Set
from functools import partial
from typing import Any

import torch

from .._torch.dynamic import Private
from .._torch.modes import without_modes
from .._torch.tensors import has_memory, is_ordinary
from ..python.holders import Spot
from ..python.identity import identity
from ..values.host_scalars import READS_NUMBER
from .reachable import Reach

__all__ = ["at_tensor", "in_tensors", "is_number", "spot_in"]

_CELLS: dict[torch.dtype, Private] = {
    torch.float32: ctypes.c_float, torch.float64: ctypes.c_double, torch.int64: ctypes.c_int64, torch.int32: ctypes.c_int32,
    torch.int16: ctypes.c_int16, torch.int8: ctypes.c_int8, torch.uint8: ctypes.c_uint8, torch.bool: ctypes.c_bool,
}  # fmt: skip
_DEVICES = ("cpu", "cuda")
_NUMBER = "the number in it"


def is_number(t: torch.Tensor) -> bool:
    """Whether a tensor outside can be read so: all of its memory is one number."""
    alone = is_ordinary(t) and t.device.type in _DEVICES and t.numel() == 1 and has_memory(t)
    return alone and t.dtype in _CELLS and t.untyped_storage().nbytes() == t.itemsize


def at_tensor(t: torch.Tensor) -> tuple[int, object]:
    """Where its number lies, as of a `Spot`."""
    return identity(t), _NUMBER


def in_tensors(reach: Reach, wanted: Set[tuple[int, object]]) -> list[Spot]:
    """Where those of the wanted numbers lie that are in tensors."""
    some = any(key == _NUMBER for _, key in wanted)
    tensors = reach.tensors.values() if some else ()
    return [spot_in(name, t) for name, t in tensors if at_tensor(t) in wanted and is_number(t)]


def _reading(t: torch.Tensor) -> Callable[[], Any]:
    """What reads the number that lies in the memory of this tensor."""
    if t.is_cpu:
        return partial(getattr, _CELLS[t.dtype].from_address(t.data_ptr()), "value")
    with torch.inference_mode(False), torch.no_grad(), without_modes():
        same = torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage(), 0, (), ())

    def read() -> Any:
        if torch.cuda.is_current_stream_capturing():  # nothing is played there
            return None
        with without_modes():
            return READS_NUMBER(same)

    return read


def spot_in(name: str, t: torch.Tensor) -> Spot:
    """Where the number of this tensor lies."""
    storage = t.untyped_storage()
    at, nbytes, now = storage.data_ptr(), storage.nbytes(), _reading(t)
    stands: list[Any] = []  # in a capture: what stands for the number

    def get() -> Any:
        if stands:
            return stands[0]
        return now() if storage.data_ptr() == at and storage.nbytes() == nbytes else None

    def put(value: object) -> None:
        stands[:] = [] if type(value) in (int, float, bool) else [value]

    return Spot(at_tensor(t), get, put, name=name, memory=storage)
