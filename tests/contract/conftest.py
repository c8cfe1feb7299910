"""Results of a few bytes are copied out by each replay, larger ones lie in the recording's own memory. The clauses about held
results and shared memory are tested both ways, on tensors of a few bytes."""

import importlib.util

import pytest

from phonograph.engine import recorder

BOTH_WAYS = ("test_c05_", "test_c06_results_that_are_", "test_c12_", "test_c15_", "test_c18_")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.name.startswith(BOTH_WAYS):
        metafunc.fixturenames.append("results_are")
        metafunc.parametrize("results_are", ["copied", "leased"], indirect=True)


@pytest.fixture
def results_are(request, monkeypatch) -> str:
    """How small results are handed out in this test."""
    if request.param == "leased":
        monkeypatch.setattr(recorder, "SMALL", 0)
    return request.param


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
