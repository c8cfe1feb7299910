"""Private parts of torch: its profiler."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .dynamic import Private

__all__ = ["profiling", "tell_trace"]

profiling: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", bool)
"""Whether a profiler of torch's is active in this thread. About 40 ns."""

_add: Private = getattr(torch.autograd, "_add_metadata_json", None)


def tell_trace(key: str, value: str) -> None:
    """Let the trace of the active profiler have this JSON value under a key of its own, beside its events."""
    if _add is not None:
        _add(key, value)
