"""Marked functions within code that handles exceptions, and within other recorded functions."""

import contextlib
import functools
import sys

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.testing import SideBySide, assert_same
from tests.contract.shared.marked import assert_split, ramp, reasons, run, split
from tests.helpers import counts, may_run_live


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


@contextlib.contextmanager
def scaling(by):
    assert by > 0
    yield by


@contextlib.contextmanager
def counted(log):
    with Counting(log):
        yield


def _scaled(f, x, log):
    with scaling(2.0) as by:
        return f(x * by)


def _counted(f, x, log):
    with counted(log):
        return f(x)


def _packages_manager(clause):
    """A function that calls `f` within a context manager of an installed package, which has that clause."""
    lines = ["import contextlib", "@contextlib.contextmanager", "def manager():", "    try:", "        yield", clause]
    space = {}
    exec(compile("\n".join(lines), "/usr/lib/site-packages/package.py", "exec"), space)
    manager = space["manager"]

    def around(f, x, log):
        y = x * 3
        with manager():
            y = f(x)
        return y

    return around


_in_a_packages_manager = _packages_manager("    finally:\n        pass")


_in_a_packages_that_catches = _packages_manager("    except ValueError:\n        pass")


@may_run_live
@pytest.mark.parametrize("fails", [-1, 3])
@pytest.mark.parametrize(
    ("around", "recorded"),
    [(_tried, False), (_tried_for_keys, False), (_finally, False), (_deep, False), (_suppressed, False), (_managed, False),
     (_tidied, False), (_closing, False), (_under_another_name, False), (_expected, False), (_forked, False),
     (_decorated, False), (_a_packages_except, False), (_a_packages_other_except, False), (_a_packages_finally, True),
     (_a_packages_note, True), (_a_packages_raise, True), (_a_packages_own_error, False),
     (_always_called, None), (_known_managers, None), (_in_a_handler, None), (_before_and_after, True), (_in_no_grad, True),
     (_retried, True), (_scaled, True), (_counted, False), (_in_a_packages_manager, True),
     (_in_a_packages_that_catches, False)],
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
