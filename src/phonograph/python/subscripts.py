"""Which key code reads of a dictionary, right where it loads that: ``config["clip"]``, ``config.get("clip", 1.0)``,
``"clip" in config``.
"""

from __future__ import annotations

import dis
from collections.abc import Mapping
from types import CodeType

from .._torch.dynamic import Thing
from .bytecode import all_within
from .code_cache import of_code

__all__ = ["keys_after", "keys_of_variables"]

_SILENT = frozenset({"CACHE", "PUSH_NULL", "PRECALL", "EXTENDED_ARG", "NOP"})
_LOADS = frozenset({"LOAD_ATTR", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"})
_VARIABLES = ("LOAD_FAST", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")
_CALLS = frozenset({"CALL", "CALL_METHOD"})
_CLOSURES = frozenset({"LOAD_CLOSURE", "MAKE_CELL", "COPY_FREE_VARS"})  # which hand a variable on to a function within

_ALL_VARIABLES = frozenset({"locals", "vars", "eval", "exec"})  # by which code gets at its variables without naming them


@of_code
def keys_after(code: CodeType) -> Mapping[tuple[int, str], object]:
    """The key that is read of what an instruction loads, by the offsets of such instructions (and of their caches), and by the
    name that these load."""
    found: dict[tuple[int, str], object] = {}
    heard = [i for i in dis.get_instructions(code) if i.opname not in _SILENT]
    for n, i in enumerate(heard):
        if i.opname in _LOADS and (key := _key(heard[n + 1 : n + 5]) or _key_asked_for(heard, n)):
            found |= dict.fromkeys(((at, i.argval) for at in range(i.offset, heard[n + 1].offset, 2)), key[0])
    return found


def _key(after: list[dis.Instruction]) -> tuple[Thing, ...]:
    """The one key that these instructions read of what was loaded before; empty if there is none, or they do anything else."""
    if after and after[0].opname in ("LOAD_ATTR", "LOAD_METHOD") and after[0].argval == "get":
        default = len(after) > 2 and _is_constant(after[2])
        calls = after[2 + default : 3 + default]
        return (after[1].argval,) if _is_constant(after[1]) and calls and calls[0].opname in _CALLS else ()
    subscript = len(after) > 1 and (after[1].opname == "BINARY_SUBSCR" or after[1].argrepr == "[]")
    return (after[0].argval,) if subscript and _is_constant(after[0]) else ()


def _key_asked_for(heard: list[dis.Instruction], n: int) -> tuple[Thing, ...]:
    """The one key of which code asks whether it is in what the n-th instruction loads: ``"clip" in self.config``."""
    first = n
    while first and heard[first].opname == "LOAD_ATTR":
        first -= 1
    variable = heard[first].opname.startswith(_VARIABLES) and type(heard[first].argval) is str
    if not (variable and heard[n + 1 : n + 2] and heard[n + 1].opname == "CONTAINS_OP"):
        return ()
    straight = first > 0 and not any(i.is_jump_target for i in heard[first : n + 2])
    return (heard[first - 1].argval,) if straight and _is_constant(heard[first - 1]) else ()


def _is_constant(i: dis.Instruction) -> bool:
    return i.opname in ("LOAD_CONST", "LOAD_SMALL_INT")


@of_code
def keys_of_variables(code: CodeType) -> Mapping[str, frozenset[object] | None]:
    """The keys that code, and the functions that it defines, read of global variables and variables of closures; None for a
    variable with which they do anything else."""
    found: dict[str, set[object] | None] = {}
    for inner in all_within(code):
        keys = keys_after(inner)
        names = {*inner.co_names, *inner.co_freevars, *inner.co_cellvars}
        if not _ALL_VARIABLES.isdisjoint(inner.co_names):
            found |= dict.fromkeys((*inner.co_freevars, *inner.co_cellvars))
        for i in dis.get_instructions(inner):
            if type(i.argval) is not str or i.argval not in names or i.opname in _CLOSURES or "ATTR" in i.opname:
                continue
            if i.opname == "LOAD_METHOD" or (i.opname.startswith("LOAD_FAST") and i.argval not in inner.co_varnames):
                continue
            known = found.setdefault(i.argval, set())
            if (at := (i.offset, i.argval)) in keys and known is not None:
                known.add(keys[at])
            else:
                found[i.argval] = None
    return {name: None if keys is None else frozenset(keys) for name, keys in found.items()}
