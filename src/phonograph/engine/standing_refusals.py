"""Refusals, and for how long each stands: for as long as nothing changes on which the call relied that could not be recorded.

A flag was on, a hook was there, a model was in training mode: when that is over, the call is tried again. So a refusal has its
*grounds*, as a recording has what it relies on. Nobody's results depend on them, so that they need not be compared in each
call: only as often as costs next to nothing, and when the witness has heard of a change. They keep no tensor alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from .._torch.dynamic import Reading
from ..errors import Refusal
from ..guards import module_epochs
from ..guards.entries import Entries, Entry, relied, which
from ..guards.hyperparameters import DECIDES, Decided
from ..guards.reachable import Reach
from ..guards.tensor_states import state_of
from ..python.holders import Holder
from ..python.identity import identity
from ..slots.constants import is_heard_of
from .contained import Contained

__all__ = ["Grounds", "Lasting", "Standing", "grounds_of"]

_EVERY = 4  # calls after which there is a look, where there is little to look at...
_SELDOM = 12  # ...and after which there is one at least, where nothing was found several times
_A_CALL = 3  # places that are compared in a call, on average (or eight values of one)...
_HEARD_A_CALL = 12  # ...and values, where a change was heard of
_MOST = 50_000  # values; what has more is not compared


class Standing(NamedTuple):
    """A refusal, and its grounds."""

    refusal: Refusal
    grounds: Grounds | Lasting


class Lasting:
    """The grounds of what is over when somebody says so."""

    def changed(self, _calls: int = 1, _given: Sequence[object] = ()) -> None:
        """Nothing is."""


class Grounds(Entries):
    """What a call relied on that could not be recorded, as far as it is in reach."""

    @staticmethod
    def of(reach: Reach | None, more: Iterable[Holder] = (), decided: Decided | None = None) -> Grounds | None:
        """As it is now, and what these places hold besides; None if that is unknown, or too much. What was `decided` by numbers
        that the call itself changes is compared in each call: there is a look at what else would be decided."""
        if reach is None or reach.truncated:
            return None
        grounds = Grounds(reach, more, decided)
        return grounds if grounds.size <= _MOST else None

    def __init__(self, reach: Reach, more: Iterable[Holder], decided: Decided | None) -> None:
        self._decided = decided
        # (A learning rate is no reason to refuse a call for more than that one.)
        super().__init__([_entry(relied(h)) for h in (*reach.holders, *more) if h.dial is None], reach.shared)
        tensors = [t for _, t in reach.all_tensors]
        self._tensors = [(name, weakref.ref(t), _kind_of(t)) for name, t in reach.all_tensors]
        module_epochs.watch([*reach.modules, *tensors], self)
        self._growing: list[tuple[Holder, int]] = []  # what the calls fill, and how many values that had at the last look
        self._asked = 0
        self._sort()

    def _sort(self) -> None:
        self._hot = [entry for entry in self._held if not is_heard_of(entry[0])]
        self._watched = [entry for entry in self._held if is_heard_of(entry[0])]
        hot = sum(len(saved) for _, _, saved in self._hot)
        self.size = hot + sum(len(saved) for _, _, saved in self._watched) + len(self._tensors)
        self._lap = _EVERY + (len(self._hot) + hot // 8) // _A_CALL
        self._whole_lap = _EVERY + self.size // _HEARD_A_CALL
        self._next, self._next_whole = self._asked + self._lap, self._asked
        self._epoch = module_epochs.epoch
        self._hot_change: str | None = None
        self._heard_change: str | None = None
        self._change: str | None = None

    def changed(self, calls: int = 1, given: Sequence[object] = ()) -> str | None:
        """What is something else than it was, by name, as far as that is known. Each call that asks counts, or so many. It is
        `given` these numbers."""
        if self._decided is not None and not self._decided.again(given):
            return DECIDES
        self._asked = asked = self._asked + calls
        if asked < self._next and module_epochs.epoch == self._epoch:
            return self._change
        heard = module_epochs.epoch != self._epoch and asked >= self._next_whole
        if heard:
            self._epoch, self._next_whole = module_epochs.epoch, asked + self._whole_lap
            self._heard_change = self._first(self._watched) or self._other_tensor()
        if heard or asked >= self._next:
            self._next = asked + self._lap
            self._lap = min(2 * self._lap, max(self._lap, _SELDOM))
            self._hot_change = self._first(self._hot) or self._full()
        self._change = self._hot_change or self._heard_change
        return self._change

    def _first(self, entries: list[list[object]]) -> str | None:
        try:
            for entry in entries:
                if not self.unchanged(entry):
                    return which(entry)
        except RuntimeError:  # another thread changes what is read
            pass
        return None

    def _full(self) -> str | None:
        """What the calls filled until before the last look, and do no more: a queue, a table of what was met."""
        before, self._growing = self._growing, [(holder, _values_in(holder)) for holder, _ in self._growing]
        return next((h.path for (h, was), (_, now) in zip(before, self._growing, strict=True) if was == now), None)

    def _other_tensor(self) -> str | None:
        there = ((name, t, kind) for name, ref, kind in self._tensors if (t := ref()) is not None)
        return next((name for name, t, kind in there if _kind_of(t) != kind), None)

    def settle(self) -> None:
        """After the call was run live: what it changes itself, it does not rely on."""
        others = [entry for entry in self._held if not self.unchanged(entry)]
        self._growing += [(holder, -1) for holder, _, saved in others if _values_in(holder) > len(saved)]
        gone = {identity(entry) for entry in others if not _without_changes(entry)}
        self._held = [entry for entry in self._held if identity(entry) not in gone]
        self._tensors = [(n, ref, kind) for n, ref, kind in self._tensors if (t := ref()) is None or _kind_of(t) == kind]
        self._sort()


def grounds_of(refusal: Refusal) -> Grounds | None:
    """What a refused call has relied on, if that can be told."""
    with suppress(Refusal), Contained("looked at what a refusal relies on"):
        return Grounds.of(refusal.reach, refusal.places, refusal.decided)
    return None


def _kind_of(t: torch.Tensor) -> Reading:
    """What a tensor is, but for where its memory is."""
    return state_of(t)[1:]


def _values_in(holder: Holder) -> int:
    """How many values a container has; -1 of what is none."""
    return -1 if holder.contents is None else len(holder.contents.now())


def _entry(holder: Holder) -> list[object]:
    read, saved = holder.read, holder.read()
    if any(isinstance(x, torch.Tensor) for x in saved):
        read, saved = _weakly(read), _as_weak(saved)
    return [holder, read, saved]


def _weakly(read: Callable[[], Reading]) -> Callable[[], Reading]:
    return lambda: _as_weak(read())


def _as_weak(values: Reading) -> Reading:
    """With references in the place of tensors. (There is only one weak reference to an object.)"""
    return tuple([weakref.ref(x) if isinstance(x, torch.Tensor) else x for x in values])


def _without_changes(entry: Entry) -> bool:
    """Leave out of the comparison what is another value than before; whether something remains."""
    holder, read, saved = entry
    now = read()
    if len(now) != len(saved):
        entry[2] = now  # it may have made an attribute the first time
        return holder.contents is None
    others = {i for i, (a, b) in enumerate(zip(saved, now, strict=True)) if a is not b}

    def rest() -> Reading:
        return tuple([None if i in others else x for i, x in enumerate(read())])

    entry[1], entry[2] = rest, rest()
    return len(others) < len(now)
