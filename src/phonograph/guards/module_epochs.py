"""Who tells us that a module or a parameter changed, so that a replay need not look at each of them.

A model has hundreds of modules and parameters; looking at all of them before each replay would cost more than the
replay. Nearly every way to change one goes through a Python method, so those methods are made to leave a note:
`epoch` moves on whenever something *watched* may have changed, and only then everything is compared in full.
(Ways around the methods, such as writing into `module._parameters` by hand, are found by a rotating part of the full
comparison: see `slots/constants.py`.)

The methods are wrapped at the first recording, and do nothing but the note; modules and parameters that no recording relies
on pay one set look-up. When `pg.reset` has dropped the last recording, they are torch's own again (`give_back`).
docs/stability.md lists them.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from .._torch.autograd import forget_accumulation
from .._torch.dynamic import Private
from .._torch.dynamo import not_compiled_by_itself
from .._torch.modules import member_accessor
from .._torch.tensors import TensorBase, has_memory
from ..python.identity import identity
from ..python.introspection import MISSING
from ..python.standing import fresh_in_children
from .replaced import back_again, stands_for

__all__ = ["Wrapped", "all_wrapped", "epoch", "give_back", "leave", "watch"]

_watched: set[int] = set()
_listeners: dict[weakref.ref[object], frozenset[int]] = {}  # who has anything watched, and what
_lock = fresh_in_children(threading.Lock())
_some_gone = False
epoch = 0
"""A number that changes whenever something watched may have changed."""

_MODULE_METHODS = ("__setattr__", "__delattr__", "_apply", "register_parameter", "register_buffer", "add_module",
                   "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
                   "register_full_backward_pre_hook", "load_state_dict", "requires_grad_")  # fmt: skip

_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)
_CONTAINER_METHODS = {"insert", "append", "extend", "pop", "clear", "update", "__setitem__", "__delitem__", "__iadd__"}


_wrapped: list[Wrapped] = []


class Wrapped:
    """An attribute of torch's that is made of what was there."""

    def __init__(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        self._owner, self.name, self._make = owner, name, make
        self._there: Any = None
        self._before: Any = None
        self._own = False

    def put(self) -> None:
        if self._there is None:
            self._own = self.name in vars(self._owner)
            self._before = vars(self._owner)[self.name] if self._own else getattr(self._owner, self.name)
            self._there = self._make(self._before)
            stands_for(self._there, self._before if self._own else MISSING)
            setattr(self._owner, self.name, self._there)

    def back(self) -> None:
        """It is again what it was; where somebody has put another there, which calls it, it stays."""
        if self._there is None or vars(self._owner).get(self.name) is not self._there:
            return
        if self._own:
            setattr(self._owner, self.name, self._before)
        else:
            delattr(self._owner, self.name)
        back_again(self._there)
        self._there = None


def watch(things: Iterable[object], listener: object) -> None:
    """Let changes to these modules and parameters move the epoch on, for as long as this object is there, which asks once.

    (What comes to lie where one of them was would cost a comparison too many with each step of a model that has nothing to do
    with it. A parameter itself may have no weak reference: `torch.utils.swap_tensors` refuses those.)"""
    global _watched, _some_gone
    keys = frozenset(map(identity, things))
    if not keys:
        return  # to wrap what all modules inherit takes as long as to capture a small function
    if not _wrapped:
        _wrapped.extend(all_wrapped())
    for one in _wrapped:
        one.put()
    with _lock:
        _listeners[weakref.ref(listener, _gone)] = keys
        if _some_gone:
            _some_gone = False  # before those are counted that are left
            _watched = set[int]().union(*_listeners.copy().values())
        _watched.update(keys)


def _gone(listener: weakref.ref[object]) -> None:
    """(Any thread may call this at any time, as it collects garbage.)"""
    global _some_gone
    _listeners.pop(listener, None)
    _some_gone = True


def leave(listener: object) -> None:
    """This one needs to hear of nothing any more."""
    _gone(weakref.ref(listener))


def give_back() -> None:
    """Make torch's methods again what they were, if nobody needs to hear of changes."""
    if not _listeners:
        _watched.clear()
        for one in _wrapped:
            one.back()


def _note(thing: object) -> None:
    """Not while `torch.compile` traces: nothing is changed then, and what is traced must not depend on what is watched."""
    global epoch
    if not torch.compiler.is_compiling() and identity(thing) in _watched:
        epoch += 1


def _noting(method: Callable[..., object]) -> Callable[..., Private]:
    @functools.wraps(method)
    def noted(self: object, *args: object, **kwargs: object) -> object:
        _note(self)
        return method(self, *args, **kwargs)

    noted.__code__ = noted.__code__.replace()  # type: ignore[attr-defined]  # Dynamo tells methods apart by that
    # Code that was compiled before calls this as any other function. Compiled by itself, it would set a hook by its name, and
    # so call itself.
    not_compiled_by_itself(noted.__code__)  # type: ignore[attr-defined]
    return noted


def _reshaping(method: Callable[..., object]) -> Callable[..., Private]:
    """Of a leaf that gets another shape, autograd has to forget the node that adds up its gradient. In eager that goes with
    the last graph; a recording has one, and the node takes gradients of the old shape only."""

    @functools.wraps(method)
    def reshaped(self: Private, *args: object, **kwargs: object) -> object:
        if identity(self) not in _watched or not has_memory(self):  # it may have no shape yet (`LazyLinear`)
            return method(self, *args, **kwargs)
        shape = self.shape
        result = method(self, *args, **kwargs)
        if self.shape != shape and self.is_leaf and not torch.compiler.is_compiling():
            forget_accumulation(self)
        return result

    return reshaped


def all_wrapped() -> Iterable[Wrapped]:
    """What is wrapped, and how."""
    module, parameter, tensor = torch.nn.Module, torch.nn.Parameter, torch.Tensor
    for name in _MODULE_METHODS:
        yield Wrapped(module, name, _noting)
    for name in {"data", "requires_grad", "grad_dtype"} & vars(TensorBase).keys():
        yield Wrapped(parameter, name, _noting_property if name != "data" else _reshaping_property)
    yield Wrapped(parameter, "resize_", lambda own: _noting(_reshaping(own)))
    # functional_call swaps tensors in `_parameters` by hand, through this function.
    yield Wrapped(member_accessor, "swap_tensor", _noting)
    yield Wrapped(RemovableHandle, "remove", _noting_any)  # a handle does not know its module
    for name in ("requires_grad_", "set_", "detach_", "share_memory_"):
        yield Wrapped(parameter, name, _noting)
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        yield Wrapped(tensor, name, _noting)
    for container in _CONTAINERS:
        for name in _CONTAINER_METHODS & vars(container).keys():
            yield Wrapped(container, name, _noting)
    yield Wrapped(torch.utils, "swap_tensors", _noting_both)


def _noting_property(own: Any) -> property:
    return property(own.__get__, _noting(own.__set__), own.__delete__, own.__doc__)


def _reshaping_property(own: Any) -> property:
    return property(own.__get__, _noting(_reshaping(own.__set__)), own.__delete__, own.__doc__)


def _noting_any(removed: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(removed)
    def remove(self: Private) -> None:
        global epoch
        if not torch.compiler.is_compiling():
            epoch += 1
        removed(self)

    return remove


def _noting_both(swap: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    @functools.wraps(swap)
    def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
        _note(t1)
        _note(t2)
        swap(t1, t2)

    return swap_tensors
