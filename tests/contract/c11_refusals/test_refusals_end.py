"""C9, C11: a refusal ends with its cause. A flag that is switched off, a hook that is removed, a model that is evaluated: then
such calls are recorded. And an equal list, dictionary or set in place of another is no change."""

import types

import pytest

import phonograph as pg
from phonograph.engine.recorder import record
from phonograph.testing import assert_same
from tests.contract.shared.refusals_end import NOTICED, assert_ends
from tests.helpers import changeable, counts, may_run_live, ramp, reasons, side_by_side


def assert_runs_live(both, *args, calls=6):
    """Assert that such calls run live."""
    recorded = counts(both)[1]
    for _ in range(calls):
        both(*args)
    assert counts(both)[1:] == (recorded, 0), pg.explain(both.recorded)
    assert "host" in reasons(both)


# ---------------------------------------------------------------------------------------------------
# A host check that is switched off


CHECKS = True


def by_global():
    def function(x):
        if CHECKS and x.sum().item() < 0:
            return -x
        return x * 2

    def change(on):
        global CHECKS
        CHECKS = on

    change(True)
    return function, change


def by_closure():
    checks = True

    def function(x):
        if checks and x.sum().item() < 0:
            return -x
        return x * 2

    def change(on):
        nonlocal checks
        checks = on

    return function, change


def by_settings():
    settings = types.SimpleNamespace(checks=True)

    def function(x):
        if settings.checks and x.sum().item() < 0:
            return -x
        return x * 2

    return function, lambda on: setattr(settings, "checks", on)


def by_dictionary():
    settings = {"checks": {"finite": True}}

    def function(x):
        if settings["checks"]["finite"] and x.sum().item() < 0:
            return -x
        return x * 2

    return function, lambda on: settings["checks"].update(finite=on)


def by_method():
    class Step:
        checks = True

        def __call__(self, x):
            if self.checks and x.sum().item() < 0:
                return -x
            return x * 2

    step = Step()
    return step.__call__, lambda on: setattr(step, "checks", on)


def by_function():
    def check(x):
        return x.sum().item() < 0

    def no_check(x):
        return False

    space = types.SimpleNamespace(check=check)

    def function(x):
        return -x if space.check(x) else x * 2

    return function, lambda on: setattr(space, "check", check if on else no_check)


FLAGS = [by_global, by_closure, by_settings, by_dictionary, by_method, by_function]


@may_run_live
@pytest.mark.parametrize("make", FLAGS)
def test_c11_a_host_check_that_is_switched_off(device, make):
    both, change = changeable(make, fallback="live")
    x = ramp(device, 4)
    assert_runs_live(both, x)
    change(False)
    assert_ends(both, x)
    live, recorded, _ = counts(both)
    change(True)  # the refusal stands again, and nothing is captured
    for _ in range(5):
        both(x)
    assert counts(both)[:2] == (live + 5, recorded)
    change(False)
    both(x)
    assert counts(both)[:2] == (live + 5, recorded)


@may_run_live
def test_c11_fallback_error_raises_until_the_cause_is_gone(device):
    function, change = by_settings()
    f = pg.record(function, fallback="error")
    x = ramp(device, 4)
    f(x)
    for _ in range(5):
        with pytest.raises(pg.Unrecordable):
            f(x)
    change(False)
    for _ in range(NOTICED):
        try:
            assert_same(f(x), x * 2)
        except pg.Unrecordable:  # it is not noticed yet
            continue
    replayed = counts(f)[2]
    assert_same(f(x), x * 2)
    assert counts(f)[2] == replayed + 1


@may_run_live
def test_c11_split_where_the_cause_is_gone(device):
    settings = types.SimpleNamespace(prints=True)

    def make():
        def function(x):
            y = x * 2
            if settings.prints:
                print("sum", y.sum())
            return y + 1

        return function

    both = side_by_side(make, fallback="split")
    x = ramp(device, 4)
    for _ in range(6):
        both(x)
    settings.prints = False
    assert_ends(both, x)


@may_run_live
def test_c11_a_flag_that_flips_in_each_call_is_captured_once(device):
    both, change = changeable(by_closure, fallback="live")
    x = ramp(device, 4)
    for n in range(60):
        change(n % 2 == 0)
        both(x)
    _live, recorded, replayed = counts(both)
    assert recorded == 1, pg.explain(both.recorded)
    assert replayed >= 24, pg.explain(both.recorded)


@may_run_live
def test_c11_a_value_that_is_new_in_each_call_is_tried_a_few_times(device, monkeypatch):
    attempts = []
    monkeypatch.setattr("phonograph.engine.making.record", counting(attempts))
    settings = types.SimpleNamespace(limit=0)

    def make():
        return lambda x: -x if x.sum().item() < settings.limit else x * 2

    both = side_by_side(make, fallback="live")
    x = ramp(device, 4)
    for n in range(400):
        settings.limit = -n
        both(x)
    assert len(attempts) <= 13
    assert "reads a tensor's value on the host" in reasons(both)
    assert "changes from call to call" not in reasons(both)


def counting(attempts):
    def counted(*args):
        attempts.append(args[0])
        return record(*args)

    return counted


@may_run_live
def test_c11_what_the_call_itself_changes_does_not_end_a_refusal(device, monkeypatch):
    attempts = []
    monkeypatch.setattr("phonograph.engine.making.record", counting(attempts))

    class Steps:
        def __init__(self):
            self.seen, self.losses, self.last, self.checks = 0, [], None, True

        def step(self, x):
            loss = (x * x).sum()
            self.seen = self.seen * 2 + 1
            if self.checks:
                self.losses.append(loss.item())
                self.last = loss
            return loss

    steps = [Steps(), Steps()]
    made = iter(steps)
    both = side_by_side(lambda: next(made).step)
    x = ramp(device, 4)
    for _ in range(100):
        both(x)
    assert len(attempts) <= 3
    assert steps[0].losses == steps[1].losses
    assert steps[0].seen == steps[1].seen


@may_run_live
@pytest.mark.parametrize("warm", ["number", "string"])
def test_c11_a_refusal_stands_only_for_calls_that_decide_as_the_refused_one_has(device, warm):
    """A log of each tenth step, and something else that is over after some: what was refused says nothing of other steps."""

    class Steps:
        def __init__(self):
            self.n, self.last, self.kind = 0, None, "warm"

        def step(self, x):
            y = x * min(1.0, self.n / 20) if warm == "number" else x * (2 if self.kind == "warm" else 3)
            self.n += 1
            if self.n % 10 == 0:
                self.last = y.sum().item()
            return y

    steps = [Steps(), Steps()]
    made = iter(steps)
    both = side_by_side(lambda: next(made).step, fallback="live")
    for n in range(200):
        for one in steps:
            one.kind = "warm" if n < 20 else "trained"
        both(ramp(device, 4, start=n))
        assert steps[0].last == steps[1].last
    live, _, played = counts(both)
    assert (live <= 25, played >= 175) == (True, True), pg.explain(both.recorded)
    told = [times for reason, times in pg.stats(both.recorded).refusals.items() if "host" in reason]
    assert sum(told) <= 20, "calls that read nothing are told as if they had"
    assert 1 <= pg.stats(both.recorded).untried < sum(told), "those that were tried are counted apart"
    assert f"{pg.stats(both.recorded).untried} live calls were not tried" in pg.explain(both.recorded)


@may_run_live
def test_c11_a_number_that_is_given_decides_whether_a_refusal_stands(device):
    def f(x, n, flag):
        y = x * n
        return y * y.sum().item() if n % 10 == 0 else y * flag

    g = pg.record(f, fallback="live")
    for n in range(1, 100):
        flag = 2.0 if n < 60 else 3.0
        assert_same(g(ramp(device, 3), n, flag), f(ramp(device, 3), n, flag))
    assert counts(g)[2] >= 80, pg.explain(g)
