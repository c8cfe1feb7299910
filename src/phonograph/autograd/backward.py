"""Backward of a recorded call, as a function that can be run or recorded many times.

It is the autograd graph that the capture of the forward has built. In place of saved tensors, its nodes hold numbers
(`saved.py`). Each stands for memory that every replay of the forward fills anew, or for a view of an argument.

The graph is run in one of two ways. `torch.autograd.grad` returns the gradients of everything that the call depends on. Inside
`checkpoint(use_reentrant=True)` only `torch.autograd.backward` is allowed, which accumulates into `.grad`. There, each gradient
is taken out of `.grad` as it arrives, and accumulated later, outside, in eager's order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from .._torch.autograd import backward_id, forget_recomputed, selected_anew
from .._torch.tensors import has_memory, is_ordinary
from ..capture.dispatch import OperatorWatch
from ..capture.origins import Origins
from ..errors import Refusal
from ..memory.pool import copy_of
from ..memory.spans import Spans
from ..python.identity import identity
from ..state.rng import Rewind
from ..values.tensor_subclasses import Description, consists_of_parts, parts
from .double_backward import nothing_through
from .graph import Graph, Way
from .kept_by_code import Kept
from .release import Release
from .saved import Asked, Reads, Saved

__all__ = ["Backward", "Forward", "Gradients", "Recompute", "Request"]

Gradients = tuple[list[torch.Tensor | None], list[tuple[int, torch.Tensor]]]
"""Gradients by number (None: no gradient), and gradients to accumulate in order, each with the index of its tensor."""


_CHANGES = Refusal("changes in its backward what its forward has made (an attribute of ctx, a list)",
                   "leave it as it is, or record the whole step")  # fmt: skip


def _never(spread: Callable[[], bool], refusal: Refusal) -> None:
    """Default of `Forward.doubt`."""


class Recompute:
    """Context of a backward that recomputes parts of its forward: random states, and the caches of `checkpoint`."""

    def __init__(self, parts: list[object], code: list[object], selections: list[Any], rewind: Rewind | None) -> None:
        self.parts = parts  # the frames of `checkpoint`
        self._code = code  # objects that they reference weakly
        # Caches of selective recompute, which a backward empties.
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
    """Callbacks to the recording of the forward, and facts about it."""

    stop: Callable[[Refusal], object] = str
    """Refuses further replays, which would be wrong."""
    doubt: Callable[[Callable[[], bool], Refusal], object] = _never
    """Refuses further replays if a condition holds before the next one."""
    once: Callable[[Callable[[], Gradients], Rewind | None], Gradients] | None = None
    """Captures a call, plays it once, and drops it: for a backward that is `only_captured`."""
    averaged: bool = False
    """Whether gradients are averaged over ranks as they arrive."""
    takes_turns: bool = False
    """Whether another forward of the function waited for its backward at the time of the recording."""
    apart: bool = False
    """Whether the recordings of forward and backward share memory with no others."""
    room: Spans | None = None
    """Memory of the forward's intermediates, where gradients may lie that die before its next replay. None if they may live
    on."""


@dataclass(frozen=True, eq=False)
class Request:
    """Gradients to compute in one run."""

    wanted: Sequence[bool] = ()
    """For each of the graph's `starts`, whether its gradient is wanted; empty for all."""
    differentiable: bool = False
    """Whether the gradients get a history, in the graph of the capture (``create_graph=True``)."""
    further: Sequence[tuple[GradientEdge, torch.Tensor]] = ()
    """Further edges of the graph, with the gradients that arrive there."""
    besides: Sequence[GradientEdge] = ()
    """Further edges of the graph whose gradients are returned, after the others."""
    each: bool = False
    """Whether those are returned one by one which come to a start on several ways."""


@dataclass(eq=False)
class Backward:
    """Backward of a recorded call: from gradients of its results to gradients of its arguments and parameters.

    It reads the tensors that the last replay of the forward has saved, and does not free them."""

    graph: Graph
    saved: Saved
    kept: Kept
    recompute: Recompute
    function: object
    """The recorded function, if code of it runs in the backward; that code may read all that the function can reach."""
    only_captured: bool
    """Whether it can be captured and played, but not run. (A captured attention with dropout keeps its seed on the device,
    while a backward outside of captures expects it on the host.)"""
    forward: Forward = field(default_factory=Forward)
    request: Request = field(default_factory=Request)
    last: bool = False
    """Whether nothing reads the saved tensors after it, so that it may free each after its last use."""
    reads: Reads | None = None
    """Saved tensors that its last capture has read."""
    captured: bool = False
    """Whether it is being captured."""
    copies: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """Results that are handed out as copies of what it reads: where that lies, by their numbers."""
    origins: Origins | None = None
    """Modules that called the operators of the forward, for the operators of the backward."""

    def __post_init__(self) -> None:
        self._saved = frozenset(t.untyped_storage()._cdata for t in (*self.saved.places.own, *self.kept.held))

    def for_request(self, request: Request) -> Backward:
        """Copy with another request."""
        found = copy.copy(self)
        found.request = request
        return found

    @property
    def repeatable(self) -> bool:
        """Whether parts of it can be run twice: no code of the user's runs, and nothing is recomputed. (Recomputed code may
        update running statistics.)"""
        return self.function is None and not (self.graph.nested or self.only_captured or self.recompute.parts)

    def reached(self) -> tuple[object, ...]:
        """Objects that it can reach."""
        places = self.saved.places
        return self.function, *self.kept.held, *places.own, *places.leaves.values(), *self.graph.parameters

    @property
    def fixed(self) -> frozenset[int]:
        """Identities of tensors in reach that need no guard: memory of its own, and, where no code of the user's runs,
        parameters that it has not saved."""
        mine = [*self.saved.places.own, *self.kept.held]
        if self.function is None and not self.graph.nested:
            mine += self.graph.parameters
        return frozenset(map(identity, mine)) - set(map(identity, self.saved.places.leaves.values()))

    def gradients_stay(self, arguments: Sequence[torch.Tensor]) -> bool:
        """Whether gradients of one step seem to live until the next forward: some are there now, or belong to leaf
        arguments."""
        grads = any(p.grad is not None for p in (*self.graph.parameters, *self.graph.reentrant))
        return grads or any(arguments[i].is_leaf for i in self.graph.arguments)

    def noting(self, spent: Set[int]) -> AbstractContextManager[Asked]:
        """Context that collects the numbers of saved tensors as they are read. Reading `spent` ones raises."""
        return self.saved.places.noting(spent)

    @contextmanager
    def releasing(self, release: Release | None, watch: OperatorWatch) -> Iterator[None]:
        """Context of its capture, which frees saved tensors after their last use."""
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
        """Run the backward.

        Args:
            *given: the gradients of the results (None for zero), then those arguments of the forward of which views were saved.

        Returns:
            The gradients of the graph's `arguments`, then of its `parameters`; None where the results do not depend on one.
            Those of its `entries`, if `each` is requested. And gradients to accumulate in order, each with the index of its
            tensor in the graph's `reentrant`.
        """
        grads, arguments = self.gradients(given), given[len(self.graph.ends) :]
        if not self.request.further and all(grad is None for grad in grads):
            given_out = self.graph.entries if self.request.each else self.graph.starts
            return [None] * (len(given_out) + len(self.request.besides)), []
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
        """Select the gradients of the results."""
        return given[: len(self.graph.ends)]

    def _ran(self, grads: Sequence[torch.Tensor | None]) -> Gradients:
        there = [(end, grad) for end, grad in zip(self.graph.ends, grads, strict=True) if grad is not None]
        there += self.request.further
        with self.recompute:
            found, added = self._run([end for end, _ in there], [grad for _, grad in there])
        return [*map(self._own, found)], [(i, self._own(grad)) for i, grad in added]

    def _keeping(self) -> AbstractContextManager[None]:
        """Context of a run: refuses further replays if objects that code has kept from the forward change. (A capture checks
        that itself.)"""
        if self.captured or (self.only_captured and torch.cuda.is_current_stream_capturing()):
            return nullcontext()
        return self.kept.staying(self.forward.stop, self.forward.doubt)

    def _own(self, grad: Any) -> Any:
        """Copy a gradient that lies in the memory of saved tensors, which the next replay overwrites."""
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
        """Backpropagate the gradient of one result to other results on which it depends, along paths through none of them, and
        give it on each of the graph's ways `toward` them.

        Results are given by their indices among those that are attached, in order."""
        edges = [self.graph.ends[i] for i in others]
        toward = [(k, way) for k, way in self.graph.toward[result] if k in others]
        one_by_one = _taken([way for _, way in toward if way is not None])
        with self.saved.places.reading(arguments), self.recompute, _cut(edges, [None] * len(edges)), one_by_one as came:
            sums = dict(zip(others, self._grad([self.graph.ends[result]], edges, [grad]), strict=True))
        return [self._own(sums[k] if way is None else came.get(way)) for k, way in toward]

    def beyond(self, others: list[int], given: Sequence[torch.Tensor | None]) -> Gradients:
        """Run the backward with the gradients of these results taken as complete: nothing is added to them from other
        results."""
        with _cut([self.graph.ends[i] for i in others], [given[i] for i in others]):
            return self(*given)

    def _run(self, ends: list[GradientEdge], grads: list[torch.Tensor]) -> Gradients:
        if self.graph.nested and not self.request.wanted:
            return self._accumulating(ends, grads)
        with _hooks_set_aside(self.graph.parameters):
            wanted = self.request.wanted or [True] * len(self.graph.starts)
            starts = [start for start, asked in zip(self.graph.starts, wanted, strict=True) if asked]
            starts += self.request.besides
            with self._one_by_one(wanted) as came:
                found = iter(self._grad(ends, starts, grads) if starts else ())
            sums = [next(found) if asked else None for asked in wanted]
            if not self.request.each:
                return [*sums, *found], []
            ways = self.graph.ways
            return [*chain.from_iterable(map(came.get, way) if way else [one] for way, one in zip(ways, sums, strict=True)),
                    *found], []  # fmt: skip

    def _one_by_one(self, wanted: Sequence[bool]) -> AbstractContextManager[dict[Way, torch.Tensor]]:
        """Context that takes gradients as they come on the graph's `ways`. Autograd would add them up."""
        some = [ways for ways, asked in zip(self.graph.ways, wanted, strict=True) if asked and self.request.each]
        return _taken([*chain.from_iterable(some)])

    def within(
        self, ends: Sequence[tuple[GradientEdge, torch.Tensor]], arguments: Sequence[torch.Tensor], stops: Iterable[Node]
    ) -> list[torch.Tensor | None]:  # fmt: skip
        """Run the part of the graph that was built after the capture (a differentiated backward), and stop at these nodes."""
        with self.saved.places.noting(frozenset()), self.saved.places.reading(arguments), nothing_through(stops):
            found, _ = self._run([end for end, _ in ends], [grad for _, grad in ends])
        return [*map(self._own, found)]

    def _grad(
        self, ends: list[GradientEdge], starts: list[GradientEdge], grads: list[torch.Tensor]
    ) -> Sequence[torch.Tensor | None]:
        return torch.autograd.grad(
            ends, starts, grads, retain_graph=True, create_graph=self.request.differentiable, allow_unused=True
        )

    def _accumulating(self, ends: list[GradientEdge], grads: list[torch.Tensor]) -> Gradients:
        """Run by `autograd.backward`, which allows reentrant checkpoints."""
        leaves = self.graph.reentrant  # some may no longer require gradients
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
def _taken(ways: Iterable[Way]) -> Iterator[dict[Way, torch.Tensor]]:
    """Context that takes the gradients which come on these ways."""
    came = dict[Way, torch.Tensor]()
    numbers: dict[Node, set[int]] = {}
    for node, number in ways:
        numbers.setdefault(node, set()).add(number)

    def take(node: Node, own: Set[int], given: Sequence[torch.Tensor | None], _: object) -> tuple[torch.Tensor | None, ...]:
        came.update((Way(node, i), g) for i, g in enumerate(given) if i in own and g is not None)
        return tuple([None if i in own else g for i, g in enumerate(given)])

    handles = [node.register_hook(partial(take, node, own)) for node, own in numbers.items()]
    try:
        yield came
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _cut(edges: list[GradientEdge], grads: list[torch.Tensor | None]) -> Iterator[None]:
    """Context that replaces the gradients which arrive at these edges."""
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
    """Context without the hooks of these tensors. They run later, in the user's own backward."""
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
    """Context that collects the gradients of leaves in order, and keeps them out of `.grad`.

    Each is given as the index of the leaf, the gradient, and whether a nested backward has computed it."""
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
