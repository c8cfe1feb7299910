"""Random generators. Where a run draws from, and how far that moves them, is the device's business: a tape draws as eager does,
and a graph is given the generators' offsets, and moves them on (`state/rng.py`). So there is nothing to fill, or to leave."""

from __future__ import annotations

from collections.abc import Sequence

from .column import Check, Column

__all__ = ["Draws"]


class Draws(Column):
    """The generators of one recording."""

    def __init__(self, amiss: Check | None, some: bool, drops_out: bool) -> None:
        """`amiss` is the program's."""
        self._amiss = amiss
        self.some = some
        """Whether it may draw random numbers."""
        self.drops_out = drops_out
        """Dropout of cuDNN's is drawn in it."""

    def fits(self) -> Sequence[Check]:
        return [] if self._amiss is None else [self._amiss]
