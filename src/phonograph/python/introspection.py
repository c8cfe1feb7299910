"""What functions, classes and objects tell about themselves without being run: the functions that a class is made of, the slots
of its instances, the dictionary of an object, and whether a class is the user's."""

from __future__ import annotations

import contextlib
import ctypes
import dis
import gc
import sys
import threading
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from functools import partial
from types import CellType, CodeType, FunctionType, GetSetDescriptorType, MemberDescriptorType, MethodType, ModuleType

import torch
import torch.distributions
import torch.utils.data

from .._torch.dynamic import Table, Thing
from .bytecode import all_within, has_instruction, names_in
from .code_cache import of_code
from .origin import is_ours, is_users

__all__ = ["MISSING", "asks_identity", "contents", "dictionary_of", "functions_of", "functions_with", "hands_on",
           "has_attributes", "is_anothers", "is_table", "is_users_class", "is_users_function", "own_dict", "slots_of",
           "table_of", "takes_parameters_only", "tells_its_end"]  # fmt: skip


class _Missing:
    def __repr__(self) -> str:
        return "<missing>"


MISSING = _Missing()

_PLAIN = (GetSetDescriptorType, MemberDescriptorType)
_dictionary = ctypes.pythonapi["PyObject_GenericGetDict"]
_dictionary.restype, _dictionary.argtypes = ctypes.py_object, (ctypes.py_object, ctypes.c_void_p)

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


_NEVER = ("builtins", "phonograph")
_WITHOUT_A_WORD = (torch.Stream, *filter(None, [getattr(torch, "Event", None)]))


def tells_its_end(kind: type) -> bool:
    """Whether an object of this class may be referred to weakly: it says so when it goes. Streams and events of a GPU take weak
    references, and leave them behind as torch 2.11 frees them."""
    return bool(kind.__weakrefoffset__) and not any(base in _WITHOUT_A_WORD for base in kind.__mro__)


def contents(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


# By which code may read any entry of a parameter group, or hand on all of them.
_ENTRIES = frozenset({"lr", "weight_decay", "momentum", "betas", "items", "values", "keys", "get", "pop", "setdefault",
                      "update", "copy", "deepcopy", "dict", "vars", "__dict__", "__getitem__", "itemgetter",
                      "state_dict"})  # fmt: skip
_SILENT = frozenset({"RESUME", "CACHE", "NOP", "EXTENDED_ARG", "PRECALL", "PUSH_NULL"})
_LOADS_FIRST = (["LOAD_FAST"], ["LOAD_FAST_BORROW"])
_HANDED_ON = frozenset({"DICT_MERGE", "DICT_UPDATE", "STORE_SUBSCR"})  # (**group)


@of_code
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


@of_code
def hands_on(code: CodeType) -> bool:
    """Whether all that a method does is to give an attribute of its object, or of one that this has: in a `__getattr__` the one
    that it is asked for."""
    ran = [i.opname for i in dis.get_instructions(code) if i.opname not in _SILENT]
    if code.co_name == "__getattr__":
        calls = [name for name in ran if name.startswith("CALL")]
        asks = [name for name in ran if name.startswith("LOAD_GLOBAL")]
        return code.co_names[:1] == ("getattr",) and len(calls) == len(asks) == 1 and all(map(_loads_or_returns, ran))
    return ran[:1] in _LOADS_FIRST and {*ran[1:-1]} == {"LOAD_ATTR"} and ran[-1] == "RETURN_VALUE"


def _loads_or_returns(name: str) -> bool:
    return name.startswith(("LOAD_FAST", "CALL")) or name in ("LOAD_GLOBAL", "LOAD_ATTR", "RETURN_VALUE")


@of_code
def asks_identity(code: CodeType) -> bool:
    """Whether code compares objects by identity (``a is b``), or asks for what stands for it."""
    inner = any(asks_identity(const) for const in code.co_consts if isinstance(const, CodeType))
    names = not {"id", "data_ptr", "is_set_to"}.isdisjoint(code.co_names)
    return inner or names or has_instruction(code, "IS_OP")


def functions_with(code: CodeType) -> list[FunctionType]:
    """All functions there are that run this code (but those that `gc.freeze` has put out of sight)."""
    return [f for f in gc.get_referrers(code) if type(f) is FunctionType and f.__code__ is code]


def functions_of(member: object) -> list[Thing]:
    """What runs when a member of a class is used: of a property, the getter, the setter and the deleter."""
    if isinstance(member, (staticmethod, classmethod)):
        return [member.__func__]
    if isinstance(member, property):
        return [f for f in (member.fget, member.fset, member.fdel) if f is not None]
    return [member] if isinstance(member, FunctionType) else []


def slots_of(kind: type) -> list[tuple[str, object]]:
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


def is_anothers(thing: ModuleType | type) -> bool:
    """Whether a Python module or a class is not the user's, nor ours."""
    if isinstance(thing, type):
        module: object = thing.__module__  # which code may set to anything
        return isinstance(module, str) and not is_users_class(thing) and module.partition(".")[0] not in _NEVER
    space = vars(thing)
    where = space.get("__file__") or next(iter(space.get("__path__") or ()), None)
    if where is None:
        return space.get("__name__") in sys.builtin_module_names and space.get("__name__") != "builtins"
    return not is_users(where) and not is_ours(where)


def _is_users_code(f: object) -> bool:
    return isinstance(f, FunctionType) and is_users(f.__code__.co_filename)


def is_users_function(f: object) -> bool:
    """Whether this is a function of the user's, or one of their methods bound to an object."""
    f = f.__func__ if type(f) is MethodType else f
    return type(f) is FunctionType and is_users(f.__code__.co_filename)


def has_attributes(kind: type) -> bool:
    """Whether objects of a class have attributes that a program's results may depend on."""
    if issubclass(kind, _LOOKED_INTO) or kind.__module__.startswith("numpy.polynomial") or kind.__name__ == "poly1d":
        return True
    return not _is_builtin(kind) and kind.__module__.partition(".")[0] not in _OPAQUE


def _is_builtin(kind: type) -> bool:
    return kind.__module__ == "builtins" and not kind.__flags__ & _HEAP_TYPE  # `exec` in a bare dict makes heap types


def dictionary_of(thing: object) -> Callable[[], Thing]:
    """A function that gives the dictionary in which an object has its attributes, whatever its class calls `__dict__`."""
    if issubclass(type(thing), threading.local):
        return partial(vars, thing)
    for base in type(thing).__mro__:
        if "__dict__" in base.__dict__:
            if type(base.__dict__["__dict__"]) not in _PLAIN:
                return partial(_dictionary, thing, None)
            break
    return partial(object.__getattribute__, thing, "__dict__")


def own_dict(thing: object) -> dict[str, Thing] | None:
    """An object's own attributes; None if it has no dictionary for them."""
    try:
        found = dictionary_of(thing)()
    except (AttributeError, TypeError):
        return None
    return found if isinstance(found, dict) else None


_TABLES = (dict, OrderedDict, defaultdict)


def is_table(thing: object) -> bool:
    """Whether this is a dictionary, and nothing but what it holds."""
    return type(thing) in _TABLES


def table_of(thing: Thing) -> Table | None:
    """The dictionary in which an object has its attributes, or which it is."""
    return thing if is_table(thing) else own_dict(thing)
