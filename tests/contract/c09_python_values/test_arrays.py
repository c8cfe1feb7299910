"""C9, C10: NumPy's arrays that a function can reach, or is given: tables, noise schedules."""

import pytest
import torch

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import counts, may_run_live, plain, ramp, reasons

np = pytest.importorskip("numpy")

READS = {
    "an item": lambda x, table: x * float(table[3]),
    "a sum": lambda x, table: x * float(table.sum()),
    "its length": lambda x, table: x * len(table),
    "an item as it is": lambda x, table: x * table[3].item(),
}


class Schedule:
    def __init__(self, n):
        self.table = np.linspace(0.1, 1.0, n)


@pytest.mark.parametrize("n", [10, 1000, 8000, 50_000, 300_000])
@pytest.mark.parametrize("read", READS.values(), ids=list(READS))
def test_c09_an_array_in_reach_is_looked_at(device, read, n):
    schedule = Schedule(n)
    recorded = pg.record(lambda x: read(x, schedule.table))
    for i in range(6):
        x = ramp(device, 3) + i
        assert_same(recorded(x), read(x, schedule.table))
    assert counts(recorded) == (1, 1, 5), pg.explain(recorded)
    schedule.table = schedule.table * 2  # another array
    for i in range(4):
        x = ramp(device, 3) + i
        assert_same(recorded(x), read(x, schedule.table))
    schedule.table[:] = schedule.table + 1  # and what is in it
    looks = schedule.table.nbytes // (64 << 10) + 2
    for i in range(looks):
        recorded(ramp(device, 3) + i)
    x = ramp(device, 3)
    assert_same(recorded(x), read(x, schedule.table))


class Names:
    """As a fitted scaler has them."""

    def __init__(self, *names):
        self.names = np.empty(len(names), dtype=object)
        for i, name in enumerate(names):  # NumPy would take a tensor for an array
            self.names[i] = name


@pytest.mark.parametrize("frozen", [False, True])
def test_c09_an_array_of_objects_is_looked_at_as_a_list_is(device, frozen):
    scaler = Names("t", 2.0, None)
    scaler.names.setflags(write=not frozen)
    recorded = pg.record(lambda x: x * float(scaler.names[1]))
    for i in range(6):
        x = ramp(device, 3) + i
        assert_same(recorded(x), x * 2)
    assert counts(recorded) == (1, 1, 5), pg.explain(recorded)
    if frozen:
        scaler.names = np.array(["t", 3.0, None], dtype=object)
    else:
        scaler.names[1] = 3.0
    for i in range(6):
        x = ramp(device, 3) + i
        assert_same(recorded(x), x * 3)
    assert counts(recorded)[2] >= 8, pg.explain(recorded)


def test_c09_what_lies_in_an_array_of_objects_is_reached(device):
    scaler = Names({"by": 2.0}, torch.ones(3, device=device), Schedule(4))
    recorded = pg.record(lambda x: x * scaler.names[0]["by"] * scaler.names[1] * float(scaler.names[2].table[0]))
    for i in range(15):
        if i % 5 == 3:
            scaler.names[0]["by"] += 1
            scaler.names[1].mul_(2)
            scaler.names[2].table[0] += 1
        x = ramp(device, 3) + i
        assert_same(recorded(x), x * scaler.names[0]["by"] * scaler.names[1] * float(scaler.names[2].table[0]))
    assert counts(recorded)[2] >= 5, pg.explain(recorded)


@may_run_live
def test_c09_an_array_of_objects_that_the_call_writes_is_an_effect(device):
    scaler = Names(0.0, [1])

    def f(x):
        scaler.names[0] = scaler.names[0] + 1
        return x * scaler.names[0]

    recorded = pg.record(f)
    for i in range(6):
        assert_same(recorded(ramp(device, 3)), ramp(device, 3) * (i + 1))
        assert scaler.names[0] == i + 1
        assert scaler.names[1] == [1]


@pytest.mark.parametrize("n", [10, 8000])
def test_c09_what_changes_in_an_array_is_noticed_before_the_next_replay(device, n):
    schedule = Schedule(n)
    recorded = pg.record(lambda x: x * float(schedule.table[n // 2]))
    for i in range(12):
        if i % 4 == 3:
            schedule.table[n // 2] += 1
        x = ramp(device, 3) + i
        assert_same(recorded(x), x * float(schedule.table[n // 2]))
    assert counts(recorded)[2] >= 4


@may_run_live
@pytest.mark.parametrize("n", [10, 1000, 50_000])
def test_c09_an_array_that_the_call_writes_is_an_effect(device, n):
    schedule = Schedule(n)

    def f(x):
        schedule.table[-1] += 1
        return x * float(schedule.table[-1])

    recorded = pg.record(f)
    for i in range(6):
        before = float(schedule.table[-1])
        assert_same(recorded(ramp(device, 3) + i), (ramp(device, 3) + i) * (before + 1))
        assert schedule.table[-1] == before + 1
    assert "changes schedule.table" in reasons(recorded)


def test_c09_a_frozen_array_may_be_of_any_size(device):
    schedule = Schedule(10_000_000)
    schedule.table.setflags(write=False)
    recorded = pg.record(lambda x: x * float(schedule.table[7]))
    for i in range(4):
        x = ramp(device, 3) + i
        assert_same(recorded(x), x * float(schedule.table[7]))
    assert counts(recorded)[2] == 3


@may_run_live
def test_c11_a_very_large_array_is_refused_with_what_to_do(device):
    schedule = Schedule(10_000_000)
    recorded = pg.record(lambda x: x * float(schedule.table[7]))
    for i in range(3):
        x = ramp(device, 3) + i
        assert_same(recorded(x), x * float(schedule.table[7]))
    assert "uses an array (schedule.table)" in reasons(recorded)
    assert "setflags(write=False)" in reasons(recorded)


def test_c07_a_small_array_as_an_argument_counts_by_what_is_in_it(device):
    both = plain(lambda x, table: x * float(table[1]))
    for i in range(12):
        both(ramp(device, 3) + i, np.arange(4.0) + i % 2)
    assert counts(both) == (2, 2, 10), pg.explain(both.recorded)


@may_run_live
def test_c18_an_array_that_is_another_in_each_call_is_refused(device):
    recorded = pg.record(lambda x, table: x * float(table[1]))
    for i in range(14):
        x = ramp(device, 3) + i
        assert_same(recorded(x, np.arange(4.0) + i), x * (1.0 + i))
    assert "takes a numpy.ndarray with other values nearly each time as `table`" in reasons(recorded)


@may_run_live
def test_c04_an_array_as_a_result_is_no_constant(device):
    recorded = pg.record(lambda x: (x * 2, np.zeros(3)))
    first = recorded(ramp(device, 3))[1]
    for _ in range(4):
        found = recorded(ramp(device, 3))[1]
        assert found is not first
        found += 1
        assert first.sum() == 0
    assert torch.is_tensor(recorded(ramp(device, 3))[0])
