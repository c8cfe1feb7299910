"""State that a function carries from call to call in attributes: ``self.v = self.v * 0.9 + x``.

What stands there before a call is one more argument, and what stands there after it one more result. So it is part of the
signature (whether it is there, its shape, its kind), has a slot that is filled from whatever stands there, and each replay
leaves there what it has made: a tensor of the caller's like any other result. Somebody may read it, keep it, or put another
there (`net.reset()`) between two calls.

That an attribute is such is learned in a capture, which is taken back: it has found a tensor there, or None, and has left
another. Where no code but torch's names the attribute, and no operator has read the tensor that was there (the weights that
`weight_norm`, `spectral_norm` and `prune` set), it is no argument; only what it looked like counts.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from .identity import identity
from .places import own_dict
from .torch_private import has_memory

__all__ = ["Carried", "Carries", "Place", "is_state"]

_MISSING = object()


class Place(NamedTuple):
    """An attribute of an object; whether the tensor that stands there before a call may be read."""

    path: str
    of: object
    name: str
    read: bool


class Carries(Exception):
    """A capture has left tensors in attributes which are not known to be carried. Never reaches the user: the capture is taken
    back, and made again."""

    def __init__(self, places: Iterable[Place]) -> None:
        super().__init__()
        self.places = tuple(places)


class _Known(NamedTuple):
    label: str
    of: weakref.ref[Any]
    name: str
    read: bool


class Carried:
    """The attributes in which one function carries state. It may be that it `learns` of no others."""

    def __init__(self, learns: bool = True) -> None:
        self.learns = learns
        self._known: dict[tuple[int, str], _Known] = {}

    def __bool__(self) -> bool:
        return bool(self._known)

    def learn(self, places: Iterable[Place]) -> bool:
        """Whether something of this is new."""
        new = False
        for place in places:
            known = self._find(place.of, place.name)
            if known is None or (place.read and not known.read):
                label = known.label if known is not None else self._label(place.path)
                self._known[identity(place.of), place.name] = _Known(label, weakref.ref(place.of), place.name, place.read)
                new = True
        return new

    def _find(self, of: object, name: str) -> _Known | None:
        known = self._known.get((identity(of), name))
        return known if known is not None and known.of() is of else None

    def _label(self, path: str) -> str:
        taken = {known.label for known in self._known.values()}
        while path in taken:
            path += "'"
        return path

    def now(self) -> dict[str, Any]:
        """What stands there, as arguments: tensors that are read; of everything else, what it is like."""
        return {known.label: _as_argument(known) for known in self._known.values()}

    def has(self, of: object, name: str) -> bool:
        return self._find(of, name) is not None

    def reads(self, of: object, name: str) -> bool:
        known = self._find(of, name)
        return known is not None and known.read

    def standing(self) -> list[torch.Tensor]:
        """The tensors that stand there and are arguments."""
        return [x for x in self.now().values() if isinstance(x, torch.Tensor)]

    def taken(self) -> list[tuple[Any, str]]:
        """Of which attributes what stands there is an argument, or would be."""
        return [(of, known.name) for known in self._known.values() if known.read and (of := known.of()) is not None]

    def stand(self, arguments: dict[str, Any]) -> Callable[[], None]:
        """Take those of these arguments that are carried, and let them stand where they are found. Returns what puts back what
        stood there, unless something else does by then."""
        stood = list[tuple[dict[str, Any], str, Any, Any]]()
        for known in self._known.values():
            argument, own = arguments.pop(known.label, None), own_dict(known.of())
            if own is not None and isinstance(argument, torch.Tensor):
                stood.append((own, known.name, own[known.name], argument))
                own[known.name] = argument

        def put_back() -> None:
            for own, name, before, argument in stood:
                if own.get(name) is argument:
                    own[name] = before

        return put_back


def is_state(value: Any) -> bool:
    """Whether this may be carried: a plain tensor, or none yet."""
    return value is None or (type(value) is torch.Tensor and has_memory(value))


def _as_argument(known: _Known) -> Any:
    value = (own_dict(known.of()) or {}).get(known.name, _MISSING)
    if value is None or (known.read and is_state(value)):
        return value
    if is_state(value):
        return sys.intern(f"{value.dtype}, {tuple(value.shape)}, {value.requires_grad}, {value.device}")
    return sys.intern(f"a {type(value).__name__}")


Looked = Callable[[torch.Tensor], bool]
"""Whether an operator of the call has read a tensor that was there before."""
