"""The results of a replay, made of what its run has left: of most, a copy, or an alias of a template in the recording's memory.

The kinds are in `output_kinds.py`. Most recordings have none but plain ones, which take no more than a list of tensors; so that
is found out once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .._torch.dynamic import Leaves
from .._torch.tensors import alias
from ..autograd.function import Joint
from ..call.signature import Call
from ..capture.recording import Output, Recording, Replay
from ..memory.pool import Pool
from ..python.identity import identity
from ..slots.column import Tensors
from ..values.host_scalars import reading
from ..values.pytree import rebuilding
from .output_kinds import Copied, Leased

__all__ = ["Results"]


class Results:
    """Makes those of one recording."""

    def __init__(self, recording: Recording, pool: Pool) -> None:
        outputs, copies = recording.outputs, recording.program.outs
        self._recording, self._pool = recording, pool
        self.joint: Joint | None = None
        """The autograd node of the results, if the recording has a backward."""
        self._plain = _plain(recording)
        self._first = [(i, o) for i, o in enumerate(outputs) if o.of < 0]
        late = [(i, o) for i, o in enumerate(outputs) if o.of >= 0]
        self._late = sorted(late, key=lambda entry: _behind(entry[1], outputs))
        self._attached = any(o.attached for o in outputs)
        self._takes = recording.table.effects.leave_results if recording.table.effects.takes_results else None
        self._rebuild = rebuilding(recording.shape, len(outputs))
        if recording.numbers:
            dials = recording.table.numbers.dials
            self._rebuild = reading(recording.numbers, self._rebuild, recording.reckoned, lambda: dials.values)
        indices = None if self._plain is None or self._attached or self._takes else [i for i, _ in self._plain]
        self.of_copies: Callable[[Leaves], object] | None = self._rebuild if indices == [*range(len(copies))] else None
        """Makes the result of the copies alone, in their order, if it takes no more."""

    def made(self, copies: list[torch.Tensor], tensors: Tensors, call: Call | None) -> object:
        """The result of a call with these arguments. What of it is an effect is left where it belongs."""
        plain = self._plain
        if plain is not None:
            leaves: Leaves = [copies[i] if i >= 0 else alias(template) for i, template in plain]
            if self._attached:
                self._attach(leaves, tensors, call)
        else:
            leaves = self._each(copies, tensors, call)
        result = self._rebuild(leaves)
        return result if self._takes is None else self._takes(result, tensors, call)

    def _each(self, copies: list[torch.Tensor], tensors: Tensors, call: Call | None) -> Leaves:
        made: Leaves = [None] * len(self._recording.outputs)
        replay = Replay(self._recording, self._pool, call, tensors, call.borrowed if call is not None else {}, copies, made)
        for i, output in self._first:
            made[i] = output.make(replay)
        if self._attached:
            self._attach(made, tensors, call)
        for i, output in self._late:
            made[i] = output.make(replay)
        return made

    def _attach(self, made: Leaves, tensors: Tensors, call: Call | None) -> None:
        assert self.joint is not None
        self.joint.attach(made, tensors, call.borrowed if call is not None else ())


def _plain(recording: Recording) -> list[tuple[int, torch.Tensor]] | None:
    """For each result, the index of its copy and its template; -1 for one in the recording's memory. None if some result is
    neither."""
    copies, inference = recording.program.outs, torch.is_inference_mode_enabled()
    whole = {identity(mould): i for i, mould in enumerate(copies) if mould.is_inference() is inference}
    plain: list[tuple[int, torch.Tensor]] = []
    for o in recording.outputs:
        if not isinstance(o, Leased) or o.consumed or o.lazy is not None or recording.borrow:
            return None
        copied = isinstance(o, Copied)
        if copied and identity(o.memory) not in whole:
            return None
        plain.append((whole[identity(o.memory)] if copied else -1, o.memory))
    return plain


def _behind(o: Output, outputs: Sequence[Output]) -> int:
    """Number of outputs that have to be made before this one."""
    return 1 + _behind(outputs[o.of], outputs) if o.of >= 0 else 0
