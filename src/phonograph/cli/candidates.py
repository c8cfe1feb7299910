"""What is worth recording in a script: found while it runs, and then checked in its own next calls.

While the search is on, Python tells of each function that starts (`sys.setprofile`). What counts are functions of the script's
own folder, modules and optimizers' steps that are called again and again by the user's code, the outermost of them: what runs
within another is recorded with that. They take turns with nothing: from when they are chosen, the profile is off, a stand-in is
called in the place of each, and the next calls are the check's (`engine/check.py`).
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

import torch

from phonograph._torch.modules import call_through, goes_through, own_call
from phonograph.engine.check import Checking
from phonograph.engine.findings import Findings
from phonograph.python.origin import is_users

__all__ = ["Candidate", "Enough", "Search"]

_CALLS = 8  # after which a choice is made...
_REPEATED = 3  # ...or after so many of what has others in it
_SHARE = 0.01  # of the time: what takes less is not worth a recording of its own
_MOST = 3  # candidates
_LATER = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR  # code that runs after the call
_CALL: CodeType = own_call(torch.nn.Module()).__code__
_STEPS = os.path.join("torch", "optim", "optimizer.py")
_ASKED = "__phonograph_checks_{}__"  # what a function's code calls meanwhile


class Enough(BaseException):
    """All is known: the script may end."""


@dataclass
class _Timed:
    """Something that is called."""

    name: str
    make: Callable[[], Candidate | None]
    is_function: bool
    calls: int = 0
    seconds: float = 0.0
    """In all calls but the first, in which much happens for the first time..."""
    since: float = 0.0
    """...which ended then."""
    within: set[object] = field(default_factory=set)
    """What it was called in."""


@dataclass
class Candidate:
    """Something that is checked. Its `patch` is the line that records it."""

    patch: str
    checking: Checking
    undo: Callable[[], None]
    share: float = 0.0
    """Of the time since its first call."""
    _findings: Findings | None = None

    @property
    def findings(self) -> Findings:
        self._findings = self._findings or self.checking.findings()
        return self._findings


class Search:
    """Follows a script while entered. With the name of a function, that is what is checked."""

    def __init__(self, folder: str, wanted: str | None) -> None:
        self._folder, self._wanted = folder + os.sep, wanted
        self._timed: dict[object, _Timed] = {}
        self._running: list[tuple[FrameType, object, float]] = []
        self._known: dict[CodeType, bool] = {}  # whether functions with this code count
        self._chosen: list[Candidate] = []
        self._begun = time.perf_counter()
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._begun = time.perf_counter()
        sys.setprofile(self._profile)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        self.seconds = time.perf_counter() - self._begun
        for one in self._chosen:
            one.undo()

    def found(self) -> list[Candidate]:
        """What was checked, but for what has no operators."""
        return [one for one in self._chosen if one.findings.operators or one.findings.obstacles]

    # -- what is called

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            code = frame.f_code
            counts = self._known.get(code)
            if counts is None:
                counts = self._known[code] = self._counts(code)
            if counts:
                self._starts(frame)
        elif event == "return" and self._running and self._running[-1][0] is frame:
            self._ends()

    def _counts(self, code: CodeType) -> bool:
        if code is _CALL or (code.co_name == "wrapper" and code.co_filename.endswith(_STEPS)):
            return self._wanted is None
        own = code.co_filename.startswith(self._folder) and is_users(code.co_filename)
        named = self._wanted is None or self._wanted.rpartition(".")[2] == code.co_name
        return own and named and not code.co_flags & _LATER and not code.co_name.startswith("<")

    def _starts(self, frame: FrameType) -> None:
        found = self._called(frame)
        if found is None:
            return
        key, name, make = found
        timed = self._timed.get(key)
        now = time.perf_counter()
        if timed is None:
            timed = self._timed[key] = _Timed(name, make, isinstance(key, tuple))
        timed.within.update(other for _, other, _ in self._running if other != key)
        self._running.append((frame, key, now))

    def _called(self, frame: FrameType) -> tuple[object, str, Callable[[], Candidate | None]] | None:
        """What starts in this frame: what it is known by, its name, and who makes a candidate of it."""
        caller, code = frame.f_back, frame.f_code
        if code is _CALL:
            module = frame.f_locals["self"]
            while caller is not None and not is_users(caller.f_code.co_filename) and caller.f_code is not _CALL:
                caller = caller.f_back
            if caller is None or caller.f_code is _CALL:
                return None  # a part of another
            name = _name_of(module, caller)
            return id(module), name, lambda: _of_module(module, name)
        caller = _past_decorators(frame)
        if caller is None or not is_users(caller.f_code.co_filename):
            return None  # called by a library: a hook, an item of a data set, the forward of a module
        if code.co_filename.startswith(self._folder):
            name = getattr(code, "co_qualname", code.co_name)
            owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            return (code, id(owner) if _is_method(owner, code) else 0), name, lambda: _of_function(code, owner)
        optimizer = next(iter(frame.f_locals.get("args", ())), None)
        if not isinstance(optimizer, torch.optim.Optimizer):
            return None
        name = _name_of(optimizer, caller)
        return id(optimizer), name, lambda: _of_step(optimizer, name)

    def _ends(self) -> None:
        _, key, begun = self._running.pop()
        timed, now = self._timed[key], time.perf_counter()
        timed.calls += 1
        if timed.calls == 1:
            timed.since = now
        else:
            timed.seconds += now - begun
        if self._wanted is not None:
            if timed.calls > 1:
                self._choose({key: timed}, now)
        elif self._enough(key, timed):
            repeated = {key: one for key, one in self._timed.items() if one.calls >= _REPEATED}
            self._choose({key: one for key, one in repeated.items() if one.within.isdisjoint(repeated)}, now)

    def _enough(self, key: object, timed: _Timed) -> bool:
        """Whether this was called often enough. What it is called in may be what is repeated, if that has ended once."""
        if any(self._timed[around].calls for around in timed.within):
            return False
        holds = timed.is_function and any(key in one.within for one in self._timed.values())
        return timed.calls >= (_REPEATED if holds else _CALLS)

    def _choose(self, found: dict[object, _Timed], now: float) -> None:
        """From the next call on, these are checked."""
        ranked = sorted(found.values(), key=lambda one: -one.seconds)
        for timed in ranked[:_MOST]:
            share = timed.seconds / max(now - timed.since, 1e-9)
            if (self._wanted is not None or share >= _SHARE) and (made := timed.make()) is not None:
                made.share = min(share, 1.0)
                made.checking.ended = self._end
                self._chosen.append(made)
        if self._chosen:
            sys.setprofile(None)
            self._running.clear()

    def _end(self) -> None:
        """A checked call has returned."""
        if all(one.checking.done for one in self._chosen):
            raise Enough


def _past_decorators(frame: FrameType) -> FrameType | None:
    """Who has called the function that runs there. A decorator of a library's (`torch.no_grad()`) has it in a closure."""
    caller, code = frame.f_back, frame.f_code
    while caller is not None and not is_users(caller.f_code.co_filename) and _holds(caller, code):
        code = caller.f_code
        caller = caller.f_back
    return caller


def _holds(frame: FrameType, code: CodeType) -> bool:
    return any(getattr(frame.f_locals.get(name), "__code__", None) is code for name in frame.f_code.co_freevars)


# -- candidates


def _of_module(module: torch.nn.Module, name: str) -> Candidate:
    before = goes_through(module)
    checking = Checking(module, name)
    call_through(module, checking)
    return Candidate(f"{name} = pg.record({name})", checking, lambda: call_through(module, before))


def _of_step(optimizer: torch.optim.Optimizer, name: str) -> Candidate:
    checking = Checking(optimizer.step, name=f"{name}.step")
    own = vars(optimizer).get("step")
    optimizer.step = checking  # type: ignore[method-assign]

    def undo() -> None:
        if own is None:
            del optimizer.__dict__["step"]
        else:
            optimizer.step = own  # type: ignore[method-assign]

    return Candidate(f"{name}.step = pg.record({name}.step)", checking, undo)


def _of_function(code: CodeType, owner: object) -> Candidate | None:
    """A function of the user's, or a method of this object. Other code stands in its place meanwhile, so that it is the same
    function wherever it is known."""
    functions = [x for x in gc.get_referrers(code) if isinstance(x, FunctionType) and x.__code__ is code]
    if not functions:
        return None
    function = functions[-1]
    own = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    own.__kwdefaults__, own.__qualname__, own.__module__ = function.__kwdefaults__, function.__qualname__, function.__module__
    own.__dict__.update(function.__dict__)
    bound = _is_method(owner, code)
    checking = Checking(MethodType(own, owner) if bound else own)
    name = _ASKED.format(id(checking))

    def called(*args: Any, **kwargs: Any) -> Any:
        if not bound:
            return checking(*args, **kwargs)
        return checking(*args[1:], **kwargs) if args and args[0] is owner else own(*args, **kwargs)

    function.__globals__[name] = called
    function.__code__ = _calling(name, code)

    def undo() -> None:
        function.__code__ = code
        function.__globals__.pop(name, None)

    line = f"{os.path.relpath(code.co_filename)}:{code.co_firstlineno}"
    plain = "." not in function.__qualname__
    fix = f"{function.__name__} = pg.record({function.__name__})" if plain else "@pg.record"
    where = "after the function that begins at" if plain else "above the function at"
    return Candidate(f"{fix}    # {where} {line}", checking, undo)


def _calling(name: str, code: CodeType) -> CodeType:
    """Code that calls what the globals have by this name, for a function that has the same variables of others as `code`."""
    free = code.co_freevars
    inner = ["def f(*args, **kwargs):", f"    return {name}(*args, **kwargs)", *(f"    {x}" for x in free)]
    outer = ["def make():", *(f"    {x} = None" for x in free), *(f"    {line}" for line in inner), "    return f"]
    space: dict[str, Any] = {}
    exec(compile("\n".join(outer), __file__, "exec"), space)
    made: CodeType = space["make"]().__code__
    return made


def _is_method(owner: object, code: CodeType) -> bool:
    """Whether this object has a method with this code."""
    return any(getattr(getattr(x, "__func__", x), "__code__", None) is code for x in [getattr(type(owner), code.co_name, None)])


def _name_of(thing: object, frame: FrameType) -> str:
    """What the user's code there calls it."""
    for space in (frame.f_locals, frame.f_globals):
        for name, value in space.items():
            if value is thing and name.isidentifier():
                return name
    for name, value in frame.f_locals.items():
        inner = getattr(value, "__dict__", None)
        modules = inner.get("_modules") if isinstance(value, torch.nn.Module) and inner else None
        for attributes in (inner, modules):
            for attribute, held in (attributes or {}).items():
                if held is thing:
                    return f"{name}.{attribute}"
    return "model" if isinstance(thing, torch.nn.Module) else "optimizer"
