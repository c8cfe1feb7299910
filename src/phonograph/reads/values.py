"""What may change of a value that was read: the places in it, and the values that it leads to."""

from __future__ import annotations

import functools
import gc
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from contextvars import ContextVar
from types import BuiltinFunctionType, CellType, MappingProxyType, MethodType, MethodWrapperType, ModuleType

from torch.nn import Module
from torch.optim import Optimizer

from .._torch.dynamic import Thing
from ..python.introspection import MISSING, own_dict
from ..python.read_gate import behind_gate
from .place import Place, cell, code_of, held, in_class, layer, module_of, mro_of, optimizer
from .whose import STDLIB, TORCH, is_apart, whose, whose_class

__all__ = ["PURE", "code_of", "is_compiled", "is_held_in_bulk", "is_iterator", "leads_to", "places_of"]

_CONTAINERS = frozenset({dict, list, set, deque, MappingProxyType})
PURE = frozenset({*_CONTAINERS, tuple, frozenset, OrderedDict, defaultdict})
"""Classes of objects that are nothing but what they hold."""
_MEMORY = frozenset(
    {("builtins", "bytearray"), ("builtins", "memoryview"), ("array", "array"), ("numpy", "ndarray"), ("numpy", "void")}
)
_Local = threading.local
_Cached = type(functools.cache(repr))


def leads_to(v: Thing, kind: type) -> Iterable[object] | None:
    """The values to which one leads that cannot change by itself; None if it is of another kind."""
    if kind is MethodType:
        return v.__self__, v.__func__
    if kind in (staticmethod, classmethod):
        return (v.__func__,)
    if kind is property:
        return v.fget, v.fset, v.fdel
    if kind is MethodWrapperType:
        return v.__self__, own_dict(v.__self__)
    if kind is BuiltinFunctionType:
        below = type.__subclasses__(v.__self__) if v.__name__ == "__subclasses__" else ()
        return () if behind_gate(type(v.__self__)) is ModuleType else (v.__self__, *below)
    if tuple in mro_of(kind):
        return tuple.__iter__(v)
    if frozenset in mro_of(kind):
        return frozenset.__iter__(v)
    if kind is slice:
        return v.start, v.stop, v.step
    if kind in weakref.ProxyTypes:
        return (v.__init__.__self__,)
    if kind in (types.GenericAlias, types.UnionType) or module_of(kind) == "typing":
        return getattr(v, "__origin__", None), *getattr(v, "__args__", ())
    return None


def is_iterator(kind: type) -> bool:
    """Whether such objects are used up by reading them: a file is."""
    return in_class(kind, "__next__") is not MISSING and (module_of(kind) in ("builtins", "_io") or not is_apart(kind))


def is_held_in_bulk(kind: type) -> bool:
    """Whether all of an object is one place: of torch's own layers, and of optimizers."""
    if Module in mro_of(kind):
        return whose_class(kind) == TORCH
    return Optimizer in mro_of(kind)


def is_compiled(v: Thing) -> bool:
    """Whether torch.compile may run a module's code, which no gate hears."""
    own = own_dict(v) if Module in mro_of(type(v)) else None
    return own is not None and (own.get("_compiled_call_impl") is not None or type(v).__name__ == "OptimizedModule")


def places_of(v: Thing, kind: type, path: str) -> Iterable[Place]:
    """The places in a value that change by themselves, and tell nobody when they are read."""
    mro = mro_of(kind)
    if not _CONTAINERS.isdisjoint(mro):
        yield held(v, path)
    if Module in mro and is_held_in_bulk(kind):
        yield layer(v, path)
    elif Optimizer in mro:
        yield optimizer(v, path)
    elif kind is CellType:
        yield cell(v, path)
    elif _Local in mro:
        yield Place(v, "<items>", path, lambda: (*(x for item in vars(v).items() for x in item),))
    elif weakref.ref in mro:
        yield Place(v, "<ref>", path, lambda: (weakref.ref.__call__(v),))
    elif kind is ContextVar:
        yield Place(v, "<variable>", path, lambda: (v.get(MISSING),))
    elif functools.partial in mro:
        yield Place(v, "<partial>", path, lambda: (v.func, v.args, v.keywords))
    elif kind is _Cached:
        yield from _of_cache(v, path)
    elif any(map(_is_memory, mro)):
        yield from _of_bytes(v, path)


def _of_cache(v: Thing, path: str) -> Iterable[Place]:
    yield Place(v, "<wrapped>", path, lambda: (v.__wrapped__,))
    code = getattr(v.__wrapped__, "__code__", None)
    if code is not None and whose(code.co_filename) not in (TORCH, STDLIB):
        yield Place(v, "<cache>", path, lambda: _kept_in(v))


def _kept_in(v: Thing) -> tuple[object, ...]:
    tables = [d for d in gc.get_referents(v) if type(d) is dict and d is not v.__dict__]
    return tuple(sorted((y for d in tables for y in d.values()), key=id))


def _is_memory(kind: type) -> bool:
    name = str(module_of(kind)), kind.__name__
    return name in _MEMORY or name[0] == "_ctypes"


def _of_bytes(v: Thing, path: str) -> Iterable[Place]:
    def get() -> tuple[object, ...]:
        with memoryview(v) as memory:
            return memory.shape, memory.format, memory.strides, memory.tobytes()

    try:
        get()
    except (TypeError, ValueError, NotImplementedError, BufferError):  # objects are in it, or it has no memory
        if (module_of(type(v)), type(v).__name__) == ("numpy", "ndarray"):
            yield Place(v, "<objects>", path, lambda: (v.shape, v.dtype.str, *v.ravel().tolist()))
        return
    yield Place(v, "<bytes>", path, get)
