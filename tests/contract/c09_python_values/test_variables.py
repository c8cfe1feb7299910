"""C1, C5, C9: state that is carried from call to call by rebinding a variable (`nonlocal hidden`, `global hidden`). Each
program is played from recordings, with eager's results and state to the bit, whoever reads, keeps, or replaces it."""

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import may_run_live, ramp, reasons

CALLS = 9
hidden = shown = None


def _by_global(device, record):
    global hidden
    hidden, weight = torch.zeros(4, device=device), ramp(device, 4)

    def step(x):
        global hidden
        hidden = (hidden * weight + x).tanh()
        return hidden.sum()

    def put(value):
        global hidden
        hidden = value

    return record(step), lambda: hidden, put


def _by_nonlocal(device, record):
    state = torch.zeros(4, device=device)

    def step(x):
        nonlocal state
        state = state * 0.9 + x * 0.1
        return state * 2

    def put(value):
        nonlocal state
        state = value

    return record(step), lambda: state, put


def _by_a_pair(device, record):
    torch.manual_seed(3)
    cell = nn.LSTMCell(4, 4).to(device)
    pair = None

    def step(x):
        nonlocal pair
        h, c = cell(x.view(1, 4), pair if pair is not None else (x.new_zeros(1, 4), x.new_zeros(1, 4)))
        pair = h.detach(), c.detach()
        h.sum().backward()
        return h.detach(), cell.weight_hh.grad

    def put(value):
        nonlocal pair
        pair = None if value is None else (value.view(1, 4), value.view(1, 4))

    return record(step), lambda: pair, put


def _by_two(device, record):
    last = before = torch.zeros(4, device=device)

    def step(x):
        nonlocal last, before
        before, last = last, last * 0.5 + x
        return last - before

    def put(value):
        nonlocal last
        last = value

    return record(step), lambda: (last, before), put


def _in_a_helper(device, record):
    state = torch.zeros(4, device=device)

    def update(x):
        nonlocal state
        state = state + x

    def read():
        return state * 2

    def step(x):
        update(x)
        return read()

    def put(value):
        nonlocal state
        state = value

    return record(step), lambda: state, put


PROGRAMS = [_by_global, _by_nonlocal, _by_a_pair, _by_two, _in_a_helper]


def _both(program, device, meanwhile=lambda i, state, put: None, calls=CALLS):
    """What a program logs, plain and recorded; and the recorded function."""
    logs = []
    for record in (lambda f: f, lambda f: pg.record(f, keep="always")):
        step, state, put = program(device, record)
        log = []
        for i in range(calls):
            log.append((step(ramp(device, 4) * (i + 1)), state()))  # all of it is held
            meanwhile(i, state(), put)
        logs.append(log)
    return *logs, step


@pytest.mark.parametrize("program", PROGRAMS)
def test_c9_a_variable_carries_state(device, program):
    plain, recorded, f = _both(program, device)
    assert_same(recorded, plain)
    assert pg.stats(f).replayed >= CALLS - 3, reasons(f)


@pytest.mark.parametrize("program", PROGRAMS)
def test_c9_what_a_variable_carries_may_be_replaced_between_calls(device, program):
    def meanwhile(i, state, put):
        if i in (3, 6):
            put(torch.full((4,), float(i), device=device))

    plain, recorded, f = _both(program, device, meanwhile, calls=14)
    assert_same(recorded, plain)
    assert pg.stats(f).replayed >= 8, reasons(f)


def test_c9_what_a_variable_carries_may_be_taken_away_between_calls(device):
    plain, recorded, f = _both(_by_a_pair, device, lambda i, state, put: put(None) if i % 4 == 3 else None, calls=24)
    assert_same(recorded, plain)
    assert pg.stats(f).replayed >= 18, reasons(f)


def test_c9_what_a_variable_carries_may_be_written_between_calls(device):
    plain, recorded, f = _both(_by_nonlocal, device, lambda i, state, put: state.add_(1) if i == 5 else None)
    assert_same(recorded, plain)
    assert pg.stats(f).replayed >= CALLS - 3, reasons(f)


def test_c9_a_variable_that_is_only_set(device):
    global shown

    def step(x):
        global shown
        shown = x * 2
        return shown.sum()

    f = pg.record(step, keep="always")
    kept = []
    for i in range(CALLS):
        x = ramp(device, 4) + i
        assert_same(f(x), (x * 2).sum())
        kept.append((shown, x * 2))
    for one, expected in kept:
        assert_same(one, expected)
    assert pg.stats(f).replayed >= CALLS - 3, reasons(f)
    shown = None


def test_c9_a_variable_that_a_model_sets_in_its_forward(device):
    logs = []
    for record in (lambda m: m, lambda m: pg.record(m, keep="always")):
        seen = torch.zeros(4, device=device)

        class Counting(nn.Linear):
            def forward(self, x):
                nonlocal seen
                y = super().forward(x - seen)
                seen = seen * 0.5 + y.detach()
                return y

        torch.manual_seed(2)
        model = record(Counting(4, 4).to(device))
        log = []
        for i in range(CALLS):
            model(ramp(device, 4) + i).sum().backward()
            log.append((seen, model.weight.grad.clone()))
            model.zero_grad()
        logs.append(log)
    assert_same(*logs)
    assert pg.stats(model).replayed >= CALLS - 3, reasons(model)


@may_run_live
def test_c9_a_variable_that_is_deleted_is_gone(device):
    logs = []
    for record in (lambda f: f, pg.record):
        state = torch.zeros(4, device=device)

        def step(x):
            nonlocal state
            y = x + state
            del state
            return y

        f = record(step)
        log = []
        for i in range(5):
            log.append(f(ramp(device, 4)))
            with pytest.raises(NameError):
                state.sum()
            state = torch.full((4,), float(i), device=device)
        logs.append(log)
    assert_same(*logs)


def test_c6_a_variable_that_keeps_a_history(device):
    logs = []
    for record in (lambda f: f, pg.record):
        weight = ramp(device, 4).requires_grad_()
        state = torch.zeros(4, device=device)

        def step(x):
            nonlocal state
            state = weight * x  # which autograd goes through outside of the call
            return state.sum().detach()

        f = record(step)
        log = []
        for i in range(CALLS):
            log.append(f(ramp(device, 4) + i))
            state.sum().backward()
            log.append(weight.grad.clone())
        logs.append(log)
    assert_same(*logs)


@may_run_live
def test_c9_another_function_sees_what_a_variable_carries(device):
    logs = []
    for record in (lambda f: f, lambda f: pg.record(f, keep="always")):
        state = torch.zeros(4, device=device)

        def step(x):
            nonlocal state
            state = state * 0.5 + x
            return state.sum()

        def evaluate(x):
            return state * x

        f, g = record(step), record(evaluate)
        log = []
        for i in range(12):
            x = ramp(device, 4) + i
            log += [f(x), g(x), g(x)]
        logs.append(log)
    assert_same(*logs)
