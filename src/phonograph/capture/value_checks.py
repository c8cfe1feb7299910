"""Value checks: code that reads a tensor only to decide whether to raise. Examples are the validation of
`torch.distributions`, index checks of libraries, an ``assert`` of the user's.

Reading a tensor's truth waits for the device, so a recording could not go on. A check has only one answer after which the call
goes on. A recording therefore assumes that answer and keeps the operators that compute it. Each replay computes the answer
again, and it is looked at later: on the CPU in its place, on a GPU when a later call finds it.

A failed check raises as in eager. Where torch's own code validates, the exception is made again from the arguments of the
check. Elsewhere the replay is undone and the call runs live, so that the code raises by itself.

A check is recognised by its bytecode: `if not valid: raise`. Constraints of distributions may return False early instead; then
the distribution that asked raises.
"""

from __future__ import annotations

import dis
import functools
import inspect
import os
import sys
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType
from typing import NamedTuple

import torch

from .._torch.dynamic import Leaves, Thing
from ..python.handlers import is_caught_by_torch
from ..python.identity import identity
from ..python.origin import is_ours, is_torchs, users_line

__all__ = ["Check", "Failed", "look", "lookouts", "validates"]

_DISTRIBUTIONS = os.path.join("torch", "distributions", "")
_VALIDATE = (_DISTRIBUTIONS, os.path.join("torch", "nn", "functional.py"))
_CONSTRAINTS = os.path.join(_DISTRIBUTIONS, "constraints.py")
_DISTRIBUTION = os.path.join(_DISTRIBUTIONS, "distribution.py")
_VALIDATING = ("__init__", "_validate_sample")
_SILENT = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "NOT_TAKEN"})
_BRANCHES = ("POP_JUMP_", "JUMP_IF_")
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_LEAVES = ("RETURN_", "YIELD_", "RERAISE", "STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL", "DELETE_ATTR", "DELETE_SUBSCR",
           "DELETE_GLOBAL", "SEND")  # fmt: skip

lookouts: list[Callable[[], None]] = []
"""Functions to call before each call of a recorded function. One raises the exception of a failed check; one does work that was
put off in the middle of another call."""


def look() -> None:
    """Do the work that was put off, and raise the exception of a check that failed in an earlier replay."""
    for one in [*lookouts]:  # which may go
        one()


class _Raise(NamedTuple):
    """Exception that one answer leads to: its class and place. `text` is its message, if that is constant."""

    at: int
    kind: str
    text: str


class Failed(Exception):
    """A check failed at this line of the user's. The code that asked raises its own exception."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.where = where


class Check:
    """One question, for which the answer is `good` where all is well.

    `given` are the tensors from which its exception is made, as far as these are known: `error` makes it of their values.
    """

    def __init__(self, good: bool, kind: type[Exception], text: str, where: str = "") -> None:
        self.good = good
        self.given: list[torch.Tensor] = []
        self.validates = False
        """Whether a distribution or a function of `torch.nn.functional` makes it of its arguments or of a sample: who gets the
        exception has an error to mend, and nothing that was computed meanwhile to save."""
        self.again = False
        """Whether only the code that asks can make its exception, called once more."""
        self.awaited = False
        """Whether a replay waits for the answer, at its end."""
        self.where = where
        self._kind, self._text = kind, text
        self._call: tuple[FunctionType, dict[str, object]] | None = None

    @staticmethod
    def asked(frame: FrameType, outermost: CodeType | None) -> Check | None:
        """The check that this frame makes, where it asks for the truth of a tensor; None if it is no such one, or if torch
        itself catches what it raises."""
        raising = None if is_ours(frame.f_code.co_filename) else _branches(frame.f_code, frame.f_lasti)
        good = False
        if raising is not None:
            good, raised = raising
        elif (asking := _validating(frame)) is not None:
            frame, good, raised = asking, True, _Raise(-1, "ValueError", "")
        else:
            return None
        if is_caught_by_torch(frame, raised.at if raised.at >= 0 else frame.f_lasti, outermost):
            return None
        scope = {**vars(sys.modules["builtins"]), **frame.f_globals}
        kind = scope.get(raised.kind)
        known = kind if isinstance(kind, type) and issubclass(kind, Exception) else None
        check = Check(good, known or RuntimeError, raised.text or _told(frame), users_line(frame))
        if known and is_torchs(frame.f_code.co_filename):
            check.validates = _is_validating(frame)
            check._remember(frame)
        check.again = check._call is None
        return check

    def _remember(self, frame: FrameType) -> None:
        """How the function that asks was called, so that it can be called so again."""
        function, code = _function(frame), frame.f_code
        if function is None or code.co_flags & 0x0C:  # *args, **kwargs
            return
        names, values = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], frame.f_locals
        if all(name in values for name in names):
            self._call = function, {name: _without_tensors(values[name], self.given) for name in names}

    def error(self, given: list[object] | None = None) -> Exception:
        """The exception, as the function raises it that has asked; without the values where the tensors `given` are none."""
        if self._call is not None and given is not None and all(isinstance(t, torch.Tensor) for t in given):
            function, arguments = self._call
            values = {name: _with_tensors(value, given) for name, value in arguments.items()}
            try:
                function(**values)
            except self._kind as e:
                return e.with_traceback(None)
            except (TypeError, AttributeError, RuntimeError):  # it was called with less than it had: it is told in our words
                pass
        place = f" (in a replay that has ended since; {self.where})" if given is None and self.where else ""
        return self._kind(f"{self._text}{place}")

    def __call__(self, answer: torch.Tensor, given: list[object]) -> None:
        """Raise the exception if that is the answer; `Failed` where other code has to make it."""
        if bool(answer) is not self.good:
            raise self.error(given) if not self.again else Failed(self.where)


def validates(frame: FrameType | None, outermost: CodeType | None) -> bool:
    """Whether an operator that raises is called by such code, which lets the exception out. Where the user's own code calls it
    (perhaps called by a distribution), it may be an answer that decides how to go on."""
    while frame is not None and is_torchs(frame.f_code.co_filename):
        if _is_validating(frame):
            return not is_caught_by_torch(frame, frame.f_lasti, outermost)
        frame = frame.f_back
    return False


def _is_validating(frame: FrameType) -> bool:
    """Whether it is code of torch's that looks at what it is given."""
    return any(place in frame.f_code.co_filename for place in _VALIDATE)


def _validating(frame: FrameType) -> FrameType | None:
    """The frame of a distribution that asks a constraint whether all is well, if this is that of the constraint."""
    at: FrameType | None = frame
    while at is not None and at.f_code.co_filename.endswith(_CONSTRAINTS) and at.f_code.co_name == "check":
        at = at.f_back
    if at is None or at is frame or at.f_code.co_name not in _VALIDATING:
        return None
    return at if at.f_code.co_filename.endswith(_DISTRIBUTION) else None


@functools.cache
def _branches(code: CodeType, at: int) -> tuple[bool, _Raise] | None:
    """For an instruction that asks for the truth of something: the answer after which the code goes on, and what it raises
    after the other one. None if it does not always."""
    instructions = [i for i in dis.get_instructions(code) if i.opname not in _SILENT]
    offsets = [i.offset for i in instructions]
    places = {i.offset: n for n, i in enumerate(instructions)}
    n, turned = places.get(at, -1), False
    while n >= 0 and n < len(instructions) and _asks(instructions[n]):
        turned ^= instructions[n].opname == "UNARY_NOT"
        n += 1
    if n < 0 or n >= len(instructions) or not instructions[n].opname.startswith(_BRANCHES):
        return None
    jump = instructions[n]
    if "TRUE" not in jump.opname and "FALSE" not in jump.opname:  # `is None`
        return None
    target = next((k for k, offset in enumerate(offsets) if offset >= jump.argval), len(offsets))
    jumps_if = ("TRUE" in jump.opname) is not turned
    there, here = _raises(instructions, target), _raises(instructions, n + 1)
    if there is not None and here is None:
        return not jumps_if, there
    return (jumps_if, here) if here is not None and there is None else None


def _asks(i: dis.Instruction) -> bool:
    """Whether it asks for the truth of something, and goes on. (Since Python 3.13 a comparison may itself.)"""
    return i.opname in ("TO_BOOL", "UNARY_NOT") or (i.opname == "COMPARE_OP" and i.argrepr.startswith("bool("))


def _raises(instructions: list[dis.Instruction], start: int) -> _Raise | None:
    """What the code raises from there on, whatever else comes; None if it may do something else."""
    found: list[_Raise] = []
    waiting, seen = [start], set[int]()
    places = {i.offset: n for n, i in enumerate(instructions)}
    words: list[dis.Instruction] = []
    while waiting:
        n = waiting.pop()
        while n not in seen:
            if n >= len(instructions):
                return None
            seen.add(n)
            i = instructions[n]
            if i.opname == "RAISE_VARARGS":
                found.append(_raised(i, words))
                break
            if i.opname.startswith(_LEAVES):
                return None
            words.append(i)
            if i.opcode in _JUMPS:
                to = next((places[o] for o in range(i.argval, i.argval + 64) if o in places), len(instructions))
                if i.opname.startswith(("JUMP_FORWARD", "JUMP_ABSOLUTE", "JUMP_BACKWARD")):
                    n = to
                    continue
                waiting.append(to)
            n += 1
    return found[0] if found else None


def _raised(at: dis.Instruction, words: list[dis.Instruction]) -> _Raise:
    asserts = words[:1] and words[0].opname in ("LOAD_ASSERTION_ERROR", "LOAD_COMMON_CONSTANT")
    named = ["AssertionError"] if asserts else [str(i.argval) for i in words if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    kind = named[0] if named else ""
    constants = [i.argval for i in words if i.opname == "LOAD_CONST" and isinstance(i.argval, str)]
    plain = len(constants) == 1 and not any(i.opname.startswith(("LOAD_FAST", "LOAD_ATTR", "LOAD_METHOD")) for i in words)
    return _Raise(at.offset, kind, constants[0] if plain else "")


def _told(frame: FrameType) -> str:
    """What is wrong, where the exception itself could not be made: without values."""
    own = frame.f_locals
    kind = type(own.get("self")).__name__
    if {"self", "param", "value", "constraint"} <= own.keys():
        return (f"Expected parameter {own['param']} ({_brief(own['value'])}) of distribution {kind} to satisfy the constraint "
                f"{_named(own['constraint'])}, but found invalid values")  # fmt: skip
    if {"self", "value", "support"} <= own.keys():
        return (f"Expected value argument ({_brief(own['value'])}) to be within the support ({_named(own['support'])}) of the "
                f"distribution {kind}, but found invalid values")  # fmt: skip
    return f"a check of torch's has failed, at {frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


def _brief(value: object) -> str:
    return f"{type(value).__name__} of shape {tuple(getattr(value, 'shape', ()))}"


def _named(constraint: object) -> str:
    """As it calls itself, unless it would show the values of tensors."""
    plain = all(isinstance(v, _PLAIN) for v in getattr(constraint, "__dict__", {}).values())
    return repr(constraint) if plain else type(constraint).__name__.removeprefix("_")


def _function(frame: FrameType) -> FunctionType | None:
    """The function that a frame is a call of, where it is found by its name."""
    code = frame.f_code
    own = frame.f_locals.get("self")
    found: list[object] = [vars(kind).get(code.co_name) for kind in type(own).__mro__] if own is not None else []
    found.append(inspect.unwrap(frame.f_globals.get(code.co_name)))  # type: ignore[arg-type]
    return next((f for f in found if isinstance(f, FunctionType) and f.__code__ is code), None)


class _Number(NamedTuple):
    """Stands for a tensor among those given."""

    n: int


class _Object(NamedTuple):
    """Stands for a distribution, of which a copy is made that has these attributes."""

    kind: type
    attributes: dict[str, object]


_PLAIN = (str, int, float, bool, complex, type(None), torch.dtype, torch.device, type)


def _without_tensors(value: object, given: list[torch.Tensor]) -> object:
    """The same with `_Number`s for tensors, which are added to those `given`. What may hold others is left out."""
    if isinstance(value, torch.Tensor):
        known = next((n for n, t in enumerate(given) if identity(t) == identity(value)), None)
        given += [value] if known is None else []
        return _Number(len(given) - 1 if known is None else known)
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, (list, tuple)):
        return type(value)(_without_tensors(v, given) for v in value) if type(value) in (list, tuple) else None
    if isinstance(value, torch.distributions.Distribution):
        return _Object(type(value), {name: _without_tensors(v, given) for name, v in vars(value).items()})
    return value if isinstance(value, _PLAIN) else None


def _with_tensors(value: Thing, given: Leaves) -> Thing:
    if isinstance(value, _Number):
        return given[value.n]
    if isinstance(value, _Object):
        made: object = object.__new__(value.kind)
        vars(made).update({name: _with_tensors(v, given) for name, v in value.attributes.items()})
        return made
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(v, given) for v in value)
    return value
