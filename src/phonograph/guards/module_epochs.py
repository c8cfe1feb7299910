"""Who tells us that a module or a parameter changed, so that a replay need not look at each of them.

A model has hundreds of modules and parameters; looking at all of them before each replay would cost more than the
replay. Nearly every way to change one goes through a Python method, so those methods are made to leave a note:
`epoch` moves on whenever something *watched* may have changed, and only then everything is compared in full.
(Ways around the methods, such as writing into `module._parameters` by hand, are found by a rotating part of the full
comparison: see `guards/reliances.py`.)

The methods are wrapped once, at the first recording, and do nothing but the note; modules and parameters that no
recording relies on pay one set look-up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from .._torch.autograd import forget_accumulation
from .._torch.dynamo import not_compiled_by_itself
from .._torch.modules import member_accessor
from .._torch.tensors import TensorBase, has_memory
from ..python.identity import identity

__all__ = ["epoch", "watch"]

_watched: set[int] = set()
epoch = 0
"""A number that changes whenever something watched may have changed."""
_installed = False

_MODULE_METHODS = ("__setattr__", "__delattr__", "_apply", "register_parameter", "register_buffer", "add_module",
                   "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
                   "register_full_backward_pre_hook", "load_state_dict", "requires_grad_")  # fmt: skip

_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)
_CONTAINER_METHODS = {"insert", "append", "extend", "pop", "clear", "update", "__setitem__", "__delitem__", "__iadd__"}


def watch(things: Iterable[object]) -> None:
    """Let changes to these modules and parameters move the epoch on. (An id that is reused later only costs a
    comparison too many.)"""
    _install()
    _watched.update(map(identity, things))


def _note(thing: object) -> None:
    """Not while `torch.compile` traces: nothing is changed then, and what is traced must not depend on what is watched."""
    global epoch
    if not torch.compiler.is_compiling() and identity(thing) in _watched:
        epoch += 1


def _noting(method: Callable[..., object]) -> Callable[..., Any]:
    @functools.wraps(method)
    def noted(self: object, *args: object, **kwargs: object) -> object:
        _note(self)
        return method(self, *args, **kwargs)

    noted.__code__ = noted.__code__.replace()  # type: ignore[attr-defined]  # Dynamo tells methods apart by that
    # Code that was compiled before calls this as any other function. Compiled by itself, it would set a hook by its name, and
    # so call itself.
    not_compiled_by_itself(noted.__code__)  # type: ignore[attr-defined]
    return noted


def _reshaping(method: Callable[..., object]) -> Callable[..., Any]:
    """Of a leaf that gets another shape, autograd has to forget the node that adds up its gradient. In eager that goes with
    the last graph; a recording has one, and the node takes gradients of the old shape only."""

    @functools.wraps(method)
    def reshaped(self: Any, *args: object, **kwargs: object) -> object:
        if identity(self) not in _watched or not has_memory(self):  # it may have no shape yet (`LazyLinear`)
            return method(self, *args, **kwargs)
        shape = self.shape
        result = method(self, *args, **kwargs)
        if self.shape != shape and self.is_leaf and not torch.compiler.is_compiling():
            forget_accumulation(self)
        return result

    return reshaped


def _install() -> None:
    global _installed
    if _installed:
        return
    _installed = True
    for name in _MODULE_METHODS:
        setattr(torch.nn.Module, name, _noting(getattr(torch.nn.Module, name)))
    for name in {"data", "requires_grad", "grad_dtype"} & vars(TensorBase).keys():
        inherited = getattr(TensorBase, name)
        put = _reshaping(inherited.__set__) if name == "data" else inherited.__set__
        setattr(torch.nn.Parameter, name, property(inherited.__get__, _noting(put), inherited.__delete__, inherited.__doc__))
    torch.nn.Parameter.resize_ = _noting(_reshaping(torch.Tensor.resize_))  # type: ignore[method-assign]
    # functional_call swaps tensors in `_parameters` by hand, through this function.
    accessor = member_accessor
    accessor.swap_tensor = _noting(accessor.swap_tensor)
    removed = RemovableHandle.remove

    @functools.wraps(removed)
    def remove(self: Any) -> None:
        global epoch
        if not torch.compiler.is_compiling():
            epoch += 1  # a handle does not know its module
        removed(self)

    RemovableHandle.remove = remove  # type: ignore[method-assign]
    for name in ("requires_grad_", "set_", "detach_", "share_memory_"):
        setattr(torch.nn.Parameter, name, _noting(getattr(torch.Tensor, name)))
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        setattr(torch.Tensor, name, _noting(getattr(torch.Tensor, name)))
    for container in _CONTAINERS:
        for name in _CONTAINER_METHODS & vars(container).keys():
            setattr(container, name, _noting(vars(container)[name]))
    swap = torch.utils.swap_tensors

    @functools.wraps(swap)
    def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
        _note(t1)
        _note(t2)
        swap(t1, t2)  # type: ignore[no-untyped-call]

    torch.utils.swap_tensors = swap_tensors
