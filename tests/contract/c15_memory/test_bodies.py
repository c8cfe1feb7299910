"""C15: bodies of branches have their memory from the pool, and use it one after the other."""

import torch

import phonograph as pg
from phonograph.devices import device_for
from tests.helpers import assert_replays, assert_settles, counts, plain, ramp

SIZE = 1 << 20  # elements


def work(x, n):
    """Takes the memory of n tensors at least."""
    parts = [x * i for i in range(1, n + 1)]
    return torch.stack(parts).sum(0)[:8].clone()


def footprint(f, *args):
    for _ in range(3):
        f(*args)
    (mine,) = [r for r in device_for(args[0].device).pool.recordings if r.name == f.__qualname__]
    return mine.footprint.nbytes


def test_c15_branches_need_the_memory_of_the_worst_path(device):
    def most(x, i):
        return work(x, 12)

    def three(x, i):
        return pg.switch(i, [lambda x: work(x, 4), lambda x: work(x, 12), lambda x: work(x, 8)], x)

    x, i = torch.ones(SIZE, device=device), torch.tensor(1, device=device)
    alone = footprint(pg.record(most, warmup=1), x, i)
    assert footprint(pg.record(three, warmup=1), x, i) <= alone * 1.05


def test_c15_loops_need_the_memory_of_one_turn(device):
    def one(x, n):
        return work(x, 6)

    def loop(x, n):
        return pg.repeat(n, lambda y: y + work(x, 6), x[:8].clone())

    x, n = torch.ones(SIZE, device=device), torch.tensor(3, device=device)
    alone = footprint(pg.record(one, warmup=1), x, n)
    assert footprint(pg.record(loop, warmup=1), x, n) <= alone * 1.05


def test_c15_what_bodies_allocate_lies_in_the_pool(cuda):
    """Else it would be somebody else's at the next allocation."""

    def f(x, pred):
        y = pg.cond(pred, lambda x: (x * 2, (x @ x).relu()), lambda x: (x.sin(), x.T @ x), x)
        z = pg.repeat(3, lambda a: a * 1.5 + x, y[0])
        return y, z, z @ x

    both = plain(f, hold=True)
    for n in range(12):
        both(ramp(cuda, 32, 32, start=n), torch.tensor(n % 3 > 0, device=cuda))
        junk = [torch.full((1 << k,), float("nan"), device=cuda) for k in range(8, 18)]
        del junk
    assert counts(both)[2] > 8


def test_c15_held_results_of_branches_keep_their_values(device):
    def f(x, pred):
        return pg.cond(pred, lambda x: x * 2, lambda x: x + 7, x), x * 3

    both = plain(f, hold=True)
    for n in range(9):
        both(ramp(device, 1 << 15, start=n), torch.tensor(n % 2 > 0, device=device))
    assert counts(both)[2] > 4


def test_c15_branches_in_chains_share_the_pool(device):
    f = plain(lambda x, pred: pg.cond(pred, lambda x: x * 2, lambda x: x + 7, x))
    g = plain(lambda x, pred: pg.cond(pred, lambda x: x.sin(), lambda x: x.cos(), x) + x)
    yes, no = (torch.tensor(p, device=device) for p in (True, False))
    x = ramp(device, 64)
    for _ in range(3):
        assert_settles(g, f(x, yes), no)
    assert_replays(g, f(x, no), yes)
