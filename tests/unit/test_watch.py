"""What watches the operators of a capture."""

import gc
import sys
import weakref

import torch

import phonograph as pg
from phonograph.capture.breaks import Break
from phonograph.capture.dispatch import OperatorWatch
from phonograph.capture.live_results import Form
from phonograph.guards.reachable import Reach


def test_it_goes_with_its_capture():
    """Not only when garbage is collected: it has noted tensors, gradients among them, which would seem to be held so long."""
    x = torch.ones(3)
    gc.disable()
    try:
        watch = OperatorWatch(torch.device("cpu"), Reach([("x", x)], frozenset()), [])
        with watch:
            made = x.mul_(2) + 1
        assert list(watch.written.values())
        ref = weakref.ref(watch)
        del watch
        assert ref() is None
    finally:
        gc.enable()
    assert made[0] == 3


def test_it_knows_whether_such_a_call_has_run_live_before(monkeypatch):
    """What two ranks alone share must not begin in a capture."""
    said: list[bool] = []
    monkeypatch.setattr(
        OperatorWatch, "warm", property(lambda self: True, lambda self, value: said.append(value)), raising=False
    )
    for warmup, before in [(0, False), (1, True)]:
        said.clear()
        recorded = pg.record(lambda x: x * 2, warmup=warmup)
        for _ in range(warmup + 1):
            recorded(torch.ones(3))
        assert pg.stats(recorded).recorded == 1
        assert said[1:] == [before]  # the first is what it is made with


def test_what_a_segment_has_launched_is_known_at_its_end():
    """What has an operator is told from what has none before the next segment begins."""

    class Watch(OperatorWatch):
        def cut(self, part, inputs, results):
            self.unnamed = self.origins.unnamed(5)

    watch = Watch(torch.device("cpu"), Reach([], frozenset()), [])
    watch.origins.note("aten::mul", 0, 4, sys._getframe(), None)
    watch.interrupt(Break(Form(torch.ops.aten.nonzero.default, None, ()), None, [], ""), "live", [], [], [])
    assert [*map(list, watch.unnamed)] == [[4]]
    assert [*map(list, watch.origins.unnamed(1))] == [[0]]
