"""One forward of a recorded call, between its replay and its backward.

What the forward has saved lies in memory of the recording, which is lent to the call until all of it has been read by a
backward, or the graph is dropped. Eager notices when a tensor that was saved is written before its backward. The same is done
here, for those that the backward of the given gradients reads: they are known once it has run live.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from operator import attrgetter
from typing import NamedTuple

import torch
from torch.autograd.graph import Node

from .._torch.autograd import backward_id, made_when, may_run_backward, when_backward_ends, will_run
from .._torch.tensors import is_ordinary
from ..call.signature import unseen
from ..errors import Refusal
from ..memory.pool import unexpanded
from ..python.identity import identity
from ..state.compiled_generators import Begins
from ..values.tensor_subclasses import parts, parts_of_all
from .backward import Backward
from .double_backward import Twice, between
from .graph import Graph
from .saved import spent

__all__ = ["Flight", "Look", "Read", "Wiring"]

_SEEN = Refusal("has a gradient of one result with respect to another, through what cannot be run by itself",
                "record what contains that backward as well")  # fmt: skip
_PAST = Refusal("has a result with a hook, or one that retains its gradient, which gradients of chosen inputs do not depend on",
                "record the parts by themselves")  # fmt: skip
_WRITTEN = ("one of the variables needed for gradient computation has been modified by an inplace operation: a {}, between the "
            "forward of a recorded function and its backward")  # fmt: skip
_RESHAPED = ("since the forward of a recorded function, an argument that its code keeps was made another kind of tensor, "
             "{} of {}: keep it by ctx.save_for_backward, or leave the argument what it was")  # fmt: skip

_NONE = frozenset[int]()


class Read(NamedTuple):
    """Saved tensors that a backward reads."""

    numbers: Set[int]
    places: tuple[int, ...]
    """Places, among a flight's, of those that somebody may write before it."""


class Look(NamedTuple):
    """Results on which others depend, in one backward."""

    seen: frozenset[int]
    """Those at whose gradients somebody looks..."""
    cut: set[int]
    """...and those whose gradients are complete."""


class Wiring:
    """The way in which calls of one recording are put into the user's graph of autograd, worked out once."""

    def __init__(self, traced: Backward, elsewhere: bool) -> None:
        graph, saved = traced.graph, traced.saved
        self.traced = traced
        self.elsewhere = elsewhere
        """Whether the backward is played on the stream where gradients are added up."""
        self.constant = list({identity(t): t for t in saved.constant.values()}.values())
        self.exposed = list(dict.fromkeys(saved.exposed.values()))
        self.ordinary = all(map(is_ordinary, self.constant))
        # Which of those, constant and exposed, a number stands for.
        at = {identity(t): i for i, t in enumerate(self.constant)}
        self._index = {n: at[identity(t)] for n, t in saved.constant.items() if n not in saved.unversioned}
        self._index |= {n: len(at) + self.exposed.index(i) for n, i in saved.exposed.items()}
        first = len(at) + len(self.exposed)
        self._index |= {n: first + i for n, i in saved.places.whose.items()}
        self.inner = {k for others in graph.upstream for k in others}
        """Results on which others depend."""
        self.aside = {i for i, some in enumerate(graph.reaches) if some != frozenset[int]().union(*graph.reaches)}
        """Results that do not depend on all that others do: gradients of chosen inputs may lead past them."""
        several = range(len(graph.attached)) if len(graph.attached) > 1 else ()
        self.apart = _as_made(graph, several)
        """Results that come out of a node of their own, those that others depend on first: gradients of the last come first."""
        self._saves_numbers = any(graph.numbered)

    def version_of(self, number: int) -> int | None:
        """The place of a saved tensor among those that somebody may write, if it is one."""
        return self._index.get(number)

    def read_of(self, numbers: Set[int]) -> Read:
        """Reads of a backward that has asked for these."""
        return Read(numbers, tuple({self._index[n] for n in numbers if n in self._index}))

    def numbered(self, pattern: tuple[bool, ...]) -> Set[int]:
        """Stand-ins for Python numbers that are saved on the ways from the results in a pattern."""
        if not self._saves_numbers:
            return _NONE
        return _NONE.union(*(numbers for numbers, given in zip(self.traced.graph.numbered, pattern, strict=True) if given))

    def unseen(self) -> RuntimeError:
        """Somebody looks at a gradient that cannot be given by itself."""
        self.traced.forward.stop(_SEEN)
        return RuntimeError(f"phonograph: a recorded function {_SEEN.reason}. From its next call on, it runs live.")


def _as_made(graph: Graph, several: Iterable[int]) -> list[int]:
    """Results in the order in which they were made, those that others depend on first. (Threads number their nodes apart.)"""
    left, placed = sorted(several, key=lambda i: made_when(graph.ends[i].node)), list[int]()
    while left:
        i = next(i for i in left if set(graph.upstream[i]) <= {*placed})
        left.remove(i)
        placed.append(i)
    return placed


class Flight:
    """One call between its forward and its backward: the memory that it holds, and the versions of what it has saved."""

    def __init__(
        self, wiring: Wiring, memory: list[torch.UntypedStorage | None], saved: list[torch.Tensor], given: list[torch.Tensor],
        sources: list[torch.Tensor],
    ) -> None:  # fmt: skip
        self.wiring = wiring
        self.given = given  # arguments of which something was saved
        self.sources = sources  # what it depends on, by the graph's entries
        self.twice: Twice | None = None  # once a backward of it was to be differentiated
        self._memory: list[torch.UntypedStorage | None] | None = memory
        self._saved = saved
        self._versions = _versions(saved, wiring.ordinary)
        theirs = saved if wiring.ordinary else parts_of_all(saved)
        self._storages = [*map(torch.Tensor.untyped_storage, theirs)]  # other weights may take their place meanwhile
        self._waiting = set(range(len(wiring.traced.graph.attached)))  # results whose backward has not run
        self._unread = set(wiring.traced.saved.kept)  # what no backward has read
        self.spent: Set[int] = frozenset()  # what the last to read it has read
        self.begins: tuple[Begins, ...] = ()  # where generators stood, if the backward draws the forward's numbers again
        self.arguments: list[tuple[torch.Tensor, torch.Tensor]] = []  # that code keeps, after their slots
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # results, after what they are copies of
        self.looks: dict[int, Look] = {}  # by the numbers of the backwards that run
        self._joined: weakref.ref[Node] | None = None  # it has this
        self._watched: dict[int, tuple[weakref.ref[torch.Tensor], dict[int, object]]] = {}  # results on which others depend

    def watch(self, i: int, t: torch.Tensor) -> None:
        """From now on it is known what hooks a result gets, also once it is gone."""
        t.register_hook(unseen)
        self._watched[i] = weakref.ref(t), t._backward_hooks  # type: ignore[assignment]

    def watched(self, i: int) -> bool:
        """Whether somebody has asked for the gradient of a result."""
        ref, hooks = self._watched[i]
        t = ref()
        return len(hooks) > 1 or (t is not None and t.retains_grad)

    def look(self) -> Look:
        """At which results' gradients somebody looks in the running backward, or may: that of chosen inputs does not say which
        they are. It stays so until its end."""
        number, looks = backward_id(), self.looks
        if number not in looks:
            asked = not may_run_backward()
            looks[number] = Look(frozenset(k for k in self.wiring.inner if asked or self.watched(k)), set())
            when_backward_ends(lambda: looks.pop(number, None) and None)
        return looks[number]

    def cut(self) -> list[int]:
        """The results whose gradients the running backward has made complete."""
        look = self.looks.pop(backward_id(), None)
        if look is None:
            return []
        if any(self.watched(k) and k not in look.seen for k in self.wiring.inner):
            raise self.wiring.unseen()  # a hook was set while the backward ran, and has seen a part
        return sorted(look.cut)

    def chosen(self, pattern: tuple[bool, ...], edges: Sequence[tuple[Node | None, int]]) -> list[bool] | None:
        """Where gradients of chosen inputs are asked for: to which starts some flow, if not to all. These edges lead to the
        entries."""
        if may_run_backward():
            return None
        wanted = [(other := edges[k][0]) is not None and will_run(other) for k in self.wiring.traced.graph.firsts]
        if all(wanted):
            return None
        chosen = {i for i, asked in enumerate(wanted) if asked}
        for i in self.wiring.aside:
            if pattern[i] and chosen.isdisjoint(self.wiring.traced.graph.reaches[i]) and self.watched(i):
                self.wiring.traced.forward.stop(_PAST)
                raise RuntimeError(f"phonograph: a recorded function {_PAST.reason}. From its next call on, it runs live.")
        return wanted

    def joined(self, node: Node) -> None:
        self._joined = weakref.ref(node)

    def differentiates(self, node: Node) -> Twice:
        """A backward is to be differentiated, of the call of which this is the node."""
        if self.twice is None:
            graph = self.wiring.traced.graph
            starts = {start.node for start in graph.starts}
            self.twice = Twice(node, len(graph.attached), between(graph.ends, starts), starts)
        return self.twice

    def versioned(self, twice: Twice, number: int, t: torch.Tensor) -> torch.Tensor:
        """What was saved, with the version of what somebody may write: a backward that is to be differentiated saves it again,
        and autograd then notices by itself. Where it lies elsewhere, that is left to `twice`."""
        i = self.wiring.version_of(number)
        if i is None:
            return t
        theirs = self._saved[i]
        if not is_ordinary(theirs):
            twice.read.add(number)
            return t
        together = theirs.dtype is t.dtype and theirs.untyped_storage().data_ptr() == t.untyped_storage().data_ptr()
        if not together or theirs.is_inference() or t.is_conj() or t.is_neg():
            twice.read.add(number)
            return t
        return theirs.detach().as_strided(t.size(), t.stride(), t.storage_offset())

    def node(self) -> Node:
        """The node of the whole call, in a backward that comes to one of its results."""
        node = self._joined() if self._joined is not None else None
        assert node is not None
        return node

    def joined_runs(self) -> bool:
        """Whether the running backward comes to the node of the whole call: if not, somebody asks for one of its results."""
        node = self._joined() if self._joined is not None else None
        return node is None or will_run(node)

    @property
    def over(self) -> bool:
        """Whether a backward of all its results has run that does not retain the graph."""
        return not self._waiting

    @property
    def gone(self) -> Set[int]:
        """The numbers of what can be read no more."""
        saved = self.wiring.traced.saved
        if not self._waiting:
            return saved.kept | saved.constant.keys() | saved.exposed.keys()
        return self.spent if self._memory is not None else self.spent | saved.kept

    def unwritten(self) -> bool:
        """Whether nothing was written that was saved."""
        return not self._saved or _versions(self._saved, self.wiring.ordinary) == self._versions

    def check(self, read: Read) -> None:
        if self.unwritten():
            return
        for i in read.places:
            if _version(self._saved[i]) != self._versions[i]:
                raise RuntimeError(_WRITTEN.format(f"tensor of shape {tuple(self._saved[i].shape)}"))

    def refresh(self) -> None:
        """What code keeps of the arguments by itself, it sees as they are at the backward. So are results, of which a copy was
        handed out: who writes one and leaves its version alone (`y.data`), has written what eager would read.

        Raises:
            RuntimeError: one has been made another tensor, with which code was not recorded.
        """
        for slot, t in self.arguments:
            if _kind(t) != _kind(slot):
                raise RuntimeError(_RESHAPED.format(_kind(t), _kind(slot)))
            if t.data_ptr() != slot.data_ptr():
                slot.copy_(t.detach())
        for place, t in self.copies if self._memory is not None else ():
            unexpanded(place).copy_(unexpanded(t))

    def read(self) -> list[torch.Tensor]:
        """The arguments of which something was saved. One that was saved itself, autograd reads as it is by now. (Whoever gives
        it other memory, `x.data = ...`, leaves its version alone.)"""
        return [t.detach() for t in self.given]

    def begin(self, read: Read | None, numbered: Set[int]) -> None:
        """A backward begins, which reads this if that is known, and goes through what has saved these Python numbers."""
        self._still_whole(read, numbered)
        self.refresh()
        rewind = self.wiring.traced.recompute.rewind
        if rewind is not None:
            rewind.begins = self.begins

    def _still_whole(self, read: Read | None, numbered: Set[int]) -> None:
        over = not self._waiting
        if numbered and (over or not numbered.isdisjoint(self.spent)):
            raise spent()
        if over and (self.wiring.traced.kept.held or (read is not None and read.numbers)):
            raise spent()
        if read is not None:
            self.check(read)

    def landed(self, pattern: tuple[bool, ...], read: Read) -> None:
        """A backward has run that does not retain the graph: of the results in the pattern, and it has read this. Other results
        may still need weights, which are no memory of the recording."""
        self._waiting -= {i for i, given in enumerate(pattern) if given}
        self._unread -= read.numbers
        if not self._unread:
            self._memory = None
        if not self._waiting:
            if self.wiring.elsewhere and self.given:  # what reads them may be at work yet, on another stream than theirs
                when_backward_ends(self.given.clear)  # (autograd may keep what it calls a moment longer)
            self._memory, self._saved, self._storages, self.arguments, self.given = None, [], [], [], []
            self.copies = []
            if self.twice is None:
                self.sources = []


def _version(t: torch.Tensor) -> object:
    """How often it was written; and of one that consists of parts, which these are: others are read at other places."""
    version = 0 if t.is_inference() else t._version
    return version if is_ordinary(t) else (version, *map(identity, parts(t)))


def _kind(t: torch.Tensor) -> tuple[object, ...]:
    return t.shape, t.stride(), t.dtype, t.device


def _versions(tensors: list[torch.Tensor], ordinary: bool) -> list[object]:
    try:
        return [*map(_counted if ordinary else _version, tensors)]
    except RuntimeError:  # one of them is an inference tensor, which has none
        return [*map(_version, tensors)]


_counted: Callable[[torch.Tensor], int] = attrgetter("_version")
