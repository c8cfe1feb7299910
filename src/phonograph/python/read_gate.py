"""Noting what a call reads of objects, by standing in the way of the reads.

Each read of an attribute goes through the `__getattribute__` of the object's class, whoever reads: code, `getattr` with a name
that it has worked out, `str.format`, `copy`, C. So for the time of a call the classes of the objects in question have one that
notes the name. No name is missed, and none is noted that was read of another object.

A dictionary tells nobody what is read of it, nor does a `SimpleNamespace`. But where an attribute holds one, the instructions
after the read of the attribute do (``self.config["clip"]``): then it is that key which was read, and otherwise all of it.

Threads that were there before the call come through the gate as well; what they read is not noted, as they go on beside
replays, too. Reads that do not come through are few: compiled code (`torch.compile`), and `object.__getattribute__` where code
calls it.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from types import CodeType, FrameType, FunctionType, ModuleType, SimpleNamespace
from typing import Protocol
from weakref import WeakKeyDictionary

import torch

from .._torch.autograd import on_thread_of_autograds
from .._torch.dynamic import Thing
from .._torch.dynamo import tells_of_compilation
from .bytecode import asked_of_base, asks_its_base
from .identity import identity
from .introspection import MISSING, own_dict
from .origin import is_torchs
from .standing import ended, fresh_in_children, standing
from .subscripts import TABLES, keys_after

__all__ = ["BY_NAME", "DOORS_FILE", "STATIC", "Reads", "Touching", "behind_gate", "gates", "may_be_gated", "where_heard"]

_HEAP_TYPE, _IMMUTABLE = 1 << 9, 1 << 8  # Py_TPFLAGS_HEAPTYPE, _IMMUTABLETYPE
# By which all attributes of an object are got at.
_ALL = frozenset({"__dict__", "__dir__", "__getattribute__", "__getstate__", "__reduce__", "__reduce_ex__", "__sizeof__"})
# Times that one class is gated: from 3.13 on CPython gives a class 1,000 versions, and looks attributes up slowly after that.
_MOST = 480 if sys.version_info >= (3, 13) else sys.maxsize
gated = WeakKeyDictionary[type, int]()
"""How often each class was."""
_ANY = object()
_NO_TABLES = frozenset(["__dict__", *vars(torch.nn.Module())])  # dictionaries of which all counts anyway
_BY_NAME = frozenset({"__getattr__", "__setattr__", "__delattr__"})  # of torch's modules
_noting = fresh_in_children(threading.Lock())
gates = dict[object, object]()
"""What stands in classes for the time of a call, and what stood there."""
# `warnings` leaves frames out whose file has both words in its name.
DOORS_FILE = os.path.join(os.path.dirname(__file__), "importlib_bootstrap_of_doors.py")
"""The file of the code that stands there, as other code is told."""
BY_NAME = inspect.getattr_static.__code__
"""The code that is asked for one attribute of an object or a class, which it reads past every gate. From Python 3.12 on it is
also for what asks whether something is of a class that is a protocol."""
STATIC: CodeType | None = getattr(getattr(inspect, "_check_instance", None), "__code__", None)
"""The code that reads an attribute of an object for that."""


def behind_gate(member: Thing) -> Thing:
    """What a class has in the place of this while no reads are noted; `MISSING` if nothing. Or, given a class that a module has
    for that time: its class otherwise."""
    while type(member) in (FunctionType, type) and member in gates:  # one may stand before another
        member = gates[member]
    return member


def may_be_gated(kind: Thing) -> bool:
    """Whether reads of attributes of such objects can be noted."""
    if issubclass(kind, (type, ModuleType)) or not _can_be_set(kind):
        return False
    where = where_heard(kind)
    if where is None or gated.get(where, 0) >= _MOST:
        return False
    if issubclass(kind, torch.nn.Module):
        return kind.__setattr__ is torch.nn.Module.__setattr__
    return kind.__module__.partition(".")[0] not in ("torch", "phonograph") and gated.get(kind, 0) < _MOST


def _can_be_set(kind: Thing) -> bool:
    """Whether a class may be given other members."""
    meta: Thing = type(kind)
    return kind.__flags__ & _HEAP_TYPE and not kind.__flags__ & _IMMUTABLE and meta.__setattr__ is type.__setattr__


def where_heard(kind: type) -> type | None:
    """The class in which the gate of such objects stands; None if there is none. Where a class has a `__getattribute__` that
    asks for all attributes by ``super()``, as configurations of transformers have, it is the class that this comes to."""
    first, *others = _asking(kind)
    if first is object:
        return torch.nn.Module if issubclass(kind, torch.nn.Module) else kind
    base = kind.__mro__[kind.__mro__.index(first) + 1]
    known = _asks_its_base(first) and all(_asks_for(other) is not None for other in others[:-1])
    return base if known and base is not object and _can_be_set(base) else None


def _asking(kind: type) -> list[type]:
    """The classes that have a `__getattribute__`, in the order in which they ask each other; the last is `object`."""
    return [base for base in kind.__mro__ if behind_gate(vars(base).get("__getattribute__", MISSING)) is not MISSING]


def _asks_its_base(kind: type) -> bool:
    function = behind_gate(vars(kind)["__getattribute__"])
    return type(function) is FunctionType and asks_its_base(function.__code__)


def _asks_for(kind: type) -> frozenset[str] | None:
    """The names for which a class asks with each attribute, past the gate; None if they are not known."""
    function = behind_gate(vars(kind)["__getattribute__"])
    return asked_of_base(function.__code__) if type(function) is FunctionType else None


def _asked_anyway(kind: type) -> set[str]:
    return set[str]().union(*(_asks_for(other) or () for other in _asking(kind)[1:-1]))


class Touching(Protocol):
    """Is told of reads before whoever reads has anything of them. May raise."""

    def read(self, value: object, frame: FrameType, name: str) -> None:
        """An attribute of this name gave this value."""

    def read_all(self, thing: object, frame: FrameType) -> None:
        """All attributes of an object were asked for."""

    def unheard(self) -> None:
        """From now on it is not told of any."""


class Reads:
    """What is read of these objects, which the caller keeps alive."""

    def __init__(self, objects: Iterable[object], asked_who: Iterable[tuple[int, object]] = ()) -> None:
        """Of some attributes it is asked who has read them: pairs of an object's identity and a name."""
        things = [*objects]
        self._readers: dict[tuple[int, object], dict[int, CodeType]] = {at: {} for at in asked_who}
        self._kinds = {*filter(may_be_gated, {*map(type, things)})}
        anyway = {kind: _asked_anyway(kind) for kind in self._kinds}
        self._names: dict[int, set[str]] = {identity(x): {*anyway[type(x)]} for x in things if type(x) in self._kinds}
        # By the identities of dictionaries, where attributes with them were read: the code, at which instruction, by what name.
        self._read_at: dict[int, dict[tuple[int, int, str], tuple[CodeType, type]]] = defaultdict(dict)
        self.touching: Touching | None = None
        self.untouched = frozenset[int]()
        """The identities of what a call that has come to its end has not touched."""
        self.certain = True
        """Whether nothing has been read past the gate."""
        self._asked = set[str]()
        self._beside = sys._current_frames().keys() - {threading.get_ident()}

    def also(self, things: Iterable[object]) -> None:
        """Note what is read of these as well. (Before any is.)"""
        for thing in things:
            kind = type(thing)
            if kind in self._kinds or may_be_gated(kind):
                self._kinds.add(kind)
                self._names.setdefault(identity(thing), {*_asked_anyway(kind)})

    def names(self, thing: object) -> set[str] | None:
        """The names of the attributes that were read of an object, whether or not it has them; None if it may be any."""
        names = self._names.get(identity(thing))
        return None if names is None or not _ALL.isdisjoint(names) else names

    @property
    def asked(self) -> set[str] | None:
        """The names that `BY_NAME` was asked for, of whatever it was; None if it may have given all attributes."""
        return self._asked if _ALL.isdisjoint(self._asked) else None

    def readers(self, thing: int, name: object) -> list[CodeType] | None:
        """The code that has read an attribute of an object, given by its identity; None if other code may have."""
        names = self._names.get(thing)
        return [*self._readers[thing, name].values()] if names is not None and _ALL.isdisjoint(names) else None

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

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what is read while the block runs."""
        kinds = {where for kind in self._kinds if (where := where_heard(kind)) is not None}
        # One may derive from another. (A module's writes say what they write.)
        setting = [(kind, kind.__setattr__) for kind in self._kinds if not issubclass(kind, torch.nn.Module)]
        locks = list[threading.Lock]()
        put = list[tuple[type, str, Thing]]()

        def begin(kind: type, name: str, gate: Thing) -> None:
            gates[gate] = vars(kind).get(name, MISSING)
            put.append((kind, name, gate))
            type.__setattr__(kind, name, gate)

        def end() -> None:
            while put:
                kind, name, gate = put[-1]
                stood = gates.get(gate, MISSING)
                if vars(kind).get(name) is not gate:
                    pass  # it has not come there, or has gone
                elif stood is MISSING:
                    type.__delattr__(kind, name)
                else:
                    type.__setattr__(kind, name, stood)
                gates.pop(gate, None)  # late: other threads may look at the class
                put.pop()

        def hears_no_more() -> None:
            self.certain = False
            end()
            if self.touching is not None:
                self.touching.unheard()

        def undo() -> None:
            end()
            self.touching = None
            while locks:
                locks.pop().release()

        with standing(undo), ended(tells_of_compilation(hears_no_more)):
            if not _noting.acquire(blocking=False):  # another thread captures
                hears_no_more()
                yield
                return
            locks.append(_noting)
            for kind in kinds:
                begin(kind, "__getattribute__", self._gate(_next(kind)))
            for kind, sets in setting:
                begin(kind, "__setattr__", self._gate_of_writes(sets))
            gated.update({kind: gated.get(kind, 0) + 1 for kind in {*kinds, *(kind for kind, _ in setting)}})
            yield

    def read_past(self, frame: FrameType) -> None:
        """An attribute is about to be read past the gate, for `BY_NAME`. May raise."""
        thing, name = frame.f_locals["obj"], frame.f_locals["attr"]
        self._asked.add(name)
        names = self._names.get(identity(thing))
        if names is None:
            return
        names.add(name)
        self._readers.get((identity(thing), name), {})[identity(frame.f_code)] = frame.f_code
        value = dict.get(own_dict(thing) or {}, name, MISSING)
        if self.touching is not None:
            self.touching.read(value, frame, name)
        if type(value) in TABLES:
            self._read_at[identity(value)][identity(frame.f_code), frame.f_lasti, name] = frame.f_code, type(value)

    def _is_heard(self) -> bool:
        """Whether what runs now is the call, and no thread that was there before it and goes on beside it."""
        return threading.get_ident() not in self._beside or on_thread_of_autograds()

    def _gate(self, get: Thing) -> Thing:
        found, at, module, readers = self._names, self._read_at, torch.nn.Module, self._readers
        touching, is_heard = self.touching, self._is_heard

        def __getattribute__(thing: object, name: str) -> object:  # noqa: N807 - it stands there as that
            names = found.get(identity(thing))
            if names is None or not is_heard():
                return get(thing, name)
            if name not in names:
                by_torch = name == "__dict__" and issubclass(type(thing), module)
                read = _looked_up(_reader()) if by_torch else {name}
                if touching is not None and not _ALL.isdisjoint(read):
                    touching.read_all(thing, _reader())
                names |= read
            if readers and (who := readers.get((identity(thing), name))) is not None:
                code = _reader().f_code
                who[identity(code)] = code
            value = get(thing, name)
            if touching is not None:
                touching.read(value, _reader(), name)
            if type(value) in TABLES and name not in _NO_TABLES:
                frame = _reader()
                at[identity(value)][identity(frame.f_code), frame.f_lasti, name] = frame.f_code, type(value)
            return value

        return __getattribute__

    def _gate_of_writes(self, put: Thing) -> Thing:
        """(What a call sets to what it was before counts as well: a replay does not set it. Which attributes a class's own
        `__setattr__` sets, nobody knows.)"""
        found, plainly, is_heard = self._names, put is object.__setattr__, self._is_heard

        def __setattr__(thing: object, name: str, value: object) -> None:  # noqa: N807
            if (names := found.get(identity(thing))) is not None and is_heard():
                names.add(name if plainly else "__dict__")
            put(thing, name, value)

        return __setattr__


def _next(kind: Thing) -> Thing:
    """What gives an attribute behind the gate in a class."""
    own = vars(kind).get("__getattribute__")
    if own is not None or kind.__getattribute__ is object.__getattribute__:
        return own or object.__getattribute__
    return lambda thing, name: super(kind, thing).__getattribute__(name)


def _reader() -> FrameType:
    """The frame of the code that reads, perhaps through the doors of others."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename == DOORS_FILE and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _looked_up(frame: FrameType) -> set[str]:
    """What code reads of a module of which it has asked for all attributes. Torch's own looks up where a name belongs."""
    by_name = frame.f_code.co_name in _BY_NAME and is_torchs(frame.f_code.co_filename)
    return {frame.f_locals["name"]} if by_name else {"__dict__"}
