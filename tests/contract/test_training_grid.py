"""C1, C6: ordinary layers, trained. Every module in every dtype, with and without recompute, recorded as a whole step and as a
pair of forward and backward: outputs, gradients, weights and the random generator are eager's, bit for bit."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import may_run_live


class First(nn.Module):
    """Of a module that returns several things, the first."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        return self.inner(*args)[0]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = (t.view(2, 6, 2, 4).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 6, 8))


class InPlace(nn.Module):
    """Writes its activations in place, and through views."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        h = self.linear(x)
        h = F.relu(h, inplace=True)
        y = h * 2
        y[..., :4].add_(1)
        y.masked_fill_(x > 1, 0.5)
        return y + torch.cat([h[..., 4:], h[..., :4]], -1)


MODULES = {
    "perceptron": lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Dropout(0.3), nn.Linear(8, 8)),
    "norms": lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.RMSNorm(8), nn.SiLU(), nn.GroupNorm(2, 6)),
    "convolutions": lambda: nn.Sequential(
        nn.Conv1d(6, 12, 3, padding=1), nn.BatchNorm1d(12), nn.ReLU(True), nn.Conv1d(12, 6, 1)
    ),
    "images": lambda: nn.Sequential(nn.Unflatten(1, (3, 2)), nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(2), nn.Flatten()),
    "attention": Attention,
    "multihead": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True),
    "lstm": lambda: First(nn.LSTM(8, 8, num_layers=2, batch_first=True)),
    "gru": lambda: First(nn.GRU(8, 8, batch_first=True)),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
    "in place": InPlace,
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Recomputed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def training(module, way, scaled):
    """A loop's body: two micro-batches, clipping, the optimizer."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, fused=True)
    called = pg.record(module, warmup=1) if way == "pair" else module
    scale = 128.0 if scaled else 1.0

    def step(*batches):
        optimizer.zero_grad()
        outs = []
        for x in batches:
            out = called(x)
            (out.float().square().mean() * scale).backward()
            outs.append(out.detach())
        for p in module.parameters():
            p.grad.div_(scale)
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        return outs

    return pg.record(step, warmup=1) if way == "whole step" else step


@pytest.fixture
def deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@may_run_live
@pytest.mark.filterwarnings("ignore:RNN module weights")  # of a copy, on a GPU
@pytest.mark.parametrize("way", ["whole step", "pair"])
@pytest.mark.parametrize("recompute", ["kept", "recomputed"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_c06_training(device, deterministic, make, dtype, recompute, way):
    torch.manual_seed(1)
    module = make().to(device, dtype)
    module = Recomputed(module) if recompute == "recomputed" else module
    both = [module, copy.deepcopy(module)]
    steps = [training(m, w, dtype is torch.float16) for m, w in zip(both, (way, "live"), strict=True)]
    for n in range(5):
        torch.manual_seed(n)
        batches = [torch.randn(2, 6, 8, device=device).to(dtype) for _ in range(2)]
        found = []
        for step, m in zip(steps, both, strict=True):
            torch.manual_seed(100 + n)
            found.append((step(*batches), [p.grad for p in m.parameters()], list(m.state_dict().values())))
            found[-1] += (torch.rand(1, device=device),)
        assert_same(*found)
    recorded = steps[0] if way == "whole step" else both[0]
    cudnn = device.type == "cuda" and any(isinstance(m, nn.RNNBase) for m in module.modules())
    if not cudnn:  # which runs live
        assert pg.stats(recorded).replayed > 0, pg.explain(recorded)
