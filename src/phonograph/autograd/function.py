"""A recorded forward and its backward, joined to the user's own graph of autograd.

The forward's replay hands out its results as results of one autograd function, whose inputs are the arguments and
parameters that they depend on. So everything outside is as usual: other modules before and after, `.grad` and hooks of
parameters, `torch.autograd.grad`. What the function does in backward is a recorded function of its own (`Backward`), with
a recording for each pattern of gradients.

What the forward has saved is lent to the autograd function, as a result is lent to the user. Until all of it has been read by
a backward, or the graph is dropped, that memory is held: another forward meanwhile finds its recording in the way and gets a
second one. There are as many as there are forwards in flight. An argument that was saved is kept as it is, as eager does.

Where there are several results, that one node is not enough. A hook of one must not hear of a backward of the others, and where
one depends on another, whose gradient is looked at (`retain_grad`, a hook, `autograd.grad`), a gradient flows from the one to
the other. So each comes out of a node of its own, behind it. As long as nobody looks, these just pass on what arrives.

Eager notices when a tensor that was saved is written before its backward. The same is done here, for those that the backward
of the given gradients reads: they are known once it has run live.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Container, Iterable, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge

from .._torch.autograd import (
    backward_id,
    keeps_graph,
    may_run_backward,
    ready_for_gradients,
    waits_for_all,
    when_backward_ends,
    will_run,
)
from .._torch.dynamo import ended_by
from .._torch.modes import is_batched
from .._torch.tensors import alias, is_ordinary
from ..call.signature import unseen
from ..errors import Refusal
from ..memory.pool import copy_of
from ..python.identity import identity
from ..python.origin import users_line
from ..state.compiled_generators import Begins
from ..values.tensor_subclasses import parts, parts_of_all
from .backward import Backward, Gradients
from .double_backward import Arrived, Ends, Leaf, Twice, between, border, handed_out, leaf_of
from .saved import Asked, spent

__all__ = ["TWICE", "Joint"]

_SEEN = Refusal("has a gradient of one result with respect to another, through what cannot be run by itself",
                "record what contains that backward as well")  # fmt: skip
_PAST = Refusal("has a result with a hook, or one that retains its gradient, which gradients of chosen inputs do not depend on",
                "record the parts by themselves")  # fmt: skip
TWICE = Refusal("has a backward with create_graph=True", "record what contains that backward as well")
"""Where backwards are themselves to be differentiated, calls had better run live."""

_NONE = frozenset[int]()

MANY = 32
"""Where gradients are added up on another stream than the caller's: up to so many parameters a backward is played on the
caller's, and autograd waits for the other at each of them. On the other one it waits at each gradient that comes in, and the
allocator polls until those have been read. Chosen between 13 parameters, where that was slower, and 148, where it was faster
(H200)."""

_WRITTEN = ("one of the variables needed for gradient computation has been modified by an inplace operation: a {}, between the "
            "forward of a recorded function and its backward")  # fmt: skip


_RESHAPED = ("since the forward of a recorded function, an argument that its code keeps was made another kind of tensor, "
             "{} of {}: keep it by ctx.save_for_backward, or leave the argument what it was")  # fmt: skip

_REENTRANT = ("When use_reentrant=True, torch.utils.checkpoint is incompatible with .grad() or passing an `inputs` parameter "
              "to .backward(). Set use_reentrant=False, or call .backward() without `inputs`.")  # fmt: skip


class Joint:
    """What joins one recording's results to the graph. Its `Backward` is `recorded` up to twice: as one that retains what is
    saved, and as the last that reads it."""

    def __init__(
        self, traced: Backward, recorded: Callable[[Backward], Callable[..., Gradients]],
        joining: Callable[[bool, bool], AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        ready_for_gradients()
        self.traced = traced
        self._recorded = recorded
        self._backwards: dict[bool, Callable[..., Gradients]] = {}  # by whether they are the last
        self._joining = joining
        self._memory = [lease.python for lease in traced.memory]  # the storages, weakly: a flight holds them
        self._constant = list({identity(t): t for t in traced.constant.values()}.values())
        self._exposed = list(dict.fromkeys(traced.exposed.values()))
        self.ordinary = all(map(is_ordinary, self._constant))
        # Which of those, constant and exposed, a number stands for.
        at = {identity(t): i for i, t in enumerate(self._constant)}
        self._index = {n: at[identity(t)] for n, t in traced.constant.items() if n not in traced.unversioned}
        self._index |= {n: len(at) + self._exposed.index(i) for n, i in traced.exposed.items()}
        first = len(at) + len(self._exposed)
        self._index |= {n: first + i for n, i in traced.places.whose.items()}
        self.inner = {k for others in traced.upstream for k in others}
        # Results that do not depend on all that others do: gradients of chosen inputs may lead past them.
        self._aside = {i for i, some in enumerate(traced.reaches) if some != frozenset[int]().union(*traced.reaches)}
        several = range(len(traced.attached)) if len(traced.attached) > 1 else ()
        self.elsewhere = traced.lasting and len(traced.parameters) > MANY
        """Whether the backward is played on the stream where gradients are added up."""
        self._apart = sorted(several, key=lambda i: len(traced.upstream[i]))  # those that others depend on come first
        self._saves_numbers = any(traced.numbered)
        self._read: dict[tuple[bool, ...], _Read] = {}  # by which gradients are given: what that backward reads

    def attach(self, results: list[Any], arguments: Sequence[torch.Tensor], borrowed: Container[int]) -> None:
        """Give those of a call's results their history that have one. `results` are all of them. Of arguments that are
        `borrowed`, the memory is another's from the next call on."""
        traced = self.traced
        if traced.at_rest is None:
            traced.at_rest = traced.owners()
        made = [results[i] for i in traced.attached]
        # What comes out of a node of its own takes the tensor that is handed out.
        given = [alias(t) if i in self._apart else t for i, t in enumerate(made)]
        # Detached, so that they do not hold themselves; they share their version with the result.
        kept = [
            copy_of(arguments[i].detach()) if i in borrowed else arguments[i] if itself else arguments[i].detach()
            for i, itself in traced.places.arguments
        ]
        saved = [*self._constant, *[results[i].detach() for i in self._exposed], *kept]
        sources = [*[arguments[i] for i in traced.arguments], *traced.parameters]
        flight = _Flight(self, [ref() for ref in self._memory], saved, kept, sources)
        if traced.recompute.rewind is not None:
            flight.begins = traced.recompute.rewind.of_last()
        flight.arguments = [
            (slot, arguments[i] if i in traced.themselves else arguments[i].detach())
            for i, slot in traced.slots.items()
            if i not in borrowed
        ]
        with self._joining(traced.lasting, self.elsewhere):
            joined = [*_Joined.apply(flight, given, *sources)]
            if self._apart:
                flight.joined(joined[0].grad_fn)
            for i in self._apart:
                others = [joined[k] for k in traced.upstream[i]]
                joined[i] = _Apart.apply(flight, i, [made[i]], joined[i], *others)
                if i in self.inner or i in self._aside:
                    flight.watch(i, joined[i])
        for i, t in zip(traced.attached, joined, strict=True):
            results[i] = t

    def run(self, flight: _Flight, grads: tuple[torch.Tensor | None, ...], node: Any) -> list[torch.Tensor | None]:
        """The backward of one call, which is this node in the graph of autograd."""
        pattern = tuple(g is not None for g in grads)
        known = self._read.get(pattern)
        partly = self._partly(flight, pattern, node)
        numbered = self._numbered(pattern) if self._saves_numbers else _NONE
        self._begin(flight, None if partly else known, numbered)
        cut, retains, arguments = self._cut(flight), keeps_graph(), flight.read()
        last = not retains and may_run_backward()  # of chosen inputs: eager may go only a part of the way
        backward = partly or self._backwards.get(last) or self._backward(last)
        with self.traced.noting(flight.gone) as asked:
            try:
                given = (*grads, *arguments)
                found, added = (partly or self.traced).beyond(cut, given) if cut else backward(*given)
            finally:
                if last:
                    flight.spent |= asked.numbers | numbered
        if known is None or known.numbers is not asked.numbers:
            known = self._noted(asked)
            flight.check(known)
        if not (cut or partly):
            self._read[pattern] = known
        if not retains:
            flight.landed(pattern, known)
        if added:
            # Parts that are recomputed by a backward of their own add to `.grad` by themselves.
            if not may_run_backward():
                raise RuntimeError(_REENTRANT)
            for i, more in added:
                torch.autograd.backward(self.traced.reentrant[i], more)
        if any(grad is None for grad in found):
            self._keep_quiet([other for (other, _), grad in zip(node.next_functions, found, strict=True) if grad is None])
        return found

    def _keep_quiet(self, nodes: list[Any]) -> None:
        """Those tensors to which these nodes lead get no gradient: their hooks must not hear of it."""
        leaves = [leaf for node in nodes if (leaf := getattr(node, "variable", None)) is not None]
        hooked = [t for t in leaves if t._backward_hooks or getattr(t, "_post_accumulate_grad_hooks", None)]
        for t in hooked:
            _keep_quiet(t, {n for n, hook in (t._backward_hooks or {}).items() if _counts_on(hook, nodes)})

    def _chosen(self, flight: _Flight, pattern: tuple[bool, ...], edges: Sequence[Any]) -> list[bool] | None:
        """Where gradients of chosen inputs are asked for: to which of these edges some flow, if not to all."""
        if may_run_backward():
            return None
        wanted = [other is not None and will_run(other) for other, _ in edges]
        if all(wanted):
            return None
        chosen = {i for i, asked in enumerate(wanted) if asked}
        for i in self._aside:
            if pattern[i] and chosen.isdisjoint(self.traced.reaches[i]) and flight.watched(i):
                self.traced.stop(_PAST)
                raise RuntimeError(f"phonograph: a recorded function {_PAST.reason}. From its next call on, it runs live.")
        return wanted

    def _partly(self, flight: _Flight, pattern: tuple[bool, ...], node: Any) -> Backward | None:
        """Where gradients of chosen inputs are asked for: eager runs only what is on the way there. A backward that somebody
        would notice, were it run as a whole, runs live, and only as far: also where what is saved was written since, which need
        not be on the way."""
        wanted = self._chosen(flight, pattern, node.next_functions)
        if wanted is None or (self.traced.repeatable and flight.unwritten()):
            return None
        traced = copy.copy(self.traced)
        traced.wanted = wanted
        return traced

    def again(
        self, flight: _Flight, node: Any, grads: tuple[torch.Tensor | None, ...], ends: Ends, leaves: list[Leaf],
        asked: Sequence[torch.Tensor] = (),
    ) -> list[torch.Tensor | None]:  # fmt: skip
        """A backward comes to a node of a call whose backward is differentiated, now or once before: this comes to it, `grads`
        of the results, and at `ends` in the graph of the call, which depends on `leaves`. It runs live: what it gives, no
        recording may overwrite. Returns the gradients of what the call depends on, and of those of the leaves that are
        `asked` for."""
        create = torch.is_grad_enabled()
        twice = flight.differentiates(node)
        if create:
            self.differentiated([*grads, *(grad for _, grad in ends)])
            grads = tuple([g if g is None else leaf_of(g, leaves) for g in grads])
        self._still_there(flight, twice)
        with twice.given_up():
            here, coming = twice.arrive(node, grads, leaves)
            here.ends.extend(ends)
            found = self._flow(flight, node, here, coming, asked)
            _read_here(found)
            return handed_out(flight, found, here.leaves.values()) if create else found

    def _flow(
        self, flight: _Flight, node: Any, here: Arrived, coming: Sequence[Any], asked: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:  # fmt: skip
        """What flows from what has arrived, as far as it is not left to nodes that are `coming`."""
        traced, twice = copy.copy(self.traced), flight.differentiates(node)
        edges = node.next_functions[-len(traced.starts) :]
        pattern = tuple(g is not None for g in here.grads)
        traced.wanted = self._chosen(flight, pattern, edges) or [True] * len(edges)
        traced.differentiable = torch.is_grad_enabled()
        toward = self._toward(flight, traced, here, asked, coming)
        found: list[torch.Tensor | None] = [None] * len(edges)
        if not coming:
            found = self._rest(flight, twice, traced, here, pattern)
            if any(grad is None for grad in found):
                self._keep_quiet([other for (other, _), grad in zip(edges, found, strict=True) if grad is None])
        elif traced.repeatable and not flight.over and all(map(twice.is_results, coming)):
            found = self._grown(flight, twice, traced, here)
        return [*found, *toward]

    @staticmethod
    def _toward(
        flight: _Flight, traced: Backward, here: Arrived, asked: Sequence[torch.Tensor], coming: Sequence[Any]
    ) -> list[torch.Tensor | None]:  # fmt: skip
        """What flows to some gradients of the results, on which what has grown depends; and nothing into the call itself. Where
        another node that comes gives it, that does, for all."""
        later = {identity(p) for node in coming for p in getattr(node, "private", ())}
        due = {identity(p): get_gradient_edge(p) for p in asked if identity(p) not in later}
        if not (due and here.ends):
            return [None] * len(asked)
        traced = copy.copy(traced)
        traced.wanted, traced.besides = [False] * len(traced.starts), [*due.values()]
        found = traced.within(here.ends, flight.read(), [])[len(traced.starts) :]
        given = dict(zip(due, found, strict=True))
        return [given.get(identity(p)) for p in asked]

    @staticmethod
    def _grown(flight: _Flight, twice: Twice, traced: Backward, here: Arrived) -> list[torch.Tensor | None]:
        """Run what has grown beyond the graph of the capture, and leave what flows into that."""
        count, stops = len(traced.starts), twice.stops
        ends = [(end, grad) for end, grad in here.ends if end.node not in stops]
        here.ends[:] = [(end, grad) for end, grad in here.ends if end.node in stops]
        if not ends:
            return [None] * count
        traced.besides = border(ends, stops)
        traced.wanted = [w and start.node not in stops for w, start in zip(traced.wanted, traced.starts, strict=True)]
        found = traced.within(ends, flight.read(), {edge.node for edge in traced.besides})
        here.ends.extend((edge, grad) for edge, grad in zip(traced.besides, found[count:], strict=True) if grad is not None)
        return found[:count]

    def _rest(
        self, flight: _Flight, twice: Twice, traced: Backward, here: Arrived, pattern: tuple[bool, ...]
    ) -> list[torch.Tensor | None]:  # fmt: skip
        """Run all that is left."""
        traced.further = here.ends
        if not any(traced.wanted):  # what is saved may be gone: it is not on the way
            return [None] * len(traced.starts)
        cut = self._cut(flight)
        if cut and traced.further:
            raise self._unseen()
        numbered = self._numbered(pattern) if self._saves_numbers else _NONE
        retains = keeps_graph()
        self._begin(flight, None, numbered)
        given = (*here.grads, *flight.read())
        versioned = partial(flight.versioned, twice) if traced.differentiable else None
        with traced.places.versioned(versioned), self.traced.noting(flight.gone) as asked:
            try:
                found, _ = traced.beyond(cut, given) if cut else traced(*given)
            finally:
                if not retains and may_run_backward():
                    flight.spent |= asked.numbers | numbered
        read = self._noted(asked)
        flight.check(read)
        if not retains:
            flight.landed(pattern, read)
        return found

    def _still_there(self, flight: _Flight, twice: Twice) -> None:
        """What a backward that is differentiated has read must be what it was.

        Raises:
            RuntimeError: it was written since.
        """
        if twice.read:
            flight.check(self._read_of(twice.read))

    def differentiated(self, grads: Sequence[torch.Tensor | None]) -> None:
        """A backward of these gradients is itself to be differentiated: from the next call on, they run live.

        Raises:
            RuntimeError: this one cannot be.
        """
        self.traced.stop(replace(TWICE, where=users_line()))
        for reason, is_so in (
            ("of a part that has a backward of its own (checkpoint with use_reentrant=True)", self.traced.nested),
            ("of attention that draws random numbers", self.traced.only_captured),
            ("of several gradients at once (is_grads_batched, vectorize)", any(g is not None and is_batched(g) for g in grads)),
        ):
            if is_so:
                raise RuntimeError(f"phonograph: a backward with create_graph=True {reason} cannot go through a recording. "
                                   "From its next call on, the function or module runs live.")  # fmt: skip

    def _backward(self, last: bool) -> Callable[..., Gradients]:
        traced = copy.copy(self.traced)
        traced.last = last
        self._backwards[last] = self._recorded(traced)
        return self._backwards[last]

    def between(self, flight: _Flight, i: int, grad: torch.Tensor) -> list[torch.Tensor | None]:
        """What of a result's gradient flows to others, if their gradients are looked at."""
        others, look = self.traced.upstream[i], flight.look()
        seen = [k for k in others if k in look.seen]
        if not seen:
            return [None] * len(others)
        if not self.traced.repeatable:
            if flight.joined_runs() and not any(flight.watched(k) for k in seen):
                return [None] * len(others)  # parameters are asked for, or they are asked for as well
            raise self._unseen()
        create, leaves = torch.is_grad_enabled(), list[Leaf]()
        if create:
            self.differentiated([grad])
        traced = copy.copy(self.traced)
        traced.differentiable = create
        self._begin(flight, None, _NONE)
        versioned = partial(flight.versioned, flight.differentiates(flight.node())) if create else None
        with traced.places.versioned(versioned), self.traced.noting(flight.gone) as asked:
            flows = traced.between(i, leaf_of(grad, leaves) if create else grad, seen, flight.read())
        flight.check(self._noted(asked))
        look.cut.update(seen)
        if create:
            _read_here(flows)
            flows = handed_out(flight, flows, leaves)
        found = dict(zip(seen, flows, strict=True))
        return [found.get(k) for k in others]

    def _cut(self, flight: _Flight) -> list[int]:
        """The results whose gradients the running backward has made complete."""
        look = flight.looks.pop(backward_id(), None)
        if look is None:
            return []
        if any(flight.watched(k) and k not in look.seen for k in self.inner):
            raise self._unseen()  # a hook was set while the backward ran, and has seen a part
        return sorted(look.cut)

    def _unseen(self) -> RuntimeError:
        self.traced.stop(_SEEN)
        return RuntimeError(f"phonograph: a recorded function {_SEEN.reason}. From its next call on, it runs live.")

    def _numbered(self, pattern: tuple[bool, ...]) -> Set[int]:
        return _NONE.union(*(numbers for numbers, given in zip(self.traced.numbered, pattern, strict=True) if given))

    def _begin(self, flight: _Flight, known: _Read | None, numbered: Set[int]) -> None:
        flight.begin(known, numbered)
        flight.refresh()
        if self.traced.recompute.rewind is not None:
            self.traced.recompute.rewind.begins = flight.begins

    def version_of(self, number: int) -> int | None:
        """Which of what somebody may write a number stands for, if one does."""
        return self._index.get(number)

    def _noted(self, asked: Asked) -> _Read:
        return self._read_of(asked.numbers)

    def _read_of(self, numbers: Set[int]) -> _Read:
        return _Read(numbers, tuple({self._index[n] for n in numbers if n in self._index}))


class _Read(NamedTuple):
    """What a backward reads: the numbers of what is saved, and which of what somebody may write meanwhile."""

    numbers: Set[int]
    places: tuple[int, ...]


class _Look(NamedTuple):
    """What one backward has to do with results on which others depend: those whose gradients are looked at, and those of which
    they are complete."""

    seen: frozenset[int]
    cut: set[int]


class _Flight:
    """One call between its forward and its backward: the memory that it holds, and the versions of what it has saved."""

    def __init__(
        self, joint: Joint, memory: list[Any], saved: list[torch.Tensor], given: list[torch.Tensor],
        sources: list[torch.Tensor],
    ) -> None:  # fmt: skip
        self.joint = joint
        self.given = given  # arguments of which something was saved
        self.sources = sources  # what it depends on
        self.twice: Twice | None = None  # once a backward of it was to be differentiated
        self._memory: list[Any] | None = memory
        self._saved = saved
        self._versions = _versions(saved, joint.ordinary)
        theirs = saved if joint.ordinary else parts_of_all(saved)
        self._storages = [*map(torch.Tensor.untyped_storage, theirs)]  # other weights may take their place meanwhile
        self._waiting = set(range(len(joint.traced.attached)))  # results whose backward has not run
        self._unread = set(joint.traced.kept)  # what no backward has read
        self.spent: Set[int] = frozenset()  # what the last to read it has read
        self.begins: tuple[Begins, ...] = ()  # where generators stood, if the backward draws the forward's numbers again
        self.arguments: list[tuple[torch.Tensor, torch.Tensor]] = []  # that code keeps, after their slots
        self.looks: dict[int, _Look] = {}  # by the numbers of the backwards that run
        self._joined: Any = None  # the node, weakly: it has this
        self._watched: dict[int, tuple[weakref.ref[torch.Tensor], dict[int, Any]]] = {}  # results on which others depend

    def watch(self, i: int, t: torch.Tensor) -> None:
        """From now on it is known what hooks a result gets, also once it is gone."""
        t.register_hook(unseen)
        self._watched[i] = weakref.ref(t), t._backward_hooks  # type: ignore[assignment]

    def watched(self, i: int) -> bool:
        """Whether somebody has asked for the gradient of a result."""
        ref, hooks = self._watched[i]
        t = ref()
        return len(hooks) > 1 or (t is not None and t.retains_grad)

    def look(self) -> _Look:
        """At which results' gradients somebody looks in the running backward, or may: that of chosen inputs does not say which
        they are. It stays so until its end."""
        number, looks = backward_id(), self.looks
        if number not in looks:
            asked = not may_run_backward()
            looks[number] = _Look(frozenset(k for k in self.joint.inner if asked or self.watched(k)), set())
            when_backward_ends(lambda: looks.pop(number, None) and None)
        return looks[number]

    def joined(self, node: Any) -> None:
        self._joined = weakref.ref(node)

    def differentiates(self, node: Any) -> Twice:
        """A backward is to be differentiated, of the call of which this is the node."""
        if self.twice is None:
            traced = self.joint.traced
            starts = {start.node for start in traced.starts}
            self.twice = Twice(node, len(traced.attached), between(traced.ends, starts), starts)
        return self.twice

    def versioned(self, twice: Twice, number: int, t: torch.Tensor) -> torch.Tensor:
        """What was saved, with the version of what somebody may write: a backward that is to be differentiated saves it again,
        and autograd then notices by itself. Where it lies elsewhere, that is left to `twice`."""
        i = self.joint.version_of(number)
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

    def node(self) -> Any:
        """The node of the whole call."""
        return self._joined()

    def joined_runs(self) -> bool:
        """Whether the running backward comes to the node of the whole call: if not, somebody asks for one of its results."""
        node = self._joined()
        return node is None or will_run(node)

    @property
    def over(self) -> bool:
        """Whether a backward of all its results has run that does not retain the graph."""
        return not self._waiting

    @property
    def gone(self) -> Set[int]:
        """The numbers of what can be read no more."""
        traced = self.joint.traced
        if not self._waiting:
            return traced.kept | traced.constant.keys() | traced.exposed.keys()
        return self.spent if self._memory is not None else self.spent | traced.kept

    def unwritten(self) -> bool:
        """Whether nothing was written that was saved."""
        return not self._saved or _versions(self._saved, self.joint.ordinary) == self._versions

    def check(self, read: _Read) -> None:
        if self.unwritten():
            return
        for i in read.places:
            if _version(self._saved[i]) != self._versions[i]:
                raise RuntimeError(_WRITTEN.format(f"tensor of shape {tuple(self._saved[i].shape)}"))

    def refresh(self) -> None:
        """What code keeps of the arguments by itself, it sees as they are at the backward.

        Raises:
            RuntimeError: one has been made another tensor, with which code was not recorded.
        """
        for slot, t in self.arguments:
            if _kind(t) != _kind(slot):
                raise RuntimeError(_RESHAPED.format(_kind(t), _kind(slot)))
            if t.data_ptr() != slot.data_ptr():
                slot.copy_(t.detach())

    def read(self) -> list[torch.Tensor]:
        """The arguments of which something was saved. One that was saved itself, autograd reads as it is by now. (Whoever gives
        it other memory, `x.data = ...`, leaves its version alone.)"""
        return [t.detach() for t in self.given]

    def begin(self, read: _Read | None, numbered: Set[int]) -> None:
        """A backward begins, which reads this if that is known, and goes through what has saved these Python numbers."""
        over = not self._waiting
        if numbered and (over or not numbered.isdisjoint(self.spent)):
            raise spent()
        if over and (self.joint.traced.held or (read is not None and read.numbers)):
            raise spent()
        if read is not None:
            self.check(read)

    def landed(self, pattern: tuple[bool, ...], read: _Read) -> None:
        """A backward has run that does not retain the graph: of the results in the pattern, and it has read this. Other results
        may still need weights, which are no memory of the recording."""
        self._waiting -= {i for i, given in enumerate(pattern) if given}
        self._unread -= read.numbers
        if not self._unread:
            self._memory = None
        if not self._waiting:
            if self.joint.elsewhere and self.given:  # what reads them may be at work yet, on another stream than theirs
                when_backward_ends(self.given.clear)  # (autograd may keep what it calls a moment longer)
            self._memory, self._saved, self._storages, self.arguments, self.given = None, [], [], [], []
            if self.twice is None:
                self.sources = []


_quiet: set[tuple[int, int]] = set()  # backwards, and parameters that are kept quiet in them


def _counts_on(hook: Any, nodes: list[Any]) -> bool:
    """Whether this hook is one of several that count how often autograd comes by (`register_multi_grad_hook`), and some of the
    others hear of a gradient: to none of these nodes."""
    waiting = waits_for_all(hook)
    return waiting is not None and any(node not in nodes and will_run(node) for node in waiting if node is not None)


def _keep_quiet(p: torch.Tensor, but: Set[int]) -> None:
    """Until the running backward ends, hooks of this parameter (`but` these) hear of it only if a gradient arrives: autograd
    comes by without one, and in eager it would not."""
    key = backward_id(), identity(p)
    if key in _quiet:
        return
    _quiet.add(key)
    when_backward_ends(partial(_quiet.discard, key))
    given: list[bool] = []
    frozen = not p.requires_grad  # since the forward: then torch takes no hook
    p.requires_grad_()
    asks = p.register_hook(lambda grad: given.append(grad is not None))
    p.requires_grad_(not frozen)
    both: tuple[Any, Any] = p._backward_hooks, getattr(p, "_post_accumulate_grad_hooks", None)
    for hooks in both:
        own = {key: hook for key, hook in (hooks or {}).items() if key != asks.id and key not in but}
        if own:
            hooks.update({key: partial(_if_given, given, hook, hooks is p._backward_hooks) for key, hook in own.items()})
            when_backward_ends(partial(_put_back, hooks, own))
    when_backward_ends(asks.remove)


def _if_given(given: list[bool], hook: Callable[[torch.Tensor], Any], before: bool, value: Any) -> Any:
    arrived = value is not None if before else given[-1:] == [True]
    return hook(value) if arrived else None


def _put_back(hooks: dict[int, Any], own: dict[int, Any]) -> None:
    hooks.update({key: hook for key, hook in own.items() if key in hooks})


def _version(t: torch.Tensor) -> Any:
    """How often it was written; and of one that consists of parts, which these are: others are read at other places."""
    version = 0 if t.is_inference() else t._version
    return version if is_ordinary(t) else (version, *map(identity, parts(t)))


def _kind(t: torch.Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.dtype, t.device


def _versions(tensors: list[torch.Tensor], ordinary: bool) -> list[Any]:
    try:
        return [*map(_counted if ordinary else _version, tensors)]
    except RuntimeError:  # one of them is an inference tensor, which has none
        return [*map(_version, tensors)]


_counted: Callable[[torch.Tensor], int] = attrgetter("_version")


def _read_here(grads: Iterable[torch.Tensor | None]) -> None:
    """The nodes of the capture have made these on its stream; what is free there again is written at once."""
    for grad in grads:
        if grad is not None and grad.is_cuda and not is_batched(grad):
            grad.record_stream(torch.cuda.current_stream(grad.device))


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: _Flight, results: list[torch.Tensor], *sources: Any) -> Any:
        ctx.flight = flight
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    @ended_by
    def backward(ctx: Any, *grads: Any) -> Any:
        flight: _Flight = ctx.flight
        if flight.twice is not None or torch.is_grad_enabled():
            return (None, None, *flight.joint.again(flight, ctx, grads, [], []))
        return (None, None, *flight.joint.run(flight, grads, ctx))


class _Apart(torch.autograd.Function):
    """One result, and those that it depends on."""

    @staticmethod
    def forward(ctx: Any, flight: _Flight, i: int, result: list[torch.Tensor], t: torch.Tensor, *others: torch.Tensor) -> Any:
        ctx.flight, ctx.i, ctx.others = flight, i, len(others)
        ctx.set_materialize_grads(False)
        return result[0]

    @staticmethod
    @ended_by
    def backward(ctx: Any, grad: Any) -> Any:
        flight: _Flight = ctx.flight
        if grad is None or not ctx.others:
            return (None, None, None, grad, *[None] * ctx.others)
        return (None, None, None, grad, *flight.joint.between(flight, ctx.i, grad))
