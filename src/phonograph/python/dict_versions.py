"""Dictionaries that say by themselves whether they have been changed, so that a replay need not read what is in them.

Up to Python 3.11 CPython keeps a version in each dictionary, which is another one after each change, whoever makes it and in
which way. From 3.12 on who wants to know watches a dictionary, and hears of changes: the helper in C does, and where there is
none, torch.compile's guards. These take the numbers of all dictionaries of which somebody has asked from one counter. So it is
enough there to change a dictionary of our own: where its version is the next number after its last one, none of all the others
has been changed meanwhile.

What counts of an `OrderedDict` is its order as well, which can change without a new version: one with several items is read.
And there are releases of CPython in which what is assigned to an attribute is not heard (3.13.0): that is tried out once. So
is whether an empty dictionary is heard when it gets all items of another one: torch's guards leave that event out.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import count
from operator import is_
from typing import Any

from .._torch.dynamic import Thing
from .._torch.native import Fact, dict_version, tells_versions
from .identity import identity

__all__ = ["Versions", "at_one_glance", "of_class", "tell"]


class _Clock:
    """Moves on when a dictionary of which somebody has asked the version has been changed."""

    def __init__(self) -> None:
        self._own, self._turns = {"turn": 0}, count(1)
        self._last = self.epoch = 0

    def now(self) -> int:
        """The epoch: another number whenever one may have been changed since. (Two threads that ask at one time move it.)"""
        self._own["turn"] = next(self._turns)
        version: int = dict_version(self._own)
        if version != self._last + 1:
            self.epoch = next(_epochs)
        self._last = version
        return self.epoch


_epochs = count(1)
_clock = _Clock()


class _Probe:
    pass


def _ways() -> Iterable[tuple[dict[str, Thing], Callable[[Thing], None]]]:
    """Dictionaries, and ways to change the value of `a` in them."""
    probe, plain = _Probe(), {"a": 0}
    probe.a = 0  # type: ignore[attr-defined]

    def assign(value: object) -> None:
        probe.a = value  # type: ignore[attr-defined]

    yield plain, lambda value: plain.__setitem__("a", value)
    yield probe.__dict__, assign
    yield of_class(_Probe), lambda value: setattr(_Probe, "a", value)


def _are_heard() -> bool:
    """Whether changes make new versions, in all of these ways, and also when the interpreter has got used to them."""
    for d, change in _ways():
        for turn in range(64):
            before = dict_version(d)
            change(object())
            if turn % 16 in (0, 15) and dict_version(d) == before:
                return False
    del _Probe.a  # type: ignore[attr-defined]
    return True


def _are_filled_unheard() -> bool:
    """Whether an empty dictionary may get the items of another one and keep its version."""
    d: dict[str, int] = {}
    before = dict_version(d)
    d.update(a=0)
    return bool(dict_version(d) == before)


def _are_counted_together() -> bool:
    """Whether the clock knows: versions go up by one, and only those of dictionaries of which they have been asked."""
    known, other = {"a": 0}, {"a": 0}
    dict_version(known)
    _clock.now()
    before = _clock.now()
    other["a"] = 1
    if _clock.now() != before:
        return False
    known["a"] = 1
    return _clock.now() != before


def of_class(kind: type) -> Thing:
    """The dictionary behind `vars` of a class. (Those of `ctypes` have one of a class of its own.)"""
    return next((x for x in gc.get_referents(vars(kind)) if isinstance(x, dict)), None)


_heard = dict_version is not None and _are_heard()
_filled_unheard = _heard and _are_filled_unheard()
at_one_glance = _heard and _are_counted_together()
"""Whether it takes no more to know that none of many has been changed. Otherwise each is asked."""


def tell(dictionaries: Iterable[object]) -> bool:
    """Whether each of these has another version when it holds something else, or holds it in another order."""
    return _heard and all(type(d) is dict or (type(d) is OrderedDict and len(d) < 2) for d in dictionaries)


class Versions:
    """Those of some dictionaries. Objects' own dictionaries are found by a function: they may be replaced as a whole."""

    __slots__ = ("_dictionaries", "_empty", "_epoch", "_find", "_new", "_own", "_versions")

    def __init__(self, dictionaries: list[dict[object, object]], find: list[Callable[[], dict[object, object]]]) -> None:
        self._dictionaries, self._find = dictionaries, find
        self._own: list[Thing] = [None] * len(find)
        self._versions = [-1] * (len(dictionaries) + len(find))
        self._epoch = -1
        self._empty: list[Thing] = []  # those that were, where it has to be looked at whether they are
        self._new: Any = None

    def moved(self) -> list[int]:
        """The places of those that may hold something else than at the last `keep`: at first, of all."""
        own = [find() for find in self._find]
        replaced = not all(map(is_, own, self._own))
        epoch = _clock.now() if at_one_glance else -1
        replaced = replaced or self._are_filled()
        if epoch == self._epoch and at_one_glance and not replaced:
            return []
        now = [*map(dict_version, self._dictionaries), *map(dict_version, own)]
        if now == self._versions and not replaced:
            self._epoch = epoch
            return []
        self._new = own, now, epoch
        filled = {identity(d) for d in self._empty if d}
        others = [identity(d) in filled for d in self._dictionaries]
        others += [d is not was or identity(d) in filled for d, was in zip(own, self._own, strict=True)]
        return [i for i, (a, b, other) in enumerate(zip(now, self._versions, others, strict=True)) if other or a != b]

    def _are_filled(self) -> bool:
        return any(self._empty)

    def facts(self) -> list[Fact] | None:
        """Which say that none has moved."""
        own: list[tuple[Any, Any]] = [(find, find()) for find in self._find]
        found: list[Fact] = [("called", find, d) for find, d in own]
        if self._empty:
            found.append(("called", self._are_filled, False))
        if at_one_glance:
            return [("called", _clock.now, _clock.now()), *found]
        return [*(("version", d) for d in (*self._dictionaries, *(d for _, d in own))), *found] if tells_versions else None

    def keep(self) -> None:
        """What has moved has been looked at, and holds what it did."""
        self._own, self._versions, self._epoch = self._new
        if _filled_unheard:
            self._empty = [d for d in (*self._dictionaries, *self._own) if not d]
