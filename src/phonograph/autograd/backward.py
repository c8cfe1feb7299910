"""The backward of a recorded call, as a function that can be run, or recorded, again and again.

It is the graph of autograd that the capture of the forward has left behind. What is saved in it are numbers (`saved.py`), which
stand for places that each replay of the forward fills anew, and for parts of its arguments, which the backward is given.

Two ways lead through it. `torch.autograd.grad` gives the gradients of all that the call depends on. But where a part is
recomputed by a backward of its own (`checkpoint(use_reentrant=True)`), only `torch.autograd.backward` is allowed, which adds to
`.grad`: each gradient is taken away there as it arrives, so that it can be added later, outside, in eager's order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from .._torch.autograd import backward_id, forget_recomputed, selected_anew
from .._torch.tensors import has_memory, is_ordinary
from ..capture.dispatch import OperatorWatch
from ..errors import Refusal
from ..memory.pool import copy_of
from ..memory.spans import Spans
from ..python.identity import identity
from ..state.rng import Rewind
from ..values.tensor_subclasses import Description, consists_of_parts, parts
from .double_backward import nothing_through
from .graph import Graph
from .kept_by_code import Kept
from .release import Release
from .saved import Asked, Reads, Saved

__all__ = ["Backward", "Forward", "Gradients", "Recompute", "Request"]

Gradients = tuple[list[torch.Tensor | None], list[tuple[int, torch.Tensor]]]
"""What a `Backward` gives."""


_CHANGES = Refusal("changes in its backward what its forward has made (an attribute of ctx, a list)",
                   "leave it as it is, or record the whole step")  # fmt: skip


def _never(spread: Callable[[], bool], refusal: Refusal) -> None:
    """Nobody plays the forward."""


class Recompute:
    """Surroundings of a backward that recomputes parts of its forward: random states, and what `checkpoint` keeps."""

    def __init__(self, parts: list[object], code: list[object], selections: list[Any], rewind: Rewind | None) -> None:
        self.parts = parts  # what `checkpoint` knows of each
        self._code = code  # held for them
        # What selective recompute keeps instead, which a backward uses up.
        self._selections = [(kept, {key: selected_anew(entries) for key, entries in kept.items()}) for kept in selections]
        for kept in selections:
            kept.clear()
        self.rewind = rewind

    def __enter__(self) -> None:
        if self.rewind is not None:
            self.rewind.prepare()
        for kept, first in self._selections:
            kept.update({key: selected_anew(entries) for key, entries in first.items()})

    def __exit__(self, *_: object) -> None:
        if self.rewind is not None:
            self.rewind.settle()
        for part in self.parts:
            forget_recomputed(part)
        for kept, _first in self._selections:
            kept.clear()


@dataclass(frozen=True, eq=False)
class Forward:
    """The forward's side: how it is recorded and played."""

    stop: Callable[[Refusal], object] = str
    """Ends its replays: a run has shown that they are wrong from now on."""
    doubt: Callable[[Callable[[], bool], Refusal], object] = _never
    """Ends its replays if a condition holds before the next one."""
    once: Callable[[Callable[[], Gradients], Rewind | None], Gradients] | None = None
    """Captures a call, plays it, and forgets it: for a backward that is `only_captured`."""
    averaged: bool = False
    """Gradients are averaged over ranks as they come."""
    takes_turns: bool = False
    """Another forward of the function waited for its backward when this one was recorded."""
    apart: bool = False
    """It shares memory with no other recording; nor does its backward."""
    room: Spans | None = None
    """Memory in which it works and hands out nothing. Gradients may lie there that are gone when it runs again. None if they
    may be there still."""


@dataclass(frozen=True, eq=False)
class Request:
    """Gradients that one run is asked for."""

    wanted: Sequence[bool] = ()
    """One truth for each of the graph's `starts`; none if all are wanted."""
    differentiable: bool = False
    """The gradients get a history, in the graph of the capture."""
    further: Sequence[tuple[GradientEdge, torch.Tensor]] = ()
    """Places in the graph at which gradients of gradients arrive."""
    besides: Sequence[GradientEdge] = ()
    """Places in the graph whose gradients are given as well, at the end."""


@dataclass(eq=False)
class Backward:
    """The backward of a recorded call: gradients of its results in, gradients of what they depend on out. It reads what the
    last replay of the forward has saved, and leaves it there."""

    graph: Graph
    saved: Saved
    kept: Kept
    recompute: Recompute
    function: object
    """The recorded function, if some of its code runs in the backward. What is in reach of it, that code may read."""
    only_captured: bool
    """It can be captured and played, and not run. (In a capture attention leaves its seed on the device. Outside, its backward
    would read that on the host; and recomputed, it would leave it there, where it is not looked for.)"""
    forward: Forward = field(default_factory=Forward)
    request: Request = field(default_factory=Request)
    last: bool = False
    """Nothing reads the saved tensors after it: it may give their memory back, as it goes."""
    reads: Reads | None = None
    """Saved tensors that its last capture has asked for."""
    captured: bool = False
    """A capture of it goes on."""

    def __post_init__(self) -> None:
        self._saved = frozenset(t.untyped_storage()._cdata for t in (*self.saved.places.own, *self.kept.held))

    def for_request(self, request: Request) -> Backward:
        """A copy for a run that is asked for this."""
        found = copy.copy(self)
        found.request = request
        return found

    @property
    def repeatable(self) -> bool:
        """Whether parts of it can be run twice: it runs no code of the user's, and recomputes nothing. (What is recomputed may
        write running statistics.)"""
        return self.function is None and not (self.graph.nested or self.only_captured or self.recompute.parts)

    def reached(self) -> tuple[object, ...]:
        """Objects that it can reach, always the same."""
        places = self.saved.places
        return self.function, *self.kept.held, *places.own, *places.leaves.values(), *self.graph.parameters

    @property
    def fixed(self) -> frozenset[int]:
        """The ids of tensors in reach of which nothing has to hold: places that are its own, and, where no code of the user's
        runs, parameters whose gradients it gives and which it has not saved."""
        mine = [*self.saved.places.own, *self.kept.held]
        if self.function is None and not self.graph.nested:
            mine += self.graph.parameters
        return frozenset(map(identity, mine)) - set(map(identity, self.saved.places.leaves.values()))

    def gradients_stay(self, arguments: Sequence[torch.Tensor]) -> bool:
        """Whether it looks, at a forward, as if the gradients of the last step were still there at the next: some are, or some
        are those of leaves among its arguments."""
        grads = any(p.grad is not None for p in (*self.graph.parameters, *self.graph.reentrant))
        return grads or any(arguments[i].is_leaf for i in self.graph.arguments)

    def noting(self, spent: Set[int]) -> AbstractContextManager[Asked]:
        """A context that collects the numbers of the saved tensors which are read in it. Those that are `spent` cannot be."""
        return self.saved.places.noting(spent)

    @contextmanager
    def releasing(self, release: Release | None, watch: OperatorWatch) -> Iterator[None]:
        """It is captured inside the block, and gives back what it has read."""
        places = self.saved.places
        before, places.asked.numbers = places.asked.numbers, frozenset()
        self.captured = True
        try:
            with places.releasing(release), nullcontext() if release is None else release.during(watch):
                yield
        finally:
            self.captured = False
        self.reads = Reads(places, frozenset(places.asked.numbers))
        places.asked.numbers |= before

    def __call__(self, *given: torch.Tensor | None) -> Gradients:
        """From the gradients of the results, and after them those arguments of the forward of which something was saved: the
        gradients of the `arguments`, and of the `parameters` after them; None for what the results do not depend on. A result
        whose gradient is None has none. Besides, what is to be added to the gradients of `reentrant`, in order, each with its
        number there."""
        grads, arguments = self.gradients(given), given[len(self.graph.ends) :]
        if not self.request.further and all(grad is None for grad in grads):
            return [None] * (len(self.graph.starts) + len(self.request.besides)), []
        if self.only_captured and not torch.cuda.is_current_stream_capturing():
            assert self.forward.once is not None
            with self._keeping():
                return self.forward.once(lambda: self(*given), self.recompute.rewind)
        before = self.kept.contents.now()
        try:
            with self._keeping(), self.saved.places.reading(arguments):
                return self._ran(grads)
        finally:
            if self.kept.contents.changed(before):
                self.forward.stop(_CHANGES)

    def gradients(self, given: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
        """Those of the results, of what a call was given."""
        return given[: len(self.graph.ends)]

    def _ran(self, grads: Sequence[torch.Tensor | None]) -> Gradients:
        there = [(end, grad) for end, grad in zip(self.graph.ends, grads, strict=True) if grad is not None]
        there += self.request.further
        with self.recompute:
            found, added = self._run([end for end, _ in there], [grad for _, grad in there])
        return [*map(self._own, found)], [(i, self._own(grad)) for i, grad in added]

    def _keeping(self) -> AbstractContextManager[None]:
        """Surrounds a run: what code keeps must stay with it. (A capture sees to that by itself.)"""
        if self.captured or (self.only_captured and torch.cuda.is_current_stream_capturing()):
            return nullcontext()
        return self.kept.staying(self.forward.stop, self.forward.doubt)

    def _own(self, grad: Any) -> Any:
        """A gradient in memory of its own, though it may be what was saved: that is written anew, or nobody's after all."""
        if grad is not None and not is_ordinary(grad) and consists_of_parts(grad):
            of, inner = Description.of(grad), parts(grad)
            own = [*map(self._own, inner)]
            return grad if all(map(is_, own, inner)) else of.around(own)
        if grad is None or not has_memory(grad):
            return grad
        storage = grad.untyped_storage()._cdata
        saved = storage in self._saved or self.saved.places.lends(grad) or self.saved.places.is_given(storage)
        if not saved:
            return grad
        return grad.clone() if self.request.differentiable else copy_of(grad)

    def between(
        self, result: int, grad: torch.Tensor, others: list[int], arguments: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:  # fmt: skip
        """What of a result's gradient flows to other results on which it depends, and not through one of them. Results go by
        their places among those that are attached."""
        edges = [self.graph.ends[i] for i in others]
        with self.saved.places.reading(arguments), self.recompute, _cut(edges, [None] * len(edges)):
            found = self._grad([self.graph.ends[result]], edges, [grad])
        return [*map(self._own, found)]

    def beyond(self, others: list[int], given: Sequence[torch.Tensor | None]) -> Gradients:
        """As a call, but nothing flows to these results from others: their gradients are complete."""
        with _cut([self.graph.ends[i] for i in others], [given[i] for i in others]):
            return self(*given)

    def _run(self, ends: list[GradientEdge], grads: list[torch.Tensor]) -> Gradients:
        if self.graph.nested and not self.request.wanted:
            return self._accumulating(ends, grads)
        with _hooks_set_aside(self.graph.parameters):
            wanted = self.request.wanted or [True] * len(self.graph.starts)
            starts = [start for start, asked in zip(self.graph.starts, wanted, strict=True) if asked]
            starts += self.request.besides
            found = iter(self._grad(ends, starts, grads) if starts else ())
            return [*(next(found) if asked else None for asked in wanted), *found], []

    def within(
        self, ends: Sequence[tuple[GradientEdge, torch.Tensor]], arguments: Sequence[torch.Tensor], stops: Iterable[Node]
    ) -> list[torch.Tensor | None]:  # fmt: skip
        """What flows from places in what has grown beyond the graph of the capture, up to nodes where it stops: into that graph
        nothing flows."""
        with self.saved.places.noting(frozenset()), self.saved.places.reading(arguments), nothing_through(stops):
            found, _ = self._run([end for end, _ in ends], [grad for _, grad in ends])
        return [*map(self._own, found)]

    def _grad(self, ends: list[GradientEdge], starts: list[GradientEdge], grads: list[torch.Tensor]) -> Sequence[Any]:
        return torch.autograd.grad(
            ends, starts, grads, retain_graph=True, create_graph=self.request.differentiable, allow_unused=True
        )

    def _accumulating(self, ends: list[GradientEdge], grads: list[torch.Tensor]) -> Gradients:
        """Through `autograd.backward`, the only one in which a part may run a backward of its own."""
        leaves = self.graph.reentrant  # of which some may not require gradients any more
        index = {identity(t): i for i, t in enumerate(leaves)}
        for s in (*self.graph.sources, *self.graph.stands):
            s.arrived.clear()
        with _hooks_set_aside(leaves), _collecting(leaves, ends) as collected:
            torch.autograd.backward(ends, grads, retain_graph=True)
        inner = {i for i, _, nested in collected if nested}
        outer = {i: grad for i, grad, _ in collected if i not in inner}
        own = [outer.get(index[identity(p)]) for p in self.graph.parameters[len(self.graph.stands) :]]
        arrived = [s.arrived.pop() if s.arrived else None for s in (*self.graph.sources, *self.graph.stands)]
        return [*arrived, *own], [(i, grad) for i, grad, _ in collected if i in inner]


@contextmanager
def _cut(edges: list[GradientEdge], grads: list[torch.Tensor | None]) -> Iterator[None]:
    """Where a gradient arrives at these edges, this goes on."""
    wanted: dict[Node, dict[int, torch.Tensor | None]] = {}
    for edge, grad in zip(edges, grads, strict=True):
        wanted.setdefault(edge.node, {})[edge.output_nr] = grad

    def instead(numbers: dict[int, torch.Tensor | None]) -> Callable[..., object]:
        return lambda arrived: tuple([numbers.get(i, grad) for i, grad in enumerate(arrived)])

    handles = [node.register_prehook(instead(numbers)) for node, numbers in wanted.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _hooks_set_aside(tensors: list[torch.Tensor]) -> Iterator[None]:
    """Hooks of a parameter run where its gradient arrives, which is in the user's own backward."""
    hooks = [(h, dict(h)) for t in tensors for h in (t._backward_hooks, getattr(t, "_post_accumulate_grad_hooks", None)) if h]
    for h, _ in hooks:
        h.clear()
    try:
        yield
    finally:
        for h, saved in hooks:
            h.update(saved)


@contextmanager
def _collecting(leaves: list[torch.Tensor], ends: list[GradientEdge]) -> Iterator[list[tuple[int, torch.Tensor, bool]]]:
    """The gradients that arrive at these tensors, in order, instead of being added to `.grad`: the tensor's index, the
    gradient, and whether it comes from a backward within the one from `ends`, which the block runs."""
    found: list[tuple[int, torch.Tensor, bool]] = []
    before = [t.grad for t in leaves]
    outer: set[int] = set()

    def arrived(i: int) -> Callable[..., None]:
        def collect(*_: object) -> None:
            grad = leaves[i].grad
            if grad is not None:
                found.append((i, grad, backward_id() not in outer))
                leaves[i].grad = None

        return collect

    nodes = [(i, get_gradient_edge(t).node) for i, t in enumerate(leaves) if t.requires_grad]  # a tensor does not keep its own
    handles = [node.register_hook(arrived(i)) for i, node in nodes]
    handles += [end.node.register_prehook(lambda _: outer.add(backward_id())) for end in ends]
    for t in leaves:
        t.grad = None
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
        for t, grad in zip(leaves, before, strict=True):
            t.grad = grad
