"""Traces of lightning-thunder: ``thunder.jit(model, transforms=[PhonographTransform()])``.

Thunder makes a trace of a program, a second one of its backward, and has executors fuse and claim what is in them. After that,
the transform takes what is consecutive and can be recorded as one region, and puts a recorded function in its place. A trace
is mostly one region: only what takes its arguments apart, returns, or asks for a tensor's value stays outside.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

import torch

from ._torch.dynamic import Foreign
from .compile.bound import Graph
from .fx import record_graph
from .options import Options

try:
    import thunder  # noqa: F401
    from thunder.core import prims
    from thunder.core.codeutils import SigInfo
    from thunder.core.proxies import CollectionProxy, ProxyTag
    from thunder.core.symbol import BoundSymbol, Symbol, has_tags
    from thunder.core.trace import TraceCtx, TraceProvenance, TraceTag, from_trace
    from thunder.core.transform_common import Transform
    from thunder.executors.passes import del_last_used
except ModuleNotFoundError as e:
    raise ImportError(f'phonograph.thunder needs lightning-thunder: pip install "lightning-thunder==0.2.6" ({e})') from e
except Exception as e:  # it imports much of torch by its name, some of which later releases do not have
    raise ImportError(
        f"lightning-thunder, which phonograph.thunder needs, does not work with torch {torch.__version__} ({e})"
    ) from e

__all__ = ["PhonographTransform"]

_OUTSIDE = {prims.PrimIDs.RETURN, prims.PrimIDs.ITEM, prims.PrimIDs.PRINT, prims.PrimIDs.COMMENT}


class PhonographTransform(Transform):  # type: ignore[misc]
    """Record the regions of thunder's traces, forward and backward, and play them back.

    Results and gradients are those of ``thunder.jit(model)`` without it. Parameters and buffers are read in place; what a
    forward saves for its backward is read where it lies; another shape is another trace of thunder's, with regions of its
    own. Works with tensors on CUDA and on the CPU, and needs lightning-thunder 0.2.6.

    Args:
        **options: `warmup`, `fallback`, `verify`, `max_recordings`, `keep` of `phonograph.record`.

    Raises:
        TypeError, ValueError: an option has the wrong type, or is out of range.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        Options.given("PhonographTransform", options)
        self._options = options
        self._regions: weakref.WeakValueDictionary[int, Graph] = weakref.WeakValueDictionary()
        self._made = 0

    def regions(self) -> list[Graph]:
        """The recorded regions of all traces that are there, for `phonograph.stats` and `phonograph.explain`."""
        return list(self._regions.values())

    def can_record(self, symbol: Foreign) -> bool:
        """Whether a bound symbol of a trace may be in a region. Override it to leave more outside: a region with an operator
        that cannot be recorded runs live as a whole."""
        if symbol.sym.id in _OUTSIDE or has_tags(symbol, {prims.OpTags.DEVICE_SYNC_OP}):
            return False
        return not any(isinstance(p, CollectionProxy) for p in (*symbol.flat_proxy_args, *symbol.flat_proxy_outs))

    def transform_trace_post_optimization(self, computation_trace: Foreign, **_: object) -> object:
        """A trace of which regions are replaced by recorded functions."""
        trace = from_trace(computation_trace)
        symbols = [s for s in computation_trace.bound_symbols if s.sym.id is not prims.PrimIDs.DEL]
        is_forward = TraceTag.BACKWARD not in computation_trace.tags
        at, changed = 0, list[object]()
        for recorded, part in groupby(symbols, self._belongs):
            inside = list(part)
            at += len(inside)
            worth_it = recorded and len(inside) > 1
            changed += [self._region(inside, symbols[at:], is_forward)] if worth_it else inside
        trace.bound_symbols = changed
        trace = del_last_used(trace)
        trace.set_provenance(TraceProvenance("Recorded by phonograph"))
        return trace

    def _belongs(self, symbol: Foreign) -> bool:
        unpacks = symbol.sym.name.startswith("unpack_") or symbol.sym.id == "clear_mutable_collection"
        return not unpacks and self.can_record(symbol)

    def _region(self, inside: list[Foreign], after: Iterable[Foreign], is_forward: bool) -> object:
        """One symbol in the place of several."""
        inputs, outputs = _boundary(inside, after)
        name = f"phonograph{self._made}"
        static = [i for i, p in enumerate(inputs) if ProxyTag.STATIC_MEMORY_LOCATION in p.tags]
        kind = "forward" if is_forward else "backward"
        graph = record_graph(_function(name, inside, inputs, outputs), inputs, static_input_indices=static or None,
                             is_forward=is_forward, **{"name": f"{name} ({kind})", **self._options})  # fmt: skip
        self._regions[self._made] = graph
        self._made += 1
        symbol = Symbol(name, meta=None, is_fusion=True, executor=self)
        return BoundSymbol(symbol, tuple(inputs), {}, tuple(outputs), inside, _call_ctx={name: graph})


def _boundary(inside: Iterable[Foreign], after: Iterable[Foreign]) -> tuple[list[Foreign], list[Foreign]]:
    """What a region takes from outside, and what is needed of it later."""
    taken: dict[str, object] = {}
    made: dict[str, object] = {}
    for symbol in inside:
        taken.update({p.name: p for p in symbol.flat_proxy_args if p.name not in made})
        made.update({p.name: p for p in symbol.flat_proxy_outs if p.name not in taken})
    needed = {p.name for symbol in after for p in symbol.flat_proxy_args}
    return list(taken.values()), [p for name, p in made.items() if name in needed]


def _function(name: str, inside: Sequence[Foreign], inputs: list[Foreign], outputs: list[Foreign]) -> Callable[..., object]:
    """The region as a function, which lets go of what it does not need any more."""
    trace = TraceCtx(None)
    trace.args, trace.kwargs = inputs, {}
    trace.bound_symbols = [*inside, prims.python_return.bind(tuple(outputs), output=None)]
    trace._siginfo = SigInfo(name)
    trace._siginfo.args = [(p.name, None) for p in inputs]
    function: Callable[..., object] = del_last_used(trace).python_callable(include_decorators=False)
    return function
