"""C9: numbers in tuples: of `betas` that a scheduler turns, of an accountant's history. Each is followed in its place."""

from types import SimpleNamespace

import pytest

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import may_run_live, ramp, reasons

pytestmark = may_run_live
CALLS = 24


def beside(make, device, between=lambda state, n: None, calls=CALLS):
    """The made (function, state) recorded, call by call beside the same plain."""
    (f, ours), (g, theirs) = make(), make()
    recorded = pg.record(f, keep="always")
    for n in range(calls):
        for state in (ours, theirs):
            between(state, n)
        assert_same(recorded(ramp(device, 4)), g(ramp(device, 4)), f"call {n}")
        assert repr(vars(ours)) == repr(vars(theirs)), f"call {n}"
    return recorded


def state_of(body, **values):
    def make():
        state = SimpleNamespace(**values)
        return lambda x: body(state, x), state

    return make


def turned(s, x):
    s.betas = (s.betas[0] * 0.97, *s.betas[1:])
    return x * s.betas[0] + x.lerp(x * 2, s.betas[1])


def kept_in_a_history(s, x):
    noise, rate, steps = s.history[-1]
    s.history[-1] = (noise, rate, steps + 1)
    return x * noise + steps * 0.5


def each_third(s, x):
    s.counts = (s.counts[0] + 1, s.counts[1] + (s.counts[0] % 3 == 0))
    return x * 2 if s.counts[0] % 3 == 0 else x * s.counts[1]


def told(s, x):
    s.rates = [s.rates[0] * 0.97, s.rates[1]]
    s.last = s.rates
    return x * s.last[0] + s.rates[1]


def told_again(s, x):
    x = x * s.rates[0] + s.rates[1]
    s.rates = [*s.rates]
    return x


ROWS = {
    "a list": (told, {"rates": [0.9, 0.999], "last": [0.9, 0.999]}),
    "another list of the same": (told_again, {"rates": [0.9, 0.999]}),
    "a decay": (turned, {"betas": (0.9, 0.999)}),
    "a history": (kept_in_a_history, {"history": [(1.5, 0.25, 3)]}),
    "whole numbers": (each_third, {"counts": (0, 0)}),
}


@pytest.mark.parametrize("how", ROWS)
def test_c09_a_tuple_of_numbers_that_the_call_replaces(device, how):
    body, values = ROWS[how]
    recorded = beside(lambda: state_of(body, **{k: v.copy() if type(v) is list else v for k, v in values.items()})(), device)
    assert pg.stats(recorded).replayed >= CALLS - 6, reasons(recorded)


def test_c09_a_list_that_is_left_in_two_places_is_one(device):
    """And it is another after each call: what somebody does to one is not done to others."""
    kept = []

    def between(s, n):
        assert n == 0 or s.last is s.rates
        assert all(s.rates is not one for one in kept)
        kept.append(s.rates)
        if n % 6 == 5:
            s.rates[1] = n / 10

    recorded = beside(lambda: state_of(told, rates=[0.9, 0.999], last=[0.9, 0.999])(), device, between)
    assert pg.stats(recorded).replayed >= CALLS - 6, reasons(recorded)


def test_c09_a_list_that_is_written_in_its_place(device):
    def body(s, x):
        s.rates[0] *= 0.97
        s.other = [*s.other[:1], s.other[1] + 1]
        s.other[0] += 1
        return x * s.rates[0] + s.other[0] * s.other[1]

    beside(
        lambda: state_of(body, rates=[0.9, 0.999], other=[1, 2])(), device, lambda s, n: s.rates.append(1.0) if n == 9 else None
    )


def test_c09_a_tuple_of_numbers_that_is_replaced_outside(device):
    def between(s, n):
        s.betas = (0.9 + n / 1000, 0.5)

    recorded = beside(state_of(lambda s, x: x * s.betas[0] + s.betas[1], betas=(0.9, 0.5)), device, between)
    assert pg.stats(recorded).replayed >= CALLS - 6, reasons(recorded)


OTHERS = {
    "longer": lambda s, n: setattr(s, "betas", (*s.betas, 1.0)) if n == 9 else None,
    "a list": lambda s, n: setattr(s, "betas", [*s.betas]) if n == 9 else None,
    "of other kinds": lambda s, n: setattr(s, "betas", (s.betas[0], 1)) if n == 9 else None,
    "the other number": lambda s, n: setattr(s, "betas", (s.betas[0], 0.25)) if n % 5 == 4 else None,
    "None": lambda s, n: (
        setattr(s, "betas", (s.betas[0], None)) if n == 9 else setattr(s, "betas", (0.5, 0.5)) if n == 12 else None
    ),
}


@pytest.mark.parametrize("how", OTHERS)
def test_c09_another_tuple_in_its_place(device, how):
    def body(s, x):
        if s.betas[1] is None:
            return x
        first, second = s.betas[:2]
        s.betas = type(s.betas)((first * 0.97, *s.betas[1:]))
        return x * first + second * len(s.betas)

    beside(state_of(body, betas=(0.9, 0.999)), device, OTHERS[how])


def test_c09_a_tuple_of_which_one_number_cannot_be_followed(device):
    def body(s, x):
        s.pair = (s.pair[0] * 0.9, s.pair[1] + 1)
        return x * s.pair[0] * float(f"{s.pair[1]:.1f}")

    def between(s, n):
        s.pair = (s.pair[0], s.pair[1] + n % 2)

    beside(state_of(body, pair=(0.9, 1)), device, between)


def test_c09_a_tuple_with_another_name(device):
    """What else holds the tuple keeps it."""

    def body(s, x):
        before = s.pair
        s.pair = (s.pair[0] * 0.9, s.pair[1])
        s.last = before
        return x * before[0] + s.pair[0]

    beside(state_of(body, pair=(0.9, 1.0), last=(0.0, 0.0)), device)


def test_c09_code_that_asks_for_types_beside_a_number(device):
    def body(s, x):
        s.n += 1
        kind = type(x).__name__ + type(s.n).__name__ + type(s.n / 2).__name__
        return x * (s.n / 8) if kind == "Tensorintfloat" else x * 0

    recorded = beside(state_of(body, n=0), device)
    assert pg.stats(recorded).replayed >= CALLS - 6, reasons(recorded)


def decays(s):
    s.rates = [s.rates[0] * 0.97, s.rates[1]]


def tells(s, x):
    s.last = s.rates
    return x * s.rates[0] + s.last[1]


def tells_and_decays(s, x):
    s.last = s.rates
    decays(s)
    return x * s.rates[0] + s.last[1]


def tells_at_times(s, x):
    s.n += 1
    s.last = s.rates
    if s.n % 2:
        decays(s)
    return x * s.rates[0] + s.last[1]


def hands_down(s, x):
    s.earlier, s.last = s.last, s.rates
    decays(s)
    return x * s.rates[0] + s.earlier[1]


def swaps(s, x):
    s.rates, s.last = s.last, s.rates
    return x * s.rates[0] + s.last[1]


def keeps_elsewhere(s, x):
    decays(s)
    s.last = s.rates
    s.log.append(s.rates)
    return x * s.last[0]


def puts_one_of_others(s, x):
    s.n += 1
    s.last = s.log[s.n % 2]
    s.rates = [s.last[0] * s.n, s.last[1]]
    return x * s.rates[0]


_SHARED = [tells, tells_and_decays, tells_at_times, hands_down, swaps, keeps_elsewhere, puts_one_of_others]
SHARED = {f.__name__: f for f in _SHARED}


def pattern(s, before):
    """Which of the lists are one: also with those that were there before the call."""
    now = [s.rates, s.last, s.earlier, *s.log]
    return [[a is b for a in now] for b in (*now, *before)]


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("how", SHARED)
def test_c09_which_lists_are_one_after_a_replay(device, how, outside):
    def make():
        state = SimpleNamespace(n=0, rates=[0.9, 0.5], last=[0.8, 0.5], earlier=[0.7, 0.5], log=[[0.6, 0.5], [0.4, 0.5]])
        return lambda x: SHARED[how](state, x), state

    (f, ours), (g, theirs) = make(), make()
    recorded = pg.record(f, keep="always")
    for n in range(CALLS):
        if outside and n % 3 == 1:
            for s in (ours, theirs):
                s.rates = [s.rates[0] * 0.99, s.rates[1]]
        before = [[s.rates, s.last, s.earlier, *s.log] for s in (ours, theirs)]
        assert_same(recorded(ramp(device, 4)), g(ramp(device, 4)), f"call {n}")
        assert repr(vars(ours)) == repr(vars(theirs)), f"call {n}"
        assert pattern(ours, before[0]) == pattern(theirs, before[1]), f"call {n}"
    if how in ("tells_and_decays", "hands_down"):
        assert pg.stats(recorded).replayed >= CALLS - 8, reasons(recorded)


def test_c09_a_list_that_is_shown_elsewhere_and_replaced_by_an_equal_one(device):
    def make():
        seen, state = {}, SimpleNamespace(rates=[0.5])

        def step(x):
            seen["now"] = state.rates
            return x * 2

        return step, seen, state

    (step, seen, state), (plain, seen_plainly, _) = make(), make()
    recorded = pg.record(step, keep="always")
    for n in range(6):
        assert_same(recorded(ramp(device, 4)), plain(ramp(device, 4)))
        assert seen == seen_plainly
        assert seen["now"] is state.rates
        if n % 3 == 2:
            state.rates = [0.5]
