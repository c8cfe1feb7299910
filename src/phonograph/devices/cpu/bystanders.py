"""Memory that outlives a call, and that no operator of it has written: is it as before?

Operators tell what they write. Code that has got an address before the call, or an extension in C++ that calls no operators,
tells nothing; but a capture on the CPU runs all of it, and so it shows. (Of a large tensor only the beginning is looked at:
whoever writes it around torch mostly writes all of it.)
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable

import torch

from ..._torch.tensors import has_memory
from ...capture.recording import memory_of
from ...memory.spans import Spans
from ...python.memory_contents import AT_ONCE

__all__ = ["Bystanders"]


class Bystanders:
    """Tensors with their names, as they are now. (The tensors are not kept alive: to be used while they are.)"""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        places = {memory_of(t): (name, t) for name, t in tensors if has_memory(t) and t.is_cpu}
        self._before = [(name, t, _version(t), *place, ctypes.string_at(place[0], min(place[1], AT_ONCE)))
                        for place, (name, t) in places.items() if place[1]]  # fmt: skip

    def put_back(self, written: Iterable[torch.UntypedStorage]) -> str:
        """The name of the first that is another than before, where none of these storages lies, and that no operator of another
        thread has written; empty if there is none. Those that were looked at in full are as before then, if no other thread is
        there that may be writing them."""
        known, found = Spans((s.data_ptr(), s.nbytes()) for s in written), ""
        alone = len(sys._current_frames()) == 1
        for name, t, version, address, nbytes, before in self._before:
            if memory_of(t) != (address, nbytes) or known.meets(address, nbytes) or _version(t) != version:
                continue
            if ctypes.string_at(address, len(before)) != before:
                found = found or name
                if alone:
                    ctypes.memmove(address, before, len(before))
        return found


def _version(t: torch.Tensor) -> int:
    return 0 if t.is_inference() else t._version
