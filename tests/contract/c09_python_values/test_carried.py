"""C1, C5, C9: state that is carried from call to call by rebinding attributes (`self.v = self.v * 0.9 + x`). Each program is
played from recordings, with eager's results and state to the bit, whoever reads, keeps, or replaces what stands there."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

import phonograph as pg
from phonograph.engine.describer import Describer
from phonograph.testing import assert_same
from tests.helpers import may_run_live, ramp, reasons


class Spiking(nn.Module):
    """Leaky integrate-and-fire neurons."""

    def __init__(self, tau=2.0):
        super().__init__()
        self.tau, self.v = tau, None

    def reset(self):
        self.v = None

    def forward(self, x):
        if self.v is None:
            self.v = torch.zeros_like(x)
        self.v = self.v + (x - self.v) / self.tau
        spike = (self.v >= 1.0).to(x)
        self.v = self.v * (1 - spike)
        return spike


class SpikingNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, width), Spiking(), nn.Linear(width, 6), Spiking(3.0))

    def forward(self, x):
        return self.layers(3 * x)

    def reset(self):
        for layer in self.layers:
            if isinstance(layer, Spiking):
                layer.reset()


class SpikingSteps(SpikingNet):
    """Several steps from rest, with a surrogate of the spikes' gradient."""

    def forward(self, x):
        self.reset()
        return sum(self.layers(3 * x) + torch.sigmoid(self.layers[1].v.mean()) for _ in range(3))


class World(nn.Module):
    """Keeps its recurrent state, detached: truncated backpropagation through time."""

    def __init__(self, cell=nn.LSTMCell):
        super().__init__()
        self.cell, self.head = cell(6, 12), nn.Linear(12, 6)
        self.h = self.c = None

    def reset(self):
        self.h = self.c = None

    def forward(self, x):
        if self.h is None:
            self.h, self.c = x.new_zeros(len(x), 12), x.new_zeros(len(x), 12)
        h, c = self.cell(x, (self.h, self.c))
        self.h, self.c = h.detach(), c.detach()
        return self.head(h)


class Gru(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(6, 6, batch_first=True)
        self.hidden = None

    def reset(self):
        self.hidden = None

    def forward(self, x):
        out, hidden = self.gru(x.unsqueeze(1), self.hidden)
        self.hidden = hidden.detach()
        return out[:, 0]


class Flow(nn.Module):
    """A normalising flow's batch norm, which keeps the statistics of the last batch for its inverse."""

    def __init__(self):
        super().__init__()
        self.log_gamma, self.beta = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.zeros(6))
        self.register_buffer("running_mean", torch.zeros(6))
        self.register_buffer("running_var", torch.ones(6))
        self.body = nn.Linear(6, 6)

    def forward(self, x):
        x = self.body(x)
        if self.training:
            self.batch_mean, self.batch_var = x.mean(0), x.var(0)
            self.running_mean.mul_(0.9).add_(self.batch_mean.detach() * 0.1)
            self.running_var.mul_(0.9).add_(self.batch_var.detach() * 0.1)
            mean, var = self.batch_mean, self.batch_var
        else:
            mean, var = self.running_mean, self.running_var
        return self.log_gamma.exp() * (x - mean) / torch.sqrt(var + 1e-5) + self.beta


class Centers(nn.Module):
    """Running centers, rebound."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.centers = torch.zeros(6)

    def _apply(self, fn, recurse=True):
        self.centers = fn(self.centers)
        return super()._apply(fn, recurse)

    def forward(self, x):
        y = self.body(x)
        out = y - self.centers
        self.centers = 0.9 * self.centers + 0.1 * y.detach().mean(0)
        return out


class Actor(nn.Module):
    """Two attributes, of which one becomes what the other was."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(12, 6)
        self.action = self.previous = None

    def reset(self):
        self.action = self.previous = None

    def forward(self, x):
        if self.action is None:
            self.action = self.previous = torch.zeros_like(x)
        y = torch.tanh(self.body(torch.cat([x, self.previous], 1)))
        self.previous = self.action
        self.action = y.detach()
        return y


class Teacher(nn.Module):
    """An average of a weight, kept by rebinding."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 6, bias=False)
        self.average = None

    def forward(self, x):
        if self.average is None:
            self.average = self.body.weight.detach().clone()
        self.average = torch.lerp(self.average, self.body.weight.detach(), 0.1)
        return self.body(x) + x @ self.average


def _normed(of):
    def made():
        net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))
        of(net[0])
        return net

    return made


PROGRAMS = {
    "spiking": SpikingSteps,
    "lstm": World,
    "gru": Gru,
    "flow": Flow,
    "centers": Centers,
    "actor": Actor,
    "teacher": Teacher,
    "weight_norm": _normed(nn.utils.weight_norm),
    "spectral_norm": _normed(nn.utils.spectral_norm),
    "pruned": _normed(lambda m: prune.l1_unstructured(m, "weight", 0.4)),
    "parametrized weight_norm": _normed(parametrizations.weight_norm),
    "parametrized spectral_norm": _normed(parametrizations.spectral_norm),
}
programs = pytest.mark.parametrize("make", PROGRAMS.values(), ids=PROGRAMS)
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")


def both(make, device):
    found = []
    for _ in range(2):
        torch.manual_seed(4)
        found.append(make().to(device))
    return found


def tensors_of(net):
    return {
        f"{name}.{key}": value.detach().clone()
        for name, module in net.named_modules()
        for key, value in [*vars(module).items(), *module._buffers.items(), *module._parameters.items()]
        if isinstance(value, torch.Tensor)
    }


def assert_alike(ours, live):
    a, b = tensors_of(ours), tensors_of(live)
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def trained(net, x, optimizer):
    loss = F.mse_loss(net(x), x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.05)


@programs
def test_c09_a_step_that_carries_state_is_played(device, make):
    ours, live = both(make, device)
    mine, theirs = sgd(ours), sgd(live)
    step = pg.record(lambda x: trained(ours, x, mine))
    for n in range(20):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(n)).to(device)
        assert torch.equal(step(x), trained(live, x, theirs))
        assert_alike(ours, live)
    assert pg.stats(step).replayed >= 17, pg.explain(step)


@programs
def test_c09_a_module_that_carries_state_is_played(device, make):
    ours, live = both(make, device)
    mine, theirs = sgd(ours), sgd(live)
    recorded = pg.record(ours)
    for n in range(20):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(n)).to(device)
        assert torch.equal(trained(recorded, x, mine), trained(live, x, theirs))
        assert_alike(ours, live)
    assert pg.stats(recorded).replayed >= 17, pg.explain(recorded)


@pytest.mark.parametrize("make", [SpikingNet, World, Gru, Actor])
def test_c09_state_that_is_reset_between_is_a_new_beginning(device, make):
    ours, live = both(make, device)
    recorded = pg.record(ours)
    with torch.no_grad():
        for n in range(30):
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(n)).to(device)
            assert torch.equal(recorded(x), live(x))
            assert_alike(ours, live)
            if n % 5 == 4:
                ours.reset()
                live.reset()
        assert pg.stats(recorded).live <= 3, pg.explain(recorded)


@pytest.mark.parametrize("width", [16, 8192], ids=["small", "large"])
def test_c05_state_that_is_held_keeps_its_value(device, width):
    ours, live = both(lambda: SpikingNet(width), device)
    recorded, kept = pg.record(ours), []
    with torch.no_grad():
        for n in range(16):
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(n)).to(device)
            assert torch.equal(recorded(x), live(x))
            kept = [*kept[-3:], (ours.layers[1].v, live.layers[1].v)]
            for a, b in kept:
                assert torch.equal(a, b)
    assert pg.stats(recorded).replayed >= 14, pg.explain(recorded)
    assert pg.stats(recorded).recorded <= 4


def test_c09_state_that_somebody_replaces_copies_or_saves_between(device):
    ours, live = both(SpikingNet, device)
    recorded = pg.record(ours)
    with torch.no_grad():
        for n in range(20):
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(n)).to(device)
            assert torch.equal(recorded(x), live(x))
            for net in (ours, live):
                neurons = net.layers[1]
                if n == 5:
                    neurons.v = torch.full_like(neurons.v, 0.5)
                if n == 8:
                    neurons.v.mul_(0.5)  # in place
                if n == 11:
                    neurons.v = copy.deepcopy(net).layers[1].v
                if n == 14:
                    neurons.v = neurons.v.t().contiguous().t()  # of other strides
            assert_alike(ours, live)
    assert pg.stats(recorded).replayed >= 16, pg.explain(recorded)


def test_c09_two_shapes_and_both_modes_share_state(device):
    ours, live = both(Centers, device)
    recorded = pg.record(ours)
    for n in range(24):
        x = torch.randn(5 if n % 3 else 7, 6, generator=torch.Generator().manual_seed(n)).to(device)
        for net in (ours, live):
            net.train(n % 2 == 0)
        with torch.set_grad_enabled(n % 2 == 0):
            assert torch.equal(recorded(x).detach(), live(x).detach())
        assert_alike(ours, live)
    assert pg.stats(recorded).replayed >= 17, pg.explain(recorded)
    assert pg.stats(recorded).recorded == 4


class ByShape(nn.Module):
    """Begins anew where another shape comes: of what is there, it reads the shape."""

    def __init__(self):
        super().__init__()
        self.h = None

    def forward(self, x):
        if self.h is None or self.h.shape != x.shape:
            self.h = x * 1.0
        else:
            self.h = self.h + x
        return self.h * 2


def test_c09_the_shape_of_what_is_there_counts(device):
    ours, live = both(ByShape, device)
    recorded = pg.record(ours)
    for n in range(24):
        x = torch.randn(5 if n % 4 < 2 else 7, 6, generator=torch.Generator().manual_seed(n)).to(device)
        assert torch.equal(recorded(x), live(x)), n
        assert_alike(ours, live)
    assert pg.stats(recorded).replayed >= 12, pg.explain(recorded)


class Watched(nn.Module):
    """A part that runs live looks at what is carried."""

    def __init__(self):
        super().__init__()
        self.v, self.seen = None, []

    def forward(self, x):
        self.v = x if self.v is None else self.v + x
        look(self)
        return self.v * 2


@pg.live
def look(net):
    net.seen.append(net.v.sum().item())


@may_run_live
def test_c09_a_live_part_sees_what_is_carried(device):
    ours, live = both(Watched, device)
    recorded = pg.record(ours)
    for n in range(8):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(n)).to(device)
        assert torch.equal(recorded(x), live(x)), n
        assert ours.seen == live.seen


class InPlace(nn.Module):
    """Writes what is there before it puts another there."""

    def __init__(self):
        super().__init__()
        self.v = None

    def forward(self, x):
        if self.v is None:
            self.v = torch.zeros_like(x)
        self.v += 1
        self.v = self.v * x
        return self.v.sum()


@may_run_live
def test_c03_c09_what_is_written_and_replaced(device):
    ours, live = both(InPlace, device)
    recorded, held = pg.record(ours), []
    for n in range(12):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(n)).to(device)
        assert torch.equal(recorded(x), live(x)), n
        held = [*held[-2:], (ours.v, live.v)]
        for a, b in held:
            assert torch.equal(a, b), n


class Graphed(nn.Module):
    """Carries a history from call to call, which is eager's business."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.h = None

    def forward(self, x):
        self.h = torch.tanh(self.body(x if self.h is None else x + self.h))
        return self.h


@may_run_live
def test_c06_c09_state_with_a_history(device):
    ours, live = both(Graphed, device)
    recorded = pg.record(ours)
    for n in range(6):
        xs = torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(n)).to(device)
        ours.h = live.h = None
        a, b = sum(recorded(x).sum() for x in xs), sum(live(x).sum() for x in xs)
        assert torch.equal(a, b), n
        a.backward()
        b.backward()
        for p, q in zip(ours.parameters(), live.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), n


class SharedState(nn.Module):
    """Another object refers to the first state as well, and is read."""

    def __init__(self):
        super().__init__()
        self.v = torch.zeros(5, 6)
        self.first = [self.v]

    def _apply(self, fn, recurse=True):
        self.v = fn(self.v)
        self.first = [self.v]
        return super()._apply(fn, recurse)

    def forward(self, x):
        self.v = self.v + x
        return self.v + self.first[0]


@may_run_live
def test_c09_what_is_carried_is_found_in_another_place_as_well(device):
    ours, live = both(SharedState, device)
    recorded = pg.record(ours)
    for n in range(10):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(n)).to(device)
        assert torch.equal(recorded(x), live(x)), n
        if n == 6:
            ours.first[0] += 1
            live.first[0] += 1


class Pair(nn.Module):
    """Two parts that begin with the same state."""

    def __init__(self):
        super().__init__()
        self.a, self.b = Centers(), Centers()
        self.b.centers = self.a.centers

    def forward(self, x):
        return self.a(x) + self.b(x)


@may_run_live
def test_c07_c09_state_in_two_places_and_as_an_argument(device):
    ours, live = both(Pair, device)
    step = pg.record(lambda x, y: ours(x) * y)
    with torch.no_grad():
        for n in range(24):
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(n)).to(device)
            for net in (ours, live):
                if n == 8:
                    net.a.centers = net.b.centers
                if n == 12:
                    net.a.centers = net.b.centers.view(6)
                if n == 16:
                    net.a.centers = torch.zeros(1, device=device).expand(6)
                if n == 20:
                    torch.manual_seed(n)
                    net.a = Centers().to(device)
            y = live.a.centers
            assert torch.equal(step(x, ours.a.centers), live(x) * y), n
            assert torch.equal(ours.a.centers, live.a.centers)
            assert torch.equal(ours.b.centers, live.b.centers)


@may_run_live
def test_c07_c09_a_padded_call_carries_nothing(device):
    ours, live = both(Centers, device)
    recorded = pg.record(ours, shapes={"x": {0: [8]}})
    with torch.no_grad():
        for n in range(10):
            x = torch.randn(5 + n % 3, 6, generator=torch.Generator().manual_seed(n)).to(device)
            torch.testing.assert_close(recorded(x), live(x))
            assert torch.equal(ours.centers, live.centers)


class Counts(torch.optim.Optimizer):
    """Keeps the count of its steps as a new tensor each time: in the group, and in a parameter's state as well if in `both`."""

    def __init__(self, params, both):
        super().__init__(params, {"lr": 1e-2})
        self.both = both

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            first = group["params"][0]
            count = group.get("count", torch.zeros((), dtype=torch.int64, device=first.device)) + 1
            group["count"] = count
            if self.both:
                self.state[first]["step"] = count
            for p in group["params"]:
                p.sub_(p.grad * group["lr"] / count)


@pytest.mark.parametrize("both", [False, True], ids=["in the group", "in the state too"])
def test_c09_a_tensor_that_is_carried_in_a_parameter_group(device, both):
    def trained(record):
        torch.manual_seed(0)
        net = nn.Linear(4, 2).to(device)
        optimizer = Counts(net.parameters(), both)

        def step(x):
            optimizer.zero_grad()
            net(x).pow(2).sum().backward()
            optimizer.step()

        step, kept = record(step), []
        for n in range(20):
            step(torch.linspace(-1, 1 + n, 12, device=device).view(3, 4))
            kept.append(optimizer.param_groups[0]["count"])
            if n == 8:
                optimizer.param_groups[0]["count"] = torch.tensor(100, device=device)
            if n == 12:
                optimizer.param_groups[0]["lr"] = 1e-3
        return step, [*net.parameters(), *kept], optimizer.state_dict()

    step, *ours = trained(lambda step: pg.record(step, keep="always"))
    _, *theirs = trained(lambda step: step)
    assert_same(ours[0], theirs[0])
    assert_same(ours[1], theirs[1])
    assert pg.stats(step).recorded <= 3, pg.explain(step)
    assert pg.stats(step).replayed >= 16, pg.explain(step)


class Rows:
    """Carries what it has looked up: one look may raise before anything has changed, the other after."""

    def __init__(self, device):
        self.table = ramp(device, 12).view(4, 3)
        self.v, self.seen, self.pair = torch.zeros(1, 3, device=device), 0, [torch.zeros(3, device=device)] * 2

    def __call__(self, first, second=None):
        row = self.table.index_select(0, first)
        self.v = self.v * 0.5 + row
        self.pair = [row[0] * 2, self.pair[0] + 1]
        self.seen += 1
        return row if second is None else row + self.table.index_select(0, second) * 3


def both_raise(*steps):
    for step in steps:
        with pytest.raises(IndexError):
            step()


@pytest.mark.parametrize("after", [False, True], ids=["before anything has changed", "when something has"])
def test_c09_c13_a_look_that_raises_where_state_is_carried(device, after):
    torch.manual_seed(0)
    ours, live = Rows(device), Rows(device)
    step = pg.record(ours.__call__, keep="always")
    bad = torch.tensor([9], device=device)
    for n in range(14):
        at = torch.tensor([n % 4], device=device)
        if device.type == "cpu" and n in (8, 11):
            given = (at, bad) if after else (bad, at) if n == 11 else (bad, bad)
            both_raise(lambda given=given: step(*given), lambda given=given: live(*given))
        else:
            assert_same(step(at, at), live(at, at), f"call {n}")
        assert_same([ours.v, ours.pair, ours.seen], [live.v, live.pair, live.seen], f"after call {n}")
    assert pg.stats(step).replayed >= 9, reasons(step)


def test_c15_a_call_that_carries_state_is_known_at_a_glance(device, monkeypatch):
    """Also where an operator in it may raise, as a look at a table may."""
    ours, described = Rows(device), []
    step = pg.record(ours.__call__, keep="always")
    at = torch.tensor([1], device=device)
    for _ in range(12):  # audits come first
        step(at)
    describe = Describer.describe
    monkeypatch.setattr(Describer, "describe", lambda *args: (described.append(1), describe(*args))[1])
    replayed = pg.stats(step).replayed
    for _ in range(6):
        step(at)
    assert pg.stats(step).replayed == replayed + 6, reasons(step)
    assert not described


class Holds:
    def __init__(self, v):
        self.v = v

    def step(self, x, carries):
        if not carries:
            return x * told(self.v)
        self.v = self.v + x.sum()
        return x * 1


OTHER_VALUES = {
    "a float": [2.0, 3.0, 5.0],
    "an int": [2, 3, 5],
    "a flag": [True, False],
    "a word": ["a", "bb", "ccc"],
    "a list of numbers": [[1.0], [2.0], [3.0]],
    "a dictionary of numbers": [{"w": 2.0}, {"w": 3.0}],
    "an object": [SimpleNamespace(w=2.0), SimpleNamespace(w=3.0)],
    "a tuple with a tensor": [(torch.ones(()), 2.0), (torch.ones(()), 3.0)],
    "one after the other": [2.0, torch.ones(()), 3, None, "word"],
}


def told(value):
    if isinstance(value, (list, tuple)):
        return value[-1]
    if isinstance(value, (dict, SimpleNamespace)):
        return (value if isinstance(value, dict) else vars(value))["w"]
    return len(value) if isinstance(value, str) else 0.5 if value is None else value


def in_an_attribute(made):
    return made.step


def in_a_dictionary(made):
    items = vars(made)

    def step(x, carries):
        if not carries:
            return x * told(items["v"])
        items["v"] = items["v"] + x.sum()
        return x * 1

    return step


@may_run_live
@pytest.mark.parametrize("changes", [False, True], ids=["another", "changed in its place"])
@pytest.mark.parametrize("values", OTHER_VALUES.values(), ids=OTHER_VALUES)
@pytest.mark.parametrize("place", [in_an_attribute, in_a_dictionary])
def test_c09_what_else_stands_where_state_is_carried_is_read_anew(device, place, values, changes):
    def run(record):
        made = (
            SimpleNamespace(v=torch.zeros((), device=device))
            if place is in_a_dictionary
            else Holds(torch.zeros((), device=device))
        )
        step, found = record(place(made)), []
        first = copy.deepcopy(values[0])
        for n in range(40):
            if 8 <= n < 32:
                value = first if changes else values[n % len(values)]
                if changes and isinstance(value, (list, dict)):
                    value[0 if isinstance(value, list) else "w"] = float(n % 4)
                if changes and isinstance(value, SimpleNamespace):
                    value.w = float(n % 4)
                made.v = value.to(device) if isinstance(value, torch.Tensor) else value
            elif n == 32:
                made.v = torch.zeros((), device=device)
            found.append(step(ramp(device, 3, start=n % 3), not 8 <= n < 32))
        return [*found, made.v], step

    found, recorded = run(lambda f: pg.record(f, keep="always"))
    expected, _ = run(lambda f: f)
    assert_same(found, expected)
    assert pg.stats(recorded).replayed, pg.explain(recorded)
