"""C14: branches and loops are captured on the stream of the call alone, and replayed on the caller's."""

import threading

import pytest
import torch

import phonograph as pg
from tests.helpers import assert_replays, assert_settles, may_run_live, plain, reasons


def flag(value, cuda):
    return torch.tensor(value, device=cuda)


def branch(x, pred):
    return pg.cond(pred, lambda x: x * 2, lambda x: x.sin() + 1, x)


def test_c14_replays_on_other_streams(cuda):
    both, x = plain(branch), torch.ones(64, device=cuda)
    assert_settles(both, x, flag(True, cuda))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for taken in (True, False):
            assert_replays(both, x, flag(taken, cuda))
    torch.cuda.current_stream().wait_stream(side)


def test_c14_replays_on_other_threads(cuda):
    both, x = plain(branch), torch.ones(64, device=cuda)
    assert_settles(both, x, flag(True, cuda))
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for taken in (True, False):
                assert_replays(both, x, flag(taken, cuda))
        except BaseException as e:
            failed.append(e)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed


def test_c14_streams_that_end_before_a_branch(cuda):
    side = torch.cuda.Stream()

    def f(x, pred):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x.cos()
        torch.cuda.current_stream().wait_stream(side)
        return branch(y, pred) + x

    both, x = plain(f), torch.ones(64, device=cuda)
    assert_settles(both, x, flag(True, cuda))
    assert_replays(both, x, flag(False, cuda))


def inside(side, x, pred):
    def forks(x):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x.cos()
        torch.cuda.current_stream().wait_stream(side)
        return y + 1

    return pg.cond(pred, forks, lambda x: x * 2, x)


def after(side, x, pred):
    y = branch(x, pred)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        z = y.cos()
    torch.cuda.current_stream().wait_stream(side)
    return z + y


@may_run_live
@pytest.mark.parametrize("where", [inside, after])
def test_c14_other_streams_in_or_after_a_branch_run_live(cuda, where):
    """The allocator would not know what is theirs."""
    side = torch.cuda.Stream()
    both = plain(lambda x, pred: where(side, x, pred))
    for n in range(5):
        both(torch.ones(64, device=cuda), flag(n % 2 == 0, cuda))
    assert "works on another stream than that of the call, in or after a branch or loop" in reasons(both)


@may_run_live
def test_c14_a_branch_on_another_stream_runs_live(cuda):
    side = torch.cuda.Stream()

    def f(x, pred):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = branch(x, pred)
        torch.cuda.current_stream().wait_stream(side)
        return y + 1

    both = plain(f)
    for n in range(5):
        both(torch.ones(64, device=cuda), flag(n % 2 == 0, cuda))
    assert "on another stream than that of the call" in reasons(both)


@may_run_live
def test_c14_a_branch_in_a_backward_runs_live(cuda):
    """autograd runs it on a thread of its own."""

    class Halves(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return pg.cond(grad.sum() > 0, lambda g: g * 0.5, lambda g: g * 2, grad)

    def f(x):
        w = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(Halves.apply(w).sum(), w)
        return grad

    both = plain(f)
    for _ in range(4):
        both(torch.ones(64, device=cuda))
    assert "in a backward, which autograd runs on a thread of its own" in reasons(both)
