"""`DistributedDataParallel` in a capture.

Its reducer, which is written in C++, hears of each gradient as it comes, and averages a bucket of them over all ranks as soon
as all of that bucket are there. It is a program of its own beside the step's, and has a state: from the forward until the end
of the backward it is in the middle of a step. A capture that is given up leaves it there: the next step would raise, or
average what is not to be. Nor can it be put back. But another can be made that is as the old one was before the step.

So that happens where a capture is given up. And before the first: the nodes that add up gradients, which a reducer holds, work
on the stream on which it was made, mostly the default stream, which no capture may touch; and in its first ten steps it waits
for the GPU, to take times. A reducer that takes part in captures is made anew on the stream of these. The other ranks hear
nothing of it: it has the buckets that all have agreed on.

The memory of its buckets is nobody's else, and each replay works there. So recordings have it for as long as they are there,
whatever becomes of the reducer.

A function that can reach such a wrapper need not have to do with its averaging: it clips, steps an optimizer, follows the
weights by a moving average, or evaluates. It has, if the wrapper's forward runs while gradients are enabled, or any backward
does; the capture that meets one of these comes to nothing and is made again, before the reducer has heard of it.

A module that a wrapper calls has its backward recorded by itself, and its gradients arrive outside of that, where the reducer
hears of them. Nothing of the reducer's is captured then, but autograd waits for the stream of those nodes, also where a capture
goes no further than to them. So it is made anew as well.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from types import FrameType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
import torch.distributed

from .._torch.ddp import averages, averaging, has_reducer, others_around, reducer_anew, reduces_by
from .._torch.dynamic import Leaves, Private
from ..errors import Again, Refusal, Unseen
from ..python.identity import identity
from ..python.introspection import contents, is_users_class
from ..python.origin import BACKWARD
from .effects import ANYONE, Effect, Starts

__all__ = ["Averages", "Reducers", "around", "begun_by"]


class _Said(NamedTuple):
    """How a refusal begins, and what can be done."""

    what: str
    remedy: str


_CONTAINS = _Said("contains DistributedDataParallel", "call pg.record on the module that it wraps")
_LIES_IN = _Said("lies in DistributedDataParallel", "make a plain one, and record the whole step")


class Averages(Again):
    """A wrapper takes part in the call that is captured."""


class _Known(NamedTuple):
    """A reducer that was made for captures, and where it works."""

    reducer: weakref.ref[object]
    stream: object
    buckets: list[torch.Tensor]


_known: weakref.WeakKeyDictionary[torch.nn.Module, _Known] = weakref.WeakKeyDictionary()


def begun_by(modules: Iterable[torch.nn.Module]) -> int:
    """How many of these have begun a step in which they average gradients: as far as is known, after the first of it."""
    found: Leaves = [m for m in modules if averages(m)]
    return sum(m.require_forward_param_sync for m in found if getattr(m, "_lazy_init_ran", False))


class Reducers:
    """Those of the modules that a call can reach, and whether they take `part` in it.

    Raises:
        Refusal: one of them does, and cannot in a capture.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], *, whole: bool, part: bool) -> None:
        found: Leaves = [m for m in modules if averages(m)]
        self._wrappers, self._others = (found, []) if part else ([], found)
        for wrapper in self._wrappers:
            _check(wrapper, whole)

    def begins(self) -> Starts:
        """The functions of torch's by which one that does not takes part after all. Their start raises `Averages`."""
        if not self._others:
            return {}
        return {
            "forward": [(os.path.join("torch", "nn", "parallel", "distributed.py"), self._concerns, _BEGINS)],
            BACKWARD: [(os.path.join("torch", "autograd", "graph.py"), self._concerns, _BEGINS)],
        }

    def _concerns(self, frame: FrameType) -> bool:
        """Whether a backward begins, or the forward of a wrapper of which its reducer hears."""
        called = frame.f_locals.get("self")
        return frame.f_code.co_name == BACKWARD or (any(called is wrapper for wrapper in self._others) and _prepares(called))

    @contextmanager
    def taking_part(self, device: Any) -> Iterator[list[torch.Tensor]]:
        """The memory in which they work, in a capture on this device; after one that fails they are as before it."""
        if not self._wrappers:
            yield []
            return
        with device.apart() as stream:
            found = [t for wrapper in self._wrappers for t in _made_for(wrapper, stream)]
        try:
            yield found
        except BaseException:
            for wrapper in self._wrappers:
                reducer_anew(wrapper)
                _known.pop(wrapper, None)
            raise


_BEGINS = Effect(*_CONTAINS, ANYONE, Averages)


def _prepares(wrapper: Private) -> bool:
    """Whether its forward does more now than to broadcast its buffers."""
    return torch.is_grad_enabled() or bool(wrapper.mixed_precision) or wrapper._join_config.enable


def around(device: Any) -> None:
    """A module is about to be recorded with its backward. If a wrapper is calling it, that adds up gradients where a backward
    can be captured, from now on.

    Raises:
        Refusal: it cannot.
    """
    wrapper = averaging()
    if wrapper is None or device.torch_device.type != "cuda":
        return
    _check_reducer(wrapper, _LIES_IN)
    with device.apart() as stream:
        _made_for(wrapper, stream, _LIES_IN)


def _check(wrapper: object, whole: bool) -> None:
    what, inside = _CONTAINS
    if not whole:
        raise Refusal(f"{what}, whose averaging belongs to the backward", f"record the whole step, or {inside}")
    for hook, state in getattr(wrapper, "_comm_hooks", ()):
        if kept := _keeps(hook, state):
            raise Refusal(f"{what} with a communication hook that goes by what it keeps (a {kept})",
                          "use one that keeps nothing, as fp16_compress_hook")  # fmt: skip
    _check_reducer(wrapper, _CONTAINS)


def _check_reducer(wrapper: Private, said: _Said) -> None:
    """Whether it can be made anew, which the wrapper then need not know."""
    what, remedy = said
    if not has_reducer(wrapper):
        raise Refusal(f"{what} that averages in a way that is not known (its reducer)", remedy)
    for name, why in _UNLIKE.items():
        if getattr(wrapper, name, None):
            raise Refusal(f"{what} with {name}, {why}", remedy)
    if hook := reduces_by(wrapper):
        raise Refusal(f"{what} with a communication hook of torch's own ({hook})", "use one that is written in Python")
    if any(hasattr(p, "_in_backward_optimizers") for p in wrapper._module_parameters):
        raise Refusal(f"{what} with optimizers that step in the backward", remedy)
    if wrapper._join_config.enable:
        raise Refusal(f"{what} within join(), where ranks do not do the same", "call it outside", this_call=True)
    if not wrapper._has_rebuilt_buckets:
        raise Unseen(f"{what} that has not made its first two steps", "call it before", final=False)


_UNLIKE = {
    "find_unused_parameters": "which asks in each step who has gradients",
    "static_graph": "which has learned from its first step what cannot be asked",
    "mixed_precision": "which gives parameters other memory in each step",
    "skip_all_reduce_unused_params": "which asks in each step who has gradients",
    "_delay_all_reduce_params": "which averages them by themselves",
    "_use_python_reducer": "which averages in compiled code",
}


def _keeps(*given: object) -> str:
    """The name of the class of an object of others that a hook has, or ""; the user's are looked into, as they are elsewhere.
    (Autograd's threads call a hook, so that nobody may see what it reads and sets.)"""
    seen: set[int] = set()
    todo = [*given]
    while todo:
        x = todo.pop()
        if identity(x) in seen:
            continue
        seen.add(identity(x))
        if isinstance(x, MethodType):
            todo += [x.__func__, x.__self__]
        elif isinstance(x, FunctionType):
            todo += [contents(cell) for cell in x.__closure__ or ()] + [*(x.__defaults__ or ())]
        elif isinstance(x, partial):
            todo += [x.func, *x.args, *x.keywords.values()]
        elif isinstance(x, (list, tuple)):
            todo += x
        elif isinstance(x, dict):
            todo += x.values()
        elif not isinstance(x, _LOOKED_AT) and _has_methods(type(x)) and not is_users_class(type(x)):
            return type(x).__qualname__
    return ""


_LOOKED_AT = (type, Enum, torch.Tensor, torch.nn.Module, *filter(None, [getattr(torch.distributed, "ProcessGroup", None)]))


def _has_methods(kind: type) -> bool:
    """Whether a class has methods that are written in Python."""
    return any(isinstance(member, FunctionType) for base in kind.__mro__ for member in vars(base).values())


def _made_for(wrapper: Private, stream: object, said: _Said = _CONTAINS) -> list[torch.Tensor]:
    """The memory of the buckets of this one's reducer, made anew if it has to be."""
    known = _known.get(wrapper)
    if known is None or known.reducer() is not wrapper.reducer or known.stream != stream:
        if others_around(wrapper):
            raise Refusal(f"{said.what}, and others have its parameters (another wrapper) or the nodes that add up their "
                          "gradients", said.remedy)  # fmt: skip
        buckets = reducer_anew(wrapper)
        if buckets is None:
            raise Unseen(f"{said.what} with buckets that two steps have to make", "call it before", final=False)
        known = _known[wrapper] = _Known(weakref.ref(wrapper.reducer), stream, buckets)
    return known.buckets
