"""C2: random numbers are eager's, and so is the generator afterwards (`SideBySide` compares all generators after each call)."""

import pytest
import torch
import torch.nn.functional as F

import phonograph as pg
from phonograph.devices import device_for
from phonograph.testing import Pair, assert_same
from tests import forked
from tests.helpers import counts, may_run_live, plain, side_by_side

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
    [
        lambda x: x * torch.rand(()),
        lambda x: x + float(torch.rand(())),
        lambda x: x + torch.rand(3).to(x.device),
        lambda x: torch.rand_like(x, device="cpu"),
        lambda x: torch.randn_like(x, dtype=torch.float64, device="cpu"),
        lambda x: torch.randint_like(x, 1 << 20, device=torch.device("cpu")),
    ],
    ids=["a cpu scalar", "a number", "moved", "rand_like", "randn_like", "randint_like"],
)
def test_c02_numbers_drawn_on_the_cpu(device, draw):
    """With CUDA arguments these come from another generator and another device than the rest of the function."""
    both = plain(draw)
    results = [tuple(both(torch.ones(3, device=device)).recorded.tolist()) for _ in range(6)]
    assert len(set(results)) == 6


_FIRST = """
import random
import sys
import torch

loaded = "rich" in sys.modules
random.seed(1)
stood = random.getstate()
import phonograph as pg
from phonograph.shapes.progress import progress

recorded = pg.record(torch.nn.Linear(2, 2))
for _ in range(4):
    recorded(torch.ones(1, 2))
with progress("a bar", 1, shown=True) as advance:
    advance(1)
assert random.getstate() == stood
assert not loaded
"""


def test_c02_what_is_imported_to_record_draws_nothing():
    """rich draws from Python's generator when it is imported."""
    ended = forked.run(_FIRST)
    assert ended.returncode == 0, ended.stderr


@may_run_live
def test_c02_a_function_that_seeds(device):
    def seeds(x):
        torch.manual_seed(7)
        return x + torch.rand(4, device=device)

    both = plain(seeds)
    for _ in range(5):
        both(torch.zeros(4, device=device))


@may_run_live
@pytest.mark.filterwarnings("ignore:CUDA reports that you have")  # where there are several
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


@pytest.mark.parametrize("what", ["another is recorded", "memory is given back"])
def test_c02_a_replay_under_way_draws_its_own_numbers(cuda, what):
    """torch has one place per process where graphs read how far the generator is, and writes 0 there as a capture begins."""
    weight, x = torch.randn(4096, 4096, device=cuda) / 64, torch.randn(256, 4096, device=cuda)

    def slow(x):
        for _ in range(400):
            x = x @ weight
        return F.dropout(x, 0.5)

    f, large, small, other = map(pg.record, (slow, lambda x: x.repeat(128, 1).sum(), lambda x: x * 2, lambda x: F.dropout(x)))
    for g in (f, large, small, other):
        for _ in range(3 if g is not other else 1):
            g(x)
    assert pg.stats(f).replayed
    pg.reset(large)
    device, torch_state = device_for(cuda), torch.cuda.get_rng_state(cuda)
    pool, done = device._memory.anchor.handle, torch.cuda.Event()
    drawn = f(x)
    done.record()
    assert not done.query(), "it has ended before anything could happen"
    if what == "another is recorded":
        other(x)
        assert pg.stats(other).recorded == 1
    else:
        pg.reset(small)
        assert device._memory.anchor.handle != pool
    torch.cuda.set_rng_state(torch_state, cuda)
    assert torch.equal(drawn == 0, slow(x) == 0)
