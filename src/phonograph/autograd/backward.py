"""The backward of a recorded call, as a function that can be run, or recorded, again and again.

It is the graph of autograd that the capture of the forward has left behind. What is saved in it are numbers (`tracing`), which
stand for places that each replay of the forward fills anew, and for parts of its arguments, which the backward is given.

Two ways lead through it. `torch.autograd.grad` gives the gradients of all that the call depends on. But where a part is
recomputed by a backward of its own (`checkpoint(use_reentrant=True)`), only `torch.autograd.backward` is allowed, which adds to
`.grad`: each gradient is taken away there as it arrives, so that it can be added later, outside, in eager's order.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import gt, is_
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .._torch.autograd import backward_id, forget_recomputed, selected_anew
from .._torch.tensors import has_memory, is_ordinary, use_count
from ..errors import Refusal
from ..memory.pool import Lease, copy_of
from ..memory.spans import Spans
from ..python.identity import identity
from ..state.rng import Rewind
from ..values.tensor_subclasses import Description, consists_of_parts, parts
from .double_backward import nothing_through
from .kept_by_code import Contents
from .release import Release
from .saved import Asked, Places, Reads

__all__ = ["Backward", "Gradients", "Recompute", "Start"]

Gradients = tuple[list[torch.Tensor | None], list[tuple[int, torch.Tensor]]]
"""What a `Backward` gives."""


_CHANGES = Refusal("changes in its backward what its forward has made (an attribute of ctx, a list)",
                   "leave it as it is, or record the whole step")  # fmt: skip
_HANDS_ON = Refusal("hands on in its backward what its forward has kept (ctx, an attribute of it, a variable of a part that is "
                    "recomputed)", "hand on a clone of it")  # fmt: skip


def _never(spread: Callable[[], bool], refusal: Refusal) -> None:
    """Nobody plays the forward."""


class Start(NamedTuple):
    """Where the graph of a call begins at an argument that requires a gradient, and where that arrives."""

    number: int
    edge: GradientEdge
    arrived: list[torch.Tensor | None]


class Recompute:
    """What has to be done around each run of a backward that recomputes parts of its forward."""

    def __init__(self, parts: list[Any], code: list[object], selections: list[Any], rewind: Rewind | None) -> None:
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


@dataclass(eq=False)
class Backward:
    """What autograd does in the backward of a recorded call: gradients of its results in, gradients of what they depend on
    out. Reads what the last replay of the forward has saved, and leaves it there."""

    function: Any
    """The forward's, if some of its code runs in the backward: what it reads, that may read."""
    ends: list[GradientEdge]
    sources: list[Start]
    """Arguments that get a gradient."""
    partial: frozenset[int]
    """The numbers of those on which not all results depend."""
    parameters: list[torch.Tensor]
    """Leaf tensors outside that get one."""
    stands: list[Start]
    """Where the first of these enter the graph; the others do so as leaves."""
    lasting: bool
    """Whether autograd adds up gradients of some of these on the device's own stream, where they were captured."""
    reentrant: list[torch.Tensor]
    """Leaf tensors that may get some from parts that are recomputed by a backward of their own."""
    nested: bool
    """Whether there are such parts."""
    contents: Contents
    """Of what code keeps: the backward must leave it, as each forward makes it anew in eager."""
    places: Places
    memory: list[Lease]
    """What the forward leaves for the backward."""
    kept: frozenset[int]
    """The numbers of what lies on `memory`."""
    constant: dict[int, torch.Tensor]
    """By the numbers of what is saved: tensors outside..."""
    unversioned: frozenset[int]
    """...and of which of these it lies on the memory only: a write of the one is not noted for the other."""
    numbered: list[frozenset[int]]
    """For each of the attached results, what stands for Python numbers that are saved on its way: they are never asked for, and
    gone after the last backward as all else."""
    reaches: list[frozenset[int]]
    """For each of the attached results, on which it depends of `sources` and `parameters`, taken together."""
    exposed: dict[int, int]
    """By the numbers of what is saved: results, which their owner may write."""
    attached: list[int]
    """Which results have gradients."""
    held: list[torch.Tensor]
    """What code keeps by itself, on `memory` as well..."""
    keepsakes: list[torch.Tensor]
    """...these, which its code has..."""
    slots: dict[int, torch.Tensor]
    """...and those slots, by the arguments' numbers..."""
    themselves: frozenset[int]
    """...and of which of these arguments it is the argument itself, and no view."""
    recompute: Recompute
    only_captured: bool
    """Whether it can be captured and played, and not run: in a capture attention leaves its seed on the device. Outside, its
    backward would read that on the host; and recomputed, it would leave it there, where it is not looked for."""
    once: Callable[[Callable[[], Gradients], Rewind | None], Gradients] | None = None
    """For one that is `only_captured`: captures a call, plays it, and forgets it."""
    stop: Callable[[Refusal], object] = str
    """To be called when a run has shown that the forward should not be played any more."""
    doubt: Callable[[Callable[[], bool], Refusal], object] = _never
    """Likewise, when that will show before the next forward."""
    averaged: bool = False
    """Whether what it gives is averaged over ranks as it comes."""
    takes_turns: bool = False
    """Made while another forward of the function waited for its backward."""
    reads: Reads | None = None
    """What it has read when it was captured last."""
    releasable: dict[int, Lease] = field(default_factory=dict)
    """By the numbers of what is saved: the `memory` that nothing but a backward reads."""
    captured: bool = False
    """Whether that happens now."""
    at_rest: list[int] | None = None
    """Its `owners` when it does not run."""
    last: bool = False
    """Whether nothing reads what is saved after it: then it may give that back, as it goes."""
    shares: bool = False
    """Whether its gradients are gone when forwards run. Then they may lie where its forward works..."""
    room: Spans = field(default_factory=Spans)
    """...which is here; it has handed out nothing there."""
    wanted: Sequence[bool] = ()
    """Which of the `arguments` and `parameters` gradients are asked for, if not all."""
    apart: bool = False
    """Its forward shares no memory, because others were in its way: then it shares none either."""
    differentiable: bool = False
    """Whether its gradients get a history, in its own graph..."""
    further: Sequence[tuple[GradientEdge, torch.Tensor]] = ()
    """...and gradients of such gradients, which it is given besides..."""
    besides: Sequence[GradientEdge] = ()
    """...and places there for which it gives the gradients as well, at the end."""

    def __post_init__(self) -> None:
        self._saved = frozenset(t.untyped_storage()._cdata for t in (*self.places.own, *self.held))
        self.arguments = [s.number for s in self.sources]
        self.upstream = _upstream(self.ends)
        leaves = self.parameters[len(self.stands) :]
        self.starts = [*(s.edge for s in (*self.sources, *self.stands)), *map(get_gradient_edge, leaves)]

    @property
    def repeatable(self) -> bool:
        """Whether parts of it can be run twice: no code of the user's runs in it, and nothing is recomputed, which may write
        (running statistics)."""
        return self.function is None and not (self.nested or self.only_captured or self.recompute.parts)

    def reached(self) -> tuple[Any, ...]:
        """What it can reach. It never changes."""
        return self.function, *self.held, *self.places.own, *self.places.leaves.values(), *self.parameters

    @property
    def fixed(self) -> frozenset[int]:
        """The ids of tensors in reach of which nothing has to hold: places that are its own, and, where no code of the user's
        runs, parameters whose gradients it gives and which it has not saved."""
        mine = [*self.places.own, *self.held]
        if self.function is None and not self.nested:
            mine += self.parameters
        return frozenset(map(identity, mine)) - set(map(identity, self.places.leaves.values()))

    def gradients_stay(self, arguments: Sequence[torch.Tensor]) -> bool:
        """Whether it looks, at a forward, as if the gradients of the last step were still there at the next: some are, or some
        are those of leaves among its arguments."""
        grads = any(p.grad is not None for p in (*self.parameters, *self.reentrant))
        return grads or any(arguments[i].is_leaf for i in self.arguments)

    def noting(self, spent: Set[int]) -> AbstractContextManager[Asked]:
        """A context that collects the numbers of the saved tensors which are read in it. Those that are `spent` cannot be."""
        return self.places.noting(spent)

    @contextmanager
    def releasing(self, release: Release | None, watch: Any) -> Iterator[None]:
        """It is captured inside the block, and gives back what it has read."""
        before, self.places.asked.numbers = self.places.asked.numbers, frozenset()
        self.captured = True
        try:
            with self.places.releasing(release), nullcontext() if release is None else release.during(watch):
                yield
        finally:
            self.captured = False
        self.reads = Reads(self.places, frozenset(self.places.asked.numbers))
        self.places.asked.numbers |= before

    def __call__(self, *given: torch.Tensor | None) -> Gradients:
        """From the gradients of the results, and after them those arguments of the forward of which something was saved: the
        gradients of the `arguments`, and of the `parameters` after them; None for what the results do not depend on. A result
        whose gradient is None has none. Besides, what is to be added to the gradients of `reentrant`, in order, each with its
        number there."""
        grads, arguments = self.gradients(given), given[len(self.ends) :]
        if not self.further and all(grad is None for grad in grads):
            return [None] * (len(self.starts) + len(self.besides)), []
        if self.only_captured and not torch.cuda.is_current_stream_capturing():
            assert self.once is not None
            with self._keeping():
                return self.once(lambda: self(*given), self.recompute.rewind)
        before = self.contents.now()
        try:
            with self._keeping(), self.places.reading(arguments):
                return self._ran(grads)
        finally:
            if self.contents.changed(before):
                self.stop(_CHANGES)

    def gradients(self, given: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
        """Those of the results, of what a call was given."""
        return given[: len(self.ends)]

    def _ran(self, grads: Sequence[torch.Tensor | None]) -> Gradients:
        there = [(end, grad) for end, grad in zip(self.ends, grads, strict=True) if grad is not None]
        there += self.further
        with self.recompute:
            found, added = self._run([end for end, _ in there], [grad for _, grad in there])
        return [*map(self._own, found)], [(i, self._own(grad)) for i, grad in added]

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        """Inside the block it runs, and what code keeps by itself must stay with it: the next forward writes that. (A capture
        sees to it that nothing leaves.)"""
        if self.captured or (self.only_captured and torch.cuda.is_current_stream_capturing()):
            yield
            return
        before = self.owners(), self._storages()
        try:
            yield
        except BaseException:
            if at_rest := self.at_rest:  # the exception has some of it, as long as it is there
                self.doubt(lambda: _stay_more(self.owners, at_rest), _HANDS_ON)
            raise
        if _more(self.owners, before[0]) or _more(self._storages, before[1]):
            self.stop(_HANDS_ON)

    def owners(self) -> list[int]:
        """How many there are of what code keeps by itself, and of what leads to it."""
        counts = [use_count(t.untyped_storage()._cdata) for t in self.held]
        return counts + [sys.getrefcount(x) for x in self.keepsakes] + self.contents.owners()

    def _storages(self) -> list[int]:
        """How many have the storages themselves: calls that wait for their backwards among them."""
        return [sys.getrefcount(t.untyped_storage()) for t in self.held]

    def _own(self, grad: Any) -> Any:
        """A gradient in memory of its own, though it may be what was saved: that is written anew, or nobody's after all."""
        if grad is not None and not is_ordinary(grad) and consists_of_parts(grad):
            of, inner = Description.of(grad), parts(grad)
            own = [*map(self._own, inner)]
            return grad if all(map(is_, own, inner)) else of.around(own)
        if grad is None or not has_memory(grad):
            return grad
        storage = grad.untyped_storage()._cdata
        saved = storage in self._saved or self.places.lends(grad) or self.places.is_given(storage)
        if not saved:
            return grad
        return grad.clone() if self.differentiable else copy_of(grad)

    def between(
        self, result: int, grad: torch.Tensor, others: list[int], arguments: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:  # fmt: skip
        """What of a result's gradient flows to other results on which it depends, and not through one of them. Results go by
        their places among those that are attached."""
        edges = [self.ends[i] for i in others]
        with self.places.reading(arguments), self.recompute, _cut(edges, [None] * len(edges)):
            found = self._grad([self.ends[result]], edges, [grad])
        return [*map(self._own, found)]

    def beyond(self, others: list[int], given: Sequence[torch.Tensor | None]) -> Gradients:
        """As a call, but nothing flows to these results from others: their gradients are complete."""
        with _cut([self.ends[i] for i in others], [given[i] for i in others]):
            return self(*given)

    def _run(self, ends: list[GradientEdge], grads: list[torch.Tensor]) -> Gradients:
        if self.nested and not self.wanted:
            return self._accumulating(ends, grads)
        with _hooks_set_aside(self.parameters):
            wanted = self.wanted or [True] * len(self.starts)
            starts = [start for start, asked in zip(self.starts, wanted, strict=True) if asked]
            starts += self.besides
            found = iter(self._grad(ends, starts, grads) if starts else ())
            return [*(next(found) if asked else None for asked in wanted), *found], []

    def within(
        self, ends: Sequence[tuple[GradientEdge, torch.Tensor]], arguments: Sequence[torch.Tensor], stops: Iterable[Any]
    ) -> list[torch.Tensor | None]:  # fmt: skip
        """What flows from places in what has grown beyond the graph of the capture, up to nodes where it stops: into that graph
        nothing flows."""
        with self.places.noting(frozenset()), self.places.reading(arguments), nothing_through(stops):
            found, _ = self._run([end for end, _ in ends], [grad for _, grad in ends])
        return [*map(self._own, found)]

    def _grad(self, ends: list[GradientEdge], starts: list[GradientEdge], grads: list[torch.Tensor]) -> Sequence[Any]:
        return torch.autograd.grad(ends, starts, grads, retain_graph=True, create_graph=self.differentiable, allow_unused=True)

    def _accumulating(self, ends: list[GradientEdge], grads: list[torch.Tensor]) -> Gradients:
        """Through `autograd.backward`, the only one in which a part may run a backward of its own."""
        leaves = self.reentrant  # of which some may not require gradients any more
        index = {identity(t): i for i, t in enumerate(leaves)}
        for s in (*self.sources, *self.stands):
            s.arrived.clear()
        with _hooks_set_aside(leaves), _collecting(leaves, ends) as collected:
            torch.autograd.backward(ends, grads, retain_graph=True)
        inner = {i for i, _, nested in collected if nested}
        outer = {i: grad for i, grad, _ in collected if i not in inner}
        own = [outer.get(index[identity(p)]) for p in self.parameters[len(self.stands) :]]
        arrived = [s.arrived.pop() if s.arrived else None for s in (*self.sources, *self.stands)]
        return [*arrived, *own], [(i, grad) for i, grad, _ in collected if i in inner]


def _more(count: Callable[[], list[int]], before: list[int]) -> bool:
    """Whether there are more than before."""
    if any(map(gt, count(), before)):
        gc.collect()
        return any(map(gt, count(), before))
    return False


def _stay_more(count: Callable[[], list[int]], before: list[int]) -> bool:
    """Likewise, after an exception: a thread of autograd's may have that a moment longer than whoever has caught it."""
    for _ in range(10):
        if not any(map(gt, count(), before)):
            return False
        time.sleep(0.005)
    return _more(count, before)


def _upstream(ends: list[GradientEdge]) -> list[list[int]]:
    """For each of some results, the others on which it depends."""
    if len(ends) < 2:
        return [[] for _ in ends]
    places = {(end.node, end.output_nr): i for i, end in enumerate(ends)}
    found = []
    for i, end in enumerate(ends):
        met, seen, work = set[int](), {end.node}, [end.node]
        while work:
            for node, number in work.pop().next_functions:
                if node is None:
                    continue
                met.add(places.get((node, number), i))
                if node not in seen:
                    seen.add(node)
                    work.append(node)
        found.append(sorted(met - {i}))
    return found


@contextmanager
def _cut(edges: list[GradientEdge], grads: list[torch.Tensor | None]) -> Iterator[None]:
    """Where a gradient arrives at these edges, this goes on."""
    wanted: dict[Any, dict[int, torch.Tensor | None]] = {}
    for edge, grad in zip(edges, grads, strict=True):
        wanted.setdefault(edge.node, {})[edge.output_nr] = grad

    def instead(numbers: dict[int, torch.Tensor | None]) -> Callable[..., Any]:
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
        def collect(*_: Any) -> None:
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
