"""Public functions. They check arguments and delegate: `record` to `wrappers/`, `report` to `observe/`, others to `engine/`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import Parameter
from types import MethodType
from typing import Any, Literal, ParamSpec, TypeVar, overload

import torch

from ._torch import dynamo as torch_dynamo
from ._torch import modules as torch_modules
from ._torch.dynamo import ended_by
from .capture.value_checks import look
from .devices import owned
from .devices.cuda.captured_order import CapturedOrder, captures_checked
from .engine.check import check as find_out
from .engine.explanation import Explanation
from .engine.findings import Findings
from .engine.live_parts import live
from .engine.parts import counted
from .engine.recorded import Recorded
from .engine.repeated_records import made_anew
from .guards.module_epochs import give_back
from .observe.page import Report
from .options import Options, parameters
from .python.origin import has_called
from .shapes.buckets import Padded
from .statistics import Observed, Stats
from .wrappers.wrapping import unwrap, wrap

__all__ = ["check", "check_graphs", "explain", "live", "prepare", "record", "report", "reset", "stats"]

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=torch.nn.Module)
Shapes = Mapping[str, Mapping[int, Iterable[int]]]
Names = str | Iterable[str]
Carry = Names | Mapping[str, int | str | None]
Results = str | Sequence[object]
Edges = Literal["captured", "true"]


@overload
def record(fn: M, /, *, warmup: int = 1, fallback: Literal["auto", "live", "split", "error"] = "auto",  # type: ignore[overload-overlap]
           outputs: Literal["keep", "borrow"] = "keep", verify: int = 0, audit: int = 4096, max_recordings: int = 16,
           max_bytes: int | None = None, name: str | None = None, keep: Literal["pays", "always"] = "pays",
           split_at: Iterable[object] = (), shapes: Shapes | None = None, edges: Edges = "captured") -> M: ...  # fmt: skip
@overload
def record(fn: Callable[P, R], /, *, warmup: int = 1, fallback: Literal["auto", "live", "split", "error"] = "auto",
           outputs: Literal["keep", "borrow"] = "keep", verify: int = 0, audit: int = 4096, max_recordings: int = 16,
           max_bytes: int | None = None, name: str | None = None, keep: Literal["pays", "always"] = "pays",
           split_at: Iterable[object] = (), shapes: Shapes | None = None, steps: int | None = None,
           carry: Carry = (), shared: Names = (), results: Results = "stack",
           edges: Edges = "captured") -> Recorded[P, R]: ...  # fmt: skip
@overload
def record(fn: None = None, /, *, warmup: int = 1, fallback: Literal["auto", "live", "split", "error"] = "auto",
           outputs: Literal["keep", "borrow"] = "keep", verify: int = 0, audit: int = 4096, max_recordings: int = 16,
           max_bytes: int | None = None, name: str | None = None, keep: Literal["pays", "always"] = "pays",
           split_at: Iterable[object] = (), shapes: Shapes | None = None, steps: int | None = None,
           carry: Carry = (), shared: Names = (),
           results: Results = "stack",
           edges: Edges = "captured") -> Callable[[Callable[P, R]], Recorded[P, R]]: ...  # fmt: skip


@ended_by
def record(fn: object = None, /, **options: Any) -> object:
    """Record a function or module and play it back: as a CUDA graph for CUDA tensors, as a tape for CPU tensors.

    The function is any callable of tensors and Python values, nested as you like: a whole training step (forward, backward,
    optimizer), a decode step, an optimizer step. Its first call of each signature runs live. The second is captured and played.
    Later ones are played. A signature is structure, shapes, dtypes, devices, strides, Python values and modes of a call.
    Results are those of the function. A call that cannot give them is cut, or runs live with a `RunsLive` warning.

    A module is changed in place: its calls are recorded, forward and backward. Loss, optimizer, training loop, `state_dict`,
    hooks, `deepcopy` and pickling stay as they are. `pg.reset` undoes it.

    Args:
        fn: a function, or a `torch.nn.Module`. Without it, a decorator is returned.
        warmup: live calls of each signature before it is recorded. They are your own first calls, never extra ones.
        fallback: what happens to a call that cannot be recorded whole.

            ``"auto"``: it is recorded in segments, where that is measured faster than live. Between segments, the operators run
            that need the host. Numbers that are only returned (``return loss.item()``) are read after the last segment. A call
            runs live where an operator between segments gives another shape than before, or where the code branches on another
            number (``if mask.all():``, `GradScaler`). A few calls run live to be timed. With `verify`, with `shapes` and on
            several ranks it is ``"live"``.

            ``"split"``: the same, without that measurement. ``"live"``: the call runs live. ``"error"``: `Unrecordable` is
            raised. Functions marked `live` run between segments with each of them.
        split_at: operators that run live between segments, though they could be captured: ``"aten::sort"`` or
            ``torch.ops.mylib.op`` for all overloads, ``"aten::sort.stable"`` for one. It needs ``fallback="split"``. For
            operators that count on the host, for instance.
        outputs: ``"keep"``: a result keeps its value for as long as you hold it. ``"borrow"``: a result is the recording's own
            memory. A later call overwrites it, and reading it then raises `StaleOutput`.
        verify: every `verify`-th replay of a recording is compared with a live run on a copy of the state, and a difference
            raises `Mismatch`. 0: never. A backward outside of the call is not compared.
        audit: after 8, 64, 512 and then each `audit` replays of a recording, the code of the call runs dry, and its operators
            are compared with the recorded ones. 0: never. An audit runs nothing on the device and leaves nothing behind. It
            takes as long as a capture: six to eight live steps on an H100. Where they differ, the recording is dropped, the
            call runs live, and `Stale` is warned. `explain` names what no audit can compare.
        max_recordings: most recordings that are kept. The least recently played goes first. It stays while it is in use: where
            more signatures take turns than there is room for, those that have a recording keep it.
        max_bytes: most bytes of device memory that these recordings may overwrite. Memory that several share counts once. The
            least recently played goes first; the newest stays in any case. None: no bound.
        name: name of the function in messages and reports. By default its ``__qualname__``.
        keep: ``"pays"``: the first replays of a signature are timed, and, if need be, a few later live calls. A recording that
            is slower than the function is dropped; `explain` gives both times. Such calls run live until something changes that
            they rely on. ``"always"``: no recording is dropped for its speed. So it is with ``fallback="error"``, `verify` and
            `shapes`, and for a recording that communicates with other ranks.
        shapes: sizes by dimension by parameter, ``{"x": {0: [1, 2, 4, 8]}}``. An argument of another size is padded with zeros
            to the next of these, and the results are cut to their own size. Above the largest, a call is recorded with its own
            size. You promise that no row of a result depends on other rows. The first call of each size runs live and is
            compared with a padded one. If results differ (a mean over that dimension), if gradients are wanted, if the function
            writes tensors or if it draws random numbers, such calls are recorded with their own sizes, and `RunsLive` says why.
            Padded results equal live ones as far as the kernels of both sizes do.
        steps: steps in one call. `fn` runs `steps` times in one launch; live it is a loop. Tensors in the arguments have a
            leading dimension of `steps`, and each step gets its slice, a view. Other arguments are the same for each step. Not
            for modules, nor with `shapes`.
        carry: parameters that get the result of the step before. The first step gets the argument as it is. ``"x"``: the whole
            result. ``["x", "y"]``: the items of the result, in this order. ``{"state": 1}``: item 1 of the result, or the
            attribute of that name.
        shared: parameters whose tensors each step gets whole: a cache, weights.
        results: ``"stack"``: tensors are stacked along a new leading dimension, copied after each step; other values come as a
            list, None as None. ``"last"``: the result of the last step. ``("last", "stack")``: one of these for each item.
        edges: experimental. ``"captured"``: the kernels of a recording run one after the other, as the call has launched them.
            ``"true"``: on a GPU, those that share no memory may run at the same time. The second replay tries this: some forty
            runs, from one state, after which all memory is as before. It is kept where each of them gave the same to the bit,
            and faster; `explain` has the times, or why not. For whole steps on one GPU that draw no random numbers. The
            recording may take 1.15 times the memory, or 32 MiB more; while it tries, also twice that of the tensors which the
            call changes. What nodes touch is told by schemas of operators and by parameters of kernels: no two runs prove that.

    Returns:
        A `Recorded` with the signature of `fn`; of a module, the module itself. Results lie on the devices on which `fn` puts
        them. They share no memory with later results, except with ``outputs="borrow"``.

    Raises:
        TypeError: `fn` is not callable, or an option has the wrong type.
        ValueError: an option is out of range; or `shapes`, `carry` or `shared` names no parameter. With `steps`, a call raises
            it for another leading dimension.

    Examples:
        >>> import torch, phonograph as pg
        >>> step = pg.record(lambda x: (x * 2).sum())
        >>> [step(torch.ones(3)).item() for _ in range(3)]
        [6.0, 6.0, 6.0]
        >>> scan = pg.record(lambda total, x: total + x, steps=4, carry="total")
        >>> scan(torch.tensor(0), torch.arange(1, 5))
        tensor([ 1,  3,  6, 10])
    """
    has_called(sys._getframe(1))
    chosen = Options.given("record", options)
    if fn is None:
        return lambda function: _once(function, wrap(function, chosen))
    return _once(fn, wrap(fn, chosen))


setattr(record, "__signature__", parameters(Parameter("fn", Parameter.POSITIONAL_ONLY, default=None)))  # noqa: B010


def _once(fn: object, made: Any) -> object:
    """Return `made`. Warn if the same function is recorded again and again."""
    recorded = torch_modules.goes_through(made) if isinstance(made, torch.nn.Module) else made
    refusal = made_anew(fn, recorded, counted(recorded))
    if refusal is not None:
        recorded.say(refusal)
    return made


@ended_by
def prepare(f: object, /, *args: object, **kwargs: object) -> None:
    """Record all sizes of `shapes` before they are needed, the largest first.

    `f` runs once with these arguments, with all its effects, unless it was recorded with ``warmup=0``. The other sizes are
    captured, which runs nothing, with arguments that are cut or padded with zeros. On a terminal with rich installed, a bar on
    stderr shows the progress.

    Args:
        f: a function or module that was recorded with `shapes`.
        *args, **kwargs: arguments of a call, of any size, on the device of later calls.

    Raises:
        TypeError: `f` was not recorded with `shapes`.
        ValueError: no argument has the dimensions of `shapes`, or there are more sizes than `max_recordings`.
    """
    recorded = _recorded(f)
    if not isinstance(recorded, Padded):
        raise TypeError("pg.prepare is for what was recorded with shapes={...}")
    if isinstance(f, MethodType):
        args = (f.__self__, *args)
    recorded.prepare(args, kwargs)


@ended_by
def check(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Findings:
    """All that keeps a function or module from being recorded, found in one run, and what a recording of it gives.

    `f` is called about ten times with these arguments, with all its effects: a training step trains. The first calls run live
    and are timed. The next one is observed: what a capture would refuse is noted, and happens. The last ones go through a
    recording, which has the last word, and are timed. ``phonograph check script.py`` also finds what shows only in different
    calls, like an argument with a new value in each.

    Args:
        f: a function or `torch.nn.Module`, recorded or not. It is left as it is.
        *args, **kwargs: arguments of each call.

    Returns:
        `Findings`, which ``print`` shows with each place in your source. `records`: whether calls are recorded whole.
        `obstacles`: why not, each with its code, place, argument and remedy. `live_ms` and `replay_ms`: measured milliseconds
        of a call, `replay_ms` None without a recording.

    Raises:
        Exception: whatever `f` raises.

    Example:
        >>> import torch, phonograph as pg
        >>> found = pg.check(lambda x: x / x.max().item(), torch.ones(3))
        >>> found.records, [obstacle.code for obstacle in found.obstacles]
        (False, ['PG101'])
    """
    has_called(sys._getframe(1))
    return find_out(f, args, kwargs)


@contextmanager
def check_graphs() -> Iterator[list[CapturedOrder]]:
    """Whether in CUDA graphs that anybody captures meanwhile, those nodes are in order that work on one memory.

    For graphs captured on several streams, by hand or by a package: ``torch.cuda.graph``, `make_graphed_callables`, an
    engine's own. Where a wait between two streams was forgotten, eager calls mostly come out right, and replays do not. Nothing
    is changed in a graph; a capture takes longer. Compiled code, Triton kernels and others that no operator launches are not
    looked at, nor tensors with gaps.

    Returns:
        A list, to which a `CapturedOrder` is added at the end of each capture. `races`: pairs of operators, with their lines,
        that touch the same memory, one of them writing it, and of which neither waits for the other, as their schemas tell.
        `nodes`: how many there are. `unknown`: how many of these were not looked at. ``print`` shows all of it.

    Example:
        >>> import torch, phonograph as pg
        >>> with pg.check_graphs() as graphs:
        ...     pass  # capture something
        >>> [graph.races for graph in graphs]
        []
    """
    found: list[CapturedOrder] = []
    with captures_checked(found.append):
        yield found


@ended_by
def stats(f: object) -> Stats:
    """Counts of what a recorded function or module did so far.

    Args:
        f: a recorded function or module.

    Returns:
        A `Stats`: a snapshot, which later calls do not change.

    Raises:
        TypeError: `f` is not recorded.

    Example:
        >>> import torch, phonograph as pg
        >>> double = pg.record(lambda x: x * 2, keep="always")
        >>> for _ in range(3):
        ...     _ = double(torch.ones(3))
        >>> pg.stats(double).live, pg.stats(double).replayed
        (1, 2)
    """
    look()
    return _recorded(f).stats()


@ended_by
def explain(f: object) -> Explanation:
    """Report of what a recorded function or module did so far, and why, as text.

    It lists the recordings: cost, gain, why each was made, what it relies on. It lists the reasons for running live: operator,
    source line, all remedies. Times are of a recording's first calls; later calls are not timed. On a GPU a time is the longer
    of the host's and the device's.

    Args:
        f: a recorded function or module.

    Returns:
        An `Explanation`, a `str` that a notebook shows as a page.

    Raises:
        TypeError: `f` is not recorded.
    """
    look()
    return Explanation(_recorded(f).explain())


@ended_by
def report(path: str | os.PathLike[str], *, trace: str | os.PathLike[str] | None = None) -> Report:
    """HTML page of what all recorded functions of this process did so far. It loads nothing and runs no code.

    It shows calls, recordings, memory, the reasons for running live with your source lines, and the modules behind each
    recording's operators. As a context manager it times the calls in its block and writes the page again at its end, with the
    calls over time. It keeps a bounded number of calls. Calls of a function that is refused for good are counted, not timed.

    Args:
        path: file to write, in a folder that exists and is writable. The page is written beside it and moved there when it is
            whole: a reader never sees half a page, and a failure leaves the old one.
        trace: trace that `torch.profiler` exported (`export_chrome_trace`) while recordings were played in this process. It
            adds the device time of each module. It is read when the page is written, and may be exported within the block.

    Returns:
        A `Report`, for ``with``.

    Raises:
        OSError: the page cannot be written: the message names the folder.
        ValueError: `trace` is no trace.

    Example:
        >>> import torch, phonograph as pg
        >>> step = pg.record(lambda x: (x * 2).sum())
        >>> with pg.report("/tmp/phonograph-example.html"):
        ...     for _ in range(3):
        ...         _ = step(torch.ones(3))
    """
    found = Report(path, trace)
    found.write()
    return found


@ended_by
def reset(f: object) -> None:
    """Drop all recordings of a function or module, and free their memory.

    Results that you hold keep their values. A function is recorded anew in its next calls. A module is no longer recorded: its
    calls are its own again. When the last recording of the process goes, torch's wrapped methods are its own again.

    Args:
        f: a recorded function or module.

    Raises:
        TypeError: `f` is not recorded.
    """
    f = _what_is_recorded(f)
    recorded = _recorded(f)
    recorded.reset()
    if not owned():
        give_back()
    if isinstance(f, torch.nn.Module) and isinstance(recorded, Recorded):
        unwrap(f, recorded)


def _recorded(f: object) -> Observed:
    f = _what_is_recorded(f)
    found = _observed(f)
    if found is not None:
        return found
    given = type(f).__name__
    if torch_dynamo.uncompiled(f) is not None:
        given = ("what torch.compile made of one that is not recorded: pg.record that, or, if its backend is phonograph, ask "
                 "for each of phonograph.compile.graphs()")  # fmt: skip
    elif isinstance(f, torch.nn.Module):
        raise TypeError(f"this {given} is not recorded: call pg.record on it (copies of a recorded module are not recorded, "
                        "nor is one that was loaded, or that pg.reset was called on)")  # fmt: skip
    raise TypeError(f"expected a function or module that pg.record was called on, not {given}")


def _what_is_recorded(f: object) -> object:
    """`f`, or the function under `torch.compile` if that one is recorded."""
    plain = torch_dynamo.uncompiled(f)
    return plain if _observed(f) is None and _observed(plain) is not None else f


def _observed(f: object) -> Observed | None:
    if isinstance(f, torch.nn.Module):
        f = torch_modules.goes_through(f)
    f = f if isinstance(f, Observed) else getattr(f, "__func__", f)
    return f if isinstance(f, Observed) else None
