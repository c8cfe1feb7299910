"""C24: `pg.while_loop` and `pg.repeat`. One recording has the body once, and a replay runs it as often as it takes."""

import re

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.testing import SideBySide
from tests.helpers import counts, may_run_live, plain, ramp, reasons, side_by_side

TURNS = (3, 0, 1, 5, 2, 10, 0, 1)


def number(device, n):
    return torch.tensor(n, device=device)


def calls(device, turns=TURNS):
    return [(ramp(device, 4, start=i) / 4, number(device, n)) for i, n in enumerate(turns)]


def zero(x):
    return torch.zeros((), dtype=torch.int64, device=x.device)


def assert_one_recording(both: SideBySide, given):
    for args in given:
        both(*args)
    assert counts(both) == (1, 1, len(given) - 1), reasons(both)


def counted(x, n):
    return pg.while_loop(lambda i, a: i < n, lambda i, a: (i + 1, (a * 1.5 + 0.25).sin()), (zero(x), x))


def until_a_value_says_so(x, n):
    return pg.while_loop(lambda a: a.abs().sum() > 1, lambda a: a * 0.5, x + n)


def swapped(x, n):
    return pg.while_loop(lambda i, a, b: i < n, lambda i, a, b: (i + 1, b, a), (zero(x), x, x * 2))


def with_views(x, n):
    """Parts of what is given, and the same twice."""
    return pg.while_loop(lambda i, a, b, c: i < n, lambda i, a, b, c: (i + 1, a, a[1:3], a), (zero(x), x, x[:2] * 2, x))


def written(x, n):
    y = x * 2

    def turn(i, a):
        i.add_(1)
        a.mul_(1.5)
        y.add_(a)
        return i, a

    return *pg.while_loop(lambda i, a: i < n, turn, (zero(x), x)), y, x


def of_a_tree(x, n):
    state = {"i": zero(x), "of": [x, (x * 2, None, "a word")]}

    def turn(s):
        a, (b, _, _) = s["of"]
        return {"i": s["i"] + 1, "of": [b, (a + 1, None, "a word")]}

    return pg.while_loop(lambda s: s["i"] < n, turn, state)


def with_what_is_outside(x, n):
    """Each turn reads what was made before, and makes much that could lie there."""
    made = x * 3
    return pg.while_loop(lambda i, a: i < n, lambda i, a: (i + 1, (a + made).sin() + (a * 0 + 5).exp() - (a * 0 + 5).exp()),
                         (zero(x), x))[1] + made  # fmt: skip


def drawing(x, n):
    y = pg.while_loop(lambda i, a: i < n, lambda i, a: (i + 1, a + torch.rand(4, device=x.device)), (zero(x), x))[1]
    return y + torch.rand(4, device=x.device)


def drawing_in_the_condition(x, n):
    return pg.while_loop(lambda i: torch.rand((), device=x.device) * (i + 1) < 0.9, lambda i: i + 1, n)


def with_branches(x, n):
    def turn(i, a):
        return i + 1, pg.cond(
            a.sum() > 3, lambda a: a * 0.5, lambda a: pg.switch(i, [torch.sin, torch.cos, torch.neg], a) + 1, a
        )

    return pg.while_loop(lambda i, a: i < n, turn, (zero(x), x))


def in_each_other(x, n):
    def turn(i, a):
        return i + 1, pg.while_loop(lambda j, b: j < i, lambda j, b: (j + 1, b + j), (zero(x), a))[1] * 0.5

    return pg.while_loop(lambda i, a: i < n, turn, (zero(x), x))


def repeated(x, n):
    return pg.repeat(7, lambda a: a * 1.01 + 1, x), pg.repeat(n, lambda a, b: (b, a + 1), (x, x * 2))


def repeated_never(x, n):
    return (
        pg.repeat(0, lambda a: a + 1, x),
        pg.repeat(n.clamp_max(1) - 1, lambda a: a + 1, x),
        pg.repeat(-3, lambda a: a + 1, x),
    )


def by_a_flag_of_the_state(x, n):
    start = zero(x), torch.ones((), dtype=torch.bool, device=x.device), x
    return pg.while_loop(lambda i, go, a: go, lambda i, go, a: (i + 1, i + 1 < n, a * 2), start)


def written_by_the_condition(x, n):
    def goes_on(i, a):
        i.add_(1)
        return i <= n

    return pg.while_loop(goes_on, lambda i, a: (i, a * 2), (zero(x), x))


def of_expanded_and_strided(x, n):
    start = zero(x), x.expand(3, 4), x.expand(2, 4).contiguous()[:, ::2]
    return pg.while_loop(lambda i, a, b: i < n, lambda i, a, b: (i + 1, a * 2, b.clone()), start)


FUNCTIONS = (counted, by_a_flag_of_the_state, written_by_the_condition, of_expanded_and_strided, until_a_value_says_so,
             swapped, with_views, written, of_a_tree, with_what_is_outside, drawing, drawing_in_the_condition, with_branches,
             in_each_other, repeated, repeated_never)  # fmt: skip


@pytest.mark.parametrize("hold", [False, True], ids=["", "held"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_c24_a_replay_loops_as_often_as_it_takes(device, function, hold):
    assert_one_recording(plain(function, hold=hold, keep="always"), calls(device))


@pytest.mark.parametrize("options", [{"verify": 1}, {"audit": 1}, {"fallback": "split"}], ids=str)
@pytest.mark.parametrize("function", [written, with_branches], ids=lambda f: f.__name__)
def test_c24_loops_with_other_options(device, function, options):
    assert_one_recording(plain(function, keep="always", **options), calls(device))


def test_c24_a_recording_does_not_grow_with_the_turns(device):
    sizes = []
    for n in (2, 50):
        f = pg.record(lambda x, n=n: pg.repeat(n, lambda a: a.sin() + a.cos(), x), keep="always")
        for _ in range(3):
            f(ramp(device, 4))
        sizes += re.findall(r": (\d+) operators", str(pg.explain(f)))
    assert len(sizes) == 2
    assert sizes[0] == sizes[1]


def test_c24_a_cache_that_is_written_in_each_turn(device):
    """As in decoding: a row of a tensor from outside for each token, until one says that it is the last."""

    def make():
        cache = torch.zeros(12, 4, device=device)

        def f(x, n):
            def turn(i, a):
                cache.index_copy_(0, i.view(1), a[None])
                return i + 1, (a + cache.sum(0)).tanh()

            return pg.while_loop(lambda i, a: (i < 12) & (i < n), turn, (zero(x), x))

        return f, cache

    assert_one_recording(side_by_side(make, keep="always"), calls(device))


def test_c24_steps_of_training_in_a_loop(device):
    """Gradients are written in place: they have to be there before."""

    def make():
        w = nn.Parameter(ramp(device, 4) / 4)
        w.grad = torch.zeros_like(w)
        optimizer = torch.optim.SGD([w], 0.1, momentum=0.9)

        def step(i, x):
            (w * x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            return i + 1, x * 0.9

        return (lambda x, n: pg.while_loop(lambda i, a: i <= n, step, (zero(x), x))), (w, optimizer)

    assert_one_recording(side_by_side(make, keep="always"), calls(device))


def test_c24_autocast_in_a_loop(device):
    """What autocast has cast before is not what a turn casts, and none casts for the next."""

    def make():
        net = nn.Linear(4, 4).to(device)
        for p in net.parameters():
            p.grad = torch.zeros_like(p)

        def f(x, n):
            with torch.autocast(device.type, torch.bfloat16):
                before = net(x).detach()

                def turn(i, a):
                    net(a).float().sum().backward()
                    return i + 1, a + 1

                return pg.while_loop(lambda i, a: i < n, turn, (zero(x), x)), before, net(x).detach()

        return f, net

    both = side_by_side(make, keep="always")
    assert_one_recording(both, [(x.expand(2, 4), n) for x, n in calls(device)])


class Circle:
    def __init__(self, t):
        self.me, self.tensor = self, t


def test_c24_garbage_is_nothing_that_a_turn_needs(device):
    """Of what a turn leaves in a circle, and of what the call has left so before."""

    def f(x, n):
        for _ in range(30):
            Circle(x * 2)
        return pg.while_loop(lambda i, a: i < n, lambda i, a: (i + 1, a + Circle(x * 3).tensor), (zero(x), x))

    assert_one_recording(plain(f, keep="always"), calls(device))


@may_run_live
def test_c24_what_raises_in_a_later_turn(device):
    """On the CPU it raises in a replay as well. It is caught outside of the loop, and what turns before have written stays."""
    if device.type == "cuda":
        pytest.skip("an index that is out of range ends the process's use of the GPU")

    def make():
        total = torch.zeros(4)

        def f(x, places):
            def turn(i, a):
                row = x.index_select(0, places.index_select(0, i.view(1)))
                total.add_(1)
                return i + 1, a + row

            try:
                return pg.while_loop(lambda i, a: i < 3, turn, (zero(x), x))[1]
            except IndexError:
                return x

        return f, total

    both = side_by_side(make, keep="always")
    for n in range(10):
        both(ramp(device, 4), torch.tensor([0, 1, 9 if n % 4 == 3 else 2]))
    assert counts(both)[2] > 2, reasons(both)
