"""The devices, one object each for the life of the process."""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock

import torch

from ..errors import Refusal
from ..python.standing import fresh_in_children
from ..values.device_names import named
from .base import Device
from .cpu.device import CpuDevice
from .cuda.device import CudaDevice  # now, and not in the middle of somebody's first call

__all__ = ["all_devices", "device_for", "lock", "owned"]

_devices: dict[torch.device, Device] = {}
lock = fresh_in_children(RLock())  # recordings are made and played under it: they share memory
owned: Callable[[], bool] = lock._is_owned  # type: ignore[attr-defined]
"""Whether this thread has the lock: a call then comes out of the middle of another, from a signal handler or a finalizer."""


def device_for(device: torch.device) -> Device:
    """The `Device` for a torch.device; made at first use.

    Raises:
        Refusal: no recordings can be made on it.
    """
    device = named(device)
    if device not in _devices:
        _devices[device] = _make(device)
    return _devices[device]


def all_devices() -> list[Device]:
    """Every device that has been used so far."""
    return list(_devices.values())


def _make(device: torch.device) -> Device:
    if device.type == "cpu":
        return CpuDevice()
    if device.type == "cuda":
        return CudaDevice(device)
    raise Refusal(f"there is no recording on {device.type} devices", "use CPU or CUDA tensors")
