"""Branches and loops in the graph of a call: bodies of conditional nodes (`conditional.py`).

A body is captured on the stream of the call, and has its memory from the pool. The allocator knows a capture's allocations by
the capture, and a body has one of its own: from the first body on, it knows them by the stream. So nothing may be captured on
other streams from there on, until the next graph begins.

Random numbers are counted at capture: the kernels of a graph have their places in the count as constants, and read from memory
where the generator stood before the launch. The bodies of a branch begin at the same place. Where they end at different ones,
and after each turn of a loop, a kernel adds the difference to that memory: what follows goes on from there. How much was added
in all, each launch has to read afterwards.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ..._torch.cuda import route_by_stream
from ...capture.python_events import pause_profiling
from ...errors import Refusal
from ...state.rng import CudaState
from . import conditional, driver
from .conditional import IF, SWITCH, WHILE

__all__ = ["Bodies", "Place"]

_STEP = 4  # what a generator's place in the count is a multiple of


class Place:
    """Where a generator stands in the count of a capture."""

    def __init__(self, generator: torch.Generator) -> None:
        """To be made before the capture."""
        self._own = generator.graphsafe_get_state()

    def get(self) -> int:
        with _unheard():
            return CudaState.of(self._own.get_state()).offset

    def put(self, number: int) -> None:
        with _unheard():
            state = self._own.get_state()
            CudaState.of(state).offset = number
            self._own.set_state(state)


@contextmanager
def _unheard() -> Iterator[None]:
    listening = pause_profiling()
    try:
        yield
    finally:
        if listening is not None:
            sys.setprofile(listening)


class Bodies:
    """Those of one graph, while it is captured."""

    def __init__(self, stream: torch.cuda.Stream, pool: tuple[int, int], place: Place, join: Callable[[], None]) -> None:
        """`join` lets the stream wait for all others on which something was captured."""
        self._on, self._stream, self._pool = stream, stream.cuda_stream, pool
        self._place, self._join = place, join
        self._thread = threading.get_ident()
        self.graphs: list[int] = []
        """All bodies so far."""
        self.outer = 0
        """The graph of the call, while a body of it is captured; otherwise 0."""
        self.moves = 0
        """Address of where the generator stands, if kernels add to that; otherwise 0."""

    def choose(self, index: torch.Tensor, bodies: Sequence[Callable[[], None]]) -> None:
        """Capture a branch: a launch runs the body whose number is in `index`."""
        known = self._known(IF)
        groups = [bodies] if SWITCH in known else [[body] for body in bodies]
        handles = [conditional.new_handle(self._stream) for _ in groups]
        for i, handle in enumerate(handles):
            conditional.set_handle(self._stream, handle, index, *([i] if len(groups) > 1 else []))
        begins, drawn = self._place.get(), list[int]()
        for handle, group in zip(handles, groups, strict=True):
            with self._node(handle, SWITCH if SWITCH in known else IF, len(group)) as graphs:
                for graph, body in zip(graphs, group, strict=True):
                    with conditional.capture_into(self._stream, graph):
                        self._place.put(begins)
                        body()
                        drawn.append(self._place.get() - begins)
                        self._move(drawn[-1] - drawn[0], begins, drawn[-1])
        self._place.put(begins + drawn[0])

    def repeat(self, condition: Callable[[], torch.Tensor], body: Callable[[], None]) -> None:
        """Capture a loop: a launch runs the body for as long as the condition gives true."""
        self._known(WHILE)
        handle = conditional.new_handle(self._stream)
        conditional.set_handle(self._stream, handle, condition())
        begins = self._place.get()
        with self._node(handle, WHILE, 1) as (graph,), conditional.capture_into(self._stream, graph):
            body()
            again = condition()
            drawn = self._place.get() - begins
            self._move(drawn, begins, drawn)
            conditional.set_handle(self._stream, handle, again)
        self._move(-drawn, begins, drawn)
