"""C24: what can be launched in a branch or loop on a GPU: kernels of libraries, copies, constants, compiled code."""

import pytest
import torch
import torch.nn.functional as F

import phonograph as pg
from tests.helpers import assert_replays, assert_settles, plain, side_by_side

TABLE = {
    "matmul": lambda x: x @ x.T @ x,
    "half": lambda x: (x.bfloat16() @ x.bfloat16().T).float() @ x,
    "convolution": lambda x: F.conv2d(x.view(1, 1, 64, 64), torch.ones(1, 1, 3, 3, device=x.device), padding=1).view(64, 64),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 4, 16, 64).half()] * 3).float().reshape(64, 64),
    "sort": lambda x: x.sort(dim=1, descending=True)[0] + x.cumsum(0),
    "topk": lambda x: x * x.flatten().topk(7)[0].sum(),
    "reduction": lambda x: x - x.mean(0) + x.std() + x.amax(),
    "reduction by many blocks": lambda x: x + x.repeat(32, 32).view(-1).sum().sin(),  # which count each other in memory
    "argmax by many blocks": lambda x: x + x.repeat(8, 4).view(1, -1).argmax(-1),
    "row by matrix": lambda x: x + (x[:1].bfloat16() @ x.bfloat16().repeat(1, 2048)).float().view(-1, 64, 64).sum(0),
    "indices": lambda x: x.index_select(0, torch.arange(64, device=x.device) % 5).gather(1, x.argsort(1)),
    "write by indices": lambda x: x.clone().index_put_((torch.arange(64, device=x.device) // 2,), x.sum(), accumulate=False),
    "number": lambda x: x * torch.tensor(3.5, device=x.device) + torch.tensor([1.0, 2.0], device=x.device).repeat(32),
    "fill": lambda x: torch.zeros_like(x).add_(torch.full_like(x, 2)).fill_diagonal_(5),
    "many": lambda x: torch.stack(torch._foreach_add([x, x * 2, x[:1].expand(64, 64).clone()], 1.5)).sum(0),
    "solve": lambda x: torch.linalg.cholesky_ex(x @ x.T + 100 * torch.eye(64, device=x.device))[0].contiguous(),
    "copy": lambda x: torch.empty(1 << 20, device=x.device).copy_(x.view(-1).repeat(256)).view(256, 64, 64).sum(0),
    "norms": lambda x: F.layer_norm(F.group_norm(x.view(1, 8, 8, 64), 4).view(64, 64), (64,)).softmax(-1),
    "ffts": lambda x: torch.fft.rfft(x).abs().sum(1, keepdim=True) + x,
    "nothing": lambda x: x[:0].sum() + x,
}


@pytest.mark.parametrize("device_name", ["cuda", "cuda:0"])
@pytest.mark.parametrize("work", TABLE.values(), ids=TABLE)
def test_c24_what_bodies_launch(cuda, work, device_name):
    def f(x, pred):
        y = pg.cond(pred, work, lambda x: x * 2, x)
        return pg.repeat(2, lambda y: pg.cond(pred, lambda y: y - 1, work, y / 64), y), y

    both = plain(f)
    x, yes, no = torch.randn(64, 64, device=device_name), *(torch.tensor(p, device=device_name) for p in (True, False))
    assert_settles(both, x, yes, within=6)
    for pred in (no, yes, no):
        assert_replays(both, torch.randn(64, 64, device=device_name), pred)


def test_c24_compiled_code_in_a_branch(cuda):
    def make():
        compiled = torch.compile(lambda x: (x.sin() * 2 + x.cos()).relu())
        dropping = torch.compile(lambda x: F.dropout(x.sin(), 0.5) * 2)
        compiled(x), dropping(x)  # by now: it cannot be compiled where a branch is captured
        return lambda x, i: (pg.switch(i, [compiled, dropping, lambda x: x * 2], x), torch.rand_like(x))

    x = torch.randn(64, 64, device=cuda)
    both = side_by_side(make)
    assert_settles(both, x, torch.tensor(0, device=cuda), within=6)
    for i in (1, 2, 0, 1):
        assert_replays(both, x, torch.tensor(i, device=cuda))


def test_c24_autocast_in_and_around_branches(cuda):
    def make():
        net = torch.nn.Linear(64, 64).to(cuda).requires_grad_(False)

        def f(x, pred):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                y = pg.cond(pred, net, lambda x: (x @ x).bfloat16(), x)
            return y, pg.cond(pred, lambda y: y * 2, lambda y: _halved(net, y), y.float())

        return f, net

    both = side_by_side(make)
    assert_settles(both, torch.randn(64, 64, device=cuda), torch.tensor(True, device=cuda))
    assert_replays(both, torch.randn(64, 64, device=cuda), torch.tensor(False, device=cuda))


def _halved(net, y):
    with torch.autocast("cuda", dtype=torch.float16):
        return net(y).float()
