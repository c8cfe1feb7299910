"""Memory of which a recording has the addresses: that of its results, and of tensors outside that it writes. (What it reads
outside is a constant of its: `constants.py`.)"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch

from .._torch.native import bump
from .._torch.tensors import address
from .column import Check, Column, Step

__all__ = ["MEMORY", "Memories"]

MEMORY = "the memory that it used"  # as what a recording has lost


class Memories(Column):
    """Tensors of which one recording has the addresses."""

    def __init__(self, templates: Sequence[torch.Tensor], written: Iterable[torch.Tensor]) -> None:
        """Of results that lie in its own memory, and of what it has `written` outside, which are to have a new version."""
        self.lost: list[str] = []
        """Names of what it works with and has lost: its memory, mostly."""
        self._templates, self._places = templates, [*map(address, templates)]
        self._written = [t for t in written if not t.is_inference()]

    def fits(self) -> Sequence[Check]:
        return [self._are_there] if self._templates else []

    def _are_there(self) -> str | None:
        """(The storage of a result may have been replaced (`share_memory_`), which the templates share.)"""
        if [*map(address, self._templates)] == self._places:
            return None
        self.lost.append(MEMORY)
        return self.lost[0]

    def leave(self) -> Sequence[Step]:
        """Advance version counters, so that autograd still detects a saved tensor that was written since."""
        return [partial(bump, self._written)] if self._written else []
