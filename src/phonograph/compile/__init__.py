"""Code under `torch.compile`: ``torch.compile(f, backend="phonograph")``."""

from __future__ import annotations

from ..hidden import hide
from .backend import backend, graphs

__all__ = ["backend", "graphs"]

hide()
