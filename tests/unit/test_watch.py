"""What watches the operators of a capture."""

import gc
import weakref

import torch

from phonograph.capture.dispatch import OperatorWatch
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
