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
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager

import torch
from torch.autograd.graph import Node

from .._torch.autograd import keeps_graph, may_run_backward, ready_for_gradients
from .._torch.dynamic import Context, Leaves
from .._torch.dynamo import ended_by
from .._torch.tensors import alias
from ..memory.pool import copy_of
from .backward import Backward, Gradients, Request
from .differentiated import TWICE, again, between_results
from .flight import Flight, Read, Wiring
from .quiet_hooks import keep_quiet

__all__ = ["TWICE", "Joint"]

MANY = 32
"""Where gradients are added up on another stream than the caller's: up to so many parameters a backward is played on the
caller's, and autograd waits for the other at each of them. On the other one it waits at each gradient that comes in, and the
allocator polls until those have been read. Chosen between 13 parameters, where that was slower, and 148, where it was faster
(H200)."""

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
        self.traced = traced = traced.for_request(Request(each=True))
        self._recorded = recorded
        self._backwards: dict[bool, Callable[..., Gradients]] = {}  # by whether they are the last
        self._joining = joining
        self._memory = [lease.python for lease in traced.saved.memory]  # the storages, weakly: a flight holds them
        self._wiring = Wiring(traced, elsewhere=traced.graph.lasting and len(traced.graph.parameters) > MANY)
        self._read: dict[tuple[bool, ...], Read] = {}  # by which gradients are given: what that backward reads

    def attach(self, results: list[object], arguments: Sequence[torch.Tensor], borrowed: Container[int]) -> None:
        """Give those of a call's results their history that have one. `results` are all of them. Of arguments that are
        `borrowed`, the memory is another's from the next call on."""
        graph, wiring = self.traced.graph, self._wiring
        self.traced.kept.rest()
        made = [results[i] for i in graph.attached]
        # What comes out of a node of its own takes the tensor that is handed out.
        given = [alias(t) if i in wiring.apart else t for i, t in enumerate(made)]
        starts = [*[arguments[i] for i in graph.arguments], *graph.parameters]
        sources = [starts[i] for i in graph.entries]
        flight = self._flight(results, arguments, borrowed, sources)
        with self._joining(graph.lasting, wiring.elsewhere):
            joined = [*_Joined.apply(self, flight, given, *sources)]
            if wiring.apart:
                flight.joined(joined[0].grad_fn)
            for i in wiring.apart:
                others = [joined[k] for k, _ in graph.toward[i]]
                joined[i] = _Apart.apply(flight, i, [made[i]], joined[i], *others)
                if i in wiring.inner or i in wiring.aside:
                    flight.watch(i, joined[i])
        for i, t in zip(graph.attached, joined, strict=True):
            results[i] = t

    def _flight(
        self, results: Leaves, arguments: Sequence[torch.Tensor], borrowed: Container[int], sources: list[torch.Tensor]
    ) -> Flight:  # fmt: skip
        traced, wiring = self.traced, self._wiring
        # Detached, so that they do not hold themselves; they share their version with the result.
        kept = [
            copy_of(arguments[i].detach()) if i in borrowed else arguments[i] if itself else arguments[i].detach()
            for i, itself in traced.saved.places.arguments
        ]
        saved = [*wiring.constant, *[results[i].detach() for i in wiring.exposed], *kept]
        flight = Flight(wiring, [ref() for ref in self._memory], saved, kept, sources)
        if traced.recompute.rewind is not None:
            flight.begins = traced.recompute.rewind.of_last()
        flight.arguments = [
            (slot, arguments[i] if i in traced.kept.themselves else arguments[i].detach())
            for i, slot in traced.kept.slots.items()
            if i not in borrowed
        ]
        flight.copies = [(place, results[i].detach()) for i, place in traced.copies.items()]
        return flight

    def run(self, flight: Flight, grads: tuple[torch.Tensor | None, ...], node: Node) -> list[torch.Tensor | None]:
        """The backward of one call, which is this node in the graph of autograd."""
        pattern = tuple(g is not None for g in grads)
        known = self._read.get(pattern)
        partly = self._partly(flight, pattern, node)
        numbered = self._wiring.numbered(pattern)
        flight.begin(None if partly else known, numbered)
        cut, retains, arguments = flight.cut(), keeps_graph(), flight.read()
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
            known = self._wiring.read_of(asked.numbers)
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
                torch.autograd.backward(self.traced.graph.reentrant[i], more)
        if any(grad is None for grad in found):
            keep_quiet(self.traced.graph.without_gradient(node.next_functions, found))
        return found

    def _partly(self, flight: Flight, pattern: tuple[bool, ...], node: Node) -> Backward | None:
        """Where gradients of chosen inputs are asked for: eager runs only what is on the way there. A backward that somebody
        would notice, were it run as a whole, runs live, and only as far: also where what is saved was written since, which need
        not be on the way."""
        wanted = flight.chosen(pattern, node.next_functions)
        if wanted is None or (self.traced.repeatable and flight.unwritten()):
            return None
        return self.traced.for_request(Request(wanted, each=True))

    def _backward(self, last: bool) -> Callable[..., Gradients]:
        traced = copy.copy(self.traced)
        traced.last = last
        self._backwards[last] = self._recorded(traced)
        return self._backwards[last]


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, joint: Joint, flight: Flight, results: list[torch.Tensor], *sources: object) -> object:
        ctx.joint, ctx.flight = joint, flight
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    @ended_by
    def backward(ctx: Context, *grads: torch.Tensor | None) -> object:
        flight: Flight = ctx.flight
        if flight.twice is not None or torch.is_grad_enabled():
            return (None, None, None, *again(flight, ctx, grads, [], []))
        return (None, None, None, *ctx.joint.run(flight, grads, ctx))


class _Apart(torch.autograd.Function):
    """One result, and those that it depends on."""

    @staticmethod
    def forward(
        ctx: Context, flight: Flight, i: int, result: list[torch.Tensor], t: torch.Tensor, *others: torch.Tensor
    ) -> object:
        ctx.flight, ctx.i, ctx.others = flight, i, len(others)
        ctx.set_materialize_grads(False)
        return result[0]

    @staticmethod
    @ended_by
    def backward(ctx: Context, grad: torch.Tensor | None) -> object:
        flight: Flight = ctx.flight
        if grad is None or not ctx.others:
            return (None, None, None, grad, *[None] * ctx.others)
        return (None, None, None, grad, *between_results(flight, ctx.i, grad))
