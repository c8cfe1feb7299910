"""What a capture on a GPU runs in the place of `torch.normal`, which looks at the deviations on the host."""

import pytest
import torch

from phonograph.devices.cuda.dispatch import _normal


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mean", ["as large", "a row", "turned", "a number", "of another type"])
def test_they_are_those_of_torch(dtype, mean):
    torch.manual_seed(0)
    std = torch.rand(7, 5).to(dtype)
    given = {
        "as large": torch.randn(7, 5).to(dtype),
        "a row": torch.randn(5).to(dtype),
        "turned": torch.randn(5, 7).to(dtype).t(),
        "a number": 0.3,
        "of another type": torch.randn(7, 5).double(),
    }[mean]
    torch.manual_seed(1)
    theirs = torch.normal(given, std)
    torch.manual_seed(1)
    ours = _normal(given, std)
    assert torch.equal(ours, theirs)
    assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())
