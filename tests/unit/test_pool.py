"""What the pool says of the memory that recordings use."""

from contextlib import suppress

import torch

import phonograph as pg
from phonograph.devices import device_for
from tests.faults.injection import Functions


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


def test_rivals_are_storages_that_are_there_wherever_an_interrupt_comes():
    """They are asked by their addresses."""
    pool, met = device_for(torch.device("cpu")).pool, set[str]()
    for n in (*range(1, 40, 3), *(2**k for k in range(6, 20))):  # (others' recordings of the process are gone through as well)
        recorded = [pg.record(f, warmup=0) for f in (torch.sin, torch.cos, torch.tanh)]
        for each in recorded:
            for _ in range(2):
                each(torch.ones(1 << 16))  # more than is copied out
        with suppress(KeyboardInterrupt), Functions(n, KeyboardInterrupt) as fault:
            pool.remove(pool.recordings[0])
        there = {lease.cdata for lease in pool.leases}
        assert {rival[0] for r in pool.recordings for rival in r.rivals} <= there, fault.where
        met.add(fault.where)
        pool.sweep()
        for each in recorded:
            pg.reset(each)
        if not fault.where:
            break
    # From Python 3.12 on a comprehension is no function that starts.
    assert {"", "memory/pool.py:Pool.recordings", "memory/spans.py:Spans.meets"} <= met
