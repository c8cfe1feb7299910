"""Functions that really run in each call, also where the function that calls them is recorded: `pg.live`.

In a live call such a function is one like any other, but what it gave is noted: its `Form`. A capture is a dry run, and does
not call it: tensors of that form stand for its results, and there one segment of the recording ends and the next begins. A
replay runs the segments, and calls the function between them (`segments.py`).
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from . import operators
from .trees import Node, flatten

__all__ = [
    "Answer",
    "Form",
    "Meta",
    "Notes",
    "Splitting",
    "Written",
    "capturing",
    "form_of",
    "is_live",
    "live",
    "noting",
    "version",
]

P = ParamSpec("P")
R = TypeVar("R")

_thread = threading.local()


class Meta(NamedTuple):
    """What a tensor is, but for its values."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    inference: bool

    @classmethod
    def of(cls, t: torch.Tensor) -> Meta:
        return cls(tuple(t.size()), t.stride(), t.dtype, t.device, t.is_inference())


class Form(NamedTuple):
    """What one call of a live function gave, as far as code that was captured depends on it.

    `shape` and `results` describe what it returned: for each leaf the `Meta` of a new tensor, the place of a tensor among the
    arguments, or None; `written` are the places of the tensors that it wrote among the arguments. `objection` says why it
    cannot be part of a recording.
    """

    function: Callable[..., Any]
    shape: Node | None
    results: tuple[Meta | int | None, ...]
    written: tuple[int, ...]
    objection: str = ""


class Written:
    """What a call may change of its arguments, as they were before."""

    def __init__(self, args: Any) -> None:
        self._args = args
        self.leaves: list[Any] = []
        self._shape = flatten(args, self.leaves)
        self._tensors = [(i, x) for i, x in enumerate(self.leaves) if isinstance(x, torch.Tensor) and x.layout is torch.strided]
        self._versions = [version(x) for _, x in self._tensors]

    def by(self, function: Callable[..., Any]) -> tuple[int, ...]:
        """The places of tensors that this function has written, or that share memory with such. In inference mode nothing tells
        which were: all of them, then; an operator says so by itself."""
        if isinstance(function, OpOverload):
            args, kwargs = self._args
            found = operators.written_by(operators.meaning(function), args, kwargs)
        else:
            blind = torch.is_inference_mode_enabled()
            before = zip(self._tensors, self._versions, strict=True)
            found = [x for (_, x), v in before if blind or x.is_inference() or version(x) != v]
        written = {x.untyped_storage().data_ptr() for x in found}
        return tuple(i for i, x in self._tensors if x.untyped_storage().data_ptr() in written)

    def containers(self) -> bool:
        """Whether what holds the arguments is another now."""
        now: list[Any] = []
        return flatten(self._args, now) != self._shape or any(a is not b for a, b in zip(now, self.leaves, strict=True))

    def storages(self) -> set[int]:
        return {x.untyped_storage().data_ptr() for _, x in self._tensors}


def version(t: torch.Tensor) -> int:
    """How often a tensor was written, where that is counted."""
    return 0 if t.is_inference() else t._version


def form_of(function: Callable[..., Any], before: Written, result: Any) -> Form:
    """The form of a call that has just returned."""
    leaves: list[Any] = []
    shape = flatten(result, leaves)
    given = {id(x): i for i, x in enumerate(before.leaves) if isinstance(x, torch.Tensor)}
    kinds = [_kind(x, given) for x in leaves]
    new = [x for x, kind in zip(leaves, kinds, strict=True) if isinstance(kind, Meta)]
    found = [kind for kind in kinds if isinstance(kind, str)]
    if before.containers():
        found.append("changes a container that it is given")
    storages = [x.untyped_storage().data_ptr() for x in new if x.numel()]
    if len({*storages}) < len(storages) or not before.storages().isdisjoint(storages):
        found.append("returns tensors that share memory with each other, or with its arguments")
    return Form(function, shape, tuple(None if isinstance(k, str) else k for k in kinds), before.by(function), "; ".join(found))


def _kind(x: Any, given: dict[int, int]) -> Meta | int | str | None:
    if x is None:
        return None
    if id(x) in given:
        return given[id(x)]
    if type(x) is not torch.Tensor or x.layout is not torch.strided:
        return f"returns a {type(x).__qualname__}" if not isinstance(x, torch.Tensor) else "returns a tensor of another kind"
    if x.requires_grad:
        return "returns a tensor that requires a gradient"
    return Meta.of(x)


# -- in live calls


class Answer(NamedTuple):
    """What a live function has given in a call that has to be begun again: its result, what it has written into which of its
    arguments, and what to put back that it would have left (random states, tensors outside)."""

    function: Callable[..., Any]
    result: Any
    written: tuple[tuple[int, torch.Tensor], ...]
    put_back: Callable[[], None]


class Notes:
    """The forms of the live functions that a call has called, and the values of their results. The first ones are given these
    answers, and not called: they have run. `operators` are live functions as well."""

    def __init__(self, operators: Set[OpOverload], answers: Sequence[Answer] = ()) -> None:
        self.operators = operators
        self.forms: list[Form] = []
        self.values: list[list[Any]] = []
        self._answers = deque(answers)

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        before = Written((args, kwargs))
        if self._answers and self._answers[0].function is function:
            result = self._answered(self._answers.popleft(), before.leaves)
        else:
            self._answers.clear()
            result = function(*args, **kwargs)
        self.forms.append(form_of(function, before, result))
        leaves: list[Any] = []
        flatten(result, leaves)
        self.values.append([x.detach().clone() if isinstance(x, torch.Tensor) and x.is_cpu else None for x in leaves])
        return result

    @staticmethod
    def _answered(answer: Answer, leaves: list[Any]) -> Any:
        with torch.no_grad():
            for i, value in answer.written:
                leaves[i].copy_(value)
        answer.put_back()
        return answer.result


class Splitting(TorchDispatchMode):
    """In a live call, these operators are live functions."""

    def __init__(self, found: Set[OpOverload]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        notes: Notes | None = getattr(_thread, "notes", None)
        if notes is None or func not in self._found:
            return func(*args, **(kwargs or {}))
        return notes.call(func, args, kwargs or {})


@contextmanager
def noting(notes: Notes | None) -> Iterator[None]:
    """Live functions that are called in the block are noted there. (What they call themselves is their own business.)"""
    outer = getattr(_thread, "notes", None)
    _thread.notes = notes
    try:
        with Splitting(notes.operators) if notes is not None and notes.operators else nullcontext():
            yield
    finally:
        _thread.notes = outer


# -- in captures


class Cutting(Protocol):
    """The capture that goes on."""

    def concerns(self) -> bool:
        """Whether the calling thread is part of it."""

    def cut(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """End a segment, because this function is called. Returns what stands for its result."""


capturing: list[Cutting] = []
"""The capture that goes on, if one does."""


def live(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function as one that must really run every time.

    A recorded function that calls it is recorded in segments, between which it runs: under the grad mode of the place where it
    is called, with the caller's own arguments, and with copies of what the segments have made, which it may keep and write.
    What it returns goes on from there. So it has to return new tensors of the same kind each time, or None, or tensors that it
    was given. Where the rest depends on something else that it gives (a number, a shape, an attribute that it sets), or a
    gradient flows through it, the recorded function runs live as a whole, with that reason; where that shows in a replay only,
    the call is begun again, and the live parts that have run are not run twice. Anywhere else it is a function like any other.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if capturing and capturing[-1].concerns():
            return capturing[-1].cut(function, args, kwargs)  # type: ignore[no-any-return]
        notes: Notes | None = getattr(_thread, "notes", None)
        if notes is None:
            return function(*args, **kwargs)
        with noting(None):
            return notes.call(function, args, kwargs)  # type: ignore[no-any-return]

    return run


_CODE = live(live).__code__


def is_live(function: Any) -> bool:
    """Whether a function of Python's is marked: its insides are no part of a recording."""
    return getattr(function, "__code__", None) is _CODE
