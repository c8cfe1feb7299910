"""Private parts of torch: autograd's nodes, hooks and engine; `checkpoint`."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache, partial
from importlib import import_module
from types import NoneType

import torch
import torch.backends.mha
import torch.overrides
import torch.utils._device
import torch.utils._python_dispatch
from torch.utils.hooks import BackwardHook

from .dynamic import Private
from .dynamo import not_compiled_by_itself
from .functions import _c
from .modes import without_modes

__all__ = [
    "backward_id",
    "bump",
    "code_of",
    "counted_apart",
    "forget_accumulation",
    "forget_recomputed",
    "hearing",
    "in_inference",
    "is_asked_for",
    "keeps_graph",
    "lend_code",
    "lend_module",
    "made_as",
    "made_when",
    "may_run_backward",
    "multithreaded",
    "next_number",
    "on_thread_of_autograds",
    "original_views",
    "recomputed_part",
    "running_node",
    "saved_tensors_hooks",
    "selected_anew",
    "set_version",
    "share_version",
    "takes_no_gradient",
    "unseen_by_checkpoint",
    "version_of",
    "view_like",
    "waits_for_all",
    "when_backward_ends",
    "will_run",
]


bump: Callable[[Sequence[torch.Tensor]], None] = _c("_increment_version")
"""Move the version counters on, as an operator that writes does: autograd then notices a saved tensor that changed."""

multithreaded: Callable[[], bool] = getattr(torch._C, "_is_multithreading_enabled", lambda: True)
"""Whether a backward may run on threads of autograd's own. (In inference mode it is said not to.)"""

_set_versions: Private = getattr(torch._C._autograd, "_unsafe_set_version_counter", None)


def set_version(t: torch.Tensor, version: int) -> None:
    """Let a tensor have this version, where this release of torch can."""
    if _set_versions is not None and t._version != version:
        _set_versions((t,), (version,))


def share_version(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a write of one is noted for the other: of what `detach` gives it is, and not of `data`. Leaves it as it was (or
    moves it on, where this release of torch cannot set it: autograd then raises, should the tensor have been saved)."""
    before = a._version
    if b._version != before:
        return False
    bump([b])
    shared = a._version != before
    set_version(b, before)
    return shared


def counted_apart(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of these, one of each that have a version together. (Likewise.)"""
    before = [t._version for t in tensors]
    bump(tensors)
    times = [t._version - version for t, version in zip(tensors, before, strict=True)]
    for t, version in zip(tensors, before, strict=True):
        set_version(t, version)
    found, together = list[torch.Tensor](), list[torch.Tensor]()
    for t, n in zip(tensors, times, strict=True):
        if n == 1:
            found.append(t)
        elif not any(share_version(other, t) for other in together):
            together.append(t)
    return found + together


def forget_accumulation(t: torch.Tensor) -> None:
    """Let autograd make a new AccumulateGrad node for a leaf at its next use, and leave the old one to the graphs that have
    it. `set_data` does so where the dtype changes (variable.cpp). Hooks and the version stay."""
    data, put = t.detach(), torch._C.TensorBase.data.__set__  # type: ignore[attr-defined]
    put(t, torch.empty(0, dtype=torch.float32 if data.dtype is torch.float64 else torch.float64, device=data.device))
    put(t, data)


_creation: Private = getattr(torch._C._autograd, "_get_creation_meta", None)


def made_as(view: torch.Tensor) -> str:
    """What autograd notes of how a view was made, so that writes of it raise: in `no_grad`, by a function that is written in
    Python. Of one of several (the halves of `chunk`) it says no more than of others."""
    noted = "" if _creation is None else _creation(view).name
    return "DEFAULT" if noted == "MULTI_OUTPUT_NODE" else noted


def takes_no_gradient(t: torch.Tensor) -> bool:
    """Whether a tensor says that it requires a gradient and autograd gives it none: a view of a leaf, made in `no_grad`."""
    if not (t.requires_grad and t.is_leaf and t._is_view()):
        return False
    with torch.enable_grad():
        node = t.view_as(t).grad_fn
    return node is not None and node.next_functions[0][0] is None


@cache
def ready_for_gradients() -> None:
    """Import what `torch.autograd.grad` imports when it is given gradients for the first time: in a capture, all of that would
    be code which ran in the call, and on which it may rely."""
    for name in ("torch.nested._internal.nested_tensor", "torch.fx.experimental.symbolic_shapes"):
        with suppress(ImportError):
            import_module(name)


def in_inference(t: torch.Tensor) -> torch.Tensor:
    """An inference tensor that is the same memory, storage object included."""
    with without_modes(), torch.inference_mode():
        made = torch.empty(0, dtype=t.dtype, device=t.device)
        return made.set_(t.untyped_storage(), t.storage_offset(), t.size(), t.stride())


_original_views: Private = getattr(torch.autograd.grad_mode, "_force_original_view_tracking", None)


def original_views() -> AbstractContextManager[None]:
    """A context in which each view keeps the functions that made it, and not only where it lies in its base."""
    return nullcontext() if _original_views is None else _original_views(True)


_unsafe_view: Private = getattr(torch.Tensor, "_view_func_unsafe", lambda mould, base: None)

moves_views = _original_views is not None and hasattr(torch.Tensor, "_view_func_unsafe")
"""Whether `view_like` works with bases that begin elsewhere in their storage (but for views that count from there)."""


def view_like(mould: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """The view of `base` that `mould` is of its own base: made by the same functions, where those were kept. They give
    gradients of the same strides, for which kernels may round in the same way.

    Raises:
        ValueError: the bases differ in their metadata.
    """
    view: torch.Tensor | None = mould._view_func(base)  # type: ignore[attr-defined]
    if view is None and base.size() == mould._base.size() and base.stride() == mould._base.stride():  # type: ignore[union-attr]
        view = _unsafe_view(mould, base)  # it begins elsewhere in its storage, or that has another size
    if view is None:
        raise ValueError(f"there is no such view of a tensor of size {tuple(base.shape)} and stride {base.stride()}")
    return view


_keeps_graph: Private = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)

backward_id: Callable[[], int] = _c("_current_graph_task_id")
"""Within a backward: its number; one that runs within another has its own. Otherwise -1."""


# What Python knows of its threads, by where they run. Neither they nor their classes are asked anything: reads of these may be
# heard, by whoever asks this.
_known_threads: dict[int, Private] = threading._active  # type: ignore[attr-defined]
_Unknown, _here = threading._DummyThread, threading.get_ident


def on_thread_of_autograds() -> bool:
    """Whether this is a thread of autograd's, which is none of Python's making, at work on a backward. Others make threads in C
    as well. (`threading.current_thread` would count it among Python's from then on, for all to see.)"""
    return backward_id() != -1 and type(_known_threads.get(_here())) in (NoneType, _Unknown)


may_run_backward: Callable[[], bool] = getattr(torch.autograd, "_is_checkpoint_valid", bool)
"""Whether this is no backward for chosen inputs only (`torch.autograd.grad`), which cannot have one of its own."""


def hearing(engine: object, busy: list[None], done: Callable[[], None]) -> object:
    """Autograd's engine, which keeps something in `busy` while a backward runs that adds to gradients, and calls `done` after
    each; None where none can be heard."""
    kind: Private = _c("_ImperativeEngine")
    if kind is None or type(engine) is not kind:
        return None

    class Engine(kind):  # type: ignore[misc]
        """torch's own, which has no state."""

        def run_backward(self, *args: object, **kwargs: object) -> object:
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

    def __init__(self, *called: Private) -> None:
        self.called = called


def code_of(part: Private) -> object:
    """The function that recomputes a part."""
    return part.recompute_fn if hasattr(part, "recompute_fn") else part.run_function


def lend_code(part: Private) -> object:
    """Let a part (or the node of a reentrant one) know its function only for as long as what is returned lives. The graph of
    autograd has the part, and the function often the module; a cycle through the graph no garbage collector could see."""
    name = "recompute_fn" if hasattr(part, "recompute_fn") else "run_function"
    code = _Code(code_of(part))
    known = weakref.ref(code)

    def run(*args: object, **kwargs: object) -> object:
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


def forget_recomputed(part: Private) -> None:
    """Let go of what was recomputed for a backward that is over. `checkpoint` does so where it is read, or with the graph."""
    part.recomputed.clear()
    part.is_recomputed.clear()
    part.recomp_counter.clear()
    for ref in part.weak_holders:
        if (holder := ref()) is not None:
            holder.handles.clear()


def selected_anew(entries: Private) -> object:
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


def made_when(node: Private) -> int:
    """Autograd's number of a node: the later it was made, the higher."""
    return int(node._sequence_nr())


next_number: Callable[[], int] = getattr(torch.autograd, "_get_sequence_nr", int)
"""The number that the next node will have which this thread makes."""

running_node: Callable[[], Private] = _c("_current_autograd_node") or (lambda: None)
"""Within a backward: the node that runs."""


_will_run: Private = _c("_will_engine_execute_node")


def will_run(node: object) -> bool:
    """Within a backward: whether it runs this node, or is asked for what arrives there."""
    try:
        return bool(_will_run(node)) if _will_run is not None else True
    except RuntimeError as e:  # of a leaf that `autograd.grad` is asked for, torch will not say that it runs
        if "leaf node" not in str(e):
            raise
        return True


def is_asked_for(leaf: object) -> bool:
    """Within a backward: whether it gives gradients (`autograd.grad`), and may be asked for that of this leaf, by its node. (A
    backward that adds to `.grad` is not.)"""
    if _will_run is None:
        return True
    try:
        _will_run(leaf)
    except RuntimeError as e:
        if "leaf node" not in str(e):
            raise
        return True
    return False


def version_of(t: torch.Tensor) -> torch.Tensor:
    """An empty tensor with the version of another: a write of one is noted for both. It does not keep the other's memory."""
    with without_modes(), torch.no_grad():
        made = t.detach()
        made.data = torch.empty(0, dtype=t.dtype, device=t.device)
    return made


_hooks_on_saved: Private = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore_is_tracing: None)

saved_tensors_hooks: Callable[[], tuple[Private, Private] | None] = partial(_hooks_on_saved, True)
"""The hooks through which tensors that autograd saves now go (`torch.autograd.graph.saved_tensors_hooks`), or None."""


def unseen_by_checkpoint(pack: Callable[[torch.Tensor], object], over: Private = None) -> Callable[[torch.Tensor], object]:
    """A hook of ours for what autograd saves, as `checkpoint` marks its own; `over` is the one that it lies over. Any other it
    takes for the user's: from torch 2.14 on it warns of one where it recomputes selectively, and is to show it what it keeps
    itself."""
    hook: Private = partial(pack)
    hook.__module__ = getattr(pack, "__module__", "")  # by which it is known whose it is
    hook._checkpoint_internal, hook._user_hooks = True, getattr(over, "_user_hooks", None)
    return hook  # type: ignore[no-any-return]


def waits_for_all(hook: Private) -> list[object] | None:
    """The nodes of all tensors whose gradients this hook waits for, if it is one of those that `register_multi_grad_hook` has
    set."""
    if not getattr(hook, "__qualname__", "").startswith(torch.autograd.graph.register_multi_grad_hook.__name__):
        return None
    cells = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
    return list(cells["grad_fns"].cell_contents) if "grad_fns" in cells else []
