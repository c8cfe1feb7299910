"""Compiled graph with its parameters bound, and recorded.

A graph takes parameters and buffers as arguments, before and between the others. They are the same tensors in each call and
must not be copied. So they are bound first, and a function of the other arguments is recorded, with parameters outside as those
of a module are. A graph that is called with several sets of parameters (one compiled block, for each layer of a model) is bound
to each set, and recorded for each.

Ownership: a recording keeps the parameters that it reads. A compiler keeps the graph as long as the code, which may outlive a
model, so the graph must not keep its recordings. The module that owns the parameters keeps them.
"""

from __future__ import annotations

import copy
import gc
import itertools
import re
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from operator import is_, itemgetter
from typing import Any, NamedTuple

import torch

from .._torch.dynamic import Leaves, Reading
from .._torch.dynamo import looked_at_first
from .._torch.tensors import makes_fakes
from ..engine.parts import counted, together
from ..engine.recorded import Recorded
from ..guards.reachable import Reach
from ..options import Options
from ..python.identity import identity
from ..python.standing import fresh_in_children
from ..statistics import Counters, Observed, Stats

__all__ = ["Bound", "BoxedGraph", "Closed", "Graph", "named"]

_REPLACED = 3  # times that a parameter or buffer was replaced, while others stayed, after which it is an ordinary argument

_numbers = itertools.count()

_Take = Callable[[tuple[object, ...]], tuple[object, ...]]


def named(gm: object, kind: str = "") -> str:
    """A name for a graph: a number, its kind, and where its code begins."""
    gm = getattr(gm, "__self__", gm)  # of `gm.forward`
    nodes = gm.graph.nodes if isinstance(gm, torch.fx.GraphModule) else ()
    traces = [str(node.meta.get("stack_trace") or "") for node in nodes]
    found = next((at for trace in traces if (at := re.findall(r'File "(.+?)", line (\d+), in (\S+)', trace))), None)
    begins = f"{found[-1][2]}, {found[-1][0]}:{found[-1][1]}" if found else ""
    said = ", ".join(filter(None, (kind, begins)))
    return f"graph {next(_numbers)}" + (f" ({said})" if said else "")


class _Split(NamedTuple):
    """Which of a graph's arguments are bound: their places; for each argument its place among those, and the others after them;
    and functions that take both kinds. It is made anew and never changed, because several threads may call a graph."""

    places: list[int]
    order: list[int]
    state: _Take
    others: _Take

    @classmethod
    def of(cls, places: list[int], count: int) -> _Split:
        others = [i for i in range(count) if i not in places]
        rank = {i: n for n, i in enumerate([*places, *others])}
        return cls(places, [rank[i] for i in range(count)], _taking(places), _taking(others))


class Closed:
    """What a compiler has made. It may change itself (what is called first is compiled first), and that is no change of what it
    computes: so of all that it can reach only the tensors count. Its own closures and attributes, some ten places, would be
    read before each replay."""

    def __init__(self, made: Callable[..., object]) -> None:
        self._made = made

    def reached(self) -> tuple[object, ...]:
        return tuple(t for _, t in Reach([("compiled code", self._made)]).tensors.values())


class Bound:
    """A graph with one set of parameters and buffers: a function of its other arguments."""

    def __init__(self, graph: Graph, split: _Split, state: Reading, key: tuple[int, ...]) -> None:
        self.graph = weakref.ref(graph)
        self.key = key
        self._call = graph.call_inner
        self._reached = graph.reached()
        self.split = split
        self.count = len(split.order)
        """How many arguments the graph takes."""
        self.state = state
        self.recorded: Recorded[..., object] = Recorded(self, graph.options)
        self.recorded.remarks = graph.remarks

    def reached(self) -> tuple[object, ...]:
        """What it can reach. It never changes."""
        return *self._reached, *self.state

    def fits(self, args: tuple[object, ...]) -> bool:
        """Whether these arguments of the graph, as many as it takes, have its parameters."""
        return not self.state or all(map(is_, self.split.state(args), self.state))

    def __call__(self, *others: Any) -> object:
        return self._given((*self.state, *others))

    def with_state(self, state: Sequence[object]) -> Callable[..., object]:
        """The same function, of other parameters and buffers."""
        return lambda *others: self._given((*state, *others))

    def _given(self, args: tuple[object, ...]) -> Any:
        return self._call([args[i] for i in self.split.order])


class Graph(Observed):
    """Stands in the place of a graph, or of any function of a flat list of arguments."""

    def __init__(
        self, inner: Callable[..., object], options: Options, reached: tuple[object, ...], state: Sequence[int] | None = None,
        remarks: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """`state`: which arguments are parameters and buffers; None: those that look like some, in the first call. `reached`:
        what `inner` can reach of the world. `remarks` are for `phonograph.explain`."""
        self.inner = inner
        self.remarks = tuple(remarks)
        self.options = options
        self.bound: weakref.WeakValueDictionary[tuple[int, ...], Bound] = weakref.WeakValueDictionary()
        self._reached = reached
        self._given = None if state is None else list(state)
        self._static = self._given
        self._split: _Split | None = None
        self._replaced: Counter[int] = Counter()  # how often these arguments were others, and the module the same
        self._last: Callable[[], Bound | None] = _none
        self._kept: list[Bound] = []  # those without parameters, or whose parameters are no module's
        self._past = Counters()  # what those counted that are gone
        weakref.finalize(self, _forsake).atexit = False

    def __repr__(self) -> str:
        return f"<recorded {self.options.name}: {len(self.bound)} sets of parameters>"

    def reached(self) -> tuple[object, ...]:
        """What it can reach, for a recorded function that calls it."""
        return self._reached

    @property
    def call_inner(self) -> Callable[[Leaves], Any]:
        """The graph itself, as a function of a list."""
        inner = self.inner
        return lambda args: inner(*args)

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.inner(*args)
        return self._answer(args)

    def _answer(self, args: tuple[object, ...]) -> object:
        bound = self._last()
        if bound is None or len(args) != bound.count or (bound.state and not bound.fits(args)):
            if makes_fakes():  # DistributedDataParallel's graph is compiled in parts, and asks each what shapes it gives
                return self.call_inner([*args])
            if self._split is None and looked_at_first():
                self._past += Counters(calls=1, live=1)
                return self.call_inner([*args])
            with _binding:
                bound = self._found(args)
        return bound.recorded(*bound.split.others(args))

    def _found(self, args: tuple[object, ...]) -> Bound:
        """The graph with its parameters among these arguments."""
        while True:
            split = self._split
            if split is None or len(args) != len(split.order):
                split = self._split = self._look(args)
            bound = self._bind(split, split.state(args))
            if bound is not None:
                return bound

    def _look(self, args: tuple[object, ...]) -> _Split:
        if self._static is None:
            self._static = [i for i, x in enumerate(args) if _is_state(x)]
        return _Split.of([i for i in self._static if i < len(args) and isinstance(args[i], torch.Tensor)], len(args))

    def _bind(self, split: _Split, state: Reading) -> Bound | None:
        """The graph with these; None if it has turned out that some of them are better not bound."""
        key = (*split.order, *map(identity, state))
        bound = self.bound.get(key)
        if bound is None:
            owner = _owner(state[0]) if state else None
            mine = self._kept if owner is None else _kept.setdefault(owner, [])
            if self._unbound(split, state, owner, [b for b in mine if b.graph() is self]):
                return None
            bound = self.bound[key] = Bound(self, split, state, key)
            mine.append(bound)
            self._prune(mine, owner)
        self._last = weakref.ref(bound)
        return bound

    def _unbound(self, split: _Split, state: tuple[object, ...], owner: torch.nn.Module | None, before: list[Bound]) -> bool:
        """Whether some of these are replaced again and again: where the others stay, as a buffer that each call makes anew; or
        with all others, as tensors that are nobody's. They are arguments like others from now on."""
        for earlier in [b for b in before[-1:] if len(b.state) == len(state)]:
            changed = [i for i, now, then in zip(split.places, state, earlier.state, strict=True) if now is not then]
            if len(changed) == len(state):
                changed = [i for i, now in zip(split.places, state, strict=True) if owner is None and not _is_state(now)]
            self._replaced.update(changed)
        often = {i for i, n in self._replaced.items() if n >= _REPLACED}
        if not often:
            return False
        self.reset()
        self._replaced.clear()
        self._static, self._split = [i for i in split.places if i not in often], None
        return True

    def _prune(self, mine: list[Bound], owner: torch.nn.Module | None) -> None:
        """Of the sets of one module, drop those that it has no more, and the oldest of too many."""
        ours = [bound for bound in mine if bound.graph() is self]
        gone = [bound for bound in ours[:-1] if owner is not None and _owns(bound.state[0]) is not owner]
        gone += [bound for bound in ours if bound not in gone][: -self.options.max_recordings]
        for bound in gone:
            mine.remove(bound)
            self._drop(bound)

    def _drop(self, bound: Bound) -> None:
        self.bound.pop(bound.key, None)
        self._past += counted(bound.recorded)
        bound.recorded.reset()

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        """The copy of a graph knows nothing of the recordings of this one, which are of other parameters."""
        inner, reached = copy.deepcopy((self.inner, self._reached), memo)
        return type(self)(inner, self.options, reached, self._given, self.remarks)

    # -- for the observers

    def stats(self) -> Stats:
        return together([bound.recorded for bound in list(self.bound.values())], self._past)

    def explain(self) -> str:
        return "\n".join([bound.recorded.explain() for bound in list(self.bound.values())]) or f"{self.options.name}: no calls"

    def reset(self) -> None:
        """Drop all recordings."""
        for bound in list(self.bound.values()):
            for kept in (self._kept, *list(_kept.values())):
                if bound in kept:
                    kept.remove(bound)
            self._drop(bound)
        self._last = _none


class BoxedGraph(Graph):
    """In the place of a function of one list, which it empties: so that an argument can go before the call is over."""

    _boxed_call = True

    @property
    def call_inner(self) -> Callable[[Leaves], Any]:
        return self.inner

    def __call__(self, args: list[Any]) -> Any:
        if torch.compiler.is_compiling():
            return self.inner(args)
        given = tuple(args)
        args.clear()
        return self._answer(given)


_binding = fresh_in_children(threading.RLock())
_kept: weakref.WeakKeyDictionary[torch.nn.Module, list[Bound]] = weakref.WeakKeyDictionary()
_owners: dict[int, weakref.ref[torch.nn.Module]] = {}  # by the ids of parameters and buffers; some may be gone


def _forsake() -> None:
    """Some graph is gone, and will not be called any more."""
    for mine in list(_kept.values()):
        mine[:] = [bound for bound in mine if bound.graph() is not None]


def _owner(t: torch.Tensor) -> torch.nn.Module | None:
    """The module that a parameter or buffer belongs to."""
    if not _owns(t):
        _owners.clear()
        for x in gc.get_objects():
            if issubclass(type(x), torch.nn.Module):
                _owners.update({identity(own): weakref.ref(x) for own in (*x._parameters.values(), *x._buffers.values())})
    return _owns(t)


def _owns(t: torch.Tensor) -> torch.nn.Module | None:
    known = _owners.get(identity(t))
    module = known() if known is not None else None
    found = module is not None and any(t is own for own in (*module._parameters.values(), *module._buffers.values()))
    return module if found else None


def _none() -> None:
    return None


def _is_state(t: object) -> bool:
    return isinstance(t, torch.nn.Parameter) or (isinstance(t, torch.Tensor) and "_dynamo_static_input_type" in vars(t))


def _taking(places: list[int]) -> _Take:
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1) if places else slice(0))  # a tuple of one, or of none
