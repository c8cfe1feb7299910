"""Which objects a function is given in each call, and which are others each time.

An object that holds tensors may be an argument in two ways. A batch comes anew each time: it is taken apart, and its tensors
are inputs. A cache, an agent or a configuration comes again: it is part of what a recording relies on, as an object is whose
method is recorded, and nothing of it is copied. An object *stands* once two calls in a row have got it, with the same tensors
in it. Where such ones soon give way to others, all of their class are taken apart.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ..python.identity import identity
from ..python.introspection import has_attributes, tells_its_end
from ..values.keys import NoSignature
from ..values.pytree import Flattener

__all__ = ["RecurringObjects"]

_WORTH = 64  # calls for which one has to stand, that it was worth a recording of its own
_ONCE = 64  # tensors that stand and have not come again
_ARRAYS = 8  # arrays with different contents...
_OF_ARRAY = 6  # ...whose keys have so many parts
_SEALED = 3  # objects of a class that cannot be taken apart which may stand


_Tensors = tuple["weakref.ref[torch.Tensor]", ...]
"""Not their identities: a tensor that is made when another has died may have its identity."""


class _Met(NamedTuple):
    """An object in a call, and the tensors in it."""

    of: weakref.ref[object]
    tensors: _Tensors


class RecurringObjects:
    """What a function knows of the objects that it was given. `standing` are the identities of those that stand, and for each
    the tensors in it; `gone`, of those that have stood and do no more."""

    def __init__(self, now: Callable[[], int] = int) -> None:
        self._now = now
        """How many calls there were."""
        self.standing: dict[int, _Tensors] = {}
        self.gone = set[int]()
        self.by_attributes = set[type]()
        """Classes whose objects are taken apart by their attributes, whatever pytree says: calls have changed some."""
        self._bound = set[int]()
        self._once = set[int]()
        self._arrays = set[int]()
        self._refs: dict[int, Callable[[], object]] = {}
        self._since: dict[int, int] = {}
        self._last: dict[type, list[_Met]] = {}
        self._varying: weakref.WeakSet[type] = weakref.WeakSet()
        self._sealed: weakref.WeakKeyDictionary[type, int] = weakref.WeakKeyDictionary()

    def note(self, flattener: Flattener, leaves: Sequence[object]) -> bool:
        """A call was taken apart; whether it has to be once more, because others stand now."""
        before, now = set(self.standing), dict[type, list[_Met]]()
        if self._once:
            self._once.difference_update(map(identity, leaves))
        for thing, start, end in flattener.spans:
            kind = type(thing)
            if kind in self._varying or not tells_its_end(kind) or not flattener.is_opened(thing) or not has_attributes(kind):
                continue
            if any(self._now() - self._since[i] < _WORTH for i in self._of(kind)):
                self._vary(kind)
                continue
            inside = leaves[start:end]
            met = _Met(weakref.ref(thing), _tensors(inside))
            now.setdefault(kind, []).append(met)
            if any(was.of() is thing and _are(was.tensors, inside) for was in self._last.get(kind, ())):
                for i in self._of(kind) - {identity(leaf) for leaf in leaves}:
                    self._forget(i)
                self._stand(thing, met.tensors)
        self._last |= now
        return set(self.standing) != before

    def seal(self, thing: object, leaves: Sequence[object]) -> bool:
        """Let an object stand at once that has something in it which cannot be described; whether it may."""
        kind = type(thing)
        if not tells_its_end(kind) or self._sealed.setdefault(kind, 0) >= _SEALED:
            return False
        self._sealed[kind] += 1
        self._stand(thing, _tensors(leaves))
        return True

    def bind(self, things: Iterable[object]) -> bool:
        """Let objects stand that the function can reach by other names as well; whether there are any."""
        found = [x for x in things if identity(x) not in self.standing]
        for thing in found:
            self._bound.add(identity(thing))
            self._stand(thing, ())
        return bool(found)

    def stands_any(self, things: Iterable[object]) -> bool:
        """Whether one of these objects stands."""
        return bool(self.standing) and any(identity(x) in self.standing for x in things)

    def hold(self, t: torch.Tensor) -> bool:
        """Let a tensor stand at once; whether it may. (Too many have come that never came again.)"""
        if len(self._once) >= _ONCE:
            return False
        self._once.add(identity(t))
        self._bound.add(identity(t))
        self._stand(t, ())
        return True

    def counted(self, key: Any) -> object:
        """This key of a value, unless it is an array's, of which there were too many others.

        Raises:
            NoSignature: there were.
        """
        if type(key[0]) is type and key[0].__module__ == "numpy" and len(key) == _OF_ARRAY:
            self._arrays.add(hash(key))
            if len(self._arrays) > _ARRAYS:
                raise NoSignature("takes a numpy.ndarray with other values nearly each time",
                                  "pass a tensor: torch.from_numpy(array), moved to the device")  # fmt: skip
        return key

    def moved(self, leaves: Sequence[object]) -> bool:
        """Whether some object that stands has other tensors in it than it had; then none of its class stands any more."""
        found = False
        for leaf in leaves if self.standing else ():
            was = self.standing.get(identity(leaf))
            if was is not None and type(leaf) not in self._sealed and identity(leaf) not in self._bound:
                inside: list[object] = []
                try:
                    Flattener(by_attributes=self.by_attributes).flatten(leaf, inside)
                except RecursionError:
                    continue
                if not _are(was, inside):
                    self._vary(type(leaf))
                    found = True
        return found

    def _of(self, kind: type) -> set[int]:
        own = self._refs.items() if kind not in self._sealed else ()
        return {i for i, ref in own if type(ref()) is kind and i not in self._bound}

    def _stand(self, thing: object, tensors: _Tensors) -> None:
        key = identity(thing)
        self.standing[key], self._since[key] = tensors, self._now()
        weak = tells_its_end(type(thing))
        self._refs[key] = weakref.ref(thing, lambda _: self._forget(key)) if weak else lambda: thing

    def _vary(self, kind: type) -> None:
        for i in self._of(kind):
            self._forget(i)
        self._varying.add(kind)

    def _forget(self, key: int) -> None:
        self.gone.add(key)
        self._bound.discard(key)
        for known in (self.standing, self._since, self._refs):
            known.pop(key, None)


def _tensors(leaves: Sequence[object]) -> _Tensors:
    return tuple([weakref.ref(x) for x in leaves if isinstance(x, torch.Tensor)])


def _are(refs: _Tensors, leaves: Sequence[object]) -> bool:
    """Whether the tensors among these leaves are those."""
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    return len(refs) == len(tensors) and all(ref() is t for ref, t in zip(refs, tensors, strict=True))
