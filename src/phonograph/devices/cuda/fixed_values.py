"""Values on a GPU that are the same in each replay (`capture/fixed_values.py`).

During a capture nothing runs on the GPU, and nobody may wait for it. So where code reads such a tensor, it is made once more,
beside the capture (`capture/recipes.py`): on a stream that is not captured.

A recipe may read tensors from outside of the call. Their versions are compared before each replay. A version misses a write
through `.data` or another alias: where such an alias exists, the values are compared, and the host waits. It also misses a
write that goes around torch: each replay looks for those on the device, and a later call raises (`value_checks.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..._torch.dynamic import Reading
from ..._torch.tensors import storage_id, use_count
from ...capture.recipes import bytes_of
from ...capture.value_checks import Check
from ...guards.data_door import data, handed_out
from ...python.holders import Holder, kept

__all__ = ["Versions", "Watched"]

_UNTOLD = (
    "phonograph: {} was written in a way that its version does not tell of (.data, or memory that is shared with others), and "
    "replays have gone on by what it held before. Write it as it is (copy_, fill_), or call pg.reset on the recorded function "
    "when it has changed"
)


class Watched(Check):
    """Whether memory outside holds still what it did, which each replay looks at. (Who keeps answers keeps this, for as long
    as there is room for others.)"""

    def __init__(self, name: str, where: str) -> None:
        super().__init__(True, RuntimeError, _UNTOLD.format(name), where)
        self.failed = False

    def error(self, given: list[object] | None = None) -> Exception:
        self.failed = True
        return super().error(given)


class Versions:
    """Those of tensors outside on one storage, which held these bytes `before`. What has relied on them is not played again
    where that was found to be `watched` in vain."""

    def __init__(self, watched: Watched, tensors: Sequence[torch.Tensor], before: torch.Tensor) -> None:
        self._watched, self._tensors, self._before = watched, tensors, before
        self._untold = any(isinstance(t, torch.nn.Parameter) for t in tensors)  # whose `data` is a property of another's
        self._key = storage_id(tensors[0])
        self._storage = tensors[0].untyped_storage()  # kept: nothing else gets its identity, or its memory
        data.stay_for(self)
        self._seen = handed_out(self._key)

    def place(self, name: str) -> Holder:
        """What a recording relies on, before each replay."""
        return kept(name, self._read)._replace(named=lambda path, i, values: path)

    def _read(self) -> Reading:
        return (self._watched.failed or not self._is_as_before(), *[t._version for t in self._tensors])

    def _is_as_before(self) -> bool:
        """Whether it holds the same, as far as versions would not tell. (`t.data = …` leaves them alone.)"""
        if any(t.untyped_storage() is not self._storage for t in self._tensors):
            return False
        handed = handed_out(self._key)
        if handed == self._seen and not self._untold and use_count(self._key) <= len(self._tensors):
            return True
        if torch.cuda.is_current_stream_capturing():  # nothing is played there
            return True
        if not torch.equal(bytes_of(self._tensors[0]).cpu(), self._before):
            return False
        self._seen = handed
        return True
