"""What tests of replaced state share."""

import importlib.util

import pytest


@pytest.fixture
def mesh(device):
    """A process group of one process."""
    dist = pytest.importorskip("torch.distributed")
    if not dist.is_available() or importlib.util.find_spec("torch.distributed.tensor") is None:
        pytest.skip("torch has no distributed tensors")
    from torch.distributed.tensor import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh(device.type, (1,))
    finally:
        dist.destroy_process_group()
