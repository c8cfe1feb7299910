"""`@pg.live` in a recorded function: it runs once in each call, between the segments of the recording."""

import ctypes

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.call import signature
from phonograph.testing import assert_same
from tests.contract.shared.marked import assert_split, ramp, reasons, run, split
from tests.helpers import counts, may_run_live


def test_c12_what_is_logged_is_logged_once_a_call(device):
    def make():
        log = []

        @pg.live
        def note(x, name, *, scale):
            log.append((name, float(x.sum()) * scale))

        def function(x):
            y = x.sin() * 2
            note(y, "y", scale=3)
            z = y.cumsum(0)
            note(z, name="z", scale=0.5)
            return z + y

        return function, log

    both = split(make)
    run(both, device)
    assert_split(both)
    assert len(both.state) == 12
    assert pg.explain(both.recorded).count("live between its segments: ") == 2
    assert "note at " in pg.explain(both.recorded)


@pytest.mark.parametrize("grad", [True, False])
def test_c11_what_it_gives_is_what_the_rest_works_with(device, grad):
    def make():
        @pg.live
        def route(scores):
            order = sorted(range(len(scores)), key=lambda i: -scores[i].item())
            return {"first": torch.tensor(order[:3], device=scores.device), "none": None, "same": scores}

        def function(x):
            scores = (x * 3).cos()
            found = route(scores)
            assert found["same"] is scores
            return x[found["first"]] + found["same"][:3], found["first"]

        return function

    both = split(make, hold=True)
    with torch.set_grad_enabled(grad):
        run(both, device)
    assert_split(both)


def make_step(device, look, *, zero="first"):
    net, log = nn.Linear(6, 6, device=device), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

    @pg.live
    def note(loss):
        log.append(look(net, loss))

    def step(x):
        if zero == "first":
            optimizer.zero_grad()
        loss = net(x).square().sum()
        loss.backward()
        note(loss)
        optimizer.step()
        if zero == "last":
            optimizer.zero_grad()
        return loss.detach()

    return step, (net, optimizer, log)


@pytest.mark.parametrize("zero", ["first", "outside"])
@pytest.mark.parametrize("drop", [True, False])
def test_c06_it_sees_the_gradients_of_the_step_in_which_it_runs(device, zero, drop):
    def make():
        return make_step(
            device, lambda net, loss: (loss.item(), net.weight.grad.norm().item(), net.bias.grad.tolist()), zero=zero
        )

    both = split(make)
    for n in range(6):
        both(ramp(device, 6, start=n))
        if drop or zero == "outside":
            both.change(lambda state: state[1].zero_grad())
    assert counts(both)[2] >= 3, pg.explain(both.recorded)
    assert len(both.state[2]) == 6


@may_run_live
def test_c06_gradients_that_are_gone_when_the_step_ends(device):
    both = split(lambda: make_step(device, lambda net, loss: net.weight.grad.norm().item(), zero="last"))
    run(both, device)
    assert len(both.state[2]) == 6


def test_c06_gradients_that_it_keeps(device):
    """Then they must not be overwritten."""
    both = split(lambda: make_step(device, lambda net, loss: net.weight.grad))
    with pytest.warns(pg.RunsLive, match="gradient"):
        run(both, device)
    assert len(both.state[2]) == 6


@may_run_live
@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("which", ["argument", "of the call", "view", "outside", "view of outside"])
def test_c08_it_writes_what_it_is_given(device, which, seen):
    def make():
        state = torch.zeros(6, device=device)

        @pg.live
        def write(t):
            (t if seen else t.data).add_(t.sum().item())

        def function(x):
            y = x * 2 + state
            given = {"argument": x, "of the call": y, "view": y[1:4], "outside": state, "view of outside": state[::2]}[which]
            write(given)
            state.mul_(0.5)
            return y + x + state, x.clone()

        return function, state

    both = split(make, hold=True)
    run(both, device)
    if which != "view of outside":
        assert_split(both)


def test_c05_it_keeps_what_it_is_given(device):
    def make():
        kept = []
        keep = pg.live(lambda y: kept.extend([y, y[1:]]))

        def function(x):
            y = x * 2
            keep(y)
            return y.exp()

        return function, kept

    both = split(make, hold=True)
    run(both, device)
    assert_split(both)
    assert len(both.state) == 12


@pytest.mark.parametrize("view", [lambda y: y.view(3, 2), torch.t, lambda y: y.flatten()[:]])
def test_c05_it_gives_a_view_of_all_of_a_tensor(device, view):
    """Nobody else has that."""

    def make():
        @pg.live
        def give(x):
            return view(x.view(2, 3) + 1)

        def function(x):
            y = give(x * 2)
            y.add_(1)
            return y * 3, y

        return function

    both = split(make, hold=True)
    run(both, device)
    assert_split(both)


@may_run_live
def test_c05_it_gives_a_view_of_what_it_keeps(device):
    def make():
        kept = []

        @pg.live
        def give(x):
            kept.append(x + 1)
            return kept[-1].view(3, 2)

        return lambda x: give(x * 2).add_(1) * 3, kept

    both = split(make)
    run(both, device)
    assert "return a clone" in reasons(both)


@may_run_live
@pytest.mark.parametrize("what", ["keeps", "attribute of a list", "outside", "part"])
def test_c05_it_keeps_what_it_gives(device, what):
    """The rest writes there, and so into what was kept."""

    def make():
        kept, table = [], torch.zeros(6, device=device)

        @pg.live
        def give(x):
            y = x.clone()
            if what == "keeps":
                kept.append(y)
            elif what == "attribute of a list":
                kept.append({"y": [y[:2]]})
            elif what == "part":
                return y[2:]
            return table if what == "outside" else y

        def function(x):
            y = give(x * 2)
            y.add_(1)
            return y * 3

        return function, (kept, table)

    both = split(make)
    run(both, device)
    assert "return a clone" in reasons(both)


@may_run_live
@pytest.mark.parametrize("late", ["keeps", "number", "shape", "writes"])
def test_c12_something_else_than_before(device, late):
    """The call begins again; what has run in it does not run a second time."""

    def make():
        log = []
        state = torch.zeros(6, device=device)

        @pg.live
        def first(x):
            log.append(("first", x.sum().item() + torch.rand(1).item()))
            x.mul_(2)
            return torch.rand_like(x)

        @pg.live
        def second(x):
            log.append(("second", x.sum().item()))
            y = torch.rand(len(x), device=device)
            if len(log) == 8:
                if late == "keeps":
                    log.append(y)
                if late == "writes":
                    x.add_(1)
                return {"number": 3.0, "shape": y[:1].clone()}.get(late, y)
            return y

        def function(x):
            state.add_(x)
            y = torch.rand_like(x) + state
            z = first(y)
            w = second(y * z)
            out = y + z + w + torch.rand_like(x)
            state.add_(1)
            return out.detach() * 2

        return function, (log, state)

    both = split(make, hold=True)
    run(both, device, calls=7)
    did = "writes others of its arguments" if late == "writes" else "gives a result of another shape"
    assert f"second {did}" in reasons(both)
    assert counts(both)[2] == {"number": 2, "shape": 4}.get(late, 5)
    assert len([entry for entry in both.state[0] if isinstance(entry, tuple)]) == 14


def test_c08_it_changes_what_the_rest_relies_on(device):
    """Seen to do so in a live call, the function runs live; for the first time in a replay, that call has no result."""
    scale, calls = [2.0], []

    @pg.live
    def change():
        calls.append(len(calls))
        if len(calls) == 4:
            scale[0] = 3.0

    state = torch.zeros(2, device=device)

    @pg.record(warmup=1)
    def function(x):
        state.add_(1)
        y = x * scale[0]
        change()
        return y * scale[0]

    x = ramp(device, 2, start=1)
    for _ in range(3):
        assert_same(function(x), x * 4)
    with pytest.raises(RuntimeError, match=r"change runs live between .* changes something .*test_marked\.py:\d+"):
        function(x)
    assert state.tolist() == [3, 3]
    for _ in range(3):
        assert_same(function(x), x * 9)
    assert len(calls) == 7


@may_run_live
def test_c08_it_is_seen_to_change_what_the_rest_relies_on(device):
    def make():
        scale = [2.0]

        @pg.live
        def change():
            scale[0] += 1

        def function(x):
            y = x * scale[0]
            change()
            return y * scale[0]

        return function, scale

    both = split(make)
    run(both, device)
    assert "besides giving its result" in reasons(both)


class Trainer:
    def __init__(self, device):
        self.weight = torch.ones(6, device=device)
        self.calls, self.history = 0, []

    @pg.live
    def count(self, y):
        self.calls += 1
        self.history.append((self.calls, y.max().item()))

    def step(self, x):
        y = x * self.weight
        self.count(y)
        return y + 1


def test_c12_a_method_that_counts(device):
    both = split(lambda: (lambda trainer: (trainer.step, (trainer.weight, trainer.history)))(Trainer(device)))
    run(both, device)
    assert_split(both)


def test_c12_it_raises(device):
    def make():
        state = torch.zeros(6, device=device)

        @pg.live
        def check(y):
            if y[0].item() > 3:
                raise ValueError("too large")

        def function(x):
            state.add_(x)
            check(state)
            state.mul_(2)
            return state + 1

        return function, state

    both = split(make)
    for n in (0, 1, 2, 30, 0, 1):
        if n == 30:
            with pytest.raises(ValueError, match="too large"):
                both(ramp(device, 6, start=n))
            both.change(torch.Tensor.zero_)
        else:
            both(ramp(device, 6, start=n))
    assert counts(both) == (1, 1, 5)


@may_run_live
@pytest.mark.parametrize(
    "what",
    ["number", "history", "differentiates", "adds gradients", "shares", "in a hook", "in checkpoint", "writes a history"],
)
def test_c11_what_cannot_be_done_between_segments_runs_live(device, what):
    def make():
        net, log = nn.Linear(6, 6, device=device), []

        @pg.live
        def work(x, y):
            log.append(x.sum().item())
            if what == "number":
                return log[-1]
            if what == "history":
                return x * 2
            if what == "differentiates":
                return torch.autograd.grad(y.sum(), x, retain_graph=True)[0].detach()
            if what == "adds gradients":
                y.sum().backward(retain_graph=True)
            if what == "writes a history":
                y.mul_(2)
            return torch.ones_like(x)

        def step(x):
            net.zero_grad()
            h = net(x)
            if what == "in a hook":
                h.register_hook(lambda g: work(g, g) * g)
                found = 1
            elif what == "in checkpoint":
                found = torch.utils.checkpoint.checkpoint(lambda h: h * work(h, h), h, use_reentrant=False)
            else:
                y = h.sin() * 2
                found = work(h, y if what != "shares" else h[1:]) * y
            loss = (h * found).sum()
            loss.backward()
            return loss.detach()

        return step, (net, log)

    both = split(make)
    run(both, device)
    if what != "in checkpoint":
        assert counts(both)[2] == 0
        assert "work" in reasons(both)


def test_c11_in_inference_mode(device):
    def make():
        log = []
        note = pg.live(lambda x: log.append(x.sum().item()))

        def function(x):
            note(x * 2)
            return x * 3

        return function, log

    both = split(make)
    with torch.inference_mode(), pytest.warns(pg.RunsLive, match="inference mode"):
        run(both, device)


@pytest.mark.parametrize("fallback", ["live", "error", "split"])
def test_c11_one_that_gives_a_number(device, fallback):
    """The whole runs live, or raises. What it gives shows in the first call, which is a live one."""

    @pg.live
    def note(x):
        return x.sum().item()

    f = pg.record(lambda x: (note(x), x * 2), warmup=0, fallback=fallback)
    f(ramp(device, 3))
    error = fallback == "error"
    said = r"note live, which returns a float"
    how = pytest.raises(pg.Unrecordable, match=said) if error else pytest.warns(pg.RunsLive, match=said)
    with how:
        f(ramp(device, 3))


@pytest.mark.parametrize("warmup", [0, 1, 2])
@pytest.mark.parametrize("hidden", [False, True])
def test_c12_calls_until_it_is_recorded(device, warmup, hidden):
    """Where nothing can be known of it beforehand, it takes one live call more."""
    seen = []
    note = pg.live(lambda x: seen.append(x[0].item()))
    address = id(note)
    find = (lambda: ctypes.cast(address, ctypes.py_object).value) if hidden else (lambda: note)

    f = pg.record(lambda x: (find()(x), x * 2)[1], warmup=warmup)
    for n in range(6):
        assert_same(f(ramp(device, 3, start=n)), ramp(device, 3, start=n) * 2)
    assert seen == [n / 8 for n in range(6)]
    live = warmup + (hidden or not warmup)
    assert (pg.stats(f).live, pg.stats(f).replayed) == (live, 6 - live), pg.explain(f)


def test_c12_running_out_of_memory_where_settings_are_read_is_no_other_setting(device, monkeypatch):
    """That error is a RuntimeError, as is what torch raises where a precision was set in two ways."""
    noted, reads = [], []

    @pg.live
    def note(x):
        noted.append(float(x.sum()))

    @pg.record(keep="always")
    def function(x):
        y = x.sin()
        note(y)
        return y * 2

    def every_second(read=signature._settings):
        reads.append(None)
        if len(reads) % 2:
            raise torch.OutOfMemoryError
        return read()

    for n in range(6):
        if n == 3:
            monkeypatch.setattr(signature, "_settings", every_second)
        x = ramp(device, 4, start=n)
        assert_same(function(x), x.sin() * 2)
    assert len(noted) == 6
    assert len(reads) > 6
    assert counts(function) == (1, 1, 5)
