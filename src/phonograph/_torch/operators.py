"""Private parts of torch: operators."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, FrameType, MethodDescriptorType
from typing import Any, TypeGuard

import torch
import torch.backends.mha
import torch.overrides
import torch.utils._device
import torch.utils._python_dispatch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from .functions import _c

__all__ = [
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "bindings",
    "called_at",
    "calls_higher_order",
    "calls_others",
    "carried_out",
    "insists_on_no_mode",
    "is_composite",
    "is_higher_order",
    "is_missing",
    "numbers_in_place_of_tensors",
]


@functools.cache
def called_at(name: str) -> Sequence[tuple[Any, str]]:
    """Where Python code finds what calls operators of this name: objects, and what that is called there. They are modules,
    people's and that of torch's own layers, and what is in `torch.ops`."""
    modules = [(module, name) for module in (torch, getattr(torch, "_VF", None)) if hasattr(module, name)]
    packet = getattr(torch.ops.aten, name, None)
    overloads = [] if packet is None else [packet, *(getattr(packet, overload) for overload in packet.overloads())]
    return modules + [(one, "_op") for one in overloads if hasattr(one, "_op")]


def bindings(name: str, *, out: bool) -> list[Callable[..., object]]:
    """The functions in C by which Python calls operators of this name: those that take `out=`, or methods come first."""
    spaces = (torch, getattr(torch._C, "_nn", None)) if out else (torch.Tensor, torch)
    found = [getattr(space, name, None) for space in spaces]
    return [f for f in found if isinstance(f, (BuiltinFunctionType, MethodDescriptorType))]


def is_composite(func: OpOverload) -> bool:
    """Whether an operator is made of others before autograd sees it."""
    return bool(_c("_dispatch_has_kernel_for_dispatch_key")(func.name(), "CompositeImplicitAutograd"))


def calls_others(func: OpOverload) -> bool:
    """Whether its code is for no kind of device in particular, and calls other operators; and torch notes nothing of it by
    itself before that runs, as of what is a view or is written."""
    name, has = func.name(), _c("_dispatch_has_kernel_for_dispatch_key")
    if not _c("_dispatch_has_kernel")(name):
        return False  # TorchScript's own
    return (is_composite(func) or has(name, "CompositeExplicitAutograd")) and not has(name, "ADInplaceOrView")


def is_higher_order(func: object) -> TypeGuard[HigherOrderOperator]:
    """Whether this is an operator of `torch.ops.higher_order`, which is given functions or other operators."""
    return type(func) is not torch._ops.OpOverload and isinstance(func, torch._ops.HigherOrderOperator)  # (that asks `abc`)


def calls_higher_order(frame: FrameType | None) -> bool:
    """Whether this frame is torch's own that compiles such an operator, into nothing but a call of it: `torch.cond`."""
    return frame is not None and os.path.basename(os.path.dirname(frame.f_code.co_filename)) == "_higher_order_ops"


def insists_on_no_mode(func: HigherOrderOperator) -> bool:
    """Whether its own code does not run under a dispatch mode: it asks whether there is one, and calls no operators itself."""
    code = getattr(func.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd), "__code__", None)
    return code is not None and "_get_current_dispatch_mode" in code.co_names


def carried_out(func: HigherOrderOperator, args: Sequence[object], kwargs: dict[str, object]) -> object:
    """What such an operator gives by its own code for the device, below dispatch modes, which see what it calls."""
    keys = torch._ops._compute_keyset(args, kwargs, func.non_fallthrough_keys)
    for key in (torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot):
        keys = keys.remove(key)
    return func.dispatch(keys.highestPriorityTypeId(), *args, **kwargs)


def is_missing(e: NotImplementedError) -> bool:
    """Whether it is torch's that such an operator has no code."""
    return "could not find kernel for HigherOrderOperator" in str(e)


_takes_numbers: Callable[[str], bool] = getattr(torch._C, "_should_allow_numbers_as_tensors", lambda name: True)


def numbers_in_place_of_tensors(func: OpOverload, args: Sequence[object]) -> list[int]:
    """Where an operator is given a number and takes none. Torch hands on to modes, as a number, the tensor that it has made of
    one; many operators make it one again, and the others fail, which they do not where no mode looks on."""
    found = [i for i, x in enumerate(args) if isinstance(x, (bool, int, float, complex))]
    found = [i for i in found if str(func._schema.arguments[i].type) == "Tensor"]
    return found if found and not _takes_numbers(func._schema.name.partition("::")[2]) else []
