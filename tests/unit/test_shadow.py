"""The plugin that compares what was noted of a call with the guards of its recording (`tests/shadow.py`)."""

import types

import torch

import phonograph as pg
from tests.shadow import AGREE, DIFFER, Shadow

SETTINGS = types.SimpleNamespace(factor="a", log=[])
FACTORS = {"a": 2.0, "b": 3.0}


def compared(step, change):
    """The counts of a few calls before and after a change, where all results are right."""
    with Shadow().standing() as shadow:
        recorded, x = pg.record(step, keep="always", audit=0), torch.ones(2)
        for turn in range(12):
            if turn == 8:
                change()
            torch.testing.assert_close(recorded(x), step(x))
    return shadow.counts


def test_what_both_notice_agrees(monkeypatch):
    counts = compared(lambda x: x * FACTORS[SETTINGS.factor], lambda: monkeypatch.setattr(SETTINGS, "factor", "b"))
    assert counts["calls noted"] >= 2
    assert all(counts[kind] for kind in AGREE)
    assert not any(counts[kind] for kind in DIFFER)


def test_what_is_beside_a_key_that_was_read_differs_without_stand_ins(monkeypatch):
    counts = compared(lambda x: x * FACTORS["a"], lambda: monkeypatch.setitem(FACTORS, "b", "another"))
    assert counts["only the reads changed"]
    assert counts["only the reads changed: <items>, another"]
    assert not counts["only the guards changed"]


def test_nothing_stands_when_nobody_compares():
    from phonograph.engine.live_run import LiveRun
    from phonograph.slots.constants import Constants

    before = LiveRun.run, Constants.__init__, Constants.broken
    with Shadow().standing():
        assert (LiveRun.run, Constants.__init__, Constants.broken) != before
    assert (LiveRun.run, Constants.__init__, Constants.broken) == before
