"""A recorded function as Python has functions: bound to instances as a method, copied, pickled.

Each instance has recordings of its own, in its `__dict__`: they go when it goes. A copy has none, nor has what is unpickled.
Who saves that `__dict__`, as learning-rate schedulers do for their state, gets nothing of them.
"""

from __future__ import annotations

import copy
import functools
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from types import MethodType

import torch

from ..call.unrolled import Unrolled
from ..options import Options
from ..python.identity import identity

__all__ = ["Binding"]


class Binding:
    """A function that can be a method."""

    name: str
    options: Options
    _function: Callable[..., object]
    __call__: Callable[..., object]

    def __init__(self) -> None:
        self._bound = weakref.WeakValueDictionary[int, Binding]()  # by the instance, to which it refers
        self._made_for: Binding | None = None  # the method of which this is one instance's own
        self._place = f"_phonograph_{self.name}_{identity(self):x}"

    @property
    def _kind(self) -> Callable[[object, Options], Binding]:
        """The class for another function, or for a copy of this one."""
        raise NotImplementedError

    def __set_name__(self, owner: type, name: str) -> None:
        self._place = f"_phonograph_{owner.__qualname__}.{name}"

    def __get__(self, instance: object, owner: type | None = None) -> object:
        if instance is None:
            return self
        kept = getattr(instance, "__dict__", None)
        if kept is None or isinstance(instance, type):
            return MethodType(self, instance)  # with __slots__, or a class: an argument like any other
        found = kept.get(self._place)
        mine = found.method if type(found) is _Kept else None
        if mine is None or mine._made_for is not self or mine._instance() is not instance:
            if torch.compiler.is_dynamo_compiling():
                return _plain_method(self, instance)
            mine = self._bound.get(identity(instance))  # where its `__dict__` was written since, with a state that was saved
            if mine is None:
                mine = self._bind(instance)
            kept[self._place] = _Kept(mine)
        return mine

    def _bind(self, instance: object) -> Binding:
        f = self._function
        mine = self._kind(f.bound(instance) if isinstance(f, Unrolled) else MethodType(f, instance), self.options)
        mine._made_for = self
        self._bound[identity(instance)] = mine
        return mine

    @property
    def __func__(self) -> Callable[..., object]:
        """Of a method that was bound when it was recorded, what binds anew: to the same instance, it is this one. (By that
        learning-rate schedulers wrap ``optimizer.step``.)"""
        method = self._function
        if not isinstance(method, MethodType):
            raise AttributeError(f"{self!r} has no attribute '__func__', as it is no method of an instance")

        @functools.wraps(method)
        def unbound(instance: object, *args: object, **kwargs: object) -> object:
            f = self if instance is method.__self__ else MethodType(method.__func__, instance)
            return f(*args, **kwargs)

        return unbound

    def _instance(self) -> object:
        return getattr(self._function, "__self__", None)

    def __reduce__(self) -> str | tuple[object, ...]:
        if self._made_for is not None:
            name = self._name_in_class()
            return (getattr, (self._instance(), name)) if name else (_no_recordings, ())
        if self._found_by_name():
            return str(self.__dict__["__qualname__"])  # as a function: by its name
        return (_rebuild, (self._kind, self._function, self.options))

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        if self._made_for is not None:
            name = self._name_in_class()
            return getattr(copy.deepcopy(self._instance(), memo), name) if name else None
        return self._kind(copy.deepcopy(self._function, memo), self.options)

    def _name_in_class(self) -> str | None:
        """The method's name, by which a copy of the instance has recordings of its own."""
        named = (name for kind in type(self._instance()).__mro__ for name, x in vars(kind).items() if x is self._made_for)
        return next(named, None)

    def _found_by_name(self) -> bool:
        """Whether this stands under the function's name in its module."""
        found: object = sys.modules.get(getattr(self, "__module__", ""))
        for part in getattr(self, "__qualname__", "").split("."):
            found = getattr(found, part, None)
        return found is self


class _Kept:
    """An instance's method in its `__dict__`. The method itself is pickled with its instance; this is not, and becomes what
    ``torch.load(weights_only=True)`` takes."""

    __slots__ = ("method",)

    def __init__(self, method: Binding) -> None:
        self.method = method

    def reached(self) -> tuple[object, ...]:
        """Objects that it can reach."""
        return (self.method,)

    def __reduce__(self) -> tuple[object, ...]:
        return (OrderedDict, ())


def _plain_method(recorded: Binding, instance: object) -> Callable[..., object]:
    """An instance's method in compiled code, where it is a plain function."""
    return lambda *args, **kwargs: recorded(instance, *args, **kwargs)


def _no_recordings() -> None:
    """Stands for an instance's recordings in a pickle of it."""


def _rebuild(kind: Callable[[object, Options], Binding], function: object, options: Options) -> Binding:
    return kind(function, options)
