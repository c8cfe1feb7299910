"""C1, C6: ordinary layers, trained. Modules in each dtype, with and without recompute, recorded as a whole step, as a
pair of forward and backward, and as a chunk of a pipeline: outputs, gradients, weights and the random generator are eager's,
bit for bit."""

import copy
import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

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


def saves_products(ctx, op, *args, **kwargs):
    products = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


RECOMPUTE = {
    "kept": None,
    "recomputed": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "selective": {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, saves_products)},
}


class Recomputed(nn.Module):
    """What is recomputed needs an input with a gradient, if it is to be reentrant."""

    def __init__(self, inner, options):
        super().__init__()
        self.inner, self.options = inner, options
        self.shift = nn.Parameter(torch.zeros(8))

    def forward(self, x):
        return checkpoint(self.inner, x + self.shift, **self.options) * 1


def training(module, way, scaled):
    """A loop's body: two micro-batches, clipping, the optimizer."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, fused=scaled)
    called = module
    if way == "pair":
        called = pg.record(module, warmup=1)
    elif way == "callables":
        called = pg.make_graphed_callables(module, (torch.empty(2, 6, 8),), 1)
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


class Loss(nn.Module):
    def forward(self, out):
        return out.float().square().mean()


ORDER = [1, 2, 1, 2, -2, -1, 1, 2, -2, -1, -2, -1]


def pipeline(module, way, _):
    """A loop's body: three micro-batches, in turn through two chunks, of which the second is the loss."""
    optimizer, loss = torch.optim.AdamW(module.parameters(), lr=0.01), Loss()
    if way == "interleaved order":
        pg.make_graphed_callables((module, loss), ((torch.empty(2, 6, 8),),) * 6, 1, _order=ORDER)

    def step(*batches):
        optimizer.zero_grad()
        values, following, outs, between, losses, grads = [], list(batches), [], [], [], []
        for c in ORDER:
            if c == 1:
                outs.append(module(following.pop(0)))
                between.append(outs[-1].detach().requires_grad_())
            elif c == 2:
                losses.append((loss(between[0]), between.pop(0)))
                values.append(losses[-1][0].detach().clone())
            elif c == -2:
                value, start = losses.pop(0)
                value.backward()
                grads.append(start.grad)
                value = start = None
            else:
                outs.pop(0).backward(grads.pop(0))
        optimizer.step()
        return values

    return step


@pytest.fixture
def deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


WAYS = ["whole step", "pair", "callables", "interleaved order"]


def every_second() -> list:
    """Of all combinations of a module, a dtype, a recomputation and a way half, in which any three of these meet."""
    axes = [list(enumerate(axis)) for axis in (MODULES, DTYPES, RECOMPUTE, WAYS)]
    return [
        pytest.param(MODULES[make], DTYPES[dtype], recompute, way, id=f"{make}-{dtype}-{recompute}-{way}")
        for (i, make), (j, dtype), (k, recompute), (n, way) in itertools.product(*axes)
        if (i + j + k + n) % 2 == 0
    ]


@may_run_live
@pytest.mark.filterwarnings("ignore:RNN module weights")  # of a copy, on a GPU
@pytest.mark.parametrize(("make", "dtype", "recompute", "way"), every_second())
def test_c06_training(device, deterministic, make, dtype, recompute, way):
    torch.manual_seed(1)
    module, options = make(), RECOMPUTE[recompute]
    module = (module if options is None else Recomputed(module, options)).to(device, dtype)
    if recompute == "selective" and not works(module, dtype, device):
        pytest.skip("torch refuses to keep what is written in place")
    step = compare(module, pipeline if way == "interleaved order" else training, way, dtype, device)
    if not (device.type == "cuda" and any(isinstance(m, nn.RNNBase) for m in module.modules())):  # which run live
        recorded = step if way == "whole step" else module
        assert pg.stats(recorded).replayed > 0, pg.explain(recorded)
        assert way != "interleaved order" or pg.stats(module).recorded == 2, pg.explain(module)  # as many as are in flight


def works(module, dtype, device):
    """Whether eager can train this."""
    try:
        copy.deepcopy(module)(torch.ones(2, 6, 8, device=device, dtype=dtype)).float().sum().backward()
    except RuntimeError as e:
        if "has been mutated" not in str(e):
            raise
        return False
    return True


def compare(module, loop, way, dtype, device):
    """Five steps of a loop, beside the same loop live; returns the first."""
    both = [module, copy.deepcopy(module)]
    steps = [loop(m, w, dtype is torch.float16) for m, w in zip(both, (way, "live"), strict=True)]
    for n in range(5):
        torch.manual_seed(n)
        batches = [torch.randn(2, 6, 8, device=device).to(dtype) for _ in range(3 if loop is pipeline else 2)]
        found = []
        for step, m in zip(steps, both, strict=True):
            torch.manual_seed(100 + n)
            found.append((step(*batches), [p.grad for p in m.parameters()], list(m.state_dict().values())))
            found[-1] += (torch.rand(1, device=device),)
        assert_same(*found)
    return steps[0]
