"""C2: generators that come and go."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.shared.memory import filled
from tests.helpers import counts, may_run_live, side_by_side


def test_c02_a_new_generator_in_each_call(device):
    f = pg.record(lambda x, g: x + torch.rand(4, generator=g, device=device), warmup=1)
    for n in range(8):
        mine, live = (torch.Generator(device).manual_seed(n) for _ in range(2))
        assert_same(f(filled(device, 0), mine), torch.rand(4, generator=live, device=device) + 0)
        assert_same(mine.get_state(), live.get_state())


def test_c02_a_generator_whose_state_is_set_from_outside(device):
    def make():
        at = [torch.Generator(device).manual_seed(1)]
        return lambda x: x + torch.rand(4, generator=at[0], device=device), at

    both = side_by_side(make)
    other = torch.Generator(device).manual_seed(4).get_state()
    for n in range(12):
        if n == 4:
            both.change(lambda at: at.__setitem__(0, torch.Generator(device).manual_seed(9)))
        if n == 7:
            both.change(lambda at: at[0].manual_seed(3))
        if n == 9:
            both.change(lambda at: at[0].set_state(other))
        both(filled(device, n))


class Tracker:
    """Named generators, as tensor-parallel code has them: inside of `fork`, the default generator is one of them."""

    def __init__(self, device, *names):
        self._default = torch.cuda.default_generators[device.index or 0]
        self.states = {name: self._default.clone_state() for name in names}
        self.seed(1)

    def seed(self, n):
        for i, state in enumerate(self.states.values()):
            state.manual_seed(100 * n + i)

    @contextlib.contextmanager
    def fork(self, name):
        before = self._default.graphsafe_get_state()
        self._default.graphsafe_set_state(self.states[name])
        try:
            yield
        finally:
            self.states[name] = self._default.graphsafe_get_state()
            self._default.graphsafe_set_state(before)

    def stands(self):
        return [(g.initial_seed(), g.get_offset()) for g in (self._default, *self.states.values())]


def two_trackers(device, make, **options):
    """A function made with a tracker, recorded, and another live: called one after the other, from one seed."""
    trackers = [Tracker(device, "a", "b") for _ in range(2)]
    recorded, live = pg.record(make(trackers[0]), warmup=1, **options), make(trackers[1])

    def both(n, *args):
        found = []
        for f, tracker in ((recorded, trackers[0]), (live, trackers[1])):
            torch.manual_seed(n)
            found.append((f(*args), tracker.stands()))
        assert_same(*found)

    return recorded, trackers, both


def test_c02_named_generators_of_a_tracker(cuda):
    def make(tracker):
        def f(x):
            with tracker.fork("a"):
                y = F.dropout(x, 0.5)
                with tracker.fork("b"):
                    y = y + torch.rand_like(x)
            with tracker.fork("a"):
                return F.dropout(y, 0.5) + torch.rand_like(y)

        return f

    recorded, trackers, both = two_trackers(cuda, make)
    x = torch.ones(64, device=cuda)
    for n in range(12):
        both(n, x)
        if n % 3 == 1:  # used by others, which puts another object in its place
            for tracker in trackers:
                with tracker.fork("b"):
                    torch.rand(5, device=cuda)
        if n == 7:
            for tracker in trackers:
                tracker.seed(n)
    assert counts(recorded) == (1, 1, 11)
    for tracker in trackers:
        tracker.states["a"] = torch.Generator(cuda).manual_seed(5)
    for n in range(3):
        both(n, x)
    assert counts(recorded) == (2, 2, 13)  # a change is first met in a live call


def test_c02_a_call_while_the_default_generator_is_another(cuda):
    """As it is inside of a tracker's `fork`."""
    recorded, trackers, both = two_trackers(cuda, lambda tracker: lambda x: F.dropout(x, 0.5))
    x = torch.ones(64, device=cuda)
    for tracker in trackers:
        tracker.states["same numbers"] = torch.cuda.default_generators[cuda.index or 0].clone_state()

    def inside(n, name):
        found = []
        for f, tracker in zip((recorded, lambda x: F.dropout(x, 0.5)), trackers, strict=True):
            torch.manual_seed(n)
            if name == "same numbers":
                tracker.states[name].manual_seed(n)
            with tracker.fork(name):
                found.append((f(x), f(x)))
            found[-1] += (tracker.stands(), torch.rand(4, device=cuda))
        assert_same(*found)

    for n in range(4):
        both(n, x)
    for n in range(9):
        inside(n, ("a", "same numbers", "b")[n % 3])
        both(n, x)
    assert counts(recorded) == (1, 1, 30)


def test_c02_a_fork_around_a_call_that_forks_the_same(cuda):
    """Then what the call draws from two generators comes from one state."""

    def make(tracker):
        def f(x):
            y = F.dropout(x, 0.5)
            with tracker.fork("a"):
                return F.dropout(y, 0.5) + torch.rand_like(y)

        return f

    recorded, trackers, _ = two_trackers(cuda, make)
    live = make(trackers[1])
    x = torch.ones(64, device=cuda)
    for n in range(12):
        found = []
        for f, tracker in zip((recorded, live), trackers, strict=True):
            torch.manual_seed(n)
            tracker.seed(n)
            with tracker.fork("a") if n % 4 == 3 else contextlib.nullcontext():
                found.append(f(x))
            found.append(tracker.stands())
        assert_same(found[:2], found[2:])
    assert pg.stats(recorded).replayed > 6


def test_c02_a_function_recorded_while_the_default_generator_is_another(cuda):
    recorded, trackers, _ = two_trackers(cuda, lambda tracker: lambda x: F.dropout(x, 0.5))
    x = torch.ones(64, device=cuda)
    for n in range(12):
        found = []
        for f, tracker in zip((recorded, lambda x: F.dropout(x, 0.5)), trackers, strict=True):
            torch.manual_seed(n)
            with tracker.fork("a") if n < 6 else contextlib.nullcontext():
                found.append(f(x))
            found.append(tracker.stands())
        assert_same(found[:2], found[2:])
    assert counts(recorded) == (1, 1, 11)


@may_run_live
def test_c12_a_generator_that_is_left_with_the_state_of_another(cuda):
    default = torch.cuda.default_generators[cuda.index or 0]
    own, other = default.graphsafe_get_state(), default.clone_state()

    def f(x):
        default.graphsafe_set_state(other)
        return F.dropout(x, 0.5)

    recorded = pg.record(f, warmup=1)
    try:
        for g in (recorded, f):
            default.graphsafe_set_state(own)
            own.manual_seed(2)
            other.manual_seed(3)
            results = []
            for n in range(9):
                if n in (3, 5, 6):
                    default.graphsafe_set_state(own)
                results.append(g(torch.ones(64, device=cuda)))
                results.append(torch.rand(4, device=cuda))
            results += [own.get_state(), other.get_state()]
            if g is recorded:
                expected = results
        assert_same(results, expected)
    finally:
        default.graphsafe_set_state(own)
    assert "leaves a random generator with the state of another" in pg.explain(recorded)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("pair", [False, True])
def test_c06_dropout_from_named_generators(cuda, pair, recompute):
    """What is recomputed draws from them anew, as it does live."""

    class Net(nn.Module):
        def __init__(self, tracker):
            super().__init__()
            self.tracker, self.first, self.second = tracker, nn.Linear(16, 64), nn.Linear(64, 16)

        def part(self, x):
            h = F.dropout(self.first(x), 0.5)
            with self.tracker.fork("a"):
                return F.dropout(h, 0.5)

        def forward(self, x):
            h = checkpoint(self.part, x, use_reentrant=False) if recompute else self.part(x)
            with self.tracker.fork("b"):
                return F.dropout(self.second(h), 0.1)

    def make(tracker):
        torch.manual_seed(0)
        net = Net(tracker).to(cuda)
        made.append(net)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)

        def step(x):
            optimizer.zero_grad()
            loss = net(x).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach(), [p.detach().clone() for p in net.parameters()]

        return step

    made = []
    if pair:
        trackers = [Tracker(cuda, "a", "b") for _ in range(2)]
        steps = [make(tracker) for tracker in trackers]
        pg.record(made[0], warmup=1)
    else:
        recorded, trackers, both = two_trackers(cuda, make)
    for n in range(6):
        x = torch.full((8, 16), 0.1 * n, device=cuda)
        if not pair:
            both(n, x)
            continue
        found = []
        for step, tracker in zip(steps, trackers, strict=True):
            torch.manual_seed(n)
            found.append((step(x), tracker.stands()))
        assert_same(*found)
    assert counts(made[0] if pair else recorded) == (1, 1, 5), pg.explain(made[0] if pair else recorded)
