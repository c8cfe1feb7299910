"""How CUDA graphs are played.

A graph is *instantiated* when it has been captured: from there on a launch of the whole costs the CPU about as much as one
kernel, and which nodes there are is settled. Their parameters are not. `GraphProgram` sets two kinds of them anew before a
launch: the addresses of the copies at the graph's ends (`edges.py`), and numbers in the kernels of optimizers' steps, such as
the learning rate. The driver wants to be told the node of the graph as it was captured; so that one is kept as well.

A launch can go to the driver directly. But where a graph draws random numbers, its kernels read from memory where the generator
stands, and only torch can write that: so such a launch goes through torch.

A replay goes to the caller's stream alone, also where several streams were captured. But code outside may count on the order of
what it has given to one of the others: so a launch waits for them, and they for the launch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from functools import partial
from typing import Any

import torch

from ..._torch.cuda import current_device, raw_stream
from ..._torch.tensors import address, copy_all, maker
from ...capture.recording import Tensors, Work
from ...distributed.watchdog import Watched, launches, unwatch, watch
from ...memory.pool import Fill
from ...memory.spans import Spans
from ...python.putting_back import put_back
from ...state.rng import Known, Lent, Rewind, put, put_offset, reset
from ..segments import TakenBack
from . import driver
from .bodies import number_at
from .dispatch import CudaWatch
from .graph_work import work_of
from .graphs import Graph, Segment

__all__ = ["CheckedProgram", "CommunicatingProgram", "GraphProgram", "has_context"]

_thread = threading.local()


def has_context() -> bool:
    """Whether this thread has used CUDA."""
    return hasattr(_thread, "has_context")


class GraphProgram:
    """An instantiated CUDA graph."""

    def __init__(self, segment: Segment, footprint: Spans, watch: CudaWatch, keep: object, device: int, rewind: Rewind | None,
                 surplus: int, others: Collection[torch.cuda.Stream]) -> None:  # fmt: skip
        graph, edges = segment.graph, segment.edges
        self._others = tuple((other, torch.cuda.Event()) for other in others)
        self._launched = torch.cuda.Event()
        self.footprint = footprint
        self.operators = watch.operators
        self.edges = ""
        self.ran = self.shows = 0
        self.owned = Spans()
        self._graph: Graph | None = graph
        self._keep = keep
        self._device = device
        graph.instantiate()
        self._stream = -1
        self._launch: Callable[[], int] = int  # on that stream
        self._given: Mapping[float, float] = {}  # the numbers that it has now
        self._states = Known(segment.drawn, segment.lent)
        self._dropout = watch.dropout
        self.amiss = self._look if self._states.may_mix or self._dropout is not None else None
        self._numbers: driver.KernelNumbers | None = None
        self._steps = segment.steps  # the nodes of optimizers' steps, in which alone there are numbers to be set
        self._random = bool(segment.drawn)
        self._sets: torch.Generator | None = torch.cuda.default_generators[device] if watch.sets_states else None
        self._rewind = rewind if watch.sets_states else None
        self._own = list(watch.own.items())
        self._own_rewind = rewind
        self.own_generators: Sequence[torch.Generator] = [g for own in watch.own for g in own.forward]
        self._surplus = surplus
        self._owed = 0  # of that, by the launch under way
        self._bodies = tuple(segment.bodies.graphs)
        self._stands: torch.Tensor | None = None  # where the generator does, if kernels move it on
        self.waits = ""
        if segment.bodies.offset:
            self.waits = "how much it draws (random numbers) depends on what tensors hold"
            self._stands = number_at(segment.bodies.offset, device)
        self.outs: tuple[torch.Tensor, ...] = ()
        self._new: list[Callable[[], torch.Tensor]] = []
        self._fill = Fill(edges.slots)
        self._context = driver.context()
        self._ends, self._addresses = edges.nodes, edges.addresses  # the copies there
        self._use(graph.raw_cuda_graph_exec())

    def _use(self, executable: int, node: Callable[[int], int] = int, *, fresh: bool = True) -> None:
        """Launch this from now on. It is made of a graph whose `node` is told by the captured one, and is `fresh` if it was
        never launched."""
        self._executable, self._node = executable, node
        self._stream, self._numbers = -1, None
        self._pointers: driver.Pointers | None = None
        ends = {*map(node, self._ends)}
        if ends:
            try:
                self._pointers = driver.Pointers(executable, ends, self._addresses, fresh=fresh)
            except driver.DriverError:
                driver.disable(executable, ends)
        self.set_numbers(self._given)

    def _look(self) -> str | None:
        if self._states.may_mix and self._states.mixed():
            return "which random generators have one state"
        return None if self._dropout is None else self._dropout.amiss()

    def copies(self, outs: tuple[torch.Tensor, ...]) -> None:
        self.outs = outs
        self._new = [maker(o) for o in outs]

    def run(self, sources: Tensors) -> list[torch.Tensor]:
        if current_device() != self._device or not hasattr(_thread, "has_context"):
            return self._run_elsewhere(sources)
        try:
            if self._others:
                self._wait_for_others()
            targets, inside = [new() for new in self._new], self._pointers is not None  # of the graph: the copies
            if self._pointers is not None:
                self._pointers.set([*map(address, sources), *map(address, targets)])
            elif sources:
                with torch.no_grad():
                    self._fill(sources)
            if self._dropout is not None:
                self._dropout.fetch()
            if self._random:
                self._go_random()
            else:
                launch = self._launch if raw_stream(self._device) == self._stream else self._launcher_elsewhere()
                self.ran = 1
                if code := launch():
                    raise driver.DriverError(f"cuGraphLaunch failed with CUresult {code}")
            if self._dropout is not None:
                self._dropout.give_back()
            if targets and not inside:
                with torch.no_grad():
                    copy_all(targets, self.outs)
            if self._others:
                self._launched.record()
                for other, _ in self._others:
                    self._launched.wait(other)
            self.ran = 0
            return targets
        except driver.DriverError:
            self.ran = 0
            raise

    def _wait_for_others(self) -> None:
        current = torch.cuda.current_stream()
        for other, event in self._others:
            event.record(other)
            event.wait(current)

    def _run_elsewhere(self, sources: Tensors) -> list[torch.Tensor]:
        """On a thread that has not used CUDA yet, or with another device current: the null stream is that device's."""
        if driver.context() is None:
            driver.set_context(self._context)
        _thread.has_context = True
        with torch.cuda.device(self._device):
            return self.run(sources)

    def _launcher_elsewhere(self) -> Callable[[], int]:
        """On another stream than last time, and from now on."""
        if self._graph is None:
            raise RuntimeError("this recording was closed while it was played, because a process group has ended")
        self._stream = raw_stream(self._device)
        self._launch = driver.launcher(self._executable, self._stream)
        return self._launch

    def _go_random(self) -> None:
        """Through torch, which tells the graph where the generators stand and moves them on."""
        assert self._graph is not None
        for own, rewinds in self._own:
            if rewinds:
                assert self._own_rewind is not None
                self._own_rewind.begin_own(own)
                continue
            own.begin()
            if rewinds is not None:
                own.put_backward(own.begins)
        generator, lent = self._sets, list[Lent]()
        now = generator.get_state() if generator is not None and self._rewind is not None else None
        self._owed = 0
        try:
            if now is not None and self._rewind is not None:
                self._rewind.begin()
            self._states.lend(lent)
            self._replay(self._graph)
            self._settle(now, lent)
        except BaseException:
            put_back(partial(self._settle, now, lent))
            raise

    def _settle(self, now: torch.Tensor | None, lent: list[Lent]) -> None:
        """After a launch, or where it has not come to one. May be done again."""
        self._states.take_back(lent, self.ran)
        generator = self._sets
        if generator is None:
            return
        if now is not None:
            put(generator, now)
        elif self._owed:
            put_offset(generator, generator.get_offset() - self._owed)
            self._owed = 0
        if self.ran:
            reset(generator)

    def _replay(self, graph: Graph) -> None:
        if self._stands is None:
            self.ran, self._owed = 1, self._surplus
            graph.replay()
            return
        own = self._states.state_of(torch.cuda.default_generators[self._device])
        begun = own.get_offset()
        self.ran, self._owed = 1, self._surplus
        graph.replay()
        own.set_offset(own.get_offset() + int(self._stands.item()) - begun)

    def set_numbers(self, numbers: Mapping[float, float]) -> Set[float]:
        if not numbers:
            return frozenset()
        if self._numbers is None:
            self._numbers = driver.KernelNumbers(self._executable, {*map(self._node, self._steps)}, numbers)
        self._numbers.set(numbers)
        self._given = numbers
        return self._numbers.found

    def holds(self, numbers: Set[float]) -> bool:
        assert self._graph is not None
        return driver.holds([self._graph.raw_cuda_graph(), *self._bodies], numbers)

    def work(self) -> list[Work]:
        return [work_of(self._graph.raw_cuda_graph(), branches=bool(self._bodies))] if self._graph is not None else []

    def close(self) -> None:
        if self._graph is not None:
            self._graph.reset()
        self._graph = None
        self._keep, self._own = None, []
        self._dropout = None
        self._pointers, self._random, self._stream = None, False, -1  # a live part may close what goes on after it


class CheckedProgram(GraphProgram):
    """One with checks at which each run looks when it has ended: where one has failed, it has to be taken back."""

    def __init__(self, segment: Segment, footprint: Spans, watch_: CudaWatch, keep: object, device: int, *others: Any) -> None:
        super().__init__(segment, footprint, watch_, keep, device, *others)
        assert watch_.answers is not None
        assert watch_.answers.awaited is not None
        self._awaited = watch_.answers.awaited
        self.waits = f"it looks at a status, in order to raise ({self._awaited.places})"

    def run(self, sources: Tensors) -> list[torch.Tensor]:
        if current_device() != self._device or not hasattr(_thread, "has_context"):
            return self._run_elsewhere(sources)
        targets = super().run(sources)
        try:
            failed = self._awaited.failed()
        except BaseException:
            self.ran = 1
            raise
        if failed is not None:
            raise TakenBack.by_check(failed.where)
        return targets


class CommunicatingProgram(GraphProgram):
    """One of which each launch waits for other ranks: somebody has to watch how long it does."""

    def __init__(self, segment: Segment, footprint: Spans, watch_: CudaWatch, keep: object, device: int, *others: Any) -> None:
        super().__init__(segment, footprint, watch_, keep, device, *others)
        self._watched = Watched(torch.device("cuda", device), watch_.collectives, watch_.groups)
        self._launches = launches(self._watched.device, lambda: _Mark(device))
        watch(self, self._watched)

    def run(self, sources: Tensors) -> list[torch.Tensor]:
        if current_device() != self._device or not hasattr(_thread, "has_context"):
            return self._run_elsewhere(sources)
        targets = super().run(sources)
        try:
            self._launches.note(self._watched)
        except BaseException:
            self.ran = 1
            raise
        return targets

    def close(self) -> None:
        unwatch(self)
        super().close()


class _Mark:
    """In the current stream of a device."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._event = driver.Event()
        self.reached = self._event.reached

    def put(self) -> None:
        self._event.record(raw_stream(self._device))
