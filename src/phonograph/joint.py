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
from collections.abc import Callable, Container, Sequence, Set
from contextlib import AbstractContextManager
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from .backward import Backward, Gradients
from .errors import Refusal
from .identity import identity
from .pool import copy_of
from .saved import Asked, spent
from .signature import unseen
from .torch_private import alias, backward_id, keeps_graph, may_run_backward, waits_for_all, when_backward_ends, will_run

__all__ = ["TWICE", "Joint"]

_SEEN = Refusal("has a gradient of one result with respect to another, through what cannot be run by itself",
                "record what contains that backward as well")  # fmt: skip
_PAST = Refusal("has a result with a hook, or one that retains its gradient, which gradients of chosen inputs do not depend on",
                "record the parts by themselves")  # fmt: skip
TWICE = Refusal("has a backward with create_graph=True", "record what contains that backward as well")
"""A backward that is itself to be differentiated has to run live."""

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
        self.traced = traced
        self._recorded = recorded
        self._backwards: dict[bool, Callable[..., Gradients]] = {}  # by whether they are the last
        self._joining = joining
        self._memory = [lease.python for lease in traced.memory]  # the storages, weakly: a flight holds them
        self._constant = list({identity(t): t for t in traced.constant.values()}.values())
        self._exposed = list(dict.fromkeys(traced.exposed.values()))
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
        flight = _Flight(self, [ref() for ref in self._memory], saved, kept)
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

    def _partly(self, flight: _Flight, pattern: tuple[bool, ...], node: Any) -> Backward | None:
        """Where gradients of chosen inputs are asked for: eager runs only what is on the way there. A backward that somebody
        would notice, were it run as a whole, runs live, and only as far: also where what is saved was written since, which need
        not be on the way."""
        if may_run_backward():
            return None
        wanted = [other is not None and will_run(other) for other, _ in node.next_functions]
        if all(wanted):
            return None
        chosen = {i for i, asked in enumerate(wanted) if asked}
        for i in self._aside:
            if pattern[i] and chosen.isdisjoint(self.traced.reaches[i]) and flight.watched(i):
                self.traced.stop(_PAST)
                raise RuntimeError(f"phonograph: a recorded function {_PAST.reason}. From its next call on, it runs live.")
        if self.traced.repeatable and flight.unwritten():
            return None
        traced = copy.copy(self.traced)
        traced.wanted = wanted
        return traced

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
        self._begin(flight, None, _NONE)
        with self.traced.noting(flight.gone) as asked:
            found = dict(zip(seen, self.traced.between(i, grad, seen, flight.read()), strict=True))
        flight.check(self._noted(asked))
        look.cut.update(seen)
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

    def _noted(self, asked: Asked) -> _Read:
        return _Read(asked.numbers, tuple({self._index[n] for n in asked.numbers if n in self._index}))


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

    def __init__(self, joint: Joint, memory: list[Any], saved: list[torch.Tensor], given: list[torch.Tensor]) -> None:
        self.joint = joint
        self.given = given  # arguments of which something was saved
        self._memory: list[Any] | None = memory
        self._saved = saved
        self._versions = _versions(saved)
        self._storages = [*map(torch.Tensor.untyped_storage, saved)]  # other weights may take their place meanwhile
        self._waiting = set(range(len(joint.traced.attached)))  # results whose backward has not run
        self._unread = set(joint.traced.kept)  # what no backward has read
        self.spent: Set[int] = frozenset()  # what the last to read it has read
        self.begins = (0, 0)  # where the random generator stood, if the backward draws the forward's numbers again
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

    def joined_runs(self) -> bool:
        """Whether the running backward comes to the node of the whole call: if not, somebody asks for one of its results."""
        node = self._joined()
        return node is None or will_run(node)

    @property
    def gone(self) -> Set[int]:
        """The numbers of what can be read no more."""
        traced = self.joint.traced
        if not self._waiting:
            return traced.kept | traced.constant.keys() | traced.exposed.keys()
        return self.spent if self._memory is not None else self.spent | traced.kept

    def unwritten(self) -> bool:
        """Whether nothing was written that was saved."""
        return not self._saved or _versions(self._saved) == self._versions

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


def _version(t: torch.Tensor) -> int:
    return 0 if t.is_inference() else t._version


def _kind(t: torch.Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.dtype, t.device


def _versions(tensors: list[torch.Tensor]) -> list[int]:
    try:
        return [*map(_counted, tensors)]
    except RuntimeError:  # one of them is an inference tensor, which has none
        return [*map(_version, tensors)]


_counted: Callable[[torch.Tensor], int] = attrgetter("_version")


def _no_more_than_once(flight: _Flight) -> RuntimeError:
    flight.joint.traced.stop(TWICE)
    return RuntimeError("phonograph: a backward with create_graph=True cannot go through a recording. From its next call on, "
                        "the function or module runs live.")  # fmt: skip


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: _Flight, results: list[torch.Tensor], *sources: Any) -> Any:
        ctx.flight = flight
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        flight: _Flight = ctx.flight
        if torch.is_grad_enabled():
            raise _no_more_than_once(flight)
        return (None, None, *flight.joint.run(flight, grads, ctx))


class _Apart(torch.autograd.Function):
    """One result, and those that it depends on."""

    @staticmethod
    def forward(ctx: Any, flight: _Flight, i: int, result: list[torch.Tensor], t: torch.Tensor, *others: torch.Tensor) -> Any:
        ctx.flight, ctx.i, ctx.others = flight, i, len(others)
        ctx.set_materialize_grads(False)
        return result[0]

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        flight: _Flight = ctx.flight
        if grad is None or not ctx.others:
            return (None, None, None, grad, *[None] * ctx.others)
        if torch.is_grad_enabled():
            raise _no_more_than_once(flight)
        return (None, None, None, grad, *flight.joint.between(flight, ctx.i, grad))
