"""The tensors among the arguments of a call, taken out where everything else is what it was in a call before.

What has to be there is written out as one expression, unless there are objects among the arguments, or containers that the
function may reach by another name.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable, Iterator, Set
from functools import partial
from operator import is_
from typing import Any, NamedTuple

import torch

from .._torch.dynamic import Args, Kwargs
from ..call.signature import Call
from ..capture.recording import Entangled
from ..python.identity import identity
from ..python.introspection import own_dict, tells_its_end
from ..python.origin import written_out
from ..values.keys import BY_IDENTITY, SCALARS
from ..values.object_layout import layout_of
from ..values.pytree import has_only_attributes
from ..values.pytree_nodes import Node

__all__ = ["Matching", "Unmatchable", "matching"]

Matching = Callable[[Args, Kwargs], Args | None]


_VALUES = frozenset({*SCALARS, float, complex})  # they cannot change
_INEXACT = frozenset({float, complex})  # of which 0.0 and -0.0 are equal
_TENSOR = object()


class _Same(NamedTuple):
    """What has to be this very object, if it is there yet."""

    thing: Callable[[], Any]


class _Part(NamedTuple):
    """What a tuple, a list or a dictionary has to have in it: `_TENSOR`s, plain values, `_Same` objects, and others such."""

    kind: type
    names: tuple[str, ...]
    children: tuple[Any, ...]


class _Object(NamedTuple):
    """What an object has to have in its dictionary."""

    kind: type
    names: tuple[str, ...]
    children: tuple[Any, ...]


def matching(call: Call, state: Entangled) -> Matching | None:
    """What takes the tensors out of arguments that are otherwise the same as those of this call; None where they all are
    tensors, and positional.

    Raises:
        Unmatchable: they are in containers of another kind, or are values that do not compare so easily.
    """
    assert call.shape is not None
    slots = {identity(t) for t in call.tensors}
    part = _part(call.shape, iter(call.leaves), slots)
    (_, _, positional), (_, names, _) = part.children
    if not names and all(x is _TENSOR for x in positional):
        return None
    filled = bool(state.filled) and sum(not isinstance(c, tuple) for c in call.containers) > 1  # some besides `kwargs`
    objects = filled or any(layout_of(type(c)) is not None for c in call.containers)
    return partial(_taken_of_objects, state, part) if objects else _Taking().written(part)


class _Taking:
    """Writes the function that takes the tensors out of arguments among which there is no object."""

    def __init__(self) -> None:
        self._names: dict[str, object] = {"is_": is_, "equal": _equal, "equal_names": _equal_names}
        self._asked: list[str] = []
        self._found: list[str] = []

    def written(self, part: _Part) -> Matching:
        args, kwargs = part.children
        self._enter(args, "args")
        self._enter(kwargs, "kwargs")
        found: Matching = written_out(
            f"lambda args, kwargs: ({''.join(f'{x}, ' for x in self._found)}) if {' and '.join(self._asked)} else None",
            self._names,
        )
        return found

    def _named(self, thing: object) -> str:
        name = f"n{len(self._names)}"
        self._names[name] = thing
        return name

    def _enter(self, part: _Part, x: str) -> None:
        """What has to be in the container `x`."""
        self._asked.append(f"type({x}) is {self._named(part.kind)} and len({x}) == {len(part.children)}")
        if part.names:
            names = self._named(part.names)
            self._asked.append(f"(all(map(is_, {x}, {names})) or equal_names({x}, {names}))")
        if part.children and all(child is _TENSOR for child in part.children):
            self._found.append(f"*{x}.values()" if part.names else f"*{x}")
            return
        for i, child in enumerate(part.children):
            value = f"{x}[{part.names[i]!r}]" if part.names else f"{x}[{i}]"
            if child is _TENSOR:
                self._found.append(value)
            elif type(child) is _Part:
                inner = self._named(None)
                self._asked.append(f"({inner} := {value}) is {inner}")
                self._enter(child, inner)
            else:
                known = self._named(child)
                self._asked.append(f"(({known}v := {value}) is {known} or equal({known}v, {known}))")


def _part(node: Node | None, leaves: Iterator[object], slots: Set[int]) -> Any:
    if node is None:
        return _leaf(next(leaves), slots)
    plain = node.kind in (tuple, list, dict)
    if not (plain or has_only_attributes(node)) or any(type(name) is not str for name in node.names):
        raise Unmatchable
    return (_Part if plain else _Object)(node.kind, node.names, tuple([_part(child, leaves, slots) for child in node.children]))


def _leaf(leaf: object, slots: Set[int]) -> object:
    if type(leaf) in _VALUES:
        return leaf
    if identity(leaf) in slots:
        return _TENSOR
    stands = isinstance(leaf, (*BY_IDENTITY, enum.Enum, torch.Tensor)) or layout_of(type(leaf)) is not None
    if stands and tells_its_end(type(leaf)):
        return _Same(weakref.ref(leaf))
    raise Unmatchable


class Unmatchable(Exception):
    """Something else is among the arguments."""


def _taken_of_objects(
    state: Entangled, part: _Part, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[object, ...] | None:  # fmt: skip
    """What is taken out where the function may reach none of the containers by another name: objects, and what it fills."""
    found: list[object] = []
    objects: list[object] = []
    if not _takes(part, (args, kwargs), found, objects) or any(map(state.reaches, objects)):
        return None
    return tuple(found) if len({*map(identity, objects)}) == len(objects) else None


def _takes(part: _Part | _Object, x: Any, found: list[object], objects: list[object] | None = None) -> bool:
    """Whether this has in it what it has to, in the same order."""
    kind, names, children = part
    theirs: type = type(x)
    if theirs is not kind:
        return False
    if type(part) is _Object:
        assert objects is not None
        objects.append(x)
        x = own_dict(x)
        if x is None:
            return False
    elif objects is not None and theirs is not tuple:
        objects.append(x)
    if len(x) != len(children):
        return False
    if not all(map(is_, x, names)) and not _equal_names(x, names):  # of a dictionary
        return False
    for value, child in zip(x.values() if names else x, children, strict=True):
        if child is _TENSOR:
            found.append(value)
        elif type(child) is _Part or type(child) is _Object:
            if not _takes(child, value, found, objects):
                return False
        elif value is not child and not _equal(value, child):
            return False
    return True


def _equal_names(x: Iterable[str], names: tuple[str, ...]) -> bool:
    """Whether these are its keys: those that stand in code are the very same objects, and others need not be."""
    return tuple(x) == names and all(type(name) is str for name in x)


def _equal(value: object, known: object) -> bool:
    kind = type(value)
    if type(known) is _Same:
        return known.thing() is value and value is not None
    return kind is type(known) and value == known and (kind not in _INEXACT or repr(value) == repr(known))
