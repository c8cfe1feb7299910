"""Whose code reads, and whose class it is that objects have of which something is read."""

from __future__ import annotations

import os
import sys
import sysconfig
import weakref
from collections.abc import Callable
from functools import cache
from types import FunctionType, MethodType, ModuleType

import torch
import torch.distributions
import torch.utils.data

from .._torch.dynamic import Thing
from ..python import origin
from ..python.dict_versions import Versions, tell
from ..python.read_gate import behind_gate
from .place import module_of, mro_of

__all__ = ["OURS", "PACKAGE", "STDLIB", "TORCH", "USER", "is_apart", "name_of", "whose", "whose_class", "whose_module",
           "worth_hearing"]  # fmt: skip

USER, PACKAGE, STDLIB, TORCH, OURS = "user", "package", "stdlib", "torch", "ours"
# Classes of the standard library whose own work with their objects is not a read of a program's values.
_APART = frozenset({"builtins", "_frozen_importlib", "_frozen_importlib_external", "importlib", "abc", "_abc", "typing", "io",
                    "_io", "re", "logging", "weakref", "_weakref", "contextlib", "dataclasses", "enum", "inspect", "ast", "dis",
                    "asyncio", "threading", "_thread", "torch", "phonograph", "numpy", "sys"})  # fmt: skip
_OF_TORCH = (torch.optim.Optimizer, torch.autograd.Function, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler,
             torch.distributions.Distribution, torch.distributions.Transform, torch.utils.data.Dataset)  # fmt: skip
_LIBRARY = {sysconfig.get_paths()[k] + os.sep for k in ("stdlib", "platstdlib")} | {os.path.dirname(os.__file__) + os.sep}
_flags_of: Callable[[type], int] = type.__dict__["__flags__"].__get__
_space_of: Callable[[ModuleType], dict[str, Thing]] = vars(ModuleType)["__dict__"].__get__


def whose(file: str) -> str:
    """Whose code a file has. (What is the user's may become known later, so that is not kept here.)"""
    if origin.is_ours(file):
        return OURS
    if origin.is_torchs(file):
        return TORCH
    if origin.is_users(file):
        return USER
    return STDLIB if _is_pythons(file) else PACKAGE


@cache
def _is_pythons(file: str) -> bool:
    return file.startswith(("<frozen", *_LIBRARY)) and "site-packages" not in file


def whose_module(module: ModuleType) -> str:
    space = _space_of(module)
    file = space.get("__file__")
    if type(file) is str:
        return whose(file)
    top = str(space.get("__name__")).partition(".")[0]
    return STDLIB if top in sys.stdlib_module_names else TORCH if top == "torch" else USER


_modules = list["weakref.ref[ModuleType]"]()
_loaded: Thing = sys.modules
_versions = Versions([_loaded], [])


def worth_hearing() -> list[ModuleType]:
    """The modules that are the user's or a package's: of others only those are heard that code comes to. (There may be
    thousands, which are looked through again where some have come or gone.)"""
    if not tell([_loaded]) or _versions.moved():
        found = [m for m in [*sys.modules.values()] if behind_gate(type(m)) is ModuleType and _is_worth_hearing(m)]
        _modules[:] = map(weakref.ref, found)
        _versions.keep()
    return [module for ref in _modules if (module := ref()) is not None]


def _is_worth_hearing(module: ModuleType) -> bool:
    file = _space_of(module).get("__file__")
    if type(file) is not str:
        return whose_module(module) == USER
    return not (origin.is_torchs(file) or _is_pythons(file))


def whose_class(kind: type) -> str:
    name = module_of(kind)
    if type(name) is not str or name == "builtins":
        return USER if type(name) is str and _flags_of(kind) & 1 << 9 else STDLIB  # (`exec` in a bare dictionary makes such)
    module = sys.modules.get(name)
    return USER if module is None else whose_module(module)


def is_apart(kind: type) -> bool:
    """Whether only what other code reads of such objects counts, and not what the library does that they come from."""
    if any(base in mro_of(kind) for base in _OF_TORCH):
        return False
    return str(module_of(kind)).partition(".")[0] in _APART


def name_of(thing: Thing) -> str:
    """A name for what is looked at first. (Objects are not asked for one.)"""
    function = thing.__func__ if type(thing) is MethodType else thing
    return function.__qualname__ if type(function) in (FunctionType, type) else type(thing).__name__
