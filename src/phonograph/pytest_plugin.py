"""What phonograph adds to pytest: the `both_devices` fixture. Loaded through the `pytest11` entry point.

torch is imported when the fixture is first used and not before: pytest loads this file in every
project of an environment that has phonograph in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def both_devices(request: pytest.FixtureRequest) -> torch.device:
    """Runs the test once on the CPU device and once on CUDA; gives the `torch.device`.

    Without a GPU the CUDA run is skipped, or fails where `PHONOGRAPH_REQUIRE_CUDA=1` says that there
    must be one.
    """
    return device_or_skip(request.param)


def device_or_skip(kind: str) -> torch.device:
    """The machine's device of this kind (`"cpu"`, `"cuda"`); without one, skips or fails the running test."""
    from phonograph.testing import cuda_required, devices

    for device in devices():
        if device.type == kind:
            return device
    if cuda_required():
        pytest.fail(f"PHONOGRAPH_REQUIRE_CUDA is set and torch sees no {kind} device")
    pytest.skip(f"torch sees no {kind} device")


def pytest_configure(config: pytest.Config) -> None:
    """Registers the `cuda` mark, which `both_devices` puts on its CUDA runs."""
    config.addinivalue_line("markers", "cuda: needs an NVIDIA GPU")
