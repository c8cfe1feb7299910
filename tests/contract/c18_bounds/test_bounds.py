"""C18: recordings and their memory are bounded."""

import itertools

import pytest
import torch

import phonograph as pg
from phonograph.devices import device_for
from phonograph.engine import budget
from phonograph.memory.spans import Spans
from tests.helpers import assert_replays, assert_settles, counts, may_run_live, plain, ramp, side_by_side


def test_c18_recordings_fit_in_the_memory_that_they_may_have(device, monkeypatch):
    """The least recently played goes first; one that alone is too large stays."""
    monkeypatch.setattr(device_for(device), "roomy", 1 << 40)  # each has memory of its own
    both = plain(lambda x: (x * 2 + 1).cos(), max_bytes=100_000, warmup=0)

    def shapes():
        return [p.recording.slots[0].tensor.shape[0] for p in both.recorded._shelf]

    for size in (1000, 2000, 1000, 3000, 4000):
        both(torch.ones(size, device=device))
    held = Spans(piece for p in both.recorded._shelf for piece in p.recording.footprint)
    assert shapes()[-2:] == [3000, 4000]
    assert held.nbytes <= 100_000
    for _ in range(2):
        both(torch.ones(100_000, device=device))
    assert shapes() == [100_000]


@may_run_live
def test_c18_ever_new_shapes_end_in_eager(device, monkeypatch):
    monkeypatch.setattr(budget, "now", itertools.count().__next__)  # each call takes one, and so does a capture
    both = plain(lambda x: x * 2, max_recordings=4)
    for size in range(1, 100):
        both(torch.ones(size, device=device))
        both(torch.ones(size, device=device))
        if size == 60:
            recordings = pg.stats(both.recorded).recorded
    assert recordings <= 8
    assert pg.stats(both.recorded).recorded <= recordings + 1  # it is seldom tried again


@may_run_live
def test_c18_shapes_seen_once_are_never_recorded(device):
    both = plain(lambda x: x * 2)
    for size in range(1, 40):
        both(torch.ones(size, device=device))
    assert counts(both) == (39, 0, 0)


@may_run_live
def test_c18_memory_is_bounded_however_many_signatures_there_are(device):
    both = plain(lambda x, n: torch.cat([x, x * n]), max_recordings=4)
    sizes = []
    for n in range(60):
        for _ in range(3):
            both(torch.ones(100, device=device), n)
        sizes.append(pg.stats(both.recorded).pool_bytes)
    assert max(sizes) <= 2 * max(sizes[:10])


@may_run_live
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_c18_fewer_recordings_than_signatures(device, limit):
    both = plain(lambda x, n: x * n + n, max_recordings=limit, hold=True)
    for _ in range(5):
        for n in range(4):
            both(ramp(device, 4, start=n), n)


@may_run_live
def test_c18_the_recordings_in_use_stay(device):
    both = plain(lambda x, n: x * n, max_recordings=2)
    x = ramp(device, 3)
    assert_settles(both, x, 0)
    for n in range(1, 20):
        both(x, n)
        both(x, n)
        assert_replays(both, x, 0)


@may_run_live
def test_c18_a_value_that_is_new_in_each_call_ends_in_eager(device):
    def make():
        cell = {"t": "0"}  # no number, which would be followed
        return lambda x: x + float(cell["t"]), cell

    both = side_by_side(make, max_recordings=4)
    for n in range(100):
        both.change(lambda cell, n=n: cell.update(t=str(n)))
        both(ramp(device, 3))
        if n == 60:
            recordings = pg.stats(both.recorded).recorded
            assert repr(both.recorded).endswith(": 0 recordings>")  # none was played again
    assert pg.stats(both.recorded).recorded == recordings + 2  # it was tried again, after 64 live calls, with two values


@may_run_live
def test_c18_what_was_played_again_stays_where_other_values_come_and_go(device):
    def make():
        cell = {"t": "0"}
        return lambda x: x + float(cell["t"]), cell

    both = side_by_side(make)
    x = ramp(device, 3)
    assert_settles(both, x)
    for n in range(1, 30):
        both.change(lambda cell, n=n: cell.update(t=str(n)))
        both(x)
    assert any("changes from call to call" in reason for reason in pg.stats(both.recorded).refusals)
    both.change(lambda cell: cell.update(t="0"))
    assert_replays(both, x)
