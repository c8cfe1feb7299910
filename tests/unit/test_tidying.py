"""When the CUDA device gives its pool up: its bookkeeping, with memory of the host's and what stands for an anchor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phonograph.devices.cuda import private_pool
from phonograph.devices.cuda.device import CudaDevice
from phonograph.devices.cuda.private_pool import PrivatePool
from phonograph.devices.cuda.warm_up import WarmUps
from phonograph.memory.pool import Lease, Pool
from phonograph.memory.spans import Spans

MIB = 1 << 20


in_turn: list[bool] = []


@contextmanager
def taking_turns() -> Iterator[None]:
    in_turn.append(True)
    try:
        yield
    finally:
        in_turn.pop()


class Anchor:
    workspace = None
    made = 0

    def __init__(self) -> None:
        assert in_turn, "what torch writes as a capture begins would meet a replay that is under way"
        self.needed = 0
        Anchor.made += 1
        self.number = Anchor.made


class Recording:
    """Of `nbytes`, with one output, large enough not to be copied."""

    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        self.memory = torch.empty(1 << 10, dtype=torch.uint8)
        at = self.memory.data_ptr()
        self.footprint, self.borrowed_memory = Spans([(at, nbytes)]), Spans()
        self.anchor = device._memory.anchor  # as its program has
        self.leases = [Lease(at, 64, torch.device("cpu"), device._memory.anchor)]
        self.rivals: list[Any] = []
        self.releases: list[Any] = []
        made: Any = self
        device.pool.add(made)
        device._memory.anchor.needed = max(device._memory.anchor.needed, device.pool.footprints().nbytes)  # as `settle` does

    def output(self) -> torch.Tensor:
        return self.leases[0].template(torch.float32, (4,), (1,), 0).view(4)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    monkeypatch.setattr(private_pool, "_Anchor", Anchor)
    monkeypatch.setattr(PrivatePool, "nbytes", 100 * MIB)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    made = object.__new__(CudaDevice)
    stream: Any = SimpleNamespace(reads=[], in_turn=taking_turns)
    made.pool, made._held_up, made._memory = Pool(torch.device("cpu")), False, PrivatePool(0, stream)
    made._memory._unsettled = made._memory._spans = Spans([(1 << 12, 1 << 12)])  # of the pool that there is
    made._warm_ups = WarmUps(stream, made._memory, made.pool)
    return made


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    calls: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(True))
    return calls


def number(device: CudaDevice) -> int:
    anchor: Any = device._memory.anchor
    return int(anchor.number)


@pytest.mark.parametrize("removed", [False, True])
def test_it_goes_with_its_last_recording(device: CudaDevice, emptied: list[bool], removed: bool) -> None:
    """Whether that was closed or dropped; what nobody holds of its outputs is in nobody's way."""
    recording: Any = Recording(device, 90 * MIB)
    before = number(device)
    device.tidy()
    assert (number(device), emptied) == (before, [])
    if removed:
        device.pool.remove(recording)
    del recording
    device.tidy()
    assert (number(device), emptied) == (before + 1, [True])
    assert not device.pool.leases
    assert len(device._memory._unsettled) == len(device._memory._spans) == 0, "nothing lies in the new one"


def test_it_stays_during_a_capture_of_somebody_elses(
    device: CudaDevice, emptied: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which would get what is written as the next pool begins."""
    recording = Recording(device, 90 * MIB)
    before = number(device)
    del recording
    with monkeypatch.context() as during:
        during.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        device.tidy()
        assert (number(device), emptied) == (before, [])
    device.tidy()
    assert (number(device), emptied) == (before + 1, [True])


def test_it_goes_when_the_last_output_does(device: CudaDevice, emptied: list[bool]) -> None:
    recording = Recording(device, 90 * MIB)
    before, held, memory = number(device), recording.output(), recording.memory
    del recording
    for _ in range(2):
        device.tidy()
        assert (number(device), emptied) == (before, [True])  # the second time nothing has changed
    del held
    device.tidy()
    assert (number(device), emptied) == (before + 1, [True, True])
    assert memory.nbytes


def test_it_stays_for_what_is_recorded_next_where_something_small_stays(device: CudaDevice, emptied: list[bool]) -> None:
    small = Recording(device, MIB)
    before = number(device)
    for nbytes in (90 * MIB, 80 * MIB):
        large = Recording(device, nbytes)
        del large
        device.tidy()
        assert number(device) == before
    assert emptied == [True, True]
    assert small.anchor is device._memory.anchor


def test_it_is_retired_where_it_is_much_larger_than_was_needed(device: CudaDevice, emptied: list[bool]) -> None:
    """What is left in it keeps it, but what comes next does not."""
    small = Recording(device, MIB)
    before = number(device)
    large = Recording(device, 45 * MIB)  # of 100
    del large
    device.tidy()
    assert (number(device), emptied) == (before + 1, [True])
    assert small.anchor is not device._memory.anchor
