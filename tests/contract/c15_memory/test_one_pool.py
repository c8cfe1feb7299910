"""C15: one pool, and loops that settle."""

import random

import pytest
import torch

import phonograph as pg
from phonograph._torch.cuda import clear_cublas_workspaces
from phonograph.devices import device_for
from phonograph.testing import Pair, assert_no_new_recordings
from tests.helpers import counts, plain, ramp


def test_c15_a_chain_is_right_and_settles(device):
    f, g, h = (plain(lambda x, k=k: x.sin() * k + x) for k in range(3))
    for n in range(6):
        h(g(f(ramp(device, 32, start=n))))
    with assert_no_new_recordings(f.recorded, g.recorded, h.recorded):
        for n in range(6):
            h(g(f(ramp(device, 32, start=n))))
    assert min(counts(b)[2] for b in (f, g, h)) >= 6


def test_c15_branches_of_the_trees_example(device):
    """1 → 2 → 4 and 1 → 3 → 4 of the CUDA graph trees documentation, in any order, with and without holding."""
    one, two, three, four = (plain(lambda x, k=k: (x * k).cos() + x) for k in (1, 2, 3, 4))
    functions = [b.recorded for b in (one, two, three, four)]

    def path(second, n):
        x = one(ramp(device, 64, start=n))
        y = second(x)
        del x
        return four(y)

    for n in range(8):
        path(two if n % 2 else three, n)
    with assert_no_new_recordings(*functions):
        for n in range(12):
            path(random.choice([two, three]), n)
    assert sum(pg.stats(f).recorded for f in functions) <= 8


def test_c15_branches_with_all_outputs_held(device):
    one, two, three, four = (plain(lambda x, k=k: (x * k).cos() + x, hold=True) for k in (1, 2, 3, 4))
    for n in range(8):
        x = one(ramp(device, 64, start=n))
        four((two if n % 3 else three)(x))
        for both in (one, two, three, four):
            both.check()


def test_c15_memory_is_that_of_the_worst_path_not_the_sum(device, monkeypatch):
    monkeypatch.setattr(device_for(device), "roomy", 0)  # as if memory were scarce: small recordings do not share it

    def heavy(k):
        return pg.record(lambda x: torch.cat([(x + i + k).sin() for i in range(16)]).sum(), warmup=1)

    x = torch.ones(4096, device=device)
    first = heavy(0)
    for _ in range(3):
        first(x)
    alone = pg.stats(first).pool_bytes
    functions = [heavy(k) for k in range(1, 9)]
    for f in functions:
        for _ in range(3):
            f(x)
    assert alone > 0
    assert pg.stats(first).pool_bytes <= 2 * alone


def test_c15_recordings_of_all_sizes_lie_in_one_pool(device, monkeypatch):
    """Whatever is held of their results: large ones and small ones, with gaps between."""
    monkeypatch.setattr(device_for(device), "roomy", 0)
    sizes = [40, 300, 700, 1000, 3000, 9000, 40_000, 150_000, 200_000, 260_000, 300_000, 700_000, 1_500_000, 6_000_000]
    draw = random.Random(1)

    def make(k, sizes):
        return pg.record(lambda x: [x[:n] + k for n in sizes], warmup=1)

    x = torch.ones(max(sizes), device=device)
    held = []
    for k in range(6):
        f = make(k, draw.sample(sizes, 9))
        for _ in range(3):
            results = f(x)
        held.append((k, results[::2]))
        held += [(k, results[3:4])]
        assert device_for(device).pool.footprints().nbytes <= device_for(device).pool_bytes
    for k, results in held:
        assert all(bool((t == 1 + k).all()) for t in results)


def test_c15_matrix_products_share_the_workspace_of_cublas(cuda, monkeypatch):
    """It is as large as many small recordings; and stays theirs, whoever clears torch's workspaces."""
    monkeypatch.setattr(device_for(cuda), "roomy", 0)
    functions = [plain(lambda x, k=k: (x * k) @ (x + k).T, hold=True) for k in range(1, 5)]
    for n in range(6):
        for both in functions:
            both(ramp(cuda, 16, 16384, start=n))
            clear_cublas_workspaces()
            junk = torch.full((1 << 26,), float("nan"), device=cuda)
            live = junk[: 1 << 20].view(16, -1) @ junk[: 1 << 20].view(16, -1).T
            del junk, live
        for both in functions:
            both.check()
    mine = [r for r in device_for(cuda).pool.recordings if "test_c15_matrix_products" in r.name]
    assert len(mine) >= 4
    assert all(r.footprint.nbytes < 8 << 20 for r in mine)


@pytest.mark.parametrize("keep", [lambda loss: loss, lambda loss: loss.detach(), lambda loss: loss[None]],
                         ids=["loss", "loss.detach()", "a view"])  # fmt: skip
def test_c15_appending_losses_keeps_their_values_and_settles(device, keep):
    w = torch.ones(4, device=device)
    f = pg.record(lambda x: (w.mul_(2) * x).sum(), warmup=1)
    right, losses = [], []
    for n in range(16):
        if n == 6:
            recordings = pg.stats(f).recorded
        losses.append(keep(f(torch.ones(4, device=device))))
        right.append(4 * 2.0 ** (n + 1))
        assert [loss.item() for loss in losses] == right
    assert pg.stats(f).recorded == recordings, pg.explain(f)
    assert pg.stats(f).replayed >= 8, pg.explain(f)


def test_c15_feeding_back_settles(device):
    both = plain(lambda x: x * 1.5)
    x = Pair.of(torch.ones(8, device=device))
    for _ in range(6):
        x = both(x)
    with assert_no_new_recordings(both.recorded):
        for _ in range(10):
            x = both(x)
    assert counts(both)[2] >= 10


def test_c15_two_functions_that_feed_each_other_settle(device):
    f, g = plain(lambda x: x + 1), plain(lambda x: x * 1.25)
    x = Pair.of(torch.ones(8, device=device))
    for _ in range(5):
        x = g(f(x))
    with assert_no_new_recordings(f.recorded, g.recorded):
        for _ in range(8):
            x = g(f(x))
    assert min(counts(f)[2], counts(g)[2]) >= 8


def test_c15_a_recurrent_loop_with_a_held_history_of_bounded_length(device):
    both = plain(lambda state, x: (state * 0.5 + x, state.sum()))
    state, history = Pair.of(torch.zeros(6, device=device)), []
    for n in range(30):
        if n == 12:
            recordings = pg.stats(both.recorded).recorded
        result = both(state, ramp(device, 6, start=n))
        state = result.each(lambda r: r[0])
        history.append(result.each(lambda r: r[1]))
        del result, history[:-3]
        for pair in history:
            pair.check()
    assert pg.stats(both.recorded).recorded == recordings, pg.explain(both.recorded)


def test_c15_state_that_lies_in_the_memory_of_another_function(device):
    """f's result becomes the closed-over tensor of g, then is dropped by everybody else."""
    f = pg.record(lambda x: x * 2, warmup=1)
    cell = {"w": None}
    g = pg.record(lambda x: x + cell["w"], warmup=1)
    for n in range(12):
        if n % 3 == 0:
            cell["w"] = f(torch.full((4,), float(n), device=device))
            right = 2.0 * n
        f(torch.full((4,), -1.0, device=device))
        assert g(torch.ones(4, device=device)).tolist() == [1.0 + right] * 4


def test_c15_functions_called_in_random_order_with_random_lifetimes(device):
    pool = [plain(lambda x, k=k: (x.flip(0) * (k + 1), x + k)) for k in range(4)]
    alive = [Pair.of(ramp(device, 6, start=n)) for n in range(3)]
    for n in range(80):
        result = pool[random.Random(n).randrange(4)](alive[random.Random(n + 1).randrange(len(alive))])
        alive.append(result.each(lambda r, n=n: r[n % 2]))
        del result
        if len(alive) > 5:
            alive.pop(random.Random(n + 2).randrange(len(alive)))
        for pair in alive:
            pair.check()
