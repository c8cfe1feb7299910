"""C19: what keeps a function from being played is said once, with the user's line and what to do: arguments that are others
nearly each time, a module whose other methods are called, a function that is recorded anew each time."""

import copy
import functools
import itertools
import pickle
import warnings
import weakref
from collections import OrderedDict

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.engine import budget
from phonograph.engine import repeated_records as anew
from phonograph.testing import assert_same
from tests.helpers import may_run_live, ramp, reasons


@pytest.fixture(autouse=True)
def nothing_said_before(monkeypatch):
    """In the same process, on the other device."""
    monkeypatch.setattr(anew, "_made", OrderedDict())


def said(function, *args):
    """What is warned of while this runs, about phonograph."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", pg.RunsLive)
        function(*args)
    return [str(w.message) for w in found if issubclass(w.category, pg.RunsLive)]


# ---------------------------------------------------------------------------------------------------
# Signatures that do not come again


def scaled(x, scale=1.0):
    return x * scale


def scaled_by_name(x, *, scale):
    return x * scale


def counted(x, scale=1):
    return x * len(scale)  # a text, which is not followed


def counted_by_name(x, *, scale):
    return x * len(scale)


class Scales:
    @pg.record
    def scaled(self, x, scale):
        return x * scale

    @pg.record
    def counted(self, x, scale):
        return x * len(scale)


@pytest.mark.parametrize("often", [2, 3, 10])
@pytest.mark.parametrize("kind", ["positional", "by name", "method"])
def test_c19_a_number_that_is_another_nearly_each_time_beside_a_call_that_comes_again(device, kind, often):
    f = {"positional": pg.record(counted), "by name": pg.record(counted_by_name), "method": Scales().counted}[kind]
    x = ramp(device, 4)

    def loop():
        for n in range(200):
            assert_same(f(x, scale="n" * n), x * n)
            if n % often == 0:
                assert_same(f(x, scale=""), x * 0)

    (message,) = said(loop)
    assert "is called with another string of `scale` nearly each time" in message
    assert f"at {__file__}:{loop.__code__.co_firstlineno + 2} (" in message
    assert "outside" in message
    assert "nearly each time" in reasons(f)


@pytest.mark.parametrize("often", [2, 3, 10])
@pytest.mark.parametrize("kind", ["positional", "by name", "method"])
def test_c19_a_float_is_followed_and_not_complained_of(device, kind, often):
    f = {"positional": pg.record(scaled), "by name": pg.record(scaled_by_name), "method": Scales().scaled}[kind]
    x = ramp(device, 4)

    def loop():
        for n in range(200):
            assert_same(f(x, scale=n / 400), x * (n / 400))
            if n % often == 0:
                assert_same(f(x, scale=1.0), x)

    assert said(loop) == []
    assert pg.stats(f).recorded <= 3, pg.explain(f)
    assert pg.stats(f).replayed >= 190, pg.explain(f)


def test_c19_a_size_that_is_another_nearly_each_time(device):
    f = pg.record(lambda batch, scale: batch * scale)

    def loop():
        for n in range(1, 120):
            f(ramp(device, 1 + 37 * n % 127), 2.0)
            if n % 4 == 0:
                f(ramp(device, 4), 1.0)

    (message,) = said(loop)
    assert "another shape or kind of `batch` nearly each time" in message


def test_c19_sizes_that_come_again_are_not_complained_of(device):
    f = pg.record(lambda x: x * 2, max_recordings=128)

    def loop():
        for _ in range(3):
            for n in range(1, 80):  # more than would be said, if these did not come again
                f(ramp(device, n))
                f(ramp(device, n))

    assert said(loop) == []


def test_c19_a_number_that_is_another_now_and_then_is_not_complained_of(device):
    f = pg.record(scaled)
    x = ramp(device, 4)

    def loop():
        for epoch in range(80):
            f(x, float(epoch))
            for _ in range(9):
                f(x, 0.5)

    assert said(loop) == []


# ---------------------------------------------------------------------------------------------------
# Modules whose other methods are called


class Agent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
        self.head = torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.body(x))

    def act(self, x):
        return self.head(self.body(x)).argmax(-1)

    def value(self, x):
        return self(x).sum()


def parts_as_before(agent):
    return all("_compiled_call_impl" not in vars(part) for part in agent.modules() if part is not agent)


def test_c19_a_module_whose_other_method_is_called(device):
    agent = Agent().to(device)
    eager = copy.deepcopy(agent)
    pg.record(agent)
    x = ramp(device, 2, 4)

    def loop():
        for _ in range(100):
            assert_same(agent.act(x), eager.act(x))

    (message,) = said(loop)
    assert "is never called, but Agent.act is" in message
    assert f"at {__file__}:{loop.__code__.co_firstlineno + 2} (" in message
    assert "@pg.record" in message
    assert parts_as_before(agent)
    assert "Agent.act" in reasons(agent)
    assert said(loop) == []


def test_c19_parts_that_a_function_calls_are_no_method(device):
    def body_of(agent, x):
        return agent.body(x)

    agent = pg.record(Agent().to(device))
    assert said(lambda: [body_of(agent, ramp(device, 2, 4)) for _ in range(100)]) == []


def test_c19_methods_that_are_decorated(device):
    class Decorated(Agent):
        @torch.no_grad()
        def guess(self, x):
            return self.head(self.body(x))

        @functools.wraps(functools.partial(int))
        def number(self, x):
            return int(x)

    agent = pg.record(Decorated().to(device))
    (message,) = said(lambda: [agent.guess(ramp(device, 2, 4)) for _ in range(100)])
    assert "Decorated.guess is" in message


def test_c20_nothing_is_said_of_methods_where_recording_is_off(device, monkeypatch):
    monkeypatch.setenv("PHONOGRAPH", "off")
    agent = pg.record(Agent().to(device))
    assert said(lambda: [agent.act(ramp(device, 2, 4)) for _ in range(100)]) == []


def test_c05_a_caller_lets_go_of_its_variables(device):
    """Nobody keeps what lies in variables of functions that call parts of a recorded module."""
    agent = pg.record(Agent().to(device))

    def step(rows):
        x = ramp(device, rows, 4)
        gone = weakref.ref(x)
        agent.act(x)
        del x
        return gone() is None

    with torch.no_grad():
        assert step(2)


class Base(torch.nn.Module):
    def __call__(self, *args):
        return self.forward(*args)


class Process(Base):
    """As gpytorch's."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x)


class Checked(Process):
    def __call__(self, *args):
        assert args
        return super().__call__(*args)


@pytest.mark.parametrize("kind", [Process, Checked])
def test_c19_a_class_with_a_call_of_its_own(device, kind):
    model = kind().to(device)
    (message,) = said(lambda: pg.record(model))
    assert f"is never called, but {kind.__call__.__qualname__} is" in message
    assert "PG1408" in message
    assert kind.__call__.__qualname__ in reasons(model)
    x = ramp(device, 3, 4)
    assert said(lambda: [model(x) for _ in range(40)]) == []
    pg.reset(model)
    model.forward = pg.record(model.forward, warmup=1)  # as it says
    with torch.no_grad():
        for n in range(4):
            x = ramp(device, 3, 4, start=n)
            assert_same(model(x), model.layer(x))
    assert pg.stats(model.forward).replayed == 3


def test_c19_a_call_of_ones_own_that_goes_on_to_torchs(device):
    class Counting(torch.nn.Linear):
        def __call__(self, *args):
            return super().__call__(*args)

    model = Counting(4, 4).to(device)
    assert said(lambda: pg.record(model, warmup=1)) == []
    with torch.no_grad():
        for n in range(4):
            model(ramp(device, 3, 4, start=n))
    assert pg.stats(model).replayed == 3


def test_c19_a_module_whose_forward_is_called_past_it(device):
    agent = pg.record(Agent().to(device))
    x = ramp(device, 2, 4)
    (message,) = said(lambda: [agent.forward(x) for _ in range(100)])
    assert "is never called, but Agent.forward is" in message
    assert "call the module itself" in message


def test_c19_a_module_that_is_called_by_its_other_methods(device):
    agent = Agent().to(device)
    eager = copy.deepcopy(agent)
    pg.record(agent)
    x = ramp(device, 2, 4)
    assert said(lambda: [assert_same(agent.value(x), eager.value(x)) for _ in range(50)]) == []
    assert parts_as_before(agent)
    assert pg.stats(agent).replayed > 40


@may_run_live
def test_c19_who_listens_leaves_modules_as_they_are(device):
    agent = Agent().to(device)
    before = {name: list(vars(part)) for name, part in agent.named_modules()}
    pg.record(agent)
    for other in (copy.deepcopy(agent), pickle.loads(pickle.dumps(agent))):
        assert parts_as_before(other)
        assert_same(other.head(ramp(device, 1, 4)), agent.head(ramp(device, 1, 4)))
    pg.record(agent.body)  # a part is recorded itself
    x = ramp(device, 2, 4)
    for _ in range(4):
        agent.body(x)
    assert pg.stats(agent.body).replayed == 3
    agent(x)
    assert "_compiled_call_impl" not in vars(agent.head)
    assert list(vars(agent.head)) == before["head"]


def test_c19_parts_that_are_called_by_others_are_not_complained_of(device):
    agent = pg.record(Agent().to(device))
    x = ramp(device, 2, 4)
    assert said(lambda: [agent.body(x) for _ in range(300)]) == []
    assert parts_as_before(agent)


def test_c19_a_step_that_is_recorded_itself_and_calls_another_method(device):
    agent = Agent().to(device)
    eager = copy.deepcopy(agent)
    pg.record(agent)
    step, x = pg.record(lambda x: agent.act(x)), ramp(device, 2, 4)
    assert said(lambda: [assert_same(step(x), eager.act(x)) for _ in range(40)]) == []
    assert pg.stats(step).replayed == 39


@pytest.mark.parametrize("warmup", [0, 1])
def test_c19_a_step_that_is_captured_at_once_and_calls_another_method(device, warmup):
    agent = Agent().to(device)
    eager = copy.deepcopy(agent)
    pg.record(agent)
    step, x = pg.record(lambda x: agent.act(x), warmup=warmup), ramp(device, 2, 4)
    for _ in range(4):
        assert_same(step(x), eager.act(x))
    assert pg.stats(step).refusals == {}
    assert pg.stats(step).replayed == 4 - warmup


# ---------------------------------------------------------------------------------------------------
# Recorded anew


def test_c19_a_function_that_is_recorded_anew_each_time(device):
    x = ramp(device, 4)

    def loop():
        for _ in range(10):
            assert_same(pg.record(scaled)(x), x)

    (message,) = said(loop)
    assert "is recorded anew each time that this line runs" in message
    assert f"at {__file__}:{loop.__code__.co_firstlineno + 2} (" in message
    assert "make it once, outside of the loop" in message


def test_c19_a_function_that_is_made_and_recorded_in_each_step(device):
    x = ramp(device, 4)

    def train(n):
        @pg.record
        def step(x):
            return x * n

        assert_same(step(x), x * n)

    (message,) = said(lambda: [train(n) for n in range(10)])
    assert "step runs live: is recorded anew each time" in message


def test_c19_a_module_that_is_recorded_anew_each_time(device):
    net, x = torch.nn.Linear(4, 2).to(device), ramp(device, 2, 4)

    def loop():
        for _ in range(10):
            pg.record(net)(x)

    (message,) = said(loop)
    assert "is recorded anew each time" in message


def test_c19_many_functions_of_one_line_that_are_kept_or_played(device):
    x = ramp(device, 4)

    def loop():
        kept = [pg.record(lambda x, n=n: x * n) for n in range(6)]
        for _ in range(2):
            for n, f in enumerate(kept):
                assert_same(f(x), x * n)
        for n in range(6):
            f = pg.record(lambda x, n=n: x * n)
            for _ in range(4):
                assert_same(f(x), x * n)

    assert said(loop) == []


class Averaging:
    """A trainer, of which each call looks at a number, and others count meanwhile."""

    def __init__(self, device):
        self.net = nn.Linear(3, 3).to(device)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.within, self.averaged = False, torch.zeros((), dtype=torch.int64, device=device)

    def update(self, x):
        self.optimizer.zero_grad()
        loss = self.net(x).square().mean()
        loss.backward()
        self.optimizer.step()
        if self.averaged == 0:
            loss = loss * 2
        self.averaged += 1
        if self.within:
            self.schedule.step()
        return loss.detach()


@may_run_live
def test_c19_the_reason_stays_the_cause_when_something_else_changes(device, monkeypatch):
    """What a refusal goes by has changed, which no recording relies on: there is time for another attempt, or there is none."""
    monkeypatch.setattr(budget, "now", itertools.count().__next__)  # each call takes one, and so does a capture
    trainer = Averaging(device)
    update = pg.record(trainer.update)
    for n in range(60):
        update(ramp(device, 4, 3, start=n) * 0.01)
        trainer.schedule.step()
    assert all("on the host" in reason for reason in pg.stats(update).refusals), pg.stats(update).refusals


@pytest.mark.parametrize(
    ("was", "now", "how"),
    [
        ({"a": [1]}, {"a": [1, 1]}, "`batch['a']` has 2 items, and had 1"),
        ({"a": 1}, {"b": 1}, "`batch` has other keys or attributes"),
        ([(1, 1)], [[1, 1]], "`batch[0]` is a list, and was a tuple"),
        ([(1, 1)], [1], "`batch[0]` is a single value, and was a tuple"),
    ],
)
def test_c19_another_structure_is_named(device, was, now, how):
    """And not that the arguments are others."""
    x = ramp(device, 4)
    f = pg.record(lambda batch: x * 2, keep="always", warmup=0)
    f(was)
    f(now)
    assert f"why: {how}\n" in pg.explain(f)


def test_c19_several_changes_are_one_sentence(device):
    first, second = (nn.Linear(2, 2, device=device) for _ in range(2))

    def step(x):
        first.weight.data = torch.ones_like(first.weight)
        second.weight.data = torch.ones_like(second.weight)
        return x * 2

    f, x = pg.record(step, fallback="live"), ramp(device, 4)
    (message,) = said(lambda: [f(x) for _ in range(12)])
    assert "runs live: changes first.weight (and second.weight), which outlives the call at " in message
