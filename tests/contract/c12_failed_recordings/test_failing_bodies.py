"""C12: what fails in the body of a branch or loop leaves nothing behind."""

import pytest
import torch
import torch.nn.functional as F

import phonograph as pg
from phonograph.devices import device_for
from tests.helpers import assert_replays, assert_settles, counts, may_run_live, plain, reasons, side_by_side


def raises(x):
    raise ValueError("not in a body")


FAILURES = {
    "read": lambda x: x * x.sum().item(),
    "shape": lambda x: x[x > 0].sum() + x,
    "exception": raises,
    "operator": lambda x: x @ torch.ones(7, 7, device=x.device),
    "kept": lambda x: kept.append(x * 2) or x * 3,
}
kept: list[torch.Tensor] = []


def branch(f, x, pred):
    return pg.cond(pred, lambda x: x * 2, f, x)


def nested(f, x, pred):
    """It fails in the second body of a branch in a branch."""
    return pg.cond(pred, lambda x: x * 2, lambda x: pg.cond(pred, lambda x: x + 1, f, x + 2), x)


def loop(f, x, pred):
    def turn(i, y):
        return i + 1, pg.cond(i > 5, f, lambda x: x * 2, y)

    return pg.while_loop(lambda i, y: i < 3, turn, (torch.zeros((), device=x.device), x))[1]


PLACES = {"branch": branch, "nested": nested, "loop": loop}


@may_run_live
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("action", FAILURES.values(), ids=FAILURES)
def test_c12_failing_bodies_leave_nothing(device, action, place):
    def make():
        total, bn = torch.zeros(3, device=device), torch.nn.BatchNorm1d(3).to(device)

        def f(x, pred):
            total.add_(1)
            x.mul_(2)
            y = bn(F.dropout(x, 0.5)).detach()
            z = place(action, y, pred)
            total.add_(z.sum(0))
            return z

        return f, [total, bn]

    both = side_by_side(make)
    before = device_for(device).allocated
    for _ in range(6):
        both(torch.randn(2, 3, device=device), torch.tensor(True, device=device))
    assert counts(both)[1:] == (0, 0), reasons(both)
    kept.clear()
    if device.type == "cuda":
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        assert not torch.cuda.is_current_stream_capturing()
    next_one = plain(lambda x, pred: branch(lambda x: F.dropout(x, 0.5), x, pred))
    assert_settles(next_one, torch.ones(3, device=device), torch.tensor(True, device=device))
    assert_replays(next_one, torch.ones(3, device=device), torch.tensor(False, device=device))
    assert device_for(device).allocated - before < 1 << 20


@may_run_live
@pytest.mark.parametrize("action", [FAILURES["exception"], FAILURES["read"]], ids=["exception", "read"])
def test_c12_catching_what_a_body_raises(device, action):
    """What comes after it must not run in the capture."""

    def make():
        total = torch.zeros(3, device=device)

        def f(x, pred):
            try:
                y = nested(action, x, pred)
            except Exception:
                y = x * 5
            total.add_(y)
            return y + torch.rand_like(y)

        return f, [total]

    both = side_by_side(make)
    for n in range(6):
        both(torch.ones(3, device=device), torch.tensor(n % 3 > 0, device=device))
    assert counts(both)[1:] == (0, 0)


@may_run_live
def test_c12_an_unsafe_call_in_a_body(cuda):
    """It invalidates the capture of the body."""

    def unsafe(x):
        torch._C._cuda_synchronize()
        return x * 2

    both = plain(lambda x, pred: nested(unsafe, x, pred))
    for n in range(5):
        both(torch.ones(3, device=cuda), torch.tensor(n % 3 > 0, device=cuda))
    next_one = plain(lambda x, pred: branch(lambda x: F.dropout(x, 0.5), x, pred))
    assert_settles(next_one, torch.ones(3, device=cuda), torch.tensor(True, device=cuda))
