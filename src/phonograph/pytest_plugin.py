"""What phonograph adds to pytest: the `both_devices` fixture. Loaded through the `pytest11` entry point.

torch is imported when the fixture is first used and not before: pytest loads this file in every
project of an environment that has phonograph in it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def both_devices(request: pytest.FixtureRequest) -> torch.device:
    """Runs the test once on the CPU device and once on CUDA; gives the `torch.device`.

    Without a GPU the CUDA run is skipped, or fails where `PHONOGRAPH_REQUIRE_CUDA=1` says that there
    must be one. With `PHONOGRAPH_TEST_DEVICE=cuda` it gets the GPU by the name that most programs
    have for it, without an index.
    """
    return device_or_skip(request.param)


def device_or_skip(kind: str) -> torch.device:
    """The machine's device of this kind (`"cpu"`, `"cuda"`); without one, skips or fails the running test."""
    from phonograph.testing import cuda_required, devices

    for device in devices():
        if device.type == kind:
            return as_wanted(device)
    if cuda_required():
        pytest.fail(f"PHONOGRAPH_REQUIRE_CUDA is set and torch sees no {kind} device")
    pytest.skip(f"torch sees no {kind} device")


def as_wanted(device: torch.device) -> torch.device:
    """The same device by the name that `PHONOGRAPH_TEST_DEVICE` has for it, if it is that."""
    name = os.environ.get("PHONOGRAPH_TEST_DEVICE", "")
    return type(device)(name) if name.partition(":")[0] == device.type else device


def pytest_configure(config: pytest.Config) -> None:
    """Registers the `cuda` mark, which `both_devices` puts on its CUDA runs."""
    config.addinivalue_line("markers", "cuda: needs an NVIDIA GPU")
