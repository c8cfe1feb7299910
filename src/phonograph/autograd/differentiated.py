"""Backwards of a recorded call that are differentiated, run live through the private graph of the call (`double_backward.py`).

In the user's graph, the gradients that such a backward gives come out of a node (`_Given`) that leads to where the gradients of
the call's results came from, and to what the call depends on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch.autograd.graph import Node, get_gradient_edge

from .._torch.autograd import keeps_graph, may_run_backward, will_run
from .._torch.dynamic import Context
from .._torch.modes import is_batched
from ..errors import Refusal
from ..python.identity import identity
from ..python.origin import users_line
from .backward import Backward, Request
from .double_backward import Arrived, Ends, Leaf, Twice, border, leaf_of
from .flight import Flight
from .quiet_hooks import keep_quiet
from .saved import spent

__all__ = ["TWICE", "again", "between_results"]

TWICE = Refusal("has a backward with create_graph=True", "record what contains that backward as well")
"""Where backwards are themselves to be differentiated, calls had better run live."""


def again(
    flight: Flight, node: Node, grads: tuple[torch.Tensor | None, ...], ends: Ends, leaves: list[Leaf],
    asked: Sequence[torch.Tensor] = (),
) -> list[torch.Tensor | None]:  # fmt: skip
    """A backward comes to a node of a call whose backward is differentiated, now or once before: this comes to it, `grads`
    of the results, and at `ends` in the graph of the call, which depends on `leaves`. It runs live: what it gives, no
    recording may overwrite. Returns the gradients of what the call depends on, and of those of the leaves that are
    `asked` for."""
    create = torch.is_grad_enabled()
    twice = flight.differentiates(node)
    if create:
        _differentiated(flight.wiring.traced, [*grads, *(grad for _, grad in ends)])
        grads = tuple([g if g is None else leaf_of(g, leaves) for g in grads])
    if twice.read:  # what a backward that is differentiated has read must be what it was
        flight.check(flight.wiring.read_of(twice.read))
    with twice.given_up():
        here, coming = twice.arrive(node, grads, leaves)
        here.ends.extend(ends)
        found = _flow(flight, node, here, coming, asked)
        _read_here(found)
        return _handed_out(flight, found, here.leaves.values()) if create else found


def _flow(
    flight: Flight, node: Node, here: Arrived, coming: Sequence[Node], asked: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:  # fmt: skip
    """What flows from what has arrived, as far as it is not left to nodes that are `coming`."""
    traced, twice = flight.wiring.traced, flight.differentiates(node)
    graph = traced.graph
    edges = node.next_functions[-len(graph.entries) :]
    pattern = tuple(g is not None for g in here.grads)
    wanted = flight.chosen(pattern, edges) or [True] * len(graph.starts)
    request = Request(wanted, differentiable=torch.is_grad_enabled())
    toward = _toward(flight, request, here, asked, coming)
    found: list[torch.Tensor | None] = [None] * len(graph.starts)
    if not coming:
        found = _rest(flight, twice, request, here, pattern)
        if any(grad is None for grad in found):
            keep_quiet(graph.without_gradient(edges, graph.each(found)))
    elif traced.repeatable and not flight.over and all(map(twice.is_results, coming)):
        found = _grown(flight, twice, request, here)
    return [*graph.each(found), *toward]


def _toward(
    flight: Flight, request: Request, here: Arrived, asked: Sequence[torch.Tensor], coming: Sequence[Node]
) -> list[torch.Tensor | None]:  # fmt: skip
    """What flows to some gradients of the results, on which what has grown depends; and nothing into the call itself. Where
    another node that comes gives it, that does, for all."""
    later = {identity(p) for node in coming for p in getattr(node, "private", ())}
    due = {identity(p): get_gradient_edge(p) for p in asked if identity(p) not in later}
    if not (due and here.ends):
        return [None] * len(asked)
    traced = flight.wiring.traced
    count = len(traced.graph.starts)
    traced = traced.for_request(replace(request, wanted=[False] * count, besides=[*due.values()]))
    found = traced.within(here.ends, flight.read(), [])[count:]
    given = dict(zip(due, found, strict=True))
    return [given.get(identity(p)) for p in asked]


def _grown(flight: Flight, twice: Twice, request: Request, here: Arrived) -> list[torch.Tensor | None]:
    """Run what has grown beyond the graph of the capture, and leave what flows into that."""
    traced, stops = flight.wiring.traced, twice.stops
    starts = traced.graph.starts
    ends = [(end, grad) for end, grad in here.ends if end.node not in stops]
    here.ends[:] = [(end, grad) for end, grad in here.ends if end.node in stops]
    if not ends:
        return [None] * len(starts)
    besides = border(ends, stops)
    wanted = [w and start.node not in stops for w, start in zip(request.wanted, starts, strict=True)]
    traced = traced.for_request(replace(request, wanted=wanted, besides=besides))
    found = traced.within(ends, flight.read(), {edge.node for edge in besides})
    here.ends.extend((edge, grad) for edge, grad in zip(besides, found[len(starts) :], strict=True) if grad is not None)
    return found[: len(starts)]


def _rest(
    flight: Flight, twice: Twice, request: Request, here: Arrived, pattern: tuple[bool, ...]
) -> list[torch.Tensor | None]:  # fmt: skip
    """Run all that is left."""
    if not any(request.wanted):  # what is saved may be gone: it is not on the way
        return [None] * len(request.wanted)
    wiring = flight.wiring
    traced = wiring.traced.for_request(replace(request, further=here.ends))
    cut = flight.cut()
    if cut and here.ends:
        raise wiring.unseen()
    numbered, retains = wiring.numbered(pattern), keeps_graph()
    flight.begin(None, numbered)
    given = (*here.grads, *flight.read())
    versioned = partial(flight.versioned, twice) if request.differentiable else None
    with traced.saved.places.versioned(versioned), traced.noting(flight.gone) as asked:
        try:
            found, _ = traced.beyond(cut, given) if cut else traced(*given)
        finally:
            if not retains and may_run_backward():
                flight.spent |= asked.numbers | numbered
    read = wiring.read_of(asked.numbers)
    flight.check(read)
    if not retains:
        flight.landed(pattern, read)
    return found


def _differentiated(traced: Backward, grads: Sequence[torch.Tensor | None]) -> None:
    """A backward of these gradients is itself to be differentiated: from the next call on, they run live.

    Raises:
        RuntimeError: this one cannot be.
    """
    traced.forward.stop(replace(TWICE, where=users_line()))
    for reason, is_so in (
        ("of a part that has a backward of its own (checkpoint with use_reentrant=True)", traced.graph.nested),
        ("of attention that draws random numbers", traced.only_captured),
        ("of several gradients at once (is_grads_batched, vectorize)", any(g is not None and is_batched(g) for g in grads)),
    ):
        if is_so:
            raise RuntimeError(f"phonograph: a backward with create_graph=True {reason} cannot go through a recording. "
                               "From its next call on, the function or module runs live.")  # fmt: skip


def between_results(flight: Flight, i: int, grad: torch.Tensor) -> list[torch.Tensor | None]:
    """What of a result's gradient flows to others on which it depends, if their gradients are looked at."""
    wiring = flight.wiring
    traced, look = wiring.traced, flight.look()
    others = traced.graph.toward[i]
    seen = {k for k, _ in others if k in look.seen}
    if not seen:
        return [None] * len(others)
    if not traced.repeatable:
        if flight.joined_runs() and not any(flight.watched(k) for k in seen):
            return [None] * len(others)  # parameters are asked for, or they are asked for as well
        raise wiring.unseen()
    create, leaves = torch.is_grad_enabled(), list[Leaf]()
    if create:
        _differentiated(traced, [grad])
    traced = traced.for_request(Request(differentiable=create))
    flight.begin(None, frozenset())
    versioned = partial(flight.versioned, flight.differentiates(flight.node())) if create else None
    with traced.saved.places.versioned(versioned), traced.noting(flight.gone) as asked:
        flows = traced.between(i, leaf_of(grad, leaves) if create else grad, sorted(seen), flight.read())
    flight.check(wiring.read_of(asked.numbers))
    look.cut.update(seen)
    if create:
        _read_here(flows)
        flows = _handed_out(flight, flows, leaves)
    found = iter(flows)
    return [next(found) if k in seen else None for k, _ in others]


def _read_here(grads: Iterable[torch.Tensor | None]) -> None:
    """The nodes of the capture have made these on its stream; what is free there again is written at once."""
    for grad in grads:
        if grad is not None and grad.is_cuda and not is_batched(grad):
            grad.record_stream(torch.cuda.current_stream(grad.device))


def _handed_out(flight: Flight, found: list[torch.Tensor | None], leaves: Iterable[Leaf]) -> list[torch.Tensor | None]:
    """Gradients of the private graph, which depends on these leaves, as gradients of the user's."""
    attached = [i for i, t in enumerate(found) if t is not None and t.requires_grad]
    if not attached:
        return found
    known = list(leaves)
    private = [leaf.private for leaf in known]
    inputs = [*(leaf.users for leaf in known), *flight.sources]
    with torch.enable_grad():
        made = _Given.apply(flight, [found[i] for i in attached], private, *inputs)
    assert flight.twice is not None
    flight.twice.add(made[0].grad_fn)
    handed = list(found)
    for i, t in zip(attached, made, strict=True):
        handed[i] = t
    return handed


class _Given(torch.autograd.Function):
    """The gradients that a backward has given: of tensors in the private graph that depend on `private` leaves. The inputs are
    what these stand for, and what the call depends on."""

    @staticmethod
    def forward(
        ctx: Context, flight: Flight, found: list[torch.Tensor], private: list[torch.Tensor], *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.flight, ctx.private = flight, private
        ctx.ends = [*map(get_gradient_edge, found)]
        ctx.save_for_backward(*inputs[: len(private)])
        ctx.set_materialize_grads(False)
        return tuple([t.detach() for t in found])  # which shares its version

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor | None) -> object:
        flight: Flight = ctx.flight
        private = ctx.private
        if ctx.ends is None:
            raise spent()
        leaves = [Leaf(*pair) for pair in zip(private, ctx.saved_tensors, strict=True)]
        ends = [(end, grad) for end, grad in zip(ctx.ends, grads, strict=True) if grad is not None]
        if torch.is_grad_enabled():
            ends = [(end, leaf_of(grad, leaves)) for end, grad in ends]
        nodes = [node for node, _ in ctx.next_functions[: len(private)]]
        asked = [i for i, node in enumerate(nodes) if node is not None and will_run(node)]
        found = again(flight, ctx, (), ends, leaves, [private[i] for i in asked])
        if not keeps_graph():
            ctx.ends = None
        count = len(found) - len(asked)
        toward = dict(zip(asked, found[count:], strict=True))
        return (None, None, None, *map(toward.get, range(len(private))), *found[:count])
