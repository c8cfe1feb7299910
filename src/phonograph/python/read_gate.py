"""Noting what a call reads of objects, by standing in the way of the reads.

Each read of an attribute goes through the `__getattribute__` of the object's class, whoever reads: code, `getattr` with a name
that it has worked out, `str.format`, `copy`, C. So for the time of a call the classes of the objects in question have one that
notes the name. It is exact where code is only guessed from: no name is missed, and none is noted that was read of another object.

A dictionary tells nobody what is read of it. But where an attribute holds one, the instructions after the read of the attribute
do (``self.config["clip"]``): then it is that key which was read, and otherwise all of it.

Other threads come through the gate as well; what they read is noted too, which does no harm. Reads that do not come through are
few: compiled code (`torch.compile`), and `object.__getattribute__` where code calls it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType

import torch

from .._torch.dynamic import Thing
from .._torch.dynamo import tells_of_compilation
from .identity import identity
from .origin import is_torchs
from .subscripts import keys_after

__all__ = ["Reads", "may_be_gated"]

_HEAP_TYPE, _IMMUTABLE = 1 << 9, 1 << 8  # Py_TPFLAGS_HEAPTYPE, _IMMUTABLETYPE
_GENERIC: object = object.__getattribute__
# By which all attributes of an object are got at.
_ALL = frozenset({"__dict__", "__dir__", "__getattribute__", "__getstate__", "__reduce__", "__reduce_ex__", "__sizeof__"})
# Times that one class is gated: from 3.13 on CPython gives a class 1,000 versions, and looks attributes up slowly after that.
_MOST = 400 if sys.version_info >= (3, 13) else sys.maxsize
_gated = Counter[type]()


def may_be_gated(kind: type) -> bool:
    """Whether reads of attributes of such objects can be noted."""
    if not kind.__flags__ & _HEAP_TYPE or kind.__flags__ & _IMMUTABLE or kind.__getattribute__ is not _GENERIC:
        return False
    if issubclass(kind, torch.nn.Module):
        return _gated[torch.nn.Module] < _MOST
    return _gated[kind] < _MOST and not issubclass(kind, (type, ModuleType)) and kind.__module__.partition(".")[0] not in ("torch", "phonograph")


class Reads:
    """What is read of these objects, which the caller keeps alive."""

    def __init__(self, objects: Iterable[object]) -> None:
        gated = [x for x in objects if may_be_gated(type(x))]
        self._kinds = {*map(type, gated)}
        self._names: dict[int, set[str]] = {identity(x): set() for x in gated}
        self.tables: dict[int, set[object] | None] = {}
        """The keys that were read of dictionaries which attributes hold, by the identity of these; None for any."""
        self.certain = True
        """Whether nothing has been read past the gate."""

    def names(self, thing: object) -> set[str] | None:
        """The names of the attributes that were read of an object, whether or not it has them; None if it may be any."""
        names = self._names.get(identity(thing))
        return None if names is None or not _ALL.isdisjoint(names) else names

    def knows(self, kind: type) -> bool:
        """Whether reads of such objects were noted."""
        return kind in self._kinds

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what is read while the block runs."""
        modules = {kind for kind in self._kinds if issubclass(kind, torch.nn.Module)}
        kinds = [*(self._kinds - modules), *([torch.nn.Module] if modules else [])]  # which they have it from
        open_ = list[Thing]()
        gate = self._gate(_GENERIC)

        def end() -> None:
            while open_:
                type.__delattr__(open_.pop(), "__getattribute__")

        def compiles() -> None:
            self.certain = False
            end()

        with tells_of_compilation(compiles):
            try:
                for kind in kinds:
                    type.__setattr__(kind, "__getattribute__", gate)
                    open_.append(kind)
                _gated.update(kinds)
                yield
            finally:
                end()

    def _gate(self, get: Thing) -> Callable[[object, str], object]:
        found, module = self._names, torch.nn.Module

        def __getattribute__(thing: object, name: str) -> object:
            names = found.get(identity(thing))
            if names is None:
                return get(thing, name)
            if name not in names and not (
                name == "__dict__" and issubclass(type(thing), module) and is_torchs(sys._getframe(1).f_code.co_filename)
            ):
                names.add(name)
            value = get(thing, name)
            if type(value) is dict and name != "__dict__":
                self._used(value, sys._getframe(1))
            return value

        return __getattribute__

    def _used(self, table: Thing, frame: Thing) -> None:
        known = self.tables.setdefault(identity(table), set())
        if known is None:
            return
        after = keys_after(frame.f_code)
        if frame.f_lasti in after:
            known.add(after[frame.f_lasti])
        else:
            self.tables[identity(table)] = None
