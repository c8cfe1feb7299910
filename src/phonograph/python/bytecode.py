"""What code does with names, told from its instructions: which variables and attributes it reads, what it imports, and where it
may get at some by names that do not stand in it.

In doubt it is said to do so. What an instruction is called differs from one version of Python to the next; how values are
pushed and taken off does not, so that the arguments of a call are told by that (`_arguments`).
"""

from __future__ import annotations

import dis
import inspect
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Set
from itertools import pairwise
from types import CodeType, NoneType
from typing import NamedTuple

from .code_cache import of_code

__all__ = ["ANY_KEY", "LOOKUPS", "MODULES", "SPACES", "Slight", "Used", "all_within", "asked_of_base", "asks_its_base",
           "catches", "compares_identity", "formats_any", "hands_out", "has_instruction", "items_set",
           "looks_around", "looks_around_itself", "matches", "names_in", "read_at", "set_at", "slight_use_in",
           "used_by_name", "used_in", "used_in_full", "uses_of_float", "uses_of_int", "uses_of_reductions",
           "uses_of_type", "words_in", "words_of"]  # fmt: skip

Instructions = list[dis.Instruction]

SPACES = frozenset({"globals", "f_globals", "f_locals", "f_builtins", "__globals__", "__builtins__"})
"""By which code gets at a dictionary of global variables."""
MODULES = frozenset({"import_module", "__import__", "resolve_name", "getmodule"})
"""By which it gets at a module, besides `sys.modules`."""
LOOKUPS = frozenset({"getattr", "hasattr", "setattr", "delattr", "vars", "dir", "eval", "exec", "__getattribute__",
                     "__setattr__", "__delattr__"})  # fmt: skip
"""Functions by which it may read or write attributes that it does not name, and attributes that are such functions."""
_BY_NAME = frozenset({"getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller"})
_AROUND = frozenset({"vars", "dir", "eval", "exec", "copy", "deepcopy", "asdict", "astuple", "pickle", "inspect", "getmembers",
                     "getmembers_static", "getattr_static"})  # fmt: skip
_AROUND_OF_MODULES = _AROUND - {"copy", "eval", "exec", "dir", "pickle", "inspect"} | {"dumps"}  # `x.eval()` is another thing
_OF_ANY = frozenset({"getattr", "hasattr", "setattr", "delattr", "vars", "dir"})  # which are given an object first
_AROUND_ATTRIBUTES = frozenset({"__dict__", "__getattribute__", "__setattr__", "__delattr__", "__getstate__", "__reduce__",
                                "__reduce_ex__"})  # fmt: skip

_OF_CLASSES = {"__getattribute__": 2, "__delattr__": 2, "__setattr__": 3}
"""Methods by which attributes are read, deleted and written, with how many arguments they are called on a class."""

_OF_FUNCTIONS = frozenset({"signature", "isfunction", "isclass", "ismethod", "isbuiltin", "iscoroutinefunction", "unwrap"})
"""What `inspect` tells of functions and classes, and of no attribute that the user gave an object."""

_WAYS_AROUND = _AROUND_ATTRIBUTES | _AROUND | _BY_NAME | {"dumps"}

_SILENT = frozenset({"CACHE", "PUSH_NULL", "PRECALL", "EXTENDED_ARG", "NOP", "COPY_FREE_VARS", "MAKE_CELL", "RESUME"})
_CALLS = frozenset({"CALL", "PRECALL", "CALL_FUNCTION", "CALL_METHOD"})  # with arguments by position
# All of these are there by then: Python 3.11 has taken them away when it comes to its `CALL`.
_GIVEN = frozenset({"PRECALL"}) if "PRECALL" in dis.opmap else _CALLS
_OF_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_LOCALS = ("LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
_ASSIGN = ("STORE_GLOBAL", "DELETE_GLOBAL")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR")
_JUMPS = {*dis.hasjrel, *dis.hasjabs}


def all_within(code: CodeType) -> Iterator[CodeType]:
    """A code object, and those of the functions that it defines."""
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from all_within(const)


def names_in(code: CodeType, *, tuples: bool = True) -> Set[str]:
    """The names that a code object uses, and the words that it may look something up by. (Among `tuples` are the names of
    keyword arguments in calls.)"""
    return (_names_in if tuples else _names_beside_tuples)(code).now()


def words_in(code: CodeType) -> Set[str]:
    """The words among its constants by which code may look something up (``getattr(package, "RATE")``)."""
    return _words_in(code).now()


class _Words(NamedTuple):
    """Names, and the words of these texts: what they are, depends on which modules there are."""

    names: frozenset[str]
    texts: frozenset[str]
    settled: frozenset[str]

    @staticmethod
    def of(names: Iterable[str], texts: Iterable[str]) -> _Words:
        """Of all that has one word only, it is known."""
        found = {text: _parts(text) for text in texts}
        settled = frozenset(names).union(text for text, parts in found.items() if parts == {text})
        open_ = frozenset(text for text, parts in found.items() if parts != {text})
        return _Words(settled, open_, settled.union(*(found[text] for text in open_)))

    def now(self) -> frozenset[str]:
        if any(map(sys.modules.__contains__, self.texts)):
            return self.names.union(*map(words_of, self.texts))
        return self.settled


@of_code
def _names_in(code: CodeType) -> _Words:
    within = [*all_within(code)]
    names = [name for inner in within for name in inner.co_names]
    return _Words.of(names, _texts([inner.co_consts for inner in within]))


@of_code
def _names_beside_tuples(code: CodeType) -> _Words:
    within = [*all_within(code)]
    return _Words.of([name for inner in within for name in inner.co_names], _strings_in(within))


@of_code
def _words_in(code: CodeType) -> _Words:
    return _Words.of((), _strings_in(all_within(code)))


def _strings_in(codes: Iterable[CodeType]) -> Iterator[str]:
    return (const for code in codes for const in code.co_consts if isinstance(const, str))


def _texts(constants: Iterable[object]) -> Iterator[str]:
    """The strings among constants, and within their tuples."""
    for const in constants:
        if isinstance(const, (tuple, frozenset)):
            yield from _texts(const)
        elif isinstance(const, str):
            yield const


def words_of(text: str) -> Set[str]:
    """The words of a string by which something may be looked up."""
    return {text} if text in sys.modules else _parts(text)


def _parts(text: str) -> set[str]:
    parts = re.split("[.:]", text)
    if all(part.isidentifier() for part in parts):
        return set(parts)  # also attrgetter("model.scale"), resolve_name("module:RATE")
    return set(re.findall(r"[^\W\d]\w*", text)) if "{" in text else set()  # "{config.scale}".format(...)


class Used(NamedTuple):
    """What code does with names.

    `variables` are the global variables that it reads, assigns or deletes, `sets` those of which it does the latter, and
    `asked` those that it looks up in `globals()` by names that stand there. `spaces` says that it does so in any other way, or
    in another's, `computes` that it may do so by names that do not stand in it (`globals()[name]`), and `modules` that it so
    gets at modules. `around` are the globals of which it may so read attributes: of `getattr(x, name)` it has x, of
    `vars(x.y)` x.y. It has "self" for a method's own object, and "" for all else. `bare` are those of `variables` with which
    it does something else than to read an attribute. `imports` are (how many levels up, name,
    what of it) of its `import` statements.
    """

    variables: frozenset[str]
    sets: frozenset[str]
    asked: frozenset[str]
    spaces: bool
    computes: bool
    modules: bool
    around: frozenset[str]
    bare: frozenset[str]
    imports: frozenset[tuple[int, str, tuple[str, ...]]]


@of_code
def used_in(code: CodeType) -> Used:
    """What code and the functions that it defines do with names."""
    found = [_Reading(inner) for inner in all_within(code)]
    sets = frozenset[str]().union(*(one.sets for one in found))
    return Used(
        sets.union(*(one.variables for one in found)),
        sets,
        frozenset().union(*(one.asked for one in found)),
        any(one.spaces for one in found),
        any(one.computes for one in found),
        any(one.modules for one in found),
        frozenset().union(*(one.around for one in found)),
        frozenset().union(*(one.bare for one in found)),
        frozenset().union(*(one.imports for one in found)),
    )


class _Reading:
    """Goes through the instructions of one code object."""

    def __init__(self, code: CodeType) -> None:
        self.imports = set[tuple[int, str, tuple[str, ...]]]()
        self.variables, self.sets, self.asked = set[str](), set[str](), set[str]()
        self.around, self.bare = set[str](), set[str]()
        self.spaces = self.computes = self.modules = False
        self._code = code
        self._all = [*dis.get_instructions(code)]
        assigns = _ASSIGN if code.co_name != "<module>" else (*_ASSIGN, "STORE_NAME", "DELETE_NAME")
        heard = [k for k, i in enumerate(self._all) if i.opname not in _SILENT]
        self._heard = [self._all[k] for k in heard]
        for n, (k, i) in enumerate(zip(heard, self._heard, strict=True)):
            if i.opname in assigns:
                self.sets.add(i.argval)
            elif i.opname.startswith(_OF_GLOBALS):
                self.variables.add(i.argval)
            if i.opname != "LOAD_CONST" and type(i.argval) is str:
                self._looks(n, k, i)
            elif type(i.argval) is str and i.argval in SPACES:  # getattr(f, "__globals__")
                self.spaces = self.computes = True
            if i.opname == "IMPORT_NAME":
                level, names = (x.argval for x in self._heard[n - 2 : n])
                self.imports.add((level, i.argval, tuple(names or ())))
            elif i.opname.startswith(_OF_GLOBALS) and not any(x.opname in _ATTRIBUTES for x in self._heard[n + 1 : n + 2]):
                self.bare.add(i.argval)

    def _looks(self, n: int, k: int, i: dis.Instruction) -> None:
        """Whether the instruction loads something by which more can be read than stands here."""
        name, rest = i.argval, self._all[k + 1 :]
        if not i.opname.startswith(("LOAD_", "IMPORT_FROM")):
            return
        if name in SPACES:
            word = "" if i.opname == "IMPORT_FROM" else _one_of_space(self._heard, n)
            self.computes = self.computes or not word
            if word and name == "globals":
                self.asked.add(word)
            else:
                self.spaces = True
        elif name in MODULES:
            given = _arguments(rest) or []
            self.modules = self.modules or not (given and _is_word(given[0]) and _is_dotted(given[0][0].argval))
        elif name == "modules" and not i.opname.startswith(_OF_GLOBALS + _LOCALS):
            called = _arguments(rest) == []  # `model.modules()`
            self.modules = self.modules or not (called or _one_of_space(self._heard, n))
        goes = _goes_around(i, rest)
        if goes is not None and not _forwards(self._code, i, rest):
            self.around.add(goes)


class Slight(NamedTuple):
    """Names of attributes by how little code does with them: it `counts` some up or down (``x.n += 1``), it `calls` what has
    some (``x.step()``), some it `sets`, and reads only what it has set before of the same object, if at all; and the `rest` it
    uses in any other way."""

    counts: frozenset[str]
    calls: frozenset[str]
    sets: frozenset[str]
    rest: frozenset[str]


@of_code
def slight_use_in(code: CodeType) -> Slight:
    """Of code and the functions that it defines."""
    counts, calls, sets, rest = set[str](), set[str](), set[str](), set(_tuples_and_words(code))
    for inner in all_within(code):
        heard = [i for i in dis.get_instructions(inner) if i.opname not in _SILENT]
        stored = set[int]()  # where what was counted is put back
        surely = set[tuple[str, str]]()  # what was set so far, in any case
        for n, i in enumerate(heard):
            if i.opname.startswith(("IMPORT_FROM", "LOAD_SUPER")):
                rest.add(i.argval)
            if i.opname not in _ATTRIBUTES or n in stored:
                continue
            of = _variable(inner, heard[n - 1]) if n else ""
            if i.opname == "STORE_ATTR":
                sets.add(i.argval)
                if of and not _may_be_skipped(inner, heard, n):
                    surely.add((of, i.argval))
            elif of and (of, i.argval) in surely and i.opname != "DELETE_ATTR":
                pass
            elif i.opname == "LOAD_METHOD" or (i.opname == "LOAD_ATTR" and _MARKED & (i.arg or 0)):
                calls.add(i.argval)
            elif _is_counted(heard[n - 1 : n + 5] if n else []):
                stored.add(n + 4)
                counts.add(i.argval)
            else:
                rest.add(i.argval)
    sets -= counts | calls | rest
    return Slight(frozenset(counts - rest), frozenset(calls - rest), frozenset(sets), frozenset(rest))


@of_code
def used_by_name(code: CodeType) -> frozenset[str]:
    """The names of attributes, global variables and items with which code, or a function that it defines, does more than to
    count or to set them, or to call what has them."""
    found = set[str]()
    for inner in all_within(code):
        heard = [i for i in dis.get_instructions(inner) if i.opname not in _SILENT]
        for n, i in enumerate(heard):
            counts = True
            if i.opname in _OF_GLOBALS:
                counts = _is_added_to(heard[n : n + 4]) or _is_handed_on(heard[n + 1 : n + 4])
            elif i.opname == "LOAD_ATTR" and not _MARKED & (i.arg or 0):
                counts = _is_counted(heard[n - 1 : n + 5] if n else [])
            elif i.opname == "LOAD_CONST" and type(i.argval) is str:
                counts = _is_item_counted(heard[n + 1 : n + 6])
            if not counts:
                found.add(i.argval)
    return frozenset(found)


def _is_added_to(around: Instructions) -> bool:
    """Whether these instructions, of which the first loads a global variable, add a number that stands there to it."""
    if len(around) < 4:
        return False
    loads, number, adds, back = around
    return _adds_constant(number, adds) and back.opname == "STORE_GLOBAL" and back.argval == loads.argval


def _is_handed_on(after: Instructions) -> bool:
    """Whether these instructions set an attribute or an item of a global variable to what was loaded before, which then stands
    there as well."""
    setting = [i for i in after[1:] if i.opname != "LOAD_CONST"][:1]
    return bool(setting) and after[0].opname in _OF_GLOBALS and setting[0].opname in ("STORE_ATTR", "STORE_SUBSCR")


def _is_item_counted(after: Instructions) -> bool:
    """Whether these instructions, which follow the load of a key, set its item, or add a number that stands there to it."""
    if after and after[0].opname == "STORE_SUBSCR":
        return True
    twice = [i for i in after[:2] if i.opname == "COPY"] or [i for i in after[:1] if i.opname == "DUP_TOP_TWO"]
    gets, number, adds = [*after[len(twice) : len(twice) + 3], *[None] * 3][:3]
    if not twice or gets is None or number is None or adds is None:
        return False
    return (gets.opname == "BINARY_SUBSCR" or gets.argrepr == "[]") and _adds_constant(number, adds)


def _adds_constant(number: dis.Instruction, adds: dis.Instruction) -> bool:
    known = number.opname.startswith(("LOAD_CONST", "LOAD_SMALL_INT")) and type(number.argval) is int
    return known and (adds.opname in ("INPLACE_ADD", "INPLACE_SUBTRACT") or adds.argrepr in ("+=", "-="))


@of_code
def used_in_full(code: CodeType) -> frozenset[str]:
    """The names of attributes and variables with which code, or a function that it defines, does anything else than to fill
    what they hold: to append to it (``x.losses.append(y)``), or to what it holds (``logs["loss"].append(y)``), or set
    an item (`items_set`)."""
    found = set(_tuples_and_words(code))
    for inner in all_within(code):
        every = [*dis.get_instructions(inner)]
        heard = [i for i in every if i.opname not in _SILENT]
        for n, i in enumerate(heard):
            if i.opname.startswith((*_ATTRIBUTES, *_ANY_VARIABLE)) and not _is_filled(every, heard, n):
                found.update(i.argval if isinstance(i.argval, tuple) else (i.argval,))
    return frozenset(found)


_ANY_VARIABLE = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_SUPER", "STORE_GLOBAL",
                 "STORE_NAME", "STORE_DEREF", "DELETE_", "IMPORT_")  # fmt: skip
_LOADS = ("LOAD_CONST", "LOAD_SMALL_INT", "LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL")


def _is_filled(every: Instructions, heard: Instructions, n: int) -> bool:
    """Whether all that is done with what the n-th instruction that is `heard`, of `every` one, loads is to append to it, or to
    what it holds, or to set an item."""
    if _item_set(heard, n):
        return True
    if not _may_be_filled(heard[n]):
        return False
    while True:
        after = heard[n + 1 : n + 2]
        if after and after[0].opname in ("LOAD_ATTR", "LOAD_METHOD") and after[0].argval == "append":
            return len(_arguments([i for i in every if i.offset > after[0].offset]) or ()) == 1
        n = _after_a_key(heard, n + 1)
        if not (heard[n : n + 1] and (heard[n].opname == "BINARY_SUBSCR" or heard[n].argrepr == "[]")):
            return False


def _may_be_filled(i: dis.Instruction) -> bool:
    return i.opname.startswith("LOAD_") and i.opname not in ("LOAD_METHOD", "LOAD_SUPER_ATTR")


@of_code
def hands_out(code: CodeType) -> frozenset[str]:
    """The names of attributes and variables with which code, or a function that it defines, does anything else than to work out
    a number of what they hold, to decide by that or to put it back there, and to call them: so other code may get it."""
    found = set(_tuples_and_words(code))
    for inner in all_within(code):
        every = [*dis.get_instructions(inner)]
        for n, i in enumerate(every):
            if i.opname.startswith(_ANY_VARIABLE) or (i.opname == "LOAD_ATTR" and not _stays(every, n)):
                found.update(i.argval if isinstance(i.argval, tuple) else (i.argval,))
    return frozenset(found)


_NOTHING = _SILENT - {"PUSH_NULL"}
_ANOTHER = (*_LOADS, "PUSH_NULL")
_CONDITIONS = ("POP_JUMP", "TO_BOOL", "UNARY_NOT")


def _stays(every: Instructions, n: int) -> bool:
    """Whether code keeps to itself the attribute that the n-th of these instructions loads: followed from one to the next, with
    how many values lie above it."""
    if _MARKED & (every[n].arg or 0):
        return True
    above = 0
    for k, i in enumerate(every[n + 1 :], n + 1):
        if i.is_jump_target:
            return False
        if i.opname in _NOTHING:
            continue
        if i.opname.startswith(_CONDITIONS) and not above:
            return True
        if i.opname == "COMPARE_OP" and above < 2:
            return True
        if i.opname == "STORE_ATTR":
            return above == 1 and i.argval == every[n].argval and _is_of_the_same(every, n, k)
        if i.opname == "CALL_FUNCTION_EX" and above:  # x.step(*args, **kwargs)
            return True
        if i.opname.startswith(_ANOTHER) or (above and above >= _takes(i)):
            above += dis.stack_effect(i.opcode, i.arg)
        elif i.opname.startswith(("BINARY_", "INPLACE_")) and (above > 1 or not _looks_up(i)):
            above = max(above - 1, 0)
        elif (i.opname == "ROT_TWO" or (i.opname == "SWAP" and i.arg == 2)) and above < 2:
            above = 1 - above
        else:
            return False
    return False


def _takes(i: dis.Instruction) -> float:
    """How many values some instructions take, and all others more than there are."""
    if i.opname == "BUILD_MAP":
        return 2 * (i.arg or 0)
    return {"LOAD_ATTR": 1, "LOAD_METHOD": 1, "DICT_MERGE": 2}.get(i.opname, math.inf)


def _is_of_the_same(every: Instructions, loads: int, stores: int) -> bool:
    """Whether an attribute is set of the object of which it was loaded."""
    of, back = ([i for i in every[:at] if i.opname not in _NOTHING][-1] for at in (loads, stores))
    twice = of.opname in ("COPY", "DUP_TOP") and back.opname in ("SWAP", "ROT_TWO")
    return twice or (of.opname.startswith("LOAD_FAST") and back.opname.startswith("LOAD_FAST") and of.argval == back.argval)


def _looks_up(i: dis.Instruction) -> bool:
    return i.opname == "BINARY_SUBSCR" or i.argrepr == "[]"


ANY_KEY = object()


@of_code
def items_set(code: CodeType) -> Mapping[str, frozenset[object]]:
    """The keys of items that code, or a function that it defines, sets of what attributes and variables hold, by the names of
    these. `ANY_KEY` is among them for a key that is no constant."""
    found: dict[str, set[object]] = {}
    for inner in all_within(code):
        heard = [i for i in dis.get_instructions(inner) if i.opname not in _SILENT]
        for n, i in enumerate(heard):
            if i.opname.startswith((*_ATTRIBUTES, *_ANY_VARIABLE)) and (key := _item_set(heard, n)):
                found.setdefault(i.argval, set()).update(key)
    return {name: frozenset(keys) for name, keys in found.items()}


def _item_set(heard: Instructions, n: int) -> tuple[object, ...]:
    """The key of the item that is set of what the n-th of these instructions loads; empty if anything else is done with it."""
    end = _after_a_key(heard, n + 1) if _may_be_filled(heard[n]) else len(heard)
    if not heard[end : end + 1] or heard[end].opname != "STORE_SUBSCR":
        return ()
    return (heard[n + 1].argval if heard[n + 1].opname in ("LOAD_CONST", "LOAD_SMALL_INT") else ANY_KEY,)


def _after_a_key(heard: Instructions, n: int) -> int:
    """Where the instructions end that begin there, if they load one value, an attribute of a variable, say."""
    if not heard[n : n + 1] or not heard[n].opname.startswith(_LOADS) or isinstance(heard[n].argval, tuple):
        return len(heard)
    n += 1
    while heard[n : n + 1] and heard[n].opname == "LOAD_ATTR" and not _MARKED & (heard[n].arg or 0):
        n += 1
    return n


def _variable(code: CodeType, loading: dis.Instruction) -> str:
    """The local variable that this loads alone, if it is always the same object."""
    loads = loading.opname.startswith(("LOAD_FAST", "STORE_FAST_LOAD_FAST")) and "CLEAR" not in loading.opname
    name = (loading.argval[-1] if isinstance(loading.argval, tuple) else loading.argval) if loads else ""
    return name if name in code.co_varnames[: code.co_argcount] and name not in _assigned(code) else ""


@of_code
def _assigned(code: CodeType) -> frozenset[str]:
    """The local variables to which code assigns, or which it deletes."""
    found = set[str]()
    for i in dis.get_instructions(code):
        if i.opname.startswith(("STORE_FAST", "DELETE_FAST")):
            names = i.argval if isinstance(i.argval, tuple) else (i.argval,)
            found.update(names[:1] if i.opname.startswith("STORE_FAST_LOAD") else names)
    return frozenset(found)


def _may_be_skipped(code: CodeType, heard: Instructions, n: int) -> bool:
    """Whether code may come by what follows an instruction without that."""
    at = heard[n].offset
    jumps = any(i.opcode in _JUMPS and i.argval > at for i in heard[:n])
    return jumps or bool(getattr(code, "co_exceptiontable", b"")) or any(i.opname.startswith("SETUP_") for i in heard[:n])


_MARKED = 1 if sys.version_info >= (3, 12) else 0  # the bit by which LOAD_ATTR says that it loads what is called


def _tuples_and_words(code: CodeType) -> set[str]:
    """(Whatever modules there are: a text may be the name of one.)"""
    return {word for text in _texts([inner.co_consts for inner in all_within(code)]) for word in (text, *_parts(text))}


def _is_counted(around: Instructions) -> bool:
    """Whether these instructions, of which the second loads an attribute, add a number that stands there to it."""
    if len(around) < 6 or any(i.is_jump_target for i in around[1:]):
        return False
    twice, _, number, adds, swap, back = around
    return (
        twice.opname in ("COPY", "DUP_TOP")
        and _adds_constant(number, adds)
        and swap.opname in ("SWAP", "ROT_TWO")
        and back.opname == "STORE_ATTR"
        and back.argval == around[1].argval
    )


def _one_of_space(instructions: Instructions, n: int) -> str:
    """The one name that stands there by which something is looked up in what the n-th instruction loads: a dictionary, or the
    function that gives one. "" if it is used in any other way. (In doubt it is.)"""
    begin, rest = n, instructions[n + 1 : n + 6]
    while begin and instructions[begin].opname in _ATTRIBUTES:  # ("name" in sys.modules)
        begin -= 1
    before = instructions[begin - 1 : begin]
    if rest and rest[0].opname.startswith("CALL"):
        rest = rest[1:]
    if rest and rest[0].opname == "CONTAINS_OP":
        return str(before[0].argval) if _is_word(before) and not instructions[begin].is_jump_target else ""
    if rest and rest[0].opname in ("LOAD_ATTR", "LOAD_METHOD") and rest[0].argval in ("get", "pop", "setdefault"):
        word, names = rest[1:2], [i.opname for i in rest[1:]]
        default = names[1:2] != [] and names[1].startswith((*_LOCALS, *_OF_GLOBALS, "LOAD_CONST", "LOAD_SMALL_INT"))
        called = any(name.startswith("CALL") for name in names[1 + default : 2 + default])
        return str(word[0].argval) if called and _is_word(word) else ""
    looked_up = any("SUBSCR" in i.opname or i.argrepr == "[]" for i in rest[1:2])
    return str(rest[0].argval) if looked_up and _is_word(rest[:1]) else ""


def _is_word(loading: Instructions) -> bool:
    return len(loading) == 1 and loading[0].opname == "LOAD_CONST" and isinstance(loading[0].argval, str)


def _is_dotted(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def looks_around(code: CodeType) -> bool:
    """Whether code may read or write attributes by names that do not stand in it: uses `vars`, or `getattr` and its like other
    than with a literal name."""
    return _names_a_way_around(code) and bool(used_in(code).around)


_FORMATS = frozenset({"format", "format_map", "vformat", "Formatter"})


@of_code
def formats_any(code: CodeType) -> bool:
    """Whether code may format by a text that does not stand in it, and that says which attributes are read. (The words of one
    that does are among its names.)"""
    return any(_formats_another(inner) for inner in all_within(code) if not _FORMATS.isdisjoint(inner.co_names))


def _formats_another(code: CodeType) -> bool:
    before, texts = list[dis.Instruction](), _texts_kept(code)
    for i in dis.get_instructions(code):
        before = [] if i.is_jump_target else before
        if i.opname != "LOAD_CONST" and type(i.argval) is str and i.argval in _FORMATS:
            kept = bool(before) and before[0].opname.startswith("LOAD_FAST") and before[0].argval in texts
            if not (kept or _is_word(before)):
                return True
        before = before if i.opname in _SILENT else [i]
    return False


def _texts_kept(code: CodeType) -> set[object]:
    """The local variables that hold texts which stand in the code, and nothing else."""
    gathered = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    arguments = code.co_argcount + code.co_kwonlyargcount + gathered
    others, kept = set[object](code.co_varnames[:arguments]), set[object]()
    for before, i in pairwise(dis.get_instructions(code)):
        if i.opname == "STORE_FAST" and _is_word([before]) and not i.is_jump_target:
            kept.add(i.argval)
        elif i.opname.startswith("STORE_FAST"):
            others.update(i.argval if isinstance(i.argval, tuple) else (i.argval,))
    return kept - others


@of_code
def looks_around_itself(code: CodeType) -> bool:
    """Whether what code may read of attributes that it does not name is of its `self`."""
    around, inner = used_in(code).around, [one for one in all_within(code) if one is not code]
    if around != {""}:
        return around == {"self"}
    loads = [(before, i) for before, i in pairwise(dis.get_instructions(code)) if i.argval == "__dict__"]
    others = names_in(code) & (_WAYS_AROUND - {"__dict__"}) or any("__dict__" in names_in(one) for one in inner)
    return not others and all(_variable(code, before) == "self" and not i.is_jump_target for before, i in loads)


@of_code
def asks_its_base(code: CodeType) -> bool:
    """Whether this is a `__getattribute__` that asks for attributes past those of classes by ``super()`` alone: of an object of
    its own class, then."""
    inner = [one for one in all_within(code) if one is not code]
    if code.co_name != _GETS or _GETS in words_in(code) or any(_GETS in one.co_names for one in inner):
        return False
    every = [*dis.get_instructions(code)]
    return all(_is_of_super(every[: n + 1]) for n, i in enumerate(every) if i.argval == _GETS)


@of_code
def asked_of_base(code: CodeType) -> frozenset[str] | None:
    """The names for which a `__getattribute__` asks its base besides that for which it is asked. None if they are not known: if
    it asks for all attributes, say, but to look up a name among them."""
    every = [i for i in dis.get_instructions(code) if i.opname not in _SILENT]
    if not asks_its_base(code) or len([*all_within(code)]) > 1 or not _asks_as_asked(code, every):
        return None
    looks_up = all(_names_a_key(every[n + 1 :]) for n, i in enumerate(every) if i.argval == "__dict__")
    texts = frozenset(i.argval for i in every if i.opname == "LOAD_CONST" and type(i.argval) is str)
    return texts - {"__dict__"} if looks_up else None


def _asks_as_asked(code: CodeType, every: Instructions) -> bool:
    """Whether each name for which it asks its base is that for which it is asked, or a constant."""
    asked = code.co_varnames[1] if code.co_argcount == 2 else None
    if any(i.opname.startswith("STORE") and i.argval == asked for i in every):
        return False
    what = [every[n + 1 : n + 3] for n, i in enumerate(every) if i.argval == _GETS]
    return all(call.opname in _CALLS and _is_constant_or(asked, name) for name, call in what)


def _is_constant_or(variable: str | None, loads: dis.Instruction) -> bool:
    return loads.opname == "LOAD_CONST" or (loads.opname.startswith("LOAD_FAST") and loads.argval == variable)


def _names_a_key(after: Instructions) -> bool:
    """Whether of the dictionary that is asked for here, code only looks up one key that it names."""
    gets, key = next(((i, key) for i, key in pairwise(after) if i.opname not in _CALLS), (None, None))
    named = gets is not None and gets.opname.startswith(("LOAD_METHOD", "LOAD_ATTR")) and gets.argval == "get"
    return named and key is not None and key.opname == "LOAD_CONST" and type(key.argval) is str


_GETS = "__getattribute__"


def _is_of_super(until: Instructions) -> bool:
    """Whether the last of these instructions loads an attribute of what ``super()`` gives, without arguments."""
    i = until[-1]
    if i.opname.startswith("LOAD_SUPER"):
        return not (i.arg or 0) & 2
    called = False
    for before in reversed(until[:-1]):
        if i.is_jump_target or (called and before.opname not in _SILENT):
            return called and not i.is_jump_target and before.argval == "super"
        called = called or (before.opname.startswith("CALL") and not before.arg)
        if not called and before.opname not in _SILENT:
            return False
        i = before
    return False


@of_code
def _names_a_way_around(code: CodeType) -> bool:
    within = [*all_within(code)]
    named = (names for c in within for names in (c.co_names, c.co_varnames, c.co_cellvars, c.co_freevars))
    return any(not _WAYS_AROUND.isdisjoint(names) for names in named)


def _goes_around(i: dis.Instruction, following: Instructions) -> str | None:
    """Of what attributes may be read, by names that do not stand here, with what an instruction loads: as `Used.around` has it.
    None if that is no way to read any."""
    name = i.argval
    if name in _OF_CLASSES:  # object.__setattr__(x, "name", value), as dataclasses do that are frozen
        of_class = _arguments(following) or []
        return None if len(of_class) == _OF_CLASSES[name] and _is_word(of_class[1]) else ""
    if name in _AROUND_ATTRIBUTES or (i.opname == "IMPORT_FROM" and name in (_AROUND | _BY_NAME)):
        return ""
    if name in _AROUND:
        if i.opname.startswith(("LOAD_ATTR", "LOAD_METHOD")):  # inspect.getmembers(x), builtins.vars(x)
            return "" if name in _AROUND_OF_MODULES and _arguments(following) else None
        if not i.opname.startswith(_OF_GLOBALS) or (name == "inspect" and _asks_of_functions(following)):
            return None
    elif name == "dumps":
        return "" if _arguments(following) else None
    elif name not in _BY_NAME:
        return None
    given = _arguments(following)
    if not given or (name in _BY_NAME and _is_literal(name, [*map(_is_word, given)])):
        return None if given else ""
    return _named(given[0]) if name in _OF_ANY else ""


def _asks_of_functions(following: Instructions) -> bool:
    asked = next((i for i in following if i.opname not in _SILENT), None)
    return asked is not None and asked.opname in ("LOAD_ATTR", "LOAD_METHOD") and asked.argval in _OF_FUNCTIONS


def _forwards(code: CodeType, i: dis.Instruction, following: Instructions) -> bool:
    """Whether this is `getattr(x, name)` in a ``__getattr__(self, name)``, the argument as it was given: whoever reads such an
    attribute names it."""
    if i.argval != "getattr" or code.co_name != "__getattr__" or code.co_argcount != 2:
        return False
    if code.co_varnames[1] in _assigned(code):
        return False
    given = _arguments(following) or []
    last = given[1] if len(given) >= 2 else []
    return len(last) == 1 and last[0].opname.startswith("LOAD_FAST") and _variable_loaded(last[0]) == code.co_varnames[1]


def _variable_loaded(loading: dis.Instruction) -> str:
    """The variable that is loaded, or the last of two."""
    return str(loading.argval[-1] if isinstance(loading.argval, tuple) else loading.argval)


def _is_literal(name: str, words: list[bool]) -> bool:
    """Whether all names stand there by which something is looked up, going by which arguments are words."""
    return all(words) if name == "attrgetter" else words[0] if name == "methodcaller" else words[1:2] == [True]


def _arguments(following: Instructions) -> list[Instructions] | None:
    """What a function is given that has just been loaded, and which these instructions follow: for each argument those that
    load it. None if it is handed on itself, or is not called with arguments by position."""
    depth, done = 0, list[tuple[dis.Instruction, int]]()  # how many values are there besides
    for n, i in enumerate(following):
        if i.opname == "PUSH_NULL" and not done:
            continue
        if i.opname in _GIVEN and i.arg == depth:
            return _split(done, depth)
        if i.opcode in _JUMPS or (n and i.is_jump_target):
            return None
        depth += dis.stack_effect(i.opcode, i.arg if i.opcode >= dis.HAVE_ARGUMENT else None, jump=False)
        if depth < 0:
            return None
        done.append((i, depth))
    return None


def _split(done: list[tuple[dis.Instruction, int]], count: int) -> list[Instructions]:
    """Those instructions that load each of so many values, given with how many values there are after each."""
    if not count:
        return []
    begins = [0, *(1 + max((k for k, (_, depth) in enumerate(done) if depth <= n), default=-1) for n in range(1, count))]
    ends = [*begins[1:], len(done)]
    parts = [[i for i, _ in done[a:b] if i.opname not in _SILENT] for a, b in zip(begins, ends, strict=True)]
    return [part or parts[k + 1][:1] for k, part in enumerate(parts)]  # (two variables may be loaded at once)


def _named(loading: Instructions) -> str:
    """What these instructions load, as `Used.around` has it."""
    if not loading or any(i.opname not in ("LOAD_ATTR", "LOAD_METHOD") for i in loading[1:]):
        return ""
    first, *rest = loading
    if first.opname.startswith(_OF_GLOBALS):
        return ".".join(str(i.argval) for i in loading)
    if rest or not first.opname.startswith(_LOCALS):
        return ""
    name = first.argval[0] if isinstance(first.argval, tuple) else first.argval
    return "self" if name in ("self", "cls") else ""


@of_code
def uses_of_float(code: CodeType) -> frozenset[str]:
    """What code, or a function that it defines, does with Python's `float`: "calls" it, "annotates" a function with it, "other"
    things."""
    return _uses_of("float", code)


@of_code
def uses_of_int(code: CodeType) -> frozenset[str]:
    """The same of `int`."""
    return _uses_of("int", code)


@of_code
def uses_of_type(code: CodeType) -> frozenset[str]:
    """The same of `type`."""
    return _uses_of("type", code)


@of_code
def uses_of_reductions(code: CodeType) -> dict[str, frozenset[str]]:
    """The same of `sum`, `max` and `min`."""
    return {name: _uses_of(name, code) for name in ("sum", "max", "min")}


def _uses_of(name: str, code: CodeType) -> frozenset[str]:
    found = set[str]()
    for inner in all_within(code):
        every = [*dis.get_instructions(inner)] if name in inner.co_names else []
        for n, i in enumerate(every):
            if i.argval != name or not i.opname.startswith((*_OF_GLOBALS, *_ASSIGN, "IMPORT_FROM")):
                continue
            calls = i.opname in _OF_GLOBALS and _arguments(every[n + 1 :]) is not None
            found.add("calls" if calls else "annotates" if _annotates(inner, every[n:]) else "other")
    return frozenset(found)


def _annotates(code: CodeType, loading: Instructions) -> bool:
    """Whether the first of these instructions loads something for the annotations of a function that is defined next."""
    if code.co_name == "__annotate__":
        return True
    making = next((n for n, i in enumerate(loading) if not i.opname.startswith(_EXPRESSIONS)), len(loading))
    last = [i for i in loading[making:] if i.opname not in _SILENT][:2]
    told = [i.arg for i in last if i.opname in ("MAKE_FUNCTION", "SET_FUNCTION_ATTRIBUTE")]
    return bool(last) and last[0].opname == "MAKE_FUNCTION" and any(_ANNOTATED & (arg or 0) for arg in told)


_ANNOTATED = 4  # among the flags of a function that is made
_EXPRESSIONS = ("LOAD_", "BUILD_", "BINARY_", "CACHE", "EXTENDED_ARG", "PUSH_NULL")


_CATCHING = ("CHECK_EXC_MATCH", "CHECK_EG_MATCH", "JUMP_IF_NOT_EXC_MATCH", "SETUP_FINALLY", "MATCH_")


@of_code
def catches(code: CodeType) -> bool:
    """Whether code may go on where something was not there: after an exception (but for `with`), or in a `match`."""
    for inner in all_within(code):
        instructions = [*dis.get_instructions(inner)]
        for i, after in zip(instructions, [*instructions[1:], None], strict=True):
            bare = i.opname == "PUSH_EXC_INFO" and after is not None and after.opname == "POP_TOP"
            if bare or i.opname.startswith(_CATCHING):
                return True
    return False


@of_code
def compares_identity(code: CodeType) -> bool:
    """Whether code asks which object something is (`a is b`), but for `None`, `True` and `False`."""
    for inner in all_within(code):
        instructions = [*dis.get_instructions(inner)]
        for before, i in pairwise(instructions):
            if i.opname == "IS_OP" and not (before.opname == "LOAD_CONST" and type(before.argval) in (bool, NoneType)):
                return True
    return False


@of_code
def matches(code: CodeType) -> bool:
    """Whether code reads attributes of what it matches by their places (``case State(a, b)``)."""
    return any(has_instruction(inner, "MATCH_CLASS") for inner in all_within(code))


def has_instruction(code: CodeType, name: str) -> bool:
    """Whether there is one of this name in a code object itself."""
    opcode = dis.opmap.get(name)
    return opcode is not None and opcode in code.co_code[::2]  # (where inline caches are zeros)


def set_at(code: CodeType, name: str) -> list[int]:
    """The lines on which code gives a value to an attribute, an item, a global or a variable of an outer function of this
    name."""
    begins, line, found, before = dict(dis.findlinestarts(code)), 0, list[int](), None
    for i in dis.get_instructions(code):
        line = begins.get(i.offset) or line
        item = i.opname == "STORE_SUBSCR" and before == name
        if item or (i.opname in ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF") and i.argval == name):
            found.append(line)
        before = i.argval if i.opname != "CACHE" else before
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
