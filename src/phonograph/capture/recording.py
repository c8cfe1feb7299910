"""A recording: one captured call, frozen, with all that is needed to decide whether it may be played and to play it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import Any, NamedTuple, Protocol

import torch

from .._torch.dynamic import Leaves
from .._torch.tensors import address, has_memory
from ..call.signature import Call, Key
from ..errors import Refusal
from ..guards.attribute_epochs import gradient
from ..memory.loans import Borrowed
from ..memory.pool import Lease, Pool, memory_of
from ..memory.spans import Spans
from ..python.holders import Holder
from ..python.identity import identity
from ..python.introspection import tells_its_end
from ..slots.column import Tensors
from ..slots.inputs import Slot
from ..slots.memories import MEMORY
from ..slots.table import Table
from ..values.host_scalars import Reckoned
from ..values.pytree_nodes import Node
from ..values.pytree_paths import path_to
from ..values.tensor_subclasses import parts_of_all
from ..values.wording import Naming
from .breaks import Break
from .origins import Origin

__all__ = [
    "BEGINS_ANEW",
    "MEMORY",
    "TWICE",
    "Entangled",
    "Made",
    "Output",
    "Program",
    "Recording",
    "Replay",
    "Tensors",
    "Work",
    "memory_of",
]

BEGINS_ANEW = "what dropout of cuDNN's draws from, since the generator was seeded"  # by the next live call
Place = tuple[int, int]
"""Where memory lies: its address, and how many bytes it has."""
TWICE = "which it can reach by another name as well, or which shares memory with a tensor it writes"  # of an argument


class Work(NamedTuple):
    """What a profiler shows of one graph."""

    names: list[str]
    """One for each node, as they were captured: what its kernel is called. "" for what does no work, or is not known."""
    in_a_row: bool
    """Each comes after the one before it, and no other: that is the order in which they begin."""


class Program(Protocol):
    """What a device made of the call: a CUDA graph, a tape."""

    footprint: Spans
    owned: Spans
    """Pool memory in the footprint that tensors outside own (gradients that the call created)."""
    operators: int
    amiss: Callable[[], str | None] | None
    """What is not as it must be for it to run now, by name: random generators have one state that had two when it was made, or
    the other way round, say. None if that cannot be."""

    waits: str
    """Why each run waits for the device; empty if it does not."""

    edges: str
    """Whether only those nodes of its graph wait for each other that have to, or why all do; empty if nobody has asked."""

    ran: int
    """How much of it had run where an exception has ended its last run: segments (of a tape: operators), counted from the
    beginning of the call. Who has read it sets it to 0."""
    shows: int
    """Where so much has run, and no more, it has left nothing outside by which one could tell."""

    own_generators: Sequence[torch.Generator]
    """Those of compiled code's own from which it draws, and a live call as well."""
    outs: tuple[torch.Tensor, ...]

    def copies(self, outs: tuple[torch.Tensor, ...]) -> None:
        """Say which results, dense in memory, every run has to copy to memory of the caller's own."""

    def run(self, sources: Tensors) -> list[torch.Tensor]:
        """Run it on the current stream, with the values of `sources` in the slots that are no other's memory, and return new
        copies of `outs`. Does not wait; `sources` may be dropped or written at once."""

    def set_numbers(self, numbers: Mapping[float, float]) -> Set[float]:
        """Replace numbers of the captured call (the keys, which occur nowhere else) by others, from the next launch on: where
        one is another object than last time. The first time, all have to be given. Returns those that are in the program."""

    def holds(self, numbers: Set[float]) -> bool:
        """Whether one of these numbers is anywhere in the captured call, as it is."""

    def work(self) -> list[Work]:
        """What a profiler shows of its graphs, in the order in which they are launched. Takes milliseconds."""

    def close(self) -> None:
        """Free what it owns."""


class Made(NamedTuple):
    """Where a tensor that the call created will lie when the program has run: bytes of the pool."""

    address: int
    nbytes: int


class Output:
    """One leaf of the result, as each replay makes it. (The kinds: `engine/output_kinds.py`.)"""

    of: int = -1
    """The number of the output of which it is made; -1 if of none."""
    memory: torch.Tensor | None = None
    """The tensor outside, or of the recording, on whose memory it lies."""
    attached: bool = False
    """Whether it has a history, which leads to the recording's `backward`."""

    def make(self, replay: Replay) -> object:
        raise NotImplementedError

    def __str__(self) -> str:
        return type(self).__name__.lower()


@dataclass(slots=True)
class Replay:
    """One replay that has been launched, as its results are made."""

    recording: Recording
    pool: Pool
    call: Call | None
    """None for a call that was recognised by its tensors alone."""
    tensors: Sequence[torch.Tensor]
    """Those among its arguments..."""
    borrowed: Mapping[int, Borrowed]
    """...and the borrowed outputs behind some of these, by their numbers."""
    copies: Sequence[torch.Tensor]
    """Copies of small results, made by the program."""
    made: Leaves
    """Results so far, by their numbers."""


def _may_be_memory(value: object) -> bool:
    """Whether a tensor stands in a place, or may later."""
    return value is None or issubclass(type(value), torch.Tensor)


class _Own:
    """What of a function's has to lie where it does for one recording to be played: the recording keeps it, and it keeps these
    tensors. (Not weakly: `torch.utils.swap_tensors` refuses tensors to which somebody refers so.) And what parts that run live
    may find in these places, wherever it lies."""

    __slots__ = ("__weakref__", "arrays", "gradients", "lived_in", "tensors")

    def __init__(
        self, tensors: Iterable[tuple[torch.Tensor, Place]], gradients: Iterable[tuple[torch.Tensor, Place]],
        lived_in: Iterable[Holder], arrays: Iterable[Place],
    ) -> None:  # fmt: skip
        self.tensors, self.gradients, self.arrays = [*tensors], [*gradients], [*arrays]
        self.lived_in = [holder.read for holder in lived_in if any(map(_may_be_memory, holder.read()))]

    def __bool__(self) -> bool:
        return bool(self.tensors or self.gradients or self.arrays or self.lived_in)

    def places(self) -> Iterator[Place]:
        return chain(self.arrays, (place for _, place in (*self.tensors, *self.gradients)))

    def near(self, at: int, nbytes: int) -> Iterator[torch.Tensor | None]:
        """What stands now where there was something that met these bytes."""
        yield from (t for t, place in self.tensors if Spans([place]).meets(at, nbytes))
        yield from (t.grad for t, place in self.gradients if Spans([place]).meets(at, nbytes))

    def of_live_parts(self) -> Iterator[torch.Tensor]:
        """What parts that run live would find now, without gradients."""
        there = [*chain.from_iterable(read() for read in self.lived_in)]
        kinds = {kind: issubclass(kind, torch.Tensor) for kind in {*map(type, there)}}
        return compress(there, map(kinds.__getitem__, map(type, there)))


_ORDINARY = {torch.Tensor, torch.nn.Parameter}


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int] | None:
    """Where they lie; None where that takes more to say."""
    try:
        return [*map(address, tensors)] if {*map(type, tensors)} <= _ORDINARY else None
    except RuntimeError:  # one has no memory
        return None


class Entangled:
    """Tensors that a function can reach by other names, of which none may be an argument, and memory that no argument may
    share; objects, and containers that it fills, likewise, which may not be taken apart. Weakly, but for containers: when a
    storage is gone, its memory is somebody else's.

    But what a tensor of the function's, or its gradient, has to be for a recording to be played is where it lay, on whatever
    storage. So those places stay as long as that recording."""

    def __init__(
        self, tensors: Iterable[torch.Tensor] = (), storages: Iterable[torch.UntypedStorage] = (),
        objects: Iterable[object] = (), filled: Iterable[object] = (),
        own: Iterable[tuple[torch.Tensor, Place]] = (), gradients: Iterable[tuple[torch.Tensor, Place]] = (),
        lived_in: Iterable[Holder] = (), arrays: Iterable[Place] = (),
    ) -> None:  # fmt: skip
        """Of tensors that are the function's `own`, and whose `gradients` are, with where they lie. Parts that run live may
        read and write what is in the places `lived_in`. `arrays` are those that the recording keeps as they are."""
        self.filled = {identity(c): c for c in filled}
        self._objects = {identity(x): weakref.ref(x) for x in objects if tells_its_end(type(x))}
        self._ids = {identity(t): weakref.ref(t) for t in tensors if not isinstance(t, torch.nn.Parameter)}
        self._storages = {(s.data_ptr(), s.nbytes()): weakref.ref(s) for s in storages}
        self._kept = _Own(own, gradients, lived_in, arrays)
        self._own = [weakref.ref(self._kept)] if self._kept else []
        self._places = Spans(self._kept.places())
        self._live: tuple[list[int] | None, Spans] = None, Spans()  # where that lay last, and all of that memory
        self.spans = Spans(self._storages)
        """Where they lie: another object after each change."""

    def refusal(self, call: Call, naming: Naming) -> Refusal | None:
        """Why a call cannot be recorded or played that gets such a tensor; None if it gets none."""
        live = self._of_live_parts()
        meets = (i for i, t in enumerate(call.tensors) if self.meets(t) or (live and _lies_in(live, t)))
        if (i := next(meets, None)) is None:
            return None
        return Refusal(f"gets `{naming(path_to(call.shape, call.places[i]))}`, {TWICE}", "pass a clone")

    @staticmethod
    def of_container() -> Refusal:
        """Why a call cannot be recorded that gets a container which another call fills."""
        return Refusal(f"gets a container, {TWICE}", "pass a copy", this_call=True)

    def __bool__(self) -> bool:
        return bool(self._storages or self._ids or self._own)

    def __ior__(self, other: Entangled) -> Entangled:
        self._ids |= other._ids
        self._objects |= other._objects
        self.filled |= other.filled
        self._storages |= other._storages
        self._own = [ref for ref in (*self._own, *other._own) if ref() is not None]
        self._places = Spans(place for own in self._all_own() for place in own.places())
        self.spans = Spans(self._storages)
        return self

    def _forget_the_dead(self) -> None:
        self._storages = {place: storage for place, storage in self._storages.items() if storage() is not None}
        self.spans = Spans(self._storages)

    def reaches(self, thing: object) -> bool:
        """Whether an object is such a one."""
        if identity(thing) in self.filled:
            return True
        known = self._objects.get(identity(thing))
        return known is not None and known() is thing

    def has_none(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether none of these is such a one, wherever it lies."""
        return self._ids.keys().isdisjoint(map(identity, tensors))

    def may_meet(self, t: torch.Tensor) -> bool:
        """Whether a tensor lies where one of the function's own has lain, which may come back."""
        return self._places.meets(*memory_of(t))

    def meets(self, t: torch.Tensor) -> bool:
        """Whether a tensor that is no Parameter is such a one, or lies in such memory."""
        known = self._ids.get(identity(t))
        if (known is not None and known() is t) or (self.may_meet(t) and self._meets_own(t)):
            return True
        if not self._storages:
            return False
        at, nbytes = memory_of(t)
        if not self.spans.meets(at, nbytes) or isinstance(t, torch.nn.Parameter):
            return False
        self._forget_the_dead()  # an argument may lie where one of them did
        return self.spans.meets(at, nbytes)

    def _all_own(self) -> Iterator[_Own]:
        return (own for ref in self._own if (own := ref()) is not None)

    def _of_live_parts(self) -> Spans:
        """The memory of what parts that run live would find now, and of gradients of that."""
        there = [t for own in self._all_own() for t in own.of_live_parts()]
        there += [g for g in map(gradient, there) if g is not None]
        if (lie := _addresses(there)) is None or lie != self._live[0]:
            self._live = lie, Spans(map(memory_of, filter(has_memory, parts_of_all(there))))
        return self._live[1]

    def _meets_own(self, t: torch.Tensor) -> bool:
        """Whether one of the function's own, or such a gradient, lies where it has to, and the tensor there as well."""
        if isinstance(t, torch.nn.Parameter):
            return False
        at, nbytes = memory_of(t)
        if any(Spans(own.arrays).meets(at, nbytes) for own in self._all_own()):
            return True
        there = [one for own in self._all_own() for one in own.near(at, nbytes) if one is not None]
        return any(Spans([memory_of(part)]).meets(at, nbytes) for part in parts_of_all(there) if has_memory(part))


def _lies_in(spans: Spans, t: torch.Tensor) -> bool:
    """Whether a tensor that is no Parameter meets this memory."""
    return not isinstance(t, torch.nn.Parameter) and spans.meets(*memory_of(t))


@dataclass(frozen=True, eq=False)
class Recording:
    """One captured call.

    Results are handed out in one of two ways. Memory in `leases` is the caller's for as long as he holds a tensor on it. What
    lies on `copied`, small results mostly, each replay copies to new memory: it is never in anybody's way.
    """

    name: str
    key: Key
    device: torch.device
    program: Program
    table: Table
    """What it exchanges with the world."""
    shape: Node | None
    outputs: tuple[Output, ...]
    """Leaves of the result, and after them what some are views of and is no result."""
    leases: tuple[Lease, ...]
    copied: tuple[Lease, ...]
    footprint: Spans
    effects: str = ""
    """What playing it does besides giving results; "" if it does nothing else."""
    communicates: bool = False
    """It communicates with other ranks."""
    numbered_apart: bool = False
    """Nodes of autograd's were made on two threads, each of which counts its own. So in which order a backward runs them is not
    the same each time."""
    borrow: bool = False
    backward: Any = field(default=None, repr=False)
    live_parts: tuple[Break, ...] = ()
    """Parts that run live between its segments."""
    numbers: tuple[int, ...] = ()
    """Leaves of the result that are numbers, read of tensors."""
    reckoned: Reckoned | None = field(default=None, repr=False)
    """What is worked out of them."""
    retrace: Any = field(default=None, repr=False)
    """What it takes to compare it with the code that it was made of."""
    origins: tuple[tuple[tuple[int, Origin], ...], ...] = field(default=(), repr=False)
    """Where what it runs comes from, segment by segment: up to which step of the tape, or node of the graph."""
    releases: frozenset[Lease] = frozenset()
    """Saved memory that it may write once it has read it. The one call whose backward this is may hold that."""
    reads: Any = field(default=None, repr=False)
    """Saved tensors that it reads, as the backward of another."""
    entangled: Entangled = field(default_factory=lambda: Entangled(), repr=False)
    """Memory in which no argument may lie."""
    rivals: list[tuple[int, int, Callable[[], object], int]] = field(default_factory=list, repr=False)
    """Leases that playing it would overwrite, kept current by the pool."""

    @property
    def room(self) -> Spans:
        """What of its footprint it hands out nothing in: free when it has been played."""
        return self.footprint - Spans((lease.address, lease.nbytes) for lease in self.leases)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return self.table.inputs.slots

    @property
    def borrowed_memory(self) -> Spans:
        """Where borrowed slots lie."""
        return self.table.inputs.memory

    @property
    def spoiled(self) -> list[str]:
        """Names of what it works with and has lost: its memory, mostly."""
        return self.table.memories.lost

    def __str__(self) -> str:
        slots, *sets, relies = self.table.explain()
        lines = [
            f"recording of {self.name} on {self.device}: {self.program.operators} operators",
            slots,
            f"outputs: {', '.join(map(str, self.outputs)) or 'none'}",
            *[f"live between its segments: {part}" for part in self.live_parts],
            *[f"reads {len(self.numbers)} numbers at its end, which it hands on"][: bool(self.numbers)],
            *sets,
            *[f"each replay waits for the device: {self.program.waits}"][: bool(self.program.waits)],
            *[f"edges of its graph: {self.program.edges}"][: bool(self.program.edges)],
            f"footprint: {self.footprint.nbytes / (1 << 20):.3g} MiB; {relies}",
        ]
        return "\n  ".join(lines)
