"""Ordinary objects, taken apart into their attributes (and items) and put together again.

An object of a class that Python code defines is no more than its attributes: those in its `__dict__`, those in its slots, and
the items of a dictionary if it is one as well. It is read and made without running any code of the class. What may hold more
than Python shows of it (an object of a C extension, of a class with a `__new__` of its own) is not taken apart, nor is what is
one thing by its nature: a module, an optimizer, a generator, a lock, a logger.
"""

from __future__ import annotations

import enum
import weakref
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict
from types import SimpleNamespace
from typing import NamedTuple

import torch

from .._torch.dynamic import Leaves, Table, Thing
from ..python.introspection import MISSING, has_attributes, own_dict, slots_of

__all__ = ["Layout", "layout_of", "made_of", "parts_of", "put_into", "replace"]

_ONE_THING = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler,
              torch.utils.data.Dataset, torch.Tensor, enum.Enum, type, BaseException, defaultdict, weakref.WeakKeyDictionary,
              weakref.WeakValueDictionary, weakref.WeakSet)  # fmt: skip
_MAKES: tuple[object, ...] = (object.__new__, SimpleNamespace.__new__, dict.__new__)
_KNOWN = (SimpleNamespace, UserDict, UserList, Counter)  # of modules that are else not looked into
_KNOWN_OF = frozenset({"torch.nn.attention.flex_attention"})  # BlockMask


class Layout(NamedTuple):
    """What makes an object of a class: attributes in a dictionary, in these slots, items."""

    slots: tuple[tuple[str, Thing], ...]
    items: bool


_known: weakref.WeakKeyDictionary[type, Layout | None] = weakref.WeakKeyDictionary()


def layout_of(kind: type) -> Layout | None:
    """How objects of a class are taken apart; None if they are not."""
    if kind not in _known:
        _known[kind] = _layout(kind)
    return _known[kind]


def _layout(kind: type) -> Layout | None:
    if issubclass(kind, _ONE_THING) or kind.__new__ not in _MAKES or kind in (dict, OrderedDict, object):
        return None
    if not (has_attributes(kind) or issubclass(kind, _KNOWN) or kind.__module__ in _KNOWN_OF):
        return None
    if any(name in vars(base) for base in kind.__mro__ for name in ("__next__", "__del__")):
        return None
    slots = tuple(slot for base in kind.__mro__ for slot in slots_of(base))
    if not slots and not kind.__dictoffset__:
        return None
    if getattr(kind, "__abstractmethods__", None) or issubclass(kind, OrderedDict):
        return None
    try:
        kind.__new__(kind)
    except TypeError:  # an extension's base makes its objects otherwise
        return None
    return Layout(slots, issubclass(kind, dict))


class Parts(NamedTuple):
    """An object's attributes, and items; `itself`: its attributes are its items (``self.__dict__ = self``)."""

    names: tuple[str, ...]
    values: Leaves
    items: Table | None
    itself: bool


def parts_of(thing: Thing, layout: Layout) -> Parts:
    own = own_dict(thing)
    itself = own is not None and own is thing
    attributes = {} if own is None or itself else dict(own)
    for name, descriptor in layout.slots:
        try:
            attributes[name] = descriptor.__get__(thing)
        except AttributeError:
            continue
    items = dict(dict.items(thing)) if layout.items else None
    return Parts((*attributes,), [*attributes.values()], items, itself)


def made_of(kind: Thing) -> object:
    """A new object of this class, without anything in it."""
    return kind.__new__(kind)


def put_into(thing: Thing, attributes: dict[str, object], items: dict[object, object] | None, itself: bool) -> None:
    """Let an object have these attributes, and items, and no others."""
    layout = layout_of(type(thing))
    assert layout is not None
    if items is not None:
        replace(thing, items)
    if itself:
        thing.__dict__ = thing
        return
    for name, descriptor in layout.slots:
        value = attributes.pop(name, MISSING)
        try:
            if value is not MISSING:
                descriptor.__set__(thing, value)
            else:
                descriptor.__delete__(thing)
        except AttributeError:  # there was none
            continue
    own = own_dict(thing)
    if own is not None:
        replace(own, attributes)


def replace(d: Table, items: Table) -> None:
    """Let a dictionary have these items, in this order."""
    if list(dict.keys(d)) != list(items)[: dict.__len__(d)]:
        dict.clear(d)
    dict.update(d, items)
