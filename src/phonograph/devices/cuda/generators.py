"""Random generators that the graphs of a GPU are told of."""

from __future__ import annotations

from typing import ClassVar

import torch

from ...guards.reachable import Reach
from ...state.rng import Known, held, share_state
from ...values.device_names import is_of

__all__ = ["GraphGenerators"]


class GraphGenerators:
    """Those of one GPU, but for its default generator. Captures add to them what they meet."""

    _all: ClassVar[list[GraphGenerators]] = []

    def __init__(self, torch_device: torch.device) -> None:
        self._device = torch_device
        self.default = torch.cuda.default_generators[torch_device.index]
        self.known: list[torch.Generator] = []
        self.lent: list[torch.Generator] = []  # those of compiled code's own among them
        self._all.append(self)

    def told(self, reach: Reach) -> Known:
        """Of all generators that a call can draw from: the default one first, those in its reach, and those that were met in
        captures before and are still there. A graph of any call is told of all of them: but not of one that is of no GPU in
        particular, and of which graphs of another were told, because torch has one place for where it stands, on that."""
        here = [g for g in reach.generators if is_of(g, self._device)]
        self.known[:] = held(self.known)
        for g in here:
            if not any(share_state(g, known) for known in (self.default, *self.known)):
                self.known.append(g)
        others = [g for device in self._all if device is not self for g in device.known]
        self.known[:] = [g for g in self.known if not any(share_state(g, other) for other in others)]
        self.lent[:] = [g for g in self.lent if any(g is known for known in self.known)]
        return Known([*dict.fromkeys((self.default, *here, *self.known))], self.lent)
