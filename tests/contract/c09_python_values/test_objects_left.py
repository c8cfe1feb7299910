"""C1, C5, C6, C9: a call leaves a new object that holds tensors in an attribute, as a policy of stable-baselines3 does with its
distribution. Each replay leaves one of its own, which is what eager would have left, whoever keeps it or looks into it."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.distributions import Beta, Categorical, Independent, MixtureSameFamily, MultivariateNormal, Normal

import phonograph as pg
from phonograph.testing import assert_same

DISTRIBUTIONS = {
    "Normal": lambda mean, log_std: Normal(mean, log_std.exp()),
    "of numbers": lambda mean, log_std: Normal(mean, 1.0),
    "unchecked": lambda mean, log_std: Normal(mean, log_std.exp(), validate_args=False),
    "Independent": lambda mean, log_std: Independent(Normal(mean, log_std.exp()), 1),
    "Categorical": lambda mean, log_std: Categorical(logits=mean + log_std),
    "Beta": lambda mean, log_std: Beta(mean.exp(), log_std.exp()),
    "MultivariateNormal": lambda mean, log_std: MultivariateNormal(mean, torch.diag(log_std.exp())),
    "a mixture": lambda mean, log_std: MixtureSameFamily(Categorical(logits=mean), Normal(mean, log_std.exp())),
}
distributions = pytest.mark.parametrize("make", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)


class Action:
    """Holds the distribution of the last call."""

    def __init__(self, make):
        self.make, self.distribution, self.previous = make, None, None

    def proba(self, mean, log_std):
        self.distribution = self.make(mean, log_std)
        return self

    def log_prob(self):
        return self.distribution.log_prob(self.distribution.sample()).sum()


class Policy(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.net, self.log_std = nn.Linear(4, 3), nn.Parameter(torch.zeros(3))
        self.action = Action(make)

    def forward(self, x):
        mean = self.net(x)
        return self.action.proba(mean, self.log_std).log_prob(), mean * 2


def both(make, device, kind=Policy):
    policies = [kind(make).to(device) for _ in range(2)]
    policies[1].load_state_dict(policies[0].state_dict())
    return policies


def inputs(device, n):
    torch.manual_seed(n)  # both draw the same
    return torch.randn(5, 4).to(device)


def held_by(thing):
    """What an object has, and the objects in it."""
    own = vars(thing)
    tensors = {name: (x.detach(), x.requires_grad) for name, x in own.items() if isinstance(x, torch.Tensor)}
    inner = {name: held_by(x) for name, x in own.items() if name not in tensors and hasattr(x, "__dict__")}
    return type(thing), tensors, {name: x for name, x in own.items() if name not in tensors | inner}, inner


def assert_alike(ours, live):
    assert repr(held_by(ours.action.distribution)) == repr(held_by(live.action.distribution))


@distributions
def test_c09_a_distribution_in_an_attribute_is_left_by_replays(device, make):
    ours, live = both(make, device)
    recorded, held = pg.record(ours, keep="always"), []
    with torch.no_grad():
        for n in range(10):
            results = [policy(inputs(device, n)) for policy in (recorded, live)]
            assert_same(*results)
            assert_alike(ours, live)
            held.append((ours.action.distribution, live.action.distribution))
    assert len({id(mine) for mine, _ in held}) == 10
    for mine, theirs in held:  # C5: as it was
        assert repr(held_by(mine)) == repr(held_by(theirs))
    assert pg.stats(recorded).replayed >= 8, pg.explain(recorded)


@distributions
def test_c06_what_it_holds_has_a_history(device, make):
    ours, live = both(make, device)
    recorded = pg.record(ours, keep="always")
    for n in range(10):
        for policy, called in ((ours, recorded), (live, live)):
            loss, mean = called(inputs(device, n))
            if n % 2:  # what the caller reads after the call
                kept = policy.action.distribution
                loss = loss + (kept.mean.sum() if not isinstance(kept, Categorical) else kept.entropy().sum())
            (loss + mean.square().sum()).backward()
        assert_alike(ours, live)
        for mine, theirs in zip(ours.parameters(), live.parameters(), strict=True):
            assert_same(mine.grad, theirs.grad)
            mine.grad = theirs.grad = None
    assert pg.stats(recorded).replayed >= 7, pg.explain(recorded)


def test_c09_what_is_cached_on_access_makes_it_another(device):
    ours, live = both(DISTRIBUTIONS["Categorical"], device)
    recorded = pg.record(ours, keep="always")
    with torch.no_grad():
        for n in range(16):
            results = [policy(inputs(device, n)) for policy in (recorded, live)]
            assert_same(*results)
            if n % 3 == 0:
                assert_same(ours.action.distribution.probs, live.action.distribution.probs)
            assert_alike(ours, live)
    assert pg.stats(recorded).replayed >= 12, pg.explain(recorded)


class Reader(Policy):
    """Computes with the distribution of the call before, and keeps that."""

    def forward(self, x):
        before = self.action.distribution
        loss, mean = super().forward(x)
        self.action.previous = before
        return loss, mean if before is None else mean + before.mean + before.stddev


def test_c09_the_object_of_the_call_before_is_an_argument(device):
    ours, live = both(DISTRIBUTIONS["Normal"], device, Reader)
    recorded = pg.record(ours, keep="always")
    with torch.no_grad():
        for n in range(16):
            mine, theirs = ours.action.distribution, live.action.distribution
            if n == 7:  # in place
                mine.loc.mul_(2), theirs.loc.mul_(2)
            if n == 9:  # another stands there
                ours.action.distribution = mine = Normal(mine.loc + 1, mine.scale)
                live.action.distribution = theirs = Normal(theirs.loc + 1, theirs.scale)
            if n == 11:
                ours.action.distribution = live.action.distribution = mine = theirs = None
            results = [policy(inputs(device, n)) for policy in (recorded, live)]
            assert_same(*results)
            assert_alike(ours, live)
            assert ours.action.previous is mine
            assert live.action.previous is theirs
    assert pg.stats(recorded).replayed >= 10, pg.explain(recorded)


class State:
    def __init__(self, h):
        self.h, self.parts, self.name = h, {"twice": h * 2, "all": (h + 1,)}, "state"


class Slots:
    __slots__ = ("__weakref__", "h", "parts")

    def __init__(self, h):
        self.h, self.parts = h, {"twice": h * 2, "all": [h]}


@dataclasses.dataclass
class Data:
    h: torch.Tensor
    parts: dict = None

    def __post_init__(self):
        self.parts = {"twice": self.h * 2, "all": (self.h,)}


@pytest.mark.parametrize("kind", [State, Slots, Data])
def test_c09_a_plain_object_carries_state(device, kind):
    def made():
        net = nn.Linear(4, 4).to(device)
        nn.init.eye_(net.weight)
        net.state = None

        def step(x):
            before = net.state
            h = net(x) if before is None else net(x) * 0.5 + before.h * 0.5
            net.state = kind(h.detach())
            return h.sum()

        return net, step

    (ours, step), (live, plain) = made(), made()
    live.load_state_dict(ours.state_dict())
    recorded = pg.record(step, keep="always")
    for n in range(10):
        x = inputs(device, n)
        if n == 6:
            ours.state = live.state = None
        with torch.no_grad():
            assert_same(recorded(x), plain(x))
        assert type(ours.state) is kind
        assert_same((ours.state.h, ours.state.parts), (live.state.h, live.state.parts))
        all_of = ours.state.parts["all"][0]
        assert (all_of is ours.state.h) == (kind is not State)  # one tensor under two names
    assert pg.stats(recorded).replayed >= 6, pg.explain(recorded)


def test_c09_one_object_in_two_places_stays_one(device):
    net = nn.Linear(4, 4).to(device)
    net.first = net.second = None

    def step(x):
        net.first = net.second = State(net(x))
        return net.first, x * 2

    recorded = pg.record(step, keep="always")
    with torch.no_grad():
        for n in range(8):
            x = inputs(device, n)
            state, _ = recorded(x)
            assert state is net.first is net.second
            assert_same(state.h, net(x))
    assert pg.stats(recorded).replayed >= 5, pg.explain(recorded)


def adding(before, x):
    before.parts["old"] = 3


def returning(before, x):
    return before.parts


DONE_TO_IT = {
    "a name": lambda before, x: setattr(before, "name", "old"),
    "a new one": lambda before, x: setattr(before, "kept", 3),
    "a count": lambda before, x: setattr(before, "calls", before.calls + 1),
    "a tensor": lambda before, x: setattr(before, "late", x * 2),
    "an item": adding,
    "a write": lambda before, x: before.h.add_(1),
    "nothing but to return a part": returning,
}


class Keeping:
    """Somebody's object, that keeps a state."""


@pytest.mark.parametrize("kind", [None, Keeping], ids=["in a layer", "in an object"])
@pytest.mark.parametrize("does", DONE_TO_IT.values(), ids=DONE_TO_IT)
def test_c03_what_is_done_to_the_object_of_the_call_before(device, does, kind):
    """It is done to the one that stands there in this call, which the caller may have kept."""

    def made():
        net = nn.Linear(4, 4).to(device)
        nn.init.eye_(net.weight)
        net.bias = None
        keeps = net if kind is None else kind()
        keeps.state = None

        def step(x):
            before, keeps.state = keeps.state, State(net(x))
            keeps.state.calls = 0
            return x.sum(), None if before is None else does(before, x)

        return keeps, step

    (ours, step), (live, plain) = made(), made()
    recorded, kept = pg.record(step, keep="always"), []
    with torch.no_grad():
        for n in range(10):
            x = inputs(device, n)
            (a, mine), (b, theirs) = recorded(x), plain(x)
            assert_same(a, b)
            if does is returning and n:
                assert mine is kept[-1][0].parts
                assert theirs is kept[-1][1].parts
            kept.append((ours.state, live.state))
    for mine, theirs in kept:
        assert list(vars(mine)) == list(vars(theirs))
        assert_same(vars(mine), vars(theirs))
    assert pg.stats(recorded).replayed >= 7, pg.explain(recorded)


class Policy(nn.Module):
    """As of rsl_rl: it keeps its distribution, whose scale is a parameter."""

    def __init__(self, scale):
        super().__init__()
        self.layer, self.std, self.scale, self.kept = nn.Linear(3, 2), nn.Parameter(torch.ones(2)), scale, None

    def forward(self, x):
        mean = self.layer(x)
        self.kept = Normal(mean, self.scale(self.std, mean))
        return self.kept.log_prob(torch.ones_like(mean)).sum()


def stepping(policy):
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-4)

    def step(x):
        optimizer.zero_grad()
        loss = policy(x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@pytest.mark.filterwarnings("ignore::phonograph.RunsLive")
@pytest.mark.parametrize("whole", [True, False], ids=["a step", "a model"])
@pytest.mark.parametrize("scale", [lambda std, _: std, lambda std, mean: std.expand_as(mean)], ids=["itself", "expanded"])
def test_c11_a_kept_view_of_a_parameter_is_named_and_a_clone_of_it_recorded(device, scale, whole):
    made = []
    for scaled in (scale, lambda std, mean: std.expand_as(mean).clone()):
        torch.manual_seed(0)
        ours, live = Policy(scaled).to(device), Policy(scaled).to(device)
        live.load_state_dict(ours.state_dict())
        recorded, eager = (stepping(p) if whole else p.forward for p in (ours, live))
        made.append(pg.record(recorded, keep="always"))
        for n in range(8):
            x = torch.full((4, 3), n / 8, device=device)
            assert_same(made[-1](x), eager(x))
            assert_same(ours.kept.scale, live.kept.scale)
    refused, cloned = made
    assert pg.stats(refused).recorded == 0
    assert "keeps a view of" in pg.explain(refused)
    assert "kept" in pg.explain(refused)
    assert pg.stats(cloned).replayed >= 5, pg.explain(cloned)
