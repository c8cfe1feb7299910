"""Generators that compiled code has of its own, for what its backward recomputes.

Where a part that draws random numbers is recomputed, AOTAutograd gives the compiled function pairs of generators on CUDA: its
forward draws from one of each, and its backward draws the same again from the other. It numbers the calls. Where the backward
of one comes next after that of the call before, the other stands right by itself; for any other it has kept where the first
stood, in a tensor, and puts it there.

A replay takes a number as well. Before, it *settles* what AOTAutograd keeps: for each call that waits for its backward, where
the first stood is kept, and the other counts as standing nowhere. So any live call finds what it would have found. For the
replay itself, the generators of the backward are put to where those of the forward have begun, in the replay of that
forward. A capture counts from its own beginning, in both: so the places that are kept in it mean the same in each replay.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType

import torch

from .._torch.cuda import OnStream
from .._torch.dynamic import Private
from .._torch.dynamo import compiled_call, kept_of_generators, number_of_call

__all__ = ["Begins", "OwnGenerators", "among", "own_of", "own_of_caller", "settled"]

Begins = tuple[tuple[int, int], ...]
"""Where generators have begun: seeds and offsets."""

_NOWHERE = -1  # the number of no call


class OwnGenerators:
    """Those of one compiled function."""

    def __init__(self, kept: Private) -> None:
        self._kept = kept
        self.begins: Begins = ()
        """Where those of the forward stood before the last replay that draws from them."""

    @property
    def forward(self) -> list[torch.Generator]:
        found: list[torch.Generator] = self._kept.fwd_rng_states
        return found

    @property
    def backward(self) -> list[torch.Generator]:
        found: list[torch.Generator] = self._kept.bwd_rng_states
        return found

    def places(self, number: int) -> list[torch.Tensor]:
        """Where those of the forward stood when this call began; empty if that is not kept."""
        found: list[torch.Tensor] = self._kept.saved_backward_tensor_states.get(number, [])
        return found

    def settle(self, begun: int | None = None) -> None:
        """Let all calls that wait for their backwards have their places kept. Also in a capture, in which the call of number
        `begun` has just begun, and has drawn nothing yet."""
        kept, number = self._kept, self._kept.backward_state_position
        if number == _NOWHERE:
            return
        if number in kept.pending_forwards and number not in kept.saved_backward_tensor_states:
            with nullcontext() if number == begun else _counting_all(self.backward[0].device):
                stand = self.forward if number == begun else self.backward
                kept.saved_backward_tensor_states[number] = [g.get_state() for g in stand]
        kept.backward_state_position = _NOWHERE

    def begin(self) -> None:
        """A replay comes that draws from those of the forward."""
        self.settle()
        next(self._kept.curr_fwd_iter)  # or the next call would seem to begin where the call before this has ended
        self.begins = tuple([(g.initial_seed(), g.get_offset()) for g in self.forward])

    def put_backward(self, begins: Begins) -> None:
        """A replay comes that draws from those of the backward, what the forward has drawn that has begun there."""
        self.settle()
        for g, (seed, offset) in zip(self.backward, begins, strict=True):
            if g.initial_seed() != seed:
                g.manual_seed(seed)
            g.set_offset(offset)

    def forget(self, number: int) -> None:
        """The backward of this call will not come."""
        self._kept.pending_forwards.discard(number)
        self._kept.saved_backward_tensor_states.pop(number, None)


def _counting_all(device: torch.device) -> AbstractContextManager[None]:
    """Generators tell where they stand. Where the current stream is captured, they would count from the beginning of that."""
    return OnStream(torch.cuda.default_stream(device)) if torch.cuda.is_current_stream_capturing() else nullcontext()


@contextmanager
def settled(own: Iterable[OwnGenerators]) -> Iterator[None]:
    """Compiled functions are captured inside the block, with these. Nothing was drawn by the end, however that comes."""
    try:
        yield
    finally:
        for each in own:
            each.settle()


_known: weakref.WeakKeyDictionary[object, OwnGenerators | None] = weakref.WeakKeyDictionary()


def own_of(node: object) -> OwnGenerators | None:
    """The generators that the compiled function has of its own of which this is a node of autograd's."""
    if number_of_call(node) is None:
        return None
    function = type(node)
    if function not in _known:
        kept = kept_of_generators(node)
        _known[function] = None if kept is None else OwnGenerators(kept)
    return _known[function]


def own_of_caller(frame: FrameType | None) -> tuple[OwnGenerators, int] | None:
    """Likewise, of the one that is being called, in the frames that lead to this one; and the number of the call."""
    node = compiled_call(frame)
    own = None if node is None else own_of(node)
    return None if own is None else (own, number_of_call(node) or 0)


def among(generator: torch.Generator, others: Sequence[torch.Generator]) -> bool:
    """Whether this is one of them. (Two Python objects may stand for one.)"""
    return any(generator is g or getattr(generator, "_cdata", generator) == getattr(g, "_cdata", g) for g in others)
