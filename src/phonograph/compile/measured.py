"""Whether a part of a graph is worth a recording: measured, on its first calls.

A launch of a CUDA graph, with all that is looked at before, takes the CPU as long as a handful of kernels. So a part of few
operators may be faster unrecorded. How many that are depends on the machine and on the operators, so both ways are tried.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from ..within import inside
from .bound import Graph

__all__ = ["Measured"]

SAMPLES = 5  # calls of each kind


class Measured:
    """Plays a part, or calls its code, whichever keeps the CPU for a shorter time.

    Without gradients only: what a backward costs is not seen in the forward, and parts that have one are always recorded.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._call: Any = None
        self._took: dict[bool, list[float]] = {True: [], False: []}  # seconds: played, live

    def reached(self) -> tuple[Any, ...]:
        """What it can reach, for a recorded function that calls it."""
        return self._graph.reached()

    def __call__(self, *args: Any) -> Any:
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or inside():
            return self._graph(*args)
        return self._call(*args) if self._call is not None else self._measure(args)

    def _measure(self, args: tuple[Any, ...]) -> Any:
        graph, took = self._graph, self._took
        played = len(took[True]) <= len(took[False])
        before = graph.stats().replayed
        begin = time.perf_counter()
        result = graph(*args) if played else graph.inner(*args)
        passed = time.perf_counter() - begin
        if not played or graph.stats().replayed > before:  # the first calls of a signature are live, or record
            took[played].append(passed)
        if len(took[False]) >= SAMPLES and self._call is None:  # more of them, where several threads call
            self._decide(min(took[True]), min(took[False]))
        return result

    def _decide(self, played: float, live: float) -> None:
        graph = self._graph
        self._call = graph if played <= live else graph.inner
        if live < played:
            said = f"runs live without gradients: {live * 1e6:.0f} us a call, and {played * 1e6:.0f} us when it is played"
            for bound in list(graph.bound.values()):
                bound.recorded.remarks += (said,)
