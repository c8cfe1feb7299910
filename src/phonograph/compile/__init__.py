"""Code under `torch.compile`: ``torch.compile(f, backend="phonograph")``."""

from __future__ import annotations

from .backend import backend, graphs

__all__ = ["backend", "graphs"]
