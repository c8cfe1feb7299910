"""What operators and marked functions give that run live between the segments of a recording (`devices/segments.py`).

A capture is a dry run, and does not call them; so it has to know what they give: a live call before, in which they are noted,
tells their `Form`.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch

from .._torch.autograd import bump, multithreaded
from .._torch.dynamic import Args, Kwargs, Leaves, Reading, Thing
from .._torch.modes import TorchDispatchMode, below_autograd, resolves_again, transformed, without_modes
from .._torch.operators import OpOverload, carried_out, is_higher_order, numbers_in_place_of_tensors
from .._torch.process_groups import stands_for_work
from .._torch.tensors import are_fake, has_memory, kind_of, say_themselves, storage_id
from ..aten.autocast import Casts
from ..aten.collectives import LEAVE_VERSIONS, called, communicates
from ..aten.operators import Meaning, meaning, operands, written_by
from ..aten.products import products_as_without_mode
from ..call.live_function import Marked
from ..guards.entries import relied
from ..guards.reachable import Reach
from ..guards.snapshot import changed
from ..guards.tensor_states import state_of
from ..python.holders import Holder
from ..python.identity import identity
from ..values.host_scalars import COMPARISONS, NUMBER_READERS, Site, site_of
from ..values.pytree import flatten
from ..values.pytree_nodes import Node
from ..values.tensor_subclasses import storages
from .arrivals import Arrived
from .live_arguments import Given, plain
from .whole_modules import Whole, in_place_of

__all__ = ["SHARES", "Form", "Meta", "Notes", "form_of", "noted_here", "noting", "sizes_of"]


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


SHARES = "returns tensors that share memory with each other, or with its arguments"


def form_of(operator: OpOverload | Marked, args: Args, kwargs: Kwargs, result: object) -> Form:
    """The form of a call that has just returned."""
    given: Leaves = []
    flatten((args, kwargs), given)
    leaves: Leaves = []
    shape = flatten(result, leaves)
    tensors = {identity(x): i for i, x in enumerate(given) if isinstance(x, torch.Tensor)}
    kinds = [_kind(x, tensors) for x in leaves]
    found = [kind for kind in kinds if isinstance(kind, str)]
    new = [_memory(x) for x, kind in zip(leaves, kinds, strict=True) if isinstance(kind, Meta) and x.numel()]
    if len({*new}) < len(new) or not {_memory(x) for x in given if isinstance(x, torch.Tensor)}.isdisjoint(new):
        found.append(SHARES)
    return Form(operator, shape, tuple(None if isinstance(k, str) else k for k in kinds), "; ".join(found))


def _kind(x: object, given: dict[int, int]) -> Meta | int | str | None:
    if x is None:
        return None
    if identity(x) in given:
        return given[identity(x)]
    if type(x) is not torch.Tensor or not has_memory(x):
        return f"returns a {type(x).__qualname__}" if not isinstance(x, torch.Tensor) else "returns a tensor of another kind"
    return Meta.of(x)


def sizes_of(args: Args, kwargs: Kwargs) -> list[torch.Size]:
    """The sizes of the tensors that an operator is given."""
    return [t.size() for t in operands(args, kwargs)]


def _nothing(*_: object) -> None:
    """There is nothing to wait for."""


def _memory(t: torch.Tensor) -> int:
    return t.untyped_storage().data_ptr() if has_memory(t) else 0


def _tensors_of(args: Args, kwargs: Kwargs) -> dict[int, torch.Tensor]:
    """Those among the arguments, by their places."""
    leaves: list[object] = []
    flatten((args, kwargs), leaves)
    return {i: x for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)}


def _gradient(t: torch.Tensor) -> tuple[int, int]:
    grad = t.grad if t.is_leaf else None
    return identity(grad), 0 if grad is None or grad.is_inference() else grad._version


class _Seen(NamedTuple):
    """A tensor in reach at one moment. It holds the gradient, whose identity another one could else have later."""

    name: str
    state: Reading
    version: int
    grad: torch.Tensor | None
    grad_version: int

    @classmethod
    def of(cls, name: str, t: torch.Tensor) -> _Seen:
        grad = t.grad if t.is_leaf else None
        return cls(name, state_of(t), t._version, grad, 0 if grad is None or grad.is_inference() else grad._version)

    def same(self, now: _Seen) -> bool:
        same = self.state == now.state and self.version == now.version
        return same and self.grad is now.grad and self.grad_version == now.grad_version


class Notes:
    """The forms of these operators in a live call, and of `marked` functions, and the values of their results on the CPU.
    `reach` is what the function can reach: what changes something of that, besides giving its result, cannot run between
    segments. `done` is what marked functions have done in this call already, and `arrived` what collectives have brought.
    Hyper-parameters may be set, which the next segment follows; but where that has gone wrong, `strict`. `wholes` are modules
    that run as marked functions do."""

    def __init__(self, operators: Set[OpOverload], reach: Reach | None, marked: bool = False, done: Iterable[Thing] = (),
                 strict: bool = False, decisive: Set[Site] = frozenset(), arrived: Iterable[Arrived] = (),
                 wholes: Set[Whole] = frozenset()) -> None:  # fmt: skip
        self._strict = strict
        self.wholes = wholes
        self.decisive = decisive
        self.numbers: dict[Site, Leaves] = {}
        self.operators = operators
        self.reach = reach
        self.marked = marked
        self.forms: list[Form] = []
        self.values: list[Leaves] = []
        self.keeps: list[Set[int]] = []  # the places of arguments that somebody has whom a marked function has given them
        self._given: list[weakref.ref[torch.Tensor]] = []  # to marked functions
        self.within = False  # a marked function runs, whose operators are its own
        self.turned: set[tuple[int, str]] = set()  # hyper-parameters that they have set, as `Holder.dial` has it
        self._done = deque(done)
        self.arrived = deque(arrived)
        self._works: list[object] = []  # which torch knows of, and does not keep

    @property
    def cuts(self) -> bool:
        """Whether there may be anything to note."""
        return bool(self.operators or self.decisive) or self.marked

    def call_marked(self, function: Marked, args: Args, kwargs: Kwargs) -> object:
        """The same for a marked function. It runs if it has not in this call."""
        places_of = _tensors_of(args, kwargs)
        tensors = [*places_of.values()]
        if torch.is_inference_mode_enabled() or transformed() or not all(map(plain, tensors)):
            self._note(Form(function, None, (), "is given tensors of another kind, of a transform, or of inference mode"), None)
            return self._run(function, args, kwargs)
        storages, grads = {*map(storage_id, tensors)}, [*map(_gradient, tensors)]
        places, before = self._places(), self._tensors(storages)
        dials = [(h, h.read()) for h in self.reach.holders if h.dial is not None] if self.reach is not None else []
        outside = [t for _, t in self.reach.tensors.values()] if self.reach is not None else []
        beside, own = {storage_id(t) for t in outside if has_memory(t)}, {*map(identity, outside)}
        earlier = self._given_before()
        versions = [t._version for t in earlier]
        done = self._done.popleft() if self._done and self._done[0].marked is function else None
        asked: list[torch.Tensor] = []
        hooks = [t.register_hook(asked.append) for t in tensors if t.requires_grad and not isinstance(t, torch.nn.Parameter)]
        values = {i: t.detach().clone() for i, t in places_of.items() if identity(t) not in own}
        given = Given(args, kwargs, values)
        box: list[object] = []
        try:
            box.append(self._run(function, args, kwargs) if done is None else done.again(args, kwargs))
        finally:
            changes, keeps = (given.changed(box), given.kept(box)) if box else ("", set())
            for hook in hooks:
                hook.remove()
        self.turned |= {h.dial for h, values in dials if h.dial is not None and changed([(h, values)])}
        form = form_of(function, args, kwargs, box[0])
        moved = [was.name for was, now in zip(before, self._tensors(storages), strict=True) if not was.same(now)]
        written = [given.tensors[i] for i in given.written()]
        objections = [form.objection, *(given.unlike(box) if done is None else ()), changes]
        objections += [f"changes {name} besides giving its result" for name in (*changed(places), *moved)[:1]]
        if asked:
            objections.append("differentiates what it is given")
        elif [*map(_gradient, tensors)] != grads:
            objections.append("changes a gradient of what it is given")
        if any(t.requires_grad and torch.is_grad_enabled() for t in written):
            objections.append("writes an argument that has a history")
        if any(storage_id(t) in beside and identity(t) not in own for t in written):
            objections.append("writes a view of a tensor outside")
        if versions != [t._version for t in earlier]:
            objections.append("writes what one was given before it")
        if len({*map(identity, tensors)}) < len(tensors) or len(storages) < len(tensors):
            objections.append("is given tensors that share memory")
        form = form._replace(objection="; ".join(filter(None, objections)), writes=given.written())
        self._note(form, box[0], keeps)
        self._given += map(weakref.ref, tensors)
        return box[0]

    def _run(self, function: Marked, args: Args, kwargs: Kwargs) -> object:
        self.within = True
        try:
            return function(*args, **kwargs)
        finally:
            self.within = False

    def _given_before(self) -> list[torch.Tensor]:
        """What marked functions were given in this call, and somebody still has."""
        return [t for ref in self._given if (t := ref()) is not None]

    def call(self, operator: OpOverload, args: Args, kwargs: Kwargs) -> object:
        if transformed():
            self._note(Form(operator, None, (), "is given tensors of a transform"), None)
            return operator(*args, **kwargs)
        odd = next((t for t in operands(args, kwargs) if not has_memory(t)), None)
        if odd is not None:
            self._note(Form(operator, None, (), f"is given {kind_of(odd)}"), None)
            return operator(*args, **kwargs)
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

    def arrive(self, func: OpOverload, m: Meaning, args: Args, kwargs: Kwargs) -> object:
        """What a collective has brought in this call already: it is not begun again."""
        name, values = self.arrived.popleft()
        if name != m.name:
            raise RuntimeError(f"phonograph: a call that begins again communicates otherwise than its replay did ({m.name}, "
                               f"not {name}). It goes on by something that phonograph does not see.")  # fmt: skip
        written = written_by(m, args, kwargs)
        given = operands(args, kwargs)
        with without_modes(), below_autograd():
            for t, value in zip(written, values, strict=False):
                t.data.copy_(value)
            made = [] if written else [value.to(given[0].device) for value in values]
        bump([t for t in written if m.name not in LEAVE_VERSIONS and not t.is_inference()])
        returns = [str(r.type) for r in func._schema.returns]
        if any("Work" in kind for kind in returns):
            self._works.append(work := stands_for_work(_nothing, _nothing))
            result = [work.boxed() if "Work" in kind else args[0] for kind in returns]
            return result[0] if len(result) == 1 else tuple(result)
        found = written or made
        return None if not returns else found if "List" in returns[0] else found[0]

    def number(self, site: Site, number: Thing) -> None:
        """This number is read at this site, or that in a tensor."""
        if site in self.decisive:
            self.numbers.setdefault(site, []).append(number.item() if isinstance(number, torch.Tensor) else number)

    def _note(self, form: Form, result: object, keeps: Set[int] = frozenset()) -> None:
        self.forms.append(form)
        self.keeps.append(keeps)
        leaves: list[object] = []
        flatten(result, leaves)
        self.values.append([x.detach().clone() if isinstance(x, torch.Tensor) and x.is_cpu else None for x in leaves])

    def _places(self) -> list[tuple[Holder, tuple[object, ...]]]:
        places = map(relied, self.reach.holders) if self.reach is not None else ()
        return [(h, h.read()) for h in places if self._strict or h.dial is None]

    def _tensors(self, written: Set[int]) -> list[_Seen]:
        """The tensors in reach, but for those that the operator says it writes."""
        reached = self.reach.all_tensors if self.reach is not None else ()
        return [_Seen.of(name, t) for name, t in reached if not t.is_inference() and written.isdisjoint(storages(t))]


class _Noting(TorchDispatchMode):
    def __init__(self, notes: Notes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._notes = notes
        self._casts = Casts()

    supports_higher_order_operators = True

    @classmethod
    @contextmanager
    def within(cls, notes: Notes) -> Iterator[None]:
        mode = cls(notes)
        with mode._casts.following(), products_as_without_mode(), mode:
            yield

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        resolves_again()
        if types and say_themselves(types) and not are_fake(types):  # other operators will come
            return NotImplemented
        if is_higher_order(func):
            with self:
                return carried_out(func, args, kwargs or {})
        if self._notes.arrived and not self._notes.within and communicates(func._schema.name):
            m = meaning(func)
            if called(m.name) != "wait_tensor":
                return self._notes.arrive(func, m, args, kwargs or {})
        m, kwargs = meaning(func), kwargs or {}
        if numbers := numbers_in_place_of_tensors(func, args):
            args = tuple([_scalar(x) if i in numbers else x for i, x in enumerate(args)])
        with self._casts.as_called(m, self._casts.within(m)):
            if func in self._notes.operators and not self._notes.within:
                return self._notes.call(func, args, kwargs)
            if func in NUMBER_READERS and self._notes.decisive and not self._notes.within:
                self._notes.number(site_of(sys._getframe(1)), args[0])
            result = func(*args, **kwargs)
            if m.name in COMPARISONS and self._notes.decisive and not self._notes.within:
                self._notes.number(site_of(sys._getframe(1)), result)
        return result


def _scalar(number: Thing) -> torch.Tensor:
    """The tensor that torch makes of a number."""
    dtype = {float: torch.float64, complex: torch.complex128}.get(type(number))
    return torch.scalar_tensor(number, dtype=dtype or (torch.bool if type(number) is bool else torch.int64))


_thread = threading.local()


def noted_here() -> Notes | None:
    """The notes of the live call that runs in this thread, if marked functions are to be noted."""
    notes: Notes | None = getattr(_thread, "notes", None)
    return None if notes is None or not notes.marked or notes.within else notes


def one_thread() -> torch.autograd.set_multithreading_enabled:
    """A context in which a backward runs on the thread that asks for it: what is to be noted there, or cut, comes in one order,
    and a capture ends on the thread on which it has begun."""
    return torch.autograd.set_multithreading_enabled(False)


def threads_as_now() -> torch.autograd.set_multithreading_enabled:
    """A context after which that is as it is now."""
    return torch.autograd.set_multithreading_enabled(multithreaded())


@contextmanager
def noting(notes: Notes | None) -> Iterator[None]:
    """These operators are noted in the block, and marked functions."""
    outer, _thread.notes = getattr(_thread, "notes", None), notes
    cuts = notes is not None and notes.cuts
    looks = notes is not None and (notes.operators or notes.decisive or notes.arrived)
    try:
        with (
            one_thread() if cuts else nullcontext(),
            _Noting.within(notes) if notes is not None and looks else nullcontext(),
            nullcontext() if notes is None else in_place_of(notes.wholes, notes.call_marked, lambda: not notes.within),
        ):
            yield
    finally:
        _thread.notes = outer
        if notes is not None:
            notes.reach = None  # which holds all that it has found
