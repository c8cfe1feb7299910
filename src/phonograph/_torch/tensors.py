"""Private parts of torch: tensors, and their memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from operator import add, lt, mul

import torch
import torch.backends.mha
import torch.overrides
import torch.utils._device
import torch.utils._python_dispatch

from .dynamic import Private
from .functions import _c

__all__ = [
    "TensorBase",
    "address",
    "alias",
    "any_freed",
    "are_fake",
    "behind",
    "copy_all",
    "has_memory",
    "inner_names",
    "is_freed",
    "is_leaf",
    "is_ordinary",
    "is_shape",
    "is_valueless",
    "is_zero",
    "kind_of",
    "make_subclass",
    "maker",
    "makes_fakes",
    "neg_view",
    "owners",
    "say_themselves",
    "says_history",
    "says_version",
    "storage_at",
    "storage_id",
    "tensor_check",
    "use_count",
]


use_count: Callable[[int], int] = _c("_storage_Use_Count")
"""How many owners a storage has, by its `_cdata`: tensors, and its Python object."""

TensorBase: Private = torch._C.TensorBase
"""The class in C++ from which `torch.Tensor` inherits its attributes."""

owners: Callable[[torch.Tensor], int] = getattr(TensorBase, "_use_count", None)  # type: ignore[assignment]
"""How many owners a tensor has in C++: its Python object, a `.grad` that it stands in, a graph that has saved it."""

neg_view: Callable[[torch.Tensor], torch.Tensor] = torch._neg_view
"""A view that stands for the negative of its base, as `torch.conj` does for the conjugate."""

copy_all: Callable[..., None] = torch._foreach_copy_
"""Copy tensors into as many others, in few kernels."""

make_subclass: Callable[[type, torch.Tensor], Private] = torch.Tensor._make_subclass
"""The same memory as a tensor of a subclass, without history."""

address: Callable[[torch.Tensor], int] = torch._C.TensorBase.data_ptr
"""`Tensor.data_ptr` without the look-up of the method."""

alias: Callable[[Private], torch.Tensor] = torch._C.TensorBase.data.__get__  # type: ignore[attr-defined]
"""`Tensor.data`: another tensor on the same memory, with a version of its own. The cheapest way to make one."""

_ORDINARY = (torch.Tensor, torch.nn.Parameter)
_STRIDED = torch.strided


def _gives_storage(t: torch.Tensor) -> bool:
    try:
        return t.untyped_storage() is not None
    except RuntimeError:  # or NotImplementedError, which is one
        return False


_has_storage: Callable[[torch.Tensor], bool] = getattr(torch._C, "_has_storage", _gives_storage)

_is_functional: Callable[[torch.Tensor], bool] = getattr(torch, "_is_functional_tensor", lambda t: False)

is_zero: Callable[[torch.Tensor], bool] = getattr(torch._C.TensorBase, "_is_zerotensor", lambda t: False)
"""Whether autograd knows a tensor to be zero: nothing lies where it does, and nobody can write it."""


def is_ordinary(t: torch.Tensor) -> bool:
    """Whether it is of torch's own classes, whose memory is its own, if it has any."""
    return type(t) in _ORDINARY


def is_leaf(t: torch.Tensor) -> bool:
    """Whether a tensor is a leaf. Of a view that was made without gradients, and whose base was written since, torch does not
    say what it is, but raises: it is none."""
    try:
        return t.is_leaf
    except RuntimeError:
        return False


def says_version(t: torch.Tensor) -> bool:
    """Whether torch says how often a tensor was written, which it does not count in inference mode: of one that was made there,
    and got the memory of one that was not (`t.data = u`), it says neither."""
    try:
        return t.is_inference() or t._version >= 0
    except RuntimeError:
        return False


def says_history(t: torch.Tensor) -> bool:
    """Whether torch says where a tensor comes from (`is_leaf`)."""
    try:
        t.grad_fn  # noqa: B018
    except RuntimeError:
        return False
    return True


def is_freed(t: torch.Tensor) -> bool:
    """Whether some of the memory in which a tensor's elements would lie was given back, as by `resize_(0)` of its storage."""
    return bool(t.numel()) and t.untyped_storage().nbytes() < t.storage_offset() * t.itemsize + _extent(t)


def any_freed(like: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], bool]:
    """The same of tensors with the shapes, strides and types of these, all together: a function in which no line of Python runs
    for each."""
    sizes = [t.itemsize if t.numel() else 0 for t in like]
    extents = [_extent(t) if t.numel() else 0 for t in like]

    def any_is(tensors: Sequence[torch.Tensor]) -> bool:
        ends = map(add, map(mul, map(_offset, tensors), sizes), extents)
        return any(map(lt, map(_nbytes, map(_storage, tensors)), ends))

    return any_is


def _extent(t: torch.Tensor) -> int:
    """The bytes from the first element of a tensor to its last."""
    return t.itemsize * (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)))


_offset: Callable[[torch.Tensor], Private] = torch.Tensor.storage_offset
_storage: Callable[[torch.Tensor], torch.UntypedStorage] = torch.Tensor.untyped_storage
_nbytes: Callable[[torch.UntypedStorage], int] = torch.UntypedStorage.nbytes


def storage_id(t: torch.Tensor) -> int:
    """The identity of a tensor's memory: the same for all its views, for as long as it lives."""
    return int(t.untyped_storage()._cdata)


def has_memory(t: torch.Tensor) -> bool:
    """Whether a tensor is memory with a shape, and nothing else: to be asked before that memory is asked for, which raises
    where there is none. Not so: what `kind_of` names."""
    if type(t) in _ORDINARY:  # (written out: this is asked of each tensor time and again)
        if not _has_storage(t) or t.layout is not _STRIDED or t.is_nested or t.is_quantized or t.is_meta:
            return False
        return not (is_zero(t) or _is_functional(t))
    with torch._C.DisableTorchFunctionSubclass():  # what its class makes of such questions is not asked
        return not torch.nn.parameter.is_lazy(t) and _lies_somewhere(t) and _has_address(t)


def _lies_somewhere(t: torch.Tensor) -> bool:
    if not _has_storage(t) or t.layout is not _STRIDED or t.is_nested or t.is_quantized or t.is_meta:
        return False
    return not (is_zero(t) or _is_functional(t))


def _has_address(t: torch.Tensor) -> bool:
    """Whether there is something where a tensor of some class says that it lies. Where it stands for others, torch has nothing
    there, and on another device, or raises."""
    storage = t.untyped_storage()
    try:
        return storage.device.type == t.device.type and (storage.data_ptr() != 0 or not storage.nbytes())
    except RuntimeError:
        return False


def kind_of(t: torch.Tensor) -> str:
    """What a tensor is that has no memory, or more than that."""
    with torch._C.DisableTorchFunctionSubclass():
        if torch.nn.parameter.is_lazy(t):
            return "a parameter that is not initialized yet"
        if t.is_nested or t.layout is not torch.strided:
            return f"a {'nested' if t.is_nested else str(t.layout).removeprefix('torch.')} tensor"
        if _is_wrapped(t):
            return "a tensor of a torch.func transform (vmap, grad), which may have ended"
        named = {"quantized": t.is_quantized, "meta": is_shape(t), "functional": _is_functional(t)}
        if found := next((name for name, is_so in named.items() if is_so), ""):
            return f"a {found} tensor"
        if type(t) not in _ORDINARY:
            return f"a tensor of class {type(t).__qualname__}"
        return "a tensor that is known to be zero" if is_zero(t) else "a tensor that has no memory"


def is_shape(t: torch.Tensor) -> bool:
    """Whether it is a plain tensor on the meta device: a shape without values."""
    return type(t) in _ORDINARY and t.is_meta


def is_valueless(t: torch.Tensor) -> bool:
    """Whether there is nothing that could be another value at a replay: it is a shape, or known to be zero."""
    return type(t) in _ORDINARY and (t.is_meta or is_zero(t))


_functorch_wrapped: Private = getattr(torch._C._functorch, "is_functorch_wrapped_tensor", lambda t: False)


def _is_wrapped(t: torch.Tensor) -> bool:
    """Whether a transform of torch.func has made this tensor, which stands for another."""
    return bool(_functorch_wrapped(t)) and not _is_functional(t)


def behind(t: torch.Tensor) -> list[torch.Tensor]:
    """The tensor for which one stands that a transform has left behind, if that is what operators take for it now."""
    unwrapped: Private = getattr(torch._C._functorch, "get_unwrapped", None)
    differentiated: Private = getattr(torch._C._functorch, "is_gradtrackingtensor", None)
    if unwrapped is None or differentiated is None or not _is_wrapped(t) or not differentiated(t):
        return []
    return [unwrapped(t)]


def inner_names(t: torch.Tensor) -> tuple[str, ...]:
    """The names of the attributes that hold the tensors of which one of some class is made: torch's protocol of wrappers."""
    if type(t) in _ORDINARY or not (hasattr(type(t), "__tensor_flatten__") and hasattr(type(t), "__tensor_unflatten__")):
        return ()
    with suppress(Exception):  # it is others' code, and may want what is not there yet
        names, _ = t.__tensor_flatten__()  # type: ignore[attr-defined]
        return tuple(names)
    return ()


_says_nothing: object = getattr(torch._C, "_disabled_torch_dispatch_impl", None)


def say_themselves(types: Iterable[type]) -> list[type]:
    """Those of these classes of tensors that say themselves what operators mean (torch names others as well)."""
    return [kind for kind in types if kind.__torch_dispatch__ is not _says_nothing]  # type: ignore[attr-defined]


def are_fake(types: Iterable[type]) -> bool:
    """Whether these classes are that of fake tensors."""
    fake = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", None)
    return fake is not None and all(issubclass(kind, fake) for kind in types)


_mode_of: Private = getattr(torch._C, "_get_dispatch_mode", None)

_FAKE: object = getattr(getattr(torch._C, "_TorchDispatchModeKey", None), "FAKE", None)


makes_fakes: Callable[[], object] = bool if _mode_of is None or _FAKE is None else partial(_mode_of, _FAKE)
"""Whether what operators make at the moment is fake. (The mode that does so is asked after all others, whenever it was
entered.) Asked of each operator: no line of Python runs."""


def storage_at(where: int, nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """A storage on memory that it does not own."""
    made: torch.UntypedStorage = _c("_construct_storage_from_data_pointer")(where, device, nbytes)
    return made


_guards: object = getattr(getattr(torch._C, "_dynamo", None), "guards", None)


def maker(like: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function that makes uninitialized tensors with the metadata of this one, dense in memory, on the device it lies on,
    which must be the current one. torch.compile's way costs 0.5 us less than `empty_like`, and fills nothing in
    deterministic mode."""
    empty_strided = getattr(_guards, f"_empty_strided_{like.device.type}", None)
    if empty_strided is None:
        return partial(torch.empty_like, like)
    return partial(empty_strided, tuple(like.shape), like.stride(), like.dtype)


_TensorGuards: Private = getattr(_guards, "TensorGuards", None)


def tensor_check(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """A function that says, in C++, whether the tensors it is given have the metadata of these: type, dtype, device, shape,
    strides, requires_grad, dispatch keys. torch.compile's guards; None where this release of torch has none."""
    if _TensorGuards is None or not tensors:
        return None
    guards = _TensorGuards(
        *tensors,
        dynamic_dims_sizes=[list(t.shape) for t in tensors],
        dynamic_dims_strides=[list(t.stride()) for t in tensors],
    )
    check: Callable[..., bool] = guards.check
    return check
