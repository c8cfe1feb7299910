"""The backend: what Dynamo has traced is compiled by another backend, and what that returns is recorded.

What stands in the place of a graph, and finds its parameters among its arguments, is a `Graph` (see bound.py).
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch

from ..errors import RunsLive
from ..options import Options
from ..recorded import Recorded
from ..torch_private import compiled_by
from .bound import Graph, named

__all__ = ["backend", "graphs"]

_RECORDED_WITH = ("warmup", "fallback", "split_at", "verify", "max_recordings", "max_bytes")
_KNOWN = ("inner", "inner_options", *_RECORDED_WITH)

_graphs: weakref.WeakSet[Graph] = weakref.WeakSet()


def backend(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """What ``torch.compile(f, backend="phonograph", options={...})`` calls for each graph that it has traced.

    Options:
        inner: what compiles the graph before it is recorded: ``"inductor"`` (the default), ``"aot_eager"``, the name of any
            other backend; ``"eager"``: nothing does.
        inner_options: options for that.
        warmup, fallback, split_at, verify, max_recordings, max_bytes: as for `phonograph.record`.

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
    name = named(gm)
    inner_options = chosen.pop("inner_options", None)
    recorded_with = Options(name=name, **chosen)
    compiled = gm if inner == "eager" else compiled_by(inner, gm, example_inputs, inner_options)
    tensors = [x for x in (*example_inputs, *gm.parameters()) if isinstance(x, torch.Tensor)]
    if inner == "inductor" and not any(t.is_cuda for t in tensors):
        remedy = "use options={'inner': 'aot_eager'}"
        warnings.warn(f"{name} runs live: Inductor's code for the CPU calls no operators ({remedy})", RunsLive, stacklevel=2)
        return compiled
    graph = Graph(compiled, recorded_with, tuple(_reached_by(compiled)))
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
