"""What a call reads of the objects in its reach: the names of attributes, and the keys of dictionaries that these hold.

Whoever stands in the way of the reads (`reads.gate`) tells of each. None is missed, and none noted that was read of another
object; but for compiled code (`torch.compile`), and `object.__getattribute__` where code calls it. A dictionary tells nobody
what is read of it, nor does a `SimpleNamespace`. But where an attribute holds one, the instructions after the read of the
attribute do (``self.config["clip"]``): then it is that key which was read, and otherwise all of it.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property
from types import CodeType, FrameType, FunctionType, MemberDescriptorType, ModuleType, SimpleNamespace
from typing import Protocol

import torch

from .._torch.dynamic import Thing
from .identity import identity
from .introspection import MISSING, own_dict
from .origin import is_torchs
from .subscripts import TABLES, keys_after

__all__ = ["DOORS_FILE", "Reads", "Touching", "behind_gate", "gates", "is_worn_out", "may_be_gated", "opened"]

_HEAP_TYPE, _IMMUTABLE = 1 << 9, 1 << 8  # Py_TPFLAGS_HEAPTYPE, _IMMUTABLETYPE
# By which all attributes of an object are got at.
_ALL = frozenset({"__dict__", "__dir__", "__getattribute__", "__getstate__", "__reduce__", "__reduce_ex__", "__sizeof__"})
# Times that one class is gated: from 3.13 on CPython gives a class 1,000 versions, and looks attributes up slowly after that.
_MOST = 300 if sys.version_info >= (3, 13) else sys.maxsize
opened = dict[int, int]()
"""How often each class was, by identity. (At worst it counts for one that has gone.)"""
_ANY = object()
_NO_TABLES = frozenset(["__dict__", *vars(torch.nn.Module())])  # dictionaries of which all counts anyway
_BY_NAME = frozenset({"__getattr__", "__setattr__", "__delattr__"})  # of torch's modules
gates = dict[object, object]()
"""What stands in classes for the time of a call, and what stood there."""
# `warnings` leaves frames out whose file has both words in its name.
DOORS_FILE = os.path.join(os.path.dirname(__file__), "importlib_bootstrap_of_doors.py")
"""The file of the code that stands there, as other code is told."""


def behind_gate(member: Thing) -> Thing:
    """What a class has in the place of this while no reads are noted; `MISSING` if nothing."""
    while type(member) is FunctionType and member in gates:  # one may stand before another
        member = gates[member]
    return member


def is_worn_out(kind: type) -> bool:
    """Whether a class has been gated as often as it may be."""
    return opened.get(identity(kind), 0) >= _MOST


def may_be_gated(kind: Thing) -> bool:
    """Whether reads of attributes of such objects can be noted."""
    meta: Thing = type(kind)
    if not kind.__flags__ & _HEAP_TYPE or kind.__flags__ & _IMMUTABLE or meta.__setattr__ is not type.__setattr__:
        return False
    if kind.__getattribute__ is not object.__getattribute__ or issubclass(kind, (type, ModuleType)):
        return False
    if issubclass(kind, torch.nn.Module):
        return kind.__setattr__ is torch.nn.Module.__setattr__ and not is_worn_out(torch.nn.Module)
    return kind.__module__.partition(".")[0] not in ("torch", "phonograph") and not is_worn_out(kind)


class Touching(Protocol):
    """Is told of reads before they happen. May raise."""

    def read(self, value: object, frame: FrameType, name: str) -> None:
        """An attribute of this name, with this value, is read."""

    def read_all(self, thing: object, frame: FrameType) -> None:
        """All attributes of an object are asked for."""

    def unheard(self) -> None:
        """From now on it is not told of any."""


class Reads:
    """What is read of these objects, which the caller keeps alive."""

    def __init__(self, objects: Iterable[object]) -> None:
        things = [*objects]
        self._kinds = {*filter(may_be_gated, {*map(type, things)})}
        plain: Thing = (object.__setattr__, torch.nn.Module.__setattr__)
        self._plainly = {kind for kind in self._kinds if kind.__setattr__ in plain}
        self._names: dict[int, set[str]] = {identity(x): set() for x in things if type(x) in self._kinds}
        # By the identities of dictionaries, where attributes with them were read: the code, at which instruction, by what name.
        self._read_at: dict[int, dict[tuple[int, int, str], tuple[CodeType, type]]] = defaultdict(dict)
        self.touching: Touching | None = None
        self.untouched = frozenset[int]()
        """The identities of what a call that has come to its end has not touched."""
        self.certain = True
        """Whether nothing has been read past the gate."""

    def names(self, thing: object) -> set[str] | None:
        """The names of the attributes that were read of an object, whether or not it has them; None if it may be any."""
        names = self._names.get(identity(thing))
        return None if names is None or type(thing) not in self._kinds or not _ALL.isdisjoint(names) else names

    def knows(self, kind: type) -> bool:
        """Whether reads of such objects were noted."""
        return kind in self._kinds or kind is SimpleNamespace

    @cached_property
    def tables(self) -> dict[int, set[object] | None]:
        """The keys that were read of dictionaries which attributes hold, by the identities of these; None for any."""
        found: dict[int, set[object] | None] = {}
        for table, reads in self._read_at.items():
            keys = {keys_after(*code).get((at, name), _ANY) for (_, at, name), code in reads.items()}
            found[table] = None if _ANY in keys else keys
        return found

    @property
    def doors(self) -> list[type]:
        """The classes at which reads have to be heard. (Modules have it from torch's.)"""
        modules = {kind for kind in self._kinds if issubclass(kind, torch.nn.Module)}
        return [*(self._kinds - modules), *([torch.nn.Module] if modules else [])]

    def heard(self, thing: object, name: str, frame: FrameType | None) -> bool:
        """An attribute is about to be read, by the code of this frame. Whether that is to be heard each time. May raise."""
        names = self._names.get(identity(thing))
        if names is None:
            return False
        frame = frame or sys._getframe()
        read = _looked_up(frame) if name == "__dict__" and issubclass(type(thing), torch.nn.Module) else name
        if self.touching is not None and read in _ALL and read not in names:
            self.touching.read_all(thing, frame)
        names.add(read)
        value = _value_of(thing, read)
        if self.touching is not None:
            self.touching.read(value, frame, read)
        is_table = type(value) in TABLES and read not in _NO_TABLES
        if is_table:
            self._read_at[identity(value)][identity(frame.f_code), frame.f_lasti, read] = frame.f_code, type(value)
        return is_table or self.touching is not None or read is not name

    def written(self, thing: object, name: str) -> None:
        """An attribute is about to be set or deleted. (What a call sets to what it was before counts as well: a replay does not
        set it. Which attributes a class's own `__setattr__` sets, nobody knows.)"""
        if (names := self._names.get(identity(thing))) is not None:
            names.add(name if type(thing) in self._plainly else "__dict__")

    def leaves_out(self, kind: type) -> None:
        """Reads of objects of this class, and of those derived from it, cannot be heard."""
        if self.touching is not None:
            self.touching.unheard()
        self._kinds = {known for known in self._kinds if not issubclass(known, kind)}

    def hears_no_more(self) -> None:
        """From now on, it is told of nothing."""
        self.certain = False
        if self.touching is not None:
            self.touching.unheard()


def _value_of(thing: Thing, name: str) -> object:
    """What an object has by this name, in its dictionary, in a slot or in its class, before anybody is asked for it."""
    value = dict.get(own_dict(thing) or {}, name, MISSING)
    if value is not MISSING:
        return value
    value = next((found for base in type(thing).__mro__ if (found := vars(base).get(name, MISSING)) is not MISSING), MISSING)
    if type(value) is not MemberDescriptorType:
        return MISSING if hasattr(type(value), "__get__") else value  # (what a function reads is heard where it runs)
    try:
        return value.__get__(thing)
    except AttributeError:
        return MISSING


def _looked_up(frame: FrameType) -> str:
    """What code reads of a module of which it has asked for all attributes. Torch's own looks up where a name belongs."""
    by_name = frame.f_code.co_name in _BY_NAME and is_torchs(frame.f_code.co_filename)
    return str(frame.f_locals["name"]) if by_name else "__dict__"
