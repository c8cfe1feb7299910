"""Cutting a call that is captured into segments, at what has to run live: operators that need the host, functions that are
marked `@pg.live`, and numbers by which the call goes on.

Nothing runs there during the capture. What stands for a result is like the one that the live call before has given, of which it
has kept notes.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ClassVar

import torch
from torch.utils.checkpoint import checkpoint

from .._torch.autograd import bump
from .._torch.dynamic import Args, Kwargs, Leaves, Reading
from .._torch.operators import OpOverload
from .._torch.tensors import has_memory, storage_id
from ..aten import operators
from ..autograd.saved_hooks import Tracing
from ..call.live_function import Marked
from ..call.signature import HOOKS, attributes, has_gradient_or_hooks, modes
from ..capture.arrivals import Arrivals
from ..capture.breaks import HERE, Break, Decision, MarkedBreak
from ..capture.dispatch import OperatorWatch
from ..capture.live_results import Form, Meta, Notes, one_thread, threads_as_now
from ..capture.whole_modules import Whole, in_place_of, module_around
from ..errors import Refusal, Unseen
from ..guards.hyperparameters import reals
from ..guards.reachable import Reach
from ..guards.snapshot import changed
from ..guards.tensor_states import state_of
from ..python.holders import Holder
from ..python.identity import identity
from ..python.origin import users_line
from ..python.standing import Standing
from ..values.formulas import Formula, Given
from ..values.host_scalars import READS_NUMBER, Numeral, Site, tensors_of, worked_out
from ..values.keys import NoSignature, plain_key
from ..values.pytree import flatten, unflatten
from ..values.texts import Text
from ..values.wording import COMPILED, source_of

__all__ = ["UNDONE", "Cuts", "Unmarked"]

_GOES_BY = "goes on by a number that it reads"
UNDONE = 64 << 20  # bytes outside that may be written up to where a call may begin again, and that each replay notes before


class Unmarked(Unseen):
    """A marked function, where none was known of."""


class Cuts:
    """The live operators and marked functions of a call that is captured, which ends a segment at each."""

    now: ClassVar[list[Cuts]] = []  # of the captures that go on, the innermost last

    def __init__(self, notes: Notes | None, reach: Reach, watch: OperatorWatch, outer: set[int], in_backward: bool) -> None:
        self._notes = notes
        self._in_backward = in_backward  # the call is one of what has been recorded as the backward of another
        self._reach = reach
        self._watch = watch
        self._modes: Reading = ()
        self._outside = _modes()  # without the mode that looks for followed numbers, which is off in what it calls
        self._held = self._read()
        self._held_within = self._held[:0]
        self._tensors = [(name, t, _is(t)) for name, t in reach.all_tensors] if notes is not None and notes.marked else []
        self._own = {identity(t) for _, t, _ in self._tensors}
        self._outer = outer
        self._before = 0
        self._thread = threading.get_ident()
        self._backwards: AbstractContextManager[object] = nullcontext()
        self._asking: AbstractContextManager[object] = nullcontext()
        self._numbers: dict[Site, Iterator[object]] = {}
        self._left = 0  # how many are to come

    def __enter__(self) -> None:
        self._standing = Standing(self._undo)
        try:
            self._enter()
        except BaseException:
            self._standing.end()
            raise

    def _enter(self) -> None:
        self._modes = _modes()
        self._backwards = threads_as_now()
        if self._notes is not None and self._notes.cuts:
            asking = in_place_of(self._notes.wholes, self._whole)
            asking.__enter__()
            self._asking = asking
            self._held_within = self._read()
            one_thread()
        if self._notes is not None:
            self._watch.split, self._watch.cutting = self._notes.operators, self.cut
            self._watch.decisive, self._watch.deciding = self._notes.decisive, self.decide
            self._watch.noted, self._watch.goes_by = self.noted, self.goes_by
            self._numbers = {site: iter(numbers) for site, numbers in self._notes.numbers.items()}
            self._left = len(self._notes.forms) + sum(map(len, self._notes.numbers.values()))
            self._watch.arrivals = Arrivals(self._watch.copied) if self._left else None
        Cuts.now.append(self)

    def __exit__(self, *_: object) -> None:
        self._standing.end()

    def _undo(self) -> None:
        Cuts.now[:] = [one for one in Cuts.now if one is not self]
        self._asking.__exit__(None, None, None)
        if threading.get_ident() == self._thread:  # of which it is a setting
            self._backwards.__exit__(None, None, None)
        self._watch.split, self._watch.decisive = frozenset(), frozenset()
        self._watch.arrivals = None
        self._watch.noted = self._watch.goes_by = None
        self._watch.cutting = self._watch.deciding = None  # or it would keep itself, with all that it has noted

    def cut(self, operator: OpOverload | Marked, args: Args, kwargs: Kwargs) -> object:
        """End a segment, because this is called. Returns what stands for its result."""
        with _cutting():
            return self._cut(operator, args, kwargs)

    def _cut(self, operator: OpOverload | Marked, args: Args, kwargs: Kwargs) -> object:
        said = operator.name() if isinstance(operator, Marked) else source_of(operator.name())
        runs, watch = f"runs {said} live", self._watch
        form, values = self._form(operator, runs)
        leaves: Leaves = []
        shape = flatten((args, kwargs), leaves)
        numbers = tensors_of(leaves)
        leaves = [None if i in numbers else reals(x, "is given to what runs live") for i, x in enumerate(leaves)]
        leaves = [x.real() if type(x) in (Numeral, Text) else x for x in leaves]
        for x in leaves:
            self._passable(x, runs, isinstance(operator, Marked))
        watch.dials_lost(leaves)
        if isinstance(operator, Marked):
            given = [HERE if isinstance(x, torch.Tensor) and identity(x) not in self._own else x for x in leaves]
            written = [leaves[i] for i in form.writes]
            watch.drew = True
            self._may_be_written([x for x in leaves if isinstance(x, torch.Tensor) and identity(x) in self._own])
        else:
            given = [HERE if isinstance(x, torch.Tensor) and x.device == watch.device else x for x in leaves]
            written = self._written_by(operator, args, kwargs, runs)
        mine = [x for x, g in zip(leaves, given, strict=True) if g is HERE]
        for t in written:
            watch.writes(t)
        caught = self._check(operator, runs)
        if any(isinstance(m, Meta) and m.device != watch.device for m in form.results):
            raise Refusal(f"{runs}, which gives a tensor elsewhere than on {watch.device}", "pass it as an argument")
        if any(isinstance(m, Meta) and m.inference is not torch.is_inference_mode_enabled() for m in form.results):
            raise Refusal(f"{runs}, which gives tensors of another inference mode", "leave the mode as it is")
        part: Break
        if isinstance(operator, Marked):
            bump(written)  # for those who have saved one of them for a backward
            outside = [storage_id(t) in watch.outside or storage_id(t) in watch.slot_ids for t in mine]  # others have those
            rewritten = [[True] if others else watch.shown(t) for t, others in zip(mine, outside, strict=True)]
            keeps = self._notes.keeps[self._before - 1]  # type: ignore[union-attr]
            historied = [t.requires_grad for t in mine]
            part = MarkedBreak(form, shape, given, users_line(), historied, self._grads(runs), keeps, rewritten, [*numbers])
        else:
            part = Break(form, shape, given, users_line(), watch.casts.within(operators.meaning(operator)))
            part.changed_grads, part.caught, part.around = self._changed_grads(), caught, self._around()
        part.said = said
        arrived = self._arrived(part, runs)
        new = [(m, v) for m, v in zip(form.results, values, strict=True) if isinstance(m, Meta)]
        made = iter(
            watch.interrupt(part, str(part), [*mine, *numbers.values(), *arrived], [m for m, _ in new], [v for _, v in new])
        )
        found = [next(made) if isinstance(m, Meta) else None if m is None else leaves[m] for m in form.results]
        return unflatten(form.shape, iter(found))

    def _whole(self, module: Whole, args: Args, kwargs: Kwargs) -> object:
        """End a segment at a module that runs live as a whole. Returns what stands for its result."""
        try:
            return self.cut(module, args, kwargs)
        except Refusal as refusal:
            raise self._watch.located(refusal) from None

    def decide(self, t: torch.Tensor, site: Site) -> object:
        """End a segment, because the call goes on by the number in this tensor. Returns what it was in the live call before.
        (One that is the same as another that was looked at needs no look.)"""
        runs = _GOES_BY
        for number in self._numbers.get(site, iter(())):
            if not self._watch.bodies and self._watch.alike.reads(t, number):
                self._one_less()
                return number
            with _cutting():
                self._may_cut(runs)
                part = Decision(number, source_of(READS_NUMBER.name()), users_line())
                part.remedy, part.around = self._watch.advice() or part.remedy, self._around()
                self._watch.interrupt(part, str(part), [t.detach(), *self._arrived(part, runs)], [], [])
            return number
        raise self._watch.located(Unseen(f"{runs}, and did not read it before", "read it in every call", final=False))

    def noted(self, site: Site) -> object:
        """The number that the live call before has read at this site."""
        for number in self._numbers.get(site, iter(())):
            return number
        raise self._watch.located(Unseen(f"{_GOES_BY}, and did not read it before", "read it in every call", final=False))

    def goes_by(self, formula: Formula, reads: Mapping[Given, torch.Tensor], now: object, said: str, where: str) -> None:
        """End a segment, because the call goes on by what a formula makes of numbers in these tensors, which is this now."""
        with _cutting():
            self._may_cut(_GOES_BY)
            work_out, dials = worked_out([formula], reads), self._watch.dials
            part = Decision(now, said, where, work_out, lambda: dials.values if dials else ())
            part.remedy, part.around = self._watch.advice() or part.remedy, self._around()
            tensors = [t.detach() for t in reads.values()]
            self._watch.interrupt(part, str(part), [*tensors, *self._arrived(part, _GOES_BY)], [], [])

    def _may_be_written(self, tensors: list[torch.Tensor]) -> None:
        """These from outside are given to a marked function as they are. Where a call begins again, they are put back, if they
        are not too large to be noted before each replay."""
        watch = self._watch
        found = {storage_id(t): t.untyped_storage() for t in tensors if has_memory(t)} | watch.given_outside
        if sum(s.nbytes() for s in {**found, **{s._cdata: s for s in watch.changed()}}.values()) <= UNDONE:
            watch.given_outside = found

    def _grads(self, runs: str) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """The gradients that the call has changed so far. Nothing else that can be seen of a tensor may be another now."""
        for name, t, (state, _) in self._tensors:
            if _is(t)[0] != state:
                raise Refusal(f"{runs} while {name} is another than before the call", "change it before the call")
        found = self._changed_grads()
        if found and self._in_backward:
            raise Refusal(
                f"{runs} in a part that is recomputed by a backward of its own", "use checkpoint(use_reentrant=False)"
            )
        return found

    def _changed_grads(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        return [(t, t.grad) for _, t, (_, grad) in self._tensors if t.is_leaf and not _has_still(t, grad)]

    def _written_by(self, operator: OpOverload, args: Args, kwargs: Kwargs, runs: str) -> list[torch.Tensor]:
        m = operators.meaning(operator)
        if m.metadata_only or (m.writes_named and m.shape_from_data):
            raise Refusal(f"{runs}, which may resize a tensor that it is given", "let it make a new one")
        self._watch.drew = self._watch.drew or m.random or not m.compiled
        return operators.written_by(m, args, kwargs)

    def _check(self, operator: OpOverload | Marked, runs: str) -> bool:
        """Whether the call may be cut here, and code run. Returns whether the call begins again where that raises, because code
        may catch it, or see what the call has done before."""
        watch = self._watch
        self._may_cut(runs)
        any_kind = isinstance(operator, Marked) or operators.meaning(operator).others
        caught = watch.comes_to_users(any_kind=any_kind)
        if watch.forked() or (caught and any_kind):
            raise Refusal(f"{runs}, and an except or finally clause or a context manager of yours is around it",
                          "let the exception out, and catch it around the call")  # fmt: skip
        others = self._others()
        if others and any_kind:
            raise Refusal(f"{runs} while {others[0]} is another than before the call", "change it before the call")
        (autocast, *now), (before, *then), (_, *outside) = _modes(), self._modes, self._outside
        casts = isinstance(operator, Marked) and autocast != before  # an operator runs with what it is then
        if casts or now not in (then, outside):
            raise Refusal(f"{runs} where a mode is another than outside (autocast, inference_mode)", "call it outside of that")
        return caught or bool(others)

    def _read(self) -> list[tuple[Holder, tuple[object, ...]]]:
        """What stands in places outside, if there may be cuts."""
        cuts = self._notes is not None and self._notes.cuts
        return [(h, h.read()) for h in self._reach.holders if h.dial is None] if cuts else []

    def _others(self) -> list[str]:
        """The names of the places outside where the call has put something else. (What stands there to follow numbers goes in
        the midst of a call.)"""
        within = changed(self._held_within)
        return [*filter({*changed(self._held)}.__contains__, within)] if within else []

    def _may_cut(self, runs: str) -> None:
        """Whether the call may be cut here."""
        if threading.get_ident() != self._thread:
            raise Refusal(f"{runs} in another thread", "call it in the one that calls the recorded function")
        if sum(s.nbytes() for s in self._watch.changed()) > UNDONE:
            raise Refusal(f"{runs}, after much of its state was written", "call it before, or outside")

    def _around(self) -> Callable[[], torch.nn.Module | None] | None:
        """The module in which the call is cut, if that could run live as a whole. (A recording does not keep it.)"""
        module = module_around(sys._getframe(2), self._notes.wholes if self._notes is not None else ())
        return None if module is None else weakref.ref(module)

    def _arrived(self, part: Break, runs: str) -> list[torch.Tensor]:
        """Copies of what other ranks have sent so far, which a call that begins again after this is given."""
        watch, arrivals = self._watch, self._watch.arrivals
        if not watch.communicated:
            self._one_less()
            return []
        after = f"{runs} after it has communicated with other ranks"
        if arrivals is None or watch.workplaces or watch.gathered:
            raise Refusal(f"{after} in a wrapper of torch's", "call it before that, or outside")
        if name := watch.under_way():
            raise Refusal(f"{runs} while a collective is under way ({name})", "wait for it before")
        arrived = arrivals.kept()
        self._one_less()
        if arrived is None:
            raise Refusal(
                f"{after}, and written to strided parts of what that has brought, or by Triton",
                "call it before that, or outside",
            )
        part.brought = [(name, len(tensors)) for name, tensors in arrived]
        found = [t for _, tensors in arrived for t in tensors]
        if sum(t.nbytes for t in found) > UNDONE:
            raise Refusal(f"{after} by large tensors, which would have to be kept", "call it before that, or outside")
        return found

    def _one_less(self) -> None:
        """After the last of them nobody needs copies of what arrives."""
        self._left -= 1
        if not self._left:
            self._watch.arrivals = None

    @staticmethod
    def watch() -> OperatorWatch | None:
        """The watch of the innermost capture that goes on."""
        return Cuts.now[-1]._watch if Cuts.now else None

    @staticmethod
    def on_one_thread() -> None:
        """From now on a backward of the call that is captured runs on the thread that asks for it."""
        if not torch.is_inference_mode_enabled():  # in which there is none, and after which it is as before
            one_thread()

    @staticmethod
    def marked(function: Marked, args: Args, kwargs: Kwargs) -> object:
        """A marked function is called in a call that is captured. Returns what stands for its result.

        Raises:
            Refusal: the call cannot be cut there.
        """
        mine = Cuts.now[-1] if Cuts.now else None
        if mine is None or mine._notes is None:
            raise Refusal(f"calls {function.name()}, which is marked @pg.live", "call it outside the recorded function")
        if not mine._notes.marked:
            raise Unmarked(f"calls {function.name()}, which is marked @pg.live and was not looked for", "name it in the "
                           "recorded function", final=False)  # fmt: skip
        return mine.cut(function, args, kwargs)

    def _form(self, operator: OpOverload | Marked, runs: str) -> tuple[Form, list[object]]:
        i, self._before = self._before, self._before + 1
        if self._notes is None or i >= len(self._notes.forms) or self._notes.forms[i].operator is not operator:
            raise Unseen(f"{runs}, which was not seen to run there", "call it in every call", final=False)
        form = self._notes.forms[i]
        if form.objection:
            refusal = Refusal(f"{runs}, which {form.objection}", _instead(operator))
            refusal.around = module_around(sys._getframe(1), self._notes.wholes)
            raise refusal
        return form, self._notes.values[i]

    def _passable(self, x: object, runs: str, marked: bool) -> None:
        """Whether each replay can give this to the operator."""
        if isinstance(x, torch.Tensor):
            plain = type(x) in (torch.Tensor, torch.nn.Parameter) and has_memory(x)
            ours = x.device == self._watch.device and not (x.is_conj() or x.is_neg())
            # One that is written in code of the call may be a number on the host.
            number = plain and x.is_cpu and x.dim() == 0 and not self._watch.known.get(storage_id(x))
            if not (plain and (ours or (number and not marked))):
                raise Refusal(f"{runs} with a tensor on {x.device}, or of another kind", "pass plain tensors of the device")
            if marked and identity(x) not in self._own and (attributes(x) or x.retains_grad or has_gradient_or_hooks(x)):
                raise Refusal(f"{runs} with a tensor that has attributes, hooks or a gradient, which its copy has not",
                              "pass what it needs of them by itself")  # fmt: skip
        elif identity(x) not in self._outer and not _constant(x):
            raise Refusal(f"{runs} with an object that the call made ({type(x).__qualname__})", "pass tensors and numbers")


@contextmanager
def _cutting() -> Iterator[None]:
    """What is refused in the block stands in the way of a cut."""
    try:
        yield
    except Refusal as refusal:
        refusal.cutting = True
        raise


def _instead(operator: OpOverload | Marked) -> str:
    if isinstance(operator, Marked):
        return ("let it return new tensors or None, and change nothing but what it is given; or call it outside, as an "
                "optimizer's step that cannot be recorded")  # fmt: skip
    return "; or ".join(filter(None, [operators.remedy(operators.meaning(operator).name), COMPILED]))


def _modes() -> Reading:
    """Those for which code between segments may ask, autocast first: but for the grad mode, which it finds as it was, and the
    hooks by which a capture or `checkpoint` keeps what autograd saves."""
    settings, autocast, *rest = modes()
    pack, _ = settings[HOOKS] or (None, None)
    hooks = None if getattr(pack, "__module__", "") in (checkpoint.__module__, Tracing.__module__) else pack
    return autocast, *settings[1:HOOKS], *settings[HOOKS + 1 :], *rest, hooks


def _is(t: torch.Tensor) -> tuple[object, weakref.ref[torch.Tensor] | None]:
    """What a tensor is, and (weakly) its gradient."""
    grad = t.grad if t.is_leaf else None
    return state_of(t), None if grad is None else weakref.ref(grad)


def _has_still(t: torch.Tensor, grad: weakref.ref[torch.Tensor] | None) -> bool:
    return t.grad is None if grad is None else t.grad is not None and t.grad is grad()


def _constant(x: object) -> bool:
    try:
        plain_key(x)
    except NoSignature:
        return False
    return not (isinstance(x, (set, torch.nn.Module, torch.optim.Optimizer, torch.Generator, type)) or callable(x))
