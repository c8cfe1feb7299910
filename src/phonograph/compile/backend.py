"""Backend for `torch.compile`: another backend compiles each traced graph, and the compiled graph is recorded.

A `Graph` (`bound.py`) takes the place of the traced graph, and knows which of its arguments are parameters.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch

from .._torch.dynamo import compiled_by, compiling_apart, depends_on_data, wants_graphs
from ..engine.recorded import Recorded
from ..errors import Refusal, RunsLive
from ..options import Options, did_you_mean
from ..statistics import logger
from .bound import Closed, Graph, named
from .measured import Measured
from .partition import Part, checked, parts

__all__ = ["backend", "graphs"]

_RECORDED_WITH = ("warmup", "fallback", "split_at", "verify", "max_recordings", "max_bytes", "keep")
_KNOWN = ("inner", "inner_options", "live", "record", *_RECORDED_WITH)
_AOT = ("inductor", "aot_eager")  # what they return changes by nobody's hand but its own

_graphs: weakref.WeakSet[Graph] = weakref.WeakSet()


def backend(
    gm: torch.fx.GraphModule, example_inputs: Sequence[object], *, mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., object]:  # fmt: skip
    """Compile and record one traced graph; called by ``torch.compile(f, backend="phonograph", options={...})``.

    Options:
        inner: what compiles the graph before it is recorded: ``"inductor"`` (the default), ``"aot_eager"``, the name of any
            other backend; ``"eager"``: nothing does.
        inner_options: options for that.
        live: what runs live, between recorded parts of the graph: operators (``"mylib::route"``, ``torch.ops.aten.sort``),
            names of modules with all that is in them (``"layers.*.router"``), functions of a `torch.fx.Node` that return bool.
        record: what is recorded, in the same words, whatever `live` says and phonograph knows.
        warmup, fallback, split_at, verify, max_recordings, max_bytes, keep: as for `phonograph.record`.

    Where results have shapes that depend on data, or an operator is tagged cudagraph_unsafe, and Dynamo has not ended the graph
    there, it is split as well. Each recorded part is a graph by itself; `phonograph.explain` says what is live beside it. Parts
    that are called without gradients are recorded only if that is faster than their code unrecorded, which is measured.

    Inference and training, graph breaks and dynamic shapes are for Dynamo, as with any backend; each graph is recorded with
    its backward, and for each shape. Parameters and buffers are read in place. What Inductor compiles for the CPU calls no
    operators: it is not recorded, and `RunsLive` is warned.

    Returns:
        What Dynamo calls with the inputs of the graph. Results are tensors that keep their values, as with `phonograph.record`.

    Raises:
        TypeError, ValueError: an option is unknown, or out of range; or a mode is given, which is Inductor's.
    """
    chosen, inner = _given(mode, options)
    name = named(gm)
    inner_options = chosen.pop("inner_options", None)
    live, record = (checked(option, chosen.pop(option, ())) for option in ("live", "record"))
    forward, backward = wants_graphs(gm)
    recorded_with = Options(name=name, live_backward=not backward, **chosen)

    def compiled_inside(graph: torch.fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        return graph if inner == "eager" else compiled_by(inner, graph, inputs, inner_options)

    tensors = [x for x in (*example_inputs, *gm.parameters()) if isinstance(x, torch.Tensor)]
    if inner == "inductor" and not any(t.is_cuda for t in tensors):
        remedy = "use options={'inner': 'aot_eager'}"
        warnings.warn(f"{name} runs live: Inductor's code for the CPU calls no operators ({remedy})", RunsLive, stacklevel=2)
        return compiled_inside(gm, example_inputs)
    if not forward:
        logger.info("%s is not recorded: torch._dynamo.override_cudagraphs(fwd=False)", name)
        return compiled_inside(gm, example_inputs)
    try:
        split = parts(gm, live, record)
    except Refusal as refusal:
        warnings.warn(f"{name} runs live: {refusal}", RunsLive, stacklevel=2)
        return compiled_inside(gm, example_inputs)

    recorded = partial(_recorded, inner)
    if split is None:
        return recorded(compiled_inside(gm, example_inputs), recorded_with)
    return _in_parts(*split, compiled_inside, recorded, recorded_with)


def _given(mode: str | None, options: Mapping[str, Any] | None) -> tuple[dict[str, Any], str]:
    """The options that were given, and what compiles the graph before it is recorded."""
    chosen = dict(options or {})
    unknown = sorted(chosen.keys() - set(_KNOWN))
    if unknown:
        said = f"unknown option {', '.join(map(repr, unknown))}: phonograph's backend knows {', '.join(_KNOWN)}"
        raise ValueError(said + did_you_mean(str(unknown[0]), _KNOWN))
    if mode is not None:
        raise ValueError(f"mode={mode!r} is Inductor's: give options={{'inner_options': {{...}}}} instead")
    inner = chosen.pop("inner", "inductor")
    if not isinstance(inner, str):
        raise TypeError(f"inner must be the name of a backend, not {type(inner).__name__}")
    return chosen, inner


def _recorded(inner: str, compiled: Callable[..., object], options: Options, remarks: Sequence[str] = ()) -> Graph:
    reached = (Closed(compiled),) if inner in _AOT else tuple(_reached_by(compiled))
    graph = Graph(compiled, options, reached, remarks=remarks)
    _graphs.add(graph)
    return graph


def _in_parts(
    whole: torch.fx.GraphModule, found: Mapping[str, Part],
    compiled: Callable[[torch.fx.GraphModule, Sequence[object]], Callable[..., object]], recorded: Callable[..., Graph],
    options: Options,
) -> Callable[..., object]:  # fmt: skip
    """A graph whose parts have been told apart, with each of them compiled, and recorded or not."""
    reasons = [f"beside it runs live: {reason}" for part in found.values() for reason in part.reasons]
    for number, (name, part) in enumerate(found.items()):
        if part.live and any(map(depends_on_data, part.inputs)):
            function: Callable[..., object] = part.graph
        else:
            with compiling_apart(part.inputs):
                function = compiled(part.graph, part.inputs)
        if not part.live:
            graph = recorded(function, replace(options, name=f"{options.name}, part {number}", is_part=True), reasons)
            function = Measured(graph) if options.keep == "pays" else graph
        whole.delete_submodule(name)
        setattr(whole, name, part.called(function))
    return whole


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


def _reached_by(inner: Callable[..., object]) -> Iterator[object]:
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
