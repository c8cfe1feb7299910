"""What of the user's code would run after an exception, on its way out.

A replay knows of no Python code: an exception that comes out of it goes straight to the caller. So where something that may
raise is called in a capture, no ``except`` or ``finally`` clause may be around it, and no context manager but torch's own,
which put back what a replay never changes, and those like them. That is asked for the code that runs at that moment, and the
instruction where it is.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import inspect
from itertools import pairwise
from types import CodeType, FrameType, FunctionType, ModuleType

import torch

from .._torch.dynamic import Private
from .bytecode import all_within
from .code_cache import of_code
from .origin import LIBRARY, STDLIB, USER, is_ours, is_torchs, origin

__all__ = ["comes_to_something", "generators_catch", "is_caught_by_torch"]

_NEVER_AN_OPERATORS = frozenset({"KeyError", "AttributeError", "NameError", "ImportError", "ModuleNotFoundError", "OSError",
                                 "FileNotFoundError", "StopIteration", "AssertionError", "KeyboardInterrupt",
                                 "NotImplementedError"})  # fmt: skip
_FINALLY, _EXCEPT, _EXCEPT_OTHERS = "finally", "except", "except for what no operator raises"  # kinds of clauses
_PASSES_ON = "except that raises what it has caught"
_MATCHES = ("CHECK_EXC_MATCH", "CHECK_EG_MATCH", "JUMP_IF_NOT_EXC_MATCH")
_SILENT = frozenset({"CACHE", "PUSH_NULL", "PRECALL", "EXTENDED_ARG", "NOP"})
_NAMES_A_CLASS = ("LOAD_", "BUILD_TUPLE", "DUP_TOP")
_FORGETS = ["LOAD_CONST", "STORE_FAST", "DELETE_FAST"]
_VARIABLES = frozenset({"LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_CALLS = ("CALL", "CALL_FUNCTION", "CALL_METHOD", "CALL_FUNCTION_KW", "CALL_KW")
_ENTERS = ("BEFORE_WITH", "SETUP_WITH")
_WITHIN_MANAGERS = (*_ENTERS, "WITH_EXCEPT_START")
_MAKES_MANAGERS = contextlib.contextmanager(lambda: iter(())).__code__
_RAISE_AGAIN = ("_call_impl",)
_GIVES = ("RETURN_VALUE", "RETURN_CONST", "YIELD_VALUE", "RETURN_GENERATOR")


def comes_to_something(frame: FrameType | None, outermost: CodeType | None, *, any_kind: bool) -> bool:
    """Whether an exception that is raised in this frame comes to code of the user's before it leaves the frame of `outermost`:
    one of a kind that operators raise, or of `any_kind`. What an installed package runs in any case (``finally``, or before it
    raises what it has caught) puts back what it changed, as torch's context managers do; what it catches counts like the
    user's. So it is with generators of which context managers are made."""
    while frame is not None and frame.f_code is not outermost:
        code, at = frame.f_code, frame.f_lasti
        if is_torchs(code.co_filename):
            found = _has_hooks_that_always_run(frame)
        elif origin(code.co_filename) is STDLIB:  # a context manager as a decorator
            found = code.co_filename == contextlib.__file__ and code.co_name == "inner"
        else:
            clauses = _clauses_around(code, at) - (set() if any_kind else {_EXCEPT_OTHERS})
            if origin(code.co_filename) is LIBRARY:
                found = bool(clauses - {_FINALLY, _PASSES_ON})
            else:
                found = bool(clauses) or not all(_is_torchs(frame, path) for path in _managers(code, at))
        if found:
            return True
        frame = frame.f_back
    return False


def is_caught_by_torch(frame: FrameType | None, at: int, outermost: CodeType | None) -> bool:
    """Whether torch itself catches an exception that is raised at this instruction of the frame, before it leaves the frame of
    `outermost`. (The call of a module raises it again.)"""
    while frame is not None and frame.f_code is not outermost:
        code = frame.f_code
        torchs = is_torchs(code.co_filename) and not is_ours(code.co_filename) and code.co_name not in _RAISE_AGAIN
        if torchs and _clauses_around(code, at) - {_FINALLY, _EXCEPT_OTHERS}:
            return True
        frame = frame.f_back
        at = frame.f_lasti if frame is not None else -1
    return False


def generators_catch(code: CodeType) -> bool:
    """Whether there are generators in it with such clauses: those run for the code that goes through what they give."""
    return any(c.co_flags & inspect.CO_GENERATOR and _clauses(c) for c in (code, *all_within(code)))


def _has_hooks_that_always_run(frame: FrameType) -> bool:
    """Whether it is that of a call of a module with forward hooks that run also after an exception."""
    if frame.f_code.co_name not in ("_call_impl", "inner") or "module" not in frame.f_code.co_filename:
        return False
    module = frame.f_locals.get("self")
    return bool(getattr(module, "_forward_hooks_always_called", ())) or bool(_global_hooks_always_called)


_global_hooks_always_called = getattr(torch.nn.modules.module, "_global_forward_hooks_always_called", {})


@functools.cache
def _clauses_around(code: CodeType, at: int) -> frozenset[str]:
    """Of which kinds the clauses of this code are to which an exception comes that is raised at this instruction. (Before
    Python 3.11: those of all that it has.)"""
    regions, clauses = _regions(code, at), _clauses(code)
    targets = clauses.keys() if regions is None else {r.target for r in regions} & clauses.keys()
    return frozenset(clauses[target] for target in targets)


@of_code
def _clauses(code: CodeType) -> dict[int, str]:
    """Where the ``except`` and ``finally`` clauses of this code itself begin, and their kinds."""
    instructions = _instructions(code)
    begun = {i.argval for i in instructions if i.opname == "SETUP_FINALLY"}  # before Python 3.11
    begun |= {i.offset for i in instructions if i.opname == "PUSH_EXC_INFO"}
    found = {i.offset: _kind(instructions[n:]) for n, i in enumerate(instructions) if i.offset in begun}
    passed_on = {at for at, kind in found.items() if kind is _EXCEPT and _passes_on(code, instructions, at)}
    return {offset: _PASSES_ON if offset in passed_on else kind for offset, kind in found.items() if kind is not None}


def _kind(handler: list[dis.Instruction]) -> str | None:
    """Of which kind the clause is that begins there; None where it only exits a context manager, or forgets the name of an
    exception that was caught."""
    places = {i.offset: n for n, i in enumerate(handler)}
    at = 1 if handler[0].opname == "PUSH_EXC_INFO" else 0
    if handler[at].opname == "WITH_EXCEPT_START" or [i.opname for i in handler[at:]][:3] == _FORGETS:
        return None
    kind = _FINALLY
    while True:
        if handler[at].opname == "POP_TOP":
            return _EXCEPT  # `except:`
        n = next((n for n in range(at, len(handler)) if not handler[n].opname.startswith(_NAMES_A_CLASS)), at)
        if handler[n].opname not in _MATCHES:
            return kind  # none of the classes, and it goes on; or it is not of that form: `finally:`
        named = [i for i in handler[at:n] if i.opname != "DUP_TOP"]
        if any(i.opname not in ("LOAD_GLOBAL", "BUILD_TUPLE") for i in named):
            return _EXCEPT
        if not {str(i.argval) for i in named if i.opname == "LOAD_GLOBAL"} <= _NEVER_AN_OPERATORS:
            return _EXCEPT
        kind = _EXCEPT_OTHERS
        jump = next(i for i in handler[n:] if isinstance(i.argval, int) and "JUMP" in i.opname)
        at = places[jump.argval]


def _passes_on(code: CodeType, instructions: list[dis.Instruction], start: int) -> bool:
    """Whether all ways through the clause that begins there end where an exception is raised, and some where it is the one that
    it has caught."""
    places = {i.offset: n for n, i in enumerate(instructions)}
    ways, seen, raises_again = [places[start]], set[int](), False
    while ways:
        n = ways.pop()
        if n in seen:
            continue
        seen.add(n)
        i = instructions[n]
        if i.opname in _GIVES:
            return False
        raises_again = raises_again or (i.opname == "RAISE_VARARGS" and _raises_again(code, start, i))
        ways += [places[r.target] for r in _table(code) or () if r.start <= i.offset < r.end and r.target in places]
        if isinstance(i.argval, int) and _jumps(i) and i.argval in places:
            ways.append(places[i.argval])
        if i.opname not in ("RAISE_VARARGS", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE"):
            ways.append(n + 1)
    return raises_again


def _raises_again(code: CodeType, start: int, raises: dis.Instruction) -> bool:
    """Whether this ``raise`` is that of the exception that the clause has caught, by the name that it has there."""
    every = [i for i in dis.get_instructions(code) if start < i.offset < raises.offset]
    stored = [i.argval for i in every if i.opname == "STORE_FAST"]
    named = stored[0] if stored and stored.count(stored[0]) == 1 else None
    depth = 0
    while depth != raises.arg and every:
        i = every.pop()
        depth += dis.stack_effect(i.opcode, i.arg if i.opcode >= dis.HAVE_ARGUMENT else None, jump=False)
        if depth == raises.arg:
            return i.opname.startswith("LOAD_FAST") and i.argval == named
        if i.is_jump_target:
            break
    return not raises.arg


@functools.cache
def _managers(code: CodeType, at: int) -> tuple[tuple[str, ...], ...]:
    """How the context managers that are around this instruction are found: the instruction that loads a name, that name, and
    those of attributes; nothing where it cannot be told. (Before Python 3.11: all in this code.)"""
    regions = _regions(code, at)
    every = [*dis.get_instructions(code)]
    entered = [n for n, i in enumerate(every) if i.opname in _ENTERS]
    if regions is None:
        return tuple(path for n in entered for path in _named(every, n))
    begins = {i.offset: next((m.offset for m in every[n + 1 :] if m.opname != "CACHE"), -1) for n, i in enumerate(every)}
    places = {i.offset: n for n, i in enumerate(every)}
    found: list[tuple[str, ...]] = []
    for target in {r.target for r in regions if r.target in _with_handlers(code)}:
        start = min(r.start for r in _table(code) if r.target == target)
        mine = [offset for offset, after in begins.items() if after == start and every[places[offset]].opname in _ENTERS]
        found += _named(every, places[mine[0]]) if mine else [()]
    return tuple(found)


def _named(instructions: list[dis.Instruction], entered: int) -> list[tuple[str, ...]]:
    """How the expression begins whose value is entered there, if it is a name, or a call of one; or each of those of which it
    is one (``a if c else b``)."""
    ends = [entered]
    if instructions[entered].is_jump_target:
        jumps = [n for n, i in enumerate(instructions) if i.argval == instructions[entered].offset and _jumps(i)]
        if any(instructions[n].opname != "JUMP_FORWARD" for n in jumps):
            return [()]  # ``a or b``
        ends += jumps
    return [_begun(instructions, end) for end in ends]


def _jumps(i: dis.Instruction) -> bool:
    return i.opcode in dis.hasjrel or i.opcode in dis.hasjabs


def _begun(instructions: list[dis.Instruction], end: int) -> tuple[str, ...]:
    """How the expression begins that ends before this instruction."""
    depth, n = 0, end
    while depth != 1 and n > 0:
        n -= 1
        i = instructions[n]
        if i.opname == "CACHE":
            continue
        depth += dis.stack_effect(i.opcode, i.arg if i.opcode >= dis.HAVE_ARGUMENT else None, jump=False)
        if i.is_jump_target and depth != 1:
            return ()  # in the middle of it
    words = [i for i in instructions[n:end] if i.opname not in _SILENT]
    if depth != 1 or not words or words[0].opname not in _VARIABLES:
        return ()
    path = [words[0].opname, str(words[0].argval)]
    for i in words[1:]:
        if i.opname not in _ATTRIBUTES:
            break
        path.append(str(i.argval))
    return tuple(path) if len(path) == len(words) + 1 or words[-1].opname in _CALLS else ()


def _is_torchs(frame: FrameType, path: tuple[str, ...]) -> bool:
    """Whether what is found so in that frame is torch's, or an object of a class of torch's; or does nothing."""
    if not path:
        return False
    missing, (how, first, *rest) = object(), path
    own = {} if how == "LOAD_GLOBAL" else frame.f_locals
    found = next((scope[first] for scope in (own, frame.f_globals, vars(builtins)) if first in scope), missing)
    for name in rest:
        found = getattr(found, name, missing) if isinstance(found, ModuleType) else inspect.getattr_static(found, name, missing)
    if found is missing:
        return False
    kind = found if isinstance(found, type) or (callable(found) and hasattr(found, "__qualname__")) else type(found)
    module = getattr(kind, "__module__", "") or ""
    return module.split(".")[0] == "torch" or getattr(kind, "__qualname__", "") == "nullcontext" or _only_puts_back(found)


def _only_puts_back(found: object) -> bool:
    """Whether `contextmanager` has made it of a generator that does nothing of the user's after an exception: it has no
    clauses; or is a package's, and puts back what it has changed."""
    function = getattr(found, "__func__", found)
    generator = getattr(function, "__wrapped__", None)
    if getattr(function, "__code__", None) is not _MAKES_MANAGERS or type(generator) is not FunctionType:
        return False
    code, whose = generator.__code__, origin(generator.__code__.co_filename)
    if whose is USER:
        return not _clauses(code) and all(i.opname not in _WITHIN_MANAGERS for i in _instructions(code))
    return whose is LIBRARY and {*_clauses(code).values()} <= {_FINALLY, _PASSES_ON}


def _regions(code: CodeType, at: int) -> list[Private] | None:
    """The parts of the table of exceptions by which one that is raised at this instruction goes, the innermost first; None
    before Python 3.11."""
    left = _table(code)
    if left is None:
        return None
    left, found = [*left], []
    while (region := next((r for r in left if r.start <= at < r.end), None)) is not None:
        found.append(region)
        left.remove(region)
        at = region.target  # from the handler it goes on, unless that is a clause
    return found


@of_code
def _table(code: CodeType) -> Private:
    return getattr(dis.Bytecode(code), "exception_entries", None)


@of_code
def _with_handlers(code: CodeType) -> frozenset[int]:
    return frozenset(i.offset for i, after in pairwise(_instructions(code))
                     if i.opname == "PUSH_EXC_INFO" and after.opname == "WITH_EXCEPT_START")  # fmt: skip


def _instructions(code: CodeType) -> list[dis.Instruction]:
    return [i for i in dis.get_instructions(code) if i.opname not in _SILENT]
