"""Hearing what Python code does while it is captured, to refuse its effects before they happen.

What an effect is, `effects` decides; here are the two ways to hear of calls:

* `sys.monitoring` (Python 3.12 and later). The start of a function is heard once for each code object, and decides
  whether its calls are listened to: all those of the user's code, and of library code only where it mentions a name that
  could be an effect. Everything else runs at full speed.
* `sys.setprofile`: every call and start of the thread, ours and torch's included. It is kept cheap by looking at names
  first, and is off while `OperatorWatch` works (`pause_profiling`). Another profile function is called as
  well; cProfile, which is no Python function, pauses.

Monitoring hears all threads: the one that captures counts, and autograd's, which are not of Python's making. A profile
function hears its own thread only, so that before Python 3.12 an effect in a hook that autograd calls on a thread of its
own (on a GPU) is not heard.

What the garbage collector calls is not listened to: it may come up anywhere, and is no part of the function.
"""

from __future__ import annotations

import sys
import threading
import traceback
from _queue import SimpleQueue
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    CodeType,
    FrameType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    WrapperDescriptorType,
)
from typing import Protocol

import torch

from .._torch.autograd import on_thread_of_autograds
from .._torch.dynamic import Thing
from ..errors import Overlooked, Refusal
from ..python.gc_control import telling_collections
from ..python.identity import identity
from ..python.introspection import is_table
from ..python.loggers import ASKING, Question, question
from ..python.memos import memos
from ..python.origin import BACKWARD, is_users, runs_through, users_line
from ..python.read_gate import BY_NAME
from ..python.standing import ended, standing
from ..python.variable_loads import Load
from ..state.rng import READS, SETS, asked
from .effects import (
    ANYONE,
    BEGINS_GROUP,
    EXPORT,
    Effect,
    Starts,
    mentions,
    of_call,
    of_start,
    refusable,
    start_names,
    told_names,
)

__all__ = ["HEARS_ALL_THREADS", "Listener", "alone", "hears_instructions", "pause_profiling", "users_elsewhere",
           "watching_python"]  # fmt: skip


# By identity: a code's hash goes through all its instructions.
_FOLLOWED = frozenset(map(identity, ASKING.union(SETS)))  # functions of which each start is heard, and no effect by itself
_READ = frozenset(map(identity, READS))
_ENGINE = f"torch/autograd/graph.py:{BACKWARD}"
_LISTS = frozenset({list, deque})  # which may be left with other values
_SETTING = frozenset({"__setitem__", "update", "setdefault"})  # what they leave in a dictionary is found there
_CONTAINERS = frozenset({dict, OrderedDict, list, set, deque})  # whose methods change what they are called on, if anything

LeftOut = Callable[[FrameType], Overlooked | Refusal | None]


class Variables(Protocol):
    """Is told where code loads variables, before it has them."""

    def loads(self, code: CodeType) -> Mapping[int, Load] | None:
        """The instructions of code to be told of; None for none."""

    def loaded(self, frame: FrameType, load: Load) -> None:
        """May raise a `Refusal`."""


class FollowsRandomStates(Protocol):
    """Is told of the states of torch's default generators that the call reads and sets, of groups of collectives, and of what
    asks for the address of a tensor.
    `refusal`: it has refused something."""

    refusal: Refusal | None

    def state_read(self, state: torch.Tensor, of: torch.device) -> None:
        """May raise a `Refusal`."""

    def state_set(self, state: torch.Tensor, of: torch.device) -> None:
        """Before it happens. May raise a `Refusal`."""

    def begins_group(self, frame: FrameType) -> bool:
        """Whether code may begin a group of collectives. May raise a `Refusal`."""

    def exported(self, owner: object, frame: FrameType) -> None:
        """Before it happens. May raise a `Refusal`."""


@contextmanager
def watching_python(
    outer: set[int], more: Starts, caching: Set[int], left_out: LeftOut, follower: FollowsRandomStates,
    kind: type[Listener] | None = None, variables: Variables | None = None,
) -> Iterator[Listener]:  # fmt: skip
    """Refuse effects of Python code while the block runs.

    `outer` holds the ids of objects that were there before the call, `more` the Python functions whose start is refused
    besides, `caching` the identities of the user's code whose results a cache would keep; `left_out` tells what was overlooked,
    when the function was looked at, of the code that starts. A listener of another `kind` may take refusals in another way. The
    `variables` are told of loads, if there are any.
    """
    source: Callable[[Listener], AbstractContextManager[None]] = _monitoring if _monitors else _profiling
    with telling_collections() as collecting:
        listener = (kind or Listener)(outer, more, caching, left_out, follower, collecting)
        listener.variables = variables
        with source(listener):
            yield listener


class Listener:
    """What both sources call. Raises a `Refusal` where the call or start would be an effect.

    `found` are the refusals, also those that the user's code swallowed, `ran` the code of all functions that ran, `elsewhere`
    that of some which ran in other threads or were called by the garbage collector, and were no part of it,
    `overlooked` what one of them was left out for, `loggers` what these were asked, `changed` what is to be said of the calls
    of methods of a list which outlives the call, by its identity, and `appended` how many of them append to it."""

    def __init__(self, outer: set[int], more: Starts, caching: Set[int], left_out: LeftOut,
                 follower: FollowsRandomStates, collecting: Callable[[], bool]) -> None:  # fmt: skip
        self.overlooked: Overlooked | None = None
        self._left_out = left_out
        self._follower = follower
        self.found: list[Refusal] = []
        self.loggers: dict[tuple[int, int | None], Question] = {}
        self.by_identity: dict[int, CodeType] = {}  # all functions that ran: a code's hash goes through all its instructions
        self.ran: Collection[CodeType] = self.by_identity.values()
        self.elsewhere: dict[int, CodeType] = {}
        self.changed: dict[int, list[Refusal]] = {}
        self.appended = Counter[int]()
        self._globals: dict[int, dict[str, object]] = {}
        self.caching = {*caching}
        self.starts = start_names | more.keys() | {BY_NAME.co_name}
        self.reads_past: Callable[[FrameType], None] | None = None
        """Is told where `BY_NAME` starts."""
        self.more = more
        self.outer = outer
        self.variables: Variables | None = None
        self.backward_of_users = False  # whether autograd has called code of theirs
        self._thread = threading.get_ident()
        self.collecting = collecting

    def called(self, function: Callable[..., object], owner: object, frame: FrameType) -> None:
        if function.__name__ == BEGINS_GROUP and self.concerned():
            with self._refusing(frame):
                if self._follower.begins_group(frame):
                    return
        if function.__name__ == EXPORT and self.concerned():
            self._follower.exported(owner, frame)
            return
        effect = of_call(function, owner, frame, self.outer)
        if effect is not None and type(owner) in _LISTS and self.concerned():
            refusal = Refusal(effect.reason, effect.remedy, where=users_line(frame))
            self.changed.setdefault(identity(owner), []).append(refusal)
            self.appended[identity(owner)] += function.__name__ == "append"
        elif not (effect is not None and is_table(owner) and function.__name__ in _SETTING):
            self._judge(effect, frame)

    def started(self, frame: FrameType) -> None:
        if frame.f_code in ASKING and self.concerned():
            put = question(frame, self.outer)
            if put is not None:
                self.loggers[identity(put[0]), put[1]] = put
        if frame.f_code is BY_NAME and self.reads_past is not None and self.concerned():
            self.reads_past(frame)
        if frame.f_code in SETS and self.concerned():
            with self._refusing(frame):
                self._follower.state_set(frame.f_locals["new_state"], asked(frame))
        self._judge(of_start(frame, self.more), frame)
        if identity(frame.f_code) in self.caching:
            self._judge(Effect(f"fills the cache of {frame.f_code.co_name}", "fill it before", ANYONE), frame, final=False)

    def returned(self, frame: FrameType, value: Thing) -> None:
        """One of `READS` returns."""
        if self.concerned():
            with self._refusing(frame):
                self._follower.state_read(value, asked(frame))

    @contextmanager
    def _refusing(self, frame: FrameType) -> Iterator[None]:
        """A refusal inside the block counts, also if the code that it is raised in catches it."""
        try:
            yield
        except Refusal as refusal:
            refusal.where = users_line(frame)
            self.refuse(refusal, frame)

    def refuse(self, refusal: Refusal, frame: FrameType) -> None:
        """End the call. (What catches that does not undo it.)"""
        self.found.append(refusal)
        raise refusal

    def functions(self) -> list[tuple[CodeType, dict[str, object]]]:
        """The code of all functions that ran, and the globals of each."""
        return [(code, self._globals[key]) for key, code in self.by_identity.items()]

    def is_new(self, code: CodeType) -> bool:
        """Whether no function with this code has started yet."""
        return identity(code) not in self.by_identity

    def met(self, frame: FrameType) -> None:
        """A function starts for the first time. Raises `Overlooked` before it can do anything, if it was left out."""
        self._globals[identity(frame.f_code)] = frame.f_globals
        self.by_identity[identity(frame.f_code)] = frame.f_code
        if memos.wraps(frame.f_code, frame.f_globals):
            self.caching.add(identity(frame.f_code))
        if frame.f_code.co_name == "backward" and is_users(frame.f_code.co_filename):
            self.backward_of_users = self.backward_of_users or runs_through(frame, _ENGINE)
        left_out = self._left_out(frame)
        if left_out is not None:
            if isinstance(left_out, Refusal):
                self.found.append(left_out)
            else:
                self.overlooked = left_out
            raise left_out

    def _judge(self, effect: Effect | None, frame: FrameType, *, final: bool = True) -> None:
        if effect is not None and self.concerned():
            # Where something is refused on its way already, what comes of that (torch logs what is raised in a collective) is
            # stopped as well, and no reason of its own.
            first = self._follower.refusal or next(iter(self.found), None)
            self.refuse(first or effect.kind(effect.reason, effect.remedy, where=users_line(frame), final=final), frame)

    def concerned(self) -> bool:
        """Whether what runs now is part of the capture."""
        return (threading.get_ident() == self._thread or on_thread_of_autograds()) and not self.collecting()


# -- sys.monitoring

_monitors: Thing = getattr(sys, "monitoring", None)
HEARS_ALL_THREADS = _monitors is not None
"""Whether what autograd calls on threads of its own is heard as well."""

_NAME = "phonograph"
_TOOLS = (4, 3, 5, 2, 1, 0)  # the last ones are by convention an optimizer's, a profiler's, a coverage tool's, a debugger's
_OF_TYPES = (MethodDescriptorType, WrapperDescriptorType, ClassMethodDescriptorType)
# (Methods that are told their class have a type of their own, which has no other name.)
_BUILTIN = frozenset({BuiltinFunctionType, type(SimpleQueue().get), MethodWrapperType, *_OF_TYPES})


@contextmanager
def _monitoring(listener: Listener) -> Iterator[None]:
    tool = next((i for i in _TOOLS if _monitors.get_tool(i) is None), None)
    if tool is None:
        raise Refusal("all tools of sys.monitoring are in use", "stop one of them", final=False)
    events, disable, variables = _monitors.events, _monitors.DISABLE, listener.variables
    heard: list[CodeType] = []
    loads: dict[int, Mapping[int, Load]] = {}

    def started(code: CodeType, offset: int) -> Thing:
        if listener.is_new(code):
            if not listener.concerned():
                listener.elsewhere[identity(code)] = code
                return None  # another thread, or the collector, is the first to run it: this one is still to be heard
            listener.met(sys._getframe(1))
        if identity(code) in listener.caching or identity(code) in _FOLLOWED or code is BY_NAME:
            return listener.started(sys._getframe(1))
        if identity(code) in _READ:
            heard.append(code)
            return _monitors.set_local_events(tool, code, events.PY_RETURN)
        of_variables = variables.loads(code) if variables is not None else None
        if of_variables or mentions(code.co_filename, code.co_names):
            if not listener.concerned():
                return None  # another thread is the first to run it, and may still run when this tool is gone
            heard.append(code)
            loads[identity(code)] = of_variables or {}
            _monitors.set_local_events(tool, code, events.CALL | (events.INSTRUCTION if of_variables else 0))
        if code.co_name not in listener.starts or not refusable(code.co_filename, code.co_name, listener.more):
            return disable
        return listener.started(sys._getframe(1))

    def called(code: CodeType, offset: int, function: Thing, first: object) -> None:
        kind = type(function)
        if kind is MethodType:  # of C++ objects, methods are built-in functions that are bound like Python's
            function = function.__func__
            kind = type(function)
        if kind in _BUILTIN and function.__name__ in told_names:
            owner = first if kind in _OF_TYPES else function.__self__
            listener.called(function, owner, sys._getframe(1))

    def loaded(code: CodeType, offset: int) -> Thing:
        if (load := loads.get(identity(code), {}).get(offset)) is None:
            return disable
        if listener.concerned():
            variables.loaded(sys._getframe(1), load)  # type: ignore[union-attr]
        return None

    def returned(code: CodeType, offset: int, value: Thing) -> None:
        listener.returned(sys._getframe(1), value)

    def undo() -> None:
        if _monitors.get_tool(tool) != _NAME:
            return
        _monitors.set_events(tool, events.NO_EVENTS)
        for code in heard:
            _monitors.set_local_events(tool, code, events.NO_EVENTS)
        for event in (events.PY_START, events.CALL, events.PY_RETURN, events.INSTRUCTION):
            _monitors.register_callback(tool, event, None)
        _monitors.free_tool_id(tool)
        _monitors.restart_events()  # what was switched off for single functions must not stay so for the next tool

    with standing(undo):
        _monitors.use_tool_id(tool, _NAME)
        _monitors.register_callback(tool, events.PY_START, started)
        _monitors.register_callback(tool, events.CALL, called)
        _monitors.register_callback(tool, events.PY_RETURN, returned)
        _monitors.register_callback(tool, events.INSTRUCTION, loaded)
        _monitors.set_events(tool, events.PY_START)
        yield


def alone() -> bool:
    """Whether no code of the user's runs in other threads, or what does is heard."""
    return HEARS_ALL_THREADS or not users_elsewhere()


def users_elsewhere() -> bool:
    """Whether code of the user's runs in other threads."""
    here = threading.get_ident()
    return any(
        is_users(f.f_code.co_filename)
        for thread, top in sys._current_frames().items()
        if thread != here
        for f, _ in traceback.walk_stack(top)
    )


# -- sys.setprofile

_ours: Callable[..., object] | None = None  # the profile function, while there is one


def pause_profiling() -> Callable[..., object] | None:
    """Switch our profile function off, if it is on in this thread; ``sys.setprofile`` of the result switches it on."""
    if _ours is None or sys.getprofile() is not _ours:
        return None
    sys.setprofile(None)
    return _ours


@contextmanager
def _profiling(listener: Listener) -> Iterator[None]:
    global _ours
    before: Thing = sys.getprofile()
    outer, starts, caching = _ours, listener.starts, listener.caching
    met, there = listener.by_identity, listener.outer

    def profile(frame: FrameType, event: str, arg: Thing) -> None:
        if event == "c_call":
            if arg.__name__ in told_names:
                owner = arg.__self__
                if type(owner) not in _CONTAINERS or identity(owner) in there:
                    listener.called(arg, owner, frame)
        elif event == "call":
            code = frame.f_code
            key = identity(code)
            if key not in met:
                if listener.concerned():
                    listener.met(frame)
                else:
                    listener.elsewhere[key] = code
            if code.co_name in starts or key in caching or key in _FOLLOWED:
                listener.started(frame)
        elif event == "return" and arg is not None and identity(frame.f_code) in _READ:
            listener.returned(frame, arg)

    def chained(frame: FrameType, event: str, arg: object) -> None:
        before(frame, event, arg)
        profile(frame, event, arg)

    mine = threading.get_ident()

    def undo() -> None:
        global _ours
        _ours = outer
        if threading.get_ident() == mine:
            sys.setprofile(before if callable(before) else None)

    with ended(_paused(before)), standing(undo), _tracing(listener):
        _ours = chained if callable(before) else profile
        sys.setprofile(_ours)
        yield


def hears_instructions() -> bool:
    """Whether loads of variables can be heard: not while a debugger traces, before there is `sys.monitoring`."""
    return HEARS_ALL_THREADS or sys.gettrace() is None


@contextmanager
def _tracing(listener: Listener) -> Iterator[None]:
    """Tell of the loads of variables in this thread."""
    variables = listener.variables
    if variables is None or not hears_instructions():
        yield
        return

    def begun(frame: FrameType, event: str, _: object) -> Thing:
        loads = variables.loads(frame.f_code)
        if not loads:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False

        def ran(frame: FrameType, event: str, _: object) -> Thing:
            if event == "opcode" and (load := loads.get(frame.f_lasti)) is not None and listener.concerned():
                variables.loaded(frame, load)
            return ran

        return ran

    mine = threading.get_ident()

    def undo() -> None:
        if threading.get_ident() == mine:
            sys.settrace(None)

    with standing(undo):
        sys.settrace(begun)
        yield


@contextmanager
def _paused(profiler: object) -> Iterator[None]:
    """A profiler that is no Python function, as cProfile's, cannot be called, or set again: it pauses."""
    if profiler is None or callable(profiler):
        yield
        return
    if not (hasattr(profiler, "disable") and hasattr(profiler, "enable")):
        raise Refusal("a profiler is active that cannot be paused", "stop it", final=False)
    profiler.disable()
    try:
        yield
    finally:
        profiler.enable()
