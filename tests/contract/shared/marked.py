"""`@pg.live` in a recorded function: it runs once in each call, between the segments of the recording."""

import torch

import phonograph as pg
from tests.helpers import counts, side_by_side


def ramp(device, *shape, start=0.0):
    n = torch.Size(shape).numel()
    return torch.arange(start, start + n, device=device).reshape(shape) / 8


def split(make, **options):
    return side_by_side(make, **options)


def reasons(both):
    return " ".join(pg.stats(both.recorded).refusals)


def run(both, device, calls=6, size=6):
    for n in range(calls):
        both(ramp(device, size, start=n))


def assert_split(both, calls=6):
    """All calls but the first were replayed."""
    assert counts(both) == (1, 1, calls - 1), pg.explain(both.recorded)


# What a marked function may do besides: each call, or in one of them for the first time.


def _nothing(*_):
    """Of an expression, in a lambda."""
