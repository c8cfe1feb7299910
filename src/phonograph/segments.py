"""A recording in segments: programs with operators between them that run live, because they need the host.

Such an operator reads and writes the memory of the recording itself; what is new of its result is copied to where the next
segment reads it. That segment was captured as the program goes on after *such* a result. Where the operator gives one of
another shape, the call cannot go on: it has `Diverged`. Then everything that was written outside is put back as it was, random
states too, and the call is run live from its beginning. Arguments for which slots stand were not touched; those that are read
in place (parameters, results of other recordings) are put back with the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from . import operators
from .errors import Refusal
from .forms import Form, Meta, Notes, form_of, sizes_of
from .identity import identity
from .keys import NoSignature, plain_key
from .pool import once
from .reach import Reach
from .recording import Tensors
from .reliance import changed
from .signature import modes
from .spans import Spans
from .torch_private import backward_id, below_autograd
from .trees import Node, flatten, unflatten
from .watch import OperatorWatch, storage_id
from .where import users_line
from .within import Within

__all__ = ["Break", "Cuts", "Diverged", "Segments", "Unseen"]

_UNDONE = 64 << 20  # bytes outside that may be written up to the last live operator, and that each replay notes before


class Unseen(Refusal):
    """Something has to run for the first time (nothing is known yet of what an operator gives there): the call has to be a live
    one."""


class Diverged(Refusal):
    """A replay could not go on after a live operator. Everything is as before the call."""


class Break:
    """A live operator, between two segments."""

    def __init__(self, form: Form, shape: Node | None, leaves: list[Any], where: str) -> None:
        self.form = form
        self.where = where
        self._grad_mode = torch.is_grad_enabled()
        self._shape, self._leaves = shape, leaves  # its arguments
        self._places = [i for i, x in enumerate(leaves) if x is _HERE]
        self._inputs: list[torch.Tensor] = []
        self._outputs: list[torch.Tensor] = []

    def __str__(self) -> str:
        return f"{self.form.operator.name()} at {self.where}"

    def lies(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Where the device has put what it reads and what it gives: tensors that do not own their memory."""
        self._inputs, self._outputs = inputs, outputs

    def run(self) -> bool:
        """Call the operator, and put what it gives where the next segment reads it. Returns whether it gives that still."""
        leaves = [*self._leaves]
        for i, t in zip(self._places, self._inputs, strict=True):
            leaves[i] = t
        args, kwargs = unflatten(self._shape, iter(leaves))
        sizes = sizes_of(args, kwargs)
        with Within(waits=True), below_autograd(), torch.set_grad_enabled(self._grad_mode):
            result = self.form.operator(*args, **kwargs)
            if form_of(self.form.operator, args, kwargs, result) != self.form or sizes_of(args, kwargs) != sizes:
                return False
            found: list[Any] = []
            flatten(result, found)
            new = [x for x, kind in zip(found, self.form.results, strict=True) if isinstance(kind, Meta)]
            for place, t in zip(self._outputs, new, strict=True):
                once(place).copy_(once(t))
        return True


_HERE = object()


class Segments:
    """A `Program` of several, with live operators between."""

    def __init__(
        self, programs: Sequence[Any], breaks: list[Break], written: list[torch.UntypedStorage], generators: Sequence[Any],
        operators: int,
    ) -> None:  # fmt: skip
        self.programs = programs
        self.breaks = breaks
        self.footprint: Spans = programs[0].footprint
        self.owned = Spans()
        self.operators: int = operators
        mixed = [p.mixed for p in programs if p.mixed is not None]
        self.mixed: Callable[[], bool] | None = (lambda: any(m() for m in mixed)) if mixed else None
        self.outs: tuple[torch.Tensor, ...] = ()
        self.disturbing: Callable[[], Callable[[], bool]] = lambda: lambda: False  # see `Reliances`
        with torch.inference_mode(False), torch.no_grad():
            self._written = [torch.empty(0, dtype=torch.uint8, device=w.device).set_(w) for w in written]
        self._generators = generators

    def copies(self, outs: tuple[torch.Tensor, ...]) -> None:
        self.outs = outs
        self.programs[-1].copies(outs)

    def run(self, sources: Tensors) -> list[torch.Tensor]:
        with torch.no_grad():
            before = [t.clone() for t in self._written]
        states = [g.get_state() for g in self._generators]
        disturbed = self.disturbing()
        targets: list[torch.Tensor] = self.programs[0].run(sources)
        for live, program in zip(self.breaks, self.programs[1:], strict=True):
            same_form = live.run()
            if not same_form or disturbed():
                self._undo(before, states)
                did = "changes what the function relies on" if same_form else "gives a result of another shape than before"
                raise Diverged(f"{live.form.operator.name()} {did}", "use an operator whose output has a fixed shape",
                               live.where, this_call=True)  # fmt: skip
            targets = program.run(())
        return targets

    def _undo(self, before: list[torch.Tensor], states: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for t, value in zip(self._written, before, strict=True):
                t.copy_(value)
        for g, state in zip(self._generators, states, strict=True):
            g.set_state(state)

    def set_numbers(self, numbers: Mapping[float, float]) -> bool:
        found = [p.set_numbers(numbers) for p in self.programs]
        return not numbers or any(found)

    def close(self) -> None:
        for p in self.programs:
            p.close()
        self.breaks = []
        self._written = []


class Cuts:
    """The live operators of a call that is captured, which ends a segment at each."""

    def __init__(self, notes: Notes | None, reach: Reach, watch: OperatorWatch, outer: set[int], apart: str) -> None:
        self._notes = notes
        self._reach = reach
        self._watch = watch
        self._apart = apart  # why there may be no cut at all
        self._modes = modes()
        self._held = [(h, h.read()) for h in reach.holders if h.dial is None] if notes is not None and notes.operators else []
        self._outer = outer
        self._before = 0

    def __enter__(self) -> None:
        if self._notes is not None:
            self._watch.split, self._watch.cutting = self._notes.operators, self.cut

    def __exit__(self, *_: object) -> None:
        self._watch.split, self._watch.cutting = frozenset(), None  # or it would keep itself, with all that it has noted

    def cut(self, operator: OpOverload, args: Any, kwargs: Any) -> Any:
        """End a segment, because this operator is called. Returns what stands for its result."""
        runs, watch = f"runs {operator.name()} live", self._watch
        form, values = self._form(operator, runs)
        leaves: list[Any] = []
        shape = flatten((args, kwargs), leaves)
        for x in leaves:
            self._passable(x, runs)
        self._watch.dials_lost(leaves)
        mine = [x for x in leaves if isinstance(x, torch.Tensor) and x.device == watch.device]
        m = operators.meaning(operator)
        if m.metadata_only or (m.writes_named and m.shape_from_data):
            raise Refusal(f"{runs}, which may resize a tensor that it is given", "let it make a new one")
        watch.drew = watch.drew or m.random or not m.compiled
        for t in operators.written_by(m, args, kwargs):
            watch.writes(t)
        self._check(runs)
        if any(isinstance(m, Meta) and m.device != watch.device for m in form.results):
            raise Refusal(f"{runs}, which gives a tensor elsewhere than on {watch.device}", "pass it as an argument")
        if any(isinstance(m, Meta) and m.inference is not torch.is_inference_mode_enabled() for m in form.results):
            raise Refusal(f"{runs}, which gives tensors of another inference mode", "leave the mode as it is")
        given = [_HERE if isinstance(x, torch.Tensor) and x.device == watch.device else x for x in leaves]
        part = Break(form, shape, given, users_line())
        new = [(m, v) for m, v in zip(form.results, values, strict=True) if isinstance(m, Meta)]
        made = iter(watch.interrupt(part, str(part), mine, [m for m, _ in new], [v for _, v in new]))
        found = [next(made) if isinstance(m, Meta) else None if m is None else leaves[m] for m in form.results]
        return unflatten(form.shape, iter(found))

    def _check(self, runs: str) -> None:
        """Whether the call may be cut here."""
        watch = self._watch
        if backward_id() != -1:
            raise Refusal(f"{runs} in a backward", "call it outside of that")
        if self._apart:
            raise Refusal(f"{runs}, {self._apart}", "call it outside the recorded function")
        if self._reach.mentions.catches:
            raise Refusal(f"{runs}, and has an except clause", "let the exception out, and catch it around the call")
        for place in changed(self._held):
            raise Refusal(f"{runs} while {place} is changed for a time", "change it outside, around the call")
        now, then = modes(), self._modes
        if now[1:] != then[1:] or now[0][1:] != then[0][1:]:
            raise Refusal(f"{runs} where a mode is another than outside (autocast, inference_mode)", "call it outside of that")
        if sum(s.nbytes() for s in watch.changed()) > _UNDONE:
            raise Refusal(f"{runs}, after much of its state was written", "call it before, or outside")

    def _form(self, operator: OpOverload, runs: str) -> tuple[Form, list[Any]]:
        i, self._before = self._before, self._before + 1
        if self._notes is None or i >= len(self._notes.forms) or self._notes.forms[i].operator is not operator:
            raise Unseen(f"{runs}, which was not seen to run there", "", final=False)
        form = self._notes.forms[i]
        if form.objection:
            raise Refusal(f"{runs}, which {form.objection}", 'use torch.compile(..., backend="phonograph")')
        return form, self._notes.values[i]

    def _passable(self, x: Any, runs: str) -> None:
        """Whether each replay can give this to the operator."""
        if isinstance(x, torch.Tensor):
            plain = type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout is torch.strided
            ours = x.device == self._watch.device and not (x.is_conj() or x.is_neg())
            number = x.is_cpu and x.dim() == 0 and not self._watch.known.get(storage_id(x))  # written in code of the call
            if not (plain and (ours or number)):
                raise Refusal(f"{runs} with a tensor on {x.device}, or of another kind", "pass plain tensors of the device")
        elif identity(x) not in self._outer and not _constant(x):
            raise Refusal(f"{runs} with an object that the call made ({type(x).__qualname__})", "pass tensors and numbers")


def _constant(x: Any) -> bool:
    try:
        plain_key(x)
    except NoSignature:
        return False
    return not (isinstance(x, (set, torch.nn.Module, torch.optim.Optimizer, torch.Generator, type)) or callable(x))
