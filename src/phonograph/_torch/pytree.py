"""Private parts of torch: pytree."""

from __future__ import annotations

from torch.utils import _pytree

from .dynamic import Private

__all__ = ["SUPPORTED_NODES"]

SUPPORTED_NODES: dict[type, Private] = _pytree.SUPPORTED_NODES
"""The classes that pytree takes apart, and how."""
