"""C1-C5: results. What a call returns, draws, mutates and hands out is what eager would have, for as long as it is."""

import contextlib
import copy
import dataclasses
import gc
import itertools
import random
import typing
import warnings
from collections import OrderedDict, defaultdict, namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree

import phonograph as pg
from phonograph.devices.cuda import driver
from phonograph.testing import Pair, assert_matches_live, assert_no_new_recordings, assert_same, call
from tests.helpers import assert_replays, assert_settles, counts, may_run_live, plain, ramp, reasons, side_by_side

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


def _no_pointers(*_):
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


# ---------------------------------------------------------------------------------------------------
# C2: random numbers (the state of all generators is compared after each call by `SideBySide`)

DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "randn": lambda x: torch.randn(3, device=x.device) + torch.randn_like(x),
    "uniform": lambda x: torch.rand_like(x) + torch.empty_like(x).uniform_(-1, 1),
    "integers": lambda x: torch.randint(0, 100, (3,), device=x.device),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.3)),
    "permutation": lambda x: torch.randperm(9, device=x.device),
    "in place": lambda x: x.clone().normal_().exponential_(),
    "several kinds": lambda x: (torch.rand_like(x), F.dropout(x), torch.randint_like(x, 9), torch.randn_like(x)),
    "rrelu": lambda x: F.rrelu(-x, training=True),
    "multinomial": lambda x: torch.multinomial(x.abs() + 1, 2),
}


@may_run_live  # on CUDA `multinomial` asks the host
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_c02_draws_are_eagers_and_so_is_the_generator_afterwards(device, draw):
    both = plain(draw)
    results = [both(torch.ones(3, device=device)).recorded for _ in range(6)]
    assert len({str(r) for r in results}) > 1, "six calls drew the same numbers"


@pytest.mark.parametrize("draw", [DRAWS["dropout"], DRAWS["several kinds"]], ids=["dropout", "several kinds"])
def test_c02_draws_are_replayed_not_run_live(device, draw):
    both = plain(draw)
    for _ in range(7):
        both(torch.ones(3, device=device))
    assert counts(both) == (1, 1, 6)


def test_c02_eager_draws_between_the_calls(device):
    both = plain(lambda x: F.dropout(x, 0.5))
    for n in range(6):
        torch.rand(n, device=device)
        both(torch.ones(50, device=device))


def test_c02_reseeding_between_the_calls_repeats_the_numbers(device):
    both = plain(lambda x: torch.rand_like(x))
    x = torch.ones(5, device=device)
    drawn = []
    for _ in range(6):
        torch.manual_seed(123)
        drawn.append(both(x).recorded.tolist())
    assert drawn == [drawn[0]] * 6


def test_c02_a_generator_state_saved_and_restored_by_the_caller(device):
    both = plain(lambda x: torch.rand_like(x))
    x = torch.ones(5, device=device)
    for _ in range(3):
        both(x)
    generator = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
    saved = generator.get_state()
    first = both(x).recorded.clone()
    generator.set_state(saved)
    assert_same(both(x).recorded, first)


def test_c02_as_many_draws_as_the_shape_needs(device):
    both = plain(lambda x: F.dropout(x, 0.5) + torch.rand_like(x))
    for size in [3, 3, 3, 70, 70, 70, 3, 70, 3]:
        both(torch.ones(size, device=device))


def test_c02_two_recorded_functions_take_turns_on_one_generator(device):
    f, g = plain(lambda x: F.dropout(x, 0.5)), plain(lambda x: x + torch.randn_like(x))
    for _ in range(5):
        g(f(torch.ones(20, device=device)))


def test_c02_a_generator_of_its_own_in_the_closure(device):
    def make():
        generator = torch.Generator(device).manual_seed(5)
        return lambda x: x + torch.rand(4, generator=generator, device=device), generator

    both = side_by_side(make)
    for _ in range(6):
        both(torch.zeros(4, device=device))
    both.change(lambda generator: generator.manual_seed(99))
    for _ in range(3):
        both(torch.zeros(4, device=device))


def test_c02_a_generator_replaced_by_another_is_noticed(device):
    def make():
        holder = {"generator": torch.Generator(device).manual_seed(5)}
        return lambda x: x + torch.rand(4, generator=holder["generator"], device=device), holder

    both = side_by_side(make)
    for _ in range(4):
        both(torch.zeros(4, device=device))
    both.change(lambda holder: holder.update(generator=torch.Generator(device).manual_seed(77)))
    for _ in range(4):
        both(torch.zeros(4, device=device))


@may_run_live
def test_c02_a_generator_as_an_argument(device):
    both = plain(lambda x, generator: x + torch.rand(4, generator=generator, device=device))
    one, other = (Pair(*(torch.Generator(device).manual_seed(s) for _ in range(2))) for s in (1, 2))
    for generator in [one, one, one, other, other, other, one]:
        both(torch.zeros(4, device=device), generator)


@may_run_live
@pytest.mark.parametrize(
    "draw",
    [lambda x: x * torch.rand(()), lambda x: x + float(torch.rand(())), lambda x: x + torch.rand(3).to(x.device)],
    ids=["a cpu scalar", "a number", "moved"],
)
def test_c02_numbers_drawn_on_the_cpu(device, draw):
    """With CUDA arguments these come from another generator and another device than the rest of the function."""
    both = plain(draw)
    results = [tuple(both(torch.ones(3, device=device)).recorded.tolist()) for _ in range(6)]
    assert len(set(results)) == 6


@may_run_live
def test_c02_a_function_that_seeds(device):
    def seeds(x):
        torch.manual_seed(7)
        return x + torch.rand(4, device=device)

    both = plain(seeds)
    for _ in range(5):
        both(torch.zeros(4, device=device))


@may_run_live
def test_c02_a_function_that_forks_the_generator(device):
    def forks(x):
        with torch.random.fork_rng():
            noise = torch.rand(4, device=device)
        return x + noise

    both = plain(forks)
    for n in range(6):
        torch.rand(n, device=device)
        both(torch.zeros(4, device=device))


def test_c02_draws_that_depend_on_train_and_eval(device):
    def make():
        dropout = torch.nn.Dropout(0.5)
        return lambda x: dropout(x), dropout

    both = side_by_side(make)
    for training in [True, True, True, False, False, False, True, False]:
        both.change(lambda dropout, training=training: dropout.train(training))
        both(torch.ones(30, device=device))


# ---------------------------------------------------------------------------------------------------
# C3: arguments (what `SideBySide` passes is compared after each call)


def test_c03_an_argument_mutated_in_place_is_mutated_for_the_caller(device):
    both = plain(lambda x: x.add_(1).mul_(2).sum())
    for _ in range(7):
        both(torch.randn(4, device=device))
    assert counts(both) == (1, 1, 6)


def test_c03_an_argument_mutated_through_a_view(device):
    def through_views(x):
        x.view(-1)[::2].zero_()
        x[0].copy_(x[1])
        return x.t().sum(0)

    both = plain(through_views)
    for _ in range(6):
        both(torch.randn(3, 4, device=device))


@pytest.mark.parametrize(
    "view",
    [lambda b: b[::2], lambda b: b.t(), lambda b: b[1:3, 1:3], lambda b: b.diagonal(), lambda b: b[:, 2]],
    ids=["rows", "transposed", "window", "diagonal", "column"],
)
def test_c03_a_view_is_mutated_and_the_rest_of_its_base_is_not(device, view):
    both = plain(lambda x: x.add_(100).sum())
    for n in range(6):
        base = Pair.of(ramp(device, 4, 4, start=n))
        both(base.each(view))
        base.check("base of the argument")


def test_c03_an_expanded_argument_that_is_only_read(device):
    both = plain(lambda x: x * 2)
    for n in range(6):
        both(ramp(device, 3, start=n).expand(4, 3))


@may_run_live
def test_c03_writing_an_expanded_argument_raises_eagers_error(device):
    both = plain(lambda x: x.add_(1))
    for _ in range(5):
        with pytest.raises(RuntimeError, match="single memory location"):
            both(torch.ones(1, device=device).expand(3))


def test_c03_an_argument_that_is_not_mutated_is_never_touched(device):
    def busy(x):
        y = x.clone()
        for _ in range(10):
            y = y * 2 + x
        return y

    both = plain(busy)
    kept = [Pair.of(ramp(device, 16, start=n)) for n in range(8)]
    for pair in kept:
        both(pair)
    for n, pair in enumerate(kept):
        assert_same(pair.recorded, ramp(device, 16, start=n))


def test_c03_a_first_callers_tensor_does_not_become_a_slot(device):
    """Neither later calls write it, nor does what its owner does with it later reach the function."""
    both = plain(lambda x: x + 1)
    first = Pair.of(torch.zeros(3, device=device))
    both(first)
    both(first)
    both(torch.full((3,), 5.0, device=device))
    assert first.recorded.tolist() == [0.0] * 3
    first.each(lambda t: t.fill_(9))
    assert both(torch.full((3,), 6.0, device=device)).recorded.tolist() == [7.0] * 3


def test_c03_a_mutated_argument_is_returned_as_itself(device):
    both = plain(lambda x: x.mul_(2))
    for _ in range(6):
        x = Pair.of(torch.ones(3, device=device))
        assert both(x).recorded is x.recorded


def test_c03_several_mutated_arguments_in_containers(device):
    def mutates(state, batch):
        for name in state:
            state[name].add_(batch[0])
        batch[1].zero_()

    both = plain(mutates)
    for n in range(6):
        both({"a": ramp(device, 3), "b": ramp(device, 3, start=n)}, [ramp(device, 3, start=n), ramp(device, 2)])


def test_c03_mutation_accumulates_over_calls_in_the_callers_tensor(device):
    both = plain(lambda total, x: total.add_(x))
    total = Pair.of(torch.zeros(3, device=device))
    for n in range(1, 8):
        both(total, torch.ones(3, device=device))
        assert total.recorded.tolist() == [n] * 3


def test_c03_an_out_argument(device):
    both = plain(lambda x, out: torch.mul(x, 2, out=out))
    for n in range(6):
        both(ramp(device, 3, start=n), torch.empty(3, device=device))


def test_c03_mutation_is_seen_by_autograd(device):
    """A tensor saved for backward and then mutated by a replay must fail its backward, as in eager."""
    f = pg.record(lambda x: x.add_(1), warmup=1)
    for _ in range(5):
        x = torch.ones(3, device=device)
        version = x._version
        loss = (torch.ones(3, device=device, requires_grad=True) * x).sum()
        with torch.no_grad():
            f(x)
        assert x._version > version
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@may_run_live
def test_c03_containers_that_the_function_changes(device):
    def changes(results, x):
        results["sum"] = x.sum()
        results["inputs"].append(x * 2)

    both = plain(changes)
    for n in range(6):
        results = Pair.of({"sum": None, "inputs": []})
        both(results, ramp(device, 3, start=n))
        assert len(results.recorded["inputs"]) == 1


@may_run_live
@pytest.mark.parametrize(
    "change",
    [lambda x: x.t_(), lambda x: x.unsqueeze_(0), lambda x: x.resize_(2, 2), lambda x: x.set_(x[:1].clone())],
    ids=["t_", "unsqueeze_", "resize_", "set_"],
)
def test_c03_changes_of_an_arguments_metadata(device, change):
    def changes(x):
        change(x)
        return x * 2

    both = plain(changes)
    for n in range(6):
        both(ramp(device, 2, 3, start=n))


@may_run_live
def test_c03_the_data_of_an_argument_is_replaced(device):
    def replaces(x):
        x.data = x * 2

    both = plain(replaces)
    for n in range(6):
        both(ramp(device, 3, start=n))


# ---------------------------------------------------------------------------------------------------
# C4: structure (types, identity and overlap are compared by `SideBySide`)

Point = namedtuple("Point", "x y")


class Typed(typing.NamedTuple):
    value: torch.Tensor
    note: str = "none"


@dataclasses.dataclass
class Prediction:
    logits: torch.Tensor
    hidden: list[torch.Tensor]
    loss: torch.Tensor | None = None
    name: str = "p"


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: torch.Tensor
    flag: bool


STRUCTURES = {
    "one": lambda x: x + 1,
    "none": lambda x: None,
    "tuple": lambda x: (x + 1, x + 2),
    "single": lambda x: (x + 1,),
    "list": lambda x: [x + 1, [x + 2, []], ()],
    "dict": lambda x: {"b": x + 1, "a": {"c": x + 2, 3: None}, "": {}},
    "ordered": lambda x: OrderedDict(z=x + 1, a=x + 2),
    "defaultdict": lambda x: defaultdict(list, a=[x + 1]),
    "namedtuple": lambda x: Point(x + 1, Typed(x + 2)),
    "dataclass": lambda x: Prediction(x + 1, [x + 2, x + 3], name="q"),
    "frozen dataclass": lambda x: Frozen(x + 1, True),
    "python values": lambda x: (x + 1, 1, True, 1.0, -0.0, "text", None, b"b", 2 + 3j, x.shape, x.dtype, x.device, ...),
    "set": lambda x: (x + 1, {1, 2}, frozenset({"a"}), range(3), slice(1, 2)),
    "torch's own tuples": lambda x: (x.max(0), x.sort()),
    "empty": lambda x: ((), [], {}),
    "itself": lambda x: x,
    "itself twice": lambda x: [x, x],
    "a view of itself": lambda x: (x[1:], x.view(2, 3), x.detach()),
    "the same tensor twice": lambda x: [x + 1] * 2,
    "views of one result": lambda x: _views_of_one_result(x * 2),
    "only a view of a temporary": lambda x: (x * 2)[1:3],
    "a tensor and its window": lambda x: [y := x * 2, y[2:4], y],
    "not contiguous": lambda x: (x * 2).view(2, 3).t(),
    "expanded": lambda x: (x[:1] * 2).expand(4),
    "no copy needed": lambda x: (x.to(x.dtype), x.contiguous(), x.float()),
    "channels last": lambda x: x.view(1, 2, 3, 1).expand(1, 2, 3, 2).to(memory_format=torch.channels_last) * 2,
}


def _views_of_one_result(y):
    return y, y.view(2, 3), y[::2], y.view(3, 2).t()


@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
def test_c04_results_keep_their_structure(device, structure):
    both = plain(structure, hold=True)
    for n in range(5):
        both(ramp(device, 6, start=n))


@may_run_live
def test_c04_a_result_with_attributes(device):
    def f(x):
        y = x * 2
        y.scale = 2
        return y

    recorded = pg.record(f)
    for n in range(4):
        assert recorded(torch.full((3,), float(n), device=device)).scale == 2


@may_run_live
@pytest.mark.parametrize("lazily", [lambda x: torch.complex(x, x).conj(), lambda x: torch.complex(x, x).conj().imag])
def test_c04_lazily_conjugated_and_negated_results(device, lazily):
    both = plain(lazily, hold=True)
    for n in range(5):
        result = both(ramp(device, 6, start=n))
        result.each(lambda r: (r.is_conj(), r.is_neg())).check()


def test_c04_mutating_a_result_that_is_a_view_of_an_argument_mutates_the_argument(device):
    both = plain(lambda x: (x * 2, x[1:]))
    for _ in range(5):
        x = Pair.of(torch.zeros(3, device=device))
        both(x).each(lambda result: result[1].fill_(4))
        assert x.recorded.tolist() == [0.0, 4.0, 4.0]


ALIASES = {
    "detached": lambda x, state: (y := x * 2, y.detach()),
    "detached before it": lambda x, state: (y := x * 2, y.detach())[::-1],
    "its data": lambda x, state: (y := x * 2, y.data),
    "a part": lambda x, state: (y := x * 2, y[1:]),
    "a part before it": lambda x, state: (y := x * 2, y[1:3])[::-1],
    "parts of what is no result": lambda x, state: (lambda y: (y[1:3], y.view(2, 3).t()))(x * 2),
    "a part, detached, and a part of that": lambda x, state: (y := x * 2, d := y[2:].detach(), d[1:]),
    "part of an argument": lambda x, state: (x[1:], x.view(2, 3).t()),
    "an argument, detached": lambda x, state: (x.detach(), x[1:].detach()),
    "parts of an argument, detached": lambda x, state: ((d := x.detach())[:3], d[2:]),
    "an argument's data": lambda x, state: (x.data, x.data[1:]),
    "part of what is outside": lambda x, state: (x + 1, state[1:], state),
    "detached from what is outside": lambda x, state: (state.detach(), state.detach()[2:], x),
    "data of what is outside": lambda x, state: (x + 1, state.data),
    "all of them": lambda x, state: (x[1:], x.detach(), state[2:], y := x * 2, y[1:], y.detach(), y.data),
}


def write_with_history(tensors, written, w):
    tensors[written].mul_(w)
    sum((t * (i + 2) * w).sum() for i, t in enumerate(tensors)).backward()


def write_what_is_saved(tensors, written, w):
    loss = sum((t * w).sum() for t in tensors)
    with torch.no_grad():
        tensors[written].add_(1)
    loss.backward()


def detach_in_place(tensors, written, w):
    tensors[written].detach_()


@pytest.mark.parametrize("write", [write_with_history, write_what_is_saved, detach_in_place])
@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
def test_c04_results_on_one_memory_are_to_autograd_what_they_are_live(device, alias, write):
    def make():
        state = torch.zeros(6, device=device)
        return (lambda x: alias(x, state)), state

    def what_happens(f, state, written):
        state.detach_().zero_()
        x, w = ramp(device, 6), torch.full((), 3.0, device=device, requires_grad=True)
        tensors = [*f(x), x, state]
        seen: list[typing.Any] = [[[t._base is other for other in tensors] for t in tensors]]
        try:
            write(tensors, min(written, len(tensors) - 1), w)
        except RuntimeError as e:
            seen.append(str(e)[:40])
        return [*seen, w.grad, [t.requires_grad for t in tensors], tensors]

    (live, own), (function, other) = make(), make()
    recorded = pg.record(function, warmup=1)
    recorded(ramp(device, 6))
    for written in range(9):
        assert_same(what_happens(recorded, other, written), what_happens(live, own, written))
    assert pg.stats(recorded).replayed == 9, pg.explain(recorded)


@pytest.mark.parametrize("outside", [False, True], ids=["an argument", "a parameter"])
def test_c04_a_view_that_was_made_without_grad_must_not_be_written(device, outside):
    p = torch.nn.Parameter(torch.ones(3, device=device))
    f = pg.record(torch.no_grad()(lambda x: (x + 1, (p if outside else x)[1:])), warmup=1)
    for _ in range(5):
        view = f(torch.ones(3, device=device, requires_grad=True))[1]
        with pytest.raises(RuntimeError, match="A view was created in no_grad mode"):
            view.add_(1)
    assert pg.stats(f).replayed == 4


@may_run_live
@pytest.mark.parametrize("outside", [False, True], ids=["an argument", "a closure's tensor"])
@pytest.mark.parametrize("view", [torch.view_as_real, lambda x: x.view(torch.int32), lambda x: x.imag, lambda x: x[1:].conj()])
def test_c04_autograd_notices_what_is_written_through_a_view_of_another_dtype(device, view, outside):
    state = torch.ones(2, dtype=torch.cfloat, device=device)
    f = pg.record(lambda x: (view(state if outside else x), x * 2), warmup=1)
    for _ in range(5):
        x = torch.ones(2, dtype=torch.cfloat, device=device)
        w = torch.ones(2, dtype=torch.cfloat, device=device, requires_grad=True)
        loss = ((state if outside else x) * w).real.sum()
        seen = f(x)[0]
        assert_same(seen, view(state if outside else x))
        seen.mul_(3)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_c04_state_returned_is_the_state_itself(device):
    def make():
        state = torch.zeros(2, 3, device=device)
        return lambda x: (state, state.t(), state[0], state.add_(x)), state

    both = side_by_side(make)
    for _ in range(5):
        result = both(torch.ones((), device=device)).recorded
        assert result[0] is both.state
        assert result[3] is both.state


def test_c04_a_parameter_returned_is_the_parameter(device):
    def make():
        layer = torch.nn.Linear(2, 2, device=device).requires_grad_(False)
        return lambda x: (layer.weight, layer(x)), layer

    both = side_by_side(make)
    for _ in range(5):
        assert both(torch.ones(1, 2, device=device)).recorded[0] is both.state.weight


@may_run_live
def test_c04_an_argument_container_returned_is_that_container(device):
    def same_dict(d):
        d["x"].add_(1)
        return d

    f = pg.record(same_dict, warmup=1)
    for _ in range(5):
        given = {"x": torch.zeros(2, device=device)}
        assert f(given) is given


class Held:
    """A registered class; what it holds besides its tensor, pytree does not look into."""

    def __init__(self, value, more):
        self.value, self.more = value, more


_pytree.register_pytree_node(Held, lambda held: ([held.value], held.more), lambda parts, more: Held(*parts, more))


def test_c04_a_default_factory_is_part_of_an_argument(device):
    both = plain(lambda x, d: (x * (2 if d.default_factory is list else 3), d.default_factory, defaultdict(d.default_factory)))
    for kind in (list, list, list, int, int, None, list):
        both(ramp(device, 2), defaultdict(kind, a=1))
    assert counts(both)[2] == 4


@may_run_live
def test_c04_a_key_that_the_call_has_made(device):
    f, g = pg.record(lambda x: {x * 2: 1, "plain": x}, warmup=1), pg.record(lambda x: {(x, 1): x + 1}, warmup=1)
    kept = [f(torch.full((1,), float(n), device=device)) for n in range(5)]
    assert [next(iter(result)).item() for result in kept] == [2.0 * n for n in range(5)]
    for _ in range(4):
        x = torch.ones(1, device=device)
        assert next(iter(g(x)))[0] is x
    assert "names or numbers as keys" in reasons(f)


def test_c04_keys_that_are_values(device):
    both = plain(lambda x: {1: x + 1, (2, "a"): x + 2, torch.float32: x, None: {True: x * 2}})
    for n in range(5):
        both(ramp(device, 3, start=n))
    assert counts(both) == (1, 1, 4)


@may_run_live
def test_c04_what_a_registered_class_holds_besides_its_tensors(device):
    tensors = pg.record(lambda x: Held(x, x * 2), warmup=1)
    kept = [tensors(torch.full((1,), float(n), device=device)) for n in range(5)]
    assert [held.more.item() for held in kept] == [2.0 * n for n in range(5)]
    lists = pg.record(lambda x: Held(x * 2, []), warmup=1)
    for n in range(5):
        held = lists(torch.ones(1, device=device))
        held.more.append(n)
        assert held.more == [n]
    names = pg.record(lambda x: Held(x * 2, ("a", 1)), warmup=1)
    for _ in range(5):
        assert names(torch.ones(1, device=device)).more == ("a", 1)
    assert pg.stats(names).replayed == 4


@may_run_live
def test_c03_what_a_registered_class_or_a_set_holds_is_changed_once(device):
    def changes(x, held, numbers):
        held.more.append(len(held.more))
        numbers.add(len(numbers))
        return x + 1

    f = pg.record(changes, warmup=1)
    for _ in range(4):
        held, numbers = Held(torch.ones(1, device=device), []), {"a"}
        f(torch.ones(1, device=device), held, numbers)
        assert held.more == [0]
        assert numbers == {"a", 1}


@may_run_live
def test_c04_a_set_returned_is_that_set(device):
    mine: set[int] = {1}

    def twice(x):
        made = {1}
        return x + 1, made, made

    outside, argument = pg.record(lambda x: (x + 1, mine), warmup=1), pg.record(lambda x, s: (x + 1, s), warmup=1)
    twice = pg.record(twice, warmup=1)
    for n in range(4):
        x, given = torch.ones(1, device=device), {1}
        assert outside(x)[1] is mine
        mine.add(10 + n)
        assert argument(x, given)[1] is given
        _, first, second = twice(x)
        assert first is second


def test_c04_each_call_makes_new_containers(device):
    both = plain(lambda x: {"values": [x + 1], "extra": {}})
    for _ in range(5):
        result = both(torch.ones(2, device=device)).recorded
        assert len(result["values"]) == 1
        assert result["extra"] == {}
        result["values"].append("mine")
        result["extra"]["mine"] = 1


def test_c04_python_values_computed_from_shapes(device):
    both = plain(lambda x: (x.shape[0] * 2, x.numel() / 2, f"{tuple(x.shape)}", x.sum() / len(x)))
    for size in [2, 2, 2, 5, 5, 5, 2, 5]:
        both(torch.ones(size, 3, device=device))


def test_c04_results_computed_without_grad_need_none(device):
    def make():
        layer = torch.nn.Linear(2, 2, device=device)
        return torch.no_grad()(lambda x: layer(x)), layer

    both = side_by_side(make)
    for _ in range(5):
        result = both(torch.ones(1, 2, device=device)).recorded
        assert not result.requires_grad
        assert result.is_leaf


@may_run_live
def test_c04_results_computed_with_grad_carry_it(device):
    def make():
        layer = torch.nn.Linear(2, 2, device=device)
        return lambda x: layer(x), layer

    both = side_by_side(make)
    for _ in range(5):
        both(torch.ones(1, 2, device=device)).each(lambda result: result.sum().backward())
        both.check()


@may_run_live
def test_c04_detaching_and_requiring_grad_in_the_function(device):
    both = plain(lambda x: (x.detach() * 2).requires_grad_())
    for n in range(5):
        both(ramp(device, 3, start=n)).each(lambda result: (result**2).sum().backward())


def test_c04_results_can_be_copied_and_saved_like_any_tensor(device, tmp_path):
    both = plain(lambda x: (x * 2, x.view(2, 3)[1]))
    for n in range(5):
        result = both(ramp(device, 6, start=n)).recorded
        assert_same(copy.deepcopy(result), result)
        torch.save(result, tmp_path / "result.pt")
        assert_same(torch.load(tmp_path / "result.pt"), result)


# ---------------------------------------------------------------------------------------------------
# C5: results that are held

HOLDS = {
    "itself": lambda y: y,
    "a view": lambda y: y[1:3],
    "a transposed view": lambda y: y.view(2, 3).t(),
    "a detached alias": lambda y: y.detach(),
    "data": lambda y: y.data,
    "a dlpack import": lambda y: torch.from_dlpack(y),
    "a parameter on it": lambda y: torch.nn.Parameter(y, requires_grad=False),
    "another tensor set to it": lambda y: torch.empty(0, device=y.device).set_(y),
    "its storage": lambda y: (y.untyped_storage(), y.storage_offset(), y.shape),
    "in an object": lambda y: Prediction(y, []),
    "in a closure": lambda y: lambda: y,
}


def _held_value(held):
    if callable(held):
        return held()
    if isinstance(held, Prediction):
        return held.logits
    if isinstance(held, tuple):
        return torch.empty(0, device=held[0].device).set_(*held, (1,))
    return held


@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS)
def test_c05_output_held_keeps_its_value(device, hold):
    f = pg.record(lambda x: (x * 2).sin() + x, warmup=1)
    held, expected = [], []
    for n in range(8):
        held.append(hold(f(ramp(device, 6, start=n))))
        x = ramp(device, 6, start=n)
        expected.append(_held_value(hold((x * 2).sin() + x)))
        for one, other in zip(held, expected, strict=True):
            assert_same(_held_value(one), other)


def test_c05_output_held_as_a_numpy_array_keeps_its_value():
    numpy = pytest.importorskip("numpy")
    f = pg.record(lambda x: x * 2, warmup=1)
    arrays = [f(torch.full((4,), float(n))).numpy() for n in range(8)]
    for n, array in enumerate(arrays):
        numpy.testing.assert_array_equal(array, [2.0 * n] * 4)


def test_c05_one_output_of_many_is_held(device):
    both = plain(lambda x: (x + 1, x + 2, [x + 3, x + 4]))
    held = []
    for n in range(8):
        result = both(ramp(device, 3, start=10 * n))
        held.append(result.each(lambda r: r[2][0]))
        del result
        for pair in held:
            pair.check()


def test_c05_output_fed_back_as_input(device):
    both = plain(lambda x: x * 2 + 1)
    x = Pair.of(torch.ones(4, device=device))
    for n in range(1, 12):
        x = both(x)
        assert x.recorded.tolist() == [2.0 ** (n + 1) - 1] * 4
    assert counts(both)[2] >= 8


def test_c05_output_fed_back_while_all_earlier_ones_are_held(device):
    both = plain(lambda x: (x * 2 + 1).cos(), hold=True)
    x = Pair.of(torch.ones(4, device=device))
    for _ in range(12):
        x = both(x)


def test_c05_output_fed_back_and_mutated_in_place(device):
    both = plain(lambda x: (x.add_(1), x * 2)[1], hold=True)
    x = Pair.of(torch.ones(4, device=device))
    for _ in range(10):
        x = both(x)


def test_c05_output_fed_back_together_with_its_predecessor(device):
    both = plain(lambda x, previous: x + previous, hold=True)
    previous, x = Pair.of(torch.ones(3, device=device)), Pair.of(torch.ones(3, device=device))
    for _ in range(10):
        previous, x = x, both(x, previous)
    assert x.recorded.tolist() == [144.0] * 3


def test_c05_two_functions_interleaved_with_all_outputs_held(device):
    f, g = plain(lambda x: x.sin() * 3, hold=True), plain(lambda x: x.cos() + 3, hold=True)
    for n in range(8):
        y = f(ramp(device, 5, start=n))
        g(y if n % 2 else ramp(device, 5, start=-n))
        f.check()


def test_c05_every_second_output_is_held(device):
    both = plain(lambda x: x * 3 - 1)
    held = []
    for n in range(12):
        result = both(ramp(device, 4, start=n))
        if n % 2:
            held.append(result)
        for pair in held:
            pair.check()


def test_c05_outputs_held_and_released_in_random_order(device):
    f, g = plain(lambda x: (x * 2, x + 1)), plain(lambda x: x.flip(0) * 2)
    held: list[Pair] = []
    for n in range(60):
        both = random.choice([f, g])
        result = both(ramp(device, random.choice([3, 5]), start=n))
        held.append(result.each(lambda r: r[random.Random(n).randrange(2)] if isinstance(r, tuple) else r))
        while held and random.random() < 0.5:
            held.pop(random.randrange(len(held)))
        del result
        for pair in held:
            pair.check()


def test_c05_outputs_held_by_a_graph_of_autograd(device):
    """Autograd saved the output; no Python name holds it."""
    f = pg.record(torch.no_grad()(lambda x: x * 2), warmup=1)
    weights = [torch.ones(3, device=device, requires_grad=True) for _ in range(6)]
    losses = [(w * f(torch.full((3,), float(n), device=device))).sum() for n, w in enumerate(weights)]
    for n, (w, loss) in enumerate(zip(weights, losses, strict=True)):
        loss.backward()
        assert w.grad.tolist() == [2.0 * n] * 3


def test_c05_an_output_that_its_owner_mutates(device):
    """It is the caller's own: nothing of it reaches later calls, and later calls do not reach it."""
    both = plain(lambda x: x + 1)
    mine = []
    for n in range(8):
        y = both(torch.zeros(3, device=device)).recorded
        assert y.tolist() == [1.0] * 3
        mine.append(y.fill_(100 + n))
    assert [y[0].item() for y in mine] == [100.0 + n for n in range(8)]


OWNERS = {
    "resize_": lambda y: y.resize_(60).fill_(3),
    "resize_ to nothing": lambda y: y.resize_(0),
    "data": lambda y: setattr(y, "data", torch.full((7,), 3.0, device=y.device)),
    "set_": lambda y: y.set_(torch.full((7,), 3.0, device=y.device)),
    "t_": lambda y: y.unsqueeze_(0).t_().mul_(2),
    "share_memory_": lambda y: y.share_memory_().fill_(3),
    "requires_grad_": lambda y: (y.requires_grad_() * 2).sum().backward(),
    "storage": lambda y: y.untyped_storage().resize_(400),
}


# A large output lies in the recording's memory, which torch offers no way to resize: docs/limits.md.
RESIZES = pytest.mark.xfail(raises=RuntimeError, strict=True, reason="a replayed output cannot be made larger in place")


@pytest.mark.parametrize("own", OWNERS.values(), ids=OWNERS)
def test_c05_whatever_an_owner_does_with_an_output(device, own, results_are, request):
    if results_are == "leased" and own in (OWNERS["resize_"], OWNERS["storage"]):
        request.applymarker(RESIZES)
    f, g = plain(lambda x: x * 2, hold=True), plain(lambda x: x.cos(), hold=True)
    for n in range(8):
        f(ramp(device, 5, start=n)).each(own)
        g(ramp(device, 5, start=n))
        f.check()


def test_c05_an_output_held_across_another_signature_and_back(device):
    both = plain(lambda x: x * 2, hold=True)
    for size in [3, 3, 3, 8, 8, 8, 3, 8, 3]:
        both(ramp(device, size, start=size))


def test_c05_an_output_held_while_other_functions_are_recorded(device):
    f = plain(lambda x: x * 2)
    for _ in range(3):
        y = f(ramp(device, 100))
    for k in range(5):
        other = plain(lambda x, k=k: (x + k).sin() * x)
        for _ in range(3):
            other(ramp(device, 100, start=k))
            y.check()


def test_c05_a_held_output_and_its_view_stay_one(device):
    f = pg.record(lambda x: x * 2, warmup=1)
    kept = [f(torch.full((3,), float(n), device=device)) for n in range(4)]
    views = [y[1:] for y in kept]
    for n in range(4, 8):
        f(torch.full((3,), float(n), device=device))
    for n, (y, view) in enumerate(zip(kept, views, strict=True)):
        y.fill_(-n)
        assert view.tolist() == [-n] * 2, "a tensor and its view were taken apart"


def test_c05_keeping_only_the_last_output_settles(device):
    both = plain(lambda x: x * 2)
    last = None
    for n in range(6):
        last = both(ramp(device, 3, start=n))
    with assert_no_new_recordings(both.recorded):
        for n in range(10):
            last = both(ramp(device, 3, start=n))
    last.check()
    assert_replays(both, ramp(device, 3))


def test_c05_a_dropped_output_is_not_held(device):
    both = plain(lambda x: x * 2)
    assert_settles(both, ramp(device, 3))
    assert counts(both) == (1, 1, 6)


def read_by_arithmetic(y):
    return y + 1


def read_by_listing(y):
    return y.tolist()


def read_by_printing(y):
    return repr(y)


def read_by_item(y):
    return y[0].item()


def read_by_clone(y):
    return y.clone()


def read_by_torch_function(y):
    return torch.stack([y, y])


BORROWED_READS = [
    read_by_arithmetic, read_by_listing, read_by_printing, read_by_item, read_by_clone, read_by_torch_function,
]  # fmt: skip


@pytest.mark.parametrize("read", BORROWED_READS)
def test_c05_a_borrowed_output_raises_once_it_was_overwritten(device, read):
    f = pg.record(lambda x: x * 2, warmup=1, outputs="borrow")
    for n in range(3):
        f(torch.full((3,), float(n), device=device))
    borrowed = f(torch.full((3,), 7.0, device=device))
    f(torch.full((3,), 8.0, device=device))
    with pytest.raises(pg.StaleOutput):
        read(borrowed)


def test_c05_a_borrowed_output_is_right_until_the_next_call(device):
    f = pg.record(lambda x: (x * 2, x + 1), warmup=1, outputs="borrow")
    for n in range(7):
        x = ramp(device, 3, start=n)
        for result, right in zip(f(x), (x * 2, x + 1), strict=True):
            assert result.tolist() == right.tolist()
            assert_same((result + 0).as_subclass(torch.Tensor), right)
    assert counts(f) == (1, 1, 6)


@pytest.mark.parametrize(
    "alias", [lambda y: y[1:], lambda y: y.detach(), lambda y: y.view(3, 1)], ids=["slice", "detach", "view"]
)
def test_c05_a_view_of_a_borrowed_output_raises_too(device, alias):
    f = pg.record(lambda x: x * 2, warmup=1, outputs="borrow")
    for n in range(3):
        f(torch.full((3,), float(n), device=device))
    borrowed = alias(f(torch.full((3,), 7.0, device=device)))
    f(torch.full((3,), 8.0, device=device))
    with pytest.raises(pg.StaleOutput):
        borrowed.tolist()


def test_c05_a_borrowed_output_that_was_cloned_in_time(device):
    f = pg.record(lambda x: x * 2, warmup=1, outputs="borrow")
    clones = [f(torch.full((3,), float(n), device=device)).clone() for n in range(6)]
    assert [c[0].item() for c in clones] == [2.0 * n for n in range(6)]


def test_c05_a_borrowed_output_fed_back(device):
    f = pg.record(lambda x: x * 2, warmup=1, outputs="borrow")
    x = torch.ones(3, device=device)
    for _ in range(6):
        x = f(x)
    assert x.tolist() == [64.0] * 3


def test_c05_a_call_that_follows_many_dropped_ones_by_the_helper_for_users(device):
    calls = [call(ramp(device, 4, start=n), scale=2.0) for n in range(5)]
    both = assert_matches_live(lambda: lambda x, scale: x * scale, calls, hold=False)
    gc.collect()
    assert counts(both) == (1, 1, 4)


def test_c03_a_refused_call_writes_two_arguments_that_share_memory_exactly_once(device):
    """Both arguments are an earlier result, and each is written: what the failed capture did must be taken back."""
    make = pg.record(lambda x: x * 2, warmup=1)
    write = pg.record(lambda a, b: (a.add_(1), b[:1].zero_())[0], warmup=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pg.RunsLive)
        for _ in range(4):
            y = make(ramp(device, 4))
            assert_same(write(y, y.view(4)), torch.tensor([0.0, 5.0, 7.0, 9.0], device=device))


@pytest.mark.parametrize("parameter", [False, True], ids=["an earlier result", "a parameter"])
def test_c03_autograd_notices_an_argument_that_a_replay_writes_in_place(device, parameter):
    make = pg.record(lambda x: x * 2, warmup=1)
    write = pg.record(torch.no_grad()(lambda a: a.add_(1).sum()), warmup=1)
    kept = torch.nn.Parameter(ramp(device, 4))
    for _ in range(5):
        a = kept if parameter else make(ramp(device, 4))
        w = torch.ones(4, device=device, requires_grad=True)
        product = (w * a).sum()
        write(a)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


def test_c10_verify_from_the_first_replay_on_with_a_gradient_that_is_made_anew(device):
    weight = torch.ones(4, device=device, requires_grad=True)

    def step(x):
        (weight * x).sum().backward()
        return x + 1

    f = pg.record(step, warmup=1, verify=1)
    for n in range(5):
        weight.grad = None
        f(ramp(device, 4, start=n))
        assert_same(weight.grad, ramp(device, 4, start=n))


@may_run_live
def test_c04_a_view_made_without_gradients_whose_base_is_written(device):
    """torch does not tell where such a view comes from."""
    ours, theirs = (torch.ones(4, device=device, requires_grad=True) for _ in range(2))

    def f(p, x):
        with torch.no_grad():
            view = p[1:]
            p.add_(x)
        return view

    recorded = pg.record(lambda x: f(ours, x), warmup=1)
    for n in range(4):
        x = ramp(device, 1, start=n)
        assert_same(recorded(x).detach(), f(theirs, x).detach())


@pytest.mark.parametrize("shares", [False, True], ids=["data", "detach"])
@pytest.mark.parametrize("whole", [False, True], ids=["a part", "whole"])
@pytest.mark.parametrize("of", ["argument", "closure", "result"])
def test_c04_who_has_saved_a_tensor_hears_of_writes_through_detach_and_not_through_data(device, of, whole, shares):
    outside = ramp(device, 4)

    def f(x):
        base = {"argument": x, "closure": outside, "result": x * 2}[of]
        alias = base.detach() if shares else base.data
        return base, alias if whole else alias[1:]

    recorded = pg.record(f, warmup=1)
    weight = torch.full((4,), 2.0, device=device, requires_grad=True)
    for n in range(5):
        base, alias = recorded(ramp(device, 4, start=n))
        loss = (base * weight).sum()
        alias.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace") if shares else contextlib.nullcontext():
            loss.backward()
    assert pg.stats(recorded).replayed == 4


@pytest.mark.parametrize("way", [lambda x: x.detach(), lambda x: x.detach()[1:], lambda x: x[1:].detach()],
                         ids=["whole", "a view of it", "of a view"])  # fmt: skip
def test_c04_an_argument_detached_beside_a_result_with_a_history(device, way):
    """Writing it is heard by whoever has saved the argument."""
    recorded = pg.record(lambda x: (way(x), x * 2), warmup=1)
    for n in range(5):
        x = ramp(device, 4, start=n).requires_grad_()
        detached, _ = recorded(x)
        before = (x**2).sum()
        detached.mul_(3)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            before.backward()
    assert pg.stats(recorded).replayed == 4


def test_c07_attributes_of_ones_own_with_the_names_of_what_tensors_tell(device):
    class Wrapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self._base, self._version, self.is_shared = torch.nn.Linear(4, 4).to(device), 2.0, True

        def forward(self, x):
            return self._base(x) * self._version * self.is_shared

    module = pg.record(Wrapped(), warmup=1)
    for n in range(4):
        module(ramp(device, 4, start=n))
    assert pg.stats(module).replayed == 3


@pytest.mark.parametrize("count", [1, 2])
def test_c07_results_made_in_inference_mode_inside(device, count):
    """They are inference tensors also where replays copy them to memory that is made outside of that mode."""

    def function(x):
        with torch.inference_mode():
            y = x * 2, x + 1
        return y[0] if count == 1 else y

    recorded = pg.record(function)
    for n in range(5):
        x = torch.full((3,), n + 1.0, device=device)
        ours, theirs = recorded(x), function(x)
        assert_same(ours, theirs)
        for a, b in [(ours, theirs)] if count == 1 else zip(ours, theirs, strict=True):
            assert a.is_inference() is b.is_inference()
    assert pg.stats(recorded).replayed >= 3


@may_run_live
def test_c04_a_result_that_knows_no_other_names(device):
    class Bunch(dict):
        __getattr__ = dict.__getitem__

    f = pg.record(lambda x: Bunch(y=x * 2), warmup=1)
    for n in range(4):
        found = f(torch.full((3,), float(n), device=device))
        assert type(found) is Bunch
        assert found.y.tolist() == [n * 2.0] * 3
    assert "itself failed" not in pg.explain(f)


PRODUCTS = {"prod": lambda x: x.prod(), "dim": lambda x: x.prod(1), "cumprod": lambda x: x.cumprod(1)}


@may_run_live
@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_c01_a_gradient_for_which_torch_takes_another_formula_while_it_is_watched(device, product):
    w = torch.ones(4, 9, dtype=torch.float64, device=device, requires_grad=True)

    def step(x):
        (grad,) = torch.autograd.grad(product(w + x).sin().sum(), w)
        return grad

    f = pg.record(step)
    for n in range(6):
        x = torch.rand(4, 9, dtype=torch.float64, device=device) - (n % 2) * torch.eye(4, 9, device=device)
        assert_same(f(x), step(x))
    assert pg.stats(f).replayed == 0
    g = pg.record(product)
    with torch.no_grad():
        for _ in range(3):
            assert_same(g(w), product(w))
    assert pg.stats(g).replayed == 2
