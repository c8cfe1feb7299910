"""What a call leaves in attributes of objects, and each replay leaves there as well.

``self.steps += 1`` and ``self.features = x`` are effects that outlive the call. A replay can have them, if it is certain that
nothing in the call depends on what it finds there, which is something else in each call:

* A number that is *counted*: no code that ran names such an attribute but to add a number to it that stands there. A replay
  adds what the call has added.
* A tensor that is *put* in place of another, or of None: it is one more result of the call. No operator has read the other;
  what can be asked of it besides, its shape, say, has to be the same in each call, and no code may ask which tensor it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .places import Holder, kept, own_dict

if TYPE_CHECKING:
    from .reliance import Snapshot

__all__ = ["Count", "Left", "Put", "advance", "kinds", "left_by", "putting"]


class Count(NamedTuple):
    """An attribute in an object's dictionary to which each run of a call adds the same."""

    path: str
    of: object
    name: str
    by: int


class Put(NamedTuple):
    """One that each run sets to a tensor of its own; in the capture, from `old` to `new`."""

    path: str
    of: object
    name: str
    old: torch.Tensor | None = None
    new: torch.Tensor | None = None


class Left(NamedTuple):
    """All of them."""

    counts: tuple[Count, ...] = ()
    puts: tuple[Put, ...] = ()

    @property
    def paths(self) -> list[str]:
        return [count.path for count in self.counts] + [put.path for put in self.puts]

    @property
    def names(self) -> list[str]:
        return [count.name for count in self.counts] + [put.name for put in self.puts]

    @property
    def owners(self) -> list[object]:
        return [count.of for count in self.counts] + [put.of for put in self.puts]

    def after(self) -> Left:
        """For when the capture is over: without its tensors."""
        return Left(self.counts, tuple([put._replace(old=None, new=None) for put in self.puts]))


def left_by(snapshot: Snapshot, counting: Set[str]) -> Left:
    """What the call that followed the snapshot has left in attributes; those are as before now. The code that ran does nothing
    but count with those of the names `counting`."""
    counts, puts = list[Count](), list[Put]()
    for holder, old in zip(snapshot.holders, snapshot.values, strict=True):
        if holder.owner is None or not _sets_plainly(type(holder.owner)):
            continue
        now = holder.read()
        n = old[0]
        if len(now) != len(old) or now[: n + 1] != old[: n + 1]:  # other attributes
            continue
        pairs = [(name, a, b) for name, a, b in zip(old[1 : n + 1], old[n + 1 :], now[n + 1 :], strict=True) if a is not b]
        counted = {name: b - a for name, a, b in pairs if name in counting and type(a) is type(b) is int}
        put = {name: (a, b) for name, a, b in pairs if (a is None or _is_tensor(a)) and _is_tensor(b)}
        if pairs and len(counted) + len(put) == len(pairs):
            counts += [Count(f"{holder.path}.{name}", holder.owner, name, by) for name, by in counted.items()]
            puts += [Put(f"{holder.path}.{name}", holder.owner, name, *ab) for name, ab in put.items()]
            holder.restore(old)
    return Left(tuple(counts), tuple(puts))


def _sets_plainly(kind: type) -> bool:
    """Whether to set a number or a tensor as an attribute of such an object is to put it into the object's dictionary."""
    sets: Any = kind.__setattr__
    return sets is object.__setattr__ or sets is torch.nn.Module.__setattr__


def _is_tensor(value: Any) -> bool:
    return type(value) is torch.Tensor and value.layout is torch.strided


def kinds(path: str, of: object, names: Sequence[str]) -> Holder:
    """Of what kind some attributes of an object are, whatever their values."""
    before = [_kind((own_dict(of) or {}).get(n)) for n in names]

    def read() -> tuple[Any, ...]:
        own = own_dict(of) or {}
        return tuple([_kind(own.get(n)) == kind for n, kind in zip(names, before, strict=True)])

    return kept(path, read)._replace(named=lambda path, i, _: f"{path}.{names[i]}")


def _kind(x: Any) -> tuple[Any, ...]:
    if not _is_tensor(x):
        return (type(x),)
    hooked = x._backward_hooks is not None or (x.is_leaf and x.grad is not None)
    return (torch.Tensor, x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.is_leaf, x.is_inference(), hooked,
            bool(x.__dict__))  # fmt: skip


def advance(counts: Sequence[Count]) -> None:
    """A replay has run."""
    for count in counts:
        own = own_dict(count.of)
        assert own is not None
        own[count.name] += count.by


def putting(puts: Sequence[Put], rebuild: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """What makes the result of a call of its leaves, if they are made into (the result, [what is put somewhere])."""
    where = [(put.of, put.name) for put in puts]

    def rebuilt(leaves: list[Any]) -> Any:
        result, tensors = rebuild(leaves)
        for (of, name), tensor in zip(where, tensors, strict=True):
            own = own_dict(of)
            assert own is not None
            own[name] = tensor
        return result

    return rebuilt
