"""C21: what tells recordings that somebody has come to a gradient, or to what an optimizer remembers, is there only as long as
one needs it. Otherwise torch's attributes are the very same objects as if phonograph were not there."""

import gc
import os
import sys
import threading
import weakref

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.guards import attribute_epochs as doors
from phonograph.guards import module_epochs as witness
from phonograph.testing import assert_same
from tests import forked
from tests.helpers import may_run_live, ramp

pytestmark = may_run_live
_KINDS = (torch.Tensor, nn.Parameter, torch.optim.Optimizer, torch.optim.SGD, torch.optim.Adam, torch.autograd.Variable)
_NAMES = ("grad", "state", "__setstate__", "_execution_engine")


def seen():
    """What all code of a process comes through."""
    found = {(kind, name): vars(kind)[name] for kind in _KINDS for name in _NAMES if name in vars(kind)}
    return {**found, "swap": torch.utils.swap_tensors, "grad": torch.Tensor.grad, "of parameters": nn.Parameter.grad}


class Hears:
    """Somebody who needs to hear of changes."""


@pytest.fixture(autouse=True)
def untouched():
    """Before and after, there is no door; recordings of other tests may have been kept until now."""
    hears = Hears()
    witness.watch([hears], hears)  # who hears of swapped tensors as well, for as long as the test goes on
    gc.collect()
    if doors.gradients._users or doors.states._users:
        pytest.skip("a recording of another test is kept")
    before = seen()
    yield before
    gc.collect()
    assert_untouched(before)


def assert_untouched(before):
    now = seen()
    assert now.keys() == before.keys()
    assert [name for name in now if now[name] is not before[name]] == []


def training(device, momentum=0.9):
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, optimizer, step


def played(step, device):
    for _ in range(6):
        step(ramp(device, 2, 4))
    assert pg.stats(step).replayed > 2, pg.explain(step)
    return step


@pytest.mark.parametrize("end", ["reset", "dropped"])
def test_c21_doors_are_there_as_long_as_a_recording_needs_them(device, untouched, end):
    step = played(pg.record(training(device)[2], keep="always"), device)
    assert "grad" in vars(nn.Parameter)
    assert "state" in vars(torch.optim.Optimizer)
    if end == "reset":
        pg.reset(step)
        assert_untouched(untouched)
        played(step, device)
        assert "grad" in vars(nn.Parameter)
    del step


def test_c21_one_of_two_recordings_is_gone(device):
    first = played(pg.record(training(device)[2], keep="always"), device)
    model, _, plain = training(device)
    second = played(pg.record(plain, keep="always"), device)
    pg.reset(first)
    kept, x = model.weight.grad, ramp(device, 2, 4)
    value = kept.clone()
    second(x + 1)
    assert_same(kept, value)
    pg.reset(second)


def test_c21_what_was_refused_has_no_doors(device, untouched):
    model, _, plain = training(device)

    def step(x):
        plain(x)
        return model.weight.sum().item() * x.sum().item()

    recorded = pg.record(step, fallback="live")
    for _ in range(6):
        recorded(ramp(device, 2, 4))
        gc.collect()
        assert_untouched(untouched)
    assert pg.stats(recorded).replayed == 0


def test_c21_recorded_code_that_has_no_gradients_has_no_doors(device, untouched):
    model = nn.Linear(4, 4).to(device)
    recorded = played(pg.record(lambda x: model(x).detach(), keep="always"), device)
    assert_untouched(untouched)
    del recorded


def test_c21_a_pair_whose_gradients_autograd_installs_has_no_doors(device, untouched):
    model = pg.record(nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(device), keep="always")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(6):
        optimizer.zero_grad()
        model(ramp(device, 2, 4)).sum().backward()
        optimizer.step()
    assert pg.stats(model).replayed > 2, pg.explain(model)
    assert_untouched(untouched)
    pg.reset(model)


def test_c21_recordings_of_many_threads_come_and_go(device, untouched):
    """Each door is asked for and left by several threads at once, and left as garbage: it is there whenever one needs it."""

    class User:
        pass

    failed = []

    def come_and_go(door, kind, name):
        for n in range(200):
            user = User()
            door.stay_for(user)
            if name not in vars(kind):
                failed.append(n)
            if n % 3:
                user.itself = user
            elif n % 2:
                door.leave(user)
            del user
            if n % 20 == 0:
                gc.collect()

    ways = [(doors.gradients, nn.Parameter, "grad"), (doors.states, torch.optim.Optimizer, "state")]
    threads = [threading.Thread(target=come_and_go, args=way) for way in ways * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    gc.collect()
    assert_untouched(untouched)


def test_c21_an_attribute_that_somebody_else_has_replaced_stays_theirs(device, monkeypatch):
    _, _, plain = training(device)
    step = played(pg.record(plain, keep="always"), device)
    swap = torch.utils.swap_tensors
    monkeypatch.setattr(torch.utils, "swap_tensors", lambda a, b: swap(a, b))
    theirs = torch.utils.swap_tensors
    pg.reset(step)
    assert torch.utils.swap_tensors is theirs
    a, b = torch.ones(2), torch.zeros(2)
    torch.utils.swap_tensors(a, b)
    assert_same(a, torch.zeros(2))
    monkeypatch.undo()
    pg.reset(played(step, device))  # then it can go


def test_c21_who_reads_a_gradient_runs_no_line_of_python(device):
    _, _, plain = training(device)
    step = played(pg.record(plain, keep="always"), device)
    p = nn.Parameter(torch.ones(2, device=device))
    p.grad = torch.ones(2, device=device)
    frames = []

    def note(frame, event, arg):
        if event == "call":
            frames.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        epoch = doors.gradients.now()
        grad = p.grad
        p.grad = grad
    finally:
        sys.setprofile(before)
    assert frames == ["now"]
    assert doors.gradients.now() != epoch
    pg.reset(step)


def test_c21_an_optimizer_whose_objects_have_no_hash(device):
    class Compared(torch.optim.SGD):
        __hash__ = None

        def __eq__(self, other):
            return self is other

    model, _, plain = training(device)
    step = played(pg.record(plain, keep="always"), device)
    other = Compared(model.parameters(), lr=0.1, momentum=0.9)
    assert dict(other.state) == {}
    other.state = {}
    assert other.state == {}
    pg.reset(step)


_NEVER = """
import torch
torch.optim.Adam([torch.ones(1)])  # torch itself puts a hook into the class of the first one
kinds = [torch.Tensor, torch.nn.Parameter, torch.autograd.Variable]
kinds += [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
before = [{**vars(kind)} for kind in kinds], torch.utils.swap_tensors, torch.Tensor.grad, torch.nn.Parameter.grad
import phonograph as pg
p = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.Adam([p])
@pg.record
def step(x):
    optimizer.zero_grad()
    (p * x).sum().backward()
    optimizer.step()
    yield p.grad
for _ in range(4):
    list(step(torch.ones(3)))
after = [{**vars(kind)} for kind in kinds], torch.utils.swap_tensors, torch.Tensor.grad, torch.nn.Parameter.grad
for kind, was, now in zip(kinds, before[0], after[0]):
    differs = [name for name in {**was, **now} if name != "__static_attributes__" and was.get(name) is not now.get(name)]
    assert not differs, (kind, differs)
assert all(a is b for a, b in zip(before[1:], after[1:]))
"""


def test_c21_where_nothing_was_ever_recorded_nothing_has_been_touched(device):
    ended = forked.run(_NEVER)
    assert ended.returncode == 0, ended.stderr


_NO_MODULES = """
import torch
import phonograph as pg
before, x, linear = {**vars(torch.nn.Module)}, torch.ones(3), torch.nn.Linear(3, 3)
def recorded(function):
    f = pg.record(function, keep="always")
    for _ in range(6):
        f(x)
    assert pg.stats(f).replayed == 5, pg.explain(f)
    return f
plain = recorded(lambda x: x * 2 + 1)
assert all(vars(torch.nn.Module)[name] is was for name, was in before.items())
of_module = recorded(lambda x: linear(x).detach())
assert vars(torch.nn.Module)["__setattr__"] is not before["__setattr__"]
"""


def test_c21_a_function_that_has_no_modules_leaves_those_of_others_alone():
    """To wrap what each module inherits takes as long as all else of a small function's first recording."""
    ended = forked.run(_NO_MODULES)
    assert ended.returncode == 0, ended.stderr


def test_c17_as_the_interpreter_ends_doors_stay_as_they_are():
    """Modules have been emptied when the last recordings go."""
    hung = []
    door, user = doors.Door(lambda: hung.append(True), hung.clear), torch.nn.Identity()
    door.stay_for(user)
    door._gone(weakref.ref(user), ending=lambda: True)
    assert hung
    door._gone(weakref.ref(user))
    assert not hung


@pytest.mark.filterwarnings("ignore:Using backward")
def test_c08_a_backward_outside_that_gives_other_gradients_is_heard(device):
    """With `create_graph`, autograd does not add to the gradient that is there: it puts another in its place, past Python."""

    def run(record):
        torch.manual_seed(0)
        net = nn.Sequential(*[nn.Linear(3, 3, device=device) for _ in range(6)])

        def step(x):
            net(x).square().sum().backward()

        called = record(step)
        for n in range(9):
            called(ramp(device, 2, 3, start=n) / 10)
            if n in (4, 6):
                net[n - 1](ramp(device, 2, 3) / 10).square().sum().backward(create_graph=True)  # two gradients of twelve
        found = [p.grad.detach().clone() for p in net.parameters()]
        net.zero_grad()  # their graphs refer to the parameters
        return called, found

    recorded, found = run(lambda step: pg.record(step, warmup=1, keep="always"))
    assert_same(found, run(lambda step: step)[1])
    assert pg.stats(recorded).replayed >= 3, pg.explain(recorded)


_FIRST = """
import sys
import torch
import phonograph as pg

class Counts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x):
        y = self.linear(x)
        self.total += y.detach().sum(0)  # which asks torch's class how an attribute is set
        return y

device = torch.device(sys.argv[1])
model = Counts().to(device)
f = pg.record(lambda x: model(x).detach(), keep="always")
for _ in range(6):
    f(torch.ones(2, 3, device=device))
print(pg.stats(f).recorded, [line for line in pg.explain(f).splitlines() if line.startswith("changed")])
"""


def test_c15_doors_are_no_change_of_torchs_classes_on_which_the_first_recording_relies(device):
    ended = forked.run(_FIRST, str(device), env={**os.environ, "PHONOGRAPH_CONSTANTS": "read"})
    assert ended.stdout.splitlines() == ["1 []"], (ended.stdout, ended.stderr)
