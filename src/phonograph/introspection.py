"""What code and classes tell about themselves without being run: the names that code uses, the functions that a class is
made of, the slots of its instances, and whether a class is the user's."""

from __future__ import annotations

import dis
import functools
import sys
import weakref
from operator import attrgetter
from types import CellType, CodeType, FunctionType
from typing import Any

import torch
import torch.distributions

from .where import is_users

__all__ = ["MISSING", "asks_identity", "contents", "functions_of", "has_attributes", "is_users_class", "names_in", "parts",
           "slots_of"]  # fmt: skip


class _Missing:
    def __repr__(self) -> str:
        return "<missing>"


MISSING: Any = _Missing()

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement, or by a C extension that does likewise

# Objects of torch's, of the standard library's or built in that are looked into like those of the user's classes.
_LOOKED_INTO = (
    torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler, torch.amp.autocast, torch.distributions.Distribution,
    weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet, BaseException,
)  # fmt: skip
_OPAQUE = {"torch", "threading", "_thread", "io", "_io", "logging", "contextlib", "weakref", "asyncio",
           "typing", "collections.abc", "re", "os", "pathlib", "phonograph", "_abc", "abc", "numpy", "inspect",
           "importlib", "_frozen_importlib", "_frozen_importlib_external", "concurrent"}  # fmt: skip

parts = attrgetter("__code__", "__defaults__", "__kwdefaults__")
"""What makes a function another one if it is assigned."""


def contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def names_in(code: CodeType) -> set[str]:
    """The names that a code object uses, and the words that it may look something up by."""
    found = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, CodeType):
            found |= names_in(const)
        elif isinstance(const, str) and (const.isidentifier() or const in sys.modules):
            found.add(const)
    return found


@functools.cache
def asks_identity(code: CodeType) -> bool:
    """Whether code compares objects by identity (``a is b``), or asks for what stands for it."""
    inner = any(asks_identity(const) for const in code.co_consts if isinstance(const, CodeType))
    names = not {"id", "data_ptr", "is_set_to"}.isdisjoint(code.co_names)
    return inner or names or any(i.opname == "IS_OP" for i in dis.get_instructions(code))


def functions_of(member: Any) -> list[FunctionType]:
    """The functions that a member of a class is made of: of a property, the getter and the setter."""
    if isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    if isinstance(member, property):
        return [f for f in (member.fget, member.fset) if isinstance(f, FunctionType)]
    return [member] if isinstance(member, FunctionType) else []


def slots_of(kind: type) -> tuple[str, ...]:
    """The attributes that a class itself keeps in slots, by the names under which they are reached."""
    slots = vars(kind).get("__slots__", ())
    slots = (slots,) if isinstance(slots, str) else tuple(slots)
    prefix = f"_{kind.__name__.lstrip('_')}"
    mangled = [prefix + s if s.startswith("__") and not s.endswith("__") else s for s in slots]
    return tuple(s for s in mangled if s not in ("__dict__", "__weakref__"))


def is_users_class(kind: type) -> bool:
    """Whether a class is defined in the user's own code."""
    if _is_builtin(kind):
        return False
    module = sys.modules.get(kind.__module__)
    if module is None:  # loaded in a way of the user's own: its functions know their file
        return any(is_users(f.__code__.co_filename) for v in vars(kind).values() for f in functions_of(v))
    return is_users(getattr(module, "__file__", None) or "<string>")


def has_attributes(thing: Any) -> bool:
    """Whether an object is one of the kinds whose attributes a program's results may depend on."""
    if isinstance(thing, _LOOKED_INTO):
        return True
    kind = type(thing)
    return not _is_builtin(kind) and kind.__module__.partition(".")[0] not in _OPAQUE


def _is_builtin(kind: type) -> bool:
    return kind.__module__ == "builtins" and not kind.__flags__ & _HEAP_TYPE  # `exec` in a bare dict makes heap types
