"""Whether code only compares a value that it gets, told from its instructions: `a.data_ptr() == b.data_ptr()`, a key of a
dictionary, an element of a set, `% 16`.

The value is followed on the stack of Python's interpreter, into the variables that it is assigned to, into tuples, and to who
has called the function that returns it. In doubt it is said to be used otherwise.
"""

from __future__ import annotations

import dis
from collections.abc import Sequence
from enum import Enum
from types import CodeType, FrameType

from .code_cache import of_code

__all__ = ["only_compares"]

_COMPARES = {"COMPARE_OP": 2, "IS_OP": 2, "CONTAINS_OP": 2, "BINARY_MODULO": 2, "BINARY_SUBSCR": 2, "DELETE_SUBSCR": 2,
             "STORE_SUBSCR": 3, "SET_ADD": 1, "POP_TOP": 1}  # fmt: skip  # and how many values each takes off
_OPERATORS = frozenset({"%", "[]"})
_TOP_ALONE = frozenset({"BINARY_SUBSCR", "DELETE_SUBSCR", "STORE_SUBSCR", "SET_ADD"})  # an index, key or element
_BY_KEY = frozenset({"add", "discard", "get", "setdefault", "hash", "bool"})
_SILENT = frozenset({"CACHE", "PRECALL", "EXTENDED_ARG", "NOP", "RESUME", "MAKE_CELL", "COPY_FREE_VARS", "GEN_START",
                     "KW_NAMES", "NOT_TAKEN"})  # fmt: skip
_JUMPS = {*dis.hasjrel, *dis.hasjabs}


class _Kind(Enum):
    OURS = "the value, or a tuple with it"


class _Fate(Enum):
    COMPARED, RETURNED, OTHER = "only compared", "compared, or returned", "used otherwise"


_OURS = _Kind.OURS
_Stack = list[_Kind | str | None]  # what is loaded by name has that name


def only_compares(frame: FrameType) -> bool:
    """Whether the result of the call that this frame makes now is only compared."""
    at: FrameType | None = frame
    while at is not None:
        fate = _fate(at.f_code, at.f_lasti)
        if fate is not _Fate.RETURNED:
            return fate is _Fate.COMPARED
        at = at.f_back
    return False


@of_code
def _known(code: CodeType) -> dict[int, _Fate]:
    return {}


def _fate(code: CodeType, call: int) -> _Fate:
    """What becomes of the result of the call at this offset."""
    known = _known(code)
    if call not in known:
        known[call] = _of_all(*_from(code, call))
    return known[call]


def _from(code: CodeType, call: int) -> tuple[list[dis.Instruction], list[tuple[int, str]]]:
    """The instructions of code, and where among them the call at this offset is: in Python 3.11 it is at any part of that."""
    every, found = list[dis.Instruction](), 0
    for i in dis.get_instructions(code):
        before = i.offset <= call
        if i.opname not in _SILENT:
            every.append(i)
        if before:
            found = len(every) - (i.opname != "PRECALL")
    return every, [(found, "")]


def _of_all(every: Sequence[dis.Instruction], begins: list[tuple[int, str]]) -> _Fate:
    """The same for what these instructions give: a call, or loads of a variable that has it."""
    fates, variables = {_Fate.COMPARED}, set[str]()
    for n, variable in begins:  # grows
        fate, assigned = _followed(every, n, variable)
        fates.add(fate)
        for name in assigned - variables:
            variables.add(name)
            begins += [(k, name) for k, i in enumerate(every) if _loads(i, name)]
    return next(fate for fate in (_Fate.OTHER, _Fate.RETURNED, _Fate.COMPARED) if fate in fates)


def _loads(i: dis.Instruction, name: str) -> bool:
    loads = i.opname.startswith("LOAD_FAST") or "_LOAD_FAST" in i.opname
    return loads and (name in i.argval if isinstance(i.argval, tuple) else i.argval == name)


def _followed(every: Sequence[dis.Instruction], begin: int, variable: str) -> tuple[_Fate, set[str]]:
    """What becomes of what the instruction `begin` leaves on the stack, and the variables that it is assigned to."""
    stack, assigned = _Stack(), set[str]()
    for n, i in enumerate(every):
        taken, given = _step(i, stack)
        if _OURS in taken:
            if i.opname.startswith("STORE_FAST"):
                names = i.argval if isinstance(i.argval, tuple) else (i.argval,)
                assigned |= {name for name, x in zip(names, reversed(taken), strict=False) if x is _OURS}
            elif i.opname in ("RETURN_VALUE", "RETURN_CONST"):
                return _Fate.RETURNED, assigned
            elif i.opname in ("BUILD_TUPLE", "COPY", "DUP_TOP", "SWAP", "ROT_TWO"):
                pass
            elif not _compares(i, taken):
                return _Fate.OTHER, assigned
        stack += given
        if n == begin:
            loaded = i.argval if isinstance(i.argval, tuple) else (i.argval,)
            if not variable:
                stack[-1:] = [_OURS]
            else:
                stack[-len(loaded) :] = [_OURS if name == variable else None for name in loaded][-len(given) :]
        if n >= begin and _OURS not in stack:
            return _Fate.COMPARED, assigned
        if n >= begin and i.opcode in _JUMPS:
            return _Fate.OTHER, assigned
    return _Fate.OTHER, assigned


def _compares(i: dis.Instruction, taken: _Stack) -> bool:
    """Whether an instruction that takes these values off, the topmost last, leaves nothing of the value."""
    if i.opname.startswith("CALL"):
        return not _BY_KEY.isdisjoint(x for x in taken if isinstance(x, str))
    if i.opname not in _COMPARES and not (i.opname == "BINARY_OP" and i.argrepr.rstrip("=") in _OPERATORS):
        return False
    return _OURS not in taken[:-1] or i.opname not in _TOP_ALONE


def _step(i: dis.Instruction, stack: _Stack) -> tuple[_Stack, _Stack]:
    """Take off what an instruction takes. Returns that, the topmost last, and what it leaves instead."""
    name, arg = i.opname, i.arg or 0
    effect = dis.stack_effect(i.opcode, i.arg if i.opcode >= dis.HAVE_ARGUMENT else None, jump=False)
    effect = -1 - arg if name == "CALL" else effect  # in Python 3.11, PRECALL has its share of that
    if name in ("COPY", "DUP_TOP"):
        stack += [None] * ((arg or 1) - len(stack))
        return [], [stack[-(arg or 1)]]
    if name in ("SWAP", "ROT_TWO"):
        deep = arg or 2
        stack[:0] = [None] * (deep - len(stack))
        stack[-1], stack[-deep] = stack[-deep], stack[-1]
        return [], []
    if name.startswith(("LOAD_ATTR", "LOAD_METHOD")):
        return _off(stack, 1), [str(i.argval)] * (1 + effect)
    if name.startswith(("LOAD_", "PUSH_")):
        return [], [str(i.argval)] + [None] * (effect - 1) if effect > 0 else []
    count = _COMPARES.get(name) or (-effect if name.startswith(("STORE_", "POP_", "RETURN_")) else 1 - effect)
    taken = _off(stack, max(count, 0))
    left: _Stack = [None] * (effect + max(count, 0))
    return taken, [_OURS] if name == "BUILD_TUPLE" and _OURS in taken else left


def _off(stack: _Stack, count: int) -> _Stack:
    taken = stack[len(stack) - count :] if count <= len(stack) else [*([None] * (count - len(stack))), *stack]
    del stack[max(0, len(stack) - count) :]
    return taken if count else []
