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
    from phonograph.testing import cuda_required, devices

    found = {device.type: device for device in devices()}
    if request.param in found:
        return found[request.param]
    if cuda_required():
        pytest.fail("PHONOGRAPH_REQUIRE_CUDA is set and torch sees no CUDA device")
    pytest.skip("torch sees no CUDA device")


def pytest_configure(config: pytest.Config) -> None:
    """Registers the `cuda` mark, which `both_devices` puts on its CUDA runs."""
    config.addinivalue_line("markers", "cuda: needs an NVIDIA GPU")
