"""Marked functions that do anything to what they are given, early or late."""

import weakref

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.shared.marked import _nothing, assert_split, ramp, run, split
from tests.helpers import counts, may_run_live


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
