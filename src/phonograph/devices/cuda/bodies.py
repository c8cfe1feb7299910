"""Branches and loops in the graph of a call: bodies of conditional nodes (`conditional.py`).

A body is captured on the stream of the call, and has its memory from the pool. The allocator knows a capture's allocations by
the capture, and a body has one of its own: from the first body on, it knows them by the stream. So nothing may be captured on
other streams from there on, until the next graph begins.

Random numbers are counted at capture: the kernels of a graph have their places in the count as constants, and read from memory
where the generator stood before the launch. The bodies of a branch begin at the same place. Where they end at different ones,
and after each turn of a loop, a kernel adds the difference to that memory, and what follows goes on from there. How much was
added in all, each launch reads afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ..._torch.cuda import OnStream, counts_by_capture, raw_stream, route_by_stream
from ..._torch.tensors import storage_at
from ...errors import Refusal
from ...state.rng import CudaState
from . import conditional, driver
from .conditional import IF, SWITCH, WHILE

__all__ = ["Bodies", "Place"]

_STEP = 4  # a generator's place in the count is a multiple of it
_WORD = (1 << 64) - 1
_ALIGNED = 512  # as is the address of what the allocator gives


class Place:
    """Where a generator stands in the count of a capture."""

    def __init__(self, generator: torch.Generator) -> None:
        """To be made before the capture."""
        self._own = generator.graphsafe_get_state()
        self.seed = generator.initial_seed()

    def get(self) -> int:
        """Always 0 where torch counts for each body by itself: there, none may draw."""
        return 0 if counts_by_capture() else CudaState.of(self._own.get_state()).offset

    def put(self, number: int) -> None:
        if not counts_by_capture():
            state = self._own.get_state()
            CudaState.of(state).offset = number
            self._own.set_state(state)


def number_at(address: int, device: int) -> torch.Tensor:
    """The int64 there."""
    with torch.inference_mode(False):
        found = torch.empty(0, dtype=torch.int64, device=f"cuda:{device}")
        return found.set_(storage_at(address, found.itemsize, found.device))


def _nothing() -> None:
    """There is nothing to wait for."""


class Bodies:
    """Those of one graph, while it is captured."""

    def __init__(
        self, stream: torch.cuda.Stream, pool: tuple[int, int], place: Place, join: Callable[[], None], fork: Callable[[], None]
    ) -> None:  # fmt: skip
        """`join` lets the stream wait for all others on which something was captured, `fork` these for the stream."""
        self._on, self._device, self._stream, self._pool = stream, stream.device_index, stream.cuda_stream, pool
        self._place, self._join, self._fork = place, join, fork
        self._thread = threading.get_ident()
        self.graphs: list[int] = []
        """All bodies so far."""
        self.outer = 0
        """The graph of the call, as long as a body of it is captured; otherwise 0."""
        self.failed: Exception | None = None
        """What has ended the capture of a body: then the capture is one of something else."""
        self.seed = self.offset = 0
        """Addresses of the generator's seed and of where it stands, if kernels add to that; otherwise 0."""

    def over(self) -> None:
        """The graph is captured: let go of who captures it, who has this."""
        self._join = self._fork = _nothing

    def choose(self, index: torch.Tensor, bodies: Sequence[Callable[[], None]]) -> None:
        """Capture a branch: a launch runs the body whose number is in `index`, a bool or an int32."""
        self._check(IF, "branches")
        kind, groups = SWITCH, [bodies]
        if SWITCH not in conditional.kinds(self._device):
            kind, groups = IF, [[body] for body in bodies]
        handles = [conditional.new_handle(self._stream) for _ in groups]
        for i, handle in enumerate(handles):
            conditional.set_handle(self._stream, handle, index, *[i] * (kind == IF))
        begins, drawn = self._place.get(), list[int]()
        for handle, group in zip(handles, groups, strict=True):
            with self._node(handle, kind, len(group)) as graphs:
                for graph, body in zip(graphs, group, strict=True):
                    with conditional.capture_into(self._stream, graph):
                        self._place.put(begins)
                        body()
                        drawn.append(self._place.get() - begins)
                        self._move(drawn[-1] - drawn[0], begins, max(drawn))
        self._place.put(begins + drawn[0])
        self._begun(begins, max(drawn))

    def repeat(self, condition: Callable[[], torch.Tensor], body: Callable[[], None]) -> None:
        """Capture a loop: a launch runs the body for as long as the condition gives true."""
        self._check(WHILE, "loops")
        handle = conditional.new_handle(self._stream)
        conditional.set_handle(self._stream, handle, condition())
        begins = self._place.get()
        with self._node(handle, WHILE, 1) as (graph,), conditional.capture_into(self._stream, graph):
            body()
            again = condition()
            drawn = self._place.get() - begins
            self._move(drawn, begins, drawn)
            conditional.set_handle(self._stream, handle, again)
        self._place.put(begins)
        self._begun(begins, drawn)

    def _check(self, kind: int, does: str) -> None:
        if kind not in conditional.kinds(self._device):
            raise Refusal(f"{does} by what a tensor holds, for which this driver has no conditional nodes",
                          "install a driver of CUDA 12.4 or newer")  # fmt: skip
        if threading.get_ident() != self._thread:
            raise Refusal(f"{does} by what a tensor holds in a backward, which autograd runs on a thread of its own",
                          "do it in the forward")  # fmt: skip
        if raw_stream(self._device) != self._stream:
            raise Refusal(f"{does} by what a tensor holds on another stream than that of the call",
                          "do it outside of `with torch.cuda.stream(...)`")  # fmt: skip

    @contextmanager
    def _node(self, handle: int, kind: int, count: int) -> Iterator[list[int]]:
        """A conditional node. The stream captures its bodies inside the block, and goes on behind it. (After an exception it
        goes on capturing, or what comes next would run.)"""
        outer = self.outer
        if not outer:
            self._join()
        if not self.graphs:
            route_by_stream(self._device, self._pool)
        try:
            node = conditional.Node(self._stream, handle, kind, count)
            self.outer = outer or node.graph
            self.graphs += node.bodies
            yield node.bodies
            if not node.resume() and counts_by_capture():
                raise Refusal("branches or loops by what a tensor holds, after which this driver begins another capture",
                              "install a newer driver")  # fmt: skip
            self.outer = outer
            if not outer:
                self._fork()
        except driver.DriverError as e:
            self.failed, self.outer = e, 0
            raise
        except Exception as e:
            self.failed = e
            raise

    # -- random numbers

    def confirm(self) -> None:
        """After the capture: refuse it if what was taken for the address of the seed is not."""
        if self.seed:
            with OnStream(self._on):
                found = int(number_at(self.seed, self._device).item())
            if (found ^ self._place.seed) & _WORD:
                raise _unsaid()

    def _begun(self, begins: int, drawn: int) -> None:
        """Let a graph be one that draws, if only its bodies do: torch tells no other where the generator stands."""
        if drawn and not self._place.get():
            self._place.put(_STEP)
            self._move(-_STEP, begins, drawn)

    def _move(self, by: int, begins: int, drawn: int) -> None:
        """Capture that the generator moves on. Bodies have drawn so much from where it stood."""
        if by:
            if not self.offset:
                self.seed, self.offset = self._found({*range(begins, begins + drawn, _STEP)})
            conditional.add(self._stream, self.offset, by)

    def _found(self, places: set[int]) -> tuple[int, int]:
        """The addresses of the generator's seed and of where it stands. Kernels are given both that draw at these places in the
        count, then the place, and whether it is one in a capture (PhiloxCudaState)."""
        found = set[tuple[int, int]]()
        for words in driver.parameters(self.graphs):
            for seed, offset, place, captured in zip(words, words[1:], words[2:], words[3:], strict=False):
                if place in places and captured & 0xFF == 1 and seed and offset and not (seed | offset) % _ALIGNED:
                    found.add((seed, offset))
        if len(found) != 1:
            raise _unsaid()
        return found.pop()


def _unsaid() -> Refusal:
    return Refusal("draws random numbers in a branch or loop by a kernel that does not say how", "draw them outside of that")
