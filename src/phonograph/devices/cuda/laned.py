"""A recorded graph that has its true edges only, where that is faster and gives the same.

A graph that was captured on one stream is a chain. Most of its nodes do not wait for what comes before them, but for something
further back; on a GPU that is larger than each of them, they could run at the same time. So when it is captured, the program
knows which memory its nodes touch (`places.py`), and what follows from that (`order/`). It runs once, as any other: the call is
over then, and nothing has to be taken back any more. The second time it tries:

1. It runs as it was captured, several times, each time from the same state. If that does not give the same each time, nothing
   could be compared, and it stays as it is.
2. For each number of lanes it is wired anew. The checker proves the order of this graph; then it runs, as often.
3. The fastest is kept, if each of its runs gave the same as the chain to the bit, and if it is faster by more than noise.

A trial proves little of races. That is what the checker is for: the trial finds out where what was said of a node is wrong.

Whatever fails on the way leaves the chain. Memory outside that the call writes is put back before each run and at the end. What
it makes in its own is made zero before: else a node that comes too early would find there what the run before has left, which
is just what it should find. (Zero, because it may be an index.)

So far this is for whole steps on one GPU alone: one graph on one stream, that draws no random numbers and has no branches.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import torch

from ..._torch.cuda import current_device, occupy
from ..._torch.modes import without_modes
from ..._torch.tensors import storage_at
from ...capture.recording import Tensors, Work
from ...memory.spans import Spans
from ...statistics import logger
from ..order import Edge, Node, dependencies, longest_path, peak, said, scheduled, unordered
from . import driver
from .graph_work import work_of
from .graphs import Segment
from .places import Blocks, Given, Notebook, Noted, Range, lifetimes, placed
from .program import GraphProgram, has_context
from .rewired import Rewired, plain_edges

__all__ = ["LanedProgram", "Order", "in_use", "largest_once", "order_of", "takes_too_much"]

LANES = (2, 3, 4, 6, 8)
_RUNS = 7  # of each kind
_NOISE = 1.03
_SHORTER = 0.9  # the longest path over the whole: where it is not even that much shorter, there is nothing to gain
_MORE = 1.15  # times the bytes that the chain takes, at most
_LITTLE = 32 << 20  # bytes that are no matter: as cuBLAS takes for its workspace
_ROOM = 0.75  # the part of what may be taken more for which memory is planned
_NODE = 1.0  # microseconds that a node takes at least
_AHEAD = 1_000_000  # cycles, some 0.5 ms: the host has launched all by then, so that its own time is none of the run's
_BYTES = 2e6  # that a GPU reads or writes in a microsecond


class Order(NamedTuple):
    """What must wait for what in a graph."""

    handles: list[int]
    """The nodes, as the driver knows them."""
    nodes: list[Node]
    times: list[float]
    """Microseconds, roughly: lanes are made by them."""
    edges: list[Edge]
    scratch: Spans = Spans()
    """Memory that holds nothing when a run begins."""

    @property
    def pays(self) -> bool:
        """Whether it could be much faster than the chain."""
        return max(longest_path(self.times, self.edges), default=0.0) < _SHORTER * sum(self.times)

    def __str__(self) -> str:
        """How far its nodes run beside each other."""
        levels = Counter(longest_path([1.0] * len(self.nodes), self.edges))  # by how many come after it
        deep, wide = max(levels, default=0.0), max(levels.values(), default=0)
        blind = sum(node.everything for node in self.nodes)
        return f"{len(self.nodes)} nodes, {deep:.0f} deep, {wide} wide; of {blind} nobody knows what they touch"


def takes_too_much(notebook: Notebook, allocated: Sequence[Range]) -> bool:
    """Whether memory that is used once is much more than memory that is used again."""
    noted = notebook.noted(allocated) or []
    return _made(noted, allocated).nbytes > _at_most(peak(lifetimes(noted, allocated)))


def _at_most(chain: int) -> float:
    """The bytes that may be taken where a chain takes so many."""
    return max(_MORE * chain, chain + _LITTLE)


def largest_once(notebook: Notebook, allocated: Sequence[Range]) -> int:
    """Up to how many bytes a result can have memory that is used once, if not all can; 0 if none."""
    blocks = lifetimes(notebook.noted(allocated) or [], allocated)
    chain, sizes = peak(blocks), sorted({block.nbytes for block in blocks})
    end = max((block.users[-1] for block in blocks), default=0)
    enough = chain + _ROOM * (_at_most(chain) - chain)  # there is some loss at places that nothing fits into

    def taken(largest: int) -> int:
        return peak([b._replace(users=(*b.users, end)) if b.nbytes <= largest else b for b in blocks])

    few = bisect_right(sizes, enough, key=taken)
    return sizes[few - 1] if few else 0


def _made(noted: Sequence[Noted], allocated: Sequence[Range]) -> Spans:
    """The memory that operators have allocated."""
    return Spans(one for operator in noted for one in allocated[slice(*operator.allocated)])


def order_of(segment: Segment, noted: Sequence[Noted], allocated: Sequence[Range], others: Iterable[Range]) -> Order:
    """The order of a captured graph, whose operators have allocated this, and that may touch other memory too.

    Raises:
        DriverError: the driver does not tell what it was asked, or the graph is no chain.
    """
    graph = segment.graph.raw_cuda_graph()
    handles, edges = driver.nodes(graph), plain_edges(graph)
    if edges is None:
        raise driver.DriverError("kernels begin before others have ended (programmatic launches)")
    if sorted(edges) != sorted(pairwise(handles)):
        raise driver.DriverError("it was captured on several streams")
    blocks = Blocks(others, driver.range_of)
    nodes = placed([_given(node, segment.edges.nodes) for node in handles], noted, allocated, blocks)
    times = [_NODE + node.nbytes / _BYTES for node in nodes]
    return Order(handles, nodes, times, dependencies(nodes), _made(noted, allocated))


def _given(node: int, ends: Set[int]) -> Given:
    kernel = (driver.kernel_name(node) or b"?") if driver.kind(node) == driver.KERNEL else b""
    return Given(driver.words_anywhere(node), kernel, node in ends)


def in_use(device: int) -> Iterable[Range]:
    """Blocks of the caching allocator's."""
    for segment in torch.cuda.memory_snapshot():
        at = segment["address"]
        for block in segment["blocks"] if segment["device"] == device else ():
            if block["state"] != "inactive":
                yield at, block["size"]
            at += block["size"]


class LanedProgram(GraphProgram):
    """A graph that may be wired anew at its second run."""

    order: Order | None = None
    """Before that run."""
    _has_run = False
    _rewired: Rewired | None = None

    def tries(self, order: Order, changed: Sequence[torch.UntypedStorage], results: Sequence[Range]) -> None:
        """Try this order. The call has `changed` that memory outside, and leaves these results in its own."""
        if not order.pays:
            self.edges = f"as captured: its longest path is nearly all of it ({order})"
            return
        self.order, self._changed = order, [*map(weakref.ref, changed)]
        self._results = [place for place in results if self.footprint.covers(*place)]  # which stays for as long as this does
        self.edges = f"as captured: the second run will try ({order})"

    def run(self, sources: Tensors) -> list[torch.Tensor]:
        if current_device() != self._device or not has_context():
            return self._run_elsewhere(sources)
        if self.order is not None and self._has_run and not torch.cuda.is_current_stream_capturing():
            order, self.order = self.order, None
            with without_modes():
                self._try(order, sources)
        self._has_run = True
        return super().run(sources)

    def _try(self, order: Order, sources: Tensors) -> None:
        changed = [storage for ref in self._changed if (storage := ref()) is not None]
        if len(changed) < len(self._changed):
            self.edges = "as captured: memory that it changes is gone"
            return
        others = order.scratch - self.footprint  # what other threads have allocated meanwhile
        results, scratch = self._rows(self._results), self._rows(order.scratch - others)
        trial = None
        try:
            trial = Trial(lambda: GraphProgram.run(self, sources), [*map(_row, changed)], results, scratch)
            self.edges = self._best(order, trial)
        except (driver.DriverError, torch.OutOfMemoryError) as e:
            self.edges = f"as captured: {e}"
            self._wire(None)
        except BaseException:
            self._wire(None)
            raise
        finally:
            self._changed, self._results = [], []
            if trial is not None:
                trial.put_back()
        logger.debug("edges: %s", self.edges)

    def _rows(self, places: Iterable[Range]) -> list[torch.Tensor]:
        return [_row(storage_at(at, nbytes, torch.device("cuda", self._device))) for at, nbytes in places]

    def _best(self, order: Order, trial: Trial) -> str:
        chain = trial.time()
        if chain is None:
            return "as captured: two runs of it do not give the same"
        best, fastest, times = None, chain / _NOISE, list[str]()
        for lanes in LANES:
            wired = self._wired(order, lanes)
            self._wire(wired)
            time = trial.time()
            times.append(f"{lanes} lanes {time:.1f} us" if time is not None else f"{lanes} lanes differ")
            if time is None:  # what was said of some node is not so
                logger.error("a graph with its true edges gave another result than as it was captured, and is not used")
                best = None
                break
            if time < fastest:
                best, fastest = wired, time
        self._wire(best)
        return f"{'true' if best is not None else 'as captured'}: {chain:.1f} us as captured, {', '.join(times)} ({order})"

    def _wired(self, order: Order, lanes: int) -> Rewired:
        assert self._graph is not None
        edges = scheduled(order.times, order.edges, lanes).edges
        if (pair := next(unordered(order.nodes, edges), None)) is not None:
            raise driver.DriverError(said(order.nodes, pair))
        return Rewired(self._graph.raw_cuda_graph(), order.handles, edges)

    def _wire(self, rewired: Rewired | None) -> None:
        """Launch this from now on, or what was captured."""
        assert self._graph is not None
        self._rewired = rewired
        if rewired is None:
            self._use(self._graph.raw_cuda_graph_exec(), fresh=False)
        else:
            self._use(rewired.executable, rewired.node, fresh=False)

    def work(self) -> list[Work]:
        return super().work() if self._rewired is None else [work_of(self._rewired.graph)]

    def close(self) -> None:
        super().close()
        self.order, self._changed, self._results = None, [], []
        if self._rewired is not None:
            self._rewired.close()


class Trial:
    """Runs of a program from one state, and whether they give the same."""

    def __init__(
        self, run: Callable[[], list[torch.Tensor]], changed: list[torch.Tensor], results: list[torch.Tensor],
        scratch: list[torch.Tensor],
    ) -> None:  # fmt: skip
        """All are rows of bytes: what it changes of others', what it leaves in its own memory, and what it makes that in."""
        self._run, self._changed, self._scratch = run, changed, scratch
        self._looked_at = [*changed, *results]
        self._before = [row.clone() for row in self._changed]
        self._reference: list[torch.Tensor] | None = None

    def put_back(self) -> None:
        """All is as it was before."""
        with torch.inference_mode(False), torch.no_grad():
            for row, before in zip(self._changed, self._before, strict=True):
                row.copy_(before)

    def time(self) -> float | None:
        """Microseconds of the device that a run takes; None where one does not give what the first of all has given."""
        times = [self._once() for _ in range(_RUNS)]
        known = [time for time in times if time is not None]
        return median(known) if len(known) == len(times) else None

    def _once(self) -> float | None:
        for row in self._scratch:
            row.zero_()
        self.put_back()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        occupy(_AHEAD)
        begin.record()
        copies = self._run()
        end.record()
        rows = [*self._looked_at, *(_row(t.untyped_storage()) for t in copies)]
        if self._reference is None:
            self._reference = [row.clone() for row in rows]
        same = all(map(torch.equal, rows, self._reference))
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 if same else None


def _row(storage: torch.UntypedStorage) -> torch.Tensor:
    """The bytes of a storage."""
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
