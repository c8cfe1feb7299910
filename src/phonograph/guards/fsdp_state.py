"""What `fully_shard` (FSDP2) keeps from call to call: states of modules, groups of parameters, what they communicate by.

Its hooks go by all of that, so all of it counts, whoever names it. A step of training ends as it has begun: nobody's turn,
everything sharded, no event that anybody has to wait for. So there is nothing that a replay would have to set, and a call that
ends otherwise is refused.

A parameter is *gathered* where it is used: its whole is there under the same storage each time, which has memory only for so
long. In a graph that memory is the pool's, and between replays the storage is empty, as between live calls.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._torch.dynamic import Reading, Thing
from .._torch.process_groups import GATHERED
from ..python import object_attributes
from ..python.holders import Holder
from .attribute_epochs import gradient

__all__ = ["attributes", "empty", "gathered", "is_renewed", "memory", "storage"]

_NONE_YET = object()  # for any empty dictionary: another takes its place in each step


def attributes(path: str, thing: object) -> Holder:
    """All that an object of `fully_shard`'s has."""
    own: dict[str, Thing] = thing.__dict__
    place = object_attributes.attributes(path, thing)._replace(owner=None)
    renewed = {name: d for name, d in own.items() if is_renewed(d)}
    if not renewed:
        return place

    def read() -> Reading:
        return (len(own), *own, *[_NONE_YET if is_renewed(x) else x for x in own.values()])

    def restore(values: Reading) -> None:
        n = values[0]
        before = dict(zip(values[1 : n + 1], values[n + 1 :], strict=True))
        own.clear()
        own.update({name: renewed.get(name, {}) if x is _NONE_YET else x for name, x in before.items()})
        for name, x in before.items():
            if x is _NONE_YET:
                own[name].clear()

    return place._replace(read=read, restore=restore, inside=None)


def is_renewed(value: object) -> bool:
    """Whether this is an empty dictionary, which counts for any other."""
    return type(value) is dict and not value


def gathered(thing: object) -> list[torch.Tensor]:
    """The tensors of such an object that have memory only while a parameter is gathered."""
    found = [x for name in GATHERED if (x := thing.__dict__.get(name)) is not None]
    return [t for x in found for t in (x if isinstance(x, list) else [x])]


def empty(t: torch.Tensor) -> bool:
    return storage(t).nbytes() == 0


def storage(t: torch.Tensor) -> torch.UntypedStorage:
    inner: torch.Tensor = getattr(t, "_local_tensor", t)  # of a DTensor
    return inner.untyped_storage()


def memory(path: str, tensors: Sequence[torch.Tensor]) -> Holder:
    """How much memory these have, and their gradients: none, before a recording and after it. (Replays need not look each time:
    what `fully_shard` has gathered stands in the attributes that tell so, and gradients are behind their door: `Grads`.)"""

    def read() -> Reading:
        return (*[storage(t).nbytes() for t in tensors], *[gradient(t) if t.is_leaf else None for t in tensors])

    def restore(values: Reading) -> None:
        for t, nbytes, grad in zip(tensors, values, values[len(tensors) :], strict=False):
            if not nbytes:
                storage(t).resize_(0)
            if t.is_leaf and gradient(t) is not grad:
                t.grad = grad

    return Holder(path, read, restore, watched=True, named=lambda path, i, _: f"{path} (gathered)")
