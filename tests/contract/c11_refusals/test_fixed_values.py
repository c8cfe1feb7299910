"""C8, C9, C11: numbers that the host reads of tensors which hold the same in each replay: made of numbers alone, or of what is
outside and the call does not write. Such a read is none: the call is recorded as it is, and no replay waits. Where what is outside
does change, that is noticed, whoever has written it."""

import copy

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import counts, may_run_live, ramp, reasons

pytestmark = may_run_live


class Holds(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.register_buffer("flag", torch.tensor(True, device=device))
        self.register_buffer("times", torch.linspace(0, 1, 4, device=device))
        self.scale = nn.Parameter(torch.tensor([2.0, 3.0], device=device))


def positions(x):
    return torch.arange(3, device=x.device)[None]


def counted(x):
    number = torch.zeros(3, dtype=torch.int64, device=x.device)
    number[1:] += 2
    number.mul_(3).view(3, 1)[0] = 1
    return x * int(number.sum())


def drawn_over(x):
    """What was drawn is none; what it was made of, is."""
    ones = torch.ones(2, device=x.device)
    noise = torch.rand(2, device=x.device) * ones
    return (x if ones.all() else -x) + noise.sum()


def times_rise(h):
    return all(a < b for a, b in zip(h.times[:-1], h.times[1:], strict=True))


READS = {
    "a flag": lambda x, h: x * 2 if h.flag.item() else x - 1,
    "a flag's truth": lambda x, h: x * 2 if h.flag else x - 1,
    "a list": lambda x, h: x.sum(torch.arange(x.dim(), device=x.device).tolist()),
    "bounds": lambda x, h: x * (2 if (torch.full((), 1.0, device=x.device) != 1.0).any() else 3),
    "times": lambda x, h: x * 2 if times_rise(h) else x,
    "a number to fill with": lambda x, h: x + torch.full((3,), h.times[1], device=x.device),
    "positions": lambda x, h: x if (torch.diff(positions(x), prepend=positions(x)[:, :1] - 1) == 1).all() else -x,
    "ones like it": lambda x, h: x * 2 if (torch.ones_like(x) == 1).all() else -x,
    "a mask": lambda x, h: x[torch.arange(3, device=x.device) > 0],
    "a mask of what is there": lambda x, h: x[(h.times[:3] > 0.5).nonzero()[:, 0]],
    "another comparison": lambda x, h: x * 2 if torch.equal(h.times, torch.linspace(0, 1, 4, device=x.device)) else -x,
    "a float": lambda x, h: x * float((h.times.sin() / 3)[1]),
    "an index": lambda x, h: x[torch.arange(3, device=x.device)[1]],
    "a size": lambda x, h: x.new_ones(int(torch.arange(4, device=x.device).sum())),
    "an array": lambda x, h: x * float(torch.arange(3, device=x.device).cpu().numpy()[1]),
    "written before": lambda x, h: counted(x),
    "a parameter": lambda x, h: x * h.scale[1].item(),
    "beside what is drawn": lambda x, h: drawn_over(x),
    "on its own device": lambda x, h: x * h.times.to("cpu")[1].item(),
}


@pytest.mark.parametrize("fallback", ["live", "split"])
@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_c11_a_number_of_what_holds_the_same_in_each_replay(device, read, inference, fallback):
    h, results = Holds(device), []
    for f in (lambda x: read(x, h), pg.record(lambda x: read(x, h), fallback=fallback)):
        torch.manual_seed(0)
        with torch.inference_mode(inference):
            results.append([f(ramp(device, 3, start=i)) for i in range(6)])
    assert_same(results[1], results[0])
    assert counts(f) == (1, 1, 5), reasons(f)
    assert not pg.stats(f).refusals
    assert pg.stats(f).steps == 1
