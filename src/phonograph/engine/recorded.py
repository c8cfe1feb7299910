"""A recorded function: what `pg.record` returns, and the corridor that each of its calls goes through.

    describe the call ─► a recording fits? play it
                      ─► not warmed up?    run live, beside
                      ─► otherwise         record, then play that recording for this very call
                      ─► refused?          run live, and say why once

Warm-up calls are the user's own first calls, one signature at a time. While one function warms up or is captured, other
recorded functions that it calls simply run as part of it.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import chain
from types import FunctionType
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad

from .._torch import autograd as torch_autograd
from .._torch import ddp as torch_ddp
from .._torch import dynamo as torch_dynamo
from .._torch import modes as torch_modes
from .._torch import modules as torch_modules
from .._torch.dynamo import compiling, ended_by, run_where_traced
from .._torch.skipped_frames import passes_on
from ..aten.operators import meaning
from ..autograd.backward import Backward, Forward
from ..autograd.function import TWICE, Joint
from ..autograd.saved_hooks import Tracing
from ..call.growing_sizes import Growth
from ..call.live_function import Marked
from ..call.recurring_objects import Regulars
from ..call.signature import Call, describe, modes, stands_in
from ..capture.ddp_reducer import begun_by
from ..capture.live_results import Notes, noting
from ..capture.recording import BEGINS_ANEW, MEMORY, Entangled, Recording
from ..capture.value_checks import look, lookouts
from ..devices import device_for, lock, owned
from ..devices.cuts import Unmarked
from ..devices.segments import Diverged
from ..errors import Attached, Decides, Elsewhere, Overlooked, Refusal, RunsLive, Unpadded, Unrecordable, Unseen
from ..guards.carried_state import Carried, Carries, tensors_in
from ..guards.followed_numbers import Fixed, Following
from ..guards.packages import Packages
from ..guards.reachable import Reach
from ..options import Options, overloads, switched_off
from ..python.gc_control import uncollected
from ..python.identity import identity
from ..python.origin import is_users, users_level, users_line
from ..state import capturable as optimizers
from ..state.reentrancy import Within, inside
from ..statistics import Counters, Observed, Stats, logger, totals
from ..values.keys import NoSignature
from ..values.object_layout import layout_of
from ..values.pytree import Opens, flatten, kinds, labels, path_to
from ..values.pytree import inside as within_label
from ..values.wording import MARKED, Naming, defined_at
from . import process_groups as ranks
from .attached_results import settled
from .binding import Binding
from .capture_terms import Concessions, Placement, Terms
from .clearance import fed
from .clearing import cleared, obstructing
from .contained import Contained
from .current_capture import recording_here
from .history import CHANGES, PATIENCE, History
from .known_calls import KnownCalls, Undescribed
from .locking import acquired
from .player import GRAD, Player, uses
from .profitability import Took, Trial, Turn, Unrewarding, gradients_move, on_trial
from .recorder import record
from .resting import Alike, Rest
from .shelf import Found, Shelf
from .standing_refusals import Grounds
from .uncalled_modules import Overhearing
from .verify import repeats, verified

__all__ = ["Recorded", "counted", "together"]

P = ParamSpec("P")
R = TypeVar("R")

_ATTEMPTS = 3  # captures that may fail for a passing reason before a signature stays live
_GROUNDS = 64  # refusals of one function that have grounds
_STEADY = "zero_grad(set_to_none=False) where they are made, or pg.record the model that makes them: then they stay in place"
_VARIES = "pass it as an argument, or keep it out of the recorded function; a number is best kept in a tensor: t.fill_(n)"
_COMPILED = "is part of what torch.compile compiles, which takes it for a plain function"
_COMPILE_FIRST = (
    'compile first, and record that: pg.record(torch.compile(model)); or torch.compile(..., backend="phonograph")'
    "; on the CPU, do not compile what you record"
)
_ONLY_CAPTURED = Refusal("has a backward that is to run live (override_cudagraphs), of attention that draws random numbers, "
                         "which can only be captured", "override_cudagraphs(fwd=False)")  # fmt: skip
_AT_ONCE = (
    "lies in DistributedDataParallel, which averages gradients as they come, and a recorded backward gives all at once: "
    "record the whole step, and averaging goes on meanwhile"
)
_BLOCKED = 6  # recordings of one signature that may all be in the way before it runs live
_UNSETTLED = 4  # forwards that gave way to others, in a loop that settles: a few in the first steps
_NAMED = 16  # things that have changed, for `explain`
_EARLY = 3  # live calls before which memory that nobody uses is given back
_SIGNATURES = 4096  # signatures that are remembered

_DECISIVE = 8  # places where a call may read numbers by which it goes on
_UNLUCKY = 4  # calls in turn that such a number ends, before it is taken for another from now on

_LOOKS = 8  # captures of one call, each after the one before heard code run that reads more
_NONE: list[Player] = []  # recordings of a signature that runs live

_UNREPEATED = 64  # signatures that never come again...
_NEARLY = 3  # ...among so many times as many calls


@contextmanager
def _relying_on(reach: Reach) -> Iterator[None]:
    """What is refused within the block, a call is that could get at this."""
    try:
        yield
    except Refusal as refusal:
        refusal.reach = reach
        raise


def _grounds(refusal: Refusal) -> Grounds | None:
    """What a refused call has relied on, if that can be told."""
    with suppress(Refusal), Contained("looked at what a refusal relies on"):
        return Grounds.of(refusal.reach, refusal.places)
    return None


class _Change:
    """Something that recordings rely on: how often it was found to be another, and where it is read (``file:line``)."""

    __slots__ = ("times", "where")

    def __init__(self, where: str) -> None:
        self.times = 0
        self.where = where

    def __str__(self) -> str:
        return f" (read at {self.where})" if self.where else ""


class Recorded(Binding, Observed, Generic[P, R]):
    """A function that is recorded, one recording a signature, and played back.

    Call it like the function it wraps. Use `phonograph.stats`, `phonograph.explain` and `phonograph.reset` on it.
    """

    _watches_sizes = True
    """Whether sizes that grow are noticed, and recordings that are played keep their places."""
    _measures = True
    """Whether a recording has to pay."""

    def __init__(self, function: Callable[P, R], options: Options) -> None:
        functools.update_wrapper(self, function)
        self.__wrapped__ = function
        self._function: Callable[P, R] = function
        self.options = options
        self.name = options.name or str(getattr(function, "__qualname__", type(function).__qualname__))
        Binding.__init__(self)
        self._marked = options.fallback == "split"  # whether it may call marked functions
        self._split_at = frozenset(x for name in options.split_at for x in overloads(name) if not meaning(x).communicates)
        self._shelf = Shelf(options.max_recordings, options.max_bytes)
        self._histories: OrderedDict[Any, History] = OrderedDict()
        self._counters = Counters()
        self.remarks: tuple[str, ...] = ()  # of who has made it, for `explain`
        self._devices: set[Any] = set()
        self._reasons: dict[str, Refusal] = {}
        self._changes: dict[str, _Change] = {}  # what recordings have relied on and changed, by name
        self._unplayed = 0
        self._following = Following()
        self._displaced = 0  # recordings of forwards that gave way to others, because of tensors that were held
        self._heard: frozenset[str] = frozenset()  # names by which code that ran may have read what was overlooked
        self._regulars = Regulars(functools.partial(getattr, self._counters, "calls"))
        self._packages = Packages()
        self._carried = Carried()
        self._met: list[weakref.ref[Any]] = []  # functions that ran, classes and objects to which nothing leads from here
        self._unrepeated = 0  # signatures that were met and did not come again...
        self._counted_from = 0  # ...since the function had so many calls
        self._last_key: Any = None
        self._differs = ""  # how the last of those differs from the one before
        self._growth, self._alike = Growth(), Alike()
        self._naming: Naming | None = None
        self._reset_wanted = False
        self._known_calls, self._undescribed, self._rest = KnownCalls(), Undescribed(), Rest()
        self._doubts: list[tuple[Callable[[], bool], Refusal]] = []
        self._grounded: list[History] = []  # whose refusals have grounds, the oldest first
        self._trials: dict[Any, Trial] = {}  # of recordings that have yet to show that they pay, by signature
        self._timing = False  # whether there are any, and calls are to be timed
        self._entangled = Entangled()
        self._stopped: Refusal | None = None  # why it runs live from now on, where gradients are wanted
        self._backwards: weakref.WeakSet[Recorded[Any, Any]] = weakref.WeakSet()
        self._never = _never(function)
        self._for_good: Refusal | None = None  # why it runs live whatever the arguments, once that was said
        self._steps = optimizers.is_step(function)
        self._owner: weakref.ref[torch.nn.Module] | None = None  # the module whose calls these are
        self._overhearing: Overhearing | None = None  # until it is called
        given = getattr(function, "__dict__", {}).keys() - {"__wrapped__"}
        self.own = frozenset([*vars(self), "own"]) - given  # all other attributes are the user's

    def __repr__(self) -> str:
        return f"<recorded {self.name}: {len(self._shelf)} recordings>"

    @property
    def _kind(self) -> Callable[[Any, Options], Recorded[Any, Any]]:
        return Recorded

    @property
    def _all(self) -> list[Recorded[Any, Any]]:
        """This, and what instances have of their own."""
        return [self, *(one for one in self._bound if isinstance(one, Recorded))]

    def again(self, function: Callable[..., Any]) -> Recorded[Any, Any]:
        """The same for another function."""
        return self._kind(function, self.options)

    # -- the corridor

    @passes_on
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling() or compiling() is not None:
            self.taken_as_plain()
            return self._function(*args, **kwargs)
        other = None if self._owner is None else torch_modules.other_calling(sys._getframe(1), self._owner())
        if (Within.running and inside()) or switched_off() or owned():
            return (other or self._function)(*args, **kwargs)
        if other is not None:
            return self._of_another(other, args, kwargs)
        if lookouts:
            look()
        if self._for_good is not None and (self._never is not None or torch.is_grad_enabled()):
            self._count_free(self._for_good)
            return self._function(*args, **kwargs)
        if self._timing:
            return self._timed(args, kwargs)  # type: ignore[no-any-return]
        if (refusal := self._rest.refusal) is not None and self._rest.passes():
            self._count_free(refusal)
            return self._function(*args, **kwargs)
        if not lock.acquire(False) and not acquired():
            self._counters.calls += 1
            self._counters.live += 1
            return self._function(*args, **kwargs)
        try:
            known = self._known_calls.find(args, self._with_state(kwargs))
            if known is not None:
                kind, tensors = known
                free = None if kind.history is None else self._still(kind.history)
                if kind.history is None and (played := kind.play(tensors)) is not None:
                    counters = self._counters
                    result, copied = played
                    counters.calls += 1
                    counters.replayed += 1
                    counters.bytes_copied += copied
                    return result  # type: ignore[no-any-return]
            else:
                free = self._undescribed.still(args, kwargs)
            if free is None:
                traced = torch.compiler.is_compiling()  # `torch.export`, say, which runs it to see what it does
                if not traced:
                    answered, value = self._answer(args, kwargs)
        finally:
            lock.release()
        if free is not None:
            self._count_free(free)
            return self._function(*args, **kwargs)
        if traced:
            return self._function(*args, **kwargs)
        return value if answered else self._refused(value, args, kwargs)  # live, and no business of other threads

    def _still(self, history: History) -> Refusal | None:
        """Why a call of this signature runs live, if it does."""
        calls = self._rest.looked()
        self._counted_from += calls - 1
        refusal = history.still(calls, alone=self._rest.of == identity(history))
        self._rest.of = identity(history)
        if refusal is not None:
            self._rests(refusal)
        return refusal

    def _rests(self, refusal: Refusal) -> None:
        """Another call runs live of which that was to be expected; perhaps the next few are not looked at."""
        if not (len(self._shelf) or self._trials) and self.options.fallback != "error":
            self._rest.note(refusal)

    def _count_free(self, refusal: Refusal) -> None:
        """Count a call that runs live, of what has been said to do so."""
        counters, reason = self._counters, refusal.reason
        counters.calls += 1
        counters.live += 1
        counters.refusals[reason] = counters.refusals.get(reason, 0) + 1
        if self._steps:
            optimizers.stepped(self._function)

    def _answer(self, args: Any, kwargs: Any) -> tuple[bool, Any]:
        """(True, the result), or (False, why the call has to run live)."""
        with lock:
            self._counters.calls += 1
            try:
                call = self._described(args, kwargs)
                with Contained("looked for a recording"):
                    found = self._shelf.find(call)
                    if found.broken is not None and self._regulars.moved(call.leaves):
                        call = self._taken_apart(args, kwargs)
                        found = self._shelf.find(call)
                    clearing = False
                    waiting = found.waiting
                    if (obstructed := [p for p in waiting if p.obstructed()]) and not any(p.awaited() for p in waiting):
                        clearing = cleared(obstructed)
                        found = self._shelf.find(call)
                if found.player is not None:
                    if found.player.grads_held():
                        raise Refusal("a gradient of an earlier call is held", "clone p.grad instead of keeping it")
                    return True, self._play(found.player, call)
                history = self._history(call.key)
                refusal = self._still(history)
                if refusal is not None:
                    if call.key in self._trials:
                        self._note_grounds(self._trials[call.key], call)
                    if history.unsettled is None and not self._shelf.of(call.key) and self.options.fallback != "error":
                        self._known_calls.learn(call, _NONE, self._entangled, history)
                    raise refusal
                if clearing and any(map(obstructing, found.waiting)):  # not yet: what is there now, others hold
                    return True, self._warm_up(call, args, kwargs)
                if found.broken == BEGINS_ANEW:  # the live call puts it right for the recordings that are there
                    self._count_change(found.broken, history, call)
                    return True, self._warm_up(call, args, kwargs)
                found.broken = self._broken(found, history)
                if history.warm and not history.repeats:
                    self._note_again(history)
                if history.met is None:
                    history.met = next(uses)
                    if self._watches_sizes:
                        self._growing(call, history)
                if found.broken == GRAD and gradients_move():  # for a few calls: no reason to record anew
                    return True, self._warm_up(call, args, kwargs)
                self._spare(call, history)
                if history.warm < self.options.warmup:
                    history.warm += 1
                    if history.warm == 1:
                        self._note_signature(call)
                    self._rest.doubt()
                    return True, self._warm_up(call, args, kwargs)
                self._rest.doubt()
                gone = found.broken == GRAD and not self._marked
                gone = gone and all(player.grads_gone() for player in self._shelf.of(call.key))
                gone = gone or found.broken == MEMORY  # to which nothing of the user's has happened
                gradients = found.broken == GRAD
                seen = history.failed or gradients in history.warm_again
                if found.broken is not None and not (seen or gone) and self.options.warmup:
                    # What runs for the first time because something has changed must not do so in a dry run. (Nothing does
                    # because gradients are gone; and a live call would leave others, at other addresses. But marked functions
                    # run while gradients are there. Where several calls take turns, a live one is only for its like.)
                    self._count_change(found.broken, history, call)
                    for player in self._shelf.of(call.key):
                        self._following.want(player.recording.reliances.numbers_changed())
                    history.warm_again.add(gradients)
                    return True, self._warm_up(call, args, kwargs)
                history.warm_again.clear()
                history.failed = False
                try:
                    return True, self._play(self._made(call, found, history, gone), call)
                except Refusal as e:
                    if not self._needs_a_look(e, history, call):
                        raise
                    e.let_go()
                    return True, self._warm_up(call, args, kwargs)
                except (Carries, Opens) as e:
                    self._learn(e, call)
                    call = self._described(args, kwargs)  # which has another signature now
                    self._history(call.key, history)
                    self._counters.calls -= 1
                    return self._answer(args, kwargs)
            except NoSignature as e:
                refusal = Refusal(str(e), e.remedy)
            except Diverged as e:
                self._count_divergence(call, e)
                if e.torn:
                    raise RuntimeError(e.torn) from None
                refusal = e
            except Refusal as e:
                refusal = e
        refusal.let_go()
        return False, refusal

    def _learn(self, of: Carries | Opens, call: Call) -> None:
        """A capture has shown by what else calls are to be described."""
        of.__traceback__ = of.__context__ = of.__cause__ = None  # which keep what it has made
        if isinstance(of, Opens):
            self._regulars.by_attributes |= of.kinds
        elif not self._carried.learn(of.places, self._reach(call).met):
            raise RuntimeError(f"{of.places[0].path} is known to be carried")

    def _broken(self, found: Found, history: History) -> str | None:
        """What has changed since such a call was recorded, or refused."""
        return found.broken or (history.over if not found.blocked else None)

    def _described(self, args: Any, kwargs: Any) -> Call:
        """The call, taken apart.

        Raises:
            NoSignature: it cannot be.
            Refusal: it has to run live, whether there are recordings or not.
        """
        if self._never is not None:
            self._for_good = self._never if self.options.fallback != "error" else None
            raise self._never
        if self._overhearing is not None:  # it is called
            self._overhearing.stop()
            self._overhearing = None
        if self._reset_wanted:
            self.reset()
        while self._doubts:
            broken, refusal = self._doubts.pop()
            if broken():
                self._stop(refusal)
        if self._stopped is not None and torch.is_grad_enabled():
            self._for_good = self._stopped if self.options.fallback != "error" else None
            raise self._stopped
        self._eligible()
        try:
            with Contained("described the call"):
                call = self._taken_apart(args, kwargs)
        except NoSignature as e:
            if self.options.fallback != "error":
                self._undescribed.note(args, kwargs, Refusal(str(e), e.remedy))
            raise
        if self._regulars.gone:  # what was recorded for them keeps them, and they are no small things
            self._drop(self._shelf.discard_all(lambda key: stands_in(key, self._regulars.gone)))
            self._regulars.gone.clear()
        if self._regulars.bind(filter(self._entangled.reaches, call.containers)):
            return self._described(args, kwargs)
        if self._entangled and any(map(self._entangled.meets, call.tensors)):
            raise Refusal(Entangled.REASON, "pass a clone")
        if call.lent and self._marked:
            raise Refusal("gets a borrowed output, and might have to begin again", "pass a clone", this_call=True)
        return call

    def _taken_apart(self, args: Any, kwargs: Any) -> Call:
        call = describe(args, self._with_state(kwargs), self._named, self._regulars, self._following.arguments)
        return call._replace(like=(args, dict(kwargs)))

    def _with_state(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """What a call is given by name, and what it carries."""
        return {**kwargs, **self._carried.now()} if self._carried else kwargs

    def _named(self) -> Naming:
        """How reasons name the arguments."""
        self._naming = self._naming or Naming(self._function)
        return self._naming

    def _eligible(self) -> None:
        if torch_modes.dispatch_modes() or (torch_modes.function_modes() and torch_modes.default_device() is None):
            raise NoSignature("is called under a TorchFunctionMode or TorchDispatchMode, which must see every operator",
                              "leave the mode while it is called, or look on with PHONOGRAPH=off")  # fmt: skip
        if torch_modes.transformed():
            raise NoSignature("is called inside a transform of torch.func (grad, vmap, jvp)",
                              "record the function that calls the transform")  # fmt: skip
        if torch_modes.is_traced():
            raise NoSignature("is called while torch.jit.trace looks on, which must see every operator",
                              "trace the plain function, or with PHONOGRAPH=off")  # fmt: skip
        if torch_autograd.saved_tensors_hooks() is not None:
            raise NoSignature("is called where tensors saved for backward go through hooks (saved_tensors_hooks, save_on_cpu)",
                              "leave that context while it is called")  # fmt: skip
        if forward_ad._current_level >= 0:
            raise NoSignature("is called while forward-mode derivatives are computed",
                              "record the function that computes them, with torch.func.jvp")  # fmt: skip

    def _play(self, player: Player, call: Call) -> R:
        counters = self._counters
        if player.half_attached(call):
            raise Refusal("has a result that does not depend on an argument with a history of its own, as others do",
                          "record the parts, each with its own arguments")  # fmt: skip
        counters.replayed += 1
        every = self.options.verify
        if every and player.played and player.played % every == 0 and not (call.lent and call.lent_within(player.overwrites)):
            return self._verified(player, call)
        result, copied = player.play(call)
        counters.bytes_copied += copied
        if not self.options.verify:
            self._known_calls.learn(call, self._shelf.of(call.key), self._entangled)
        return result  # type: ignore[no-any-return]

    def _verified(self, player: Player, call: Call) -> R:
        reach = self._reach(call)
        args, kwargs = call.like

        def live() -> Any:
            with Within():
                return self._function(*args, **kwargs)

        own = player.recording.program.own_generators
        return verified(self.name, call, reach, live, lambda: player.play(call)[0], own)  # type: ignore[no-any-return]

    def _made(self, call: Call, found: Found, history: History, gone: bool = False) -> Player:
        """A new recording of this call, because none fits: perhaps because all gradients are `gone`, or the memory of one."""
        if found.broken is not None and (gone or not self.options.warmup):
            self._count_change(found.broken, history, call)
        if self._watches_sizes and not self._shelf.of(call.key) and not self._shelf.has_room(history.since):
            raise self._crowded(history)
        if history.attached and found.blocked >= self.options.max_recordings:
            raise Refusal("more calls than max_recordings wait for their backward, or for a result that it reads and you keep",
                          "raise it, keep a clone of such results, or record the whole sequence")  # fmt: skip
        if not (history.attached or isinstance(self._function, Backward)) and found.blocked > _BLOCKED:
            raise Refusal("outputs of earlier calls are held in the memory of all its recordings", "drop or clone them")
        spoiled = self._shelf.discard(call.key, lambda player: player.recording.spoiled)
        self._drop(spoiled)
        if history.attached:  # the new one will not be, and two have room for the activations of one
            displaced = self._shelf.discard(call.key, Player.obstructed)
            self._displaced += len(displaced)
            self._drop(displaced)
        crossed = found.blocked and not any(player.holding() for player in self._shelf.of(call.key))  # by others
        apart = bool(spoiled or crossed) or (isinstance(self._function, Backward) and self._function.forward.apart)
        history.tried = True
        try:
            return self._record(call, found.blocked, apart=apart)
        except Refusal as refusal:
            refusal.history = history
            last = refusal.final or history.attempts + 1 >= _ATTEMPTS
            grounds = _grounds(refusal) if last and not refusal.this_call else None
            if refusal.this_call or refusal.failed:
                history.failing = grounds
                history.changes -= found.broken is not None and history.over is None
                history.failed = True
                raise
            history.attempts += 1
            if last and isinstance(refusal, Unseen):
                history.unseen(refusal)
            elif last:
                self._refuse(history, refusal, grounds)
                self._alike.failed(call, refusal, grounds)
            raise

    def _refuse(self, history: History, refusal: Refusal, grounds: Grounds | None) -> None:
        """Let a signature run live for as long as these grounds hold. Those of the oldest refusals are given up, and it is
        tried again some time."""
        history.refuse(refusal, grounds)
        self._grounded += [history] if grounds is not None else []
        if len(self._grounded) > _GROUNDS and (oldest := self._grounded.pop(0)) is not history and oldest.standing:
            oldest.wait(oldest.standing[0].refusal)

    def _count_change(self, name: str, history: History, call: Call) -> None:
        """What has this name is not what it was when a recording was made that relies on it."""
        if name not in self._changes and len(self._changes) < _NAMED:
            self._changes[name] = _Change(self._read_at(name, call))
        change = self._changes.get(name, _Change(""))
        change.times += 1
        changes = history.changed(self._counters.replayed)
        if changes > CHANGES and history.over is not None and history.standing:
            raise history.wait(history.standing[0].refusal)
        if changes > CHANGES:
            # Those that only the call which made them has played would be looked at in each live call, and keep their memory.
            self._drop(self._shelf.discard(call.key, lambda player: player.played <= 1))
            what = f"{name} changes from call to call"
            if 2 * change.times < CHANGES:  # that alone would be no reason
                what = f"values that it relies on have changed {changes} times in quick succession, {name} the last"
            raise history.wait(Refusal(what, _STEADY if name == GRAD else _VARIES, change.where))

    def _read_at(self, name: str, call: Call) -> str:
        """Where what has this name is read (``file:line``); "" for what is no variable, attribute or item."""
        if " " in name and "'s " not in name:
            return ""
        last = re.split(r"\W+", name.rstrip("'\"])"))[-1]
        with suppress(Refusal), Contained("looked for who reads what has changed"):
            return self._reach(call).mentions.read_at(last)
        return ""

    def _needs_a_look(self, refusal: Refusal, history: History, call: Call) -> bool:
        """Whether the next capture needs a live call before: to know what an operator gives that runs live from now on, or
        because something was not seen to run there."""
        if isinstance(refusal, Fixed):
            self._following.fix((call.shape, at) for at in call.numbers)
            return True
        if isinstance(refusal, Elsewhere) and history.device is None and not call.tensors:
            history.device = refusal.device
            history.begin_again(refusal)
            return True
        if isinstance(refusal, Decides) and refusal.site not in history.decisive and len(history.decisive) < _DECISIVE:
            history.decisive |= {refusal.site}
            history.begin_again(refusal)
            return True
        if self.options.fallback == "split" and refusal.operator is not None and refusal.operator not in history.split:
            history.split |= {refusal.operator}
            history.begin_again(refusal)
            return True
        if isinstance(refusal, Unmarked) and not self._marked:
            self._marked = True
            history.begin_again(refusal)
        return isinstance(refusal, Unseen) and history.refusal is None

    def _count_divergence(self, call: Call, diverged: Diverged) -> None:
        """A replay could not go on after a live operator, which may give another shape from now on."""
        self._counters.replayed -= 1
        history = diverged.history = self._history(call.key)
        history.diverged = history.diverged + 1 if history.since_diverged == self._counters.replayed else 1
        history.since_diverged = self._counters.replayed
        if not diverged.decided or history.diverged >= _UNLUCKY:
            self._drop(self._shelf.discard(call.key, lambda player: player.recording.live_parts))
        reach = None
        with suppress(Refusal), Contained("looked at what the function can reach"):
            reach = self._reach(call)
        history.torn = history.torn or bool(diverged.torn)
        history.notes = Notes(
            history.split, reach, self._marked, diverged.done, decisive=history.decisive, arrived=diverged.arrived
        )
        if diverged.decided and history.diverged > _UNLUCKY:
            history.wait(Refusal(f"{diverged.said} reads another number nearly each time", diverged.remedy, diverged.where))
        elif not diverged.decided and history.changed(self._counters.replayed) > CHANGES:
            history.waits = 0
            refusal = Refusal(diverged.reason, diverged.remedy, diverged.where, reach=reach)
            self._refuse(history, refusal, _grounds(refusal))
            refusal.let_go()

    def _note_signature(self, call: Call) -> None:
        """A signature comes for the first time. Say so if nearly every call has one of its own."""
        self._unrepeated += 1
        last, self._last_key = self._last_key, call.key
        self._differs = _difference(last, call, self._named()) if last is not None else ""
        self._following.want_arguments(_numbers_that_differ(last, call))
        if self._counters.calls - self._counted_from > _NEARLY * max(self._unrepeated, _UNREPEATED):
            self._unrepeated, self._counted_from = 1, self._counters.calls
        if self._unrepeated > _UNREPEATED and self._differs:
            refusal = Refusal(f"is called with {self._differs} nearly each time", "pass numbers that change as "
                              "tensors; pad tensors to a few shapes (shapes=)", users_line())  # fmt: skip
            self._rests(refusal)
            raise refusal

    def _growing(self, call: Call, history: History) -> None:
        """A signature comes for the first time: perhaps it is one of which each call has another, one longer than the last.
        (That is a guess, for which no call is to fail: these sizes may come again.)"""
        if self.options.fallback == "error":
            return
        refusal = self._growth.of(call, self._counters.calls, self._named())
        if refusal is not None:
            history.warm += 1
            self._rests(refusal)
            raise refusal

    def _spare(self, call: Call, history: History) -> None:
        """Nothing is known yet of a signature: perhaps others like it could not be recorded, one after the other."""
        known = history.spared or history.tried or history.attempts or history.over or self._shelf.of(call.key)
        if known or self._marked or self.options.fallback != "live":
            return
        refusal = self._alike.expected(call)
        if refusal is not None:
            history.spare(refusal)
            self._rests(refusal)
            raise refusal

    def _note_again(self, history: History) -> None:
        """A signature comes for the second time."""
        history.repeats = True
        self._unrepeated = max(0, self._unrepeated - 1)

    def _history(self, key: Any, known: History | None = None) -> History:
        history = self._histories.setdefault(key, known or History(self._split_at, self._marked))
        self._histories.move_to_end(key)
        if len(self._histories) > _SIGNATURES:
            self._histories.popitem(last=False)
        return history

    # -- live

    def _warm_up(self, call: Call, args: Any, kwargs: Any) -> R:
        self._counters.live += 1
        optimizers.stepped(self._function)
        history = self._history(call.key)
        try:
            with Contained("looked at what the function can reach"):
                reach = None if self._runs_alike_anyway(call, history) else self._reach(call)
                device = device_for(torch.device("cpu")) if reach is None else self._device(call, reach)
                device.tidy()  # rather than between this call and the capture, which is to find this call's memory
        except Refusal:
            with Within(waits=True):
                return self._function(*args, **kwargs)
        place: Any = nullcontext()
        if reach is not None:
            self._marked = self._marked or reach.marked
            # Other threads know nothing of a stream of ours, nor does code that names the caller's: that stays on the caller's.
            elsewhere = reach.mentions.orders_streams or device.is_current(reach.streams)
            lasting = optimizers.states_to_come(self._function, reach.optimizers) if self._counters.live == 1 else 0
            if not elsewhere and self._counters.live <= _EARLY:  # not again and again, where shapes are ever new
                device.release_unused()
            place = nullcontext() if elsewhere else device.beside(fed(call, device), lasting, reach.sharded)
        notes = Notes(history.split, reach if history.split or self._marked else None, self._marked, strict=history.torn,
                      decisive=history.decisive)  # fmt: skip
        history.notes = notes
        before, modules = device.allocated, () if reach is None else reach.modules
        steps = begun_by(modules)
        with Within(waits=True), place, noting(notes):
            result = self._function(*args, **kwargs)
        history.ran = True
        history.averages = history.averages or begun_by(modules) > steps
        history.left = max(0, device.allocated - before)
        key = (*call.key[:-1], modes())
        if key != call.key:  # the first call of attention, say, decides in which order torch tries its kernels
            self._history(key, history)
        self._follow(call, result, device, history)
        return result

    def _runs_alike_anyway(self, call: Call, history: History) -> bool:
        """Whether a live call does the same whatever the function can reach: the CPU is all there is, and nothing is marked."""
        marked = Marked.any_made or self._marked or history.split
        return not (marked or torch.cuda.is_initialized()) and all(t.device.type == "cpu" for t in call.tensors)

    def _follow(self, call: Call, result: Any, device: Any, history: History) -> None:
        """Hear of the backward of a live call, which runs where that did. A backward that is itself to be differentiated has to
        run live; it cannot be foreseen."""
        leaves: list[Any] = []
        flatten(result, leaves)
        recorded = weakref.ref(self)

        nodes: set[Any] = set()
        for leaf in leaves:
            with suppress(RuntimeError):  # torch does not say it of a view made without gradients, whose base was written since
                nodes.add(leaf.grad_fn if isinstance(leaf, torch.Tensor) else None)
        nodes.discard(None)
        left = set(map(identity, nodes))
        whose = self._owner is not None  # a step may run its backward itself and return the spent loss
        if nodes and whose and self.options.outputs != "borrow" and not any(t.requires_grad for t in call.tensors):
            history.attached = True  # so that the capture need not find it out
        reads = [t.detach() for t in call.tensors if nodes and device.pool.lease_of(t) is None]

        @ended_by
        def notice(node: int, grads: Sequence[torch.Tensor | None]) -> None:
            if torch_autograd.may_run_backward():  # else only some gradients are asked for
                left.discard(node)
                history.ran_backward = history.ran_backward or not left
            if torch.is_grad_enabled() and (me := recorded()) is not None:
                me._stop(replace(TWICE, where=users_line()))
            torch_autograd.when_backward_ends(device.backward_ends)
            device.backward_begins([*reads, *_there(grads)])
            if not torch_autograd.keeps_graph():
                reads.clear()

        @ended_by
        def passes(grads: Sequence[torch.Tensor | None]) -> None:
            device.backward_passes(_there(grads))

        for node in nodes:
            node.register_prehook(functools.partial(notice, identity(node)))
        for passed in {t.grad_fn for t in call.tensors if nodes}:
            if passed is not None:
                passed.register_prehook(passes)

    def _stop(self, refusal: Refusal) -> None:
        """A backward has shown that calls have to run live where gradients are wanted."""
        self._forget_known()
        self._stopped = refusal.at(users_line())

    def _forget_known(self) -> None:
        """The next call is taken apart."""
        self._known_calls.clear()
        self._rest.over()

    def _doubt(self, broken: Callable[[], bool], refusal: Refusal) -> None:
        """Likewise, should this say so at the next call."""
        self._forget_known()
        self._for_good = None
        self._doubts.append((broken, refusal))

    def _live(self, refusal: Refusal, args: Any, kwargs: Any) -> R:
        """A live call after the warm-ups."""
        self._counters.live += 1
        optimizers.stepped(self._function)
        notes = refusal.history.notes if isinstance(refusal, Diverged) else None
        again = nullcontext() if notes is None else Within(waits=True)
        with again, noting(notes):
            result = self._function(*args, **kwargs)
        if refusal.history is not None:
            refusal.history.ran = True
        return result

    def _refused(self, refusal: Refusal, args: Any, kwargs: Any) -> R:
        """Run live, and say why: before the call, or after it where the call itself may be what is wrong."""
        if not refusal.failed:
            self._count(refusal)
            try:
                return self._live(refusal, args, kwargs)
            finally:
                if refusal.history is not None:
                    refusal.history.settle()
        result = self._live(refusal, args, kwargs)
        self._failed(refusal)
        self._count(refusal)
        return result

    def _failed(self, refusal: Refusal) -> None:
        """A capture failed and the live run did not: after a few times the signature stays live."""
        if refusal.history is not None:
            refusal.history.attempts += 1
            if refusal.history.attempts >= _ATTEMPTS:
                history: History = refusal.history
                self._refuse(history, replace(refusal, failed=False, history=None), history.failing)
                history.settle()

    def _count(self, refusal: Refusal) -> None:
        self.say(refusal)
        if self.options.fallback == "error":
            raise Unrecordable(f"{self.name} cannot be recorded: {refusal.at(users_line())}")

    def say(self, refusal: Refusal) -> None:
        """Count what is said of this function, and say it the first time."""
        if self._counters.refuse(refusal.reason):
            refusal = self._reasons[refusal.reason] = refusal.at(users_line())
            self._say(refusal)

    def _say(self, refusal: Refusal) -> None:
        logger.info("%s runs live: %s", self.name, refusal)
        if self.options.fallback != "error" and not isinstance(refusal, Unrewarding):
            warnings.warn(f"{self.name} runs live: {refusal}", RunsLive, stacklevel=users_level())

    @run_where_traced
    def taken_as_plain(self) -> None:
        """This is called in code that `torch.compile` compiles, which runs as it would without us. That is said, whatever
        `fallback` is. (Its backend may be ours, or the code may be part of what is recorded: then nothing is lost.)"""
        if inside() or switched_off():
            return
        refusal = self._reasons.get(_COMPILED)
        if refusal is None:
            backend = torch_dynamo.compiling_backend()
            if str(getattr(backend, "__module__", "")).startswith("phonograph.") or torch.compiler.is_exporting():
                return
            traced = [f"{file}:{line}" for file, line in torch_dynamo.traced_stack() if is_users(file)]
            refusal = Refusal(_COMPILED, _COMPILE_FIRST, (traced or [users_line()])[-1])
            self._reasons[refusal.reason] = refusal
            logger.info("%s runs live: %s", self.name, refusal)
            warnings.warn(f"{self.name} runs live: {refusal}", RunsLive, stacklevel=users_level())
        self._counters.refuse(refusal.reason)

    def of(self, module: torch.nn.Module) -> Recorded[P, R]:
        """Note that calls of this module go through here."""
        self._owner = weakref.ref(module)
        self._overhearing = Overhearing.of(self, module)
        return self

    def _of_another(self, call: Callable[..., Any], args: Any, kwargs: Any) -> R:
        """A module is called that has the attributes of ours, but may have other parameters: it is that which has to run."""
        self._counters.calls += 1
        self._count(Refusal("is called as part of a module that was made with the attributes of this one (as by DataParallel)",
                            "record that one: pg.record(module)"))  # fmt: skip
        self._counters.live += 1
        return call(*args, **kwargs)  # type: ignore[no-any-return]

    # -- recording

    def _reach(self, call: Call) -> Reach:
        slots, name = {identity(t) for t in call.tensors}, self._named()
        objects = [(name(path_to(call.shape, i)), x) for i, x in enumerate(call.leaves) if identity(x) not in slots]
        objects += [("a key of an argument", x) for label in labels(call.shape) for x in within_label(label.value)]
        parameters = [(f"argument {i}", t) for i, t in enumerate(call.tensors) if isinstance(t, torch.nn.Parameter)]
        classes = [(kind.__qualname__, kind) for kind in kinds(call.shape)]
        found = [x for ref in self._met if (x := ref()) is not None]
        met = [((x if _has_code(x) else type(x)).__qualname__, x) for x in found]
        with uncollected():
            reach = Reach([(self.name, self._function), *objects, *parameters, *classes, *met], self._heard)
        reach.packages = self._packages
        for t in chain.from_iterable(map(tensors_in, self._carried.standing())):  # an argument, wherever else it is found
            reach.tensors.pop(identity(t), None)
        self._regulars.bind(filter(_among(reach.met), call.containers))
        self._regulars.bind([t for t in call.tensors if type(t) is torch.Tensor and _is_trained(t, reach)])
        if reach.borrowed:
            raise Refusal(f"can reach a borrowed output ({reach.borrowed[0]})", "pass it as an argument, or keep a clone",
                          this_call=True)  # fmt: skip
        return reach

    def _device(self, call: Call, reach: Reach) -> Any:
        kinds = {t.device for t in call.tensors}
        if any(d.type == "cuda" for d in kinds) and len(kinds) > 1:
            found, remedy = self._one_of_each(call), "move all arguments to one device"
            if any("." in place for place in found):
                remedy += ("; what an object moves there by itself where it is first used, as a cache does, may stay: calls "
                           "that get it then are recorded")  # fmt: skip
            raise Refusal(f"takes {' and '.join(found)}", remedy)
        outside = [t.device for _, t in reach.tensors.values() if t.device.type == "cuda"]
        if outside and not any(d.type == "cuda" for d in kinds):
            if kinds:
                name = next(name for name, t in reach.tensors.values() if t.device.type == "cuda")
                raise Refusal(f"takes {' and '.join(self._one_of_each(call))}, and works with {name} on CUDA",
                              "move the arguments to the device before the call")  # fmt: skip
            kinds = {outside[0]}
        return device_for(next(iter(kinds), self._history(call.key).device or torch.device("cpu")))

    def _one_of_each(self, call: Call) -> list[str]:
        """For each device an argument that is there."""
        found = {str(t.device): place for t, place in reversed([*zip(call.tensors, call.places, strict=True)])}
        return sorted(f"`{self._named()(path_to(call.shape, place))}` on {device}" for device, place in found.items())

    def _record(self, call: Call, blocked: int, *, apart: bool) -> Player:
        history = self._history(call.key)
        if self._unplayed >= 4 * self.options.max_recordings and history.patience == PATIENCE:
            # But one that comes again that often is worth a recording.
            raise history.wait(Refusal("nearly every call has a new signature", "pad to a few shapes, or raise max_recordings"))
        with Contained("made a recording"), uncollected():
            reach = self._reach(call)
            if self._regulars.stands_any((*call.containers, *call.tensors)):
                raise Unseen("gets an object that it can reach by another name as well", "call it again", this_call=True)
            with _relying_on(reach):
                device = self._device(call, reach)
            device.tidy()
            device.pool.take_back(keep=[borrowed.loan for borrowed in call.lent.values()])
            in_flight = self.options.takes_turns or any(player.awaited() for player in self._shelf.of(call.key))
            recording = self._capture(call, reach, device, blocked, apart, in_flight)
            if self.options.live_backward and recording.backward is not None and recording.backward.only_captured:
                raise replace(_ONLY_CAPTURED)
            device.settle(recording)
            device.pool.add(recording)
            if recording.communicates:
                ranks.follow(recording, self._counters)
            player = Player(recording, device)
            if recording.backward is not None:
                ran = history.ran_backward
                gradients_go = ran and not recording.backward.gradients_stay(call.tensors)
                recording.backward.forward = Forward(
                    stop=_weakly(self._stop), doubt=_weakly(self._doubt), once=device.once, takes_turns=in_flight, apart=apart,
                    averaged=torch_ddp.averaging() is not None, room=recording.room if gradients_go else None,
                )  # fmt: skip
                if _loses_overlap(recording):
                    self._advise(_AT_ONCE)
                warmup = 0 if ran or recording.backward.only_captured else min(self.options.warmup, 1)
                name = f"the backward of {self.name}"
                options = replace(self.options, name=name, warmup=warmup, verify=0, keep="always")  # as long as the forward
                player.joint = Joint(recording.backward, self._backwards_with(options), device.joining)
        self._entangled |= recording.entangled
        self._devices.add(device)
        self._counters.recorded += 1
        self._alike.made()
        totals().recorded += 1
        self._unplayed += 1
        self._known_calls.forget(call.key)
        self._drop(self._shelf.add(call.key, player))
        averaged = _loses_overlap(recording)
        untried = self._measures and not history.pays and call.key not in self._trials
        if untried and on_trial(recording, self.options, averaged=averaged):
            spare = recording.footprint.nbytes <= device.spare
            self._trials[call.key] = Trial(player, history, may_run_live=spare, averaged=averaged)
            self._timing = True
        logger.debug("%s", recording)
        return player

    def _advise(self, remark: str) -> None:
        if remark not in self.remarks:
            self.remarks += (remark,)
            logger.info("%s: %s", self.name, remark)

    def _crowded(self, history: History) -> Refusal:
        """No recording is made of a signature, as all that are there have been played since it was last refused for that."""
        if not history.repeats:
            refusal = Refusal("nearly every call has a new signature", "pad to a few shapes, or raise max_recordings")
        else:
            most, met = self.options.max_recordings, len(self._histories)
            refusal = Refusal(f"has more signatures in rotation than max_recordings={most}",
                              f"max_recordings={max(most + 1, met)}, or pad to a few shapes (shapes=)")  # fmt: skip
        history.refuse(refusal)
        history.crowded, history.waits = next(uses), history.room
        history.room *= 2
        return refusal

    def _backwards_with(self, options: Options) -> Callable[[Any], Recorded[Any, Any]]:
        """What records a backward of ours, and does not hold us."""
        kind, known = self._backward_kind(), self._backwards
        if options.live_backward:
            return lambda backward: backward

        def recorded(function: Any) -> Recorded[Any, Any]:
            backward = kind(function, options)
            known.add(backward)
            return backward

        return recorded

    def _backward_kind(self) -> Callable[[Any, Options], Recorded[Any, Any]]:
        return Recorded

    def _capture(self, call: Call, reach: Reach, device: Any, blocked: int, apart: bool, turns: bool) -> Recording:
        borrow, history = self.options.outputs == "borrow", self._history(call.key)
        siblings = [player.recording for player in self._shelf.of(call.key)]
        sizes = [recording.footprint.nbytes for recording in siblings] or [history.left]
        for _ in range(_LOOKS):
            tracing = Tracing(device.torch_device) if history.attached else None
            expected, sibling = max(sizes) if history.attached else 0, next(iter(siblings), None)
            placement = Placement(blocked, apart, turns, borrow, expected, sibling)
            terms = Terms(placement, tracing, history.notes, ran=history.ran, numbers=self.options.fallback == "split",
                          carried=self._carried, following=self._following,
                          concessions=Concessions(averages=history.averages))  # fmt: skip
            self._packages.before()
            try:
                with Within(), _relying_on(reach):
                    recording = record(self.name, self._function, call, reach, device, terms)
                settled(tracing)
                if self.options.verify and (twice := repeats(recording)) is not None:
                    raise Refusal(f"{twice}, which verify would do twice", "record it without verify")
                return recording
            except Overlooked as e:
                self._heard |= e.names
                self._met += [weakref.ref(one) for one in e.met]
                e.__traceback__ = e.__context__ = None  # which would keep what the capture has made
                e.met = (*filter(_has_code, e.met),)  # others may be the capture's own
                reach = self._reach(call)
            except Attached:
                if history.attached or borrow:
                    raise
                history.attached = True
            finally:
                if tracing is not None:
                    tracing.end()
        raise Refusal("runs other code each time it is looked at", f"call the same in each call, {MARKED}", final=False)

    # -- whether recordings pay

    def _timed(self, args: Any, kwargs: Any) -> Any:
        """A call while some recordings are on trial."""
        self._timing = False
        try:
            trials, counters = list(self._trials.values()), self._counters
            before, calls, recorded = [*map(self._ways, trials)], counters.calls, counters.recorded
            took = Took.here(trials[0].device) if trials else None
            if took is not None:
                for trial in trials:
                    trial.next(took)
            result = Recorded.__call__(self, *args, **kwargs)
            if took is not None:
                took.end()
                if (counters.calls, counters.recorded) == (calls + 1, recorded) and lock.acquire(blocking=False):
                    try:
                        for trial, ways in zip(trials, before, strict=True):
                            self._see(trial, ways, took)
                    finally:
                        lock.release()
            return result
        finally:
            self._timing = bool(self._trials)

    def _ways(self, trial: Trial) -> tuple[int, int]:
        """How many calls of a signature were played, and ran live."""
        return sum(player.played for player in self._shelf.of(trial.key)), trial.history.held

    def _see(self, trial: Trial, before: tuple[int, int], took: Took) -> None:
        """A call took so long; it may have been one of this trial's."""
        if self._trials.get(trial.key) is not trial:
            return
        played, live = self._ways(trial)
        if (played - before[0], live - before[1]) in ((1, 0), (0, 1)):
            trial.see(took, live > before[1])
        turn = trial.turn()
        if turn is Turn.GO_ON:
            return
        if turn is Turn.RUN_LIVE:
            self._known_calls.forget(trial.key)
            trial.set_aside(self._shelf.discard(trial.key, lambda _: True))
            return
        aside = trial.take_back()
        if aside:
            self._known_calls.forget(trial.key)
        if turn is Turn.DROP:
            self._drop(aside)
            self._refuse(trial.history, trial.verdict(), trial.grounds)
        else:
            self._shelf.put_back(trial.key, aside)
        if turn is not Turn.PLAY:
            trial.history.pays = turn is Turn.KEEP
            del self._trials[trial.key]

    def _note_grounds(self, trial: Trial, call: Call) -> None:
        """A live call is about to show on what it relies."""
        if not trial.noted:
            trial.noted = True
            with suppress(Refusal), Contained("looked at what the function can reach"):
                trial.refusal.reach = self._reach(call)
                trial.grounds = trial.history.unsettled = _grounds(trial.refusal)
            trial.refusal.let_go()

    def _drop(self, players: list[Player]) -> None:
        for player in players:
            self._known_calls.forget(player.recording.key)
            player.close()
            if player.played > 1:
                self._unplayed = 0

    # -- for the observers

    def stats(self) -> Stats:
        self._tidy()
        return together(self._all, Counters())

    def reset(self) -> None:
        """Drop all recordings and what was learned; free their memory. At the next call, if another thread is busy or this is
        asked for in a capture, which counts on all memory that it has seen."""
        if inside() or recording_here() or (not lock.acquire(False) and not acquired()):
            for one in self._all:
                one._reset_wanted, one._for_good = True, None
                one._forget_known()
            return
        try:
            self._reset_wanted = False
            self._known_calls, self._undescribed, self._rest = KnownCalls(), Undescribed(), Rest()
            self._drop([*self._shelf.clear(), *(player for trial in self._trials.values() for player in trial.aside)])
            self._trials.clear()
            self._timing = False
            self._histories.clear()
            self._grounded.clear()
            self._reasons.clear()
            self._changes.clear()
            self._carried = Carried(self._carried.learns)
            self._following = Following()
            self._unrepeated, self._counted_from, self._displaced = 0, self._counters.calls, 0
            self._growth, self._alike = Growth(), Alike()
            self._stopped = self._for_good = None
            self._packages = Packages()
            self._regulars = Regulars(functools.partial(getattr, self._counters, "calls"))
            self._unplayed = 0
            for mine in (*self._all[1:], *self._backwards):
                mine.reset()
            self._entangled = Entangled()
            self._tidy()
        finally:
            lock.release()

    def _tidy(self) -> None:
        if inside():
            return  # a capture counts on all memory that it has seen
        if lock.acquire(blocking=False):  # not now, if another thread is busy: it may be waiting for this one
            try:
                for device in self._devices:
                    device.tidy()
            finally:
                lock.release()

    def explain(self) -> str:
        s = self.stats()
        lines = [f"{self.name}: {s.calls} calls, {s.live} live, {s.replayed} replayed, {s.recorded} recordings made"]
        if self._unrepeated > 2 and self._differs:
            calls = self._counters.calls - self._counted_from
            lines.append(f"{self._unrepeated} of the last {calls} calls had a signature of their own: {self._differs}")
        if self._displaced > _UNSETTLED:
            lines.append(f"recorded anew {self._displaced}x: what is held of other results, or of gradients, lay where its "
                         "recordings work; drop it, or keep a clone, before the next call")  # fmt: skip
        lines += [f"changed {change.times}x: {name}{change}" for name, change in list(self._changes.items())]
        aside = [player for trial in list(self._trials.values()) for player in trial.aside]
        lines += [str(p.recording) for p in [*self._shelf, *aside]]
        lines += [backward.explain() for backward in list(self._backwards)]
        reasons = {reason: refusal for one in reversed(self._all) for reason, refusal in one._reasons.items()}
        for reason, n in s.refusals.items():
            refusal = reasons.get(reason, reason)
            lines.append(f"{'not padded' if isinstance(refusal, Unpadded) else 'live'} {n}x: {refusal}")
        return "\n".join([*lines, *self.remarks])


def _loses_overlap(recording: Recording) -> bool:
    """Whether gradients come out of this one's backward to where they are averaged as they come, on a device that could go on
    meanwhile. (A compiled graph gives them at its end also where it is not recorded.)"""
    backward = recording.backward
    return backward is not None and backward.forward.averaged and backward.graph.lasting and recording.device.type == "cuda"


def counted(recorded: Recorded[Any, Any]) -> Counters:
    """What a recorded function has counted."""
    return recorded._counters


def together(recorded: Sequence[Recorded[Any, Any]], before: Counters) -> Stats:
    """The statistics of several recorded functions as one; `before`: what others counted that are gone."""
    counters = sum(map(counted, recorded), before)
    devices = set[Any]().union(*(mine._devices for mine in recorded))
    return counters.stats(sum(d.pool_bytes for d in devices))


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a function that may be gone by then. (A graph of autograd's has this: it must not keep a model of which an
    attribute may hold the graph. The garbage collector does not see all of such a circle.)"""
    of = weakref.WeakMethod(method)

    def called(*args: Any) -> Any:
        there = of()
        return there(*args) if there is not None else None

    return called


def _has_code(x: object) -> bool:
    """Whether this is a function or a class. (An object is not asked: it may say anything of its `__class__`.)"""
    return issubclass(type(x), (FunctionType, type))


def _is_trained(t: torch.Tensor, reach: Reach) -> bool:
    """Whether this is a leaf that the function can reach by another name as well, an optimizer's most often."""
    return t.requires_grad and t.is_leaf and identity(t) in reach.tensors


def _among(things: Sequence[Any]) -> Callable[[Any], bool]:
    """What says whether something is one of these objects."""
    known = {identity(x) for x in things}
    return lambda thing: layout_of(type(thing)) is not None and identity(thing) in known


def _there(grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Those of these gradients that are there, as tensors of their own."""
    return [grad if torch_modes.is_batched(grad) else grad.detach() for grad in grads if grad is not None]


def _never(function: Any) -> Refusal | None:
    """Why a function can never be recorded, whatever its arguments."""
    inner = inspect.unwrap(function) if callable(function) else function
    if inspect.iscoroutinefunction(inner) or inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        return Refusal("is a generator or coroutine function, which runs only after the call", "record what it calls",
                       defined_at(function))  # fmt: skip
    return optimizers.never(function)


def _difference(key: Any, call: Call, naming: Naming) -> str:
    """What is another in this call than in one with that key."""
    (shape, leaves, *_), (shape_now, leaves_now, *_) = key, call.key
    if shape == shape_now and len(leaves) == len(leaves_now):
        for i, (was, now) in enumerate(zip(leaves, leaves_now, strict=True)):
            if was != now:
                tensor = isinstance(call.leaves[i], torch.Tensor)
                return f"another {'shape or kind' if tensor else 'value'} of `{naming(path_to(call.shape, i))}`"
    return "arguments of another structure"


def _numbers_that_differ(key: Any, call: Call) -> list[Any]:
    """Which arguments are other numbers than in a call with that key, if nothing else is another."""
    if key is None or key[0] != call.key[0] or key[2:] != call.key[2:]:
        return []
    differing = [(i, a, b) for i, (a, b) in enumerate(zip(key[1], call.key[1], strict=True)) if a != b]
    numbers = all(type(x) is tuple and len(x) == 2 and x[0] is float for _, *both in differing for x in both)
    return [(call.shape, i) for i, *_ in differing] if numbers else []
