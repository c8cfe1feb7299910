"""Fixed places for arguments."""

from __future__ import annotations

import torch

from ..call.signature import ALIGNMENT
from ..memory.pool import extent

__all__ = ["place_for"]


def place_for(t: torch.Tensor) -> tuple[int, int]:
    """Where a slot for a tensor begins and ends, in elements after an aligned address: as far from one as the tensor itself."""
    shift = t.data_ptr() % ALIGNMENT // t.element_size()
    return shift, shift + extent(t)
