"""Counters: numbers that a call counts up, and does nothing else with.

``self.steps += 1`` is an effect that outlives the call, but one that a replay can have as well: it adds what the call has
added. That needs certainty that nothing in the call depends on the number, so that it may be another in each: no code that ran
names such an attribute but to add a number to it that stands there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence, Set
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .bytecode import slight_use_in
from .places import own_dict
from .where import is_torchs

if TYPE_CHECKING:
    from .reliance import Snapshot

__all__ = ["Count", "advance", "counted", "slightly_used"]


class Count(NamedTuple):
    """An attribute in an object's dictionary to which each run of a call adds the same."""

    path: str
    of: object
    name: str
    by: int


def slightly_used(ran: Iterable[CodeType]) -> tuple[Set[str], Set[str]]:
    """Names of attributes with which the code that ran, torch's aside, does nothing but to add numbers to them and to call what
    has them; and those where it only calls."""
    uses = [slight_use_in(code) for code in ran if not is_torchs(code.co_filename)]
    counts, calls, rest = (frozenset[str]().union(*names) for names in zip(*uses, strict=True)) if uses else [frozenset()] * 3
    return counts - rest, calls - counts - rest


def counted(snapshot: Snapshot, ran: Collection[CodeType]) -> list[Count]:
    """What the call that followed the snapshot has counted; that is put back."""
    names, _ = slightly_used(ran)
    found = list[Count]()
    for holder, old in zip(snapshot.holders, snapshot.values, strict=True):
        owner = holder.owner
        if not names or owner is None or not _sets_plainly(type(owner)):
            continue
        now = holder.read()
        n = old[0]
        if len(now) != len(old) or now[: n + 1] != old[: n + 1]:  # other attributes
            continue
        pairs = [(name, a, b) for name, a, b in zip(old[1 : n + 1], old[n + 1 :], now[n + 1 :], strict=True) if a is not b]
        if pairs and all(name in names and type(a) is type(b) is int for name, a, b in pairs):
            found += [Count(f"{holder.path}.{name}", owner, name, b - a) for name, a, b in pairs]
            holder.restore(old)
    return found


def _sets_plainly(kind: type) -> bool:
    """Whether to set a number as an attribute of such an object is to put it into the object's dictionary."""
    sets: Any = kind.__setattr__
    return sets is object.__setattr__ or sets is torch.nn.Module.__setattr__


def advance(counts: Sequence[Count]) -> None:
    """A replay has run."""
    for count in counts:
        own = own_dict(count.of)
        assert own is not None
        own[count.name] += count.by
