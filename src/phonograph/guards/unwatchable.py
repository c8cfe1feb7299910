"""Objects whose state nobody can compare, or put back: iterators, open files, arrays that are large or hold objects.

A recorded function may have them in reach, and must not touch them. Whether it does, a capture hears: where it reads attributes
(`Reads`), and where it loads variables (`Load`). There it is refused, before anything has happened to them. What cannot be
heard, the way to a thing through a container, a partial function or an object of torch's, counts as the thing itself.
"""

from __future__ import annotations

import gc
import io
import re
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from types import CodeType, FrameType, FunctionType, ModuleType, SimpleNamespace
from typing import NamedTuple

import torch

from .._torch.dynamic import Table, Thing
from .._torch.dynamo import ran_compiled
from ..errors import Refusal
from ..python.bytecode import all_within, looks_around, used_in, words_in
from ..python.executed_code import REFLECTS
from ..python.identity import identity
from ..python.introspection import MISSING, contents, own_dict
from ..python.origin import is_users
from ..python.read_gate import Reads, behind_gate
from ..python.subscripts import ALL_VARIABLES, TABLES, keys_after
from ..python.variable_loads import ATTRIBUTE, CELL, GLOBAL, Load, loads_in

__all__ = ["ARRAY", "CROWD", "FILE", "ITERATOR", "NETWORK", "Found", "Untouched", "Unwatchable", "in_trainer"]

NETWORK = "a LightningModule refers to its trainer: call pg.record on the network in it"
_ANY = object()
_PLAIN = (tuple, list, dict, set, frozenset, deque, OrderedDict, defaultdict)
_BY_TEXT = frozenset({"getattr", "attrgetter", "methodcaller", "itemgetter", "__dict__", "vars"})


ITERATOR, FILE, ARRAY, CROWD = "an iterator", "a file", "an array", "too much"


class Unwatchable(NamedTuple):
    """One of them, where it was found, and what it is."""

    path: str
    thing: object
    kind: str

    @property
    def name(self) -> str:
        """The last word of its path."""
        return re.split(r"\W+", self.path.rstrip("'\"])"))[-1]

    def refusal(self, where: str) -> Refusal:
        path = self.path
        if self.kind is FILE:
            return Refusal(f"uses an open file ({path})",
                           "read and write it outside, or mark the part that does @pg.live", where)  # fmt: skip
        if self.kind is ARRAY:
            return Refusal(f"uses an array ({path}), which can change without notice",
                           "pass it as a tensor, or let nobody write it: array.setflags(write=False)", where)  # fmt: skip
        if self.kind is CROWD:
            less = "let it refer to less, or pass what it needs as arguments"
            return Refusal("can reach more than can be watched", NETWORK if "._trainer." in path else less, where)
        outside = "take the next item outside and pass it as an argument; advance a progress bar outside"
        return Refusal(f"uses an iterator ({path})", NETWORK if "._trainer." in path else outside, where)

    @staticmethod
    def iterating(path: str, thing: object) -> Unwatchable:
        return Unwatchable(path, thing, FILE if issubclass(type(thing), io.IOBase) else ITERATOR)


def in_trainer(modules: Iterable[torch.nn.Module]) -> bool:
    """Whether one of these is a LightningModule with a trainer, by which a function can reach all that the trainer has."""
    return any(vars(m).get("_trainer") is not None for m in modules)


class Found(NamedTuple):
    """Of a walk: what it has met, by which ways code gets at it, and what of that is unwatchable."""

    unwatchable: list[Unwatchable]
    met: list[object]
    roots: Iterable[object]
    classes: Iterable[type]
    spaces: Iterable[Table]
    modules: Iterable[Table]
    modules_flow: bool


class Untouched:
    """What a call must not touch. (False if there is nothing.)"""

    def __init__(self, found: Found, reads: Reads | None) -> None:
        self._leads = {identity(one.thing): one for one in found.unwatchable}
        self._holders: dict[int, Unwatchable] = {}  # by the identities of objects whose attributes are heard: what these hold
        self.unavoidable: Unwatchable | None = None
        """What may be touched without being heard."""
        self._ways: set[int] = set()  # the identities of what is found in a variable, or in something else
        self._cells = defaultdict[int, dict[str, list[object]]](dict)  # by code and name: what leads there in one
        self._tables: set[int] = set()  # the identities of dictionaries that lead to them, of which one item may be read
        self._defaults: dict[int, Unwatchable] = {}  # by the code that is called with them
        self._globals: dict[str, Unwatchable] = {}
        self._of_modules: dict[str, Unwatchable] = {}
        self._attributes: dict[str, Unwatchable] = {}  # of classes, and of modules that may be anything that has no name
        if self._leads:
            self._spread(found.met, reads)
            self._variables(found)
            self.unavoidable = self._beyond_hearing(found) if reads is not None else found.unwatchable[0]
        self._named = {*self._globals, *self._attributes, *self._of_modules}

    def __bool__(self) -> bool:
        return bool(self._leads)

    # -- what leads to it

    def _spread(self, met: list[object], reads: Reads | None) -> None:
        """What leads to them and is not heard counts as they do."""
        above, known = defaultdict[int, list[object]](list), {*map(identity, met)}
        for thing in met:
            inner = [*_within(thing)]
            while inner:
                one = inner.pop()
                above[identity(one)].append(thing)
                if type(one) in _PLAIN and identity(one) not in known:  # the arguments of a partial function, say
                    inner += gc.get_referents(one)
        work = [*self._leads]
        while work:
            key = work.pop()
            for outer in above[key]:
                self._ways.add(key)
                if _is_heard(outer, reads):
                    self._holders.setdefault(identity(outer), self._leads[key])
                elif identity(outer) not in self._leads:
                    self._leads[identity(outer)] = self._leads[key]
                    self._tables |= {identity(outer)} if type(outer) in TABLES else set()
                    work.append(identity(outer))

    def _variables(self, found: Found) -> None:
        leads = self._leading
        for f in found.met:
            if type(f) is FunctionType:
                self._cells_of(f)
                defaults = leads(enumerate((*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values())))
                self._defaults |= dict.fromkeys([identity(f.__code__)] if defaults else [], next(iter(defaults.values()), None))  # type: ignore[arg-type]
        for space in found.spaces:
            self._globals |= leads(space.items())
        for space in found.modules:
            self._of_modules |= leads(space.items())
        for kind in found.classes:
            self._attributes |= leads((n, behind_gate(v)) for n, v in vars(kind).items())
        if found.modules_flow:
            self._attributes |= self._of_modules

    def _cells_of(self, f: FunctionType) -> None:
        cells = zip(f.__code__.co_freevars, map(contents, f.__closure__ or ()), strict=True)
        found = [(name, value) for name, value in cells if self._leads_on(value)]
        self._ways.update(identity(value) for _, value in found)
        for code in all_within(f.__code__) if found else ():
            for name in code.co_freevars:
                self._cells[identity(code)].setdefault(name, []).extend(v for n, v in found if n == name)

    def _leads_on(self, value: object) -> bool:
        return identity(value) in self._leads

    def _leading(self, items: Iterable[tuple[Thing, object]]) -> dict[Thing, Unwatchable]:
        found = [(name, identity(value)) for name, value in [*items] if self._leads_on(value)]
        self._ways.update(key for _, key in found)
        return {name: self._leads[key] for name, key in found}

    def _beyond_hearing(self, found: Found) -> Unwatchable | None:
        """What no capture would hear of: a root, what torch's modules and tensors lead to (torch looks these up), and what was
        found in a way that is not known here."""
        inner = [d for m in found.met if issubclass(type(m), torch.nn.Module) for d in _looked_up(m)]
        tensors = [t for t in found.met if issubclass(type(t), torch.Tensor)]
        lost = [one for key, one in self._leads.items() if key not in self._ways]
        return next(iter([*lost, *self._leading(enumerate([*found.roots, *inner, *tensors])).values()]), None)

    # -- what is heard

    def read(self, value: object, frame: FrameType, name: str) -> Unwatchable | None:
        """An attribute with this value was read."""
        if not self._leads_on(value):
            return None
        load = loads_in(frame.f_code).get(frame.f_lasti)
        compared = load is not None and load.kind is ATTRIBUTE and load.name == name and load.compared
        return None if compared else self._of(value, frame.f_code, frame.f_lasti, name)

    def held_by(self, thing: object) -> Unwatchable | None:
        """All attributes of an object were read."""
        return self._holders.get(identity(thing))

    def _of(self, value: Thing, code: CodeType, at: int, name: str) -> Unwatchable | None:
        """What a value leads to; of a table, if one item is read there, this."""
        one = self._leads.get(identity(value))
        if one is None or type(value) not in TABLES:
            return one
        key = keys_after(code, type(value)).get((at, name), _ANY)
        table = own_dict(value) if type(value) is SimpleNamespace else value
        return one if key is _ANY or table is None else self._leads.get(identity(dict.get(table, key, MISSING)))

    @property
    def whole(self) -> frozenset[int]:
        """The identities of what can only be touched as a whole."""
        return frozenset(key for key, one in self._leads.items() if key not in self._tables)

    def loads(self, code: CodeType) -> Mapping[int, Load] | None:
        """The loads of code by which it may come to them; None if there is none."""
        named = not self._named.isdisjoint(code.co_names)
        return loads_in(code) if named or identity(code) in self._cells else None

    def loaded(self, frame: FrameType, load: Load) -> Unwatchable | None:
        """An instruction of this frame loads a variable."""
        if load.compared:
            return None
        if load.kind is CELL:
            values = self._cells.get(identity(frame.f_code), {}).get(load.name, ())
            return next((one for v in values if (one := self._of(v, frame.f_code, load.at, load.name)) is not None), None)
        if load.kind is GLOBAL:
            return self._of(frame.f_globals.get(load.name), frame.f_code, load.at, load.name)
        of = _loaded_from(frame, load.of)
        if issubclass(type(of), ModuleType):
            return self._leads.get(identity(_loaded_from(frame, load)))
        is_object = of is not MISSING and not issubclass(type(of), type)  # where reads are heard
        return None if is_object else self._attributes.get(load.name)

    def started(self, frame: FrameType, *, heard: bool) -> Unwatchable | None:
        """What a function may touch that starts in this frame, whose instructions may be `heard`."""
        code = frame.f_code
        if identity(code) in self._defaults or ("_dynamo" in code.co_filename and ran_compiled([code])):
            return self._defaults.get(identity(code)) or next(iter(self._leads.values()))
        if not heard and self.loads(code) is not None:
            return next((one for load in loads_in(code).values() if (one := self.loaded(frame, load)) is not None), None)
        return self._around(code) if is_users(code.co_filename) else None

    def _around(self, code: CodeType) -> Unwatchable | None:
        """What code may get at by names that do not stand in it, or by texts."""
        named, used = {*code.co_names}, used_in(code)
        found = dict[str, Unwatchable]()
        if looks_around(code) or (not _BY_TEXT.isdisjoint(named) and not words_in(code).isdisjoint(self._named)):
            found |= self._attributes | self._of_modules
        if used.spaces or used.computes or not used.asked.isdisjoint(self._globals):
            found |= self._globals
        if not ALL_VARIABLES.isdisjoint(named):
            values = self._cells.get(identity(code), {}).values()
            found |= self._globals | self._leading(("", v) for some in values for v in some)
        if not REFLECTS.isdisjoint(named):
            return next(iter(self._leads.values()))
        return next(iter(found.values()), None)


def _is_heard(thing: object, reads: Reads | None) -> bool:
    """Whether reads of its attributes are heard, or loads of what it has."""
    if issubclass(type(thing), (type, ModuleType)):
        return True
    return reads is not None and type(thing) is not SimpleNamespace and reads.names(thing) is not None


def _looked_up(module: Thing) -> Iterator[object]:
    own = module.__dict__
    return (own[name] for name in ("_modules", "_parameters", "_buffers") if name in own)


def _loaded_from(frame: FrameType, load: Load | None) -> object:
    """What an instruction loads from the globals of a frame, or from a module in them; `MISSING` if that is not known."""
    if load is None or load.kind is CELL:
        return MISSING
    if load.kind is GLOBAL:
        return frame.f_globals.get(load.name, MISSING)
    of = _loaded_from(frame, load.of)
    return (own_dict(of) or {}).get(load.name, MISSING) if issubclass(type(of), ModuleType) else MISSING


def _within(thing: Thing) -> Iterator[object]:
    """What something leads to, if it is not heard how."""
    kind = type(thing)
    if issubclass(kind, (type, ModuleType)):
        return
    if issubclass(kind, (FunctionType, torch.Tensor)):
        yield from thing.__dict__.values()
    if issubclass(kind, FunctionType):  # its variables are heard where it runs
        return
    if issubclass(kind, torch.Tensor):
        for hooks in (thing._backward_hooks, getattr(thing, "_post_accumulate_grad_hooks", None)):
            yield from (hooks or {}).values()
        return
    if issubclass(kind, weakref.ref):
        yield thing()
    elif issubclass(kind, weakref.ProxyTypes):
        yield thing.__init__.__self__
        return
    elif issubclass(kind, ContextVar):
        yield thing.get(None)
    yield from gc.get_referents(thing)
    yield from (own_dict(thing) or {}).values()
