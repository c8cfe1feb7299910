"""Code under `torch.compile`: ``torch.compile(f, backend="phonograph")``."""

from __future__ import annotations

from .._torch.skipped_frames import hide
from .backend import backend, graphs

__all__ = ["backend", "graphs"]

hide()
