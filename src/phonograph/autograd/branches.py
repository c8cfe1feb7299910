"""Gradients through a branch whose body a replay chooses by what a tensor holds.

In a capture each body runs under autograd, and leaves a graph of its own. That begins at leaves, parameters mostly, and at what
stands for tensors with a history from before, among the operands and in closures. The results of all bodies come out of one
node, whose backward is a branch as well: each of its bodies runs the backward of one graph.

Gradients are added up in the order in which eager adds them, because that rounds. So a tensor that a body uses twice is an
input of the node twice, and autograd is given the two gradients one by one. Where another body uses it once, -0.0 stands for
the other: added to any number, it leaves that as it is to the bit. (0.0 would make 0.0 of -0.0.)

Where a body gives a tensor no gradient at all, eager leaves `.grad` alone, and runs nothing that lies before. The same comes
out for a leaf that has a gradient already, to which -0.0 is added. Otherwise the call is refused.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from functools import partial, reduce
from operator import or_
from types import CellType, FunctionType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from .._torch.autograd import (
    bump,
    is_asked_for,
    keeps_graph,
    made_when,
    next_number,
    ready_for_gradients,
    unseen_by_checkpoint,
    version_of,
    will_run,
)
from .._torch.autograd import saved_tensors_hooks as hooks_on_saved
from .._torch.dynamic import Context, Thing
from .._torch.modes import without_modes
from .._torch.tensors import storage_id
from ..aten import operators
from ..capture.control_flow import Graph, Roots, strides_of
from ..errors import Refusal, Unseen
from ..memory.pool import unexpanded
from ..python.bytecode import names_in
from ..python.identity import identity
from ..python.origin import users_line
from .graph import Source

if TYPE_CHECKING:
    from ..capture.dispatch import OperatorWatch

__all__ = ["branch"]

Body = Callable[[Thing, Sequence[torch.Tensor]], Sequence[torch.Tensor]]
Gradients = Sequence[torch.Tensor | None]

_HERE = "in a branch"
_BACKWARD = "backward"


def branch(
    watch: OperatorWatch, index: torch.Tensor, body: Body, called: Collection[Thing], operands: Sequence[torch.Tensor],
    roots: Roots,
) -> list[torch.Tensor]:  # fmt: skip
    """Capture a branch as `watch.branch` does: `body` calls one of the functions with the operands.

    Its results have a history where gradients are wanted.
    """
    if not torch.is_grad_enabled() or watch.has_backward:
        return watch.branch(index, [partial(body, f, operands) for f in called], roots)
    with watch.unheard():
        ready_for_gradients()
    index, graphs = watch.copied(index), [_Graph(watch) for _ in called]
    with _saving_apart(watch):
        forwards = [partial(graph.forward, body, f, operands) for graph, f in zip(graphs, called, strict=True)]
        results = watch.branch(index, forwards, roots, graphs)
    return _Joint(watch, index, graphs).attach(results)


@contextmanager
def _saving_apart(watch: OperatorWatch) -> Iterator[None]:
    """What the bodies save is kept as it is. Recomputed in the body of a backward, it would be there for that body only."""
    pack, _ = hooks_on_saved() or (None, None)
    if pack is not None and getattr(pack, "__module__", "") != checkpoint.__module__:
        raise watch.located(Refusal(f"saves tensors through hooks {_HERE} (saved_tensors_hooks)", "leave the hooks out"))
    with nullcontext() if pack is None else saved_tensors_hooks(unseen_by_checkpoint(lambda t: t, pack), lambda t: t):
        yield


class _Entry(NamedTuple):
    """Where the graph of a body begins: a leaf, or a result of an older node."""

    node: Node
    number: int

    @property
    def leaf(self) -> torch.Tensor | None:
        found: torch.Tensor | None = getattr(self.node, "variable", None)
        return found


class _Graph(Graph):
    """The graph of one body. It keeps no tensor but what autograd saves."""

    def __init__(self, watch: OperatorWatch) -> None:
        self._watch = weakref.ref(watch)
        self._forward = True  # it is being made
        self._made = 0  # how many storages the call had made before
        self._met: dict[int, tuple[weakref.ref[torch.Tensor], object]] = {}  # what was there before, and its history
        self._own: dict[int, weakref.ref[torch.Tensor]] = {}  # what the body's operators gave
        self._entries: dict[Node, _Entry] = {}  # by the nodes that lead there from within
        self.ends: list[GradientEdge | None] = []
        """Of the results that require a gradient."""
        self.versions: list[torch.Tensor] = []
        """Tensors that have the versions of these."""
        self.counts: Counter[_Entry] = Counter()
        """How often each entry gets a gradient."""
        self.tensors: dict[_Entry, torch.Tensor] = {}
        """What is there, until the branch has been captured."""
        self.absent: set[_Entry] = set()
        """Entries that a branch within gives no gradient in one of its bodies."""

    def met(self, operands: Sequence[torch.Tensor], made: object) -> None:
        watch = self._watch()
        if not self._forward or watch is None:
            return
        for t in operands:
            if not watch.made_since(t, self._made) and not _is(self._met.get(identity(t), (None, None))[0], t):
                self._met[identity(t)] = weakref.ref(t), _history(t)
        for t in operators.tensors_in(made, []):
            self._own[identity(t)] = weakref.ref(t)

    def forward(self, body: Body, function: Thing, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the body. Returns its results without history."""
        watch = self._watch()
        assert watch is not None
        self._made, first = watch.made, next_number()
        found = self._run(watch, body, function, operands)
        if any(t.requires_grad and (t.is_leaf or t.retains_grad) for t in found):  # its gradient would stay in the body
            raise watch.located(Refusal("returns a tensor from a branch, which keeps its gradient",
                                        "call requires_grad_() or retain_grad() on the result"))  # fmt: skip
        self.ends = [get_gradient_edge(t) if t.requires_grad else None for t in found]
        nodes = [node for _, _, node in self._ways(filter(None, self.ends))]
        for node in nodes:
            leaf = getattr(node, "variable", None)
            if leaf is not None and not watch.made_since(leaf, self._made) and not _is(self._own.get(identity(leaf)), leaf):
                self._entries[node] = _Entry(node, 0)
                self.tensors[self._entries[node]] = leaf
            elif leaf is None and node not in self._entries and made_when(node) < first:
                raise watch.located(Refusal(f"differentiates {_HERE} through a tensor from before it",
                                            "pass it as an operand, or detach it"))  # fmt: skip
        self.counts = Counter(self._entries[node] for node in nodes if node in self._entries)
        self._forward, self._met, self._own = False, {}, {}
        self.keeps = any(self.ends)
        self.versions = [version_of(t) for t in found if t.requires_grad]
        return [_without_history(t) for t in found]

    def _run(
        self, watch: OperatorWatch, body: Body, function: Thing, operands: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:  # fmt: skip
        """Run the body on what stands for tensors from before."""
        cells, names = _closures(function)
        if _BACKWARD in names:  # through the graph from before
            found = body(function, operands)
            self._check_histories(watch)
            return found
        with without_modes():
            root = torch.empty(0, requires_grad=True)
        arrived, stands = list[torch.Tensor | None](), dict[int, torch.Tensor]()

        def stand(t: torch.Tensor) -> torch.Tensor:
            if t.grad_fn is None:
                return t
            if identity(t) not in stands:
                stands[identity(t)] = made = Source.apply(root, t.detach(), arrived)
                entry = self._entries[made.grad_fn] = _Entry(t.grad_fn, t.output_nr)
                self.tensors[entry] = t
                self._met[identity(made)] = weakref.ref(made), _history(made)
            return stands[identity(t)]

        with _replaced(cells, stand):
            found = body(function, [*map(stand, operands)])
        self._check_histories(watch)
        if arrived:
            raise watch.located(Refusal(f"runs a backward {_HERE} through a tensor from before it",
                                        "call backward() in the function itself that pg.cond is given"))  # fmt: skip
        return found

    def _check_histories(self, watch: OperatorWatch) -> None:
        """Refuse what was there before and has another history now, or what stands for it."""
        if any((t := ref()) is not None and _history(t) != had for ref, had in self._met.values()):
            raise watch.located(Refusal(f"changes a tensor in place {_HERE}, which gets another history by that",
                                        "return a new one, or do it under torch.no_grad(); retain_grad() outside"))  # fmt: skip

    def _ways(self, ends: Iterable[GradientEdge]) -> Iterator[tuple[Node, int, Node]]:
        """The ways from these ends into each node of the graph: from which node, by its gradient of which number, to which.
        (The nodes where a graph begins have one result.)"""
        work = [*dict.fromkeys(end.node for end in ends)]
        seen = {*work, *self._entries}
        while work:
            node = work.pop()
            for i, (following, _) in enumerate(node.next_functions):
                if following is not None:
                    yield node, i, following
                    if following not in seen:
                        seen.add(following)
                        work.append(following)

    def reached(self, grads: Gradients) -> set[_Entry]:
        """The entries to which these gradients of the results lead."""
        ends = [end for end, g in zip(filter(None, self.ends), grads, strict=True) if g is not None]
        return {self._entries[node] for _, _, node in self._ways(ends) if node in self._entries}

    def backward(self, grads: Gradients, wanted: Set[_Entry], *, keep: bool) -> dict[_Entry, list[torch.Tensor]]:
        """Run the backward, with gradients of the results. Returns those of the entries `wanted`, in order."""
        found: dict[_Entry, list[torch.Tensor]] = defaultdict(list)
        ends = [(end, g) for end, g in zip(filter(None, self.ends), grads, strict=True) if g is not None]
        places: dict[Node, dict[int, _Entry]] = defaultdict(dict)
        starts = dict[Node, None]()
        for node, i, start in self._ways(end for end, _ in ends):
            if self._entries.get(start) in wanted:
                places[node][i] = self._entries[start]
                starts[start] = None

        def take(places: dict[int, _Entry], given: Gradients, _: object) -> Gradients:
            """Of the gradients that a node gives, take those of entries. Autograd would add them up."""
            for i, g in enumerate(given):
                if i in places and g is not None:
                    found[places[i]].append(g)
            return tuple(None if i in places else g for i, g in enumerate(given))

        handles = [node.register_hook(partial(take, own)) for node, own in places.items()]
        try:
            if starts:
                to = [GradientEdge(start, 0) for start in starts]
                torch.autograd.grad([end for end, _ in ends], to, [g for _, g in ends], keep, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        return found


class _Joint:
    """The bodies of a branch, as one node of autograd's sees them."""

    def __init__(self, watch: OperatorWatch, index: torch.Tensor, graphs: Sequence[_Graph]) -> None:
        self._watch, self._index, self._graphs = weakref.ref(watch), index, graphs
        self._counts: Counter[_Entry] = reduce(or_, (graph.counts for graph in graphs))  # the most of any body
        self._sizes: dict[_Entry, tuple[torch.Size, torch.dtype]] = {}
        self._noted: list[tuple[torch.Tensor, int]] = []  # the versions of the results
        self._where = users_line()

    def attach(self, results: list[torch.Tensor]) -> list[torch.Tensor]:
        """Give the results of the branch their history."""
        watch = self._watch()
        assert watch is not None
        needs = [[end is not None for end in graph.ends] for graph in self._graphs]
        if any(other != needs[0] for other in needs):
            raise watch.located(Refusal(
                "returns a tensor from a branch, which requires a gradient in one body and none in another",
                "let it require one in each: x * 0 and not torch.zeros_like(x); for a loop, torch.zeros(…, requires_grad=True)",
            ))  # fmt: skip
        if not any(needs[0]):
            return results
        tensors = {entry: t for graph in self._graphs for entry, t in graph.tensors.items()}
        inputs = [tensors[entry] for entry in self._counts.elements()]
        self._sizes = {entry: (tensors[entry].shape, tensors[entry].dtype) for entry in self._counts}
        for graph in self._graphs:
            graph.tensors = {}
        made = [t for t, needed in zip(results, needs[0], strict=True) if needed]
        joined = _Joined.apply(self, made, *(inputs or [made[0].detach().requires_grad_()]))  # from leaves of the bodies' own
        self._noted = [(version_of(t), t._version) for t in joined]
        left = iter(joined)
        return [next(left) if needed else t for t, needed in zip(results, needs[0], strict=True)]

    def backward(self, grads: Gradients) -> list[torch.Tensor | None]:
        """Gradients of the inputs."""
        watch = self._watch()
        if watch is None:
            raise RuntimeError("the backward of a branch runs outside of the recorded call that has made its graph")
        if torch.is_grad_enabled():
            raise watch.located(Refusal("differentiates the gradient of a branch (create_graph)",
                                        "differentiate within the body", self._where))  # fmt: skip
        if watch.cast_again is not None:
            raise watch.located(watch.cast_again)
        self._follow_writes()
        reached = set[_Entry]().union(*(graph.reached(grads) for graph in self._graphs))
        wanted = {entry: count for entry, count in self._counts.items() if entry in reached and will_run(entry.node)}
        lie = dict[tuple[_Entry, int], tuple[int, ...]]()
        bodies = [partial(self._through, watch, graph, grads, wanted, lie, keep=keeps_graph()) for graph in self._graphs]
        found = iter(watch.branch(self._index, bodies, (), self._graphs) if wanted else ())
        return [next(found) if entry in wanted else None for entry in self._counts.elements()]

    def _through(
        self, watch: OperatorWatch, graph: _Graph, grads: Gradients, wanted: Mapping[_Entry, int],
        lie: dict[tuple[_Entry, int], tuple[int, ...]], *, keep: bool,
    ) -> list[torch.Tensor]:  # fmt: skip
        """Run the backward of one body. Returns gradients of the entries `wanted`, of each so many, which `lie` so in each
        body."""
        made, found, taken = watch.made, list[torch.Tensor](), set[int]()
        with _hooks_apart(wanted):
            arrived = graph.backward(grads, wanted.keys(), keep=keep)
        for entry, count in wanted.items():
            gradients = [_reduced(g, self._sizes[entry]) for g in arrived[entry]]
            if not gradients or entry in graph.absent:
                self._check_absent(watch, entry)
            like = entry.leaf if entry.leaf is not None else gradients[0]
            grows = entry.leaf is None and count > len(gradients) and not _is_dense(like)  # it is dense after the sum
            gradients += [torch.zeros_like(like).neg_() for _ in range(count - len(gradients))]
            for i, g in enumerate(gradients):
                own = watch.made_since(g, made) and storage_id(g) not in taken
                strides = like.stride() if entry.leaf is not None and unexpanded(like) is like else g.stride()
                found.append(g if own and g.stride() == strides else _copied(g, strides))
                if grows or lie.setdefault((entry, i), strides_of(found[-1])) != strides_of(found[-1]):
                    raise watch.located(Refusal(
                        f"gives a gradient {_HERE} of other strides than that of another body, as that of a sum is expanded",
                        "use the tensor times one in the bodies: (x * 1).sum()", self._where,
                    ))  # fmt: skip
                taken.add(storage_id(g))
        return found

    def _follow_writes(self) -> None:
        """A result that was written since counts as written for each body, which may have saved its own."""
        for i, (t, version) in enumerate(self._noted):
            if t._version != version:
                bump([graph.versions[i] for graph in self._graphs])
                self._noted[i] = t, t._version

    def _check_absent(self, watch: OperatorWatch, entry: _Entry) -> None:
        """Refuse an entry to which a body gives no gradient, if that can be told from -0.0."""
        leaf, around = entry.leaf, watch.graphs[-2] if len(watch.graphs) > 1 else None
        if leaf is not None and isinstance(around, _Graph) and entry in around.counts:
            around.absent.add(entry)
        elif leaf is None or watch.workplaces or is_asked_for(entry.node) or _has_hooks(leaf):
            raise watch.located(Refusal("gives a tensor a gradient in one body of a branch and none in another",
                                        "compute it within the body, or use it in each", self._where))  # fmt: skip
        elif leaf.grad is None:
            raise watch.located(Unseen("gives a parameter its first gradient in one body of a branch and none in another",
                                       "keep the gradients: p.grad = torch.zeros_like(p), and zero_grad(set_to_none=False)",
                                       self._where, final=False))  # fmt: skip


class _Joined(torch.autograd.Function):
    """The node from which the results of a branch come."""

    @staticmethod
    def forward(ctx: Context, joint: _Joint, results: Sequence[torch.Tensor], *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.joint = joint
        ctx.set_materialize_grads(False)
        return tuple(t.detach() for t in results)  # which share their versions

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor | None) -> object:
        return None, None, *ctx.joint.backward(grads), None


def _without_history(t: torch.Tensor) -> torch.Tensor:
    """(One of another class is refused as it is.)"""
    if type(t) is not torch.Tensor or not t.requires_grad:
        return t
    made = t.detach()
    made.__dict__.update(t.__dict__)
    return made


def _is(ref: weakref.ref[torch.Tensor] | None, t: torch.Tensor) -> bool:
    return ref is not None and ref() is t


def _history(t: torch.Tensor) -> object:
    return t.requires_grad, t.retains_grad, None if t.grad_fn is None else (made_when(t.grad_fn), t.output_nr)


def _closures(function: Thing) -> tuple[list[tuple[CellType, object]], set[str]]:
    """The closure of a function and of the functions in it, with its contents; and the names in their code."""
    cells, names, work, seen = list[tuple[CellType, object]](), set[str](), [function], set[int]()
    while work:
        function = getattr(function := work.pop(), "__func__", function)
        if isinstance(function, FunctionType) and identity(function) not in seen:
            seen.add(identity(function))
            names |= names_in(function.__code__)
            own = [(cell, _contents(cell)) for cell in function.__closure__ or ()]
            cells += own
            work += [held for _, held in own]
    return cells, names


@contextmanager
def _replaced(cells: Iterable[tuple[CellType, object]], stand: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """In the block, what stands for them is in the place of tensors."""
    given = [(cell, held, stand(held)) for cell, held in cells if isinstance(held, torch.Tensor)]
    for cell, _, new in given:
        cell.cell_contents = new
    try:
        yield
    finally:
        for cell, held, new in given:
            if _contents(cell) is new:
                cell.cell_contents = held


def _contents(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


@contextmanager
def _hooks_apart(entries: Iterable[_Entry]) -> Iterator[None]:
    """In the block, the hooks of leaves hear nothing: they are called with what autograd adds up."""
    found = [hooks for entry in entries if entry.leaf is not None and (hooks := entry.leaf._backward_hooks)]
    kept = [*map(dict, found)]
    for hooks in found:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, own in zip(found, kept, strict=True):
            hooks.update(own)


def _has_hooks(leaf: torch.Tensor) -> bool:
    return bool(leaf._backward_hooks or getattr(leaf, "_post_accumulate_grad_hooks", None))


def _reduced(g: torch.Tensor, like: tuple[torch.Size, torch.dtype]) -> torch.Tensor:
    """A gradient as autograd makes it before it is added to others."""
    size, dtype = like
    return (g if g.shape == size else g.sum_to_size(size)).to(dtype)


def _is_dense(t: torch.Tensor) -> bool:
    """Whether another tensor that is added to this one gives one of the same strides."""
    numel = 1
    for stride, size in sorted((stride, size) for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1):
        if stride != numel:
            return False
        numel *= size
    return True


def _copied(g: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    made = torch.empty_strided(g.size(), strides, dtype=g.dtype, device=g.device)
    unexpanded(made).copy_(unexpanded(g))
    return made
