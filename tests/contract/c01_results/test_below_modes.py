"""C1: operators that go another way where a dispatch mode looks on, as in a capture, go the way that they go live: those that
consist of others, in inference mode; what is cast within an operator; tensors that stand for others, within one."""

import ctypes
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import assert_replays, counts, may_run_live, plain, side_by_side


def _recurrent(device):
    rnn = nn.GRU(16, 16, batch_first=True, device=device)
    return lambda x: rnn(x)[0]


def _attention(device):
    attention = nn.MultiheadAttention(16, 2, batch_first=True, device=device)
    return lambda x: attention(x, x.flip(0), x.flip(0))[0]


def _patches(device):
    patches, head = nn.Conv2d(1, 8, 4, 4, device=device), nn.Linear(8, 7, device=device)
    return lambda x: head(patches(x.unsqueeze(1)).flatten(2).transpose(1, 2))


def _with_weight(operator):
    def make(device):
        weight = nn.Parameter(torch.randn(9, 9, device=device))
        return lambda x: operator(x, weight)

    return make


CONSISTS = {
    "linear": _with_weight(lambda x, w: nn.functional.linear(x.mT, w, w[0])),
    "without a bias": _with_weight(lambda x, w: nn.functional.linear(x.mT, w)),
    "matmul": _with_weight(lambda x, w: x.mT @ w),
    "einsum": _with_weight(lambda x, w: torch.einsum("bij,ki->bjk", x, w)),
    "a view of the weight": _with_weight(lambda x, w: x.mT @ w[:, :5]),
    "attention": _attention,
    "recurrent": _recurrent,
    "patches": _patches,
}


@pytest.mark.filterwarnings("ignore:.*RNN module weights are not part of single contiguous chunk")
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("kind", CONSISTS)
def test_c01_operators_that_ask_for_which_tensors_gradients_are_wanted(device, kind, mode):
    """Torch folds a product into one of two dimensions where the weight requires a gradient, and inference mode shows the
    operator whole: what is played has to ask the same tensors."""
    torch.manual_seed(3)
    made = CONSISTS[kind](device)
    size = (3, 16, 16) if kind in ("attention", "patches", "recurrent") else (2, 9, 8)
    both = side_by_side(lambda: made)
    with mode():
        for _ in range(2):
            both(torch.randn(size, device=device))
        for _ in range(4):
            assert_replays(both, torch.randn(size, device=device))


PRODUCTS = {
    "an operator": lambda x, w: x @ w,
    "of torch's": lambda x, w: torch.matmul(x, w),
    "a method": lambda x, w: x.matmul(w),
    "of linalg": lambda x, w: torch.linalg.matmul(x, w),
    "out": lambda x, w: torch.matmul(x, w, out=torch.empty(x.shape[0], x.shape[1], w.shape[2], device=x.device)),
    "below vmap": lambda x, w: torch.vmap(torch.matmul, (None, 0))(x, w[None]),
}


@pytest.mark.parametrize("mode", [nullcontext, torch.inference_mode, "autocast"])
@pytest.mark.parametrize("way", PRODUCTS)
def test_c01_a_batch_of_matrices_by_one_is_multiplied_as_where_no_mode_looks_on(device, way, mode):
    """Below a mode torch makes one product of it."""
    if way == "out" and mode == "autocast":
        pytest.skip("eager raises")

    def f(x, w):
        with torch.autocast(device.type, torch.bfloat16, enabled=mode == "autocast"):
            return PRODUCTS[way](x, w)

    torch.manual_seed(0)
    both = plain(f)
    with nullcontext() if mode == "autocast" else mode():
        for x, w in 5 * [((7, 33, 1000), (1, 1000, 1))] + 5 * [((5, 5, 5), (1, 5, 5))]:
            both(torch.randn(x, device=device), torch.randn(w, device=device))
    assert counts(both) == (2, 2, 8)


def test_c01_gradients_of_a_batch_of_matrices_by_one(device):
    def step(x, w, trained):
        x, w = x.clone().requires_grad_(), w.clone().requires_grad_(trained)
        (x @ w).pow(2).sum().backward()
        return x.grad, w.grad if trained else w

    both = plain(step)
    for trained in 5 * [False] + 5 * [True]:
        both(torch.randn(7, 33, 1000, device=device), torch.randn(1, 1000, 1, device=device), trained)
    assert counts(both) == (2, 2, 8)


def test_c01_an_argument_that_requires_a_gradient_in_inference_mode(device):
    f = pg.record(lambda x, w: x.mT @ w, warmup=1)
    weights = [torch.randn(9, 9, device=device, requires_grad=True) for _ in range(5)]
    with torch.inference_mode():
        for w in weights:
            x = torch.randn(2, 9, 8, device=device)
            assert_same(f(x, w), x.mT @ w)
    assert pg.stats(f).replayed == 4


def test_c01_inference_mode_within_a_call(device):
    weight = nn.Parameter(torch.randn(9, 9, device=device))

    def f(x):
        with torch.inference_mode():
            y = x.mT @ weight
        return y.clone() + 1

    both = plain(f)
    for _ in range(6):
        both(torch.randn(2, 9, 8, device=device))
    assert counts(both) == (1, 1, 5)


def test_c01_weights_that_change_between_inferences_under_autocast(device):
    """What autocast has cast within an operator is not kept from one replay to the next."""
    weight = nn.Parameter(torch.randn(6, 6, device=device))

    def f(x):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return torch.einsum("bij,jk->bik", x, weight), torch.tensordot(x, weight, 1)

    both = plain(f)
    for n in range(6):
        with torch.no_grad():
            weight.add_(n)
        with torch.inference_mode():
            both(torch.randn(2, 5, 6, device=device))
    assert counts(both) == (1, 1, 5)


WITHIN = {
    "bilinear": lambda x: nn.functional.bilinear(x, x + 1, x.unsqueeze(0) * torch.ones(3, 1, 1, device=x.device)),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "tensordot": lambda x: torch.tensordot(x, x, 1),
    "multi_dot": lambda x: torch.linalg.multi_dot([x, x, x]),
    "matrix_power": lambda x: torch.linalg.matrix_power(x, 3),
    "cov": lambda x: torch.cov(x),
    "ldexp": lambda x: torch.ldexp(x.bfloat16(), x.bfloat16()),
    "pinverse": lambda x: torch.pinverse(x.cpu()),
    "pinv": lambda x: torch.linalg.pinv(x.cpu()),
}
if hasattr(torch.linalg, "polar"):
    WITHIN["polar"] = lambda x: torch.linalg.polar(x)


@may_run_live
@pytest.mark.parametrize("infers", [False, True])
@pytest.mark.parametrize("kind", WITHIN)
def test_c01_what_autocast_casts_within_an_operator(device, kind, infers):
    def f(x):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return WITHIN[kind](x)

    both = plain(f)
    with torch.inference_mode(infers):
        for _ in range(4):
            both(torch.randn(7, 7, device=device))
    if kind in ("bilinear", "einsum", "matrix_power"):
        assert counts(both) == (1, 1, 3)


def test_c01_a_bilinear_layer_that_is_trained_under_autocast(device):
    def make():
        torch.manual_seed(1)
        layer = nn.Bilinear(4, 6, 3, device=device)
        opt = torch.optim.SGD(layer.parameters(), lr=0.1)

        def step(x, y):
            opt.zero_grad()
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = layer(x, y).square().mean()
            loss.backward()
            opt.step()
            return loss.detach()

        return step, layer

    both = side_by_side(make)
    for _ in range(5):
        both(torch.randn(5, 4, device=device), torch.randn(5, 6, device=device))
    assert counts(both) == (1, 1, 4)


@may_run_live
def test_c11_a_pseudoinverse_under_autocast_runs_live():
    """Torch does not tell whether `pinverse` has called it, which is cast, or nothing that is."""
    f = pg.record(lambda x: torch.linalg.pinv(x), warmup=1)
    x = torch.randn(4, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(3):
            assert f(x).dtype is torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            for _ in range(3):
                assert_same(f(x), torch.linalg.pinv(x))
    assert "under autocast" in str(pg.stats(f).refusals)
    assert pg.stats(f).replayed >= 1


def test_c01_conjugates_within_an_operator_in_inference_mode(device):
    both = plain(lambda z: (torch.fft.hfft2(z), torch.linalg.vecdot(z, z), z.mH @ z))
    with torch.inference_mode():
        for _ in range(5):
            both(torch.randn(4, 4, dtype=torch.complex64, device=device))
    assert counts(both) == (1, 1, 4)


@may_run_live
def test_c01_conjugates_within_an_operator_beside_live_parts(device):
    """Live calls before the capture are looked at as well, to learn what such parts give."""

    def f(z):
        y = torch.linalg.pinv(z)
        return y * float(z.abs().sum() > 0)

    both = plain(f, fallback="split")
    for _ in range(5):
        both(torch.randn(4, 4, dtype=torch.complex64, device=device))


def test_c01_tensors_that_are_known_to_be_zero_within_an_operator(device):
    """An operator that is given one finds torch able to resolve it, or what it calls would read where nothing is."""
    zero, unable = torch._C.DispatchKey.ZeroTensor, ctypes.c_int(0)

    def looks(x):
        unable.value += torch._C._dispatch_tls_is_dispatch_key_excluded(zero)
        return torch.ones(x.shape, device=x.device)

    with torch.library._scoped_library("phonograph_zeros", "FRAGMENT") as library:
        library.define("looks(Tensor x) -> Tensor")
        library.impl("looks", looks, "CompositeExplicitAutograd")
        library.impl("looks", torch.library.fallthrough_kernel, "ZeroTensor")
        f = pg.record(lambda x: torch.ops.phonograph_zeros.looks(torch._efficientzerotensor((3,), device=device)) + x, warmup=1)
        for n in range(4):
            assert f(torch.full((3,), float(n), device=device)).tolist() == [n + 1.0] * 3
        assert pg.stats(f).replayed == 3
    assert unable.value == 0


@may_run_live
@pytest.mark.parametrize("operator", [torch.clamp, torch.maximum, lambda x, y: x.masked_fill(y > 0, y.sum())])
def test_c01_gradients_that_lie_otherwise_in_memory(device, operator):
    """Torch computes them by other operators where a mode looks on: the strides may be others, and the order of a sum."""

    def gradients(x, y):
        x, y = x.mT.detach().requires_grad_(), y.mT.detach().requires_grad_()
        return torch.autograd.grad(operator(x, y).square().sum(), (x, y))

    f = pg.record(gradients, warmup=1, fallback="live")
    for _ in range(4):
        x, y = torch.randn(2, 5, 7, device=device)
        for found, expected in zip(f(x, y), gradients(x, y), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, check_stride=False)
    waits = device.type == "cuda" and operator not in (torch.clamp, torch.maximum)  # for the value
    assert pg.stats(f).replayed == (0 if waits else 3)


@may_run_live
@pytest.mark.parametrize("hermitian", [False, True])
def test_c03_the_rank_of_a_matrix_that_is_to_be_written(hermitian):
    """Where a mode looks on, torch leaves what is given as `out` as it is."""
    named = {"hermitian": hermitian, "out": torch.zeros((), dtype=torch.int64)}

    def by_name(x):
        out = torch.zeros((), dtype=torch.int64)
        torch.linalg.matrix_rank(x, hermitian=hermitian, out=out)
        return out * 2

    def spread(x):
        torch.linalg.matrix_rank(x, **named)
        return named["out"] * 2

    for function in (by_name, spread):
        f = pg.record(function, warmup=1)
        assert [int(f(torch.eye(5) * (torch.arange(5) < n))) for n in range(5)] == [0, 2, 4, 6, 8]
    f = pg.record(lambda x: torch.linalg.matrix_rank(x, hermitian=hermitian), warmup=1)
    assert [int(f(torch.eye(5) * (torch.arange(5) < n))) for n in range(5)] == [0, 1, 2, 3, 4]
    assert pg.stats(f).replayed == 4


@may_run_live
def test_c01_the_seed_of_an_attention_lies_where_it_does_without_a_capture(cuda):
    def attend(q, returns):
        found = torch.ops.aten._efficient_attention_forward(q, q, q, None, None, None, None, None, 0.0, 0)
        return found if returns else found[0]

    recorded = pg.record(attend, warmup=1)
    for returns in (True, False):
        for _ in range(4):
            q = torch.randn(2, 8, 4, 16, device=cuda, dtype=torch.float16)
            mine, live = recorded(q, returns), attend(q, returns)
            assert [getattr(t, "device", t) for t in mine] == [getattr(t, "device", t) for t in live]
            assert torch.equal(mine[0], live[0])
    assert pg.stats(recorded).replayed == 3, pg.explain(recorded)
