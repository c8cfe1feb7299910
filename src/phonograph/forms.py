"""What operators and marked functions give that run live between the segments of a recording (`segments.py`).

A capture is a dry run, and does not call them; so it has to know what they give: a live call before, in which they are noted,
tells their `Form`.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from .identity import identity
from .marked import Given, Marked, owners
from .operators import meaning, operands, written_by
from .places import Holder
from .reach import Reach
from .reliance import changed, relied
from .trees import Node, flatten
from .watch import storage_id

__all__ = ["Form", "Meta", "Notes", "alone", "form_of", "noted_here", "noting", "sizes_of"]


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
    arguments, or None. `writes` are the places of arguments that a marked function has written. `objection` says why it cannot
    run between segments.
    """

    operator: OpOverload | Marked
    shape: Node | None
    results: tuple[Meta | int | None, ...]
    objection: str = ""
    writes: tuple[int, ...] = ()


def form_of(operator: OpOverload | Marked, args: Any, kwargs: Any, result: Any) -> Form:
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


def alone(form: Form, box: list[Any], given: Set[int]) -> Form:
    """The form of a marked function's call whose result is in this list, and nowhere else. What it has returned must be nobody
    else's (but the tensors it was `given`, by identity), and have no history: the next segment goes on with a copy."""
    leaves: list[Any] = []
    flatten(box, leaves)
    new = [x for x in leaves if isinstance(x, torch.Tensor) and x.layout is torch.strided and identity(x) not in given]
    objections = [form.objection] if form.objection else []
    if any(t.requires_grad for t in new):
        objections.append("returns a tensor with a history")
    del leaves
    if not all(owners(new, i) == _ALONE for i in range(len(new))):
        objections.append("returns a tensor that it keeps, or that is somebody else's (return a clone)")
    return form._replace(objection="; ".join(objections))


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


_kept = [torch.empty(1)]
_ALONE = owners([*_kept], 0)  # of a tensor that two containers have: the result, and the list of its leaves


def _gradient(t: torch.Tensor) -> tuple[int, int]:
    grad = t.grad if t.is_leaf else None
    return identity(grad), 0 if grad is None or grad.is_inference() else grad._version


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
    """The forms of these operators in a live call, and of `marked` functions, and the values of their results on the CPU.
    `reach` is what the function can reach: what changes something of that, besides giving its result, cannot run between
    segments. `done` is what marked functions have done in this call already."""

    def __init__(self, operators: Set[OpOverload], reach: Reach | None, marked: bool = False, done: Iterable[Any] = ()) -> None:
        self.operators = operators
        self.reach = reach
        self.marked = marked
        self.forms: list[Form] = []
        self.values: list[list[Any]] = []
        self.keeps: list[Set[int]] = []  # the places of arguments that somebody has whom a marked function has given them
        self._given: list[weakref.ref[torch.Tensor]] = []  # to marked functions
        self.within = False  # a marked function runs, whose operators are its own
        self._done = deque(done)

    @property
    def cuts(self) -> bool:
        """Whether there may be anything to note."""
        return bool(self.operators) or self.marked

    def call_marked(self, function: Marked, args: Any, kwargs: Any) -> Any:
        """The same for a marked function. It runs if it has not in this call."""
        leaves: list[Any] = []
        flatten((args, kwargs), leaves)
        tensors = {i: x for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)}
        storages = {storage_id(t) for t in tensors.values() if t.layout is torch.strided}
        heard = {i: t for i, t in tensors.items() if not t.is_inference() and t.layout is torch.strided}
        given, grads = Given([*heard.values()]), [*map(_gradient, heard.values())]
        places, before, earlier = self._places(), self._tensors(storages), Given(self._given_before())
        done = self._done.popleft() if self._done and self._done[0].marked is function else None
        asked: list[torch.Tensor] = []
        others = [t for t in given.tensors if t.requires_grad and not isinstance(t, torch.nn.Parameter)]
        hooks = [t.register_hook(asked.append) for t in others]
        del others
        self.within = True
        try:
            box = [function(*args, **kwargs) if done is None else done.again(args, kwargs)]
        finally:
            self.within = False
            for hook in hooks:
                hook.remove()
        form = form_of(function, args, kwargs, box[0])
        if done is None:
            form = alone(form, box, {*map(identity, tensors.values())})
        moved = [was.name for was, now in zip(before, self._tensors(storages), strict=True) if not was.same(now)]
        written = given.written()
        objections = [form.objection, *(f"changes {name} besides giving its result" for name in (*changed(places), *moved)[:1])]
        if asked or [*map(_gradient, heard.values())] != grads:
            objections.append("differentiates what it is given")
        if len(heard) < len(tensors):
            objections.append("is given tensors of inference mode, where nobody hears what it writes (use no_grad)")
        if any(w and t.requires_grad and torch.is_grad_enabled() for w, t in zip(written, given.tensors, strict=True)):
            objections.append("writes an argument that has a history")
        if given.resized():
            objections.append("resizes an argument")
        if any(earlier.written()):
            objections.append("writes what one was given before it")
        if len({*map(identity, tensors.values())}) < len(tensors) or len(storages) < len(tensors):
            objections.append("is given tensors that share memory")
        writes = tuple(i for i, w in zip(heard, written, strict=True) if w)
        keeps = {i for i, k in zip(heard, given.kept(box), strict=True) if k}
        self._note(form._replace(objection="; ".join(filter(None, objections)), writes=writes), box[0], keeps)
        self._given += [weakref.ref(t) for t in given.tensors]
        return box[0]

    def _given_before(self) -> list[torch.Tensor]:
        """What marked functions were given in this call, and somebody still has."""
        return [t for ref in self._given if (t := ref()) is not None]

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
        self._note(form, result)
        return result

    def _note(self, form: Form, result: Any, keeps: Set[int] = frozenset()) -> None:
        self.forms.append(form)
        self.keeps.append(keeps)
        leaves: list[Any] = []
        flatten(result, leaves)
        self.values.append([x.detach().clone() if isinstance(x, torch.Tensor) and x.is_cpu else None for x in leaves])

    def _places(self) -> list[tuple[Holder, tuple[Any, ...]]]:
        places = map(relied, self.reach.holders) if self.reach is not None else ()
        return [(h, h.read()) for h in places if h.dial is None]

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
        if func in self._notes.operators and not self._notes.within:
            return self._notes.call(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


_thread = threading.local()


def noted_here() -> Notes | None:
    """The notes of the live call that runs in this thread, if marked functions are to be noted."""
    notes: Notes | None = getattr(_thread, "notes", None)
    return None if notes is None or not notes.marked or notes.within else notes


@contextmanager
def noting(notes: Notes | None) -> Iterator[None]:
    """These operators are noted in the block, and marked functions."""
    outer, _thread.notes = getattr(_thread, "notes", None), notes
    try:
        with _Noting(notes) if notes is not None and notes.operators else nullcontext():
            yield
    finally:
        _thread.notes = outer
        if notes is not None:
            notes.reach = None  # which holds all that it has found
