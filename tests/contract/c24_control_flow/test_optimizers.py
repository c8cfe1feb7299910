"""C24: optimizers that step in a branch: a step that is skipped moves no count on, and a new learning rate is never stale."""

import pytest
import torch
from torch import nn

import phonograph as pg
from tests.helpers import counts, may_run_live, ramp, reasons, side_by_side

TURNS = (1, -1, 1, 1, -1, -1, 1, -1)


def skipping(device, kind, **options):
    """A step of training that skips the update where its second argument says so."""

    def make():
        w = nn.Parameter(ramp(device, 4) / 4)
        optimizer = kind([w], lr=0.125, **options)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

        def f(x, p):
            loss = (w * x).square().sum()
            optimizer.zero_grad()
            loss.backward()
            pg.cond(p > 0, lambda: optimizer.step(), lambda: None)
            return loss.detach()

        return f, (w, optimizer, scheduler)

    return side_by_side(make, keep="always")


def call(both, device, turns):
    for n, turn in enumerate(turns):
        both(ramp(device, 4, start=n) / 8, torch.tensor(float(turn), device=device))


SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
KINDS = [
    (SGD, {}),
    (SGD, {"momentum": 0.9, "weight_decay": 0.5}),
    (SGD, {"foreach": True, "momentum": 0.5}),
    (SGD, {"fused": True}),
    (ADAM, {"fused": True}),
    (ADAMW, {"fused": True, "amsgrad": True}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=str)
def test_c24_a_skipped_step_changes_nothing(device, kind, options):
    both = skipping(device, kind, **options)
    call(both, device, TURNS * 2)
    assert counts(both) == (1, 1, 15), reasons(both)


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=str)
def test_c24_a_new_learning_rate_in_a_branch(device, kind, options):
    both = skipping(device, kind, **options)
    for _ in range(4):
        call(both, device, TURNS[:5])
        both.change(lambda state: state[2].step())
    assert counts(both) == (1, 1, 19), reasons(both)


@may_run_live
@pytest.mark.parametrize("options", [{}, {"foreach": True}], ids=str)
def test_c24_a_count_that_is_kept_on_the_host(device, options):
    """Which is right, and never advanced for a step that is not taken."""
    both = skipping(device, ADAM, **options)
    call(both, device, TURNS * 2)
    assert "step count of an optimizer" in reasons(both)


@pytest.mark.parametrize("options", [{"capturable": True}, {"capturable": True, "foreach": True}], ids=str)
def test_c24_a_count_that_is_kept_on_the_gpu(cuda, options):
    both = skipping(cuda, ADAM, **options)
    call(both, cuda, TURNS * 2)
    assert counts(both) == (1, 1, 15), reasons(both)


@may_run_live
@pytest.mark.parametrize(("kind", "options"), [KINDS[1], KINDS[4]], ids=str)
def test_c24_state_that_is_made_in_a_branch(device, kind, options):
    """By the first step that is taken, which runs live."""
    both = skipping(device, kind, **options)
    call(both, device, (-1, -1, -1, 1, *TURNS * 4))
    assert counts(both)[2] > 16, reasons(both)


def test_c24_an_update_that_is_skipped_where_the_gradient_is_large(device):
    def make():
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
        optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)

        def f(x):
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(net.parameters(), 1e9)
            pg.cond(norm < 4, optimizer.step, lambda: None)
            return loss.detach(), norm

        return f, (net, optimizer)

    both = side_by_side(make, keep="always")
    for n in range(12):
        both(ramp(device, 3, 4, start=n) * (1 if n % 3 else 100))
    assert counts(both) == (1, 1, 11), reasons(both)


def test_c24_a_whole_step_in_a_branch(device):
    """Gradients that are there before are written in place."""

    def make():
        w = nn.Parameter(ramp(device, 4) / 4)
        w.grad = torch.zeros_like(w)
        optimizer = SGD([w], 0.1)

        def step(x):
            loss = (w * x).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            return loss.detach()

        return (lambda x, p: pg.cond(p > 0, step, torch.sum, x)), (w, optimizer)

    both = side_by_side(make, keep="always")
    call(both, device, TURNS)
    assert counts(both) == (1, 1, 7), reasons(both)


def test_c24_numbers_of_an_object_in_a_branch(device):
    """They are followed there as elsewhere: set in what the body launches, without another recording."""

    class Step:
        rate = 0.5

        def __call__(self, x, p):
            return pg.cond(p > 0, lambda x: x * self.rate, lambda x: x - self.rate, x)

    def make():
        step = Step()
        return step, step

    both = side_by_side(make, keep="always")
    for n in range(12):
        both.change(lambda step, n=n: setattr(step, "rate", 0.5 + n // 2))
        both(ramp(device, 4), torch.tensor(float(n % 2), device=device))
    _, recorded, replayed = counts(both)
    assert recorded <= 2, reasons(both)
    assert replayed >= 9, reasons(both)
