"""Graphs with their true edges only, wherever one can be made, however slow it is; one that gives another result is an error.

    PYTHONPATH=src python -m pytest -p phonograph.pytest_plugin -p tests.true_edges -k cuda tests \\
        --ignore=tests/contract/c01_results/test_true_edges.py

The checker has no say in what nodes touch. Programs that differ to the bit where nodes run at the same time tell of that.
"""

from collections import Counter
from dataclasses import replace

from phonograph.devices.base import Captured, CapturePlan
from phonograph.devices.cuda import laned
from phonograph.devices.cuda.device import CudaDevice
from phonograph.devices.cuda.laned import LanedProgram, Order, Trial

came_to = Counter[str]()
"""What became of programs that were tried."""
_capture, _best = CudaDevice.capture, LanedProgram._best


def capture(self: CudaDevice, plan: CapturePlan) -> Captured:
    return _capture(self, replace(plan, true_edges=True))


def best(self: LanedProgram, order: Order, trial: Trial) -> str:
    found = _best(self, order, trial)
    came_to[found.partition(":")[0]] += 1
    assert "differ" not in found, found
    return found


def pytest_terminal_summary(terminalreporter: object) -> None:
    terminalreporter.write_line(f"edges: {dict(came_to)}")  # type: ignore[attr-defined]


CudaDevice.capture = capture  # type: ignore[method-assign]
LanedProgram._best = best  # type: ignore[method-assign]
laned.LANES, laned._RUNS, laned._NOISE, laned._SHORTER = (3, 8), 2, 1e-9, 1.01  # type: ignore[assignment]
