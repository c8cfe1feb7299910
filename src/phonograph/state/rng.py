"""States of random generators as values of a call: `torch.get_rng_state()` in it, and `torch.set_rng_state(state)` later.

So `torch.random.fork_rng` works, and so does recompute: it puts back the state that its forward has begun with, in order to
draw the same numbers again. On the CPU such a state is a tensor like any other, and setting it is a step of the tape. On
CUDA a capture does not know where the generator will stand at a replay. It counts from its own beginning, and a state is a
place in that count: it means something to the capture that has read it, and nothing to any other.

A generator on CUDA can also be given the whole state of another (`graphsafe_set_state`), which both of them then move on:
trackers of named generators work so. A graph knows states, and not generators; so what it needs is that each generator has
the state with which it was captured, or one with the same numbers.

Compiled code has generators of its own besides, for what its backward draws again (`own_generators`).
"""

from __future__ import annotations

import ctypes
import inspect
import sys
import weakref
from collections.abc import Callable, Sequence
from itertools import combinations
from types import CodeType, FrameType
from typing import NamedTuple

import torch

from .._torch.dynamic import Thing
from .._torch.dynamo import puts_own_generators
from ..errors import Refusal
from ..python.identity import identity
from ..values.device_names import named
from .compiled_generators import Begins, OwnGenerators

__all__ = ["FORKS", "READS", "SETS", "CudaState", "Known", "Lent", "Rewind", "States", "asked", "held", "put", "put_offset",
           "reset", "sets_for_torch", "share_state"]  # fmt: skip


def _code(function: Callable[..., object]) -> CodeType:
    code: CodeType = inspect.unwrap(function).__code__
    return code


FORKS = _code(torch.random.fork_rng)
READS = tuple(map(_code, (torch.random.get_rng_state, torch.cuda.random.get_rng_state)))
SETS = tuple(map(_code, (torch.random.set_rng_state, torch.cuda.random.set_rng_state)))
_FILES = frozenset(code.co_filename for code in SETS)


def sets_for_torch(frame: FrameType) -> bool:
    """Whether this frame, which calls `Generator.set_state`, belongs to one of torch's functions for that."""
    code = frame.f_code
    return code in SETS or (code.co_filename in _FILES and code.co_name == "cb") or puts_own_generators(frame)


def asked(frame: FrameType) -> torch.device:
    """Whose state a call of torch's functions reads or sets."""
    device = frame.f_locals.get("device", "cpu")
    return named(torch.device("cuda", device) if isinstance(device, int) else torch.device(device))


class CudaState(ctypes.Structure):
    """What is in the state of a CUDA generator: its seed, and how many numbers each thread has drawn."""

    _fields_ = (("seed", ctypes.c_uint64), ("offset", ctypes.c_int64))
    seed: int
    offset: int
    _state: torch.Tensor

    @classmethod
    def of(cls, state: torch.Tensor) -> CudaState:
        """The contents of a state, to be read and written without an operator."""
        found = cls.from_address(state.data_ptr())
        found._state = state  # whose memory it is
        return found


def _unheard(g: torch.Generator) -> torch.Generator:
    """Another generator with the state of this one, for whoever sets it. A generator notes that it was set, and where a default
    one was, cuDNN's recurrent layers begin their dropout anew: by what the user sets, and by nothing else."""
    return g.graphsafe_get_state() if g.device.type == "cuda" else g


def put(g: torch.Generator, state: torch.Tensor) -> None:
    """Let a generator stand where it stood before, as if nothing had happened. Not during a capture."""
    _unheard(g).set_state(state)


def put_offset(g: torch.Generator, offset: int) -> None:
    """Likewise, with the seed that it has."""
    _unheard(g).set_offset(offset)


def reset(g: torch.Generator) -> None:
    """What a call that has set a generator leaves besides where it stands."""
    g.set_offset(g.get_offset())


def share_state(a: torch.Generator, b: torch.Generator) -> bool:
    """Whether two generators have one state: what one draws, the other does not draw again. Not during a capture."""
    if a is b or not a.device.type == b.device.type == "cuda":
        return a is b
    stood = a.get_offset()
    if b.get_offset() != stood or a.initial_seed() != b.initial_seed():
        return False
    mine = _unheard(a)
    mine.set_offset(stood + 4)
    together = b.get_offset() != stood
    mine.set_offset(stood)
    return together


(_LONE,) = [sys.getrefcount(x) for x in [object()]]  # references to what only a list has, while it is gone through


def held(generators: list[torch.Generator]) -> list[torch.Generator]:
    """Those that somebody else has as well."""
    return [g for g in generators if sys.getrefcount(g) > _LONE]


class Lent(NamedTuple):
    """What a state that a graph knows was lent: the numbers of a generator. Where those are others, `before` is what stood
    there."""

    generator: torch.Generator
    own: torch.Generator
    stood: int
    before: torch.Tensor | None


class Known:
    """The states that some generators of the GPU have when this is made, before or after a capture: a graph knows them."""

    def __init__(self, generators: list[torch.Generator], lone: Sequence[torch.Generator] = ()) -> None:
        """Those that are `lone` have states of their own for ever: nobody knows them but the code that has made them."""
        self.generators = generators
        self.lone = [g for g in generators if any(g is one for one in lone)]
        self._others = [g for g in generators if all(g is not one for one in self.lone)]
        self._states = [(g, g.graphsafe_get_state()) for g in generators]
        self._together = self._which_share()
        again = {j for _, j in self._together}
        distinct = [g for j, g in enumerate(self._others) if j not in again]
        self._distinct = [(g, own) for g, own in self._states if any(g is one for one in distinct)]

    @property
    def may_mix(self) -> bool:
        """Whether there are several that may get one state, or have one."""
        return len(self._others) > 1

    def mixed(self) -> bool:
        """Whether some of them have one state that had two, or the other way round: a graph cannot follow that."""
        return self._which_share() != self._together

    def _which_share(self) -> set[tuple[int, int]]:
        """Pairs of those that are not alone, by their places."""
        pairs = combinations(enumerate(self._others), 2)
        return {(i, j) for (i, a), (j, b) in pairs if share_state(a, b)}

    def drawn(self) -> list[torch.Generator]:
        """Those from whose states something was drawn so far, in the middle of a capture: there, a state counts from its
        beginning."""
        return [g for g, own in self._states if CudaState.of(own.get_state()).offset]

    def state_of(self, g: torch.Generator) -> torch.Generator:
        """The state that this one of them had, as a generator that has it for ever."""
        return next(own for known, own in self._states if known is g)

    def is_own(self, g: torch.Generator) -> bool:
        """Whether this one of them has its state, in the middle of a capture."""
        own = self.state_of(g)
        state = own.get_state()
        stands = CudaState.of(state)
        if CudaState.of(g.get_state()).offset != stands.offset:
            return False
        stands.offset += 4
        own.set_state(state)
        found = CudaState.of(g.get_state()).offset == stands.offset
        stands.offset -= 4
        own.set_state(state)
        return found

    def put_back(self) -> bool:
        """Give each generator its state again. Returns whether all of them still had it."""
        had = all(share_state(g, own) for g, own in self._states)
        for g, own in self._states:
            g.graphsafe_set_state(own)
        return had

    def lend(self, lent: list[Lent]) -> None:
        """Before a launch: the states begin with the numbers of what the generators have now. Each is noted first."""
        for g, own in self._distinct:
            stood = g.get_offset()
            same = stood == own.get_offset() and g.initial_seed() == own.initial_seed()
            lent.append(Lent(g, own, stood, None if same else own.get_state()))
            if not same:
                own.set_state(g.get_state())

    @staticmethod
    def take_back(lent: Sequence[Lent], launched: object) -> None:
        """After it: the generators are where the launch has left the states, and in those stands what stood before. May be done
        again where an interrupt has ended it."""
        for g, own, stood, before in lent:
            if launched and g.get_offset() == stood != (stands := own.get_offset()):
                put_offset(g, stands)  # it has another state, perhaps with the same numbers
                own.set_offset(stood)
            if before is not None:
                own.set_state(before)


class Rewind:
    """What a backward on CUDA needs in order to draw the numbers of its forward again: the states that this has read, each
    as a number of draws after its beginning, and where it has begun; and likewise of generators of compiled code's own."""

    def __init__(
        self, device: torch.device, states: list[torch.Tensor], drawn: int, calls: Sequence[tuple[OwnGenerators, int]] = ()
    ) -> None:
        """`calls` of compiled functions, by their numbers."""
        self._generator = torch.cuda.default_generators[device.index]
        self._states = states
        # Those of the CPU's generator are here as well: nothing is drawn from it.
        cuda = [state for state in states if state.nbytes == ctypes.sizeof(CudaState)]
        self._places = [(state, CudaState.of(state).offset) for state in cuda]
        self._drawn = drawn  # by the forward
        self.own = list(dict.fromkeys(own for own, _ in calls))
        self._calls = frozenset(calls)
        self._own_places = [(own, state, i, CudaState.of(state).offset) for own, number in calls
                            for i, state in enumerate(own.places(number))]  # fmt: skip
        for own, number in calls:
            weakref.finalize(self, own.forget, number).atexit = False
        self.begins: tuple[Begins, ...] = (((0, 0),), *[((0, 0),) * len(own.forward) for own in self.own])
        """Seed and offset at the beginning of the forward whose backward comes next: of the default generator, and of each of
        those of the `own`."""

    def of_last(self) -> tuple[Begins, ...]:
        """Where the forward has begun that was played just now."""
        default = self._generator.initial_seed(), self._generator.get_offset() - self._drawn
        return (default,), *[own.begins for own in self.own]

    def knows(self, state: torch.Tensor) -> bool:
        """Whether the forward has read it."""
        return any(s is state for s in self._states)

    def has_called(self, own: OwnGenerators, number: int) -> bool:
        """Whether the forward has made this call."""
        return (own, number) in self._calls

    def prepare(self) -> None:
        """Let the states mean what they do in the backward that begins: in a capture, which is played from where the forward
        has begun, their place in that; otherwise their place in all numbers."""
        ((seed, start),), *begins = self.begins
        captured = torch.cuda.is_current_stream_capturing()
        if captured:
            seed, start = CudaState.of(self._generator.get_state()).seed, 0
        for state, n in self._places:
            now = CudaState.of(state)
            now.seed, now.offset = seed, start + n
        self.settle()
        of = dict(zip(self.own, begins, strict=True))
        for own, state, i, n in self._own_places:
            seed, start = of[own][i] if not captured else (CudaState.of(own.backward[i].get_state()).seed, 0)
            now = CudaState.of(state)
            now.seed, now.offset = seed, start + n

    def settle(self) -> None:
        """Compiled functions have run."""
        for own in self.own:
            own.settle()

    def begin(self) -> None:
        """Put the generator to where the forward has begun."""
        state = self._generator.get_state()
        now = CudaState.of(state)
        ((now.seed, now.offset),), *_ = self.begins
        put(self._generator, state)

    def begin_own(self, own: OwnGenerators) -> None:
        """Put those that compiled code has for its backward to where the forward has begun."""
        own.put_backward(self.begins[1 + self.own.index(own)])


class States:
    """The states that a capture has read, and that something still refers to."""

    def __init__(self) -> None:
        self._read: dict[int, tuple[weakref.ref[torch.Tensor], object]] = {}

    def read(self, state: torch.Tensor, meaning: object = None) -> None:
        self._read[identity(state)] = weakref.ref(state), meaning

    def knows(self, t: torch.Tensor) -> bool:
        """Whether this is one of them."""
        ref, _ = self._read.get(identity(t), (None, None))
        return ref is not None and ref() is t

    def meaning(self, state: torch.Tensor) -> Thing:
        """What was noted of this state.

        Raises:
            Refusal: it was not read in this capture.
        """
        if not self.knows(state):
            raise Refusal("sets the state of a random generator to one from outside of the call",
                          "set it outside, or read it (torch.get_rng_state, torch.cuda.get_rng_state) inside")  # fmt: skip
        return self._read[identity(state)][1]

    def held(self) -> list[torch.Tensor]:
        return [t for ref, _ in self._read.values() if (t := ref()) is not None]
