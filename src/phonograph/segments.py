"""A recording in segments: programs with live parts between them.

A live part gets copies of the tensors that it is given, which it may keep, and what it writes into them is written back; what
it returns is copied to where the next segment reads it. So it neither sees the memory of the recording nor stands in its way.

The next segment was captured as the program goes on after *such* a result. Where the live part gives something else, or changes
what the recording relies on, the call cannot go on: it has `Diverged`. Then everything that the segments have written outside
is put back as it was, random states too, and the call is run live from its beginning, where the live parts that have run are
not run again: their answers are there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from .errors import Refusal
from .keys import NoSignature, plain_key
from .live import Answer, Form, Meta, Notes, Written, capturing, form_of, noting, version
from .pool import once
from .reach import Reach
from .recording import Tensors
from .reliance import Grads
from .signature import modes
from .spans import Spans
from .torch_private import backward_id, below_autograd
from .trees import Node, flatten, unflatten
from .watch import OperatorWatch, storage_id
from .where import users_line
from .within import Within

__all__ = ["Break", "Cuts", "Diverged", "Segments", "Unseen"]

_UNDONE = 64 << 20  # bytes that segments before a live part may write outside, and that each replay notes before


class Unseen(Refusal):
    """Nothing is known yet of what a live function gives there: the call has to be a live one."""


class Diverged(Refusal):
    """A replay could not go on after a live part. Everything is as before the call, but for what the live parts did."""

    answers: tuple[Answer, ...] = ()


class View(NamedTuple):
    """An argument of the recorded function, or a view of it, as a live part is given it."""

    slot: int
    offset: int
    size: Any
    stride: Any
    whole: bool

    def of(self, tensors: Tensors) -> torch.Tensor:
        t = tensors[self.slot]
        return t if self.whole else t.detach().as_strided(self.size, self.stride, int(t.storage_offset()) + self.offset)


class Break:
    """A live part, between two segments."""

    def __init__(self, form: Form, shape: Node | None, leaves: list[Any], like: Any, name: str, where: str) -> None:
        self.form = form
        self.name = name
        self.where = where
        self.views: dict[int, View] = {}  # by their places among its arguments
        self.parameters: list[torch.Tensor] = []
        self.cleared: list[torch.Tensor] = []  # those whose gradients the call has dropped before
        self._shape, self._leaves, self._like = shape, leaves, like  # its arguments, None where tensors of the call go
        self._grad = torch.is_grad_enabled()
        self._made: list[int] = []  # the places of tensors that the segments before have made
        self._needs: list[bool] = []
        self._inputs: list[torch.Tensor] = []
        self._outputs: list[torch.Tensor] = []
        self._found: tuple[Any, list[Any]] = ((), [])  # modes and gradients before it ran

    def __str__(self) -> str:
        return f"{self.name} at {self.where}"

    @property
    def writes(self) -> set[int]:
        """The arguments of the recorded function that it writes."""
        return {self.views[i].slot for i in self.form.written if i in self.views}

    def reads(self, places: list[int], tensors: list[torch.Tensor]) -> None:
        """It is given these, which segments before have made."""
        self._made = places
        self._needs = [t.requires_grad and not isinstance(self.form.function, OpOverload) for t in tensors]

    def lies(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Where the device has put what it reads and what it gives: tensors that do not own their memory."""
        self._inputs, self._outputs = inputs, outputs

    def run(self, sources: Tensors) -> tuple[Form, Any, tuple[tuple[int, torch.Tensor], ...]]:
        """Call the function: the form of what it gave, its result, and what it has written into its arguments."""
        leaves = [*self._leaves]
        for i, t, needs in zip(self._made, _copied(self._inputs), self._needs, strict=True):
            leaves[i] = t.requires_grad_() if needs else t
        for i, view in self.views.items():
            leaves[i] = view.of(sources)
        args, kwargs = unflatten(self._shape, iter(leaves), self._like)
        for p in self.cleared:
            p.grad = None
        self._found = modes(), [p.grad for p in self.parameters]
        before = Written((args, kwargs))
        below = below_autograd() if isinstance(self.form.function, OpOverload) else nullcontext()
        with torch.set_grad_enabled(self._grad), Within(waits=True), noting(None), below:
            result = self.form.function(*args, **kwargs)
        form = form_of(self.form.function, before, result)
        return form, result, tuple((i, before.leaves[i]) for i in form.written)

    def changed(self) -> str | None:
        """What else it has done that the next segment was not captured with."""
        (settings, gradients), self._found = self._found, ((), [])
        if modes() != settings:
            return "a mode or setting of the process"
        replaced = any(p.grad is not g for p, g in zip(self.parameters, gradients, strict=True))
        return "a .grad attribute" if replaced else None

    def leave(self, result: Any, written: tuple[tuple[int, torch.Tensor], ...]) -> None:
        """Put what it gave where the next segment reads it."""
        leaves: list[Any] = []
        flatten(result, leaves)
        new = [x for x, kind in zip(leaves, self.form.results, strict=True) if isinstance(kind, Meta)]
        at = dict(zip(self._made, self._inputs, strict=True))
        with torch.no_grad():
            for place, t in [*zip(self._outputs, new, strict=True), *[(at[i], t) for i, t in written if i in at]]:
                place.copy_(t)


def _copied(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same in memory of their own, which tensors that share memory go on sharing."""
    with torch.no_grad():
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        copies = {at: s.clone() for at, s in storages.items()}
        return [
            torch.empty(0, dtype=t.dtype, device=t.device).set_(
                copies[t.untyped_storage().data_ptr()], t.storage_offset(), t.size(), t.stride())
            for t in tensors
        ]  # fmt: skip


class Segments:
    """A `Program` of several, with live parts between."""

    def __init__(
        self, programs: Sequence[Any], breaks: list[Break], slots: list[torch.Tensor], written: list[torch.UntypedStorage],
        generators: Sequence[Any], operators: int,
    ) -> None:  # fmt: skip
        self.programs = programs
        self.breaks = breaks
        self.footprint: Spans = programs[0].footprint
        self.owned = Spans()
        self.operators: int = operators
        mixed = [p.mixed for p in programs if p.mixed is not None]
        self.mixed: Callable[[], bool] | None = (lambda: any(m() for m in mixed)) if mixed else None
        self.outs: tuple[torch.Tensor, ...] = ()
        self.broken: Callable[[], str | None] = lambda: None
        """What the recording relies on and no longer holds, in the middle of a call."""
        with torch.inference_mode(False), torch.no_grad():
            self._written = [torch.empty(0, dtype=torch.uint8, device=w.device).set_(w) for w in written]
        self._generators = generators
        self._slots = slots
        self.stopped = False
        """Whether the last run has ended with an exception in a live part."""

    def copies(self, outs: tuple[torch.Tensor, ...]) -> None:
        self.outs = outs
        self.programs[-1].copies(outs)

    def run(self, sources: Tensors) -> list[torch.Tensor]:
        undo = _Kept(self._written, self._generators, [p for live in self.breaks for p in live.cleared])
        answers: list[Answer] = []
        self.stopped = False
        targets: list[torch.Tensor] = self.programs[0].run(sources)
        for live, program in zip(self.breaks, self.programs[1:], strict=True):
            versions = [*map(version, sources)]
            self.stopped = True
            try:
                form, result, written = live.run(sources)
            except BaseException:
                undo.forget()  # the exception keeps these frames, and must not keep gradients
                live.changed()
                raise
            self.stopped = False
            left = _Kept(self._written, self._generators, live.parameters)
            answers.append(Answer(form.function, result, written, left.put_back))
            other = _difference(live.form, form) or live.changed() or self.broken() or self._refresh(live, sources, versions)
            if other is not None:
                undo.put_back()
                diverged = Diverged(f"a live part, {live.name}, changed {other}", "pass it on as a tensor that it returns",
                                    live.where, this_call=True)  # fmt: skip
                diverged.answers = tuple(answers)
                raise diverged
            live.leave(result, written)
            targets = program.run(())
        return targets

    def _refresh(self, live: Break, sources: Tensors, versions: list[int]) -> str | None:
        """Copy to their slots the arguments that the live part has written; one that it should not have is an obstacle."""
        written = {i for i, (t, v) in enumerate(zip(sources, versions, strict=True)) if version(t) != v}
        if not written <= live.writes:
            return "an argument of the recorded function"
        with torch.no_grad():
            for i in live.writes:
                once(self._slots[i]).copy_(once(sources[i]))
        return None

    def set_numbers(self, numbers: Mapping[float, float]) -> bool:
        found = [p.set_numbers(numbers) for p in self.programs]
        return not numbers or any(found)

    def close(self) -> None:
        for p in self.programs:
            p.close()
        self.breaks = []
        self._written = []


def _difference(then: Form, now: Form) -> str | None:
    if now == then:
        return None
    if now.objection:
        return f"what it does ({now.objection})"
    return "the kind of its results" if now.written == then.written else "which of its arguments it writes"


class _Kept:
    """Tensors, random states and gradients, as they are."""

    def __init__(self, tensors: list[torch.Tensor], generators: Sequence[Any], parameters: Sequence[torch.Tensor] = ()) -> None:
        with torch.no_grad():
            self._values = [(t, t.clone()) for t in tensors]
        self._states = [(g, g.get_state()) for g in generators]
        self._gradients = [(p, p.grad) for p in parameters]

    def put_back(self) -> None:
        with torch.no_grad():
            for t, value in self._values:
                t.copy_(value)
        for g, state in self._states:
            g.set_state(state)
        for p, grad in self._gradients:
            p.grad = grad

    def forget(self) -> None:
        self._values, self._states, self._gradients = [], [], []


class Cuts:
    """The live parts of a call that is captured, which ends a segment at each."""

    def __init__(
        self, notes: Notes | None, slots: list[torch.Tensor], reach: Reach, watch: OperatorWatch, mine: Callable[[], bool],
        outer: set[int], apart: str, grads: Grads,
    ) -> None:  # fmt: skip
        self._notes = notes
        self._slots = slots  # those that are filled
        self._reach = reach
        self._watch = watch
        self._mine = mine
        self._apart = apart  # why there may be no cut at all
        self._modes = modes()
        self._grads = grads
        self._had = grads.read()
        self._outer = outer
        self._before = 0

    def __enter__(self) -> None:
        capturing.append(self)

    def __exit__(self, *_: object) -> None:
        capturing.remove(self)

    def concerns(self) -> bool:
        """Whether the calling thread is part of the capture."""
        return self._mine()

    def cut(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        name, where = getattr(function, "__qualname__", str(function)), users_line()
        try:
            return self._cut(function, args, kwargs, name, where)
        except Refusal as refusal:
            refusal.where = refusal.where or where
            self._watch.refusal = self._watch.refusal or refusal  # also if the user's code catches it
            raise

    def _cut(self, function: Callable[..., Any], args: Any, kwargs: Any, name: str, where: str) -> Any:
        calls = f"runs {name} live" if isinstance(function, OpOverload) else f"calls {name}, which is marked @pg.live"
        self._check(calls)
        form, values = self._form(function, calls)
        leaves: list[Any] = []
        shape = flatten((args, kwargs), leaves)
        for x in leaves:
            self._passable(x, calls, isinstance(function, OpOverload))
        ours = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.device == self._watch.device]
        ours = [i for i in ours if not self._is_outside(leaves[i])]
        views = {i: view for i in ours if (view := self._view(leaves[i])) is not None}
        places = [i for i in ours if i not in views]
        if any(isinstance(m, Meta) and m.inference is not torch.is_inference_mode_enabled() for m in form.results):
            raise Refusal(f"{calls}, and returns tensors of another inference mode", "leave the mode as it is")
        like = unflatten(shape, iter([None] * len(leaves)), (args, kwargs))
        part = Break(form, shape, [None if i in ours else x for i, x in enumerate(leaves)], like, name, where)
        part.views = views
        part.reads(places, tensors := [leaves[i] for i in places])
        part.parameters, part.cleared = self._grads.parameters, self._cleared()
        new = [(m, v) for m, v in zip(form.results, values, strict=True) if isinstance(m, Meta)]
        made = iter(self._watch.interrupt(part, tensors, [m for m, _ in new], [v for _, v in new]))
        found = [next(made) if isinstance(m, Meta) else None if m is None else leaves[m] for m in form.results]
        for i in form.written:
            if i in ours:
                self._watch.writes(leaves[i])
        if not isinstance(function, OpOverload):
            self._watch.stands_in.update(storage_id(t) for t in [*tensors, *found] if isinstance(t, torch.Tensor))
        return unflatten(form.shape, iter(found))

    def _check(self, calls: str) -> None:
        """Whether the call may be cut here."""
        watch = self._watch
        if backward_id() != -1:
            raise Refusal(f"{calls} in a backward", "call it outside of that")
        if self._apart:
            raise Refusal(f"{calls}, {self._apart}", "call it outside the recorded function")
        if self._reach.mentions.catches:
            raise Refusal(f"{calls}, and has an except clause", "let the exception out, and catch it around the call")
        now, then = modes(), self._modes
        if now[1:] != then[1:] or now[0][1:] != then[0][1:]:
            raise Refusal(f"{calls} where a mode is another than outside (autocast, inference_mode)", "call it outside of that")
        if any(g is not None and g is not had for g, had in zip(self._grads.read(), self._had, strict=True)):
            raise Refusal(f"{calls} after a backward, when gradients are not in their place yet", "call it before, or outside")
        if watch.written.keys() & watch.slot_ids:
            raise Refusal(f"{calls}, after an argument was written", "write a clone of the argument")
        if sum(t.nbytes for key, t in watch.written.items() if key in watch.outside) > _UNDONE:
            raise Refusal(f"{calls}, after much of its state was written", "call it before, or outside")

    def _form(self, function: Callable[..., Any], calls: str) -> tuple[Form, list[Any]]:
        i, self._before = self._before, self._before + 1
        if self._notes is None or i >= len(self._notes.forms) or self._notes.forms[i].function is not function:
            raise Unseen(f"{calls} and was not seen to run there", "call the same live functions each time", final=False)
        form = self._notes.forms[i]
        if form.objection:
            raise Refusal(f"{calls} and {form.objection}",
                          'let it return new tensors or None, or use torch.compile(..., backend="phonograph")')  # fmt: skip
        return form, self._notes.values[i]

    def _cleared(self) -> list[torch.Tensor]:
        """The parameters whose gradients the call has dropped."""
        now = zip(self._grads.parameters, self._grads.read(), self._had, strict=True)
        return [p for p, grad, had in now if grad is not had]

    def _view(self, t: torch.Tensor) -> View | None:
        """For an argument of the recorded function, or a view of one."""
        for i, slot in enumerate(self._slots):
            if storage_id(t) == storage_id(slot):
                if t.dtype is not slot.dtype:
                    raise Refusal("passes an argument to a live part as another dtype", "pass a clone of it")
                return View(i, int(t.storage_offset()) - int(slot.storage_offset()), t.size(), t.stride(), t is slot)
        return None

    def _is_outside(self, t: torch.Tensor) -> bool:
        """Whether it is the very tensor that can be found outside, and was before."""
        return id(t) in self._reach.tensors and self._reach.tensors[id(t)][1] is t

    def _is_number(self, t: torch.Tensor, operator: bool) -> bool:
        """Whether this is a number that code of the call has written as a tensor on the host, for an operator that writes it
        nowhere."""
        return operator and t.is_cpu and t.dim() == 0 and not self._watch.known.get(storage_id(t))

    def _passable(self, x: Any, calls: str, operator: bool) -> None:
        """Whether each replay can give this to the function."""
        if isinstance(x, torch.Tensor):
            plain = type(x) is torch.Tensor and x.layout is torch.strided and not (x.is_conj() or x.is_neg())
            if self._is_outside(x) or (plain and x.device == self._watch.device) or self._is_number(x, operator):
                return
            raise Refusal(f"{calls} with a tensor on {x.device}, or of another kind", "pass plain tensors of the device")
        if id(x) not in self._outer and not _constant(x):
            raise Refusal(f"{calls} with an object that the call made ({type(x).__qualname__})", "pass tensors and numbers")


def _constant(x: Any) -> bool:
    try:
        plain_key(x)
    except NoSignature:
        return False
    return not isinstance(x, (set, torch.nn.Module, torch.optim.Optimizer, torch.Generator)) and not _made_here(x)


def _made_here(x: Any) -> bool:
    """Whether this is a function or class that the call may have made."""
    return isinstance(x, type) or callable(x)
