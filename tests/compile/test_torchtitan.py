"""`record_graph` as a pass of torchtitan's graph trainer: its own tracer, its own runner."""

import copy

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.fx import record_graph
from phonograph.testing import assert_same

tracer = pytest.importorskip("torchtitan.experiments.graph_trainer.make_fx_tracer")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning", "ignore:.*:UserWarning",
                               "error::phonograph.RunsLive"),
    pytest.mark.skipif(not hasattr(torch.compiler, "_non_strict_tracing_context"), reason="its tracer wants a newer torch"),
]  # fmt: skip


def training(model, example, recorded):
    """Forward, loss and backward as torchtitan traces and runs them: a function of a batch; and what was recorded."""

    def step(x):
        loss = model(x).square().mean()
        return loss, torch.autograd.grad(loss, [*model.parameters()])

    traced = tracer.minimal_fx_tracer(step, module=model)(example)
    if recorded:
        static = range(traced.num_static_inputs)
        traced.gm.forward = record_graph(traced.gm.forward, traced.example_inputs, static_input_indices=static, is_forward=True)
    return tracer.run_traced(traced, module=model), traced.gm.forward


def batch(device, n):
    torch.manual_seed(n)
    return torch.randn(4, 8, device=device)


def test_c06_training(device):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8)).to(device)
    models = net, copy.deepcopy(net)
    sides = [training(m, batch(device, 0), recorded) for m, recorded in zip(models, (True, False), strict=True)]
    optimizers = [torch.optim.AdamW(m.parameters(), 0.01) for m in models]
    kept = [], []
    for n in range(8):
        if n == 5:
            for m in models:
                m.load_state_dict({k: v.clone() * 2 for k, v in m.state_dict().items()}, assign=True)
        for (run, _), m, optimizer, results in zip(sides, models, optimizers, kept, strict=True):
            loss, grads = run(batch(device, n))
            for p, g in zip(m.parameters(), grads, strict=True):
                p.grad = g
            optimizer.step()
            results.append((loss, grads))
        assert_same(*[[*m.state_dict().values()] for m in models])
    assert_same(*kept)
    stats = pg.stats(sides[0][1])
    assert (stats.live, stats.recorded, stats.replayed) == (2, 2, 6)
    assert stats.bytes_copied == 6 * 4 * 8 * 4  # the batch, and no parameter or buffer
