"""What a marked function (`@pg.live`) is given, and what it does with that: all of it that the segments of a recording have to
know, and would not see of copies."""

from __future__ import annotations

import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import is_

import torch

from .._torch.dynamic import Args, Kwargs, Leaves
from .._torch.modes import is_batched, transformed
from .._torch.tensors import has_memory, use_count
from ..call.signature import attributes, modes
from ..guards.tensor_states import state_of
from ..memory.pool import row_of_bytes
from ..python.identity import identity
from ..values.pytree import containers, flatten

__all__ = ["HISTORY", "Given", "differ", "plain"]

HISTORY = "returns a tensor with a history"
_A_MOMENT = 0.1  # seconds


def plain(t: torch.Tensor) -> bool:
    """Whether it is a tensor of which all this can be asked."""
    usual = type(t) in (torch.Tensor, torch.nn.Parameter) and not is_batched(t) and not transformed()
    return usual and has_memory(t) and not t.is_inference()


class Given:
    """The arguments of a call, from before it on. What it returned is always in a `box`, a list that alone has it.

    Some of the tensors are copies, or will be in replays: with the `values` that these had before, by their places, a write
    counts also where it leaves no other trace (`x.data`), and an attribute that one of them is given counts as well."""

    def __init__(self, args: Args, kwargs: Kwargs, values: Mapping[int, torch.Tensor]) -> None:
        self._values = values
        self._tree = args, kwargs
        self._leaves: Leaves = []
        self._shape = flatten(self._tree, self._leaves)
        self._containers = [c for c in containers(self._tree) if c is not kwargs]
        self.tensors = {i: x for i, x in enumerate(self._leaves) if isinstance(x, torch.Tensor)}
        self._list = [*self.tensors.values()]
        self._versions = [t._version for t in self._list]
        self._states = self._states_now()
        self._modes = modes()
        self._owners = [_owners(self._list, i) for i in range(len(self._list))]
        self._references = [sys.getrefcount(c) for c in self._containers]

    def _states_now(self) -> list[object]:
        return [(_state(t), _attributes(t) if i in self._values else None) for i, t in self.tensors.items()]

    def written(self) -> tuple[int, ...]:
        """The places of tensors that were written."""
        versions = zip(self.tensors.items(), self._versions, strict=True)
        return tuple(i for (i, t), version in versions
                     if t._version != version or (i in self._values and differ(t, self._values[i])))  # fmt: skip

    def kept(self, box: list[object]) -> set[int]:
        """The places of tensors that somebody has now who had not."""
        returned = _returned(box)

        def kept() -> set[int]:
            return {place for i, place in enumerate(self.tensors) if self._more(i, returned[identity(self._list[i])])}

        return set() if _soon(lambda: not kept()) else kept()

    def _more(self, i: int, returned: int) -> bool:
        (objects, *others), (objects_now, *others_now) = self._owners[i], _owners(self._list, i)
        return objects_now - returned > objects or any(now > then for then, now in zip(others, others_now, strict=True))

    def changed(self, box: list[object]) -> str:
        """What it has done to them besides writing values, or to the settings of the process."""
        if self._states_now() != self._states:
            return "changes a tensor that it is given otherwise than its values"
        leaves: list[object] = []
        if flatten(self._tree, leaves) != self._shape or not all(map(is_, leaves, self._leaves)):
            return "changes a container that it is given"
        returned = _returned(box)
        now = [sys.getrefcount(c) - returned[identity(c)] for c in self._containers]
        if any(a > b for a, b in zip(now, self._references, strict=True)):
            return "keeps a container that it is given"
        return "changes a setting of the process" if modes() != self._modes else ""

    def unlike(self, box: list[object]) -> list[str]:
        """What is wrong with the result, of which the next segment has a copy."""
        theirs = {*map(identity, (*self._list, *self._containers))}
        leaves: list[object] = []
        flatten(box, leaves)
        new = [x for x in leaves if isinstance(x, torch.Tensor) and identity(x) not in theirs and has_memory(x)]
        made = [c for c in containers(box[0]) if identity(c) not in theirs]
        del leaves
        alone = _soon(lambda: all(_all_owners(new, i) in _ALONE for i in range(len(new))))
        alone = alone and all(sys.getrefcount(made[i]) == _ALONE[0][0][0] for i in range(len(made)))
        alone = alone and all(t.untyped_storage().resizable() for t in new)  # else the memory is an array's, say
        found = [HISTORY] if any(t.requires_grad for t in new) else []
        found += ["returns a tensor with attributes of its own"] if any(map(attributes, new)) else []
        return found if alone else [*found, "returns something that it keeps, or that is somebody else's (return a clone)"]


def _soon(holds: Callable[[], bool]) -> bool:
    """Whether this holds; where there are process groups, whose threads let go a moment later of what they have worked with,
    whether it does soon."""
    until = time.monotonic() + _A_MOMENT
    while not holds():
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()) or time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


def differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of the same metadata hold other bits."""
    return not torch.equal(row_of_bytes(a.detach()), row_of_bytes(b.detach()))


def _state(t: torch.Tensor) -> tuple[object, ...]:
    return *state_of(t), t.is_leaf, t.retains_grad


def _attributes(t: torch.Tensor) -> list[tuple[str, int]]:
    return [(name, identity(value)) for name, value in attributes(t).items()]


def _owners(tensors: Sequence[torch.Tensor], i: int) -> tuple[int, ...]:
    """References to a tensor, and weak ones; tensors on its memory, and Python's references to that."""
    storage = tensors[i].untyped_storage()
    objects, weak = sys.getrefcount(tensors[i]), weakref.getweakrefcount(tensors[i])
    return objects, weak, use_count(storage._cdata), sys.getrefcount(storage)


def _returned(box: list[object]) -> Counter[int]:
    """How often things are in a result."""
    leaves: list[object] = []
    flatten(box, leaves)
    return Counter([*map(identity, leaves), *map(identity, containers(box[0]))])


def _owners_of_base(t: torch.Tensor) -> tuple[int, ...]:
    """References, and weak ones, to the tensor that this is a view of; and whether it is a part of that only."""
    if (base := t._base) is None:
        return ()
    return sys.getrefcount(base), weakref.getweakrefcount(base), t.nbytes != t.untyped_storage().nbytes()


def _all_owners(tensors: Sequence[torch.Tensor], i: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return _owners(tensors, i), _owners_of_base(tensors[i])


_two = [[torch.empty(1), torch.empty(1).view(1)], list[torch.Tensor]()]
_two[1][:] = _two[0]
_ALONE = [_all_owners(_two[0], i) for i in range(2)]  # of what two containers have: the result, and a list here
