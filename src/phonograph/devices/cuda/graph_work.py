"""What the nodes of a graph do, as a profiler shows it: kernels by the names of their functions, copies and fills.

What a profiler shows of a graph with branches or loops differs from launch to launch. Nothing of it is named.
"""

from __future__ import annotations

import ctypes

from ...capture.recording import Work
from . import driver

__all__ = ["work_of"]

_OTHERS = {1: "Memcpy", 2: "Memset"}  # by CUgraphNodeType; what else there is does no work
_LONG = 1024  # bytes of a name that torch's profiler leaves as its compiler has made it


def work_of(graph: int, branches: bool = False) -> Work:
    nodes = driver.nodes(graph)
    if branches:
        return Work([""] * len(nodes), False)
    names = [_OTHERS.get(kind, "") if (kind := driver.kind(node)) else _demangled(driver.kernel_name(node)) for node in nodes]
    in_a_row = all(driver.waits_for(node) == nodes[max(0, i - 1) : i] for i, node in enumerate(nodes))
    return Work(names, in_a_row)


def _demangled(name: bytes) -> str:
    """The name as it is in the source."""
    if len(name) > _LONG:
        return name.decode(errors="replace")
    try:
        library, own = ctypes.CDLL("libstdc++.so.6"), ctypes.CDLL(None)
    except OSError:
        return ""
    library.__cxa_demangle.restype = ctypes.c_void_p
    made = library.__cxa_demangle(name, None, None, None)
    if not made:
        return name.decode(errors="replace")  # of C
    try:
        return ctypes.string_at(made).decode(errors="replace")
    finally:
        own.free(ctypes.c_void_p(made))
