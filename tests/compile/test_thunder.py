"""`PhonographTransform`: lightning-thunder's traces, recorded. Each time beside `thunder.jit` without it."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import may_run_live

# lightning-thunder 0.2.6 lists methods of named tensors, which torch 2.13 does not have any more, and takes `Function.apply`
# for a function of Python's, which it is not from torch 2.14 on. Nothing here calls them through thunder.
_NAMED = ("align_as", "align_to", "has_names", "refine_names", "rename")


def _stand_in(name):
    def gone(self, *args):
        raise NotImplementedError

    gone.__name__ = name
    return gone


with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for _name in _NAMED:
        if not hasattr(torch.Tensor, _name):
            patch.setattr(torch.Tensor, _name, _stand_in(_name), raising=False)
    if not hasattr(torch.autograd.Function.apply, "__func__"):
        patch.setattr(torch.autograd.Function, "apply", classmethod(_stand_in("apply")))
    thunder = pytest.importorskip("thunder")
    from phonograph.thunder import PhonographTransform

pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning", "ignore:.*:UserWarning",
                                        "error::phonograph.RunsLive")  # fmt: skip


class Sides:
    """A model with the transform, and a copy of it without."""

    def __init__(self, model, **options):
        self.transform = PhonographTransform(**options)
        self.models = model, copy.deepcopy(model)
        self.jitted = thunder.jit(self.models[0], transforms=[self.transform]), thunder.jit(self.models[1])

    def __iter__(self):
        return iter(zip(self.jitted, self.models, strict=True))

    def check(self, *found):
        assert_same(*[([p.grad for p in m.parameters()], [*m.state_dict().values()]) for m in self.models])
        if found:
            assert_same(*found)

    def step(self, *xs):
        """Forwards, and then their backwards from the last to the first; all from equal states of the generator."""
        found = []
        for f, m in self:
            torch.manual_seed(7)
            m.zero_grad()
            outs = [f(x) for x in xs]
            for out in reversed(outs):
                out.square().sum().backward()
            found.append(([out.detach() for out in outs], torch.rand(2, device=xs[0].device)))
        self.check(*found)

    def counts(self):
        return [(s.live, s.recorded, s.replayed) for s in map(pg.stats, self.transform.regions())]


def network(device, *more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), *more, nn.ReLU(), nn.Linear(16, 8)).to(device)


def ramp(device, n, rows=4):
    torch.manual_seed(n)
    return torch.randn(rows, 8, device=device)


def test_c01_inference(device):
    sides = Sides(network(device, nn.BatchNorm1d(16)).eval())
    with torch.no_grad():
        kept = [[f(ramp(device, n)) for n in range(5)] for f, _ in sides]
    assert_same(*kept)
    assert sides.counts() == [(1, 1, 4)]
    (region,) = sides.transform.regions()
    assert pg.stats(region).bytes_copied == 4 * 4 * 8 * 4  # the argument, and no parameter or buffer
    assert pg.explain(region).startswith("phonograph0 (forward): 5 calls")


def test_c06_training(device):
    """With running statistics, which the forward writes, and dropout."""
    sides = Sides(network(device, nn.BatchNorm1d(16), nn.Dropout(0.2)))
    optimizers = [torch.optim.SGD(m.parameters(), 0.01) for _, m in sides]
    for n in range(6):
        sides.step(ramp(device, n))
        for optimizer in optimizers:
            optimizer.step()
    assert sides.counts() == [(1, 1, 5), (2, 1, 4)]


def test_c06_parameters_are_never_copied(device):
    sides = Sides(nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 8)).to(device))
    copied = []
    for n in range(6):
        sides.step(ramp(device, n, rows=256))
        copied.append([pg.stats(region).bytes_copied for region in sides.transform.regions()])
    given = 256 * 8 * 4  # the input for the forward, the gradient and the input for the backward
    assert [b - a for a, b in zip(copied[-2], copied[-1], strict=True)] == [given, 2 * given]


def test_c06_gradients_over_micro_batches(device):
    sides = Sides(network(device))
    for n in range(5):
        for f, m in sides:
            torch.manual_seed(n)
            m.zero_grad()
            for i in range(3):
                f(ramp(device, 3 * n + i)).square().sum().backward()
        sides.check()
    assert sides.counts() == [(1, 1, 14), (2, 1, 13)]


def test_c06_two_forwards_before_their_backwards(device):
    sides = Sides(network(device))
    for n in range(8):
        sides.step(ramp(device, 2 * n), ramp(device, 2 * n + 1))
    before = sides.counts()
    sides.step(ramp(device, 0), ramp(device, 1))
    assert sides.counts() == [(live, recorded, replayed + 2) for live, recorded, replayed in before]


def test_c05_an_output_that_is_kept(device):
    sides = Sides(network(device))
    kept = [[f(ramp(device, n)) for n in range(8)] for f, _ in sides if torch.manual_seed(0)]
    assert_same(*[[out.detach() for out in outs] for outs in kept])


def test_c07_another_shape(device):
    sides = Sides(network(device))
    for n in range(8):
        sides.step(ramp(device, n, rows=3 + n % 2))
    assert sides.counts() == [(1, 1, 3), (2, 1, 2)] * 2


def test_c08_parameters_that_are_replaced(device):
    sides = Sides(network(device))
    for n in range(12):
        for _, m in sides if n % 4 == 2 else ():
            if n == 6:
                m[0].weight.data = torch.full((16, 8), 0.1 * n, device=device)
            m.load_state_dict({k: v.clone() + n for k, v in m.state_dict().items()})
        sides.step(ramp(device, n))
    for f, _ in sides:
        f.load_state_dict({k: v * 2 for k, v in f.original_state_dict().items()})
    for n in range(3):
        sides.step(ramp(device, n))
    assert sum(replayed for *_, replayed in sides.counts()) > 20


def test_c08_parameters_of_the_jitted_module_that_are_others(device):
    """Thunder's module has overrides for the parameters of the model."""
    sides = Sides(nn.Linear(8, 8).to(device).eval())
    with torch.no_grad():
        for n in range(9):
            for f, _ in sides if n % 3 == 0 else ():
                f._overrides_parameters["weight"] = nn.Parameter(torch.full((8, 8), float(n), device=device))
            assert_same(*[f(ramp(device, n)) for f, _ in sides])


def test_functions_and_their_parameters(device):
    """No module, and an input that is written."""

    def function(w, x, seen):
        seen.add_(1)
        return (x @ w).tanh() * seen

    transform = PhonographTransform()
    w, found = nn.Parameter(torch.ones(8, 8, device=device)), []
    for f in (thunder.jit(function, transforms=[transform]), thunder.jit(function)):
        seen, results = torch.zeros(8, device=device), []
        for n in range(5):
            w.grad = None
            out = f(w, ramp(device, n), seen)
            out.sum().backward()
            results.append((out.detach(), w.grad, seen.clone()))
        found.append(results)
    assert_same(*found)
    assert [pg.stats(region).replayed for region in transform.regions()] == [4, 3]


def test_what_asks_for_a_value_stays_outside(device):
    def function(x):
        y = x * 2 + 1
        return y.sum().item() + (x - 1) * 3

    transform = PhonographTransform()
    f, g = thunder.jit(function, transforms=[transform]), thunder.jit(function)
    for _ in range(5):
        assert_same(f(ramp(device, 0)), g(ramp(device, 0)))  # the value is a number that the second region takes
    assert len(transform.regions()) == 2
    assert all(pg.stats(region).replayed == 4 for region in transform.regions())


def test_what_can_be_recorded_may_be_overridden(device):
    class NoMatmul(PhonographTransform):
        def can_record(self, symbol):
            return super().can_record(symbol) and symbol.sym.name not in ("linear", "matmul")

    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Sigmoid(), nn.Linear(8, 8)).to(device)
    transform = NoMatmul()
    f, g = thunder.jit(model, transforms=[transform]), thunder.jit(model)
    with torch.no_grad():
        for n in range(4):
            assert_same(f(ramp(device, n)), g(ramp(device, n)))
    (region,) = transform.regions()
    assert pg.stats(region).replayed == 3
    assert not next(iter(region.bound.values())).state  # it reads no parameter


@may_run_live
def test_under_autocast(device):
    sides = Sides(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).to(device))
    for n in range(4):
        with torch.autocast(device.type, torch.bfloat16):
            sides.step(ramp(device, n))
    assert [replayed for *_, replayed in sides.counts()] == [3, 2]


def test_c17_recordings_go_with_the_jitted_module(device):
    model = network(device)
    f = thunder.jit(model, transforms=[transform := PhonographTransform()])
    for n in range(3):
        f(ramp(device, n)).sum().backward()
    refs = [weakref.ref(bound) for region in transform.regions() for bound in region.bound.values()]
    del f
    gc.collect()  # thunder's function, in which the regions are
    gc.collect()  # and what these were bound to
    assert len(refs) == 2
    assert [ref() for ref in refs] == [None, None]
    assert transform.regions() == []


def test_bad_options():
    with pytest.raises(ValueError, match="warmup must be at least 0"):
        PhonographTransform(warmup=-1)
