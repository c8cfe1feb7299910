"""`@pg.live` in a recorded function: it runs once in each call, between the segments of the recording."""

import contextlib
import ctypes
import functools
import sys
import weakref

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
    return side_by_side(make, **options)


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
    if which != "view of outside":
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
@pytest.mark.parametrize("late", ["keeps", "number", "shape", "writes"])
def test_c12_something_else_than_before(device, late):
    """The call begins again; what has run in it does not run a second time."""

    def make():
        log = []
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
                return {"number": 3.0, "shape": y[:1].clone()}.get(late, y)
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
    did = "writes others of its arguments" if late == "writes" else "gives a result of another shape"
    assert f"second {did}" in reasons(both)
    assert counts(both)[2] == {"number": 2, "shape": 4}.get(late, 5)
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

    @pg.record(warmup=1)
    def function(x):
        state.add_(1)
        y = x * scale[0]
        change()
        return y * scale[0]

    x = ramp(device, 2, start=1)
    for _ in range(3):
        assert_same(function(x), x * 4)
    with pytest.raises(RuntimeError, match=r"change runs live between .* changes something .*test_marked\.py:\d+"):
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


@pytest.mark.parametrize("fallback", ["live", "error", "split"])
def test_c11_one_that_gives_a_number(device, fallback):
    """The whole runs live, or raises. What it gives shows in the first call, which is a live one."""

    @pg.live
    def note(x):
        return x.sum().item()

    f = pg.record(lambda x: (note(x), x * 2), warmup=0, fallback=fallback)
    f(ramp(device, 3))
    error = fallback == "error"
    said = r"note live, which returns a float"
    how = pytest.raises(pg.Unrecordable, match=said) if error else pytest.warns(pg.RunsLive, match=said)
    with how:
        f(ramp(device, 3))


@pytest.mark.parametrize("warmup", [0, 1, 2])
@pytest.mark.parametrize("hidden", [False, True])
def test_c12_calls_until_it_is_recorded(device, warmup, hidden):
    """Where nothing can be known of it beforehand, it takes one live call more."""
    seen = []
    note = pg.live(lambda x: seen.append(x[0].item()))
    address = id(note)
    find = (lambda: ctypes.cast(address, ctypes.py_object).value) if hidden else (lambda: note)

    f = pg.record(lambda x: (find()(x), x * 2)[1], warmup=warmup)
    for n in range(6):
        assert_same(f(ramp(device, 3, start=n)), ramp(device, 3, start=n) * 2)
    assert seen == [n / 8 for n in range(6)]
    live = warmup + (hidden or not warmup)
    assert (pg.stats(f).live, pg.stats(f).replayed) == (live, 6 - live), pg.explain(f)


class Closed:
    def __init__(self, log):
        self.log = log

    def close(self):
        self.log.append("closed")


class Counting:
    def __init__(self, log):
        self.log = log

    def __enter__(self):
        self.log.append("in")

    def __exit__(self, *error):
        self.log.append("out")


@contextlib.contextmanager
def tidying(log):
    try:
        yield
    finally:
        log.append("tidied")


def _tried(f, x, log):
    try:
        return f(x)
    except ValueError:
        return x * 3


def _tried_for_keys(f, x, log):
    try:
        return f(x)
    except KeyError:
        return x * 3


def _finally(f, x, log):
    try:
        return f(x)
    finally:
        x.add_(1)


def _deep(f, x, log):
    try:
        with torch.no_grad():
            for _ in range(1):
                x = (lambda: f(x))()
        return x + 1
    except ValueError:
        return x * 3


def _suppressed(f, x, log):
    with contextlib.suppress(ValueError):
        return f(x)
    return x * 3


def _managed(f, x, log):
    with Counting(log):
        return f(x)


def _tidied(f, x, log):
    with tidying(log):
        return f(x)


def _closing(f, x, log):
    with contextlib.closing(Closed(log)):
        return f(x)


quiet = contextlib.suppress


def _under_another_name(f, x, log):
    with quiet(ValueError):
        return f(x)
    return x * 3


def _expected(f, x, log):
    with pytest.raises(ValueError, match="x") if len(log) > 99 else contextlib.nullcontext():
        return f(x)


def _forked(f, x, log):
    with torch.random.fork_rng(devices=[]):
        return f(x + torch.rand(6, device=x.device))


def _decorated(f, x, log):
    return tidying(log)(f)(x)


def _always_called(f, x, log):
    module = nn.Identity()
    module.forward = lambda x: f(x)
    module.register_forward_hook(lambda *_: log.append(1), always_call=True)
    return module(x)


def _known_managers(f, x, log):
    context = torch.autocast(x.device.type, enabled=False)
    with context, torch.random.fork_rng(devices=[], enabled=False), contextlib.nullcontext():
        return f(x)


def _in_a_handler(f, x, log):
    try:
        raise KeyError
    except KeyError:
        return f(x)


def _before_and_after(f, x, log):
    x = f(x)
    try:
        y = int("7")
    except ValueError:
        y = 3
    finally:
        x = x + 1
    return f(x) * y


def _in_no_grad(f, x, log):
    try:
        y = x + 1
    except ValueError:
        y = x * 3
    with torch.no_grad(), torch.autograd.profiler.record_function("here"):
        y = f(y)
    return y


def _retried(f, x, log):
    for _ in range(2):
        try:
            y = x * 2
            break
        except ValueError:
            continue
    return f(y)


def _packages(clause):
    """A function of an installed package, which calls `f` with that clause around it."""
    lines = ["def around(f, x, log):", "    y = x", "    try:", "        y = f(x)", clause, "    return y"]
    space = {}
    exec(compile("\n".join(lines), "/usr/lib/site-packages/package.py", "exec"), space)
    return space["around"]


_a_packages_finally = _packages("    finally:\n        pass")
_a_packages_except = _packages("    except ValueError:\n        y = x * 3")
_a_packages_other_except = _packages("    except KeyError:\n        y = x * 3")
_a_packages_note = _packages("    except Exception as error:\n        said = str(x.shape)\n"
                             "        raise error from RuntimeError(f'in a package: {said}')")  # fmt: skip
_a_packages_raise = _packages("    except Exception:\n        raise")
_a_packages_own_error = _packages("    except ValueError as error:\n        raise RuntimeError from error")


@may_run_live
@pytest.mark.parametrize("fails", [-1, 3])
@pytest.mark.parametrize(
    ("around", "recorded"),
    [(_tried, False), (_tried_for_keys, False), (_finally, False), (_deep, False), (_suppressed, False), (_managed, False),
     (_tidied, False), (_closing, False), (_under_another_name, False), (_expected, False), (_forked, False),
     (_decorated, False), (_a_packages_except, False), (_a_packages_other_except, False), (_a_packages_finally, True),
     (_a_packages_note, True), (_a_packages_raise, True), (_a_packages_own_error, False),
     (_always_called, None), (_known_managers, None), (_in_a_handler, None), (_before_and_after, True), (_in_no_grad, True),
     (_retried, True)],
)  # fmt: skip
def test_c13_code_around_it_that_would_run_after_an_exception(device, around, recorded, fails):
    """There the whole runs live; code beside it does not matter. (Which code that is is known from Python 3.11 on.)"""
    error = KeyError if around is _tried_for_keys else ValueError

    def make():
        log, tidied = [], []

        @pg.live
        def work(x):
            log.append(x.sum().item())
            if len(log) == fails:
                raise error
            return x.sin()

        return lambda x: around(work, x, tidied), (log, tidied)

    both = split(make)
    for n in range(7):
        both.outcome(ramp(device, 6, start=n))
        both.check()
    if recorded is not None and sys.version_info >= (3, 11):
        assert (counts(both)[2] > 0) == recorded, pg.explain(both.recorded)


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

    both = split(make, fallback="split")
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

    f = pg.record(function, warmup=0)
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
    both = SideBySide(lambda: lambda x: plain(x) + 1, warmup=0)
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

    @pg.record(warmup=1)
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
    message = "keeps a tensor that others may write later" if what == "keeps" else "writes what one was given before it"
    with pytest.raises(RuntimeError, match=message):
        function(x)
    assert state.tolist() == [3] * 3
    for _ in range(3):
        assert_same(function(x), x * 4 + plus)
    assert state.tolist() == [6] * 3
    assert len(calls) == 7
    assert counts(function)[1] == 2


# What a marked function may do besides: each call, or in one of them for the first time.


def _nothing(*_):
    """Of an expression, in a lambda."""


def _sets_lr(t):
    t.optimizer.param_groups[0]["lr"] = 0.1 / t.calls


def _sets_weight_decay(t):
    t.optimizer.param_groups[0]["weight_decay"] = 0.1 * t.calls


def _returns_what_it_keeps(t, give):
    t.kept["k"] = give
    return t.kept


def _weakly(t, y):
    t.refs.append(weakref.ref(y))
    return y


def _memory(t, y):
    t.refs.append(y.untyped_storage())
    return y


DOES = {
    "sets lr": lambda t, d: _sets_lr(t),
    "sets weight decay": lambda t, d: _sets_weight_decay(t),
    "sets an item": lambda t, d: d.__setitem__("y", d["y"] * 2),
    "adds an item": lambda t, d: d.__setitem__("z", d["y"] * 2),
    "adds a number": lambda t, d: d.__setitem__("n", 3),
    "reverses a list": lambda t, d: d["l"].reverse(),
    "appends to a list": lambda t, d: d["l"].append(d["l"][0] * 2),
    "keeps a list": lambda t, d: t.kept.__setitem__("l", d["l"]),
    "returns what it keeps": lambda t, d: _returns_what_it_keeps(t, d["y"].detach().clone()),
    "returns memory of an array": lambda t, d: {"k": torch.from_numpy(t.array).to(d["y"].device)},
    "returns a tensor with a weak reference": lambda t, d: {"k": _weakly(t, d["y"].detach().clone())},
    "keeps the memory of what it returns": lambda t, d: {"k": _memory(t, d["y"].detach().clone())},
    "requires a gradient": lambda t, d: _nothing(d["y"].requires_grad_()),
    "replaces data": lambda t, d: setattr(d["y"], "data", d["y"].data * 2),
    "transposes": lambda t, d: _nothing(d["m"].t_()),
    "unsqueezes": lambda t, d: _nothing(d["y"].unsqueeze_(0)),
    "disables gradients": lambda t, d: _nothing(torch.set_grad_enabled(False)),
    "sets a hook": lambda t, d: _nothing(d["h"].register_hook(lambda g: t.kept.__setitem__("grad", g.clone()))),
    "retains a gradient": lambda t, d: d["h"].retain_grad(),
    "gives a history": lambda t, d: {"k": d["h"] * 2},
    "gives a view": lambda t, d: {"k": d["y"][:6]},
    "evaluates and trains": lambda t, d: _nothing(t.net.eval(), t.net.train()),
    "sets an equal number": lambda t, d: setattr(t, "scale", float("1.5")),
    "sets another number": lambda t, d: setattr(t, "scale", 1.5 + t.calls),
    "writes the state": lambda t, d: _nothing(t.state.add_(1)),
    "writes a gradient": lambda t, d: (t.net.weight.grad is not None and t.net.weight.grad.mul_(2) is None) or None,
    "writes the state unseen": lambda t, d: _nothing(t.state.data.add_(1)),
}


class Task:
    def __init__(self, device, does, late):
        self.net = nn.Linear(6, 6, device=device)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.5)
        self.state, self.scale = torch.zeros(6, device=device), 1.5
        self.calls, self.late, self.does, self.kept = 0, late, does, {}
        self.array = torch.zeros(6).numpy()
        self.refs = []

    @pg.live
    def work(self, d):
        self.calls += 1
        if not self.late or self.calls == 4:
            return DOES[self.does](self, d)
        gives = "gives" in d
        return {"k": d["y"].detach().clone()} if gives else None

    @pg.live
    def varies(self, y):
        return torch.ones(5 if self.calls == 6 else 6, device=y.device)

    def step(self, x, gives):
        self.optimizer.zero_grad()
        h = self.net(x) * self.scale
        y = x * 2 + self.state
        d = {"y": y, "h": h, "m": y[None].expand(6, 6) * 1, "l": [y + 1, y + 2]}
        if gives:
            d["gives"] = True
        found = self.work(d)
        varying = self.varies(y)
        if found:
            found["k"].add_(1) if not found["k"].requires_grad else None
            y = y.detach() + found["k"]
        out = (d["y"] + d["l"][0] * 2 + y.reshape(-1)[:6] + d["m"].sum(0) + len(d)) * self.scale
        loss = (h * out.detach()).square().sum()
        if loss.requires_grad:
            loss.backward()
            self.optimizer.step()
        self.state.mul_(0.5)
        return out.detach(), y.requires_grad, varying.sum()


@may_run_live
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("does", DOES)
def test_c12_whatever_it_does(device, does, late):
    """Seen in a live call, it is right, if need be live. Late, it may raise, and says so."""

    def make():
        task = Task(device, does, late)
        return task.step, (task.net, task.optimizer, task.state, task.array)

    gives = does.startswith(("returns", "gives", "keeps the memory"))
    grad_mode = torch.is_grad_enabled()
    both, failed = split(make), ""
    try:
        for n in range(9):
            torch.set_grad_enabled(grad_mode)
            both(ramp(device, 6, start=n), gives)
            both.check()
    except (RuntimeError, AssertionError) as e:  # the second: only the recorded one has raised
        failed = str(e)
    finally:
        torch.set_grad_enabled(grad_mode)
    may_raise = late or does in ("sets lr", "sets weight decay")  # which cannot be unset where the call begins again
    assert not failed or (may_raise and "runs live between the segments of a recording, and" in failed), failed
    if late:
        assert counts(both)[2] >= 2


def test_c12_an_exception_before_the_backward(device):
    """Gradients are then as they were."""

    def make():
        net, state = nn.Linear(6, 6, device=device), torch.zeros(6, device=device)

        @pg.live
        def check(loss, h):
            h.add_(1)
            state.add_(h)
            if loss.item() > 1000:
                raise ValueError("diverged")

        def step(x):
            loss = net(x).square().sum()
            check(loss.detach(), x.sin())
            loss.backward()
            return loss.detach()

        return step, (net, state)

    for when in (1, 3):
        both = split(make)
        for n in range(6):
            if n == when:
                with pytest.raises(ValueError, match="diverged"):
                    both(ramp(device, 6, start=500))
                both.check()
            else:
                both(ramp(device, 6, start=n))
            if n % 2:
                both.change(lambda state: state[0].zero_grad())
        assert counts(both)[2] >= 3


@may_run_live
@pytest.mark.parametrize("writes", ["function", "marked"])
def test_c08_an_argument_that_the_marked_function_has_as_well(device, writes):
    buffers = [torch.zeros(6, device=device), torch.zeros(6, device=device)]
    logs = [[], []]

    def make(i):
        @pg.live
        def note():
            if writes == "marked":
                buffers[i].add_(10)
            logs[i].append(buffers[i].sum().item())

        def f(x):
            if writes == "function":
                x.add_(1)
            note()
            return x * 2

        return f

    f, live = pg.record(make(0), warmup=1), make(1)
    for n in range(6):
        assert_same(f(buffers[0]), live(buffers[1]))
        other = ramp(device, 6, start=n)
        assert_same(f(other.clone()), live(other.clone()))
        assert logs[0] == logs[1]
    assert_same(buffers[0], buffers[1])


@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_c12_under_a_transform_of_functorchs(device, transform):
    def make():
        log = []
        note = pg.live(lambda x: log.append(tuple(x.shape)))

        def inner(x):
            note(x)
            return x.square().sum()

        return lambda x: getattr(torch.func, transform)(inner)(x), log

    both = split(make)
    with pytest.warns(pg.RunsLive, match="of a transform"):
        run(both, device)


@may_run_live
@pytest.mark.parametrize("size", [6, 18 << 20])
@pytest.mark.parametrize("what", ["given", "in a list", "unseen, and another varies"])
def test_c12_a_tensor_outside_that_it_writes_for_the_first_time_in_a_replay(device, what, size):
    """The call begins again with what was there before it. What is too large to be noted before each replay cannot be put back:
    then it raises, where that is seen."""

    def make():
        weight, calls = torch.ones(size, device=device), []

        @pg.live
        def clip(given):
            calls.append(1)
            t = given if what == "given" else given[0]
            if len(calls) >= 5:
                (t.data if "unseen" in what else t).mul_(0.5)

        varies = pg.live(lambda x: torch.ones(2 if len(calls) == 5 and "unseen" in what else 3, device=device))

        def f(x):
            y = x * weight[:6]
            clip(weight if what == "given" else [weight])
            return y, weight[:6] + varies(x).sum()

        return f, weight

    if size > 6 and "unseen" in what:
        pytest.skip("in the list of limits")
    both = split(make)
    for n in range(9):
        if size > 6 and n == 4:
            with pytest.raises(AssertionError, match="too large to be put back"):
                both(ramp(device, 6, start=n))
            break
        both(ramp(device, 6, start=n))
        both.check()
    assert counts(both)[2] >= 2


def test_c13_gradients_after_a_replay_that_is_given_up(device):
    """Those of an earlier call lay where it has written. None is better than other numbers."""
    net, calls, state = nn.Linear(6, 6, device=device), [], torch.zeros(6, device=device)

    @pg.live
    def work(loss):
        calls.append(1)
        if len(calls) == 5:
            net.flag = 3.0

    @pg.record(warmup=1)
    def step(x):
        net.zero_grad()
        loss = (net(x) * getattr(net, "flag", 1.0)).square().sum()
        loss.backward()
        state.add_(1)
        work(loss.detach())
        return loss.detach()

    for n in range(4):
        step(ramp(device, 6, start=n))
    with pytest.raises(RuntimeError, match="changes something on which"):
        step(ramp(device, 6, start=4))
    assert [p.grad for p in net.parameters()] == [None, None]
    assert_same(state, torch.full((6,), 4.0, device=device))
    step(ramp(device, 6, start=5))
    found = net.weight.grad.clone()
    net.zero_grad()
    (net(ramp(device, 6, start=5)) * 3.0).square().sum().backward()
    assert_same(found, net.weight.grad)


@pytest.mark.parametrize("seen", [True, False])
def test_c12_a_tensor_outside_that_it_writes_and_another_that_varies(device, seen):
    """The call begins again with what the first has written."""

    def make():
        state, calls = torch.zeros(6, device=device), []
        add = pg.live(lambda t: _nothing((t if seen else t.data).add_(1)))

        @pg.live
        def varies(x):
            calls.append(1)
            return x[:2].clone() if len(calls) == 5 else x.clone()

        def f(x):
            add(state)
            state.mul_(2)
            return varies(x * state) * 2

        return f, state

    both = split(make)
    with pytest.warns(pg.RunsLive, match="another shape"):
        run(both, device, calls=9)


@pytest.mark.parametrize("fused", [False, True])
def test_c08_schedulers_and_hyper_parameters_that_it_sets(device, fused):
    """Each segment works with those that are there when it begins."""

    def make():
        net, calls = nn.Linear(6, 6, device=device), []
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5, weight_decay=0.1, fused=fused)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

        @pg.live
        def adjust():
            calls.append(1)
            if len(calls) % 3 == 0:
                optimizer.param_groups[0]["lr"] *= 1.5
                optimizer.param_groups[0]["weight_decay"] = 0.01 * len(calls)

        schedule = pg.live(lambda: scheduler.step())

        def step(x):
            optimizer.zero_grad()
            loss = net(x).square().sum()
            loss.backward()
            adjust()
            optimizer.step()
            schedule()
            return loss.detach()

        return step, (net, optimizer)

    both = split(make)
    run(both, device, calls=9)
    assert counts(both)[2] >= 6


@pytest.mark.parametrize("where", ["no_grad", "function", "no_grad around, grad within", "jvp"])
def test_c07_where_gradients_are_not_as_outside(device, where):
    def make():
        net, log = nn.Linear(6, 6, device=device), []

        @pg.live
        def note(h):
            log.append((h.sum().item(), torch.is_grad_enabled(), h.requires_grad))
            return h.detach().cos()

        class Doubled(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2 + note(x)

            @staticmethod
            def backward(ctx, grad):
                return grad * 2

        def step(x):
            net.zero_grad()
            h = net(x)
            if where == "no_grad":
                with torch.no_grad():
                    h = h + note(h)
                h = net(h)
            elif where == "function":
                h = Doubled.apply(h)
            elif where == "jvp":
                h = h * torch.func.jvp(lambda r: r * r, (x,), (note(x + 1),))[1]
            else:
                with torch.enable_grad():
                    h = h * note(h)
            h.square().sum().backward()
            return h.detach()

        def around(x):
            with torch.no_grad():
                return step_with_grad(x)

        step_with_grad = torch.enable_grad()(step)
        return around if where.startswith("no_grad around") else step, (net, log)

    both = split(make)
    run(both, device)
    assert_split(both)


def make_accumulating(device, before=None, after=None):
    """A step that adds to gradients, which are dropped outside; marked functions run before and after its backward."""
    net, log = nn.Linear(6, 6, device=device), []
    before = None if before is None else pg.live(functools.partial(before, net, log))
    after = None if after is None else pg.live(functools.partial(after, net, log))

    def step(x):
        loss = net(x).square().sum()
        if before is not None:
            before(loss.detach())
        loss.backward()
        if after is not None:
            after(loss.detach())
        return loss.detach()

    return step, (net, log)


def drop_gradients(state):
    state[0].zero_grad()


def gradients(both):
    for side in (both.state, both.live_state):
        yield [None if p.grad is None else p.grad.clone() for p in side[0].parameters()]


@pytest.mark.parametrize("when", [1, 3])
def test_c12_an_exception_before_the_backward_leaves_no_gradient(device, when):
    def check(net, log, loss):
        log.append(loss.item())
        if len(log) == when + 1:
            raise ValueError("diverged")

    both = split(lambda: make_accumulating(device, before=check))
    for n in range(6):
        if n == when:
            with pytest.raises(ValueError, match="diverged"):
                both(ramp(device, 6, start=n))
            assert list(gradients(both)) == [[None, None]] * 2
        else:
            both(ramp(device, 6, start=n))
            assert_same(*gradients(both))
            both.change(drop_gradients)
    assert counts(both)[2] >= 4


def test_c06_it_sees_no_gradient_of_what_comes_after_it(device):
    """Neither in the first replay, where the capture has left some."""

    def look(net, log, loss):
        log.append((loss.item(), None if net.weight.grad is None else net.weight.grad.tolist()))

    both = split(lambda: make_accumulating(device, before=look))
    for n in range(6):
        both(ramp(device, 6, start=n))
        both.change(drop_gradients)
    assert_split(both)
    assert [seen for _, seen in both.state[1]] == [None] * 6


def test_c12_gradients_that_the_call_has_dropped_before(device):
    """They are `None` then, also where nobody else had them when the call was captured."""

    def make():
        net, seen = nn.Linear(6, 6, device=device), []
        look = pg.live(lambda: _nothing(seen.append([p.grad is None for p in net.parameters()])))

        def step(x):
            net.zero_grad()
            look()
            net(x).square().sum().backward()

        return step, (net, seen)

    both = split(make)
    for n in range(6):
        both(ramp(device, 6, start=n))
        both.check()
        assert_same(*gradients(both))
    assert_split(both)
    assert both.state[1] == [[True, True]] * 6


@pytest.mark.parametrize("there", [True, False])
def test_c06_gradients_that_are_others_for_a_time(device, there):
    """It sees those; after the call the same are there as before it."""

    def make():
        net, seen = nn.Linear(6, 6, device=device), []
        if there:
            net(ramp(device, 6)).sum().backward()
        look = pg.live(lambda: _nothing(seen.append([p.grad is None or p.grad.tolist() for p in net.parameters()])))

        def step(x):
            kept = [p.grad for p in net.parameters()]
            net.zero_grad()
            look()
            net(x).square().sum().backward()
            norm = net.weight.grad.square().sum()
            for p, grad in zip(net.parameters(), kept, strict=True):
                p.grad = grad
            return norm

        return step, (net, seen)

    both = split(make)
    for n in range(6):
        both(ramp(device, 6, start=n))
        both.check()
        assert_same(*gradients(both))
    assert_split(both)


@may_run_live
def test_c12_gradients_where_the_call_begins_again(device):
    def vary(net, log, loss):
        log.append(loss.item())
        return torch.ones(2 if len(log) == 4 else 3, device=device)

    both = split(lambda: make_accumulating(device, after=vary))
    for n in range(7):
        both(ramp(device, 6, start=n))
        assert_same(*gradients(both))
        both.change(drop_gradients)
    assert "gives a result of another shape" in reasons(both)
    assert counts(both)[2] >= 4
    assert "partial" not in reasons(both)  # it is named by what it calls


@may_run_live
def test_c05_it_keeps_what_is_returned(device):
    """Whoever gets that may write it."""
    kept = []
    keep = pg.live(lambda y: _nothing(kept.append(y)))

    @pg.record(warmup=1)
    def function(x):
        y = x * 2
        keep(y)
        return y

    for n in range(4):
        result = function(ramp(device, 6, start=n))
        result.add_(100)
        assert_same(kept[-1], result)
    assert "keeps a tensor that others may write later" in " ".join(pg.stats(function).refusals)


def test_c12_a_write_by_the_way_in_a_call_that_begins_again(device):
    """What came before it must not see it: then the call raises."""
    state, calls = torch.ones(6, device=device), []

    @pg.live
    def write():
        calls.append(1)
        if len(calls) == 4:
            state.add_(1)

    vary = pg.live(lambda: torch.ones(2 if len(calls) == 4 else 3, device=device))

    @pg.record(warmup=1)
    def function(x):
        y = x * state
        write()
        vary()
        return y

    x = ramp(device, 6)
    for _ in range(3):
        assert_same(function(x), x)
    with pytest.raises(RuntimeError, match="after others have written tensors outside"):
        function(x)
    for _ in range(3):
        assert_same(function(x), x * 2)


@may_run_live
def test_c04_it_writes_what_was_saved_for_a_backward(device):
    def make():
        net = nn.Linear(6, 6, device=device)
        write = pg.live(lambda t: _nothing(t.mul_(2)))

        def step(x):
            y = net(x).exp()
            write(y.detach())
            y.sum().backward()

        return step, net

    both = split(make)
    for n in range(4):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            both(ramp(device, 6, start=n))


def test_c12_it_raises_after_it_has_written_an_argument(device):
    def make():
        calls = []

        @pg.live
        def write(x):
            calls.append(1)
            x.add_(1)
            if len(calls) == 4:
                raise ValueError("enough")

        def f(x):
            write(x)
            return x * 2

        return f

    both = split(make)
    for n in range(6):
        if n == 3:
            with pytest.raises(ValueError, match="enough"):
                both(ramp(device, 6, start=n))
        else:
            both(ramp(device, 6, start=n))
    assert counts(both) == (1, 1, 5)


@may_run_live
def test_c08_it_writes_what_it_is_given_a_view_of(device):
    class Buffer:
        def __init__(self):
            self.rows, self.calls = torch.zeros(2, 6, device=device), 0

        @pg.live
        def push(self, row):
            self.calls += 1
            self.rows.add_(1)

        def step(self, x):
            self.push(self.rows[0])
            return x + self.rows.sum(0)

    both = split(lambda: (lambda buffer: (buffer.step, buffer.rows))(Buffer()))
    run(both, device)
    assert "writes a view of a tensor outside" in reasons(both)


@may_run_live
def test_c12_it_returns_what_it_was_given_and_the_call_begins_again(device):
    def make():
        calls = []

        @pg.live
        def same(y):
            calls.append(1)
            return y

        vary = pg.live(lambda: torch.ones(2 if len(calls) == 4 else 3, device=device))

        def f(x):
            y = x * 2
            z = same(y)
            vary()
            z.add_(1)
            return y * 3

        return f

    both = split(make)
    run(both, device, calls=7)
    assert "another shape" in reasons(both)
    assert counts(both)[2] >= 4


def _attributes(which, device):
    """A function with a marked one in it, that has to do with more of a tensor than its values."""
    log = []

    @pg.live
    def part(x):
        if which in ("sets", "sets of an argument"):
            x.scale = 3.0
        log.append((getattr(x, "scale", None), None if x.grad is None else x.grad.tolist()))
        if which == "returns":
            x = x + 1
            x.scale = 3.0
            return x
        return torch.zeros_like(x) if x.grad is None else x.grad * 2

    def function(x):
        y = x * 2
        if which == "reads":
            y.scale = 3.0
        if which == "retains a gradient":
            y.requires_grad_().sin().retain_grad()
            y = y.sin()
            y.retain_grad()
        if which == "a leaf's gradient":
            y.requires_grad_()
        if which in ("retains a gradient", "a leaf's gradient"):
            y.square().sum().backward()
        if which == "hooks":
            y.requires_grad_().register_hook(lambda grad: grad * 3)
        z = part(x if which == "sets of an argument" else y)
        scale = getattr(x if which == "sets of an argument" else z if which == "returns" else y, "scale", 1.0)
        return z.detach() + y.detach() * scale

    return function, log


ATTRIBUTES = ["sets", "sets of an argument", "reads", "returns", "retains a gradient", "a leaf's gradient", "hooks", "nothing"]


@may_run_live
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("which", ATTRIBUTES)
def test_c12_more_than_the_values_of_what_it_is_given(device, which):
    """Its copy has no attributes, gradient and hooks, and where it sets one it is the copy's."""
    both = split(lambda: _attributes(which, device))
    run(both, device, calls=4)
    if which == "nothing":
        assert_split(both, calls=4)
    else:
        assert "attributes" in reasons(both) or "otherwise than its values" in reasons(both), reasons(both)
        assert counts(both) == (4, 0, 0)


@may_run_live
@pytest.mark.parametrize("what", ["requires_grad", "lr"])
def test_c12_what_it_changes_in_each_call_is_seen_in_the_first(device, what):
    def make():
        w = nn.Parameter(torch.ones(3, device=device))
        optimizer = torch.optim.SGD([w], lr=1.0)

        @pg.live
        def part(x):
            if what == "lr":
                optimizer.param_groups[0]["lr"] *= 0.5
            else:
                w.requires_grad_(not w.requires_grad)

        def function(x):
            y = x * 2
            part(y)
            return y + (optimizer.param_groups[0]["lr"] if what == "lr" else w.detach() * 2)

        return function, [w, optimizer.param_groups[0]]

    both = split(make)
    run(both, device, calls=5, size=3)
    assert counts(both) == (5, 0, 0), pg.explain(both.recorded)
