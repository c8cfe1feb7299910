"""Private parts of torch: `DistributedDataParallel` and its reducer."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
import torch.backends.mha
import torch.overrides
import torch.utils._device
import torch.utils._python_dispatch
from torch.autograd.graph import get_gradient_edge

from .autograd import forget_accumulation
from .dynamic import Args, Context, Kwargs, Private
from .operators import OpOverload
from .process_groups import _c10d

__all__ = ["MADE_ANEW", "averages", "averages_by", "averaging", "has_reducer", "others_around", "reducer_anew", "reduces_by"]


def averages(module: torch.nn.Module) -> bool:
    """Whether it is a `DistributedDataParallel`."""
    kind = getattr(sys.modules.get("torch.nn.parallel.distributed"), "DistributedDataParallel", None)
    return kind is not None and isinstance(module, kind)


def averaging() -> Private:
    """The `DistributedDataParallel` that is calling the module that it wraps, if one is."""
    kind = getattr(sys.modules.get("torch.nn.parallel.distributed"), "DistributedDataParallel", None)
    return getattr(kind, "_active_ddp_module", None)


_OF_REDUCERS = ("_autograd_hook", "_get_zeros_like_grad_buckets", "_rebuild_buckets", "_reset_state", "_update_process_group",
                "_set_ddp_runtime_logging_sample_rate", "prepare_for_backward", "prepare_for_forward")  # fmt: skip

_OF_WRAPPERS = ("_build_debug_param_to_name_mapping", "_build_params_for_reducer", "_comm_hooks", "_ddp_init_helper",
                "_has_rebuilt_buckets")  # fmt: skip

MADE_ANEW = frozenset({"reducer", "logger"})
"""The attributes of a wrapper that `reducer_anew` sets."""

_SAMPLED, _NEVER = 11, 2**31 - 1  # the first forward of which no times are taken; in how many of the others they are


def has_reducer(wrapper: object) -> bool:
    """Whether a `DistributedDataParallel` has a reducer that `reducer_anew` knows."""
    reducer = getattr(wrapper, "reducer", None)
    known = all(hasattr(reducer, name) for name in _OF_REDUCERS) and all(hasattr(wrapper, name) for name in _OF_WRAPPERS)
    return known and _c10d("_create_work_from_future") is not None


def others_around(wrapper: Private) -> bool:
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


def averages_by(wrapper: Private) -> tuple[object, ...]:
    """The process group and the communication hooks, with their states, that its reducer has: no call reads them, only that."""
    return wrapper.process_group, *[x for hook in getattr(wrapper, "_comm_hooks", ()) for x in hook]


def reduces_by(wrapper: Private) -> str:
    """The name of what torch's own (in C++) communication hook is called that it has, or ""."""
    said = wrapper.logger._get_ddp_logging_data().strs_map.get("comm_hook", "")
    return said if said and not wrapper._comm_hooks else ""


@cache
def _lone() -> type:
    """A process group in which each collective is over at once, and has changed nothing."""

    class Lone(torch.distributed.ProcessGroup):
        def _done(self, tensors: object) -> object:
            done: torch.futures.Future[object] = torch.futures.Future()
            done.set_result(tensors)
            return _c10d("_create_work_from_future")(done)

        def allreduce(self, tensors: object, _: object = None) -> object:  # type: ignore[override]
            return self._done(tensors)

        def broadcast(self, tensors: object, _: object = None) -> object:  # type: ignore[override]
            return self._done(tensors)

    return Lone


class _Calls(torch.autograd.Function):
    """Calls a function within a backward."""

    @staticmethod
    def forward(ctx: Context, x: torch.Tensor, function: Callable[[], None]) -> torch.Tensor:
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> object:
        ctx.function()
        return *grads, None


class _Empty(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the memory that operators ask for, and gives them what is `there` of the kind before it takes any."""

    def __init__(self, there: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[torch.Tensor] = []
        self._there = [*there]

    def __torch_dispatch__(self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None) -> object:
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

    def __torch_dispatch__(self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None) -> object:
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

    def __torch_dispatch__(self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None) -> object:
        if func._schema.name != "aten::zeros_like":
            return func(*args, **(kwargs or {}))
        self.of.append(args[0])
        return args[0]


@contextmanager
def _assigned(parameters: object, buckets: list[list[int]]) -> Iterator[None]:
    """Within, these parameters are assigned to these buckets to begin with. (torch begins with one bucket for all of them.)"""
    place, name = torch.distributed, "_compute_bucket_assignment_by_size"
    own: Private = getattr(place, name, None)

    def assign(tensors: object, limits: Private, *others: object) -> object:
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


def _tell_the_next(wrapper: Private, parameters: Sequence[torch.Tensor]) -> None:
    """What adds up gradients of these tells whatever reducer the wrapper has by then, which may work on another stream."""
    known = weakref.ref(wrapper)
    theirs = torch.cuda.current_stream(parameters[0].device) if parameters[0].is_cuda else None

    def tells(i: int) -> Callable[..., None]:
        def tell(*_: object) -> None:
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


def _step_without_averaging(
    reducer: Private, parameters: Sequence[torch.Tensor], order: Sequence[int], memory: list[torch.Tensor],
    grads: Sequence[torch.Tensor | None],
) -> list[torch.Tensor]:  # fmt: skip
    """Take a reducer through its first step, in which gradients come in this order and nothing is averaged; the parameters have
    their own `grads` then. Returns what it has made for its buckets, for which the `memory` of the old ones is there."""
    reducer._set_ddp_runtime_logging_sample_rate(_NEVER)
    for _ in range(_SAMPLED):
        reducer.prepare_for_forward()
    reducer.prepare_for_backward([])

    def come() -> None:
        for i in order:
            reducer._autograd_hook(i)

    try:
        for p, scratch in zip(parameters, _of_scratch(parameters), strict=True):
            p.grad = scratch
        with torch.inference_mode(False), torch.enable_grad():
            _Calls.apply(torch.ones((), device=parameters[0].device, requires_grad=True), come).backward()
        for p in parameters:
            p.grad = None
        with _Empty(memory) as seen, torch.no_grad():
            reducer._rebuild_buckets()
    finally:
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = grad
    made: list[torch.Tensor] = seen.made
    return made


def reducer_anew(wrapper: Private) -> list[torch.Tensor] | None:
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
    made = _step_without_averaging(new, parameters, [i for bucket in before for i in bucket], memory, grads)
    alike = buckets()[0] == before
    if not alike:
        new._reset_state()
    new._update_process_group(group)
    for hook, state in wrapper._comm_hooks:
        _c10d("_register_comm_hook")(new, state, hook)
    wrapper._has_rebuilt_buckets = alike
    sizes = [(parameters[b[0]].dtype, sum(parameters[i].numel() for i in b)) for b in before]
    found = [t for t in made if (t.dtype, t.numel()) in sizes and t.dim() == 1]
    return found if alike and len(found) >= len(before) else None
