"""The kinds of calls that a function has had, recognised at a glance: tensors with the same metadata, the same plain values,
and the same modes, also in tuples, lists and dictionaries.

`signature.describe` takes a call apart and compares everything in Python. Most functions get the same few kinds of calls again
and again: for those, one comparison in C++ (torch.compile's guards) and one of the process-wide modes are enough to know the
signature. A known call is made once and kept with its signature. Which one comes next is guessed from what came after the last
one the time before: so kinds that take turns (two shapes, train and eval) are recognised as fast as one.

A signature that runs live for good has a known call as well, which leads to the function itself.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter, mod
from typing import Any

import torch

from .._torch.autograd import takes_no_gradient
from .._torch.dynamic import Args, Kwargs
from .._torch.modes import transformed
from .._torch.tensors import address, any_freed, tensor_check
from ..call.signature import ALIGNMENT, Call, aliases, has_gradient_or_hooks, unchanged
from ..capture.recording import Entangled
from ..errors import Refusal
from ..guards.attribute_epochs import gradient
from ..python.identity import identity
from .argument_matching import Matching, Unmatchable, matching
from .history import History
from .output_kinds import Container
from .player import Player

__all__ = ["KnownCall", "KnownCalls", "Undescribed"]

_REFUSED = 256  # known calls, from which on one that runs live takes the place of another such
_ALIKE = 32  # of the same size, among which one is looked for
_DEEP = 4  # containers in each other, in whose first place that is

_PAUSE = 15  # calls at most that are not tried to be described
_ROW = 4  # calls in a row that cannot be described, after which not each is tried

_PLACES = 256  # of arguments that are remembered
_TRUST = 32  # plays of one recording, after which those that come before it are looked at again

_NOTHING = {None}
_attributes_of = attrgetter("__dict__")
_Tensors = tuple[torch.Tensor, ...]


class KnownCall:
    """Recognises calls of one signature, and finds the recording to play, or knows that it runs live.

    `players` is the shelf's own list and `state` the function's own record of the memory that its recordings write, so that
    both stay current.
    """

    __slots__ = ("_aliases", "_alignments", "_any_freed", "_check", "_clear", "_count", "_given", "_guess", "_leaves",
                 "_modulus", "_spans", "_state", "_trust", "_unchanged", "_whole", "history", "next", "players")  # fmt: skip

    def __init__(
        self, call: Call, check: Callable[..., bool], given: Matching | None, still: Callable[[], bool], players: list[Player],
        state: Entangled, history: History | None,
    ) -> None:  # fmt: skip
        tensors = call.tensors
        self._check = check
        self._given = given
        """Gives the tensors among the arguments; None where the others are not what they were. Where there are none but
        tensors, there is nothing to be taken out."""
        self._count = len(tensors)
        self._any_freed = any_freed(tensors)
        self._alignments = [address(t) % ALIGNMENT for t in tensors]
        self._modulus = [ALIGNMENT] * len(tensors)
        self._leaves = [t.is_leaf for t in tensors] if any(t.requires_grad for t in tensors) else None
        """Which of the tensors are leaves, if some require gradients."""
        writes = len(tensors) > 1 and any(slot.written for player in players for slot in player.recording.slots)
        self._aliases = aliases(tensors) if writes else None
        """How the tensors share memory, if one of them is written."""
        self._unchanged = still
        self._whole: tuple[int, ...] = ()
        """Where the tensors lay last, none of which was freed."""
        self._state = state
        self.players = players
        self.next: KnownCall | None = None  # that came after this one last time, if that was another
        self.history = history
        """Of a signature that runs live: what says for how long."""
        self._guess: Player | None = None  # the one that was played last, where what those before it rely on is not so
        self._trust = 0
        self._spans: object = None
        self._clear: set[tuple[int, ...]] = set()  # where arguments have lain that met nothing of these spans

    @staticmethod
    def of(call: Call, players: list[Player], state: Entangled, history: History | None) -> KnownCall | None:
        """For this call's signature, or None where it takes more to recognise one, or to play it: where it may be that the call
        has to be begun again, or has to be refused."""
        if call.borrowed or call.again or call.numbers or call.texts or any(type(t) is not torch.Tensor for t in call.tensors):
            return None
        if any(player.half_attached(call) or _needs_arguments(player) for player in players):
            return None
        if players and all(player.may_begin_again for player in players):
            return None
        try:
            given = matching(call, state)
        except Unmatchable:
            return None
        still = unchanged()
        check = tensor_check(call.tensors) if call.tensors else _not_transformed
        if check is None or not still():
            return None
        return KnownCall(call, check, given, still, players, state, history)

    def knows(self, players: list[Player]) -> bool:
        """Whether it would be made again as it is: for these players, in the modes as they are now."""
        try:
            return self.players is players and self._unchanged()
        except RuntimeError:  # (as below)
            return False

    def fits(self, args: Args, kwargs: Kwargs) -> _Tensors | None:
        """The tensors of a call of this kind, in order; None for another call, or one that takes a closer look."""
        if self._given is not None:
            found = self._given(args, kwargs)
            if found is None:
                return None
            args = found
        elif kwargs:
            return None
        n = self._count
        if len(args) != n or not self._check(*args):
            return None
        try:
            if not self._unchanged():
                return None
        except RuntimeError:  # old and new ways to set the precision of matrix products were mixed: some answer no more
            return None
        # What torch's guards do not look at: where its memory begins, attributes of its own, a gradient, hooks.
        places = (*map(address, args),)
        if [*map(mod, places, self._modulus)] != self._alignments or any(map(_attributes_of, args)):
            return None
        if self._leaves is None:
            if not {*map(gradient, args)} <= _NOTHING:
                return None
        elif (
            [t.is_leaf for t in args] != self._leaves
            or any(map(has_gradient_or_hooks, args))
            or any(map(takes_no_gradient, args))
        ):
            return None
        if n > 1 and len({*map(identity, args)}) < n:
            return None  # one tensor given twice is another signature
        if places != self._whole:
            if self._any_freed(args):
                return None
            self._whole = places
        if self._aliases is not None and aliases(args) != self._aliases:
            return None
        if self._state and self._meets(args, places):
            return None
        return args

    def _meets(self, args: _Tensors, places: tuple[int, ...]) -> bool:
        """Whether an argument shares memory with what the function writes. Most lie where some have lain before."""
        state = self._state
        if state.spans is not self._spans:
            self._spans, self._clear = state.spans, set()
        if places in self._clear and state.has_none(args):
            return False
        if any(map(state.meets, args)):
            return True
        if any(map(state.may_meet, args)):
            return False
        if len(self._clear) >= _PLACES:
            self._clear.clear()
        self._clear.add(places)
        return False

    def play(self, tensors: _Tensors) -> tuple[Any, int] | None:
        """The result of a call that fits, and how many bytes of input were copied; None if no recording can be played, or one
        that may have to begin again."""
        guess = self._guess
        if guess is not None and guess in self.players and guess.ready(tensors):
            self._trust -= 1
            if not self._trust:
                self._guess = None
            return guess.play_flat(tensors)
        broken = True  # whether all that come first are, and none is only held up
        for player in self.players:
            if player.ready(tensors):
                if player.may_begin_again:
                    return None
                if broken and player is not self.players[0]:
                    self._guess, self._trust = player, _TRUST
                return player.play_flat(tensors)
            broken = broken and player.broken() is not None
        return None


class KnownCalls:
    """Those of one function, each with its signature, and among those with a first argument of the same size."""

    def __init__(self) -> None:
        self._by_key: dict[object, tuple[KnownCall, object]] = {}
        self._by_size: dict[object, tuple[KnownCall, ...]] = {}
        self._last: KnownCall | None = None

    def __len__(self) -> int:
        return len(self._by_key)

    def find(self, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[KnownCall, _Tensors] | None:
        """The kind of this call, and its tensors."""
        last = self._last
        if last is None:
            return None
        known = last.next or last
        tensors = known.fits(args, kwargs)
        if tensors is None:
            guess = known
            for known in self._by_size.get(_size(args, kwargs), ()):
                if known is not guess and (tensors := known.fits(args, kwargs)) is not None:
                    break
            else:
                return None
            last.next = None if known is last else known
        self._last = known
        return known, tensors

    def learn(self, call: Call, players: list[Player], state: Entangled, history: History | None = None) -> None:
        """A call of this signature was played, or is refused: the next one is known, if that can be."""
        known, size = self._by_key.get(call.key, (None, None))
        if known is not None and known.knows(players):
            return
        self.forget(call.key)
        known, size = KnownCall.of(call, players, state, history), _size(*call.like)
        if known is None:
            return
        if history is not None and len(self._by_key) >= _REFUSED:
            self._forget_one_refused()
        self._by_key[call.key] = known, size
        self._by_size[size] = known, *self._by_size.get(size, ())[: _ALIKE - 1]
        self._last = self._last or known

    def forget(self, key: object) -> None:
        """The recordings of a signature are others, or gone."""
        gone, size = self._by_key.pop(key, (None, None))
        if gone is None:
            return
        self._by_size[size] = tuple([known for known in self._by_size[size] if known is not gone])
        if not self._by_size[size]:
            del self._by_size[size]
        others = [known for known, _ in self._by_key.values()]
        self._last = next(iter(others), None) if self._last is gone else self._last
        for known in others:
            known.next = None if known.next is gone else known.next
        gone.next = None

    def _forget_one_refused(self) -> None:
        """The one that has been known for longest."""
        self.forget(next((key for key, (known, _) in self._by_key.items() if known.history is not None), None))

    def clear(self) -> None:
        for known, _ in self._by_key.values():
            known.next = None
        self._by_key, self._by_size, self._last = {}, {}, None


def _size(args: object, kwargs: dict[str, object]) -> object:
    """The shape of the first argument, or of what it has in it first, if that is a tensor; otherwise of what kind it is."""
    found: Any = (args, kwargs) if args else kwargs
    for _ in range(_DEEP):
        if type(found) is dict:
            found = next(iter(found.values()), None)
        elif type(found) in (tuple, list):
            found = found[0] if found else None
        else:
            break
    return found.shape if isinstance(found, torch.Tensor) else type(found)


class Undescribed:
    """Calls that have no signature, because of an argument. Where there were several in a row, not each of the next ones with
    arguments of the same classes is tried again."""

    def __init__(self) -> None:
        self._kinds: object = None
        self._refusal: Refusal | None = None
        self._row = self._pause = self._unlooked = 0

    def still(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Refusal | None:
        """Why such a call runs live; None if that has to be found out."""
        if not self._unlooked or _kinds_of(args, kwargs) != self._kinds:
            return None
        self._unlooked -= 1
        return self._refusal

    def note(self, args: tuple[object, ...], kwargs: dict[str, object], refusal: Refusal) -> None:
        """A call could not be described."""
        kinds = _kinds_of(args, kwargs)
        if self._refusal is None or kinds != self._kinds or refusal.reason != self._refusal.reason:
            self._kinds, self._row, self._pause = kinds, 0, 0
        self._refusal = refusal
        self._row += 1
        if self._row >= _ROW:
            self._pause = self._unlooked = min(2 * self._pause + 1, _PAUSE)


def _kinds_of(args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    return [*map(type, args)], [*kwargs], [*map(type, kwargs.values())]


def _needs_arguments(player: Player) -> bool:
    """Whether a result is a container among the arguments, or something is put into one."""
    recording = player.recording
    return bool(recording.table.effects.edits) or any(isinstance(o, Container) for o in recording.outputs)


def _not_transformed() -> bool:
    """The check of no tensors: those would show that functorch is at work."""
    return not transformed()
