"""C2: random numbers in the bodies of branches and loops. Each launch draws what eager draws, and the generator ends there."""

import pytest
import torch
import torch.nn.functional as F

import phonograph as pg
from tests.helpers import assert_replays, assert_settles, may_run_live, plain, reasons, side_by_side

# What two branches draw: as much, the second more, only the second, only the first.
BRANCHES = {
    "alike": (lambda x: x + torch.rand_like(x), lambda x: x * torch.randn_like(x)),
    "more": (lambda x: x + torch.rand_like(x), lambda x: torch.rand_like(x) + F.dropout(x, 0.5) * torch.rand_like(x)),
    "second": (lambda x: x * 2, lambda x: F.dropout(x, 0.5)),
    "first": (lambda x: F.dropout(x, 0.5) + torch.randint_like(x, 9), lambda x: x * 2),
}
AROUND = {
    "alone": lambda x, drawn: drawn,
    "before": lambda x, drawn: drawn + F.dropout(x, 0.5),
    "after": lambda x, drawn: (drawn, torch.rand_like(x)),
}


def flag(value, device):
    return torch.tensor(value, device=device)


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize("branches", BRANCHES.values(), ids=BRANCHES)
def test_c02_branches_draw_as_eager(device, branches, around):
    def f(x, pred):
        before = x + torch.rand_like(x) if around is AROUND["before"] else x
        return around(x, pg.cond(pred, *branches, before))

    both, x = plain(f), torch.ones(33, device=device)
    assert_settles(both, x, flag(True, device))
    for taken in (True, False, False, True, False):
        assert_replays(both, x, flag(taken, device))


def test_c02_a_seed_between_replays(device):
    def f(x, pred):
        return pg.cond(pred, lambda x: F.dropout(x, 0.5), lambda x: x * 2, x), torch.rand_like(x)

    both, x = plain(f), torch.ones(33, device=device)
    assert_settles(both, x, flag(True, device))
    for seed in range(4):
        torch.manual_seed(seed)
        assert_replays(both, x, flag(seed % 2 == 0, device))


def test_c02_loops_draw_as_often_as_they_turn(device):
    def f(x, n):
        i, y = pg.while_loop(lambda i, y: i < n, lambda i, y: (i + 1, y + torch.rand_like(y)), (torch.zeros_like(n), x))
        return y, i, torch.rand_like(x)

    both, x = plain(f), torch.ones(33, device=device)
    assert_settles(both, x, flag(3, device))
    for n in (0, 1, 7, 2, 0):
        assert_replays(both, x, flag(n, device))


def test_c02_conditions_draw(device):
    def f(x, most):
        return pg.while_loop(lambda y: (y + torch.rand((), device=device)).max() < most, lambda y: (y * 1.5,), (x,))

    both, x = plain(f), torch.ones(33, device=device)
    assert_settles(both, x, flag(3.0, device))
    for most in (0.5, 20.0, 2.0):
        assert_replays(both, x, flag(most, device))


def test_c02_nested_bodies_draw(device):
    def f(x, n):
        def turn(i, y):
            odd = lambda y: F.dropout(y, 0.3)  # noqa: E731
            even = lambda y: pg.repeat(i, lambda y: (y + torch.rand_like(y)) * torch.rand_like(y), y)  # noqa: E731
            return i + 1, pg.cond(i % 2 == 1, odd, even, y) + torch.rand_like(y)

        return pg.while_loop(lambda i, y: i < n, turn, (torch.zeros_like(n), x)), torch.rand_like(x)

    both, x = plain(f), torch.ones(33, device=device)
    assert_settles(both, x, flag(3, device))
    for n in (0, 6, 1, 4):
        assert_replays(both, x, flag(n, device))


def test_c02_switches_draw(device):
    def f(x, i):
        bodies = [lambda x: x * 1, F.dropout, lambda x: torch.rand_like(x) * torch.rand_like(x), lambda x: torch.rand_like(x)]
        return pg.switch(i, bodies, x), torch.rand_like(x)

    both, x = plain(f), torch.ones(33, device=device)
    assert_settles(both, x, flag(1, device))
    for i in (0, 2, 3, 5, -1, 1):
        assert_replays(both, x, flag(i, device))


def test_c02_modules_with_dropout_in_a_branch(device):
    def make():
        torch.manual_seed(1)
        net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(8)).to(device)

        @torch.no_grad()
        def f(x, pred):
            return pg.cond(pred, net, lambda x: x * 1, x)

        return f, [net]

    both, x = side_by_side(make), torch.randn(4, 8, device=device)
    assert_settles(both, x, flag(True, device))
    for taken in (True, False, True):
        assert_replays(both, x, flag(taken, device))


def test_c02_segments_go_on_from_where_bodies_end(device):
    @pg.live
    def decide(x):
        return x * (2.0 if x.sum().item() > 5 else 3.0)

    def f(x, pred):
        y = pg.cond(pred, lambda x: F.dropout(x, 0.5), lambda x: x * 2, x)
        y = decide(y)
        return pg.cond(pred, lambda x: x * 2, lambda x: F.dropout(x, 0.5) + torch.rand_like(x), y), torch.rand_like(x)

    both, x = plain(f), torch.ones(33, device=device)
    assert_settles(both, x, flag(True, device), within=8)
    for taken in (False, True, False):
        assert_replays(both, x, flag(taken, device))


def test_c02_explain_says_which_replays_wait(cuda):
    drawing = pg.record(lambda x, pred: pg.cond(pred, F.dropout, lambda x: x * 2, x))
    alike = pg.record(lambda x, pred: pg.cond(pred, F.dropout, lambda x: torch.rand_like(x), x))
    x = torch.ones(33, device=cuda)
    for f in (drawing, alike):
        for n in range(4):
            f(x, flag(n % 2 == 0, cuda))
    assert "each replay waits for the device: how much it draws" in pg.explain(drawing)
    assert "waits for the device" not in pg.explain(alike)


@may_run_live
def test_c02_states_that_depend_on_bodies_are_refused(cuda):
    """A place in the count is one in what was counted at capture."""

    def after(x, pred):
        y = pg.cond(pred, F.dropout, lambda x: x * 2, x)
        with torch.random.fork_rng(devices=[cuda]):
            return y + torch.rand_like(x)

    def inside(x, pred):
        def draws(x):
            with torch.random.fork_rng(devices=[cuda]):
                return x + torch.rand_like(x)

        return pg.cond(pred, draws, lambda x: x * 2, x)

    for f, said in ((after, "after a branch or loop that draws"), (inside, "in a branch or loop")):
        both = plain(f)
        for n in range(4):
            both(torch.ones(33, device=cuda), flag(n % 2 == 0, cuda))
        assert f"the state of a random generator {said}" in reasons(both)


@may_run_live
def test_c02_other_generators_draw_outside_of_bodies(cuda):
    def make():
        own = torch.Generator(cuda).manual_seed(3)
        return lambda x, pred: pg.cond(pred, lambda x: x + torch.rand(33, device=cuda, generator=own), lambda x: x * 2, x), own

    both = side_by_side(make)
    for n in range(5):
        both(torch.ones(33, device=cuda), flag(n % 2 == 0, cuda))
    assert "from another generator than the default one" in reasons(both)
