"""What code and classes tell about themselves without being run: the names that code uses, the functions that a class is
made of, the slots of its instances, and whether a class is the user's."""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import re
import sys
import weakref
from collections.abc import Iterable, Iterator
from types import CellType, CodeType, FunctionType, MemberDescriptorType
from typing import Any, NamedTuple

import torch
import torch.distributions
import torch.utils.data

from .where import is_users

__all__ = ["LOOKUPS", "MISSING", "SPACES", "all_within", "asks_identity", "contents", "functions_of", "functions_with",
           "has_attributes", "is_users_class", "looks_around", "names_in", "set_at", "slots_of", "takes_parameters_only",
           "used_in", "words_in"]  # fmt: skip


class _Missing:
    def __repr__(self) -> str:
        return "<missing>"


MISSING: Any = _Missing()

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement, or by a C extension that does likewise

# Objects of torch's, of the standard library's or built in that are looked into like those of the user's classes.
_LOOKED_INTO = (
    torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler, torch.amp.autocast, torch.distributions.Distribution,
    torch.distributions.Transform, torch.utils.data.Dataset, contextlib.nullcontext, weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary, weakref.WeakSet, BaseException,
)  # fmt: skip
_OPAQUE = {"torch", "threading", "_thread", "io", "_io", "logging", "contextlib", "weakref", "asyncio",
           "typing", "collections.abc", "re", "os", "pathlib", "phonograph", "_abc", "abc", "numpy", "inspect",
           "importlib", "_frozen_importlib", "_frozen_importlib_external", "concurrent"}  # fmt: skip


def contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def all_within(code: CodeType) -> Iterator[CodeType]:
    """A code object, and those of the functions that it defines."""
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from all_within(const)


def names_in(code: CodeType, *, tuples: bool = True) -> set[str]:
    """The names that a code object uses, and the words that it may look something up by. (Among `tuples` are the names of
    keyword arguments in calls.)"""
    found = set(code.co_names)
    _add_words(code.co_consts, found, tuples)
    return found


def _add_words(constants: Iterable[Any], found: set[str], tuples: bool) -> None:
    for const in constants:
        if isinstance(const, CodeType):
            found |= names_in(const, tuples=tuples)
        elif isinstance(const, (tuple, frozenset)):
            if tuples:
                _add_words(const, found, tuples)
        elif isinstance(const, str) and const in sys.modules:
            found.add(const)
        elif isinstance(const, str) and all(part.isidentifier() for part in const.split(".")):
            found.update(const.split("."))  # also attrgetter("model.scale")
        elif isinstance(const, str) and "{" in const:
            found.update(re.findall(r"[^\W\d]\w*", const))  # "{config.scale}".format(...)


@functools.cache
def words_in(code: CodeType) -> frozenset[str]:
    """The words among its constants by which code may look something up (``getattr(package, "RATE")``)."""
    found: set[str] = set()
    for inner in all_within(code):
        _add_words([const for const in inner.co_consts if isinstance(const, str)], found, False)
    return frozenset(found)


class Used(NamedTuple):
    """What code does with names.

    `attributes` are those that it reads, or writes, of what has which name: `package.settings.rate` gives (package, settings)
    and (settings, rate); of what has no name, the result of a call, say, with "". `variables` are the global variables that it
    reads, assigns or deletes, and `sets` those of which it does the latter. `computes` says that it may read others by names
    that do not stand in it (`globals()[name]`), and `around` are the globals of which it may so read attributes: of
    `getattr(x, name)` it has x, of `vars(x.y)` x.y. It has "self" for a method's own object, and "" for all else.
    """

    attributes: frozenset[tuple[str, str]]
    variables: frozenset[str]
    sets: frozenset[str]
    computes: bool
    around: frozenset[str]


@functools.cache
def used_in(code: CodeType) -> Used:
    """What code and the functions that it defines do with names."""
    attributes, variables, sets, around = set[tuple[str, str]](), set[str](), set[str](), set[str]()
    computes = False
    last: Any
    for inner in all_within(code):
        last, asks, also = "", False, dict[str, str]()
        all_of_them = [*dis.get_instructions(inner)]
        instructions = [i for i in all_of_them if i.opname not in _SILENT]
        assigns = _ASSIGN if inner.co_name != "<module>" else (*_ASSIGN, "STORE_NAME", "DELETE_NAME")
        for n, i in enumerate(instructions):
            if i.opname in assigns:
                sets.add(i.argval)
            elif i.opname.startswith(_OF_GLOBALS):
                variables.add(i.argval)
            if i.opname.startswith(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR")) and i.argval in SPACES:
                computes = computes or not _one_of_space(instructions, n)
            if _goes_around(instructions, n):
                around.add(_first_argument([k for k in all_of_them if k.offset > i.offset]) if i.argval in _OF_ANY else "")
            if i.opname in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR", "IMPORT_FROM"):
                attributes.add((last, i.argval))
                last = last if i.opname == "IMPORT_FROM" else i.argval
            elif i.opname == "IMPORT_NAME" or i.opname.startswith((*_OF_GLOBALS, "LOAD_DEREF", "LOAD_FAST")):
                name = i.argval[-1] if isinstance(i.argval, tuple) else i.argval
                last, asks = also.get(name, name), asks or name in _BY_NAME
            elif i.opname == "LOAD_CONST" and asks and isinstance(i.argval, str):
                attributes.add((last, i.argval))  # getattr(package, "RATE", 1.0)
                last, asks = "", False
            else:
                if i.opname == "STORE_FAST" and last:
                    also[i.argval] = last
                last = last if i.opname.startswith("STORE_FAST") else ""
    return Used(frozenset(attributes), frozenset(variables | sets), frozenset(sets), computes, frozenset(around))


_OF_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_ASSIGN = ("STORE_GLOBAL", "DELETE_GLOBAL")
SPACES = frozenset({"globals", "f_globals", "__globals__"})  # by which code gets at a dictionary of global variables


def _one_of_space(instructions: list[dis.Instruction], n: int) -> bool:
    """Whether what the n-th instruction loads, a dictionary of globals or the function that gives one, is only used to look up
    one name that stands there. (In doubt it is not.)"""
    before, rest = instructions[n - 1 : n], instructions[n + 1 : n + 6]
    if rest and rest[0].opname.startswith("CALL"):
        rest = rest[1:]
    if rest and rest[0].opname == "CONTAINS_OP":
        return any(map(_is_word, before))
    if rest and rest[0].opname in ("LOAD_ATTR", "LOAD_METHOD") and rest[0].argval in ("get", "pop", "setdefault"):
        return _one_name_in_call(rest[1:])
    return any(map(_is_word, rest[:1])) and any("SUBSCR" in i.opname or i.argrepr == "[]" for i in rest[1:2])


def _is_word(i: dis.Instruction) -> bool:
    return i.opname == "LOAD_CONST" and isinstance(i.argval, str)


def set_at(code: CodeType, name: str) -> list[int]:
    """The lines on which code gives a value to an attribute, a global or a variable of an outer function of this name."""
    begins, line, found = dict(dis.findlinestarts(code)), 0, list[int]()
    for i in dis.get_instructions(code):
        line = begins.get(i.offset) or line
        if i.opname in ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF") and i.argval == name:
            found.append(line)
    return found


def read_at(code: CodeType, name: str) -> list[int]:
    """The lines on which code reads a variable, an attribute or an item of this name, its inner functions included."""
    found = list[int]()
    for inner in all_within(code):
        begins, line = dict(dis.findlinestarts(inner)), inner.co_firstlineno
        for i in dis.get_instructions(inner):
            line = begins.get(i.offset) or line
            loaded = i.argval if isinstance(i.argval, tuple) else (i.argval,)
            if i.opname.startswith("LOAD_") and name in loaded:
                found.append(line)
    return found


# By which code may read any entry of a parameter group, or hand on all of them.
_ENTRIES = frozenset({"lr", "weight_decay", "momentum", "betas", "items", "values", "keys", "get", "pop", "setdefault",
                      "update", "copy", "deepcopy", "dict", "vars", "__dict__", "__getitem__", "itemgetter",
                      "state_dict"})  # fmt: skip
_HANDED_ON = frozenset({"DICT_MERGE", "DICT_UPDATE", "STORE_SUBSCR"})  # (**group)


@functools.cache
def takes_parameters_only(code: CodeType) -> bool:
    """Whether code that takes an optimizer's parameter groups seems to want the parameters in them, and no other entry."""
    names = names_in(code)
    if "params" not in names or not names.isdisjoint(_ENTRIES):
        return False
    for inner in all_within(code):
        before = ""
        for instruction in dis.get_instructions(inner):
            name = instruction.opname
            subscript = name == "BINARY_SUBSCR" or (name == "BINARY_OP" and instruction.argrepr == "[]")
            if name in _HANDED_ON or (subscript and not before.startswith(("LOAD_CONST", "LOAD_SMALL_INT"))):
                return False
            before = name
    return True


@functools.cache
def asks_identity(code: CodeType) -> bool:
    """Whether code compares objects by identity (``a is b``), or asks for what stands for it."""
    inner = any(asks_identity(const) for const in code.co_consts if isinstance(const, CodeType))
    names = not {"id", "data_ptr", "is_set_to"}.isdisjoint(code.co_names)
    return inner or names or any(i.opname == "IS_OP" for i in dis.get_instructions(code))


_BY_NAME = frozenset({"getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller"})
# Functions by which code may read or write attributes that it does not name, and attributes that are such functions.
LOOKUPS = frozenset({"getattr", "setattr", "delattr", "vars", "dir", "eval", "exec", "__getattribute__", "__setattr__",
                     "__delattr__"})  # fmt: skip
_AROUND = frozenset({"vars", "dir", "eval", "exec", "copy", "deepcopy", "asdict", "astuple", "pickle", "inspect", "getmembers",
                     "getmembers_static", "getattr_static"})  # fmt: skip
_OF_ANY = frozenset({"getattr", "hasattr", "setattr", "delattr", "vars", "dir"})  # which are given an object first
_AROUND_ATTRIBUTES = frozenset({"__dict__", "__getattribute__", "__setattr__", "__delattr__", "__getstate__", "__reduce__",
                                "__reduce_ex__"})  # fmt: skip
_SILENT = frozenset({"CACHE", "PUSH_NULL", "PRECALL", "EXTENDED_ARG", "NOP"})


def looks_around(code: CodeType) -> bool:
    """Whether code may read or write attributes by names that do not stand in it: uses `vars`, or `getattr` and its like other
    than with a literal name. (Told by the instructions after the one that loads `getattr`; in doubt it does.)"""
    return bool(used_in(code).around)


def _goes_around(instructions: list[dis.Instruction], n: int) -> bool:
    """Whether the n-th instruction loads what attributes may be read by that are not named."""
    i = instructions[n]
    if not i.opname.startswith("LOAD_") or i.opname == "LOAD_CONST":
        return False
    if i.argval in _AROUND:
        return i.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    return i.argval in _AROUND_ATTRIBUTES or (i.argval in _BY_NAME and not _literal(instructions[n + 1 : n + 16]))


def _first_argument(following: list[dis.Instruction]) -> str:
    """What a function is given first, of which the call's instructions follow, as `Used.around` has it."""
    depth = end = 0
    for n, i in enumerate(following):
        depth += dis.stack_effect(i.opcode, i.arg if i.opcode >= dis.HAVE_ARGUMENT else None, jump=False)
        if depth == 1:
            end = n + 1
        if depth <= 0:
            return _named(following[:end]) if i.opname.startswith(("CALL", "PRECALL")) else ""
        if isinstance(i.argval, tuple) and i.opname.startswith("LOAD_FAST") and depth == len(i.argval):
            return _own_object(i.argval[0])  # both arguments are loaded at once
    return ""


def _named(loading: list[dis.Instruction]) -> str:
    loads = [i for i in loading if i.opname not in _SILENT]
    if not loads or loads[0].opname not in _LOADS or any(i.opname not in ("LOAD_ATTR", "LOAD_METHOD") for i in loads[1:]):
        return ""
    first, *rest = loads
    if first.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
        return ".".join(str(i.argval) for i in (first, *rest))
    return "" if rest else _own_object(first.argval)


def _own_object(name: str) -> str:
    return "self" if name in ("self", "cls") else ""


_LOADS = ("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME")


def _literal(following: list[dis.Instruction]) -> bool:
    """Whether these instructions load an object (but for `attrgetter`), a literal name, perhaps a default, and then call."""
    names = [i.opname for i in following]
    at = 0
    if names[:1] and names[0] in _LOADS:
        at = 1
        while names[at : at + 1] == ["LOAD_ATTR"]:
            at += 1
    return _one_name_in_call(following[at:])


def _one_name_in_call(following: list[dis.Instruction]) -> bool:
    """Whether these instructions load a literal name, perhaps a default, and then call."""
    names = [i.opname for i in following]
    default = names[1:2] != [] and names[1] in (*_LOADS, "LOAD_CONST")
    return any(map(_is_word, following[:1])) and any(name.startswith("CALL") for name in names[1 + default : 2 + default])


def functions_with(code: CodeType) -> list[FunctionType]:
    """All functions there are that run this code (but those that `gc.freeze` has put out of sight)."""
    return [f for f in gc.get_referrers(code) if type(f) is FunctionType and f.__code__ is code]


def functions_of(member: Any) -> list[Any]:
    """What runs when a member of a class is used: of a property, the getter, the setter and the deleter."""
    if isinstance(member, (staticmethod, classmethod)):
        return [member.__func__]
    if isinstance(member, property):
        return [f for f in (member.fget, member.fset, member.fdel) if f is not None]
    return [member] if isinstance(member, FunctionType) else []


def slots_of(kind: type) -> list[tuple[str, Any]]:
    """The attributes that a class itself keeps in slots: their names as written, and their descriptors."""
    slots = vars(kind).get("__slots__", ())
    slots = (slots,) if isinstance(slots, str) else tuple(slots)
    prefix = f"_{kind.__name__.lstrip('_')}"
    mangled = [(s, prefix + s if s.startswith("__") and not s.endswith("__") else s) for s in slots]
    found = [(name, vars(kind).get(m)) for name, m in mangled]
    return [(name, d) for name, d in found if isinstance(d, MemberDescriptorType)]


def is_users_class(kind: type) -> bool:
    """Whether a class is defined in the user's own code."""
    if _is_builtin(kind):
        return False
    module = sys.modules.get(kind.__module__)
    if module is None:  # loaded in a way of the user's own: its functions know their file
        return any(_is_users_code(f) for v in vars(kind).values() for f in functions_of(v))
    return is_users(getattr(module, "__file__", None) or "<string>")


def _is_users_code(f: Any) -> bool:
    return isinstance(f, FunctionType) and is_users(f.__code__.co_filename)


def has_attributes(kind: type) -> bool:
    """Whether objects of a class have attributes that a program's results may depend on."""
    if issubclass(kind, _LOOKED_INTO) or kind.__module__.startswith("numpy.polynomial") or kind.__name__ == "poly1d":
        return True
    return not _is_builtin(kind) and kind.__module__.partition(".")[0] not in _OPAQUE


def _is_builtin(kind: type) -> bool:
    return kind.__module__ == "builtins" and not kind.__flags__ & _HEAP_TYPE  # `exec` in a bare dict makes heap types
