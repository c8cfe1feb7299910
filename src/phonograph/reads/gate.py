"""The gate: who hears what a call reads, while it reads.

It has four doors.

* *Attributes of objects*: each read goes through the `__getattribute__` of the object's class, whoever reads: code, `getattr`
  with a name that it has worked out, `str.format`, `copy`, C. For the time of a call a class has one that tells. Writes go
  through `__setattr__` and `__delattr__`.
* *Attributes of modules*: a module gets a class of ours for that time, which has such methods. An import of what is there asks
  the module for its ``__spec__``; what is not there yet is looked for by a function of Python's that starts.
* *Starts of functions*: `sys.monitoring` tells of them once for each code (Python 3.12 and later), before that a profile
  function. A function that starts may read its variables.
* *Calls that go past these doors*, like ``object.__getattribute__(x, "a")``: of them `sys.monitoring` tells, too. Before 3.12,
  and where somebody else tells of starts, whoever listens has to take the names in code for it.

What containers hold nobody hears of. They have to be held with their contents when they are read.

Nothing else changes: what a door gets, and raises, is what the class behind it gives. The doors' own frames are skipped where
`warnings` count levels of the stack.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from types import CodeType, FrameType, FunctionType, MethodWrapperType, ModuleType, WrapperDescriptorType
from typing import NamedTuple, Protocol

from .._torch.autograd import on_thread_of_autograds
from .._torch.dynamic import Thing
from .._torch.dynamo import not_compiled_by_itself, tells_of_compilation
from ..python import read_gate
from ..python.code_cache import of_code
from ..python.identity import identity
from ..python.introspection import MISSING
from ..python.origin import is_ours
from ..python.read_gate import DOORS_FILE, behind_gate, gates, where_heard
from ..python.standing import ended, standing
from .place import in_class, mro_of, vars_of

__all__ = ["ALL", "DOORS", "PAST", "Gate", "Hearing", "before_doors", "gate"]

ALL = frozenset({"__dict__", "__dir__", "__getattribute__", "__getstate__", "__reduce__", "__reduce_ex__", "__sizeof__"})
"""Names of attributes by which all attributes of an object are got at."""
_HEAP_TYPE, _IMMUTABLE = 1 << 9, 1 << 8  # Py_TPFLAGS_HEAPTYPE, _IMMUTABLETYPE
# Times that one class is opened: from 3.13 on CPython gives a class 1,000 versions, and looks attributes up slowly after that.
_MOST = 300 if sys.version_info >= (3, 13) else sys.maxsize
_opened = dict[int, int]()  # by identity, how often (at worst it counts for a class that has gone)
_standing = list["Gate"]()  # those that want to stand, of all threads: the first one does
DOORS = ("__getattribute__", "__setattr__", "__delattr__")
_INSIDE = (DOORS_FILE, __file__, read_gate.__file__)
_set_of_object = object.__setattr__
_getframe, _here = sys._getframe, threading.get_ident  # (nobody is asked for these: modules have doors)


class Hearing(Protocol):
    """Who listens at a gate. Nothing that it does is heard."""

    def has_read(self, thing: object, name: str, frame: FrameType | None) -> None:
        """An attribute is about to be read, by code that runs in this frame; None if C does, on a thread of its own."""

    def writes(self, thing: object, name: str, frame: FrameType | None) -> None:
        """An attribute is about to be set or deleted."""

    def starts(self, code: CodeType, frame: FrameType) -> bool:
        """A function starts. Whether that of this code is to be heard the next time as well."""

    def reads_past(self, thing: object) -> None:
        """Something may be read of this that no door hears of."""

    def hears_no_more(self, why: str) -> None:
        """From now on, it is told of nothing. (A compiler has begun to work, say, and must not meet the doors.)"""


class _Put(NamedTuple):
    """A door in a class, and what stood there: perhaps a gate of others, with this member behind it."""

    kind: type
    name: str
    stood: object
    member: object
    door: object


class Gate:
    """The doors of one call, on the thread that makes it."""

    def __init__(self, hearing: Hearing, known: Thing, *, hears_starts: bool = True) -> None:
        """It need not be told of `known` attributes: pairs of an object's identity and a name. Somebody else may tell of
        starts of functions (`started`)."""
        self._hearing: Thing = hearing
        self._known = known
        self._thread, self.closed = threading.get_ident(), True
        """Nobody is told while it is closed."""
        self._aside: Callable[[], bool] = bool
        self._hears_starts = hears_starts
        self._profile: Thing = None
        self._stands = False
        self._kinds: dict[int, tuple[type, list[_Put]]] = {}  # by identity: classes may say what is equal
        self._modules = list[ModuleType]()
        self._module_kind: Thing = None
        self.deaf = dict[int, CodeType]()
        """Code, by identity, of which nobody need be told what it reads of modules, but for how they are imported."""
        self._codes = set[int]()
        self._kept = list[CodeType]()

    # -- opening doors

    def opens(self, kind: Thing) -> bool:
        """Whether reads of attributes of objects of this class are heard from now on."""
        key = identity(kind)
        if key in self._kinds:
            return True
        if not _may_open(kind) or _opened.get(key, 0) >= _MOST:
            return False
        if not self._stands:
            return True  # it would be heard
        put = list[_Put]()
        self._kinds[key] = kind, put
        for name, door in zip(DOORS, (self._reading, self._setting, self._deleting), strict=True):
            at: type = kind
            if name == DOORS[0] and type(behind_gate(in_class(kind, name))) is FunctionType:
                at = where_heard(kind) or kind
            stands = in_class(at, name)
            if not _is_door(stands):  # (it has that of a class that it derives from)
                self._put(at, name, door(stands), put)
        _opened[key] = _opened.get(key, 0) + 1
        return True

    @staticmethod
    def _put(kind: type, name: str, door: object, put: list[_Put]) -> None:
        stood = vars_of(kind).get(name, MISSING)
        put.append(_Put(kind, name, stood, behind_gate(stood), door))
        gates[door] = stood
        type.__setattr__(kind, name, door)

    def opens_module(self, module: ModuleType) -> bool:
        """The same for the attributes of a module."""
        if type(module) is self._module_kind:
            return True
        if type(module) is not ModuleType:
            return self.opens(type(module))
        return not self._stands or self.open_modules([module])

    def open_modules(self, modules: Iterable[ModuleType]) -> bool:
        """The same of several. Whether those are heard that are of no class of their own."""
        kind, sets, opened, plain = self._module_kind, _set_of_object, self._modules.append, ModuleType
        try:
            for module in modules:
                if type(module) is plain:
                    sets(module, "__class__", kind)
                    opened(module)
                else:
                    self.opens(type(module))
        except TypeError:
            return False
        return True

    def _kind_of_modules(self) -> type:
        known, is_heard, told, deaf = self._known, self._is_of_the_call, self._telling, self.deaf
        get, plain = ModuleType.__getattribute__, ModuleType

        def __getattribute__(module: object, name: str) -> object:  # noqa: N807 - it stands there as that
            if name == "__class__":
                return plain
            if (identity(module), name) not in known and not self.closed:
                asks = _getframe().f_back  # none where a thread of C's or C++'s does, as autograd's of a GPU
                is_deaf = asks is not None and identity(asks.f_code) in deaf and name != "__spec__"
                if not is_deaf and is_heard():
                    told(self._hearing.has_read, module, name, _reader())
            return get(module, name)

        space = {"__getattribute__": _as_door(__getattribute__), "__setattr__": self._setting(ModuleType.__setattr__),
                 "__delattr__": self._deleting(ModuleType.__delattr__), "__slots__": (), "__module__": "builtins"}  # fmt: skip
        kind = type("module", (ModuleType,), space)
        gates[kind] = ModuleType
        return kind

    def _reading(self, get: Thing) -> Thing:
        known, is_heard, told = self._known, self._is_of_the_call, self._telling

        def __getattribute__(thing: object, name: str) -> object:  # noqa: N807 - it stands there as that
            if (identity(thing), name) not in known and not self.closed and is_heard():
                told(self._hearing.has_read, thing, name, _reader())
            return get(thing, name)

        return _as_door(__getattribute__)

    def _setting(self, put: Thing) -> Thing:
        def __setattr__(thing: object, name: str, value: object) -> None:  # noqa: N807
            self._written(thing, name)
            put(thing, name, value)

        return _as_door(__setattr__)

    def _deleting(self, delete: Thing) -> Thing:
        def __delattr__(thing: object, name: str) -> None:  # noqa: N807
            self._written(thing, name)
            delete(thing, name)

        return _as_door(__delattr__)

    def _is_of_the_call(self) -> bool:
        return _here() == self._thread or on_thread_of_autograds()

    def _written(self, thing: object, name: str) -> None:
        if not self.closed and self._is_of_the_call():
            self._telling(self._hearing.writes, thing, name, _reader())

    def _telling(self, tell: Callable[..., object], *what: object) -> None:
        """Nothing that who is told does is heard, nor does a profile function slow it down."""
        self.closed, ours = True, self._profile
        pauses = ours is not None and sys.getprofile() is ours
        if pauses:
            sys.setprofile(None)
        try:
            if not self._aside():
                tell(*what)
        finally:
            self.closed = not self._stands
            if pauses:
                sys.setprofile(ours)

    def pausing(self, work: Callable[[], object]) -> None:
        """Do work that nobody is told of."""
        self._telling(work)

    # -- starts of functions

    def started(self, frame: FrameType) -> None:
        """A function starts, as somebody else has heard."""
        if self._stands and identity(frame.f_code) not in self._codes:
            self._starts(frame.f_code, frame)

    def goes_with(self, profile: object, aside: Callable[[], bool]) -> None:
        """This function tells of starts. It pauses while somebody is told of what was read. What runs is not the call's while
        it is `aside`: while the garbage collector works, say."""
        self._profile, self._aside = profile, aside

    def _starts(self, code: CodeType, frame: FrameType) -> bool:
        """Whether that is to be heard again."""
        if identity(code) in self._codes:
            return False
        self.closed = True
        try:
            again: bool = self._aside() or self._hearing.starts(code, frame)
        finally:
            self.closed = not self._stands
        if not again:
            self._codes.add(identity(code))
            self._kept.append(code)
        return again

    @contextmanager
    def _profiling(self) -> Iterator[None]:
        before: Thing = sys.getprofile()
        codes, here, ident = self._codes, self._thread, threading.get_ident

        def profile(frame: FrameType, event: str, arg: object) -> None:
            if event == "call" and identity(frame.f_code) not in codes and not self.closed and ident() == here:
                self._starts(frame.f_code, frame)

        def chained(frame: FrameType, event: str, arg: object) -> None:
            before(frame, event, arg)
            profile(frame, event, arg)

        ours = chained if callable(before) else profile

        def undo() -> None:
            self._profile = None
            if ident() == here and sys.getprofile() is ours:
                sys.setprofile(before if callable(before) else None)

        with standing(undo):
            if before is None or callable(before):  # else C profiles, which cannot be asked to go on later
                self._profile = ours
                sys.setprofile(ours)
            else:
                self._hearing.hears_no_more("a profiler is at work")
            yield

    @contextmanager
    def _monitoring(self) -> Iterator[None]:
        monitors: Thing = sys.monitoring  # type: ignore[attr-defined]
        tool = next((i for i in _TOOLS if monitors.get_tool(i) is None), None)
        if tool is None:
            self._hearing.hears_no_more("all tools of sys.monitoring are in use")
            yield
            return
        events, heard = monitors.events, list[CodeType]()

        def started(code: CodeType, offset: int) -> Thing:
            if is_ours(code.co_filename):
                return monitors.DISABLE
            if self.closed or not self._is_of_the_call():
                return None  # it is still to be heard
            again = self._starts(code, _getframe(1))
            if not again and _calls_past(code):
                heard.append(code)
                monitors.set_local_events(tool, code, events.CALL)
            return None if again else monitors.DISABLE

        def called(code: CodeType, offset: int, function: object, first: object) -> None:
            if _goes_past(function) and not self.closed and self._is_of_the_call():
                self._telling(self._hearing.reads_past, first if type(function) is WrapperDescriptorType else function)

        def undo() -> None:
            if monitors.get_tool(tool) != _NAME:
                return
            monitors.set_events(tool, events.NO_EVENTS)
            for code in heard:
                monitors.set_local_events(tool, code, events.NO_EVENTS)
            for event in (events.PY_START, events.CALL):
                monitors.register_callback(tool, event, None)
            monitors.free_tool_id(tool)
            monitors.restart_events()  # what was switched off for single functions must not stay so for the next tool

        with standing(undo):
            monitors.use_tool_id(tool, _NAME)
            monitors.register_callback(tool, events.PY_START, started)
            monitors.register_callback(tool, events.CALL, called)
            monitors.set_events(tool, events.PY_START)
            yield

    # -- the time that it stands

    @contextmanager
    def standing(self) -> Iterator[None]:
        """All this is heard while the block runs."""

        def undo() -> None:
            self.closed = True
            self._close()
            while self in _standing:
                _standing.remove(self)

        def compiles() -> None:
            self.closed = True
            self._close()
            self._hearing.hears_no_more("code is compiled")

        starts: Thing = (self._monitoring if HEARS_STARTS else self._profiling) if self._hears_starts else nullcontext
        with standing(undo), ended(tells_of_compilation(compiles)):
            _standing.append(self)
            if _standing[0] is not self:
                _standing.remove(self)
                self._hearing.hears_no_more("another thread's call is recorded at the same time")
                yield
                return
            self._module_kind = self._kind_of_modules()
            self._stands = True
            with starts():
                self.closed = False
                yield
                self.closed = True

    def forget(self) -> None:
        """Who has listened. (The class that modules had leads here, and goes late. Where an exception came before the first
        instruction of what takes the doors out, they are still in, and nobody is there to be told.)"""
        self.closed, self._stands = True, False
        self._hearing = self._profile = None
        self._aside = bool
        self.deaf.clear()

    def _close(self) -> None:
        """Take the doors out; may be called again."""
        self._stands = False
        sets, kind, plain = _set_of_object, self._module_kind, ModuleType
        while self._modules:
            if type(self._modules[-1]) is kind:
                sets(self._modules[-1], "__class__", plain)
            self._modules.pop()
        gates.pop(kind, None)
        for _, put in reversed(self._kinds.values()):
            while put:
                _take_out(put[-1])
                put.pop()
        self._kinds.clear()


@contextmanager
def gate(hearing: Hearing, objects: Iterable[object] = (), known: Thing = frozenset()) -> Iterator[Gate]:
    """Tell `hearing` of what is read while the block runs, at first of these objects. It opens more."""
    made = Gate(hearing, known)
    with made.standing():
        for x in objects:
            if isinstance(x, ModuleType):
                made.opens_module(x)
            else:
                made.opens(type(x))
        yield made


HEARS_STARTS = hasattr(sys, "monitoring")
"""Whether the gate hears by itself of the functions that start, on all threads."""
_NAME = "phonograph reads"
_TOOLS = (4, 3, 5, 2, 1, 0)  # the last ones are by convention an optimizer's, a profiler's, a coverage tool's, a debugger's
PAST = frozenset({"__getattribute__", "__get__"})


def _goes_past(function: object) -> bool:
    """Whether a built-in function reads attributes without asking the class of the object."""
    return type(function) in (WrapperDescriptorType, MethodWrapperType) and function.__name__ in PAST  # type: ignore[attr-defined]


def _calls_past(code: CodeType) -> bool:
    return not code.co_filename.startswith("<frozen")


_flags_of: Callable[[type], int] = type.__dict__["__flags__"].__get__


def _may_open(kind: type) -> bool:
    if not _flags_of(kind) & _HEAP_TYPE or _flags_of(kind) & _IMMUTABLE or type in mro_of(kind):
        return False
    if vars_of(kind).get("_is_protocol") is True:  # what it has, objects are asked for
        return False
    of_meta = [vars_of(base).get("__setattr__", type.__setattr__) for base in mro_of(type(kind)) if base is not object]
    if any(
        sets is not type.__setattr__ and type(sets) is not FunctionType for sets in of_meta
    ):  # (pybind11's, those of ctypes)
        return False
    return all(type(in_class(kind, name)) in (FunctionType, WrapperDescriptorType) for name in DOORS)


def _as_door(function: Thing) -> Thing:
    function.__code__ = _code_of_door(function.__code__)
    return function


@of_code
def _code_of_door(code: CodeType) -> CodeType:
    found = code.replace(co_filename=DOORS_FILE)
    not_compiled_by_itself(found)
    return found


def _reader() -> FrameType | None:
    """The frame of the code that has come to a door, perhaps through others."""
    return before_doors(_getframe(1))


def before_doors(frame: FrameType | None) -> FrameType | None:
    """This frame, or the one of the code that has come to the door which this is."""
    while frame is not None and frame.f_code.co_filename in _INSIDE:
        frame = frame.f_back
    return frame


def _is_door(member: object) -> bool:
    return type(member) is FunctionType and member.__code__.co_filename == DOORS_FILE


def _take_out(put: _Put) -> None:
    if vars_of(put.kind).get(put.name) is put.door:
        stood = put.stood if put.stood is put.member or put.stood in gates else put.member  # (that gate has been taken out)
        if stood is MISSING:
            type.__delattr__(put.kind, put.name)
        else:
            type.__setattr__(put.kind, put.name, stood)
    gates.pop(put.door, None)  # late: other threads may look at the class
