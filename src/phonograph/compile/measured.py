"""Whether a part of a graph is worth a recording: measured, on its first calls.

A launch of a CUDA graph, with all that is looked at before, takes the CPU as long as a handful of kernels. So a part of few
operators may be faster unrecorded. How many that are depends on the machine and on the operators, so both ways are tried.
(`phonograph.engine.profitability` says how calls are timed. A graph has many parts, so that one which runs live is called
past all of that.)
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .._torch.tensors import makes_fakes
from ..engine.profitability import Samples, Took
from ..state.reentrancy import inside
from .bound import Graph

__all__ = ["Measured"]

SAMPLES = 5  # calls of each kind


class Measured:
    """Plays a part, or calls its code, whichever keeps the program for a shorter time.

    Without gradients only: parts that have a backward are measured with it, as all functions are.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._call: Callable[..., object] | None = None
        self._samples = Samples()

    def reached(self) -> tuple[object, ...]:
        """What it can reach, for a recorded function that calls it."""
        return self._graph.reached()

    def __call__(self, *args: object) -> object:
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or inside() or makes_fakes():
            return self._graph(*args)
        return self._call(*args) if self._call is not None else self._measure(args)

    def _measure(self, args: tuple[object, ...]) -> object:
        graph, samples = self._graph, self._samples
        samples.collect()
        if samples.count(False) >= SAMPLES and samples.count(True) >= SAMPLES:  # more, where several threads call
            self._decide(samples)
            return self(*args)
        live = samples.count(False) > samples.count(True)
        before = graph.stats().replayed
        took = Took.here(next((x.device for x in args if isinstance(x, torch.Tensor)), torch.device("cpu")))
        result = graph.inner(*args) if live else graph(*args)
        if took is not None and (live or graph.stats().replayed > before):  # the first calls run live, or record
            took.end()
            took.live = live
            samples.add(took)
        return result

    def _decide(self, samples: Samples) -> None:
        graph = self._graph
        if not samples.slower(live=False):
            self._call = graph
            return
        self._call = graph.inner
        for bound in list(graph.bound.values()):
            bound.recorded.remarks += (f"runs live without gradients: a replay takes {samples}",)
