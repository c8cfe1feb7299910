"""Holding addresses of a pool, against a model of torch's caching allocator: best fit, splitting, merging."""

from __future__ import annotations

import gc
import random
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phonograph._torch import cuda as torch_cuda
from phonograph.devices.cuda import allocator as cuda_memory
from phonograph.devices.cuda.capture import _capturing
from phonograph.devices.cuda.device import CudaDevice
from phonograph.devices.cuda.private_pool import PrivatePool
from phonograph.memory.spans import Spans
from phonograph.python.standing import unwound
from tests.faults.injection import Functions

MIB = 1 << 20
POOL = (0, 1)


class Allocator:
    """CUDACachingAllocator.cpp: small blocks (up to 1 MiB) come from segments of 2 MiB, larger ones from segments of 20 MiB or
    of their own; the smallest free block of the stream that suffices is taken, and split if enough is left."""

    grows = False

    def __init__(self) -> None:
        self.segments: list[tuple[int, int, bool, int]] = []  # address, bytes, whether small, stream
        self.blocks: list[list[Any]] = []  # address, bytes, whether small, whether free, stream
        self._next = 1 << 30

    def alloc(self, nbytes: int, stream: int = 0) -> int:
        nbytes = -(-nbytes // 512) * 512
        small = nbytes <= MIB
        fitting = [b for b in self.blocks if b[3] and b[2] == small and b[4] == stream and b[1] >= nbytes]
        if not fitting:
            size = 2 * MIB if small else 20 * MIB if nbytes < 10 * MIB else -(-nbytes // (2 * MIB)) * 2 * MIB
            self.segments.append((self._next, size, small, stream))
            fitting = [[self._next, size, small, True, stream]]
            self.blocks += fitting
            self._next += size + (2 * MIB) * (len(self.segments) % 2)  # some segments lie side by side
        block = min(fitting, key=lambda b: (b[1], b[0]))
        rest = block[1] - nbytes
        if rest >= 512 if small else rest > MIB:
            self.blocks.append([block[0] + nbytes, rest, small, True, stream])
            block[1] = nbytes
        block[3] = False
        return int(block[0])

    def free(self, address: int) -> None:
        block = next(b for b in self.blocks if b[0] == address)
        block[3] = True
        start, size, *_ = next(s for s in self.segments if s[0] <= address < s[0] + s[1])
        inside = sorted(b for b in self.blocks if start <= b[0] < start + size)
        merged: list[list[Any]] = []
        for b in inside:
            if merged and merged[-1][3] and b[3]:
                merged[-1][1] += b[1]
            else:
                merged.append(b)
        self.blocks = [b for b in self.blocks if not start <= b[0] < start + size] + merged

    def snapshot(self, pool: Any) -> list[dict[str, Any]]:
        kinds = {True: "small", False: "large"}
        return [
            {"address": a, "total_size": n, "segment_type": kinds[small], "is_expandable": self.grows, "stream": stream,
             "blocks": [
                {"address": b[0], "size": b[1], "state": "inactive" if b[3] else "active_allocated"}
                for b in sorted(self.blocks) if a <= b[0] < a + n]}
            for a, n, small, stream in self.segments
        ]  # fmt: skip


class Expandable(Allocator):
    """With ``expandable_segments:True``: one segment for each kind and stream, which grows by pages. What can grow counts as
    large as it can become, and so is taken last. Whatever is left of a block is a block."""

    grows = True

    def alloc(self, nbytes: int, stream: int = 0) -> int:
        nbytes = -(-nbytes // 512) * 512
        small = nbytes <= MIB
        mine = next((i for i, s in enumerate(self.segments) if s[2:] == (small, stream)), None)
        if mine is None:
            mine = len(self.segments)
            self.segments.append(((1 + mine) << 40, 0, small, stream))
        start, size, *_ = self.segments[mine]
        fitting = [b for b in self.blocks if b[3] and start <= b[0] < start + size and b[1] >= nbytes]
        if not fitting:
            last = next((b for b in self.blocks if b[0] + b[1] == start + size and b[3] and size), None)
            page = 2 * MIB if small else 20 * MIB
            more = -(-(nbytes - (last[1] if last else 0)) // page) * page
            self.segments[mine] = (start, size + more, small, stream)
            if last is None:
                self.blocks.append([start + size, 0, small, True, stream])
                last = self.blocks[-1]
            last[1] += more
            fitting = [last]
        end = start + self.segments[mine][1]
        block = min(fitting, key=lambda b: (b[0] + b[1] == end, b[1], b[0]))
        if block[1] - nbytes >= 512:
            self.blocks.append([block[0] + nbytes, block[1] - nbytes, small, True, stream])
            block[1] = nbytes
        block[3] = False
        return int(block[0])


@pytest.fixture(params=[Allocator, Expandable])
def allocator(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Allocator:
    model: Allocator = request.param()
    monkeypatch.setattr(torch_cuda, "raw_alloc", model.alloc)
    monkeypatch.setattr(torch_cuda, "raw_free", model.free)
    monkeypatch.setattr(cuda_memory, "segments", model.snapshot)
    return model


SIZES = [512, 40 << 10, 160 << 10, 700 << 10, MIB, 3 * MIB // 2, 3 * MIB, 6 * MIB, 11 * MIB, 32 * MIB]


def used(allocator: Allocator, draw: random.Random) -> dict[int, int]:
    """Take blocks and give them back, as a capture does, but for some that are others' and stay: the addresses and bytes of
    those that were there at its end."""
    live: dict[int, int] = {}
    for _ in range(80):
        if live and draw.random() < 0.4:
            address = draw.choice(list(live))
            del live[address]
            allocator.free(address)
        nbytes = draw.choice([*SIZES[:-1], draw.randrange(512, 9 * MIB)])
        live[allocator.alloc(nbytes, draw.choice((0, 0, 0, 7)))] = nbytes
    for address in draw.sample(sorted(live), len(live) // 4):
        del live[address]
    for address in live:
        allocator.free(address)
    return live


@pytest.mark.parametrize("seed", range(40))
def test_what_is_held_is_out_of_reach_and_nothing_else(allocator: Allocator, seed: int) -> None:
    draw = random.Random(seed)
    kept = used(allocator, draw)
    wanted = Spans(draw.sample(sorted(kept.items()), len(kept) // 2))
    segments = list(allocator.segments)
    held = cuda_memory.hold(POOL, wanted)
    assert held is not None
    assert allocator.segments == segments
    for _ in range(80):
        nbytes = draw.choice(SIZES)
        assert not wanted.meets(address := allocator.alloc(nbytes), nbytes), hex(address)
    held.release()


@pytest.mark.parametrize("seed", range(40))
def test_what_is_given_back_is_free_and_all_else_still_held(allocator: Allocator, seed: int) -> None:
    draw = random.Random(seed)
    wanted = draw.sample(sorted(used(allocator, draw).items()), 20)
    apart = draw.sample(wanted, 10)
    held = cuda_memory.hold(POOL, Spans(wanted), apart=apart)
    assert held is not None
    for place in apart[:6]:
        held.give_back(*place)
    free = Spans((b.address, b.nbytes) for b in cuda_memory.blocks(POOL) if b.free)
    assert all(free.covers(*place) for place in apart[:6])
    still = Spans(set(wanted) - set(apart[:6]))
    for _ in range(80):
        nbytes = draw.choice(SIZES)
        assert not still.meets(address := allocator.alloc(nbytes), nbytes), hex(address)
    held.release()


@pytest.mark.parametrize("seed", range(20))
def test_cublas_is_led_to_its_workspace(allocator: Allocator, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, taken = random.Random(seed), []
    place = (allocator.alloc(32 * MIB), 32 * MIB)
    kept = used(allocator, draw)
    allocator.free(place[0])
    monkeypatch.setattr(torch_cuda, "take_cublas_workspace", lambda: taken.append(allocator.alloc(32 * MIB)))
    held = cuda_memory.hold(POOL, Spans(draw.sample(sorted(kept.items()), len(kept) // 2)), place)
    assert held is not None
    assert taken == [place[0]]


def test_what_is_larger_than_all_that_is_wanted_stays_free(allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fits no better, and what is held counts as allocated."""
    sizes = [90 * MIB, 40 * MIB, 32 * MIB, 6 * MIB, 50 * MIB, 3 * MIB]
    places = [allocator.alloc(nbytes) for nbytes in sizes]
    between = [allocator.alloc(512 << 10) for _ in sizes]
    for address in places[:2] + places[4:]:
        allocator.free(address)
    asked: list[int] = []
    alloc = allocator.alloc
    monkeypatch.setattr(torch_cuda, "raw_alloc", lambda nbytes, stream=0: asked.append(nbytes) or alloc(nbytes, stream))
    held = cuda_memory.hold(POOL, Spans([(places[1], 40 * MIB), (places[5], 3 * MIB)]))
    assert held is not None
    assert between
    if not allocator.grows:
        assert max(asked) == 40 * MIB, asked


def test_large_segments_stay_whole(allocator: Allocator) -> None:
    """Also one in which something lies that may go. In smaller ones there is room, and in those of the allocator's own size."""
    large, middle = [allocator.alloc(200 * MIB) for _ in range(2)], allocator.alloc(60 * MIB)
    stays, others = allocator.alloc(3 * MIB), list(allocator.segments)
    allocator.free(large[0])
    goes = allocator.alloc(90 * MIB)
    allocator.free(large[1])
    allocator.free(middle)
    held = cuda_memory.hold_large(POOL, 100 * MIB, room=1 << 40)
    made = {allocator.alloc(n): n for n in (80 * MIB, 50 * MIB, 5 * MIB)}
    if not allocator.grows:  # then there is one segment, and it is large
        assert [middle <= at < middle + 60 * MIB or at > stays for at in made] == [True] * 3
        assert len(allocator.segments) == len(others) + 1
    held.release()
    allocator.free(goes)
    for place in large:
        assert not Spans([(place, 200 * MIB)]).meets(stays, 3 * MIB)
        assert not any(Spans([(place, 200 * MIB)]).meets(*one) for one in made.items())
    before = [s[1] for s in allocator.segments]
    assert {allocator.alloc(200 * MIB) for _ in range(2)} == set(large)
    assert [s[1] for s in allocator.segments] == before


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_kept_whole_is_free_again_afterwards(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setattr(torch_cuda, "route_to_pool", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1 << 40, 1 << 40))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda *_: 1.0)
    large = [allocator.alloc(200 * MIB) for _ in range(2)]
    for address in large:
        allocator.free(address)
    pool: Any = SimpleNamespace(index=0, handle=POOL)
    with pytest.raises(KeyError) if fails else nullcontext(), PrivatePool.keeping_whole(pool, 8 * MIB):
        inside = allocator.alloc(30 * MIB)
        assert all(not at <= inside < at + 200 * MIB for at in large)
        if fails:
            raise KeyError
    assert {allocator.alloc(200 * MIB) for _ in range(2)} == set(large)


def test_large_segments_are_not_held_where_there_is_no_room_elsewhere(allocator: Allocator) -> None:
    large = [allocator.alloc(200 * MIB) for _ in range(2)]
    for address in large:
        allocator.free(address)
    cuda_memory.hold_large(POOL, 100 * MIB, room=399 * MIB)
    assert {allocator.alloc(200 * MIB) for _ in range(2)} == set(large)


def test_nothing_stays_held_after_an_exception(allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    for address in [allocator.alloc(n * MIB) for n in (200, 60, 3)]:
        allocator.free(address)
    alloc, asked = allocator.alloc, list[int]()

    def until_interrupted(nbytes: int, stream: int = 0) -> int:
        asked.append(nbytes)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return alloc(nbytes, stream)

    monkeypatch.setattr(torch_cuda, "raw_alloc", until_interrupted)
    if not allocator.grows:  # that has one block
        with pytest.raises(KeyboardInterrupt):
            cuda_memory.hold_all(POOL)
    assert all(b.free for b in cuda_memory.blocks(POOL))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_nothing_stays_held_where_an_interrupt_comes_anywhere(allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_cuda, "route_to_pool", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch_cuda, "clear_cublas_workspaces", lambda: None)
    kept = used(allocator, random.Random(1))
    before, count = cuda_memory.taken(POOL), 0
    for n in range(1, 2000, 13):
        anchor = SimpleNamespace(handle=POOL, workspace=None)
        memory = PrivatePool.__new__(PrivatePool)
        memory.index, memory.anchor, memory._unsettled = 0, anchor, Spans()  # type: ignore[assignment]
        with suppress(KeyboardInterrupt), Functions(n, KeyboardInterrupt) as fault, memory.undisturbed(Spans(kept.items())):
            assert cuda_memory.taken(POOL) != before
        assert cuda_memory.taken(POOL) == before, (n, fault.where)
        count += bool(fault.where)
        if not fault.where:
            break
    assert count > 20


@pytest.mark.parametrize("fails", [False, True])
def test_a_capture_is_ended_where_an_interrupt_comes_anywhere(fails: bool) -> None:
    """Or whoever began the call ends it."""

    class Begun:
        open = put_back = False

        def begin(self) -> None:
            self.open = True
            len(Spans())  # (of ours, where it may come)

        def end(self) -> None:
            self.open = False

        give_up = end

    seen = []
    for n in range(1, 60):
        begun = Begun()
        states: Any = SimpleNamespace(put_back=lambda begun=begun: setattr(begun, "put_back", True) or True)
        capturing = _capturing(begun, states)  # type: ignore[arg-type]
        with suppress(KeyboardInterrupt, KeyError), Functions(n, KeyboardInterrupt) as fault, unwound(), capturing:
            if fails:
                raise KeyError
        assert not begun.open, (n, fault.where)
        assert gc.isenabled()
        seen.append(fault.where)
    assert "" in seen
    assert len({*seen}) > 4


def test_what_is_expected_to_be_needed_is_taken_in_one_piece(allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of segments of 20 MiB, each would have an end in which nothing fits. What is free already is not taken once more."""
    monkeypatch.setattr(torch_cuda, "route_to_pool", lambda *_: nullcontext())
    pool = SimpleNamespace(index=0, handle=POOL, _stream=SimpleNamespace(stream=SimpleNamespace(cuda_stream=0)))
    make_room: Any = PrivatePool.make_room
    make_room(pool, 70 * MIB)
    (segment,) = allocator.segments
    assert 70 * MIB <= segment[1] < 90 * MIB
    taken = [allocator.alloc(7 * MIB) for _ in range(10)]
    assert allocator.segments == [segment]
    for address in taken[::2]:
        allocator.free(address)
    make_room(pool, 50 * MIB)  # 35 are there: what is missing is less than the allocator takes by itself
    assert allocator.segments == [segment]
    make_room(pool, 105 * MIB)
    assert sum(s[1] for s in allocator.segments) >= 70 * MIB + 70 * MIB


@pytest.mark.parametrize(("cached", "given_back"), [(64, 1), (8, 0)])
def test_what_is_cached_is_given_back_where_it_is_much(monkeypatch: pytest.MonkeyPatch, cached: int, given_back: int) -> None:
    counts = {"reserved_bytes.all.current": (cached + 36) * MIB, "active_bytes.all.current": 32 * MIB,
              "inactive_split_bytes.all.current": 4 * MIB}  # fmt: skip
    asked: list[None] = []
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: counts)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: counts["reserved_bytes.all.current"])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append(None))
    CudaDevice.release_unused(SimpleNamespace(index=0))  # type: ignore[arg-type]
    assert len(asked) == given_back
