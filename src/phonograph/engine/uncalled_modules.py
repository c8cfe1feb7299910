"""Recorded modules that are never called: what is called is another method of theirs, ``agent.act(x)``, which is not recorded.

It is the parts of such a module that hear of it. Until it is called itself, or has not been often enough, calls of its parts go
through here. (torch keeps what calls of a module go through out of what is pickled or copied.)
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Iterator, Set
from itertools import islice
from types import CodeType, FrameType, FunctionType
from typing import Protocol

import torch

from .._torch import modules as torch_modules
from ..errors import Refusal
from ..options import switched_off
from ..python.bytecode import all_within
from ..python.origin import users_line
from ..state.reentrancy import inside
from .current_capture import recording_here

__all__ = ["UncalledModule", "leave", "never_called"]

_GOES_ON = frozenset({"__call__", "_call_impl", "_wrapped_call_impl"})
_CALLS = 16  # of one part, in other methods
_ELSEWHERE = 256  # of parts, by others
_PARTS = 64
_OUTWARDS = 32  # frames


class Says(Protocol):
    """What tells people why something runs live."""

    def say(self, refusal: Refusal) -> None: ...


class UncalledModule:
    """Hears what is called of a module instead of it."""

    def __init__(self, recorded: Says, module: torch.nn.Module) -> None:
        self._recorded, self._module = weakref.ref(recorded), weakref.ref(module)
        self._counted: _Part | None = None  # the part whose calls are counted
        self._calls = self._elsewhere = 0
        self._methods = {code for kind in type(module).__mro__ for code in _methods(kind)}
        inner = [part for part in islice(module.modules(), 1, _PARTS) if not isinstance(part, torch.jit.ScriptModule)]
        self._parts = [_Part(part, self) for part in inner if torch_modules.goes_through(part) is None]

    @staticmethod
    def of(recorded: Says, module: torch.nn.Module) -> UncalledModule | None:
        """None where there is no other method that somebody would call."""
        return UncalledModule(recorded, module) if any(map(_has_others, type(module).__mro__)) else None

    def stop(self) -> None:
        parts, self._parts, self._counted = self._parts, [], None
        for one in parts:
            if one.part.__dict__.get(torch_modules.CALLED_THROUGH) is one:
                del one.part.__dict__[torch_modules.CALLED_THROUGH]

    def called(self, part: _Part, frame: FrameType | None) -> None:
        """Code in this frame calls a part."""
        if recording_here():  # which must find modules as they were
            return
        recorded, module = self._recorded(), self._module()
        if recorded is None or module is None or inside():
            self.stop()
            return
        if switched_off():
            return
        method = _method_of(module, self._methods, frame)
        self._elsewhere += method is None
        if method is not None:
            self._counted = self._counted or part
            self._calls += part is self._counted
        if self._elsewhere >= _ELSEWHERE or self._calls >= _CALLS:
            self.stop()
        if method is not None and self._calls >= _CALLS:
            name = method.f_code.co_name
            other = "call the module itself" if name == "forward" else f"call that, or decorate {name} with @pg.record"
            remedy = f"only calls of the module itself are recorded, as in model(x): {other}"
            reason = f"is never called, but {type(module).__qualname__}.{name} is"
            recorded.say(Refusal(reason, remedy, users_line(method.f_back)))


class _Part:
    """What calls of a part go through."""

    def __init__(self, part: torch.nn.Module, hears: UncalledModule) -> None:
        self.part = part
        self._call, self._hears = torch_modules.own_call(part), hears
        part.__dict__[torch_modules.CALLED_THROUGH] = self

    def __call__(self, /, *args: object, **kwargs: object) -> object:
        if torch.compiler.is_compiling():
            return self._call(*args, **kwargs)
        frame = sys._getframe(1)
        other = torch_modules.other_calling(frame, self.part)
        if other is None:
            self._hears.called(self, frame)
        return (other or self._call)(*args, **kwargs)


def leave(module: torch.nn.Module) -> None:
    """Calls of this module do not go through here any more."""
    if isinstance(torch_modules.goes_through(module), _Part):
        del module.__dict__[torch_modules.CALLED_THROUGH]


def never_called(kind: type[torch.nn.Module]) -> Refusal | None:
    """What is to be said of modules whose class has a `__call__` of its own that does not go on to torch's, as gpytorch's have:
    their calls do not come through anything that could be recorded."""
    calls = [vars(base)["__call__"] for base in kind.__mro__ if "__call__" in vars(base)]
    if not any(map(_ends_calls, calls[: calls.index(torch.nn.Module.__call__)])):
        return None
    return Refusal(f"is never called, but {kind.__call__.__qualname__} is",
                   "only calls that go on to torch.nn.Module.__call__ are recorded: record what this one calls, as in "
                   "model.forward = pg.record(model.forward)")  # fmt: skip


def _ends_calls(call: object) -> bool:
    """Whether a `__call__` cannot go on to that of another class, going by the names in it."""
    code = getattr(inspect.unwrap(call) if callable(call) else call, "__code__", None)
    return code is not None and all(_GOES_ON.isdisjoint(inner.co_names) for inner in all_within(code))


def _has_others(kind: type) -> bool:
    """Whether a class has methods that no module has."""
    if kind.__module__.partition(".")[0] == "torch":
        return False
    functions = [name for name, x in vars(kind).items() if type(x) is FunctionType]
    return any(not name.startswith("_") and not hasattr(torch.nn.Module, name) for name in functions)


def _methods(kind: type) -> Iterator[CodeType]:
    """The code of the functions that a class has, but for those that each module has."""
    if kind.__module__.partition(".")[0] != "torch":
        own = [inspect.unwrap(x) for x in vars(kind).values() if type(x) is FunctionType]
        yield from (x.__code__ for x in own if type(x) is FunctionType)


def _method_of(module: torch.nn.Module, methods: Set[CodeType], frame: FrameType | None) -> FrameType | None:
    """Where the outermost method of the module runs, as far as one looks. (Up to Python 3.12, a frame of which one asks for its
    variables keeps them for as long as it runs.)"""
    found = None
    for _ in range(_OUTWARDS):
        if frame is None:
            break
        code = frame.f_code
        if code in methods and code.co_argcount and frame.f_locals.get(code.co_varnames[0]) is module:
            found = frame
        frame = frame.f_back
    return found
