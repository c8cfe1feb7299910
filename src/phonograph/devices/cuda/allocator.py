"""Keeping the caching allocator's hands off memory that it believes to be free.

An output that a *replay* handed out lies in a block that the allocator has long taken back. While a new call is captured
(or warmed up) in the same pool, that block must count as taken. There is no function to take a given address; but the
allocator is deterministic, so one can get there by taking all that it would rather give:

1. hold every free block that is no larger than those in which protected bytes lie, whole (ascending sizes: best fit then hands
   out exactly that block);
2. open up only the blocks in which protected bytes lie, and take them again piece by piece, which splits them from the
   front: gap, protected, gap, ...; a gap left open would be the best fit for a piece of the next block;
3. free all but the protected pieces.

In the same way something else can be led to a place: between the second step and the third, whoever takes memory gets what
has just been dropped.

Afterwards every protected byte must be held; if it is not (another allocator backend, unusual settings), the caller is
told and captures elsewhere. Nothing is written, and no memory is taken from the system unless step 1 misses.
With expandable segments, a free block at the end of one counts as large as all that it can grow to: it fits least, and comes
last. What is left of a large block may be less than the smallest request for one: nobody can have that, nor need it be held.
A block belongs to the stream of its segment, for which alone it can be taken: most to that of the captures, and what was
allocated on another stream of the user's within a capture to that one.
Block rules: CUDACachingAllocator.cpp, `should_split`, `kSmallSize` (1 MiB), `kMinBlockSize` (512).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import torch

from ..._torch import cuda as torch_cuda
from ..._torch.cuda import segments
from ..._torch.functions import Handle
from ...memory.spans import Spans

__all__ = ["SEGMENT", "SMALL", "Hold", "blocks", "cached", "free_bytes", "hold", "hold_all", "hold_large", "is_part", "outside",
           "pool_bytes", "taken"]  # fmt: skip

SMALL = 1 << 20
"""Bytes: what is not larger comes from segments of its own kind."""
SEGMENT = 20 << 20
"""Bytes: what the allocator takes from the system at a time, for something larger than that and smaller than half of it."""
_ROUND = 512


class Block(NamedTuple):
    address: int
    nbytes: int
    small: bool
    free: bool
    stream: int
    pending: bool = False
    """Whether it was given back, and waits for another stream that uses it (`record_stream`)."""
    grows: bool = False
    """Whether it is at the end of what a segment has so far that can be expanded."""

    @property
    def order(self) -> tuple[bool, int]:
        """Where it comes when all are taken: each when no other that is free fits as well."""
        return self.grows, -self.nbytes if self.grows else self.nbytes


def pool_bytes(pool: Handle) -> int:
    """Bytes that the pool holds of device memory."""
    return sum(int(s["total_size"]) for s in segments(pool))


def blocks(pool: Handle) -> list[Block]:
    """Every block of the pool, in address order."""
    found = []
    for s in segments(pool):
        for b in s["blocks"]:
            small, free, pending = s["segment_type"] == "small", b["state"] == "inactive", b["state"] == "active_pending_free"
            grows = bool(s.get("is_expandable")) and b is s["blocks"][-1]
            found.append(Block(b["address"], b["size"], small, free, s["stream"], pending, grows))
    return sorted(found)


def taken(pool: Handle) -> dict[int, int]:
    """The blocks that are not free: bytes by address."""
    return {b.address: b.nbytes for b in blocks(pool) if not b.free}


def free_bytes(pool: Handle) -> int:
    """Bytes of the pool that are free, in its large segments."""
    return sum(b.nbytes for b in blocks(pool) if b.free and not b.small)


def outside(device: int, stream: int) -> list[int]:
    """How much is allocated in each of this stream's segments outside of all graphs' pools: nothing, in what is cached."""
    return [
        s["allocated_size"] for s in torch.cuda.memory_snapshot()
        if s["stream"] == stream and s["device"] == device and tuple(s["segment_pool_id"]) == (0, 0)
    ]  # fmt: skip


def cached(device: int) -> int:
    """The bytes of segments that are cached as a whole, also in pools."""
    stats = torch.cuda.memory_stats(device)
    reserved, active, split = (stats[f"{kind}_bytes.all.current"] for kind in ("reserved", "active", "inactive_split"))
    return int(reserved - active - split)


class Hold:
    """Blocks that are held, until `release()`; or until it goes itself, where an exception has come before that."""

    def __init__(self) -> None:
        self._held: dict[int, int] = {}
        self._wanted = Spans()
        self.there: list[Block] = []  # the pool, as it is while all that is wanted is held

    def __contains__(self, address: int) -> bool:
        return address in self._held

    def take(self, nbytes: int, stream: int) -> int:
        address = torch_cuda.raw_alloc(nbytes, stream)
        self._held[address] = nbytes
        return address

    def drop(self, address: int) -> None:
        del self._held[address]
        torch_cuda.raw_free(address)

    def keep_only(self, wanted: Spans) -> None:
        self._wanted = wanted
        for address, nbytes in list(self._held.items()):
            if not wanted.meets(address, nbytes):
                self.drop(address)

    def give_back(self, address: int, nbytes: int) -> None:
        """Drop what lies there, as far as nothing else that is wanted lies in the same piece."""
        given = Spans([_rounded(address, nbytes)])
        self._wanted -= given
        for at, n in list(self._held.items()):
            if given.meets(at, n) and not self._wanted.meets(at, n):
                self.drop(at)

    def release(self) -> None:
        for address in list(self._held):
            self.drop(address)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.release()


def hold(
    pool: Handle, wanted: Spans, workspace: tuple[int, int] | None = None, apart: Sequence[tuple[int, int]] = ()
) -> Hold | None:
    """Hold all `wanted` bytes of the pool that are free now, and have cuBLAS take this free place (address, bytes) as its
    `workspace`. What is `apart` of what is wanted can be given back by itself. All streams must be routed to the pool.

    Returns None if that did not succeed; nothing is then held.
    """
    wanted = Spans(_rounded(a, n) for a, n in wanted)
    if workspace is not None:
        wanted -= Spans([workspace])
    alone = [_rounded(a, n) for a, n in apart]
    places = sorted([*(wanted - Spans(alone)), *alone, *([workspace] if workspace is not None else [])])
    everything = Spans(places)
    held, there = hold_all(pool, everything)
    for b in [b for b in there if b.address in held and everything.meets(b.address, b.nbytes)]:
        _carve(held, b, places)
    if workspace is not None and workspace[0] in held:
        held.drop(workspace[0])
        torch_cuda.take_cublas_workspace()
    held.keep_only(wanted)
    held.there = there = blocks(pool)
    taken, mine = Spans((b.address, b.nbytes) for b in there if not b.free), Spans((b.address, b.nbytes) for b in there)
    if all(taken.covers(a, n) for a, n in everything if mine.meets(a, n)):  # a retired pool's bytes are not in danger
        return held
    held.release()
    return None


def _rounded(address: int, nbytes: int) -> tuple[int, int]:
    return address, -(-nbytes // _ROUND) * _ROUND


def hold_all(pool: Handle, places: Spans | None = None) -> tuple[Hold, list[Block]]:
    """Hold all that is free in the pool, and look at all of it then. All streams must be routed to it. With `places`, only the
    blocks in which these lie, and all that fit better: held memory counts as allocated, and the peak of that is looked at."""
    held, there = Hold(), blocks(pool)
    last = max((b.order for b in there if b.free and (places is None or places.meets(b.address, b.nbytes))), default=(False, 0))
    as_meant = True
    try:
        for _ in range(4):
            free = [b for b in there if b.free and b.order <= last and (b.small or b.nbytes > SMALL)]
            free.sort(key=attrgetter("order"))
            if not free:
                break
            addresses = {b.address for b in free}
            found = [b for b in there if b.address not in addresses]
            for b in free:
                at = b.address
                for piece in _pieces(b.nbytes, b.small):
                    took = held.take(piece, b.stream)
                    as_meant = as_meant and took == at
                    found.append(b._replace(address=at, nbytes=piece, free=False))
                    at += piece
            if as_meant:  # there is nothing to look at again
                return held, sorted(found)
            there = blocks(pool)
    except BaseException:
        held.release()
        raise
    return held, there


def hold_large(pool: Handle, most: int, room: int) -> Hold:
    """Hold what is free in segments of more than so many bytes, and of more than a `SEGMENT`: also in those in which something
    lies that may go. But nothing if that is more than there is `room` for elsewhere. All streams must be routed to the pool."""
    least = max(SEGMENT, most)
    large = Spans((s["address"], s["total_size"]) for s in segments(pool) if s["total_size"] > least)
    if sum(b.nbytes for b in blocks(pool) if b.free and large.meets(b.address, b.nbytes)) > room:
        return Hold()
    held, _ = hold_all(pool, large)
    held.keep_only(large)
    return held


def is_part(pool: Handle, address: int, nbytes: int) -> bool:
    """Whether these bytes lie in a segment of more than twice as many."""
    around = [s["total_size"] for s in segments(pool) if s["address"] <= address < s["address"] + s["total_size"]]
    return any(total > 2 * nbytes for total in around)


def _pieces(nbytes: int, small: bool) -> list[int]:
    """How to ask for a free block so that the request goes to its kind of segment."""
    if not small:
        return [nbytes]
    return [SMALL] * (nbytes // SMALL) + [nbytes % SMALL] * (nbytes % SMALL > 0)


def _carve(held: Hold, block: Block, places: list[tuple[int, int]]) -> None:
    """Hold the block again in pieces, so that each of the places in it can be told from what lies between."""
    end, least = block.address + block.nbytes, 0 if block.small else SMALL
    ends = sorted({at for start, length in places for at in (start, start + length) if block.address < at < end} | {end})
    cuts: list[tuple[int, int]] = []
    start = block.address
    for stop in ends:
        if stop - start > least:
            cuts.append((start, stop))
        elif cuts:  # too little for a block of its own: the end of the one before
            cuts[-1] = (cuts[-1][0], stop)
        else:
            continue
        start = stop
    held.drop(block.address)
    for start, stop in cuts:
        for piece in _pieces(stop - start, block.small):
            if held.take(piece, block.stream) != start:
                return  # not split where expected: `hold` notices that bytes are missing
            start += piece
