"""What a call leaves in attributes of objects, and each replay leaves there as well.

``self.steps += 1`` and ``self.features = x`` are effects that outlive the call. A replay can have them, if it is certain that
nothing in the call depends on what it finds there, which is something else in each call:

* A number that is *counted*: no code that ran names such an attribute but to add a number to it that stands there. A replay
  adds what the call has added.
* A tensor, or the number in one, that is *put* somewhere: it is one more result of the call. No code that ran reads such an
  attribute but where it has set it before; or the tensor that was there is one more argument of the call (`carried`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .carried import Carried, Carries, Looked, Place, is_state
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


def left_by(found: Sequence[tuple[Holder, tuple[Any, ...]]], ran: Ran, carried: Carried, read: Looked) -> Left:
    """What a call in which this code ran has left in attributes, where it had `found` this; they are as before now. Of some of
    them it is known that they are `carried`.

    Raises:
        Carries: others are.
    """
    counts, puts, unknown = list[Count](), list[Put](), list[Place]()
    for holder, old in found:
        now = holder.read()
        end = 1 + old[0]  # of the names
        if len(now) != len(old) or now[:end] != old[:end]:  # there are others
            continue
        pairs = [(name, a, b) for name, a, b in zip(old[1:end], old[end:], now[end:], strict=True) if a is not b]
        module = issubclass(type(holder.owner), torch.nn.Module)  # `isinstance` asks the object
        counted = {name: b - a for name, a, b in pairs if type(a) is type(b) is int and ran.counts(name, of_module=module)}
        put = {name: b for name, _, b in pairs if _is_tensor(b) and ran.sets(name, of_module=module)}
        may_carry = carried.learns and type(holder.owner).__weakrefoffset__
        state = [(name, a, b) for name, a, b in pairs if may_carry and name not in put and is_state(a) and is_state(b)]
        if pairs and len(counted) + len(put) + len(state) == len(pairs):
            unknown += _not_known(holder, state, carried, lambda name, t: not ran.is_torchs(name) or read(t))
            counts += [Count(f"{holder.path}.{name}", holder.owner, name, by) for name, by in counted.items()]
            put |= {name: b for name, _, b in state}
            puts += [Put(f"{holder.path}.{name}", holder.owner, name, new) for name, new in put.items()]
            holder.restore(old)
    if unknown:
        raise Carries(unknown)
    return Left(tuple(counts), tuple(puts))


def _not_known(
    holder: Holder, state: Sequence[tuple[str, Any, Any]], carried: Carried, read: Callable[[str, torch.Tensor], bool]
) -> list[Place]:  # fmt: skip
    """Those attributes of which it is not known that they are carried, or that what was there is read."""
    found = []
    for name, old, _ in state:
        reads = old is not None and read(name, old)
        if not carried.has(holder.owner, name) or (reads and not carried.reads(holder.owner, name)):
            found.append(Place(f"{holder.path}.{name}", holder.owner, name, reads))
    return found


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


def putting(puts: Sequence[Put], rebuild: Callable[[list[Any]], Any], *, more: int = 0) -> Callable[[list[Any]], Any]:
    """What makes the result of a call of its leaves, if they are made into (the result, [what is put somewhere]), within so
    many `more` such pairs."""
    where = [(put.of, put.name) for put in puts]

    def rebuilt(leaves: list[Any]) -> Any:
        result, rest = rebuild(leaves), []
        for _ in range(more):
            result, last = result
            rest.append(last)
        result, tensors = result
        for (of, name), tensor in zip(where, tensors, strict=True):
            own = own_dict(of)
            assert own is not None
            own[name] = tensor
        for last in reversed(rest):
            result = (result, last)
        return result

    return rebuilt
