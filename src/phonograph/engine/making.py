"""Maker of one function's recordings: a capture, its place in the pool and on the shelf, and its backward.

A capture may show that other terms are needed: code runs in it that was overlooked, or a backward of its results will run
outside. Then it is undone, and made again within the same call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from .._torch import ddp as torch_ddp
from .._torch.dynamic import Thing
from .._torch.process_groups import several
from ..aten.operators import can_run_live
from ..autograd.backward import Backward, Forward
from ..autograd.function import Joint
from ..autograd.saved_hooks import Tracing
from ..call.signature import Call
from ..capture.digest import Digest
from ..capture.live_results import Notes
from ..capture.recording import Entangled, Recording
from ..capture.whole_modules import Whole
from ..devices import device_for
from ..devices.base import Device
from ..devices.cuts import Unmarked
from ..devices.segments import Diverged
from ..errors import Attached, Decides, Elsewhere, Overlooked, Refusal, Unseen
from ..guards.carried_state import Place
from ..guards.followed_numbers import Fixed
from ..guards.reachable import Reach
from ..options import Options
from ..python.gc_control import uncollected
from ..python.names_in_code import Mentions
from ..state.reentrancy import Nested
from ..statistics import Counters, logger, totals
from ..values.wording import MARKED
from . import audit, budget
from . import process_groups as ranks
from .attached_results import settled
from .backoff import Backoff
from .capture_terms import Concessions, Placement, Terms
from .contained import Contained
from .describer import Describer
from .history import History
from .player import Player
from .policy import Case
from .recorder import record
from .shelf import Key, Shelf
from .verify import repeats

__all__ = ["BackwardKind", "Maker", "Stops", "loses_overlap"]

_MOVES = 3  # recordings because gradients, or tensors, lay elsewhere, after which they are fed; some loops settle with as many
_LOOKS = 8  # captures of one call, each after the one before heard code run that reads more...
_NEW = 64  # ...and which was like none before
_WHOLES = 8  # modules that run live as a whole
_DECISIVE = 8  # places where a call may read numbers by which it goes on
_OTHER_CODE, _CALL_THE_SAME = "runs other code each time it is looked at", f"call the same in each call, {MARKED}"
_ONLY_CAPTURED = Refusal("has a backward that is to run live (override_cudagraphs), of attention that draws random numbers, "
                         "which can only be captured", "override_cudagraphs(fwd=False)")  # fmt: skip

BackwardKind = Callable[[Backward, Options], Callable[..., object]]
"""Makes a recorded function of a backward."""


class Stops:
    """Tells a function that calls have to run live where gradients are wanted, now (`stop`) or should that be so at the next
    call (`doubt`). Autograd's graph holds this, so that it must not hold the function: an attribute of a module may hold the
    graph, and the garbage collector does not see all of such a circle."""

    def __init__(self, stop: Callable[[Refusal], None], doubt: Callable[[Callable[[], bool], Refusal], None]) -> None:
        self._stop, self._doubt = weakref.WeakMethod(stop), weakref.WeakMethod(doubt)

    def stop(self, refusal: Refusal) -> None:
        if (stop := self._stop()) is not None:
            stop(refusal)

    def doubt(self, broken: Callable[[], bool], refusal: Refusal) -> None:
        if (doubt := self._doubt()) is not None:
            doubt(broken, refusal)


class Maker:
    """Makes the recordings of one function."""

    def __init__(
        self, name: str, function: Callable[..., object], options: Options, counters: Counters, describer: Describer,
        shelf: Shelf, backoff: Backoff, stops: Stops, *, cuts: bool,
    ) -> None:  # fmt: skip
        """`cuts`: what needs the host may run live between segments."""
        self._name, self._function, self._options, self._counters = name, function, options, counters
        self._describer, self._shelf, self._backoff, self._stops = describer, shelf, backoff, stops
        self._may_cut, self._on_its_own = cuts, options.fallback == "auto"
        self.entangled = Entangled()
        """Memory that recordings write, and that no argument may share."""
        self.devices: set[Device] = set()
        self.mentions: Mentions | None = None
        """What the user's code was seen to read in the last capture."""
        self.backwards: weakref.WeakSet[Any] = weakref.WeakSet()
        """Recorded functions, of the backwards of its results."""

    def record(
        self, call: Call, history: History, blocked: int, apart: bool, backward_kind: BackwardKind, unplayed: ExitStack
    ) -> Player:
        """A recording of this call, on the shelf; `blocked`: so many others cannot be played, because of what is held. It may
        have to keep `apart` from those. An exception in `unplayed` takes it back."""
        with Contained("made a recording"), uncollected():
            for whole in history.capture.wholes - history.live.notes.wholes:
                raise Unseen(f"runs {whole.name()} live, which was not seen to run there", "call it in every call", final=False)
            reach = self._describer.reach(call)
            if self._describer.recurring.stands_any((*call.containers, *call.tensors)):
                raise Unseen("gets an object that it can reach by another name as well", "call it again", this_call=True)
            with _relying_on(reach):
                device: Device = device_for(self._describer.device_of(call, reach, history.capture.device))
            device.tidy()
            device.pool.take_back(keep=[borrowed.loan for borrowed in call.borrowed.values()])
            turns = self._options.takes_turns or any(player.awaited() for player in self._shelf.of(call.key))
            recording = self._capture(call, history, reach, device, Placement(blocked, apart, turns), unplayed)
            if self._options.live_backward and recording.backward is not None and recording.backward.only_captured:
                raise replace(_ONLY_CAPTURED)
            device.settle(recording)
            if recording.communicates:
                ranks.follow(recording, self._counters)
            player = Player(recording, device)
            unplayed.push(partial(self._unplayed, call.key, player))
            if self._options.audit:
                player.unaudited = audit.never(self._function, recording)
                player.due = audit.due_after(0, self._options.audit) if not player.unaudited else player.due
            if recording.backward is not None:
                player.results.joint = self._joint(
                    recording.backward, recording, call, history, device, apart, turns, backward_kind
                )
            device.pool.add(recording)
        self.entangled |= recording.entangled
        self.devices.add(device)
        self._counters.recorded += 1
        history.attempts.refused = False
        totals().recorded += 1
        self._shelf.add(call.key, player)
        logger.debug("%s", recording)
        return player

    def _unplayed(self, key: Key, player: Player, kind: object, error: object, trace: object) -> None:
        """A recording goes that an exception has kept from its shelf, or from leaving gradients as its first play has to. (A
        refusal, which is an answer to one call, leaves it there for others.)"""
        if error is None:
            return
        if player not in self._shelf.of(key):
            player.close()
        elif not isinstance(error, Refusal) and not player.recording.table.gradients.sealed:
            self._shelf.drop(key, lambda one: one is player)

    def _joint(
        self, backward: Backward, recording: Recording, call: Call, history: History, device: Device, apart: bool, turns: bool,
        kind: BackwardKind,
    ) -> Joint:  # fmt: skip
        """Joins results to the graph of autograd; their backward is recorded as well, as a function of its own."""
        ran = history.live.ran_backward
        gradients_go = ran and not backward.gradients_stay(call.tensors)
        backward.forward = Forward(
            stop=self._stops.stop, doubt=self._stops.doubt, once=device.once, takes_turns=turns, apart=apart,
            averaged=torch_ddp.averaging() is not None, room=recording.room if gradients_go else None,
        )  # fmt: skip
        warmup = 0 if ran or backward.only_captured else min(self._options.warmup, 1)
        name = f"the backward of {self._name}"
        options = replace(self._options, name=name, warmup=warmup, verify=0, keep="always")  # as long as the forward
        if self._on_its_own:  # it is measured with its forward
            options = replace(options, fallback="live")
        return Joint(backward, self._recorded_backward(options, kind), device.joining)

    def _recorded_backward(self, options: Options, kind: BackwardKind) -> Callable[[Backward], Callable[..., Thing]]:
        """Records a backward, and does not hold this."""
        known = self.backwards
        if options.live_backward:
            return lambda backward: backward

        def recorded(function: Backward) -> Callable[..., Thing]:
            backward = kind(function, options)
            known.add(backward)
            return backward

        return recorded

    def _capture(
        self, call: Call, history: History, reach: Reach, device: Device, placement: Placement, unplayed: ExitStack
    ) -> Recording:
        """Capture the call, until a capture hears nothing new."""
        borrow = self._options.outputs == "borrow"
        begun, looks, new = budget.now(), 0, 0
        while looks < _LOOKS and new < _NEW:
            tracing = Tracing(device.torch_device) if history.capture.attached else None
            read: list[Refusal] = []
            terms = self._terms(call, history, tracing, replace(placement, borrow=borrow), read)
            try:
                with ExitStack() as undo:
                    with Nested(), _relying_on(reach):
                        recording = record(self._name, self._function, call, reach, device, terms, undo)
                    settled(tracing)
                    self.mentions = reach.mentions
                    if self._options.verify and (twice := repeats(recording)) is not None:
                        raise Refusal(f"{twice}, which verify would do twice", "record it without verify")
                    unplayed.push(undo.pop_all())
                    if self._on_its_own and recording.numbers:
                        history.on_approval(read[0])
                    return recording
            except Overlooked as e:
                is_new = self._describer.extend_reach(e)
                looks, new = looks + (not is_new), new + is_new
                reach = self._describer.reach(call)
                taken = budget.now() - begun
                if not self._backoff.budget.goes_on(taken, taken / (looks + new)):
                    raise Unseen(_OTHER_CODE, _CALL_THE_SAME, final=False) from None
            except Attached:
                if history.capture.attached or borrow:
                    raise
                history.capture.attached = True
            except Refusal as e:
                if self._on_its_own and read and (e.cutting or isinstance(e, Decides)):
                    history.on_approval(read[0])
                raise
            finally:
                if tracing is not None:
                    tracing.end()
        raise Refusal(_OTHER_CODE, _CALL_THE_SAME, final=False)

    @property
    def _cuts(self) -> bool:
        """Whether what needs the host may run live between segments. Ranks do not measure, and have to decide alike."""
        return self._may_cut and not (self._on_its_own and several())

    def _terms(
        self, call: Call, history: History, tracing: Tracing | None, placement: Placement, read: list[Refusal]
    ) -> Terms:  # fmt: skip
        """The terms of a capture at this place, going by what is known of the signature. What it reads goes to `read`."""
        siblings = [player.recording for player in self._shelf.of(call.key)]
        sizes = [recording.footprint.nbytes for recording in siblings] or [history.live.nbytes]
        expected = max(sizes) if history.capture.attached else 0
        placement = replace(placement, expected=expected, sibling=next(iter(siblings), None))
        return Terms(placement, tracing, history.live.notes, ran=history.live.ended,
                     insists=history.attempts.refused,
                     numbers=read if self._cuts else None, steps_whole=self._on_its_own, carried=self._describer.carried,
                     following=self._describer.following, varying=frozenset(self._describer.following.varying),
                     true_edges=self._options.edges == "true",
                     concessions=Concessions(averages=history.live.averages, feeds=self._feeds(history)),
                     digest=Digest if self._options.audit and not audit.never(self._function) else None)  # fmt: skip

    def _feeds(self, history: History) -> bool:
        """Whether gradients that the call finds have lain elsewhere time and again. Parts that run live may see them."""
        apart = self._options.fallback == "split" or self._describer.marked or history.capture.attached
        return not apart and history.capture.gradients_lay_elsewhere > _MOVES

    def replaced(self, case: Case) -> list[Place]:
        """Where tensors have been replaced time and again, by which recordings did not fit: a sum, say, that begins anew. What
        stands there can be given to calls, as arguments are."""
        players = self._shelf.of(case.call.key) if case.broken is not None else []
        tables = [(player.recording.table, player.device.torch_device) for player in players]
        places = [place for table, device in tables for place in table.constants.tensors_replaced(device)]
        case.history.capture.tensors_replaced += bool(places)
        carried = self._describer.carried
        new = [place for place in places if carried.may_learn_of(place.of) and not carried.reads(place.of, place.name)]
        return new if case.history.capture.tensors_replaced > _MOVES else []

    def make_way(self, call: Call, history: History, blocked: int) -> bool:
        """Drop recordings of which a new one takes the place; whether it has to keep apart from what is there."""
        spoiled = self._shelf.drop(call.key, lambda player: player.recording.spoiled)
        if history.capture.attached:  # the new one will not be in the way, and two have room for the activations of one
            self._backoff.displaced += self._shelf.drop(call.key, Player.obstructed)
        crossed = blocked and not any(player.holding() for player in self._shelf.of(call.key))  # by others
        return bool(spoiled or crossed) or (isinstance(self._function, Backward) and self._function.forward.apart)

    def tidy(self) -> None:
        """Return memory that no recording needs any more."""
        for device in self.devices:
            device.tidy()

    # -- what refused calls show

    def diverged(self, diverged: Diverged, call: Call, seconds: float) -> None:
        """A replay could not go on after a live operator, and so many seconds. That may give another shape from now on."""
        history = diverged.history = self._backoff.history(call.key)
        diverged.told = history.capture.why is None  # else it costs less than the others bring
        self._backoff.diverged(history, call.key, diverged, seconds)
        wider = self._backoff.unsteady(history, diverged) and self._cuts and self._runs_whole(diverged, history)
        diverged.around = None
        reach = None
        with suppress(Refusal), Contained("looked at what the function can reach"):
            reach = self._describer.reach(call)
        history.live.notes = Notes(history.capture.split, reach, self._describer.marked, diverged.done,
                                   decisive=history.capture.decisive, arrived=diverged.arrived,
                                   wholes=done_whole(diverged) if diverged.done else history.capture.wholes)  # fmt: skip
        if not wider:
            self._backoff.diverges(history, diverged, reach)

    def learns(self, refusal: Refusal, history: History, call: Call) -> bool:
        """Whether the next capture can go another way, and needs a live call before: to know what an operator gives that runs
        live from now on, or because something was not seen to run there."""
        capture, describer = history.capture, self._describer
        if isinstance(refusal, Fixed):
            places = *(call.numbers[i] for i in refusal.numbers), *refusal.texts
            describer.following.fix((call.shape, at) for at in places)
            return True
        if isinstance(refusal, Elsewhere) and capture.device is None and not call.tensors:
            capture.device = refusal.device
        elif isinstance(refusal, Decides) and refusal.site not in capture.decisive and len(capture.decisive) < _DECISIVE:
            capture.decisive |= {refusal.site}
        elif self._cuts and refusal.operator not in capture.split and self._may_run_live(refusal, history):
            capture.split |= {refusal.operator}
        elif self._cuts and self._runs_whole(refusal, history):
            pass
        elif isinstance(refusal, Unmarked) and not describer.marked:
            describer.marked = True
        else:
            return isinstance(refusal, Unseen) and history.refused.refusal is None
        if self._on_its_own and not isinstance(refusal, (Elsewhere, Unmarked)):
            self._cut(refusal, history)
        history.begin_again(refusal)
        return True

    def _runs_whole(self, refusal: Refusal, history: History) -> bool:
        """Whether the module around what is refused runs live as a whole from now on. (Not the recorded one: there is
        nothing beside it.)"""
        capture, module, refusal.around = history.capture, refusal.around, None
        if any(whole.keeps() is module for whole in capture.wholes):
            return False
        if module is None or module is getattr(self._function, "__self__", None) or len(capture.wholes) >= _WHOLES:
            return False
        capture.wholes, self._describer.marked = capture.wholes | {Whole(module)}, True
        return True

    def _may_run_live(self, refusal: Refusal, history: History) -> bool:
        """Whether what is refused is an operator that may run between segments. One that has raised may have been given what is
        wrong: where nobody has asked for cuts, it has to raise twice where a live call does not."""
        raised = self._on_its_own and refusal.failed and not history.attempts.failures
        return can_run_live(refusal.operator) and not raised

    def _cut(self, refusal: Refusal, history: History) -> None:
        """From now on a call is cut there, and has to show that this pays. It may have to begin again."""
        self._describer.marked = True
        history.on_approval(refusal.plain())
        self._backoff.cuts = history.capture


def done_whole(diverged: Diverged) -> frozenset[Whole]:
    """The modules that have run as a whole in a call, which begins again. (Those around them would run them once more.)"""
    return frozenset(one.marked for one in diverged.done if isinstance(one.marked, Whole))


@contextmanager
def _relying_on(reach: Reach) -> Iterator[None]:
    """A call that could get at this makes what is refused within."""
    try:
        yield
    except Refusal as refusal:
        refusal.reach = reach
        raise


def loses_overlap(recording: Recording) -> bool:
    """Whether gradients come out of this one's backward to where they are averaged as they come, on a device that could go on
    meanwhile. (A compiled graph gives them at its end also where it is not recorded.)"""
    backward = recording.backward
    return backward is not None and backward.forward.averaged and backward.graph.lasting and recording.device.type == "cuda"
