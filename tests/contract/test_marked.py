"""`@pg.live` in a function that is recorded with `fallback="split"`: it runs once in each call, between the segments."""

import functools

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.testing import SideBySide, assert_same
from tests.helpers import counts, may_run_live, side_by_side


def ramp(device, *shape, start=0.0):
    n = torch.Size(shape).numel()
    return torch.arange(start, start + n, device=device).reshape(shape) / 8


def split(make, **options):
    return side_by_side(make, fallback="split", **options)


def reasons(both):
    return " ".join(pg.stats(both.recorded).refusals)


def run(both, device, calls=6, size=6):
    for n in range(calls):
        both(ramp(device, size, start=n))


def assert_split(both, calls=6):
    """All calls but the first were replayed."""
    assert counts(both) == (1, 1, calls - 1), pg.explain(both.recorded)


def test_c12_what_is_logged_is_logged_once_a_call(device):
    def make():
        log = []

        @pg.live
        def note(x, name, *, scale):
            log.append((name, float(x.sum()) * scale))

        def function(x):
            y = x.sin() * 2
            note(y, "y", scale=3)
            z = y.cumsum(0)
            note(z, name="z", scale=0.5)
            return z + y

        return function, log

    both = split(make)
    run(both, device)
    assert_split(both)
    assert len(both.state) == 12
    assert pg.explain(both.recorded).count("live between its segments: ") == 2
    assert "note at " in pg.explain(both.recorded)


@pytest.mark.parametrize("grad", [True, False])
def test_c11_what_it_gives_is_what_the_rest_works_with(device, grad):
    def make():
        @pg.live
        def route(scores):
            order = sorted(range(len(scores)), key=lambda i: -scores[i].item())
            return {"first": torch.tensor(order[:3], device=scores.device), "none": None, "same": scores}

        def function(x):
            scores = (x * 3).cos()
            found = route(scores)
            assert found["same"] is scores
            return x[found["first"]] + found["same"][:3], found["first"]

        return function

    both = split(make, hold=True)
    with torch.set_grad_enabled(grad):
        run(both, device)
    assert_split(both)


def make_step(device, look, *, zero="first"):
    net, log = nn.Linear(6, 6, device=device), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

    @pg.live
    def note(loss):
        log.append(look(net, loss))

    def step(x):
        if zero == "first":
            optimizer.zero_grad()
        loss = net(x).square().sum()
        loss.backward()
        note(loss)
        optimizer.step()
        if zero == "last":
            optimizer.zero_grad()
        return loss.detach()

    return step, (net, optimizer, log)


@pytest.mark.parametrize("zero", ["first", "outside"])
@pytest.mark.parametrize("drop", [True, False])
def test_c06_it_sees_the_gradients_of_the_step_in_which_it_runs(device, zero, drop):
    def make():
        return make_step(
            device, lambda net, loss: (loss.item(), net.weight.grad.norm().item(), net.bias.grad.tolist()), zero=zero
        )

    both = split(make)
    for n in range(6):
        both(ramp(device, 6, start=n))
        if drop or zero == "outside":
            both.change(lambda state: state[1].zero_grad())
    assert counts(both)[2] >= 3, pg.explain(both.recorded)
    assert len(both.state[2]) == 6


@may_run_live
def test_c06_gradients_that_are_gone_when_the_step_ends(device):
    both = split(lambda: make_step(device, lambda net, loss: net.weight.grad.norm().item(), zero="last"))
    run(both, device)
    assert len(both.state[2]) == 6


def test_c06_gradients_that_it_keeps(device):
    """Then they must not be overwritten."""
    both = split(lambda: make_step(device, lambda net, loss: net.weight.grad))
    with pytest.warns(pg.RunsLive, match="gradient"):
        run(both, device)
    assert len(both.state[2]) == 6


@may_run_live
@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("which", ["argument", "of the call", "view", "outside", "view of outside"])
def test_c08_it_writes_what_it_is_given(device, which, seen):
    def make():
        state = torch.zeros(6, device=device)

        @pg.live
        def write(t):
            (t if seen else t.data).add_(t.sum().item())

        def function(x):
            y = x * 2 + state
            given = {"argument": x, "of the call": y, "view": y[1:4], "outside": state, "view of outside": state[::2]}[which]
            write(given)
            state.mul_(0.5)
            return y + x + state, x.clone()

        return function, state

    both = split(make, hold=True)
    run(both, device)
    if seen or which not in ("argument", "view of outside"):  # of which a recording has to know
        assert_split(both)


def test_c05_it_keeps_what_it_is_given(device):
    def make():
        kept = []
        keep = pg.live(lambda y: kept.extend([y, y[1:]]))

        def function(x):
            y = x * 2
            keep(y)
            return y.exp()

        return function, kept

    both = split(make, hold=True)
    run(both, device)
    assert_split(both)
    assert len(both.state) == 12


@may_run_live
@pytest.mark.parametrize("what", ["keeps", "attribute of a list", "outside", "part"])
def test_c05_it_keeps_what_it_gives(device, what):
    """The rest writes there, and so into what was kept."""

    def make():
        kept, table = [], torch.zeros(6, device=device)

        @pg.live
        def give(x):
            y = x.clone()
            if what == "keeps":
                kept.append(y)
            elif what == "attribute of a list":
                kept.append({"y": [y[:2]]})
            elif what == "part":
                return y[2:]
            return table if what == "outside" else y

        def function(x):
            y = give(x * 2)
            y.add_(1)
            return y * 3

        return function, (kept, table)

    both = split(make)
    run(both, device)
    assert "return a clone" in reasons(both)


@may_run_live
@pytest.mark.parametrize("late", ["keeps", "number", "shape", "history", "writes"])
def test_c12_something_else_than_before(device, late):
    """The call begins again; what has run in it does not run a second time."""

    def make():
        log, weight = [], nn.Parameter(torch.ones(6, device=device))
        state = torch.zeros(6, device=device)

        @pg.live
        def first(x):
            log.append(("first", x.sum().item() + torch.rand(1).item()))
            x.mul_(2)
            return torch.rand_like(x)

        @pg.live
        def second(x):
            log.append(("second", x.sum().item()))
            y = torch.rand(len(x), device=device)
            if len(log) == 8:
                if late == "keeps":
                    log.append(y)
                if late == "writes":
                    x.add_(1)
                return {"number": 3.0, "shape": y[:1].clone(), "history": weight * 2}.get(late, y)
            return y

        def function(x):
            state.add_(x)
            y = torch.rand_like(x) + state
            z = first(y)
            w = second(y * z)
            out = y + z + w + torch.rand_like(x)
            state.add_(1)
            return out.detach() * 2

        return function, (log, state)

    both = split(make, hold=True)
    run(both, device, calls=7)
    assert "second gives a result of another shape" in reasons(both)
    assert counts(both)[2] == {"number": 2, "shape": 4, "writes": 4}.get(late, 5)
    assert len([entry for entry in both.state[0] if isinstance(entry, tuple)]) == 14


def test_c08_it_changes_what_the_rest_relies_on(device):
    """Seen to do so in a live call, the function runs live; for the first time in a replay, that call has no result."""
    scale, calls = [2.0], []

    @pg.live
    def change():
        calls.append(len(calls))
        if len(calls) == 4:
            scale[0] = 3.0

    state = torch.zeros(2, device=device)

    @pg.record(warmup=1, fallback="split")
    def function(x):
        state.add_(1)
        y = x * scale[0]
        change()
        return y * scale[0]

    x = ramp(device, 2, start=1)
    for _ in range(3):
        assert_same(function(x), x * 4)
    with pytest.raises(RuntimeError, match=r"change is marked @pg\.live and has changed .*test_marked\.py:\d+"):
        function(x)
    assert state.tolist() == [3, 3]
    for _ in range(3):
        assert_same(function(x), x * 9)
    assert len(calls) == 7


@may_run_live
def test_c08_it_is_seen_to_change_what_the_rest_relies_on(device):
    def make():
        scale = [2.0]

        @pg.live
        def change():
            scale[0] += 1

        def function(x):
            y = x * scale[0]
            change()
            return y * scale[0]

        return function, scale

    both = split(make)
    run(both, device)
    assert "besides giving its result" in reasons(both)


class Trainer:
    def __init__(self, device):
        self.weight = torch.ones(6, device=device)
        self.calls, self.history = 0, []

    @pg.live
    def count(self, y):
        self.calls += 1
        self.history.append((self.calls, y.max().item()))

    def step(self, x):
        y = x * self.weight
        self.count(y)
        return y + 1


def test_c12_a_method_that_counts(device):
    both = split(lambda: (lambda trainer: (trainer.step, (trainer.weight, trainer.history)))(Trainer(device)))
    run(both, device)
    assert_split(both)


def test_c12_it_raises(device):
    def make():
        state = torch.zeros(6, device=device)

        @pg.live
        def check(y):
            if y[0].item() > 3:
                raise ValueError("too large")

        def function(x):
            state.add_(x)
            check(state)
            state.mul_(2)
            return state + 1

        return function, state

    both = split(make)
    for n in (0, 1, 2, 30, 0, 1):
        if n == 30:
            with pytest.raises(ValueError, match="too large"):
                both(ramp(device, 6, start=n))
            both.change(torch.Tensor.zero_)
        else:
            both(ramp(device, 6, start=n))
    assert counts(both) == (1, 1, 5)


@may_run_live
@pytest.mark.parametrize(
    "what",
    ["number", "history", "differentiates", "adds gradients", "shares", "in a hook", "in checkpoint", "writes a history"],
)
def test_c11_what_cannot_be_done_between_segments_runs_live(device, what):
    def make():
        net, log = nn.Linear(6, 6, device=device), []

        @pg.live
        def work(x, y):
            log.append(x.sum().item())
            if what == "number":
                return log[-1]
            if what == "history":
                return x * 2
            if what == "differentiates":
                return torch.autograd.grad(y.sum(), x, retain_graph=True)[0].detach()
            if what == "adds gradients":
                y.sum().backward(retain_graph=True)
            if what == "writes a history":
                y.mul_(2)
            return torch.ones_like(x)

        def step(x):
            net.zero_grad()
            h = net(x)
            if what == "in a hook":
                h.register_hook(lambda g: work(g, g) * g)
                found = 1
            elif what == "in checkpoint":
                found = torch.utils.checkpoint.checkpoint(lambda h: h * work(h, h), h, use_reentrant=False)
            else:
                y = h.sin() * 2
                found = work(h, y if what != "shares" else h[1:]) * y
            loss = (h * found).sum()
            loss.backward()
            return loss.detach()

        return step, (net, log)

    both = split(make)
    run(both, device)
    if what != "in checkpoint":
        assert counts(both)[2] == 0
        assert "work" in reasons(both)


def test_c11_in_inference_mode(device):
    def make():
        log = []
        note = pg.live(lambda x: log.append(x.sum().item()))

        def function(x):
            note(x * 2)
            return x * 3

        return function, log

    both = split(make)
    with torch.inference_mode(), pytest.warns(pg.RunsLive, match="inference mode"):
        run(both, device)


@pytest.mark.parametrize("fallback", ["live", "error"])
def test_c11_without_split_the_whole_runs_live(device, fallback):
    @pg.live
    def note(x):
        return x.sum().item()

    f = pg.record(lambda x: (note(x), x * 2), warmup=0, fallback=fallback)
    how = (
        pytest.raises(pg.Unrecordable, match=r"note.*@pg\.live")
        if fallback == "error"
        else pytest.warns(pg.RunsLive, match="note")
    )
    with how:
        f(ramp(device, 3))


def test_c11_beside_operators_that_need_the_host(device):
    def make():
        log = []

        @pg.live
        def note(x):
            y = x.clone()
            y[x > 0.3] = 1.0  # such an operator, and its own
            log.append(y.nonzero().tolist())
            return y

        def function(x, values):
            y = x * 2
            y[x > x[0] + 0.2] = values
            z = note(y)
            z[x > x[0] + 0.2] = values * 2
            return y + z + torch.rand_like(x)

        return function, log

    both = split(make)
    for n in range(7):
        x = ramp(device, 6, start=n)
        both(x, torch.full((int((x > n / 8 + 0.2).sum()),), 7.0 + n, device=device))
    assert counts(both)[2] >= 5
    assert pg.explain(both.recorded).count("live between its segments: ") == 3


def test_c09_a_wrapper_and_what_only_it_reads(device):
    """A decorator around it is the user's own code; what the marked function alone names is nobody's reliance."""

    def make():
        outer, inner = [1.0], [1.0]

        def scaled(f):
            @functools.wraps(f)
            def g(x):
                return f(x * outer[0])

            return g

        @scaled
        @pg.live
        def work(x):
            inner[0] += 1
            return x + inner[0]

        return lambda x: work(x) * 2, (outer, inner)

    both = split(make)
    run(both, device)
    assert_split(both)
    both.change(lambda state: state[0].__setitem__(0, 5.0))
    run(both, device)
    assert counts(both)[1] == 2


def test_c09_it_is_replaced(device):
    def make():
        works = [pg.live(lambda x: x + 1), pg.live(lambda x: x - 1)]
        return lambda x: works[0](x * 2) * 2, works

    both = split(make)
    for _ in range(2):
        run(both, device)
        for state in (both.state, both.live_state):
            state.reverse()
    assert counts(both)[1] == 2


def test_c12_warmup_of_none_and_a_dry_capture(device):
    log = []
    note = pg.live(lambda x: log.append(x.sum().item()))

    def function(x):
        note(x * 2)
        return x * 3

    f = pg.record(function, warmup=0, fallback="split")
    for n in range(5):
        f(ramp(device, 3, start=n))
    assert len(log) == 5
    assert counts(f)[2] >= 3


def test_c12_other_recorded_functions_inside(device):
    def make():
        inner = pg.record(lambda x: x.sin() * 2, warmup=1)
        work = pg.live(lambda x: inner(x) + 1)
        return lambda x: work(x * 2) * 3

    both = split(make)
    run(both, device)
    assert_split(both)


def test_c16_random_numbers_before_within_and_after(device):
    def make():
        log = []

        @pg.live
        def draw(x):
            log.append(torch.rand(1).item())
            return torch.randn_like(x) + torch.rand(len(x), device=device)

        return lambda x: torch.rand_like(x) + draw(x) * torch.rand_like(x), log

    both = split(make)
    run(both, device)
    assert_split(both)


def test_c08_the_same_as_side_by_side_of_what_is_not_marked(device):
    """Marking changes nothing outside of recorded functions."""
    plain = pg.live(lambda x: x * 2)
    assert_same(plain(ramp(device, 3)), ramp(device, 3) * 2)
    both = SideBySide(lambda: lambda x: plain(x) + 1, warmup=0, fallback="split")
    run(both, device)


@may_run_live
@pytest.mark.parametrize("through", ["it", "a view", "what it is a view of", "nothing"])
@pytest.mark.parametrize("what", ["itself", "a part", "in a list"])
def test_c05_it_keeps_what_is_written_later(device, what, through):
    """Eager shows the owner what is written: a copy would not."""

    def make():
        kept = []

        @pg.live
        def keep(y):
            kept.append(y if what == "itself" else y[1:] if what == "a part" else {"y": (y,)})

        def function(x):
            base = x * 2
            y = base[2:]
            keep(y)
            if through != "nothing":
                {"it": y, "a view": y[:3], "what it is a view of": base}[through].mul_(3)
            return base + 1

        return function, kept

    both = split(make, hold=True)
    run(both, device)
    assert counts(both)[2] == (5 if through == "nothing" else 0)


@may_run_live
def test_c05_it_writes_what_one_was_given_before(device):
    def make():
        kept = []
        keep = pg.live(lambda y: kept.append(y))
        write = pg.live(lambda: kept[-1].mul_(2))

        def function(x):
            y = x * 2
            keep(y)
            write()
            return y + 1

        return function, kept

    both = split(make)
    run(both, device)
    assert "writes what one was given before it" in reasons(both)


@pytest.mark.parametrize("what", ["keeps", "writes"])
def test_c05_it_does_so_for_the_first_time_in_a_replay(device, what):
    kept, calls = [], []

    @pg.live
    def look(y):
        calls.append(len(calls))
        if len(calls) == 4 or what == "writes":
            kept.append(y)

    @pg.live
    def write():
        if len(calls) == 4 and what == "writes":
            kept[-1].mul_(2)

    state = torch.zeros(3, device=device)

    @pg.record(warmup=1, fallback="split")
    def function(x):
        state.add_(1)
        y = x * 2
        look(y)
        write()
        if what == "keeps":
            y.add_(1)
        return y * 2

    x, plus = ramp(device, 3), 2 * (what == "keeps")
    for _ in range(3):
        assert_same(function(x), x * 4 + plus)
    message = "has kept a tensor that is written later" if what == "keeps" else "has written what one was given before it"
    with pytest.raises(RuntimeError, match=message):
        function(x)
    assert state.tolist() == [3] * 3
    for _ in range(3):
        assert_same(function(x), x * 4 + plus)
    assert state.tolist() == [6] * 3
    assert len(calls) == 7
    assert counts(function)[1] == 2
