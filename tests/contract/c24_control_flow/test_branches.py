"""C24: `pg.cond` and `pg.switch`. One recording has all branches, and a replay runs the one that is taken: values, writes,
random numbers and held results are eager's."""

import decimal

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phonograph as pg
from tests.helpers import counts, may_run_live, plain, ramp, reasons, side_by_side

TURNS = (1, -1, 1, 1, -1, -1, 1, -1)


def flips(device, shape=(4,), turns=TURNS):
    """Arguments of calls: an input, and what decides."""
    return [(ramp(device, *shape, start=n), torch.tensor(float(turn), device=device)) for n, turn in enumerate(turns)]


def assert_one_recording(both, calls):
    """Call it; all but the first are replays of one recording."""
    for args in calls:
        both(*args)
    assert counts(both) == (1, 1, len(calls) - 1), reasons(both)


def one_of_two(x, p):
    return pg.cond(p > 0, lambda a: a * 2, lambda a: a + 1, x)


def of_closures(x, p):
    y = x * 3
    return pg.cond(p.sum() > 0, lambda: x + y, lambda: (x * 2).relu() - y) + 1


def identical(x, p):
    return pg.cond(p > 0, lambda a: a, lambda a: a + 1, x).mul_(2), x


def views(x, p):
    return pg.cond(p > 0, lambda a: a[:2], lambda a: a[2:], x)


def expanded(x, p):
    return pg.cond(p > 0, lambda a: (a + 1).expand(3, 4), lambda a: (a * 2).expand(3, 4), x)


def twice(x, p):
    a, b = pg.cond(p > 0, lambda y: (y, y), lambda y: (y * 5, y * 2), x * 1)
    a.add_(1)
    return a, b


def nested_results(x, p):
    given = {"a": x, "b": [x * 2]}
    return pg.cond(p > 0, lambda d: {"a": d["a"] + 1, "n": 3, "t": (d["b"][0], None)},
                   lambda d: {"a": d["a"] * 1, "n": 3, "t": (d["b"][0] * 2, None)}, given)  # fmt: skip


def empty_results(x, p):
    return pg.cond(p > 0, lambda a: a[:0], lambda a: a[4:], x)


def of_single_numbers(x, p):
    return pg.cond(p.view(1, 1) > 0, lambda a: a.sum(), lambda a: a.mean(), x)


def by_any_number(x, p):
    return pg.cond(p.clamp_min(0) * 0.5, lambda a: a.sum(), lambda a: a.mean(), x)


def nested(x, p):
    def loops(a):
        inner = lambda z: pg.cond(z.sum() > 9, lambda z: z * 0.5, lambda z: z + 1, z)  # noqa: E731
        return pg.while_loop(lambda i, c: i < 3, lambda i, c: (i + 1, inner(c)), (torch.zeros((), device=x.device), a))[1]

    return pg.cond(p > 0, lambda a: pg.cond(a.sum() > 18, lambda b: b + 1, lambda b: b * a, a * 2), loops, x)


def in_inference(x, p):
    with torch.inference_mode():
        return pg.cond(p > 0, lambda a: a, lambda a: a + 1, x) + 1


def written_arguments(x, p):
    pg.cond(p > 0, lambda a: a.add_(1).sum(), lambda a: a.mul_(2).sum(), x)
    return x * 2


def without_results(x, p):
    def one():
        x.add_(1)

    assert pg.cond(p > 0, one, lambda: None) is None
    return x * 2


def written_locals(x, p):
    made = x * 2

    def one():
        made.add_(x)
        return x * 2

    def other():
        made.mul_(0.5).sub_(1)
        return x * 3

    return pg.cond(p > 0, one, other), made


FUNCTIONS = (one_of_two, of_closures, identical, views, expanded, twice, nested_results, empty_results, of_single_numbers,
             by_any_number, nested, in_inference, written_arguments, without_results, written_locals)  # fmt: skip


@pytest.mark.parametrize("hold", [False, True], ids=["", "held"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_c24_a_branch_is_taken_by_each_replay(device, function, hold):
    assert_one_recording(plain(function, hold=hold, keep="always"), flips(device))


@pytest.mark.parametrize("options", [{"verify": 1}, {"audit": 1}, {"fallback": "split"}], ids=str)
@pytest.mark.parametrize("function", [of_closures, nested, written_locals], ids=lambda f: f.__name__)
def test_c24_with_other_options(device, function, options):
    assert_one_recording(plain(function, keep="always", **options), flips(device))


def test_c24_results_that_are_borrowed(device):
    f = pg.record(one_of_two, outputs="borrow", keep="always")
    for x, p in flips(device, (1 << 16,)):
        assert torch.equal(f(x, p), x * 2 if p > 0 else x + 1)
    assert counts(f) == (1, 1, len(TURNS) - 1), reasons(f)


def test_c24_between_segments(device):
    """A number decides on the host besides, before and after the branch."""

    def f(x, p):
        y = x + 1 if x.sum() > -1 else x - 1
        z = pg.cond(p > 0, lambda: y * 2, lambda: x * 3)
        return z + 1 if z.sum() > -1 else z - 1

    both = plain(f, keep="always", fallback="split")
    for args in flips(device) * 2:
        both(*args)
    assert counts(both)[2] > 8, reasons(both)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool], ids=str)
def test_c24_an_index_is_clamped(device, dtype):
    both = plain(lambda x, n: pg.switch(n, [lambda a: a, lambda a: a * 2, lambda a: a * 3], x), keep="always")
    least = 0 if dtype in (torch.uint8, torch.bool) else -2
    assert_one_recording(both, [(ramp(device, 4), torch.tensor(n % 7 + least, device=device).to(dtype)) for n in range(9)])


def test_c24_an_index_that_fits_no_int32(device):
    both = plain(lambda x, n: pg.switch(n, [lambda a: a, lambda a: a * 2, lambda a: a * 3], x), keep="always")
    assert_one_recording(both, [(ramp(device, 4), torch.tensor(n, device=device)) for n in (1, 2**32, -(2**40), 2**32 + 1, 0)])


def test_c24_a_switch_of_one(device):
    both = plain(lambda x, n: pg.switch(n, [lambda a: a * 7], x), keep="always")
    assert_one_recording(both, [(ramp(device, 4), torch.tensor(n, device=device)) for n in range(4)])


def test_c24_values_of_python_decide_when_recorded(device):
    both = plain(lambda x, p, n: pg.switch(n, [lambda a: a, lambda a: a * 2], pg.cond(p, lambda a: a + 1, lambda a: a, x)))
    for n in range(12):
        both(ramp(device, 4, start=n), bool(n % 2), n % 2 + 5)
    assert counts(both) == (2, 2, 10), reasons(both)


def test_c24_a_nan_is_true(device):
    both = plain(lambda x, p: pg.cond(p, lambda: x + 1, lambda: x - 1), keep="always")
    assert_one_recording(both, flips(device, turns=(0.0, float("nan"), 0.0, float("nan"), -0.0)))


def test_c24_random_numbers_are_eagers(device):
    def f(x, p):
        y = pg.cond(p > 0, lambda: F.dropout(x, 0.5), lambda: torch.rand_like(x) + torch.randn(4, device=x.device))
        return y + torch.rand(4, device=x.device)

    assert_one_recording(plain(f, keep="always"), flips(device))


@may_run_live
def test_c24_a_generator_of_the_users(device):
    """A GPU is told of the default one alone how far it has come in a branch."""

    def make():
        g = torch.Generator(device)
        g.manual_seed(3)
        return lambda x, p: pg.cond(p > 0, lambda: x + torch.rand(4, generator=g, device=x.device), lambda: x * 3), g

    both = side_by_side(make, keep="always")
    if device.type == "cpu":
        assert_one_recording(both, flips(device))
        return
    for x, p in flips(device):
        both(x, p)
    assert "from another generator than the default one" in reasons(both)


def test_c24_a_batch_norm_counts_where_it_runs(device):
    def make():
        norm = nn.BatchNorm1d(4).to(device).requires_grad_(False)
        return (lambda x, p: pg.cond(p > 0, lambda: norm(x), lambda: x * 3)), norm

    assert_one_recording(side_by_side(make, keep="always"), flips(device, (5, 4)))


def test_c24_tensors_outside_are_written(device):
    def make():
        total = torch.zeros(4, device=device)

        def f(x, p):
            def one():
                total.add_(x)
                return x * 2

            def other():
                total.mul_(0.5).sub_(1)
                return x * 3

            return pg.cond(p > 0, one, other) + total

        return f, total

    assert_one_recording(side_by_side(make, keep="always"), flips(device))


def test_c24_state_that_is_carried(device):
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.h = torch.zeros(4, device=device)

        def forward(self, x, p):
            self.h = pg.cond(p > 0, lambda h: h * 0.5 + x, lambda h: h - 1, self.h)
            return self.h * 2

    def make():
        net = Keeps()
        return net.forward, net

    assert_one_recording(side_by_side(make, keep="always"), flips(device))


def test_c24_autocast_within_and_around(device):
    def make():
        net = nn.Linear(4, 4).to(device).requires_grad_(False)

        def f(x, p):
            with torch.autocast(device.type, torch.bfloat16):
                y = net(x)
                return pg.cond(p > 0, lambda: net(x) + 1, lambda: net(x * 2)), y, net(x)

        return f, net

    assert_one_recording(side_by_side(make, keep="always"), flips(device, (2, 4)))


@may_run_live
def test_c24_weights_that_autocast_casts_in_a_branch(device):
    """What one has cast is not there where another is taken."""

    def make():
        net = nn.Linear(4, 4).to(device)

        def f(x, p):
            with torch.autocast(device.type, torch.bfloat16):
                y = pg.cond(p > 0, lambda: (net(x) + 1).detach(), lambda: net(x * 2).detach())
                return y, net(x).detach()

        return f, net

    both = side_by_side(make, keep="always")
    for args in flips(device, (2, 4)):
        both(*args)


def test_c24_what_follows_is_captured_as_after_the_branch_that_is_taken(device):
    """Where it would raise after the other."""
    if device.type == "cuda":
        pytest.skip("a capture on a GPU knows no values")

    def make():
        table, place = ramp(device, 4), torch.zeros(1, dtype=torch.int64)

        def f(x, p):
            def one():
                return place.copy_((p < 0) * 100) + 1

            def other():
                return place.copy_((p > 0) * 100) + 1

            index = pg.cond(p > 0, one, other)
            return table.index_select(0, place) + table.index_select(0, index)

        return f, place

    assert_one_recording(side_by_side(make, keep="always"), flips(device))
    assert_one_recording(side_by_side(make, keep="always"), flips(device, turns=[-turn for turn in TURNS]))


def test_c24_changed_weights_and_shapes(device):
    def make():
        net = nn.Linear(4, 4).to(device).requires_grad_(False)
        return (lambda x, p: pg.cond(p > 0, lambda: net(x), lambda: x * net.bias)), net

    both = side_by_side(make, keep="always")
    for rows in (1, 2, 1, 3):
        for args in flips(device, (rows, 4)):
            both(*args)
    assert counts(both)[1:] == (3, 29), reasons(both)
    both.change(lambda net: net.weight.mul_(2))
    both.change(lambda net: setattr(net, "bias", nn.Parameter(net.bias * 3, requires_grad=False)))
    for args in flips(device, (2, 4)):
        both(*args)


def test_c24_a_value_of_python_in_a_branch(device):
    """It is read when the call is recorded, as anywhere in it."""

    def make():
        net = nn.Module()
        net.scale = 2.0
        return (lambda x, p: pg.cond(p > 0, lambda a: a * net.scale, lambda a: a + net.scale, x)), net

    both = side_by_side(make, keep="always")
    for n, args in enumerate(flips(device) * 3):
        both(*args)
        if n % 4 == 3:
            both.change(lambda net: setattr(net, "scale", net.scale + 0.5))


def test_c24_recorded_in_recorded(device):
    inner = pg.record(one_of_two, warmup=1)
    assert_one_recording(plain(lambda x, p: inner(x, p) + 1, keep="always"), flips(device))


def test_c24_a_module_without_gradients(device):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, p):
            return pg.cond(p > 0, lambda: self.linear(x), lambda: self.linear(x * 2))

    net = pg.record(Net().to(device).requires_grad_(False), keep="always")
    for x, p in flips(device, (2, 4)):
        assert torch.equal(net(x, p), net.linear(x if p > 0 else x * 2))
    assert counts(net) == (1, 1, len(TURNS) - 1), reasons(net)


def test_c24_an_audit_knows_whose_an_operator_is(device):
    """One goes from one branch to the other, by what Python does not show."""
    total = torch.zeros(4, device=device)

    def f(p):
        first = decimal.getcontext().prec == 2

        def one():
            total.add_(1)
            if first:
                total.mul_(2)

        def other():
            if not first:
                total.mul_(2)
            total.sub_(1)

        pg.cond(p > 0, one, other)

    recorded, up = pg.record(f, audit=1), torch.ones((), device=device)
    with decimal.localcontext() as context:
        context.prec = 2
        for _ in range(4):
            recorded(up)
        context.prec = 3
        total.zero_()
        with pytest.warns(pg.Stale):
            recorded(up)
    assert torch.equal(total, torch.ones_like(total))


def test_c24_nothing_stands_in_the_way(device):
    """What a live call reads to go on is no obstacle."""

    def f(x, p):
        start = torch.zeros((), device=x.device)
        return pg.cond(p > 0, torch.sin, torch.cos, x) + pg.while_loop(lambda i: i < p, lambda i: i + 1, start)

    found = pg.check(f, ramp(device, 4), torch.ones((), device=device))
    assert found.records
    assert list(found.obstacles) == []
