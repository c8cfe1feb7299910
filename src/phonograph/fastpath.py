"""Recognising the common call at once: tensors and the very same plain values, also in tuples, lists and dictionaries, with the
same metadata as last time.

`signature.describe` takes a call apart and compares everything in Python, about 5 us. Most functions get the same kind of
call again and again; for those, one comparison in C++ (torch.compile's guards) and one of the process-wide modes are enough
to know that the signature is that of the last call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from operator import is_
from typing import Any, NamedTuple

import torch

from .identity import identity
from .keys import SCALARS
from .player import Player
from .recording import Entangled
from .signature import ALIGNMENT, Call, has_gradient_or_hooks, unchanged
from .torch_private import address, tensor_check, transformed
from .trees import Node

__all__ = ["FastPath"]

_Given = Callable[[tuple[Any, ...], dict[str, Any]], "tuple[Any, ...] | None"]


class FastPath:
    """Recognises calls of one signature, and finds the recording to play.

    Made by `of` after a replay, where the call and the recordings of its signature allow it; `players` is the shelf's own
    list and `state` the function's own record of the memory that its recordings write, so that both stay current.
    """

    __slots__ = ("_check", "_count", "_given", "_leaves", "_state", "_unchanged", "players")

    def __init__(
        self, check: Callable[..., bool], given: _Given | None, count: int, leaves: list[bool] | None, players: list[Player],
        state: Entangled,
    ) -> None:  # fmt: skip
        self._check = check
        self._leaves = leaves
        """Which of the tensors are leaves, if some require gradients."""
        self._count = count
        self._given = given
        """Gives the tensors among the arguments; None where the others are not what they were. Where there are none but
        tensors, there is nothing to be taken out."""
        self._unchanged = unchanged()
        self._state = state
        self.players = players

    @staticmethod
    def of(call: Call, players: list[Player], state: Entangled) -> FastPath | None:
        """For this call's signature, or None where it takes more to recognise one."""
        tensors = [x for x in call.leaves if type(x) not in _VALUES]
        if call.lent or len(tensors) != len(call.tensors) or any(type(x) is not torch.Tensor for x in tensors):
            return None
        if any(t.data_ptr() % ALIGNMENT for t in call.tensors):
            return None
        if call.numbers or any(_looks_at_arguments(player, call) for player in players):
            return None
        check = tensor_check(call.tensors) if call.tensors else _not_transformed
        if check is None:
            return None
        leaves = [t.is_leaf for t in call.tensors] if any(t.requires_grad for t in call.tensors) else None
        try:
            given = _arguments(call)
        except _Other:
            return None
        return FastPath(check, given, len(call.tensors), leaves, players, state)

    def play(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int] | None:
        """The result of this call, and how many bytes of input were copied; None if another way has to be taken."""
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
        if self._leaves is None:
            for t in args:
                if address(t) % ALIGNMENT or t.__dict__ or t.grad is not None:
                    return None
        else:
            for t, leaf in zip(args, self._leaves, strict=True):
                if address(t) % ALIGNMENT or t.__dict__ or t.is_leaf is not leaf or has_gradient_or_hooks(t):
                    return None
        if n > 1 and len({*map(identity, args)}) < n:
            return None  # one tensor given twice is another signature
        if self._state and any(map(self._state.meets, args)):
            return None  # an argument shares memory with what the function writes
        for player in self.players:
            if player.ready(args):
                return player.play_flat(args)
        return None


def _not_transformed() -> bool:
    """The check of no tensors: those would show that functorch is at work."""
    return not transformed()


_VALUES = frozenset({*SCALARS, float, complex})  # they cannot change: where it is the same object, it is the same value
_TENSOR = object()


class _Part(NamedTuple):
    """What a tuple, a list or a dictionary has to have in it: `_TENSOR`s, plain values, and others such."""

    kind: type
    names: tuple[str, ...]
    children: tuple[Any, ...]


def _arguments(call: Call) -> _Given | None:
    """What takes the tensors out of arguments that are otherwise the same as those of this call; None where they all are
    tensors, and positional.

    Raises:
        _Other: they are in containers of another kind.
    """
    assert call.shape is not None
    part = _part(call.shape, iter(call.leaves))
    (_, _, positional), (_, names, _) = part.children
    return None if not names and all(x is _TENSOR for x in positional) else partial(_taken, part)


def _part(node: Node | None, leaves: Iterator[Any]) -> Any:
    if node is None:
        leaf = next(leaves)
        return leaf if type(leaf) in _VALUES else _TENSOR
    if node.kind not in (tuple, list, dict) or any(type(name) is not str for name in node.names):
        raise _Other
    return _Part(node.kind, node.names, tuple([_part(child, leaves) for child in node.children]))


class _Other(Exception):
    """A container of another kind is among the arguments."""


def _taken(part: _Part, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    found: list[Any] = []
    return tuple(found) if _takes(part, (args, kwargs), found) else None


def _takes(part: _Part, x: Any, found: list[Any]) -> bool:
    """Whether this has in it what it has to, in the same order."""
    kind, names, children = part
    theirs: type = type(x)
    if theirs is not kind or len(x) != len(children):
        return False
    if not all(map(is_, x, names)):  # of a dictionary: the very names, as those that stand in code are
        return False
    for value, child in zip(x.values() if names else x, children, strict=True):
        if child is _TENSOR:
            found.append(value)
        elif type(child) is _Part:
            if not _takes(child, value, found):
                return False
        elif value is not child:
            return False
    return True


def _looks_at_arguments(player: Player, call: Call) -> bool:
    """Whether it matters to a recording which tensors the arguments are, and not only where they are and what they hold; or
    whether it may be that the call has to be begun again, or has to be refused."""
    recording = player.recording
    return bool(recording.live_parts) or any(s.written for s in recording.slots) or player.half_attached(call)
