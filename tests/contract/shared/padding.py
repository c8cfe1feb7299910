"""`shapes=`: sizes between those that are recorded are padded, where that changes nothing but the size."""

import pytest
import torch
from torch import nn

from phonograph.testing import assert_same

SIZES = [1, 2, 4, 8]


ROWS = {"x": {0: SIZES}}


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def layer(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(device)


def check(ours, theirs, *args, **kwargs):
    """A call of each gives the same, in all that can be seen."""
    assert_same(ours(*args, **kwargs), theirs(*args, **kwargs), tolerance=1e-4)
