"""C1: code that asks whether a capture is going on, in order to take another way then, is told what it is told live."""

import pytest
import torch
from torch import nn
from torch.cuda import is_current_stream_capturing

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import counts, ramp, reasons


class Asking(nn.Module):
    """In its forward, and in its backward, which autograd may run on a thread of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        out = x * self.weight
        out.register_hook(lambda grad: grad * (3 if torch.cuda.is_current_stream_capturing() else 2))
        return out - 1 if is_current_stream_capturing() else out + 1


@pytest.mark.parametrize("whole", [True, False], ids=["step", "module"])
def test_c01_it_goes_the_way_that_it_goes_live(device, whole, monkeypatch):
    if device.type == "cpu":  # where no driver is, it would raise
        monkeypatch.setattr(torch.cuda.graphs, "_cuda_isCurrentStreamCapturing", lambda: False)

    def trained(record):
        model = Asking().to(device)
        f = pg.record(model) if record and not whole else model

        def step(x):
            model.zero_grad()
            out = f(x)
            out.sum().backward()
            return out.detach()

        run = pg.record(step) if record and whole else step
        found = []
        for n in range(5):
            found += [run(ramp(device, 3, start=n)).clone(), model.weight.grad.clone()]
        return found, run if whole else f

    (ours, recorded), (theirs, _) = trained(True), trained(False)
    assert_same(ours, theirs)
    assert counts(recorded) == (1, 1, 4), reasons(recorded)


def test_c01_in_a_capture_of_your_own_it_is_told_of_it(cuda):
    f = pg.record(lambda x: x + 1)
    for _ in range(3):
        f(ramp(cuda, 3))
    graph = torch.cuda.CUDAGraph()
    x = ramp(cuda, 3)
    with torch.cuda.graph(graph):
        told = torch.cuda.is_current_stream_capturing()
        x.add_(1)  # an empty graph is warned of
    assert told
    assert not torch.cuda.is_current_stream_capturing()
