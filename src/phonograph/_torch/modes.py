"""Private parts of torch: dispatch modes, transforms of torch.func, autocast."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import CodeType

import torch
import torch.backends.mha
import torch.overrides
import torch.utils._device
import torch.utils._python_dispatch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from .dynamic import Private
from .functions import _c

__all__ = [
    "ASKS_NO_SUBCLASS",
    "TorchDispatchMode",
    "autocast_is_on",
    "below_autograd",
    "default_device",
    "dispatch_modes",
    "following_views",
    "function_modes",
    "is_batched",
    "is_traced",
    "resolves_again",
    "transformed",
    "transforms_undone",
    "without_autocast",
    "without_modes",
    "without_subclasses",
]


autocast_is_on: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
"""Whether it may be, on any kind of device."""

below_autograd: Callable[[], AbstractContextManager[object]] = _c("_AutoDispatchBelowAutograd")
"""A context in which operators run without autograd, and without a look at grad mode."""

without_autocast: Callable[[], AbstractContextManager[object]] = torch._C._DisableAutocast
"""A context in which operators take their inputs as they are."""

without_subclasses: Callable[[], AbstractContextManager[object]] = torch._C.DisableTorchFunctionSubclass
"""A context in which subclasses of tensors are not asked (`__torch_function__`)."""

ASKS_NO_SUBCLASS: object = torch._C._disabled_torch_function_impl
"""The `__torch_function__` of classes that leave all to torch."""

without_modes: Callable[[], AbstractContextManager[object]] = _c("_DisableTorchDispatch")
"""A context in which operators are not shown to a `TorchDispatchMode`."""

_exclude: Callable[[object, bool], None] = _c("_dispatch_tls_set_dispatch_key_excluded")
_excluded: Callable[[object], bool] = _c("_dispatch_tls_is_dispatch_key_excluded")

_CONJUGATE, _NEGATIVE, _ZERO = torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative, torch._C.DispatchKey.ZeroTensor
_VIEWS = torch._C.DispatchKey.ADInplaceOrView


def resolves_again() -> None:
    """For the rest of a `__torch_dispatch__`: let tensors that stand for others (conjugated, negated, known to be zero) be
    resolved. Torch calls a mode with that switched off, as all that comes before modes: an operator that is called from there
    takes such tensors of its own for plain memory, so that its numbers are wrong, or it reads where nothing is."""
    _exclude(_CONJUGATE, False)
    _exclude(_NEGATIVE, False)
    _exclude(_ZERO, False)


@contextmanager
def following_views() -> Iterator[None]:
    """Inside the block views of parameters require gradients in inference mode, as where no mode looks on: by that `matmul`
    chooses its way."""
    before = _excluded(_VIEWS)
    _exclude(_VIEWS, False)
    try:
        yield
    finally:
        _exclude(_VIEWS, before)


dispatch_modes: Callable[[], int] = _c("_len_torch_dispatch_stack")

function_modes: Callable[[], int] = _c("_len_torch_function_stack")

_mode_stack: Callable[[], list[Private]] = getattr(torch.overrides, "_get_current_function_mode_stack", list)

_DeviceContext: object = getattr(torch.utils._device, "DeviceContext", None)


def default_device() -> torch.device | None:
    """The device that `torch.set_default_device` or ``with torch.device(...)`` has set, if no other function mode is on."""
    modes = _mode_stack()
    if not modes or not all(type(mode) is _DeviceContext for mode in modes):
        return None
    device: torch.device = modes[-1].device
    return device


_modes: Callable[[], list[object]] = getattr(torch.utils._python_dispatch, "_get_current_dispatch_mode_stack", list)

_BATCHED = [f for n in ("is_batchedtensor", "is_legacy_batchedtensor") if (f := getattr(torch._C._functorch, n, None))]


def is_batched(t: torch.Tensor) -> bool:
    """Whether a tensor stands for a batch of them, which `vmap` and ``is_grads_batched`` hide."""
    return any(asks(t) for asks in _BATCHED)


is_traced: Callable[[], bool] = getattr(torch._C, "_is_tracing", bool)
"""Whether `torch.jit.trace` is at work."""


def transformed() -> bool:
    """Whether a functorch transform (grad, vmap, jvp) is going on."""
    return torch._C._functorch.peek_interpreter_stack() is not None


_functorch = torch._C._functorch

_END_OF: dict[str, Callable[[], object]] = {  # (what torch 2.11 has to end them all takes one too many)
    "Grad": _functorch._grad_decrement_nesting, "Jvp": _functorch._jvp_decrement_nesting,
    "Vmap": _functorch._vmap_decrement_nesting, "Functionalize": _functorch._func_decrement_nesting,
}  # fmt: skip

_hooks_of_saved = torch._C._autograd


@contextmanager
def transforms_undone(ran: Callable[[], Iterable[CodeType]]) -> Iterator[None]:
    """If the block raises: end those of functorch's transforms that have begun in it, and a level of forward-mode derivatives,
    and let saved tensors have hooks as before. Dynamo writes their beginnings and ends into graphs as calls of their own: an
    exception between them would leave all of that as it is, for the whole process. `ran` is the code that has run."""
    depth = _functorch.get_dynamic_layer_stack_depth()
    disabled = _hooks_of_saved._saved_tensors_hooks_get_disabled_error_message()
    level = forward_ad._current_level
    try:
        yield
    except BaseException:
        while _functorch.get_dynamic_layer_stack_depth() > depth:
            _END_OF[_functorch.peek_interpreter_stack().key().name]()
        if level < 0 and any("_enter_dual_level" in code.co_names for code in ran()):  # or it is another thread's
            _end_dual_level()
            forward_ad._current_level = level
        if disabled is None:
            _hooks_of_saved._saved_tensors_hooks_enable()
        else:
            _hooks_of_saved._saved_tensors_hooks_disable(disabled)
        raise


def _end_dual_level() -> None:
    """There is one at most, and its own functions are the only ones that know of it."""
    try:
        level = torch._C._enter_dual_level()
    except RuntimeError:  # within another
        level = 0
    torch._C._exit_dual_level(level=level)
