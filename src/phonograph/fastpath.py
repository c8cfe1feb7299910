"""Recognising the common call at once: tensors and the very same plain values, the same metadata as last time.

`signature.describe` takes a call apart and compares everything in Python, about 5 us. Most functions get the same kind of
call again and again; for those, one comparison in C++ (torch.compile's guards) and one of the process-wide modes are enough
to know that the signature is that of the last call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .identity import identity
from .keys import SCALARS
from .player import Player
from .recording import Entangled
from .signature import ALIGNMENT, Call, has_gradient_or_hooks, modes
from .torch_private import tensor_check, transformed

__all__ = ["FastPath"]

_Given = Callable[[tuple[Any, ...], dict[str, Any]], "tuple[Any, ...] | None"]


class FastPath:
    """Recognises calls of one signature, and finds the recording to play.

    Made by `of` after a replay, where the call and the recordings of its signature allow it; `players` is the shelf's own
    list and `state` the function's own record of the memory that its recordings write, so that both stay current.
    """

    __slots__ = ("_check", "_count", "_leaves", "_modes", "_state", "given", "players")

    def __init__(
        self, check: Callable[..., bool], given: _Given, count: int, leaves: list[bool] | None, players: list[Player],
        state: Entangled,
    ) -> None:  # fmt: skip
        self._check = check
        self._leaves = leaves
        """Which of the tensors are leaves, if some require gradients."""
        self._count = count
        self.given = given
        """The tensors among the arguments; None where the others are not what they were."""
        self._modes = modes()
        self._state = state
        self.players = players

    @staticmethod
    def of(call: Call, players: list[Player], state: Entangled) -> FastPath | None:
        """For this call's signature, or None where it takes more to recognise one."""
        args, kwargs = call.like
        values = (*args, *kwargs.values())
        given = [x for x in values if type(x) not in _VALUES]
        if len(given) != len(call.tensors) or any(type(x) is not torch.Tensor for x in given):
            return None  # a list of one tensor is another argument than the tensor
        if any(t.data_ptr() % ALIGNMENT for t in call.tensors):
            return None
        if any(_looks_at_arguments(player, call) for player in players):
            return None
        check = tensor_check(call.tensors) if call.tensors else _not_transformed
        if check is None:
            return None
        leaves = [t.is_leaf for t in call.tensors] if any(t.requires_grad for t in call.tensors) else None
        arguments = _positional if len(given) == len(args) == len(values) else _Pattern(values, tuple(kwargs))
        return FastPath(check, arguments, len(given), leaves, players, state)

    def find(self, tensors: tuple[Any, ...]) -> Player | None:
        """The recording to play for a call that is `given` these; None if that is for others to say."""
        n = self._count
        if len(tensors) != n or not self._check(*tensors) or modes() != self._modes:
            return None
        # What torch's guards do not look at: where its memory begins, attributes of its own, a gradient, hooks.
        if self._leaves is None:
            for t in tensors:
                if t.data_ptr() % ALIGNMENT or t.__dict__ or t.grad is not None:
                    return None
        else:
            for t, leaf in zip(tensors, self._leaves, strict=True):
                if t.data_ptr() % ALIGNMENT or t.__dict__ or t.is_leaf is not leaf or has_gradient_or_hooks(t):
                    return None
        if n > 1 and len({*map(identity, tensors)}) < n:
            return None  # one tensor given twice is another signature
        if self._state and any(map(self._state.meets, tensors)):
            return None  # an argument shares memory with what the function writes
        for player in self.players:
            if player.ready() and player.in_place(tensors):
                return player
        return None


def _not_transformed() -> bool:
    """The check of no tensors: those would show that functorch is at work."""
    return not transformed()


_VALUES = frozenset({*SCALARS, float, complex})  # they cannot change: where it is the same object, it is the same value
_TENSOR = object()


def _positional(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    return None if kwargs else args


class _Pattern:
    """Takes the tensors of a call that has the same values in the same places, and the same names in the same order."""

    def __init__(self, values: tuple[Any, ...], names: tuple[str, ...]) -> None:
        self._values = [x if type(x) in _VALUES else _TENSOR for x in values]
        self._names = names

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        if tuple(kwargs) != self._names:
            return None
        found = []
        values = (*args, *kwargs.values()) if kwargs else args
        if len(values) != len(self._values):
            return None
        for x, value in zip(values, self._values, strict=True):
            if value is _TENSOR:
                found.append(x)
            elif x is not value:
                return None
        return tuple(found)


def _looks_at_arguments(player: Player, call: Call) -> bool:
    """Whether it matters to a recording which tensors the arguments are, and not only where they are and what they hold; or
    whether it may be that the call has to be begun again, or has to be refused."""
    recording = player.recording
    return bool(recording.live_parts) or any(s.written for s in recording.slots) or player.half_attached(call)
