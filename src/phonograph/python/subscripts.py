"""Which key code reads of a dictionary, right where it loads that: ``config["clip"]``, ``config.get("clip", 1.0)``,
``"clip" in config``. Which attribute it reads or sets of a `SimpleNamespace`: ``state.clip``, ``state.step += 1``. Of what is
of these classes nobody can hear what is read.
"""

from __future__ import annotations

import dis
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from types import CodeType, SimpleNamespace

from .._torch.dynamic import Thing
from .bytecode import all_within
from .code_cache import of_code

__all__ = ["ALL_VARIABLES", "TABLES", "keys_after", "keys_of_variables"]

TABLES = (dict, OrderedDict, defaultdict, SimpleNamespace)

_SILENT = frozenset({"CACHE", "PUSH_NULL", "PRECALL", "EXTENDED_ARG", "NOP"})
_LOADS = frozenset({"LOAD_ATTR", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"})
_VARIABLES = ("LOAD_FAST", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")
_OF_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR")
_CALLS = frozenset({"CALL", "CALL_METHOD"})
_CLOSURES = frozenset({"LOAD_CLOSURE", "MAKE_CELL", "COPY_FREE_VARS"})  # which hand a variable on to a function within

ALL_VARIABLES = frozenset({"locals", "vars", "eval", "exec"})  # by which code gets at its variables without naming them


_Keys = Mapping[tuple[int, str], object]


def keys_after(code: CodeType, kind: type) -> _Keys:
    """The key that is read of what an instruction loads, if that is of this kind, by the offsets of such instructions (and of
    their caches), and by the name that these load."""
    return _attributes_after(code) if kind is SimpleNamespace else _items_after(code)


@of_code
def _items_after(code: CodeType) -> _Keys:
    return _after(code, lambda heard, n: _key(heard[n + 1 : n + 5]) or _key_asked_for(heard, n))


@of_code
def _attributes_after(code: CodeType) -> _Keys:
    return _after(code, lambda heard, n: _attribute(heard[n + 1 : n + 3]))


def _after(code: CodeType, key_of: Callable[[list[dis.Instruction], int], tuple[Thing, ...]]) -> _Keys:
    found: dict[tuple[int, str], object] = {}
    heard = [i for i in dis.get_instructions(code) if i.opname not in _SILENT]
    for n, i in enumerate(heard):
        if i.opname in _LOADS and (key := key_of(heard, n)):
            found |= dict.fromkeys(((at, i.argval) for at in range(i.offset, heard[n + 1].offset, 2)), key[0])
    return found


def _attribute(after: list[dis.Instruction]) -> tuple[Thing, ...]:
    """The one attribute that these instructions read of what was loaded before, or set, or add something to."""
    if len(after) > 1 and after[0].opname in ("COPY", "DUP_TOP") and after[1].opname == "LOAD_ATTR":
        return (after[1].argval,)  # ``x.a += 1``, which sets it in the end
    return (after[0].argval,) if after and after[0].opname in _OF_ATTRIBUTES else ()


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


_OfVariables = Mapping[str, frozenset[object] | None]


def keys_of_variables(code: CodeType, kind: type) -> _OfVariables:
    """The keys that code, and the functions that it defines, read of global variables and variables of closures, if these are
    of this kind; None for a variable with which they do anything else."""
    return _attributes_of_variables(code) if kind is SimpleNamespace else _items_of_variables(code)


@of_code
def _items_of_variables(code: CodeType) -> _OfVariables:
    return _of_variables(code, dict)


@of_code
def _attributes_of_variables(code: CodeType) -> _OfVariables:
    return _of_variables(code, SimpleNamespace)


def _of_variables(code: CodeType, kind: type) -> _OfVariables:
    found: dict[str, set[object] | None] = {}
    for inner in all_within(code):
        keys = keys_after(inner, kind)
        names = {*inner.co_names, *inner.co_freevars, *inner.co_cellvars}
        if not ALL_VARIABLES.isdisjoint(inner.co_names):
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
