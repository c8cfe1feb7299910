"""What the pool says of the memory that recordings use."""

import torch

import phonograph as pg
from phonograph.devices import device_for


def test_memory_that_a_borrowed_argument_lay_in_stays_taken_when_its_owner_goes():
    """The next argument is copied to the same place, where by then nothing that lives long may lie."""
    pool = device_for(torch.device("cpu")).pool
    first = pg.record(lambda x: x * 2, warmup=0)
    second = pg.record(lambda y: y + 1, warmup=0)
    x = torch.ones(1 << 16)  # more than is copied out
    for _ in range(3):
        between = first(x)
        second(between)
    place = (between.data_ptr(), between.nbytes)
    assert pool.lease_of(between) is not None
    del between
    pg.reset(first)
    assert pool.footprints().meets(*place)
    pg.reset(second)
    assert not pool.footprints().meets(*place)
