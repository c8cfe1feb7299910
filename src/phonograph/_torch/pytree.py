"""Private parts of torch: pytree."""

from __future__ import annotations

from typing import Any

from torch.utils import _pytree

__all__ = ["SUPPORTED_NODES"]

SUPPORTED_NODES: dict[type, Any] = _pytree.SUPPORTED_NODES
"""The classes that pytree takes apart, and how."""
