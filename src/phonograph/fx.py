"""Graphs in a compiler pipeline of your own: FX graphs as AOT autograd, `torch.export` or `make_fx` make them.

    from torch._dynamo.backends.common import aot_autograd

    def forward(gm, example_inputs):
        return record_graph(gm, example_inputs, is_forward=True)

    def backward(gm, example_inputs):
        return record_graph(gm, example_inputs, is_forward=False)

    torch.compile(model, backend=aot_autograd(fw_compiler=forward, bw_compiler=backward))

Each graph is recorded for itself; what runs between them (autograd, hooks, the graph's other users) is as it was. What a
recorded forward hands to a recorded backward is read where it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch.fx import GraphModule

from .compile.bound import BoxedGraph, Graph, named
from .options import Options

__all__ = ["record_graph"]

_KINDS = {None: "", True: "forward", False: "backward"}


def record_graph(
    gm: Callable[..., object], example_inputs: Sequence[object], *, static_input_indices: Sequence[int] | None = None,
    is_forward: bool | None = None, **options: Any,
) -> Graph:  # fmt: skip
    """Record a graph and play it back: as a CUDA graph for CUDA tensors, as a tape for CPU tensors.

    The first call of each signature runs live, the second is captured and played, later ones are played. (The very first one
    inside of AOT autograd's runtime runs live as well: it looks at the operators.) Another shape, dtype, stride or number is
    another signature. Results are tensors that keep their values.

    Args:
        gm: a `torch.fx.GraphModule`, or any function of positional arguments: tensors, numbers, what graphs take. One with the
            attribute ``_boxed_call`` takes a list, and empties it; what is returned does so, too.
        example_inputs: the inputs that the compiler has for the graph, which may be fake; only their number matters here.
        static_input_indices: inputs that are the same tensors in each call, and are read in place. By default those that are
            parameters, or that Dynamo calls static (buffers). It is no promise: another tensor in such a place, or the
            same one with other memory, is noticed; one that is another in each call is copied like any argument.
        is_forward: False: the backward of a recorded forward, whose static inputs other than parameters are what that forward
            has saved. They are in different memory in different calls, and read in place anyway; a backward has one live
            call more, so that they are there when it is recorded. None and True mean the same, but for the name.
        **options: `warmup`, `fallback`, `outputs`, `verify`, `max_recordings`, `name`, `keep` of `phonograph.record`.

    Returns:
        What to call in place of `gm`; it may be made ``gm.forward``. `phonograph.stats`, `explain` and `reset` know it; when it
        is dropped, so are its recordings.

    Raises:
        TypeError: `gm` is not callable, an index is no int, or an option has the wrong type.
        ValueError: there is no input of that index, or an option is out of range.

    Examples:
        >>> import torch, phonograph as pg
        >>> from phonograph.fx import record_graph
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> w, x = torch.ones(3), torch.ones(3)
        >>> gm = make_fx(lambda w, x: (w * x).sum())(w, x)
        >>> f = record_graph(gm, (w, x), static_input_indices=[0])
        >>> [f(w, x * n).item() for n in range(3)]
        [0.0, 3.0, 6.0]
        >>> pg.stats(f).replayed
        2
    """
    if not callable(gm):
        raise TypeError(f"record_graph takes a graph or a function, not {type(gm).__name__}")
    if is_forward not in _KINDS:
        raise TypeError(f"is_forward must be True, False or None, not {is_forward!r}")
    chosen = Options.given("record_graph", options)
    if chosen.name is None:
        chosen = replace(chosen, name=named(gm, _KINDS[is_forward]))
    if is_forward is False and chosen.warmup:
        # A forward has one live call more, in which AOT looks on: what its recordings save is read where it lies only if they
        # are there when the backward is recorded.
        chosen = replace(chosen, warmup=chosen.warmup + 1)
    static = _static(static_input_indices, len(example_inputs), is_forward)
    kind = BoxedGraph if getattr(gm, "_boxed_call", False) else Graph
    return kind(_Module(gm) if isinstance(gm, GraphModule) else gm, chosen, (gm,), static)


class _Module:
    """Calls a graph module, whose `forward` may be what stands in its place."""

    def __init__(self, gm: GraphModule) -> None:
        self._gm = gm

    def __call__(self, *args: object) -> object:
        gm = self._gm
        return type(gm).forward(gm, *args) if isinstance(vars(gm).get("forward"), Graph) else gm(*args)


def _static(indices: Sequence[int] | None, count: int, is_forward: bool | None) -> list[int] | None:
    """Which inputs stay the same tensors; None: those that look so."""
    for i in indices or ():
        if isinstance(i, bool) or not isinstance(i, int):
            raise TypeError(f"static_input_indices must be ints, not {type(i).__name__}")
        if not 0 <= i < count:
            raise ValueError(f"static_input_indices has {i}, but there are {count} inputs")
    return None if indices is None or is_forward is False else sorted(set(indices))
