"""Private parts of torch: modules and optimizers."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CodeType, FrameType

import torch
import torch.backends.mha
import torch.optim.optimizer as optimizer_module
import torch.overrides
import torch.utils._device
import torch.utils._python_dispatch
from torch.nn import Module
from torch.optim import Optimizer

from .dynamic import Private

__all__ = [
    "CALLED_THROUGH",
    "at_work_in",
    "call_through",
    "goes_through",
    "hooks_of_modules",
    "hooks_of_optimizers",
    "member_accessor",
    "module_hooks",
    "module_settings",
    "optimizer_hooks",
    "other_calling",
    "own_call",
    "parametrizations_are_cached",
    "scaled_step",
    "step_hooks",
    "steps_captured",
    "steps_itself",
    "unscale_grads",
]


member_accessor = torch.nn.utils._named_member_accessor
"""The module whose `swap_tensor` puts tensors into modules, for `functional_call`."""

unscale_grads: Callable[..., object] = torch.amp.GradScaler._unscale_grads_


@contextmanager
def scaled_step(make: Callable[[Callable[..., Private]], Callable[..., Private]]) -> Iterator[None]:
    """During the block, gradient scalers call what this has made of the method by which they step, or skip it."""
    kind: Private = torch.amp.GradScaler
    plain = getattr(kind, _SCALED_STEP, None)
    if plain is None:
        yield
        return
    made = make(plain)
    setattr(kind, _SCALED_STEP, made)
    try:
        yield
    finally:
        if getattr(kind, _SCALED_STEP) is made:
            setattr(kind, _SCALED_STEP, plain)


_SCALED_STEP = "_maybe_opt_step"

CALLED_THROUGH = "_compiled_call_impl"
"""The attribute of a module that says what its calls go through."""


def call_through(module: Module, call: Callable[..., object] | None) -> None:
    """Let calls of a module go to `call`; None: to its own again. torch keeps this out of what is pickled or copied."""
    if not hasattr(Module, "_compiled_call_impl"):
        raise NotImplementedError(
            "this torch release lacks nn.Module._compiled_call_impl: record a function that calls the module"
        )
    module._compiled_call_impl = call
    if module._compiled_call_impl is not call:  # one of TorchScript's hands attributes on to another
        vars(module)["_compiled_call_impl"] = call


def goes_through(module: Module) -> Private:
    """What calls of a module go to, if not to its own; None otherwise."""
    return module._compiled_call_impl


def own_call(module: Module) -> Callable[..., object]:
    """A module's own call: its hooks, and `forward`."""
    call: Callable[..., object] = module._call_impl
    return call


_CALL: object = getattr(getattr(Module, "_wrapped_call_impl", None), "__code__", None)


def other_calling(frame: FrameType, owner: object) -> Callable[..., Private] | None:
    """The own call of the module whose call this frame is, if that is another than `owner`: one that was given the attributes
    of that, and with them what its calls go through. So are the replicas of `torch.nn.DataParallel` made."""
    if frame.f_code is not _CALL:
        return None
    module = frame.f_locals["self"]
    return own_call(module) if module is not owner else None


_identity: Callable[[object], int] = object.__hash__  # (a code's own goes through all its instructions)
_WORKS = {
    _identity(getattr(inspect.unwrap(function), "__code__", None)): name
    for name, function in (
        ("", Module._call_impl),
        ("zero_grad", Optimizer.zero_grad),
    )
}
# What torch puts around the step of each optimizer.
_WORKS[_identity(getattr(Optimizer.profile_hook_step(int), "__code__", None))] = "step"
_BACKWARD: CodeType | None = getattr(getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None)


def at_work_in(
    frame: FrameType | None, outermost: CodeType | None, is_users: Callable[[str], bool]
) -> tuple[Module | str | None, FrameType | None]:
    """The innermost module whose call this frame is part of, or what an optimizer does (`AdamW.step`), within the code that is
    `outermost` and the backward that runs; and the innermost frame of the user's."""
    users: FrameType | None = None
    while frame is not None and (code := frame.f_code) is not outermost and code is not _BACKWARD:
        what = _WORKS.get(_identity(code))
        if what is not None:
            found = frame.f_locals.get("self")
            if isinstance(found, Module):
                return found, users
            if isinstance(found, Optimizer):
                return f"{type(found).__name__}.{what}", users
        if users is None and is_users(code.co_filename):
            users = frame
        frame = frame.f_back
    return None, users


def _global_hooks(module: object) -> list[dict[int, object]]:
    return [v for n, v in vars(module).items() if n.startswith("_global_") and isinstance(v, dict)]


hooks_of_modules, hooks_of_optimizers = _global_hooks(torch.nn.modules.module), _global_hooks(optimizer_module)


def module_hooks() -> tuple[object, ...]:
    """The hooks that all modules share."""
    return tuple([hook for d in hooks_of_modules for hook in d.values()])


def optimizer_hooks() -> tuple[object, ...]:
    """The hooks that all optimizers share."""
    return tuple([hook for d in hooks_of_optimizers for hook in d.values()])


def step_hooks(optimizer: Optimizer) -> tuple[object, ...]:
    """The hooks of one optimizer's `step`."""
    if not steps_itself(optimizer):
        return ()
    return (*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values())


def steps_itself(optimizer: Optimizer) -> bool:
    """Whether it is an optimizer of its own, with hooks, and none that stands before another (accelerate's)."""
    return "_optimizer_step_pre_hooks" in vars(optimizer)


_COUNT_READ_BY = "_get_value"  # in the modules of torch.optim

_ASKS_FOR_MODE = ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check")  # the latter up to torch 2.11


@contextmanager
def steps_captured(count: Callable[[object], float | None]) -> Iterator[None]:
    """During the block, steps of torch's optimizers may be captured: `count` gives what they read of a step count, or None
    where they have to read it; and none asks for the `capturable` mode."""
    base: object = Optimizer
    places: list[tuple[object, str, Callable[[Private], object]]]
    places = [(base, n, lambda _: _asks_nothing) for n in _ASKS_FOR_MODE if n in vars(base)]
    modules = {sys.modules.get(kind.__module__) for kind in vars(torch.optim).values() if isinstance(kind, type)}

    def reads(read: Callable[[object], object]) -> Callable[[object], object]:
        def value(x: object) -> object:
            found = count(x)
            return read(x) if found is None else found

        return value

    places += [(m, _COUNT_READ_BY, reads) for m in modules if hasattr(m, _COUNT_READ_BY)]
    before = [(place, name, vars(place)[name]) for place, name, _ in places]
    try:
        for (place, name, instead), (_, _, old) in zip(places, before, strict=True):
            setattr(place, name, instead(old))
        yield
    finally:
        for place, name, old in before:
            setattr(place, name, old)


def _asks_nothing(_: Optimizer) -> None:
    """Instead of torch's check."""


def parametrizations_are_cached() -> bool:
    """Whether this is within `parametrize.cached()`."""
    return bool(getattr(sys.modules.get("torch.nn.utils.parametrize"), "_cache_enabled", False))


_mha, _FAST = vars(torch.backends.mha), "_is_fastpath_enabled"
_is_fast: Callable[[], object] = partial(_mha.get, _FAST) if _FAST in _mha else torch.backends.mha.get_fastpath_enabled


def module_settings() -> tuple[object, ...]:
    """Settings of torch's that its modules ask for: `parametrize.cached()`, and attention's fast path."""
    return parametrizations_are_cached(), _is_fast()
