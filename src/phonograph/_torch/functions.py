"""Private functions of torch's, looked up by name, and which of those that are needed are missing."""

from __future__ import annotations

from typing import ParamSpec, TypeVar

import torch
import torch.backends.mha
import torch.overrides
import torch.utils._device
import torch.utils._python_dispatch

from .dynamic import Private

__all__ = ["Handle", "P", "R", "missing"]


P = ParamSpec("P")

R = TypeVar("R")

Handle = tuple[int, int]

_NEEDED = ("_construct_storage_from_data_pointer", "_storage_Use_Count", "_increment_version", "_len_torch_dispatch_stack",
           "_len_torch_function_stack", "_AutoDispatchBelowAutograd", "_dispatch_has_kernel_for_dispatch_key",
           "_dispatch_tls_set_dispatch_key_excluded", "_dispatch_tls_is_dispatch_key_excluded",
           "_dispatch_has_kernel")  # fmt: skip

_NEEDED_OF_TENSORS = ("_use_count",)

_NEEDED_ON_CUDA = ("_cuda_beginAllocateCurrentStreamToPool", "_cuda_beginAllocateCurrentThreadToPool",
           "_cuda_endAllocateToPool", "_cuda_releasePool",
           "_cuda_cudaCachingAllocator_raw_alloc", "_cuda_cudaCachingAllocator_raw_delete", "_cuda_clearCublasWorkspaces",
           "_cuda_getCurrentRawStream", "_cuda_getCurrentStream", "_cuda_setStream", "_cuda_getDevice",
           "_cuda_isHistoryEnabled")  # fmt: skip


def missing(cuda: bool) -> list[str]:
    """Functions that this release of torch does not have."""
    of_tensors = [f"Tensor.{n}" for n in _NEEDED_OF_TENSORS if not hasattr(torch._C.TensorBase, n)]
    return [n for n in _NEEDED + _NEEDED_ON_CUDA * cuda if not hasattr(torch._C, n)] + of_tensors


def _c(name: str) -> Private:
    return getattr(torch._C, name, None)
