"""C1: every call returns what the function would have returned."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import phonograph as pg
from phonograph.devices.cuda import driver
from phonograph.testing import Pair, assert_same
from tests.helpers import assert_replays, counts, may_run_live, plain, ramp, side_by_side

# ---------------------------------------------------------------------------------------------------
# C1: every call returns what the function would have returned

OPERATORS = {
    "arithmetic": lambda x: (x * 2 + 1) / (x.abs() + 1) - x**2,
    "transcendental": lambda x: x.sin().exp().tanh() + x.abs().log1p(),
    "matmul": lambda x: x @ x.mT,
    "addmm": lambda x: torch.addmm(x[:, :1], x, x.mT, beta=0.5),
    "bmm": lambda x: torch.bmm(x.reshape(2, 2, 6), x.reshape(2, 6, 2)),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "softmax": lambda x: F.softmax(x, -1) + F.log_softmax(x, 0),
    "sums": lambda x: (x.sum(), x.sum(0), x.mean(1, keepdim=True), x.prod(1), x.logsumexp(0)),
    "moments": lambda x: torch.var_mean(x, dim=1),
    "extremes": lambda x: (x.max(1), x.amin(0), x.argmax(), x.clamp(-1, 1)),
    "sort": lambda x: (x.sort(1, descending=True), x.topk(2, dim=0), x.median()),
    "scan": lambda x: (x.cumsum(1), x.cumprod(0), x.cummax(1)),
    "gather": lambda x: x.gather(1, x.argsort(1)) + x.index_select(0, x.argsort(0)[:, 0]),
    "scatter": lambda x: torch.zeros_like(x).scatter(1, x.argsort(1), x),
    "indexing": lambda x: x[torch.arange(3, device=x.device), torch.arange(3, device=x.device).flip(0)],
    "where": lambda x: torch.where(x > 0, x, -x).masked_fill(x > 1, 7.0),
    "joining": lambda x: torch.cat([x, torch.stack([x[0], x[1]])], 0).flip(0).roll(1, 1),
    "splitting": lambda x: (x.split([1, 2, 3], 1), x.chunk(2), x.unbind(0)),
    "padding": lambda x: F.pad(x, (1, 2), value=3.0).tril(),
    "layer_norm": lambda x: F.layer_norm(x, (6,), x[0], x[1]),
    "convolution": lambda x: F.conv1d(x.reshape(1, 4, 6), x.reshape(2, 4, 3)),
    "pooling": lambda x: F.max_pool1d(x, 2) + F.avg_pool1d(x, 2),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.reshape(1, 1, 4, 6)] * 3, is_causal=True),
    "embedding": lambda x: F.embedding(x.argsort(0)[:2], x),
    "losses": lambda x: (F.cross_entropy(x, x.argmax(1)), F.mse_loss(x, x * 2), F.smooth_l1_loss(x, -x)),
    "complex": lambda x: (torch.complex(x, -x) * 1j).abs() + torch.view_as_complex(x.reshape(4, 3, 2)).real.sum(),
    "factories": lambda x: (
        torch.zeros(3, device=x.device),
        torch.arange(4, device=x.device),
        torch.eye(2, device=x.device),
    ),
    "new filled": lambda x: (x.new_full((2,), 7), x.new_empty(2, 3).fill_(1.5), torch.full_like(x, -1)),
    "foreach": lambda x: torch._foreach_mul(torch._foreach_add([x, x * 2], 1.0), [2.0, 3.0]),
    "casts": lambda x: (x.half(), x.double(), x.int(), x > 0, x.bfloat16() @ x.bfloat16().mT),
    "views": lambda x: (x.t(), x[1:, ::2], x.unfold(1, 2, 2), x.expand(2, 4, 6), x.diagonal()),
    "in place on temporaries": lambda x: x.clone().mul_(2).add_(x).clamp_(max=2).t().sub_(1),
    "written in parts": lambda x: _written_in_parts(torch.empty_like(x), x),
    "nothing but views": lambda x: x.view(2, 12)[1],
}


def _written_in_parts(y, x):
    y[0] = x[1]
    y[1:, :3] = 5
    y[1:, 3:] = x[:3, 3:] * 2
    y[:, 0] += 1
    return y


@pytest.mark.parametrize("operators", OPERATORS.values(), ids=OPERATORS)
def test_c01_operators_give_eager_values_and_replay(device, operators):
    both = plain(operators, hold=True)
    for _ in range(4):
        both(torch.randn(4, 6, device=device))
    assert counts(both.recorded)[2] >= 2


def test_c01_the_first_call_is_live_the_second_records_and_all_later_ones_replay(device):
    w = torch.randn(6, 6, device=device)
    both = plain(lambda x: (x @ w).relu().sum(1))
    for _ in range(7):
        both(torch.randn(4, 6, device=device))
    assert counts(both) == (1, 1, 6)


@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_c01_warm_up_calls_are_the_users_own_first_calls(device, warmup):
    def make():
        counter = torch.zeros((), device=device, dtype=torch.int64)
        return lambda x: x + counter.add_(1), counter

    both = side_by_side(make, warmup=warmup)
    for n in range(1, warmup + 5):
        both(torch.zeros(2, device=device))
        assert both.state.item() == n
    assert counts(both) == (warmup, 1, 4)


@may_run_live  # with momentum=None torch itself reads the number of batches on the host
@pytest.mark.parametrize("momentum", [0.1, None])
def test_c01_batch_norm_statistics_are_updated_exactly_once_a_call(device, momentum):
    def make():
        norm = torch.nn.BatchNorm1d(3, momentum=momentum, device=device).requires_grad_(False)
        return lambda x: norm(x), norm

    both = side_by_side(make)
    for n in range(1, 6):
        both(torch.randn(8, 3, device=device))
        assert both.state.num_batches_tracked.item() == n


def observing(device, size):
    """Minima and maxima so far, and what a tensor is when it is quantized by them."""
    low, high, scale = (torch.full((size,), v, device=device) for v in (0.0, 1.0, 1.0))
    point, on = torch.zeros(size, dtype=torch.int32, device=device), torch.ones(1, dtype=torch.int64, device=device)

    def f(x):
        state = low, high, scale, point
        return torch._fused_moving_avg_obs_fq_helper(x, on, on, *state, 0.01, 0, 255, 0, size == 0, False)[0]

    return f, (low, high, scale, point)


def test_c01_a_state_that_the_first_call_leaves_as_it_is(device):
    both = side_by_side(lambda: observing(device, 1))
    for n in range(6):
        both(torch.linspace(0, 1, 20, device=device) * (1 + 3 * (n > 2)))
    assert both.state[1].item() > 1
    assert pg.stats(both.recorded).recorded == 1


@may_run_live  # torch gives the state the size that it has to have
def test_c01_a_state_that_an_operator_makes_larger(device):
    def make():
        f, _ = observing(device, 0)
        return f, None

    both = side_by_side(make)
    for n in range(5):
        both(torch.randn(4, 5, device=device) * (n + 1))


@may_run_live
def test_c01_a_fake_tensor_outside_is_written(device):
    """It has a shape and no memory."""
    with FakeTensorMode():
        fake = torch.empty(3)

    def f(x):
        fake.mul_(2)
        return x + 1

    both = plain(f)
    for n in range(4):
        both(ramp(device, 3, start=n))


def test_c01_data_written_into_the_callers_own_input_between_calls_is_seen(device):
    both = plain(lambda x: x * 3)
    x = Pair.of(torch.ones(4, device=device))
    for n in range(6):
        x.each(lambda t, n=n: t.fill_(n))
        assert both(x).recorded.tolist() == [3.0 * n] * 4


def test_c01_inputs_at_ever_new_addresses(device):
    both = plain(lambda x, y: x - y)
    kept = [Pair.of(ramp(device, 3, start=10 * n)) for n in range(8)]
    for one, other in itertools.pairwise(kept):
        both(one, other)
    for n, pair in enumerate(kept):
        assert_same(pair.recorded, ramp(device, 3, start=10 * n))


@pytest.mark.parametrize("copies", ["in the graph", "beside the graph"])
@pytest.mark.parametrize("first", [0, 1], ids=["aligned", "misaligned"])
def test_c01_inputs_and_outputs_of_all_sizes(device, first, copies, monkeypatch):
    """On a GPU small ones are copied by one kernel, larger ones each by its own, very large ones by a memcpy node; at ever new
    addresses."""
    if copies == "beside the graph":
        monkeypatch.setattr(driver, "Pointers", _no_pointers)
    sizes = (1, 3, 1_000, 8_191, 8_193, 300_001, 1_000_000, 4_200_000)

    def f(*xs):
        return tuple(x + i for i, x in enumerate(xs))

    recorded = pg.record(f, warmup=1)
    kept = []
    for n in range(7):
        xs = [torch.arange(first + size, device=device).add(n).to(torch.float32)[first:] for size in sizes]
        kept.append((recorded(*xs), f(*xs)))
    for ours, theirs in kept:
        assert_same(ours, theirs)
    assert pg.stats(recorded).replayed == 6, pg.explain(recorded)


@pytest.mark.parametrize("first", [0, 1, 2, 3, 4, 8, 15, 16])
@pytest.mark.parametrize("size", [1, 4, 5, 64, 4_099, 40_000])
def test_c01_one_input_of_bytes_at_any_address(device, first, size):
    recorded, kept = pg.record(lambda x: x + 1, warmup=1), []
    for n in range(5):
        x = torch.arange(first + size, device=device).add(n).to(torch.uint8)[first:]
        kept.append((recorded(x), x + 1))
    for ours, theirs in kept:
        assert_same(ours, theirs)
    assert pg.stats(recorded).recorded == 1


@pytest.mark.parametrize(("elements", "memcpys"), [(1_000, 0), (100_000, 0), (1_000_000, 1)])
def test_copies_are_kernels_but_for_very_large_ones(cuda, elements, memcpys):
    """To give a memcpy node its addresses costs half as much again."""
    recorded = pg.record(lambda x: x.sum(), warmup=1)
    for _ in range(3):
        recorded(torch.ones(elements, device=cuda))
    (player,) = recorded._shelf
    kinds = [type(copy) for copy in player.recording.program._pointers._copies]
    assert len(kinds) == 2
    assert kinds.count(driver._Memcpy) == memcpys


def _no_pointers(*_, **__):
    raise driver.DriverError("nothing is where it was expected")


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64],
    ids=str,
)
def test_c01_dtypes(device, dtype):
    both = plain(lambda x: (x, x.clone(), torch.cat([x, x]), x.sum(), x == x[0], ~(x != x)))
    for n in range(4):
        both(ramp(device, 5, start=n).to(dtype))


def test_c01_nan_payloads_infinities_and_negative_zero_keep_their_bits(device):
    both = plain(lambda x: (x.clone(), -x, x.abs(), x.flip(0)))
    bits = torch.tensor([0x7FC00001, 0x7F800000, -0x80000000, 0, 0x7FC12345], dtype=torch.int64)
    for n in range(4):
        both(bits.to(torch.int32).view(torch.float32).roll(n).to(device))


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0), (1,), (1, 1, 1)], ids=str)
def test_c01_empty_and_tiny_tensors(device, shape):
    both = plain(lambda x: (x * 2, x.sum(), x.unsqueeze(0), torch.cat([x.flatten(), x.flatten()])))
    for _ in range(4):
        both(torch.randn(shape, device=device))


def test_c01_no_arguments_and_no_result(device):
    def make():
        state = torch.zeros(3, device=device)

        def step():
            state.add_(1)

        return step, state

    both = side_by_side(make)
    for n in range(1, 6):
        both()
        assert both.state.tolist() == [n] * 3
    assert counts(both) == (1, 1, 4)


@may_run_live
def test_c01_a_cpu_scalar_tensor_among_device_tensors_is_read_anew_in_each_call(device):
    both = plain(lambda x, scale: x * scale + scale)
    for n in range(6):
        assert both(torch.ones(3, device=device), torch.tensor(float(n))).recorded.tolist() == [2.0 * n] * 3


@may_run_live
def test_c01_a_cpu_tensor_that_the_function_moves_to_the_device_is_read_anew(device):
    both = plain(lambda x: x.to(device) * 2)
    for n in range(6):
        assert both(torch.full((3,), float(n))).recorded.tolist() == [2.0 * n] * 3


@may_run_live
def test_c01_a_tensor_made_from_python_numbers(device):
    both = plain(lambda x, numbers: x + torch.tensor(numbers, device=device))
    for n in range(6):
        both(torch.ones(2, device=device), [float(n // 3), 1.0])


def test_c01_many_temporaries_that_reuse_each_others_memory(device):
    def deep(x):
        y, kept = x, []
        for i in range(30):
            y = (y + i).cos() * x
            if i % 7 == 0:
                kept.append(y * 2)
        return y, torch.stack(kept).sum(0)

    both = plain(deep, hold=True)
    for _ in range(5):
        both(torch.randn(9, device=device))


def test_c01_arguments_that_require_grad_where_grad_is_off(device):
    both = plain(lambda x: x * 2)
    for _ in range(4):
        with torch.no_grad():
            both(torch.ones(3, device=device, requires_grad=True))
    assert counts(both) == (1, 1, 3)


@may_run_live
def test_c01_arguments_that_require_grad_and_a_function_that_turns_it_off(device):
    both = plain(torch.no_grad()(lambda x: x * 2))
    for _ in range(4):
        both(torch.ones(3, device=device, requires_grad=True))


def test_c01_two_signatures_in_turn_each_replay(device):
    both = plain(lambda x: x.sum(0) * 2)
    for _ in range(2):
        both(torch.randn(2, 3, device=device))
        both(torch.randn(5, 3, device=device))
    for _ in range(3):
        assert_replays(both, torch.randn(2, 3, device=device))
        assert_replays(both, torch.randn(5, 3, device=device))
