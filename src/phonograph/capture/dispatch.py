"""Watching every operator (below autograd) of a call while it is captured.

`OperatorWatch` is a `TorchDispatchMode`: it sees which tensors from outside each operator reads and writes and refuses
operators that cannot be captured, *before* they run, so that a refused capture ends in good order instead of an
invalidated stream. (What Python code does besides, `listening` hears.) It runs for each operator of each capture: the
arguments are searched for tensors once, and what an operator means is worked out once an overload.

It answers True to `ignore_compile_internals`: otherwise a compiled function inside the call would run eagerly, and stay so
for ever.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import os
import sys
import weakref
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .._torch.dynamo import not_compiled_by_itself
from .._torch.modes import below_autograd, without_modes
from .._torch.operators import carried_out, insists_on_no_mode, is_higher_order, is_missing
from .._torch.process_groups import coalescing, stop_coalescing, waits_by_itself
from .._torch.tensors import are_fake, has_memory, is_valueless, kind_of, makes_fakes, say_themselves, storage_id
from ..aten import operators
from ..aten.autocast import Casts
from ..aten.collectives import refusal
from ..errors import Decides, Refusal
from ..guards import fsdp_state as shards
from ..guards.followed_numbers import takes
from ..guards.hyperparameters import Dials
from ..guards.reachable import Reach
from ..memory.pool import dense, extent
from ..python.containers import Holder
from ..python.handlers import comes_to_something
from ..python.identity import identity
from ..python.origin import BACKWARD, called_by, runs_through, users_line
from ..state.rng import FORKS, States
from ..values.host_scalars import Numeral, Site, listable, readable
from ..values.pytree import flatten
from ..values.tensor_subclasses import consists_of_parts, parts
from ..values.wording import COMPILED, MARKED, at_work
from .arrivals import Arrivals
from .effects import ANYONE, Effect, Starts
from .python_events import unheard
from .value_checks import Check

if TYPE_CHECKING:
    from .breaks import Break
    from .live_results import Meta

__all__ = ["CHECKS", "OperatorWatch"]


_GIVEN = operators.meaning(torch.ops.aten.alias.default)

_cdata: Any = operator.attrgetter("_cdata")
_STRIDED = torch.strided

# How steps of optimizers move their counts on.
_COUNTING = {"aten::add_": "add", "aten::_foreach_add_": "add", "aten::mul_": "mul", "aten::_foreach_mul_": "mul"}

# Libraries that look at values where their user need not let them.
_VALIDATES = ("pass validate_args=False to the distribution, which looks at its arguments' values, or turn that off for all "
              "(torch.distributions.Distribution.set_default_validate_args(False))")  # fmt: skip
_REMEDIES = {
    "torch/distributions/distribution.py:__init__": _VALIDATES,
    "torch/distributions/distribution.py:_validate_sample": _VALIDATES,
    "torch/nn/utils/clip_grad.py": "leave error_if_nonfinite as it is by default, False",
    "torch/amp/grad_scaler.py": "make the optimizer with fused=True, which looks for infinite gradients on the device; "
    'or fallback="split"',
    "torch/nn/modules/rnn.py": "lengths of packed sequences are read on the host: pass padded tensors, and mask them",
    "torch/optim/lbfgs.py": "LBFGS decides on the host how often it calls its closure: record the model that the closure calls",
    "torch/nn/modules/transformer.py:_detect_is_causal_mask": "pass is_causal as well as the mask: torch looks at its "
    "values otherwise",
    "transformers/masking_utils.py": "transformers looks whether the attention needs a mask: pass a four-dimensional "
    "attention_mask, or use an attention that gets none (docs/limits.md)",
}

CHECKS = "a check of torch's"  # in reasons

_HISTORIC = Effect("reads a tensor outside that has a history of its own", "pass it as an argument, or detach it", ANYONE)

_AS_IT_IS: AbstractContextManager[None] = nullcontext()


class OperatorWatch(TorchDispatchMode):
    """Sees every operator of one call on one device.

    `known` maps the storages that the call may touch (slots, and tensors in reach) to their names; storages that
    operators of the call create are added. `touched` and `written` collect those that were there before. `theirs` are those
    that are no copies: tensors in reach, and slots that are `borrowed`, arguments that are used in place.
    """

    def __init__(self, device: torch.device, reach: Reach, slots: list[torch.Tensor], borrowed: Sequence[bool] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.known: dict[int, str] = {storage_id(t): f"argument {i}" for i, t in enumerate(slots)}
        self.slot_ids = frozenset(self.known)
        self.gathered = frozenset(shards.storage(t)._cdata for _, t in reach.gathered)
        self._births: dict[int, _Birth] = {}
        self._gone = _forgetting(weakref.ref(self))
        for name, t in reach.tensors.values():
            if has_memory(t):
                self.known.setdefault(storage_id(t), name)
        for name, t in reach.all_tensors:
            for part in parts(t.grad) if t.is_leaf and t.grad is not None else ():
                self._born(part, f"{name}.grad")
        tensors = [t for _, t in reach.tensors.values()]
        made = [t for _, t in reach.made.values()]
        self._historic = {identity(t): t.grad_fn for t in (*tensors, *made) if t.requires_grad and t.grad_fn is not None}
        self._made_versions = [(t, t._version) for t in made if not t.is_inference()]
        self.outside = set(self.known) - self.slot_ids
        self.known |= dict.fromkeys(self.gathered, "")  # their memory is the call's own
        self.theirs = self.outside | {storage_id(s) for s, b in zip(slots, borrowed, strict=False) if b}
        self.touched: set[int] = set()
        self.written: dict[int, torch.Tensor] = {}
        self._versions: dict[int, int] = {}  # before that
        self._by_single: set[int] = set()  # whose version moves on, though nothing is seen of that here
        self._shown: dict[int, list[list[bool]]] = {}
        self.strangers: dict[tuple[int, int], tuple[str, str]] = {}  # of unknown origin: (address, bytes): operator, line
        self.generators: list[torch.Generator] = list(reach.generators)
        self._generators_catch = reach.mentions.generators_catch
        self._forked: list[weakref.ref[torch.Tensor]] = []  # states that are set again where `torch.random.fork_rng` ends
        self.outermost: CodeType | None = None  # that runs the call; what is called by it is the call's
        self.split: Set[Any] = frozenset()  # operators that run live between segments
        self.decisive: Set[Site] = frozenset()  # where numbers are read by which the call goes on
        self.deciding: Callable[[torch.Tensor, Site], Any] | None = None  # ends a segment there; returns the number
        self.cutting: Callable[[Any, Any, Any], Any] | None = None  # ends a segment at one of them
        self.failed: Any = None  # the operator that raised an exception
        self.parts: tuple[Break, ...] = ()  # these
        self.casts = Casts()
        self.given_outside: dict[int, torch.UntypedStorage] = {}  # memory outside that marked functions may write
        self.undone: list[torch.UntypedStorage] = []  # what has `changed` up to the last of these, and that
        self.states = States()
        self.communicated = False  # with other ranks
        self.arrivals: Arrivals | None = None  # what has come from them, while something follows that may end a replay
        self._groups: dict[int, torch.device] = {}  # process groups in which a group of collectives has begun, by identity
        self.warm = True  # whether such a call has run live before
        self.more: str = ""  # what it does for which a replay must not be played just to try it
        self.operators = 0
        self.runs_python = False  # whether some operator is of others, and may be Python code
        self.repeated = False  # whether such code runs now, as it will in each replay: there it may read numbers
        self.dials: Dials | None = None
        self._counts: Set[int] = frozenset()  # the storages of step counts on the host that they follow
        self._counting = False  # whether they follow any
        self._constants: set[int] = set()  # those of tensors that were made of numbers
        self._outside = tensors
        self.relied_on: dict[int, Holder] = {}  # memory outside whose contents are taken for the same in each replay
        self.relies: Callable[[list[Holder]], None] = _nobody  # is told of it
        self.give_back: Callable[[int, int], None] = _not_here  # that much memory at this address, to the capture
        self.met_outside: Callable[[torch.Tensor], None] = _unsaid  # a tensor that was there before, and that nothing leads to
        self.drew = True  # whether it may draw random numbers; a device may know better
        self.drops_out = False  # whether it draws some from memory that nothing leads to
        self.refusal: Refusal | None = None
        self.numerals: list[weakref.ref[Numeral]] | None = None  # made in this call, where it may hand on numbers
        self.has_backward = False  # outside, or it is one
        self.workplaces: tuple[torch.Tensor, ...] = ()
        self.noticed: list[Refusal] = []  # all of them, with those that others have noticed, in order

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch is to put something around `__torch_dispatch__` that keeps Dynamo off it. (It costs as much as the rest
        of torch's own for an operator, and imports Dynamo.)"""
        own = cls.__dict__.get("__torch_dispatch__")
        return own is not None and not not_compiled_by_itself(own.__code__, nor_what_it_calls=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and waits_by_itself(types):
            return NotImplemented  # it waits, by an operator that is seen here, and does this with what it has waited for
        kwargs = kwargs or {}
        if makes_fakes():
            return func(*args, **kwargs)  # which has no values, and is no part of the call's work
        if is_higher_order(func):
            return self._of_higher_order(func, args, kwargs)
        if types and (classes := say_themselves(types)):
            return self._of_classes(func, classes, args, kwargs)
        blamed: Any = None
        listening = unheard()
        try:
            m = operators.meaning(func)
            constant = (m.refusable or self.split) and self.is_constant(m, args, kwargs)
            if self.split and func in self.split and not constant:
                assert self.cutting is not None
                with self:  # what the cut makes is the call's own
                    return self.cutting(func, args, kwargs)
            if self.arrivals is not None and (m.writes or m.writes_named):
                self.arrivals.before_writing(operators.written_by(m, args, kwargs))
            if m.communicates:
                self.communicates(m, args, kwargs)
            blamed = func
            if m.refusable and not constant and not self.only_views(m, args):
                operators.check(m, args, kwargs)
            blamed = None
            if m.name in _COUNTING and self._counting and self._counted(m, args, kwargs):
                return args[0] if isinstance(args[0], torch.Tensor) else None
            self._see(m, args, kwargs)
            self.operators += 1
            sizes = _sizes(m, args, kwargs) if m.resizes else ()
            if listening is not None and not m.compiled:
                sys.setprofile(listening)  # the operator itself is Python code, perhaps the user's
            self.runs_python = self.runs_python or m.others
            blamed = func  # also for what Python code of its own does
            if self.dials is not None and self.dials.wide and (taken := takes(self.dials, m.name, args, kwargs)) is not None:
                out = self._followed(func, m, *taken)
            else:
                out = self.perform(func, m, args, kwargs)
            blamed = None
            if m.communicates and self.arrivals is not None:
                self.arrivals.note(m, args, kwargs, out)
            if self._historic and torch.is_grad_enabled():
                self._no_history(m, operators.operands(args, kwargs), out)
            if m.converts and operators.made_integers(args, out):
                self.more = self.more or f"makes integers of floating-point numbers ({at_work(m.name)}), which may be indices"
            if sizes and sizes != _sizes(m, args, kwargs):
                raise Refusal(f"{at_work(m.name)} resizes the tensor that it is to write to", "give it one of the right size")
            return out
        except Refusal as refusal:
            refusal.operator = blamed or refusal.operator
            raise self.located(refusal) from None
        except RuntimeError:
            self.failed = self.failed or func
            raise
        finally:
            if listening is not None:
                sys.setprofile(listening)

    def _of_higher_order(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator that is given functions, or other operators: what it calls comes here next."""
        listening = unheard()
        kwargs = {name: self.lent(x) if isinstance(x, torch.Generator) else x for name, x in kwargs.items()}
        try:
            if listening is not None:
                sys.setprofile(listening)  # the functions may be the user's
            if insists_on_no_mode(func):
                return carried_out(func, [self._seeing(x) if callable(x) else x for x in args], kwargs)
            with self:
                return carried_out(func, args, kwargs)
        except NotImplementedError as e:
            if not is_missing(e):
                raise
            raise self.located(Refusal(f"{at_work(f'torch.ops.higher_order.{func.name()}')} has no code of its own for "
                                       f"{self.device.type}", "compile what calls it (torch.compile)")) from None  # fmt: skip
        finally:
            if listening is not None:
                sys.setprofile(listening)

    def _seeing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def seen(*args: Any) -> Any:
            with self:
                return function(*args)

        seen._boxed_call = getattr(function, "_boxed_call", False)  # type: ignore[attr-defined]  # it takes a list
        return seen

    def lent(self, generator: torch.Generator) -> torch.Generator:
        """A higher-order operator draws from this one's state. Returns from whose it does so here and now."""
        if all(generator is not g and _cdata(generator) != _cdata(g) for g in self.generators):
            self.meet(generator)
        return generator

    def follow(self, dials: Dials) -> None:
        """What stands for hyper-parameters and step counts in this call."""
        self.dials = dials
        self._counts = frozenset(map(storage_id, dials.counts.here))
        self._counting = bool(dials.counts)

    def _followed(self, func: Any, m: operators.Meaning, args: Any, kwargs: Any) -> Any:
        """Run an operator that takes numbers which are followed: what it launches has to have them."""
        assert self.dials is not None
        self.dials.stepping(True)
        try:
            return self.perform(func, m, args, kwargs)
        finally:
            self.dials.stepping(False)

    def _counted(self, m: operators.Meaning, args: Any, kwargs: Any) -> bool:
        """Whether the operator moves step counts on, by numbers, and is not needed: on the host, a replay does so by itself."""
        assert self.dials is not None
        counts, by = args[:2]
        constant = not isinstance(by, torch.Tensor) or storage_id(by) in self._constants
        if not (constant and kwargs.get("alpha", 1) == 1 and self.dials.moves(_COUNTING[m.name], counts, by)):
            return False
        tensors = operators.tensors_in([counts], [])
        if not all(t.is_cpu for t in tensors):
            return False
        self.touched.update(map(storage_id, tensors))
        return True

    def _of_classes(self, func: Any, classes: list[type], args: Any, kwargs: Any) -> Any:
        """Some of the tensors are of classes that say themselves what an operator means: by other operators, which come here
        next. (Fake tensors have no values, nor has what is computed of them.)"""
        tensors = operators.operands(args, kwargs)
        if are_fake(map(type, tensors)):
            return func(*args, **kwargs)
        name = at_work(operators.meaning(func).name)
        if self._historic and torch.is_grad_enabled() and not self._historic.keys().isdisjoint(map(identity, tensors)):
            raise self.located(Refusal(_HISTORIC.reason, _HISTORIC.remedy))
        t = next((t for t in tensors if type(t) in classes and t.requires_grad and not consists_of_parts(t)), None)
        if t is not None and torch.is_grad_enabled():
            raise self.located(Refusal(f"{name} works with {kind_of(t)} that requires a gradient",
                                       "record what needs no gradients, under torch.no_grad()"))  # fmt: skip
        return NotImplemented

    def made_moved_on(self) -> list[torch.Tensor]:
        """The tensors outside that consist of parts, and have a version that has moved on."""
        return [t for t, version in self._made_versions if t._version != version]

    def located(self, refusal: Refusal) -> Refusal:
        """The refusal with the user's line."""
        refusal.where = refusal.where or users_line(sys._getframe(2))
        refusal.remedy = next((r for at, r in _REMEDIES.items() if runs_through(sys._getframe(2), at)), refusal.remedy)
        # User code may catch every exception; the first refusal counts even if it never arrives at the recorder.
        self.refusal = self.refusal or refusal
        self.noticed.append(refusal)
        return refusal

    def only_views(self, m: operators.Meaning, args: Any) -> bool:
        """Whether an operator that could give a tensor other memory only makes a new view here, as this device can see."""
        return False

    def perform(self, func: Any, m: operators.Meaning, args: Any, kwargs: Any) -> Any:
        """Run the operator; devices that keep a tape override this."""
        if m.others:
            with Casts.restored(casts) if (casts := self.casts.within(m)) else _AS_IT_IS:
                out = func(*args, **kwargs)
        else:
            out = self._constant(operators.constant(m, args[0])) if m.constant else func(*args, **kwargs)
        for t in self.memory_in(m, (out,) if type(out) is torch.Tensor else operators.tensors_in(out, [])):
            self._begins(t.untyped_storage())
        return out

    def _constant(self, t: torch.Tensor) -> torch.Tensor:
        """A tensor that was made of numbers of Python's."""
        if has_memory(t):
            self._constants.add(storage_id(t))
        return t

    def memory_in(self, m: operators.Meaning, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those of an operator's results that a replay has to make.

        Raises:
            Refusal: it could not make one.
        """
        found = []
        for t in results:
            if has_memory(t):
                found.append(t)
            elif not (is_valueless(t) or waits_by_itself([type(t)])):  # (what that will give is known)
                raise Refusal(f"{at_work(m.name)} gives {kind_of(t)}", f"use dense tensors, or do it outside the recorded "
                              f"function, {MARKED}")  # fmt: skip
        return found

    def works_in(self, places: Sequence[torch.Tensor]) -> None:
        """The call may work in this memory, of which nobody else makes anything."""
        self.workplaces = (*places,)
        for t in places:
            self.known.setdefault(storage_id(t), "a bucket of DistributedDataParallel")

    def lend(self, t: torch.Tensor, key: int) -> None:
        """This tensor stands for one in reach, on that storage, for as long as it lives."""
        self._born(t, self.known.get(key) or "what its forward has saved")
        self.outside.add(storage_id(t))
        self.theirs.add(storage_id(t))

    def _born(self, t: torch.Tensor, name: str = "") -> None:
        """Note a tensor that the call has made, or one outside (with a name) that it may let go of: either may be gone before
        the call ends, and its identity is then given to another storage."""
        if has_memory(t):
            self._begins(t.untyped_storage(), name)

    def _begins(self, storage: torch.UntypedStorage, name: str = "") -> None:
        key = storage._cdata
        if key not in self.known:
            self.known[key] = name
            self._births[key] = birth = _Birth(storage, self._gone)
            birth.key = key

    def died(self, key: int) -> None:
        """A storage that the call created, or a gradient from before, is gone."""
        self.known.pop(key, None)
        self._births.pop(key, None)
        self._shown.pop(key, None)
        self._constants.discard(key)
        self.outside.discard(key)
        self.theirs.discard(key)

    def moved_on(self) -> list[tuple[int, torch.Tensor]]:
        """Those tensors `written`, with their storages' identities, whose version has moved on. (Batch norm writes its running
        statistics, and leaves their version alone.)"""
        written = [(key, t) for key, t in self.written.items() if not t.is_inference()]
        return [(key, t) for key, t in written if t._version != self._versions[key] or key in self._by_single]

    def others(self, leaving: Set[int]) -> tuple[weakref.ref[torch.UntypedStorage], ...]:
        """Storages that operators of the call made, that are still there, and that are not among these."""
        births = list(self._births.items())  # garbage may be collected meanwhile
        return tuple(ref for key, ref in births if key not in leaving and key not in self.outside)

    def _see(self, m: operators.Meaning, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """Note what the operator touches. Returns the tensors among its arguments."""
        known, touched, tensors = self.known, self.touched, operators.operands(args, kwargs)
        for t in tensors:
            if t.layout is not _STRIDED:  # the others that are not known are asked
                raise _other_kind(m, t)
            key = t.untyped_storage()._cdata
            name = known.get(key)
            if name:
                touched.add(key)
                if key in self._counts:
                    raise Refusal(f"{at_work(m.name)} works with the step count of an optimizer, which is kept on the host",
                                  "leave the count to the optimizer's step, or read it outside")  # fmt: skip
            elif name is None and not is_valueless(t):
                if not has_memory(t):
                    raise _other_kind(m, t)
                self.stranger(m, t)
        if not m.plain:
            self._see_more(m, args, kwargs)
        if self.dials:
            _numbers_in((*args, *kwargs.values()), self.dials)
        if kwargs:
            generator = kwargs.get("generator")
            if generator is not None and all(generator is not g and _cdata(generator) != _cdata(g) for g in self.generators):
                self.meet(generator)
        return tensors

    def _no_history(self, m: operators.Meaning, tensors: Sequence[torch.Tensor], out: Any) -> None:
        """A backward would go through some of these to what lies behind them, of which nothing is known."""
        if self._historic.keys().isdisjoint(map(identity, tensors)) or m.name == "aten::detach":
            return
        if m.name.startswith("aten::new_") or (m.name.endswith("_like") and m.name != "aten::ones_like"):
            return  # (Of ones is the gradient with which a backward begins.)
        if any(t.is_floating_point() or t.is_complex() for t in operators.tensors_in(out, [])):
            raise Refusal(_HISTORIC.reason, _HISTORIC.remedy)

    def backwards(self) -> Starts:
        """The function that begins each backward: it may begin with one of those, which no operator need have read."""
        rule = os.path.join("torch", "autograd", "graph.py"), self._begins_outside, _HISTORIC
        return {BACKWARD: [rule]} if self._historic else {}

    def _begins_outside(self, frame: FrameType) -> bool:
        roots = frame.f_locals.get("t_outputs", ())
        nodes = [getattr(root, "node", None) for root in roots]
        return any(identity(root) in self._historic for root in roots) or any(n in self._historic.values() for n in nodes if n)

    def _see_more(self, m: operators.Meaning, args: Any, kwargs: Any) -> None:
        if m.random:
            self.more = self.more or "draws random numbers"
        if m.name == "aten::as_strided" and storage_id(args[0]) in self.slot_ids and _reaches_beside(args, kwargs):
            raise Refusal(f"{at_work(m.name)} of an argument can reach what lies beside it", "use slices of it")
        for t in operators.written_by(m, args, kwargs):
            self.writes(t)
        self._by_single.update(map(storage_id, operators.written_one_by_one(m, args, kwargs)))

    def caught(self, *, any_kind: bool) -> bool:
        """Whether something would have to be done after an exception that is raised here, of a kind that operators raise, or of
        any: a replay knows of no code that would do it."""
        return any(state() is not None for state in self._forked) or self.comes_to_users(any_kind=any_kind)

    def comes_to_users(self, *, any_kind: bool) -> bool:
        """Whether such an exception would come to code of the user's."""
        return self._generators_catch or comes_to_something(sys._getframe(1), self.outermost, any_kind=any_kind)

    def answered(self, t: torch.Tensor, frame: FrameType) -> bool | None:
        """What this frame is told that asks for the truth of a tensor, if it is code of torch's that only raises then; None if
        it has to read it.

        Raises:
            Refusal: something would have to be done after the exception.
        """
        check = Check.asked(frame, self.outermost)
        if check is None or not self.takes(check) or t.numel() != 1 or not has_memory(t):
            return None
        if t.device != self.device:  # made of numbers, here: its value is built in, or an operator is refused that reads it
            if not t.is_cpu or self.known.get(storage_id(t), ""):
                return None
            with without_modes():
                return bool(t.item())
        return self.checks(check, t)

    def is_constant(self, m: operators.Meaning, args: Any, kwargs: Any) -> bool:
        """Whether an operator that reads values here and now reads such as are the same in each replay."""
        return False

    def reads_on_host(self, t: torch.Tensor, said: str) -> None:
        """The values of a tensor are read on the host."""

    def takes(self, check: Check) -> bool:
        """Whether each replay can make this check as a live call does."""
        return check.exact

    def numeral(self, t: torch.Tensor, site: Site) -> Numeral | None:
        """What stands for the number in this tensor, if the call may hand it on without knowing it."""
        if self.numerals is None or not readable(t, self.device):
            return None
        found = Numeral(t.detach().clone(), functools.partial(self.reads_number, site))
        self.numerals.append(weakref.ref(found))
        return found

    def listed(self, t: torch.Tensor, site: Site) -> Any:
        """The same for `tolist`: lists of such. None if they are many, or the call may not hand them on."""
        if self.numerals is None or not listable(t, self.device):
            return None
        return [self.listed(row, site) for row in t.unbind()] if t.dim() else self.numeral(t, site)

    def reads_number(self, site: Site) -> NoReturn:
        """The call goes on by a number that is read at this site."""
        found = operators.reads_value()
        refusal = Decides(found.reason, f"{found.remedy}; or {COMPILED}")
        refusal.site = site
        raise self.located(refusal)

    def decided(self, t: torch.Tensor, site: Site) -> Any:
        """The number in this tensor, which is read at this site, if it is known that the call goes on by it; else None."""
        if site not in self.decisive or not readable(t, self.device):
            return None
        assert self.deciding is not None
        return self.deciding(t, site)

    def checks(self, check: Check, answer: torch.Tensor) -> bool:
        """Have this looked at in each replay. Returns what the call goes on with."""
        if self.caught(any_kind=False):
            raise self.located(Refusal(f"{CHECKS} may raise depending on data, and an except or finally clause or a context "
                                       "manager of yours is around it",
                                       "let the exception out, and catch it around the call"))  # fmt: skip
        return check.good

    def dials_lost(self, values: Sequence[Any]) -> None:
        """These go to an operator that runs live: a hyper-parameter among them cannot be followed there."""
        if self.dials and any(type(v) is float and v in self.dials.formulas for v in values):
            self.dials.lost = True

    def writes(self, t: torch.Tensor, version: int | None = None) -> None:
        """This tensor is going to be written; it had that version before, if not the one that it has now."""
        key = t.untyped_storage()._cdata
        if self._shown:
            for shown in self._shown.get(key, ()):
                shown[0] = True
        if (key in self.outside or key in self.slot_ids) and key not in self.written:
            self.written[key] = t
            self._versions[key] = version if version is not None else 0 if t.is_inference() else t._version

    def shown(self, t: torch.Tensor) -> list[bool]:
        """This tensor is shown to somebody who may keep it: a list that says whether it is written afterwards."""
        self._shown.setdefault(storage_id(t), []).append(found := [False])
        return found

    def handed_out(self, result: Any) -> None:
        """Whoever gets these tensors may write them."""
        leaves: list[Any] = []
        flatten(result if self._shown else None, leaves)
        for t in leaves:
            if isinstance(t, torch.Tensor) and has_memory(t):
                for shown in self._shown.get(storage_id(t), ()):
                    shown[0] = True

    def changed(self) -> list[torch.UntypedStorage]:
        """The memory that outlives the call and that it has written so far."""
        return [t.untyped_storage() for key, t in self.written.items() if key in self.theirs]

    def interrupt(
        self, part: Break, name: str, inputs: list[torch.Tensor], results: list[Meta], values: list[Any]
    ) -> list[torch.Tensor]:
        """End a segment, because a live operator comes, which is given these tensors. Returns what stands for its results; on
        the CPU with the values that they had the last time."""
        for t in inputs:
            key = storage_id(t)
            if self.known.get(key):
                self.touched.add(key)
            elif key not in self.known:
                self.stranger(_GIVEN._replace(name=name), t)
        self.undone = [*({s._cdata: s for s in self.changed()} | self.given_outside).values()]
        made = [torch.empty_strided(m.size, m.stride, dtype=m.dtype, device=m.device) for m in results]
        for t, value in zip(made, values, strict=True):
            if value is not None:  # no operator, and no part of the recording
                ctypes.memmove(t.data_ptr(), value.data_ptr(), extent(t) * t.element_size())
        self.parts += (part,)
        if self.dials is not None:
            self.dials.mark()
        self.cut(part, inputs, made)
        return made

    def cut(self, part: Break, inputs: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        """What the device does at the end of a segment."""
        raise NotImplementedError

    def communicates(self, m: operators.Meaning, args: Any, kwargs: Any) -> None:
        """An operator is about to communicate with other ranks.

        Raises:
            Refusal: the device cannot capture it.
        """
        raise refusal(m.name)

    def copied(self, t: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor, which is part of the capture."""
        with torch.no_grad(), without_modes(), below_autograd():
            made: torch.Tensor = self.__torch_dispatch__(torch.ops.aten.clone.default, (), (t.detach(),))
        return made

    def under_way(self) -> str:
        """The name of a collective for which the call has not waited so far, as far as the device knows."""
        return self.arrivals.under_way() if self.arrivals is not None else ""

    def begins_group(self, frame: FrameType) -> bool:
        """Whether this code may begin a group of collectives, which begin together where it ends."""
        return False

    def end_groups(self) -> None:
        """The call has ended early: what it has begun so is ended, and what it has collected is forgotten."""
        for group in coalescing():
            stop_coalescing(group, self._groups.get(identity(group)))

    def frames(self) -> Starts:
        """The Python functions whose start it has to hear of, or refuse."""
        return {}

    def stranger(self, m: operators.Meaning, t: torch.Tensor) -> None:
        """An operator reads a tensor that is neither an argument, nor in reach, nor made by a watched operator."""
        if m.constant:
            return
        raise Refusal(
            f"{at_work(m.name)} reads a tensor that phonograph cannot trace back to an argument or to the function's own "
            "variables",
            "pass it as an argument, or keep it as an attribute, closure variable or global",
        )

    def meet(self, generator: torch.Generator) -> None:
        """A generator that was not in reach is used."""
        self.generators.append(generator)

    def state_read(self, state: torch.Tensor, of: torch.device) -> None:
        """The state of that device's default generator was read."""
        self.states.read(state)
        self.forks(state)

    def forks(self, state: torch.Tensor) -> None:
        """A state was read: perhaps by `torch.random.fork_rng`, which has it until it ends."""
        if called_by(sys._getframe(1), FORKS):
            self._forked.append(weakref.ref(state))

    def state_set(self, state: torch.Tensor, of: torch.device) -> None:
        """The state of that device's default generator is going to be set.

        Raises:
            Refusal: to one that a replay would not have.
        """
        self.states.meaning(state)


def _other_kind(m: operators.Meaning, t: torch.Tensor) -> Refusal:
    return Refusal(f"{at_work(m.name)} works with {kind_of(t)}",
                   f"use dense tensors, or do it outside the recorded function, {MARKED}")  # fmt: skip


def _nobody(found: list[Holder]) -> None:
    """Nobody relies on anything."""


def _not_here(address: int, nbytes: int) -> None:
    """Where no memory can be given back."""


def _unsaid(_: torch.Tensor) -> None:
    """Where nobody asks."""


class _Birth(weakref.ref[torch.UntypedStorage]):
    """Refers to a storage whose identity is (or was) this key."""

    __slots__ = ("key",)
    key: int


def _forgetting(watch: weakref.ref[OperatorWatch]) -> Callable[[_Birth], None]:
    """What is called where a storage is gone. (The watch is not held: in a cycle it would keep the tensors that it has noted
    until garbage is collected.)"""

    def gone(birth: _Birth) -> None:
        if (mine := watch()) is not None:
            listening = unheard()
            try:
                mine.died(birth.key)
            finally:
                if listening is not None:
                    sys.setprofile(listening)

    return gone


def _reaches_beside(args: Any, kwargs: Any) -> bool:
    """Whether `as_strided` with these arguments may show memory that the tensor itself does not."""
    return len(args) > 3 or "storage_offset" in kwargs or not dense(args[0])


def _sizes(m: operators.Meaning, args: Any, kwargs: Any) -> list[int]:
    """The bytes of each storage that an operator with named outputs writes."""
    return [t.untyped_storage().nbytes() for t in operators.written_by(m, args, kwargs)]


def _numbers_in(values: Any, dials: Dials) -> None:
    for v in values:
        kind = type(v)
        if kind is float:
            dials.see(v)
        elif (kind is list or kind is tuple) and v and not isinstance(v[0], torch.Tensor):
            _numbers_in(v, dials)
