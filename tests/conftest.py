"""What every test gets: equal seeds before it, a clean house after it, and `device` for the contract suite."""

import functools
import gc
import itertools
import os
import random
import sys
import types

import pytest
import torch
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from phonograph.engine import budget
from phonograph.engine import profitability as paying
from phonograph.pytest_plugin import both_devices, device_or_skip  # noqa: F401 - a fixture is used by its name
from phonograph.python import read_gate
from phonograph.testing import cuda_required

pytest_plugins = ["pytester"]


def pytest_sessionstart(session: pytest.Session) -> None:
    torch.set_num_threads(1)  # the tensors are tiny, and machines are shared
    _seed_without_stacks()
    if not torch.cuda.is_available():  # a kernel or two, for which torch would start a process that imports all of it again
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def _seed_without_stacks() -> None:
    """`torch.manual_seed` formats the whole stack for each kind of device that is not there, in case that it should come: that
    took a fifth of the time of the tests."""
    for devices in (torch.cuda, torch.mtia, torch.xpu):
        devices.traceback = types.SimpleNamespace(format_stack=list)


def pytest_collection_finish(session: pytest.Session) -> None:
    torch.use_deterministic_algorithms(False)  # imports a large part of torch, which it would else do in some test
    out_of_sight.put()


class OutOfSight:
    """What the collection after each test need not walk through: it is there for good."""

    modules = tests = 0

    def put(self) -> None:
        gc.collect()
        gc.freeze()
        self.modules, self.tests = len(sys.modules), 0

    def keep(self) -> None:
        """To be called between tests: of what these have left, packages that they have imported are the most."""
        self.tests += 1
        if self.tests > 16 or len(sys.modules) > self.modules + 50:
            self.put()


out_of_sight = OutOfSight()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    out_of_sight.keep()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`-k cuda` chooses all tests that need a GPU: also those that run on nothing else. Where there is none, and none has to
    be, these are left out here: they are half of all, and to skip each takes its time."""
    for item in items:
        if "cuda" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.cuda)
    if not torch.cuda.is_available() and not cuda_required():
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("cuda")])
        items[:] = [item for item in items if not item.get_closest_marker("cuda")]


@pytest.fixture
def device(both_devices: torch.device) -> torch.device:  # noqa: F811
    """The device that a contract test runs on: once the CPU, once CUDA."""
    if both_devices.type == "cuda":
        _use_libraries()
    return both_devices


@functools.cache
def _use_libraries() -> None:
    """What a process uses for the first time is a live call more (cuBLAS, on this thread and on autograd's); a test that counts
    them need not know whether it is the first."""
    x = torch.ones(2, 2, device="cuda", requires_grad=True)
    (x @ x).sum().backward()


@pytest.fixture
def cuda() -> torch.device:
    """For the few promises that only a GPU can keep: its device, or no test."""
    return device_or_skip("cuda")


class Standstill(paying.Clock):
    """A clock by which no call takes any time: all recordings pay."""

    def times(self, took: paying.Took) -> tuple[float, float]:
        return 0.0, 0.0


@pytest.fixture(autouse=True)
def recordings_pay(monkeypatch):
    """Tests count recordings of functions that are tiny. Whether those are worth it would hang on the machine."""
    monkeypatch.setattr(paying, "clock", Standstill())


@pytest.fixture(autouse=True)
def attempts_are_free(monkeypatch):
    """Tests count captures, too. Whether there was time for one would hang on the machine."""
    monkeypatch.setattr(budget, "now", itertools.repeat(0.0).__next__)


@pytest.fixture(autouse=True)
def classes_are_gated():
    """However many tests have captured calls that work with modules."""
    read_gate.gated.clear()


@pytest.fixture(autouse=True)
def no_failures_of_our_own(caplog):
    """A failure of phonograph's own becomes a live call, and an error in the log: here it is a failed test."""
    yield
    assert [r.getMessage() for r in caplog.get_records("call") if r.name == "phonograph" and r.levelname == "ERROR"] == []


@pytest.fixture(autouse=True)
def equal_seeds_and_a_clean_house():
    """Seeds all generators; afterwards, process-wide state must be what it was (C12, over the whole suite)."""
    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    before = process_state()
    yield
    gc.collect()
    assert process_state() == before


def process_state() -> dict[str, object]:
    """What a recording changes while it runs and has to put back, whatever happens."""
    return {
        "gc enabled": gc.isenabled(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "dispatch modes": _len_torch_dispatch_stack(),
        "profile function": sys.getprofile(),
        "threads of autograd's": torch._C._is_multithreading_enabled(),
        "monitoring tools": [sys.monitoring.get_tool(i) for i in range(6)] if hasattr(sys, "monitoring") else [],
        "stream": torch.cuda.current_stream() if torch.cuda.is_available() else None,
    }
