"""The public functions. No logic: each hands on to the room that has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar, overload

from .observe import Stats
from .options import Options
from .recorded import Recorded, live

__all__ = ["explain", "live", "record", "reset", "stats"]

P = ParamSpec("P")
R = TypeVar("R")


@overload
def record(fn: Callable[P, R], /, *, warmup: int = 1, fallback: Literal["live", "error"] = "live",
           outputs: Literal["keep", "borrow"] = "keep", verify: int = 0, max_recordings: int = 16,
           name: str | None = None) -> Recorded[P, R]: ...  # fmt: skip
@overload
def record(fn: None = None, /, *, warmup: int = 1, fallback: Literal["live", "error"] = "live",
           outputs: Literal["keep", "borrow"] = "keep", verify: int = 0, max_recordings: int = 16,
           name: str | None = None) -> Callable[[Callable[P, R]], Recorded[P, R]]: ...  # fmt: skip


def record(fn: Any = None, /, **options: Any) -> Any:
    """Record a function of tensors and play it back: as a CUDA graph for CUDA tensors, as a tape for CPU tensors.

    The function may be a whole training step (forward, backward, optimizer), a decode step, an optimizer step: any
    callable of tensors and Python values, nested as you like. The first call of each signature runs live, the second is
    captured and played, later ones are played. The results are those of the function, or the call runs live and
    `RunsLive` is warned with the reason.

    Args:
        fn: the function; without it, a decorator is returned.
        warmup: live calls of each signature before it is recorded.
        fallback: what happens when a call cannot be recorded: ``"live"`` runs it, ``"error"`` raises `Unrecordable`.
        outputs: ``"keep"``: a result keeps its value for as long as you hold it. ``"borrow"``: it is valid until a later
            call overwrites it, after which reading it raises `StaleOutput`.
        verify: every `verify`-th replay is compared with a live run on a copy of the state; 0 never.
        max_recordings: recordings kept; the least recently played goes first.
        name: what the function is called in reports.

    Returns:
        A `Recorded` with the signature of `fn`. Tensors in its results lie on the same device as `fn`'s would.

    Raises:
        TypeError: `fn` is not callable, or an option has the wrong type.
        ValueError: an option is out of range.

    Example:
        >>> import torch, phonograph as pg
        >>> step = pg.record(lambda x: (x * 2).sum())
        >>> [step(torch.ones(3)).item() for _ in range(3)]
        [6.0, 6.0, 6.0]
    """
    chosen = Options(**options)
    if fn is None:
        return lambda function: _wrap(function, chosen)
    return _wrap(fn, chosen)


def _wrap(fn: Any, options: Options) -> Recorded[Any, Any]:
    if not callable(fn):
        raise TypeError(f"pg.record takes a function, not {type(fn).__name__}")
    if isinstance(fn, Recorded):
        fn = fn.__wrapped__
    return Recorded(fn, options)


def stats(f: Recorded[Any, Any]) -> Stats:
    """What a recorded function did so far, as numbers."""
    return _recorded(f).stats()


def explain(f: Recorded[Any, Any]) -> str:
    """What a recorded function did so far and why, as text: its recordings, and each reason for running live with the
    operator, your source line and the remedy."""
    return _recorded(f).explain()


def reset(f: Recorded[Any, Any]) -> None:
    """Drop all recordings of a function and free their memory. Results that you hold stay valid."""
    _recorded(f).reset()


def _recorded(f: Any) -> Recorded[Any, Any]:
    f = f if isinstance(f, Recorded) else getattr(f, "__func__", f)
    if not isinstance(f, Recorded):
        raise TypeError(f"expected a function made by pg.record, not {type(f).__name__}")
    return f
