"""The public functions. No logic: each hands on to the room that has it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter
from types import MethodType
from typing import Any, Literal, ParamSpec, TypeVar, overload

import torch

from ._torch import dynamo as torch_dynamo
from ._torch import modules as torch_modules
from ._torch.dynamo import ended_by
from .capture.value_checks import look
from .devices import owned
from .engine.check import check as find_out
from .engine.explanation import Explanation
from .engine.findings import Findings
from .engine.live_parts import live
from .engine.parts import counted
from .engine.recorded import Recorded
from .engine.repeated_records import made_anew
from .guards.module_epochs import give_back
from .observe.writing import Report
from .options import Options, parameters
from .python.origin import has_called
from .shapes.buckets import Padded
from .statistics import Observed, Stats
from .wrappers.wrapping import unwrap, wrap

__all__ = ["check", "explain", "live", "prepare", "record", "report", "reset", "stats"]

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=torch.nn.Module)
Shapes = Mapping[str, Mapping[int, Iterable[int]]]
Names = str | Iterable[str]
Carry = Names | Mapping[str, int | str | None]
Results = str | Sequence[object]


@overload
def record(fn: M, /, *, warmup: int = 1, fallback: Literal["auto", "live", "split", "error"] = "auto",  # type: ignore[overload-overlap]
           outputs: Literal["keep", "borrow"] = "keep", verify: int = 0, audit: int = 4096, max_recordings: int = 16,
           max_bytes: int | None = None, name: str | None = None, keep: Literal["pays", "always"] = "pays",
           split_at: Iterable[object] = (), shapes: Shapes | None = None) -> M: ...  # fmt: skip
@overload
def record(fn: Callable[P, R], /, *, warmup: int = 1, fallback: Literal["auto", "live", "split", "error"] = "auto",
           outputs: Literal["keep", "borrow"] = "keep", verify: int = 0, audit: int = 4096, max_recordings: int = 16,
           max_bytes: int | None = None, name: str | None = None, keep: Literal["pays", "always"] = "pays",
           split_at: Iterable[object] = (), shapes: Shapes | None = None, steps: int | None = None,
           carry: Carry = (), shared: Names = (), results: Results = "stack") -> Recorded[P, R]: ...  # fmt: skip
@overload
def record(fn: None = None, /, *, warmup: int = 1, fallback: Literal["auto", "live", "split", "error"] = "auto",
           outputs: Literal["keep", "borrow"] = "keep", verify: int = 0, audit: int = 4096, max_recordings: int = 16,
           max_bytes: int | None = None, name: str | None = None, keep: Literal["pays", "always"] = "pays",
           split_at: Iterable[object] = (), shapes: Shapes | None = None, steps: int | None = None,
           carry: Carry = (), shared: Names = (),
           results: Results = "stack") -> Callable[[Callable[P, R]], Recorded[P, R]]: ...  # fmt: skip


@ended_by
def record(fn: object = None, /, **options: Any) -> object:
    """Record a function or module and play it back: as a CUDA graph for CUDA tensors, as a tape for CPU tensors.

    The function may be a whole training step (forward, backward, optimizer), a decode step, an optimizer step: any
    callable of tensors and Python values, nested as you like. The first call of each signature runs live, the second is
    captured and played, later ones are played. The results are those of the function, or the call runs live and
    `RunsLive` is warned with the reason.

    Where a result's backward runs outside of the function, that is recorded as well: the loss, the optimizer and the rest of
    the training loop stay as they are. A module is changed in place: calls of it are recorded from then on, and all else
    (`state_dict`, hooks, `deepcopy`, pickling) is as before; `pg.reset` undoes it.

    Args:
        fn: the function, or a `torch.nn.Module`; without it, a decorator is returned.
        warmup: live calls of each signature before it is recorded.
        fallback: what happens when a call cannot be recorded as a whole. ``"auto"`` records it in segments: between them,
            operators run live that need the host. It is run where one of these gives another shape than before, or a number by
            which the call goes on (``if mask.all():``, `GradScaler`) is another. Numbers that it only hands on (``return
            loss.item()``) are read at its end. That has to pay: a few calls run live to time them, and unless replays are
            faster, or where too many calls begin again, all calls run live, with the reason. So they do with `verify` and
            `shapes`, and with several ranks. ``"split"`` does the same, and measures only what `keep` asks for. ``"live"`` runs
            it. ``"error"`` raises `Unrecordable`. (Functions that are marked `live` run between segments in any case.)
        split_at: with ``fallback="split"``, operators that run live between segments although they could be captured:
            ``"aten::sort"`` or ``torch.ops.mylib.op``, all overloads of it or one. For what must really run each time: an
            operator that counts on the host, for instance.
        outputs: ``"keep"``: a result keeps its value for as long as you hold it. ``"borrow"``: it is valid until a later
            call overwrites it, after which reading it raises `StaleOutput`.
        verify: every `verify`-th replay of a recording is compared with a live run on a copy of the state; 0 never. A
            backward that runs outside of the call is not.
        audit: the Python code of a call runs dry once more after 8, 64 and 512 replays of a recording, and then after each
            `audit`; what it would launch is compared with what was recorded. Nothing runs on the device, and nothing is left
            behind; it takes as long as a capture, six to eight live steps on an H100. Where it is something else the recording
            goes, the call runs live, and `Stale` is warned. What cannot be looked at so, `explain` names. 0: never.
        max_recordings: recordings kept; the least recently played goes first, if it was not played since another signature came
            first, or for eight of that one's calls: where more take turns, those that have one keep it.
        max_bytes: bytes of device memory that the recordings kept may overwrite in all, shared ones counted once; the least
            recently played goes first, and the newest stays in any case. None: no bound.
        name: what the function is called in reports.
        keep: ``"pays"``: the first replays of each signature are timed, and, unless they are fast beyond doubt, a few later
            calls run live and are timed as well. A recording that is slower by more than noise goes, and `explain` says how
            long both took; such calls run live until something on which they rely changes. ``"always"``: it stays, as with
            ``fallback="error"``, `verify` and `shapes`, and where it communicates with other ranks.
        shapes: sizes that are recorded, by dimension by parameter: ``{"x": {0: [1, 2, 4, 8]}}``. An argument whose size lies
            between two of them is padded with zeros to the next, and the results are cut to the size that they would have
            had; where there is no next one, the call is recorded with its own size. With it you say that no row of a
            result depends on other rows. The first call with each size runs live, and beside it is tried whether padding
            changes the result (a mean over the padded dimension does). Then, where gradients are wanted, and where the
            function writes something or draws random numbers, such calls are recorded with their own sizes, and `RunsLive`
            says why. Rows of padded results agree with live ones as far as the kernels for the two sizes do.
        steps: a call is so many steps: `fn` is called `steps` times, one after the other, in one launch. Tensors among the
            arguments, nested ones too, have a leading dimension of `steps`, and each step gets its slices, which are views. All
            other arguments are the same for each step. Live it is a loop. Not for modules, nor with `shapes`.
        carry: parameters that are fed from the result of the step before; the first step gets the argument as it is. A name:
            the whole result is fed to it. Several names: the items of the result, in this order. ``{"state": 1}``: item 1 of
            the result, or the attribute of that name.
        shared: names of parameters whose tensors each step gets as they are: a cache, weights.
        results: ``"stack"``: tensors of the steps' results come back along a new leading dimension, copied after each step;
            other values as a list; None as None. ``"last"``: the last step's result. ``("last", "stack")``: likewise for each
            item of the result.

    Returns:
        A `Recorded` with the signature of `fn`; a module itself. Tensors in its results lie on the same device as `fn`'s
        would.

    Raises:
        TypeError: `fn` is not callable, or an option has the wrong type.
        ValueError: an option is out of range, or `shapes`, `carry` or `shared` names what is no parameter. With `steps`, a call
            raises it where an argument has another leading dimension.

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
    """What was made of it; said where that is done again and again."""
    recorded = torch_modules.goes_through(made) if isinstance(made, torch.nn.Module) else made
    refusal = made_anew(fn, recorded, counted(recorded))
    if refusal is not None:
        recorded.say(refusal)
    return made


@ended_by
def prepare(f: object, /, *args: object, **kwargs: object) -> None:
    """Record all sizes of `shapes` before they are needed, the largest first. A bar on stderr shows how far it is, on a
    terminal and with rich installed.

    Unless `f` was recorded with ``warmup=0``, it runs once with these very arguments, with all that it does. For the other
    sizes it is captured, which is a dry run, with these arguments cut, or padded with zeros.

    Args:
        f: a function or module on which `pg.record` was called with `shapes`.
        *args, **kwargs: an example of its arguments, of any size.

    Raises:
        TypeError: it was not recorded with `shapes`.
        ValueError: no argument has the dimensions that `shapes` names, or there are more sizes than `max_recordings`.
    """
    recorded = _recorded(f)
    if not isinstance(recorded, Padded):
        raise TypeError("pg.prepare is for what was recorded with shapes={...}")
    if isinstance(f, MethodType):
        args = (f.__self__, *args)
    recorded.prepare(args, kwargs)


@ended_by
def check(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Findings:
    """Find out what `pg.record` would do with a function or module: *all* that stands in the way, in one run.

    It is called with these arguments about ten times, as a loop would call it, with all that it does: a training step trains.
    First live, to time it; then live and observed, where all that a capture would refuse is noted, and happens; and then
    through a recording, which has the last word, and is timed as well. What has to be seen in several calls, as an argument
    that is another each time, ``phonograph check script.py`` finds, which follows the calls of a script of yours.

    Args:
        f: a function, or a `torch.nn.Module`, that is recorded or not. It stays as it is.
        *args, **kwargs: the arguments of each call.

    Returns:
        What was found: ``print`` shows it, with each place in your source. `records` says whether calls are recorded whole,
        `obstacles` why not, each with its code, place, argument and remedy; `live_ms` and `replay_ms` are measured.

    Raises:
        Whatever `f` raises.

    Example:
        >>> import torch, phonograph as pg
        >>> found = pg.check(lambda x: x / x.max().item(), torch.ones(3))
        >>> found.records, [obstacle.code for obstacle in found.obstacles]
        (False, ['PG101'])
    """
    has_called(sys._getframe(1))
    return find_out(f, args, kwargs)


@ended_by
def stats(f: object) -> Stats:
    """Counts of what a recorded function or module did so far.

    Args:
        f: what `pg.record` has returned, or a module on which it was called.

    Returns:
        A `Stats`, which stays as it is when more calls come.

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
    """Text that says what a recorded function or module did so far, and why.

    It has the recordings: what each has cost and gives, why it was made, and what it relies on. And each reason for running
    live, with the operator, your source line and the remedy. Times are of the first calls of a recording; later ones are not
    timed. On a GPU a time is the longer of the host's and the device's.

    Args:
        f: what `pg.record` has returned, or a module on which it was called.

    Returns:
        An `Explanation`: ``print`` shows it, ``str`` makes text of it, a notebook shows it as a page.

    Raises:
        TypeError: `f` is not recorded.
    """
    look()
    return Explanation(_recorded(f).explain())


@ended_by
def report(path: str | os.PathLike[str], *, trace: str | os.PathLike[str] | None = None) -> Report:
    """A page of HTML that says what all recorded functions of this process did so far. It loads nothing and runs no code.

    It has their calls and recordings, memory, each reason for running live with the lines of your source, and, for each
    recording, the modules that its operators come from. As a context manager it times the calls in its block besides, and
    writes the page again at its end: then it has the calls over time, and how long live and replayed ones took. (Of a
    recording that is made there, a few calls run live for that, as `keep` says.) What is kept of them is bounded. Calls of a
    function that is refused for good are counted, and not timed.

    Args:
        path: the file. A page that is there is replaced at once, when the new one is whole.
        trace: a trace that `torch.profiler` has exported (`export_chrome_trace`) while recordings were played in this process.
            Of those in it the page has how long the device worked for each module. It is read when the page is written, if it
            is there by then: it may well be exported in the block.

    Returns:
        A `Report`, for ``with``.

    Raises:
        OSError: the page cannot be written. The old one stays.
        ValueError: the other file is no trace.

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
    """The end of all recordings of a function, whose memory is freed. Results that you hold stay valid.

    A function is recorded anew from its next calls on. A module is no longer recorded then: its calls are its own again. If no
    recording is left in the process, methods of torch's classes that were wrapped are torch's own again.

    Args:
        f: what `pg.record` has returned, or a module on which it was called.

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
    """The function or module itself, or what `torch.compile` was called on, if it is that which is recorded."""
    plain = torch_dynamo.uncompiled(f)
    return plain if _observed(f) is None and _observed(plain) is not None else f


def _observed(f: object) -> Observed | None:
    if isinstance(f, torch.nn.Module):
        f = torch_modules.goes_through(f)
    f = f if isinstance(f, Observed) else getattr(f, "__func__", f)
    return f if isinstance(f, Observed) else None
