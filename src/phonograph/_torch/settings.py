"""Private parts of torch: settings of the process.

They are looked at in every replay, and a call of Python's for each would cost half of it.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
from collections.abc import Callable, Set
from contextlib import suppress

import torch
import torch.backends.mha
import torch.overrides
import torch.utils._device
import torch.utils._python_dispatch

from .dynamic import Private
from .functions import _c
from .tensors import _guards

__all__ = ["fp32_precision", "kept_settings", "kernel_getters", "kernel_setter", "state_guard"]


_GUARDED = {
    "is_grad_enabled": "grad_mode", "get_default_dtype": "default_dtype", "get_num_threads": "num_threads",
    "are_deterministic_algorithms_enabled": "deterministic_algorithms",
    "is_deterministic_algorithms_warn_only_enabled": "deterministic_algorithms_warn_only",
    "_get_cublas_allow_tf32": "allow_tf32", "_get_cublas_allow_fp16_reduced_precision_reduction": "allow_fp16_reduce",
    "_get_cublas_allow_bf16_reduced_precision_reduction": "allow_bf16_reduce", "autocast": "autocast_state",
}  # fmt: skip
"""By which name torch.compile's guard has what these get."""

_GlobalStateGuard: Private = getattr(_guards, "GlobalStateGuard", None)


def state_guard() -> tuple[Callable[[], bool], Set[str]]:
    """A function that says, in C++, whether some settings are what they are now, and the names of those that get them.
    torch.compile's guard of settings; of none where this release of torch does not tell what that looks at."""
    if "__getstate__" not in getattr(_GlobalStateGuard, "__dict__", {}):
        return bool, frozenset()
    guard = _GlobalStateGuard()
    known = json.loads(guard.__getstate__())
    return guard.check, {getter for getter, name in _GUARDED.items() if name in known}


_KEPT = {
    "_get_cudnn_benchmark": "setBenchmarkCuDNN", "_get_cudnn_deterministic": "setDeterministicCuDNN",
    "_get_cudnn_enabled": "setUserEnabledCuDNN", "_get_flash_sdp_enabled": "setSDPUseFlash",
    "_get_math_sdp_enabled": "setSDPUseMath", "_get_mem_efficient_sdp_enabled": "setSDPUseMemEfficient",
    "_get_cudnn_sdp_enabled": "setSDPUseCuDNN", "_get_mkldnn_enabled": "setUserEnabledMkldnn",
    "_get_cublas_allow_fp16_accumulation": "setAllowFP16AccumulationCuBLAS",
    "_get_math_sdp_allow_fp16_bf16_reduction": "setAllowFP16BF16ReductionMathSDP",
    "_get_mkldnn_deterministic": "setDeterministicMkldnn", "_get_nnpack_enabled": "setUserEnabledNNPACK",
}  # fmt: skip
"""By which method of C++ what these get is set: it stores its argument, a bool, and that is all it does."""

_LOOKED_AT = 4 << 10  # bytes from where torch's settings begin


def kept_settings() -> tuple[Private, Set[str]]:
    """The memory where torch keeps most of its settings (in an `at::Context`), as an array whose `raw` are the bytes that are
    there now, and the names of those that get what is there. Where each of them lies is found by setting it in a copy of that
    memory; of none where that cannot be done."""
    at, places = 0, dict[str, int]()
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"), mode=os.RTLD_NOLOAD)
        context = library["_ZN2at13globalContextEv"]
        context.restype = ctypes.c_void_p
        at = context()
        for getter, setter in _KEPT.items():
            places[getter] = _changed_by(library[f"_ZN2at7Context{len(setter)}{setter}Eb"], at, getattr(torch._C, getter)())
    places = {getter: place for getter, place in places.items() if place >= 0}
    first, last = min(places.values(), default=0), max(places.values(), default=-1)
    return (ctypes.c_char * (last + 1 - first)).from_address(at + first), places.keys()


def _changed_by(setter: Private, at: int, now: bool) -> int:
    """Which byte of a copy of what is `at` an address is changed from `now`, and alone, where this sets it; -1 if none is."""
    copy = ctypes.create_string_buffer(ctypes.string_at(at, _LOOKED_AT), 16 * _LOOKED_AT)
    before = int.from_bytes(copy.raw, "little")
    setter.restype = None
    setter(ctypes.byref(copy), ctypes.c_bool(not now))
    change = before ^ int.from_bytes(copy.raw, "little")
    place, bit = divmod(change.bit_length() - 1, 8)
    return place if change and not bit and copy.raw[place] == (not now) and place < _LOOKED_AT else -1


_KERNELS = ("_get_cublas_allow_tf32", "_get_cudnn_allow_tf32", "_get_cudnn_benchmark", "_get_cudnn_deterministic",
            "_get_cudnn_enabled", "_get_float32_matmul_precision", "_get_cublas_allow_fp16_reduced_precision_reduction",
            "_get_cublas_allow_bf16_reduced_precision_reduction", "_get_flash_sdp_enabled", "_get_math_sdp_enabled",
            "_get_mem_efficient_sdp_enabled", "_get_cudnn_sdp_enabled", "_get_mkldnn_enabled",
            "_get_cublas_allow_fp16_accumulation", "_get_cpu_allow_fp16_reduced_precision_reduction",
            "_get_math_sdp_allow_fp16_bf16_reduction", "_get_mkldnn_deterministic", "_get_nnpack_enabled")  # fmt: skip


def kernel_getters() -> list[Callable[[], object]]:
    """What gets the settings by which torch chooses kernels; those that this release has."""
    found: list[Callable[[], object]] = [get for name in _KERNELS if (get := _c(name)) is not None]
    order: Callable[[], list[int]] = _c("_get_sdp_priority_order") or list
    return [*found, lambda: tuple(order())]


def kernel_setter(get: Callable[[], object]) -> Callable[[object], object] | None:
    """What sets a setting that one of these gets. None if there is none."""
    name = getattr(get, "__name__", "")
    names = name.replace("_get", "_set"), re.sub(r"_get_(\w+)_sdp_enabled", r"_set_sdp_use_\1", name)
    return next((_c(ours) for ours in names if name.startswith("_get") and ours != name and _c(ours) is not None), None)


def fp32_precision(backend: str, operator: str) -> str:
    """How exactly a backend works in float32."""
    return str(torch._C._get_fp32_precision_getter(backend, operator))
