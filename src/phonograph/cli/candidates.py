"""What is worth recording in a script: found while it runs, and then checked in its own next calls.

While the search is on, Python tells of each function that starts (`sys.setprofile`). What counts are functions of the script's
own folder, modules and optimizers' steps that are called again and again by the user's code, the outermost of them: what runs
within another is recorded with that. They take turns with nothing: from when they are chosen, the profile is off, a stand-in is
called in the place of each, and the next calls are the check's (`engine/check.py`). Unless an optimizer steps in one of them,
the search goes on afterwards, for a while: what trains may only come later, and be what they are called in.

What the script has recorded already is looked at before all else. It is called plainly meanwhile (`plainly`).
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

import torch

from phonograph._torch.modules import call_through, goes_through, own_call
from phonograph.cli.patches import Place
from phonograph.engine.check import Checking
from phonograph.engine.findings import Findings
from phonograph.engine.recorded import Recorded
from phonograph.python.origin import is_ours, is_users

__all__ = ["Candidate", "Enough", "Search", "plainly"]

_CALLS = 8  # after which a choice is made...
_REPEATED = 3  # ...or after so many of what has others in it
_SHARE = 0.01  # of the time: what takes less is not worth a recording of its own
_MOST = 3  # candidates at a time
_PATIENCE = (
    10  # calls of what is not recorded, for each that one waits for, before what is recorded but seldom called is let go
)
_SECONDS = 10.0  # after the first choice, in which others are looked for
_LATER = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR  # code that runs after the call
_CALL: CodeType = own_call(torch.nn.Module()).__code__
_STEPS = os.path.join("torch", "optim", "optimizer.py")
_ASKED = "__phonograph_checks_{}__"  # what a function's code calls meanwhile


@contextlib.contextmanager
def plainly(switch: str | None = "off") -> Iterator[None]:
    """Let functions that are recorded be plain ones; None: recorded ones."""
    before = os.environ.get("PHONOGRAPH")
    _set(switch)
    try:
        yield
    finally:
        _set(before)


def _set(switch: str | None) -> None:
    if switch is None:
        os.environ.pop("PHONOGRAPH", None)
    else:
        os.environ["PHONOGRAPH"] = switch


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
    trains: bool = False
    """Whether an optimizer steps in it."""
    recorded: Recorded[..., Any] | None = None
    """By what it is recorded already."""


@dataclass
class Candidate:
    """Something that is checked. Its `patch` is the line that records it, and `place` where that belongs."""

    patch: str
    checking: Checking
    undo: Callable[[], None]
    place: Place
    share: float = 0.0
    """Of the time since its first call."""
    seen: _Timed | None = None
    _findings: Findings | None = None

    @property
    def recorded(self) -> bool:
        """Whether the script records it already."""
        return self.seen is not None and self.seen.recorded is not None

    @property
    def worth(self) -> bool:
        """Whether recording it may pay: unless a replay was measured slower."""
        found = self.findings
        return found.replay_ms is None or found.live_ms is None or found.replay_ms <= found.live_ms

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
        self._chosen: list[Candidate] = []  # that are being checked
        self._checked: dict[object, Candidate] = {}
        self._begun = time.perf_counter()
        self._first: float | None = None  # when there was a choice for the first time
        self._paused = self._since = 0.0  # how long checks took, and since when one does
        self.seconds = 0.0
        self.others: dict[str, None] = {}
        """Functions of the folder with other names than the one that is wanted."""

    def __enter__(self) -> None:
        self._begun = time.perf_counter()
        sys.setprofile(self._profile)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        self.seconds = time.perf_counter() - self._begun
        for one in self._chosen:
            one.undo()

    def found(self) -> list[Candidate]:
        """What was checked, but for what has no operators, and what runs in another of these."""
        outermost = [one for key, one in self._checked.items() if self._timed[key].within.isdisjoint(self._checked)]
        return [one for one in outermost if one.findings.operators or one.findings.obstacles]

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
        counts = own and not code.co_flags & _LATER and not code.co_name.startswith("<")
        named = self._wanted is None or self._wanted.rpartition(".")[2] == code.co_name
        if counts and not named:
            self.others[getattr(code, "co_qualname", code.co_name).replace("<locals>.", "")] = None
        return counts and named

    def _starts(self, frame: FrameType) -> None:
        found = self._called(frame)
        if frame.f_code.co_filename.endswith(_STEPS):
            for _, around, _ in self._running:
                self._timed[around].trains = True
        if found is None:
            return
        key, name, make = found
        timed = self._timed.get(key)
        now = self._now()
        if timed is None:
            timed = self._timed[key] = _Timed(name, make, isinstance(key, tuple))
            timed.trains = frame.f_code.co_filename.endswith(_STEPS)
            timed.recorded = _recorded(frame)
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
            place = Place(caller.f_code.co_filename, name=name)
            return id(module), name, lambda: _of_module(module, name, place)
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
        place = Place(caller.f_code.co_filename, name=name, attribute="step")
        return id(optimizer), name, lambda: _of_step(optimizer, name, place)

    def _ends(self) -> None:
        _, key, begun = self._running.pop()
        timed, now = self._timed[key], self._now()
        timed.calls += 1
        if timed.calls == 1:
            timed.since = now
        else:
            timed.seconds += now - begun
        if self._wanted is not None:
            if timed.calls > 1:
                self._choose({key: timed}, now)
        elif self._enough(key, timed):
            self._choose(self._candidates(), now)
        elif self._first is not None and now - self._first > _SECONDS:
            raise Enough

    def _now(self) -> float:
        """The time, but for that of checks."""
        return time.perf_counter() - self._paused

    def _is_new(self, key: object, timed: _Timed) -> bool:
        return key not in self._checked and timed.within.isdisjoint(self._checked)

    def _enough(self, key: object, timed: _Timed) -> bool:
        """Whether this was called often enough. What it is called in may be what is repeated, if that has ended once."""
        if not self._is_new(key, timed) or any(self._timed[around].calls for around in timed.within - {key}):
            return timed.recorded is not None and key not in self._checked and timed.calls >= _CALLS
        if timed.recorded is None:  # what is recorded comes first, unless it hardly ever comes
            waited = [
                one.calls for other, one in self._timed.items() if one.recorded is not None and other not in self._checked
            ]
            if waited and min(waited) < _REPEATED and timed.calls < _PATIENCE * _CALLS:
                return False
        holds = timed.is_function and any(key in one.within for one in self._timed.values())
        return timed.calls >= (_REPEATED if holds else _CALLS)

    def _candidates(self) -> dict[object, _Timed]:
        """What has repeated, the outermost of it: of what is recorded already, if something is."""
        repeated = {key: one for key, one in self._timed.items() if one.calls >= _REPEATED and key not in self._checked}
        recorded = {key: one for key, one in repeated.items() if one.recorded is not None}
        among = recorded or {key: one for key, one in repeated.items() if self._is_new(key, one)}
        return {key: one for key, one in among.items() if one.within.isdisjoint(among)}

    def _choose(self, found: dict[object, _Timed], now: float) -> None:
        """From the next call on, these are checked."""
        ranked = sorted(found.items(), key=lambda one: -one[1].seconds)
        for key, timed in ranked[:_MOST]:
            share = timed.seconds / max(now - timed.since, 1e-9)
            named = self._wanted is not None or timed.recorded is not None
            if (named or share >= _SHARE) and (made := timed.make()) is not None:
                self._check(key, timed, made, min(share, 1.0))
        if self._chosen:
            self._first = self._first or now
            self._since = time.perf_counter()
            sys.setprofile(None)
            self._running.clear()

    def _check(self, key: object, timed: _Timed, made: Candidate, share: float) -> None:
        made.share, made.seen, made.checking.ended = share, timed, self._end
        made.checking.recording = lambda: plainly(None)
        if timed.recorded is not None:
            made.checking.like(timed.recorded.options)
        self._chosen.append(made)
        self._checked[key] = made

    def _end(self) -> None:
        """A checked call has returned."""
        if not all(one.checking.done for one in self._chosen):
            return
        trains = any(one.seen is not None and one.seen.trains for one in self._chosen)
        if self._wanted is not None or trains:
            raise Enough
        for one in self._chosen:
            one.undo()
        self._chosen.clear()
        self._paused += time.perf_counter() - self._since
        sys.setprofile(self._profile)


def _recorded(frame: FrameType) -> Recorded[..., Any] | None:
    """The recorded function that has called this one."""
    caller = frame.f_back
    while caller is not None and not is_users(caller.f_code.co_filename):
        found = caller.f_locals.get("self") if is_ours(caller.f_code.co_filename) else None
        if isinstance(found, Recorded):
            return found
        caller = caller.f_back
    return None


def _past_decorators(frame: FrameType) -> FrameType | None:
    """Who has called the function that runs there. A decorator of a library's (`torch.no_grad()`) has it in a closure."""
    caller, inner = frame.f_back, frame
    while caller is not None and not is_users(caller.f_code.co_filename):
        if not is_ours(caller.f_code.co_filename):
            if not _holds(caller, inner):
                break
            inner = caller
        elif isinstance(caller.f_locals.get("self"), Recorded):
            inner = caller
        caller = caller.f_back
    return caller


def _holds(frame: FrameType, inner: FrameType) -> bool:
    """Whether the closure of what runs there has what runs in `inner`."""
    held = [frame.f_locals.get(name) for name in frame.f_code.co_freevars]
    recorded = inner.f_locals.get("self")
    return any(getattr(x, "__code__", None) is inner.f_code or (x is recorded and isinstance(x, Recorded)) for x in held)


# -- candidates


def _of_module(module: torch.nn.Module, name: str, place: Place) -> Candidate:
    before = goes_through(module)
    checking = Checking(module, name)
    call_through(module, checking)
    return Candidate(f"{name} = pg.record({name})", checking, lambda: call_through(module, before), place)


def _of_step(optimizer: torch.optim.Optimizer, name: str, place: Place) -> Candidate:
    checking = Checking(optimizer.step, name=f"{name}.step")
    own = vars(optimizer).get("step")
    optimizer.step = checking  # type: ignore[method-assign]

    def undo() -> None:
        if own is None:
            del optimizer.__dict__["step"]
        else:
            optimizer.step = own  # type: ignore[method-assign]

    return Candidate(f"{name}.step = pg.record({name}.step)", checking, undo, place)


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
    return Candidate(f"{fix}    # {where} {line}", checking, undo, Place(code.co_filename, code.co_firstlineno))


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
