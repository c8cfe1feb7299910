"""C9: tensors that a call leaves in attributes."""

import gc
import weakref

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.shared.left import made
from tests.helpers import KeepsItself, by_a_hook, counts, may_run_live, ramp

PUT = {
    "a detached one": "y = x * 2; self.last = y.detach(); return y + 1",
    "the result": "self.last = x * 2; return self.last",
    "a view of the result": "y = x * 2; self.last = y[1:]; return y",
    "a part of what is no result": "y = x * 2; self.last = y[1:]; return y.sum()",
    "an argument": "self.last = x; return x * 2",
    "another one than before": "self.last, self.other = x * 2, x * 3; return x * 4",
    "one in two places": "self.last = self.other = x * 2; return x * 4",
    "twice": "self.last = x * 2; self.last = x * 3; return self.last * 4",
    "in another object": "self.inner.last = x * 2; return x * 3",
    "without elements": "self.last = x[:0] * 2; return x * 3",
    "of integers": "self.last = x.long(); return x * 3",
    "and a number is counted": "self.n += 1; self.last = x * 2; return x * 3",
    "and nothing is returned": "self.last = x * 2",
    "in a method": "self.keep(x * 2); return x * 3",
    "made in no_grad": "\n        with torch.no_grad(): self.last = x * 2\n        return x * 3",
}


PUT_AND_READ = {
    "where it may be None": "self.last = x * 2 if self.last is None else x * 3; return x * 4",
    "where its shape is asked for": "self.last = x * self.last.shape[0] if self.last is not None else x * 2; return x",
    "as an operand": "y = x if self.last is None else x + self.last; self.last = y * 0.5; return y",
    "after it": "y = x * 2; old = self.last; self.last = y; return y if old is None else y + old",
    "as the result": "old = self.last; self.last = x * 2; return x if old is None else old",
    "in a container": "old = self.last; self.last = x * 2; return [old, x * 3]",
    "as a view": "old = self.last; self.last = x * 2; return x if old is None else old[1:]",
    "to move it on": "self.other = self.last; self.last = x * 2; return x * 3",
    "to swap them": "self.last, self.other = x * 2, self.last; return x * 3",
    "which it is": "same = self.last is self.other; self.last = x * 2; return x * 3 if same else x * 4",
    "to write it": "old = self.last; self.last = x * 2; return x if old is None else old.detach().add_(1)",
    "its attributes": "t = getattr(self.last, 'tag', 1.0); self.last = x * 2; return x * t",
    "its version": "v = 0 if self.last is None else self.last._version; self.last = x * 2; return x * (1 + v)",
    "its history": "h = self.last is not None and self.last.grad_fn is not None; self.last = x * 2; return x * (1 + h)",
    "its gradient": "g = self.last is not None and self.last.requires_grad; self.last = x * 2; return x * (1 + g)",
    "by vars": "old = vars(self)['last']; self.last = x * 2; return x if old is None else x + old",
    "in a list": "old = [self.last]; self.last = x * 2; return x if old[0] is None else x + old[0]",
    "when it was put in place of a number": "self.n = x * 2; return x * 3",
}


PUTTING = """
class Inner:
    def __init__(self): self.last = None
class Made(Base):
    def __init__(self):
        super().__init__()
        self.last = self.other = None
        self.inner, self.seen = Inner(), set()
    def step(self, x):
        {}
    def keep(self, t): self.last = t
"""


def attributes(made):
    return {"last": made.last, "other": made.other, "inner": made.inner.last, "n": made.n}


@may_run_live
@pytest.mark.parametrize("put", PUT.values(), ids=PUT)
def test_c09_a_tensor_that_is_put_somewhere(device, put):
    (ours, _), (live, _) = made(PUTTING.format(put)), made(PUTTING.format(put))
    recorded, kept = pg.record(ours.step), []
    for n in range(10):
        x = ramp(device, 3, start=n)
        assert_same(recorded(x), live.step(x))
        assert_same(attributes(ours), attributes(live))
        assert (ours.last is x) == (live.last is x)
        kept.append((attributes(ours), attributes(live)))
    for mine, theirs in kept:  # they are the owner's
        assert_same(mine, theirs)
    assert pg.stats(recorded).replayed >= 7, pg.explain(recorded)


@may_run_live
@pytest.mark.parametrize("read", PUT_AND_READ.values(), ids=PUT_AND_READ)
def test_c09_a_tensor_that_is_put_where_another_was_read(device, read):
    (ours, _), (live, _) = made(PUTTING.format(read)), made(PUTTING.format(read))
    recorded = pg.record(ours.step)
    for n in range(10):
        assert_same(recorded(ramp(device, 3, start=n)), live.step(ramp(device, 3, start=n)))
        assert_same(attributes(ours), attributes(live))
        for one in (ours, live):
            if n == 4 and one.last is not None:
                one.last.tag = 3.0
            if n == 6 and one.last is not None:
                one.last.add_(1)
            if n == 8:
                one.last = ramp(device, 3).requires_grad_()


@may_run_live
def test_c09_what_was_put_is_replaced_by_its_owner(device):
    source = PUTTING.format("self.last = x * 2; return x * 3")
    (ours, _), (live, _) = made(source), made(source)
    recorded = pg.record(ours.step)
    for value in (None, 3, ramp(device, 5), ramp(device, 3).double(), "text", ramp(device, 3)):
        ours.last = live.last = value
        for n in range(4):
            assert_same(recorded(ramp(device, 3, start=n)), live.step(ramp(device, 3, start=n)))
            assert_same(attributes(ours), attributes(live))
    del ours.last, live.last
    for n in range(4):
        assert_same(recorded(ramp(device, 3, start=n)), live.step(ramp(device, 3, start=n)))
        assert_same(attributes(ours), attributes(live))


@may_run_live
def test_c09_whether_it_is_the_one_that_was_put(device):
    source = PUTTING.format("same = self.last is self.other; self.last = x * 2; return x * 3 if same else x * 4")
    (ours, _), (live, _) = made(source), made(source)
    recorded = pg.record(ours.step, warmup=0)
    for n in range(12):
        assert_same(recorded(ramp(device, 3, start=n)), live.step(ramp(device, 3, start=n)))
        assert_same(attributes(ours), attributes(live))
        if n % 4 == 3:
            ours.other, live.other = ours.last, live.last


@may_run_live
def test_c09_what_is_put_of_several_shapes(device):
    source = PUTTING.format("self.last = x * 2; return x * 3")
    (ours, _), (live, _) = made(source), made(source)
    recorded = pg.record(ours.step)
    for n in range(12):
        x = ramp(device, 3 + n % 2, start=n)
        assert_same(recorded(x), live.step(x))
        assert_same(attributes(ours), attributes(live))
    assert counts(recorded)[2] >= 6, pg.explain(recorded)


@may_run_live
@pytest.mark.parametrize("size", [3, 100_000], ids=["small", "large"])
def test_c09_a_model_that_keeps_what_it_has_seen(device, size):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(2, 3), nn.Linear(3, 2)
            self.hidden = self.detached = None

        def forward(self, x):
            self.hidden = self.first(x).tanh()
            self.detached = self.hidden.detach()
            return self.second(self.hidden)

    def trained(wrap):
        torch.manual_seed(0)
        net = Net().to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        called, found = wrap(net), []
        for n in range(8):
            optimizer.zero_grad()
            out = called(ramp(device, size, 2, start=n) / size)
            loss = out.square().mean() + net.hidden.square().mean() * (n % 2)
            loss.backward()
            optimizer.step()
            found.append((loss.detach().clone(), net.hidden.detach().clone(), net.detached.clone()))
            found.append([p.grad.clone() for p in net.parameters()])
        return found, net

    ours, live = trained(pg.record), trained(lambda net: net)
    assert_same(ours[0], live[0])
    assert pg.stats(ours[1]).replayed >= 4, pg.explain(ours[1])


@may_run_live
@pytest.mark.parametrize("attached", [True, False])
def test_c18_a_model_that_keeps_a_result_goes_when_it_is_dropped(device, attached):
    """Though the result may have a graph that has what replays the model."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.hidden = nn.Linear(2, 3), None

        def forward(self, x):
            hidden = self.first(x).tanh()
            self.hidden = hidden if attached else hidden.detach()
            return hidden * 2

    net = pg.record(Net().to(device))
    for n in range(6):
        net(ramp(device, 4, 2, start=n)).sum().backward()
    assert pg.stats(net).replayed >= 3
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None


@may_run_live
def test_c09_a_step_that_keeps_its_loss(device):
    class Trainer:
        def __init__(self):
            torch.manual_seed(0)
            self.model = nn.Linear(3, 2).to(device)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.loss = self.out = None

        def step(self, x):
            self.out = self.model(x)
            self.loss = self.out.square().mean()
            self.optimizer.zero_grad()
            self.loss.backward()
            self.optimizer.step()

    ours, live = Trainer(), Trainer()
    recorded = pg.record(ours.step)
    for n in range(8):
        for one, step in ((ours, recorded), (live, live.step)):
            step(ramp(device, 4, 3, start=n))
            with pytest.raises(RuntimeError, match="second time"):
                one.loss.backward()
        assert_same((ours.loss.detach(), ours.out.detach()), (live.loss.detach(), live.out.detach()))
        assert (ours.loss.requires_grad, ours.loss.grad_fn is None) == (live.loss.requires_grad, live.loss.grad_fn is None)
    assert counts(recorded) == (1, 1, 7), pg.explain(recorded)


@may_run_live
@pytest.mark.parametrize("options", [{"verify": 2}, {"outputs": "borrow"}, {"max_recordings": 1}], ids=str)
def test_c09_what_is_put_with_other_options(device, options):
    source = PUTTING.format("self.last = x * 2; return x * 3")
    (ours, _), (live, _) = made(source), made(source)
    recorded = pg.record(ours.step, **options)
    for n in range(8):
        assert_same(recorded(ramp(device, 3, start=n)).clone(), live.step(ramp(device, 3, start=n)))
        assert type(ours.last) is torch.Tensor
        assert_same(attributes(ours), attributes(live))


@may_run_live
def test_c09_a_replay_that_raises_has_put_nothing(device):
    source = """
        class Made(Base):
            def __init__(self): super().__init__(); self.last = None
            def step(self, x, at):
                y = x.index_select(0, at)
                self.last = y * 2
                return y
    """
    (ours, _), (live, _) = made(source), made(source)
    recorded, x = pg.record(ours.step), ramp(device, 4)
    for n in range(5):
        at = torch.tensor([n % 4], device=device)
        assert_same(recorded(x, at), live.step(x, at))
    if device.type == "cpu":
        for step in (recorded, live.step):
            with pytest.raises(IndexError):
                step(x, torch.tensor([9]))
        assert_same(ours.last, live.last)


class _Keeps(torch.autograd.Function):
    """Reads in its backward what it was given, and not before."""

    @staticmethod
    def forward(ctx, x, kept):
        ctx.save_for_backward(kept)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (kept,) = ctx.saved_tensors
        return grad * kept, None


def _recomputed(x, kept):
    return torch.utils.checkpoint.checkpoint(lambda x: x * kept, x, use_reentrant=False)


@may_run_live
@pytest.mark.parametrize("kept_by", [_Keeps.apply, KeepsItself.apply, by_a_hook, _recomputed, torch.mul],
                         ids=["saved", "ctx", "hook", "recomputed", "operator"])  # fmt: skip
@pytest.mark.parametrize("place", ["before", "after"])
def test_c06_a_backward_that_reads_what_was_there(device, kept_by, place):
    """What a forward has put another tensor in place of may be read as late as in its backward."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.last = nn.Parameter(torch.ones(3)), torch.ones(3, device=device)

        def forward(self, x):
            w = self.weight * x
            if place == "before":
                y, self.last = kept_by(w, self.last), x * 3
            else:
                old, self.last = self.last, x * 3
                y = kept_by(w, old)
            return y

    def gradients(wrap):
        net, found = Net().to(device), []
        called = wrap(net)
        for n in range(8):
            net.zero_grad()
            called(ramp(device, 3, start=n)).sum().backward()
            found.append((net.weight.grad.clone(), net.last.clone()))
        return found

    assert_same(gradients(pg.record), gradients(lambda net: net))


@may_run_live
def test_c06_a_hook_that_reads_what_the_forward_counts(device):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.n = nn.Parameter(torch.ones(3)), 0

        def forward(self, x):
            self.n += 1
            y = self.weight * x
            y.register_hook(self.hook)
            return y * 1.0

        def hook(self, grad):
            return grad * self.n

    def gradients(wrap):
        net, found = Net().to(device), []
        called = wrap(net)
        for n in range(8):
            net.zero_grad()
            outs = [called(ramp(device, 3, start=n + k)) for k in range(1 + n % 2)]
            sum(out.sum() for out in outs).backward()
            found.append((net.weight.grad.clone(), net.n))
        return net, found

    ours, found = gradients(pg.record)
    assert_same(found, gradients(lambda net: net)[1])
    pg.reset(ours)  # its graphs have hooks that are bound to it: docs/limits.md


@may_run_live
@pytest.mark.parametrize("first", ["reader", "model"])
def test_c09_who_else_reads_what_a_replay_leaves(device, first):
    """A module's attributes are not looked at each time, but where replays set them."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.n, self.last = nn.Linear(3, 3), 1, None

        def forward(self, x):
            self.n += 1
            self.last = x * 2
            return self.linear(x)

    def run(wrap):
        torch.manual_seed(0)
        net, found = Net().to(device), []
        net.last = ramp(device, 3)
        read, called = wrap(lambda x: x * net.n + (0 if net.last is None else net.last)), wrap(net)

        def reads():
            found.extend(read(ramp(device, 3, start=n)).clone() for n in range(4))

        def calls():
            found.extend(called(ramp(device, 3, start=n)).detach().clone() for n in range(4))

        for part in (reads, calls, reads, calls) if first == "reader" else (calls, reads, calls, reads):
            part()
        return found

    assert_same(run(pg.record), run(lambda f: f))


# -- what a review has found

UNUSUAL = {
    "a kernel counts": "return self.n_of_kernel(x)",
    "its gradient": "y = x + self.last.grad; self.last = x * 2; return y",
    "its tag": "t = self.last.tag if self.last is not None and self.last.__dict__ else 1.0; self.last = x * 2; return x * t",
    "whether it is another's": "s = operator.is_(self.last, self.other); self.last = x * 2; return x * (1 + s)",
    "its hash": "s = len({self.last, self.other}); self.last = x * 2; return x * s",
    "where it may have been set": "if self.flag: self.last = x * 3\n"
    "        y = self.last; self.last = x * 2; return x if y is None else y + x",
    "a copy's sum": "self.n += 1; return x * cp(self).total",
    "what is swallowed": "y = x * 2\n        with Swallows(): y = self.tool(y)\n        return y",
    "a live part's": "y = told(x * 2, self.last); self.last = x + 5; return y * 3",
}


UNUSUALLY = """
from copy import copy as cp
import phonograph as pg
class Swallows:
    def __enter__(self): return self
    def __exit__(self, *_): return True
@pg.live
def told(x, h): return x + (0 if h is None else h)
class Made(Base):
    def __init__(self):
        super().__init__()
        self.last = self.other = self.tool = None
    def __setstate__(self, state): self.total = state["n"]
    def step(self, x):
        {}
"""


def kernel_of(name, counter):
    @torch.library.custom_op(f"phonograph_left::{name}", mutates_args=())
    def counts(x: torch.Tensor) -> torch.Tensor:
        counter.n += 1
        return x * 2

    return counts


@may_run_live
@pytest.mark.parametrize("case", UNUSUAL)
def test_c09_what_is_read_of_what_is_left_in_unusual_ways(device, case):
    (ours, _), (live, _) = made(UNUSUALLY.format(UNUSUAL[case])), made(UNUSUALLY.format(UNUSUAL[case]))
    if case == "a kernel counts":
        ours.n_of_kernel, live.n_of_kernel = kernel_of(f"ours_{device.type}", ours), kernel_of(f"live_{device.type}", live)
    recorded = pg.record(ours.step)
    for n in range(12):
        for one in (ours, live):
            one.flag = n % 3 == 2
            if case == "its gradient":
                one.last = torch.zeros(3, device=device, requires_grad=True)
                one.last.grad = torch.ones(3, device=device) * n
            elif case == "its tag" and one.last is not None:
                one.last.tag = float(n)
            elif case in ("whether it is another's", "its hash") and n % 4 == 3:
                one.other = one.last
            elif case == "what is swallowed" and n == 6:
                one.tool = torch.neg
        assert_same(recorded(ramp(device, 3, start=n)), live.step(ramp(device, 3, start=n)))
        assert ours.n == live.n
        if case != "its gradient":
            assert_same(ours.last, live.last)


@may_run_live
def test_c09_what_the_garbage_collector_counts_meanwhile(device):
    source = """
        class Garbage:
            def __init__(self, of): self.me, self.of = self, of
            def __del__(self): self.of.n += 1
        class Made(Base):
            def step(self, x):
                self.n += 1
                return x * 2
        def number(made): return Garbage(made)
    """
    (ours, garbage), (live, _) = made(source), made(source)
    recorded = pg.record(ours.step)
    for n in range(8):
        garbage(ours)
        garbage(live)
        assert_same(recorded(ramp(device, 3, start=n)), live.step(ramp(device, 3, start=n)))
    gc.collect()
    assert live.n == 16
    assert ours.n <= 16  # a capture that is given up puts back what was counted by then
