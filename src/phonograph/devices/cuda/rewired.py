"""A captured graph with other edges.

A capture gives edges by the order of launches on its streams. What its nodes do has nothing to do with that: which of them wait
for which can be changed, in a copy of the graph, before that is instantiated. Only plain edges are: one with ports or a type
lets a kernel begin before another has ended, which a kernel has to know of.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence

from ..order import Edge
from . import driver

__all__ = ["Rewired", "all_edges", "plain_edges"]

_P = ctypes.c_void_p
_PLAIN = 0  # CUgraphEdgeData, all of whose bytes are 0
_AS_TORCH_DOES = 1 | 8  # CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH, ..._USE_NODE_PRIORITY


def plain_edges(graph: int) -> list[tuple[int, int]] | None:
    """The edges of a graph, as pairs of nodes; None where one of them is more than an edge.

    Raises:
        DriverError: the driver does not tell.
    """
    edges = all_edges(graph)
    return None if any(kind != _PLAIN for *_, kind in edges) else [(a, b) for a, b, _ in edges]


def all_edges(graph: int) -> list[tuple[int, int, int]]:
    """The edges of a graph: two nodes, and what kind it is of.

    Raises:
        DriverError: the driver does not tell.
    """
    if not hasattr(driver.library(), "cuGraphGetEdges_v2"):
        raise driver.DriverError("this driver does not tell of edges' kinds")
    ask, count = driver.function("cuGraphGetEdges_v2", _P, _P, _P, _P, _P), ctypes.c_size_t(0)
    driver.checked(ask(graph, None, None, None, ctypes.byref(count)), "cuGraphGetEdges")
    before, after, kinds = (_P * count.value)(), (_P * count.value)(), (ctypes.c_uint64 * count.value)()
    if count.value:
        driver.checked(ask(graph, before, after, kinds, ctypes.byref(count)), "cuGraphGetEdges")
    return [(a or 0, b or 0, kind) for a, b, kind in zip(before, after, kinds, strict=True)]


class Rewired:
    """An executable graph, made of a copy of another."""

    def __init__(self, graph: int, nodes: Sequence[int], edges: Sequence[Edge]) -> None:
        """Edges are between the numbers of the nodes in that row, each of them once, and take the place of all that there are.

        Raises:
            DriverError: there can be no such graph.
        """
        self.graph = self.executable = 0
        try:
            self.graph = _made("cuGraphClone", graph)
            self._own = {node: self._found(node) for node in nodes}
            self._cut()
            self._join([(self._own[nodes[a]], self._own[nodes[b]]) for a, b in edges])
            instantiate = driver.function("cuGraphInstantiateWithFlags", _P, _P, ctypes.c_ulonglong)
            made = _P()
            driver.checked(instantiate(ctypes.byref(made), self.graph, _AS_TORCH_DOES), "cuGraphInstantiate")
            self.executable = made.value or 0
        except BaseException:
            self.close()
            raise

    def node(self, captured: int) -> int:
        """That which is the copy of a captured one."""
        return self._own[captured]

    def _found(self, node: int) -> int:
        return _made("cuGraphNodeFindInClone", node, self.graph)

    def _cut(self) -> None:
        edges = plain_edges(self.graph)
        if edges is None:
            raise driver.DriverError("the copy of a graph has other edges than the graph")
        self._change("cuGraphRemoveDependencies_v2", edges)

    def _join(self, edges: Sequence[tuple[int, int]]) -> None:
        self._change("cuGraphAddDependencies_v2", edges)

    def _change(self, name: str, edges: Sequence[tuple[int, int]]) -> None:
        if edges:
            change = driver.function(name, _P, _P, _P, _P, ctypes.c_size_t)
            before, after = ((_P * len(edges))(*[edge[end] for edge in edges]) for end in (0, 1))
            driver.checked(change(self.graph, before, after, None, len(edges)), name)

    def close(self) -> None:
        """Nobody launches it any more. May be done again."""
        with driver.unsafe_calls():
            if self.executable:
                driver.function("cuGraphExecDestroy", _P)(self.executable)
            if self.graph:
                driver.function("cuGraphDestroy", _P)(self.graph)
        self.graph = self.executable = 0

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()


def _made(name: str, *of: int) -> int:
    """What a function of the driver's writes to its first argument."""
    found = _P()
    driver.checked(driver.function(name, *[_P] * (1 + len(of)))(ctypes.byref(found), *of), name)
    return found.value or 0
