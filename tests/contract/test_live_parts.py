"""`pg.live` inside a recorded function: recorded in segments, between which it really runs."""

import copy
import random
import threading
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phonograph as pg
from phonograph.testing import assert_recordings, assert_same
from tests.helpers import may_run_live, side_by_side


def ramp(device, *shape, start=0.0):
    n = torch.Size(shape).numel()
    return torch.arange(start, start + n, device=device).reshape(shape) / 8


def replayed(f):
    return pg.stats(f).replayed


def reasons(f):
    return " ".join(pg.stats(f).refusals)


def run(both, device, calls=6):
    for n in range(calls):
        both(ramp(device, 3, start=n))


# -- what is recorded


@pytest.mark.parametrize("hold", [False, True])
def test_c01_it_runs_between_two_segments(device, hold):
    def make():
        total, ran = torch.zeros(3, device=device), []

        @pg.live
        def notes(y, *, by):
            total.add_(y)
            ran.append(by)
            print("", end="")
            return torch.rand_like(y) * random.random() * by

        return lambda x: notes(x * 2, by=3) + torch.rand_like(x), (total, ran)

    both = side_by_side(make, hold=hold)
    run(both, device, 7)
    assert_recordings(both.recorded, 1 if not hold else pg.stats(both.recorded).recorded)
    assert replayed(both.recorded) == 6
    assert "live between its segments: test_c01" in pg.explain(both.recorded)


def test_c01_many_of_them(device):
    def make():
        seen = []

        @pg.live
        def look(y, i):
            seen.append((i, y.tolist()))
            return y + i, {"again": (y * 2, None)}

        def function(x):
            for i in range(4):
                y, more = look(x * i, i)
                x = y.cos() + more["again"][0]
            return x

        return function, seen

    both = side_by_side(make)
    run(both, device)
    assert replayed(both.recorded) == 5


@pytest.mark.parametrize("what", ["first", "last", "only", "nothing"])
def test_c01_at_the_edges(device, what):
    def make():
        seen = []

        @pg.live
        def log(y=None):
            seen.append(y if y is None else y.clone())

        def function(x):
            if what == "first":
                log(x)
                return x + 1
            if what == "last":
                y = x + 1
                log(y)
                return y
            if what == "only":
                return log(x)
            log()
            return x * 2

        return function, seen

    both = side_by_side(make)
    run(both, device)
    assert replayed(both.recorded) == 5


def test_c04_it_returns_what_it_was_given(device):
    def make():
        @pg.live
        def same(y, z):
            y.mul_(2)
            return z, y

        def function(x):
            a, b = x + 1, x + 2
            c, d = same(a, b)
            assert c is b
            assert d is a
            return c - d, a

        return function

    both = side_by_side(make)
    run(both, device)
    assert replayed(both.recorded) == 5


@pytest.mark.parametrize("times", [1, 2])
def test_c03_it_writes_an_argument_of_the_recorded_function(device, times):
    def make():
        @pg.live
        def double(y):
            y.mul_(2)

        def function(x):
            for _ in range(times):
                double(x)
            return x + 1

        return function

    both = side_by_side(make)
    with pytest.warns(pg.RunsLive, match="after an argument was written") if times == 2 else nullcontext():
        run(both, device)
    assert (replayed(both.recorded) == 5) is (times == 1)


def test_c05_what_it_keeps_stays(device):
    """Its arguments are its own: they may be kept, whatever later replays write."""

    def make():
        kept = []

        @pg.live
        def keep(y, z):
            kept.append((y, z, y[1:]))
            return y * 1

        return lambda x: keep(x, x + 1) * 2, kept

    both = side_by_side(make)
    run(both, device, 8)
    assert replayed(both.recorded) == 7


def test_c03_views_of_one_memory(device):
    def make():
        @pg.live
        def shift(whole, part):
            part.add_(1)
            return whole.clone()

        def function(x):
            y = x * 2
            return shift(y, y[1:]) + y

        return function

    both = side_by_side(make)
    run(both, device)
    assert replayed(both.recorded) == 5


def test_c14_a_method(device):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.seen = []

        @pg.live
        def look(self, y, times=2):
            self.seen.append(y.detach().sum())
            return y.detach() * times

        def forward(self, x):
            return self.b(self.look(self.a(x), times=3))

    def make():
        model = Model().to(device).requires_grad_(False)
        return model.forward, (model, model.seen)

    both = side_by_side(make)
    for n in range(6):
        both(ramp(device, 2, 3, start=n))
    assert replayed(both.recorded) == 5


@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference"])
def test_c07_modes(device, mode):
    def make():
        found = []

        @pg.live
        def look(y):
            found.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), y.requires_grad))
            y.add_(1)
            return y * 2

        def function(x):
            y = x.cos()
            with torch.set_grad_enabled(mode == "grad"):
                z = look(y)
            return z + y

        return function, found

    both = side_by_side(make)
    with torch.inference_mode(mode == "inference"):
        run(both, device)
    assert replayed(both.recorded) == 5


def test_c06_a_training_step(device):
    """Losses are logged in the middle of a step that is recorded as a whole."""

    def make():
        net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2)).to(device)
        optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
        log = []

        @pg.live
        def note(loss):
            log.append(float(loss))

        def step(x):
            optimizer.zero_grad()
            loss = net(x).square().mean()
            note(loss.detach())
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, (net, optimizer.state_dict()["state"], log)

    both = side_by_side(make)
    for n in range(8):
        both(ramp(device, 4, 3, start=n))
    assert replayed(both.recorded) >= 6


def test_c06_a_loss_that_is_logged_as_it_is(device):
    def make():
        net, log = nn.Linear(3, 2, device=device), []

        @pg.live
        def note(loss):
            log.append((loss.requires_grad, loss.item()))

        def step(x):
            net.zero_grad()
            loss = net(x).sum()
            note(loss)
            loss.backward()
            return loss.detach()

        return step, (net, log)

    both = side_by_side(make)
    run(both, device)
    assert replayed(both.recorded) >= 4


def test_c09_a_learning_rate_that_changes_between_calls(device):
    def make():
        net = nn.Linear(3, 2, device=device)
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)

        @pg.live
        def look(y):
            return y.detach() * 2

        def step(x):
            scale = look(x)
            optimizer.zero_grad()
            net(scale).square().sum().backward()
            optimizer.step()

        return (step, optimizer), net

    recorded, live = side_by_side_with(make)
    for n in range(8):
        x = ramp(device, 3, start=n)
        for (step, optimizer), _ in (recorded, live):
            optimizer.param_groups[0]["lr"] = 0.1 / (n + 1)
            step(x)
        assert_same(recorded[1].state_dict(), live[1].state_dict())
    assert pg.stats(recorded[0][0]).recorded <= 2
    assert replayed(recorded[0][0]) >= 6


def side_by_side_with(make):
    """Both sides by hand."""
    sides = []
    for record in (pg.record, lambda f: f):
        torch.manual_seed(0)
        (step, optimizer), net = make()
        sides.append(((record(step), optimizer), net))
    return sides


def test_c02_random_numbers_before_in_and_after_it(device):
    def make():
        @pg.live
        def noisy(y):
            return F.dropout(y, 0.5) + torch.randn_like(y)

        return lambda x: F.dropout(noisy(F.dropout(x, 0.5)), 0.5) + torch.rand_like(x)

    both = side_by_side(make)
    for n in range(6):
        both(ramp(device, 64, start=n))
    assert replayed(both.recorded) == 5


def test_c13_an_exception_in_it(device):
    def make():
        count = torch.zeros((), device=device)

        @pg.live
        def positive(y):
            if float(y.sum()) < 0:
                raise ValueError("negative")
            return y

        def function(x):
            count.add_(1)
            return positive(x + 1) * 2

        return function, count

    both = side_by_side(make)
    for n in range(8):
        if n in (3, 5):
            with pytest.raises(ValueError, match="negative"):
                both(ramp(device, 3, start=-100))
        else:
            both(ramp(device, 3, start=n))
    assert replayed(both.recorded) >= 6


@pytest.mark.parametrize("at", [1, 2, 4])
def test_c13_an_exception_in_the_middle_of_a_step(device, at):
    """What the step has done before stays done, and nothing after it is."""

    def make():
        net = nn.Linear(3, 2, device=device)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        calls, count = [], torch.zeros((), device=device)

        @pg.live
        def check(loss, x):
            calls.append([None if p.grad is None else p.grad.clone() for p in net.parameters()])
            x.add_(1)
            if len(calls) in (at + 1, at + 3):
                raise ValueError("no")

        def step(x):
            count.add_(1)
            optimizer.zero_grad()
            loss = net(x.clone()).square().sum()
            check(loss.detach(), x)
            x.mul_(2)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, (net, calls, count)

    both = side_by_side(make)
    for n in range(10):
        try:
            both(ramp(device, 2, 3, start=n))
        except ValueError:
            assert n in (at, at + 2)
    assert replayed(both.recorded) >= 6


def test_c14_recorded_functions_in_it_simply_run(device):
    inner = pg.record(lambda y: y.sin() * 2)

    def make():
        @pg.live
        def part(y):
            return inner(y) + inner(y * 2)

        return lambda x: part(x + 1) + (x * 3).cos()

    for n in range(4):
        inner(ramp(device, 3, start=n))
    both = side_by_side(make, hold=True)
    run(both, device)
    assert replayed(both.recorded) == 5


def test_c14_it_waits_for_another_thread_that_uses_a_recording(device):
    other = pg.record(lambda y: y * 3)
    x = ramp(device, 3)
    for _ in range(3):
        other(x)

    @pg.live
    def ask(y):
        found = []
        thread = threading.Thread(target=lambda: found.append(other(y)))
        thread.start()
        thread.join()
        return found[0]

    f = pg.record(lambda x: ask(x + 1) * 2)
    for _ in range(5):
        assert_same(f(x), (x + 1) * 3 * 2)
    assert replayed(f) == 4


def test_c17_a_reset_in_it(device):
    def function(x):
        return tidy(x + 1) * 2

    f = pg.record(function)

    @pg.live
    def tidy(y):
        pg.reset(f)
        return y * 3

    for n in range(6):
        x = ramp(device, 3, start=n)
        assert_same(f(x), (x + 1) * 3 * 2)


# -- where it gives something else


@may_run_live
@pytest.mark.parametrize("change", ["shape", "dtype", "None", "writes", "value", "shares"])
def test_c01_another_result_than_before(device, change):
    """Nothing happens twice: not what the segments before have written and drawn, nor what it has done itself."""

    def make():
        count, norm, ran = torch.zeros((), device=device), nn.BatchNorm1d(3).to(device), []
        total = torch.zeros(2, 3, device=device)

        @pg.live
        def part(y):
            ran.append(torch.rand(()).item())
            total.add_(torch.rand_like(y) + count)
            if len(ran) % 4:
                return y + 1
            y.add_(change == "writes")
            return {"shape": y[:1], "dtype": y.double(), "None": None, "writes": y + 1, "value": y.sum().item(), "shares": y}[
                change
            ]

        def function(x):
            count.add_(1)
            seen = count * 3
            z = part(norm(x).detach() + torch.rand_like(x))
            return (x if z is None else x + z), seen + count * 2, torch.rand_like(x)

        return function, (count, norm, ran, total)

    both = side_by_side(make, hold=True)
    for n in range(14):
        both(ramp(device, 2, 3, start=n))
    assert replayed(both.recorded) > (1 if change == "value" else 4)  # a number: it stays live then


@may_run_live
@pytest.mark.parametrize("change", ["attribute", "weight", "rate", "argument", "argument that it finds", "gradient", "mode"])
def test_c09_it_changes_what_the_rest_depends_on(device, change):
    def make():
        class Settings:
            scale = 2.0

        settings = Settings()
        net = nn.Linear(3, 3, device=device)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        calls, given = [], []

        @pg.live
        def part(y):
            calls.append(1)
            if len(calls) % 3 == 0:
                if change == "attribute":
                    settings.scale = float(len(calls))
                elif change == "weight":
                    net.weight.data = net.weight.data * 2
                elif change == "rate":
                    optimizer.param_groups[0]["lr"] /= 2
                elif change.startswith("argument"):
                    given[-1].mul_(2)
                elif change == "gradient":
                    net.bias.grad = torch.full_like(net.bias, 0.1 * len(calls))
                elif change == "mode":
                    torch.use_deterministic_algorithms(len(calls) % 2 == 1)
            return y.detach() * 2

        def step(x):
            optimizer.zero_grad()
            z = part(x if change == "argument" else x * 1)
            if change != "gradient":
                optimizer.zero_grad()
            loss = (net(z) * settings.scale + x).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach(), torch.are_deterministic_algorithms_enabled()

        return step, (net, given)

    sides = []
    for record in (pg.record, lambda f: f):
        torch.manual_seed(0)
        step, (net, given) = make()
        sides.append((record(step), net, given))
    for n in range(14):
        found = []
        for f, net, given in sides:
            x = ramp(device, 2, 3, start=n)
            given.append(x)
            found.append((f(x), x, *net.state_dict().values()))
            torch.use_deterministic_algorithms(False)
        assert_same(*found)
    assert replayed(sides[0][0]) > 3


@may_run_live
def test_c11_a_value_on_the_host(device):
    def make():
        @pg.live
        def largest(y):
            return float(y.max())

        return lambda x: (x + 1) * largest(x)

    both = side_by_side(make)
    run(both, device)
    assert replayed(both.recorded) == 0
    assert "returns a float" in reasons(both.recorded)


@may_run_live
def test_c11_a_gradient_flows_through_it(device):
    def make():
        a, b = nn.Linear(3, 3, device=device), nn.Linear(3, 3, device=device)

        @pg.live
        def part(y):
            return y * 2

        def step(x):
            b(part(a(x))).sum().backward()

        return step, (a, b)

    both = side_by_side(make)
    run(both, device)
    assert replayed(both.recorded) == 0
    assert "requires a gradient" in reasons(both.recorded)


@may_run_live
def test_c11_after_a_backward(device):
    def make():
        net, norms = nn.Linear(3, 3, device=device), []

        @pg.live
        def note():
            norms.append(net.weight.grad.norm())

        def step(x):
            net.zero_grad()
            net(x).sum().backward()
            note()

        return step, (net, norms)

    both = side_by_side(make)
    run(both, device)
    assert "after a backward" in reasons(both.recorded)


@may_run_live
@pytest.mark.parametrize("how", ["list", "closure", "object", "except", "made inside", "alias", "write"])
def test_c11_what_a_replay_could_not_know(device, how):
    def make():
        cell = []

        class Thing:
            value = None

        def part(y, where=None):
            if how == "list":
                where.append(y * 2)
            elif how == "object":
                where.value = y * 2
            elif how == "except":
                raise KeyError
            elif how == "alias":
                return y[1:]
            cell.append(1)
            return y * 2

        marked = pg.live(part)

        def function(x):
            if how == "list":
                found = []
                marked(x + 1, found)
                return found[0] if found else x
            if how == "closure":
                factor = 2
                return pg.live(lambda y: y * factor)(x + 1)
            if how == "object":
                thing = Thing()
                marked(x + 1, thing)
                return thing.value if thing.value is not None else x
            if how == "except":
                try:
                    return marked(x)
                except KeyError:
                    return x
            if how == "made inside":
                return marked(x, lambda: 0)
            if how == "alias":
                y = x + 1
                z = marked(y)
                y.mul_(2)
                return z + 1
            z = marked(x)
            z.add_(1)
            return z

        return function, cell

    both = side_by_side(make)
    run(both, device)
    assert replayed(both.recorded) == 0


@may_run_live
def test_c11_with_verify(device):
    part = pg.live(lambda y: y * 2)
    f = pg.record(lambda x: part(x) + 1, verify=2)
    for n in range(6):
        x = ramp(device, 3, start=n)
        assert_same(f(x), x * 2 + 1)
    assert "verify" in reasons(f)


def test_c01_without_warm_up(device):
    """Nothing is known of it before it has run once."""
    part = pg.live(lambda y: y * 2)
    f = pg.record(lambda x: part(x) + 1, warmup=0)
    for n in range(6):
        x = ramp(device, 3, start=n)
        assert_same(f(x), x * 2 + 1)
    assert (pg.stats(f).live, replayed(f)) == (1, 5)


@may_run_live
def test_c11_in_a_recorded_module(device):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = nn.Linear(3, 3)

        @pg.live
        def look(self, y):
            return y.detach() * 2

        def forward(self, x):
            return self.inside(x) + self.look(x)

    model = Model().to(device)
    live = copy.deepcopy(model)
    pg.record(model)
    for n in range(5):
        x = ramp(device, 2, 3, start=n)
        for m in (model, live):
            m.zero_grad()
            m(x).sum().backward()
        assert_same(model.inside.weight.grad, live.inside.weight.grad)


def test_c18_other_signatures(device):
    part = pg.live(lambda y: y.flip(0) * 2)
    f = pg.record(lambda x: part(x + 1) + 1)
    for n in range(12):
        x = ramp(device, 2 + n % 3, start=n)
        assert_same(f(x), (x + 1).flip(0) * 2 + 1)
    assert_recordings(f, 3)
    assert replayed(f) == 9


# -- operators that cannot be captured


def split(make, **options):
    return side_by_side(make, fallback="split", **options)


def masked(device, n):
    x = ramp(device, 6, start=n)
    return x, torch.full((int((x > n / 8 + 0.2).sum()),), 7.0 + n, device=device)


@pytest.mark.parametrize("times", [1, 2])
def test_c11_an_operator_that_needs_the_host_runs_between_segments(device, times):
    def make():
        def function(x, values):
            y = x * 2
            for i in range(times):
                y[x > x[0] + 0.2] = values * (i + 1)
                y = y.sin() + torch.rand_like(y)
            return y

        return function

    both = split(make)
    for n in range(8):
        both(*masked(device, n))
    assert (pg.stats(both.recorded).live, replayed(both.recorded)) == (2, 6)
    assert pg.explain(both.recorded).count("live between its segments: aten::index_put_") == times


def test_c03_such_an_operator_writes_an_argument(device):
    def make():
        def function(x, values):
            x[x > x[0] + 0.2] = values
            return x * 2

        return function

    both = split(make)
    for n in range(8):
        both(*masked(device, n))
    assert replayed(both.recorded) == 6


def test_c08_such_an_operator_writes_a_tensor_outside(device):
    def make():
        state = torch.zeros(6, device=device)

        def function(x, values):
            state.add_(x)
            state[x > x[0] + 0.2] = values
            return state * 2

        return function, state

    both = split(make)
    for n in range(8):
        both(*masked(device, n))
    assert replayed(both.recorded) == 6


@may_run_live
def test_c06_such_an_operator_in_the_forward_of_a_step(device):
    """Its backward counts on the host as well: nothing is recorded, and the gradients are right."""

    def make():
        net = nn.Linear(6, 6, device=device)

        def step(x, values):
            net.zero_grad()
            y = net(x) * 1
            y[x > x[0] + 0.2] = values
            y.square().sum().backward()

        return step, net

    both = split(make)
    for n in range(8):
        both(*masked(device, n))


def test_c06_such_an_operator_beside_the_gradients(device):
    def make():
        net = nn.Linear(6, 6, device=device)

        def step(x, values):
            weights = torch.ones_like(x)
            weights[x > x[0] + 0.2] = values
            net.zero_grad()
            (net(x) * weights).square().sum().backward()

        return step, net

    both = split(make)
    for n in range(8):
        both(*masked(device, n))
    assert replayed(both.recorded) >= 5


@may_run_live
@pytest.mark.parametrize("what", ["item", "nonzero", "unique"])
def test_c11_what_has_no_fixed_shape_runs_live_as_a_whole(device, what):
    def make():
        def function(x):
            y = x * 2
            if what == "item":
                return y * y.sum().item()
            return y.nonzero().sum() + y if what == "nonzero" else torch.unique(y.round()).sum() + y

        return function

    both = split(make)
    run(both, device)
    if what == "item":
        assert 'torch.compile(..., backend="phonograph")' in pg.explain(both.recorded)


@may_run_live
def test_c11_shapes_that_only_now_and_then_change(device):
    def make():
        def function(x):
            return x.nonzero().sum() + torch.rand_like(x)

        return function

    both = split(make)
    for n in range(16):
        x = ramp(device, 6, start=1)
        x[: n % 8 == 7] = 0
        both(x)
    assert replayed(both.recorded) > 6


@torch.library.custom_op("phonograph_tests::times_its_matches", mutates_args=())
def times_its_matches(x: torch.Tensor) -> torch.Tensor:
    return x * int((x > 0.5).sum())


def test_c11_an_operator_whose_own_code_needs_the_host(device):
    both = split(lambda: lambda x: times_its_matches(x + 0.2) + torch.rand_like(x))
    run(both, device, 8)
    assert replayed(both.recorded) >= 5
    assert "live between its segments: phonograph_tests::times_its_matches" in pg.explain(both.recorded)
