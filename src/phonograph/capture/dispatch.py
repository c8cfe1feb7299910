"""Dispatch mode below autograd that sees every operator of a captured call.

`OperatorWatch` is a `TorchDispatchMode`. It collects the outside tensors that operators read and write. It refuses operators
that cannot be captured *before* they run: a refused capture then ends in good order, and not with an invalidated stream.
Effects of Python code are the business of `python_events`.

It runs for each operator of each capture. So arguments are searched for tensors once, and the meaning of an operator is found
once for each overload.

`ignore_compile_internals` is True: otherwise a compiled function inside the call would run in eager, and stay so for ever.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence, Set
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from .._torch.dynamic import Args, Kwargs, Leaves, Thing
from .._torch.dynamo import not_compiled_by_itself
from .._torch.modes import TorchDispatchMode, below_autograd, resolves_again, without_modes
from .._torch.operators import (
    HigherOrderOperator,
    OpOverload,
    carried_out,
    insists_on_no_mode,
    is_higher_order,
    is_missing,
    numbers_in_place_of_tensors,
)
from .._torch.process_groups import coalescing, stop_coalescing, waits_by_itself
from .._torch.tensors import are_fake, has_memory, is_valueless, kind_of, makes_fakes, say_themselves, storage_id
from ..aten import operators
from ..aten.autocast import Casts
from ..aten.collectives import refusal
from ..errors import Refusal
from ..guards.followed_numbers import takes
from ..guards.reachable import Reach
from ..memory.pool import extent
from ..python.identity import identity
from ..python.memos import memos
from ..values.host_scalars import COMPARISONS, LEFT_ALIGNED, Site, site_of
from ..values.tensor_subclasses import consists_of_parts
from ..values.wording import MARKED, source_of
from .arrivals import Arrivals
from .call_memory import CallMemory
from .control_flow import ControlFlow
from .digest import Digest
from .exports import Exports
from .followed_counts import COUNTING, FollowedCounts
from .higher_order import branch_or_loop
from .histories import Histories
from .host_numbers import HostNumbers
from .notes import Note
from .numbers_in_tensors import NumbersInTensors
from .origins import Origins
from .python_events import pause_profiling
from .random_states import RandomStates
from .refusals import Refusals

if TYPE_CHECKING:
    from .breaks import Break
    from .live_results import Meta

__all__ = ["OperatorWatch"]

_GIVEN = operators.meaning(torch.ops.aten.alias.default)
_STRIDED = torch.strided
_GOES_ON = object()  # as an answer: there is none


class OperatorWatch(TorchDispatchMode, ControlFlow, HostNumbers, Exports):
    """Observer of every operator of one call on one device."""

    calls_operators = False
    """Whether a replay calls them, rather than what they have launched."""

    def __init__(self, device: torch.device, reach: Reach, slots: list[torch.Tensor], borrowed: Sequence[bool] = ()) -> None:
        TorchDispatchMode.__init__(self)
        CallMemory.__init__(self, reach, slots, borrowed)
        Refusals.__init__(self, reach)
        RandomStates.__init__(self, reach)
        HostNumbers.__init__(self, device, reach)
        FollowedCounts.__init__(self)
        NumbersInTensors.__init__(self)
        ControlFlow.__init__(self)
        self.untraced: dict[tuple[int, int], tuple[str, str]] = {}
        """Operator and line by (address, bytes), for each tensor of unknown origin."""
        self.keeper: object = None
        """Function whose cache keeps the one for which the call was refused."""
        self.histories = Histories(reach)
        self._historic = bool(self.histories)
        self.split: Set[object] = frozenset()
        """Operators that run live between segments."""
        self.cutting: Callable[[Any, Any, Any], Any] | None = None
        """Ends a segment at such an operator, and runs it."""
        self.parts: tuple[Break, ...] = ()
        """Live parts so far."""
        self.undone: list[torch.UntypedStorage] = []
        """Outside memory that was written before the last live part."""
        self.failed: Any = None
        """First operator that raised an exception."""
        self.casts = Casts()
        self.communicated = False
        """Whether the call has communicated with other ranks."""
        self.arrivals: Arrivals | None = None
        """Results of collectives, if a replay may have to begin again after them."""
        self._groups: dict[int, torch.device] = {}  # process groups with coalesced collectives that have begun, by identity
        self.warm = True
        """Whether such a call has run live before."""
        self.more: str = ""
        """Reason for which a replay must not be played as a trial; empty if it may."""
        self.operators = 0
        self.runs_python = False
        """Whether some operator is not torch's own, and may be Python code."""
        self.repeated = False
        """Whether such code runs now. It runs in each replay too, so it may read numbers."""
        self.give_back: Callable[[int, int], None] = _not_here
        """Frees memory (address, bytes) for the rest of the capture."""
        self.met_outside: Callable[[torch.Tensor], None] = _unsaid
        """Called with each tensor that existed before, and that is not in reach."""
        self.drew = True
        """Whether the call may have drawn random numbers. A device may know that it has not."""
        self.drops_out = False
        """Whether it draws from a generator's state that is not in reach."""
        self.has_backward = False
        self.numbered_apart = False  # nodes of autograd's were made on two threads
        """Whether its backward runs outside, or it is a backward itself."""
        self.may_begin_again = True
        """Whether a replay that cannot go on may be taken back, and the call run live: not where it is a backward."""
        self.digest: Digest | None = None
        """Digest of the operators, for later audits."""
        self.origins = Origins()

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def stood_in(self) -> None:
        """Slots stand in the places of carried state from now on."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch wraps `__torch_dispatch__` to keep Dynamo from compiling it. (The wrapper costs as much as all else
        that torch does for an operator, and imports Dynamo.)"""
        own = cls.__dict__.get("__torch_dispatch__")
        return own is not None and not not_compiled_by_itself(own.__code__, nor_what_it_calls=True)

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Thing:
        if types or type(func) is not OpOverload:
            return self._of_others(func, types, args, kwargs or {})
        return self._of_operator(func, args, kwargs or {})

    def _of_others(self, func: OpOverload, types: Sequence[type], args: Args, kwargs: Kwargs) -> Thing:
        """Handle what is no plain operator of plain tensors, or may be none."""
        if types and waits_by_itself(types):
            return NotImplemented  # such a tensor waits first, by an operator that comes here, and calls `func` on its result
        resolves_again()
        if makes_fakes():
            return func(*args, **kwargs)  # fake tensors: no part of the call's work
        if is_higher_order(func):
            return self._of_higher_order(func, args, kwargs)
        if types and (classes := say_themselves(types)):
            return self._of_classes(func, classes, args, kwargs)
        return self._of_operator(func, args, kwargs)

    def _of_operator(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Thing:
        listening = pause_profiling()  # before anything of ours is called, each step of which would be heard
        try:
            resolves_again()
            if not makes_fakes():
                return self._of_call(func, args, kwargs, listening)
        except Refusal as refusal:
            raise self.located(refusal) from None
        except RuntimeError:
            if not numbers_in_place_of_tensors(func, args):  # with which it fails wherever somebody looks on
                self.failed = self.failed or func
            raise
        finally:
            if listening is not None:
                sys.setprofile(listening)
        return func(*args, **kwargs)

    def position(self) -> int:
        return len(self.parts)

    def kernels(self) -> list[tuple[str, object]]:
        """The kernels so far that no operator has launched: their names, and what they are given."""
        return []

    def roll_back(self) -> None:
        """Undo what a failed capture has changed."""
        self.put_versions_back()
        if self.digest is not None:
            self.digest.close()

    def _of_call(self, func: OpOverload, args: Args, kwargs: Kwargs, listening: Callable[..., object] | None) -> object:
        """Handle an operator of the call: refuse it, run it live between segments, count an optimizer's step, or run it."""
        m = operators.meaning(func)
        note = Note(args, kwargs, self.known)
        if self.digest is not None:
            self.digest.note(m, func, note)
        if not m.usual or self.split or self.arrivals is not None:
            answer = self._instead(func, m, args, kwargs)
            if answer is not _GOES_ON:
                return answer
        self._see(m, args, kwargs, note)
        fixed = self.of
        self.operators += 1
        sizes = operators.bytes_written(m, args, kwargs) if m.resizes else ()
        begins = self.captured()
        out = self._run(func, m, args, kwargs, note, listening)
        if fixed is not None:
            self.makes(func, args, kwargs, out, fixed)
        elif m.name == "aten::rand" and isinstance(out, torch.Tensor):
            self.draws_evenly(out)
        elif m.reads_host:
            self.makes_in_part(m, args, out)
        if self.decisive and not self.bodies and not (self.dials and self.stands_among((*args, *kwargs.values()))):
            self.alike.makes(m, func, args, kwargs, out)
        if self.graphs:
            self.graphs[-1].met(note.tensors, out)
        self.origins.note(m.name, begins, self.captured(), sys._getframe(1), self.outermost)
        if self._historic and torch.is_grad_enabled():
            self.histories.check_result(m, note.tensors, out)
        if not m.usual:
            self._look_at_result(m, args, kwargs, out)
        if sizes and sizes != operators.bytes_written(m, args, kwargs):
            raise Refusal(f"{source_of(m.name)} resizes the tensor that it is to write to", "give it one of the right size")
        return out

    def _instead(self, func: OpOverload, m: operators.Meaning, args: Args, kwargs: Kwargs) -> object:
        """Refuse an operator of the call, or answer it in place of running it."""
        constant = (m.refusable or self.split) and self.is_constant(m, args, kwargs)
        if self.split and func in self.split and not constant:
            assert self.cutting is not None
            with self:  # what the cut makes is the call's own
                return self.cutting(func, args, kwargs)
        if self.arrivals is not None and (m.writes or m.writes_named):
            self.arrivals.before_writing(operators.written_by(m, args, kwargs))
        if m.communicates:
            if self.bodies:
                raise refusal(m.name, " in a branch or loop", "call it outside of that")
            self.communicates(m, args, kwargs)
        if m.name in COMPARISONS and not constant and self.numerals is not None and self._compares(m, *args[:2]):
            with self:
                return self._compared(m, args, kwargs, site_of(sys._getframe(2)))
        if m.refusable and not constant:
            self._check(func, m, args, kwargs)
        if m.name in COUNTING and self._counting and self._counted(m, args, kwargs):
            if self.bodies:
                raise Refusal(
                    "moves on the step count of an optimizer, which is kept on the host, in a branch or loop",
                    "make the optimizer with capturable=True or fused=True",
                )
            return args[0] if isinstance(args[0], torch.Tensor) else None
        if self.casts.unclear(m):
            raise Refusal(f"{source_of(m.name)} under autocast works in types of which torch does not tell",
                          "call it where autocast is off: with torch.autocast(device_type, enabled=False)")  # fmt: skip
        return _GOES_ON

    def _look_at_result(self, m: operators.Meaning, args: Args, kwargs: Kwargs, out: object) -> None:
        if m.communicates and self.arrivals is not None:
            self.arrivals.note(m, args, kwargs, out)
        if m.converts and operators.made_integers(args, out):
            self.more = self.more or f"makes integers of floating-point numbers ({source_of(m.name)}), which may be indices"

    def _compares(self, m: operators.Meaning, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Whether it takes their values to tell whether these are the same, and the device has them."""
        if m.name == LEFT_ALIGNED:  # else it raises
            alike = a.dim() == 3 and a.shape[:2] == b.shape and b.dtype is torch.bool
        else:
            alike = a.dtype is b.dtype and a.shape == b.shape
        return alike and a.device == b.device == self.device

    def _compared(self, m: operators.Meaning, args: Args, kwargs: Kwargs, site: Site) -> object:
        """What two tensors are found to be at this site, by which the call goes on."""
        truth = self.decided(COMPARISONS[m.name](*args, **kwargs), site)
        if truth is None:
            self.reads_number(site, m.name)
        return truth

    def _check(self, func: OpOverload, m: operators.Meaning, args: Args, kwargs: Kwargs) -> None:
        try:
            if not self.only_views(m, args):
                operators.check(m, args, kwargs)
        except Refusal as refusal:
            refusal.operator = func
            raise

    def _run(
        self, func: OpOverload, m: operators.Meaning, args: Args, kwargs: Kwargs, note: Note,
        listening: Callable[..., object] | None,
    ) -> Any:  # fmt: skip
        """Run an operator. Python code of its own is not observed."""
        if listening is not None and not m.compiled:
            sys.setprofile(listening)  # the operator itself is Python code, perhaps the user's
        self.runs_python = self.runs_python or m.others
        try:
            if note.numbers and self.dials is not None and self.dials.wide:
                taken = takes(self.dials, m.name, args, kwargs, called=self.calls_operators)
                if taken is not None:
                    return self._followed(func, m, *taken)
            return self.perform(func, m, args, kwargs, note)
        except Refusal as refusal:
            refusal.operator = func
            raise

    def _of_higher_order(self, func: HigherOrderOperator, args: Args, kwargs: Kwargs) -> object:
        """Run a higher-order operator. The operators that it calls come to this mode again."""
        listening = pause_profiling()
        kwargs = {name: self.lent(x) if isinstance(x, torch.Generator) else x for name, x in kwargs.items()}
        try:
            if listening is not None:
                sys.setprofile(listening)  # the functions may be the user's
            if (found := branch_or_loop(self, func, args, kwargs, self._seeing)) is not None:
                return found
            if insists_on_no_mode(func):
                return carried_out(func, [self._seeing(x) if callable(x) else x for x in args], kwargs)
            with self:
                return carried_out(func, args, kwargs)
        except NotImplementedError as e:
            if not is_missing(e):
                raise
            raise self.located(Refusal(f"{source_of(f'torch.ops.higher_order.{func.name()}')} has no code of its own for "
                                       f"{self.device.type}", "compile what calls it (torch.compile)")) from None  # fmt: skip
        finally:
            if listening is not None:
                sys.setprofile(listening)

    def _seeing(self, function: Callable[..., object]) -> Callable[..., object]:
        def seen(*args: object) -> object:
            with self:
                return function(*args)

        seen._boxed_call = getattr(function, "_boxed_call", False)  # type: ignore[attr-defined]  # it takes a list
        return seen

    def _of_classes(self, func: OpOverload, classes: list[type], args: Args, kwargs: Kwargs) -> object:
        """Leave an operator to tensor subclasses with a `__torch_dispatch__` of their own. The operators that they call come to
        this mode again. (Fake tensors have no values: such an operator just runs.)"""
        tensors = operators.operands(args, kwargs)
        if are_fake(map(type, tensors)):
            return func(*args, **kwargs)
        name = source_of(operators.meaning(func).name)
        try:
            if self.histories and torch.is_grad_enabled():
                self.histories.check(tensors)
            t = next((t for t in tensors if type(t) in classes and t.requires_grad and not consists_of_parts(t)), None)
            if t is not None and torch.is_grad_enabled():
                raise Refusal(f"{name} works with {kind_of(t)} that requires a gradient",
                              "record what needs no gradients, under torch.no_grad()")  # fmt: skip
        except Refusal as refusal:
            raise self.located(refusal) from None
        return NotImplemented

    # -- what an operator is given

    def _see(self, m: operators.Meaning, args: Args, kwargs: Kwargs, note: Note) -> None:
        """Collect the tensors that an operator reads and writes."""
        known, touched, saved = self.known, self.touched, self.saved
        for t, key in zip(note.tensors, note.keys, strict=True):
            name = known.get(key)
            if name:
                touched.add(key)
                if key in self._counts:
                    raise Refusal(f"{source_of(m.name)} works with the step count of an optimizer, which is kept on the host",
                                  "leave the count to the optimizer's step, or read it outside")  # fmt: skip
            elif name is None:
                self._see_unknown(m, t)
            if saved and key in saved:
                self.check_saved(key)
        self.of = None if self.bodies or not m.may_be_fixed else self.made_of(m, note, args, kwargs)
        if not m.plain:
            self._see_more(m, args, kwargs)
        if note.numbers and self.dials:
            for number in note.numbers:
                self.dials.see(number)
        if kwargs:
            generator = kwargs.get("generator")
            if generator is not None and self.is_new(generator):
                self.meet(generator)
        if m.copies and m.name == "aten::_to_copy" and note.tensors:
            self._see_weight(note.tensors[0])

    def _see_unknown(self, m: operators.Meaning, t: torch.Tensor) -> None:
        if t.layout is not _STRIDED:
            raise _other_kind(m, t)
        t.untyped_storage()  # which raises where there can be none
        if not is_valueless(t):
            if not has_memory(t):
                raise _other_kind(m, t)
            self.refuse_untraced(m, t)

    def _see_weight(self, t: torch.Tensor) -> None:
        if t.requires_grad and t.is_leaf and self.casts.keep():
            self.casts_weight(t, self.casts.ended)

    def _see_more(self, m: operators.Meaning, args: Args, kwargs: Kwargs) -> None:
        if m.random:
            self.more = self.more or "draws random numbers"
        if m.name == "aten::as_strided" and storage_id(args[0]) in self.slot_ids and operators.reaches_beside(args, kwargs):
            raise Refusal(f"{source_of(m.name)} of an argument can reach what lies beside it", "use slices of it")
        for t in operators.written_by(m, args, kwargs):
            self.writes(t)

    def refuse_untraced(self, m: operators.Meaning, t: torch.Tensor) -> None:
        """Refuse a tensor that is no argument, not in reach, and not the result of a watched operator."""
        if m.constant:
            return
        self.keeper = memos.keeper(lambda kept: storage_id(kept) == storage_id(t))
        said = "reads a tensor that phonograph cannot trace back to an argument or to the function's own variables"
        remedy = "pass it as an argument, or keep it as an attribute, closure variable or global"
        raise Refusal(f"{source_of(m.name)} {said}", remedy)

    def is_constant(self, m: operators.Meaning, args: Args, kwargs: Kwargs) -> bool:
        """Whether an operator that reads values at capture reads the same values in each replay."""
        if operators.answers_by_shapes(m, args):
            return True
        read = operators.read_on_host(m, args, kwargs)
        return bool(read) and self.reads_fixed(m.name, read, sys._getframe(1))

    def only_views(self, m: operators.Meaning, args: Args) -> bool:
        """Whether an operator that may replace a tensor's memory only makes a view here. A device may know."""
        return False

    # -- what it gives

    def captured(self) -> int:
        """How much this segment has so far: steps of a tape, nodes of a graph."""
        return 0

    def perform(self, func: OpOverload, m: operators.Meaning, args: Args, kwargs: Kwargs, note: Note | None = None) -> object:
        """Run the operator; devices that keep a tape override this. There is no `note` where it is given something else."""
        if m.usual:
            out: Thing = func(*args, **kwargs)
        elif m.constant:
            out = self._constant(operators.constant(m, args[0]))
        else:
            out = self.casts.called(m, self.casts.within(m), func, args, kwargs)
        for t in self.memory_in(m, (out,) if type(out) is torch.Tensor else operators.tensors_in(out, [])):
            self._begins(t.untyped_storage())
        return out

    def _constant(self, t: torch.Tensor) -> torch.Tensor:
        """Note a tensor that was made from Python numbers."""
        if has_memory(t):
            self._constants.add(storage_id(t))
        return t

    def memory_in(self, m: operators.Meaning, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Select the results of an operator that have memory.

        Raises:
            Refusal: a result is of a kind that no replay can make.
        """
        found = []
        for t in results:
            if has_memory(t):
                found.append(t)
            elif not (is_valueless(t) or waits_by_itself([type(t)])):  # (what that will give is known)
                raise Refusal(f"{source_of(m.name)} gives {kind_of(t)}", f"use dense tensors, or do it outside the recorded "
                              f"function, {MARKED}")  # fmt: skip
        return found

    def _followed(self, func: OpOverload, m: operators.Meaning, args: Args, kwargs: Kwargs) -> object:
        """Run an operator with followed numbers among its arguments, so that its kernels have them as parameters."""
        assert self.dials is not None
        self.dials.stepping(True)
        try:
            return self.perform(func, m, args, kwargs)
        finally:
            self.dials.stepping(False)

    # -- segments

    def interrupt(
        self, part: Break, name: str, inputs: list[torch.Tensor], results: list[Meta], values: Leaves
    ) -> list[torch.Tensor]:
        """End a segment before a live operator with these inputs. Returns placeholders for its results; on the CPU they have
        the values of the last live call."""
        if self.bodies:
            raise self.located(Refusal(f"runs {name} live in a branch or loop", "call it outside of that"))
        for t in inputs:
            key = storage_id(t)
            if self.known.get(key):
                self.touched.add(key)
            elif key not in self.known:
                self.refuse_untraced(_GIVEN._replace(name=name), t)
        self.undone = [*({s._cdata: s for s in self.changed()} | self.given_outside).values()]
        made = [torch.empty_strided(m.size, m.stride, dtype=m.dtype, device=m.device) for m in results]
        for t, value in zip(made, values, strict=True):
            if value is not None:  # no operator, and no part of the recording
                ctypes.memmove(t.data_ptr(), value.data_ptr(), extent(t) * t.element_size())
        self.parts += (part,)
        if self.dials is not None:
            self.dials.mark()
        self.cut(part, inputs, made)
        self.origins.cut()
        return made

    def cut(self, part: Break, inputs: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        """End a segment on the device."""
        raise NotImplementedError

    def applied(self, func: OpOverload, *args: object, **kwargs: object) -> Thing:
        with torch.no_grad(), without_modes(), below_autograd():
            given = tuple([x.detach() if isinstance(x, torch.Tensor) else x for x in args])
            return self.__torch_dispatch__(func, (), given, kwargs)

    # -- other ranks

    def communicates(self, m: operators.Meaning, args: Args, kwargs: Kwargs) -> None:
        """Handle an operator that communicates with other ranks.

        Raises:
            Refusal: the device cannot capture it.
        """
        raise refusal(m.name)

    def under_way(self) -> str:
        """Name of a collective for which the call has not waited yet, as far as the device knows; empty if none."""
        return self.arrivals.under_way() if self.arrivals is not None else ""

    def begins_group(self, frame: FrameType) -> bool:
        """Whether this code begins a group of coalesced collectives."""
        return False

    def end_groups(self) -> None:
        """End groups of collectives after an exception, and drop the collectives that they have collected."""
        for group in coalescing():
            stop_coalescing(group, self._groups.get(identity(group)))


def _other_kind(m: operators.Meaning, t: torch.Tensor) -> Refusal:
    return Refusal(f"{source_of(m.name)} works with {kind_of(t)}",
                   f"use dense tensors, or do it outside the recorded function, {MARKED}")  # fmt: skip


def _not_here(address: int, nbytes: int) -> None:
    """Default of `give_back`: memory stays taken."""


def _unsaid(_: torch.Tensor) -> None:
    """Default of `met_outside`."""
