"""The backend: what Dynamo has traced is compiled by another backend, and what that returns is recorded.

Dynamo hands a graph its parameters and buffers as arguments, before and between the others. They are the same tensors in each
call, and must not be copied in each; so they are bound first, and what is recorded is a function of the others, which finds
its parameters outside, as that of a module does. A graph that is called with several sets of them (one compiled block,
applied to each layer of a model) is bound to each set, and recorded for each.

Who keeps what: a recording keeps the parameters that it reads. Dynamo keeps a graph for as long as the code that it was made
of, which outlives a model; so the graph must not keep its recordings. The module that has the parameters does.
"""

from __future__ import annotations

import gc
import itertools
import re
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter, is_, itemgetter
from types import FunctionType
from typing import Any

import torch

from ..errors import RunsLive
from ..options import Options
from ..recorded import Recorded
from ..torch_private import compiled_by

__all__ = ["backend", "graphs"]

_RECORDED_WITH = ("warmup", "fallback", "verify", "max_recordings")
_REPLACED = 3  # times that a parameter or buffer was replaced, while others stayed, after which it is an ordinary argument
_KNOWN = ("inner", "inner_options", *_RECORDED_WITH)

_numbers = itertools.count()
_graphs: weakref.WeakSet[_Graph] = weakref.WeakSet()


def backend(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """What ``torch.compile(f, backend="phonograph", options={...})`` calls for each graph that it has traced.

    Options:
        inner: what compiles the graph before it is recorded: ``"inductor"`` (the default), ``"aot_eager"``, the name of any
            other backend; ``"eager"``: nothing does.
        inner_options: options for that.
        warmup, fallback, verify, max_recordings: as for `phonograph.record`.

    Inference and training, graph breaks and dynamic shapes are for Dynamo, as with any backend; each graph is recorded with
    its backward, and for each shape. Parameters and buffers are read in place. What Inductor compiles for the CPU calls no
    operators: it is not recorded, and `RunsLive` is warned.

    Returns:
        What Dynamo calls with the inputs of the graph. Results are tensors that keep their values, as with `phonograph.record`.

    Raises:
        TypeError, ValueError: an option is unknown, or out of range; or a mode is given, which is Inductor's.
    """
    chosen = dict(options or {})
    unknown = chosen.keys() - set(_KNOWN)
    if unknown:
        raise ValueError(
            f"unknown option {', '.join(map(repr, sorted(unknown)))}: phonograph's backend knows {', '.join(_KNOWN)}"
        )
    if mode is not None:
        raise ValueError(f"mode={mode!r} is Inductor's: give options={{'inner_options': {{...}}}} instead")
    inner = chosen.pop("inner", "inductor")
    if not isinstance(inner, str):
        raise TypeError(f"inner must be the name of a backend, not {type(inner).__name__}")
    name = f"graph {next(_numbers)}{_begins(gm)}"
    inner_options = chosen.pop("inner_options", None)
    recorded_with = Options(name=name, **chosen)
    compiled = gm if inner == "eager" else compiled_by(inner, gm, example_inputs, inner_options)
    tensors = [x for x in (*example_inputs, *gm.parameters()) if isinstance(x, torch.Tensor)]
    if inner == "inductor" and not any(t.is_cuda for t in tensors):
        remedy = "use options={'inner': 'aot_eager'}"
        warnings.warn(f"{name} runs live: Inductor's code for the CPU calls no operators ({remedy})", RunsLive, stacklevel=2)
        return compiled
    graph = _Graph(compiled, recorded_with)
    _graphs.add(graph)
    return graph


def graphs() -> list[Recorded[Any, Any]]:
    """The recorded functions of all graphs that are there, for `phonograph.stats` and `phonograph.explain`. A graph that was
    called with several sets of parameters has one for each."""
    return [bound.recorded for graph in list(_graphs) for bound in list(graph.bound.values())]


def _reset() -> None:
    """`torch._dynamo.reset()` calls this: the graphs are not called any more."""
    for graph in list(_graphs):
        graph.reset()
    _graphs.clear()


backend.reset = _reset  # type: ignore[attr-defined]


def _begins(gm: torch.fx.GraphModule) -> str:
    """Where the code of a graph begins."""
    traces = [str(node.meta.get("stack_trace") or "") for node in gm.graph.nodes]
    found = next((at for trace in traces if (at := re.findall(r'File "(.+?)", line (\d+), in (\S+)', trace))), None)
    return f" ({found[-1][2]}, {found[-1][0]}:{found[-1][1]})" if found else ""


class _Bound:
    """A graph with one set of parameters and buffers: a function of its other arguments."""

    def __init__(self, graph: _Graph, state: tuple[torch.Tensor, ...]) -> None:
        self.graph = weakref.ref(graph)
        self._inner = graph.inner
        self._order = graph.order
        self.state = state
        self.recorded: Recorded[Any, Any] = Recorded(self, graph.options)

    def reached(self) -> tuple[Any, ...]:
        """What it can reach. It never changes."""
        return *_reached_by(self._inner), *self.state

    def __call__(self, *others: Any) -> Any:
        given = (*self.state, *others)
        return self._inner(*[given[i] for i in self._order])


class _Graph:
    """What Dynamo calls."""

    def __init__(self, inner: Callable[..., Any], options: Options) -> None:
        self.inner = inner
        self.options = options
        self.order: list[int] = []  # for each argument its place among those that are bound, and the others after them
        self.bound: weakref.WeakValueDictionary[tuple[int, ...], _Bound] = weakref.WeakValueDictionary()
        self._state: list[int] | None = None  # which arguments are parameters and buffers
        self._split: tuple[Callable[..., Any], Callable[..., Any]] | None = None  # functions that take these, and the others
        self._replaced: Counter[int] = Counter()  # how often these arguments were others, and the module the same
        self._last: Callable[[], _Bound | None] = _none
        self._kept: list[_Bound] = []  # those without parameters, or whose parameters are no module's

    def __call__(self, *args: Any) -> Any:
        state, others = (take(args) for take in self._split or self._look(args))
        bound = self._last()
        if bound is None or not all(map(is_, state, bound.state)):
            bound = self._bind(state)
            if bound is None:
                return self(*args)
        return bound.recorded(*others)

    def _look(self, args: tuple[Any, ...]) -> tuple[Callable[..., Any], Callable[..., Any]]:
        if self._state is None:
            self._state = [i for i, x in enumerate(args) if isinstance(x, torch.Tensor) and _is_state(x)]
        others = [i for i in range(len(args)) if i not in self._state]
        places = {i: n for n, i in enumerate([*self._state, *others])}
        self.order = [places[i] for i in range(len(args))]
        self._split = _taking(self._state), _taking(others)
        return self._split

    def _bind(self, state: tuple[torch.Tensor, ...]) -> _Bound | None:
        """The graph with these; None if it has turned out that some of them are better not bound."""
        key = tuple(map(id, state))
        bound = self.bound.get(key)
        if bound is None:
            owner = _owner(state[0]) if state else None
            mine = self._kept if owner is None else _kept.setdefault(owner, [])
            if self._unbound(state, [b for b in mine if b.graph() is self]):
                return None
            bound = self.bound[key] = _Bound(self, state)
            mine.append(bound)
            self._prune(mine, owner)
        self._last = weakref.ref(bound)
        return bound

    def _unbound(self, state: tuple[torch.Tensor, ...], before: list[_Bound]) -> bool:
        """Whether some of these are replaced again and again, where the others stay: a buffer that each call makes anew. They
        are arguments like others from now on."""
        assert self._state is not None
        for earlier in before[-1:]:
            changed = [i for i, now, then in zip(self._state, state, earlier.state, strict=True) if now is not then]
            if len(changed) < len(state):
                self._replaced.update(changed)
        often = {i for i, n in self._replaced.items() if n >= _REPLACED}
        if not often:
            return False
        self.reset()
        self._replaced.clear()
        self._state, self._split, self._last = [i for i in self._state if i not in often], None, _none
        return True

    def _prune(self, mine: list[_Bound], owner: torch.nn.Module | None) -> None:
        """Of the sets of one module, drop those that it has no more, and the oldest of too many."""
        ours = [bound for bound in mine if bound.graph() is self]
        gone = [bound for bound in ours[:-1] if owner is not None and _owns(bound.state[0]) is not owner]
        gone += [bound for bound in ours if bound not in gone][: -self.options.max_recordings]
        for bound in gone:
            mine.remove(bound)
            bound.recorded.reset()

    def reset(self) -> None:
        """Drop all recordings."""
        for bound in list(self.bound.values()):
            bound.recorded.reset()
            for kept in (self._kept, *list(_kept.values())):
                if bound in kept:
                    kept.remove(bound)


_kept: weakref.WeakKeyDictionary[torch.nn.Module, list[_Bound]] = weakref.WeakKeyDictionary()
_owners: dict[int, weakref.ref[torch.nn.Module]] = {}  # by the ids of parameters and buffers; some may be gone


def _owner(t: torch.Tensor) -> torch.nn.Module | None:
    """The module that a parameter or buffer belongs to."""
    if not _owns(t):
        _owners.clear()
        for x in gc.get_objects():
            if issubclass(type(x), torch.nn.Module):
                _owners.update({id(own): weakref.ref(x) for own in (*x._parameters.values(), *x._buffers.values())})
    return _owns(t)


def _owns(t: torch.Tensor) -> torch.nn.Module | None:
    known = _owners.get(id(t))
    module = known() if known is not None else None
    found = module is not None and any(t is own for own in (*module._parameters.values(), *module._buffers.values()))
    return module if found else None


def _reached_by(inner: Callable[..., Any]) -> Iterator[Any]:
    """What a graph can reach of the world: not the settings of the module that it is, of which its code asks for nothing."""
    if not isinstance(inner, torch.fx.GraphModule):
        yield inner
        return
    yield type(inner).forward
    for node in inner.graph.nodes:
        if node.op in ("get_attr", "call_module"):
            yield attrgetter(node.target)(inner)
        elif isinstance(node.target, FunctionType):
            yield node.target


def _none() -> None:
    return None


def _is_state(t: torch.Tensor) -> bool:
    return isinstance(t, torch.nn.Parameter) or "_dynamo_static_input_type" in vars(t)


def _taking(places: list[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    if len(places) > 1:
        return itemgetter(*places)
    return lambda args: tuple(args[i] for i in places)
