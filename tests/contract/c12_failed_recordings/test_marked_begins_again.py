"""Marked functions in calls that begin again."""

import functools

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.shared.marked import _nothing, assert_split, ramp, reasons, run, split
from tests.helpers import counts, may_run_live


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
