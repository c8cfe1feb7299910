"""What operators give that run live between the segments of a recording (`segments.py`), because they need the host.

A capture is a dry run, and does not call them; so it has to know what they give: a live call before, in which they are noted,
tells their `Form`.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from .identity import identity
from .operators import meaning, operands, written_by
from .places import Holder
from .reach import Reach
from .reliance import changed
from .trees import Node, flatten
from .watch import storage_id

__all__ = ["Form", "Meta", "Notes", "form_of", "noting", "sizes_of"]


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
    """What one call of an operator gave, as far as what was captured after it depends on it.

    `shape` and `results` describe its result: for each leaf the `Meta` of a new tensor, the place of a tensor among the
    arguments, or None. `objection` says why it cannot run between segments.
    """

    operator: OpOverload
    shape: Node | None
    results: tuple[Meta | int | None, ...]
    objection: str = ""


def form_of(operator: OpOverload, args: Any, kwargs: Any, result: Any) -> Form:
    """The form of a call that has just returned."""
    given: list[Any] = []
    flatten((args, kwargs), given)
    leaves: list[Any] = []
    shape = flatten(result, leaves)
    tensors = {identity(x): i for i, x in enumerate(given) if isinstance(x, torch.Tensor)}
    kinds = [_kind(x, tensors) for x in leaves]
    found = [kind for kind in kinds if isinstance(kind, str)]
    new = [_memory(x) for x, kind in zip(leaves, kinds, strict=True) if isinstance(kind, Meta) and x.numel()]
    if len({*new}) < len(new) or not {_memory(x) for x in given if isinstance(x, torch.Tensor)}.isdisjoint(new):
        found.append("returns tensors that share memory with each other, or with its arguments")
    return Form(operator, shape, tuple(None if isinstance(k, str) else k for k in kinds), "; ".join(found))


def _kind(x: Any, given: dict[int, int]) -> Meta | int | str | None:
    if x is None:
        return None
    if identity(x) in given:
        return given[identity(x)]
    if type(x) is not torch.Tensor or x.layout is not torch.strided:
        return f"returns a {type(x).__qualname__}" if not isinstance(x, torch.Tensor) else "returns a tensor of another kind"
    return Meta.of(x)


def sizes_of(args: Any, kwargs: Any) -> list[torch.Size]:
    """The sizes of the tensors that an operator is given."""
    return [t.size() for t in operands(args, kwargs)]


def _memory(t: torch.Tensor) -> int:
    return t.untyped_storage().data_ptr() if t.layout is torch.strided else 0


class _Seen(NamedTuple):
    """A tensor in reach at one moment. It holds the gradient, whose identity another one could else have later."""

    name: str
    place: int
    version: int
    grad: torch.Tensor | None
    grad_version: int

    @classmethod
    def of(cls, name: str, t: torch.Tensor) -> _Seen:
        grad = t.grad if t.is_leaf else None
        return cls(name, t.data_ptr(), t._version, grad, 0 if grad is None or grad.is_inference() else grad._version)

    def same(self, now: _Seen) -> bool:
        places = self.place == now.place and self.version == now.version
        return places and self.grad is now.grad and self.grad_version == now.grad_version


class Notes:
    """The forms of these operators in a live call, and the values of their results on the CPU. `reach` is what the function can
    reach: an operator that changes something of that, besides giving its result, cannot run between segments."""

    def __init__(self, operators: Set[OpOverload], reach: Reach | None) -> None:
        self.operators = operators
        self.reach = reach
        self.forms: list[Form] = []
        self.values: list[list[Any]] = []

    def call(self, operator: OpOverload, args: Any, kwargs: Any) -> Any:
        written = {storage_id(t) for t in written_by(meaning(operator), args, kwargs)}
        places, before, sizes = self._places(), self._tensors(written), sizes_of(args, kwargs)
        result = operator(*args, **kwargs)
        form = form_of(operator, args, kwargs, result)
        moved = [was.name for was, now in zip(before, self._tensors(written), strict=True) if not was.same(now)]
        for hidden in (*changed(places), *moved):
            form = form._replace(objection=f"changes {hidden} besides giving its result")
        if sizes_of(args, kwargs) != sizes:
            form = form._replace(objection="resizes an argument")
        self.forms.append(form)
        leaves: list[Any] = []
        flatten(result, leaves)
        self.values.append([x.detach().clone() if isinstance(x, torch.Tensor) and x.is_cpu else None for x in leaves])
        return result

    def _places(self) -> list[tuple[Holder, tuple[Any, ...]]]:
        return [(h, h.read()) for h in self.reach.holders if h.dial is None] if self.reach is not None else []

    def _tensors(self, written: Set[int]) -> list[_Seen]:
        """The tensors in reach, but for those that the operator says it writes."""
        reached = self.reach.tensors.values() if self.reach is not None else ()
        return [_Seen.of(name, t) for name, t in reached if not t.is_inference() and storage_id(t) not in written]


class _Noting(TorchDispatchMode):
    def __init__(self, notes: Notes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._notes = notes

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._notes.operators:
            return self._notes.call(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


@contextmanager
def noting(notes: Notes | None) -> Iterator[None]:
    """These operators are noted in the block."""
    try:
        with _Noting(notes) if notes is not None and notes.operators else nullcontext():
            yield
    finally:
        if notes is not None:
            notes.reach = None  # which holds all that it has found
