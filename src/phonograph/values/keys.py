"""When are two Python values the same to a program? What identifies a value, so that equal keys mean the same program.

Values compare by type *and* value: ``1``, ``1.0`` and ``True`` are equal to Python and different programs to PyTorch;
so are ``0.0`` and ``-0.0``. Functions, modules and classes compare by identity, whatever they say of themselves. A value that
cannot be compared (a generator, an open file, an object of some class) has no key.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import pathlib
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Container
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType, ModuleType, WrapperDescriptorType

import torch

from .._torch.dynamic import Thing
from .._torch.process_groups import groups_of_ranks
from ..python.identity import identity
from ..python.introspection import tells_its_end
from .object_layout import layout_of, parts_of

__all__ = ["BY_IDENTITY", "SCALARS", "Identity", "NoSignature", "argument_key", "class_of", "nested_key", "plain_key",
           "structure"]  # fmt: skip


class NoSignature(Exception):
    """The call has an argument that cannot be described; the message says which kind, and `remedy` what to do."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.remedy = remedy

    def of(self, place: str, remedy: str = "") -> NoSignature:
        """The same, with the place where it is, and perhaps a remedy for there."""
        return NoSignature(f"{self} {place}", remedy or self.remedy)


class Identity:
    """Equal for as long as it is to the same living object, and then never again; does not keep it alive."""

    __slots__ = ("_hash", "_of")

    def __init__(self, thing: Thing) -> None:
        self._hash = identity(thing)
        self._of = weakref.ref(thing) if tells_its_end(type(thing)) else lambda: thing

    def is_of(self, identities: Container[int]) -> bool:
        """Whether the object has, or had, one of these."""
        return self._hash in identities

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and (mine := self._of()) is not None and mine is other._of()

    def __hash__(self) -> int:
        return self._hash


_ARRAY = 4096  # bytes of an array that count as a value
SCALARS = (bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.Size,
            torch.layout, torch.memory_format, type(Ellipsis))  # fmt: skip
BY_IDENTITY = (torch.nn.Module, torch.optim.Optimizer, torch.Generator, FunctionType, BuiltinFunctionType, type,
               MethodDescriptorType, WrapperDescriptorType, *groups_of_ranks())  # fmt: skip
_BY_TEXT = (decimal.Decimal, fractions.Fraction, datetime.timedelta, datetime.date, pathlib.PosixPath, pathlib.WindowsPath,
            pathlib.PurePosixPath, pathlib.PureWindowsPath)  # fmt: skip


def class_of(value: object) -> str:
    """The name of a value's class, with that of its module if it is not Python's own."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


_FOR_CLASS = {
    "torch.utils.data.dataloader": "record what is done with one batch, and loop over the batches outside",
    "numpy": "pass a tensor: torch.from_numpy(array), moved to the device",
    "transformers.cache_utils": "let the model make no cache (use_cache=False), or pass its tensors",
}


def plain_key(value: Thing) -> object:
    """What identifies a Python value.

    Raises:
        NoSignature: it cannot be compared.
    """
    kind = type(value)
    if kind is float:
        return (float, value.hex())
    if kind in SCALARS:
        return (kind, value)
    if kind is complex:
        return (complex, value.real.hex(), value.imag.hex())
    if kind is slice:
        return (slice, plain_key(value.start), plain_key(value.stop), plain_key(value.step))
    if kind is range:  # equal ranges may have another stop
        return (range, value.start, value.stop, value.step)
    if kind in (frozenset, set):  # and equal sets another order
        return (kind, tuple(map(plain_key, value)))
    if kind is BuiltinFunctionType and not isinstance(value.__self__, (type(None), ModuleType, type)):
        return (kind, value.__name__, Identity(value.__self__))  # a method, `results.append`
    if isinstance(value, (*BY_IDENTITY, enum.Enum)):
        return (kind, Identity(value))
    if kind is MethodType:
        return (kind, Identity(value.__func__), Identity(value.__self__))
    if kind in _BY_TEXT:
        return (kind, repr(value))
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and kind.__module__ == "numpy" and not value.dtype.hasobject:
        return (kind, value.dtype.str, value.tobytes())
    if _is_enum_of_cpp(kind):
        return (kind, int(value))
    raise NoSignature(f"takes an object of class {class_of(value)}", _FOR_CLASS.get(
        kind.__module__, "pass what the function needs of it: tensors, numbers, strings"))  # fmt: skip


def _is_enum_of_cpp(kind: type) -> bool:
    """Whether it is a class as pybind11 makes them of an enum: two objects with one number are the same to a program."""
    return type(kind).__name__ == "pybind11_type" and hasattr(kind, "__members__") and hasattr(kind, "__int__")


def argument_key(value: Thing) -> object:
    """The same for an argument, of which what can change counts as it is now: of a partial function, or an array."""
    kind = type(value)
    if kind is partial:
        return (kind, plain_key(value.func), nested_key(value.args, Identity), nested_key(value.keywords, Identity))
    numpy = sys.modules.get("numpy")
    if numpy is not None and kind is numpy.ndarray and value.nbytes <= _ARRAY and not value.dtype.hasobject:
        return (kind, value.shape, value.dtype.str, value.strides, value.flags.writeable, value.tobytes())
    return plain_key(value)


def nested_key(value: Thing, of_object: Callable[[object], object] = plain_key) -> object:
    """The same for what may be nested in tuples, lists and dictionaries; a tensor in them stands for itself, and for an object
    what `of_object` says."""
    kind = type(value)
    if kind in (tuple, list):
        return (kind, tuple([nested_key(x, of_object) for x in value]))
    if kind in (dict, OrderedDict):
        return (kind, tuple([(nested_key(k, of_object), nested_key(v, of_object)) for k, v in value.items()]))
    if isinstance(value, torch.Tensor):
        return (kind, Identity(value))
    return plain_key(value) if layout_of(kind) is None else of_object(value)


def structure(value: object) -> object:
    """What identifies an object by what is in it."""
    layout = layout_of(type(value))
    if layout is None:
        return plain_key(value)
    names, values, items, itself = parts_of(value, layout)
    return (type(value), names, *[nested_key(x, structure) for x in (values, items, itself)])
