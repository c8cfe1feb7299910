"""What it costs to make a recording, in counts: what was worked out once is not worked out again."""

import contextlib
import dis
import gc
import importlib
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.call import live_function as marked
from phonograph.engine.current_capture import recording_here
from phonograph.guards import reachable as reach
from phonograph.python import names_in_code as mentions
from phonograph.python import origin as where
from phonograph.reads.readset import ReadSet
from tests.helpers import may_run_live


def program(device):
    """A training step of its own objects, whose code is the same each time."""
    model = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(4, 4), nn.Tanh()))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return pg.record(step)


class Net(nn.Module):
    """One of the user's classes."""

    def __init__(self):
        super().__init__()
        self.layers, self.scale = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), 0.5

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return x


def of_a_class(device):
    model = Net().to(device)
    return pg.record(lambda x: model(x).sum())


@pytest.mark.parametrize("make", [program, of_a_class], ids=["a step", "a class"])
def test_c09_code_is_read_once(device, make, monkeypatch):
    first = make(device)
    for _ in range(2):
        first(torch.ones(2, 4, device=device))
    read = []
    monkeypatch.setattr(dis, "get_instructions", lambda code, **k: read.append(code))
    second = make(device)
    for _ in range(3):
        second(torch.ones(2, 4, device=device))
    assert pg.stats(second).recorded == 1
    assert not read


@pytest.mark.parametrize("make", [program, of_a_class], ids=["a step", "a class"])
def test_c09_what_checks_is_compiled_once_a_shape(device, make):
    for _ in range(2):
        compiled = where._code_of.cache_info().misses
        recorded = make(device)
        for _ in range(3):
            recorded(torch.ones(2, 4, device=device))
        assert pg.stats(recorded).recorded == 1
    assert where._code_of.cache_info().misses == compiled


def test_c09_what_is_in_reach_is_walked_through_once(device, monkeypatch):
    """On a GPU, a second time: where the first call runs depends on it."""
    monkeypatch.setattr(marked.Marked, "any_made", False)
    walks = []
    made = reach.Reach.__init__
    monkeypatch.setattr(reach.Reach, "__init__", lambda self, *args: (walks.append(args), made(self, *args))[1])
    recorded = program(device)
    for _ in range(4):
        recorded(torch.ones(2, 4, device=device))
    assert (pg.stats(recorded).recorded, pg.stats(recorded).replayed) == (1, 3)
    assert len(walks) == (1 if device.type == "cpu" and not torch.cuda.is_initialized() else 2)


def test_c09_no_garbage_is_looked_for_in_a_recording(device):
    """The first one of a process would have it look through all that was imported before."""
    found = []

    def collecting(phase, info):
        found.append(phase == "start" and recording_here())

    recorded, x = program(device), torch.ones(2, 4, device=device)
    recorded(x)
    before = gc.get_threshold()
    gc.callbacks.append(collecting)
    gc.set_threshold(20)
    try:
        recorded(x)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(collecting)
    assert pg.stats(recorded).recorded == 1
    assert found
    assert not any(found)


LARGE = "\n".join(["import torch", "RATE = 2.0", "def rate(): return RATE", "def f(x): return torch.tanh(x) * rate()",
                   *(f"def g{i}(x): return g{i + 1}(x) if {i} else x" for i in range(300)),
                   *(f"class K{i}:\n    def f(self, x): return self.f(g{i}(x))" for i in range(100))])  # fmt: skip


def laid(root, how, name):
    """A large package, as pip lays it where it is told to, or as a checkout. Returns what has to be on the path."""
    place = root / {"site-packages": "site-packages", "a target": "target", "a checkout": "checkout/src"}[how]
    (place / name).mkdir(parents=True)
    (place / name / "__init__.py").write_text(LARGE)
    if how == "a target":
        (place / f"{name}-1.0.dist-info").mkdir()
        (place / f"{name}-1.0.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (place / f"{name}-1.0.dist-info" / "RECORD").write_text(f"{name}/__init__.py,,\n")
    elif how == "a checkout":
        (root / "checkout" / "pyproject.toml").write_text("")
    return place


@pytest.mark.parametrize("how", ["site-packages", "a target", "a checkout"])
def test_c09_a_package_is_one_wherever_it_lies(device, tmp_path, monkeypatch, how):
    """Its code is not searched, and what it reads is noticed."""
    name = f"large_{how.replace(' ', '_').replace('-', '_')}_{device.type}"
    monkeypatch.syspath_prepend(str(laid(tmp_path, how, name)))
    package = importlib.import_module(name)
    read, add = [], mentions.Mentions.add
    monkeypatch.setattr(mentions.Mentions, "add", lambda self, code, name: (read.append(code), add(self, code, name))[1])
    recorded = pg.record(lambda x: package.f(x) + 1)
    x = torch.ones(3, device=device)
    for _ in range(3):
        recorded(x)
    assert pg.stats(recorded).replayed == 2
    assert {code.co_name for code in read} == {"<lambda>"}
    package.RATE = 3.0
    assert torch.equal(recorded(x), torch.tanh(x) * 3 + 1)


@may_run_live
def test_c09_what_was_not_heard_is_not_recorded(device, tmp_path, monkeypatch):
    """Only the next call is, and what that reads is noticed."""
    name = f"unheard_{device.type}"
    monkeypatch.syspath_prepend(str(laid(tmp_path, "site-packages", name)))
    package = importlib.import_module(name)
    recorded = pg.record(lambda x: package.f(x) + 1)
    x = torch.ones(3, device=device)
    recorded(x)
    with noting_elsewhere():
        recorded(x)
    assert pg.stats(recorded).recorded == 0
    recorded(x)
    assert pg.stats(recorded).recorded == 1
    package.RATE = 3.0
    assert torch.equal(recorded(x), torch.tanh(x) * 3 + 1)


@contextlib.contextmanager
def noting_elsewhere():
    """Another thread notes what it reads, while the block runs."""
    begun, ends = threading.Event(), threading.Event()

    def note():
        with ReadSet().noting():
            begun.set()
            ends.wait()

    thread = threading.Thread(target=note)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        ends.set()
        thread.join()


ALONE = """
import torch, phonograph as pg
from torch import nn
taken, snapshot = [], torch.cuda.memory_snapshot
torch.cuda.memory_snapshot = lambda *pools: (taken.append(pools), snapshot(*pools))[1]
model = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(8, 8), nn.Tanh()))).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
@pg.record
def step(x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()
x = torch.ones(4, 8, device="cuda")
step(x)
before = len(taken)
step(x)
asked = len(taken) - before  # `stats` asks as well, for the bytes of the pool
assert pg.stats(step).recorded == 1
print(asked)
"""


@pytest.mark.cuda
def test_c09_the_allocator_is_asked_three_times_for_a_recording(cuda):
    """In a process of its own: where a pool has to grow, or others have left something in it, there is more to ask."""
    said = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True)
    assert int(said.stdout) <= 3
