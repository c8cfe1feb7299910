"""Wrapping: a recorded function for a function, and a module whose calls go through one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from .._torch import dynamo as torch_dynamo
from .._torch import modules as torch_modules
from ..call.unrolled import Unrolled
from ..engine.recorded import Recorded
from ..engine.uncalled_modules import leave
from ..guards.module_epochs import Wrapped
from ..options import Options
from ..python.identity import identity
from ..shapes.buckets import Padded

__all__ = ["unwrap", "wrap"]


def wrap(fn: Any, options: Options, kind: Callable[[Any, Options], Recorded[Any, Any]] = Recorded) -> Any:
    """What `record` returns for a function or module; `kind` makes the recorded function."""
    if not callable(fn):
        hint = ": record its step, optimizer.step = pg.record(optimizer.step)" if isinstance(fn, torch.optim.Optimizer) else ""
        raise TypeError(f"pg.record takes a function or module, not {type(fn).__name__}{hint}")
    if isinstance(fn, Recorded):
        fn = fn.__wrapped__
    if isinstance(fn, Unrolled):
        fn = fn.function
    make = Padded if options.shapes else kind
    if options.steps is not None:
        if isinstance(fn, torch.nn.Module):
            raise TypeError("steps is for a function: record the step that calls the module")
        return make(Unrolled(fn, options.steps, options), options)
    if isinstance(fn, torch.nn.Module):
        leave(fn)
        before = torch_modules.goes_through(fn)  # `module.compile()`, or an earlier pg.record
        call = before.__wrapped__ if isinstance(before, Recorded) else before or torch_modules.own_call(fn)
        name = options.name or type(fn).__qualname__
        _hear_of_compilers()
        _modules[identity(fn)] = weakref.ref(fn, partial(_gone, identity(fn)))
        torch_modules.call_through(fn, make(call, replace(options, name=name)).of(fn))
        return fn
    return make(fn, options)


def unwrap(module: torch.nn.Module, recorded: Recorded[Any, Any]) -> None:
    """Let calls of a module go where they went before it was recorded."""
    call = recorded.__wrapped__
    torch_modules.call_through(module, None if call == torch_modules.own_call(module) else call)
    _gone(identity(module))
    if not _modules:
        _compile.back()


_modules: dict[int, weakref.ref[torch.nn.Module]] = {}  # that are recorded


def _gone(module: int, _: object = None) -> None:
    _modules.pop(module, None)


def _hear_of_compilers() -> None:
    """What `torch.compile` does with recorded modules, it does past them."""
    _hear_of_traced()
    _compile.put()


@cache
def _hear_of_traced() -> None:
    torch_dynamo.hear_of_traced(_traced)


def _traced(call: object) -> None:
    if isinstance(call, Recorded):
        call.taken_as_plain()


def _compiled(module: torch.nn.Module, before: object) -> None:
    """`module.compile()` was called: it puts the compiled code in the place of what was recorded. That is recorded then, as if
    the module had been compiled first."""
    if isinstance(before, Recorded):
        before.reset()
        torch_modules.call_through(module, before.again(torch_modules.goes_through(module)).of(module))


_compile = Wrapped(torch.nn.Module, "compile", partial(torch_dynamo.telling_of_compiled, _compiled))
