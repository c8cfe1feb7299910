"""C17: recordings go with what they belong to, and processes end."""

import gc
import weakref

import pytest
import torch

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.shared.living import run_python
from tests.helpers import plain, ramp

FREED = """
import gc, sys, torch, phonograph as pg
from phonograph.devices import device_for

gc.disable()
device = torch.device(sys.argv[1])
x = torch.arange(1 << 18, device=device).float()
function = lambda x: torch.cat([x * i for i in range(20)]).view(20, -1).sum(0)
f = pg.record(function)
pools = [device_for(device).pool_bytes]
for _ in range(2):
    for _ in range(4):
        assert torch.equal(f(x), function(x))
    pools.append(device_for(device).pool_bytes)
    pg.reset(f)
    pools.append(device_for(device).pool_bytes)
assert pg.stats(f).replayed == 6
print(pools)
assert pools[0] >= pools[2] < pools[1]
assert pools[0] >= pools[4] < pools[3]
"""


def test_c17_reset_frees_everything_and_the_function_goes_on(device):
    """At once, and in a process of its own: what other tests have left shares the pool."""
    ran = run_python(FREED, str(device))
    assert ran.returncode == 0, (ran.stdout, ran.stderr)


def test_c17_held_outputs_survive_a_reset(device):
    both = plain(lambda x: x * 2, hold=True)
    for n in range(5):
        both(ramp(device, 10, start=n))
    pg.reset(both.recorded)
    gc.collect()
    noise = [torch.full((10,), float("nan"), device=device) for _ in range(20)]
    both.check()
    for n in range(5):
        both(ramp(device, 10, start=n))
    del noise


def test_c17_held_outputs_survive_their_function(device):
    f = pg.record(lambda x: (x * 2, x + 1), warmup=1)
    held = [f(ramp(device, 10, start=n)) for n in range(5)]
    del f
    gc.collect()
    noise = [torch.full((10,), float("nan"), device=device) for _ in range(20)]
    others = [plain(lambda x, k=k: x - k) for k in range(3)]
    for both in others:
        for n in range(3):
            both(ramp(device, 10, start=n))
    for n, result in enumerate(held):
        assert_same(result, (ramp(device, 10, start=n) * 2, ramp(device, 10, start=n) + 1))
    del noise


def test_c17_dropping_the_function_frees_what_it_used(device):
    class Big:
        def __init__(self):
            self.weight = torch.ones(1000, device=device)
            self.module = torch.nn.Linear(3, 3, device=device)

    def use():
        big = Big()
        f = pg.record(lambda x: (x * big.weight).sum() + big.module.weight.sum(), warmup=1)
        with torch.no_grad():
            for _ in range(4):
                f(torch.ones(1000, device=device))
        assert pg.stats(f).replayed == 3
        return [weakref.ref(t) for t in (big, big.weight, big.module, f)]

    references = use()
    gc.collect()
    assert [r() for r in references] == [None] * 4


def _garbage(device, kind):
    """Something recorded, that only the collector can free."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)).to(device)
    step = pg.record(model) if kind == "pair" else pg.record(lambda x: model(x).sum().backward())
    for n in range(5):
        made = step(ramp(device, 8, start=n).view(1, 8))
        if kind == "pair":
            made.sum().backward()
    assert pg.stats(step).replayed
    cycle = [step]
    cycle.append(cycle)
    return weakref.ref(step)


@pytest.mark.parametrize("kind", ["pair", "step"])
def test_c17_a_recording_that_goes_in_a_capture(device, kind):
    def collecting(x):
        y = x * 2
        gc.collect()
        return y + 1

    gone = _garbage(device, kind)
    assert gone() is not None
    f = pg.record(collecting, warmup=0)
    for n in range(4):
        assert_same(f(ramp(device, 8, start=n)), ramp(device, 8, start=n) * 2 + 1)
    assert gone() is None
    assert pg.stats(f).replayed == 4


@pytest.mark.parametrize("kind", ["pair", "step"])
@pytest.mark.parametrize("mode", ["thread_local", "global", "relaxed"])
def test_c17_a_recording_that_goes_in_a_capture_of_somebody_else(cuda, kind, mode):
    x = ramp(cuda, 8)
    assert_same(x * 2 + 1, x + x + 1)  # their kernels are loaded
    gone = _garbage(cuda, kind)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        y = x * 2
        assert gone() is not None
        gc.collect()
        z = y + 1
    assert gone() is None
    graph.replay()
    assert_same(z, x * 2 + 1)


def test_c17_instances_of_a_class_with_a_recorded_method_can_be_freed(device):
    class Model:
        def __init__(self):
            self.weight = torch.ones(3, device=device)

        @pg.record
        def step(self, x):
            return x * self.weight

    def use():
        model = Model()
        for _ in range(4):
            model.step(torch.ones(3, device=device))
        return weakref.ref(model)

    references = [use() for _ in range(3)]
    pg.reset(Model.step)
    gc.collect()
    assert [r() for r in references] == [None] * 3


def test_c17_arguments_and_results_are_not_kept_alive(device):
    f = pg.record(lambda x: x * 2, warmup=1)
    references = []
    for _ in range(5):
        x = torch.ones(50, device=device)
        y = f(x)
        references += [weakref.ref(x), weakref.ref(y)]
        del x, y
    gc.collect()
    assert [r() for r in references] == [None] * 10


def test_c17_reset_inside_of_a_loop(device):
    both = plain(lambda x: x.cos() * 3, hold=True)
    for n in range(15):
        both(ramp(device, 5, start=n))
        if n % 4 == 3:
            pg.reset(both.recorded)


EXIT = """
import sys, torch, phonograph as pg
device = sys.argv[1]
net = torch.nn.Linear(4, 4, device=device).requires_grad_(False)
@pg.record
def f(x):
    return torch.nn.functional.dropout(net(x)), x * 2
held = [f(torch.ones(2, 4, device=device)) for _ in range(6)]
assert pg.stats(f).replayed == 5, pg.explain(f)
class AtExit:
    def __del__(self):
        try:
            f(torch.ones(2, 4, device=device))
        except Exception:
            pass
keeper = AtExit()
print("done")
"""


def test_c17_the_interpreter_exits_cleanly(device):
    ended = run_python(EXIT, str(device))
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")
