"""What is in reach of a function at one moment: what a call has changed there is found, and put back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_
from typing import NamedTuple

from .._torch.tensors import alias
from ..python.holders import Holder, Spot
from ..python.rows import elements
from ..values.counters import Unread, are_numbers, are_plain, are_rows
from ..values.tensor_subclasses import consists_of_parts
from .reachable import Reach
from .sameness import all_same, equal, same
from .tensor_states import hooks_of, state_of, states_of

__all__ = ["Setting", "Snapshot", "changed", "name_of"]


class Setting(NamedTuple):
    """A call has set a plain value where another was: perhaps a number, or what stands for one."""

    path: str
    spot: Spot
    old: object
    new: object
    number: bool


class Snapshot:
    """What is in reach at one moment: the values of all holders, and what the tensors *are* (memory, shape, kind; their
    values are the device's business). It finds what a call changed, puts it back, and is what a recording relies on."""

    def __init__(self, reach: Reach) -> None:
        self.holders = reach.holders
        self.values = [h.read() for h in reach.holders]
        tensors = [t for _, t in reach.all_tensors]
        self.tensors = [(name, t, s) for (name, t), s in zip(reach.all_tensors, states_of(tensors), strict=True)]
        self._hooks = {i: [dict(d or {}) for d in hooks_of(t)] for i, (_, t, state) in enumerate(self.tensors) if state[-1]}
        self._aliases = [None if consists_of_parts(t) else alias(t) for t in tensors]  # the parts are among them

    def also(self, holders: Sequence[Holder]) -> None:
        """Places that were found only after a call, as they are now."""
        values = [h.read() for h in holders]
        self.holders = [*self.holders, *holders]
        self.values += values

    def changes(self) -> list[str]:
        """The names of places and tensors that are something else now; of plain values, which a replay might set, at the end.
        Objects that are equal to those that were there, not the same, and nothing that can change, are put back: nobody would
        hear of them."""
        found, plain = list[str](), list[str]()
        for holder, old in zip(self.holders, self.values, strict=True):
            now = holder.read()
            if len(now) != len(old) or not all(map(is_, now, old)):
                if len(now) == len(old) and all(map(equal, old, now)):
                    holder.restore(old)
                else:
                    others = _not_set_plainly(holder, old, now)
                    (found if others else plain).append(others or name_of(holder, old, now))
        states = states_of([t for _, t, _ in self.tensors])
        found += [name for (name, _, state), now in zip(self.tensors, states, strict=True) if now != state]
        return found + plain

    def unread(self) -> list[tuple[tuple[int, object], str]]:
        """Where there were numbers, and are some now that are known only when a replay has run, with their names."""
        found = []
        for holder, old in zip(self.holders, self.values, strict=True):
            now = holder.read()
            if len(now) == len(old) and holder.spot is not None:
                pairs = enumerate(zip(old, now, strict=True))
                changed = [i for i, (a, b) in pairs if isinstance(b, Unread) and are_numbers(a, b)]
                found += [(holder.spot(i, now).at, holder.label(i, now)) for i in changed]
        return found

    def settings(self) -> list[Setting]:
        """Where there are other plain values now; none if anything else has changed."""
        found = []
        for holder, old in zip(self.holders, self.values, strict=True):
            now = holder.read()
            if len(now) != len(old):
                return []
            for i, (a, b) in enumerate(zip(old, now, strict=True)):
                if a is not b and not equal(a, b):
                    if holder.spot is None or not are_plain(a, b):
                        return []
                    spot, name = holder.spot(i, now), holder.label(i, now)
                    if are_rows(a, b):
                        places = zip(elements(spot, a, name), a, b, strict=True)
                        found += [Setting(place.name, place, x, y, number=True) for place, x, y in places]
                    else:
                        found.append(Setting(name, spot, a, b, are_numbers(a, b)))
        states = states_of([t for _, t, _ in self.tensors])
        return found if all(now == state for (_, _, state), now in zip(self.tensors, states, strict=True)) else []

    def restore(self) -> None:
        """Put every changed place back as it was, and make every changed tensor again what it was."""
        failed: list[Exception] = []
        for holder, old in zip(self.holders, self.values, strict=True):
            try:
                now = holder.read()
                if len(now) != len(old) or not all(map(is_, now, old)):
                    holder.restore(old)
            except Exception as e:  # the other places have to be put back all the same
                failed.append(e)
        for i, (_, t, before) in enumerate(self.tensors):
            now = state_of(t)
            if before[-1] or now[-1]:
                for hooks, saved in zip(hooks_of(t), self._hooks.get(i, ({}, {})), strict=True):
                    if hooks is not None and hooks != saved:
                        hooks.clear()
                        hooks.update(saved)
            if now[:-1] != before[:-1]:
                if (memory := self._aliases[i]) is not None:
                    t.data = memory
                t.requires_grad_(before[-2])
        if failed:
            raise failed[0]


def _not_set_plainly(holder: Holder, old: tuple[object, ...], now: tuple[object, ...]) -> str:
    """The name of the first value of a holder that differs, and is no plain one; "" if there is none."""
    if holder.spot is None or len(old) != len(now):
        return name_of(holder, old, now)
    pairs = enumerate(zip(old, now, strict=True))
    return next((holder.label(i, now) for i, (a, b) in pairs if not (a is b or equal(a, b) or are_plain(a, b))), "")


def changed(read: Iterable[tuple[Holder, tuple[object, ...]]]) -> list[str]:
    """The names of those places that hold something else than what was read of them."""
    return [name_of(h, old, now) for h, old in read if not all_same(old, now := h.read())]


def name_of(holder: Holder, old: tuple[object, ...], now: tuple[object, ...]) -> str:
    """The name of the first value of a holder that differs."""
    if len(old) != len(now):
        return holder.path
    for alike in (same, equal):
        for i, (a, b) in enumerate(zip(old, now, strict=True)):
            if not alike(a, b):
                return holder.label(i, now)
    return holder.path
