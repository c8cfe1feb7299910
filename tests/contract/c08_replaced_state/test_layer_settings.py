"""C8: a setting of a layer of torch's, changed between calls, is what the next call works with; books on a layer are not."""

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import may_run_live, ramp

SETTINGS = {
    "slope": (lambda: nn.LeakyReLU(0.1), "negative_slope", 0.5),
    "alpha": (lambda: nn.ELU(1.0), "alpha", 2.0),
    "bounds": (lambda: nn.Hardtanh(-1.0, 1.0), "max_val", 3.0),
    "threshold": (lambda: nn.Threshold(1.0, 0.0), "threshold", 4.0),
    "dim": (lambda: nn.Softmax(-1), "dim", 0),
    "approximation": (lambda: nn.GELU(), "approximate", "tanh"),
    "beta": (lambda: nn.Softplus(1.0), "beta", 2.0),
    "eps": (lambda: nn.LayerNorm(4), "eps", 1.0),
    "groups": (lambda: nn.GroupNorm(2, 4), "num_groups", 4),
    "momentum": (lambda: nn.BatchNorm1d(4), "momentum", 0.5),
    "dropout": (lambda: nn.Dropout(0.5), "p", 0.1),
    "shape": (lambda: nn.Unflatten(1, (2, 2)), "unflattened_size", (4, 1)),
    "clip": (lambda: nn.ReLU(), "inplace", True),
    "margin": (lambda: nn.CosineSimilarity(dim=0), "dim", 1),
}


def called(module, x):
    if isinstance(module, nn.CosineSimilarity):
        return module(x, x.flip(0))
    return module(x)


@may_run_live
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("way", ["a module", "a step"])
def test_c08_settings_of_layers(device, setting, way):
    """Whether the layer itself is recorded, or a function that calls it."""
    make, name, other = SETTINGS[setting]
    ours, plain = make().to(device), make().to(device)
    recorded = pg.record(ours) if way == "a module" else pg.record(lambda *xs: called(ours, *xs))
    for n in range(12):
        if n in (4, 8):
            for one in (ours, plain):
                setattr(one, name, other if n == 4 else getattr(make(), name))
        ours.calls = n  # books, which nothing reads
        outcomes = []
        for one in (recorded, plain):
            torch.manual_seed(n)
            x = ramp(device, 4, 4, start=n) / 5 - 2
            outcomes.append(called(one, x) if way == "a module" or one is plain else one(x))
        assert_same(*outcomes)
        assert_same([*ours.buffers()], [*plain.buffers()])
    stats = pg.stats(recorded)
    assert stats.replayed + len(stats.refusals) > 0
    assert stats.recorded <= 4, pg.explain(recorded)
