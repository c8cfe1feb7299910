"""C16: what wraps and what is wrapped stay what they were."""

import copy
import inspect
import io
import pickle
import threading
import warnings

import pytest
import torch

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import ramp


def used_net(device):
    """A module with everything in it, used by a recorded function until it is replayed."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.0)).to(device)
    net.requires_grad_(False)
    before = list(net.state_dict())
    f = pg.record(lambda x: net(x), warmup=1)
    for _ in range(4):
        f(torch.randn(4, 3, device=device))
    assert pg.stats(f).replayed == 3
    return f, net, before


def test_c16_a_module_keeps_its_keys_class_and_attributes(device):
    _, net, before = used_net(device)
    fresh = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.0)).to(device)
    assert list(net.state_dict()) == before
    assert type(net) is torch.nn.Sequential
    assert vars(net).keys() == vars(fresh).keys()
    assert vars(net[0]).keys() == vars(fresh[0]).keys()
    assert [type(p) for p in net.parameters()] == [torch.nn.Parameter] * 4
    assert repr(net) == repr(fresh)


def pickled(net):
    return pickle.loads(pickle.dumps(net))


@pytest.mark.parametrize("copies", [copy.deepcopy, pickled])
def test_c16_a_copy_of_a_module_is_independent_of_it(device, copies):
    f, net, _ = used_net(device)
    copied = copies(net)
    x = torch.randn(4, 3, device=device)
    copied[0].weight.zero_()
    right = copy.deepcopy(net)(x)
    assert_same(f(x), right)
    g = pg.record(lambda x: copied(x), warmup=1)
    for _ in range(4):
        twin = copy.deepcopy(copied)
        assert_same(g(x), twin(x))


def test_c16_saving_and_loading(device, tmp_path):
    f, net, _ = used_net(device)
    torch.save(net.state_dict(), tmp_path / "net.pt")
    saved = {k: v.clone() for k, v in net.state_dict().items()}
    for _ in range(3):
        f(torch.randn(4, 3, device=device))
    loaded = torch.load(tmp_path / "net.pt")
    assert_same(dict(loaded), saved)
    net.load_state_dict(loaded)
    x = torch.randn(4, 3, device=device)
    right = copy.deepcopy(net)(x)
    assert_same(f(x), right)


def test_c16_a_recorded_function_looks_like_the_function(device):
    def documented(x: torch.Tensor, scale: float = 2.0, *, shift: int = 0) -> torch.Tensor:
        """What it does."""
        return x * scale + shift

    f = pg.record(documented)
    assert f.__name__ == "documented"
    assert f.__qualname__ == documented.__qualname__
    assert f.__doc__ == "What it does."
    assert f.__module__ == __name__
    assert f.__wrapped__ is documented
    assert inspect.signature(f) == inspect.signature(documented)
    assert callable(f)


def test_c16_a_method_decorated_in_the_class_body(device):
    class Model:
        def __init__(self, scale):
            self.scale = scale
            self.total = torch.zeros(3, device=device)

        @pg.record
        def step(self, x):
            self.total.add_(x)
            return x * self.scale

    one, other = Model(2.0), Model(3.0)
    for n in range(1, 7):
        assert one.step(torch.ones(3, device=device)).tolist() == [2.0] * 3
        assert other.step(torch.ones(3, device=device)).tolist() == [3.0] * 3
        assert one.total.tolist() == other.total.tolist() == [float(n)] * 3
    one.scale = 5.0
    assert one.step(torch.ones(3, device=device)).tolist() == [5.0] * 3
    assert other.step(torch.ones(3, device=device)).tolist() == [3.0] * 3


class Keeping:
    """Keeps its own recorded method under another name."""

    def __init__(self):
        self.scale = 2.0
        self.kept = self.step

    @pg.record
    def step(self, x):
        return x * self.scale


@pytest.mark.parametrize("copies", [copy.deepcopy, pickled])
def test_c16_a_copy_of_what_keeps_a_recorded_method(device, copies):
    x = ramp(device, 3)
    one = Keeping()
    for _ in range(3):
        one.kept(x)
    other = copies(one)
    one.scale, other.scale = 3.0, 5.0
    for _ in range(3):
        assert_same((one.kept(x), other.kept(x)), (x * 3, x * 5))
    assert other.kept is other.step
    assert pg.stats(other.kept).replayed


class Average:
    """Saves its `__dict__` as its state, as learning-rate schedulers do, but for what cannot be saved."""

    def __init__(self, device):
        self.mean, self.count = torch.zeros(3, device=device), 0
        self.lock = threading.Lock()

    @pg.record
    def update(self, x):
        self.count += 1
        self.mean = self.mean + (x - self.mean) / self.count

    def state_dict(self):
        return {name: value for name, value in self.__dict__.items() if name != "lock"}

    def load_state_dict(self, state):
        self.__dict__.update(state)


def through_a_file(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("saved", [through_a_file, copy.deepcopy, pickled])
def test_c16_a_state_of_all_attributes_has_nothing_of_a_recorded_method(device, saved):
    one, other = Average(device), Average(device)
    for i in range(5):
        one.update(ramp(device, 3) + i)
    state = saved(one.state_dict())
    recorded = pg.stats(one.update).recorded
    one.update(ramp(device, 3) + 9)
    for each in (one, other):
        each.load_state_dict(state)
        assert each.count == 5
        for i in range(5):
            each.update(ramp(device, 3) * i)
        assert each.update is each.update
    assert_same((one.mean, one.count), (other.mean, other.count))
    assert one.count == 10
    assert pg.stats(one.update).recorded == recorded, "its recordings outlive that its state is loaded"


def test_c16_a_recorded_forward_of_a_module_class(device):
    class Net(torch.nn.Module):
        def __init__(self, k):
            super().__init__()
            self.linear = torch.nn.Linear(3, 3, device=device).requires_grad_(False)
            self.k = k

        @pg.record
        def forward(self, x):
            return self.linear(x) * self.k

    nets = [Net(1), Net(2)]
    for _ in range(5):
        for net in nets:
            x = torch.randn(2, 3, device=device)
            assert_same(net(x), torch.nn.functional.linear(x, net.linear.weight, net.linear.bias) * net.k)
    copied = copy.deepcopy(nets[1])
    copied.linear.weight.zero_()
    for _ in range(4):
        x = torch.randn(2, 3, device=device)
        assert_same(copied(x), copied.linear.bias.expand(2, 3) * 2 + torch.zeros(2, 3, device=device))


@pytest.mark.parametrize("first", ["the step is recorded", "the scheduler is made"])
def test_c16_a_recorded_step_of_an_optimizer_with_a_scheduler(device, first):
    """A scheduler wraps the optimizer's step as a method."""

    def run(record):
        weight = torch.nn.Parameter(ramp(device, 3))
        weight.grad = torch.zeros_like(weight)
        optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.9)
        if first == "the step is recorded":
            step = optimizer.step = record(optimizer.step)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.1)
        else:
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.1)
            step = optimizer.step = record(optimizer.step)
        for i in range(9):
            weight.grad.copy_(ramp(device, 3) * i)
            optimizer.step()
            schedule.step()
        return step, [weight.detach(), optimizer.state_dict(), schedule.state_dict()]

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the scheduler says so where it has not seen a step
        (recorded, ours), (_, theirs) = run(pg.record), run(lambda f: f)
    assert_same(ours, theirs)
    assert pg.stats(recorded).replayed >= 7, pg.explain(recorded)


def test_c16_a_recorded_method_is_bound_anew_as_a_method_is(device):
    one, other = Average(device), Average(device)
    recorded = pg.record(one.state_dict)
    recorded.__func__(one), recorded.__func__.__get__(other)()
    assert pg.stats(recorded).calls == 1
    assert not hasattr(pg.record(ramp), "__func__")
