"""What a call has read: one table of places and of what was there, written by the gate.

What can change by itself is held with all that is in it when it is read as a value: a container, a class, a function, a tensor.
Of objects and of modules the gate hears what is read, so nothing else of them counts. Where reads go past the gate (compiled
code, ``object.__getattribute__``), objects are held as a whole.

A place that the call writes before it reads it is noted as well, though nothing relies on it: the same table undoes the call.

What the call itself makes is nobody's to change later, and must be gone when the program thinks that it is. So an object that
no place leads to is referred to weakly; if it is there after the call, the call has it from somewhere else.
"""

from __future__ import annotations

import builtins
import sys
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from inspect import CO_OPTIMIZED
from itertools import chain
from types import CodeType, FrameType, FunctionType, GetSetDescriptorType, ModuleType, WrapperDescriptorType
from typing import NamedTuple

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.nn import Module

from .._torch.dynamic import Reading, Table, Thing
from .._torch.dynamo import names_graph
from .._torch.operators import OpOverload, OpOverloadPacket
from ..call.live_function import is_marked
from ..python.bytecode import asks_its_base, has_instruction, matches, used_in
from ..python.code_cache import of_code
from ..python.identity import identity
from ..python.introspection import MISSING, functions_of, functions_with, own_dict, tells_its_end
from ..python.read_gate import behind_gate
from ..python.variable_loads import globals_of
from . import values
from .gate import ALL, DOORS, PAST, Gate, before_doors
from .place import (
    CONSTANTS,
    UNREAD,
    Place,
    Read,
    alike,
    all_of_space,
    attribute,
    cell,
    imported,
    in_class,
    klass,
    member,
    module_of,
    mro_of,
    of_class_alone,
    registered,
    subclasses,
    tensor,
    variable,
    vars_of,
    what_stays,
)
from .whose import OURS, PACKAGE, STDLIB, TORCH, USER, is_apart, name_of, whose, whose_class, whose_module, worth_hearing

__all__ = ["ReadSet"]

_REFLECTS = frozenset({"globals", "f_globals", "__globals__", "__builtins__"})
_CELLS = frozenset({"__closure__", "cell_contents"})
_UNCHANGING = CONSTANTS | {OpOverload, OpOverloadPacket}  # objects that nobody changes
_LIE_WITHIN = values.PURE | CONSTANTS  # objects that are nothing but a part of what has them
_WITHIN = ("_parameters", "_buffers", "_modules")  # of a module, whose class looks there for its attributes
_WAYS = _REFLECTS | _CELLS | {"__annotations__", "__subclasses__"}
_IN_BULK = frozenset({"<optimizer>", "<cache>", "<code>"})
_ASKS = frozenset({"isinstance", "issubclass", "get_cache_token"})
_IMPORTS = frozenset({"_find_and_load", "_gcd_import"})


class _Stray(NamedTuple):
    """An object to which no place leads, the names of what was read of it, and whether the call has made it."""

    ref: weakref.ref[Thing]
    names: set[str]
    made: bool


class Members(NamedTuple):
    """What a class had itself when it was first met, and the names by which that counts; None for all that code names."""

    kind: Thing
    before: dict[str, object]
    names: set[str] | None


class ReadSet:
    """The table of one call. `note` it, and then ask what has `changed`."""

    def __init__(self, apart: Iterable[Thing] = (), *, hears_starts: bool = True) -> None:
        """What is `apart` somebody else looks after, with all that it holds, and all tensors: of that only its classes count
        here, and what is reached through it. Somebody else may tell of starts (see `Gate`)."""
        self._apart = {identity(thing): thing for thing in apart}
        self._of_kinds: defaultdict[type, list[Thing]] = defaultdict(list)  # what is apart, by its class
        self.stand_ins = set[int]()
        """The identities of objects that stand in for others during the call: what holds for what is apart holds for them."""
        self._hears_starts = hears_starts
        self.reads: dict[tuple[int, object], Read | None] = {}
        self.refused = list[str]()
        """What was read that cannot be compared, or put back: iterators."""
        self.unheard = ""
        """Why something may have been read that was not heard; "" if all was."""
        self.written = list[Place]()
        """Where the call has left something else than was there before."""
        self.before = list[Read]()
        """What was there, but for tensors."""
        self.set_by_users = set[tuple[int, str]]()
        """Attributes that the user's code has set, by the identities of what has them and their names."""
        self.users_names = set[str]()
        """Names and texts in the user's code that has run."""
        self.names = set[str]()
        """Those in that of packages as well, and names that were worked out."""
        self.classes = dict[int, Members]()
        """Classes, by identity, where somebody else looks after others."""
        self._torchs = dict[int, list[set[str]]]()  # by class, the names that count of torch's classes from which it derives
        self._unnamed: defaultdict[str, list[object]] = defaultdict(list)  # what classes have by names that no code has named
        self._silent = dict[type, None]()  # classes of which all is read, and that are not held whole
        self._whole = False
        self._replaced = list[object]()
        self._kept = list[object]()
        self._paths = dict.fromkeys(self._apart, "")  # of what places lead to
        self._strays = dict[int, _Stray]()
        self._ways = set[str]()  # of reflection, that code names
        self._functions: defaultdict[int, list[FunctionType]] = defaultdict(list)
        self._started, self._within = set[int](), set[int]()  # code that has run, and code of functions made by it
        self._abstract = False  # whether an abstract class was read
        self._asks_kinds = False  # whether code, and not for us or for torch, may ask of which class something is
        self._opened = dict[int, tuple[type, bool]]()  # by identity, classes, and whether reads of their objects are heard
        self._looked_at = set[tuple[int, bool]]()  # classes, by identity, and whether as a whole
        self._bodies = set[tuple[object, str]]()  # of classes, that have run: in which module, and by which name
        self._work, self._works = deque[tuple[object, str]](), False
        self._gate: Gate

    @contextmanager
    def noting(self, *roots: object) -> Iterator[ReadSet]:
        """Note what is read while the block runs, at first of the `roots`: the function that is called, say."""
        self._gate = Gate(self, self.reads, hears_starts=self._hears_starts)
        try:
            with self._gate.standing():
                self._gate.pausing(lambda: self._begin(roots))
                yield self
            self._settle()
        except BaseException:
            self.before.extend(read for read in self.reads.values() if read is not None and _has_plainly_changed(read))
            raise
        finally:
            self._forget_the_way()

    def _forget_the_way(self) -> None:
        """Nothing that the call has made may be kept by a circle: strays and doors lead back here."""
        self._strays.clear()
        self._gate.forget()
        del self._gate
        known, self.reads = self.reads, {**self.reads}
        known.clear()
        if self._apart:
            self._kept.clear()

    def started(self, frame: FrameType) -> None:
        """A function starts, as somebody else has heard."""
        self._gate.started(frame)

    def goes_with(self, profile: object, aside: Callable[[], bool]) -> None:
        """This function tells of starts. What runs is not the call's while it is `aside`."""
        self._gate.goes_with(profile, aside)

    def _begin(self, roots: tuple[object, ...]) -> None:
        self._gate.open_modules(worth_hearing())
        for thing in self._apart.values():
            if type(thing) is FunctionType:
                self._functions[identity(thing.__code__)].append(thing)
        for thing in self._apart.values():
            self._of_kinds[type(thing)].append(thing)
        for kind, things in self._of_kinds.items():
            self._class(kind, whole=False)
            if Module in mro_of(kind):
                self._of_class(kind, "forward")
            if self._open(kind):
                self._leads_nowhere(kind, things)
        for root in roots:
            self.value(root, name_of(root))

    def _leads_nowhere(self, kind: type, things: list[Thing]) -> None:
        """Of these objects, which are apart, nobody need tell of attributes of which the class has nothing, and which lead to
        what is apart as well. Nor of the dictionary itself."""
        of_class = {name for base in mro_of(kind) for name in vars_of(base)}
        always = ["__dict__"] if type(in_class(kind, "__dict__")) is GetSetDescriptorType else []
        for thing in things:
            own, key = own_dict(thing) or {}, identity(thing)
            names = [n for n, v in dict.items(own) if type(v) in _LIE_WITHIN or identity(v) in self._apart]
            if Module in mro_of(kind):
                names += [n for within in _WITHIN for n in own.get(within) or ()]
            self.reads.update(dict.fromkeys([(key, n) for n in (*names, *always) if n not in of_class or n in always]))

    # -- the table

    def note(self, place: Place, *, relied: bool = True) -> None:
        """Note what is in a place, and hold what can change by itself."""
        key = identity(place.of), place.name
        if key in self.reads:
            return
        self.reads[key] = None  # what it holds may lead back to it
        read = self.reads[key] = Read(place, place.get(), relied)
        self._kept.append(place.of)
        if relied and not names_graph(place.name):  # (what a backend has made stays as it is)
            self._hold(read)

    def _hold(self, read: Read) -> None:
        for table in read.place.holds() if read.place.holds is not None else ():
            self._known(table, read.place.path)
        known, path = self._paths, read.place.path
        self._work.extend((v, path) for v in read.value if type(v) not in CONSTANTS and identity(v) not in known)
        self._drain()

    def value(self, value: object, path: str) -> None:
        """This has been read as a value."""
        self._work.append((value, path))
        self._drain()

    def _drain(self) -> None:
        if self._works:
            return
        self._works = True
        try:
            while self._work:
                self._enter(*self._work.popleft())
        finally:
            self._works = False

    def changed(self) -> list[Read]:
        """What relied on places that now hold something else."""
        return [read for read in self.reads.values() if read is not None and read.relied and read.changed]

    def restore(self) -> None:
        """Put everything back that is not what it was, the latest place first."""
        for read in reversed(self.reads.values()):
            if read is not None and read.place.put is not None and read.changed:
                read.place.put(read.value)

    def explain(self) -> list[str]:
        """What the call relies on, a line each."""
        relied = [read for read in self.reads.values() if read is not None and read.relied]
        return [f"{read.place.path} = {_shown(read.value)}" for read in relied]

    def _settle(self) -> None:
        """The call has ended: what it has left is what the next one finds."""
        for stray in [*self._strays.values()]:
            if not stray.made and (thing := stray.ref()) is not None:
                self._known(thing, type(thing).__name__)
                for name in stray.names:
                    self._of_object(thing, name)
        self._named_of_classes()
        if self._abstract and self._asks_kinds:
            self.note(registered())
        for key, read in [*self.reads.items()]:
            if read is not None:
                self._left(key, read, read.place.get())

        self._forget_what_was_replaced()

    def _named_of_classes(self) -> None:
        """Of classes of torch's and of Python's own, of which much may change and does not count, the plain values that code
        names."""
        for kind in self._silent:
            for name in self.names & vars_of(kind).keys():
                if type(vars_of(kind)[name]) in CONSTANTS and not name.startswith("__"):
                    self._of_class(kind, name)

    def _left(self, key: tuple[int, object], read: Read, now: Reading) -> None:
        """What the call writes is no constant; and what it sets to what it was, a replay does not set."""
        if not alike(read.value, now):
            self.written.append(read.place)
            tensors = _tensors_in(read)
            self._replaced.extend(tensors)
            self.before.extend([read] if not tensors else [])
            self.reads[key] = read._replace(value=(), relied=False)
            if read.relied:
                self._hold_what_stays(key, read, now)
        elif not read.relied:
            self.reads[key] = read._replace(relied=True)

    def _hold_what_stays(self, key: tuple[int, object], read: Read, now: Reading) -> None:
        """Of an optimizer all counts as it is now, of a container, a layer or a class what the call has not written."""
        if key[1] in _IN_BULK:
            self.reads[key] = read._replace(value=now)
        elif key[1] in ("<items>", "<layer>"):
            for one in what_stays(read, now):
                self.reads.setdefault((identity(one.place.of), one.place.name), one)
        elif key[1] in ("<class>", "<methods>"):
            kind: Thing = read.place.of
            for name, value in zip(now[2::2], now[3::2], strict=True):
                if any(value is v for n, v in zip(read.value[2::2], read.value[3::2], strict=True) if n == name):
                    self.note(of_class_alone(kind, name, f"{read.place.path}.{name}"))

    def _forget_what_was_replaced(self) -> None:
        """The tensors that a call has put others in the place of are not kept: state that it carries, with its graph."""
        relied = {identity(v) for read in self.reads.values() if read is not None and read.relied for v in read.value}
        gone = {identity(v) for v in self._replaced} - relied
        self._replaced.clear()
        self._kept = [thing for thing in self._kept if identity(thing) not in gone]
        for key in [key for key in self.reads if key[0] in gone]:
            del self.reads[key]

    # -- values

    def _enter(self, v: Thing, path: str) -> None:
        kind, key = type(v), identity(v)
        if kind in CONSTANTS or key in self._paths:
            return
        self._paths[key] = path
        self._kept.append(v)
        if kind is WrapperDescriptorType and v.__name__ in PAST:
            self._hold_whole()
        elif Tensor in mro_of(kind):
            if not self._apart:  # else tensors are looked after as well, wherever they are
                self.note(tensor(v, path))
        elif type in mro_of(kind):
            self._class(v, whole=True)
        elif kind is FunctionType:
            self._function(v, path)
        elif ModuleType in mro_of(kind):
            if whose_module(v) != OURS:
                self._gate.opens_module(v)
        else:
            self._other(v, kind, path)

    def _other(self, v: Thing, kind: type, path: str) -> None:
        leads = values.leads_to(v, kind)
        if leads is not None:
            self._work.extend((inner, path) for inner in leads)
            if kind in values.PURE or not issubclass(kind, (tuple, frozenset)):
                return
        if values.is_iterator(kind):
            self.refused.append(f"an iterator ({kind.__name__}) at {path}")
            return
        for place in values.places_of(v, kind, path):
            self.note(place)
        if values.is_compiled(v):
            self._hold_whole()
        if kind in values.PURE:
            return
        if not values.is_held_in_bulk(kind) and (not self._open(kind) or self._whole) and not is_apart(kind):
            self.value(own_dict(v), path)
        self._class(kind, whole=False)

    def _class(self, kind: type, *, whole: bool) -> None:
        if whole:
            self._open_if_made(kind)
        else:
            self._open(kind)
        if (identity(kind), whole) in self._looked_at:
            return
        self._looked_at.add((identity(kind), whole))
        self._kept.append(kind)
        for base in chain(mro_of(kind), mro_of(type(kind)) if whole else ()):
            if whose_class(base) in (TORCH, STDLIB, OURS):
                self._silent.update({base: None} if whole else {})
            elif self._apart:
                self._members(base)
            else:
                self.note(klass(base, base.__qualname__, whole=whole))
        self._abstract = self._abstract or (whole and "_abc_impl" in vars_of(kind))
        if whole and "__subclasses__" in self._ways:
            self._below(kind)

    def _below(self, kind: type) -> None:
        if whose_class(kind) not in (TORCH, STDLIB, OURS):
            self.note(subclasses(kind, kind.__qualname__))

    def _members(self, kind: Thing, *, few: bool = False) -> Members:
        """A class, of which counts what code names; or of which only a `few` names count."""
        key = identity(kind)
        known = self.classes.get(key)
        if known is None:
            own = {} if few else {n: v for n, v in vars_of(kind).items() if n not in UNREAD}
            known = self.classes[key] = Members(kind, own, set() if few else None)
            self._kept.append(kind)
            for n, v in own.items():
                if type(v) in CONSTANTS:
                    continue
                if n in self.names:
                    self._work.append((v, f"{kind.__qualname__}.{n}"))
                else:
                    self._unnamed[n].append(v)
        return known

    def _of_class(self, kind: Thing, name: str) -> None:
        """This is read of objects of a class, or of it itself."""
        if not self._apart:
            self.note(of_class_alone(kind, name, f"{kind.__qualname__}.{name}"))
            return
        key = identity(kind)
        if key not in self._torchs:
            bases = [(base, whose_class(base)) for base in mro_of(kind)]
            self._torchs[key] = [
                names for base, by in bases if by == TORCH and (names := self._members(base, few=True).names) is not None
            ]
            for base, by in bases:
                if by in (USER, PACKAGE):
                    self._members(base)
        for names in self._torchs[key]:
            names.add(name)
        self._named({name})

    def _named(self, names: Set[str]) -> None:
        """Code names these."""
        self.names |= names
        for name in names & self._unnamed.keys():
            self._work.extend((v, name) for v in self._unnamed.pop(name))
        self._drain()

    def _open_if_made(self, kind: type) -> None:
        """Hear of objects of a class of which none was met, unless the call may be making it: who makes it asks what it has."""
        if (module_of(kind), kind.__name__) not in self._bodies:
            self._open(kind)

    def _function(self, f: FunctionType, path: str) -> None:
        if is_marked(f):
            return  # what it reads is its own business
        key = identity(f.__code__)
        if f not in self._functions[key]:
            self._functions[key].append(f)
        if whose(f.__code__.co_filename) not in (TORCH, STDLIB, OURS) and (key in self._started or not self._apart):
            self.note(values.code_of(f, f.__qualname__))
        if key in self._started or not self._ways.isdisjoint(_CELLS):
            self._variables(f)
        theirs = bool(self._apart) or whose(f.__code__.co_filename) in (TORCH, STDLIB, OURS)
        if not self._ways.isdisjoint(_REFLECTS) and not theirs:
            self.note(all_of_space(f.__globals__, "globals()"))
        if "__annotations__" in self._ways:
            self.value(f.__annotations__, f"{f.__qualname__}.__annotations__")
        compiled = f.__dict__.get("_torchdynamo_orig_callable")
        if compiled is not None and "_torchdynamo_disable" not in f.__dict__:
            self._hold_whole()
        for inner in [*f.__dict__.values()]:
            self.value(inner, path)
        if compiled is not None and type(compiled) is FunctionType:
            self._variables(compiled)

    def _hold_whole(self) -> None:
        """From now on all attributes of objects count, and so do those of all that is known."""
        if not self._whole:
            self._whole = True
            known = set(self._paths)
            for thing in [*self._kept]:
                if ModuleType in mro_of(type(thing)):
                    continue
                if identity(thing) in known and type(thing) not in CONSTANTS and self._open(type(thing)):
                    self.value(own_dict(thing), self._paths[identity(thing)])

    # -- what the gate hears

    def has_read(self, thing: Thing, name: str, frame: FrameType | None) -> None:
        by, kind = USER if frame is None else whose(frame.f_code.co_filename), type(thing)
        of_module = ModuleType in mro_of(kind)
        if of_module and by in (TORCH, OURS) and frame is not None:
            self._gate.deaf[identity(frame.f_code)] = frame.f_code
        if name == "__class__" or by == OURS or (by == STDLIB and _for_whom(frame) == OURS):
            return
        if of_module:
            self._of_module(thing, name, by)
        elif not (by == TORCH and name == "__dict__") and (by not in (TORCH, STDLIB) or not is_apart(kind)):
            self._of_object(thing, name)
        elif identity(thing) in self._apart and in_class(kind, name) is MISSING:
            self._of_apart(thing, name)  # of its class there is nothing that others could read

    def _of_module(self, module: Thing, name: str, by: str) -> None:
        space = own_dict(module) or {}
        path = str(space.get("__name__"))
        if name == "__spec__":  # it is imported
            self.note(imported(path))
        if by == TORCH or (by == STDLIB and name.startswith("__")):
            return
        if name in ALL:
            self._paths.setdefault(identity(module), path)
            self.note(all_of_space(space, path))
        elif name not in ("__name__", "__spec__"):
            self._known(module, path)
            self.note(member(module, name, f"{path}.{name}"))

    def _known(self, thing: object, path: str) -> None:
        if identity(thing) not in self._paths:
            self._paths[identity(thing)] = path
            self._kept.append(thing)

    def _of_object(self, thing: Thing, name: str, *, relied: bool = True) -> None:
        """An attribute is read, or written if it is not relied on."""
        key = identity(thing)
        if key in self._apart or key in self.stand_ins:
            self._of_apart(thing, name)
            return
        if values.is_held_in_bulk(type(thing)):
            return
        if key not in self._paths:
            self._stray(thing, name)
            return
        if name in ALL or self._whole:
            self.value(own_dict(thing), self._paths[key])
        if name not in DOORS:
            if self._apart:
                self._of_class(type(thing), name)
            self.note(attribute(thing, name, f"{self._paths[key]}.{name}"), relied=relied)

    def _of_apart(self, thing: Thing, name: str) -> None:
        """Of an object that somebody else looks after: what its class has from others, and where the attribute leads."""
        self.reads[identity(thing), name] = None
        kind = type(thing)
        owner = next((base for base in mro_of(kind) if name in vars_of(base)), None)
        if owner is not None and name not in DOORS and whose_class(owner) not in (USER, STDLIB, OURS):
            self._of_class(kind, name)
        value = dict.get(own_dict(thing) or {}, name, MISSING)
        if value is MISSING:  # so it is for all that have it of the class
            alike = [identity(x) for x in self._of_kinds[kind] if name not in (own_dict(x) or ())] if owner is not None else []
            self.reads.update(dict.fromkeys([(key, name) for key in alike]))
            return
        stray = self._strays.get(identity(value))
        own = type(value) in _LIE_WITHIN or (stray is not None and stray.made)
        if not own and identity(value) not in self._paths:
            self.value(value, f"{kind.__name__}.{name}")

    def _stray(self, thing: Thing, name: str) -> None:
        """No place leads to this object: the call has made it, or has it in a way that nobody hears of."""
        key, kind = identity(thing), type(thing)
        found = dict.get(own_dict(thing) or {}, name, MISSING)
        if found is MISSING and whose_class(kind) not in (TORCH, STDLIB, OURS) and name not in DOORS:
            self._of_class(kind, name)
        self._open(type(found))
        if (stray := self._met(thing, key, made=False)) is not None:
            stray.names.add(name)

    def _met(self, thing: Thing, key: int, *, made: bool) -> _Stray | None:
        """(What a `ctx` of autograd's has, is looked after by who captures the backward.)"""
        if key not in self._strays and tells_its_end(type(thing)) and BackwardCFunction not in mro_of(type(thing)):
            self._strays[key] = _Stray(weakref.ref(thing, lambda _: self._strays.pop(key, None)), set(), made)
        return self._strays.get(key)

    def _open(self, kind: type) -> bool:
        """Whether what is read of objects of this class is heard from now on. (Of what is held in bulk nothing need be.)"""
        key = identity(kind)
        if key not in self._opened:
            apart = kind in _UNCHANGING or Tensor in mro_of(kind) or values.is_held_in_bulk(kind)
            self._opened[key] = kind, not apart and self._gate.opens(kind)
        return self._opened[key][1]

    def writes(self, thing: Thing, name: str, frame: FrameType | None) -> None:
        key = identity(thing)
        if frame is not None and whose(frame.f_code.co_filename) == USER:
            self.set_by_users.add((key, name))
        by_import = frame is not None and whose(frame.f_code.co_filename) == STDLIB
        if ModuleType in mro_of(type(thing)) and not by_import and (space := own_dict(thing)) is not None:
            self.note(variable(space, name, name), relied=False)  # as the module's own functions read it
        if key not in self._paths:
            self._met(thing, key, made=not own_dict(thing))  # what has no attributes yet is being made
            return
        if (key, name) in self.reads:
            if self.reads[key, name] is None:  # where it leads from now on is told when it is read
                del self.reads[key, name]
            return
        if ModuleType in mro_of(type(thing)):
            self.note(member(thing, name, f"{self._paths[identity(thing)]}.{name}"), relied=False)
        elif frame is None or whose(frame.f_code.co_filename) != OURS:
            self._of_object(thing, name, relied=False)

    def reads_past(self, thing: Thing) -> None:
        self._known(thing, type(thing).__name__)
        self.value(own_dict(thing), type(thing).__name__)

    def hears_no_more(self, why: str) -> None:
        self.unheard = why

    def starts(self, code: CodeType, frame: FrameType) -> bool:
        by = whose(code.co_filename)
        if not code.co_flags & CO_OPTIMIZED:
            self._bodies.add((frame.f_globals.get("__name__"), code.co_name))
        if code.co_name in _IMPORTS and by == STDLIB:
            self._imports(frame)
            return True
        if by in (TORCH, OURS) or str(frame.f_globals.get("__name__")).startswith("namedtuple_"):
            return False
        self._started.add(identity(code))
        self._kept.append(code)
        for f in self._run_by(code, by, frame):
            self._function(f, f.__qualname__)
        if by != STDLIB:
            self._absent(code)
            self._within.update(identity(c) for c in code.co_consts if type(c) is CodeType)
            self._space(code, frame.f_globals)
        ours = by == STDLIB and _for_whom(frame) in (TORCH, OURS)
        self._asks_kinds = self._asks_kinds or not (ours or _ASKS.isdisjoint(code.co_names))
        for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            self._argument(frame.f_locals.get(name), ours=ours)
        return False

    def _run_by(self, code: CodeType, by: str, frame: FrameType) -> list[FunctionType]:
        """The functions that run this code, and were there before. (To look for them everywhere takes long.)"""
        known = [f for f in self._functions.get(identity(code), ()) if f.__code__ is code]
        if not known and "__class__" in code.co_freevars and by != STDLIB:
            known = _methods(frame.f_locals.get("__class__"), code)
        if known or by == STDLIB or not code.co_freevars or identity(code) in self._within:
            return known
        return functions_with(code)

    def _argument(self, value: Thing, *, ours: bool) -> None:
        """A function is called with this, perhaps one of Python's own by torch or by us. (It is heard the first time only.)"""
        if type not in mro_of(type(value)):
            self._open(type(value))
            return
        before = self._abstract
        self.value(value, value.__qualname__)
        if ours:
            self._abstract = before

    def _absent(self, code: CodeType) -> None:
        """Modules that code imports, and that are not there: no door hears of those. What imports may be another as well."""
        if (names := _imported_in(code)) is None:
            return
        self.note(variable(vars(builtins), "__import__", "__import__"))
        for name in names:
            if name not in sys.modules:
                self.note(imported(name))

    def _imports(self, frame: FrameType) -> None:
        name = frame.f_locals.get("name")
        if type(name) is str and not frame.f_locals.get("level"):
            for n in range(1, name.count(".") + 2):
                self.note(imported(".".join(name.split(".")[:n])))

    # -- variables

    def _variables(self, f: FunctionType) -> None:
        for name, c in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
            self.note(cell(c, name))
        if whose(f.__code__.co_filename) not in (TORCH, STDLIB, OURS):
            self._globals(f.__code__, f.__globals__)

    def _globals(self, code: CodeType, space: Table) -> None:
        key = identity(space)
        for name in globals_of(code):
            if (key, name) not in self.reads:
                self.note(variable(space, name, name))

    def _space(self, code: CodeType, space: Table) -> None:
        self._globals(code, space)
        named = {*code.co_names, *(c for c in code.co_consts if type(c) is str)}
        self._named(named)
        self._asks_kinds = self._asks_kinds or matches(code)
        self.users_names |= named if whose(code.co_filename) == USER else set()
        if not named.isdisjoint(PAST) and not (code.co_name == "__getattribute__" and asks_its_base(code)):
            self._hold_whole()
        if not named.isdisjoint(_REFLECTS):
            self.note(all_of_space(space, "globals()"))
        self._reflects(named & _WAYS)
        for name in code.co_names:
            if name.partition(".")[0] in sys.modules:
                self._may_import(name)

    def _may_import(self, name: str) -> None:
        """Hear what is read of the modules of this name, though they are torch's or Python's own."""
        for n in range(1, name.count(".") + 2):
            module = sys.modules.get(".".join(name.split(".")[:n]))
            if module is not None and behind_gate(type(module)) is ModuleType and whose_module(module) != OURS:
                self._gate.opens_module(module)

    def _reflects(self, ways: set[str]) -> None:
        """Code names these, by which it may get at more of what it has."""
        if ways <= self._ways:
            return
        self._ways |= ways
        for f in [*chain.from_iterable(self._functions.values())]:
            self._function(f, f.__qualname__)
        kept: list[Thing] = [*self._kept]
        for thing in kept:
            if "__subclasses__" in ways and issubclass(type(thing), type):
                self._class(thing, whole=True)
                self._below(thing)


def _tensors_in(read: Read) -> list[object]:
    return [v for v in read.value if Tensor in mro_of(type(v))]


def _has_plainly_changed(read: Read) -> bool:
    """Whether something else is there now, and there was no tensor."""
    return bool(read.value) and read.changed and not _tensors_in(read)


@of_code
def _imported_in(code: CodeType) -> frozenset[str] | None:
    """The names of modules that code imports, but for those that are named beginning with its own package; None if it imports
    nothing."""
    if not has_instruction(code, "IMPORT_NAME"):
        return None
    return frozenset(name for level, name, _ in used_in(code).imports if level == 0)


def _methods(kind: Thing, code: CodeType) -> list[FunctionType]:
    """The methods of a class that run this code."""
    found = (
        (f for member in vars_of(kind).values() for f in functions_of(behind_gate(member)))
        if type in mro_of(type(kind))
        else ()
    )
    return [f for f in found if type(f) is FunctionType and f.__code__ is code]


def _for_whom(frame: FrameType | None) -> str:
    """Whose code it is that runs in a frame, or has called Python's own that does."""
    while frame is not None and (by := whose(frame.f_code.co_filename)) in (STDLIB, OURS):
        before = before_doors(frame)
        if by == OURS and before is frame:
            return OURS
        frame = frame.f_back if before is frame else before
    return USER if frame is None else whose(frame.f_code.co_filename)


def _shown(value: tuple[object, ...]) -> str:
    first = next((v for v in value if v is not MISSING), MISSING)
    return repr(first)[:40] if type(first) in CONSTANTS else type(first).__name__
