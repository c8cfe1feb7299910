"""Of which objects code may read attributes that it does not name: by names that it works out, or all of them."""

from __future__ import annotations

import argparse
import copy
import copyreg
import dataclasses
import inspect
import pickle
import sys
from collections.abc import Iterable, Iterator
from types import CodeType

from .._torch.dynamic import Thing
from .bytecode import all_within, formats_any, looks_around, looks_around_itself
from .introspection import functions_of

__all__ = ["HARMLESS", "goes_through_objects", "is_harmless", "reads_any_of"]

# Where all attributes of an object are read, or all its fields.
_GOES_THROUGH = tuple(m.__file__ for m in (argparse, copy, copyreg, dataclasses, pickle))
_OF_CLASSES = [code for f in (dataclasses.fields, dataclasses.is_dataclass) for code in all_within(f.__code__)]
# What of Python's own library runs between others, and looks at none of what it hands on.
HARMLESS = frozenset(file for name in (
    "abc", "collections", "_collections_abc", "contextlib", "copy", "dis", "enum", "functools", "inspect", "linecache",
    "logging", "importlib._bootstrap", "importlib._bootstrap_external", "os", "pathlib", "pathlib._local", "re", "threading",
    "traceback", "types", "typing", "warnings", "weakref", "_weakrefset",
    "numpy._core.fromnumeric", "numpy._core._methods", "numpy.core.fromnumeric", "numpy.core._methods")
    for file in (str(getattr(sys.modules.get(name), "__file__", "")), f"<frozen {name}>"))  # fmt: skip
# Those of `dataclasses` hand on what is in one.
_OF_DATACLASSES = frozenset({"is_dataclass", "_is_dataclass_instance", "fields", "replace", "_replace"})
_WRITTEN_BY_DATACLASS = "__create_fn__.<locals>."
_SEES_ATTRIBUTES = frozenset({"__getattribute__", "__getattr__", "__setattr__"})


def goes_through_objects(code: CodeType) -> bool:
    """Whether this is code of the standard library's that goes through all attributes of an object, whoever calls it."""
    of_inspect = code.co_filename == inspect.__file__ and code.co_name.lstrip("_").startswith(("getmembers", "getattr"))
    return of_inspect or (code.co_filename in _GOES_THROUGH and not any(code is one for one in _OF_CLASSES))


def is_harmless(code: CodeType) -> bool:
    """Whether this is code of the standard library's that learns nothing of a number: it hands it on, or asks of which class it
    is only to find whether it is a dataclass. (Before Python 3.11 code does not tell who has written it.)"""
    written = code.co_filename == "<string>" and getattr(code, "co_qualname", "").startswith(_WRITTEN_BY_DATACLASS)
    hands_on = code.co_filename == dataclasses.__file__ and code.co_name in _OF_DATACLASSES
    return written or hands_on or code.co_filename in HARMLESS


def reads_any_of(ran: Iterable[tuple[CodeType, dict[str, object]]]) -> tuple[type, ...]:
    """The classes of such objects, going by the functions that ran, each given as its code and its globals."""
    return tuple({kind for code, space in ran for kind in _read_by(code, space)})


def _read_by(code: CodeType, space: dict[str, object]) -> Iterator[type]:
    harmless = code.co_filename in HARMLESS
    if goes_through_objects(code) or (formats_any(code) and not harmless):
        yield object
    elif not harmless and (code.co_name in _SEES_ATTRIBUTES or looks_around(code)):
        of_its_own = code.co_name in _SEES_ATTRIBUTES or looks_around_itself(code)
        yield (_class_with(code, space) if of_its_own else None) or object


def _class_with(code: CodeType, space: dict[str, object]) -> type | None:
    """The class of which this is a method, if that is a global variable."""
    kinds: list[Thing] = [x for x in space.values() if issubclass(type(x), type)]
    members = ((kind, f) for kind in kinds for f in functions_of(vars(kind).get(code.co_name)))
    return next((kind for kind, f in members if getattr(f, "__code__", None) is code), None)
