"""What a call leaves in attributes of objects, and each replay leaves there as well.

``self.steps += 1`` and ``self.features = x`` are effects that outlive the call. A replay can have them, if it is certain that
nothing in the call depends on what it finds there, which is something else in each call:

* A number that is *counted*: no code that ran names such an attribute but to add a number to it that stands there. A replay
  adds what the call has added.
* A tensor, or the number in one, that is *put* somewhere: it is one more result of the call. No code that ran reads such an
  attribute but where it has set it before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .numerals import Numeral
from .places import Holder, kept, own_dict
from .torch_private import has_memory

if TYPE_CHECKING:
    from .ran import Ran

__all__ = ["Count", "Left", "Put", "advance", "before", "kinds", "left_by", "putting"]


class Count(NamedTuple):
    """An attribute in an object's dictionary to which each run of a call adds the same."""

    path: str
    of: object
    name: str
    by: int


class Put(NamedTuple):
    """One that each run sets to a tensor of its own: in the capture, to `new`."""

    path: str
    of: object
    name: str
    new: torch.Tensor | Numeral | None = None


class Left(NamedTuple):
    """All that a call leaves."""

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
        return Left(self.counts, tuple([put._replace(new=None) for put in self.puts]))


def before(holders: Sequence[Holder]) -> list[tuple[Holder, tuple[Any, ...]]]:
    """What a call finds in attributes, right before it."""
    return [(h, h.read()) for h in holders if h.owner is not None and _sets_plainly(type(h.owner))]


def left_by(found: Sequence[tuple[Holder, tuple[Any, ...]]], ran: Ran) -> Left:
    """What a call in which this code ran has left in attributes, where it had `found` this; they are as before now."""
    counts, puts = list[Count](), list[Put]()
    for holder, old in found:
        now = holder.read()
        end = 1 + old[0]  # of the names
        if len(now) != len(old) or now[:end] != old[:end]:  # there are others
            continue
        pairs = [(name, a, b) for name, a, b in zip(old[1:end], old[end:], now[end:], strict=True) if a is not b]
        module = issubclass(type(holder.owner), torch.nn.Module)  # `isinstance` asks the object
        counted = {name: b - a for name, a, b in pairs if type(a) is type(b) is int and ran.counts(name, of_module=module)}
        put = {name: b for name, _, b in pairs if _is_tensor(b) and ran.sets(name, of_module=module)}
        if pairs and len(counted) + len(put) == len(pairs):
            counts += [Count(f"{holder.path}.{name}", holder.owner, name, by) for name, by in counted.items()]
            puts += [Put(f"{holder.path}.{name}", holder.owner, name, new) for name, new in put.items()]
            holder.restore(old)
    return Left(tuple(counts), tuple(puts))


def _sets_plainly(kind: type) -> bool:
    """Whether to set a number or a tensor as an attribute of such an object is to put it into the object's dictionary."""
    sets: Any = kind.__setattr__
    return sets is object.__setattr__ or sets is torch.nn.Module.__setattr__


def _is_tensor(value: Any) -> bool:
    return (type(value) is torch.Tensor and has_memory(value)) or type(value) is Numeral


def kinds(path: str, of: object, names: Sequence[str]) -> Holder:
    """Of what types some attributes of an object are, whatever their values."""

    def read() -> tuple[Any, ...]:
        own = own_dict(of) or {}
        return tuple([type(own.get(n)) for n in names])

    return kept(path, read)._replace(named=lambda path, i, _: f"{path}.{names[i]}")


def advance(counts: Sequence[Count]) -> None:
    """A replay has run."""
    for count in counts:
        own = own_dict(count.of)
        assert own is not None
        own[count.name] += count.by


def putting(puts: Sequence[Put], rebuild: Callable[[list[Any]], Any], *, edited: bool = False) -> Callable[[list[Any]], Any]:
    """What makes the result of a call of its leaves, if they are made into (the result, [what is put somewhere]); where
    arguments are `edited`, into (that, what else there is)."""
    where = [(put.of, put.name) for put in puts]

    def rebuilt(leaves: list[Any]) -> Any:
        result = rebuild(leaves)
        (result, tensors), rest = result if edited else (result, None)
        for (of, name), tensor in zip(where, tensors, strict=True):
            own = own_dict(of)
            assert own is not None
            own[name] = tensor
        return (result, rest) if edited else result

    return rebuilt
