"""Hyper-parameters and step counts of a captured call, as its operators meet them."""

from __future__ import annotations

from collections.abc import Sequence, Set

from torch import Tensor

from .._torch.dynamic import Args, Kwargs, Thing
from .._torch.tensors import has_memory, storage_id
from ..aten import operators
from ..guards.hyperparameters import Dials
from ..memory.pool import memory_of
from ..memory.spans import Spans
from .call_memory import CallMemory

__all__ = ["COUNTING", "FollowedCounts"]

# How steps of optimizers move their counts on.
COUNTING = {"aten::add_": "add", "aten::_foreach_add_": "add", "aten::mul_": "mul", "aten::_foreach_mul_": "mul"}


class FollowedCounts(CallMemory):
    """Tells the operators of one call that move such counts on from those that a replay needs."""

    def __init__(self) -> None:
        self.dials: Dials | None = None
        self._counts: Set[int] = frozenset()  # storages of followed step counts on the host
        self._counting = False  # whether there are any

    def follow(self, dials: Dials) -> None:
        """Set the probes for hyper-parameters and step counts of this call."""
        self.dials = dials
        places = Spans(map(memory_of, dials.counts.here))
        outside = self._outside_at.items() if places else ()  # another storage may have the memory of a count
        others = {key for key, there in outside if any(places.meets(*memory_of(t)) for t in there)}
        self._counts = others.union(map(storage_id, dials.counts.here))
        self._counting = bool(dials.counts)

    def _counted(self, m: operators.Meaning, args: Args, kwargs: Kwargs) -> bool:
        """Whether an operator only advances step counts on the host. It is left out: replays advance them by themselves."""
        assert self.dials is not None
        counts, by = args[:2]
        constant = not isinstance(by, Tensor) or storage_id(by) in self._constants
        if not (constant and kwargs.get("alpha", 1) == 1 and self.dials.moves(COUNTING[m.name], counts, by, self.position())):
            return False
        tensors = operators.tensors_in([counts], [])
        if not all(t.is_cpu for t in tensors):
            return False
        self.touched.update(map(storage_id, tensors))
        return True

    def position(self) -> int:
        """How much the call has done so far, in the measure of `Program.ran`."""
        raise NotImplementedError

    def dials_lost(self, values: Sequence[object]) -> None:
        """Stop following hyper-parameters that an operator outside of the graph takes."""
        if self.dials and any(type(v) is float and v in self.dials.formulas for v in values):
            self.dials.lost = True

    def stands_among(self, values: Sequence[Thing]) -> bool:
        """Whether one of these stands for a number that is followed, or a tensor has one that does."""
        assert self.dials is not None
        for x in values:
            if type(x) is float and x in self.dials.formulas:
                return True
            if isinstance(x, (list, tuple)) and self.stands_among(x):
                return True
            if isinstance(x, Tensor) and has_memory(x) and storage_id(x) not in self.known and self.dials.stands_in(x):
                return True
        return False
