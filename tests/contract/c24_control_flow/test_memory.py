"""C24, C15: the peak of a branch is that of its worst path. A body's memory is the next one's."""

import functools
import re

import pytest
import torch

import phonograph as pg
from tests.helpers import counts, ramp, reasons


def heavy(n):
    """A function with many tensors at a time."""

    def f(x):
        return functools.reduce(torch.add, [(x + i).sin() for i in range(n)])

    return f


# With how many tensors stay meanwhile: a result for each level, a state from turn to turn.
WAYS = {
    "branch": (lambda x, p: pg.cond(p > 0, heavy(16), heavy(15), x), 1),
    "switch": (lambda x, p: pg.switch(p.long(), [heavy(16), heavy(15), heavy(14), heavy(3)], x), 1),
    "loop": (lambda x, p: pg.repeat(9, heavy(16), x), 2),
    "nested": (lambda x, p: pg.cond(p > 0, heavy(16), lambda x: pg.cond(p > -1, heavy(15), heavy(16), x), x), 2),
}


def footprint(function, x, p):
    f = pg.record(function, keep="always")
    for _ in range(3):
        f(x, p)
    assert counts(f) == (1, 1, 2), reasons(f)
    (found,) = re.findall(r"footprint: ([\d.]+) MiB", str(pg.explain(f)))
    pg.reset(f)
    return float(found)


@pytest.mark.parametrize("way", WAYS)
def test_c24_the_peak_is_that_of_the_worst_path(device, way):
    x, p = ramp(device, 1 << 17), torch.ones((), device=device)
    plain = footprint(lambda x, p: heavy(16)(x), x, p)
    function, stay = WAYS[way]
    assert footprint(function, x, p) <= 1.05 * plain + stay * x.nbytes / 2**20
