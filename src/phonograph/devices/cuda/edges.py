"""Copies at the two ends of a graph: arguments in, results out."""

from __future__ import annotations

from collections import defaultdict

import torch

from ..._torch.tensors import address, copy_all
from ...memory.pool import dense
from . import driver

__all__ = ["Edges"]

_SMALL = 32 << 10  # bytes that the kernel for several copies without delay: it has one block for each 256 KiB or less
_LARGE = 1 << 20  # bytes; beyond, a memcpy node copies
# A copy of words to words of the same type is a memcpy node, to words of another type a kernel, of which the bits are the same.
_OTHER = {torch.int32: torch.uint32, torch.uint8: torch.int8}


class Edges:
    """Copies at the beginning of a graph, from the arguments to their slots, and at its end, from results to memory of
    the caller's own. They are nodes of the graph itself, and get their outer addresses before each launch: that costs
    the CPU less than a copy beside the graph, and the GPU less than another launch.

    Kernels copy: one for several small tensors, one for each that is larger or alone. To give the latter their addresses costs
    the CPU 0.8 us each (1.8 for the former), and a memcpy node 1.2 us (H200). It is the kernel that converts types, which most
    programs have in use: to load another one takes the driver 10 to 20 ms.

    Only what lies dense in memory is copied so; where one argument does not, all are copied beside the graph.
    """

    def __init__(self, stream: int, slots: list[torch.Tensor], arguments: list[torch.Tensor]) -> None:
        """Must be made where the capture has begun, before anything else is captured."""
        self.slots = slots
        self.addresses: list[int] = []
        self.nodes: set[int] = set()
        self._stream = stream
        self.usable = all(map(dense, arguments)) and len(set(map(address, arguments))) == len(arguments)
        if self.usable:
            self._copy(slots, arguments)
            self.addresses += map(address, arguments)
            self.nodes |= driver.captured_nodes(stream)

    def copy_out(self, results: list[torch.UntypedStorage]) -> None:
        """To be called last in the capture."""
        if self.usable:
            before = driver.captured_nodes(self._stream)
            with torch.inference_mode(False), torch.no_grad():
                ours = [torch.empty(0, dtype=torch.uint8, device=r.device).set_(r) for r in results]
                theirs = [torch.empty_like(t) for t in ours]
            self._copy(theirs, ours)
            self.addresses += map(address, theirs)
            self.nodes |= driver.captured_nodes(self._stream) - before

    @staticmethod
    def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        together: dict[object, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
        for i, (t, s) in enumerate(zip(targets, sources, strict=True)):
            dtype = torch.int32 if _wide(t) and _wide(s) else torch.uint8
            together[dtype if s.nbytes <= _SMALL else i].append((_row(t, dtype), _row(s, dtype)))
        for pairs in together.values():
            (t, s), *more = pairs
            if more:
                copy_all([t for t, _ in pairs], [s for _, s in pairs])
            elif s.nbytes <= _LARGE:
                t.copy_(s.view(_OTHER[s.dtype]))
            else:
                t.copy_(s)


def _wide(t: torch.Tensor) -> bool:
    """Whether it can be copied as words of 4 bytes. (Not of 8: of these, a kernel takes 32 bytes at once where the addresses
    that it is captured with allow it. Those of later calls are alike in what is left after division by 16, and no further.)"""
    return not (t.nbytes % 4 or t.data_ptr() % 4 or t.storage_offset() * t.element_size() % 4)


def _row(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The memory of a dense tensor as a row of another type."""
    start = t.storage_offset() * t.element_size() // dtype.itemsize
    with torch.inference_mode(False), torch.no_grad():
        row = torch.empty(0, dtype=dtype, device=t.device)
        return row.set_(t.untyped_storage(), start, (t.nbytes // dtype.itemsize,), (1,))
