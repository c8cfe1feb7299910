"""Functions that are marked `@pg.live`: they really run every time, also within recorded functions."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch

from .identity import identity
from .torch_private import use_count
from .trees import flatten

__all__ = ["MARK", "Given", "Marked", "is_marked", "owners"]

MARK = "_phonograph_live"


class Marked:
    """Such a function. Between the segments of a recording it is what an operator is there that needs the host."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.run: Any = None  # what `pg.live` has made of it

    def name(self) -> str:
        return str(getattr(self.function, "__qualname__", self.function))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def is_marked(f: FunctionType) -> bool:
    """Whether this is what `pg.live` has made: and no function around it, to which `functools.wraps` has copied the mark."""
    mark = f.__dict__.get(MARK)
    return isinstance(mark, Marked) and mark.run is f


class Given:
    """The tensors that a marked function is going to be given, and what it then has done with them. (None of inference mode:
    those have no version.)"""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self._versions = [t._version for t in tensors]
        self._sizes = [t.size() for t in tensors]
        self._owners = [owners(tensors, i) for i in range(len(tensors))]

    def written(self) -> list[bool]:
        return [t._version != version for t, version in zip(self.tensors, self._versions, strict=True)]

    def resized(self) -> bool:
        return any(t.size() != size for t, size in zip(self.tensors, self._sizes, strict=True))

    def kept(self, box: list[Any]) -> list[bool]:
        """Which of them somebody has now who had not, but for its result, which is in this list."""
        leaves: list[Any] = []
        flatten(box, leaves)
        returned = Counter(map(identity, leaves))
        del leaves
        found = []
        for i, (objects, tensors) in enumerate(self._owners):
            objects_now, tensors_now = owners(self.tensors, i)
            found.append(objects_now - returned[identity(self.tensors[i])] > objects or tensors_now > tensors)
        return found


def owners(tensors: Sequence[torch.Tensor], i: int) -> tuple[int, int]:
    """References to a tensor, and tensors on its memory."""
    return sys.getrefcount(tensors[i]), use_count(tensors[i].untyped_storage()._cdata)
