"""A recorded function: what `pg.record` returns, and the corridor that each of its calls goes through.

    fast path            play a call like an earlier one      known_calls.py
    signature            describe the call                    describer.py
    a recording fits     play it                              shelf.py, player.py
    none fits            refuse, warm up, or record           policy.py, live_run.py, making.py
    refused              run live, and report the reason      reports.py

Warm-up calls are the user's own first calls of each signature. Recorded functions that are called during a warm-up or a capture
run as plain functions.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from threading import get_ident
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import torch

from .._torch import modules as torch_modules
from .._torch.dynamic import Args, Kwargs, Thing
from .._torch.dynamo import compiling
from .._torch.skipped_frames import passes_on
from ..call.signature import Call, modes, stands_in
from ..capture.live_results import noting
from ..capture.value_checks import look, lookouts
from ..devices import lock, owned
from ..devices.segments import Diverged, TakenBack
from ..errors import Refusal, Unseen
from ..guards.carried_state import Carries
from ..options import Options, switched_off
from ..python.signals import deferred
from ..python.standing import unwound
from ..state import capturable as optimizers
from ..state.reentrancy import Nested, inside
from ..values.keys import NoSignature
from ..values.pytree import Opens
from . import audit, budget, figures
from .clearing import cleared, obstructing
from .contained import Contained
from .describer import refused_here
from .history import History
from .live_run import LiveRun
from .locking import Alongside, acquired
from .making import BackwardKind, loses_overlap
from .parts import Parts
from .player import Player
from .policy import Case, Step
from .profitability import on_trial
from .shelf import Found
from .uncalled_modules import UncalledModule, never_called
from .verify import verified

__all__ = ["Recorded"]

P = ParamSpec("P")
R = TypeVar("R")
Q = ParamSpec("Q")
S = TypeVar("S")

_AT_ONCE = (
    "lies in DistributedDataParallel, which averages gradients as they come, and a recorded backward gives all at once: "
    "record the whole step, and averaging goes on meanwhile"
)
_NONE: list[Player] = []  # the recordings of a refused signature


class Recorded(Parts, Generic[P, R]):
    """Recorded function, called like the function it wraps, with one recording for each signature.

    `phonograph.stats`, `phonograph.explain` and `phonograph.reset` take it.
    """

    def __init__(self, function: Callable[P, R], options: Options) -> None:
        functools.update_wrapper(self, function)
        self.__wrapped__ = function
        self._function: Callable[P, R] = function
        super().__init__(function, options)
        self._steps = optimizers.is_step(function)
        self._alongside = Alongside()
        self._owner: weakref.ref[torch.nn.Module] | None = None  # the module whose calls these are
        self._uncalled: UncalledModule | None = None  # until it is called
        self._attempt = 0.0  # seconds that the last one took to record a call
        given = getattr(function, "__dict__", {}).keys() - {"__wrapped__"}
        self.own = frozenset([*vars(self), "own"]) - given  # all other attributes are the user's

    @property
    def _kind(self) -> Callable[[Thing, Options], Recorded[..., object]]:
        return Recorded

    def again(self, function: Callable[..., Any]) -> Recorded[Any, Any]:
        """Record another function with the same options."""
        return self._kind(function, self.options)

    def of(self, module: torch.nn.Module) -> Recorded[P, R]:
        """Set the module whose calls are recorded here."""
        self._owner = weakref.ref(module)
        never = never_called(type(module))
        self._uncalled = UncalledModule.of(self, module) if never is None else None
        if never is not None and not switched_off():
            self.say(never)
        return self

    if TYPE_CHECKING:  # (a method's own arguments are those after `self`)

        @overload
        def __get__(self, instance: None, owner: type | None = None) -> Recorded[P, R]: ...
        @overload
        def __get__(self: Recorded[Concatenate[S, Q], R], instance: S, owner: type | None = None) -> Recorded[Q, R]: ...
        def __get__(self, instance: object, owner: type | None = None) -> object: ...

    # -- the corridor

    @passes_on
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling() or compiling() is not None:
            self.taken_as_plain()
            return self._function(*args, **kwargs)
        other = None if self._owner is None else torch_modules.other_calling(sys._getframe(1), self._owner())
        if (Nested.running and inside()) or switched_off() or owned():
            return (other or self._function)(*args, **kwargs)
        if other is not None:
            return self._of_another(other, args, kwargs)  # type: ignore[no-any-return]
        if lookouts:
            look()
        gate, rest = self._gate, self._backoff.rest
        closed = gate.closed is not None and (gate.never is not None or torch.is_grad_enabled())
        if not closed and self._trials.timing:
            again = functools.partial(Recorded.__call__, self, *args, **kwargs)
            return self._trials.timed(again)  # type: ignore[no-any-return]
        if closed or (rest.refusal is not None and rest.passes()):
            free, timed = gate.closed if closed else rest.refusal, None
        else:
            if not (lock.acquire(False) or acquired()) or (self._alongside.calls and not self._alone()):
                self._counters.calls += 1
                self._counters.live += 1
                return self._alongside.run(self._function, args, kwargs)
            try:
                describer = self._describer
                known = self._known_calls.find(args, describer.with_state(kwargs) if describer.carried else kwargs)
                if known is not None:
                    kind, tensors = known
                    free = None if kind.history is None else self._backoff.at_a_glance(kind.history)
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
                    traced = torch.compiler.is_compiling()  # by `torch.export`, say
                    if not traced:
                        answered, value = self._answer(args, kwargs)
            finally:
                lock.release()
            if free is None:
                if traced:
                    return self._function(*args, **kwargs)
                if answered:
                    return value  # type: ignore[no-any-return]
                return self._refused(value, args, kwargs)  # type: ignore[no-any-return]  # outside of the lock
            timed = self._trials.under_way
        self._count_free(free)  # type: ignore[arg-type]
        if timed is not None:
            timed.begin()
        begun = budget.now()
        key = get_ident(), begun
        self._alongside.calls[key] = None
        try:
            result = self._function(*args, **kwargs)
        finally:  # (`Alongside.run`, without a function of ours after the user's)
            del self._alongside.calls[key]
        self._backoff.budget.live += budget.now() - begun
        return result

    def _alone(self) -> bool:
        """Whether no other thread makes a live call. Else the lock is let go."""
        alone = self._alongside.ended(self._backoff.budget.usual)
        if not alone:
            lock.release()
        return alone

    def _count_free(self, refusal: Refusal) -> None:
        """Count a live call whose reason was reported before."""
        counters, reason = self._counters, refusal.reason
        counters.calls += 1
        counters.live += 1
        if refusal.measures:
            counters.timed += 1
        else:
            counters.untried += 1
            counters.refusals[reason] = counters.refusals.get(reason, 0) + 1
        if self._steps:
            optimizers.stepped(self._function)

    def _answer(self, args: Args, kwargs: Kwargs) -> tuple[bool, Any]:
        """Replay, record or warm up: (True, the result). Or refuse: (False, the refusal)."""
        if sys.is_finalizing():  # modules are being taken apart: a destructor's call
            return True, self._function(*args, **kwargs)
        with lock, unwound():
            self._counters.calls += 1
            begun = budget.now()
            try:
                with Contained("looked for what to do with a call"):
                    call, player, case = self._chosen(args, kwargs, begun)
                if player is not None:
                    return True, self._play(player, call)
                if case is None:
                    return True, self._warm_up(call, args, kwargs)
                try:
                    return True, self._made_and_played(case)
                except Refusal as e:
                    with Contained("learned from what was refused"):
                        if not self._learns(e, case.history, call):
                            raise
                    e.drop_references()
                    return True, self._warm_up(call, args, kwargs)
                except (Carries, Opens) as e:
                    with Contained("learned what a call carries"):
                        self._describer.learn(e, call)
                        call = self._described(args, kwargs)  # which has another signature now
                        self._backoff.history(call.key, case.history)
                    self._counters.calls -= 1
                    return self._answer(args, kwargs)
            except NoSignature as e:
                refusal = Refusal(str(e), e.remedy)
            except Refusal as e:
                refusal = e
        refusal.drop_references()
        return False, refusal

    def _chosen(self, args: Args, kwargs: Kwargs, begun: float) -> tuple[Call, Player | None, Case | None]:
        """A call, and what is played for it, or recorded; neither, if it is to warm up. The call has `begun` then.

        Raises:
            NoSignature, Refusal: it has to run live.
        """
        call, found, cleared_some = self._find(self._described(args, kwargs), args, kwargs)
        player = found.player
        if player is not None:
            if player.grads_held():
                raise Refusal("a gradient of an earlier call is held", "clone p.grad instead of keeping it")
            stands = player.played < player.due or self._stands(player, call)
            return call, player if stands else None, None
        history = self._backoff.history(call.key)
        self._raise_refused(call, history, begun)
        obstructed = cleared_some and any(map(obstructing, found.waiting))
        case = self._policy.case(call, history, found.broken, found.blocked, obstructed)
        return call, None, None if self._policy.next(case) is Step.WARM_UP else case

    def _described(self, args: Args, kwargs: Kwargs) -> Call:
        """Describe the call.

        Raises:
            NoSignature: it has no signature.
            Refusal: it has to run live, even if a recording would fit.
        """
        if self._gate.never is None and self._uncalled is not None:  # it is called
            self._uncalled.stop()
            self._uncalled = None
        self._gate.check()
        not_here = refused_here()
        if not_here is not None:
            raise not_here
        try:
            with Contained("described the call"):
                call = self._describer.describe(args, kwargs)
        except NoSignature as e:
            if self.options.fallback != "error":
                self._undescribed.note(args, kwargs, Refusal(str(e), e.remedy))
            raise
        recurring, entangled = self._describer.recurring, self._maker.entangled
        if recurring.gone:  # their recordings keep these objects alive
            self._shelf.drop_all(lambda key: stands_in(key, recurring.gone))
            recurring.gone.clear()
        if recurring.bind(filter(entangled.reaches, call.containers)):
            return self._described(args, kwargs)
        if entangled and (refusal := entangled.refusal(call, self._describer.named())) is not None:
            raise refusal
        if call.borrowed and self._describer.marked:
            raise Refusal("gets a borrowed output, and might have to begin again", "pass a clone", this_call=True)
        return call

    def _learns(self, refusal: Refusal, history: History, call: Call) -> bool:
        """Whether the next capture can go another way, and needs a live call before."""
        attempts, why = history.attempts, history.capture.why
        if self._maker.learns(refusal, history, call):
            if history.capture.why is not None:
                attempts.learning += self._attempt
                self._backoff.budget.learning += self._attempt
            return True
        if refusal.cutting and why is not None:  # which is for us to know: what is to be mended is why there is a cut
            self._report.remark(f"is not cut, because it {refusal.reason}")
            refusal.reason, refusal.remedy, refusal.where = why.reason, why.remedy, why.where
        if refusal.this_call or not isinstance(refusal, Unseen):  # (else it is the first of two)
            self._backoff.budget.lose(self._attempt + self._learned(history), refusal)
        return False

    def _learned(self, history: History) -> float:
        """Seconds of the attempts that have only shown where to cut such calls; from now on they count as this one's."""
        learning, history.attempts.learning = history.attempts.learning, 0.0
        self._backoff.budget.learning -= learning
        return learning

    def _raise_refused(self, call: Call, history: History, begun: float) -> None:
        """Raise the refusal of this signature, if its grounds still hold. That is found out since the call has `begun`."""
        refusal = self._backoff.refused(history, [call.leaves[at] for at in call.numbers])
        if refusal is not None:
            self._counters.untried += not refusal.measures
            self._trials.runs_live(call)
            players, unpaid = self._shelf.of(call.key), history.refused.unpaid
            if unpaid is not None and refusal is unpaid.refusal:
                unpaid.looked(players, budget.now() - begun)
                players = _NONE
            known = history.refused.unsettled is None and not players and not refusal.measures
            if known and self.options.fallback != "error":
                self._known_calls.learn(call, _NONE, self._maker.entangled, history)
            raise refusal

    # -- a recording is played

    def _find(self, call: Call, args: Args, kwargs: Kwargs) -> tuple[Call, Found, bool]:
        """Find a recording that may be played. Returns the call, perhaps described anew, the recording, and whether held
        tensors were moved out of the pool for it."""
        with Contained("looked for a recording"):
            found = self._shelf.find(call)
            if found.broken is not None and self._describer.recurring.moved(call.leaves):
                call = self._describer.describe(args, kwargs)
                found = self._shelf.find(call)
            waiting = found.waiting
            obstructed = [player for player in waiting if player.obstructed()]
            if not obstructed or any(player.awaited() for player in waiting):
                return call, found, False
            cleared_some = cleared(obstructed)
            return call, self._shelf.find(call), cleared_some

    def _stands(self, player: Player, call: Call) -> bool:
        """Audit a recording. Returns whether it may be played; all recordings of a stale signature are dropped.

        Raises:
            Refusal: the signature was stale too often.
        """
        with deferred(), Contained("audited a recording"):
            found = audit.difference(self.name, self._function, call, player, self._describer)
        verdict = audit.verdict(player, found, self.options.audit)
        if found is not None and verdict is audit.Verdict.STALE:
            audit.warn(self.name, found, player.played - player.right)
            self._shelf.drop(call.key, lambda _: True)
            refusal = self._backoff.changed(audit.cause(found), self._backoff.history(call.key), call)
            if refusal is not None:
                raise refusal
        return verdict is audit.Verdict.PLAY

    def _play(self, player: Player, call: Call) -> object:
        counters, every = self._counters, self.options.verify
        if player.half_attached(call):
            raise Refusal("has a result that does not depend on an argument with a history of its own, as others do",
                          "record the parts, each with its own arguments")  # fmt: skip
        counters.replayed += 1
        if (
            every
            and player.played
            and player.played % every == 0
            and not (call.borrowed and call.borrowed_within(player.overwrites))
        ):
            reach, own = self._describer.reach(call), player.recording.program.own_generators
            return verified(self.name, call, reach, self._function, lambda: player.play(call)[0], own)
        begun = budget.now() if player.may_begin_again else 0.0
        try:
            result, copied = player.play(call)
        except TakenBack as e:
            counters.replayed -= 1
            if isinstance(e, Diverged):
                self._maker.diverged(e, call, budget.now() - begun)
                if e.torn:
                    raise RuntimeError(e.torn) from None
            raise
        counters.bytes_copied += copied
        if not every:
            self._known_calls.learn(call, self._shelf.of(call.key), self._maker.entangled)
        return result

    # -- a recording is made

    def _made_and_played(self, case: Case) -> object:
        """Record a call for which no recording fits. Up to its first play all is taken back where something fails."""
        with ExitStack() as unplayed:
            return self._play(self._made(case, unplayed), case.call)

    def _made(self, case: Case, unplayed: ExitStack) -> Player:
        """Record a call. An exception in `unplayed` takes that back."""
        call, history = case.call, case.history
        with Contained("looked for why a recording is made"):
            if replaced := self._maker.replaced(case):
                raise Carries(replaced)
            apart = self._maker.make_way(call, history, case.blocked)
            history.attempts.tried = True
            why = figures.why(case, self._shelf, self._describer.named, self._backoff.place_of)
        begun = budget.now()
        try:
            with deferred(), figures.telling(self.name, self._counters) as seconds:
                player = self._record(call, case.blocked, unplayed, apart=apart)
        except Refusal as refusal:
            with Contained("noted what was refused"):
                self._backoff.capture_failed(call, refusal, history, changed=case.broken is not None)
            raise
        finally:
            self._attempt = budget.now() - begun
            self._backoff.budget.attempted(self._attempt)
        with Contained("noted what was recorded"):
            player.seconds, player.cost, player.why = seconds(), self._attempt + self._learned(history), why
            player.saves = history.timed.saves if history.timed is not None else None
            figures.recorded(self.name, player)
        return player

    def _record(self, call: Call, blocked: int, unplayed: ExitStack, *, apart: bool) -> Player:
        history = self._backoff.history(call.key)
        player = self._maker.record(call, history, blocked, apart, self._backward_kind(), unplayed)
        with Contained("noted what was recorded"):
            self._ledger.add(player)
            recording, averaged = player.recording, loses_overlap(player.recording)
            if averaged:
                self._report.remark(_AT_ONCE)
            untried = self._measures and not history.pays
            if untried and on_trial(recording, self.options, averaged=averaged, cut=history.capture.why is not None):
                self._trials.begin(player, history, averaged=averaged)
        return player

    def _backward_kind(self) -> BackwardKind:
        return Recorded

    # -- a call runs live

    def _warm_up(self, call: Call, args: Args, kwargs: Kwargs) -> object:
        self._counters.live += 1
        optimizers.stepped(self._function)
        history = self._backoff.history(call.key)
        run = LiveRun(self._function, call, history, self._describer, self._counters.live)
        begun = budget.now()
        history.live.raised = True
        result = run.run(args, kwargs)
        history.live.raised = False
        self._backoff.budget.ran(budget.now() - begun)
        if run.device is None:
            return result
        key = (*call.key[:-1], modes())
        if key != call.key:  # the first call of attention, say, decides in which order torch tries its kernels
            self._backoff.history(key, history)
        attaches = self._owner is not None and self.options.outputs != "borrow"  # a step may return its spent loss
        run.follow(result, attaches=attaches, stop=self._stops.stop)
        return result

    def _refused(self, refusal: Refusal, args: Args, kwargs: Kwargs) -> Any:
        """Run live and report the refusal. After a failed capture the report comes last: the live run may raise as well."""
        if not refusal.failed:
            self._report.refuse(refusal)
            try:
                return self._live(refusal, args, kwargs)
            finally:
                if refusal.history is not None:
                    refusal.history.refused.settle()
        result = self._live(refusal, args, kwargs)
        self._backoff.live_run_succeeded(refusal)
        self._report.refuse(refusal)
        return result

    def _live(self, refusal: Refusal, args: Args, kwargs: Kwargs) -> Any:
        """Run a refused call."""
        self._counters.live += 1
        optimizers.stepped(self._function)
        history: History | None = refusal.history
        notes = history.live.notes if history is not None and isinstance(refusal, Diverged) else None
        again = nullcontext() if notes is None else Nested(waits=True)
        with again, noting(notes):
            if (timed := self._trials.under_way) is not None:
                timed.begin()
            begun = budget.now()
            try:
                result = self._alongside.run(self._function, args, kwargs)
            except BaseException:
                if history is not None:
                    history.live.raised = True
                raise
        took = budget.now() - begun
        if history is not None and notes is not None:
            history.divergence.lost += self._backoff.budget.beyond_usual(took)
        self._backoff.budget.ran(took)
        if history is not None:
            history.live.ended, history.live.raised = True, False
        return result

    def _of_another(self, call: Callable[..., object], args: Args, kwargs: Kwargs) -> Any:
        """Run another module that has the attributes of the recorded one, as replicas of DataParallel have: its parameters
        differ."""
        self._counters.calls += 1
        self._report.refuse(Refusal(
            "is called as part of a module that was made with the attributes of this one (as by DataParallel)",
            "record that one: pg.record(module)"))  # fmt: skip
        self._counters.live += 1
        return call(*args, **kwargs)
