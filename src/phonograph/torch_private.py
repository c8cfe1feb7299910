"""Every private function of PyTorch that phonograph uses, and what for. Looked up by `hasattr`, in this file only.

All of them exist in torch 2.11 to 2.15; `missing()` says what a newer release has taken away, and the device then refuses
to record and names it.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import json
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from enum import Enum
from functools import cache, partial, wraps
from importlib import import_module
from importlib.util import find_spec
from types import BuiltinFunctionType, CodeType, FrameType, MethodDescriptorType
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.backends.mha
import torch.optim.optimizer as optimizer_module
import torch.overrides
import torch.utils._device
import torch.utils._python_dispatch
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import BackwardHook

__all__ = ["ASKS_FOR_CAPTURE", "CALLED_THROUGH", "COMPILED_GRAPH", "GATHERED", "Forgotten", "OnStream", "abort", "address",
           "alias", "allocations_since", "are_fake", "autocast_is_on", "averages", "averaging", "backend_of", "backward_id",
           "before_groups_end", "behind", "below_autograd", "bindings", "bump", "call_through", "carried_out",
           "clear_cublas_workspaces", "coalesces", "coalescing", "code_of", "compiled_by", "compiled_call", "compiling",
           "compiling_apart", "compiling_backend", "current_device", "default_device", "default_store", "depends_on_data",
           "dict_version", "dispatch_modes", "donates", "ended_by", "fake_mode_of", "forget_accumulation",
           "forget_recomputed", "function_modes", "goes_through", "group_among", "groups_of", "groups_tell_their_end",
           "has_begun", "has_memory", "has_reducer", "hear_of_compiled", "hear_of_traced", "hearing", "hooks_of_modules",
           "hooks_of_optimizers", "in_inference", "inner_names", "insists_on_no_mode", "is_batched", "is_composite",
           "is_higher_order", "is_missing", "is_ordinary", "is_shape", "is_traced", "is_under_way", "is_valueless",
           "is_work", "is_written_by_torch", "keeps_graph", "keeps_shards", "kept_of_generators", "kept_settings",
           "kind_of", "lend_code", "lend_module", "looked_at_first", "made_as", "made_when", "maker", "makes_fakes",
           "may_run_backward", "measure_outside_of_pools", "missing", "module_hooks", "module_settings", "never_compiled",
           "not_compiled_by_itself", "not_followed_by_dynamo", "number_of_call", "on_thread_of_autograds", "once_there",
           "optimizer_hooks", "original_views", "other_calling", "others_around", "own_call", "own_rank",
           "parametrizations_are_cached", "puts_own_generators", "ran_compiled", "rank_in", "ranks_of", "raw_alloc",
           "raw_free", "raw_stream", "recomputed_part", "reducer_anew", "reduces_by", "route_to_pool", "run_where_traced",
           "saved_tensors_hooks", "say_themselves", "segments", "segments_expand", "selected_anew", "sharding_of",
           "share_version", "silence_stream_mismatch", "stands_for_work", "state_guard", "step_hooks", "steps_captured",
           "steps_itself", "stop_coalescing", "storage_at", "storage_id", "take_cublas_workspace", "tensor_check",
           "timeout_of", "traced_stack", "transformed", "transforms_undone", "unbacked", "unboxed_work", "uncompiled",
           "unseen_by_checkpoint", "use_count", "view_like", "wait_for_all", "waits_by_itself", "waits_for_all",
           "wants_graphs", "when_backward_ends", "will_run", "without_modes", "written_by_graph"]  # fmt: skip

P = ParamSpec("P")
R = TypeVar("R")
Handle = tuple[int, int]

_NEEDED = ("_construct_storage_from_data_pointer", "_storage_Use_Count", "_increment_version", "_len_torch_dispatch_stack",
           "_len_torch_function_stack", "_AutoDispatchBelowAutograd", "_dispatch_has_kernel_for_dispatch_key")  # fmt: skip
_NEEDED_ON_CUDA = ("_cuda_beginAllocateCurrentStreamToPool", "_cuda_beginAllocateCurrentThreadToPool",
           "_cuda_endAllocateToPool", "_cuda_releasePool",
           "_cuda_cudaCachingAllocator_raw_alloc", "_cuda_cudaCachingAllocator_raw_delete", "_cuda_clearCublasWorkspaces",
           "_cuda_getCurrentRawStream", "_cuda_getCurrentStream", "_cuda_setStream", "_cuda_getDevice",
           "_cuda_isHistoryEnabled")  # fmt: skip


def missing(cuda: bool) -> list[str]:
    """Functions that this release of torch does not have."""
    return [n for n in _NEEDED + _NEEDED_ON_CUDA * cuda if not hasattr(torch._C, n)]


def _c(name: str) -> Any:
    return getattr(torch._C, name, None)


# -- tensors. These are called in every replay, so that they are looked up once.

use_count: Callable[[int], int] = _c("_storage_Use_Count")
"""How many owners a storage has, by its `_cdata`: tensors, and its Python object."""
address: Callable[[torch.Tensor], int] = torch._C.TensorBase.data_ptr
"""`Tensor.data_ptr` without the look-up of the method."""
alias: Callable[[Any], torch.Tensor] = torch._C.TensorBase.data.__get__  # type: ignore[attr-defined]
"""`Tensor.data`: another tensor on the same memory, with a version of its own. The cheapest way to make one."""
bump: Callable[[Sequence[torch.Tensor]], None] = _c("_increment_version")
"""Move the version counters on, as an operator that writes does: autograd then notices a saved tensor that changed."""


not_followed_by_dynamo: Callable[[Callable[..., Any]], Any] = getattr(torch, "_disable_dynamo", torch.compiler.disable)
"""What `torch.compiler.disable` is, and imports Dynamo only when what it is given is called."""


autocast_is_on: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
"""Whether it may be, on any kind of device."""


def not_compiled_by_itself(code: CodeType, *, nor_what_it_calls: bool = False) -> bool:
    """Let Dynamo run this code as it is where it is not part of what is compiled. Whether this release of torch can."""
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if not (hasattr(frames, "set_code_exec_strategy") and hasattr(frames, "_FrameExecStrategy")):
        return False
    inner = frames._FrameAction.SKIP if nor_what_it_calls else frames._FrameAction.DEFAULT
    frames.set_code_exec_strategy(code, frames._FrameExecStrategy(frames._FrameAction.SKIP, inner))
    return True


def never_compiled(function: Callable[..., Any], why: str) -> Callable[..., Any]:
    """The same for a function that is called without Dynamo as well: it does not import it at all. A graph of Dynamo's ends
    where this is called."""
    apart = not_followed_by_dynamo(function)

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if "torch._dynamo" not in sys.modules else apart(*args, **kwargs)

    run._torchdynamo_disable, run._torchdynamo_disable_msg = True, why  # type: ignore[attr-defined]
    return run


compiling: Callable[[], Any] = getattr(getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None),
                                       "get_eval_frame_callback", lambda: None)  # fmt: skip
"""What compiles each function that this thread calls now, as between two graphs of `torch.compile`'s; None if nothing does."""


def run_where_traced(method: Callable[..., None]) -> Callable[..., None]:
    """Have Dynamo run this method at once where it traces a call of it, which leaves nothing in what is compiled."""
    method._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return method


def ended_by(function: Callable[P, R]) -> Callable[P, R]:
    """End a graph of Dynamo's where this is called, so that it really runs."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "it is phonograph's, and asks what has really run"  # type: ignore[attr-defined]
    return function


def compiling_backend() -> Any:
    """The backend for which Dynamo traces at the moment, or compiles what this thread calls."""
    tracer = getattr(sys.modules.get("torch._dynamo.symbolic_convert"), "InstructionTranslator", None)
    try:
        found = tracer.current_tx().output.compiler_fn if tracer is not None else None
    except AttributeError:  # it does not trace
        found = compiling()
    for wrapper in ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable", "compiler_fn"):
        while hasattr(found, wrapper):
            found = getattr(found, wrapper)
    return found


def traced_stack() -> list[tuple[str, int]]:
    """The files and lines that Dynamo traces at the moment, the innermost last."""
    context = getattr(torch._guards, "TracingContext", None)
    return [(frame.filename, frame.lineno) for frame in context.extract_stack()] if context is not None else []


def uncompiled(f: Any) -> Any:
    """The module or function that `torch.compile` was called on, if this is what that gave; otherwise None."""
    if isinstance(f, torch.nn.Module):
        return f._modules.get("_orig_mod") if type(f).__name__ == "OptimizedModule" else None
    found: Any = getattr(f, "__dict__", {}).get("_torchdynamo_orig_callable")
    around = getattr(getattr(found, "__code__", None), "co_filename", "").endswith("external_utils.py")  # `wrap_inline`
    return found.__wrapped__ if around else found


_TRACES_MODULES = "torch._dynamo.variables.nn_module"


def hear_of_traced(notice: Callable[[Any], None]) -> None:
    """Have this told of what stands for the calls of a module, each time Dynamo traces one: it passes by that, and looks into
    the module's own forward at once. If Dynamo is not loaded yet, from then on."""
    if _TRACES_MODULES in sys.modules:
        _hear_of_traced(sys.modules[_TRACES_MODULES], notice)
    else:
        sys.meta_path.insert(0, _Loading(notice))


def _hear_of_traced(module: Any, notice: Callable[[Any], None]) -> None:
    kind: Any = getattr(module, "UnspecializedNNModuleVariable", None)
    if not hasattr(kind, "call_function"):
        return
    call = kind.call_function

    @wraps(call)
    def call_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        notice(getattr(getattr(self, "value", None), "_compiled_call_impl", None))
        return call(self, *args, **kwargs)

    kind.call_function = call_function


class _Loading:
    """Among what finds modules to be imported: waits for the one of Dynamo's that traces calls of modules."""

    def __init__(self, notice: Callable[[Any], None]) -> None:
        self._notice = notice

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _TRACES_MODULES:
            return None
        sys.meta_path.remove(self)
        spec: Any = find_spec(name)
        run = getattr(spec and spec.loader, "exec_module", None)
        if run is not None:

            def exec_module(module: Any) -> None:
                run(module)
                _hear_of_traced(module, self._notice)

            spec.loader.exec_module = exec_module
        return spec


def hear_of_compiled(again: Callable[[torch.nn.Module, Any], None]) -> None:
    """Have this called with a module whose `compile` was called, and what stood for its calls before."""
    compile_ = torch.nn.Module.compile

    @wraps(compile_)
    def compile(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        before = goes_through(self)
        compile_(self, *args, **kwargs)
        again(self, before)

    torch.nn.Module.compile = compile  # type: ignore[method-assign]


def ran_compiled(ran: Iterable[CodeType]) -> bool:
    """Whether something that `torch.compile` has made was called: of what is compiled in it, no function need have been."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return False
    contexts = getattr(dynamo, "_TorchDynamoContext", None)
    return contexts is None or not _within(contexts.__call__.__code__).isdisjoint(ran)


def _within(code: CodeType) -> set[CodeType]:
    return {code}.union(*(_within(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


_set_versions: Any = getattr(torch._C._autograd, "_unsafe_set_version_counter", None)


def share_version(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a write of one is noted for the other: of what `detach` gives it is, and not of `data`. Leaves it as it was (or
    moves it on, where this release of torch cannot set it: autograd then raises, should the tensor have been saved)."""
    before = a._version
    if b._version != before:
        return False
    bump([b])
    shared = a._version != before
    if _set_versions is not None:
        _set_versions((b,), (before,))
    return shared


def forget_accumulation(t: torch.Tensor) -> None:
    """Let autograd make a new AccumulateGrad node for a leaf at its next use, and leave the old one to the graphs that have
    it. `set_data` does so where the dtype changes (variable.cpp). Hooks and the version stay."""
    data, put = t.detach(), torch._C.TensorBase.data.__set__  # type: ignore[attr-defined]
    put(t, torch.empty(0, dtype=torch.float32 if data.dtype is torch.float64 else torch.float64, device=data.device))
    put(t, data)


_creation: Any = getattr(torch._C._autograd, "_get_creation_meta", None)


def made_as(view: torch.Tensor) -> str:
    """What autograd notes of how a view was made, so that writes of it raise: in `no_grad`, by a function that is written in
    Python. Of one of several (the halves of `chunk`) it says no more than of others."""
    noted = "" if _creation is None else _creation(view).name
    return "DEFAULT" if noted == "MULTI_OUTPUT_NODE" else noted


_ORDINARY = (torch.Tensor, torch.nn.Parameter)


def _gives_storage(t: torch.Tensor) -> bool:
    try:
        return t.untyped_storage() is not None
    except RuntimeError:  # or NotImplementedError, which is one
        return False


_has_storage: Callable[[torch.Tensor], bool] = getattr(torch._C, "_has_storage", _gives_storage)
_is_functional: Callable[[torch.Tensor], bool] = getattr(torch, "_is_functional_tensor", lambda t: False)
_is_zero: Callable[[torch.Tensor], bool] = getattr(torch._C.TensorBase, "_is_zerotensor", lambda t: False)


def is_ordinary(t: torch.Tensor) -> bool:
    """Whether it is of torch's own classes, whose memory is its own, if it has any."""
    return type(t) in _ORDINARY


def storage_id(t: torch.Tensor) -> int:
    """The identity of a tensor's memory: the same for all its views, for as long as it lives."""
    return int(t.untyped_storage()._cdata)


def has_memory(t: torch.Tensor) -> bool:
    """Whether a tensor is memory with a shape, and nothing else: to be asked before that memory is asked for, which raises
    where there is none. Not so: what `kind_of` names."""
    if type(t) in _ORDINARY:
        return _lies_somewhere(t)
    with torch._C.DisableTorchFunctionSubclass():  # what its class makes of such questions is not asked
        return not torch.nn.parameter.is_lazy(t) and _lies_somewhere(t) and _has_address(t)


def _lies_somewhere(t: torch.Tensor) -> bool:
    if not _has_storage(t) or t.layout is not torch.strided or t.is_nested or t.is_quantized or t.is_meta:
        return False
    return not (_is_zero(t) or _is_functional(t))


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
        return "a tensor that is known to be zero" if _is_zero(t) else "a tensor that has no memory"


def is_shape(t: torch.Tensor) -> bool:
    """Whether it is a plain tensor on the meta device: a shape without values."""
    return type(t) in _ORDINARY and t.is_meta


def is_valueless(t: torch.Tensor) -> bool:
    """Whether there is nothing that could be another value at a replay: it is a shape, or known to be zero."""
    return type(t) in _ORDINARY and (t.is_meta or _is_zero(t))


_functorch_wrapped: Any = getattr(torch._C._functorch, "is_functorch_wrapped_tensor", lambda t: False)


def _is_wrapped(t: torch.Tensor) -> bool:
    """Whether a transform of torch.func has made this tensor, which stands for another."""
    return bool(_functorch_wrapped(t)) and not _is_functional(t)


def behind(t: torch.Tensor) -> list[torch.Tensor]:
    """The tensor for which one stands that a transform has left behind, if that is what operators take for it now."""
    unwrapped: Any = getattr(torch._C._functorch, "get_unwrapped", None)
    differentiated: Any = getattr(torch._C._functorch, "is_gradtrackingtensor", None)
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


_says_nothing: Any = getattr(torch._C, "_disabled_torch_dispatch_impl", None)


def say_themselves(types: Iterable[type]) -> list[type]:
    """Those of these classes of tensors that say themselves what operators mean (torch names others as well)."""
    return [kind for kind in types if kind.__torch_dispatch__ is not _says_nothing]  # type: ignore[attr-defined]


def are_fake(types: Iterable[type]) -> bool:
    """Whether these classes are that of fake tensors."""
    fake = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", None)
    return fake is not None and all(issubclass(kind, fake) for kind in types)


_mode_of: Any = getattr(torch._C, "_get_dispatch_mode", None)
_FAKE: Any = getattr(getattr(torch._C, "_TorchDispatchModeKey", None), "FAKE", None)


def makes_fakes() -> bool:
    """Whether what operators make at the moment is fake. (The mode that does so is asked after all others, whenever it was
    entered.)"""
    return _mode_of is not None and _FAKE is not None and _mode_of(_FAKE) is not None


def storage_at(where: int, nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """A storage on memory that it does not own."""
    made: torch.UntypedStorage = _c("_construct_storage_from_data_pointer")(where, device, nbytes)
    return made


_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)


def maker(like: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function that makes uninitialized tensors with the metadata of this one, dense in memory, on the device it lies on,
    which must be the current one. torch.compile's way costs 0.5 us less than `empty_like`, and fills nothing in
    deterministic mode."""
    empty_strided = getattr(_guards, f"_empty_strided_{like.device.type}", None)
    if empty_strided is None:
        return partial(torch.empty_like, like)
    return partial(empty_strided, tuple(like.shape), like.stride(), like.dtype)


_LAUNCHERS = ("/torch/_inductor/runtime/", "/triton/runtime/")  # the folders of code that calls functions which launch kernels


def is_written_by_torch(name: str, space: Mapping[str, Any], caller: str) -> bool:
    """Whether a function of this name and with these globals, which has no file of its own, was written for compiled code: by
    Dynamo for some of its guards (it makes one where it compiles, and calls it to know whether what it has compiled will do),
    or by Inductor or Triton to launch a kernel (code of theirs calls it, in the file `caller`)."""
    if name in ("___make_guard_fn", "guard") and space.keys() == {"G", "__builtins__"}:
        return type(space["G"]) is dict and "__builtins__" in space["G"]
    return "__name__" not in space and any(folder in caller.replace(os.sep, "/") for folder in _LAUNCHERS)


_TensorGuards: Any = getattr(_guards, "TensorGuards", None)

dict_version: Any = getattr(_guards, "dict_version", None)
"""A number of a dictionary's, which is another one when it was changed."""


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


@cache
def ready_for_gradients() -> None:
    """Import what `torch.autograd.grad` imports when it is given gradients for the first time: in a capture, all of that would
    be code which ran in the call, and on which it may rely."""
    for name in ("torch.nested._internal.nested_tensor", "torch.fx.experimental.symbolic_shapes"):
        with suppress(ImportError):
            import_module(name)


# -- process groups


def _c10d(name: str) -> Any:
    """Where torch is built for several ranks, and they are in use."""
    return getattr(sys.modules.get("torch._C._distributed_c10d"), name, None)


def groups_of_ranks() -> tuple[type, ...]:
    """The classes of what says which ranks communicate. Nobody changes such an object: another takes its place."""
    if not torch.distributed.is_available():
        return ()
    from torch.distributed.device_mesh import DeviceMesh

    return torch.distributed.ProcessGroup, DeviceMesh


def waits_by_itself(kinds: Iterable[type]) -> bool:
    """Whether one of these kinds of tensors is what functional collectives give: it waits where it is used."""
    module: Any = sys.modules.get("torch.distributed._functional_collectives")
    return module is not None and any(kind is getattr(module, "AsyncCollectiveTensor", None) for kind in kinds)


def once_there(t: Any) -> torch.Tensor:
    """What a functional collective has given, once it is there; any other tensor itself."""
    return t.trigger_wait() if waits_by_itself([type(t)]) else t  # type: ignore[no-any-return]


def is_under_way(t: torch.Tensor) -> bool:
    """Whether it is what a collective gives that goes on."""
    return waits_by_itself([type(t)]) and not getattr(t, "completed", False)


def groups_of(t: Any) -> list[Any]:
    """The process groups by which a tensor that is spread over several ranks communicates: a mesh that is made anew with others
    equals the one before."""
    mesh = getattr(t, "device_mesh", None)
    with suppress(Exception):  # (no part of it is on this rank)
        return [*mesh.get_all_groups()] if mesh is not None else []
    return []


_SHARDING, _PIPELINING = "torch.distributed.fsdp._fully_shard.", "torch.distributed.pipelining."


def sharding_of(module: torch.nn.Module) -> Any:
    """What `fully_shard` keeps for this module, if it has been called on it."""
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return module._get_fsdp_state() if kind is not None and isinstance(module, kind) else None


def keeps_shards(kind: type) -> bool:
    """Whether objects of this kind are `fully_shard`'s own."""
    return kind.__module__.startswith(_SHARDING) and not issubclass(kind, (torch.nn.Module, Enum))


def keeps_stages(kind: type) -> bool:
    """Whether objects of this kind are a pipeline's: its stages, its schedule, what they keep."""
    return kind.__module__.startswith(_PIPELINING) and not issubclass(kind, (torch.nn.Module, Enum))


GATHERED = ("_unsharded_param", "all_gather_outputs", "_unsharded_inner_tensors")
"""The attributes of such an object whose tensors have memory only while a parameter is gathered: the first is what a module
then has for the parameter, and has a gradient."""


def is_work(kind: type) -> bool:
    """Whether objects of this kind stand for a collective that is under way."""
    return issubclass(kind, _c10d("Work") or ())


def wait_for_all(results: Iterable[Any]) -> None:
    """Wait for those that would do so by themselves, where they are used."""
    for x in results:
        if waits_by_itself([type(x)]):
            x.trigger_wait()


def coalesces() -> bool:
    """Whether somebody collects collectives at the moment, to begin them together at some later point."""
    return bool(coalescing())


def group_among(given: Iterable[Any]) -> Any:
    """The process group which is among an operator's arguments: boxed, by its name, or as it is. None if there is none."""
    kind, find = _c10d("ProcessGroup"), _c10d("_resolve_process_group")
    for x in given:
        with suppress(Exception):  # other arguments are boxed as well (what to reduce by), or texts
            return find(x) if isinstance(x, str) else x if isinstance(x, kind) else kind.unbox(x)
    return None


def backend_of(group: Any, device: torch.device) -> Any:
    """What communicates for tensors of this device in a process group. None if there is none."""
    with suppress(Exception):
        return group._get_backend(torch.device(device.type))
    return None


def timeout_of(name: str, device: torch.device) -> float | None:
    """How many seconds the process group of this name gives a collective of such tensors now; None where that is not known."""
    with suppress(Exception):  # no such group any more
        return float(backend_of(_c10d("_resolve_process_group")(name), device).options._timeout.total_seconds())
    return None


def abort(name: str, device: torch.device) -> None:
    """Abort what communicates for such tensors in the process group of this name: whoever waits for it goes on."""
    with suppress(Exception):  # no such group any more
        backend_of(_c10d("_resolve_process_group")(name), device).abort()


def ranks_of(name: str) -> list[int]:
    """Who is in the process group of this name: ranks of the default group."""
    with suppress(Exception):
        return list(torch.distributed.get_process_group_ranks(_c10d("_resolve_process_group")(name)))
    return []


def default_store() -> Any:
    """The store of the default process group. Raises where there is none."""
    return torch.distributed.distributed_c10d._get_default_store()


def own_rank() -> int:
    """In the default process group; 0 where there is none."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def rank_in(group: Any) -> int:
    """That of this process in a process group, which is boxed."""
    return int(_c10d("ProcessGroup").unbox(group).rank())


def unboxed_work(x: Any) -> Any:
    """The collective that is under way for which this stands; None if it stands for none."""
    return _c10d("Work").unbox(x) if isinstance(x, torch.ScriptObject) else None


def stands_for_work(wait: Callable[..., None], refuse: Callable[[], None], tensors: Any = None) -> Any:
    """What stands for a collective that is under way: it is waited for by this function, also where somebody asks for its
    future, which has these tensors; without them that is refused."""
    return _standing_work()(wait, refuse, tensors)


@cache
def _standing_work() -> type:
    class Work(_c10d("Work")):  # type: ignore[misc]
        def __init__(self, wait: Callable[..., None], refuse: Callable[[], None], tensors: Any) -> None:
            super().__init__()
            self._wait, self._refuse, self._tensors = wait, refuse, tensors

        def wait(self, *timeout: Any, **named: Any) -> bool:
            self._wait(*timeout, *named.values())
            return True

        def get_future(self) -> Any:
            if self._tensors is None:
                self._refuse()
            self._wait()
            done: Any = torch.futures.Future()
            done.set_result(self._tensors)
            return done

        def synchronize(self) -> None:
            self._refuse()

        block_current_stream = synchronize

    return Work


def coalescing() -> list[Any]:
    """The process groups whose collectives somebody collects at the moment, to begin them together."""
    world: Any = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    return [*getattr(world, "pg_coalesce_state", ())]


def stop_coalescing(group: Any, device: torch.device | None) -> None:
    """Nobody collects collectives of this group any more, and those that were are forgotten. With a device: they have begun,
    there."""
    world: Any = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    world.pg_coalesce_state.pop(group, None)
    if device is not None:
        with suppress(RuntimeError):
            group._end_coalescing(device)


def batch_of(frame: FrameType | None) -> list[Any] | None:
    """What `batch_isend_irecv` sends and receives, where this frame is of it or of what it calls."""
    for _ in range(4):  # the context manager that it enters, and contextlib's own code
        if frame is None:
            return None
        if (
            frame.f_code.co_name == "batch_isend_irecv"
            and frame.f_globals.get("__name__") == "torch.distributed.distributed_c10d"
        ):
            found: list[Any] | None = frame.f_locals.get("p2p_op_list")
            return found
        frame = frame.f_back
    return None


def has_begun(backend: Any) -> bool:
    """Whether it has communicated before, where it tells: it must not begin to in a capture."""
    begun = getattr(backend, "_is_initialized", None)
    return begun is None or bool(begun())


_ENDS = ("shutdown", "abort")


def _groups() -> list[type]:
    return [kind for name in ("ProcessGroup", "ProcessGroupNCCL") if (kind := _c10d(name)) is not None]


def groups_tell_their_end() -> bool:
    """Whether `before_groups_end` can hear of it."""
    group = _c10d("ProcessGroup")
    return group is not None and all(name in vars(group) for name in _ENDS)


def before_groups_end(call: Callable[[], None]) -> Callable[[], None]:
    """From now on, call this before any process group is shut down or aborted, whoever asks for it. (`destroy_process_group`
    comes by the groups' own methods, and may have been imported by name long ago.) Returns what ends that."""
    places = [(kind, name, own) for kind in _groups() for name in _ENDS if (own := vars(kind).get(name)) is not None]
    for kind, name, own in places:
        setattr(kind, name, _after(call, own))

    def undo() -> None:
        for kind, name, own in places:
            setattr(kind, name, own)

    return undo


def _after(call: Callable[[], None], own: Any) -> Callable[..., Any]:
    def end(self: Any, *args: Any, **kwargs: Any) -> Any:
        call()
        return own.__get__(self, type(self))(*args, **kwargs)

    return end


# -- DistributedDataParallel


def averages(module: torch.nn.Module) -> bool:
    """Whether it is a `DistributedDataParallel`."""
    kind = getattr(sys.modules.get("torch.nn.parallel.distributed"), "DistributedDataParallel", None)
    return kind is not None and isinstance(module, kind)


def averaging() -> Any:
    """The `DistributedDataParallel` that is calling the module that it wraps, if one is."""
    kind = getattr(sys.modules.get("torch.nn.parallel.distributed"), "DistributedDataParallel", None)
    return getattr(kind, "_active_ddp_module", None)


_OF_REDUCERS = ("_autograd_hook", "_get_zeros_like_grad_buckets", "_rebuild_buckets", "_reset_state", "_update_process_group",
                "_set_ddp_runtime_logging_sample_rate", "prepare_for_backward", "prepare_for_forward")  # fmt: skip
_OF_WRAPPERS = ("_build_debug_param_to_name_mapping", "_build_params_for_reducer", "_comm_hooks", "_ddp_init_helper",
                "_has_rebuilt_buckets")  # fmt: skip
_SAMPLED, _NEVER = 11, 2**31 - 1  # the first forward of which no times are taken; in how many of the others they are


def has_reducer(wrapper: Any) -> bool:
    """Whether a `DistributedDataParallel` has a reducer that `reducer_anew` knows."""
    reducer = getattr(wrapper, "reducer", None)
    known = all(hasattr(reducer, name) for name in _OF_REDUCERS) and all(hasattr(wrapper, name) for name in _OF_WRAPPERS)
    return known and _c10d("_create_work_from_future") is not None


def others_around(wrapper: Any) -> bool:
    """Whether another `DistributedDataParallel` averages gradients of the same parameters, or somebody holds nodes that add
    them up, perhaps because of hooks that are nowhere listed."""
    with torch.inference_mode(False), torch.enable_grad():
        mine, like = {*wrapper._module_parameters}, torch.ones((), requires_grad=True)
        graph = like * 2  # has its node, and is nobody of Python's
    kind = sys.modules["torch.nn.parallel.distributed"].DistributedDataParallel
    others = [x for x in gc.get_objects() if issubclass(type(x), kind) and x is not wrapper]
    shared = any(p in mine for x in others for p in x.__dict__.get("_module_parameters", ()))
    nobody = _holders(like)
    del graph
    return shared or any(_holders(p) > nobody for p in wrapper._module_parameters if p.requires_grad)


def _holders(p: torch.Tensor) -> int:
    return sys.getrefcount(get_gradient_edge(p).node)


def reduces_by(wrapper: Any) -> str:
    """The name of what torch's own (in C++) communication hook is called that it has, or ""."""
    said = wrapper.logger._get_ddp_logging_data().strs_map.get("comm_hook", "")
    return said if said and not wrapper._comm_hooks else ""


@cache
def _lone() -> type:
    """A process group in which each collective is over at once, and has changed nothing."""

    class Lone(torch.distributed.ProcessGroup):
        def _done(self, tensors: Any) -> Any:
            done: Any = torch.futures.Future()
            done.set_result(tensors)
            return _c10d("_create_work_from_future")(done)

        def allreduce(self, tensors: Any, _: Any = None) -> Any:  # type: ignore[override]
            return self._done(tensors)

        def broadcast(self, tensors: Any, _: Any = None) -> Any:  # type: ignore[override]
            return self._done(tensors)

    return Lone


class _Calls(torch.autograd.Function):
    """Calls a function within a backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Callable[[], None]) -> torch.Tensor:
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.function()
        return *grads, None


class _Empty(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the memory that operators ask for, and gives them what is `there` of the kind before it takes any."""

    def __init__(self, there: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[torch.Tensor] = []
        self._there = [*there]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name != "aten::empty":
            return func(*args, **(kwargs or {}))
        wanted = [*args[0]], (kwargs or {}).get("dtype"), (kwargs or {}).get("device")
        at = next((i for i, t in enumerate(self._there) if ([*t.size()], t.dtype, t.device) == wanted), None)
        self.made.append(func(*args, **(kwargs or {})) if at is None else self._there.pop(at))
        return self.made[-1]


class _Scratch(torch.utils._python_dispatch.TorchDispatchMode):
    """Gives all who ask for memory of these kinds the same, in which nothing is kept: what is `there`, if it is enough."""

    def __init__(self, kinds: Iterable[tuple[torch.dtype, torch.device]], there: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kinds = {*kinds}
        self._there = [*there]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = (kwargs or {}).get("dtype"), (kwargs or {}).get("device")
        if func._schema.name != "aten::empty" or kind not in self._kinds or len(args[0]) != 1:
            return func(*args, **(kwargs or {}))
        large = [t for t in self._there if (t.dtype, t.device) == kind and t.numel() >= args[0][0]]
        if not large:
            self._there += (large := [func(*args, **(kwargs or {}))])
        return large[0].detach()[: args[0][0]]


class _Likenesses(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes of what a likeness is asked for, and gives that itself."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.of: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name != "aten::zeros_like":
            return func(*args, **(kwargs or {}))
        self.of.append(args[0])
        return args[0]


@contextmanager
def _assigned(parameters: Any, buckets: list[list[int]]) -> Iterator[None]:
    """Within, these parameters are assigned to these buckets to begin with. (torch begins with one bucket for all of them.)"""
    place, name = torch.distributed, "_compute_bucket_assignment_by_size"
    own: Any = getattr(place, name, None)

    def assign(tensors: Any, limits: Any, *others: Any) -> Any:
        if tensors is not parameters:
            return own(tensors, limits, *others)
        return [*reversed(buckets)], [limits[-1]] * len(buckets)

    if own is None:
        yield
        return
    setattr(place, name, assign)
    try:
        yield
    finally:
        setattr(place, name, own)


def _of_scratch(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What can stand for the gradient of each of these, all in the same memory."""
    kinds = {(p.dtype, p.device) for p in parameters}
    most = {kind: max(p.numel() for p in parameters if (p.dtype, p.device) == kind) for kind in kinds}
    memory = {kind: torch.empty(n, dtype=kind[0], device=kind[1]) for kind, n in most.items()}
    dense = [torch.empty_like(p, device="meta").stride() for p in parameters]
    return [memory[p.dtype, p.device].as_strided(p.size(), s) for p, s in zip(parameters, dense, strict=True)]


def _tell_the_next(wrapper: Any, parameters: Sequence[torch.Tensor]) -> None:
    """What adds up gradients of these tells whatever reducer the wrapper has by then, which may work on another stream."""
    known = weakref.ref(wrapper)
    theirs = torch.cuda.current_stream(parameters[0].device) if parameters[0].is_cuda else None

    def tells(i: int) -> Callable[..., None]:
        def tell(*_: Any) -> None:
            there = known()
            if there is None:
                return
            mine = torch.cuda.current_stream(theirs.device) if theirs is not None else None
            if theirs is not None and mine is not None:
                mine.wait_stream(theirs)
            there.reducer._autograd_hook(i)
            if theirs is not None and mine is not None:
                theirs.wait_stream(mine)

        return tell

    with torch.inference_mode(False), torch.enable_grad():
        nodes = [get_gradient_edge(p).node for p in parameters]
    for i, node in enumerate(nodes):
        node.register_hook(tells(i))


def reducer_anew(wrapper: Any) -> list[torch.Tensor] | None:
    """Give a `DistributedDataParallel` a new reducer on the current stream, as it is after its first steps: with the buckets of
    the old one and its hooks, and taking no times. Returns the memory of its buckets; None if they would be others, which the
    next two steps make, together with the other ranks.

    The old one may be in the middle of a step. No other rank hears of it: what a reducer learns in its first step, and agrees
    on with the others, this one is told, by a step that averages nothing. Parameters get new AccumulateGrad nodes: they run on
    the stream where they were made. Graphs that are there have the old nodes: what arrives there, the new one is told. The
    memory of the old buckets is that of the new ones: it would stay for long, as NCCL has it until the next live collective.
    """
    parameters, sparse = wrapper._build_params_for_reducer()
    number = {p: i for i, p in enumerate(parameters)}
    _tell_the_next(wrapper, parameters)

    def buckets() -> tuple[list[list[int]], list[torch.Tensor]]:
        with _Likenesses() as asked:
            found = [[number[p] for p in b.parameters()] for b in wrapper.reducer._get_zeros_like_grad_buckets()]
        return found, asked.of

    (before, memory), group, grads = buckets(), wrapper.process_group, [p.grad for p in parameters]
    lone = _lone()(group.rank(), group.size())  # for as long as it is used: the methods are Python's
    for p in parameters:
        forget_accumulation(p)
    wrapper.process_group = lone
    try:
        there = [] if wrapper.gradient_as_bucket_view else memory
        with _assigned(parameters, before), _Scratch([(p.dtype, p.device) for p in parameters], there):
            wrapper._ddp_init_helper(parameters, sparse, wrapper._build_debug_param_to_name_mapping(parameters), False)
    finally:
        wrapper.process_group = group
    new = wrapper.reducer
    new._set_ddp_runtime_logging_sample_rate(_NEVER)
    for _ in range(_SAMPLED):
        new.prepare_for_forward()
    new.prepare_for_backward([])

    def come() -> None:
        for i in (i for bucket in before for i in bucket):
            new._autograd_hook(i)

    try:
        for p, scratch in zip(parameters, _of_scratch(parameters), strict=True):
            p.grad = scratch
        with torch.inference_mode(False), torch.enable_grad():
            _Calls.apply(torch.ones((), device=parameters[0].device, requires_grad=True), come).backward()
        for p in parameters:
            p.grad = None
        with _Empty(memory) as seen, torch.no_grad():
            new._rebuild_buckets()
    finally:
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = grad
    alike = buckets()[0] == before
    if not alike:
        new._reset_state()
    new._update_process_group(group)
    for hook, state in wrapper._comm_hooks:
        _c10d("_register_comm_hook")(new, state, hook)
    wrapper._has_rebuilt_buckets = alike
    sizes = [(parameters[b[0]].dtype, sum(parameters[i].numel() for i in b)) for b in before]
    found = [t for t in seen.made if (t.dtype, t.numel()) in sizes and t.dim() == 1]
    return found if alike and len(found) >= len(before) else None


# -- settings of the process. They are looked at in every replay, and a call of Python's for each would cost half of it.

_GUARDED = {
    "is_grad_enabled": "grad_mode", "get_default_dtype": "default_dtype", "get_num_threads": "num_threads",
    "are_deterministic_algorithms_enabled": "deterministic_algorithms",
    "is_deterministic_algorithms_warn_only_enabled": "deterministic_algorithms_warn_only",
    "_get_cublas_allow_tf32": "allow_tf32", "_get_cublas_allow_fp16_reduced_precision_reduction": "allow_fp16_reduce",
    "_get_cublas_allow_bf16_reduced_precision_reduction": "allow_bf16_reduce", "autocast": "autocast_state",
}  # fmt: skip
"""By which name torch.compile's guard has what these get."""

_GlobalStateGuard: Any = getattr(_guards, "GlobalStateGuard", None)


def state_guard() -> tuple[Callable[[], bool], Set[str]]:
    """A function that says, in C++, whether some settings are what they are now, and the names of those that get them.
    torch.compile's guard of settings; of none where this release of torch does not tell what that looks at."""
    if "__getstate__" not in getattr(_GlobalStateGuard, "__dict__", {}):
        return bool, frozenset()
    guard = _GlobalStateGuard()
    known = json.loads(guard.__getstate__())
    return guard.check, {getter for getter, name in _GUARDED.items() if name in known}


_KEPT = {
    "_get_cudnn_benchmark": "setBenchmarkCuDNN", "_get_cudnn_deterministic": "setDeterministicCuDNN",
    "_get_cudnn_enabled": "setUserEnabledCuDNN", "_get_flash_sdp_enabled": "setSDPUseFlash",
    "_get_math_sdp_enabled": "setSDPUseMath", "_get_mem_efficient_sdp_enabled": "setSDPUseMemEfficient",
    "_get_cudnn_sdp_enabled": "setSDPUseCuDNN", "_get_mkldnn_enabled": "setUserEnabledMkldnn",
    "_get_cublas_allow_fp16_accumulation": "setAllowFP16AccumulationCuBLAS",
    "_get_math_sdp_allow_fp16_bf16_reduction": "setAllowFP16BF16ReductionMathSDP",
    "_get_mkldnn_deterministic": "setDeterministicMkldnn", "_get_nnpack_enabled": "setUserEnabledNNPACK",
}  # fmt: skip
"""By which method of C++ what these get is set: it stores its argument, a bool, and that is all it does."""

_LOOKED_AT = 4 << 10  # bytes from where torch's settings begin


def kept_settings() -> tuple[Any, Set[str]]:
    """The memory where torch keeps most of its settings (in an `at::Context`), as an array whose `raw` are the bytes that are
    there now, and the names of those that get what is there. Where each of them lies is found by setting it in a copy of that
    memory; of none where that cannot be done."""
    at, places = 0, dict[str, int]()
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"), mode=os.RTLD_NOLOAD)
        context = library["_ZN2at13globalContextEv"]
        context.restype = ctypes.c_void_p
        at = context()
        for getter, setter in _KEPT.items():
            places[getter] = _changed_by(library[f"_ZN2at7Context{len(setter)}{setter}Eb"], at, getattr(torch._C, getter)())
    places = {getter: place for getter, place in places.items() if place >= 0}
    first, last = min(places.values(), default=0), max(places.values(), default=-1)
    return (ctypes.c_char * (last + 1 - first)).from_address(at + first), places.keys()


def _changed_by(setter: Any, at: int, now: bool) -> int:
    """Which byte of a copy of what is `at` an address is changed from `now`, and alone, where this sets it; -1 if none is."""
    copy = ctypes.create_string_buffer(ctypes.string_at(at, _LOOKED_AT), 16 * _LOOKED_AT)
    before = int.from_bytes(copy.raw, "little")
    setter.restype = None
    setter(ctypes.byref(copy), ctypes.c_bool(not now))
    change = before ^ int.from_bytes(copy.raw, "little")
    place, bit = divmod(change.bit_length() - 1, 8)
    return place if change and not bit and copy.raw[place] == (not now) and place < _LOOKED_AT else -1


# -- operators


def bindings(name: str, *, out: bool) -> list[Callable[..., Any]]:
    """The functions in C by which Python calls operators of this name: those that take `out=`, or methods come first."""
    spaces = (torch, getattr(torch._C, "_nn", None)) if out else (torch.Tensor, torch)
    found = [getattr(space, name, None) for space in spaces]
    return [f for f in found if isinstance(f, (BuiltinFunctionType, MethodDescriptorType))]


def is_composite(func: Any) -> bool:
    """Whether an operator is made of others before autograd sees it."""
    return bool(_c("_dispatch_has_kernel_for_dispatch_key")(func.name(), "CompositeImplicitAutograd"))


below_autograd: Callable[[], Any] = _c("_AutoDispatchBelowAutograd")
"""A context in which operators run without autograd, and without a look at grad mode."""


def is_higher_order(func: object) -> bool:
    """Whether this is an operator of `torch.ops.higher_order`, which is given functions or other operators."""
    return type(func) is not torch._ops.OpOverload and isinstance(func, torch._ops.HigherOrderOperator)  # (that asks `abc`)


def insists_on_no_mode(func: Any) -> bool:
    """Whether its own code does not run under a dispatch mode: it asks whether there is one, and calls no operators itself."""
    code = getattr(func.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd), "__code__", None)
    return code is not None and "_get_current_dispatch_mode" in code.co_names


def carried_out(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What such an operator gives by its own code for the device, below dispatch modes, which see what it calls."""
    keys = torch._ops._compute_keyset(args, kwargs, func.non_fallthrough_keys)
    for key in (torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot):
        keys = keys.remove(key)
    return func.dispatch(keys.highestPriorityTypeId(), *args, **kwargs)


def is_missing(e: NotImplementedError) -> bool:
    """Whether it is torch's that such an operator has no code."""
    return "could not find kernel for HigherOrderOperator" in str(e)


without_modes: Callable[[], Any] = _c("_DisableTorchDispatch")
"""A context in which operators are not shown to a `TorchDispatchMode`."""


def in_inference(t: torch.Tensor) -> torch.Tensor:
    """An inference tensor that is the same memory, storage object included."""
    with without_modes(), torch.inference_mode():
        made = torch.empty(0, dtype=t.dtype, device=t.device)
        return made.set_(t.untyped_storage(), t.storage_offset(), t.size(), t.stride())


_original_views: Any = getattr(torch.autograd.grad_mode, "_force_original_view_tracking", None)


def original_views() -> AbstractContextManager[None]:
    """A context in which each view keeps the functions that made it, and not only where it lies in its base."""
    return nullcontext() if _original_views is None else _original_views(True)


def view_like(mould: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """The view of `base` that `mould` is of its own base: made by the same functions, where those were kept. They give
    gradients of the same strides, for which kernels may round in the same way.

    Raises:
        ValueError: the bases differ in their metadata.
    """
    view: torch.Tensor | None = mould._view_func(base)  # type: ignore[attr-defined]
    if view is None:
        raise ValueError(f"there is no such view of a tensor of size {tuple(base.shape)} and stride {base.stride()}")
    return view


def donates(node: Any) -> bool:
    """Whether a node of autograd's is a compiled function whose backward may write what its forward has saved."""
    metadata = getattr(getattr(type(node), "_forward_cls", None), "metadata", None)
    if metadata is not None and getattr(metadata, "bw_donated_idxs", ()) is None:
        metadata.bw_donated_idxs = []  # compiled with donated_buffer=False: a backward that retains the graph asks for this
    return bool(getattr(metadata, "bw_donated_idxs", None))


_keeps_graph: Any = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)


backward_id: Callable[[], int] = _c("_current_graph_task_id")
"""Within a backward: its number; one that runs within another has its own. Otherwise -1."""


def on_thread_of_autograds() -> bool:
    """Whether this is a thread of autograd's, which is none of Python's making, at work on a backward. Others make threads in C
    as well."""
    return backward_id() != -1 and isinstance(threading.current_thread(), threading._DummyThread)


may_run_backward: Callable[[], bool] = getattr(torch.autograd, "_is_checkpoint_valid", bool)
"""Whether this is no backward for chosen inputs only (`torch.autograd.grad`), which cannot have one of its own."""


def hearing(engine: Any, busy: list[None], done: Callable[[], None]) -> Any:
    """Autograd's engine, which keeps something in `busy` while a backward runs that adds to gradients, and calls `done` after
    each; None where none can be heard."""
    kind: Any = _c("_ImperativeEngine")
    if kind is None or type(engine) is not kind:
        return None

    class Engine(kind):  # type: ignore[misc]
        """torch's own, which has no state."""

        def run_backward(self, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("accumulate_grad") is False:  # `autograd.grad`, which installs none
                return super().run_backward(*args, **kwargs)
            busy.append(None)
            try:
                return super().run_backward(*args, **kwargs)
            finally:
                done()
                busy.pop()

    not_compiled_by_itself(Engine.run_backward.__code__)
    return Engine()


when_backward_ends: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
"""Within a backward: call something at its end."""


def recomputed_part(x: object) -> bool:
    """Whether this is what `checkpoint` knows of a part that it recomputes."""
    return type(x).__name__ == "_CheckpointFrame" and hasattr(x, "recomputed") and hasattr(x, "weak_holders")


class _Code:
    """Holds what a backward calls."""

    def __init__(self, *called: Any) -> None:
        self.called = called


def code_of(part: Any) -> Any:
    """The function that recomputes a part."""
    return part.recompute_fn if hasattr(part, "recompute_fn") else part.run_function


def lend_code(part: Any) -> object:
    """Let a part (or the node of a reentrant one) know its function only for as long as what is returned lives. The graph of
    autograd has the part, and the function often the module; a cycle through the graph no garbage collector could see."""
    name = "recompute_fn" if hasattr(part, "recompute_fn") else "run_function"
    code = _Code(code_of(part))
    known = weakref.ref(code)

    def run(*args: Any, **kwargs: Any) -> Any:
        own = known()
        assert own is not None
        return own.called[0](*args, **kwargs)

    setattr(part, name, run)
    return code


class _LentHook(BackwardHook):
    """Stands between autograd and the backward hooks of a module, and knows all of these weakly."""

    known: weakref.ref[_Code]
    module = property(lambda self: self.known().called[0])
    user_hooks = property(lambda self: self.known().called[1])
    user_pre_hooks = property(lambda self: self.known().called[2])


def lend_module(hook: BackwardHook) -> object:
    """Let what calls the backward hooks of a module know them, and the module, only for as long as what is returned lives: see
    `lend_code`."""
    known = vars(hook)
    code = _Code(known.pop("module"), known.pop("user_hooks"), known.pop("user_pre_hooks"))
    known["known"] = weakref.ref(code)
    hook.__class__ = _LentHook
    return code


def forget_recomputed(part: Any) -> None:
    """Let go of what was recomputed for a backward that is over. `checkpoint` does so where it is read, or with the graph."""
    part.recomputed.clear()
    part.is_recomputed.clear()
    part.recomp_counter.clear()
    for ref in part.weak_holders:
        if (holder := ref()) is not None:
            holder.handles.clear()


def selected_anew(entries: Any) -> Any:
    """What selective recompute keeps of the calls of one operator, in tensors that have no history yet: the ones that it hands
    out get one."""
    if isinstance(entries, (dict, list, tuple)):
        items = entries.items() if isinstance(entries, dict) else enumerate(entries)
        fresh = {key: selected_anew(entry) for key, entry in items}
        return fresh if isinstance(entries, dict) else type(entries)(fresh.values())
    if not isinstance(getattr(entries, "val", None), torch.Tensor):
        return entries
    kept = copy.copy(entries)
    kept.val = entries.val.detach()
    return kept


def keeps_graph() -> bool:
    """Within a backward: whether it retains the graph."""
    return bool(_keeps_graph()) if _keeps_graph is not None else True


def made_when(node: Any) -> int:
    """Autograd's number of a node: the later it was made, the higher."""
    return int(node._sequence_nr())


_will_run: Any = _c("_will_engine_execute_node")


def will_run(node: Any) -> bool:
    """Within a backward: whether it runs this node, or is asked for what arrives there."""
    try:
        return bool(_will_run(node)) if _will_run is not None else True
    except RuntimeError as e:  # of a leaf that `autograd.grad` is asked for, torch will not say that it runs
        if "leaf node" not in str(e):
            raise
        return True


# -- modes

dispatch_modes: Callable[[], int] = _c("_len_torch_dispatch_stack")
function_modes: Callable[[], int] = _c("_len_torch_function_stack")


_mode_stack: Callable[[], list[Any]] = getattr(torch.overrides, "_get_current_function_mode_stack", list)
_DeviceContext: Any = getattr(torch.utils._device, "DeviceContext", None)


def default_device() -> torch.device | None:
    """The device that `torch.set_default_device` or ``with torch.device(...)`` has set, if no other function mode is on."""
    modes = _mode_stack()
    if not modes or not all(type(mode) is _DeviceContext for mode in modes):
        return None
    device: torch.device = modes[-1].device
    return device


_modes: Callable[[], list[Any]] = getattr(torch.utils._python_dispatch, "_get_current_dispatch_mode_stack", list)


def looked_at_first() -> bool:
    """Whether this is the first call of a graph that AOT autograd has compiled, in which it looks at what custom operators do:
    the only dispatch mode is that one."""
    return [type(mode).__name__ for mode in _modes()] == ["_AnalyzeCustomOpInputOutputMode"]


_BATCHED = [f for n in ("is_batchedtensor", "is_legacy_batchedtensor") if (f := getattr(torch._C._functorch, n, None))]


def is_batched(t: torch.Tensor) -> bool:
    """Whether a tensor stands for a batch of them, which `vmap` and ``is_grads_batched`` hide."""
    return any(asks(t) for asks in _BATCHED)


is_traced: Callable[[], bool] = getattr(torch._C, "_is_tracing", bool)
"""Whether `torch.jit.trace` is at work."""


def transformed() -> bool:
    """Whether a functorch transform (grad, vmap, jvp) is going on."""
    return torch._C._functorch.peek_interpreter_stack() is not None


_functorch: Any = torch._C._functorch
_END_OF: dict[str, Callable[[], Any]] = {  # (what torch 2.11 has to end them all takes one too many)
    "Grad": _functorch._grad_decrement_nesting, "Jvp": _functorch._jvp_decrement_nesting,
    "Vmap": _functorch._vmap_decrement_nesting, "Functionalize": _functorch._func_decrement_nesting,
}  # fmt: skip
_hooks_of_saved: Any = torch._C._autograd


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


_hooks_on_saved: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore_is_tracing: None)
saved_tensors_hooks: Callable[[], Any] = partial(_hooks_on_saved, True)
"""The hooks through which tensors that autograd saves now go (`torch.autograd.graph.saved_tensors_hooks`), or None."""


def unseen_by_checkpoint(pack: Callable[[torch.Tensor], Any], over: Any = None) -> Callable[[torch.Tensor], Any]:
    """A hook of ours for what autograd saves, as `checkpoint` marks its own; `over` is the one that it lies over. Any other it
    takes for the user's: from torch 2.14 on it warns of one where it recomputes selectively, and is to show it what it keeps
    itself."""
    hook: Any = partial(pack)
    hook.__module__ = getattr(pack, "__module__", "")  # by which it is known whose it is
    hook._checkpoint_internal, hook._user_hooks = True, getattr(over, "_user_hooks", None)
    return hook  # type: ignore[no-any-return]


# -- compilers

COMPILED_GRAPH = os.path.join("torch", "_inductor", "output_code.py"), "__call__"
"""The file and the name of the functions through which Inductor's code for a graph is called."""


def written_by_graph(frame: FrameType) -> list[torch.Tensor] | None:
    """What Inductor's code for a graph, which is called in this frame, says that it writes of its inputs; None if it does not
    say."""
    places = getattr(frame.f_locals.get("self"), "mutated_input_idxs", None)
    inputs = frame.f_locals.get("inputs")
    if places is None or inputs is None:
        return None
    return [inputs[i] for i in places if isinstance(inputs[i], torch.Tensor)]


_COMPILED_CALL = os.path.join("torch", "_functorch", "_aot_autograd", "runtime_wrappers.py")
_KEEPS = ("fwd_rng_states", "bwd_rng_states", "curr_fwd_iter", "backward_state_position", "pending_forwards",
          "saved_backward_tensor_states")  # fmt: skip


def compiled_call(frame: FrameType | None) -> Any:
    """The node of autograd's whose forward or backward, which AOTAutograd has compiled, runs in this frame or calls it; None if
    there is none."""
    while frame is not None:
        if frame.f_code.co_name in ("forward", "backward") and frame.f_code.co_filename.endswith(_COMPILED_CALL):
            return frame.f_locals.get("ctx")
        frame = frame.f_back
    return None


def puts_own_generators(frame: FrameType) -> bool:
    """Whether this frame is of AOTAutograd's, and puts generators to where a forward has begun, before its backward."""
    code = frame.f_code
    return code.co_name in ("backward", "add_backward_args") and code.co_filename.endswith(_COMPILED_CALL)


def number_of_call(node: Any) -> int | None:
    """The number of a call of what AOTAutograd has compiled, among those of its own generators; None if it has none."""
    return getattr(node, "_curr_iter", None)


class _Cells:
    """Some variables of functions, as attributes."""

    def __init__(self, names: Sequence[str], *functions: Any) -> None:
        found = {n: c for f in functions for n, c in zip(f.__code__.co_freevars, f.__closure__ or (), strict=False)}
        self.__dict__["cells"] = {n: found[n] for n in names if n in found}

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["cells"][name].cell_contents
        except (KeyError, ValueError):
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__["cells"][name].cell_contents = value


def kept_of_generators(node: Any) -> Any:
    """What AOTAutograd keeps of the generators of a function that it has compiled, of which this is a node: `fwd_rng_states`,
    for the forwards that `curr_fwd_iter` numbers; `bwd_rng_states`, which stand where the one of number
    `backward_state_position` has begun; which forwards are `pending_forwards`; and for the others of them,
    `saved_backward_tensor_states`. None if it has none, or keeps others."""
    function = getattr(type(node), "_forward_cls", None)
    if function is None or not hasattr(function, "compiled_fw"):
        return None
    functions = function.forward, function.backward  # of which they are variables (torch 2.11), or of one object (2.13)
    found = getattr(_Cells(["rng_state"], *functions), "rng_state", None) or _Cells(_KEEPS, *functions)
    return found if all(hasattr(found, name) for name in _KEEPS) else None


_NAMES = "kernel_name_max_ops"


def compiled_by(backend: str, gm: torch.fx.GraphModule, inputs: Any, options: Any) -> Callable[..., Any]:
    """A graph of Dynamo's, compiled by a backend of that name, so that its backward can be run again: one that writes into what
    its forward has saved could not. Inductor makes no CUDA graphs of its own.

    Inductor keeps compiled graphs in a cache, whose keys do not say whether a backward may write what was saved (torch 2.11,
    2.13: `FxGraphHashDetails`). So it is asked for kernels whose names may be a little longer, which the keys do say.
    """
    import torch._dynamo
    import torch._functorch.config as functorch

    patch = functorch.patch(donated_buffer=False) if hasattr(functorch, "donated_buffer") else nullcontext()
    given: dict[str, Any] = {"options": options} if options else {}
    if backend == "inductor":
        import torch._inductor.config as inductor

        names = (options or {}).get(_NAMES, getattr(inductor, _NAMES, None))
        own = {_NAMES: names + 1} if names is not None else {"fx_graph_cache": False}
        given = {"config_patches": {**(options or {}), **own, "triton.cudagraphs": False}}
    with patch:
        compiled: Callable[..., Any] = torch._dynamo.lookup_backend(backend)(gm, inputs, **given)
    return compiled


def wants_graphs(gm: torch.fx.GraphModule) -> tuple[bool, bool]:
    """Whether forward and backward of a graph of Dynamo's may be CUDA graphs, as `torch._dynamo.override_cudagraphs` says
    (torch 2.13). It is taken from the graph, of which Inductor would make its own."""
    said = gm.meta.pop("cudagraph_annotation", None)
    forward, backward = getattr(said, "fwd", None), getattr(said, "bwd", None)
    return forward is not False, backward is not False


def depends_on_data(value: Any) -> bool:
    """Whether a fake value, or its shape, is known only when it is computed."""
    if isinstance(value, (tuple, list)):
        return any(map(depends_on_data, value))
    free = getattr(sys.modules.get("torch.fx.experimental.symbolic_shapes"), "free_unbacked_symbols", None)
    symbolic = isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool))
    return symbolic and free is not None and bool(free(value))


def fake_mode_of(value: Any) -> Any:
    """The mode that a fake tensor, or one of several, belongs to; None for anything else."""
    if isinstance(value, (tuple, list)):
        return next((mode for mode in map(fake_mode_of, value) if mode is not None), None)
    return getattr(value, "fake_mode", None) if isinstance(value, torch.Tensor) else None


def compiling_apart(inputs: Sequence[Any]) -> AbstractContextManager[Any]:
    """A context in which a part of a graph of Dynamo's is compiled by itself: what is noted about it is not about the whole."""
    mode = fake_mode_of(inputs)
    return torch._guards.tracing(torch._guards.TracingContext(mode)) if mode is not None else nullcontext()


def unbacked(mode: Any) -> AbstractContextManager[None]:
    """A context in which new sizes that depend on data are nobody's: what is computed is looked at, and forgotten."""
    env = getattr(mode, "shape_env", None)
    return nullcontext() if env is None else env.ignore_fresh_unbacked_symbols()


# -- modules and optimizers


CALLED_THROUGH = "_compiled_call_impl"
"""The attribute of a module that says what its calls go through."""


def call_through(module: torch.nn.Module, call: Callable[..., Any] | None) -> None:
    """Let calls of a module go to `call`; None: to its own again. torch keeps this out of what is pickled or copied."""
    if not hasattr(torch.nn.Module, "_compiled_call_impl"):
        raise NotImplementedError(
            "this torch release lacks nn.Module._compiled_call_impl: record a function that calls the module"
        )
    module._compiled_call_impl = call


def goes_through(module: torch.nn.Module) -> Any:
    """What calls of a module go to, if not to its own; None otherwise."""
    return module._compiled_call_impl


def own_call(module: torch.nn.Module) -> Callable[..., Any]:
    """A module's own call: its hooks, and `forward`."""
    call: Callable[..., Any] = module._call_impl
    return call


_CALL: Any = getattr(getattr(torch.nn.Module, "_wrapped_call_impl", None), "__code__", None)


def other_calling(frame: FrameType, owner: object) -> Callable[..., Any] | None:
    """The own call of the module whose call this frame is, if that is another than `owner`: one that was given the attributes
    of that, and with them what its calls go through. So are the replicas of `torch.nn.DataParallel` made."""
    if frame.f_code is not _CALL:
        return None
    module = frame.f_locals["self"]
    return own_call(module) if module is not owner else None


def _global_hooks(module: Any) -> list[dict[int, Any]]:
    return [v for n, v in vars(module).items() if n.startswith("_global_") and isinstance(v, dict)]


hooks_of_modules, hooks_of_optimizers = _global_hooks(torch.nn.modules.module), _global_hooks(optimizer_module)


def module_hooks() -> tuple[Any, ...]:
    """The hooks that all modules share."""
    return tuple([hook for d in hooks_of_modules for hook in d.values()])


def optimizer_hooks() -> tuple[Any, ...]:
    """The hooks that all optimizers share."""
    return tuple([hook for d in hooks_of_optimizers for hook in d.values()])


def step_hooks(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """The hooks of one optimizer's `step`."""
    if not steps_itself(optimizer):
        return ()
    return (*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values())


def steps_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is an optimizer of its own, with hooks, and none that stands before another (accelerate's)."""
    return "_optimizer_step_pre_hooks" in vars(optimizer)


_COUNT_READ_BY = "_get_value"  # in the modules of torch.optim
_ASKS_FOR_MODE = ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check")  # the latter up to torch 2.11


@contextmanager
def steps_captured(count: Callable[[Any], float | None]) -> Iterator[None]:
    """During the block, steps of torch's optimizers may be captured: `count` gives what they read of a step count, or None
    where they have to read it; and none asks for the `capturable` mode."""
    base: Any = torch.optim.Optimizer
    places: list[tuple[Any, str, Any]] = [(base, n, lambda _: _asks_nothing) for n in _ASKS_FOR_MODE if n in vars(base)]
    modules = {sys.modules.get(kind.__module__) for kind in vars(torch.optim).values() if isinstance(kind, type)}

    def reads(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def value(x: Any) -> Any:
            found = count(x)
            return read(x) if found is None else found

        return value

    places += [(m, _COUNT_READ_BY, reads) for m in modules if hasattr(m, _COUNT_READ_BY)]
    before = [(place, name, vars(place)[name]) for place, name, _ in places]
    for (place, name, instead), (_, _, old) in zip(places, before, strict=True):
        setattr(place, name, instead(old))
    try:
        yield
    finally:
        for place, name, old in before:
            setattr(place, name, old)


def _asks_nothing(_: torch.optim.Optimizer) -> None:
    """Instead of torch's check."""


def parametrizations_are_cached() -> bool:
    """Whether this is within `parametrize.cached()`."""
    return bool(getattr(sys.modules.get("torch.nn.utils.parametrize"), "_cache_enabled", False))


def module_settings() -> tuple[Any, ...]:
    """Settings of torch's that its modules ask for: `parametrize.cached()`, and attention's fast path."""
    return parametrizations_are_cached(), torch.backends.mha.get_fastpath_enabled()


# -- CUDA


def segments(pool: Handle) -> list[dict[str, Any]]:
    """The allocator's segments in a pool (torch.cuda.memory_snapshot's records).

    torch picks them out itself, where it is given the handle; but 2.11 then gives back a reference to each of its two numbers
    that it never took (`sys.getrefcount` falls by one a call), and the interpreter crashes some captures later. So it gets
    numbers that nobody else has, with a reference more, which is taken back where it is still there.
    """
    numbers = tuple(map(_Number, pool))
    before = [*map(sys.getrefcount, numbers)]
    _counted(ctypes.pythonapi.Py_IncRef, numbers)
    found: list[dict[str, Any]] = torch.cuda.memory_snapshot(numbers)
    now = [*map(sys.getrefcount, numbers)]
    _counted(ctypes.pythonapi.Py_DecRef, [n for n, had, has in zip(numbers, before, now, strict=True) if has > had])
    return [s for s in found if tuple(s["segment_pool_id"]) == pool]


ASKS_FOR_CAPTURE = torch.cuda.graphs, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing.__code__
"""Where `torch.cuda.is_current_stream_capturing` finds what it calls, by which name, and its own code."""


def segments_expand() -> bool:
    """Whether the allocator has segments that grow, each of several allocations of the driver's."""
    return any(s.get("is_expandable") for s in torch.cuda.memory_snapshot())


def _counted(change: Any, things: Iterable[object]) -> None:
    """Change the reference count of these. (A function of its own: a variable of a loop would be one reference more.)"""
    for thing in things:
        change(ctypes.py_object(thing))


class _Number(int):
    """An integer that is an object of its own, whatever its value."""


class OnStream:
    """What ``with torch.cuda.stream(stream):`` is, for a stream of the current device, in three calls of torch's."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._before: tuple[int, int, int] = _c("_cuda_getCurrentStream")(self._stream.device_index)
        _c("_cuda_setStream")(self._stream.stream_id, self._stream.device_index, self._stream.device_type)

    def __exit__(self, *_: object) -> None:
        _c("_cuda_setStream")(*self._before)


class _Route(NamedTuple):
    """Where allocations on a stream come from, or those of a thread on all of them, or all."""

    device: int
    pool: Handle
    stream: int
    all_streams: bool
    all_threads: bool

    def begin(self) -> None:
        """The stream is the current one."""
        everything = self.all_threads and hasattr(torch._C, "_cuda_beginAllocateToPool")
        of = "" if everything else "CurrentThread" if self.all_streams else "CurrentStream"
        _c(f"_cuda_beginAllocate{of}ToPool")(self.device, self.pool)

    def end(self) -> None:
        _c("_cuda_endAllocateToPool")(self.device, self.pool)
        _c("_cuda_releasePool")(self.device, self.pool)


_routes: list[_Route] = []


@contextmanager
def route_to_pool(device: int, pool: Handle, *, all_streams: bool = False, all_threads: bool = False) -> Iterator[None]:
    """Allocations on the current stream come from `pool`, also those that autograd's threads make on it; or those of this
    thread on `all_streams`; or of `all_threads` on all streams. (There is one such way to a pool at a time.)"""
    route = _Route(device, pool, raw_stream(device), all_streams, all_threads)
    route.begin()
    _routes.append(route)
    try:
        yield
    finally:
        _routes.remove(route)
        route.end()


def measure_outside_of_pools() -> None:
    """Where Inductor measures kernels to choose among them, it takes memory just for that (to empty the GPU's cache, 60 MiB on
    an H200): not from a pool, which would keep it."""
    heuristics = sys.modules.get("torch._inductor.runtime.triton_heuristics")
    kind: Any = getattr(heuristics, "CachingAutotuner", None)
    if not hasattr(kind, "bench") or hasattr(kind.bench, "__wrapped__"):  # else it is not loaded, or this was done before
        return
    bench = kind.bench

    @wraps(bench)
    def outside(*args: Any, **kwargs: Any) -> Any:
        mine = [route for route in _routes if route.stream == raw_stream(route.device)]
        for route in mine:
            route.end()
        try:
            return bench(*args, **kwargs)
        finally:
            for route in mine:
                route.begin()

    kind.bench = outside


def raw_alloc(nbytes: int, stream: int) -> int:
    """Memory from the caching allocator that no tensor owns; never filled, whatever the determinism settings."""
    return int(_c("_cuda_cudaCachingAllocator_raw_alloc")(nbytes, stream))


def raw_free(address: int) -> None:
    _c("_cuda_cudaCachingAllocator_raw_delete")(address)


def waits_for_all(hook: Any) -> list[Any] | None:
    """The nodes of all tensors whose gradients this hook waits for, if it is one of those that `register_multi_grad_hook` has
    set."""
    if not getattr(hook, "__qualname__", "").startswith(torch.autograd.graph.register_multi_grad_hook.__name__):
        return None
    cells = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
    return list(cells["grad_fns"].cell_contents) if "grad_fns" in cells else []


def clear_cublas_workspaces() -> None:
    """torch keeps a workspace for cuBLAS for each stream, until somebody clears them. Cleared before and after a capture, so
    that a recording's workspace is not memory that somebody else frees one day."""
    _c("_cuda_clearCublasWorkspaces")()


def take_cublas_workspace() -> None:
    """Have torch take a workspace for cuBLAS on the current stream, now."""
    torch.cuda.current_blas_handle()


def silence_stream_mismatch() -> None:
    """Warm-up calls run on the capture stream, a function that turns out to be unrecordable on the user's: autograd then
    warns of an accumulation node of another stream. It synchronizes them rightly, and the user can do nothing about it."""
    setter = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)
    if setter is not None:
        setter(False)


def let_copies_be_seen(on: bool) -> bool:
    """Whether what torch makes of Python numbers for a GPU is first a tensor on the CPU for all who see operators, and its copy
    an operator of its own; what that was before. (Fake tensors are made so. It holds for all threads, and changes nothing.)"""
    get, put = _c("_only_lift_cpu_tensors"), _c("_set_only_lift_cpu_tensors")
    if get is None or put is None:
        return False
    before = bool(get())
    put(on)
    return before


raw_stream: Callable[[int], int] = _c("_cuda_getCurrentRawStream")
"""The current stream's cudaStream_t on a device. 0.1 us; `torch.cuda.current_stream()` costs 3.6 us."""
current_device: Callable[[], int] = _c("_cuda_getDevice")
"""The index of the thread's current device. 0.1 us."""


class Forgotten(Exception):
    """What was asked for is not in the allocator's history any more."""


@contextmanager
def allocations_since(device: int) -> Iterator[list[tuple[int, int]]]:
    """Collects (address, bytes) of everything allocated on the device inside the block; the list is filled at its end. Where
    the user records the allocator's history, that is read and left as it is.

    Raises:
        Forgotten: at the block's end, if that history does not reach back to its beginning.
    """
    found: list[tuple[int, int]] = []
    if _c("_cuda_isHistoryEnabled")():
        if not (last := _history(device)[-1:]):  # it has just begun
            raw_free(raw_alloc(1, 0))
            last = _history(device)[-1:]
        yield found
        now = _history(device)
        before = next((i for i in range(len(now), 0, -1) if last and now[i - 1] == last[0]), 0)
        if not before:
            raise Forgotten
        found += _allocations(now[before:])
        return
    history: Any = torch.cuda.memory._record_memory_history
    history(enabled="all", context=None, stacks="python", max_entries=1_000_000, clear_history=True)
    try:
        yield found
    finally:
        found += _allocations(_history(device))
        history(enabled=None, clear_history=True)


def _history(device: int) -> list[dict[str, Any]]:
    """What the allocator has noted, the latest last, each with the time."""
    traces: list[list[dict[str, Any]]] = torch.cuda.memory._snapshot()["device_traces"]
    return traces[device] if device < len(traces) else []


def _allocations(entries: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(e["addr"], e["size"]) for e in entries if e["action"] == "alloc"]
