"""`make_graphed_callables`: the signature of torch's, and what Transformer Engine adds to it, over `record`.

Both of them run the callables on sample arguments, capture them then and there in the one order in which they may be replayed,
and copy whatever comes later into the samples' memory. Here nothing runs before the user's own first call; which recording a
call gets is decided when it is made, by its signature and by what is held. So most of the options ask for what is so anyway.
They are checked all the same: an option that is misunderstood should not be ignored.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, wraps
from importlib.util import find_spec
from itertools import repeat
from typing import Any, ParamSpec, TypeVar, overload
from weakref import ref

import torch

from .._torch import modules as torch_modules
from ..engine.recorded import Recorded
from ..options import Options, at_least
from ..python.identity import identity
from .capture_hooks import CaptureHooks, Hooked, WarmUps
from .pipeline_order import Schedule
from .wrapping import wrap

__all__ = ["make_graphed_callables"]

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=torch.nn.Module)
F = TypeVar("F", bound=Callable[..., object])
Sample = Sequence[object]

_MODES = ("global", "thread_local", "relaxed")
_OTHERS = 16  # recordings besides those of a schedule: for evaluation, or a last batch

_TRANSFORMER_ENGINE = frozenset(
    {"enabled", "calibrating", "recipe", "amax_reduction_group", "cache_quantized_params",
     "fp8_enabled", "fp8_calibrating", "fp8_recipe", "fp8_group", "fp8_weight_caching"}
)  # fmt: skip


def _by_either_name(function: F) -> F:
    """The first argument is `callables` for torch, `modules` for Transformer Engine."""

    @wraps(function)
    def called(*args: object, **given: object) -> Any:
        if "modules" in given and not args and "callables" not in given:
            given["callables"] = given.pop("modules")
        return function(*args, **given)

    return called  # type: ignore[return-value]


@overload
def make_graphed_callables(
    callables: M, sample_args: Sample, num_warmup_iters: int = 3, allow_unused_input: bool = False, pool: Any = None,
    capture_error_mode: str = "global", enable_annotations: bool = False, **options: Any,
) -> M: ...  # fmt: skip
@overload
def make_graphed_callables(
    callables: Callable[P, R], sample_args: Sample, num_warmup_iters: int = 3, allow_unused_input: bool = False,
    pool: Any = None, capture_error_mode: str = "global", enable_annotations: bool = False, **options: Any,
) -> Recorded[P, R]: ...  # fmt: skip
@overload
def make_graphed_callables(
    callables: tuple[Any, ...], sample_args: Sequence[Sample], num_warmup_iters: int = 3, allow_unused_input: bool = False,
    pool: Any = None, capture_error_mode: str = "global", enable_annotations: bool = False, **options: Any,
) -> tuple[Any, ...]: ...  # fmt: skip
@overload
def make_graphed_callables(*, modules: Any, sample_args: object, **options: Any) -> Any: ...


@_by_either_name  # type: ignore[misc]  # `modules` is no parameter of it
def make_graphed_callables(
    callables: Any, sample_args: Any, num_warmup_iters: int = 3, allow_unused_input: bool = False, pool: Any = None,
    capture_error_mode: str = "global", enable_annotations: bool = False, *,
    sample_kwargs: object = None, _order: Sequence[int] | None = None,
    _num_layers_per_chunk: int | Sequence[int] | None = None, retain_graph_in_backward: bool = False,
    _reuse_graph_input_output_buffers: bool = False, clone_param_grads_on_return: bool = True,
    capture_time_hooks: object = None, pre_warmup_hook: Callable[[], Any] | None = None,
    post_warmup_hook: Callable[[], Any] | None = None, **options: Any,
) -> object:  # fmt: skip
    """Record modules and functions with their backwards: a drop-in for `torch.cuda.make_graphed_callables`.

    Takes what torch's function and Transformer Engine's take, and gives eager's results where those are wrong. Nothing runs
    on the samples: the first `num_warmup_iters` calls of each signature run live, the next is captured and played. A call of
    another shape, dtype, structure, number of arguments, keyword or mode than the samples has a recording of its own, or is
    eager's, exceptions included. Any number of forwards may wait for their backwards, which may come in any order. Results
    and gradients never share memory that a later replay writes.

    With `_order`, a pipeline's schedule, there are as many recordings of a layer as it has forwards in flight at most, and
    their memory is that of these activations. Without, the same comes about in the first iterations.

    Modules may have hooks, buffers that require a gradient, any mode each, and parameters that come and go, and an autocast
    context may have its cache: what torch asks of them, and checks or does not check, is not needed. Samples and arguments
    may contain other values than tensors. Calls of ``module.forward`` itself run live.

    Args:
        callables: a module or function, or a tuple of them. A module is recorded in place (`record`), with its hooks. By
            keyword, `modules` is another name for it.
        sample_args: positional arguments of a call: a tuple; for a tuple of callables, one for each. With `_order`, one for
            each layer and micro-batch: by chunk, in these by micro-batch, in these by layer. Never read nor kept; checked
            against the parameters that the callable has.
        num_warmup_iters: live calls of each signature before it is recorded; they are your own first calls.
        allow_unused_input: accepted. An input that is not used has no gradient, as in eager; that is no error either way.
        pool: a handle of `torch.cuda.graph_pool_handle()` or a `torch.cuda.MemPool`, accepted. All recordings of a device share
            one pool.
        capture_error_mode: ``global``, ``thread_local`` or ``relaxed``, accepted. A capture leaves other threads alone, and
            what must not be captured in this one is no error: the call runs live.
        enable_annotations: must be False: kernels of a recording are not annotated.
        sample_kwargs: keyword arguments of a call: a dict, or one for each of `sample_args`.
        _order: ``c`` for a forward of chunk c, counted from 1, ``-c`` for a backward.
        _num_layers_per_chunk: how many of `callables` each chunk has; by default all the same.
        retain_graph_in_backward: accepted. A backward may be called again if the one before retained the graph.
        _reuse_graph_input_output_buffers: accepted, with `_order`. Memory that nothing needs any more is always reused.
        clone_param_grads_on_return: accepted. A gradient is never overwritten.
        capture_time_hooks: for each callable None, or a dict of functions by kind and any name:
            ``{"forward_pre_hooks": {0: f}}``; `f` is called with the callable, and returns None. One that takes more than that
            gets what a module's hook of that kind gets. `forward_hooks`, `backward_pre_hooks` and `backward_hooks` likewise;
            forward hooks whose name is in `forward_pre_hooks_with_kwargs` or `forward_hooks_with_kwargs` get a dict of keyword
            arguments as well. They are called around warm-up calls and captures and around the first backward of these,
            outside of any graph, and at no replay. Gradients are those of results and arguments that have some; one that is
            not known yet is None.
        pre_warmup_hook: called once without arguments, before the first warm-up call of any of the callables.
        post_warmup_hook: called once, when each of the callables has had `num_warmup_iters` warm-up calls.
        **options: `fallback`, `verify`, `max_recordings` of `record`. With `_order`, `max_recordings` is by default what the
            schedule needs, and 16 more. Transformer Engine's options for low precision are refused unless they are off.

    Returns:
        The recorded callable, or a tuple of them; with `_order`, one for each of `sample_args`, which are the same object for
        all micro-batches of a layer. Modules are themselves, functions `Recorded`. Each has a `reset()`, which drops its
        recordings, as often as you like; later calls are recorded anew. (A module that has a `reset` keeps that: use
        `phonograph.reset`.)

    Raises:
        TypeError: an argument has the wrong type, or a sample does not fit the callable's parameters.
        ValueError: `_order` is no schedule, `capture_error_mode` none of these, or numbers of callables, samples, keyword
            arguments and hooks do not agree.
        ModuleNotFoundError: an option needs Transformer Engine, which is not installed.
        NotImplementedError: an option needs Transformer Engine, which is; or `enable_annotations` is True.
        RuntimeError: (in a call) a capture-time hook returned something.

    Examples:
        >>> import torch, phonograph as pg
        >>> first, loss = torch.nn.Linear(4, 4), torch.nn.functional.mse_loss
        >>> x = torch.ones(2, 4)
        >>> first, loss = pg.make_graphed_callables((first, loss), ((x,), (x, x)), num_warmup_iters=1)
        >>> for _ in range(4):
        ...     loss(first(x), x).backward()
        >>> pg.stats(first).replayed
        3

    Like `torch.cuda.make_graphed_callables` (https://docs.pytorch.org/docs/stable/generated/torch.cuda.make_graphed_callables.html)
    and `transformer_engine.pytorch.make_graphed_callables`.
    """
    _refuse_low_precision(options)
    at_least("num_warmup_iters", num_warmup_iters, 0)
    if "warmup" in options:
        raise TypeError("make_graphed_callables() takes num_warmup_iters in the place of warmup")
    _check_mode(capture_error_mode)
    _check_bools(enable_annotations=enable_annotations, allow_unused_input=allow_unused_input,
                 retain_graph_in_backward=retain_graph_in_backward,
                 _reuse_graph_input_output_buffers=_reuse_graph_input_output_buffers,
                 clone_param_grads_on_return=clone_param_grads_on_return)  # fmt: skip
    if enable_annotations:
        raise NotImplementedError("enable_annotations: phonograph does not annotate kernels; take a profile of a live call")
    _check_functions(pre_warmup_hook=pre_warmup_hook, post_warmup_hook=post_warmup_hook)
    _check_pool(pool)
    if _order is None and (_reuse_graph_input_output_buffers or _num_layers_per_chunk is not None):
        raise ValueError("_reuse_graph_input_output_buffers and _num_layers_per_chunk are about the chunks of an _order")
    one = not isinstance(callables, tuple)
    if one:
        callables, sample_args = (callables,), (sample_args,)
        sample_kwargs = None if sample_kwargs is None else (sample_kwargs,)
        capture_time_hooks = (capture_time_hooks,) if isinstance(capture_time_hooks, Mapping) else capture_time_hooks
    _check_callables(callables)
    schedule = None if _order is None else Schedule.of(_order, _num_layers_per_chunk, len(callables))
    called = callables if schedule is None else tuple(callables[i] for i in schedule.samples())
    _check_samples(called, sample_args, sample_kwargs)
    hooks = _capture_hooks(callables, capture_time_hooks)
    needed = {} if schedule is None else _recordings(callables, schedule)
    ours = {"warmup": num_warmup_iters}
    chosen = {
        identity(c): Options.given("make_graphed_callables", options, **ours, **needed.get(identity(c), {})) for c in callables
    }
    kinds: dict[int, Any] = {}
    if capture_time_hooks is not None or pre_warmup_hook is not None or post_warmup_hook is not None:
        warm_ups = WarmUps(len(hooks), num_warmup_iters, pre_warmup_hook, post_warmup_hook)
        kinds = {key: partial(Hooked, hooks=h, warm_ups=warm_ups, number=n) for n, (key, h) in enumerate(hooks.items())}
    recorded = {key: wrap(h.owner, chosen[key], kinds.get(key, Recorded)) for key, h in hooks.items()}
    _let_be_reset(callables)
    made = tuple(recorded[identity(c)] for c in called)
    return made[0] if one else made


class _Reset:
    """What a module is given as its `reset`. In a copy of the module, and in what is read of a pickle, which are not recorded,
    there is a function instead that does nothing."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = ref(module)

    def __call__(self) -> None:
        module = self._module()
        recorded = None if module is None else torch_modules.goes_through(module)
        if isinstance(recorded, Recorded):
            recorded.reset()

    def __reduce__(self) -> tuple[object, ...]:
        return partial, (bool,)

    def reached(self) -> tuple[object, ...]:
        """What it can reach, for a recorded function that finds it."""
        return ()


def _let_be_reset(callables: Iterable[object]) -> None:
    """Give modules a `reset`, as a recorded function has one; but not those that have one."""
    for c in callables:
        if isinstance(c, torch.nn.Module) and not hasattr(c, "reset"):
            c.reset = _Reset(c)  # type: ignore[assignment]  # it is no tensor


def _refuse_low_precision(options: dict[str, object]) -> None:
    """Take Transformer Engine's options out; one that is not off is refused."""
    given = sorted(name for name in _TRANSFORMER_ENGINE & options.keys() if options.pop(name) not in (None, False))
    if given and find_spec("transformer_engine") is None:
        raise ModuleNotFoundError(f"{', '.join(given)}: an option of Transformer Engine, which is not installed "
                                  "(there is no module transformer_engine)", name="transformer_engine")  # fmt: skip
    if given:
        raise NotImplementedError(f"{', '.join(given)}: phonograph does not enter Transformer Engine's autocast for you; "
                                  "call the recorded callables within it")  # fmt: skip


def _check_bools(**given: object) -> None:
    for name, flag in given.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be a bool, not {type(flag).__name__}")


def _check_functions(**given: object) -> None:
    for name, function in given.items():
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be a function without arguments, not {type(function).__name__}")


def _check_pool(pool: object) -> None:
    if pool is None or isinstance(pool, torch.cuda.MemPool):
        return
    if not (isinstance(pool, tuple) and len(pool) == 2 and all(type(n) is int for n in pool)):
        raise TypeError(f"pool must be a handle (torch.cuda.graph_pool_handle(), CUDAGraph.pool()) or a MemPool, not {pool!r}")


def _check_mode(mode: object) -> None:
    if mode not in _MODES:
        raise ValueError(f"capture_error_mode must be one of {', '.join(_MODES)}, not {mode!r}")


def _check_callables(callables: tuple[object, ...]) -> None:
    if not callables:
        raise ValueError("callables is an empty tuple")
    for c in callables:
        if not callable(c):
            raise TypeError(f"callables must be modules or functions, or a tuple of them, not {type(c).__name__}")


def _check_samples(called: Sequence[Any], sample_args: Any, sample_kwargs: Any) -> None:
    """`called` are the callables that the samples are for, one by one."""
    _check_length("sample_args", sample_args, len(called))
    if sample_kwargs is not None:
        _check_length("sample_kwargs", sample_kwargs, len(called))
    for i, (c, args, kwargs) in enumerate(zip(called, sample_args, sample_kwargs or repeat({}), strict=False)):
        if not isinstance(args, (tuple, list)):
            raise TypeError(f"sample_args must have a tuple of arguments for each callable, not {type(args).__name__}")
        if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
            raise TypeError(f"sample_kwargs must have a dict of keyword arguments for each callable, not {kwargs!r}")
        _check_fit(c, args, kwargs, f"sample {i}")


def _check_length(name: str, given: object, expected: int) -> None:
    if not isinstance(given, (tuple, list)):
        raise TypeError(f"{name} must be a tuple, not {type(given).__name__}")
    if len(given) != expected:
        raise ValueError(f"{name} has {len(given)} entries and must have {expected}: one for each callable, with _order for "
                         "each layer and micro-batch")  # fmt: skip


def _check_fit(c: Any, args: Sequence[object], kwargs: Mapping[str, object], what: str) -> None:
    """Whether a callable can be called so, as far as its parameters tell; hooks before a forward may change arguments."""
    if isinstance(c, torch.nn.Module) and c._forward_pre_hooks:
        return
    try:
        signature = inspect.signature(c.forward if isinstance(c, torch.nn.Module) else c)
    except (TypeError, ValueError):  # a function in C
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as e:
        raise TypeError(
            f"{what} does not fit the parameters of {getattr(c, '__qualname__', type(c).__qualname__)}: {e}"
        ) from None


def _capture_hooks(callables: tuple[Any, ...], given: Any) -> dict[int, CaptureHooks]:
    """The hooks of each callable, by its id: one that is given twice is recorded once."""
    if given is not None:
        _check_length("capture_time_hooks", given, len(callables))
    found: dict[int, CaptureHooks] = {}
    for c, hooks in zip(callables, repeat(None) if given is None else given, strict=False):
        if hooks and identity(c) in found:
            raise ValueError("capture_time_hooks has an entry for the second place of a callable that is given twice")
        found.setdefault(identity(c), CaptureHooks.of(c, hooks))
    return found


def _recordings(callables: tuple[object, ...], schedule: Schedule) -> dict[int, dict[str, Any]]:
    """By the id of each callable: options for as many recordings as it has forwards in flight, and some others."""
    needed = dict.fromkeys(map(identity, callables), _OTHERS)
    for c, flying in zip(callables, schedule.needed(), strict=True):
        needed[identity(c)] += flying
    return {key: {"max_recordings": n, "takes_turns": schedule.takes_turns} for key, n in needed.items()}
